"""Provenance: for every number in memory, what it was computed from, and which weight it is.

A `Record` is everything that one number was computed from. Many numbers share a record, so each record exists once and
goes by its index, its id, in the `Ledger`. The `ProvenanceMap` has the ids of all numbers by their address, not by
tensor: views, transposes, `.data`, saved tensors and arrays that share memory need no rules of their own.
"""

from bisect import bisect_right, insort
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

Source = tuple[Any, ...]
"""Where information comes from: `("input",)`, `("noise",)`, `("batch",)`, `("weight", name, version)`, and what
happened to it: `("drive", layer, number)`, `("transport", finding)`."""
INPUT: Source = ("input",)
NOISE: Source = ("noise",)
BATCH: Source = ("batch",)
"""A number of one example that also depends on the other examples of its batch."""
Indices = tuple[Tensor, Tensor]
"""For each number, the row and the column of the weight matrix that it came from; -1 where it did not."""


class Record(NamedTuple):
    """Sources; which examples of the batch; and over how many synapses the target came (None: it did not)."""

    sources: frozenset[Source] = frozenset()
    examples: frozenset[int] = frozenset()
    hops: int | None = None

    @property
    def is_signal(self) -> bool:
        """Whether it depends on the batch or on noise, not on weights and constants alone."""
        return bool(self.examples) or self.hops is not None or NOISE in self.sources


CONSTANT = Record()


def unite(records: Iterable[Record]) -> Record:
    """Return a record of everything in these records; the target came by the shortest way."""
    records = list(records)
    hops = [record.hops for record in records if record.hops is not None]
    return Record(
        frozenset().union(*(record.sources for record in records)),
        frozenset().union(*(record.examples for record in records)),
        min(hops) if hops else None,
    )


class Ledger:
    """All records of a trace, each once, by id; id 0 is a constant."""

    def __init__(self) -> None:
        self.records: list[Record] = []
        self._ids: dict[Record, int] = {}
        self._pairs: dict[tuple[int, int], int] = {}
        self._sets: dict[frozenset[int], int] = {}
        self._operations = 0
        self.add(CONSTANT)

    def count_operation(self) -> int:
        """Return a number for an operation that no other has."""
        self._operations += 1
        return self._operations

    def add(self, record: Record) -> int:
        """Return the record's id, a new one if it is new."""
        if record not in self._ids:
            self._ids[record] = len(self.records)
            self.records.append(record)
        return self._ids[record]

    def summarise(self, ids: Tensor) -> Record:
        """Return everything that any of these numbers depends on."""
        return self.records[self.reduce_all(ids)]

    def reduce_all(self, *ids: Tensor) -> int:
        """Return the id of one number made from all numbers of these tensors, such as their sum."""
        key = frozenset(i for tensor in ids for i in tensor.unique().tolist())
        if key not in self._sets:
            self._sets[key] = self.add(unite(self.records[i] for i in key))
        return self._sets[key]

    def reduce(self, ids: Tensor) -> Tensor:
        """Return the ids of numbers that are made along the last axis, such as sums."""
        if ids.shape[-1] == 1:
            return ids[..., 0]
        flat = ids.reshape(-1, ids.shape[-1])
        if bool((flat == flat[:1, :1]).all()):
            return ids[..., 0]
        known, place = flat.unique(dim=0, return_inverse=True)
        return torch.tensor([self.reduce_all(row) for row in known])[place].reshape(ids.shape[:-1])

    def combine(self, one: Tensor, other: Tensor) -> Tensor:
        """Return the ids of numbers that are made from two each, of tensors that broadcast."""
        one, other = torch.broadcast_tensors(one, other)
        size = len(self.records)
        known, place = (one * size + other).unique(return_inverse=True)
        return torch.tensor([self.combine_pair(*divmod(code, size)) for code in known.tolist()])[place]

    def combine_pair(self, one: int, other: int) -> int:
        """Return the id of a number made from two. Where one is of a single example, the batch comes in."""
        if one == other:
            return one
        if (one, other) not in self._pairs:
            a, b = self.records[one], self.records[other]
            both = unite((a, b))
            if a.examples and b.examples and a.examples != b.examples and 1 in map(len, (a.examples, b.examples)):
                both = both._replace(sources=both.sources | {BATCH})
            self._pairs[one, other] = self.add(both)
        return self._pairs[one, other]

    def add_sources(self, ids: Tensor, sources: Iterable[Source] = (), hop: bool = False) -> Tensor:
        """Return the ids of the same numbers with more sources, and, after a synapse, with the target one hop further."""
        sources = frozenset(sources)
        if not sources and not hop:
            return ids
        known, place = ids.unique(return_inverse=True)
        new = []
        for record in (self.records[i] for i in known.tolist()):
            hops = record.hops + 1 if hop and record.hops is not None else record.hops
            new.append(self.add(record._replace(sources=record.sources | sources, hops=hops)))
        return torch.tensor(new)[place]


