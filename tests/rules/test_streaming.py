"""Streaming: the same gradients as dll, each a known number of ticks later, whatever the stream has been through."""

import copy
import itertools
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import apical
from apical.core.activation import Neuron
from apical.core.learner import Update
from apical.core.phases import run_phases
from apical.engine.loop import shuffle_indices
from apical.engine.metrics import measure_alignment
from apical.errors import ApicalError, DivergenceError, UnsupportedError
from apical.plausibility.judge import build_audit_network
from apical.rules.dll import DLL
from apical.rules.streaming import Streaming
from cases import CASES
from reference import assert_all_same, assert_same, credited, gradients
from runs import RUN, data, mlp
from strategies import Case, networks, share_of_examples

THETAS = Streaming.VARIANTS
Batch = tuple[Tensor, Tensor]


def make_streaming(case: Case, theta: str = "kolen-pollack") -> Streaming:
    learner = apical.make(f"streaming:{theta}", case.model, input_shape=case.input_shape)
    assert isinstance(learner, Streaming)
    return learner


def make_dll(learner: Streaming) -> apical.Learner:
    """dll on the same model, with the same Θ."""
    twin = apical.make(f"dll:{learner.theta}", learner.model)
    twin.feedback = learner.feedback
    return twin


def make_batches(case: Case, count: int, sizes: list[int] | None = None) -> list[Batch]:
    """Random batches like the case's; the first one is of full size."""
    full = len(case.x)
    sizes = [full, *(sizes or [])][:count]
    sizes += [full] * (count - len(sizes))
    return [
        (torch.randn(n, *case.input_shape, dtype=case.x.dtype), case.labels[torch.randint(0, full, (n,))])
        for n in sizes
    ]


def stream_gradients(learner: Streaming, batches: list[Batch]) -> list[dict[str, Tensor]]:
    """The gradients of each tick, at constant weights."""
    return [credited(learner, x, y) for x, y in batches]


def sort_by_batch(learner: Streaming, ticks: list[dict[str, Tensor]], count: int) -> list[dict[str, Tensor]]:
    """The gradients of each batch: of layer i, those of 2(L−1) − i ticks after the batch entered."""
    found: list[dict[str, Tensor]] = [{} for _ in range(count)]
    top = len(learner.network) - 1
    for b, (i, layer) in itertools.product(range(count), enumerate(learner.network.layers)):
        tick = ticks[b + 2 * top - i]
        found[b] |= {n: tick[n] for n in (layer.weight, layer.bias, f"feedback.{i}") if n in tick}
    return found


@pytest.mark.parametrize("theta", THETAS)
@share_of_examples(0.5)
@given(case=networks(), sizes=st.lists(st.integers(1, 4), max_size=3))
def test_at_rate_zero_the_gradients_sorted_by_batch_are_those_of_dll(theta: str, case: Case, sizes: list[int]) -> None:
    learner = make_streaming(case, theta)
    sizes = [min(n, len(case.x)) for n in sizes]
    batches = make_batches(case, 4 + learner.warmup, sizes)
    found = sort_by_batch(learner, stream_gradients(learner, batches), 4)
    twin = make_dll(learner)
    for batch, own in zip(batches, found, strict=False):
        assert_all_same(own, credited(twin, *batch))


@pytest.mark.parametrize("name", [name for name in CASES if name != "parallel"])
def test_dropout_and_pooling_are_differentiated_where_the_batch_was(name: str) -> None:
    """Layer i of batch b has the noise of tick b + i."""
    case = CASES[name].case()
    learner = make_streaming(case, "released")
    twin, top = make_dll(learner), learner.top
    batches = make_batches(case, 3 + learner.warmup)
    learner.allocate(*batches[0])
    noises = [learner.draw(x) for x, _ in batches]
    ticks = []
    for t, ((x, y), noise) in enumerate(zip(batches, noises, strict=True)):
        ticks.append(run_tick(learner, t, x, y, noise).grads)
    for b, own in enumerate(sort_by_batch(learner, ticks, 3)):
        noise = dict(noises[b])
        for i, layer in enumerate(learner.network.layers):
            noise |= {s.name: noises[b + i][s.name] for s in layer.neuron.stages if s.name in noise}
        with torch.no_grad():
            expected = twin.update(twin.params(), {}, *batches[b], noise).grads
        assert_all_same(own, expected)
    assert top == len(learner.network) - 1


