"""Cells of tables: a job and its results in a store, with its metrics, the paper's figures and comparisons with both."""

import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeVar

from apical.bench.defaults import load_shipped
from apical.bench.store import Row, Store
from apical.bench.suites import Job
from apical.engine.metrics import read_score
from apical.plausibility.criteria import Judgement, find_judgement

ERROR_RATE_DATA = ("tiny_imagenet",)
"""Data sets for which the paper prints error rates instead of accuracies."""
PROTOCOLS = {"clean": "last epoch", "paper": "best test epoch", "validation": "held-out training data"}
"""For each protocol, what its score is taken from."""
K = TypeVar("K")
T = TypeVar("T")


# The figures of the paper.


class Figure(NamedTuple):
    """A figure of the paper, mostly an accuracy. `error` is its ±, over `seeds` seeds if it says so."""

    accuracy: float
    error: float | None = None
    seeds: int | None = None


def _parse_figures(table: dict[str, Any]) -> Iterator[tuple[tuple[str, str, str, str], Figure]]:
    """Yield the figures of a table of paper.toml, by rule, model, data and metric."""
    for row, cells in table["rows"].items():
        rules, model = row.split()
        for column, cell in zip(table["columns"], cells.split(), strict=True):
            data, metric = column.split()
            value, _, error = cell.partition("±")
            for rule in rules.split(",") if cell != "-" else ():
                yield (
                    (rule, model, data, metric),
                    Figure(float(value), float(error) if error else None, table.get("seeds")),
                )


_PAPER = load_shipped("paper.toml")
FIGURES = {key: figure for table in _PAPER["figures"] for key, figure in _parse_figures(table)}
"""Every accuracy, error rate, MSE and MAE by rule, model, data and metric."""
AVERAGE = {key[:2]: FIGURES.pop(key).accuracy for key in list(FIGURES) if key[2] == "average"}
"""Table 1's last column, by rule and model."""
TABLE_1 = [column.split()[0] for column in _PAPER["figures"][0]["columns"][:-1]]
"""The data sets over which table 1 averages."""
COST: dict[tuple[str, ...], list[float]] = {tuple(name.split()): cost for name, cost in _PAPER["cost"].items()}
"""Seconds for an epoch and megabytes, by rule and model."""
STAND_INS: dict[str, str] = _PAPER["stand_ins"]
"""Texts that replace one which may not be distributed."""


def find_figure(rule: str, model: str, data: str, metric: str) -> Figure | None:
    """Return the paper's figure for a rule on a network and data set, None if it has none.

    >>> find_figure("dll", "mlp", "mnist", "accuracy")
    Figure(accuracy=97.57, error=0.4, seeds=4)
    """
    return FIGURES.get((rule, model, STAND_INS.get(data, data), metric))


# Comparisons with the paper, and with the readout control seed by seed.


class Difference(NamedTuple):
    """A mean difference and its standard error."""

    mean: float
    error: float

    @property
    def learns(self) -> bool:
        """Whether the difference to the control is above two standard errors, so that the hidden layers help."""
        return self.mean > 2 * self.error

    @property
    def is_within_error(self) -> bool:
        """Whether the difference is at most two standard errors from zero."""
        return abs(self.mean) <= 2 * self.error

    def text(self, digits: int = 2) -> str:
        """Return the difference and its error with this many digits."""
        return f"{self.mean:+.{digits}f} ± {self.error:.{digits}f}"


def compare_seeds(
    ours: dict[int, float], control: dict[int, float], *, higher_is_better: bool = True
) -> Difference | None:
    """Return how much better our scores are on the seeds that both have; None for fewer than two seeds.

    `higher_is_better=False` is for errors.

    >>> compare_seeds({0: 3.0, 1: 5.0}, {0: 1.0, 1: 1.0})
    Difference(mean=3.0, error=1.0)
    """
    differences = [ours[seed] - control[seed] for seed in sorted(ours.keys() & control.keys())]
    if len(differences) < 2:
        return None
    mean, error = statistics.fmean(differences), statistics.stdev(differences) / len(differences) ** 0.5
    return Difference(mean if higher_is_better else -mean, error)


def compare_with_figure(ours: list[float], figure: Figure) -> Difference:
    """Return the difference of our mean to the paper's figure, with its standard error.

    The paper's ± is taken as a standard deviation over its seeds; if it prints none, the error is ours alone.

    >>> compare_with_figure([97.0, 99.0], Figure(97.0, 2.0, 4))
    Difference(mean=1.0, error=1.4142135623730951)
    """
    squares = compute_std(ours) ** 2 / len(ours)
    if figure.error is not None:
        squares += figure.error**2 / (figure.seeds or 1)
    return Difference(statistics.fmean(ours) - figure.accuracy, squares**0.5)


