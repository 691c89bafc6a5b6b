"""Predictive coding in recurrent networks, against its energy, which autograd differentiates."""

from collections.abc import Iterator
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import apical
from apical.errors import ApicalError
from reference import PerExample, assert_all_same, assert_same, credited
from sequences import LOSSES, Sequences, any_sequences, bptt, mean_loss, plain, sequences

losses = st.sampled_from(LOSSES)
Params = dict[str, Tensor]


class Energy:
    """F = Σ ½‖h_t − tanh(W_x x_t + W_h h_{t−1} + b)‖² + loss_t, summed over the time steps of a batch."""

    def __init__(self, case: Sequences, loss: PerExample, labels: bool) -> None:
        self.case, self.loss = case, loss
        self.y = case.labels if labels else case.values

    def params(self) -> Params:
        return {name: p.detach().clone() for name, p in self.case.model.named_parameters()}

    def states(self) -> Tensor:
        """Batch × time × hidden, of the forward pass."""
        return self.case.model.rnn(self.case.hot)[0].detach()

    def __call__(self, h: Tensor, p: Params) -> Tensor:
        total = torch.zeros((), dtype=torch.float64)
        bias = [p.get(f"rnn.bias_{kind}_l0", 0.0) for kind in ("ih", "hh")]
        for t in range(h.shape[1]):
            drive = self.case.hot[:, t] @ p["rnn.weight_ih_l0"].T + bias[0] + bias[1]
            if t > 0:
                drive = drive + h[:, t - 1] @ p["rnn.weight_hh_l0"].T
            output = h[:, t] @ p["readout.weight"].T + p.get("readout.bias", 0.0)
            total = total + (h[:, t] - drive.tanh()).square().sum() / 2 + self.loss(output, self.y[:, t]).sum()
        return total

    def slopes(self, h: Tensor, params: Params) -> tuple[Tensor, Params]:
        """∂F/∂h, and ∂F/∂W of the mean over time steps."""
        h, p = h.detach().requires_grad_(), {n: v.detach().requires_grad_() for n, v in params.items()}
        grads = torch.autograd.grad(self(h, p), [h, *p.values()], allow_unused=True)
        own = {n: torch.zeros_like(v) if g is None else g for (n, v), g in zip(p.items(), grads[1:], strict=True)}
        return grads[0], {n: g / self.case.count for n, g in own.items()}

    def descend(self, rate: float, sweeps: int) -> Iterator[Tensor]:
        """Gradient descent in the states from the forward pass, the weights held."""
        h, params = self.states(), self.params()
        yield h
        for _ in range(sweeps):
            h = h - rate * self.slopes(h, params)[0]
            yield h


def settled(learner: apical.Learner, case: Sequences, y: Tensor, sweeps: int) -> Tensor:
    """The rule's own states after some sweeps, batch × time × hidden."""
    params = learner.params()
    with torch.no_grad():
        start, _ = learner.run_forward(params, case.x, y, {})
        states = learner.settle(params, start, y, {}, sweeps).u[-1]
    return learner.network.unflatten_time(states, len(case.x))


Chosen = tuple[dict[str, object], PerExample, bool]


@given(case=any_sequences(), chosen=losses, extra=st.sampled_from([None, 0, 3]))
def test_fixed_prediction_at_a_unit_step_equals_backpropagation_through_time(
    case: Sequences, chosen: Chosen, extra: int | None
) -> None:
    options, loss, labels = chosen
    sweeps = None if extra is None else case.x.shape[1] + extra
    learner = apical.make("pc:fixed", case.model, sweeps=sweeps, **options)
    y = case.labels if labels else case.values
    assert_all_same(credited(learner, case.x, y), bptt(case, loss, labels))


