"""How provenance goes through an operation: five kinds of them cover nearly all of torch.

    pointwise   each number of the result comes from the numbers in its own place
    moves       numbers go to other places, unchanged (cat, index, pad, …); found by moving their addresses
    products    two tensors are contracted: here weights act on signals, in one direction or the other
    sums        one tensor is contracted with ones: `(w * e).sum(0)` is a product, too
    the rest    each number comes from all numbers of its inputs, along the dimension that the operation names

The first four keep track of weights; what the rest gives is a signal.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from apical.plausibility.memory import Label, Shade
from apical.plausibility.records import Ledger, Root

ROWS, COLS = "rows", "columns"
Use = Callable[[str, str, Tensor], list[Root]]
"""(weights, the side of them that is summed over, the result's ids) -> what happened, to be noted in the result."""

ADDING = {"add", "sub", "rsub", "lerp", "addcmul", "addcdiv", "where", "maximum", "minimum"}
FACTORIES = ("ones_like", "zeros_like", "full_like", "empty_like", "empty_strided", "scalar_tensor")
"""Operations whose result has nothing of the tensors that they are given but the shape; so has all that is `new_…`,
and what is random, which is noise."""
SAME_PLACE = {"copy", "clone", "_to_copy", "contiguous", "lift_fresh", "alias_copy", "detach_copy"}
MOVES = {
    *("cat", "stack", "index", "index_select", "gather", "repeat", "flip", "roll", "constant_pad_nd"),
    *("slice_scatter", "select_scatter", "diagonal_scatter", "index_put", "scatter", "embedding", "take"),
    *("im2col", "tril", "triu", "repeat_interleave", "masked_select", "diag_embed", "diagonal_copy"),
    *("unfold_copy", "permute_copy", "view_copy", "t_copy", "transpose_copy", "expand_copy", "rot90"),
}
IN_PLACE = {"_softmax", "_log_softmax", "cumsum", "native_dropout", "renorm"}
"""Of the rest, those that leave each number where it was."""
INDICES = {"indices", "index", "mask", "repeats"}
"""Arguments of moves that say where a number goes and are not numbers that go there."""


def pointwise(ledger: Ledger, name: str, shades: Sequence[Shade], shape: torch.Size) -> Shade:
    """Each number from the numbers in its place."""
    ids = torch.zeros(shape, dtype=torch.int64)
    for shade in shades:
        ids = ledger.meet(ids, shade.ids)
    labels: dict[str, Label] = {}
    for shade in sorted(shades, key=lambda shade: shade.ids.numel()):  # whose own shape it is has the last word
        less = shade.ids.numel() < ids.numel() or shade.ids.ndim < ids.ndim  # the latter for a batch of one
        spread = name in ADDING and less and bool(ledger.of(ids).examples)
        for source, (rows, cols) in shade.labels.items():
            if spread and not (_axes(rows) and _axes(cols)):
                continue  # a row of weights added to each example's signal, as a bias is: the result is a signal
            rows, cols = rows.expand(shape), cols.expand(shape)
            old = labels.get(source)
            if old is not None:
                rows, cols = rows.where(rows >= 0, old[0]), cols.where(rows >= 0, old[1])
            labels[source] = rows, cols
    return Shade(ids, labels)


def scaled(ledger: Ledger, use: Use, name: str, shades: Sequence[Shade]) -> Shade | None:
    """A single row (or column) of weights times one number of each example: a product summed over that row alone."""
    if name != "mul" or len(shades) != 2:
        return None
    for w, e in (shades, shades[::-1]):
        if len(w.labels) != 1 or e.labels or not ledger.of(e.ids).examples:
            continue
        ((source, (rows, cols)),) = w.labels.items()
        across, down = _axes(cols), _axes(rows)
        if (across and down) or any(-axis <= len(e.shape) and e.shape[axis] > 1 for axis in across + down):
            continue
        ids = ledger.meet(w.ids, e.ids)
        if across or down:
            return signal(ledger, use, Shade(ids), {source: ROWS if across else COLS})
        if ids.numel() > w.ids.numel():  # a single weight, of which nobody can tell the side
            return Shade(ids)
    return None


def _axes(cells: Tensor) -> list[int]:
    """The axes, counted from the last, along which a side varies."""
    return [axis for axis in range(-cells.ndim, 0) if _varies(cells, axis)]


def moved(
    ledger: Ledger, use: Use, run: Callable[[list[Tensor]], Tensor], shades: Sequence[Shade], index: Sequence[Shade]
) -> Shade:
    """Run the move on the numbers' own places (place 0 is where a padded zero comes from), and look who went where.

    Weights that a signal picks (a label's row) are weights that act on a one-hot signal: what comes out is one, too.
    """
    places, start = [], 1
    for shade in shades:
        count = shade.ids.numel()
        places.append(torch.arange(start, start + count, dtype=torch.float64).reshape(shade.shape))
        start += count
    went = run(places).round().long()
    ids = torch.cat([torch.zeros(1, dtype=torch.int64), *(s.ids.reshape(-1) for s in shades)])[went]
    for shade in index:
        ids = ledger.meet(ids, _over(ledger, shade.ids, ids.shape))
    labels = {}
    for source in {source for shade in shades for source in shade.labels}:
        sides = [
            torch.cat([torch.full((1,), -1), *(_side(shade, source, side) for shade in shades)])[went]
            for side in (0, 1)
        ]
        labels[source] = (sides[0], sides[1])
    picked = Shade(ids, labels)
    if not any(ledger.of(shade.ids).of_data for shade in index):
        return picked
    return signal(ledger, use, picked, dict.fromkeys(labels, ROWS))


def _over(ledger: Ledger, index: Tensor, shape: torch.Size) -> Tensor:
    """An index's ids over what it picked: place by place where its axes are the first ones, else all of them."""
    if index.shape == shape[: index.ndim]:
        return index.reshape(*index.shape, *[1] * (len(shape) - index.ndim))
    return torch.tensor(ledger.joined(index.unique().tolist()))


def _side(shade: Shade, source: str, side: int) -> Tensor:
    label = shade.labels.get(source)
    return torch.full((shade.ids.numel(),), -1) if label is None else label[side].reshape(-1)


def signal(ledger: Ledger, use: Use, shade: Shade, sides: dict[str, str]) -> Shade:
    """The outcome of weights that were summed over on these sides: one synapse further, nobody's weights."""
    roots = [root for source, side in sides.items() for root in use(source, side, shade.ids)]
    return Shade(ledger.marked(shade.ids, roots, hop=bool(sides)))


def summed_side(rows: Tensor, cols: Tensor, along: int, free: int) -> str | None:
    """Which side of a matrix of weights goes away in a sum along one axis, the other one staying as axis `free`."""
    by_row, by_col = _varies(rows, along), _varies(cols, along)
    if by_row == by_col:  # a single one is summed over, or everything is: what stays tells
        if by_row:
            return None
        by_row, by_col = _varies(cols, free), _varies(rows, free)
    if by_row == by_col:
        return None
    return ROWS if by_row else COLS


def _varies(cells: Tensor, axis: int) -> bool:
    valid = cells >= 0
    high = cells.amax(axis)
    low = cells.where(valid, high.unsqueeze(axis)).amin(axis)
    return bool((high > low).any())


def product(ledger: Ledger, use: Use, a: Shade, b: Shade) -> Shade:
    """(…, M, K) × (…, K, N), summed over K."""
    b = b.map(lambda t: t.mT)  # both have the summed axis last now, and the axis that stays before it
    ids = ledger.meet(ledger.join(a.ids).unsqueeze(-1), ledger.join(b.ids).unsqueeze(-2))
    labels: dict[str, Label] = {}
    sides: dict[str, str] = {}
    of_data = ledger.of(ids).of_data
    for one, other, turned in ((a, b, False), (b, a, True)):
        for source, (rows, cols) in one.labels.items():
            side = summed_side(rows, cols, -1, -2)
            if side is None:
                continue
            sides[source] = side
            if of_data and not other.labels:
                continue
            # A product of weights with weights or constants is a matrix still, from the one's side to the other's.
            stays = (cols if side == ROWS else rows).amax(-1).unsqueeze(-1)
            new = torch.arange(other.shape[-2])
            if turned:
                stays, new = stays.mT, new.unsqueeze(-1)
            stays, new = stays.expand(ids.shape), new.expand(ids.shape)
            labels[source] = (new, stays) if side == ROWS else (stays, new)
    return Shade(signal(ledger, use, Shade(ids), sides).ids, labels)


def convolution(ledger: Ledger, use: Use, u: Shade, w: Shade, shape: torch.Size, transposed: bool) -> Shade:
    """Weights (out, in, …) slide over a signal (batch, in, …); transposed, from out to in."""
    ids = ledger.meet(ledger.join(u.ids.flatten(1)), torch.tensor(ledger.joined(w.ids.unique().tolist())))
    ids = ids.view(-1, *[1] * (len(shape) - 1)).expand(shape)
    along = 0 if transposed else 1
    # One channel in and one out look alike from both sides; then the operation itself tells.
    sides = {s: summed_side(*w.labels[s], along, 1 - along) or (ROWS if transposed else COLS) for s in w.labels}
    for source, label in u.labels.items():
        side = summed_side(*label, 1, 0)
        if side is not None:
            sides[source] = side
    return signal(ledger, use, Shade(ids), sides)


def summed(ledger: Ledger, use: Use, shade: Shade, dims: Sequence[int], keep: bool) -> Shade:
    """A sum or a mean."""
    count = len(shade.shape)
    dims = sorted({d % count for d in dims} if dims else range(count)) if count else []
    if not dims:
        return shade
    stay = [d for d in range(count) if d not in dims]
    size = [shade.shape[d] for d in stay]
    flat = shade.map(lambda t: t.permute(*stay, *dims).reshape(*size, -1))
    ids, labels, sides = ledger.join(flat.ids), {}, {}
    of_data = ledger.of(ids).of_data
    for source, (rows, cols) in flat.labels.items():
        by_row, by_col = _varies(rows, -1), _varies(cols, -1)
        if by_row and by_col:
            continue
        if by_row or by_col:
            sides[source] = ROWS if by_row else COLS
        if not of_data or not (by_row or by_col):
            labels[source] = (
                torch.zeros_like(rows[..., 0]) if by_row else rows.amax(-1),
                torch.zeros_like(cols[..., 0]) if by_col else cols.amax(-1),
            )
    out = Shade(signal(ledger, use, Shade(ids), sides).ids, labels)
    shape = [1 if d in dims else n for d, n in enumerate(shade.shape)]
    return out.map(lambda t: t.reshape(shape)) if keep else out


def rest(ledger: Ledger, name: str, shades: Sequence[Shade], named: dict[str, Any], shape: torch.Size) -> Shade:
    """Everything from everything, but along the dimension that is named, or example by example in a pooling."""
    if not shades:
        return Shade(torch.zeros(shape, dtype=torch.int64))
    first = shades[0]
    ids = None
    if len(shades) <= 2 and all(s.shape == first.shape for s in shades):
        ids = _along(ledger, shades, named.get("dim"), shape)
    if ids is None and "pool" in name and shape and all(s.shape[:1] == shape[:1] for s in shades):
        rows = torch.zeros(shape[0], dtype=torch.int64)
        for shade in shades:
            rows = ledger.meet(rows, ledger.join(shade.ids.flatten(1)))
        ids = rows.view(-1, *[1] * (len(shape) - 1)).expand(shape)
    if ids is None:
        whole = ledger.joined(i for shade in shades for i in shade.ids.unique().tolist())
        ids = torch.full(shape, whole)
    return Shade(ids, first.labels if name in IN_PLACE and first.shape == shape else {})


def _along(ledger: Ledger, shades: Sequence[Shade], dim: Any, shape: torch.Size) -> Tensor | None:
    """The ids of an operation along `dim`, which it keeps (softmax), shortens (topk) or takes out (amax)."""
    count = len(shades[0].shape)
    if dim is None or not count:
        return None
    dims = sorted({d % count for d in (dim if isinstance(dim, Sequence) else [dim])})
    stay = [d for d in range(count) if d not in dims]
    size = [shades[0].shape[d] for d in stay]
    ids = torch.zeros(size, dtype=torch.int64)
    for shade in shades:
        ids = ledger.meet(ids, ledger.join(shade.ids.permute(*stay, *dims).reshape(*size, -1)))
    if list(shape) == size:
        return ids
    kept = [1 if d in dims else n for d, n in enumerate(shades[0].shape)]
    if len(shape) == count and all(shape[d] == kept[d] for d in stay):
        return ids.reshape(kept).expand(shape)
    return None
