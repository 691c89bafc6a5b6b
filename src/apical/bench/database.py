"""The SQLite file of a store: its schema, how it is opened, and an explanation for each error of SQLite."""

import hashlib
import os
import sqlite3
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import quote

from apical.bench import provenance
from apical.bench.declaration import Declaration
from apical.bench.integrity import EPOCHS, Epochs, seal
from apical.engine.checkpoint import read_seeds
from apical.errors import StoreError, describe_error, warn
from apical.files import remove_leftovers

SCHEMA_VERSION = 3
APPLICATION_ID = 0x61706963  # 'apic': distinguishes a store from any other SQLite file
LOCK_TIMEOUT = 30.0
"""Seconds to wait for another process's transaction; ours last milliseconds."""

SCHEMA = """
CREATE TABLE runs (
    id INTEGER PRIMARY KEY, key TEXT NOT NULL, seed INTEGER NOT NULL,
    rule TEXT NOT NULL, model TEXT NOT NULL, data TEXT NOT NULL, declaration TEXT NOT NULL,
    status TEXT NOT NULL CHECK (status IN ('running', 'done', 'failed')),
    owner TEXT, heartbeat REAL, deaths INTEGER NOT NULL DEFAULT 0,
    together INTEGER, seconds_per_epoch REAL, peak_memory INTEGER, memory_kind TEXT, started TEXT, finished TEXT,
    code TEXT, source TEXT, apical TEXT, torch TEXT, python TEXT, cuda TEXT, device TEXT,
    command TEXT, error TEXT, verdict TEXT, revision INTEGER NOT NULL DEFAULT 1, checksum TEXT,
    UNIQUE (key, seed)
);
CREATE TABLE epochs (
    run INTEGER NOT NULL REFERENCES runs (id) ON DELETE CASCADE, epoch INTEGER NOT NULL,
    loss REAL, accuracy REAL, test_loss REAL, test_accuracy REAL, seconds REAL, more TEXT NOT NULL DEFAULT '{}',
    PRIMARY KEY (run, epoch)
) WITHOUT ROWID;
"""
UPGRADES = {
    1: ["ALTER TABLE runs ADD COLUMN verdict TEXT"],
    2: ["ALTER TABLE runs ADD COLUMN revision INTEGER NOT NULL DEFAULT 1", "ALTER TABLE runs ADD COLUMN checksum TEXT"],
}
"""For each version of the schema, the statements that upgrade it to the next."""


class DamagedStoreError(StoreError):
    """A store whose file was damaged."""


class EmptyStoreError(StoreError):
    """A store in which nothing was ever recorded."""


