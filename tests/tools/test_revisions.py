"""What each rule computes is what was recorded: a change of it raises the revision of its results."""

import json

import pytest

import apical
from tools.revisions import PATH, is_equal, measure_losses

RECORDED = json.loads(PATH.read_text("utf-8"))


def test_every_rule_has_a_revision() -> None:
    assert list(RECORDED) == apical.rule_names()
    assert all(entry["revision"] >= 1 for entry in RECORDED.values())


@pytest.mark.parametrize("rule", apical.rule_names())
def test_a_rule_computes_what_was_recorded(rule: str) -> None:
    assert is_equal(RECORDED[rule]["losses"], measure_losses(rule)), "run: python tools/revisions.py"


def test_losses_are_equal_up_to_rounding_alone() -> None:
    losses = RECORDED["dll"]["losses"]
    for factor, equal in ((1 + 1e-6, True), (1.001, False)):
        changed = {name: [factor * loss for loss in values] for name, values in losses.items()}
        assert is_equal(losses, changed) is equal
    assert not is_equal(losses, {"mlp": losses["mlp"]})
