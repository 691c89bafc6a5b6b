"""Branches side by side: every law again where an `apical.Parallel` stands first, in the middle or last.

The other side of the equations is autograd of one straight-through graph: each layer shows its own value upwards and a
given feedback weight downwards. Nothing there knows of tiers.
"""

import copy
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.func import functional_call

import apical
from apical import Parallel
from apical.core.sequential import SequentialNetwork
from apical.errors import ApicalError, UnsupportedError
from cases import CASES, EVERY, RULES, learner_for
from reference import (
    assert_all_same,
    assert_same,
    autograd,
    credited,
    downward,
    gradients,
    of_model,
    plain,
    random_like,
)
from runs import RUN, data, interrupt, plain_mlp, weights, without_time
from strategies import Case, activations, batches, convolutions, seeds

WEIGHTED = (nn.Linear, nn.Conv1d, nn.Conv2d)
THETA = [name for name in RULES if name.startswith("dll")]
THROUGH_B = ["fa", "sign", *THETA]


# Random networks with a Parallel in them.


def _ends(draw: st.DrawFn, dims: int, count: int) -> list[list[nn.Module]]:
    """How each branch comes to a size that fits the others."""
    if dims == 0:
        return [[] for _ in range(count)]
    if draw(st.booleans()):
        return [[nn.Flatten()] for _ in range(count)]
    size = draw(st.integers(1, 2))
    kinds = [draw(st.sampled_from(["Max", "Avg"])) for _ in range(count)]
    return [[getattr(nn, f"Adaptive{kind}Pool{dims}d")(size)] for kind in kinds]


def _fan(draw: st.DrawFn, dims: int, probe: Tensor) -> Parallel:
    branches: list[nn.Module] = []
    for end in _ends(draw, dims, draw(st.integers(2, 3))):
        if dims:
            stages: list[nn.Module] = [draw(convolutions(probe.shape[1], tuple(probe.shape[2:])))]
        else:
            stages = [nn.Linear(probe.shape[1], draw(st.integers(1, 4)), bias=draw(st.booleans()))]
        stages += [draw(activations())] if draw(st.booleans()) else []
        stages += end
        bare = len(stages) == 1 and draw(st.booleans())
        branches.append(stages[0] if bare else nn.Sequential(*stages))
    return Parallel(*branches)


@st.composite
def parallel_networks(draw: st.DrawFn) -> Case:
    """Dense or convolutional: perhaps a layer before, branches, perhaps a joint φ and a layer more, a plain or a
    parallel end."""
    torch.manual_seed(draw(seeds))
    dims = draw(st.integers(0, 2))
    shape = (draw(st.integers(1, 3)), *(draw(st.integers(4, 6)) for _ in range(dims)))
    modules: list[nn.Module] = []
    probe = torch.zeros(2, *shape)
    if draw(st.booleans()):
        first = draw(convolutions(shape[0], shape[1:])) if dims else nn.Linear(shape[0], draw(st.integers(1, 4)))
        modules += [first, draw(activations())]
        probe = modules[0](probe).detach()
    modules.append(_fan(draw, dims, probe))
    modules += [draw(activations())] if draw(st.booleans()) else []
    modules.append(nn.Flatten())
    width = nn.Sequential(*modules)(torch.zeros(2, *shape)).shape[1]
    if draw(st.booleans()):
        modules += [nn.Linear(width, 3), draw(activations())]
        width = 3
    if draw(st.booleans()):
        modules.append(_fan(draw, 0, torch.zeros(2, width)))
    else:
        modules.append(nn.Linear(width, draw(st.integers(2, 3)), bias=draw(st.booleans())))
    model = nn.Sequential(*modules).double()
    x = torch.randn(draw(batches), *shape, dtype=torch.float64)
    return Case(model, x, torch.randint(0, model(x).shape[1], x.shape[:1]))


# The same, by autograd alone.


