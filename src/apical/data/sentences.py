"""Sentences: every word a fixed vector, every sentence the vectors of its words side by side, for convolutions over time.

``x`` is sentences × vector × words, float32; ``y`` is the kind of sentence. Words without a vector are left out, what is
longer than ``length`` words is cut, what is shorter is filled up with zeros. Sentences fall into ten folds, the same in
every run: within each kind they are shuffled by CPU seed 0 and dealt out in turn. One fold tests, the nine others train.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from apical.data import canonical
from apical.data.dataset import Dataset, from_tensors
from apical.data.source import Array, Arrays, PathLike, Report, Source, data_folder
from apical.errors import DataError

FOLDS = 10
SCALES = ("standard", "paper")
PACK = "glove_100d_mr_subj.npz"
"""GloVe's vectors (6B, 100 values) of the words of MR and Subj: the words as lines of UTF-8, the vectors as float16."""
PACK_SUMS = {
    "words": "80c0aa9384b28b7ccc96a41d759935e0f40c74a9ab5fcf88d39a81fc567e1533",
    "vectors": "7a90d814554156e2eeb784f8db58831f655af52a4dc74588941b868e400124f7",
}

Vectors = npt.NDArray[np.float32]


@dataclass(frozen=True, kw_only=True)
class Sentences(Source):
    """Sentences of several kinds, each kind a file of the folder ``text``: a sentence a line, its words between spaces.

    ``bytes_of`` has the length of each file, in the order of the classes. A file's bytes are its one array.
    """

    bytes_of: dict[str, int] = field(default_factory=dict)
    sentences: int = 0

    @property
    def arrays(self) -> dict[str, Array]:
        return {name: Array((length,)) for name, length in self.bytes_of.items()}

    @property
    def size(self) -> str:
        test = self.sentences // FOLDS
        return f"{self.sentences - test:,} + {test:,} sentences"

    @property
    def remedy(self) -> str:
        return f"put the files {' and '.join(self.bytes_of)} there whose SHA-256 the registry has"

    def place(self, root: PathLike | None = None) -> Path:
        return data_folder(root) / "text"

    def state(self, root: PathLike | None = None) -> str:
        paths = {self.place(root) / name: length for name, length in self.bytes_of.items()}
        if not all(path.is_file() for path in paths):
            return "absent"
        whole = all(path.stat().st_size == length for path, length in paths.items())
        return "present" if whole else "damaged"

    def read(self, root: PathLike | None = None) -> tuple[Arrays, Report]:
        """The texts, checked, and the word vectors beside them, checked too, where they are there."""
        folder = self.place(root)
        arrays: Arrays = {}
        for name in self.bytes_of:
            try:
                arrays[name] = np.frombuffer((folder / name).read_bytes(), np.uint8)
            except OSError as error:
                raise DataError(
                    f"{self.name} is not in {folder} ({name}: {canonical.reason(error)}): {self.remedy}, or set "
                    "APICAL_DATA to the right folder."
                ) from error
        report = self.certify(arrays, None, folder)
        return {**arrays, **_packed(folder / PACK)}, report

    def parse(self, paths: Sequence[Path]) -> Arrays:
        raise DataError(f"{self.name} has no official files to read.")

    def dataset(
        self,
        arrays: Arrays,
        *,
        fold: int | None = None,
        length: int = 50,
        scale: str = "standard",
        vectors: PathLike | None = None,
    ) -> Dataset:
        """One of the ten folds to test on (without ``fold``, fold 0: a fixed 90/10 split), all others to train on.

        ``scale``: ``standard`` shifts and scales all vectors of the words here to mean 0 and spread 1; ``paper`` then
        cuts at three spreads and maps what is left to 0 … 1, as the authors' code does. ``vectors``: a file of GloVe's
        own format to take in place of the vectors beside the texts, say ``glove.6B.300d.txt``.
        """
        _require(fold, length, scale)
        kinds = [self._words(name, arrays[name]) for name in self.bytes_of]
        vocabulary = sorted({word for kind in kinds for words in kind for word in words})
        known = _unpacked(arrays, self.name) if vectors is None else read_glove(Path(vectors), vocabulary)
        number = {word: i for i, word in enumerate((w for w in vocabulary if w in known), start=1)}
        places = torch.cat(
            [_places(words, number, length, name) for name, words in zip(self.bytes_of, kinds, strict=True)]
        )
        y = torch.cat([torch.full((len(kind),), label) for label, kind in enumerate(kinds)])
        table = _scaled(torch.from_numpy(np.stack([known[word] for word in number])), scale)
        held = folds_of(y) == (fold or 0)
        x_train, x_test = (table[places[part]].transpose(1, 2).contiguous() for part in (~held, held))
        options = {
            "fold": fold,
            "length": length,
            "scale": scale,
            "vectors": None if vectors is None else str(vectors),
        }
        made = from_tensors(x_train, y[~held], x_test, y[held], name=self.name)
        return replace(made, classes=len(kinds), options=options)

    def _words(self, name: str, text: npt.NDArray[Any]) -> list[list[str]]:
        """The words of each line."""
        try:
            lines = text.tobytes().decode("utf-8").removesuffix("\n").split("\n")
        except UnicodeDecodeError as error:
            raise DataError(f"{name} is no text in UTF-8 (byte {error.start}); {self.remedy}.") from error
        return [line.split() for line in lines]


