"""DLL and what its Θ does, against autograd in Θ and the closed forms of the relaxation and of Kolen-Pollack."""

import copy

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import apical
from cases import CASES, RULES, learner_for
from reference import (
    PerExample,
    assert_all_same,
    assert_same,
    autograd,
    credited,
    cross_entropy,
    downward,
    feedback_pass,
    layers_of,
    of_model,
    random_like,
    set_feedback,
)
from strategies import Case, hidden_networks, networks, share_of_examples

pytestmark = pytest.mark.no_cover  # other tests run these lines, too, and coverage doubles the time

VARIANTS = [name for name in RULES if name.startswith("dll")]
KP = "dll:kolen-pollack"


def half_squared(output: Tensor, y: Tensor) -> Tensor:
    hot = F.one_hot(y, output.shape[1]).to(output.dtype)
    return (output - hot).square().flatten(1).sum(1) / 2


losses: st.SearchStrategy[tuple[str, PerExample]] = st.sampled_from(
    [("cross_entropy", cross_entropy()), ("mse", half_squared)]
)


@pytest.mark.parametrize("rule", VARIANTS)
@given(case=networks())
def test_with_theta_equal_to_w_the_w_gradients_are_bps(rule: str, case: Case) -> None:
    learner = learner_for(rule, case)
    set_feedback(learner, learner.forward_weights[1:])
    expected = autograd(case.model, F.cross_entropy(case.model(case.x), case.labels))
    assert_all_same(of_model(credited(learner, case.x, case.labels)), expected)


@pytest.mark.parametrize("rule", VARIANTS)
@given(case=hidden_networks(), loss=losses)
def test_errors_come_down_through_theta(rule: str, case: Case, loss: tuple[str, PerExample]) -> None:
    learner = learner_for(rule, case, loss=loss[0])
    theta = random_like(learner.forward_weights)
    set_feedback(learner, theta[1:])
    expected = feedback_pass(case.model, case.x, case.labels, loss[1], theta)
    assert_all_same(of_model(credited(learner, case.x, case.labels)), expected.grads)


@given(case=hidden_networks())
def test_frozen_equals_fa_with_the_same_b(case: Case) -> None:
    frozen, fa = learner_for("dll:frozen", case), learner_for("fa", case)
    set_feedback(frozen, fa.feedback_weights[1:])
    assert_all_same(credited(frozen, case.x, case.labels), credited(fa, case.x, case.labels))


@given(case=hidden_networks(), loss=losses)
def test_the_papers_theta_descends_half_the_squared_error_of_its_layer_and_released_climbs_it(
    case: Case, loss: tuple[str, PerExample]
) -> None:
    """∂/∂Θ_i of the batch mean of ½‖ξ_i‖², ξ_i = Θ_iᵀδ_i with δ_i held; δ by the reference, ∂ by autograd."""
    paper = learner_for("dll", case, loss=loss[0])
    released = learner_for("dll:released", case, loss=loss[0])
    theta = random_like(paper.forward_weights)
    for learner in (paper, released):
        set_feedback(learner, theta[1:])
        credited(learner, case.x, case.labels)
    held = feedback_pass(case.model, case.x, case.labels, loss[1], theta)
    for i, layer in list(enumerate(layers_of(case.model)))[1:]:
        at = theta[i].clone().requires_grad_()
        xi = downward(layer, at, held.u[i], held.delta[i])
        assert_same(xi.detach(), held.xi[i])
        energy = xi.square().flatten(1).sum(1).mean() / 2
        (expected,) = torch.autograd.grad(energy, at)
        assert_same(paper.feedback_weights[i].grad, expected)
        assert_same(released.feedback_weights[i].grad, -expected)


# The iterated errors.


def _deep(layers: int) -> Case:
    torch.manual_seed(layers)
    stages: list[nn.Module] = []
    for _ in range(layers):
        stages += [nn.Linear(4, 4), nn.Tanh()]
    model = nn.Sequential(*stages[:-1]).double()
    return Case(model, torch.randn(6, 4, dtype=torch.float64), torch.randint(0, 4, (6,)))


def _relaxed(case: Case, closed: apical.Learner, rule: str = "dll", **options: float) -> dict[str, Tensor]:
    learner = learner_for(rule, case, **options)
    set_feedback(learner, closed.feedback_weights[1:])
    return credited(learner, case.x, case.labels)


