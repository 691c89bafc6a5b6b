"""Interventions: they decide by what a rule does when something is changed, whatever its code looks like."""

import random
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _get_current_dispatch_mode

import apical
from apical import Update
from apical.plausibility import interventions
from apical.plausibility.criteria import combine
from apical.plausibility.influence import count_firings, examine_errors, examine_timing
from apical.plausibility.interventions import TransportTest, change_targets, examine, repeat_examples, summarise
from apical.plausibility.products import IN, OUT, Cut, Product, ProductRecorder, find_uses, span, turn_rows
from apical.plausibility.replay import Layers, Outcome, run_ticks
from cases import CASES, EVERY, learner_for, mostly_slow

pytestmark = pytest.mark.no_cover  # the audit runs these lines, too
TRANSPORT = {"bp", "sign", "local", "pc", "pc:fixed", "ipc", "ep"}
WAITING = {"bp", "fa", "sign", "dfa", "pc", "pc:fixed", "ipc", "wp", "np", "tp", "dtp", "ep"}
SKIPPING = {"dfa", "wp", "np"}


def mlp(*widths: int) -> nn.Sequential:
    modules = [m for i, o in pairwise(widths) for m in (nn.Linear(i, o), nn.Tanh())]
    return nn.Sequential(*modules[:-1])


def batch(inputs: int = 6, examples: int = 8) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.rand(examples, inputs, generator=generator, dtype=torch.float64), torch.arange(examples) % 3


def judge(rule: Callable[[nn.Module], apical.Learner], *widths: int) -> dict[str, Outcome]:
    torch.manual_seed(0)
    return examine(
        rule(mlp(*(widths or (6, 5, 4, 3)))), *(t.float() if t.is_floating_point() else t for t in batch())
    ).outcomes


# The rules of the library, by interventions alone.


@pytest.mark.parametrize("spread", [1.0, 3.0])
def test_a_rule_whose_errors_explode_is_not_accused_for_rounding_errors(spread: float) -> None:
    """A wide Θ makes errors grow with every layer, and the printed ΔΘ is quadratic in them."""
    assert judge(partial(apical.DLL, theta_std=spread), 6, *[8] * 7, 3)["c1"].verdict is True


@pytest.mark.parametrize(
    "rule", mostly_slow(EVERY, ["bp", "sign", "dll", "streaming", "local", "pc", "np", "dtp", "ff", "ep", "hebb"])
)
def test_interventions_alone_decide_every_rule(rule: str) -> None:
    learner = apical.make(rule, mlp(6, 5, 4, 3))
    outcomes, facts = examine(learner, *(t.float() if t.is_floating_point() else t for t in batch()))
    assert outcomes["c1"].verdict == (rule not in TRANSPORT)
    assert outcomes["c2"].verdict == (rule not in SKIPPING)
    waits = rule in WAITING or rule.startswith("dll")
    assert outcomes["c3"].verdict == (not waits)
    assert facts["own_errors"] == (not waits and not rule.startswith("streaming"))
    if rule == "ff":
        assert facts["firings"] == 3  # a right and a wrong label, and the readout


