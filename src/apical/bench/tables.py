"""A suite's results as tables: ours beside the paper's, the difference, and whether it is within error."""

import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any, NamedTuple

from apical.bench.compare import Difference, against, below, over_seeds, paired
from apical.bench.paper import AVERAGE, COST, STAND_INS, Figure, figure
from apical.bench.store import Row, Store, score_of
from apical.bench.suites import Job, Suite
from apical.engine.metrics import judged
from apical.plausibility.page import compare_with_paper
from apical.plausibility.recorded import Judgement, find_judgement

NOTE = (
    "± is the standard deviation over seeds. = marks a difference to the paper within two standard errors of it, * "
    "a rule whose hidden layers do not help: it does not beat the readout control by two standard errors. C1-C3 are the "
    "verdicts of `apical audit` on the rule; ≠ are the paper's, where they differ."
)
SHORT = "↓ marks a mean below the paper's figure by more than one standard error of ours."
CRITERIA = "C1-C3"
OLD = "† computed by another version of the code: --redo runs it again."
FOLDED = "Figures are means over folds, each the test set once: what is said of seeds is of the folds of each seed."
ERRORS = ("tiny_imagenet",)
"""Data of which the paper prints error rates."""


PROTOCOLS = {"clean": "last epoch", "paper": "best test epoch", "validation": "held-out training data"}
"""What a score of each protocol is."""


class Metric(NamedTuple):
    """A measure: its heading, how many digits it has, and how it is read from a history."""

    heading: str
    digits: int
    read: Callable[[list[dict[str, Any]], str], float | None]


def _score(name: str) -> Callable[[list[dict[str, Any]], str], float | None]:
    return lambda history, protocol: judged(history, name, protocol)


def _error(history: list[dict[str, Any]], protocol: str) -> float | None:
    accuracy = score_of(history, protocol)
    return None if accuracy is None else 100 - accuracy


METRICS: dict[str, Metric] = {
    "accuracy": Metric("accuracy %", 2, score_of),
    "error": Metric("error rate %", 2, _error),
    "mse": Metric("MSE", 4, _score("test_mse")),
    "mae": Metric("MAE", 4, _score("test_mae")),
    "loss": Metric("test loss", 4, _score("test_loss")),
}


RISING = ("accuracy",)
"""The measures of which more is better."""


def measures(history: list[dict[str, Any]], data: str) -> list[str]:
    """What a run is judged by, the first before the others."""
    last = history[-1] if history else {}
    if "test_mse" in last:
        return ["mse", "mae"]
    if last and "test_accuracy" not in last:
        return ["loss"]
    return ["error" if data in ERRORS else "accuracy"]


@dataclass
class Table:
    """Text in rows and columns, ready to be printed in any form."""

    title: str
    headings: list[str]
    rows: list[list[str]]
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Cell:
    """A job and what the store holds of it: the finished rows and their histories, by seed."""

    job: Job
    rows: list[Row]
    histories: dict[int, list[dict[str, Any]]]
    remark: str = ""
    """What stands beside its value."""

    @property
    def metrics(self) -> list[str]:
        """What is shown of it."""
        return measures(next(iter(self.histories.values()), []), self.job.data)

    @property
    def terms(self) -> list[object]:
        """On which examples, and by which epoch, it is judged: cells of other terms are not compared."""
        asked = self.job.declaration.to_dict() if self.job.declaration else {}
        return [asked.get(name) for name in ("data_options", "examples", "protocol")]

    def scores(self, metric: str) -> dict[int, float]:
        """One value for each finished seed."""
        read = METRICS[metric].read
        found = {seed: read(history, self.protocol) for seed, history in self.histories.items()}
        return {seed: value for seed, value in found.items() if value is not None}

    @property
    def old(self) -> bool:
        return any(row.old for row in self.rows)

    @property
    def protocol(self) -> str:
        """By which epoch, and on which examples, it is judged."""
        return str(self.job.declaration.to_dict()["protocol"]) if self.job.declaration else "clean"

    def figure(self, metric: str) -> Figure | None:
        """What the paper prints; what is held out of the training data is not compared with it."""
        if self.protocol == "validation":
            return None
        return figure(self.job.rule, self.job.model, self.job.data, metric)

    def over(self, other: "Cell | None", metric: str = "accuracy") -> Difference | None:
        """How much better than another, seed by seed, whichever way the metric points; None where nobody can say."""
        if other is None:
            return None
        return paired(self.scores(metric), other.scores(metric), rising=metric in RISING)


