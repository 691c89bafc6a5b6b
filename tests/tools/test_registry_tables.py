"""The table of the rules' page says of each rule what the registry, the paper and the rule itself say."""

import re
from collections.abc import Callable

import pytest
import torch
from torch import nn

import apical
from apical.core.registry import resolve
from apical.plausibility.criteria import format_verdicts, read_verdicts
from cases import EVERY
from pages import DOCS
from tools.pages.registry_tables import render_rules_table, replace_rules_table

PAGE = (DOCS / "rules" / "index.md").read_text("utf-8")


def test_the_table_of_rules_is_what_the_registry_gives() -> None:
    assert f"\n{render_rules_table()}\n" in PAGE, "run: make pages"
    assert replace_rules_table(PAGE) == PAGE


ROWS = {
    re.findall(r"`(\w+)`", row)[0]: [cell.strip() for cell in row.split("|")[1:-1]]
    for row in PAGE.splitlines()
    if row.startswith("| [`")
}
HEAD = ["rule", "C1 C2 C3", "plain model predicts", "networks", "variants", "source"]
NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "MLP": (lambda: nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)), (6,)),
    "CNN": (
        lambda: nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(8, 3)),
        (1, 6, 6),
    ),
    "Parallel": (
        lambda: nn.Sequential(apical.Parallel(nn.Linear(6, 3), nn.Linear(6, 2)), nn.Tanh(), nn.Linear(5, 3)),
        (6,),
    ),
    "Elman": (lambda: apical.Elman(nn.RNN(6, 5, batch_first=True), nn.Linear(5, 3)), (4, 6)),
}


def trains(rule: str, network: str) -> bool:
    build, shape = NETWORKS[network]
    labels = (7, 4) if network == "Elman" else (7,)
    try:
        learner = apical.make(rule, build(), input_shape=shape)
    except apical.ApicalError:
        return False
    learner.step(torch.rand(7, *shape), torch.randint(0, 3, labels), torch.optim.SGD(learner.param_groups(lr=0.1)))
    return True


def test_the_table_has_every_rule_and_variant_once() -> None:
    assert f"| {' | '.join(HEAD)} |" in PAGE
    assert list(ROWS) == list(dict.fromkeys(name.partition(":")[0] for name in EVERY))
    variants = {name: re.findall(r"`([\w:-]+)`", row[HEAD.index("variants")]) for name, row in ROWS.items()}
    assert [f for name, others in variants.items() for f in (name, *others)] == EVERY


@pytest.mark.parametrize("name", EVERY)
def test_the_networks_of_the_table_are_those_that_the_rule_trains(name: str) -> None:
    row = ROWS[name.partition(":")[0]]
    assert row[HEAD.index("networks")].split(", ") == [n for n in NETWORKS if trains(name, n)]


@pytest.mark.parametrize("name", EVERY)
def test_the_plain_model_predicts_where_the_table_says_so(name: str) -> None:
    torch.manual_seed(0)
    build, shape = NETWORKS["MLP"]
    model, x = build(), torch.rand(7, *shape)
    same = torch.equal(apical.make(name, model)(x), model(x))
    assert ROWS[name.partition(":")[0]][HEAD.index("plain model predicts")] == ("yes" if same else "no")


PAPER = {"bp": "✗✗✗", "fa": "✓✗✗", "local": "✗✓✗", "pc": "✗✓✗", "wp": "✓✓✗", "np": "✓✓✗", "dtp": "✓✓✗"}
PAPER |= dict.fromkeys(("hebb", "softhebb", "rstdp", "ff", "ep", "dll"), "✓✓✓")
"""C1 to C3 as the paper's main table prints them (its Hebbian learning is both `hebb` and `softhebb`)."""


def test_the_criteria_are_the_recorded_verdicts_and_the_papers_where_they_differ() -> None:
    for name, row in ROWS.items():
        measured = format_verdicts(read_verdicts()[name])
        differs = PAPER.get(name, measured) != measured
        assert row[HEAD.index("C1 C2 C3")] == (f"{measured} ≠ {PAPER[name]}" if differs else measured)
        assert row[-1] == resolve(name)[0].SOURCE


def test_every_rule_and_variant_has_a_law_on_the_page() -> None:
    laws = re.findall(r"^\| `([\w:-]+)` \|", PAGE.partition("## The laws")[2].partition("## What")[0], re.MULTILINE)
    assert laws == EVERY
