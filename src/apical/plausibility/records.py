"""What is known of one number in memory: everything that it was computed from.

A `Record` is that knowledge; numbers share them, so each record exists once and goes by its index in the `Ledger`.
"""

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

Root = tuple[str, ...] | tuple[str, str, int] | tuple[str, int, int] | tuple[str, int]
"""Where information comes from: `("input",)`, `("noise",)`, `("batch",)`, `("weight", name, version)`, and what
happened to it: `("drive", layer, event)`, `("transport", finding)`."""

INPUT: Root = ("input",)
NOISE: Root = ("noise",)
BATCH: Root = ("batch",)
"""A number of one example that also depends on the other examples of its batch."""


class Record(NamedTuple):
    """Sources; which examples of the batch; and over how many synapses the target came (None: it did not)."""

    roots: frozenset[Root] = frozenset()
    examples: frozenset[int] = frozenset()
    hops: int | None = None

    @property
    def of_data(self) -> bool:
        """Whether this is a signal: it depends on the batch or on noise, not on weights and constants alone."""
        return bool(self.examples) or self.hops is not None or NOISE in self.roots


BLANK = Record()


class Ledger:
    """All records of a trace, each once, by index; index 0 is a constant."""

    def __init__(self) -> None:
        self.records: list[Record] = []
        self._index: dict[Record, int] = {}
        self._pairs: dict[tuple[int, int], int] = {}
        self._sets: dict[frozenset[int], int] = {}
        self.index(BLANK)

    def index(self, record: Record) -> int:
        if record not in self._index:
            self._index[record] = len(self.records)
            self.records.append(record)
        return self._index[record]

    def __getitem__(self, index: int) -> Record:
        return self.records[index]

    def of(self, ids: Tensor) -> Record:
        """Everything that any of these numbers depends on."""
        return self.records[self.joined(ids.unique().tolist())]

    def joined(self, ids: Iterable[int]) -> int:
        """Several numbers of one tensor become one: a sum, a maximum."""
        key = frozenset(ids)
        if key not in self._sets:
            self._sets[key] = self.index(union(self.records[i] for i in key))
        return self._sets[key]

    def met(self, one: int, other: int) -> int:
        """Two numbers meet in an operation. Where one belongs to one example alone, the batch has come in."""
        if one == other:
            return one
        if (one, other) not in self._pairs:
            a, b = self.records[one], self.records[other]
            whole = union((a, b))
            if a.examples and b.examples and a.examples != b.examples and 1 in map(len, (a.examples, b.examples)):
                whole = whole._replace(roots=whole.roots | {BATCH})
            self._pairs[one, other] = self.index(whole)
        return self._pairs[one, other]

    def marked(self, ids: Tensor, roots: Iterable[Root] = (), hop: bool = False) -> Tensor:
        """The same numbers with more sources, and, after a synapse, with the target one hop further."""
        roots = frozenset(roots)
        if not roots and not hop:
            return ids
        known, place = ids.unique(return_inverse=True)
        new = []
        for i in known.tolist():
            record = self.records[i]
            hops = record.hops + 1 if hop and record.hops is not None else record.hops
            new.append(self.index(record._replace(roots=record.roots | roots, hops=hops)))
        return torch.tensor(new)[place]

    def meet(self, one: Tensor, other: Tensor) -> Tensor:
        """`met`, number by number, of ids that broadcast."""
        one, other = torch.broadcast_tensors(one, other)
        known, place = (one * len(self.records) + other).unique(return_inverse=True)
        size = len(self.records)
        return torch.tensor([self.met(*divmod(code, size)) for code in known.tolist()])[place]

    def join(self, ids: Tensor) -> Tensor:
        """`joined` over the last axis."""
        if ids.shape[-1] == 1:
            return ids[..., 0]
        flat = ids.reshape(-1, ids.shape[-1])
        if bool((flat == flat[:1, :1]).all()):
            return ids[..., 0]
        known, place = flat.unique(dim=0, return_inverse=True)
        return torch.tensor([self.joined(row.tolist()) for row in known])[place].reshape(ids.shape[:-1])


def union(records: Iterable[Record]) -> Record:
    records = list(records)
    hops = [record.hops for record in records if record.hops is not None]
    return Record(
        frozenset().union(*(record.roots for record in records)),
        frozenset().union(*(record.examples for record in records)),
        min(hops) if hops else None,
    )
