"""The canonical file: one ``.npz`` of plain arrays, read without pickle, written whole or not at all.

Beside the arrays, a file that ``fetch`` wrote holds a *record*: the md5 of the official files and the
SHA-256 of the arrays parsed from them, as one JSON string.
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
from apical.files import atomic

if TYPE_CHECKING:
    from apical.data.source import Arrays, Source

RECORD = "record"
RECORD_LIMIT = 1 << 16  # bytes; a real record has a few thousand
OFFICIAL = "verified-official"


@dataclass(frozen=True)
class Record:
    """What ``fetch`` knew when it wrote a file: ``md5`` by official file, ``sha256`` by array."""

    md5: dict[str, str]
    sha256: dict[str, str]
    source: str = OFFICIAL


def digests(arrays: Arrays) -> dict[str, str]:
    """SHA-256 of each array's bytes in C order: the same whatever file they came from."""
    return {
        key: hashlib.sha256(np.ascontiguousarray(array).reshape(-1).data).hexdigest()
        for key, array in arrays.items()
    }


def compare(source: Source, sums: dict[str, str], record: Record | None, path: Path) -> str:
    """``"registry"`` or ``"recorded"``, whichever the sums match; else a sentence that names the array."""
    if source.sums and sums == dict(source.sums):
        return "registry"
    expected, whose = dict(source.sums), "the registry's"
    if record is not None and not source.official_sums:
        md5 = {file.name: file.md5 or record.md5.get(file.name) for file in source.files}
        if record.source != OFFICIAL or record.md5 != md5:
            raise DataError(
                f"{path} was not made from the official files that the registry names; {source.remedy}."
            )
        if sums == record.sha256:
            return "recorded"
        expected, whose = record.sha256, "the one recorded when it was fetched"
    elif not source.sums:
        raise DataError(
            f"{path} cannot be checked: no SHA-256 of {source.name} is known in advance and no fetch "
            f"recorded one in it; {source.remedy}."
        )
    wrong = next(key for key in sums if sums[key] != expected.get(key))
    raise DataError(
        f"{wrong} of {path} is damaged or other data: its SHA-256 is not {whose}; {source.remedy}."
    )


def inspect(source: Source, path: Path) -> None:
    """Check a file's structure without reading its values: the right arrays, types and shapes."""
    with _opened(source, path):
        pass


def read(source: Source, path: Path) -> tuple[Arrays, Record | None]:
    """The arrays, of the right types and shapes, and the record where there is one; no sum is compared."""
    with _opened(source, path) as archive:
        arrays = {}
        for key in source.arrays:
            with archive.open(f"{key}.npy") as member:
                arrays[key] = np.ascontiguousarray(np.lib.format.read_array(member, allow_pickle=False))
        return arrays, _record(archive)


@contextmanager
def _opened(source: Source, path: Path) -> Iterator[zipfile.ZipFile]:
    """The open file, every header checked: a forged size is refused before memory is given to it."""
    try:
        with zipfile.ZipFile(path) as archive:
            for key, expected in source.arrays.items():
                if f"{key}.npy" not in archive.namelist():
                    raise DataError(f"{path} has no array {key}; {source.remedy}.")
                shape, dtype = _header(archive, key)
                if (shape, str(dtype)) != (expected.shape, expected.dtype):
                    found = f"{dtype} {'×'.join(map(str, shape))}"
                    raise DataError(
                        f"{key} of {path} is {found}, but {source.name} has {expected}; {source.remedy}."
                    )
            yield archive
    except DataError:
        raise
    except Exception as error:  # damage makes zipfile, zlib, numpy and json raise a dozen different types
        raise DataError(
            f"{path} cannot be read as a canonical file ({reason(error)}): it may be cut short or damaged; "
            f"{source.remedy}."
        ) from error


def _header(archive: zipfile.ZipFile, key: str) -> tuple[tuple[int, ...], np.dtype[Any]]:
    with archive.open(f"{key}.npy") as member:
        version = np.lib.format.read_magic(member)
        if version == (1, 0):
            shape, _, dtype = np.lib.format.read_array_header_1_0(member)
        else:
            shape, _, dtype = np.lib.format.read_array_header_2_0(member)
    return shape, dtype


def _record(archive: zipfile.ZipFile) -> Record | None:
    if f"{RECORD}.npy" not in archive.namelist():
        return None
    shape, dtype = _header(archive, RECORD)
    if shape != () or dtype.kind != "U" or dtype.itemsize > RECORD_LIMIT:
        raise ValueError(f"its record is {dtype} of shape {shape}, not one short string")
    with archive.open(f"{RECORD}.npy") as member:
        record = Record(**json.loads(str(np.lib.format.read_array(member, allow_pickle=False))))
    if not (isinstance(record.md5, dict) and isinstance(record.sha256, dict)):
        raise ValueError("its record holds no sums")
    return record


def write(path: Path, arrays: Arrays, record: Record) -> None:
    """Write a canonical file whole or not at all."""
    contents: dict[str, Any] = {**arrays, RECORD: np.array(json.dumps(asdict(record)))}
    try:
        with atomic(path) as temporary, temporary.open("xb") as file:
            np.savez(file, **contents)
    except ApicalError as error:
        raise DataError(f"{error} Make room there, or set APICAL_DATA to another folder.") from error


def reason(error: BaseException) -> str:
    """What the operating system said, where it did, else the error's own words: the useful part for a person.

    Network errors arrive wrapped several times over; the system's own message is in the innermost.
    """
    found = str(error).strip().rstrip(".") or type(error).__name__
    link: BaseException | None = error
    while link is not None and not isinstance(link, ApicalError):
        if isinstance(link, OSError) and link.strerror:
            found = link.strerror
        link = link.__cause__ or link.__context__
    return found
