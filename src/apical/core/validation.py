"""Checks of options, batches and updates, each with an error of one sentence that says what would work.

Shapes and types are always checked, values only if looking at them costs no synchronisation.
"""

import inspect
import math
import warnings
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from apical.core.losses import Loss
from apical.core.network import Network, Params
from apical.errors import ApicalError, DivergenceError, UnsupportedError


def is_number(value: object) -> bool:
    """A finite number, and not a truth value."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def require_positive(**values: Any) -> None:
    """Refuse a setting that is given and not a positive number."""
    for name, value in values.items():
        if value is not None and not (is_number(value) and value > 0):
            raise ApicalError(f"{name} is {value!r}, but must be a positive number.")


def require_not_negative(**values: Any) -> None:
    """Refuse a setting that is given and not a number from 0 up."""
    for name, value in values.items():
        if value is not None and not (is_number(value) and value >= 0):
            raise ApicalError(f"{name} is {value!r}, but must not be negative.")


def require_between(low: float, high: float, **values: Any) -> None:
    """Refuse what does not lie between two values."""
    for name, value in values.items():
        if not (is_number(value) and low < value < high):
            what = f"lie between {low} and {high}" if math.isfinite(high) else "be a number"
            raise ApicalError(f"{name} is {value!r}, but must {what}.")


def require_whole(least: int = 1, **values: Any) -> None:
    """Refuse what is given and not a whole number of at least `least`."""
    for name, value in values.items():
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < least):
            raise ApicalError(f"{name} is {value!r}, but must be a whole number of at least {least}.")


def require_bool(**values: Any) -> None:
    """Refuse a switch that is neither on nor off."""
    for name, value in values.items():
        if not isinstance(value, bool):
            raise ApicalError(f"{name} is {value!r}, but must be True or False.")


def require_one_of(known: tuple[str, ...], **values: Any) -> None:
    """Refuse a word that is not one of those known."""
    for name, value in values.items():
        if value not in known:
            raise ApicalError(f"{name} is {value!r}, but must be one of {', '.join(known)}.")


def shape(input_shape: object) -> None:
    """The sizes of one example."""
    if not isinstance(input_shape, Sequence) or not all(isinstance(n, int) and n > 0 for n in input_shape):
        raise ApicalError(
            f"input_shape is {input_shape!r}, but must be the sizes of one example, such as (3, 32, 32)."
        )


def batch(network: Network, loss: Loss, params: Params, x: Tensor, y: Tensor) -> None:
    """A batch that this network can be trained on."""
    if not isinstance(x, Tensor):
        raise UnsupportedError(f"the input is a {type(x).__name__}; a torch.Tensor works.")
    _types(network, params, x)
    if x.ndim < 2 or x.shape[0] == 0:
        raise ApicalError(
            f"the input has shape {tuple(x.shape)}; a batch of at least one example, batch first, works."
        )
    if torch.compiler.is_compiling():
        return
    _devices(params, x, y)
    plain = x.device.type == "cpu" and not torch._C._functorch.is_functorch_wrapped_tensor(x)
    targets(network, loss, x, y, values=plain)
    # A finite sum needs one pass and shows that all is well; an infinite one may be an overflow, so look.
    if plain and not bool(x.sum().isfinite()) and not bool(x.isfinite().all()):
        bad = int((~torch.isfinite(x)).flatten(1).any(1).nonzero()[0])
        raise ApicalError(
            f"the input has NaN or infinite values (first in example {bad}); remove or replace them."
        )


def targets(network: Network, loss: Loss, x: Tensor, y: Tensor, *, values: bool) -> None:
    """An input that fits the network, and targets that fit its output; `values` looks at the labels themselves."""
    network.check_input(x)
    output = torch.Size((x.shape[0], *network.shapes(x.shape[1:]).output))
    if network.recurrent and isinstance(y, Tensor):
        _sequences(loss, y, output)
        y, output = network.moments(y), torch.Size((output[0] * output[1], output[2]))
    loss.check(y, output, values=values)


def _sequences(loss: Loss, y: Tensor, output: torch.Size) -> None:
    """One label or one vector of values for each moment; a loss of the user's own may take any one thing for each."""
    whole = output if y.is_floating_point() and not loss.own else output[:2]
    if y.shape[: len(whole)] != whole or not (loss.own or y.ndim == len(whole)):
        raise ApicalError(
            f"the targets are {y.dtype} of shape {tuple(y.shape)}, but an output of shape {tuple(output)} (batch, time, "
            f"outputs) takes {tuple(output[:2])} whole numbers or {tuple(output)} floating values."
        )


