"""A result is what was run, and can be read back and repeated."""

import json
import re
import shlex
import sys
import warnings
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import apical
from apical.bench import results
from apical.bench.results import Result
from apical.bench.store import Store
from apical.bench.words import parse_seeds
from apical.engine.settings import PRECISIONS, PROTOCOLS, SCHEDULES, Settings, expand_seeds
from apical.errors import DivergenceError
from runs import doomed, fit, sqrt_loss
from strategies import share_of_examples

RESULTS = Path(__file__).parents[2] / "results"


@pytest.fixture(scope="module")
def run() -> apical.Fit:
    return fit(rule="dll", seeds=[4, 1], options={"theta_std": 0.5}, alignment=True)


def test_a_result_holds_what_the_run_was_and_gave(run: apical.Fit) -> None:
    result = results.make_result(run)
    assert result.key == ("dll", "mlp", "custom")
    assert result.accuracies == pytest.approx([100 * a for a in run.accuracies])
    assert result.by_seed() == pytest.approx(dict(zip([4, 1], result.accuracies, strict=True)))
    assert result.history == run.history
    assert result.versions["apical"] == apical.__version__
    assert result.settings["seeds"] == [4, 1]
    assert result.settings["options"] == {"theta_std": 0.5}
    assert not result.failed


def test_what_is_saved_is_read_back(run: apical.Fit, tmp_path: Path) -> None:
    path = tmp_path / "deep" / "run.json"
    result = results.make_result(run)
    results.save(path, result)
    back = results.load(path)
    assert replace(back, history=[]) == replace(result, history=[])
    for row, expected in zip(back.history, result.history, strict=True):
        assert row.keys() == expected.keys()
        assert row["test_loss"] == pytest.approx(expected["test_loss"], rel=1e-4)
        assert row["alignment"]["feedback"][0] is None
        assert row["alignment"]["update"] == pytest.approx(expected["alignment"]["update"], rel=1e-4)
    assert [p.name for p in path.parent.iterdir()] == ["run.json"]


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_a_short_number_is_the_same_to_six_digits(value: float) -> None:
    kept = results.round_values(value)
    assert kept == pytest.approx(value, rel=5.1e-6, abs=sys.float_info.min)
    assert len(re.sub(r"e.*", "", repr(kept)).replace(".", "").strip("-0")) <= 6


