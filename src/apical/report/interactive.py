"""Convert drawings to Plotly figures: plain dictionaries. The page adds the colours of background and text."""

from html import escape
from typing import Any

from apical.report.charts import MAX_TICKS, Chart, Drawing, HeatMap, Line, choose_log_ticks
from apical.report.groups import CONTROL, Group

DASHES = {"solid": "solid", "dashed": "dash", "dotted": "dot"}
SYMBOLS = {"solid": "circle", "dashed": "square", "dotted": "diamond"}


def make_figure(drawing: Drawing) -> dict[str, Any]:
    """Return the argument of Plotly.react.

    The filters of the page use `meta` of each trace: its tags, and whether it is shown at first.
    """
    traces = [_make_heat_map(drawing)] if isinstance(drawing, HeatMap) else _make_traces(drawing)
    return {"data": traces, "layout": _make_layout(drawing)}


def _make_layout(drawing: Drawing) -> dict[str, Any]:
    names = 0 if isinstance(drawing, HeatMap) else len(drawing.lines)
    x, y = _make_axes(drawing)
    return {
        "xaxis": {"title": {"text": _escape_text(drawing.x)}, "automargin": True, **x},
        "yaxis": {"title": {"text": _escape_text(drawing.y)}, "automargin": True, **y},
        "height": 330 + 12 * names,
        "margin": {"l": 8, "r": 12, "t": 10, "b": 8},
        "showlegend": names > 0,
        "legend": {"orientation": "h", "yref": "container", "y": 0, "yanchor": "bottom", "x": 0, "tracegroupgap": 0},
        "hovermode": "closest",
    }


def _make_axes(drawing: Drawing) -> tuple[dict[str, Any], dict[str, Any]]:
    if isinstance(drawing, HeatMap):
        return {"type": "category"}, {"type": "category"}
    x = _make_log_axis([x for line in drawing.lines for x in line.x]) if drawing.log_x else {}
    y = _make_log_axis([y for line in drawing.lines for y in (*line.low, *line.high)]) if drawing.log_y else {}
    return x, y


def _make_log_axis(values: list[float]) -> dict[str, Any]:
    ticks = choose_log_ticks(values)
    return {"type": "log", "tickvals": list(ticks), "ticktext": list(ticks.values())}


def _make_traces(chart: Chart) -> list[dict[str, Any]]:
    if chart.points:
        return [_make_point(line) for line in chart.lines]
    bands = [_make_band(line) for line in chart.lines if len(line.group.curves) > 1]
    return [*bands, *(_make_curve(line, chart) for line in chart.lines)]


def _make_curve(line: Line, chart: Chart) -> dict[str, Any]:
    return {
        **_make_common(line),
        "mode": "lines+markers" if len(line.x) <= MAX_TICKS else "lines",
        "x": line.x,
        "y": line.y,
        "line": {"color": line.colour, "dash": DASHES[line.dash], "width": 2},
        "hovertemplate": f"{_escape_text(chart.x)} %{{x}}: %{{y:.4g}}",
    }


def _make_band(line: Line) -> dict[str, Any]:
    """Make the shaded range over seeds as a closed polygon."""
    return {
        **_make_common(line),
        "mode": "lines",
        "x": [*line.x, *reversed(line.x)],
        "y": [*line.high, *reversed(line.low)],
        "fill": "toself",
        "fillcolor": line.colour,
        "opacity": 0.15,
        "line": {"width": 0},
        "showlegend": False,
        "hoverinfo": "skip",
    }


def _make_point(line: Line) -> dict[str, Any]:
    mean, low, high = line.y[0], line.low[0], line.high[0]
    return {
        **_make_common(line),
        "mode": "markers",
        "x": line.x,
        "y": line.y,
        "error_y": {"type": "data", "symmetric": False, "array": [high - mean], "arrayminus": [mean - low], "width": 3},
        "marker": {"color": line.colour, "size": 10, "symbol": "x" if line.name == CONTROL else SYMBOLS[line.dash]},
        "hovertemplate": "%{y:.2f} in %{x:.3g} s",
    }


def _make_common(line: Line) -> dict[str, Any]:
    return {
        "type": "scatter",
        "name": _escape_text(line.name),
        "legendgroup": _escape_text(line.name),
        "meta": {**get_tags(line.group), "shown": line.shown},
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