def run_tick(learner: Streaming, done: int, x: Tensor, y: Tensor, noise: dict[str, Tensor]) -> Update:
    with torch.no_grad():
        phases = learner.get_checked_phases(done)
        return run_phases(phases, learner.params(), learner.state_tensors(), (x, y, noise), lambda update, last: None)


@pytest.mark.parametrize("theta", THETAS)
def test_with_one_layer_it_is_dll(theta: str) -> None:
    learner = apical.make(f"streaming:{theta}", nn.Sequential(nn.Flatten(), nn.Linear(6, 3), nn.Tanh()).double())
    twin = apical.make(f"dll:{theta}", copy.deepcopy(learner.model))
    optims = [torch.optim.SGD(one.param_groups(lr=0.1), momentum=0.9) for one in (learner, twin)]
    for n in (5, 3, 7):
        x, y = torch.randn(n, 2, 3).double(), torch.randint(0, 3, (n,))
        ours, theirs = (one.step(x, y, optim) for one, optim in zip((learner, twin), optims, strict=True))
        assert_same(ours.loss, theirs.loss)
        assert_same(ours.output, theirs.output)
        assert_all_same(dict(learner.model.named_parameters()), dict(twin.model.named_parameters()))


HAND_WORKED: list[tuple[float | None, tuple[float | None, float | None, float | None]]] = [
    (None, (None, None, None)),
    (None, (None, None, None)),
    (2.0, (None, None, -4.0)),
    (8.0, (None, -4.0, 24.0)),
    (-8.0, (-4.0, 24.0, -22.0)),
    (13.5, (24.0, -22.0, 112.5)),
    (159.75, (-22.0, 75.0, -928.5)),
    (1027.5, (75.0, 619.0, 5137.5)),
]


def test_three_scalar_layers_over_eight_ticks_worked_out_by_hand() -> None:
    """w = (1, 2, 1), θ₁ = 1, θ₂ = 2, no activation, ½(y − output)², SGD with rate ¼.

    Tick 2: batch 0 (x = 1, y = 4) is at the top as 1 · 1 · 2 = 2, so δ₂ = 4 − 2 = 2 and w₂'s gradient −2 · 2 = −4. Tick 3:
    δ₁ = θ₂ · 2 = 4 meets the 1 that layer 1 got at tick 1: −4. Tick 4: δ₀ = θ₁ · 4 meets the 1 of tick 0: −4.
    """
    model = nn.Sequential(*(nn.Linear(1, 1, bias=False) for _ in range(3))).double()
    learner = apical.make("streaming:frozen", model, loss="mse")
    with torch.no_grad():
        for weight, value in zip(learner.forward_weights, (1.0, 2.0, 1.0), strict=True):
            weight.fill_(value)
        learner.feedback_weights[1].fill_(1.0)
        learner.feedback_weights[2].fill_(2.0)
    optim = torch.optim.SGD(learner.param_groups(lr=0.25))
    inputs, targets = (1, 2, 1, 3, 2, 1, 1, 2), (4, 2, 3, 1, 5, 0, 2, 1)
    for x, y, (output, expected) in zip(inputs, targets, HAND_WORKED, strict=True):
        credit = learner.step(torch.tensor([[float(x)]]).double(), torch.tensor([[float(y)]]).double(), optim)
        assert credit.output.flatten().tolist() == ([] if output is None else [output])
        assert [None if w.grad is None else float(w.grad) for w in learner.forward_weights] == list(expected)


