"""Render the page of a suite in docs/results: tables, diagnoses and figures; and the page of its times and commands."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

from apical.bench import provenance
from apical.bench.cells import Cell, Table, load_cells, merge_folds, sum_training_seconds
from apical.bench.declaration import Request
from apical.bench.estimate import SLOW_RULES
from apical.bench.export import format_markdown_rows
from apical.bench.store import Row, Store
from apical.bench.suites import Suite, list_jobs
from apical.bench.tables import NOTE, build_tables
from apical.printing import escape_markdown, make_printable, quote_code
from apical.report.charts import Drawing
from tools.pages.figures import TITLES, make_figures
from tools.pages.notes import EXPLAINED_SUITE, Notes, find_counterpart, find_shortfalls, make_key

PAPER = (
    *("table1", "ten-seeds", "rules", "streaming", "theta", "paper-settings", "paper-length", "depth", "bias"),
    *("svhn-bias", "staleness", "sensitivity", "sensitivity-sgd"),
    *("convergence", "cost", "table2", "table3", "text", "images-large"),
)
"""The suites that have a page, in order."""
PAGE_WORDING = {"not run": "not run yet", "no data": "not run: the data are not here"}
"""The page's wording for the short words in tables."""
Cells = Callable[[str], list[Cell]]
"""A function that returns the cells of a suite by its name."""
MORE = "[What the columns mean](../results.md), [times, machines and commands](commands/{name}.md)."


@dataclass(frozen=True)
class Section:
    """Lines of Markdown, the drawings of each figure by file name, and the runs that it shows."""

    lines: list[str]
    figures: dict[str, list[Drawing]] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "\n".join(self.lines)


def read_cells(suite: Suite, store: Store, notes: Notes, choice: Request | None = None) -> list[Cell]:
    """Read the cells of a suite from a store, whether or not the data sets are on this machine."""
    asked = [job._replace(problem=notes.absent.get(job.data)) for job in list_jobs(suite, choice or Request())]
    found = load_cells(asked, store) if suite.folds is None else merge_folds(load_cells(asked, store), suite.folds)
    return [clear_old_mark(cell) for cell in found]


def clear_old_mark(cell: Cell) -> Cell:
    """Return the cell without its mark for old code.

    A page names the version of each run instead, so it does not change whenever the code does.
    """
    return replace(
        cell, rows=[replace(row, revision=provenance.get_revision(row.declaration.rule)) for row in cell.rows]
    )


def make_suite_section(suite: Suite, found: list[Cell], notes: Notes) -> Section:
    """Make the page of a suite that has at least one run."""
    remarks = _collect_remarks(suite, found, notes)
    numbers = {name: f"<sup>{number}</sup>" for number, name in enumerate(remarks, 1)}
    marked = [
        replace(cell, remark=numbers.get(make_key(suite.name, cell), "")) for cell in found if not _lacks_data(cell)
    ]
    figures = {f"{suite.name}-{kind}.svg": drawings for kind, drawings in make_figures(suite.name, found).items()}
    lines = [
        f"# {suite.title}\n",
        f"`apical bench {suite.name}`: {describe_progress(found)} {MORE.format(name=suite.name)}\n",
        *(line for table in use_page_wording(build_tables(suite, marked)) for line in render_table(table)),
        *_list_remarks([*remarks.values()]),
        *(_embed_figure(name) for name in figures),
    ]
    return Section(lines, figures, [row for cell in found for row in cell.rows])


def use_page_wording(made: list[Table]) -> list[Table]:
    """Use the page's wording in tables, and drop the note that the page already has at its top."""
    return [
        replace(
            table,
            rows=[[PAGE_WORDING.get(cell, cell) for cell in row] for row in table.rows],
            notes=[note for note in table.notes if note != NOTE],
        )
        for table in made
    ]


def render_table(table: Table) -> list[str]:
    """Render a table with its title and notes as lines of Markdown."""
    notes = (f"{escape_markdown(note)}\n" for note in table.notes)
    return [f"## {escape_markdown(table.title)}\n", *format_markdown_rows(table), "", *notes]


def _collect_remarks(suite: Suite, found: list[Cell], notes: Notes) -> dict[str, str]:
    """Return a remark for each cell that needs one, by the cell's key, in the order of the table.

    A remark has what the cell falls short of, and the diagnosis.
    """
    remarks: dict[str, str] = {}
    models, rules = ([*dict.fromkeys(names)] for names in zip(*((c.job.model, c.job.rule) for c in found), strict=True))
    for cell in sorted(found, key=lambda c: (models.index(c.job.model), rules.index(c.job.rule))):
        name = make_key(suite.name, cell)
        text = notes.diagnoses.get(name)
        short = find_shortfalls(cell, find_counterpart(cell, found), notes.goals)
        if text is not None or (short and suite.name == EXPLAINED_SUITE):
            what = f"`{cell.job.rule}`, {cell.job.model}, {cell.job.data}"
            why = f" ({' and '.join(short)})" if short else ""
            remarks.setdefault(name, f"{what}{why}: {' '.join((text or 'no diagnosis yet.').split())}")
    return remarks


