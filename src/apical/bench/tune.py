"""Settings chosen honestly: the same small budget for every rule, on a validation split, and every trial kept.

`search.toml` lists the trials of each data set, network and rule: at most 16, of a learning rate and at most three
settings more; of time series, tasks are settings of the data. A trial is trained for five epochs on nine tenths of the
training data and judged by the last tenth, by its accuracy or, of series, by its mean squared error; the test set is
never touched. Trials run together (`apical.sweep`), each is one line of
`FOLDER/DATA-MODEL-RULE.jsonl`, and those that are in the file already are not run again.

What is best after five epochs need not be after thirty: a rate that is right for the short run may let the long one
overfit or forget. Under `[DATA.MODEL.whole]` the list therefore has trials of the recorded number of epochs, at most eight
of a rule, in `FOLDER/whole-DATA-MODEL-RULE.jsonl`; where there are any, they decide.
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
from apical.bench.compare import spread
from apical.bench.defaults import settings_for
from apical.core.registry import options_of, resolve
from apical.engine import device as devices
from apical.engine import for_sweep, sweep
from apical.engine.settings import Settings, seed_list
from apical.errors import ApicalError, DivergenceError
from apical.files import atomic

EPOCHS = 5
WHOLE = "whole"
"""Where trials of the whole length are listed, and how the names of their files begin."""
TOGETHER = 8
"""Trials of one sweep: their results are written down when it ends."""

Trial = dict[str, Any]
Planned = tuple[Trial, dict[str, Any]]
"""A trial, and all of its settings."""


@cache
def _table() -> dict[str, Any]:
    return tomllib.loads(resources.files("apical.bench").joinpath("search.toml").read_text("utf-8"))


def trials_of(rule: str, model: str, data: str, *, whole: bool = False) -> list[Trial]:
    """The trials that `search.toml` lists; those of the plain rule serve its variants."""
    table = _lists(whole)
    found = table.get((data, model, rule), table.get((data, model, rule.partition(":")[0])))
    if not found:
        rules = [name for on, network, name in table if (on, network) == (data, model)]
        has = (
            f"those of {', '.join(rules)}"
            if rules
            else ", ".join(sorted({f"{m} on {d}" for d, m, _ in table}))
        )
        raise ApicalError(
            f"search.toml lists no {'whole ' * whole}trials of {rule} for {model} on {data}; it has {has}."
        )
    return found


def _lists(whole: bool) -> dict[tuple[str, str, str], list[Trial]]:
    """By data, network and rule: the trials of five epochs, or those of the whole length."""
    return {
        (data, model, rule): trials
        for data, models in _table().items()
        for model, rules in models.items()
        for rule, trials in (rules.get(WHOLE, {}) if whole else rules).items()
        if rule != WHOLE
    }


def settings_of(rule: str, model: str, data: str, trial: Trial, *, whole: bool = False) -> dict[str, Any]:
    """Keywords for `fit`: what is recorded for the network, and the trial's own; options, the rule's and the data's, by
    their names."""
    recorded, source = settings_for("", model, data), datasets.lookup(data)
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


def read(path: Path) -> list[dict[str, Any]]:
    """The trials written so far."""
    if not path.exists():
        return []
    try:
        return [json.loads(line) for line in path.read_text("utf-8").splitlines()]
    except ValueError as error:
        raise ApicalError(
            f"{path} is not a list of trials, one JSON object in each line: {error}."
        ) from error


def path_of(folder: Path, rule: str, model: str, data: str, *, whole: bool = False) -> Path:
    name = results.file_name(rule, model, data).replace(".json", ".jsonl")
    return folder / (f"{WHOLE}-{name}" if whole else name)


def tune(
    rule: str,
    model: str,
    data: str,
    folder: Path,
    *,
    whole: bool = False,
    seeds: Any = 1,
    device: str = "auto",
) -> Iterator[dict[str, Any]]:
    """Run what is missing of a rule's trials; yields all of them, the ones that were there first."""
    path = path_of(folder, rule, model, data, whole=whole)
    rows = read(path)
    yield from rows
    known = [row.get("trial") for row in rows]
    missing = [trial for trial in trials_of(rule, model, data, whole=whole) if trial not in known]
    planned = [(trial, settings_of(rule, model, data, trial, whole=whole)) for trial in missing]
    for group in _groups(rule, model, data, planned):
        (shared, *_), own = zip(*(for_sweep(each) for _, each in group), strict=True)
        try:
            fits = sweep(model, data, own, rule=rule, seeds=seeds, device=device, **shared)
            scores = [list(fit.scores(f"test_{judge(data)}").values()) for fit in fits]
        except DivergenceError:  # every one of them
            scores = [[] for _ in group]
        new = [
            _row(trial, Settings(rule, model, data, seeds=seed_list(seeds), **each), values, device)
            for (trial, each), values in zip(group, scores, strict=True)
        ]
        rows += new
        with atomic(path) as temporary:
            temporary.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
        yield from new


def _groups(rule: str, model: str, data: str, planned: list[Planned]) -> Iterator[list[Planned]]:
    """Trials that one sweep can hold: alike in all that a sweep's trials share."""
    kinds: dict[str, list[Planned]] = {}
    for trial, settings in planned:
        kind = json.dumps(for_sweep(Settings(rule, model, data, **settings).to_dict())[0])
        kinds.setdefault(kind, []).append((trial, settings))
    for alike in kinds.values():
        for start in range(0, len(alike), TOGETHER):
            yield alike[start : start + TOGETHER]


def _row(trial: Trial, settings: Settings, values: list[float], device: str) -> dict[str, Any]:
    """A trial's line: the mean over the seeds that finished, accuracies in percent; none where none did."""
    by = judge(settings.data)
    scores, digits = ([100 * value for value in values], 2) if by == "accuracy" else (values, 5)
    return {
        "rule": settings.rule,
        "model": settings.model,
        "data": settings.data,
        "seeds": list(settings.seeds),
        "protocol": settings.protocol,
        "device": devices.describe_device(devices.find_device(device)),
        "torch": torch.__version__,
        "command": results.command_of(settings.to_dict()),
        "trial": trial,
        by: round(statistics.fmean(scores), digits) if scores else None,
        "std": round(spread(scores), digits) if scores else None,
    }


def judge(data: str) -> str:
    """What trials are judged by: accuracy or, where values are to be predicted, mse."""
    return "mse" if datasets.lookup(data).LOSS == "mse" else "accuracy"


def best_first(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Lines of trials, the best one first and those that diverged last."""
    return sorted(rows, key=merit, reverse=True)


def merit(row: dict[str, Any]) -> float:
    """More is better: the accuracy, or minus the logarithm of an error, whose mean over tasks weighs them alike."""
    score = _score(row)
    if score is None:
        return -math.inf
    if "accuracy" in row:
        return score
    return -math.log(score) if score else math.inf


def told(row: dict[str, Any]) -> str:
    """A line's score for people.

    >>> told({"accuracy": 98.4, "std": 0.1}), told({"mse": 0.0351, "std": 0.0}), told({"accuracy": None})
    ('98.40 ± 0.10', 'MSE 0.03510 ± 0.00000', 'diverged')
    """
    if _score(row) is None:
        return "diverged"
    if "accuracy" in row:
        return f"{row['accuracy']:.2f} ± {row['std']:.2f}"
    return f"MSE {row['mse']:.5f} ± {row['std']:.5f}"


def _score(row: dict[str, Any]) -> float | None:
    score: float | None = row["accuracy" if "accuracy" in row else "mse"]
    return score
