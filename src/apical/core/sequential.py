"""`apical.Parallel`, and the network that splits an `nn.Sequential` into layers of weights, or refuses it."""

import re
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from apical.core.activation import RANDOM, Neuron, Noise, Pullback
from apical.core.advice import warn_of_module
from apical.core.modules import FORWARDS, change_attributes
from apical.core.network import Layer, Network, Params, Shapes, Tier, Trace
from apical.core.registry import describe_general_rules
from apical.core.synapse import Dense, read_synapse
from apical.core.wiring import get_plain_class
from apical.errors import ApicalError, UnsupportedError

NamedModule = tuple[str, nn.Module]
_RANDOM_MODULES = (nn.modules.dropout._DropoutNd, nn.RReLU, nn.FractionalMaxPool2d, nn.FractionalMaxPool3d)


class Parallel(nn.ModuleList):
    """Branches that get the same input; their outputs are concatenated along dimension 1.

    A branch is a Linear, Conv1d or Conv2d, or an `nn.Sequential` that starts with one and goes on with modules
    without parameters (activation, pooling over time, Flatten). The branches act as one layer: the error at their
    input is the sum of the errors that they carry down.

    >>> branches = [nn.Sequential(nn.Conv1d(5, 4, k), nn.ReLU(), nn.AdaptiveMaxPool1d(1)) for k in (2, 3)]
    >>> model = nn.Sequential(Parallel(*branches), nn.Flatten(), nn.Linear(8, 2))
    >>> model(torch.randn(7, 5, 9)).shape
    torch.Size([7, 2])
    """

    def __init__(self, *branches: nn.Module) -> None:
        if not branches:
            raise ApicalError("a Parallel needs at least one branch, such as nn.Conv1d(100, 100, 3).")
        for branch in branches:
            if not isinstance(branch, nn.Module):
                raise UnsupportedError(
                    f"a branch of a Parallel is a {type(branch).__name__}; modules, given one by one, work."
                )
        super().__init__(branches)

    def forward(self, x: Tensor) -> Tensor:
        return join_outputs([branch(x) for branch in self])


def join_outputs(parts: Sequence[Tensor]) -> Tensor:
    """Concatenate the branches' outputs along dimension 1. Raises ApicalError if their other sizes differ."""
    shapes = [part.shape for part in parts]
    if any(len(s) < 2 or (s[0], s[2:]) != (shapes[0][0], shapes[0][2:]) for s in shapes):
        raise ApicalError(
            f"the branches of a Parallel give {', '.join(str(tuple(s)) for s in shapes)}, which cannot be joined along "
            "dimension 1; let all other sizes agree, as they do after nn.AdaptiveMaxPool1d(1) or nn.Flatten()."
        )
    return torch.cat(list(parts), 1)


