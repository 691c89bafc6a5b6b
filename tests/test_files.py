"""A file is written whole or not at all."""

import errno
import os
from pathlib import Path

import pytest

from apical.errors import ApicalError
from apical.files import check_writable, replace_atomically


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "file.txt"
    file.write_text("earlier")
    return file


def only(path: Path, text: str) -> bool:
    return [p.name for p in path.parent.iterdir()] == [path.name] and path.read_text() == text


def test_a_complete_file_takes_the_place_of_the_earlier_one(path: Path) -> None:
    with replace_atomically(path) as temporary:
        temporary.write_text("new")
        assert path.read_text() == "earlier"  # until it is complete
        assert temporary.parent == path.parent  # on the same disk, so that it can be moved at once
    assert only(path, "new")


def test_folders_are_made_on_the_way(tmp_path: Path) -> None:
    with replace_atomically(tmp_path / "a" / "b" / "c.txt") as temporary:
        temporary.write_text("new")
    assert (tmp_path / "a" / "b" / "c.txt").read_text() == "new"


@pytest.mark.parametrize("error", [RuntimeError("why"), KeyboardInterrupt()])
def test_an_error_leaves_the_earlier_file_and_nothing_else(path: Path, error: BaseException) -> None:
    def attempt() -> None:
        with replace_atomically(path) as temporary:
            temporary.write_text("half")
            raise error

    with pytest.raises(type(error)):
        attempt()
    assert only(path, "earlier")


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_disk_that_gives_up_is_one_sentence_and_leaves_the_earlier_file(
    path: Path, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    def attempt() -> None:
        with replace_atomically(path) as temporary:
            temporary.write_text("half")

    monkeypatch.setattr(*((os, "fsync") if call == "fsync" else (Path, "replace")), fail)
    with pytest.raises(ApicalError, match=r"file.txt could not be written \(No space left on device\)"):
        attempt()
    assert only(path, "earlier")


def test_the_file_is_on_the_disk_before_it_takes_its_place(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    fsync, replace = os.fsync, Path.replace
    monkeypatch.setattr(os, "fsync", lambda number: (order.append("fsync"), fsync(number))[1])
    monkeypatch.setattr(Path, "replace", lambda *a: (order.append("replace"), replace(*a))[1])
    with replace_atomically(path) as temporary:
        temporary.write_text("new")
    assert order == ["fsync", "replace"]


def test_a_store_of_results_is_never_overwritten(path: Path) -> None:
    path.write_bytes(b"SQLite format 3\0and pages")

    def attempt() -> None:
        with replace_atomically(path) as temporary:
            temporary.write_text("new")

    with pytest.raises(ApicalError, match="is a store of results and is not overwritten"):
        attempt()
    assert only(path, "SQLite format 3\0and pages")


def test_a_folder_in_the_way_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "page.md").mkdir()

    def attempt() -> None:
        with replace_atomically(tmp_path / "page.md") as temporary:
            temporary.write_text("new")

    with pytest.raises(ApicalError, match="could not be written"):
        attempt()
    assert [p.name for p in tmp_path.iterdir()] == ["page.md"]


def test_writable_makes_the_folder_and_leaves_nothing_in_it(tmp_path: Path) -> None:
    check_writable(tmp_path / "a" / "b")
    assert list((tmp_path / "a" / "b").iterdir()) == []


def test_what_cannot_be_a_folder_is_not_writable(path: Path) -> None:
    for folder in (path, path / "below"):
        with pytest.raises(ApicalError, match="cannot write to the folder") as caught:
            check_writable(folder)
        assert "\n" not in str(caught.value)
    assert only(path, "earlier")