class Database:
    """A connection to a store's file. Every transaction is atomic, even if the process is killed."""

    def __init__(self, path: Path, *, write: bool) -> None:
        self.path, self.write = path, write
        with self._explain_errors():
            if path.is_dir():
                raise StoreError(f"{path} is a folder; a store is a file, such as {path / 'results.sqlite'}.")
            if write and not path.exists():
                try:
                    path.absolute().parent.mkdir(parents=True, exist_ok=True)
                except OSError as error:
                    why = f"the folder of {path} cannot be made ({error.strerror}); choose another --store."
                    raise StoreError(why) from error
            elif not path.is_file():
                raise StoreError(f"there is no store at {path}; `apical bench --store {path}` makes one.")
            self.connection = self._connect()
            self._prepare()

    def _connect(self) -> sqlite3.Connection:
        """Open the file for writing or for reading, even where the folder is read-only."""
        place = str(self.path.absolute())  # a relative path might be ":memory:"
        if self.write:
            return _open(place, uri=False)
        if all(os.access(each, os.W_OK) for each in (self.path, self.path.absolute().parent)):
            # An ordinary connection that does not write. The last one to close removes the WAL files beside the database.
            connection = _open(place, uri=False)
            connection.execute("PRAGMA query_only = ON")
            return connection
        name = f"file:{quote(place)}?mode=ro"
        try:
            connection = _open(name, uri=True)
            connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
        except sqlite3.OperationalError as error:
            # In a read-only folder, a reader cannot create the WAL files that readers share.
            refused = any(words in str(error) for words in ("unable to open", "readonly database"))
            if not refused or Path(f"{self.path}-wal").exists():
                raise
            connection = _open(f"{name}&immutable=1", uri=True)
        return connection

    def _prepare(self) -> None:
        """Check that the file is a store of this version or an older one. Create or upgrade its tables."""
        # Check for tables before reading the ids: another process may create a store in between.
        empty = not self.connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
        version, application = (
            self.connection.execute(f"PRAGMA {name}").fetchone()[0] for name in ("user_version", "application_id")
        )
        if not empty and application != APPLICATION_ID:
            raise StoreError(
                f"{self.path} is a database of another program, not a store of results; choose another path."
            )
        if version > SCHEMA_VERSION:
            raise StoreError(
                f"{self.path} was written by a newer version of apical (its schema is {version}, this version "
                f"knows {SCHEMA_VERSION}): pip install --upgrade apical."
            )
        if empty and not self.write:
            raise EmptyStoreError(f"{self.path} is empty: no run was recorded in it.")
        if self.write:
            self.connection.execute("PRAGMA journal_mode = WAL")
            self.connection.execute("PRAGMA synchronous = FULL")
            self.connection.execute("PRAGMA foreign_keys = ON")
            if version < SCHEMA_VERSION:
                self._upgrade()

    def _upgrade(self) -> None:
        """Create the tables, or change those of an older version. Readers of this version can read those as they are."""
        with self.transaction():
            # Another process may have been faster.
            version = self.connection.execute("PRAGMA user_version").fetchone()[0]
            upgrades = [statement for each in range(version, SCHEMA_VERSION) for statement in UPGRADES.get(each, ())]
            for statement in SCHEMA.split(";\n") if version == 0 else upgrades:
                self.connection.execute(statement)
            seal(self.connection, [run for (run,) in self.connection.execute("SELECT id FROM runs").fetchall()])
            self.connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
            self.connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")

    @contextmanager
    def transaction(self, *, write: bool = True) -> Iterator[sqlite3.Connection]:
        """Run the body as one transaction: all of it is written, or nothing. Other writers wait until it ends.

        With `write=False` nobody waits: the body only reads, and sees nothing that others write meanwhile. It may be a part
        of another transaction.
        """
        if not write and self.connection.in_transaction:
            yield self.connection
            return
        with self._explain_errors():
            self.connection.execute("BEGIN IMMEDIATE" if write else "BEGIN")
            try:
                yield self.connection
                self.connection.execute("COMMIT")
            except BaseException:
                if self.connection.in_transaction:
                    self.connection.execute("ROLLBACK")
                raise

    def fetch_rows(self, query: str, values: tuple[object, ...] = ()) -> list[sqlite3.Row]:
        """Return all rows of a query."""
        with self._explain_errors():
            return self.connection.execute(query, values).fetchall()

    def fetch_until_damage(self, query: str) -> list[sqlite3.Row]:
        """Return the rows of a query up to the first one that cannot be read."""
        rows = []
        with suppress(sqlite3.Error):
            for row in self.connection.execute(query):
                rows.append(row)
        return rows

    def read_runs(self, keys: set[str] | None = None) -> Iterator[tuple[sqlite3.Row, Epochs] | None]:
        """Yield every run, or those with these keys, with its epochs; None for each that cannot be read.

        If the file is damaged, its runs are read one by one.
        """
        try:
            with self.transaction(write=False):  # else a run and its epochs might be of different moments
                found = self._read_entries(keys)
        except DamagedStoreError as error:
            salvaged = list(self._salvage(keys))
            if salvaged.count(None) == len(salvaged):
                raise error
            yield from salvaged if None in salvaged else [*salvaged, None]
        else:
            yield from found

    def _read_entries(self, keys: set[str] | None) -> list[tuple[sqlite3.Row, Epochs]]:
        """Return every run, or those with these keys, with its epochs."""
        entries = self.fetch_rows("SELECT id, key, * FROM runs NOT INDEXED ORDER BY id")
        (count,) = self.fetch_rows("SELECT count(*) FROM runs")[0]  # counts the index, which is another place
        if count != len(entries):
            raise DamagedStoreError(f"{self.path} is damaged: it has {len(entries)} of {count} runs.")
        found = [entry for entry in entries if keys is None or entry["key"] in keys]
        chosen = "" if len(found) == len(entries) else f" WHERE run IN ({', '.join(str(e['id']) for e in found)})"
        epochs: dict[int, list[tuple[Any, ...]]] = defaultdict(list)
        for row in self.fetch_rows(f"{EPOCHS}{chosen} ORDER BY run, epoch"):
            epochs[row[0]].append(tuple(row))
        return [(entry, epochs[entry["id"]]) for entry in found]

    def _salvage(self, keys: set[str] | None) -> Iterator[tuple[sqlite3.Row, Epochs] | None]:
        """Yield the runs of a damaged file that can still be read, and None for each that cannot."""
        seen: set[int] = set()
        for order in ("id", "id DESC", "key", "key DESC"):  # each ends where the file is damaged
            seen |= {row[0] for row in self.fetch_until_damage(f"SELECT id FROM runs ORDER BY {order}")}
        highest = min(max(seen, default=0), self.path.stat().st_size // 100)  # a run takes more than 100 bytes
        for run in sorted(seen | set(range(1, highest + 1))):
            try:
                found = self.fetch_rows("SELECT id, key, * FROM runs NOT INDEXED WHERE id = ?", (run,))
                epochs = self.fetch_rows(f"{EPOCHS} WHERE run = ? ORDER BY epoch", (run,))
            except DamagedStoreError:
                yield None
            else:
                if not found and run in seen:
                    yield None
                yield from (
                    (entry, [tuple(e) for e in epochs]) for entry in found if keys is None or entry["key"] in keys
                )

    def close(self) -> None:
        self.connection.close()

    @contextmanager
    def _explain_errors(self) -> Iterator[None]:
        """Turn an error of SQLite into a StoreError that explains it."""
        try:
            yield
        except (sqlite3.Error, UnicodeDecodeError) as error:  # the latter if SQLite quotes damaged text
            said = "malformed" if isinstance(error, UnicodeDecodeError) else str(error).lower()
            found = (sentence for words, sentence in EXPLANATIONS.items() if words in said)
            sentence = next(found, "{path} could not be used ({error}).")
            kind = DamagedStoreError if "malformed" in said or "too big" in said else StoreError
            why = describe_error(error).partition(": ")[2]
            raise kind(sentence.format(path=self.path, error=why, patience=LOCK_TIMEOUT)) from error


def _open(name: str, *, uri: bool) -> sqlite3.Connection:
    connection = sqlite3.connect(name, timeout=LOCK_TIMEOUT, isolation_level=None, uri=uri)
    connection.row_factory = sqlite3.Row
    connection.text_factory = lambda raw: raw.decode("utf-8", "replace")  # damaged text must not hide the other rows
    return connection


EXPLANATIONS = {
    "locked": "{path} is locked by another program for more than {patience:.0f} seconds; try again when it has ended.",
    "readonly": "{path} cannot be written to: the file or its folder is read-only.",
    "unable to open": "{path} cannot be opened: its folder is missing, or this user may not write there.",
    "full": "the disk of {path} is full: what was recorded before is kept; make room and run the same command again.",
    "disk i/o": "the disk of {path} refused a read or a write ({error}): what was recorded before is kept; look for "
    "room on it and run the same command again.",
    "not a database": "{path} is not a store of results: it is no SQLite file; choose another path.",
    "malformed": "{path} is damaged ({error}); `apical results repair {path}` saves what it can.",
}


# The files of a store, and those beside it.


def list_stores(source: Path) -> list[Path]:
    """Return the stores that a path names: the file itself, or all below a folder but for empty ones, with a warning."""
    if source.is_file():
        return [source]
    if not source.is_dir():
        raise StoreError(f"there is no folder {source} to read results from.")
    stores = []
    for path in sorted(source.rglob("*.sqlite")):
        try:
            Database(path, write=False).close()
        except EmptyStoreError as error:
            warn(f"{str(error).removesuffix('.')}; it is left out.")
        else:
            stores.append(path)
    if not stores:
        raise StoreError(
            f"there are no stores of results (*.sqlite) in {source}; `apical train --out {source}` writes one."
        )
    return stores


def get_checkpoint_folder(path: Path) -> Path:
    """Return the folder beside a store where unfinished runs have their checkpoints."""
    return path.with_name(path.name + ".checkpoints")


def get_checkpoint_path(path: Path, declaration: Declaration, seeds: Sequence[int]) -> Path:
    """Return the checkpoint file of some seeds. Other seeds, or other code, are another computation, so another file."""
    digest = hashlib.sha256(f"{provenance.hash_source()} {list(seeds)}".encode()).hexdigest()[:8]
    return get_checkpoint_folder(path) / f"{declaration.key}-{digest}.safetensors"


def find_begun_seeds(path: Path, declaration: Declaration) -> list[list[int]]:
    """Return the seeds of each checkpoint of a run that this code can go on from."""
    files = sorted(get_checkpoint_folder(path).glob(f"{declaration.key}-*.safetensors"))
    found = [(file, read_seeds(file)) for file in files]
    return [seeds for file, seeds in found if file == get_checkpoint_path(path, declaration, seeds)]


def remove_checkpoint(checkpoint: Path) -> None:
    """Delete the checkpoint of a recorded run, and what damage and killed processes left of it."""
    checkpoint.unlink(missing_ok=True)
    checkpoint.with_suffix(".damaged").unlink(missing_ok=True)
    remove_leftovers(checkpoint)


def remove_checkpoints_except(path: Path, list_keys: Callable[[], set[str]]) -> None:
    """Delete the checkpoints beside a store but for those of some keys, and their folder if it is empty then."""
    folder = get_checkpoint_folder(path)
    files = list(folder.glob("[!.]*"))  # listed before the keys: what another process begins now is not among them
    kept = list_keys() if files else set()
    for file in files:
        if file.name.partition("-")[0] not in kept:
            remove_checkpoint(file)
    with suppress(OSError):  # it is not empty, or not there
        folder.rmdir()
