"""C2 and C3 by interventions: change the weights of a layer at one tick, and see which layers below learn differently.

C3 asks after how many ticks they do, C2 whether they still do if the layers in between are cut off.
"""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from apical.core.learner import Learner
from apical.errors import describe_error
from apical.plausibility.copies import find_drive_shapes
from apical.plausibility.products import IN, Cut, ProductRecorder, find_uses
from apical.plausibility.replay import (
    Batch,
    Change,
    Layers,
    Outcome,
    Run,
    Values,
    find_changed,
    has_same_results,
    is_same,
    run_ticks,
)

PUSH = 0.1
"""How much a layer's weights are changed, as a share of their spread."""
IDLE = 1e-3
"""A layer whose update is smaller than this share of its largest one stands still."""
NOT_REPRODUCIBLE = (
    "it comes out differently when it is run again with the same random numbers; state in buffers and noise from draw() "
    "would decide"
)


class Push:
    """Changes the weights of some layers once, at the beginning of a tick; `cut` are set to zero before every phase."""

    def __init__(self, weights: list[str], at: int, cut: tuple[str, ...] = ()) -> None:
        self.weights, self.at, self.cut, self.is_done = weights, at, cut, False

    def __call__(self, values: Values, tick: int, phase: int) -> None:
        if tick == self.at and not self.is_done:
            self.is_done = True
            generator = torch.Generator().manual_seed(1)
            for name in self.weights:
                w = values[name]
                noise = torch.randn(w.shape, generator=generator, dtype=w.dtype)
                w.add_(noise, alpha=PUSH * (float(w.std()) if w.numel() > 1 and w.any() else 1.0))
        for name in self.cut:
            values[name].zero_()


class Arrivals(NamedTuple):
    """After how many ticks each layer learnt differently than without the change; whether the runs were equal before it."""

    ticks: dict[int, int]
    is_reproducible: bool


def find_arrivals(layers: Layers, base: Run, pushed: Run, at: int) -> Arrivals:
    first = base.ticks.index(at)
    ticks: dict[int, int] = {}
    for phase in range(first, len(base.updates)):
        for i in find_changed(layers, base, pushed, phase):
            ticks.setdefault(i, base.ticks[phase] - at)
    return Arrivals(ticks, is_same(layers, base, pushed, first))


# C3: no layer waits for those above it.


def examine_timing(learner: Learner, batch: Batch) -> tuple[Outcome, dict[str, Any]]:
    """Return whether no layer waits for one above it, and what was measured."""
    layers, heard = Layers(learner), dict[str, dict[str, int]]()
    facts: dict[str, Any] = {"own_errors": None, "heard": heard, "firings": None}
    depth = max(layers.levels)
    if depth:
        base = run_ticks(learner, [batch] * 2)
        found = _compare(learner, layers, base, [batch] * 2, layers.levels.index(depth), 1, heard)
        if found.verdict is not True:
            return found, {**facts, "own_errors": False if heard else None}
    start = max(learner.warmup, 2 * depth) + 1
    batches = [batch] * (start + 2 * depth + 3)
    base = run_ticks(learner, batches)
    if not any(u.any() for update in base.updates for u in update.values()):
        return Outcome(None, "no layer learns from this batch; another batch would decide"), facts
    found = _find_clock(layers, base)
    for j in reversed(range(len(layers))):
        if found.verdict is True and layers.below(j):
            found = _compare(learner, layers, base, batches, j, start, heard)
    if found.verdict:
        facts["firings"] = count_firings(learner, [batch] * 2, layers)
        if facts["firings"] and _fires_for_several_batches(learner, batch, layers):
            found = Outcome(False, "activity is computed for more than one batch in a tick")
    return found, {**facts, "own_errors": False if heard else found.verdict or None}


