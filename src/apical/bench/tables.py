"""Tables of a suite's results: our figures, the paper's, the difference, and whether it is within the error."""

import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any, NamedTuple

from apical.bench.compare import Difference, compare_seeds, compare_with_figure, format_mean_std, is_below
from apical.bench.paper import AVERAGE, COST, STAND_INS, Figure, find_figure
from apical.bench.store import Row, Store, compute_score
from apical.bench.suites import Job, Suite
from apical.engine.metrics import read_score
from apical.plausibility.page import compare_with_paper
from apical.plausibility.recorded import Judgement, find_judgement

NOTE = (
    "± is the standard deviation over seeds. = marks a difference to the paper within two standard errors of it, * "
    "a rule whose hidden layers do not help: it does not beat the readout control by two standard errors. C1-C3 are the "
    "verdicts of `apical audit` on the rule; ≠ are the paper's, where they differ."
)
BELOW_NOTE = "↓ marks a mean below the paper's figure by more than one standard error of ours."
CRITERIA = "C1-C3"
OLD_NOTE = "† computed by another version of the code: --redo runs it again."
FOLDS_NOTE = "Figures are means over folds, each the test set once: what is said of seeds is of the folds of each seed."
ERROR_RATE_DATA = ("tiny_imagenet",)
"""Data sets for which the paper prints error rates instead of accuracies."""


PROTOCOLS = {"clean": "last epoch", "paper": "best test epoch", "validation": "held-out training data"}
"""For each protocol, what its score is taken from."""


class Metric(NamedTuple):
    """A metric: the heading of its column, its number of digits, and how it is read from a history."""

    heading: str
    digits: int
    read: Callable[[list[dict[str, Any]], str], float | None]


def _make_reader(name: str) -> Callable[[list[dict[str, Any]], str], float | None]:
    """Return a function that reads a metric from a history under a protocol."""
    return lambda history, protocol: read_score(history, name, protocol)


def _read_error_rate(history: list[dict[str, Any]], protocol: str) -> float | None:
    """Return the error rate in percent."""
    accuracy = compute_score(history, protocol)
    return None if accuracy is None else 100 - accuracy


