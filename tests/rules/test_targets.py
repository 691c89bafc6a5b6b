"""Target propagation and its difference form against their laws, in float64.

The other side of every equation is autograd of one layer's own loss, with the layer, its pooling and its inverse
run by torch's modules (`Reference`), or a closed form; never another part of apical.
"""

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import apical
from apical.errors import ApicalError
from apical.rules.targets import ELEMENTWISE
from cases import CASES, learner_for
from reference import (
    assert_all_same,
    assert_same,
    autograd,
    credited,
    cross_entropy,
    downward,
    gradients,
    layers_of,
    leaves,
    of_model,
)
from strategies import Case

both = pytest.mark.parametrize("rule", ["tp", "dtp"])
# Neither layer nor activation is left out: biases and none, strides, groups, pooling before and after, positions.
NAMES = ["mlp", "deep", "cnn", "conv1d with dropout", "positions"]
on_every_case = pytest.mark.parametrize("name", NAMES)
MIXING = (nn.MaxPool2d, nn.AvgPool2d, nn.AdaptiveAvgPool1d, nn.Flatten, nn.Softmax, nn.GLU)
SILENT = (nn.Dropout, nn.Dropout1d, nn.AlphaDropout)


class Group(NamedTuple):
    layer: nn.Module
    phi: list[nn.Module]
    psi: list[nn.Module]
    """The activations of the layer below."""


def run(stages: list[nn.Module], a: Tensor) -> Tensor:
    a = a.clone()  # in-place activations must not touch what was given
    for stage in stages:
        a = stage(a)
    return a


class Reference:
    """The network as groups of torch modules (dropout off), and its inverses with the learner's V and c."""

    def __init__(self, learner: apical.Learner) -> None:
        self.learner, self.prefix, self.groups = learner, [], []
        for module in leaves(learner.model):
            if isinstance(module, nn.Linear | nn.Conv1d | nn.Conv2d):
                below = self.groups[-1].phi if self.groups else []
                psi = [m for m in below if not isinstance(m, MIXING + SILENT + (nn.RReLU,))]
                self.groups.append(Group(module, [], psi))
            else:
                (self.groups[-1].phi if self.groups else self.prefix).append(module)
        self.v = dict(enumerate(learner.feedback_weights))
        self.c = {i: learner.get_parameter(f"offset.{i}") for i in self.v if i > 0}

    def inputs(self, x: Tensor) -> list[Tensor]:
        u = [run(self.prefix, x).detach()]
        for i in range(len(self.groups)):
            u.append(self.up(i, u[-1]).detach())
        return u

    def up(self, i: int, u: Tensor) -> Tensor:
        return run(self.groups[i].phi, self.groups[i].layer(u))

    def down(self, i: int, a: Tensor, at: Tensor) -> Tensor:
        """g_i(a), with the places of values as they are in the forward pass of `at`; differentiable in V and c."""
        layer, phi, psi = self.groups[i]
        code, value = a, layer(at).detach()
        values = [value]
        for stage in phi:
            values.append(run([stage], values[-1]).detach())
        for stage, before in reversed(list(zip(phi, values, strict=False))):
            if isinstance(stage, MIXING):
                before = before.clone().requires_grad_()
                (code,) = torch.autograd.grad(stage(before), before, code)
        return run(psi, downward(layer, self.v[i], at, code) + self.c[i])

    def reconstruction(self, i: int, v: Tensor) -> Tensor:
        """½‖g(f(v)) − v‖², mean over the batch."""
        code = self.up(i, v).detach()
        return (self.down(i, code, v) - v).square().sum() / (2 * len(v))

    def inverse_grads(self, x: Tensor, noise: dict[str, Tensor], sigma: float, turn: int = 0) -> dict[str, Tensor]:
        u, grads = self.inputs(x), {}
        for i in self.c:
            v = u[i] + (sigma * noise[f"sigma/{turn}/{i}"] if sigma else 0.0)
            pair = torch.autograd.grad(self.reconstruction(i, v), [self.v[i], self.c[i]])
            grads |= dict(zip((f"inverse.{i}", f"offset.{i}"), pair, strict=True))
        return grads

    def targets(self, x: Tensor, y: Tensor, loss: Callable[..., Tensor], step: float) -> list[Tensor]:
        """What each layer's output should be, the last one's first; `loss` gives one value per example."""
        u = self.inputs(x)
        output = u[-1].clone().requires_grad_()
        (gradient,) = torch.autograd.grad(loss(output, y).sum(), output)
        targets = [u[-1] - step * gradient]
        for i in range(len(self.groups) - 1, 0, -1):
            below = self.down(i, targets[-1], u[i])
            if self.learner.NAME == "dtp":
                below = u[i] + below - self.down(i, u[i + 1], u[i])
            targets.append(below.detach())
        return targets

    def forward_grads(self, x: Tensor, y: Tensor, loss: Callable[..., Tensor], step: float) -> dict[str, Tensor]:
        """Each layer by itself: ½‖φ(W u) − target‖² for hidden ones, the loss for the last."""
        u, targets = self.inputs(x), self.targets(x, y, loss, step)
        names = {id(p): f"model.{name}" for name, p in self.learner.model.named_parameters()}
        grads = {}
        for i, (layer, _, _) in enumerate(self.groups):
            out = self.up(i, u[i])
            if i == len(self.groups) - 1:
                own = loss(out, y).mean()
            else:
                own = (out - targets[len(self.groups) - 1 - i]).square().sum() / (2 * len(x))
            params = list(layer.parameters())
            grads |= {names[id(p)]: g for p, g in zip(params, torch.autograd.grad(own, params), strict=True)}
        return grads


