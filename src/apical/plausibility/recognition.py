"""Recognise weights by their values, where how they were computed says too little."""

from collections.abc import Iterable

import torch
from torch import Tensor

from apical.plausibility.provenance import Indices

MIN_COPIED_VALUES = 2
"""So many different values, whole numbers aside, that are all found in a weight are no accident."""
LIKENESS = 0.9
"""Numbers made from weights are those weights if the cosine between the two is larger than this."""
CHANCE = 1e-4
"""How probable it may be that as many random numbers are as like; a matrix of four numbers often has a cosine of 0.9."""


def is_matrix(t: Tensor) -> bool:
    return t.ndim >= 2 and t.is_floating_point()


def index_matrix(t: Tensor, places: Tensor | None = None) -> Indices:
    """Return the rows and columns of these places of a matrix, by default of all; columns are all axes after the first."""
    places = torch.arange(t.numel()).reshape(t.shape) if places is None else places
    return places // t[0].numel(), places % t[0].numel()


def find_copied_weight(t: Tensor, weights: Iterable[tuple[str, Tensor]]) -> dict[str, Indices]:
    """Return the weight whose values these are, if there is one, and where in it they are."""
    values = t.detach().reshape(-1)
    if not is_matrix(t) or values[values != values.round()].unique().numel() < MIN_COPIED_VALUES:
        return {}
    for name, weight in weights:
        if weight.ndim < 2:
            continue
        known, order = weight.detach().reshape(-1).to(values.dtype).sort()
        at = torch.searchsorted(known, values).clamp_max(known.numel() - 1)
        if bool((known[at] == values).all()):
            return {name: index_matrix(weight, order[at].reshape(t.shape))}
    return {}


def recognise(t: Tensor, weight: Tensor) -> Indices | None:
    """Return where in a matrix of weights numbers are that were made from it, if they are its numbers, perhaps scaled."""
    if weight.ndim < 2 or t.numel() != weight.numel():
        return None
    numbers, matrix = t.detach().double().flatten(), weight.detach().double().flatten(1)
    places = torch.arange(matrix.numel()).reshape(matrix.shape)
    for known, own in ((matrix, places), (matrix.t(), places.t())):
        cosine = float(torch.cosine_similarity(numbers, known.flatten(), dim=0))
        if abs(cosine) > LIKENESS and max(0.0, 1 - cosine**2) ** ((len(numbers) - 1) / 2) < CHANCE:
            return index_matrix(weight, own.reshape(t.shape))
    (ordered, order), (known, own) = numbers.sort(), matrix.flatten().sort()
    if torch.allclose(ordered, known, rtol=1e-4):
        return index_matrix(weight, own[order.argsort()].reshape(t.shape))
    return None


def has_rank(t: Tensor, rank: int) -> bool:
    """Return whether a matrix has at least this rank; one that only sums numbers has rank 1."""
    return bool((torch.linalg.matrix_rank(t.detach().flatten(1).double()) >= rank).all())


def hands_on(t: Tensor) -> bool:
    """Return whether a square matrix hands each number on to one other, as the identity does."""
    if t.ndim != 2 or t.shape[0] != t.shape[1]:
        return False
    squares = t.detach().double().square()
    return min(float(squares.amax(dim).sum()) for dim in (0, 1)) > LIKENESS * float(squares.sum())
