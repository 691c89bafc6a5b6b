"""A run's result as one JSON file: what was run, on what, how each epoch went, and the command to repeat it."""

import json
import platform
import shlex
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from apical.bench import code
from apical.bench.words import seeds_text, value_text
from apical.core.registry import RULES
from apical.engine import Fit
from apical.engine import device as devices
from apical.engine.settings import Settings
from apical.errors import ApicalError
from apical.files import atomic
from apical.plausibility.recorded import judge_own_rule, parse_judgement
from apical.version import VERSION

FORMAT = 1
KEY = ("rule", "model", "data")


@dataclass(frozen=True)
class Result:
    """One rule on one model and data set, for some seeds."""

    settings: dict[str, Any]
    accuracies: list[float]
    """In percent, one for each seed that finished, in the order of `settings["seeds"]`; none where targets are values."""
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
        finished = [seed for seed in self.settings["seeds"] if str(seed) not in self.failed]
        return dict(zip(finished, self.accuracies, strict=self.classifies))

    @property
    def epochs_done(self) -> int:
        return max((row["epoch"] for row in self.history), default=0)

    @property
    def finished(self) -> bool:
        """Whether its epochs are over; one that `--stop-after` ended may go on."""
        return self.epochs_done == self.settings["epochs"] or len(self.failed) == len(self.settings["seeds"])

    @property
    def classifies(self) -> bool:
        """Whether there are accuracies: time series have errors instead, in the history."""
        return any("test_accuracy" in row for row in self.history)


def command_of(settings: dict[str, Any]) -> str:
    """The command that repeats a run, with every setting spelt out: none is left to the recorded ones."""
    flags: list[str] = []
    for name, value in settings.items():
        if isinstance(value, dict):
            flag = name.replace("_", "-").removesuffix("s")
            pairs = [f"{option}={value_text(choice)}" for option, choice in value.items()]
            flags += [f"--{flag} {shlex.quote(pair)}" for pair in pairs]
        elif name == "alignment":
            flags += ["--alignment"] if value else []
        elif name == "seeds":
            flags.append(f"--seeds {seeds_text(value)}")
        elif value is not None:
            flags.append(f"--{name.replace('_', '-')} {shlex.quote(str(value))}")
    return " ".join([*_program(settings["rule"]), "train", *flags, "--untuned"])


def _program(rule: str) -> list[str]:
    """The command, and what it must import for the rule to be known; a rule of a script cannot be."""
    known = RULES.get(rule.partition(":")[0])
    module = "apical" if known is None else known.__module__
    own = module.partition(".")[0] not in ("apical", "__main__")
    return ["apical", *(["--import", shlex.quote(module)] if own else [])]


def of_fit(fit: Fit) -> Result:
    place, settings = torch.device(fit.device), fit.settings.to_dict()
    versions = {
        "apical": VERSION,
        "source": code.source(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    return Result(
        settings=settings,
        accuracies=[100 * a for a in fit.accuracies] if "test_accuracy" in fit.history[0] else [],
        seconds_per_epoch=fit.seconds_per_epoch,
        history=fit.history,
        failed={str(seed): why for seed, why in fit.failed.items()},
        command=command_of(settings),
        device=devices.describe_device(place),
        verdict=judge_own_rule(fit.settings.rule, fit.settings.options),
        versions={**versions, "cuda": torch.version.cuda or ""} if place.type == "cuda" else versions,
    )


def file_name(rule: str, model: str, data: str) -> str:
    """A name that every file system takes: the colon of a variant becomes a dot."""
    return f"{safe(data)}-{safe(model)}-{rule.replace(':', '.')}.json"


def safe(name: str) -> str:
    """A model's name, which may be MODULE:FUNCTION, or that of data, which may be text:PATH, as part of a file's."""
    return "".join(c if c.isalnum() or c in "-_." else "_" for c in name)


def save(path: Path, result: Result) -> None:
    body = {"format": FORMAT, **result.__dict__, "history": [short(row) for row in result.history]}
    if result.verdict is None:  # of a built-in rule, as in files of version 0.1
        del body["verdict"]
    rows = [json.dumps(row) for row in body.pop("history")]
    text = json.dumps(body, indent=1)[:-2] + ',\n "history": [\n  ' + ",\n  ".join(rows) + "\n ]\n}\n"
    with atomic(path) as temporary:
        temporary.write_text(text, "utf-8")


def short(value: Any) -> Any:
    """Measurements as files keep them: six digits are more than one has, and less than half as long as all of them.

    >>> short({"alignment": [0.123456789, None, 3], "name": "bp"})
    {'alignment': [0.123457, None, 3], 'name': 'bp'}
    """
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {key: short(item) for key, item in value.items()}
    return [short(item) for item in value] if isinstance(value, list) else value


def load(path: Path) -> Result:
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
            raise ValueError(
                f"its settings have {', '.join(sorted(unknown))}, which this version does not know"
            )
        if not isinstance(result.versions, dict) or any("seed" not in row for row in result.history):
            raise ValueError("its versions or its history were altered")
        if result.verdict is not None:
            parse_judgement(result.verdict)
        result.by_seed()  # as many accuracies as seeds that finished
        _ = result.finished  # every row has its epoch
        return result
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise ApicalError(f"{path} is not a result that can be read ({error}).") from error


def paths(folder: Path) -> list[Path]:
    """The file of every result below a folder."""
    return [path for path in sorted(folder.rglob("*.json")) if not path.name.startswith("perf")]


def load_folder(folder: Path) -> list[Result]:
    """Every result below a folder, in the order of the file names; runs that were stopped early are told and left out."""
    if not folder.is_dir():
        raise ApicalError(f"there is no folder {folder} to read results from.")
    read = {path: load(path) for path in paths(folder)}
    for path, result in read.items():
        if not result.finished:
            warnings.warn(
                f"{path} was stopped after {result.epochs_done} of {result.settings['epochs']} epochs and is left "
                "out; `apical train --resume` goes on with it.",
                stacklevel=2,
            )
    found = [result for result in read.values() if result.finished]
    if not found:
        raise ApicalError(f"there are no results in {folder}; `apical train --out {folder}` writes one.")
    return found