class Straight:
    """One pass in which layer i shows W_i's value upwards and `feedback[i]` downwards: what u, δ and ξ follow from."""

    def __init__(self, case: Case, feedback: list[Tensor]) -> None:
        self.feedback = feedback
        self.inputs: list[Tensor] = []
        self.drives: list[Tensor] = []
        model = plain(case.model)
        output = self._run(model, case.x.clone().requires_grad_())
        loss = F.cross_entropy(output, case.labels, reduction="sum")
        names, params = zip(*model.named_parameters(), strict=True)
        found = [-g for g in torch.autograd.grad(loss, [*self.inputs, *self.drives, *params])]
        count = len(self.drives)
        self.xi, self.delta = found[:count], found[count : 2 * count]
        each = zip(names, found[2 * count :], strict=True)
        self.grads = {f"model.{name}": -g / len(case.x) for name, g in each}

    def _run(self, module: nn.Module, u: Tensor) -> Tensor:
        if isinstance(module, Parallel):
            return torch.cat([self._run(branch, u) for branch in module], 1)
        if isinstance(module, nn.Sequential):
            for stage in module:
                u = self._run(stage, u)
            return u
        if not isinstance(module, WEIGHTED):
            return module(u.clone())
        down = {"weight": self.feedback[len(self.drives)]}
        if module.bias is not None:
            down["bias"] = module.bias.detach()
        through = functional_call(module, down, (u,))
        self.inputs.append(u)
        self.drives.append(module(u.detach()) + through - through.detach())
        return self.drives[-1].clone()


def first_of(model: nn.Sequential) -> int:
    """How many layers of weights share the model's own input."""
    for module in model:
        if isinstance(module, Parallel):
            return len(module)
        if isinstance(module, WEIGHTED):
            return 1
    raise AssertionError(model)


def with_feedback(learner: apical.Learner, feedback: list[Tensor]) -> apical.Learner:
    """Give every layer that keeps feedback weights its own of these."""
    with torch.no_grad():
        for live, weight in zip(learner.feedback_weights, feedback, strict=True):
            if live is not None:
                live.copy_(weight)
    return learner


# Laws.


@given(case=parallel_networks())
def test_the_network_computes_what_the_model_computes_and_lists_each_branch(case: Case) -> None:
    network = SequentialNetwork(case.model)
    params = {f"model.{name}": p.detach() for name, p in case.model.named_parameters()}
    expected = case.model(case.x).detach()
    assert_same(network.predict(params, case.x, {}), expected)
    assert_same(network.forward(params, case.x, {}).output, expected)
    shapes = network.shapes(case.input_shape)
    assert shapes.output == expected.shape[1:]
    modules = [module for module in case.model.modules() if isinstance(module, WEIGHTED)]
    learner = learner_for("bp", case)
    assert all(w is module.weight for w, module in zip(learner.forward_weights, modules, strict=True))
    walk = Straight(case, random_like(learner.forward_weights))
    assert shapes.inputs == [u.shape[1:] for u in walk.inputs]
    assert shapes.drives == [a.shape[1:] for a in walk.drives]


@given(case=parallel_networks())
def test_bp_equals_autograd(case: Case) -> None:
    learner = learner_for("bp", case)
    loss = F.cross_entropy(case.model(case.x), case.labels)
    assert_same(learner.credit(case.x, case.labels).loss, loss)
    assert_all_same(credited(learner, case.x, case.labels), autograd(case.model, loss))


@pytest.mark.parametrize("rule", [name for name in THROUGH_B if name != "sign"])
@given(case=parallel_networks())
def test_errors_come_down_through_the_feedback_weights_and_add_up(rule: str, case: Case) -> None:
    learner = learner_for(rule, case)
    feedback = random_like(learner.forward_weights)
    with_feedback(learner, feedback)
    expected = Straight(case, feedback).grads
    assert_all_same(of_model(credited(learner, case.x, case.labels)), expected)


