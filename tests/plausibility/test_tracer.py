"""The tracer: the provenance that it keeps for a number is true of that number."""

import ctypes
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import apical
from apical.plausibility.provenance import BATCH, Provenance
from apical.plausibility.recognition import recognise
from apical.plausibility.tracer import Tracer

WEIGHT = "model.0.weight"


def traced(function: Callable[[Tensor, Tensor, Tensor], Tensor]) -> tuple[Tensor, Provenance, Tracer, Tensor]:
    """What a function of (x, y, W) gives, and what is known of it; x is 3 × 4, W is 5 × 4."""
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    x, y = torch.randn(3, 4, dtype=torch.float64), torch.tensor([0, 1, 2])
    tracer = Tracer(apical.make("bp", model), x, y)
    tracer.start_batch()
    w = model[0].weight.detach()
    with torch.no_grad(), tracer:
        out = function(x, y, w)
    return out, tracer.provenance.read(out), tracer, w


MOVES: dict[str, Callable[[Tensor], Tensor]] = {
    "transpose": lambda w: w.t().contiguous(),
    "permute and reshape": lambda w: w.view(5, 2, 2).permute(2, 0, 1).reshape(4, 5),
    "flip": lambda w: w.flip(0, 1),
    "roll": lambda w: w.roll(3),
    "cat": lambda w: torch.cat([w, w.flip(0)], 1),
    "stack": lambda w: torch.stack([w, w]),
    "index": lambda w: w[torch.tensor([3, 0, 0]), 1:],
    "advanced index": lambda w: w[torch.tensor([[1], [2]]), torch.tensor([[0, 3]])],
    "index_select": lambda w: w.index_select(1, torch.tensor([2, 0])),
    "gather": lambda w: w.gather(0, torch.tensor([[4, 3, 2, 1], [0, 0, 1, 1]])),
    "repeat": lambda w: w.repeat(2, 3),
    "repeat_interleave": lambda w: w.repeat_interleave(2, 0),
    "pad": lambda w: F.pad(w, (1, 2, 0, 1), value=7.0),
    "triangle": lambda w: w.tril(),
    "expand and clone": lambda w: w.unsqueeze(1).expand(5, 3, 4).clone(),
    "unfold": lambda w: F.unfold(w.view(1, 1, 5, 4), 2),
    "slice written": lambda w: w.new_zeros(6, 5).index_put((torch.arange(5),), F.pad(w, (0, 1))),
    "in place": lambda w: w.new_zeros(5, 8)[:, ::2].copy_(w),
    "scatter": lambda w: w.new_zeros(5, 4).scatter(1, torch.tensor([[1, 0, 3, 2]] * 5), w),
    "chunks": lambda w: w.chunk(2, 1)[1].clone(),
    "diagonal": lambda w: w.diagonal().clone(),
    "double to float and back": lambda w: w.float().double(),
    "vmap": lambda w: torch.vmap(lambda row: row.flip(0))(w),
    "product with a permutation": lambda w: torch.eye(5, dtype=w.dtype).flip(0) @ w,
}


@pytest.mark.parametrize("move", MOVES)
def test_a_number_that_moved_is_known_by_its_place_in_the_weights(move: str) -> None:
    """The label of each number names a weight that has the number's value; what has no label is a fill-in."""
    out, provenance, _, w = traced(lambda x, y, w: MOVES[move](w))
    rows, cols = provenance.weights[WEIGHT]
    labelled = rows >= 0
    assert labelled.any()
    tolerance = 1e-6 if "float" in move else 0
    if move == "product with a permutation":  # its rows are named by where they went
        rows = 4 - rows
    torch.testing.assert_close(w[rows[labelled], cols[labelled]], out[labelled], rtol=tolerance, atol=tolerance)
    assert set(out[~labelled].tolist()) <= {0.0, 7.0}


