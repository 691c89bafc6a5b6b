"""Oja's subspace rule and SoftHebb against sums over samples by hand, principal components and unit lengths."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import apical
from apical.errors import ApicalError
from cases import CASES, mostly_slow
from reference import assert_all_same, assert_same, autograd, credited, layers_of, leaves

pytestmark = pytest.mark.no_cover  # other tests run these lines, too, and coverage doubles the time

PLAIN = {"center": False, "normalize": False}


def mlp() -> nn.Sequential:
    return CASES["mlp"].model().double()


def cnn() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, stride=2, padding=1),
        nn.Tanh(),
        nn.Conv2d(4, 6, 2, groups=2, bias=False),
        nn.Softplus(),
        nn.AvgPool2d(2, 1),
        nn.Flatten(),
        nn.Linear(6, 5),
        nn.Tanh(),
        nn.Linear(5, 3),
    ).double()


def positions() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Flatten(), nn.Linear(8, 3), nn.Tanh()).double()


Build = Callable[[], nn.Sequential]
SHAPES: dict[Build, tuple[int, ...]] = {mlp: (2, 3), cnn: (2, 5, 5), positions: (2, 3)}
every_rule = pytest.mark.parametrize("rule", ["hebb", "softhebb"])
every_network = pytest.mark.parametrize("build", list(SHAPES))


def batch(build: Build, count: int = 7) -> tuple[Tensor, Tensor]:
    """Inputs with a mean of their own, so that centring them matters."""
    return 1 + torch.randn(count, *SHAPES[build], dtype=torch.float64), torch.randint(0, 3, (count,))


def inputs_of(model: nn.Sequential, x: Tensor) -> list[Tensor]:
    """What each layer of weights receives, from the plain model."""
    found = []
    with torch.no_grad():
        for module in leaves(model):
            if isinstance(module, nn.Linear | nn.Conv2d):
                found.append(x)
            x = module(x)
    return found


def centred(x: Tensor) -> Tensor:
    """Less the mean of each channel of images, of each feature otherwise."""
    return x - x.mean((0, 2, 3), keepdim=True) if x.ndim == 4 else x - x.flatten(0, -2).mean(0)


def patches(layer: nn.Module, x: Tensor) -> Tensor:
    """What the units of each group see, (groups, samples, fan-in), by torch's own unfold."""
    if isinstance(layer, nn.Linear):
        return x.reshape(1, -1, layer.in_features)
    parts = x.chunk(layer.groups, 1)
    cut = [F.unfold(p, layer.kernel_size, layer.dilation, layer.padding, layer.stride) for p in parts]
    return torch.stack([c.transpose(1, 2).flatten(0, 1) for c in cut])


def group_samples(layer: nn.Module, x: Tensor, center: bool, normalize: bool) -> Tensor:
    seen = patches(layer, centred(x) if center else x)
    return seen / seen.square().sum(-1).mean().sqrt() if normalize else seen


def by_group(layer: nn.Module, w: Tensor, seen: Tensor) -> list[Tensor]:
    return list(w.detach().flatten(1).chunk(len(seen)))


def oja(layer: nn.Module, seen: Tensor) -> Tensor:
    """Sample by sample: u xᵀ − u uᵀ W."""
    changes = []
    for x, w in zip(seen, by_group(layer, layer.weight, seen), strict=True):
        each = []
        for one in x:
            u = w @ one
            each.append(torch.outer(u, one) - torch.outer(u, u) @ w)
        changes.append(torch.stack(each).mean(0))
    return torch.cat(changes).view(layer.weight.shape)


