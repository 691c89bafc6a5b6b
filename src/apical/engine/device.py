"""The device of a run: find it, name it, set its precision and threads for the duration of the run."""

import platform
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from apical.errors import ApicalError

SINGLE_THREAD_WORK = 4_000_000
"""Weights × batch size, over all seeds, below which a second thread waits more than it computes."""


def find_device(name: str) -> torch.device:
    """Return the device of this name; 'auto' is the GPU if there is one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, TypeError) as error:
        raise ApicalError(f"device {name!r} cannot be used here: {str(error).splitlines()[0]}") from error
    if device.type not in ("cpu", "cuda"):
        raise ApicalError(f"device {name!r} cannot be used here: cpu, cuda and cuda:N work.")
    return device


def describe_device(device: torch.device) -> str:
    """Return the device's name for results."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"{platform.machine()} CPU"


def synchronize(device: torch.device) -> None:
    """Wait until the device has finished all queued work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@contextmanager
def use_precision(name: str, device: torch.device) -> Iterator[None]:
    """Set how matrix products are rounded, and let cuDNN search for its fastest kernels, since shapes repeat.

    TF32 is set through `fp32_precision`. The older `allow_tf32` cannot be read if the user has set the newer one, and could
    not restore 'medium'. bfloat16 uses torch's autocast without its cache, which would keep the weights of the first
    step for the whole run.
    """
    cudnn: Any = torch.backends.cudnn  # its types do not know `conv`
    matmul, conv = torch.backends.cuda.matmul, cudnn.conv
    before = matmul.fp32_precision, conv.fp32_precision, cudnn.benchmark
    rounding = torch.autocast(device.type, torch.bfloat16, enabled=name == "bf16", cache_enabled=False)
    try:
        if device.type == "cuda":
            matmul.fp32_precision = conv.fp32_precision = "ieee" if name == "float32" else "tf32"
            cudnn.benchmark = True
        with rounding:
            yield
    finally:
        if device.type == "cuda":
            matmul.fp32_precision, conv.fp32_precision, cudnn.benchmark = before


@contextmanager
def use_threads(work: int, device: torch.device) -> Iterator[None]:
    """Use one CPU thread for tiny networks: that is faster, and other load on the machine slows it less."""
    before = torch.get_num_threads()
    if device.type == "cpu" and work < SINGLE_THREAD_WORK:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
