"""The main tables of the HTML page: one row for each rule and network, one column for each data set.

Our scores stand beside the paper's and are compared with the control. Networks with data sets in common share a table,
so there are separate tables for images and for sequences.
"""

import math
import statistics
from dataclasses import dataclass

from apical.bench.cells import AVERAGE, HIGHER_IS_BETTER, METRICS, TABLE_1, Difference, find_rule_judgement, group_by
from apical.bench.export import TITLES
from apical.plausibility.criteria import find_claims
from apical.report.groups import CONTROL, Group, choose_headlines, compare_with_control

JUDGES = ("paper", "audit")
"""The two sources of verdicts on the criteria C1 to C3; each has three columns."""


@dataclass(frozen=True)
class Column:
    """A data set, its metric, and the range of values that its bars show."""

    data: str
    title: str
    heading: str
    digits: int
    higher_is_better: bool
    low: float
    high: float

    def percent(self, value: float) -> float:
        """Return the position of a value on the bar, in percent.

        >>> Column("mnist", "MNIST", "accuracy %", 2, True, 90, 100).percent(92.5)
        25.0
        """
        return round(100 * min(max((value - self.low) / (self.high - self.low), 0.0), 1.0), 2)


@dataclass(frozen=True)
class Entry:
    """A group and its difference to the control."""

    group: Group
    over_control: Difference | None

    @property
    def is_control(self) -> bool:
        return self.group.place.rule == CONTROL

    @property
    def fails(self) -> bool:
        """Whether it does not beat the control; False if that is unknown."""
        return not self.is_control and self.over_control is not None and not self.over_control.learns


@dataclass(frozen=True)
class TableRow:
    """One row of a table: a rule on a network, with an entry for each data set."""

    rule: str
    model: str
    criteria: list[bool | None]
    problem: str
    """Why the audit failed, if it did."""
    entries: dict[str, Entry]
    suites: list[str]
    average: float | None
    paper_average: float | None

    def marks(self, judge: str) -> str:
        """Return a judge's three marks as text, for narrow screens; an empty text if there is no verdict."""
        start = 3 * JUDGES.index(judge)
        kept = self.criteria[start : start + 3]
        return "" if None in kept else "".join("✓" if one else "✗" for one in kept)


@dataclass(frozen=True)
class Overview:
    columns: list[Column]
    rows: list[TableRow]
    has_average: bool
    """Whether it has an average: only if all data sets of the paper's first table are there."""


def make_entries(groups: list[Group]) -> list[Entry]:
    """Compare every group with the control of the same network, data set and evaluation."""

    def get_conditions(group: Group) -> tuple[str, ...]:
        return *group.place[1:], group.evaluation_key

    controls = group_by((group for group in groups if group.place.rule == CONTROL), get_conditions)
    chosen = {conditions: choose_headlines(same)[same[0].place] for conditions, same in controls.items()}
    return [Entry(group, compare_with_control(group, chosen.get(get_conditions(group)))) for group in groups]


def make_overviews(entries: list[Entry]) -> list[Overview]:
    """Make the tables: one for each set of networks with data sets in common, from the groups chosen as headlines."""
    headline_keys = {group.key for group in choose_headlines([entry.group for entry in entries]).values()}
    chosen = [entry for entry in entries if entry.group.key in headline_keys]
    return [make_overview([e for e in chosen if e.group.place.model in models]) for models in _group_networks(chosen)]


def _group_networks(chosen: list[Entry]) -> list[set[str]]:
    """Group networks that have data sets in common, directly or through other networks."""
    families: list[tuple[set[str], set[str]]] = []
    for entry in chosen:
        _, model, data = entry.group.place
        models, names = {model}, {data}
        apart = []
        for family in families:
            if model in family[0] or data in family[1]:
                models, names = family[0] | models, family[1] | names
            else:
                apart.append(family)
        families = [*apart, (models, names)]
    order = [entry.group.place.model for entry in chosen]
    return sorted((models for models, _ in families), key=lambda models: min(map(order.index, models)))


def make_overview(chosen: list[Entry]) -> Overview:
    """Make one table of these entries."""
    names = list(dict.fromkeys(entry.group.place.data for entry in chosen))
    data = [name for name in TABLE_1 if name in names] + [name for name in names if name not in TABLE_1]
    rows: dict[tuple[str, str], dict[str, Entry]] = {}
    for entry in chosen:
        rule, model, name = entry.group.place
        rows.setdefault((rule, model), {})[name] = entry
    return Overview(
        [_make_column(name, [entry.group for entry in chosen if entry.group.place.data == name]) for name in data],
        [_make_row(rule, model, entries) for (rule, model), entries in rows.items()],
        has_average=set(TABLE_1) <= set(data),
    )


def _make_row(rule: str, model: str, entries: dict[str, Entry]) -> TableRow:
    judgement = find_rule_judgement(rule, [entry.group.cell for entry in entries.values()])
    verdicts = (find_claims(rule), judgement.criteria)
    marks = [mark for verdict in verdicts for mark in (verdict or (None, None, None))]
    suites = list(dict.fromkeys(name for entry in entries.values() for name in entry.group.suites))
    means = [entries[data].group.mean for data in TABLE_1 if data in entries]
    known = [mean for mean in means if mean is not None]
    average = statistics.fmean(known) if len(known) == len(TABLE_1) else None
    return TableRow(rule, model, marks, judgement.problem, entries, suites, average, AVERAGE.get((rule, model)))


def _make_column(data: str, groups: list[Group]) -> Column:
    metric = next((group.metric for group in groups if group.mean is not None), groups[0].metric)
    alike = [group for group in groups if group.metric == metric]
    values = [group.mean for group in alike if group.mean is not None]
    values += [group.paper_figure.accuracy for group in alike if group.paper_figure is not None]
    heading, digits = METRICS[metric][:2]
    low, high = _choose_range(values, percent=metric in ("accuracy", "error"))
    return Column(data, TITLES.get(data, data), heading, digits, metric in HIGHER_IS_BETTER, low, high)


def _choose_range(values: list[float], percent: bool) -> tuple[float, float]:
    """Choose the range of a column: percentages are rounded outwards to tens, other measures start at zero.

    >>> _choose_range([91.5, 98.6], percent=True), _choose_range([0.5, 2.0], percent=False)
    ((90, 100), (0, 2.0))
    """
    if not values or max(values) <= 0:
        return 0, 100
    if not percent:
        return 0, max(values)
    low = max(10 * math.ceil(min(values) / 10 - 1), 0)
    return low, max(10 * math.ceil(max(values) / 10), low + 10)
