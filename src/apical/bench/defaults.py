"""The recorded settings of `defaults.toml`: how they are found, how files of settings are checked, how they are chosen.

Every rule is tuned with a small budget. `search.toml` lists the trials of each data set, network and rule: at most
16, of a learning rate and at most three more settings. A trial is trained for five epochs on nine tenths of the training
data and scored on the last tenth, by accuracy or, for time series, by mean squared error; the test set is never used.
Each trial is one line of `FOLDER/DATA-MODEL-RULE.jsonl`, and trials that are in the file are not run again.

A good rate for a short run may make a long one overfit or forget. Therefore `[DATA.MODEL.whole]` lists at most eight
trials of full length for each rule, in `FOLDER/whole-DATA-MODEL-RULE.jsonl`. If there are any, they decide. A rule that has
no short trials there may have twelve, of up to five settings, as `streaming` has, whose stale weights short ones misjudge.
"""

import difflib
import json
import math
import statistics
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

import torch

from apical import data as datasets
from apical import models
from apical.bench.declaration import build_train_command, make_file_name
from apical.core.registry import options_of, resolve
from apical.data.bounded import read_file
from apical.engine import device as devices
from apical.engine import split_for_sweep, sweep
from apical.engine.settings import Settings, expand_seeds, merge_settings
from apical.errors import ApicalError, DivergenceError, warn
from apical.files import lock_folder, replace_atomically

TOML_LIMIT = 1 << 20  # bytes of a TOML file of the user's
LIKE = {
    "fashion_mnist": "mnist",
    "svhn": "cifar10",
    "sherlock_holmes": "tinyshakespeare",
    "etth2": "etth1",
    "tiny_imagenet": "cifar100",
}
"""Data sets that use the settings of another one. Their own tables come first."""
SETTING_TYPES = {"options": dict, "data_options": dict, "optimizer_options": dict, "alignment": bool}
"""Settings whose type is checked here, because all other checks rely on it."""
TYPE_DESCRIPTIONS = {
    bool: "true or false",
    dict: "a table such as { NAME = VALUE }",
    list: 'a list such as ["NAME"]',
    str: "a text",
}


EPOCHS = 5
WHOLE = "whole"
"""The key of full-length trials in search.toml, and the prefix of their files."""
TRIALS_LIMIT = 1 << 26  # bytes of a file of trials; the largest of this repository has 27 kB
MAX_TRIALS_PER_SWEEP = 8
"""At most this many trials run in one sweep. Their results are written when it ends."""

Trial = dict[str, Any]
PlannedTrial = tuple[Trial, dict[str, Any]]
"""A trial and all of its settings."""


@cache
def load_shipped(name: str) -> dict[str, Any]:
    """Return the contents of a TOML file that comes with the bench."""
    return tomllib.loads(resources.files("apical.bench").joinpath(name).read_text("utf-8"))


