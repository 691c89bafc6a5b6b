"""The runner: what is missing is done once, by whom ever; what is interrupted goes on; what breaks breaks alone."""

import multiprocessing
import os
import random
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import apical
from apical.bench import __main__ as bench_main
from apical.bench import run, runner
from apical.bench.database import get_checkpoint_folder, get_checkpoint_path
from apical.bench.declaration import Declaration
from apical.bench.provenance import describe_process
from apical.bench.runner import Claim, Runner, train
from apical.bench.store import Outcome, Row, Store
from apical.bench.suites import Job
from apical.errors import DataError, MissingExtraError, StoreError
from cases import mostly_slow
from disk import largest_file
from stores import alter, command, content

pytest.importorskip("sklearn")

SMALL: dict[str, Any] = {"rules": ["bp", "dll"], "models": ["mlp"], "seeds": 2, "epochs": 3, "device": "cpu"}
forks = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot copy a process")


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return tmp_path / "results.sqlite"


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small suite, run without any interruption."""
    path = tmp_path_factory.mktemp("whole") / "results.sqlite"
    run(store=path, **SMALL)
    return path


def rows(path: Path) -> list[Row]:
    with Store(path, write=False) as opened:
        return opened.runs()


def counted(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, list[int]]]:
    """The seeds of every run that is trained from now on."""
    asked: list[tuple[str, list[int]]] = []

    def watched(claim: Claim, *how: Any) -> Outcome:
        asked.append((claim.declaration.rule, claim.seeds))
        return train(claim, *how)

    monkeypatch.setattr(runner, "train", watched)
    return asked


# What is done.


def test_a_run_is_what_fit_gives_and_says_all_about_itself(reference: Path) -> None:
    found = {(row.declaration.rule, row.seed): row for row in rows(reference)}
    assert list(found) == [(rule, seed) for rule in ("readout", "bp", "dll") for seed in (0, 1)]
    row = found["dll", 1]
    settings = {k: v for k, v in row.declaration.settings([0, 1]).items() if k not in ("model", "data")}
    alone = apical.fit("mlp", "digits", **settings, progress=False, device="cpu")
    with Store(reference, write=False) as opened:
        history = opened.history(row)
    assert [r["test_accuracy"] for r in history] == [r["test_accuracy"] for r in alone.of_seed(1)]
    assert [r["loss"] for r in history] == [r["loss"] for r in alone.of_seed(1)]
    assert (row.status, row.together, row.error, row.old) == ("done", 2, None, False)
    assert row.apical == apical.__version__
    assert row.code is not None
    assert row.code.startswith(apical.__version__)
    assert row.seconds_per_epoch == pytest.approx(sum(r["seconds"] for r in history[1:]) / 2)
    assert row.memory_kind == "resident, whole process"
    assert row.peak_memory is not None
    assert 50e6 < row.peak_memory < 20e9
    assert row.device is not None
    assert row.device.endswith("CPU")
    assert row.command is not None
    assert "--seeds 0,1" in row.command
    assert not get_checkpoint_folder(reference).exists()


def test_running_again_does_nothing_and_more_seeds_are_all_that_is_done(
    reference: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = tmp_path / "copy.sqlite"
    store.write_bytes(reference.read_bytes())
    asked = counted(monkeypatch)
    run(store=store, **SMALL)
    assert asked == []
    run(store=store, **{**SMALL, "seeds": [1, 3, 5], "rules": ["bp"]})
    assert asked == [("readout", [3, 5]), ("bp", [3, 5])]


def test_redo_runs_again_what_other_code_computed(
    reference: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = tmp_path / "copy.sqlite"
    store.write_bytes(reference.read_bytes())
    with Store(store) as opened:
        alter(opened, "UPDATE runs SET revision = 0, torch = 'older' WHERE rule = 'bp'")
    asked = counted(monkeypatch)
    tables = run(store=store, **SMALL)
    assert asked == []
    assert [line[0] for line in tables[0].rows] == ["readout", "bp†", "dll"]
    assert not any("quick" in note for note in tables[0].notes)
    assert any("--redo" in note for note in tables[0].notes)
    run(store=store, redo=True, **SMALL)
    assert asked == [("bp", [0, 1])]
    assert content(store) == content(reference)
    assert not any(row.old or row.torch == "older" for row in rows(store))


# Interruptions.


def interrupted(store: Path, epoch: int, error: type[BaseException] = KeyboardInterrupt) -> None:
    """The small suite, stopped right after this epoch of dll was recorded."""
    record = Store.record

    def record_and_stop(opened: Store, declaration: Declaration, done: list[dict[str, Any]]) -> None:
        record(opened, declaration, done)
        if declaration.rule == "dll" and done[0]["epoch"] == epoch:
            raise error

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Store, "record", record_and_stop)
        with pytest.raises(error):
            run(store=store, **SMALL)


@pytest.mark.parametrize("epoch", mostly_slow([1, 2, 3], [2]))
def test_an_interrupted_run_goes_on_where_it_was_and_ends_the_same(
    epoch: int, store: Path, reference: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupted(store, epoch)
    left = [row for row in rows(store) if row.declaration.rule == "dll"]
    assert [(row.status, row.owner) for row in left] == [("running", None)] * 2
    with Store(store, write=False) as opened:
        assert [len(opened.history(row)) for row in left] == [epoch] * 2
    trained: list[int] = []
    record = Store.record
    monkeypatch.setattr(
        Store, "record", lambda s, d, r: (trained.extend(row["epoch"] for row in r), record(s, d, r))[1]
    )
    run(store=store, **SMALL)
    assert trained == [e for e in range(epoch + 1, 4) for _ in range(2)]
    assert content(store) == content(reference)
    assert not get_checkpoint_folder(store).exists()


def test_a_damaged_checkpoint_is_put_aside_until_the_run_that_begins_anew_is_done(store: Path, reference: Path) -> None:
    interrupted(store, 2)
    (checkpoint,) = get_checkpoint_folder(store).iterdir()
    checkpoint.write_bytes(b"half of it")
    run(store=store, **SMALL)
    assert content(store) == content(reference)
    assert not get_checkpoint_folder(store).exists()


def test_an_interrupted_run_goes_on_where_it_was_when_seeds_are_added(
    store: Path, reference: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupted(store, 2)
    asked = counted(monkeypatch)
    trained: list[tuple[int, int]] = []
    record = Store.record

    def watched(opened: Store, declaration: Declaration, done: list[dict[str, Any]]) -> None:
        trained.extend((row["seed"], row["epoch"]) for row in done if declaration.rule == "dll")
        record(opened, declaration, done)

    monkeypatch.setattr(Store, "record", watched)
    run(store=store, **{**SMALL, "seeds": [2, 0, 1]})
    assert asked == [("readout", [2]), ("bp", [2]), ("dll", [0, 1]), ("dll", [2])]
    assert trained == [(0, 3), (1, 3), (2, 1), (2, 2), (2, 3)]
    found = content(store)
    assert {place: row for place, row in found.items() if place[1] < 2} == content(reference)
    assert not get_checkpoint_folder(store).exists()


def test_a_checkpoint_that_nothing_goes_on_from_is_deleted_when_its_run_is_done(store: Path) -> None:
    interrupted(store, 2)
    run(store=store, **{**SMALL, "seeds": [0]})
    (left,) = get_checkpoint_folder(store).iterdir()  # seed 1 is not finished
    run(store=store, **{**SMALL, "seeds": [1]})
    assert not left.exists()
    assert {row.status for row in rows(store)} == {"done"}
    assert not get_checkpoint_folder(store).exists()


def test_the_checkpoint_of_a_run_that_another_process_works_on_stays(store: Path) -> None:
    interrupted(store, 2)
    (key,) = {row.key for row in rows(store) if row.declaration.rule == "dll"}
    (checkpoint,) = get_checkpoint_folder(store).iterdir()
    with Store(store) as other:
        (declaration,) = {row.declaration for row in other.runs([key])}
        assert other.claim(declaration, [0, 1]) == [0, 1]
        run(store=store, **{**SMALL, "rules": ["bp"]})
        assert checkpoint.exists()


def started(*suite: str, **settings: Any) -> BaseProcess:
    """A runner in a process of its own; a copy of this one, which has imported torch already."""
    fork = multiprocessing.get_context("fork")
    process = fork.Process(target=run, args=suite, kwargs={"progress": False, **settings})
    process.start()
    return process


def wait_for_claim(store: Path, process: BaseProcess) -> None:
    deadline = time.monotonic() + 60
    while process.is_alive() and time.monotonic() < deadline:
        if store.exists():
            with Store(store) as opened:
                name = describe_process(process.pid or 0, "")
                if any(row.owner and row.owner.startswith(name) for row in opened.runs()):
                    return
        time.sleep(0.01)


@pytest.mark.slow
@forks
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_killing_the_runner_again_and_again_changes_nothing(store: Path, reference: Path) -> None:
    """SIGKILL while it works, six times; `python tests/kills.py` does it twenty times to the whole of `digits`."""
    chance = random.Random(0)
    for _ in range(6):
        process = started(store=store, **SMALL)
        wait_for_claim(store, process)
        time.sleep(chance.uniform(0, 0.3))
        process.kill()
        process.join()
    run(store=store, **SMALL)
    assert content(store) == content(reference)


@pytest.mark.slow
@forks
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_eight_runners_share_one_store_and_nothing_is_done_twice_or_lost(
    store: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    rules = ["bp", "fa", "dfa", "sign", "dll", "dll:released", "dll:frozen", "dll:kolen-pollack", "local", "hebb"]
    settings = {**SMALL, "rules": rules, "epochs": 1}
    processes = [started(store=store, **settings) for _ in range(8)]
    for process in processes:
        process.join(300)
    assert [process.exitcode for process in processes] == [0] * 8
    finished = [line.split()[0] for line in capfd.readouterr().err.splitlines()]
    assert sorted(finished) == sorted(["readout", *rules])  # each by one runner
    alone = tmp_path / "alone.sqlite"
    run(store=alone, **settings)
    assert content(store) == content(alone)


# The limit.


def test_when_the_time_is_up_a_run_stops_after_an_epoch_and_goes_on_another_time(
    store: Path, reference: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now)
    clock = [now]
    record = Store.record

    def record_and_pass(opened: Store, declaration: Declaration, done: list[dict[str, Any]]) -> None:
        record(opened, declaration, done)
        clock[0] += 10
        monkeypatch.setattr(time, "time", lambda: clock[0])

    monkeypatch.setattr(Store, "record", record_and_pass)
    monkeypatch.setattr("apical.bench.estimate.Estimates.estimate", lambda *_, **__: None)
    run(store=store, limit=45, **SMALL)  # three epochs of readout, two of bp
    assert "bp mlp digits: stopped, for the time is up" in capsys.readouterr().err
    states = {(row.declaration.rule, row.status, row.owner) for row in rows(store)}
    assert states == {("readout", "done", None), ("bp", "running", None)}
    run(store=store, **SMALL)
    assert content(store) == content(reference)


def test_a_run_that_is_known_to_take_longer_than_what_is_left_is_not_begun(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from apical.bench.estimate import Estimate

    monkeypatch.setattr(
        "apical.bench.estimate.Estimates.estimate",
        lambda self, one, *_, **__: Estimate(1e6 if one.rule == "bp" else 1.0, "here"),
    )
    run(store=store, limit=1000, **SMALL)
    assert {row.declaration.rule for row in rows(store)} == {"readout", "dll"}


def test_only_the_seeds_that_are_missing_count_for_the_time_that_is_left(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from apical.bench.estimate import Estimate

    one = {"rules": ["bp"], "models": ["mlp"], "epochs": 1, "device": "cpu", "progress": False}
    run(store=store, seeds=[0], **one)
    monkeypatch.setattr(
        "apical.bench.estimate.Estimates.estimate",
        lambda self, declaration, seeds, *_, **__: Estimate(600.0 * seeds, "here"),
    )
    run(store=store, seeds=[1, 2], limit=1000, **one)  # two take too long
    assert {row.seed for row in rows(store)} == {0}
    run(store=store, seeds=[0, 1], limit=1000, **one)  # the one that is missing does not
    assert {row.seed for row in rows(store)} == {0, 1}


def test_a_last_epoch_that_ends_too_late_is_not_thrown_away(
    store: Path, reference: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = time.time
    record = Store.record

    def late(opened: Store, declaration: Declaration, done: list[dict[str, Any]]) -> None:
        record(opened, declaration, done)
        if done[0]["epoch"] == 3:
            monkeypatch.setattr(time, "time", lambda: real() + 1e6)

    monkeypatch.setattr(Store, "record", late)
    run(store=store, limit=1000, **SMALL)
    assert [row.status for row in rows(store)] == ["done", "done"]


# What breaks.


def test_a_run_that_breaks_is_written_down_and_the_others_go_on(
    store: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(claim: Claim, *how: Any) -> Outcome:
        if claim.declaration.rule == "bp":
            raise RuntimeError("CUDA out of memory.\nTried to allocate everything.")
        return train(claim, *how)

    monkeypatch.setattr(runner, "train", broken)
    (table,) = run(store=store, **SMALL)
    found = {row.declaration.rule: (row.status, row.error) for row in rows(store)}
    assert found["bp"] == ("failed", "RuntimeError: CUDA out of memory.")
    assert found["readout"][0] == found["dll"][0] == "done"
    assert [line[1:3] for line in table.rows if line[0] == "bp"] == [["", "failed"]]  # and is not audited
    assert "bp mlp digits: failed (RuntimeError: CUDA out of memory.)" in capsys.readouterr().err
    monkeypatch.setattr(runner, "train", train)
    run(store=store, **SMALL)
    assert {row.status for row in rows(store) if row.declaration.rule == "bp"} == {"failed"}
    run(store=store, redo=True, **SMALL)
    assert {row.status for row in rows(store)} == {"done"}


@pytest.mark.parametrize("epochs", [1, 3])
def test_a_run_whose_seeds_all_diverge_is_failed_with_the_reason(store: Path, tmp_path: Path, epochs: int) -> None:
    suite = tmp_path / "doomed.toml"
    suite.write_text(
        f"""[[runs]]
        rules = ["bp"]
        models = ["mlp"]
        data = ["digits"]
        seeds = 2
        tuned = false
        settings = {{ epochs = {epochs}, lr = 1e30, optimizer = "sgd", loss = "mse" }}"""
    )
    run(str(suite), store=store, device="cpu")
    for row in rows(store):
        assert row.status == "failed"
        assert f"the loss of seed {row.seed} was not finite in epoch 1" in (row.error or "")
    assert not get_checkpoint_folder(store).exists()


@pytest.mark.parametrize("error", [DataError, MissingExtraError])
def test_what_is_not_the_fault_of_a_run_is_told_and_not_recorded_as_its_result(
    error: type[Exception], store: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def missing(*_: Any) -> Outcome:
        raise error("fetch it")

    monkeypatch.setattr(runner, "train", missing)
    run(store=store, **SMALL)
    assert "bp mlp digits: not run: fetch it" in capsys.readouterr().err
    assert {(row.status, row.owner) for row in rows(store)} == {("running", None)}


def test_a_disk_that_is_full_stops_the_run_and_another_day_it_goes_on(store: Path, reference: Path) -> None:
    with largest_file(60_000), pytest.raises(apical.ApicalError, match=r"could not be written|is full|refused"):
        run(store=store, **SMALL)
    assert "failed" not in {row.status for row in rows(store)}
    run(store=store, **SMALL)
    assert content(store) == content(reference)


def test_a_store_that_fails_stops_the_run(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise StoreError("the disk is full")

    monkeypatch.setattr(Store, "record", full)
    with pytest.raises(StoreError, match="the disk is full"):
        run(store=store, **SMALL)
    assert {(row.status, row.owner) for row in rows(store)} == {("running", None)}


def test_a_run_that_another_runner_took_over_is_left_to_it(
    store: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    record = Store.record

    def stolen(opened: Store, declaration: Declaration, done: list[dict[str, Any]]) -> None:
        if declaration.rule == "bp":
            with opened.database.transaction() as base:
                base.execute("UPDATE runs SET owner = 'elsewhere|1|1|x', heartbeat = 9e9 WHERE rule = 'bp'")
        record(opened, declaration, done)

    monkeypatch.setattr(Store, "record", stolen)
    run(store=store, **SMALL)
    assert "another runner took over seed 0 of bp mlp digits" in capsys.readouterr().err
    assert {row.declaration.rule: row.status for row in rows(store)} == {
        "readout": "done",
        "bp": "running",
        "dll": "done",
    }


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"device": "gpu"}, "device 'gpu'"),
        ({"workers": 0}, "--workers is 0"),
        ({"limit": 0}, "--limit is 0"),
        ({"epochs": 0}, "epochs is 0"),
        ({"seeds": 0}, "seeds is 0"),
        ({"rules": ["nonsense"]}, "unknown rule 'nonsense'"),
        ({"data": ["mnist"]}, "the suite digits has no data 'mnist'"),
        ({"defaults": "nowhere.toml"}, "nowhere.toml"),
    ],
)
def test_bad_input_is_told_before_anything_is_written(wrong: dict[str, Any], words: str, store: Path) -> None:
    with pytest.raises(apical.ApicalError, match=words):
        run(store=store, **{**SMALL, **wrong})
    assert not store.exists()


# Quick runs.


def test_a_quick_run_is_short_and_never_taken_for_a_result(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[tuple[int, int]] = []
    fit = runner.fit

    def watched(model: str, data: apical.data.Dataset, **settings: Any) -> apical.Fit:
        sizes.append((len(data.x_train), len(data.x_test)))
        return fit(model, data, **settings)

    monkeypatch.setattr(runner, "fit", watched)
    (table,) = run(store=store, quick=True, rules=["bp"], models=["mlp"], device="cpu")
    assert sizes == [(128, 128)] * 2
    assert table.notes[-1] == "A quick run on 128 examples: no figure here is a result."
    for row in rows(store):
        assert (row.declaration.examples, row.declaration.epochs, row.seed) == (128, 1, 0)
        rule = row.declaration.rule
        part = f"--rules {rule} --models mlp --data digits --epochs 1 --seeds 0,"
        assert row.command == f"apical bench digits --quick {part}"
    asked = counted(monkeypatch)
    run(store=store, rules=["bp"], models=["mlp"], seeds=1, epochs=1, device="cpu")
    assert asked == [("readout", [0]), ("bp", [0])]


def test_a_recurrent_network_on_a_text_and_on_a_table_of_ones_own(store: Path, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("to be or not to be, that is the question. " * 20)
    (tmp_path / "a.csv").write_text("".join(f"{t % 7},{t % 5},{t % 3}\n" for t in range(400)))
    (tmp_path / "own.toml").write_text(
        f"""
        control = "readout"
        [[runs]]
        rules = ["bp", "pc"]
        models = ["rnn"]
        data = ["text:{tmp_path / "a.txt"}"]
        settings = {{ epochs = 2, data_options = {{ window = 8 }} }}
        [[runs]]
        rules = ["dll"]
        models = ["rnn"]
        data = ["series:{tmp_path / "a.csv"}"]
        settings = {{ epochs = 2 }}
        vary = {{ data_options = {{ task = ["paper", "forecast"] }} }}
        """
    )
    characters, series = run(str(tmp_path / "own.toml"), store=store, device="cpu")
    assert [row[0] for row in characters.rows] == ["readout", "bp", "pc"]
    assert [(row[0], row[2]) for row in series.rows] == [
        (rule, task) for rule in ("readout", "dll") for task in ("paper", "forecast")
    ]
    assert "accuracy %" in characters.headings
    assert {"MSE", "MAE"} <= set(series.headings)
    assert {row.status for row in rows(store)} == {"done"}
    assert {row.declaration.to_dict()["loss"] for row in rows(store)} == {"cross_entropy", "mse"}
    for row in rows(store):
        assert "--data-option window=8" in (row.command or "") or row.declaration.data.startswith("series:")


def test_an_rnn_on_pictures_is_refused(store: Path, tmp_path: Path) -> None:
    (tmp_path / "own.toml").write_text('[[runs]]\nrules = ["bp"]\nmodels = ["rnn"]\ndata = ["digits"]\n')
    with pytest.raises(apical.ApicalError, match="an rnn reads sequences, which digits are not"):
        run(str(tmp_path / "own.toml"), store=store, device="cpu")


# Several workers.

OWN = """
import os, signal
from apical.rules.bp import Backpropagation

