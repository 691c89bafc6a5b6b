"""A damaged store gives the numbers that were written, or says what is damaged; never others."""

import random
import sqlite3
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from apical.bench import provenance
from apical.bench.declaration import Declaration
from apical.bench.store import Outcome, Store
from apical.cli import main
from apical.errors import ApicalError, StoreError
from apical.files import SQLITE
from stores import content, declared, fill, history


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A store of twelve runs, whose pages are small, so that damage meets some of them."""
    path = tmp_path / "results.sqlite"
    with sqlite3.connect(path) as base:
        base.execute("PRAGMA page_size = 512")
    base.close()
    with Store(path) as store:
        for lr in range(1, 7):
            fill(store, declared(lr=lr), [90.0 + lr, 80.0 + lr])
    return path


def alter(path: Path, statement: str, *values: Any) -> None:
    with sqlite3.connect(path) as base:
        base.execute(statement, values)
    base.close()


def run(*arguments: object) -> int:
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        patch.setattr("sys.argv", ["apical", *map(str, arguments)])
        warnings.simplefilter("default")
        with pytest.raises(SystemExit) as left:
            main()
    return int(left.value.code or 0)


def damage(good: bytes, rng: random.Random) -> bytes:
    """Flip a bit, cut the file off, or overwrite a part of it, anywhere."""
    made, at = bytearray(good), rng.randrange(len(good))
    kind = rng.choice(["flip", "flip", "cut", "overwrite"])
    if kind == "flip":
        made[at] ^= 1 << rng.randrange(8)
    if kind == "overwrite":
        made[at : at + 40] = rng.randbytes(min(40, len(good) - at))
    return bytes(made[:at] if kind == "cut" else made)


def test_a_damaged_name_of_a_column_is_a_damaged_run(path: Path) -> None:
    alter(path, "ALTER TABLE runs RENAME COLUMN owner TO ownes")
    with Store(path, write=False) as store, pytest.warns(UserWarning, match="12 runs are damaged"):
        assert store.runs() == []


def test_a_damaged_store_has_the_numbers_that_were_written_or_says_which_runs_are_lost(path: Path) -> None:
    good, expected, rng = path.read_bytes(), content(path), random.Random(0)
    kept = lost = refused = 0
    for _ in range(60):
        path.write_bytes(damage(good, rng))
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            try:
                found = content(path)
            except StoreError as error:
                refused += "\n" not in str(error)
                continue
        assert found.items() <= expected.items()
        assert len(found) == len(expected) or told
        kept += len(found) == len(expected)
        lost += len(found) < len(expected)
    assert kept
    assert lost
    assert refused


ALTERED = {
    "a result of a wrong type": "UPDATE epochs SET test_accuracy = 'high' WHERE run = 3 AND epoch = 2",
    "another number": "UPDATE epochs SET test_accuracy = 0.99 WHERE run = 3 AND epoch = 2",
    "an epoch less": "DELETE FROM epochs WHERE run = 3 AND epoch = 2",
    "another seed": "UPDATE runs SET seed = 77 WHERE id = 3",
    "another time": "UPDATE runs SET seconds_per_epoch = 'fast' WHERE id = 3",
    "no checksum": "UPDATE runs SET checksum = NULL WHERE id = 3",
    "deep json": f"UPDATE runs SET declaration = '{'[' * 100_000}' WHERE id = 3",
    "deep json of an epoch": f"UPDATE epochs SET more = '{'[' * 100_000}' WHERE run = 3",
    "text that is no text": "UPDATE runs SET device = CAST(x'fffe' AS TEXT) WHERE id = 3",
}


@pytest.mark.parametrize("what", ALTERED)
def test_the_good_runs_stay_readable_beside_a_bad_one_and_a_warning_counts_it(
    what: str, path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    expected = content(path)
    alter(path, ALTERED[what])
    with pytest.warns(UserWarning, match="1 run is damaged and left out; `apical results repair .*` keeps"):
        found = content(path)
    assert found.items() < expected.items()
    assert len(found) == len(expected) - 1
    for command in (["results", "list", path], ["results", "export", path], ["results", "show", "", "--store", path]):
        assert run(*command) == 0
        said = capsys.readouterr()
        assert said.err.count("\n") == 1
        assert "1 run is damaged" in said.err


def test_a_bad_run_is_not_run_again_before_the_store_was_repaired(path: Path) -> None:
    alter(path, ALTERED["another number"])
    with Store(path) as store, pytest.raises(StoreError, match=r"seed 0 of bp mlp mnist .* results repair"):
        store.claim(declared(lr=2), [0])


def test_repair_keeps_the_good_runs_and_the_damaged_file_and_says_what_was_lost(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    expected = content(path)
    alter(path, ALTERED["another number"])
    before = path.read_bytes()
    assert run("results", "repair", path) == 0
    aside = path.with_name("results.sqlite.damaged")
    said = " ".join(capsys.readouterr().out.split())
    assert f"{path} has 11 runs; 1 run was lost. The damaged file is now {aside}." in said
    assert content(path).items() < expected.items()
    assert aside.read_bytes() == before
    with Store(path) as store:  # and the lost run can be run again
        assert store.claim(declared(lr=2), [0, 1]) == [0]
    assert run("results", "repair", path) == 0
    assert "is not damaged" in capsys.readouterr().out


def test_repair_saves_what_it_can_of_a_file_that_was_cut_off(path: Path) -> None:
    expected = content(path)
    path.write_bytes(path.read_bytes()[: path.stat().st_size * 9 // 10])
    assert run("results", "repair", path) == 0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = content(path)
    assert 0 < len(found) < len(expected)
    assert found.items() < expected.items()
    path.with_name("results.sqlite.damaged").unlink()


@pytest.mark.parametrize("text", [b"", b"{}", SQLITE, SQLITE + bytes(5000)])
def test_what_cannot_be_repaired_is_one_sentence_and_stays(
    text: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "no store.sqlite"
    path.write_bytes(text)
    assert run("results", "repair", path) == 1
    assert capsys.readouterr().err.count("\n") == 1
    assert path.read_bytes() == text
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


def test_delete_removes_the_runs_of_a_key_and_says_how_many(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    gone, kept = declared(lr=1).key, declared(lr=2).key
    assert run("results", "delete", path, gone[:9], "--yes") == 0
    assert f"deleted 2 runs from {path}" in " ".join(capsys.readouterr().out.split())
    assert gone not in {key for key, _ in content(path)}
    assert run("results", "delete", path, kept, gone, "--yes") == 1
    assert f"no run whose key begins with {gone!r}" in capsys.readouterr().err
    assert kept in {key for key, _ in content(path)}


@pytest.mark.parametrize("beginning", ["", "a", "abc"])
def test_delete_takes_no_short_beginning_of_a_key(
    beginning: str, path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = content(path)
    assert run("results", "delete", path, declared(lr=1).key, beginning, "--yes") == 1
    assert f"the key {beginning!r} is too short; give at least 4 characters of it." in capsys.readouterr().err
    assert content(path) == before


def test_repair_of_a_link_repairs_the_file_that_it_points_to(path: Path) -> None:
    link = path.parent / "links" / "link.sqlite"
    link.parent.mkdir()
    link.symlink_to(path)
    alter(path, ALTERED["another number"])
    assert run("results", "repair", link) == 0
    assert link.is_symlink()
    assert [name.name for name in link.parent.iterdir()] == ["link.sqlite"]
    assert path.with_name("results.sqlite.damaged").exists()
    with Store(path, write=False) as store:
        assert len(store.runs()) == 11


def test_delete_asks_before_it_deletes(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = content(path)
    monkeypatch.setattr("typer.confirm", lambda question, abort: (_ for _ in ()).throw(SystemExit(1)))
    assert run("results", "delete", path, declared(lr=1).key) == 1
    assert content(path) == before


def test_delete_leaves_a_run_that_a_living_process_works_on(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Store(path) as store:
        store.claim(declared(lr=9), [0])
        assert run("results", "delete", path, declared(lr=9).key, "--yes") == 1
        assert "works on" in capsys.readouterr().err
        assert len(store.runs()) == 13


def make_wrong(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    """A store of a run whose declaration was changed, with the key of it."""

    def make(path: Path) -> None:
        values = declared(lr=9).to_dict()
        change(values)
        wrong = Declaration.from_dict(values)
        alter(path, "UPDATE runs SET declaration = ?, key = ?", wrong.text, wrong.key)

    return make


WRONG: dict[str, Callable[[Path], None]] = {
    "a text as a result": lambda path: alter(path, "UPDATE epochs SET test_accuracy = 'high'"),
    "no settings": lambda path: alter(path, "UPDATE runs SET declaration = CAST('{}' AS BLOB)"),
    "a list as a result": lambda path: alter(path, 'UPDATE epochs SET more = \'{"test_bits": "few"}\''),
    "a text as epochs": make_wrong(lambda values: values.update(epochs="20")),
    "a list of options": make_wrong(lambda values: values.update(options=[])),
    "no rule": make_wrong(lambda values: values.pop("rule")),
    "a key of other settings": lambda path: alter(path, "UPDATE runs SET key = '0123456789abcdef'"),
}


@pytest.mark.parametrize("what", WRONG)
def test_import_takes_no_result_of_a_wrong_type(
    what: str, path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other, before = tmp_path / "other.sqlite", content(path)
    with Store(other) as store:
        fill(store, declared(lr=9), [70.0])
    alter(other, "PRAGMA user_version = 2")  # of version 0.1, which has no checksums
    for column in ("checksum", "revision"):
        alter(other, f"ALTER TABLE runs DROP COLUMN {column}")
    WRONG[what](other)
    assert run("results", "import", other, "--store", path) in (0, 1)
    said = capsys.readouterr()
    assert "Traceback" not in said.err
    assert "1 run is damaged" in said.err or "has a run" in said.err
    assert content(path) == before
    assert run("results", "list", path) == 0


def test_a_store_of_version_0_1_gets_its_checksums_from_the_first_writer(path: Path) -> None:
    expected = content(path)
    alter(path, "PRAGMA user_version = 2")
    for column in ("checksum", "revision"):
        alter(path, f"ALTER TABLE runs DROP COLUMN {column}")
    assert content(path) == expected  # a reader changes nothing
    Store(path).close()
    assert content(path) == expected
    alter(path, ALTERED["another number"])
    with pytest.warns(UserWarning, match="1 run is damaged"):
        content(path)


def test_a_result_of_a_wrong_type_is_not_written(path: Path) -> None:
    with Store(path) as store:
        store.claim(declared(lr=9), [0])
        wrong = [{**row, "loss": "high"} for row in history(0, [50.0])]
        for write in (
            lambda: store.record(declared(lr=9), wrong),
            lambda: store.finish(declared(lr=9), [0], Outcome(wrong, {}, {})),
        ):
            with pytest.raises(ApicalError, match="loss of epoch 1 is no number"):
                write()
        store.release(declared(lr=9), [0])


def test_the_dead_worker_of_another_machine_with_the_same_number_is_not_this_ones(path: Path) -> None:
    with Store(path) as store:
        host, pid, started, name = store.owner.split("|")
        store.owner = "|".join((f"not {host}", pid, started, name))
        store.claim(declared(lr=9), [0])
        alter(path, "UPDATE runs SET heartbeat = 1 WHERE owner IS NOT NULL")  # it is dead, too
        assert store.record_process_death(provenance.describe_process(int(pid), ""), "SIGKILL") == 0
        assert [row.deaths for row in store.runs([declared(lr=9).key])] == [0]
