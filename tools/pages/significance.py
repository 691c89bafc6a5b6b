"""Intervals and tests over seeds: Student's t distribution, paired differences, and Holm's correction."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

LEVEL = 0.95
"""The level of all intervals; a difference counts if its corrected p is below 1 − LEVEL."""


def compute_coverage(t: float, freedom: int) -> float:
    """Return the probability that Student's t lies between −t and t, by its finite series.

    (Abramowitz and Stegun 1964, 26.7.3 and 26.7.4: exact for a whole number of degrees of freedom.)

    >>> round(compute_coverage(12.706, 1), 4), round(compute_coverage(3.182, 3), 4), round(compute_coverage(2.776, 4), 4)
    (0.95, 0.95, 0.95)
    """
    angle = math.atan2(t, math.sqrt(freedom))
    odd = freedom % 2
    term = math.cos(angle) if odd else 1.0
    total = 0.0
    for k in range(
        1 + odd, freedom, 2
    ):  # the factors are 2/3, 4/5, … for an odd number and 1/2, 3/4, … for an even one
        total += term
        term *= math.cos(angle) ** 2 * k / (k + 1)
    total *= math.sin(angle)
    return 2 / math.pi * (angle + total) if odd else total


def find_quantile(freedom: int, level: float = LEVEL) -> float:
    """Return the t whose interval from −t to t has this probability.

    >>> round(find_quantile(3), 4), round(find_quantile(9), 4)
    (3.1824, 2.2622)
    """
    low, high = 0.0, 1.0
    while compute_coverage(high, freedom) < level:
        low, high = high, 2 * high
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if compute_coverage(middle, freedom) < level else (low, middle)
    return high


@dataclass(frozen=True)
class Estimate:
    """A mean over seeds with its interval, and the p of the t test that it is zero. Without values all are NaN."""

    mean: float
    low: float
    high: float
    p: float
    seeds: int
    digits: int = 2

    @property
    def known(self) -> bool:
        """Whether there is an interval, which takes two seeds."""
        return self.seeds > 1

    def __str__(self) -> str:
        if not self.seeds:
            return "not run yet"
        shown = f"{self.mean:.{self.digits}f}"
        if not self.known:
            return f"{shown} (one seed)"
        return f"{shown} [{self.low:.{self.digits}f}, {self.high:.{self.digits}f}]"

    @property
    def signed(self) -> str:
        """The text of a difference, with its sign."""
        if not self.known:
            return str(self)
        low, high = (f"{bound:+.{self.digits}f}" for bound in (self.low, self.high))
        return f"{self.mean:+.{self.digits}f} [{low}, {high}]"

    @property
    def gap(self) -> str:
        """The text of a difference in points, with a word in place of its sign: "1.20 [0.90, 1.50] points below"."""
        if not self.known:
            return str(self)
        if self.mean < 0:
            return f"{replace(self, mean=-self.mean, low=-self.high, high=-self.low)} points below"
        return f"{self} points above"


def estimate(values: Sequence[float], digits: int = 2) -> Estimate:
    """Return the mean of one value for each seed, with its interval.

    >>> print(estimate([1.0, 2.0, 3.0]))
    2.00 [-0.48, 4.48]
    """
    if len(values) < 2:
        mean = values[0] if values else math.nan
        return Estimate(mean, math.nan, math.nan, math.nan, len(values), digits)
    mean, freedom = statistics.fmean(values), len(values) - 1
    error = statistics.stdev(values) / math.sqrt(len(values))
    half = find_quantile(freedom) * error
    p = 1 - compute_coverage(abs(mean) / error, freedom) if error else float(mean == 0)
    return Estimate(mean, mean - half, mean + half, p, len(values), digits)


def subtract(ours: Mapping[int, float], theirs: Mapping[int, float]) -> dict[int, float]:
    """Return the differences on the seeds that both have.

    >>> subtract({0: 3.0, 1: 5.0}, {1: 1.0, 2: 1.0})
    {1: 4.0}
    """
    return {seed: ours[seed] - theirs[seed] for seed in ours if seed in theirs}


def correct_with_holm(ps: Sequence[float]) -> list[float]:
    """Return the p of several tests after Holm's correction; NaN, for a test that cannot be made, stays and does not count.

    >>> correct_with_holm([0.01, 0.04, 0.03, math.nan])
    [0.03, 0.06, 0.06, nan]
    """
    order = sorted((k for k, p in enumerate(ps) if not math.isnan(p)), key=lambda k: ps[k])
    corrected, highest = list(ps), 0.0
    for rank, k in enumerate(order):
        highest = max(highest, min(1.0, (len(order) - rank) * ps[k]))
        corrected[k] = highest
    return corrected


def name_difference(gain: Estimate, p: float) -> str:
    """Return in a word what a corrected p says of a difference.

    >>> name_difference(estimate([1.0, 1.1]), 0.01), name_difference(estimate([1.0, 1.1]), 0.06)
    ('better', 'not told apart')
    """
    if math.isnan(p):
        return ""
    return ("better" if gain.mean > 0 else "worse") if p < 1 - LEVEL else "not told apart"


def format_p(p: float) -> str:
    """Return a p as text.

    >>> format_p(0.0312), format_p(0.00001), format_p(math.nan)
    ('0.031', 'below 0.001', '–')
    """
    if math.isnan(p):
        return "–"
    return "below 0.001" if p < 0.001 else f"{p:.3f}"
