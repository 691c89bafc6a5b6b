"""A second memory beside the real one: for every number, its record, and which weight it is.

Provenance is kept by address, not by tensor, so that views, transposes, `.data`, saved tensors and arrays that share
memory need no rules of their own: they are other ways to look at the same cells.
"""

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

Label = tuple[Tensor, Tensor]
"""For each number, the row and the column of the weight matrix that it came from; -1 where it did not."""


@dataclass
class Shade:
    """What is known of a tensor: each number's record, and its place in each matrix of weights it derives from."""

    ids: Tensor
    labels: dict[str, Label] = field(default_factory=dict)

    @property
    def shape(self) -> torch.Size:
        return self.ids.shape

    def map(self, change: Callable[[Tensor], Tensor]) -> "Shade":
        """The same numbers in another arrangement."""
        return Shade(change(self.ids), {s: (change(r), change(c)) for s, (r, c) in self.labels.items()})

    def blank(self) -> "Shade":
        """Constants in the same shape."""
        return Shade(torch.zeros_like(self.ids))


@dataclass
class Block:
    """The cells of one storage. `tensor` is kept so that the address is not given to another one."""

    start: int
    itemsize: int
    tensor: Tensor
    ids: Tensor
    labels: dict[str, Label]

    def view(self, cells: Tensor, t: Tensor) -> Tensor:
        offset = (t.data_ptr() - self.start) // self.itemsize
        return cells.as_strided(t.shape, t.stride(), offset)


def has_cells(t: Tensor) -> bool:
    """Whether a tensor's numbers lie in memory; derivatives that are known to be zero need none."""
    return t.device.type != "meta" and t.layout == torch.strided and t.numel() > 0 and not t._is_zerotensor()


class Memory:
    """Blocks by their addresses."""

    def __init__(self) -> None:
        self._blocks: dict[int, Block] = {}
        self._starts: list[int] = []

    def _find(self, t: Tensor) -> Block | None:
        block = self._blocks.get(t.untyped_storage().data_ptr())
        if block is None:  # memory shared by other means, as with numpy
            at = bisect_right(self._starts, t.data_ptr()) - 1
            near = self._blocks[self._starts[at]] if at >= 0 else None
            if near is not None and t.data_ptr() < near.start + near.ids.numel() * near.itemsize:
                block = near
        return block

    def knows(self, t: Tensor) -> bool:
        return has_cells(t) and self._find(t) is not None

    def read(self, t: Tensor) -> Shade:
        block = self._find(t) if has_cells(t) else None
        if block is None or t.element_size() != block.itemsize:  # or the same bytes read as another type
            return Shade(torch.zeros(t.shape, dtype=torch.int64))
        labels = {s: (block.view(r, t), block.view(c, t)) for s, (r, c) in block.labels.items()}
        valid = {s: label for s, label in labels.items() if bool((label[0] >= 0).any())}
        return Shade(block.view(block.ids, t), valid)

    def write(self, t: Tensor, shade: Shade) -> None:
        """`t` now holds these numbers."""
        if not has_cells(t):
            return
        block = self._find(t) or self._new(t)
        if t.element_size() != block.itemsize:
            return
        block.view(block.ids, t).copy_(shade.ids)
        for source in {*block.labels, *shade.labels}:
            if source not in block.labels:
                block.labels[source] = (torch.full_like(block.ids, -1), torch.full_like(block.ids, -1))
            for cells, values in zip(block.labels[source], shade.labels.get(source, (-1, -1)), strict=True):
                block.view(cells, t).copy_(torch.as_tensor(values))

    def _new(self, t: Tensor) -> Block:
        storage = t.untyped_storage()
        count = storage.nbytes() // t.element_size()
        block = Block(storage.data_ptr(), t.element_size(), t, torch.zeros(count, dtype=torch.int64), {})
        self._blocks[block.start] = block
        at = bisect_right(self._starts, block.start)
        self._starts.insert(at, block.start)
        return block
