"""The store of results: one SQLite file with a row for every run and a row for every epoch.

A run is identified by its settings and its seed: (`Declaration.key`, seed). Only runs that are missing are run, and
more seeds later are more rows. Several processes may share a file. A process claims a run before it trains it, all
missing seeds of a declaration at once, and a claim ends when its process ends. The column `status` is 'running' (there
are epochs but no result yet), 'done' or 'failed'. The column `owner` names the process that works on the run now. A
run that is done again keeps its old result until the new one is written.
"""

import json
import sqlite3
import time
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import MISSING, dataclass, field, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from apical.bench import provenance
from apical.bench.database import Database
from apical.bench.declaration import Declaration
from apical.bench.integrity import EPOCH_COLUMNS, EPOCHS, Epochs, check_run, list_columns, parse_epoch, seal
from apical.errors import StoreError

MAX_DEATHS = 3
"""How many workers a run may kill before it counts as failed."""
SECONDS = 2 + EPOCH_COLUMNS.index("seconds")
"""Where the time of an epoch is in a row of `EPOCHS`."""
OUTCOME_COLUMNS = (
    *("together", "seconds_per_epoch", "peak_memory", "memory_kind", "code", "source", "apical", "torch"),
    *("python", "cuda", "device", "command", "verdict"),
)
"""The columns that a finished run fills in."""


class LostClaimError(StoreError):
    """Another process took over a run. What this process computed is not written."""


@dataclass(frozen=True)
class Row:
    """One run: a declaration and a seed, and all columns of its row."""

    id: int
    key: str
    seed: int
    declaration: Declaration
    status: str
    owner: str | None
    heartbeat: float | None
    deaths: int
    together: int | None
    """How many replicas trained together. `seconds_per_epoch` is the time of all of them."""
    seconds_per_epoch: float | None
    peak_memory: int | None
    """In bytes. `memory_kind` says what was measured."""
    memory_kind: str | None
    started: str | None
    finished: str | None
    code: str | None
    source: str | None
    apical: str | None
    torch: str | None
    python: str | None
    cuda: str | None
    device: str | None
    command: str | None
    error: str | None
    verdict: str | None = None
    """The audit's verdict on a rule that is not built in, as `judge_own_rule` returns it."""
    revision: int = 1
    """The revision of the rule's results when it was computed."""
    epochs: Epochs = field(default=(), repr=False, compare=False)
    """Its epochs, as they were when it was read."""

    @property
    def seconds(self) -> float | None:
        """The time of all its epochs, in which the other seeds of the same run trained, too."""
        known = [epoch[SECONDS] for epoch in self.epochs if epoch[SECONDS] is not None]
        return sum(known) if known else None

    @property
    def old(self) -> bool:
        """Whether other code computed it: the revision of its rule has risen since."""
        return self.status != "running" and self.revision < provenance.get_revision(self.declaration.rule)

    @property
    def repeatable(self) -> bool:
        """Whether `redo` runs it again: it failed, or other code computed it."""
        return self.status == "failed" or self.old

    def is_final(self, redo: bool) -> bool:
        """Whether it has ended and is not run again."""
        return self.status != "running" and not (redo and self.repeatable)

    @property
    def active(self) -> bool:
        """Whether a living process works on it now."""
        return provenance.is_alive(self.owner, self.heartbeat)

    @property
    def state(self) -> str:
        """Its status, but 'unfinished' for a run without a result that no process works on."""
        return "unfinished" if self.status == "running" and not self.active else self.status


@dataclass(frozen=True)
class Outcome:
    """The result of training some seeds: `history` and `failed` as a `Fit` has them, and what else the store keeps."""

    history: list[dict[str, Any]]
    failed: dict[int, str]
    facts: dict[str, Any]
    """Values of `OUTCOME_COLUMNS`."""


