"""Colours and dashes of lines, readable on white and on black."""

COLOURS = (
    *("#3a7fc1", "#cc6a10", "#2b9457", "#d2475f", "#8a69cf", "#178b99", "#c44f9b", "#7f8420", "#a3663c"),
    *("#6b7c93",),
)
DASHES = ("solid", "dashed", "dotted")


def colour(style: int) -> str:
    return COLOURS[style % len(COLOURS)]


def dash(style: int) -> str:
    """Return the dashes of a style. Lines of the same colour have different dashes."""
    return DASHES[style // len(COLOURS) % len(DASHES)]
