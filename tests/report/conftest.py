"""A store for the tests of reports, and the groups that it is read as."""

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

from apical.bench.store import Store
from apical.report import groups as report_groups
from apical.report.groups import Group, collect

Groups = Callable[[], dict[str, Group]]
SUITES = cache(report_groups._load_suites)


@pytest.fixture(autouse=True)
def _suites_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The packaged suites declare thousands of runs, the same for every test here: they are worked out once."""
    monkeypatch.setattr(report_groups, "_load_suites", SUITES)


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
