"""`python -m apical.bench`: the bench where neither typer nor rich is installed, on a bare machine with a GPU, say."""

import argparse
import sys
from pathlib import Path

from apical.bench import render, suites
from apical.bench.plan import Request, answer
from apical.cli import INTERRUPTED
from apical.errors import ApicalError


def main() -> None:
    given = _parser().parse_args()
    try:
        made = answer(Request.of_words(**vars(given)))
    except ApicalError as error:
        sys.exit(f"apical: {error}")
    except KeyboardInterrupt:
        print("apical: interrupted; the same command goes on from here.", file=sys.stderr)
        sys.exit(INTERRUPTED)
    print("\n\n".join(render.text(table) for table in made.tables))
    if made.failed:
        sys.exit(1)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m apical.bench", description=__doc__)
    parser.add_argument(
        "suite", nargs="?", default="digits", help=f"{', '.join(suites.names())}, or a file.toml"
    )
    parser.add_argument("--store", type=Path, default=Path("results.sqlite"))
    for name in ("rules", "models", "data"):
        parser.add_argument(f"--{name}", action="append", help=f"only these {name}, separated by commas")
    parser.add_argument("--seeds", help="how many, or which: 4, or 0,2,5")
    parser.add_argument("--epochs", type=int)
    parser.add_argument("--defaults", type=Path, help="settings over those of defaults.toml")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--limit", "--limit-seconds", dest="limit", type=float, metavar="SECONDS")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--together", type=int, default=1, help="networks that may train as one run")
    parser.add_argument("--ray", nargs="?", const=True, default=False, metavar="ADDRESS")
    for flag in ("quick", "redo", "dry-run"):
        parser.add_argument(f"--{flag}", action="store_true")
    return parser


if __name__ == "__main__":
    main()
