"""Time series: tables of time × series, as windows for one of two tasks.

``forecast``
    x is every series at the window's times t, y is every series at t + ``horizon``: examples × window × series
    each. At each position a network that goes through a window in order has seen the values up to t.
``paper``
    x is every series but the last at t, y is the last one at the same t. This is what the authors' code does. It is
    not a forecast.

Values are z-scored, series by series. ``scale="train"`` takes means and standard deviations from the training part;
``scale="all"`` takes them from the whole series, the test part too, as the authors' code does.
"""

import gzip
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch

from apical.data import canonical, windows
from apical.data.dataset import Dataset
from apical.data.source import Array, Arrays, OwnFile, PathLike, Report, Source, data_folder
from apical.errors import ApicalError, DataError
from apical.extras import extra

Table = npt.NDArray[np.float64]
TASKS = ("forecast", "paper")
SCALES = ("train", "all")


@dataclass(frozen=True, kw_only=True)
class Series(Source):
    """Several series over the same times: ``values``, float32 time × series, in ``timeseries/NAME.npz``."""

    LOSS: ClassVar[str] = "mse"
    SEQUENCES: ClassVar[bool] = True

    length: int = 0
    series: int = 0
    parser: "Callable[[Path], Table] | None" = None

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
        if self.parser is None:
            raise DataError(f"{self.name} has no official files to read.")
        try:
            return {"values": self.parser(path).astype(np.float32)}
        except ApicalError:
            raise
        except Exception as error:  # gzip, codecs and h5py each raise types of their own
            raise DataError(
                f"{path} is not in its official format ({canonical.reason(error)}): download it again."
            ) from error

    def check_values(self, arrays: Arrays, where: str) -> None:
        bad = np.argwhere(~np.isfinite(arrays["values"]))
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
        for name, value, choices in (("task", task, TASKS), ("scale", scale, SCALES)):
            if value not in choices:
                raise DataError(f"unknown {name} {value!r}; {' and '.join(choices)} work.")
        if task == "paper" and horizon is not None:
            raise DataError("the task 'paper' has no horizon: leave it out, or choose the task 'forecast'.")
        windows.whole("window", window)
        windows.whole("stride", stride)
        if horizon is not None:
            windows.whole("horizon", horizon)
        ahead = 0 if task == "paper" else horizon or 1
        values = scaled(arrays["values"], scale)
        windows.require(values, window + ahead, self.name, "times")
        if task == "paper" and values.shape[1] < 2:
            raise DataError(f"the task 'paper' needs two series, but {self.name} has one: use 'forecast'.")
        come, go = (slice(None, -1), slice(-1, None)) if task == "paper" else (slice(None), slice(None))
        x_train, y_train, x_test, y_test = (
            torch.from_numpy(windows.cut(side, window, stride).copy())
            for part in windows.parts(values).values()
            for side in (part[: len(part) - ahead, come], part[ahead:, go])
        )
        options = {"task": task, "window": window, "stride": stride, "scale": scale}
        return Dataset(
            x_train,
            y_train,
            x_test,
            y_test,
            self.name,
            None,
            loss=self.LOSS,
            options={**options, "horizon": ahead} if ahead else options,
            overlap=windows.overlap(window + ahead, stride),
        )


def scaled(values: npt.NDArray[Any], scale: str) -> npt.NDArray[np.float32]:
    """z-scores of each series; one that never changes in the part that is measured is only centred."""
    seen = (windows.parts(values)["training"] if scale == "train" else values).astype(np.float64)
    spread = np.where(seen.min(0) < seen.max(0), seen.std(0), 1)
    result: npt.NDArray[np.float32] = ((values - seen.mean(0)) / spread).astype(np.float32)
    return result


@dataclass(frozen=True, kw_only=True)
class OwnSeries(OwnFile, Series):
    """``series:PATH``, a table of the user's own: comma-separated numbers, one line for each time."""

    path: Path

    def read(self, root: PathLike | None = None) -> tuple[Arrays, Report]:
        try:
            lines = self.path.read_text("utf-8-sig").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(f"{self.path} cannot be read ({canonical.reason(error)}).") from error
        titled = bool(lines) and not any(map(_is_number, lines[0].split(",")))
        arrays: Arrays = {"values": table(lines, self.path, titled=titled).astype(np.float32)}
        self.check_values(arrays, str(self.path))
        return arrays, Report(self.name, self.path, "own")


def gzipped(path: Path) -> Table:
    """Lai et al.'s format (2018): gzipped, numbers with commas between them, one line for each time."""
    with gzip.open(path, "rt", encoding="ascii") as file:
        return table(file, path)


def ett(path: Path) -> Table:
    """Zhou et al.'s format (2021): a line of titles, then the date and the numbers of each time."""
    with path.open(encoding="utf-8-sig") as file:
        return table(file, path, titled=True, dated=True)


def pandas_frame(path: Path) -> Table:
    """A frame that pandas wrote to HDF5 in its *fixed* format: ``block0_values``, as long as ``axis1`` (the times)
    and as wide as ``axis0`` (the series). Times and titles, which may be pickled there, are counted and not read.
    """
    h5py = extra("h5py", f"reading {path.name}")
    with h5py.File(path, "r") as file:
        frames = [group for group in file.values() if "block0_values" in group]
        if len(frames) != 1 or "block1_values" in frames[0]:
            raise DataError(
                f"{path} does not hold one table of numbers, as pandas writes it: download it again."
            )
        values, shape = frames[0]["block0_values"], (len(frames[0]["axis1"]), len(frames[0]["axis0"]))
        if values.dtype.kind not in "fiu" or values.shape != shape:
            found = f"{values.dtype} {'×'.join(map(str, values.shape))}"
            raise DataError(f"{path} holds {found}, not numbers of {shape[0]}×{shape[1]}: download it again.")
        return np.asarray(values, np.float64)


def table(lines: Iterable[str], path: Path, *, titled: bool = False, dated: bool = False) -> Table:
    """Numbers with commas between them, all lines of the same length; what is no number is named by its place."""
    rows: list[Table] = []
    titles: list[str] = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        cells = line.strip().split(",")[dated:]
        if titled and number == 1:
            titles = cells
            continue
        wide = len(titles or (rows[0] if rows else cells))
        if len(cells) != wide:
            raise DataError(
                f"line {number} of {path} has {len(cells)} values, but the lines before it have {wide}."
            )
        try:
            rows.append(np.array([float(cell) for cell in cells]))
        except ValueError:
            column = next(i for i, cell in enumerate(cells) if not _is_number(cell))
            title = f" ({titles[column].strip()})" if titles else ""
            raise DataError(
                f"line {number} of {path} holds {cells[column]!r} in column {column + 1 + dated}{title}, which is not "
                "a number: remove that column, or repair the value."
            ) from None
    if not rows:
        raise DataError(f"{path} holds no values.")
    return np.stack(rows)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