def soft(layer: nn.Module, seen: Tensor, beta: float, anti: bool, adaptive: bool, c: float) -> Tensor:
    """Sample by sample and unit by unit: ± y_k (x − u_k w_k), with weights measured in units of c."""
    rows = torch.cat(by_group(layer, layer.weight, seen)) / c
    group = [k * len(seen) // len(rows) for k in range(len(rows))]
    total = torch.zeros_like(rows)
    for n in range(seen.shape[1]):
        u = [float(w @ seen[group[k], n]) for k, w in enumerate(rows)]
        partition = sum(math.exp(beta * v) for v in u)
        for k, w in enumerate(rows):
            y = math.exp(beta * u[k]) / partition
            sign = -1 if anti and u[k] < max(u) else 1
            total[k] += sign * y * (seen[group[k], n] - u[k] * w) / seen.shape[1]
    if adaptive:
        total = total * (rows.square().sum(1).sqrt() - 1).abs().sqrt()[:, None]
    return c * total.view(layer.weight.shape)


# The updates, by hand.


@every_network
@pytest.mark.parametrize("center", [True, False])
@pytest.mark.parametrize("normalize", [True, False])
def test_hebb_is_ojas_rule_over_examples_and_positions(build: Build, center: bool, normalize: bool) -> None:
    model, (x, y) = build(), batch(build)
    grads = credited(apical.make("hebb", model, center=center, normalize=normalize), x, y)
    for layer, u in zip(layers_of(model)[:-1], inputs_of(model, x), strict=False):
        expected = -oja(layer, group_samples(layer, u, center, normalize))
        assert_same(grads[name_of(model, layer.weight)], expected)


@every_network
@pytest.mark.parametrize(
    ("options", "beta", "anti", "adaptive"),
    [
        ({}, 1.0, True, True),
        ({**PLAIN, "gain": None, "radius": 3.0}, 1.0, True, True),
        ({"beta": 2.0, "anti_hebbian": False, "gain": 0.7}, 2.0, False, True),
        ({"beta": 1.5, "adaptive_rate": False, "normalize": False}, 1.5, True, False),
        ({"anti_hebbian": False, "adaptive_rate": False, "center": False, "radius": None}, 1.0, False, False),
    ],
)
def test_softhebb_is_the_soft_winners_rule_over_examples_and_positions(
    build: Build, options: dict[str, Any], beta: float, anti: bool, adaptive: bool
) -> None:
    model, (x, y) = build(), batch(build)
    grads = credited(apical.make("softhebb", model, **options), x, y)
    center, normalize = options.get("center", True), options.get("normalize", True)
    gain = options.get("gain", 1.0)
    for layer, u in zip(layers_of(model)[:-1], inputs_of(model, x), strict=False):
        inputs = layer.weight[0].numel()
        c = 1.0 if gain is None else gain / math.sqrt(math.sqrt(inputs))
        sharp = beta * math.sqrt(inputs) if normalize else beta
        expected = -soft(layer, group_samples(layer, u, center, normalize), sharp, anti, adaptive, c)
        assert_same(grads[name_of(model, layer.weight)], expected)


def test_softhebb_on_a_worked_example() -> None:
    """x = (3, 4), w = (1, 0), (0, 2): u = (3, 8), and β = ln 2 / 5 makes y = (1/3, 2/3); unit 2 wins.

    x − u₁w₁ = (0, 4) and x − u₂w₂ = (3, −12); |‖w‖ − 1| is 0 and 1.
    """
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Tanh(), nn.Linear(2, 2)).double()
    x, y = torch.tensor([[3.0, 4.0]], dtype=torch.float64), torch.tensor([0])
    w = torch.tensor([[1.0, 0.0], [0.0, 2.0]], dtype=torch.float64)
    cases = [
        ({"anti_hebbian": False, "adaptive_rate": False}, [[0, 4 / 3], [2, -8]]),
        ({"adaptive_rate": False}, [[0, -4 / 3], [2, -8]]),
        ({}, [[0, 0], [2, -8]]),
    ]
    for options, change in cases:
        learner = apical.make("softhebb", model, gain=None, beta=math.log(2) / 5, **PLAIN, **options)
        with torch.no_grad():
            model[0].weight.copy_(w)
        grads = credited(learner, x, y)
        assert_same(grads["model.0.weight"], -torch.tensor(change, dtype=torch.float64))


def name_of(model: nn.Sequential, p: Tensor) -> str:
    return next(f"model.{n}" for n, q in model.named_parameters() if q is p)


# Where they lead.


def spread_out(*shape: int) -> Tensor:
    """Data whose directions differ in variance, with a mean."""
    x = torch.randn(*shape, dtype=torch.float64)
    size = x[0].numel()
    mix = torch.linalg.qr(torch.randn(size, size, dtype=torch.float64))[0] * 1.6 ** -torch.arange(size)
    return (x.flatten(1) @ mix.T).view(shape) + 0.2


def principal(seen: Tensor, k: int) -> Tensor:
    """The projector on the first k principal directions of samples, as they are."""
    vectors = torch.linalg.eigh(seen.T @ seen).eigenvectors[:, -k:]
    return vectors @ vectors.T


