"""Groups say what a store holds, of finished runs and of all others; what stands for a rule is chosen blindly."""

import math
import statistics
from typing import Any

import pytest

from apical.bench import suites
from apical.bench.declaration import Declaration
from apical.bench.defaults import find_settings
from apical.bench.store import Outcome, Store
from apical.report.groups import choose_headlines, collect, compare_groups
from stores import alter, declared, fill, history, outcome


def test_a_group_has_the_mean_the_deviation_and_the_papers_figure(store: Store, groups) -> None:
    fill(store, declared("dll"), [97.0, 98.0, 99.0], peak_memory=3_000_000)
    group = groups()["dll mlp mnist"]
    assert group.mean == pytest.approx(98.0)
    assert group.std == pytest.approx(1.0)
    assert (group.metric, group.seconds_per_epoch, group.peak_megabytes, group.state_counts) == (
        "accuracy",
        0.5,
        3.0,
        "3 done",
    )
    assert group.paper_difference is not None
    assert group.paper_difference.mean == pytest.approx(98.0 - 97.57)
    assert group.paper_difference.error == pytest.approx(math.sqrt(1 / 3 + 0.4**2 / 4))


def test_what_is_not_finished_is_there_with_its_epochs_but_has_no_score(store: Store, groups) -> None:
    declaration = declared("bp")
    assert store.claim(declaration, [0, 1, 2]) == [0, 1, 2]
    store.record(declaration, history(0, [50.0, 60.0]))
    one = groups()["bp mlp mnist"]
    assert (one.state_counts, one.scores, one.mean) == ("3 running", {}, None)
    assert [entry["epoch"] for entry in one.curves[0]] == [1, 2]
    store.finish(declaration, [0, 1], outcome({0: [50.0], 1: [70.0]}, {1: "boom"}))
    store.release(declaration, [2])
    two = groups()["bp mlp mnist"]
    assert two.state_counts == "1 done, 1 failed, 1 unfinished"
    assert two.scores == {0: 50.0}
    assert two.std == 0


def test_a_score_that_is_not_finite_is_no_score(store: Store, groups) -> None:
    declaration = declared("bp", "rnn", "electricity")
    store.claim(declaration, [0, 1])
    rows = [
        {"seed": seed, "epoch": 1, "loss": 1.0, "test_loss": 1.0, "test_mse": mse, "test_mae": 1.0, "seconds": 1}
        for seed, mse in ((0, math.nan), (1, 0.25))
    ]
    store.finish(declaration, [0, 1], Outcome(rows, {}, {}))
    group = groups()["bp rnn electricity"]
    assert (group.metric, group.scores) == ("mse", {1: 0.25})


def test_a_group_is_told_by_the_settings_that_differ_and_alignment_is_none(store: Store, groups) -> None:
    fill(store, declared("dll", lr=0.1, options={"theta_std": 0.5}), [90.0])
    fill(store, declared("dll", lr=0.2, alignment=True), [91.0])
    fill(store, declared("bp", lr=0.3), [92.0])
    assert list(groups()) == ["bp mlp mnist", "dll mlp mnist lr 0.1, theta_std 0.5", "dll mlp mnist lr 0.2"]


def test_folds_of_a_seed_are_values_of_one_group(store: Store, groups) -> None:
    fold = next(name for name in map(suites.load, suites.list_names()) if name.folds).folds
    for number, score in enumerate((80.0, 84.0)):
        asked = declared("bp", "textcnn", "subj").to_dict()
        fill(store, Declaration.from_dict({**asked, "data_options": {fold: number}}), [score, score + 1])
    (group,) = groups().values()
    assert sorted(group.scores.values()) == [80.0, 81.0, 84.0, 85.0]
    assert group.varied_text == ""


def test_a_run_without_a_fold_is_a_group_of_its_own_beside_the_folds(store: Store) -> None:
    for fold, score in ((None, 70.0), (0, 80.0), (1, 84.0)):
        asked = declared("bp", "textcnn", "subj").to_dict()
        fill(store, Declaration.from_dict({**asked, "data_options": {"fold": fold}}), [score])
    assert [sorted(group.scores.values()) for group in collect(store)] == [[70.0], [80.0, 84.0]]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({}, ""),
        ({"protocol": "paper"}, "best test epoch"),
        ({"protocol": "validation"}, "held-out training data"),
        ({"precision": "bf16"}, "bf16"),
        ({"protocol": "paper", "examples": 128}, "best test epoch, 128 examples"),
    ],
)
def test_a_score_that_is_not_the_usual_one_says_so(settings: dict[str, Any], words: str, store: Store, groups) -> None:
    fill(store, Declaration.from_dict({**declared("bp").to_dict(), **settings}), [90.0])
    assert groups()["bp mlp mnist"].caveat == words


