"""A run's key says what was asked for: all of it, and nothing else."""

import subprocess
import sys
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import pytest

import apical
from apical.bench import declaration as declarations
from apical.bench.declaration import KEYED, Declaration
from apical.bench.store import Store
from apical.bench.suites import list_jobs, load
from apical.engine.settings import Settings
from apical.errors import DataError
from cases import mostly_slow
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


# What is the user's own is part of the key by its contents.


@pytest.fixture
def suite(tmp_path: Path) -> Path:
    (tmp_path / "a.txt").write_text("to be or not to be, that is the question. " * 20)
    (tmp_path / "own.toml").write_text(
        f"""
        [[runs]]
        rules = ["bp"]
        models = ["rnn"]
        data = ["text:{tmp_path / "a.txt"}"]
        settings = {{ epochs = 1, data_options = {{ window = 8 }} }}
        """
    )
    return tmp_path / "own.toml"


def trained(path: Path) -> list[float]:
    with Store(path, write=False) as store:
        return [store.history(row)[-1]["test_loss"] for row in store.runs()]


def test_a_text_that_changed_runs_anew_and_says_so_and_the_same_text_elsewhere_does_not(
    suite: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def run() -> list[float]:
        apical.bench.run(str(suite), store=store, device="cpu", progress=False)
        return trained(store)

    store, text = tmp_path / "results.sqlite", tmp_path / "a.txt"
    first = run()
    assert run() == first
    capsys.readouterr()
    text.write_text(text.read_text()[::-1])
    second = run()
    assert len(second) == 2
    assert second[0] == first[0] != second[1]
    assert "the contents of its data are not those of an earlier run, so it runs anew" in capsys.readouterr().err
    text.rename(tmp_path / "b.txt")
    suite.write_text(suite.read_text().replace("a.txt", "b.txt"))
    assert run() == second


def test_data_that_change_between_the_declaration_and_the_run_are_not_run(suite: Path, tmp_path: Path) -> None:
    (job,) = list_jobs(load(str(suite)))
    assert job.declaration is not None
    declarations.load_dataset(job.declaration)
    (tmp_path / "a.txt").write_text("something else. " * 50)
    with pytest.raises(DataError, match=r"a.txt has changed since bp rnn text:.* was declared; run the same command"):
        declarations.load_dataset(job.declaration)


OWN_RULE = """
import apical
from helpers_of_mine import factor

class Mine(apical.Backpropagation):
    NAME = "mine"

    def update(self, params, state, x, y, noise):
        made = super().update(params, state, x, y, noise)
        return made._replace(grads={name: factor * g for name, g in made.grads.items()})
"""


@pytest.mark.parametrize(
    "changed",
    mostly_slow(["rule_of_mine.py", "helpers_of_mine.py", "network_of_mine.py"], quick=["helpers_of_mine.py"]),
)
def test_a_rule_or_a_network_of_ones_own_is_part_of_the_key_by_its_source(changed: str, tmp_path: Path) -> None:
    (tmp_path / "rule_of_mine.py").write_text(OWN_RULE)
    (tmp_path / "helpers_of_mine.py").write_text("factor = 0.5\n")
    (tmp_path / "network_of_mine.py").write_text(
        "from torch import nn\ndef small():\n    return nn.Sequential(nn.Flatten(), nn.Linear(64, 9), nn.Linear(9, 10))\n"
    )
    arguments = ["--import", "rule_of_mine", "train", "--rule", "mine", "--model", "network_of_mine:small"]
    arguments += ["--data", "digits", "--epochs", "1", "--untuned", "--no-checkpoint", "--out", "runs", "--resume"]
    start = f"import sys; sys.path[:0] = {[entry for entry in sys.path if entry]!r}; sys.argv = {['apical', *arguments]!r}; "

    def run() -> str:
        command = [sys.executable, "-c", f"{start}from apical.cli import main; main()"]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
        return done.stdout + done.stderr

    run()
    assert "finished before" in run()
    with (tmp_path / changed).open("a") as file:
        file.write("\n\ndef unused():\n    return 1\n")
    what = "model" if changed == "network_of_mine.py" else "rule"
    assert f"the contents of its {what} are not those of an earlier run, so it runs anew" in run()
    assert len(trained(tmp_path / "runs" / "results.sqlite")) == 2


def test_a_rule_that_was_typed_in_is_part_of_the_key_by_what_it_computes() -> None:
    def define(body: str) -> str:
        names: dict[str, Any] = {"apical": apical, "__name__": "__main__"}
        exec(
            f"class Typed(apical.Backpropagation):\n    NAME = 'typed'\n    def warm(self):\n        return {body}\n",
            names,
        )
        return declared("typed").key

    known = dict(apical.RULES)
    try:
        assert define("1") == define("1") != define("2")
    finally:
        apical.RULES.clear()
        apical.RULES.update(known)


def test_what_is_built_in_has_no_contents_and_its_key_is_that_of_version_0_1() -> None:
    assert declared("dll:released", "mlp", "mnist").content == {}
    assert declared().key == "aa224f123cd8228f"
    with Store(Path(__file__).parents[2] / "results" / "paper.sqlite", write=False) as store:
        rows = store.runs()
    assert len(rows) > 1800
    for row in rows[::20]:
        values = {name: value for name, value in row.declaration.to_dict().items() if name != "examples"}
        again = Declaration.of(Settings(**values, seeds=(row.seed,)), row.declaration.examples)
        assert again.key == row.key == Declaration(row.declaration.text).key
