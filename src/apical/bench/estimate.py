"""How long a run will take, from epochs that were measured: in the store itself, then in `times.json`.

What was measured of the same network on other images counts by the number of images: SVHN's MLP is CIFAR-10's.

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

ALIKE = ("rule", "model", "data", "batch_size", "precision", "options")
"""What an epoch's time depends on, the device and the number of seeds aside."""
NETWORKS: dict[str, Mapping[str, object]] = {"mlp": MLPS, "cnn": CNNS}
"""The networks that several data sets share."""
START = 5.0
"""Seconds for what is not epochs: reading data, building networks, the first step."""


@dataclass(frozen=True)
class Measured:
    """One epoch's time: of `together` seeds at once."""

    device: str
    together: int
    seconds: float
    epochs: int
    alike: dict[str, Any]

    @classmethod
    def of_row(cls, row: Row) -> "Measured | None":
        if row.status != "done" or row.seconds_per_epoch is None or row.declaration.examples is not None:
            return None
        return cls(
            row.device or "",
            row.together or 1,
            row.seconds_per_epoch,
            row.declaration.epochs,
            alike(row.declaration),
        )


class Estimate(NamedTuple):
    """Seconds of a whole run, and the device that they were measured on."""

    seconds: float
    device: str


def alike(declaration: Declaration) -> dict[str, Any]:
    values = declaration.to_dict()
    return {name: values[name] for name in ALIKE}


class Estimates:
    """Everything that was measured, asked for one run at a time."""

    def __init__(self, rows: list[Row], *, shipped: bool = True) -> None:
        own = [measured for row in rows if (measured := Measured.of_row(row)) is not None]
        self.known: dict[str, list[Measured]] = {}
        for measured in [*own, *(_shipped() if shipped else [])]:
            self.known.setdefault(json.dumps(measured.alike, sort_keys=True), []).append(measured)

    def of(
        self, declaration: Declaration, seeds: int, device: str, *, anywhere: bool = False
    ) -> Estimate | None:
        """On this device; or, with `anywhere`, on another one if this was never measured. None: nobody knows.

        Seeds train together: more than were measured take proportionally longer, fewer are not believed to be faster.
        """
        if declaration.examples is not None:
            return None
        found = self._of(alike(declaration))
        here = [measured for measured in found if measured.device == device]
        if not here and (not anywhere or not found):
            return None
        place = device if here else found[0].device
        times = [m.seconds * max(1.0, seeds / m.together) for m in found if m.device == place]
        return Estimate(START + declaration.epochs * statistics.median(times), place)

    def _of(self, kind: dict[str, Any]) -> list[Measured]:
        """What was measured of such runs; or of the same network on other images, by their number."""
        networks = NETWORKS.get(kind["model"], {})
        data = kind["data"]
        same = [other for other in networks if other != data and networks[other] == networks.get(data)]
        for other in (data, *same):
            found = self.known.get(json.dumps({**kind, "data": other}, sort_keys=True), [])
            if found:
                share = 1.0 if other == data else examples(data) / examples(other)
                return [replace(measured, seconds=share * measured.seconds) for measured in found]
        return []


def examples(data: str) -> int:
    """How many images an epoch has."""
    return int(DATASETS[data].arrays["y_train"].shape[0])


@cache
def _shipped() -> list[Measured]:
    text = resources.files("apical.bench").joinpath("times.json").read_text("utf-8")
    return [Measured(**entry) for entry in json.loads(text)["epochs"]]


def told(seconds: float) -> str:
    """A length of time for people.

    >>> told(8), told(200), told(7200)
    ('8 s', '3 min', '2.0 h')
    """
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
