"""The shell around every rule: `.grad`, modes, optimisers, the user's own model, and the registry."""

import copy
import io
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from torch import Tensor, nn

import apical
from apical.core.activation import Noise
from apical.core.network import Params
from apical.core.registry import options_of, resolve
from apical.core.synapse import Conv, Dense
from cases import CASES, KEPT, LEARNED, RULES, learner_for
from reference import assert_all_same, assert_same, autograd, credited, gradients, layers_of
from strategies import Case, networks, share_of_examples

pytestmark = pytest.mark.no_cover  # other tests run these lines, too, and coverage doubles the time

every_rule = pytest.mark.parametrize("rule", RULES)
Optimizer = torch.optim.Optimizer


# Gradients land where autograd would put them.


@every_rule
@pytest.mark.parametrize("name", ["mlp", "cnn"])
def test_credit_adds_to_grad_as_backward_does(rule: str, name: str) -> None:
    case, other = CASES[name].case(), CASES[name].case(seed=1)
    learner = learner_for(rule, case)
    one, two = credited(learner, case.x, case.labels), credited(learner, other.x, other.labels)
    learner.zero_grad()
    learner.credit(case.x, case.labels)
    learner.credit(other.x, other.labels)
    assert_all_same(gradients(learner), {n: one[n] + two[n] for n in one})


@every_rule
def test_credit_adds_to_what_autograd_left_there(rule: str) -> None:
    case = CASES["mlp"].case()
    learner = learner_for(rule, case)
    own = credited(learner, case.x, case.labels)
    learner.zero_grad()
    (case.model(case.x) ** 2).sum().backward()
    left = {n: g.clone() for n, g in gradients(learner).items()}
    learner.credit(case.x, case.labels)
    expected = {n: own.get(n, 0) + left.get(n, 0) for n in own.keys() | left.keys()}
    assert_all_same(gradients(learner), expected)


@every_rule
@share_of_examples(0.4)
@given(case=networks(torch.float32) | networks(torch.float64))
def test_a_gradient_has_the_type_shape_and_memory_layout_of_its_parameter(rule: str, case: Case) -> None:
    learner = learner_for(rule, case)
    learner.credit(case.x, case.labels)
    assert gradients(learner)
    for name, p in learner.named_parameters():
        if p.grad is not None:
            assert p.grad.dtype == p.dtype, name
            assert p.grad.stride() == p.stride(), name
            assert not p.grad.requires_grad, name


def _channels_last() -> Case:
    case = CASES["cnn"].case(dtype=torch.float32)
    return Case(case.model.to(memory_format=torch.channels_last), case.x, case.labels)


def _transposed() -> Case:
    case = CASES["mlp"].case(dtype=torch.float32)
    for layer in layers_of(case.model):
        layer.weight = nn.Parameter(torch.randn(layer.weight.T.shape).T)
    return case


layouts = pytest.mark.parametrize("build", [_channels_last, _transposed])


@every_rule
@layouts
def test_unusual_layouts_keep_theirs_and_learn_the_same(rule: str, build: Callable[[], Case]) -> None:
    case = build()
    learner = learner_for(rule, case)
    plain = copy.deepcopy(learner)
    for p in plain.parameters():
        p.data = p.data.contiguous(memory_format=torch.contiguous_format)
    assert any(p.stride() != q.stride() for p, q in zip(learner.parameters(), plain.parameters(), strict=True))
    for _ in range(2):  # the second one adds
        learner.credit(case.x, case.labels)
        plain.credit(case.x, case.labels)
        for p in learner.parameters():
            assert p.grad is None or p.grad.stride() == p.stride()
    assert_all_same(gradients(learner), gradients(plain))


@pytest.mark.parametrize("rule", ["bp", *LEARNED])
@layouts
def test_fused_adam_steps_as_the_unfused_one_does(rule: str, build: Callable[[], Case]) -> None:
    case = build()
    fused = learner_for(rule, case)
    unfused = copy.deepcopy(fused)
    optims = [
        (fused, torch.optim.Adam(fused.param_groups(lr=0.01), fused=True)),
        (unfused, torch.optim.Adam(unfused.param_groups(lr=0.01), fused=False, foreach=False)),
    ]
    for _ in range(4):
        for learner, optim in optims:
            learner.step(case.x, case.labels, optim)
    assert_all_same(dict(fused.named_parameters()), dict(unfused.named_parameters()), tolerance=1e-4)


