"""Words of a command line that mean lists or values."""

import json
from collections.abc import Callable, Sequence
from typing import Any

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
    names = [name for text in given or () for name in text.split(",") if name]
    if given and not names:
        raise ApicalError("a list of names is empty; leave the option out for all of them.")
    return names or None


def parse_options(pairs: Sequence[str], flag: str = "--option") -> dict[str, Any]:
    """`theta_std=0.05` as a keyword, for each of several.

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
    """Numbers, true, false and none as such; a list, or a text in double quotes, as JSON has it; the rest as text."""
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


def seeds_text(seeds: Sequence[int]) -> str:
    """Seeds as `parse_seeds` reads them: a number alone would be a count.

    >>> seeds_text([3]), seeds_text([0, 1])
    ('3,', '0,1')
    """
    return ",".join(map(str, seeds)) + ("," if len(seeds) == 1 else "")


def value_text(value: Any) -> str:
    """The text that `parse_value` reads as this value.

    >>> value_text(0.05), value_text([0.9, 0.99]), value_text("paper"), value_text("3")
    ('0.05', '[0.9, 0.99]', 'paper', '"3"')
    """
    plain = isinstance(value, str) and parse_value(value) == value
    return str(value) if plain or isinstance(value, int | float | None) else json.dumps(value)
