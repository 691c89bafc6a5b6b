"""A store for the tests of reports, and the groups that it is read as."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from apical.bench.store import Store
from apical.report.groups import Group, collect

Groups = Callable[[], dict[str, Group]]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store(tmp_path / "results.sqlite") as opened:
        yield opened


@pytest.fixture
def groups(store: Store) -> Groups:
    """The store's groups by what they are called in words."""

    def read() -> dict[str, Group]:
        return {" ".join([*g.place, g.varied_text]).strip(): g for g in collect(store)}

    return read
