"""Results as JSON files: settings, device, versions, the history of all epochs, and the command that repeats a run."""

import json
import platform
import shlex
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from apical.bench import code
from apical.bench.words import format_seeds, format_value
from apical.core.registry import RULES
from apical.engine import Fit
from apical.engine import device as devices
from apical.engine.settings import Settings
from apical.errors import ApicalError
from apical.files import replace_atomically
from apical.plausibility.recorded import judge_own_rule, parse_judgement
from apical.version import VERSION

FORMAT = 1
KEY = ("rule", "model", "data")


@dataclass(frozen=True)
class Result:
    """The result of one rule on one model and data set, for some seeds."""

    settings: dict[str, Any]
    accuracies: list[float]
    """In percent, one for each finished seed, in the order of `settings["seeds"]`; empty for regression."""
    seconds_per_epoch: float
    history: list[dict[str, Any]]
    failed: dict[str, str]
    command: str
    device: str
    versions: dict[str, str]
    verdict: str | None = None
    """The audit's verdict on a rule that is not built in, as `judge_own_rule` returns it."""

    @property
    def key(self) -> tuple[str, str, str]:
        rule, model, data = (self.settings[name] for name in KEY)
        return rule, model, data

    def by_seed(self) -> dict[int, float]:
        """Return the accuracy of each finished seed."""
        finished = [seed for seed in self.settings["seeds"] if str(seed) not in self.failed]
        return dict(zip(finished, self.accuracies, strict=self.has_accuracies))

    @property
    def epochs_done(self) -> int:
        """How many epochs were trained."""
        return max((row["epoch"] for row in self.history), default=0)

    @property
    def is_finished(self) -> bool:
        """Whether all epochs were trained, or all seeds failed. A run that `--stop-after` ended is not finished."""
        return self.epochs_done == self.settings["epochs"] or len(self.failed) == len(self.settings["seeds"])

    @property
    def has_accuracies(self) -> bool:
        """Whether there are accuracies. Regression has errors instead, in the history."""
        return any("test_accuracy" in row for row in self.history)


def build_train_command(settings: dict[str, Any]) -> str:
    """Return the command that repeats a run. Every setting is spelt out, so recorded settings do not matter."""
    flags: list[str] = []
    for name, value in settings.items():
        if isinstance(value, dict):
            flag = name.replace("_", "-").removesuffix("s")
            pairs = [f"{option}={format_value(choice)}" for option, choice in value.items()]
            flags += [f"--{flag} {shlex.quote(pair)}" for pair in pairs]
        elif name == "alignment":
            flags += ["--alignment"] if value else []
        elif name == "seeds":
            flags.append(f"--seeds {format_seeds(value)}")
        elif value is not None:
            flags.append(f"--{name.replace('_', '-')} {shlex.quote(str(value))}")
    return " ".join([*_build_program(settings["rule"]), "train", *flags, "--untuned"])


def _build_program(rule: str) -> list[str]:
    """Return the command `apical`, with `--import` for a rule of the user's. A rule of a script cannot be imported."""
    known = RULES.get(rule.partition(":")[0])
    module = "apical" if known is None else known.__module__
    own = module.partition(".")[0] not in ("apical", "__main__")
    return ["apical", *(["--import", shlex.quote(module)] if own else [])]


def make_result(fit: Fit) -> Result:
    """Make a result from what `fit` returned."""
    place, settings = torch.device(fit.device), fit.settings.to_dict()
    versions = {
        "apical": VERSION,
        "source": code.hash_source(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    return Result(
        settings=settings,
        accuracies=[100 * a for a in fit.accuracies] if "test_accuracy" in fit.history[0] else [],
        seconds_per_epoch=fit.seconds_per_epoch,
        history=fit.history,
        failed={str(seed): why for seed, why in fit.failed.items()},
        command=build_train_command(settings),
        device=devices.describe_device(place),
        verdict=judge_own_rule(fit.settings.rule, fit.settings.options),
        versions={**versions, "cuda": torch.version.cuda or ""} if place.type == "cuda" else versions,
    )


def make_file_name(rule: str, model: str, data: str) -> str:
    """Return a file name that every file system accepts: the colon of a variant becomes a dot."""
    return f"{make_safe_name(data)}-{make_safe_name(model)}-{rule.replace(':', '.')}.json"


def make_safe_name(name: str) -> str:
    """Return the name of a model (maybe MODULE:FUNCTION) or of data (maybe text:PATH) as a part of a file name."""
    return "".join(c if c.isalnum() or c in "-_." else "_" for c in name)


def save(path: Path, result: Result) -> None:
    """Write a result to a JSON file, one line for each row of its history."""
    body = {"format": FORMAT, **result.__dict__, "history": [round_values(row) for row in result.history]}
    if result.verdict is None:  # built-in rules have none, as in files of version 0.1
        del body["verdict"]
    rows = [json.dumps(row) for row in body.pop("history")]
    text = json.dumps(body, indent=1)[:-2] + ',\n "history": [\n  ' + ",\n  ".join(rows) + "\n ]\n}\n"
    with replace_atomically(path) as temporary:
        temporary.write_text(text, "utf-8")


def round_values(value: Any) -> Any:
    """Round measurements to six digits, which halves the size of files and is more precise than the measurements.

    >>> round_values({"alignment": [0.123456789, None, 3], "name": "bp"})
    {'alignment': [0.123457, None, 3], 'name': 'bp'}
    """
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {key: round_values(item) for key, item in value.items()}
    return [round_values(item) for item in value] if isinstance(value, list) else value


def load(path: Path) -> Result:
    """Read a result from a JSON file. Raise ApicalError if it is damaged."""
    try:
        body = json.loads(path.read_text("utf-8"))
        if body.pop("format") != FORMAT:
            raise ValueError("its format is of another version")
        result = Result(**body)
        missing = {"epochs", "lr", "protocol", *KEY} - result.settings.keys()
        if missing:
            raise ValueError(f"its settings lack {', '.join(sorted(missing))}")
        unknown = result.settings.keys() - Settings.__dataclass_fields__.keys()
        if unknown:
            raise ValueError(f"its settings have {', '.join(sorted(unknown))}, which this version does not know")
        if not isinstance(result.versions, dict) or any("seed" not in row for row in result.history):
            raise ValueError("its versions or its history were altered")
        if result.verdict is not None:
            parse_judgement(result.verdict)
        result.by_seed()  # raises an error unless there is one accuracy for each finished seed
        _ = result.is_finished  # raises an error if a row has no epoch
        return result
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise ApicalError(f"{path} is not a result that can be read ({error}).") from error


def list_paths(folder: Path) -> list[Path]:
    """Return the files of all results below a folder."""
    return [path for path in sorted(folder.rglob("*.json")) if not path.name.startswith("perf")]


def load_folder(folder: Path) -> list[Result]:
    """Load all results below a folder, in the order of the file names. Unfinished runs are left out with a warning."""
    if not folder.is_dir():
        raise ApicalError(f"there is no folder {folder} to read results from.")
    read = {path: load(path) for path in list_paths(folder)}
    for path, result in read.items():
        if not result.is_finished:
            warnings.warn(
                f"{path} was stopped after {result.epochs_done} of {result.settings['epochs']} epochs and is left "
                "out; `apical train --resume` goes on with it.",
                stacklevel=2,
            )
    found = [result for result in read.values() if result.is_finished]
    if not found:
        raise ApicalError(f"there are no results in {folder}; `apical train --out {folder}` writes one.")
    return found
