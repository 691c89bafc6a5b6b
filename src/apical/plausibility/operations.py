"""How provenance goes through an operation: a pointwise one, a move, a product, a sum, or any other.

The first four kinds cover nearly all of torch and keep track of weights. What another operation makes of weights has no rows
and columns that anyone could know: its numbers are derived from the weights, under a name that ends in `~`.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from apical.plausibility.provenance import Indices, Ledger, Provenance

ROWS, COLUMNS = "rows", "columns"
Result = tuple[Provenance, dict[str, str]]
"""What is known of a result, and for each matrix of weights that acted on a signal, the side that was summed over."""

FACTORS = {
    **dict.fromkeys(("mm", "bmm"), ("self", "mat2")),
    **dict.fromkeys(("baddbmm", "addbmm"), ("batch1", "batch2")),
    **{"addmm": ("mat1", "mat2"), "mv": ("self", "vec"), "addmv": ("mat", "vec")},
    **{"dot": ("self", "tensor"), "vdot": ("self", "other"), "_sparse_addmm": ("mat1", "mat2")},
}
"""The products, and what torch calls their two factors."""
ADDITIONS = {"add", "sub", "rsub", "lerp", "addcmul", "addcdiv", "where", "maximum", "minimum"}
FACTORIES = ("ones_like", "zeros_like", "full_like", "empty_like", "empty_strided", "scalar_tensor")
"""Their results have nothing but the shape of the tensors that they are given; so have `new_…` and random ones."""
COPIES = {"copy", "clone", "_to_copy", "contiguous", "lift_fresh", "alias_copy", "detach_copy"}
MOVES = {
    *("cat", "stack", "index", "index_select", "gather", "repeat", "flip", "roll", "constant_pad_nd"),
    *("slice_scatter", "select_scatter", "diagonal_scatter", "index_put", "index_copy", "scatter", "embedding"),
    *("take", "im2col", "tril", "triu", "repeat_interleave", "masked_select", "diag_embed", "diagonal_copy"),
    *("unfold_copy", "permute_copy", "view_copy", "t_copy", "transpose_copy", "expand_copy", "rot90"),
}
ALSO_POINTWISE = {
    "fill",
    "complex",
    "polar",
    "_to_sparse",
    "_to_sparse_csr",
    "_to_sparse_csc",
    "_to_dense",
    "_coalesce",
}
ALSO_POINTWISE |= {"quantize_per_tensor", "dequantize"}
"""Operations that act place by place, or change how the same numbers are stored, without torch saying so."""
KEEP_PLACES = {"_softmax", "_log_softmax", "cumsum", "native_dropout", "renorm"}
"""Of the rest, those that leave each number where it was."""
PER_EXAMPLE = ("pool", "layer_norm", "group_norm", "scaled_dot_product")
"""Parts of the names of operations that keep the examples of a batch apart."""
INDEX_ARGUMENTS = {"indices", "index", "mask", "repeats"}
"""Arguments of moves that say where a number goes and are not numbers that go there."""


def follow_pointwise(ledger: Ledger, name: str, inputs: Sequence[Provenance], shape: torch.Size) -> Provenance:
    """Each number of the result comes from the numbers in its own place."""
    ids = inputs[0].ids if inputs else torch.zeros((), dtype=torch.int64)
    for provenance in inputs[1:]:
        ids = ledger.combine(ids, provenance.ids)
    ids = ids.expand(shape)
    weights: dict[str, Indices] = {}
    nowhere = torch.tensor(-1)
    for p in sorted(inputs, key=lambda p: p.ids.numel()):  # whose own shape it is has the last word
        is_smaller = p.ids.numel() < ids.numel() or p.ids.ndim < ids.ndim  # the latter for a batch of one
        is_spread = name in ADDITIONS and is_smaller and bool(ledger.summarise(ids).examples)
        for weight, (rows, cols) in p.weights.items():
            if is_spread and not (_list_varying_axes(rows) and _list_varying_axes(cols)):
                continue  # a row of weights added to each example's signal, as a bias is: the result is a signal
            known, old = rows.expand(shape) >= 0, weights.get(weight, (nowhere, nowhere))
            weights[weight] = torch.where(known, rows, old[0]), torch.where(known, cols, old[1])
    return Provenance(ids, weights)


def follow_scaling(ledger: Ledger, name: str, inputs: Sequence[Provenance]) -> Result | None:
    """A single row (or column) of weights times one number of each example: a product summed over that row alone."""
    if name != "mul" or len(inputs) != 2:
        return None
    for w, e in (inputs, inputs[::-1]):
        if len(w.weights) != 1 or e.weights or not ledger.summarise(e.ids).examples:
            continue
        ((weight, (rows, cols)),) = w.weights.items()
        across, down = _list_varying_axes(cols), _list_varying_axes(rows)
        if (across and down) or any(-axis <= len(e.shape) and e.shape[axis] > 1 for axis in across + down):
            continue
        ids = ledger.combine(w.ids, e.ids)
        if across or down:
            return Provenance(ids), {weight: ROWS if across else COLUMNS}
        if ids.numel() > w.ids.numel():  # a single weight, of which nobody can tell the side
            return Provenance(ids), {}
    return None


def follow_move(
    ledger: Ledger, move: Callable[[list[Tensor]], Tensor], inputs: Sequence[Provenance], index: Sequence[Provenance]
) -> Result:
    """Numbers go to other places, unchanged (cat, index, pad, …): move their addresses, and look which went where.

    Address 0 is where a padded zero comes from.
    Weights that a signal picks (a label's row) are weights that act on a one-hot signal: what comes out is one, too.
    """
    sizes = [provenance.ids.numel() for provenance in inputs]
    addresses = torch.arange(1, 1 + sum(sizes), dtype=torch.float64).split(sizes)
    moved = move([a.reshape(p.shape) for a, p in zip(addresses, inputs, strict=True)]).round().long()
    ids = torch.cat([torch.zeros(1, dtype=torch.int64), *(p.ids.reshape(-1) for p in inputs)])[moved]
    for provenance in index:
        if provenance.shape == ids.shape[: len(provenance.shape)]:  # the first axes are the index's: place by place
            picks = provenance.ids.reshape(*provenance.shape, *[1] * (ids.ndim - len(provenance.shape)))
        else:
            picks = torch.tensor(ledger.reduce_all(provenance.ids))
        ids = ledger.combine(ids, picks)
    weights: dict[str, Indices] = {}
    for weight in {weight for provenance in inputs for weight in provenance.weights}:
        known = [p.weights.get(weight) or [torch.full(p.shape, -1)] * 2 for p in inputs]
        rows, cols = (torch.cat([torch.full((1,), -1), *(k[i].reshape(-1) for k in known)])[moved] for i in (0, 1))
        weights[weight] = rows, cols
    if not any(ledger.summarise(provenance.ids).is_signal for provenance in index):
        return Provenance(ids, weights), {}
    return Provenance(ids), dict.fromkeys(weights, ROWS)


def derive(weight: str) -> str:
    """Return the name of numbers that were made from weights in a way that loses rows and columns."""
    return weight if weight.endswith("~") else f"{weight}~"


def _derive_places(ledger: Ledger, names: Iterable[str], shape: torch.Size) -> dict[str, Indices]:
    """Return new places for the numbers that an operation made from weights, each another one: (operation, number)."""
    rows = torch.full(shape, ledger.count_operation())
    return {derive(weight): (rows, torch.arange(rows.numel()).reshape(shape)) for weight in names}


def is_matrix_of(weight: str, indices: Indices) -> bool:
    """Return whether numbers differ along two axes by their place in the weights; a row, or a number for a row, does not."""
    rows, cols = indices
    if weight.endswith("~"):
        return len(_list_varying_axes(rows * (cols.max() + 1) + cols)) > 1
    return bool(_list_varying_axes(rows) and _list_varying_axes(cols))


def find_summed_side(rows: Tensor, cols: Tensor, along: int, free: int) -> str | None:
    """Return which side of a weight matrix goes away in a sum along one axis, the other one staying as axis `free`."""
    by_row, by_col = _varies(rows, along), _varies(cols, along)
    if not by_row and not by_col:  # a single one is summed over: what stays tells
        by_row, by_col = _varies(cols, free), _varies(rows, free)
    if by_row == by_col:  # everything is summed over, or nobody can tell
        return None
    return ROWS if by_row else COLUMNS


def _varies(indices: Tensor, axis: int) -> bool:
    high = indices.amax(axis)
    low = indices.where(indices >= 0, high.unsqueeze(axis)).amin(axis)
    return bool((high > low).any())


def _list_varying_axes(indices: Tensor) -> list[int]:
    """Return the axes, counted from the last, along which rows or columns vary."""
    return [axis for axis in range(-indices.ndim, 0) if _varies(indices, axis)]


def follow_product(ledger: Ledger, a: Provenance, b: Provenance) -> Result:
    """(…, M, K) × (…, K, N), summed over K: here weights act on signals, in one direction or the other."""
    b = b.map(lambda t: t.mT)  # both have the summed axis last now, and the axis that stays before it
    ids = ledger.combine(ledger.reduce(a.ids).unsqueeze(-1), ledger.reduce(b.ids).unsqueeze(-2))
    weights: dict[str, Indices] = {}
    sides: dict[str, str] = {}
    is_signal = ledger.summarise(ids).is_signal
    for one, other, is_turned in ((a, b, False), (b, a, True)):
        for weight, (rows, cols) in one.weights.items():
            side = find_summed_side(rows, cols, -1, -2)
            if weight.endswith("~"):
                side = ROWS if is_matrix_of(weight, (rows, cols)) else None
            if side is None:
                mixed = _varies(rows, -1) or _varies(cols, -1)
                if mixed and not is_signal:
                    weights |= _derive_places(ledger, [weight], ids.shape)
                elif mixed and is_matrix_of(weight, (rows, cols)):
                    sides[derive(weight)] = ROWS
                continue
            sides[weight] = side
            if weight.endswith("~"):
                weights |= {} if is_signal else _derive_places(ledger, [weight], ids.shape)
                continue
            if is_signal and not other.weights:
                continue
            # A product of weights with weights or constants is a matrix still, from the one's side to the other's.
            stays = (cols if side == ROWS else rows).amax(-1).unsqueeze(-1)
            new = torch.arange(other.shape[-2])
            if is_turned:
                stays, new = stays.mT, new.unsqueeze(-1)
            stays, new = stays.expand(ids.shape), new.expand(ids.shape)
            weights[weight] = (new, stays) if side == ROWS else (stays, new)
    return Provenance(ids, weights), sides


def follow_convolution(ledger: Ledger, u: Provenance, w: Provenance, shape: torch.Size, transposed: bool) -> Result:
    """Weights (out, in, …) slide over a signal (batch, in, …); transposed, from out to in."""
    ids = ledger.combine(ledger.reduce(u.ids.flatten(1)), torch.tensor(ledger.reduce_all(w.ids)))
    along = 0 if transposed else 1
    # One channel in and one out look alike from both sides; then the operation itself tells.
    default = ROWS if transposed else COLUMNS
    acting = [name for name in w.weights if not name.endswith("~") or is_matrix_of(name, w.weights[name])]
    sides = {name: find_summed_side(*w.weights[name], along, 1 - along) or default for name in acting}
    sides |= {name: side for name, indices in u.weights.items() if (side := find_summed_side(*indices, 1, 0))}
    return Provenance(spread_examples(ids, shape)), sides


def spread_examples(ids: Tensor, shape: torch.Size) -> Tensor:
    """Expand one id for each example to all numbers of the examples."""
    return ids.view(-1, *[1] * (len(shape) - 1)).expand(shape)


def follow_sum(ledger: Ledger, summands: Provenance, dims: Sequence[int], keepdim: bool) -> Result:
    """A sum or a mean, which is a product with ones: `(w * e).sum(0)` is `e @ w`."""
    if not summands.shape:
        return summands, {}
    flat, gone = _flatten_dims(summands, dims or range(len(summands.shape)))
    ids, sides = ledger.reduce(flat.ids), dict[str, str]()
    weights: dict[str, Indices] = {}
    is_signal = ledger.summarise(ids).is_signal
    for weight, (rows, cols) in flat.weights.items():
        by_row, by_col = _varies(rows, -1), _varies(cols, -1)
        if (by_row and by_col) or (weight.endswith("~") and (by_row or by_col)):
            if not is_signal:
                weights |= _derive_places(ledger, [weight], ids.shape)
            elif is_matrix_of(weight, (rows, cols)):
                sides[derive(weight)] = ROWS
            continue
        if by_row or by_col:
            sides[weight] = ROWS if by_row else COLUMNS
        if not is_signal or not (by_row or by_col):
            weights[weight] = rows.amax(-1) * (not by_row), cols.amax(-1) * (not by_col)
    out = Provenance(ids, weights)
    kept = [1 if d in gone else n for d, n in enumerate(summands.shape)]
    return out.map(lambda t: t.reshape(kept)) if keepdim else out, sides


def _flatten_dims(provenance: Provenance, dims: Sequence[int]) -> tuple[Provenance, list[int]]:
    """Make one dimension, the last, of these; also return which they are, counted from the first."""
    shape = provenance.shape
    gone = sorted({d % len(shape) for d in dims})
    stay = [d for d in range(len(shape)) if d not in gone]
    return provenance.map(lambda t: t.permute(*stay, *gone).reshape(*(shape[d] for d in stay), -1)), gone


def follow_other(ledger: Ledger, name: str, inputs: Sequence[Provenance], dim: Any, shape: torch.Size) -> Result:
    """Each number comes from all numbers of the inputs, or from those along `dim`, or from those of its example."""
    if not inputs:
        return Provenance.of_constants(shape), {}
    first = inputs[0]
    is_along_dim = dim is not None and len(inputs) <= 2 and first.shape and all(p.shape == first.shape for p in inputs)
    ids = _reduce_dims(ledger, inputs, dim, shape) if is_along_dim else None
    if ids is None and any(part in name for part in PER_EXAMPLE) and len(shape) > 1:
        ids = _reduce_examples(ledger, inputs, shape)
    if ids is None:
        ids = torch.full(shape, ledger.reduce_all(*(p.ids for p in inputs)))
    if name in KEEP_PLACES and first.shape == shape:
        return Provenance(ids, first.weights), {}
    names = {weight for p in inputs for weight in p.weights}
    if not ledger.summarise(ids).is_signal:
        return Provenance(ids, _derive_places(ledger, names, shape)), {}
    acting = {derive(w): ROWS for p in inputs for w, indices in p.weights.items() if is_matrix_of(w, indices)}
    return Provenance(ids), acting


def _reduce_examples(ledger: Ledger, inputs: Sequence[Provenance], shape: torch.Size) -> Tensor | None:
    """Return the ids of an operation that keeps examples apart. Gains and biases, of one axis, act on all of them."""
    ids = torch.zeros(shape[0], dtype=torch.int64)
    for provenance in inputs:
        if len(provenance.shape) > 1 and len(provenance.ids) != shape[0]:
            return None
        is_shared = len(provenance.shape) < 2
        own = provenance.ids.reshape(1, -1) if is_shared else provenance.ids.flatten(1)
        ids = ledger.combine(ids, ledger.reduce(own))
    return spread_examples(ids, shape)


def _reduce_dims(ledger: Ledger, inputs: Sequence[Provenance], dim: Any, shape: torch.Size) -> Tensor | None:
    """Return the ids of an operation along `dim`, which it keeps (softmax), shortens (topk) or takes out (amax)."""
    ids = torch.tensor(0)
    for provenance in inputs:
        flat, gone = _flatten_dims(provenance, dim if isinstance(dim, Sequence) else [dim])
        ids = ledger.combine(ids, ledger.reduce(flat.ids))
    if shape == ids.shape:
        return ids
    before = inputs[0].shape
    if len(shape) == len(before) and all(shape[d] == n for d, n in enumerate(before) if d not in gone):
        return ids.reshape([1 if d in gone else n for d, n in enumerate(before)]).expand(shape)
    return None