@pytest.mark.parametrize("rule", ["dll", "dll:released", "dll:frozen", KP])
@share_of_examples(0.3)
@given(case=hidden_networks())
def test_at_a_unit_step_the_errors_settle_exactly_in_one_sweep_per_hidden_layer(rule: str, case: Case) -> None:
    closed = learner_for(rule, case)
    expected = credited(closed, case.x, case.labels)
    sweeps = len(closed.network) - 1
    for enough in (sweeps, sweeps + 2):
        relaxed = _relaxed(case, closed, rule, sweeps=enough, eta_x=1.0)
        assert set(relaxed) == set(expected)
        for name, value in expected.items():
            torch.testing.assert_close(relaxed[name], value, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("layers", [3, 4, 6])
def test_at_a_unit_step_each_sweep_settles_one_more_layer_from_the_top(layers: int) -> None:
    case = _deep(layers)
    closed = learner_for("dll", case)
    expected = credited(closed, case.x, case.labels)
    names = [layer.weight for layer in closed.network.layers]
    for sweeps in range(1, layers - 1):
        relaxed = _relaxed(case, closed, sweeps=sweeps, eta_x=1.0)
        for i, name in enumerate(names):
            if i >= layers - 1 - sweeps:
                assert_same(relaxed[name], expected[name], 1e-12)
            else:
                assert not relaxed[name].any(), "no error has reached this layer yet"
                assert expected[name].any()


@pytest.mark.parametrize("eta", [0.25, 0.5, 0.9, 1.1, 1.6])
def test_one_sweep_takes_the_top_hidden_error_eta_of_the_way(eta: float) -> None:
    case = _deep(4)
    closed = learner_for("dll", case)
    expected = credited(closed, case.x, case.labels)
    one = _relaxed(case, closed, sweeps=1, eta_x=eta)
    two = _relaxed(case, closed, sweeps=2, eta_x=eta)
    assert_same(one["model.4.weight"], eta * expected["model.4.weight"])
    assert not one["model.2.weight"].any()
    # ξ after two sweeps: (1 − η)·ηξ* + ηξ* at the top, and η of what the first sweep left there below it.
    assert_same(two["model.4.weight"], (1 - (1 - eta) ** 2) * expected["model.4.weight"])
    assert_same(two["model.2.weight"], eta**2 * expected["model.2.weight"])
    assert not two["model.0.weight"].any()


@pytest.mark.parametrize("eta", [0.3, 0.7, 1.0, 1.3, 1.7])
@pytest.mark.parametrize("name", ["deep", "cnn", "positions"])
def test_the_errors_settle_at_the_closed_form_for_every_step_below_two(name: str, eta: float) -> None:
    case = CASES[name].case()
    closed = learner_for("dll", case)
    expected = credited(closed, case.x, case.labels)
    assert_all_same(_relaxed(case, closed, sweeps=200, eta_x=eta), expected)


# Kolen-Pollack.


@given(case=hidden_networks())
def test_kolen_pollack_gives_theta_the_gradient_of_w_in_memory_of_its_own(case: Case) -> None:
    learner = learner_for(KP, case)
    credited(learner, case.x, case.labels)
    learner.zero_grad()
    learner.credit(case.x, case.labels)
    for w, theta in list(zip(learner.forward_weights, learner.feedback_weights, strict=True))[1:]:
        assert torch.equal(theta.grad, w.grad)
        assert theta.grad.data_ptr() != w.grad.data_ptr()


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
@pytest.mark.parametrize("name", ["mlp", "deep", "cnn", "positions"])
def test_kolen_pollack_shrinks_the_gap_by_exactly_one_minus_rate_times_decay(
    name: str, optimizer: type[torch.optim.Optimizer]
) -> None:
    """AdamW, too: its steps depend on gradients alone, which W and Θ share, and its decay on neither."""
    case = CASES[name].case()
    rate, decay = 0.1, 0.3
    learner = learner_for(KP, case, decay=decay)
    optim = optimizer(learner.param_groups(lr=rate))

    def gaps() -> list[Tensor]:
        pairs = zip(learner.feedback_weights[1:], learner.forward_weights[1:], strict=True)
        return [(theta - w).detach().clone() for theta, w in pairs]

    start = [w.detach().clone() for w in learner.forward_weights]
    for _ in range(6):
        before = gaps()
        learner.step(case.x, case.labels, optim)
        for old, new in zip(before, gaps(), strict=True):
            assert_same(new, (1 - rate * decay) * old, 1e-12)
    assert all(not torch.equal(w, old) for w, old in zip(learner.forward_weights, start, strict=True))


@pytest.mark.parametrize("options", [{"momentum": 0.9}, {"momentum": 0.9, "nesterov": True}])
def test_with_momentum_kolen_pollacks_gap_has_a_momentum_of_its_own(options: dict[str, float]) -> None:
    """The decay goes into the velocity, v ← μv + λ(Θ − W), so the gap is no power of 1 − ηλ."""
    case = CASES["mlp"].case()
    rate, decay, momentum = 0.1, 0.3, 0.9
    learner = learner_for(KP, case, decay=decay)
    optim = torch.optim.SGD(learner.param_groups(lr=rate), lr=rate, **options)
    start = [(t - w).detach() for t, w in zip(learner.feedback_weights[1:], learner.forward_weights[1:], strict=True)]
    size, velocity = 1.0, 0.0
    for _ in range(30):
        learner.step(case.x, case.labels, optim)
        velocity = momentum * velocity + decay * size
        size -= rate * (momentum * velocity + decay * size if "nesterov" in options else velocity)
    pairs = zip(learner.feedback_weights[1:], learner.forward_weights[1:], start, strict=True)
    for theta, w, gap in pairs:
        assert_same((theta - w).detach(), size * gap, 1e-9)
    assert abs(size - (1 - rate * decay) ** 30) > 0.1


@pytest.mark.parametrize("others", [{}, {"weight_decay": 0.3}])
@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW, torch.optim.Adam])
def test_kolen_pollacks_decay_is_each_thetas_and_that_of_the_w_that_it_mirrors_alone(
    optimizer: type[torch.optim.Optimizer], others: dict[str, float]
) -> None:
    """What has no Θ, the first W and the biases, has the user's `weight_decay`, which is 0 unless given."""
    case = CASES["mlp"].case()
    learner = learner_for(KP, case, decay=0.02)
    optim = optimizer(learner.param_groups(lr=0.5, **others))
    decay = {id(p): group["weight_decay"] for group in optim.param_groups for p in group["params"]}
    rate = {id(p): group["lr"] for group in optim.param_groups for p in group["params"]}
    assert len(decay) == sum(len(group["params"]) for group in optim.param_groups), "each parameter once"
    for name, parameter in learner.named_parameters():
        mirrored = name.endswith("weight") and name != "model.1.weight"
        expected = 0.02 if mirrored or name.startswith("feedback") else others.get("weight_decay", 0.0)
        assert decay.pop(id(parameter)) == expected, name
        assert rate[id(parameter)] == 0.5
    assert not decay