def test_a_streaming_rule_shows_its_speed() -> None:
    """The error of layer j takes one tick for each layer that it comes down."""
    learner = apical.make("streaming:frozen", mlp(6, 9, 8, 7, 3)).double()
    found, facts = examine_timing(learner, batch())
    assert found.verdict is True
    heard = {int(low) // 2: {int(high) // 2: t for high, t in by.items()} for low, by in facts["heard"].items()}
    assert heard[2][3], heard[1][3] == (1, 2)
    assert all(ticks >= high - low for low, by in heard.items() for high, ticks in by.items())
    assert {low: by[3] for low, by in heard.items()} == {0: 3, 1: 2, 2: 1}


@pytest.mark.parametrize("case", ["cnn", "parallel"])
def test_other_layers_are_turned_and_pushed_as_dense_ones_are(case: str) -> None:
    made = CASES[case].case(batch=4)
    for rule, kept in {"bp": False, "fa": True}.items():
        outcomes = examine(learner_for(rule, made), made.x, made.labels).outcomes
        assert (outcomes["c1"].verdict, outcomes["c3"].verdict) == (kept, False)


class Residual(nn.Module):
    """A module that is no chain of layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(6, 24), nn.Linear(24, 24), nn.Linear(24, 3)
        self.norm = nn.LayerNorm(24)

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = torch.tanh(self.first(x))
        out: Tensor = self.last(self.norm(h + torch.tanh(self.second(h))))
        return out


@pytest.mark.parametrize(("rule", "kept"), [("bp", False), ("sign", False), ("fa", True), ("dll:kolen-pollack", True)])
def test_any_module_is_judged_by_interventions(rule: str, kept: bool) -> None:
    x, y = batch(examples=2)
    outcomes, facts = examine(apical.make(rule, Residual()), x.float(), y)
    assert (outcomes["c1"].verdict, outcomes["c3"].verdict) == (kept, False)
    assert facts["heard"] == {"first": {"last": 0}, "second": {"last": 0}}


# What turning a matrix leaves as it was.


@pytest.mark.parametrize("side", [IN, OUT])
@pytest.mark.parametrize("shape", [(7, 9), (6, 3, 2, 2)])
def test_a_turned_matrix_acts_on_the_basis_as_before_and_has_rows_of_the_same_length(side: str, shape: Any) -> None:
    w = torch.randn(shape, dtype=torch.float64)
    flat = w.flatten(1) if side == IN else w.flatten(1).T
    basis = span([torch.randn(3, flat.shape[1], dtype=torch.float64)], 1e-12)
    assert len(basis) == 4  # three vectors, and one of ones: sums stay, too
    turned = turn_rows(w, basis, side)
    after = turned.flatten(1) if side == IN else turned.flatten(1).T
    assert torch.allclose(after @ basis.T, flat @ basis.T)
    assert torch.allclose(after.sum(1), flat.sum(1))
    assert torch.allclose(after.norm(dim=1), flat.norm(dim=1))
    assert not torch.allclose(after[::2], flat[::2])
    assert torch.equal(after[1::2], flat[1::2])


def test_a_matrix_of_zeros_can_be_turned_too() -> None:
    basis = span([torch.randn(2, 6, dtype=torch.float64)], 1e-12)
    turned = turn_rows(torch.zeros(4, 6, dtype=torch.float64), basis, IN)
    assert turned.any()
    assert torch.allclose(turned @ basis.T, torch.zeros(4, len(basis), dtype=torch.float64))


def test_vectors_that_are_multiples_of_each_other_span_one_direction_and_small_ones_count() -> None:
    v, other = torch.randn(2, 1, 8, dtype=torch.float64)
    assert len(span([v, 1e-9 * v, -3 * v, torch.zeros_like(v)], 1e-12)) == 2
    assert len(span([v, 1e-14 * other], 1e-12)) == 3


PRODUCTS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "linear": lambda w, u: nn.functional.linear(u, w),
    "einsum": lambda w, u: torch.einsum("oi,ni->no", w, u),
    "multiplied and summed": lambda w, u: (u.unsqueeze(1) * w).sum(2),
    "one by one": lambda w, u: torch.stack([w.mv(row) for row in u]),
    "convolution": lambda w, u: nn.functional.conv1d(u.unsqueeze(2), w.unsqueeze(2)),
    "vmap": lambda w, u: torch.vmap(lambda row: w @ row)(u),
}


@pytest.mark.parametrize("how", PRODUCTS)
def test_all_that_a_matrix_acts_on_is_recorded(how: str) -> None:
    w, u = torch.randn(5, 7, dtype=torch.float64), torch.randn(3, 7, dtype=torch.float64)
    with ProductRecorder() as recorder:
        PRODUCTS[how](w, u)
    uses = [use for product in recorder.products for use in find_uses(product, w.shape)]
    seen = span([use.rows for use in uses if use.side == IN], 1e-12)
    assert torch.allclose(u @ seen.T @ seen, u)
    assert len(seen) == 4


@pytest.mark.parametrize(("stride", "padding", "groups"), [(1, 0, 1), (2, 1, 1), (1, 1, 2)])
def test_a_convolution_acts_on_its_patches(stride: int, padding: int, groups: int) -> None:
    w, u = torch.randn(4, 2 // groups, 3, 2).double(), torch.randn(2, 2, 5, 6).double()
    with ProductRecorder() as recorder:
        out = nn.functional.conv2d(u, w, None, stride, padding, 1, groups)
    (use,) = find_uses(recorder.products[0], w.shape)
    drive = use.vectors @ w.flatten(1).T  # (batch, positions, groups, out): each group sees its own channels
    parts = [drive[:, :, g, 4 // groups * g : 4 // groups * (g + 1)] for g in range(groups)]
    assert torch.allclose(torch.cat(parts, 2).mT.reshape(out.shape), out)


def test_a_cut_leaves_the_bias_and_other_products() -> None:
    w, v, b, u = torch.randn(5, 7), torch.randn(4, 5), torch.randn(5), torch.randn(3, 7)
    with Cut({w.shape}):
        drive = nn.functional.linear(u, w, b)
        back, above = drive @ w, drive @ v.T
        sparse = torch.sparse.mm(w.t().to_sparse(), drive.t())
    assert torch.equal(drive, b.expand(3, 5))
    assert not back.any()
    assert not sparse.any()
    assert torch.allclose(above, b.expand(3, 5) @ v.T)


# Rules that would mislead whoever reads their code or watches them.


class Descent(apical.Learner):
    """Feedback alignment; `carry` may do something else."""

    def __init__(self, *args: Any, **common: Any) -> None:
        super().__init__(*args, **common)
        self.b = [torch.randn_like(w) for w in self.forward_weights]

    def carry(self, i: int, w: Tensor, delta: Tensor) -> Tensor:
        return delta @ self.b[i]

    def update(self, params: Any, state: Any, x: Tensor, y: Tensor, noise: Any) -> Update:
        trace = self.network.forward(params, x, noise)
        loss, xi = self.loss.start(trace.output, y)
        grads: dict[str, Tensor] = {}
        for i, layer in reversed(list(enumerate(self.network.layers))):
            delta = trace.pullbacks[i](xi)  # type: ignore[misc]
            grads |= layer.gradients(trace.inputs[i], delta, self.trainable)
            xi = self.carry(i, params[layer.weight].detach(), delta) if i else xi
        return Update(grads, {}, loss, trace.output)


class InNumpy(Descent):
    def carry(self, i: int, w: Tensor, delta: Tensor) -> Tensor:
        return torch.from_numpy(delta.numpy() @ w.numpy())


class InFourierSpace(Descent):
    def carry(self, i: int, w: Tensor, delta: Tensor) -> Tensor:
        return delta @ torch.fft.irfft(torch.fft.rfft(w, dim=1), n=w.shape[1], dim=1)


class LargeBatches(Descent):
    def carry(self, i: int, w: Tensor, delta: Tensor) -> Tensor:
        return delta @ (w if len(delta) >= 32 else self.b[i])


class WhenNobodyLooks(Descent):
    def carry(self, i: int, w: Tensor, delta: Tensor) -> Tensor:
        return delta @ (w if _get_current_dispatch_mode() is None else self.b[i])


class FiveTicksLater(Descent):
    def __init__(self, *args: Any, **common: Any) -> None:
        super().__init__(*args, **common)
        self.copies: list[tuple[int, Tensor]] = []

    def carry(self, i: int, w: Tensor, delta: Tensor) -> Tensor:
        self.copies.append((i, w.clone()))
        own = [copy for j, copy in self.copies if j == i]
        return delta @ (own[-6] if len(own) > 5 else self.b[i])


class GoesUpAgain(Descent):
    """What comes down through W goes up through it again, so that W acts on it in its own direction, too."""

    def carry(self, i: int, w: Tensor, delta: Tensor) -> Tensor:
        down = delta @ w
        return down + 0 * (down @ w.T).sum()


@pytest.mark.parametrize(
    "rule",
    [InNumpy, InFourierSpace, LargeBatches, WhenNobodyLooks, FiveTicksLater, GoesUpAgain],
    ids=lambda r: r.__name__,
)
def test_weights_that_come_down_are_noticed(rule: type[apical.Learner]) -> None:
    assert judge(rule)["c1"].verdict is False
    assert judge(Descent)["c1"].verdict is True


def test_no_room_and_chance_are_undecided_never_a_proof() -> None:
    class Probing(Descent):
        """Every unit vector is sent up, so that nothing can be changed unseen."""

        def carry(self, i: int, w: Tensor, delta: Tensor) -> Tensor:
            return delta @ (torch.eye(w.shape[1], dtype=w.dtype) @ w.T).T

    class Unseeded(Descent):
        def carry(self, i: int, w: Tensor, delta: Tensor) -> Tensor:
            return delta @ (self.b[i] + torch.from_numpy(np.random.default_rng().normal(size=w.shape)).to(w))

    probing, unseeded = judge(Probing), judge(Unseeded)
    assert probing["c1"].verdict is None
    assert "a wider network would decide" in probing["c1"].reason
    assert {name: outcome.verdict for name, outcome in unseeded.items()} == {"c1": None, "c2": None, "c3": None}


def test_a_matrix_whose_action_was_not_seen_whole_is_undecided() -> None:
    """Turning W changes what its hyperbolic tangent gives, and so the activity above, which proves nothing."""

    class Squashed(Descent):
        def update(self, params: Any, *others: Any) -> Update:
            return super().update({name: p.detach().tanh() for name, p in params.items()}, *others)

    found = judge(Squashed)["c1"]
    assert found.verdict is None
    assert "in a way that was not seen" in found.reason


def test_what_comes_down_without_the_target_is_no_transport() -> None:
    class Unsupervised(Descent):
        def update(self, params: Any, state: Any, x: Tensor, y: Tensor, noise: Any) -> Update:
            trace, update = self.network.forward(params, x, noise), super().update(params, state, x, y, noise)
            grads = dict(update.grads)
            for i, layer in list(enumerate(self.network.layers))[1:]:
                below, seen = (
                    self.network.layers[i - 1],
                    trace.inputs[i] @ params[layer.weight].T @ params[layer.weight],
                )
                grads[below.weight] = grads[below.weight] + below.synapse.outer(trace.inputs[i - 1], seen)
            return update._replace(grads=grads)

    assert judge(Unsupervised)["c1"].verdict is True


def delay(rule: type[apical.Learner], ticks: int) -> type[apical.Learner]:
    class Delayed(rule):  # type: ignore[misc, valid-type]
        def __init__(self, *args: Any, **common: Any) -> None:
            super().__init__(*args, **common)
            self.waiting: list[dict[str, Tensor]] = []

        def update(self, *inputs: Any) -> Update:
            update = super().update(*inputs)
            self.waiting.append(update.grads)
            late = self.waiting[-1 - ticks] if len(self.waiting) > ticks else {}
            return update._replace(grads={n: late.get(n, torch.zeros_like(g)) for n, g in update.grads.items()})

    return Delayed


@pytest.mark.parametrize("rule", mostly_slow(["fa", "dfa", "bp"], ["dfa"]))
@pytest.mark.parametrize("ticks", [1, 2, 3])
def test_errors_that_wait_in_state_are_seen_to_arrive_too_early_or_all_at_once(rule: str, ticks: int) -> None:
    found = judge(delay(apical.RULES[rule], ticks))["c3"]
    assert found.verdict is False
    assert "ticks" in found.reason


class Hebbian(apical.Learner):
    """Each layer learns pre × post; `sign` is the factor at a tick."""

    def sign(self, tick: int, layer: int) -> float:
        return 1.0

    def update(self, params: Any, state: Any, x: Tensor, y: Tensor, noise: Any) -> Update:
        self.tick = getattr(self, "tick", -1) + 1
        trace, grads = self.network.forward(params, x, noise), {}
        for i, layer in enumerate(self.network.layers):
            post = [*trace.inputs[1:], trace.output][i]
            grads |= layer.gradients(trace.inputs[i], self.sign(self.tick, i) * post, self.trainable)
        return Update(grads, {}, self.loss(trace.output, y).mean(), trace.output)


class FreeAndClamped(Hebbian):
    """Four ticks of rest, four of learning."""

    def sign(self, tick: int, layer: int) -> float:
        return float(tick // 4 % 2)


class LearnAndUnlearn(Hebbian):
    def sign(self, tick: int, layer: int) -> float:
        return -0.9 if tick % 2 else 1.0


class InTurns(Hebbian):
    def sign(self, tick: int, layer: int) -> float:
        return float(tick % len(self.network) == layer)


class Filling(Hebbian):
    """Layers begin to learn one after the other, as in a pipeline."""

    def sign(self, tick: int, layer: int) -> float:
        return float(tick >= layer)


class Frozen(Hebbian):
    def sign(self, tick: int, layer: int) -> float:
        return float(layer != 1)


@pytest.mark.parametrize(
    ("rule", "met"),
    [
        (Hebbian, True),
        (Filling, True),
        (Frozen, True),
        (FreeAndClamped, False),
        (LearnAndUnlearn, False),
        (InTurns, False),
    ],
)
def test_a_shared_clock_is_seen_and_a_pipeline_that_fills_is_excused(rule: type[apical.Learner], met: bool) -> None:
    assert judge(rule)["c3"].verdict is met


def test_a_layer_that_is_cut_off_is_told_nothing() -> None:
    class Relayed(Descent):
        """The output's error goes down through identities as if through layers, and comes to each by one matrix."""

        def __init__(self, *args: Any, **common: Any) -> None:
            super().__init__(*args, **common)
            top = len(self.forward_weights[-1])
            self.direct = [torch.randn(top, len(w)) for w in self.forward_weights[:-1]]

        def update(self, params: Any, state: Any, x: Tensor, y: Tensor, noise: Any) -> Update:
            trace = self.network.forward(params, x, noise)
            loss, xi = self.loss.start(trace.output, y)
            grads = dict(self.network.layers[-1].gradients(trace.inputs[-1], xi, self.trainable))
            for i in reversed(range(len(self.direct))):
                xi = xi @ torch.eye(xi.shape[1], dtype=xi.dtype)
                grads |= self.network.layers[i].gradients(trace.inputs[i], xi @ self.direct[i].to(xi), self.trainable)
            return Update(grads, {}, loss, trace.output)

    class Hidden(Descent):
        """Its feedback weights are kept where no search finds them."""

        def __init__(self, *args: Any, **common: Any) -> None:
            super().__init__(*args, **common)
            kept, self.b = self.b, []
            self.find: Any = lambda i: kept[i]

        def carry(self, i: int, w: Tensor, delta: Tensor) -> Tensor:
            return delta @ self.find(i).to(delta)

    assert judge(Relayed)["c2"].verdict is False
    assert judge(Hidden)["c2"].verdict is True
    assert judge(Hidden, 6, 5, 3)["c2"].verdict is True  # nothing to skip


def test_without_biases_cutting_shows_nothing() -> None:
    modules = list(mlp(6, 9, 8, 3))
    for module in modules[::2]:
        module.bias = None
    assert examine_errors(apical.make("bp", nn.Sequential(*modules)).double(), batch()).verdict is None


# How runs are compared.


def test_runs_are_alike_and_leave_all_random_numbers_as_they_were() -> None:
    learner = apical.make("np", mlp(6, 5, 4, 3))
    random.seed(3)
    np.random.seed(4)
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()  # type: ignore[index]
    before = {name: value.clone() for name, value in learner.state_dict().items()}
    examine(learner, batch()[0].float(), batch()[1])
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert np.array_equal(np.random.get_state()[1], states[2])  # type: ignore[index]
    assert all(torch.equal(value, before[name]) for name, value in learner.state_dict().items())


def test_each_phase_of_a_tick_is_noted_apart() -> None:
    learner = apical.make("ipc", mlp(6, 5, 3)).double()
    run = run_ticks(learner, [batch()] * 2)
    assert run.ticks == [0] * len(learner.phases) + [1] * len(learner.phases)
    for before, update, after in zip(run.before, run.updates, run.before[1:], strict=False):
        assert all(torch.allclose(before[name] + change, after[name]) for name, change in update.items())


def test_weights_are_changed_before_each_phase() -> None:
    learner, w = apical.make("ipc", mlp(6, 5, 3)).double(), "model.2.weight"
    run = run_ticks(learner, [batch()], lambda values, tick, phase: values[w].fill_(phase))
    assert [float(before[w].mean()) for before in run.before] == list(range(len(learner.phases)))


def test_other_targets_are_other_classes_that_there_are() -> None:
    assert change_targets(torch.tensor([0, 2, 5, 2]), 9).tolist() == [2, 5, 0, 5]
    assert change_targets(torch.tensor([8, 8]), 9).tolist() == [0, 0]
    assert change_targets(torch.tensor([0.25, 1.0]), 9).tolist() == [0.75, 0.0]


def test_a_small_batch_is_repeated_to_any_size() -> None:
    x, y = repeat_examples(torch.tensor([1, 2, 3]), torch.tensor([4, 5, 6]), 7)
    assert (x.tolist(), y.tolist()) == ([1, 2, 3, 1, 2, 3, 1], [4, 5, 6, 4, 5, 6, 4])


def test_layers_of_a_recurrent_network_are_beside_each_other() -> None:
    elman = apical.make("bp", apical.Elman(nn.RNN(3, 4, batch_first=True), nn.Linear(4, 2)))
    layers = Layers(elman)
    assert [layers.upstream(i) for i in range(3)] == [[1], [0], [0, 1]]
    assert [layers.below(i) for i in range(3)] == [[], [], [0, 1]]
    x, y = torch.rand(2, 3, 3), torch.tensor([[0, 1, 0], [1, 1, 0]])
    found = {name: guarded for name, _, guarded in TransportTest(elman, [(x, y)] * 2).list_matrices()}
    assert list(found.values()) == [[1], [0], [0, 1]]


def test_a_layer_that_fires_for_two_inputs_is_counted() -> None:
    for rule, count in {"local": 1, "ff": 3}.items():
        learner = apical.make(rule, mlp(6, 5, 4, 3)).double()
        assert count_firings(learner, [batch()] * 2, Layers(learner)) == count


# What follows from the two methods.


class Loss:
    """What the tracer lost sight of."""

    what, operation, evades = "a value left torch", "item", False

    def __init__(self, *criteria: str) -> None:
        self.criteria = criteria


@pytest.mark.parametrize(
    ("traced", "lost", "told", "expected"),
    [
        (True, (), True, True),
        (True, ("c1",), True, True),  # the tracer knows nothing, and the interventions vouch for it
        (True, (), None, None),
        (True, (), False, False),
        (False, (), True, False),
        (False, (), None, False),
        (True, ("c1",), False, False),
    ],
)
def test_one_proof_is_enough_against_a_rule_and_only_interventions_vouch_for_it(
    traced: bool, lost: tuple[str, ...], told: bool | None, expected: bool | None
) -> None:
    result = interventions.InterventionResult({"c1": Outcome(told, "told")}, {})
    losses = [Loss(*lost)] if lost else []
    assert combine("c1", (traced, "traced"), losses, result)[0] is expected


@pytest.mark.parametrize(("firings", "expected"), [(1, True), (2, None), (None, None)])
def test_activity_that_may_be_computed_twice_needs_a_tracer_that_saw_everything(firings: Any, expected: Any) -> None:
    result = interventions.InterventionResult({"c3": Outcome(True, "told")}, {"firings": firings})
    assert combine("c3", (True, "traced"), [Loss("c3")], result)[0] is expected
    assert combine("c3", (True, "traced"), [Loss("c1")], result)[0] is True


def test_one_matrix_is_enough() -> None:
    kept, unknown, broken = (Outcome(verdict, str(verdict)) for verdict in (True, None, False))
    assert summarise({"a": kept, "b": unknown, "c": broken}) == broken
    assert summarise({"a": kept, "b": unknown}) == unknown
    assert summarise({"a": kept}).verdict is True


def test_a_matrix_that_acts_in_both_directions_is_found_by_the_side_of_its_first_use() -> None:
    """A head acts from its input, inverses and feedback weights from their output."""
    x, y = batch()
    sides = {}
    for rule in ("local", "dtp"):
        test = TransportTest(apical.make(rule, mlp(6, 5, 4, 3)).double(), [(x, y)] * 2)
        sides |= {name: side for name, side, _ in test.list_matrices()}
    assert (sides["heads.0"], sides["inverse.1"], sides["model.2.weight"]) == (IN, OUT, IN)


def test_a_product_of_other_shapes_is_no_use_of_a_matrix() -> None:
    product = Product(0, "mm", torch.randn(3, 4), torch.randn(4, 5))
    assert find_uses(product, torch.Size((6, 7))) == []
    (use,) = find_uses(product, torch.Size((5, 4)))
    assert (use.side, use.rows.shape) == (IN, (3, 4))
    (use,) = find_uses(product, torch.Size((4, 5)))
    assert (use.side, use.rows.shape) == (OUT, (3, 4))
