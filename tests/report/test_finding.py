"""The finding says what the rows of the store say, and says so where they do not suffice."""

import json
from typing import Any

import pytest

from apical.bench.declaration import Declaration
from apical.bench.store import Outcome, Store
from apical.core.learner import Claims
from apical.report.finding import Finding, _describe_criteria, find_finding
from apical.report.groups import collect
from apical.report.overview import make_entries
from stores import alter, declared, fill

SPACE = "\N{NARROW NO-BREAK SPACE}"
"""Between a number and its percent sign."""


def find(store: Store) -> Finding:
    found = find_finding(make_entries(collect(store)))
    assert found is not None
    return found


def put(
    store: Store, scores: dict[str, list[float]], model: str = "mlp", data: str = "digits", **settings: Any
) -> None:
    for rule, values in scores.items():
        fill(store, declared(rule, model, data, **settings), values)


def test_the_three_sentences_are_computed_from_the_rows(store: Store) -> None:
    # Kept criteria: hebb and drtp all three, fa C1 and C2, bp C2 alone. The control has 80 on average.
    put(
        store,
        {"readout": [79.0, 81.0], "bp": [98.0, 98.5], "fa": [95.0, 97.0], "hebb": [84.0, 86.0], "drtp": [70.0, 72.0]},
    )
    first, second, third = find(store).sentences
    assert first == (
        f"On digits with MLP, the best rule that keeps all three criteria is `hebb` (accuracy 85.00{SPACE}%), "
        "5.00 points better than the control."
    )
    # Seed by seed, fa is 3 and 1.5 below bp: 2.25 ± 0.75.
    assert second == (f"The best rule beside `bp` is `fa` (accuracy 96.00{SPACE}%), 2.25 points worse; it breaks C3.")
    assert third == "3 of 4 rules beat the control by more than two standard errors; `drtp` does not."


def test_bars_go_from_the_best_to_the_worst_without_the_control(store: Store) -> None:
    put(store, {"readout": [80.0, 80.0], "hebb": [70.0, 72.0], "bp": [90.0, 92.0], "fa": [85.0, 85.0]})
    found = find(store)
    assert [(bar.rule, bar.over.mean, bar.over.error) for bar in found.bars] == [
        ("bp", pytest.approx(11.0), pytest.approx(1.0)),
        ("fa", pytest.approx(5.0), pytest.approx(0.0)),
        ("hebb", pytest.approx(-9.0), pytest.approx(1.0)),
    ]
    assert [(bar.kept, bar.marks) for bar in found.bars] == [(1, "✗✓✗"), (2, "✓✓✗"), (3, "✓✓✓")]
    assert found.limits == (pytest.approx(-11.0), pytest.approx(13.0))  # two standard errors beyond the ends
    # Zero is 11 of 24 from the left; bp's bar ends at 22 of 24, its line goes from 20 to 24.
    assert found.place(found.bars[0].over) == pytest.approx(
        [100 * 11 / 24, 100 * 22 / 24, 100 * 20 / 24, 100.0], abs=0.01
    )


def test_zero_is_on_the_scale_even_if_all_rules_are_far_from_it(store: Store) -> None:
    put(store, {"readout": [80.0, 80.0], "bp": [90.0, 90.0]})
    found = find(store)
    assert found.limits == (0.0, pytest.approx(10.0))
    (bar,) = found.bars
    assert found.place(bar.over) == pytest.approx([0, 100, 100, 100])


def test_a_scale_of_no_width_is_none(store: Store) -> None:
    put(store, {"readout": [80.0, 80.0], "bp": [80.0, 80.0]})
    assert find(store).place(find(store).bars[0].over) == [0, 0, 0, 0]


def test_rules_that_keep_all_criteria_but_do_not_beat_the_control_are_no_success(store: Store) -> None:
    put(store, {"readout": [80.0, 82.0], "bp": [90.0, 92.0], "hebb": [79.0, 80.0], "drtp": [10.0, 11.0]})
    assert find(store).sentences[0] == (
        "On digits with MLP, no rule that keeps all three criteria beats the control; the best is `hebb` "
        f"(accuracy 79.50{SPACE}%), 1.50 points worse than the control."
    )


def test_one_that_certainly_beats_the_control_comes_before_one_that_may(store: Store) -> None:
    put(store, {"readout": [80.0, 80.0], "hebb": [81.0, 81.2], "drtp": [80.0, 88.0]})  # 1.1 ± 0.1, and 4 ± 4
    assert "the best rule that keeps all three criteria is `hebb`" in find(store).sentences[0]


def test_two_standard_errors_decide_what_equals_bp(store: Store) -> None:
    put(store, {"readout": [10.0, 10.0], "bp": [90.0, 91.0], "fa": [90.5, 90.4]})  # −0.05 ± 0.55
    assert find(store).sentences[1].endswith(", equal to it within two standard errors; it breaks C3.")
    put(store, {"sign": [91.0, 92.2]})  # 1.1 ± 0.1
    assert find(store).sentences[1] == (
        f"The best rule beside `bp` is `sign` (accuracy 91.60{SPACE}%), 1.10 points better; it breaks C1 and C3."
    )


def test_without_bp_the_best_rule_is_named_all_the_same(store: Store) -> None:
    put(store, {"readout": [80.0, 80.0], "fa": [85.0, 85.0]})
    assert find(store).sentences[1:] == [
        f"The best rule is `fa` (accuracy 85.00{SPACE}%), 5.00 points better than the control; it breaks C3, and there are "
        "too few runs of `bp` beside it.",
        "1 of 1 rules beat the control by more than two standard errors.",
    ]