def cells(jobs: Iterable[Job], store: Store) -> list[Cell]:
    """What a store holds of each job."""
    listed = list(jobs)
    keys = {job.declaration.key for job in listed if job.declaration is not None}
    by_key: dict[tuple[str, int], Row] = {(row.key, row.seed): row for row in store.runs(keys)}
    found = []
    for job in listed:
        key = job.declaration.key if job.declaration is not None else ""
        rows = [row for seed in job.seeds if (row := by_key.get((key, seed))) is not None]
        done = [row for row in rows if row.status == "done"]
        found.append(Cell(job, rows, {row.seed: history for row in done if (history := store.history(row))}))
    return found


def spent(rows: Iterable[Row]) -> float:
    """Seconds that finished runs took, from their epochs: those of seeds that trained together count once.

    A seed that failed on the way has fewer epochs than its team; the longest of a team has all of them.
    """
    teams: dict[tuple[str, str | None, int], list[Row]] = {}
    for row in rows:
        if row.together:
            teams.setdefault((row.key, row.command, row.together), []).append(row)
    return sum(
        max(row.seconds or 0.0 for row in team) * len(team) / together
        for (_, _, together), team in teams.items()
    )


def tables(suite: Suite, found: list[Cell]) -> list[Table]:
    """The tables of a suite: one matrix, or one list for each network and data set."""
    if suite.folds is not None:
        found = over_folds(found, suite.folds)
    if suite.layout == "matrix":
        made = [matrix(suite.title, [c for c in found if c.job.model == m]) for m in _models(found)]
    else:
        ordered = sorted(found, key=lambda cell: _first(found, cell))
        groups = groupby(ordered, key=lambda cell: (cell.job.data, cell.job.model))
        made = [listing(f"{data}, {model}", list(group), suite.columns) for (data, model), group in groups]
    if made:
        short = [SHORT] if suite.layout == "matrix" else []
        folded = [] if suite.folds is None else [FOLDED]
        old = [OLD] if any(cell.old for cell in found) else []
        made[-1].notes += [*short, NOTE, *folded, *old, *audit_problems(found)]
    return made


def _models(found: list[Cell]) -> list[str]:
    return list(dict.fromkeys(cell.job.model for cell in found))


def _first(found: list[Cell], cell: Cell) -> int:
    """Where a network and data set first comes."""
    pairs = [(one.job.data, one.job.model) for one in found]
    return pairs.index((cell.job.data, cell.job.model))


def over_folds(found: list[Cell], option: str) -> list[Cell]:
    """Runs that differ in the fold alone as one: each fold of each seed is one value."""
    groups: dict[str, list[Cell]] = {}
    for cell in found:
        varied = {name: value for name, value in cell.job.varied.items() if name != option}
        job = cell.job._replace(varied=varied)
        groups.setdefault(str(job), []).append(replace(cell, job=job))
    joined = []
    for group in groups.values():
        runs = [(cell, seed) for cell in group for seed in cell.job.seeds]
        # By its place, not by what there is: a fold that is missing here must not shift the others.
        histories = {k: cell.histories[seed] for k, (cell, seed) in enumerate(runs) if seed in cell.histories}
        job = group[0].job._replace(seeds=tuple(range(len(runs))))
        joined.append(Cell(job, [row for cell in group for row in cell.rows], histories, group[0].remark))
    return joined


# One line for each run.


