"""The neuron function φ of a layer: everything without parameters between two synapses.

φ is run as the user's own modules, with three differences: in-place activations run out of place; a module that
draws random numbers (dropout, RReLU) takes them from outside, as uniform values in [0, 1), so that a rule stays a
pure function and stacked seeds equal separate ones; and a rising activation before max-pooling runs after it, which
gives the same numbers and leaves it a quarter of the work.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from apical.errors import UnsupportedError

Noise = Mapping[str, Tensor]
Pullback = Callable[[Tensor], Tensor]


class Stage(NamedTuple):
    """One module of φ: its place in the user's model, the module itself, and the one that is run."""

    name: str
    module: nn.Module
    runs: nn.Module


class Neuron:
    """φ, as a function of the activity and of the noise that its random stages want."""

    def __init__(self, stages: Sequence[tuple[str, nn.Module]]) -> None:
        self.stages = [Stage(name, module, _as_run(module)) for name, module in stages]
        self._order = _pooled_first(self.stages)

    def __call__(self, a: Tensor, noise: Noise) -> Tensor:
        for stage in self._order:
            a = self._run(stage, a, noise)
        return a

    def _run(self, stage: Stage, a: Tensor, noise: Noise) -> Tensor:
        random = RANDOM.get(type(stage.module))
        if random is not None and stage.name in noise:  # none is drawn for inference
            return random.apply(stage.module, a, noise[stage.name])
        out: Tensor = stage.runs(a)
        return out

    def vjp(self, a: Tensor, noise: Noise) -> tuple[Tensor, Pullback]:
        """φ(a), and φ′ as the map from an error after φ to the error before it."""
        pullbacks = []
        for stage in self._order:
            if type(stage.module) in DERIVATIVES:
                a = self._run(stage, a, noise)
                pullbacks.append(partial(DERIVATIVES[type(stage.module)], a))
            else:
                a, pullback = self._derived(stage, a, noise)
                pullbacks.append(partial(_only, pullback))
        return a, partial(backwards, pullbacks)

    def _derived(
        self, stage: Stage, a: Tensor, noise: Noise
    ) -> tuple[Tensor, Callable[[Tensor], tuple[Tensor]]]:
        """One stage and its derivative; a module of the user's own may have none that `torch.func` can take."""
        run = partial(self._run, stage, noise=noise)
        if torch.compiler.is_compiling() or torch._C._functorch.is_batchedtensor(a):
            return torch.func.vjp(run, a)  # type: ignore[return-value]
        try:
            return torch.func.vjp(run, a)  # type: ignore[return-value]
        except RuntimeError as error:
            run(a)  # what is wrong without a derivative, too, is said as torch says it
            raise UnsupportedError(
                f"torch.func takes no derivative of module {stage.name} ({stage.module}), as this rule must "
                f"({str(error).splitlines()[0]})."
            ) from error


def _pooled_first(stages: Sequence[Stage]) -> list[Stage]:
    """The stages with max-pooling before what rises with its input, as the largest value stays the largest.

    >>> [type(stage.module).__name__ for stage in _pooled_first(Neuron([("1", nn.Tanh()), ("2", nn.MaxPool2d(2))]).stages)]
    ['MaxPool2d', 'Tanh']
    """
    order: list[Stage] = []
    for stage in stages:
        at = len(order)
        if type(stage.module) in (nn.MaxPool1d, nn.MaxPool2d):
            while at and type(order[at - 1].module) in DERIVATIVES:
                at -= 1
        order.insert(at, stage)
    return order


def _only(pullback: Callable[[Tensor], tuple[Tensor]], e: Tensor) -> Tensor:
    return pullback(e)[0]


def backwards(pullbacks: Sequence[Pullback], e: Tensor) -> Tensor:
    """An error after several stages, brought before the first of them."""
    for pullback in reversed(pullbacks):
        e = pullback(e)
    return e