def test_a_result_is_plain_json_with_one_row_a_line(run: apical.Fit, tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    results.save(path, results.make_result(run))

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    body = json.loads(path.read_text(), parse_constant=refuse)
    assert len(body["history"]) == 8
    lines = path.read_text().splitlines()
    assert sum(line.strip().startswith('{"seed"') for line in lines) == 8


@pytest.mark.filterwarnings("ignore:the loss of seed")
def test_a_seed_that_failed_has_no_accuracy_and_does_not_shift_the_others() -> None:
    run = fit(doomed(1, after=1.5), seeds=3, loss=sqrt_loss, schedule="constant")
    result = results.make_result(run)
    assert list(result.failed) == ["1"]
    assert list(result.by_seed()) == [0, 2]
    assert result.by_seed()[2] == pytest.approx(100 * run.of_seed(2)[-1]["test_accuracy"])


def test_the_command_spells_every_setting_out() -> None:
    settings: dict[str, Any] = {
        "rule": "dll:released",
        "model": "mine:net",
        "data": "digits",
        "seeds": [7],
        "lr": 0.0003,
        "clip": None,
        "label_smoothing": 0.1,
        "options": {"theta_std": 0.5, "sweeps": 3},
        "optimizer_options": {},
        "alignment": True,
    }
    assert results.build_train_command(settings) == (
        "apical train --rule dll:released --model mine:net --data digits --seeds 7, --lr 0.0003 "
        "--label-smoothing 0.1 --option theta_std=0.5 --option sweeps=3 --alignment --untuned"
    )
    plain = settings | {"seeds": [0, 3], "alignment": False, "options": {}, "clip": 1.5}
    assert "--seeds 0,3 " in results.build_train_command(plain)
    assert "--clip 1.5" in results.build_train_command(plain)
    assert "--alignment" not in results.build_train_command(plain)


TRICKY = ("3", "1e5", " 1", "nan", "None", "TRUE", "[1]", "[", '"a"', "{}", "a b", "$HOME", "'", "x=1", "-1")
TEXTS = st.sampled_from(TRICKY) | st.text()
VALUES = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXTS
OPTIMIZERS = {
    "adam": {"weight_decay": st.floats(0, 1), "betas": st.tuples(st.floats(0, 0.99), st.floats(0, 0.99))},
    "adamw": {"eps": st.floats(1e-12, 1), "amsgrad": st.booleans()},
    "sgd": {"momentum": st.floats(0, 0.99), "nesterov": st.just(False)},
}
PLACES = {  # all of them have recorded settings, some of them recorded options
    ("mlp", "mnist"): {},
    ("cnn", "cifar10"): {},
    ("rnn", "tinyshakespeare"): {"window": st.integers(1, 99), "stride": st.integers(1, 99)},
    ("textcnn", "mr"): {"fold": st.integers(0, 9), "vectors": TEXTS, "scale": st.just("paper")},
}


@st.composite
def any_settings(draw: st.DrawFn) -> Settings:
    """Every field of `Settings`, whatever it may hold on a command line."""
    (model, data), data_options = draw(st.sampled_from(list(PLACES.items())))
    optimizer, optimizer_options = draw(st.sampled_from(list(OPTIMIZERS.items())))
    values: dict[str, Any] = {
        "rule": draw(st.sampled_from(["bp", "dll:kolen-pollack", "pc"])),
        "model": model,
        "data": data,
        "epochs": draw(st.integers(1, 10**6)),
        "seeds": tuple(draw(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=4, unique=True))),
        "lr": draw(st.floats(1e-9, 1e3)),
        "batch_size": draw(st.integers(1, 10**6)),
        "optimizer": optimizer,
        "schedule": draw(st.sampled_from(SCHEDULES)),
        "protocol": draw(st.sampled_from(PROTOCOLS)),
        "loss": draw(st.sampled_from(["cross_entropy", "mse"])),
        "label_smoothing": draw(st.floats(0, 0.99)),
        "clip": draw(st.none() | st.floats(1e-9, 1e3)),
        "precision": draw(st.sampled_from(PRECISIONS)),
        "options": draw(st.dictionaries(st.from_regex(r"[a-z_]{1,9}", fullmatch=True), VALUES | st.lists(VALUES))),
        "data_options": draw(st.fixed_dictionaries({}, optional=data_options)),
        "optimizer_options": draw(st.fixed_dictionaries({}, optional=optimizer_options)),
        "alignment": draw(st.booleans()),
    }
    assert list(values) == [field.name for field in fields(Settings)]
    return Settings(**values)


@share_of_examples(2)
@given(any_settings())
def test_every_setting_survives_the_way_through_the_command_line(asked: Settings) -> None:
    pytest.importorskip("typer")
    from apical.cli import commands, train

    reached: dict[str, Any] = {}

    def fit(model: str, data: str, **given: Any) -> None:
        reached.update(model=model, data=data, **given)
        raise DivergenceError("that will do")

    program, *words = shlex.split(results.build_train_command(asked.to_dict()))
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        patch.setattr(apical, "fit", fit)
        patch.setattr(train, "check_options", lambda rule, options: None)
        with pytest.raises(SystemExit):
            commands.app(words, prog_name=program)
    reached["seeds"] = expand_seeds(reached["seeds"])
    arrived = Settings(**{name: value for name, value in reached.items() if name in asked.to_dict()})
    assert arrived.to_dict() == asked.to_dict()


