"""The store: nothing twice, nothing lost, whoever works on it and whatever happens to them."""

import os
import re
import shutil
import sqlite3
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import apical
from apical.bench import database, provenance
from apical.bench.cells import METRICS
from apical.bench.database import APPLICATION_ID, SCHEMA_VERSION, get_checkpoint_path
from apical.bench.declaration import Declaration
from apical.bench.store import (
    EPOCH_COLUMNS,
    MAX_DEATHS,
    LostClaimError,
    Outcome,
    Row,
    Store,
    format_timestamp,
    round_values,
)
from apical.errors import StoreError
from disk import largest_file
from runs import fit
from stores import alter, content, declared, fill, history, outcome

ONE = declared()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "deep" / "results.sqlite"


@pytest.fixture
def store(path: Path) -> Store:
    return Store(path)


def row_of(store: Store, seed: int = 0) -> Row:
    (found,) = (row for row in store.runs() if row.seed == seed)
    return found


def as_if_dead(store: Store) -> None:
    """A runner whose process is gone: this machine's largest number and one more."""
    host, _, started, name = store.owner.split("|")
    store.owner = "|".join((host, str(2**22 + 1), started, name))


def as_if_elsewhere(store: Store) -> None:
    store.owner = "another machine|1|5|abc"


# What is claimed.


@given(st.lists(st.lists(st.integers(0, 6), min_size=1, max_size=5, unique=True), min_size=1, max_size=6))
def test_every_seed_is_claimed_once_by_whoever_comes_first(asked: list[list[int]]) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        taken: list[int] = []
        for seeds in asked:
            with Store(Path(folder) / "s.sqlite") as runner:
                got = runner.claim(ONE, seeds)
            assert got == [seed for seed in seeds if seed not in taken]
            taken += got


def test_another_declaration_is_another_run(store: Store) -> None:
    assert store.claim(ONE, [0]) == [0]
    assert store.claim(declared(lr=0.5), [0]) == [0]


def test_what_is_done_or_failed_is_not_claimed_again_and_more_seeds_are_more_rows(store: Store) -> None:
    store.claim(ONE, [0, 1])
    store.finish(ONE, [0, 1], outcome({0: [90], 1: []}, {1: "it broke"}))
    assert Store(store.path).claim(ONE, [0, 1, 2]) == [2]
    assert [(row.seed, row.status, row.error) for row in store.runs()] == [
        (0, "done", None),
        (1, "failed", "it broke"),
        (2, "running", None),
    ]


def test_what_was_released_can_be_claimed_by_anybody(store: Store) -> None:
    store.claim(ONE, [0, 1])
    store.release(ONE, [0])
    assert Store(store.path).claim(ONE, [0, 1]) == [0]


def test_a_runner_whose_process_is_gone_loses_its_claims_at_once(store: Store) -> None:
    as_if_dead(store)
    store.claim(ONE, [0])
    assert Store(store.path).claim(ONE, [0]) == [0]


def test_a_runner_that_lives_on_this_machine_keeps_its_claims_however_long_it_is_silent(store: Store) -> None:
    store.claim(ONE, [0])
    with store.database.transaction() as base:
        base.execute("UPDATE runs SET heartbeat = 0")
    assert Store(store.path).claim(ONE, [0]) == []


def test_a_process_that_has_the_number_of_a_dead_one_does_not_inherit_its_claims(store: Store) -> None:
    host, pid, started, name = store.owner.split("|")
    store.owner = "|".join((host, pid, f"{started}1", name))
    store.claim(ONE, [0])
    assert Store(store.path).claim(ONE, [0]) == [0]


def test_a_child_that_was_killed_and_not_yet_collected_is_dead() -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    host, _, _, name = provenance.make_owner().split("|")
    its = "|".join((host, str(child.pid), provenance._read_start_time(child.pid), name))
    assert provenance.is_alive(its, 0)
    child.kill()
    deadline = time.monotonic() + 20
    while provenance.is_alive(its, 0) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not provenance.is_alive(its, 0)
    child.wait()


def test_a_runner_of_another_machine_is_believed_for_the_length_of_a_lease(store: Store) -> None:
    as_if_elsewhere(store)
    store.claim(ONE, [0, 1])
    silent = time.time() - provenance.LEASE
    with store.database.transaction() as base:
        base.execute("UPDATE runs SET heartbeat = ? WHERE seed = 0", (silent - 1,))
        base.execute("UPDATE runs SET heartbeat = ? WHERE seed = 1", (silent + 20,))
    assert Store(store.path).claim(ONE, [0, 1]) == [0]
    with store.database.transaction() as base:
        base.execute("UPDATE runs SET heartbeat = ? WHERE seed = 1", (silent - 1,))
    store.update_heartbeat()
    assert row_of(store, 1).active
    assert Store(store.path).claim(ONE, [1]) == []


def test_whoever_lost_a_claim_can_write_nothing_any_more(store: Store) -> None:
    as_if_dead(store)
    store.claim(ONE, [0, 1])
    heir = Store(store.path)
    assert heir.claim(ONE, [1]) == [1]
    before = content(store.path)
    for write in (
        lambda: store.record(ONE, history(0, [50]) + history(1, [50])),
        lambda: store.finish(ONE, [0, 1], outcome({0: [50], 1: [50]})),
    ):
        with pytest.raises(LostClaimError, match="another runner took over seed 1 of bp mlp mnist"):
            write()
    store.release(ONE, [1])
    assert content(store.path) == before  # nothing of seed 0 either: all or nothing
    assert row_of(store, 1).owner == heir.owner


def test_redo_takes_what_failed_and_what_other_code_computed_and_nothing_else(store: Store) -> None:
    fill(store, ONE, [90.0, 91.0, 92.0])
    alter(store, "UPDATE runs SET revision = 0 WHERE seed = 1")
    alter(store, "UPDATE runs SET status = 'failed' WHERE seed = 2")
    assert [row.old for row in store.runs()] == [False, True, False]
    assert store.claim(ONE, [0, 1, 2]) == []
    assert store.claim(ONE, [0, 1, 2], redo="2000") == []  # finished later than that
    assert store.claim(ONE, [0, 1, 2], redo=format_timestamp()) == [1, 2]


def test_a_row_that_is_redone_keeps_its_result_until_the_new_one_is_there(store: Store) -> None:
    fill(store, ONE, [90.0])
    alter(store, "UPDATE runs SET revision = 0")
    assert store.claim(ONE, [0], redo=format_timestamp()) == [0]
    store.record(ONE, history(0, [10.0]))
    row = row_of(store)
    assert row.status == "done"
    assert [entry["test_accuracy"] for entry in store.history(row)] == [0.89, 0.90]
    store.finish(ONE, [0], outcome({0: [20.0]}))
    row = row_of(store)
    assert [entry["test_accuracy"] for entry in store.history(row)] == [0.20]
    assert not row.old


def test_redo_of_what_failed_again_does_not_go_on_for_ever(store: Store) -> None:
    start = format_timestamp()
    store.claim(ONE, [0])
    store.finish(ONE, [0], outcome({0: []}, {0: "no"}))
    assert store.claim(ONE, [0], redo=start) == []
    assert store.claim(ONE, [0], redo=format_timestamp()) == [0]


# What is recorded.


def test_epochs_are_recorded_as_they_come_and_the_result_replaces_them(store: Store) -> None:
    store.claim(ONE, [3])
    first = {"alignment": {"feedback": [None, 0.5]}, "test_bits": 1.5}
    store.record(ONE, history(3, [50.0], **first))
    assert store.history(row_of(store, 3)) == history(3, [50.0], **first)
    assert row_of(store, 3).status == "running"
    assert row_of(store, 3).started is not None
    store.record(ONE, history(3, [60.0]))  # the same epoch once more, after an interruption
    assert store.history(row_of(store, 3)) == history(3, [60.0])
    result = outcome({3: [55.0, 65.0]}, peak_memory=7, memory_kind="of a test", torch="9.9")
    store.finish(ONE, [3], result)
    row = row_of(store, 3)
    assert store.history(row) == history(3, [55.0, 65.0])
    assert (row.status, row.owner, row.heartbeat) == ("done", None, None)
    assert (row.peak_memory, row.memory_kind, row.torch, row.seconds_per_epoch) == (7, "of a test", "9.9", 0.5)
    assert row.started < row.finished
    assert row.declaration == ONE


def test_what_has_no_column_is_kept_with_six_digits_and_the_columns_as_they_are(store: Store) -> None:
    store.claim(ONE, [3])
    precise = history(3, [100 / 3], alignment={"update": [2 / 3, None, 1e-9 / 7]}, test_bits=10 / 7)
    store.record(ONE, precise)
    (kept,) = store.history(row_of(store, 3))
    assert kept["alignment"]["update"] == [0.666667, None, 1.42857e-10]
    assert kept["test_bits"] == 1.42857
    assert {name: kept[name] for name in EPOCH_COLUMNS} == {name: precise[0][name] for name in EPOCH_COLUMNS}
    (text,) = store.database.fetch_rows("SELECT more FROM epochs")[0]
    assert text == '{"alignment":{"update":[0.666667,null,1.42857e-10]},"test_bits":1.42857}'


def test_a_store_is_one_file_once_everybody_has_closed_it(path: Path) -> None:
    with Store(path) as store:
        store.claim(ONE, [0])
        with Store(path, write=False) as reader:
            assert len(reader.runs()) == 1
    with Store(path, write=False) as reader:
        assert len(reader.runs()) == 1
    assert [p.name for p in path.parent.iterdir()] == [path.name]


def test_a_reader_cannot_write(path: Path) -> None:
    Store(path).close()
    with Store(path, write=False) as reader, pytest.raises(StoreError, match="read-only"):
        reader.claim(ONE, [0])


def test_a_run_that_gets_an_epoch_while_it_is_read_is_not_taken_for_damaged(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reader's queries see one moment: a run and its epochs have the checksum that was written with them."""
    store.claim(ONE, [0])
    first, second = history(0, [10.0, 20.0])
    store.record(ONE, [first])
    reader = Store(store.path, write=False)
    fetch, later = reader.database.fetch_rows, [second]

    def fetch_then_write(query: str) -> Any:
        rows = fetch(query)
        if later:
            store.record(ONE, [later.pop()])
        return rows

    monkeypatch.setattr(reader.database, "fetch_rows", fetch_then_write)
    assert [len(row.epochs) for row in reader.runs()] == [1]
    assert [len(row.epochs) for row in reader.runs()] == [2]


def test_a_worker_that_dies_is_recorded_and_its_runs_are_free_until_they_have_taken_three_down(store: Store) -> None:
    as_if_dead(store)
    process = store.owner[:-8]
    for death in range(1, MAX_DEATHS + 1):
        assert store.claim(ONE, [0, 1]) == [0, 1]
        assert Store(store.path).record_process_death(process, "SIGKILL") == 2
        row = row_of(store)
        assert (row.deaths, row.owner) == (death, None)
        assert "SIGKILL" in (row.error or "")
        assert row.status == ("failed" if death == MAX_DEATHS else "running")
    assert "3 times" in (row_of(store).error or "")
    assert store.claim(ONE, [0, 1]) == []
    assert not row_of(store).old


def test_a_result_keeps_its_times_until_another_one_is_there(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(store, ONE, [90.0])
    before = row_of(store)
    monkeypatch.setattr(provenance, "get_revision", lambda rule: 2)
    assert store.claim(ONE, [0], redo=format_timestamp()) == [0]
    store.release(ONE, [0])
    assert (row_of(store).started, row_of(store).finished) == (before.started, before.finished)
    assert store.claim(ONE, [0], redo=format_timestamp()) == [0]
    store.finish(ONE, [0], outcome({0: [91.0]}))
    after = row_of(store)
    assert before.started < before.finished < after.started < after.finished


@pytest.mark.parametrize("was", ["done", "failed"])
def test_what_kills_when_it_is_done_again_ends_after_three_and_a_result_stays(
    store: Store, was: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed = {} if was == "done" else {0: "it failed"}
    store.claim(ONE, [0])
    store.finish(ONE, [0], outcome({0: [90.0]}, failed))
    monkeypatch.setattr(provenance, "get_revision", lambda rule: 2)
    as_if_dead(store)
    for redo in range(1, 3):
        began = format_timestamp()
        for _ in range(MAX_DEATHS):
            assert store.claim(ONE, [0], redo=began) == [0]
            Store(store.path).record_process_death(store.owner[:-8], "SIGKILL")
        assert store.claim(ONE, [0], redo=began) == []
        row = row_of(store)
        assert (row.status, row.deaths) == (was, redo * MAX_DEATHS)
        assert store.history(row)
        assert (row.error is None) == (was == "done")


def test_what_a_dead_worker_held_is_its_pools_until_the_death_is_recorded_and_free_for_others(path: Path) -> None:
    """Else the next worker of the pool would take it up first, and a run that kills would never be called failed."""
    for heir, taken in (("one", []), ("other", [0]), ("", [0])):
        dead, heir_of = Store(path, pool="one"), Store(path, pool=heir)
        as_if_dead(dead)
        declaration = declared(lr=1 + len(heir))
        assert dead.claim(declaration, [0]) == [0]
        assert heir_of.claim(declaration, [0]) == taken
        heir_of.record_process_death(dead.owner[:-8], "SIGKILL")
        assert heir_of.claim(declaration, [0]) == ([] if taken else [0])


def test_only_the_dead_are_buried(store: Store) -> None:
    store.claim(ONE, [0])
    assert store.record_process_death(store.owner[:-8], "nothing") == 0
    assert row_of(store).owner == store.owner


def test_a_result_of_runs_that_failed_at_first_has_no_error(store: Store) -> None:
    as_if_dead(store)
    store.claim(ONE, [0])
    store.record_process_death(store.owner[:-8], "SIGKILL")
    fill(store, ONE, [90.0])
    assert (row_of(store).error, row_of(store).deaths) == (None, 1)


# The runs that are read back.


def test_a_run_is_read_back_with_its_numbers_short_only_where_they_are_json(store: Store) -> None:
    run = fit(rule="dll", seeds=[4, 1], options={"theta_std": 0.5}, alignment=True)
    declaration = Declaration.of(run.settings)
    store.claim(declaration, [4, 1])
    store.finish(declaration, [4, 1], Outcome(run.history, run.failed, {}))
    for row in store.runs():
        assert row.declaration.settings([4, 1]) == run.settings.to_dict()
        for entry, whole in zip(store.history(row), run.of_seed(row.seed), strict=True):
            assert entry == {**whole, "alignment": round_values(whole["alignment"])}
    assert store.claim(declaration, [1, 4]) == []
    assert not any(row.old for row in store.runs())


def test_a_result_is_old_when_the_revision_of_its_rule_has_risen_since(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(store, ONE, [90.0], source="renamed or formatted")
    fill(store, declared("own-rule"), [90.0])
    store.claim(declared("dll"), [0])
    assert [row.old for row in store.runs()] == [False] * 3
    monkeypatch.setattr(provenance, "read_revisions", lambda: {"bp": 2, "dll": 2})
    assert [row.old for row in store.runs()] == [True, False, False]  # nobody knows when one's own rule has changed
    assert store.claim(ONE, [0], redo=format_timestamp()) == [0]
    store.finish(ONE, [0], outcome({0: [91.0]}))
    assert (store.runs()[0].revision, store.runs()[0].old) == (2, False)


def test_the_default_variant_of_a_rule_has_the_revision_of_its_short_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(provenance, "read_revisions", lambda: {"dll": 3, "dll:frozen": 2})
    asked = ("dll", "dll:paper", "dll:frozen", "dll:nothing", "nothing")
    assert [provenance.get_revision(rule) for rule in asked] == [3, 3, 2, 1, 1]


def test_the_score_of_the_paper_protocol_is_of_the_best_epoch(store: Store) -> None:
    epochs = history(0, [50.0, 90.0, 70.0])
    assert METRICS["accuracy"].read(epochs, "paper") == pytest.approx(90)
    assert METRICS["accuracy"].read(epochs, "clean") == pytest.approx(70)
    assert METRICS["accuracy"].read([{"seed": 0, "epoch": 1, "test_loss": 1.0}], "clean") is None


def test_a_seed_that_failed_has_no_accuracy_and_does_not_shift_the_others(store: Store) -> None:
    store.claim(ONE, [0, 1, 2])
    store.finish(ONE, [0, 1, 2], outcome({0: [50.0], 1: [60.0], 2: [70.0]}, {1: "diverged"}))
    found = {row.seed: [entry["test_accuracy"] for entry in store.history(row)] for row in store.runs()}
    assert found == {0: [0.5], 1: [0.6], 2: [0.7]}
    assert [(row.status, row.error) for row in store.runs()] == [("done", None), ("failed", "diverged"), ("done", None)]


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_a_short_number_is_the_same_to_six_digits(value: float) -> None:
    kept = round_values(value)
    assert kept == pytest.approx(value, rel=5.1e-6, abs=sys.float_info.min)
    assert len(re.sub(r"e.*", "", repr(kept)).replace(".", "").strip("-0")) <= 6


def test_a_checkpoint_belongs_to_a_declaration_its_seeds_and_the_code(monkeypatch: pytest.MonkeyPatch) -> None:
    path = Path("s.sqlite")
    names = [
        get_checkpoint_path(path, ONE, [0, 1]),
        get_checkpoint_path(path, ONE, [0]),
        get_checkpoint_path(path, declared(lr=1), [0, 1]),
    ]
    monkeypatch.setattr(provenance, "hash_source", lambda: "other")
    names.append(get_checkpoint_path(path, ONE, [0, 1]))
    assert len(set(names)) == 4
    assert {name.parent for name in names} == {Path("s.sqlite.checkpoints")}


# Faults.


def refused(path: Path, words: str, *, write: bool = True) -> None:
    with pytest.raises(StoreError, match=words) as caught:
        Store(path, write=write)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_store_of_a_newer_version_is_refused_and_left_alone(path: Path) -> None:
    with Store(path) as store:
        fill(store, ONE, [90.0])
    with sqlite3.connect(path) as base:
        base.execute(f"PRAGMA user_version = {SCHEMA_VERSION + 1}")
    base.close()
    before = path.read_bytes()
    for write in (True, False):
        refused(path, "newer version of apical", write=write)
    assert path.read_bytes() == before


def test_a_store_of_version_1_is_read_as_it_is_and_upgraded_by_a_writer(path: Path) -> None:
    with Store(path) as store:
        fill(store, ONE, [90.0])
    with sqlite3.connect(path) as base:
        for column in ("verdict", "revision", "checksum"):
            base.execute(f"ALTER TABLE runs DROP COLUMN {column}")
        base.execute("PRAGMA user_version = 1")
    base.close()
    before = content(path)  # reads only
    with Store(path, write=False) as old:
        assert row_of(old).verdict is None
        assert old.database.fetch_rows("PRAGMA user_version")[0][0] == 1
    with Store(path) as store, Store(path) as other:
        for one in (store, other):
            assert one.database.fetch_rows("PRAGMA user_version")[0][0] == SCHEMA_VERSION
        fill(store, declared("fa"), [80.0], verdict='{"problem": "x"}')
        assert [row.verdict for row in other.runs()] == [None, '{"problem": "x"}']
    assert content(path).items() > before.items()


def test_the_database_of_another_program_is_refused_and_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "other.sqlite"
    with sqlite3.connect(path) as base:
        base.execute("CREATE TABLE things (name TEXT)")
    base.close()
    before = path.read_bytes()
    for write in (True, False):
        refused(path, "database of another program", write=write)
    assert path.read_bytes() == before


@pytest.mark.parametrize("write", [True, False])
def test_what_is_no_database_is_refused_and_left_alone(tmp_path: Path, write: bool) -> None:
    path = tmp_path / "text.sqlite"
    path.write_text("not a database, but long enough to be mistaken for one" * 20)
    before = path.read_bytes()
    refused(path, "is not a store of results", write=write)
    assert path.read_bytes() == before


def test_a_damaged_store_is_told(path: Path) -> None:
    with Store(path) as store:
        for lr in range(1, 60):
            fill(store, declared(lr=lr), [90.0, 91.0])
    body = bytearray(path.read_bytes())
    body[4096:] = b"\xff" * (len(body) - 4096)
    path.write_bytes(body)
    with (
        pytest.raises(StoreError, match=r"is damaged \(.*\); `apical results repair .*` saves what"),
        Store(path) as store,
    ):
        store.runs()


def test_a_store_that_another_process_makes_meanwhile_is_a_store(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between any two questions that are asked of a new file."""
    opened = database._open

    class Interrupted:
        def __init__(self, connection: sqlite3.Connection, at: int) -> None:
            self.connection, self.left = connection, at

        def execute(self, *asked: Any) -> sqlite3.Cursor:
            self.left -= 1
            if self.left == 0:
                monkeypatch.setattr(database, "_open", opened)
                Store(path).close()
            return self.connection.execute(*asked)

        def __getattr__(self, name: str) -> Any:
            return getattr(self.connection, name)

    for at in range(1, 5):
        path.unlink(missing_ok=True)
        monkeypatch.setattr(database, "_open", lambda *given, at=at, **more: Interrupted(opened(*given, **more), at))
        with Store(path) as store:
            assert store.runs() == []
        monkeypatch.setattr(database, "_open", opened)


def test_a_store_that_is_missing_or_empty_is_told_to_a_reader(tmp_path: Path) -> None:
    refused(tmp_path / "none.sqlite", "there is no store at", write=False)
    (tmp_path / "empty.sqlite").touch()
    refused(tmp_path / "empty.sqlite", "is empty", write=False)
    assert not (tmp_path / "none.sqlite").exists()


def test_a_folder_that_cannot_be_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    refused(tmp_path / "file" / "s.sqlite", "cannot be made")
    (tmp_path / "folder.sqlite").mkdir()
    refused(tmp_path / "folder.sqlite", "is a folder; a store is a file")


def test_a_store_that_somebody_locks_for_too_long_is_told_and_nothing_is_lost(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("apical.bench.database.LOCK_TIMEOUT", 0.05)
    with Store(path) as store:
        fill(store, ONE, [90.0])
        other = sqlite3.connect(path, isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(StoreError, match="is locked by another program"):
            store.claim(declared(lr=1), [0])
        other.execute("ROLLBACK")
        other.close()
        assert store.claim(declared(lr=1), [0]) == [0]
        assert len(store.runs()) == 2


def test_whoever_looks_what_is_missing_keeps_others_from_looking_until_it_is_claimed(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("apical.bench.database.LOCK_TIMEOUT", 0.05)
    with (
        Store(path) as store,
        Store(path) as other,
        store.database.transaction(),
        pytest.raises(StoreError, match="is locked"),
    ):
        other.claim(ONE, [0])


def test_a_full_disk_is_told_and_what_was_recorded_before_is_kept(path: Path) -> None:
    with Store(path) as store:
        fill(store, ONE, [90.0])
        other = declared(lr=1)
        store.claim(other, [0])
        before = content(path)
        more = [{**row, "junk": [7] * 2000} for row in history(0, range(1, 100))]
        with (
            largest_file(100_000),
            pytest.raises(StoreError, match=r"the disk of .* (is full|refused).*kept.*same command again"),
        ):
            store.record(other, more)
        assert content(path) == before
        store.record(other, more)
        assert len(store.history(store.runs()[-1])) == 99


@pytest.mark.skipif(os.geteuid() == 0, reason="nothing is read-only to root")
def test_a_read_only_store_can_be_read_and_is_told_to_a_writer(path: Path) -> None:
    with Store(path) as store:
        fill(store, ONE, [90.0])
    path.chmod(0o444)
    path.parent.chmod(0o555)
    try:
        with Store(path, write=False) as reader:
            assert len(reader.runs()) == 1
        with pytest.raises(StoreError, match="read-only"), Store(path) as store:
            store.claim(declared(lr=1), [0])
    finally:
        path.parent.chmod(0o755)


def test_a_store_in_a_place_that_cannot_be_written_can_be_read(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Store(path) as store:
        fill(store, ONE, [90.0])
    monkeypatch.setattr(os, "access", lambda *_: False)
    with Store(path, write=False) as reader:
        assert len(reader.runs()) == 1
        with pytest.raises(StoreError, match="read-only"):
            reader.claim(ONE, [1])


def refuse_shared_memory(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """As SQLite does for a user who may not write into the folder; nothing is forbidden to root. Returns what it opened."""
    opened: list[str] = []
    open_ = database._open

    def refuse(name: str, *, uri: bool) -> sqlite3.Connection:
        opened.append(name)
        if "immutable=1" not in name:
            raise sqlite3.OperationalError("attempt to write a readonly database")
        return open_(name, uri=uri)

    monkeypatch.setattr(os, "access", lambda *_: False)
    monkeypatch.setattr(database, "_open", refuse)
    return opened


def test_a_store_in_a_folder_that_may_not_be_written_can_be_read(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Store(path) as store:
        fill(store, ONE, [90.0])
    opened = refuse_shared_memory(monkeypatch)
    with Store(path, write=False) as reader:
        assert len(reader.runs()) == 1
    assert len(opened) == 2
    Path(f"{path}-wal").touch()  # what is in it would be missing
    with pytest.raises(StoreError, match="cannot be written to: the file or its folder is read-only"):
        Store(path, write=False)


def test_a_store_may_have_a_name_that_means_memory_to_sqlite(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with Store(Path(":memory:")) as store:
        fill(store, ONE, [90.0])
    with Store(Path(":memory:"), write=False) as store:
        assert len(store.runs()) == 1
    assert [path.name for path in tmp_path.iterdir()] == [":memory:"]


def test_empty_files_of_a_folder_are_left_out_with_a_warning(path: Path) -> None:
    with Store(path) as store:
        fill(store, ONE, [90.0])
    empty = path.with_name("empty.sqlite")
    empty.touch()
    with pytest.warns(UserWarning, match=r"empty.sqlite is empty: no run was recorded in it; it is left out\."):
        assert database.list_stores(path.parent) == [path]
    path.unlink()
    with (
        pytest.warns(UserWarning, match="it is left out"),
        pytest.raises(StoreError, match="there are no stores of results"),
    ):
        database.list_stores(path.parent)


def test_a_copy_that_was_made_while_a_run_was_on_is_a_store(store: Store, tmp_path: Path) -> None:
    fill(store, ONE, [90.0])
    shutil.copytree(store.path.parent, tmp_path / "copy")
    assert content(tmp_path / "copy" / store.path.name) == content(store.path)


def test_the_file_says_whose_it_is(store: Store) -> None:
    assert store.database.fetch_rows("PRAGMA application_id")[0][0] == APPLICATION_ID
    assert store.database.fetch_rows("PRAGMA user_version")[0][0] == SCHEMA_VERSION
    assert store.database.fetch_rows("PRAGMA journal_mode")[0][0] == "wal"


# The code.


def test_the_version_has_the_commit_of_a_checkout() -> None:
    root = provenance.PACKAGE.parents[1]
    if not (root / ".git").exists():
        assert provenance.describe_version() == apical.__version__
        return
    asked = subprocess.run(["git", "-C", str(root), "rev-parse", "HEAD"], capture_output=True, text=True, check=True)
    version, _, commit = provenance.describe_version.__wrapped__().partition("+")
    assert version == apical.__version__
    assert asked.stdout.startswith(commit)
    assert len(commit) == 12


def test_the_digest_of_the_code_changes_with_what_computes_and_with_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "apical"
    shutil.copytree(provenance.PACKAGE, package, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(provenance, "PACKAGE", package)

    def digest() -> str:
        return provenance.hash_source.__wrapped__()

    first = digest()
    assert first == provenance.hash_source()
    for name in ("bench/store.py", "cli/train.py", "version.py", "bench/suites/digits.toml"):
        (package / name).write_text("# changed")
        assert digest() == first
    seen = {first}
    for name in ("rules/dll.py", "engine/loop.py", "core/synapse.py", "models.py", "data/datasets.toml"):
        (package / name).write_text((package / name).read_text() + "# changed")
        assert digest() not in seen
        seen.add(digest())


# Several stores as one.


def test_a_copy_has_everything_of_a_run(store: Store, tmp_path: Path) -> None:
    fill(store, declared(), [90.0, 91.0], peak_memory=7, torch="9", command="apical train --rule bp")
    with Store(tmp_path / "copy.sqlite") as copy:
        assert copy.copy(store) == (2, 2)
        assert copy.copy(store) == (0, 2)
        for ours, theirs in zip(copy.runs(), store.runs(), strict=True):
            assert replace(ours, id=theirs.id) == theirs
            assert copy.history(ours) == store.history(theirs)


def test_of_two_runs_a_copy_keeps_the_one_that_is_done_or_else_the_first(store: Store, tmp_path: Path) -> None:
    fill(store, declared("bp"), [90.0])
    fill(store, declared("fa"), [80.0])
    store.claim(declared("dll"), [0])
    with Store(tmp_path / "copy.sqlite") as copy:
        fill(copy, declared("bp"), [10.0])  # done already
        copy.claim(declared("fa"), [0])  # begun, with an epoch that must not stay
        copy.record(declared("fa"), history(0, [1.0, 2.0, 3.0]))
        fill(copy, declared("dll"), [70.0])
        assert copy.copy(store) == (1, 3)
        last = {row.declaration.rule: copy.history(row)[-1] for row in copy.runs()}
        assert {rule: entry["test_accuracy"] for rule, entry in last.items()} == {"bp": 0.1, "fa": 0.8, "dll": 0.7}
        assert last["fa"]["epoch"] == 2
        assert {row.status for row in copy.runs()} == {"done"}
