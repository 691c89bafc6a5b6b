"""Sequences, cut into windows with a target for each position: the characters of a text, and time series.

The first four fifths of a sequence are for training, the rest for testing. No window contains values of both parts.

**Characters.** A network predicts the next character. ``x`` and ``y`` are int64, examples × window; the targets are
the inputs shifted by one:

    x   F i r s t   C i …
    y   i r s t   C i t …

Each value is the index of a character in the vocabulary, which has the characters of the training part sorted by code
point. A network sees one-hot vectors.

**Time series** are tables of time × series. There are two tasks:

``forecast``
    x is every series at the window's time steps t, y is every series at t + ``horizon``; both are examples × window ×
    series. A recurrent network predicts y at t from the values up to t.
``paper``
    x is every series but the last at t, y is the last one at the same t. This is what the authors' code does. It is
    not a forecast.

Each series is standardised to z-scores. ``scale="train"`` computes means and standard deviations from the training
part; ``scale="all"`` computes them from the whole series, including the test part, as the authors' code does.
"""

import gzip
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch

from apical.data import bounded
from apical.data.dataset import Dataset
from apical.data.source import Array, Arrays, OwnFile, PathLike, Record, Source, data_folder, explain_errors
from apical.errors import DataError, check_whole_number, warn
from apical.extras import import_extra
from apical.files import replace_atomically

UNKNOWN = "\N{REPLACEMENT CHARACTER}"
"""The symbol for all characters that are not in the training part, if the option ``unknown`` is true."""
TASKS = ("forecast", "paper")
SCALES = ("train", "all")
OWN_LIMIT, OWN_LINE_LIMIT = 1 << 30, 1 << 20  # bytes of a file of the user's own, and characters of one of its lines


def split_parts(values: npt.NDArray[Any]) -> dict[str, npt.NDArray[Any]]:
    """Split a sequence along its first axis into the training part and the test part.

    >>> {name: part.tolist() for name, part in split_parts(np.arange(6)).items()}
    {'training': [0, 1, 2, 3], 'test': [4, 5]}
    """
    border = len(values) * 4 // 5
    return {"training": values[:border], "test": values[border:]}


def check_length(values: npt.NDArray[Any], length: int, name: str, unit: str) -> None:
    """Check that a sequence is long enough for one window in each of its parts."""
    for part_name, part in split_parts(values).items():
        if len(part) < length:
            raise DataError(
                f"{name} has {len(values):,} {unit}, {len(part):,} of them in the {part_name} part, but one window and its "
                f"targets take {length:,}: choose a shorter window, or give a longer sequence."
            )


def cut_windows(part: npt.NDArray[Any], length: int, stride: int) -> npt.NDArray[Any]:
    """Return all windows (windows × ``length`` × …), one every ``stride`` time steps, as a view of ``part``.

    >>> cut_windows(np.arange(6), 3, 2).tolist()
    [[0, 1, 2], [2, 3, 4]]
    """
    windows = np.lib.stride_tricks.sliding_window_view(part, length, axis=0)[::stride]
    return np.moveaxis(windows, -1, 1)