SIGNALS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "pointwise": lambda x, w: x.tanh() * 2 + 1,
    "linear": lambda x, w: F.linear(x, w),
    "two layers": lambda x, w: (x @ w.T).relu() @ w,
    "einsum": lambda x, w: torch.einsum("ni,oi->no", x, w),
    "batched": lambda x, w: torch.bmm(x.unsqueeze(1), w.T.expand(3, 4, 5)).squeeze(1),
    "convolution": lambda x, w: F.conv1d(x.unsqueeze(1), w[:2, :3].unsqueeze(1)),
    "transposed convolution": lambda x, w: F.conv_transpose1d(x.unsqueeze(1), w[:1, :3].unsqueeze(1)),
    "softmax": lambda x, w: x.softmax(1),
    "maximum": lambda x, w: x.amax(1),
    "sum": lambda x, w: x.sum(1, keepdim=True),
    "pooled": lambda x, w: F.max_pool1d(x.unsqueeze(1), 2),
    "cat and half": lambda x, w: torch.cat([x, -x]).chunk(2)[1],
    "shifted": lambda x, w: x.roll(1, 0),
    "norm": lambda x, w: x / x.norm(dim=1, keepdim=True),
    "outer of each": lambda x, w: x.unsqueeze(2) * x.unsqueeze(1),
    "vjp": lambda x, w: torch.func.vjp(lambda x: (x @ w.T).sin(), x)[1](torch.ones(3, 5, dtype=x.dtype))[0],
    "picked": lambda x, w: x.gather(1, x.argmax(1, keepdim=True)),
    "end of an array": lambda x, w: torch.from_numpy(x.numpy()[1:]),
    # and those in which examples meet
    "centred": lambda x, w: x - x.mean(0),
    "similar": lambda x, w: x @ x.T,
    "moment": lambda x, w: x.T @ x,
    "mean": lambda x, w: x.mean(0),
    "softmax over the batch": lambda x, w: x.softmax(0),
    "running": lambda x, w: x.cumsum(0),
}
MEET = {"centred", "similar"}
"""Signals of one example that know the others: nothing else is called mixing, least of all a mean over the batch."""


@pytest.mark.parametrize("signal", SIGNALS)
def test_a_number_that_changes_with_an_example_is_known_to_depend_on_it(signal: str) -> None:
    """By changing one example after the other; and an example that is said to matter does (but for ties and order)."""
    function = SIGNALS[signal]
    out, provenance, tracer, w = traced(lambda x, y, w: function(x, w))
    for b in range(3):
        other = tracer.x.clone()
        other[b] += torch.randn(4, dtype=torch.float64)
        changed = (function(other, w) - out).abs() > 1e-12
        records = [tracer.ledger.records[i] for i in provenance.ids.flatten().tolist()]
        said = torch.tensor([b in record.examples for record in records]).view(out.shape)
        assert not (changed & ~said).any()
        if signal not in ("running", "moment"):
            assert (said.flatten(1).any(1) == changed.flatten(1).any(1)).all() if out.ndim > 1 else said.any()
    sources = tracer.ledger.summarise(provenance.ids).sources
    assert (BATCH in sources) == (signal in MEET)


@given(st.integers(0, 5))
def test_the_target_is_as_many_hops_away_as_there_were_synapses(count: int) -> None:
    matrices = [torch.randn(4, 4, dtype=torch.float64) for _ in range(count)]

    def travel(x: Tensor, y: Tensor, w: Tensor) -> Tensor:
        e = x * y.unsqueeze(1)
        for m in matrices:
            e = torch.tanh(e @ m)
        return e

    _, provenance, tracer, _ = traced(travel)
    assert {tracer.ledger.records[i].hops for i in provenance.ids.flatten().tolist()} == {count}


def test_the_shortest_way_counts() -> None:
    m = torch.randn(4, 4, dtype=torch.float64)
    _, provenance, tracer, _ = traced(lambda x, y, w: (x * y.unsqueeze(1)) @ m + y.unsqueeze(1))
    assert tracer.ledger.summarise(provenance.ids).hops == 0


def test_what_has_only_the_shape_of_a_signal_depends_on_nothing() -> None:
    _, provenance, tracer, _ = traced(lambda x, y, w: torch.ones_like(x) + x.new_zeros(3, 4) + torch.full_like(x, 2))
    assert provenance.ids.unique().tolist() == [0]
    assert not tracer.ledger.records[0].is_signal


def test_a_tensor_that_is_overwritten_forgets_what_it_was() -> None:
    _, provenance, tracer, _ = traced(lambda x, y, w: (x * y.unsqueeze(1)).copy_(x))
    assert tracer.ledger.summarise(provenance.ids).hops is None
    _, provenance, tracer, _ = traced(lambda x, y, w: (x * y.unsqueeze(1)).zero_())
    assert provenance.ids.unique().tolist() == [0]


def test_numbers_written_over_weights_are_weights_no_longer() -> None:
    """Only those that were overwritten: the other rows are still the ones that they were."""

    def overwrite(x: Tensor, y: Tensor, w: Tensor) -> Tensor:
        out = w.clone()
        out[:2] = x[:2]
        return out

    _, provenance, _, _ = traced(overwrite)
    rows, cols = provenance.weights[WEIGHT]
    assert rows.tolist() == [[-1] * 4] * 2 + [[row] * 4 for row in (2, 3, 4)]
    assert cols.tolist() == [[-1] * 4] * 2 + [[0, 1, 2, 3]] * 3
    _, provenance, _, _ = traced(lambda x, y, w: w.clone().zero_())
    assert provenance.weights == {}


