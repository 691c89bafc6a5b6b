"""The command beside a result repeats it."""

import shlex
import warnings
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import apical
from apical.bench.declaration import build_train_command, make_file_name, parse_seeds
from apical.bench.store import Store
from apical.engine.settings import PRECISIONS, PROTOCOLS, SCHEDULES, Settings, expand_seeds
from apical.errors import DivergenceError
from strategies import share_of_examples

RESULTS = Path(__file__).parents[2] / "results"


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
    assert build_train_command(settings) == (
        "apical train --rule dll:released --model mine:net --data digits --seeds 7, --lr 0.0003 "
        "--label-smoothing 0.1 --option theta_std=0.5 --option sweeps=3 --alignment --untuned"
    )
    plain = settings | {"seeds": [0, 3], "alignment": False, "options": {}, "clip": 1.5}
    assert "--seeds 0,3 " in build_train_command(plain)
    assert "--clip 1.5" in build_train_command(plain)
    assert "--alignment" not in build_train_command(plain)


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
        "seeds": tuple(draw(st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=4, unique=True))),
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
    from apical.cli import load_app, train

    reached: dict[str, Any] = {}

    def fit(model: str, data: str, **given: Any) -> None:
        reached.update(model=model, data=data, **given)
        raise DivergenceError("that will do")

    program, *words = shlex.split(build_train_command(asked.to_dict()))
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        patch.setattr(apical, "fit", fit)
        patch.setattr(train, "check_options", lambda rule, options: None)
        with pytest.raises(SystemExit):
            load_app()(words, prog_name=program)
    reached["seeds"] = expand_seeds(reached["seeds"])
    arrived = Settings(**{name: value for name, value in reached.items() if name in asked.to_dict()})
    assert arrived.to_dict() == asked.to_dict()


def test_file_names_are_different_and_fit_for_every_file_system() -> None:
    names = [make_file_name(r, m, "digits") for r in apical.rule_names() for m in ("mlp", "a.b:c")]
    assert len(set(names)) == len(names)
    assert all(set(name) <= set("abcdefghijklmnopqrstuvwxyz0123456789-_.") for name in names)
    assert make_file_name("dll:released", "mlp", "mnist") == "mnist-mlp-dll.released"


def test_every_result_on_file_has_the_command_that_repeats_it() -> None:
    if not RESULTS.is_dir():
        pytest.skip("the results are not here: this is not a checkout")
    for path in RESULTS.rglob("*.sqlite"):
        with Store(path, write=False) as store:
            for row in store.runs():
                if row.command is not None:
                    seeds = parse_seeds(row.command.split("--seeds ")[1].split()[0])
                    assert isinstance(seeds, list)
                    assert row.seed in seeds
                    assert row.command == build_train_command(row.declaration.settings(seeds))