def test_kolen_pollacks_decay_is_1e_4_unless_said_otherwise() -> None:
    groups = learner_for(KP, CASES["mlp"].case()).param_groups(lr=0.5)
    assert {group["name"]: group["weight_decay"] for group in groups} == {
        "W": 0.0,
        "W mirrored": 1e-4,
        "bias": 0.0,
        "theta": 1e-4,
    }


@pytest.mark.parametrize("rule", [rule for rule in RULES if rule != KP])
def test_other_rules_leave_weight_decay_to_the_user(rule: str) -> None:
    learner = learner_for(rule, CASES["mlp"].case())
    assert all("weight_decay" not in group for group in learner.param_groups(lr=0.1))
    assert all(group["weight_decay"] == 0.3 for group in learner.param_groups(lr=0.1, weight_decay=0.3))


def test_kolen_pollack_with_a_frozen_w_mirrors_nothing_there_and_says_nothing() -> None:
    """Θ of a frozen W has nothing to mirror; the rest learns on, and the left-out warning would be false."""
    case = CASES["mlp"].case()
    case.model[5].weight.requires_grad_(False)
    learner = learner_for(KP, case)
    before = learner.feedback_weights[2].detach().clone()
    optim = torch.optim.SGD(learner.param_groups(lr=0.1))
    for _ in range(3):
        learner.step(case.x, case.labels, optim)
    assert torch.equal(learner.feedback_weights[2], before)
    assert learner.feedback_weights[1].grad is not None


def test_kolen_pollack_with_the_only_mirrored_w_frozen_does_not_warn(recwarn: pytest.WarningsRecorder) -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))
    model[2].weight.requires_grad_(False)
    learner = apical.make(KP, model)
    optim = torch.optim.SGD(learner.param_groups(lr=0.1))
    for _ in range(3):
        learner.step(torch.randn(5, 4), torch.randint(0, 2, (5,)), optim)
    assert not [w for w in recwarn if "feedback" in str(w.message)]


@pytest.mark.parametrize(
    ("rule", "options", "share"),
    [
        ("dll", {}, 0.1),
        ("dll:released", {}, 0.1),
        (KP, {}, 1.0),
        ("dll", {"theta_rate": 0.25}, 0.25),
        (KP, {"theta_rate": 0.0}, 0.0),
    ],
)
def test_thetas_rate_is_its_share_of_ws(rule: str, options: dict[str, float], share: float) -> None:
    groups = learner_for(rule, CASES["mlp"].case(), **options).param_groups(lr=0.2)
    rates = {group["name"]: group["lr"] for group in groups}
    assert rates.pop("theta") == pytest.approx(0.2 * share)
    assert set(rates.values()) == {0.2}


def test_frozen_gives_the_optimiser_no_theta() -> None:
    groups = learner_for("dll:frozen", CASES["mlp"].case()).param_groups(lr=0.2)
    assert [group["name"] for group in groups] == ["W", "bias"]


def test_plain_dll_is_the_papers() -> None:
    case = CASES["mlp"].case()
    torch.manual_seed(1)
    plain = learner_for("dll", case)
    torch.manual_seed(1)
    paper = learner_for("dll:paper", Case(copy.deepcopy(case.model), case.x, case.labels))
    assert plain.name == paper.name == "dll"
    assert plain.theta == paper.theta == "paper"
    assert_all_same(credited(plain, case.x, case.labels), credited(paper, case.x, case.labels))
