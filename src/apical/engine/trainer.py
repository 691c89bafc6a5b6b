"""`apical.fit` trains one or several seeds of a network with any rule; `apical.sweep` trains several settings at once."""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TextIO

from torch import Tensor, nn

from apical.core.learner import Learner
from apical.data import Dataset
from apical.engine import checkpoint as checkpoints
from apical.engine import device as devices
from apical.engine import inputs
from apical.engine.checkpoint import Checkpoint
from apical.engine.loop import Replica, Run, collect_history
from apical.engine.metrics import read_score
from apical.engine.settings import TRIAL_SETTINGS, FitArguments, Model, OnEpoch, Settings, merge_settings, takes
from apical.errors import ApicalError, check_whole_number, warn


@dataclass(repr=False)
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

    def __repr__(self) -> str:
        """Return the run in a few lines: its settings, and the mean scores of the seeds that finished."""
        settings, done = self.settings, max((row["epoch"] for row in self.history), default=0)
        lines = [
            f"Fit: {settings.rule}, {settings.model}, {settings.data}",
            f"  {done} of {settings.epochs} epochs, {len(settings.seeds)} seeds, lr {settings.lr:g}, on {self.device}",
        ]
        for name in [key for key in (self.history[-1] if self.history else ()) if key.startswith("test_")]:
            lines.append(f"  {name} {statistics.fmean(self.scores(name).values() or [math.nan]):.4f}")
        return "\n".join([*lines, *(f"  seed {seed} failed" for seed in self.failed)])

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
        """The mean accuracy over seeds; NaN if no seed was finished."""
        return statistics.fmean(self.accuracies or [math.nan])

    @property
    def seconds_per_epoch(self) -> float:
        """Training time of one epoch of all seeds together; NaN if no epoch was finished."""
        return seconds_per_epoch(self.history)


def seconds_per_epoch(history: Sequence[Mapping[str, Any]]) -> float:
    """Return the median time of an epoch, without the first, which also captures graphs and compiles, unless it is alone."""
    later = [row["seconds"] for row in history if row["epoch"] > 1]
    return float(statistics.median(later or [row["seconds"] for row in history] or [math.nan]))


@takes(FitArguments)
def fit(arguments: FitArguments) -> Fit:
    """Train `model` on `data` with `rule` and return the learners and their history."""
    if arguments.stop_after is not None:
        check_whole_number("stop_after", arguments.stop_after)
        if isinstance(arguments.epochs, int) and arguments.stop_after > arguments.epochs:
            warn(f"stop_after={arguments.stop_after} is beyond the {arguments.epochs} epochs, which all run.")
    dataset = inputs.load_dataset(arguments.data, arguments.data_options)
    keywords = {name: getattr(arguments, name) for name in inputs.SETTINGS}
    keywords |= {name: {} for name in ("options", "optimizer_options") if keywords[name] is None}
    settings = inputs.make_settings(arguments.model, dataset, **keywords)
    saved = inputs.load_saved(arguments, settings)
    return _train(arguments, dataset, [settings], saved)[0]


def sweep(
    model: Model,
    data: str | Dataset | Sequence[Tensor],
    trials: Iterable[dict[str, Any]],
    *,
    device: str = "auto",
    data_options: dict[str, Any] | None = None,
    stack: bool | None = None,
    compile: bool | None = None,
    progress: bool | TextIO = True,
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
    if isinstance(model, nn.Module):
        raise ApicalError("a sweep trains many networks; pass a model's name or a function that builds one.")
    how = FitArguments(model, data, device=device, stack=stack, compile=compile, progress=progress, on_epoch=on_epoch)
    dataset = inputs.load_dataset(data, data_options)
    settings_by_trial = [
        inputs.make_settings(model, dataset, **merge_settings(settings, trial)) for trial in _check_trials(trials)
    ]
    return _train(how, dataset, settings_by_trial)


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
    arguments: FitArguments, dataset: Dataset, settings_by_trial: list[Settings], saved: Checkpoint | None = None
) -> list[Fit]:
    """Train all seeds of all trials in one run and return one `Fit` per trial."""
    shared, device = settings_by_trial[0], devices.find_device(arguments.device)
    replicas_by_trial = []
    for trial in settings_by_trial:
        trial.check_optimizer_values()
        learners = inputs.build_learners(arguments.model, trial, dataset)
        replicas_by_trial.append([Replica(*pair, trial) for pair in zip(learners, trial.seeds, strict=True)])
    replicas = [replica for own in replicas_by_trial for replica in own]
    first = replicas[0].learner
    fingerprint = {} if arguments.checkpoint is None else checkpoints.fingerprint(first, dataset)
    if shared.protocol == "validation":
        dataset = inputs.hold_out(dataset)
    for own in replicas_by_trial:
        inputs.check_data(own[0].learner, dataset)
    if shared.batch_size > len(dataset.x_train):
        warn(
            f"batch_size={shared.batch_size} is more than the {len(dataset.x_train)} training examples, so that every step "
            "takes all of them."
        )
    run = Run(replicas, inputs.move_to_device(dataset, device, first), device, arguments, saved, fingerprint)
    weights = sum(p.numel() for replica in replicas for p in replica.learner.parameters())
    rows = shared.batch_size * len(first.network.flatten_time(dataset.y_train[:1]))
    with devices.use_precision(shared.precision, device), devices.use_threads(weights * rows, device):
        run.train()
    return [
        Fit(
            trial,
            [replica.learner for replica in own],
            collect_history(own),
            {replica.seed: replica.failure for replica in own if replica.failure},
            str(device),
            run.reasons,
        )
        for trial, own in zip(settings_by_trial, replicas_by_trial, strict=True)
    ]