@pytest.mark.parametrize("rule", THROUGH_B)
@given(case=parallel_networks())
def test_every_layer_above_the_first_has_feedback_weights_of_its_own(rule: str, case: Case) -> None:
    learner = learner_for(rule, case)
    first = first_of(case.model)
    shapes = [None if b is None else b.shape for b in learner.feedback_weights]
    assert shapes == [None] * first + [w.shape for w in learner.forward_weights[first:]]


@given(case=parallel_networks())
def test_sign_takes_the_signs_and_the_size_of_each_branchs_own_w(case: Case) -> None:
    learner = learner_for("sign", case)
    b = [w.detach().sign() * w.detach().abs().mean() for w in learner.forward_weights]
    for shown, expected in zip(learner.feedback_weights, b, strict=True):
        assert shown is None or torch.equal(shown, expected)
    assert_all_same(credited(learner, case.x, case.labels), Straight(case, b).grads)


@pytest.mark.parametrize("rule", ["fa", *THETA])
@given(case=parallel_networks())
def test_with_feedback_equal_to_w_the_gradients_are_bps(rule: str, case: Case) -> None:
    learner = learner_for(rule, case)
    with_feedback(learner, learner.forward_weights)
    expected = autograd(case.model, F.cross_entropy(case.model(case.x), case.labels))
    assert_all_same(of_model(credited(learner, case.x, case.labels)), expected)


@given(case=parallel_networks())
def test_frozen_equals_fa(case: Case) -> None:
    frozen, fa = learner_for("dll:frozen", case), learner_for("fa", case)
    with_feedback(frozen, fa.feedback_weights)
    assert_all_same(credited(frozen, case.x, case.labels), credited(fa, case.x, case.labels))


@given(case=parallel_networks())
def test_theta_descends_or_climbs_half_the_squared_error_of_the_layer_below(case: Case) -> None:
    """∂/∂Θ_b of the batch mean of ½‖ξ‖², ξ = Σ_b Θ_bᵀδ_b the error at the branches' common input, every δ held."""
    paper, released = learner_for("dll", case), learner_for("dll:released", case)
    theta = random_like(paper.forward_weights)
    for learner in (paper, released):
        with_feedback(learner, theta)
        credited(learner, case.x, case.labels)
    walk = Straight(case, theta)
    modules = [module for module in case.model.modules() if isinstance(module, WEIGHTED)]
    for i in range(first_of(case.model), len(modules)):
        mates = [j for j in range(len(modules)) if walk.inputs[j] is walk.inputs[i]]
        at = {j: theta[j].clone().requires_grad_() for j in mates}
        xi = sum(downward(modules[j], at[j], walk.inputs[j], walk.delta[j]) for j in mates)
        assert_same(xi.detach(), walk.xi[i])
        (expected,) = torch.autograd.grad(xi.square().flatten(1).sum(1).mean() / 2, at[i])
        assert_same(paper.feedback_weights[i].grad, expected)
        assert_same(released.feedback_weights[i].grad, -expected)


@given(case=parallel_networks())
def test_kolen_pollacks_theta_follows_the_w_of_its_own_branch(case: Case) -> None:
    """Under SGD Θ − W shrinks by exactly 1 − ηλ a step; the first layer's branches mirror nothing and do not decay."""
    learner = learner_for("dll:kolen-pollack", case, decay=0.3)
    groups = {group["name"]: group for group in learner.param_groups(lr=0.5)}
    first = first_of(case.model)
    assert [id(p) for p in groups["W"]["params"]] == [id(w) for w in learner.forward_weights[:first]]
    assert groups["W"]["weight_decay"] == 0.0
    pairs = list(zip(learner.forward_weights, learner.feedback_weights, strict=True))[first:]
    before = [(b - w).detach() for w, b in pairs]
    learner.step(case.x, case.labels, torch.optim.SGD(learner.param_groups(lr=0.5)))
    for (w, b), gap in zip(pairs, before, strict=True):
        assert_same((b - w).detach(), (1 - 0.5 * 0.3) * gap)