def test_bp_alone_is_compared_with_nothing(store: Store) -> None:
    put(store, {"readout": [80.0, 80.0], "bp": [85.0, 85.0]})
    assert find(store).sentences[:2] == [
        "On digits with MLP, no rule is known to keep all three criteria.",
        "There is no other rule than `bp`.",
    ]


def test_a_rule_that_nobody_judged_or_that_is_not_decided_is_said_to_be_so(store: Store) -> None:
    put(store, {"readout": [80.0, 80.0], "bp": [90.0, 91.0], "mine": [85.0, 85.0], "yours": [84.0, 84.0]})
    alter(store, "UPDATE runs SET verdict = ? WHERE rule = 'yours'", json.dumps({"c1": True, "c2": False, "c3": True}))
    found = find(store)
    assert found.sentences[0].endswith("no rule is known to keep all three criteria; of `mine` it is not known.")
    assert "it is not judged on C1 and C2 and C3" in found.sentences[1]
    assert {bar.rule: bar.kept for bar in found.bars} == {"bp": 1, "mine": None, "yours": 2}


def test_undecided_criteria_are_neither_kept_nor_broken() -> None:
    undecided = Claims(True, None, True)
    assert _describe_criteria(undecided) == "is not judged on C2"
    assert _describe_criteria(Claims(False, None, True)) == "breaks C1 and is not judged on C2"


def test_a_stored_verdict_that_is_undecided_is_a_question_mark_without_a_count(store: Store) -> None:
    put(store, {"readout": [80.0, 80.0], "mine": [85.0, 85.0], "hebb": [81.0, 81.0]})
    alter(store, "UPDATE runs SET verdict = ? WHERE rule = 'mine'", json.dumps({"c1": True, "c2": None, "c3": True}))
    found = find(store)
    assert [(bar.rule, bar.marks, bar.kept) for bar in found.bars] == [("mine", "✓?✓", None), ("hebb", "✓✓✓", 3)]
    assert "keeps all three criteria is `hebb`" in found.sentences[0]
    assert "; it is not judged on C2," in found.sentences[1]


def test_many_rules_that_fail_are_named_in_part_and_counted(store: Store) -> None:
    put(store, {"readout": [80.0, 80.0]} | {f"own{k}": [70.0 - k, 70.0 - k] for k in range(9)})
    names = ", ".join(f"`own{k}`" for k in range(6))
    assert find(store).sentences[2] == (
        f"0 of 9 rules beat the control by more than two standard errors; {names} and 3 more do not."
    )


def test_a_backtick_in_a_name_does_not_turn_text_into_code(store: Store) -> None:
    put(store, {"readout": [80.0, 80.0], "a`b": [90.0, 90.0]})
    assert "`a'b`" in find(store).sentences[1]
    assert all(sentence.count("`") % 2 == 0 for sentence in find(store).sentences)


def test_most_rules_decide_where_the_finding_is_from_then_what_bp_gains(store: Store) -> None:
    put(store, {"readout": [80.0, 80.0], "bp": [85.0, 85.0], "fa": [84.0, 84.0]}, "mlp")
    put(store, {"readout": [70.0, 70.0], "bp": [90.0, 90.0], "fa": [60.0, 60.0]}, "cnn")
    put(store, {"readout": [10.0, 10.0], "bp": [90.0, 90.0]}, "mlp", "mnist")
    assert (find(store).title, find(store).others) == ("digits with CNN", 2)
    put(store, {"hebb": [70.0, 70.0]}, "mlp")
    assert find(store).title == "digits with MLP"


def test_only_like_is_compared_with_like_and_a_part_of_the_data_is_named(store: Store) -> None:
    put(store, {"readout": [80.0, 80.0], "bp": [85.0, 85.0]})
    put(store, {"fa": [99.0, 99.0]}, protocol="paper")  # has no control of its own
    assert [bar.rule for bar in find(store).bars] == ["bp"]
    for rule, scores in {"readout": [10.0, 10.0], "bp": [20.0, 20.0], "fa": [5.0, 5.0]}.items():
        part = Declaration.from_dict({**declared(rule, "mlp", "digits").to_dict(), "examples": 128})
        fill(store, part, scores)
    found = find(store)
    assert found.title == "digits with MLP (128 examples)"
    assert [bar.over.mean for bar in found.bars] == [pytest.approx(10.0), pytest.approx(-5.0)]


def test_of_several_settings_one_stands_for_the_rule_whatever_its_score(store: Store) -> None:
    put(store, {"readout": [80.0, 80.0], "bp": [85.0, 85.0]}, lr=0.1)
    put(store, {"bp": [99.0, 99.0]}, lr=0.2)
    assert [bar.over.mean for bar in find(store).bars] == [pytest.approx(5.0)]


def test_less_is_better_for_errors(store: Store) -> None:
    for rule, mse in {"readout": 1.0, "bp": 0.5, "fa": 0.75}.items():
        asked = declared(rule, "rnn", "electricity")
        rows = [
            {"seed": seed, "epoch": 1, "loss": 1.0, "test_loss": 1.0, "test_mse": mse, "test_mae": 1.0, "seconds": 1}
            for seed in (0, 1)
        ]
        store.claim(asked, [0, 1])
        store.finish(asked, [0, 1], Outcome(rows, {}, {}))
    assert find(store).sentences[1] == "The best rule beside `bp` is `fa` (MSE 0.7500), 0.2500 worse; it breaks C3."


@pytest.mark.parametrize(
    "scores",
    [{}, {"bp": [90.0, 91.0]}, {"readout": [80.0, 81.0]}, {"readout": [80.0], "bp": [90.0]}],
    ids=["nothing", "no control", "nothing but the control", "one seed"],
)
def test_without_two_seeds_of_a_rule_and_the_control_there_is_none(
    scores: dict[str, list[float]], store: Store
) -> None:
    put(store, scores)
    assert find_finding(make_entries(collect(store))) is None
