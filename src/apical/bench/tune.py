"""Tune settings with the same small budget for every rule, on a validation split, and keep every trial.

`search.toml` lists the trials of each data set, network and rule: at most 16, of a learning rate and at most three
more settings. The tasks of a time series are settings of the data. A trial is trained for five epochs on nine tenths of
the training data and scored on the last tenth, by accuracy or, for time series, by mean squared error. The test set is
never used. Trials run together (`apical.sweep`). Each trial is one line of `FOLDER/DATA-MODEL-RULE.jsonl`, and trials
that are in the file are not run again.

The best trial after five epochs need not be the best after thirty, since a good rate for a short run may make a long one
overfit or forget. Therefore `[DATA.MODEL.whole]` lists trials of full length (the recorded number of epochs), at most
eight for each rule, in `FOLDER/whole-DATA-MODEL-RULE.jsonl`. If there are any, they decide.
"""

import json
import math
import statistics
import tomllib
from collections.abc import Iterable, Iterator
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

import torch

from apical import data as datasets
from apical.bench import results
from apical.bench.compare import compute_std
from apical.bench.defaults import find_settings
from apical.core.registry import options_of, resolve
from apical.engine import device as devices
from apical.engine import split_for_sweep, sweep
from apical.engine.settings import Settings, expand_seeds
from apical.errors import ApicalError, DivergenceError
from apical.files import replace_atomically

EPOCHS = 5
WHOLE = "whole"
"""The key of full-length trials in search.toml, and the prefix of their files."""
MAX_TRIALS_PER_SWEEP = 8
"""At most this many trials run in one sweep. Their results are written when it ends."""

Trial = dict[str, Any]
PlannedTrial = tuple[Trial, dict[str, Any]]
"""A trial and all of its settings."""


@cache
def _load_table() -> dict[str, Any]:
    """Return the contents of search.toml."""
    return tomllib.loads(resources.files("apical.bench").joinpath("search.toml").read_text("utf-8"))


def list_trials(rule: str, model: str, data: str, *, whole: bool = False) -> list[Trial]:
    """Return the trials of a rule in `search.toml`. A variant without its own trials has those of the plain rule."""
    table = _index_trials(whole)
    found = table.get((data, model, rule), table.get((data, model, rule.partition(":")[0])))
    if not found:
        rules = [name for on, network, name in table if (on, network) == (data, model)]
        has = f"those of {', '.join(rules)}" if rules else ", ".join(sorted({f"{m} on {d}" for d, m, _ in table}))
        raise ApicalError(
            f"search.toml lists no {'whole ' * whole}trials of {rule} for {model} on {data}; it has {has}."
        )
    return found


def _index_trials(whole: bool) -> dict[tuple[str, str, str], list[Trial]]:
    """Return the trials of five epochs, or of full length, by data, network and rule."""
    return {
        (data, model, rule): trials
        for data, models in _load_table().items()
        for model, rules in models.items()
        for rule, trials in (rules.get(WHOLE, {}) if whole else rules).items()
        if rule != WHOLE
    }


def build_settings(rule: str, model: str, data: str, trial: Trial, *, whole: bool = False) -> dict[str, Any]:
    """Return keywords for `fit`: the recorded settings of the network, overridden by the trial's.

    Names in the trial that are options of the rule or of the data go to `options` and `data_options`.
    """
    recorded, source = find_settings("", model, data), datasets.lookup(data)
    options = {name: value for name, value in trial.items() if name in options_of(resolve(rule)[0])}
    of_data = {name: value for name, value in trial.items() if name in source.options}
    given = {name: value for name, value in trial.items() if name not in {**options, **of_data}}
    return {
        "loss": source.LOSS,
        **recorded,
        **({} if whole else {"epochs": EPOCHS}),
        "protocol": "validation",
        **given,
        "options": options,
        "data_options": {**recorded.get("data_options", {}), **of_data},
    }


def read_trials(path: Path) -> list[dict[str, Any]]:
    """Return the trials that were written so far."""
    if not path.exists():
        return []
    try:
        return [json.loads(line) for line in path.read_text("utf-8").splitlines()]
    except ValueError as error:
        raise ApicalError(f"{path} is not a list of trials, one JSON object in each line: {error}.") from error


def get_trials_path(folder: Path, rule: str, model: str, data: str, *, whole: bool = False) -> Path:
    name = results.make_file_name(rule, model, data).replace(".json", ".jsonl")
    return folder / (f"{WHOLE}-{name}" if whole else name)


