"""R-STDP against a second simulation of it, one image and one pair of spikes at a time, in spike times alone."""

import math
from collections.abc import Callable
from statistics import NormalDist

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import apical
from apical.errors import ApicalError, UnsupportedError
from reference import assert_all_same, assert_same, credited, layers_of, leaves

EXPONENTIAL = {"window": "exponential", "a_plus": 0.7, "a_minus": -0.4, "tau_plus": 2.5, "tau_minus": 4.0}
OPTIONS: list[dict[str, object]] = [
    {},
    {"neuron": "threshold"},
    {**EXPONENTIAL, "steps": 7},
    {**EXPONENTIAL, "neuron": "threshold", "soft": True},
    {"winners": 3, "soft": False, "share": 0.6, "a_plus": 0.9, "a_minus": -0.2},
    {"winners": 2, "neuron": "threshold", "rewarded": 2, "share": 0.3},
]


def mlp(bias: bool = True) -> nn.Sequential:
    hidden = nn.Linear(12, 7, bias), nn.Tanh(), nn.Linear(7, 6, bias), nn.ReLU()
    return nn.Sequential(nn.Flatten(), *hidden, nn.Linear(6, 3, bias), nn.Softmax(1)).double()


def cnn(bias: bool = True) -> nn.Sequential:
    first = nn.Conv2d(1, 4, 2, bias=bias), nn.Tanh(), nn.MaxPool2d(2, 1)
    second = nn.Conv2d(4, 5, 2, padding=1, bias=bias), nn.AvgPool2d(2), nn.GELU(), nn.Flatten()
    return nn.Sequential(*first, *second, nn.Linear(5, 3, bias)).double()


Build = Callable[..., nn.Sequential]
both = pytest.mark.parametrize("build", [mlp, cnn])


def weights_of(model: nn.Sequential) -> list[Tensor]:
    return [module.weight for module in layers_of(model)]


def batch(count: int = 6) -> tuple[Tensor, Tensor]:
    return torch.randn(count, 1, 3, 4, dtype=torch.float64), torch.arange(count) % 3


def made(build: Build, seed: int = 0, **options: object) -> apical.Learner:
    """A learner whose running values are those of no batch in particular."""
    torch.manual_seed(seed)
    learner = apical.make("rstdp", build(), **options)
    for name, buffer in learner.named_buffers():
        if name.startswith("mean"):
            buffer.normal_(std=0.1)
        elif name.startswith("spread"):
            buffer.uniform_(0.3, 0.6)
        else:
            buffer.fill_(0.35)
    return learner


# The second simulation. A spike time counts from 0; `never` is the number of steps.