@pytest.mark.parametrize(("theta", "lookahead"), [*((theta, 0.0) for theta in THETAS), ("kolen-pollack", 0.5)])
def test_while_the_weights_change_each_layer_uses_those_of_the_tick(theta: str, lookahead: float) -> None:
    """Against a book-keeping by batch: activity u[i, b] is made at tick b + i, the error δ[i, b] at tick b + 2(L−1) − i.

    With `lookahead` a layer fires with the weights that it will have, at their present velocity, when the error arrives.
    """
    widths, ticks, rate = (4, 5, 6, 5, 3), 14, 0.05
    layers = [m for a, b in itertools.pairwise(widths) for m in (nn.Linear(a, b), nn.Tanh())][:-1]
    learner = apical.make(f"streaming:{theta}", nn.Sequential(*layers).double(), lookahead=lookahead)
    top = len(widths) - 2
    w, bias = ([p.detach().clone() for p in ps] for ps in (learner.forward_weights, [m.bias for m in layers[::2]]))
    th = [None if p is None else p.detach().clone() for p in learner.feedback_weights]
    xs, ys = torch.randn(ticks, 6, 4).double(), torch.randint(0, 3, (ticks, 6))
    optim = torch.optim.SGD(learner.parameters(), lr=rate)
    u: dict[tuple[int, int], Tensor] = {(0, b): xs[b] for b in range(ticks)}
    xi: dict[tuple[int, int], Tensor] = {}
    before = [weight.clone() for weight in w]
    for t in range(ticks):
        learner.step(xs[t], ys[t], optim)
        for i in range(min(t, top) + 1):
            b = t - i
            drive = u[i, b] @ (w[i] + lookahead * 2 * (top - i) * (w[i] - before[i])).T + bias[i]
            if i < top:
                u[i + 1, b] = drive.tanh()
            else:
                xi[top + 1, b] = nn.functional.one_hot(ys[b], 3) - drive.softmax(1)
        changes = []
        for i in range(top, -1, -1):
            b = t - 2 * top + i
            if b < 0:
                continue
            delta = xi[i + 1, b] * (1 - u[i + 1, b] ** 2) if i < top else xi[i + 1, b]
            own = delta.T @ u[i, b] / 6
            changes.append((w[i], own))
            changes.append((bias[i], delta.mean(0)))
            if i:
                xi[i, b] = delta @ th[i]
                sign = {"paper": -1, "released": 1, "frozen": 0}.get(theta)
                changes.append((th[i], own if sign is None else sign * (delta.T @ xi[i, b] / 6)))
        before = [weight.clone() for weight in w]
        for weight, change in changes:
            weight += rate * change
        assert_all_same(dict(enumerate(learner.forward_weights)), dict(enumerate(w)))
        assert_all_same(dict(enumerate(learner.feedback_weights[1:])), dict(enumerate(th[1:])))


def test_slowdown_divides_the_rates_of_a_layer_by_its_delay() -> None:
    """W, bias and Θ of layer i have the rate η/(1 + s·2(L−1−i)): equal rates are what Kolen-Pollack's law needs."""
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 3))
    learner = apical.make("streaming", model, slowdown=0.25)
    rates = {id(p): group["lr"] for group in learner.param_groups(lr=0.3) for p in group["params"]}
    for layer, theta, expected in zip(model[::2], learner.feedback_weights, (0.15, 0.2, 0.3), strict=True):
        for p in (layer.weight, layer.bias, *([] if theta is None else [theta])):
            assert rates[id(p)] == pytest.approx(expected)


@pytest.mark.parametrize("depth", [2, 3, 5])
def test_the_error_of_layer_i_comes_two_ticks_later_for_each_layer_above(depth: int) -> None:
    """One batch that differs changes layer i's gradient at one tick alone."""
    model = nn.Sequential(*(nn.Linear(3, 3) for _ in range(depth))).double()
    learner = apical.make("streaming", model)
    batches = [(torch.randn(2, 3).double(), torch.tensor([0, 2])) for _ in range(3 * depth)]
    other = [(x + 1.0, y) if b == 1 else (x, y) for b, (x, y) in enumerate(batches)]
    twin = copy.deepcopy(learner)
    runs = list(zip(stream_gradients(learner, batches), stream_gradients(twin, other), strict=True))
    for i, layer in enumerate(learner.network.layers):
        name = layer.weight
        moved = [t for t, (one, two) in enumerate(runs) if name in one and not torch.equal(one[name], two[name])]
        seen = 1 + i  # the tick at which the layer saw the batch
        assert moved == [seen + 2 * (depth - 1 - i)]


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_the_first_layer_keeps_its_inputs_for_the_way_up_and_down_and_no_longer(depth: int) -> None:
    """Its own tick, one tick for each layer above on the way up, and as many on the way down. More would be wasted."""
    model = nn.Sequential(*(nn.Linear(3, 3) for _ in range(depth + 1)))
    learner = apical.make("streaming", model)
    learner.allocate(torch.randn(2, 3), torch.tensor([0, 1]))
    kept = [name for name, _ in learner.named_buffers() if name.startswith("stream.input_0_")]
    assert len(kept) == 1 + depth + depth


