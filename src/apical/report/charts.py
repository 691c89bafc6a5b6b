"""Compute the data of all charts, independent of the plotting library: lines, points, and heat maps."""

import math
import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from itertools import combinations, starmap
from typing import Any

from apical.bench.cells import METRICS, group_by, read_cosines
from apical.bench.declaration import make_safe_name
from apical.report.groups import Group, choose_headlines
from apical.report.styles import Style, style_rule

Number = float | None
MAX_TICKS = 8
"""Up to so many values along an axis each get a tick and a marker."""


@dataclass(frozen=True)
class Line:
    """The mean and the range over seeds at each x. A point is a line of length one."""

    name: str
    group: Group
    x: list[float]
    y: list[float]
    low: list[float]
    high: list[float]
    style: Style
    """Its look: the same for a rule in every chart."""
    shown: bool = True
    """Whether it is visible before the user clicks on its name."""


@dataclass(frozen=True)
class Chart:
    """Lines, or points, on two axes."""

    kind: str
    title: str
    x: str
    y: str
    lines: list[Line]
    log_x: bool = False
    log_y: bool = False
    points: bool = False


@dataclass(frozen=True)
class HeatMap:
    """A heat map: a value for every pair of two settings, None if there is no run yet."""

    kind: str
    title: str
    x: str
    y: str
    columns: list[float]
    rows: list[float]
    values: list[list[Number]]
    label: str
    group: Group


Drawing = Chart | HeatMap
Sweep = tuple[tuple[str, ...], list[Group]]
"""Names of settings, and groups that differ only in these settings."""


NOTES = {
    "Learning curves": "On the test set after each epoch: the mean over seeds and, shaded, their range. A click on a name "
    "hides its line.",
    "Accuracy against time": "Up and to the left is better. Bars are the range over seeds; times are of the device in the "
    "title.",
    "Alignment of feedback with forward weights": "The cosine between feedback and forward weights, averaged over the "
    "layers that have both in the same shape.",
    "Alignment of updates with backpropagation": "The cosine between a hidden layer's update and the one that "
    "backpropagation would make, averaged over layers.",
    "Local loss of each layer": "Half the squared error that arrives at each layer's output, mean over examples: the terms "
    "that the paper sums.",
    "Sensitivity to settings": "Runs that differ in nothing but the settings named.",
}
"""What the charts of each section show."""


@dataclass(frozen=True)
class ChartSection:
    """Drawings of one kind, with a note that explains them."""

    heading: str
    note: str
    drawings: list[Drawing]


def make_chart_sections(groups: list[Group]) -> list[ChartSection]:
    """Make all charts for which there are data.

    Groups of a sweep have their own charts. In all other charts, one group represents a rule on a network and data set.
    """
    headline_keys = {group.key for group in choose_headlines(groups).values()}
    headlines = [group for group in groups if group.key in headline_keys]
    grids = _find_sweeps(groups, settings=2)
    grid_keys = {group.key for _, alike in grids for group in alike}
    single_sweeps = _find_sweeps([group for group in groups if group.key not in grid_keys], settings=1)
    in_sweeps = {group.key for _, alike in [*grids, *single_sweeps] for group in alike} - headline_keys
    others = [group for group in groups if group.key not in in_sweeps]
    chart_over_epochs = partial(_make_epoch_charts, others, headline_keys)
    feedback, update = partial(read_cosine, "feedback"), partial(read_cosine, "update")
    found: dict[str, Iterable[Drawing]] = {
        "Learning curves": chart_over_epochs("curves", "", _read_score),
        "Accuracy against time": _make_time_charts(headlines),
        "Alignment of feedback with forward weights": chart_over_epochs("feedback", "cosine of Θ with W", feedback),
        "Alignment of updates with backpropagation": chart_over_epochs("update", "cosine with bp's update", update),
        "Local loss of each layer": _make_local_loss_charts(headlines),
        "Sensitivity to settings": [*starmap(_make_heat, grids), *_make_sweep_charts(single_sweeps)],
    }
    sections = [ChartSection(heading, NOTES[heading], list(drawings)) for heading, drawings in found.items()]
    return [section for section in sections if section.drawings]


def get_scale_key(drawing: Drawing) -> tuple[object, ...]:
    """Return a key of the measure, network and data set of a drawing. Drawings with equal keys share a scale."""
    if isinstance(drawing, HeatMap):
        return drawing.kind, drawing.group.place[1:], drawing.label
    return drawing.kind, drawing.lines[0].group.place[1:], drawing.y