class Pass:
    """One image through the spiking network: spike times into each layer, and the winners of each."""

    def __init__(self, learner: apical.Learner, x: Tensor) -> None:
        self.learner, self.never = learner, learner.steps
        self.low = NormalDist().inv_cdf(1 - learner.share)
        dark, bright = x.min(), x.max()
        self.into = [self.latency((x - dark) / (bright - dark))]
        self.firsts: list[list[tuple[int, tuple[int, ...]]]] = []
        self.peaks: list[Tensor] = []
        layer = 0
        for module in leaves(learner.model):
            if isinstance(module, nn.Linear | nn.Conv2d):
                layer += 1
                if layer < len(learner.network):
                    self.into.append(self.fire(layer - 1, module, self.into[-1]))
                else:
                    scores = self.drive(layer - 1, module, self.burning(self.into[-1]))
                    self.scores = scores if learner.readout == "reward" else None
            elif isinstance(module, nn.MaxPool2d):
                self.into[-1] = -module(-self.into[-1])
            elif isinstance(module, nn.AvgPool2d | nn.Flatten):
                self.into[-1] = module(self.into[-1])

    def latency(self, value: Tensor) -> Tensor:
        return torch.floor((1 - value) * self.never).clamp(0, self.never)

    def burning(self, times: Tensor) -> Tensor:
        """For how much of the cycle each input's current is on."""
        return (self.never - times) / self.never

    def drive(self, i: int, module: nn.Module, u: Tensor) -> Tensor:
        w = module.weight.detach()
        w = torch.stack([row - row.mean() for row in w])
        if isinstance(module, nn.Linear):
            out, axes = F.linear(u, w, module.bias), (-1,)
        else:
            out, axes = F.conv2d(u, w, module.bias, padding=module.padding), (-1, 1, 1)
        if i == len(self.learner.network) - 1 and self.learner.readout == "gradient":
            return out
        mean, spread = (self.learner.get_buffer(f"{name}{i}").view(axes) for name in ("mean", "spread"))
        return ((out - mean) / spread).detach()

    def fire(self, i: int, module: nn.Module, times: Tensor) -> Tensor:
        if self.learner.neuron == "ramp":
            z = self.drive(i, module, self.burning(times))
            out = self.latency((z - self.low) / 3)
            strength = peak = z
        else:
            out, strength = None, None
            peak = torch.full((), -math.inf)
            for step in range(self.never):
                z = self.drive(i, module, (times < step + 1).double())
                out = torch.full_like(z, self.never) if out is None else out
                strength = z if strength is None else strength
                crosses = (z >= self.low) & (out == self.never)
                strength = torch.where(crosses, z, strength)
                out = torch.where(crosses, float(step), out)
                peak = torch.maximum(peak, z)
        self.peaks.append(peak)
        self.firsts.append(self.first(out[0], strength[0]))
        return out

    def first(self, times: Tensor, strength: Tensor) -> list[tuple[int, tuple[int, ...]]]:
        """(time, place) of the winners, each filter once."""
        places = [tuple(p) for p in torch.ones_like(times).nonzero().tolist()]
        order = sorted(places, key=lambda p: (float(times[p]), -float(strength[p])))
        found: dict[int, tuple[int, tuple[int, ...]]] = {}
        for place in order:
            if place[0] not in found and times[place] < self.never:
                found[place[0]] = int(times[place]), place
        return list(found.values())[: self.learner.winners]


def equation(learner: apical.Learner, dt: float) -> float:
    if learner.window == "step":
        return learner.a_plus if dt > 0 else learner.a_minus
    if dt > 0:
        return learner.a_plus * math.exp(-dt / learner.tau_plus)
    return learner.a_minus * math.exp(dt / learner.tau_minus)


def change(learner: apical.Learner, module: nn.Module, into: Tensor, post: list[int], place: tuple[int, ...]) -> Tensor:
    """Δw of the neuron at `place` that fires at the times `post`, synapse by synapse."""
    silent = learner.a_minus if learner.window == "step" else 0.0
    effect = into.clone()
    for where in torch.ones_like(into).nonzero().tolist():
        t = float(into[tuple(where)])
        pairs = [equation(learner, p - t) if t < learner.steps else silent for p in post]
        effect[tuple(where)] = sum(pairs) / len(pairs)
    w = module.weight.detach().clone().requires_grad_()
    out = F.linear(effect, w) if isinstance(module, nn.Linear) else F.conv2d(effect, w, padding=module.padding)
    (dw,) = torch.autograd.grad(out[(0, *place)], w)
    return dw * w.detach() * (1 - w.detach()) if learner.soft else dw