def find_settings(rule: str, model: str, data: str, table: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return the recorded settings as keywords for `fit`; an empty dictionary if there are none.

    >>> find_settings("dll", "mlp", "mnist")["batch_size"]
    128
    """
    recorded = load_shipped("defaults.toml") if table is None else table
    common: dict[str, Any] = {}
    found: dict[str, Any] = {}
    for name in (LIKE[data], data) if data in LIKE else (data,):
        shared = dict(recorded.get(name, {}).get(model, {}))
        own = shared.pop("rules", {}).get(rule)
        common |= shared
        # A rule's own table was chosen as a whole, so it replaces the table of that rule for the other data set.
        found = found | shared if own is None else common | own
    return found


def load_defaults_file(path: Path) -> dict[str, Any]:
    """Return the recorded settings overridden by a user's file, or only that file if it has `replace = true`."""
    try:
        own = tomllib.loads(read_file(path, TOML_LIMIT).decode("utf-8"))
    except (OSError, ValueError, RecursionError) as error:  # of the encoding, of TOML, of tables in tables in tables
        raise ApicalError(f"the settings in {path} cannot be read ({error}).") from error
    check_types(own, {"replace": bool}, str(path))
    replace = own.pop("replace", False)
    for data, kinds in own.items():
        if not isinstance(kinds, dict) or not all(isinstance(entry, dict) for entry in kinds.values()):
            raise ApicalError(f"{path} must have tables [DATA.MODEL] as defaults.toml has; {data!r} is none.")
        with add_context(str(path)):
            datasets.lookup(data)
        for model, entry in kinds.items():
            check_model(model, f"[{data}] of {path}")
            where, rules = f"[{data}.{model}] of {path}", entry.get("rules", {})
            check_types(entry, {"rules": dict}, where)
            check_types(rules, dict.fromkeys(rules, dict), f"[{data}.{model}.rules] of {path}")
            check_settings({name: value for name, value in entry.items() if name != "rules"}, where)
            for rule, settings in rules.items():
                with add_context(where):
                    resolve(rule)
                check_settings(settings, f'[{data}.{model}.rules."{rule}"] of {path}')
    return own if replace else merge_settings(load_shipped("defaults.toml"), own)


def check_settings(found: dict[str, Any], where: str) -> None:
    """Check settings, even if no run with them was requested."""
    fields = [name for name in Settings.__dataclass_fields__ if name not in ("rule", "model", "data", "seeds")]
    check_names(found, fields, where)
    check_types(found, SETTING_TYPES, where)
    with add_context(where):  # the optimizer's options are checked when the optimizer is known
        Settings("", "", "", **{**found, "optimizer_options": {}})


def check_model(name: str, where: str) -> None:
    """Check that this is the name of a model."""
    if not models.is_model(name):
        check_names([name], models.NAMES, where)


def check_names(found: Iterable[Any], names: Sequence[str], where: str) -> None:
    """Check that all names are among the known ones. The error suggests a similar name."""
    for name in found:
        if name not in names:
            near = difflib.get_close_matches(str(name), names, n=1)
            hint = f"did you mean {near[0]!r}? It" if near else "it"
            raise ApicalError(f"{where}: {name!r} is unknown; {hint} takes {', '.join(names) or 'none'}.")


def check_types(found: dict[str, Any], kinds: Mapping[str, type], where: str) -> None:
    """Check the types of some values."""
    for name, kind in kinds.items():
        if name in found and not isinstance(found[name], kind):
            raise ApicalError(f"{name} in {where} is {found[name]!r}, but must be {TYPE_DESCRIPTIONS[kind]}.")


@contextmanager
def add_context(where: str) -> Iterator[None]:
    """Prepend the place of the fault to the message of an ApicalError."""
    try:
        yield
    except ApicalError as error:
        raise ApicalError(f"{where}: {error}") from error


# Tuning: the trials by which settings are chosen.


def list_trials(rule: str, model: str, data: str, *, whole: bool = False) -> list[Trial]:
    """Return the trials of a rule in `search.toml`. A variant without its own trials has those of the plain rule."""
    table = _index_trials(whole)
    found = table.get((data, model, rule), table.get((data, model, rule.partition(":")[0])))
    if not found:
        rules = [name for on, network, name in table if (on, network) == (data, model)]
        has = f"those of {', '.join(rules)}" if rules else ", ".join(sorted({f"{m} on {d}" for d, m, _ in table}))
        raise ApicalError(
            f"search.toml lists no {'whole ' * whole}trials of {rule} for {model} on {data}; it has {has}. `apical tune "
            "--trials FILE` takes trials of your own, and so does apical.sweep in Python."
        )
    return found


def _index_trials(whole: bool) -> dict[tuple[str, str, str], list[Trial]]:
    """Return the trials of five epochs, or of full length, by data, network and rule."""
    return {
        (data, model, rule): trials
        for data, models in load_shipped("search.toml").items()
        for model, rules in models.items()
        for rule, trials in (rules.get(WHOLE, {}) if whole else rules).items()
        if rule != WHOLE
    }


def build_settings(rule: str, model: str, data: str, trial: Trial, *, whole: bool = False) -> dict[str, Any]:
    """Return keywords for `fit`: the recorded settings of the network, overridden by the trial's.

    Names in the trial that are options of the rule or of the data go to `options` and `data_options`.
    """
    recorded, source = find_settings("", model, data), datasets.lookup(data)
    options = {name: trial[name] for name in trial if name in options_of(resolve(rule)[0])}
    of_data = {name: trial[name] for name in trial if name in source.options}
    given = {name: trial[name] for name in trial if name not in {**options, **of_data}}
    common = {
        "loss": source.LOSS,
        **recorded,
        **({} if whole else {"epochs": EPOCHS}),
        "protocol": "validation",
        "options": {},
        "data_options": recorded.get("data_options", {}),
    }
    return merge_settings(merge_settings(common, given), {"options": options, "data_options": of_data})


def read_trials(path: Path) -> list[dict[str, Any]]:
    """Return the trials that were written so far."""
    if not path.exists():
        return []
    try:
        rows = [json.loads(line) for line in read_file(path, TRIALS_LIMIT).decode("utf-8").splitlines()]
        if not all(isinstance(row, dict) for row in rows):
            raise ValueError("a line is no object")
        return [_to_shares(row) for row in rows]
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise ApicalError(f"{path} is not a list of trials, one JSON object in each line: {error}.") from error


def read_own_trials(path: Path, rule: str, data: str) -> list[Trial]:
    """Return the trials of a user's file, at least one, whose names are settings or options of the rule or the data."""
    found = read_trials(path)
    if not found:
        raise ApicalError(f'{path} has no trials; write one JSON object in each line, such as {{"lr": 0.01}}.')
    apart = ("rule", "model", "data", "seeds", "protocol", "alignment")
    fields = [name for name in Settings.__dataclass_fields__ if name not in apart]
    options, of_data = list(options_of(resolve(rule)[0])), datasets.lookup(data).options
    for trial in found:
        for name in ("protocol", "alignment"):
            if name in trial:
                raise ApicalError(f"{path}: a trial has no {name}; all are judged alike, on held-out training data.")
        check_names(trial, [*fields, *options, *of_data], str(path))
        check_types(trial, SETTING_TYPES, str(path))
        check_names(trial.get("options", {}), options, f"options in {path}")
        check_names(trial.get("data_options", {}), of_data, f"data_options in {path}")
    return found


def _read_results(path: Path) -> list[dict[str, Any]]:
    """Return the rows of finished trials, each with its trial or command and its score."""
    rows = read_trials(path)
    for number, row in enumerate(rows, 1):
        trial, command = row.get("trial", {}), row.get("command", "")
        named = isinstance(trial, dict) and isinstance(command, str) and (trial or command)
        scores = [row.get("test_accuracy", row.get("mse", "")), row.get("std", "")]
        if not named or not all(isinstance(score, int | float | None) for score in scores):
            raise ApicalError(f"line {number} of {path} is not the result of a trial, which `apical tune` writes.")
    return rows


def _add_results(path: Path, new: list[dict[str, Any]]) -> None:
    """Add rows to a file, to which other processes may add theirs."""
    with lock_folder(path.parent):
        rows = _read_results(path)
        known = [row.get("trial") for row in rows]
        rows += [row for row in new if row["trial"] not in known]
        with replace_atomically(path) as temporary:
            temporary.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")


def _to_shares(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row with its accuracy between 0 and 1, as in all files; version 0.1 wrote `accuracy` in percent."""
    if "accuracy" not in row:
        return row
    shares = {name: None if row.get(name) is None else row[name] / 100 for name in ("accuracy", "std")}
    kept = {name: value for name, value in row.items() if name not in shares}
    return {**kept, "test_accuracy": shares["accuracy"], "std": shares["std"]}


def get_trials_path(folder: Path, rule: str, model: str, data: str, *, whole: bool = False) -> Path:
    name = f"{make_file_name(rule, model, data)}.jsonl"
    return folder / (f"{WHOLE}-{name}" if whole else name)


def tune(
    rule: str,
    model: str,
    data: str,
    folder: Path,
    *,
    trials: list[Trial] | None = None,
    whole: bool = False,
    seeds: Any = 1,
    device: str = "auto",
) -> Iterator[dict[str, Any]]:
    """Run the trials of a rule, by default those listed, that are not in its file yet. Yield all rows, the file's first."""
    path = get_trials_path(folder, rule, model, data, whole=whole)
    rows = _read_results(path)
    yield from rows
    known = [row.get("trial") for row in rows]
    wanted = list_trials(rule, model, data, whole=whole) if trials is None else trials
    missing = [trial for trial in wanted if trial not in known]
    asked = list(expand_seeds(seeds))
    others = [row.get("seeds") for row in rows if row.get("trial") in wanted and row.get("seeds") != asked]
    if others:
        warn(
            f"trials in {path} were run with the seeds {others[0]} and are not run again; another --out runs them with "
            f"{asked}."
        )
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
        _add_results(path, new)
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
    """Return the row of a trial, with the mean over finished seeds; None if none finished."""
    by, digits = "mse" if choose_metric(settings.data) == "mse" else "test_accuracy", 5
    return {
        "rule": settings.rule,
        "model": settings.model,
        "data": settings.data,
        "seeds": list(settings.seeds),
        "protocol": settings.protocol,
        "device": devices.describe_device(devices.find_device(device)),
        "torch": torch.__version__,
        "command": build_train_command(settings.to_dict()),
        "trial": trial,
        by: round(statistics.fmean(values), digits) if values else None,
        "std": round(statistics.stdev(values) if len(values) > 1 else 0.0, digits) if values else None,
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
    score: float | None = row.get("test_accuracy", row.get("mse"))
    if score is None:
        return -math.inf
    if "test_accuracy" in row:
        return score
    return -math.log(score) if score else math.inf


def format_score(row: dict[str, Any]) -> str:
    """Return the score of a trial as text.

    >>> format_score({"test_accuracy": 0.984, "std": 0.001}), format_score({"mse": 0.0351, "std": 0.0})
    ('98.40 ± 0.10', 'MSE 0.03510 ± 0.00000')
    >>> format_score({"test_accuracy": None})
    'diverged'
    """
    name, factor, text = "mse", 1, "MSE {:.5f} ± {:.5f}"
    if "test_accuracy" in row:
        name, factor, text = "test_accuracy", 100, "{:.2f} ± {:.2f}"
    return "diverged" if row[name] is None else text.format(factor * row[name], factor * row["std"])