def is_below(ours: list[float], figure: float) -> bool:
    """Return whether our mean is below a figure by more than one standard error of ours.

    >>> is_below([97.0, 99.0], 99.0), is_below([97.0, 99.0], 99.1)
    (False, True)
    """
    error: float = compute_std(ours) / len(ours) ** 0.5
    return statistics.fmean(ours) + error < figure


def format_mean_std(values: list[float], digits: int = 2) -> str:
    """Return the mean and standard deviation over seeds as text; a single seed has no deviation.

    >>> format_mean_std([97.0, 99.0]), format_mean_std([97.0], 1)
    ('98.00 ± 1.41', '97.0')
    """
    mean = f"{statistics.fmean(values):.{digits}f}"
    return f"{mean} ± {compute_std(values):.{digits}f}" if len(values) > 1 else mean


def compute_std(values: list[float]) -> float:
    """Return the standard deviation over seeds, 0 for a single one."""
    return statistics.stdev(values) if len(values) > 1 else 0.0


class Metric(NamedTuple):
    """A metric: the heading of its column, its number of digits, and how it is read from the rows of a history."""

    heading: str
    digits: int
    key: str
    convert: Callable[[float], float] = float

    def read(self, history: list[dict[str, Any]], protocol: str) -> float | None:
        """Return its value after the last epoch, or after the best one under the paper's protocol."""
        value = read_score(history, self.key, protocol)
        return None if value is None else self.convert(value)


METRICS = {
    "accuracy": Metric("accuracy %", 2, "test_accuracy", lambda share: 100 * share),
    "error": Metric("error rate %", 2, "test_accuracy", lambda share: 100 - 100 * share),
    "mse": Metric("MSE", 4, "test_mse"),
    "mae": Metric("MAE", 4, "test_mae"),
    "loss": Metric("test loss", 4, "test_loss"),
}
HIGHER_IS_BETTER = ("accuracy",)
"""The metrics of which a higher value is better."""


def choose_metrics(history: list[dict[str, Any]], data: str) -> list[str]:
    """Return the metrics of a run, the most important one first."""
    last = history[-1] if history else {}
    if "test_mse" in last:
        return ["mse", "mae"]
    if last and "test_accuracy" not in last:
        return ["loss"]
    return ["error" if data in ERROR_RATE_DATA else "accuracy"]


@dataclass
class Table:
    """A table of text, which can be printed in any format."""

    title: str
    headings: list[str]
    rows: list[list[str]]
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Cell:
    """A job and its results in a store: its rows, and the history of each finished seed."""

    job: Job
    rows: list[Row]
    histories: dict[int, list[dict[str, Any]]]
    remark: str = ""
    """Text that is printed after its value."""

    @property
    def metrics(self) -> list[str]:
        """The metrics that are shown, the most important one first."""
        return choose_metrics(next(iter(self.histories.values()), []), self.job.data)

    @property
    def conditions(self) -> list[object]:
        """The examples and the epoch that its score is taken from. Only cells with equal conditions are compared."""
        asked = self.job.declaration.to_dict() if self.job.declaration else {}
        return [asked.get(name) for name in ("data_options", "examples", "protocol")]

    def scores(self, metric: str) -> dict[int, float]:
        """Return the value of a metric for each finished seed, without values that are not finite."""
        read = METRICS[metric].read
        values = {seed: read(history, self.protocol) for seed, history in self.histories.items()}
        return {seed: value for seed, value in values.items() if value is not None and math.isfinite(value)}

    @property
    def device(self) -> str | None:
        """The device that its times are from: the one of most of its timed runs; None if none was timed."""
        devices = Counter(row.device or "an unknown device" for row in self._timed_rows)
        return max(devices, key=lambda name: devices[name], default=None)

    @property
    def seconds_per_epoch(self) -> float | None:
        """The median time of an epoch on `device`, of all seeds that trained together; None if none was timed."""
        here = [row for row in self._timed_rows if (row.device or "an unknown device") == self.device]
        return statistics.median(row.seconds_per_epoch for row in here) if here else None  # type: ignore[type-var]

    @property
    def _timed_rows(self) -> list[Row]:
        return [row for row in self.rows if row.seconds_per_epoch is not None and math.isfinite(row.seconds_per_epoch)]

    @property
    def old(self) -> bool:
        """Whether other code than the present one computed one of its runs."""
        return any(row.old for row in self.rows)

    @property
    def protocol(self) -> str:
        """The protocol of its score, a key of `PROTOCOLS`."""
        return str(self.job.declaration.to_dict()["protocol"]) if self.job.declaration else "clean"

    def find_figure(self, metric: str) -> Figure | None:
        """Return the paper's figure. There is none for scores on held-out training data."""
        if self.protocol == "validation":
            return None
        return find_figure(self.job.rule, self.job.model, self.job.data, metric)

    def compare_with(self, other: "Cell | None", metric: str = "accuracy") -> Difference | None:
        """Return how much better this cell is than another, seed by seed; None if they share fewer than two seeds.

        The difference is positive if this cell is better, also where a lower value of the metric is better.
        """
        if other is None:
            return None
        return compare_seeds(self.scores(metric), other.scores(metric), higher_is_better=metric in HIGHER_IS_BETTER)