@pytest.mark.parametrize("kind", ["dense", "conv"])
@pytest.mark.parametrize("options", [{}, {"normalize": False}])
def test_hebbs_units_become_an_orthonormal_basis_of_the_principal_subspace(kind: str, options: dict[str, bool]) -> None:
    if kind == "dense":
        model = nn.Sequential(nn.Linear(6, 3, bias=False), nn.Tanh(), nn.Linear(3, 2)).double()
        x = spread_out(200, 6)
    else:
        end = nn.Tanh(), nn.Flatten(), nn.Linear(48, 2)
        model = nn.Sequential(nn.Conv2d(1, 3, 2, padding=1, stride=1, bias=False), *end).double()
        x = spread_out(40, 1, 3, 3)
    y = torch.randint(0, 2, (len(x),))
    learner = apical.make("hebb", model, hidden_rate=1.0, **options)
    layer = layers_of(model)[0]
    seen = patches(layer, centred(x))[0]
    rate = 0.5 if learner.normalize else 0.5 / float(seen.square().sum(1).mean())
    optim = torch.optim.SGD(learner.param_groups(lr=rate))
    for _ in range(1500):
        learner.step(x, y, optim)
    w = layer.weight.detach().flatten(1)
    assert_same(w @ w.T, torch.eye(3, dtype=torch.float64), tolerance=1e-6)
    assert_same(w.T @ w, principal(seen, 3), tolerance=1e-4)


@pytest.mark.parametrize(("anti", "adaptive"), [(False, False), (False, True), (True, False), (True, True)])
@pytest.mark.parametrize("gain", mostly_slow([None, 0.9], [0.9]))
def test_the_weights_of_softhebbs_winners_come_to_length_one_or_to_that_of_the_gain(
    anti: bool, adaptive: bool, gain: float | None
) -> None:
    """Without the sign, every unit is pulled; with it, those that win (one that never does is pushed instead)."""
    centres = 2 * torch.randn(4, 8, dtype=torch.float64)
    x = centres.repeat(20, 1) + 0.3 * torch.randn(80, 8, dtype=torch.float64)
    model = nn.Sequential(nn.Linear(8, 4, bias=False), nn.Tanh(), nn.Linear(4, 2)).double()
    learner = apical.make("softhebb", model, anti_hebbian=anti, adaptive_rate=adaptive, beta=7.0, gain=gain)
    c = 1.0 if gain is None else gain * 8**-0.25
    assert_same(model[0].weight.detach().norm(dim=1), torch.full((4,), 2 * c, dtype=torch.float64))
    optim = torch.optim.SGD(learner.param_groups(lr=0.3))
    y = torch.randint(0, 2, (80,))
    for _ in range(1000):
        learner.step(x, y, optim)
    w = model[0].weight.detach()
    wins = (centred(x) @ w.T).argmax(1).unique() if anti else torch.arange(4)
    assert len(wins) >= 3
    assert_same(w[wins].norm(dim=1), torch.full((len(wins),), c, dtype=torch.float64), tolerance=1e-2)


@pytest.mark.parametrize("factor", [0.5, 1.0, 2.0])
def test_a_softhebb_winner_is_pulled_to_length_one_by_each_input(factor: float) -> None:
    """d‖w‖²/dt = 2 y u (1 − ‖w‖²)."""
    model = nn.Sequential(nn.Linear(5, 3, bias=False), nn.Tanh(), nn.Linear(3, 2)).double()
    learner = apical.make("softhebb", model, gain=None, radius=factor, beta=0.7, adaptive_rate=False, **PLAIN)
    x = torch.randn(1, 5, dtype=torch.float64)
    w = model[0].weight.detach()
    change = -credited(learner, x, torch.tensor([0]))["model.0.weight"]
    u = w @ x[0]
    k = int(u.argmax())
    pull = 2 * float(change[k] @ w[k])
    assert pull == pytest.approx(2 * float((0.7 * u).softmax(0)[k] * u[k]) * (1 - factor**2), abs=1e-12)


# What both rules share.


@every_rule
@every_network
def test_the_last_layer_learns_by_its_own_gradient_and_hidden_biases_stay(rule: str, build: Build) -> None:
    model, (x, y) = build(), batch(build)
    learner = apical.make(rule, model, label_smoothing=0.1)
    credit = learner.credit(x, y)
    loss = F.cross_entropy(model(x), y, label_smoothing=0.1)
    assert_same(credit.loss, loss)
    assert_same(credit.output, model(x))
    last = learner.network.layers[-1]
    grads = credited(learner, x, y)
    expected = autograd(model, loss)
    for name in (last.weight, last.bias):
        assert_same(grads[name], expected[name])
    assert set(grads) == {layer.weight for layer in learner.network.layers} | {last.bias}


