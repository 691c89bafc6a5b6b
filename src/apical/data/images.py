"""Image data sets: their canonical arrays, their normalisation, and parsers of the official formats.

A parser takes the entry and its official files and returns uint8 arrays. Files are not trusted: sizes come from
the entry and not from the file, exactly the expected bytes are read, members of archives are looked up by their
exact names and never written to disk, and nothing is unpickled. (CIFAR's "python version" is a pickle, which can
run any code when it is loaded. Only the "binary version", which has the same images, is supported.)
"""

import importlib.util
import io
import math
import re
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from apical.data import bounded
from apical.data.dataset import Dataset, from_tensors
from apical.data.source import Array, Arrays, PathLike, Report, Source, explain_errors
from apical.errors import DataError
from apical.extras import import_extra

Bytes = npt.NDArray[np.uint8]

MAT_COMPRESSED = 15  # MATLAB's number for an element that zlib has compressed
MEMBERS_LIMIT = 100  # of a tar; the official ones have about ten


@dataclass(frozen=True, kw_only=True)
class Images(Source):
    """Labelled images of one size.

    ``shape`` is the shape of one canonical image: (H, W) or (H, W, 3). A network sees ``(x / levels − mean) / std``
    per channel as float32 N×C×H×W. The float32 operations are those of torchvision's ``ToTensor`` and ``Normalize``,
    so the result is the same bit for bit.
    """

    shape: tuple[int, ...]
    train: int
    test: int
    classes: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    levels: int = 255

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
        return f"{self.train:,} + {self.test:,} of {'×'.join(map(str, self.shape))}"

    def check_values(self, arrays: Arrays, where: str) -> None:
        for key in ("y_train", "y_test"):
            too_large = arrays[key] >= self.classes
            if too_large.any():
                first = int(np.argmax(too_large))
                raise DataError(
                    f"{key} of {where} holds {arrays[key][first]} at position {first}, but {self.name} has "
                    f"labels 0 to {self.classes - 1}; {self.remedy}."
                )

    def dataset(self, arrays: Arrays) -> Dataset:
        dataset = from_tensors(
            self.normalise(arrays["x_train"]),
            torch.from_numpy(arrays["y_train"]),
            self.normalise(arrays["x_test"]),
            torch.from_numpy(arrays["y_test"]),
            name=self.name,
        )
        return replace(dataset, classes=self.classes)  # a small set may have no example of the last class

    def normalise(self, images: npt.NDArray[Any]) -> Tensor:
        """Convert uint8 N×H×W or N×H×W×C to normalised float32 N×C×H×W."""
        source = torch.from_numpy(images)
        source = source.unsqueeze(1) if source.ndim == 3 else source.permute(0, 3, 1, 2)
        result = source.to(torch.float32, memory_format=torch.contiguous_format)
        mean, std = (result.new_tensor(values).view(-1, 1, 1) for values in (self.mean, self.std))
        return result.div_(self.levels).sub_(mean).div_(std)  # in place, because it may be gigabytes


@dataclass(frozen=True, kw_only=True)
class Digits(Images):
    """1,797 handwritten digits of 8×8 pixels. They come with scikit-learn, so nothing is downloaded.

    They are permuted with CPU seed 0: the first ``train`` examples are for training, the others for testing. Values
    are 0 to 16; with mean and std ½ a network sees −1 to 1. The registry has the SHA-256 of the split arrays, so
    another version of the data or another permutation raises an error.
    """

    @property
    def remedy(self) -> str:
        return "reinstalling scikit-learn brings the right ones back"

    def place(self, root: PathLike | None = None) -> Path:
        """Return the folder of the package that contains the data; ``root`` is not used."""
        return Path(import_extra("sklearn.datasets", "the digits data set").__file__).parent

    def state(self, root: PathLike | None = None) -> str:
        return "absent" if importlib.util.find_spec("sklearn") is None else "present"

    def read(self, root: PathLike | None = None) -> tuple[Arrays, Report]:
        bunch = import_extra("sklearn.datasets", "the digits data set").load_digits()
        generator = torch.Generator("cpu").manual_seed(0)
        order = torch.randperm(self.train + self.test, generator=generator, device="cpu").numpy()
        x, y = bunch.images[order].astype("uint8"), bunch.target[order].astype("uint8")
        n = self.train
        arrays = {"x_train": x[:n], "y_train": y[:n], "x_test": x[n:], "y_test": y[n:]}
        return arrays, self.certify(arrays, None, self.place(root))


_explain_errors = partial(
    explain_errors, problem="is not in its official format", advice=": download it again from its own page"
)


def _bad_file_error(path: Path, what: str) -> DataError:
    return DataError(f"{path} {what}: download it again from its own page.")


