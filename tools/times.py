"""Make `src/apical/bench/times.json`, the measured times of epochs on a GPU from which `apical bench --dry-run` estimates.

    python tools/times.py FOLDER [--device 'NVIDIA H200']

It reads every perf table and store (SQLite) below the folder and keeps, for each rule, network, data
set, batch, precision and options, the median time of an epoch.
"""

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

import apical.bench
from apical.bench.declaration import Declaration
from apical.bench.estimate import EpochTime, count_examples, select_timing_settings
from apical.bench.store import Store
from apical.engine.settings import Settings
from apical.files import replace_atomically

FILE = Path(apical.bench.__file__).with_name("times.json")
PERF = {"mlp": ("mnist", 128), "cnn": ("cifar10", 64)}
"""The network, data and batch of `benchmarks/perf.py`; its four seeds train with the rules' own defaults."""
PERF_SEEDS = 4


def collect_times(folder: Path) -> list[EpochTime]:
    """Return the epoch times of all perf tables and stores below a folder."""
    found = []
    for path in sorted(folder.rglob("*.sqlite")):
        with Store(path, write=False) as store:
            found += [m for row in store.runs() if (m := EpochTime.from_row(row)) is not None]
    for path in sorted(folder.rglob("perf*.json")):
        found += _read_perf_table(json.loads(path.read_text("utf-8")))
    return found


def _read_perf_table(table: dict[str, Any]) -> list[EpochTime]:
    """Return the epoch times of a perf table, which has the time of a step of one of four seeds relative to autograd."""
    found = []
    for row in table["rows"]:
        data, batch = PERF[row["model"]]
        steps = -(-count_examples(data) // batch)
        step = row["autograd_ms"] * row["engine_4_seeds"] / 1000
        settings = {"rule": row["rule"], "model": row["model"], "data": data, "batch_size": batch, "seeds": (0,)}
        kind = select_timing_settings(Declaration.of(Settings(**settings)))
        found.append(EpochTime(table["device"], PERF_SEEDS, steps * step * PERF_SEEDS, 1, kind))
    return found


def compute_medians(found: list[EpochTime], device: str) -> dict[str, Any]:
    """Return the body of `times.json`: the median epoch time of each kind of run on one device."""
    kinds: dict[str, list[EpochTime]] = {}
    for one in found:
        if one.device == device:
            kinds.setdefault(json.dumps([one.alike, one.together], sort_keys=True), []).append(one)
    medians = [
        {**each[0].__dict__, "seconds": float(f"{statistics.median(m.seconds for m in each):.4g}")}
        for _, each in sorted(kinds.items())
    ]
    return {"command": "python tools/times.py results", "epochs": medians}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python tools/times.py", description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--device", default="NVIDIA H200")
    given = parser.parse_args()
    body = compute_medians(collect_times(given.folder), given.device)
    rows = ",\n  ".join(json.dumps(row) for row in body["epochs"])
    with replace_atomically(FILE) as temporary:
        temporary.write_text(f'{{"command": "{body["command"]}", "epochs": [\n  {rows}\n]}}\n', "utf-8")
    print(f"wrote {len(body['epochs'])} times of {given.device} to {FILE}")


if __name__ == "__main__":
    main()
