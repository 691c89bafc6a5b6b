"""The data of every chart, for whatever draws it: lines with the range over seeds, points, and heat maps."""

import math
import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from apical.bench.results import safe
from apical.bench.tables import METRICS
from apical.report.groups import Group, Place, headlines, rank

Curve = list[dict[str, Any]]
Number = float | None
READ = {
    "accuracy": "test_accuracy",
    "error": "test_accuracy",
    "mse": "test_mse",
    "mae": "test_mae",
    "loss": "test_loss",
}
"""What of an epoch a metric is made of."""
FEW = 8
"""So many values along an axis can be told apart: each has a tick and a mark."""


@dataclass(frozen=True)
class Line:
    """Values over x, their mean and their range over seeds; a point is a line of one."""

    name: str
    group: Group
    x: list[float]
    y: list[float]
    low: list[float]
    high: list[float]
    style: int
    """The same for the same rule in every chart, or the layer's number."""
    shown: bool = True
    """Whether it is drawn before anybody asks for it."""


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
    """A value for every pair of two settings; None where there is none yet."""

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
"""Settings, and declarations that differ in nothing else."""


CURVES = "On the test set after each epoch: the mean over seeds and, shaded, their range. A click on a name hides its line."
TIMES = "Up and to the left is better. Bars are the range over seeds; times are of the device in the title."
FEEDBACK = "The cosine between feedback and forward weights, averaged over the layers that have both in the same shape."
UPDATES = "The cosine between a hidden layer's update and the one that backpropagation would make, averaged over layers."
LOCAL = "Half the squared error that arrives at each layer's output, mean over examples: the terms that the paper sums."
SWEEPS = "Runs that differ in nothing but the settings named."


@dataclass(frozen=True)
class Section:
    """Drawings of one kind, and what is to be known about them."""

    heading: str
    note: str
    drawings: list[Drawing]


def sections(groups: list[Group]) -> list[Section]:
    """All charts that a store has the data for.

    What a sweep compares is in its own charts; elsewhere, one declaration stands for a rule on a network and data set.
    """
    stars = {group.key for group in headlines(groups).values()}
    grids = _grids(groups)
    in_grids = _keys(grids)
    rows = _rows([group for group in groups if group.key not in in_grids])
    swept = in_grids | _keys(rows)
    alone = [group for group in groups if group.key in stars or group.key not in swept]
    found = [
        Section("Learning curves", CURVES, [*_per_place("curves", "", alone, _score, stars)]),
        Section("Accuracy against time", TIMES, [*_times(alone, stars)]),
        Section(
            "Alignment of feedback with forward weights",
            FEEDBACK,
            [*_per_place("feedback", "cosine of Θ with W", alone, cosine("feedback"), stars)],
        ),
        Section(
            "Alignment of updates with backpropagation",
            UPDATES,
            [*_per_place("update", "cosine with bp's update", alone, cosine("update"), stars)],
        ),
        Section("Local loss of each layer", LOCAL, [*_local(alone, stars)]),
        Section("Sensitivity to settings", SWEEPS, [*(_heat(*grid) for grid in grids), *_sweeps(rows)]),
    ]
    return [section for section in found if section.drawings]


def measured(drawing: Drawing) -> tuple[object, ...]:
    """What is drawn of which network and data set: drawings in which that is the same have one scale."""
    group, what = (
        (drawing.group, drawing.label) if isinstance(drawing, Heat) else (drawing.lines[0].group, drawing.y)
    )
    return drawing.kind, group.place[1:], what


