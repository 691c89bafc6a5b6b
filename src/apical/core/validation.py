"""Checks of options, batches and optimisers. Each error message says what would work instead.

Shapes and types are always checked. Values are checked only if that needs no synchronisation with a GPU.
"""

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from torch.utils._pytree import tree_leaves

from apical.core.activation import RANDOM
from apical.core.losses import Loss, check_dense
from apical.core.modules import has_hooks
from apical.core.network import Network, Params
from apical.core.wiring import get_plain_class
from apical.errors import ApicalError, DivergenceError, UnsupportedError, check_whole_number


def is_number(value: object) -> bool:
    """Return whether the value is a finite int or float, and not a bool."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _require(values: dict[str, Any], is_valid: Callable[[Any], bool], what: str) -> None:
    """Raise an error that says what the first option that is not valid must do."""
    for name, value in values.items():
        if not is_valid(value):
            raise ApicalError(f"{name} is {value!r}, but must {what}.")


def require_positive(**values: Any) -> None:
    """Check that each option is None or a positive number."""
    _require(values, lambda value: value is None or (is_number(value) and value > 0), "be a positive number")


def require_not_negative(**values: Any) -> None:
    """Check that each option is None or a number of at least 0."""
    _require(values, lambda value: value is None or (is_number(value) and value >= 0), "not be negative")


def require_between(low: float, high: float, **values: Any) -> None:
    """Check that each option is a number between `low` and `high`, both excluded."""
    what = f"lie between {low} and {high}" if math.isfinite(high) else "be a number"
    _require(values, lambda value: is_number(value) and low < value < high, what)


def require_bool(**values: Any) -> None:
    """Check that each option is True or False."""
    _require(values, lambda value: isinstance(value, bool), "be True or False")


def require_one_of(known: tuple[str, ...], **values: Any) -> None:
    """Check that each option is one of the known values."""
    _require(values, lambda value: value in known, f"be one of {', '.join(known)}")


def require_whole(**values: Any) -> None:
    """Check that each option is None or an integer of at least 1."""
    for name, value in values.items():
        if value is not None:
            check_whole_number(name, value)


def check_shape(input_shape: object) -> None:
    """Check that `input_shape` is the shape of one example."""
    if not isinstance(input_shape, Sequence) or not all(isinstance(n, int) and n > 0 for n in input_shape):
        raise ApicalError(f"input_shape is {input_shape!r}, but must be the sizes of one example, such as (3, 32, 32).")


FLOATING_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
"""The types of weights that torch can train."""


def check_weights(network: Network, model: nn.Module) -> None:
    """Check that the model's weights have the shapes of their layers, and values of a type that can be trained."""
    shapes = {layer.weight: layer.synapse.weight_shape for layer in network.layers}
    shapes |= {layer.bias: layer.synapse.weight_shape[:1] for layer in network.layers if layer.bias is not None}
    for name, p in model.named_parameters(prefix="model"):
        if p.shape != shapes.get(name, p.shape):
            raise UnsupportedError(
                f"{name} has shape {tuple(p.shape)}, but its layer is made for {shapes[name]}; build a layer of that size."
            )
        if p.is_meta:
            raise UnsupportedError(
                f"{name} is on the meta device, where weights have no values; model.to_empty(device='cpu') and new initial "
                "weights give it some."
            )
        if p.dtype not in FLOATING_DTYPES:
            raise UnsupportedError(f"{name} is {p.dtype}, which no rule here can train; model.float() works.")
        if p.numel() == 0:
            raise UnsupportedError(
                f"{name} has shape {tuple(p.shape)}, so that there is nothing to train; a layer with at least one input and "
                "one output works."
            )
        if p.is_inference():
            raise UnsupportedError(
                f"{name} was made in torch.inference_mode(), where nothing can be trained; build the model outside of it."
            )


