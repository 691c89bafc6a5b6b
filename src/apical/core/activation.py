"""The neuron function φ of a layer: everything without parameters between two synapses.

φ runs the user's own modules, with three differences. In-place activations run out of place. A module that draws
random numbers (dropout, RReLU) receives them as an argument, uniform in [0, 1), so that a rule is a pure function
and stacked replicas equal separate ones. An increasing activation before max-pooling runs after it, which gives the
same values for a quarter of the work.
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
    """One module of φ: its name in the user's model, the module itself, and the module that is run instead of it."""

    name: str
    module: nn.Module
    runnable: nn.Module


class Neuron:
    """φ as a function of the activity and of the noise for its random stages."""

    def __init__(self, stages: Sequence[tuple[str, nn.Module]]) -> None:
        self.stages = [Stage(name, module, _make_runnable(module)) for name, module in stages]
        self._stages_as_run = _move_pooling_first(self.stages)

    def __call__(self, a: Tensor, noise: Noise) -> Tensor:
        for stage in self._stages_as_run:
            a = self._run(stage, a, noise)
        return a

    def _run(self, stage: Stage, a: Tensor, noise: Noise) -> Tensor:
        random = RANDOM.get(type(stage.module))
        if random is not None and stage.name in noise:  # there is no noise in inference
            return random.apply(stage.module, a, noise[stage.name])
        out: Tensor = stage.runnable(a)
        return out

    def vjp(self, a: Tensor, noise: Noise) -> tuple[Tensor, Pullback]:
        """Return φ(a), and φ′ as a function from the error after φ to the error before it."""
        pullbacks = []
        for stage in self._stages_as_run:
            if type(stage.module) in DERIVATIVES:
                a = self._run(stage, a, noise)
                pullbacks.append(partial(DERIVATIVES[type(stage.module)], a))
            else:
                a, pullback = self._differentiate_stage(stage, a, noise)
                pullbacks.append(partial(_pull_back, pullback))
        return a, partial(apply_in_reverse, pullbacks)

    def _differentiate_stage(
        self, stage: Stage, a: Tensor, noise: Noise
    ) -> tuple[Tensor, Callable[[Tensor], tuple[Tensor]]]:
        """Run one stage and return its output and pullback.

        Raises UnsupportedError for a user's module that `torch.func` cannot differentiate.
        """
        run = partial(self._run, stage, noise=noise)
        if torch.compiler.is_compiling() or torch._C._functorch.is_batchedtensor(a):
            return torch.func.vjp(run, a)  # type: ignore[return-value]
        try:
            return torch.func.vjp(run, a)  # type: ignore[return-value]
        except RuntimeError as error:
            run(a)  # an error that is not about the derivative is raised unchanged
            raise UnsupportedError(
                f"torch.func takes no derivative of module {stage.name} ({stage.module}), as this rule must "
                f"({str(error).splitlines()[0]})."
            ) from error


def _move_pooling_first(stages: Sequence[Stage]) -> list[Stage]:
    """Return the stages with max-pooling moved before increasing activations, which do not change which value is largest.

    >>> stages = Neuron([("1", nn.Tanh()), ("2", nn.MaxPool2d(2))]).stages
    >>> [type(stage.module).__name__ for stage in _move_pooling_first(stages)]
    ['MaxPool2d', 'Tanh']
    """
    ordered: list[Stage] = []
    for stage in stages:
        at = len(ordered)
        if type(stage.module) in (nn.MaxPool1d, nn.MaxPool2d):
            while at and type(ordered[at - 1].module) in DERIVATIVES:
                at -= 1
        ordered.insert(at, stage)
    return ordered


def _pull_back(pullback: Callable[[Tensor], tuple[Tensor]], e: Tensor) -> Tensor:
    """Return the error before a stage from a `torch.func.vjp` pullback, which gives a tuple of one."""
    return pullback(e)[0]


def apply_in_reverse(pullbacks: Sequence[Pullback], e: Tensor) -> Tensor:
    """Carry an error from after the last stage to before the first one."""
    for pullback in reversed(pullbacks):
        e = pullback(e)
    return e


