"""fetch(): from official files, in a folder or on a (local) server, to a canonical file that verifies."""

import functools
import hashlib
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest

from apical.data import fetch, load, verify
from apical.errors import DataError, MissingExtraError
from tests.data.conftest import Official

Make = Callable[[str], Official]


def files_under(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def test_official_files_in_a_folder_become_a_data_set(official: Official, root: Path) -> None:
    path = fetch(official.entry, root, source=official.folder, progress=False)
    assert path == root / f"{official.entry.name}.npz"
    assert files_under(root) == [path]
    x_train, y_train, x_test, y_test = load(official.entry, root=root)
    assert y_train.tolist() == official.arrays["y_train"].tolist()
    assert y_test.tolist() == official.arrays["y_test"].tolist()
    entry = official.entry
    for seen, key in ((x_train, "x_train"), (x_test, "x_test")):
        expected = official.arrays[key].reshape(len(seen), *entry.shape[:2], -1) / 255
        expected = ((expected - entry.mean) / entry.std).transpose(0, 3, 1, 2)
        tolerance = 1e-5 + official.tolerance / 255 / min(entry.std)
        np.testing.assert_allclose(seen, expected, atol=tolerance)


def test_one_altered_byte_of_any_official_file_is_refused_and_nothing_is_written(
    official: Official, root: Path
) -> None:
    for path in official.paths:
        good = path.read_bytes()
        path.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
        with pytest.raises(DataError, match=rf"is not the official {path.name}: its md5 is"):
            fetch(official.entry, root, source=official.folder, progress=False)
        path.write_bytes(good)
    assert not root.exists()


def test_official_files_with_other_arrays_than_the_registry_are_refused(make: Make, root: Path) -> None:
    official = make("cifar10")
    entry = replace(official.entry, sums=official.entry.sums | {"y_test": "0" * 64})
    with pytest.raises(DataError, match=r"y_test of .* not the registry's"):
        fetch(entry, root, source=official.folder, progress=False)
    assert not root.exists()


def test_a_parser_that_gives_another_form_is_caught_before_anything_is_written(make: Make, root: Path) -> None:
    official = make("mnist")
    flat = official.arrays | {"x_test": official.arrays["x_test"].reshape(3, 784)}
    entry = replace(official.entry, parser=lambda *_: flat)
    with pytest.raises(DataError, match=r"x_test for .* is uint8 3×784, but mnist has uint8 3×28×28"):
        fetch(entry, root, source=official.folder, progress=False)
    assert not root.exists()


def test_the_number_of_classes_is_the_registrys_even_where_some_do_not_occur(make: Make, root: Path) -> None:
    official = make("mnist")
    zeros = official.arrays | {"y_train": np.zeros(7, np.uint8), "y_test": np.zeros(3, np.uint8)}
    entry = replace(official.entry, parser=lambda *_: zeros, sums={}, official_sums=False)
    fetch(entry, root, source=official.folder, progress=False)
    assert load(entry, root=root).classes == 10


def test_a_folder_without_the_files_is_told_which_are_missing(make: Make, root: Path, tmp_path: Path) -> None:
    official = make("mnist")
    official.paths[1].unlink()
    with pytest.raises(DataError, match=rf"{official.folder} has no train-labels-idx1-ubyte.gz: put"):
        fetch(official.entry, root, source=official.folder, progress=False)
    with pytest.raises(DataError, match=r"nowhere has no train-images"):
        fetch(official.entry, root, source=tmp_path / "nowhere", progress=False)


def test_a_good_file_is_left_alone_and_that_is_said(make: Make, root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    official = make("mnist")
    path = fetch(official.entry, root, source=official.folder)
    assert f"Wrote {path}" in capsys.readouterr().err
    before = path.stat()
    assert fetch(official.entry, root, source="no such folder") == path
    assert path.stat() == before
    assert "Nothing to fetch" in capsys.readouterr().err


def test_a_damaged_file_is_replaced_only_by_a_good_one(make: Make, root: Path) -> None:
    official = make("mnist")
    root.mkdir()
    path = root / "mnist.npz"
    path.write_bytes(b"damaged")
    with pytest.raises(DataError):
        fetch(official.entry, root, source="no such folder", progress=False)
    assert path.read_bytes() == b"damaged"
    fetch(official.entry, root, source=official.folder, progress=False)
    assert verify(official.entry, root).basis == "registry"


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


class CutShort(BaseHTTPRequestHandler):
    """Promises more than it sends."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "1000")
        self.end_headers()
        self.wfile.write(b"only this")

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., str]]:
    """Serve on localhost, on a free port, until the test ends."""
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    servers = []

    def start(handler: Callable[..., BaseHTTPRequestHandler]) -> str:
        server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        servers.append(server)
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        return f"http://127.0.0.1:{server.server_address[1]}/"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def test_a_download_over_http_becomes_a_data_set(official: Official, root: Path, serve: Callable) -> None:
    entry = official.published(serve(functools.partial(Quiet, directory=official.folder))).entry
    path = fetch(entry, root)
    assert verify(entry, root).path == path
    downloads = {p.name: p.read_bytes() for p in (root / "downloads" / entry.name).iterdir()}
    assert downloads == {p.name: p.read_bytes() for p in official.paths}


def test_downloads_that_are_there_are_not_downloaded_again(make: Make, root: Path, serve: Callable) -> None:
    official = make("mnist")
    served = official.published(serve(functools.partial(Quiet, directory=official.folder))).entry
    fetch(served, root, progress=False).unlink()
    for path in official.paths:
        path.unlink()
    assert fetch(served, root, progress=False).exists()


def test_a_download_with_another_md5_is_refused_and_not_kept(make: Make, root: Path, serve: Callable) -> None:
    official = make("cifar10")
    entry = official.published(serve(functools.partial(Quiet, directory=official.folder))).entry
    official.paths[0].write_bytes(b"something else")
    with pytest.raises(DataError, match=r"is not the official cifar-10-binary.tar.gz: its md5 is"):
        fetch(entry, root, progress=False)
    assert files_under(root) == []


def test_a_download_that_breaks_off_is_one_sentence_and_not_kept(make: Make, root: Path, serve: Callable) -> None:
    entry = make("cifar10").published(serve(CutShort)).entry
    with pytest.raises(DataError, match=r"could not be downloaded from http://127.*--from FOLDER") as caught:
        fetch(entry, root, progress=False)
    assert "\n" not in str(caught.value)
    assert files_under(root) == []


def test_a_file_that_the_server_does_not_have_is_one_sentence(make: Make, root: Path, serve: Callable) -> None:
    official = make("cifar10")
    entry = official.published(serve(functools.partial(Quiet, directory=root.parent / "empty"))).entry
    with pytest.raises(DataError, match=r"could not be downloaded from .*404"):
        fetch(entry, root, progress=False)


def test_a_server_that_does_not_answer_is_one_sentence(
    make: Make, root: Path, serve: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = serve(Quiet).rpartition(":")[0]
    entry = make("cifar10").published(f"{url}:9/").entry  # port 9, discard: nobody listens
    with pytest.raises(DataError, match=r"could not be downloaded from .*Connection refused"):
        fetch(entry, root, progress=False)


@pytest.mark.parametrize(("name", "module"), [("mnist", "pooch"), ("mnist", "tqdm")])
def test_a_download_without_the_extra_says_what_to_install(
    name: str, module: str, make: Make, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    official = make(name)
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(MissingExtraError, match=rf"needs {module}.*pip install 'apical\[data\]'"):
        fetch(official.entry, root)


@pytest.mark.parametrize(("name", "module"), [("svhn", "scipy.io"), ("tiny_imagenet", "PIL.Image")])
def test_parsing_without_the_extra_says_what_to_install(
    name: str, module: str, make: Make, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    official = make(name)
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(MissingExtraError, match=r"needs (scipy|PIL).*pip install 'apical\[data\]'"):
        fetch(official.entry, root, source=official.folder, progress=False)


def test_the_record_names_the_official_files(make: Make, root: Path) -> None:
    official = make("svhn")
    path = fetch(official.entry, root, source=official.folder, progress=False)
    with np.load(path, allow_pickle=False) as content:
        record = str(content["record"])
    for file in official.paths:
        assert file.name in record
        assert hashlib.md5(file.read_bytes()).hexdigest() in record
    assert "verified-official" in record
