"""Who is working on a run: a name that says on which machine and in which process, and whether that still lives."""

import os
import platform
import time
import uuid
from pathlib import Path

LEASE = 120.0
"""Seconds without a sign of life after which a runner of another machine counts as dead."""


def new(pool: str = "") -> str:
    """A name for one runner of this process, on its own or one of a pool of workers."""
    return "|".join((_host(), str(os.getpid()), _started(os.getpid()), f"{pool}:{uuid.uuid4().hex[:8]}"))


def pool_of(owner: str | None) -> str:
    return "" if owner is None else owner.split("|")[3].rpartition(":")[0]


def pid_of(owner: str) -> int:
    return int(owner.split("|")[1])


def alive(owner: str | None, heartbeat: float | None) -> bool:
    """Whether that runner still lives: on this machine we look, elsewhere we believe its heartbeat for a while."""
    if owner is None:
        return False
    host, pid, started, _ = owner.split("|")
    if host != _host():
        return heartbeat is not None and time.time() - heartbeat < LEASE
    return _exists(int(pid)) and _started(int(pid)) == started


def _host() -> str:
    """The machine, and in a container its own numbering of processes."""
    try:
        return f"{platform.node()}/{os.readlink('/proc/self/ns/pid')}"  # noqa: PTH115 (not a real path)
    except OSError:
        return platform.node()


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True  # it is somebody else's
    return _state(pid) != "Z"


def _started(pid: int) -> str:
    """When a process began, where the system tells: numbers of processes are used again."""
    fields = _fields(pid)
    return fields[19] if fields else ""


def _state(pid: int) -> str:
    fields = _fields(pid)
    return fields[0] if fields else ""


def _fields(pid: int) -> list[str]:
    """What Linux says of a process, after its name (which may hold anything, and ends with the last bracket)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []
