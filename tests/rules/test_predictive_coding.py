"""Predictive coding against its energy: F written with the user's own modules and differentiated by autograd."""

import copy
import math
from collections.abc import Callable, Iterator
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.func import functional_call

import apical
from apical.errors import ApicalError
from cases import CASES, learner_for
from reference import PerExample, assert_all_same, assert_same, autograd, credited, cross_entropy, leaves
from strategies import Case, hidden_networks, networks

Params = dict[str, Tensor]


def half_squared(output: Tensor, y: Tensor) -> Tensor:
    hot = F.one_hot(y, output.shape[1]).to(output.dtype)
    return (output - hot).square().flatten(1).sum(1) / 2


def wavy(output: Tensor, y: Tensor) -> Tensor:
    return (output + torch.arange(output.shape[1])).sin().mean(1) * (1 + y)


LOSSES: list[tuple[object, PerExample]] = [("cross_entropy", cross_entropy()), ("mse", half_squared), (wavy, wavy)]
losses = st.sampled_from(LOSSES)


class Energy:
    """F of a batch, summed over its examples, as a function of the hidden activities and of the weights."""

    def __init__(self, case: Case, loss: PerExample) -> None:
        self.case, self.loss = case, loss
        self.names = {id(m): name for name, m in case.model.named_modules()}
        self.groups: list[list[nn.Module]] = [[]]
        for module in leaves(case.model):
            if isinstance(module, nn.Linear | nn.Conv1d | nn.Conv2d):
                self.groups.append([])
            self.groups[-1].append(module)

    @property
    def layers(self) -> int:
        return len(self.groups) - 1

    def params(self) -> Params:
        return {name: p.detach().clone() for name, p in self.case.model.named_parameters()}

    def run(self, group: int, a: Tensor, params: Params) -> Tensor:
        a = a.clone()
        for module in self.groups[group]:
            own = {n: params[f"{self.names[id(module)]}.{n}"] for n, _ in module.named_parameters()}
            a = functional_call(module, own, (a,))
        return a

    def forward(self, params: Params) -> list[Tensor]:
        """The hidden activities of the forward pass."""
        a, hidden = self.run(0, self.case.x, params), []
        for i in range(1, self.layers):
            a = self.run(i, a, params)
            hidden.append(a)
        return hidden

    def __call__(self, hidden: list[Tensor], params: Params) -> Tensor:
        below = [self.run(0, self.case.x, params), *hidden]
        predicted = [self.run(i + 1, u, params) for i, u in enumerate(below)]
        errors = [(u - mu).square().sum() / 2 for u, mu in zip(hidden, predicted, strict=False)]
        return sum(errors, self.loss(predicted[-1], self.case.labels).sum())

    def slopes(self, hidden: list[Tensor], params: Params) -> tuple[list[Tensor], Params]:
        """∂F/∂u of every hidden activity, and ∂F/∂W of the batch mean, at one point."""
        u = [h.detach().requires_grad_() for h in hidden]
        w = {n: p.detach().requires_grad_() for n, p in params.items()}
        grads = torch.autograd.grad(self(u, w), [*u, *w.values()], allow_unused=True)
        own = grads[len(u) :]
        count = len(self.case.x)
        return list(grads[: len(u)]), {f"model.{n}": g / count for n, g in zip(w, own, strict=True)}

    def descend(self, rate: float, sweeps: int) -> Iterator[list[Tensor]]:
        """Gradient descent in the activities from the forward pass, the weights held."""
        params = self.params()
        hidden = self.forward(params)
        for _ in range(sweeps):
            yield hidden
            slopes, _ = self.slopes(hidden, params)
            hidden = [u - rate * slope for u, slope in zip(hidden, slopes, strict=True)]
        yield hidden

    def hessian(self) -> tuple[Tensor, Tensor]:
        """∂²F/∂u² of all hidden activities of the batch as one vector, and the solution of ∂F/∂u = 0 if F is
        quadratic."""
        params = self.params()
        start = self.forward(params)
        sizes = [u.numel() for u in start]

        def flat(v: Tensor) -> Tensor:
            parts = v.split(sizes)
            return self([p.view_as(u) for p, u in zip(parts, start, strict=True)], params)

        v = torch.cat([u.flatten() for u in start]).detach().requires_grad_()
        h = torch.autograd.functional.hessian(flat, v)
        (slope,) = torch.autograd.grad(flat(v), v)
        return h, v.detach() - torch.linalg.solve(h, slope)


def settled(learner: apical.Learner, case: Case, sweeps: int) -> list[Tensor]:
    """The rule's own hidden activities after some sweeps."""
    params = learner.params()
    with torch.no_grad():
        start, _ = learner.run_forward(params, case.x, case.labels, {})
        return learner.settle(params, start, case.labels, {}, sweeps).u[1:]


def identity_mlp(phi: Callable[[], nn.Module] = nn.Identity) -> Case:
    torch.manual_seed(3)
    stages: list[nn.Module] = []
    for width in (5, 6, 4):
        stages += [nn.Linear(4 if not stages else stages[-2].out_features, width), phi()]
    model = nn.Sequential(*stages, nn.Linear(4, 3)).double()
    return Case(model, torch.randn(4, 4, dtype=torch.float64), torch.randint(0, 3, (4,)))


def identity_cnn(phi: Callable[[], nn.Module] = nn.Identity) -> Case:
    torch.manual_seed(4)
    model = nn.Sequential(
        nn.Conv2d(1, 2, 3, padding=1, bias=False),
        phi(),
        nn.AvgPool2d(2),
        nn.Conv2d(2, 3, 2, stride=2),
        phi(),
        nn.Flatten(),
        nn.Linear(3, 4),
        phi(),
        nn.Linear(4, 3),
    ).double()
    return Case(model, torch.randn(3, 1, 4, 4, dtype=torch.float64), torch.randint(0, 3, (3,)))


NETS = pytest.mark.parametrize("build", [identity_mlp, identity_cnn])


# Fixed prediction: the errors alone relax.


@given(case=networks(), loss=losses, more=st.integers(0, 2))
def test_fixed_prediction_at_a_unit_step_equals_bp(case: Case, loss: tuple[object, PerExample], more: int) -> None:
    hidden = len(learner_for("pc", case).network) - 1
    expected = autograd(case.model, loss[1](case.model(case.x), case.labels).mean())
    plain = learner_for("pc:fixed", case, loss=loss[0])
    assert_all_same(credited(plain, case.x, case.labels), expected)
    longer = learner_for("pc:fixed", case, loss=loss[0], rate=1.0, sweeps=max(1, hidden) + more)
    assert_all_same(credited(longer, case.x, case.labels), expected)


@pytest.mark.parametrize(("rate", "sweeps"), [(0.3, 3), (0.5, 7), (0.9, 4)])
@NETS
def test_fixed_prediction_has_the_share_of_bp_that_has_come_down(
    build: Callable[..., Case], rate: float, sweeps: int
) -> None:
    """ε_k ← (1−r) ε_k + r Wᵀε_{k−1} is how P(at least k of t) grows in t trials of chance r; k layers from the top."""
    case = build(nn.Tanh)
    learner = learner_for("pc:fixed", case, rate=rate, sweeps=sweeps)
    expected = autograd(case.model, F.cross_entropy(case.model(case.x), case.labels))
    for k, layer in enumerate(reversed(learner.network.layers)):
        share = sum(math.comb(sweeps, j) * rate**j * (1 - rate) ** (sweeps - j) for j in range(k, sweeps + 1))
        for name in filter(None, (layer.weight, layer.bias)):
            expected[name] = expected[name] * share
    assert_all_same(credited(learner, case.x, case.labels), expected)


# Full inference: gradient descent on F.


@given(case=networks(), loss=losses, more=st.integers(0, 3), rate=st.sampled_from([0.02, 0.1, 0.3]))
def test_activities_descend_the_energy_and_w_has_its_slope_where_they_settled(
    case: Case, loss: tuple[object, PerExample], more: int, rate: float
) -> None:
    energy = Energy(case, loss[1])
    sweeps = max(1, energy.layers - 1) + more
    learner = learner_for("pc", case, loss=loss[0], rate=rate, sweeps=sweeps)
    *_, hidden = energy.descend(rate, sweeps)
    for u, expected in zip(settled(learner, case, sweeps), hidden, strict=True):
        assert_same(u, expected.detach())
    assert_all_same(credited(learner, case.x, case.labels), energy.slopes(hidden, energy.params())[1])


@pytest.mark.parametrize("rule", ["pc", "pc:fixed"])
@given(case=networks())
def test_loss_and_output_are_those_of_the_forward_pass(rule: str, case: Case) -> None:
    credit = learner_for(rule, case).credit(case.x, case.labels)
    output = case.model(case.x)
    assert_same(credit.output, output)
    assert_same(credit.loss, F.cross_entropy(output, case.labels))


def energies(energy: Energy, learner: apical.Learner, sweeps: int) -> list[float]:
    params = energy.params()
    return [float(energy(settled(learner, energy.case, t), params)) for t in range(sweeps + 1)]


@NETS
def test_with_identity_phi_and_a_step_below_the_limit_energy_never_rises_and_settles_at_the_linear_solve(
    build: Callable[..., Case],
) -> None:
    energy = Energy(build(), half_squared)
    hessian, solution = energy.hessian()
    curvature = torch.linalg.eigvalsh(hessian)
    norms = [torch.linalg.matrix_norm(m.weight, 2) for m in leaves(energy.case.model) if isinstance(m, nn.Linear)]
    if build is identity_mlp:
        assert float(curvature.max()) <= (1 + float(torch.stack(norms).detach().max())) ** 2
    rate = 0.98 * 2 / float(curvature.max())
    learner = learner_for("pc", energy.case, loss="mse", rate=rate)
    falls = energies(energy, learner, 30)
    assert all(after <= before + 1e-12 for before, after in pairwise(falls))
    assert falls[-1] < falls[0]
    slowest = max(abs(1 - rate * float(c)) for c in (curvature.min(), curvature.max()))
    sweeps = math.ceil(math.log(1e-11) / math.log(slowest))
    flat = torch.cat([u.flatten() for u in settled(learner, energy.case, sweeps)])
    assert_same(flat, solution, tolerance=1e-9)


@NETS
def test_beyond_the_limit_energy_rises(build: Callable[..., Case]) -> None:
    energy = Energy(build(), half_squared)
    rate = 1.05 * 2 / float(torch.linalg.eigvalsh(energy.hessian()[0]).max())
    learner, params = learner_for("pc", energy.case, loss="mse", rate=rate), energy.params()
    before, after = (float(energy(settled(learner, energy.case, t), params)) for t in (0, 200))
    assert after > 10 * before


@pytest.mark.parametrize("loss", LOSSES[:2], ids=["cross_entropy", "mse"])
@NETS
def test_with_tanh_at_a_quarter_of_the_linear_limit_energy_never_rises(
    build: Callable[..., Case], loss: tuple[str, PerExample]
) -> None:
    limit = 2 / float(torch.linalg.eigvalsh(Energy(build(), half_squared).hessian()[0]).max())
    energy = Energy(build(nn.Tanh), loss[1])
    falls = energies(energy, learner_for("pc", energy.case, loss=loss[0], rate=limit / 4), 60)
    assert all(after <= before + 1e-12 for before, after in pairwise(falls))
    assert falls[-1] < falls[0]


class Masked(nn.Module):
    """Dropout with a mask that is given."""

    def __init__(self, uniform: Tensor, p: float) -> None:
        super().__init__()
        self.mask = (uniform >= p).double() / (1 - p)

    def forward(self, a: Tensor) -> Tensor:
        return a * self.mask


@pytest.mark.parametrize("rule", ["pc", "pc:fixed", "ipc"])
def test_dropout_keeps_one_mask_through_all_sweeps(rule: str) -> None:
    torch.manual_seed(1)
    wires = nn.Linear(6, 5), nn.Linear(5, 4), nn.Linear(4, 3)

    def network(*drops: nn.Module) -> nn.Sequential:
        phi = nn.Tanh(), nn.Tanh(), nn.Identity()
        return nn.Sequential(*(m for three in zip(drops, wires, phi, strict=True) for m in three)).double()

    x, y = torch.randn(7, 6, dtype=torch.float64), torch.randint(0, 3, (7,))
    learner = apical.make(rule, network(nn.Dropout(0.3), nn.Dropout(0.5), nn.Dropout(0.4)))
    noise = learner.draw(x, torch.Generator().manual_seed(2))
    grads = last_gradients(learner, Case(learner.model, x, y), noise)
    masked = network(Masked(noise["0"], 0.3), Masked(noise["3"], 0.5), Masked(noise["6"], 0.4))
    energy = Energy(Case(masked, x, y), cross_entropy())
    if rule == "pc:fixed":
        expected = autograd(masked, F.cross_entropy(masked(x), y))
    else:
        *_, hidden = energy.descend(learner.rate, learner.sweeps - (rule == "ipc"))
        expected = energy.slopes(hidden, energy.params())[1]
    assert_all_same(grads, expected)


def last_gradients(learner: apical.Learner, case: Case, noise: Params) -> Params:
    """The gradients of the last phase, the weights held."""
    with torch.no_grad():
        state: Params = {}
        for phase in learner.phases:
            update = phase(learner.params(), state, case.x, case.labels, noise)
            state |= update.state
    return update.grads


