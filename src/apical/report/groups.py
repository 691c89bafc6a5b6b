"""What a store holds, as a report tells it: all seeds of one declaration together, finished or not."""

import json
import math
import statistics
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from apical.bench import suites
from apical.bench.compare import Difference, against, paired, spread
from apical.bench.declaration import Declaration
from apical.bench.defaults import settings_for
from apical.bench.paper import Figure
from apical.bench.store import Row, Store
from apical.bench.suites import Choice, Job
from apical.bench.tables import PROTOCOLS, RISING, Cell
from apical.core.registry import RULES, rule_names
from apical.errors import StoreError

Value = int | float | str | bool | None
Place = tuple[str, str, str]
"""A rule, a network and a data set."""
CONTROL = "readout"
PLAIN = {"optimizer": "adam", "optimizer_options": {}, "options": {}}
"""What recorded settings mean where they are silent."""


@dataclass(frozen=True)
class Group:
    """All seeds of one declaration, and what is there of them."""

    cell: Cell
    """The finished seeds; `job.varied` has the settings that tell it from others of the same place."""
    curves: dict[int, list[dict[str, Any]]]
    """The epochs of every seed, finished or not."""
    settings: dict[str, Value]
    suites: tuple[str, ...]

    @property
    def key(self) -> str:
        return self.cell.rows[0].key

    @property
    def place(self) -> Place:
        job = self.cell.job
        return job.rule, job.model, job.data

    @property
    def metric(self) -> str:
        """What it is judged by."""
        return self.cell.metrics[0]

    @cached_property
    def scores(self) -> dict[int, float]:
        """One value for each finished seed; what is not a finite number is no value."""
        return {
            seed: float(value)
            for seed, value in self.cell.scores(self.metric).items()
            if math.isfinite(value)
        }

    @property
    def mean(self) -> float | None:
        return statistics.fmean(self.scores.values()) if self.scores else None

    @property
    def spread(self) -> float:
        return spread(list(self.scores.values()))

    @property
    def figure(self) -> Figure | None:
        """What the paper prints here; a part of the data is not compared with it."""
        return self.cell.figure(self.metric) if self.settings.get("examples") is None else None

    @property
    def terms(self) -> str:
        """On what, and by which epoch, it is judged: groups of other terms are not compared. Folds are as one."""
        asked = self.cell.rows[0].declaration.to_dict()
        of_data = {name: v for name, v in asked.get("data_options", {}).items() if name in self.settings}
        return json.dumps([of_data, asked.get("examples"), asked.get("protocol")], sort_keys=True)

    @property
    def beside(self) -> Difference | None:
        """Ours less the paper's."""
        return against(list(self.scores.values()), self.figure) if self.figure and self.scores else None

    @property
    def seconds(self) -> float | None:
        """The time of an epoch of all seeds that trained together."""
        known = [row.seconds_per_epoch for row in self.cell.rows if row.seconds_per_epoch is not None]
        return statistics.median(known) if known and all(map(math.isfinite, known)) else None

    @property
    def memory(self) -> float | None:
        """Megabytes at the peak."""
        known = [row.peak_memory for row in self.cell.rows if row.peak_memory is not None]
        return max(known) / 1e6 if known else None

    @property
    def states(self) -> str:
        """How many seeds are done, failed, running or left unfinished."""
        return ", ".join(f"{count} {name}" for name, count in Counter(map(state, self.cell.rows)).items())

    @property
    def caveat(self) -> str:
        """What must stand beside its score: what series are asked, another protocol, a part of the data, or fewer digits."""
        protocol, examples = str(self.settings.get("protocol")), self.settings.get("examples")
        said = [
            f"task {task}" if (task := self.settings.get("task")) else "",
            "" if protocol == "clean" else PROTOCOLS.get(protocol, protocol),
            "" if examples is None else f"{examples} examples",
            "bf16" if self.settings.get("precision") == "bf16" else "",
        ]
        return ", ".join(filter(None, said))

    @property
    def varied(self) -> str:
        """The settings that tell it from others of the same place, in words."""
        return ", ".join(f"{name} {told(value)}" for name, value in self.cell.job.varied.items())


def state(row: Row) -> str:
    if row.status == "running":
        return "running" if row.active else "unfinished"
    return row.status


