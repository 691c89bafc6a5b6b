"""Equilibrium propagation against autograd through a settling of its own, linear solves and backpropagation.

The reference knows the energy alone: its states follow autograd of Φ, all layers at once and damped, and P is a
matrix, the Jacobian of the pooling in the pass up.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.functional import jacobian

import apical
from apical.errors import ApicalError, UnsupportedError
from apical.rules.equilibrium import EquilibriumPropagation, SettlingState, run_forward_pass, settle
from cases import CASES, mostly_slow
from reference import (
    PerExample,
    assert_all_same,
    assert_same,
    autograd,
    credited,
    cross_entropy,
    gradients,
    layers_of,
    stages_of,
)

ACTIVE = (nn.Tanh, nn.ReLU, nn.Sigmoid, nn.SiLU, nn.Softplus)
SETTLED = {"free": 150, "nudged": 150}


class Case(NamedTuple):
    model: Callable[[], nn.Sequential]
    shape: tuple[int, ...]


def _mlp() -> nn.Sequential:
    hidden = nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4, bias=False), nn.Tanh(), nn.Linear(4, 4), nn.Tanh()
    return nn.Sequential(nn.Flatten(), *hidden, nn.Linear(4, 3))


def _mixed() -> nn.Sequential:
    hidden = nn.Linear(4, 5), nn.Sigmoid(), nn.Linear(5, 4), nn.SiLU(), nn.Linear(4, 3), nn.Tanh()
    return nn.Sequential(*hidden, nn.Linear(3, 3, bias=False), nn.Softplus())


def _positions() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2), nn.Tanh(), nn.Flatten(), nn.Linear(8, 3))


def _cnn() -> nn.Sequential:
    """Overlapping maxima after the activation, means before it, and a Flatten, in front of two dense layers."""
    return nn.Sequential(
        *(nn.Conv2d(2, 3, 3, padding=1), nn.Tanh(), nn.MaxPool2d(3, 2)),
        *(nn.Conv2d(3, 4, 2, bias=False), nn.AvgPool2d((2, 1)), nn.Tanh(), nn.Flatten()),
        *(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3)),
    )


def _conv1d() -> nn.Sequential:
    return nn.Sequential(
        *(nn.Conv1d(2, 3, 2), nn.AdaptiveMaxPool1d(4), nn.ReLU(inplace=True)),
        *(nn.Conv1d(3, 2, 2), nn.Tanh(), nn.Flatten(), nn.MaxPool1d(2), nn.Linear(3, 3)),
    )


def _maxima_of_maxima() -> nn.Sequential:
    return nn.Sequential(
        *(nn.Conv2d(1, 2, 2), nn.MaxPool2d(2, 1, padding=1), nn.Tanh(), nn.AdaptiveMaxPool2d((3, 2))),
        *(nn.Conv2d(2, 3, 2), nn.Tanh(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, 3)),
    )


LAW: dict[str, Case] = {
    "mlp": Case(_mlp, (2, 3)),
    "mixed": Case(_mixed, (4,)),
    "positions": Case(_positions, (4, 3)),
    "cnn": Case(_cnn, (2, 8, 6)),
    "conv1d": Case(_conv1d, (2, 8)),
    "maxima of maxima": Case(_maxima_of_maxima, (1, 5, 5)),
}


def half_squared(output: Tensor, y: Tensor) -> Tensor:
    return (output - F.one_hot(y, output.shape[1])).square().sum(1) / 2


def mine(output: Tensor, y: Tensor) -> Tensor:
    return (output * torch.arange(1, output.shape[1] + 1)).sin().sum(1) * (1 + y)


LOSSES: dict[str, tuple[str | PerExample, float, PerExample]] = {
    "cross-entropy": ("cross_entropy", 0.0, cross_entropy()),
    "smoothed": ("cross_entropy", 0.1, cross_entropy(0.1)),
    "mse": ("mse", 0.0, half_squared),
    "a user's own": (mine, 0.0, mine),
}


def drawn(case: Case, scale: float = 1.0, batch: int = 3) -> tuple[nn.Sequential, Tensor, Tensor]:
    torch.manual_seed(3)
    model = case.model().double()
    with torch.no_grad():
        for layer in layers_of(model):
            layer.weight.mul_(scale)
    return model, torch.randn(batch, *case.shape, dtype=torch.float64), torch.arange(batch) % 3


def make(model: nn.Sequential, **options: object) -> EquilibriumPropagation:
    learner = apical.make("ep", model, **options)
    assert isinstance(learner, EquilibriumPropagation)
    return learner


class Reference:
    """The energy of a model and a batch."""

    def __init__(self, model: nn.Sequential, x: Tensor, gamma: float) -> None:
        groups = stages_of(model)
        for module in groups[0][1]:
            x = module(x)
        self.x, self.gamma, self.readout = x, gamma, groups[-1]
        self.layers, self.acts, self.maps, self.start = [], [], [], []
        for layer, stages in groups[1:-1]:
            act = next((stage for stage in stages if isinstance(stage, ACTIVE)), nn.Identity())
            pool = nn.Sequential(*(stage for stage in stages if not isinstance(stage, ACTIVE)))
            a = layer(x).detach()
            self.maps.append(torch.stack([jacobian(lambda b, p=pool: p(b[None])[0], one) for one in a]))
            x = act(pool(a).clone()).detach()  # clone: some of the activations are in place
            self.layers.append(layer)
            self.acts.append(act)
            self.start.append(x)

    def phi(self, states: list[Tensor], i: int) -> Tensor:
        """Φ_i of each example."""
        a = self.layers[i]([self.x, *states][i])
        drive = torch.stack([torch.tensordot(m, b, b.ndim) for m, b in zip(self.maps[i], a, strict=True)])
        return (states[i] * drive).flatten(1).sum(1)

    def weighted(self, states: list[Tensor]) -> Tensor:
        """Σ γ^{i−H} Φ_i of each example."""
        top = len(states) - 1
        return sum(self.gamma ** (i - top) * self.phi(states, i) for i in range(len(states)))

    def next(self, states: list[Tensor], damping: float) -> tuple[list[Tensor], float]:
        """All layers at once: s ← (1 − d) s + d ρ(field), the field by autograd of Φ; and the largest change."""
        states = [s if s.requires_grad else s.requires_grad_() for s in states]
        pulls = torch.autograd.grad(self.weighted(states).sum(), states, create_graph=True)
        top, changes, settled = len(states) - 1, [], []
        for i, (s, pull, act) in enumerate(zip(states, pulls, self.acts, strict=True)):
            change = act((pull * self.gamma ** (top - i)).clone()) - s
            changes.append(float(change.detach().abs().max()))
            settled.append(s + damping * change)
        return settled, max(changes)

    def read(self, s: Tensor) -> Tensor:
        layer, stages = self.readout
        return nn.Sequential(*stages)(layer(s))


def at_rest(model: nn.Sequential, x: Tensor, gamma: float) -> tuple[Tensor, list[Tensor]]:
    """The output and the states at rest, differentiable in the parameters through every step of the settling."""
    reference = Reference(model, x, gamma)
    states, residual = reference.start, math.inf
    for _ in range(300):
        states, residual = reference.next(states, damping=0.7)
        if residual < 1e-12:
            break
    for _ in range(40):  # the derivative settles after the states do
        states, residual = reference.next(states, damping=0.7)
    assert residual < 1e-10
    return reference.read(states[-1]), states


@pytest.mark.parametrize("gamma", [1.0, 0.4])
@pytest.mark.parametrize("name", LAW)
def test_as_the_nudge_vanishes_gradients_are_autograds_through_the_settling(name: str, gamma: float) -> None:
    model, x, y = drawn(LAW[name])
    output, _ = at_rest(model, x, gamma)
    expected = autograd(model, F.cross_entropy(output, y))
    learner = make(model, beta=1e-4, gamma=gamma, **SETTLED)
    assert_same(learner(x), output)
    credit = learner.credit(x, y)
    assert_same(credit.output, output)
    assert_same(credit.loss, F.cross_entropy(output, y))
    assert_all_same(gradients(learner), expected, tolerance=1e-6)


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("name", mostly_slow(["mlp", "cnn"], ["mlp"]))
def test_the_law_holds_for_every_loss(name: str, loss: str) -> None:
    kind, smoothing, by_hand = LOSSES[loss]
    model, x, y = drawn(LAW[name])
    output, _ = at_rest(model, x, 1.0)
    expected = autograd(model, by_hand(output, y).mean())
    learner = make(model, loss=kind, label_smoothing=smoothing, beta=3e-5, gamma=1.0, **SETTLED)
    assert_same(learner.credit(x, y).loss, by_hand(output, y).mean())
    assert_all_same(credited(learner, x, y), expected, tolerance=1e-6)


@pytest.mark.parametrize("name", ["mlp", "cnn"])
def test_the_feedback_matters_in_these_tests(name: str) -> None:
    """At rest the network is far from its pass up, and the gradient far from backpropagation's."""
    model, x, y = drawn(LAW[name])
    output, states = at_rest(model, x, 1.0)
    assert float((states[0].detach() - Reference(model, x, 1.0).start[0]).abs().max()) > 0.1
    expected, bp = autograd(model, F.cross_entropy(output, y)), credited(apical.make("bp", model), x, y)
    first = next(iter(bp))
    assert float((expected[first] - bp[first]).norm()) > 0.1 * float(bp[first].norm())