@given(case=any_sequences(), chosen=losses, sweeps=st.integers(1, 6))
def test_states_descend_the_energy_and_the_weights_do_so_where_they_stand(
    case: Sequences, chosen: Chosen, sweeps: int
) -> None:
    options, loss, labels = chosen
    learner = apical.make("pc", case.model, sweeps=sweeps, rate=0.07, **options)
    y, energy = case.labels if labels else case.values, Energy(case, loss, labels)
    *_, last = energy.descend(0.07, sweeps)
    assert_same(settled(learner, case, y, sweeps), last)
    credit = learner.credit(case.x, y)
    assert_same(credit.loss, mean_loss(case, loss, labels))
    assert_same(credit.output, plain(case))
    expected = {f"model.{n}": g for n, g in energy.slopes(last, energy.params())[1].items()}
    assert_all_same(credited(learner, case.x, y), expected)


@pytest.mark.parametrize("chosen", LOSSES[:4], ids=["labels", "smoothed", "hot", "values"])
def test_the_energy_never_rises_and_comes_to_rest(chosen: Chosen) -> None:
    options, loss, labels = chosen
    case = sequences()
    learner = apical.make("pc", case.model, rate=0.1, **options)
    y, energy = case.labels if labels else case.values, Energy(case, loss, labels)
    points = [settled(learner, case, y, sweeps) for sweeps in (0, 1, 2, 4, 8, 16, 32, 2000)]
    values = [float(energy(h, energy.params())) for h in points]
    assert all(later <= earlier for earlier, later in pairwise(values))
    assert values[-1] < values[0]
    assert float(energy.slopes(points[-1], energy.params())[0].abs().max()) < 1e-5


def test_states_and_weights_of_ipc_move_together() -> None:
    """Three sweeps of SGD: h and W step at once, by the slopes of the energy at the present h and W."""
    case, rate, lr, sweeps = sequences(), 0.2, 0.3, 3
    energy = Energy(case, *LOSSES[0][1:])
    params, h = energy.params(), energy.states()
    expected_loss = mean_loss(case)
    for sweep in range(sweeps):
        slope, own = energy.slopes(h, params)
        # Before the first step no state errs: the readout alone has anything to learn.
        params = {n: p - lr * own[n] if sweep or "readout" in n else p for n, p in params.items()}
        h = h - rate * slope
    learner = apical.make("ipc", case.model, rate=rate, sweeps=sweeps)
    credit = learner.step(case.x, case.labels, torch.optim.SGD(learner.param_groups(lr=lr)))
    assert_same(credit.loss, expected_loss)
    assert_all_same({n: p.detach() for n, p in case.model.named_parameters()}, params)


def test_each_sweep_of_ipc_gives_gradients_where_an_error_has_come() -> None:
    case = sequences()
    learner = apical.make("ipc", case.model, sweeps=3)
    params, state, given_to = learner.params(), {}, []
    with torch.no_grad():
        for phase in learner.phases:
            update = phase(params, state, case.x, case.labels, {})
            state |= update.state
            given_to.append(set(update.grads))
    readout = {"model.readout.weight", "model.readout.bias"}
    assert given_to == [readout, set(learner.trainable), set(learner.trainable)]


def test_the_errors_come_through_the_weights_themselves() -> None:
    learner = apical.make("pc", sequences().model)
    assert [b is w for b, w in zip(learner.feedback_weights, learner.forward_weights, strict=True)] == [
        False,
        True,
        True,
    ]
    assert learner.feedback_weights[0] is None


@pytest.mark.parametrize("rule", ["pc", "ipc"])
def test_steps_are_small_by_default(rule: str) -> None:
    plain_net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))
    rates = [apical.make(rule, model).rate for model in (sequences().model, plain_net)]
    assert rates == [0.01, 0.1]


@pytest.mark.parametrize(("rule", "sweeps", "fewest"), [("pc", 0, 1), ("pc:fixed", 0, 1), ("ipc", 1, 2)])
def test_too_few_sweeps_are_refused(rule: str, sweeps: int, fewest: int) -> None:
    with pytest.raises(ApicalError, match=f"sweeps is {sweeps}, but must be a whole number of at least {fewest}"):
        apical.make(rule, sequences().model, sweeps=sweeps)
    apical.make(rule, sequences().model, sweeps=fewest)
