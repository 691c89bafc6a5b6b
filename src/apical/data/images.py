"""Images: the canonical arrays, what a network sees of them, and safe parsers of the official formats.

A parser takes the entry and its official files and returns uint8 arrays. Sizes come from the entry, so that
what a file claims about itself decides nothing: exactly the expected bytes are read, members of archives
are asked for by their exact names and stay in memory, and nothing is ever unpickled. (CIFAR's "python
version" *is* a pickle, which can run any code while it is read. The "binary version" holds the same images
without that, so only it is supported.)
"""

import gzip
import io
import math
import re
import tarfile
import zipfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from apical.data.canonical import reason
from apical.data.dataset import Dataset, from_tensors
from apical.data.source import Array, Arrays, Source
from apical.errors import ApicalError, DataError
from apical.extras import extra

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, kw_only=True)
class Images(Source):
    """Labelled images of one size.

    ``shape`` is that of one canonical image: (H, W), or (H, W, 3). A network sees ``(x / levels − mean) /
    std`` per channel as float32 N×C×H×W, by the same float32 operations, and so the same bits, as
    torchvision's ``ToTensor`` and ``Normalize``.
    """

    shape: tuple[int, ...]
    train: int
    test: int
    classes: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    levels: int = 255
    parser: "Callable[[Images, Sequence[Path]], Arrays] | None" = None

    @property
    def arrays(self) -> dict[str, Array]:
        return {
            "x_train": Array((self.train, *self.shape)),
            "y_train": Array((self.train,)),
            "x_test": Array((self.test, *self.shape)),
            "y_test": Array((self.test,)),
        }

    @property
    def size(self) -> str:
        return f"{self.train:,} + {self.test:,} of {'×'.join(str(n) for n in self.shape)}"

    def parse(self, paths: Sequence[Path]) -> Arrays:
        if self.parser is None:
            raise DataError(f"{self.name} has no official files to read.")
        return self.parser(self, paths)

    def check_values(self, arrays: Arrays, where: str) -> None:
        for key in ("y_train", "y_test"):
            beyond = arrays[key] >= self.classes
            if beyond.any():
                first = int(np.argmax(beyond))
                raise DataError(
                    f"{key} of {where} holds {arrays[key][first]} at position {first}, but {self.name} has "
                    f"labels 0 to {self.classes - 1}; {self.remedy}."
                )

    def dataset(self, arrays: Arrays) -> Dataset:
        made = from_tensors(
            self.normalised(arrays["x_train"]),
            torch.from_numpy(arrays["y_train"]),
            self.normalised(arrays["x_test"]),
            torch.from_numpy(arrays["y_test"]),
            name=self.name,
        )
        return replace(made, classes=self.classes)  # the highest class may be absent from a small set

    def normalised(self, images: npt.NDArray[Any]) -> Tensor:
        """uint8 N×H×W or N×H×W×C to float32 N×C×H×W."""
        source = torch.from_numpy(images)
        source = source.unsqueeze(1) if source.ndim == 3 else source.permute(0, 3, 1, 2)
        result = source.to(torch.float32, memory_format=torch.contiguous_format)
        mean, std = (result.new_tensor(values).view(-1, 1, 1) for values in (self.mean, self.std))
        return result.div_(self.levels).sub_(mean).div_(std)  # in place: it may be gigabytes


@contextmanager
def _parsing(path: Path) -> Iterator[None]:
    """Whatever a file that is not in its format makes a parser raise becomes one sentence that names it."""
    try:
        yield
    except ApicalError:
        raise
    except Exception as error:  # gzip, tarfile, zipfile, scipy and PIL each raise types of their own
        raise DataError(
            f"{path} is not in its official format ({reason(error)}): download it again from its own page."
        ) from error


def _refuse(path: Path, what: str) -> DataError:
    return DataError(f"{path} {what}: download it again from its own page.")


def idx(entry: Images, paths: Sequence[Path]) -> Arrays:
    """MNIST's format, gzipped: two zero bytes, the type (8 is uint8), the number of dimensions, each one as a
    big-endian 32-bit number, then the values. The files are train images, train labels, test images, test
    labels.
    """
    return {
        key: _idx(path, array.shape) for (key, array), path in zip(entry.arrays.items(), paths, strict=True)
    }


def _idx(path: Path, shape: tuple[int, ...]) -> Bytes:
    header = bytes((0, 0, 8, len(shape))) + b"".join(n.to_bytes(4, "big") for n in shape)
    length = len(header) + math.prod(shape)
    with _parsing(path), gzip.open(path) as file:
        # One byte more shows whether the data ends where it should; gzip checks its CRC at the end.
        raw = file.read(length + 1)
    if not raw.startswith(header) or len(raw) != length:
        raise _refuse(path, f"is not an idx file of uint8 {'×'.join(str(n) for n in shape)}")
    return np.frombuffer(raw, np.uint8, offset=len(header)).reshape(shape)


def cifar10(entry: Images, paths: Sequence[Path]) -> Arrays:
    """CIFAR-10, binary version: five training batches, one test batch; a record is a label, then an image."""
    train = [f"cifar-10-batches-bin/data_batch_{i}.bin" for i in range(1, 6)]
    return _cifar(entry, paths[0], train, "cifar-10-batches-bin/test_batch.bin", labels=1)


def cifar100(entry: Images, paths: Sequence[Path]) -> Arrays:
    """CIFAR-100, binary version: a record is a coarse label (unused), the fine label, then the image."""
    return _cifar(entry, paths[0], ["cifar-100-binary/train.bin"], "cifar-100-binary/test.bin", labels=2)