def log_ticks(values: Iterable[float]) -> dict[float, str]:
    """Ticks of a logarithmic axis, written out: powers of ten, and 2 and 5 of them where these are few.

    >>> log_ticks([0.3, 0.04])
    {0.01: '0.01', 0.02: '0.02', 0.05: '0.05', 0.1: '0.1', 0.2: '0.2', 0.5: '0.5', 1.0: '1', 2.0: '2', 5.0: '5'}

    Values too close for two of these have even steps:

    >>> log_ticks([280, 316])
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


def slug(drawing: Drawing) -> str:
    """A name for its file."""
    words = f"{drawing.kind}-{drawing.title}".replace(", ", "-").replace(": ", "-").replace(" ", "-")
    return safe(words.replace(":", "."))


# Over epochs.

Read = Callable[[Group, dict[str, Any]], Number]


def _score(group: Group, entry: dict[str, Any]) -> Number:
    value: Number = entry.get(READ[group.metric])
    if value is None:
        return None
    return {"accuracy": 100 * value, "error": 100 - 100 * value}.get(group.metric, value)


def cosine(kind: str) -> Read:
    def read(group: Group, entry: dict[str, Any]) -> Number:
        cosines = entry.get("alignment", {}).get(kind, [])
        hidden = cosines[:-1] if kind == "update" else cosines  # the last layer's update is backpropagation's
        known = [cosine for cosine in hidden if cosine is not None]
        return statistics.fmean(known) if known else None

    return read


def _per_place(kind: str, y: str, groups: list[Group], read: Read, stars: set[str]) -> Iterable[Chart]:
    """One chart for each network and data set, a line for each declaration."""
    for (model, data), here in _places(groups).items():
        lines = []
        for group in here:
            headline = group.key in stars
            line = line_of(_name(group, headline), group, read, rank(group.place[0]), headline)
            lines += [line] if line else []
        if lines:
            label = METRICS[here[0].metric].heading if kind == "curves" else y
            yield Chart(kind, f"{data}, {model}", "epoch", label, lines)


def _name(group: Group, headline: bool) -> str:
    rule = group.place[0]
    return rule if headline or not group.varied else f"{rule} ({group.varied})"


def _places(groups: Iterable[Group]) -> dict[tuple[str, str], list[Group]]:
    found: dict[tuple[str, str], list[Group]] = {}
    for group in groups:
        found.setdefault(group.place[1:], []).append(group)
    return found


def line_of(name: str, group: Group, read: Read, style: int, shown: bool = True) -> Line | None:
    by_epoch: dict[int, list[float]] = {}
    for curve in group.curves.values():
        for entry in curve:
            value = read(group, entry)
            if value is not None and math.isfinite(value):
                by_epoch.setdefault(entry["epoch"], []).append(value)
    if not by_epoch:
        return None
    return over_seeds(name, group, by_epoch, style, shown)


def over_seeds(
    name: str, group: Group, values: dict[Any, list[float]], style: int, shown: bool = True
) -> Line:
    places = sorted(values)
    return Line(
        name,
        group,
        x=[float(place) for place in places],
        y=[statistics.fmean(values[place]) for place in places],
        low=[min(values[place]) for place in places],
        high=[max(values[place]) for place in places],
        style=style,
        shown=shown,
    )


def _local(groups: list[Group], stars: set[str]) -> Iterable[Chart]:
    """One chart for each run with local losses, a line for each layer."""
    for group in groups:
        if group.key not in stars:
            continue
        layers = max((len(_layers(e)) for curve in group.curves.values() for e in curve), default=0)
        lines = [line_of(f"layer {i + 1}", group, _layer(i), i) for i in range(layers)]
        if found := [line for line in lines if line]:
            rule, model, data = group.place
            yield Chart("local", f"{rule}: {data}, {model}", "epoch", "½‖ξ‖²", found, log_y=True)


def _layers(entry: dict[str, Any]) -> list[Number]:
    layers: list[Number] = entry.get("alignment", {}).get("local", [])
    return layers


def _layer(i: int) -> Read:
    def read(group: Group, entry: dict[str, Any]) -> Number:
        layers = _layers(entry)
        value = layers[i] if i < len(layers) else None
        return value if value else None  # zero has no logarithm

    return read


# Against time.


def _times(groups: list[Group], stars: set[str]) -> Iterable[Chart]:
    """One chart for each network, data set and device: times of two machines are not compared."""
    found: dict[tuple[str, str, str], list[Line]] = {}
    for group in groups:
        if group.key in stars and group.seconds and group.scores:
            rule, model, data = group.place
            point = over_seeds(rule, group, {group.seconds: list(group.scores.values())}, rank(rule))
            device = group.cell.rows[0].device or "an unknown device"
            found.setdefault((model, data, device), []).append(point)
    for (model, data, device), points in found.items():
        title, y = f"{data}, {model}, {device}", METRICS[points[0].group.metric].heading
        yield Chart(
            "time", title, "seconds per epoch, all seeds of a run", y, points, log_x=True, points=True
        )


# Over settings.


def _numeric(groups: list[Group]) -> list[str]:
    """The settings that are numbers and differ."""
    names = list(dict.fromkeys(name for group in groups for name in group.cell.job.varied))
    return [n for n in names if all(_is_number(g.settings.get(n)) for g in groups if n in g.settings)]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _buckets(groups: list[Group], names: tuple[str, ...]) -> list[list[Group]]:
    """Groups that differ in nothing but these settings."""
    found: dict[str, list[Group]] = {}
    for group in groups:
        if all(name in group.settings for name in names):
            others = {n: v for n, v in group.settings.items() if n not in (*names, "alignment")}
            found.setdefault(repr(sorted(others.items())), []).append(group)
    return list(found.values())


def _is_grid(bucket: list[Group], x: str, y: str) -> bool:
    """Whether two settings vary together: more combinations than one at a time would give."""
    columns, rows = ({group.settings[name] for group in bucket} for name in (x, y))
    pairs = {(group.settings[x], group.settings[y]) for group in bucket}
    return min(len(columns), len(rows)) > 1 and len(pairs) > len(columns) + len(rows) - 1


def _by_place(groups: list[Group]) -> list[list[Group]]:
    found: dict[Place, list[Group]] = {}
    for group in groups:
        found.setdefault(group.place, []).append(group)
    return list(found.values())


def _grids(groups: list[Group]) -> list[Sweep]:
    """Two settings that vary together, of one rule on one network and data set."""
    return [
        ((x, y), bucket)
        for here in _by_place(groups)
        for x, y in combinations(_numeric(here), 2)
        for bucket in _buckets(here, (x, y))
        if _is_grid(bucket, x, y)
    ]


def _rows(groups: list[Group]) -> list[Sweep]:
    """One setting that takes three values or more, all else alike."""
    return [
        ((name,), bucket)
        for here in _by_place(groups)
        for name in _numeric(here)
        for bucket in _buckets(here, (name,))
        if len({group.settings[name] for group in bucket}) > 2
    ]


def _keys(sweeps: list[Sweep]) -> set[str]:
    return {group.key for _, bucket in sweeps for group in bucket}


def _heat(names: tuple[str, ...], bucket: list[Group]) -> Heat:
    x, y = names
    columns, rows = (sorted({_number(group, name) for group in bucket}) for name in names)
    values: list[list[Number]] = [[None] * len(columns) for _ in rows]
    for group in bucket:
        values[rows.index(_number(group, y))][columns.index(_number(group, x))] = group.mean
    rule, model, data = bucket[0].place
    label = METRICS[bucket[0].metric].heading
    return Heat("heat", f"{rule}: {data}, {model}", x, y, columns, rows, values, label, bucket[0])


def _number(group: Group, name: str) -> float:
    return float(group.settings[name])  # type: ignore[arg-type]  # `_numeric` saw to it


def _sweeps(rows: list[Sweep]) -> Iterable[Chart]:
    """One chart for each setting, network and data set, a line for each rule."""
    found: dict[tuple[str, str, str], list[Line]] = {}
    for (name,), bucket in rows:
        values = {_number(group, name): list(group.scores.values()) for group in bucket if group.scores}
        if values:
            rule, model, data = bucket[0].place
            line = over_seeds(rule, bucket[0], values, rank(rule))
            found.setdefault((model, data, name), []).append(line)
    for (model, data, name), lines in found.items():
        places = [x for line in lines for x in line.x]
        wide = min(places) > 0 and max(places) / min(places) >= 10
        label = METRICS[lines[0].group.metric].heading
        yield Chart("sweep", f"{name}: {data}, {model}", name, label, lines, log_x=wide)