def expected(learner: apical.Learner, x: Tensor, y: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """The gradients of every weight, and the scores."""
    modules = layers_of(learner.model)
    names = [layer.weight for layer in learner.network.layers]
    grads = {n: torch.zeros_like(m.weight) for n, m in zip(names, modules, strict=True)}
    scores, hits, top = [], float(learner.hits), len(modules) - 1
    for one, label in zip(x, y, strict=True):
        seen = Pass(learner, one[None])
        scores.append(seen.scores)
        decision = int(seen.scores.argmax())
        reward = 1 - hits if decision == int(label) else -hits
        changes = [change(learner, modules[top], seen.into[top], list(range(1, learner.steps + 1)), (decision,))]
        grads[names[top]] -= reward * changes[0] / len(x)
        for i, firsts in enumerate(seen.firsts):
            factor = reward if top - i < learner.rewarded else 1.0
            for t, place in firsts:
                dw = change(learner, modules[i], seen.into[i], [t + 1], place)
                grads[names[i]] -= factor * dw / len(x)
    return {n: g.detach() for n, g in grads.items()}, torch.cat(scores)


@both
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("seed", [0, 1])
def test_an_update_is_the_sum_over_every_pair_of_spikes(build: Build, options: dict[str, object], seed: int) -> None:
    learner = made(build, seed, **options)
    x, y = batch()
    grads, scores = expected(learner, x, y)
    assert_same(learner(x), scores)
    assert_all_same(credited(learner, x, y), grads)
    for name, grad in grads.items():
        assert float(grad.norm()) > 0, name


@both
@pytest.mark.parametrize("neuron", ["ramp", "threshold"])
def test_the_gradient_readout_descends_its_own_loss_on_the_mean_spikes(build: Build, neuron: str) -> None:
    torch.manual_seed(3)
    model = build()
    last = layers_of(model)[-1]
    before = last.weight.detach().clone()
    learner = apical.make("rstdp:gradient", model, neuron=neuron, label_smoothing=0.1)
    assert torch.equal(last.weight, before)
    x, y = batch()
    times = torch.cat([Pass(learner, one[None]).into[-1] for one in x])
    output = model[list(model).index(last) :]((learner.steps - times) / learner.steps)
    assert_same(learner(x), output)
    loss = F.cross_entropy(output, y, label_smoothing=0.1)
    head = dict(zip(("weight", "bias"), torch.autograd.grad(loss, [last.weight, last.bias]), strict=True))
    without = apical.make("rstdp", model, neuron=neuron)  # maps the last layer alone: the others are in their bounds
    hidden = credited(without, x, y)
    with torch.no_grad():
        last.weight.copy_(before)
    name = learner.network.layers[-1].name
    grads = {**hidden, **{f"model.{name}.{kind}": gradient for kind, gradient in head.items()}}
    assert_all_same(credited(learner, x, y), grads)


# One pair of spikes, at every Δt.


@pytest.mark.parametrize("neuron", ["ramp", "threshold"])
@pytest.mark.parametrize("window", ["exponential", "step"])
def test_one_pairs_change_against_its_timing_is_the_papers_equation(neuron: str, window: str) -> None:
    """Input 0 is the brightest (t = 0), input 2 the darkest (silent), input 1 fires when we want it to."""
    steps, plus, minus = 6, 0.8, -0.3
    seen = set()
    for t_pre in range(steps):
        for t_fire in range(steps):
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(3, 1, bias=False), nn.Tanh(), nn.Linear(1, 2, bias=False)).double()
            learner = apical.make(
                "rstdp", model, neuron=neuron, window=window, steps=steps, soft=False,
                a_plus=plus, a_minus=minus, tau_plus=2.0, tau_minus=5.0,
            )  # fmt: skip
            with torch.no_grad():
                model[0].weight.copy_(torch.tensor([[0.9, 0.5, 0.1]]))
            value = 1 - (t_pre + 0.5) / steps if t_pre else 1.0
            x = torch.tensor([[3.0, 3.0 * value - 1.0 * (1 - value), -1.0]], dtype=torch.float64)
            low = NormalDist().inv_cdf(1 - learner.share)
            # Weights less their mean are 0.4, 0 and −0.4, so the potential is input 0's alone: 0.4 from step 0 on.
            if neuron == "ramp":
                learner.mean0.fill_(0.4 - 0.2 * (low + 3 * (1 - (t_fire + 0.5) / steps)))
                learner.spread0.fill_(0.2)
            elif t_fire > 0:
                continue
            else:
                learner.mean0.fill_(0.4 - 0.2 * (low + 0.1))
                learner.spread0.fill_(0.2)
            dt = t_fire + 1 - t_pre
            seen.add(dt)
            if window == "step":
                change = plus if dt > 0 else minus
            else:
                change = plus * math.exp(-dt / 2.0) if dt > 0 else minus * math.exp(dt / 5.0)
            grad = credited(learner, x, torch.tensor([0]))["model.0.weight"]
            silent = minus if window == "step" else 0.0
            first = plus if window == "step" else plus * math.exp(-(t_fire + 1) / 2.0)
            assert_same(-grad, torch.tensor([[first, change, silent]], dtype=torch.float64))
    assert seen == (set(range(2 - steps, steps + 1)) if neuron == "ramp" else set(range(2 - steps, 2)))


