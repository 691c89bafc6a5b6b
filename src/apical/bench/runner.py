"""Run the missing runs of a request in this process: claim, train and record them.

Every epoch is recorded and checkpointed, so that little is lost when a run is interrupted.
"""

import json
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from apical.bench import provenance
from apical.bench.cells import METRICS, group_by
from apical.bench.database import find_begun_seeds, get_checkpoint_path, remove_checkpoint, remove_checkpoints_except
from apical.bench.declaration import Declaration, Request, explain_new_content, load_dataset
from apical.bench.estimate import Estimates
from apical.bench.recording import describe_run, run_and_measure, send_heartbeats
from apical.bench.store import LostClaimError, Outcome, Store, format_timestamp
from apical.bench.suites import Job
from apical.engine import Fit, fit, split_for_sweep, sweep
from apical.engine import checkpoint as checkpoints
from apical.engine import device as devices
from apical.engine.loop import split_evenly
from apical.engine.settings import OnEpoch
from apical.errors import CheckpointError, DataError, MissingExtraError, StoreError, WriteError, describe_error
from apical.printing import print_line


class OutOfTimeError(Exception):
    """The deadline has passed. The run continues from its checkpoint the next time."""


def run_jobs(jobs: list[Job], request: Request) -> None:
    """Claim and run jobs until nothing is left to claim."""
    with open_runner(request) as runner:
        groups, something_ran = group_jobs(jobs, request.together), True
        while something_ran:  # another pass takes up what other processes left behind meanwhile
            ran = [runner.run_group(group) for group in groups]
            something_ran = any(ran)


