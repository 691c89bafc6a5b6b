"""Several settings at once: each trial is the run that `fit` would have made of it alone."""

import math
from typing import Any

import pytest
import torch
from torch import nn

import apical
from apical.engine.loop import Replica, group_replicas
from apical.engine.settings import Settings
from reference import assert_all_same
from runs import RUN, cnn, data, fit, mlp, weights, without_time

BUILDS = pytest.mark.parametrize("build", [mlp, cnn])


def sweep(trials: list[dict[str, Any]], model: Any = mlp, **settings: Any) -> list[apical.Fit]:
    return apical.sweep(model, data(), trials, **{"rule": "bp", **RUN, **settings})


def assert_each_is_its_own_run(trials: list[dict[str, Any]], model: Any = mlp, **settings: Any) -> None:
    together = sweep(trials, model, **settings)
    assert len(together) == len(trials)
    for trial, one in zip(trials, together, strict=True):
        alone = fit(model, **{**settings, **trial})
        assert one.settings == alone.settings
        assert len(one.learners) == len(alone.learners)
        for row, other in zip(without_time(one.history), without_time(alone.history), strict=True):
            assert row == pytest.approx(other, rel=1e-6)
        for learner, other in zip(one.learners, alone.learners, strict=True):
            assert_all_same(weights(learner), weights(other))


@BUILDS
@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
@pytest.mark.parametrize("stack", [True, False])
def test_learning_rates_train_together_as_they_do_alone(build: Any, optimizer: str, stack: bool) -> None:
    trials = [{"lr": 2.0**-k} for k in (4, 6, 9)]
    assert_each_is_its_own_run(trials, build, seeds=2, stack=stack, optimizer=optimizer, rule="dll")


@BUILDS
def test_options_of_the_rule_and_the_loss_may_differ(build: Any) -> None:
    trials: list[dict[str, Any]] = [
        {"options": {"theta_std": 0.3}},
        {"options": {"theta_std": 0.3}, "lr": 2.0**-5},
        {"options": {"sweeps": 2, "eta_x": 0.5}},
        {"label_smoothing": 0.2},
        {"loss": "mse"},
    ]
    assert_each_is_its_own_run(trials, build, seeds=[3, 1], rule="dll", stack=True)


@BUILDS
def test_rules_may_differ(build: Any) -> None:
    trials: list[dict[str, Any]] = [{"rule": "bp"}, {"rule": "dll"}, {"rule": "np", "options": {"samples": 2}}]
    assert_each_is_its_own_run(trials, build, seeds=2)


def test_clipping_and_the_optimisers_options_may_differ() -> None:
    trials: list[dict[str, Any]] = [
        {"clip": 0.1},
        {"clip": None},
        {"optimizer_options": {"weight_decay": 0.1}},
        {"optimizer_options": {"betas": (0.5, 0.9)}, "clip": 0.3},
    ]
    assert_each_is_its_own_run(trials, seeds=2, stack=True)


def test_a_trial_that_diverges_ends_alone() -> None:
    with pytest.warns(UserWarning, match="smaller learning rate than 1e"):
        broken, sound = sweep([{"lr": 1e30}, {"lr": 2.0**-6}], seeds=2)
    assert set(broken.failed) == {0, 1}
    assert math.isnan(broken.accuracy)
    assert not sound.failed
    assert without_time(sound.history) == without_time(fit(seeds=2).history)
    assert all(torch.isfinite(p).all() for learner in broken.learners for p in learner.parameters())


def test_who_is_stacked_with_whom() -> None:
    learner = apical.make("dll", nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 2)))

    def replica(seed: int, **settings: Any) -> Replica:
        return Replica(learner, seed, Settings("dll", "m", "d", **settings))

    replicas = [
        replica(0),
        replica(0, options={"theta_std": 1}),
        replica(1, lr=0.5),
        replica(1, options={"theta_std": 1}, clip=1.0),
        replica(0, label_smoothing=0.1),
    ]
    groups = [[replicas.index(one) for one in group] for group in group_replicas(replicas)]
    assert groups == [[0, 2], [1, 3], [4]]
    assert [len(group) for group in group_replicas([replica(s) for s in range(40)])] == [13, 13, 14]


@pytest.mark.parametrize(
    ("trials", "settings", "words"),
    [
        ([], {}, "at least one trial"),
        ([{"epochs": 3}], {}, "cannot differ in 'epochs'"),
        ([{"lr": 0.1}], {"momentum": 1}, "no setting 'momentum'"),
        ([{"lr": -1.0}], {}, "lr is -1.0"),
        ([{"options": {"nonsense": 1}}], {}, "no option 'nonsense'"),
        ([0.1, 0.01], {}, "a trial is 0.1, but must be a dictionary"),
        ({"lr": [0.1, 0.01]}, {}, "must be a list of one dictionary per trial"),
        (0.1, {}, "trials is 0.1, but must be a list"),
    ],
)
def test_bad_sweeps_are_refused_in_one_sentence(trials: list, settings: dict, words: str) -> None:
    with pytest.raises(apical.ApicalError, match=words) as caught:
        sweep(trials, **settings)
    assert "\n" not in str(caught.value)


def test_a_trial_adds_to_the_options_that_all_share() -> None:
    shared = {"optimizer": "sgd", "optimizer_options": {"momentum": 0.9}, "options": {"theta": "frozen"}, "rule": "dll"}
    own = {"optimizer_options": {"weight_decay": 0.1}, "options": {"theta_std": 0.3}}
    first, second = sweep([own, {"optimizer_options": {"momentum": 0.5}}], **shared)
    assert first.settings.optimizer_options == {"momentum": 0.9, "weight_decay": 0.1}
    assert first.settings.options == {"theta": "frozen", "theta_std": 0.3}
    assert second.settings.optimizer_options == {"momentum": 0.5}
    assert second.settings.options == {"theta": "frozen"}


def test_trials_may_come_one_by_one() -> None:
    fits = sweep({"lr": lr} for lr in (0.1, 0.01))
    assert [fit.settings.lr for fit in fits] == [0.1, 0.01]


def test_one_network_cannot_be_swept() -> None:
    with pytest.raises(apical.ApicalError, match="function that builds one"):
        sweep([{"lr": 0.1}], mlp())