def test_a_group_knows_its_suites_and_others_have_none(store: Store, groups) -> None:
    job = next(j for j in suites.list_jobs(suites.load("table1")) if j.declaration is not None)
    assert job.declaration is not None
    fill(store, job.declaration, [90.0])
    fill(store, declared("bp", "mlp", "digits", epochs=77), [90.0])
    known = [group.suites for group in groups().values()]
    assert () in known
    assert any("table1" in names for names in known)


def test_what_stands_for_a_rule_does_not_depend_on_its_score(store: Store) -> None:
    fill(store, declared("bp", lr=0.1), [10.0, 11.0])
    fill(store, declared("bp", lr=0.2), [99.0, 99.0])
    fill(store, declared("bp", lr=0.3), [99.0])
    fill(store, declared("bp", lr=0.4, protocol="paper"), [99.0, 99.0, 99.0])
    asked = declared("bp", lr=0.5).to_dict()
    fill(store, Declaration.from_dict({**asked, "examples": 128}), [99.0, 99.0, 99.0])
    (star,) = choose_headlines(collect(store)).values()
    assert star.settings["lr"] == 0.1  # whole data, clean, two seeds, and the first of its like
    fill(store, declared("bp", lr=0.6, epochs=21), [5.0, 5.0])
    (star,) = choose_headlines(collect(store)).values()
    assert star.settings["lr"] == 0.6  # more epochs


def test_recorded_settings_stand_for_a_rule_before_others_that_came_first(store: Store) -> None:
    fill(store, declared("bp", data="cifar10", epochs=30, lr=0.1), [99.0, 99.0])
    recorded = find_settings("bp", "mlp", "cifar10")
    fill(store, declared("bp", data="cifar10", **{**recorded, "optimizer_options": {}}), [99.0, 99.0])
    fill(store, declared("bp", data="cifar10", **recorded), [50.0, 50.0])
    fill(store, declared("bp", data="cifar10", **recorded, options={"x": 1}), [99.0, 99.0])
    (star,) = choose_headlines(collect(store)).values()
    assert star.mean == 50.0


def test_over_the_control_is_paired_by_seed(store: Store, groups) -> None:
    fill(store, declared("readout"), [80.0, 82.0, 90.0])
    fill(store, declared("fa"), [81.0, 84.0, 93.0])
    found = groups()
    difference = compare_groups(found["fa mlp mnist"], found["readout mlp mnist"])
    assert difference is not None
    assert difference.mean == pytest.approx(2.0)
    assert difference.error == pytest.approx(statistics.stdev([1, 2, 3]) / math.sqrt(3))
    assert compare_groups(found["fa mlp mnist"], None) is None


def test_where_less_is_better_less_beats_the_control(store: Store, groups) -> None:
    fill(store, declared("readout", "cnn", "tiny_imagenet"), [10.0, 11.0])
    fill(store, declared("fa", "cnn", "tiny_imagenet"), [30.0, 32.0])
    found = groups()
    better, control = found["fa cnn tiny_imagenet"], found["readout cnn tiny_imagenet"]
    assert (better.metric, better.mean) == ("error", pytest.approx(69.0))
    difference = compare_groups(better, control)
    assert difference is not None
    assert difference.mean == pytest.approx(20.5)
    assert difference.learns


def test_an_empty_store_has_no_groups(store: Store) -> None:
    assert collect(store) == []


@pytest.mark.parametrize("text", ["{", "[]", '{"rule": "bp"}'])
def test_a_damaged_run_is_told_in_one_sentence_and_the_others_are_there(text: str, store: Store) -> None:
    fill(store, declared("bp"), [90.0])
    fill(store, declared("dll"), [80.0])
    alter(store, "UPDATE runs SET declaration = ? WHERE rule = 'bp'", text)
    with pytest.warns(UserWarning, match=r"results\.sqlite: 1 run is damaged and left out"):
        assert len(collect(store)) == 1
