"""Drawings as Plotly figures: plain dictionaries, whose colours of paper and ink the page fills in."""

from html import escape
from typing import Any

from apical.report.charts import FEW, Chart, Drawing, Heat, Line, log_ticks
from apical.report.groups import CONTROL, Group
from apical.report.style import colour, dash

DASHES = {"solid": "solid", "dashed": "dash", "dotted": "dot"}
SYMBOLS = {"solid": "circle", "dashed": "square", "dotted": "diamond"}


def figure(drawing: Drawing) -> dict[str, Any]:
    """What Plotly.react takes; each trace says in `meta` what it is of and whether it is shown at first, for filters."""
    traces = [_heat(drawing)] if isinstance(drawing, Heat) else _traces(drawing)
    return {"data": traces, "layout": _layout(drawing)}


def _layout(drawing: Drawing) -> dict[str, Any]:
    names = 0 if isinstance(drawing, Heat) else len(drawing.lines)
    x, y = _axes(drawing)
    return {
        "xaxis": {"title": {"text": _text(drawing.x)}, "automargin": True, **x},
        "yaxis": {"title": {"text": _text(drawing.y)}, "automargin": True, **y},
        "height": 330 + 12 * names,
        "margin": {"l": 8, "r": 12, "t": 10, "b": 8},
        "showlegend": names > 0,
        "legend": {
            "orientation": "h",
            "yref": "container",
            "y": 0,
            "yanchor": "bottom",
            "x": 0,
            "tracegroupgap": 0,
        },
        "hovermode": "closest",
    }


def _axes(drawing: Drawing) -> tuple[dict[str, Any], dict[str, Any]]:
    if isinstance(drawing, Heat):
        return {"type": "category"}, {"type": "category"}
    x = _log([x for line in drawing.lines for x in line.x]) if drawing.log_x else {}
    y = _log([y for line in drawing.lines for y in (*line.low, *line.high)]) if drawing.log_y else {}
    return x, y


def _log(values: list[float]) -> dict[str, Any]:
    ticks = log_ticks(values)
    return {"type": "log", "tickvals": list(ticks), "ticktext": list(ticks.values())}


def _traces(chart: Chart) -> list[dict[str, Any]]:
    if chart.points:
        return [_point(line) for line in chart.lines]
    bands = [_band(line) for line in chart.lines if len(line.group.curves) > 1]
    return [*bands, *(_curve(line, chart) for line in chart.lines)]


def _curve(line: Line, chart: Chart) -> dict[str, Any]:
    return {
        **_shared(line),
        "mode": "lines+markers" if len(line.x) <= FEW else "lines",
        "x": line.x,
        "y": line.y,
        "line": {"color": colour(line.style), "dash": DASHES[dash(line.style)], "width": 2},
        "hovertemplate": f"{_text(chart.x)} %{{x}}: %{{y:.4g}}",
    }


def _band(line: Line) -> dict[str, Any]:
    """The range over seeds, around and back."""
    return {
        **_shared(line),
        "mode": "lines",
        "x": [*line.x, *reversed(line.x)],
        "y": [*line.high, *reversed(line.low)],
        "fill": "toself",
        "fillcolor": colour(line.style),
        "opacity": 0.15,
        "line": {"width": 0},
        "showlegend": False,
        "hoverinfo": "skip",
    }


def _point(line: Line) -> dict[str, Any]:
    mean, low, high = line.y[0], line.low[0], line.high[0]
    return {
        **_shared(line),
        "mode": "markers",
        "x": line.x,
        "y": line.y,
        "error_y": {
            "type": "data",
            "symmetric": False,
            "array": [high - mean],
            "arrayminus": [mean - low],
            "width": 3,
        },
        "marker": {
            "color": colour(line.style),
            "size": 10,
            "symbol": "x" if line.name == CONTROL else SYMBOLS[dash(line.style)],
        },
        "hovertemplate": "%{y:.2f} in %{x:.3g} s",
    }


def _shared(line: Line) -> dict[str, Any]:
    return {
        "type": "scatter",
        "name": _text(line.name),
        "legendgroup": _text(line.name),
        "meta": {**tags(line.group), "shown": line.shown},
    }


def _heat(heat: Heat) -> dict[str, Any]:
    return {
        "type": "heatmap",
        "x": [f"{value:g}" for value in heat.columns],
        "y": [f"{value:g}" for value in heat.rows],
        "z": heat.values,
        "colorscale": "Viridis",
        "colorbar": {"title": {"text": _text(heat.label), "side": "right"}, "thickness": 12},
        "texttemplate": "%{z:.4g}",
        "hovertemplate": f"{_text(heat.x)} %{{x}}, {_text(heat.y)} %{{y}}: %{{z:.4g}}<extra></extra>",
        "meta": {**tags(heat.group), "shown": True},
    }


def tags(group: Group) -> dict[str, Any]:
    """What the page's filters ask for."""
    rule, model, data = group.place
    return {"rule": rule, "model": model, "data": data, "suite": list(group.suites)}


def _text(words: str) -> str:
    """Plotly reads some HTML in labels, and %{…} in templates; what comes from a store has neither."""
    return escape(words, quote=False).replace("%{", "% {")