def test_a_threshold_neuron_fires_with_the_input_that_takes_it_over() -> None:
    """Inputs at steps 0, 2 and 4 of 5; the second one reaches the threshold, so the third comes too late."""
    model = nn.Sequential(nn.Linear(4, 1, bias=False), nn.ReLU(), nn.Linear(1, 2, bias=False)).double()
    learner = apical.make("rstdp", model, neuron="threshold", steps=5, soft=False, share=0.5)
    with torch.no_grad():
        model[0].weight.copy_(torch.tensor([[0.6, 0.8, 0.5, 0.1]]))
    learner.mean0.fill_(0.25)
    learner.spread0.fill_(1.0)
    x = torch.tensor([[1.0, 0.5, 0.1, 0.0]], dtype=torch.float64)
    grad = credited(learner, x, torch.tensor([0]))["model.0.weight"]
    assert_same(-grad, torch.tensor([[1.0, 1.0, -0.75, -0.75]], dtype=torch.float64))
    learner.mean0.fill_(0.05)
    grad = credited(learner, x, torch.tensor([0]))["model.0.weight"]
    assert_same(-grad, torch.tensor([[1.0, -0.75, -0.75, -0.75]], dtype=torch.float64))


# Reward.


@both
@pytest.mark.parametrize("rewarded", [1, 2, 3])
def test_reward_and_punishment_have_opposite_signs_where_there_is_reward_at_all(build: Build, rewarded: int) -> None:
    learner = made(build, rewarded=rewarded)
    x, _ = batch()
    right = learner(x).argmax(1)
    state = {name: b.clone() for name, b in learner.named_buffers()}

    def under(hits: float, y: Tensor) -> dict[str, Tensor]:
        for name, buffer in learner.named_buffers():
            buffer.copy_(state[name])
        learner.hits.fill_(hits)
        return credited(learner, x, y)

    praised, blamed = under(0.5, right), under(0.5, (right + 1) % 3)
    steered = [layer.weight for layer in learner.network.layers[-rewarded:]]
    for name, grad in praised.items():
        assert_same(blamed[name], -grad if name in steered else grad)
    # A reward that is expected counts less, a punishment that is not more.
    for name in steered:
        assert_same(under(0.2, right)[name], 1.6 * praised[name])
        assert_same(under(0.2, (right + 1) % 3)[name], 0.4 * blamed[name])


def test_the_expected_reward_follows_the_share_of_right_decisions() -> None:
    learner = apical.make("rstdp", mlp())
    assert float(learner.hits) == pytest.approx(1 / 3)
    x, _ = batch()
    y = learner(x).argmax(1)
    y[:2] = (y[:2] + 1) % 3
    learner.credit(x, y)
    assert float(learner.hits) == pytest.approx(1 / 3 + 0.01 * (4 / 6 - 1 / 3))


def test_class_probabilities_reward_their_largest_class() -> None:
    learner = made(mlp)
    x, y = batch()
    state = {name: b.clone() for name, b in learner.named_buffers()}
    hard = credited(learner, x, y)
    for name, buffer in learner.named_buffers():
        buffer.copy_(state[name])
    assert_all_same(credited(learner, x, F.one_hot(y, 3).double() * 0.5 + 1 / 6), hard)


@pytest.mark.parametrize("options", [{}, {"soft": False}, EXPONENTIAL])
def test_reward_alone_teaches_three_patterns(options: dict[str, object]) -> None:
    torch.manual_seed(0)
    learner = apical.make("rstdp", nn.Sequential(nn.Linear(12, 3, bias=False)).double(), **options)
    x = torch.eye(3, dtype=torch.float64).repeat_interleave(4, 1)
    y = torch.tensor([2, 0, 1])
    optim = torch.optim.SGD(learner.param_groups(lr=0.5))
    for _ in range(200):
        learner.step(x, y, optim)
    assert learner(x).argmax(1).tolist() == y.tolist()


# Homeostasis, bounds, and what the spikes do not depend on.


