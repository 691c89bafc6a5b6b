"""Sentences: small texts and vectors written here, and what must come of them, worked out by hand."""

import hashlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from apical import data, models
from apical.data import Sentences, sentences
from apical.data.sentences import assign_folds, read_glove
from apical.errors import ApicalError, DataError

WORDS = ["good", "bad", "film", "é", "the"]
TABLE = np.arange(15, dtype=np.float16).reshape(5, 3) ** 2 / 8
STANDARD = (TABLE.astype(np.float64) - TABLE.astype(np.float64).mean()) / TABLE.astype(np.float64).std()
"""Every word's vector as a network sees it, where all five occur."""

Make = Callable[..., Sentences]


def bytes_of(lines: list[str]) -> bytes:
    return "".join(f"{line}\n" for line in lines).encode()


def pack(path: Path, words: list[str] = WORDS, vectors: np.ndarray = TABLE) -> dict[str, str]:
    arrays = {"words": np.frombuffer("\n".join(words).encode(), np.uint8), "vectors": vectors}
    np.savez(path, **arrays)
    return {key: hashlib.sha256(array.tobytes()).hexdigest() for key, array in arrays.items()}


@pytest.fixture
def make(root: Path, monkeypatch: pytest.MonkeyPatch) -> Make:
    """Write the two texts and the pack, and give the entry that knows them."""

    def maker(bad: list[str] | None = None, good: list[str] | None = None, packed: bool = True) -> Sentences:
        folder = root / "text"
        folder.mkdir(parents=True)
        texts = {
            "mr_neg.txt": bytes_of(bad or [f"the film{' bad' * (i + 1)}" for i in range(20)]),
            "mr_pos.txt": bytes_of(good or [f"é good film number{i}" for i in range(30)]),
        }
        for name, text in texts.items():
            (folder / name).write_bytes(text)
        if packed:
            monkeypatch.setattr(sentences, "VECTORS_SUMS", pack(folder / sentences.VECTORS_FILE))
        entry = data.DATASETS["mr"]
        assert isinstance(entry, Sentences)
        return replace(
            entry,
            bytes_of={name: len(text) for name, text in texts.items()},
            sums={name: hashlib.sha256(text).hexdigest() for name, text in texts.items()},
        )

    return maker


def sentence(*words: str, length: int) -> Tensor:
    """vector × words, zeros at the end."""
    rows = [STANDARD[WORDS.index(word)] for word in words]
    rows += [np.zeros(3)] * (length - len(rows))
    return torch.from_numpy(np.stack(rows).T)


def test_words_become_vectors_in_order_unknown_ones_are_left_out_and_zeros_fill_up(make: Make, root: Path) -> None:
    x_train, y_train, x_test, y_test = data.load(make(), root=root, length=4)
    x, y = torch.cat([x_train, x_test]), torch.cat([y_train, y_test])
    assert x.dtype == torch.float32
    assert y.bincount().tolist() == [20, 30]
    assert torch.allclose(x[y == 1].double(), sentence("é", "good", "film", length=4), atol=1e-5)
    shortest = sentence("the", "film", "bad", length=4)
    longest = sentence("the", "film", "bad", "bad", length=4)
    same = [torch.allclose(one.double(), shortest, atol=1e-5) for one in x[y == 0]]
    assert sum(same) == 1
    for one, short in zip(x[y == 0], same, strict=True):
        assert short or torch.allclose(one.double(), longest, atol=1e-5)


def test_the_papers_scale_cuts_at_three_spreads_and_ends_in_0_to_1(make: Make, root: Path) -> None:
    words = [f"w{i}" for i in range(40)]
    vectors = np.zeros((40, 2), np.float32)
    vectors[7] = 100.0, 1.0
    (root / "vectors.txt").parent.mkdir(parents=True, exist_ok=True)
    (root / "vectors.txt").write_text("".join(f"{w} {v[0]} {v[1]}\n" for w, v in zip(words, vectors, strict=True)))
    entry = make(bad=words, good=["w7"] * 10)
    loaded = data.load(entry, root=root, scale="paper", length=2, vectors=root / "vectors.txt")
    x, y = torch.cat([loaded.x_train, loaded.x_test]), torch.cat([loaded.y_train, loaded.y_test])
    standard = (vectors.astype(np.float64) - vectors.mean()) / vectors.std()
    assert standard[7, 0] > 3
    expected = torch.tensor([1.0, (standard[7, 1] + 3) / 6], dtype=torch.float64)
    assert torch.allclose(x[y == 1][:, :, 0].double(), expected.expand(10, 2), atol=1e-6)
    assert torch.equal(x[:, :, 1], torch.zeros(50, 2)), "what is not there stays zero"
    assert float(x.min()) >= 0


def test_folds_part_the_sentences_each_with_the_same_share_of_every_class() -> None:
    y = torch.tensor([0] * 37 + [1] * 53)
    folds = assign_folds(y)
    for label in (0, 1):
        counts = folds[y == label].bincount(minlength=10)
        assert int(counts.max() - counts.min()) <= 1
    assert torch.equal(folds, assign_folds(y)), "the same in every run"
    assert folds[:10].tolist() != list(range(10)), "shuffled, not dealt out as they stand"
    torch.manual_seed(5)
    assert torch.equal(folds, assign_folds(y)), "whatever the global generator says"


