"""The exceptions of apical. Each message is one sentence that names the cause and what would work."""


class ApicalError(ValueError):
    """Wrong input: a name, option, shape, value or file. The base class of all errors here."""


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


INTERRUPTED = 130
"""The exit code that a shell expects of a program that Ctrl-C ended."""
