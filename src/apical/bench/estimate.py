"""Estimate how long a run will take from epochs that were measured, or from one step, and preview what a request would run.

Times of the same network on another data set are scaled by the number of images: SVHN has the same MLP as CIFAR-10.

`times.json` has the epochs measured on an H200; `python tools/times.py results` makes it from results, perf
tables and stores below that folder.
"""

import json
import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources
from typing import Any, NamedTuple

import torch

from apical.bench.cells import Table, group_by
from apical.bench.declaration import Declaration, Request
from apical.bench.store import Row, Store
from apical.bench.suites import Job, list_jobs, load
from apical.data import DATASETS, Dataset
from apical.data.images import Images
from apical.engine import device as devices
from apical.engine import fit
from apical.errors import ApicalError
from apical.models import CNNS, MLPS
from apical.printing import format_duration

TIMING_SETTINGS = ("rule", "model", "data", "batch_size", "precision", "options")
"""The settings that the time of an epoch depends on, besides the device and the number of seeds."""
NETWORKS: dict[str, Mapping[str, object]] = {"mlp": MLPS, "cnn": CNNS}
"""Networks that several data sets share: their layers by model and data set."""
SLOW_RULES = ("pc", "ep", "dtp")
"""Rules of table 1 that iterate, or learn inverses, in every step. They take most of its time."""
START_SECONDS = 5.0
"""Seconds that a run takes besides its epochs: loading data, building networks, the first step."""
SHORT_STEP = 0.1
"""Seconds of a step up to which, on the CPU, several steps of all seeds are timed."""


@dataclass(frozen=True)
class EpochTime:
    """The measured time of one epoch, of `together` seeds that trained at once."""

    device: str
    together: int
    seconds: float
    epochs: int
    alike: dict[str, Any]

    @classmethod
    def from_row(cls, row: Row) -> "EpochTime | None":
        """Return the time of a finished run; None if it was not measured, or the run was a quick one."""
        asked = row.declaration
        if row.status != "done" or row.seconds_per_epoch is None or row.declaration.examples is not None:
            return None
        alike = select_timing_settings(asked)
        return cls(row.device or "", row.together or 1, row.seconds_per_epoch, asked.epochs, alike)


class Estimate(NamedTuple):
    """The estimated seconds of a whole run, and the device that its epochs were measured on."""

    seconds: float
    device: str


def select_timing_settings(declaration: Declaration) -> dict[str, Any]:
    """Return the settings that the time of an epoch depends on."""
    values = declaration.to_dict()
    return {name: values[name] for name in TIMING_SETTINGS}


class Estimates:
    """All measured times, from which the time of a run is estimated."""

    def __init__(self, rows: list[Row], *, shipped: bool = True) -> None:
        own = [measured for row in rows if (measured := EpochTime.from_row(row)) is not None]
        times = [*own, *(_load_shipped_times() if shipped else [])]
        self.known = group_by(times, lambda measured: json.dumps(measured.alike, sort_keys=True))

    def estimate(self, declaration: Declaration, seeds: int, device: str, *, anywhere: bool = False) -> Estimate | None:
        """Return the estimated time of a run, None if nothing like it was measured.

        Seeds train together. More seeds than were measured take proportionally longer; fewer seeds take as long. With
        `anywhere`, the times of another device count if there are none of this one.
        """
        if declaration.examples is not None:
            return None
        found = self._find_times(select_timing_settings(declaration))
        here = [measured for measured in found if measured.device == device]
        if not here and (not anywhere or not found):
            return None
        place = device if here else found[0].device
        times = [m.seconds * max(1.0, seeds / m.together) for m in found if m.device == place]
        return Estimate(START_SECONDS + declaration.epochs * statistics.median(times), place)

    def _find_times(self, kind: dict[str, Any]) -> list[EpochTime]:
        """Return the times of such runs, or else the scaled times of the same network on another data set."""
        networks = NETWORKS.get(kind["model"], {})
        data = kind["data"]
        same = [other for other in networks if other != data and networks[other] == networks.get(data)]
        for other in (data, *same):
            found = self.known.get(json.dumps({**kind, "data": other}, sort_keys=True), [])
            if found:
                share = 1.0 if other == data else count_examples(data) / count_examples(other)
                return [replace(measured, seconds=share * measured.seconds) for measured in found]
        return []


def count_examples(data: str) -> int:
    """Return how many examples an epoch of a data set has."""
    return int(DATASETS[data].arrays["y_train"].shape[0])


@cache
def _load_shipped_times() -> list[EpochTime]:
    text = resources.files("apical.bench").joinpath("times.json").read_text("utf-8")
    return [EpochTime(**entry) for entry in json.loads(text)["epochs"]]