def tune(
    rule: str, model: str, data: str, folder: Path, *, whole: bool = False, seeds: Any = 1, device: str = "auto"
) -> Iterator[dict[str, Any]]:
    """Run the missing trials of a rule. Yield the rows of all trials, those from the file first."""
    path = get_trials_path(folder, rule, model, data, whole=whole)
    rows = read_trials(path)
    yield from rows
    known = [row.get("trial") for row in rows]
    missing = [trial for trial in list_trials(rule, model, data, whole=whole) if trial not in known]
    planned = [(trial, build_settings(rule, model, data, trial, whole=whole)) for trial in missing]
    for group in _group_for_sweep(rule, model, data, planned):
        (shared, *_), own = zip(*(split_for_sweep(each) for _, each in group), strict=True)
        try:
            fits = sweep(model, data, own, rule=rule, seeds=seeds, device=device, **shared)
            scores = [list(fit.scores(f"test_{choose_metric(data)}").values()) for fit in fits]
        except DivergenceError:  # every trial diverged
            scores = [[] for _ in group]
        new = [
            _make_row(trial, Settings(rule, model, data, seeds=expand_seeds(seeds), **each), values, device)
            for (trial, each), values in zip(group, scores, strict=True)
        ]
        rows += new
        with replace_atomically(path) as temporary:
            temporary.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
        yield from new


def _group_for_sweep(rule: str, model: str, data: str, planned: list[PlannedTrial]) -> Iterator[list[PlannedTrial]]:
    """Yield groups of trials that one sweep can run: their shared settings are equal."""
    kinds: dict[str, list[PlannedTrial]] = {}
    for trial, settings in planned:
        kind = json.dumps(split_for_sweep(Settings(rule, model, data, **settings).to_dict())[0])
        kinds.setdefault(kind, []).append((trial, settings))
    for alike in kinds.values():
        for start in range(0, len(alike), MAX_TRIALS_PER_SWEEP):
            yield alike[start : start + MAX_TRIALS_PER_SWEEP]


def _make_row(trial: Trial, settings: Settings, values: list[float], device: str) -> dict[str, Any]:
    """Return the row of a trial, with the mean over finished seeds (accuracies in percent); None if none finished."""
    by = choose_metric(settings.data)
    scores, digits = ([100 * value for value in values], 2) if by == "accuracy" else (values, 5)
    return {
        "rule": settings.rule,
        "model": settings.model,
        "data": settings.data,
        "seeds": list(settings.seeds),
        "protocol": settings.protocol,
        "device": devices.describe_device(devices.find_device(device)),
        "torch": torch.__version__,
        "command": results.build_train_command(settings.to_dict()),
        "trial": trial,
        by: round(statistics.fmean(scores), digits) if scores else None,
        "std": round(compute_std(scores), digits) if scores else None,
    }


def choose_metric(data: str) -> str:
    """Return the metric by which trials are compared: accuracy, or mse for regression."""
    return "mse" if datasets.lookup(data).LOSS == "mse" else "accuracy"


def sort_best_first(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Sort rows of trials: the best first, those that diverged last."""
    return sorted(rows, key=compute_merit, reverse=True)


def compute_merit(row: dict[str, Any]) -> float:
    """Return a value that is higher for better trials: the accuracy, or minus the logarithm of the error.

    With the logarithm, a mean over tasks gives them equal weight, whatever the scale of their errors.
    """
    score = _read_score(row)
    if score is None:
        return -math.inf
    if "accuracy" in row:
        return score
    return -math.log(score) if score else math.inf


def format_score(row: dict[str, Any]) -> str:
    """Return the score of a trial as text.

    >>> format_score({"accuracy": 98.4, "std": 0.1}), format_score({"mse": 0.0351, "std": 0.0})
    ('98.40 ± 0.10', 'MSE 0.03510 ± 0.00000')
    >>> format_score({"accuracy": None})
    'diverged'
    """
    if _read_score(row) is None:
        return "diverged"
    if "accuracy" in row:
        return f"{row['accuracy']:.2f} ± {row['std']:.2f}"
    return f"MSE {row['mse']:.5f} ± {row['std']:.5f}"


def _read_score(row: dict[str, Any]) -> float | None:
    """Return the accuracy or error of a trial, None if it diverged."""
    score: float | None = row["accuracy" if "accuracy" in row else "mse"]
    return score
