"""The canonical file: what is not exactly the known data is refused, and a write is whole or nothing."""

import errno
import os
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from apical.data import DATASETS, Images, fetch, load, verify
from apical.data.source import Record
from apical.errors import DataError
from disk import largest_file
from strategies import share_of_examples
from tests.data.conftest import Official, arrays_of, make_mnist, sums

Make = Callable[[str], Official]


def small_entry(name: str, arrays: dict[str, np.ndarray], known: bool = True) -> Images:
    return replace(DATASETS[name], train=7, test=3, sums=sums(arrays) if known else {})


@pytest.fixture
def arrays() -> dict[str, np.ndarray]:
    return arrays_of((28, 28), 7, 3, 10)


@pytest.fixture
def entry(arrays: dict[str, np.ndarray]) -> Images:
    return small_entry("mnist", arrays)


def save(root: Path, arrays: dict[str, np.ndarray], name: str = "mnist") -> Path:
    root.mkdir(exist_ok=True)
    np.savez(root / f"{name}.npz", **arrays)
    return root / f"{name}.npz"


def test_the_same_arrays_are_recognised_whatever_file_they_came_in(entry: Images, arrays: dict, root: Path) -> None:
    save(root, arrays)
    assert verify(entry, root).basis == "registry"
    np.savez_compressed(root / "mnist.npz", **{k: np.asfortranarray(v) for k, v in reversed(arrays.items())})
    assert verify(entry, root).basis == "registry"
    assert "matches the registry's SHA-256" in str(verify(entry, root))


@pytest.mark.parametrize("key", ["x_train", "y_train", "x_test", "y_test"])
def test_one_altered_value_is_refused_by_the_name_of_its_array(
    key: str, entry: Images, arrays: dict, root: Path
) -> None:
    altered = arrays[key].copy()
    altered.flat[-1] = (int(altered.flat[-1]) + 1) % 10
    save(root, arrays | {key: altered})
    with pytest.raises(DataError, match=rf"{key} of .*mnist.npz .*not the registry's; `apical data fetch mnist`"):
        load(entry, root=root)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"y_test": None}, "has no array y_test"),
        ({"x_test": np.zeros((3, 28, 27), np.uint8)}, "x_test of .* is uint8 3×28×27, but mnist has uint8 3×28×28"),
        ({"x_test": np.zeros((3, 28, 28), np.float32)}, "x_test of .* is float32"),
        ({"y_train": np.zeros(7, np.int64)}, "y_train of .* is int64 7"),
        ({"y_train": np.array([0, 1, 2, 10, 4, 5, 6], np.uint8)}, "y_train of .* holds 10 at position 3"),
        ({"x_train": np.array([{}] * 7, object)}, "x_train of .* is object 7"),
    ],
)
def test_other_arrays_are_refused(change: dict, sentence: str, entry: Images, arrays: dict, root: Path) -> None:
    save(root, {k: v for k, v in (arrays | change).items() if v is not None})
    with pytest.raises(DataError, match=sentence):
        load(entry, root=root)


def test_a_forged_size_is_refused_before_memory_is_given_to_it(entry: Images, arrays: dict, root: Path) -> None:
    path = save(root, arrays)
    path.write_bytes(path.read_bytes().replace(b"(7, 28, 28)", b"(9**9, 9,9)"))
    with pytest.raises(DataError, match=r"mnist\.npz"):
        load(entry, root=root)


@pytest.mark.parametrize("content", [b"", b"PK\x05\x06", b"\x80\x04K\x01.", b"\x93NUMPY\x01\x00"])
def test_a_file_that_is_no_npz_is_refused(content: bytes, entry: Images, root: Path) -> None:
    root.mkdir()
    (root / "mnist.npz").write_bytes(content)
    with pytest.raises(DataError, match="cannot be read as a canonical file"):
        load(entry, root=root)


def test_a_folder_in_the_place_of_the_file_is_refused(entry: Images, root: Path) -> None:
    (root / "mnist.npz").mkdir(parents=True)
    with pytest.raises(DataError, match="cannot be read as a canonical file"):
        load(entry, root=root)


@pytest.fixture(scope="module")
def good_file() -> Iterator[tuple[Images, bytes]]:
    with tempfile.TemporaryDirectory() as folder:
        official = make_mnist(Path(folder))
        yield official.entry, fetch(official.entry, folder, source=folder, progress=False).read_bytes()


@share_of_examples(2)
@given(where=st.floats(0, 1, exclude_max=True), flip=st.integers(0, 255))
def test_an_altered_byte_or_a_lost_end_is_refused_or_harmless(
    good_file: tuple[Images, bytes], where: float, flip: int
) -> None:
    """``flip`` 0 cuts the file. Some bytes of a zip, such as dates, mean nothing: then the data is right."""
    entry, good = good_file
    position = int(where * len(good))
    damaged = bytearray(good)
    damaged[position] ^= flip
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "mnist.npz").write_bytes(damaged if flip else good[:position])
        try:
            arrays, _ = entry.read(folder)
        except DataError:
            return
    assert flip
    assert sums(arrays) == dict(entry.sums)


