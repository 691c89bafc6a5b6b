"""Stores for the tests: declarations and outcomes made by hand, and the command that fills a real one."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from apical.bench.cells import METRICS
from apical.bench.declaration import Declaration
from apical.bench.integrity import seal
from apical.bench.store import Outcome, Row, Store
from apical.engine.settings import Settings

SOURCES = os.pathsep.join(entry for entry in sys.path if entry)


def declared(rule: str = "bp", model: str = "mlp", data: str = "mnist", **settings: Any) -> Declaration:
    return Declaration.of(Settings(rule, model, data, **settings))


def history(seed: int, accuracies: Sequence[float], **more: Any) -> list[dict[str, Any]]:
    """Epochs with these test accuracies, in percent."""
    return [
        {
            "seed": seed,
            "epoch": epoch,
            "loss": 1.0 / epoch,
            "accuracy": accuracy / 100,
            "test_loss": 2.0 / epoch,
            "test_accuracy": accuracy / 100,
            "seconds": 0.5,
            **more,
        }
        for epoch, accuracy in enumerate(accuracies, 1)
    ]


def outcome(curves: dict[int, Sequence[float]], failed: dict[int, str] | None = None, **facts: Any) -> Outcome:
    rows = [row for seed, curve in curves.items() for row in history(seed, curve)]
    known = {"together": len(curves), "seconds_per_epoch": 0.5, "device": "abacus", "command": "apical train"}
    return Outcome(rows, failed or {}, {**known, **facts})


def fill(store: Store, declaration: Declaration, scores: Sequence[float], **facts: Any) -> None:
    """Seeds 0, 1, … that ended with these accuracies."""
    seeds = range(len(scores))
    assert store.claim(declaration, seeds) == list(seeds)
    curves = {seed: [score - 1, score] for seed, score in zip(seeds, scores, strict=True)}
    store.finish(declaration, seeds, outcome(curves, **facts))


def alter(store: Store, statement: str, *values: Any) -> None:
    """Change a store behind its back, with the right checksums: as another version might have written it."""
    with store.database.transaction() as base:
        base.execute(statement, values)
        seal(base, [run for (run,) in base.execute("SELECT id FROM runs").fetchall()])


class Result(NamedTuple):
    """All seeds of a rule in a store."""

    settings: dict[str, Any]
    accuracies: list[float]
    """In percent, of the last epoch of each finished seed; of the best one under the paper's protocol."""
    history: list[dict[str, Any]]
    failed: dict[int, str | None]
    command: str | None
    statuses: set[str]


def results_in(folder: Path) -> dict[str, Result]:
    """What `apical train --out FOLDER` wrote, by rule."""
    with Store(folder / "results.sqlite", write=False) as store:
        by_rule: dict[str, list[Row]] = {}
        for row in store.runs():
            by_rule.setdefault(row.declaration.rule, []).append(row)
        return {rule: _merge_seeds(rows, store) for rule, rows in by_rule.items()}


def _merge_seeds(rows: list[Row], store: Store) -> Result:
    settings = rows[0].declaration.settings([row.seed for row in rows])
    scores = [
        METRICS["accuracy"].read(store.history(row), settings["protocol"]) for row in rows if row.status == "done"
    ]
    epochs = [entry for row in rows for entry in store.history(row)]
    return Result(
        settings,
        [score for score in scores if score is not None],
        sorted(epochs, key=lambda entry: int(entry["epoch"])),
        {row.seed: row.error for row in rows if row.status == "failed"},
        rows[0].command,
        {row.status for row in rows},
    )


def content(path: Path) -> dict[tuple[str, int], Any]:
    """All that a store says, by key, but for times, memory and who did it."""
    with Store(path, write=False) as store:
        return {
            (row.key, row.seed): (
                row.status,
                row.declaration,
                row.error,
                row.together,
                [{k: v for k, v in entry.items() if k != "seconds"} for entry in store.history(row)],
            )
            for row in store.runs()
        }


def command(*arguments: object) -> list[str]:
    """`python -m apical.bench` with what the tests import from."""
    script = f"import sys; sys.path[:0] = {SOURCES.split(os.pathsep)!r}; import runpy; sys.argv[0] = 'bench'; "
    return [
        sys.executable,
        "-c",
        script + "runpy.run_module('apical.bench', run_name='__main__')",
        *map(str, arguments),
    ]