@both
@pytest.mark.parametrize("neuron", ["ramp", "threshold"])
def test_potentials_come_to_be_measured_from_their_mean_in_their_spread(build: Build, neuron: str) -> None:
    learner = apical.make("rstdp", build(), neuron=neuron, homeostasis=0.2)
    x, y = batch(12)
    for _ in range(150):
        learner.credit(x, y)  # weights are held: no optimiser steps
    passes = [Pass(learner, one[None]) for one in x]
    for i in range(3):
        peaks = torch.cat([p.peaks[i] if i < 2 else p.scores for p in passes])
        peaks = peaks.movedim(1, 0).flatten(1)
        spread = learner.get_buffer(f"spread{i}") > 1e-6  # a neuron that never sees anything new has none
        assert bool(spread.any())
        assert_same(peaks.mean(1)[spread], torch.zeros_like(peaks[:, 0])[spread], tolerance=1e-3)
        assert_same(peaks.square().mean(1)[spread], torch.ones_like(peaks[:, 0])[spread], tolerance=1e-3)


@both
@pytest.mark.parametrize("neuron", ["ramp", "threshold"])
def test_running_values_move_a_share_of_the_way_to_the_batchs(build: Build, neuron: str) -> None:
    """The mean to the batch's mean, the squared spread to the batch's mean square about the mean so far."""
    learner = made(build, neuron=neuron, homeostasis=0.3)
    x, y = batch()
    passes = [Pass(learner, one[None]) for one in x]
    expected = {"hits": learner.hits + 0.01 * ((learner(x).argmax(1) == y).double().mean() - learner.hits)}
    for i in range(3):
        z = torch.cat([p.peaks[i] if i < 2 else p.scores for p in passes]).movedim(1, 0).flatten(1)
        mean, spread = learner.get_buffer(f"mean{i}"), learner.get_buffer(f"spread{i}")
        away = z * spread[:, None]
        expected[f"mean{i}"] = 0.7 * mean + 0.3 * (mean + away.mean(1))
        expected[f"spread{i}"] = (0.7 * spread**2 + 0.3 * away.square().mean(1)).sqrt()
    learner.credit(x, y)
    assert_all_same(dict(learner.named_buffers()), expected)


def test_weights_are_mapped_into_their_bounds_once() -> None:
    torch.manual_seed(0)
    model = mlp()
    before = [w.detach().clone() for w in weights_of(model)]
    model[3].weight.requires_grad_(False)
    learner = apical.make("rstdp", model)
    assert set(learner.bounds) == {"model.1.weight", "model.5.weight"}
    assert set(learner.bounds.values()) == {(0.0, 1.0)}
    for i in (0, 2):
        low, high = before[i].min(), before[i].max()
        assert_same(weights_of(model)[i], (before[i] - low) / (high - low))
    assert torch.equal(weights_of(model)[1], before[1])
    with torch.no_grad():
        for w in weights_of(model)[::2]:
            w.mul_(0.5).add_(0.1)
    again = [w.detach().clone() for w in weights_of(model)]
    learner = apical.make("rstdp", model)
    assert all(torch.equal(a, b) for a, b in zip(weights_of(model), again, strict=True))
    assert_same(learner.spread0, torch.stack([0.5 * (row - row.mean()).norm() for row in again[0]]))
    assert bool((learner.mean0 == 0).all())
    for p in model.parameters():
        p.requires_grad_(True)
    assert set(apical.make("rstdp:gradient", model).bounds) == {"model.1.weight", "model.3.weight"}


@both
@pytest.mark.parametrize("rule", ["rstdp", "rstdp:gradient"])
def test_weights_stay_in_their_bounds_however_far_they_are_pushed(build: Build, rule: str) -> None:
    learner = apical.make(rule, build(), soft=False)
    optim = torch.optim.SGD(learner.param_groups(lr=20.0))
    x, y = batch()
    for _ in range(3):
        learner.step(x, y, optim)
        for name in learner.bounds:
            w = learner.get_parameter(name).detach()
            assert float(w.min()) >= 0
            assert float(w.max()) <= 1
    extremes = torch.cat([learner.get_parameter(name).detach().flatten() for name in learner.bounds])
    assert bool(((extremes == 0) | (extremes == 1)).any())