def _make_runnable(module: nn.Module) -> nn.Module:
    """Return the module that is run: out of place, and for a random module in evaluation mode.

    The training mode of a random module is `Random.apply`.
    """
    if type(module) is nn.RReLU:  # torch's own does not support vmap
        return nn.LeakyReLU((module.lower + module.upper) / 2)
    inplace, random = bool(getattr(module, "inplace", False)), type(module) in RANDOM
    if not inplace and not random:
        return module
    runnable = copy.copy(module)
    if inplace:
        runnable.inplace = False  # type: ignore[assignment]
    if random:
        runnable.training = False
    return runnable


DERIVATIVES: dict[type[nn.Module], Callable[[Tensor, Tensor], Tensor]] = {
    nn.Tanh: lambda u, e: torch.ops.aten.tanh_backward(e, u),
    nn.Sigmoid: lambda u, e: torch.ops.aten.sigmoid_backward(e, u),
    nn.ReLU: lambda u, e: torch.ops.aten.threshold_backward(e, u, 0),
}
"""(output, error after φ) -> error before φ, for activations whose derivative follows from their output. All are increasing.

`torch.func.vjp` gives the same values but also keeps the input alive, which doubles the memory of a step in a
convolutional network."""


ACTIVATIONS = (
    *(nn.Tanh, nn.Sigmoid, nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.SELU, nn.CELU, nn.GELU, nn.SiLU),
    *(nn.Mish, nn.Softplus, nn.Softsign, nn.LogSigmoid, nn.Hardtanh, nn.Hardswish, nn.Hardsigmoid),
    *(nn.Tanhshrink, nn.Softshrink, nn.Hardshrink, nn.Threshold),
)
"""Elementwise modules: the output of a neuron depends on the input of that neuron only."""


class Random(NamedTuple):
    """How a random module computes its output from uniform noise, and the shape of that noise."""

    apply: Callable[[nn.Module, Tensor, Tensor], Tensor]
    noise_shape: Callable[[torch.Size], Sequence[int]]


def _shape_per_value(shape: torch.Size) -> Sequence[int]:
    return shape


def _shape_per_channel(shape: torch.Size) -> Sequence[int]:
    return (*shape[:2], *[1] * (len(shape) - 2))


def _apply_dropout(module: nn.Module, a: Tensor, uniform: Tensor) -> Tensor:
    p = float(module.p)  # type: ignore[arg-type]
    # At p = 1 nothing is kept, and 1/(1 − p) would give 0 · ∞.
    return a * ((uniform >= p).to(a.dtype) / max(1.0 - p, torch.finfo(a.dtype).tiny))


def _apply_alpha_dropout(module: nn.Module, a: Tensor, uniform: Tensor) -> Tensor:
    """Set dropped values to SELU's −λα, then keep mean and variance by an affine map (Klambauer et al. 2017)."""
    p = float(module.p)  # type: ignore[arg-type]
    floor = -1.7580993408473766
    kept = (uniform >= p).to(a.dtype)
    scale = 0.0 if p == 1.0 else ((1 - p) * (1 + p * floor**2)) ** -0.5
    return scale * (a * kept + floor * (1 - kept) - floor * p)


def _apply_rrelu(module: nn.Module, a: Tensor, uniform: Tensor) -> Tensor:
    lower, upper = float(module.lower), float(module.upper)  # type: ignore[arg-type]
    return torch.where(a >= 0, a, a * (lower + (upper - lower) * uniform))


RANDOM: dict[type[nn.Module], Random] = {
    nn.Dropout: Random(_apply_dropout, _shape_per_value),
    nn.Dropout1d: Random(_apply_dropout, _shape_per_channel),
    nn.Dropout2d: Random(_apply_dropout, _shape_per_channel),
    nn.Dropout3d: Random(_apply_dropout, _shape_per_channel),
    nn.AlphaDropout: Random(_apply_alpha_dropout, _shape_per_value),
    nn.FeatureAlphaDropout: Random(_apply_alpha_dropout, _shape_per_channel),
    nn.RReLU: Random(_apply_rrelu, _shape_per_value),
}
