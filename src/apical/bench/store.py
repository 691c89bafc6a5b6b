"""The store of results: one SQLite file with a row for every run and a row for every epoch.

A run is identified by its settings and its seed: (`Declaration.key`, seed). Only runs that are missing are run, and
more seeds later are more rows. Several processes may share a file. A process claims a run before it trains it, all
missing seeds of a declaration at once, and a claim ends when its process ends. The column `status` is 'running' (there
are epochs but no result yet), 'done' or 'failed'. The column `owner` names the process that works on the run now. A
run that is done again keeps its old result until the new one is written.
"""

import hashlib
import json
import math
import sqlite3
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from apical.bench import code, owner
from apical.bench.database import Database
from apical.bench.declaration import KEYED, Declaration
from apical.bench.results import Result, round_values
from apical.engine.metrics import read_score
from apical.errors import StoreError
from apical.plausibility.recorded import parse_judgement

MAX_DEATHS = 3
"""How many workers a run may kill before it counts as failed."""
EPOCH_COLUMNS = ("loss", "accuracy", "test_loss", "test_accuracy", "seconds")
"""The measurements of an epoch that have their own column. The others are JSON, with six digits, in `more`."""
OUTCOME_COLUMNS = (
    *("together", "seconds_per_epoch", "peak_memory", "memory_kind", "code", "source", "apical", "torch"),
    *("python", "cuda", "device", "command", "verdict"),
)
"""The columns that a finished run fills in."""
VERSION_COLUMNS = ("apical", "source", "torch", "python", "cuda")
"""The columns that are called `versions` in a result file."""
STATE_COLUMNS = ("status", "owner", "heartbeat", "deaths", "started", "finished", "error")
"""The columns that say how far a run is and who works on it."""


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
    seconds: float | None = None
    """The time of all its epochs, in which the other seeds of the same run trained, too."""

    @property
    def old(self) -> bool:
        """Whether other code than the present one computed it."""
        return self.status != "running" and self.source != code.hash_source()

    @property
    def repeatable(self) -> bool:
        """Whether `redo` runs it again: it failed, or other code computed it."""
        return self.status == "failed" or self.old

    @property
    def active(self) -> bool:
        """Whether a living process works on it now."""
        return owner.is_alive(self.owner, self.heartbeat)


