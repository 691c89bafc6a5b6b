"""A Markdown page from results: what each rule reached, beside the control and the paper, and how it got there.

The same results always give the same page, so that a page in the repository can be checked against its results.
"""

import json
import statistics
from collections.abc import Iterable
from itertools import groupby
from pathlib import Path
from typing import Any

from apical.bench.compare import paired, spread
from apical.bench.paper import ACCURACY
from apical.bench.results import Result, safe
from apical.errors import ApicalError
from apical.files import atomic
from apical.learner import rule_names
from apical.report.figure import learning_curves
from apical.report.groups import PROTOCOLS

INTRODUCTION = """# Results

Made from the files in `{folder}` by `apical report {folder} --out {page}`; do not edit by hand.

Accuracy is in percent, mean ± standard deviation over seeds, on the test set at the last epoch (protocol
`clean`: no epoch is chosen on the test set). Rules share the recorded settings of a network and data set; a row
with other epochs or another rate had them chosen on a validation split, in the trials at the end of this page,
and every such row that was run is shown. *Over readout* is the paired difference to the control
whose hidden layers stay random, ± its standard error: a rule counts as training hidden layers where it exceeds
two of them. *Paper* is the figure that Lv et al. (2025) print, and the difference of ours to it. *Θ·W* is the
cosine between feedback and forward weights, *update·bp* the one between a layer's update and backpropagation's,
both after the last epoch and averaged over layers (Θ·W: those with feedback weights of W's shape; update·bp: the
hidden ones).
"""

TRIALS = """## Trials

How settings were chosen: every trial of `apical tune` and of the searches before it, on a held-out tenth of the training
data, best first. ± is over the trial's seeds. The test set was not looked at.
"""

HEADINGS = (
    "rule",
    "epochs",
    "lr",
    "accuracy",
    "over readout",
    "paper",
    "s/epoch, all seeds",
    "Θ·W",
    "update·bp",
)


def write(found: list[Result], folder: Path, page: Path) -> None:
    """The page and, in `figures` beside it, one figure for each network and data set."""
    text = [INTRODUCTION.format(folder=folder.as_posix(), page=page.as_posix())]
    figures: dict[Path, list[Result]] = {}
    for (data, model), group in groupby(sorted(found, key=_order), key=lambda r: (r.key[2], r.key[1])):
        rows = list(group)
        figure = page.parent / "figures" / f"{safe(data)}-{safe(model)}.svg"
        figures[figure] = rows
        text += [
            f"## {data}, {model}\n",
            *_table(rows),
            "",
            f"![Accuracy and alignment over training, {data} {model}](figures/{figure.name})\n",
            *_provenance(rows),
        ]
    text += _trials(folder)
    for path, rows in figures.items():
        learning_curves(rows, path)
    with atomic(page) as temporary:
        temporary.write_text("\n".join(text), "utf-8")


def _order(result: Result) -> tuple[str, str, int, int, float]:
    rule, model, data = result.key
    names = rule_names()
    place = names.index(rule) if rule in names else len(names)
    return data, model, place, result.settings["epochs"], -result.settings["lr"]


def _table(rows: list[Result]) -> list[str]:
    control = next((row.by_seed() for row in rows if row.key[0] == "readout"), {})
    lines = ["| " + " | ".join(HEADINGS) + " |", "|" + "---|" * len(HEADINGS)]
    for row in rows:
        rule = row.key[0]
        cells = (
            f"`{rule}`",
            str(row.settings["epochs"]),
            f"{row.settings['lr']:g}",
            _reached(row)
            + (f" ({caveat})" if (caveat := PROTOCOLS[row.settings["protocol"]]) else "")
            + (" (bf16)" if row.settings.get("precision") == "bf16" else ""),
            "control" if rule == "readout" else _over(row, control),
            _paper(row),
            f"{row.seconds_per_epoch:.2f}",
            _mean(_last(row, "feedback")),
            _mean(cosines[:-1] for cosines in _last(row, "update")),
        )
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def _reached(row: Result) -> str:
    """The accuracy; of series the errors, with the task that they are errors of."""
    if row.classifies:
        return f"{statistics.fmean(row.accuracies):.2f} ± {spread(row.accuracies):.2f}"
    last = {entry["seed"]: entry for entry in row.history}.values()
    errors = ", ".join(
        f"{name[5:].upper()} {statistics.fmean(entry[name] for entry in last):.4f}"
        for name in ("test_mse", "test_mae")
        if all(name in entry for entry in last)
    )
    return f"{row.settings.get('data_options', {}).get('task', '')} {errors}".strip()


def _over(row: Result, control: dict[int, float]) -> str:
    difference = paired(row.by_seed(), control)
    if difference is None:
        return "–"
    return f"{difference}; {difference.mark}" if difference.mark else str(difference)


def _paper(row: Result) -> str:
    figure = ACCURACY.get(row.key)
    if figure is None:
        return "–"
    error = "" if figure.error is None else f" ± {figure.error:.2f}"
    return f"{figure.accuracy:.2f}{error} ({statistics.fmean(row.accuracies) - figure.accuracy:+.2f})"


def _last(row: Result, kind: str) -> list[list[float | None]]:
    """Each seed's cosines after its last epoch; nothing where none were recorded."""
    ends = {entry["seed"]: entry for entry in row.history if "alignment" in entry}
    return [entry["alignment"][kind] for entry in ends.values()]


def _mean(cosines: Iterable[list[float | None]]) -> str:
    values = [value for one in cosines for value in one if value is not None]
    return f"{statistics.fmean(values):.2f}" if values else "–"


def _provenance(rows: list[Result]) -> list[str]:
    """Where and how: one line per machine and version, one command per row."""
    places = sorted({f"{r.device}; " + ", ".join(f"{k} {v}" for k, v in r.versions.items()) for r in rows})
    commands = [row.command for row in rows]
    return [
        f"Run on {'; '.join(places)}.",
        "",
        "<details><summary>Commands</summary>\n",
        "```",
        *commands,
        "```",
        "",
        "</details>\n",
    ]


def _trials(folder: Path) -> list[str]:
    """Every tuning trial that was kept, best first."""
    paths = sorted(folder.rglob("*.jsonl"))
    text = [TRIALS] if paths else []
    for path in paths:
        try:
            text += _trial_table(path)
        except (OSError, ValueError, KeyError, IndexError, TypeError) as error:
            raise ApicalError(f"{path} is not a file of trials that can be read ({error}).") from error
    return text


def _trial_table(path: Path) -> list[str]:
    trials: list[dict[str, Any]] = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
    best = sorted(trials, key=_score, reverse=True)
    places = sorted({f"{trial['device']}, torch {trial['torch']}" for trial in trials})
    return [
        f"<details><summary>{path.stem}: best {_said(best[0])} of {len(trials)} trials</summary>\n",
        f"On {'; '.join(places)}.\n",
        "| accuracy on the split | command |",
        "|---|---|",
        *(f"| {_said(trial)} | `{trial['command']}` |" for trial in best),
        "\n</details>\n",
    ]


def _score(trial: dict[str, Any]) -> float:
    return -1.0 if trial["accuracy"] is None else float(trial["accuracy"])


def _said(trial: dict[str, Any]) -> str:
    return "diverged" if trial["accuracy"] is None else f"{trial['accuracy']:.2f} ± {trial['std']:.2f}"
