"""A suite as a section of the page: its tables, diagnoses and figures, what it cost, and how to repeat each cell."""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from apical.bench import code
from apical.bench.plan import SETTLING
from apical.bench.render import markdown_rows
from apical.bench.store import Row, Store
from apical.bench.suites import Choice, Suite, jobs
from apical.bench.tables import NOTE, Cell, Table, cells, over_folds, spent, tables
from apical.report import panels
from apical.report.charts import Drawing
from apical.report.diagnoses import NEEDED, Notes, counterpart, key, shortfalls

PAPER = (
    *("table1", "rules", "theta", "paper-settings", "depth", "bias", "sensitivity", "convergence", "cost"),
    *("table2", "table3", "text", "images-large"),
)
"""The suites of a page, in its order."""
WORDS = {"not run": "not run yet", "no data": "not run: the data are not here"}
"""What a page says in place of a table's short words."""


@dataclass(frozen=True)
class Section:
    """Lines of Markdown, and the figures that they show by file name."""

    lines: list[str]
    figures: dict[str, list[Drawing]] = field(default_factory=dict)


def read(suite: Suite, store: Store, notes: Notes, choice: Choice | None = None) -> list[Cell]:
    """What a store holds of a suite; which data are on this machine does not matter."""
    asked = [job._replace(problem=notes.absent.get(job.data)) for job in jobs(suite, choice or Choice())]
    found = cells(asked, store) if suite.folds is None else over_folds(cells(asked, store), suite.folds)
    return [undated(cell) for cell in found]


def undated(cell: Cell) -> Cell:
    """A cell that is not marked as old: a page names the version of each run, and does not change when the code does."""
    return replace(cell, rows=[replace(row, source=code.source()) for row in cell.rows])


def section(suite: Suite, found: list[Cell], notes: Notes) -> Section:
    """The section of a suite of which something has been run."""
    remarks = _remarks(suite, found, notes)
    numbers = {name: f"<sup>{number}</sup>" for number, name in enumerate(remarks, 1)}
    marked = [
        replace(cell, remark=numbers.get(key(suite.name, cell), "")) for cell in found if not _absent(cell)
    ]
    figures = {
        f"{suite.name}-{kind}.svg": drawings for kind, drawings in panels.figures(suite.name, found).items()
    }
    lines = [
        f"## {suite.title}\n",
        f"`apical bench {suite.name}`: {_progress(found)}\n",
        *(line for table in worded(tables(suite, marked)) for line in shown(table)),
        *_listed([*remarks.values()]),
        *(_picture(name) for name in figures),
        *provenance([row for cell in found for row in cell.rows]),
    ]
    return Section(lines, figures)


def worded(made: list[Table]) -> list[Table]:
    """Tables in a page's words; the note that all of them share stands at its top."""
    return [
        replace(
            table,
            rows=[[WORDS.get(cell, cell) for cell in row] for row in table.rows],
            notes=[note for note in table.notes if note != NOTE],
        )
        for table in made
    ]


def shown(table: Table) -> list[str]:
    """A table with its title and notes, as lines of Markdown."""
    return [f"### {table.title}\n", *markdown_rows(table), "", *(f"{note}\n" for note in table.notes)]


def _remarks(suite: Suite, found: list[Cell], notes: Notes) -> dict[str, str]:
    """By a cell's key: what it falls short of, and the diagnosis; in the order of the table."""
    remarks: dict[str, str] = {}
    models, rules = (
        [*dict.fromkeys(names)] for names in zip(*((c.job.model, c.job.rule) for c in found), strict=True)
    )
    for cell in sorted(found, key=lambda c: (models.index(c.job.model), rules.index(c.job.rule))):
        name = key(suite.name, cell)
        text = notes.diagnoses.get(name)
        short = shortfalls(cell, counterpart(cell, found), notes.goals)
        if text is not None or (short and suite.name == NEEDED):
            what = f"`{cell.job.rule}`, {cell.job.model}, {cell.job.data}"
            why = f" ({' and '.join(short)})" if short else ""
            remarks.setdefault(name, f"{what}{why}: {' '.join((text or 'no diagnosis yet.').split())}")
    return remarks


