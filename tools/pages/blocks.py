"""Fill tables into handwritten pages: between two marks, a page asks for a table, which is made from the results.

<!-- results: depth rules=dll,bp -->      a suite, or a part of it: rules, models, data
<!-- results: table1 against=bp -->       the difference of each rule to that one, seed by seed
<!-- results: summary rules=dll,bp -->    one line for each rule, or for these, for a README
<!-- results: rule np -->                 what a rule and its variants reached, and with which settings
<!-- /results -->                         everything in between is replaced
"""

import re
import statistics
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path

from apical.bench import suites
from apical.bench.cells import METRICS, Cell, Table
from apical.bench.declaration import Request, parse_names
from apical.bench.export import format_markdown_rows
from apical.bench.store import Store
from apical.bench.suites import list_jobs
from apical.bench.tables import build_tables
from apical.errors import ApicalError
from tools.pages.notes import Notes, find_counterpart, load_notes
from tools.pages.rule_tables import SUMMARY_SUITE, Cells, render_rule_table, render_summary
from tools.pages.section import PAGE_WORDING, read_cells, use_page_wording

BLOCK = re.compile(r"^<!-- results: (.*?) -->\n.*?^<!-- /results -->$", re.MULTILINE | re.DOTALL)
PARTS = ("rules", "models", "data", "against")


def fill_pages(store: Store, source: Path, pages: Iterable[Path]) -> dict[Path, str]:
    """Return the new text of these pages, with all blocks filled in."""
    notes = load_notes(source)
    cells = cache(lambda suite: read_cells(suites.load(suite), store, notes))
    texts = {}
    for page in pages:
        try:
            before = page.read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ApicalError(f"the page {page} cannot be read ({error}).") from error
        texts[page], count = BLOCK.subn(lambda found: _render_block(found[1], store, notes, cells), before)
        if not count:
            raise ApicalError(
                f"{page} asks for no results: put <!-- results: SUITE --> and <!-- /results --> on lines of their own."
            )
    return texts


def find_pages(pages: Iterable[Path]) -> list[Path]:
    """Return the given pages, and the pages with a block in the given folders."""
    found: list[Path] = []
    for page in pages:
        if page.is_dir():
            found += [one for one in sorted(page.rglob("*.md")) if BLOCK.search(one.read_text("utf-8"))]
        else:
            found.append(page)
    return found


def _render_block(asked: str, store: Store, notes: Notes, cells: Cells) -> str:
    """Return the new text of a block, with its two marks."""
    if asked.split()[0] == "summary":
        chosen = _parse_parts(asked, ("rules",)).get("rules")
        lines = render_summary([cell for cell in cells(SUMMARY_SUITE) if chosen is None or cell.job.rule in chosen])
    elif asked.startswith("rule "):
        lines = render_rule_table(asked.removeprefix("rule ").strip(), cells)
    else:
        lines = _render_suite(asked, store, notes)
    return "\n".join([f"<!-- results: {asked} -->", "", *lines, "", "<!-- /results -->"])


def _parse_parts(asked: str, known: Sequence[str]) -> dict[str, list[str] | None]:
    """Return the names that a block asks for, by part: `depth rules=dll,bp` asks for the rules dll and bp."""
    words = (word.partition("=") for word in asked.split()[1:])
    chosen = {part: parse_names([names]) for part, _, names in words}
    for part in chosen:
        if part not in known:
            works = ", ".join(f"{name}=" for name in known)
            raise ApicalError(f"the block {asked!r} asks for {part!r}; {works} work.")
    return chosen


def _render_suite(asked: str, store: Store, notes: Notes) -> list[str]:
    """Render the tables of a suite, or of a part of it, as lines of Markdown."""
    chosen = _parse_parts(asked, PARTS)
    suite, other = suites.load(asked.split()[0]), chosen.pop("against", None)
    if other is not None:
        list_jobs(suite, Request(rules=other))  # which says so where the suite has no such rule
        if rules := chosen.get("rules"):
            chosen["rules"] = [*rules, other[0]]
    found = read_cells(suite, store, notes, Request(**chosen))  # type: ignore[arg-type]  # names alone
    if other is not None:
        return format_markdown_rows(_compare_rules(found, other[0]))
    lines: list[str] = []
    for table in use_page_wording(build_tables(suite, found)):
        lines += [*([""] if lines else []), f"*{table.title}*", "", *format_markdown_rows(table)]
    return lines


def _compare_rules(found: list[Cell], other: str) -> Table:
    """Make a table of the differences to another rule, one row for each cell that both rules have."""
    varied = list(dict.fromkeys(name for cell in found for name in cell.job.varied))
    rows = []
    for cell in found:
        theirs = find_counterpart(cell, found, other)
        if theirs is None:
            continue
        for metric in cell.metrics:
            ours, base, digits = cell.scores(metric), theirs.scores(metric), METRICS[metric].digits
            over = cell.compare_with(theirs, metric)
            means = [
                f"{statistics.fmean(s.values()):.{digits}f}" if s else PAGE_WORDING["not run"] for s in (ours, base)
            ]
            settings = [f"{cell.job.varied.get(name, '')}" for name in varied]
            where = [f"`{cell.job.rule}`", cell.job.model, cell.job.data, *settings, METRICS[metric].heading]
            rows.append([*where, *means, "–" if over is None else over.text(digits)])
    headings = ["rule", "network", "data", *varied, "measure", "its own", f"`{other}`", "better by"]
    return Table("", headings, rows)
