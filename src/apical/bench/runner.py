"""Run what is missing of a suite, in this process: claim, train, record, and lose little whatever happens."""

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
from apical.bench.store import LostClaimError, Outcome, Store, checkpoint_of, checkpoints_of, score_of
from apical.bench.suites import Job
from apical.bench.training import about, together, train
from apical.bench.words import seeds_text
from apical.engine import device as devices
from apical.engine import for_sweep
from apical.engine.loop import even
from apical.errors import CheckpointError, DataError, MissingExtraError, StoreError, WriteError

Say = Callable[[str], None]


class OutOfTimeError(Exception):
    """The time is up; the run goes on from its checkpoint another time."""


@dataclass(frozen=True)
class Orders:
    """How a suite is run."""

    store: Path
    device: str = "auto"
    redo: str | None = None
    """A time as in the store: what failed or is old, and was finished before it, is done again."""
    deadline: float | None = None
    """A time of `time.time()` after which no epoch begins."""
    progress: bool = True
    command: str = ""
    """What repeats a run of the suite, where `apical train` cannot."""
    pool: str = ""
    """The pool of workers that whoever works belongs to."""
    together: int = 1
    """How many networks may train as one run, of jobs that differ as the trials of a sweep may."""


def say(text: str) -> None:
    """One line for whoever watches; results themselves go to the store."""
    sys.stderr.write(f"{text}\n")  # at once, or the lines of two processes would mix
    sys.stderr.flush()


def work(jobs: list[Job], orders: Orders, say: Say = say) -> None:
    """Claim and run jobs until nothing is left to claim."""
    with Store(orders.store, pool=orders.pool) as store, heartbeat(store):
        estimates = Estimates(store.runs())
        place = devices.describe_device(devices.find_device(orders.device))
        parts, left = teams(jobs, orders.together), True
        while left:  # a second look takes up what others left behind meanwhile
            tried = [_tried(team, store, orders, estimates, place, say) for team in parts]
            left = any(tried)
        tidy(store)