def listing(title: str, found: list[Cell], columns: tuple[str, ...]) -> Table:
    """Runs on one network and data set, one line for each."""
    controls = [cell for cell in found if cell.job.rule == "readout"]
    varied = list(dict.fromkeys(name for cell in found for name in cell.job.varied))
    epochs = "epochs" not in varied and len({cell.job.epochs for cell in found}) > 1
    told = [
        cell for cell in found if cell.histories
    ] or found  # what has no result yet does not say what it measures
    metrics = list(dict.fromkeys(metric for cell in told for metric in cell.metrics))
    protocol = "protocol" not in varied and any(cell.protocol != "clean" for cell in found)
    # A few epochs are enough to measure time and memory; what they learn is nothing to hold against the paper's figure.
    compared = [
        metric for metric in metrics if "memory" not in columns and any(c.figure(metric) for c in found)
    ]
    headings = [
        "rule",
        CRITERIA,
        *varied,
        *(["epochs"] if epochs else []),
        *(["protocol"] if protocol else []),
    ]
    for metric in metrics:
        headings += [METRICS[metric].heading, *(["over readout"] if controls else [])]
        headings += ["paper", "difference"] if metric in compared else []
    headings += ["s/epoch", *(_EXTRA[name][0] for name in columns)]
    rows = []
    for cell in found:
        row = [cell.job.rule + ("†" if cell.old else ""), _criteria(cell.job.rule, [cell])]
        row += [f"{cell.job.varied.get(n, '')}" for n in varied] + ([f"{cell.job.epochs}"] if epochs else [])
        row += [PROTOCOLS[cell.protocol]] if protocol else []
        for metric in metrics:
            row += _scored(cell, metric, controls, metric in compared)
        rows.append([*row, _seconds(cell), *(_EXTRA[name][1](cell) for name in columns)])
    data = found[0].job.data
    notes = (
        [f"The paper's figures are of {STAND_INS[data]}, for which {data} stands in."]
        if data in STAND_INS
        else []
    )
    return Table(title, headings, rows, notes + (_costs(found) if "memory" in columns else []))


def judgement_on(rule: str, found: Iterable[Cell]) -> Judgement:
    """Return what the audit says of a rule that has results."""
    with_results = [cell for cell in found if cell.histories]
    if not with_results:
        return Judgement()
    return find_judgement(rule, [row.verdict for cell in with_results for row in cell.rows])


def audit_problems(found: Iterable[Cell]) -> list[str]:
    """Return a sentence for each rule that the audit failed on."""
    cells_of: dict[str, list[Cell]] = {}
    for cell in found:
        cells_of.setdefault(cell.job.rule, []).append(cell)
    problems = {rule: judgement_on(rule, own).problem for rule, own in cells_of.items()}
    return [f"? The audit of {rule} failed: {why}" for rule, why in problems.items() if why]


def _criteria(rule: str, found: Iterable[Cell]) -> str:
    """The audit's verdict beside the paper's; a question mark where the audit failed."""
    judgement = judgement_on(rule, found)
    return "?" if judgement.problem else compare_with_paper(rule, judgement.criteria)


def _scored(cell: Cell, metric: str, controls: list[Cell], printed: bool) -> list[str]:
    """Ours, over the control and, where the paper prints any, its figure and the difference."""
    digits, theirs = METRICS[metric].digits, cell.figure(metric)
    scores = cell.scores(metric)
    values = list(scores.values())
    over = [_over(cell, _control(cell, controls), metric)] if controls else []
    beside = [_printed(theirs, digits), _difference(values, theirs, digits)] if printed else []
    return [_value(cell, values, digits), *over, *beside]


def _value(cell: Cell, values: list[float], digits: int) -> str:
    """The mean and its spread; what is missing of the seeds, and why."""
    failed = [row for row in cell.rows if row.status == "failed"]
    if not values:
        if failed:
            return f"failed{cell.remark}"
        if cell.job.problem is not None:
            return "no data"
        return "running" if any(row.active for row in cell.rows) else "not run"
    text = over_seeds(values, digits)
    missing = len(cell.job.seeds) - len(values)
    if missing:
        text += f" ({len(failed)} failed)" if failed else f" ({len(values)} of {len(cell.job.seeds)} seeds)"
    return text + cell.remark