@every_rule
@every_network
def test_hidden_layers_never_see_the_labels(rule: str, build: Build) -> None:
    model, (x, y) = build(), batch(build)
    learner = apical.make(rule, model)
    last = learner.network.layers[-1]
    one, other = credited(learner, x, y), credited(learner, x, (y + 1) % 3)
    hidden = [n for n in one if n not in (last.weight, last.bias)]
    assert_all_same({n: one[n] for n in hidden}, {n: other[n] for n in hidden}, tolerance=0.0)
    assert not torch.equal(one[last.weight], other[last.weight])


@every_rule
@every_network
def test_normalized_updates_do_not_depend_on_the_inputs_scale(rule: str, build: Build) -> None:
    model, (x, y) = build(), batch(build)
    learner = apical.make(rule, model)
    name = learner.network.layers[0].weight
    assert_same(credited(learner, 7 * x, y)[name], credited(learner, x, y)[name])


@every_rule
def test_inputs_without_any_variance_teach_nothing(rule: str) -> None:
    model = mlp()
    x, y = torch.ones(4, 2, 3, dtype=torch.float64), torch.tensor([0, 1, 2, 0])
    grads = credited(apical.make(rule, model), x, y)
    assert all(torch.isfinite(g).all() for g in grads.values())
    assert float(grads["model.1.weight"].abs().max()) < 1e-12


@every_rule
def test_hidden_layers_have_a_rate_of_their_own(rule: str) -> None:
    learner = apical.make(rule, mlp(), hidden_rate=0.25)
    rates = {group["name"]: (group["lr"], len(group["params"])) for group in learner.param_groups(lr=0.8)}
    assert rates == {"W": (0.8, 1), "bias": (0.8, 1), "hidden": (0.2, 2)}
    assert all(group["momentum"] == 0.9 for group in learner.param_groups(lr=0.8, momentum=0.9))


@every_rule
def test_a_frozen_hidden_layer_stays(rule: str) -> None:
    model, (x, y) = mlp(), batch(mlp)
    model[1].requires_grad_(False)
    before = model[1].weight.clone()
    learner = apical.make(rule, model)
    assert set(credited(learner, x, y)) == {"model.3.weight", "model.5.weight", "model.5.bias"}
    assert torch.equal(model[1].weight, before)
    model.requires_grad_(False)
    with pytest.raises(ApicalError, match="nothing is left to train"):
        learner.credit(x, y)


def test_softhebb_scales_hidden_weights_to_its_radius_and_none_leaves_them() -> None:
    model = cnn()
    before = {n: p.clone() for n, p in model.named_parameters()}
    apical.make("softhebb", model, radius=None)
    assert_all_same(dict(model.named_parameters()), before, tolerance=0.0)
    apical.make("softhebb", model, radius=3.0)
    for layer in layers_of(model)[:-1]:
        old = before[name_of(model, layer.weight).removeprefix("model.")].flatten(1)
        length = 3.0 * old.shape[1] ** -0.25  # radius × the length that they come to
        assert_same(layer.weight.flatten(1), length * F.normalize(old, dim=1))
    unchanged = {n: p for n, p in model.named_parameters() if n.endswith("bias") or n.startswith("8.")}
    assert_all_same(unchanged, {n: before[n] for n in unchanged}, tolerance=0.0)


@pytest.mark.parametrize(
    ("rule", "options", "sentence"),
    [
        ("hebb", {"hidden_rate": 0}, "hidden_rate is 0, but must be a positive number"),
        ("hebb", {"center": 1}, "center is 1, but must be True or False"),
        ("softhebb", {"normalize": None}, "normalize is None, but must be True or False"),
        ("softhebb", {"beta": -1.0}, "beta is -1.0, but must be a positive number"),
        ("softhebb", {"gain": -3.0}, "gain is -3.0, but must be a positive number"),
        ("softhebb", {"radius": 0.0}, "radius is 0.0, but must be a positive number"),
        ("softhebb", {"anti_hebbian": "yes"}, "anti_hebbian is 'yes', but must be True or False"),
        ("softhebb", {"adaptive_rate": 0.5}, "adaptive_rate is 0.5, but must be True or False"),
    ],
)
def test_bad_options_are_refused_in_a_sentence(rule: str, options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ApicalError, match=sentence):
        apical.make(rule, mlp(), **options)


@every_rule
def test_without_hidden_layers_both_are_the_readout(rule: str) -> None:
    model = nn.Sequential(nn.Linear(4, 3)).double()
    x, y = torch.randn(6, 4, dtype=torch.float64), torch.randint(0, 3, (6,))
    expected = autograd(model, F.cross_entropy(model(x), y))
    assert_all_same(credited(apical.make(rule, model), x, y), expected)
