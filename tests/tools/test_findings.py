"""The finding and the table of choices: rules are chosen by what they reached and by their measured criteria."""

import re
from functools import cache

import pytest

from apical.bench import suites
from apical.bench.declaration import Request
from apical.bench.store import Store
from apical.bench.suites import list_jobs
from apical.plausibility.criteria import read_verdicts
from pages import DOCS
from stores import fill
from tools.pages.findings import CHOICES, FAITHFUL, PLACE, render_choices, render_finding, select_rules
from tools.pages.notes import Notes
from tools.pages.rule_tables import Cells
from tools.pages.section import read_cells

SCORES = {"readout": 50.0, "bp": 80.0, "fa": 68.0, "dll": 67.0, "sign": 79.0, "hebb": 49.0}
"""`sign` transports weights, so it is not the best rule without."""


def cells_of(store: Store) -> Cells:
    return cache(lambda suite: read_cells(suites.load(suite), store, Notes()))


def put(store: Store, scores: dict[str, float]) -> None:
    suite, model, data = PLACE
    for rule, score in scores.items():
        jobs = list_jobs(suites.load(suite), Request(models=[model], data=[data]))
        (job,) = [job for job in jobs if job.rule == rule]
        assert job.declaration is not None
        fill(store, job.declaration, [score - 0.1, score, score, score + 0.1])


def test_the_finding_has_the_best_rules_and_whether_they_beat_the_control(store: Store) -> None:
    put(store, SCORES)
    transport, dll, faithful = render_finding(cells_of(store))
    assert "the best rule, `fa`, reaches **68.00 %**" in transport
    assert "backpropagation reaches 80.00 %" in transport
    assert "reaches 67.00 %" in dll
    assert "`hebb`, reaches 49.00 %, which does not beat the 50.00 %" in faithful
    assert f"({len(select_rules(read_verdicts(), FAITHFUL)) - 1} more were not run yet.)" in faithful


def test_a_rule_that_keeps_all_criteria_and_beats_the_control_is_said_to(store: Store) -> None:
    put(store, SCORES | {"softhebb": 61.0})
    assert "`softhebb`, reaches 61.00 %, which beats the 50.00 %" in render_finding(cells_of(store))[2]


def test_without_results_nothing_is_found(store: Store) -> None:
    assert render_finding(cells_of(store)) == ["The experiments were not run yet."]
    assert all("not run yet" in row for row in render_choices(cells_of(store))[2:])


def test_a_choice_is_the_best_finished_rule_of_those_that_fit(store: Store) -> None:
    put(store, SCORES)
    rows = [[cell.strip() for cell in row.strip("|").split("|")] for row in render_choices(cells_of(store))]
    chosen = {need: row for need, *row in rows[2:]}
    assert chosen["the best accuracy without weight transport"][:3] == ["[`fa`](rules/fa.md)", "68.00", "+18.00 ± 0.00"]
    assert chosen["all three criteria"] == ["[`hebb`](rules/hebb.md)", "49.00", "-1.00 ± 0.00 *", "1.0", "✓✓✓"]
    assert chosen["the control to beat: hidden layers stay random"][2] == "–"
    assert chosen["spikes"] == ["–", "not run yet", "–", "–", "–"]


def test_every_named_rule_exists() -> None:
    named = {rule for choice in CHOICES for rule in choice.rules.split() if choice.rules not in ("C1", FAITHFUL)}
    assert named <= read_verdicts().keys()


PAGE = (DOCS / "which-rule.md").read_text("utf-8")


def test_the_page_recommends_the_best_rule_without_weight_transport() -> None:
    [row] = [line for line in PAGE.splitlines() if line.startswith("| the best accuracy without weight transport |")]
    recommended = re.search(r"\*\*Start with `(.*?)`\.\*\*", PAGE)
    assert recommended is not None
    assert f"[`{recommended[1]}`](rules/" in row


@pytest.mark.parametrize(
    ("row", "criteria"), [("no weight transport", 1), ("no error that skips", 2), ("no update that waits", 3)]
)
def test_the_page_lists_the_rules_that_keep_each_criterion(row: str, criteria: int) -> None:
    kept = {rule for rule, claims in read_verdicts().items() if all(claims[:criteria]) and rule != "readout"}
    [line] = [line for line in PAGE.splitlines() if line.startswith("|") and row in line]
    named = set(re.findall(r"`([\w:-]+)`", line))
    if criteria == 2:  # which says what leaves the row above
        assert {rule for rule in read_verdicts() if rule in named} == {
            rule for rule, claims in read_verdicts().items() if claims[0] and not claims[1]
        }
    else:
        assert {rule for rule in read_verdicts() if rule in named or rule.partition(":")[0] in named} == kept
