"""The registry and the functions that take a name."""

import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits

from apical.data import DATASETS, data_folder, fetch, listing, load, verify
from apical.errors import DataError, MissingExtraError

IMAGES = ["digits", "mnist", "fashion_mnist", "svhn", "cifar10", "cifar100", "tiny_imagenet"]
CHARACTERS = ["tinyshakespeare", "sherlock_holmes"]
SERIES = ["electricity", "metr_la", "metr_la_week1", "pems_bay", "exchange_rate", "etth1", "etth2"]


def test_every_data_set_is_known_under_its_name() -> None:
    assert set(DATASETS) >= {*IMAGES, *CHARACTERS, *SERIES}
    assert list(DATASETS) == [entry.name for entry in DATASETS.values()]


@pytest.mark.parametrize("entry", DATASETS.values(), ids=DATASETS)
def test_every_data_set_can_be_checked(entry) -> None:
    assert set(entry.sums) in (set(), set(entry.arrays))
    assert entry.sums or not entry.official_sums
    assert all(re.fullmatch("[0-9a-f]{64}", known) for known in entry.sums.values())
    assert all(re.fullmatch("[0-9a-f]{32}", file.md5) for file in entry.files if file.md5 is not None)
    assert all(file.url.startswith("http") != bool(file.page) for file in entry.files)
    assert len({file.name for file in entry.files}) == len(entry.files)


@pytest.mark.parametrize("name", IMAGES)
def test_images_have_a_mean_and_a_spread_for_each_channel(name: str) -> None:
    entry = DATASETS[name]
    assert len(entry.mean) == len(entry.std) == (1 if len(entry.shape) == 2 else 3)


def test_digits_are_split_by_the_permutation_of_cpu_seed_0() -> None:
    bunch = load_digits()
    order = torch.randperm(1797, generator=torch.Generator().manual_seed(0))
    images = (torch.tensor(bunch.images, dtype=torch.float32)[order, None] / 16 - 0.5) / 0.5
    labels = torch.tensor(bunch.target)[order]
    x_train, y_train, x_test, y_test = load("digits")
    assert x_train.shape == (1437, 1, 8, 8)
    assert torch.equal(torch.cat([x_train, x_test]), images)
    assert torch.equal(torch.cat([y_train, y_test]), labels)
    assert (x_train.dtype, y_train.dtype) == (torch.float32, torch.int64)
    assert (images.min(), images.max()) == (-1, 1)


def test_digits_need_no_fetch(capsys: pytest.CaptureFixture[str]) -> None:
    assert fetch("digits").exists()
    assert "Nothing to fetch" in capsys.readouterr().err
    assert verify("digits").basis == "registry"


def test_other_digits_would_be_refused() -> None:
    other = replace(DATASETS["digits"], train=1436, test=361)
    with pytest.raises(DataError, match=r"x_train of .* not the registry's; reinstalling scikit-learn"):
        fetch(other)


def test_digits_do_not_depend_on_the_users_defaults() -> None:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        assert load("digits").x_test.dtype == torch.float32
    finally:
        torch.set_default_dtype(before)


def test_digits_without_scikit_learn_say_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(MissingExtraError, match=r"digits data set needs sklearn.*pip install 'apical\[data\]'"):
        load("digits")


@pytest.mark.parametrize(("name", "near"), [("mnsit", "mnist"), ("CIFAR-10", "cifar10"), ("Fashion", "fashion_mnist")])
def test_an_unknown_name_is_met_with_the_nearest_one_and_all_of_them(name: str, near: str) -> None:
    with pytest.raises(DataError, match=rf"no data set called '{name}' \(did you mean {near}\?\)") as caught:
        load(name)
    assert all(known in str(caught.value) for known in DATASETS)


def test_a_name_like_no_other_is_met_with_all_of_them() -> None:
    with pytest.raises(DataError, match=r"called 'zzz': the names are digits, mnist"):
        verify("zzz")


def test_a_missing_file_is_met_with_the_folder_and_the_command(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=rf"mnist is not in {tmp_path} .*`apical data fetch mnist`"):
        load("mnist", root=tmp_path)


def test_the_folder_is_the_argument_else_the_variable_else_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("APICAL_DATA", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert data_folder() == tmp_path / ".cache" / "apical"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert data_folder() == tmp_path / "xdg" / "apical"
    monkeypatch.setenv("APICAL_DATA", "~/chosen")
    assert data_folder() == tmp_path / "chosen"
    assert data_folder("~/given") == tmp_path / "given"


def test_the_listing_tells_present_absent_and_damaged_apart(tmp_path: Path) -> None:
    entry = DATASETS["mnist"]
    np.savez(tmp_path / "mnist.npz", **{k: np.zeros(a.shape, a.dtype) for k, a in entry.arrays.items()})
    (tmp_path / "svhn.npz").write_bytes(b"damaged")
    states = {row.name: row.state for row in listing(tmp_path)}
    assert states["digits"] == states["mnist"] == "present"
    assert states["svhn"] == "damaged"
    assert states["cifar10"] == "absent"
    assert {row.name: row.note for row in listing(tmp_path)}["svhn"] == "non-commercial use only"
    with pytest.raises(DataError):  # zeros have the right form, which is all that a listing looks at
        verify("mnist", tmp_path)


@pytest.mark.slow
def test_importing_needs_no_extra() -> None:
    extras = ["sklearn", "scipy", "pooch", "tqdm", "PIL", "h5py", "typer", "rich"]
    block = f"import sys; sys.modules.update(dict.fromkeys({extras}))"
    done = subprocess.run(
        [sys.executable, "-c", f"{block}; import apical.data"], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", [*CHARACTERS, "metr_la_week1", "exchange_rate", "etth1", "etth2"])
def test_the_real_sequences_have_the_registry_sums(name: str) -> None:
    if DATASETS[name].state() == "absent":
        pytest.skip(f"no {name} in $APICAL_DATA")
    assert verify(name).basis == "registry"
    made = load(name)
    assert len(made.x_train) > 3 * len(made.x_test) > 0


REAL = {"mnist": (0.0, 1.0), "fashion_mnist": (0.0, None), "cifar10": (None, None), "svhn": (None, None)}


@pytest.mark.parametrize("name", REAL)
def test_the_real_data_has_the_registry_sums(name: str) -> None:
    folder = os.environ.get("APICAL_DATA")
    if not folder or not (Path(folder) / f"{name}.npz").exists():
        pytest.skip(f"no {name}.npz in $APICAL_DATA: `apical data fetch {name}` puts it there")
    arrays, report = DATASETS[name].read()
    assert report.basis == "registry" or name == "svhn"
    mean, std = REAL[name]
    x_test = DATASETS[name].normalise(arrays["x_test"])
    assert x_test.isfinite().all()
    assert mean is None or abs(float(x_test.mean()) - mean) < 0.02
    assert std is None or abs(float(x_test.std()) - std) < 0.02
