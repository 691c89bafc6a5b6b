"""Measure the peak memory of a run: allocated tensors on a GPU, the resident memory of the process on a CPU."""

import gc
import resource
import sys
from contextlib import suppress
from pathlib import Path

import torch

KINDS = {"cuda": "allocated on the GPU", "cpu": "resident, whole process"}


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
