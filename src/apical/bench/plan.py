"""`apical.bench.run`: a suite from its name to its tables; and what it would take."""

import shlex
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Self

from apical.bench import suites, workers
from apical.bench.estimate import Estimate, Estimates, told
from apical.bench.runner import Orders, say, work
from apical.bench.store import Row, Store, now
from apical.bench.suites import EVERYTHING, QUICK, Choice, Job, Suite
from apical.bench.tables import Table, cells, tables
from apical.bench.words import parse_names, parse_seeds
from apical.engine import device as devices
from apical.errors import ApicalError

Names = Sequence[str] | None

SETTLING = ("pc", "ep", "dtp")
"""Rules of table 1 that settle or learn inverses in every step, and take most of its time."""


@dataclass(frozen=True)
class Plan:
    """A suite and its jobs as they were asked for."""

    suite: Suite
    choice: Choice
    jobs: list[Job]

    @property
    def runnable(self) -> list[Job]:
        return [job for job in self.jobs if job.problem is None]

    @property
    def problems(self) -> list[str]:
        """Why some jobs cannot be run here, one sentence for each reason."""
        return list(dict.fromkeys(job.problem for job in self.jobs if job.problem is not None))

    def tables(self, store: Path) -> list[Table]:
        """What a store holds of it now."""
        return self.held(store).tables

    def held(self, store: Path) -> "Answer":
        """The same, and whether a run that was asked for has failed."""
        with Store(store, write=False) as opened:
            found = cells(self.jobs, opened)
            made = tables(self.suite, found)
        failed = {str(c.job): row.error for c in found for row in c.rows if row.status == "failed"}
        if made and failed:
            made[-1].notes += [f"Failed: {job}: {why}" for job, why in failed.items()]
            made[-1].notes.append("--redo runs again what failed.")
        if made and self.choice.quick:
            made[-1].notes.append(f"A quick run on {QUICK} examples: no figure here is a result.")
        return Answer(made, bool(failed))


@dataclass(frozen=True)
class Request(Choice):
    """All that the bench can be asked for: a part of a suite, and how to run it. `run` says what each word means."""

    suite: str = "digits"
    store: Path = Path("results.sqlite")
    dry_run: bool = False
    """Say what would be done and how long it takes, and do nothing."""
    redo: bool = False
    device: str = "auto"
    limit: float | None = None
    workers: int = 1
    together: int = 1
    ray: bool | str = False
    modules: Sequence[str] = ()
    progress: bool = True

    @classmethod
    def of_words(cls, *, rules: Names, models: Names, data: Names, seeds: str | None, **others: Any) -> Self:
        """What a command line says: there, names and seeds are texts."""
        return cls(
            rules=parse_names(rules),
            models=parse_names(models),
            data=parse_names(data),
            seeds=None if seeds is None else parse_seeds(seeds),
            **others,
        )


class Answer(NamedTuple):
    """Tables, and whether a run that was asked for has failed: a command ends with code 1 then."""

    tables: list[Table]
    failed: bool = False


def plan(suite: str = "digits", choice: Choice = EVERYTHING) -> Plan:
    """Read a suite and choose from it."""
    loaded = suites.load(suite)
    return Plan(loaded, choice, suites.jobs(loaded, choice))


def answer(asked: Request) -> Answer:
    """Run what is missing of what was asked for; or, in a dry run, say what that is."""
    chosen = plan(asked.suite, asked)
    devices.find_device(asked.device)  # a wrong one is told before the work
    if asked.dry_run:
        return Answer(preview(chosen, asked.store, asked.device, redo=asked.redo))
    for name in ("workers", "together"):
        if getattr(asked, name) < 1:
            raise ApicalError(f"--{name} is {getattr(asked, name)}, but must be at least 1.")
    if asked.ray and asked.together > 1:
        raise ApicalError("--together joins runs on one device; on a cluster (--ray) each has its own.")
    if asked.limit is not None and not asked.limit > 0:
        raise ApicalError(f"--limit is {asked.limit:g}, but must be a positive number of seconds.")
    if asked.store.suffix == ".html":
        raise ApicalError(
            f"the store {asked.store} would be overwritten by its page; name it results.sqlite, say."
        )
    Store(asked.store).close()  # one that cannot be written is told before the work, too
    orders = Orders(
        store=asked.store.absolute(),
        device=asked.device,
        redo=now() if asked.redo else None,
        deadline=None if asked.limit is None else time.time() + asked.limit,
        progress=asked.progress,
        command=_quick(asked) if asked.quick else "",
        together=asked.together,
    )
    for problem in chosen.problems:
        say(f"not run: {problem}")
    if asked.ray:
        workers.cluster(
            chosen.runnable, orders, asked.ray if isinstance(asked.ray, str) else None, asked.modules
        )
    elif asked.workers > 1:
        workers.processes(chosen.runnable, orders, asked.workers, asked.modules)
    else:
        work(chosen.runnable, orders)
    return chosen.held(asked.store)


def _quick(asked: Request) -> str:
    """The command that repeats a quick run, up to what is said of a single one."""
    imports = [f"--import {shlex.quote(name)}" for name in asked.modules]
    settings = [] if asked.defaults is None else [f"--defaults {shlex.quote(str(asked.defaults))}"]
    return " ".join(["apical", *imports, "bench", shlex.quote(asked.suite), "--quick", *settings])


