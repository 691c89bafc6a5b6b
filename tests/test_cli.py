"""The command line: results that can be repeated, and one line without a traceback for whatever goes wrong."""

import json
import os
import random
import re
import shlex
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

import apical
from apical import cli
from apical.bench.store import Store
from apical.engine import checkpoint as checkpoints
from runs import without_time
from stores import declared, fill, results_in

pytest.importorskip("typer")
pytest.importorskip("sklearn")

NETWORKS = """
import torch
from torch import nn

def small():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 12), nn.Tanh(), nn.Linear(12, 10))

def doomed():
    model = small()
    with torch.no_grad():
        model[1].weight.mul_(1.0 if torch.initial_seed() == 0 else torch.inf)
    return model

def recurrent():
    return nn.Sequential(nn.LSTM(64, 10))

def broken():
    return 1 / 0

number = 3
built = small()
"""


class Said(NamedTuple):
    code: int
    out: str
    err: str


Run = Callable[..., Said]


def code_of(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    """`apical ARGUMENTS` in this process."""
    monkeypatch.setattr(sys, "argv", ["apical", *map(str, arguments)])
    with warnings.catch_warnings():  # the command line has a way of its own to show them
        warnings.simplefilter("default")
        with pytest.raises(SystemExit) as ended:
            cli.main()
    return ended.value.code or 0


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Run]:
    """`apical ARGUMENTS` in an empty folder with a module of networks in it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "networks_of_a_test.py").write_text(NETWORKS)
    for name, value in (("APICAL_DATA", str(tmp_path / "data")), ("COLUMNS", "250"), ("TERM", "dumb")):
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "path", list(sys.path))

    def run(*arguments: object) -> Said:
        code = code_of(monkeypatch, *arguments)
        said = capsys.readouterr()
        return Said(code, said.out, said.err)

    yield run
    sys.modules.pop("networks_of_a_test", None)


TRAIN = ["train", "--epochs", 2, "--lr", 0.01, "--batch-size", 32]


def train(run: Run, *arguments: object) -> Said:
    return run(*TRAIN, *arguments)


def list_results(said: Said) -> list[str]:
    """The lines of results, without those of epochs and the indented ones."""
    return [line for line in said.out.splitlines() if ": epoch " not in line and not line.startswith("  ")]


def names_in(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


# train


def test_train_writes_a_result_and_a_checkpoint_and_says_what_came_out(run: Run, tmp_path: Path) -> None:
    said = train(run, "--rule", "dll:released", "--rule", "bp", "--seeds", "0,3", "--out", "runs")
    assert (said.code, said.err) == (0, "")
    assert names_in(tmp_path / "runs") == [
        "digits-mlp-bp.safetensors",
        "digits-mlp-dll.released.safetensors",
        "results.sqlite",
    ]
    for line, rule in zip(list_results(said), ["dll:released", "bp"], strict=True):
        result = results_in(tmp_path / "runs")[rule]
        fit = apical.fit("mlp", "digits", rule=rule, seeds=[0, 3], epochs=2, lr=0.01, batch_size=32, progress=False)
        assert result.accuracies == pytest.approx([100 * a for a in fit.accuracies])
        assert [result.settings[name] for name in ("rule", "model", "data")] == [rule, "mlp", "digits"]
        assert result.settings["seeds"] == [0, 3]
        assert len(result.history) == 4
        a, b = result.accuracies
        mean, deviation = (a + b) / 2, abs(a - b) / 2**0.5
        assert line.startswith(f"{rule} mlp digits: {mean:.2f} ± {deviation:.2f} % (test, last epoch; 2 seeds)")


def test_with_stdout_to_a_file_every_epoch_is_there_as_it_passes(tmp_path: Path) -> None:
    script = (
        "import sys, apical.cli, apical.engine.loop as loop\n"
        "save = loop.Run._save\n"
        "def watch(self, path, epoch):\n"
        "    save(self, path, epoch)\n"
        "    print(open('said.txt').read().count(': epoch '), file=sys.stderr)\n"
        "loop.Run._save = watch\n"
        "apical.cli.main()"
    )
    words = ["train", "--rule", "dll", "--model", "mlp", "--data", "digits", "--epochs", "3", "--out", "runs"]
    with (tmp_path / "said.txt").open("w") as out:
        done = subprocess.run(
            [sys.executable, "-c", script, *words],
            cwd=tmp_path,
            stdout=out,
            stderr=subprocess.PIPE,
            text=True,
            check=True,
        )
    assert done.stderr.split() == ["1", "2", "3"]
    *epochs, result, hint = (tmp_path / "said.txt").read_text().splitlines()
    (row,) = results_in(tmp_path / "runs")["dll"].history[-1:]
    assert epochs[2].startswith(
        f"dll mlp digits: epoch 3/3  loss {row['loss']:.4f}  test {100 * row['test_accuracy']:.2f}%"
    )
    assert all(line.endswith(" left") for line in epochs)
    assert ", 3 epochs, lr 0.005, recorded settings but for epochs, " in result
    (path,) = re.findall(r"apical.load\('(.*)'\) returns the learners", hint)
    (learner,) = apical.load(tmp_path / path)
    data = apical.data.load("digits")
    assert (learner(data.x_test).argmax(1) == data.y_test).double().mean() == pytest.approx(row["test_accuracy"])


def test_the_result_says_where_the_settings_come_from(run: Run) -> None:
    short = ["--rule", "bp", "--epochs", 1]
    (said,) = list_results(run("train", *short, "--untuned"))
    assert ", 1 epoch, lr 0.001, default settings but for epochs, " in said
    own = run("train", *short, "--model", "networks_of_a_test:small")
    assert "default settings but for epochs, " in own.out
    assert (
        "small has no recorded settings: lr 0.001, adam, batch size 128, linear schedule; --lr and the other" in own.out
    )
    assert "has no recorded" not in run("train", *short, "--model", "networks_of_a_test:small", "--lr", 0.1).out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--epochs", 0], "--epochs is 0, but must be a whole number"),
        (["--clip", -1, "--epochs", 1], "--clip is -1.0, but must be a positive number"),
        (["--epochs", 1, "--stop-after", 5], "--stop-after 5 is beyond the 1 epochs"),
        (["--epochs", 1, "--batch-size", 5000], "--batch-size 5000 is more than the 1437 training examples"),
        (
            ["--epochs", 1, "--lr", 1e38, "--optimizer", "sgd", "--loss", "mse"],
            "--clip 1.0 or inputs of about unit size",
        ),
    ],
)
def test_messages_name_the_options_of_the_command(words: list[object], said: str, run: Run) -> None:
    err = run("train", "--rule", "bp", *words).err
    assert said in err
    assert err.count("\n") == 1
    assert "=" not in err


def test_a_rule_of_ones_own_is_tuned_by_trials_from_a_file(run: Run, tmp_path: Path) -> None:
    (tmp_path / "rules_of_a_test.py").write_text(
        "import apical\n\nclass Mine(apical.Backpropagation):\n    NAME = 'mine'\n"
    )
    (tmp_path / "trials.jsonl").write_text('{"lr": 0.01}\n{"lr": 1e-05}\n')
    (tmp_path / "none.jsonl").write_text("")
    (tmp_path / "odd.jsonl").write_text('{"learning_rate": 1}')
    words = ["--import", "rules_of_a_test", "tune", "--rule", "mine", "--data", "digits"]
    try:
        said = run(*words)
        assert said.code == 1
        assert "--trials FILE` takes trials of your own, and so does apical.sweep" in said.err
        said = run(*words, "--trials", "trials.jsonl", "--out", "tuned")
        assert said.code == 0
        rows = [json.loads(line) for line in (tmp_path / "tuned" / "digits-mlp-mine.jsonl").read_text().splitlines()]
        assert [row["trial"] for row in rows] == [{"lr": 0.01}, {"lr": 1e-05}]
        assert 0 < rows[1]["test_accuracy"] < rows[0]["test_accuracy"] < 1
        assert f"{100 * rows[0]['test_accuracy']:.2f} ± 0.00" in said.out
        for file, why in (("none.jsonl", "has no trials"), ("odd.jsonl", "'learning_rate' is unknown")):
            said = run(*words, "--trials", file, "--out", "tuned2")
            assert (said.code, said.err.count("\n")) == (1, 1)
            assert why in said.err
    finally:
        apical.RULES.pop("mine", None)
        sys.modules.pop("rules_of_a_test", None)


@pytest.mark.parametrize(
    "arguments",
    [
        ["--rule", "dll", "--option", "theta_std=0.5", "--option", "sweeps=2", "--seeds", "7,", "--clip", "0.5"],
        ["--rule", "bp", "--model", "networks_of_a_test:small", "--seeds", "2", "--label-smoothing", "0.1"],
        ["--rule", "fa", "--model", "cnn", "--loss", "mse", "--optimizer", "sgd", "--schedule", "cosine"],
        ["--rule", "fa", "--optimizer", "sgd", "--optimizer-option", "momentum=0.9"],
        ["--rule", "bp", "--optimizer-option", "betas=[0.8, 0.9]", "--optimizer-option", "amsgrad=true"],
        ["--rule", "sign", "--protocol", "paper", "--alignment"],
        ["--rule", "dfa", "--protocol", "validation", "--precision", "float32"],
    ],
)
def test_the_command_in_a_result_repeats_it(run: Run, tmp_path: Path, arguments: list[str]) -> None:
    assert train(run, *arguments, "--out", "one").code == 0
    (result,) = results_in(tmp_path / "one").values()
    program, *command = shlex.split(result.command or "")
    assert program == "apical"
    assert run(*command, "--out", "two").code == 0
    (again,) = results_in(tmp_path / "two").values()
    assert again.accuracies == result.accuracies
    assert again.settings == result.settings
    assert again.command == result.command
    if "--model" in arguments:
        assert result.settings["model"] == arguments[arguments.index("--model") + 1]


def test_options_reach_the_rule(run: Run, tmp_path: Path) -> None:
    train(run, "--rule", "dll", "--option", "theta_std=0.5", "--option", "sweeps=3", "--out", "runs")
    settings = results_in(tmp_path / "runs")["dll"].settings
    assert settings["options"] == {"theta_std": 0.5, "sweeps": 3}
    assert isinstance(settings["options"]["sweeps"], int)


def test_settings_not_given_are_the_recorded_ones(run: Run, tmp_path: Path) -> None:
    from apical.bench.defaults import find_settings

    assert run("train", "--rule", "bp", "--epochs", 1, "--out", "runs").code == 0
    settings = results_in(tmp_path / "runs")["bp"].settings
    recorded = find_settings("bp", "mlp", "digits") | {"epochs": 1}
    assert {name: settings[name] for name in recorded} == recorded


def test_options_given_join_the_recorded_ones_and_go_before_them(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded = {
        "epochs": 1,
        "clip": 3.0,
        "options": {"theta_std": 0.25, "theta_rate": 0.5},
        "optimizer_options": {"eps": 0.1, "weight_decay": 0.2},
    }
    monkeypatch.setattr("apical.cli.train.find_settings", lambda *_: recorded)
    own = ["--option", "theta_rate=0.2", "--option", "sweeps=2", "--optimizer-option", "eps=0.3"]
    assert run("train", *own, "--out", "runs").code == 0
    settings = results_in(tmp_path / "runs")["dll"].settings
    assert settings["options"] == {"theta_std": 0.25, "theta_rate": 0.2, "sweeps": 2}
    assert settings["optimizer_options"] == {"eps": 0.3, "weight_decay": 0.2}
    assert run("train", *own, "--untuned", "--epochs", 1, "--out", "untuned").code == 0
    settings = results_in(tmp_path / "untuned")["dll"].settings
    assert settings["options"] == {"theta_rate": 0.2, "sweeps": 2}
    assert (settings["optimizer_options"], settings["clip"]) == ({"eps": 0.3}, None)


@pytest.mark.parametrize(
    ("words", "options"),
    [
        (["--optimizer", "sgd"], {}),
        (["--optimizer", "adam", "--optimizer-option", "eps=0.3"], {"eps": 0.3}),
        (["--optimizer", "adamw"], {"betas": [0.5, 0.9], "weight_decay": 3.0}),
    ],
)
def test_options_of_the_recorded_optimizer_are_not_those_of_another(
    words: list[str], options: dict[str, object], run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded = {"epochs": 1, "optimizer": "adamw", "optimizer_options": {"betas": [0.5, 0.9], "weight_decay": 3.0}}
    monkeypatch.setattr("apical.cli.train.find_settings", lambda *_: recorded)
    said = run("train", "--rule", "bp", *words, "--out", "runs")
    assert (said.code, said.err) == (0, "")
    settings = results_in(tmp_path / "runs")["bp"].settings
    assert (settings["optimizer"], settings["optimizer_options"]) == (words[1], options)


def test_resume_skips_what_is_finished(run: Run, tmp_path: Path) -> None:
    assert train(run, "--rule", "bp", "--out", "runs").code == 0
    before = results_in(tmp_path / "runs")["bp"]
    said = train(run, "--rule", "bp", "--rule", "fa", "--out", "runs", "--resume")
    assert said.code == 0
    assert "bp: finished before, see runs/results.sqlite" in said.out
    after = results_in(tmp_path / "runs")
    assert after["bp"] == before
    assert after["fa"].statuses == {"done"}


def test_an_interrupted_run_ends_with_130_and_one_line_and_resumes_to_the_same_result(run: Run, tmp_path: Path) -> None:
    save = checkpoints.save

    def and_stop(path: Path, checkpoint: checkpoints.Checkpoint) -> None:
        save(path, checkpoint)
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoints, "save", and_stop)
        said = train(run, "--seeds", 2, "--out", "runs")
    assert said.code == 130
    assert re.fullmatch(r"apical: interrupted; .*--resume.*\n", said.err)
    assert names_in(tmp_path / "runs") == ["digits-mlp-dll.safetensors"]
    assert train(run, "--seeds", 2, "--out", "runs", "--resume").code == 0
    assert train(run, "--seeds", 2, "--out", "whole").code == 0
    resumed, whole = (results_in(tmp_path / out)["dll"] for out in ("runs", "whole"))
    assert resumed.accuracies == whole.accuracies


@pytest.mark.slow
def test_ctrl_c_in_a_real_process_is_130_and_one_line(tmp_path: Path) -> None:
    paths = [entry for entry in sys.path if entry]
    heard = "signal.signal(signal.SIGINT, signal.default_int_handler)"  # a shell's background jobs ignore it
    script = f"import signal, sys; {heard}; sys.path[:0] = {paths!r}; from apical.cli import main; main()"
    arguments = ["train", "--rule", "bp", "--epochs", "100000", "--out", str(tmp_path)]
    process = subprocess.Popen(
        [sys.executable, "-c", script, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    checkpoint = tmp_path / "digits-mlp-bp.safetensors"
    deadline = time.monotonic() + 60
    while not checkpoint.exists() and time.monotonic() < deadline and process.poll() is None:
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    try:
        _, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130
    assert re.fullmatch(r"apical: interrupted; .*\n", err)
    assert set(names_in(tmp_path)) <= {checkpoint.name, "results.sqlite"}  # the store comes after the first epoch
    assert checkpoints.load(checkpoint).epoch >= 1


def test_more_seeds_later_have_a_checkpoint_of_their_own(run: Run, tmp_path: Path) -> None:
    assert train(run, "--rule", "bp", "--out", "runs").code == 0
    first = (tmp_path / "runs" / "digits-mlp-bp.safetensors").read_bytes()
    refused = train(run, "--rule", "bp", "--seeds", 3, "--out", "runs")
    assert (refused.code, refused.err.count("\n")) == (1, 1)
    assert "--resume skips what is finished" in refused.err
    said = train(run, "--rule", "bp", "--seeds", 3, "--out", "runs", "--resume", "--stop-after", 1)
    assert "--resume with the same --out goes on" in said.out
    own = "runs/digits-mlp-bp-seeds-1-2.safetensors"
    assert f"apical.load('{own}') returns the learners" in said.out
    assert train(run, "--rule", "bp", "--seeds", 3, "--out", "runs", "--resume").code == 0
    assert names_in(tmp_path / "runs") == [Path(own).name, "digits-mlp-bp.safetensors", "results.sqlite"]
    assert (tmp_path / "runs" / "digits-mlp-bp.safetensors").read_bytes() == first
    assert len(apical.load(own)) == 2
    other = train(run, "--rule", "bp", "--seeds", "7,", "--out", "runs", "--resume")  # of which none is finished
    assert other.code == 0
    assert train(run, "--rule", "bp", "--seeds", "0,1,2,7", "--out", "whole").code == 0
    grown, whole = (results_in(tmp_path / out)["bp"] for out in ("runs", "whole"))
    assert without_time(grown.history) == without_time(whole.history)


def test_an_interrupted_run_keeps_its_checkpoint_where_other_seeds_are_finished(run: Run, tmp_path: Path) -> None:
    assert train(run, "--rule", "bp", "--seeds", "5,", "--out", "runs", "--no-checkpoint").code == 0
    assert train(run, "--rule", "bp", "--seeds", 2, "--out", "runs", "--stop-after", 1).code == 0
    assert train(run, "--rule", "bp", "--seeds", 2, "--out", "runs", "--resume").code == 0
    assert names_in(tmp_path / "runs") == ["digits-mlp-bp.safetensors", "results.sqlite"]
    assert checkpoints.load(tmp_path / "runs" / "digits-mlp-bp.safetensors").epoch == 2


def test_a_checkpoint_of_many_seeds_has_a_name_that_file_systems_take(tmp_path: Path) -> None:
    from apical.cli.train import _choose_checkpoint

    base = tmp_path / "digits-mlp-bp.safetensors"
    fit = apical.fit("mlp", "digits", rule="bp", epochs=1, checkpoint=base, progress=False)
    assert fit.settings.seeds == (0,)
    names = [_choose_checkpoint(base, list(range(1, count)), [0]).name for count in (2, 9, 99, 999)]
    assert names[:2] == ["digits-mlp-bp-seeds-1.safetensors", "digits-mlp-bp-seeds-1-2-3-4-5-6-7-8.safetensors"]
    assert len(set(names)) == 4
    assert max(map(len, names)) < 60
    assert _choose_checkpoint(base, [1], []) == base
    assert _choose_checkpoint(base, [0, 1], [2]) == base


@pytest.mark.parametrize("other", [["--lr", 0.3], ["--option", "theta_rate=1"]])
def test_resume_does_not_take_a_result_of_other_settings_for_its_own(
    other: list[object], run: Run, tmp_path: Path
) -> None:
    train(run, "--out", tmp_path / "runs")
    code, _, err = train(run, "--out", tmp_path / "runs", "--resume", *other)
    assert (code, err.count("\n")) == (1, 1)
    assert "belongs to another run" in err


@pytest.mark.slow
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_what_cannot_be_printed_is_one_line() -> None:
    for into, environment, code in (("/dev/full", {}, 1), (os.devnull, {"PYTHONIOENCODING": "ascii"}, 0)):
        with Path(into).open("w") as out:
            said = subprocess.run(
                [sys.executable, "-m", "apical", "data", "list"],
                stdout=out,
                stderr=subprocess.PIPE,
                text=True,
                env={**os.environ, **environment},
            )
        assert said.returncode == code
        assert said.stderr == ("apical: No space left on device.\n" if code else "")


def test_without_a_checkpoint_none_is_written(run: Run, tmp_path: Path) -> None:
    assert train(run, "--rule", "bp", "--out", "runs", "--no-checkpoint").code == 0
    assert names_in(tmp_path / "runs") == ["results.sqlite"]


def test_without_out_nothing_is_written(run: Run, tmp_path: Path) -> None:
    before = names_in(tmp_path)
    assert train(run, "--rule", "bp").code == 0
    assert [name for name in names_in(tmp_path) if name != "__pycache__"] == before


def test_verbose_says_which_fast_path_was_not_taken(run: Run) -> None:
    assert "not used: CUDA graphs" in train(run, "--rule", "bp", "--device", "cpu", "--verbose").out


def test_a_seed_that_fails_is_told_and_the_exit_code_is_not_zero(run: Run, tmp_path: Path) -> None:
    said = train(run, "--rule", "bp", "--model", "networks_of_a_test:doomed", "--seeds", 2, "--out", "runs")
    assert said.code == 1
    assert re.fullmatch(r"apical: the loss of seed 1 was not finite in epoch 1.*\n", said.err)
    assert "1 seed" in said.out
    result = results_in(tmp_path / "runs")["bp"]
    assert list(result.failed) == [1]
    assert len(result.accuracies) == 1


@pytest.mark.parametrize("checkpoint", [[], ["--no-checkpoint"]])
def test_when_every_seed_fails_there_is_one_line_and_the_failure_is_recorded(
    checkpoint: list[str], run: Run, tmp_path: Path
) -> None:
    arguments = ["--rule", "bp", "--model", "networks_of_a_test:doomed", "--seeds", "1,2", "--out", "runs", *checkpoint]
    said = train(run, *arguments)
    assert said.code == 1
    assert re.fullmatch(r"apical: bp: the loss of seed 1 .* the loss of seed 2 .*\n", said.err)
    result = results_in(tmp_path / "runs")["bp"]
    assert (result.statuses, list(result.failed)) == ({"failed"}, [1, 2])
    assert all("the loss of seed" in str(reason) for reason in result.failed.values())
    again = train(run, *arguments, "--resume")
    assert again.code == 1
    assert "apical: bp: failed before: the loss of seed 1 was not finite in epoch 1" in again.err
    assert "bp: finished before, see runs/results.sqlite" in again.out


def test_epochs_before_every_seed_failed_are_kept_without_a_checkpoint(run: Run, tmp_path: Path) -> None:
    from apical.engine import loop

    evaluate = loop.evaluate

    def break_down(stack: object, *given: object) -> list[dict[str, float]]:
        calls.append(True)
        scores = evaluate(stack, *given)  # type: ignore[arg-type]
        return [{**each, "test_loss": float("nan")} for each in scores] if len(calls) > 1 else scores

    calls: list[bool] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "evaluate", break_down)
        assert train(run, "--rule", "bp", "--out", "runs", "--no-checkpoint").code == 1
    result = results_in(tmp_path / "runs")["bp"]
    assert result.statuses == {"failed"}
    assert [row["epoch"] for row in result.history] == [1]


def test_a_failure_is_not_forgotten_when_the_run_is_resumed(run: Run, tmp_path: Path) -> None:
    arguments = ["--rule", "bp", "--model", "networks_of_a_test:doomed", "--out", "runs"]
    assert train(run, *arguments, "--seeds", 2).code == 1
    again = train(run, *arguments, "--seeds", 2, "--resume")
    assert (again.code, again.err.count("\n")) == (1, 1)
    assert "bp: failed before: the loss of seed 1 was not finite" in again.err
    assert train(run, *arguments, "--seeds", 1, "--resume").code == 0  # which did not fail


def test_a_result_has_the_memory_that_the_run_took(run: Run, tmp_path: Path) -> None:
    assert train(run, "--rule", "bp", "--device", "cpu", "--out", "runs").code == 0
    with Store(tmp_path / "runs" / "results.sqlite", write=False) as store:
        (row,) = store.runs()
    assert row.memory_kind == "resident, whole process"
    assert row.peak_memory is not None
    assert 50e6 < row.peak_memory < 20e9
    assert row.seconds_per_epoch == pytest.approx(row.epochs[1][6])


def test_a_rule_that_diverges_does_not_stop_the_next_and_the_exit_code_says_so(run: Run, tmp_path: Path) -> None:
    # No float32 holds such a rate of Θ, which `dll` uses and `dll:frozen` does not.
    said = train(run, "--rule", "dll", "--rule", "dll:frozen", "--option", "theta_rate=1e300", "--out", "runs")
    assert said.code == 1
    assert re.fullmatch(r"apical: dll: the loss of seed 0 was not finite in epoch 1.*\n", said.err)
    assert said.out.startswith("dll:frozen mlp digits: ")
    results = results_in(tmp_path / "runs")
    assert {rule: result.statuses for rule, result in results.items()} == {"dll": {"failed"}, "dll:frozen": {"done"}}


def test_rules_may_be_separated_by_commas(run: Run, tmp_path: Path) -> None:
    said = train(run, "--rule", "bp,fa", "--rule", "readout", "--out", "runs")
    assert [line.split()[0] for line in list_results(said)] == ["bp", "fa", "readout"]


def test_resume_without_checkpoints_does_what_is_missing(run: Run, tmp_path: Path) -> None:
    arguments = ["--rule", "bp", "--out", "runs", "--no-checkpoint"]
    assert train(run, *arguments).code == 0
    before = results_in(tmp_path / "runs")["bp"]
    said = train(run, *arguments, "--rule", "fa", "--resume")
    assert (said.code, said.err) == (0, "")
    after = results_in(tmp_path / "runs")
    assert list(after) == ["bp", "fa"]
    assert after["bp"] == before
    assert names_in(tmp_path / "runs") == ["results.sqlite"]


def test_resume_trains_only_the_seeds_that_have_no_result(run: Run, tmp_path: Path) -> None:
    arguments = ["--rule", "bp", "--out", "runs", "--no-checkpoint"]
    assert train(run, *arguments, "--seeds", "1,").code == 0
    refused = train(run, *arguments, "--seeds", 2)
    assert (refused.code, refused.err.count("\n")) == (1, 1)
    assert "the result of bp in runs/results.sqlite exists already; --resume" in refused.err
    said = train(run, *arguments, "--seeds", 3, "--resume")
    assert "; 2 seeds)" in said.out
    assert sorted(results_in(tmp_path / "runs")["bp"].settings["seeds"]) == [0, 1, 2]


def test_stop_after_writes_the_beginning_and_resume_the_rest(run: Run, tmp_path: Path) -> None:
    said = train(run, "--epochs", 3, "--stop-after", 2, "--out", "runs")
    assert said.code == 0
    assert "stopped after 2 of 3 epochs" in said.out
    part = results_in(tmp_path / "runs")["dll"]
    assert part.statuses == {"running"}
    assert [row["epoch"] for row in part.history] == [1, 2]
    assert "unfinished │ 2 of 3" in run("results", "list", "runs/results.sqlite").out
    assert train(run, "--epochs", 3, "--out", "runs", "--resume").code == 0
    assert train(run, "--epochs", 3, "--out", "whole").code == 0
    resumed, whole = (results_in(tmp_path / out)["dll"] for out in ("runs", "whole"))
    assert without_time(resumed.history) == without_time(whole.history)
    assert without_time(part.history) == without_time(whole.history)[:2]


@pytest.mark.parametrize("words", [[], ["--out", "runs", "--no-checkpoint"]])
def test_a_run_that_stopped_without_a_checkpoint_cannot_go_on_which_is_said(words: list[str], run: Run) -> None:
    said = train(run, "--rule", "bp", *words, "--stop-after", 1)
    assert said.code == 0
    assert "stopped after 1 of 2 epochs; there is no checkpoint to go on from" in said.out
    assert "--resume" not in said.out


# Bad input.

BAD: dict[str, tuple[list[str], str]] = {
    "rule": (["--rule", "dlll"], "unknown rule 'dlll'; did you mean 'dll'"),
    "the second rule": (["--rule", "bp", "--rule", "nonsense"], "unknown rule 'nonsense'"),
    "option": (["--option", "theta_sdt=1"], "no option 'theta_sdt'"),
    "an option that is no pair": (["--option", "theta_std"], "is not NAME=VALUE"),
    "a value of an option": (["--option", "theta_std=-1"], "theta_std is -1"),
    "model": (["--model", "resnet"], "unknown model 'resnet'"),
    "module": (["--model", "no_such_module:build"], "cannot import 'no_such_module'"),
    "function": (["--model", "networks_of_a_test:absent"], "no function 'absent'"),
    "not a function": (["--model", "networks_of_a_test:number"], "no function 'number'"),
    "a network itself": (["--model", "networks_of_a_test:built"], "'built' in 'networks_of_a_test' is a Sequential"),
    "a module of wrong syntax": (["--model", "misspelt:build"], "misspelt.py, line 2: SyntaxError: "),
    "a module that fails": (["--model", "failing:build"], "failing.py, line 3: ZeroDivisionError: division by zero."),
    "an option of another rule": (
        ["--rule", "dll", "--rule", "bp", "--option", "theta_rate=0.1"],
        "rule 'bp' has no option 'theta_rate'",
    ),
    "an option twice": (["--option", "theta_std=1", "--option", "theta_std=2"], "gives 'theta_std' twice"),
    "a scale twice": (["--scale", "all", "--data-option", "scale=train"], "gives 'scale' twice"),
    "a function that fails": (["--model", "networks_of_a_test:broken"], "failed (ZeroDivisionError: "),
    "no module": (["--model", ":build"], "is not MODULE:FUNCTION"),
    "no function": (["--model", "networks_of_a_test:"], "is not MODULE:FUNCTION"),
    "relative module": (["--model", "..up:build"], "is not MODULE:FUNCTION"),
    "a network that cannot be trained": (
        ["--model", "networks_of_a_test:recurrent"],
        "the model cannot be run on the example",
    ),
    "data": (["--data", "mnits"], "did you mean mnist"),
    "data that is not here": (["--data", "mnist"], "apical data fetch mnist"),
    "seeds": (["--seeds", "two"], "--seeds 'two'"),
    "no seeds": (["--seeds", "0"], "seeds is 0"),
    "a seed twice": (["--seeds", "1,1"], "different whole numbers"),
    "a seed too large": (["--seeds", "9" * 30 + ","], "whole numbers"),
    "epochs": (["--epochs", "0"], "epochs is 0"),
    "too many epochs": (["--epochs", "1000000000000", "--stop-after", "1"], "--epochs 1000000000000 makes "),
    "a layer that is too wide": (["--model", "mlp-999999999"], "mlp-999999999 has a layer of a million units or more"),
    "lr": (["--lr", "nan"], "lr is nan"),
    "optimizer": (["--optimizer", "adm"], "unknown optimizer 'adm'"),
    "schedule": (["--schedule", "step"], "unknown schedule 'step'"),
    "protocol": (["--protocol", "best"], "unknown protocol 'best'"),
    "loss": (["--loss", "hinge"], "unknown loss 'hinge'"),
    "precision": (["--precision", "half"], "unknown precision 'half'"),
    "device": (["--device", "gpu"], "device 'gpu' cannot be used here"),
}


@pytest.mark.parametrize("what", BAD)
def test_bad_input_is_one_line_exit_code_1_and_nothing_half_written(what: str, run: Run, tmp_path: Path) -> None:
    arguments, words = BAD[what]
    (tmp_path / "misspelt.py").write_text("from torch import nn\ndef build(:\n")
    (tmp_path / "failing.py").write_text("def one():\n    return 1 / 0\nbuild = one()\n")
    said = run("train", *arguments, "--out", "runs")
    assert said.code == 1
    assert said.out == ""
    assert said.err.startswith("apical: ")
    assert words in said.err
    assert said.err.count("\n") == 1
    assert not (tmp_path / "runs").exists() or names_in(tmp_path / "runs") == []


@pytest.mark.parametrize("text", ["def build(:", "raise TypeError('no\\nway')"])
def test_a_module_of_rules_that_fails_is_one_line(text: str, run: Run, tmp_path: Path) -> None:
    (tmp_path / "bad_rules.py").write_text(f"\n{text}\n")
    said = run("--import", "bad_rules", "data", "list")
    assert (said.code, said.out, said.err.count("\n")) == (1, "", 1)
    assert re.search(r"cannot import 'bad_rules' for --import bad_rules: .*bad_rules.py, line 2: \w+Error: ", said.err)


def test_resume_goes_on_with_the_same_network_alone(run: Run, tmp_path: Path) -> None:
    arguments = ["--rule", "bp", "--model", "networks_of_a_test:small", "--out", "runs"]
    assert train(run, *arguments, "--stop-after", 1).code == 0
    (tmp_path / "networks_of_a_test.py").write_text(NETWORKS.replace("nn.Tanh()", "nn.Sigmoid()"))
    sys.modules.pop("networks_of_a_test")
    said = train(run, *arguments, "--resume")
    assert (said.code, said.out, said.err.count("\n")) == (1, "", 1)
    assert "another network of the same name 'networks_of_a_test:small'" in said.err


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (
            RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 64 bytes."),
            "(64 bytes were asked",
        ),
        (RuntimeError("CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has"), "(20.00 GiB were asked for)."),
        (MemoryError(), "there is not enough memory."),
    ],
)
def test_too_little_memory_is_one_line(error: Exception, words: str, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(apical, "fit", fail)
    said = train(run, "--rule", "bp")
    assert (said.code, said.out, said.err.count("\n")) == (1, "", 1)
    assert words in said.err


def test_an_error_that_nobody_foresaw_keeps_its_trace(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("a fault in apical")

    monkeypatch.setattr(apical, "fit", fail)
    with pytest.raises(RuntimeError, match="a fault in apical"):
        train(run, "--rule", "bp")


def test_resume_without_out_is_refused(run: Run) -> None:
    said = train(run, "--resume")
    assert (said.code, said.err.count("\n")) == (1, 1)
    assert "--resume needs the --out folder" in said.err


@pytest.mark.parametrize("out", ["file", "file/below"])
def test_an_out_folder_that_cannot_be_is_found_before_the_work(
    out: str, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setattr(apical, "fit", lambda *_, **__: pytest.fail("it trained"))
    said = train(run, "--out", out)
    assert (said.code, said.err.count("\n")) == (1, 1)
    assert said.err.startswith(f"apical: cannot write {out}")
    assert (tmp_path / "file").read_text() == "in the way"


def test_an_existing_result_is_not_overwritten_and_found_before_the_work(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert train(run, "--rule", "bp", "--out", "runs").code == 0
    before = {p.name: p.read_bytes() for p in (tmp_path / "runs").iterdir()}
    monkeypatch.setattr(apical, "fit", lambda *_, **__: pytest.fail("it trained"))
    said = train(run, "--rule", "fa", "--rule", "bp", "--out", "runs")
    assert (said.code, said.err.count("\n")) == (1, 1)
    assert "exists already; --resume" in said.err
    assert {p.name: p.read_bytes() for p in (tmp_path / "runs").iterdir()} == before


def test_an_existing_checkpoint_is_not_overwritten(run: Run, tmp_path: Path) -> None:
    assert train(run, "--rule", "bp", "--out", "runs").code == 0
    (tmp_path / "runs" / "results.sqlite").unlink()
    checkpoint = tmp_path / "runs" / "digits-mlp-bp.safetensors"
    before = checkpoint.read_bytes()
    said = train(run, "--rule", "bp", "--out", "runs")
    assert (said.code, said.err.count("\n")) == (1, 1)
    assert "exists already" in said.err
    said = train(run, "--rule", "bp", "--seeds", 2, "--out", "runs", "--resume")
    assert (said.code, said.err.count("\n")) == (1, 1)
    assert "belongs to another run: its seeds is [0]" in said.err
    assert checkpoint.read_bytes() == before
    checkpoint.write_bytes(before[:-9])
    said = train(run, "--rule", "bp", "--out", "runs", "--resume")
    assert (said.code, said.err.count("\n")) == (1, 1)
    assert "is not a checkpoint that can be read" in said.err
    checkpoint.write_bytes(before)
    assert train(run, "--rule", "bp", "--out", "runs", "--resume").code == 0


@pytest.mark.parametrize(
    "arguments",
    [["train", "--nosuch", "1"], ["train", "--epochs", "many"], ["trian"], ["report"], ["bench", "digits", "extra"]],
)
def test_wrong_usage_is_exit_code_2_without_a_traceback(arguments: list[str], run: Run) -> None:
    said = run(*arguments)
    assert said.code == 2
    assert "Traceback" not in said.err
    assert "Usage" in said.err


# bench


def test_bench_compares_every_rule_with_the_control(run: Run) -> None:
    said = run("bench", "--rule", "bp", "--rule", "fa", "--model", "mlp", "--seeds", 3, "--epochs", 2)
    assert said.code == 0
    assert [line.split()[0] for line in said.err.splitlines()] == ["readout", "bp", "fa"]  # as each is finished
    rows = {line.split()[1]: line for line in said.out.splitlines() if line.startswith("│")}
    assert rows.pop("rule")
    assert list(rows) == ["readout", "bp", "fa"]
    from apical.bench.cells import compare_seeds
    from apical.bench.defaults import find_settings

    scores = {}
    for rule in rows:
        settings = find_settings(rule, "mlp", "digits") | {"epochs": 2}
        fit = apical.fit("mlp", "digits", rule=rule, seeds=3, progress=False, **settings)
        scores[rule] = {seed: 100 * a for seed, a in enumerate(fit.accuracies)}
        mean = sum(scores[rule].values()) / 3
        deviation = (sum((a - mean) ** 2 for a in scores[rule].values()) / 2) ** 0.5
        assert f"{mean:.2f} ± {deviation:.2f}" in rows[rule]
    assert "control" in rows["readout"]
    for rule in ("bp", "fa"):
        difference = compare_seeds(scores[rule], scores["readout"])
        assert difference is not None
        assert f"{difference.mean:+.2f} ± {difference.error:.2f}" in rows[rule]
        assert ("hidden layers do not help" in rows[rule]) is not difference.learns


def test_bench_knows_a_wrong_model_before_the_work(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("apical.bench.runner.fit", lambda *_, **__: pytest.fail("it trained"))
    for model in ("resnet", "networks_of_a_test:small"):
        said = run("bench", "--model", "mlp", "--model", model)
        assert (said.code, said.err.count("\n")) == (1, 1)
        assert f"the suite digits has no model '{model}'; it has mlp, cnn." in said.err


def test_bench_says_by_its_exit_code_that_a_run_failed(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr("apical.bench.runner.fit", broken)
    said = run("bench", "--rule", "bp", "--model", "mlp", "--seeds", 2, "--epochs", 1)
    assert said.code == 1
    assert "bp mlp digits: failed (RuntimeError: out of memory)" in said.err


def test_the_package_runs_as_the_command() -> None:
    command = [sys.executable, "-m", "apical", "--version"]
    said = subprocess.run(command, capture_output=True, text=True, check=True)
    assert said.stdout == f"apical {apical.__version__}\n"


def test_bench_of_both_networks_has_two_tables(run: Run) -> None:
    said = run("bench", "--rule", "bp", "--seeds", "1", "--epochs", 1)
    assert said.code == 0
    assert "digits, mlp" in said.out
    assert "digits, cnn" in said.out
    assert said.out.count("one seed") == 2


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--rule", "dlll"], "unknown rule 'dlll'"),
        (["--seeds", "0"], "seeds is 0"),
        (["--epochs", "0"], "epochs is 0"),
        (["--device", "gpu"], "device 'gpu'"),
        (["--limit", "nan"], "--limit is nan"),
        (["--store", "page.html"], "page.html would be overwritten by its page"),
    ],
)
def test_bench_refuses_bad_input_in_one_line(arguments: list[str], words: str, run: Run) -> None:
    said = run("bench", "--rule", "bp", "--model", "mlp", *arguments)
    assert said.code == 1
    assert said.err.startswith("apical: ")
    assert words in said.err
    assert said.err.count("\n") == 1


# Suites and stores.

SMALL = ["--rules", "bp,fa", "--models", "mlp", "--seeds", 2, "--epochs", 1, "--store", "s.sqlite"]


def test_bench_keeps_its_results_and_ends_with_the_path_of_the_page(run: Run, tmp_path: Path) -> None:
    pytest.importorskip("plotly")
    said = run("bench", "digits", *SMALL)
    assert said.code == 0
    assert said.out.splitlines()[-1] == "The store is s.sqlite, its page s.html."
    assert "digits, mlp" in (tmp_path / "s.html").read_text("utf-8")
    again = run("bench", "digits", *SMALL)
    assert (again.code, again.err) == (0, "")  # nothing was left to do
    assert again.out == said.out
    (tmp_path / "s.html").write_text("my own words")
    spared = run("bench", "digits", *SMALL)
    assert spared.code == 0
    assert "s.html is no page of apical's and is left as it is" in spared.out.replace("\n", " ")
    assert (tmp_path / "s.html").read_text() == "my own words"


def test_bench_without_plotly_has_no_page_and_says_why(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "plotly", None)
    said = run("bench", "digits", *SMALL)
    assert said.code == 0
    assert "there is no page of it" in said.out
    assert "pip install 'apical[report]'" in said.out
    assert not (tmp_path / "s.html").exists()


def test_a_dry_run_lists_runs_and_totals_and_writes_nothing(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("apical.bench.estimate.time_epoch", lambda *_: None)
    before = names_in(tmp_path)
    said = run("bench", "table1", "--dry-run")
    assert (said.code, said.err) == (0, "")
    assert sum(line.startswith("│") for line in said.out.splitlines()) == 113
    assert "Total: " in said.out
    assert "Without pc, ep, dtp: " in said.out
    assert "Not run: mnist is absent" in said.out
    assert names_in(tmp_path) == before


def test_bench_says_which_data_are_missing_and_does_the_rest(run: Run) -> None:
    said = run("bench", "table3", "--quick", "--models", "mlp", "--store", "s.sqlite")
    assert said.code == 0
    assert said.out.endswith("The store is s.sqlite, its page s.html.\n")  # which says that there are no runs
    assert "not run: mnist is absent" in said.err
    assert "`apical data fetch mnist`" in said.err
    assert "no data" in said.out


def test_ray_may_have_an_address_or_none(monkeypatch: pytest.MonkeyPatch, run: Run) -> None:
    asked = []
    monkeypatch.setattr("apical.cli.bench.run_request", lambda request: asked.append(request.ray) or ([], False))
    monkeypatch.setattr("apical.cli.bench._write_page", lambda store: None)
    for words in (["--ray"], ["--ray", "--quick"], ["--ray", "ray://there:1"], []):
        assert run("bench", "digits", *words).code == 0
    assert asked == [True, True, "ray://there:1", False]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store and a folder of results, made by the commands once and copied for each test that begins with them."""
    folder = tmp_path_factory.mktemp("made")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert code_of(patch, "bench", "digits", *SMALL) == 0
        for rule in ("readout", "bp"):
            assert code_of(patch, *TRAIN, "--rule", rule, "--seeds", 2, "--alignment", "--out", "runs") == 0
    return folder