def told(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else f"{value}"


def over(group: Group, control: Group | None) -> Difference | None:
    """How much better than the control, seed by seed, whichever way its metric points; None where nobody can say."""
    if control is None or control.metric != group.metric:
        return None
    return paired(group.scores, control.scores, rising=group.metric in RISING)


def collect(store: Store) -> list[Group]:
    """Every declaration of a store, in the order of networks, data sets and rules."""
    try:
        return _collect(store)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        if isinstance(error, StoreError):
            raise
        raise StoreError(f"{store.path} has a run that cannot be read ({error!r}).") from error


def _collect(store: Store) -> list[Group]:
    folds, members = _suites()
    by_settings: dict[str, list[Row]] = {}
    for row in store.runs():
        by_settings.setdefault(_identity(row.declaration, folds), []).append(row)
    flats = {same: flat(rows[0].declaration, folds) for same, rows in by_settings.items()}
    alike: dict[Place, list[dict[str, Value]]] = {}
    for same, rows in by_settings.items():
        alike.setdefault(_place(rows[0].declaration), []).append(flats[same])
    found = []
    for same, rows in by_settings.items():
        own, one = flats[same], rows[0].declaration
        others = alike[_place(one)]
        varied = {
            name: value for name, value in own.items() if any(other.get(name) != value for other in others)
        }
        varied.pop("alignment", None)  # it changes what is recorded, not what is learned
        curves = {_number(row, folds): store.history(row) for row in rows}
        job = Job(*_place(one), one.epochs, tuple(curves), varied, one, None)
        finished = {
            number: curve
            for row, (number, curve) in zip(rows, curves.items(), strict=True)
            if row.status == "done" and curve
        }
        names = [name for name, keys in members.items() if any(row.key in keys for row in rows)]
        found.append(Group(Cell(job, rows, finished), curves, own, tuple(names)))
    return sorted(found, key=_order)


def _suites() -> tuple[set[str], dict[str, set[str]]]:
    """The options that are folds, and the keys of the runs that each suite declares."""
    loaded = [suites.load(name) for name in suites.names()]
    folds = {suite.folds for suite in loaded if suite.folds is not None}
    members = {
        suite.name: {job.declaration.key for job in suites.jobs(suite, Choice()) if job.declaration}
        for suite in loaded
    }
    return folds, members


def flat(declaration: Declaration, folds: Iterable[str] = ()) -> dict[str, Value]:
    """Settings and options side by side, by name, without the folds.

    >>> one = Declaration.from_dict({"lr": 0.1, "options": {"theta_std": 1.0}, "data_options": {"fold": 3}})
    >>> flat(one, ["fold"])
    {'lr': 0.1, 'theta_std': 1.0}
    """
    found: dict[str, Value] = {}
    for name, value in declaration.to_dict().items():
        inner = value if isinstance(value, dict) else {name: value}
        found |= {
            k: v if isinstance(v, int | float | str | None) else json.dumps(v) for k, v in inner.items()
        }
    return {name: value for name, value in found.items() if name not in folds}


def _identity(declaration: Declaration, folds: set[str]) -> str:
    if not folds & declaration.to_dict().get("data_options", {}).keys():
        return declaration.key
    return json.dumps(flat(declaration, folds), sort_keys=True)


def _number(row: Row, folds: set[str]) -> int:
    """A fold of a seed counts as a seed of its own; seeds are below 2**32."""
    options = row.declaration.to_dict().get("data_options", {})
    fold = sum(int(options.get(name, 0)) for name in folds)
    return row.seed + fold * 2**32


def _place(declaration: Declaration) -> Place:
    return declaration.rule, declaration.model, declaration.data


def _order(group: Group) -> tuple[int, str, str, int, str]:
    rule, model, data = group.place
    known = ("mlp", "cnn", "rnn", "textcnn")
    return known.index(model) if model in known else len(known), model, data, rank(rule), rule


def rank(rule: str) -> int:
    """A rule's place in the order of the rules; those of nobody's knowledge come last."""
    names = rule_names()
    return names.index(rule) if rule in names else len(names)


def title(rule: str) -> str:
    """The full name of a rule that is known."""
    name, _, variant = rule.partition(":")
    known = RULES[name].TITLE if name in RULES else ""
    return f"{known}, {variant}" if known and variant else known


def headlines(groups: Iterable[Group]) -> dict[Place, Group]:
    """Of each place the one declaration that stands for it, chosen without a look at its scores.

    Whole data before a part of it, the clean protocol before others, then the most finished seeds, the most epochs,
    apical's own settings before others, and the one that was recorded first.
    """
    best: dict[Place, Group] = {}
    for group in groups:
        known = best.get(group.place)
        if known is None or _weight(group) > _weight(known):
            best[group.place] = group
    return best


def _weight(group: Group) -> tuple[bool, bool, int, int, bool, int]:
    asked = group.settings
    return (
        asked.get("examples") is None,
        asked.get("protocol") == "clean",
        len(group.scores),
        group.cell.job.epochs,
        _recorded(group),
        -min(row.id for row in group.cell.rows),
    )


def _recorded(group: Group) -> bool:
    """Whether it trained with the settings of defaults.toml, those of the data and the number of epochs aside."""
    own = {**PLAIN, **settings_for(*group.place)}
    said = group.cell.rows[0].declaration.to_dict()
    return all(said.get(name) == own[name] for name in own.keys() - {"epochs", "data_options"})