def choose_log_ticks(values: Iterable[float]) -> dict[float, str]:
    """Return ticks of a logarithmic axis with their labels: powers of ten, and 2 and 5 times these if they are few.

    >>> choose_log_ticks([0.3, 0.04])
    {0.01: '0.01', 0.02: '0.02', 0.05: '0.05', 0.1: '0.1', 0.2: '0.2', 0.5: '0.5', 1.0: '1', 2.0: '2', 5.0: '5'}

    If fewer than two of these are in the range, ticks have equal steps:

    >>> choose_log_ticks([280, 316])
    {280.0: '280', 290.0: '290', 300.0: '300', 310.0: '310', 320.0: '320'}
    """
    known = list(values)
    low, high = min(known), max(known)
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    steps = (1, 2, 5) if len(powers) < 5 else (1,)
    ticks = [step * 10.0**power for power in powers for step in steps]
    if low < high and sum(low <= tick <= high for tick in ticks) < 2:
        unit = 10.0 ** math.floor(math.log10((high - low) / 6))
        even = next((step * unit for step in (2, 5) if (high - low) / (step * unit) <= 6), 10 * unit)
        ticks = [even * count for count in range(math.floor(low / even), math.ceil(high / even) + 1)]
    return {float(text := f"{tick:g}"): text for tick in ticks}


def make_file_name(drawing: Drawing) -> str:
    """Return a safe file name, without suffix, for a drawing."""
    words = f"{drawing.kind}-{drawing.title}".replace(", ", "-").replace(": ", "-").replace(" ", "-")
    return make_safe_name(words.replace(":", "."))


def make_line(name: str, group: Group, values: dict[Any, list[float]], style: Style, shown: bool = True) -> Line:
    """Make a line from the values of all seeds at each x."""
    xs = sorted(values)
    return Line(
        name,
        group,
        x=[float(x) for x in xs],
        y=[statistics.fmean(values[x]) for x in xs],
        low=[min(values[x]) for x in xs],
        high=[max(values[x]) for x in xs],
        style=style,
        shown=shown,
    )


# Over epochs.

Read = Callable[[Group, dict[str, Any]], Number]
"""A function that returns a value of a history row, or None."""


def _read_score(group: Group, row: dict[str, Any]) -> Number:
    metric = METRICS[group.metric]
    value: Number = row.get(metric.key)
    return None if value is None else metric.convert(value)


def read_cosine(kind: str, group: Group, row: dict[str, Any]) -> Number:
    """Return the mean cosine over layers, of "feedback" weights or of the "update"."""
    known = read_cosines(row, kind)
    return statistics.fmean(known) if known else None


def _read_local_loss(layer: int, group: Group, row: dict[str, Any]) -> Number:
    losses: list[Number] = row.get("alignment", {}).get("local", [])
    return (losses[layer] or None) if layer < len(losses) else None  # zero has no logarithm


def make_line_over_epochs(name: str, group: Group, read: Read, style: Style, shown: bool = True) -> Line | None:
    """Make the line of a measure over epochs; None if no epoch has a finite value."""
    by_epoch: dict[int, list[float]] = {}
    for row in (row for curve in group.curves.values() for row in curve):
        value = read(group, row)
        if value is not None and math.isfinite(value):
            by_epoch.setdefault(row["epoch"], []).append(value)
    return make_line(name, group, by_epoch, style, shown) if by_epoch else None


def _make_epoch_charts(groups: list[Group], headline_keys: set[str], kind: str, y: str, read: Read) -> Iterable[Chart]:
    """Make charts of a measure over epochs: one chart for each network and data set, one line for each group."""
    for (model, data), here in group_by(groups, lambda group: group.place[1:]).items():
        lines = []
        for group in here:
            rule, is_headline = group.place.rule, group.key in headline_keys
            name = rule if is_headline or not group.varied_text else f"{rule} ({group.varied_text})"
            lines.append(make_line_over_epochs(name, group, read, style_rule(rule), is_headline))
        if found := [line for line in lines if line]:
            label = METRICS[here[0].metric].heading if kind == "curves" else y
            yield Chart(kind, f"{data}, {model}", "epoch", label, found)


