"""`python -m apical.bench`: run suites on a machine that has neither typer nor rich."""

import argparse
from typing import Any

from apical.bench.declaration import Request, list_flags
from apical.bench.export import format_text
from apical.bench.workers import run_request
from apical.commands import run_command


def main() -> None:
    run_command(_run, "interrupted; the same command goes on from here.")


def _run() -> None:
    """Run what the command line asks for and print the tables; the exit code is 1 if a run failed."""
    tables, failed = run_request(Request.from_command_line(**vars(_make_parser().parse_args())))
    print("\n\n".join(format_text(table) for table in tables))
    if failed:
        raise SystemExit(1)


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
