"""Each rule against the law that proves it (design.md), over random networks, in float64.

The other side of every equation is autograd (`reference.py`), never another part of apical.
"""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor, nn

import apical
from cases import CASES, LEARNED, RULES, learner_for
from reference import (
    assert_all_same,
    assert_same,
    autograd,
    credited,
    cross_entropy,
    feedback_pass,
    of_model,
    plain,
    random_like,
    set_feedback,
)
from strategies import Case, conv_networks, dense_networks, hidden_networks, networks

pytestmark = pytest.mark.no_cover  # other tests run these lines, too, and coverage doubles the time

smoothings = st.sampled_from([0.0, 0.1, 0.5])


# Backpropagation is autograd.


@given(case=networks(), smoothing=smoothings)
def test_bp_equals_autograd_of_cross_entropy(case: Case, smoothing: float) -> None:
    learner = learner_for("bp", case, label_smoothing=smoothing)
    credit = learner.credit(case.x, case.labels)
    output = case.model(case.x)
    loss = F.cross_entropy(output, case.labels, label_smoothing=smoothing)
    assert_same(credit.loss, loss)
    assert_same(credit.output, output)
    assert_all_same(credited(learner, case.x, case.labels), autograd(case.model, loss))


@given(case=networks(torch.float32), smoothing=smoothings)
def test_bp_equals_autograd_in_float32(case: Case, smoothing: float) -> None:
    grads = credited(learner_for("bp", case, label_smoothing=smoothing), case.x, case.labels)
    assert all(g.dtype == torch.float32 for g in grads.values())
    loss = F.cross_entropy(case.model(case.x), case.labels, label_smoothing=smoothing)
    assert_all_same(grads, autograd(case.model, loss))


@given(case=networks())
def test_bp_equals_autograd_of_cross_entropy_with_class_probabilities(case: Case) -> None:
    with torch.no_grad():
        y = torch.rand_like(case.model(case.x)).softmax(1)
    loss = F.cross_entropy(case.model(case.x), y)
    assert_all_same(credited(learner_for("bp", case), case.x, y), autograd(case.model, loss))


@given(case=networks(), smoothing=smoothings)
def test_bp_equals_autograd_of_half_the_squared_error_from_one_hot_labels(case: Case, smoothing: float) -> None:
    learner = learner_for("bp", case, loss="mse", label_smoothing=smoothing)
    output = case.model(case.x)
    target = F.one_hot(case.labels, output.shape[1]).to(output.dtype)
    target = (1 - smoothing) * target + smoothing / output.shape[1]
    loss = (output - target).square().sum() / (2 * len(case.x))
    assert_same(learner.credit(case.x, case.labels).loss, loss)
    assert_all_same(credited(learner, case.x, case.labels), autograd(case.model, loss))


@given(case=networks())
def test_bp_equals_autograd_of_half_the_squared_error_to_values(case: Case) -> None:
    output = case.model(case.x)
    target = torch.randn_like(output)
    loss = (output - target).square().sum() / (2 * len(case.x))
    learner = learner_for("bp", case, loss="mse")
    assert_all_same(credited(learner, case.x, target), autograd(case.model, loss))


@given(case=networks())
def test_bp_equals_autograd_of_a_users_own_loss(case: Case) -> None:
    def mine(output: Tensor, y: Tensor) -> Tensor:
        return (output * torch.arange(1, output.shape[1] + 1)).sin().mean(1) * (1 + y)

    learner = learner_for("bp", case, loss=mine)
    loss = mine(case.model(case.x), case.labels).mean()
    assert_same(learner.credit(case.x, case.labels).loss, loss)
    assert_all_same(credited(learner, case.x, case.labels), autograd(case.model, loss))


@pytest.mark.parametrize("loss", ["cross_entropy", "mse"])
def test_bp_equals_autograd_where_the_output_has_positions(loss: str) -> None:
    """A fully convolutional network: the cross-entropy is the mean over positions too, ½Σ sums over them."""
    model = nn.Sequential(nn.Conv1d(2, 4, 3), nn.Tanh(), nn.Conv1d(4, 3, 2)).double()
    x, y = torch.randn(5, 2, 9, dtype=torch.float64), torch.randint(0, 3, (5, 6))
    output = model(x)
    hot = F.one_hot(y, 3).movedim(-1, 1)
    expected = F.cross_entropy(output, y) if loss == "cross_entropy" else (output - hot).square().sum() / 10
    learner = apical.make("bp", model, loss=loss)
    assert_same(learner.credit(x, y).loss, expected)
    assert_all_same(credited(learner, x, y), autograd(model, expected))


# Feedback alignment and its relatives.


@given(case=networks(), smoothing=smoothings)
def test_fa_with_b_equal_to_w_is_bp(case: Case, smoothing: float) -> None:
    learner = learner_for("fa", case, label_smoothing=smoothing)
    set_feedback(learner, learner.forward_weights[1:])
    loss = F.cross_entropy(case.model(case.x), case.labels, label_smoothing=smoothing)
    assert_all_same(credited(learner, case.x, case.labels), autograd(case.model, loss))


@given(case=hidden_networks())
def test_fa_takes_errors_down_through_b(case: Case) -> None:
    learner = learner_for("fa", case)
    b = random_like(learner.forward_weights)
    set_feedback(learner, b[1:])
    expected = feedback_pass(case.model, case.x, case.labels, cross_entropy(), b)
    assert_all_same(credited(learner, case.x, case.labels), expected.grads)


@given(case=hidden_networks())
def test_sign_equals_fa_with_b_the_signs_of_w_times_its_mean_size(case: Case) -> None:
    learner = learner_for("sign", case)
    b = [w.detach().sign() * w.detach().abs().mean() for w in learner.forward_weights]
    for shown, expected in zip(learner.feedback_weights[1:], b[1:], strict=True):
        assert_same(shown, expected)
    expected = feedback_pass(case.model, case.x, case.labels, cross_entropy(), b)
    assert_all_same(credited(learner, case.x, case.labels), expected.grads)
    fa = learner_for("fa", case)
    set_feedback(fa, b[1:])
    assert_all_same(credited(learner, case.x, case.labels), credited(fa, case.x, case.labels))


AGREEING: dict[str, Callable[[], tuple[nn.Module, nn.Parameter, Tensor, Tensor]]] = {
    "mlp": lambda: agreeing(nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 7)), (9, 6), (9,)),
    "cnn": lambda: agreeing(nn.Sequential(nn.Conv1d(2, 5, 3), nn.Tanh(), nn.Conv1d(5, 7, 1)), (9, 2, 8), (9, 6)),
    "groups": lambda: agreeing(nn.Sequential(nn.Conv1d(2, 4, 3), nn.Conv1d(4, 6, 1, groups=2)), (9, 2, 8), (9, 6)),
    "positions": lambda: agreeing(nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 7)), (9, 3, 6), (9, 7)),
    "rnn": lambda: agreeing(apical.Elman(nn.RNN(6, 5, batch_first=True), nn.Linear(5, 7)), (9, 1, 6), (9, 1)),
}


def agreeing(
    model: Any, shape: tuple[int, ...], labels: tuple[int, ...]
) -> tuple[nn.Module, nn.Parameter, Tensor, Tensor]:
    """A model in which the first hidden unit's signs towards all outputs agree, and the weights into that unit."""
    last, first = (
        (model.readout, model.rnn.weight_ih_l0) if isinstance(model, apical.Elman) else (model[-1], model[0].weight)
    )
    last.weight.detach()[:, 0].abs_()
    return model, first, torch.randn(shape), torch.randint(0, 3, labels)


@pytest.mark.parametrize("name", AGREEING)
@pytest.mark.parametrize("loss", ["cross_entropy", "mse"])
def test_under_sign_a_unit_whose_signs_agree_learns_only_from_errors_that_do_not_sum_to_zero(
    loss: str, name: str
) -> None:
    """Exactly zero for a softmax over the units of the last layer, which groups and positions after the units are not."""
    torch.manual_seed(0)
    model, weight, x, y = AGREEING[name]()
    targets = y if loss == "cross_entropy" else torch.randn_like(model(x))
    learner = apical.make("sign", model, loss=loss)
    learner.credit(x, targets)
    is_zero = loss == "cross_entropy" and name not in ("groups", "positions")
    assert (weight.grad[0] == 0).all() == is_zero
    assert (weight.grad[1:] != 0).any()


def test_under_sign_and_adam_stacked_seeds_equal_separate_ones() -> None:
    """Adam divides a gradient by its size. Rounding noise in place of a zero would become steps of the whole rate."""
    x = torch.randn(200, 10)
    y = (x[:, 0] > 0).long()

    def build() -> nn.Sequential:
        return nn.Sequential(nn.Linear(10, 16), nn.Tanh(), nn.Linear(16, 3))

    run = partial(apical.fit, build, (x, y, x, y), rule="sign", epochs=5, lr=0.01, batch_size=20, progress=False)
    stacked, alone = run(seeds=3, stack=True), run(seeds=3, stack=False)
    for one, other in zip(stacked.learners, alone.learners, strict=True):
        assert_all_same(dict(one.named_parameters()), dict(other.named_parameters()), 1e-5)


def test_sign_follows_w_as_it_changes() -> None:
    case = CASES["mlp"].case()
    learner = learner_for("sign", case)
    with torch.no_grad():
        case.model[5].weight.mul_(-3)
    w = case.model[5].weight.detach()
    assert_same(learner.feedback_weights[2], w.sign() * w.abs().mean())


@given(case=dense_networks(min_layers=2, max_layers=2))
def test_dfa_equals_fa_with_the_same_b_for_one_dense_hidden_layer(case: Case) -> None:
    dfa, fa = learner_for("dfa", case), learner_for("fa", case)
    set_feedback(dfa, fa.feedback_weights[1:])
    assert_all_same(credited(dfa, case.x, case.labels), credited(fa, case.x, case.labels))


def _conv_then_dense() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(2, 3, 3, stride=2), nn.Tanh(), nn.MaxPool2d(2, 1), nn.Flatten(), nn.Linear(12, 4), nn.SELU()
    )


def _conv_then_conv() -> nn.Sequential:
    """The last convolution sees its whole input at once: B as (outputs, values) is B as a kernel, flattened."""
    return nn.Sequential(nn.Conv2d(2, 3, 3, stride=2), nn.Softsign(), nn.Conv2d(3, 4, 3), nn.Flatten())


@pytest.mark.parametrize("build", [_conv_then_dense, _conv_then_conv])
def test_dfa_equals_fa_with_the_same_b_for_one_convolutional_hidden_layer(build: Callable[[], nn.Sequential]) -> None:
    model = build().double()
    x, y = torch.randn(5, 2, 8, 7, dtype=torch.float64), torch.randint(0, 4, (5,))
    fa = apical.make("fa", model)
    dfa = apical.make("dfa", model, input_shape=(2, 8, 7))
    same = fa.feedback_weights[1].reshape(4, -1)
    assert dfa.feedback_weights[1].shape == same.shape
    set_feedback(dfa, [same])
    assert_all_same(credited(dfa, x, y), credited(fa, x, y))


def _pooled_end() -> Case:
    """The last φ changes the number of values: 3 × 5 × 4 drives become 3 outputs."""
    model = nn.Sequential(nn.Conv2d(2, 4, 2), nn.Tanh(), nn.Conv2d(4, 3, 2), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    return Case(model.double(), torch.randn(5, 2, 7, 6, dtype=torch.float64), torch.tensor([0, 1, 2, 1, 0]))


def _gated_end() -> Case:
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3), nn.ReLU(), nn.Linear(3, 6), nn.GLU(1))
    return Case(model.double(), torch.randn(5, 4, dtype=torch.float64), torch.tensor([0, 1, 2, 1, 0]))


@example(case=_pooled_end())
@example(case=_gated_end())
@given(case=hidden_networks())
def test_dfa_brings_the_error_before_the_last_phi_to_every_layer_at_once(case: Case) -> None:
    learner = learner_for("dfa", case)
    free = feedback_pass(case.model, case.x, case.labels, cross_entropy(), list(learner.forward_weights))
    outputs = free.delta[-1][0].numel()
    b = [torch.randn(outputs, u[0].numel(), dtype=torch.float64) for u in free.u]
    for shown, expected in zip(learner.feedback_weights[1:], b[1:], strict=True):
        assert shown.shape == expected.shape
    set_feedback(learner, b[1:])
    expected = feedback_pass(case.model, case.x, case.labels, cross_entropy(), b, direct=True)
    assert_all_same(credited(learner, case.x, case.labels), expected.grads)


@given(case=networks())
def test_readout_trains_the_last_layer_as_bp_and_nothing_else(case: Case) -> None:
    model = plain(case.model)
    learner = learner_for("readout", case)
    loss = F.cross_entropy(model(case.x), case.labels)
    last = learner.network.layers[-1]
    expected = {n: g for n, g in autograd(model, loss).items() if n in (last.weight, last.bias)}
    assert_all_same(credited(learner, case.x, case.labels), expected)
    assert learner.feedback_weights == [None] * len(learner.network)


# What holds for every rule.


@pytest.mark.parametrize("rule", RULES)
@given(case=conv_networks() | dense_networks())
def test_the_last_layer_learns_as_in_bp_under_every_rule(rule: str, case: Case) -> None:
    model = plain(case.model)
    expected = autograd(model, F.cross_entropy(model(case.x), case.labels))
    learner = learner_for(rule, case)
    grads = credited(learner, case.x, case.labels)
    last = learner.network.layers[-1]
    for name in filter(None, (last.weight, last.bias)):
        assert_same(grads[name], expected[name])


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", ["mlp", "deep", "cnn", "positions"])
def test_no_gradient_shrinks_or_grows_with_the_batch(rule: str, name: str) -> None:
    """Every update is a mean over examples, Θ's too: seeing the batch three times over changes nothing."""
    case = CASES[name].case()
    learner = learner_for(rule, case)
    once = credited(learner, case.x, case.labels)
    thrice = credited(learner, case.x.repeat(3, *[1] * (case.x.ndim - 1)), case.labels.repeat(3))
    assert_all_same(thrice, once)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", ["mlp", "cnn"])
