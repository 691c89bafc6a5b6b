"""Why a result is what it is, written by hand in `diagnoses.toml` beside the results; and whether that is complete.

[goals]         accuracies in percent that we set ourselves, by "RULE/MODEL/DATA"
[absent]        data sets that could not be had, and why
[diagnoses]     by "SUITE/RULE/MODEL/DATA": what was tried, and why it falls short
"""

import statistics
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from apical.bench.compare import below
from apical.bench.tables import METRICS, RISING, Cell
from apical.errors import ApicalError
from apical.report.groups import CONTROL

FILE = "diagnoses.toml"
NEEDED = "table1"
"""The suite whose every shortfall must be explained."""


@dataclass(frozen=True)
class Notes:
    """What was written by hand."""

    goals: dict[str, float] = field(default_factory=dict)
    absent: dict[str, str] = field(default_factory=dict)
    diagnoses: dict[str, str] = field(default_factory=dict)


def load(folder: Path) -> Notes:
    """The notes beside the results; none where there is no such file."""
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


def key(suite: str, cell: Cell) -> str:
    """How a cell is called in the file."""
    return f"{suite}/{place(cell)}"


def place(cell: Cell) -> str:
    return f"{cell.job.rule}/{cell.job.model}/{cell.job.data}"


def counterpart(cell: Cell, found: Iterable[Cell], rule: str = CONTROL) -> Cell | None:
    """What another rule, the control unless named, did on the same network and data with the same settings.

    A setting that the other does not vary, such as the rate of a Θ that stays as it is, is no difference.
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


def judged(cell: Cell) -> bool:
    """Whether every seed has ended: before that a cell is not judged."""
    return len(cell.rows) == len(cell.job.seeds) and all(row.status != "running" for row in cell.rows)


def shortfalls(cell: Cell, control: Cell | None, goals: Mapping[str, float]) -> list[str]:
    """What a cell does not reach, in words: the paper's figure, the control, our own goal."""
    if not judged(cell):
        return []
    if not cell.histories:
        return ["failed in every run"]
    return [what for metric in cell.metrics for what in _short(cell, control, goals, metric)]


def _short(cell: Cell, control: Cell | None, goals: Mapping[str, float], metric: str) -> Iterator[str]:
    scores, digits, rising = cell.scores(metric), METRICS[metric].digits, metric in RISING
    sign, word = (1, "below") if rising else (-1, "above")
    values = [sign * value for value in scores.values()]
    theirs, goal = cell.figure(metric), goals.get(place(cell)) if metric == "accuracy" else None
    if theirs is not None and below(values, sign * theirs.accuracy):
        gap = sign * theirs.accuracy - statistics.fmean(values)
        yield f"{gap:.{digits}f} {word} the paper's {theirs.accuracy:.{digits}f}"
    if goal is not None and statistics.fmean(values) < goal:
        yield f"{goal - statistics.fmean(values):.2f} below our own goal of {goal:g}"
    over = cell.over(control, metric)
    if over is not None and not over.learns:
        yield f"not better than `{CONTROL}` by two standard errors ({over.text(digits)})"


def problems(notes: Notes, found: Mapping[str, list[Cell]]) -> list[str]:
    """What the notes lack or have no reason for, given the cells of every suite; one sentence each."""
    named = [(key(suite, cell), cell, cells) for suite, cells in found.items() for cell in cells]
    short = {
        name: what
        for name, cell, cells in named
        if (what := shortfalls(cell, counterpart(cell, cells), notes.goals))
    }
    known = {name for name, _, _ in named}
    settled = {name for name, cell, _ in named if judged(cell)}
    places = {place(cell) for _, cell, _ in named}
    finished = {cell.job.data for _, cell, _ in named if cell.histories}
    said = [
        f"{name} has no diagnosis: it is {' and '.join(what)}."
        for name, what in short.items()
        if name.startswith(f"{NEEDED}/") and name not in notes.diagnoses
    ]
    said += [f"{name} is a cell of no suite." for name in notes.diagnoses if name not in known]
    said += [
        f"{name} has a diagnosis but falls short of nothing: delete it."
        for name in notes.diagnoses
        if name in settled and name not in short
    ]
    said += [f"{data} is called absent but has results." for data in notes.absent if data in finished]
    return said + [f"the goal {name} is of no cell." for name in notes.goals if name not in places]