def _cifar(entry: Images, path: Path, train: list[str], test: str, labels: int) -> Arrays:
    record = labels + math.prod(entry.shape)
    sizes = {name: entry.train // len(train) * record for name in train} | {test: entry.test * record}
    found = _members(path, sizes)
    arrays: Arrays = {}
    for split, names in (("train", train), ("test", [test])):
        records = np.frombuffer(b"".join(found[name] for name in names), np.uint8).reshape(-1, record)
        planes = records[:, labels:].reshape(-1, 3, *entry.shape[:2])  # one colour after the other
        arrays[f"x_{split}"] = np.ascontiguousarray(planes.transpose(0, 2, 3, 1))
        arrays[f"y_{split}"] = records[:, labels - 1].copy()
    return arrays


def _members(path: Path, sizes: dict[str, int]) -> dict[str, bytes]:
    """The named regular files of a gzipped tar, each of exactly its size. Others are passed over, unread."""
    limit = 2 * sum(sizes.values()) + (1 << 20)  # of unpacked bytes, with ample room for the other members
    found: dict[str, bytes] = {}
    with _parsing(path), tarfile.open(path, "r:gz") as archive:
        for member in archive:
            if member.offset_data + member.size > limit:
                raise _refuse(path, "unpacks to far more than it should")
            if member.name in sizes and member.isreg():
                if member.size != sizes[member.name]:
                    raise _refuse(path, f"has {member.size} bytes in {member.name}, not {sizes[member.name]}")
                file = archive.extractfile(member)
                found[member.name] = file.read() if file is not None else b""
    if missing := [name for name in sizes if name not in found]:
        raise _refuse(path, f"has no {missing[0]}")
    return found


def svhn(entry: Images, paths: Sequence[Path]) -> Arrays:
    """SVHN, cropped digits: MATLAB 5 files with X (32×32×3×N) and y (N×1); the digit 0 has the label 10."""
    arrays: Arrays = {}
    for split, path in zip(("train", "test"), paths, strict=True):
        with _parsing(path):
            content = extra("scipy.io", "reading SVHN").loadmat(path, variable_names=["X", "y"])
            x, y = np.asarray(content["X"]), np.asarray(content["y"]).reshape(-1)
        expected = entry.arrays[f"x_{split}"].shape
        if x.dtype != np.uint8 or (x.shape[-1:], x.shape[:-1]) != (expected[:1], expected[1:]):
            raise _refuse(path, f"has X of {x.dtype} {x.shape}, not uint8 {(*expected[1:], expected[0])}")
        if len(y) != expected[0] or y.min() < 1 or y.max() > 10:
            raise _refuse(path, f"does not have {expected[0]} labels from 1 to 10")
        arrays[f"x_{split}"] = np.ascontiguousarray(x.transpose(3, 0, 1, 2))
        arrays[f"y_{split}"] = (y % 10).astype(np.uint8)
    return arrays


def tiny_imagenet(entry: Images, paths: Sequence[Path]) -> Arrays:
    """Tiny-ImageNet's zip of JPEGs, classes in the order of ``wnids.txt``, images in that of their numbers.

    The official test labels are not public, so the official validation images are the test set.
    """
    [path] = paths
    base = "tiny-imagenet-200"
    with _parsing(path), zipfile.ZipFile(path) as archive:
        wnids = _text(archive, f"{base}/wnids.txt").split()
        if not len(wnids) == len(set(wnids)) == entry.classes or not all(
            re.fullmatch(r"n\d{8}", wnid) for wnid in wnids
        ):
            raise _refuse(path, f"does not name {entry.classes} classes in wnids.txt")
        each = entry.train // entry.classes
        train = [f"{base}/train/{wnid}/images/{wnid}_{i}.JPEG" for wnid in wnids for i in range(each)]
        test = [f"val_{i}.JPEG" for i in range(entry.test)]
        lines = [line.split("\t") for line in _text(archive, f"{base}/val/val_annotations.txt").splitlines()]
        label = {line[0]: wnids.index(line[1]) for line in lines}
        if unlabelled := [name for name in test if name not in label]:
            raise _refuse(path, f"has no label of {unlabelled[0]} in val_annotations.txt")
        return {
            "x_train": _jpegs(archive, train, entry.arrays["x_train"].shape),
            "y_train": np.repeat(np.arange(entry.classes, dtype=np.uint8), each),
            "x_test": _jpegs(archive, [f"{base}/val/images/{n}" for n in test], entry.arrays["x_test"].shape),
            "y_test": np.array([label[name] for name in test], np.uint8),
        }


MEMBER_LIMIT = 1 << 20  # bytes; the longest real member, val_annotations.txt, has about a third of that


def _text(archive: zipfile.ZipFile, name: str) -> str:
    return _bounded(archive, name).decode("ascii")


def _bounded(archive: zipfile.ZipFile, name: str) -> bytes:
    """One member in memory; ``zipfile`` never unpacks more than the size that is checked here."""
    if archive.getinfo(name).file_size > MEMBER_LIMIT:
        raise ValueError(f"{name} is longer than {MEMBER_LIMIT} bytes")
    return archive.read(name)


def _jpegs(archive: zipfile.ZipFile, names: Iterable[str], shape: tuple[int, ...]) -> Bytes:
    """Decode to RGB (some are grey). The size is read from each header before any pixel is decoded."""
    image = extra("PIL.Image", "reading Tiny-ImageNet")
    out = np.empty(shape, np.uint8)
    for row, name in zip(out, names, strict=True):
        with image.open(io.BytesIO(_bounded(archive, name)), formats=["JPEG"]) as picture:
            if picture.size != (shape[2], shape[1]):
                raise ValueError(f"{name} is {picture.size}, not {shape[2]}×{shape[1]}")
            row[...] = np.asarray(picture.convert("RGB"))
    return out
