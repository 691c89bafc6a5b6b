"""forward, adjoint, outer and total, against torch's own layers and autograd."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from apical.core.synapse import Conv, Dense, Synapse, read_synapse
from reference import assert_same
from strategies import Wire, wires

KINDS = ["dense", "conv1d", "conv2d"]
by_kind = pytest.mark.parametrize("kind", KINDS)


def synapse_of(wire: Wire) -> Synapse:
    synapse = read_synapse(wire.module, "0")
    assert synapse is not None
    return synapse


@by_kind
@given(data=st.data())
def test_forward_equals_the_module(kind: str, data: st.DataObject) -> None:
    wire = data.draw(wires((kind,)))
    synapse, u = synapse_of(wire), torch.randn(wire.shape, dtype=torch.float64)
    assert synapse.weight_shape == tuple(wire.module.weight.shape)
    assert_same(synapse.forward(wire.module.weight, u, wire.module.bias), wire.module(u))


@by_kind
@given(data=st.data())
def test_adjoint_is_the_adjoint_of_forward(kind: str, data: st.DataObject) -> None:
    """⟨forward(w, u), e⟩ = ⟨u, adjoint(w, e)⟩ for every u and e, for weights that are not the layer's own."""
    wire = data.draw(wires((kind,)))
    synapse, u = synapse_of(wire), torch.randn(wire.shape, dtype=torch.float64)
    w = torch.randn_like(wire.module.weight)
    up = synapse.forward(w, u)
    e = torch.randn_like(up)
    down = synapse.adjoint(w, e, u.shape)
    assert down.shape == u.shape
    torch.testing.assert_close((up * e).sum(), (u * down).sum(), rtol=1e-10, atol=1e-10)


@by_kind
@given(data=st.data())
def test_adjoint_equals_autograd_in_the_input(kind: str, data: st.DataObject) -> None:
    wire = data.draw(wires((kind,)))
    synapse, u = synapse_of(wire), torch.randn(wire.shape, dtype=torch.float64, requires_grad=True)
    up = wire.module(u)
    e = torch.randn_like(up)
    (expected,) = torch.autograd.grad(up, u, e)
    assert_same(synapse.adjoint(wire.module.weight.detach(), e, u.shape), expected)


@by_kind
@given(data=st.data(), scale=st.sampled_from([1.0, -1.0, 0.25]))
def test_outer_equals_autograd_in_w_of_the_batch_mean(kind: str, data: st.DataObject, scale: float) -> None:
    wire = data.draw(wires((kind,)))
    synapse, u = synapse_of(wire), torch.randn(wire.shape, dtype=torch.float64)
    up = wire.module(u)
    e = torch.randn_like(up)
    mean = (up * e).flatten(1).sum(1).mean()
    (expected,) = torch.autograd.grad(mean, wire.module.weight)
    assert_same(synapse.outer(u, e), expected)
    assert_same(synapse.outer(u, e, scale=scale), scale * expected)


@by_kind
@given(data=st.data(), scale=st.sampled_from([1.0, -1.0, 0.25]))
def test_total_equals_autograd_in_the_bias_of_the_batch_mean(kind: str, data: st.DataObject, scale: float) -> None:
    wire = data.draw(wires((kind,)))
    outputs = wire.module.weight.shape[0]
    bias = torch.zeros(outputs, dtype=torch.float64, requires_grad=True)
    synapse, u = synapse_of(wire), torch.randn(wire.shape, dtype=torch.float64)
    up = synapse.forward(wire.module.weight.detach(), u, bias)
    e = torch.randn_like(up)
    (expected,) = torch.autograd.grad((up * e).flatten(1).sum(1).mean(), bias)
    assert_same(synapse.total(e), expected)
    assert_same(synapse.total(e, scale=scale), scale * expected)


@by_kind
@given(data=st.data())
def test_outer_does_not_change_its_arguments(kind: str, data: st.DataObject) -> None:
    wire = data.draw(wires((kind,)))
    synapse, u = synapse_of(wire), torch.randn(wire.shape, dtype=torch.float64)
    e = torch.randn_like(wire.module(u)).detach()
    before = u.clone(), e.clone()
    synapse.outer(u, e, scale=-1.0)
    synapse.total(e, scale=-1.0)
    synapse.adjoint(wire.module.weight.detach(), e, u.shape)
    assert torch.equal(u, before[0])
    assert torch.equal(e, before[1])


