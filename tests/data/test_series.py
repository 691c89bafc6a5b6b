"""Time series: the two tasks against loops over single values, scaling that looks only where it says, and files."""

import gzip
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from apical import data
from apical.data import DATASETS, Dataset, Series
from apical.data.sequences import OwnSeries
from apical.errors import ApicalError, DataError, MissingExtraError


def of(values: np.ndarray, **options: object) -> Dataset:
    entry = OwnSeries(name="series:own", title="", path=Path("own"))
    return entry.dataset({"values": values.astype(np.float32)}, **options)


def walk(length: int = 50, series: int = 3, seed: int = 0) -> np.ndarray:
    """Series that drift, so that the test part has other means than the training part."""
    return np.random.default_rng(seed).normal(0.3, 1, (length, series)).cumsum(0).astype(np.float32)


def z(values: np.ndarray, seen: np.ndarray) -> np.ndarray:
    """z-scores written out by hand, in float64."""
    values, seen = values.astype(np.float64), seen.astype(np.float64)
    mean = seen.sum(0) / len(seen)
    return (values - mean) / (((seen - mean) ** 2).sum(0) / len(seen)) ** 0.5


CASES = (
    st.integers(40, 60),
    st.integers(1, 4),
    st.integers(1, 3),
    st.integers(1, 3),
    st.sampled_from(["train", "all"]),
)


@given(*CASES)
def test_forecast_asks_at_every_position_for_all_series_some_steps_ahead(
    length: int, window: int, horizon: int, stride: int, scale: str
) -> None:
    values = walk(length)
    made = of(values, task="forecast", window=window, horizon=horizon, stride=stride, scale=scale)
    border = length * 4 // 5
    scaled = z(values, values[:border] if scale == "train" else values)
    for part, x, y in ((scaled[:border], made.x_train, made.y_train), (scaled[border:], made.x_test, made.y_test)):
        starts = range(0, len(part) - window - horizon + 1, stride)
        assert x.shape == y.shape == (len(starts), window, 3)
        for n, start in enumerate(starts):
            for t in range(window):
                assert x[n, t].numpy() == pytest.approx(part[start + t], abs=1e-5)
                assert y[n, t].numpy() == pytest.approx(part[start + t + horizon], abs=1e-5)


@given(*CASES)
def test_paper_asks_for_the_last_series_at_the_same_time(
    length: int, window: int, series: int, stride: int, scale: str
) -> None:
    values = walk(length, series + 1)
    made = of(values, task="paper", window=window, stride=stride, scale=scale)
    border = length * 4 // 5
    scaled = z(values, values[:border] if scale == "train" else values)
    for part, x, y in ((scaled[:border], made.x_train, made.y_train), (scaled[border:], made.x_test, made.y_test)):
        starts = range(0, len(part) - window + 1, stride)
        assert x.shape == (len(starts), window, series)
        assert y.shape == (len(starts), window, 1)
        for n, start in enumerate(starts):
            for t in range(window):
                assert x[n, t].numpy() == pytest.approx(part[start + t, :-1], abs=1e-5)
                assert y[n, t].numpy() == pytest.approx(part[start + t, -1:], abs=1e-5)


def test_by_default_it_is_a_forecast_of_the_next_step_and_the_test_part_scales_nothing() -> None:
    values = walk(200)
    made = of(values)
    options = {"task": "forecast", "window": 24, "stride": 1, "scale": "train", "horizon": 1}
    assert (made.options, made.loss, made.classes) == (options, "mse", None)
    assert made.x_train.dtype == made.y_train.dtype == torch.float32
    changed = values.copy()
    changed[160:] += 100
    assert torch.equal(of(changed).x_train, made.x_train)
    assert not torch.equal(of(changed, scale="all").x_train, of(values, scale="all").x_train)


def test_means_and_spreads_are_exact_far_from_zero() -> None:
    """In float32 a sum of such values would lose the differences between them."""
    values = (np.arange(5000) % 7 + 100_000).astype(np.float32)[:, None]
    made = of(values, window=1, scale="all")
    assert made.x_train.flatten().numpy() == pytest.approx(z(values, values)[: 4000 - 1, 0], abs=1e-5)


