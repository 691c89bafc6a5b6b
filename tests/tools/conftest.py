"""A store for the tests of the repository's tools."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from apical.bench.store import Store


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store(tmp_path / "results.sqlite") as opened:
        yield opened