@dataclass
class Provenance:
    """What is known of a tensor: each number's record, and its place in each weight matrix that it derives from."""

    ids: Tensor
    weights: dict[str, Indices] = field(default_factory=dict)

    @classmethod
    def of_constants(cls, shape: torch.Size) -> "Provenance":
        return cls(torch.zeros(shape, dtype=torch.int64))

    @property
    def shape(self) -> torch.Size:
        return self.ids.shape

    def map(self, change: Callable[[Tensor], Tensor]) -> "Provenance":
        """Return the provenance of the same numbers in another arrangement."""
        return Provenance(change(self.ids), {w: (change(r), change(c)) for w, (r, c) in self.weights.items()})


def occupies_memory(t: Tensor) -> bool:
    """Return whether a tensor's numbers lie in memory; derivatives that are known to be zero need none."""
    return is_dense(t) and t.device.type != "meta" and t.numel() > 0 and not t._is_zerotensor()


def is_dense(t: Tensor) -> bool:
    """Return whether a tensor has memory of its own: not one that is sparse, nested, or a shell around another."""
    if t.layout != torch.strided or t.is_nested:
        return False
    return type(t) is Tensor or type(t).__torch_dispatch__ is Tensor.__torch_dispatch__  # type: ignore[attr-defined]


def list_tensors(tree: Any) -> list[Tensor]:
    return [t for t in tree_leaves(tree) if isinstance(t, Tensor)]


def find_sparse_parts(t: Tensor) -> tuple[tuple[Tensor, ...], Tensor] | None:
    """Return where the values of a sparse matrix are in it, and the values; None for other kinds of tensors."""
    if t.layout == torch.sparse_coo:
        return tuple(t._indices()), t._values()
    if t.layout not in (torch.sparse_csr, torch.sparse_csc) or t.ndim != 2:
        return None
    is_csr = t.layout == torch.sparse_csr
    counts = (t.crow_indices() if is_csr else t.ccol_indices()).diff()
    lines = torch.arange(len(counts)).repeat_interleave(counts)
    return ((lines, t.col_indices()) if is_csr else (t.row_indices(), lines)), t.values()


@dataclass
class Storage:
    """The provenance of all numbers of one storage, which are `unit` bytes long.

    `tensor` is kept so that nothing else is put at its address, and `bytes` to notice what is written behind torch.
    """

    start: int
    unit: int
    numbers: Provenance
    tensor: Tensor
    bytes: Tensor

    def view(self, t: Tensor) -> Provenance:
        """View the provenance as the tensor `t` views the storage; the last axis has the units of each number."""
        size = t.element_size()
        if size < self.unit:
            times, self.unit = self.unit // size, size
            self.numbers = self.numbers.map(lambda numbers: numbers.repeat_interleave(times))
        count, offset = size // self.unit, (t.data_ptr() - self.start) // self.unit
        shape, strides = (*t.shape, count), (*(s * count for s in t.stride()), 1)
        return self.numbers.map(lambda numbers: numbers.as_strided(shape, strides, offset))