@pytest.fixture
def stored(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copy(made / "s.sqlite", tmp_path))


def test_results_are_listed_shown_and_exported(run: Run, stored: Path, tmp_path: Path) -> None:
    listed = run("results", "list", "s.sqlite")
    assert "s.sqlite: 6 runs" in listed.out
    rows = [line.strip("│ ").split() for line in listed.out.splitlines() if line.startswith("│ bp")]
    assert [row[6] for row in rows] == ["0", "1"]
    key = rows[0][-1]
    shown = run("results", "show", key[:6], "--store", "s.sqlite").out
    assert "command: apical train --rule bp --model mlp --data digits" in shown
    assert shown.count('"epoch": 1') == 2
    for format, words in (("csv", "rule,model"), ("latex", "tabular"), ("markdown", "## digits, mlp"), ("json", "[")):
        said = run("results", "export", "s.sqlite", "--format", format)
        assert said.code == 0
        assert words in said.out
        assert run("results", "export", "s.sqlite", "--format", format, "--out", f"x.{format}").code == 0
        assert (tmp_path / f"x.{format}").read_text("utf-8") == said.out
    assert "average" in run("results", "export", "s.sqlite", "--format", "markdown", "--suite", "table1").out


def test_runs_of_another_store_are_imported_once(run: Run, trained: Path) -> None:
    assert run("results", "import", "runs", "--store", "s.sqlite").out == "4 of 4 runs are new in s.sqlite.\n"
    assert run("results", "import", "runs", "--store", "s.sqlite").out == "0 of 4 runs are new in s.sqlite.\n"
    assert "s.sqlite: 4 runs" in run("results", "list", "s.sqlite").out