@pytest.mark.parametrize("name", ["mlp", "cnn"])
def test_the_error_of_a_nudge_is_of_second_order(name: str) -> None:
    """Both signs: half the nudge leaves a quarter of the error, where one sign alone would leave half."""
    model, x, y = drawn(LAW[name])
    exact = autograd(model, F.cross_entropy(at_rest(model, x, 1.0)[0], y))
    first = f"model.{next(n for n, _ in model.named_parameters())}"
    errors = [
        float(
            (credited(make(model, beta=beta, gamma=1.0, **SETTLED), x, y)[first] - exact[first]).norm()
            / exact[first].norm()
        )
        for beta in (0.2, 0.1)
    ]
    assert 1e-6 < errors[1] < 0.1
    assert 3.5 < errors[0] / errors[1] < 4.5


def energy(system: SettlingState, params: dict[str, Tensor], x: Tensor, gamma: float) -> Tensor:
    """E of each example for tanh: G′ = artanh, G = s artanh s + ½ log(1 − s²)."""
    total, below = torch.zeros(len(x), dtype=x.dtype), x
    for i, (relay, s) in enumerate(zip(system.hidden_layers, system.states, strict=True)):
        own = s * s.atanh() + 0.5 * (1 - s * s).log() - s * relay.drive(params, below)
        total = total + gamma ** (i + 1 - len(system.states)) * own.flatten(1).sum(1)
        below = s
    return total


