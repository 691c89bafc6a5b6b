"""The base class of all entries of the registry.

A :class:`Source` describes a data set: its official files, the arrays of its canonical file and their checksums.
Downloading, checking and writing need nothing else. Each *kind* of data (images, characters, time series) is a
subclass that defines which arrays there are, how official files are parsed into them, and how they become a
``Dataset``.
"""

import inspect
import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy.typing as npt

from apical.data import canonical
from apical.data.dataset import Dataset
from apical.errors import DataError

Arrays = dict[str, npt.NDArray[Any]]
PathLike = str | os.PathLike[str]


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

    def __str__(self) -> str:
        return f"{self.dtype} {'×'.join(str(n) for n in self.shape)}"


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
    in it. That detects damage, but only the registry's own sums detect a forgery.
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

    @property
    @abstractmethod
    def arrays(self) -> dict[str, Array]:
        """The canonical arrays by name."""

    @property
    @abstractmethod
    def size(self) -> str:
        """The amount of data as text for people."""

    @property
    def remedy(self) -> str:
        """How to replace a bad file; error messages end with this text."""
        return f"`apical data fetch {self.name}` writes a good one"

    @abstractmethod
    def parse(self, paths: Sequence[Path]) -> Arrays:
        """Parse the official files into the canonical arrays.

        ``paths`` are in the order of ``files``, and their md5 has been checked.
        """

    @abstractmethod
    def dataset(self, arrays: Arrays) -> Dataset:
        """Turn checked canonical arrays into tensors to train on.

        The options of a kind of data are the keyword arguments of this method.
        """

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

    def write(self, path: Path, arrays: Arrays, record: canonical.Record) -> None:
        """Write the canonical file completely or not at all."""
        canonical.write(path, arrays, record)

    def check_values(self, arrays: Arrays, where: str) -> None:  # noqa: B027 - optional in subclasses
        """Raise for a value that this kind of data cannot have, such as a label beyond the classes."""

    def place(self, root: PathLike | None = None) -> Path:
        """Return the path of the canonical file, whether it exists or not."""
        return data_folder(root) / f"{self.name}.npz"

    def state(self, root: PathLike | None = None) -> str:
        """Return ``present``, ``absent`` or ``damaged``, from the file's structure only: values are not read."""
        if not self.place(root).exists():
            return "absent"
        try:
            canonical.check_structure(self, self.place(root))
        except DataError:
            return "damaged"
        return "present"

    def read(self, root: PathLike | None = None) -> tuple[Arrays, Report]:
        """Read the canonical arrays and check their structure, values and SHA-256."""
        path = self.place(root)
        if not path.exists():
            raise DataError(
                f"{self.name} is not in {path.parent} (no file {path.name} there): "
                f"{self.remedy}, or set APICAL_DATA to the right folder."
            )
        arrays, record = self.stored(path)
        return arrays, self.certify(arrays, record, path)

    def stored(self, path: Path) -> tuple[Arrays, canonical.Record | None]:
        """Read the canonical file without checking its values and sums."""
        return canonical.read(self, path)

    def certify(self, arrays: Arrays, record: canonical.Record | None, path: Path) -> Report:
        """Check arrays in memory (shapes, values, SHA-256) and report what they were compared with."""
        for key, array in self.arrays.items():
            found = Array(arrays[key].shape, str(arrays[key].dtype))
            if found != array:
                raise DataError(f"{key} for {path} is {found}, but {self.name} has {array}; {self.remedy}.")
        self.check_values(arrays, str(path))
        basis = canonical.check_sums(self, canonical.compute_sums(arrays), record, path)
        return Report(self.name, path, basis)


class OwnFile:
    """Mixin for data sets that are a file of the user. Only `read` looks at the file's content."""

    path: Path

    def place(self, root: PathLike | None = None) -> Path:
        return self.path

    def state(self, root: PathLike | None = None) -> str:
        return "present" if self.path.is_file() else "absent"

    @property
    def remedy(self) -> str:
        return "give the path of a file that is there"
