"""The feedback family in recurrent networks: against autograd through nn.RNN, and worked out step by step."""

import copy
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import apical
from reference import PerExample, assert_all_same, assert_same, credited, of_model, random_like, set_feedback
from sequences import DLL, LOSSES, Sequences, any_sequences, bptt, mean_loss, plain, sequences

losses = st.sampled_from(LOSSES)


def targets(case: Sequences, labels: bool) -> Tensor:
    return case.labels if labels else case.values


@given(case=any_sequences(), chosen=losses)
def test_bp_equals_autograd_through_torchs_rnn(
    case: Sequences, chosen: tuple[dict[str, object], PerExample, bool]
) -> None:
    options, loss, labels = chosen
    learner = apical.make("bp", case.model, **options)
    credit = learner.credit(case.x, targets(case, labels))
    assert_same(credit.loss, mean_loss(case, loss, labels))
    assert_same(credit.output, plain(case))
    assert_same(learner(case.x), plain(case))
    assert_all_same(credited(learner, case.x, targets(case, labels)), bptt(case, loss, labels))


@pytest.mark.parametrize("rule", ["fa", *DLL])
@given(case=any_sequences(), chosen=losses)
def test_feedback_that_equals_the_weights_gives_backpropagation_through_time(
    rule: str, case: Sequences, chosen: tuple[dict[str, object], PerExample, bool]
) -> None:
    options, loss, labels = chosen
    learner = apical.make(rule, case.model, **options)
    set_feedback(learner, learner.forward_weights[1:])
    assert_all_same(of_model(credited(learner, case.x, targets(case, labels))), bptt(case, loss, labels))


@given(case=any_sequences())
def test_a_frozen_theta_is_feedback_alignment(case: Sequences) -> None:
    frozen, aligned = (apical.make(rule, copy.deepcopy(case.model)) for rule in ("dll:frozen", "fa"))
    weights = random_like(frozen.forward_weights)[1:]
    for learner in (frozen, aligned):
        set_feedback(learner, weights)
    assert_all_same(credited(frozen, case.x, case.labels), credited(aligned, case.x, case.labels))


@given(case=any_sequences())
def test_sign_symmetry_is_feedback_alignment_by_the_signs_of_the_weights(case: Sequences) -> None:
    sign, aligned = (apical.make(rule, copy.deepcopy(case.model)) for rule in ("sign", "fa"))
    set_feedback(aligned, [w.abs().mean() * w.sign() for w in aligned.forward_weights[1:]])
    assert_all_same(credited(sign, case.x, case.labels), credited(aligned, case.x, case.labels))


@given(case=any_sequences(), chosen=losses)
def test_the_control_trains_the_readout_alone_as_backpropagation_would(
    case: Sequences, chosen: tuple[dict[str, object], PerExample, bool]
) -> None:
    options, loss, labels = chosen
    whole = bptt(case, loss, labels)
    found = credited(apical.make("readout", case.model, **options), case.x, targets(case, labels))
    assert_all_same(found, {name: value for name, value in whole.items() if "readout" in name})


def three_moments(learner: apical.Learner, case: Sequences) -> dict[str, Tensor]:
    """The paper's appendix, term by term: what sequences of three time steps change, as gradients −Δ."""
    p = {name.removeprefix("model."): value.detach() for name, value in learner.params().items()}
    w_x, w_h, w_y = p["rnn.weight_ih_l0"], p["rnn.weight_hh_l0"], p["readout.weight"]
    theta_h, theta_y = p["feedback.1"], p["feedback.2"]
    bias, n = p["rnn.bias_ih_l0"] + p["rnn.bias_hh_l0"], case.count
    sums = {name: torch.zeros_like(value) for name, value in p.items()}
    for x, labels in zip(case.hot, case.labels, strict=True):
        h1 = torch.tanh(w_x @ x[0] + bias)
        h2 = torch.tanh(w_x @ x[1] + w_h @ h1 + bias)
        h3 = torch.tanh(w_x @ x[2] + w_h @ h2 + bias)
        hot = torch.eye(len(w_y), dtype=torch.float64)[labels]
        y1, y2, y3 = (hot[i] - torch.softmax(w_y @ h + p["readout.bias"], 0) for i, h in enumerate((h1, h2, h3)))
        xi3 = theta_y.T @ y3
        delta3 = xi3 * (1 - h3**2)
        xi2 = theta_y.T @ y2 + theta_h.T @ delta3
        delta2 = xi2 * (1 - h2**2)
        xi1 = theta_y.T @ y1 + theta_h.T @ delta2
        delta1 = xi1 * (1 - h1**2)
        sums["readout.weight"] += y1.outer(h1) + y2.outer(h2) + y3.outer(h3)
        sums["readout.bias"] += y1 + y2 + y3
        sums["rnn.weight_hh_l0"] += delta2.outer(h1) + delta3.outer(h2)
        sums["rnn.weight_ih_l0"] += delta1.outer(x[0]) + delta2.outer(x[1]) + delta3.outer(x[2])
        sums["rnn.bias_ih_l0"] += delta1 + delta2 + delta3
        sums["rnn.bias_hh_l0"] += delta1 + delta2 + delta3
        sums["feedback.1"] -= delta2.outer(xi1) + delta3.outer(xi2)
        sums["feedback.2"] -= y1.outer(xi1) + y2.outer(xi2) + y3.outer(xi3)
    return {name if name[0] == "f" else f"model.{name}": -value / n for name, value in sums.items()}


