"""The command line, one file per command. An error is one sentence and a non-zero exit code."""

import sys
from importlib import import_module
from typing import Any

from apical.commands import run_command

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
    run_command(
        lambda: load_app()(),
        "interrupted; what was written before stays; the same command goes on from there (train with --resume).",
    )