def make(rule: str, name: str, **options: Any) -> tuple[apical.Learner, Case]:
    case = CASES[name].case()
    case.model.eval()  # dropout off
    learner = learner_for(rule, case, **options)
    with torch.no_grad():
        for i in range(1, len(learner.network)):
            learner.get_parameter(f"offset.{i}").normal_(std=0.1)
    return learner, case


def updates(learner: apical.Learner, x: Tensor, y: Tensor, noise: dict[str, Tensor]) -> list[dict[str, Tensor]]:
    """Each phase's gradients, all at the learner's own weights."""
    state, grads = dict(learner.named_buffers()), []
    with torch.no_grad():
        for phase in learner.phases:
            update = phase(learner.params(), state, x, y, noise)
            state |= update.state
            grads.append(update.grads)
    return grads


def freeze_inverses(learner: apical.Learner) -> None:
    for name, p in learner.named_parameters():
        p.requires_grad_(name.startswith("model."))


# Forward weights: each layer towards its own target.


@on_every_case
@both
def test_each_layer_descends_the_distance_to_its_target_and_the_last_one_the_loss(rule: str, name: str) -> None:
    learner, case = make(rule, name, target_step=0.7)
    freeze_inverses(learner)
    expected = Reference(learner).forward_grads(case.x, case.labels, cross_entropy(), 0.7)
    assert_all_same(credited(learner, case.x, case.labels), expected)


@pytest.mark.parametrize("name", ["mlp", "cnn"])
@both
def test_targets_start_from_the_loss_that_was_asked_for(rule: str, name: str) -> None:
    def half(output: Tensor, y: Tensor) -> Tensor:
        return 0.5 * (output - F.one_hot(y, 3)).square().sum(1)

    def own(output: Tensor, y: Tensor) -> Tensor:
        return (output * torch.arange(1, 4)).sin().mean(1) * (1 + y)

    losses: list[tuple[dict[str, Any], Callable[..., Tensor]]] = [
        ({"loss": "mse"}, half),
        ({"loss": own}, own),
        ({"label_smoothing": 0.2}, cross_entropy(0.2)),
    ]
    for options, loss in losses:
        learner, case = make(rule, name, target_step=0.3, **options)
        freeze_inverses(learner)
        credit = learner.credit(case.x, case.labels)
        assert_same(credit.loss, loss(case.model(case.x), case.labels).mean())
        assert_same(credit.output, case.model(case.x))
        expected = Reference(learner).forward_grads(case.x, case.labels, loss, 0.3)
        assert_all_same(gradients(learner), expected)


