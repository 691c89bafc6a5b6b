"""Draw figures for a paper with matplotlib, as SVG, PNG or PDF. The same results always give the same file."""

import math
from pathlib import Path
from typing import Any

from apical.errors import ApicalError
from apical.extras import import_extra
from apical.files import replace_atomically
from apical.report.charts import (
    MAX_TICKS,
    Chart,
    Drawing,
    HeatMap,
    choose_log_ticks,
    get_scale_key,
    make_chart_sections,
    make_file_name,
)
from apical.report.groups import Group
from apical.report.styles import SYMBOLS

METADATA: dict[str, dict[str, Any]] = {"svg": {"Date": None}, "png": {}, "pdf": {"CreationDate": None}}
"""Metadata that each format must leave out, so that the same results give the same file."""
STYLE = {"svg.hashsalt": "apical", "svg.fonttype": "none", "pdf.fonttype": 42, "font.size": 9, "savefig.dpi": 200}

PANEL, LEGEND = (4.0, 3.0), 1.2
"""Width and height of a drawing, and width of the legend beside it, in inches."""

MARKERS = dict(zip(SYMBOLS, "osD^vPX*", strict=True))
"""matplotlib's name of each symbol."""

LABEL_BOX = {"boxstyle": "round,pad=0.2", "facecolor": "white", "edgecolor": "none", "alpha": 0.7}
"""A background that makes numbers readable on any colour."""


def write(groups: list[Group], folder: Path, format: str) -> list[Path]:
    """Write every chart of the page into its own file and return the paths."""
    if format not in METADATA:
        raise ApicalError(f"figures cannot be written as {format!r}; {', '.join(METADATA)} work.")
    found: dict[str, Drawing] = {}
    for drawing in (one for section in make_chart_sections(groups) for one in section.drawings):
        name = make_file_name(drawing)
        while name in found:
            name += "_"
        found[name] = drawing
    paths = []
    for name, drawing in found.items():
        paths.append(folder / f"{name}.{format}")
        draw_panels([drawing], paths[-1], format)
    return paths


def draw_panels(drawings: list[Drawing], path: Path, format: str = "svg") -> None:
    """Draw into one file, two drawings per row, with one legend.

    Drawings of the same measure, network and data set share a scale.
    """
    import_extra("matplotlib", "drawing figures", "plot").use("Agg")
    plt = import_extra("matplotlib.pyplot", "drawing figures", "plot")
    columns = min(2, len(drawings))
    rows = -(-len(drawings) // columns)
    with plt.rc_context(STYLE):
        size = (PANEL[0] * columns + LEGEND, PANEL[1] * rows)
        figure, axes = plt.subplots(rows, columns, figsize=size, layout="constrained", squeeze=False)
        for axis, drawing in zip(axes.flat, drawings, strict=False):
            axis.set(title=_escape_math(drawing.title), xlabel=_escape_math(drawing.x), ylabel=_escape_math(drawing.y))
            if isinstance(drawing, HeatMap):
                _draw_heat(figure, axis, drawing)
            else:
                _draw_chart(axis, drawing)
        for axis in axes.flat[len(drawings) :]:
            axis.set_axis_off()
        for scale_key in {get_scale_key(drawing): None for drawing in drawings}:
            _share_scale([axis for axis, d in zip(axes.flat, drawings, strict=False) if get_scale_key(d) == scale_key])
        for axis, drawing in zip(axes.flat, drawings, strict=False):
            if isinstance(drawing, Chart) and drawing.log_y:
                _label_log_axis(axis)
        # One legend that has each name once.
        named = {name: line for axis in axes.flat for line, name in zip(*axis.get_legend_handles_labels(), strict=True)}
        if named:
            figure.legend(named.values(), named.keys(), loc="outside right upper", frameon=False, fontsize=7)
        with replace_atomically(path) as temporary:
            figure.savefig(temporary, format=format, metadata=METADATA[format])
        plt.close(figure)


def _share_scale(axes: list[Any]) -> None:
    """Give all axes the widest range of any of them: of colours in heat maps, of y in charts."""
    images = [image for axis in axes for image in axis.images]
    ranges = [image.get_clim() for image in images] or [axis.get_ylim() for axis in axes]
    low, high = min(low for low, _ in ranges), max(high for _, high in ranges)
    for image in images:
        image.set_clim(low, high)
    for axis in axes if not images else []:
        axis.set_ylim(low, high)


def _label_log_axis(axis: Any) -> None:
    low, high = axis.get_ylim()
    ticks = {tick: text for tick, text in choose_log_ticks((low, high)).items() if low <= tick <= high}
    axis.set_yticks(list(ticks), list(ticks.values()))
    axis.set_yticks([], minor=True)


def _escape_math(text: str) -> str:
    """Escape dollars, between which matplotlib would parse mathematics."""
    return text.replace("$", r"\$")


def _draw_chart(axis: Any, chart: Chart) -> None:
    axis.set_xscale("log" if chart.log_x else "linear")
    axis.set_yscale("log" if chart.log_y else "linear")
    axis.grid(alpha=0.3)
    axis.tick_params(which="both", labelsize=7)
    if not chart.points:
        _set_ticks(axis, chart)
    for line in (one for one in chart.lines if one.shown):
        name, look = _escape_math(line.name), line.style
        mark: dict[str, Any] = {"color": look.colour, "marker": MARKERS[look.symbol]}
        if chart.points:
            errors = [[line.y[0] - line.low[0]], [line.high[0] - line.y[0]]]
            axis.errorbar(line.x, line.y, yerr=errors, ls="none", capsize=2, **mark)
            axis.annotate(name, (line.x[0], line.y[0]), (4, 4), textcoords="offset points", fontsize=7)
        else:
            mark |= {"ms": 3, "markevery": max(1, len(line.x) // MAX_TICKS), "clip_on": False}
            axis.plot(line.x, line.y, label=name, ls=look.dash, lw=1.2, **mark)
            axis.fill_between(line.x, line.low, line.high, color=look.colour, alpha=0.15, lw=0)


def _set_ticks(axis: Any, chart: Chart) -> None:
    """Begin and end the axis with the lines. Few values of a logarithmic axis have ticks; integers have no fractions."""
    xs = sorted({x for line in chart.lines for x in line.x})
    if len(xs) > 1:
        axis.set_xlim(xs[0], xs[-1])
    if chart.log_x and len(xs) <= MAX_TICKS:
        axis.set_xticks(xs, [f"{x:g}".replace("e-0", "e-") for x in xs])
        axis.set_xticks([], minor=True)
    elif not chart.log_x and all(x.is_integer() for x in xs):
        axis.xaxis.get_major_locator().set_params(integer=True)


def _draw_heat(figure: Any, axis: Any, heat: HeatMap) -> None:
    values = [[math.nan if value is None else value for value in row] for row in heat.values]
    image = axis.imshow(values, origin="lower", aspect="auto", cmap="viridis")
    axis.set_xticks(range(len(heat.columns)), [f"{value:g}" for value in heat.columns])
    axis.set_yticks(range(len(heat.rows)), [f"{value:g}" for value in heat.rows])
    for row, line in enumerate(heat.values):
        for column, value in enumerate(line):
            if value is not None:
                axis.text(column, row, f"{value:.2f}", ha="center", va="center", bbox=LABEL_BOX, fontsize=7)
    figure.colorbar(image, label=heat.label)