@every_rule
@pytest.mark.parametrize("name", ["mlp", "cnn"])
def test_under_autocast_gradients_keep_their_parameters_type(rule: str, name: str) -> None:
    case = CASES[name].case(dtype=torch.float32)
    learner = learner_for(rule, case)
    exact = credited(learner, case.x, case.labels)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rough = credited(learner, case.x, case.labels)
    assert all(g.dtype == torch.float32 for g in rough.values())
    assert_all_same(rough, exact, tolerance=0.1)


# What is frozen stays so, and costs nothing.


@every_rule
@pytest.mark.parametrize("frozen", ["model.1.weight", "model.1.bias", "model.3.weight", "model.5.bias"])
def test_a_frozen_parameter_gets_no_gradient_and_the_others_get_theirs(rule: str, frozen: str) -> None:
    case = CASES["mlp"].case()
    learner = learner_for(rule, case)
    free = credited(learner, case.x, case.labels)
    learner.get_parameter(frozen).requires_grad_(False)
    expected = {n: g for n, g in free.items() if n != frozen}
    if rule == "dll:kolen-pollack" and frozen == "model.3.weight":
        del expected["feedback.1"]  # a frozen W gives its Θ nothing to mirror
    assert_all_same(credited(learner, case.x, case.labels), expected)


@every_rule
def test_frozen_feedback_gets_no_gradient_and_forward_weights_get_theirs(rule: str) -> None:
    case = CASES["mlp"].case()
    learner = learner_for(rule, case)
    free = credited(learner, case.x, case.labels)
    for name, p in learner.named_parameters():
        if name.startswith("feedback"):
            p.requires_grad_(False)
    expected = {n: g for n, g in free.items() if n.startswith("model")}
    assert_all_same(credited(learner, case.x, case.labels), expected)
    groups = learner.param_groups(lr=0.1)
    assert all(p.requires_grad for group in groups for p in group["params"])


@pytest.mark.parametrize("rule", ["dll", "dll:released"])
@pytest.mark.parametrize("name", ["deep", "cnn"])
def test_theta_learns_on_where_every_forward_weight_is_frozen(rule: str, name: str) -> None:
    case = CASES[name].case()
    learner = learner_for(rule, case)
    free = credited(learner, case.x, case.labels)
    case.model.requires_grad_(False)
    expected = {n: g for n, g in free.items() if n.startswith("feedback")}
    assert len(expected) == len(learner.network) - 1
    assert_all_same(credited(learner, case.x, case.labels), expected)


def counted(monkeypatch: pytest.MonkeyPatch, operation: str) -> list[object]:
    calls: list[object] = []
    for kind in (Dense, Conv):
        original = getattr(kind, operation)

        def counting(self: object, *args: object, _original: Callable[..., Tensor] = original, **kw: object) -> Tensor:
            calls.append(self)
            return _original(self, *args, **kw)

        monkeypatch.setattr(kind, operation, counting)
    return calls