PICKS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "one-hot": lambda y, w: (y.unsqueeze(1) == torch.arange(5)).to(w.dtype) @ w,
    "index": lambda y, w: w[y],
    "index_select": lambda y, w: w.index_select(0, y),
    "embedding": lambda y, w: F.embedding(y, w),
    "gather": lambda y, w: w.gather(0, y.unsqueeze(1).expand(3, 4)),
}


@pytest.mark.parametrize("pick", PICKS)
def test_rows_that_a_label_picks_are_weights_that_act_on_its_one_hot_code(pick: str) -> None:
    """All of these are the same numbers: a signal, one synapse from the target, that came down through W."""
    out, provenance, tracer, w = traced(lambda x, y, w: PICKS[pick](y, w))
    torch.testing.assert_close(out, w[:3], rtol=0, atol=0)
    assert provenance.weights == {}
    assert {tracer.ledger.records[i].hops for i in provenance.ids.flatten().tolist()} == {1}
    assert [finding.weight for finding in tracer.reached] == [WEIGHT]


# What it loses sight of.


@torch.library.custom_op("audit_tests::double", mutates_args=())
def double(w: Tensor) -> Tensor:
    return 2 * w


def write_behind(x: Tensor, y: Tensor, w: Tensor) -> Tensor:
    out = torch.zeros_like(w) + 1
    ctypes.memmove(out.data_ptr(), w.data_ptr(), 8)
    return out + 0


LOSSES: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "an operator that torch does not define ran": lambda x, y, w: double(w),
    "memory was written behind torch": write_behind,
    "the size of a tensor depends on numbers": lambda x, y, w: w[w > 0],
    "numbers became values of Python": lambda x, y, w: x * float(w[0, 0]),
    "a tensor has no memory that could be followed": lambda x, y, w: w.float().to_mkldnn().to_dense(),
}


@pytest.mark.parametrize("what", LOSSES)
def test_what_leaves_its_sight_is_reported_with_the_line(what: str) -> None:
    _, _, tracer, _ = traced(LOSSES[what])
    assert what in [loss.what for loss in tracer.not_followed]
    assert all("test_tracer.py" in loss.line for loss in tracer.not_followed)


def test_a_constant_may_be_read_and_its_size_known() -> None:
    ones = torch.ones(3, 4, dtype=torch.float64)
    _, _, tracer, _ = traced(lambda x, y, w: x * float(ones[0, 0]) * len(ones[ones > 0]))
    assert tracer.not_followed == []


def test_tensors_from_outside_are_constants_in_the_first_batch_alone() -> None:
    """What is there from the start is fixed; what comes later may have been made from anything."""
    for batches in (1, 2):
        model = nn.Sequential(nn.Linear(4, 3)).double()
        x, y = torch.randn(3, 4, dtype=torch.float64), torch.tensor([0, 1, 2])
        tracer = Tracer(apical.make("bp", model), x, y)
        for _ in range(batches):
            tracer.start_batch()
            outside = torch.randn(3, 4, dtype=torch.float64)
            with torch.no_grad(), tracer:
                x + outside
        assert len(tracer.not_followed) == batches - 1


def test_one_number_of_a_matrix_is_no_matrix() -> None:
    """B scaled by the length of W, or of its rows, acts as B; an unknown function of all of W may be W."""
    b = torch.randn(3, 5, 4, dtype=torch.float64)[0]
    made = {
        lambda w: b * torch.linalg.vector_norm(w): set(),
        lambda w: b * torch.linalg.vector_norm(w, dim=1, keepdim=True): set(),
        lambda w: torch.linalg.pinv(w).t(): {f"{WEIGHT}~"},
    }
    for make, acting in made.items():
        _, _, tracer, _ = traced(lambda x, y, w, make=make: (x @ w.t() * y.unsqueeze(1)) @ make(w))  # type: ignore[misc]
        assert {finding.weight for finding in tracer.reached} == acting


@pytest.mark.parametrize("factor", [3.0, -0.1])
def test_scaled_and_turned_weights_are_recognised_and_others_are_not(factor: float) -> None:
    w = torch.randn(5, 4, dtype=torch.float64)
    for made in (factor * w, (factor * w).t()):
        places = recognise(made, w)
        assert places is not None
        torch.testing.assert_close(factor * w[places], made)
    assert recognise(torch.randn(5, 4, dtype=torch.float64) ** 2, w - w.mean()) is None


def test_four_random_numbers_are_no_four_weights_however_alike_they_look() -> None:
    """One in twenty pairs of such matrices has a cosine above 0.9; one in some thousand is too like to be chance."""
    pairs = torch.randn(2000, 2, 2, 2, dtype=torch.float64)
    assert sum(recognise(w * 0.3, w) is not None for w, _ in pairs) == len(pairs)
    assert sum(recognise(made, w) is not None for w, made in pairs) <= 3