def test_every_gradient_is_the_mean_of_the_examples_own(rule: str, name: str) -> None:
    case = CASES[name].case()
    learner = learner_for(rule, case)
    whole = credited(learner, case.x, case.labels)
    each = [credited(learner, x[None], y[None]) for x, y in zip(case.x, case.labels, strict=True)]
    mean = {n: torch.stack([grads[n] for grads in each]).mean(0) for n in whole}
    assert_all_same(whole, mean)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", ["mlp", "cnn", "positions"])
def test_float32_agrees_with_float64(rule: str, name: str) -> None:
    case = CASES[name].case()
    exact_learner = learner_for(rule, case)
    exact = credited(exact_learner, case.x, case.labels)
    learner = copy.deepcopy(exact_learner).to(torch.float32)
    grads = credited(learner, case.x.float(), case.labels)
    assert all(g.dtype == torch.float32 for g in grads.values())
    assert_all_same({n: g.double() for n, g in grads.items()}, exact, tolerance=1e-4)


@pytest.mark.parametrize("rule", RULES)
def test_without_hidden_layers_every_rule_is_bp(rule: str) -> None:
    model = nn.Sequential(nn.Linear(4, 3)).double()
    x, y = torch.randn(6, 4, dtype=torch.float64), torch.randint(0, 3, (6,))
    learner = apical.make(rule, model)
    assert learner.feedback_weights == [None]
    assert_all_same(credited(learner, x, y), autograd(model, F.cross_entropy(model(x), y)))


@pytest.mark.parametrize("rule", RULES)
@given(case=hidden_networks())
def test_only_learned_feedback_gets_a_gradient(rule: str, case: Case) -> None:
    learner = learner_for(rule, case)
    grads = credited(learner, case.x, case.labels)
    theirs = set(grads) - set(of_model(grads))
    expected = len(learner.network) - 1 if rule in LEARNED else 0
    assert len(theirs) == expected


@pytest.mark.parametrize(
    ("rule", "options", "dense", "conv"),
    [
        ("fa", {}, 400**-0.5, (200 * 9) ** -0.5),  # 1/√fan-out: an error keeps its size on the way down
        ("fa", {"std": 0.3}, 0.3, 0.3),
        ("dll", {}, 1.0, 0.05),
        ("dll:released", {}, 1.0, 0.05),
        ("dll:frozen", {}, 1.0, 0.05),
        ("dll:kolen-pollack", {}, 0.05, 0.05),
        ("dll", {"theta_std": 0.2}, 0.2, 0.2),
    ],
)
def test_feedback_weights_have_the_spread_that_the_rule_says(
    rule: str, options: dict[str, float], dense: float, conv: float
) -> None:
    wide = nn.Sequential(nn.Linear(5, 200), nn.Tanh(), nn.Linear(200, 400))
    deep = nn.Sequential(nn.Conv2d(1, 20, 3), nn.Tanh(), nn.Conv2d(20, 200, 3))
    for model, std in ((wide, dense), (deep, conv)):
        b = apical.make(rule, model, **options).feedback_weights[1].detach()
        assert abs(float(b.std()) / std - 1) < 0.03
        assert abs(float(b.mean())) < 0.03 * std


@pytest.mark.parametrize(("options", "std"), [({}, 400**-0.5), ({"std": 0.3}, 0.3)])
def test_dfas_b_has_the_spread_that_the_rule_says(options: dict[str, float], std: float) -> None:
    model = nn.Sequential(nn.Linear(5, 200), nn.Tanh(), nn.Linear(200, 50), nn.Tanh(), nn.Linear(50, 400))
    for b in apical.make("dfa", model, **options).feedback_weights[1:]:
        assert abs(float(b.std()) / std - 1) < 0.03


@pytest.mark.parametrize("rule", RULES)
def test_a_seed_means_the_same_in_every_precision(rule: str) -> None:
    case = CASES["cnn"].case(dtype=torch.float32)
    torch.manual_seed(3)
    single = learner_for(rule, case).feedback_weights
    torch.manual_seed(3)
    double = learner_for(rule, Case(case.model.double(), case.x.double(), case.labels)).feedback_weights
    for a, b in zip(single, double, strict=True):
        if a is not None:
            assert_same(a.double(), b, tolerance=1e-6)
