"""Tiny networks and data for the tests of the engine, and a training loop written by hand to compare it with."""

import gc
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import apical
from apical.core.activation import Noise
from apical.core.learner import Update
from apical.core.network import Params
from apical.engine.loop import Run, shuffle_indices

Four = tuple[Tensor, Tensor, Tensor, Tensor]
Rows = list[dict[str, Any]]


def mlp() -> nn.Sequential:
    layers = nn.Linear(16, 6), nn.Tanh(), nn.Linear(6, 5, bias=False), nn.ReLU(), nn.Linear(5, 3)
    return nn.Sequential(nn.Flatten(), *layers).double()


def cnn() -> nn.Sequential:
    first = nn.Conv2d(1, 3, 3, padding=1), nn.ReLU(inplace=True), nn.MaxPool2d(2)
    return nn.Sequential(*first, nn.Conv2d(3, 4, 2), nn.Tanh(), nn.Flatten(), nn.Linear(4, 3)).double()


def plain_mlp() -> nn.Sequential:
    """What every rule takes."""
    layers = nn.Linear(16, 6), nn.Tanh(), nn.Linear(6, 5, bias=False), nn.Tanh(), nn.Linear(5, 3)
    return nn.Sequential(nn.Flatten(), *layers).double()


def plain_cnn() -> nn.Sequential:
    first = nn.Conv2d(1, 3, 3, padding=1), nn.Tanh(), nn.MaxPool2d(2)
    return nn.Sequential(*first, nn.Conv2d(3, 4, 2), nn.Tanh(), nn.Flatten(), nn.Linear(4, 3)).double()


def noisy() -> nn.Sequential:
    """Dropout before and between the layers."""
    layers = nn.Dropout(0.2), nn.Linear(16, 7), nn.Tanh(), nn.Dropout(0.5), nn.Linear(7, 3)
    return nn.Sequential(nn.Flatten(), *layers).double()


def noisy_cnn() -> nn.Sequential:
    first = nn.Conv2d(1, 4, 3, stride=2), nn.Tanh(), nn.Dropout2d(0.3)
    return nn.Sequential(*first, nn.Flatten(), nn.Linear(4, 3)).double()


BUILDERS: dict[str, Callable[[], nn.Sequential]] = {f.__name__: f for f in (mlp, cnn, noisy, noisy_cnn)}


def data(train: int = 29, test: int = 11, seed: int = 7) -> Four:
    """Three classes around three centres, not quite apart; 29 leaves a tail in every batch size used here."""
    generator = torch.Generator().manual_seed(seed)
    centres = torch.randn(3, 1, 4, 4, generator=generator)
    y = torch.randint(0, 3, (train + test,), generator=generator)
    y[:3] = torch.arange(3)
    x = centres[y] + 1.5 * torch.randn(train + test, 1, 4, 4, generator=generator)
    return x[:train], y[:train], x[train:], y[train:]


# lr, and 16 steps that divide it, are exact in float32, so that a loop in float64 takes the very same rates.
RUN: dict[str, Any] = {"epochs": 4, "batch_size": 8, "lr": 2.0**-6, "device": "cpu", "progress": False}


def fit(model: Any = mlp, on: Any = None, **settings: Any) -> apical.Fit:
    return apical.fit(model, data() if on is None else on, **{"rule": "bp", **RUN, **settings})


def interrupt(run: Callable[[], object], epoch: int = 2) -> None:
    """Run, and press Ctrl-C right after the checkpoint of this epoch was written."""
    save = Run._save

    def save_and_stop(running: Run, where: Path, done: int) -> None:
        save(running, where, done)
        if done == epoch:
            raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Run, "_save", save_and_stop)
        with pytest.raises(KeyboardInterrupt):
            run()


def updates(
    learner: apical.Learner,
    params: Params,
    x: Tensor,
    y: Tensor,
    noise: Noise,
    run: Callable[..., Callable[..., Update]] = lambda phase: phase,
) -> Iterator[Update]:
    """Each phase's update of one batch, all at the same weights; `run` wraps the phase."""
    state = dict(learner.named_buffers())
    for phase in learner.phases:
        with torch.no_grad():
            update = run(phase)(params, state, x, y, noise)
        state = {**state, **update.state}
        yield update


