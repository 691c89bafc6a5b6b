"""Write files safely: completely or not at all, and never over a store of results. Read what may be damaged."""

import errno
import glob
import itertools
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from apical.errors import ApicalError, WriteError

SQLITE = b"SQLite format 3\0"
"""The first bytes of every store of results."""
_counter = itertools.count()


@contextmanager
def replace_atomically(path: Path) -> Iterator[Path]:
    """Yield a temporary path to write to, and move it to `path` once it is complete and on the disk.

    If anything fails in between (an error, Ctrl-C, a full disk), the earlier file stays as it was and the temporary
    file is deleted. Temporary files of processes that were killed meanwhile are deleted, too. Of a symbolic link the
    file that it points to is replaced.
    """
    try:
        target, temporary = resolve_links(path), _name_temporary(path)
        temporary.parent.mkdir(parents=True, exist_ok=True)
        refuse_to_overwrite_store(path)
        try:
            yield temporary
            with temporary.open("rb+") as file:
                os.fsync(file.fileno())
            temporary.replace(target)
            remove_leftovers(target)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        raise WriteError(f"{path} could not be written ({error.strerror or error}).") from error


def resolve_links(path: Path) -> Path:
    """Return where a path leads if it is a symbolic link, the file that is written to; any other path as it is."""
    return Path(os.path.realpath(path)) if path.is_symlink() else path


@contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Make other processes wait that lock the same folder, where the system can do that."""
    try:
        import fcntl
    except ImportError:  # Windows
        yield
        return
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):  # some network file systems have no locks
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def refuse_to_overwrite_store(path: Path) -> None:
    """Raise an error if `path` is a store of results, whatever its name."""
    if path.is_file():
        with path.open("rb") as file:
            if file.read(len(SQLITE)) == SQLITE:
                raise ApicalError(f"{path} is a store of results and is not overwritten; choose another name.")


def check_writable(path: Path) -> None:
    """Check that a file can be written, so that a long run does not fail at its end; its folder is created."""
    try:
        probe = _name_temporary(path)
        probe.parent.mkdir(parents=True, exist_ok=True)
        probe.touch()
        probe.unlink()
    except OSError as error:
        advice = "; choose a shorter name" if error.errno == errno.ENAMETOOLONG else ""
        raise ApicalError(f"cannot write {path}: {error.strerror or error}{advice}.") from error


def remove_leftovers(path: Path) -> None:
    """Delete the temporary files that killed processes left beside `path`."""
    for left in path.parent.glob(f".{glob.escape(path.name)}.{'[0-9a-f]' * 8}.part"):
        if not is_running(int(left.name[-13:-7], 16)):
            left.unlink(missing_ok=True)


def _name_temporary(path: Path) -> Path:
    """Return a new name beside the file, for one that is not complete yet. It begins with this process's id."""
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    target = resolve_links(path)
    return target.with_name(f".{target.name}.{os.getpid():06x}{next(_counter) % 256:02x}.part")


def is_running(pid: int) -> bool:
    """Return whether a process of this machine exists."""
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True  # it belongs to another user
    return True


MAX_DEPTH = 20
"""How deeply the JSON in a file may be nested. What apical writes has less than half of it."""


def parse_json(text: str | bytes) -> Any:
    """Parse the JSON of a file. Whatever is wrong with it, such as brackets without end, is a ValueError."""
    try:
        parsed = json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    level = [parsed]
    for _ in range(MAX_DEPTH):
        nested = [outer for outer in level if isinstance(outer, dict | list)]
        if not nested:
            return parsed
        level = [value for outer in nested for value in (outer.values() if isinstance(outer, dict) else outer)]
    raise ValueError("it is nested too deeply")
