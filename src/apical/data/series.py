"""Time series: tables of time × series, cut into windows for one of two tasks.

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
from apical.extras import import_extra

Table = npt.NDArray[np.float64]
TASKS = ("forecast", "paper")
SCALES = ("train", "all")


@dataclass(frozen=True, kw_only=True)
class Series(Source):
    """Several series over the same time steps: ``values``, float32 time × series, in ``timeseries/NAME.npz``."""

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
                f"{path} is not in its official format ({canonical.describe_error(error)}): download it again."
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
        windows.check_whole_number("window", window)
        windows.check_whole_number("stride", stride)
        if horizon is not None:
            windows.check_whole_number("horizon", horizon)
        ahead = 0 if task == "paper" else horizon or 1
        values = standardise(arrays["values"], scale)
        windows.check_length(values, window + ahead, self.name, "times")
        if task == "paper" and values.shape[1] < 2:
            raise DataError(f"the task 'paper' needs two series, but {self.name} has one: use 'forecast'.")
        inputs, targets = (slice(None, -1), slice(-1, None)) if task == "paper" else (slice(None), slice(None))
        x_train, y_train, x_test, y_test = (
            torch.from_numpy(windows.cut_windows(side, window, stride).copy())
            for part in windows.split_parts(values).values()
            for side in (part[: len(part) - ahead, inputs], part[ahead:, targets])
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
            overlap=windows.count_overlaps(window + ahead, stride),
        )


def standardise(values: npt.NDArray[Any], scale: str) -> npt.NDArray[np.float32]:
    """Return the z-scores of each series. A series that is constant in the measured part is only centred."""
    measured = (windows.split_parts(values)["training"] if scale == "train" else values).astype(np.float64)
    std = np.where(measured.min(0) < measured.max(0), measured.std(0), 1)
    result: npt.NDArray[np.float32] = ((values - measured.mean(0)) / std).astype(np.float32)
    return result


@dataclass(frozen=True, kw_only=True)
class OwnSeries(OwnFile, Series):
    """``series:PATH``, a table of the user: comma-separated numbers, one line per time step."""

    path: Path

    def read(self, root: PathLike | None = None) -> tuple[Arrays, Report]:
        try:
            lines = self.path.read_text("utf-8-sig").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(f"{self.path} cannot be read ({canonical.describe_error(error)}).") from error
        has_titles = bool(lines) and not any(map(_is_number, lines[0].split(",")))
        arrays: Arrays = {"values": parse_table(lines, self.path, has_titles=has_titles).astype(np.float32)}
        self.check_values(arrays, str(self.path))
        return arrays, Report(self.name, self.path, "own")


def parse_gzipped(path: Path) -> Table:
    """Parse the format of Lai et al. (2018): gzipped comma-separated numbers, one line per time step."""
    with gzip.open(path, "rt", encoding="ascii") as file:
        return parse_table(file, path)


def parse_ett(path: Path) -> Table:
    """Parse the format of Zhou et al. (2021): a line of titles, then the date and the numbers of each time step."""
    with path.open(encoding="utf-8-sig") as file:
        return parse_table(file, path, has_titles=True, has_dates=True)


def parse_pandas_frame(path: Path) -> Table:
    """Parse a frame that pandas wrote to HDF5 in its *fixed* format.

    The numbers are in ``block0_values``, with one row per item of ``axis1`` (the times) and one column per item of
    ``axis0`` (the series). Times and titles may be pickled there, so they are counted but not read.
    """
    h5py = import_extra("h5py", f"reading {path.name}")
    with h5py.File(path, "r") as file:
        frames = [group for group in file.values() if "block0_values" in group]
        if len(frames) != 1 or "block1_values" in frames[0]:
            raise DataError(f"{path} does not hold one table of numbers, as pandas writes it: download it again.")
        values, shape = frames[0]["block0_values"], (len(frames[0]["axis1"]), len(frames[0]["axis0"]))
        if values.dtype.kind not in "fiu" or values.shape != shape:
            found = f"{values.dtype} {'×'.join(map(str, values.shape))}"
            raise DataError(f"{path} holds {found}, not numbers of {shape[0]}×{shape[1]}: download it again.")
        return np.asarray(values, np.float64)


def parse_table(lines: Iterable[str], path: Path, *, has_titles: bool = False, has_dates: bool = False) -> Table:
    """Parse lines of comma-separated numbers, all of the same length.

    Args:
        lines: lines of text; empty lines are skipped.
        path: the file, for error messages.
        has_titles: whether the first line has the titles of the columns.
        has_dates: whether the first column has dates, which are skipped.
    """
    rows: list[Table] = []
    titles: list[str] = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        cells = line.strip().split(",")[has_dates:]
        if has_titles and number == 1:
            titles = cells
            continue
        width = len(titles or (rows[0] if rows else cells))
        if len(cells) != width:
            raise DataError(f"line {number} of {path} has {len(cells)} values, but the lines before it have {width}.")
        try:
            rows.append(np.array([float(cell) for cell in cells]))
        except ValueError:
            column = next(i for i, cell in enumerate(cells) if not _is_number(cell))
            title = f" ({titles[column].strip()})" if titles else ""
            raise DataError(
                f"line {number} of {path} holds {cells[column]!r} in column {column + 1 + has_dates}{title}, which is not "
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
