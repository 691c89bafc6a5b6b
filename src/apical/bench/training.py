"""Train some seeds of a declaration and return everything that the store keeps about them."""

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
from apical.engine import fit, seconds_per_epoch, split_for_sweep, sweep
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
    """Train some seeds of a declaration, or continue from the checkpoint if there is one.

    No checkpoint is written after the last epoch, so a run of a single epoch has none. The caller removes the
    checkpoint once it has recorded the outcome.
    """
    torch_device = devices.find_device(device)
    before = memory.reset_peak(torch_device)
    given = _collect_fit_keywords(declaration, seeds)
    dataset = _load_dataset(declaration)
    path = checkpoint if declaration.epochs > 1 else None
    try:
        done = fit(
            declaration.model,
            dataset,
            **given,
            device=device,
            checkpoint=path,
            resume=path is not None and _can_resume(path),
            save_end=False,
            progress=progress,
            on_epoch=on_epoch,
        )
        history, failed = done.history, done.failed
    except DivergenceError as error:  # every seed diverged: their history is in the checkpoint
        saved = None if path is None else checkpoints.load(path)
        history = [] if saved is None else saved.history
        failed = dict.fromkeys(seeds, str(error)) if saved is None else saved.failed
    facts = {
        **_describe_run(declaration, seeds, command, torch_device),
        "together": len(seeds),
        "seconds_per_epoch": seconds_per_epoch(history) if history else None,
        "peak_memory": memory.read_peak(torch_device, before),
        "memory_kind": memory.KINDS[torch_device.type],
    }
    return Outcome(history, failed, facts)


def train_together(
    declarations: Sequence[Declaration],
    seeds: Sequence[int],
    *,
    device: str = "auto",
    on_epoch: OnEpoch | None = None,
    progress: bool = False,
    commands: Sequence[str],
) -> list[Outcome]:
    """Train several declarations as one run. They may differ only as the trials of a sweep may.

    The outcomes have no time per epoch, because the time of each declaration alone is unknown.
    """
    first, torch_device = declarations[0], devices.find_device(device)
    (shared, *_), trials = zip(*(split_for_sweep(_collect_fit_keywords(d, seeds)) for d in declarations), strict=True)
    fits = sweep(
        first.model,
        _load_dataset(first),
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
            {**_describe_run(declaration, seeds, command, torch_device), "together": len(declarations) * len(seeds)},
        )
        for declaration, fit, command in zip(declarations, fits, commands, strict=True)
    ]


def _describe_run(
    declaration: Declaration, seeds: Sequence[int], command: str, torch_device: torch.device
) -> dict[str, Any]:
    """Return the facts that every run has: the command that repeats it, the verdict on its rule, and the environment."""
    return {
        "command": command or results.build_train_command(declaration.settings(seeds)),
        "verdict": judge_own_rule(declaration.rule, declaration.to_dict().get("options", {})),
        **describe_environment(torch_device),
    }


def _collect_fit_keywords(declaration: Declaration, seeds: Sequence[int]) -> dict[str, Any]:
    """Return the keywords of `fit`, except for the network and the data."""
    apart = ("model", "data", "data_options")
    return {name: value for name, value in declaration.settings(seeds).items() if name not in apart}


def describe_environment(torch_device: torch.device) -> dict[str, Any]:
    """Return the versions and the device that a result is computed with."""
    return {
        "code": code.describe_version(),
        "source": code.hash_source(),
        "apical": VERSION,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cuda": torch.version.cuda if torch_device.type == "cuda" else None,
        "device": devices.describe_device(torch_device),
    }


def _can_resume(checkpoint: Path) -> bool:
    """Return whether there is a checkpoint to continue from. A damaged one is renamed, and the run starts again."""
    if not checkpoint.exists():
        return False
    try:
        checkpoints.load(checkpoint)
    except CheckpointError:
        checkpoint.replace(checkpoint.with_suffix(".damaged"))
        return False
    return True


def _load_dataset(declaration: Declaration) -> Dataset:
    """Return the data of a declaration, only its first examples for a quick run."""
    whole = _load_cached(declaration.data, json.dumps(declaration.to_dict().get("data_options", {})))
    count = declaration.examples
    if count is None:
        return whole
    x_train, y_train, x_test, y_test = (tensor[:count] for tensor in whole)
    return replace(whole, x_train=x_train, y_train=y_train, x_test=x_test, y_test=y_test)


@lru_cache(maxsize=1)
def _load_cached(name: str, options: str) -> Dataset:
    """Load a data set and keep it for the next run, which usually has the same. Loading takes seconds."""
    return datasets.load(name, **json.loads(options))