@pytest.mark.parametrize("rule", ["dll", "dll:kolen-pollack"])
@given(case=parallel_networks())
def test_the_iterated_errors_settle_at_those_of_one_pass(rule: str, case: Case) -> None:
    """Exactly, at η = 1, after as many sweeps as there are steps down."""
    closed = learner_for(rule, case)
    steps = len({id(u) for u in Straight(case, list(closed.forward_weights)).inputs}) - 1
    swept = learner_for(rule, case, sweeps=max(1, steps))
    with_feedback(swept, closed.feedback_weights)
    assert_all_same(credited(swept, case.x, case.labels), credited(closed, case.x, case.labels))


@pytest.mark.parametrize(
    ("rule", "options"),
    [("bp", {}), ("fa", {}), *((rule, o) for rule in THETA for o in ({}, {"sweeps": 4, "eta_x": 0.7}))],
    ids=str,
)
def test_dense_branches_without_a_phi_are_one_layer_with_their_weights_one_below_the_other(
    rule: str, options: dict[str, float]
) -> None:
    """Unsettled errors, too: after four steps of 0.7 they are what they are in the plain network."""
    fans = [Parallel(nn.Linear(4, 2), nn.Linear(4, 3)), Parallel(nn.Linear(5, 1), nn.Linear(5, 3), nn.Linear(5, 2))]
    split = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), fans[0], nn.Sigmoid(), fans[1], nn.GELU(), nn.Linear(6, 3))
    whole = nn.Sequential(split[0], nn.Tanh(), nn.Linear(4, 5), nn.Sigmoid(), nn.Linear(5, 6), nn.GELU(), split[6])
    x, y = torch.randn(5, 3, dtype=torch.float64), torch.randint(0, 3, (5,))
    one, many = (apical.make(rule, copy.deepcopy(model).double(), **options) for model in (whole, split))
    groups = [[0], [1, 2], [3, 4, 5], [6]]
    with torch.no_grad():
        for k, group in enumerate(groups):
            one.forward_weights[k].copy_(torch.cat([many.forward_weights[i] for i in group]))
            if k > 0 and rule != "bp":
                one.feedback_weights[k].copy_(torch.cat([many.feedback_weights[i] for i in group]))
        for k in (2, 4):
            one.model[k].bias.copy_(torch.cat([branch.bias for branch in many.model[k]]))
    credited(one, x, y), credited(many, x, y)
    for k, group in enumerate(groups):
        pairs = [(one.forward_weights[k], [many.forward_weights[i] for i in group])]
        if k > 0 and rule in ("dll", "dll:released", "dll:kolen-pollack"):
            pairs.append((one.feedback_weights[k], [many.feedback_weights[i] for i in group]))
        for expected, parts in pairs:
            assert_same(torch.cat([part.grad for part in parts]), expected.grad)


def test_what_a_tier_kept_is_let_go_before_the_next_one_is_reached() -> None:
    case = CASES["parallel"].case()
    learner = learner_for("bp", case)
    params = {name: p.detach() for name, p in learner.params().items()}
    trace = learner.network.forward(params, case.x, {})
    _, xi = learner.loss.start(trace.output, case.labels)
    plain, held = learner.carry(params, trace, xi), {}

    def carry(i: int, delta: Tensor, shape: torch.Size) -> Tensor:
        held[i] = len(trace.inputs), len(trace.pullbacks), len(trace.splits)
        return plain(i, delta, shape)

    learner.sweep_layers(trace, xi, carry, learner.trainable, bottom=0)
    assert held == {4: (5, 5, 3), 2: (4, 4, 2), 3: (4, 4, 2)}


@given(case=parallel_networks())
def test_readout_trains_the_last_layer_with_all_its_branches(case: Case) -> None:
    last = case.model[-1]
    names = {f"model.{len(case.model) - 1}.{name}" for name, _ in last.named_parameters()}
    expected = autograd(case.model, F.cross_entropy(case.model(case.x), case.labels))
    learner = learner_for("readout", case)
    assert_all_same(credited(learner, case.x, case.labels), {n: expected[n] for n in names})
    assert learner.feedback_weights == [None] * len(learner.forward_weights)