def _make_local_loss_charts(groups: list[Group]) -> Iterable[Chart]:
    """Make charts of local losses over epochs: one chart for each group that has them, one line for each layer."""
    for group in groups:
        rows = [row for curve in group.curves.values() for row in curve]
        layers = max((len(row.get("alignment", {}).get("local", [])) for row in rows), default=0)
        lines = [
            make_line_over_epochs(f"layer {i + 1}", group, partial(_read_local_loss, i), Style(i + 1))
            for i in range(layers)
        ]
        if found := [line for line in lines if line]:
            rule, model, data = group.place
            yield Chart("local", f"{rule}: {data}, {model}", "epoch", "½‖ξ‖²", found, log_y=True)


# Against time.


def _make_time_charts(groups: list[Group]) -> Iterable[Chart]:
    """Make charts of scores against time: one chart for each network, data set and device, so that devices are not mixed."""
    found: dict[tuple[str, str, str], list[Line]] = {}
    for group in groups:
        if group.seconds_per_epoch and group.scores:
            rule, model, data = group.place
            point = make_line(rule, group, {group.seconds_per_epoch: list(group.scores.values())}, style_rule(rule))
            found.setdefault((model, data, str(group.cell.device)), []).append(point)
    for (model, data, device), points in found.items():
        title, y = f"{data}, {model}, {device}", METRICS[points[0].group.metric].heading
        yield Chart("time", title, "seconds per epoch, all seeds of a run", y, points, log_x=True, points=True)


# Over settings.


def _find_sweeps(groups: list[Group], settings: int) -> list[Sweep]:
    """Find sweeps of one rule on one network and data set in which so many settings vary, one or two."""
    return [
        (names, alike)
        for here in group_by(groups, lambda group: group.place).values()
        for names in combinations(_find_numeric_settings(here), settings)
        for alike in _find_alike(here, names)
        if _is_sweep(names, alike)
    ]


def _find_numeric_settings(groups: list[Group]) -> list[str]:
    """Return the names of the settings that differ between groups and are numbers."""
    names = list(dict.fromkeys(name for group in groups for name in group.cell.job.varied))
    return [n for n in names if all(type(g.settings[n]) in (int, float) for g in groups if n in g.settings)]


def _find_alike(groups: list[Group], names: tuple[str, ...]) -> Iterable[list[Group]]:
    """Return lists of groups that differ only in these settings."""

    def get_other_settings(group: Group) -> str:
        return repr(sorted((n, v) for n, v in group.settings.items() if n not in (*names, "alignment")))

    return group_by((g for g in groups if all(name in g.settings for name in names)), get_other_settings).values()


def _is_sweep(names: tuple[str, ...], groups: list[Group]) -> bool:
    """Return whether one setting has three values or more, or two vary together, in more pairs than one at a time."""
    values = [{group.settings[name] for group in groups} for name in names]
    if len(names) == 1:
        return len(values[0]) > 2
    pairs = {tuple(group.settings[name] for name in names) for group in groups}
    return min(map(len, values)) > 1 and len(pairs) > sum(map(len, values)) - 1


def _get_number(group: Group, name: str) -> float:
    return float(group.settings[name])  # type: ignore[arg-type]  # `_find_numeric_settings` checked it


def _make_heat(names: tuple[str, ...], groups: list[Group]) -> HeatMap:
    x, y = names
    columns, rows = (sorted({_get_number(group, name) for group in groups}) for name in names)
    values: list[list[Number]] = [[None] * len(columns) for _ in rows]
    for group in groups:
        values[rows.index(_get_number(group, y))][columns.index(_get_number(group, x))] = group.mean
    rule, model, data = groups[0].place
    label = METRICS[groups[0].metric].heading
    return HeatMap("heat", f"{rule}: {data}, {model}", x, y, columns, rows, values, label, groups[0])


def _make_sweep_charts(sweeps: list[Sweep]) -> Iterable[Chart]:
    """Make charts of scores over one setting: one chart for each setting, network and data set, one line for each rule."""
    found: dict[tuple[str, str, str], list[Line]] = {}
    for (name,), groups in sweeps:
        values = {_get_number(group, name): list(group.scores.values()) for group in groups if group.scores}
        if values:
            rule, model, data = groups[0].place
            line = make_line(rule, groups[0], values, style_rule(rule))
            found.setdefault((model, data, name), []).append(line)
    for (model, data, name), lines in found.items():
        xs = [x for line in lines for x in line.x]
        is_log = min(xs) > 0 and max(xs) / min(xs) >= 10
        label = METRICS[lines[0].group.metric].heading
        yield Chart("sweep", f"{name}: {data}, {model}", name, label, lines, log_x=is_log)
