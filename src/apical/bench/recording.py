"""What `apical bench` and `apical train --out` share: a run is trained, measured and described for a store."""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from apical.bench import provenance
from apical.bench.declaration import Declaration, build_train_command
from apical.bench.store import Outcome, Store
from apical.engine import Fit, seconds_per_epoch
from apical.engine import checkpoint as checkpoints
from apical.engine.settings import OnEpoch
from apical.errors import DivergenceError, StoreError
from apical.plausibility.judge import judge_own_rule


@contextmanager
def send_heartbeats(store: Store) -> Iterator[None]:
    """Update the heartbeat of this process's claims from a thread, which has its own connection."""
    done = threading.Event()

    def send() -> None:
        with Store(store.path) as own:
            own.owner = store.owner
            while not done.wait(provenance.LEASE / 6):
                with suppress(StoreError):  # the next one may get through
                    own.update_heartbeat()

    thread = threading.Thread(target=send, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def run_and_measure(
    run: Callable[[OnEpoch], Fit],
    declaration: Declaration,
    seeds: list[int],
    device: torch.device,
    checkpoint: Path | None,
    on_epoch: OnEpoch,
    command: str = "",
) -> tuple[Outcome, Fit | None]:
    """Train by `run`, which calls `fit` with what it is given as `on_epoch`.

    Returns:
        The outcome, with time and memory, and the `Fit`: None if every seed diverged.
    """
    before, done = provenance.reset_peak(device), None
    epochs: list[dict[str, Any]] = []

    def record(rows: list[dict[str, Any]]) -> None:
        epochs.extend(rows)
        on_epoch(rows)

    try:
        done = run(record)
        history, failed = done.history, done.failed
    except DivergenceError as error:  # every seed diverged: all that they did is in the checkpoint, if there is one
        history, failed = epochs, dict.fromkeys(seeds, str(error))
        if checkpoint is not None:
            saved = checkpoints.load(checkpoint)
            history, failed = saved.history, saved.failed
    facts = {
        **describe_run(declaration, seeds, command, device),
        "together": len(seeds),
        "seconds_per_epoch": seconds_per_epoch(history) if history else None,
        "peak_memory": provenance.read_peak(device, before),
        "memory_kind": provenance.MEMORY_KINDS[device.type],
    }
    return Outcome(history, failed, facts), done


def describe_run(declaration: Declaration, seeds: Sequence[int], command: str, device: torch.device) -> dict[str, Any]:
    """Return the facts that every run has: the command that repeats it, the verdict on its rule, and the environment."""
    return {
        "command": command or build_train_command(declaration.settings(seeds)),
        "verdict": judge_own_rule(declaration.rule, declaration.to_dict().get("options", {})),
        **provenance.describe_environment(device),
    }
