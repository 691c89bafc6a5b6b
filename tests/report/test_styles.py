"""No two rules look the same, and people who do not see red or green can tell them apart."""

from itertools import combinations

import numpy as np
import pytest

from apical.report import web
from apical.report.styles import COLOURS, DASHES, style_rule
from cases import EVERY

TO_XYZ = np.array(
    [[0.4124564, 0.3575761, 0.1804375], [0.2126729, 0.7151522, 0.072175], [0.0193339, 0.119192, 0.9503041]]
)
SEEN = {
    "all colours": np.eye(3),
    "no red": np.array(
        [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]
    ),
    "no green": np.array(
        [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.01182, 0.04294, 0.968881]]
    ),
}
"""What is left of linear RGB for people without these cones (Machado, Oliveira & Fernandes 2009)."""


def compute_lab(colour: str, seen: np.ndarray) -> np.ndarray:
    """CIE L*a*b* of a colour as somebody sees it."""
    parts = np.array([int(colour[k : k + 2], 16) / 255 for k in (1, 3, 5)])
    linear = np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)
    x, y, z = np.cbrt(TO_XYZ @ np.clip(seen @ linear, 0, 1) / [0.95047, 1, 1.08883])
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


def distance(one: str, other: str, who: str) -> float:
    return float(np.linalg.norm(compute_lab(one, SEEN[who]) - compute_lab(other, SEEN[who])))


def test_every_rule_looks_different() -> None:
    looks = {
        rule: (style.colour, style.dash, style.symbol) for rule in [*EVERY, "mine"] for style in [style_rule(rule)]
    }
    assert len(looks) == len(set(looks.values())) > 24


def test_a_family_shares_its_colour_and_its_variants_differ_in_dashes() -> None:
    styles = {rule: style_rule(rule) for rule in EVERY}
    dll = [styles[rule] for rule in EVERY if rule.startswith("dll")]
    assert {style.colour for style in dll} == {styles["dll"].colour}
    assert [style.dash for style in dll] == list(DASHES)
    assert styles["tp"].colour == styles["dtp"].colour != styles["bp"].colour != styles["readout"].colour
    assert len({style.colour for style in styles.values()}) == len(COLOURS)


@pytest.mark.parametrize(("who", "least"), [("all colours", 25), ("no red", 13), ("no green", 13)])
def test_colours_of_families_differ_for_everybody(who: str, least: float) -> None:
    """A distance of 2.3 is the least that people notice."""
    for one, other in combinations(COLOURS, 2):
        assert distance(one, other, who) > least, (one, other)


@pytest.mark.parametrize("who", SEEN)
def test_colours_of_the_criteria_differ_for_everybody(who: str) -> None:
    css = web._read_file("web.css")
    shades = [css.split(f"--kept-{kept}: ")[1][:7] for kept in web.SHADES]
    for one, other in combinations(shades, 2):
        assert distance(one, other, who) > 25, (one, other)
