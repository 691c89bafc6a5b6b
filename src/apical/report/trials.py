"""Every tuning trial that was kept, best first."""

import json
from pathlib import Path
from typing import Any

from apical.errors import ApicalError

INTRODUCTION = """## Trials

How settings were chosen: every trial of `apical tune` and of the searches before it, on a held-out tenth of the training
data, best first. ± is over the trial's seeds. The test set was not looked at.
"""


def section(folder: Path) -> list[str]:
    """The trials below a folder, as lines of Markdown; nothing where there are none."""
    paths = sorted(folder.rglob("*.jsonl"))
    text = [INTRODUCTION] if paths else []
    for path in paths:
        try:
            text += _table(path)
        except (OSError, ValueError, KeyError, IndexError, TypeError) as error:
            raise ApicalError(f"{path} is not a file of trials that can be read ({error}).") from error
    return text


def _table(path: Path) -> list[str]:
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
