"""Write files safely: completely or not at all, and never over a store of results."""

import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from apical.errors import ApicalError, WriteError

SQLITE = b"SQLite format 3\0"
"""The first bytes of every store of results."""


@contextmanager
def replace_atomically(path: Path) -> Iterator[Path]:
    """Yield a temporary path to write to, and move it to `path` once it is complete and on the disk.

    If anything fails in between (an error, Ctrl-C, a full disk), the earlier file stays as it was and the temporary
    file is deleted.
    """
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        refuse_to_overwrite_store(path)
        try:
            yield temporary
            with temporary.open("rb+") as file:
                os.fsync(file.fileno())
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        raise WriteError(f"{path} could not be written ({error.strerror or error}).") from error


def refuse_to_overwrite_store(path: Path) -> None:
    """Raise an error if `path` is a store of results, whatever its name."""
    if path.is_file():
        with path.open("rb") as file:
            if file.read(len(SQLITE)) == SQLITE:
                raise ApicalError(f"{path} is a store of results and is not overwritten; choose another name.")


def check_writable(folder: Path) -> None:
    """Check that a folder can be written to, so that a long run does not fail at its end."""
    probe = folder / f".{uuid.uuid4().hex[:8]}.part"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise ApicalError(f"cannot write to the folder {folder}: {error.strerror or error}.") from error
