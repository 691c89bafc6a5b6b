"""`python -m apical.bench`: run suites on a machine that has neither typer nor rich."""

import argparse
import sys
from pathlib import Path

from apical.bench import render, suites
from apical.bench.plan import Request, run_request
from apical.errors import INTERRUPTED, ApicalError


def main() -> None:
    given = _make_parser().parse_args()
    try:
        output = run_request(Request.from_command_line(**vars(given)))
    except ApicalError as error:
        sys.exit(f"apical: {error}")
    except KeyboardInterrupt:
        print("apical: interrupted; the same command goes on from here.", file=sys.stderr)
        sys.exit(INTERRUPTED)
    print("\n\n".join(render.format_text(table) for table in output.tables))
    if output.failed:
        sys.exit(1)


def _make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m apical.bench", description=__doc__)
    parser.add_argument("suite", nargs="?", default="digits", help=f"{', '.join(suites.list_names())}, or a file.toml")
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
