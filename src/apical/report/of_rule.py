"""What one rule reached and with which settings, for its own page: a line for each network and data set of the bench."""

from collections.abc import Callable, Collection

from apical.bench import suites
from apical.bench.compare import over_seeds
from apical.bench.declaration import Declaration
from apical.bench.export import TITLES
from apical.bench.paper import STAND_INS
from apical.bench.render import markdown_rows
from apical.bench.tables import Cell, Table
from apical.bench.tune import judge
from apical.bench.words import value_text
from apical.core.registry import rule_names
from apical.engine.settings import Settings
from apical.errors import ApicalError
from apical.report.diagnoses import counterpart
from apical.report.suite import WORDS

SUITES = ("table1", "rules", "table2", "text")
"""Where the lines come from: the experiments in which each rule has the settings that were chosen for it. Time series,
which have no accuracy, stand with the results alone."""
ALWAYS = ("epochs", "lr", "batch_size")
SOMETIMES = ("optimizer", "clip", "precision")
"""Settings that are told where they are not those of `apical.fit`."""

Cells = Callable[[str], list[Cell]]


def of_rule(name: str, cells: Cells) -> list[str]:
    """The table of a rule and its variants as lines of Markdown. `cells` gives those of a suite."""
    names = [known for known in rule_names() if known.partition(":")[0] == name]
    if not names:
        raise ApicalError(f"a block asks for the rule {name!r}, which there is not.")
    rows: dict[tuple[str, ...], list[str]] = {}
    for suite in SUITES:
        found, folds = cells(suite), suites.load(suite).folds
        for cell in found:
            shown = cell.job.rule in names and judge(cell.job.data) == "accuracy"
            if shown and cell.job.declaration is not None:
                settings = settings_text(cell.job.declaration, {folds})
                row = _row(cell, settings, counterpart(cell, found))
                rows.setdefault((*row[:3],), row)
    headings = ["rule", "network", "data", "settings", "accuracy %", "over readout", "paper"]
    ordered = sorted(rows.values(), key=lambda row: names.index(row[0].strip("`")))
    return markdown_rows(Table("", headings, ordered))


def _row(cell: Cell, settings: str, control: Cell | None) -> list[str]:
    rule, model, data = cell.job.rule, cell.job.model, cell.job.data
    values, theirs, over = [*cell.scores("accuracy").values()], cell.figure("accuracy"), cell.over(control)
    return [
        f"`{rule}`",
        TITLES.get(model, model),
        TITLES.get(data, data),
        settings,
        over_seeds(values) if values else WORDS["not run"],
        "–" if over is None else f"{over}" + ("" if over.learns else " *"),
        "–" if theirs is None or data in STAND_INS else f"{theirs.accuracy:.2f}",
    ]


def settings_text(declared: Declaration, untold: Collection[str | None] = ()) -> str:
    """The settings of a run that are not `apical.fit`'s own, in a few words.

    >>> settings_text(Declaration.of(Settings("np", "mlp", "mnist", lr=3e-4, options={"samples": 8})))
    'epochs 20, lr 0.0003, batch_size 128, samples 8'
    """
    values, plain = declared.to_dict(), Settings("", "", "").to_dict()
    told = {name: values[name] for name in ALWAYS}
    told |= {name: values[name] for name in SOMETIMES if values[name] != plain[name]}
    told |= values["options"] | values["optimizer_options"] | values["data_options"]
    return ", ".join(f"{name} {value_text(value)}" for name, value in told.items() if name not in untold)
