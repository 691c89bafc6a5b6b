"""Tuning: the listed trials are valid and few, run once, are judged without the test set, and are never lost."""

import json
import tomllib
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
import torch

import apical
from apical.bench import defaults as tuning
from apical.bench.defaults import (
    build_settings,
    format_score,
    get_trials_path,
    list_trials,
    read_trials,
    sort_best_first,
    tune,
)
from apical.core.registry import options_of, resolve
from apical.data import DATASETS
from apical.engine.settings import Settings

TABLE: dict[str, Any] = tomllib.loads(resources.files("apical.bench").joinpath("search.toml").read_text("utf-8"))
LISTED = [
    (d, m, r, whole)
    for d, models in TABLE.items()
    for m, rules in models.items()
    for whole in (False, True)
    for r in (rules.get("whole", {}) if whole else rules)
    if r != "whole"
]
TRIALS: list[dict[str, Any]] = [{"lr": 0.01}, {"lr": 0.02, "theta_std": 0.3}, {"lr": 0.01, "batch_size": 64}]


def use_trials(monkeypatch: pytest.MonkeyPatch, table: dict[str, Any]) -> None:
    """Put a table in the place of search.toml."""
    load = tuning.load_shipped
    monkeypatch.setattr(tuning, "load_shipped", lambda name: table if name == "search.toml" else load(name))


@pytest.fixture
def listed(monkeypatch: pytest.MonkeyPatch) -> None:
    use_trials(monkeypatch, {"digits": {"mlp": {"dll": TRIALS}}})
    monkeypatch.setattr(tuning, "EPOCHS", 1)


@pytest.mark.parametrize(("data", "model", "rule", "whole"), LISTED)
def test_every_listed_trial_is_a_valid_setting_within_the_budget(data: str, model: str, rule: str, whole: bool) -> None:
    assert data in DATASETS
    with torch.device("meta"):
        assert model == "rnn" or apical.models.build(model, data)
    trials = list_trials(rule, model, data, whole=whole)
    alone = whole and rule not in TABLE[data][model]  # all of its trials are of full length
    assert len(trials) <= (12 if alone else 8 if whole else 16)
    assert all(trials.count(trial) == 1 for trial in trials)
    names = {name for trial in trials for name in trial}
    varied = {n for n in names if any(trial.get(n) != trials[0].get(n) for trial in trials)}
    assert len(varied - {"lr"}) <= (5 if alone else 3)
    for trial in trials:
        settings = build_settings(rule, model, data, trial, whole=whole)
        epochs = {"cifar10": 30, "svhn": 30, "cifar100": 30}.get(data, 20) if whole else 5
        assert Settings(rule, model, data, **settings).epochs == epochs
        assert set(settings["options"]) <= set(options_of(resolve(rule)[0]))
        DATASETS[data].check_options(settings["data_options"])


@pytest.mark.usefixtures("listed")
def test_each_trial_is_one_line_and_what_fit_would_have_given(tmp_path: Path) -> None:
    rows = list(tune("dll", "mlp", "digits", tmp_path, seeds=2, device="cpu"))
    assert sorted(json.dumps(row["trial"]) for row in rows) == sorted(json.dumps(t) for t in TRIALS)
    assert read_trials(get_trials_path(tmp_path, "dll", "mlp", "digits")) == rows
    for row in rows:
        settings = build_settings("dll", "mlp", "digits", row["trial"])
        alone = apical.fit("mlp", "digits", rule="dll", seeds=2, device="cpu", progress=False, **settings)
        assert row["test_accuracy"] == pytest.approx(alone.accuracy, abs=0.008)  # one image more or less
        assert alone.settings.protocol == "validation"
        assert f"--lr {row['trial']['lr']}" in row["command"]


def test_trials_of_the_whole_length_have_lists_epochs_and_files_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lists = {"dll": TRIALS, "whole": {"dll": [{"lr": 0.03}]}}
    use_trials(monkeypatch, {"digits": {"mlp": lists}})
    monkeypatch.setattr(tuning, "find_settings", lambda *_: {"epochs": 2, "batch_size": 32})
    (row,) = tune("dll:frozen", "mlp", "digits", tmp_path, whole=True, device="cpu")
    assert row["trial"] == {"lr": 0.03}
    assert "--epochs 2 " in row["command"]
    assert [path.name for path in tmp_path.iterdir()] == ["whole-digits-mlp-dll.frozen.jsonl"]
    assert list_trials("dll", "mlp", "digits") == TRIALS
    with pytest.raises(apical.ApicalError, match=r"lists no whole trials of bp .* it has those of dll\."):
        list_trials("bp", "mlp", "digits", whole=True)
    with pytest.raises(apical.ApicalError, match=r"lists no trials of whole .* it has those of dll\."):
        list_trials("whole", "mlp", "digits")