@given(case=parallel_networks())
def test_dfa_brings_the_outputs_error_to_each_input_by_the_sum_of_the_branches_b(case: Case) -> None:
    learner = learner_for("dfa", case)
    free = Straight(case, list(learner.forward_weights))
    tops = [d for u, d in zip(free.inputs, free.delta, strict=True) if u is free.inputs[-1]]
    top = torch.cat([d.flatten(1) for d in tops], 1)
    feedback = [None if b is None else torch.randn_like(b) for b in learner.feedback_weights]
    with_feedback(learner, feedback)
    grads = credited(learner, case.x, case.labels)
    for u in free.inputs[first_of(case.model) :]:
        mates = [feedback[j] for j, v in enumerate(free.inputs) if v is u]
        assert {b.shape for b in mates} == {(top.shape[1], u[0].numel())}
        xi = torch.einsum("no,ov->nv", top, sum(mates)).view(u.shape)
        for name, expected in _below(case.model, case.x, u, xi).items():
            assert_same(grads[name], expected)


def _below(model: nn.Sequential, x: Tensor, u: Tensor, xi: Tensor) -> dict[str, Tensor]:
    """What the layer that makes u learns from the error ξ of u: autograd of −mean ⟨ξ, u⟩ up to that layer alone."""
    stages: list[nn.Module] = []
    for module in model:
        stages.append(module)
        a = nn.Sequential(*stages)(x.clone())
        if a.shape == u.shape and torch.allclose(a, u, rtol=1e-12, atol=1e-12):
            break
    weighted = [k for k, m in enumerate(stages) if isinstance(m, (*WEIGHTED, Parallel))][-1]
    names, params = zip(*((n, p) for n, p in stages[weighted].named_parameters()), strict=True)
    found = torch.autograd.grad(-(a * xi).sum() / len(x), params)
    return {f"model.{weighted}.{n}": g for n, g in zip(names, found, strict=True)}


def test_weight_perturbation_measures_the_slope_along_its_noise() -> None:
    case = CASES["parallel"].case()
    learner = learner_for("wp", case, sigma=1e-4)
    noise = learner.draw(case.x)
    slope = autograd(case.model, F.cross_entropy(case.model(case.x), case.labels))
    expected = sum((slope[name] * noise[name][0]).sum() for name in slope)
    with torch.no_grad():
        found = learner.update(learner.params(), {}, case.x, case.labels, noise).grads
    for name in slope:
        assert_same(found[name], expected * noise[name][0], tolerance=1e-6)


class Mask(nn.Module):
    """Dropout with a mask that is known."""

    def __init__(self, uniform: Tensor, p: float) -> None:
        super().__init__()
        self.factor = (uniform >= p).double() / (1 - p)

    def forward(self, a: Tensor) -> Tensor:
        return a * self.factor


def test_random_stages_in_a_branch_and_after_the_join_draw_noise_of_their_own() -> None:
    def build(inner: nn.Module, outer: nn.Module) -> nn.Sequential:
        torch.manual_seed(3)
        fan = Parallel(nn.Sequential(nn.Linear(4, 3), inner, nn.Tanh()), nn.Linear(4, 2))
        return nn.Sequential(nn.Linear(3, 4), fan, outer, nn.Linear(5, 3)).double()

    x, y = torch.randn(6, 3, dtype=torch.float64), torch.randint(0, 3, (6,))
    learner = apical.make("bp", build(nn.Dropout(0.4), nn.Dropout(0.5)))
    noise = learner.draw(x)
    assert {name: tuple(u.shape) for name, u in noise.items()} == {"1.0.1": (6, 3), "2": (6, 5)}
    with torch.no_grad():
        found = learner.update(learner.params(), {}, x, y, noise)
    masked = build(Mask(noise["1.0.1"], 0.4), Mask(noise["2"], 0.5))
    assert_same(found.output, masked(x))
    assert_all_same(found.grads, autograd(masked, F.cross_entropy(masked(x), y)))


