"""Trials on the pages: files of two folders are one list, and rules with different numbers of trials are made comparable."""

import itertools
import json
import math
import statistics
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from apical.bench import suites
from apical.bench.declaration import Request
from apical.bench.defaults import find_settings
from apical.bench.store import Store
from apical.bench.suites import list_jobs
from apical.errors import ApicalError
from stores import fill
from tools.pages.blocks import load_results, render_lines
from tools.pages.facts import Facts
from tools.pages.trials import collect_whole_scores, expect_best, load_trials, render_expected_best


def write_trials(path: Path, rule: str, scores: list[float | None], **fields: Any) -> None:
    """Append one trial for each score to a file; `fields` are the network and the trial's settings."""
    path.parent.mkdir(parents=True, exist_ok=True)
    usual = {"model": "mlp", "data": "cifar10", "command": "c", "trial": {}, "std": 0.0, "seeds": [0]}
    with path.open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(usual | fields | {"rule": rule, "test_accuracy": score}) + "\n" for score in scores)


@given(st.lists(st.floats(0, 100), min_size=1, max_size=7), st.integers(1, 7))
def test_the_expected_best_is_the_mean_over_all_draws(scores: list[float], count: int) -> None:
    draws = [max(draw) for draw in itertools.combinations(scores, count)]
    expected = expect_best(scores, count)
    if draws:
        assert expected == pytest.approx(statistics.fmean(draws))
    else:
        assert math.isnan(expected)


def test_files_of_the_same_name_are_one_list(tmp_path: Path) -> None:
    write_trials(tmp_path / "tuning" / "whole-cifar10-mlp-np.jsonl", "np", [0.25])
    write_trials(tmp_path / "tuning" / "pending" / "whole-cifar10-mlp-np.jsonl", "np", [0.5, None])
    trials = load_trials(tmp_path)
    assert len(trials["whole-cifar10-mlp-np"]) == 3
    assert sorted(collect_whole_scores(trials, "cifar10", "mlp")["np"]) == [0, 25, 50]  # one that diverged has 0


def test_short_trials_and_other_networks_have_no_part_in_an_equal_budget(tmp_path: Path) -> None:
    write_trials(tmp_path / "whole-cifar10-mlp-bp.jsonl", "bp", [0.1, 0.2, 0.3])
    write_trials(tmp_path / "cifar10-mlp-bp.jsonl", "bp", [0.9])
    write_trials(tmp_path / "whole-cifar10-cnn-fa.jsonl", "fa", [0.5], model="cnn")
    lines = render_expected_best(load_trials(tmp_path), "cifar10", 2)
    assert lines[2:] == ["| `bp` | 26.67 | 30.00 | 3 | – | – | – |"]  # (20 + 30 + 30) / 3; fa has one trial only


def test_a_rule_whose_best_trial_is_not_its_recorded_settings_is_named(store: Store, tmp_path: Path) -> None:
    recorded = find_settings("np", "mlp", "cifar10")
    own = {"lr": recorded["lr"], **recorded["options"]}
    path = tmp_path / "tuning" / "whole-cifar10-mlp-np.jsonl"

    def find_better(*trials: tuple[dict[str, Any], float | None]) -> list[tuple[str, str, float, float]]:
        path.unlink(missing_ok=True)
        for trial, score in trials:
            write_trials(path, "np", [score], trial=trial)
        results = load_results(store, tmp_path)
        return Facts(results.cells, lambda asked: [asked], results.trials).better_trials("cifar10", "rules")

    other = own | {"lr": 7 * own["lr"]}
    assert find_better((own, 0.5), (other, 0.25), (other, None)) == []
    assert find_better((own, 0.25), (other, 0.5)) == [("np", "mlp", 25, 50)]
    ((*_, used, best),) = find_better((other, 0.5))
    assert math.isnan(used), "the recorded settings were never tried at full length"
    assert best == 50
    _control, job = list_jobs(suites.load("rules"), Request(rules=["np"], models=["mlp"], data=["cifar10"]))
    assert job.declaration is not None
    fill(store, job.declaration, [60.0] * 4)
    assert find_better((other, 0.5)) == [], "the runs with the recorded settings came out better than that trial"


def test_the_worth_of_a_decay_is_unknown_where_a_trial_is_missing(store: Store, tmp_path: Path) -> None:
    path = tmp_path / "tuning" / "whole-cifar10-mlp-bp.jsonl"
    write_trials(path, "bp", [0.4], trial={"lr": 1e-3})
    write_trials(path, "bp", [0.5], trial={"lr": 1e-3, "optimizer_options": {"weight_decay": 0.001}})
    results = load_results(store, tmp_path)
    facts = Facts(results.cells, lambda asked: [asked], results.trials)
    assert facts.decay_gain("bp", "mlp", "cifar10", "adam") == pytest.approx(10)
    assert math.isnan(facts.decay_gain("bp", "mlp", "cifar10", "adamw"))


@pytest.mark.parametrize("asked", ["count=3", "data=cifar10", "data=cifar10 count=0", "data=cifar10 count=x"])
def test_an_equal_budget_without_its_data_or_count_is_refused(asked: str, store: Store, tmp_path: Path) -> None:
    results = load_results(store, tmp_path)
    with pytest.raises(ApicalError, match="must name one data set and a number of trials"):
        render_lines(f"equal-budget {asked}", results)
    assert render_lines("equal-budget data=cifar10 count=3", results)
