"""Warnings, given once, of what runs but is probably not meant."""

from collections.abc import Callable
from contextlib import suppress
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn

from apical.core.activation import ACTIVATIONS, POOLINGS, RANDOM
from apical.core.losses import Loss
from apical.core.network import Params
from apical.errors import warn

EXAMPLE_WISE = {*ACTIVATIONS, *POOLINGS, *RANDOM, nn.Identity, nn.Flatten, nn.Unflatten}
"""Modules in which no example of a batch influences another."""
_CHECKED: WeakSet[nn.Module] = WeakSet()
"""All other modules that were looked at."""


def warn_of_softmax(model: nn.Module, loss: Loss) -> None:
    """Warn of a softmax as the last module of a model whose loss takes the softmax itself."""
    path, last = "", model
    while children := dict(last.named_children()) if last is model or isinstance(last, nn.Sequential) else {}:
        name = list(children)[-1]
        path, last = f"{path}.{name}".lstrip("."), children[name]
    if isinstance(last, nn.Softmax) and loss.name == "cross_entropy" and not loss.is_custom:
        warn(
            f"module {path} is a Softmax, but cross_entropy takes the softmax of the scores itself, and two of them learn "
            "badly; leave the module out."
        )


def warn_of_module(name: str, module: nn.Module, shape: torch.Size, run: Callable[..., Any]) -> None:
    """Warn once of a module in which examples of this shape influence one another, or that draws random numbers itself."""
    if type(module) in EXAMPLE_WISE or module in _CHECKED or torch.compiler.is_compiling():
        return
    _CHECKED.add(module)
    if mixes_examples(run, shape):
        warn(
            f"module {name} ({type(module).__name__}) mixes the examples of a batch: the scores of an example depend on "
            "those that it comes with, in evaluation, too."
        )
    if draws_random_numbers(run, shape):
        warn(
            f"module {name} ({type(module).__name__}) draws random numbers itself: they do not follow from the seeds of "
            "fit, and a rule that runs it several times for a batch, such as np, pc or streaming, gets others each time; "
            "nn.Dropout draws them once."
        )


def mixes_examples(run: Callable[[Tensor], Any], shape: torch.Size) -> bool:
    """Return whether NaNs in one of two examples of this shape reach the output of the other."""
    values = torch.linspace(-1, 1, 2 * shape.numel()).view(2, *shape)
    with suppress(Exception), torch.no_grad():  # what it does with a batch that it cannot take is reported elsewhere
        known = run(values.clone()).isnan()
        for row in (0, 1):
            tainted = values.clone()
            tainted[row] = torch.nan
            if bool((run(tainted).isnan() & ~known)[1 - row].any()):
                return True
    return False


def draws_random_numbers(run: Callable[..., Any], shape: torch.Size) -> bool:
    """Return whether a module's output in training differs between two runs with the same input."""
    values = torch.linspace(-1, 1, 2 * shape.numel()).view(2, *shape)
    outputs = []
    with suppress(Exception), torch.no_grad(), torch.random.fork_rng(devices=[]):
        for seed in (0, 1):
            torch.default_generator.manual_seed(seed)
            outputs.append(run(values.clone(), training=True))
        return not torch.equal(*outputs)
    return False


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
            warn(
                f"the forward weights were stepped but the feedback weights of '{rule}' were not: give the "
                "optimiser learner.param_groups(lr) or learner.parameters(), not only the model's."
            )


class OwnRateCheck:
    """Warn once if a scheduler has given all groups of an optimiser one rate, although the rule has rates of its own.

    Such are Θ's `theta_rate`, `inverse_rate` or `hidden_rate`. `OneCycleLR` and `CyclicLR` with one number do so.
    """

    def __init__(self) -> None:
        self.shares: dict[str, float] | None = None
        """Each group's learning rate, as a share of that of W; read once, when all rates are found to be equal."""
        self.warned = False

    def __call__(self, learner: Any, optim: torch.optim.Optimizer) -> None:
        if self.warned:
            return
        groups = {group["name"]: group["lr"] for group in optim.param_groups if "name" in group}
        rates = list(groups.values())
        if len(rates) < 2 or any(isinstance(rate, Tensor) or rate != rates[0] for rate in rates) or not rates[0]:
            return
        if self.shares is None:
            self.shares = {group["name"]: group["lr"] for group in learner.param_groups(1.0)}
        own = {name: share for name, share in self.shares.items() if name in groups and share != 1.0}
        if own:
            self.warned = True
            name, share = next(iter(own.items()))
            warn(
                f"all groups of the optimiser have the rate {rates[0]:g}, but that of {name!r} is {share:g} times W's: a "
                'scheduler has overwritten it. Give it one rate per group, [group["lr"] for group in optim.param_groups].'
            )