class Store:
    """A store of results.

    Args:
        path: the SQLite file, which is created if it does not exist.
        write: False opens an existing file read-only.
        pool: the name of the worker pool that this process belongs to, if any.

    >>> import tempfile
    >>> from apical.engine.settings import Settings
    >>> folder = tempfile.TemporaryDirectory()
    >>> store = Store(Path(folder.name) / "results.sqlite")
    >>> one = Declaration.of(Settings("bp", "mlp", "digits"))
    >>> store.claim(one, [0, 1]), store.claim(one, [0, 1, 2])
    ([0, 1], [2])
    >>> [(row.seed, row.status) for row in store.runs()]
    [(0, 'running'), (1, 'running'), (2, 'running')]
    >>> store.close(); folder.cleanup()
    """

    def __init__(self, path: str | Path, *, write: bool = True, pool: str = "") -> None:
        self.path, self.owner = Path(path), provenance.make_owner(pool)
        self.database = Database(self.path, write=write)
        self.damaged = 0
        """How many runs could not be read the last time."""
        self._claim_times: dict[tuple[str, int], str] = {}
        """When this process claimed each run. A run that is done again keeps its old times until it is finished."""

    def close(self) -> None:
        self.database.close()

    def __enter__(self) -> "Store":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Reading.

    def runs(self, keys: Iterable[str] | None = None) -> list[Row]:
        """Return all runs, or those with these keys, in the order in which they were first claimed."""
        found = self.database.read_runs(None if keys is None else set(keys))
        rows = [None if read is None else _parse_row(*read) for read in found]
        self.damaged = rows.count(None)
        if self.damaged:
            count = "1 run is" if self.damaged == 1 else f"{self.damaged} runs are"
            advice = f"`apical results repair {self.path}` keeps the others."
            warnings.warn(f"{self.path}: {count} damaged and left out; {advice}", stacklevel=1)
        return [row for row in rows if row is not None]

    def list_unfinished_keys(self) -> set[str]:
        """Return the keys of runs that a process works on, that are not finished, or that took their workers down."""
        unfinished = "status = 'running' OR owner IS NOT NULL OR (status = 'failed' AND deaths > 0)"
        return {key for (key,) in self.database.fetch_rows(f"SELECT key FROM runs WHERE {unfinished}")}

    def history(self, row: Row) -> list[dict[str, Any]]:
        """Return the epochs of a run when it was read, as `fit` records them."""
        try:
            return [{"seed": row.seed, **parse_epoch(epoch)} for epoch in row.epochs]
        except ValueError as error:
            raise StoreError(f"{self.path} has a run that cannot be read, {row.key}: {error}.") from error

    # Claiming and writing.

    def claim(self, declaration: Declaration, seeds: Sequence[int], *, redo: str | None = None) -> list[int]:
        """Claim all of these seeds that are missing and that no process works on. Return the claimed ones.

        Missing are seeds that were never run, and seeds that another process left unfinished when it ended. With
        `redo`, a result of `format_timestamp`, so are seeds that failed, or that other code computed, before that
        time. No other process can claim them until they are finished or released, or this process dies. Runs of a
        worker of the same pool that died cannot be claimed before its death is recorded.
        """
        claimed, started = [], format_timestamp()
        with self.database.transaction() as connection:
            for seed in seeds:
                known = _find_run(connection, declaration.key, seed)
                if known is None:
                    self._insert(connection, declaration, seed, started=started)
                elif self._is_claimable(connection, known, redo) and not self._awaits_death_record(known["owner"]):
                    begun = started if known["status"] == "running" else known["started"]
                    _update(connection, known["id"], owner=self.owner, heartbeat=time.time(), started=begun)
                    seal(connection, [known["id"]])
                else:
                    continue
                self._claim_times[declaration.key, seed] = started
                claimed.append(seed)
        return claimed

    def _is_claimable(self, connection: sqlite3.Connection, entry: sqlite3.Row, redo: str | None) -> bool:
        """Return whether an existing run may be claimed: it is unfinished, or `redo` runs it again."""
        row = _parse_row(entry, connection.execute(f"{EPOCHS} WHERE run = ? ORDER BY epoch", (entry["id"],)).fetchall())
        if row is None:
            raise StoreError(
                f"seed {entry['seed']} of {entry['rule']} {entry['model']} {entry['data']} in {self.path} is damaged; after "
                f"`apical results repair {self.path}` it can be run again."
            )
        if row.active:
            return False
        if row.status == "running" or redo is None:
            return row.status == "running"
        given_up = row.deaths > 0 and row.deaths % MAX_DEATHS == 0 and format_timestamp(row.heartbeat or 0.0) >= redo
        return (row.finished or "") < redo and row.repeatable and not given_up

    def _awaits_death_record(self, held_by: str | None) -> bool:
        """Return whether a run was held by a worker of this pool, whose death its parent process will record."""
        own = provenance.get_pool(self.owner)
        return own != "" and provenance.get_pool(held_by) == own

    def _insert(self, connection: sqlite3.Connection, declaration: Declaration, seed: int, **values: Any) -> int:
        """Insert a run and return its id. By default it is running, and claimed by this process."""
        known = {
            **{name: getattr(declaration, name) for name in ("key", "rule", "model", "data")},
            **{"declaration": declaration.text, "seed": seed},
            **{"status": "running", "owner": self.owner, "heartbeat": time.time(), **values},
        }
        names, marks = ", ".join(known), ", ".join("?" * len(known))
        run = int(
            connection.execute(f"INSERT INTO runs ({names}) VALUES ({marks})", tuple(known.values())).lastrowid or 0
        )
        seal(connection, [run])
        return run

    def update_heartbeat(self) -> None:
        """Write that this process is alive to all runs that it has claimed."""
        with self.database.transaction() as connection:
            connection.execute("UPDATE runs SET heartbeat = ? WHERE owner = ?", (time.time(), self.owner))

    def record(self, declaration: Declaration, rows: Sequence[dict[str, Any]]) -> None:
        """Write epochs of claimed runs. A run that is done again keeps its old epochs until it is finished."""
        with self.database.transaction() as connection:
            for row in rows:
                run = self._get_claimed(connection, declaration, row["seed"])
                if run["status"] == "running":
                    self._insert_epochs(connection, run["id"], [row])

    def finish(self, declaration: Declaration, seeds: Sequence[int], outcome: Outcome) -> None:
        """Write the results of claimed seeds in one transaction: done, or failed with the reason."""
        with self.database.transaction() as connection:
            for seed in seeds:
                run = self._get_claimed(connection, declaration, seed)
                failure = outcome.failed.get(seed)
                facts = {name: outcome.facts.get(name) for name in OUTCOME_COLUMNS}
                facts |= {"status": "done" if failure is None else "failed", "error": failure}
                facts["revision"] = provenance.get_revision(declaration.rule)
                facts |= {"started": self._claim_times[declaration.key, seed], "finished": format_timestamp()}
                _update(connection, run["id"], **facts, owner=None, heartbeat=None)
                connection.execute("DELETE FROM epochs WHERE run = ?", (run["id"],))
                self._insert_epochs(connection, run["id"], [row for row in outcome.history if row["seed"] == seed])

    def _insert_epochs(self, connection: sqlite3.Connection, run: int, rows: Sequence[dict[str, Any]]) -> None:
        """Write epochs of a run, or replace them."""
        for row in rows:
            others = {name: value for name, value in row.items() if name not in (*EPOCH_COLUMNS, "seed", "epoch")}
            more = json.dumps(round_values(others), separators=(",", ":"))
            values = (run, row["epoch"], *(row.get(name) for name in EPOCH_COLUMNS), more)
            try:
                parse_epoch(values)
            except ValueError as error:
                raise StoreError(f"a result cannot be written to {self.path}: {error}.") from error
            connection.execute("INSERT OR REPLACE INTO epochs VALUES (?, ?, ?, ?, ?, ?, ?, ?)", values)
        seal(connection, [run])

    def release(self, declaration: Declaration, seeds: Sequence[int]) -> None:
        """Give up claims on unfinished runs, so that any process can continue them."""
        claims = [(declaration.key, seed, self.owner) for seed in seeds]
        with self.database.transaction() as connection:
            connection.executemany(
                "UPDATE runs SET owner = NULL, heartbeat = NULL WHERE key = ? AND seed = ? AND owner = ?", claims
            )

    def record_process_death(self, process: str, why: str) -> int:
        """Record that a worker died, of which `provenance.describe_process` gave this name. Return how many runs it held."""
        with self.database.transaction() as connection:
            claimed = connection.execute("SELECT * FROM runs WHERE owner IS NOT NULL").fetchall()
            own = [entry for entry in claimed if entry["owner"].startswith(process)]
            held = [entry for entry in own if not provenance.is_alive(entry["owner"], entry["heartbeat"])]
            for entry in held:
                _record_death(connection, entry, why)
        return len(held)

    def record_deaths(self, declaration: Declaration, seeds: Sequence[int], why: str) -> None:
        """Record that the worker which trained these claimed runs died."""
        with self.database.transaction() as connection:
            for seed in seeds:
                _record_death(connection, self._get_claimed(connection, declaration, seed), why)

    def _get_claimed(self, connection: sqlite3.Connection, declaration: Declaration, seed: int) -> sqlite3.Row:
        """Return a run that this process has claimed; raise LostClaimError if it no longer has."""
        found = _find_run(connection, declaration.key, seed)
        if found is None or found["owner"] != self.owner:
            raise LostClaimError(
                f"another runner took over seed {seed} of {declaration}, because this one gave no sign of life for "
                f"{provenance.LEASE:.0f} seconds; its result stands."
            )
        return found

    def copy(self, other: "Store") -> tuple[int, int]:
        """Copy the runs of another store into this one. Return how many were copied, and how many it has.

        If both stores have a run, the one that is done is kept, or else the one that is here.
        """
        added, rows = 0, other.runs()
        with self.database.transaction() as connection:
            for row in rows:
                history = other.history(row)
                if row.key != row.declaration.key:
                    raise StoreError(
                        f"{other.path} has a run, {row.key}, that is not the one that its settings declare."
                    )
                known = _find_run(connection, row.key, row.seed)
                if known is not None and (known["status"] == "done" or row.status != "done"):
                    continue
                if known is not None:
                    connection.execute("DELETE FROM runs WHERE id = ?", (known["id"],))
                apart = ("id", "key", "seed", "declaration", "epochs")
                values = {name: value for name, value in row.__dict__.items() if name not in apart}
                run = self._insert(connection, row.declaration, row.seed, **values)
                self._insert_epochs(connection, run, history)
                added += 1
        return added, len(rows)