def _control(cell: Cell, controls: list[Cell]) -> Cell | None:
    """The control that was asked the same, before others one that trained as long; where there is but one, that one."""
    fair = [control for control in controls if control.terms == cell.terms]
    fair.sort(key=lambda control: control.job.epochs != cell.job.epochs)
    same = [control for control in fair if control.job.varied == cell.job.varied]
    as_long = [control for control in fair if control.job.epochs == cell.job.epochs]
    return next(iter(same or as_long or (fair if len(fair) == 1 else [])), None)


def _over(cell: Cell, control: Cell | None, metric: str) -> str:
    if cell.job.rule == "readout":
        return "control"
    if control is None:
        return "–"
    if not cell.scores(metric) or not control.scores(metric):
        return "–"
    difference = cell.over(control, metric)
    if difference is None:
        return "one seed"
    return f"{difference.text(METRICS[metric].digits)}  {difference.mark}".rstrip()


def _printed(theirs: Figure | None, digits: int) -> str:
    if theirs is None:
        return "–"
    return f"{theirs.accuracy:.{digits}f}" + ("" if theirs.error is None else f" ± {theirs.error:.{digits}f}")


def _difference(values: list[float], theirs: Figure | None, digits: int) -> str:
    if theirs is None or not values:
        return "–"
    difference = against(values, theirs)
    return f"{difference.mean:+.{digits}f}" + (" =" if difference.within else "")


def _seconds(cell: Cell) -> str:
    times = [row.seconds_per_epoch for row in cell.rows if row.seconds_per_epoch is not None]
    return f"{statistics.median(times):.2f}" if times else "–"


def _best(cell: Cell) -> str:
    """The best test epoch of the same runs, which nobody may choose."""
    values = [score for h in cell.histories.values() if (score := score_of(h, "paper")) is not None]
    return over_seeds(values) if values else "–"


def _mean_of(cell: Cell, kind: str, hidden: bool = False) -> float | None:
    """The mean over seeds and layers of what was recorded after the last epoch."""
    ends = [h[-1].get("alignment", {}).get(kind, []) for h in cell.histories.values()]
    values = [v for end in ends for v in (end[:-1] if hidden else end) if v is not None]
    return statistics.fmean(values) if values else None


def _cosines(cell: Cell) -> str:
    pair = _mean_of(cell, "feedback"), _mean_of(cell, "update", hidden=True)
    return " / ".join("–" if value is None else f"{value:.2f}" for value in pair)


def _local(cell: Cell) -> str:
    """Each layer's local loss after the first and after the last epoch, the lowest layer first."""
    ends = []
    for place in (0, -1):
        rows = [h[place].get("alignment", {}).get("local") for h in cell.histories.values()]
        layers = zip(*(row for row in rows if row), strict=True)
        ends.append(" ".join(f"{statistics.fmean(values):.2g}" for values in layers))
    return f"{ends[0]} → {ends[1]}" if ends[0] else "–"


def _memory(cell: Cell) -> str:
    sizes = [row.peak_memory for row in cell.rows if row.peak_memory is not None]
    return f"{max(sizes) / 1e6:.0f} MB ({cell.rows[0].memory_kind})" if sizes else "–"


def _costs(found: list[Cell]) -> list[str]:
    """The paper's times and memory of a network's rules, in a sentence, where it prints them."""
    rules = dict.fromkeys((cell.job.rule, cell.job.model) for cell in found)
    each = [
        f"`{rule}` {COST[rule, model][0]} s and {COST[rule, model][1]:.0f} MB"
        for rule, model in rules
        if (rule, model) in COST
    ]
    told = f"An epoch in the paper, on a CPU and on data that it does not name: {', '.join(each)}."
    return [told] if each else []