class SequentialNetwork(Network):
    """An `nn.Sequential` as a list of layers; `root` is the model's name inside the learner.

    >>> network = SequentialNetwork(nn.Sequential(nn.Flatten(), nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)))
    >>> [layer.weight for layer in network.layers]
    ['model.1.weight', 'model.3.weight']
    """

    def __init__(self, model: nn.Sequential, root: str = "model") -> None:
        prefix, tiers = _read_model(model, root)
        super().__init__(prefix, tiers, width=len(tiers[0].layers))
        self._shapes: dict[torch.Size, Shapes] = {}

    def forget_shapes(self) -> None:
        self._shapes.clear()

    def check_input(self, x: Tensor) -> None:
        if not x.is_floating_point():
            raise UnsupportedError(
                f"the input is {x.dtype}, which an apical.Elman alone takes; an nn.Sequential takes x.float()."
            )

    def forward(self, params: Params, x: Tensor, noise: Noise, bottom: int = 0) -> Trace:
        u, splits = self.prefix(x, noise), {}
        inputs: list[Tensor] = []
        pullbacks: list[Pullback | None] = []
        for tier in self.tiers:
            inputs += [u] * len(tier.layers)
            if tier.last < bottom:
                u = tier(params, u, noise)
                pullbacks += [None] * len(tier.layers)
            else:
                u, own, splits[tier.first] = tier.vjp(params, u, noise)
                pullbacks += own
        return Trace(inputs, pullbacks, u, splits)

    def predict(self, params: Params, x: Tensor, noise: Noise) -> Tensor:
        u = self.prefix(x, noise)
        for tier in self.tiers:
            u = tier(params, u, noise)
        return u

    def shapes(self, input_shape: torch.Size | tuple[int, ...] | None = None) -> Shapes:
        """Return the shapes inside the network for an input of this shape (without the batch).

        Without a shape, the input of a network that starts with a Linear is that layer's number of features.
        """
        if input_shape is None:
            first = self.layers[0].synapse
            if not isinstance(first, Dense):
                sides = ("height", "width")[-first.dims :]
                raise ApicalError(
                    f"layer {self.layers[0].name} is a convolution, so sizes follow from the input: "
                    f"pass input_shape=({', '.join(('channels', *sides))})."
                )
            return self._compute_shapes(torch.Size([first.in_features]), after_prefix=True)
        key = torch.Size(input_shape)
        if key not in self._shapes:
            self._shapes[key] = self._compute_shapes(key)
        return self._shapes[key]

    def _compute_shapes(self, shape: torch.Size, after_prefix: bool = False) -> Shapes:
        """Run the network on a meta tensor and record the shapes. Raises ApicalError for an input that does not fit."""
        shapes = Shapes([], [], {}, torch.Size())
        u = torch.empty((2, *shape), device="meta")
        if not after_prefix:
            u = _run_on_meta(self.prefix, u, shapes.noise)
        for tier in self.tiers:
            outputs = []
            for layer in tier.layers.values():
                drive = _compute_meta_drive(layer, u)
                shapes.inputs.append(u.shape[1:])
                shapes.drives.append(drive.shape[1:])
                outputs.append(_run_on_meta(layer.neuron, drive, shapes.noise))
            u = outputs[0] if len(outputs) == 1 else _run_on_meta(tier.after, join_outputs(outputs), shapes.noise)
        return shapes._replace(output=u.shape[1:])


def _run_on_meta(neuron: Neuron, a: Tensor, noise: dict[str, torch.Size]) -> Tensor:
    """Run φ on a meta tensor and record the shape of the noise that it needs. Raises ApicalError for a misfit."""
    for stage in neuron.stages:
        if type(stage.module) in RANDOM:
            noise[stage.name] = torch.Size(RANDOM[type(stage.module)].noise_shape(a.shape)[1:])
        batch = a.shape[0]
        try:
            out = _call_without_hooks(stage.module, a)
        except (RuntimeError, ValueError, IndexError, TypeError) as error:
            if re.search("meta tensor|register_meta|meta device type", str(error)):
                raise UnsupportedError(
                    f"module {stage.name} ({_describe_module(stage.module)}) decides by the values of its input, as `if` "
                    "and `.item()` do, which no rule here can follow; torch.where works."
                ) from error
            if "expected device meta" in str(error):
                raise UnsupportedError(
                    f"module {stage.name} ({_describe_module(stage.module)}) computes with a tensor that is not made from "
                    f"its input, which this rule cannot follow; register it as a buffer: {describe_general_rules()}."
                ) from error
            raise _make_misfit_error(stage.name, _describe_module(stage.module), a, str(error)) from error
        if not isinstance(out, Tensor) or out.ndim == 0 or out.shape[0] != batch:
            raise UnsupportedError(
                f"module {stage.name} ({_describe_module(stage.module)}) does not return one tensor with the batch "
                "first; only modules that keep the batch dimension can stand between weights."
            )
        warn_of_module(stage.name, stage.module, a.shape[1:], partial(_call_without_hooks, stage.module))
        a = out
    return a


