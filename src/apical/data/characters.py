"""Texts: windows of characters, in which a network predicts the next character.

A window of 32 takes 33 characters; the targets are the inputs shifted by one:

    x   F i r s t   C i …
    y   i r s t   C i t …

``x`` and ``y`` are int64, examples × window. Each value is the index of a character in the vocabulary, which has the
characters of the training part sorted by code point. A network sees one-hot vectors.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
import numpy.typing as npt
import torch

from apical.data import canonical, windows
from apical.data.dataset import Dataset
from apical.data.source import Array, Arrays, OwnFile, PathLike, Report, Source, data_folder
from apical.errors import DataError
from apical.files import replace_atomically

UNKNOWN = "\N{REPLACEMENT CHARACTER}"
"""The symbol for all characters that are not in the training part, if the option ``unknown`` is true."""


@dataclass(frozen=True, kw_only=True)
class Characters(Source):
    """A text of the registry, stored unchanged in ``text/NAME.txt``; its only array is the bytes of the file.

    ``unknown`` is the default of the option ``unknown``: true if the test part is known to need it.
    """

    SEQUENCES: ClassVar[bool] = True

    length: int = 0
    unknown: bool = False

    @property
    def arrays(self) -> dict[str, Array]:
        return {"text": Array((self.length,))}

    @property
    def size(self) -> str:
        return f"{self.length:,} bytes, the last fifth of the text to test"

    @property
    def remedy(self) -> str:
        if self.files:
            return super().remedy
        return f"put the text whose SHA-256 is {self.sums['text']} there as {self.name}.txt"

    def place(self, root: PathLike | None = None) -> Path:
        return data_folder(root) / "text" / f"{self.name}.txt"

    def state(self, root: PathLike | None = None) -> str:
        path = self.place(root)
        if not path.exists():
            return "absent"
        return "present" if path.is_file() and path.stat().st_size == self.length else "damaged"

    def stored(self, path: Path) -> tuple[Arrays, canonical.Record | None]:
        return self.parse([path]), None

    def parse(self, paths: Sequence[Path]) -> Arrays:
        (path,) = paths
        try:
            return {"text": np.frombuffer(path.read_bytes(), np.uint8)}
        except OSError as error:
            raise DataError(f"{path} cannot be read ({canonical.describe_error(error)}).") from error

    def write(self, path: Path, arrays: Arrays, record: canonical.Record) -> None:
        with replace_atomically(path) as temporary:
            temporary.write_bytes(arrays["text"].tobytes())

    def dataset(
        self, arrays: Arrays, *, window: int = 32, stride: int | None = None, unknown: bool | None = None
    ) -> Dataset:
        """Cut the text into windows.

        Args:
            arrays: the bytes of the text.
            window: characters of an example.
            stride: characters between the starts of successive windows; by default windows do not overlap.
            unknown: whether characters that are not in the training part become ``UNKNOWN``; else they are an error.
        """
        stride = window if stride is None else stride
        unknown = self.unknown if unknown is None else unknown
        windows.check_whole_number("window", window)
        windows.check_whole_number("stride", stride)
        if not isinstance(unknown, bool):
            raise DataError(f"unknown is {unknown!r}, but must be true or false.")
        codes = self._decode(arrays["text"])
        windows.check_length(codes, window + 1, self.name, "characters")
        known = np.unique(windows.split_parts(codes)["training"])
        if len(known) == 1:
            raise DataError(
                f"the training part of {self.name} is one character, {chr(known[0])!r}, again and again: "
                "there is nothing to predict; give another text."
            )
        known = np.union1d(known, [ord(UNKNOWN)]) if unknown else known
        indices = self._to_indices(codes, known, unknown)
        x_train, y_train, x_test, y_test = (
            torch.from_numpy(cut[:, side].copy())
            for part in windows.split_parts(indices).values()
            for cut in [windows.cut_windows(part, window + 1, stride)]
            for side in (slice(None, -1), slice(1, None))
        )
        return Dataset(
            x_train,
            y_train,
            x_test,
            y_test,
            self.name,
            len(known),
            options={"window": window, "stride": stride, "unknown": unknown},
            vocabulary="".join(map(chr, known)),
            overlap=windows.count_overlaps(window + 1, stride),
        )

    def _decode(self, text: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint32]:
        """Return the code point of each character. A byte order mark at the start is skipped."""
        raw = text.tobytes()
        try:
            decoded = raw.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise self._not_text_error(f"byte 0x{raw[error.start]:02x} at position {error.start}") from error
        if not decoded:
            raise DataError(f"{self.name} is empty: give a text.")
        if "\0" in decoded:
            raise self._not_text_error(f"a zero byte at position {raw.index(0)}")
        return np.frombuffer(decoded.encode("utf-32-le"), np.dtype("<u4"))

    def _not_text_error(self, what: str) -> DataError:
        return DataError(f"{self.name} is not text in UTF-8 ({what}): give a text, or convert it to UTF-8 first.")

    def _to_indices(
        self, codes: npt.NDArray[np.uint32], known: npt.NDArray[np.uint32], unknown: bool
    ) -> npt.NDArray[np.int64]:
        """Return the index of each character in the vocabulary, or the index of UNKNOWN."""
        indices = np.searchsorted(known, codes).astype(np.int64)
        is_unknown = known[np.minimum(indices, len(known) - 1)] != codes
        if not is_unknown.any():
            return indices
        if not unknown:
            first = int(np.argmax(is_unknown))
            raise DataError(
                f"{self.name} holds {chr(codes[first])!r} at position {first:,}, in the test part, but nowhere in the "
                "training part: the option unknown=true gives such characters a symbol of their own."
            )
        indices[is_unknown] = np.searchsorted(known, ord(UNKNOWN))
        return indices


@dataclass(frozen=True, kw_only=True)
class OwnText(OwnFile, Characters):
    """``text:PATH``, any text file in UTF-8."""

    path: Path

    def read(self, root: PathLike | None = None) -> tuple[Arrays, Report]:
        return self.parse([self.path]), Report(self.name, self.path, "own")
