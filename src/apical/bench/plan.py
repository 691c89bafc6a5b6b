"""`apical.bench.run`: a suite from its name to its tables; and what it would take."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from apical.bench import suites, workers
from apical.bench.defaults import with_file
from apical.bench.estimate import Estimates, told
from apical.bench.runner import Orders, say, work
from apical.bench.store import Row, Store, now
from apical.bench.suites import Choice, Job, Suite
from apical.bench.tables import Table, cells, tables
from apical.engine import machine
from apical.engine.settings import seed_list
from apical.errors import ApicalError

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
        with Store(store, write=False) as opened:
            return tables(self.suite, cells(self.jobs, opened))

    def failed(self, store: Path) -> bool:
        """Whether a run that was asked for has failed; its tables say which. A command ends with code 1 then."""
        asked = {(job.declaration.key, seed) for job in self.jobs if job.declaration for seed in job.seeds}
        with Store(store, write=False) as opened:
            return any(row.status == "failed" and (row.key, row.seed) in asked for row in opened.runs())


def plan(
    suite: str = "digits",
    *,
    rules: Sequence[str] | None = None,
    models: Sequence[str] | None = None,
    data: Sequence[str] | None = None,
    seeds: int | Sequence[int] | None = None,
    epochs: int | None = None,
    quick: bool = False,
    defaults: str | Path | None = None,
) -> Plan:
    """Read a suite and choose from it; see `run`."""
    if seeds is not None:
        seed_list(seeds)
    table = None if defaults is None else with_file(Path(defaults))
    choice = Choice(rules, models, data, seeds, epochs, quick, table)
    loaded = suites.load(suite)
    return Plan(loaded, choice, suites.jobs(loaded, choice))


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
    checkpoint_every: float = 0.0,
    workers: int = 1,
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
    checkpoint_every: seconds between the checkpoints of a run; by default one is written after every epoch.
    workers: processes on this machine. ray: True for a local Ray cluster, or the address of one.
    modules: modules with rules of your own, imported by every worker.
    """
    chosen = plan(
        suite,
        rules=rules,
        models=models,
        data=data,
        seeds=seeds,
        epochs=epochs,
        quick=quick,
        defaults=defaults,
    )
    return execute(
        chosen,
        Path(store),
        redo=redo,
        device=device,
        limit=limit,
        checkpoint_every=checkpoint_every,
        workers=workers,
        ray=ray,
        modules=modules,
        progress=progress,
    )


def execute(
    chosen: Plan,
    store: Path,
    *,
    redo: bool = False,
    device: str = "auto",
    limit: float | None = None,
    checkpoint_every: float = 0.0,
    workers: int = 1,
    ray: bool | str = False,
    modules: Sequence[str] = (),
    progress: bool = True,
) -> list[Table]:
    """Run what is missing of a plan."""
    machine.device(device)  # a wrong one is told before the work
    if workers < 1:
        raise ApicalError(f"--workers is {workers}, but must be at least 1.")
    if limit is not None and limit <= 0:
        raise ApicalError(f"--limit is {limit:g}, but must be a positive number of seconds.")
    Store(store).close()  # and so is a store that cannot be written
    orders = Orders(
        store=store.absolute(),
        device=device,
        redo=now() if redo else None,
        deadline=None if limit is None else time.time() + limit,
        checkpoint_every=checkpoint_every,
        progress=progress,
        command=f"apical bench {chosen.suite.name} --quick" if chosen.choice.quick else "",
    )
    for problem in chosen.problems:
        say(f"not run: {problem}")
    _spread(chosen.runnable, orders, workers, ray, modules)
    return chosen.tables(store)


def _spread(jobs: list[Job], orders: Orders, count: int, ray: bool | str, modules: Sequence[str]) -> None:
    if ray:
        workers.cluster(jobs, orders, ray if isinstance(ray, str) else None, modules)
    elif count > 1:
        workers.processes(jobs, orders, count, modules)
    else:
        work(jobs, orders)


def preview(chosen: Plan, store: Path, device: str = "auto") -> list[Table]:
    """What a run would do: every job, its epochs and seeds, what is missing of it, and how long that takes.

    Runs whose data are not here count, too: they can be had.
    """
    rows: list[Row] = []
    if store.is_file():
        with Store(store, write=False) as opened:
            rows = opened.runs()
    done = {(row.key, row.seed) for row in rows if row.status == "done"}
    estimates = Estimates(rows)
    place = machine.title(machine.device(device))
    lines: list[list[str]] = []
    seconds: dict[int, float | None] = {}
    for job in chosen.jobs:
        key = job.declaration.key if job.declaration else ""
        left = [seed for seed in job.seeds if (key, seed) not in done]
        known = (
            estimates.of(job.declaration, len(left), place, anywhere=True)
            if job.declaration and left
            else None
        )
        if left and job.declaration:
            seconds[len(lines)] = None if known is None else known.seconds
        time_ = "done" if not left else "unmeasured" if known is None else told(known.seconds)
        varied = " ".join(f"{name}={value}" for name, value in job.varied.items())
        lines.append(
            [
                f"{job.rule} {varied}".strip(),
                job.model,
                job.data,
                f"{job.epochs}",
                f"{len(job.seeds)}",
                f"{len(left)}",
                time_ if job.declaration else "cannot run",
                "" if known is None else known.device,
            ]
        )
    headings = ["rule", "model", "data", "epochs", "seeds", "to do", "time", "measured on"]
    notes = [*_totals(chosen.jobs, seconds), *(f"Not run: {problem}" for problem in chosen.problems)]
    return [Table(chosen.suite.title, headings, lines, notes)]


def _totals(jobs: list[Job], seconds: dict[int, float | None]) -> list[str]:
    """The sum of what was measured, and how much was not; once more without the rules that settle."""
    texts = []
    for name, without in (("Total", ()), (f"Without {', '.join(SETTLING)}", SETTLING)):
        wanted = [
            value for line, value in seconds.items() if jobs[line].rule.partition(":")[0] not in without
        ]
        known = [value for value in wanted if value is not None]
        text = f"{name}: {told(sum(known))} for {len(known)} of {len(wanted)} runs of all their seeds"
        unmeasured = len(wanted) - len(known)
        texts.append(text + (f"; {unmeasured} are unmeasured." if unmeasured else "."))
        if len(wanted) == len(seconds) and without:
            texts.pop()  # there was none of them
    return texts