def check_batch(network: Network, loss: Loss, params: Params, x: Tensor, y: Tensor) -> None:
    """Check that this network can be trained on the batch. Any module checks its input itself, and its targets later."""
    if network.is_general:
        _check_any_batch(x, y)
        return
    if not isinstance(x, Tensor):
        raise UnsupportedError(f"the input is a {type(x).__name__}; a torch.Tensor works.")
    check_dense("the input", x)
    _check_dtypes(network, params, x)
    if x.ndim < 2 or x.shape[0] == 0:
        raise ApicalError(f"the input has shape {tuple(x.shape)}; a batch of at least one example, batch first, works.")
    if torch.compiler.is_compiling():
        return
    _check_devices(params, x, y)
    if x.is_meta:
        raise ApicalError(
            "the input and the weights are on the meta device, where tensors have no values to train with."
        )
    readable = x.device.type == "cpu" and not torch._C._functorch.is_functorch_wrapped_tensor(x)
    check_targets(network, loss, x, y, values=readable)
    # If the sum is finite, so is every value. If it is not, it may be an overflow: look at each value.
    if readable and not bool(x.sum().isfinite()) and not bool(x.isfinite().all()):
        bad = int((~torch.isfinite(x)).flatten(1).any(1).nonzero()[0])
        raise ApicalError(f"the input has NaN or infinite values (first in example {bad}); remove or replace them.")


def _check_any_batch(x: Any, y: Any) -> None:
    """Check that there are tensors with values among the inputs of a model that is not read as layers, and targets."""
    tensors = [t for t in tree_leaves(dict(x) if isinstance(x, Mapping) else x) if isinstance(t, Tensor)]
    if not tensors:
        raise UnsupportedError(
            f"the input is a {type(x).__name__} without tensors; a torch.Tensor works, or a tuple or dictionary of the "
            "model's arguments."
        )
    if not isinstance(y, Tensor):
        raise UnsupportedError(f"targets are a {type(y).__name__}; a torch.Tensor works.")
    if any(t.is_meta for t in (*tensors, y)):
        raise ApicalError(
            "the input or the targets are on the meta device, where tensors have no values to train with."
        )


def check_targets(network: Network, loss: Loss, x: Tensor, y: Tensor, *, values: bool) -> None:
    """Check that the input fits the network and the targets its output; with `values`, also check the labels."""
    network.check_input(x)
    output = torch.Size((x.shape[0], *network.shapes(x.shape[1:]).output))
    if network.is_general:
        network.read_targets(output, y, loss)
        output = (
            torch.Size((len(network.flatten_time(y)), *output[network.CLASSES :])) if network.CLASSES > 1 else output
        )
        y = network.flatten_time(y)
    if network.recurrent and isinstance(y, Tensor):
        _check_sequence_targets(loss, y, output)
        y, output = network.flatten_time(y), torch.Size((output[0] * output[1], output[2]))
    loss.check(y, output, values=values)


def _check_sequence_targets(loss: Loss, y: Tensor, output: torch.Size) -> None:
    """Check that there is one label or one vector of values per time step; a custom loss may take one of anything."""
    expected = output if y.is_floating_point() and not loss.is_custom else output[:2]
    if y.shape[: len(expected)] != expected or not (loss.is_custom or y.ndim == len(expected)):
        raise ApicalError(
            f"the targets are {y.dtype} of shape {tuple(y.shape)}, but an output of shape {tuple(output)} (batch, time, "
            f"outputs) takes {tuple(output[:2])} whole numbers or {tuple(output)} floating values."
        )


def _check_dtypes(network: Network, params: Params, x: Tensor) -> None:
    """Check that input and parameters have one dtype, or that autocast will convert them."""
    weight = params[network.layers[0].weight]
    fits = x.dtype == weight.dtype or (network.recurrent and not x.is_floating_point())
    if fits and all(p.dtype == weight.dtype for p in params.values()):
        return
    if x.is_floating_point() and torch.is_autocast_enabled(weight.device.type):
        return
    if not fits:
        raise UnsupportedError(
            f"the input is {x.dtype} and the weights are {weight.dtype}; convert one of them (x.to({weight.dtype}))."
        )
    check_one_dtype(network, params)


