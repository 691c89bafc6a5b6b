"""What apical says when it cannot go on: always one sentence that names the cause and what would work."""


class ApicalError(ValueError):
    """Bad input: a wrong name, option, shape, value or file."""


class UnsupportedError(ApicalError, TypeError):
    """A module, or a kind of value, that a rule cannot train."""


class DataError(ApicalError):
    """A data set that is missing, damaged or not what it claims to be."""


class CheckpointError(ApicalError):
    """A checkpoint that is damaged or belongs to another run."""


class WriteError(ApicalError):
    """A file that could not be written: a full disk, a folder that is read-only."""


class StoreError(ApicalError):
    """A store of results that cannot be read or written."""


class DivergenceError(ApicalError, ArithmeticError):
    """Training produced a loss that is not finite."""


class MissingExtraError(ApicalError, ImportError):
    """An optional package that is not installed."""
