"""Two tables that blocks ask for: the summary of all rules, and the results of one rule with its settings."""

import statistics
from collections.abc import Collection

from apical.bench import suites
from apical.bench.cells import STAND_INS, Cell, Table, format_mean_std
from apical.bench.declaration import Declaration, format_value
from apical.bench.defaults import choose_metric
from apical.bench.export import TITLES, format_markdown_rows
from apical.bench.tables import format_seconds
from apical.core.registry import rule_names
from apical.engine.settings import Settings
from apical.errors import ApicalError
from tools.pages.notes import find_counterpart
from tools.pages.section import PAGE_WORDING, Cells

SUMMARY_SUITE = "rules"
PLACES = [("mlp", "mnist"), ("cnn", "mnist"), ("mlp", "cifar10"), ("cnn", "cifar10")]
SUMMARY_NOTE = (
    "{seeds} seeds, test accuracy in percent at the last epoch, the paper's figure in parentheses; * marks a rule that does "
    "not beat `readout`, whose hidden layers stay random, by two standard errors. s/epoch is the time of all seeds "
    "together, in the order of the columns, on {devices}. – was not run yet, or not timed by itself."
)
RULE_SUITES = ("table1", "rules", "table2", "text")
"""The suites in the table: those in which each rule has the settings that were tuned for it. Time series are left out
because they have no accuracy."""
ALWAYS_SHOWN = ("epochs", "lr", "batch_size")
SHOWN_IF_CHANGED = ("optimizer", "clip", "precision")
"""Settings that are shown if they differ from the defaults of `apical.fit`."""


def render_summary(found: list[Cell]) -> list[str]:
    """Render the cells of SUMMARY_SUITE as a table in Markdown, with a note before it."""
    by_place = {(cell.job.rule, cell.job.model, cell.job.data): cell for cell in found}
    lines = {
        rule: [by_place[rule, *place] for place in PLACES] for rule in dict.fromkeys(cell.job.rule for cell in found)
    }
    rows = [
        [
            f"`{rule}`",
            *(_format_score(cell, found) for cell in line),
            " / ".join(format_seconds(cell, found) for cell in line),
        ]
        for rule, line in lines.items()
        if any(cell.histories for cell in line)
    ]
    headings = ["rule", *(f"{TITLES[data]} {TITLES[model]}" for model, data in PLACES), "s/epoch"]
    devices = sorted({cell.device for cell in found if cell.device})
    note = SUMMARY_NOTE.format(
        seeds=max(len(cell.job.seeds) for cell in found), devices=", ".join(devices) or "nothing yet"
    )
    return [note, "", *format_markdown_rows(Table("", headings, rows))]


def _format_score(cell: Cell, found: list[Cell]) -> str:
    scores, theirs = cell.scores("accuracy"), cell.find_figure("accuracy")
    if not scores:
        return "–"
    over = cell.compare_with(find_counterpart(cell, found))
    mark = "*" if over is not None and not over.learns else ""
    paper = "" if theirs is None else f" ({theirs.accuracy:.2f})"
    return f"{statistics.fmean(scores.values()):.2f}{mark}{paper}"


def render_rule_table(name: str, cells: Cells) -> list[str]:
    """Render the table of a rule and its variants as lines of Markdown. `cells` returns the cells of a suite."""
    names = [known for known in rule_names() if known.partition(":")[0] == name]
    if not names:
        raise ApicalError(f"a block asks for the rule {name!r}, which there is not.")
    rows: dict[tuple[str, ...], list[str]] = {}
    for suite in RULE_SUITES:
        found, folds = cells(suite), suites.load(suite).folds
        for cell in found:
            shown = cell.job.rule in names and choose_metric(cell.job.data) == "accuracy"
            if shown and cell.job.declaration is not None:
                settings = describe_settings(cell.job.declaration, {folds})
                row = _make_row(cell, settings, find_counterpart(cell, found))
                rows.setdefault((*row[:3],), row)
    headings = ["rule", "network", "data", "settings", "accuracy %", "over readout", "paper"]
    ordered = sorted(rows.values(), key=lambda row: names.index(row[0].strip("`")))
    return format_markdown_rows(Table("", headings, ordered))


def _make_row(cell: Cell, settings: str, control: Cell | None) -> list[str]:
    rule, model, data = cell.job.rule, cell.job.model, cell.job.data
    values, theirs, over = (
        [*cell.scores("accuracy").values()],
        cell.find_figure("accuracy"),
        cell.compare_with(control),
    )
    return [
        f"`{rule}`",
        TITLES.get(model, model),
        TITLES.get(data, data),
        settings,
        format_mean_std(values) if values else PAGE_WORDING["not run"],
        "–" if over is None else over.text() + ("" if over.learns else " *"),
        "–" if theirs is None or data in STAND_INS else f"{theirs.accuracy:.2f}",
    ]


def describe_settings(declared: Declaration, hidden: Collection[str | None] = ()) -> str:
    """Return the settings of a run that differ from the defaults of `apical.fit`, as text.

    >>> describe_settings(Declaration.of(Settings("np", "mlp", "mnist", lr=3e-4, options={"samples": 8})))
    'epochs 20, lr 0.0003, batch_size 128, samples 8'
    """
    values, defaults = declared.to_dict(), Settings("", "", "").to_dict()
    settings = {name: values[name] for name in ALWAYS_SHOWN}
    settings |= {name: values[name] for name in SHOWN_IF_CHANGED if values[name] != defaults[name]}
    settings |= values["options"] | values["optimizer_options"] | values["data_options"]
    return ", ".join(f"{name} {format_value(value)}" for name, value in settings.items() if name not in hidden)