@pytest.mark.parametrize("gamma", [1.0, 0.4])
@pytest.mark.parametrize("name", ["mlp", "positions", "cnn", "maxima of maxima"])
def test_the_energy_never_rises_and_settling_ends_however_strong_the_weights(name: str, gamma: float) -> None:
    model, x, _ = drawn(LAW[name], scale=3.0, batch=8)
    learner = make(model)
    params = learner.params()
    with torch.no_grad():
        u = learner.network.prefix(x, {})
        system = run_forward_pass(learner.hidden_layers, params, u)
        energies = [energy(system, params, u, gamma)]
        for _ in range(60):
            system = settle(params, system, 1, gamma)
            energies.append(energy(system, params, u, gamma))
    falls = torch.stack(energies).diff(dim=0)
    assert float(falls.max()) < 1e-9
    assert float(falls[0].max()) < -1e-3
    assert float(falls[-1].min()) > -1e-4


def _linear_rest(model: nn.Sequential, x: Tensor, gamma: float) -> Tensor:
    """One linear system for all states: s_1 − γ W_2ᵀ s_2 = W_1 x + b_1 and s_2 − W_2 s_1 = b_2."""
    first, second = layers_of(model)[:2]
    w = second.weight
    upper = torch.cat([torch.eye(w.shape[1], dtype=w.dtype), -gamma * w.T], 1)
    lower = torch.cat([-w, torch.eye(w.shape[0], dtype=w.dtype)], 1)
    right = torch.cat([first(x), second.bias.expand(len(x), -1)], 1)
    return torch.linalg.solve(torch.cat([upper, lower]), right.T).T[:, w.shape[1] :]


@pytest.mark.parametrize("gamma", [1.0, 0.4])
def test_without_activations_the_rest_and_the_gradient_are_those_of_a_linear_solve(gamma: float) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 4), nn.Linear(4, 3)).double()
    with torch.no_grad():
        model[1].weight.mul_(0.9 / torch.linalg.matrix_norm(model[1].weight, 2))  # beyond 1 it would run away
    x, y = torch.randn(6, 4, dtype=torch.float64), torch.randint(0, 3, (6,))
    output = model[2](_linear_rest(model, x, gamma))
    learner = make(model, gamma=gamma, beta=1e-4, **SETTLED)
    assert_same(learner(x), output)
    assert_all_same(credited(learner, x, y), autograd(model, F.cross_entropy(output, y)), tolerance=1e-6)