def test_while_the_pipeline_fills_a_layer_without_an_error_has_no_gradient_and_no_step() -> None:
    learner = apical.make("streaming", mlp())
    optim = torch.optim.Adam(learner.param_groups(lr=0.1))
    x, y, _, _ = data()
    for t in range(5):
        credit = learner.step(x[:8].double(), y[:8], optim)
        for i, layer in enumerate(learner.network.layers):
            learns = t >= 4 - i
            assert (learner.get_parameter(layer.weight).grad is not None) == learns
            assert (learner.get_parameter(layer.weight) in optim.state) == learns
            if i:
                assert (learner.feedback[str(i)] in optim.state) == learns
        assert len(credit.output) == (8 if t >= 2 else 0)
        assert math.isnan(float(credit.loss)) == (t < 2)


@pytest.mark.parametrize("stop", range(8))
def test_a_stream_that_is_stopped_at_any_tick_and_loaded_goes_on_as_if_it_had_not_been(stop: int) -> None:
    """Also where a smaller batch is on its way, and into a learner that has another stream in it."""
    case = CASES["cnn"].case()
    learner = make_streaming(case)
    batches = make_batches(case, 9, [5, 2, 5, 3])
    optim = torch.optim.SGD(learner.param_groups(lr=0.1))
    for batch in batches[:stop]:
        learner.step(*batch, optim)
    resumed = make_streaming(CASES["cnn"].case(seed=1))
    resumed.credit(*make_batches(case, 1)[0])
    resumed.zero_grad()
    resumed.load_state_dict(learner.state_dict())
    assert_all_same(resumed.state_dict(), learner.state_dict(), tolerance=0.0)
    again = torch.optim.SGD(resumed.param_groups(lr=0.1))
    for batch in batches[stop:]:
        one, two = learner.step(*batch, optim), resumed.step(*batch, again)
        assert torch.equal(one.output, two.output)
        assert_all_same(gradients(resumed), gradients(learner), tolerance=0.0)
    assert_all_same(resumed.state_dict(), learner.state_dict(), tolerance=0.0)


def test_loss_and_output_are_those_of_the_batch_that_entered_some_ticks_ago_in_its_own_size() -> None:
    case = CASES["mlp"].case()
    learner = make_streaming(case)
    batches = make_batches(case, 7, [2, 5, 1, 4])
    for t, (x, y) in enumerate(batches):
        credit = learner.credit(x, y)
        if t >= 2:
            past_x, past_y = batches[t - 2]
            assert_same(credit.output, case.model(past_x).detach())
            assert_same(credit.loss, nn.functional.cross_entropy(case.model(past_x), past_y).detach())


def test_noise_is_drawn_for_full_batches_since_layers_work_on_different_ones() -> None:
    case = CASES["conv1d with dropout"].case()
    learner = make_streaming(case)
    learner.credit(case.x, case.labels)
    assert {len(noise) for noise in learner.draw(case.x[:2]).values()} == {5}
    for _ in range(2 * learner.warmup):
        learner.credit(case.x[:2], case.labels[:2])
    assert learner.credit(case.x, case.labels).output.shape == (2, 3)


def test_evaluation_between_ticks_changes_nothing() -> None:
    one, two = (make_streaming(CASES["mlp"].case()) for _ in range(2))
    for t, (x, y) in enumerate(make_batches(CASES["mlp"].case(), 7)):
        one(torch.randn(11, 2, 3).double())
        one.predict(one.params(), one.state_tensors(), torch.randn(3, 2, 3).double())
        assert_all_same(credited(one, x, y), credited(two, x, y), tolerance=0.0)
        assert int(one.stream.tick) == t + 1


