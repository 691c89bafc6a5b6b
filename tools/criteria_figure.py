"""Draw the README's figure: the accuracy of every rule against the criteria that it keeps.

    python tools/criteria_figure.py

reads the suite `rules` from results/paper.sqlite and the recorded verdicts, and writes docs/assets/criteria.svg.
"""

import statistics
from pathlib import Path

import matplotlib

from apical.bench.cells import load_cells
from apical.bench.store import Store
from apical.bench.suites import list_jobs, load
from apical.plausibility.criteria import read_verdicts

matplotlib.use("svg")
import matplotlib.pyplot as plt

ROOT = Path(__file__).resolve().parents[1]
MODEL, DATA = "cnn", "cifar10"
KEPT = {1: "one", 2: "two", 3: "all three"}


def read_accuracies() -> dict[str, float]:
    """Return each rule's mean test accuracy in percent on the network and data set of the figure."""
    with Store(ROOT / "results" / "paper.sqlite", write=False) as store:
        found = load_cells([j for j in list_jobs(load("rules")) if (j.model, j.data) == (MODEL, DATA)], store)
    scores = {cell.job.rule: cell.scores("accuracy") for cell in found}
    return {rule: statistics.fmean(values.values()) for rule, values in scores.items() if values}


def spread_labels(heights: list[float], gap: float) -> list[float]:
    """Return the sorted heights moved apart, so that neighbours are at least `gap` from each other."""
    spread = list(heights)
    for _ in range(100):  # each pass pushes neighbours that are too close away from each other
        for i in range(1, len(spread)):
            missing = gap - (spread[i] - spread[i - 1])
            if missing > 0:
                spread[i - 1] -= missing / 2
                spread[i] += missing / 2
    return spread


def draw(path: Path) -> None:
    """Write the figure."""
    accuracies, verdicts = read_accuracies(), read_verdicts()
    control = accuracies.pop("readout")
    plt.rcParams |= {"svg.hashsalt": "apical", "svg.fonttype": "none", "font.size": 9}
    figure, axes = plt.subplots(figsize=(7.2, 4.2), layout="constrained")
    axes.axhline(control, color="0.5", linestyle="--", linewidth=1)
    axes.text(2.45, control + 0.7, "control: hidden layers stay random", color="0.4")
    for count in KEPT:
        here = sorted((a, rule) for rule, a in accuracies.items() if sum(verdicts[rule]) == count)
        for (accuracy, rule), height in zip(here, spread_labels([a for a, _ in here], 1.9), strict=True):
            color = "C3" if rule.startswith("dll") else "C0"
            axes.plot(count, accuracy, "o", color=color, markersize=5)
            axes.annotate(rule, (count + 0.06, height), color=color, va="center")
    axes.set_xticks(list(KEPT), list(KEPT.values()))
    axes.set_xlim(0.8, 3.6)
    axes.set_xlabel("criteria C1 to C3 that the rule keeps, as measured")
    axes.set_ylabel("test accuracy %, CIFAR-10 CNN")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, metadata={"Date": None})


if __name__ == "__main__":
    draw(ROOT / "docs" / "assets" / "criteria.svg")
