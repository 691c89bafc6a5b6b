"""Parse and format values of command-line options: seeds, lists of names, and NAME=VALUE pairs."""

import json
from collections.abc import Callable, Sequence
from typing import Any

from apical.errors import ApicalError


def parse_seeds(text: str) -> int | list[int]:
    """Parse seeds: `4` means four seeds (0 to 3), `1,5,7` these three, and `7,` only seed 7."""
    try:
        return [int(part) for part in text.rstrip(",").split(",")] if "," in text else int(text)
    except ValueError:
        raise ApicalError(f"--seeds {text!r} is neither a number nor a list such as 0,1,2.") from None


def parse_names(given: Sequence[str] | None) -> list[str] | None:
    """Return names that are separated by commas, in one text or several; None if there is none.

    >>> parse_names(["bp,fa", "dll"]), parse_names([])
    (['bp', 'fa', 'dll'], None)
    """
    names = [name for text in given or () for name in text.split(",") if name]
    if given and not names:
        raise ApicalError("a list of names is empty; leave the option out for all of them.")
    return names or None


def parse_options(pairs: Sequence[str], flag: str = "--option") -> dict[str, Any]:
    """Parse pairs such as `theta_std=0.05` into keywords.

    >>> parse_options(["theta_std=0.05", "betas=[0.9, 0.99]", "scale=paper"])
    {'theta_std': 0.05, 'betas': [0.9, 0.99], 'scale': 'paper'}
    """
    options: dict[str, Any] = {}
    for pair in pairs:
        name, equals, text = pair.partition("=")
        if not equals or not name:
            raise ApicalError(f"{flag} {pair!r} is not NAME=VALUE.")
        if name in options:
            raise ApicalError(f"{flag} gives {name!r} twice; give it once.")
        options[name] = parse_value(text)
    return options


def parse_value(text: str) -> Any:
    """Parse a value: a number, true, false, none, a JSON list, object or string; anything else is text."""
    words = {"true": True, "false": False, "none": None}
    if text.lower() in words:
        return words[text.lower()]
    readers: list[Callable[[str], Any]] = [int, float]
    if text.startswith(("[", "{", '"')):
        readers.append(json.loads)
    for read in readers:
        try:
            return read(text)
        except ValueError:
            continue
    return text


def format_seeds(seeds: Sequence[int]) -> str:
    """Return seeds as text that `parse_seeds` reads. A single seed needs a comma, since a plain number is a count.

    >>> format_seeds([3]), format_seeds([0, 1])
    ('3,', '0,1')
    """
    return ",".join(map(str, seeds)) + ("," if len(seeds) == 1 else "")


def format_value(value: Any) -> str:
    """Return the text that `parse_value` reads as this value.

    >>> format_value(0.05), format_value([0.9, 0.99]), format_value("paper"), format_value("3")
    ('0.05', '[0.9, 0.99]', 'paper', '"3"')
    """
    plain = isinstance(value, str) and parse_value(value) == value
    return str(value) if plain or isinstance(value, int | float | None) else json.dumps(value)