def check_one_dtype(network: Network, params: Params) -> None:
    """Check that all parameters have the same dtype."""
    weight = params[network.layers[0].weight]
    other = next((n for n, p in params.items() if p.dtype != weight.dtype), None)
    if other is not None:
        raise UnsupportedError(
            f"{other} is {params[other].dtype} and the first weights are {weight.dtype}; give all one type "
            f"(learner.to({weight.dtype}))."
        )


def _check_devices(params: Params, x: Tensor, y: Tensor) -> None:
    """Check that input, targets and parameters are on one device."""
    devices = {name: p.device for name, p in params.items()}
    if isinstance(y, Tensor):
        devices["the targets"] = y.device
    for name, device in devices.items():
        if device != x.device:
            raise ApicalError(
                f"the input is on {x.device}, but {name} on {device}; move the learner (learner.to(device)), the "
                "input and the targets to one device."
            )


def check_step(optim: Any, scaler: Any, params: Params, trainable: frozenset[str]) -> None:
    """Check that an optimiser was passed that can step at least one of the parameters that learn, and a torch scaler."""
    if optim is None:
        raise ApicalError("step() needs an optimiser; credit(x, y) writes gradients and takes no step.")
    methods = (getattr(optim, name, None) for name in ("step", "zero_grad"))
    if isinstance(optim, type) or not all(map(callable, methods)) or not hasattr(optim, "param_groups"):
        raise UnsupportedError(
            f"the optimiser is {optim!r}, but must be a torch optimiser, such as "
            "torch.optim.Adam(learner.param_groups(lr=1e-3))."
        )
    check_optimizer(type(optim))
    check_scaler(scaler)
    own = {id(params[name]) for name in trainable}
    if not any(id(p) in own for group in optim.param_groups for p in group["params"]):
        raise ApicalError(
            "the optimiser has none of the parameters that this learner trains, so that nothing would change; make it from "
            "learner.param_groups(lr), after the learner."
        )


def check_scaler(scaler: Any) -> None:
    """Check that this is a GradScaler, or None."""
    if scaler is not None and not all(callable(getattr(scaler, name, None)) for name in ("scale", "step", "update")):
        raise UnsupportedError(f"the scaler is {scaler!r}, but must be a torch.amp.GradScaler.")


def check_optimizer(optimizer: object) -> None:
    """Check that an optimiser class needs no closure: a rule computes gradients only."""
    if isinstance(optimizer, type) and _needs_closure(optimizer):
        raise ApicalError(
            f"the optimizer {optimizer.__name__} needs a closure that computes the loss anew, and a rule gives gradients "
            "alone; a torch optimiser whose step() needs none works, such as torch.optim.Adam."
        )


@cache
def _needs_closure(kind: type) -> bool:
    """Return whether `step()` of this optimiser class has a required closure."""
    step = getattr(kind, "step", None)
    closure = inspect.signature(step).parameters.get("closure") if step is not None else None
    return closure is not None and closure.default is closure.empty


def make_nothing_to_train_error() -> ApicalError:
    """Return the error to raise if no parameter that the rule updates is trainable."""
    return ApicalError(
        "nothing is left to train: every parameter of the model that this rule updates has requires_grad=False."
    )


def check_finite(loss: Tensor) -> None:
    """Check that the loss is finite; called before gradients are written. Losses on a GPU are not checked."""
    if torch.compiler.is_compiling() or loss.device.type != "cpu" or bool(torch.isfinite(loss)):
        return
    raise DivergenceError(
        f"the loss is {float(loss)}; no gradient was written. A smaller learning rate or gradient clipping may help."
    )


