"""Run a copy of a learner for some ticks with the same random numbers, change something on the way, see what it does.

A tick is one call of `step` with a batch. It has one phase or several, each of which ends with an update.
"""

import random
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from apical.core.learner import Learner
from apical.plausibility.copies import copy_learner, list_kept_tensors, list_levels
from apical.plausibility.meter import make_optimiser
from apical.plausibility.products import ProductRecorder, is_plain

Batch = tuple[Any, Tensor]
Values = dict[str, Tensor]
Change = Callable[[Values, int, int], None]
"""(kept tensors by name, tick, phase) -> None: changes some of them in place, before that phase."""
TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-3}
"""How much of an update must change to count, by the type that is computed with."""


@dataclass
class Run:
    """What a learner did: the kept tensors before each phase, how the layers' parameters changed in it, and results."""

    before: list[Values] = field(default_factory=list)
    updates: list[Values] = field(default_factory=list)
    ticks: list[int] = field(default_factory=list)
    results: list[tuple[Tensor, Tensor]] = field(default_factory=list)


@contextmanager
def keep_random_states() -> Iterator[None]:
    """Leave all random number generators as they were."""
    states = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        try:
            yield
        finally:
            random.setstate(states[0])
            np.random.set_state(states[1])


def seed_all() -> None:
    """Start all random number generators anew, so that every tick of every run has the same noise."""
    torch.default_generator.manual_seed(0)
    random.seed(0)
    np.random.seed(0)


class Replay:
    """Runs a copy of a learner with plain SGD, and notes what it does."""

    def __init__(self, learner: Learner, change: Change | None, recorder: ProductRecorder | None) -> None:
        self.learner, self.run = copy_learner(learner), Run()
        self.change, self.recorder = change, recorder
        layers = self.learner.network.layers
        self.params = {n: self.learner.get_parameter(n) for layer in layers for n in (layer.weight, layer.bias) if n}
        self.optim = make_optimiser(self.learner)
        self.optim.register_step_pre_hook(self.limit_step)
        self._clear = self.optim.zero_grad
        self.optim.zero_grad = self.on_zero_grad  # type: ignore[method-assign]

    def limit_step(self, *_: Any) -> None:
        """Shorten gradients that would change other weights than the layers' by more than a hundredth.

        Where feedback weights explode, rounding errors do.
        """
        layers = {id(p) for p in self.params.values()}
        for group in self.optim.param_groups:
            for p in group["params"]:
                if p.grad is not None and p.grad.numel() and id(p) not in layers:
                    most = 0.01 * (float(p.detach().norm()) + 1e-3)
                    p.grad.mul_(min(1.0, most / max(group["lr"] * float(p.grad.norm()), 1e-300)))

    def step(self, tick: int, x: Any, y: Tensor) -> None:
        """Run one tick."""
        self.tick, self.is_first_phase = tick, True
        self.start_phase()
        seed_all()
        with self.recorder or nullcontext(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            credit = self.learner.step(tree_map_only(Tensor, torch.clone, x), y.clone(), self.optim)
        self.finish_phase()
        self.run.results.append((credit.loss.detach().clone(), credit.output.detach().clone()))

    def on_zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients. The learner does that when a phase begins; the tick's first phase has begun already."""
        if not self.is_first_phase:
            self.finish_phase()
            self.start_phase()
        self.is_first_phase = False
        self._clear(set_to_none)

    def start_phase(self) -> None:
        values = {name: t.detach() for name, t in list_kept_tensors(self.learner) if is_plain(t)}
        with torch.no_grad(), torch._C._DisableTorchDispatch():
            if self.change:
                self.change(values, self.tick, len(self.run.before))
            self.run.before.append({name: t.clone() for name, t in values.items()})
        self.run.ticks.append(self.tick)
        if self.recorder:
            self.recorder.phase = len(self.run.before) - 1

    def finish_phase(self) -> None:
        before = self.run.before[-1]
        with torch._C._DisableTorchDispatch():
            self.run.updates.append({name: p.detach() - before[name] for name, p in self.params.items()})


def run_ticks(
    learner: Learner, batches: list[Batch], change: Change | None = None, recorder: ProductRecorder | None = None
) -> Run:
    """Run a copy of the learner, one batch a tick; `change` is called before each phase, `recorder` watches."""
    replay = Replay(learner, change, recorder)
    for tick, (x, y) in enumerate(batches):
        replay.step(tick, x, y)
    return replay.run


def differs(one: Tensor, other: Tensor, scale: Tensor | None = None) -> bool:
    """Return whether two tensors differ by more than rounding; `scale` is a tensor whose rounding errors are in both."""
    if one.shape != other.shape:
        return True
    if not one.numel():
        return False
    rounding = 0.0 if scale is None else 16 * torch.finfo(one.dtype).eps * float(scale.abs().max())
    size = max(float(one.abs().max()), float(other.abs().max()))
    return not float((one - other).abs().max()) <= TOLERANCES[one.dtype] * size + rounding


class Outcome(NamedTuple):
    """What an experiment showed: True, False or None for undecided, and why in a sentence."""

    verdict: bool | None
    reason: str


class Layers:
    """The layers of a learner: their parameters, and which of them are below which others."""

    def __init__(self, learner: Learner) -> None:
        self.names = [layer.name for layer in learner.network.layers]
        self.weights = [layer.weight for layer in learner.network.layers]
        self.params = [[name for name in (layer.weight, layer.bias) if name] for layer in learner.network.layers]
        self.levels = list_levels(learner.network)
        self.recurrent = learner.network.recurrent

    def __len__(self) -> int:
        return len(self.names)

    def below(self, i: int) -> list[int]:
        return [j for j in range(len(self)) if self.levels[j] < self.levels[i]]

    def upstream(self, i: int) -> list[int]:
        """Layers whose activity becomes the input of layer i; in a recurrent network also those beside it."""
        beside = [j for j in range(len(self)) if self.recurrent and j != i and self.levels[j] == self.levels[i]]
        return [*self.below(i), *beside]


def find_changed(layers: Layers, one: Run, other: Run, phase: int) -> list[int]:
    """List the layers that learnt something else in the same phase of two runs."""
    before = one.before[phase]
    return [
        i
        for i, names in enumerate(layers.params)
        if any(differs(one.updates[phase][n], other.updates[phase][n], before[n]) for n in names)
    ]


def is_same(layers: Layers, one: Run, other: Run, phases: int | None = None) -> bool:
    """Return whether two runs went alike, up to some phase."""
    if phases is None:
        if len(one.updates) != len(other.updates) or not has_same_results(one, other):
            return False
        phases = len(one.updates)
    return not any(find_changed(layers, one, other, phase) for phase in range(phases))


def has_same_results(one: Run, other: Run, ticks: Iterable[int] | None = None) -> bool:
    """Return whether losses and outputs are the same (NaN, where there is none yet, equals NaN)."""
    return not any(
        differs(a.nan_to_num(), b.nan_to_num())
        for tick in (range(len(one.results)) if ticks is None else ticks)
        for a, b in zip(one.results[tick], other.results[tick], strict=True)
    )
