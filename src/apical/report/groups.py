"""Group the runs of a store for a report: all seeds of one declaration together, finished or not."""

import json
import statistics
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, NamedTuple

from apical.bench import suites
from apical.bench.cells import (
    HIGHER_IS_BETTER,
    PROTOCOLS,
    STAND_INS,
    Cell,
    Difference,
    Figure,
    compare_seeds,
    compare_with_figure,
    compute_std,
    group_by,
)
from apical.bench.declaration import Declaration
from apical.bench.defaults import find_settings
from apical.bench.store import Row, Store
from apical.bench.suites import Job
from apical.core.registry import rule_names
from apical.errors import StoreError

Value = int | float | str | bool | None
CONTROL = "readout"
UNNAMED_SETTINGS = {"optimizer": "adam", "optimizer_options": {}, "options": {}}
"""The values of settings that defaults.toml does not name."""


class Place(NamedTuple):
    """What a run trains, by name: a rule, a network and a data set."""

    rule: str
    model: str
    data: str


@dataclass(frozen=True)
class Group:
    """All runs of one declaration, with one run per seed."""

    cell: Cell
    """The finished seeds; `job.varied` has the settings in which groups of the same place differ."""
    curves: dict[int, list[dict[str, Any]]]
    """The history rows of every seed, finished or not."""
    settings: dict[str, Value]
    suites: tuple[str, ...]

    @property
    def key(self) -> str:
        return self.cell.rows[0].key

    @property
    def place(self) -> Place:
        return Place(self.cell.job.rule, self.cell.job.model, self.cell.job.data)

    @property
    def metric(self) -> str:
        """The name of the metric that is its score."""
        return self.cell.metrics[0]

    @cached_property
    def scores(self) -> dict[int, float]:
        """The score of each finished seed, without values that are not finite."""
        return self.cell.scores(self.metric)

    @property
    def mean(self) -> float | None:
        return statistics.fmean(self.scores.values()) if self.scores else None

    @property
    def std(self) -> float:
        return compute_std(list(self.scores.values()))

    @property
    def paper_figure(self) -> Figure | None:
        """The paper's number; None for runs on a part of the data, which cannot be compared with it."""
        return self.cell.find_figure(self.metric) if self.settings.get("examples") is None else None

    @property
    def evaluation_key(self) -> str:
        """How it is evaluated: options of the data (without folds), number of examples, and protocol.

        Only groups with the same key are compared.
        """
        asked = self.cell.rows[0].declaration.to_dict()
        of_data = {name: v for name, v in asked.get("data_options", {}).items() if name in self.settings}
        return json.dumps([of_data, asked.get("examples"), asked.get("protocol")], sort_keys=True)

    @property
    def paper_difference(self) -> Difference | None:
        """Our mean minus the paper's number; None for a text that stands in for the paper's."""
        if self.paper_figure is None or not self.scores or self.place.data in STAND_INS:
            return None
        return compare_with_figure(list(self.scores.values()), self.paper_figure)

    @property
    def seconds_per_epoch(self) -> float | None:
        """The median time of one epoch of all seeds that trained together."""
        return self.cell.seconds_per_epoch

    @property
    def peak_megabytes(self) -> float | None:
        """The peak memory in megabytes."""
        known = [row.peak_memory for row in self.cell.rows if row.peak_memory is not None]
        return max(known) / 1e6 if known else None

    @property
    def state_counts(self) -> str:
        """How many seeds are done, failed, running or unfinished, as text."""
        return ", ".join(f"{count} {name}" for name, count in Counter(row.state for row in self.cell.rows).items())

    @property
    def caveat(self) -> str:
        """What a reader must know about its score: the task of time series, another protocol, part of the data, or bf16."""
        protocol, examples = str(self.settings.get("protocol")), self.settings.get("examples")
        said = [f"task {task}"] if (task := self.settings.get("task")) else []
        said += [] if protocol == "clean" else [PROTOCOLS.get(protocol, protocol)]
        said += [] if examples is None else [f"{examples} examples"]
        return ", ".join([*said, *(["bf16"] if self.settings.get("precision") == "bf16" else [])])

    @property
    def varied_text(self) -> str:
        """The settings in which groups of the same place differ, as text."""
        return ", ".join(f"{name} {format_value(value)}" for name, value in self.cell.job.varied.items())


def format_value(value: Any) -> str:
    """Return the value of a setting as text."""
    return f"{value:g}" if isinstance(value, float) else f"{value}"


def compare_groups(group: Group, other: Group | None) -> Difference | None:
    """Return how much better a group is than another, such as the control, paired by seed; None if there is no telling.

    A positive difference is better for every metric, also for errors.
    """
    if other is None or other.metric != group.metric:
        return None
    return compare_seeds(group.scores, other.scores, higher_is_better=group.metric in HIGHER_IS_BETTER)


