"""The command line, one file per command. An error is one sentence and a non-zero exit code."""

import io
import sys


def main() -> None:
    """The entry point: errors that apical foresees are printed as one line, without a traceback."""
    from apical.errors import INTERRUPTED, ApicalError

    try:
        import rich  # noqa: F401
        import typer  # noqa: F401
    except ImportError as error:
        sys.exit(f"apical: the command line needs {error.name}: pip install 'apical[cli]' installs it.")
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal without ✓ gets a question mark
    try:
        from apical.cli.commands import app

        app()
    except ApicalError as error:
        print(f"apical: {error}", file=sys.stderr)
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
    print(f"apical: {where}{error.strerror or error}.", file=sys.stderr)
    sys.stdout = io.StringIO()
    return 1


def _report_interruption() -> int:
    """Say what Ctrl-C leaves behind, and return the exit code."""
    from apical.errors import INTERRUPTED

    print(
        "apical: interrupted; what was written before stays; the same command goes on from there (train with --resume).",
        file=sys.stderr,
    )
    return INTERRUPTED
