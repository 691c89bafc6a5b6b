"""What is measured once an epoch: scores on held-out data, and how far a rule's updates align."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor

from apical.core.activation import Noise
from apical.core.learner import Learner
from apical.core.network import total
from apical.engine.replicas import Unit
from apical.rules.bp import Backpropagation
from apical.rules.feedback import FeedbackRule

EVALUATION_BATCH = 2000
EVALUATION_VALUES = 2**25
"""Examples that are scored at once, or fewer where the widest layer of a network would have more values than these."""
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


def evaluate(unit: Unit, x: Tensor, y: Tensor, classes: int | None) -> list[dict[str, float]]:
    """Each seed's scores on held-out data, by their names in the history."""
    shapes = unit.template.network.shapes(x.shape[1:])
    widest = max(shape.numel() for shape in (*shapes.inputs, *shapes.drives))
    batch = min(EVALUATION_BATCH, max(1, EVALUATION_VALUES // widest))
    sums: list[dict[str, Tensor]] = [{} for _ in range(len(unit))]
    with torch.no_grad(), evaluating(unit.template):
        for xs, ys in zip(x.split(batch), y.split(batch), strict=True):
            for total, output in zip(sums, unit.predict(xs), strict=True):
                for name, value in _scores(unit.template, output, ys, classes).items():
                    total[name] = total[name] + value if name in total else value
    return [
        dict(zip(total, (torch.stack(list(total.values())) / len(x)).tolist(), strict=True)) for total in sums
    ]


def _scores(learner: Learner, output: Tensor, y: Tensor, classes: int | None) -> dict[str, Tensor]:
    """Sums over the examples of a batch; of a sequence, the mean over its moments counts."""
    network, loss, examples = learner.network, learner.loss, len(y)
    output, y = network.moments(output), network.moments(y)

    def total(values: Tensor) -> Tensor:
        return values.reshape(len(values), -1).float().mean(1).sum() * (examples / len(values))

    scores = {"test_loss": total(loss(output, y))}
    if classes is not None:
        scores["test_accuracy"] = total(output.argmax(1) == y)
        if network.recurrent and loss.name == "cross_entropy":
            scores["test_bits"] = total(F.cross_entropy(output, y, reduction="none")) / math.log(2)
    elif y.shape == output.shape and y.is_floating_point() and loss.name != "cross_entropy":
        scores["test_mse"] = total((output - y).square())
        scores["test_mae"] = total((output - y).abs())
    return scores


def alignment(
    learner: Learner, x: Tensor, y: Tensor, generator: torch.Generator
) -> dict[str, list[float | None]]:
    """Cosines per layer: of feedback with forward weights, and of each W's update with backpropagation's.

    Where the rule sends errors down, `local` has each layer's own loss, too (see `local_losses`).

    None where there is nothing to compare: a layer without feedback weights (or, in direct feedback
    alignment, of another shape), or one that the rule leaves alone. A rule of several phases is judged by its last
    one, at the weights that it finds.
    """
    x, y = x[:PROBE], y[:PROBE]
    params, state = learner.params(), learner.state_tensors()
    reference = Backpropagation(learner.model)
    reference.loss = learner.loss
    with torch.no_grad(), evaluating(learner):
        noise = learner.draw(x, generator)
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
        if _sends_errors_down(learner):
            found["local"] = local_losses(learner, x, y, noise)
        return found


def _sends_errors_down(learner: Learner) -> TypeGuard[FeedbackRule]:
    """Whether a rule of the feedback family has layers to send an error to; the moments of a sequence are left out."""
    plain = isinstance(learner, FeedbackRule) and not learner.network.recurrent
    return plain and any(weight is not None for weight in learner.feedback_weights)


def local_losses(learner: FeedbackRule, x: Tensor, y: Tensor, noise: Noise) -> list[float | None]:
    """½‖ξ‖² of the error that arrives at each layer's output, mean over examples: the terms that the paper sums.

    Branches of a `Parallel` share their output, and so the loss.
    """
    params, network = learner.params(), learner.network
    trace = network.forward(params, x, noise, 0)
    _, xi = learner.loss.start(trace.output, y)
    carry = learner.carry(params, trace, xi)
    losses: list[float | None] = []
    for tier in reversed(network.tiers):
        losses = [*([_half_square(xi)] * len(tier.layers)), *losses]
        if tier.first > 0:
            shape = trace.inputs[tier.first].shape
            xi = total([carry(i, delta, shape) for i, delta in trace.deltas(tier, xi).items()])
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


def judged(history: list[dict[str, Any]], name: str, protocol: str) -> float | None:
    """One run's score of that name: at its last epoch, or at the best one under the paper's protocol."""
    curve = [float(row[name]) for row in history if name in row]
    if not curve:
        return None
    best = max if name == "test_accuracy" else min
    return best(curve) if protocol == "paper" else curve[-1]