def _listed(remarks: list[str]) -> list[str]:
    if not remarks:
        return []
    counted = "1 cell has" if len(remarks) == 1 else f"{len(remarks)} cells have"
    return [f"{counted} a note:\n", *(f"{number}. {text}" for number, text in enumerate(remarks, 1)), ""]


def _progress(found: list[Cell]) -> str:
    done = sum(len(cell.histories) for cell in found)
    failed = sum(row.status == "failed" for cell in found for row in cell.rows)
    wanted = sum(len(cell.job.seeds) for cell in found if not _absent(cell))
    said = f"{done} of {wanted} runs are finished" + (f", {failed} failed." if failed else ".")
    absent = {cell.job.data: cell.job.problem for cell in found if _absent(cell)}
    listed = "; ".join(f"{data} ({why})" for data, why in absent.items())
    return said + (f" {WORDS['no data'].capitalize()}: {listed}." if absent else "")


def _absent(cell: Cell) -> bool:
    """Whether it was not run for want of data; what has been run all the same is shown."""
    return cell.job.problem is not None and not cell.rows


def _picture(name: str) -> str:
    kind = name.removesuffix(".svg").rpartition("-")[2]
    return f"![{panels.TITLES[kind]}](figures/{name})\n\n{panels.TITLES[kind]}.\n"


def provenance(rows: list[Row]) -> list[str]:
    """What it took, where and with what it ran, and one command for each cell."""
    ended = [row for row in rows if row.status != "running"]
    commands = dict.fromkeys(row.command for row in ended if row.command)
    return [
        f"{_minutes(ended)}{_beside(ended)}\n",
        f"Run on {'; '.join(_places(ended))}.\n",
        "<details><summary>Commands, one for each cell</summary>\n",
        "```",
        *commands,
        "```",
        "\n</details>\n",
    ]


def _minutes(rows: list[Row]) -> str:
    """Minutes by device and rule; those of the rules that settle apart."""
    said = []
    for device in dict.fromkeys(map(_device, rows)):
        here = [row for row in rows if _device(row) == device]
        by_rule = {
            rule: spent(row for row in here if row.declaration.rule == rule) / 60
            for rule in dict.fromkeys(row.declaration.rule for row in here)
        }
        total = sum(by_rule.values())
        settling = sum(by_rule.get(rule, 0.0) for rule in SETTLING)
        apart = f", {total - settling:.1f} without {', '.join(SETTLING)}" if settling else ""
        each = ", ".join(f"`{rule}` {minutes:.1f}" for rule, minutes in by_rule.items())
        said.append(f"Minutes of training on {device}: {total:.1f}{apart} ({each}).")
    return " ".join(said)


def _beside(rows: list[Row]) -> str:
    """How many of the runs shared their device with others of these."""
    spans = [(_device(r), r.declaration, r.started, r.finished) for r in rows if r.started and r.finished]
    shared = sum(
        any(
            here == there and what != other and start < stop and begin < end
            for there, other, begin, stop in spans
        )
        for here, what, start, end in spans
    )
    return (
        f" {shared} of the runs shared the device with others: their times are not those of runs alone."
        if shared
        else ""
    )


def _places(rows: Iterable[Row]) -> list[str]:
    """Machines and versions, each once."""
    found = set()
    for row in rows:
        versions = {
            "apical": row.code or row.apical,
            "torch": row.torch,
            "python": row.python,
            "cuda": row.cuda,
        }
        known = ", ".join(f"{name} {value}" for name, value in versions.items() if value)
        found.add("; ".join(filter(None, [_device(row), known])))
    return sorted(found)


def _device(row: Row) -> str:
    return row.device or "an unknown device"
