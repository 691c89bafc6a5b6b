"""The user's `nn.Sequential`, read as layers: one synapse and the neuron function φ that follows it.

    x ─ prefix ─▶ u₀ ─ W₀ ─▶ φ₀ ─▶ u₁ ─ W₁ ─▶ φ₁ ─▶ … ─▶ output

`u_i` is the input of layer i (the paper's sensory input, in the basal dendrites); `prefix` is whatever stands
before the first synapse (a Flatten, say). The network holds no weights: every pass takes them as `params`,
a dictionary by parameter name.
"""

from collections.abc import Mapping
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from apical import synapse as synapses
from apical.errors import ApicalError, UnsupportedError
from apical.neuron import RANDOM, Neuron, Noise, Pullback
from apical.synapse import Conv, Dense, Synapse

Params = Mapping[str, Tensor]


class Layer(NamedTuple):
    """Where a layer stands in the user's model, its synapse, the names of its parameters, and its φ."""

    name: str
    synapse: Synapse
    weight: str
    bias: str | None
    neuron: Neuron

    def forward(self, params: Params, u: Tensor) -> Tensor:
        """The drive W u + b, before φ."""
        return self.synapse.forward(params[self.weight], u, None if self.bias is None else params[self.bias])

    def gradients(
        self, u: Tensor, e: Tensor, trainable: frozenset[str], scale: float = -1.0
    ) -> dict[str, Tensor]:
        """−pre × post: what W and the bias, where they learn, get from the activity u and the error e at the drive."""
        grads = {}
        if self.weight in trainable:
            grads[self.weight] = self.synapse.outer(u, e, scale)
        if self.bias is not None and self.bias in trainable:
            grads[self.bias] = self.synapse.total(e, scale)
        return grads


class Trace(NamedTuple):
    """One forward pass: each layer's input u_i, each layer's φ′_i, and the output.

    Layers below the lowest one that learns have no φ′ (None): nothing will ask for it. The way down takes the
    layers off again with `pop`, so that what a layer kept is freed as soon as it was used.
    """

    inputs: list[Tensor]
    pullbacks: list[Pullback | None]
    output: Tensor

    def pop(self) -> tuple[Tensor, Pullback]:
        """The topmost layer's u and φ′."""
        pullback = self.pullbacks.pop()
        assert pullback is not None
        return self.inputs.pop(), pullback


class Shapes(NamedTuple):
    """Shapes per example: each layer's input, each layer's drive, each random stage's noise, the output."""

    inputs: list[torch.Size]
    drives: list[torch.Size]
    noise: dict[str, torch.Size]
    output: torch.Size