@dataclass(frozen=True)
class Outcome:
    """The result of training some seeds of a declaration: history, failures, time, memory and versions."""

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
        self.path, self.owner = Path(path), owner.make_owner(pool)
        self.database = Database(self.path, write=write)
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
        wanted = None if keys is None else set(keys)
        spent = "SELECT sum(seconds) FROM epochs WHERE run = runs.id"
        found = self.database.fetch_rows(f"SELECT *, ({spent}) AS seconds FROM runs ORDER BY id")
        return [self._parse_row(entry) for entry in found if wanted is None or entry["key"] in wanted]

    def history(self, row: Row) -> list[dict[str, Any]]:
        """Return the epochs of a run, as `fit` records them."""
        entries = self.database.fetch_rows("SELECT * FROM epochs WHERE run = ? ORDER BY epoch", (row.id,))
        return [self._parse_epoch(row.seed, entry) for entry in entries]

    def results(self, keys: Iterable[str] | None = None) -> list[Result]:
        """Return finished runs that have an accuracy, one result for all seeds of a declaration, device and code.

        Quick runs are left out.
        """
        groups: dict[tuple[Any, ...], list[Row]] = {}
        for row in self.runs(keys):
            if row.status != "running" and row.declaration.examples is None:
                groups.setdefault((row.key, row.device, row.code, row.torch), []).append(row)
        found = [self._make_result(sorted(group, key=lambda row: row.seed)) for group in groups.values()]
        return [r for r in found if r.accuracies and len(r.accuracies) + len(r.failed) == len(r.settings["seeds"])]

    def _make_result(self, rows: list[Row]) -> Result:
        """Return runs that differ only in their seeds as one result."""
        first = rows[0]
        settings = first.declaration.settings([row.seed for row in rows])
        histories = {row.seed: self.history(row) for row in rows}
        done = [row.seed for row in rows if row.status == "done"]
        return Result(
            settings=settings,
            accuracies=[
                score for seed in done if (score := compute_score(histories[seed], settings["protocol"])) is not None
            ],
            seconds_per_epoch=math.nan if first.seconds_per_epoch is None else first.seconds_per_epoch,
            history=sorted((e for h in histories.values() for e in h), key=lambda e: int(e["epoch"])),
            failed={str(row.seed): row.error or "" for row in rows if row.status == "failed"},
            command=first.command or "",
            verdict=first.verdict,
            device=first.device or "",
            versions={name: value for name in VERSION_COLUMNS if (value := getattr(first, name))},
        )

    def _parse_row(self, entry: sqlite3.Row) -> Row:
        """Return a row of the table `runs`, after checking the columns that hold JSON."""
        values = {name: entry[name] for name in entry.keys() if name not in ("rule", "model", "data")}  # noqa: SIM118
        self._parse_json(entry["declaration"], f"the declaration of run {entry['id']}", KEYED)
        if values.get("verdict") is not None:
            try:
                parse_judgement(values["verdict"])
            except ValueError as error:
                raise self._make_altered_error(f"the verdict of run {entry['id']}") from error
        return Row(**{**values, "declaration": Declaration(entry["declaration"])})

    def _parse_epoch(self, seed: int, entry: sqlite3.Row) -> dict[str, Any]:
        """Return a row of the table `epochs` as a row of history."""
        plain = {name: entry[name] for name in EPOCH_COLUMNS if entry[name] is not None}
        more = self._parse_json(entry["more"], f"epoch {entry['epoch']} of run {entry['run']}")
        return {"seed": seed, "epoch": entry["epoch"], **plain, **more}

    def _parse_json(self, text: str, what: str, names: Iterable[str] = ()) -> dict[str, Any]:
        """Parse a column that holds a JSON object and check that these names are in it."""
        try:
            values = json.loads(text)
        except ValueError:
            values = None
        if not isinstance(values, dict) or not values.keys() >= set(names):
            raise self._make_altered_error(what)
        return values

    def _make_altered_error(self, what: str) -> StoreError:
        return StoreError(f"{self.path} has a run that cannot be read: {what} was altered; take a copy from a backup.")

    # Claiming and writing.

    def claim(self, declaration: Declaration, seeds: Sequence[int], *, redo: str | None = None) -> list[int]:
        """Claim all of these seeds that are missing and that no process works on. Return the claimed ones.

        Missing are seeds that were never run, and seeds that another process left unfinished when it ended. With
        `redo`, a result of `current_timestamp`, so are seeds that failed, or that other code computed, before that
        time. No other process can claim them until they are finished or released, or this process dies. Runs of a
        worker of the same pool that died cannot be claimed before its death is recorded.
        """
        claimed, started = [], current_timestamp()
        with self.database.transaction() as connection:
            for seed in seeds:
                known = connection.execute(
                    "SELECT * FROM runs WHERE key = ? AND seed = ?", (declaration.key, seed)
                ).fetchone()
                if known is None:
                    self._insert(connection, declaration, seed, started=started)
                elif not _is_claimable(self._parse_row(known), redo) or self._awaits_death_record(known["owner"]):
                    continue
                else:
                    connection.execute(
                        "UPDATE runs SET owner = ?, heartbeat = ?, started = ? WHERE id = ?",
                        (
                            self.owner,
                            time.time(),
                            started if known["status"] == "running" else known["started"],
                            known["id"],
                        ),
                    )
                self._claim_times[declaration.key, seed] = started
                claimed.append(seed)
        return claimed

    def _awaits_death_record(self, held_by: str | None) -> bool:
        """Return whether a run was held by a worker of this pool, whose death its parent process will record."""
        own = owner.get_pool(self.owner)
        return own != "" and owner.get_pool(held_by) == own

    def _insert(self, connection: sqlite3.Connection, declaration: Declaration, seed: int, **values: Any) -> int:
        """Insert a run and return its id. By default it is running, and claimed by this process."""
        known = {
            "key": declaration.key,
            "seed": seed,
            "rule": declaration.rule,
            "model": declaration.model,
            "data": declaration.data,
            "declaration": declaration.text,
            "status": "running",
            "owner": self.owner,
            "heartbeat": time.time(),
            **values,
        }
        names, marks = ", ".join(known), ", ".join("?" * len(known))
        made = connection.execute(f"INSERT INTO runs ({names}) VALUES ({marks})", tuple(known.values()))
        return int(made.lastrowid or 0)

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
                    _insert_epoch(connection, run["id"], row)

    def finish(self, declaration: Declaration, seeds: Sequence[int], outcome: Outcome) -> None:
        """Write the results of claimed seeds in one transaction: done, or failed with the reason."""
        with self.database.transaction() as connection:
            for seed in seeds:
                run = self._get_claimed(connection, declaration, seed)
                failure = outcome.failed.get(seed)
                values = {
                    **{name: outcome.facts.get(name) for name in OUTCOME_COLUMNS},
                    "status": "done" if failure is None else "failed",
                    "error": failure,
                    "started": self._claim_times[declaration.key, seed],
                    "finished": current_timestamp(),
                    "owner": None,
                    "heartbeat": None,
                }
                marks = ", ".join(f"{name} = ?" for name in values)
                connection.execute(f"UPDATE runs SET {marks} WHERE id = ?", (*values.values(), run["id"]))
                connection.execute("DELETE FROM epochs WHERE run = ?", (run["id"],))
                for row in outcome.history:
                    if row["seed"] == seed:
                        _insert_epoch(connection, run["id"], row)

    def release(self, declaration: Declaration, seeds: Sequence[int]) -> None:
        """Give up claims on unfinished runs, so that any process can continue them."""
        with self.database.transaction() as connection:
            for seed in seeds:
                connection.execute(
                    "UPDATE runs SET owner = NULL, heartbeat = NULL WHERE key = ? AND seed = ? AND owner = ?",
                    (declaration.key, seed, self.owner),
                )

    def record_process_death(self, pid: int, why: str) -> int:
        """Record that a worker process of this machine died. Return how many runs it held."""
        with self.database.transaction() as connection:
            held = [
                entry
                for entry in connection.execute("SELECT * FROM runs WHERE owner IS NOT NULL").fetchall()
                if owner.get_pid(entry["owner"]) == pid and not self._parse_row(entry).active
            ]
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
        query = "SELECT * FROM runs WHERE key = ? AND seed = ? AND owner = ?"
        found: sqlite3.Row | None = connection.execute(query, (declaration.key, seed, self.owner)).fetchone()
        if found is None:
            raise LostClaimError(
                f"another runner took over seed {seed} of {declaration}, because this one gave no sign of life for "
                f"{owner.LEASE:.0f} seconds; its result stands."
            )
        return found

    def copy(self, other: "Store") -> int:
        """Copy the runs of another store into this one and return how many were copied.

        If both stores have a run, the one that is done is kept, or else the one that is here.
        """
        added = 0
        with self.database.transaction() as connection:
            for row in other.runs():
                known = connection.execute(
                    "SELECT id, status FROM runs WHERE key = ? AND seed = ?", (row.key, row.seed)
                ).fetchone()
                if known is not None and (known["status"] == "done" or row.status != "done"):
                    continue
                if known is not None:
                    connection.execute("DELETE FROM runs WHERE id = ?", (known["id"],))
                values = {name: getattr(row, name) for name in (*OUTCOME_COLUMNS, *STATE_COLUMNS)}
                run = self._insert(connection, row.declaration, row.seed, **values)
                for entry in other.history(row):
                    _insert_epoch(connection, run, entry)
                added += 1
        return added

    def import_result(self, result: Result) -> int:
        """Add the runs of a result file and return how many were added. Seeds that the store has are left alone."""
        declaration = Declaration.of_result(result.settings)
        added = 0
        with self.database.transaction() as connection:
            for seed in result.settings["seeds"]:
                known = "SELECT 1 FROM runs WHERE key = ? AND seed = ?"
                if connection.execute(known, (declaration.key, seed)).fetchone():
                    continue
                failure = result.failed.get(str(seed))
                versions = {name: result.versions.get(name) for name in VERSION_COLUMNS}
                run = self._insert(
                    connection,
                    declaration,
                    seed,
                    **versions,
                    owner=None,
                    heartbeat=None,
                    status="done" if failure is None else "failed",
                    error=failure,
                    together=len(result.settings["seeds"]),
                    seconds_per_epoch=result.seconds_per_epoch,
                    code=result.versions.get("apical"),
                    device=result.device,
                    command=result.command,
                    verdict=result.verdict,
                )
                for row in result.history:
                    if row["seed"] == seed:
                        _insert_epoch(connection, run, row)
                added += 1
        return added


