"""Read `results/diagnoses.toml`, handwritten explanations of results that fall short, and check that it is complete.

[goals]         accuracies in percent that we set ourselves, by "RULE/MODEL/DATA"
[absent]        data sets that could not be had, and why
[diagnoses]     by "SUITE/RULE/MODEL/DATA": what was tried, why it falls short, and the experiment that settles it

Diagnoses are templates: `tools.pages.templates` fills in their numbers, and `find_typed_numbers` finds the others.
"""

import re
import statistics
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from apical.bench.cells import HIGHER_IS_BETTER, METRICS, Cell, is_below
from apical.errors import ApicalError
from apical.report.groups import CONTROL

FILE = "diagnoses.toml"
EXPLAINED_SUITE = "table1"
"""The suite in which every shortfall must be explained."""

EXPRESSION = re.compile(r"\{\{.*?\}\}|\{%.*?%\}|\{#.*?#\}", re.DOTALL)
CONSTANT = re.compile(r"""\{\{\s*["']?([\d.,]+)[\s%]*["']?\s*\}\}""")
"""An expression that is a number itself."""
SETTING = re.compile(r"`(\w+)=([\d.e-]+)`")
"""A setting in a diagnosis, such as `lr=0.001`."""
TYPED_NUMBER = re.compile(
    r"[\d.,]*\d|\b(?:one|two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|\w+teen|twenty|thirty|half a|half of a"
    r"|tenths? of a|hundredths? of a)\s+(?:percent|points?|tenths?|hundredths?|trials?)\b",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Notes:
    """The content of `diagnoses.toml`."""

    goals: dict[str, float] = field(default_factory=dict)
    absent: dict[str, str] = field(default_factory=dict)
    diagnoses: dict[str, str] = field(default_factory=dict)


def load_notes(folder: Path) -> Notes:
    """Load the notes of a folder of results; without a file, there are none."""
    path = folder / FILE
    if not path.is_file():
        return Notes()
    try:
        notes = Notes(**tomllib.loads(path.read_text("utf-8")))
        goals = {name: float(goal) for name, goal in notes.goals.items()}
        texts = [*notes.absent.values(), *notes.diagnoses.values()]
        if not all(isinstance(text, str) and text.strip() for text in texts):
            raise ValueError("a reason or a diagnosis is not a text")
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise ApicalError(
            f"{path} cannot be read ({error}); it has the tables [goals], [absent] and [diagnoses]."
        ) from error
    return Notes(goals, notes.absent, notes.diagnoses)


def find_typed_numbers(template: str) -> list[str]:
    """Return the numbers in a template that no expression fills in, but for settings and names with a number.

    >>> find_typed_numbers("{{ score(*here) }} on CIFAR-10 with `lr=0.001`, 98.5 before: two points")
    ['98.5', 'two points']
    """
    text = SETTING.sub("", EXPRESSION.sub("", CONSTANT.sub(r"\1", template)))
    return TYPED_NUMBER.findall(re.sub(r"\b[A-Za-z]+-\d+\b", "", text))


def make_key(suite: str, cell: Cell) -> str:
    """Return the key of a cell in the file: "SUITE/RULE/MODEL/DATA"."""
    return f"{suite}/{make_place_key(cell)}"


def make_place_key(cell: Cell) -> str:
    return f"{cell.job.rule}/{cell.job.model}/{cell.job.data}"


def find_counterpart(cell: Cell, found: Iterable[Cell], rule: str = CONTROL) -> Cell | None:
    """Find the cell of another rule (by default the control) with the same network, data and settings.

    Settings that the other rule does not vary are ignored, such as the rate of feedback weights Θ that stay fixed.
    """
    where = cell.job.model, cell.job.data
    return next(
        (
            other
            for other in found
            if other.job.rule == rule != cell.job.rule
            and (other.job.model, other.job.data) == where
            and other.job.varied.items() <= cell.job.varied.items()
        ),
        None,
    )


def is_complete(cell: Cell) -> bool:
    """Return whether all seeds of a cell have ended. Only then is it compared with goals."""
    return len(cell.rows) == len(cell.job.seeds) and all(row.status != "running" for row in cell.rows)


def find_shortfalls(cell: Cell, control: Cell | None, goals: Mapping[str, float]) -> list[str]:
    """Return in words what a cell does not reach: the paper's figure, the control, our own goal."""
    if not is_complete(cell):
        return []
    if not cell.histories:
        return ["failed in every run"]
    return [what for metric in cell.metrics for what in _describe_shortfalls(cell, control, goals, metric)]


def _describe_shortfalls(cell: Cell, control: Cell | None, goals: Mapping[str, float], metric: str) -> Iterator[str]:
    """Yield what a complete cell does not reach in one metric."""
    scores, digits, higher_is_better = cell.scores(metric), METRICS[metric].digits, metric in HIGHER_IS_BETTER
    sign, word = (1, "below") if higher_is_better else (-1, "above")
    values = [sign * value for value in scores.values()]
    theirs, goal = cell.find_figure(metric), goals.get(make_place_key(cell)) if metric == "accuracy" else None
    if theirs is not None and is_below(values, sign * theirs.accuracy):
        gap = sign * theirs.accuracy - statistics.fmean(values)
        yield f"{gap:.{digits}f} {word} the paper's {theirs.accuracy:.{digits}f}"
    if goal is not None and statistics.fmean(values) < goal:
        yield f"{goal - statistics.fmean(values):.2f} below our own goal of {goal:g}"
    over = cell.compare_with(control, metric)
    if over is not None and not over.learns:
        yield f"not better than `{CONTROL}` by two standard errors ({over.text(digits)})"


def find_problems(notes: Notes, found: Mapping[str, list[Cell]]) -> list[str]:
    """Return what is missing or superfluous in the notes, one sentence each, given the cells of every suite."""
    named = [(make_key(suite, cell), cell, cells) for suite, cells in found.items() for cell in cells]
    short = {
        name: what
        for name, cell, cells in named
        if (what := find_shortfalls(cell, find_counterpart(cell, cells), notes.goals))
    }
    known = {name for name, _, _ in named}
    settled = {name for name, cell, _ in named if is_complete(cell)}
    places = {make_place_key(cell) for _, cell, _ in named}
    finished = {cell.job.data for _, cell, _ in named if cell.histories}
    said = [
        f"{name} has no diagnosis: it is {' and '.join(what)}."
        for name, what in short.items()
        if name.startswith(f"{EXPLAINED_SUITE}/") and name not in notes.diagnoses
    ]
    said += [f"{name} is a cell of no suite." for name in notes.diagnoses if name not in known]
    said += [
        f"{name} has a diagnosis but falls short of nothing: delete it."
        for name in notes.diagnoses
        if name in settled and name not in short
    ]
    said += [f"{data} is called absent but has results." for data in notes.absent if data in finished]
    return said + [f"the goal {name} is of no cell." for name in notes.goals if name not in places]
