"""Whether the runs of a store are what was written: a checksum of each run with its epochs, and the types of all values."""

import json
import math
import sqlite3
import struct
import zlib
from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any

from apical.files import parse_json
from apical.plausibility.criteria import parse_judgement

EPOCH_COLUMNS = ("loss", "accuracy", "test_loss", "test_accuracy", "seconds")
"""The measurements of an epoch that have their own column. The others are JSON, with six digits, in `more`."""
EPOCHS = f"SELECT run, epoch, {', '.join(EPOCH_COLUMNS)}, more FROM epochs"
NUMBERS = ("seed", "deaths", "together", "peak_memory", "revision", "seconds_per_epoch")
"""The columns of a run that are numbers."""
TEXTS = (
    *("key", "rule", "model", "data", "declaration", "status", "memory_kind", "started", "finished", "code", "source"),
    *("apical", "torch", "python", "cuda", "device", "command", "error", "verdict"),
)
"""The columns of a run that are text. With `NUMBERS`, all that a checksum covers: not who works on the run now."""
REQUIRED = ("key", "seed", "rule", "model", "data", "declaration", "status", "deaths")
DECLARED: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(("rule", "model", "data", "optimizer", "schedule", "protocol", "loss", "precision"), (str,)),
    **dict.fromkeys(("epochs", "batch_size"), (int,)),
    **dict.fromkeys(("lr", "label_smoothing"), (int, float)),
    **dict.fromkeys(("options", "optimizer_options"), (dict,)),
    **{"clip": (int, float, type(None)), "alignment": (bool,)},
}
"""The types of the settings that every declaration has."""
_PACKED = struct.Struct(f"<q{len(EPOCH_COLUMNS)}d")

Epochs = Sequence[tuple[Any, ...]]
"""Rows of the query `EPOCHS` of one run, in order."""


def compute_checksum(run: sqlite3.Row, epochs: Epochs) -> str | None:
    """Return the checksum of a run and its epochs, as they are read from the file; None if a value has a wrong type."""
    known = {name: value for name in (*NUMBERS, *TEXTS) if (value := run[name]) is not None}
    try:
        checksum = zlib.crc32(json.dumps(known, sort_keys=True).encode())
        for _, epoch, *numbers, more in epochs:
            plain = (math.nan if number is None else number for number in numbers)
            checksum = zlib.crc32(_PACKED.pack(epoch, *plain) + more.encode(), checksum)
    except (TypeError, ValueError, AttributeError, struct.error):
        return None
    return f"{checksum:08x}"


def list_columns(entry: sqlite3.Row) -> set[str]:
    """Return the names of a row's columns, which SQLite finds whatever their case."""
    return _to_lower_case(tuple(entry.keys()))


@cache
def _to_lower_case(names: tuple[str, ...]) -> set[str]:
    return {name.lower() for name in names}


def seal(connection: sqlite3.Connection, runs: Iterable[int]) -> None:
    """Write the checksums of these runs, after they were changed."""
    for run in runs:
        entry = connection.execute("SELECT * FROM runs WHERE id = ?", (run,)).fetchone()
        if entry is None or not list_columns(entry) >= {*NUMBERS, *TEXTS}:
            raise sqlite3.DatabaseError(f"malformed: run {run} or one of its columns is missing")
        epochs = connection.execute(f"{EPOCHS} WHERE run = ? ORDER BY epoch", (run,)).fetchall()
        connection.execute("UPDATE runs SET checksum = ? WHERE id = ?", (compute_checksum(entry, epochs), run))


def check_run(entry: sqlite3.Row, epochs: Epochs) -> None:
    """Raise ValueError unless a run is what was written and has values that everything here can use."""
    names = list_columns(entry)
    if "checksum" in names:  # a store of an older version, which is only read, has none
        checksum = compute_checksum(entry, epochs)
        if checksum is None or checksum != entry["checksum"]:
            raise ValueError("its checksum is not that of its contents")
    else:
        for epoch in epochs:
            parse_epoch(epoch)
    for kind, columns in ((int | float | None, (*NUMBERS, "heartbeat")), (str | None, (*TEXTS, "owner"))):
        for name in columns:
            if name in names and (not isinstance(entry[name], kind) or (name in REQUIRED and entry[name] is None)):
                raise ValueError(f"its {name} has a wrong type")
    declaration = parse_json(entry["declaration"])
    for name, types in DECLARED.items():
        if not isinstance(declaration, dict) or name not in declaration or not isinstance(declaration[name], types):
            raise ValueError(f"its declaration has no valid {name}")
    if "verdict" in names and entry["verdict"] is not None:
        parse_judgement(entry["verdict"])


def parse_epoch(entry: tuple[Any, ...]) -> dict[str, Any]:
    """Return an epoch as a row of history, without its seed, or raise ValueError."""
    _, epoch, *numbers, text = entry
    more = parse_json(text) if isinstance(text, str) else None
    if not isinstance(more, dict) or not isinstance(epoch, int):
        raise ValueError("an epoch was altered")
    known = {name: value for name, value in zip(EPOCH_COLUMNS, numbers, strict=True) if value is not None}
    for name, value in {**known, **more}.items():
        if not isinstance(value, int | float | None) and (name in known or not isinstance(value, dict | list)):
            raise ValueError(f"{name} of epoch {epoch} is no number")
    return {"epoch": epoch, **known, **more}