def test_a_report_of_a_store_is_that_of_its_results(run: Run, trained: Path, tmp_path: Path) -> None:
    pytest.importorskip("plotly")
    run("results", "import", "runs", "--store", "s.sqlite")
    pages = []
    trained.rename(tmp_path / "a-folder")
    for source in ("a-folder", "s.sqlite"):
        assert run("report", source, "--out", "page.html").code == 0
        pages.append((tmp_path / "page.html").read_text("utf-8").replace(source, "SOURCE"))
    assert pages[0] == pages[1]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["bench", "--store", "."], ". is a folder; a store is a file, such as results.sqlite"),
        (["results", "list", "none.sqlite"], "there is no store at none.sqlite"),
        (["results", "export", "none.sqlite"], "there is no store at none.sqlite"),
        (["results", "export", "s.sqlite", "--format", "xls"], "unknown format 'xls'"),
        (["results", "export", "s.sqlite", "--format", "parquet"], "name the file with --out"),
        (["results", "export", "s.sqlite", "--suite", "tabel1"], "did you mean 'table1'"),
        (["results", "show", "zzz", "--store", "s.sqlite"], "no run whose key begins with 'zzz'"),
        (["results", "export", "s.sqlite", "--out", "."], ". could not be written (Is a directory)"),
        (["results", "import", "nowhere"], "there is no folder nowhere"),
        (["report", "none.sqlite"], "none.sqlite"),
        (["bench", "tabel1"], "did you mean 'table1'"),
        (["bench", "--workers", "0"], "--workers is 0"),
        (["bench", "--defaults", "nowhere.toml"], "nowhere.toml cannot be read"),
    ],
)
def test_bad_words_about_stores_are_one_line(words: list[str], said: str, run: Run, stored: Path) -> None:
    found = run(*words)
    assert (found.code, found.err.count("\n")) == (1, 1)
    assert said in found.err


