"""Texts as windows of characters: written back from the windows they are the text again, and bad ones are refused."""

import hashlib
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from apical import data
from apical.data import DATASETS, Dataset, Remote
from apical.data.sequences import UNKNOWN, OwnText
from apical.errors import ApicalError, DataError

ALPHABET = "ab \nçé€😀"


def written(text: str, folder: Path) -> str:
    (folder / "own.txt").write_bytes(text.encode())
    return f"text:{folder / 'own.txt'}"


def of(text: str, **options: object) -> Dataset:
    """A text's data set without a file."""
    entry = OwnText(name="text:own", title="", path=Path("own"))
    return entry.dataset({"text": np.frombuffer(text.encode(), np.uint8)}, **options)


def shuffled(length: int, seed: int = 0) -> str:
    """Every character of ALPHABET early on, then any."""
    return ALPHABET + "".join(random.Random(seed).choices(ALPHABET, k=length - len(ALPHABET)))


def text_of(numbers: torch.Tensor, made: Dataset) -> str:
    assert made.vocabulary is not None
    return "".join(made.vocabulary[i] for i in numbers.tolist())


@given(st.integers(30, 90), st.integers(1, 5), st.integers(1, 7), st.integers(0, 9))
def test_windows_are_the_text_and_the_targets_are_what_comes_next(
    length: int, window: int, stride: int, seed: int
) -> None:
    """Slices of a Python string are the independent formulation."""
    text = shuffled(length, seed)
    made = of(text, window=window, stride=stride)
    border = length * 4 // 5
    for part, x, y in ((text[:border], made.x_train, made.y_train), (text[border:], made.x_test, made.y_test)):
        starts = range(0, len(part) - window, stride)
        assert [text_of(row, made) for row in x] == [part[s : s + window] for s in starts]
        assert [text_of(row, made) for row in y] == [part[s + 1 : s + window + 1] for s in starts]