def test_a_series_that_never_changes_in_training_is_only_centred() -> None:
    values = walk(50)
    values[:, 1] = 0.1  # no sum of tenths is exact
    values[45:, 1] = 2.1
    made = of(values, window=2, task="paper")
    assert made.x_train[..., 1].abs().max() < 1e-6
    assert made.x_test[..., 1].max() == pytest.approx(2.0)


@pytest.mark.parametrize(
    ("options", "overlap"),
    [
        ({"task": "paper", "window": 4}, 3),
        ({"task": "paper", "window": 4, "stride": 4}, 0),
        ({"window": 4, "horizon": 3}, 6),
        ({"window": 4, "horizon": 1, "stride": 2}, 2),
    ],
)
def test_the_overlap_counts_the_windows_that_share_times(options: dict, overlap: int) -> None:
    assert of(walk(60), **options).overlap == overlap


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"task": "predict"}, "unknown task 'predict'; forecast and paper work"),
        ({"scale": "test"}, "unknown scale 'test'; train and all work"),
        ({"horizon": 0}, "horizon is 0, but must be a whole number of at least 1"),
        ({"horizon": 1.5}, "horizon is 1.5"),
        ({"task": "paper", "horizon": 2}, "'paper' has no horizon"),
        ({"window": -3}, "window is -3"),
        ({"window": None}, "window is None"),
        ({"stride": 0}, "stride is 0"),
        ({"stride": -2}, "stride is -2"),
        ({"window": 50}, r"50 times, 40 of them in the training part, but one window and its targets take 51"),
        ({"window": 9, "horizon": 2}, r"10 of them in the test part.* take 11: choose a shorter window"),
        ({"task": "paper", "window": 11}, "10 of them in the test part"),
    ],
)
def test_a_bad_option_is_one_sentence(options: dict, words: str) -> None:
    with pytest.raises(DataError, match=words) as caught:
        of(walk(50), **options)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("scale", ["train", "all"])
def test_one_row_is_too_short_whatever_the_scale(scale: str) -> None:
    """Its training part is empty: there is nothing to measure for the z-scores."""
    with pytest.raises(DataError, match="has 1 times, 0 of them in the training part"):
        of(walk(1), scale=scale)


def test_the_longest_window_that_fits_has_one_example_to_test() -> None:
    assert len(of(walk(50), window=9, horizon=1).x_test) == 1
    assert len(of(walk(50), window=10, task="paper").x_test) == 1


def test_the_papers_task_needs_two_series() -> None:
    with pytest.raises(DataError, match="needs two series, but series:own has one"):
        of(walk(50, 1), task="paper", window=3)
    assert of(walk(50, 1), window=3).x_train.shape[-1] == 1


def test_an_unknown_option_is_met_with_the_known_ones() -> None:
    with pytest.raises(DataError, match="no option 'horizont'; their options: task, horizon, window, stride, scale"):
        data.load("exchange_rate", horizont=3)


# A table of one's own.


def own(folder: Path, text: str) -> str:
    (folder / "own.csv").write_text(text)
    return f"series:{folder / 'own.csv'}"


@pytest.mark.parametrize("titles", ["", "load,heat\n"])
def test_a_table_of_ones_own_may_have_titles(tmp_path: Path, titles: str) -> None:
    values = walk(50, 2)
    name = own(tmp_path, titles + "".join(f"{a!r}, {b!r}\n" for a, b in values.tolist()) + "\n")
    made = data.load(name, window=3)
    assert torch.equal(made.x_train, of(values, window=3).x_train)
    assert made.name == name
    assert "a file of yours" in str(data.verify(name))


def test_small_changes_of_large_numbers_are_not_rounded_away(tmp_path: Path) -> None:
    """In float32 all of these are 1,700,000,000: as seconds since 1970 are."""
    values = 1.7e9 + np.arange(50) % 7
    made = data.load(own(tmp_path, "".join(f"{value!r}\n" for value in values.tolist())), window=1, scale="all")
    assert made.x_train.dtype == torch.float32
    assert made.x_train.flatten().numpy() == pytest.approx(z(values, values)[:39], abs=1e-5)