@pytest.mark.parametrize("name", ["mlp", "mixed", "positions", "conv1d", "maxima of maxima"])
def test_as_feedback_vanishes_gradients_are_bps(name: str) -> None:
    """The pass up is the model's own where P stands before ρ, and where an increasing ρ follows a maximum."""
    model, x, y = drawn(LAW[name])
    learner = make(model, gamma=1e-4, beta=1e-3, free=3, nudged=5)
    if "maxima" in name:  # tanh after its mean, as P and ρ have it
        model = nn.Sequential(*model[:5], model[6], model[5], *model[7:])
    assert_same(learner(x), model(x), tolerance=2e-3)
    assert_all_same(credited(learner, x, y), autograd(model, F.cross_entropy(model(x), y)), tolerance=5e-3)


@pytest.mark.parametrize("gamma", [1.0, 0.1])
def test_with_one_hidden_layer_gradients_are_bps_after_a_single_sweep(gamma: float) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3), nn.Tanh()).double()
    x, y = torch.randn(6, 4, dtype=torch.float64), torch.randint(0, 3, (6,))
    learner = make(model, beta=1e-4, gamma=gamma, free=1, nudged=1)
    assert_same(learner(x), model(x))
    assert_all_same(credited(learner, x, y), autograd(model, F.cross_entropy(model(x), y)), tolerance=1e-6)


@pytest.mark.parametrize("loss", ["cross_entropy", "mse"])
def test_without_hidden_layers_it_is_bp(loss: str) -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(4, 3)).double()
    x, y = torch.randn(6, 2, 2, dtype=torch.float64), torch.randint(0, 3, (6,))
    learner = make(model, loss=loss)
    assert_same(learner(x), model(x))
    assert_all_same(credited(learner, x, y), credited(apical.make("bp", model, loss=loss), x, y))


@pytest.mark.parametrize(("free", "nudged"), [(1, 1), (3, 1), (1, 2)])
def test_sweeps_go_up_in_the_free_phase_and_down_in_the_nudged_ones(free: int, nudged: int) -> None:
    """Three hidden neurons in a row, a few sweeps, by hand."""
    a, b, c, w, x, y, beta, gamma = 0.7, -1.1, 0.8, 0.9, 1.3, 0.4, 0.3, 0.6
    tanh = math.tanh
    model = nn.Sequential(
        *(nn.Linear(1, 1, bias=False), nn.Tanh(), nn.Linear(1, 1, bias=False), nn.Tanh()),
        *(nn.Linear(1, 1, bias=False), nn.Tanh(), nn.Linear(1, 1, bias=False)),
    ).double()
    with torch.no_grad():
        for layer, weight in zip(layers_of(model), (a, b, c, w), strict=True):
            layer.weight.fill_(weight)
    first = tanh(a * x)
    second = tanh(b * first)
    third = tanh(c * second)
    for _ in range(free):
        first = tanh(a * x + gamma * b * second)
        second = tanh(b * first + gamma * c * third)
        third = tanh(c * second)
    products = []
    for sign in (1, -1):
        s_1, s_2, s_3 = first, second, third
        for _ in range(nudged):
            s_3 = tanh(c * s_2 + sign * beta * w * (y - w * s_3))
            s_2 = tanh(b * s_1 + gamma * c * s_3)
            s_1 = tanh(a * x + gamma * b * s_2)
        products.append((s_1 * x / gamma**2, s_2 * s_1 / gamma, s_3 * s_2))
    expected = [-(plus - minus) / (2 * beta) for plus, minus in zip(*products, strict=True)]
    expected.append(-(y - w * third) * third)
    learner = make(model, loss="mse", beta=beta, gamma=gamma, free=free, nudged=nudged)
    at, target = torch.tensor([[x]], dtype=torch.float64), torch.tensor([[y]], dtype=torch.float64)
    assert float(learner(at).detach()) == pytest.approx(w * third, rel=1e-12)
    learner.credit(at, target)
    assert [float(layer.weight.grad) for layer in layers_of(model)] == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("name", ["mlp", "cnn"])
def test_every_gradient_is_the_mean_of_the_examples_own(name: str) -> None:
    model, x, y = drawn(LAW[name], batch=5)
    learner = make(model)
    whole = credited(learner, x, y)
    each = [credited(learner, one[None], label[None]) for one, label in zip(x, y, strict=True)]
    assert_all_same(whole, {n: torch.stack([grads[n] for grads in each]).mean(0) for n in whole})


