"""Measurements after each epoch (scores on held-out data, the alignment of weights and updates) and the progress bar."""

import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, TextIO

import torch
import torch.nn.functional as F
from torch import Tensor

from apical.core.activation import Noise
from apical.core.learner import Learner
from apical.core.modules import evaluation_mode
from apical.core.network import sum_tensors
from apical.engine.replicas import ReplicaStack
from apical.engine.settings import Settings
from apical.printing import format_duration, make_printable
from apical.rules.bp import Backpropagation
from apical.rules.feedback import FeedbackRule

EVALUATION_BATCH = 2000
EVALUATION_VALUES = 2**25
"""A batch of evaluation has at most so many examples, and at most so many values in the network's widest layer."""
PROBE_SIZE = 512
"""Number of training examples on which a rule's update is compared with backpropagation's."""


def evaluate(stack: ReplicaStack, x: Tensor, y: Tensor, classes: int | None) -> list[dict[str, float]]:
    """Return each replica's scores on held-out data, by their names in the history."""
    shapes = stack.template.network.shapes(x.shape[1:])
    widest = max(shape.numel() for shape in (x.shape[1:], *shapes.inputs, *shapes.drives))
    batch = min(EVALUATION_BATCH, max(1, EVALUATION_VALUES // widest))
    sums: list[dict[str, Tensor]] = [{} for _ in range(len(stack))]
    with torch.no_grad(), evaluation_mode(stack.template):
        for xs, ys in zip(x.split(batch), y.split(batch), strict=True):
            for total, output in zip(sums, stack.predict(xs), strict=True):
                for name, value in _sum_scores(stack.template, output, ys, classes).items():
                    total[name] = total[name] + value if name in total else value
    return [dict(zip(total, (torch.stack(list(total.values())) / len(x)).tolist(), strict=True)) for total in sums]


def _sum_scores(learner: Learner, output: Tensor, y: Tensor, classes: int | None) -> dict[str, Tensor]:
    """Return each score's sum over the examples of a batch. The score of a sequence is the mean over its time steps."""
    network, loss, examples = learner.network, learner.loss, len(y)
    output, y = network.flatten_time(output), network.flatten_time(y)

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


def measure_alignment(
    learner: Learner, x: Tensor, y: Tensor, generator: torch.Generator
) -> dict[str, list[float | None]]:
    """Return cosines per layer: of its feedback with its forward weights, and of W's update with backpropagation's.

    Rules that carry an error signal from layer to layer also have `local`: see `measure_local_losses`. A cosine is None
    where there is nothing to compare: the layer has no feedback weights, or (in direct feedback alignment) weights of
    another shape, or the rule does not train it. Of several phases, the last update is compared, at the current weights.
    """
    x, y = x[:PROBE_SIZE], y[:PROBE_SIZE]
    params, state = learner.params(), learner.state_tensors()
    reference = Backpropagation(learner.model, loss="mse")
    reference.loss = learner.loss
    with torch.no_grad(), evaluation_mode(learner):
        noise = learner.draw(x, generator)
        for phase in learner.batch_phases:
            update = phase(params, state, x, y, noise)
            state |= update.state
        ours = update.grads
        theirs = reference.update(params, {}, x, y, {}).grads
        if isinstance(learner, FeedbackRule):
            learner.reconnect()  # the model is the reference's since it was made
        weights = list(zip(learner.forward_weights, learner.feedback_weights, strict=True))
        found: dict[str, list[float | None]] = {
            "feedback": [_cosine(w, b) for w, b in weights],
            "update": [_cosine(theirs.get(layer.weight), ours.get(layer.weight)) for layer in learner.network.layers],
        }
        # Networks that are no sequence of layers are not measured, nor are rules that carry no error signal to any layer.
        is_sequential = not (learner.network.recurrent or learner.network.is_general)
        has_feedback = any(b is not None for _, b in weights) and is_sequential
        if isinstance(learner, FeedbackRule) and has_feedback:
            found["local"] = measure_local_losses(learner, x, y, noise)
        return found


def measure_local_losses(learner: FeedbackRule, x: Tensor, y: Tensor, noise: Noise) -> list[float | None]:
    """Return each layer's local loss: ½‖ξ‖² of the error signal ξ at its output, mean over examples.

    The paper's objective is the sum of these. Branches of a `Parallel` share their output, and so the loss.
    """
    params, network = learner.params(), learner.network
    trace = network.forward(params, x, noise, 0)
    _, xi = learner.loss.start(trace.output, y)
    carry = learner.carry(params, trace, xi)
    losses: list[float | None] = []
    for tier in reversed(network.tiers):
        losses = [*([float(xi.square().sum() / (2 * len(xi)))] * len(tier.layers)), *losses]
        if tier.first > 0:
            shape = trace.inputs[tier.first].shape
            xi = sum_tensors([carry(i, delta, shape) for i, delta in trace.deltas(tier, xi).items()])
    return losses


def _cosine(a: Tensor | None, b: Tensor | None) -> float | None:
    if a is None or b is None or a.shape != b.shape:
        return None
    return float(F.cosine_similarity(a.flatten(), b.flatten(), dim=0))


def read_score(history: list[dict[str, Any]], name: str, protocol: str) -> float | None:
    """Return a score of one seed's history: that of the last epoch, or of the best one if the protocol is 'paper'."""
    curve = [float(row[name]) for row in history if name in row]
    if not curve:
        return None
    best = max if name == "test_accuracy" else min
    return best(curve) if protocol == "paper" else curve[-1]


def summarize(rows: list[dict[str, Any]], settings: Settings) -> str:
    """Return what is shown of an epoch: means over the replicas of the scores that all have; they depend on the loss."""
    if not rows:
        return "no seed left"
    common = [name for name in rows[0] if name not in ("seed", "alignment") and all(name in row for row in rows)]
    means = {name: statistics.fmean(row[name] for row in rows) for name in common}
    scored_on = "held-out" if settings.protocol == "validation" else "test"
    text = f"epoch {rows[0]['epoch']}/{settings.epochs}  loss {means['loss']:.4f}"
    if "test_accuracy" in means:
        text += f"  {scored_on} {100 * means['test_accuracy']:.2f}%"
    return text + (f"  {scored_on} mse {means['test_mse']:.4f}" if "test_mse" in means else "")


Advance = Callable[[int, str], None]
"""Takes the number of steps just done and the text beside the bar; an empty text leaves the old one."""


@contextmanager
def show_progress(title: str, total: int, done: int, show: bool | TextIO) -> Iterator[Advance]:
    """Yield the function that advances what is shown: a bar on a terminal, and one line per epoch elsewhere.

    show: whether to show anything on stderr; or a file to which the lines are written, too.
    """
    is_watched = bool(show) and sys.stderr.isatty()
    file = show if not isinstance(show, bool) else sys.stderr if show and not is_watched else None
    with _show_bar(title, total, done) if is_watched else nullcontext() as advance_bar:
        start, begun = time.monotonic(), done

        def advance(steps: int, text: str) -> None:
            nonlocal done
            done += steps
            if advance_bar is not None:
                advance_bar(steps, text)
            if file is not None and text.startswith("epoch"):
                left = (total - done) * (time.monotonic() - start) / max(1, done - begun)
                file.write(make_printable(f"{title}: {text}  {format_duration(left)} left", keep="") + "\n")
                file.flush()

        yield advance


@contextmanager
def _show_bar(title: str, total: int, done: int) -> Iterator[Advance | None]:
    """Yield the function that advances a progress bar on stderr; None if rich is not installed."""
    try:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
    except ImportError:
        yield None
        return
    title_column, text_column = TextColumn("{task.description}", markup=False), TextColumn("{task.fields[text]}")
    columns = (title_column, BarColumn(), TaskProgressColumn(), text_column, TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(make_printable(title, keep=""), total=total, completed=done, text="")

        def advance(steps: int, text: str) -> None:
            progress.advance(task, steps)
            if text:
                progress.update(task, text=text)

        yield advance
