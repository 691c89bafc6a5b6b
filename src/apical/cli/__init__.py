"""The command line, one file per command. An error is one sentence and a non-zero exit code."""

import io
import sys
from importlib import import_module
from typing import Any

from apical.errors import INTERRUPTED, ApicalError
from apical.printing import print_error

COMMANDS = ("train", "tune", "sample", "audit", "bench", "report", "results", "data")
"""The files of the commands, in the order in which `apical --help` lists them."""


def load_app() -> Any:
    """Import all commands and return the typer app that has them."""
    for name in COMMANDS:
        import_module(f"apical.cli.{name}")
    return import_module("apical.cli.root").app


def main() -> None:
    """The entry point: errors that apical foresees are printed as one line, without a traceback."""
    try:
        import rich  # noqa: F401
        import typer  # noqa: F401
    except ImportError as error:
        sys.exit(f"apical: the command line needs {error.name}: pip install 'apical[cli]' installs it.")
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal without ✓ gets a question mark
    try:
        load_app()()
    except ApicalError as error:
        print_error(error)
        sys.exit(1)
    except OSError as error:
        sys.exit(_report_os_error(error))
    except KeyboardInterrupt:
        sys.exit(_report_interruption())
    except SystemExit as end:  # typer turns Ctrl-C into this code, and says nothing
        code = _report_interruption() if end.code == INTERRUPTED else end.code
        try:
            sys.stdout.flush()
        except OSError as error:
            code = _report_os_error(error)
        sys.exit(code)


def _report_os_error(error: OSError) -> int:
    """Report what the system refused, such as printing to a full disk, and drop what is still to be printed."""
    where = f"{error.filename}: " if error.filename else ""
    print_error(f"{where}{error.strerror or error}.")
    sys.stdout = io.StringIO()
    return 1


def _report_interruption() -> int:
    """Say what Ctrl-C leaves behind, and return the exit code."""
    print_error(
        "interrupted; what was written before stays; the same command goes on from there (train with --resume)."
    )
    return INTERRUPTED