def test_by_default_a_window_has_32_characters_and_every_character_is_predicted_once() -> None:
    made = of(shuffled(33 * 10))
    assert made.options == {"window": 32, "stride": 32, "unknown": False}
    assert made.x_train.shape == made.y_train.shape == ((33 * 8 - 1) // 32, 32)
    assert made.x_train.dtype == made.y_train.dtype == torch.int64
    assert torch.equal(made.y_train.flatten()[:-1], made.x_train.flatten()[1:])


def test_the_vocabulary_is_the_training_parts_characters_in_order() -> None:
    made = of("cab" * 20, window=3)
    assert (made.vocabulary, made.classes, made.name) == ("abc", 3, "text:own")
    assert made.x_train[0].tolist() == [2, 0, 1]
    assert made.loss == "cross_entropy"


def test_inputs_and_targets_do_not_share_memory() -> None:
    made = of("cab" * 20, window=3)
    made.x_train.zero_()
    assert made.y_train.max() == 2


@pytest.mark.parametrize(("window", "stride", "overlap"), [(4, 4, 1), (4, 5, 0), (4, 1, 4), (4, 2, 2)])
def test_the_overlap_counts_the_windows_that_share_characters(window: int, stride: int, overlap: int) -> None:
    made = of(shuffled(60), window=window, stride=stride)
    assert made.overlap == overlap
    taken = [set(range(i * stride, i * stride + window + 1)) for i in range(12)]
    assert taken[0] & taken[overlap] or overlap == 0
    assert not taken[0] & taken[overlap + 1]


def test_a_mark_of_the_byte_order_is_no_character() -> None:
    assert of("\ufeff" + "cab" * 20, window=3).vocabulary == "abc"


# A character that the training part does not have.

FOREIGN = "ab" * 20 + "abéaba☃ab"


def test_an_unseen_character_is_named_with_its_place_and_the_option() -> None:
    with pytest.raises(DataError, match=r"holds 'é' at position 42, in the test part.*unknown=true"):
        of(FOREIGN, window=3, unknown=False)


def test_by_default_unseen_characters_become_the_unknown_one_and_that_is_said() -> None:
    with pytest.warns(UserWarning, match="has 2 characters, 'é' first, that the training part lacks"):
        made = of(FOREIGN, window=8)
    assert made.options["unknown"] is True
    assert torch.equal(made.x_test, of(FOREIGN, window=8, unknown=True).x_test)
    assert of("ab" * 30, window=3).vocabulary == "ab"


def test_with_the_option_unseen_characters_share_one_symbol() -> None:
    made = of(FOREIGN, window=8, unknown=True)
    assert (made.vocabulary, made.classes) == (f"ab{UNKNOWN}", 3)
    assert text_of(made.x_test[0], made) == FOREIGN.replace("é", UNKNOWN).replace("☃", UNKNOWN)[39:47]
    assert made.x_train.max() == 1


def test_the_symbol_is_there_even_if_nothing_needs_it_and_only_once() -> None:
    assert of("ab" * 30, window=3, unknown=True).vocabulary == f"ab{UNKNOWN}"
    made = of(f"a{UNKNOWN}😀" * 20, window=3, unknown=True)
    assert made.vocabulary == f"a{UNKNOWN}😀"
    assert made.x_train[0].tolist() == [0, 1, 2]


def test_a_text_of_the_registry_may_need_the_symbol_by_default() -> None:
    arrays = {"text": np.frombuffer(FOREIGN.encode(), np.uint8)}
    assert DATASETS["sherlock_holmes"].dataset(arrays, window=3).options["unknown"] is True
    with pytest.raises(DataError, match="unknown=true"):
        DATASETS["sherlock_holmes"].dataset(arrays, window=3, unknown=False)
    with pytest.raises(DataError, match="unknown=true"):
        DATASETS["tinyshakespeare"].dataset(arrays, window=3, unknown=False)


# Bad input.


@pytest.mark.parametrize(
    ("text", "options", "words"),
    [
        ("", {}, "text:own is empty"),
        ("\ufeff", {}, "text:own is empty"),
        ("aaaaaaaaaaaaaaaaaaaa", {"window": 2}, "one character, 'a', again and again"),
        ("ab" * 20, {}, r"40 characters, 32 of them in the training part, but .* take 33: choose a shorter window"),
        ("ab" * 60, {}, r"24 of them in the test part"),
        ("ab" * 20, {"window": 0}, "window is 0, but must be a whole number"),
        ("ab" * 20, {"window": 2.5}, "window is 2.5"),
        ("ab" * 20, {"window": True}, "window is True"),
        ("ab" * 20, {"window": 2, "stride": -1}, "stride is -1"),
        ("ab" * 20, {"window": 2, "stride": 0}, "stride is 0"),
        ("ab" * 20, {"window": 2, "unknown": "yes"}, "unknown is 'yes', but must be true or false"),
        ("a\0b" * 20, {"window": 2}, r"not text in UTF-8 \(a zero byte at position 1\)"),
    ],
)
def test_a_bad_text_or_option_is_one_sentence(text: str, options: dict, words: str) -> None:
    with pytest.raises(DataError, match=words) as caught:
        of(text, **options)
    assert "\n" not in str(caught.value)


def test_the_shortest_text_that_works_has_one_window_to_test() -> None:
    made = of("ab" * 10, window=3)
    assert len(made.x_test) == 1
    with pytest.raises(DataError, match="4 of them in the test part"):
        of("ab" * 10, window=4)


def test_a_binary_file_is_refused_with_the_byte(tmp_path: Path) -> None:
    (tmp_path / "photo").write_bytes(b"\x89PNG\r\n" * 50)
    with pytest.raises(DataError, match=r"photo is not text in UTF-8 \(byte 0x89 at position 0\).*convert"):
        data.load(f"text:{tmp_path / 'photo'}")


@pytest.mark.parametrize(("name", "why"), [("nothing", "No such file"), ("folder", "Is a directory")])
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, name: str, why: str) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(DataError, match=rf"{name} cannot be read \({why}"):
        data.load(f"text:{tmp_path / name}")


