"""Figures from results for a paper: as SVG, PNG or PDF, the same for the same results."""

import math
from pathlib import Path
from typing import Any

from apical.errors import ApicalError
from apical.extras import extra
from apical.files import atomic
from apical.report.charts import FEW, Chart, Drawing, Heat, log_ticks, measured, sections, slug
from apical.report.groups import Group
from apical.report.style import colour, dash

METADATA: dict[str, dict[str, Any]] = {"svg": {"Date": None}, "png": {}, "pdf": {"CreationDate": None}}
"""What each format must leave out so that the same results give the same file."""
LOOK = {
    "svg.hashsalt": "apical",
    "svg.fonttype": "none",
    "pdf.fonttype": 42,
    "font.size": 9,
    "savefig.dpi": 200,
}

PANEL, LEGEND = (4.0, 3.0), 1.2
"""Inches: the width and height of a drawing, and the width of the legend beside them."""

PLATE = {"boxstyle": "round,pad=0.2", "facecolor": "white", "edgecolor": "none", "alpha": 0.7}
"""What makes a number readable on any colour."""


def write(groups: list[Group], folder: Path, format: str) -> list[Path]:
    """Every chart of the page as a file of its own."""
    if format not in METADATA:
        raise ApicalError(f"figures cannot be written as {format!r}; {', '.join(METADATA)} work.")
    found: dict[str, Drawing] = {}
    for drawing in (one for section in sections(groups) for one in section.drawings):
        name = slug(drawing)
        while name in found:
            name += "_"
        found[name] = drawing
    paths = []
    for name, drawing in found.items():
        paths.append(folder / f"{name}.{format}")
        panels([drawing], paths[-1], format)
    return paths


def panels(drawings: list[Drawing], path: Path, format: str = "svg") -> None:
    """Drawings in one file, two side by side, with one legend; what shows the same of one network has one scale."""
    plt = _pyplot()
    across = min(2, len(drawings))
    down = -(-len(drawings) // across)
    with plt.rc_context(LOOK):
        size = (PANEL[0] * across + LEGEND, PANEL[1] * down)
        figure, axes = plt.subplots(down, across, figsize=size, layout="constrained", squeeze=False)
        for axis, drawing in zip(axes.flat, drawings, strict=False):
            axis.set(title=_plain(drawing.title), xlabel=_plain(drawing.x), ylabel=_plain(drawing.y))
            if isinstance(drawing, Heat):
                _heat(figure, axis, drawing)
            else:
                _chart(axis, drawing)
        for axis in axes.flat[len(drawings) :]:
            axis.set_axis_off()
        for alike in {measured(drawing): None for drawing in drawings}:
            _same_scale([axis for axis, d in zip(axes.flat, drawings, strict=False) if measured(d) == alike])
        for axis, drawing in zip(axes.flat, drawings, strict=False):
            if isinstance(drawing, Chart) and drawing.log_y:
                _log_labels(axis)
        _legend(figure, axes)
        with atomic(path) as temporary:
            figure.savefig(temporary, format=format, metadata=METADATA[format])
        plt.close(figure)


def _same_scale(axes: list[Any]) -> None:
    """The widest range of all of them: of colours in heat maps, of heights in the others."""
    images = [image for axis in axes for image in axis.images]
    ranges = [image.get_clim() for image in images] or [axis.get_ylim() for axis in axes]
    low, high = min(low for low, _ in ranges), max(high for _, high in ranges)
    for image in images:
        image.set_clim(low, high)
    for axis in axes if not images else []:
        axis.set_ylim(low, high)


def _log_labels(axis: Any) -> None:
    low, high = axis.get_ylim()
    ticks = {tick: text for tick, text in log_ticks((low, high)).items() if low <= tick <= high}
    axis.set_yticks(list(ticks), list(ticks.values()))
    axis.set_yticks([], minor=True)


def _legend(figure: Any, axes: Any) -> None:
    """Each name once, whichever panels have it."""
    named = {
        name: line for axis in axes.flat for line, name in zip(*axis.get_legend_handles_labels(), strict=True)
    }
    if named:
        figure.legend(named.values(), named.keys(), loc="outside right upper", frameon=False, fontsize=7)


def _pyplot() -> Any:
    extra("matplotlib", "drawing figures", "plot").use("Agg")
    return extra("matplotlib.pyplot", "drawing figures", "plot")


def _plain(text: str) -> str:
    """Between two dollars matplotlib would read mathematics."""
    return text.replace("$", r"\$")


def _chart(axis: Any, chart: Chart) -> None:
    axis.set_xscale("log" if chart.log_x else "linear")
    axis.set_yscale("log" if chart.log_y else "linear")
    axis.grid(alpha=0.3)
    axis.tick_params(which="both", labelsize=7)
    if not chart.points:
        _ticks(axis, chart)
    for line in (one for one in chart.lines if one.shown):
        name, paint = _plain(line.name), colour(line.style)
        if chart.points:
            around = [[line.y[0] - line.low[0]], [line.high[0] - line.y[0]]]
            axis.errorbar(line.x, line.y, yerr=around, fmt="o", color=paint, capsize=2)
            axis.annotate(name, (line.x[0], line.y[0]), (4, 4), textcoords="offset points", fontsize=7)
        else:
            mark = {"marker": "o", "ms": 3} if len(line.x) <= FEW else {}
            axis.plot(line.x, line.y, label=name, color=paint, ls=dash(line.style), lw=1.2, **mark)
            axis.fill_between(line.x, line.low, line.high, color=paint, alpha=0.15, lw=0)


def _ticks(axis: Any, chart: Chart) -> None:
    """On a logarithmic axis the places that have values, if they are few; among whole numbers no fractions."""
    places = sorted({x for line in chart.lines for x in line.x})
    if chart.log_x and len(places) <= FEW:
        axis.set_xticks(places, [f"{x:g}".replace("e-0", "e-") for x in places])
        axis.set_xticks([], minor=True)
    elif not chart.log_x and all(x.is_integer() for x in places):
        axis.xaxis.get_major_locator().set_params(integer=True)


def _heat(figure: Any, axis: Any, heat: Heat) -> None:
    values = [[math.nan if value is None else value for value in row] for row in heat.values]
    image = axis.imshow(values, origin="lower", aspect="auto", cmap="viridis")
    axis.set_xticks(range(len(heat.columns)), [f"{value:g}" for value in heat.columns])
    axis.set_yticks(range(len(heat.rows)), [f"{value:g}" for value in heat.rows])
    for row, line in enumerate(heat.values):
        for column, value in enumerate(line):
            if value is not None:
                axis.text(column, row, f"{value:.2f}", ha="center", va="center", bbox=PLATE, fontsize=7)
    figure.colorbar(image, label=heat.label)