@pytest.mark.parametrize(
    ("x", "y"),
    [
        (torch.zeros(6, 2, 3), torch.zeros(6, dtype=torch.long)),
        (torch.zeros(5, 2, 3), torch.zeros(5, 3)),
        (torch.zeros(5, 2, 3), torch.zeros(5, dtype=torch.int32)),
    ],
)
def test_a_larger_batch_and_other_targets_are_refused(x: Tensor, y: Tensor) -> None:
    case = CASES["mlp"].case(dtype=torch.float32)
    learner = apical.make("streaming", case.model, loss="mse")
    learner.credit(case.x, case.labels)
    before = {n: b.clone() for n, b in learner.state_tensors().items()}
    with pytest.raises(ApicalError, match="up to 5 examples"):
        learner.credit(x, y)
    assert_all_same(learner.state_tensors(), before, tolerance=0.0)


def test_a_layer_that_keeps_something_else_than_at_first_is_named() -> None:
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Tanh(), nn.Flatten(), nn.Linear(32, 3))
    learner = apical.make("streaming", model)
    x, y = torch.randn(4, 1, 6, 6), torch.tensor([0, 1, 2, 0])
    learner.credit(x, y)
    model[2].register_forward_hook(lambda *seen: None)  # a plain Flatten needs nothing for its derivative
    with pytest.raises(ApicalError, match="layer 0 keeps something else"):
        learner.credit(x, y)


def test_a_grad_scaler_waits_for_the_first_gradients() -> None:
    learner = make_streaming(CASES["mlp"].case(dtype=torch.float32))
    optim, scaler = torch.optim.SGD(learner.param_groups(lr=0.1)), torch.amp.GradScaler("cpu")
    before = [w.detach().clone() for w in learner.forward_weights]
    for x, y in make_batches(CASES["mlp"].case(dtype=torch.float32), 2 * learner.warmup):
        learner.step(x, y, optim, scaler=scaler)
    assert all((w != old).any() for w, old in zip(learner.forward_weights, before, strict=True))


def test_with_layers_of_their_own_rates_the_decay_still_follows_its_schedule() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 2))
    learner = apical.make("streaming", model, slowdown=0.5, decay=[(0, 3e-3), (0.5, 5e-4)])
    optim = torch.optim.SGD(learner.param_groups(lr=0.1))
    scheduler = apical.DecayScheduler(optim, learner.decay_schedule, steps=2)
    optim.step()
    scheduler.step()
    decays = {group["name"]: group["weight_decay"] for group in optim.param_groups}
    assert decays == {
        **dict.fromkeys(("W 0", "bias 0", "bias 1", "bias 2"), 0.0),
        **dict.fromkeys(("W mirrored 1", "W mirrored 2", "theta 1", "theta 2"), 5e-4),
    }


def test_another_input_shape_is_refused() -> None:
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2, 3))
    learner = apical.make("streaming", model)
    learner.credit(torch.randn(2, 1, 5, 5), torch.tensor([0, 1]))
    with pytest.raises(ApicalError, match=r"inputs \(1, 5, 5\)"):
        learner.credit(torch.randn(2, 1, 6, 6), torch.tensor([0, 1]))


def test_recurrent_and_parallel_networks_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="recurrent"):
        apical.make("streaming", apical.Elman(nn.RNN(4, 8, batch_first=True), nn.Linear(8, 3)))
    with pytest.raises(UnsupportedError, match="Parallel"):
        apical.make("streaming", CASES["parallel"].case().model)


def test_a_loss_that_is_not_finite_leaves_the_stream_as_it_was() -> None:
    learner = apical.make("streaming", mlp())
    x, y, _, _ = data()
    for _ in range(5):
        learner.credit(x[:8].double(), y[:8])
    with torch.no_grad():
        learner.forward_weights[2].fill_(math.inf)
    before = {n: b.clone() for n, b in learner.state_tensors().items()}
    with pytest.raises(DivergenceError):
        learner.credit(x[:8].double(), y[:8])
    assert_all_same(learner.state_tensors(), before, tolerance=0.0)


