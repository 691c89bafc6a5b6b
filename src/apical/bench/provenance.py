"""Where a result comes from: the code, the environment, the memory it needed, and the process that computes it."""

import gc
import hashlib
import json
import os
import platform
import resource
import subprocess
import sys
import time
import uuid
from contextlib import suppress
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

import torch

import apical
from apical.core.registry import RULES
from apical.engine import device as devices
from apical.files import is_running
from apical.version import VERSION

PACKAGE = Path(apical.__file__).parent
EXCLUDED = {"bench", "report", "plausibility", "cli", "version.py", "extras.py", "errors.py", "files.py", "commands.py"}
"""Files and folders that cannot change a result; they are not hashed."""
MEMORY_KINDS = {"cuda": "allocated on the GPU", "cpu": "resident, whole process"}
LEASE = 120.0
"""Seconds without a heartbeat after which a process of another machine counts as dead."""


# The code and the environment.


@cache
def describe_version() -> str:
    """Return the version of the package, with the commit if this is a git checkout."""
    root = PACKAGE.parents[1]
    if not (root / ".git").exists():
        return VERSION
    command = ["git", "-C", str(root), "rev-parse", "--short=12", "HEAD"]
    try:
        commit = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return VERSION
    return f"{VERSION}+{commit}"


@cache
def read_revisions() -> dict[str, int]:
    """Return the revision of every built-in rule's results, which rises when the rule computes something else."""
    entries = json.loads(resources.files("apical.bench").joinpath("revisions.json").read_text("utf-8"))
    return {rule: entry["revision"] for rule, entry in entries.items()}


def get_revision(rule: str) -> int:
    """Return the revision of a rule's results, `NAME` or `NAME:VARIANT`; that of a rule of one's own never rises."""
    base, _, variant = rule.partition(":")
    variants = RULES[base].VARIANTS if base in RULES else ()
    return read_revisions().get(base if variants and variant == variants[0] else rule, 1)


@cache
def hash_source() -> str:
    """Return a hash of the source files that can change a result.

    Unlike the commit, it does not change with a page or a test, and it does not need git.
    """
    digest = hashlib.sha256()
    for path in sorted([*PACKAGE.rglob("*.py"), *PACKAGE.rglob("*.toml")]):
        name = path.relative_to(PACKAGE)
        if name.parts[0] not in EXCLUDED:
            digest.update(name.as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:12]


def describe_environment(torch_device: torch.device) -> dict[str, Any]:
    """Return the versions and the device that a result is computed with."""
    return {
        "code": describe_version(),
        "source": hash_source(),
        "apical": VERSION,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cuda": torch.version.cuda if torch_device.type == "cuda" else None,
        "device": devices.describe_device(torch_device),
    }


# Peak memory: allocated tensors on a GPU, the resident memory of the process on a CPU.


def reset_peak(device: torch.device) -> int:
    """Reset the peak, if the system can. Return the bytes that are allocated on the GPU already."""
    if device.type == "cuda":
        gc.collect()  # free reference cycles of the run before now, and not in the middle of this one
        torch.cuda.reset_peak_memory_stats(device)
        return int(torch.cuda.memory_allocated(device))
    with suppress(OSError):  # then the peak includes the time before
        Path("/proc/self/clear_refs").write_text("5")
    return 0


def read_peak(device: torch.device, before: int) -> int:
    """Return the peak in bytes since `reset_peak`, which returned `before`."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device)) - before
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
        (line,) = (line for line in lines if line.startswith("VmHWM:"))
        return int(line.split()[1]) * 1024
    except (OSError, ValueError):
        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return most if sys.platform == "darwin" else most * 1024


# The owner of a run: a name made from the machine and the process.


def make_owner(pool: str = "") -> str:
    """Return a new owner name for this process, alone or as a worker of a pool."""
    return describe_process(os.getpid(), pool) + uuid.uuid4().hex[:8]


def describe_process(pid: int, pool: str) -> str:
    """Return the beginning of all owner names of a process of this machine, which must exist."""
    return "|".join((_get_host(), str(pid), _read_start_time(pid), f"{pool}:"))


def get_pool(owner: str | None) -> str:
    """Return the worker pool in an owner's name, "" for none."""
    return (owner or "").rpartition("|")[2].rpartition(":")[0]


def is_alive(owner: str | None, heartbeat: float | None) -> bool:
    """Return whether an owner's process is alive: on this machine by its pid, elsewhere by its heartbeat."""
    try:
        host, pid, started, _ = (owner or "").split("|")
        number = int(pid)
    except ValueError:  # there is none, or its name was damaged
        return False
    if host != _get_host():
        return heartbeat is not None and time.time() - heartbeat < LEASE
    return _is_running(number) and _read_start_time(number) == started


def _get_host() -> str:
    """Return the name of the machine and of its PID namespace, since a container numbers its processes itself."""
    try:
        return f"{platform.node()}/{os.readlink('/proc/self/ns/pid')}"  # noqa: PTH115 (not a real path)
    except OSError:
        return platform.node()


def _is_running(pid: int) -> bool:
    """Return whether a process exists and is not a zombie."""
    return is_running(pid) and _read_stat(pid)[:1] != ["Z"]


def _read_start_time(pid: int) -> str:
    """Return when a process began, "" if unknown. It tells a process from a later one with the same pid."""
    fields = _read_stat(pid)
    return fields[19] if fields else ""


def _read_stat(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat after the process name, which may contain spaces and brackets."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []
