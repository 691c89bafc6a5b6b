"""Render all recorded tuning trials, best first."""

import json
from pathlib import Path
from typing import Any

from apical.bench.tune import format_score, sort_best_first
from apical.errors import ApicalError

INTRODUCTION = """## Trials

How settings were chosen: every trial of `apical tune` and of the searches before it, on a held-out tenth of the training
data, best first. ± is over the trial's seeds. The test set was not looked at.
"""


def render_trials(folder: Path) -> list[str]:
    """Render the trials of a folder as lines of Markdown; no lines if there are none."""
    paths = sorted(folder.rglob("*.jsonl"))
    text = [INTRODUCTION] if paths else []
    for path in paths:
        try:
            text += _render_table(path)
        except (OSError, ValueError, KeyError, IndexError, TypeError) as error:
            raise ApicalError(f"{path} is not a file of trials that can be read ({error}).") from error
    return text


def _render_table(path: Path) -> list[str]:
    trials: list[dict[str, Any]] = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
    best = sort_best_first(trials)
    places = sorted({f"{trial['device']}, torch {trial['torch']}" for trial in trials})
    return [
        f"<details><summary>{path.stem}: best {format_score(best[0])} of {len(trials)} trials</summary>\n",
        f"On {'; '.join(places)}.\n",
        "| on the split | command |",
        "|---|---|",
        *(f"| {format_score(trial)} | `{trial['command']}` |" for trial in best),
        "\n</details>\n",
    ]
