"""CUDA streams for work that can run side by side.

Small kernels leave most of a GPU idle. Independent work (the seeds of a convolutional network, the parts of an optimiser
step, the bookkeeping) is captured on separate streams, and the graph runs it concurrently. Without a capture, everything
runs on one stream: eager steps spend their time on calls, not on kernels, and cuDNN needs the device for itself while it
measures which of its kernels is fastest.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class SideStreams:
    """Streams that fork from the current stream and join it again, if a CUDA graph is being captured."""

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
