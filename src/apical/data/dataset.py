"""A data set in memory, and the checks of tensors that users pass in."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from apical.errors import DataError, check_whole_number

Values = Tensor | npt.NDArray[np.generic]


@dataclass(frozen=True, eq=False, repr=False)
class Dataset:
    """Training and test tensors with a name.

    Unpacking gives ``x_train, y_train, x_test, y_test``, the order in which ``apical.fit`` takes tensors.

    ``x`` is examples × values (images: N×C×H×W; sequences: N×T×values, or N×T indices). ``y`` holds class labels
    0 … classes − 1 as int64, or floating targets; ``classes`` is then ``None``. ``loss`` is the default loss.

    ``options`` are all options that the data set was loaded with. ``vocabulary`` has the character of each class, if
    classes are characters. ``overlap`` is set for windows in order of time: the number of following windows that share
    values with a window. A validation split takes the last of them, whatever the network, and leaves out so many at its
    border. It is ``None`` for examples that are independent of each other, of which it takes random ones.
    """

    x_train: Tensor
    y_train: Tensor
    x_test: Tensor
    y_test: Tensor
    name: str
    classes: int | None
    loss: str = "cross_entropy"
    options: Mapping[str, Any] = field(default_factory=dict)
    vocabulary: str | None = None
    overlap: int | None = None

    def __iter__(self) -> Iterator[Tensor]:
        return iter((self.x_train, self.y_train, self.x_test, self.y_test))

    def __repr__(self) -> str:
        shape = "×".join(str(n) for n in self.x_train.shape[1:])
        task = "floating targets" if self.classes is None else f"{self.classes} classes"
        return f"Dataset({self.name!r}: {len(self.x_train):,} + {len(self.x_test):,} of {shape}, {task})"


def from_tensors(
    x_train: Values, y_train: Values, x_test: Values, y_test: Values, name: str = "custom", overlap: int | None = None
) -> Dataset:
    """Check four tensors or numpy arrays and return them as a :class:`Dataset`.

    ``x`` must be floating and finite. It may also be whole numbers, examples × time, that index one-hot vectors (such
    as characters, for a recurrent network); then every index needs a target. ``y`` is either class labels of any
    integer type, counted from 0 (the number of classes is the largest label of both splits, plus one), or finite
    floating targets for regression. Nothing is rescaled. Tensors stay on their device; integers become int64.

    If the examples are windows of one sequence in order of time, pass ``overlap``, the number of following windows that
    share inputs or targets with a window: no validation split then puts the same values into both of its parts. For
    sequences with a target for each time step it is 0 by default, for all other data ``None``.

    >>> from_tensors(torch.zeros(4, 3), torch.tensor([0, 1, 2, 1]), torch.zeros(2, 3), torch.tensor([0, 1]))
    Dataset('custom': 4 + 2 of 3, 3 classes)
    """
    x = {"train": _check_inputs(x_train, "x_train", y_train), "test": _check_inputs(x_test, "x_test", y_test)}
    y = {"train": _check_targets(y_train, "y_train"), "test": _check_targets(y_test, "y_test")}
    for split in x:
        if len(x[split]) != len(y[split]):
            raise DataError(
                f"x_{split} has {len(x[split]):,} examples but y_{split} has {len(y[split]):,}: "
                "give one target for each example."
            )
    for letter, pair in (("x", x), ("y", y)):
        _check_same_form(letter, pair["train"], pair["test"])
    floating = y["train"].is_floating_point()
    classes = None if floating else max(int(y["train"].max()), int(y["test"].max())) + 1
    if overlap is not None:
        check_whole_number("overlap", overlap, least=0, error=DataError)
    elif _are_sequences(x["train"], y["train"]):
        overlap = 0
    return Dataset(x["train"], y["train"], x["test"], y["test"], name, classes, overlap=overlap)


def _are_sequences(x: Tensor, y: Tensor) -> bool:
    """Whether there is a target for each time step: x is N×T indices or N×T×values, y is N×T or N×T×values."""
    has_time = x.ndim == 3 or not x.is_floating_point()
    return has_time and y.ndim in (2, 3) and y.shape[1] == x.shape[1]


def _check_inputs(values: Values, label: str, targets: Values) -> Tensor:
    """Return inputs as a tensor of finite floats, or of indices with a target for each time step."""
    tensor = _to_tensor(values, label)
    if not tensor.is_floating_point():
        if tensor.ndim == 2 and tuple(getattr(targets, "shape", ())[1:2]) == tuple(tensor.shape[1:]):
            return _check_whole_numbers(tensor, label, "indices")
        raise DataError(
            f"{label} is {_dtype_name(tensor)}, but inputs are floating numbers: use {label}.float(); whole numbers are "
            "sequences of indices and need a target for each."
        )
    if tensor.ndim < 2:
        raise DataError(f"{label} has shape {tuple(tensor.shape)}, but inputs are examples × values.")
    _check_finite(tensor, label)
    return tensor


def _check_targets(values: Values, label: str) -> Tensor:
    """Return targets as a tensor of finite floats or of class labels."""
    tensor = _to_tensor(values, label)
    if tensor.is_floating_point():
        _check_finite(tensor, label)
        return tensor
    return _check_whole_numbers(tensor, label, "labels")


def _check_whole_numbers(tensor: Tensor, label: str, meaning: str) -> Tensor:
    """Return the tensor as int64 if it holds whole numbers that are not negative."""
    if tensor.is_complex() or tensor.dtype is torch.bool:
        raise DataError(
            f"{label} is {_dtype_name(tensor)}, but must be floating values or whole numbers: "
            f"use {label}.long() for {meaning}."
        )
    tensor = tensor.long()
    if int(tensor.min()) < 0:
        first = int(torch.nonzero(tensor.flatten() < 0)[0])
        raise DataError(
            f"{label} holds {int(tensor.flatten()[first])} at position {first}, but {meaning} count from 0."
        )
    return tensor


def _to_tensor(values: Values, label: str) -> Tensor:
    """Convert to a detached tensor that is dense and not empty. A numpy array shares its memory if possible."""
    if isinstance(values, np.ndarray):
        try:
            # torch rejects foreign byte orders and negative strides, and warns of read-only memory.
            native = values.dtype.newbyteorder("=")
            values = torch.from_numpy(np.require(values, native, ["C", "W"]))
        except TypeError as error:
            raise DataError(f"{label} is a numpy array of {values.dtype}: give numbers.") from error
    if not isinstance(values, Tensor):
        raise DataError(f"{label} is a {type(values).__name__}: give a torch tensor or a numpy array.")
    if values.is_nested or values.layout is not torch.strided:
        raise DataError(f"{label} is sparse or nested ({values.layout}): give {label}.to_dense().")
    if values.is_floating_point() and values.element_size() == 1:
        raise DataError(f"{label} is {_dtype_name(values)}, which torch does not compute with: give {label}.float().")
    if values.numel() == 0 or values.ndim == 0:
        raise DataError(f"{label} has shape {tuple(values.shape)}: give at least one example.")
    return values.detach()


def _check_finite(tensor: Tensor, label: str) -> None:
    """Check that all values are finite; the error names the first example that is not."""
    low, high = tensor.aminmax()  # NaN propagates to both; a mask would take as much memory as the data
    if torch.isfinite(low) and torch.isfinite(high):
        return
    for index, example in enumerate(tensor):
        bad = example[~torch.isfinite(example)]
        if bad.numel():
            raise DataError(
                f"{label}[{index}] holds {bad[0].item()}: it is the first example that is not finite; "
                "remove or repair such examples."
            )


def _check_same_form(letter: str, train: Tensor, test: Tensor) -> None:
    """Check that both splits have examples of the same shape and dtype."""
    if train.shape[1:] != test.shape[1:]:
        raise DataError(
            f"{letter}_train has examples of shape {tuple(train.shape[1:])} but {letter}_test of "
            f"{tuple(test.shape[1:])}: give both splits the same shape."
        )
    if train.dtype != test.dtype:
        raise DataError(
            f"{letter}_train is {_dtype_name(train)} but {letter}_test is {_dtype_name(test)}: give both the same type."
        )


def _dtype_name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
