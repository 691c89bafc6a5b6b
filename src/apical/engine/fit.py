"""`apical.fit`: train one or several seeds of a network with any rule, fast, and lose nothing on the way; `sweep`: so
for several settings at once."""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from apical.core.learner import Learner
from apical.data import Dataset
from apical.engine import checkpoint as checkpoints
from apical.engine import device as devices
from apical.engine import inputs
from apical.engine.checkpoint import Checkpoint
from apical.engine.inputs import Model
from apical.engine.loop import Member, OnEpoch, Run
from apical.engine.metrics import judged
from apical.engine.settings import Settings, over
from apical.errors import ApicalError


@dataclass
class Fit:
    """A finished run: one learner per seed, and a history of one row per seed and epoch."""

    settings: Settings
    learners: list[Learner]
    history: list[dict[str, Any]]
    failed: dict[int, str]
    """Seeds that ended early, and why; their learners hold the last good weights."""
    device: str
    reasons: list[str]
    """Why a faster way of running was not used, one line each."""

    def of_seed(self, seed: int) -> list[dict[str, Any]]:
        return [row for row in self.history if row["seed"] == seed]

    @property
    def by_seed(self) -> dict[int, float]:
        """Each finished seed's accuracy on the held-out data: at the last epoch, or at the best one for 'paper'."""
        if any("test_accuracy" not in row for row in self.history):
            raise ApicalError(
                "targets that are no class labels have no accuracy; history has their test_loss."
            )
        return self.scores("test_accuracy")

    def scores(self, name: str) -> dict[int, float]:
        """Each finished seed's score of that name in the history, such as 'test_mse' or 'test_bits': at the last
        epoch, or at the best one for 'paper'."""
        known = [key for key in self.history[0] if key.startswith("test_")] if self.history else [name]
        if name not in known:
            raise ApicalError(f"the history has no {name!r}; it has {', '.join(known)}.")
        done = [seed for seed in self.settings.seeds if seed not in self.failed]
        scores = {seed: judged(self.of_seed(seed), name, self.settings.protocol) for seed in done}
        return {seed: score for seed, score in scores.items() if score is not None}

    @property
    def accuracies(self) -> list[float]:
        """Those of `by_seed`, in the order of the seeds."""
        return list(self.by_seed.values())

    @property
    def accuracy(self) -> float:
        """The mean over seeds."""
        return statistics.fmean(self.accuracies)

    @property
    def seconds_per_epoch(self) -> float:
        """The training time of an epoch of all seeds together; not a number where none was finished."""
        return seconds_per_epoch(self.history)


def seconds_per_epoch(history: Sequence[Mapping[str, Any]]) -> float:
    """The median time of the epochs after the first, which also captures graphs and compiles; its own if it is alone."""
    later = [row["seconds"] for row in history if row["epoch"] > 1]
    return float(statistics.median(later or [row["seconds"] for row in history] or [math.nan]))


