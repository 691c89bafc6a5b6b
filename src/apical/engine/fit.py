"""`apical.fit` trains one or several seeds of a network with any rule; `apical.sweep` trains several settings at once."""

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
from apical.engine.loop import OnEpoch, Replica, Run
from apical.engine.metrics import read_score
from apical.engine.settings import Settings, merge_settings
from apical.errors import ApicalError


@dataclass
class Fit:
    """A finished run: one learner per seed, and a history of one row per seed and epoch."""

    settings: Settings
    learners: list[Learner]
    history: list[dict[str, Any]]
    failed: dict[int, str]
    """Seeds that diverged, and why. Their learners have the weights of the last good epoch."""
    device: str
    reasons: list[str]
    """Why a faster way of running was not used, one line each."""

    def of_seed(self, seed: int) -> list[dict[str, Any]]:
        """Return the history rows of one seed."""
        return [row for row in self.history if row["seed"] == seed]

    @property
    def by_seed(self) -> dict[int, float]:
        """Accuracy of each finished seed on the held-out data: of the last epoch, or of the best one for 'paper'."""
        if any("test_accuracy" not in row for row in self.history):
            raise ApicalError("targets that are no class labels have no accuracy; history has their test_loss.")
        return self.scores("test_accuracy")

    def scores(self, name: str) -> dict[int, float]:
        """Return a score of each finished seed by its name in the history, such as 'test_mse' or 'test_bits'.

        It is the score of the last epoch, or of the best one for 'paper'.
        """
        known = [key for key in self.history[0] if key.startswith("test_")] if self.history else [name]
        if name not in known:
            raise ApicalError(f"the history has no {name!r}; it has {', '.join(known)}.")
        done = [seed for seed in self.settings.seeds if seed not in self.failed]
        scores = {seed: read_score(self.of_seed(seed), name, self.settings.protocol) for seed in done}
        return {seed: score for seed, score in scores.items() if score is not None}

    @property
    def accuracies(self) -> list[float]:
        """The accuracies in `by_seed`, in the order of the seeds."""
        return list(self.by_seed.values())

    @property
    def accuracy(self) -> float:
        """The mean accuracy over seeds."""
        return statistics.fmean(self.accuracies)

    @property
    def seconds_per_epoch(self) -> float:
        """Training time of one epoch of all seeds together; NaN if no epoch was finished."""
        return seconds_per_epoch(self.history)


def seconds_per_epoch(history: Sequence[Mapping[str, Any]]) -> float:
    """Return the median time of an epoch, without the first, which also captures graphs and compiles, unless it is alone."""
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
    """Train `model` on `data` with `rule` and return the learners and their history.

    model: 'mlp', 'cnn' or 'rnn' (the paper's network for that data set), a function that builds an `nn.Sequential` or an
        `apical.Elman`, or, for one seed, such a network or a learner, which is trained in place.
    data: a registered name ('digits', 'mnist', …), text:PATH or series:PATH, with its `data_options` (`{"window": 32}`), or
        your own four tensors x_train, y_train, x_test, y_test. For an Elman, x has the shape (examples, time, values), or
        (examples, time) if it is whole numbers, and y has one label or vector per time step.
    rule: a name in `apical.RULES`, by default 'dll', with its `options` (`{"theta_std": 0.05}`).
    seeds: how many, or a list. They train together, each with its own weights, shuffles and noise.
    optimizer: 'adam', 'adamw', 'sgd' (fused; `optimizer_options` go to its parameter groups), or a function that
        takes the parameter groups and returns a torch optimiser.
    schedule: 'linear' or 'cosine' to zero over the run, or 'constant'.
    protocol: 'clean' reports the last epoch on the test set; 'paper' the best test epoch, as the authors' code
        does; 'validation' holds out a tenth of the training data (the last tenth if they are sequences, which may
        overlap) and never uses the test set.
    checkpoint, resume: a .safetensors file, and whether to continue from it. It is written after every epoch, or less often
        if writing would take more than a tenth of the time, and at the end (unless `save_end` is false).
    loss: by default 'mse' for time series and 'cross_entropy' for all other data.
    clip: the largest gradient norm of a seed.
    alignment: whether to record the alignment of weights and updates with backpropagation's (slower).
    precision: 'tf32' or 'float32' (they differ only on CUDA), or 'bf16': products in bfloat16, weights in float32.
    stack: whether seeds are stacked in one set of tensors; by default if all layers are dense or the network is small.
    compile: whether to use `torch.compile`; by default in runs so long that it saves time.
    on_epoch: called with the history rows of each epoch. An exception it raises ends the run; the checkpoint has that epoch.
    stop_after: stop after this many epochs, without changing the schedule; `resume` continues from there.
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
    """Train several settings or rules at once, each with the same seeds, and return one `Fit` per trial.

    trials: one dictionary per trial with any of rule, lr, options, optimizer_options, clip, loss and label_smoothing.
    settings: keywords of `fit` that all trials share (no checkpoints).

    Trials with the same rule, options and loss are stacked: they share tensors, even if their rates, clipping and optimiser
    options differ. Other trials run side by side, on a GPU in the same CUDA graph. A trial that diverges does not stop
    the others: see its `failed`.

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
    settings_by_trial = [
        inputs.make_settings(model, dataset, **merge_settings(settings, trial)) for trial in _check_trials(trials)
    ]
    return _train(
        model,
        dataset,
        settings_by_trial,
        device,
        path=None,
        saved=None,
        stack=stack,
        compile=compile,
        progress=progress,
        on_epoch=on_epoch,
    )