# report


@pytest.fixture
def trained(made: Path, tmp_path: Path) -> Path:
    return shutil.copytree(made / "runs", tmp_path / "runs")


def test_report_writes_the_same_page_and_figures_every_time(run: Run, trained: Path, tmp_path: Path) -> None:
    pytest.importorskip("plotly")
    pytest.importorskip("matplotlib")
    written = []
    for _ in range(2):
        said = run("report", "runs", "--out", "pages/page.html", "--figures", "pages/drawn")
        assert (said.code, said.err) == (0, "")
        files = [p for p in (tmp_path / "pages").rglob("*") if p.is_file()]
        written.append({p.relative_to(tmp_path).as_posix(): p.read_bytes() for p in files})
        for p in files:
            p.unlink()
    assert {"pages/page.html", "pages/drawn/curves-digits-mlp.svg"} <= set(written[0])
    assert written[0] == written[1]
    assert written[0]["pages/drawn/curves-digits-mlp.svg"].startswith(b"<?xml")


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "a store": (lambda folder: (folder / "x.sqlite").write_text("{" * 100), "x.sqlite is not a store of results"),
    "the database of another program": (
        lambda folder: sqlite3.connect(folder / "x.sqlite").execute("CREATE TABLE t (a)").connection.close(),
        "x.sqlite is a database of another program",
    ),
}