def _require(fold: object, length: object, scale: object) -> None:
    if fold is not None and (type(fold) is not int or not 0 <= fold < FOLDS):
        raise DataError(f"fold is {fold!r}, but must be a whole number from 0 to {FOLDS - 1}.")
    if type(length) is not int or length < 1:
        raise DataError(f"length is {length!r}, but must be a whole number of words, at least 1.")
    if scale not in SCALES:
        raise DataError(f"scale is {scale!r}, but must be one of {', '.join(SCALES)}.")


def folds_of(y: Tensor) -> Tensor:
    """The fold of each example: every class is shuffled by seed 0 and dealt out in turn, so that all folds are alike."""
    generator = torch.Generator().manual_seed(0)
    folds = torch.empty_like(y)
    for label in y.unique():
        members = (y == label).nonzero().squeeze(1)
        shuffled = members[torch.randperm(len(members), generator=generator)]
        folds[shuffled] = torch.arange(len(members)) % FOLDS
    return folds


def _places(kind: list[list[str]], number: dict[str, int], length: int, name: str) -> Tensor:
    """The numbers of each sentence's known words, 0 where it has no more."""
    places = torch.zeros(len(kind), length, dtype=torch.long)
    for i, words in enumerate(kind):
        known = [number[word] for word in words if word in number][:length]
        if not known:
            raise DataError(
                f"line {i + 1} of {name} has no word that has a vector ({' '.join(words)!r}): remove the line, or give "
                "vectors that know one of its words."
            )
        places[i, : len(known)] = torch.tensor(known)
    return places


def _scaled(vectors: Tensor, scale: str) -> Tensor:
    """The vectors of all words as a network sees them; row 0, a word that is not there, is zero."""
    table = (vectors - vectors.mean()) / vectors.std(correction=0)
    if scale == "paper":
        table = (table.clamp(-3, 3) + 3) / 6
    return torch.cat([torch.zeros_like(table[:1]), table])


def _packed(path: Path) -> Arrays:
    """The arrays of the vectors beside the texts, checked; none where there is no such file."""
    if not path.exists():
        return {}
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {key: np.ascontiguousarray(file[key]) for key in PACK_SUMS}
    except Exception as error:  # damage makes zipfile, zlib and numpy raise a dozen different types
        raise DataError(
            f"{path} cannot be read ({canonical.reason(error)}); put a good one there."
        ) from error
    if canonical.digests(arrays) != PACK_SUMS:
        raise DataError(
            f"{path} is damaged or has other vectors: its SHA-256 is not the registry's; put a good one there, or none "
            "and pass vectors=PATH."
        )
    return arrays


def _unpacked(arrays: Arrays, name: str) -> dict[str, Vectors]:
    if "words" not in arrays:
        raise DataError(
            f"{name} has no word vectors: put {PACK} beside its texts, or pass vectors='glove.6B.100d.txt', a file of "
            "nlp.stanford.edu/projects/glove."
        )
    words = arrays["words"].tobytes().decode("utf-8").split("\n")
    return dict(zip(words, arrays["vectors"].astype(np.float32), strict=True))


def read_glove(path: Path, wanted: Iterable[str]) -> dict[str, Vectors]:
    """The wanted words of a file in GloVe's own format: a word and its values in each line, between single spaces."""
    found: dict[str, Vectors] = {}
    missing, values = set(wanted), 0
    try:
        with path.open(encoding="utf-8", newline="\n") as file:
            for number, line in enumerate(file, start=1):
                word, _, rest = line.rstrip("\n").partition(" ")
                values = values or len(rest.split())
                if word in missing:
                    found[word] = _vector(rest, values, f"line {number} of {path}")
    except OSError as error:
        raise DataError(f"{path} cannot be read ({canonical.reason(error)}).") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is no text in UTF-8, which GloVe's files are.") from error
    if not found:
        raise DataError(f"{path} has no vector of any word here; glove.6B.100d.txt, say, has.")
    return found


def _vector(rest: str, values: int, where: str) -> Vectors:
    try:
        vector = np.array(rest.split(), dtype=np.float32)
    except ValueError:
        vector = np.empty(0, np.float32)
    if len(vector) != values or not values or not np.isfinite(vector).all():
        raise DataError(f"{where} is not a word and {values or 'some'} numbers, as in GloVe's files.")
    return vector