@pytest.mark.parametrize("rule", ["pc", "pc:fixed", "ipc"])
@pytest.mark.parametrize("name", ["mlp", "cnn"])
def test_what_is_frozen_gets_no_gradient_and_changes_nobody_elses(rule: str, name: str) -> None:
    case = CASES[name].case()
    learner = learner_for(rule, case)
    free = last_gradients(learner, case, {})
    layers = learner.network.layers
    frozen = {layers[0].weight, layers[1].weight, layers[2].bias}
    for parameter in frozen:
        learner.get_parameter(parameter).requires_grad_(False)
    assert_all_same(last_gradients(learner, case, {}), {n: g for n, g in free.items() if n not in frozen})
    for p in learner.parameters():
        p.requires_grad_(False)
    with pytest.raises(ApicalError, match="nothing is left to train"):
        last_gradients(learner, case, {})


# Incremental: weights move at every sweep.


@pytest.mark.parametrize("sweeps", [2, 3])
def test_ipc_on_two_layers_is_what_is_worked_out_by_hand(sweeps: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    x, t = torch.randn(5, 3, dtype=torch.float64), torch.randn(5, 2, dtype=torch.float64)
    w0, b0, w1, b1 = (p.detach().clone() for p in model.parameters())
    gamma, eta = 0.2, 0.3
    learner = apical.make("ipc", model, loss="mse", rate=gamma, sweeps=sweeps)
    credit = learner.step(x, t, torch.optim.SGD(learner.param_groups(lr=eta)))

    u = torch.tanh(x @ w0.T + b0)
    output = u @ w1.T + b1
    assert_same(credit.output, output)
    assert_same(credit.loss, ((t - output) ** 2).sum() / 10)
    # Sweep 1: the hidden activity is what was predicted; only the output errs.
    top = t - output
    w1, b1, u = w1 + eta * top.T @ u / 5, b1 + eta * top.mean(0), u + gamma * top @ w1
    # The others: both layers err, and everything moves at once, from the values that the sweep finds.
    for _ in range(sweeps - 1):
        mu = torch.tanh(x @ w0.T + b0)
        hidden, top = u - mu, t - u @ w1.T - b1
        delta = hidden * (1 - mu**2)
        w0, b0, w1, b1, u = (
            w0 + eta * delta.T @ x / 5,
            b0 + eta * delta.mean(0),
            w1 + eta * top.T @ u / 5,
            b1 + eta * top.mean(0),
            u + gamma * (top @ w1 - hidden),
        )
    for p, expected in zip(model.parameters(), (w0, b0, w1, b1), strict=True):
        assert_same(p.detach(), expected)


@given(case=networks(), loss=losses, more=st.integers(0, 3))
def test_ipc_descends_the_energy_in_activities_and_weights_at_once(
    case: Case, loss: tuple[object, PerExample], more: int
) -> None:
    energy, eta, gamma = Energy(case, loss[1]), 0.05, 0.1
    params = energy.params()
    sweeps, hidden = energy.layers + more, energy.forward(params)
    output = case.model(case.x).detach()
    for _ in range(sweeps):
        down, slopes = energy.slopes(hidden, params)
        hidden = [u - gamma * slope for u, slope in zip(hidden, down, strict=True)]
        params = {n: p - eta * slopes[f"model.{n}"] for n, p in params.items()}
    learner = learner_for("ipc", case, loss=loss[0], rate=gamma, sweeps=sweeps)
    credit = learner.step(case.x, case.labels, torch.optim.SGD(learner.param_groups(lr=eta)))
    assert_all_same({n: p.detach() for n, p in case.model.named_parameters()}, params)
    assert_same(credit.output, output)
    assert_same(credit.loss, loss[1](output, case.labels).mean())


@pytest.mark.parametrize("name", ["mlp", "deep", "cnn"])
def test_with_the_weights_held_each_ipc_sweep_has_the_gradient_of_pc_after_the_sweeps_before_it(name: str) -> None:
    case = CASES[name].case()
    ipc = learner_for("ipc", case, rate=0.2)
    layers = [{layer.weight, layer.bias} - {None} for layer in ipc.network.layers]
    state: Params = {}
    for t, phase in enumerate(ipc.phases):
        with torch.no_grad():
            update = phase(ipc.params(), state, case.x, case.labels, {})
        state = update.state
        reached = set().union(*layers[max(0, len(layers) - 1 - t) :])
        assert set(update.grads) == reached, "what no error has reached has no gradient"
        if t >= max(1, len(layers) - 1):
            pc = learner_for("pc", case, rate=0.2, sweeps=t)
            assert_all_same(update.grads, credited(pc, case.x, case.labels))


def test_under_adam_a_layer_waits_until_an_error_reaches_it() -> None:
    """Momentum of the batch before must not move a layer in the sweeps that bring it no error."""
    case = CASES["mlp"].case()
    learner = learner_for("ipc", case, sweeps=3)
    optim = torch.optim.Adam(learner.param_groups(lr=0.01))
    for _ in range(2):
        learner.step(case.x, case.labels, optim)
    steps = [int(optim.state[w]["step"]) for w in learner.forward_weights]
    assert steps == [2, 4, 6]


# Options, and what is refused.


def deep(layers: int) -> nn.Sequential:
    return nn.Sequential(*(m for _ in range(layers) for m in (nn.Linear(3, 3), nn.Tanh())))


@pytest.mark.parametrize(
    ("rule", "layers", "sweeps", "rate"),
    [
        ("pc", 3, 8, 0.1),
        ("pc", 12, 11, 0.1),
        ("pc:fixed", 3, 2, 1.0),
        ("pc:fixed", 1, 0, 1.0),
        ("ipc", 3, 8, 0.1),
        ("ipc", 12, 12, 0.1),
    ],
)
def test_defaults_let_an_error_reach_the_first_layer(rule: str, layers: int, sweeps: int, rate: float) -> None:
    learner = apical.make(rule, deep(layers))
    assert (learner.sweeps, learner.rate) == (sweeps, rate)
    assert learner.name == rule


@pytest.mark.parametrize(("rule", "fewest"), [("pc", 3), ("pc:fixed", 3), ("ipc", 4)])
@pytest.mark.parametrize("wrong", [-1, 2.5, True, "8", 0])
def test_too_few_sweeps_or_no_number_of_them_is_refused(rule: str, fewest: int, wrong: object) -> None:
    apical.make(rule, deep(4), sweeps=fewest)
    for sweeps in (wrong, fewest - 1):
        with pytest.raises(ApicalError, match=rf"sweeps is .* whole number of at least {fewest}.* first of 4 layers"):
            apical.make(rule, deep(4), sweeps=sweeps)
    with pytest.raises(ApicalError, match=r"sweeps is True, .* whole number"):
        apical.make(rule, deep(1), sweeps=True)


@pytest.mark.parametrize("rule", ["pc", "pc:fixed", "ipc"])
@pytest.mark.parametrize("wrong", [0, -0.1, math.nan, math.inf, True, "fast"])
def test_a_rate_that_is_not_positive_is_refused(rule: str, wrong: object) -> None:
    with pytest.raises(ApicalError, match=r"rate is .* positive number"):
        apical.make(rule, deep(2), rate=wrong)


def test_errors_that_could_not_settle_and_unknown_kinds_of_inference_are_refused() -> None:
    with pytest.raises(ApicalError, match=r"rate is 2\.0, .* below 2"):
        apical.make("pc:fixed", deep(2), rate=2.0)
    apical.make("pc:fixed", deep(2), rate=1.9)
    with pytest.raises(ApicalError, match="inference is 'half', but must be one of full, fixed"):
        apical.make("pc", deep(2), inference="half")


@pytest.mark.parametrize("rule", ["pc", "pc:fixed", "ipc"])
def test_errors_come_down_through_the_forward_weights_and_nothing_else_is_kept(rule: str) -> None:
    case = CASES["cnn"].case()
    learner = learner_for(rule, case)
    assert learner.feedback_weights[0] is None
    for down, up in zip(learner.feedback_weights[1:], learner.forward_weights[1:], strict=True):
        assert down is up
    assert {id(p) for p in learner.parameters()} == {id(p) for p in case.model.parameters()}


@pytest.mark.parametrize("name", ["mlp", "cnn", "positions"])
def test_float32_agrees_with_float64(name: str) -> None:
    case = CASES[name].case()
    learner = learner_for("pc", case, rate=0.3)
    exact = credited(learner, case.x, case.labels)
    single = credited(copy.deepcopy(learner).float(), case.x.float(), case.labels)
    assert all(g.dtype == torch.float32 for g in single.values())
    assert_all_same({n: g.double() for n, g in single.items()}, exact, tolerance=1e-4)


@given(case=hidden_networks())
def test_no_gradient_shrinks_or_grows_with_the_batch(case: Case) -> None:
    learner = learner_for("pc", case)
    once = credited(learner, case.x, case.labels)
    thrice = credited(learner, case.x.repeat(3, *[1] * (case.x.ndim - 1)), case.labels.repeat(3))
    assert_all_same(thrice, once)


def test_the_papers_verdict_is_on_record() -> None:
    assert apical.RULES["pc"].CLAIMS == (False, True, False)
    assert apical.RULES["ipc"].CLAIMS is None  # its table has no such row
