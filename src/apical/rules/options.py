"""What a rule's options must be, each said in one sentence."""

import math
from typing import Any

from apical.errors import ApicalError


def is_number(value: object) -> bool:
    """A finite number, and not a truth value."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def require_positive(**values: Any) -> None:
    """Refuse a setting that is given and not a positive number."""
    for name, value in values.items():
        if value is not None and not (is_number(value) and value > 0):
            raise ApicalError(f"{name} is {value!r}, but must be a positive number.")


def require_not_negative(**values: Any) -> None:
    """Refuse a setting that is given and not a number from 0 up."""
    for name, value in values.items():
        if value is not None and not (is_number(value) and value >= 0):
            raise ApicalError(f"{name} is {value!r}, but must not be negative.")


def require_between(low: float, high: float, **values: Any) -> None:
    """Refuse what does not lie between two values."""
    for name, value in values.items():
        if not (is_number(value) and low < value < high):
            what = f"lie between {low} and {high}" if math.isfinite(high) else "be a number"
            raise ApicalError(f"{name} is {value!r}, but must {what}.")


def require_whole(least: int = 1, **values: Any) -> None:
    """Refuse what is given and not a whole number of at least `least`."""
    for name, value in values.items():
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < least):
            raise ApicalError(f"{name} is {value!r}, but must be a whole number of at least {least}.")


def require_bool(**values: Any) -> None:
    """Refuse a switch that is neither on nor off."""
    for name, value in values.items():
        if not isinstance(value, bool):
            raise ApicalError(f"{name} is {value!r}, but must be True or False.")


def require_one_of(known: tuple[str, ...], **values: Any) -> None:
    """Refuse a word that is not one of those known."""
    for name, value in values.items():
        if value not in known:
            raise ApicalError(f"{name} is {value!r}, but must be one of {', '.join(known)}.")