def test_every_sentence_is_tested_in_one_fold_and_trained_on_in_all_others(make: Make, root: Path) -> None:
    entry = make(good=[" ".join(["good"] * (i + 1)) for i in range(30)])
    tested = []
    for fold in range(10):
        loaded = data.load(entry, root=root, fold=fold, length=40)
        trained, held = ((part != 0).any(1).sum(1) for part in (loaded.x_train, loaded.x_test))
        assert sorted([*trained.tolist(), *held.tolist()]) == sorted([*range(1, 31), *range(3, 23)])
        assert loaded.y_test.bincount().tolist() == [2, 3]
        tested += [(int(y), int(n)) for y, n in zip(loaded.y_test, held, strict=True)]
    assert sorted(tested) == sorted([(0, n) for n in range(3, 23)] + [(1, n) for n in range(1, 31)])


def test_the_listed_size_is_that_of_the_loaded_data(make: Make, root: Path) -> None:
    entry = replace(make(bad=["bad"] * 23, good=["good"] * 31), sentences=(23, 31))
    loaded = data.load(entry, root=root)
    assert entry.size == f"{len(loaded.x_train)} + {len(loaded.x_test)} sentences" == "47 + 7 sentences"
    sizes = {row.name: row.size for row in data.listing(root)}
    assert (sizes["mr"], sizes["subj"]) == ("9,594 + 1,068 sentences", "9,000 + 1,000 sentences")


def test_without_a_fold_it_is_the_first(make: Make, root: Path) -> None:
    entry = make()
    plain, first, other = (data.load(entry, root=root, **o) for o in ({}, {"fold": 0}, {"fold": 1}))
    assert all(torch.equal(a, b) for a, b in zip(plain, first, strict=True))
    assert not torch.equal(first.x_test, other.x_test)
    assert plain.options == {"fold": None, "length": 50, "scale": "standard", "vectors": None}


def test_gloves_own_format_gives_the_same_vectors(make: Make, root: Path) -> None:
    entry, path = make(), root / "glove.6B.3d.txt"
    lines = [f"{w} {' '.join(map(str, v))}" for w, v in zip(WORDS, TABLE.astype(np.float32), strict=True)]
    path.write_bytes(bytes_of(["unused 1 2 3", *lines]))
    packed, read = (data.load(entry, root=root, **o) for o in ({}, {"vectors": path}))
    assert all(torch.equal(a, b) for a, b in zip(packed, read, strict=True))
    assert read.options["vectors"] == str(path)
    (root / "text" / sentences.VECTORS_FILE).unlink()
    assert torch.equal(data.load(entry, root=root, vectors=str(path)).x_test, packed.x_test)


def test_the_model_is_as_wide_as_the_vectors(make: Make, root: Path) -> None:
    loaded = data.load(make(), root=root, length=6)
    for name in ("textcnn", "textcnn-mean"):
        model = models.build(name, loaded)
        assert model(loaded.x_test).shape == (5, 2)
        assert [branch[0].in_channels for branch in model[0]] == [3, 3, 3]


def test_a_textcnn_sees_the_strongest_or_the_mean_of_each_feature() -> None:
    x = torch.randn(2, 100, 9)
    for name, over_time in (("textcnn", lambda a: a.amax(2)), ("textcnn-mean", lambda a: a.mean(2))):
        model = models.build(name, "mr").eval()
        padded = [torch.nn.functional.pad(x, (n - 1, n - 1)) for n in (3, 4, 5)]
        features = [
            over_time(torch.conv1d(p, branch[0].weight).relu()) for p, branch in zip(padded, model[0], strict=True)
        ]
        expected = torch.cat(features, 1) @ model[3].weight.T
        assert torch.allclose(model(x), expected, atol=1e-5)
        assert [tuple(w.shape) for w in model.parameters()] == [(100, 100, n) for n in (3, 4, 5)] + [(2, 300)]


@pytest.mark.parametrize("name", ["digits", "exchange_rate"])
def test_a_textcnn_of_other_data_is_refused(name: str) -> None:
    with pytest.raises(ApicalError, match="only for mr, subj"):
        models.build("textcnn", name)
    with pytest.raises(ApicalError, match="reads sentences"):
        models.build("textcnn", data.from_tensors(*[torch.zeros(2, 3), torch.tensor([0, 1])] * 2))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"fold": 10}, "fold is 10, but must be a whole number from 0 to 9"),
        ({"fold": -1}, "fold is -1"),
        ({"fold": True}, "fold is True"),
        ({"fold": "3"}, "fold is '3'"),
        ({"length": 0}, "length is 0, but must be a whole number of at least 1"),
        ({"length": 2.5}, r"length is 2\.5"),
        ({"length": 10**14}, r"mr with length=100000000000000 does not fit into memory: choose options that take less"),
        ({"scale": "log"}, "scale is 'log', but must be one of standard, paper"),
        ({"folds": 3}, "no option 'folds'; their options: fold, length, scale, vectors"),
        ({"vectors": "absent.txt"}, "absent.txt cannot be read"),
    ],
)
def test_options_that_make_no_sense_are_refused(options: dict, words: str, make: Make, root: Path) -> None:
    with pytest.raises(DataError, match=words):
        data.load(make(), root=root, **options)


