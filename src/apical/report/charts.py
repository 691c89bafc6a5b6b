"""Compute the data of all charts, independent of the plotting library: lines, points, and heat maps."""

import math
import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from apical.bench.results import make_safe_name
from apical.bench.tables import METRICS
from apical.report.groups import Group, Place, choose_headlines, rank_rule

Curve = list[dict[str, Any]]
Number = float | None
HISTORY_KEYS = {
    "accuracy": "test_accuracy",
    "error": "test_accuracy",
    "mse": "test_mse",
    "mae": "test_mae",
    "loss": "test_loss",
}
"""The key of a history row from which each metric is computed."""
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
    style: int
    """The number of its colour and dashes: the same for a rule in every chart, or the number of the layer."""
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
class Heat:
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


Drawing = Chart | Heat
Sweep = tuple[tuple[str, ...], list[Group]]
"""Names of settings, and groups that differ only in these settings."""


CURVES = (
    "On the test set after each epoch: the mean over seeds and, shaded, their range. A click on a name hides its line."
)
TIMES = "Up and to the left is better. Bars are the range over seeds; times are of the device in the title."
FEEDBACK = "The cosine between feedback and forward weights, averaged over the layers that have both in the same shape."
UPDATES = (
    "The cosine between a hidden layer's update and the one that backpropagation would make, averaged over layers."
)
LOCAL = "Half the squared error that arrives at each layer's output, mean over examples: the terms that the paper sums."
SWEEPS = "Runs that differ in nothing but the settings named."


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
    grids = _find_grids(groups)
    grid_keys = _collect_keys(grids)
    single_sweeps = _find_single_sweeps([group for group in groups if group.key not in grid_keys])
    sweep_keys = grid_keys | _collect_keys(single_sweeps)
    chosen = [group for group in groups if group.key in headline_keys or group.key not in sweep_keys]
    found = [
        ChartSection(
            "Learning curves", CURVES, [*_make_epoch_charts("curves", "", chosen, _read_score, headline_keys)]
        ),
        ChartSection("Accuracy against time", TIMES, [*_make_time_charts(chosen, headline_keys)]),
        ChartSection(
            "Alignment of feedback with forward weights",
            FEEDBACK,
            [
                *_make_epoch_charts(
                    "feedback", "cosine of Θ with W", chosen, make_cosine_reader("feedback"), headline_keys
                )
            ],
        ),
        ChartSection(
            "Alignment of updates with backpropagation",
            UPDATES,
            [
                *_make_epoch_charts(
                    "update", "cosine with bp's update", chosen, make_cosine_reader("update"), headline_keys
                )
            ],
        ),
        ChartSection("Local loss of each layer", LOCAL, [*_make_local_loss_charts(chosen, headline_keys)]),
        ChartSection(
            "Sensitivity to settings",
            SWEEPS,
            [*(_make_heat(*grid) for grid in grids), *_make_sweep_charts(single_sweeps)],
        ),
    ]
    return [section for section in found if section.drawings]


def get_scale_key(drawing: Drawing) -> tuple[object, ...]:
    """Return a key of the measure, network and data set of a drawing. Drawings with equal keys share a scale."""
    group, what = (drawing.group, drawing.label) if isinstance(drawing, Heat) else (drawing.lines[0].group, drawing.y)
    return drawing.kind, group.place[1:], what


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


# Over epochs.

Read = Callable[[Group, dict[str, Any]], Number]
"""A function that returns a value of a history row, or None."""


def _read_score(group: Group, entry: dict[str, Any]) -> Number:
    value: Number = entry.get(HISTORY_KEYS[group.metric])
    if value is None:
        return None
    return {"accuracy": 100 * value, "error": 100 - 100 * value}.get(group.metric, value)


