"""The table on a rule's own page: its accuracy and settings, one row for each network and data set of the bench."""

from collections.abc import Callable, Collection

from apical.bench import suites
from apical.bench.compare import format_mean_std
from apical.bench.declaration import Declaration
from apical.bench.export import TITLES
from apical.bench.paper import STAND_INS
from apical.bench.render import format_markdown_rows
from apical.bench.tables import Cell, Table
from apical.bench.tune import choose_metric
from apical.bench.words import format_value
from apical.core.registry import rule_names
from apical.engine.settings import Settings
from apical.errors import ApicalError
from apical.report.diagnoses import find_counterpart
from apical.report.suite import PAGE_WORDING

SUITES = ("table1", "rules", "table2", "text")
"""The suites in the table: those in which each rule has the settings that were tuned for it. Time series are left out
because they have no accuracy."""
ALWAYS_SHOWN = ("epochs", "lr", "batch_size")
SHOWN_IF_CHANGED = ("optimizer", "clip", "precision")
"""Settings that are shown if they differ from the defaults of `apical.fit`."""

Cells = Callable[[str], list[Cell]]


def render_rule_table(name: str, cells: Cells) -> list[str]:
    """Render the table of a rule and its variants as lines of Markdown. `cells` returns the cells of a suite."""
    names = [known for known in rule_names() if known.partition(":")[0] == name]
    if not names:
        raise ApicalError(f"a block asks for the rule {name!r}, which there is not.")
    rows: dict[tuple[str, ...], list[str]] = {}
    for suite in SUITES:
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
        "–" if over is None else f"{over}" + ("" if over.learns else " *"),
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
