"""The tensors that a rule computes with: where each came from, and whether anything wrote to them behind torch."""

from collections.abc import Callable

import torch
from torch import Tensor

from apical.core.learner import Learner
from apical.plausibility.copies import list_kept_tensors
from apical.plausibility.provenance import (
    CONSTANT,
    Indices,
    Ledger,
    Provenance,
    ProvenanceMap,
    Record,
    find_sparse_parts,
    is_dense,
)
from apical.plausibility.recognition import find_copied_weight, hands_on, has_rank, index_matrix, is_matrix, recognise


class Memory:
    """What is known of every tensor. `report` is called with an operation and what it shows to be lost."""

    def __init__(self, learner: Learner, ledger: Ledger, report: Callable[..., None]) -> None:
        self.learner, self.ledger, self.report = learner, ledger, report
        self.provenance = ProvenanceMap(ledger)
        self._unnamed_count = 0
        self.is_leaking = False  # whether values of weights may have left torch, and come back

    def summarise(self, tensor: Tensor) -> Record:
        return self.ledger.summarise(self.provenance.read(tensor).ids)

    def depends(self, t: Tensor) -> bool:
        """Return whether a tensor's numbers depend on anything but constants."""
        return self.provenance.lacks(t) or self.summarise(t) != CONSTANT

    def read(self, t: Tensor) -> Provenance:
        """Read what is known of a tensor; numbers that were made from weights and are those weights again are told."""
        known = self.provenance.read(t)
        derived = [weight for weight in known.weights if weight.endswith("~")]
        can_be_weights = derived and t.is_floating_point() and is_dense(t)
        if not can_be_weights or self.ledger.summarise(known.ids).is_signal:
            return known
        kept = dict(list_kept_tensors(self.learner))
        for weight in derived:
            places = recognise(t, kept[weight[:-1]]) if weight[:-1] in kept else None
            if places is not None:
                return Provenance(known.ids, {weight[:-1]: places})
        return known

    def read_factor(self, t: Tensor, other: Tensor) -> Provenance:
        """Read a factor of a product; a matrix of constants that acts on a signal is one of weights."""
        known = self.read(t)
        is_constant = not known.weights and is_matrix(t) and self.ledger.summarise(known.ids) == CONSTANT
        if is_constant and self.summarise(other).is_signal and has_rank(t, 2):
            return Provenance(known.ids, self._name_matrix(t))
        return known

    def is_relay(self, t: Tensor, known: Provenance) -> bool:
        """Return whether a fixed matrix only hands numbers on."""
        is_fixed = known.weights and not any(w.rstrip("~") in self.learner.params() for w in known.weights)
        return bool(is_fixed) and not self.ledger.summarise(known.ids).is_signal and hands_on(t)

    def check(self, tensor: Tensor, name: str, accepts_unknown: bool) -> None:
        """Look at an input of an operation: has it memory, was it changed behind torch, did an operation make it?

        Numbers that none made are constants if they are there in the first batch or written in Python (`accepts_unknown`).
        """
        if self.provenance.lacks(tensor):
            self._add_unknown(tensor, name, accepts_unknown)
        elif self.provenance.was_changed(tensor):
            self.report(name, "memory was written behind torch")
            known = self.provenance.read(tensor)
            copied = find_copied_weight(tensor, self.learner.named_parameters())
            self.provenance.write(tensor, Provenance(known.ids, {**known.weights, **copied}))
        elif not is_dense(tensor) and find_sparse_parts(tensor) is None:
            self.report(name, "a tensor has no memory that could be followed")

    def _add_unknown(self, t: Tensor, name: str, accepts_unknown: bool) -> None:
        if not accepts_unknown:
            self.report(name, "a tensor came that no operation made")
        weights = find_copied_weight(t, self.learner.named_parameters()) if self.is_leaking else {}
        weights = weights or (self._name_matrix(t) if is_matrix(t) else {})
        self.provenance.write(t, Provenance(torch.zeros(t.shape, dtype=torch.int64), weights))

    def _name_matrix(self, t: Tensor) -> dict[str, Indices]:
        self._unnamed_count += 1
        return {f"unnamed {self._unnamed_count} {tuple(t.shape)}": index_matrix(t)}