def _list_remarks(remarks: list[str]) -> list[str]:
    if not remarks:
        return []
    counted = "1 cell has" if len(remarks) == 1 else f"{len(remarks)} cells have"
    return [f"{counted} a note:\n", *(f"{number}. {text}" for number, text in enumerate(remarks, 1)), ""]


def describe_progress(found: list[Cell]) -> str:
    """Return how many runs of a suite are finished, and which data sets are absent."""
    done, wanted = count_runs(found)
    failed = sum(row.status == "failed" for cell in found for row in cell.rows)
    said = f"{done} of {wanted} runs are finished" + (f", {failed} failed." if failed else ".")
    absent = {cell.job.data: cell.job.problem for cell in found if _lacks_data(cell)}
    listed = "; ".join(f"{data} ({why})" for data, why in absent.items())
    return said + (f" {PAGE_WORDING['no data'].capitalize()}: {listed}." if absent else "")


def count_runs(found: list[Cell]) -> tuple[int, int]:
    """Return how many runs are finished, and how many there are without those whose data are absent."""
    done = sum(len(cell.histories) for cell in found)
    return done, sum(len(cell.job.seeds) for cell in found if not _lacks_data(cell))


def _lacks_data(cell: Cell) -> bool:
    """Return whether a cell was not run because its data set is absent."""
    return cell.job.problem is not None and not cell.rows


def _embed_figure(name: str) -> str:
    kind = name.removesuffix(".svg").rpartition("-")[2]
    return f"![{TITLES[kind]}](../figures/{name})\n\n{TITLES[kind]}.\n"


def render_commands(title: str, rows: list[Row]) -> str:
    """Render a page with the training time, the machines and versions, and one command for each cell."""
    ended = [row for row in rows if row.status != "running"]
    commands = dict.fromkeys(row.command for row in ended if row.command)
    return "\n".join(
        [
            f"# Commands: {title}\n",
            f"{_describe_minutes(ended)}{_describe_sharing(ended)}\n",
            f"Run on {escape_markdown('; '.join(_describe_machines(ended)))}.\n",
            "One command for each cell:\n",
            "```",
            *(
                make_printable(command, keep="").replace("<", "&lt;") for command in commands
            ),  # a store may say anything
            "```",
            "",
        ]
    )


def _describe_minutes(rows: list[Row]) -> str:
    """Return the minutes of training by device and rule, with and without the rules that settle."""
    said = []
    for device in dict.fromkeys(map(_name_device, rows)):
        here = [row for row in rows if _name_device(row) == device]
        by_rule = {
            rule: sum_training_seconds(row for row in here if row.declaration.rule == rule) / 60
            for rule in dict.fromkeys(row.declaration.rule for row in here)
        }
        total = sum(by_rule.values())
        settling = sum(by_rule.get(rule, 0.0) for rule in SLOW_RULES)
        apart = f", {total - settling:.1f} without {', '.join(SLOW_RULES)}" if settling else ""
        each = ", ".join(f"{quote_code(rule)} {minutes:.1f}" for rule, minutes in by_rule.items())
        said.append(f"Minutes of training on {escape_markdown(device)}: {total:.1f}{apart} ({each}).")
    return " ".join(said)


def _describe_sharing(rows: list[Row]) -> str:
    """Return how many of the runs shared their device with another of them."""
    spans = [(_name_device(r), r.declaration, r.started, r.finished) for r in rows if r.started and r.finished]
    shared = sum(
        any(here == there and what != other and start < stop and begin < end for there, other, begin, stop in spans)
        for here, what, start, end in spans
    )
    return (
        f" {shared} of the runs shared the device with others: their times are not those of runs alone."
        if shared
        else ""
    )


def _describe_machines(rows: Iterable[Row]) -> list[str]:
    """Return the different machines and versions of the runs."""
    found = set()
    for row in rows:
        versions = {"apical": row.code or row.apical, "torch": row.torch, "python": row.python, "cuda": row.cuda}
        known = ", ".join(f"{name} {value}" for name, value in versions.items() if value)
        found.add("; ".join(filter(None, [_name_device(row), known])))
    return sorted(found)


def _name_device(row: Row) -> str:
    return row.device or "an unknown device"