@both
@pytest.mark.parametrize("rule", ["rstdp", "rstdp:gradient"])
def test_the_spikes_of_an_image_do_not_depend_on_its_brightness_or_contrast(build: Build, rule: str) -> None:
    learner = apical.make(rule, build())
    x, _ = batch()
    assert_same(learner(4.0 * x - 7.0), learner(x))
    assert torch.isfinite(learner(torch.ones_like(x))).all()


@both
@pytest.mark.parametrize("rule", ["rstdp", "rstdp:gradient"])
def test_what_an_update_reports_is_what_the_learner_predicts(build: Build, rule: str) -> None:
    learner = apical.make(rule, build(), label_smoothing=0.2)
    x, y = batch()
    scores = learner(x).detach()
    credit = learner.credit(x, y)
    assert_same(credit.output, scores)
    assert_same(credit.loss, F.cross_entropy(scores, y, label_smoothing=0.2))


# Dropout, groups, options and refusals.


def test_a_dropped_neuron_is_silent_for_the_whole_volley() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Dropout(0.5), nn.Linear(6, 5), nn.Tanh(), nn.Dropout(0.5), nn.Linear(5, 3)).double()
    learner = apical.make("rstdp", model, soft=False)
    x, y = torch.randn(4, 6, dtype=torch.float64), torch.tensor([0, 1, 2, 0])
    assert_same(learner(x), learner.eval()(x))
    learner.train()
    noise = {"0": torch.ones_like(x), "3": torch.zeros(4, 5, dtype=torch.float64)}
    noise["3"][:, 2] = 1.0
    assert {n: u.shape for n, u in learner.draw(x).items()} == {n: u.shape for n, u in noise.items()}
    with torch.no_grad():
        update = learner.update(learner.params(), dict(learner.named_buffers()), x, y, noise)
    grad = update.grads["model.4.weight"]
    decision = F.one_hot(update.output.argmax(1), 3).double()
    reward = (update.output.argmax(1) == y).double() - 1 / 3
    silent = 0.75 * (decision * reward[:, None]).mean(0)
    for unit in (0, 1, 3, 4):
        assert_same(grad[:, unit], silent)
    assert not torch.allclose(grad[:, 2], silent)
    noise["0"][:, 1] = 0.0  # a dropped input is a value of 0
    with torch.no_grad():
        dropped = learner.update(learner.params(), dict(learner.named_buffers()), x, y, noise)
        x[:, 1] = 0.0
        noise["0"].fill_(1.0)
        zero = learner.update(learner.params(), dict(learner.named_buffers()), x, y, noise)
    assert_all_same(dropped.grads, zero.grads)
    assert not torch.allclose(zero.output, update.output)


def test_the_last_layer_has_a_rate_of_its_own() -> None:
    learner = apical.make("rstdp", mlp(), readout_rate=5.0)
    groups = {g["name"]: g for g in learner.param_groups(lr=0.1, momentum=0.3)}
    assert {name: round(g["lr"], 12) for name, g in groups.items()} == {"W": 0.1, "readout": 0.5}
    assert all(g["momentum"] == 0.3 for g in groups.values())
    assert [len(g["params"]) for g in groups.values()] == [2, 1]
    learner = apical.make("rstdp:gradient", mlp())
    assert [len(g["params"]) for g in learner.param_groups(lr=0.1)] == [2, 2]
    assert learner.trainable == {"model.1.weight", "model.3.weight", "model.5.weight", "model.5.bias"}


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"readout": "mine"}, "readout is 'mine', but must be one of reward, gradient."),
        ({"neuron": 3}, "neuron is 3, but must be one of ramp, threshold."),
        ({"window": "gauss"}, "window is 'gauss', but must be one of step, exponential."),
        ({"soft": 1}, "soft is 1, but must be True or False."),
        ({"steps": 0}, "steps is 0, but must be a whole number of at least 1."),
        ({"winners": 1.5}, "winners is 1.5, but must be a whole number of at least 1."),
        ({"winners": True}, "winners is True, but must be a whole number of at least 1."),
        ({"rewarded": 4}, "rewarded is 4, but with readout='reward' it is 3 at most here."),
        ({"rewarded": 2, "readout": "gradient"}, "rewarded is 2, but with readout='gradient' it is 1 at most here."),
        ({"a_plus": "1"}, "a_plus is '1', but must be a number."),
        ({"a_minus": math.inf}, "a_minus is inf, but must be a number."),
        ({"tau_plus": 0}, "tau_plus is 0, but must be a positive number."),
        ({"tau_minus": -1}, "tau_minus is -1, but must be a positive number."),
        ({"readout_rate": 0}, "readout_rate is 0, but must be a positive number."),
        ({"share": 1.0}, "share is 1.0, but must lie between 0 and 1."),
        ({"homeostasis": 0}, "homeostasis is 0, but must lie between 0 and 1."),
    ],
)
def test_options_that_make_no_sense_are_refused_in_a_sentence(options: dict[str, object], sentence: str) -> None:
    with pytest.raises(ApicalError) as error:
        apical.make("rstdp", mlp(), **options)
    assert str(error.value) == sentence


