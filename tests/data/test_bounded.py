"""Short files that claim, or unpack to, far more than they may: each is one sentence, and memory stays small."""

import gzip
import hashlib
import io
import os
import struct
import tarfile
import tracemalloc
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import scipy.io

from apical import data
from apical.errors import DataError
from tests.data.conftest import Official, cifar10_members

Make = Callable[[str], Official]
MB = 1 << 20
LARGE = 30 * MB  # what the files here claim or unpack to


@contextmanager
def refused(words: str, memory: int = 10 * MB) -> Iterator[None]:
    """One sentence with these words, and never more than so many bytes of memory."""
    tracemalloc.start()
    try:
        with pytest.raises(DataError, match=words) as caught:
            yield
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < memory
    assert "\n" not in str(caught.value)


def long_header() -> bytes:
    """An .npy file whose header is as long as the format allows it to be, and valid."""
    text = b"{'descr': '|u1', 'fortran_order': False, 'shape': (7,), }".ljust(LARGE - 1) + b"\n"
    return b"\x93NUMPY\x02\x00" + struct.pack("<I", len(text)) + text


def write_zip(path: Path, members: dict[str, bytes], method: int = zipfile.ZIP_DEFLATED) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w", method) as archive:
        for name, content in members.items():
            archive.writestr(name, content)


def test_a_long_header_of_an_array_is_not_read(root: Path) -> None:
    write_zip(root / "mnist.npz", {f"{key}.npy": long_header() for key in ("x_train", "y_train", "x_test", "y_test")})
    with refused("cannot be read as a canonical file"):
        data.load("mnist", root=root)
    with refused("cannot be read as a canonical file"):
        data.verify("mnist", root)


def test_the_list_of_data_sets_does_not_read_a_long_header(root: Path) -> None:
    write_zip(root / "mnist.npz", {"x_train.npy": long_header()})
    tracemalloc.start()
    states = {row.name: row.state for row in data.listing(root)}
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert states["mnist"] == "damaged"
    assert peak < 10 * MB


def test_a_long_header_of_the_record_or_of_the_word_vectors_is_not_read(make: Make, root: Path) -> None:
    official = make("svhn")
    path = data.fetch(official.entry, root, source=official.folder, progress=False)
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    write_zip(path, members | {"record.npy": long_header()})
    with refused("cannot be read as a canonical file"):
        data.verify(official.entry, root)
    texts = {"mr_neg.txt": b"bad\n", "mr_pos.txt": b"good\n"}
    (root / "text").mkdir()
    for name, text in texts.items():
        (root / "text" / name).write_bytes(text)
    sums = {name: hashlib.sha256(text).hexdigest() for name, text in texts.items()}
    entry = replace(data.DATASETS["mr"], bytes_of={name: len(text) for name, text in texts.items()}, sums=sums)
    write_zip(root / "text" / "glove_100d_mr_subj.npz", {"words.npy": long_header(), "vectors.npy": long_header()})
    with refused("glove_100d_mr_subj.npz cannot be read"):
        data.load(entry, root=root)


