"""Make the figures of each experiment: one file for each kind of drawing."""

from collections.abc import Callable, Iterable
from functools import cache, partial

import torch
from torch import nn

from apical import models
from apical.bench.cells import METRICS, Cell
from apical.report.charts import (
    Chart,
    Drawing,
    Line,
    make_chart_sections,
    make_line,
    make_line_over_epochs,
    read_cosine,
)
from apical.report.groups import Group, flatten_settings
from apical.report.styles import Style, style_rule

KINDS: dict[str, tuple[str, ...]] = {
    "table1": ("curves",),
    "rules": ("time", "feedback", "update"),
    "theta": ("heat", "feedback", "update"),
    "paper-settings": ("curves",),
    "depth": ("depth",),
    "sensitivity": ("sweep",),
    "convergence": ("local",),
    "cost": ("growth",),
    "table2": ("curves",),
    "table3": ("curves",),
    "text": ("curves",),
}
"""The kinds of drawings of each suite."""

TITLES = {
    "curves": "The test set over training: mean and, shaded, range over seeds",
    "time": "Accuracy against seconds per epoch, with the range over seeds",
    "feedback": "Cosine of Θ with W over training",
    "update": "Cosine of hidden layers' updates with backpropagation's over training",
    "heat": "Accuracy by rate and initial spread of Θ",
    "depth": "Accuracy by number of hidden layers, with the range over seeds",
    "sweep": "Sensitivity to one setting, with the range over seeds",
    "local": "Local loss of each layer over training",
    "growth": "Time and peak memory by batch and by width",
}


def make_figures(suite: str, found: list[Cell]) -> dict[str, list[Drawing]]:
    """Make the drawings of a suite by kind; kinds without data are left out."""
    groups = [
        Group(cell, cell.histories, flatten_settings(cell.job.declaration), (suite,))
        for cell in found
        if cell.histories and cell.job.declaration is not None
    ]
    common = [drawing for section in make_chart_sections(groups) for drawing in section.drawings]
    made: dict[str, list[Drawing]] = {}
    for kind in KINDS.get(suite, ()):
        own = SPECIAL_DRAWINGS.get((suite, kind))
        drawings = [*own(groups)] if own else [drawing for drawing in common if drawing.kind == kind]
        if drawings:
            made[kind] = drawings
    return made


# Drawings that are only in the figures of suites.


def _make_cosine_charter(kind: str, y: str) -> Callable[[list[Group]], Iterable[Chart]]:
    """Return a function that makes charts of cosines over epochs.

    There is one chart for each rule, network and data set, with one line for each setting.
    """

    def charts(groups: list[Group]) -> Iterable[Chart]:
        names = list(dict.fromkeys(group.varied_text for group in groups))
        for place in dict.fromkeys(group.place for group in groups):
            drawn = [
                make_line_over_epochs(
                    group.varied_text, group, partial(read_cosine, kind), Style(names.index(group.varied_text) + 1)
                )
                for group in groups
                if group.place == place
            ]
            rule, model, data = place
            if lines := [line for line in drawn if line is not None]:
                yield Chart(kind, f"{rule}: {data}, {model}", "epoch", y, lines)

    return charts


def _make_depth_charts(groups: list[Group]) -> Iterable[Chart]:
    """Make charts of scores over the number of hidden layers, one chart for each data set."""
    for data in dict.fromkeys(group.place.data for group in groups):
        here = [group for group in groups if group.place.data == data]
        lines = _make_lines(here, lambda g: count_hidden_layers(*g.place[1:]), lambda g: list(g.scores.values()))
        yield Chart("depth", data, "hidden layers", METRICS[here[0].metric].heading, lines)


@cache
def count_hidden_layers(model: str, data: str) -> int:
    """Return the number of hidden layers of a network.

    >>> count_hidden_layers("mlp", "mnist"), count_hidden_layers("mlp-8-8", "mnist")
    (3, 2)
    """
    with torch.device("meta"):
        network = models.build(model, data)
    return sum(isinstance(module, nn.Linear | nn.Conv2d) for module in network.modules()) - 1


def _make_growth_charts(groups: list[Group]) -> Iterable[Chart]:
    """Make charts of time and memory over the batch size if it varies, else over the width in the network's name."""
    found: dict[tuple[str, str], list[Group]] = {}
    for group in groups:
        _, model, data = group.place
        wide = "batch_size" not in group.cell.job.varied
        where = (f"{data}, mlp of equal layers", "width") if wide else (f"{data}, {model}", "batch size")
        found.setdefault(where, []).append(group)
    measures: dict[str, Callable[[Group], float | None]] = {
        "seconds per epoch": lambda group: group.seconds_per_epoch,
        "peak memory, MB": lambda group: group.peak_megabytes,
    }
    for (title, x), here in found.items():
        for y, read in measures.items():
            lines = _make_lines(here, _get_size, lambda g, read=read: [v for v in [read(g)] if v is not None])  # type: ignore[misc]
            if lines:
                yield Chart("growth", title, x, y, lines, log_x=True, log_y=True)


def _get_size(group: Group) -> float:
    return float(group.cell.job.varied.get("batch_size") or group.place.model.rpartition("-")[2])


def _make_lines(groups: list[Group], x: Callable[[Group], float], values: Callable[[Group], list[float]]) -> list[Line]:
    """Make one line for each rule, with one point for each of its groups."""
    found = []
    for rule in dict.fromkeys(group.place.rule for group in groups):
        here = [group for group in groups if group.place.rule == rule]
        points = {x(group): known for group in here if (known := values(group))}
        found += [make_line(rule, here[0], points, style_rule(rule))] if points else []
    return found


SPECIAL_DRAWINGS: dict[tuple[str, str], Callable[[list[Group]], Iterable[Drawing]]] = {
    ("theta", "feedback"): _make_cosine_charter("feedback", "cosine of Θ with W"),
    ("theta", "update"): _make_cosine_charter("update", "cosine with bp's update"),
    ("depth", "depth"): _make_depth_charts,
    ("cost", "growth"): _make_growth_charts,
}
