"""A Markdown page from results: the paper's experiments with our numbers beside its own, other runs, and the trials.

The same results always give the same page, so that a page in the repository can be checked against its results.
"""

from dataclasses import replace
from pathlib import Path

from apical.bench import suites
from apical.bench.results import safe
from apical.bench.store import Store
from apical.bench.tables import NOTE, Cell, listing
from apical.errors import ApicalError
from apical.files import atomic
from apical.report import diagnoses, figure, trials
from apical.report.charts import sections
from apical.report.groups import CONTROL, Group, collect, headlines
from apical.report.suite import PAPER, WORDS, Section, provenance, read, section, shown, undated, worded

INTRODUCTION = """# Results

Made from `{source}` by `apical report {source} --out {page}`; do not edit by hand.

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


def write(store: Store, source: Path, page: Path) -> None:
    """The page of a store that was read from `source`, and its figures, in `figures` beside it."""
    notes = diagnoses.load(source)
    found = {name: read(suites.load(name), store, notes) for name in PAPER}
    groups = [group for group in collect(store) if group.settings.get("examples") is None]
    if not any(group.scores for group in groups):
        raise ApicalError(f"{source} has no finished run with a score yet (quick runs are none).")
    begun = {name: cells for name, cells in found.items() if _begun(cells)}
    made = [section(suites.load(name), cells, notes) for name, cells in begun.items()]
    if begun:
        made.append(_missing({name: cells for name, cells in found.items() if name not in begun}))
    made += _others(groups)
    text = [
        INTRODUCTION.format(source=source.as_posix(), page=page.as_posix(), note=NOTE),
        *(line for one in made for line in one.lines),
        *trials.section(source),
    ]
    for name, drawings in (item for one in made for item in one.figures.items()):
        figure.panels(drawings, page.parent / "figures" / name)
    with atomic(page) as temporary:
        temporary.write_text("\n".join(text), "utf-8")


def _begun(cells: list[Cell]) -> bool:
    return any(row.status != "running" for cell in cells for row in cell.rows)


def _missing(found: dict[str, list[Cell]]) -> Section:
    """The experiments of which nothing has been run, and why where that is known."""
    lines = ["## Not run\n"] if found else []
    for name, cells in found.items():
        absent = {cell.job.data: cell.job.problem for cell in cells}
        listed = "; ".join(f"{data}, {why}" for data, why in absent.items())
        why = f"{WORDS['no data']} ({listed})." if all(absent.values()) else f"{WORDS['not run']}."
        lines.append(f"- {suites.load(name).title} (`apical bench {name}`): {why}")
    return Section([*lines, ""] if lines else [])


def _others(groups: list[Group]) -> list[Section]:
    """Finished runs that belong to none of the experiments, by network and data set."""
    found: dict[tuple[str, str], list[Group]] = {}
    for group in groups:
        if group.scores and not set(group.suites) & set(PAPER):
            found.setdefault((group.place[2], group.place[1]), []).append(group)
    made = [Section([OTHERS])] if found else []
    return made + [_other(data, model, here, groups) for (data, model), here in sorted(found.items())]


def _other(data: str, model: str, here: list[Group], groups: list[Group]) -> Section:
    """One table for each way of judging, under the control that was judged so, and one figure of what is compared."""
    lines = []
    for terms in dict.fromkeys(group.terms for group in here):
        alike = [group for group in groups if group.place[1:] == (model, data) and group.terms == terms]
        controls = [group for group in alike if group.place[0] == CONTROL and group.scores]
        control = [*headlines(controls).values()]
        told = control + [group for group in here if group.terms == terms and group not in control]
        cells = [
            replace(undated(group.cell), remark=f" ({said})" if (said := group.caveat) else "")
            for group in told
        ]
        lines += [
            line
            for table in worded([listing(f"{data}, {model}", cells, ("alignment",))])
            for line in shown(table)
        ]
    name = f"{safe(data)}-{safe(model)}.svg"
    drawings = [
        drawing
        for one in sections(here)
        for drawing in one.drawings
        if drawing.kind in ("curves", "feedback", "sweep", "heat")
    ]
    lines.append(f"![Over training and over settings, {data} {model}](figures/{name})\n")
    return Section(
        [*lines, *provenance([row for group in here for row in group.cell.rows])], {name: drawings}
    )