TRIAL_SETTINGS = ("rule", "lr", "options", "optimizer_options", "clip", "loss", "label_smoothing")
"""Settings that may differ between the trials of a sweep. All others decide which steps they take together."""


def split_for_sweep(settings: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split keywords of `fit` for `sweep`: those that all trials share, and those of one trial.

    >>> split_for_sweep({"epochs": 5, "lr": 0.1})
    ({'epochs': 5}, {'lr': 0.1})
    """
    shared = {name: value for name, value in settings.items() if name not in TRIAL_SETTINGS}
    return shared, {name: value for name, value in settings.items() if name in TRIAL_SETTINGS}


def _check_trials(trials: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Check that trials are dictionaries of settings that may differ, and return them as a list."""
    if isinstance(trials, Mapping) or not isinstance(trials, Iterable):
        raise ApicalError(
            f"trials is {trials!r}, but must be a list of one dictionary per trial, such as [{{'lr': 0.1}}, {{'lr': 0.01}}]."
        )
    checked = list(trials)
    if not checked:
        raise ApicalError("a sweep needs at least one trial, such as {'lr': 1e-3}.")
    for trial in checked:
        if not isinstance(trial, Mapping):
            raise ApicalError(f"a trial is {trial!r}, but must be a dictionary, such as {{'lr': 1e-3}}.")
        for name in trial:
            if name not in TRIAL_SETTINGS:
                raise ApicalError(
                    f"trials of one sweep cannot differ in {name!r}; {', '.join(TRIAL_SETTINGS)} may differ."
                )
    return checked


def _train(
    model: Model,
    dataset: Dataset,
    settings_by_trial: list[Settings],
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
    """Train all seeds of all trials in one run and return one `Fit` per trial."""
    shared, place = settings_by_trial[0], devices.find_device(device)
    learners_by_trial = [inputs.build_learners(model, trial, dataset) for trial in settings_by_trial]
    first = learners_by_trial[0][0]
    fingerprint = None if path is None else checkpoints.fingerprint(first, dataset)
    if shared.protocol == "validation":
        dataset = inputs.hold_out(dataset, first)
    for learners in learners_by_trial:
        inputs.check_data(learners[0], dataset)
    replicas = [
        Replica(learner, seed, trial)
        for learners, trial in zip(learners_by_trial, settings_by_trial, strict=True)
        for learner, seed in zip(learners, trial.seeds, strict=True)
    ]
    run = Run(
        replicas,
        inputs.move_to_device(dataset, place, first),
        place,
        stack=stack,
        compile=compile,
        fingerprint=fingerprint,
    )
    weights = sum(p.numel() for replica in replicas for p in replica.learner.parameters())
    rows = shared.batch_size * len(first.network.flatten_time(dataset.y_train[:1]))
    with devices.use_precision(shared.precision, place), devices.use_threads(weights * rows, place):
        run.train(path, saved, progress, on_epoch, stop_after, save_end)
    count = len(shared.seeds)
    return [
        Fit(
            trial,
            [replica.learner for replica in replicas[start : start + count]],
            run.collect_history(range(start, start + count)),
            {replicas[i].seed: run.failed[i] for i in range(start, start + count) if i in run.failed},
            str(place),
            run.reasons,
        )
        for start, trial in zip(range(0, len(replicas), count), settings_by_trial, strict=True)
    ]
