"""`apical.bench.run`: run a request in this process, in several, or on a Ray cluster.

A worker that dies does not stop the others.
"""

import importlib
import multiprocessing
import os
import signal
import socket
import sys
import threading
import time
import uuid
from dataclasses import replace
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

from apical.bench import provenance, suites
from apical.bench.cells import Table
from apical.bench.declaration import Request
from apical.bench.defaults import check_names
from apical.bench.estimate import preview
from apical.bench.runner import Claim, OutOfTimeError, Runner, check_deadline, open_runner, run_jobs, train
from apical.bench.store import MAX_DEATHS, Outcome, Store
from apical.bench.suites import Job
from apical.bench.tables import make_tables
from apical.engine import device as devices
from apical.errors import ApicalError
from apical.extras import import_extra
from apical.printing import print_error, print_line

EXIT_FATAL = 3
"""The exit code of a worker that met an error which every other worker would meet, too, such as a full disk."""


def run(suite: str = "digits", **options: Any) -> list[Table]:
    """Run the missing runs of a suite and return its tables.

    Args:
        suite: a name of `apical.bench.suites.list_names()`, or a TOML file.
        options: the options of `apical bench`, with underscores (`apical bench --help` explains them): store, rules,
            models, data, seeds, epochs, quick, dry_run, defaults, redo, limit, workers, together, ray and device. Names
            and seeds are lists. Also `modules`, names of modules with your own rules, which every worker imports, and
            `progress`, whether to show a progress bar.
    """
    known = [name for name in Request.__dataclass_fields__ if name not in ("suite", "started", "pool")]
    check_names(options, known, "apical.bench.run")
    paths = {name: Path(options[name]) for name in ("store", "defaults") if options.get(name) is not None}
    return run_request(Request(suite=suite, **{**options, **paths}))[0]


def run_request(request: Request) -> tuple[list[Table], bool]:
    """Run the missing runs of a request; for a dry run, only list them.

    Returns:
        The tables, and whether one of its runs failed: then the command exits with code 1.
    """
    jobs = suites.list_jobs(suites.load(request.suite), request)
    devices.find_device(request.device)  # raises an error for a wrong device before any work
    if request.dry_run:
        return [preview(request, times_steps=True)], False
    request.check()
    Store(request.store).close()  # raises an error if the file cannot be written
    for problem in dict.fromkeys(job.problem for job in jobs if job.problem is not None):
        print_line(f"not run: {problem}")
    begun = replace(request, store=request.store.absolute(), started=time.time())
    runnable = [job for job in jobs if job.problem is None]
    if request.ray:
        run_on_ray(runnable, begun)
    elif request.workers > 1:
        run_in_processes(runnable, begun)
    else:
        run_jobs(runnable, begun)
    with Store(request.store, write=False) as store:
        return make_tables(request, store)