class Network:
    """An `nn.Sequential` as a list of layers; `root` is the model's name inside the learner.

    >>> network = Network(nn.Sequential(nn.Flatten(), nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)))
    >>> [layer.weight for layer in network.layers]
    ['model.1.weight', 'model.3.weight']
    """

    CLASSES: ClassVar[int] = 1
    """The axis of an output along which its classes lie."""

    def __init__(self, model: nn.Sequential, root: str = "model") -> None:
        if not isinstance(model, nn.Sequential):
            raise UnsupportedError(
                f"the model is a {type(model).__name__}; an nn.Sequential of Linear, Conv1d, Conv2d and modules "
                "without parameters, or an apical.Elman, works."
            )
        _refuse_hooks("the model", model)
        groups: list[tuple[str, nn.Module | None, list[tuple[str, nn.Module]]]] = [("", None, [])]
        for name, module in _flatten(model, ""):
            if _is_synapse(module, name):
                groups.append((name, module, []))
            else:
                groups[-1][2].append((name, module))
        if len(groups) == 1:
            raise UnsupportedError(
                "the model has no weights to train; it needs at least one Linear, Conv1d or Conv2d."
            )
        self.prefix = Neuron(groups[0][2])
        self.layers = [
            _layer(root, name, module, stages) for name, module, stages in groups[1:] if module is not None
        ]
        _refuse_sharing(groups)
        self._random = [
            stage
            for neuron in (self.prefix, *(layer.neuron for layer in self.layers))
            for stage in neuron.stages
            if type(stage.module) in RANDOM
        ]
        self._shapes: dict[torch.Size, Shapes] = {}

    def __len__(self) -> int:
        return len(self.layers)

    def moments(self, values: Tensor) -> Tensor:
        """A batch of outputs or targets as the loss takes them, one row for each thing that it counts."""
        return values

    def forward(self, params: Params, x: Tensor, noise: Noise, bottom: int = 0) -> Trace:
        """The forward pass with what a way down needs, for the layers from `bottom` up."""
        u, inputs, pullbacks = self.prefix(x, noise), [], []
        for i, layer in enumerate(self.layers):
            inputs.append(u)
            # The drive gets no name here: one would keep it alive for as long as φ runs, and through the next layer.
            if i < bottom:
                u, pullback = layer.neuron(layer.forward(params, u), noise), None
            else:
                u, pullback = layer.neuron.vjp(layer.forward(params, u), noise)
            pullbacks.append(pullback)
        return Trace(inputs, pullbacks, u)

    def predict(self, params: Params, x: Tensor, noise: Noise) -> Tensor:
        """The output alone."""
        u = self.prefix(x, noise)
        for layer in self.layers:
            u = layer.neuron(layer.forward(params, u), noise)
        return u

    def draw(self, x: Tensor, generator: torch.Generator | None = None) -> dict[str, Tensor]:
        """Uniform noise for each random stage that is in training mode; nothing for most networks."""
        active = [stage.name for stage in self._random if stage.module.training]
        if not active:
            return {}
        shapes = self.shapes(x.shape[1:]).noise
        return {
            name: torch.rand((x.shape[0], *shapes[name]), dtype=x.dtype, device=x.device, generator=generator)
            for name in active
        }

    def shapes(self, input_shape: torch.Size | tuple[int, ...] | None = None) -> Shapes:
        """What passes through the network for an input of this shape (without the batch).

        Without a shape, a network that starts with a Linear is taken to get that layer's features.
        """
        if input_shape is None:
            first = self.layers[0].synapse
            if not isinstance(first, Dense):
                sides = ("height", "width")[-first.dims :] if isinstance(first, Conv) else ()
                raise ApicalError(
                    f"layer {self.layers[0].name} is a convolution, so sizes follow from the input: "
                    f"pass input_shape=({', '.join(('channels', *sides))})."
                )
            return self._walk(torch.Size([first.in_features]), after_prefix=True)
        key = torch.Size(input_shape)
        if key not in self._shapes:
            self._shapes[key] = self._walk(key)
        return self._shapes[key]

    def _walk(self, shape: torch.Size, after_prefix: bool = False) -> Shapes:
        """Send a tensor without storage through the network and note the shapes; a misfit is named."""
        batch = 2
        noise: dict[str, torch.Size] = {}
        inputs: list[torch.Size] = []
        drives: list[torch.Size] = []

        def run(neuron: Neuron, a: Tensor) -> Tensor:
            for stage in neuron.stages:
                if type(stage.module) in RANDOM:
                    noise[stage.name] = torch.Size(RANDOM[type(stage.module)].noise_shape(a.shape)[1:])
                    continue
                got = tuple(a.shape[1:])
                try:
                    a = stage.runs(a)
                except (RuntimeError, ValueError, IndexError, TypeError) as error:
                    raise ApicalError(_misfit(stage.name, stage.module, got, str(error))) from error
                if not isinstance(a, Tensor) or a.ndim == 0 or a.shape[0] != batch:
                    raise UnsupportedError(
                        f"module {stage.name} ({_brief(stage.module)}) does not return one tensor with the batch first; "
                        "only modules that keep the batch dimension can stand between weights."
                    )
            return a

        u = torch.empty((batch, *shape), device="meta")
        if not after_prefix:
            u = run(self.prefix, u)
        for layer in self.layers:
            inputs.append(u.shape[1:])
            wrong = layer.synapse.mismatch(u.shape)
            got = tuple(u.shape[1:])
            if wrong is not None:
                raise ApicalError(_misfit(layer.name, layer.synapse, got, wrong))
            try:
                a = layer.synapse.forward(torch.empty(layer.synapse.weight_shape, device="meta"), u)
            except RuntimeError as error:
                raise ApicalError(_misfit(layer.name, layer.synapse, got, str(error))) from error
            drives.append(a.shape[1:])
            u = run(layer.neuron, a)
        return Shapes(inputs, drives, noise, u.shape[1:])