def teams(jobs: list[Job], most: int) -> list[list[Job]]:
    """Jobs that can train as one run, in teams of up to so many networks, in the order of the first of each."""
    alike: dict[str, list[Job]] = {}
    for number, job in enumerate(jobs):
        frame: object = number  # one that cannot run is a team of its own
        if job.declaration is not None and job.problem is None:
            frame = for_sweep(job.declaration.to_dict())[0]
        alike.setdefault(json.dumps([frame, job.seeds], sort_keys=True), []).append(job)
    found: list[list[Job]] = []
    for each in alike.values():
        found += even(each, -(-len(each) // max(1, most // len(each[0].seeds))))
    return sorted(found, key=lambda team: jobs.index(team[0]))


def _tried(team: list[Job], store: Store, orders: Orders, estimates: Estimates, place: str, say: Say) -> bool:
    """Run what is missing of a team, as one run or one by one; whether there was anything that could be done."""
    if len(team) > 1 and _together(team, store, orders, estimates, place, say):
        return True
    tried = [_attempt(job, store, orders, estimates, place, say) for job in team]
    return any(tried)


def _together(
    team: list[Job], store: Store, orders: Orders, estimates: Estimates, place: str, say: Say
) -> bool:
    """Train a team as one run: those of it of which nothing was done yet, and which took no worker down."""
    seeds, held = list(team[0].seeds), []
    deadly = {row.key for row in store.runs() if row.deaths}
    for job in team:
        assert job.declaration is not None
        begun = checkpoint_of(orders.store, job.declaration, seeds).exists()
        if begun or job.declaration.key in deadly or not fits(job, orders, estimates, place):
            continue
        claimed = store.claim(job.declaration, seeds, redo=orders.redo)
        if len(claimed) == len(seeds):
            held.append((job, job.declaration))
        else:  # one by one what others have a part of
            store.release(job.declaration, claimed)
    try:
        if len(held) < 2:
            return False
        outcomes = together(
            [declaration for _, declaration in held],
            seeds,
            device=orders.device,
            progress=orders.progress,
            on_epoch=lambda rows: in_time(rows, held[0][1], orders),
            commands=[command_of(job, orders) for job, _ in held],
        )
        for (job, declaration), outcome in zip(held, outcomes, strict=True):
            settle(job, declaration, seeds, outcome, store, orders, say)
    except OutOfTimeError:
        for job, declaration in held:
            out_of_time(job, declaration, seeds, store, say)
        return False
    except (StoreError, WriteError):
        raise
    except Exception as error:  # memory for one is not memory for all
        why = str(error).strip().splitlines() or [type(error).__name__]
        say(f"{len(held)} runs cannot train as one ({why[0]}); they train one by one.")
        return False
    finally:
        with suppress(StoreError):  # what went wrong is more interesting
            for _, declaration in held:
                store.release(declaration, seeds)
    return True


def _attempt(job: Job, store: Store, orders: Orders, estimates: Estimates, place: str, say: Say) -> bool:
    """Run what is missing of one job; whether there was anything that could be done."""
    if job.declaration is None or job.problem is not None:
        return False
    if not fits(job, orders, estimates, place):
        return False
    seeds = store.claim(job.declaration, job.seeds, redo=orders.redo)
    if not seeds:
        return False
    try:
        outcome = _trained(job, job.declaration, seeds, store, orders)
        settle(job, job.declaration, seeds, outcome, store, orders, say)
    except LostClaimError as lost:  # in the middle of it
        say(str(lost))
    except OutOfTimeError:
        out_of_time(job, job.declaration, seeds, store, say)
        return False
    except (DataError, MissingExtraError) as error:  # not the run's fault, and no result of it
        store.release(job.declaration, seeds)
        say(f"{job}: not run: {error}")
        return False
    except BaseException:
        with suppress(StoreError):  # what went wrong is more interesting
            store.release(job.declaration, seeds)
        raise
    return True


def settle(
    job: Job,
    declaration: Declaration,
    seeds: list[int],
    outcome: Outcome,
    store: Store,
    orders: Orders,
    say: Say,
) -> None:
    """Write an outcome down, if the run is still ours; the checkpoint has served its purpose."""
    try:
        store.finish(declaration, seeds, outcome)
    except LostClaimError as lost:
        say(str(lost))
        return
    checkpoint_of(orders.store, declaration, seeds).unlink(missing_ok=True)
    say(f"{job}: {_summary(outcome, seeds, declaration)}")


def out_of_time(job: Job, declaration: Declaration, seeds: list[int], store: Store, say: Say) -> None:
    """Give back a run that was stopped."""
    store.release(declaration, seeds)
    say(f"{job}: stopped, for the time is up; the same command goes on from here.")


def in_time(rows: list[dict[str, Any]], declaration: Declaration, orders: Orders) -> None:
    """Stop after these rows' epoch where another would not end in time."""
    longest = max((row["seconds"] for row in rows), default=0.0)
    last = any(row["epoch"] == declaration.epochs for row in rows)
    if orders.deadline is not None and not last and time.time() + longest > orders.deadline:
        raise OutOfTimeError


def _trained(job: Job, declaration: Declaration, seeds: list[int], store: Store, orders: Orders) -> Outcome:
    def on_epoch(rows: list[dict[str, Any]]) -> None:
        store.record(declaration, rows)
        in_time(rows, declaration, orders)

    try:
        return train(
            declaration,
            seeds,
            checkpoint=checkpoint_of(orders.store, declaration, seeds),
            device=orders.device,
            on_epoch=on_epoch,
            progress=orders.progress,
            command=command_of(job, orders),
        )
    except (StoreError, WriteError, CheckpointError, DataError, MissingExtraError, OutOfTimeError):
        raise
    except Exception as error:  # whatever it is, it is this run's: it is written down, and the others go on
        return failure(error, seeds, orders)


def command_of(job: Job, orders: Orders) -> str:
    """What repeats a run that `apical train` cannot; nothing where it can."""
    if not orders.command:
        return ""
    part = f"--rules {job.rule} --models {job.model} --data {job.data}"
    return f"{orders.command} {part} --epochs {job.epochs} --seeds {seeds_text(job.seeds)}"


def failure(error: Exception, seeds: list[int], orders: Orders) -> Outcome:
    """The outcome of a run that could not be done."""
    lines = str(error).strip().splitlines() or [""]
    why = f"{type(error).__name__}: {lines[0]}"
    facts = {"together": len(seeds), **about(devices.find_device(orders.device))}
    return Outcome([], dict.fromkeys(seeds, why), facts)


def fits(job: Job, orders: Orders, estimates: Estimates, place: str) -> bool:
    """Whether a run would end in time, as far as anybody knows; one that was begun, or never measured, is tried."""
    if orders.deadline is None or job.declaration is None:
        return True
    left = orders.deadline - time.time()
    estimate = estimates.of(job.declaration, len(job.seeds), place)
    begun = checkpoint_of(orders.store, job.declaration, job.seeds).exists()
    return left > 0 and (begun or estimate is None or estimate.seconds <= left)


def _summary(outcome: Outcome, seeds: list[int], declaration: Declaration) -> str:
    protocol = declaration.to_dict()["protocol"]
    histories = [[row for row in outcome.history if row["seed"] == seed] for seed in seeds]
    scores = [score for h in histories if h and (score := score_of(h, protocol)) is not None]
    text = f"{sum(scores) / len(scores):.2f} %" if scores else "recorded"
    if len(outcome.failed) == len(seeds):
        return f"failed ({next(iter(outcome.failed.values()))})"
    seconds = outcome.facts.get("seconds_per_epoch")
    time_ = f"one of {outcome.facts['together']} at once" if seconds is None else f"{seconds:.2f} s per epoch"
    return f"{text}, {len(seeds) - len(outcome.failed)} of {len(seeds)} seeds, {time_}"


@contextmanager
def heartbeat(store: Store) -> Iterator[None]:
    """A thread that says every now and then that this runner lives, through a connection of its own."""
    done = threading.Event()

    def beat() -> None:
        with Store(store.path) as own:
            own.owner = store.owner
            while not done.wait(LEASE / 6):
                with suppress(StoreError):  # the next one may get through
                    own.beat()

    thread = threading.Thread(target=beat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def tidy(store: Store) -> None:
    """Remove the folder of checkpoints once nothing is in it."""
    with suppress(OSError):
        checkpoints_of(store.path).rmdir()