@pytest.mark.parametrize("line", ["quite unheard of", "", "   "])
def test_a_sentence_with_no_known_word_is_named_by_its_line(line: str, make: Make, root: Path) -> None:
    entry = make(good=["good film", "good", line, "the film"])
    with pytest.raises(DataError, match=r"line 3 of mr_pos\.txt has no word that has a vector"):
        data.load(entry, root=root)


def test_missing_and_damaged_files_are_told_apart(make: Make, root: Path) -> None:
    entry, folder = make(), root / "text"
    assert entry.state(root) == "present"
    assert str(data.verify(entry, root)).startswith("mr: every array matches the registry's SHA-256")
    text = (folder / "mr_neg.txt").read_bytes()
    (folder / "mr_neg.txt").write_bytes(text.replace(b"bad", b"mad"))
    with pytest.raises(DataError, match=r"mr_neg\.txt of .* is damaged or other data"):
        data.load(entry, root=root)
    (folder / "mr_neg.txt").write_bytes(text[:-1])
    assert entry.state(root) == "damaged"
    with pytest.raises(DataError, match=r"mr_neg\.txt for .* is uint8"):
        data.load(entry, root=root)
    (folder / "mr_neg.txt").unlink()
    assert entry.state(root) == "absent"
    with pytest.raises(DataError, match=r"mr is not in .*put the files mr_neg\.txt and mr_pos\.txt there"):
        data.fetch(entry, root=root)


def test_other_word_vectors_and_none_are_refused(make: Make, root: Path) -> None:
    entry, path = make(), root / "text" / sentences.VECTORS_FILE
    pack(path, vectors=TABLE + 1)
    with pytest.raises(DataError, match=r"is damaged or has other vectors"):
        data.verify(entry, root)
    path.write_bytes(path.read_bytes()[:50])
    with pytest.raises(DataError, match=r"cannot be read"):
        data.load(entry, root=root)
    path.unlink()
    with pytest.raises(DataError, match=r"mr has no word vectors: put .* or pass vectors="):
        data.load(entry, root=root)


def test_too_few_sentences_for_ten_folds_and_vectors_that_are_all_alike_are_refused(make: Make, root: Path) -> None:
    entry = make(bad=["bad"] * 4, good=["good"] * 4)
    with pytest.raises(DataError, match=r"x_test has shape .* give at least one example"):
        data.load(entry, root=root, fold=9)
    alike = root / "alike.txt"
    alike.write_bytes(b"good 1 1\nbad 1 1\n")
    with pytest.raises(DataError, match="not finite"):
        data.load(entry, root=root, vectors=alike)


def test_a_text_that_is_not_utf8_is_named(make: Make, root: Path) -> None:
    entry = make()
    raw = b"\xff\xfe good\n"
    (root / "text" / "mr_pos.txt").write_bytes(raw)
    entry = replace(
        entry,
        bytes_of={**entry.bytes_of, "mr_pos.txt": len(raw)},
        sums={**entry.sums, "mr_pos.txt": hashlib.sha256(raw).hexdigest()},
    )
    with pytest.raises(DataError, match=r"mr_pos\.txt is no text in UTF-8 \(byte 0\)"):
        data.load(entry, root=root)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"good 1 2 3\nbad 1 2\n", r"line 2 of .* is not a word and 3 numbers"),
        (b"the 1 2 3\ngood 1 x 3\n", r"line 2 of .* is not a word and 3 numbers"),
        (b"good 1 nan 3\n", r"line 1 of .* is not a word and 3 numbers"),
        (b"good\n", r"line 1 of .* is not a word and some numbers"),
        (b"unused 1 2 3\n", r"has no vector of any word here"),
        (b"", r"has no vector of any word here"),
        (b"good 1 \xff\n", r"is no text in UTF-8"),
    ],
)
def test_files_that_are_not_gloves_are_refused_by_their_line(content: bytes, words: str, tmp_path: Path) -> None:
    path = tmp_path / "vectors.txt"
    path.write_bytes(content)
    with pytest.raises(DataError, match=words):
        read_glove(path, ["good", "bad"])


@pytest.mark.parametrize("name", ["mr", "subj"])
def test_the_real_sentences_are_the_registrys(name: str) -> None:
    entry = data.lookup(name)
    if entry.state() != "present" or not (entry.place() / sentences.VECTORS_FILE).exists():
        pytest.skip(f"{name} is not here")
    first = data.load(name)
    assert entry.size == f"{len(first.x_train):,} + {len(first.x_test):,} sentences"
    loaded = data.load(name, fold=9)
    assert loaded.x_test.shape[1:] == (100, 50)
    assert abs(float(loaded.y_test.double().mean()) - 0.5) < 1e-3