class Squash(nn.Module):
    def forward(self, a: Tensor) -> Tensor:
        return a.tanh()


@pytest.mark.parametrize(
    ("model", "sentence"),
    [
        (
            nn.Sequential(nn.Conv1d(1, 3, 2), nn.Flatten()),
            r"layer 0 .* last one.* end the model with Flatten and a Linear",
        ),
        (nn.Sequential(nn.Linear(4, 3), Squash(), nn.Linear(3, 2)), r"module 1 \(Squash\(\)\) .*activations"),
        (nn.Sequential(nn.Linear(4, 6), nn.GLU(), nn.Linear(3, 2)), r"module 1 \(GLU\(dim=-1\)\) .*not GLU"),
        (
            nn.Sequential(nn.Linear(4, 6), nn.AvgPool1d(2)),
            r"module 1 \(AvgPool1d\(.*\)\) follows layer 0.* end the model with the Linear",
        ),
        (nn.Sequential(nn.Linear(4, 1)), r"layer 0 has one unit.* between classes"),
    ],
)
def test_what_spikes_cannot_do_is_refused_by_name(model: nn.Sequential, sentence: str) -> None:
    with pytest.raises(UnsupportedError, match=sentence):
        apical.make("rstdp", model)


@pytest.mark.parametrize("last", [nn.LogSoftmax(1), nn.Sigmoid(), nn.AvgPool1d(2)])
def test_a_readout_by_gradient_descends_its_loss_through_what_follows_it(last: nn.Module) -> None:
    """Autograd of the loss of its predictions, in the last layer's weights."""
    model = nn.Sequential(nn.Linear(12, 7), nn.Tanh(), nn.Linear(7, 4), last).double()
    learner = apical.make("rstdp:gradient", model, loss="mse")
    x = torch.randn(5, 12, dtype=torch.float64)
    y = torch.randn(model(x).shape, dtype=torch.float64)
    w = model[2].weight.detach().clone().requires_grad_()
    output = learner.predict({**learner.params(), "model.2.weight": w}, learner.state_tensors(), x)
    (wanted,) = torch.autograd.grad(learner.loss(output, y).mean(), w)
    given = learner.credit(x, y)
    assert_same(given.output, output)
    assert_same(model[2].weight.grad, wanted)


def test_a_decision_needs_one_set_of_scores_and_a_class() -> None:
    learner = apical.make("rstdp", nn.Sequential(nn.Linear(4, 3)).double())
    with pytest.raises(UnsupportedError, match=r"layer 0 gets .*put a Flatten before the last Linear"):
        learner(torch.randn(5, 2, 4, dtype=torch.float64))
    learner = apical.make("rstdp", nn.Sequential(nn.Linear(4, 3)).double(), loss=lambda o, y: o.sum(1) * y)
    with pytest.raises(ApicalError, match="must be class labels"):
        learner.credit(torch.randn(5, 4, dtype=torch.float64), torch.randn(5, dtype=torch.float64))


def test_nothing_left_to_train_is_said() -> None:
    learner = apical.make("rstdp", mlp().requires_grad_(False))
    with pytest.raises(ApicalError, match="nothing is left to train"):
        learner.credit(*batch())
