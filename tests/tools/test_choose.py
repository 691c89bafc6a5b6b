"""The settings that are used are those that the trials chose."""

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest

from apical.bench import defaults
from tools.choose import choose_best_trial, format_entry, load_trials

TUNING = Path(__file__).parents[2] / "results" / "tuning"
FAMILY = ("bp", "dfa", "dll", "dll:kolen-pollack")
KEPT = {
    **{("mnist", "mlp", rule): "one rate, the paper's, for the whole feedback family" for rule in FAMILY},
    ("mnist", "cnn", "fa"): "three images of the validation split less than the best",
}
"""Settings that are not the best trial's, and why; defaults.toml says so, too."""


def row(trial: dict[str, Any], **score: float | None) -> dict[str, Any]:
    return {"data": "etth1" if "mse" in score else "mnist", "model": "mlp", "trial": trial, **score}


IMAGES = {("mlp", "bp"), ("cnn", "ep"), ("cnn", "dll:kolen-pollack")}
SERIES = {("rnn", "bp"), ("rnn", "pc"), ("rnn", "dll:kolen-pollack")}
TUNED = {
    **dict.fromkeys(("mnist", "cifar10"), IMAGES),
    **dict.fromkeys(("exchange_rate", "etth1", "metr_la_week1"), SERIES),
    "svhn": {("cnn", "ep")},
    "tinyshakespeare": {("rnn", "pc")},
}
"""Some of the trials that each data set has."""


@pytest.mark.parametrize("data", list(TUNED))
def test_defaults_are_the_best_trials(data: str) -> None:
    if not TUNING.is_dir():
        pytest.skip("the results are not here: this is not a checkout")
    found = load_trials(TUNING, data)
    assert TUNED[data] <= found.keys()
    for (model, rule), rows in found.items():
        best = choose_best_trial(rows)
        assert best is not None
        own = tomllib.loads(format_entry(data, model, rule, best))[data][model]["rules"][rule]
        used, shared = (defaults.find_settings(name, model, data) for name in (rule, ""))
        assert (used == {**shared, **own}) != ((data, model, rule) in KEPT), (data, model, rule)


@pytest.mark.parametrize(
    ("rule", "law", "other"),
    [
        ("dll:frozen", "fa", {("cifar10", "cnn")}),  # trials of its own
        ("pc:fixed", "bp", {("cifar10", "mlp")}),  # run before bp had its last trials
    ],
)
def test_rules_that_are_equal_by_law_have_equal_settings(rule: str, law: str, other: set[tuple[str, str]]) -> None:
    for data in ("mnist", "fashion_mnist", "svhn", "cifar10"):
        for model in ("mlp", "cnn"):
            equal = defaults.find_settings(rule, model, data) == defaults.find_settings(law, model, data)
            assert equal != ((data, model) in other)


def test_the_best_is_the_most_accurate_or_the_smallest_error_of_all_tasks() -> None:
    assert choose_best_trial([row({"lr": 1}, test_accuracy=0.9), row({"lr": 2}, test_accuracy=0.91)]) == {"lr": 2}
    assert choose_best_trial([row({"lr": 1}, test_accuracy=0.91), row({"lr": 2}, test_accuracy=0.91)]) == {"lr": 1}
    assert choose_best_trial([row({"lr": 1}, test_accuracy=None), row({"lr": 2}, test_accuracy=0.01)]) == {"lr": 2}
    assert choose_best_trial([row({"lr": 1}, test_accuracy=None)]) is None
    assert choose_best_trial([]) is None
    errors = {(1, "paper"): 0.1, (1, "forecast"): 1.0, (2, "paper"): 0.2, (2, "forecast"): 0.3}
    rows = [row({"lr": lr, "task": task}, mse=mse) for (lr, task), mse in errors.items()]
    assert choose_best_trial(rows) == {"lr": 2}  # √(0.2·0.3) < √(0.1·1): ratios count, whatever the scale of a task
    diverged = row({"lr": 3, "task": "paper"}, mse=None), row({"lr": 3, "task": "forecast"}, mse=1e-9)
    assert choose_best_trial([*rows, *diverged]) == {"lr": 2}


def test_a_table_of_the_defaults_says_what_the_trial_was() -> None:
    trial = {"lr": 0.001, "optimizer_options": {"weight_decay": 1e-05}, "optimizer": "adam", "sweeps": 5}
    read = tomllib.loads(format_entry("cifar10", "cnn", "dll:kolen-pollack", {"lr": 1.5e-4, "decay": 0.001}))
    assert read["cifar10"]["cnn"]["rules"] == {"dll:kolen-pollack": {"lr": 1.5e-4, "options": {"decay": 0.001}}}
    read = tomllib.loads(format_entry("cifar10", "cnn", "pc", trial))
    assert read["cifar10"]["cnn"]["rules"]["pc"] == {
        "lr": 0.001,
        "optimizer_options": {"weight_decay": 1e-05},
        "options": {"sweeps": 5},
    }


def test_trials_of_the_whole_length_decide_where_there_are_any(tmp_path: Path) -> None:
    def write(name: str, rule: str, lr: float) -> None:
        line = {"rule": rule, **row({"lr": lr}, test_accuracy=0.9)}
        with (tmp_path / name).open("a") as file:
            file.write(json.dumps(line) + "\n")

    write("mnist-mlp-bp.jsonl", "bp", 0.1)
    write("mnist-mlp-fa.jsonl", "fa", 0.2)
    write("whole-mnist-mlp-bp.jsonl", "bp", 0.3)
    write("cifar10-mlp-bp.jsonl", "bp", 0.4)
    found = {rule: choose_best_trial(rows) for (_, rule), rows in load_trials(tmp_path, "mnist").items()}
    assert found == {"bp": {"lr": 0.3}, "fa": {"lr": 0.2}}
