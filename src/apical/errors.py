"""The exceptions and warnings of apical. Each message is one sentence that names the cause and what would work."""

import re
import sys
import warnings


class ApicalError(ValueError):
    """Wrong input: a name, option, shape, value or file. The base class of all errors here.

    The message is one line, even if it shows a model or a tensor, whose own text has many.
    """

    def __init__(self, message: str = "") -> None:
        super().__init__(re.sub(r"\s*\n\s*", " ", message))


class UnsupportedError(ApicalError, TypeError):
    """A module or a kind of value that a rule cannot train."""


class DataError(ApicalError):
    """A data set that is missing, damaged or not what it claims to be."""


class CheckpointError(ApicalError):
    """A checkpoint that is damaged or belongs to another run."""


class WriteError(ApicalError):
    """A file that could not be written, for example because the disk is full or the folder read-only."""


class StoreError(ApicalError):
    """A store of results that cannot be read or written."""


class DivergenceError(ApicalError, ArithmeticError):
    """Training produced a loss that is not finite."""


class MissingExtraError(ApicalError, ImportError):
    """An optional package that is not installed."""


def check_whole_number(
    name: str, value: object, least: int = 1, error: type[ApicalError] = ApicalError, why: str = ""
) -> None:
    """Raise `error` unless the value is an int, and not a bool, of at least `least`; `why` ends the sentence."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise error(f"{name} is {value!r}, but must be a whole number of at least {least}{why}.")


def warn(message: str) -> None:
    """Warn at the line of the user's that called apical."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and str(frame.f_globals.get("__name__")).partition(".")[0] == "apical":
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level)


def describe_error(error: Exception) -> str:
    """Return the type of an error and the first line of its message.

    >>> describe_error(RuntimeError("out of memory\\nof the GPU"))
    'RuntimeError: out of memory'
    """
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"


INTERRUPTED = 130
"""The exit code that a shell expects of a program that Ctrl-C ended."""
