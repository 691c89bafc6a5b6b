"""The base class of all entries of the registry, and the canonical file that each data set is stored in.

A :class:`Source` describes a data set: its official files, the arrays of its canonical file and their checksums.
Downloading, checking and writing need nothing else. Each *kind* of data (images, characters, time series) is a
subclass that defines which arrays there are, how official files are parsed into them, and how they become a
``Dataset``.

A canonical file is one ``.npz`` of plain arrays, read without pickle. A file written by ``fetch`` also holds a
*record*, one JSON string with the md5 of the official files and the SHA-256 of the arrays parsed from them.
"""

import hashlib
import inspect
import json
import os
import zipfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from apical.data import bounded
from apical.data.dataset import Dataset
from apical.errors import ApicalError, DataError
from apical.files import replace_atomically

Arrays = dict[str, npt.NDArray[Any]]
PathLike = str | os.PathLike[str]

RECORD = "record"
RECORD_LIMIT = 1 << 16  # bytes; a real record has a few thousand
OFFICIAL = "verified-official"


def data_folder(root: PathLike | None = None) -> Path:
    """Return the folder of the canonical files.

    It is ``root`` if given, else ``$APICAL_DATA``, else ``apical`` in the user's cache folder.
    """
    if root is not None:
        return Path(root).expanduser()
    if chosen := os.environ.get("APICAL_DATA"):
        return Path(chosen).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "apical"


@dataclass(frozen=True)
class Remote:
    """One official file: where it is published and the md5 published with it.

    ``md5`` is ``None`` if none is published; then only the parsed arrays are checked. If a program cannot download
    the file, ``url`` is just its name and ``page`` is the web page where a person finds it.
    """

    url: str
    md5: str | None = None
    page: str = ""

    @property
    def name(self) -> str:
        return self.url.rpartition("/")[2]


@dataclass(frozen=True)
class Array:
    """The exact shape and dtype that a canonical array must have."""

    shape: tuple[int, ...]
    dtype: str = "uint8"

    @property
    def nbytes(self) -> int:
        return bounded.compute_bytes(self.shape, self.dtype)

    def __str__(self) -> str:
        return f"{self.dtype} {'×'.join(map(str, self.shape))}"


@dataclass(frozen=True)
class Record:
    """The checksums that ``fetch`` stores in a file: ``md5`` by official file, ``sha256`` by array."""

    md5: dict[str, str]
    sha256: dict[str, str]
    source: str = OFFICIAL


@dataclass(frozen=True)
class Report:
    """The result of a check that passed.

    ``basis`` says what the data was compared with: ``"registry"``, ``"recorded"`` or ``"own"`` (nothing). Printing
    a report explains it in a sentence.
    """

    name: str
    path: Path
    basis: str

    def __str__(self) -> str:
        sentences = {
            "registry": "every array matches the registry's SHA-256",
            "recorded": "every array matches the SHA-256 recorded when the official files were fetched",
            "own": "it can be read; it is a file of yours, with nothing to compare it with",
        }
        return f"{self.name}: {sentences[self.basis]} ({self.path})"


