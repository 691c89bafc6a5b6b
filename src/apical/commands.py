"""What both command lines do with errors: one sentence for each that is foreseen, and the exit code."""

import io
import re
import sys
from collections.abc import Callable
from typing import NoReturn

from apical.errors import INTERRUPTED, ApicalError
from apical.printing import print_error


def run_command(command: Callable[[], object], on_interrupt: str) -> NoReturn:
    """Run a command and end the process with its exit code. `on_interrupt` says what Ctrl-C leaves behind."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal without ✓ gets a question mark
    code = _run(command)
    if code == INTERRUPTED:
        print_error(on_interrupt)
    try:
        sys.stdout.flush()
    except OSError as error:
        code = _report_os_error(error)
    sys.exit(code)


def _run(command: Callable[[], object]) -> int | str | None:
    """Run a command and return its exit code. What is wrong is printed, but for an interruption."""
    try:
        command()
    except SystemExit as end:  # typer ends so, also after Ctrl-C, and says nothing
        return end.code
    except KeyboardInterrupt:
        return INTERRUPTED
    except ApicalError as error:
        print_error(error)
    except OSError as error:
        return _report_os_error(error)
    except (RuntimeError, MemoryError) as error:
        said = str(error)
        if not isinstance(error, MemoryError) and "allocate" not in said:
            raise
        wanted = re.search(r"[Tt]ried to allocate ([\d.]+ ?\w+)", said)
        print_error(f"there is not enough memory{f' ({wanted[1]} were asked for)' if wanted else ''}.")
    else:
        return 0
    return 1


def _report_os_error(error: OSError) -> int:
    """Report what the system refused, such as printing to a full disk, and drop what is still to be printed."""
    where = f"{error.filename}: " if error.filename else ""
    print_error(f"{where}{error.strerror or error}.")
    sys.stdout = io.StringIO()
    return 1
