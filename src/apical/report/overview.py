"""The main tables: rules and networks down, data sets across, ours beside the paper's, with the control's verdict.

Networks that were trained on the same data share a table; those of images and those of sequences have none in common.
"""

import math
import statistics
from dataclasses import dataclass

from apical.bench.compare import Difference
from apical.bench.export import TITLES
from apical.bench.paper import ACCURACY, AVERAGE
from apical.bench.tables import METRICS, RISING, judgement_on
from apical.plausibility.page import claims
from apical.report.groups import CONTROL, Group, headlines, over

TABLE_1 = list(dict.fromkeys(data for _, _, data in ACCURACY))
"""The data sets over which the paper's first table averages."""


JUDGES = ("paper", "audit")
"""Who says which criteria a rule keeps; each has three columns."""


@dataclass(frozen=True)
class Scale:
    """From where to where the bars of a column reach."""

    low: float
    high: float

    def percent(self, value: float) -> float:
        """Where on the bar a value is.

        >>> Scale(90, 100).percent(92.5)
        25.0
        """
        return round(100 * min(max((value - self.low) / (self.high - self.low), 0.0), 1.0), 2)


@dataclass(frozen=True)
class Column:
    data: str
    title: str
    heading: str
    digits: int
    rising: bool
    scale: Scale


@dataclass(frozen=True)
class Entry:
    """What one declaration reached, and how that compares."""

    group: Group
    over: Difference | None

    @property
    def control(self) -> bool:
        return self.group.place[0] == CONTROL

    @property
    def fails(self) -> bool:
        """Whether it is known not to beat the control."""
        return not self.control and self.over is not None and not self.over.learns


@dataclass(frozen=True)
class Line:
    """A rule on a network, over all data sets."""

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
        """A judge's three marks in a word, for narrow screens; nothing where it did not judge."""
        place = 3 * JUDGES.index(judge)
        kept = self.criteria[place : place + 3]
        return "" if None in kept else "".join("✓" if one else "✗" for one in kept)


@dataclass(frozen=True)
class Overview:
    columns: list[Column]
    lines: list[Line]
    averaged: bool
    """Whether all data sets of the paper's first table are there."""


def entries(groups: list[Group]) -> list[Entry]:
    """Every declaration beside the control of its network, data set and terms."""
    controls: dict[tuple[str, str, str], list[Group]] = {}
    for group in groups:
        if group.place[0] == CONTROL:
            controls.setdefault((*group.place[1:], group.terms), []).append(group)
    chosen = {where: headlines(same)[same[0].place] for where, same in controls.items()}
    return [Entry(group, over(group, chosen.get((*group.place[1:], group.terms)))) for group in groups]


def overviews(found: list[Entry]) -> list[Overview]:
    """The declarations that stand for each rule, network and data set, as a table for networks of the same data."""
    stars = {group.key for group in headlines([entry.group for entry in found]).values()}
    chosen = [entry for entry in found if entry.group.key in stars]
    return [overview([e for e in chosen if e.group.place[1] in models]) for models in _families(chosen)]


def _families(chosen: list[Entry]) -> list[set[str]]:
    """Networks that have data sets in common, directly or by way of others."""
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
    order = [entry.group.place[1] for entry in chosen]
    return sorted((models for models, _ in families), key=lambda models: min(map(order.index, models)))


def overview(chosen: list[Entry]) -> Overview:
    """One table of these."""
    names = list(dict.fromkeys(entry.group.place[2] for entry in chosen))
    data = [name for name in TABLE_1 if name in names] + [name for name in names if name not in TABLE_1]
    lines: dict[tuple[str, str], dict[str, Entry]] = {}
    for entry in chosen:
        rule, model, name = entry.group.place
        lines.setdefault((rule, model), {})[name] = entry
    return Overview(
        [_column(name, [entry.group for entry in chosen if entry.group.place[2] == name]) for name in data],
        [_line(rule, model, line) for (rule, model), line in lines.items()],
        averaged=set(TABLE_1) <= set(data),
    )


def _line(rule: str, model: str, line: dict[str, Entry]) -> Line:
    judgement = judgement_on(rule, [entry.group.cell for entry in line.values()])
    verdicts = (claims(rule), judgement.criteria)
    marks = [mark for verdict in verdicts for mark in (verdict or (None, None, None))]
    suites = list(dict.fromkeys(name for entry in line.values() for name in entry.group.suites))
    means = [line[data].group.mean for data in TABLE_1 if data in line]
    known = [mean for mean in means if mean is not None]
    average = statistics.fmean(known) if len(known) == len(TABLE_1) else None
    return Line(rule, model, marks, judgement.problem, line, suites, average, AVERAGE.get((rule, model)))


def _column(data: str, groups: list[Group]) -> Column:
    metric = next((group.metric for group in groups if group.mean is not None), groups[0].metric)
    alike = [group for group in groups if group.metric == metric]
    values = [group.mean for group in alike if group.mean is not None]
    values += [group.figure.accuracy for group in alike if group.figure is not None]
    return Column(
        data,
        TITLES.get(data, data),
        METRICS[metric].heading,
        METRICS[metric].digits,
        metric in RISING,
        _scale(values, percent=metric in ("accuracy", "error")),
    )


def _scale(values: list[float], percent: bool) -> Scale:
    """Percentages from the ten below the lowest value to the ten above the highest; other measures from zero.

    >>> _scale([91.5, 98.6], percent=True), _scale([0.5, 2.0], percent=False)
    (Scale(low=90, high=100), Scale(low=0, high=2.0))
    """
    if not values or max(values) <= 0:
        return Scale(0, 100)
    if not percent:
        return Scale(0, max(values))
    low = max(10 * math.ceil(min(values) / 10 - 1), 0)
    return Scale(low, max(10 * math.ceil(max(values) / 10), low + 10))
