"""Classes of sentences: every word becomes a fixed vector, for convolutions over the words of a sentence.

``x`` is sentences × vector × words, float32; ``y`` is the class of the sentence. Words without a vector are left out.
Sentences are cut to ``length`` words or padded with zeros. They are split into ten folds, the same in every run: each
class is shuffled with CPU seed 0 and dealt out in turn. One fold is for testing, the nine others are for training.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from apical.data import bounded
from apical.data.dataset import Dataset, from_tensors
from apical.data.source import (
    Array,
    Arrays,
    PathLike,
    Report,
    Source,
    compute_sums,
    data_folder,
    explain_errors,
    find_reason,
)
from apical.errors import DataError, check_whole_number

FOLDS = 10
SCALES = ("standard", "paper")
VECTORS_FILE = "glove_100d_mr_subj.npz"
"""GloVe vectors (6B, 100 values) of the words of MR and Subj: words as lines of UTF-8, vectors as float16."""
VECTORS_SUMS = {
    "words": "80c0aa9384b28b7ccc96a41d759935e0f40c74a9ab5fcf88d39a81fc567e1533",
    "vectors": "7a90d814554156e2eeb784f8db58831f655af52a4dc74588941b868e400124f7",
}

VECTORS_LIMIT = 1 << 26  # bytes; the file has about a tenth of that
LINE_LIMIT = 1 << 16  # characters of a line of a file in GloVe's format

Vectors = npt.NDArray[np.float32]


@dataclass(frozen=True, kw_only=True)
class Sentences(Source):
    """Sentences of several classes, one file per class in the folder ``text``.

    A file has one sentence per line, with spaces between words. ``bytes_of`` has the length of each file, in the order
    of the classes, and ``sentences`` the number of its lines. The bytes of each file are one array.
    """

    bytes_of: dict[str, int] = field(default_factory=dict)
    sentences: tuple[int, ...] = ()

    @property
    def arrays(self) -> dict[str, Array]:
        return {name: Array((length,)) for name, length in self.bytes_of.items()}

    @property
    def size(self) -> str:
        test = sum(-(-count // FOLDS) for count in self.sentences)  # fold 0 gets the first sentence of each deal
        return f"{sum(self.sentences) - test:,} + {test:,} sentences"

    @property
    def remedy(self) -> str:
        return f"put the files {' and '.join(self.bytes_of)} there whose SHA-256 the registry has"

    def place(self, root: PathLike | None = None) -> Path:
        return data_folder(root) / "text"

    def state(self, root: PathLike | None = None) -> str:
        paths = {self.place(root) / name: length for name, length in self.bytes_of.items()}
        if not all(path.is_file() for path in paths):
            return "absent"
        is_complete = all(path.stat().st_size == length for path, length in paths.items())
        return "present" if is_complete else "damaged"

    def read(self, root: PathLike | None = None) -> tuple[Arrays, Report]:
        """Read and check the texts, and the word vectors if their file exists."""
        folder = self.place(root)
        arrays: Arrays = {}
        for name, length in self.bytes_of.items():
            try:
                arrays[name] = np.frombuffer(bounded.read_file(folder / name, length), np.uint8)
            except OSError as error:
                raise self._absent_error(folder, f"{name}: {find_reason(error)}") from error
            except ValueError as error:
                raise DataError(f"{folder / name} is damaged or other data ({error}); {self.remedy}.") from error
        report = self.certify(arrays, None, folder)
        return {**arrays, **_read_vectors(folder / VECTORS_FILE)}, report

    def dataset(
        self,
        arrays: Arrays,
        *,
        fold: int | None = None,
        length: int = 50,
        scale: str = "standard",
        vectors: PathLike | None = None,
    ) -> Dataset:
        """Turn the texts into tensors.

        Args:
            arrays: the texts, and the word vectors if there are any.
            fold: which of the ten folds is for testing; without it, fold 0 (a fixed 90/10 split).
            length: the number of words to which sentences are cut or padded.
            scale: ``standard`` scales all word vectors to mean 0 and standard deviation 1; ``paper`` then clips them
                at three standard deviations and maps them to 0 … 1, as the authors' code does.
            vectors: a file in GloVe's format, such as ``glove.6B.300d.txt``, to use instead of the stored vectors.
        """
        if fold is not None and (type(fold) is not int or not 0 <= fold < FOLDS):
            raise DataError(f"fold is {fold!r}, but must be a whole number from 0 to {FOLDS - 1}.")
        check_whole_number("length", length, error=DataError)
        if scale not in SCALES:
            raise DataError(f"scale is {scale!r}, but must be one of {', '.join(SCALES)}.")
        classes = [self._split_words(name, arrays[name]) for name in self.bytes_of]
        vocabulary = sorted({word for sentences in classes for words in sentences for word in words})
        known = _unpack_vectors(arrays, self.name) if vectors is None else read_glove(Path(vectors), vocabulary)
        index_of = {word: i for i, word in enumerate((w for w in vocabulary if w in known), start=1)}
        indices = torch.cat(
            [
                _index_words(sentences, index_of, length, name)
                for name, sentences in zip(self.bytes_of, classes, strict=True)
            ]
        )
        y = torch.cat([torch.full((len(sentences),), label) for label, sentences in enumerate(classes)])
        table = _scale_vectors(torch.from_numpy(np.stack([known[word] for word in index_of])), scale)
        is_test = assign_folds(y) == (fold or 0)
        x_train, x_test = (table[indices[part]].transpose(1, 2).contiguous() for part in (~is_test, is_test))
        options = {"fold": fold, "length": length, "scale": scale, "vectors": None if vectors is None else str(vectors)}
        dataset = from_tensors(x_train, y[~is_test], x_test, y[is_test], name=self.name)
        return replace(dataset, classes=len(classes), options=options)

    def _split_words(self, name: str, text: npt.NDArray[Any]) -> list[list[str]]:
        """Return the words of each line."""
        try:
            lines = text.tobytes().decode("utf-8").removesuffix("\n").split("\n")
        except UnicodeDecodeError as error:
            raise DataError(f"{name} is no text in UTF-8 (byte {error.start}); {self.remedy}.") from error
        return [line.split() for line in lines]


def assign_folds(y: Tensor) -> Tensor:
    """Return the fold of each example. Each class is shuffled with seed 0 and dealt out in turn (stratified folds)."""
    generator = torch.Generator().manual_seed(0)
    folds = torch.empty_like(y)
    for label in y.unique():
        members = (y == label).nonzero().squeeze(1)
        shuffled = members[torch.randperm(len(members), generator=generator)]
        folds[shuffled] = torch.arange(len(members)) % FOLDS
    return folds


def _index_words(sentences: list[list[str]], index_of: dict[str, int], length: int, name: str) -> Tensor:
    """Return the indices of each sentence's known words, padded with 0 to ``length``."""
    indices = torch.zeros(len(sentences), length, dtype=torch.long)
    for i, words in enumerate(sentences):
        known = [index_of[word] for word in words if word in index_of][:length]
        if not known:
            raise DataError(
                f"line {i + 1} of {name} has no word that has a vector ({' '.join(words)!r}): remove the line, or give "
                "vectors that know one of its words."
            )
        indices[i, : len(known)] = torch.tensor(known)
    return indices


