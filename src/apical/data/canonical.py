"""Read, write and check canonical files: one ``.npz`` of plain arrays per data set, read without pickle.

A file written by ``fetch`` also holds a *record*, one JSON string with the md5 of the official files and the
SHA-256 of the arrays parsed from them.
"""

from __future__ import annotations

import hashlib
import json
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from apical.errors import ApicalError, DataError
from apical.files import replace_atomically

if TYPE_CHECKING:
    from apical.data.source import Arrays, Source

RECORD = "record"
RECORD_LIMIT = 1 << 16  # bytes; a real record has a few thousand
OFFICIAL = "verified-official"


@dataclass(frozen=True)
class Record:
    """The checksums that ``fetch`` stores in a file: ``md5`` by official file, ``sha256`` by array."""

    md5: dict[str, str]
    sha256: dict[str, str]
    source: str = OFFICIAL


def compute_sums(arrays: Arrays) -> dict[str, str]:
    """Return the SHA-256 of each array's bytes in C order, which does not depend on the file format."""
    return {
        key: hashlib.sha256(np.ascontiguousarray(array).reshape(-1).data).hexdigest() for key, array in arrays.items()
    }


def check_sums(source: Source, sums: dict[str, str], record: Record | None, path: Path) -> str:
    """Return which known sums match: ``"registry"``, or ``"recorded"`` for the file's own record.

    Raises ``DataError`` with the name of the first array that differs.
    """
    if source.sums and sums == dict(source.sums):
        return "registry"
    expected, whose = dict(source.sums), "the registry's"
    if record is not None and not source.official_sums:
        md5 = {file.name: file.md5 or record.md5.get(file.name) for file in source.files}
        if record.source != OFFICIAL or record.md5 != md5:
            raise DataError(f"{path} was not made from the official files that the registry names; {source.remedy}.")
        if sums == record.sha256:
            return "recorded"
        expected, whose = record.sha256, "the one recorded when it was fetched"
    elif not source.sums:
        raise DataError(
            f"{path} cannot be checked: no SHA-256 of {source.name} is known in advance and no fetch "
            f"recorded one in it; {source.remedy}."
        )
    wrong = next(key for key in sums if sums[key] != expected.get(key))
    raise DataError(f"{wrong} of {path} is damaged or other data: its SHA-256 is not {whose}; {source.remedy}.")


def check_structure(source: Source, path: Path) -> None:
    """Check that a file has the right arrays, dtypes and shapes, without reading their values."""
    with _open_checked(source, path):
        pass


def read(source: Source, path: Path) -> tuple[Arrays, Record | None]:
    """Read the arrays, after a check of their dtypes and shapes, and the record if there is one.

    Checksums are not compared here.
    """
    with _open_checked(source, path) as archive:
        arrays = {}
        for key in source.arrays:
            with archive.open(f"{key}.npy") as member:
                arrays[key] = np.ascontiguousarray(np.lib.format.read_array(member, allow_pickle=False))
        return arrays, _read_record(archive)


@contextmanager
def _open_checked(source: Source, path: Path) -> Iterator[zipfile.ZipFile]:
    """Open a file and check the header of every array, so that a forged size is rejected before memory is allocated."""
    try:
        with zipfile.ZipFile(path) as archive:
            for key, expected in source.arrays.items():
                if f"{key}.npy" not in archive.namelist():
                    raise DataError(f"{path} has no array {key}; {source.remedy}.")
                shape, dtype = _read_header(archive, key)
                if (shape, str(dtype)) != (expected.shape, expected.dtype):
                    found = f"{dtype} {'×'.join(map(str, shape))}"
                    raise DataError(f"{key} of {path} is {found}, but {source.name} has {expected}; {source.remedy}.")
            yield archive
    except DataError:
        raise
    except Exception as error:  # damage makes zipfile, zlib, numpy and json raise a dozen different types
        raise DataError(
            f"{path} cannot be read as a canonical file ({describe_error(error)}): it may be cut short or damaged; "
            f"{source.remedy}."
        ) from error


def _read_header(archive: zipfile.ZipFile, key: str) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """Read the shape and dtype of an array without its values."""
    with archive.open(f"{key}.npy") as member:
        version = np.lib.format.read_magic(member)
        if version == (1, 0):
            shape, _, dtype = np.lib.format.read_array_header_1_0(member)
        else:
            shape, _, dtype = np.lib.format.read_array_header_2_0(member)
    return shape, dtype


def _read_record(archive: zipfile.ZipFile) -> Record | None:
    """Read the record, after a check of its size; None if there is none."""
    if f"{RECORD}.npy" not in archive.namelist():
        return None
    shape, dtype = _read_header(archive, RECORD)
    if shape != () or dtype.kind != "U" or dtype.itemsize > RECORD_LIMIT:
        raise ValueError(f"its record is {dtype} of shape {shape}, not one short string")
    with archive.open(f"{RECORD}.npy") as member:
        record = Record(**json.loads(str(np.lib.format.read_array(member, allow_pickle=False))))
    if not (isinstance(record.md5, dict) and isinstance(record.sha256, dict)):
        raise ValueError("its record holds no sums")
    return record


def write(path: Path, arrays: Arrays, record: Record) -> None:
    """Write a canonical file completely or not at all."""
    contents: dict[str, Any] = {**arrays, RECORD: np.array(json.dumps(asdict(record)))}
    try:
        with replace_atomically(path) as temporary, temporary.open("xb") as file:
            np.savez(file, **contents)
    except ApicalError as error:
        raise DataError(f"{error} Make room there, or set APICAL_DATA to another folder.") from error


def describe_error(error: BaseException) -> str:
    """Return the operating system's message if the error has one, else the error's own text.

    Network errors are wrapped in several others; the system's message is in the innermost one.
    """
    message = str(error).strip().rstrip(".") or type(error).__name__
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, ApicalError):
        if isinstance(cause, OSError) and cause.strerror:
            message = cause.strerror
        cause = cause.__cause__ or cause.__context__
    return message