@contextmanager
def uncollected() -> Iterator[None]:
    """What is freed in here is freed without the garbage collector, which has just been round."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def weights(learner: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in learner.named_parameters()}


def without_time(rows: Rows) -> Rows:
    return [{key: value for key, value in row.items() if key != "seconds"} for row in rows]


def share(schedule: str, progress: float) -> float:
    """The learning rate's factor after a share of the run."""
    if schedule == "linear":
        return 1 - progress
    return (1 + math.cos(math.pi * progress)) / 2 if schedule == "cosine" else 1.0


def by_hand(
    seed: int,
    *,
    build: Callable[[], nn.Sequential] = mlp,
    rule: str | None = None,
    options: dict[str, Any] | None = None,
    on: Four | None = None,
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.Adam,
    schedule: str = "linear",
    clip: float | None = None,
    smoothing: float = 0.0,
) -> tuple[nn.Module, Rows, list[float]]:
    """What `fit` must do, by a plain loop: autograd (no rule), or a learner's own `credit`.

    Returns the trained module, one row per epoch, and the gradient norm before each step.
    """
    x_train, y_train, x_test, y_test = (t.double() if t.is_floating_point() else t for t in (on or data()))
    state = torch.get_rng_state()
    torch.manual_seed(seed)
    model = build()
    learner = None
    if rule is not None:
        learner = apical.make(rule, model, label_smoothing=smoothing, **(options or {}))
    torch.set_rng_state(state)
    groups = model.parameters() if learner is None else learner.param_groups(lr=1.0)
    optim = optimizer(groups, lr=1.0)
    base = [group["lr"] * RUN["lr"] for group in optim.param_groups]
    rows, norms, steps, step = [], [], -(-len(x_train) // RUN["batch_size"]), 0
    for epoch in range(RUN["epochs"]):
        total = hits = 0.0
        for index in shuffle_indices(len(x_train), seed, epoch).split(RUN["batch_size"]):
            factor = share(schedule, step / (RUN["epochs"] * steps))
            for group, rate in zip(optim.param_groups, base, strict=True):
                group["lr"] = rate * factor
            optim.zero_grad()
            x, y = x_train[index], y_train[index]
            if learner is None:
                output = model(x)
                loss = F.cross_entropy(output, y, label_smoothing=smoothing)
                loss.backward()
            else:
                loss, output = learner.credit(x, y)
            norms.append(_norm(learner or model, clip))
            optim.step()
            total += float(loss.detach()) * len(index)
            hits += float((output.argmax(1) == y).sum())
            step += 1
        model.eval()
        with torch.no_grad():
            scores = model(x_test)
        test_loss = float(F.cross_entropy(scores, y_test, label_smoothing=smoothing))
        rows.append(
            {
                "seed": seed,
                "epoch": epoch + 1,
                "loss": total / len(x_train),
                "accuracy": hits / len(x_train),
                "test_loss": test_loss,
                "test_accuracy": float((scores.argmax(1) == y_test).double().mean()),
            }
        )
        model.train()
    return learner or model, rows, norms


def _norm(module: nn.Module, clip: float | None) -> float:
    grads = [p for p in module.parameters() if p.grad is not None]
    return float(nn.utils.clip_grad_norm_(grads, math.inf if clip is None else clip))


def seed_now() -> int:
    """Which seed's model is being built: `fit` seeds the CPU's generator with it."""
    return torch.initial_seed()


def doomed(*seeds: int, after: float) -> Callable[[], nn.Sequential]:
    """A network with a fourth output that these seeds push over the edge of `sqrt_loss`, from `after` · lr below it."""

    def build() -> nn.Sequential:
        model = nn.Sequential(nn.Flatten(), nn.Linear(16, 5), nn.Tanh(), nn.Linear(5, 4))
        with torch.no_grad():
            model[3].weight[3] = 0
            model[3].bias[3] = -after * RUN["lr"] if seed_now() in seeds else -100.0
        return model

    return build


def sqrt_loss(output: Tensor, y: Tensor) -> Tensor:
    """Cross-entropy, and √−o of the fourth output: Adam moves o up by lr a step, and past 0 it is NaN."""
    return F.cross_entropy(output[:, :3], y, reduction="none") + (-output[:, 3]).sqrt()