@dataclass(frozen=True, kw_only=True)
class Source(ABC):
    """One data set of the registry.

    ``sums`` has the SHA-256 of each canonical array (C order). If ``official_sums`` is true, they are the sums of the
    arrays parsed from the official files, and nothing else is accepted. If it is false, the sums of the official
    arrays are not known in advance: a file made by ``fetch`` is then checked against the sums that ``fetch`` recorded
    in it. That detects damage, but only the registry's own sums detect a forgery. ``parser`` is called with the
    entry and the paths of its official files, and returns the canonical arrays.
    """

    LOSS: ClassVar[str] = "cross_entropy"
    """The default loss for this kind of data."""
    SEQUENCES: ClassVar[bool] = False
    """Whether an example is a sequence with a target for each time step."""

    name: str
    title: str
    files: tuple[Remote, ...] = ()
    sums: Mapping[str, str] = field(default_factory=dict)
    official_sums: bool = True
    note: str = ""
    parser: Callable[[Any, Sequence[Path]], Arrays] | None = None

    @property
    @abstractmethod
    def arrays(self) -> dict[str, Array]:
        """The canonical arrays by name."""

    @property
    @abstractmethod
    def size(self) -> str:
        """The amount of data as text for people."""

    @abstractmethod
    def dataset(self, arrays: Arrays) -> Dataset:
        """Turn checked canonical arrays into tensors to train on.

        The options of a kind of data are the keyword arguments of this method.
        """

    @property
    def remedy(self) -> str:
        """How to replace a bad file; error messages end with this text."""
        return f"`apical data fetch {self.name}` writes a good one"

    @property
    def options(self) -> list[str]:
        """The names of the options of this kind of data."""
        parameters = inspect.signature(self.dataset).parameters.values()
        return [p.name for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY]

    def check_options(self, names: Iterable[str]) -> None:
        """Refuse an option that this kind of data does not have."""
        known = self.options
        for name in names:
            if name not in known:
                works = f"their options: {', '.join(known)}" if known else "they have none"
                raise DataError(f"the data {self.name!r} have no option {name!r}; {works}.")

    def check_values(self, arrays: Arrays, where: str) -> None:  # noqa: B027 - optional in subclasses
        """Raise for a value that this kind of data cannot have, such as a label beyond the classes."""

    def parse(self, paths: Sequence[Path]) -> Arrays:
        """Parse the official files into the canonical arrays.

        ``paths`` are in the order of ``files``, and their md5 has been checked.
        """
        if self.parser is None:
            raise DataError(f"{self.name} has no official files to read.")
        return self.parser(self, paths)

    def place(self, root: PathLike | None = None) -> Path:
        """Return the path of the canonical file, whether it exists or not."""
        return data_folder(root) / f"{self.name}.npz"

    def state(self, root: PathLike | None = None) -> str:
        """Return ``present``, ``absent`` or ``damaged``, from the file's structure only: values are not read."""
        if not self.place(root).exists():
            return "absent"
        try:
            with self._open(self.place(root)):
                return "present"
        except DataError:
            return "damaged"

    def read(self, root: PathLike | None = None) -> tuple[Arrays, Report]:
        """Read the canonical arrays and check their structure, values and SHA-256."""
        path = self.place(root)
        if not path.exists():
            raise self._absent_error(path.parent, f"no file {path.name} there")
        arrays, record = self.read_file(path)
        return arrays, self.certify(arrays, record, path)

    def _absent_error(self, folder: Path, reason: str) -> DataError:
        return DataError(
            f"{self.name} is not in {folder} ({reason}): {self.remedy}, or set APICAL_DATA to the right folder."
        )

    def certify(self, arrays: Arrays, record: Record | None, path: Path) -> Report:
        """Check arrays in memory (shapes, values, SHA-256) and report what they were compared with."""
        for key, array in self.arrays.items():
            found = Array(arrays[key].shape, str(arrays[key].dtype))
            if found != array:
                raise DataError(f"{key} for {path} is {found}, but {self.name} has {array}; {self.remedy}.")
        self.check_values(arrays, str(path))
        return Report(self.name, path, self._compare_sums(compute_sums(arrays), record, path))

    def _compare_sums(self, sums: dict[str, str], record: Record | None, path: Path) -> str:
        """Return which known sums match: ``"registry"``, or ``"recorded"`` for the file's own record.

        Raises ``DataError`` with the name of the first array that differs.
        """
        if self.sums and sums == dict(self.sums):
            return "registry"
        expected, whose = dict(self.sums), "the registry's"
        if record is not None and not self.official_sums:
            md5 = {file.name: file.md5 or record.md5.get(file.name) for file in self.files}
            if record.source != OFFICIAL or record.md5 != md5:
                raise DataError(f"{path} was not made from the official files that the registry names; {self.remedy}.")
            if sums == record.sha256:
                return "recorded"
            expected, whose = record.sha256, "the one recorded when it was fetched"
        elif not self.sums:
            raise DataError(
                f"{path} cannot be checked: no SHA-256 of {self.name} is known in advance and no fetch "
                f"recorded one in it; {self.remedy}."
            )
        wrong = next(key for key in sums if sums[key] != expected.get(key))
        raise DataError(f"{wrong} of {path} is damaged or other data: its SHA-256 is not {whose}; {self.remedy}.")

    def write(self, path: Path, arrays: Arrays, record: Record) -> None:
        """Write the canonical file completely or not at all."""
        contents: dict[str, Any] = {**arrays, RECORD: np.array(json.dumps(asdict(record)))}
        try:
            with replace_atomically(path) as temporary, temporary.open("xb") as file:
                np.savez(file, **contents)
        except ApicalError as error:
            raise DataError(f"{error} Make room there, or set APICAL_DATA to another folder.") from error

    def read_file(self, path: Path) -> tuple[Arrays, Record | None]:
        """Read the canonical file and its record, if there is one. Values and sums are not checked."""
        with self._open(path) as archive:
            return {
                key: bounded.read_array(archive, key, array.nbytes) for key, array in self.arrays.items()
            }, _read_record(archive)

    @contextmanager
    def _open(self, path: Path) -> Iterator[zipfile.ZipFile]:
        """Open a canonical file and check the header of every array.

        A forged size is thus rejected before memory is allocated.
        """
        advice = f": it may be cut short or damaged; {self.remedy}"
        limit = 2 * sum(array.nbytes for array in self.arrays.values()) + (1 << 20)  # with room for the record
        with (
            explain_errors(path, "cannot be read as a canonical file", advice),
            bounded.open_zip(path, limit) as archive,
        ):
            for key, expected in self.arrays.items():
                if f"{key}.npy" not in archive.namelist():
                    raise DataError(f"{path} has no array {key}; {self.remedy}.")
                shape, dtype = bounded.read_header(archive, key)
                if (found := Array(shape, str(dtype))) != expected:
                    raise DataError(f"{key} of {path} is {found}, but {self.name} has {expected}; {self.remedy}.")
            yield archive


