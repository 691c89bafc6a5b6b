"""What the registry knows of a data set, whatever its kind.

A :class:`Source` names the official files, the arrays of the canonical file and their checksums. Downloading,
checking and writing work on that alone; a *kind* of data (images, characters, time series) is a subclass that
says which arrays there are, how official files become those arrays, and how arrays become a ``Dataset``.
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
    """Where canonical files live: ``root``, or ``$APICAL_DATA``, or ``apical`` in the user's cache folder."""
    if root is not None:
        return Path(root).expanduser()
    if chosen := os.environ.get("APICAL_DATA"):
        return Path(chosen).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "apical"


@dataclass(frozen=True)
class Remote:
    """One official file: where it is published and the md5 published with it.

    Some have no ``md5`` (``None``), and then what is read from them is checked instead. Some have no address that a
    program can use; their ``url`` is the name alone, and ``page`` is where a person finds them.
    """

    url: str
    md5: str | None = None
    page: str = ""

    @property
    def name(self) -> str:
        return self.url.rpartition("/")[2]


@dataclass(frozen=True)
class Array:
    """The exact shape and type that one canonical array must have."""

    shape: tuple[int, ...]
    dtype: str = "uint8"

    def __str__(self) -> str:
        return f"{self.dtype} {'×'.join(str(n) for n in self.shape)}"


@dataclass(frozen=True)
class Report:
    """A check that passed; ``basis`` is ``"registry"``, ``"recorded"`` or ``"own"``: printing says what it means."""

    name: str
    path: Path
    basis: str

    def __str__(self) -> str:
        against = {
            "registry": "every array matches the registry's SHA-256",
            "recorded": "every array matches the SHA-256 recorded when the official files were fetched",
            "own": "it can be read; it is a file of yours, with nothing to compare it with",
        }
        return f"{self.name}: {against[self.basis]} ({self.path})"


@dataclass(frozen=True, kw_only=True)
class Source(ABC):
    """One data set of the registry.

    ``sums`` holds the SHA-256 of each canonical array (C order). ``official_sums`` says that these are the
    sums of the official files' arrays, so that nothing else is accepted. Where it is false, those sums are
    not known in advance: a file fetched from the official files is then held to the sums recorded in it at
    that moment. That reveals damage, but only the registry's own sums reveal a forgery.
    """

    LOSS: ClassVar[str] = "cross_entropy"
    """What a network is trained with on this kind of data unless another loss is named."""
    SEQUENCES: ClassVar[bool] = False
    """Whether an example is a sequence with an answer for each of its moments."""

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
        """How much data it is, for people."""

    @property
    def remedy(self) -> str:
        """What to do about a bad file: the end of an error's sentence."""
        return f"`apical data fetch {self.name}` writes a good one"

    @abstractmethod
    def parse(self, paths: Sequence[Path]) -> Arrays:
        """Canonical arrays from the official files, in the order of ``files``, their md5 already checked."""

    @abstractmethod
    def dataset(self, arrays: Arrays) -> Dataset:
        """Tensors to train on, from checked canonical arrays. A kind's options are keywords with defaults here."""

    @property
    def options(self) -> list[str]:
        """The names of the options that this kind of data has."""
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
        """Write the canonical file whole or not at all."""
        canonical.write(path, arrays, record)

    def check_values(self, arrays: Arrays, where: str) -> None:  # noqa: B027 - a kind may need none
        """Raise for a value that this kind of data cannot have, such as a label beyond the classes."""

    def place(self, root: PathLike | None = None) -> Path:
        """The canonical file, whether it exists or not."""
        return data_folder(root) / f"{self.name}.npz"

    def state(self, root: PathLike | None = None) -> str:
        """``present``, ``absent`` or ``damaged``, judged by the file's structure: its values are not read."""
        if not self.place(root).exists():
            return "absent"
        try:
            canonical.inspect(self, self.place(root))
        except DataError:
            return "damaged"
        return "present"

    def read(self, root: PathLike | None = None) -> tuple[Arrays, Report]:
        """The canonical arrays, checked in full: structure, values and SHA-256."""
        path = self.place(root)
        if not path.exists():
            raise DataError(
                f"{self.name} is not in {path.parent} (no file {path.name} there): "
                f"{self.remedy}, or set APICAL_DATA to the right folder."
            )
        arrays, record = self.stored(path)
        return arrays, self.certify(arrays, record, path)

    def stored(self, path: Path) -> tuple[Arrays, canonical.Record | None]:
        """What the canonical file holds, before its values and sums are checked."""
        return canonical.read(self, path)

    def certify(self, arrays: Arrays, record: canonical.Record | None, path: Path) -> Report:
        """Check arrays that are in memory, wherever they came from, and say what they were compared with."""
        for key, array in self.arrays.items():
            found = Array(arrays[key].shape, str(arrays[key].dtype))
            if found != array:
                raise DataError(f"{key} for {path} is {found}, but {self.name} has {array}; {self.remedy}.")
        self.check_values(arrays, str(path))
        basis = canonical.compare(self, canonical.digests(arrays), record, path)
        return Report(self.name, path, basis)


class OwnFile:
    """A file of the user's own in the place of a data set's: what is in it is for `read` to say."""

    path: Path

    def place(self, root: PathLike | None = None) -> Path:
        return self.path

    def state(self, root: PathLike | None = None) -> str:
        return "present" if self.path.is_file() else "absent"

    @property
    def remedy(self) -> str:
        return "give the path of a file that is there"