def compute_score(history: list[dict[str, Any]], protocol: str) -> float | None:
    """Return a run's test accuracy in percent: of the last epoch, or of the best one under the paper's protocol."""
    accuracy = read_score(history, "test_accuracy", protocol)
    return None if accuracy is None else 100 * accuracy


def _is_claimable(row: Row, redo: str | None) -> bool:
    """Return whether an existing run may be claimed: it is unfinished, or `redo` runs it again."""
    if row.active:
        return False
    if row.status == "running" or redo is None:
        return row.status == "running"
    given_up = row.deaths > 0 and row.deaths % MAX_DEATHS == 0 and format_timestamp(row.heartbeat or 0.0) >= redo
    return (row.finished or "") < redo and row.repeatable and not given_up


def _record_death(connection: sqlite3.Connection, entry: sqlite3.Row, why: str) -> None:
    """Release a run that killed its worker, or mark it as failed if it has killed too many.

    A run that was being done again keeps its old result. `heartbeat` becomes the time of the death.
    """
    deaths = entry["deaths"] + 1
    connection.execute(
        "UPDATE runs SET owner = NULL, heartbeat = ?, deaths = ? WHERE id = ?", (time.time(), deaths, entry["id"])
    )
    if entry["status"] == "done":
        return
    last = deaths % MAX_DEATHS == 0
    times = "once" if deaths == 1 else f"{deaths} times"
    connection.execute(
        "UPDATE runs SET error = ?, status = ?, source = ? WHERE id = ?",
        (
            f"its worker died {times}, at last because {why}.",
            "failed" if last else entry["status"],
            code.hash_source() if last else entry["source"],
            entry["id"],
        ),
    )