@pytest.mark.usefixtures("listed")
def test_what_was_tried_is_not_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = list(tune("dll", "mlp", "digits", tmp_path, device="cpu"))
    path = get_trials_path(tmp_path, "dll", "mlp", "digits")
    path.write_text("".join(json.dumps(row) + "\n" for row in first[:-1]))
    asked: list[Any] = []
    sweep = tuning.sweep

    def watched(model: str, data: str, trials: list[Any], **settings: Any) -> list[apical.Fit]:
        asked.extend(trials)
        return sweep(model, data, trials, **settings)

    monkeypatch.setattr(tuning, "sweep", watched)
    assert list(tune("dll", "mlp", "digits", tmp_path, device="cpu")) == first
    assert len(asked) == 1
    assert read_trials(path) == first


@pytest.mark.usefixtures("listed")
def test_results_that_another_process_wrote_meanwhile_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sweep, nested = tuning.sweep, []

    def sweep_beside_another(*given: Any, **settings: Any) -> list[apical.Fit]:
        if not nested:
            nested.append(True)
            list(tune("dll", "mlp", "digits", tmp_path, trials=TRIALS[:2], device="cpu"))
        return sweep(*given, **settings)

    monkeypatch.setattr(tuning, "sweep", sweep_beside_another)
    rows = list(tune("dll", "mlp", "digits", tmp_path, trials=TRIALS[1:], device="cpu"))
    assert [row["trial"] for row in rows] == TRIALS[1:]
    written = read_trials(get_trials_path(tmp_path, "dll", "mlp", "digits"))
    assert [row["trial"] for row in written] == TRIALS  # the one that both ran once
    assert [path.name for path in tmp_path.iterdir()] == ["digits-mlp-dll.jsonl"]


@pytest.mark.usefixtures("listed")
def test_trials_of_other_seeds_are_not_run_again_which_is_said(tmp_path: Path) -> None:
    rows = list(tune("dll", "mlp", "digits", tmp_path, device="cpu"))
    with pytest.warns(
        UserWarning, match=r"were run with the seeds \[0\] and .* another --out runs them with \[0, 1, 2\]"
    ):
        assert list(tune("dll", "mlp", "digits", tmp_path, seeds=3, device="cpu")) == rows


def test_options_of_a_trial_may_be_nested_and_join_the_recorded_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    recorded = {"optimizer": "adamw", "optimizer_options": {"weight_decay": 1.0}, "data_options": {"window": 9}}
    monkeypatch.setattr(tuning, "find_settings", lambda *_: recorded)
    trial = {
        "lr": 0.1,
        "options": {"theta_std": 0.5, "sweeps": 2},
        "sweeps": 3,
        "data_options": {"stride": 4},
        "optimizer_options": {"eps": 0.1},
    }
    settings = build_settings("dll", "rnn", "tinyshakespeare", trial)
    assert settings["options"] == {"theta_std": 0.5, "sweeps": 3}
    assert settings["data_options"] == {"window": 9, "stride": 4}
    assert settings["optimizer_options"] == {"weight_decay": 1.0, "eps": 0.1}
    assert build_settings("dll", "rnn", "tinyshakespeare", {"optimizer": "sgd"}).get("optimizer_options", {}) == {}


@pytest.mark.parametrize(
    ("trial", "words"),
    [
        ({"protocol": "clean"}, "a trial has no protocol; all are judged alike, on held-out training data"),
        ({"alignment": True}, "a trial has no alignment"),
        ({"options": 3}, "options in .* is 3, but must be a table"),
        ({"options": {"theta_sdt": 1}}, "'theta_sdt' is unknown; did you mean 'theta_std'"),
        ({"data_options": {"window": 3}}, "'window' is unknown; it takes none"),
    ],
)
def test_a_trial_of_ones_own_that_cannot_be_is_one_sentence(trial: dict[str, Any], words: str, tmp_path: Path) -> None:
    path = tmp_path / "trials.jsonl"
    path.write_text(json.dumps({"lr": 0.1}) + "\n" + json.dumps(trial))
    with pytest.raises(apical.ApicalError, match=words) as caught:
        tuning.read_own_trials(path, "dll", "digits")
    assert "trials.jsonl" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "line",
    [
        '{"test_accuracy": 0.5, "std": 0.0}',
        '{"trial": {}, "test_accuracy": 0.5, "std": 0.0}',
        '{"trial": 3, "command": "apical train", "test_accuracy": 0.5, "std": 0.0}',
        '{"trial": {"lr": 1}}',
        '{"trial": {"lr": 1}, "mse": 0.5}',
        '{"trial": {"lr": 1}, "mse": "low", "std": 0.0}',
    ],
)
@pytest.mark.usefixtures("listed")
def test_a_line_that_is_no_result_is_named(line: str, tmp_path: Path) -> None:
    path = get_trials_path(tmp_path, "dll", "mlp", "digits")
    path.write_text('{"command": "apical train", "mse": 0.5, "std": 0.0}\n' + line)
    with pytest.raises(apical.ApicalError, match=r"line 2 of .*digits-mlp-dll.jsonl is not the result of a trial"):
        list(tune("dll", "mlp", "digits", tmp_path))