def test_file_names_are_different_and_fit_for_every_file_system() -> None:
    names = [results.make_file_name(r, m, "digits") for r in apical.rule_names() for m in ("mlp", "a.b:c")]
    assert len(set(names)) == len(names)
    assert all(set(name) <= set("abcdefghijklmnopqrstuvwxyz0123456789-_.") for name in names)
    assert results.make_file_name("dll:released", "mlp", "mnist") == "mnist-mlp-dll.released.json"


def good(run: apical.Fit, tmp_path: Path) -> dict[str, Any]:
    results.save(tmp_path / "good.json", results.make_result(run))
    body: dict[str, Any] = json.loads((tmp_path / "good.json").read_text())
    return body


DAMAGE: dict[str, Any] = {
    "empty": "",
    "half": '{"format": 1, "settings": {"rule"',
    "a list": "[]",
    "a number": "3",
    "another format": {"format": 99},
    "no format": {"format": None},
    "no settings": {"settings": {}},
    "settings that are no table": {"settings": 3},
    "too few accuracies": {"accuracies": [1.0]},
    "something unknown": {"surprise": 1},
    "no versions": {"versions": None},
    "an epoch of no seed": {"history": [{"epoch": 1, "test_accuracy": 0.5}] * 4},
}


@pytest.mark.parametrize("what", DAMAGE)
def test_a_damaged_result_is_one_sentence_that_names_the_file(what: str, run: apical.Fit, tmp_path: Path) -> None:
    damage = DAMAGE[what]
    text = damage if isinstance(damage, str) else json.dumps({**good(run, tmp_path), **damage})
    path = tmp_path / "bad.json"
    path.write_text(text)
    with pytest.raises(apical.ApicalError, match=r"bad.json is not a result that can be read") as caught:
        results.load(path)
    assert "\n" not in str(caught.value)


def test_bytes_that_are_no_text_are_refused(tmp_path: Path) -> None:
    (tmp_path / "bad.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(apical.ApicalError, match="not a result"):
        results.load(tmp_path / "bad.json")


def test_a_folder_gives_every_result_below_it_in_order(run: apical.Fit, tmp_path: Path) -> None:
    result = results.make_result(run)
    for name in ("b/two.json", "a/one.json", "c.json"):
        results.save(tmp_path / name, replace(result, command=name))
    (tmp_path / "perf.json").write_text("speed, not a result")
    found = results.load_folder(tmp_path)
    assert [result.command for result in found] == ["a/one.json", "b/two.json", "c.json"]
    assert all(isinstance(result, Result) for result in found)


def test_a_folder_that_is_missing_or_empty_is_one_sentence(tmp_path: Path) -> None:
    for folder in (tmp_path / "none", tmp_path):
        with pytest.raises(apical.ApicalError, match=r"there (is no folder|are no results)"):
            results.load_folder(folder)


def test_every_result_on_file_has_the_command_that_repeats_it() -> None:
    if not RESULTS.is_dir():
        pytest.skip("the results are not here: this is not a checkout")
    for result in results.load_folder(RESULTS):
        assert result.command == results.build_train_command(result.settings)
    for path in RESULTS.rglob("*.sqlite"):
        with Store(path, write=False) as store:
            for row in store.runs():
                if row.command is not None:
                    seeds = parse_seeds(row.command.split("--seeds ")[1].split()[0])
                    assert isinstance(seeds, list)
                    assert row.seed in seeds
                    assert row.command == results.build_train_command(row.declaration.settings(seeds))


def test_a_setting_of_a_newer_version_is_named(run: apical.Fit, tmp_path: Path) -> None:
    body = good(run, tmp_path)
    body["settings"]["shiny"] = 1
    (tmp_path / "new.json").write_text(json.dumps(body))
    with pytest.raises(apical.ApicalError, match=r"new.json .*settings have shiny, which this version does not know"):
        results.load(tmp_path / "new.json")