@pytest.mark.parametrize("pool", [nn.AdaptiveMaxPool1d, nn.AdaptiveAvgPool1d])
@pytest.mark.filterwarnings("error")
def test_pooling_over_time_has_autograds_derivative_stacked_and_compiled(pool: Callable[[int], nn.Module]) -> None:
    model = nn.Sequential(Parallel(nn.Sequential(nn.Conv1d(2, 3, 2), pool(1)), nn.Conv1d(2, 2, 6)), nn.Flatten())
    model, x, y = model.double(), torch.randn(4, 2, 6, dtype=torch.float64), torch.randint(0, 5, (4,))
    learner = apical.make("bp", model)
    expected = autograd(model, F.cross_entropy(model(x), y))
    params = {name: p.detach() for name, p in learner.params().items()}
    twice = {name: torch.stack([p, 2 * p]) for name, p in params.items()}
    stacked = torch.vmap(learner.update, in_dims=(0, None, None, None, None))
    with torch.no_grad():
        assert_all_same({n: g[0] for n, g in stacked(twice, {}, x, y, {}).grads.items()}, expected)
        fast = torch.compile(learner.update, fullgraph=True, backend="aot_eager")
        assert_all_same(fast(params, {}, x, y, {}).grads, expected)


# What users see.


def two_fans() -> nn.Sequential:
    """For the engine's little images: branches first and branches later."""
    small = nn.Sequential(nn.Conv2d(1, 3, 2), nn.Tanh(), nn.AdaptiveMaxPool2d(1))
    wide = nn.Sequential(nn.Conv2d(1, 2, 3, bias=False), nn.AdaptiveAvgPool2d(1), nn.Tanh())
    later = Parallel(nn.Linear(5, 3), nn.Sequential(nn.Linear(5, 2), nn.Sigmoid()))
    return nn.Sequential(Parallel(small, wide), nn.Flatten(), later, nn.Linear(5, 3)).double()


@pytest.mark.parametrize("rule", RULES)
def test_seeds_that_train_together_equal_seeds_that_train_alone(rule: str) -> None:
    together = apical.fit(two_fans, data(), rule=rule, seeds=2, stack=True, **RUN)
    assert not any("stack" in reason for reason in together.reasons)
    for seed, learner in enumerate(together.learners):
        alone = apical.fit(two_fans, data(), rule=rule, seeds=[seed], stack=False, **RUN)
        assert_all_same(weights(learner), weights(alone.learners[0]))


@pytest.mark.parametrize("rule", ["dll", "dll:kolen-pollack"])
def test_a_resumed_run_equals_one_that_was_never_interrupted(rule: str, tmp_path: Path) -> None:
    whole = apical.fit(two_fans, data(), rule=rule, alignment=True, **RUN)
    path = tmp_path / "run.safetensors"
    interrupt(lambda: apical.fit(two_fans, data(), rule=rule, alignment=True, checkpoint=path, **RUN))
    resumed = apical.fit(two_fans, data(), rule=rule, alignment=True, checkpoint=path, resume=True, **RUN)
    assert without_time(resumed.history) == without_time(whole.history)
    cosines = whole.history[-1]["alignment"]["feedback"]
    assert [c is None for c in cosines] == [True, True, False, False, False]


@pytest.mark.parametrize("rule", RULES)
def test_a_saved_learner_goes_on_as_if_nothing_had_happened(rule: str, tmp_path: Path) -> None:
    case, other = CASES["parallel"].case(), CASES["parallel"].case(seed=1)
    learner, twin = learner_for(rule, case), learner_for(rule, other)
    torch.save(learner.state_dict(), tmp_path / "learner.pt")
    twin.load_state_dict(torch.load(tmp_path / "learner.pt"))
    assert_all_same(credited(twin, case.x, case.labels), credited(learner, case.x, case.labels))


