"""Convert drawings to Plotly figures: plain dictionaries. The page adds the colours of background and text."""

from html import escape
from typing import Any

from apical.report.charts import MAX_TICKS, Chart, Drawing, HeatMap, Line, choose_log_ticks
from apical.report.groups import Group

DASHES = {"solid": "solid", "dashed": "dash", "dotted": "dot", "dashdot": "dashdot"}
FILLS = {"solid": "", "dashed": "-open", "dotted": "-dot", "dashdot": "-open-dot"}
"""Plotly's names of each kind of dashes, and of the symbols that points have in their place."""


def make_figure(drawing: Drawing) -> dict[str, Any]:
    """Return the argument of Plotly.react.

    The filters and the legend of the page use `meta` of each trace: its tags, the number of its line, and whether it is
    shown at first.
    """
    traces = [_make_heat_map(drawing)] if isinstance(drawing, HeatMap) else _make_traces(drawing)
    return {"data": traces, "layout": _make_layout(drawing)}


def _make_layout(drawing: Drawing) -> dict[str, Any]:
    x, y = _make_axes(drawing)
    return {
        "xaxis": {"title": {"text": _escape_text(drawing.x)}, "automargin": True, **x},
        "yaxis": {"title": {"text": _escape_text(drawing.y)}, "automargin": True, **y},
        "margin": {"l": 8, "r": 16, "t": 10, "b": 8},
        "showlegend": False,
        "hovermode": "closest",
    }


def _make_axes(drawing: Drawing) -> tuple[dict[str, Any], dict[str, Any]]:
    if isinstance(drawing, HeatMap):
        return {"type": "category"}, {"type": "category"}
    xs = sorted({x for line in drawing.lines for x in line.x})
    few = {"tickvals": xs} if len(xs) <= MAX_TICKS and not drawing.points else {}
    x = _make_log_axis(xs) if drawing.log_x else few
    y = _make_log_axis([y for line in drawing.lines for y in (*line.low, *line.high)]) if drawing.log_y else {}
    return x, y


def _make_log_axis(values: list[float]) -> dict[str, Any]:
    ticks = choose_log_ticks(values)
    return {"type": "log", "tickvals": list(ticks), "ticktext": list(ticks.values())}


def _make_traces(chart: Chart) -> list[dict[str, Any]]:
    lines = list(enumerate(chart.lines))
    if chart.points:
        return [_make_point(line, number) for number, line in lines]
    bands = [_make_band(line, number, len(lines)) for number, line in lines if len(line.group.curves) > 1]
    return [*bands, *(_make_curve(line, number, chart) for number, line in lines)]


def _make_curve(line: Line, number: int, chart: Chart) -> dict[str, Any]:
    look = line.style
    return {
        **_make_common(line, number),
        "mode": "lines+markers",
        "x": line.x,
        "y": line.y,
        "line": {"color": look.colour, "dash": DASHES[look.dash], "width": 2},
        "marker": {"symbol": look.symbol, "size": 6, "maxdisplayed": MAX_TICKS},
        "cliponaxis": False,
        "hovertemplate": f"{_escape_text(chart.x)} %{{x}}: %{{y:.4g}}",
    }


def _make_band(line: Line, number: int, count: int) -> dict[str, Any]:
    """Make the shaded range over seeds as a closed polygon, fainter if there are many."""
    return {
        **_make_common(line, number),
        "mode": "lines",
        "x": [*line.x, *reversed(line.x)],
        "y": [*line.high, *reversed(line.low)],
        "fill": "toself",
        "fillcolor": line.style.colour,
        "opacity": min(0.15, 1.2 / count),
        "line": {"width": 0},
        "hoverinfo": "skip",
    }


def _make_point(line: Line, number: int) -> dict[str, Any]:
    mean, low, high, look = line.y[0], line.low[0], line.high[0], line.style
    edge = {"width": 1.5, "color": "#ffffff" if look.dash == "dotted" else look.colour}  # also of the dot in a symbol
    return {
        **_make_common(line, number),
        "mode": "markers",
        "x": line.x,
        "y": line.y,
        "error_y": {"type": "data", "symmetric": False, "array": [high - mean], "arrayminus": [mean - low], "width": 3},
        "marker": {"color": look.colour, "size": 10, "symbol": look.symbol + FILLS[look.dash], "line": edge},
        "hovertemplate": "%{y:.2f} in %{x:.3g} s",
    }


def _make_common(line: Line, number: int) -> dict[str, Any]:
    return {
        "type": "scatter",
        "name": _escape_text(line.name),
        "meta": {**get_tags(line.group), "line": number, "shown": line.shown},
    }


def _make_heat_map(heat: HeatMap) -> dict[str, Any]:
    return {
        "type": "heatmap",
        "x": [f"{value:g}" for value in heat.columns],
        "y": [f"{value:g}" for value in heat.rows],
        "z": heat.values,
        "colorscale": "Viridis",
        "colorbar": {"title": {"text": _escape_text(heat.label), "side": "right"}, "thickness": 12},
        "texttemplate": "%{z:.4g}",
        "hovertemplate": f"{_escape_text(heat.x)} %{{x}}, {_escape_text(heat.y)} %{{y}}: %{{z:.4g}}<extra></extra>",
        "meta": {**get_tags(heat.group), "shown": True},
    }


def get_tags(group: Group) -> dict[str, Any]:
    """Return the values that the page's filters compare."""
    rule, model, data = group.place
    return {"rule": rule, "model": model, "data": data, "suite": list(group.suites)}


def _escape_text(words: str) -> str:
    """Escape HTML, which Plotly reads in labels, and %{…}, which it reads in templates."""
    return escape(words, quote=False).replace("%{", "% {")
