"""What is measured once an epoch: scores on held-out data, and how far a rule's updates align."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from apical.engine.unit import Unit
from apical.learner import Learner
from apical.neuron import Noise
from apical.rules.bp import Backpropagation
from apical.rules.descent import FeedbackRule

EVALUATION_BATCH = 2000
PROBE = 512
"""Training examples on which a rule's update is compared with backpropagation's."""


@contextmanager
def evaluating(learner: Learner) -> Iterator[None]:
    """Dropout and the like off, and every module back in its own mode afterwards."""
    modes = [(module, module.training) for module in learner.modules()]
    learner.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


def evaluate(unit: Unit, x: Tensor, y: Tensor, classes: int | None) -> tuple[list[float], list[float] | None]:
    """Mean loss, and accuracy where there are classes, of each seed."""
    loss = torch.zeros(len(unit), device=x.device)
    hits = torch.zeros(len(unit), device=x.device)
    with torch.no_grad(), evaluating(unit.template):
        for xs, ys in zip(x.split(EVALUATION_BATCH), y.split(EVALUATION_BATCH), strict=True):
            scores = unit.predict(xs)
            for row, one in enumerate(scores):
                loss[row] += unit.template.loss(one, ys).sum()
            if classes is not None:
                hits += (scores.argmax(2) == ys).reshape(len(unit), len(xs), -1).float().mean(2).sum(1)
    accuracy = None if classes is None else (hits / len(x)).tolist()
    return (loss / len(x)).tolist(), accuracy


def alignment(learner: Learner, x: Tensor, y: Tensor) -> dict[str, list[float | None]]:
    """Cosines per layer: of feedback with forward weights, and of each W's update with backpropagation's.

    Where the rule sends errors down, `local` has each layer's own loss, too (see `local_losses`).

    None where there is nothing to compare: a layer without feedback weights (or, in direct feedback
    alignment, of another shape), or one that the rule leaves alone. A rule of several phases is judged by its last
    one, at the weights that it finds.
    """
    x, y = x[:PROBE], y[:PROBE]
    params, state = learner.params(), dict(learner.named_buffers())
    reference = Backpropagation(learner.model)
    reference.loss = learner.loss
    with torch.no_grad(), evaluating(learner):
        noise = learner.draw(x)
        for phase in learner.phases:
            update = phase(params, state, x, y, noise)
            state |= update.state
        ours = update.grads
        theirs = reference.update(params, {}, x, y, {}).grads
        weights = list(zip(learner.forward_weights, learner.feedback_weights, strict=True))
        found: dict[str, list[float | None]] = {
            "feedback": [_cosine(w, b) for w, b in weights],
            "update": [
                _cosine(theirs.get(layer.weight), ours.get(layer.weight)) for layer in learner.network.layers
            ],
        }
        if isinstance(learner, FeedbackRule) and any(b is not None for _, b in weights):
            found["local"] = local_losses(learner, x, y, noise)
        return found


def local_losses(learner: FeedbackRule, x: Tensor, y: Tensor, noise: Noise) -> list[float | None]:
    """½‖ξ‖² of the error that arrives at each layer's output, mean over examples: the terms that the paper sums."""
    params, network = learner.params(), learner.network
    trace = network.forward(params, x, noise, 0)
    _, xi = learner.loss.start(trace.output, y)
    carry = learner.carry(params, trace, xi)
    losses: list[float | None] = [_half_square(xi)]
    for i in range(len(network) - 1, 0, -1):
        u, pullback = trace.pop()
        xi = carry(i, pullback(xi), u.shape)
        losses.insert(0, _half_square(xi))
    return losses


def _half_square(xi: Tensor) -> float:
    return float(xi.square().sum() / (2 * len(xi)))


def _cosine(a: Tensor | None, b: Tensor | None) -> float | None:
    if a is None or b is None or a.shape != b.shape:
        return None
    return float(F.cosine_similarity(a.flatten(), b.flatten(), dim=0))


def record(**values: Any) -> dict[str, Any]:
    """A row of the history, without what was not measured."""
    return {key: value for key, value in values.items() if value is not None}
