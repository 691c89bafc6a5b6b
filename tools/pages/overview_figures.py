"""The figures of docs/reproduction.md and of the README, drawn from the results."""

import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from apical.bench.cells import TABLE_1, Cell
from apical.bench.export import TITLES
from apical.extras import import_extra
from apical.files import replace_atomically
from apical.plausibility.criteria import read_verdicts
from apical.report.charts import Chart, Drawing, make_line_over_epochs, read_cosine
from apical.report.figures import METADATA, STYLE, draw_panels
from apical.report.groups import CONTROL, Group, flatten_settings
from apical.report.styles import COLOURS, Style
from tools.pages.facts import measure_difference
from tools.pages.section import Cells

Draw = Callable[[Path], None]
THETA_PLACES = (("mlp", "mnist"), ("cnn", "cifar10"))
CRITERIA_PLACE = ("cnn", "cifar10")
UNIT = 2.0
"""The axis of differences is linear up to so many points to either side, and logarithmic beyond."""
TICKS = (-20, -10, -5, -2, -1, 0, 1, 2, 5, 10, 20, 50)
PALETTE = (1, 2, 4, 10)
"""The numbers of four colours that are easy to tell apart."""
LABEL_GAP = 1.9
"""The least distance of two labels, in points of accuracy."""


def make_overview_figures(cells: Cells) -> dict[str, Draw]:
    """Return a function that draws each figure, by file name; figures without data are left out."""
    compared = [cell for cell in cells("table1") if cell.find_figure("accuracy") and cell.scores("accuracy")]
    theta = make_theta_charts(cells("rules"))
    accuracies = read_accuracies(cells("rules"))
    figures: dict[str, Draw] = {}
    if compared:
        figures["overview-cells.svg"] = partial(draw_differences, compared)
    if theta:
        figures["overview-theta.svg"] = partial(draw_panels, theta)
    if CONTROL in accuracies:
        figures["criteria.svg"] = partial(draw_criteria, accuracies)
    return figures


@contextmanager
def _open_figure(path: Path, width: float, height: float) -> Iterator[tuple[Any, Any]]:
    """Yield a figure and its axes, and save it as SVG at the end. The same drawing always gives the same file."""
    import_extra("matplotlib", "drawing figures", "plot").use("Agg")
    plt = import_extra("matplotlib.pyplot", "drawing figures", "plot")
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(figsize=(width, height), layout="constrained")
        axes.spines[["top", "right"]].set_visible(False)
        yield figure, axes
        with replace_atomically(path) as temporary:
            figure.savefig(temporary, format="svg", metadata=METADATA["svg"])
        plt.close(figure)


def draw_differences(cells: list[Cell], path: Path) -> None:
    """Draw our accuracy less the paper's for each cell: a row for each rule and network, a colour for each data set."""
    rows = list(dict.fromkeys((cell.job.rule, cell.job.model) for cell in cells))
    with _open_figure(path, 7.2, 0.24 * len(rows) + 1.2) as (_, axes):
        axes.axvline(0, color="0.5", linewidth=1)
        for number, data in enumerate(TABLE_1):
            here = [cell for cell in cells if cell.job.data == data]
            x = [measure_difference(cell) for cell in here]
            y = [rows.index((cell.job.rule, cell.job.model)) for cell in here]
            axes.plot(x, y, "o", color=COLOURS[PALETTE[number]], markersize=5, alpha=0.85, label=TITLES.get(data, data))
        axes.set_xscale("symlog", linthresh=UNIT)
        axes.set_xticks(TICKS, [f"{tick:+d}" if tick else "0" for tick in TICKS])
        axes.set_xticks([], minor=True)
        axes.set_yticks(range(len(rows)), [f"{rule}, {TITLES.get(model, model)}" for rule, model in rows])
        axes.set_ylim(len(rows) - 0.5, -0.5)
        axes.grid(axis="y", alpha=0.3)
        axes.set_xlabel(f"test accuracy, ours less the paper's, in points (linear up to ±{UNIT:g})")
        axes.legend(frameon=False, loc="lower center", bbox_to_anchor=(0.5, 1), ncol=len(TABLE_1))


