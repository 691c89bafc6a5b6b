"""Official formats: what is in the files is what comes out, and nothing else gets in."""

import gzip
import io
import tarfile
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import scipy.io
import torch
from hypothesis import given
from hypothesis import strategies as st

from apical.data import DATASETS, Images
from apical.errors import DataError
from tests.data.conftest import MAKERS, Official, cifar10_members, idx_bytes, jpeg, tar_bytes

Make = Callable[[str], Official]


def test_parsing_gives_the_published_arrays_in_order(official: Official) -> None:
    parsed = official.entry.parse(official.paths)
    assert set(parsed) == set(official.arrays)
    for key, expected in official.arrays.items():
        assert parsed[key].dtype == np.uint8
        assert parsed[key].shape == expected.shape
        error = np.abs(parsed[key].astype(int) - expected.astype(int)).max()
        assert error <= (official.tolerance if key.startswith("x") else 0), key


def test_files_that_are_cut_short_are_refused(official: Official) -> None:
    for path in official.paths:
        whole = path.read_bytes()
        for keep in (0, 1, len(whole) // 2, len(whole) - 30):
            path.write_bytes(whole[:keep])
            with pytest.raises(DataError, match=path.name):
                official.entry.parse(official.paths)
        path.write_bytes(whole)


@pytest.mark.parametrize("name", MAKERS)
@given(where=st.floats(0, 1, exclude_max=True), flip=st.integers(1, 255))
def test_an_altered_byte_never_surprises_a_parser(name: str, where: float, flip: int) -> None:
    """The md5 stands before the parser; behind it, damage still ends in a DataError or in right shapes."""
    with tempfile.TemporaryDirectory() as folder:
        official = MAKERS[name](Path(folder))
        content = bytearray(official.paths[0].read_bytes())
        content[int(where * len(content))] ^= flip
        official.paths[0].write_bytes(content)
        try:
            parsed = official.entry.parse(official.paths)
        except DataError:
            return
        assert {k: v.shape for k, v in parsed.items()} == {k: v.shape for k, v in official.arrays.items()}


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(idx_bytes(np.zeros((8, 28, 28), np.uint8)), id="another count"),
        pytest.param(idx_bytes(np.zeros((7, 784), np.uint8)), id="another number of dimensions"),
        pytest.param(gzip.compress(gzip.decompress(idx_bytes(np.zeros((7, 28, 28), np.uint8))) + b"x"), id="longer"),
        pytest.param(gzip.compress(b"\x00\x00\x0d\x03" + bytes(12 + 7 * 784)), id="floats"),
        pytest.param(b"not gzip", id="not gzip"),
        pytest.param(gzip.compress(bytes(50_000_000)), id="a bomb"),
    ],
)
def test_an_idx_file_of_anything_else_is_refused(make: Make, content: bytes) -> None:
    official = make("mnist")
    official.paths[0].write_bytes(content)
    with pytest.raises(DataError, match=r"train-images-idx3-ubyte.gz"):
        official.entry.parse(official.paths)


def test_odd_members_of_a_tar_are_passed_over_and_nothing_is_extracted(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    official = make("cifar10")
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    good = cifar10_members(official.arrays)
    odd = {"../outside.bin": b"x", "/absolute.bin": b"x", "cifar-10-batches-bin/../../data_batch_1.bin": b"x"}
    official.paths[0].write_bytes(tar_bytes(odd | good))
    parsed = official.entry.parse(official.paths)
    assert np.array_equal(parsed["x_train"], official.arrays["x_train"])
    assert sorted(tmp_path.rglob("*")) == before


def test_a_link_in_a_tar_is_not_followed(make: Make) -> None:
    official = make("cifar10")
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        link = tarfile.TarInfo("cifar-10-batches-bin/data_batch_1.bin")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        archive.addfile(link)
    official.paths[0].write_bytes(buffer.getvalue())
    with pytest.raises(DataError, match=r"has no cifar-10-batches-bin/data_batch_1.bin"):
        official.entry.parse(official.paths)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"cifar-10-batches-bin/test_batch.bin": b"short"}, "has 5 bytes in cifar-10-batches-bin/test_batch.bin"),
        ({"cifar-10-batches-bin/batches.meta.txt": bytes(5_000_000)}, "far more than it should"),
    ],
)
def test_a_tar_with_members_of_another_size_is_refused(make: Make, change: dict, sentence: str) -> None:
    official = make("cifar10")
    official.paths[0].write_bytes(tar_bytes(cifar10_members(official.arrays) | change))
    with pytest.raises(DataError, match=sentence):
        official.entry.parse(official.paths)