def _types(network: Network, params: Params, x: Tensor) -> None:
    weight = params[network.layers[0].weight]
    fits = x.dtype == weight.dtype or (network.recurrent and not x.is_floating_point())
    if fits and all(p.dtype == weight.dtype for p in params.values()):
        return
    if x.is_floating_point() and torch.is_autocast_enabled(x.device.type):
        return
    if not fits:
        raise UnsupportedError(
            f"the input is {x.dtype} and the weights are {weight.dtype}; convert one of them (x.to({weight.dtype}))."
        )
    one_type(network, params)


def one_type(network: Network, params: Params) -> None:
    """Parameters of which none differs in its type."""
    weight = params[network.layers[0].weight]
    other = next((n for n, p in params.items() if p.dtype != weight.dtype), None)
    if other is not None:
        raise UnsupportedError(
            f"{other} is {params[other].dtype} and the first weights are {weight.dtype}; give all one type "
            f"(learner.to({weight.dtype}))."
        )


def _devices(params: Params, x: Tensor, y: Tensor) -> None:
    places = {name: p.device for name, p in params.items()}
    if isinstance(y, Tensor):
        places["the targets"] = y.device
    for name, device in places.items():
        if device != x.device:
            raise ApicalError(
                f"the input is on {x.device}, but {name} on {device}; move the learner (learner.to(device)), the "
                "input and the targets to one device."
            )


def steps_by_gradients(optimizer: object) -> None:
    """A class of optimisers that need nothing but gradients, or a function that makes one."""
    if isinstance(optimizer, type) and _wants_losses(optimizer):
        raise ApicalError(
            f"the optimizer {optimizer.__name__} needs a closure that computes the loss anew, and a rule gives gradients "
            "alone; a torch optimiser whose step() needs none works, such as torch.optim.Adam."
        )


@cache
def _wants_losses(kind: type) -> bool:
    step = getattr(kind, "step", None)
    closure = inspect.signature(step).parameters.get("closure") if step is not None else None
    return closure is not None and closure.default is closure.empty


def nothing_to_train() -> ApicalError:
    """What to raise where a rule finds nothing that it may change."""
    return ApicalError(
        "nothing is left to train: every parameter of the model that this rule updates has requires_grad=False."
    )


def finite(loss: Tensor) -> None:
    """A loss that can be descended; where it is not, no gradient is written."""
    if torch.compiler.is_compiling() or loss.device.type != "cpu" or bool(torch.isfinite(loss)):
        return
    raise DivergenceError(
        f"the loss is {float(loss)}; no gradient was written. A smaller learning rate or gradient clipping may help."
    )


class LeftOut:
    """Warns, once, where a rule's own weights never move while the model's do: somebody forgot `param_groups`."""

    def __init__(self) -> None:
        self.versions: tuple[list[int], list[int]] | None = None
        self.warned = False

    def __call__(self, rule: str, params: Params, trainable: frozenset[str]) -> None:
        if self.warned or torch.compiler.is_compiling():
            return
        model = [p for name, p in params.items() if name in trainable and name.startswith("model.")]
        own = [p for name, p in params.items() if name in trainable and not name.startswith("model.")]
        now = [p._version for p in model], [p._version for p in own]
        before, self.versions = self.versions, now
        if before is None or not own or len(before[0]) != len(model) or before[1] != now[1]:
            return
        stepped = bool(model) and all(a != b for a, b in zip(before[0], now[0], strict=True))
        # A fused step leaves no mark on the versions, but its zero_grad leaves one on the gradients.
        cleared = all(p.grad is None for p in model) and all(p.grad is not None for p in own)
        if stepped or cleared:
            self.warned = True
            warnings.warn(
                f"the forward weights were stepped but the feedback weights of '{rule}' were not: give the "
                "optimiser learner.param_groups(lr) or learner.parameters(), not only the model's.",
                stacklevel=4,
            )
