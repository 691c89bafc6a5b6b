"""Work side by side on one device.

Small kernels leave most of a GPU idle. What does not depend on each other (the seeds of a convolutional network,
the parts of an optimiser step, the bookkeeping beside both) is captured on streams of its own, and the graph runs
it at once. Outside of a capture everything runs in line: there the calls, not the kernels, take the time, and
cuDNN has the device to itself while it tries which of its kernels is fastest.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class SideStreams:
    """Streams that leave from the current one and come back to it."""

    def __init__(self, device: torch.device, count: int) -> None:
        self.device = device
        self.streams = [torch.cuda.Stream(device) for _ in range(count)] if device.type == "cuda" else []

    def _open(self) -> bool:
        return bool(self.streams) and torch.cuda.is_current_stream_capturing()

    @contextmanager
    def __call__(self, k: int) -> Iterator[None]:
        """Run on lane k what follows from everything that was asked for so far.

        What a lane reads must live until `join`: memory that is freed earlier may be given to somebody else.
        """
        if not self._open():
            yield
            return
        lane = self.streams[k]
        lane.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(lane):
            yield

    def join(self) -> None:
        """Let what follows wait for all lanes."""
        if self._open():
            for lane in self.streams:
                torch.cuda.current_stream(self.device).wait_stream(lane)
