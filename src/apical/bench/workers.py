"""Run jobs in several processes on this machine or on a Ray cluster. A worker that dies does not stop the others."""

import importlib
import multiprocessing
import os
import signal
import socket
import sys
import threading
import uuid
from collections.abc import Sequence
from dataclasses import replace
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from typing import Any

import torch

from apical.bench.declaration import Declaration
from apical.bench.estimate import Estimates
from apical.bench.runner import (
    Log,
    OutOfTimeError,
    RunConfig,
    build_repeat_command,
    can_finish,
    check_deadline,
    log_to_stderr,
    make_failed_outcome,
    record_outcome,
    release_stopped,
    remove_empty_checkpoint_folder,
    run_jobs,
    send_heartbeats,
)
from apical.bench.store import MAX_DEATHS, Outcome, Store, get_checkpoint_path
from apical.bench.suites import Job
from apical.bench.training import train
from apical.engine import device as devices
from apical.errors import ApicalError
from apical.extras import import_extra

EXIT_FATAL = 3
"""The exit code of a worker that met an error which every other worker would meet, too, such as a full disk."""


def run_in_processes(
    jobs: list[Job], config: RunConfig, count: int, modules: Sequence[str], log: Log = log_to_stderr
) -> None:
    """Run jobs in `count` processes that share the store. A worker that dies is recorded and replaced.

    This always ends: a run that killed three workers counts as failed, and workers that keep dying before they have
    claimed a run raise an error.
    """
    spawn = multiprocessing.get_context("spawn")
    config = replace(config, progress=False, pool=uuid.uuid4().hex[:8])

    def start() -> BaseProcess:
        process = spawn.Process(target=_run_worker, args=(jobs, config, count, list(modules)))
        process.start()
        return process

    workers = [start() for _ in range(count)]
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
                    held = _record_death(process, config, log)
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


def _record_death(process: BaseProcess, config: RunConfig, log: Log) -> int:
    """Record the death of a worker in the store. Return how many runs it held."""
    code = process.exitcode or 0
    why = f"the system ended it with {_name_signal(-code)}" if code < 0 else f"it ended with code {code}"
    with Store(config.store) as store:
        held = store.record_process_death(process.pid or 0, why)
    log(
        f"a worker died: {why}; of the {held} runs that it held, those that took down fewer than three are taken up again."
    )
    return held


def _name_signal(number: int) -> str:
    """Return the name of a signal. Real-time signals have none."""
    return signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"


def _run_worker(jobs: list[Job], config: RunConfig, count: int, modules: list[str]) -> None:
    """Run jobs in a worker process. Each worker uses its share of the CPU threads, so that they do not compete."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // count))
    try:
        _import_modules(modules)
        run_jobs(jobs, config)
    except ApicalError as error:
        log_to_stderr(f"apical: {error}")
        sys.exit(EXIT_FATAL)


def _exit_with_parent() -> None:
    """Wait for the parent process to end, then end this worker, too, which releases its claims."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os.kill(os.getpid(), signal.SIGTERM)


def run_on_ray(
    jobs: list[Job], config: RunConfig, address: str | None, modules: Sequence[str], log: Log = log_to_stderr
) -> None:
    """Run jobs on a Ray cluster: this process claims and records, the tasks of the cluster train."""
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
        with Store(config.store) as store, send_heartbeats(store):
            _run_tasks(ray, jobs, config, store, list(modules), log)
            remove_empty_checkpoint_folder(store)
    finally:
        if started:
            ray.shutdown()


def _check_address(address: str | None) -> None:
    """Raise OSError if nothing listens at HOST:PORT. Ray itself would retry for minutes."""
    host, _, port = (address or "").removeprefix("ray://").rpartition(":")
    if host and port.isdigit():
        socket.create_connection((host, int(port)), timeout=10).close()


def _run_tasks(ray: Any, jobs: list[Job], config: RunConfig, store: Store, modules: list[str], log: Log) -> None:
    """Keep every slot of the cluster busy with a task until nothing is left to claim."""
    resources = ray.cluster_resources()
    gpus = int(resources.get("GPU", 0)) if config.device != "cpu" else 0
    slots = gpus or max(1, int(resources.get("CPU", 1)))
    task = ray.remote(max_retries=0, num_gpus=1 if gpus else 0, num_cpus=0 if gpus else 1)(_run_task)
    estimates, device_name = (Estimates(store.runs()), devices.describe_device(devices.find_device(config.device)))
    in_flight: dict[Any, tuple[Job, Declaration, list[int]]] = {}
    try:
        while True:
            for job in jobs:
                if len(in_flight) >= slots:
                    break
                if (
                    job.declaration is None
                    or job.problem is not None
                    or not can_finish(job, config, estimates, device_name)
                ):
                    continue
                seeds = store.claim(job.declaration, job.seeds, redo=config.redo)
                if seeds:
                    sent = task.remote(
                        job.declaration, seeds, config, modules, sys.path, build_repeat_command(job, config)
                    )
                    in_flight[sent] = job, job.declaration, seeds
            if not in_flight:
                return
            (ended,), _ = ray.wait(list(in_flight), num_returns=1)
            _collect_task(ray, ended, *in_flight.pop(ended), store, config, log)
    finally:
        for _, declaration, seeds in in_flight.values():
            store.release(declaration, seeds)


def _collect_task(
    ray: Any,
    ended: Any,
    job: Job,
    declaration: Declaration,
    seeds: list[int],
    store: Store,
    config: RunConfig,
    log: Log,
) -> None:
    """Record the outcome of a task that has ended, or why there is none."""
    try:
        outcome = ray.get(ended)
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, OutOfTimeError):
            release_stopped(job, declaration, seeds, store, log)
            return
        outcome = make_failed_outcome(error.cause, seeds, config)
    except ray.exceptions.RayError as error:
        why = str(error).strip().splitlines()[0].rstrip(".")
        store.record_deaths(declaration, seeds, why)
        log(f"{job}: its worker died ({why}); a run that took down fewer than three is tried again.")
        return
    record_outcome(job, declaration, seeds, outcome, store, config, log)


def _import_modules(modules: list[str]) -> None:
    """Import the modules that register the user's own rules."""
    for name in modules:
        importlib.import_module(name)


def _run_task(
    declaration: Declaration, seeds: list[int], config: RunConfig, modules: list[str], paths: list[str], command: str
) -> Outcome:
    """Train one job in a task of the cluster. `paths` is the `sys.path` of the process that sent it."""
    sys.path += [path for path in paths if path not in sys.path]
    _import_modules(modules)
    path = get_checkpoint_path(config.store, declaration, seeds)
    return train(
        declaration,
        seeds,
        checkpoint=path,
        device=config.device,
        command=command,
        on_epoch=lambda rows: check_deadline(rows, declaration, config),
    )