@pytest.mark.parametrize("rule", ["bp", "fa", "sign", "dll", "dll:released", "dll:frozen", "dll:kolen-pollack"])
@pytest.mark.parametrize("frozen", [0, 1, 3, 4])
@pytest.mark.parametrize("name", ["deep", "cnn"])
def test_no_error_is_taken_below_the_lowest_layer_that_learns(
    rule: str, frozen: int, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A layer's weights carry an error down only if something below them learns."""
    case = CASES[name].case()
    learner = learner_for(rule, case)
    layers = layers_of(case.model)
    frozen = min(frozen, len(layers) - 1)
    learned = credited(learner, case.x, case.labels)
    for i in range(frozen):
        layers[i].requires_grad_(False)
        if learner.feedback_weights[i] is not None and learner.feedback_weights[i].is_leaf:
            learner.feedback_weights[i].requires_grad_(False)
    if frozen and rule in LEARNED:
        learner.feedback_weights[frozen].requires_grad_(False)  # it would need its layer's own error
    downs, outers = counted(monkeypatch, "adjoint"), counted(monkeypatch, "outer")
    grads = credited(learner, case.x, case.labels)
    assert len(downs) == len(layers) - 1 - frozen
    trained = sum(not n.endswith("bias") for n in grads)
    if rule == "dll:kolen-pollack":
        trained = sum(n.endswith("weight") for n in grads)  # Θ's gradient is a copy
    assert len(outers) == trained
    assert_all_same(grads, {n: learned[n] for n in grads})


def test_kolen_pollack_takes_no_error_down_to_layers_whose_w_is_frozen(monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASES["deep"].case()
    learner = learner_for("dll:kolen-pollack", case)
    for layer in layers_of(case.model)[:3]:
        layer.requires_grad_(False)
    downs = counted(monkeypatch, "adjoint")
    learner.credit(case.x, case.labels)
    assert len(downs) <= 2, "only the two layers that learn may use theirs"


def test_dfa_and_readout_never_take_an_error_from_layer_to_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    downs = counted(monkeypatch, "adjoint")
    for rule in ("dfa", "readout"):
        case = CASES["deep"].case()
        learner_for(rule, case).credit(case.x, case.labels)
    assert downs == []


@every_rule
def test_nothing_left_to_train_is_said_in_a_sentence(rule: str) -> None:
    case = CASES["mlp"].case()
    learner = learner_for(rule, case).requires_grad_(False)
    with pytest.raises(apical.ApicalError, match="requires_grad"):
        learner.credit(case.x, case.labels)


# A learner is a module, and the model in it stays the user's own.


@every_rule
def test_the_users_own_model_is_trained_in_place(rule: str) -> None:
    case = CASES["mlp"].case()
    mine = list(case.model.parameters())
    before = [p.detach().clone() for p in mine]
    learner = learner_for(rule, case)
    assert learner.model is case.model
    assert all(w is layer.weight for w, layer in zip(learner.forward_weights, layers_of(case.model), strict=True))
    learner.step(case.x, case.labels, torch.optim.SGD(learner.param_groups(lr=0.5)))
    assert all(p is q for p, q in zip(case.model.parameters(), mine, strict=True))
    moved = [not torch.equal(p, old) for p, old in zip(mine, before, strict=True)]
    assert moved == ([False] * 3 + [True] * 2 if rule == "readout" else [True] * 5)
    assert_same(learner(case.x), case.model(case.x))


@every_rule
@share_of_examples(0.3)
@given(case=networks())
def test_inference_is_the_models_and_credit_shows_the_same_output(rule: str, case: Case) -> None:
    learner = learner_for(rule, case)
    assert apical.RULES[rule.split(":")[0]].MODEL_PREDICTS
    expected = case.model(case.x)
    assert torch.equal(learner(case.x), expected)
    params = {n: p.detach() for n, p in learner.named_parameters()}
    assert_same(learner.predict(params, {}, case.x), expected.detach())
    credit = learner.credit(case.x, case.labels)
    assert_same(credit.output, expected.detach())
    assert_same(credit.loss, F.cross_entropy(expected, case.labels).detach())
    assert not credit.loss.requires_grad
    assert not credit.output.requires_grad


@every_rule
def test_a_state_dict_carries_a_learner_over(rule: str) -> None:
    case = CASES["cnn"].case()
    learner = learner_for(rule, case)
    file = io.BytesIO()
    torch.save(learner.state_dict(), file)
    file.seek(0)
    other = learner_for(rule, CASES["cnn"].case(seed=9))
    other.load_state_dict(torch.load(file))
    assert_all_same(credited(other, case.x, case.labels), credited(learner, case.x, case.labels))


@every_rule
@pytest.mark.parametrize("name", ["cnn", "conv1d with dropout"])
def test_a_deep_copy_learns_the_same_and_shares_nothing(rule: str, name: str) -> None:
    case = CASES[name].case()
    learner = learner_for(rule, case)
    twin = copy.deepcopy(learner)
    assert twin.name == learner.name
    assert not {p.data_ptr() for p in twin.parameters()} & {p.data_ptr() for p in learner.parameters()}
    noise = learner.draw(case.x)
    results = []
    for each in (learner, twin):
        with torch.no_grad():
            results.append(each.update(dict(each.named_parameters()), {}, case.x, case.labels, noise).grads)
    assert_all_same(results[1], results[0])
    twin.eval()  # its own modules, not the first one's
    assert learner.network.draw(case.x).keys() == noise.keys()
    assert twin.draw(case.x) == {}
    twin.step(case.x, case.labels, torch.optim.SGD(twin.param_groups(lr=0.5)))
    assert gradients(learner) == {}


@every_rule
def test_a_learner_can_be_pickled_whole(rule: str) -> None:
    case = CASES["cnn"].case()
    learner = learner_for(rule, case)
    file = io.BytesIO()
    torch.save(learner, file)
    file.seek(0)
    other = torch.load(file, weights_only=False)
    assert other.name == learner.name
    assert_all_same(credited(other, case.x, case.labels), credited(learner, case.x, case.labels))


@every_rule
def test_a_learner_moves_to_another_precision_as_a_module_does(rule: str) -> None:
    case = CASES["cnn"].case(dtype=torch.float32)
    learner = learner_for(rule, case)
    before = list(learner.parameters())
    learner.to(torch.float64)
    assert all(p is q for p, q in zip(learner.parameters(), before, strict=True))
    assert all(p.dtype == torch.float64 for p in learner.parameters())
    grads = credited(learner, case.x.double(), case.labels)
    assert all(g.dtype == torch.float64 for g in grads.values())


# Feedback weights are live.


@every_rule
def test_feedback_weights_have_none_first_and_forward_weights_are_the_models(rule: str) -> None:
    case = CASES["deep"].case()
    learner = learner_for(rule, case)
    assert len(learner.feedback_weights) == len(learner.forward_weights) == 5
    assert learner.feedback_weights[0] is None
    assert [b is None for b in learner.feedback_weights[1:]] == [rule == "readout"] * 4


@pytest.mark.parametrize("rule", KEPT)
def test_copying_into_a_feedback_weight_replaces_it(rule: str) -> None:
    case = CASES["mlp"].case()
    learner = learner_for(rule, case)
    before = credited(learner, case.x, case.labels)
    with torch.no_grad():
        for b in learner.feedback_weights[1:]:
            b.copy_(2 * b)
    assert_same(credited(learner, case.x, case.labels)["model.3.weight"], 2 * before["model.3.weight"])
    for b in learner.feedback_weights[1:]:
        assert any(b is p for p in learner.parameters())


def test_bps_feedback_weights_are_the_forward_weights() -> None:
    learner = learner_for("bp", CASES["mlp"].case())
    pairs = zip(learner.feedback_weights[1:], learner.forward_weights[1:], strict=True)
    assert all(b is w for b, w in pairs)


@pytest.mark.parametrize("rule", KEPT)
def test_fixed_feedback_is_saved_and_never_trained(rule: str) -> None:
    learner = learner_for(rule, CASES["mlp"].case())
    assert sum(n.startswith("feedback") for n in learner.state_dict()) == 2
    assert all(b.requires_grad == (rule in LEARNED) for b in learner.feedback_weights[1:])


# Optimisers.


@every_rule
def test_step_is_zero_credit_step(rule: str) -> None:
    case = CASES["cnn"].case()
    learner = learner_for(rule, case)
    twin = copy.deepcopy(learner)
    one = torch.optim.SGD(learner.param_groups(lr=0.1), momentum=0.9)
    two = torch.optim.SGD(twin.param_groups(lr=0.1), momentum=0.9)
    for _ in range(3):
        credit = learner.step(case.x, case.labels, one)
        two.zero_grad()
        expected = twin.credit(case.x, case.labels)
        two.step()
        assert_same(credit.loss, expected.loss)
        assert_same(credit.output, expected.output)
    assert_all_same(dict(learner.named_parameters()), dict(twin.named_parameters()))


@every_rule
def test_one_step_of_sgd_moves_each_parameter_against_its_gradient(rule: str) -> None:
    case = CASES["mlp"].case()
    learner = learner_for(rule, case, **({"decay": 0.0} if rule.endswith("pollack") else {}))
    before = {n: p.detach().clone() for n, p in learner.named_parameters()}
    grads = credited(learner, case.x, case.labels)
    groups = learner.param_groups(lr=0.1)
    rate = {id(p): group["lr"] for group in groups for p in group["params"]}
    learner.step(case.x, case.labels, torch.optim.SGD(groups))
    for name, p in learner.named_parameters():
        assert_same(p.detach(), before[name] - rate.get(id(p), 0.0) * grads.get(name, torch.zeros(())))


@every_rule
@pytest.mark.parametrize("name", ["mlp", "cnn"])
def test_param_groups_hold_each_trainable_parameter_once(rule: str, name: str) -> None:
    learner = learner_for(rule, CASES[name].case())
    groups = learner.param_groups(lr=0.3, betas=(0.8, 0.9))
    held = [id(p) for group in groups for p in group["params"]]
    trainable = {id(p) for n, p in learner.named_parameters() if n in learner.trainable}
    assert len(held) == len(set(held))
    assert set(held) == trainable
    assert all(group["betas"] == (0.8, 0.9) for group in groups)
    names = [group["name"] for group in groups]
    assert len(set(names)) == len(names)
    for group in groups:
        dims = {p.ndim for p in group["params"]}
        assert (dims == {1}) == (group["name"] == "bias")


@every_rule
@pytest.mark.parametrize(
    "optimizer",
    [
        lambda groups: torch.optim.SGD(groups, momentum=0.9, nesterov=True),
        torch.optim.Adam,
        torch.optim.AdamW,
        torch.optim.RMSprop,
    ],
    ids=["sgd", "adam", "adamw", "rmsprop"],
)
def test_any_optimiser_takes_the_groups_and_the_loss_comes_down(
    rule: str, optimizer: Callable[[list[dict[str, object]]], Optimizer]
) -> None:
    case = CASES["mlp"].case(batch=16)
    learner = learner_for(rule, case)
    optim = optimizer(learner.param_groups(lr=0.01))
    first = learner.step(case.x, case.labels, optim).loss
    for _ in range(60):
        last = learner.step(case.x, case.labels, optim).loss
    assert last < first


@every_rule
def test_one_cycle_takes_one_rate_per_group(rule: str) -> None:
    case = CASES["mlp"].case()
    learner = learner_for(rule, case)
    optim = torch.optim.Adam(learner.param_groups(lr=0.1))
    peaks = [group["lr"] for group in optim.param_groups]
    schedule = torch.optim.lr_scheduler.OneCycleLR(optim, max_lr=peaks, total_steps=10, pct_start=0.3)
    reached = [0.0] * len(peaks)
    for _ in range(10):
        learner.step(case.x, case.labels, optim)
        reached = [max(r, group["lr"]) for r, group in zip(reached, optim.param_groups, strict=True)]
        if schedule.last_epoch < 9:
            schedule.step()
    assert reached == pytest.approx(peaks)


# Feedback weights that somebody left out of the optimiser.


def said(learner: apical.Learner, optim: Optimizer, case: Case, batches: int, accumulate: int = 1) -> int:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for i in range(batches):
            learner.credit(case.x, case.labels)
            if (i + 1) % accumulate == 0:
                optim.step()
                optim.zero_grad()
    ours = [w for w in caught if "feedback" in str(w.message)]
    assert all(w.filename == __file__ for w in ours), "it points at the caller's own line"
    assert all("param_groups" in str(w.message) for w in ours)
    return len(ours)


OPTIMIZERS = [torch.optim.SGD, torch.optim.Adam, lambda p, lr: torch.optim.Adam(p, lr, fused=True)]
by_optimizer = pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=["sgd", "adam", "fused"])


@pytest.mark.parametrize("rule", LEARNED)
@by_optimizer
def test_theta_left_out_of_the_optimiser_is_said_exactly_once(rule: str, optimizer: Callable[..., Optimizer]) -> None:
    case = CASES["mlp"].case()
    learner = learner_for(rule, case)
    assert said(learner, optimizer(case.model.parameters(), lr=0.01), case, batches=6) == 1


@pytest.mark.parametrize("rule", LEARNED)
@pytest.mark.parametrize("accumulate", [1, 3])
@by_optimizer
def test_theta_in_the_optimiser_is_not_complained_about(
    rule: str, optimizer: Callable[..., Optimizer], accumulate: int
) -> None:
    for parameters in (lambda one: one.param_groups(lr=0.01), lambda one: one.parameters()):
        case = CASES["mlp"].case()
        learner = learner_for(rule, case)
        assert said(learner, optimizer(parameters(learner), lr=0.01), case, 7, accumulate) == 0


@pytest.mark.parametrize("rule", [rule for rule in RULES if rule not in LEARNED])
def test_rules_without_learned_feedback_have_nothing_to_leave_out(rule: str) -> None:
    case = CASES["mlp"].case()
    learner = learner_for(rule, case)
    assert said(learner, torch.optim.SGD(case.model.parameters(), lr=0.01), case, batches=4) == 0


def test_theta_frozen_on_purpose_is_not_complained_about() -> None:
    case = CASES["mlp"].case()
    learner = learner_for("dll", case)
    learner.feedback.requires_grad_(False)
    assert said(learner, torch.optim.SGD(case.model.parameters(), lr=0.01), case, batches=4) == 0


# Updates are pure, and so is stacking them.


@every_rule
@pytest.mark.parametrize("name", list(CASES))
def test_an_update_is_pure(rule: str, name: str) -> None:
    case = CASES[name].case()
    learner = learner_for(rule, case)
    params = {n: p.detach().clone() for n, p in learner.named_parameters()}
    noise = learner.draw(case.x)
    given_to_it = {**params, "x": case.x, "y": case.labels, **{f"noise {n}": v for n, v in noise.items()}}
    before = {n: v.clone() for n, v in given_to_it.items()}
    with torch.no_grad():
        one = learner.update(params, {}, case.x, case.labels, noise)
        two = learner.update(params, {}, case.x, case.labels, noise)
    assert gradients(learner) == {}
    assert all(torch.equal(v, before[n]) for n, v in given_to_it.items())
    assert one.state == {}
    assert all(torch.equal(g, two.grads[n]) for n, g in one.grads.items())
    assert set(one.grads) == learner.trainable


@every_rule
@pytest.mark.parametrize("name", list(CASES))
@pytest.mark.parametrize("shared_batch", [False, True], ids=["own batch", "shared batch"])
def test_stacked_seeds_equal_separate_ones(rule: str, name: str, shared_batch: bool) -> None:
    cases = [CASES[name].case(seed) for seed in range(3)]
    if shared_batch:
        cases = [Case(case.model, cases[0].x, cases[0].labels) for case in cases]
    learners = [learner_for(rule, case) for case in cases]
    params = [{n: p.detach() for n, p in each.named_parameters()} for each in learners]
    noises = [
        each.draw(case.x, torch.Generator().manual_seed(seed))
        for seed, (each, case) in enumerate(zip(learners, cases, strict=True))
    ]
    assert bool(noises[0]) == CASES[name].dropout

    def stack(dicts: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        return {n: torch.stack([d[n] for d in dicts]) for n in dicts[0]}

    batch_dim = None if shared_batch else 0
    x = cases[0].x if shared_batch else torch.stack([case.x for case in cases])
    y = cases[0].labels if shared_batch else torch.stack([case.labels for case in cases])
    with torch.no_grad():
        together = torch.vmap(learners[0].update, in_dims=(0, None, batch_dim, batch_dim, 0))(
            stack(params), {}, x, y, stack(noises)
        )
        for s, (each, case) in enumerate(zip(learners, cases, strict=True)):
            alone = each.update(params[s], {}, case.x, case.labels, noises[s])
            assert_all_same({n: g[s] for n, g in together.grads.items()}, alone.grads)
            assert_same(together.loss[s], alone.loss)
            assert_same(together.output[s], alone.output)


@share_of_examples(0.8)
@given(case=networks())
def test_stacked_seeds_equal_separate_ones_whatever_phi_is(case: Case) -> None:
    learner = learner_for("dll", case)
    params = {n: p.detach() for n, p in learner.named_parameters()}
    sets = [params, {n: p + 0.1 for n, p in params.items()}]
    stacked = {n: torch.stack([each[n] for each in sets]) for n in params}
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says which of its operations vmap runs one by one
        together = torch.vmap(learner.update, in_dims=(0, None, None, None, None))(stacked, {}, case.x, case.labels, {})
        for s, each in enumerate(sets):
            alone = learner.update(each, {}, case.x, case.labels, {})
            assert_all_same({n: g[s] for n, g in together.grads.items()}, alone.grads)


@pytest.mark.parametrize("name", list(CASES))
def test_stacked_seeds_predict_as_separate_ones(name: str) -> None:
    """In evaluation, random modules included."""
    cases = [CASES[name].case(seed) for seed in range(2)]
    learners = [learner_for("bp", case).eval() for case in cases]
    params = [{n: p.detach() for n, p in each.named_parameters()} for each in learners]
    stacked = {n: torch.stack([p[n] for p in params]) for n in params[0]}
    x = torch.stack([case.x for case in cases])
    together = torch.vmap(learners[0].predict, in_dims=(0, None, 0))(stacked, {}, x)
    for s, case in enumerate(cases):
        assert_same(together[s], case.model(case.x.clone()).detach())
        with torch.no_grad():
            update = torch.vmap(learners[0].update, in_dims=(0, None, 0, None, None))(stacked, {}, x, case.labels, {})
            alone = learners[s].update(params[s], {}, case.x, case.labels, {})
        assert_all_same({n: g[s] for n, g in update.grads.items()}, alone.grads)


@pytest.mark.parametrize("rule", ["dll", "dll:kolen-pollack"])
def test_stacked_seeds_equal_separate_ones_with_iterated_errors(rule: str) -> None:
    cases = [CASES["cnn"].case(seed) for seed in range(2)]
    learners = [learner_for(rule, case, sweeps=3, eta_x=0.7) for case in cases]
    params = [{n: p.detach() for n, p in each.named_parameters()} for each in learners]
    stacked = {n: torch.stack([p[n] for p in params]) for n in params[0]}
    x, y = torch.stack([c.x for c in cases]), torch.stack([c.labels for c in cases])
    with torch.no_grad():
        together = torch.vmap(learners[0].update, in_dims=(0, None, 0, 0, None))(stacked, {}, x, y, {})
        for s, case in enumerate(cases):
            alone = learners[s].update(params[s], {}, case.x, case.labels, {})
            assert_all_same({n: g[s] for n, g in together.grads.items()}, alone.grads)


# Names.


def test_the_rules_are_listed_by_name_with_their_variants() -> None:
    for name in ("readout", "bp", "fa", "dfa", "sign", "dll"):
        assert name == apical.RULES[name].NAME
        assert name in apical.rule_names()
    assert {n for n in apical.rule_names() if n.startswith("dll")} == {
        "dll",
        "dll:released",
        "dll:frozen",
        "dll:kolen-pollack",
    }


@every_rule
def test_a_learners_name_makes_the_same_kind_again(rule: str) -> None:
    learner = learner_for(rule, CASES["mlp"].case())
    assert learner.name == rule
    again = learner_for(learner.name, CASES["mlp"].case())
    assert type(again) is type(learner)
    assert again.name == rule
    assert type(learner) is apical.RULES[rule.split(":")[0]]


@pytest.mark.parametrize("variant", ["paper", "released", "frozen", "kolen-pollack"])
def test_a_variant_in_the_name_and_as_an_option_mean_the_same(variant: str) -> None:
    rule, options = resolve(f"dll:{variant}")
    assert rule is apical.DLL
    assert options == {"theta": variant}
    by_name = learner_for(f"dll:{variant}", CASES["mlp"].case())
    by_option = learner_for("dll", CASES["mlp"].case(), theta=variant)
    by_class = apical.DLL(CASES["mlp"].case().model, theta=variant)
    both = learner_for(f"dll:{variant}", CASES["mlp"].case(), theta=variant)
    assert by_name.name == by_option.name == by_class.name == both.name
    assert by_name.theta_rate == by_option.theta_rate
    assert by_name.decay == by_option.decay


def test_a_rules_options_are_its_own() -> None:
    assert options_of(apical.Backpropagation) == {}
    assert options_of(apical.FeedbackAlignment) == {"std": None}
    assert set(options_of(apical.DLL)) == {"theta", "theta_std", "theta_rate", "decay", "eta_x", "sweeps"}


def test_options_may_be_plain_arguments_too() -> None:
    class Gained(apical.Backpropagation):
        def __init__(self, model: nn.Sequential, gain: float = 1.0, **common: object) -> None:
            super().__init__(model, **common)

    assert options_of(Gained) == {"gain": 1.0}


# A rule of one's own.


@pytest.fixture
def registry() -> Iterator[dict[str, type[apical.Learner]]]:
    before = dict(apical.RULES)
    yield apical.RULES
    apical.RULES.clear()
    apical.RULES.update(before)


def _delta_rule() -> type[apical.Learner]:
    class Delta(apical.Learner):
        """W₀ descends the loss by hand; a buffer counts the updates."""

        NAME = "delta"

        def __init__(self, *args: object, gain: float = 1.0, **common: object) -> None:
            super().__init__(*args, **common)
            self.gain = gain
            self.register_buffer("count", torch.zeros(()))

        def update(self, params: Params, state: Params, x: Tensor, y: Tensor, noise: Noise) -> apical.Update:
            (layer,) = self.network.layers
            trace = self.network.forward(params, x, noise)
            losses, xi = self.loss.error(trace.output, y)
            grad = layer.synapse.outer(trace.inputs[0], xi, scale=-self.gain)
            return apical.Update({layer.weight: grad}, {"count": state["count"] + 1}, losses.mean(), trace.output)

    return Delta


def test_a_rule_of_ones_own_is_listed_made_and_trained_like_the_others(
    registry: dict[str, type[apical.Learner]],
) -> None:
    rule = _delta_rule()
    assert registry["delta"] is rule
    assert apical.rule_names()[-1] == "delta"
    model = nn.Sequential(nn.Linear(4, 3, bias=False)).double()
    x, y = torch.randn(6, 4, dtype=torch.float64), torch.randint(0, 3, (6,))
    learner = apical.make("delta", model, gain=2.0)
    assert learner.name == "delta"
    learner.credit(x, y)
    (expected,) = torch.autograd.grad(F.cross_entropy(model(x), y), model[0].weight)
    assert_same(model[0].weight.grad, 2 * expected)
    assert float(learner.count) == 1
    optim = torch.optim.SGD(learner.param_groups(lr=0.5))
    first = learner.step(x, y, optim).loss
    for _ in range(10):
        last = learner.step(x, y, optim).loss
    assert last < first
    assert float(learner.count) == 12
    assert_same(learner(x), model(x))


def test_a_rule_of_ones_own_may_be_defined_again(registry: dict[str, type[apical.Learner]]) -> None:
    """As a notebook's cell does."""
    first, second = _delta_rule(), _delta_rule()
    assert first is not second
    assert registry["delta"] is second


@pytest.mark.parametrize("name", sorted({rule.split(":")[0] for rule in RULES}))
def test_a_rule_of_ones_own_cannot_take_a_built_in_name(name: str, registry: dict[str, type[apical.Learner]]) -> None:
    built_in = registry[name]
    with pytest.raises(apical.ApicalError, match=name):
        type("Mine", (apical.Learner,), {"NAME": name, "__module__": __name__})
    assert registry[name] is built_in


def test_a_rules_name_has_no_colon(registry: dict[str, type[apical.Learner]]) -> None:
    with pytest.raises(apical.ApicalError, match="colon"):
        type("Mine", (apical.Learner,), {"NAME": "my:rule", "__module__": __name__})


def test_what_the_paper_says_of_a_rule_is_not_said_of_one_made_from_it(
    registry: dict[str, type[apical.Learner]],
) -> None:
    own = {"NAME": "mine", "__module__": __name__}
    assert type("Mine", (apical.DLL,), own).CLAIMS is None
    claims = apical.DLL.CLAIMS
    assert claims is not None
    assert type("Mine", (apical.DLL,), {**own, "CLAIMS": claims}).CLAIMS is claims


def test_a_subclass_without_a_name_is_not_listed(registry: dict[str, type[apical.Learner]]) -> None:
    before = dict(registry)
    type("Base", (apical.DLL,), {"__module__": __name__})
    assert registry == before


def test_a_rule_without_an_update_says_so() -> None:
    learner = type("Idle", (apical.Learner,), {"__module__": __name__})(nn.Sequential(nn.Linear(4, 3)))
    with pytest.raises(apical.ApicalError, match=r"Idle.* has no update\(\)"):
        learner.credit(torch.randn(2, 4), torch.tensor([0, 1]))


class Shared(apical.Learner):
    """A tensor as the gradient of both weights, or a buffer as that of one of them."""

    def __init__(self, model: nn.Sequential, *, both: bool = True) -> None:
        super().__init__(model)
        self.both = both
        self.register_buffer("trace", torch.ones(3, 3))

    def update(self, params: Any, state: Any, x: Tensor, y: Tensor, noise: Any) -> apical.Update:
        shared = torch.ones(3, 3) if self.both else state["trace"]
        grads = {"model.0.weight": shared} | ({"model.1.weight": shared} if self.both else {})
        return apical.Update(grads, dict(state), torch.zeros(()), self.network.predict(params, x, noise))


@pytest.mark.parametrize("both", [True, False])
def test_a_gradient_that_is_another_tensor_too_is_added_up_apart(both: bool) -> None:
    learner = Shared(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), both=both)
    for _ in range(2):
        learner.credit(torch.rand(4, 3), torch.tensor([0, 1, 2, 0]))
    grads = gradients(learner)
    assert len(grads) == 1 + both
    assert all((grad == 2).all() for grad in grads.values())
    assert (learner.trace == 1).all()


def test_autograd_still_works_on_the_users_model() -> None:
    case = CASES["mlp"].case()
    learner = learner_for("bp", case)
    grads = credited(learner, case.x, case.labels)
    learner.zero_grad()
    F.cross_entropy(case.model(case.x), case.labels).backward()
    assert_all_same(gradients(learner), grads)
    assert_all_same(grads, autograd(case.model, F.cross_entropy(case.model(case.x), case.labels)))
