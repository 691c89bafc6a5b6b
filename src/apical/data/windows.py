"""Cut a long sequence into windows, for characters and time series.

The first four fifths of a sequence are for training, the rest for testing. No window contains values of both parts.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from apical.errors import DataError


def split_parts(values: npt.NDArray[Any]) -> dict[str, npt.NDArray[Any]]:
    """Split a sequence along its first axis into the training part and the test part.

    >>> {name: part.tolist() for name, part in split_parts(np.arange(6)).items()}
    {'training': [0, 1, 2, 3], 'test': [4, 5]}
    """
    border = len(values) * 4 // 5
    return {"training": values[:border], "test": values[border:]}


def check_whole_number(name: str, value: object) -> None:
    """Check that the option `name` is a whole number of at least 1."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise DataError(f"{name} is {value!r}, but must be a whole number of at least 1.")


def cut_windows(part: npt.NDArray[Any], length: int, stride: int) -> npt.NDArray[Any]:
    """Return all windows (windows × ``length`` × …), one every ``stride`` time steps, as a view of ``part``.

    >>> cut_windows(np.arange(6), 3, 2).tolist()
    [[0, 1, 2], [2, 3, 4]]
    """
    windows = np.lib.stride_tricks.sliding_window_view(part, length, axis=0)[::stride]
    return np.moveaxis(windows, -1, 1)


def check_length(values: npt.NDArray[Any], length: int, name: str, unit: str) -> None:
    """Check that a sequence is long enough for one window in each of its parts."""
    for part_name, part in split_parts(values).items():
        if len(part) < length:
            raise DataError(
                f"{name} has {len(values):,} {unit}, {len(part):,} of them in the {part_name} part, but one window and its "
                f"targets take {length:,}: choose a shorter window, or give a longer sequence."
            )


def count_overlaps(length: int, stride: int) -> int:
    """Return how many of the following windows share values with a window.

    >>> count_overlaps(3, 2), count_overlaps(3, 3), count_overlaps(3, 1)
    (1, 0, 2)
    """
    return (length - 1) // stride