def test_titles_may_have_underscores(tmp_path: Path) -> None:
    made = data.load(own(tmp_path, "load_1,load_2\n" + "1,2\n3,4\n" * 20), window=2)
    assert made.x_train.shape[2] == 2


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "own.csv holds no values"),
        ("a,b\n", "own.csv holds no values"),
        ("day,b\nMonday,2\n", r"line 2 of .*own.csv holds 'Monday' in column 1 \(day\), which is not a number: remove"),
        ("1,2\n3,x\n", r"line 2 of .* holds 'x' in column 2, which is not a number"),
        ("1,2\n3,\n", r"line 2 of .* holds '' in column 2, which is not a number"),
        ("1,2\n3\n", r"line 2 of .* has 1 values, but the lines before it have 2"),
        ("a,b\n3\n", r"line 2 of .* has 1 values, but the lines before it have 2"),
        ("1,2\n3,nan\n", r"holds nan at row 1, column 1 \(counted from 0\): fill in"),
        ("1,inf\n3,4\n", "holds inf at row 0, column 1"),
        ("1,2\n3,1e300\n", r"holds 1e\+300 at row 1, column 1"),
        ("1,2\n3,1_000\n", r"line 2 of .* holds '1_000' in column 2, which is not a number"),
        ("1_0,2_0\n3,4\n", r"line 1 of .* holds '1_0' in column 1, which is not a number"),
    ],
)
def test_a_bad_table_is_one_sentence_that_names_the_place(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(DataError, match=words) as caught:
        data.load(own(tmp_path, text))
    assert "\n" not in str(caught.value)


def test_a_table_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"nothing.csv cannot be read \(No such file"):
        data.load(f"series:{tmp_path / 'nothing.csv'}")
    (tmp_path / "binary.csv").write_bytes(b"\xff\xfe\x00\x80")
    with pytest.raises(DataError, match=r"binary.csv cannot be read \(.*decode"):
        data.load(f"series:{tmp_path / 'binary.csv'}")


# The official formats, in small files made here.

VALUES = walk(20, 3, seed=1)


def small(name: str) -> Series:
    entry = replace(DATASETS[name], length=20, series=3, sums={}, official_sums=False)
    assert isinstance(entry, Series)
    return entry


def write_gzipped(path: Path, values: np.ndarray) -> None:
    with gzip.open(path, "wt") as file:
        file.writelines(",".join(map(repr, row)) + "\n" for row in values.tolist())


def write_ett(path: Path, values: np.ndarray) -> None:
    rows = [f"2016-07-01 {i % 24:02}:00:00," + ",".join(map(repr, row)) for i, row in enumerate(values.tolist())]
    path.write_text("\n".join(["date,HUFL,MULL,OT", *rows]) + "\n")


def write_frame(path: Path, values: np.ndarray) -> None:
    """As pandas writes a frame of one type: its titles and times beside the values, each in its own data set."""
    h5py = pytest.importorskip("h5py")
    with h5py.File(path, "w") as file:
        frame = file.create_group("df")
        frame.attrs["pandas_type"] = "frame"
        frame["axis0"] = np.array([b"773869", b"767541", b"767542"])
        frame["axis1"] = np.arange(len(values), dtype=np.int64)
        frame["block0_items"] = frame["axis0"][:]
        frame["block0_values"] = values.astype(np.float64)


WRITERS = {
    "electricity": write_gzipped,
    "exchange_rate": write_gzipped,
    "etth1": write_ett,
    "etth2": write_ett,
    "metr_la": write_frame,
    "pems_bay": write_frame,
}


@pytest.mark.parametrize("name", WRITERS)
def test_an_official_file_becomes_the_canonical_one(tmp_path: Path, root: Path, name: str) -> None:
    entry = small(name)
    WRITERS[name](tmp_path / entry.files[0].name, VALUES)
    path = data.fetch(entry, root, source=tmp_path, progress=False)
    assert path == root / "timeseries" / f"{name}.npz"
    with np.load(path) as archive:
        assert archive["values"].dtype == np.float32
        assert np.array_equal(archive["values"], VALUES)
    assert data.verify(entry, root).basis == "recorded"
    assert torch.equal(data.load(entry, root=root, window=2).x_test, of(VALUES, window=2).x_test)
    damaged = {"values": VALUES + 1, "record": np.load(path)["record"]}
    np.savez(path, **damaged)
    with pytest.raises(DataError, match=r"damaged or other data: .*recorded when it was fetched"):
        data.load(entry, root=root)


