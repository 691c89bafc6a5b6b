"""The SQLite file of a store: its schema, how it is opened, and an explanation for each error of SQLite."""

import os
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import quote

from apical.errors import StoreError

SCHEMA_VERSION = 2
APPLICATION_ID = 0x61706963  # 'apic': distinguishes a store from any other SQLite file
LOCK_TIMEOUT = 30.0
"""Seconds to wait for another process's transaction; ours last milliseconds."""

SCHEMA = """
CREATE TABLE runs (
    id INTEGER PRIMARY KEY,
    key TEXT NOT NULL,
    seed INTEGER NOT NULL,
    rule TEXT NOT NULL,
    model TEXT NOT NULL,
    data TEXT NOT NULL,
    declaration TEXT NOT NULL,
    status TEXT NOT NULL CHECK (status IN ('running', 'done', 'failed')),
    owner TEXT,
    heartbeat REAL,
    deaths INTEGER NOT NULL DEFAULT 0,
    together INTEGER,
    seconds_per_epoch REAL,
    peak_memory INTEGER,
    memory_kind TEXT,
    started TEXT,
    finished TEXT,
    code TEXT,
    source TEXT,
    apical TEXT,
    torch TEXT,
    python TEXT,
    cuda TEXT,
    device TEXT,
    command TEXT,
    error TEXT,
    verdict TEXT,
    UNIQUE (key, seed)
);
CREATE TABLE epochs (
    run INTEGER NOT NULL REFERENCES runs (id) ON DELETE CASCADE,
    epoch INTEGER NOT NULL,
    loss REAL,
    accuracy REAL,
    test_loss REAL,
    test_accuracy REAL,
    seconds REAL,
    more TEXT NOT NULL DEFAULT '{}',
    PRIMARY KEY (run, epoch)
) WITHOUT ROWID;
"""
UPGRADES = {1: "ALTER TABLE runs ADD COLUMN verdict TEXT"}
"""For each version of the schema, the statement that upgrades it to the next."""


class Database:
    """A connection to a store's file. Every transaction is atomic, even if the process is killed."""

    def __init__(self, path: Path, *, write: bool) -> None:
        self.path, self.write = path, write
        with self._explain_errors():
            if path.is_dir():
                raise StoreError(f"{path} is a folder; a store is a file, such as {path / 'results.sqlite'}.")
            if write and not path.exists():
                _create_folder(path)
            elif not path.is_file():
                raise StoreError(f"there is no store at {path}; `apical bench --store {path}` makes one.")
            self.connection = self._connect()
            self._prepare()

    def _connect(self) -> sqlite3.Connection:
        """Open the file for writing or for reading, even where the folder is read-only."""
        if self.write:
            return _open(str(self.path), uri=False)
        if all(os.access(place, os.W_OK) for place in (self.path, self.path.absolute().parent)):
            # An ordinary connection that does not write. The last one to close removes the WAL files beside the database.
            connection = _open(str(self.path), uri=False)
            connection.execute("PRAGMA query_only = ON")
            return connection
        name = f"file:{quote(str(self.path.absolute()))}?mode=ro"
        try:
            connection = _open(name, uri=True)
            connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
        except sqlite3.OperationalError as error:
            # In a read-only folder, a reader cannot create the WAL files that readers share.
            if "unable to open" not in str(error) or Path(f"{self.path}-wal").exists():
                raise
            connection = _open(f"{name}&immutable=1", uri=True)
        return connection

    def _prepare(self) -> None:
        """Check that the file is a store of this version or an older one. Create the tables of a new one."""
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
        if self.write:
            self.connection.execute("PRAGMA journal_mode = WAL")
            self.connection.execute("PRAGMA synchronous = FULL")
            self.connection.execute("PRAGMA foreign_keys = ON")
            if empty:
                self._create_tables()
            elif version < SCHEMA_VERSION:
                self._upgrade()
        elif empty:
            raise StoreError(f"{self.path} is empty: no run was recorded in it.")

    def _create_tables(self) -> None:
        """Create the tables of a new store."""
        with self.transaction():
            if self.connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
                return  # another process was faster
            for statement in SCHEMA.split(";\n"):
                self.connection.execute(statement)
            self.connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
            self.connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")

    def _upgrade(self) -> None:
        """Upgrade the tables of an older version. Readers of this version can read them without that."""
        with self.transaction():
            # Another process may have been faster.
            version = self.connection.execute("PRAGMA user_version").fetchone()[0]
            for each in range(version, SCHEMA_VERSION):
                self.connection.execute(UPGRADES[each])
            self.connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")

    @contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """Run the body as one transaction: all of it is written, or nothing. Other writers wait until it ends."""
        with self._explain_errors():
            self.connection.execute("BEGIN IMMEDIATE")
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

    def close(self) -> None:
        self.connection.close()

    @contextmanager
    def _explain_errors(self) -> Iterator[None]:
        """Turn an error of SQLite into a StoreError that explains it."""
        try:
            yield
        except sqlite3.Error as error:
            raise StoreError(_explain(self.path, error)) from error


def _open(name: str, *, uri: bool) -> sqlite3.Connection:
    connection = sqlite3.connect(name, timeout=LOCK_TIMEOUT, isolation_level=None, uri=uri)
    connection.row_factory = sqlite3.Row
    return connection


def _create_folder(path: Path) -> None:
    try:
        path.absolute().parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StoreError(f"the folder of {path} cannot be made ({error.strerror}); choose another --store.") from error


EXPLANATIONS = {
    "locked": "{path} is locked by another program for more than {patience:.0f} seconds; try again when it has ended.",
    "readonly": "{path} cannot be written to: the file or its folder is read-only.",
    "unable to open": "{path} cannot be opened: its folder is missing, or this user may not write there.",
    "full": "the disk of {path} is full: what was recorded before is kept; make room and run the same command again.",
    "disk i/o": "the disk of {path} refused a read or a write ({error}): what was recorded before is kept; look for "
    "room on it and run the same command again.",
    "not a database": "{path} is not a store of results: it is no SQLite file; choose another path.",
    "malformed": "{path} is damaged ({error}); take a copy from a backup, or let `sqlite3 {path} .recover` save what "
    "it can.",
}


def _explain(path: Path, error: sqlite3.Error) -> str:
    """Return a sentence that explains an error of SQLite."""
    said = str(error).lower()
    for words, sentence in EXPLANATIONS.items():
        if words in said:
            return sentence.format(path=path, error=error, patience=LOCK_TIMEOUT)
    return f"{path} could not be used ({error})."