@dataclass(frozen=True, kw_only=True)
class OwnFile(Source):
    """Base class of data sets that are a file of the user. Only `read` looks at the file's content."""

    path: Path

    @property
    def remedy(self) -> str:
        return "give the path of a file that is there"

    def place(self, root: PathLike | None = None) -> Path:
        return self.path

    def state(self, root: PathLike | None = None) -> str:
        return "present" if self.path.is_file() else "absent"

    def hash_contents(self) -> str | None:
        """Return a hash of the file's bytes; None if it is not there."""
        if not self.path.is_file():
            return None
        with explain_errors(self.path):
            status = self.path.stat()
            return _hash_file(self.path.resolve(), status.st_mtime_ns, status.st_size)

    def read(self, root: PathLike | None = None) -> tuple[Arrays, Report]:
        arrays = self.parse([self.path])
        self.check_values(arrays, str(self.path))
        return arrays, Report(self.name, self.path, "own")


@lru_cache
def _hash_file(path: Path, modified: int, size: int) -> str:
    """Return a hash of a file's bytes, which is kept until the file is modified."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:16]


def compute_sums(arrays: Arrays) -> dict[str, str]:
    """Return the SHA-256 of each array's bytes in C order, which does not depend on the file format."""
    return {
        key: hashlib.sha256(np.ascontiguousarray(array).reshape(-1).data).hexdigest() for key, array in arrays.items()
    }


def _read_record(archive: zipfile.ZipFile) -> Record | None:
    """Read the record, after a check of its size; None if there is none."""
    if f"{RECORD}.npy" not in archive.namelist():
        return None
    shape, dtype = bounded.read_header(archive, RECORD)
    if shape != () or dtype.kind != "U" or dtype.itemsize > RECORD_LIMIT:
        raise ValueError(f"its record is {dtype} of shape {shape}, not one short string")
    record = Record(**json.loads(bounded.read_array(archive, RECORD, RECORD_LIMIT).item()))
    if not (isinstance(record.md5, dict) and isinstance(record.sha256, dict)):
        raise ValueError("its record holds no sums")
    return record


@contextmanager
def explain_errors(path: Path, problem: str = "cannot be read", advice: str = "") -> Iterator[None]:
    """Turn any error into a ``DataError`` that names the file: "PATH PROBLEM (reason)ADVICE."

    Errors of apical itself are passed on.
    """
    try:
        yield
    except ApicalError:
        raise
    except Exception as error:  # damage makes zipfile, gzip, tarfile, numpy, PIL and h5py raise a dozen different types
        raise DataError(f"{path} {problem} ({find_reason(error)}){advice}.") from error


def find_reason(error: BaseException) -> str:
    """Return the operating system's message if the error has one, else the error's own text.

    Network errors are wrapped in several others; the system's message is in the innermost one.
    """
    message = " ".join(str(error).split()).rstrip(".") or type(error).__name__
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, ApicalError):
        if isinstance(cause, OSError) and cause.strerror:
            message = cause.strerror
        cause = cause.__cause__ or cause.__context__
    return message
