"""Fill tables into handwritten pages: between two marks, a page asks for a table, which is made from the results.

<!-- results: depth rules=dll,bp -->      a suite, or a part of it: rules, models, data
<!-- results: table1 against=bp -->       the difference of each rule to that one, seed by seed
<!-- results: summary rules=dll,bp -->    one line for each rule, or for these, for a README
<!-- results: rule np -->                 what a rule and its variants reached, and with which settings
<!-- results: finding -->                 three sentences on what came out
<!-- results: choices -->                 which rule to use for what
<!-- results: budget data=mnist -->       the number of trials of every rule, on these data sets or on all
<!-- results: equal-budget data=cifar10 count=3 --> the expected best of three trials of every rule
<!-- /results -->                         everything in between is replaced
"""

import re
import statistics
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

from apical.bench import suites
from apical.bench.cells import HIGHER_IS_BETTER, METRICS, Cell, Table
from apical.bench.declaration import Request, parse_names
from apical.bench.export import format_markdown_rows
from apical.bench.store import Store
from apical.bench.suites import list_jobs
from apical.bench.tables import build_tables
from apical.errors import ApicalError
from tools.pages.findings import render_choices, render_finding
from tools.pages.notes import Notes, find_counterpart, load_notes
from tools.pages.rule_tables import SUMMARY_SUITE, render_rule_table, render_summary
from tools.pages.section import PAGE_WORDING, Cells, read_cells, use_page_wording
from tools.pages.significance import correct_with_holm, estimate, format_p, name_difference, subtract
from tools.pages.trials import Trials, load_trials, render_budget, render_expected_best

BLOCK = re.compile(r"^<!-- results: (.*?) -->\n.*?^<!-- /results -->$", re.MULTILINE | re.DOTALL)
PARTS = ("rules", "models", "data", "against")


class Results(NamedTuple):
    """All results of a folder: its store, the handwritten notes, the trials, and a function that reads a suite's cells."""

    store: Store
    notes: Notes
    trials: Trials
    cells: Cells


def load_results(store: Store, source: Path) -> Results:
    """Load the results of a store that was read from the folder `source`."""
    notes = load_notes(source)
    return Results(store, notes, load_trials(source), cache(lambda suite: read_cells(suites.load(suite), store, notes)))


def fill_pages(results: Results, pages: Iterable[Path]) -> dict[Path, str]:
    """Return the new text of these pages, with all blocks filled in."""
    texts = {}
    for page in pages:
        try:
            before = page.read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ApicalError(f"the page {page} cannot be read ({error}).") from error
        texts[page], count = BLOCK.subn(lambda found: _render_block(found[1], results), before)
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


def _render_block(asked: str, results: Results) -> str:
    """Return the new text of a block, with its two marks."""
    return "\n".join([f"<!-- results: {asked} -->", "", *render_lines(asked, results), "", "<!-- /results -->"])


def render_lines(asked: str, results: Results) -> list[str]:
    """Return what a block asks for, as lines of Markdown."""
    kind, cells = asked.split()[0], results.cells
    if kind == "summary":
        chosen = _parse_parts(asked, ("rules",)).get("rules")
        return render_summary([cell for cell in cells(SUMMARY_SUITE) if chosen is None or cell.job.rule in chosen])
    if kind == "budget":
        return render_budget(results.trials, _parse_parts(asked, ("data",)).get("data") or ())
    if kind == "equal-budget":
        return _render_equal_budget(asked, results.trials)
    if asked in ("finding", "choices"):
        return render_finding(cells) if asked == "finding" else render_choices(cells)
    if kind == "rule":
        return render_rule_table(asked.removeprefix("rule ").strip(), cells)
    return _render_suite(asked, cells)


def _render_equal_budget(asked: str, trials: Trials) -> list[str]:
    """Render the expected best of a number of trials of every rule on one data set, as lines of Markdown."""
    chosen = _parse_parts(asked, ("data", "count"))
    data, count = chosen.get("data") or [], chosen.get("count") or []
    if len(data) != 1 or len(count) != 1 or not count[0].isdecimal() or count[0] == "0":
        raise ApicalError(f"the block {asked!r} must name one data set and a number of trials: data=cifar10 count=3.")
    return render_expected_best(trials, data[0], int(count[0]))


def _parse_parts(asked: str, known: Sequence[str]) -> dict[str, list[str] | None]:
    """Return the names that a block asks for, by part: `depth rules=dll,bp` asks for the rules dll and bp."""
    words = (word.partition("=") for word in asked.split()[1:])
    chosen = {part: parse_names([names]) for part, _, names in words}
    for part in chosen:
        if part not in known:
            works = ", ".join(f"{name}=" for name in known)
            raise ApicalError(f"the block {asked!r} asks for {part!r}; {works} work.")
    return chosen


def _render_suite(asked: str, cells: Cells) -> list[str]:
    """Render the tables of a suite, or of a part of it, as lines of Markdown."""
    chosen = _parse_parts(asked, PARTS)
    suite, other = suites.load(asked.split()[0]), chosen.pop("against", None)
    if other is not None:
        list_jobs(suite, Request(rules=other))  # which says so where the suite has no such rule
        if rules := chosen.get("rules"):
            chosen["rules"] = [*rules, other[0]]
    jobs = list_jobs(suite, Request(**chosen))  # type: ignore[arg-type]  # names alone
    places = {(job.rule, job.model, job.data) for job in jobs}
    found = [cell for cell in cells(suite.name) if (cell.job.rule, cell.job.model, cell.job.data) in places]
    if other is not None:
        return format_markdown_rows(_compare_rules(found, other[0]))
    lines: list[str] = []
    for table in use_page_wording(build_tables(suite, found)):
        lines += [*([""] if lines else []), f"*{table.title}*", "", *format_markdown_rows(table)]
    return lines


def _compare_rules(found: list[Cell], other: str) -> Table:
    """Make a table of the differences to another rule, one row for each cell that both rules have.

    The p of all rows are corrected together.
    """
    varied = list(dict.fromkeys(name for cell in found for name in cell.job.varied))
    rows, gains = [], []
    for cell in found:
        theirs = find_counterpart(cell, found, other)
        if theirs is None:
            continue
        for metric in cell.metrics:
            ours, base, digits = cell.scores(metric), theirs.scores(metric), METRICS[metric].digits
            sign = 1 if metric in HIGHER_IS_BETTER else -1
            gains.append(estimate([sign * gain for gain in subtract(ours, base).values()], digits))
            means = [
                f"{statistics.fmean(s.values()):.{digits}f}" if s else PAGE_WORDING["not run"] for s in (ours, base)
            ]
            settings = [f"{cell.job.varied.get(name, '')}" for name in varied]
            where = [f"`{cell.job.rule}`", cell.job.model, cell.job.data, *settings, METRICS[metric].heading]
            rows.append([*where, *means, gains[-1].signed if gains[-1].known else "–"])
    for row, gain, p in zip(rows, gains, correct_with_holm([gain.p for gain in gains]), strict=True):
        row += [format_p(p), name_difference(gain, p)]
    headings = ["rule", "network", "data", *varied, "measure", "its own", f"`{other}`", "better by", "p", ""]
    return Table("", headings, rows)
