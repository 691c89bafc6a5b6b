"""The comparison with the control, against its closed form."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from apical.bench.cells import Difference, compare_seeds, compute_std, is_below

values = st.lists(st.tuples(st.floats(0, 100), st.floats(0, 100)), min_size=2, max_size=9)


@given(values)
def test_a_paired_difference_is_the_mean_of_differences_and_its_standard_error(
    pairs: list[tuple[float, float]],
) -> None:
    found = compare_seeds(dict(enumerate(a for a, _ in pairs)), dict(enumerate(b for _, b in pairs)))
    n, differences = len(pairs), [a - b for a, b in pairs]
    mean = sum(differences) / n
    variance = sum((d - mean) ** 2 for d in differences) / (n - 1)
    assert found is not None
    assert found.mean == pytest.approx(mean, abs=1e-9)
    assert found.error == pytest.approx(math.sqrt(variance / n), abs=1e-9)


def test_a_worked_example() -> None:
    # Differences 1, 2, 3: mean 2, standard deviation 1, standard error 1/√3.
    found = compare_seeds({0: 11.0, 1: 12.0, 2: 13.0}, {0: 10.0, 1: 10.0, 2: 10.0})
    assert found == Difference(2.0, pytest.approx(1 / math.sqrt(3)))


def test_seeds_are_paired_by_number_and_those_of_one_side_left_out() -> None:
    found = compare_seeds({7: 5.0, 3: 9.0, 1: 100.0}, {3: 8.0, 7: 2.0, 0: -100.0})
    assert found == Difference(2.0, pytest.approx(1.0))


@pytest.mark.parametrize("ours", [{}, {0: 1.0}, {0: 1.0, 5: 2.0}])
def test_fewer_than_two_common_seeds_say_nothing(ours: dict[int, float]) -> None:
    assert compare_seeds(ours, {0: 1.0, 1: 2.0}) is None


def test_a_rule_learns_where_it_is_better_by_more_than_two_standard_errors() -> None:
    assert Difference(2.01, 1.0).learns
    assert not Difference(2.0, 1.0).learns
    assert not Difference(-5.0, 1.0).learns
    assert not Difference(0.0, 0.0).learns


def test_spread_is_the_sample_standard_deviation() -> None:
    assert compute_std([1.0, 2.0, 3.0]) == pytest.approx(1.0)
    assert compute_std([4.0, 8.0]) == pytest.approx(4 / math.sqrt(2))
    assert compute_std([4.0]) == 0.0


def test_a_smaller_error_is_better() -> None:
    ours, control = {0: 1.0, 1: 2.0, 2: 3.5}, {0: 4.0, 1: 4.5, 2: 6.0}
    rising, falling = compare_seeds(ours, control), compare_seeds(ours, control, higher_is_better=False)
    assert rising is not None
    assert falling is not None
    assert (rising.learns, falling.learns) == (False, True)
    assert falling.mean == -rising.mean == pytest.approx((3 + 2.5 + 2.5) / 3)
    assert falling.text(4) == "+2.6667 ± 0.1667"


@given(st.lists(st.floats(0, 100), min_size=2, max_size=9), st.floats(0, 100))
def test_below_is_by_more_than_one_standard_error_of_ours(ours: list[float], figure: float) -> None:
    n, mean = len(ours), sum(ours) / len(ours)
    gap = figure - mean - math.sqrt(sum((value - mean) ** 2 for value in ours) / (n - 1) / n)
    if abs(gap) > 1e-9:
        assert is_below(ours, figure) is (gap > 0)


def test_of_a_single_seed_anything_less_is_below() -> None:
    assert is_below([97.9], 98.0)
    assert not is_below([98.0], 98.0)