_EXTRA: dict[str, tuple[str, Callable[[Cell], str]]] = {
    "best": ("best test epoch", _best),
    "alignment": ("Θ·W / update·bp", _cosines),
    "local": ("local losses, first → last epoch", _local),
    "memory": ("peak memory", _memory),
}


# Rules × data sets.


def matrix(title: str, found: list[Cell]) -> Table:
    """One network: a line for each rule and one for the paper's below it, a column for each data set, the average last."""
    data = list(dict.fromkeys(cell.job.data for cell in found))
    model = found[0].job.model
    rows = []
    for rule in dict.fromkeys(cell.job.rule for cell in found):
        line = {cell.job.data: cell for cell in found if cell.job.rule == rule}
        control = {c.job.data: c for c in found if c.job.rule == "readout"}
        old = any(cell.old for cell in line.values())
        rows.append(
            [
                rule + ("†" if old else ""),
                _criteria(rule, line.values()),
                *(_ours(line.get(d), control.get(d)) for d in data),
                _average(line, data),
            ]
        )
        if any(cell.figure(cell.metrics[0]) for cell in line.values()):
            rows.append(
                [
                    "  paper",
                    "",
                    *(_theirs(line.get(d)) for d in data),
                    _their_average(rule, model, line, data),
                ]
            )
    heads = [_head(d, [cell for cell in found if cell.job.data == d]) for d in data]
    others = [c for c in found if c.protocol != "clean"]
    notes = [f"Not of the last epoch: {c.job}, {PROTOCOLS[c.protocol]}." for c in others]
    if len(others) == len(found):
        notes = [f"Scores: {PROTOCOLS[name]}." for name in dict.fromkeys(c.protocol for c in found)]
    return Table(f"{title}, {model}", ["rule", CRITERIA, *heads, "average"], rows, notes)


def _head(data: str, found: list[Cell]) -> str:
    return measured(data, next((cell.metrics[0] for cell in found if cell.histories), "accuracy"))


def measured(data: str, metric: str) -> str:
    """A data set, and its measure where that is no accuracy."""
    return data if metric == "accuracy" else f"{data}, {METRICS[metric].heading}"


def _ours(cell: Cell | None, control: Cell | None) -> str:
    if cell is None:
        return "–"
    metric = cell.metrics[0]
    text = _value(cell, list(cell.scores(metric).values()), METRICS[metric].digits)
    if control is None or cell.job.rule == "readout":
        return text
    difference = cell.over(control, metric)
    return text + (" *" if difference is not None and not difference.learns else "")


def _theirs(cell: Cell | None) -> str:
    if cell is None or (theirs := cell.figure(cell.metrics[0])) is None:
        return "–"
    metric = cell.metrics[0]
    values, digits = list(cell.scores(metric).values()), METRICS[metric].digits
    if not values:
        return _printed(theirs, digits)
    short = " ↓" if metric in RISING and below(values, theirs.accuracy) else ""
    return f"{_printed(theirs, digits)} {_difference(values, theirs, digits)}{short}"


def mean_over(line: dict[str, Cell], data: list[str]) -> float | None:
    """The average accuracy over all data sets; None while one is missing, or is measured otherwise."""
    means = [
        statistics.fmean(scores.values())
        for d in data
        if d in line and line[d].metrics[0] == "accuracy" and (scores := line[d].scores("accuracy"))
    ]
    return statistics.fmean(means) if len(means) == len(data) else None


def _average(line: dict[str, Cell], data: list[str]) -> str:
    mean = mean_over(line, data)
    return "–" if mean is None else f"{mean:.2f}"


def _their_average(rule: str, model: str, line: dict[str, Cell], data: list[str]) -> str:
    theirs, mean = AVERAGE.get((rule, model)), mean_over(line, data)
    if theirs is None or len(data) < 4:
        return "–"
    return f"{theirs:.2f}" + ("" if mean is None else f" {mean - theirs:+.2f}")