def _parse_row(entry: sqlite3.Row, epochs: Epochs) -> Row | None:
    """Return a row of the table `runs`; None if it was damaged."""
    try:
        check_run(entry, epochs)
    except (ValueError, IndexError):  # a value was damaged, or the name of a column
        return None
    known = list_columns(entry)
    if any(column.name not in known and column.default is MISSING for column in fields(Row)):
        return None  # the name of a column that the checksum does not cover was damaged
    columns = {column.name for column in fields(Row)} & known  # a store of an older version has fewer
    values = {name: entry[name] for name in columns - {"declaration"}}
    return Row(**values, declaration=Declaration(entry["declaration"]), epochs=epochs)


def _record_death(connection: sqlite3.Connection, entry: sqlite3.Row, why: str) -> None:
    """Release a run that killed its worker, or mark it as failed if it has killed too many.

    A run that was being done again keeps its old result. `heartbeat` becomes the time of the death.
    """
    deaths = entry["deaths"] + 1
    values = {"owner": None, "heartbeat": time.time(), "deaths": deaths}
    if entry["status"] != "done":
        times = "once" if deaths == 1 else f"{deaths} times"
        values["error"] = f"its worker died {times}, at last because {why}."
        if deaths % MAX_DEATHS == 0:
            values |= {"status": "failed", "revision": provenance.get_revision(entry["rule"])}
    _update(connection, entry["id"], **values)
    seal(connection, [entry["id"]])


def _find_run(connection: sqlite3.Connection, key: str, seed: int) -> sqlite3.Row | None:
    found: sqlite3.Row | None = connection.execute(
        "SELECT * FROM runs WHERE key = ? AND seed = ?", (key, seed)
    ).fetchone()
    return found


def _update(connection: sqlite3.Connection, run: int, **values: Any) -> None:
    """Write some columns of a run."""
    marks = ", ".join(f"{name} = ?" for name in values)
    connection.execute(f"UPDATE runs SET {marks} WHERE id = ?", (*values.values(), run))


def round_values(value: Any) -> Any:
    """Round measurements to six digits, which halves the size of a store and is more precise than the measurements.

    >>> round_values({"alignment": [0.123456789, None, 3], "name": "bp"})
    {'alignment': [0.123457, None, 3], 'name': 'bp'}
    """
    return json.loads(json.dumps(value), parse_float=lambda digits: float(f"{float(digits):.6g}"))


def format_timestamp(seconds: float | None = None) -> str:
    """Return a time of `time.time()`, by default now, as the store writes it. Such timestamps sort as text."""
    return datetime.fromtimestamp(time.time() if seconds is None else seconds, UTC).isoformat(timespec="microseconds")