class ProvenanceMap:
    """The provenance of every number in memory, by its address."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._storages: dict[int, Storage] = {}
        self._starts: list[int] = []

    def lacks(self, t: Tensor) -> bool:
        """Return whether nothing is known of a tensor's numbers."""
        parts = None if is_dense(t) else find_sparse_parts(t)
        if parts is not None:
            return self.lacks(parts[1])
        return occupies_memory(t) and self._find(t) is None

    def read(self, t: Tensor) -> Provenance:
        """Return what is known of a tensor; its numbers are constants if nothing is."""
        parts = None if is_dense(t) else find_sparse_parts(t)
        if parts is not None:
            places, values = parts[0], self.read(parts[1])
            return Provenance(
                torch.zeros(t.shape, dtype=torch.int64).index_put(places, values.ids),
                {w: (_spread(t, places, r), _spread(t, places, c)) for w, (r, c) in values.weights.items()},
            )
        storage = self._find(t) if occupies_memory(t) else None
        if storage is None:
            return Provenance.of_constants(t.shape)
        view = storage.view(t)
        weights = {w: (r.amax(-1), c.amax(-1)) for w, (r, c) in view.weights.items() if bool((r >= 0).any())}
        return Provenance(self._ledger.reduce(view.ids), weights)

    def write(self, t: Tensor, provenance: Provenance) -> None:
        """Note that `t` now holds numbers of this provenance."""
        parts = None if is_dense(t) else find_sparse_parts(t)
        if parts is not None:
            self.write(parts[1], provenance.map(lambda numbers: numbers[parts[0]]))
        if not occupies_memory(t):
            return
        storage = self._find(t) or self._add(t)
        ids, weights = storage.numbers.ids, storage.numbers.weights
        for weight in provenance.weights.keys() - weights.keys():
            weights[weight] = torch.full_like(ids, -1), torch.full_like(ids, -1)
        view = storage.view(t)
        view.ids.copy_(provenance.ids.unsqueeze(-1))
        for weight, indices in view.weights.items():
            for old, new in zip(indices, provenance.weights.get(weight, (-1, -1)), strict=True):
                old.copy_(torch.as_tensor(new).unsqueeze(-1))
        storage.bytes = read_bytes(storage.tensor).clone()

    def was_changed(self, t: Tensor) -> bool:
        """Return whether the numbers in memory are not those that the last known operation left there."""
        storage = self._find(t) if occupies_memory(t) else None
        return storage is not None and not torch.equal(storage.bytes, read_bytes(storage.tensor))

    def _find(self, t: Tensor) -> Storage | None:
        start = t.untyped_storage().data_ptr()
        if start not in self._storages:  # memory shared by other means, as with numpy
            start = self._starts[bisect_right(self._starts, t.data_ptr()) - 1] if self._starts else 0
        found = self._storages.get(start)
        end = t.data_ptr() + t.element_size() * (1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True)))
        fits = found and start <= t.data_ptr() and end <= start + found.numbers.ids.numel() * found.unit
        return found if fits else None

    def _add(self, t: Tensor) -> Storage:
        start, unit = t.untyped_storage().data_ptr(), t.element_size()
        numbers = Provenance.of_constants(torch.Size([t.untyped_storage().nbytes() // unit]))
        self._storages[start] = Storage(start, unit, numbers, t, read_bytes(t).clone())
        if start not in self._starts:
            insort(self._starts, start)
        return self._storages[start]


def _spread(t: Tensor, places: tuple[Tensor, ...], indices: Tensor) -> Tensor:
    """Return rows or columns of a sparse tensor's values in the places of a dense one."""
    return torch.full(t.shape, -1).index_put(places, indices)


def read_bytes(t: Tensor) -> Tensor:
    """Return the bytes of a tensor's whole storage, not a copy."""
    return torch.empty(0, dtype=torch.uint8).set_(t.untyped_storage())