@pytest.mark.parametrize("what", DAMAGE)
def test_report_names_a_damaged_file_and_writes_nothing(what: str, run: Run, trained: Path, tmp_path: Path) -> None:
    damage, words = DAMAGE[what]
    damage(trained)
    said = run("report", "runs", "--out", "pages/page.html")
    assert (said.code, said.err.count("\n")) == (1, 1)
    assert said.err.startswith("apical: ")
    assert words in said.err
    assert not (tmp_path / "pages").exists()


def test_an_empty_store_of_a_folder_is_left_out_with_a_warning(run: Run, trained: Path, tmp_path: Path) -> None:
    pytest.importorskip("plotly")
    (trained / "x.sqlite").touch()
    words = "apical: runs/x.sqlite is empty: no run was recorded in it; it is left out.\n"
    said = run("results", "import", "runs", "--store", "s.sqlite")
    assert said == Said(0, "4 of 4 runs are new in s.sqlite.\n", words)
    said = run("report", "runs", "--out", "page.html")
    assert (said.code, said.err) == (0, words)


def test_report_of_no_folder_or_no_results_is_one_line(run: Run, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for folder in ("nothing", "empty"):
        said = run("report", folder, "--out", "page.html")
        assert (said.code, said.err.count("\n")) == (1, 1)
        assert folder in said.err
    assert not (tmp_path / "page.html").exists()


def test_report_to_a_place_that_cannot_be_is_one_line(run: Run, trained: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    said = run("report", "runs", "--out", "file/page.html")
    assert (said.code, said.err.count("\n")) == (1, 1)
    assert "could not be written" in said.err


def test_report_without_matplotlib_says_what_to_install(
    run: Run, trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    said = run("report", "runs", "--figures", "drawn")
    assert (said.code, said.err.count("\n")) == (1, 1)
    assert "pip install 'apical[plot]'" in said.err
    assert not (tmp_path / "drawn").exists()


def test_report_writes_html_and_figures_for_a_paper(run: Run, trained: Path, tmp_path: Path) -> None:
    pytest.importorskip("plotly")
    pytest.importorskip("matplotlib")
    run("results", "import", "runs", "--store", "s.sqlite")
    said = run("report", "s.sqlite", "--out", "pages/page.html", "--figures", "drawn", "--format", "png")
    assert (said.code, said.err) == (0, "")
    drawn = list((tmp_path / "drawn").iterdir())
    assert said.out == f"wrote pages/page.html and {len(drawn)} figures in drawn\n"
    assert {path.suffix for path in drawn} == {".png"}
    assert (tmp_path / "pages" / "page.html").read_text("utf-8").startswith("<!doctype html>")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--out", "page.docx", "--figures", "drawn"], "page.docx does not end in .html"),
        (["--out", "page.html", "--figures", "drawn", "--format", "gif"], "'gif'; svg, png, pdf work"),
    ],
)
def test_report_refuses_what_it_cannot_write_in_one_line(
    words: list[str], said: str, run: Run, trained: Path, tmp_path: Path
) -> None:
    before = names_in(tmp_path)
    answer = run("report", "runs", *words)
    assert (answer.code, answer.err.count("\n")) == (1, 1)
    assert said in answer.err
    assert names_in(tmp_path) == before


def test_a_page_is_never_written_over_a_store(run: Run, stored: Path, tmp_path: Path) -> None:
    target = tmp_path / "page.html"
    shutil.copy(stored, target)
    before = target.read_bytes()
    for source in (target, stored):
        said = run("report", source, "--out", target)
        assert (said.code, said.err.count("\n")) == (1, 1)
        assert "is a store of results and is not overwritten" in said.err
    assert target.read_bytes() == before


def test_report_without_plotly_says_what_to_install(
    run: Run, trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "plotly", None)
    said = run("report", "runs", "--out", "page.html")
    assert (said.code, said.err.count("\n")) == (1, 1)
    assert "pip install 'apical[report]'" in said.err
    assert not (tmp_path / "page.html").exists()


# Tuning.


def test_tune_runs_the_listed_trials_and_shows_the_best_first(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trials = [{"lr": 1e-5}, {"lr": 0.02}, {"lr": 1e30, "optimizer": "sgd", "loss": "mse"}]
    shipped = {"search.toml": {"digits": {"mlp": {"bp": trials}}}, "defaults.toml": {}}
    monkeypatch.setattr("apical.bench.defaults.load_shipped", shipped.__getitem__)
    said = run("tune", "--rule", "bp", "--data", "digits", "--device", "cpu", "--out", "tuning")
    assert said.code == 0, said.err
    places = [said.out.index(text) for text in ("lr 0.02", "lr 1e-05", "diverged")]
    assert places == sorted(places)
    lines = (tmp_path / "tuning" / "digits-mlp-bp.jsonl").read_text().splitlines()
    assert sorted((json.loads(line)["trial"] for line in lines), key=str) == sorted(trials, key=str)


def test_tune_names_a_line_of_its_file_that_is_no_result(run: Run, tmp_path: Path) -> None:
    (tmp_path / "tuning").mkdir()
    (tmp_path / "trials.jsonl").write_text('{"lr": 0.01}')
    (tmp_path / "tuning" / "digits-mlp-bp.jsonl").write_text('{"test_accuracy": 0.5, "std": 0.0}\n')
    said = run("tune", "--rule", "bp", "--data", "digits", "--trials", "trials.jsonl", "--out", "tuning")
    assert (said.code, said.out, said.err.count("\n")) == (1, "", 1)
    assert "line 1 of tuning/digits-mlp-bp.jsonl is not the result of a trial" in said.err


def test_tune_without_a_list_says_what_there_is(run: Run, tmp_path: Path) -> None:
    said = run("tune", "--rule", "bp", "--data", "tiny_imagenet", "--model", "cnn", "--out", "tuning")
    assert (said.code, said.err.count("\n")) == (1, 1)
    assert "lists no trials of bp for cnn on tiny_imagenet" in said.err
    assert not (tmp_path / "tuning").exists()


# Characters and series.

OWN = """
from torch import nn
import apical

def four():
    return apical.Elman(nn.RNN(4, 6, batch_first=True), nn.Linear(6, 4))

def three():
    return apical.Elman(nn.RNN(3, 6, batch_first=True), nn.Linear(6, 3))
"""


@pytest.fixture
def own(run: Run, tmp_path: Path) -> Run:
    """Where there are a text, a table, and small networks for them."""
    (tmp_path / "networks_of_a_test.py").write_text(OWN)
    (tmp_path / "my text.txt").write_text("abcd" + "".join(random.Random(0).choices("abcd", k=300)))
    rows = [",".join(f"{random.Random(i).random():.3f}" for i in (t, t + 1, t + 2)) for t in range(100)]
    (tmp_path / "own.csv").write_text("\n".join(rows))
    return run


TEXT = ["--data", "text:my text.txt", "--model", "networks_of_a_test:four", "--data-option", "window=5"]
TABLE = ["--data", "series:own.csv", "--data-option", "window=5", "--model", "networks_of_a_test:three"]


def windows_of(length: int, arguments: list[str]) -> list[str]:
    return [word.replace("window=5", f"window={length}") for word in arguments]


def test_train_on_a_text_of_ones_own_then_write_more_of_it(own: Run, tmp_path: Path) -> None:
    said = train(own, *TEXT, "--rule", "dll:kolen-pollack", "--out", "runs")
    assert (said.code, said.err) == (0, "")
    name = "text_my_text.txt-networks_of_a_test_four-dll.kolen-pollack"
    assert names_in(tmp_path / "runs") == ["results.sqlite", f"{name}.safetensors"]
    result = results_in(tmp_path / "runs")["dll:kolen-pollack"]
    assert result.settings["data"] == "text:my text.txt"
    assert result.settings["data_options"] == {"window": 5, "stride": 5, "unknown": False}
    bits = result.history[-1]["test_bits"]
    assert f"{result.accuracies[0]:.2f} %, {bits:.3f} bits per character (test, last" in said.out
    written = own("sample", tmp_path / "runs" / f"{name}.safetensors", "--prompt", "cab", "--length", 20, "--seed", 4)
    assert (written.code, written.err) == (0, "")
    assert re.fullmatch(r"cab[abcd]{20}\n", written.out)
    path = tmp_path / "runs" / f"{name}.safetensors"
    assert written.out[:-1] == apical.sample(path, "cab", length=20, seed=4)
    cool = own("sample", path, "--prompt", "cab", "--length", 20, "--temperature", 0)
    assert cool.out[:-1] == apical.sample(path, "cab", length=20, temperature=0)


@pytest.mark.parametrize("arguments", [TEXT, TABLE, [*TABLE, "--data-option", "task=forecast", "--scale", "all"]])
def test_the_command_of_a_run_on_sequences_repeats_it(own: Run, tmp_path: Path, arguments: list[str]) -> None:
    assert train(own, *arguments, "--rule", "fa", "--out", "one").code == 0
    (result,) = results_in(tmp_path / "one").values()
    program, *command = shlex.split(result.command or "")
    assert program == "apical"
    assert own(*command, "--out", "two").code == 0
    (again,) = results_in(tmp_path / "two").values()
    assert again.settings == result.settings
    assert "finished before" in train(own, *arguments, "--rule", "fa", "--out", "one", "--resume").out
    other = train(own, *windows_of(3, arguments), "--rule", "fa", "--out", "one", "--resume")
    assert "its data_options is" in other.err
    assert [row["test_loss"] for row in again.history] == [row["test_loss"] for row in result.history]


def test_series_have_errors_in_the_place_of_an_accuracy(own: Run, tmp_path: Path) -> None:
    said = train(own, *TABLE, "--scale", "all", "--rule", "bp", "--seeds", "2", "--out", "runs")
    assert (said.code, said.err) == (0, "")
    result = results_in(tmp_path / "runs")["bp"]
    assert result.accuracies == []
    options = {"task": "forecast", "window": 5, "stride": 1, "scale": "all", "horizon": 1}
    assert result.settings["data_options"] == options
    mse, mae = ([row[name] for row in result.history[-2:]] for name in ("test_mse", "test_mae"))
    words = f"MSE {sum(mse) / 2:.4f} ± {abs(mse[0] - mse[1]) / 2**0.5:.4f}, MAE {sum(mae) / 2:.4f} ± "
    assert words in said.out
    pytest.importorskip("plotly")
    assert own("report", "runs", "--out", "page.html").code == 0
    assert f"{sum(mse) / 2:.4f}" in (tmp_path / "page.html").read_text("utf-8")


def test_options_of_the_data_join_the_recorded_ones_and_go_before_them(
    own: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded = {"epochs": 1, "data_options": {"window": 9, "stride": 2}}
    monkeypatch.setattr("apical.cli.train.find_settings", lambda *_: recorded)
    assert own("train", *TEXT, "--rule", "bp", "--out", "runs").code == 0
    assert results_in(tmp_path / "runs")["bp"].settings["data_options"] == {"window": 5, "stride": 2, "unknown": False}


SEQUENCES = {
    "an option of the data": ([*TEXT, "--data-option", "widow=3"], "have no option 'widow'"),
    "an option without a value": ([*TEXT, "--data-option", "window"], "--data-option 'window' is not NAME=VALUE"),
    "an option of images": (["--data-option", "window=3"], "the data 'digits' have no option 'window'; they have none"),
    "a scale of a text": ([*TEXT, "--scale", "all"], "have no option 'scale'"),
    "a scale": ([*TABLE, "--scale", "test"], "unknown scale 'test'"),
    "a window": (windows_of(400, TEXT), "choose a shorter window"),
    "a stride": ([*TEXT, "--data-option", "stride=-1"], "stride is -1"),
    "no file": (["--data", "text:nothing.txt", "--model", "rnn"], "nothing.txt cannot be read"),
    "images": (["--model", "rnn"], "an rnn reads sequences, but digits has"),
    "a rule": ([*TEXT, "--rule", "dfa"], "rule 'dfa' cannot train a recurrent network"),
}


def test_resume_goes_on_with_the_same_text_alone(own: Run, tmp_path: Path) -> None:
    assert train(own, *TEXT, "--out", "runs", "--stop-after", 1).code == 0
    text = tmp_path / "my text.txt"
    text.write_text(text.read_text()[::-1])
    said = train(own, *TEXT, "--out", "runs", "--resume")
    assert (said.code, said.out, said.err.count("\n")) == (1, "", 1)
    assert "other data of the same name 'text:my text.txt'" in said.err


def test_two_texts_whose_checkpoints_have_one_name_are_told_apart_by_their_contents(own: Run, tmp_path: Path) -> None:
    text = (tmp_path / "my text.txt").read_text()
    (tmp_path / "ca").mkdir()
    (tmp_path / "ca" / "b.txt").write_text(text)
    (tmp_path / "ca_b.txt").write_text(text[::-1])
    first, second = ([word.replace("my text.txt", name) for word in TEXT] for name in ("ca/b.txt", "ca_b.txt"))
    assert train(own, *first, "--out", "runs", "--stop-after", 1).code == 0
    said = train(own, *second, "--out", "runs", "--resume")
    assert (said.code, said.out, said.err.count("\n")) == (1, "", 1)
    assert "the checkpoint belongs to other data" in said.err
    (tmp_path / "ca_b.txt").write_text(text)  # the same run
    assert train(own, *second, "--out", "runs", "--resume").code == 0


def test_a_finished_run_on_a_text_that_changed_is_not_taken_for_its_result(own: Run, tmp_path: Path) -> None:
    assert train(own, *TEXT, "--out", "runs", "--no-checkpoint").code == 0
    assert "finished before" in train(own, *TEXT, "--out", "runs", "--no-checkpoint", "--resume").out
    text = tmp_path / "my text.txt"
    text.write_text(text.read_text()[::-1])
    said = train(own, *TEXT, "--out", "runs", "--no-checkpoint", "--resume")
    assert (said.code, said.err.count("\n")) == (0, 1)
    assert "the contents of its data are not those of an earlier run, so it runs anew" in said.err


@pytest.mark.parametrize("what", SEQUENCES)
def test_bad_sequences_are_one_line_and_nothing_half_written(what: str, own: Run, tmp_path: Path) -> None:
    arguments, words = SEQUENCES[what]
    said = own("train", *arguments, "--epochs", 1, "--out", "runs")
    assert said.code == 1
    assert words in said.err
    assert said.err.startswith("apical: ")
    assert said.err.count("\n") == 1
    assert not (tmp_path / "runs").exists() or names_in(tmp_path / "runs") == []


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nothing.safetensors"], "not a checkpoint that can be read"),
        (["runs/digits-mlp-bp.safetensors"], "is of a run on digits, which is not text"),
        (["nothing.safetensors", "--length", "0"], "length is 0"),
        (["nothing.safetensors", "--temperature", "-1"], "temperature is -1.0"),
    ],
)
def test_sample_refuses_in_one_line(arguments: list[str], words: str, run: Run, trained: Path) -> None:
    said = run("sample", *arguments)
    assert (said.code, said.out, said.err.count("\n")) == (1, "", 1)
    assert words in said.err


# The rest.

HELP: dict[str, list[str]] = {
    "": ["train", "bench", "tune", "report", "results", "sample", "audit", "data", "--version", "--import"],
    "train": [
        *["--rule", "--model", "--data", "--seeds", "--epochs", "--lr", "--batch-size", "--optimizer"],
        *["--schedule", "--protocol", "--loss", "--label-smoothing", "--clip", "--option", "--alignment"],
        *[
            "--device",
            "--precision",
            "--compile",
            "--no-compile",
            "--out",
            "--checkpoint",
            "--no-checkpoint",
            "--resume",
            "--verbose",
        ],
        *["MODULE:FUNCTION", "--data-option", "--optimizer-option", "--untuned", "--scale", "text:PATH", "series:PATH"],
    ],
    "sample": ["checkpoint", "--prompt", "--length", "--temperature", "--seed"],
    "bench": [
        *["--store", "--rules", "--models", "--data", "--seeds", "--epochs", "--quick", "--dry-run"],
        *["--defaults", "--redo", "--limit", "--workers", "--ray", "--device", "table1"],
    ],
    "results": ["list", "show", "export", "import"],
    "tune": ["--rule", "--model", "--data", "--seeds", "--device", "--out"],
    "report": ["source", "--out", "--figures", "--format"],
    "data": ["list", "fetch", "verify"],
}


@pytest.mark.parametrize("command", HELP)
def test_help_names_every_option(command: str, run: Run) -> None:
    said = run(*command.split(), "--help")
    assert said.code == 0
    assert [word for word in HELP[command] if word.lower() not in said.out.lower()] == []


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("report", "The HTML page; report.html by default, unless there is --figures."),
        ("train", "warmup-linear"),
        ("train", "textcnn"),
        ("tune", "textcnn"),
        ("results delete", "If a process works on one of them, none is deleted."),
        ("bench", "Train up to so many networks as one run, where lines differ only in rule, loss, rates and options."),
    ],
)
def test_help_says_what_works(command: str, words: str, run: Run) -> None:
    assert words in " ".join(run(*command.split(), "--help").out.replace("│", " ").split())


