"""Figures from results for a paper: as SVG, PNG or PDF, the same for the same results."""

import math
import statistics
from pathlib import Path
from typing import Any

from apical.bench.results import Result
from apical.errors import ApicalError
from apical.extras import extra
from apical.files import atomic
from apical.report.charts import Chart, Drawing, Heat, sections, slug
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
        _draw(drawing, paths[-1], format)
    return paths


def _draw(drawing: Drawing, path: Path, format: str) -> None:
    plt = _pyplot()
    with plt.rc_context(LOOK):
        figure, axis = plt.subplots(figsize=(5.2, 3.4), layout="constrained")
        axis.set(title=_plain(drawing.title), xlabel=_plain(drawing.x), ylabel=_plain(drawing.y))
        if isinstance(drawing, Heat):
            _heat(figure, axis, drawing)
        else:
            _chart(figure, axis, drawing)
        with atomic(path) as temporary:
            figure.savefig(temporary, format=format, metadata=METADATA[format])
        plt.close(figure)


def _pyplot() -> Any:
    extra("matplotlib", "drawing figures", "plot").use("Agg")
    return extra("matplotlib.pyplot", "drawing figures", "plot")


def _plain(text: str) -> str:
    """Between two dollars matplotlib would read mathematics."""
    return text.replace("$", r"\$")


def _chart(figure: Any, axis: Any, chart: Chart) -> None:
    axis.set_xscale("log" if chart.log_x else "linear")
    axis.set_yscale("log" if chart.log_y else "linear")
    axis.grid(alpha=0.3)
    for line in (one for one in chart.lines if one.shown):
        name, paint = _plain(line.name), colour(line.style)
        if chart.points:
            around = [[line.y[0] - line.low[0]], [line.high[0] - line.y[0]]]
            axis.errorbar(line.x, line.y, yerr=around, fmt="o", color=paint, capsize=2)
            axis.annotate(name, (line.x[0], line.y[0]), (4, 4), textcoords="offset points", fontsize=7)
        else:
            axis.plot(line.x, line.y, label=name, color=paint, ls=dash(line.style), lw=1.2)
            axis.fill_between(line.x, line.low, line.high, color=paint, alpha=0.15, lw=0)
    if not chart.points:
        figure.legend(loc="outside right upper", frameon=False, fontsize=7)


def _heat(figure: Any, axis: Any, heat: Heat) -> None:
    values = [[math.nan if value is None else value for value in row] for row in heat.values]
    image = axis.imshow(values, origin="lower", aspect="auto", cmap="viridis")
    axis.set_xticks(range(len(heat.columns)), [f"{value:g}" for value in heat.columns])
    axis.set_yticks(range(len(heat.rows)), [f"{value:g}" for value in heat.rows])
    figure.colorbar(image, label=heat.label)


def learning_curves(rows: list[Result], path: Path) -> None:
    """Test accuracy over epochs (mean and range over seeds) and, where recorded, the alignment of Θ with W."""
    plt = _pyplot()
    with plt.rc_context(LOOK):
        figure, axes = plt.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
        for row in rows:
            label = f"{row.key[0]}, {row.settings['epochs']} epochs, lr {row.settings['lr']:g}"
            _curve(axes[0], row, "test_accuracy", label, 100)
            _curve(axes[1], row, "feedback", label, 1)
        axes[0].set(xlabel="epoch", ylabel="test accuracy, %", title="Accuracy")
        axes[1].set(xlabel="epoch", ylabel="cosine", title="Feedback with forward weights")
        handles, labels = axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside right upper", frameon=False)
        for axis in axes:
            axis.grid(alpha=0.3)
        with atomic(path) as temporary:
            figure.savefig(temporary, format="svg", metadata=METADATA["svg"])
        plt.close(figure)


def _curve(axis: Any, row: Result, kind: str, label: str, scale: float) -> None:
    by_epoch: dict[int, list[float]] = {}
    for entry in row.history:
        value = _value(entry, kind)
        if value is not None:
            by_epoch.setdefault(entry["epoch"], []).append(scale * value)
    colour = axis._get_lines.get_next_color()  # a rule keeps its colour in both panels, drawn there or not
    if not by_epoch:
        return
    epochs = sorted(by_epoch)
    axis.plot(epochs, [statistics.fmean(by_epoch[e]) for e in epochs], label=label, color=colour, lw=1.2)
    low, high = [min(by_epoch[e]) for e in epochs], [max(by_epoch[e]) for e in epochs]
    axis.fill_between(epochs, low, high, color=colour, alpha=0.15, lw=0)


def _value(entry: dict[str, Any], kind: str) -> float | None:
    if kind in entry:
        return float(entry[kind])
    cosines = [c for c in entry.get("alignment", {}).get(kind, []) if c is not None]
    return statistics.fmean(cosines) if cosines else None