def _orthogonal_mlp() -> Case:
    model = nn.Sequential(nn.Flatten(), nn.Linear(6, 6), nn.Linear(6, 6, bias=False), nn.Linear(6, 6), nn.Linear(6, 6))
    return Case(model.double(), torch.randn(5, 2, 3, dtype=torch.float64), torch.tensor([0, 5, 2, 1, 3]))


def _orthogonal_cnn() -> Case:
    """Kernels that see one place, or that tile the image, are square matrices; Flatten moves values, but loses none."""
    model = nn.Sequential(
        nn.Conv2d(2, 2, 1), nn.Conv2d(2, 8, 2, stride=2, bias=False), nn.Flatten(), nn.Linear(48, 48), nn.Linear(48, 48)
    )
    return Case(model.double(), torch.randn(5, 2, 4, 6, dtype=torch.float64), torch.tensor([0, 5, 2, 1, 3]))


@pytest.mark.parametrize("build", [_orthogonal_mlp, _orthogonal_cnn])
@pytest.mark.parametrize("step", [0.2, 3.0])
@both
def test_with_orthogonal_layers_and_exact_inverses_hidden_gradients_are_bps_times_the_target_step(
    rule: str, step: float, build: Callable[[], Case]
) -> None:
    case = build()
    learner = apical.make(rule, case.model, target_step=step)
    freeze_inverses(learner)
    layers = layers_of(case.model)
    with torch.no_grad():
        for layer in layers:
            layer.weight.copy_(nn.init.orthogonal_(torch.empty_like(layer.weight)))
        for i, layer in enumerate(layers[1:], start=1):
            learner.feedback_weights[i].copy_(layer.weight)
            offset = learner.get_parameter(f"offset.{i}")
            if rule == "dtp":
                offset.normal_()  # the difference takes a wrong offset out
            elif layer.bias is not None:
                offset.copy_(-layer.bias @ layer.weight)
    grads = credited(learner, case.x, case.labels)
    expected = autograd(case.model, F.cross_entropy(case.model(case.x), case.labels))
    last = layers[-1]
    top = {f"model.{n}" for n, p in case.model.named_parameters() if any(p is q for q in last.parameters())}
    assert_all_same(grads, {n: g if n in top else step * g for n, g in expected.items()})


@on_every_case
def test_dtps_targets_are_the_activities_where_the_top_target_is_the_output(name: str) -> None:
    learner, case = make("dtp", name, loss="mse", target_step=2.0)
    freeze_inverses(learner)
    y = case.model(case.x).detach()
    for gradient in credited(learner, case.x, y).values():
        assert_same(gradient, torch.zeros_like(gradient))


def test_tps_targets_are_not_unless_its_inverses_are_exact() -> None:
    learner, case = make("tp", "mlp", loss="mse")
    freeze_inverses(learner)
    grads = credited(learner, case.x, case.model(case.x).detach())
    assert float(grads["model.1.weight"].norm()) > 0.1
    assert_same(grads["model.5.weight"], torch.zeros_like(grads["model.5.weight"]))


# Inverses: each one by its own reconstruction.


@pytest.mark.parametrize("sigma", [0.0, 0.3])
@on_every_case
@both
def test_the_inverses_descend_their_own_reconstruction_loss(rule: str, name: str, sigma: float) -> None:
    learner, case = make(rule, name, sigma=sigma, inverse_steps=2)
    noise = learner.draw(case.x)
    first, second, _ = updates(learner, case.x, case.labels, noise)
    reference = Reference(learner)
    assert_all_same(first, reference.inverse_grads(case.x, noise, sigma, 0))
    assert_all_same(second, reference.inverse_grads(case.x, noise, sigma, 1))
    if sigma:
        differs = [n for n in first if not torch.allclose(first[n], second[n])]
        assert len(differs) == len(first)