def make_cosine_reader(kind: str) -> Read:
    """Return a function that reads the mean cosine over layers, of "feedback" weights or of the "update"."""

    def read(group: Group, entry: dict[str, Any]) -> Number:
        cosines = entry.get("alignment", {}).get(kind, [])
        hidden = cosines[:-1] if kind == "update" else cosines  # the last layer's update is backpropagation's
        known = [cosine for cosine in hidden if cosine is not None]
        return statistics.fmean(known) if known else None

    return read


def _make_epoch_charts(kind: str, y: str, groups: list[Group], read: Read, headline_keys: set[str]) -> Iterable[Chart]:
    """Make charts of a measure over epochs: one chart for each network and data set, one line for each group."""
    for (model, data), here in _group_by_network(groups).items():
        lines = []
        for group in here:
            is_headline = group.key in headline_keys
            line = make_line_over_epochs(
                _name_line(group, is_headline), group, read, rank_rule(group.place[0]), is_headline
            )
            lines += [line] if line else []
        if lines:
            label = METRICS[here[0].metric].heading if kind == "curves" else y
            yield Chart(kind, f"{data}, {model}", "epoch", label, lines)


def _name_line(group: Group, is_headline: bool) -> str:
    rule = group.place[0]
    return rule if is_headline or not group.varied_text else f"{rule} ({group.varied_text})"


def _group_by_network(groups: Iterable[Group]) -> dict[tuple[str, str], list[Group]]:
    found: dict[tuple[str, str], list[Group]] = {}
    for group in groups:
        found.setdefault(group.place[1:], []).append(group)
    return found


def make_line_over_epochs(name: str, group: Group, read: Read, style: int, shown: bool = True) -> Line | None:
    """Make the line of a measure over epochs; None if no epoch has a finite value."""
    by_epoch: dict[int, list[float]] = {}
    for curve in group.curves.values():
        for entry in curve:
            value = read(group, entry)
            if value is not None and math.isfinite(value):
                by_epoch.setdefault(entry["epoch"], []).append(value)
    if not by_epoch:
        return None
    return make_line(name, group, by_epoch, style, shown)


def make_line(name: str, group: Group, values: dict[Any, list[float]], style: int, shown: bool = True) -> Line:
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


def _make_local_loss_charts(groups: list[Group], headline_keys: set[str]) -> Iterable[Chart]:
    """Make charts of local losses over epochs: one chart for each group that has them, one line for each layer."""
    for group in groups:
        if group.key not in headline_keys:
            continue
        layers = max((len(_get_local_losses(e)) for curve in group.curves.values() for e in curve), default=0)
        lines = [make_line_over_epochs(f"layer {i + 1}", group, _make_layer_reader(i), i) for i in range(layers)]
        if found := [line for line in lines if line]:
            rule, model, data = group.place
            yield Chart("local", f"{rule}: {data}, {model}", "epoch", "½‖ξ‖²", found, log_y=True)


def _get_local_losses(entry: dict[str, Any]) -> list[Number]:
    layers: list[Number] = entry.get("alignment", {}).get("local", [])
    return layers


def _make_layer_reader(i: int) -> Read:
    def read(group: Group, entry: dict[str, Any]) -> Number:
        layers = _get_local_losses(entry)
        value = layers[i] if i < len(layers) else None
        return value if value else None  # zero has no logarithm

    return read


# Against time.


def _make_time_charts(groups: list[Group], headline_keys: set[str]) -> Iterable[Chart]:
    """Make charts of scores against time: one chart for each network, data set and device, so that devices are not mixed."""
    found: dict[tuple[str, str, str], list[Line]] = {}
    for group in groups:
        if group.key in headline_keys and group.seconds_per_epoch and group.scores:
            rule, model, data = group.place
            point = make_line(rule, group, {group.seconds_per_epoch: list(group.scores.values())}, rank_rule(rule))
            device = group.cell.rows[0].device or "an unknown device"
            found.setdefault((model, data, device), []).append(point)
    for (model, data, device), points in found.items():
        title, y = f"{data}, {model}, {device}", METRICS[points[0].group.metric].heading
        yield Chart("time", title, "seconds per epoch, all seeds of a run", y, points, log_x=True, points=True)


