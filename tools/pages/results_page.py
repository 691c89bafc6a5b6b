"""Render docs/results.md and docs/results: a page for each experiment, other runs, commands, and tuning trials.

The same results always give the same pages, so that the pages in the repository can be checked against their results.
"""

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from apical.bench import suites
from apical.bench.cells import Cell, group_by
from apical.bench.declaration import make_safe_name
from apical.bench.tables import NOTE, build_listing
from apical.errors import ApicalError
from apical.printing import escape_markdown
from apical.report.charts import Drawing, make_chart_sections
from apical.report.figures import draw_panels
from apical.report.groups import CONTROL, Group, choose_headlines, collect
from tools.pages.blocks import Results
from tools.pages.notes import Notes
from tools.pages.overview_figures import Draw
from tools.pages.section import (
    MORE,
    PAGE_WORDING,
    PAPER,
    Section,
    clear_old_mark,
    describe_progress,
    make_suite_section,
    render_commands,
    render_table,
    use_page_wording,
)
from tools.pages.trials import render_trial_pages

INTRODUCTION = """# Results

Made from `results` by `python -m tools.pages`; do not edit by hand. [What was reproduced](reproduction.md) has the verdicts.

{contents}
{missing}
[The trials](results/trials.md) are how settings were chosen, with the number of trials of every rule.

## How to read the tables

The paper is Lv et al. 2025 (arXiv 2501.09976). Accuracy is in percent, on the test set at the last epoch (protocol
`clean`: no epoch is chosen on the test set) unless something else stands beside the number. {note}
*Over readout* is the paired difference to the control whose hidden layers stay random, ± its standard error.
*Difference* is ours less the paper's. *s/epoch* is the time of one epoch of all seeds that trained together. *Peak memory*
is the whole run's, with its data and its evaluation, whose batches are larger than most in training. *Θ·W* is the cosine
between feedback and forward weights, *update·bp* the one between the hidden layers' updates and backpropagation's, both
after the last epoch and averaged over layers.

The command of an experiment repeats all of it; each page links to one with a command for each cell. On another kind of
device a seed has the same weights and shuffles, but other noise: rules that draw some come as close as another seed does.
"""
OTHERS = """# Other results

What no experiment of the paper asks for, such as other precisions and other settings than the recorded ones, beside a
control that was judged alike. {more}
"""


@dataclass(frozen=True)
class ResultPages:
    """The text of each page by its path in docs, and a function that draws each figure by file name."""

    texts: dict[str, str]
    figures: dict[str, Draw]


def render_results(results: Results, source: Path) -> ResultPages:
    """Render all pages of results that were read from the folder `source`, with their figures."""
    found = {name: results.cells(name) for name in PAPER}
    groups = [group for group in collect(results.store) if group.settings.get("examples") is None]
    if not any(group.scores for group in groups):
        raise ApicalError(f"{source} has no finished run with a score yet (quick runs are none).")
    sections = _make_sections(found, groups, results.notes)
    titles = {name: section.lines[0].removeprefix("# ").partition("\n")[0] for name, section in sections.items()}
    texts = {
        "results.md": INTRODUCTION.format(
            note=NOTE, contents=_render_contents(titles, found), missing=_list_missing(found, sections)
        )
    }
    texts |= {f"results/{name}.md": section.text for name, section in sections.items()}
    texts |= {
        f"results/commands/{name}.md": render_commands(titles[name], section.rows) for name, section in sections.items()
    }
    figures: dict[str, Draw] = {
        name: partial(draw_panels, drawings)
        for section in sections.values()
        for name, drawings in section.figures.items()
    }
    return ResultPages(texts | render_trial_pages(results.trials), figures)


def _make_sections(found: dict[str, list[Cell]], groups: list[Group], notes: Notes) -> dict[str, Section]:
    """Make the pages of all suites that have been started, and of the other results."""
    sections = {
        name: make_suite_section(suites.load(name), cells, notes)
        for name, cells in found.items()
        if _has_started(cells)
    }
    others = [group for group in groups if group.scores and not set(group.suites) & set(PAPER)]
    return sections | ({"other": _make_other_page(others, groups)} if others else {})


def _render_contents(titles: dict[str, str], found: dict[str, list[Cell]]) -> str:
    lines = ["| experiment | command | runs |", "| --- | --- | --- |"]
    for name, title in titles.items():
        command, progress = (f"`apical bench {name}`", describe_progress(found[name])) if name in found else ("", "")
        lines.append(f"| [{title}](results/{name}.md) | {command} | {progress} |")
    return "\n".join([*lines, ""])


def _has_started(cells: list[Cell]) -> bool:
    return any(row.status != "running" for cell in cells for row in cell.rows)


def _list_missing(found: dict[str, list[Cell]], sections: dict[str, Section]) -> str:
    """List the experiments without any run, with the reason if it is known."""
    lines = []
    for name, cells in found.items():
        if name in sections:
            continue
        absent = {cell.job.data: cell.job.problem for cell in cells}
        listed = "; ".join(f"{data}, {why}" for data, why in absent.items())
        why = f"{PAGE_WORDING['no data']} ({listed})." if all(absent.values()) else f"{PAGE_WORDING['not run']}."
        lines.append(f"- {suites.load(name).title} (`apical bench {name}`): {why}")
    return "\n".join(["Not run:\n", *lines, ""]) if lines else ""


def _make_other_page(others: list[Group], groups: list[Group]) -> Section:
    """Make the page of the finished runs that belong to no experiment, with a part for each network and data set."""
    lines = [OTHERS.format(more=MORE.format(name="other"))]
    figures: dict[str, list[Drawing]] = {}
    for (data, model), here in sorted(group_by(others, lambda group: (group.place.data, group.place.model)).items()):
        part = _make_other_part(data, model, here, groups)
        lines += part.lines
        figures |= part.figures
    return Section(lines, figures, [row for group in others for row in group.cell.rows])


def _make_other_part(data: str, model: str, here: list[Group], groups: list[Group]) -> Section:
    """Make one table for each way of evaluation, with the control of that evaluation first, and one figure."""
    lines = []
    for evaluation_key in dict.fromkeys(group.evaluation_key for group in here):
        alike = [
            group for group in groups if group.place[1:] == (model, data) and group.evaluation_key == evaluation_key
        ]
        controls = [group for group in alike if group.place.rule == CONTROL and group.scores]
        control = [*choose_headlines(controls).values()]
        listed = control + [group for group in here if group.evaluation_key == evaluation_key and group not in control]
        cells = [
            replace(clear_old_mark(group.cell), remark=f" ({said})" if (said := group.caveat) else "")
            for group in listed
        ]
        lines += [
            line
            for table in use_page_wording([build_listing(f"{data}, {model}", cells, ("alignment",))])
            for line in render_table(table)
        ]
    name = f"{make_safe_name(data)}-{make_safe_name(model)}.svg"
    drawings = [
        drawing
        for one in make_chart_sections(here)
        for drawing in one.drawings
        if drawing.kind in ("curves", "feedback", "sweep", "heat")
    ]
    lines.append(f"![Over training and over settings, {escape_markdown(f'{data} {model}')}](../figures/{name})\n")
    return Section(lines, {name: drawings})