@pytest.mark.parametrize("model", [[], ["--model", "mlp"], ["--model", "cnn"]])
def test_audit_refuses_a_shape_of_its_own_networks(model: list[str], run: Run) -> None:
    said = run("audit", "bp", *model, "--shape", "3,32,32")
    assert (said.code, said.out, said.err.count("\n")) == (1, "", 1)
    assert "--shape 3,32,32 is for a network of yours, --model MODULE:FUNCTION" in said.err


def test_version_is_the_packages(run: Run) -> None:
    assert run("--version") == Said(0, f"apical {apical.__version__}\n", "")


def test_data_commands_are_reached_and_their_errors_are_one_line(run: Run) -> None:
    assert "digits" in run("data", "list").out
    said = run("data", "verify", "cifr10")
    assert said.code == 1
    assert said.err == "apical: 1 of 1 data sets failed the check: cifr10.\n"


@pytest.mark.parametrize("missing", ["typer", "rich"])
def test_without_typer_or_rich_one_sentence_says_what_to_install(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == f"apical: the command line needs {missing}: pip install 'apical[cli]' installs it."


def test_the_folder_of_the_run_is_the_users_own(run: Run, tmp_path: Path) -> None:
    """MODULE:FUNCTION is looked for where the command is run."""
    assert str(tmp_path) == os.getcwd()  # noqa: PTH109
    assert train(run, "--rule", "bp", "--model", "networks_of_a_test:small").code == 0


# Hostile names and files.

HOSTILE = "\x1b]0;owned\x07\x1b[2J\x9b31m\u202egnp\rx"
"""It would set the title of a terminal, clear it, turn the direction of text and overwrite the line."""


def is_clean(said: Said) -> bool:
    return not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e]", said.out + said.err)


