"""The store: one SQLite file with a row for every run and one for every epoch.

A run is known by what was asked for and its seed: (`Declaration.key`, seed). Asking again does only what is missing;
more seeds later are more rows. Several processes may share a file: a run is claimed before it is worked on, all
missing seeds of a declaration at once, and a claim ends with its runner. `status` says what a row holds: 'running'
(epochs, but no result yet), 'done' or 'failed'; `owner` says who works on it now, if anybody does. A row that is
being redone keeps its old result until the new one is there.
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
from apical.bench.results import Result, short
from apical.engine.metrics import judged
from apical.errors import StoreError
from apical.plausibility.recorded import parse_judgement

MOST_DEATHS = 3
"""How often a run may take its worker down before it is called failed."""
PLAIN = ("loss", "accuracy", "test_loss", "test_accuracy", "seconds")
"""The measurements of an epoch that have a column of their own; `more` has the others, as JSON of six digits."""
OUTCOME = (
    *("together", "seconds_per_epoch", "peak_memory", "memory_kind", "code", "source", "apical", "torch"),
    *("python", "cuda", "device", "command", "verdict"),
)
VERSIONS = ("apical", "source", "torch", "python", "cuda")
"""The columns that a result in a file has as its versions."""
STATE = ("status", "owner", "heartbeat", "deaths", "started", "finished", "error")


class LostClaimError(StoreError):
    """Another runner took a run over; what this one computed is not written."""


@dataclass(frozen=True)
class Row:
    """One run: one declaration and one seed."""

    id: int
    key: str
    seed: int
    declaration: Declaration
    status: str
    owner: str | None
    heartbeat: float | None
    deaths: int
    together: int | None
    """How many seeds trained at once; `seconds_per_epoch` is the time of all of them."""
    seconds_per_epoch: float | None
    peak_memory: int | None
    """In bytes; `memory_kind` says of what."""
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
    """The time of all its epochs, which the seeds that trained together share."""

    @property
    def old(self) -> bool:
        """Whether it was computed by other code than this."""
        return self.status != "running" and self.source != code.source()

    @property
    def repeatable(self) -> bool:
        """Whether it is done again where that is asked for: it failed, or other code computed it."""
        return self.status == "failed" or self.old

    @property
    def active(self) -> bool:
        """Whether somebody works on it now."""
        return owner.alive(self.owner, self.heartbeat)


@dataclass(frozen=True)
class Outcome:
    """What a team of seeds that trained together left: rows of history, failures, time, memory, versions."""

    history: list[dict[str, Any]]
    failed: dict[int, str]
    facts: dict[str, Any]
    """Values of the columns `OUTCOME`."""


class Store:
    """A store of results; `write=False` opens one for reading alone, `pool` is the pool of workers that this runner is
    one of.

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
        self.path, self.owner = Path(path), owner.new(pool)
        self.base = Database(self.path, write=write)
        self._began: dict[tuple[str, int], str] = {}
        """When this runner claimed what it holds: a run that has a result keeps that one's times until the end."""

    def close(self) -> None:
        self.base.close()

    def __enter__(self) -> "Store":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Reading.

    def runs(self, keys: Iterable[str] | None = None) -> list[Row]:
        """Every run, or those of these declarations, in the order in which they were first claimed."""
        wanted = None if keys is None else set(keys)
        spent = "SELECT sum(seconds) FROM epochs WHERE run = runs.id"
        found = self.base.rows(f"SELECT *, ({spent}) AS seconds FROM runs ORDER BY id")
        return [self._row(entry) for entry in found if wanted is None or entry["key"] in wanted]

    def history(self, row: Row) -> list[dict[str, Any]]:
        """A run's epochs, as `fit` records them."""
        entries = self.base.rows("SELECT * FROM epochs WHERE run = ? ORDER BY epoch", (row.id,))
        return [self._epoch(row.seed, entry) for entry in entries]

    def results(self, keys: Iterable[str] | None = None) -> list[Result]:
        """Finished runs that have an accuracy, as results: one for all seeds of a declaration, machine and code.

        Quick runs are none.
        """
        teams: dict[tuple[Any, ...], list[Row]] = {}
        for row in self.runs(keys):
            if row.status != "running" and row.declaration.examples is None:
                teams.setdefault((row.key, row.device, row.code, row.torch), []).append(row)
        found = [self._result(sorted(team, key=lambda row: row.seed)) for team in teams.values()]
        return [
            r for r in found if r.accuracies and len(r.accuracies) + len(r.failed) == len(r.settings["seeds"])
        ]

    def _result(self, team: list[Row]) -> Result:
        first = team[0]
        settings = first.declaration.settings([row.seed for row in team])
        histories = {row.seed: self.history(row) for row in team}
        done = [row.seed for row in team if row.status == "done"]
        return Result(
            settings=settings,
            accuracies=[
                score
                for seed in done
                if (score := score_of(histories[seed], settings["protocol"])) is not None
            ],
            seconds_per_epoch=math.nan if first.seconds_per_epoch is None else first.seconds_per_epoch,
            history=sorted((e for h in histories.values() for e in h), key=lambda e: int(e["epoch"])),
            failed={str(row.seed): row.error or "" for row in team if row.status == "failed"},
            command=first.command or "",
            verdict=first.verdict,
            device=first.device or "",
            versions={name: value for name in VERSIONS if (value := getattr(first, name))},
        )

    def _row(self, entry: sqlite3.Row) -> Row:
        values = {name: entry[name] for name in entry.keys() if name not in ("rule", "model", "data")}  # noqa: SIM118
        self._table(entry["declaration"], f"the declaration of run {entry['id']}", KEYED)
        if values.get("verdict") is not None:
            try:
                parse_judgement(values["verdict"])
            except ValueError as error:
                raise self._altered(f"the verdict of run {entry['id']}") from error
        return Row(**{**values, "declaration": Declaration(entry["declaration"])})

    def _epoch(self, seed: int, entry: sqlite3.Row) -> dict[str, Any]:
        plain = {name: entry[name] for name in PLAIN if entry[name] is not None}
        more = self._table(entry["more"], f"epoch {entry['epoch']} of run {entry['run']}")
        return {"seed": seed, "epoch": entry["epoch"], **plain, **more}

    def _table(self, text: str, what: str, names: Iterable[str] = ()) -> dict[str, Any]:
        """What a column has as JSON, with these names in it."""
        try:
            values = json.loads(text)
        except ValueError:
            values = None
        if not isinstance(values, dict) or not values.keys() >= set(names):
            raise self._altered(what)
        return values

    def _altered(self, what: str) -> StoreError:
        return StoreError(
            f"{self.path} has a run that cannot be read: {what} was altered; take a copy from a backup."
        )

    # Working.

    def claim(self, declaration: Declaration, seeds: Sequence[int], *, redo: str | None = None) -> list[int]:
        """Take all of these seeds that are missing and that nobody works on; returns them.

        Missing is what was never run, and what a runner left unfinished when it ended; with `redo`, a time of `now`,
        also what failed or other code computed before that time. Nobody else can claim them until they are finished or
        released, or their owner dies. What a worker of one's own pool held when it died waits until that is recorded.
        """
        taken, moment = [], now()
        with self.base.transaction() as base:
            for seed in seeds:
                known = base.execute(
                    "SELECT * FROM runs WHERE key = ? AND seed = ?", (declaration.key, seed)
                ).fetchone()
                if known is None:
                    self._insert(base, declaration, seed, started=moment)
                elif not _wanted(self._row(known), redo) or self._unburied(known["owner"]):
                    continue
                else:
                    base.execute(
                        "UPDATE runs SET owner = ?, heartbeat = ?, started = ? WHERE id = ?",
                        (
                            self.owner,
                            time.time(),
                            moment if known["status"] == "running" else known["started"],
                            known["id"],
                        ),
                    )
                self._began[declaration.key, seed] = moment
                taken.append(seed)
        return taken

    def _unburied(self, held_by: str | None) -> bool:
        own = owner.pool_of(self.owner)
        return own != "" and owner.pool_of(held_by) == own

    def _insert(self, base: sqlite3.Connection, declaration: Declaration, seed: int, **values: Any) -> int:
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
        made = base.execute(f"INSERT INTO runs ({names}) VALUES ({marks})", tuple(known.values()))
        return int(made.lastrowid or 0)

    def beat(self) -> None:
        """A sign of life for everything that this runner holds."""
        with self.base.transaction() as base:
            base.execute("UPDATE runs SET heartbeat = ? WHERE owner = ?", (time.time(), self.owner))

    def record(self, declaration: Declaration, rows: Sequence[dict[str, Any]]) -> None:
        """Write down epochs of runs that this runner holds; a run that has a result keeps that one's until the end."""
        with self.base.transaction() as base:
            for row in rows:
                run = self._mine(base, declaration, row["seed"])
                if run["status"] == "running":
                    _write_epoch(base, run["id"], row)

    def finish(self, declaration: Declaration, seeds: Sequence[int], outcome: Outcome) -> None:
        """The results of seeds that this runner holds, all at once: done, or failed with the reason."""
        with self.base.transaction() as base:
            for seed in seeds:
                run = self._mine(base, declaration, seed)
                failure = outcome.failed.get(seed)
                values = {
                    **{name: outcome.facts.get(name) for name in OUTCOME},
                    "status": "done" if failure is None else "failed",
                    "error": failure,
                    "started": self._began[declaration.key, seed],
                    "finished": now(),
                    "owner": None,
                    "heartbeat": None,
                }
                marks = ", ".join(f"{name} = ?" for name in values)
                base.execute(f"UPDATE runs SET {marks} WHERE id = ?", (*values.values(), run["id"]))
                base.execute("DELETE FROM epochs WHERE run = ?", (run["id"],))
                for row in outcome.history:
                    if row["seed"] == seed:
                        _write_epoch(base, run["id"], row)

    def release(self, declaration: Declaration, seeds: Sequence[int]) -> None:
        """Give runs back unfinished: whoever comes next goes on with them."""
        with self.base.transaction() as base:
            for seed in seeds:
                base.execute(
                    "UPDATE runs SET owner = NULL, heartbeat = NULL WHERE key = ? AND seed = ? AND owner = ?",
                    (declaration.key, seed, self.owner),
                )

    def bury(self, pid: int, why: str) -> int:
        """Record that a worker process of this machine died; returns how many runs it held."""
        with self.base.transaction() as base:
            held = [
                entry
                for entry in base.execute("SELECT * FROM runs WHERE owner IS NOT NULL").fetchall()
                if owner.pid_of(entry["owner"]) == pid and not self._row(entry).active
            ]
            for entry in held:
                _died(base, entry, why)
        return len(held)

    def died(self, declaration: Declaration, seeds: Sequence[int], why: str) -> None:
        """Record that runs which this runner holds took down the worker that it had given them to."""
        with self.base.transaction() as base:
            for seed in seeds:
                _died(base, self._mine(base, declaration, seed), why)

    def _mine(self, base: sqlite3.Connection, declaration: Declaration, seed: int) -> sqlite3.Row:
        question = "SELECT * FROM runs WHERE key = ? AND seed = ? AND owner = ?"
        found: sqlite3.Row | None = base.execute(question, (declaration.key, seed, self.owner)).fetchone()
        if found is None:
            raise LostClaimError(
                f"another runner took over seed {seed} of {declaration}, because this one gave no sign of life for "
                f"{owner.LEASE:.0f} seconds; its result stands."
            )
        return found

    def copy(self, other: "Store") -> int:
        """Add the runs of another store; of two of one declaration and seed, the one that is done, or else the first."""
        added = 0
        with self.base.transaction() as base:
            for row in other.runs():
                known = base.execute(
                    "SELECT id, status FROM runs WHERE key = ? AND seed = ?", (row.key, row.seed)
                ).fetchone()
                if known is not None and (known["status"] == "done" or row.status != "done"):
                    continue
                if known is not None:
                    base.execute("DELETE FROM runs WHERE id = ?", (known["id"],))
                values = {name: getattr(row, name) for name in (*OUTCOME, *STATE)}
                run = self._insert(base, row.declaration, row.seed, **values)
                for entry in other.history(row):
                    _write_epoch(base, run, entry)
                added += 1
        return added

    def take(self, result: Result) -> int:
        """Add a result that was written as a file; seeds that are in the store already are left alone."""
        declaration = Declaration.of_result(result.settings)
        added = 0
        with self.base.transaction() as base:
            for seed in result.settings["seeds"]:
                known = "SELECT 1 FROM runs WHERE key = ? AND seed = ?"
                if base.execute(known, (declaration.key, seed)).fetchone():
                    continue
                failure = result.failed.get(str(seed))
                versions = {name: result.versions.get(name) for name in VERSIONS}
                run = self._insert(
                    base,
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
                        _write_epoch(base, run, row)
                added += 1
        return added


def score_of(history: list[dict[str, Any]], protocol: str) -> float | None:
    """A run's test accuracy in percent: at its last epoch, or at the best one under the paper's protocol."""
    accuracy = judged(history, "test_accuracy", protocol)
    return None if accuracy is None else 100 * accuracy


def _wanted(row: Row, redo: str | None) -> bool:
    """Whether a row that exists is to be worked on by whoever asks now."""
    if row.active:
        return False
    if row.status == "running" or redo is None:
        return row.status == "running"
    given_up = row.deaths > 0 and row.deaths % MOST_DEATHS == 0 and written(row.heartbeat or 0.0) >= redo
    return (row.finished or "") < redo and row.repeatable and not given_up


def _died(base: sqlite3.Connection, entry: sqlite3.Row, why: str) -> None:
    """Free a run again, unless it has taken too many workers down: then it is failed. One that has a result, and was
    only to be done again, keeps it; when it last killed, its heartbeat says."""
    deaths = entry["deaths"] + 1
    base.execute(
        "UPDATE runs SET owner = NULL, heartbeat = ?, deaths = ? WHERE id = ?",
        (time.time(), deaths, entry["id"]),
    )
    if entry["status"] == "done":
        return
    last = deaths % MOST_DEATHS == 0
    times = "once" if deaths == 1 else f"{deaths} times"
    base.execute(
        "UPDATE runs SET error = ?, status = ?, source = ? WHERE id = ?",
        (
            f"its worker died {times}, at last because {why}.",
            "failed" if last else entry["status"],
            code.source() if last else entry["source"],
            entry["id"],
        ),
    )


def _write_epoch(base: sqlite3.Connection, run: int, row: dict[str, Any]) -> None:
    more = {name: value for name, value in row.items() if name not in (*PLAIN, "seed", "epoch")}
    base.execute(
        "INSERT OR REPLACE INTO epochs VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
        (
            run,
            row["epoch"],
            *(row.get(name) for name in PLAIN),
            json.dumps(short(more), separators=(",", ":")),
        ),
    )


def now() -> str:
    return written(time.time())


def written(seconds: float) -> str:
    """A time as a store writes it: such times sort as text."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="microseconds")


def checkpoints_of(path: Path) -> Path:
    """The folder beside a store where unfinished runs keep their checkpoints."""
    return path.with_name(path.name + ".checkpoints")


def checkpoint_of(path: Path, declaration: Declaration, seeds: Sequence[int]) -> Path:
    """The checkpoint of a team of seeds. It is theirs alone: another team, or other code, is another computation."""
    team = hashlib.sha256(f"{code.source()} {list(seeds)}".encode()).hexdigest()[:8]
    return checkpoints_of(path) / f"{declaration.key}-{team}.safetensors"