METRICS: dict[str, Metric] = {
    "accuracy": Metric("accuracy %", 2, compute_score),
    "error": Metric("error rate %", 2, _read_error_rate),
    "mse": Metric("MSE", 4, _make_reader("test_mse")),
    "mae": Metric("MAE", 4, _make_reader("test_mae")),
    "loss": Metric("test loss", 4, _make_reader("test_loss")),
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
        """Return the value of a metric for each finished seed."""
        read = METRICS[metric].read
        values = {seed: read(history, self.protocol) for seed, history in self.histories.items()}
        return {seed: value for seed, value in values.items() if value is not None}

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


def load_cells(jobs: Iterable[Job], store: Store) -> list[Cell]:
    """Return the cell of each job with its results in a store."""
    listed = list(jobs)
    keys = {job.declaration.key for job in listed if job.declaration is not None}
    by_key: dict[tuple[str, int], Row] = {(row.key, row.seed): row for row in store.runs(keys)}
    cells = []
    for job in listed:
        key = job.declaration.key if job.declaration is not None else ""
        rows = [row for seed in job.seeds if (row := by_key.get((key, seed))) is not None]
        done = [row for row in rows if row.status == "done"]
        cells.append(Cell(job, rows, {row.seed: history for row in done if (history := store.history(row))}))
    return cells


def sum_training_seconds(rows: Iterable[Row]) -> float:
    """Return the seconds that finished runs took. The time of seeds that trained together counts once.

    A seed that failed has fewer epochs than the others of its run, so the longest time of a run is taken.
    """
    groups: dict[tuple[str, str | None, int], list[Row]] = {}
    for row in rows:
        if row.together:
            groups.setdefault((row.key, row.command, row.together), []).append(row)
    return sum(
        max(row.seconds or 0.0 for row in group) * len(group) / together for (_, _, together), group in groups.items()
    )


def build_tables(suite: Suite, cells: list[Cell]) -> list[Table]:
    """Return the tables of a suite: one matrix for each network, or one list for each network and data set."""
    if suite.folds is not None:
        cells = merge_folds(cells, suite.folds)
    if suite.layout == "matrix":
        made = [build_matrix(suite.title, [c for c in cells if c.job.model == m]) for m in _list_models(cells)]
    else:
        ordered = sorted(cells, key=lambda cell: _find_first(cells, cell))
        groups = groupby(ordered, key=lambda cell: (cell.job.data, cell.job.model))
        made = [build_listing(f"{data}, {model}", list(group), suite.columns) for (data, model), group in groups]
    if made:
        short = [BELOW_NOTE] if suite.layout == "matrix" else []
        folded = [] if suite.folds is None else [FOLDS_NOTE]
        old = [OLD_NOTE] if any(cell.old for cell in cells) else []
        made[-1].notes += [*short, NOTE, *folded, *old, *list_audit_problems(cells)]
    return made


def _list_models(cells: list[Cell]) -> list[str]:
    """Return the networks of some cells, each once."""
    return list(dict.fromkeys(cell.job.model for cell in cells))


def _find_first(cells: list[Cell], cell: Cell) -> int:
    """Return the position of the first cell with the same network and data set."""
    pairs = [(one.job.data, one.job.model) for one in cells]
    return pairs.index((cell.job.data, cell.job.model))


def merge_folds(cells: list[Cell], option: str) -> list[Cell]:
    """Merge cells that differ only in the fold. Each fold of each seed becomes one value."""
    groups: dict[str, list[Cell]] = {}
    for cell in cells:
        varied = {name: value for name, value in cell.job.varied.items() if name != option}
        job = cell.job._replace(varied=varied)
        groups.setdefault(str(job), []).append(replace(cell, job=job))
    joined = []
    for group in groups.values():
        runs = [(cell, seed) for cell in group for seed in cell.job.seeds]
        # Number the runs by position: a missing fold must not shift the others against the control's.
        histories = {k: cell.histories[seed] for k, (cell, seed) in enumerate(runs) if seed in cell.histories}
        job = group[0].job._replace(seeds=tuple(range(len(runs))))
        joined.append(Cell(job, [row for cell in group for row in cell.rows], histories, group[0].remark))
    return joined


# One line for each run.


def build_listing(title: str, cells: list[Cell], columns: tuple[str, ...]) -> Table:
    """Return a table of runs on one network and data set, one line for each run."""
    controls = [cell for cell in cells if cell.job.rule == "readout"]
    varied = list(dict.fromkeys(name for cell in cells for name in cell.job.varied))
    shows_epochs = "epochs" not in varied and len({cell.job.epochs for cell in cells}) > 1
    # A cell without results does not know its metrics.
    with_results = [cell for cell in cells if cell.histories] or cells
    metrics = list(dict.fromkeys(metric for cell in with_results for metric in cell.metrics))
    shows_protocol = "protocol" not in varied and any(cell.protocol != "clean" for cell in cells)
    # Suites that measure time and memory train for a few epochs only: their scores are not compared with the paper's.
    compared = [metric for metric in metrics if "memory" not in columns and any(c.find_figure(metric) for c in cells)]
    headings = [
        "rule",
        CRITERIA,
        *varied,
        *(["epochs"] if shows_epochs else []),
        *(["protocol"] if shows_protocol else []),
    ]
    for metric in metrics:
        headings += [METRICS[metric].heading, *(["over readout"] if controls else [])]
        headings += ["paper", "difference"] if metric in compared else []
    headings += ["s/epoch", *(_EXTRA_COLUMNS[name][0] for name in columns)]
    rows = []
    for cell in cells:
        row = [cell.job.rule + ("†" if cell.old else ""), _format_criteria(cell.job.rule, [cell])]
        row += [f"{cell.job.varied.get(n, '')}" for n in varied] + ([f"{cell.job.epochs}"] if shows_epochs else [])
        row += [PROTOCOLS[cell.protocol]] if shows_protocol else []
        for metric in metrics:
            row += _format_scores(cell, metric, controls, metric in compared)
        rows.append([*row, _format_seconds(cell), *(_EXTRA_COLUMNS[name][1](cell) for name in columns)])
    data = cells[0].job.data
    notes = [f"The paper's figures are of {STAND_INS[data]}, for which {data} stands in."] if data in STAND_INS else []
    return Table(title, headings, rows, notes + (_describe_paper_costs(cells) if "memory" in columns else []))


def find_rule_judgement(rule: str, cells: Iterable[Cell]) -> Judgement:
    """Return what the audit says of a rule that has results."""
    with_results = [cell for cell in cells if cell.histories]
    if not with_results:
        return Judgement()
    return find_judgement(rule, [row.verdict for cell in with_results for row in cell.rows])


def list_audit_problems(cells: Iterable[Cell]) -> list[str]:
    """Return a sentence for each rule that the audit failed on."""
    cells_of: dict[str, list[Cell]] = {}
    for cell in cells:
        cells_of.setdefault(cell.job.rule, []).append(cell)
    problems = {rule: find_rule_judgement(rule, own).problem for rule, own in cells_of.items()}
    return [f"? The audit of {rule} failed: {why}" for rule, why in problems.items() if why]


def _format_criteria(rule: str, cells: Iterable[Cell]) -> str:
    """Return the audit's verdict and the paper's where it differs; a question mark if the audit failed."""
    judgement = find_rule_judgement(rule, cells)
    return "?" if judgement.problem else compare_with_paper(rule, judgement.criteria)


def _format_scores(cell: Cell, metric: str, controls: list[Cell], printed: bool) -> list[str]:
    """Return our score, the difference to the control and, if `printed`, the paper's figure and the difference to it."""
    digits, theirs = METRICS[metric].digits, cell.find_figure(metric)
    scores = cell.scores(metric)
    values = list(scores.values())
    over = [_format_over_control(cell, _find_control(cell, controls), metric)] if controls else []
    beside = [_format_figure(theirs, digits), _format_difference(values, theirs, digits)] if printed else []
    return [_format_value(cell, values, digits), *over, *beside]


def _format_value(cell: Cell, values: list[float], digits: int) -> str:
    """Return the mean and standard deviation over seeds, and how many seeds are missing; or why there is no value."""
    failed = [row for row in cell.rows if row.status == "failed"]
    if not values:
        if failed:
            return f"failed{cell.remark}"
        if cell.job.problem is not None:
            return "no data"
        return "running" if any(row.active for row in cell.rows) else "not run"
    text = format_mean_std(values, digits)
    missing = len(cell.job.seeds) - len(values)
    if missing:
        text += f" ({len(failed)} failed)" if failed else f" ({len(values)} of {len(cell.job.seeds)} seeds)"
    return text + cell.remark


def _find_control(cell: Cell, controls: list[Cell]) -> Cell | None:
    """Return the control of a cell, among those with the same conditions; None if there is no clear choice.

    A control with the same varied settings comes first, then one with as many epochs, then the only one there is.
    """
    fair = [control for control in controls if control.conditions == cell.conditions]
    fair.sort(key=lambda control: control.job.epochs != cell.job.epochs)
    same = [control for control in fair if control.job.varied == cell.job.varied]
    as_long = [control for control in fair if control.job.epochs == cell.job.epochs]
    return next(iter(same or as_long or (fair if len(fair) == 1 else [])), None)


def _format_over_control(cell: Cell, control: Cell | None, metric: str) -> str:
    """Return the difference to the control, or why there is none."""
    if cell.job.rule == "readout":
        return "control"
    if control is None:
        return "–"
    if not cell.scores(metric) or not control.scores(metric):
        return "–"
    difference = cell.compare_with(control, metric)
    if difference is None:
        return "one seed"
    return f"{difference.text(METRICS[metric].digits)}  {difference.mark}".rstrip()


def _format_figure(theirs: Figure | None, digits: int) -> str:
    """Return a figure of the paper as text."""
    if theirs is None:
        return "–"
    return f"{theirs.accuracy:.{digits}f}" + ("" if theirs.error is None else f" ± {theirs.error:.{digits}f}")


def _format_difference(values: list[float], theirs: Figure | None, digits: int) -> str:
    """Return the difference to the paper's figure, with `=` if it is within the error."""
    if theirs is None or not values:
        return "–"
    difference = compare_with_figure(values, theirs)
    return f"{difference.mean:+.{digits}f}" + (" =" if difference.is_within_error else "")


def _format_seconds(cell: Cell) -> str:
    """Return the median time of an epoch."""
    times = [row.seconds_per_epoch for row in cell.rows if row.seconds_per_epoch is not None]
    return f"{statistics.median(times):.2f}" if times else "–"


def _format_best(cell: Cell) -> str:
    """Return the accuracy of the best test epoch. It is shown only for comparison, since it is chosen on the test set."""
    values = [score for h in cell.histories.values() if (score := compute_score(h, "paper")) is not None]
    return format_mean_std(values) if values else "–"


def _compute_alignment(cell: Cell, kind: str, hidden: bool = False) -> float | None:
    """Return the mean over seeds and layers of an alignment that was recorded after the last epoch."""
    ends = [h[-1].get("alignment", {}).get(kind, []) for h in cell.histories.values()]
    values = [v for end in ends for v in (end[:-1] if hidden else end) if v is not None]
    return statistics.fmean(values) if values else None


def _format_alignment(cell: Cell) -> str:
    """Return the cosines of feedback and forward weights, and of our updates and backpropagation's."""
    pair = _compute_alignment(cell, "feedback"), _compute_alignment(cell, "update", hidden=True)
    return " / ".join("–" if value is None else f"{value:.2f}" for value in pair)


def _format_local_losses(cell: Cell) -> str:
    """Return each layer's local loss after the first and after the last epoch, lowest layer first."""
    ends = []
    for place in (0, -1):
        rows = [h[place].get("alignment", {}).get("local") for h in cell.histories.values()]
        layers = zip(*(row for row in rows if row), strict=True)
        ends.append(" ".join(f"{statistics.fmean(values):.2g}" for values in layers))
    return f"{ends[0]} → {ends[1]}" if ends[0] else "–"


def _format_memory(cell: Cell) -> str:
    """Return the peak memory and what was measured."""
    sizes = [row.peak_memory for row in cell.rows if row.peak_memory is not None]
    return f"{max(sizes) / 1e6:.0f} MB ({cell.rows[0].memory_kind})" if sizes else "–"


def _describe_paper_costs(cells: list[Cell]) -> list[str]:
    """Return a sentence with the paper's time and memory of these rules, if it prints them."""
    rules = dict.fromkeys((cell.job.rule, cell.job.model) for cell in cells)
    each = [
        f"`{rule}` {COST[rule, model][0]} s and {COST[rule, model][1]:.0f} MB"
        for rule, model in rules
        if (rule, model) in COST
    ]
    sentence = f"An epoch in the paper, on a CPU and on data that it does not name: {', '.join(each)}."
    return [sentence] if each else []


_EXTRA_COLUMNS: dict[str, tuple[str, Callable[[Cell], str]]] = {
    "best": ("best test epoch", _format_best),
    "alignment": ("Θ·W / update·bp", _format_alignment),
    "local": ("local losses, first → last epoch", _format_local_losses),
    "memory": ("peak memory", _format_memory),
}


# Rules × data sets.


def build_matrix(title: str, cells: list[Cell]) -> Table:
    """Return the table of one network: a column for each data set and the average, and for each rule a line with our
    scores and a line with the paper's.
    """
    data = list(dict.fromkeys(cell.job.data for cell in cells))
    model = cells[0].job.model
    rows = []
    for rule in dict.fromkeys(cell.job.rule for cell in cells):
        line = {cell.job.data: cell for cell in cells if cell.job.rule == rule}
        control = {c.job.data: c for c in cells if c.job.rule == "readout"}
        old = any(cell.old for cell in line.values())
        rows.append(
            [
                rule + ("†" if old else ""),
                _format_criteria(rule, line.values()),
                *(_format_our_cell(line.get(d), control.get(d)) for d in data),
                _format_average(line, data),
            ]
        )
        if any(cell.find_figure(cell.metrics[0]) for cell in line.values()):
            rows.append(
                [
                    "  paper",
                    "",
                    *(_format_paper_cell(line.get(d)) for d in data),
                    _format_paper_average(rule, model, line, data),
                ]
            )
    heads = [_format_data_heading(d, [cell for cell in cells if cell.job.data == d]) for d in data]
    others = [c for c in cells if c.protocol != "clean"]
    notes = [f"Not of the last epoch: {c.job}, {PROTOCOLS[c.protocol]}." for c in others]
    if len(others) == len(cells):
        notes = [f"Scores: {PROTOCOLS[name]}." for name in dict.fromkeys(c.protocol for c in cells)]
    return Table(f"{title}, {model}", ["rule", CRITERIA, *heads, "average"], rows, notes)


def _format_data_heading(data: str, cells: list[Cell]) -> str:
    """Return the heading of a data set, with the metric of its first cell that has results."""
    return format_heading(data, next((cell.metrics[0] for cell in cells if cell.histories), "accuracy"))


def format_heading(data: str, metric: str) -> str:
    """Return the heading of a data set, with the metric unless it is the accuracy."""
    return data if metric == "accuracy" else f"{data}, {METRICS[metric].heading}"


def _format_our_cell(cell: Cell | None, control: Cell | None) -> str:
    """Return our score, with a star if it is not better than the control."""
    if cell is None:
        return "–"
    metric = cell.metrics[0]
    text = _format_value(cell, list(cell.scores(metric).values()), METRICS[metric].digits)
    if control is None or cell.job.rule == "readout":
        return text
    difference = cell.compare_with(control, metric)
    return text + (" *" if difference is not None and not difference.learns else "")


def _format_paper_cell(cell: Cell | None) -> str:
    """Return the paper's figure and the difference to it, with an arrow if ours is clearly below."""
    if cell is None or (theirs := cell.find_figure(cell.metrics[0])) is None:
        return "–"
    metric = cell.metrics[0]
    values, digits = list(cell.scores(metric).values()), METRICS[metric].digits
    if not values:
        return _format_figure(theirs, digits)
    short = " ↓" if metric in HIGHER_IS_BETTER and is_below(values, theirs.accuracy) else ""
    return f"{_format_figure(theirs, digits)} {_format_difference(values, theirs, digits)}{short}"


def average_accuracy(line: dict[str, Cell], data: list[str]) -> float | None:
    """Return the average accuracy over data sets; None if one is missing or has another metric."""
    means = [
        statistics.fmean(scores.values())
        for d in data
        if d in line and line[d].metrics[0] == "accuracy" and (scores := line[d].scores("accuracy"))
    ]
    return statistics.fmean(means) if len(means) == len(data) else None


def _format_average(line: dict[str, Cell], data: list[str]) -> str:
    """Return our average accuracy as text."""
    mean = average_accuracy(line, data)
    return "–" if mean is None else f"{mean:.2f}"


def _format_paper_average(rule: str, model: str, line: dict[str, Cell], data: list[str]) -> str:
    """Return the paper's average and our difference to it, if all four data sets are shown."""
    theirs, mean = AVERAGE.get((rule, model)), average_accuracy(line, data)
    if theirs is None or len(data) < 4:
        return "–"
    return f"{theirs:.2f}" + ("" if mean is None else f" {mean - theirs:+.2f}")
