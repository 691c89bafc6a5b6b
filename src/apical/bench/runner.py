"""Run the missing runs of a suite in this process: claim, train and record them.

Every epoch is recorded and checkpointed, so that little is lost when a run is interrupted.
"""

import json
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from apical.bench.declaration import Declaration
from apical.bench.estimate import Estimates
from apical.bench.owner import LEASE
from apical.bench.store import LostClaimError, Outcome, Store, compute_score, get_checkpoint_folder, get_checkpoint_path
from apical.bench.suites import Job
from apical.bench.training import describe_environment, train, train_together
from apical.bench.words import format_seeds
from apical.engine import device as devices
from apical.engine import split_for_sweep
from apical.engine.loop import split_evenly
from apical.errors import CheckpointError, DataError, MissingExtraError, StoreError, WriteError

Log = Callable[[str], None]
"""A function that shows one line of text to the user."""


class OutOfTimeError(Exception):
    """The deadline has passed. The run continues from its checkpoint the next time."""


@dataclass(frozen=True)
class RunConfig:
    """How the jobs of a suite are run: where, until when, and with which store."""

    store: Path
    device: str = "auto"
    redo: str | None = None
    """A timestamp as in the store. Runs that failed, or that other code computed, before it are run again."""
    deadline: float | None = None
    """A value of `time.time()` after which no epoch begins."""
    progress: bool = True
    command: str = ""
    """The beginning of the command that repeats a run, for runs that `apical train` cannot repeat."""
    pool: str = ""
    """The name of the worker pool that this process belongs to."""
    together: int = 1
    """How many networks may train as one run, of jobs that differ only as the trials of a sweep may."""


def log_to_stderr(text: str) -> None:
    """Print one line to stderr. Results themselves go to the store."""
    sys.stderr.write(f"{text}\n")  # a single write, so that the lines of two processes do not mix
    sys.stderr.flush()


def run_jobs(jobs: list[Job], config: RunConfig, log: Log = log_to_stderr) -> None:
    """Claim and run jobs until nothing is left to claim."""
    with Store(config.store, pool=config.pool) as store, send_heartbeats(store):
        estimates = Estimates(store.runs())
        device_name = devices.describe_device(devices.find_device(config.device))
        groups, something_ran = group_jobs(jobs, config.together), True
        while something_ran:  # another pass takes up what other processes left behind meanwhile
            ran = [_run_group(group, store, config, estimates, device_name, log) for group in groups]
            something_ran = any(ran)
        remove_empty_checkpoint_folder(store)