def _misfit(name: str, what: object, got: tuple[int, ...], why: str) -> str:
    what = _brief(what) if isinstance(what, nn.Module) else what
    why = " ".join(why.split())
    return f"layer {name} ({what}) cannot take an input of shape (batch, {', '.join(map(str, got))}): {why}"


def _brief(module: nn.Module) -> str:
    """A module on one line: one that holds others by its kind alone."""
    return str(module) if next(module.children(), None) is None else type(module).__name__


def _flatten(model: nn.Sequential, path: str) -> list[tuple[str, nn.Module]]:
    """The leaves of nested Sequentials in the order in which they run, by their dotted names."""
    if type(model).forward is not nn.Sequential.forward:
        raise UnsupportedError(
            f"{type(model).__name__} has a forward of its own, which apical would not run; a plain nn.Sequential works."
        )
    leaves: list[tuple[str, nn.Module]] = []
    for key, module in model._modules.items():  # named_children() would hide a module's second use
        assert module is not None
        name = f"{path}{key}"
        if isinstance(module, nn.Sequential):
            _refuse_hooks(name, module)
            leaves += _flatten(module, f"{name}.")
        else:
            leaves.append((name, module))
    return leaves


def _is_synapse(module: nn.Module, name: str) -> bool:
    """Whether a leaf carries weights; refuses what apical cannot train."""
    for kind in (nn.Linear, nn.Conv1d, nn.Conv2d):
        if isinstance(module, kind):
            if isinstance(module.weight, nn.parameter.UninitializedParameter):
                raise UnsupportedError(
                    f"layer {name} ({module}) has no weights yet; run the model once on an input before apical reads it."
                )
            if parametrize.is_parametrized(module) or type(module).forward is not kind.forward:
                raise UnsupportedError(
                    f"layer {name} ({type(module).__name__}) computes its weights or output in a way of its own; "
                    f"a plain nn.{kind.__name__} works."
                )
            _refuse_hooks(name, module)
            return True
    return _refuse_parameters(module, name)


_DRAWS = (nn.modules.dropout._DropoutNd, nn.RReLU, nn.FractionalMaxPool2d, nn.FractionalMaxPool3d)


def _refuse_parameters(module: nn.Module, name: str) -> bool:
    why = None
    if isinstance(module, nn.modules.batchnorm._BatchNorm):
        why = "mixes the examples of a batch"
    elif isinstance(module, nn.RNNBase | nn.RNNCellBase):
        why = "is recurrent (apical.Elman takes an nn.RNN with its readout)"
    elif next(module.parameters(), None) is not None:
        why = "has parameters of its own"
    elif next(module.buffers(), None) is not None:
        why = "has buffers of its own"
    elif getattr(module, "return_indices", False):
        why = "returns indices beside its output"
    elif isinstance(module, _DRAWS) and type(module) not in RANDOM:
        why = "draws random numbers in a way of its own"
    if why is None:
        return False
    raise UnsupportedError(
        f"module {name} ({_brief(module)}) {why}, which no rule here can train; Linear, Conv1d, Conv2d and modules without "
        "parameters (activations, pooling, Flatten, Dropout) work."
    )


def _refuse_hooks(name: str, module: nn.Module) -> None:
    if module._forward_hooks or module._forward_pre_hooks:
        raise UnsupportedError(
            f"{name} ({type(module).__name__}) has forward hooks, which apical would not run; remove them (weight_norm and "
            "spectral_norm install some)."
        )


def _layer(root: str, name: str, module: nn.Module, stages: list[tuple[str, nn.Module]]) -> Layer:
    synapse = synapses.read(module, name)
    assert synapse is not None
    bias = None if module.bias is None else f"{root}.{name}.bias"
    return Layer(name, synapse, f"{root}.{name}.weight", bias, Neuron(stages))


def _refuse_sharing(groups: list[tuple[str, nn.Module | None, list[tuple[str, nn.Module]]]]) -> None:
    owner: dict[int, str] = {}
    for name, module, _ in groups[1:]:
        assert module is not None
        for parameter in module.parameters():
            first = owner.setdefault(id(parameter), name)
            if first != name:
                raise UnsupportedError(
                    f"layers {first} and {name} share their weights; give each layer weights of its own."
                )
