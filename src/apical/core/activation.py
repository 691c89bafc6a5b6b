"""The neuron function φ of a layer: everything without parameters between two synapses.

φ runs the user's own modules, with three differences. In-place activations run out of place. A module that draws
random numbers (dropout, RReLU) receives them as an argument, uniform in [0, 1), so that a rule is a pure function
and stacked replicas equal separate ones. An increasing activation before max-pooling runs after it, which gives the
same values for a quarter of the work.

Known derivatives and the other order hold only while a module computes what its class computes (`is_plain`). A module with
hooks, or with a forward of its own, runs in the user's order and is differentiated by `torch.func.vjp`.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from apical.core.modules import call_with, is_plain
from apical.errors import UnsupportedError

Noise = Mapping[str, Tensor]
Pullback = Callable[[Tensor], Tensor]
PullbackFrom = Callable[[Sequence[Tensor], Tensor], Tensor]
POOLINGS = (nn.MaxPool1d, nn.MaxPool2d)


class Stage(NamedTuple):
    """One module of φ, and its name in the user's model."""

    name: str
    module: nn.Module


class Neuron:
    """φ as a function of the activity and of the noise for its random stages."""

    record: Any = None
    """The `LayerRecord` to write to, while the layer's learner records a batch."""

    def __init__(self, stages: Sequence[tuple[str, nn.Module]]) -> None:
        self.stages = [Stage(name, module) for name, module in stages]
        self._has_pooling = any(type(module) in POOLINGS for _, module in stages)

    @property
    def _stages_as_run(self) -> list[Stage]:
        """The stages in the order in which they run now; hooks on a pooling keep it in its place."""
        return _move_pooling_first(self.stages) if self._has_pooling else self.stages

    def __call__(self, a: Tensor, noise: Noise) -> Tensor:
        for stage in self._stages_as_run:
            a = self._run(stage, a, noise)
        return a

    def _run(self, stage: Stage, a: Tensor, noise: Noise) -> Tensor:
        """Run a stage: out of place, and a random module with its noise, or in evaluation mode if it has none."""
        module = stage.module
        if is_plain(module):
            if type(module) in RANDOM:
                return RANDOM[type(module)](module, a, noise.get(stage.name))
            out: Tensor = call_with(module, a, inplace=False) if module.__dict__.get("inplace") else module(a)
            return out
        a = a.clone()  # the module may write into its input, which is still needed
        if type(module) in RANDOM:
            out = call_with(module, a, forward=lambda a: RANDOM[type(module)](module, a, noise.get(stage.name)))
        else:
            out = module(a)
        return out

    def vjp(self, a: Tensor, noise: Noise) -> tuple[Tensor, Pullback]:
        """Return φ(a), and φ′ as a function from the error after φ to the error before it."""
        if self.record is not None:
            self.note(drive=a)
        pullbacks: list[Pullback] = []
        for stage in self._stages_as_run:
            if _has_known_derivative(stage.module):
                a = self._run(stage, a, noise)
                pullbacks.append(partial(DERIVATIVES[type(stage.module)], a))
            else:
                a, pullback = self._differentiate_stage(stage, a, noise)
                pullbacks.append(partial(_pull_back, pullback))
        return a, self.watch(partial(apply_in_reverse, pullbacks))

    def note(self, **values: Tensor) -> None:
        """Write copies to the layer's record while a batch is recorded. Tensors of a vmap are skipped: they end with it."""
        for name, value in values.items() if self.record is not None else ():
            if not torch._C._functorch.is_functorch_wrapped_tensor(value):
                setattr(self.record, name, value.detach().clone())  # a buffer may change before the user looks

    def watch(self, pullback: Pullback) -> Pullback:
        """Return φ′ as it is or, while a batch is recorded, one that also writes down its ξ and δ."""
        if self.record is None:
            return pullback

        def pull_back(e: Tensor) -> Tensor:
            delta = pullback(e)
            self.note(xi=e, delta=delta)
            return delta

        return pull_back

    def trace(self, a: Tensor, noise: Noise) -> tuple[Tensor, list[Tensor], PullbackFrom]:
        """Return φ(a), the tensors that φ′ needs, and φ′ as a function of such tensors and of the error after φ.

        Unlike the pullback of `vjp`, the tensors can be stored and used later, as an eligibility trace is.
        """
        kept: list[Tensor] = []
        steps: list[tuple[int, Callable[..., Tensor]]] = []
        for stage in self._stages_as_run:
            a, own, pull_back = self._trace_stage(stage, a, noise)
            kept += own
            steps.append((len(own), pull_back))

        def pull_back_from(kept: Sequence[Tensor], e: Tensor) -> Tensor:
            end = len(kept)
            for count, pull_back in reversed(steps):
                e, end = pull_back(*kept[end - count : end], e), end - count
            return e

        return a, kept, pull_back_from

    def _trace_stage(self, stage: Stage, a: Tensor, noise: Noise) -> tuple[Tensor, list[Tensor], Callable[..., Tensor]]:
        """Return a stage's output, what its derivative needs, and the error before it as a function of that and of e."""
        module, kind = stage.module, type(stage.module)
        if is_plain(module):
            if kind in POOLINGS:
                return _trace_pooling(module, a)
            if kind in RANDOM or (kind in ACTIVATIONS and kind not in DERIVATIVES):
                out, pullback = self._differentiate_stage(stage, a, noise)
                return out, [_pull_back(pullback, torch.ones_like(out))], torch.mul
        elif kind in RANDOM:
            raise UnsupportedError(
                f"module {stage.name} ({module}) draws random numbers and has hooks or a forward of its own, so that its "
                "derivative cannot be kept for later, as this rule must; remove them."
            )
        out = self._run(stage, a, noise)
        if _has_known_derivative(module):
            return out, [out], DERIVATIVES[kind]
        if kind in (nn.Flatten, nn.Unflatten, nn.Identity) and is_plain(module):
            return out, [], lambda e: e.reshape(a.shape)
        return out, [a], lambda a, e: _pull_back(self._differentiate_stage(stage, a, {})[1], e)

    def _differentiate_stage(self, stage: Stage, a: Tensor, noise: Noise) -> tuple[Tensor, Callable[..., Any]]:
        """Return a stage's output and pullback. Raises UnsupportedError if `torch.func` cannot differentiate it."""
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
        if type(stage.module) in POOLINGS and is_plain(stage.module):
            while at and _has_known_derivative(ordered[at - 1].module):
                at -= 1
        ordered.insert(at, stage)
    return ordered