def fit(
    model: Model,
    data: str | Dataset | Sequence[Tensor],
    *,
    rule: str | None = None,
    epochs: int = 20,
    seeds: int | Sequence[int] = 1,
    lr: float = 1e-3,
    batch_size: int = 128,
    optimizer: Any = "adam",
    schedule: str = "linear",
    protocol: str = "clean",
    device: str = "auto",
    checkpoint: str | Path | None = None,
    resume: bool = False,
    save_end: bool = True,
    loss: Any = None,
    label_smoothing: float = 0.0,
    options: dict[str, Any] | None = None,
    data_options: dict[str, Any] | None = None,
    optimizer_options: dict[str, Any] | None = None,
    clip: float | None = None,
    alignment: bool = False,
    precision: str = "tf32",
    stack: bool | None = None,
    compile: bool | None = None,
    progress: bool = True,
    on_epoch: OnEpoch | None = None,
    stop_after: int | None = None,
) -> Fit:
    """Train `model` on `data` with `rule`; returns the learners and the history.

    model: 'mlp', 'cnn' or 'rnn' (the paper's for that data set), a function that builds an `nn.Sequential` or an
        `apical.Elman`, or, for one seed, one of these or a learner of yours, trained in place.
    data: a registered name ('digits', 'mnist', …), text:PATH or series:PATH (`data_options` are its own:
        `{"window": 32}`), or your own four tensors x_train, y_train, x_test, y_test; for an Elman x is
        examples × time × values or examples × time whole numbers, y one label or vector for each step.
    rule: a name of `apical.RULES`, 'dll' unless given; `options` are its own (`{"theta_std": 0.05}`).
    seeds: how many, or which; they train together, each with its own weights, shuffles and noise.
    optimizer: 'adam', 'adamw', 'sgd' (fused; `optimizer_options` go to its groups), or a function that takes the
        parameter groups and returns a torch optimiser.
    schedule: 'linear' or 'cosine' to zero over the run, or 'constant'.
    protocol: 'clean' reports the last epoch on the test set; 'paper' the best test epoch, as the authors' code
        does; 'validation' holds out a tenth of the training data (of sequences the last, which may be windows that
        overlap) and never touches the test set.
    checkpoint, resume: a .safetensors file, written after every epoch or, where writing takes long, as often as a tenth
        of the time allows, and at the end (unless `save_end` is false); and whether to go on from it.
    loss: 'cross_entropy' unless the data are time series; these have 'mse'.
    clip: the largest gradient norm of a seed. alignment: record cosines (slower).
    precision: 'tf32' or 'float32' (they differ on CUDA alone), or 'bf16': products in bfloat16, weights in float32.
    stack: whether seeds share one set of tensors; by default where every layer is dense or the network is small.
    compile: whether `torch.compile` is used; by default in runs long enough to earn its seconds back.
    on_epoch: called with the rows of each epoch; what it raises ends the run there, with that epoch in the checkpoint.
    stop_after: end after so many of the epochs, in the middle of the schedule; `resume` goes on from there.
    """
    if stop_after is not None and (not isinstance(stop_after, int) or stop_after < 1):
        raise ApicalError(f"stop_after is {stop_after!r}, but must be a whole number of at least 1.")
    dataset = inputs.load_dataset(data, data_options)
    loss, label_smoothing = inputs.choose_loss(model, loss, label_smoothing, options or {})
    settings = inputs.make_settings(
        model,
        dataset,
        rule=rule,
        epochs=epochs,
        seeds=seeds,
        lr=lr,
        batch_size=batch_size,
        optimizer=optimizer,
        schedule=schedule,
        protocol=protocol,
        loss=loss,
        label_smoothing=label_smoothing,
        clip=clip,
        precision=precision,
        options=options or {},
        optimizer_options=optimizer_options or {},
        alignment=alignment,
    )
    if not isinstance(checkpoint, str | PathLike | None):
        raise ApicalError(f"checkpoint is {checkpoint!r}, but must be the path of a .safetensors file.")
    path = None if checkpoint is None else Path(checkpoint)
    saved = inputs.load_saved(path, resume, settings)
    (done,) = _train(
        model,
        dataset,
        [settings],
        device,
        path=path,
        saved=saved,
        stack=stack,
        compile=compile,
        progress=progress,
        on_epoch=on_epoch,
        stop_after=stop_after,
        save_end=save_end,
    )
    return done


def sweep(
    model: Model,
    data: str | Dataset | Sequence[Tensor],
    trials: Iterable[dict[str, Any]],
    *,
    device: str = "auto",
    data_options: dict[str, Any] | None = None,
    stack: bool | None = None,
    compile: bool | None = None,
    progress: bool = True,
    on_epoch: OnEpoch | None = None,
    **settings: Any,
) -> list[Fit]:
    """Train several settings, or rules, at once, each with the same seeds; returns one `Fit` per trial.

    trials: what is different in each: any of rule, lr, options, optimizer_options, clip, loss and label_smoothing.
    settings: what all share, as in `fit` (without checkpoints).

    Trials whose rule computes the same from its weights (their rates, clipping and optimiser options may differ)
    share one stack of tensors; the others run beside them, in the same graph on a GPU. A trial that diverges ends
    alone: see its `failed`.

    >>> import torch
    >>> from torch import nn
    >>> x, y = torch.randn(64, 4), torch.randint(0, 2, (64,))
    >>> build = lambda: nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    >>> fits = sweep(build, (x, y, x, y), [{"lr": 0.1}, {"lr": 0.01}], rule="dll", epochs=1, progress=False)
    >>> [fit.settings.lr for fit in fits]
    [0.1, 0.01]
    """
    dataset = inputs.load_dataset(data, data_options)
    if isinstance(model, nn.Module):
        raise ApicalError("a sweep trains many networks; pass a model's name or a function that builds one.")
    plans = [inputs.make_settings(model, dataset, **over(settings, trial)) for trial in _trials(trials)]
    return _train(
        model,
        dataset,
        plans,
        device,
        path=None,
        saved=None,
        stack=stack,
        compile=compile,
        progress=progress,
        on_epoch=on_epoch,
    )


