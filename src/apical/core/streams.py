"""CUDA streams for work that can run side by side in a captured graph."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


class SideStreams:
    """Streams that fork from the current one and join it again, if a CUDA graph is being captured.

    Small kernels leave most of a GPU idle. Independent work (the seeds of a convolutional network, the layers of a tick, the
    parts of an optimiser step, the bookkeeping) is captured on separate streams, and the graph runs it concurrently. Without
    a capture, everything runs on one stream: eager steps spend their time on calls, not on kernels, and cuDNN needs the
    device for itself while it measures which of its kernels is fastest.

    Args:
        count: how many.
        urgent: the number of the first stream whose kernels go before those of the others; by default none.
    """

    def __init__(self, count: int, urgent: int | None = None) -> None:
        self.count, self.urgent = count, count if urgent is None else urgent
        self.streams: list[torch.cuda.Stream] = []
        self.forked: set[int] = set()
        """Streams with work that the current one has not waited for."""
        self.events: dict[str, list[torch.cuda.Event]] = {}
        """What has to be over before the thing of this name may be used."""
        self.kept: list[Any] = []

    def __deepcopy__(self, memo: dict[int, Any]) -> "SideStreams":
        """Return streams of its own for a copy: sharing them would let the memory of one be reused by the other."""
        return SideStreams(self.count, self.urgent)

    def _is_capturing(self) -> bool:
        if not self.count or torch.compiler.is_compiling() or not torch.cuda.is_initialized():
            return False
        return torch.cuda.is_current_stream_capturing()

    @contextmanager
    def __call__(self, k: int) -> Iterator[None]:
        """Run the block on stream k (modulo their number), after all work queued so far on the current stream."""
        if not self._is_capturing():
            yield
            return
        if not self.streams:
            self.streams = [torch.cuda.Stream(priority=-int(k >= self.urgent)) for k in range(self.count)]
        stream = self.streams[k % self.count]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            yield
        self.forked.add(k % self.count)

    def wait(self, *numbers: int) -> None:
        """Make the current stream wait for the work on these streams, or on all of them."""
        for k in numbers or self.forked:
            if self._is_capturing():
                torch.cuda.current_stream().wait_stream(self.streams[k % self.count])

    def join(self) -> None:
        """Make the current stream wait for the work on all side streams, which is over then."""
        self.wait()
        self.forked.clear()
        self.events.clear()

    def mark(self, *names: str) -> None:
        """Say that the work which the current stream has so far must be over before things of these names are used."""
        if self._is_capturing():
            event = torch.cuda.Event()
            event.record()
            for name in names:
                self.events.setdefault(name, []).append(event)

    def wait_for(self, *names: str) -> None:
        """Make the current stream wait for what was marked with these names."""
        for event in dict.fromkeys(event for name in names for event in self.events.get(name, ())):
            torch.cuda.current_stream().wait_event(event)

    def keep(self, *tensors: Any) -> None:
        """Keep what one stream writes and another reads, as long as this object lives.

        Memory that is freed may be used again by the next operation on the stream that allocated it, while the other stream
        still reads. Streams come from a small pool, so this may be an operation of somebody else.
        """
        if self._is_capturing():
            self.kept += tensors