@pytest.mark.parametrize("command", ["list", "show", "export --format csv", "export --format markdown", "export"])
def test_names_in_a_store_do_not_control_the_terminal(command: str, run: Run, tmp_path: Path) -> None:
    with Store(tmp_path / "results.sqlite") as store:
        declaration = declared("bp" + HOSTILE, "mlp" + HOSTILE, "mnist" + HOSTILE, options={"a\nb": HOSTILE})
        fill(store, declaration, [90.0], device=HOSTILE, command=HOSTILE)
    word, *options = command.split()
    said = run("results", word, declaration.key if word == "show" else "results.sqlite", *options)
    assert said.code == 0
    assert "owned" in said.out
    assert is_clean(said)


def test_names_in_an_error_a_table_or_a_warning_do_not_control_the_terminal(run: Run, tmp_path: Path) -> None:
    name = HOSTILE.replace("/", "") + "\nsecond line"
    said = run("data", "verify", f"text:{name}")
    assert (said.code, is_clean(said)) == (1, True)
    said = run("results", "list", f"{name}.sqlite")
    assert (said.code, said.err.count("\n"), is_clean(said)) == (1, 1, True)
    (tmp_path / "warns.py").write_text(f"import warnings\nwarnings.warn({name!r})\n")
    said = run("--import", "warns", "data", "list")
    assert (said.code, said.err.count("\n"), is_clean(said)) == (0, 1, True)
    assert "owned" in said.err