VARIES = ("rule", "lr", "options", "optimizer_options", "clip", "loss", "label_smoothing")
"""What may differ between the trials of a sweep: all else decides how long they run, on what, in which steps."""


def for_sweep(settings: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Keywords of `fit` as `sweep` takes them: what all trials share, and what is a trial's own.

    >>> for_sweep({"epochs": 5, "lr": 0.1})
    ({'epochs': 5}, {'lr': 0.1})
    """
    shared = {name: value for name, value in settings.items() if name not in VARIES}
    return shared, {name: value for name, value in settings.items() if name in VARIES}


def _trials(trials: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The trials of a sweep, each a dictionary of what may differ."""
    if isinstance(trials, Mapping) or not isinstance(trials, Iterable):
        raise ApicalError(
            f"trials is {trials!r}, but must be a list of one dictionary per trial, such as [{{'lr': 0.1}}, {{'lr': 0.01}}]."
        )
    each = list(trials)
    if not each:
        raise ApicalError("a sweep needs at least one trial, such as {'lr': 1e-3}.")
    for trial in each:
        if not isinstance(trial, Mapping):
            raise ApicalError(f"a trial is {trial!r}, but must be a dictionary, such as {{'lr': 1e-3}}.")
        for name in trial:
            if name not in VARIES:
                raise ApicalError(
                    f"trials of one sweep cannot differ in {name!r}; {', '.join(VARIES)} may differ."
                )
    return each


def _train(
    model: Model,
    dataset: Dataset,
    plans: list[Settings],
    device: str,
    *,
    path: Path | None,
    saved: Checkpoint | None,
    stack: bool | None,
    compile: bool | None,
    progress: bool,
    on_epoch: OnEpoch | None = None,
    stop_after: int | None = None,
    save_end: bool = True,
) -> list[Fit]:
    shared, place = plans[0], devices.find_device(device)
    teams = [inputs.build_learners(model, plan, dataset) for plan in plans]
    first = teams[0][0]
    fingerprint = None if path is None else checkpoints.fingerprint(first, dataset)
    if shared.protocol == "validation":
        dataset = inputs.hold_out(dataset, first)
    for team in teams:
        inputs.check_data(team[0], dataset)
    members = [
        Member(learner, seed, plan)
        for team, plan in zip(teams, plans, strict=True)
        for learner, seed in zip(team, plan.seeds, strict=True)
    ]
    run = Run(
        members,
        inputs.move_to_device(dataset, place, first),
        place,
        stack=stack,
        compile=compile,
        fingerprint=fingerprint,
    )
    weights = sum(p.numel() for member in members for p in member.learner.parameters())
    rows = shared.batch_size * len(first.network.moments(dataset.y_train[:1]))
    with devices.use_precision(shared.precision, place), devices.use_threads(weights * rows, place):
        run.train(path, saved, progress, on_epoch, stop_after, save_end)
    count = len(shared.seeds)
    return [
        Fit(
            plan,
            [member.learner for member in members[start : start + count]],
            run.rows(range(start, start + count)),
            {members[i].seed: run.failed[i] for i in range(start, start + count) if i in run.failed},
            str(place),
            run.reasons,
        )
        for start, plan in zip(range(0, len(members), count), plans, strict=True)
    ]