def collect(store: Store) -> list[Group]:
    """Read all groups of a store, sorted by network, data set and rule."""
    try:
        return _collect(store)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        if isinstance(error, StoreError):
            raise
        raise StoreError(f"{store.path} has a run that cannot be read ({error!r}).") from error


def _collect(store: Store) -> list[Group]:
    folds, keys_of_suites = _load_suites()
    groups = []
    declared_alike = group_by(store.runs(), lambda row: _make_group_key(row.declaration, folds)).values()
    for here in group_by(declared_alike, lambda rows: str(rows[0].declaration)).values():
        settings_here = [flatten_settings(rows[0].declaration, folds) for rows in here]
        for rows, settings in zip(here, settings_here, strict=True):
            varied = {
                name: value
                for name, value in settings.items()
                if name != "alignment"  # it changes what is recorded, not the training
                and any(other.get(name) != value for other in settings_here)
            }
            curves = {_number_seed(row, folds): store.history(row) for row in rows}
            seeds = zip(rows, curves.items(), strict=True)
            finished = {seed: curve for row, (seed, curve) in seeds if row.status == "done" and curve}
            one = rows[0].declaration
            job = Job(one.rule, one.model, one.data, one.epochs, tuple(curves), varied, one, None)
            names = [name for name, keys in keys_of_suites.items() if any(row.key in keys for row in rows)]
            groups.append(Group(Cell(job, rows, finished), curves, settings, tuple(names)))
    return sorted(groups, key=_get_sort_key)


@cache
def _load_suites() -> tuple[set[str], dict[str, set[str]]]:
    """Return the names of the options that are folds, and the declaration keys of each suite."""
    loaded = [suites.load(name) for name in suites.list_names()]
    folds = {suite.folds for suite in loaded if suite.folds is not None}
    jobs = {suite.name: suites.list_jobs(suite) for suite in loaded}
    return folds, {name: {job.declaration.key for job in own if job.declaration} for name, own in jobs.items()}


def flatten_settings(declaration: Declaration, folds: Iterable[str] = ()) -> dict[str, Value]:
    """Return the settings and all nested options in one flat dictionary, without the folds.

    >>> one = Declaration.from_dict({"lr": 0.1, "options": {"theta_std": 1.0}, "data_options": {"fold": 3}})
    >>> flatten_settings(one, ["fold"])
    {'lr': 0.1, 'theta_std': 1.0}
    """
    found: dict[str, Value] = {}
    for name, value in declaration.to_dict().items():
        inner = value if isinstance(value, dict) else {name: value}
        found |= {k: v if isinstance(v, int | float | str | None) else json.dumps(v) for k, v in inner.items()}
    return {name: value for name, value in found.items() if name not in folds}


def _make_group_key(declaration: Declaration, folds: set[str]) -> str:
    options = declaration.to_dict().get("data_options", {})
    if all(options.get(name) is None for name in folds):  # one split, not a fold
        return declaration.key
    return json.dumps(flatten_settings(declaration, folds), sort_keys=True)


def _number_seed(row: Row, folds: set[str]) -> int:
    """Return a number that is unique for a seed and fold, because each fold counts as a seed. Seeds are below 2**32."""
    options = row.declaration.to_dict().get("data_options", {})
    fold = sum(int(options.get(name) or 0) for name in folds)
    return row.seed + fold * 2**32


def _get_sort_key(group: Group) -> tuple[int, str, str, int, str]:
    rule, model, data = group.place
    known = ("mlp", "cnn", "rnn", "textcnn")
    return known.index(model) if model in known else len(known), model, data, rank_rule(rule), rule


def rank_rule(rule: str) -> int:
    """Return the position of a rule in the order of all rules; unknown rules come last."""
    names = rule_names()
    return names.index(rule) if rule in names else len(names)


def choose_headlines(groups: Iterable[Group]) -> dict[Place, Group]:
    """Choose one group for each place to represent it in overviews, without looking at its scores.

    Preferred are, in this order: runs on all data, the clean protocol, the most finished seeds, the most epochs,
    apical's own settings, and the group that was recorded first.
    """
    return {place: max(here, key=_get_priority) for place, here in group_by(groups, lambda g: g.place).items()}


def _get_priority(group: Group) -> tuple[bool, bool, int, int, bool, int]:
    """Return the sort key of `choose_headlines`; the largest wins."""
    asked = group.settings
    return (
        asked.get("examples") is None,
        asked.get("protocol") == "clean",
        len(group.scores),
        group.cell.job.epochs,
        _has_default_settings(group),
        -min(row.id for row in group.cell.rows),
    )


def _has_default_settings(group: Group) -> bool:
    """Return whether it has the settings of defaults.toml, except options of the data and the number of epochs."""
    defaults = {**UNNAMED_SETTINGS, **find_settings(*group.place)}
    declared = group.cell.rows[0].declaration.to_dict()
    return all(declared.get(name) == defaults[name] for name in defaults.keys() - {"epochs", "data_options"})
