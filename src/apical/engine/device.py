"""The device of a run: find it, name it, set its precision and threads for the duration of the run; its streams."""

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


class SideStreams:
    """CUDA streams that fork from the current one and join it again, if a graph is being captured.

    Small kernels leave most of a GPU idle. Independent work (the seeds of a convolutional network, the parts of an optimiser
    step, the bookkeeping) is captured on separate streams, and the graph runs it concurrently. Without a capture, everything
    runs on one stream: eager steps spend their time on calls, not on kernels, and cuDNN needs the device for itself while it
    measures which of its kernels is fastest.
    """

    def __init__(self, device: torch.device, count: int) -> None:
        self.device = device
        self.streams = [torch.cuda.Stream(device) for _ in range(count)] if device.type == "cuda" else []

    def _is_capturing(self) -> bool:
        return bool(self.streams) and torch.cuda.is_current_stream_capturing()

    @contextmanager
    def __call__(self, k: int) -> Iterator[None]:
        """Run the block on stream k, after all work queued so far.

        Tensors that it reads must stay alive until `join`: memory freed earlier may be reused by another stream.
        """
        if not self._is_capturing():
            yield
            return
        stream = self.streams[k]
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            yield

    def join(self) -> None:
        """Make the current stream wait for all side streams."""
        if self._is_capturing():
            for stream in self.streams:
                torch.cuda.current_stream(self.device).wait_stream(stream)
