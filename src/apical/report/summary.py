"""The summary table: accuracy and time of each rule on the paper's two networks and two of its data sets."""

import statistics

from apical.bench.export import TITLES
from apical.bench.render import format_markdown_rows
from apical.bench.tables import Cell, Table
from apical.report.diagnoses import find_counterpart

SUITE = "rules"
PLACES = [("mlp", "mnist"), ("cnn", "mnist"), ("mlp", "cifar10"), ("cnn", "cifar10")]
NOTE = (
    "{seeds} seeds, test accuracy in percent at the last epoch, the paper's figure in parentheses; * marks a rule that does "
    "not beat `readout`, whose hidden layers stay random, by two standard errors. s/epoch is the time of all seeds "
    "together, in the order of the columns, on {devices}. – was not run yet."
)


def render_summary(found: list[Cell]) -> list[str]:
    """Render the cells of SUITE as a table in Markdown, with a note before it."""
    by_place = {(cell.job.rule, cell.job.model, cell.job.data): cell for cell in found}
    lines = {
        rule: [by_place[rule, *place] for place in PLACES] for rule in dict.fromkeys(cell.job.rule for cell in found)
    }
    rows = [
        [f"`{rule}`", *(_format_score(cell, found) for cell in line), " / ".join(map(_format_seconds, line))]
        for rule, line in lines.items()
        if any(cell.histories for cell in line)
    ]
    headings = ["rule", *(f"{TITLES[data]} {TITLES[model]}" for model, data in PLACES), "s/epoch"]
    devices = sorted({row.device for cell in found for row in cell.rows if row.device})
    note = NOTE.format(seeds=max(len(cell.job.seeds) for cell in found), devices=", ".join(devices) or "nothing yet")
    return [note, "", *format_markdown_rows(Table("", headings, rows))]


def _format_score(cell: Cell, found: list[Cell]) -> str:
    scores, theirs = cell.scores("accuracy"), cell.find_figure("accuracy")
    if not scores:
        return "–"
    over = cell.compare_with(find_counterpart(cell, found))
    mark = "*" if over is not None and not over.learns else ""
    paper = "" if theirs is None else f" ({theirs.accuracy:.2f})"
    return f"{statistics.fmean(scores.values()):.2f}{mark}{paper}"


def _format_seconds(cell: Cell) -> str:
    times = [row.seconds_per_epoch for row in cell.rows if row.seconds_per_epoch is not None]
    return f"{statistics.median(times):.2f}" if times else "–"
