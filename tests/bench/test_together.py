"""Lines of a suite that train as one run, with the results that they have alone."""

from pathlib import Path
from typing import Any

import pytest

from apical.bench import run, runner
from apical.bench.runner import group_jobs, train_together
from apical.bench.store import Row, Store
from apical.bench.suites import list_jobs, load
from apical.errors import ApicalError
from cases import mostly_slow
from runs import without_time

pytest.importorskip("sklearn")

SUITE = """
title = "Rates"
seeds = 2

[[runs]]
rules = ["bp", "dll"]
models = ["mlp"]
data = ["digits"]
tuned = false
settings = { epochs = 2, batch_size = 64 }
vary = { lr = [1e-3, 1e-2] }

[[runs]]
rules = ["bp"]
models = ["mlp"]
data = ["digits"]
tuned = false
settings = { epochs = 2, batch_size = 32 }
"""


@pytest.fixture
def suite(tmp_path: Path) -> str:
    path = tmp_path / "own.toml"
    path.write_text(SUITE)
    return str(path)


def found(path: Path) -> dict[tuple[str, float, int, int], tuple[Row, list[dict[str, Any]]]]:
    with Store(path, write=False) as store:
        rows = [(row, row.declaration.to_dict()) for row in store.runs()]
        return {
            (row.declaration.rule, asked["lr"], asked["batch_size"], row.seed): (row, store.history(row))
            for row, asked in rows
        }


def watched(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many declarations each joint run has from now on."""
    sizes: list[int] = []

    def counting(claims: Any, *how: Any) -> Any:
        sizes.append(len(claims))
        return train_together(claims, *how)

    monkeypatch.setattr(runner, "train_together", counting)
    return sizes


@pytest.fixture
def alone(suite: str, tmp_path: Path) -> Path:
    run(suite, store=tmp_path / "alone.sqlite", device="cpu", progress=False)
    return tmp_path / "alone.sqlite"


def assert_same_results(one: Path, other: Path) -> None:
    ours, theirs = found(one), found(other)
    assert ours.keys() == theirs.keys()
    for key, (row, history) in ours.items():
        wanted, their_history = theirs[key]
        assert (row.status, row.declaration) == (wanted.status, wanted.declaration)
        for mine, yours in zip(without_time(history), without_time(their_history), strict=True):
            assert mine == pytest.approx(yours, rel=1e-5)


@pytest.mark.parametrize(
    ("most", "sizes"), mostly_slow([(8, [4]), (6, [2, 2]), (4, [2, 2]), (3, []), (1, [])], [(8, [4]), (4, [2, 2])])
)
def test_lines_that_train_as_one_have_the_results_that_they_have_alone(
    most: int, sizes: list[int], suite: str, alone: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    joint, store = watched(monkeypatch), tmp_path / "together.sqlite"
    run(suite, store=store, together=most, device="cpu", progress=False)
    assert joint == sizes
    assert_same_results(store, alone)
    for (_, _, batch, _), (row, _) in found(store).items():
        size = sizes[0] * 2 if sizes and batch == 64 else 2
        assert row.together == size
        assert row.command is not None
        assert "--seeds 0,1" in row.command
        assert (row.seconds_per_epoch is None) == (size > 2)
        assert row.seconds is not None
    run(suite, store=store, together=most, device="cpu", progress=False)
    assert joint == sizes, "what is done is not done again"


def test_other_batches_data_and_seeds_do_not_train_as_one(suite: str) -> None:
    jobs = list_jobs(load(suite))
    assert [len(group) for group in group_jobs(jobs, 100)] == [4, 1]
    assert [len(group) for group in group_jobs([jobs[0], jobs[1]._replace(seeds=(0,))], 100)] == [1, 1]
    assert [len(group) for group in group_jobs([jobs[0], jobs[1]._replace(problem="no data")], 100)] == [1, 1]
    assert [job for group in group_jobs(jobs, 4) for job in group] == jobs


def test_what_was_begun_or_took_a_worker_down_trains_alone(
    suite: str, alone: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, declaration = tmp_path / "together.sqlite", list_jobs(load(suite))[2].declaration
    assert declaration is not None
    run(suite, store=store, rules=["bp"], seeds=[1], device="cpu", progress=False)
    with Store(store) as opened:
        opened.claim(declaration, [0])
        opened.record_deaths(declaration, [0], "of a test")
    joint = watched(monkeypatch)
    run(suite, store=store, together=8, device="cpu", progress=False)
    assert joint == []
    assert_same_results(store, alone)


def test_where_all_do_not_fit_they_train_one_by_one(
    suite: str, alone: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: Any, **__: Any) -> Any:
        raise RuntimeError("CUDA out of memory.\nTried to allocate everything.")

    monkeypatch.setattr(runner, "train_together", full)
    store = tmp_path / "together.sqlite"
    run(suite, store=store, together=8, device="cpu", progress=False)
    assert "4 runs cannot train as one (CUDA out of memory.); they train one by one." in capsys.readouterr().err
    assert_same_results(store, alone)


def test_one_line_that_diverges_fails_alone(tmp_path: Path) -> None:
    own, store = tmp_path / "broken.toml", tmp_path / "together.sqlite"
    own.write_text(SUITE.replace("[1e-3, 1e-2]", "[1e-3, 1e30]"))
    with pytest.warns(UserWarning, match="was not finite"):
        run(str(own), store=store, rules=["dll"], together=8, device="cpu", progress=False)
    assert {(lr, row.status) for (_, lr, _, _), (row, _) in found(store).items()} == {(1e-3, "done"), (1e30, "failed")}


def test_a_line_that_another_runner_took_over_costs_the_others_nothing(
    suite: str, alone: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    store, joint = tmp_path / "together.sqlite", watched(monkeypatch)
    honest = runner.train_together

    def robbed(claims: Any, *how: Any) -> Any:
        outcomes = honest(claims, *how)
        with Store(store) as heir, heir.database.transaction() as base:
            base.execute("UPDATE runs SET owner = ? WHERE key = ?", (heir.owner, claims[0].declaration.key))
        return outcomes

    monkeypatch.setattr(runner, "train_together", robbed)
    run(suite, store=store, together=8, device="cpu", progress=False)
    assert joint == [4]
    assert capsys.readouterr().err.count("another runner took over") == 1
    ours, theirs = found(store), found(alone)
    missing = {key for key, (row, _) in ours.items() if row.status != "done"}
    assert missing == {("bp", 1e-3, 64, 0), ("bp", 1e-3, 64, 1)}
    assert ours.keys() == theirs.keys()


def test_the_limit_ends_a_joint_run_and_nobody_holds_it_then(
    suite: str, alone: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    store, train, trained_alone = tmp_path / "together.sqlite", runner.train, []

    def watch_train(claim: Any, *how: Any) -> Any:
        trained_alone.append(claim)
        return train(claim, *how)

    def late(rows: Any, declaration: Any, config: Any) -> None:
        raise runner.OutOfTimeError

    with monkeypatch.context() as patch:
        patch.setattr(runner, "check_deadline", late)
        patch.setattr(runner, "train", watch_train)
        run(suite, store=store, together=8, limit=1000, device="cpu", progress=False)
    assert [claim.declaration.to_dict()["batch_size"] for claim in trained_alone] == [32]  # none of the joint run's
    said = capsys.readouterr().err
    assert said.count("stopped, for the time is up; another time it begins anew.") == 4
    assert said.count("stopped, for the time is up; the same command goes on from here.") == 1
    assert {row.status for row, _ in found(store).values()} == {"running"}
    assert not any(row.active for row, _ in found(store).values())
    run(suite, store=store, together=8, device="cpu", progress=False)
    assert_same_results(store, alone)


def test_a_joint_run_that_was_stopped_is_not_begun_again_after_another_run_has_ended(
    suite: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its next epoch did not fit into the time that was left, and a shorter run did."""
    joint = watched(monkeypatch)

    def is_late(rows: Any, declaration: Any, config: Any) -> None:
        if declaration.to_dict()["batch_size"] == 64:
            raise runner.OutOfTimeError

    monkeypatch.setattr(runner, "check_deadline", is_late)
    run(suite, store=tmp_path / "together.sqlite", together=8, limit=1000, device="cpu", progress=False)
    assert joint == [4]
    assert capsys.readouterr().err.count("another time it begins anew") == 4


def test_a_cluster_gives_each_run_a_device_of_its_own(suite: str, tmp_path: Path) -> None:
    with pytest.raises(ApicalError, match="--together joins runs on one device"):
        run(suite, store=tmp_path / "a.sqlite", together=8, ray=True)
    with pytest.raises(ApicalError, match="--together is 0, but must be at least 1"):
        run(suite, store=tmp_path / "a.sqlite", together=0)
