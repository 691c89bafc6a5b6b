"""Watch a rule learn with the tracer, and see whether it does the same when it is not watched."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from apical.core.learner import Learner
from apical.plausibility.copies import copy_learner, list_kept_tensors
from apical.plausibility.escapes import Loss
from apical.plausibility.meter import make_optimiser
from apical.plausibility.replay import keep_random_states, seed_all
from apical.plausibility.tracer import Tracer


def watch(learner: Learner, x: Any, y: Tensor, steps: int) -> Tracer:
    """Watch a copy of the learner for so many batches after its warm-up; each is followed by a step of SGD."""
    watched, alone = copy_learner(learner), copy_learner(learner)
    steps += learner.warmup
    for twin in (watched, alone):
        twin.zero_grad()
        twin.allocate(x, y)
    with keep_random_states(), _without_garbage_collection():
        seed_all()
        optim = make_optimiser(alone)
        for _ in range(steps):  # first: what torch imports when it is needed is no call of the rule's
            alone.step(x, y, optim)
        tracer, optim = Tracer(watched, x, y), make_optimiser(watched)
        optim.register_step_post_hook(lambda *_: tracer.finish_step())
        seed_all()
        for _ in range(steps):
            tracer.start_batch()
            with tracer, tracer.escapes:
                watched.step(x, y, optim)
            tracer.finish_step()
    if not _are_alike(watched, alone):
        tracer.add_loss(Loss("", "step", "the rule learns differently when it is not watched", evades=True))
    return tracer


@contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """Keep finalizers of other objects from running during an update, where they would count as the rule's code."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _are_alike(one: Learner, other: Learner) -> bool:
    pairs = zip(list_kept_tensors(one), list_kept_tensors(other), strict=False)
    return all(
        a.shape == b.shape and torch.allclose(a, b.to(a.dtype), rtol=1e-3, atol=1e-6, equal_nan=True)
        for (_, a), (_, b) in pairs
        if a.is_floating_point() and a.layout == torch.strided
    )