@pytest.mark.usefixtures("listed")
def test_trials_that_diverge_are_written_down_as_such(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = [{"lr": 1e30, "optimizer": "sgd", "loss": "mse"}]
    use_trials(monkeypatch, {"digits": {"mlp": {"bp": broken}}})
    (row,) = tune("bp", "mlp", "digits", tmp_path, device="cpu")
    assert row["test_accuracy"] is None
    assert row["trial"] == broken[0]


def test_trials_of_series_are_judged_by_their_error_and_each_has_its_task(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "waves.csv"
    waves = torch.stack([torch.sin(torch.arange(400) / k) for k in (3.0, 5.0, 7.0)], 1)
    path.write_text("a,b,c\n" + "".join(",".join(f"{v:.4f}" for v in row) + "\n" for row in waves.tolist()))
    data = f"series:{path}"
    trials = [{"lr": lr, "task": task} for task in ("paper", "forecast") for lr in (1e-30, 0.01)]
    use_trials(monkeypatch, {data: {"rnn": {"bp": [*trials, {"lr": 1e30, "optimizer": "sgd"}]}}})
    monkeypatch.setattr(tuning, "EPOCHS", 1)
    rows = list(tune("bp", "rnn", data, tmp_path, device="cpu"))
    assert [row["trial"].get("task") for row in rows] == ["paper", "paper", "forecast", "forecast", None]
    for row, trial in zip(rows[:4], trials, strict=True):
        settings = build_settings("bp", "rnn", data, trial)
        alone = apical.fit("rnn", data, rule="bp", device="cpu", progress=False, **settings)
        assert settings["data_options"]["task"] == trial["task"]
        assert row["mse"] == pytest.approx(alone.history[-1]["test_mse"], abs=1e-4)
        assert "test_accuracy" not in row
        assert f"--loss mse --label-smoothing 0.0 --precision tf32 --data-option task={trial['task']}" in row["command"]
    assert rows[4]["mse"] is None
    ordered = sort_best_first(rows)
    assert [row["mse"] for row in ordered[:4]] == sorted(row["mse"] for row in rows[:4])
    assert ordered[4] is rows[4]
    assert format_score(ordered[4]) == "diverged"


@pytest.mark.usefixtures("listed")
def test_a_file_that_is_something_else_is_named_and_left_alone(tmp_path: Path) -> None:
    path = get_trials_path(tmp_path, "dll", "mlp", "digits")
    path.write_text("not JSON")
    with pytest.raises(apical.ApicalError, match="is not a list of trials"):
        list(tune("dll", "mlp", "digits", tmp_path))
    assert path.read_text() == "not JSON"


def test_a_rule_without_trials_is_told_so() -> None:
    with pytest.raises(
        apical.ApicalError, match=r"lists no trials of readout for mlp on tiny_imagenet; it has .*mlp on mnist"
    ):
        list_trials("readout", "mlp", "tiny_imagenet")


def test_a_run_without_a_finished_epoch_has_no_time_of_one() -> None:
    with pytest.warns(UserWarning, match="smaller learning rate"):
        broken, _ = apical.sweep(
            "mlp",
            "digits",
            [{"lr": 1e30}, {"lr": 1e-3}],
            rule="bp",
            loss="mse",
            optimizer="sgd",
            epochs=1,
            progress=False,
        )
    assert torch.tensor(broken.seconds_per_epoch).isnan()


def test_trials_of_version_0_1_whose_accuracy_is_in_percent_are_read(tmp_path: Path) -> None:
    path = tmp_path / "trials.jsonl"
    path.write_text(
        '{"trial": {"lr": 1}, "accuracy": 53.2, "std": 1.5}\n{"trial": {"lr": 2}, "accuracy": null, "std": null}\n'
    )
    first, second = read_trials(path)
    assert (first["test_accuracy"], first["std"]) == (pytest.approx(0.532), pytest.approx(0.015))
    assert (second["test_accuracy"], second["std"]) == (None, None)
    assert "accuracy" not in first
    assert format_score(first) == "53.20 ± 1.50"