# Over settings.


def _find_numeric_settings(groups: list[Group]) -> list[str]:
    """Return the names of the settings that differ between groups and are numbers."""
    names = list(dict.fromkeys(name for group in groups for name in group.cell.job.varied))
    return [n for n in names if all(_is_number(g.settings.get(n)) for g in groups if n in g.settings)]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _group_alike(groups: list[Group], names: tuple[str, ...]) -> list[list[Group]]:
    """Return lists of groups that differ only in these settings."""
    found: dict[str, list[Group]] = {}
    for group in groups:
        if all(name in group.settings for name in names):
            others = {n: v for n, v in group.settings.items() if n not in (*names, "alignment")}
            found.setdefault(repr(sorted(others.items())), []).append(group)
    return list(found.values())


def _is_grid(bucket: list[Group], x: str, y: str) -> bool:
    """Return whether two settings vary together: in more combinations than by varying one at a time."""
    columns, rows = ({group.settings[name] for group in bucket} for name in (x, y))
    pairs = {(group.settings[x], group.settings[y]) for group in bucket}
    return min(len(columns), len(rows)) > 1 and len(pairs) > len(columns) + len(rows) - 1


def _group_by_place(groups: list[Group]) -> list[list[Group]]:
    found: dict[Place, list[Group]] = {}
    for group in groups:
        found.setdefault(group.place, []).append(group)
    return list(found.values())


def _find_grids(groups: list[Group]) -> list[Sweep]:
    """Find sweeps in which two settings vary together, for one rule on one network and data set."""
    return [
        ((x, y), bucket)
        for here in _group_by_place(groups)
        for x, y in combinations(_find_numeric_settings(here), 2)
        for bucket in _group_alike(here, (x, y))
        if _is_grid(bucket, x, y)
    ]


def _find_single_sweeps(groups: list[Group]) -> list[Sweep]:
    """Find sweeps in which one setting has three values or more and all else is equal."""
    return [
        ((name,), bucket)
        for here in _group_by_place(groups)
        for name in _find_numeric_settings(here)
        for bucket in _group_alike(here, (name,))
        if len({group.settings[name] for group in bucket}) > 2
    ]


def _collect_keys(sweeps: list[Sweep]) -> set[str]:
    return {group.key for _, bucket in sweeps for group in bucket}


def _make_heat(names: tuple[str, ...], bucket: list[Group]) -> Heat:
    x, y = names
    columns, rows = (sorted({_get_number(group, name) for group in bucket}) for name in names)
    values: list[list[Number]] = [[None] * len(columns) for _ in rows]
    for group in bucket:
        values[rows.index(_get_number(group, y))][columns.index(_get_number(group, x))] = group.mean
    rule, model, data = bucket[0].place
    label = METRICS[bucket[0].metric].heading
    return Heat("heat", f"{rule}: {data}, {model}", x, y, columns, rows, values, label, bucket[0])


def _get_number(group: Group, name: str) -> float:
    return float(group.settings[name])  # type: ignore[arg-type]  # `_find_numeric_settings` checked it


def _make_sweep_charts(sweeps: list[Sweep]) -> Iterable[Chart]:
    """Make charts of scores over one setting: one chart for each setting, network and data set, one line for each rule."""
    found: dict[tuple[str, str, str], list[Line]] = {}
    for (name,), bucket in sweeps:
        values = {_get_number(group, name): list(group.scores.values()) for group in bucket if group.scores}
        if values:
            rule, model, data = bucket[0].place
            line = make_line(rule, bucket[0], values, rank_rule(rule))
            found.setdefault((model, data, name), []).append(line)
    for (model, data, name), lines in found.items():
        xs = [x for line in lines for x in line.x]
        is_log = min(xs) > 0 and max(xs) / min(xs) >= 10
        label = METRICS[lines[0].group.metric].heading
        yield Chart("sweep", f"{name}: {data}, {model}", name, label, lines, log_x=is_log)