def parse_idx(entry: Images, paths: Sequence[Path]) -> Arrays:
    """Parse MNIST's format, gzipped.

    A file has two zero bytes, the type (8 is uint8), the number of dimensions, the size of each dimension as a
    big-endian 32-bit number, then the values. The files are train images, train labels, test images, test labels.
    """
    return {key: _read_idx(path, array.shape) for (key, array), path in zip(entry.arrays.items(), paths, strict=True)}


def _read_idx(path: Path, shape: tuple[int, ...]) -> Bytes:
    """Read one gzipped idx file of uint8 values with the expected shape."""
    header = bytes((0, 0, 8, len(shape))) + b"".join(n.to_bytes(4, "big") for n in shape)
    length = len(header) + math.prod(shape)
    with _explain_errors(path):
        raw = bounded.unpack_gzip(path, length)  # reading to the end also makes gzip check its CRC
    if not raw.startswith(header) or len(raw) != length:
        raise _bad_file_error(path, f"is not an idx file of {Array(shape)}")
    return np.frombuffer(raw, np.uint8, offset=len(header)).reshape(shape)


def parse_cifar10(entry: Images, paths: Sequence[Path]) -> Arrays:
    """Parse CIFAR-10's binary version: five training batches and one test batch of records (label, image)."""
    train = [f"cifar-10-batches-bin/data_batch_{i}.bin" for i in range(1, 6)]
    return _parse_cifar(entry, paths[0], train, "cifar-10-batches-bin/test_batch.bin", labels=1)


def parse_cifar100(entry: Images, paths: Sequence[Path]) -> Arrays:
    """Parse CIFAR-100's binary version: records of a coarse label (unused), the fine label and the image."""
    return _parse_cifar(entry, paths[0], ["cifar-100-binary/train.bin"], "cifar-100-binary/test.bin", labels=2)