def test_a_linear_inverse_rests_at_the_least_squares_solution() -> None:
    """min over V and c of the mean of ½‖o V + c − u‖² is linear regression of u on o."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3)).double()
    learner = apical.make("dtp", model, sigma=0.0)
    x, y = torch.randn(20, 4, dtype=torch.float64), torch.randint(0, 3, (20,))
    with torch.no_grad():
        u = model[0](x)
        o = torch.cat([model[1](u), torch.ones(20, 1, dtype=torch.float64)], 1)
        solution = torch.linalg.lstsq(o, u).solution
        learner.feedback_weights[1].copy_(solution[:3])
        learner.get_parameter("offset.1").copy_(solution[3])
    grads, _ = updates(learner, x, y, learner.draw(x))
    for gradient in grads.values():
        assert_same(gradient, torch.zeros_like(gradient))


@pytest.mark.parametrize("name", ["mlp", "cnn"])
@both
def test_a_step_moves_the_inverses_first_and_each_time_from_where_they_are(rule: str, name: str) -> None:
    """Plain descent by hand: three reconstructions, then the forward weights through the inverses they left."""
    learner, case = make(rule, name, inverse_steps=3, inverse_rate=0.5, sigma=0.2)
    twin = copy.deepcopy(learner)
    torch.manual_seed(1)
    noise = twin.draw(case.x)
    reference = Reference(twin)
    before = case.model(case.x).detach()

    def descend(grads: dict[str, Tensor], lr: float) -> None:
        with torch.no_grad():
            for n, g in grads.items():
                twin.get_parameter(n).sub_(lr * g)

    for turn in range(3):
        descend(reference.inverse_grads(case.x, noise, 0.2, turn), 0.05)
    descend(reference.forward_grads(case.x, case.labels, cross_entropy(), learner.target_step), 0.1)
    torch.manual_seed(1)
    credit = learner.step(case.x, case.labels, torch.optim.SGD(learner.param_groups(lr=0.1)))
    assert_all_same(dict(learner.named_parameters()), dict(twin.named_parameters()))
    assert_same(credit.output, before)


def test_all_phases_report_the_same_prediction_and_loss_under_dropout() -> None:
    case = CASES["conv1d with dropout"].case()
    learner = learner_for("dtp", case, inverse_steps=2)
    noise = learner.draw(case.x)
    state, outputs, losses = {}, [], []
    with torch.no_grad():
        for phase in learner.phases:
            update = phase(learner.params(), state, case.x, case.labels, noise)
            state, outputs = {**state, **update.state}, [*outputs, update.output]
            losses.append(update.loss)
    assert not torch.allclose(outputs[0], case.model.eval()(case.x))
    for output, loss in zip(outputs, losses, strict=True):
        assert_same(output, outputs[-1])
        assert_same(loss, F.cross_entropy(output, case.labels))


class Mask(nn.Dropout):
    """A dropout whose choice was made already."""

    def __init__(self, p: float, uniform: Tensor) -> None:
        super().__init__(p)
        self.factor = (uniform >= p).to(uniform.dtype) / (1 - p)

    def forward(self, a: Tensor) -> Tensor:
        return a * self.factor


@both
def test_dropout_masks_activity_and_errors_but_no_inverse(rule: str) -> None:
    stages = [nn.Linear(4, 6), nn.Tanh(), nn.Dropout(0.4), nn.Linear(6, 5), nn.Dropout(0.3), nn.Tanh(), nn.Linear(5, 3)]
    model = nn.Sequential(*stages).double()
    x, y = torch.randn(7, 4, dtype=torch.float64), torch.randint(0, 3, (7,))
    learner = apical.make(rule, model, target_step=0.5, sigma=0.2)
    noise = learner.draw(x)
    inverse, forward = updates(learner, x, y, noise)
    for place in (2, 4):
        model[place] = Mask(model[place].p, noise[str(place)])
    reference = Reference(learner)
    assert_all_same(inverse, reference.inverse_grads(x, noise, 0.2))
    assert_all_same(forward, reference.forward_grads(x, y, cross_entropy(), 0.5))


# What keeps its place, and what S brings back.


def _activations() -> dict[type[nn.Module], nn.Module]:
    """Every activation of torch that can be built without an argument, and those that need one."""
    arguments = {nn.Threshold: (0.1, -0.2), nn.Softmax: (1,), nn.LogSoftmax: (1,), nn.Softmin: (1,), nn.GLU: (1,)}
    kinds = [getattr(nn, name) for name in nn.modules.activation.__all__]
    skipped = (nn.MultiheadAttention, nn.PReLU, nn.RReLU)
    return {k: k(*arguments.get(k, ())) for k in [*kinds, nn.Identity] if k not in skipped}


@pytest.mark.parametrize(("kind", "module"), _activations().items(), ids=lambda v: getattr(v, "__name__", ""))
def test_the_activations_that_leave_values_in_place_are_the_ones_that_commute_with_any_order(
    kind: type[nn.Module], module: nn.Module
) -> None:
    a = torch.randn(4, 6, 2, 2, dtype=torch.float64)
    order = torch.randperm(a.numel())
    b = module(a)
    same = b.shape == a.shape and torch.equal(module(a.flatten()[order].view(a.shape)).flatten(), b.flatten()[order])
    assert (kind in ELEMENTWISE) == same


def test_a_pooled_maximum_goes_back_to_where_it_came_from_and_a_mean_is_shared_out() -> None:
    """One value through g, by hand: V is a 1 × 1 kernel of weight 3, c is 0.5, the layer below is linear."""
    for pool, places in ((nn.MaxPool1d(2), [0.0, 1.0]), (nn.AvgPool1d(2), [0.5, 0.5])):
        model = nn.Sequential(
            nn.Conv1d(1, 1, 1, bias=False), nn.Conv1d(1, 1, 1, bias=False), pool, nn.Flatten()
        ).double()
        learner = apical.make("tp", model, loss="mse", target_step=1.0)
        freeze_inverses(learner)
        with torch.no_grad():
            for p in model.parameters():
                p.fill_(1.0)
            learner.feedback_weights[1].fill_(3.0)
            learner.get_parameter("offset.1").fill_(0.5)
        x = torch.tensor([[[1.0, 2.0]]], dtype=torch.float64)
        grads = credited(learner, x, torch.tensor([[7.0]], dtype=torch.float64))  # target_step 1: the target is 7
        target = 3 * 7 * torch.tensor(places, dtype=torch.float64) + 0.5
        u = x.flatten()
        assert_same(grads["model.0.weight"].flatten(), ((u - target) * u).sum().view(1))


# Options and what is refused.


@both
def test_means_do_not_depend_on_how_often_a_batch_is_seen(rule: str) -> None:
    learner, case = make(rule, "cnn", sigma=0.0)
    once = updates(learner, case.x, case.labels, {})
    thrice = updates(learner, case.x.repeat(3, 1, 1, 1), case.labels.repeat(3), {})
    for one, three in zip(once, thrice, strict=True):
        assert_all_same(three, one)


@both
def test_without_hidden_layers_it_is_bp(rule: str) -> None:
    model = nn.Sequential(nn.Linear(4, 3)).double()
    x, y = torch.randn(6, 4, dtype=torch.float64), torch.randint(0, 3, (6,))
    learner = apical.make(rule, model)
    assert learner.feedback_weights == [None]
    assert_all_same(credited(learner, x, y), autograd(model, F.cross_entropy(model(x), y)))


@both
def test_the_options_reach_noise_phases_groups_and_spread(rule: str) -> None:
    case = CASES["mlp"].case()
    learner = learner_for(rule, case, inverse_steps=3, inverse_rate=0.5, sigma=0.2)
    assert len(learner.phases) == 4
    noise = learner.draw(case.x)
    assert {n: tuple(t.shape) for n, t in noise.items()} == {
        f"sigma/{turn}/{i}": (5, size) for turn in range(3) for i, size in ((1, 5), (2, 4))
    }
    assert learner_for(rule, CASES["mlp"].case(), sigma=0.0).draw(case.x) == {}
    rates = {group["name"]: group["lr"] for group in learner.param_groups(lr=0.1)}
    assert rates == {"W": 0.1, "bias": 0.1, "inverse": 0.05}
    wide = nn.Sequential(nn.Linear(5, 200), nn.Tanh(), nn.Linear(200, 400))
    for options, std in (({}, 400**-0.5), ({"std": 0.3}, 0.3)):
        v = apical.make(rule, wide, **options).feedback_weights[1].detach()
        assert abs(float(v.std()) / std - 1) < 0.03
    many = learner.draw(case.x.float().expand(5, 2, 3).repeat(4000, 1, 1), torch.Generator().manual_seed(3))
    for drawn in many.values():  # standard normal: mean, spread and fourth moment
        assert drawn.dtype == torch.float32
        assert abs(float(drawn.mean())) < 0.02
        assert abs(float(drawn.var()) - 1) < 0.03
        assert abs(float(drawn.pow(4).mean()) - 3) < 0.2
    again = learner.draw(case.x.float().expand(5, 2, 3).repeat(4000, 1, 1), torch.Generator().manual_seed(3))
    assert_all_same(many, again, tolerance=0.0)


def test_each_rule_has_a_target_step_of_its_own_unless_given() -> None:
    build = CASES["mlp"].case
    assert learner_for("tp", build()).target_step == 5.0
    assert learner_for("dtp", build()).target_step == 0.2
    assert learner_for("tp", build(), target_step=0.1).target_step == 0.1


@both
@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("target_step", 0.0),
        ("target_step", "far"),
        ("inverse_rate", -1.0),
        ("std", 0.0),
        ("sigma", -0.1),
        ("sigma", float("nan")),
        ("inverse_steps", 0),
        ("inverse_steps", 1.5),
        ("inverse_steps", True),
    ],
)
def test_a_setting_that_makes_no_sense_is_refused_by_name(rule: str, option: str, value: object) -> None:
    with pytest.raises(ApicalError, match=option):
        learner_for(rule, CASES["mlp"].case(), **{option: value})


@both
def test_frozen_weights_stay_and_nothing_to_train_is_said(rule: str) -> None:
    learner, case = make(rule, "mlp")
    whole = updates(learner, case.x, case.labels, noise := learner.draw(case.x))
    frozen = {"model.1.weight", "model.1.bias", "inverse.1", "offset.2"}
    for name in frozen:
        learner.get_parameter(name).requires_grad_(False)
    for part, every in zip(updates(learner, case.x, case.labels, noise), whole, strict=True):
        assert_all_same(part, {n: g for n, g in every.items() if n not in frozen})
    for name, p in learner.named_parameters():
        p.requires_grad_(name.startswith(("inverse", "offset")))
    assert [set(of_model(g)) for g in updates(learner, case.x, case.labels, noise)] == [set(), set()]
    learner.requires_grad_(False)
    with pytest.raises(ApicalError, match="nothing is left to train"):
        learner.credit(case.x, case.labels)


@both
def test_float32_agrees_with_float64(rule: str) -> None:
    learner, case = make(rule, "cnn")
    single = copy.deepcopy(learner).float()
    noise = learner.draw(case.x)
    exact = updates(learner, case.x, case.labels, noise)
    rough = updates(single, case.x.float(), case.labels, {n: t.float() for n, t in noise.items()})
    for a, b in zip(rough, exact, strict=True):
        assert_all_same({n: g.double() for n, g in a.items()}, b, tolerance=1e-4)