@pytest.mark.parametrize("indices", [False, True])
@pytest.mark.parametrize("rule", DLL)
def test_three_time_steps_of_dll_equal_the_papers_sums_term_by_term(rule: str, indices: bool) -> None:
    case = sequences(time=3, indices=indices)
    learner = apical.make(rule, case.model)
    set_feedback(learner, random_like(learner.forward_weights)[1:])
    expected = three_moments(learner, case)
    if rule == "dll:released":
        expected |= {name: -expected[name] for name in ("feedback.1", "feedback.2")}
    elif rule == "dll:kolen-pollack":
        expected["feedback.1"] = expected["model.rnn.weight_hh_l0"]
        expected["feedback.2"] = expected["model.readout.weight"]
    elif rule == "dll:frozen":
        expected = of_model(expected)
    assert_all_same(credited(learner, case.x, case.labels), expected)


@given(case=any_sequences())
def test_the_papers_theta_descends_the_mean_square_of_the_errors_with_what_comes_down_held(case: Sequences) -> None:
    learner = apical.make("dll", case.model)
    theta = [t.detach().clone().requires_grad_() for t in learner.feedback_weights[1:]]
    states = case.model.rnn(case.hot)[0].detach().requires_grad_()
    output = case.model.readout(states)
    hot = torch.eye(output.shape[2], dtype=torch.float64)[case.labels]
    arrives = (hot - output.softmax(2)).detach()
    squares, after = torch.zeros((), dtype=torch.float64), None
    for t in reversed(range(case.x.shape[1])):
        xi = arrives[:, t] @ theta[1]
        if after is not None:
            xi = xi + after @ theta[0]
        squares = squares + xi.square().sum() / 2
        after = (xi * (1 - states[:, t] ** 2)).detach()
    grads = torch.autograd.grad(squares / case.count, theta, allow_unused=True)
    got = credited(learner, case.x, case.labels)
    for i, expected in enumerate(grads, start=1):
        assert_same(got[f"feedback.{i}"], torch.zeros_like(theta[i - 1]) if expected is None else expected, what=str(i))


@given(case=any_sequences(), extra=st.integers(0, 2))
def test_relaxed_errors_are_the_closed_form_after_a_sweep_for_each_time_step(case: Sequences, extra: int) -> None:
    closed = apical.make("dll", case.model)
    relaxed = apical.make("dll", case.model, sweeps=case.x.shape[1] + extra)
    set_feedback(relaxed, closed.feedback_weights[1:])
    assert_all_same(credited(relaxed, case.x, case.labels), credited(closed, case.x, case.labels))


@pytest.mark.parametrize("eta", [0.4, 1.6])
def test_relaxed_errors_settle_at_the_closed_form_for_other_steps(eta: float) -> None:
    case = sequences()
    closed, relaxed = apical.make("dll", case.model), apical.make("dll", case.model, sweeps=200, eta_x=eta)
    set_feedback(relaxed, closed.feedback_weights[1:])
    assert_all_same(credited(relaxed, case.x, case.labels), credited(closed, case.x, case.labels))


def test_one_relaxing_sweep_goes_the_share_eta_of_the_way() -> None:
    case = sequences()
    whole = apical.make("dll:frozen", case.model, sweeps=1)
    part = apical.make("dll:frozen", case.model, sweeps=1, eta_x=0.3)
    set_feedback(part, whole.feedback_weights[1:])
    expected = {name: g if "readout" in name else 0.3 * g for name, g in credited(whole, case.x, case.labels).items()}
    assert_all_same(credited(part, case.x, case.labels), expected)


