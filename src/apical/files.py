"""Writing a file whole or not at all."""

import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from apical.errors import ApicalError, WriteError

SQLITE = b"SQLite format 3\0"
"""How every store of results begins."""


@contextmanager
def atomic(path: Path) -> Iterator[Path]:
    """A temporary path to write to; it takes `path`'s place once it is complete and on the disk.

    Whatever goes wrong in between (an error, Ctrl-C, a full disk) leaves the earlier file as it was, and no
    half-written one beside it.
    """
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        spare_store(path)
        try:
            yield temporary
            with temporary.open("rb+") as file:
                os.fsync(file.fileno())
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        raise WriteError(f"{path} could not be written ({error.strerror or error}).") from error


def spare_store(path: Path) -> None:
    """Refuse to put another file in the place of a store of results, whatever that is called."""
    if path.is_file():
        with path.open("rb") as file:
            if file.read(len(SQLITE)) == SQLITE:
                raise ApicalError(
                    f"{path} is a store of results and is not overwritten; choose another name."
                )


def writable(folder: Path) -> None:
    """Find out before the work, not after it, that a folder cannot be written to."""
    probe = folder / f".{uuid.uuid4().hex[:8]}.part"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise ApicalError(f"cannot write to the folder {folder}: {error.strerror or error}.") from error