class StepTimer:
    """Estimates of runs on this machine, from one step on made-up data.

    Of each network one rule is timed. The epochs of the others take as much longer or shorter as they did where they were
    measured; a rule that was measured nowhere is timed, too.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self.name = device, f"{devices.describe_device(device)}, one step"
        self.scales: dict[tuple[Any, ...], float] = {}
        """How much longer than elsewhere an epoch of a network takes here, by model, data, batch size and precision."""

    def estimate(self, declaration: Declaration, seeds: int, elsewhere: Estimate | None) -> Estimate | None:
        """Return the estimated time of a run here; `elsewhere` is its time on another machine, if it is known."""
        values = declaration.to_dict()
        network = tuple(values[name] for name in ("model", "data", "batch_size", "precision"))
        training = None if elsewhere is None else elsewhere.seconds - START_SECONDS
        if training is not None and network in self.scales:
            return Estimate(START_SECONDS + self.scales[network] * training, self.name)
        epoch = time_epoch(declaration, seeds, self.device)
        if epoch is None:
            return elsewhere
        if training is not None:
            self.scales[network] = declaration.epochs * epoch / training
        return Estimate(START_SECONDS + declaration.epochs * epoch, self.name)


def time_epoch(declaration: Declaration, seeds: int, device: torch.device) -> float | None:
    """Return the seconds of an epoch of so many seeds, from made-up images; None for other kinds of data."""
    source, batch = DATASETS.get(declaration.data), declaration.to_dict()["batch_size"]
    if not isinstance(source, Images):
        return None
    steps = math.ceil((declaration.examples or count_examples(declaration.data)) / batch)
    if device.type == "cpu":
        step = _time_steps(declaration, source, [0], 1, device)
        if step is None or step > SHORT_STEP:
            return None if step is None else step * steps * seeds
    together = _time_steps(declaration, source, list(range(seeds)), 4, device)
    return None if together is None else together * steps


def _time_steps(
    declaration: Declaration, source: Images, seeds: list[int], steps: int, device: torch.device
) -> float | None:
    """Return the seconds of one of so many steps in the second of two epochs; in the first a GPU captures its graph."""
    values = declaration.settings(seeds)
    _, height, width, *channels = source.arrays["x_train"].shape
    x = torch.rand(steps * values["batch_size"], *(channels or [1]), height, width)
    y = torch.arange(len(x)) % source.classes
    data = Dataset(x, y, x[:1], y[:1], name=declaration.data, classes=source.classes)
    keywords = {name: value for name, value in values.items() if name not in ("model", "data", "data_options")}
    keywords |= {"epochs": 2, "protocol": "clean", "alignment": False, "device": str(device), "progress": False}
    try:
        return fit(declaration.model, data, **keywords).seconds_per_epoch / steps
    except ApicalError:  # the real run will say why
        return None


class PreviewLine(NamedTuple):
    """A job of a dry run: how many of its seeds are missing and how long they take, None if that is unknown.

    A seed that failed is not missing, unless it is run again.
    """

    job: Job
    missing: int
    estimate: Estimate | None
    failed: bool = False

    def format_cells(self) -> list[str]:
        """Return the cells of this line of the table."""
        job = self.job
        time_ = "unmeasured" if self.estimate is None else format_duration(self.estimate.seconds)
        if not self.missing:
            time_ = "failed" if self.failed else "done"
        if job.declaration is None:
            time_ = "cannot run"
        varied = " ".join(f"{name}={value}" for name, value in job.varied.items())
        numbers = [f"{job.epochs}", f"{len(job.seeds)}", f"{self.missing}"]
        device_name = "" if self.estimate is None else self.estimate.device
        return [f"{job.rule} {varied}".strip(), job.model, job.data, *numbers, time_, device_name]


def preview(request: Request, *, times_steps: bool = False) -> Table:
    """Return a table of what a run would do: each job's epochs, seeds, missing seeds and estimated time.

    With `times_steps`, what was not measured on this machine is estimated from a step that is timed here. Jobs whose data
    are missing count, too, since the data can be downloaded.
    """
    suite, rows = load(request.suite), []
    jobs = list_jobs(suite, request)
    if request.store.is_file():
        with Store(request.store, write=False) as opened:
            rows = opened.runs()
    ended = {(row.key, row.seed): row.status for row in rows if row.is_final(request.redo)}
    device = devices.find_device(request.device)
    estimates, device_name, timer = Estimates(rows), devices.describe_device(device), StepTimer(device)
    lines: dict[int, PreviewLine] = {}
    # The control comes last: it trains one layer, which says little about the time of the others.
    for place, job in sorted(enumerate(jobs), key=lambda pair: pair[1].rule == suite.control):
        declaration, missing = job.declaration, len(job.seeds)
        found, known = [], None
        if declaration is not None:
            found = [ended.get((declaration.key, seed)) for seed in job.seeds]
            missing = found.count(None)
            known = estimates.estimate(declaration, missing, device_name, anywhere=True) if missing else None
            if missing and times_steps and (known is None or known.device != device_name):
                known = timer.estimate(declaration, missing, known)
        lines[place] = PreviewLine(job, missing, known, failed="failed" in found)
    ordered = [lines[place] for place in range(len(jobs))]
    headings = ["rule", "model", "data", "epochs", "seeds", "to do", "time", "measured on"]
    problems = dict.fromkeys(job.problem for job in jobs if job.problem is not None)
    notes = [*_format_totals(ordered), *(f"Not run: {problem}" for problem in problems)]
    return Table(suite.title, headings, [line.format_cells() for line in ordered], notes)


def _format_totals(lines: list[PreviewLine]) -> list[str]:
    """Return the time of all missing runs, and their time without the slow rules."""
    left = [line for line in lines if line.missing and line.job.declaration]
    if not left:
        return ["Nothing is left to do."]
    light = [line for line in left if line.job.rule.partition(":")[0] not in SLOW_RULES]
    notes = [f"Total: {_sum_up(left)}"]
    if light and len(light) < len(left):
        notes.append(f"Without {', '.join(SLOW_RULES)}: {_sum_up(light)}")
    return [*notes, "A run is a line of the table: its seeds train together, and its time is that of all of them."]


def _sum_up(lines: list[PreviewLine]) -> str:
    """Return the total of the estimated times, the devices they were measured on, and how many are unknown."""
    known = [line.estimate for line in lines if line.estimate is not None]
    if not known:
        return "unknown, for nothing of it was measured."
    places = ", ".join(dict.fromkeys(estimate.device for estimate in known))
    total, unmeasured = format_duration(sum(estimate.seconds for estimate in known)), len(lines) - len(known)
    more = f"; {unmeasured} more unmeasured and not in it." if unmeasured else "."
    return f"{total} for {len(known)} of {len(lines)} runs, measured on {places}{more}"