@pytest.mark.parametrize("name", WRITERS)
def test_an_official_file_of_another_size_is_refused(tmp_path: Path, root: Path, name: str) -> None:
    entry = small(name)
    WRITERS[name](tmp_path / entry.files[0].name, VALUES[:-1])
    with pytest.raises(DataError, match=rf"float32 19×3, but {name} has float32 20×3"):
        data.fetch(entry, root, source=tmp_path, progress=False)
    assert not root.exists()


@pytest.mark.parametrize("name", WRITERS)
def test_a_file_that_is_not_in_its_format_is_named(tmp_path: Path, root: Path, name: str) -> None:
    entry = small(name)
    (tmp_path / entry.files[0].name).write_bytes(b"\x00\xff" * 50)
    with pytest.raises(DataError, match=rf"{entry.files[0].name} is not in its official format"):
        data.fetch(entry, root, source=tmp_path, progress=False)


@pytest.mark.parametrize("name", WRITERS)
def test_a_hole_in_an_official_file_is_named_by_row_and_column(tmp_path: Path, root: Path, name: str) -> None:
    entry, holed = small(name), VALUES.copy()
    holed[7, 2] = np.nan
    WRITERS[name](tmp_path / entry.files[0].name, holed)
    with pytest.raises(DataError, match=r"holds nan at row 7, column 2"):
        data.fetch(entry, root, source=tmp_path, progress=False)


def test_the_column_of_an_official_table_is_counted_with_the_date(tmp_path: Path, root: Path) -> None:
    entry = small("etth1")
    write_ett(tmp_path / "ETTh1.csv", VALUES)
    text = (tmp_path / "ETTh1.csv").read_text().splitlines()
    text[3] = "2016-07-01 02:00:00,1,off,3"
    (tmp_path / "ETTh1.csv").write_text("\n".join(text))
    with pytest.raises(DataError, match=r"line 4 of .* holds 'off' in column 3 \(MULL\)"):
        data.fetch(entry, root, source=tmp_path, progress=False)


def test_values_that_are_not_the_registrys_are_refused(tmp_path: Path, root: Path) -> None:
    entry = small("exchange_rate")
    entry = replace(entry, sums={"values": "0" * 64}, official_sums=True)
    write_gzipped(tmp_path / "exchange_rate.txt.gz", VALUES)
    with pytest.raises(DataError, match=r"not the registry's"):
        data.fetch(entry, root, source=tmp_path, progress=False)


@pytest.mark.parametrize("what", ["two frames", "two blocks", "no frame", "text", "other length"])
def test_a_frame_that_is_not_one_table_of_numbers_is_refused(tmp_path: Path, root: Path, what: str) -> None:
    h5py = pytest.importorskip("h5py")
    entry = small("metr_la")
    write_frame(tmp_path / "metr-la.h5", VALUES)
    with h5py.File(tmp_path / "metr-la.h5", "a") as file:
        if what == "two frames":
            file.copy("df", "dg")
        elif what == "two blocks":
            file["df/block1_values"] = VALUES
        elif what == "no frame":
            del file["df/block0_values"]
        elif what == "text":
            del file["df/block0_values"]
            file["df/block0_values"] = np.full((20, 3), b"pickled")
        else:
            del file["df/axis1"]
            file["df/axis1"] = np.arange(19)
    words = "not numbers of" if what in ("text", "other length") else "does not hold one table of numbers"
    with pytest.raises(DataError, match=words):
        data.fetch(entry, root, source=tmp_path, progress=False)


def test_a_frame_without_h5py_says_what_to_install(tmp_path: Path, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "pems-bay.h5").write_bytes(b"")
    monkeypatch.setitem(sys.modules, "h5py", None)
    with pytest.raises(MissingExtraError, match=r"reading pems-bay.h5 needs h5py.*pip install 'apical\[data\]'"):
        data.fetch(small("pems_bay"), root, source=tmp_path, progress=False)


def test_a_file_without_an_address_is_met_with_its_page(root: Path) -> None:
    with pytest.raises(DataError, match=r"metr-la.h5 has no address .*DCRNN and run `apical data fetch metr_la --from"):
        data.fetch("metr_la", root, progress=False)


def test_a_set_without_an_official_file_is_met_with_its_sum(root: Path) -> None:
    words = r"put a file metr_la_week1.npz whose array values has the SHA-256 cd3fbf13\w+ there"
    for act in (data.load, data.verify, data.fetch):
        with pytest.raises(ApicalError, match=words):
            act("metr_la_week1", root=root)
