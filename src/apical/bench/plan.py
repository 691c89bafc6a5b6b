"""`apical.bench.run`: run a suite and return its tables. `preview`: list what a run would do."""

import shlex
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Self

from apical.bench import suites, workers
from apical.bench.estimate import Estimate, Estimates, format_duration
from apical.bench.runner import RunConfig, log_to_stderr, run_jobs
from apical.bench.store import Row, Store, current_timestamp
from apical.bench.suites import EVERYTHING, QUICK_EXAMPLES, Choice, Job, Suite
from apical.bench.tables import Table, build_tables, load_cells
from apical.bench.words import parse_names, parse_seeds
from apical.engine import device as devices
from apical.errors import ApicalError

Names = Sequence[str] | None

SLOW_RULES = ("pc", "ep", "dtp")
"""Rules of table 1 that iterate, or learn inverses, in every step. They take most of its time."""


@dataclass(frozen=True)
class Plan:
    """A suite, the choice that was made from it, and the jobs that follow."""

    suite: Suite
    choice: Choice
    jobs: list[Job]

    @property
    def runnable(self) -> list[Job]:
        """The jobs that can be run here."""
        return [job for job in self.jobs if job.problem is None]

    @property
    def problems(self) -> list[str]:
        """The reasons why some jobs cannot be run here, each once."""
        return list(dict.fromkeys(job.problem for job in self.jobs if job.problem is not None))

    def tables(self, store: Path) -> list[Table]:
        """Return the tables of the results that a store has now."""
        return self.read_output(store).tables

    def read_output(self, store: Path) -> "BenchOutput":
        """Return the tables, and whether a run of the plan has failed."""
        with Store(store, write=False) as opened:
            found = load_cells(self.jobs, opened)
            made = build_tables(self.suite, found)
        failed = {str(c.job): row.error for c in found for row in c.rows if row.status == "failed"}
        if made and failed:
            made[-1].notes += [f"Failed: {job}: {why}" for job, why in failed.items()]
            made[-1].notes.append("--redo runs again what failed.")
        if made and self.choice.quick:
            made[-1].notes.append(f"A quick run on {QUICK_EXAMPLES} examples: no figure here is a result.")
        return BenchOutput(made, bool(failed))


@dataclass(frozen=True)
class Request(Choice):
    """Everything that a user can ask of the bench: a part of a suite and how to run it. `run` explains the fields."""

    suite: str = "digits"
    store: Path = Path("results.sqlite")
    dry_run: bool = False
    """List what would be run and how long it takes, and run nothing."""
    redo: bool = False
    device: str = "auto"
    limit: float | None = None
    workers: int = 1
    together: int = 1
    ray: bool | str = False
    modules: Sequence[str] = ()
    progress: bool = True

    @classmethod
    def from_command_line(cls, *, rules: Names, models: Names, data: Names, seeds: str | None, **others: Any) -> Self:
        """Make a request from command-line options, where lists of names and seeds are text."""
        return cls(
            rules=parse_names(rules),
            models=parse_names(models),
            data=parse_names(data),
            seeds=None if seeds is None else parse_seeds(seeds),
            **others,
        )


class BenchOutput(NamedTuple):
    """The tables of a request, and whether one of its runs failed: then the command exits with code 1."""

    tables: list[Table]
    failed: bool = False


def plan(suite: str = "digits", choice: Choice = EVERYTHING) -> Plan:
    """Load a suite and list the jobs of the chosen part of it."""
    loaded = suites.load(suite)
    return Plan(loaded, choice, suites.list_jobs(loaded, choice))


def run_request(request: Request) -> BenchOutput:
    """Run the missing runs of a request and return its tables; for a dry run, only list them."""
    chosen = plan(request.suite, request)
    devices.find_device(request.device)  # raises an error for a wrong device before any work
    if request.dry_run:
        return BenchOutput(preview(chosen, request.store, request.device, redo=request.redo))
    _check_request(request)
    config = RunConfig(
        store=request.store.absolute(),
        device=request.device,
        redo=current_timestamp() if request.redo else None,
        deadline=None if request.limit is None else time.time() + request.limit,
        progress=request.progress,
        command=_build_quick_command(request) if request.quick else "",
        together=request.together,
    )
    for problem in chosen.problems:
        log_to_stderr(f"not run: {problem}")
    if request.ray:
        workers.run_on_ray(
            chosen.runnable, config, request.ray if isinstance(request.ray, str) else None, request.modules
        )
    elif request.workers > 1:
        workers.run_in_processes(chosen.runnable, config, request.workers, request.modules)
    else:
        run_jobs(chosen.runnable, config)
    return chosen.read_output(request.store)


def _check_request(request: Request) -> None:
    """Raise ApicalError for options that cannot work, before any run begins."""
    for name in ("workers", "together"):
        if getattr(request, name) < 1:
            raise ApicalError(f"--{name} is {getattr(request, name)}, but must be at least 1.")
    if request.ray and request.together > 1:
        raise ApicalError("--together joins runs on one device; on a cluster (--ray) each has its own.")
    if request.limit is not None and not request.limit > 0:
        raise ApicalError(f"--limit is {request.limit:g}, but must be a positive number of seconds.")
    if request.store.suffix == ".html":
        raise ApicalError(f"the store {request.store} would be overwritten by its page; name it results.sqlite, say.")
    Store(request.store).close()  # raises an error if the file cannot be written