def test_brackets_in_a_path_are_no_markup(run: Run, tmp_path: Path) -> None:
    (tmp_path / "[").mkdir()
    (tmp_path / "[" / "red]a").write_text("abab" * 20)
    said = run("data", "verify", "text:[/red]a")
    assert said.code == 0
    assert "[/red]a" in said.out


def test_the_working_folder_comes_after_installed_packages(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "iniconfig.py").write_text("raise SystemExit('the file in the working folder ran')")
    (tmp_path / "own_rules_of_a_test.py").write_text("import iniconfig")
    monkeypatch.delitem(sys.modules, "iniconfig", raising=False)
    assert run("--import", "own_rules_of_a_test", "data", "list").code == 0


def test_a_module_with_the_name_of_an_installed_one_is_asked_to_be_renamed(run: Run, tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise SystemExit('the file in the working folder ran')")
    said = run("--import", "torch", "data", "list")
    assert (said.code, said.out, said.err.count("\n")) == (1, "", 1)
    assert "torch.py for --import torch has the name of another module, which comes first: rename it" in said.err


@pytest.mark.parametrize("what", ["model", "data", "out"])
def test_a_name_that_is_too_long_for_a_file_is_refused_before_the_work(
    what: str, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(apical, "fit", lambda *_, **__: pytest.fail("it trained"))
    long = "n" * 241
    (tmp_path / "long.py").write_text(NETWORKS + f"{long} = small\n")
    (tmp_path / long).write_text("abcd" * 40)
    given = {"--model": "mlp", "--data": "digits", "--out": "runs"}
    given |= {"model": {"--model": f"long:{long}"}, "data": {"--data": f"text:{long}"}, "out": {"--out": "n" * 256}}[
        what
    ]
    said = run("train", "--rule", "bp", "--epochs", 1, *(word for pair in given.items() for word in pair))
    assert (said.code, said.err.count("\n")) == (1, 1)
    assert "File name too long; choose a shorter name" in said.err