@pytest.mark.parametrize(
    ("mat", "sentence"),
    [
        ({"X": np.zeros((32, 32, 3, 5), np.uint8), "y": np.ones((5, 1), np.uint8)}, "has X of uint8"),
        ({"X": np.zeros((32, 32, 3, 6)), "y": np.ones((6, 1), np.uint8)}, "has X of float64"),
        ({"X": np.zeros((32, 32, 3, 6), np.uint8), "y": np.zeros((6, 1), np.uint8)}, "labels from 1 to 10"),
        ({"X": np.zeros((32, 32, 3, 6), np.uint8), "y": np.ones((5, 1), np.uint8)}, "6 labels"),
        ({"X": np.zeros((32, 32, 3, 6), np.uint8)}, "'y'"),
    ],
)
def test_a_mat_file_of_anything_else_is_refused(make: Make, mat: dict, sentence: str) -> None:
    official = make("svhn")
    scipy.io.savemat(official.paths[0], mat)
    with pytest.raises(DataError, match=sentence):
        official.entry.parse(official.paths)


def rewrite_zip(path: Path, change: dict[str, bytes | None]) -> None:
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()} | change
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            if content is not None:
                archive.writestr(name, content)


TINY = "tiny-imagenet-200/"
FIRST = TINY + "train/n00000009/images/n00000009_0.JPEG"


def test_odd_members_of_a_zip_are_never_read(make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    official = make("tiny_imagenet")
    monkeypatch.chdir(tmp_path)
    odd = {"../outside.JPEG": b"x", TINY + "train/n00000009/images/n00000009_4.JPEG": b"not an image"}
    rewrite_zip(official.paths[0], odd)
    before = sorted(tmp_path.rglob("*"))
    assert np.array_equal(official.entry.parse(official.paths)["y_test"], official.arrays["y_test"])
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({FIRST: None}, "n00000009_0.JPEG"),
        ({FIRST: b"not an image"}, "cannot identify"),
        ({FIRST: jpeg(np.zeros((65, 64), np.uint8))}, "n00000009_0.JPEG is"),
        ({FIRST: jpeg(np.zeros((8000, 8000), np.uint8))}, "not 64×64|longer than"),
        ({FIRST: bytes(2_000_000)}, "longer than"),
        ({TINY + "wnids.txt": b"n00000009 n00000001"}, "does not name 3 classes"),
        ({TINY + "wnids.txt": b"n00000009 n00000001 ../../etc"}, "does not name 3 classes"),
        ({TINY + "wnids.txt": b"n00000009 n00000001 n00000001"}, "does not name 3 classes"),
        ({TINY + "val/val_annotations.txt": b"val_0.JPEG\tn00000009\n"}, "no label of val_1.JPEG"),
        ({TINY + "val/val_annotations.txt": b"val_0.JPEG\tn99999999\n"}, "n99999999"),
    ],
)
def test_a_zip_of_anything_else_is_refused(make: Make, change: dict, sentence: str) -> None:
    official = make("tiny_imagenet")
    rewrite_zip(official.paths[0], change)
    with pytest.raises(DataError, match=sentence):
        official.entry.parse(official.paths)


@pytest.mark.parametrize("name", [n for n, e in DATASETS.items() if isinstance(e, Images) and n != "digits"])
def test_a_network_sees_the_normalised_value_of_every_pixel(name: str) -> None:
    entry = replace(DATASETS[name], train=4, test=3)
    images = np.random.default_rng(1).integers(0, 256, entry.arrays["x_train"].shape, np.uint8)
    seen = entry.normalise(images)
    assert seen.dtype == torch.float32
    assert seen.is_contiguous()
    height, width = images.shape[1:3]
    assert seen.shape == (4, len(entry.mean), height, width)
    for c, (mean, std) in enumerate(zip(entry.mean, entry.std, strict=True)):
        channel = images if images.ndim == 3 else images[..., c]
        np.testing.assert_allclose(seen[:, c], (channel / 255 - mean) / std, rtol=1e-5, atol=1e-6)
