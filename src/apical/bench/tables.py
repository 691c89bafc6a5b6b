"""Tables of a suite's results: our figures, the paper's, the difference, and whether it is within the error."""

import statistics
from collections.abc import Callable, Iterable

from apical.bench.cells import (
    AVERAGE,
    COST,
    HIGHER_IS_BETTER,
    METRICS,
    PROTOCOLS,
    STAND_INS,
    TABLE_1,
    Cell,
    Figure,
    Table,
    average_accuracy,
    compare_with_figure,
    find_rule_judgement,
    format_mean_std,
    group_by,
    is_below,
    list_audit_problems,
    load_cells,
    merge_folds,
    read_cosines,
)
from apical.bench.declaration import Request
from apical.bench.store import Store
from apical.bench.suites import QUICK_EXAMPLES, Suite, list_jobs, load
from apical.plausibility.criteria import compare_with_paper

NOTE = (
    "± is the standard deviation over seeds. = marks a difference to the paper within two standard errors of it, * "
    "a rule whose hidden layers do not help: it does not beat the readout control by two standard errors. C1-C3 are the "
    "verdicts of `apical audit` on the rule; ≠ are the paper's, where they differ."
)
BELOW_NOTE = "↓ marks a mean below the paper's figure by more than one standard error of ours."
CRITERIA = "C1-C3"
OLD_NOTE = "† computed by another version of the code: --redo runs it again."
FOLDS_NOTE = "Figures are means over folds, each the test set once: what is said of seeds is of the folds of each seed."


def make_tables(request: Request, store: Store) -> tuple[list[Table], bool]:
    """Return the tables of a request with the results that a store has, and whether one of its runs failed."""
    suite = load(request.suite)
    found = load_cells(list_jobs(suite, request), store)
    made = build_tables(suite, found)
    failed = {str(c.job): row.error for c in found for row in c.rows if row.status == "failed"}
    if made and failed:
        made[-1].notes += [f"Failed: {job}: {why}" for job, why in failed.items()]
        made[-1].notes.append("--redo runs again what failed.")
    if made and request.quick:
        made[-1].notes.append(f"A quick run on {QUICK_EXAMPLES} examples: no figure here is a result.")
    return made, bool(failed)


def build_tables(suite: Suite, cells: list[Cell]) -> list[Table]:
    """Return the tables of a suite: one matrix for each network, or one list for each network and data set."""
    if suite.folds is not None:
        cells = merge_folds(cells, suite.folds)
    if suite.layout == "matrix":
        made = [build_matrix(suite.title, own) for own in group_by(cells, lambda cell: cell.job.model).values()]
    else:
        groups = group_by(cells, lambda cell: (cell.job.data, cell.job.model))
        made = [build_listing(f"{data}, {model}", own, suite.columns) for (data, model), own in groups.items()]
    if made:
        short = [BELOW_NOTE] if suite.layout == "matrix" else []
        folded = [] if suite.folds is None else [FOLDS_NOTE]
        old = [OLD_NOTE] if any(cell.old for cell in cells) else []
        made[-1].notes += [*short, NOTE, *folded, *old, *list_audit_problems(cells)]
    return made


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
    headings = ["rule", CRITERIA, *varied]
    headings += ["epochs"] * shows_epochs + ["protocol"] * shows_protocol
    for metric in metrics:
        headings += [METRICS[metric].heading, *(["over readout"] if controls else [])]
        headings += ["paper", "difference"] if metric in compared else []
    headings += ["s/epoch", *(_EXTRA_COLUMNS[name][0] for name in columns)]
    rows = []
    for cell in cells:
        row = [cell.job.rule + ("†" if cell.old else ""), _format_criteria(cell.job.rule, [cell])]
        row += [f"{cell.job.varied.get(name, '')}" for name in varied]
        row += [f"{cell.job.epochs}"] * shows_epochs + [PROTOCOLS[cell.protocol]] * shows_protocol
        for metric in metrics:
            row += _format_scores(cell, metric, controls, metric in compared)
        rows.append([*row, format_seconds(cell, cells), *(_EXTRA_COLUMNS[name][1](cell) for name in columns)])
    data = cells[0].job.data
    other = f"The paper's figures are of {STAND_INS.get(data)}, another text: there is no difference to them."
    notes = [other] if data in STAND_INS else []
    return Table(title, headings, rows, notes + (_describe_paper_costs(cells) if "memory" in columns else []))


def _format_criteria(rule: str, cells: Iterable[Cell]) -> str:
    """Return the audit's verdict and the paper's where it differs; a question mark if the audit failed."""
    judgement = find_rule_judgement(rule, cells)
    return "?" if judgement.problem else compare_with_paper(rule, judgement.criteria)


def _format_scores(cell: Cell, metric: str, controls: list[Cell], printed: bool) -> list[str]:
    """Return our score, the difference to the control and, if `printed`, the paper's figure and the difference to it."""
    digits, theirs = METRICS[metric].digits, cell.find_figure(metric)
    values = list(cell.scores(metric).values())
    over = [_format_over_control(cell, _find_control(cell, controls), metric)] if controls else []
    same_data = theirs if cell.job.data not in STAND_INS else None
    beside = [_format_figure(theirs, digits), _format_difference(values, same_data, digits)] if printed else []
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
    if control is None or not cell.scores(metric) or not control.scores(metric):
        return "–"
    difference = cell.compare_with(control, metric)
    if difference is None:
        return "one seed"
    return difference.text(METRICS[metric].digits) + ("" if difference.learns else "  hidden layers do not help")