def _call_without_hooks(module: nn.Module, a: Tensor, training: bool = False) -> Any:
    """Call a module out of place, by default in evaluation mode, without its hooks, which would see a meta tensor."""
    changes = {"_forward_hooks": {}, "_forward_pre_hooks": {}, "inplace": False, "training": training}
    with ExitStack() as stack:
        for inner in module.modules():
            stack.enter_context(change_attributes(inner, **changes))
        return module(a)


def _compute_meta_drive(layer: Layer, u: Tensor) -> Tensor:
    """Return the layer's drive as a meta tensor. Raises ApicalError if the input does not fit."""
    wrong = layer.synapse.describe_mismatch(u.shape)
    if wrong is not None:
        raise _make_misfit_error(layer.name, layer.synapse, u, wrong)
    try:
        return layer.synapse.forward(torch.empty(layer.synapse.weight_shape, device="meta"), u)
    except RuntimeError as error:
        raise _make_misfit_error(layer.name, layer.synapse, u, str(error)) from error


def _make_misfit_error(name: str, what: object, u: Tensor, why: str) -> ApicalError:
    """Return the error for an input that a module cannot take."""
    shape, why = ", ".join(map(str, u.shape[1:])), " ".join(why.split())
    return ApicalError(f"layer {name} ({what}) cannot take an input of shape (batch, {shape}): {why}")


def _read_model(model: nn.Module, root: str) -> tuple[Neuron, list[Tier]]:
    """Split a model into the modules before its first weights and a list of tiers. Raises UnsupportedError."""
    if not isinstance(model, nn.Sequential):
        raise UnsupportedError(
            f"the model is a {type(model).__name__}; an nn.Sequential of Linear, Conv1d, Conv2d and modules "
            "without parameters, or an apical.Elman, works."
        )
    groups: list[list[NamedModule]] = [[]]  # the prefix; then weights or a Parallel, and the modules that follow
    for name, module in _list_modules("the model", model):
        if isinstance(module, Parallel) or _has_weights(module, name):
            groups.append([])
        groups[-1].append((name, module))
    prefix, *others = groups
    if not others:
        raise UnsupportedError("the model has no weights to train; it needs at least one Linear, Conv1d or Conv2d.")
    tiers: list[Tier] = []
    for (name, module), *stages in others:
        tiers.append(_read_tier(root, name, module, stages, first=tiers[-1].last + 1 if tiers else 0))
    _refuse_sharing(model)
    return Neuron(prefix), tiers


def _read_tier(root: str, name: str, module: nn.Module, stages: list[NamedModule], first: int) -> Tier:
    """Build the tier of a layer of weights or of a `Parallel`, which the modules `stages` follow."""
    branches = _read_parallel(name, module) if isinstance(module, Parallel) else [[(name, module)]]
    if len(branches) == 1:  # the modules that follow belong to the φ of the one layer
        branches, stages = [branches[0] + stages], []
    layers = {i: _make_layer(root, branch) for i, branch in enumerate(branches, start=first)}
    return Tier(name, layers, Neuron(stages), first, first + len(layers) - 1)


def _make_layer(root: str, branch: list[NamedModule]) -> Layer:
    """Build the layer of a module with weights and of the modules after it."""
    (name, module), *stages = branch
    synapse = read_synapse(module, name)
    assert synapse is not None
    bias = None if module.bias is None else f"{root}.{name}.bias"
    return Layer(name, synapse, f"{root}.{name}.weight", bias, Neuron(stages))


def _read_parallel(name: str, module: Parallel) -> list[list[NamedModule]]:
    """Return the modules of each branch, the one with weights first. Anything else is refused."""
    if type(module).forward is not Parallel.forward:
        raise UnsupportedError(
            f"{name} ({type(module).__name__}) has a forward of its own, which apical would not run; a plain "
            "apical.Parallel works."
        )
    branches = []
    for i, branch in enumerate(module):
        where = f"{name}.{i}"
        leaves = _list_modules(where, branch, f"{where}.") if isinstance(branch, nn.Sequential) else [(where, branch)]
        _check_branch(where, leaves)
        branches.append(leaves)
    return branches


