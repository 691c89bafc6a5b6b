"""C3 by interventions: how activity goes up and errors come down, whatever the ticks at which layers learn from them.

A rule could bring an error down through all layers within one tick, and only then hold back what each of them learns.
"""

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor

from apical.core.learner import Learner
from apical.plausibility.influence import Push, find_arrivals, list_inputs
from apical.plausibility.products import OUT, Cut, ProductRecorder, Use
from apical.plausibility.replay import Batch, Layers, Outcome, Run, differs, run_ticks

UNSEEN = "the way of its error down to layer {low} was not found; products in plain torch operations would decide"


def examine_paths(learner: Learner, batch: Batch, *, is_told: bool) -> Outcome:
    """Return whether layers learn only from activity that has reached them and, if errors come down, by one layer a tick."""
    found = examine_reach(learner, batch)
    return examine_error_path(learner, batch) if found.verdict and is_told else found


class CutDown(Cut):
    """Sets to zero, in some phases, what goes down through matrices of some shapes. What goes up is left alone."""

    def __init__(self, shapes: set[torch.Size], phases: Collection[int]) -> None:
        super().__init__(shapes)
        self.phases = phases

    def run(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        return super().run(func, name, args, kwargs) if self.phase in self.phases else func(*args, **kwargs)

    def is_cut(self, use: Use) -> bool:
        return use.side == OUT


class ErrorPath:
    """Changes the highest layer at one tick; `arrive` returns after how many ticks each level below learns differently."""

    def __init__(self, learner: Learner, batch: Batch) -> None:
        self.learner, self.layers = learner, Layers(learner)
        self.top = max(self.layers.levels)
        self.at = max(learner.warmup, 2 * self.top) + 1
        self.batches = [batch] * (self.at + 3 * self.top + 2)
        self.ticks = run_ticks(learner, self.batches).ticks

    def arrive(self, level: int = 0, cut: Collection[int] = ()) -> dict[int, int]:
        """Return the levels that hear of the change and when, if the path to a level is cut so many ticks after it."""
        base, pushed = (self._run(weights, level, cut) for weights in ([], self._list_weights(self.top)))
        arrivals = find_arrivals(self.layers, base, pushed, self.at).ticks
        levels: dict[int, int] = {}
        for i, ticks in arrivals.items():
            own = self.layers.levels[i]
            levels[own] = min(ticks, levels.get(own, ticks))
        return levels

    def _run(self, weights: list[str], level: int, cut: Collection[int]) -> Run:
        shapes = {self.learner.get_parameter(name).shape for name in self._list_weights(level + 1)}
        phases = {phase for phase, tick in enumerate(self.ticks) if tick - self.at in cut}
        return run_ticks(self.learner, self.batches, Push(weights, self.at), CutDown(shapes, phases))

    def _list_weights(self, level: int) -> list[str]:
        return [name for name, own in zip(self.layers.weights, self.layers.levels, strict=True) if own == level]


def examine_error_path(learner: Learner, batch: Batch) -> Outcome:
    """Return whether an error crosses one layer a tick.

    If it does, it cannot be stopped by cutting a lower part of its path at the tick at which it crosses a higher one.
    """
    path = ErrorPath(learner, batch)
    free, names = path.arrive(), path.layers.names
    lowest, crossed = min(free, default=path.top), -1
    for level in reversed(range(lowest, path.top)):
        low, high = (names[path.layers.levels.index(own)] for own in (level, level + 1))

        def is_late(*cut: int, level: int = level) -> bool:
            """Return whether the lowest level hears later with this path cut, and all levels above it as soon as before."""
            found = path.arrive(level, cut)
            above = all(found.get(own) == ticks for own, ticks in free.items() if own > level)
            return above and found.get(lowest, len(path.batches)) > free[lowest]

        if crossed >= 0 and is_late(*range(crossed + 1)):
            return Outcome(False, f"an error comes down to layer {high} and on to layer {low} in one tick")
        crossed = next((tick for tick in range(crossed + 1, free[lowest] + 1) if is_late(tick)), -1)
        if crossed < 0:
            return Outcome(None, UNSEEN.format(low=low))
    return Outcome(True, "no layer waits for another")


def examine_reach(learner: Learner, batch: Batch) -> Outcome:
    """Change each layer once: what the layers above it learn must change no sooner than their input does."""
    layers = Layers(learner)
    at = max(learner.warmup, 2 * max(layers.levels)) + 1
    batches = [batch] * (at + max(layers.levels) + 1)

    def push(*weights: str) -> tuple[Run, list[dict[int, list[Tensor]]]]:
        recorder = ProductRecorder()
        run = run_ticks(learner, batches, Push([*weights], at), recorder)
        return run, [list_inputs(run, recorder, weight) for weight in layers.weights]

    base, seen = push()
    for j, weight in enumerate(layers.weights):
        pushed, inputs = push(weight)
        arrivals = find_arrivals(layers, base, pushed, at).ticks
        for i in (i for i in arrivals if layers.levels[i] > layers.levels[j]):
            learnt = at + arrivals[i]
            known = [one[i][tick] for tick in range(at, learnt + 1) for one in (seen, inputs) if tick in one[i]]
            if len(known) == 2 * (arrivals[i] + 1) and all(map(_is_same_input, known[::2], known[1::2])):
                return Outcome(False, f"layer {layers.names[i]} learns from activity that has not reached it yet")
    return Outcome(True, "no layer waits for another")


def _is_same_input(one: list[Tensor], other: list[Tensor]) -> bool:
    return len(one) == len(other) and not any(map(differs, one, other))