def _parse_cifar(entry: Images, path: Path, train: list[str], test: str, labels: int) -> Arrays:
    """Parse records of ``labels`` label bytes, of which the last one counts, followed by an image."""
    record = labels + math.prod(entry.shape)
    sizes = {name: entry.train // len(train) * record for name in train} | {test: entry.test * record}
    found = _read_tar_members(path, sizes)
    arrays: Arrays = {}
    for split, names in (("train", train), ("test", [test])):
        records = np.frombuffer(b"".join(found[name] for name in names), np.uint8).reshape(-1, record)
        planes = records[:, labels:].reshape(-1, 3, *entry.shape[:2])  # all red values, then green, then blue
        arrays[f"x_{split}"] = np.ascontiguousarray(planes.transpose(0, 2, 3, 1))
        arrays[f"y_{split}"] = records[:, labels - 1].copy()
    return arrays


def _read_tar_members(path: Path, sizes: dict[str, int]) -> dict[str, bytes]:
    """Read the named regular files of a gzipped tar, each of exactly the given size. Other members are skipped."""
    limit = 2 * sum(sizes.values()) + (1 << 20)  # unpacked bytes, with ample room for other members
    found: dict[str, bytes] = {}
    with _explain_errors(path):
        # Unpack first: tarfile reads names and other extra headers of any length, and a member may claim any size.
        raw = bounded.unpack_gzip(path, limit)
    if len(raw) > limit:
        raise _bad_file_error(path, "unpacks to far more than it should")
    with _explain_errors(path), tarfile.open(fileobj=io.BytesIO(raw), mode="r:") as archive:
        for number, member in enumerate(archive):
            if number == MEMBERS_LIMIT:
                raise _bad_file_error(path, "has far more members than it should")
            if member.name in sizes and member.isreg():
                if member.size != sizes[member.name]:
                    raise _bad_file_error(path, f"has {member.size} bytes in {member.name}, not {sizes[member.name]}")
                file = archive.extractfile(member)
                found[member.name] = file.read() if file is not None else b""
    if missing := [name for name in sizes if name not in found]:
        raise _bad_file_error(path, f"has no {missing[0]}")
    return found


def parse_svhn(entry: Images, paths: Sequence[Path]) -> Arrays:
    """Parse SVHN's cropped digits: MATLAB 5 files with X (32×32×3×N) and y (N×1); the digit 0 has the label 10."""
    arrays: Arrays = {}
    for split, path in zip(("train", "test"), paths, strict=True):
        with _explain_errors(path):
            _check_mat_size(path, 2 * entry.arrays[f"x_{split}"].nbytes + (1 << 20))
            content = import_extra("scipy.io", "reading SVHN").loadmat(path, variable_names=["X", "y"])
            x, y = np.asarray(content["X"]), np.asarray(content["y"]).reshape(-1)
        expected = entry.arrays[f"x_{split}"].shape
        if x.dtype != np.uint8 or (x.shape[-1:], x.shape[:-1]) != (expected[:1], expected[1:]):
            raise _bad_file_error(path, f"has X of {x.dtype} {x.shape}, not uint8 {(*expected[1:], expected[0])}")
        if len(y) != expected[0] or y.min() < 1 or y.max() > 10:
            raise _bad_file_error(path, f"does not have {expected[0]} labels from 1 to 10")
        arrays[f"x_{split}"] = np.ascontiguousarray(x.transpose(3, 0, 1, 2))
        arrays[f"y_{split}"] = (y % 10).astype(np.uint8)
    return arrays


def _check_mat_size(path: Path, limit: int) -> None:
    """Check that no element of a MATLAB 5 file unpacks to more than ``limit`` bytes; ``loadmat`` has no limit."""
    bounded.check_file(path, limit)
    with path.open("rb") as file:
        file.seek(128)  # the header
        while len(tag := file.read(8)) == 8:
            kind, size = struct.unpack("<II", tag)
            element = file.read(min(size, limit))
            if len(element) < size:
                raise _bad_file_error(path, f"has an element of {size} bytes, which it cannot hold")
            if kind == MAT_COMPRESSED and len(zlib.decompressobj().decompress(element, limit + 1)) > limit:
                raise _bad_file_error(path, "unpacks to far more than it should")


def parse_tiny_imagenet(entry: Images, paths: Sequence[Path]) -> Arrays:
    """Parse Tiny-ImageNet's zip of JPEGs: classes in the order of ``wnids.txt``, images in the order of their numbers.

    The official test labels are not public, so the official validation images are the test set.
    """
    [path] = paths
    base = "tiny-imagenet-200"
    with _explain_errors(path), bounded.open_zip(path, ZIP_LIMIT) as archive:
        wnids = _read_zip_member(archive, f"{base}/wnids.txt").decode("ascii").split()
        if not len(wnids) == len(set(wnids)) == entry.classes or not all(
            re.fullmatch(r"n\d{8}", wnid) for wnid in wnids
        ):
            raise _bad_file_error(path, f"does not name {entry.classes} classes in wnids.txt")
        per_class = entry.train // entry.classes
        train = [f"{base}/train/{wnid}/images/{wnid}_{i}.JPEG" for wnid in wnids for i in range(per_class)]
        test = [f"val_{i}.JPEG" for i in range(entry.test)]
        annotations = _read_zip_member(archive, f"{base}/val/val_annotations.txt").decode("ascii")
        lines = [line.split("\t") for line in annotations.splitlines()]
        label_of = {line[0]: wnids.index(line[1]) for line in lines}
        if unlabelled := [name for name in test if name not in label_of]:
            raise _bad_file_error(path, f"has no label of {unlabelled[0]} in val_annotations.txt")
        return {
            "x_train": _decode_jpegs(archive, train, entry.arrays["x_train"].shape),
            "y_train": np.repeat(np.arange(entry.classes, dtype=np.uint8), per_class),
            "x_test": _decode_jpegs(archive, [f"{base}/val/images/{n}" for n in test], entry.arrays["x_test"].shape),
            "y_test": np.array([label_of[name] for name in test], np.uint8),
        }


MEMBER_LIMIT = 1 << 20  # bytes; the largest official member, val_annotations.txt, has about a third of that
ZIP_LIMIT = 1 << 30  # bytes; Tiny-ImageNet has about a quarter of that


def _read_zip_member(archive: zipfile.ZipFile, name: str) -> bytes:
    """Read one member, if it is not too large."""
    with bounded.open_member(archive, name) as member:
        content = member.read(MEMBER_LIMIT + 1)
    if len(content) > MEMBER_LIMIT:
        raise ValueError(f"{name} is longer than {MEMBER_LIMIT} bytes")
    return content


def _decode_jpegs(archive: zipfile.ZipFile, names: Iterable[str], shape: tuple[int, ...]) -> Bytes:
    """Decode images to RGB (some are grey). The size in each header is checked before pixels are decoded."""
    image = import_extra("PIL.Image", "reading Tiny-ImageNet")
    out = np.empty(shape, np.uint8)
    for row, name in zip(out, names, strict=True):
        with image.open(io.BytesIO(_read_zip_member(archive, name)), formats=["JPEG"]) as picture:
            if picture.size != (shape[2], shape[1]):
                raise ValueError(f"{name} is {picture.size}, not {shape[2]}×{shape[1]}")
            row[...] = np.asarray(picture.convert("RGB"))
    return out