def _check_branch(name: str, leaves: list[NamedModule]) -> None:
    """Check that a branch has one module with weights, at its start."""
    for place, leaf in leaves:
        if isinstance(leaf, Parallel):
            raise UnsupportedError(
                f"{place} is a Parallel inside a Parallel, which apical does not read; list all branches in one Parallel."
            )
    weighted = [_has_weights(leaf, place) for place, leaf in leaves]
    if sum(weighted) != 1:
        raise UnsupportedError(
            f"branch {name} of a Parallel has {sum(weighted)} layers of weights; a branch with one Linear, Conv1d or "
            "Conv2d works."
        )
    if not weighted[0]:
        raise UnsupportedError(
            f"branch {name} of a Parallel starts with {_describe_module(leaves[0][1])}; put it before the Parallel, so that "
            "the branch starts with its weights."
        )


def _describe_module(module: nn.Module) -> str:
    """Return a module as text on one line; a module with children as its class name only."""
    return str(module) if next(module.children(), None) is None else type(module).__name__


def _list_modules(name: str, model: nn.Sequential, path: str = "") -> list[NamedModule]:
    """Return the modules inside nested Sequentials in the order in which they run, with their dotted names."""
    if get_plain_class(model).forward is not FORWARDS[nn.Sequential]:
        raise UnsupportedError(
            f"{type(model).__name__} has a forward of its own, which apical would not run; a plain nn.Sequential works."
        )
    leaves: list[NamedModule] = []
    for key, module in model._modules.items():  # named_children() skips the second use of a module
        assert module is not None
        name = f"{path}{key}"
        leaves += _list_modules(name, module, f"{name}.") if isinstance(module, nn.Sequential) else [(name, module)]
    return leaves


def _has_weights(module: nn.Module, name: str) -> bool:
    """Return whether a module is a layer of weights. Raises UnsupportedError if apical cannot train it."""
    for kind in (nn.Linear, nn.Conv1d, nn.Conv2d):
        if isinstance(module, kind):
            if isinstance(module.weight, nn.parameter.UninitializedParameter):
                raise UnsupportedError(
                    f"layer {name} ({module}) has no weights yet; run the model once on an input before apical reads it."
                )
            if parametrize.is_parametrized(module) or get_plain_class(module).forward is not FORWARDS[kind]:
                raise UnsupportedError(
                    f"layer {name} ({type(module).__name__}) computes its weights or output in a way of its own; "
                    f"a plain nn.{kind.__name__} works."
                )
            return True
    _refuse_unsupported(module, name)
    return False


def _refuse_unsupported(module: nn.Module, name: str) -> None:
    """Refuse a module between weights that has parameters or buffers, or mixes examples."""
    reasons = {
        "mixes the examples of a batch": isinstance(module, nn.modules.batchnorm._BatchNorm),
        "is recurrent (apical.Elman takes an nn.RNN with its readout)": isinstance(module, nn.RNNBase | nn.RNNCellBase),
        "has parameters of its own": any(True for _ in module.parameters()),
        "has buffers of its own": any(True for _ in module.buffers()),
        "returns indices beside its output": getattr(module, "return_indices", False),
        "draws random numbers in a way of its own": isinstance(module, _RANDOM_MODULES) and type(module) not in RANDOM,
    }
    why = next((reason for reason, applies in reasons.items() if applies), None)
    if why is None:
        return
    raise UnsupportedError(
        f"module {name} ({_describe_module(module)}) {why}, which this rule cannot train; Linear, Conv1d, Conv2d and "
        "modules without parameters (activations, pooling, Flatten, Dropout) work, and "
        f"{describe_general_rules()}."
    )


def _refuse_sharing(model: nn.Module) -> None:
    """Refuse layers that share their weights."""
    owner: dict[int, str] = {}
    for path, parameter in model.named_parameters(remove_duplicate=False):
        name = path.rpartition(".")[0]
        first = owner.setdefault(id(parameter), name)
        if first != name:
            raise UnsupportedError(
                f"layers {first} and {name} share their weights; give each layer weights of its own."
            )
