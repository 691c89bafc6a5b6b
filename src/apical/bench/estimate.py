"""Estimate how long a run will take from epochs that were measured, in the store or in `times.json`.

Times of the same network on another data set are scaled by the number of images: SVHN has the same MLP as CIFAR-10.

`times.json` has the epochs measured on an H200; `python -m apical.bench.times results` makes it from results, perf
tables and stores below that folder.
"""

import json
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources
from typing import Any, NamedTuple

from apical.bench.declaration import Declaration
from apical.bench.store import Row
from apical.data import DATASETS
from apical.models import CNNS, MLPS

TIMING_SETTINGS = ("rule", "model", "data", "batch_size", "precision", "options")
"""The settings that the time of an epoch depends on, besides the device and the number of seeds."""
NETWORKS: dict[str, Mapping[str, object]] = {"mlp": MLPS, "cnn": CNNS}
"""Networks that several data sets share: their layers by model and data set."""
START_SECONDS = 5.0
"""Seconds that a run takes besides its epochs: loading data, building networks, the first step."""


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
        if row.status != "done" or row.seconds_per_epoch is None or row.declaration.examples is not None:
            return None
        return cls(
            row.device or "",
            row.together or 1,
            row.seconds_per_epoch,
            row.declaration.epochs,
            select_timing_settings(row.declaration),
        )


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
        self.known: dict[str, list[EpochTime]] = {}
        for measured in [*own, *(_load_shipped_times() if shipped else [])]:
            self.known.setdefault(json.dumps(measured.alike, sort_keys=True), []).append(measured)

    def estimate(self, declaration: Declaration, seeds: int, device: str, *, anywhere: bool = False) -> Estimate | None:
        """Return the estimated time of a run, None if nothing like it was measured.

        Seeds train together. More seeds than were measured take proportionally longer; fewer seeds take as long.

        Args:
            declaration: what is trained.
            seeds: how many seeds train together.
            device: the name of the device.
            anywhere: use the times of another device if there are none of this one.
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
    """Return the times that come with apical."""
    text = resources.files("apical.bench").joinpath("times.json").read_text("utf-8")
    return [EpochTime(**entry) for entry in json.loads(text)["epochs"]]


def format_duration(seconds: float) -> str:
    """Return a duration as text.

    >>> format_duration(8), format_duration(200), format_duration(7200)
    ('8 s', '3 min', '2.0 h')
    """
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
