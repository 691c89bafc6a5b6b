"""The command line: `apical train | bench | report | data`. Every error is one sentence and a non-zero exit code."""

import sys


def main() -> None:
    """The entry point: errors that apical foresees are printed as one line, without a traceback."""
    from apical.errors import ApicalError

    try:
        import rich  # noqa: F401
        import typer  # noqa: F401
    except ImportError as error:
        sys.exit(f"apical: the command line needs {error.name}: pip install 'apical[cli]' installs it.")
    from apical.commands import app

    try:
        app()
    except ApicalError as error:
        print(f"apical: {error}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        print(
            "apical: interrupted; what was written before stays, --resume goes on from there.",
            file=sys.stderr,
        )
        sys.exit(130)