def _has_known_derivative(module: nn.Module) -> bool:
    """Return whether a module is an increasing activation whose derivative follows from its output."""
    return type(module) in DERIVATIVES and is_plain(module)


def _pull_back(pullback: Callable[..., Any], e: Tensor) -> Tensor:
    """Return the error before a stage from a `torch.func.vjp` pullback, which gives a tuple of one."""
    before: Tensor = pullback(e)[0]
    return before


def _trace_pooling(module: Any, a: Tensor) -> tuple[Tensor, list[Tensor], Callable[..., Tensor]]:
    """Return max-pooled values, the places of the largest ones, and the error at the input from those and from e."""
    flat = isinstance(module, nn.MaxPool1d)  # one dimension is an image of height 1
    images = a.unsqueeze(-2) if flat else a
    sizes = []
    for size, none in ((module.kernel_size, 1), (module.stride, 1), (module.padding, 0), (module.dilation, 1)):
        own = list(size) if isinstance(size, Sequence) else [size] * (1 if flat else 2)
        sizes.append([none, *own] if flat else own)
    out, places = torch.ops.aten.max_pool2d_with_indices(images, *sizes, module.ceil_mode)

    def pull_back(places: Tensor, e: Tensor) -> Tensor:
        after = e.unsqueeze(-2) if flat else e
        # The backward pass reads the shape of its second argument only.
        e = torch.ops.aten.max_pool2d_with_indices_backward(
            after, torch.empty_like(images, dtype=e.dtype), *sizes, module.ceil_mode, places
        )
        return e.squeeze(-2) if flat else e

    return out.squeeze(-2) if flat else out, [places], pull_back


def apply_in_reverse(pullbacks: Sequence[Pullback], e: Tensor) -> Tensor:
    """Carry an error from after the last stage to before the first one."""
    for pullback in reversed(pullbacks):
        e = pullback(e)
    return e


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
    """How a random module computes its output from uniform noise, and without noise in evaluation mode.

    There is one number per value, or `per_channel` of an example. If an input has not `batched` dimensions, torch reads it
    as one example without a batch axis, whose channels are along the first axis; then there is one number per index of it.
    """

    apply: Callable[[nn.Module, Tensor, Tensor], Tensor]
    per_channel: bool = False
    batched: int | None = None
    evaluate: Callable[[nn.Module, Tensor], Tensor] = lambda module, a: a

    def __call__(self, module: nn.Module, a: Tensor, uniform: Tensor | None) -> Tensor:
        """Run the module with this noise, or in evaluation mode if there is none."""
        return self.evaluate(module, a) if uniform is None else self.apply(module, a, uniform)

    def noise_shape(self, shape: torch.Size) -> Sequence[int]:
        """Return the shape of the noise for an input of this shape."""
        if not self.per_channel:
            return shape
        kept = 2 if self.batched in (None, len(shape)) else 1
        return (*shape[:kept], *[1] * (len(shape) - kept))


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


def _evaluate_rrelu(module: nn.Module, a: Tensor) -> Tensor:
    """Return RReLU in evaluation mode. torch's own does not support vmap."""
    return F.leaky_relu(a, (float(module.lower) + float(module.upper)) / 2)  # type: ignore[arg-type]


RANDOM: dict[type[nn.Module], Random] = {
    nn.Dropout: Random(_apply_dropout),
    nn.Dropout1d: Random(_apply_dropout, per_channel=True, batched=3),
    nn.Dropout2d: Random(_apply_dropout, per_channel=True),
    nn.Dropout3d: Random(_apply_dropout, per_channel=True, batched=5),
    nn.AlphaDropout: Random(_apply_alpha_dropout),
    nn.FeatureAlphaDropout: Random(_apply_alpha_dropout, per_channel=True),
    nn.RReLU: Random(_apply_rrelu, evaluate=_evaluate_rrelu),
}