def test_an_unknown_option_is_met_with_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="have no option 'windows'; their options: window, stride, unknown"):
        data.load(written("ab" * 20, tmp_path), windows=3)


# Files and names.


def test_a_file_of_ones_own_is_loaded_under_its_name(tmp_path: Path) -> None:
    name = written("cab" * 20, tmp_path)
    made = data.load(name, window=3)
    assert made.name == name
    assert torch.equal(made.x_test, of("cab" * 20, window=3).x_test)
    assert "a file of yours" in str(data.verify(name))


def test_a_text_needs_a_path() -> None:
    with pytest.raises(DataError, match=r"no data set called 'text:'.*text:PATH"):
        data.load("text:")


@pytest.fixture
def play(monkeypatch: pytest.MonkeyPatch) -> bytes:
    """tinyshakespeare, but much shorter."""
    text = ("First Citizen:\n" * 9).encode()
    entry = replace(
        DATASETS["tinyshakespeare"],
        length=len(text),
        sums={"text": hashlib.sha256(text).hexdigest()},
        files=(Remote("http://127.0.0.1:9/input.txt", hashlib.md5(text).hexdigest()),),
    )
    monkeypatch.setitem(DATASETS, "tinyshakespeare", entry)
    return text


def test_fetch_keeps_a_text_as_it_is_and_load_checks_it(tmp_path: Path, root: Path, play: bytes) -> None:
    (tmp_path / "input.txt").write_bytes(play)
    assert DATASETS["tinyshakespeare"].state(root) == "absent"
    path = data.fetch("tinyshakespeare", root, source=tmp_path, progress=False)
    assert path == root / "text" / "tinyshakespeare.txt"
    assert path.read_bytes() == play
    assert DATASETS["tinyshakespeare"].state(root) == "present"
    assert data.verify("tinyshakespeare", root).basis == "registry"
    assert data.load("tinyshakespeare", root=root, window=5).vocabulary == "\n :CFeinrstz"
    path.write_bytes(play.replace(b"z", b"s", 1))
    with pytest.raises(DataError, match=r"text of .*tinyshakespeare.txt is damaged or other data.*data fetch"):
        data.load("tinyshakespeare", root=root)
    path.write_bytes(play[:-1])
    assert DATASETS["tinyshakespeare"].state(root) == "damaged"
    with pytest.raises(DataError, match=r"uint8 134, but tinyshakespeare has uint8 135"):
        data.load("tinyshakespeare", root=root)


def test_another_text_than_the_official_one_is_not_taken(tmp_path: Path, root: Path, play: bytes) -> None:
    (tmp_path / "input.txt").write_bytes(play[1:] + b"F")
    with pytest.raises(DataError, match=r"is not the official input.txt"):
        data.fetch("tinyshakespeare", root, source=tmp_path, progress=False)
    assert not root.exists()


def test_a_text_without_an_address_is_met_with_the_file_and_its_sum(root: Path) -> None:
    words = r"sherlock_holmes is not in .*text .*put the text whose SHA-256 is ed06844c\w+ there as sherlock_holmes.txt"
    for act in (data.load, data.verify, data.fetch):
        with pytest.raises(DataError, match=words):
            act("sherlock_holmes", root=root)


def test_a_full_disk_leaves_nothing(tmp_path: Path, root: Path, play: bytes) -> None:
    (tmp_path / "input.txt").write_bytes(play)
    root.mkdir()
    (root / "text").write_text("a file where the folder should be")
    with pytest.raises(ApicalError, match="could not be written"):
        data.fetch("tinyshakespeare", root, source=tmp_path, progress=False)