class Deadly(Backpropagation):
    NAME = "deadly"

    def update(self, *given):
        os.kill(os.getpid(), signal.SIGKILL)

class Plain(Backpropagation):
    NAME = "plain"
"""
SUITE = """
seeds = 2
[[runs]]
rules = ["deadly", "plain", "fa"]
models = ["mlp"]
data = ["digits"]
tuned = false
settings = { epochs = 1, lr = 0.01 }
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A suite with rules of one's own, one of which kills whoever runs it."""
    (tmp_path / "rules_of_a_test.py").write_text(OWN)
    (tmp_path / "own.toml").write_text(SUITE)
    monkeypatch.syspath_prepend(tmp_path)
    known = dict(apical.RULES)
    __import__("rules_of_a_test")
    yield tmp_path / "own.toml"
    sys.modules.pop("rules_of_a_test")
    apical.RULES.clear()
    apical.RULES.update(known)


def assert_the_deadly_one_failed_alone(store: Path) -> None:
    found = {(row.declaration.rule, row.seed): row for row in rows(store)}
    assert len(found) == 6
    for (rule, _), row in found.items():
        if rule == "deadly":
            assert (row.status, row.deaths, row.owner) == ("failed", 3, None)
            assert "its worker died 3 times" in (row.error or "")
        else:
            assert (row.status, row.deaths, row.error) == ("done", 0, None)


@forks
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
@pytest.mark.parametrize("start", mostly_slow(["fork", "spawn"], ["fork"]))
def test_a_worker_that_dies_is_replaced_and_what_kills_three_is_failed(
    start: str, own: Path, store: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forked workers need not import torch again, which takes seconds each time; users have spawned ones."""
    context = multiprocessing.get_context(start)
    monkeypatch.setattr("apical.bench.workers.multiprocessing.get_context", lambda _: context)
    run(str(own), store=store, workers=2, modules=["rules_of_a_test"], device="cpu")
    assert_the_deadly_one_failed_alone(store)
    assert capfd.readouterr().err.count("a worker died: the system ended it with SIGKILL") == 3


@pytest.mark.slow
def test_workers_that_cannot_begin_are_not_started_for_ever(own: Path, store: Path) -> None:
    with pytest.raises(apical.ApicalError, match="workers die before they begin"):
        run(str(own), store=store, workers=2, modules=["no_such_module"], device="cpu")


SLOW = """
seeds = 1
[[runs]]
rules = ["bp", "fa"]
models = ["mlp"]
data = ["digits"]
tuned = false
settings = { epochs = 100000, lr = 0.01 }
"""


@pytest.mark.slow
@forks
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
@pytest.mark.parametrize("signal_", [signal.SIGTERM, signal.SIGKILL])
def test_workers_end_with_whoever_started_them_and_give_back_what_they_held(
    signal_: signal.Signals, store: Path, tmp_path: Path
) -> None:
    (tmp_path / "slow.toml").write_text(SLOW)
    process = started(str(tmp_path / "slow.toml"), store=store, workers=2, device="cpu")
    began = time.monotonic()
    while not store.exists() or sum(row.active for row in rows(store)) < 2:
        assert process.is_alive()
        assert time.monotonic() - began < 120
        time.sleep(0.2)
    os.kill(process.pid or 0, signal_)
    process.join()
    while any(row.owner for row in rows(store)):
        assert time.monotonic() - began < 180
        time.sleep(0.2)
    assert {row.deaths for row in rows(store)} == {0}


@pytest.mark.slow
def test_a_cluster_stops_when_the_time_is_up(
    store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("ray")
    (tmp_path / "slow.toml").write_text(SLOW)

    def new(runner: Runner, job: Job) -> bool:
        """However long the cluster took to start, the run is begun, and ends after an epoch."""
        assert job.declaration is not None
        return not get_checkpoint_path(runner.request.store, job.declaration, job.seeds).exists()

    monkeypatch.setattr(Runner, "can_finish", new)
    run(str(tmp_path / "slow.toml"), store=store, ray=True, device="cpu", limit=0.01, rules=["bp"])
    assert "bp mlp digits: stopped, for the time is up" in capsys.readouterr().err
    (row,) = rows(store)
    assert (row.status, row.owner) == ("running", None)


@pytest.mark.slow
def test_a_cluster_does_the_same(own: Path, store: Path, tmp_path: Path, reference: Path) -> None:
    pytest.importorskip("ray")
    run(str(own), store=store, ray=True, modules=["rules_of_a_test"], device="cpu")
    assert_the_deadly_one_failed_alone(store)
    assert not any(row.owner for row in rows(store))


def test_a_cluster_that_does_not_answer_is_one_sentence(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def init(**_: Any) -> None:
        raise ConnectionError("nobody is there\nfor a long time")

    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(is_initialized=lambda: False, init=init))
    with pytest.raises(apical.ApicalError, match=r"no Ray cluster can be used at there \(nobody is there\)\."):
        run(store=store, ray="there", **SMALL)


def test_where_nobody_listens_ray_is_not_even_asked(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(is_initialized=lambda: False))
    with socket.socket() as free:  # a port that is nobody's
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
        with pytest.raises(apical.ApicalError, match=f"no Ray cluster can be used at {address} .*refused"):
            run(store=store, ray=address, **SMALL)


def test_without_ray_one_sentence_says_what_to_install(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(apical.ApicalError, match=r"pip install 'apical\[ray\]'"):
        run(store=store, ray=True, **SMALL)


# The exit code.


def ended(monkeypatch: pytest.MonkeyPatch, *words: object) -> int:
    """The code with which `python -m apical.bench` ends."""
    monkeypatch.setattr(sys, "argv", ["bench", *map(str, words)])
    try:
        bench_main.main()
    except SystemExit as end:
        return int(end.code or 0)
    return 0


def test_the_exit_code_says_that_a_run_that_was_asked_for_has_failed(
    store: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(claim: Claim, *how: Any) -> Outcome:
        if claim.declaration.rule == "bp" and 1 in claim.seeds:
            raise RuntimeError("out of memory")
        return train(claim, *how)

    monkeypatch.setattr(runner, "train", broken)
    words = ["--store", store, "--models", "mlp", "--epochs", 1, "--device", "cpu"]
    assert ended(monkeypatch, *words, "--rules", "bp", "--seeds", "1,") == 1
    assert "failed" in capsys.readouterr().out  # and the tables are there all the same
    assert ended(monkeypatch, *words, "--rules", "bp", "--seeds", "1,", "--dry-run") == 0
    assert ended(monkeypatch, *words, "--rules", "bp", "--seeds", "0,") == 0
    assert ended(monkeypatch, *words, "--rules", "fa", "--seeds", "1,") == 0
    assert ended(monkeypatch, *words, "--rules", "bp", "--seeds", "2") == 1


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_tables_that_cannot_be_printed_are_one_line(
    store: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with Path("/dev/full").open("w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        words = ["--rules", "bp", "--models", "mlp", "--quick", "--store", store, "--device", "cpu"]
        assert ended(monkeypatch, *words) == 1
        assert capsys.readouterr().err.splitlines()[-1] == "apical: No space left on device."
        with suppress(OSError):  # what is still to be printed
            full.close()


def test_ctrl_c_ends_with_its_exit_code_and_one_line(
    store: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(bench_main, "run_request", stop)
    assert ended(monkeypatch, "--store", store) == 130
    assert capsys.readouterr() == ("", "apical: interrupted; the same command goes on from here.\n")


# Without any optional package but the data.

ALONE = """
import sys
for name in ("typer", "rich", "matplotlib", "pyarrow", "ray", "tqdm", "pooch"):
    sys.modules[name] = None
"""


@pytest.mark.slow
def test_the_bench_runs_on_a_machine_that_has_little_more_than_torch(store: Path) -> None:
    words = command("digits", "--rules", "bp", "--models", "mlp", "--seeds", 2, "--epochs", 1, "--limit-seconds", 100)
    words[2] = ALONE + words[2]
    done = subprocess.run([*words, "--store", str(store)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "digits, mlp" in done.stdout
    assert len(rows(store)) == 4
    again = subprocess.run(
        [*words, "--store", str(store), "--rules", "nonsense"], capture_output=True, text=True, check=False
    )
    assert again.returncode == 1
    assert again.stderr.startswith("apical: unknown rule 'nonsense'")
