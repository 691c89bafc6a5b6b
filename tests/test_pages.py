"""The guide keeps its word: the Python of its pages runs, in order, as it is, and prints what they show."""

import re
from pathlib import Path

import pytest
from torch import nn

import apical
from cases import EVERY, mostly_slow
from pages import DOCS, accuracies, blocks, output_of

pytest.importorskip("sklearn")


@pytest.mark.parametrize("name", mostly_slow(["index", "your-own-network"], ["your-own-network"]))
def test_every_python_block_of_the_guide_runs_and_prints_what_the_page_shows(name: str, tmp_path: Path) -> None:
    page = DOCS / f"{name}.md"
    printed = output_of(page, tmp_path)
    reached = accuracies(printed)
    assert reached
    assert min(reached) > 80
    rest = printed
    for shown in blocks("text", page=page):
        assert shown in rest, f"{page.name} shows, and its code does not print (here):\n{shown}\n{rest}"
        rest = rest.partition(shown)[2]


def test_the_rules_that_refuse_credit_are_those_that_the_guide_names() -> None:
    said = re.search(r"\((.*?) take several optimiser steps", (DOCS / "index.md").read_text("utf-8"))
    assert said is not None
    several = [
        name
        for name in EVERY
        if len(apical.make(name, nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))).phases) > 1
    ]
    assert sorted(re.findall(r"`([\w:]+)`", said[1])) == sorted(several)
