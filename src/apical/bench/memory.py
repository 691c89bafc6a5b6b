"""The most memory that a run needed: on a GPU what its tensors took, on a CPU what the whole process did."""

import gc
import resource
import sys
from contextlib import suppress
from pathlib import Path

import torch

KINDS = {"cuda": "allocated on the GPU", "cpu": "resident, whole process"}


def reset(device: torch.device) -> int:
    """Forget earlier peaks, where the system can; returns the bytes on a GPU that are somebody else's already."""
    if device.type == "cuda":
        gc.collect()  # what the run before left in rings of objects is not held until the middle of this one
        torch.cuda.reset_peak_memory_stats(device)
        return int(torch.cuda.memory_allocated(device))
    with suppress(OSError):  # then the peak is that of the process so far
        Path("/proc/self/clear_refs").write_text("5")
    return 0


def peak(device: torch.device, before: int) -> int:
    """In bytes, since `reset`, which returned `before`."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device)) - before
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
        (line,) = (line for line in lines if line.startswith("VmHWM:"))
        return int(line.split()[1]) * 1024
    except (OSError, ValueError):
        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return most if sys.platform == "darwin" else most * 1024