def read_cosines(row: dict[str, Any], kind: str) -> list[float]:
    """Return the cosines of an epoch by layer: of "feedback" weights with W, or of each "update" with backpropagation's.

    Layers without one are left out, and so is the update of the last layer, which is backpropagation's.
    """
    cosines = row.get("alignment", {}).get(kind, [])
    return [cosine for cosine in (cosines[:-1] if kind == "update" else cosines) if cosine is not None]


def group_by(items: Iterable[T], key: Callable[[T], K]) -> dict[K, list[T]]:
    """Return the items in groups of the same key, in the order of the first of each.

    >>> group_by(["bp", "fa", "bn"], lambda name: name[0])
    {'b': ['bp', 'bn'], 'f': ['fa']}
    """
    groups: dict[K, list[T]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


def load_cells(jobs: list[Job], store: Store) -> list[Cell]:
    """Return the cell of each job with its results in a store."""
    keys = {job.declaration.key for job in jobs if job.declaration is not None}
    by_key = {(row.key, row.seed): row for row in store.runs(keys)}
    cells = []
    for job in jobs:
        key = job.declaration.key if job.declaration is not None else ""
        rows = [row for seed in job.seeds if (row := by_key.get((key, seed))) is not None]
        done = [row for row in rows if row.status == "done"]
        cells.append(Cell(job, rows, {row.seed: history for row in done if (history := store.history(row))}))
    return cells


def sum_training_seconds(rows: Iterable[Row]) -> float:
    """Return the seconds that finished runs took. The time of seeds that trained together counts once.

    A seed that failed has fewer epochs than the others of its run, so the longest time of a run is taken.
    """
    groups = group_by((row for row in rows if row.together), lambda row: (row.key, row.command, row.together or 1))
    return sum(
        max(row.seconds or 0.0 for row in group) * len(group) / together for (_, _, together), group in groups.items()
    )


def merge_folds(cells: list[Cell], option: str) -> list[Cell]:
    """Merge cells that differ only in the fold. Each fold of each seed becomes one value."""
    others = [{name: value for name, value in cell.job.varied.items() if name != option} for cell in cells]
    unfolded = [replace(c, job=c.job._replace(varied=varied)) for c, varied in zip(cells, others, strict=True)]
    joined = []
    for group in group_by(unfolded, lambda cell: str(cell.job)).values():
        runs = [(cell, seed) for cell in group for seed in cell.job.seeds]
        # Number the runs by position: a missing fold must not shift the others against the control's.
        histories = {k: cell.histories[seed] for k, (cell, seed) in enumerate(runs) if seed in cell.histories}
        job = group[0].job._replace(seeds=tuple(range(len(runs))))
        joined.append(Cell(job, [row for cell in group for row in cell.rows], histories, group[0].remark))
    return joined


def average_accuracy(line: dict[str, Cell], data: list[str]) -> float | None:
    """Return the average accuracy over data sets; None if one is missing or has another metric."""
    means = [
        statistics.fmean(scores.values())
        for d in data
        if d in line and line[d].metrics[0] == "accuracy" and (scores := line[d].scores("accuracy"))
    ]
    return statistics.fmean(means) if len(means) == len(data) else None


def find_rule_judgement(rule: str, cells: Iterable[Cell]) -> Judgement:
    """Return what the audit says of a rule that has results."""
    with_results = [cell for cell in cells if cell.histories]
    if not with_results:
        return Judgement()
    return find_judgement(rule, [row.verdict for cell in with_results for row in cell.rows])


def list_audit_problems(cells: Iterable[Cell]) -> list[str]:
    """Return a sentence for each rule that the audit failed on."""
    by_rule = group_by(cells, lambda cell: cell.job.rule)
    problems = {rule: find_rule_judgement(rule, own).problem for rule, own in by_rule.items()}
    return [f"? The audit of {rule} failed: {why}" for rule, why in problems.items() if why]