@pytest.mark.parametrize("seeds", [1, 2])
def test_an_epochs_loss_and_accuracy_are_those_of_the_batches_that_came_out_in_it(seeds: int) -> None:
    """29 examples in batches of 8 and one of 5: in the first epoch two batches stay inside."""
    epochs = 6
    rows: list[list[tuple[int, float, int]]] = [[] for _ in range(epochs)]
    labels: list[Tensor] = []
    fit = apical.fit(mlp, data(), rule="streaming", seeds=seeds, **{**RUN, "epochs": epochs})

    torch.manual_seed(0)
    learner = apical.make("streaming", mlp(), input_shape=(1, 4, 4))
    x, y, _, _ = data()
    optim = torch.optim.Adam(learner.param_groups(lr=RUN["lr"]))
    rates = fit.settings.compute_rates(4 * epochs)
    for t in range(4 * epochs):
        order = shuffle_indices(29, 0, t // 4)[8 * (t % 4) : 8 * (t % 4) + 8]
        labels.append(y[order])
        for group in optim.param_groups:
            group["lr"] = RUN["lr"] * float(rates[t])
        credit = learner.step(x[order].double(), y[order], optim)
        if t >= 2:
            hits = int((credit.output.argmax(1) == labels[t - 2]).sum())
            rows[t // 4].append((len(credit.output), float(credit.loss), hits))
    assert [sum(n for n, _, _ in own) for own in rows] == [16, *[29] * (epochs - 1)]
    for own, row in zip(rows, fit.of_seed(0), strict=True):
        count = sum(n for n, _, _ in own)
        assert row["loss"] == pytest.approx(sum(n * loss for n, loss, _ in own) / count, rel=1e-5)
        assert row["accuracy"] == pytest.approx(sum(hits for *_, hits in own) / count)


@pytest.mark.parametrize("before", [1, 7])
def test_fit_goes_on_with_the_stream_of_a_learner(before: int) -> None:
    """As steps by hand do, and what `fit` left on its way they go on with, too."""
    x, y, x_test, y_test = data()
    x = x.double()
    learner = apical.make("streaming", mlp().double())
    twin = copy.deepcopy(learner)
    optims = [torch.optim.SGD(one.param_groups(lr=0.125)) for one in (learner, twin)]
    for t in range(before):
        for one, optim in zip((learner, twin), optims, strict=True):
            one.step(x[t : t + 8], y[t : t + 8], optim)
    run = {"epochs": 3, "optimizer": "sgd", "lr": 0.125, "schedule": "constant", "batch_size": 8, "progress": False}
    apical.fit(learner, (x, y, x_test.double(), y_test), **run)
    for part in (part for epoch in range(3) for part in shuffle_indices(29, 0, epoch).split(8)):
        twin.step(x[part], y[part], optims[1])
    assert_all_same(learner.state_dict(), twin.state_dict())
    assert_all_same(credited(learner, x[:8], y[:8]), credited(twin, x[:8], y[:8]))


def test_an_epoch_in_which_nothing_comes_out_has_no_loss_and_is_no_divergence(tmp_path: Path) -> None:
    run = {**RUN, "batch_size": 29, "epochs": 4}
    fit = apical.fit(mlp, data(), rule="streaming", seeds=2, clip=1.0, checkpoint=tmp_path / "run.safetensors", **run)
    assert [math.isnan(row["loss"]) for row in fit.of_seed(1)] == [True, True, False, False]
    assert not fit.failed


def test_alignment_is_measured_on_the_batch_itself() -> None:
    """Whatever is on its way: it is that of dll with the same weights."""
    learner = apical.make("streaming:released", mlp())
    x, y, _, _ = data()
    for _ in range(7):
        learner.credit(x[:8].double(), y[:8])
    before = {n: b.clone() for n, b in learner.state_tensors().items()}
    ours, theirs = (measure_alignment(one, x.double(), y, torch.Generator()) for one in (learner, make_dll(learner)))
    assert ours == theirs
    assert_all_same(learner.state_tensors(), before, tolerance=0.0)
    assert "alignment" in apical.fit(mlp, data(), rule="streaming", alignment=True, **{**RUN, "epochs": 1}).history[0]


STAGES = [
    *(nn.Tanh(), nn.ReLU(inplace=True), nn.GELU(), nn.Softplus(), nn.Softmax(1), nn.Identity(), nn.Flatten()),
    *(nn.AvgPool2d(2), nn.AdaptiveMaxPool2d(2), nn.MaxPool2d(2), nn.MaxPool2d(3, 2, 1, ceil_mode=True)),
    *(nn.MaxPool2d((2, 1), dilation=2), nn.Dropout(0.4), nn.Dropout2d(0.4), nn.AlphaDropout(0.3), nn.RReLU()),
]


@pytest.mark.parametrize(
    "stages", [[s] for s in STAGES] + [[nn.ReLU(), nn.MaxPool2d(2), nn.Dropout(0.5), nn.Flatten()]]
)
def test_the_derivative_follows_later_from_what_was_kept(stages: list[nn.Module]) -> None:
    neuron = Neuron([(str(i), stage) for i, stage in enumerate(stages)])
    then, now = torch.randn(2, 3, 2, 6, 7).double()
    noise = {str(i): torch.rand(()) for i in range(len(stages))}
    for i, stage in enumerate(stages):
        shape = neuron_shape(stages[:i], then)
        noise[str(i)] = (
            torch.rand(*shape[:2], *[1] * (len(shape) - 2)) if type(stage) is nn.Dropout2d else torch.rand(shape)
        )
    output, kept, _ = neuron.trace(then, noise)
    _, _, pull_back = neuron.trace(now, {n: torch.rand_like(values) for n, values in noise.items()})
    expected, derivative = neuron.vjp(then, noise)
    e = torch.randn_like(output)
    assert_same(output, expected)
    assert_same(pull_back(kept, e), derivative(e))


def neuron_shape(stages: list[nn.Module], a: Tensor) -> torch.Size:
    for stage in stages:
        a = stage.eval()(a.clone())
        stage.train()
    return a.shape


def test_one_dimensional_pooling_is_kept_too() -> None:
    neuron = Neuron([("0", nn.MaxPool1d(3, 2, 1))])
    then, now = torch.randn(2, 4, 3, 9).double()
    output, kept, _ = neuron.trace(then, {})
    e = torch.randn_like(output)
    assert_same(neuron.trace(now, {})[2](kept, e), neuron.vjp(then, {})[1](e))


def test_random_modules_with_hooks_are_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.5), nn.Linear(3, 2))
    model[1].register_forward_hook(lambda module, inputs, output: None)
    learner = apical.make("streaming", model)
    with pytest.raises(UnsupportedError, match="hooks"):
        learner.credit(torch.randn(2, 4), torch.tensor([0, 1]))