def _compare(
    learner: Learner, layers: Layers, base: Run, batches: list[Batch], j: int, at: int, heard: dict[str, dict[str, int]]
) -> Outcome:
    """Change layer j at one tick. Its effect may come down by one layer a tick, not faster."""
    arrivals, is_reproducible = find_arrivals(
        layers, base, run_ticks(learner, batches, Push([layers.weights[j]], at)), at
    )
    if not is_reproducible:
        return Outcome(None, NOT_REPRODUCIBLE)
    below = {i: arrivals[i] for i in layers.below(j) if i in arrivals}
    for i, ticks in below.items():
        heard.setdefault(layers.names[i], {})[layers.names[j]] = ticks
    came = {j: 0, **below}
    for i, ticks in sorted(below.items(), key=lambda item: item[1]):
        for k, earlier in came.items():
            distance = layers.levels[k] - layers.levels[i]
            if distance > 0 and ticks < earlier + distance:
                low, high, took = layers.names[i], layers.names[k], f"{ticks - earlier} of {distance} ticks"
                waits = f"layer {low} waits for {layers.names[j]}"
                return Outcome(False, f"layer {low} hears from layer {high} within {took}" if ticks else waits)
    return Outcome(True, "no layer waits for another")


def _find_clock(layers: Layers, base: Run) -> Outcome:
    """Return whether all layers learn alike at every tick. The batch is the same, so any difference is a schedule."""
    for i, names in enumerate(layers.params):
        ticks = [torch.zeros(0)] * len(base.results)
        for update, tick in zip(base.updates, base.ticks, strict=True):
            moved = torch.cat([update[name].flatten() for name in names])
            ticks[tick] = moved if not len(ticks[tick]) else ticks[tick] + moved
        sizes = [float(moved.norm()) for moved in ticks]
        busy = [size > IDLE * max(sizes) for size in sizes]
        if True in busy and not all(busy[busy.index(True) :]):
            return Outcome(False, f"layer {layers.names[i]} stands still at some ticks and learns at others")
        for period in (2, 3):
            if True in busy and all(_is_periodic(ticks, at, period) for at in (-1, -2)):
                return Outcome(False, f"layer {layers.names[i]} learns something else at every tick out of {period}")
    return Outcome(True, "")


def _is_periodic(ticks: list[Tensor], at: int, period: int) -> bool:
    last, before, same = ticks[at], ticks[at - 1], ticks[at - period]
    change = (last - before).norm()
    return bool(change > 0.1 * last.norm() and (last - same).norm() < 0.1 * change)


def _fires_for_several_batches(learner: Learner, batch: Batch, layers: Layers) -> bool:
    """Return whether activity has more inputs in a tick if every tick has another batch, while weights stand still."""
    ticks, hold = range(learner.warmup + 2), Hold(learner)
    one = count_firings(learner, [batch for _ in ticks], layers, hold)
    several = count_firings(learner, [vary_inputs(batch, tick) for tick in ticks], layers, hold)
    return one is not None and several is not None and several > one


def vary_inputs(batch: Batch, tick: int) -> Batch:
    """Return another batch for each tick: with other inputs, if they are real numbers, and the same targets."""
    x, y = batch
    return (x * (1 + tick / 8) if isinstance(x, Tensor) and x.is_floating_point() else x), y


class Hold:
    """Keeps the parameters constant, so that activity differs between ticks only where the batches do."""

    def __init__(self, learner: Learner) -> None:
        self.values = {name: p.detach().clone() for name, p in learner.named_parameters()}

    def __call__(self, values: Values, tick: int, phase: int) -> None:
        for name in self.values.keys() & values.keys():
            values[name].copy_(self.values[name])


def count_firings(learner: Learner, batches: list[Batch], layers: Layers, change: Change | None = None) -> int | None:
    """Count for how many different inputs a layer's activity is computed in the last tick, as multiples of a batch.

    Returns None where W was not seen at work.
    """
    recorder = ProductRecorder()
    run = run_ticks(learner, batches, change, recorder)
    count = len(batches[0][1])
    drives, most = find_drive_shapes(learner, batches[0][0], count), 1
    for weight, drive in zip(layers.weights, drives, strict=True):
        rows = list_inputs(run, recorder, weight).get(len(batches) - 1)
        if not rows or not drive:
            return None
        expected = count * drive.numel() // len(run.before[0][weight])
        most = max(most, math.ceil(len(torch.cat(rows).unique(dim=0)) / expected))
    return most


