"""``apical data`` from the command line."""

from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from apical.cli.data import data_app as app
from apical.data import DATASETS
from apical.errors import DataError
from tests.data.conftest import Official

Make = Callable[[str], Official]


@pytest.fixture
def run(root: Path, monkeypatch: pytest.MonkeyPatch) -> Callable:
    monkeypatch.setenv("APICAL_DATA", str(root))
    monkeypatch.setenv("COLUMNS", "300")
    return lambda *arguments: CliRunner().invoke(app, list(map(str, arguments)))


@pytest.fixture
def small_mnist(make: Make, monkeypatch: pytest.MonkeyPatch) -> Official:
    official = make("mnist")
    monkeypatch.setitem(DATASETS, "mnist", official.entry)
    return official


def test_list_shows_every_data_set_its_state_and_its_terms(run: Callable, root: Path) -> None:
    result = run("list")
    assert result.exit_code == 0
    assert all(name in result.output for name in DATASETS)
    assert "absent" in result.output
    assert "non-commercial use only" in result.output
    assert str(root) in result.output
    assert "text:PATH" in result.output
    assert "series:PATH" in result.output


def test_fetch_then_list_then_verify(run: Callable, root: Path, small_mnist: Official) -> None:
    assert run("fetch", "mnist", "--from", small_mnist.folder).exit_code == 0
    assert (root / "mnist.npz").exists()
    assert "present" in next(line for line in run("list").output.splitlines() if " mnist " in line)
    result = run("verify")
    assert result.exit_code == 0
    assert result.output.count("good") == 2  # digits and mnist: the others are not here
    assert "matches the registry's SHA-256" in result.output


def test_fetch_tells_the_terms_of_use(run: Callable, make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    official = make("svhn")
    monkeypatch.setitem(DATASETS, "svhn", official.entry)
    assert "svhn: non-commercial use only." in run("fetch", "svhn", "--from", official.folder).stderr


def test_a_misspelt_name_stops_fetch_before_anything_is_fetched(
    run: Callable, root: Path, small_mnist: Official
) -> None:
    result = run("fetch", "mnist", "cifr10", "--from", small_mnist.folder)
    assert isinstance(result.exception, DataError)
    assert "did you mean cifar10?" in str(result.exception)
    assert not root.exists()


def test_verify_reports_every_set_before_it_fails(run: Callable, root: Path, small_mnist: Official) -> None:
    root.mkdir()
    (root / "mnist.npz").write_bytes(b"damaged")
    result = run("verify", "mnist", "svhn", "[red]", "digits")
    assert result.exit_code == 1
    assert isinstance(result.exception, DataError)
    assert str(result.exception) == "3 of 4 data sets failed the check: mnist, svhn, [red]."
    assert result.output.count("bad") == 3
    assert any("[red]" in line.split("bad")[0] for line in result.output.splitlines() if "bad" in line)
    assert "matches the registry's SHA-256" in result.output


@pytest.mark.parametrize("arguments", [["--help"], ["list", "--help"], ["fetch", "--help"], ["verify", "--help"]])
def test_help_is_there(arguments: list[str], run: Callable) -> None:
    assert run(*arguments).exit_code == 0


def test_fetch_without_a_name_is_a_usage_error(run: Callable) -> None:
    assert run("fetch").exit_code == 2