def test_a_trace_has_the_memory_order_of_what_it_keeps() -> None:
    learner = apical.make("streaming", nn.Sequential(nn.Conv2d(3, 4, 3), nn.Tanh(), nn.Flatten(), nn.Linear(24, 2)))
    images = torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last)
    learner.allocate(images, torch.tensor([0, 1]))
    assert learner.stream.input_0_2.stride() == images.stride()


# What the audit sees of it, tick by tick.


class Phased(Streaming):
    """A whole backward pass inside one tick, dressed as a stream."""

    def tick(self, params: Any, state: Any, x: Tensor, y: Tensor, noise: Any, done: int) -> Update:
        update = super().tick(params, state, x, y, noise, done)
        return update._replace(grads=DLL.update(self, params, state, x, y, noise).grads)


class Transposing(Streaming):
    """Errors that come down through the forward weights, one layer a tick."""

    def backward_weights(self, params: Any) -> dict[int, Tensor]:
        return {i: params[layer.weight] for i, layer in self.network.upper.items()}


def audit(rule: type[Streaming]) -> apical.Audit:
    torch.manual_seed(0)
    x, y = torch.rand(8, 6), torch.arange(8) % 3
    return apical.audit(rule(build_audit_network()), x, y)


def test_the_audit_follows_what_is_on_its_way() -> None:
    """The error of layer 0 has crossed two synapses in two ticks, and nothing of this tick above is in its update."""
    found = audit(Streaming)
    assert (found.c1, found.c2, found.c3) == (True, True, True)
    assert [layer["error"]["hops"] for layer in found.facts["layers"]] == [2, 1, 0]
    assert [layer["waits_for"] for layer in found.facts["layers"]] == [[], [], []]
    assert [layer["activity"]["computed"] for layer in found.facts["layers"]] == [1, 1, 1]


def test_a_backward_pass_in_one_tick_and_weights_that_carry_errors_both_ways_are_found_out() -> None:
    phased, transposing = audit(Phased), audit(Transposing)
    assert (phased.c1, phased.c2, phased.c3) == (True, True, False)
    assert (transposing.c1, transposing.c2, transposing.c3) == (False, True, True)