def _scale_vectors(vectors: Tensor, scale: str) -> Tensor:
    """Scale the vectors of all words and put the zero vector of the padding before them, as row 0."""
    table = (vectors - vectors.mean()) / vectors.std(correction=0)
    if scale == "paper":
        table = (table.clamp(-3, 3) + 3) / 6
    return torch.cat([torch.zeros_like(table[:1]), table])


def _read_vectors(path: Path) -> Arrays:
    """Read and check the file of word vectors; return no arrays if there is no such file."""
    if not path.exists():
        return {}
    with explain_errors(path, advice="; put a good one there"), bounded.open_zip(path, VECTORS_LIMIT) as archive:
        arrays = {key: bounded.read_array(archive, key, VECTORS_LIMIT) for key in VECTORS_SUMS}
    if compute_sums(arrays) != VECTORS_SUMS:
        raise DataError(
            f"{path} is damaged or has other vectors: its SHA-256 is not the registry's; put a good one there, or none "
            "and pass vectors=PATH."
        )
    return arrays


def _unpack_vectors(arrays: Arrays, name: str) -> dict[str, Vectors]:
    """Return the stored vectors by word."""
    if "words" not in arrays:
        raise DataError(
            f"{name} has no word vectors: put {VECTORS_FILE} beside its texts, or pass vectors='glove.6B.100d.txt', a file "
            "of nlp.stanford.edu/projects/glove."
        )
    words = arrays["words"].tobytes().decode("utf-8").split("\n")
    return dict(zip(words, arrays["vectors"].astype(np.float32), strict=True))


def read_glove(path: Path, wanted: Iterable[str]) -> dict[str, Vectors]:
    """Read the vectors of the wanted words from a file in GloVe's format: lines of a word and its values."""
    found: dict[str, Vectors] = {}
    words, values = set(wanted), 0
    with explain_errors(path), path.open(encoding="utf-8", newline="\n") as file:
        try:
            for number, line in enumerate(bounded.read_lines(file, LINE_LIMIT), start=1):
                word, _, rest = line.rstrip("\n").partition(" ")
                values = values or len(rest.split())
                if word in words:
                    found[word] = _parse_vector(rest, values, f"line {number} of {path}")
        except UnicodeDecodeError as error:
            raise DataError(f"{path} is no text in UTF-8, which GloVe's files are.") from error
    if not found:
        raise DataError(f"{path} has no vector of any word here; glove.6B.100d.txt, say, has.")
    return found


def _parse_vector(rest: str, values: int, where: str) -> Vectors:
    """Parse the numbers of a line, which must be finite and as many as ``values``."""
    try:
        vector = np.array(rest.split(), dtype=np.float32)
    except ValueError:
        vector = np.empty(0, np.float32)
    if len(vector) != values or not values or not np.isfinite(vector).all():
        raise DataError(f"{where} is not a word and {values or 'some'} numbers, as in GloVe's files.")
    return vector
