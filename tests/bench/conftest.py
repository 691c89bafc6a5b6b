"""What several tests of the bench begin with."""

from pathlib import Path

import pytest

from apical.bench import suites
from apical.bench.store import Store


@pytest.fixture
def all_data(monkeypatch: pytest.MonkeyPatch) -> None:
    """No data set is missing, whatever is on this machine."""
    monkeypatch.setattr(suites, "explain_missing_data", lambda data: None)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "s.sqlite")
