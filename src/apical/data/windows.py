"""Windows of a long sequence: what characters and time series have in common.

The first four fifths of a sequence train and the rest tests, and no window reaches from one into the other.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from apical.errors import DataError


def parts(values: npt.NDArray[Any]) -> dict[str, npt.NDArray[Any]]:
    """The training part and the test part, along the first axis.

    >>> {name: part.tolist() for name, part in parts(np.arange(6)).items()}
    {'training': [0, 1, 2, 3], 'test': [4, 5]}
    """
    border = len(values) * 4 // 5
    return {"training": values[:border], "test": values[border:]}


def whole(name: str, value: object) -> None:
    """Refuse an option that is not a whole number of at least 1."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise DataError(f"{name} is {value!r}, but must be a whole number of at least 1.")


def cut(part: npt.NDArray[Any], length: int, stride: int) -> npt.NDArray[Any]:
    """Windows × ``length`` × …: one window for every ``stride`` steps, as a view of the part.

    >>> cut(np.arange(6), 3, 2).tolist()
    [[0, 1, 2], [2, 3, 4]]
    """
    windows = np.lib.stride_tricks.sliding_window_view(part, length, axis=0)[::stride]
    return np.moveaxis(windows, -1, 1)


def require(values: npt.NDArray[Any], length: int, name: str, unit: str) -> None:
    """Refuse a sequence that is too short for one window in each of its parts."""
    for which, part in parts(values).items():
        if len(part) < length:
            raise DataError(
                f"{name} has {len(values):,} {unit}, {len(part):,} of them in the {which} part, but one window and its "
                f"targets take {length:,}: choose a shorter window, or give a longer sequence."
            )


def overlap(length: int, stride: int) -> int:
    """How many of the next windows share a value with each one.

    >>> overlap(3, 2), overlap(3, 3), overlap(3, 1)
    (1, 0, 2)
    """
    return (length - 1) // stride