@by_kind
@given(data=st.data())
def test_an_impulse_at_one_input_unit_reaches_at_most_fan_out_outputs(kind: str, data: st.DataObject) -> None:
    """fan_out counts the weights that leave one input unit: that many, where no border cuts any off."""
    wire = data.draw(wires((kind,)))
    synapse = synapse_of(wire)
    ones = torch.ones_like(wire.module.weight)
    up = synapse.forward(ones, torch.randn(wire.shape, dtype=torch.float64))
    arriving = synapse.adjoint(ones, torch.ones_like(up), wire.shape)  # how many weights reach each unit
    positions = torch.Size(wire.shape[1:-1]).numel() if kind == "dense" else 1
    assert arriving.max() <= synapse.fan_out
    if kind == "dense":
        assert bool((arriving == synapse.fan_out).all())
        assert arriving[0].numel() == positions * wire.shape[-1]


def test_fan_out_counts_the_weights_that_leave_a_unit_inside() -> None:
    layer = nn.Conv2d(4, 6, (3, 2), groups=2, padding=1)
    synapse = read_synapse(layer, "0")
    assert isinstance(synapse, Conv)
    assert synapse.fan_out == 6 // 2 * 3 * 2
    ones = torch.ones_like(layer.weight)
    arriving = synapse.adjoint(ones, torch.ones_like(layer(torch.zeros(1, 4, 8, 8))), (1, 4, 8, 8))
    assert float(arriving.detach()[0, 0, 4, 4]) == synapse.fan_out


@pytest.mark.parametrize(
    ("layer", "size"),
    [
        (nn.Conv2d(1, 2, 3, stride=3), (8, 7)),  # rows and columns that no stride reaches
        (nn.Conv2d(2, 2, 1, stride=2), (6, 5)),  # a kernel smaller than its stride: holes everywhere
        (nn.Conv2d(2, 4, (2, 4), padding="same", groups=2), (5, 4)),  # even kernels pad one side more
        (nn.Conv2d(1, 1, (4, 3), padding="same", dilation=(3, 2)), (6, 6)),
        (nn.Conv1d(3, 6, 4, padding="same", dilation=3, groups=3), (7,)),
        (nn.Conv1d(2, 3, 2, stride=3, padding=2, dilation=4), (6,)),
        (nn.Conv2d(1, 2, 2, padding="valid", stride=2), (5, 5)),
        (nn.Conv2d(1, 2, 3, padding=4), (3, 3)),  # more padding than image
    ],
    ids=str,
)
def test_awkward_convolutions_have_exact_adjoints_and_outers(layer: nn.Module, size: tuple[int, ...]) -> None:
    layer = layer.double()
    synapse = read_synapse(layer, "0")
    assert synapse is not None
    u = torch.randn(3, layer.in_channels, *size, dtype=torch.float64, requires_grad=True)
    up = layer(u)
    e = torch.randn_like(up)
    down, weight = torch.autograd.grad(up, [u, layer.weight], e)
    assert_same(synapse.forward(layer.weight, u, layer.bias), up)
    assert_same(synapse.adjoint(layer.weight, e, u.shape), down)
    assert_same(synapse.outer(u, e), weight / 3)


def test_only_weights_are_synapses() -> None:
    assert read_synapse(nn.Tanh(), "0") is None
    assert read_synapse(nn.Linear(3, 2), "0") == Dense(out_features=2, in_features=3)


@pytest.mark.parametrize(
    ("layer", "fits", "misfits"),
    [
        (nn.Linear(3, 2), [(1, 3), (2, 5, 3)], [(3,), (1, 4), (1, 3, 4)]),
        (nn.Conv1d(2, 2, 3), [(1, 2, 9)], [(2, 9), (1, 3, 9), (1, 2, 9, 9)]),
        (nn.Conv2d(2, 2, 3), [(1, 2, 9, 9)], [(2, 9, 9), (1, 3, 9, 9), (1, 2, 9)]),
    ],
    ids=["dense", "conv1d", "conv2d"],
)
def test_mismatch_is_none_for_shapes_that_fit_and_says_what_fits_otherwise(
    layer: nn.Module, fits: list[tuple[int, ...]], misfits: list[tuple[int, ...]]
) -> None:
    synapse = read_synapse(layer, "0")
    assert synapse is not None
    features = str(layer.weight.shape[1])
    for shape in fits:
        assert synapse.describe_mismatch(shape) is None
    for shape in misfits:
        said = synapse.describe_mismatch(shape)
        assert said is not None
        assert "takes (batch" in said
        assert features in said