@pytest.mark.parametrize("name", ["mlp", "cnn"])
def test_what_is_reported_is_what_is_predicted(name: str) -> None:
    model, x, y = drawn(LAW[name])
    learner = make(model)
    credit = learner.credit(x, y)
    assert_same(credit.output, learner(x))
    assert_same(credit.loss, F.cross_entropy(learner(x), y))
    assert not learner.MODEL_PREDICTS
    assert float((model(x) - learner(x)).detach().abs().max()) > 1e-3


def test_frozen_layers_get_nothing_and_change_nothing_for_the_others() -> None:
    model, x, y = drawn(LAW["mlp"])
    learner = make(model)
    whole = credited(learner, x, y)
    for frozen in (["model.1.weight", "model.1.bias"], ["model.3.weight", "model.7.weight", "model.5.bias"]):
        for name, p in learner.named_parameters():
            p.requires_grad_(name not in frozen)
        assert_all_same(credited(learner, x, y), {n: g for n, g in whole.items() if n not in frozen})
    for name, p in learner.named_parameters():
        p.requires_grad_(name.startswith("model.7."))
    assert_all_same(credited(learner, x, y), {n: g for n, g in whole.items() if n.startswith("model.7.")})
    for p in learner.parameters():
        p.requires_grad_(False)
    with pytest.raises(ApicalError, match="nothing is left to train"):
        learner.credit(x, y)


def test_feedback_is_the_forward_weights() -> None:
    model, *_ = drawn(LAW["cnn"])
    shown, weights = make(model).feedback_weights, [layer.weight for layer in layers_of(model)]
    assert shown[0] is None
    assert all(a is b for a, b in zip(shown[1:], weights[1:], strict=True))


def test_the_users_model_stays_as_it_is() -> None:
    model, x, _ = drawn(LAW["cnn"])
    before = model(x)
    make(model)
    assert torch.equal(model(x), before)
    assert not model[2].return_indices


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"beta": 0}, "beta is 0"),
        ({"beta": -0.1}, "beta is -0.1"),
        ({"gamma": 0.0}, "gamma is 0.0"),
        ({"free": 0}, "free is 0, but must be a whole number"),
        ({"free": 2.5}, "free is 2.5"),
        ({"nudged": True}, "nudged is True"),
        ({"nudged": "4"}, "nudged is '4'"),
    ],
)
def test_settings_that_make_no_sense_are_refused(options: dict[str, object], words: str) -> None:
    with pytest.raises(ApicalError, match=words):
        make(_mlp(), **options)


@pytest.mark.parametrize(
    ("stages", "words"),
    [
        ([nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 3)], r"module 1 \(Dropout.*draws random numbers"),
        ([nn.Dropout(0.5), nn.Linear(4, 3)], r"module 0 \(Dropout"),
        ([nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3), nn.RReLU()], r"module 3 \(RReLU"),
        ([nn.Linear(4, 4), nn.Softmax(1), nn.Linear(4, 3)], r"module 1 \(Softmax.*nn\.Tanh"),
        ([nn.Linear(4, 4), nn.GLU(), nn.Linear(2, 3)], r"module 1 \(GLU"),
        ([nn.Linear(4, 4), nn.Tanh(), nn.ReLU(), nn.Linear(4, 3)], r"layer 0 has several.*modules 1, 2"),
    ],
)
def test_what_cannot_be_a_state_is_refused_by_name(stages: list[nn.Module], words: str) -> None:
    with pytest.raises(UnsupportedError, match=words):
        make(nn.Sequential(*stages))


def test_the_readout_takes_any_function() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 6), nn.GLU(1), nn.LogSoftmax(1)).double()
    x, y = torch.randn(6, 4, dtype=torch.float64), torch.randint(0, 3, (6,))
    learner = make(model, beta=1e-4)
    assert_all_same(credited(learner, x, y), autograd(model, F.cross_entropy(model(x), y)), tolerance=1e-6)


@pytest.mark.parametrize("name", ["mlp", "deep", "cnn", "positions"])
def test_float32_agrees_with_float64(name: str) -> None:
    case = CASES[name].case()
    exact = credited(make(case.model), case.x, case.labels)
    grads = credited(make(case.model.float()), case.x.float(), case.labels)
    assert all(g.dtype == torch.float32 for g in grads.values())
    assert_all_same({n: g.double() for n, g in grads.items()}, exact, tolerance=1e-3)