def make_dataset(
    x: npt.NDArray[Any], y: npt.NDArray[Any], ahead: int, window: int, stride: int, **attributes: Any
) -> Dataset:
    """Cut inputs, and the targets ``ahead`` time steps later, into windows. ``attributes`` are those of a Dataset."""
    x_train, y_train, x_test, y_test = (
        torch.from_numpy(cut_windows(side, window, stride).copy())
        for inputs, targets in zip(split_parts(x).values(), split_parts(y).values(), strict=True)
        for side in (inputs[: len(inputs) - ahead], targets[ahead:])
    )
    overlap = (window + ahead - 1) // stride  # how many of the following windows share values with a window
    return Dataset(x_train, y_train, x_test, y_test, overlap=overlap, **attributes)


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

    def parse(self, paths: Sequence[Path]) -> Arrays:
        (path,) = paths
        with explain_errors(path):
            return {"text": np.frombuffer(bounded.read_file(path, self.length or OWN_LIMIT), np.uint8)}

    def read_file(self, path: Path) -> tuple[Arrays, Record | None]:
        return self.parse([path]), None

    def write(self, path: Path, arrays: Arrays, record: Record) -> None:
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
            unknown: whether characters that are not in the training part become ``UNKNOWN`` (the default) or an error.
        """
        stride = window if stride is None else stride
        check_whole_number("window", window, error=DataError)
        check_whole_number("stride", stride, error=DataError)
        if not isinstance(unknown, bool | None):
            raise DataError(f"unknown is {unknown!r}, but must be true or false.")
        codes = self._decode(arrays["text"])
        check_length(codes, window + 1, self.name, "characters")
        known = np.unique(split_parts(codes)["training"])
        if len(known) == 1:
            raise DataError(
                f"the training part of {self.name} is one character, {chr(known[0])!r}, again and again: "
                "there is nothing to predict; give another text."
            )
        missing = np.setdiff1d(codes, known)  # characters of the test part alone
        if len(missing) and unknown is False:
            first = int(np.argmax(np.isin(codes, missing)))
            raise DataError(
                f"{self.name} holds {chr(codes[first])!r} at position {first:,}, in the test part, but nowhere in the "
                "training part: the option unknown=true gives such characters a symbol of their own."
            )
        if len(missing) and unknown is None and not self.unknown:
            warn(
                f"the test part of {self.name} has {len(missing)} characters, {chr(missing[0])!r} first, that the training "
                "part lacks; they become one unknown character, and the option unknown=false refuses them."
            )
        unknown = (self.unknown or len(missing) > 0) if unknown is None else unknown
        known = np.union1d(known, [ord(UNKNOWN)]) if unknown else known
        indices = np.searchsorted(known, codes).astype(np.int64)
        indices[np.isin(codes, missing)] = np.searchsorted(known, ord(UNKNOWN))
        return make_dataset(
            indices,
            indices,
            ahead=1,
            window=window,
            stride=stride,
            name=self.name,
            classes=len(known),
            options={"window": window, "stride": stride, "unknown": unknown},
            vocabulary="".join(map(chr, known)),
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


@dataclass(frozen=True, kw_only=True)
class OwnText(OwnFile, Characters):
    """``text:PATH``, any text file in UTF-8."""


@dataclass(frozen=True, kw_only=True)
class Series(Source):
    """Several series over the same time steps: ``values``, float32 time × series, in ``timeseries/NAME.npz``."""

    LOSS: ClassVar[str] = "mse"
    SEQUENCES: ClassVar[bool] = True

    length: int = 0
    series: int = 0

    @property
    def arrays(self) -> dict[str, Array]:
        return {"values": Array((self.length, self.series), "float32")}

    @property
    def size(self) -> str:
        border = self.length * 4 // 5
        return f"{border:,} + {self.length - border:,} times of {self.series} series"

    @property
    def remedy(self) -> str:
        if self.files:
            return super().remedy
        return f"put a file {self.name}.npz whose array values has the SHA-256 {self.sums['values']} there"

    def place(self, root: PathLike | None = None) -> Path:
        return data_folder(root) / "timeseries" / f"{self.name}.npz"

    def parse(self, paths: Sequence[Path]) -> Arrays:
        (path,) = paths
        with explain_errors(path, "is not in its official format", ": download it again"):
            return super().parse(paths)

    def check_values(self, arrays: Arrays, where: str) -> None:
        with np.errstate(over="ignore"):  # a value that is infinite in float32 is found here
            bad = np.argwhere(~np.isfinite(arrays["values"].astype(np.float32, copy=False)))
        if len(bad):
            row, column = bad[0]
            raise DataError(
                f"{where} holds {arrays['values'][row, column]} at row {row}, column {column} (counted from 0): "
                "fill in or remove such values."
            )

    def dataset(
        self,
        arrays: Arrays,
        *,
        task: str = "forecast",
        horizon: int | None = None,
        window: int = 24,
        stride: int = 1,
        scale: str = "train",
    ) -> Dataset:
        """Cut the series into windows.

        Args:
            arrays: the values, time × series.
            task: ``forecast`` or ``paper``, see the module's docstring.
            horizon: time steps between inputs and targets of a forecast; 1 by default.
            window: time steps of an example.
            stride: time steps between the starts of successive windows.
            scale: ``train`` or ``all``, the part that is measured for the z-scores.
        """
        for name, value, choices in (("task", task, TASKS), ("scale", scale, SCALES)):
            if value not in choices:
                raise DataError(f"unknown {name} {value!r}; {' and '.join(choices)} work.")
        if task == "paper" and horizon is not None:
            raise DataError("the task 'paper' has no horizon: leave it out, or choose the task 'forecast'.")
        horizon = 1 if horizon is None else horizon
        for name, number in (("window", window), ("stride", stride), ("horizon", horizon)):
            check_whole_number(name, number, error=DataError)
        ahead = 0 if task == "paper" else horizon
        check_length(arrays["values"], window + ahead, self.name, "times")
        values = standardise(arrays["values"], scale)
        if task == "paper" and values.shape[1] < 2:
            raise DataError(f"the task 'paper' needs two series, but {self.name} has one: use 'forecast'.")
        x, y = (values[:, :-1], values[:, -1:]) if task == "paper" else (values, values)
        options = {"task": task, "window": window, "stride": stride, "scale": scale}
        options |= {"horizon": ahead} if ahead else {}
        return make_dataset(x, y, ahead, window, stride, name=self.name, classes=None, loss=self.LOSS, options=options)


@dataclass(frozen=True, kw_only=True)
class OwnSeries(OwnFile, Series):
    """``series:PATH``, a table of the user: comma-separated numbers, one line per time step, float64 until standardised."""

    def parse(self, paths: Sequence[Path]) -> Arrays:
        (path,) = paths
        with explain_errors(path):
            bounded.check_file(path, OWN_LIMIT)
            with path.open(encoding="utf-8-sig") as file:
                return {"values": parse_table(bounded.read_lines(file, OWN_LINE_LIMIT), path)}


def standardise(values: npt.NDArray[Any], scale: str) -> npt.NDArray[np.float32]:
    """Return the z-scores of each series. A series that is constant in the measured part is only centred."""
    measured = (split_parts(values)["training"] if scale == "train" else values).astype(np.float64)
    std = np.where(measured.min(0) < measured.max(0), measured.std(0), 1)
    result: npt.NDArray[np.float32] = ((values - measured.mean(0)) / std).astype(np.float32)
    return result


def parse_gzipped(entry: Series, paths: Sequence[Path]) -> Arrays:
    """Parse the format of Lai et al. (2018): gzipped comma-separated numbers, one line per time step."""
    with gzip.open(paths[0], "rt", encoding="ascii") as file:
        return {"values": parse_table(_read_official_lines(entry, file), paths[0]).astype(np.float32)}


def parse_ett(entry: Series, paths: Sequence[Path]) -> Arrays:
    """Parse the format of Zhou et al. (2021): a line of titles, then the date and the numbers of each time step."""
    with paths[0].open(encoding="utf-8-sig") as file:
        return {"values": parse_table(_read_official_lines(entry, file), paths[0], has_dates=True).astype(np.float32)}


def _read_official_lines(entry: Series, file: IO[str]) -> Iterator[str]:
    """Yield the lines of a table, no more and no longer than a table of this size needs, with room for titles."""
    return bounded.read_lines(file, longest=40 * (entry.series + 1), most=entry.length + 2)


def parse_pandas_frame(entry: Series, paths: Sequence[Path]) -> Arrays:
    """Parse a frame that pandas wrote to HDF5 in its *fixed* format.

    The numbers are in ``block0_values``, with one row per item of ``axis1`` (the times) and one column per item of
    ``axis0`` (the series). Times and titles may be pickled there, so they are counted but not read.
    """
    (path,) = paths
    h5py = import_extra("h5py", f"reading {path.name}")
    with h5py.File(path, "r") as file:
        frames = [group for group in file.values() if "block0_values" in group]
        if len(frames) != 1 or "block1_values" in frames[0]:
            raise DataError(f"{path} does not hold one table of numbers, as pandas writes it: download it again.")
        values, shape = frames[0]["block0_values"], (len(frames[0]["axis1"]), len(frames[0]["axis0"]))
        if values.dtype.kind not in "fiu" or values.shape != shape:
            found = Array(values.shape, str(values.dtype))
            raise DataError(f"{path} holds {found}, not numbers of {shape[0]}×{shape[1]}: download it again.")
        if values.chunks or values.size > entry.length * entry.series:  # compressed parts may unpack to any size
            raise DataError(f"{path} holds more, or other parts, than {entry.arrays['values']}: download it again.")
        return {"values": np.asarray(values, np.float64).astype(np.float32)}


def parse_table(lines: Iterable[str], path: Path, *, has_dates: bool = False) -> npt.NDArray[np.float64]:
    """Parse lines of comma-separated numbers, all of the same length. A first line without any number has the titles.

    Args:
        lines: lines of text; empty lines are skipped.
        path: the file, for error messages.
        has_dates: whether the first column has dates, which are skipped.
    """
    values = array("d")  # eight bytes per value; lists of short rows would take twenty times as much
    titles: list[str] = []
    width = 0
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        cells = line.strip().split(",")[has_dates:]
        width = width or len(cells)
        if number == 1 and not any(_is_number(cell.replace("_", "")) for cell in cells):
            titles = cells
            continue
        if len(cells) != width:
            raise DataError(f"line {number} of {path} has {len(cells)} values, but the lines before it have {width}.")
        try:
            if "_" in "".join(cells):  # Python alone reads 1_000 as a number
                raise ValueError
            values.extend(map(float, cells))
        except ValueError:
            column = next(i for i, cell in enumerate(cells) if not _is_number(cell))
            title = f" ({titles[column].strip()})" if titles else ""
            raise DataError(
                f"line {number} of {path} holds {cells[column]!r} in column {column + 1 + has_dates}{title}, which is not "
                "a number: remove that column, or repair the value."
            ) from None
    if not values:
        raise DataError(f"{path} holds no values.")
    return np.frombuffer(values, np.float64).reshape(-1, width)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return "_" not in text