def cut(case: Sequences, reach: int) -> dict[str, Tensor]:
    """Backpropagation in which each state hears of its own loss and the `reach` − 1 next ones alone, by autograd."""
    rnn, readout, total = case.model.rnn, case.model.readout, torch.zeros((), dtype=torch.float64)
    frozen = copy.deepcopy(rnn).requires_grad_(False)
    states = rnn(case.hot)[0].detach()
    loss = torch.nn.functional.cross_entropy
    for t in range(case.x.shape[1]):
        total = total + loss(readout(states[:, t]), case.labels[:, t], reduction="sum")
        before = None if t == 0 else states[None, :, t - 1]
        _, h = rnn(case.hot[:, t : t + 1], before)
        own = copy.deepcopy(readout).requires_grad_(False)
        for s in range(t, min(t + reach, case.x.shape[1])):
            if s > t:
                _, h = frozen(case.hot[:, s : s + 1], h)
            total = total + loss(own(h[0]), case.labels[:, s], reduction="sum")
    names, params = zip(*case.model.named_parameters(), strict=True)
    grads = torch.autograd.grad(total / case.count, params)
    return {f"model.{n}": g for n, g in zip(names, grads, strict=True)}


@pytest.mark.parametrize("reach", [1, 2, 4])
def test_fewer_sweeps_cut_backpropagation_through_time_short(reach: int) -> None:
    case = sequences()
    expected = cut(case, reach)
    dll = apical.make("dll", case.model, sweeps=reach)
    set_feedback(dll, dll.forward_weights[1:])
    assert_all_same(of_model(credited(dll, case.x, case.labels)), expected)
    fixed = apical.make("pc:fixed", case.model, sweeps=reach)
    assert_all_same(credited(fixed, case.x, case.labels), expected)


def test_kolen_pollack_brings_theta_to_w_at_the_rate_of_the_decay() -> None:
    case, rate, decay = sequences(), 0.3, 0.25
    learner = apical.make("dll:kolen-pollack", case.model, decay=decay)
    optim = torch.optim.SGD(learner.param_groups(lr=rate))
    pairs = list(zip(learner.feedback_weights[1:], learner.forward_weights[1:], strict=True))
    for _ in range(3):
        before = [(theta - w).detach() for theta, w in pairs]
        learner.step(case.x, case.labels, optim)
        for (theta, w), gap in zip(pairs, before, strict=True):
            assert_same((theta - w).detach(), gap * (1 - rate * decay))
    assert {g["name"]: g["weight_decay"] for g in learner.param_groups(lr=1.0)} == {
        "W": 0.0,
        "W mirrored": decay,
        "bias": 0.0,
        "theta": decay,
    }


def test_theta_is_narrow_in_a_recurrent_network_unless_its_spread_is_given() -> None:
    case = sequences(sizes=(3, 60, 40))
    for options, spread in (({}, 0.05), ({"theta_std": 0.7}, 0.7)):
        for theta in apical.make("dll", case.model, **options).feedback_weights[1:]:
            assert float(theta.detach().std()) == pytest.approx(spread, rel=0.05)
    b_h, b_y = apical.make("fa", case.model).feedback_weights[1:]
    assert float(b_h.std()) == pytest.approx(60**-0.5, rel=0.05)
    assert float(b_y.std()) == pytest.approx(40**-0.5, rel=0.05)


def test_theta_has_its_own_rate() -> None:
    case = sequences()
    groups = apical.make("dll", case.model, theta_rate=0.2).param_groups(lr=0.5)
    assert [(g["name"], g["lr"], len(g["params"])) for g in groups] == [
        ("W", 0.5, 3),
        ("bias", 0.5, 3),
        ("theta", 0.1, 2),
    ]


ONLY: dict[str, Callable[[str], bool]] = {
    "the readout": lambda name: "readout" in name,
    "the recurrent weights": lambda name: name.endswith("weight_hh_l0"),
    "the input weights": lambda name: name.endswith("weight_ih_l0"),
    "a bias of the states": lambda name: name.endswith("bias_hh_l0"),
    "theta of the states": lambda name: name == "feedback.1",
    "theta of the readout": lambda name: name == "feedback.2",
}


@pytest.mark.parametrize(
    ("rule", "what"), [(rule, what) for rule in ("bp", "dll") for what in ONLY if rule == "dll" or "theta" not in what]
)
def test_what_alone_learns_learns_as_it_does_among_others(rule: str, what: str) -> None:
    case = sequences()
    learner = apical.make(rule, case.model)
    everything = credited(learner, case.x, case.labels)
    wanted = {name: g for name, g in everything.items() if ONLY[what](name)}
    assert wanted
    for name, p in learner.named_parameters():
        p.requires_grad_(name in wanted)
    assert_all_same(credited(learner, case.x, case.labels), wanted)