def make_theta_charts(cells: list[Cell]) -> list[Drawing]:
    """Make charts of the cosine of Θ with W and of the test accuracy over epochs, with a line for each way that Θ learns."""
    charts: list[Drawing] = []
    reads: dict[str, Callable[[Group, dict[str, Any]], float | None]] = {
        "cosine of Θ with W": partial(read_cosine, "feedback"),
        "test accuracy %": lambda _, row: 100 * row["test_accuracy"],
    }
    for model, data in THETA_PLACES:
        here = [
            Group(cell, cell.histories, flatten_settings(cell.job.declaration), ())
            for cell in cells
            if cell.histories and cell.job.declaration is not None
            if cell.job.rule.partition(":")[0] == "dll" and (cell.job.model, cell.job.data) == (model, data)
        ]
        for label, read in reads.items():
            drawn = [
                make_line_over_epochs(group.place.rule, group, read, Style(k))
                for k, group in zip(PALETTE, here, strict=False)
            ]
            if lines := [line for line in drawn if line is not None]:
                title = f"{TITLES.get(data, data)} {TITLES.get(model, model)}"
                charts.append(Chart("theta", title, "epoch", label, lines))
    return charts


def read_accuracies(cells: list[Cell]) -> dict[str, float]:
    """Return each rule's mean test accuracy in percent on the network and data set of the figure of criteria."""
    here = [cell for cell in cells if (cell.job.model, cell.job.data) == CRITERIA_PLACE]
    found = {cell.job.rule: cell.scores("accuracy") for cell in here}
    return {rule: statistics.fmean(scores.values()) for rule, scores in found.items() if scores}


def count_criteria(rule: str) -> tuple[int, int]:
    """Return how many criteria a rule meets, and on how many the audit cannot decide.

    >>> count_criteria("bp")
    (1, 0)
    """
    verdicts = list(read_verdicts()[rule])
    return verdicts.count(True), verdicts.count(None)  # type: ignore[arg-type]  # an undecided one is None


def draw_criteria(accuracies: dict[str, float], path: Path) -> None:
    """Draw the accuracy of every rule against the criteria that it meets, with the control as a line.

    Rules with an undecided criterion stand half a step to the right, as hollow points.
    """
    counts = {rule: count_criteria(rule) for rule in accuracies if rule != CONTROL}
    columns: dict[float, list[tuple[float, str]]] = {}
    for rule, (met, undecided) in counts.items():
        columns.setdefault(met + 0.5 * (undecided > 0), []).append((accuracies[rule], rule))
    with _open_figure(path, 7.2, 4.6) as (_, axes):
        axes.axhline(accuracies[CONTROL], color="0.5", linestyle="--", linewidth=1)
        axes.text(
            max(columns) + 0.95, accuracies[CONTROL] + 0.7, "control: random hidden layers", color="0.4", ha="right"
        )
        for x, found in columns.items():
            here = sorted(found)
            for (accuracy, rule), height in zip(here, spread_labels([a for a, _ in here], LABEL_GAP), strict=True):
                colour = "C3" if rule.startswith("dll") else "C0"
                face = "none" if x % 1 else colour
                axes.plot(x, accuracy, "o", color=colour, markerfacecolor=face, markersize=5)
                axes.annotate(rule, (x + 0.06, height), color=colour, va="center")
        names = {0: "none", 1: "one", 2: "two", 3: "all three"}
        labels = {x: names[int(x)] if x % 1 == 0 else f"{names[int(x)]},\nothers undecided" for x in sorted(columns)}
        axes.set_xticks(list(labels), list(labels.values()))
        axes.set_xlim(min(columns) - 0.2, max(columns) + 1)
        axes.set_xlabel("criteria C1 to C3 that the rule meets, as measured")
        axes.set_ylabel(f"test accuracy %, {TITLES[CRITERIA_PLACE[1]]} {TITLES[CRITERIA_PLACE[0]]}")


def spread_labels(heights: list[float], gap: float) -> list[float]:
    """Return the sorted heights moved apart, so that neighbours are at least `gap` from each other.

    >>> [round(height, 6) for height in spread_labels([0.0, 0.0, 9.0], 2.0)]
    [-1.0, 1.0, 9.0]
    """
    spread = list(heights)
    for _ in range(100):  # each pass pushes neighbours that are too close away from each other
        for i in range(1, len(spread)):
            missing = gap - (spread[i] - spread[i - 1])
            if missing > 0:
                spread[i - 1] -= missing / 2
                spread[i] += missing / 2
    return spread