def list_inputs(run: Run, recorder: ProductRecorder, weight: str) -> dict[int, list[Tensor]]:
    """List for each tick the rows that a layer's weights were seen to act on."""
    inputs: dict[int, list[Tensor]] = {}
    for product in recorder.products:
        w = run.before[product.phase][weight]
        for use in find_uses(product, w.shape):
            if use.side == IN and torch.equal(use.matrix.squeeze(), w.flatten(1).squeeze()):
                inputs.setdefault(run.ticks[product.phase], []).append(use.rows)
    return inputs


# C2: no error skips a layer.


def examine_errors(learner: Learner, batch: Batch) -> Outcome:
    """Cut each layer off from the next and change the layers above: a layer that still learns differently skips some."""
    layers = Layers(learner)
    before = run_ticks(learner, [batch]).before[0]
    for level in range(max(layers.levels) - 1):
        shapes = {before[layers.weights[i]].shape for i in range(len(layers)) if layers.levels[i] == level + 1}
        zeros = tuple(name for name, t in before.items() if t.ndim > 1 and _joins(t, shapes))
        found = _try_cut(learner, layers, batch, level, zeros)
        if found.verdict is not True and _ignores_recorder(learner, layers, batch):
            # Matrices that are kept where they cannot be found, or that cannot be zero, are cut where they act.
            found = _try_cut(learner, layers, batch, level, (), shapes)
        if found.verdict is not True:
            return found
    return Outcome(True, "no layer is told of layers above that it is cut off from")


def _ignores_recorder(learner: Learner, layers: Layers, batch: Batch) -> bool:
    """Return whether a rule does the same when its products are recorded."""
    return is_same(layers, run_ticks(learner, [batch] * 2), run_ticks(learner, [batch] * 2, recorder=ProductRecorder()))


def _try_cut(
    learner: Learner,
    layers: Layers,
    batch: Batch,
    level: int,
    zeros: tuple[str, ...],
    shapes: set[torch.Size] | None = None,
) -> Outcome:
    """Cut off the layers up to a level by setting tensors to zero, or what matrices of some shapes give."""
    start = learner.warmup + 1
    batches = [batch] * (start + max(layers.levels) + 2)
    above = [layers.weights[i] for i in range(len(layers)) if layers.levels[i] > level + 1]
    try:
        base, pushed = (
            run_ticks(learner, batches, Push(weights, start, zeros), Cut(shapes) if shapes else None)
            for weights in ([], above)
        )
    except Exception as error:
        return Outcome(None, f"it does not run with a layer cut off: {describe_error(error)}")
    if not all(u.isfinite().all() for run in (base, pushed) for update in run.updates for u in update.values()):
        return Outcome(None, "it does not run with a layer cut off: its updates are not finite")
    arrivals, is_reproducible = find_arrivals(layers, base, pushed, start)
    if not is_reproducible:
        return Outcome(None, NOT_REPRODUCIBLE)
    if has_same_results(base, pushed):
        return Outcome(None, "with a layer cut off, the layers above have no effect; biases would decide")
    told = [i for i in arrivals if layers.levels[i] <= level]
    if told:
        return Outcome(False, f"layer {layers.names[max(told)]} is told of layers above that it is cut off from")
    return Outcome(True, "")


def _joins(t: Tensor, shapes: set[torch.Size]) -> bool:
    """Return whether a tensor has the shape of weights, or of their transpose, perhaps several of them or flattened."""
    flat = [(s[0], s[1:].numel()) for s in shapes]
    return t.shape in shapes or any(tuple(t.shape[-2:]) in (s, s[::-1]) for s in flat)
