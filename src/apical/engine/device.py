"""The machine that a run uses: which device, what it is called, and how its arithmetic is set for the run alone."""

import platform
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from apical.errors import ApicalError

LIGHT = 4_000_000
"""Weights × batch, over all seeds, below which a second thread saves little and waits much."""


def find_device(name: str) -> torch.device:
    """The device of this name; 'auto' takes a GPU where there is one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        place = torch.device(name)
        torch.empty(0, device=place)
    except (RuntimeError, AssertionError, TypeError) as error:
        raise ApicalError(f"device {name!r} cannot be used here: {str(error).splitlines()[0]}") from error
    if place.type not in ("cpu", "cuda"):
        raise ApicalError(f"device {name!r} cannot be used here: cpu, cuda and cuda:N work.")
    return place


def describe_device(place: torch.device) -> str:
    """What the device is called in results."""
    return torch.cuda.get_device_name(place) if place.type == "cuda" else f"{platform.machine()} CPU"


def synchronize(place: torch.device) -> None:
    """Wait until the device has done all that it was given."""
    if place.type == "cuda":
        torch.cuda.synchronize(place)


@contextmanager
def use_precision(name: str, place: torch.device) -> Iterator[None]:
    """How products are rounded, inside the run alone; cuDNN may choose its fastest kernels, since shapes repeat.

    TF32 is set through `fp32_precision`: the older `allow_tf32` cannot be read where a user has set the newer
    one, and would not bring 'medium' back. bfloat16 is torch's autocast, without its cache: that would hold the
    weights of the first step for as long as the run lasts.
    """
    rounding = torch.autocast(place.type, torch.bfloat16, enabled=name == "bf16", cache_enabled=False)
    with rounding, _float32(name, place):
        yield


@contextmanager
def _float32(name: str, place: torch.device) -> Iterator[None]:
    if place.type != "cuda":
        yield
        return
    cudnn: Any = torch.backends.cudnn  # its types do not know `conv`
    matmul, conv = torch.backends.cuda.matmul, cudnn.conv
    before = matmul.fp32_precision, conv.fp32_precision, cudnn.benchmark
    matmul.fp32_precision = conv.fp32_precision = "ieee" if name == "float32" else "tf32"
    cudnn.benchmark = True
    try:
        yield
    finally:
        matmul.fp32_precision, conv.fp32_precision, cudnn.benchmark = before


@contextmanager
def use_threads(work: int, place: torch.device) -> Iterator[None]:
    """Tiny networks train on one CPU thread: faster, and far less hurt by whatever else the machine does."""
    before = torch.get_num_threads()
    if place.type == "cpu" and work < LIGHT:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