def _format_figure(theirs: Figure | None, digits: int) -> str:
    if theirs is None:
        return "–"
    return f"{theirs.accuracy:.{digits}f}" + ("" if theirs.error is None else f" ± {theirs.error:.{digits}f}")


def _format_difference(values: list[float], theirs: Figure | None, digits: int) -> str:
    """Return the difference to the paper's figure, with `=` if it is within the error."""
    if theirs is None or not values:
        return "–"
    difference = compare_with_figure(values, theirs)
    return f"{difference.mean:+.{digits}f}" + (" =" if difference.is_within_error else "")


def format_seconds(cell: Cell, beside: Iterable[Cell]) -> str:
    """Return the time of an epoch, with its device if runs of the cells beside it were made on another one."""
    if cell.seconds_per_epoch is None:
        return "–"
    devices = {row.device for other in beside for row in other.rows} - {None, cell.device}
    return f"{cell.seconds_per_epoch:.2f}" + (f" ({cell.device})" if devices else "")


def _format_best(cell: Cell) -> str:
    """Return the accuracy of the best test epoch. It is shown only for comparison, since it is chosen on the test set."""
    values = [score for h in cell.histories.values() if (score := METRICS["accuracy"].read(h, "paper")) is not None]
    return format_mean_std(values) if values else "–"


def _format_alignment(cell: Cell) -> str:
    """Return the cosines of feedback and forward weights, and of our updates and backpropagation's.

    Each is the mean over seeds and layers after the last epoch.
    """
    ends = [history[-1] for history in cell.histories.values()]
    known = ([value for end in ends for value in read_cosines(end, kind)] for kind in ("feedback", "update"))
    return " / ".join(f"{statistics.fmean(values):.2f}" if values else "–" for values in known)


def _format_local_losses(cell: Cell) -> str:
    """Return each layer's local loss after the first and after the last epoch, lowest layer first."""
    ends = []
    for place in (0, -1):
        rows = [h[place].get("alignment", {}).get("local") for h in cell.histories.values()]
        layers = zip(*(row for row in rows if row), strict=True)
        ends.append(" ".join(f"{statistics.fmean(values):.2g}" for values in layers))
    return f"{ends[0]} → {ends[1]}" if ends[0] else "–"


def _format_memory(cell: Cell) -> str:
    """Return the peak memory and, if it is known, what was measured."""
    peak, kind = max(
        ((row.peak_memory or 0, row.memory_kind) for row in cell.rows), default=(0, None), key=lambda x: x[0]
    )
    if not peak:
        return "–"
    return f"{peak / 1e6:.0f} MB" + (f" ({kind})" if kind else "")


def _describe_paper_costs(cells: list[Cell]) -> list[str]:
    """Return a sentence with the paper's time and memory of these rules, if it prints them."""
    names = dict.fromkeys((cell.job.rule, cell.job.model) for cell in cells)
    each = [f"`{name[0]}` {COST[name][0]} s and {COST[name][1]:.0f} MB" for name in names if name in COST]
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
    model, rows = cells[0].job.model, []
    data = list(dict.fromkeys(cell.job.data for cell in cells))
    controls = {cell.job.data: cell for cell in cells if cell.job.rule == "readout"}
    for rule, own in group_by(cells, lambda cell: cell.job.rule).items():
        line = {cell.job.data: cell for cell in own}
        mean, theirs = average_accuracy(line, data), AVERAGE.get((rule, model))
        average = "–" if mean is None else f"{mean:.2f}"
        scores = [_format_our_cell(line.get(d), controls.get(d)) for d in data]
        rows.append([rule + ("†" if any(c.old for c in own) else ""), _format_criteria(rule, own), *scores, average])
        if any(cell.find_figure(cell.metrics[0]) for cell in own):
            average = "–"
            if theirs is not None and all(d in line and line[d].find_figure("accuracy") for d in TABLE_1):
                average = f"{theirs:.2f}" + ("" if mean is None else f" {mean - theirs:+.2f}")
            rows.append(["  paper", "", *(_format_paper_cell(line.get(d)) for d in data), average])
    with_results = [cell for cell in cells if cell.histories]
    metrics = {d: next((c.metrics[0] for c in with_results if c.job.data == d), "accuracy") for d in data}
    heads = [format_heading(d, metric) for d, metric in metrics.items()]
    others = [c for c in cells if c.protocol != "clean"]
    notes = [f"Not of the last epoch: {c.job}, {PROTOCOLS[c.protocol]}." for c in others]
    if len(others) == len(cells):
        notes = [f"Scores: {PROTOCOLS[name]}." for name in dict.fromkeys(c.protocol for c in cells)]
    return Table(f"{title}, {model}", ["rule", CRITERIA, *heads, "average"], rows, notes)


def format_heading(data: str, metric: str) -> str:
    """Return the heading of a data set, with the metric unless it is the accuracy."""
    return data if metric == "accuracy" else f"{data}, {METRICS[metric].heading}"


def _format_our_cell(cell: Cell | None, control: Cell | None) -> str:
    """Return our score, with a star if it is not better than the control."""
    if cell is None:
        return "–"
    metric = cell.metrics[0]
    text = _format_value(cell, list(cell.scores(metric).values()), METRICS[metric].digits)
    difference = None if cell.job.rule == "readout" else cell.compare_with(control, metric)
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
