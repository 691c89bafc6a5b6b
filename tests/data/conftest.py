"""Small files of every official format, written here from arrays that the tests know.

Each maker encodes canonical arrays the way the official publisher does, and gives the registry's own entry
with smaller counts and the md5 of what it wrote. Nothing here uses apical's parsers.
"""

import gzip
import hashlib
import io
import tarfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import scipy.io
from PIL import Image

from apical.data import DATASETS, Images, Remote

Arrays = dict[str, np.ndarray]


@dataclass
class Official:
    """A small data set as its publisher would give it: the entry, the folder of files, the arrays inside."""

    entry: Images
    folder: Path
    arrays: Arrays
    tolerance: int = 0  # JPEG is lossy

    @property
    def paths(self) -> list[Path]:
        return [self.folder / file.name for file in self.entry.files]

    def published(self, url: str = "http://127.0.0.1:9/") -> "Official":
        """The same with the md5 that the files have now, at a URL that answers only if a test serves it."""
        files = tuple(Remote(url + p.name, hashlib.md5(p.read_bytes()).hexdigest()) for p in self.paths)
        return replace(self, entry=replace(self.entry, files=files))


def sums(arrays: Arrays) -> dict[str, str]:
    return {key: hashlib.sha256(array.tobytes()).hexdigest() for key, array in arrays.items()}


def arrays_of(shape: tuple[int, ...], train: int, test: int, classes: int) -> Arrays:
    rng = np.random.default_rng(0)
    labels = rng.integers(0, classes, train + test, np.uint8)
    labels[:2] = 0, classes - 1  # both ends are always there
    images = rng.integers(0, 256, (train + test, *shape), np.uint8)
    return {"x_train": images[:train], "y_train": labels[:train], "x_test": images[train:], "y_test": labels[train:]}


def small(name: str, folder: Path, arrays: Arrays, **changes: object) -> Official:
    known = sums(arrays) if DATASETS[name].official_sums else {}
    entry = replace(DATASETS[name], train=len(arrays["y_train"]), test=len(arrays["y_test"]), sums=known, **changes)
    assert isinstance(entry, Images)
    return Official(entry, folder, arrays).published()


def idx_bytes(array: np.ndarray) -> bytes:
    dims = b"".join(n.to_bytes(4, "big") for n in array.shape)
    return gzip.compress(bytes([0, 0, 8, array.ndim]) + dims + array.tobytes())


def make_mnist(folder: Path) -> Official:
    arrays = arrays_of((28, 28), 7, 3, 10)
    for key, file in zip(arrays, DATASETS["mnist"].files, strict=True):
        (folder / file.name).write_bytes(idx_bytes(arrays[key]))
    return small("mnist", folder, arrays)


def tar_bytes(members: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


def cifar_records(images: np.ndarray, *labels: np.ndarray) -> bytes:
    planes = images.transpose(0, 3, 1, 2).reshape(len(images), -1)
    return np.concatenate([*(label[:, None] for label in labels), planes], axis=1).tobytes()


def cifar10_members(arrays: Arrays) -> dict[str, bytes]:
    members = {"cifar-10-batches-bin/batches.meta.txt": b"airplane\n"}
    batches = zip(np.split(arrays["x_train"], 5), np.split(arrays["y_train"], 5), strict=True)
    for i, (x, y) in enumerate(batches, 1):
        members[f"cifar-10-batches-bin/data_batch_{i}.bin"] = cifar_records(x, y)
    members["cifar-10-batches-bin/test_batch.bin"] = cifar_records(arrays["x_test"], arrays["y_test"])
    return members


def make_cifar10(folder: Path) -> Official:
    arrays = arrays_of((32, 32, 3), 10, 3, 10)
    (folder / "cifar-10-binary.tar.gz").write_bytes(tar_bytes(cifar10_members(arrays)))
    return small("cifar10", folder, arrays)


def make_cifar100(folder: Path) -> Official:
    arrays = arrays_of((32, 32, 3), 6, 3, 100)
    members = {
        f"cifar-100-binary/{split}.bin": cifar_records(
            arrays[f"x_{split}"],
            arrays[f"y_{split}"] // 5,
            arrays[f"y_{split}"],  # coarse, then fine
        )
        for split in ("train", "test")
    }
    (folder / "cifar-100-binary.tar.gz").write_bytes(tar_bytes(members))
    return small("cifar100", folder, arrays)


def make_svhn(folder: Path) -> Official:
    arrays = arrays_of((32, 32, 3), 6, 3, 10)
    for split in ("train", "test"):
        y = arrays[f"y_{split}"][:, None]
        mat = {"X": arrays[f"x_{split}"].transpose(1, 2, 3, 0), "y": np.where(y == 0, 10, y).astype(np.uint8)}
        scipy.io.savemat(folder / f"{split}_32x32.mat", mat, do_compression=True)
    return small("svhn", folder, arrays)


def jpeg(image: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(image).save(buffer, "JPEG", quality=100)
    return buffer.getvalue()


def make_tiny_imagenet(folder: Path) -> Official:
    """Flat images, which JPEG keeps to within two levels, each of its own shade; the first one is grey."""
    wnids = ["n00000009", "n00000001", "n00000005"]  # not sorted: their order is that of the file
    shades = np.arange(16, dtype=np.uint8) * 15
    images = np.broadcast_to(shades[:, None, None, None], (16, 64, 64, 3))
    arrays = {
        "x_train": images[:12],
        "y_train": np.repeat(np.arange(3, dtype=np.uint8), 4),
        "x_test": images[12:],
        "y_test": np.array([2, 0, 1, 2], np.uint8),
    }
    notes = [f"val_{i}.JPEG\t{wnids[y]}\t0\t0\t9\t9\n" for i, y in enumerate(arrays["y_test"])]
    members = {"wnids.txt": "\n".join(wnids).encode(), "val/val_annotations.txt": "".join(notes[::-1]).encode()}
    for i, image in enumerate(arrays["x_train"]):
        wnid = wnids[i // 4]
        members[f"train/{wnid}/images/{wnid}_{i % 4}.JPEG"] = jpeg(image[..., 0] if i == 0 else image)
    for i, image in enumerate(arrays["x_test"]):
        members[f"val/images/val_{i}.JPEG"] = jpeg(image)
    with zipfile.ZipFile(folder / "tiny-imagenet-200.zip", "w") as archive:
        for name, content in members.items():
            archive.writestr(f"tiny-imagenet-200/{name}", content)
    return replace(small("tiny_imagenet", folder, arrays, classes=3), tolerance=2)


MAKERS: dict[str, Callable[[Path], Official]] = {
    "mnist": make_mnist,
    "cifar10": make_cifar10,
    "cifar100": make_cifar100,
    "svhn": make_svhn,
    "tiny_imagenet": make_tiny_imagenet,
}


@pytest.fixture(params=MAKERS)
def official(request: pytest.FixtureRequest, tmp_path: Path) -> Official:
    """Every official format in turn."""
    folder = tmp_path / "official"
    folder.mkdir()
    return MAKERS[request.param](folder)


@pytest.fixture
def make(tmp_path: Path) -> Callable[[str], Official]:
    """Make one official format by name."""

    def maker(name: str) -> Official:
        folder = tmp_path / f"official_{name}"
        folder.mkdir()
        return MAKERS[name](folder)

    return maker


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Where canonical files go; it does not exist yet."""
    return tmp_path / "root"