@pytest.mark.parametrize("method", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_a_compression_that_unpacks_without_a_limit_is_refused(method: int, root: Path) -> None:
    write_zip(root / "mnist.npz", {"x_train.npy": bytes(LARGE)}, method)
    with refused("compressed with a method that unpacks without a limit"):
        data.load("mnist", root=root)


def test_a_pipe_in_the_place_of_a_file_is_not_waited_for(root: Path) -> None:
    root.mkdir()
    os.mkfifo(root / "mnist.npz")
    with refused("is not a file but a pipe or a device"):
        data.load("mnist", root=root)
    assert data.lookup("mnist").state(root) == "damaged"


@pytest.mark.parametrize("name", ["mnist", "tinyshakespeare", "mr"])
def test_a_file_that_is_far_too_long_is_not_read(name: str, root: Path) -> None:
    places = {"mnist": "mnist.npz", "tinyshakespeare": "text/tinyshakespeare.txt", "mr": "text/mr_neg.txt"}
    path = root / places[name]
    path.parent.mkdir(parents=True)
    with path.open("wb") as file:
        file.truncate(1 << 40)  # a hole: it takes no room on the disk
    with refused(r"1,099,511,627,776 bytes, more than the"):
        data.load(name, root=root)


def test_a_zip_member_that_unpacks_to_more_than_it_claims_is_refused(make: Make) -> None:
    official = make("tiny_imagenet")
    write_zip(official.paths[0], {"tiny-imagenet-200/wnids.txt": bytes(LARGE)})
    raw = bytearray(official.paths[0].read_bytes())
    struct.pack_into("<I", raw, raw.index(b"PK\x01\x02") + 24, 100)  # the size in the list of members
    official.paths[0].write_bytes(raw)
    with refused("tiny-imagenet-200.zip is not in its official format"):
        official.entry.parse(official.paths)


def tar(members: list[tarfile.TarInfo], contents: list[bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz", compresslevel=1) as archive:
        for member, content in zip(members, contents, strict=True):
            archive.addfile(member, io.BytesIO(content))
    return buffer.getvalue()


def test_a_tar_with_a_name_of_many_megabytes_is_refused(make: Make) -> None:
    official = make("cifar10")
    name = tarfile.TarInfo("././@LongLink")
    name.type, name.size = tarfile.GNUTYPE_LONGNAME, LARGE
    official.paths[0].write_bytes(tar([name, tarfile.TarInfo("a")], [b"a" * LARGE, b""]))
    with refused("unpacks to far more than it should"):
        official.entry.parse(official.paths)


def test_a_tar_member_that_claims_more_than_there_is_is_refused(make: Make) -> None:
    official = make("cifar10")
    raw = bytearray(gzip.decompress(tar([tarfile.TarInfo("././@LongLink")], [b""])))
    raw[124:136] = b"77777777777\0"
    raw[156:157] = tarfile.GNUTYPE_LONGNAME
    raw[148:156] = b" " * 8
    raw[148:156] = f"{sum(raw[:512]):06o}\0 ".encode()
    official.paths[0].write_bytes(gzip.compress(raw))
    with refused("cifar-10-binary.tar.gz"):
        official.entry.parse(official.paths)


def test_a_tar_of_thousands_of_members_is_refused(make: Make) -> None:
    official = make("cifar10")
    good = cifar10_members(official.arrays)
    empty = [tarfile.TarInfo(f"empty/{i}") for i in range(1000)]
    official.paths[0].write_bytes(tar(empty, [b""] * len(empty)))
    assert sum(map(len, good.values())) > 1000
    with refused("has far more members than it should"):
        official.entry.parse(official.paths)


def test_a_mat_file_that_unpacks_to_many_megabytes_is_refused(make: Make) -> None:
    official = make("svhn")
    scipy.io.savemat(official.paths[0], {"X": np.zeros(LARGE, np.uint8), "y": 1}, do_compression=True)
    with refused("unpacks to far more than it should"):
        official.entry.parse(official.paths)
    official.paths[0].write_bytes(official.paths[1].read_bytes()[:128] + struct.pack("<II", 14, 0xFFFFFFF0))
    with refused("has an element of 4294967280 bytes, which it cannot hold"):
        official.entry.parse(official.paths)
    element = zlib.compress(struct.pack("<II", 14, LARGE) + bytes(LARGE))
    official.paths[0].write_bytes(official.paths[1].read_bytes()[:128] + struct.pack("<II", 15, len(element)) + element)
    with refused("unpacks to far more than it should"):
        official.entry.parse(official.paths)


@pytest.mark.parametrize("text", [b"1," * (LARGE // 2), b"1,2,3\n" * (LARGE // 60), b"\n" * (LARGE // 10)])
def test_a_gzipped_table_is_not_unpacked_beyond_its_size(text: bytes, root: Path, tmp_path: Path) -> None:
    entry = replace(data.DATASETS["electricity"], length=20, series=3)
    (tmp_path / "electricity.txt.gz").write_bytes(gzip.compress(text, 1))
    with refused(r"is not in its official format \((line 1 has more than 160 characters|it has more than 22 lines)\)"):
        data.fetch(entry, root, source=tmp_path, progress=False)


@pytest.mark.parametrize("claim", ["a larger table", "compressed parts"])
def test_an_hdf5_table_is_not_unpacked_beyond_its_size(claim: str, root: Path, tmp_path: Path) -> None:
    h5py = pytest.importorskip("h5py")
    length = LARGE // 24 if claim == "a larger table" else 20
    with h5py.File(tmp_path / "metr-la.h5", "w") as file:
        for axis, count in (("axis0", 3), ("axis1", length)):  # nothing is written: the values are zeros
            file.create_dataset(f"df/{axis}", (count,), "i8")
        chunks = True if claim == "compressed parts" else None
        file.create_dataset("df/block0_values", (length, 3), "f8", chunks=chunks)
    entry = replace(data.DATASETS["metr_la"], length=20, series=3)
    with refused("holds more, or other parts, than float32 20×3"):
        data.fetch(entry, root, source=tmp_path, progress=False)


@pytest.mark.parametrize("kind", ["text", "series"])
def test_a_device_or_a_file_of_a_terabyte_is_not_read(kind: str, tmp_path: Path) -> None:
    with refused("/dev/zero cannot be read .it is not a file but a pipe or a device"):
        data.load(f"{kind}:/dev/zero")
    with (tmp_path / "hole").open("wb") as file:
        file.truncate(1 << 40)
    with refused("more than the 1,073,741,824 that it may have"):
        data.load(f"{kind}:{tmp_path / 'hole'}")


def test_a_short_text_of_ones_own_takes_little_memory(tmp_path: Path) -> None:
    (tmp_path / "own.txt").write_text("abab" * 20)
    tracemalloc.start()
    data.verify(f"text:{tmp_path / 'own.txt'}")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < MB


def test_a_table_of_ones_own_takes_little_more_memory_than_its_file(tmp_path: Path) -> None:
    """Two bytes per value are eight in memory; a list of rows would have 120."""
    (tmp_path / "narrow.csv").write_text("1\n" * 60_000)
    tracemalloc.start()
    data.verify(f"series:{tmp_path / 'narrow.csv'}")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2 * MB
    (tmp_path / "wide.csv").write_text("1," * MB)
    with refused("line 1 has more than 1,048,576 characters"):
        data.verify(f"series:{tmp_path / 'wide.csv'}")


def test_an_endless_line_of_word_vectors_is_refused() -> None:
    with refused("/dev/zero cannot be read .line 1 has more than 65,536 characters"):
        data.sentences.read_glove(Path("/dev/zero"), ["good"])
