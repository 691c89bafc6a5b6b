"""A run's key says what was asked for: all of it, and nothing else."""

from dataclasses import dataclass, fields
from typing import Any

import pytest

from apical.bench import declaration as declarations
from apical.bench.declaration import KEYED, Declaration
from apical.engine.settings import Settings
from stores import declared

OTHER: dict[str, Any] = {
    "rule": "fa",
    "model": "cnn",
    "data": "digits",
    "epochs": 21,
    "lr": 2e-3,
    "batch_size": 64,
    "optimizer": "sgd",
    "schedule": "cosine",
    "protocol": "paper",
    "loss": "mse",
    "label_smoothing": 0.1,
    "clip": 1.5,
    "precision": "bf16",
    "options": {"theta_std": 0.5},
    "optimizer_options": {"weight_decay": 0.1},
    "alignment": True,
}


@pytest.mark.parametrize("name", OTHER)
def test_every_setting_is_part_of_the_key(name: str) -> None:
    assert set(OTHER) == set(KEYED)
    assert declared(**{name: OTHER[name]}).key != declared().key


def test_seeds_are_not_and_numbers_are_what_they_are_worth() -> None:
    assert declared(seeds=(1, 2)).key == declared(seeds=(7,)).key
    assert declared(lr=1, options={"b": 2.0, "a": 1}).key == declared(lr=1.0, options={"a": 1, "b": 2}).key
    assert declared(lr=1.5).key != declared(lr=1).key


def test_keys_of_different_runs_are_different() -> None:
    found = [declared(**{name: value}).key for name, value in OTHER.items()]
    assert len(set(found)) == len(found)


def test_examples_are_part_of_the_key() -> None:
    few = Declaration.of(Settings("bp", "mlp", "mnist"), examples=100)
    assert few.key != declared().key
    assert (few.examples, declared().examples) == (100, None)
    assert "examples" not in few.settings([0])


def test_a_setting_that_comes_later_leaves_the_keys_of_earlier_runs_as_they_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = declared().key

    @dataclass(frozen=True)
    class Later(Settings):
        windows: int = 3

    monkeypatch.setattr(declarations, "Settings", Later)
    assert Declaration.of(Later("bp", "mlp", "mnist")).key == before
    assert Declaration.of(Later("bp", "mlp", "mnist", windows=4)).key != before
    earlier = Declaration(declared().text)  # written before there were windows
    assert earlier.key == before
    assert earlier.settings([0])["windows"] == 3


def test_a_default_that_changes_does_not_make_different_runs_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    before = declared().key

    @dataclass(frozen=True)
    class Changed(Settings):
        lr: float = 0.5

    monkeypatch.setattr(declarations, "Settings", Changed)
    assert Declaration.of(Changed("bp", "mlp", "mnist")).key != before
    assert Declaration.of(Changed("bp", "mlp", "mnist", lr=1e-3)).key == before


def test_a_declaration_comes_back_from_its_text_as_settings() -> None:
    settings = Settings("dll", "mlp", "mnist", seeds=(4, 2), lr=0.01, options={"theta_std": 0.5})
    one = Declaration.of(settings)
    assert Declaration(one.text) == one
    given = one.settings([4, 2])
    assert list(given) == [f.name for f in fields(Settings)]
    assert Settings(**{**given, "seeds": tuple(given["seeds"])}) == settings
    assert (one.rule, one.model, one.data, one.epochs) == ("dll", "mlp", "mnist", 20)