def group_jobs(jobs: list[Job], max_networks: int) -> list[list[Job]]:
    """Group jobs that can train as one run, at most `max_networks` networks in a group.

    The groups are in the order of their first jobs.
    """
    alike: dict[str, list[Job]] = {}
    for number, job in enumerate(jobs):
        shared: object = number  # a job that cannot run is a group of its own
        if job.declaration is not None and job.problem is None:
            shared = split_for_sweep(job.declaration.to_dict())[0] | {"content": None}  # rules may differ
        alike.setdefault(json.dumps([shared, job.seeds], sort_keys=True), []).append(job)
    groups: list[list[Job]] = []
    for each in alike.values():
        groups += split_evenly(each, -(-len(each) // max(1, max_networks // len(each[0].seeds))))
    return sorted(groups, key=lambda group: jobs.index(group[0]))


class Claim(NamedTuple):
    """Seeds of a job that this process has claimed."""

    job: Job
    declaration: Declaration
    seeds: list[int]


class Runner:
    """Claims, trains and records jobs of a request, with one connection to its store."""

    def __init__(self, request: Request, store: Store) -> None:
        self.request, self.store = request, store
        self.redo = format_timestamp(request.started) if request.redo else None
        self.estimates = Estimates(store.runs())
        self.device_name = devices.describe_device(devices.find_device(request.device))
        self.stopped: set[str] = set()
        """The keys of runs without a checkpoint that the deadline stopped: this runner does not begin them again."""

    def claim(self, job: Job) -> Claim | None:
        """Claim the missing seeds of a job; None if it has none, cannot be run here or would not end in time.

        Seeds that have a checkpoint together are claimed together; another claim takes the rest.
        """
        if job.declaration is None or job.problem is not None or job.declaration.key in self.stopped:
            return None
        begun = find_begun_seeds(self.request.store, job.declaration)
        for seeds in [*(own for own in begun if set(own) <= set(job.seeds)), job.seeds]:
            if claim := self._claim_part(job._replace(seeds=tuple(seeds)), job.declaration):
                return claim
        return None

    def _claim_part(self, job: Job, declaration: Declaration) -> Claim | None:
        if not self.can_finish(job):
            return None
        seeds = self.store.claim(declaration, job.seeds, redo=self.redo)
        if seeds and declaration.content:
            known = [row for row in self.store.runs() if row.key != declaration.key or row.seed not in seeds]
            if why := explain_new_content(declaration, [row.declaration for row in known]):
                print_line(why)
        return Claim(job, declaration, seeds) if seeds else None

    def can_finish(self, job: Job) -> bool:
        """Return whether the missing seeds of a job are expected to end before the deadline.

        A run that has a checkpoint, or that was never measured, is tried as long as any time is left.
        """
        if self.request.deadline is None or job.declaration is None:
            return True
        rows = self.store.runs([job.declaration.key])
        taken = [row.seed for row in rows if row.active or row.is_final(self.request.redo)]
        missing = [seed for seed in job.seeds if seed not in taken]
        left = self.request.deadline - time.time()
        estimate = self.estimates.estimate(job.declaration, len(missing), self.device_name)
        begun = get_checkpoint_path(self.request.store, job.declaration, missing).exists()
        return left > 0 and (begun or estimate is None or estimate.seconds <= left)

    def run_group(self, group: list[Job]) -> bool:
        """Run what is missing of a group, as one run or job by job. Return whether anything was run."""
        try:
            if len(group) > 1 and self._run_together(group):
                return True
        except OutOfTimeError:
            return False
        ran = [self._run_job(job) for job in group]
        return any(ran)

    def _run_together(self, group: list[Job]) -> bool:
        """Train the jobs of a group as one run. Return False if they have to run one by one.

        Jobs that have a checkpoint, or that killed a worker before, are left out. OutOfTimeError leaves all of them to
        another time.
        """
        claims = self._claim_group(group)
        try:
            if len(claims) < 2:
                return False
            for claim, outcome in zip(claims, train_together(claims, self.request), strict=True):
                self.record(claim, outcome)
        except OutOfTimeError:
            for claim in claims:
                self.stopped.add(claim.declaration.key)
                self.release_stopped(claim, "another time it begins anew")
            raise
        except (StoreError, WriteError):
            raise
        except Exception as error:  # for example too little memory for all of them, but enough for one
            why = str(error).strip().splitlines() or [type(error).__name__]
            print_line(f"{len(claims)} runs cannot train as one ({why[0]}); they train one by one.")
            return False
        finally:
            with suppress(StoreError):  # the first error is the more interesting one
                for claim in claims:
                    self.store.release(claim.declaration, claim.seeds)
        return True

    def _claim_group(self, group: list[Job]) -> list[Claim]:
        """Claim the jobs of a group that can train as one run and of which no other process has a part."""
        claims = []
        deadly = {row.key for row in self.store.runs() if row.deaths}
        for job in group:
            assert job.declaration is not None
            if (
                job.declaration.key in deadly
                or get_checkpoint_path(self.request.store, job.declaration, job.seeds).exists()
            ):
                continue
            claim = self.claim(job)
            if claim is not None and len(claim.seeds) == len(job.seeds):
                claims.append(claim)
            elif claim is not None:
                self.store.release(claim.declaration, claim.seeds)
        return claims

    def _run_job(self, job: Job) -> bool:
        """Run what is missing of one job. Return whether anything was run."""
        claim = self.claim(job)
        if claim is None:
            return False
        try:
            self.record(claim, self._train_job(claim))
        except LostClaimError as lost:  # while it was training
            print_line(str(lost))
        except OutOfTimeError:
            self.release_stopped(claim)
            return False
        except (DataError, MissingExtraError) as error:  # a fault of this machine, not a result of the run
            self.store.release(claim.declaration, claim.seeds)
            print_line(f"{job}: not run: {error}")
            return False
        except BaseException:
            with suppress(StoreError):  # the first error is the more interesting one
                self.store.release(claim.declaration, claim.seeds)
            raise
        return True

    def _train_job(self, claim: Claim) -> Outcome:
        """Train one job, and record each epoch. An error of the run itself becomes a failed outcome."""

        def on_epoch(rows: list[dict[str, Any]]) -> None:
            self.store.record(claim.declaration, rows)
            check_deadline(rows, claim.declaration, self.request)

        try:
            return train(claim, self.request, on_epoch)
        except (StoreError, WriteError, CheckpointError, DataError, MissingExtraError, OutOfTimeError):
            raise
        except Exception as error:  # any other error belongs to this run: record it and go on with the others
            return self.make_failed_outcome(error, claim.seeds)

    def record(self, claim: Claim, outcome: Outcome) -> None:
        """Write an outcome to the store and remove the checkpoint, unless another runner took over the run."""
        job, declaration, seeds = claim
        try:
            self.store.finish(declaration, seeds, outcome)
        except LostClaimError as lost:
            print_line(str(lost))
            return
        remove_checkpoint(get_checkpoint_path(self.request.store, declaration, seeds))
        print_line(f"{job}: {_summarize(outcome, seeds, declaration)}")

    def release_stopped(self, claim: Claim, then: str = "the same command goes on from here") -> None:
        """Give up the claim on a run that was stopped at the deadline."""
        self.store.release(claim.declaration, claim.seeds)
        print_line(f"{claim.job}: stopped, for the time is up; {then}.")

    def make_failed_outcome(self, error: Exception, seeds: list[int]) -> Outcome:
        """Return the outcome of a run that raised an error: no history, and the reason for every seed."""
        facts = {"together": len(seeds), **provenance.describe_environment(devices.find_device(self.request.device))}
        return Outcome([], dict.fromkeys(seeds, describe_error(error)), facts)


@contextmanager
def open_runner(request: Request) -> Iterator[Runner]:
    """Open the store of a request, send heartbeats, and remove the checkpoints of finished runs in the end."""
    with Store(request.store, pool=request.pool) as store, send_heartbeats(store):
        yield Runner(request, store)
        remove_checkpoints_except(store.path, store.list_unfinished_keys)


def check_deadline(rows: list[dict[str, Any]], declaration: Declaration, request: Request) -> None:
    """Raise OutOfTimeError if another epoch, after the one with these history rows, would end after the deadline."""
    longest = max((row["seconds"] for row in rows), default=0.0)
    last = any(row["epoch"] == declaration.epochs for row in rows)
    if request.deadline is not None and not last and time.time() + longest > request.deadline:
        raise OutOfTimeError


def _summarize(outcome: Outcome, seeds: list[int], declaration: Declaration) -> str:
    """Return one line about an outcome: its accuracy, finished seeds and time; or why it failed."""
    if len(outcome.failed) == len(seeds):
        return f"failed ({next(iter(outcome.failed.values()))})"
    histories = group_by(outcome.history, lambda row: row["seed"]).values()
    read, protocol = METRICS["accuracy"].read, declaration.to_dict()["protocol"]
    scores = [score for history in histories if (score := read(history, protocol)) is not None]
    text = f"{sum(scores) / len(scores):.2f} %" if scores else "recorded"
    seconds = outcome.facts.get("seconds_per_epoch")
    time_ = f"one of {outcome.facts['together']} at once" if seconds is None else f"{seconds:.2f} s per epoch"
    return f"{text}, {len(seeds) - len(outcome.failed)} of {len(seeds)} seeds, {time_}"


# Training.


def train(claim: Claim, request: Request, on_epoch: OnEpoch) -> Outcome:
    """Train claimed seeds, or continue from their checkpoint if there is one.

    No checkpoint is written after the last epoch, so a run of a single epoch has none. The caller removes the
    checkpoint once it has recorded the outcome.
    """
    job, declaration, seeds = claim
    path = get_checkpoint_path(request.store, declaration, seeds) if declaration.epochs > 1 else None

    def run(record: OnEpoch) -> Fit:
        return fit(
            declaration.model,
            load_dataset(declaration),
            **_collect_fit_keywords(declaration, seeds),
            device=request.device,
            checkpoint=path,
            resume=path is not None and _can_resume(path),
            save_end=False,
            progress=request.progress and sys.stderr.isatty(),
            on_epoch=record,
        )

    command, device = job.build_quick_command(request), devices.find_device(request.device)
    return run_and_measure(run, declaration, seeds, device, path, on_epoch, command)[0]


def train_together(claims: Sequence[Claim], request: Request) -> list[Outcome]:
    """Train several jobs as one run. They have the same seeds and may differ only as the trials of a sweep may.

    The outcomes have no time per epoch, because the time of each job alone is unknown.
    """
    _, first, seeds = claims[0]
    keywords = [_collect_fit_keywords(claim.declaration, seeds) for claim in claims]
    (shared, *_), trials = zip(*map(split_for_sweep, keywords), strict=True)
    fits = sweep(
        first.model,
        load_dataset(first),
        trials,
        **shared,
        device=request.device,
        compile=False,
        progress=request.progress and sys.stderr.isatty(),
        on_epoch=lambda rows: check_deadline(rows, first, request),
    )
    outcomes = []
    for (job, declaration, _), done in zip(claims, fits, strict=True):
        command, device = job.build_quick_command(request), devices.find_device(request.device)
        facts = describe_run(declaration, seeds, command, device) | {"together": len(claims) * len(seeds)}
        outcomes.append(Outcome(done.history, done.failed, facts))
    return outcomes


def _collect_fit_keywords(declaration: Declaration, seeds: Sequence[int]) -> dict[str, Any]:
    """Return the keywords of `fit`, except for the network and the data."""
    apart = ("model", "data", "data_options")
    return {name: value for name, value in declaration.settings(seeds).items() if name not in apart}


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
