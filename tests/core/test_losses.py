"""Losses, one value per example, and the error that each one starts the way down with."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import apical
from apical.core.losses import Loss
from reference import assert_same

shapes = st.tuples(st.integers(1, 5), st.integers(2, 6))
extra = st.lists(st.integers(1, 3), max_size=2)
smoothings = st.sampled_from([0.0, 0.1, 0.9])


def a_batch(shape: tuple[int, ...], seed: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(seed)
    output = torch.randn(shape, dtype=torch.float64)
    return output, torch.randint(0, shape[1], (shape[0], *shape[2:]))


@given(shape=shapes, positions=extra, smoothing=smoothings, seed=st.integers(0, 99))
def test_cross_entropy_is_torchs_mean_for_each_example(
    shape: tuple[int, int], positions: list[int], smoothing: float, seed: int
) -> None:
    output, y = a_batch((*shape, *positions), seed)
    losses = Loss("cross_entropy", smoothing)(output, y)
    each = [F.cross_entropy(o[None], t[None], label_smoothing=smoothing) for o, t in zip(output, y, strict=True)]
    assert_same(losses, torch.stack(each))
    assert_same(losses.mean(), F.cross_entropy(output, y, label_smoothing=smoothing))


@given(shape=shapes, smoothing=smoothings, seed=st.integers(0, 99))
def test_the_error_of_cross_entropy_is_target_minus_softmax(
    shape: tuple[int, int], smoothing: float, seed: int
) -> None:
    output, y = a_batch(shape, seed)
    target = F.one_hot(y, shape[1]).double() * (1 - smoothing) + smoothing / shape[1]
    losses, xi = Loss("cross_entropy", smoothing).error(output, y)
    assert_same(xi, target - output.softmax(1))
    assert_same(losses, -(target * output.log_softmax(1)).sum(1))


@given(shape=shapes, positions=extra, smoothing=smoothings, scale=st.sampled_from([1.0, 3.0]), seed=st.integers(0, 99))
def test_the_error_of_cross_entropy_is_minus_its_gradient_at_every_position(
    shape: tuple[int, int], positions: list[int], smoothing: float, scale: float, seed: int
) -> None:
    """For labels and for floating targets; these need not sum to 1 where values are not checked, as on a GPU."""
    output, labels = a_batch((*shape, *positions), seed)
    output.requires_grad_()
    for y in (labels, scale * torch.rand_like(output).softmax(1)):
        each = F.cross_entropy(output, y, label_smoothing=smoothing, reduction="none")
        expected = each.reshape(len(output), -1).mean(1)  # over positions
        (gradient,) = torch.autograd.grad(expected.sum(), output)
        losses, xi = Loss("cross_entropy", smoothing).error(output.detach(), y)
        assert_same(losses, expected.detach())
        assert_same(xi, -gradient)


@given(shape=shapes, positions=extra, smoothing=smoothings, seed=st.integers(0, 99))
def test_the_error_of_mse_is_target_minus_output(
    shape: tuple[int, int], positions: list[int], smoothing: float, seed: int
) -> None:
    output, y = a_batch((*shape, *positions), seed)
    hot = F.one_hot(y, shape[1]).movedim(-1, 1).double()
    target = hot * (1 - smoothing) + smoothing / shape[1]
    losses, xi = Loss("mse", smoothing).error(output, y)
    assert_same(xi, target - output)
    assert_same(losses, (target - output).square().flatten(1).sum(1) / 2)


@given(shape=shapes, positions=extra, seed=st.integers(0, 99))
def test_mse_takes_values_as_they_are(shape: tuple[int, int], positions: list[int], seed: int) -> None:
    output, _ = a_batch((*shape, *positions), seed)
    y = torch.randn_like(output)
    losses, xi = Loss("mse").error(output, y)
    assert_same(xi, y - output)
    assert_same(losses, (y - output).square().flatten(1).sum(1) / 2)


@given(shape=shapes, seed=st.integers(0, 99))
def test_the_error_of_a_callable_is_minus_its_gradient_for_each_example(shape: tuple[int, int], seed: int) -> None:
    output, y = a_batch(shape, seed)
    losses, xi = Loss(lambda o, t: (o.exp().sum(1) * (t + 1)).sqrt()).error(output, y)
    expected = (output.exp().sum(1) * (y + 1)).sqrt()
    assert_same(losses, expected)
    assert_same(xi, -output.exp() * (y + 1)[:, None] / (2 * expected)[:, None])


@pytest.mark.parametrize("kind", ["cross_entropy", "mse"])
def test_errors_do_not_depend_on_the_size_of_the_batch(kind: str) -> None:
    output, y = a_batch((4, 3), 0)
    _, xi = Loss(kind).error(output, y)
    _, repeated = Loss(kind).error(output.repeat(5, 1), y.repeat(5))
    assert_same(repeated, xi.repeat(5, 1))


@pytest.mark.parametrize("kind", ["cross_entropy", "mse"])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64])
def test_labels_may_have_any_integer_type(kind: str, dtype: torch.dtype) -> None:
    output, y = a_batch((4, 3), 0)
    loss = Loss(kind)
    loss.check(y.to(dtype), output.shape, values=True)
    for got, expected in zip(loss.error(output, y.to(dtype)), loss.error(output, y), strict=True):
        assert_same(got, expected)


@pytest.mark.parametrize("kind", ["cross_entropy", "mse"])
def test_floating_targets_may_have_another_precision(kind: str) -> None:
    model = nn.Sequential(nn.Linear(4, 3))
    x, y = torch.randn(5, 4), torch.rand(5, 3, dtype=torch.float64).softmax(1)
    learner = apical.make("bp", model, loss=kind)
    learner.credit(x, y)
    output = model(x).double()
    loss = F.cross_entropy(output, y) if kind == "cross_entropy" else (output - y).square().sum() / 10
    (expected,) = torch.autograd.grad(loss, model[0].weight)
    assert model[0].weight.grad.dtype == torch.float32
    assert_same(model[0].weight.grad, expected)


def test_a_callable_may_be_called_like_a_built_in_loss() -> None:
    """Its targets are its own affair, whatever its name."""

    def mse(output: Tensor, y: Tensor) -> Tensor:
        return (output.sum(1) - y).square()

    model = nn.Sequential(nn.Linear(4, 3)).double()
    x, y = torch.randn(5, 4, dtype=torch.float64), torch.randn(5, dtype=torch.float64)
    apical.make("bp", model, loss=mse).credit(x, y)
    (expected,) = torch.autograd.grad(mse(model(x), y).mean(), model[0].weight)
    assert_same(model[0].weight.grad, expected)


def test_a_callable_may_be_an_object_and_take_any_targets() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.LogSoftmax(dim=1)).double()
    x, y = torch.randn(5, 4, dtype=torch.float64), torch.randint(0, 3, (5,))
    apical.make("bp", model, loss=nn.NLLLoss(reduction="none")).credit(x, y)
    (expected,) = torch.autograd.grad(F.nll_loss(model(x), y), model[0].weight)
    assert_same(model[0].weight.grad, expected)


def test_a_network_may_give_one_value_per_example() -> None:
    class Squeeze(nn.Module):
        def forward(self, a: Tensor) -> Tensor:
            return a.squeeze(1)

    model = nn.Sequential(nn.Linear(4, 1), Squeeze()).double()
    x, y = torch.randn(5, 4, dtype=torch.float64), torch.randn(5, dtype=torch.float64)
    apical.make("bp", model, loss="mse").credit(x, y)
    (expected,) = torch.autograd.grad((model(x) - y).square().mean() / 2, model[0].weight)
    assert_same(model[0].weight.grad, expected)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("shape", [(5, 3), (5, 3, 4)])
@pytest.mark.parametrize("kind", ["cross_entropy", "mse", "values", "own"])
def test_a_step_starts_from_the_mean_of_the_losses_and_the_same_errors(
    kind: str, shape: tuple[int, ...], smoothing: float
) -> None:
    output = torch.randn(shape, dtype=torch.float64)
    y = torch.randint(0, 3, (shape[0], *shape[2:]))
    if kind == "values":
        y, kind = torch.rand(shape, dtype=torch.float64).softmax(1), "cross_entropy"
    loss = Loss(lambda o, t: o.square().flatten(1).sum(1)) if kind == "own" else Loss(kind, smoothing)
    losses, xi = loss.error(output, y)
    mean, start = loss.start(output, y)
    assert_same(mean, losses.mean())
    assert_same(start, xi)


def test_an_output_of_minus_infinity_has_a_loss_where_another_class_is_true() -> None:
    output, y = torch.tensor([[0.0, 1.0, -torch.inf]]), torch.tensor([1])
    mean, xi = Loss().start(output, y)
    assert_same(mean, F.cross_entropy(output, y))
    assert torch.isfinite(xi).all()


@pytest.mark.parametrize("shape", [(5, 3), (5, 3, 4)])
@pytest.mark.parametrize("off", [0.0, 9e-4])
def test_probabilities_may_be_a_little_off(shape: tuple[int, ...], off: float) -> None:
    y = torch.randn(shape).softmax(1) * (1 + off)
    Loss().check(y, y.shape, values=True)
    with pytest.raises(apical.ApicalError, match="loss='mse'"):
        Loss().check(y * 1.002, y.shape, values=True)


@pytest.mark.parametrize("classes", [2, 10, 100])
def test_soft_labels_may_be_as_far_off_as_their_type_rounds(classes: int) -> None:
    torch.manual_seed(0)
    y = (3 * torch.randn(500, classes)).softmax(1).to(torch.bfloat16)
    assert float((y.float().sum(1) - 1).abs().max()) > 1e-3
    learner = apical.make("bp", nn.Sequential(nn.Linear(4, classes)).to(torch.bfloat16))
    x = torch.randn(500, 4, dtype=torch.bfloat16)
    assert bool(learner.credit(x, y).loss.isfinite())
    with pytest.raises(apical.ApicalError, match="sum to 1"):
        learner.credit(x, 1.02 * y)
