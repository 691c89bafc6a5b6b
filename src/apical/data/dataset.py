"""A data set in memory, and the checks that every one of them passes before anything trains on it."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from apical.errors import DataError

Values = Tensor | npt.NDArray[np.generic]


@dataclass(frozen=True, eq=False, repr=False)
class Dataset:
    """Four tensors with a name. Unpacking gives them in the order in which ``apical.fit`` takes your own.

    ``x`` is examples × values (images: N×C×H×W; sequences: N×T×values, or N×T indices). ``y`` holds class labels
    0 … classes − 1 as int64, or floating targets, and then ``classes`` is ``None``. ``loss`` is the one to train with
    where none is named.

    ``options`` are those that it was loaded with, all of them. ``vocabulary`` has the character of each class, where
    classes are characters. ``overlap`` is set for windows in the order of time: how many of the next ones share values
    with each, so that a validation split can keep its distance.
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
    x_train: Values, y_train: Values, x_test: Values, y_test: Values, name: str = "custom"
) -> Dataset:
    """Check four tensors or numpy arrays of your own and make a :class:`Dataset` of them.

    ``x`` must be floating and finite, or whole numbers, examples × time, that stand for one-hot vectors, with a
    target for each of them (characters, for a recurrent network). ``y`` is either class labels of any integer
    type, from 0 up (the number of classes is the largest label of both splits, plus one), or finite floating
    targets for regression. Nothing is rescaled; tensors stay on their device, and only whole numbers change type,
    to int64.

    >>> from_tensors(torch.zeros(4, 3), torch.tensor([0, 1, 2, 1]), torch.zeros(2, 3), torch.tensor([0, 1]))
    Dataset('custom': 4 + 2 of 3, 3 classes)
    """
    x = {"train": _inputs(x_train, "x_train", y_train), "test": _inputs(x_test, "x_test", y_test)}
    y = {"train": _targets(y_train, "y_train"), "test": _targets(y_test, "y_test")}
    for split in x:
        if len(x[split]) != len(y[split]):
            raise DataError(
                f"x_{split} has {len(x[split]):,} examples but y_{split} has {len(y[split]):,}: "
                "give one target for each example."
            )
    for letter, pair in (("x", x), ("y", y)):
        _same_form(letter, pair["train"], pair["test"])
    floating = y["train"].is_floating_point()
    classes = None if floating else max(int(y["train"].max()), int(y["test"].max())) + 1
    return Dataset(x["train"], y["train"], x["test"], y["test"], name, classes)


def _inputs(values: Values, label: str, targets: Values) -> Tensor:
    tensor = _tensor(values, label)
    if not tensor.is_floating_point():
        if tensor.ndim == 2 and tuple(getattr(targets, "shape", ())[1:2]) == tuple(tensor.shape[1:]):
            return _whole(tensor, label, "indices")
        raise DataError(
            f"{label} is {_kind(tensor)}, but inputs are floating numbers: use {label}.float(); whole numbers are "
            "sequences of indices and need a target for each."
        )
    if tensor.ndim < 2:
        raise DataError(f"{label} has shape {tuple(tensor.shape)}, but inputs are examples × values.")
    _finite(tensor, label)
    return tensor


def _targets(values: Values, label: str) -> Tensor:
    tensor = _tensor(values, label)
    if tensor.is_floating_point():
        _finite(tensor, label)
        return tensor
    return _whole(tensor, label, "labels")


def _whole(tensor: Tensor, label: str, meaning: str) -> Tensor:
    """Whole numbers from 0 up."""
    if tensor.is_complex() or tensor.dtype is torch.bool:
        raise DataError(
            f"{label} is {_kind(tensor)}, but must be floating values or whole numbers: use {label}.long() for {meaning}."
        )
    tensor = tensor.long()
    if int(tensor.min()) < 0:
        first = int(torch.nonzero(tensor.flatten() < 0)[0])
        raise DataError(
            f"{label} holds {int(tensor.flatten()[first])} at position {first}, but {meaning} count from 0."
        )
    return tensor


def _tensor(values: Values, label: str) -> Tensor:
    """A strided, non-empty tensor, detached from any graph; a numpy array shares its memory where it can."""
    if isinstance(values, np.ndarray):
        try:
            # torch takes neither foreign byte orders nor negative strides, and warns of read-only memory.
            native = values.dtype.newbyteorder("=")
            values = torch.from_numpy(np.require(values, native, ["C", "W"]))
        except TypeError as error:
            raise DataError(f"{label} is a numpy array of {values.dtype}: give numbers.") from error
    if not isinstance(values, Tensor):
        raise DataError(f"{label} is a {type(values).__name__}: give a torch tensor or a numpy array.")
    if values.layout is not torch.strided:
        raise DataError(f"{label} is sparse ({values.layout}): give {label}.to_dense().")
    if values.numel() == 0 or values.ndim == 0:
        raise DataError(f"{label} has shape {tuple(values.shape)}: give at least one example.")
    return values.detach()


def _finite(tensor: Tensor, label: str) -> None:
    low, high = tensor.aminmax()  # NaN reaches both, and no mask as large as the data is made
    if torch.isfinite(low) and torch.isfinite(high):
        return
    for index, example in enumerate(tensor):
        bad = example[~torch.isfinite(example)]
        if bad.numel():
            raise DataError(
                f"{label}[{index}] holds {bad[0].item()}: it is the first example that is not finite; "
                "remove or repair such examples."
            )


def _same_form(letter: str, train: Tensor, test: Tensor) -> None:
    """Train and test must differ in nothing but the number of examples."""
    if train.shape[1:] != test.shape[1:]:
        raise DataError(
            f"{letter}_train has examples of shape {tuple(train.shape[1:])} but {letter}_test of "
            f"{tuple(test.shape[1:])}: give both splits the same shape."
        )
    if train.dtype != test.dtype:
        raise DataError(
            f"{letter}_train is {_kind(train)} but {letter}_test is {_kind(test)}: give both the same type."
        )


def _kind(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