def _as_run(module: nn.Module) -> nn.Module:
    """Out of place; and a random module, whose training mode is `Random.apply`, as in evaluation."""
    if type(module) is nn.RReLU:  # torch's own has no rule for vmap
        return nn.LeakyReLU((module.lower + module.upper) / 2)
    inplace, random = bool(getattr(module, "inplace", False)), type(module) in RANDOM
    if not inplace and not random:
        return module
    runs = copy.copy(module)
    if inplace:
        runs.inplace = False  # type: ignore[assignment]
    if random:
        runs.training = False
    return runs


DERIVATIVES: dict[type[nn.Module], Callable[[Tensor, Tensor], Tensor]] = {
    nn.Tanh: lambda u, e: torch.ops.aten.tanh_backward(e, u),
    nn.Sigmoid: lambda u, e: torch.ops.aten.sigmoid_backward(e, u),
    nn.ReLU: lambda u, e: torch.ops.aten.threshold_backward(e, u, 0),
}
"""(output, error after φ) -> error before φ, for activations whose derivative follows from their output. All rise.

`torch.func.vjp` gives the same numbers for these but keeps the input alive as well, which in a convolutional
network doubles the memory of a step."""


ACTIVATIONS = (
    *(nn.Tanh, nn.Sigmoid, nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.SELU, nn.CELU, nn.GELU, nn.SiLU),
    *(nn.Mish, nn.Softplus, nn.Softsign, nn.LogSigmoid, nn.Hardtanh, nn.Hardswish, nn.Hardsigmoid),
    *(nn.Tanhshrink, nn.Softshrink, nn.Hardshrink, nn.Threshold),
)
"""Modules whose output at a neuron follows from the input at that neuron alone."""


class Random(NamedTuple):
    """How a random module turns uniform noise into its output, and the shape of noise that it wants."""

    apply: Callable[[nn.Module, Tensor, Tensor], Tensor]
    noise_shape: Callable[[torch.Size], Sequence[int]]


def _per_value(shape: torch.Size) -> Sequence[int]:
    return shape


def _per_channel(shape: torch.Size) -> Sequence[int]:
    return (*shape[:2], *[1] * (len(shape) - 2))


def _dropout(module: nn.Module, a: Tensor, uniform: Tensor) -> Tensor:
    p = float(module.p)  # type: ignore[arg-type]
    # At p = 1 nothing is kept, and 1/(1 − p) must not turn that into 0 · ∞.
    return a * ((uniform >= p).to(a.dtype) / max(1.0 - p, torch.finfo(a.dtype).tiny))


def _alpha_dropout(module: nn.Module, a: Tensor, uniform: Tensor) -> Tensor:
    """Dropped values become SELU's −λα; an affine map keeps mean and variance (Klambauer et al. 2017)."""
    p = float(module.p)  # type: ignore[arg-type]
    floor = -1.7580993408473766
    kept = (uniform >= p).to(a.dtype)
    scale = 0.0 if p == 1.0 else ((1 - p) * (1 + p * floor**2)) ** -0.5
    return scale * (a * kept + floor * (1 - kept) - floor * p)


def _rrelu(module: nn.Module, a: Tensor, uniform: Tensor) -> Tensor:
    lower, upper = float(module.lower), float(module.upper)  # type: ignore[arg-type]
    return torch.where(a >= 0, a, a * (lower + (upper - lower) * uniform))


RANDOM: dict[type[nn.Module], Random] = {
    nn.Dropout: Random(_dropout, _per_value),
    nn.Dropout1d: Random(_dropout, _per_channel),
    nn.Dropout2d: Random(_dropout, _per_channel),
    nn.Dropout3d: Random(_dropout, _per_channel),
    nn.AlphaDropout: Random(_alpha_dropout, _per_value),
    nn.FeatureAlphaDropout: Random(_alpha_dropout, _per_channel),
    nn.RReLU: Random(_rrelu, _per_value),
}
