"""`python -m apical.bench`: run suites on a machine that has neither typer nor rich."""

import argparse
import sys
from typing import Any

from apical.bench.declaration import Request, list_flags
from apical.bench.export import format_text
from apical.bench.workers import run_request
from apical.errors import INTERRUPTED, ApicalError
from apical.printing import print_error


def main() -> None:
    given = _make_parser().parse_args()
    try:
        tables, failed = run_request(Request.from_command_line(**vars(given)))
    except ApicalError as error:
        print_error(error)
        sys.exit(1)
    except KeyboardInterrupt:
        print_error("interrupted; the same command goes on from here.")
        sys.exit(INTERRUPTED)
    print("\n\n".join(format_text(table) for table in tables))
    if failed:
        sys.exit(1)


def _make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m apical.bench", description=__doc__)
    suite, *flags = list_flags()
    parser.add_argument(suite.name, nargs="?", default=suite.default, help=suite.help)
    for flag in flags:
        how: dict[str, Any] = {"type": flag.kind}
        if flag.kind is bool:
            how = {"action": "store_true"}
        elif flag.kind == list[str]:
            how = {"action": "append"}
        elif flag.name == "ray":
            how = {"nargs": "?", "const": "local", "metavar": "ADDRESS"}
        parser.add_argument(*flag.options, dest=flag.name, default=flag.default, help=flag.help, **how)
    return parser


if __name__ == "__main__":
    main()
