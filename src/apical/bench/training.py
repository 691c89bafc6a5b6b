"""One team of seeds of one declaration, trained: everything that a store keeps of it, wherever it ran."""

import json
import platform
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from apical import data as datasets
from apical.bench import code, memory, results
from apical.bench.declaration import Declaration
from apical.bench.store import Outcome
from apical.data import Dataset
from apical.engine import checkpoint as checkpoints
from apical.engine import device as devices
from apical.engine import fit, for_sweep, seconds_per_epoch, sweep
from apical.engine.loop import OnEpoch
from apical.errors import CheckpointError, DivergenceError
from apical.plausibility.recorded import judge_own_rule
from apical.version import VERSION


def train(
    declaration: Declaration,
    seeds: Sequence[int],
    *,
    checkpoint: Path,
    device: str = "auto",
    on_epoch: OnEpoch | None = None,
    progress: bool = False,
    command: str = "",
) -> Outcome:
    """Train, or go on from the checkpoint, which is removed by whoever keeps the outcome.

    A single epoch has none, and the last has none: nobody could go on from it.
    """
    place = devices.find_device(device)
    before = memory.reset(place)
    given = _given(declaration, seeds)
    dataset = _dataset(declaration)
    path = checkpoint if declaration.epochs > 1 else None
    try:
        done = fit(
            declaration.model,
            dataset,
            **given,
            device=device,
            checkpoint=path,
            resume=path is not None and _usable(path),
            save_end=False,
            progress=progress,
            on_epoch=on_epoch,
        )
        history, failed = done.history, done.failed
    except DivergenceError as error:  # every seed: what there is of them is in the checkpoint
        saved = None if path is None else checkpoints.load(path)
        history = [] if saved is None else saved.history
        failed = dict.fromkeys(seeds, str(error)) if saved is None else saved.failed
    facts = {
        **_facts(declaration, seeds, command, place),
        "together": len(seeds),
        "seconds_per_epoch": seconds_per_epoch(history) if history else None,
        "peak_memory": memory.peak(place, before),
        "memory_kind": memory.KINDS[place.type],
    }
    return Outcome(history, failed, facts)


def together(
    declarations: Sequence[Declaration],
    seeds: Sequence[int],
    *,
    device: str = "auto",
    on_epoch: OnEpoch | None = None,
    progress: bool = False,
    commands: Sequence[str],
) -> list[Outcome]:
    """Train, as one run, declarations that differ as the trials of a sweep may. What each takes alone nobody knows then."""
    first, place = declarations[0], devices.find_device(device)
    (shared, *_), trials = zip(*(for_sweep(_given(d, seeds)) for d in declarations), strict=True)
    fits = sweep(
        first.model,
        _dataset(first),
        trials,
        **shared,
        device=device,
        compile=False,
        progress=progress,
        on_epoch=on_epoch,
    )
    return [
        Outcome(
            fit.history,
            fit.failed,
            {
                **_facts(declaration, seeds, command, place),
                "together": len(declarations) * len(seeds),
            },
        )
        for declaration, fit, command in zip(declarations, fits, commands, strict=True)
    ]


def _facts(
    declaration: Declaration, seeds: Sequence[int], command: str, place: torch.device
) -> dict[str, Any]:
    """What is known of any run: the command that repeats it, its rule's verdict, where it was computed and with what."""
    return {
        "command": command or results.command_of(declaration.settings(seeds)),
        "verdict": judge_own_rule(declaration.rule, declaration.to_dict().get("options", {})),
        **about(place),
    }


def _given(declaration: Declaration, seeds: Sequence[int]) -> dict[str, Any]:
    """Keywords of `fit`, but for the network and the data."""
    apart = ("model", "data", "data_options")
    return {name: value for name, value in declaration.settings(seeds).items() if name not in apart}


def about(place: torch.device) -> dict[str, Any]:
    """Where and with what something was computed."""
    return {
        "code": code.version(),
        "source": code.source(),
        "apical": VERSION,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cuda": torch.version.cuda if place.type == "cuda" else None,
        "device": devices.describe_device(place),
    }


def _usable(checkpoint: Path) -> bool:
    """Whether there is a checkpoint to go on from; a damaged one is put aside and the run begins anew."""
    if not checkpoint.exists():
        return False
    try:
        checkpoints.load(checkpoint)
    except CheckpointError:
        checkpoint.replace(checkpoint.with_suffix(".damaged"))
        return False
    return True


def _dataset(declaration: Declaration) -> Dataset:
    whole = _load(declaration.data, json.dumps(declaration.to_dict().get("data_options", {})))
    count = declaration.examples
    if count is None:
        return whole
    x_train, y_train, x_test, y_test = (tensor[:count] for tensor in whole)
    return replace(whole, x_train=x_train, y_train=y_train, x_test=x_test, y_test=y_test)


@lru_cache(maxsize=1)
def _load(name: str, options: str) -> Dataset:
    """The data of the run before are usually those of the next; reading and checking them takes seconds."""
    return datasets.load(name, **json.loads(options))