def run(
    suite: str = "digits",
    *,
    store: str | Path = "results.sqlite",
    rules: Sequence[str] | None = None,
    models: Sequence[str] | None = None,
    data: Sequence[str] | None = None,
    seeds: int | Sequence[int] | None = None,
    epochs: int | None = None,
    quick: bool = False,
    defaults: str | Path | None = None,
    redo: bool = False,
    device: str = "auto",
    limit: float | None = None,
    workers: int = 1,
    together: int = 1,
    ray: bool | str = False,
    modules: Sequence[str] = (),
    progress: bool = True,
) -> list[Table]:
    """Run what is missing of a suite, and return its tables.

    suite: a name of `apical.bench.suites.names()`, or a TOML file.
    store: the SQLite file of the results; runs that are in it are not run again, unless `redo`: then what failed and
        what another version of the code computed.
    rules, models, data, seeds, epochs: a part of the suite, or other seeds and epochs than it says.
    quick: one epoch of one seed on a few examples, to see that everything works; never taken for a result.
    defaults: a file like defaults.toml over the recorded settings (with `replace = true`, in their place).
    limit: seconds after which no epoch begins; runs that are known to take longer than what is left are not begun.
    together: how many networks may train as one run, of lines that differ in rule, loss, rates and options alone: on a GPU
        the suite is done sooner, but what a line takes alone is not known, and one that is interrupted begins anew.
    workers: processes on this machine. ray: True for a local Ray cluster, or the address of one.
    modules: modules with rules of your own, imported by every worker.
    """
    return answer(
        Request(
            suite=suite,
            store=Path(store),
            rules=rules,
            models=models,
            data=data,
            seeds=seeds,
            epochs=epochs,
            quick=quick,
            defaults=defaults,
            redo=redo,
            device=device,
            limit=limit,
            workers=workers,
            together=together,
            ray=ray,
            modules=modules,
            progress=progress,
        )
    ).tables


class Line(NamedTuple):
    """A job of a dry run: how many of its seeds are missing, and how long they take, where anybody knows.

    What failed is not missing, unless it is to be done again.
    """

    job: Job
    missing: int
    estimate: Estimate | None
    failed: bool = False

    def text(self) -> list[str]:
        job = self.job
        if job.declaration is None:
            time_ = "cannot run"
        elif not self.missing:
            time_ = "failed" if self.failed else "done"
        else:
            time_ = "unmeasured" if self.estimate is None else told(self.estimate.seconds)
        varied = " ".join(f"{name}={value}" for name, value in job.varied.items())
        numbers = [f"{job.epochs}", f"{len(job.seeds)}", f"{self.missing}"]
        place = "" if self.estimate is None else self.estimate.device
        return [f"{job.rule} {varied}".strip(), job.model, job.data, *numbers, time_, place]


def preview(chosen: Plan, store: Path, device: str = "auto", *, redo: bool = False) -> list[Table]:
    """What a run would do: every job, its epochs and seeds, what is missing of it, and how long that takes.

    Runs whose data are not here count, too: they can be had.
    """
    rows: list[Row] = []
    if store.is_file():
        with Store(store, write=False) as opened:
            rows = opened.runs()
    ended = {(row.key, row.seed): row.status for row in rows if _stays(row, redo)}
    estimates, place = Estimates(rows), devices.describe_device(devices.find_device(device))
    lines = [_line(job, ended, estimates, place) for job in chosen.jobs]
    headings = ["rule", "model", "data", "epochs", "seeds", "to do", "time", "measured on"]
    notes = [*_totals(lines), *(f"Not run: {problem}" for problem in chosen.problems)]
    return [Table(chosen.suite.title, headings, [line.text() for line in lines], notes)]


def _stays(row: Row, redo: bool) -> bool:
    """Whether a run has ended and is not done again."""
    return row.status != "running" and not (redo and row.repeatable)


def _line(job: Job, ended: dict[tuple[str, int], str], estimates: Estimates, place: str) -> Line:
    if job.declaration is None:
        return Line(job, len(job.seeds), None)
    found = [ended.get((job.declaration.key, seed)) for seed in job.seeds]
    missing = found.count(None)
    known = estimates.of(job.declaration, missing, place, anywhere=True) if missing else None
    return Line(job, missing, known, failed="failed" in found)


def _totals(lines: list[Line]) -> list[str]:
    """The time of what is to do, and once more without the rules that settle."""
    left = [line for line in lines if line.missing and line.job.declaration]
    if not left:
        return ["Nothing is left to do."]
    light = [line for line in left if line.job.rule.partition(":")[0] not in SETTLING]
    notes = [_total("Total", left)]
    if light and len(light) < len(left):
        notes.append(_total(f"Without {', '.join(SETTLING)}", light))
    return [
        *notes,
        "A run is a line of the table: its seeds train together, and its time is that of all of them.",
    ]


def _total(name: str, lines: list[Line]) -> str:
    """The sum of what was measured and where that was, and how much of it all was not."""
    known = [line.estimate for line in lines if line.estimate is not None]
    if not known:
        return f"{name}: unknown, for nothing of it was measured."
    places = ", ".join(dict.fromkeys(estimate.device for estimate in known))
    total = told(sum(estimate.seconds for estimate in known))
    text = f"{name}: {total} for {len(known)} of {len(lines)} runs, measured on {places}"
    unmeasured = len(lines) - len(known)
    return text + (f"; {unmeasured} more unmeasured and not in it." if unmeasured else ".")
