"""Kill a run of the bench at random moments, start it again, and see whether anything was lost.

    python tests/kills.py [--kills 20] [--longest 8] [--arguments 'digits --seeds 2']

runs a suite once without interruption and once with `--kills` kills (SIGKILL, at most `--longest` seconds after the
start), and compares the two stores: keys, states and every measurement but the times.
"""

import argparse
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from stores import command, content


def whole(store: Path, arguments: Sequence[object]) -> None:
    """Run a suite to its end."""
    subprocess.run(command(*arguments, "--store", store), check=True, capture_output=True)


def killed(store: Path, arguments: Sequence[object], moments: Sequence[float]) -> int:
    """Run a suite, killed after each of these times in turn, and then to its end; returns how often it was killed."""
    hits = 0
    for moment in moments:
        process = subprocess.Popen(
            command(*arguments, "--store", store), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        time.sleep(moment)
        hits += process.poll() is None
        process.kill()
        process.wait()
    whole(store, arguments)
    return hits


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--longest", type=float, default=8.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--arguments", default="digits")
    given = parser.parse_args()
    moments = [random.Random(given.seed + k).uniform(0, given.longest) for k in range(given.kills)]
    with tempfile.TemporaryDirectory() as folder:
        one, other = Path(folder) / "whole.sqlite", Path(folder) / "killed.sqlite"
        whole(one, given.arguments.split())
        hits = killed(other, given.arguments.split(), moments)
        same = content(one) == content(other)
        print(f"{hits} kills, {len(content(one))} runs: {'the same' if same else 'DIFFERENT'}")
    sys.exit(not same)


if __name__ == "__main__":
    main()