def group_jobs(jobs: list[Job], max_networks: int) -> list[list[Job]]:
    """Group jobs that can train as one run, at most `max_networks` networks in a group.

    The groups are in the order of their first jobs.
    """
    alike: dict[str, list[Job]] = {}
    for number, job in enumerate(jobs):
        shared: object = number  # a job that cannot run is a group of its own
        if job.declaration is not None and job.problem is None:
            shared = split_for_sweep(job.declaration.to_dict())[0]
        alike.setdefault(json.dumps([shared, job.seeds], sort_keys=True), []).append(job)
    groups: list[list[Job]] = []
    for each in alike.values():
        groups += split_evenly(each, -(-len(each) // max(1, max_networks // len(each[0].seeds))))
    return sorted(groups, key=lambda group: jobs.index(group[0]))


def _run_group(
    group: list[Job], store: Store, config: RunConfig, estimates: Estimates, device_name: str, log: Log
) -> bool:
    """Run what is missing of a group, as one run or job by job. Return whether anything was run."""
    if len(group) > 1 and _run_together(group, store, config, estimates, device_name, log):
        return True
    ran = [_run_job(job, store, config, estimates, device_name, log) for job in group]
    return any(ran)


def _run_together(
    group: list[Job], store: Store, config: RunConfig, estimates: Estimates, device_name: str, log: Log
) -> bool:
    """Train the jobs of a group as one run. Return False if they have to run one by one.

    Jobs that have a checkpoint, or that killed a worker before, are left out.
    """
    seeds = list(group[0].seeds)
    claimed = _claim_group(group, seeds, store, config, estimates, device_name)
    try:
        if len(claimed) < 2:
            return False
        outcomes = train_together(
            [declaration for _, declaration in claimed],
            seeds,
            device=config.device,
            progress=config.progress,
            on_epoch=lambda rows: check_deadline(rows, claimed[0][1], config),
            commands=[build_repeat_command(job, config) for job, _ in claimed],
        )
        for (job, declaration), outcome in zip(claimed, outcomes, strict=True):
            record_outcome(job, declaration, seeds, outcome, store, config, log)
    except OutOfTimeError:
        for job, declaration in claimed:
            release_stopped(job, declaration, seeds, store, log)
        return False
    except (StoreError, WriteError):
        raise
    except Exception as error:  # for example too little memory for all of them, but enough for one
        why = str(error).strip().splitlines() or [type(error).__name__]
        log(f"{len(claimed)} runs cannot train as one ({why[0]}); they train one by one.")
        return False
    finally:
        with suppress(StoreError):  # the first error is the more interesting one
            for _, declaration in claimed:
                store.release(declaration, seeds)
    return True


def _claim_group(
    group: list[Job], seeds: list[int], store: Store, config: RunConfig, estimates: Estimates, device_name: str
) -> list[tuple[Job, Declaration]]:
    """Claim the jobs of a group that can train as one run and of which no other process has a part."""
    claimed = []
    deadly = {row.key for row in store.runs() if row.deaths}
    for job in group:
        assert job.declaration is not None
        begun = get_checkpoint_path(config.store, job.declaration, seeds).exists()
        if begun or job.declaration.key in deadly or not can_finish(job, config, estimates, device_name):
            continue
        taken = store.claim(job.declaration, seeds, redo=config.redo)
        if len(taken) == len(seeds):
            claimed.append((job, job.declaration))
        else:
            store.release(job.declaration, taken)
    return claimed


def _run_job(job: Job, store: Store, config: RunConfig, estimates: Estimates, device_name: str, log: Log) -> bool:
    """Run what is missing of one job. Return whether anything was run."""
    if job.declaration is None or job.problem is not None:
        return False
    if not can_finish(job, config, estimates, device_name):
        return False
    seeds = store.claim(job.declaration, job.seeds, redo=config.redo)
    if not seeds:
        return False
    try:
        outcome = _train_job(job, job.declaration, seeds, store, config)
        record_outcome(job, job.declaration, seeds, outcome, store, config, log)
    except LostClaimError as lost:  # while it was training
        log(str(lost))
    except OutOfTimeError:
        release_stopped(job, job.declaration, seeds, store, log)
        return False
    except (DataError, MissingExtraError) as error:  # a fault of this machine, not a result of the run
        store.release(job.declaration, seeds)
        log(f"{job}: not run: {error}")
        return False
    except BaseException:
        with suppress(StoreError):  # the first error is the more interesting one
            store.release(job.declaration, seeds)
        raise
    return True


def record_outcome(
    job: Job, declaration: Declaration, seeds: list[int], outcome: Outcome, store: Store, config: RunConfig, log: Log
) -> None:
    """Write an outcome to the store and remove the checkpoint, unless another runner took over the run."""
    try:
        store.finish(declaration, seeds, outcome)
    except LostClaimError as lost:
        log(str(lost))
        return
    get_checkpoint_path(config.store, declaration, seeds).unlink(missing_ok=True)
    log(f"{job}: {_summarize(outcome, seeds, declaration)}")


def release_stopped(job: Job, declaration: Declaration, seeds: list[int], store: Store, log: Log) -> None:
    """Give up the claim on a run that was stopped at the deadline."""
    store.release(declaration, seeds)
    log(f"{job}: stopped, for the time is up; the same command goes on from here.")


def check_deadline(rows: list[dict[str, Any]], declaration: Declaration, config: RunConfig) -> None:
    """Raise OutOfTimeError if another epoch would end after the deadline.

    Args:
        rows: the history rows of the epoch that has just ended, one for each seed.
        declaration: what is being trained.
        config: holds the deadline.
    """
    longest = max((row["seconds"] for row in rows), default=0.0)
    last = any(row["epoch"] == declaration.epochs for row in rows)
    if config.deadline is not None and not last and time.time() + longest > config.deadline:
        raise OutOfTimeError


def _train_job(job: Job, declaration: Declaration, seeds: list[int], store: Store, config: RunConfig) -> Outcome:
    """Train one job, and record each epoch. An error of the run itself becomes a failed outcome."""

    def on_epoch(rows: list[dict[str, Any]]) -> None:
        store.record(declaration, rows)
        check_deadline(rows, declaration, config)

    try:
        return train(
            declaration,
            seeds,
            checkpoint=get_checkpoint_path(config.store, declaration, seeds),
            device=config.device,
            on_epoch=on_epoch,
            progress=config.progress,
            command=build_repeat_command(job, config),
        )
    except (StoreError, WriteError, CheckpointError, DataError, MissingExtraError, OutOfTimeError):
        raise
    except Exception as error:  # any other error belongs to this run: record it and go on with the others
        return make_failed_outcome(error, seeds, config)


def build_repeat_command(job: Job, config: RunConfig) -> str:
    """Return the command that repeats a run that `apical train` cannot repeat; "" if it can."""
    if not config.command:
        return ""
    part = f"--rules {job.rule} --models {job.model} --data {job.data}"
    return f"{config.command} {part} --epochs {job.epochs} --seeds {format_seeds(job.seeds)}"


def make_failed_outcome(error: Exception, seeds: list[int], config: RunConfig) -> Outcome:
    """Return the outcome of a run that raised an error: no history, and the reason for every seed."""
    lines = str(error).strip().splitlines() or [""]
    why = f"{type(error).__name__}: {lines[0]}"
    facts = {"together": len(seeds), **describe_environment(devices.find_device(config.device))}
    return Outcome([], dict.fromkeys(seeds, why), facts)


def can_finish(job: Job, config: RunConfig, estimates: Estimates, device_name: str) -> bool:
    """Return whether a run is expected to end before the deadline.

    A run that has a checkpoint, or that was never measured, is tried as long as any time is left.
    """
    if config.deadline is None or job.declaration is None:
        return True
    left = config.deadline - time.time()
    estimate = estimates.estimate(job.declaration, len(job.seeds), device_name)
    begun = get_checkpoint_path(config.store, job.declaration, job.seeds).exists()
    return left > 0 and (begun or estimate is None or estimate.seconds <= left)


def _summarize(outcome: Outcome, seeds: list[int], declaration: Declaration) -> str:
    """Return one line about an outcome: its accuracy, finished seeds and time; or why it failed."""
    protocol = declaration.to_dict()["protocol"]
    histories = [[row for row in outcome.history if row["seed"] == seed] for seed in seeds]
    scores = [score for h in histories if h and (score := compute_score(h, protocol)) is not None]
    text = f"{sum(scores) / len(scores):.2f} %" if scores else "recorded"
    if len(outcome.failed) == len(seeds):
        return f"failed ({next(iter(outcome.failed.values()))})"
    seconds = outcome.facts.get("seconds_per_epoch")
    time_ = f"one of {outcome.facts['together']} at once" if seconds is None else f"{seconds:.2f} s per epoch"
    return f"{text}, {len(seeds) - len(outcome.failed)} of {len(seeds)} seeds, {time_}"


@contextmanager
def send_heartbeats(store: Store) -> Iterator[None]:
    """Update the heartbeat of this runner's claims from a thread, which has its own connection."""
    done = threading.Event()

    def send() -> None:
        with Store(store.path) as own:
            own.owner = store.owner
            while not done.wait(LEASE / 6):
                with suppress(StoreError):  # the next one may get through
                    own.update_heartbeat()

    thread = threading.Thread(target=send, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def remove_empty_checkpoint_folder(store: Store) -> None:
    """Remove the folder of checkpoints if nothing is in it."""
    with suppress(OSError):
        get_checkpoint_folder(store.path).rmdir()
