"""Change a store as a whole: save the good runs of a damaged one, or delete runs."""

import warnings
from collections.abc import Sequence
from pathlib import Path

from apical.bench.database import DamagedStoreError, get_checkpoint_folder
from apical.bench.store import Row, Store
from apical.errors import StoreError
from apical.files import resolve_links

SHORTEST_KEY = 4
"""Characters of a key that name runs to delete; fewer would mean many runs, and none all."""


def repair(path: Path) -> tuple[int, int, Path | None]:
    """Copy the runs of a damaged store that can be read into a new file that takes its place.

    Returns:
        How many runs were kept and how many were lost, and the new name of the damaged file; None if none was damaged.
    """
    path = resolve_links(path)
    fresh = path.with_name(f"{path.name}.repaired")
    try:
        # No warning of what is damaged: it is said in the end.
        with Store(path, write=False) as old, warnings.catch_warnings(action="ignore"):
            rows = old.runs()
            if not old.damaged:
                return len(rows), 0, None
            _refuse_active(old, rows)
            fresh.unlink(missing_ok=True)
            with Store(fresh) as new:
                kept, _ = new.copy(old)
            lost = old.damaged
        aside = _find_free_name(path)
        for suffix in ("", "-wal", "-shm"):  # a log that is left behind would be applied to the new file
            if Path(f"{path}{suffix}").exists():
                Path(f"{path}{suffix}").replace(f"{aside}{suffix}")
        fresh.replace(path)
    except DamagedStoreError as error:
        raise StoreError(f"no run of {path} can be saved; take a copy from a backup.") from error
    except OSError as error:
        raise StoreError(f"{path} could not be repaired ({error.strerror or error}).") from error
    finally:
        fresh.unlink(missing_ok=True)
    return kept, lost, aside


def find_runs(store: Store, beginnings: Sequence[str], shortest: int = 0) -> list[Row]:
    """Return the runs whose keys begin with one of these texts. Each must be the beginning of at least one."""
    rows = store.runs()
    for begin in beginnings:
        if len(begin) < shortest:
            raise StoreError(f"the key {begin!r} is too short; give at least {shortest} characters of it.")
        if not any(row.key.startswith(begin) for row in rows):
            raise StoreError(
                f"{store.path} has no run whose key begins with {begin!r}; `apical results list` has them."
            )
    return [row for row in rows if row.key.startswith(tuple(beginnings))]


def delete(store: Store, rows: Sequence[Row]) -> None:
    """Delete runs with their epochs and checkpoints, unless a living process works on one of them."""
    with store.database.transaction() as connection:
        _refuse_active(store, [row for row in store.runs() if row.id in {each.id for each in rows}])
        connection.executemany("DELETE FROM runs WHERE id = ?", [(row.id,) for row in rows])
    for key in {row.key for row in rows}:
        for checkpoint in get_checkpoint_folder(store.path).glob(f"{key}-*"):
            checkpoint.unlink(missing_ok=True)


def _refuse_active(store: Store, rows: Sequence[Row]) -> None:
    for row in rows:
        if row.active:
            raise StoreError(
                f"a process works on seed {row.seed} of {row.declaration} in {store.path} ({row.key}); wait until it ends."
            )


def _find_free_name(path: Path) -> Path:
    """Return a new name for a damaged file: no earlier one is overwritten."""
    names = [path.with_name(f"{path.name}.damaged{number}") for number in ["", *range(2, 1000)]]
    return next(name for name in names if not name.exists())
