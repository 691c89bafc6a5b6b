"""Running wide: several processes on this machine, or a Ray cluster; a worker that dies does not stop the others."""

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
    Orders,
    OutOfTimeError,
    Say,
    command_of,
    failure,
    fits,
    heartbeat,
    in_time,
    out_of_time,
    say,
    settle,
    tidy,
    work,
)
from apical.bench.store import MOST_DEATHS, Outcome, Store, checkpoint_of
from apical.bench.suites import Job
from apical.bench.training import train
from apical.engine import device as devices
from apical.errors import ApicalError
from apical.extras import extra

REFUSED = 3
"""How a worker ends that met an error which the next one would meet, too: a full disk, say."""


def processes(jobs: list[Job], orders: Orders, count: int, modules: Sequence[str], say: Say = say) -> None:
    """The same work in `count` processes, which share the store; one that dies is recorded and replaced.

    A run that takes three workers down is called failed, so this ends; so does it when workers die without a run.
    """
    spawn = multiprocessing.get_context("spawn")
    orders = replace(orders, progress=False, pool=uuid.uuid4().hex[:8])

    def start() -> BaseProcess:
        process = spawn.Process(target=_worker, args=(jobs, orders, count, list(modules)))
        process.start()
        return process

    living = [start() for _ in range(count)]
    idle_deaths = 0
    before = _on_sigterm(lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        while living:
            wait([process.sentinel for process in living])
            for process in [p for p in living if p.exitcode is not None]:
                living.remove(process)
                if process.exitcode == REFUSED:
                    raise ApicalError("a worker could not go on (see above), so all of them were stopped.")
                if process.exitcode:
                    held = _bury(process, orders, say)
                    idle_deaths += not held
                    if idle_deaths >= MOST_DEATHS:
                        raise ApicalError("workers die before they begin; --workers 1 shows why.")
                    living.append(start())
    finally:
        for process in living:
            process.terminate()
        for process in living:
            process.join()
        _on_sigterm(before)


def _on_sigterm(handler: Any) -> Any:
    """Set what SIGTERM does, in the main thread, the only one that may; returns what it did before."""
    if threading.current_thread() is threading.main_thread():
        return signal.signal(signal.SIGTERM, handler)
    return signal.getsignal(signal.SIGTERM)


def _bury(process: BaseProcess, orders: Orders, say: Say) -> int:
    code = process.exitcode or 0
    why = f"the system ended it with {_signal(-code)}" if code < 0 else f"it ended with code {code}"
    with Store(orders.store) as store:
        held = store.bury(process.pid or 0, why)
    say(
        f"a worker died: {why}; of the {held} runs that it held, those that took down fewer than three are taken up again."
    )
    return held


def _signal(number: int) -> str:
    """Its name; those for real time have none."""
    return signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"


def _worker(jobs: list[Job], orders: Orders, count: int, modules: list[str]) -> None:
    """What each process does. Threads are shared out, or the workers would wait for each other."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    threading.Thread(target=_follow, daemon=True).start()
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // count))
    try:
        _import(modules)
        work(jobs, orders)
    except ApicalError as error:
        say(f"apical: {error}")
        sys.exit(REFUSED)


def _follow() -> None:
    """End, and give back what this worker holds, when whoever started it is gone."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os.kill(os.getpid(), signal.SIGTERM)


def cluster(
    jobs: list[Job], orders: Orders, address: str | None, modules: Sequence[str], say: Say = say
) -> None:
    """The same work on a Ray cluster: this process claims and records, tasks train wherever Ray puts them."""
    ray = extra("ray", "--ray", "ray")
    started = not ray.is_initialized()
    if started:
        try:
            _reach(address)
            ray.init(address=address, logging_level="warning", log_to_driver=False)
        except (OSError, RuntimeError, ValueError) as error:
            reason = str(error).strip().splitlines()[0]
            raise ApicalError(
                f"no Ray cluster can be used at {address or 'this machine'} ({reason})."
            ) from error
    try:
        with Store(orders.store) as store, heartbeat(store):
            _on_cluster(ray, jobs, orders, store, list(modules), say)
            tidy(store)
    finally:
        if started:
            ray.shutdown()


def _reach(address: str | None) -> None:
    """Knock at HOST:PORT, for Ray itself tries for minutes where nobody listens."""
    host, _, port = (address or "").removeprefix("ray://").rpartition(":")
    if host and port.isdigit():
        socket.create_connection((host, int(port)), timeout=10).close()


def _on_cluster(
    ray: Any, jobs: list[Job], orders: Orders, store: Store, modules: list[str], say: Say
) -> None:
    """Keep as many tasks in flight as the cluster has places, until nothing is left to claim."""
    resources = ray.cluster_resources()
    gpus = int(resources.get("GPU", 0)) if orders.device != "cpu" else 0
    places = gpus or max(1, int(resources.get("CPU", 1)))
    task = ray.remote(max_retries=0, num_gpus=1 if gpus else 0, num_cpus=0 if gpus else 1)(_task)
    estimates, place = Estimates(store.runs()), devices.describe_device(devices.find_device(orders.device))
    flying: dict[Any, tuple[Job, Declaration, list[int]]] = {}
    try:
        while True:
            for job in jobs:
                if len(flying) >= places:
                    break
                if (
                    job.declaration is None
                    or job.problem is not None
                    or not fits(job, orders, estimates, place)
                ):
                    continue
                seeds = store.claim(job.declaration, job.seeds, redo=orders.redo)
                if seeds:
                    sent = task.remote(
                        job.declaration, seeds, orders, modules, sys.path, command_of(job, orders)
                    )
                    flying[sent] = job, job.declaration, seeds
            if not flying:
                return
            (ended,), _ = ray.wait(list(flying), num_returns=1)
            _land(ray, ended, *flying.pop(ended), store, orders, say)
    finally:
        for _, declaration, seeds in flying.values():
            store.release(declaration, seeds)


def _land(
    ray: Any,
    ended: Any,
    job: Job,
    declaration: Declaration,
    seeds: list[int],
    store: Store,
    orders: Orders,
    say: Say,
) -> None:
    try:
        outcome = ray.get(ended)
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, OutOfTimeError):
            out_of_time(job, declaration, seeds, store, say)
            return
        outcome = failure(error.cause, seeds, orders)
    except ray.exceptions.RayError as error:
        why = str(error).strip().splitlines()[0].rstrip(".")
        store.died(declaration, seeds, why)
        say(f"{job}: its worker died ({why}); a run that took down fewer than three is tried again.")
        return
    settle(job, declaration, seeds, outcome, store, orders, say)


def _import(modules: list[str]) -> None:
    """Rules of the user's own are known once their modules are imported."""
    for name in modules:
        importlib.import_module(name)


def _task(
    declaration: Declaration,
    seeds: list[int],
    orders: Orders,
    modules: list[str],
    paths: list[str],
    command: str,
) -> Outcome:
    """What a task of the cluster does; modules are looked for where the process that sent it looks."""
    sys.path += [path for path in paths if path not in sys.path]
    _import(modules)
    path = checkpoint_of(orders.store, declaration, seeds)
    return train(
        declaration,
        seeds,
        checkpoint=path,
        device=orders.device,
        command=command,
        on_epoch=lambda rows: in_time(rows, declaration, orders),
    )
