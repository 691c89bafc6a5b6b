"""Figures from results, as SVG that a paper or a page can use."""

import statistics
from pathlib import Path
from typing import Any

from apical.bench.results import Result
from apical.extras import extra
from apical.files import atomic


def learning_curves(rows: list[Result], path: Path) -> None:
    """Test accuracy over epochs (mean and range over seeds) and, where recorded, the alignment of Θ with W."""
    matplotlib = extra("matplotlib", "drawing figures", "plot")
    matplotlib.use("Agg")
    plt = extra("matplotlib.pyplot", "drawing figures", "plot")
    with plt.rc_context({"svg.hashsalt": "apical", "svg.fonttype": "none", "font.size": 9}):
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
            figure.savefig(temporary, format="svg", metadata={"Date": None})
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