def run_in_processes(jobs: list[Job], request: Request) -> None:
    """Run jobs in `request.workers` processes that share the store. A worker that dies is recorded and replaced.

    This always ends: a run that killed three workers counts as failed, and workers that keep dying before they have
    claimed a run raise an error.
    """
    spawn = multiprocessing.get_context("spawn")
    request = replace(request, progress=False, pool=uuid.uuid4().hex[:8])

    def start() -> BaseProcess:
        process = spawn.Process(target=_run_worker, args=(jobs, request))
        process.start()
        process.name = provenance.describe_process(process.pid or 0, request.pool)
        return process

    workers = [start() for _ in range(request.workers)]
    idle_deaths = 0
    before = _set_sigterm_handler(lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        while workers:
            wait([process.sentinel for process in workers])
            for process in [p for p in workers if p.exitcode is not None]:
                workers.remove(process)
                if process.exitcode == EXIT_FATAL:
                    raise ApicalError("a worker could not go on (see above), so all of them were stopped.")
                if process.exitcode:
                    held = _record_death(process, request.store)
                    idle_deaths += not held
                    if idle_deaths >= MAX_DEATHS:
                        raise ApicalError("workers die before they begin; --workers 1 shows why.")
                    workers.append(start())
    finally:
        for process in workers:
            process.terminate()
        for process in workers:
            process.join()
        _set_sigterm_handler(before)


def _set_sigterm_handler(handler: Any) -> Any:
    """Set the handler of SIGTERM and return the one before. Only the main thread may set it."""
    if threading.current_thread() is threading.main_thread():
        return signal.signal(signal.SIGTERM, handler)
    return signal.getsignal(signal.SIGTERM)


def _record_death(process: BaseProcess, path: Path) -> int:
    """Record the death of a worker in the store. Return how many runs it held."""
    code = process.exitcode or 0
    names = {each.value: each.name for each in signal.Signals}  # real-time signals have none
    ended = f"the system ended it with {names.get(-code, f'signal {-code}')}"
    why = ended if code < 0 else f"it ended with code {code}"
    with Store(path) as store:
        held = store.record_process_death(process.name, why)
    print_line(
        f"a worker died: {why}; of the {held} runs that it held, those that took down fewer than three are taken up again."
    )
    return held


def _run_worker(jobs: list[Job], request: Request) -> None:
    """Run jobs in a worker process. Each worker uses its share of the CPU threads, so that they do not compete."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    parent = multiprocessing.parent_process()
    assert parent is not None

    def exit_with_parent() -> None:
        """End this worker, too, when its parent process ends. That releases its claims."""
        parent.join()
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=exit_with_parent, daemon=True).start()
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // request.workers))
    try:
        for name in request.modules:
            importlib.import_module(name)
        run_jobs(jobs, request)
    except ApicalError as error:
        print_error(error)
        sys.exit(EXIT_FATAL)


def run_on_ray(jobs: list[Job], request: Request) -> None:
    """Run jobs on a Ray cluster: this process claims and records, the tasks of the cluster train."""
    address = request.ray if isinstance(request.ray, str) else None
    ray = import_extra("ray", "--ray", "ray")
    started = not ray.is_initialized()
    if started:
        try:
            _check_address(address)
            ray.init(address=address, logging_level="warning", log_to_driver=False)
        except (OSError, RuntimeError, ValueError) as error:
            reason = str(error).strip().splitlines()[0]
            raise ApicalError(f"no Ray cluster can be used at {address or 'this machine'} ({reason}).") from error
    try:
        with open_runner(replace(request, progress=False)) as runner:
            _run_tasks(ray, jobs, runner)
    finally:
        if started:
            ray.shutdown()


def _check_address(address: str | None) -> None:
    """Raise OSError if nothing listens at HOST:PORT. Ray itself would retry for minutes."""
    host, _, port = (address or "").removeprefix("ray://").rpartition(":")
    if host and port.isdigit():
        socket.create_connection((host, int(port)), timeout=10).close()


def _run_tasks(ray: Any, jobs: list[Job], runner: Runner) -> None:
    """Keep every slot of the cluster busy with a task until nothing is left to claim."""
    request, resources = runner.request, ray.cluster_resources()
    gpus = int(resources.get("GPU", 0)) if request.device != "cpu" else 0
    slots = gpus or max(1, int(resources.get("CPU", 1)))
    task = ray.remote(max_retries=0, num_gpus=1 if gpus else 0, num_cpus=0 if gpus else 1)(_run_task)
    in_flight: dict[Any, Claim] = {}
    try:
        while True:
            for job in jobs:
                if len(in_flight) >= slots:
                    break
                if claim := runner.claim(job):
                    in_flight[task.remote(claim, request, sys.path)] = claim
            if not in_flight:
                return
            (ended,), _ = ray.wait(list(in_flight), num_returns=1)
            _collect_task(ray, ended, in_flight.pop(ended), runner)
    finally:
        for claim in in_flight.values():
            runner.store.release(claim.declaration, claim.seeds)


def _collect_task(ray: Any, ended: Any, claim: Claim, runner: Runner) -> None:
    """Record the outcome of a task that has ended, or why there is none."""
    try:
        outcome = ray.get(ended)
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, OutOfTimeError):
            runner.release_stopped(claim)
            return
        outcome = runner.make_failed_outcome(error.cause, claim.seeds)
    except ray.exceptions.RayError as error:
        why = str(error).strip().splitlines()[0].rstrip(".")
        runner.store.record_deaths(claim.declaration, claim.seeds, why)
        print_line(f"{claim.job}: its worker died ({why}); a run that took down fewer than three is tried again.")
        return
    runner.record(claim, outcome)


def _run_task(claim: Claim, request: Request, paths: list[str]) -> Outcome:
    """Train one job in a task of the cluster. `paths` is the `sys.path` of the process that sent it."""
    sys.path += [path for path in paths if path not in sys.path]
    for name in request.modules:
        importlib.import_module(name)
    return train(claim, request, lambda rows: check_deadline(rows, claim.declaration, request))
