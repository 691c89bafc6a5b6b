"""The main tables of the HTML page, one for each network: a row for each rule, a column for each data set.

Our scores stand beside the paper's and are compared with the control.
"""

import statistics
from dataclasses import dataclass

from apical.bench.cells import AVERAGE, HIGHER_IS_BETTER, METRICS, TABLE_1, Difference, find_rule_judgement, group_by
from apical.bench.export import TITLES
from apical.core.learner import Claims
from apical.plausibility.criteria import find_claims, format_verdicts
from apical.report.groups import CONTROL, Group, choose_headlines, compare_groups

JUDGES = ("paper", "audit")
"""The two sources of verdicts on the criteria C1 to C3."""
PERCENTAGES = ("accuracy", "error")


@dataclass(frozen=True)
class Column:
    """A data set, its metric, and the value at which its bars end. They begin at zero."""

    data: str
    title: str
    heading: str
    digits: int
    higher_is_better: bool
    high: float

    def percent(self, value: float) -> float:
        """Return the position of a value on the bar, in percent.

        >>> Column("etth1", "etth1", "MSE", 4, False, 2.0).percent(0.5)
        25.0
        """
        return round(100 * min(max(value / self.high, 0.0), 1.0), 2)


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
    """One row of a table: a rule, with an entry for each data set."""

    rule: str
    verdicts: dict[str, Claims | None]
    """C1 to C3 as each of `JUDGES` sees them, None if it never judged the rule."""
    problem: str
    """Why the audit failed, if it did."""
    entries: dict[str, Entry]
    suites: list[str]
    average: float | None
    paper_average: float | None

    def marks(self, judge: str) -> str:
        """Return a judge's three marks as text; an empty text if there is no verdict."""
        return format_verdicts(self.verdicts[judge])


@dataclass(frozen=True)
class Overview:
    """The table of a network."""

    model: str
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
    return [Entry(group, compare_groups(group, chosen.get(get_conditions(group)))) for group in groups]


def make_overviews(entries: list[Entry]) -> list[Overview]:
    """Make the table of each network, from the groups chosen as headlines.

    The bars of a metric have one scale in all tables: percentages end at 100, others at the largest value.
    """
    headline_keys = {group.key for group in choose_headlines([entry.group for entry in entries]).values()}
    chosen = [entry for entry in entries if entry.group.key in headline_keys]
    by_metric = group_by((entry.group for entry in chosen), lambda group: group.metric)
    highs = {metric: 100.0 if metric in PERCENTAGES else _find_largest(alike) for metric, alike in by_metric.items()}
    by_model = group_by(chosen, lambda entry: entry.group.place.model)
    return [make_overview(model, here, highs) for model, here in by_model.items()]


def _find_largest(groups: list[Group]) -> float:
    """Return the largest score of groups and of the paper; 1 if there is none above zero."""
    figures = [group.paper_figure.accuracy for group in groups if group.paper_figure is not None]
    return max([*(group.mean for group in groups if group.mean is not None), *figures, 0.0]) or 1.0


def make_overview(model: str, chosen: list[Entry], highs: dict[str, float]) -> Overview:
    """Make the table of a network from these entries; `highs` has the ends of the bars by metric."""
    names = list(dict.fromkeys(entry.group.place.data for entry in chosen))
    data = [name for name in TABLE_1 if name in names] + [name for name in names if name not in TABLE_1]
    rows: dict[str, dict[str, Entry]] = {}
    for entry in chosen:
        rows.setdefault(entry.group.place.rule, {})[entry.group.place.data] = entry
    return Overview(
        model,
        [_make_column(name, [e.group for e in chosen if e.group.place.data == name], highs) for name in data],
        [_make_row(rule, model, entries) for rule, entries in rows.items()],
        has_average=set(TABLE_1) <= set(data),
    )


def _make_row(rule: str, model: str, entries: dict[str, Entry]) -> TableRow:
    judgement = find_rule_judgement(rule, [entry.group.cell for entry in entries.values()])
    verdicts = dict(zip(JUDGES, (find_claims(rule), judgement.criteria), strict=True))
    suites = list(dict.fromkeys(name for entry in entries.values() for name in entry.group.suites))
    means = [entries[data].group.mean for data in TABLE_1 if data in entries]
    known = [mean for mean in means if mean is not None]
    average = statistics.fmean(known) if len(known) == len(TABLE_1) else None
    is_papers = all(data in entries and entries[data].group.paper_figure for data in TABLE_1)
    paper_average = AVERAGE.get((rule, model)) if is_papers else None
    return TableRow(rule, verdicts, judgement.problem, entries, suites, average, paper_average)


def _make_column(data: str, groups: list[Group], highs: dict[str, float]) -> Column:
    metric = next((group.metric for group in groups if group.mean is not None), groups[0].metric)
    heading, digits = METRICS[metric][:2]
    return Column(data, TITLES.get(data, data), heading, digits, metric in HIGHER_IS_BETTER, highs[metric])
