"""Experiments that a diagnosis names by their command: check that they exist, and count what has been run of them."""

import argparse
import math
import shlex
from typing import Any, NoReturn

from apical.bench import suites
from apical.bench.declaration import Request, make_safe_name, parse_names
from apical.bench.defaults import WHOLE, list_trials
from apical.bench.suites import list_jobs
from apical.errors import ApicalError
from tools.pages.section import Cells, count_runs
from tools.pages.trials import Trials


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ApicalError(f"{self.prog}: {message}.")


def describe_experiment(command: str, cells: Cells, trials: Trials) -> str:
    """Return a command in Markdown, with a link to its results and how much of it has been run.

    `apical bench SUITE` with --rules, --models and --data, and `apical tune` with --rule, --model, --data and --whole work.
    """
    words = shlex.split(command)
    if words[:2] == ["apical", "bench"]:
        done, wanted, what, page = _count_bench(words[2:], cells)
    elif words[:2] == ["apical", "tune"]:
        done, wanted, what, page = _count_trials(words[2:], trials)
    else:
        raise ApicalError(f"{command!r} is neither `apical bench` nor `apical tune`.")
    text = f"`{command}`" if page is None else f"[`{command}`]({page})"
    return f"{text} ({done} of {wanted} {what})" if done else f"{text} (not run yet)"


def _count_bench(words: list[str], cells: Cells) -> tuple[int, int, str, str | None]:
    parser = _Parser("apical bench", add_help=False)
    parser.add_argument("suite")
    for flag in ("--rules", "--models", "--data"):
        parser.add_argument(flag, type=lambda names: parse_names([names]))
    asked = vars(parser.parse_args(words))
    name = asked.pop("suite")
    jobs = list_jobs(suites.load(name), Request(**asked))
    places = {(job.rule, job.model, job.data) for job in jobs if job.rule in (asked["rules"] or [job.rule])}
    here = [cell for cell in cells(name) if (cell.job.rule, cell.job.model, cell.job.data) in places]
    return *count_runs(here), "runs", f"{name}.md" if count_runs(cells(name))[0] else None


def _count_trials(words: list[str], trials: Trials) -> tuple[int, int, str, str | None]:
    parser = _Parser("apical tune", add_help=False)
    for flag in ("--rule", "--model", "--data"):
        parser.add_argument(flag, required=True)
    parser.add_argument("--whole", action="store_true")
    asked = parser.parse_args(words)
    listed = list_trials(asked.rule, asked.model, asked.data, whole=asked.whole)
    done = [row.get("trial") for row in find_trials(trials, asked.rule, asked.model, asked.data, whole=asked.whole)]
    has_page = any((row["data"], row["model"]) == (asked.data, asked.model) for rows in trials.values() for row in rows)
    page = f"trials/{make_safe_name(f'{asked.data}-{asked.model}')}.md" if has_page else None
    return sum(trial in done for trial in listed), len(listed), "trials", page


def find_trials(trials: Trials, rule: str, model: str, data: str, *, whole: bool) -> list[dict[str, Any]]:
    """Return the trials of a rule that have been run: those of five epochs, or those of the whole length."""
    files = [rows for name, rows in trials.items() if name.startswith(f"{WHOLE}-") == whole]
    return [row for rows in files for row in rows if (row["rule"], row["model"], row["data"]) == (rule, model, data)]


def find_best_trial(trials: Trials, rule: str, model: str, data: str, *, whole: bool, **settings: Any) -> float:
    """Return the best accuracy on held-out images of the trials with these settings; NaN if none has been run.

    A setting of None is one that the trial does not have.
    """
    rows = find_trials(trials, rule, model, data, whole=whole)
    known = [*list_trials(rule, model, data, whole=whole), *(row.get("trial", {}) for row in rows)]
    if not any(_has_settings(trial, settings) for trial in known):
        raise ApicalError(f"no {'whole ' * whole}trial of {rule} for {model} on {data} has {settings}.")
    shares = [row["test_accuracy"] for row in rows if _has_settings(row.get("trial", {}), settings)]
    return 100 * max((share for share in shares if share is not None), default=math.nan)


def _has_settings(trial: dict[str, Any], settings: dict[str, Any]) -> bool:
    given = {**trial, **trial.get("optimizer_options", {})}
    return all(given.get(name) == value for name, value in settings.items())
