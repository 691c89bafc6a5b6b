"""How lines look: colour and symbol by the family of a rule, dashes by its variant."""

from typing import NamedTuple

from apical.core.registry import RULES, rule_names
from apical.report.groups import CONTROL

COLOURS = (
    "#808080", "#0269b7", "#1aab0c", "#58a366", "#f76104", "#ff5a65", "#ae78ee", "#87548a",
    "#15a1bc", "#8d5b0c", "#b904b2", "#646a36", "#b1465d", "#e863b8", "#0c6cff",
)  # fmt: skip
"""Colours of families: readable on white and on black, and different also for people who are red- or green-blind."""
DASHES = ("solid", "dashed", "dotted", "dashdot")
SYMBOLS = {
    "circle": "M10 5a4 4 0 1 0 8 0a4 4 0 1 0-8 0",
    "square": "M10.5 1.5h7v7h-7z",
    "diamond": "M14 .5L18.5 5L14 9.5L9.5 5z",
    "triangle-up": "M14 1L18.5 9h-9z",
    "triangle-down": "M14 9L18.5 1h-9z",
    "cross": "M12.5 1h3v2.5h2.5v3h-2.5V9h-3V6.5H10v-3h2.5z",
    "x": "M10 3l2-2l2 2l2-2l2 2l-2 2l2 2l-2 2l-2-2l-2 2l-2-2l2-2z",
    "star": "M14 .2l1.3 3.200l3.5.3l-2.7 2.3l.8 3.400l-2.9-1.8l-2.9 1.8l.8-3.400l-2.7-2.3l3.5-.3z",
}
"""Plotly's names of the symbols, and their outlines in a box of 28 × 10 as SVG paths."""


class Style(NamedTuple):
    """The look of a line, by two numbers: of its family (or layer, or setting) and of its place in the family."""

    family: int
    variant: int = 0

    @property
    def colour(self) -> str:
        return COLOURS[self.family % len(COLOURS)]

    @property
    def dash(self) -> str:
        return DASHES[self.variant % len(DASHES)]

    @property
    def symbol(self) -> str:
        return list(SYMBOLS)[self.family % len(SYMBOLS)]


def style_rule(rule: str) -> Style:
    """Return the style of a rule, the same in every chart. Rules that are not registered share the last family."""
    names = rule_names()
    families = list(dict.fromkeys(map(_get_family, names)))
    if rule not in names:
        return Style(len(families))
    family = _get_family(rule)
    return Style(families.index(family), [name for name in names if _get_family(name) == family].index(rule))


def _get_family(rule: str) -> str:
    """Return the module of a rule, since each family has its own; the control is a family by itself."""
    return CONTROL if rule == CONTROL else RULES[rule.partition(":")[0]].__module__
