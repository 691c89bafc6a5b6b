"""The command line: `apical train | bench | report | sample | data`. An error is one sentence and a non-zero exit code."""

import io
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
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal without ✓ gets a question mark
    try:
        from apical.commands import app

        app()
    except ApicalError as error:
        print(f"apical: {error}", file=sys.stderr)
        sys.exit(1)
    except OSError as error:
        sys.exit(_refused(error))
    except KeyboardInterrupt:
        sys.exit(_interrupted())
    except SystemExit as end:  # typer turns Ctrl-C into this code, and says nothing
        code = _interrupted() if end.code == INTERRUPTED else end.code
        try:
            sys.stdout.flush()
        except OSError as error:
            code = _refused(error)
        sys.exit(code)


def _refused(error: OSError) -> int:
    """What the system would not do, such as to print on a full disk: what is left to be printed is let go."""
    where = f"{error.filename}: " if error.filename else ""
    print(f"apical: {where}{error.strerror or error}.", file=sys.stderr)
    sys.stdout = io.StringIO()
    return 1


def _interrupted() -> int:
    print(
        "apical: interrupted; what was written before stays; the same command goes on from there (train with --resume).",
        file=sys.stderr,
    )
    return INTERRUPTED
