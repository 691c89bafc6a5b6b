"""`learner.record()`: u, the drive, ξ and δ of each layer are those of the update that was just made."""

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import apical
from apical import ApicalError
from cases import EVERY
from reference import assert_same


@pytest.fixture(autouse=True)
def _double() -> Iterator[None]:
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3))


def batch() -> tuple[Tensor, Tensor]:
    return torch.randn(8, 4), torch.randint(0, 3, (8,))


SILENT = {"wp", "rstdp"}
"""Rules without an error at any layer."""
HEBBIAN = {"readout", "hebb", "softhebb", "rstdp:gradient"}
"""Rules with an error at the last layer alone."""


@pytest.mark.parametrize("rule", EVERY)
def test_the_gradient_of_each_layer_is_minus_the_mean_of_delta_times_u(rule: str) -> None:
    learner = apical.make(rule, mlp(), input_shape=(4,))
    still = torch.optim.SGD(learner.param_groups(0.0))
    recording = learner.record()
    for _ in range(5):  # until a stream has filled
        learner.step(*batch(), still)
    assert [layer.name for layer in recording] == ["0", "2", "4"]
    for i, (layer, w) in enumerate(zip(recording, learner.forward_weights, strict=True)):
        if rule in SILENT or (rule in HEBBIAN and i < 2):
            assert layer.xi is None
            assert layer.delta is None
        else:
            assert layer.u is not None
            assert layer.delta is not None
            assert_same(w.grad, -layer.delta.T @ layer.u / len(layer.u))


@pytest.mark.parametrize(
    "rule", ["bp", "fa", "sign", "dfa", "dll", "dll:kolen-pollack", "local", "drtp", "pc", "ipc", "dtp"]
)
def test_the_drive_is_w_u_and_delta_is_the_derivative_at_it_times_xi(rule: str) -> None:
    model, (x, y) = mlp(), batch()
    learner = apical.make(rule, model, input_shape=(4,))
    with learner.record() as layers:
        learner.step(x, y, torch.optim.SGD(learner.param_groups(0.0)))
    for layer, module in zip(layers, (model[0], model[2], model[4]), strict=True):
        assert_same(layer.drive, F.linear(layer.u, module.weight, module.bias))
    for layer in layers[:2]:
        assert_same(layer.delta, layer.xi * (1 - layer.drive.tanh().square()))
    if rule in ("bp", "dll"):
        assert_same(layers[0].u, x)
        assert_same(layers[2].drive, model(x))
        assert_same(layers[2].xi, F.one_hot(y, 3) - model(x).softmax(1))


@pytest.mark.parametrize("rule", ["bp", "dll", "pc", "ipc"])
def test_a_recurrent_network_has_a_row_for_each_time_step(rule: str) -> None:
    model = apical.Elman(nn.RNN(3, 5, batch_first=True), nn.Linear(5, 2))
    learner = apical.make(rule, model)
    x, y = torch.randn(4, 6, 3), torch.randint(0, 2, (4, 6))
    with learner.record() as layers:
        learner.step(x, y, torch.optim.SGD(learner.param_groups(0.0)))
    first, hidden, _ = layers
    rnn = model.rnn
    assert_same(
        hidden.drive,
        F.linear(first.u, rnn.weight_ih_l0, rnn.bias_ih_l0 + rnn.bias_hh_l0) + F.linear(hidden.u, rnn.weight_hh_l0),
    )
    assert_same(first.drive, hidden.drive)
    for layer, w in zip(layers, learner.forward_weights, strict=True):
        assert_same(w.grad, -layer.delta.T @ layer.u / 24)
    assert_same(hidden.delta, hidden.xi * (1 - hidden.drive.tanh().square()))


class Skip(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm, self.head = nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(x + self.inner(x).tanh()))


@pytest.mark.parametrize("rule", ["bp", "fa", "dll", "dll:kolen-pollack"])
def test_any_module_is_recorded_by_its_modules_with_weights(rule: str) -> None:
    model = Skip()
    learner, (x, y) = apical.make(rule, model), batch()
    with learner.record() as layers:
        learner.credit(x, y)
    assert [layer.name for layer in layers] == ["inner", "head"]
    for layer, module in zip(layers, (model.inner, model.head), strict=True):
        assert_same(layer.drive, F.linear(layer.u, module.weight, module.bias))
        assert_same(module.weight.grad, -layer.delta.T @ layer.u / 8)


def test_a_recording_has_the_last_batch_until_it_stops() -> None:
    learner, (x, y) = apical.make("bp", mlp()), batch()
    recording = learner.record()
    with pytest.raises(ApicalError, match="nothing is recorded yet"):
        recording[0]
    learner.credit(x, y)
    learner.credit(2 * x, y)
    assert learner.record() is recording
    assert torch.equal(recording[0].u, 2 * x)
    recording.stop()
    learner.credit(x, y)
    assert torch.equal(recording[0].u, 2 * x)
    assert learner.record() is not recording
    with learner.record() as second:
        learner.credit(x, y)
    learner.credit(3 * x, y)
    assert torch.equal(second[0].u, x)


def test_recording_changes_nothing_and_leaves_nothing_behind() -> None:
    x, y = batch()
    plain, watched = (apical.make("dll", mlp()) for _ in range(2))
    watched.load_state_dict(plain.state_dict())
    plain.credit(x, y)
    with watched.record():
        watched.credit(x, y)
        with pytest.raises(ApicalError):
            watched.credit(x[:, :2], y)
    for name, p in plain.named_parameters():
        assert torch.equal(p.grad, watched.get_parameter(name).grad)
    assert all(layer.neuron.record is None for layer in watched.network.layers)
