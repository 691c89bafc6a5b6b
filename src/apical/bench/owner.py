"""The owner of a run: a name made from the machine and the process, and whether that process is still alive."""

import os
import platform
import time
import uuid
from pathlib import Path

LEASE = 120.0
"""Seconds without a heartbeat after which a process of another machine counts as dead."""


def make_owner(pool: str = "") -> str:
    """Return a new owner name for this process, alone or as a worker of a pool."""
    return "|".join((_get_host(), str(os.getpid()), _read_start_time(os.getpid()), f"{pool}:{uuid.uuid4().hex[:8]}"))


def get_pool(owner: str | None) -> str:
    """Return the worker pool in an owner's name, "" for none."""
    return "" if owner is None else owner.split("|")[3].rpartition(":")[0]


def get_pid(owner: str) -> int:
    """Return the process id in an owner's name."""
    return int(owner.split("|")[1])


def is_alive(owner: str | None, heartbeat: float | None) -> bool:
    """Return whether an owner's process is alive: on this machine by its pid, elsewhere by its heartbeat."""
    if owner is None:
        return False
    host, pid, started, _ = owner.split("|")
    if host != _get_host():
        return heartbeat is not None and time.time() - heartbeat < LEASE
    return _is_running(int(pid)) and _read_start_time(int(pid)) == started


def _get_host() -> str:
    """Return the name of the machine and of its PID namespace, since a container numbers its processes itself."""
    try:
        return f"{platform.node()}/{os.readlink('/proc/self/ns/pid')}"  # noqa: PTH115 (not a real path)
    except OSError:
        return platform.node()


def _is_running(pid: int) -> bool:
    """Return whether a process exists and is not a zombie."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True  # it exists, but belongs to another user
    return _read_state(pid) != "Z"


def _read_start_time(pid: int) -> str:
    """Return when a process began, "" if unknown. It tells a process from a later one with the same pid."""
    fields = _read_stat(pid)
    return fields[19] if fields else ""


def _read_state(pid: int) -> str:
    """Return the state of a process, such as "R" or "Z"; "" if unknown."""
    fields = _read_stat(pid)
    return fields[0] if fields else ""


def _read_stat(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat after the process name, which may contain spaces and brackets."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []
