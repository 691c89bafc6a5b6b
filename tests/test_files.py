"""A file is written whole or not at all."""

import errno
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from apical.errors import ApicalError
from apical.files import check_writable, lock_folder, replace_atomically


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


@pytest.mark.parametrize("exists", [True, False])
def test_of_a_link_the_file_that_it_points_to_is_replaced(path: Path, exists: bool) -> None:
    folder = path.parent / "elsewhere"
    folder.mkdir()
    target, link = folder / "target.txt", path.parent / "link.txt"
    if exists:
        target.write_text("earlier")
    link.symlink_to(target)
    check_writable(link)
    with replace_atomically(link) as temporary:
        assert temporary.parent == folder
        temporary.write_text("new")
    assert link.is_symlink()
    assert only(target, "new")


@pytest.mark.parametrize("name", [".", "/", "..", "pages"])
def test_a_folder_is_no_file_to_write(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "pages").mkdir()
    monkeypatch.chdir(tmp_path)

    def attempt() -> None:
        with replace_atomically(Path(name)) as temporary:
            temporary.write_text("new")

    with pytest.raises(ApicalError, match=r"could not be written \(Is a directory\)"):
        attempt()
    with pytest.raises(ApicalError, match=r"cannot write .*: Is a directory"):
        check_writable(Path(name))
    assert [p.name for p in tmp_path.iterdir()] == ["pages"]


def test_a_folder_that_somebody_locked_is_waited_for(tmp_path: Path) -> None:
    pytest.importorskip("fcntl")
    order: list[str] = []

    def wait() -> None:
        with lock_folder(tmp_path):
            order.append("second")

    with lock_folder(tmp_path):
        thread = threading.Thread(target=wait)
        thread.start()
        thread.join(0.1)
        order.append("first")
    thread.join()
    assert order == ["first", "second"]
    assert list(tmp_path.iterdir()) == []


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
    check_writable(tmp_path / "a" / "b" / "file.txt")
    assert list((tmp_path / "a" / "b").iterdir()) == []


def test_what_cannot_be_a_folder_is_not_writable(path: Path) -> None:
    for folder in (path, path / "below"):
        with pytest.raises(
            ApicalError, match=r"cannot write .*: Not a directory|cannot write .*: File exists"
        ) as caught:
            check_writable(folder / "file.txt")
        assert "\n" not in str(caught.value)
    assert only(path, "earlier")


@pytest.mark.parametrize("length", [241, 255, 300])
def test_a_name_that_is_too_long_is_not_writable_and_a_shorter_one_can_be_replaced(tmp_path: Path, length: int) -> None:
    with pytest.raises(ApicalError, match="File name too long; choose a shorter name"):
        check_writable(tmp_path / ("n" * length))
    longest = tmp_path / ("n" * 240)
    check_writable(longest)
    with replace_atomically(longest) as temporary:
        temporary.write_text("new")
    assert only(longest, "new")


def test_what_a_killed_process_left_is_removed_by_the_next_write_but_not_what_a_living_one_writes(path: Path) -> None:
    other = path.with_name("[other].txt")
    writer = "import os, sys, pathlib\nfrom apical.files import replace_atomically\n"
    writer += "with replace_atomically(pathlib.Path(sys.argv[1])) as temporary:\n"
    writer += "    temporary.write_text('half')\n    print('begun', flush=True)\n    sys.stdin.read()\n    os._exit(9)"
    for target in (path, other):
        command = [sys.executable, "-c", writer, str(target)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            process.stdout.readline()
            with replace_atomically(target) as temporary:
                temporary.write_text("new")
            (left,) = path.parent.glob(".*.part")  # it is still being written
        with replace_atomically(path if target is other else other) as temporary:
            temporary.write_text("another file")
        assert left.exists()
        with replace_atomically(target) as temporary:
            temporary.write_text("newer")
        assert not left.exists()
