"""Choose the best trial of each rule and print it as a table of `defaults.toml`.

    python tools/choose.py results/tuning mnist cifar10

prints the tables of these data sets. If a rule has full-length trials (`whole-DATA-MODEL-RULE.jsonl`), they decide.
Trials that differ only in an option of the data, such as the task of a time series, are averaged.
"""

import argparse
import json
import math
from pathlib import Path
from typing import Any

from apical import data as datasets
from apical.bench.defaults import WHOLE, Trial, compute_merit, read_trials
from apical.core.registry import options_of, resolve, rule_names


def choose_best_trial(rows: list[dict[str, Any]]) -> Trial | None:
    """Return the best of a rule's trials, the first of several equal ones; None if all diverged.

    >>> rows = [{"data": "etth1", "mse": e, "trial": {"lr": lr, "task": t}} for lr, t, e in
    ...     [(0.1, "paper", 4.0), (0.1, "forecast", 1.0), (0.2, "paper", 1.0), (0.2, "forecast", 3.0)]]
    >>> choose_best_trial(rows)
    {'lr': 0.2}
    """
    scores: dict[str, list[float]] = {}
    for row in rows:
        of_data = datasets.lookup(row["data"]).options
        trial = {name: value for name, value in row["trial"].items() if name not in of_data}
        scores.setdefault(json.dumps(trial), []).append(compute_merit(row))
    best = max(scores, key=lambda trial: sum(scores[trial]) / len(scores[trial]), default=None)
    if best is None or -math.inf in scores[best]:
        return None
    found: Trial = json.loads(best)
    return found


def load_trials(folder: Path, data: str) -> dict[tuple[str, str], list[dict[str, Any]]]:
    """Return the trials that decide, by network and rule, in the order of the rules."""
    found: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for path in (*sorted(folder.glob(f"{data}-*.jsonl")), *sorted(folder.glob(f"{WHOLE}-{data}-*.jsonl"))):
        own: dict[tuple[str, str], list[dict[str, Any]]] = {}
        for row in read_trials(path):
            if "trial" in row:
                own.setdefault((row["model"], row["rule"]), []).append(row)
        found |= own  # full-length trials come last and replace the short ones
    names = rule_names()
    return dict(sorted(found.items(), key=lambda item: (item[0][0], names.index(item[0][1]))))


def format_entry(data: str, model: str, rule: str, trial: Trial) -> str:
    """Return a trial as a table of `defaults.toml`.

    >>> print(format_entry("mnist", "mlp", "np", {"lr": 0.001, "optimizer": "adam", "samples": 8, "decorrelate": True}))
    [mnist.mlp.rules."np"]
    lr = 0.001
    options = { samples = 8, decorrelate = true }
    """
    known = options_of(resolve(rule)[0])
    options = {name: value for name, value in trial.items() if name in known}
    others = {name: value for name, value in trial.items() if name not in known}
    if others.get("optimizer") == "adam":
        del others["optimizer"]
    own = {**others, **({"options": options} if options else {})}
    return "\n".join(
        [f'[{data}.{model}.rules."{rule}"]', *(f"{name} = {_format_toml(value)}" for name, value in own.items())]
    )


def _format_toml(value: Any) -> str:
    """Return a value as TOML."""
    if isinstance(value, dict):
        return f"{{ {', '.join(f'{name} = {_format_toml(each)}' for name, each in value.items())} }}"
    return json.dumps(value)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python tools/choose.py", description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("data", nargs="+")
    given = parser.parse_args()
    for data in given.data:
        for (model, rule), rows in load_trials(given.folder, data).items():
            trial = choose_best_trial(rows)
            if trial is not None:
                print(format_entry(data, model, rule, trial), end="\n\n")


if __name__ == "__main__":
    main()