def test_data_without_a_known_or_recorded_sum_is_refused(make: Make, root: Path) -> None:
    official = make("cifar100")
    save(root, official.arrays, "cifar100")
    with pytest.raises(DataError, match=r"no SHA-256 of cifar100 is known in advance and no fetch recorded one"):
        verify(official.entry, root)


@pytest.mark.parametrize("name", ["svhn", "cifar100", "tiny_imagenet"])
def test_fetched_data_is_held_to_the_sums_recorded_then(name: str, make: Make, root: Path) -> None:
    official = make(name)
    path = fetch(official.entry, root, source=official.folder, progress=False)
    report = verify(official.entry, root)
    assert report.basis == "recorded"
    assert "recorded when the official files were fetched" in str(report)
    content = dict(np.load(path))
    content["x_test"][0] ^= 1
    np.savez(path, **content)
    with pytest.raises(DataError, match=r"x_test of .* not the one recorded when it was fetched"):
        verify(official.entry, root)


def test_svhn_is_accepted_by_the_registry_or_by_its_record_and_not_otherwise(make: Make, root: Path) -> None:
    official = make("svhn")
    pack = arrays_of((32, 32, 3), 6, 3, 10)
    pack["x_train"] = pack["x_train"] ^ 1
    entry = replace(official.entry, sums=sums(pack))
    save(root, pack, "svhn")
    assert verify(entry, root).basis == "registry"
    save(root, official.arrays, "svhn")
    with pytest.raises(DataError, match=r"x_train of .* not the registry's"):
        verify(entry, root)
    fetch(entry, root, source=official.folder, progress=False)
    assert verify(entry, root).basis == "recorded"


def test_a_record_cannot_replace_sums_that_the_registry_knows(make: Make, root: Path) -> None:
    official = make("mnist")
    fetch(official.entry, root, source=official.folder, progress=False)
    other = replace(official.entry, sums=official.entry.sums | {"x_test": "0" * 64})
    with pytest.raises(DataError, match=r"x_test of .* not the registry's"):
        verify(other, root)


@pytest.mark.parametrize(
    ("record", "sentence"),
    [
        (np.array("{}"), "cannot be read"),
        (np.array("not json"), "cannot be read"),
        (np.array('{"md5": [], "sha256": []}'), "its record holds no sums"),
        (np.zeros(3), "its record is float64"),
        (np.array("x" * 100_000), "not one short string"),
        (np.array('{"md5": {}, "sha256": {}}'), "not made from the official files"),
        (np.array('{"md5": {}, "sha256": {}, "source": "a friend"}'), "not made from the official files"),
    ],
)
def test_a_record_of_anything_else_is_refused(record: np.ndarray, sentence: str, make: Make, root: Path) -> None:
    official = make("svhn")
    save(root, official.arrays | {"record": record}, "svhn")
    with pytest.raises(DataError, match=sentence):
        verify(official.entry, root)


def test_a_record_of_other_files_than_the_registrys_is_refused(make: Make, root: Path) -> None:
    official = make("svhn")
    path = fetch(official.entry, root, source=official.folder, progress=False)
    content = dict(np.load(path))
    content["record"] = np.array(str(content["record"]).replace(official.entry.files[0].md5, "0" * 32))
    np.savez(path, **content)
    with pytest.raises(DataError, match="not made from the official files"):
        verify(official.entry, root)


def test_a_record_by_anybody_else_than_fetch_is_refused(make: Make, root: Path) -> None:
    official = make("svhn")
    path = fetch(official.entry, root, source=official.folder, progress=False)
    content = dict(np.load(path))
    content["record"] = np.array(str(content["record"]).replace("verified-official", "a friend"))
    np.savez(path, **content)
    with pytest.raises(DataError, match="not made from the official files"):
        verify(official.entry, root)


RECORD = Record({}, {})


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))])
def test_an_interrupted_write_leaves_the_earlier_file_and_nothing_else(
    error: BaseException, arrays: dict, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = save(root, arrays)
    before = path.read_bytes()

    def fail(_: int) -> None:
        raise error

    monkeypatch.setattr(os, "fsync", fail)
    expected = DataError if isinstance(error, OSError) else KeyboardInterrupt
    with pytest.raises(expected, match=r"No space left on device|^$"):
        DATASETS["mnist"].write(path, arrays, RECORD)
    assert [p.name for p in root.iterdir()] == ["mnist.npz"]
    assert path.read_bytes() == before


@pytest.mark.parametrize("size", [100_000, 200_000, 300_300])
def test_a_disk_that_fills_up_leaves_the_earlier_file_and_nothing_else(size: int, arrays: dict, root: Path) -> None:
    path = save(root, arrays)
    before = path.read_bytes()
    large = arrays | {"x_train": np.zeros(300_000, np.uint8)}
    with largest_file(size), pytest.raises(DataError, match=r"could not be written .File too large."):
        DATASETS["mnist"].write(path, large, RECORD)
    assert [p.name for p in root.iterdir()] == ["mnist.npz"]
    assert path.read_bytes() == before


def test_a_folder_that_cannot_be_made_is_one_sentence(arrays: dict, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(DataError, match="could not be written"):
        DATASETS["mnist"].write(tmp_path / "file" / "mnist.npz", arrays, RECORD)
