"""Checks of options, batches and optimisers. Each error message says what would work instead.

Shapes and types are always checked. Values are checked only if that needs no synchronisation with a GPU.
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
    """Return whether the value is a finite int or float, and not a bool."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def require_positive(**values: Any) -> None:
    """Check that each option is None or a positive number."""
    for name, value in values.items():
        if value is not None and not (is_number(value) and value > 0):
            raise ApicalError(f"{name} is {value!r}, but must be a positive number.")


def require_not_negative(**values: Any) -> None:
    """Check that each option is None or a number of at least 0."""
    for name, value in values.items():
        if value is not None and not (is_number(value) and value >= 0):
            raise ApicalError(f"{name} is {value!r}, but must not be negative.")


def require_between(low: float, high: float, **values: Any) -> None:
    """Check that each option is a number between `low` and `high`, both excluded."""
    for name, value in values.items():
        if not (is_number(value) and low < value < high):
            what = f"lie between {low} and {high}" if math.isfinite(high) else "be a number"
            raise ApicalError(f"{name} is {value!r}, but must {what}.")


def require_whole(least: int = 1, **values: Any) -> None:
    """Check that each option is None or an integer of at least `least`."""
    for name, value in values.items():
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < least):
            raise ApicalError(f"{name} is {value!r}, but must be a whole number of at least {least}.")


def require_bool(**values: Any) -> None:
    """Check that each option is True or False."""
    for name, value in values.items():
        if not isinstance(value, bool):
            raise ApicalError(f"{name} is {value!r}, but must be True or False.")


def require_one_of(known: tuple[str, ...], **values: Any) -> None:
    """Check that each option is one of the known values."""
    for name, value in values.items():
        if value not in known:
            raise ApicalError(f"{name} is {value!r}, but must be one of {', '.join(known)}.")


def check_shape(input_shape: object) -> None:
    """Check that `input_shape` is the shape of one example."""
    if not isinstance(input_shape, Sequence) or not all(isinstance(n, int) and n > 0 for n in input_shape):
        raise ApicalError(f"input_shape is {input_shape!r}, but must be the sizes of one example, such as (3, 32, 32).")


def check_batch(network: Network, loss: Loss, params: Params, x: Tensor, y: Tensor) -> None:
    """Check that this network can be trained on the batch."""
    if not isinstance(x, Tensor):
        raise UnsupportedError(f"the input is a {type(x).__name__}; a torch.Tensor works.")
    _check_dtypes(network, params, x)
    if x.ndim < 2 or x.shape[0] == 0:
        raise ApicalError(f"the input has shape {tuple(x.shape)}; a batch of at least one example, batch first, works.")
    if torch.compiler.is_compiling():
        return
    _check_devices(params, x, y)
    readable = x.device.type == "cpu" and not torch._C._functorch.is_functorch_wrapped_tensor(x)
    check_targets(network, loss, x, y, values=readable)
    # If the sum is finite, so is every value. If it is not, it may be an overflow: look at each value.
    if readable and not bool(x.sum().isfinite()) and not bool(x.isfinite().all()):
        bad = int((~torch.isfinite(x)).flatten(1).any(1).nonzero()[0])
        raise ApicalError(f"the input has NaN or infinite values (first in example {bad}); remove or replace them.")


def check_targets(network: Network, loss: Loss, x: Tensor, y: Tensor, *, values: bool) -> None:
    """Check that the input fits the network and the targets its output; with `values`, also check the labels."""
    network.check_input(x)
    output = torch.Size((x.shape[0], *network.shapes(x.shape[1:]).output))
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
    if x.is_floating_point() and torch.is_autocast_enabled(x.device.type):
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


class FeedbackStepCheck:
    """Warn once if the model's weights are stepped but the feedback weights are not.

    The user has then probably given the optimiser `model.parameters()` instead of `learner.param_groups(lr)`.
    """

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
        # A fused optimiser does not raise the version counters, but its zero_grad clears the gradients.
        cleared = all(p.grad is None for p in model) and all(p.grad is not None for p in own)
        if stepped or cleared:
            self.warned = True
            warnings.warn(
                f"the forward weights were stepped but the feedback weights of '{rule}' were not: give the "
                "optimiser learner.param_groups(lr) or learner.parameters(), not only the model's.",
                stacklevel=4,
            )
