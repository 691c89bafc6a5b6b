"""Render docs/results.md: the paper's experiments with our numbers beside its own, other runs, and tuning trials.

The same results always give the same page, so that the page in the repository can be checked against its results.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from apical.bench import suites
from apical.bench.cells import Cell
from apical.bench.declaration import make_safe_name
from apical.bench.defaults import format_score, sort_best_first
from apical.bench.store import Store
from apical.bench.tables import NOTE, build_listing
from apical.errors import ApicalError
from apical.printing import escape_markdown, quote_code
from apical.report.charts import make_chart_sections
from apical.report.groups import CONTROL, Group, choose_headlines, collect
from tools.pages.notes import load_notes
from tools.pages.section import (
    PAGE_WORDING,
    PAPER,
    Section,
    clear_old_mark,
    describe_provenance,
    make_suite_section,
    read_cells,
    render_table,
    use_page_wording,
)

INTRODUCTION = """# Results

Made from `results` by `python -m tools.pages`; do not edit by hand.

The paper is Lv et al. 2025 (arXiv 2501.09976). Accuracy is in percent, on the test set at the last epoch (protocol
`clean`: no epoch is chosen on the test set) unless something else stands beside the number. {note}
*Over readout* is the paired difference to the control whose hidden layers stay random, ± its standard error.
*Difference* is ours less the paper's. *s/epoch* is the time of one epoch of all seeds that trained together. *Peak memory*
is the whole run's, with its data and its evaluation, whose batches are larger than most in training. *Θ·W* is the cosine
between feedback and forward weights, *update·bp* the one between the hidden layers' updates and backpropagation's, both
after the last epoch and averaged over layers.

The command of an experiment repeats all of it; below its tables there is a command for each cell. On another kind of device
a seed has the same weights and shuffles, but other noise: rules that draw some come as close as another seed does.
"""
OTHERS = """## Other results

What no experiment of the paper asks for, such as other precisions and other settings than the recorded ones, beside a
control that was judged alike.
"""
TRIALS = """## Trials

How settings were chosen: every trial of `apical tune` and of the searches before it, on a held-out tenth of the training
data, best first. ± is over the trial's seeds. The test set was not looked at.
"""


def render_page(store: Store, source: Path) -> Section:
    """Render the page of a store that was read from the folder `source`, with the drawings of its figures."""
    notes = load_notes(source)
    found = {name: read_cells(suites.load(name), store, notes) for name in PAPER}
    groups = [group for group in collect(store) if group.settings.get("examples") is None]
    if not any(group.scores for group in groups):
        raise ApicalError(f"{source} has no finished run with a score yet (quick runs are none).")
    started = {name: cells for name, cells in found.items() if _has_started(cells)}
    sections = [make_suite_section(suites.load(name), cells, notes) for name, cells in started.items()]
    if started:
        sections.append(_make_missing_section({name: cells for name, cells in found.items() if name not in started}))
    sections += _make_other_sections(groups)
    return Section(
        [
            INTRODUCTION.format(note=NOTE),
            *(line for section in sections for line in section.lines),
            *_render_trials(source),
        ],
        {name: drawings for section in sections for name, drawings in section.figures.items()},
    )


def _has_started(cells: list[Cell]) -> bool:
    return any(row.status != "running" for cell in cells for row in cell.rows)


def _make_missing_section(found: dict[str, list[Cell]]) -> Section:
    """List the experiments without any run, with the reason if it is known."""
    lines = ["## Not run\n"] if found else []
    for name, cells in found.items():
        absent = {cell.job.data: cell.job.problem for cell in cells}
        listed = "; ".join(f"{data}, {why}" for data, why in absent.items())
        why = f"{PAGE_WORDING['no data']} ({listed})." if all(absent.values()) else f"{PAGE_WORDING['not run']}."
        lines.append(f"- {suites.load(name).title} (`apical bench {name}`): {why}")
    return Section([*lines, ""] if lines else [])


def _make_other_sections(groups: list[Group]) -> list[Section]:
    """Make sections of the finished runs that belong to no experiment, one for each network and data set."""
    found: dict[tuple[str, str], list[Group]] = {}
    for group in groups:
        if group.scores and not set(group.suites) & set(PAPER):
            found.setdefault((group.place.data, group.place[1]), []).append(group)
    heading = [Section([OTHERS])] if found else []
    return heading + [_make_other_section(data, model, here, groups) for (data, model), here in sorted(found.items())]


def _make_other_section(data: str, model: str, here: list[Group], groups: list[Group]) -> Section:
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
    lines.append(f"![Over training and over settings, {escape_markdown(f'{data} {model}')}](figures/{name})\n")
    return Section([*lines, *describe_provenance([row for group in here for row in group.cell.rows])], {name: drawings})


def _render_trials(folder: Path) -> list[str]:
    """Render all recorded tuning trials of a folder, best first; no lines if there are none."""
    paths = sorted(folder.rglob("*.jsonl"))
    lines = [TRIALS] if paths else []
    for path in paths:
        try:
            lines += _render_trial_table(path)
        except (OSError, ValueError, KeyError, IndexError, TypeError) as error:
            raise ApicalError(f"{path} is not a file of trials that can be read ({error}).") from error
    return lines


def _render_trial_table(path: Path) -> list[str]:
    trials: list[dict[str, Any]] = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
    best = sort_best_first(trials)
    places = sorted({f"{trial['device']}, torch {trial['torch']}" for trial in trials})
    return [
        f"<details><summary>{escape_markdown(path.stem)}: best {format_score(best[0])} of {len(trials)} trials</summary>\n",
        f"On {escape_markdown('; '.join(places))}.\n",
        "| on the split | command |",
        "|---|---|",
        *(f"| {format_score(trial)} | {quote_code(trial['command'])} |" for trial in best),
        "\n</details>\n",
    ]
