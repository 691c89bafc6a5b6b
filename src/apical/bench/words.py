"""Words of a command line that mean lists."""

from collections.abc import Sequence

from apical.errors import ApicalError


def parse_seeds(text: str) -> int | list[int]:
    """`4` is the seeds 0 to 3; `1,5,7` is those three; `7,` is seed 7 alone."""
    try:
        return [int(part) for part in text.rstrip(",").split(",")] if "," in text else int(text)
    except ValueError:
        raise ApicalError(f"--seeds {text!r} is neither a number nor a list such as 0,1,2.") from None


def parse_names(given: Sequence[str] | None) -> list[str] | None:
    """Names separated by commas, in one word or several; None where there is none.

    >>> parse_names(["bp,fa", "dll"]), parse_names([])
    (['bp', 'fa', 'dll'], None)
    """
    return [name for text in given or () for name in text.split(",") if name] or None
