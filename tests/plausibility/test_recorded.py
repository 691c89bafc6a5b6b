"""Recorded verdicts: they are what the audit measures now, and tables show them without running it."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import apical
from apical import report
from apical.bench import run
from apical.bench.export import export
from apical.bench.store import Store
from apical.core.learner import Claims
from apical.plausibility.criteria import Judgement, compare_with_paper, find_judgement, read_verdicts
from apical.plausibility.judge import judge_own_rule
from cases import EVERY
from stores import declared, fill

FAILED = "ValueError: it takes larger networks"


@pytest.fixture
def own_rules() -> Iterator[None]:
    """Three rules of one's own: one that transports weights, one that the audit cannot run, one with an option."""
    known = dict(apical.RULES)

    class Copying(apical.Backpropagation):
        NAME = "copying"

    class Failing(apical.Backpropagation):
        NAME = "failing"

        def update(self, *inputs: Any) -> apical.Update:
            if self.network.layers[0].synapse.weight_shape == (5, 6):  # the network of the audit
                raise ValueError("it takes larger networks\nthan this")
            return super().update(*inputs)

    class Choosing(apical.Backpropagation):
        NAME = "choosing"

        def __init__(self, model: nn.Sequential, *, only_last: bool = False, **common: Any) -> None:
            super().__init__(model, **common)
            self.only_last = only_last

        def touches(self, name: str) -> bool:
            return not self.only_last or name.startswith("model.4.")

    yield
    apical.RULES.clear()
    apical.RULES.update(known)


def test_every_rule_has_a_recorded_verdict() -> None:
    """That it is the audit's is a test of the audit."""
    assert set(read_verdicts()) == set(EVERY)


@pytest.mark.parametrize("rule", [rule for rule in EVERY if rule.startswith("dll")])
def test_what_the_paper_says_of_a_rule_it_says_of_the_rules_variants(rule: str) -> None:
    """The paper's own rule meets all three criteria there."""
    assert compare_with_paper(rule, Claims(True, True, False)) == "✓✓✗ ≠ ✓✓✓"
    assert compare_with_paper(rule, Claims(True, True, True)) == "✓✓✓"


@pytest.mark.usefixtures("own_rules")
def test_a_rule_of_ones_own_is_audited_with_its_options_and_only_once(monkeypatch: pytest.MonkeyPatch) -> None:
    assert judge_own_rule("bp", {}) is None
    assert find_judgement("copying", [judge_own_rule("copying", {})]).criteria == (False, True, False)
    assert find_judgement("choosing", [judge_own_rule("choosing", {})]).criteria == (False, True, False)
    readout = judge_own_rule("choosing", {"only_last": True})
    assert find_judgement("choosing", [readout]).criteria == (True, True, True)
    monkeypatch.setattr("apical.plausibility.judge.audit_rule", None)
    assert judge_own_rule("choosing", {"only_last": True}) == readout


@pytest.mark.usefixtures("own_rules")
def test_an_audit_that_fails_says_why() -> None:
    text = judge_own_rule("failing", {})
    assert find_judgement("failing", [text]) == Judgement(problem=FAILED)


def test_of_several_verdicts_the_last_one_stands_and_none_is_no_verdict() -> None:
    stored = ['{"problem": "x"}', None, '{"c1": true, "c2": false, "c3": true}', None]
    assert find_judgement("mine", stored) == Judgement(Claims(True, False, True))
    assert find_judgement("mine", [None]) == Judgement()


SUITE = """title = "Own"
[[runs]]
rules = ["bp", "copying", "failing"]
models = ["mlp"]
data = ["digits"]
"""


@pytest.mark.usefixtures("own_rules")
def test_the_bench_stores_the_verdict_and_every_table_shows_it_without_an_audit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    suite, path = tmp_path / "own.toml", tmp_path / "s.sqlite"
    suite.write_text(SUITE)
    run(str(suite), store=path, quick=True, progress=False)
    with Store(path, write=False) as store:
        stored = {row.declaration.rule: row.verdict for row in store.runs()}
    assert stored["bp"] is None
    assert json.loads(str(stored["copying"])) == {"c1": False, "c2": True, "c3": False}
    assert json.loads(str(stored["failing"])) == {"problem": FAILED}

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("a table runs the audit")

    for place in ("judge.audit_rule", "tracer.Tracer.__enter__"):
        monkeypatch.setattr(f"apical.plausibility.{place}", refuse)
    (table,) = run(str(suite), store=path, quick=True, progress=False)
    assert {row[0]: row[1] for row in table.rows} == {"bp": "✗✓✗ ≠ ✗✗✗", "copying": "✗✓✗", "failing": "?"}
    assert f"? The audit of failing failed: {FAILED}" in table.notes
    with Store(path, write=False) as store:
        latex = str(export(store, "latex"))
    assert f"? The audit of failing failed: {FAILED}" in latex
    page = tmp_path / "s.html"
    report.write(path, page)
    assert f"the audit failed: {FAILED}" in page.read_text("utf-8")


@pytest.mark.parametrize("text", ["{", "[1]", '{"c1": true}', '{"problem": "x", "c1": true}'])
def test_a_run_whose_verdict_was_altered_is_left_out(text: str, tmp_path: Path) -> None:
    with Store(tmp_path / "s.sqlite") as store:
        fill(store, declared(), [90.0], verdict=text)
        with pytest.warns(UserWarning, match="1 run is damaged and left out"):
            assert store.runs() == []
