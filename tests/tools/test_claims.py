"""The verdicts on the paper's claims follow from intervals, and intervals and tests are Student's."""

import math

import pytest
import torch

from apical.bench import suites
from apical.bench.declaration import Request
from apical.bench.store import Store
from apical.bench.suites import list_jobs
from stores import fill
from tools.pages.blocks import load_results
from tools.pages.claims import REFUTED, REPRODUCED, UNTESTED, judge_failure, judge_gain, judge_gap
from tools.pages.facts import Facts
from tools.pages.overview_figures import count_criteria, draw_criteria, spread_labels
from tools.pages.significance import compute_coverage, correct_with_holm, estimate, find_quantile
from tools.svhn_contrast import measure_contrast


@pytest.mark.parametrize("freedom", [1, 2, 3, 4, 9, 10])
def test_the_coverage_is_the_integral_of_students_density(freedom: int) -> None:
    half = (freedom + 1) / 2
    scale = math.exp(math.lgamma(half) - math.lgamma(freedom / 2)) / math.sqrt(freedom * math.pi)
    x = torch.linspace(-2.5, 2.5, 20_001, dtype=torch.float64)
    expected = torch.trapezoid(scale * (1 + x**2 / freedom) ** -half, x).item()
    assert compute_coverage(2.5, freedom) == pytest.approx(expected, abs=1e-8)
    assert compute_coverage(find_quantile(freedom), freedom) == pytest.approx(0.95)


def test_an_interval_ends_at_zero_where_p_is_five_percent() -> None:
    values = [1.0, 2.0, 4.0, 5.0]
    found = estimate(values)
    assert estimate([value - found.low for value in values]).p == pytest.approx(0.05)
    assert found.low + found.high == pytest.approx(2 * found.mean)
    assert not estimate([1.0]).known


def test_a_gap_says_below_or_above_in_place_of_the_sign() -> None:
    half = find_quantile(1) * 0.5  # of two values that differ by one: their spread is 1/√2, so the mean's error is 1/2
    assert estimate([1.0, 2.0]).gap == f"1.50 [{1.5 - half:.2f}, {1.5 + half:.2f}] points above"
    assert estimate([-1.0, -2.0]).gap == f"1.50 [{1.5 - half:.2f}, {1.5 + half:.2f}] points below"
    assert [estimate(values).gap for values in ([], [-1.0])] == ["not run yet", "-1.00 (one seed)"]


def test_holm_multiplies_by_the_tests_that_are_left_and_never_falls() -> None:
    assert correct_with_holm([0.04, 0.001, 0.02]) == pytest.approx([0.04, 0.003, 0.04])
    assert correct_with_holm([0.6, 0.7]) == [1.0, 1.0]


@pytest.mark.parametrize(
    ("values", "gain", "gap"),
    [
        ([1.0, 1.1, 0.9], REPRODUCED, REPRODUCED),  # above zero
        ([-1.0, -1.1, -0.9], REFUTED, REFUTED),  # below zero, and below a gap of −0.5
        ([0.1, -0.1, 0.0], REFUTED, REPRODUCED),  # level, where the paper gains 1
        ([3.0, -3.0, 0.0], UNTESTED, UNTESTED),  # too wide to tell
        ([1.0], UNTESTED, UNTESTED),
    ],
)
def test_verdicts_follow_from_the_interval(values: list[float], gain: str, gap: str) -> None:
    assert judge_gain(estimate(values), 1.0) == gain
    assert judge_gap(estimate(values), -0.5) == gap


def test_a_rule_that_beats_the_control_has_not_failed_and_one_that_stays_below_it_has() -> None:
    verdicts = [judge_failure(estimate(values)) for values in ([1.0, 1.1], [-1.0, -1.1], [0.1, -0.1], [])]
    assert verdicts == [REFUTED, REPRODUCED, UNTESTED, UNTESTED]


def test_the_facts_pair_seeds_and_average_over_places(store: Store, tmp_path) -> None:
    scores = {("dll", "mnist"): [90.0, 92.0], ("bp", "mnist"): [91.0, 92.0], ("dll", "svhn"): [50.0, 50.0]}
    for job in list_jobs(suites.load("table1"), Request(models=["mlp"], data=["mnist", "svhn"], rules=["dll", "bp"])):
        assert job.declaration is not None
        fill(store, job.declaration, scores.get((job.rule, job.data), [60.0, 62.0]))
    results = load_results(store, tmp_path)
    facts = Facts(results.cells, lambda asked: [asked], results.trials)
    places = [("mlp", "mnist"), ("mlp", "svhn")]
    assert facts.gain("table1", "dll", "bp", *places[0]).mean == -0.5
    assert facts.average("table1", "dll", places) == {0: 70.0, 1: 71.0}
    assert facts.average_gain("table1", "dll", "bp", places).mean == pytest.approx((-1 - 10 + 0 - 12) / 4)
    assert facts.compare("table1", "dll", "bp", places) == {places[0]: 0, places[1]: 0}  # two seeds tell nothing
    assert not facts.gain("table1", "fa", "bp", *places[0]).known
    facts.hold(False, "wrong")
    facts.hold(True, "right")
    assert facts.contradicted == ["wrong"]


def test_a_rule_with_an_undecided_criterion_has_a_place_in_the_figure(monkeypatch, tmp_path) -> None:
    pytest.importorskip("matplotlib")
    verdicts = {"bp": (False, True, False), "dll": (True, True, None), "hebb": (True, True, True)}
    monkeypatch.setattr("tools.pages.overview_figures.read_verdicts", lambda: verdicts)
    assert [count_criteria(rule) for rule in verdicts] == [(1, 0), (2, 1), (3, 0)]
    draw_criteria({"readout": 50.0, "bp": 80.0, "dll": 70.0, "hebb": 40.0}, tmp_path / "criteria.svg")
    drawing = (tmp_path / "criteria.svg").read_text("utf-8")
    assert all(f">{name}<" in drawing for name in (*verdicts, "one", "all three", "others undecided"))


def test_contrast_is_that_of_the_middle_against_the_rows_above_and_below() -> None:
    images = torch.zeros(2, 3, 32, 32)
    images[0, :, 8:24, 12:20] = 1.0
    images[1, :, :4] = 1.0
    light, dark = measure_contrast(images)
    assert light == pytest.approx(16 * 8 / (20 * 12))
    assert dark == pytest.approx(-0.5)


def test_labels_are_moved_apart_as_little_as_needed() -> None:
    assert spread_labels([1.0, 5.0], 2.0) == [1.0, 5.0]
    assert spread_labels([1.0, 1.0], 2.0) == pytest.approx([0.0, 2.0])