def _build_quick_command(request: Request) -> str:
    """Return the beginning of the command that repeats a quick run; the runner adds the job's own options."""
    imports = [f"--import {shlex.quote(name)}" for name in request.modules]
    settings = [] if request.defaults is None else [f"--defaults {shlex.quote(str(request.defaults))}"]
    return " ".join(["apical", *imports, "bench", shlex.quote(request.suite), "--quick", *settings])


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
    """Run the missing runs of a suite and return its tables.

    Args:
        suite: a name of `apical.bench.suites.list_names()`, or a TOML file.
        store: the SQLite file of the results. Runs that are in it are not run again.
        rules: only these rules of the suite.
        models: only these models of the suite.
        data: only these data sets of the suite.
        seeds: how many seeds, or which, instead of the suite's.
        epochs: how many epochs, instead of the suite's.
        quick: train one epoch of one seed on a few examples, to see that everything works. Never taken for a result.
        defaults: a file like defaults.toml that overrides the recorded settings (with `replace = true`, replaces them).
        redo: run again what failed and what another version of the code computed.
        device: "auto", "cpu", "cuda", …
        limit: seconds after which no epoch begins. Runs that are known to take longer than the time left are not begun.
        workers: the number of processes on this machine.
        together: how many networks may train as one run, if they differ only in rule, loss, rates and options. On a GPU
            this is faster, but the time of a single run is then unknown, and an interrupted run starts again.
        ray: True for a local Ray cluster, or the address of a cluster.
        modules: modules with your own rules, imported by every worker.
        progress: show a progress bar.
    """
    return run_request(
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
        if job.declaration is None:
            time_ = "cannot run"
        elif not self.missing:
            time_ = "failed" if self.failed else "done"
        else:
            time_ = "unmeasured" if self.estimate is None else format_duration(self.estimate.seconds)
        varied = " ".join(f"{name}={value}" for name, value in job.varied.items())
        numbers = [f"{job.epochs}", f"{len(job.seeds)}", f"{self.missing}"]
        device_name = "" if self.estimate is None else self.estimate.device
        return [f"{job.rule} {varied}".strip(), job.model, job.data, *numbers, time_, device_name]


def preview(chosen: Plan, store: Path, device: str = "auto", *, redo: bool = False) -> list[Table]:
    """Return a table of what a run would do: each job's epochs, seeds, missing seeds and estimated time.

    Jobs whose data are missing count, too, since the data can be downloaded.
    """
    rows: list[Row] = []
    if store.is_file():
        with Store(store, write=False) as opened:
            rows = opened.runs()
    ended = {(row.key, row.seed): row.status for row in rows if _is_final(row, redo)}
    estimates, device_name = Estimates(rows), devices.describe_device(devices.find_device(device))
    lines = [_make_preview_line(job, ended, estimates, device_name) for job in chosen.jobs]
    headings = ["rule", "model", "data", "epochs", "seeds", "to do", "time", "measured on"]
    notes = [*_format_totals(lines), *(f"Not run: {problem}" for problem in chosen.problems)]
    return [Table(chosen.suite.title, headings, [line.format_cells() for line in lines], notes)]


def _is_final(row: Row, redo: bool) -> bool:
    """Return whether a run has ended and is not run again."""
    return row.status != "running" and not (redo and row.repeatable)


def _make_preview_line(
    job: Job, ended: dict[tuple[str, int], str], estimates: Estimates, device_name: str
) -> PreviewLine:
    """Return the line of a job, given the status of every run that is final."""
    if job.declaration is None:
        return PreviewLine(job, len(job.seeds), None)
    found = [ended.get((job.declaration.key, seed)) for seed in job.seeds]
    missing = found.count(None)
    known = estimates.estimate(job.declaration, missing, device_name, anywhere=True) if missing else None
    return PreviewLine(job, missing, known, failed="failed" in found)


def _format_totals(lines: list[PreviewLine]) -> list[str]:
    """Return the time of all missing runs, and their time without the slow rules."""
    left = [line for line in lines if line.missing and line.job.declaration]
    if not left:
        return ["Nothing is left to do."]
    light = [line for line in left if line.job.rule.partition(":")[0] not in SLOW_RULES]
    notes = [_format_total("Total", left)]
    if light and len(light) < len(left):
        notes.append(_format_total(f"Without {', '.join(SLOW_RULES)}", light))
    return [*notes, "A run is a line of the table: its seeds train together, and its time is that of all of them."]


def _format_total(name: str, lines: list[PreviewLine]) -> str:
    """Return the total of the estimated times, the devices they were measured on, and how many are unknown."""
    known = [line.estimate for line in lines if line.estimate is not None]
    if not known:
        return f"{name}: unknown, for nothing of it was measured."
    places = ", ".join(dict.fromkeys(estimate.device for estimate in known))
    total = format_duration(sum(estimate.seconds for estimate in known))
    text = f"{name}: {total} for {len(known)} of {len(lines)} runs, measured on {places}"
    unmeasured = len(lines) - len(known)
    return text + (f"; {unmeasured} more unmeasured and not in it." if unmeasured else ".")
