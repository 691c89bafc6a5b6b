"""The command line: `apical train | bench | report | data`. Every error is one sentence and a non-zero exit code."""

import sys

INTERRUPTED = 130
"""What a shell expects of a program that Ctrl-C ended."""


def main() -> None:
    """The entry point: errors that apical foresees are printed as one line, without a traceback."""
    from apical.errors import ApicalError

    try:
        import rich  # noqa: F401
        import typer  # noqa: F401
    except ImportError as error:
        sys.exit(f"apical: the command line needs {error.name}: pip install 'apical[cli]' installs it.")
    try:
        from apical.commands import app

        app()
    except ApicalError as error:
        print(f"apical: {error}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(_interrupted())
    except SystemExit as end:  # typer turns Ctrl-C into this code, and says nothing
        sys.exit(_interrupted() if end.code == INTERRUPTED else end.code)


def _interrupted() -> int:
    print(
        "apical: interrupted; what was written before stays; the same command goes on from there (train with --resume).",
        file=sys.stderr,
    )
    return INTERRUPTED