def _insert_epoch(connection: sqlite3.Connection, run: int, row: dict[str, Any]) -> None:
    """Write one epoch of a run, or replace it."""
    more = {name: value for name, value in row.items() if name not in (*EPOCH_COLUMNS, "seed", "epoch")}
    connection.execute(
        "INSERT OR REPLACE INTO epochs VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
        (
            run,
            row["epoch"],
            *(row.get(name) for name in EPOCH_COLUMNS),
            json.dumps(round_values(more), separators=(",", ":")),
        ),
    )


def current_timestamp() -> str:
    """Return the present time as the store writes it."""
    return format_timestamp(time.time())


def format_timestamp(seconds: float) -> str:
    """Return a time of `time.time()` as the store writes it. Such timestamps sort as text."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="microseconds")


def get_checkpoint_folder(path: Path) -> Path:
    """Return the folder beside a store where unfinished runs have their checkpoints."""
    return path.with_name(path.name + ".checkpoints")


def get_checkpoint_path(path: Path, declaration: Declaration, seeds: Sequence[int]) -> Path:
    """Return the checkpoint file of some seeds of a declaration.

    Other seeds, or other code, have another file, because they are another computation.
    """
    digest = hashlib.sha256(f"{code.hash_source()} {list(seeds)}".encode()).hexdigest()[:8]
    return get_checkpoint_folder(path) / f"{declaration.key}-{digest}.safetensors"
