"""`apical.fit` against loops written by hand: weights, history, seeds, schedules, protocols, what it leaves alone."""

import inspect
import io
import math
import random
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import apical
from apical.data import Dataset
from apical.engine import checkpoint as checkpoints
from apical.engine import metrics, seconds_per_epoch
from apical.engine.loop import shuffle_indices
from apical.engine.replicas import ReplicaStack
from apical.engine.settings import Settings
from apical.errors import UnsupportedError
from cases import RULES, mostly_slow
from reference import assert_all_same, assert_same
from runs import BUILDERS, RUN, by_hand, cnn, data, fit, mlp, noisy, plain_mlp, seed_now, weights, without_time

every_rule = pytest.mark.parametrize("rule", RULES)


def assert_rows(actual: list[dict], expected: list[dict], tolerance: float = 1e-5) -> None:
    """The same numbers; the engine sums losses in float32."""
    for got, wanted in zip(without_time(actual), expected, strict=True):
        assert got == pytest.approx(wanted, rel=tolerance)


def assert_close(actual: list[float | None], expected: list[float | None]) -> None:
    assert actual == [None if value is None else pytest.approx(value, rel=1e-6) for value in expected]


@pytest.mark.parametrize(("values", "sizes"), [(2**25, [11]), (5 * 48 - 1, [4, 4, 3]), (1, [1] * 11)])
def test_no_more_is_scored_at_once_than_the_widest_layer_may_hold(
    values: int, sizes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is the first of the CNN's, with 3 x 4 x 4 values; of 11 images, the scores are the same however they are cut."""
    expected, seen, predict = fit(cnn, epochs=1).history, [], ReplicaStack.predict

    def watched(stack: ReplicaStack, x: Tensor) -> Tensor:
        seen.append(len(x))
        return predict(stack, x)

    monkeypatch.setattr(ReplicaStack, "predict", watched)
    monkeypatch.setattr(metrics, "EVALUATION_VALUES", values)
    assert_rows(fit(cnn, epochs=1).history, without_time(expected))
    assert seen == sizes


# The same as a loop written by hand.


@pytest.mark.parametrize("build", [mlp, cnn])
@pytest.mark.parametrize("schedule", ["linear", "cosine", "constant"])
def test_backpropagation_equals_a_plain_autograd_loop(build: Callable, schedule: str) -> None:
    run = fit(build, seeds=[5], schedule=schedule)
    model, rows, _ = by_hand(5, build=build, schedule=schedule)
    # cosine's factors are rounded to float32
    tolerance = 1e-6 if schedule == "cosine" else 1e-10
    assert_all_same(weights(run.learners[0].model), weights(model), tolerance)
    assert_rows(run.history, rows)


@pytest.mark.parametrize("build", [mlp, cnn])
@pytest.mark.parametrize("rule", ["dll", "dll:released", "dll:kolen-pollack"])
def test_dll_equals_a_loop_over_credit_with_thetas_rate_scaled(build: Callable, rule: str) -> None:
    options = {"theta_rate": 0.125}
    run = fit(build, seeds=[2], rule=rule, options=options, label_smoothing=0.1)
    learner, rows, _ = by_hand(2, build=build, rule=rule, options=options, smoothing=0.1)
    assert_all_same(weights(run.learners[0]), weights(learner), 1e-9)
    assert_rows(run.history, rows)


@pytest.mark.parametrize(
    ("name", "options", "optimizer"),
    [
        ("adamw", {"weight_decay": 0.1}, lambda p, lr: torch.optim.AdamW(p, lr, weight_decay=0.1)),
        ("sgd", {"momentum": 0.5}, lambda p, lr: torch.optim.SGD(p, lr, momentum=0.5)),
        ("sgd", {}, torch.optim.SGD),
        ("adam", {"betas": (0.5, 0.75)}, lambda p, lr: torch.optim.Adam(p, lr, betas=(0.5, 0.75))),
    ],
)
@pytest.mark.parametrize("stack", [True, False])
def test_every_optimizer_is_torchs_own_with_its_options(
    name: str, options: dict, optimizer: Callable, stack: bool
) -> None:
    run = fit(seeds=2, optimizer=name, optimizer_options=options, stack=stack)
    for seed, learner in enumerate(run.learners):
        expected, rows, _ = by_hand(seed, optimizer=optimizer)
        assert_all_same(weights(learner.model), weights(expected), 1e-10)
        assert_rows(run.of_seed(seed), rows)


@pytest.mark.parametrize("stack", [True, False])
def test_momentum_waits_for_layers_that_the_first_phases_leave_out(stack: bool) -> None:
    """`ipc`'s errors reach the lower layers later; torch's fused kernel wants all of a group's buffers, or none."""
    whole = {"batch_size": len(data()[0]), "epochs": 3, "schedule": "constant", "lr": 0.01}
    run = fit(rule="ipc", seeds=2, optimizer="sgd", optimizer_options={"momentum": 0.5}, stack=stack, **whole)
    for seed, trained in enumerate(run.learners):
        torch.manual_seed(seed)
        learner = apical.make("ipc", mlp())
        optim = torch.optim.SGD(learner.param_groups(lr=0.01), momentum=0.5, fused=False)
        for _ in range(3):
            learner.step(data()[0].double(), data()[1], optim)
        assert_all_same(weights(trained), weights(learner), 1e-7)  # rates are float32


@pytest.mark.parametrize("stack", [True, False])
def test_each_seed_is_clipped_on_its_own_by_its_whole_norm(stack: bool) -> None:
    def build() -> nn.Sequential:
        model = mlp()
        with torch.no_grad():  # the bold seed's gradients are large, the meek one's are not
            model[-1].weight.mul_(40.0 if seed_now() == 0 else 0.5)
        return model

    clip = 1.5
    run = fit(build, seeds=2, clip=clip, optimizer="sgd", stack=stack)
    norms = []
    for seed, learner in enumerate(run.learners):
        expected, _, norm = by_hand(seed, build=build, clip=clip, optimizer=torch.optim.SGD)
        norms.append(norm)
        assert_all_same(weights(learner.model), weights(expected), 1e-10)
    assert norms[0][0] > 2 * clip
    assert max(norms[1]) < clip  # so this seed must not have been touched at all
    free = fit(build, seeds=[1], optimizer="sgd")
    assert_all_same(weights(run.learners[1]), weights(free.learners[0]), 1e-10)


@pytest.mark.parametrize("stack", [True, False])
def test_a_clipped_step_is_as_long_as_the_clip_says(stack: bool) -> None:
    one = {"epochs": 1, "batch_size": 29, "schedule": "constant", "optimizer": "sgd", "lr": 1.0}
    run = fit(seeds=3, clip=1e-3, rule="dll", options={"theta_rate": 1.0}, stack=stack, **one)
    for seed, learner in enumerate(run.learners):
        torch.manual_seed(seed)
        before = apical.make("dll", mlp(), theta_rate=1.0)
        moved = [(p - q).detach() for p, q in zip(learner.parameters(), before.parameters(), strict=True)]
        assert float(torch.cat([m.flatten() for m in moved]).norm()) == pytest.approx(1e-3, rel=1e-2)


# Seeds.


@every_rule
@pytest.mark.parametrize("name", mostly_slow(BUILDERS, quick=["noisy", "noisy_cnn"]))
def test_stacked_seeds_equal_separate_ones_and_those_run_alone(rule: str, name: str) -> None:
    settings: dict[str, Any] = {"rule": rule, "epochs": 2, "alignment": True}
    stacked = fit(BUILDERS[name], seeds=[3, 0, 8], stack=True, **settings)
    separate = fit(BUILDERS[name], seeds=[3, 0, 8], stack=False, **settings)
    for k, seed in enumerate([3, 0, 8]):
        alone = fit(BUILDERS[name], seeds=[seed], **settings)
        for together in (stacked, separate):
            assert_all_same(weights(together.learners[k]), weights(alone.learners[0]), 1e-9)
            for row, expected in zip(together.of_seed(seed), alone.history, strict=True):
                for kind in ("feedback", "update"):
                    assert_close(row["alignment"][kind], expected["alignment"][kind])
                assert_rows([row | {"alignment": 0}], without_time([expected | {"alignment": 0}]))


@pytest.mark.parametrize("stack", [True, False])
def test_the_same_seeds_give_the_same_run_and_others_another(stack: bool) -> None:
    one, two = (fit(noisy, rule="dll", seeds=[4, 1], stack=stack) for _ in range(2))
    assert without_time(one.history) == without_time(two.history)
    for a, b in zip(one.learners, two.learners, strict=True):
        assert all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))
    assert one.of_seed(4)[0]["loss"] != one.of_seed(1)[0]["loss"]
    for p, q in zip(one.learners[0].parameters(), one.learners[1].parameters(), strict=True):
        assert not torch.equal(p, q)