@pytest.mark.parametrize("rule", [*RULES, "wp"])
def test_the_users_own_model_is_trained_in_place(rule: str) -> None:
    case = CASES["parallel"].case()
    before = copy.deepcopy(case.model.state_dict())
    learner = learner_for(rule, case)
    learner.step(case.x, case.labels, torch.optim.SGD(learner.param_groups(lr=0.1)))
    moved = {name for name, p in case.model.state_dict().items() if not torch.equal(p, before[name])}
    assert {f"model.{name}" for name in moved} == {n for n in learner.trainable if n.startswith("model.")}
    assert_same(learner(case.x), case.model(case.x))
    fresh = CASES["parallel"].model().double()
    fresh.load_state_dict(case.model.state_dict())
    assert_same(fresh(case.x), case.model(case.x))


@pytest.mark.parametrize("branch", ["model.0.0.", "model.0.1.", "model.2.1."])
def test_a_frozen_branch_gets_nothing_and_changes_nothing_for_the_others(branch: str) -> None:
    """Also where it is the first branch of all, and the lowest layer that learns is its neighbour."""
    case = CASES["parallel"].case()
    learner = learner_for("bp", case)
    expected = credited(learner, case.x, case.labels)
    for name in [name for name in expected if name.startswith(branch)]:
        learner.get_parameter(name).requires_grad_(False)
        del expected[name]
    assert_all_same(credited(learner, case.x, case.labels), expected)