class ModelCheck:
    """Refuse hooks that apical would not run, and a model that changed after the learner was created.

    Modules between the weights run as they are, with forward hooks and later changes of their attributes, unless the rule
    runs something else in their place (`runs_hooks=False`). Layers of weights and containers never run.
    """

    def __init__(self, model: nn.Module, network: Network, runs_hooks: bool) -> None:
        self.network = network
        if network.is_general:  # its modules run as they are; `core/wiring.py` checks that they stay the same
            return
        between = {inner for stage in network.stages for inner in stage.module.modules()}
        self._modules = [
            _KnownModule(name or "the model", module, module in between, runs_hooks and module in between)
            for name, module in model.named_modules()
        ]
        self()

    def __call__(self) -> None:
        if torch.compiler.is_compiling() or self.network.is_general:
            return
        _refuse_global_hooks()
        owners: dict[int, _KnownModule] = {}
        for known in self._modules:
            known.refuse_hooks()
            is_same = known.has_same_structure()
            for p in known.module._parameters.values():
                is_same = is_same and (p is None or owners.setdefault(id(p), known) is known)
            attributes = known.read_attributes()
            if known.is_between and attributes != known.attributes:
                known.attributes = attributes
                self.network.forget_shapes()
            is_same = is_same and attributes == known.attributes
            if not is_same:
                raise ApicalError(
                    f"{known.describe()} changed after the learner was created; create a new learner with apical.make(...)."
                )


class _KnownModule:
    """A module as it was when the learner was created; between the weights, its attributes as they were last seen."""

    def __init__(self, name: str, module: nn.Module, is_between: bool, runs_hooks: bool) -> None:
        self.name, self.module, self.is_between, self.runs_hooks = name, module, is_between, runs_hooks
        self.kind = get_plain_class(module)
        self.forward, self.children = self.kind.forward, dict(module._modules)
        self.shapes = {key: None if p is None else p.shape for key, p in module._parameters.items()}
        self.decisive: tuple[str, ...] = tuple(getattr(type(module), "__constants__", ()))
        self.attributes = self.read_attributes()

    def describe(self) -> str:
        return f"{self.name} ({type(self.module).__name__})"

    def has_same_structure(self) -> bool:
        """Return whether class, children and the shapes of parameters are the same."""
        module = self.module
        if (
            get_plain_class(module) is not self.kind
            or self.kind.forward is not self.forward
            or module._modules != self.children
        ):
            return False
        return {key: None if p is None else p.shape for key, p in module._parameters.items()} == self.shapes

    def read_attributes(self) -> list[Any]:
        """Return the attributes that decide what the module computes, such as the stride of a convolution."""
        return [getattr(self.module, key, None) for key in self.decisive]

    def refuse_hooks(self) -> None:
        """Refuse hooks, or a forward of the module's own, unless they run. Those of parameters never do."""
        module = self.module
        runs_backward = bool(module._backward_hooks or module._backward_pre_hooks)
        for p in module._parameters.values():
            runs_backward |= p is not None and bool(p._backward_hooks or p._post_accumulate_grad_hooks)
        if runs_backward:
            raise UnsupportedError(
                f"{self.describe()} has backward hooks, but no rule here runs backward(); remove them."
            )
        if not has_hooks(module):
            return
        # A random module takes its noise as an argument, which a forward of the user's own does not.
        replaced = "forward" in module.__dict__
        if self.runs_hooks and not (replaced and type(module) in RANDOM):
            return
        what, remedy = ("a forward of its own", "it") if replaced else ("forward hooks", HOOKS_REMEDY)
        raise UnsupportedError(f"{self.describe()} has {what}, which apical would not run; remove {remedy}.")


HOOKS_REMEDY = "them (weight_norm and spectral_norm install some)"
_GLOBAL_HOOKS = (
    *(torch_module._global_forward_hooks, torch_module._global_forward_pre_hooks),
    *(torch_module._global_backward_hooks, torch_module._global_backward_pre_hooks),
)


def _refuse_global_hooks() -> None:
    """Refuse hooks on all modules, but for those of torch's own observers, such as its FlopCounterMode."""
    for hook in (hook for hooks in _GLOBAL_HOOKS for hook in hooks.values()):
        if not str(getattr(hook, "__module__", "")).startswith("torch."):
            raise UnsupportedError(
                "torch has global module hooks, which apical would not run for layers of weights; remove them, or register "
                "them on the modules between the weights."
            )
