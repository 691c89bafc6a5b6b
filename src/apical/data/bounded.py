"""Read files that may lie about their size: no function here takes more memory than its limits allow.

A short file can claim, or unpack to, gigabytes. So sizes are checked before memory is allocated, and compressed data
is unpacked only up to the size that it may have. A violation is a ``ValueError``, or the error of the file's format.
"""

import gzip
import io
import itertools
import math
import stat
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

HEADER_LIMIT = 10_000  # bytes; numpy's own limit, which it checks only after it has read the whole header


def check_file(path: Path, limit: int) -> int:
    """Return the size of a file if it is at most ``limit`` bytes. A pipe or a device, which may have no end, is refused."""
    status = path.stat()
    if not (stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode)):  # opening a folder is an error of its own
        raise ValueError("it is not a file but a pipe or a device")
    if status.st_size > limit:
        raise ValueError(f"it has {status.st_size:,} bytes, more than the {limit:,} that it may have")
    return status.st_size


def read_file(path: Path, limit: int) -> bytes:
    """Read a file of at most ``limit`` bytes."""
    size = check_file(path, limit)
    with path.open("rb") as file:
        return file.read(size)


def read_lines(file: IO[str], longest: int, most: int | None = None) -> Iterator[str]:
    """Yield the lines of a text: each of at most ``longest`` characters, and no more than ``most``."""
    for number in itertools.count(1):
        line = file.readline(longest + 1)
        if not line:
            return
        if len(line) > longest:
            raise ValueError(f"line {number} has more than {longest:,} characters")
        if most is not None and number > most:
            raise ValueError(f"it has more than {most:,} lines")
        yield line


def unpack_gzip(path: Path, limit: int) -> bytes:
    """Unpack a gzipped file, at most one byte more than ``limit``: that byte shows that the file is too long."""
    with gzip.open(path) as file:
        return file.read(limit + 1)


def open_zip(path: Path, limit: int) -> zipfile.ZipFile:
    """Open a zip file of at most ``limit`` bytes; the list of its members is read at once."""
    check_file(path, limit)
    return zipfile.ZipFile(path)


def open_member(archive: zipfile.ZipFile, name: str) -> IO[bytes]:
    """Open a member of a zip file, to be read in pieces: ``archive.read`` unpacks it all, whatever size it claims."""
    if archive.getinfo(name).compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise ValueError(f"{name} is compressed with a method that unpacks without a limit")
    return archive.open(name)


def read_header(archive: zipfile.ZipFile, key: str) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """Read the shape and dtype of an array of an ``.npz`` file without its values."""
    with open_member(archive, f"{key}.npy") as member:
        start = io.BytesIO(member.read(HEADER_LIMIT))
    version = np.lib.format.read_magic(start)
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, _, dtype = read(start)
    return shape, dtype


def read_array(archive: zipfile.ZipFile, key: str, limit: int) -> npt.NDArray[Any]:
    """Read an array of at most ``limit`` bytes from an ``.npz`` file, without pickle."""
    shape, dtype = read_header(archive, key)
    size = compute_bytes(shape, dtype)
    if size > limit:
        raise ValueError(f"{key} has {size:,} bytes, more than the {limit:,} that it may have")
    with open_member(archive, f"{key}.npy") as member:
        return np.ascontiguousarray(np.lib.format.read_array(member, allow_pickle=False))


def compute_bytes(shape: tuple[int, ...], dtype: npt.DTypeLike) -> int:
    """Return the number of bytes of an array's values."""
    return math.prod(shape) * np.dtype(dtype).itemsize