@pytest.mark.parametrize(("rule", "errors"), [("bp", 1), ("fa", 1), ("dll", 3)])
def test_no_error_is_taken_below_the_lowest_layer_that_learns(
    rule: str, errors: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the first layer frozen the two later branches send nothing down, unless their Θ learns from just that."""
    case = CASES["parallel"].case()
    learner = learner_for(rule, case)
    case.model[0].requires_grad_(False)
    downs = []
    for kind in (apical.core.synapse.Dense, apical.core.synapse.Conv):
        plain = kind.adjoint
        monkeypatch.setattr(kind, "adjoint", lambda *a, plain=plain: (downs.append(a[0]), plain(*a))[1])
    learner.credit(case.x, case.labels)
    assert len(downs) == errors
    assert set(gradients(learner)) == learner.trainable


@pytest.mark.parametrize("rule", EVERY)
def test_a_single_branch_is_an_ordinary_layer_for_every_rule(rule: str) -> None:
    torch.manual_seed(0)
    plain = plain_mlp()
    wrapped = nn.Sequential(plain[0], Parallel(copy.deepcopy(plain[1])), *copy.deepcopy(plain[2:]))
    results = []
    for model in (plain, wrapped):
        torch.manual_seed(1)
        learner = apical.make(rule, model, input_shape=(1, 4, 4))
        x, y, *_ = data()
        learner.step(x.double(), y, torch.optim.SGD(learner.param_groups(lr=0.1)))
        results.append([p.detach() for p in model.parameters()])
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


# What is refused.


def test_rules_that_cannot_train_branches_name_those_that_can() -> None:
    able = {*RULES, "wp"}
    for rule in set(EVERY) - able:
        with pytest.raises(UnsupportedError) as refusal:
            apical.make(rule, CASES["parallel"].model(), input_shape=(2, 7))
        sentence = str(refusal.value)
        assert sentence.startswith("layer 0 is a Parallel of 2 branches, which ")
        assert all(f" {name}" in sentence for name in ("readout", "bp", "fa", "dfa", "sign", "dll", "wp"))
        assert rule.partition(":")[0] in sentence


class Own(Parallel):
    def forward(self, x: Tensor) -> Tensor:
        return self[0](x)


def hooked(module: nn.Module) -> nn.Module:
    module.register_forward_hook(lambda *_: None)
    return module


def shared() -> Parallel:
    layer = nn.Linear(4, 2)
    return Parallel(layer, layer)


REFUSED: dict[str, tuple[Callable[[], nn.Module], tuple[str, ...]]] = {
    "nested": (
        lambda: Parallel(nn.Linear(4, 2), nn.Sequential(Parallel(nn.Linear(4, 2)))),
        ("0.1.0", "inside a Parallel", "one Parallel"),
    ),
    "nested as a branch": (lambda: Parallel(Parallel(nn.Linear(4, 2))), ("0.0", "inside a Parallel")),
    "no weights": (lambda: Parallel(nn.Linear(4, 2), nn.Tanh()), ("0.1", "0 layers of weights", "one Linear")),
    "an empty branch": (lambda: Parallel(nn.Linear(4, 2), nn.Sequential()), ("0.1", "0 layers of weights")),
    "two layers of weights": (
        lambda: Parallel(nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2)), nn.Linear(4, 2)),
        ("0.0", "2 layers of weights", "one Linear"),
    ),
    "weights not first": (
        lambda: Parallel(nn.Linear(4, 2), nn.Sequential(nn.Tanh(), nn.Linear(4, 2))),
        ("0.1", "Tanh()", "before the Parallel"),
    ),
    "a module that no rule trains": (
        lambda: Parallel(nn.Linear(4, 2), nn.Sequential(nn.Linear(4, 2), nn.PReLU())),
        ("0.1.1", "PReLU", "parameters of its own"),
    ),
    "the same weights twice": (shared, ("0.0", "0.1", "share")),
    "a forward of its own": (lambda: Own(nn.Linear(4, 2)), ("0 (Own)", "apical.Parallel works")),
    "hooks": (lambda: hooked(Parallel(nn.Linear(4, 2))), ("0 (Parallel)", "hooks")),
    "hooks on a branch": (lambda: Parallel(hooked(nn.Sequential(nn.Linear(4, 2)))), ("0.0", "hooks")),
}


@pytest.mark.parametrize("what", list(REFUSED))
def test_what_is_no_branch_is_refused_by_name(what: str) -> None:
    build, words = REFUSED[what]
    with pytest.raises(UnsupportedError) as refusal:
        apical.make("dfa", nn.Sequential(build()))
    for word in words:
        assert word in str(refusal.value)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    "branches",
    [(nn.Conv1d(2, 3, 2), nn.Conv1d(2, 3, 3)), (nn.Conv1d(2, 3, 2), nn.Sequential(nn.Conv1d(2, 3, 2), nn.Flatten()))],
)
def test_branches_whose_outputs_do_not_fit_are_refused(branches: tuple[nn.Module, ...]) -> None:
    model = nn.Sequential(Parallel(*branches), nn.Flatten())
    x = torch.randn(2, 2, 6)
    for run in (
        lambda: apical.make("bp", model, input_shape=(2, 6)),
        lambda: apical.make("bp", model).credit(x, torch.tensor([0, 1])),
        lambda: model(x),
    ):
        with pytest.raises(ApicalError, match=r"\(2, 3, 5\), .*cannot be joined along dimension 1"):
            run()


@pytest.mark.parametrize("branches", [(), ([nn.Linear(2, 2)],), ("conv",)])
def test_a_parallel_is_made_of_modules(branches: tuple[object, ...]) -> None:
    with pytest.raises(ApicalError, match="branch"):
        Parallel(*branches)


def test_an_input_that_fits_no_branch_is_named() -> None:
    model = nn.Sequential(Parallel(nn.Conv1d(2, 3, 2), nn.Conv1d(2, 3, 9)))
    with pytest.raises(ApicalError, match=r"layer 0\.1 "):
        apical.make("bp", model, input_shape=(2, 6))


def test_the_page_on_textcnn_shows_code_that_runs() -> None:
    page = (Path(__file__).parents[2] / "docs" / "textcnn.md").read_text("utf-8")
    first, *_ = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    shown: dict[str, object] = {}
    exec(first, shown)
    learner = shown["learner"]
    assert isinstance(learner, apical.Learner)
    assert [b is None for b in learner.feedback_weights] == [True, True, True, False]