class Seen:
    """A loss that notes which targets it is asked about, in order: y holds the number of each example."""

    __name__ = "seen"

    def __init__(self) -> None:
        self.batches: list[list[int]] = []

    def __call__(self, output: Tensor, y: Tensor) -> Tensor:
        self.batches.append([int(v) for v in y[:, 0]])
        return (output[:, :1] - y).square().sum(1)


def numbered(train: int, test: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    x_train, _, x_test, _ = data(train, test)
    y = torch.arange(float(train + test)).unsqueeze(1)
    return x_train, y[:train], x_test, y[train:]


def test_every_epoch_shows_every_example_once_in_an_order_of_its_own() -> None:
    orders = []
    for seed in (0, 1):
        seen = Seen()
        fit(on=numbered(29, 11), loss=seen, seeds=[seed], epochs=3)
        sizes = [len(batch) for batch in seen.batches]
        assert sizes == [8, 8, 8, 5, 11] * 3  # the tail counts; then the test set, once
        for epoch in range(3):
            batches = seen.batches[5 * epoch : 5 * epoch + 4]
            order = [n for batch in batches for n in batch]
            assert sorted(order) == list(range(29))
            orders.append(order)
            assert seen.batches[5 * epoch + 4] == list(range(29, 40))
    assert len({tuple(order) for order in orders}) == 6


def test_a_batch_larger_than_the_data_is_the_whole_of_it() -> None:
    seen = Seen()
    fit(on=numbered(7, 2), loss=seen, epochs=1, batch_size=50)
    assert sorted(seen.batches[0]) == list(range(7))


@pytest.mark.parametrize("stack", [True, False])
def test_noise_is_new_at_every_step_of_every_epoch_and_seed(stack: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[Tensor] = []
    draw = apical.Learner.draw

    def spy(self: apical.Learner, x: Tensor, generator: torch.Generator | None = None) -> dict:
        noise = draw(self, x, generator)
        drawn.extend(value[:5] for value in noise.values())
        return noise

    monkeypatch.setattr(apical.Learner, "draw", spy)
    fit(noisy, seeds=2, epochs=3, stack=stack)
    assert len(drawn) == 2 * 3 * 4 * 2  # seeds, epochs, steps, dropout stages: evaluation draws none
    assert len({tuple(noise.flatten()[:20].tolist()) for noise in drawn}) == len(drawn)


def test_the_test_score_is_taken_without_dropout() -> None:
    run = fit(noisy)
    x, y = data()[2].double(), data()[3]
    model = run.learners[0].model.eval()
    with torch.no_grad():
        assert run.history[-1]["test_loss"] == pytest.approx(float(F.cross_entropy(model(x), y)), rel=1e-5)


# Rates.


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
def test_schedules_have_their_closed_form(schedule: str) -> None:
    rates = Settings("bp", "mlp", "custom", schedule=schedule).compute_rates(10).tolist()
    closed = {
        "constant": lambda t: 1.0,
        "linear": lambda t: 1 - t / 10,
        "cosine": lambda t: math.cos(math.pi * t / 20) ** 2,
    }[schedule]
    assert rates == pytest.approx([closed(t) for t in range(10)], abs=1e-7)


class Recorder(torch.optim.SGD):
    """Notes every group's rate at every step."""

    seen: list[dict[str, float]] = []  # noqa: RUF012 (one list for all, on purpose)

    def step(self, closure: Any = None) -> None:
        self.seen.append({group["name"]: float(group["lr"]) for group in self.param_groups})
        super().step()


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
def test_thetas_rate_is_a_fixed_share_of_ws_at_every_step(schedule: str) -> None:
    Recorder.seen = []
    fit(rule="dll", options={"theta_rate": 0.25}, optimizer=Recorder, schedule=schedule, epochs=3, lr=0.5)
    assert len(Recorder.seen) == 12
    for t, rates in enumerate(Recorder.seen):
        share = {"constant": 1.0, "linear": 1 - t / 12, "cosine": (1 + math.cos(math.pi * t / 12)) / 2}
        expected = 0.5 * share[schedule]
        assert rates == pytest.approx({"W": expected, "bias": expected, "theta": expected / 4}, abs=1e-7)


def test_an_optimizer_of_ones_own_steps_as_the_named_one_does() -> None:
    own = fit(seeds=2, optimizer=lambda groups: torch.optim.Adam(groups))
    named = fit(seeds=2, optimizer="adam")
    for a, b in zip(own.learners, named.learners, strict=True):
        assert_all_same(weights(a), weights(b), 1e-10)
    assert any("optimiser" in reason for reason in own.reasons)


# Protocols.


def test_clean_reports_the_last_epoch_and_paper_the_best() -> None:
    hard = data(29, 40, seed=3)
    settings: dict[str, Any] = {"on": hard, "seeds": 3, "epochs": 12, "lr": 0.1, "schedule": "constant"}
    clean, paper = fit(protocol="clean", **settings), fit(protocol="paper", **settings)
    last, best = [], []
    for learner, seed in zip(clean.learners, range(3), strict=True):
        with torch.no_grad():
            now = learner(hard[2].double()).argmax(1)
        last.append(float((now == hard[3]).double().mean()))
        best.append(max(row["test_accuracy"] for row in clean.of_seed(seed)))
    assert last != best  # else this test would show nothing
    assert clean.accuracies == pytest.approx(last)
    assert clean.accuracy == pytest.approx(sum(last) / 3)
    assert paper.accuracies == pytest.approx(best)


@pytest.mark.parametrize("score", ["test_loss", "test_mse", "test_mae"])
def test_the_best_epoch_of_an_error_is_its_smallest(score: str) -> None:
    """The held-out targets are the opposite of what is learned, so that every error is smallest somewhere before the end."""
    x, _, x_test, _ = data()
    y, y_test = x.flatten(1)[:, :3], -x_test.flatten(1)[:, :3]
    settings: dict[str, Any] = {"on": (x, y, x_test, y_test), "loss": "mse", "seeds": 2}
    clean, paper = fit(protocol="clean", **settings), fit(protocol="paper", **settings)
    curves = {seed: [row[score] for row in clean.of_seed(seed)] for seed in range(2)}
    assert all(min(curve) < curve[-1] for curve in curves.values())
    assert clean.scores(score) == {seed: curve[-1] for seed, curve in curves.items()}
    assert paper.scores(score) == {seed: min(curve) for seed, curve in curves.items()}


def test_validation_holds_out_the_same_tenth_for_every_seed_and_trains_on_the_rest() -> None:
    held = []
    for seed in (0, 1, 5):
        seen = Seen()
        fit(on=numbered(43, 6), loss=seen, protocol="validation", seeds=[seed], epochs=2)
        steps = [batch for batch in seen.batches if len(batch) != 4]
        tenths = [sorted(batch) for batch in seen.batches if len(batch) == 4]
        assert len(tenths) == 2
        assert tenths[0] == tenths[1]
        assert sorted(n for batch in steps[:5] for n in batch) == sorted(set(range(43)) - set(tenths[0]))
        assert all(n < 43 for batch in seen.batches for n in batch)  # nothing of the test set
        held.append(tenths[0])
    assert held[0] == held[1] == held[2]


def test_validation_never_touches_the_test_set() -> None:
    x, y, x_test, y_test = data()
    poisoned = Dataset(x, y, torch.full_like(x_test, math.nan), y_test + 1000, "custom", 3)
    run = fit(on=poisoned, protocol="validation", seeds=2)
    honest = fit(on=data(), protocol="validation", seeds=2)
    assert without_time(run.history) == without_time(honest.history)
    assert all(0 <= a <= 1 for a in run.accuracies)


def test_validation_of_a_single_example_is_refused() -> None:
    with pytest.raises(apical.ApicalError, match="at least two training examples"):
        fit(on=data(1, 3), protocol="validation")


# What `model` and `data` may be.


def test_a_model_of_the_users_own_is_trained_in_place() -> None:
    torch.manual_seed(0)
    model = mlp()
    run = fit(model)
    assert run.learners[0].model is model
    assert_all_same(weights(model), weights(by_hand(0)[0]), 1e-10)
    assert all(p.grad is None for p in model.parameters())


def test_a_learner_of_the_users_own_is_trained_in_place() -> None:
    torch.manual_seed(0)
    learner = apical.make("dll", mlp(), theta_rate=0.125, label_smoothing=0.1)
    run = fit(learner, rule=None)
    assert run.learners == [learner]
    assert run.settings.rule == "dll"
    assert run.settings.label_smoothing == 0.1  # its own, which is what the history is of
    expected, _, _ = by_hand(0, rule="dll", options={"theta_rate": 0.125}, smoothing=0.1)
    assert_all_same(weights(learner), weights(expected), 1e-9)


@pytest.mark.parametrize("other", [{"loss": "mse"}, {"label_smoothing": 0.2}, {"options": {"theta_rate": 1.0}}])
def test_what_a_learner_has_already_is_not_silently_ignored(other: dict) -> None:
    with pytest.raises(apical.ApicalError, match=r"leave them out|make\(\)"):
        fit(apical.make("dll", mlp()), rule=None, **other)


def test_a_frozen_layer_stays_as_it_is_and_the_others_learn() -> None:
    model = mlp()
    model[1].weight.requires_grad_(False)
    before = weights(model)
    fit(model, rule="dll")
    after = weights(model)
    assert torch.equal(after["1.weight"], before["1.weight"])
    assert not any(torch.equal(after[name], before[name]) for name in before if name != "1.weight")


@pytest.mark.parametrize("stack", [True, False])
def test_regression_has_losses_and_no_accuracy(stack: bool) -> None:
    x, _, x_test, _ = data()
    y, y_test = x.flatten(1)[:, :3], x_test.flatten(1)[:, :3]
    run = fit(on=(x, y, x_test, y_test), loss="mse", seeds=2, stack=stack)
    assert all("accuracy" not in row and "test_accuracy" not in row for row in run.history)
    for seed, learner in enumerate(run.learners):
        with torch.no_grad():
            half = 0.5 * (learner(x_test.double()) - y_test).square().sum(1).mean()
        assert run.of_seed(seed)[-1]["test_loss"] == pytest.approx(float(half), rel=1e-5)
        assert run.of_seed(seed)[-1]["loss"] < run.of_seed(seed)[0]["loss"]
    with pytest.raises(apical.ApicalError, match="no accuracy"):
        _ = run.accuracy


def test_integer_targets_that_only_the_users_loss_understands_have_no_accuracy() -> None:
    x, y, x_test, y_test = data()
    pairs = (x, torch.stack([y, y], 1), x_test, torch.stack([y_test, y_test], 1))
    run = fit(on=pairs, loss=lambda output, y: (output[:, :2] - y).square().sum(1))
    assert all("accuracy" not in row for row in run.history)


def test_a_named_model_on_a_named_data_set_learns() -> None:
    run = apical.fit("mlp", "digits", rule="bp", epochs=2, lr=5e-3, batch_size=32, seeds=2, progress=False)
    assert min(run.accuracies) > 0.8  # chance is 0.1
    assert run.settings.model == "mlp"
    assert run.settings.data == "digits"
    assert run.seconds_per_epoch > 0
    assert not run.learners[0].training


def test_an_epochs_time_is_that_of_epochs_after_the_first_which_also_captures() -> None:
    rows = [{"seed": seed, "epoch": k + 1, "seconds": t} for k, t in enumerate([9.0, 1.0, 3.0]) for seed in (0, 1)]
    assert seconds_per_epoch(rows) == 2.0
    assert seconds_per_epoch(rows[:2]) == 9.0
    assert math.isnan(seconds_per_epoch([]))


# What is refused, in one sentence.


def shared() -> Callable[[], nn.Sequential]:
    model = mlp()
    return lambda: model


def frozen() -> nn.Sequential:
    return mlp().requires_grad_(False)


def with_nan() -> tuple:
    x, y, x_test, y_test = data()
    x[3, 0, 1, 1] = math.nan
    return x, y, x_test, y_test


def with_values() -> tuple:
    x, _, x_test, _ = data()
    return x, torch.randn(len(x), 3), x_test, torch.randn(len(x_test), 3)


def with_label(label: int) -> tuple:
    x, y, x_test, y_test = data()
    y[5] = label
    return x, y, x_test, y_test


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "rule": ({"rule": "dlll"}, "unknown rule 'dlll'; did you mean 'dll'"),
    "empty rule": ({"rule": ""}, "unknown rule"),
    "variant": ({"rule": "dll:printed"}, "unknown rule"),
    "rule's option": ({"rule": "dll", "options": {"theta_sdt": 1}}, "no option 'theta_sdt'"),
    "rule's option without a value": (
        {"rule": "np", "options": {"sigma": None}},
        "sigma is None, but must be a number",
    ),
    "model": ({"model": "resnet"}, "unknown model 'resnet'"),
    "named model of other data": ({"model": "mlp"}, "no mlp is defined for the data 'custom'"),
    "not a model": ({"model": 3}, "nn.Sequential"),
    "not a sequential": ({"model": lambda: nn.Linear(16, 3), "rule": "dfa"}, "nn.Sequential"),
    "a module": ({"model": nn.Linear(16, 3), "rule": "dfa"}, "the model is a Linear; an nn.Sequential"),
    "data": ({"on": "mnits"}, "did you mean mnist"),
    "three tensors": ({"on": data()[:3]}, "four tensors"),
    "schedule": ({"schedule": "step"}, "unknown schedule 'step'"),
    "optimizer": ({"optimizer": "adm"}, "unknown optimizer 'adm'"),
    "optimizer's option": ({"optimizer_options": {"momentum": 0.9}}, "momentum"),
    "optimizer's rate": ({"optimizer_options": {"lr": 0.9}}, "lr"),
    "negative decay": ({"optimizer_options": {"weight_decay": -1.0}}, "'adam' cannot take {'weight_decay'"),
    "one beta": ({"optimizer_options": {"betas": 0.5}}, "'adam' cannot take {'betas'"),
    "word as momentum": ({"optimizer": "sgd", "optimizer_options": {"momentum": "x"}}, "'sgd' cannot take"),
    "protocol": ({"protocol": "best"}, "unknown protocol 'best'"),
    "precision": ({"precision": "fp8"}, "unknown precision 'fp8'"),
    "loss": ({"loss": "hinge"}, "unknown loss 'hinge'"),
    "label smoothing": ({"label_smoothing": 1.5}, "label_smoothing is 1.5"),
    "no device": ({"device": "gpu"}, "device 'gpu' cannot be used here"),
    "a device that holds nothing": ({"device": "meta"}, "device 'meta' cannot be used here"),
    "not a device": ({"device": None}, "device None cannot be used here"),
    "no epochs": ({"epochs": 0}, "epochs is 0"),
    "half an epoch": ({"epochs": 0.5}, "epochs is 0.5"),
    "true epochs": ({"epochs": True}, "epochs is True"),
    "no lr": ({"lr": 0}, "lr is 0"),
    "lr that is no number": ({"lr": math.nan}, "lr is nan"),
    "infinite lr": ({"lr": math.inf}, "lr is inf"),
    "lr None": ({"lr": None}, "lr is None"),
    "negative clip": ({"clip": -1.0}, "clip is -1.0"),
    "no batch": ({"batch_size": 0}, "batch_size is 0"),
    "no seeds": ({"seeds": 0}, "seeds is 0"),
    "an empty list of seeds": ({"seeds": []}, "at least one"),
    "a seed twice": ({"seeds": [1, 2, 1]}, "different whole numbers"),
    "a negative seed": ({"seeds": [-1]}, "from 0"),
    "a seed beyond the generator": ({"seeds": [10**30]}, "whole numbers"),
    "half a seed": ({"seeds": [0.5]}, "whole numbers"),
    "seeds of a built model": ({"model": mlp(), "seeds": 2}, "one seed; pass a function"),
    "seeds of a learner": ({"model": apical.make("bp", mlp()), "seeds": 2}, "one seed; pass a function"),
    "one model for two seeds": ({"model": shared(), "seeds": 2}, "build a new model each time"),
    "another rule than the learner's": ({"model": apical.make("fa", mlp()), "rule": "bp"}, "rule is 'fa'"),
    "nothing to train": ({"model": frozen}, "nothing is left to train"),
    **{
        f"nothing to train but {rule}'s own": ({"model": frozen, "rule": rule}, "nothing is left to train")
        for rule in ("dll", "dll:released", "local", "tp", "dtp")
    },
    "values in the place of labels": ({"on": with_values()}, "loss='mse'"),
    "weights of two types": (
        {"model": lambda: nn.Sequential(nn.Flatten(), nn.Linear(16, 4), nn.Linear(4, 3).double())},
        "model.2.weight is torch.float64 and the first weights are torch.float32",
    ),
    "options in a list": ({"options": ["theta_std"]}, "options is ['theta_std'], but must be a dictionary"),
    "options in a text": ({"options": "theta_std=1"}, "options is 'theta_std=1', but must be a dictionary"),
    "the data's options in a text": (
        {"on": "digits", "data_options": "window=3"},
        "data_options is 'window=3', but must be a dictionary",
    ),
    "the optimizer's options in a list": ({"optimizer_options": [1]}, "optimizer_options is [1]"),
    "an optimizer with a closure": ({"optimizer": torch.optim.LBFGS}, "LBFGS needs a closure"),
    "a function that makes one": (
        {"optimizer": lambda groups: torch.optim.LBFGS(groups[0]["params"])},
        "LBFGS needs a closure",
    ),
    "a function that makes none": ({"optimizer": lambda groups: None}, "made None of the parameter groups"),
    "a number as checkpoint": ({"checkpoint": 5}, "checkpoint is 5, but must be the path"),
    "a label beyond the outputs": ({"on": with_label(3)}, "labels range from 0 to 3"),
    "a negative label": ({"on": with_label(-1)}, "labels count from 0"),
    "input of another shape": ({"on": (torch.ones(9, 15), torch.ones(9).long()) * 2}, "(batch, 15)"),
    "nan": ({"on": with_nan()}, "x_train[3] holds nan"),
    "resume of nothing": ({"resume": True}, "checkpoint=PATH"),
    "another suffix": ({"checkpoint": "run.pt"}, "ends in .safetensors"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_bad_input_is_refused_in_one_sentence_before_any_step(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    settings, words = REFUSED[what]
    settings = dict(settings)
    monkeypatch.setattr("apical.engine.replicas.ReplicaStack.step", lambda *_: pytest.fail("a step was taken"))
    with pytest.raises(apical.ApicalError) as caught:
        fit(settings.pop("model", mlp), **settings)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_cuda_without_cuda_is_refused() -> None:
    with pytest.raises(apical.ApicalError, match="device 'cuda' cannot be used here"):
        fit(device="cuda")


def test_a_scalar_loss_is_refused() -> None:
    with pytest.raises(apical.ApicalError, match="one value per example"):
        fit(loss=lambda output, y: F.cross_entropy(output, y))


def test_labels_that_are_probabilities_train() -> None:
    x, y, x_test, y_test = data()
    soft = [0.9 * F.one_hot(labels, 3).double() + 0.1 / 3 for labels in (y, y_test)]
    given, smoothed = fit(on=(x, soft[0], x_test, soft[1])), fit(label_smoothing=0.1)
    assert_all_same(weights(given.learners[0]), weights(smoothed.learners[0]))


def test_forward_forward_may_train_its_labels_alone() -> None:
    done = fit(lambda: plain_mlp().requires_grad_(False), rule="ff")
    assert done.history[-1]["epoch"] == 4


# What fit leaves alone.


@pytest.mark.parametrize("stack", [True, False])
@pytest.mark.parametrize("protocol", ["clean", "validation"])
@pytest.mark.parametrize("rule", ["dll", "wp", "np", "ff", "dtp"])
def test_global_random_state_is_not_touched(rule: str, stack: bool, protocol: str) -> None:
    before = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()
    fit(noisy, rule=rule, seeds=2, stack=stack, protocol=protocol, alignment=True)
    after = torch.get_rng_state(), np.random.get_state()[1], random.getstate()
    assert torch.equal(before[0], after[0])
    assert (before[1] == after[1]).all()
    assert before[2] == after[2]


def test_the_number_of_threads_is_given_back_whatever_happens() -> None:
    def interrupted(output: Tensor, y: Tensor) -> Tensor:
        assert torch.get_num_threads() == 1  # tiny networks are faster that way
        raise KeyboardInterrupt

    torch.set_num_threads(2)
    try:
        fit()
        assert torch.get_num_threads() == 2
        with pytest.raises(KeyboardInterrupt):
            fit(loss=interrupted)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(1)


FLAGS = """
import torch, runs
from apical.engine.device import use_precision as set_precision

def flags():
    return (torch.get_float32_matmul_precision(), torch.backends.cuda.matmul.allow_tf32,
            torch.backends.cudnn.allow_tf32, torch.backends.cudnn.benchmark)

for name in ("highest", "medium"):
    torch.set_float32_matmul_precision(name)
    before = flags()
    runs.fit(epochs=1)
    for precision, inside in (("tf32", "tf32"), ("float32", "ieee")):
        with set_precision(precision, torch.device("cuda")):
            assert torch.backends.cuda.matmul.fp32_precision == inside
            assert torch.backends.cudnn.conv.fp32_precision == inside
    assert flags() == before, flags()
torch.set_float32_matmul_precision("highest")
torch.backends.cuda.matmul.fp32_precision = "tf32"  # the newer way, which the older cannot read
runs.fit(epochs=1)
assert torch.backends.cuda.matmul.fp32_precision == "tf32"
print("ok")
"""


@pytest.mark.slow
def test_precision_flags_are_given_back_however_the_user_set_them() -> None:
    path = [entry for entry in sys.path if entry]
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path[:0] = {path!r}\n{FLAGS}"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == "ok\n", done.stderr


# The bar.


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_watched_run_shows_loss_accuracy_and_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("rich")
    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("TERM", "xterm")
    run = fit(progress=True)
    shown = screen.getvalue()
    assert "bp mlp custom" in shown
    assert f"loss {run.history[-1]['loss']:.4f}" in shown
    assert f"test {100 * run.history[-1]['test_accuracy']:.2f}%" in shown
    assert "0:00:0" in shown


def test_without_a_terminal_each_epoch_is_one_line_as_it_passes(capsys: pytest.CaptureFixture[str]) -> None:
    shown: list[str] = []
    run = fit(progress=True, epochs=3, on_epoch=lambda rows: shown.append(capsys.readouterr().err))
    for row, line in zip(run.history, shown, strict=True):
        assert line.startswith(f"bp mlp custom: epoch {row['epoch']}/3  loss {row['loss']:.4f}  test ")
        assert f"{100 * row['test_accuracy']:.2f}%" in line
        assert re.search(r"  \d+ s left\n$", line)
    fit(progress=False)
    assert capsys.readouterr() == ("", "")


def test_a_line_is_in_the_file_when_its_epoch_ends(tmp_path: Path) -> None:
    path, counts = tmp_path / "said.txt", []
    with path.open("w") as file:
        fit(progress=file, epochs=3, on_epoch=lambda rows: counts.append(path.read_text().count("\n")))
    assert counts == [1, 2, 3]


def test_the_lines_go_to_a_file_of_ones_own_beside_the_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("rich")
    screen, file = Terminal(), io.StringIO()
    monkeypatch.setattr(sys, "stderr", screen)
    fit(progress=file, epochs=2)
    assert [line.split()[4] for line in file.getvalue().splitlines()] == ["1/2", "2/2"]
    assert "bp mlp custom" in screen.getvalue()


# Alignment.


def cosine(a: Tensor, b: Tensor) -> float:
    return float(((a * b).sum() / (a.norm() * b.norm())).detach())


def test_backpropagation_aligns_with_itself_everywhere() -> None:
    for build in (mlp, cnn):
        aligned = fit(build, alignment=True).history[-1]["alignment"]
        assert aligned["feedback"] == [None, pytest.approx(1), pytest.approx(1)]
        assert aligned["update"] == pytest.approx([1, 1, 1])


@pytest.mark.parametrize(
    "settings", [{"loss": "mse"}, {"label_smoothing": 0.5}, {"loss": "mse", "label_smoothing": 0.5}]
)
def test_an_update_is_compared_with_backpropagation_of_the_same_loss(settings: dict[str, Any]) -> None:
    for row in fit(alignment=True, **settings).history:
        assert row["alignment"]["update"] == pytest.approx([1, 1, 1])


@pytest.mark.parametrize("stack", [True, False])
def test_feedback_alignments_cosines_are_those_of_b_with_w_and_of_its_update_with_autograds(stack: bool) -> None:
    from reference import autograd, cross_entropy, feedback_pass, plain

    run = fit(noisy, rule="fa", seeds=2, alignment=True, stack=stack)
    x, y = data()[0].double(), data()[1]
    for seed, learner in enumerate(run.learners):
        learner.eval()
        model, b = plain(learner.model), learner.feedback_weights
        found = run.of_seed(seed)[-1]["alignment"]
        assert found["feedback"] == [None, pytest.approx(cosine(b[1], model[5].weight))]
        ours = feedback_pass(model, x, y, cross_entropy(), b).grads
        theirs = autograd(model, F.cross_entropy(model(x), y))
        names = ["model.2.weight", "model.5.weight"]
        assert found["update"] == pytest.approx([cosine(ours[n], theirs[n]) for n in names])
        assert found["update"][0] < 0.999


def test_dll_with_theta_equal_to_w_aligns_fully_and_kolen_pollack_keeps_it_so() -> None:
    learner = apical.make("dll:kolen-pollack", cnn())
    with torch.no_grad():
        for theta, w in zip(learner.feedback_weights[1:], learner.forward_weights[1:], strict=True):
            theta.copy_(w)
    for row in fit(learner, rule=None, alignment=True).history:
        assert row["alignment"]["feedback"] == [None, pytest.approx(1), pytest.approx(1)]
        assert row["alignment"]["update"] == pytest.approx([1, 1, 1])


def test_there_is_no_cosine_where_there_is_nothing_to_compare() -> None:
    readout = fit(rule="readout", alignment=True).history[-1]["alignment"]
    assert readout == {"feedback": [None, None, None], "update": [None, None, pytest.approx(1)]}
    run = fit(rule="dfa", alignment=True)
    direct = run.history[-1]["alignment"]["feedback"]
    learner = run.learners[0]
    # B of the last layer alone has W's shape: it comes from the output, to that layer's input.
    last = cosine(learner.feedback_weights[2], learner.forward_weights[2])
    assert direct == [None, None, pytest.approx(last)]


@pytest.mark.parametrize("rule", ["bp", "fa", "dfa", "dll", "dll:kolen-pollack"])
def test_a_local_loss_is_half_the_square_of_the_error_that_arrives_at_a_layers_output(rule: str) -> None:
    """By autograd, one layer at a time: ξ is −∂loss at the output, and below it what the feedback weights bring down."""
    from reference import plain

    run = fit(rule=rule, alignment=True)
    (learner,) = run.learners
    model = plain(learner.model)
    x, y = data()[0].double(), data()[1]
    stages = list(model)
    first, second, third = stages[1:3], stages[3:5], stages[5:]
    u = [stages[0](x)]
    for layer in (first, second, third):
        inside = u[-1].detach().requires_grad_()
        for stage in layer:
            inside = stage(inside)
        u.append(inside)
    top = -torch.autograd.grad(F.cross_entropy(u[3], y, reduction="sum"), u[3], retain_graph=True)[0]
    errors = {2: top}
    _, b1, b2 = learner.feedback_weights
    assert b1 is not None
    assert b2 is not None
    errors[1] = top @ b2
    drive = model[3](u[1])
    (below,) = torch.autograd.grad(model[4](drive), drive, errors[1])
    errors[0] = (top if rule == "dfa" else below) @ b1
    expected = [float((errors[i].detach() ** 2).sum() / (2 * len(x))) for i in range(3)]
    assert run.history[-1]["alignment"]["local"] == pytest.approx(expected)


def test_an_epoch_is_told_of_once_it_is_saved_and_may_end_the_run(tmp_path: Path) -> None:
    path, told = tmp_path / "run.safetensors", []

    def watch(rows: list[dict[str, Any]]) -> None:
        assert checkpoints.load(path).history[-len(rows) :] == rows
        told.extend(rows)
        if rows[0]["epoch"] == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fit(seeds=2, checkpoint=path, on_epoch=watch)
    rest = fit(seeds=2, checkpoint=path, resume=True, on_epoch=told.extend)
    assert told == rest.history
    assert without_time(told) == without_time(fit(seeds=2).history)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time, which stands still unless a test lets it pass."""
    now = [0.0]
    monkeypatch.setattr("apical.engine.loop.FAST_SAVE_SECONDS", 0.5)
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    return now


@pytest.mark.parametrize(
    ("takes", "epochs"), [(0.4, [1, 2, 3, 4, 5]), (1.0, [1, 2, 3, 4, 5]), (1.5, [1, 3, 5]), (99.0, [1, 5])]
)
def test_checkpoints_take_at_most_a_tenth_of_the_time_and_the_last_is_always_written(
    takes: float, epochs: list[int], tmp_path: Path, clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    saved: list[int] = []

    def save(path: Path, checkpoint: checkpoints.Checkpoint) -> None:
        clock[0] += takes
        saved.append(checkpoint.epoch)

    def tick(rows: list[dict[str, Any]]) -> None:
        clock[0] += 10.0  # the next epoch

    monkeypatch.setattr(checkpoints, "save", save)
    fit(checkpoint=tmp_path / "run.safetensors", on_epoch=tick, epochs=5)
    assert saved == epochs


def test_a_checkpoint_that_is_written_at_once_is_written_after_every_epoch_however_short(
    tmp_path: Path, clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    saved: list[int] = []

    def save(path: Path, checkpoint: checkpoints.Checkpoint) -> None:
        clock[0] += 0.49
        saved.append(checkpoint.epoch)

    monkeypatch.setattr(checkpoints, "save", save)
    fit(checkpoint=tmp_path / "run.safetensors")
    assert saved == [1, 2, 3, 4]


@pytest.mark.parametrize(("speed", "epochs"), [(1e9, [1, 2, 3, 4, 5]), (1e4, [3, 4, 5])])
def test_a_large_run_waits_before_its_first_checkpoint_too(
    speed: float, epochs: list[int], tmp_path: Path, clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """3,000 weights in double precision take 2.4 s at 1e4 bytes per second, so 21.6 s pass first."""
    saved: list[int] = []

    def build() -> nn.Sequential:
        layers = nn.Linear(6, 375, bias=False), nn.Tanh(), nn.Linear(375, 2, bias=False)
        return nn.Sequential(*layers).double()

    x, y = torch.randn(8, 6, dtype=torch.float64), torch.randint(0, 2, (8,))
    monkeypatch.setattr("apical.engine.loop.ASSUMED_WRITE_SPEED", speed)
    monkeypatch.setattr(checkpoints, "save", lambda path, checkpoint: saved.append(checkpoint.epoch))

    def tick(rows: list[dict[str, Any]]) -> None:
        clock[0] += 11.0

    path = tmp_path / "run.safetensors"
    apical.fit(build, (x, y, x, y), rule="bp", epochs=5, checkpoint=path, on_epoch=tick, progress=False)
    assert saved == epochs


def test_without_the_end_the_last_checkpoint_is_the_one_to_go_on_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, saved = tmp_path / "run.safetensors", []
    save = checkpoints.save

    def spy(path: Path, checkpoint: checkpoints.Checkpoint) -> None:
        save(path, checkpoint)
        saved.append(checkpoint.epoch)

    monkeypatch.setattr(checkpoints, "save", spy)
    whole = fit(checkpoint=path, save_end=False)
    assert saved == [1, 2, 3]
    again = fit(checkpoint=path, resume=True)
    assert [row["test_loss"] for row in again.history] == [row["test_loss"] for row in whole.history]


def test_what_a_callback_raises_between_checkpoints_loses_no_epoch(
    tmp_path: Path, clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "run.safetensors"
    save = checkpoints.save

    def slowly(path: Path, checkpoint: checkpoints.Checkpoint) -> None:
        save(path, checkpoint)
        clock[0] += 1e6

    monkeypatch.setattr(checkpoints, "save", slowly)

    def stop(rows: list[dict[str, Any]]) -> None:
        if rows[0]["epoch"] == 3:
            raise TimeoutError

    with pytest.raises(TimeoutError):
        fit(checkpoint=path, on_epoch=stop)
    assert checkpoints.load(path).epoch == 3


def test_measuring_alignment_changes_nothing_and_is_off_by_default() -> None:
    measured, plain = (fit(noisy, rule="dll", seeds=2, alignment=on) for on in (True, False))
    assert "alignment" not in plain.history[0]
    for a, b in zip(measured.learners, plain.learners, strict=True):
        assert all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))


@pytest.mark.parametrize("stack", [True, False])
def test_noise_that_alignment_is_measured_with_was_not_learned_from(
    stack: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`wp` shakes its weights by as many numbers in a batch of any size, so that equal draws would be seen to be equal."""
    drawn: list[tuple[float, ...]] = []
    draw = apical.RULES["wp"].draw

    def spy(self: apical.Learner, x: Tensor, generator: torch.Generator | None = None) -> dict[str, Tensor]:
        noise = draw(self, x, generator)
        drawn.append(tuple(noise["model.1.weight"].flatten().tolist()))
        return noise

    monkeypatch.setattr(apical.RULES["wp"], "draw", spy)
    fit(rule="wp", seeds=2, epochs=2, alignment=True, stack=stack)
    assert len(drawn) == 2 * 2 * (4 + 1)  # seeds, epochs, and the steps and the measurement of each
    assert len(set(drawn)) == len(drawn)


def test_float32_models_train_in_float32() -> None:
    run = fit(lambda: mlp().float(), seeds=2)
    assert all(p.dtype is torch.float32 for learner in run.learners for p in learner.parameters())
    double = fit(mlp, seeds=2)
    for a, b in zip(run.learners, double.learners, strict=True):
        for p, q in zip(a.parameters(), b.parameters(), strict=True):
            assert_same(p.double(), q, 1e-3)
    assert RUN["device"] == run.device == "cpu"


# Faster ways that must not change the result.


@pytest.mark.parametrize("stack", [True, False])
def test_bfloat16_products_train_alike_and_leave_the_weights_in_float32(stack: bool) -> None:
    def build() -> nn.Sequential:
        return mlp().float()

    exact = fit(build, rule="dll", seeds=2, stack=stack, precision="float32")
    rough = fit(build, rule="dll", seeds=2, stack=stack, precision="bf16")
    assert not torch.is_autocast_enabled("cpu")
    for row, other in zip(rough.history, exact.history, strict=True):
        assert row["loss"] == pytest.approx(other["loss"], rel=0.05)
        assert row["loss"] != other["loss"], "bfloat16 was not used"
    assert all(p.dtype == torch.float32 for p in rough.learners[0].parameters())


def test_a_run_that_is_not_compiled_says_why() -> None:
    assert any("torch.compile: compiling for the CPU" in reason for reason in fit().reasons)
    assert any("compile=False" in reason for reason in fit(compile=False).reasons)


@pytest.mark.slow
@pytest.mark.no_cover
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile wants a C++ compiler on the CPU")
@pytest.mark.parametrize("rule", ["dll", "sign"])
@pytest.mark.parametrize("stack", [True, False])
def test_a_compiled_run_equals_the_plain_one(rule: str, stack: bool) -> None:
    plain = fit(rule=rule, seeds=2, stack=stack)
    compiled = fit(rule=rule, seeds=2, stack=stack, compile=True)
    assert not any("torch.compile" in reason for reason in compiled.reasons)
    for one, other in zip(compiled.learners, plain.learners, strict=True):
        assert_all_same(weights(one), weights(other), tolerance=1e-8)


@pytest.mark.slow
@pytest.mark.no_cover
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile wants a C++ compiler on the CPU")
def test_all_phases_of_a_rule_are_compiled_however_many() -> None:
    options = {"sweeps": torch._dynamo.config.recompile_limit + 1}
    plain, compiled = (fit(rule="ipc", epochs=1, options=options, compile=c) for c in (False, True))
    assert not any("torch.compile" in reason for reason in compiled.reasons)
    assert_all_same(weights(compiled.learners[0]), weights(plain.learners[0]), tolerance=1e-8)


def test_what_cannot_be_compiled_runs_as_it_is_and_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(function: object, **_: object) -> Callable:
        def call(*_: object) -> None:
            raise RuntimeError("no compiler here\nand more")

        return call

    monkeypatch.setattr(torch, "compile", broken)
    plain, tried = fit(rule="dll", compile=False), fit(rule="dll", compile=True)
    assert "torch.compile: no compiler here" in tried.reasons
    assert_all_same(weights(tried.learners[0]), weights(plain.learners[0]), tolerance=0.0)


def test_only_whole_batches_are_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """A smaller one at the end of an epoch is not worth a second compilation."""
    sizes: list[int] = []

    def compiling(function: Callable, **_: object) -> Callable:
        def call(params: object, state: object, x: Tensor, *rest: object) -> object:
            sizes.append(len(x))
            return function(params, state, x, *rest)

        return call

    monkeypatch.setattr(torch, "compile", compiling)
    fit(compile=True)
    assert sizes == [8] * 12  # 29 examples: three whole batches and one of five, in each of four epochs


@pytest.mark.parametrize("build", [mlp, cnn])
@pytest.mark.parametrize(("rule", "options"), [("ipc", {}), ("dtp", {"sigma": 0.0, "inverse_steps": 2})])
def test_a_rule_of_several_phases_equals_a_loop_over_step(build: Callable, rule: str, options: dict) -> None:
    run = fit(build, rule=rule, options=options, schedule="constant")
    x, y, _, _ = data()
    torch.manual_seed(0)
    learner = apical.make(rule, build(), input_shape=(1, 4, 4), **options)
    optim = torch.optim.Adam(learner.param_groups(lr=RUN["lr"]))
    losses = []
    for epoch in range(RUN["epochs"]):
        total = 0.0
        for index in shuffle_indices(len(x), 0, epoch).split(RUN["batch_size"]):
            total += len(index) * float(learner.step(x[index].double(), y[index], optim).loss)
        losses.append(total / len(x))
    assert_all_same(weights(run.learners[0]), weights(learner))
    assert [row["loss"] for row in run.history] == pytest.approx(losses, rel=1e-5)


# Modules of the user's own.


class Surrogate(torch.autograd.Function):
    """A step whose derivative is that of a soft one; torch.vmap has no rule for it."""

    @staticmethod
    def forward(a: Tensor) -> Tensor:
        return (a > 0).to(a.dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, e: Tensor) -> Tensor:
        return e / (1 + ctx.saved_tensors[0].abs()) ** 2


class Classic(torch.autograd.Function):
    """The same in the style that torch.func cannot take."""

    @staticmethod
    def forward(ctx: Any, a: Tensor) -> Tensor:
        return (a > 0).to(a.dtype)


class Phi(nn.Module):
    def __init__(self, phi: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.phi = phi

    def forward(self, a: Tensor) -> Tensor:
        return self.phi(a)


def masked(a: Tensor) -> Tensor:
    a = a.clone()
    a[a < 0] = 0  # by a mask, which torch.vmap cannot do
    return a


def own(phi: Callable[[Tensor], Tensor]) -> Callable[[], nn.Sequential]:
    return lambda: nn.Sequential(nn.Flatten(), nn.Linear(16, 6), Phi(phi), nn.Linear(6, 3)).double()


@pytest.mark.parametrize("rule", ["bp", "dll", "np", "ff", "dtp"])
@pytest.mark.parametrize("phi", [Surrogate.apply, masked])
def test_what_cannot_be_stacked_trains_each_seed_alone(rule: str, phi: Callable[[Tensor], Tensor]) -> None:
    done = fit(own(phi), rule=rule, seeds=2)
    assert any(reason.startswith("stacked seeds: ") for reason in done.reasons)
    assert without_time(done.history) == without_time(fit(own(phi), rule=rule, seeds=2, stack=False).history)


def test_a_full_memory_is_no_reason_to_begin_again_without_stacks(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = []

    def full(*_: Any) -> None:
        steps.append(1)
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(ReplicaStack, "step", full)
    with pytest.raises(torch.OutOfMemoryError, match="out of memory"):
        fit(seeds=2, stack=True)
    assert len(steps) == 1


@pytest.mark.parametrize("resumed", [False, True])
def test_an_error_after_an_epoch_of_a_stack_ends_the_run(resumed: bool, tmp_path: Path) -> None:
    """That epoch has shown that the seeds can be stacked: another way would meet the same error, or hide it."""
    settings: dict[str, Any] = {"seeds": 2, "stack": True, "checkpoint": tmp_path / "run.safetensors"}
    if resumed:
        fit(**settings, stop_after=1)
    told: list[int] = []

    def broken(rows: list[dict[str, Any]]) -> None:
        told.extend(row["epoch"] for row in rows)
        raise RuntimeError("of the user's own")

    with pytest.raises(RuntimeError, match="of the user's own"):
        fit(**settings, resume=resumed, on_epoch=broken)
    assert told == [1 + resumed] * 2


@pytest.mark.parametrize("seeds", [1, 2])
@pytest.mark.parametrize(
    ("rule", "phi", "words"),
    [
        ("bp", Classic.apply, r"no derivative of module 2 \(Phi\(\)\).*setup_context"),
        ("wp", masked, "wp makes all of its passes at once.*boolean mask"),
        ("wp", Surrogate.apply, "wp makes all of its passes at once.*vmap"),
    ],
)
def test_a_module_that_a_rule_cannot_take_is_named(rule: str, phi: Any, words: str, seeds: int) -> None:
    with pytest.raises(UnsupportedError, match=words) as caught:
        fit(own(phi), rule=rule, seeds=seeds)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("stack", [True, False])
def test_momentum_may_be_dampened_in_a_rule_whose_phases_leave_weights_out(stack: bool) -> None:
    settings = {"optimizer": "sgd", "optimizer_options": {"momentum": 0.9, "dampening": 0.1}, "stack": stack}
    done = fit(plain_mlp, rule="ipc", seeds=2, **settings)

    def plainly(groups: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(groups, momentum=0.9, dampening=0.1)

    expected = fit(plain_mlp, rule="ipc", seeds=2, optimizer=plainly)
    for one, other in zip(done.learners, expected.learners, strict=True):
        assert_all_same(weights(one), weights(other), 1e-7)


def test_fit_shows_its_keywords_with_their_defaults_and_refuses_others() -> None:
    parameters = inspect.signature(apical.fit).parameters
    assert list(parameters)[:2] == ["model", "data"]
    assert all(p.kind is p.KEYWORD_ONLY for p in list(parameters.values())[2:])
    assert {f.name for f in fields(Settings)} < set(parameters)
    assert (parameters["epochs"].default, parameters["rule"].default) == (20, None)
    assert all(f"{name}" in str(apical.fit.__doc__) for name in ("stop_after", "optimizer_options", "save_end"))
    with pytest.raises(TypeError, match=r"^fit\(\) got an unexpected keyword argument 'epoch'$"):
        apical.fit("mlp", "digits", epoch=3)  # type: ignore[call-arg]


def test_options_of_an_optimiser_are_checked_by_name_when_declared_and_by_value_when_a_run_begins() -> None:
    with pytest.raises(apical.ApicalError, match="no option 'momentum'"):
        Settings("bp", "m", "d", optimizer_options={"momentum": 0.9})
    declared = Settings("bp", "m", "d", optimizer_options={"weight_decay": -1.0})
    with pytest.raises(apical.ApicalError, match="cannot take"):
        declared.check_optimizer_values()
