"""Compare our results with the readout control, seed by seed, and with the paper's figures."""

import statistics
from typing import NamedTuple

from apical.bench.paper import Figure


class Difference(NamedTuple):
    """A mean difference and its standard error."""

    mean: float
    error: float

    @property
    def learns(self) -> bool:
        """Whether the difference to the control is above two standard errors, so that the hidden layers help."""
        return self.mean > 2 * self.error

    @property
    def is_within_error(self) -> bool:
        """Whether the difference is at most two standard errors from zero."""
        return abs(self.mean) <= 2 * self.error

    @property
    def mark(self) -> str:
        """The text that a table shows for a rule whose hidden layers do not help."""
        return "" if self.learns else "hidden layers do not help"

    def __str__(self) -> str:
        return self.text(2)

    def text(self, digits: int) -> str:
        """Return the difference and its error with this many digits."""
        return f"{self.mean:+.{digits}f} ± {self.error:.{digits}f}"


def compare_seeds(
    ours: dict[int, float], control: dict[int, float], *, higher_is_better: bool = True
) -> Difference | None:
    """Return how much better our scores are on the seeds that both have; None for fewer than two seeds.

    `higher_is_better=False` is for errors.

    >>> compare_seeds({0: 3.0, 1: 5.0}, {0: 1.0, 1: 1.0})
    Difference(mean=3.0, error=1.0)
    """
    differences = [ours[seed] - control[seed] for seed in sorted(ours.keys() & control.keys())]
    if len(differences) < 2:
        return None
    mean, error = statistics.fmean(differences), statistics.stdev(differences) / len(differences) ** 0.5
    return Difference(mean if higher_is_better else -mean, error)


def compare_with_figure(ours: list[float], figure: Figure) -> Difference:
    """Return the difference of our mean to the paper's figure, with its standard error.

    The paper's ± is taken as a standard deviation over its seeds; if it prints none, the error is ours alone.

    >>> compare_with_figure([97.0, 99.0], Figure(97.0, 2.0, 4))
    Difference(mean=1.0, error=1.4142135623730951)
    """
    squares = compute_std(ours) ** 2 / len(ours)
    if figure.error is not None:
        squares += figure.error**2 / (figure.seeds or 1)
    return Difference(statistics.fmean(ours) - figure.accuracy, squares**0.5)


def is_below(ours: list[float], figure: float) -> bool:
    """Return whether our mean is below a figure by more than one standard error of ours.

    >>> is_below([97.0, 99.0], 99.0), is_below([97.0, 99.0], 99.1)
    (False, True)
    """
    error: float = compute_std(ours) / len(ours) ** 0.5
    return statistics.fmean(ours) + error < figure


def format_mean_std(values: list[float], digits: int = 2) -> str:
    """Return the mean and standard deviation over seeds as text; a single seed has no deviation.

    >>> format_mean_std([97.0, 99.0]), format_mean_std([97.0], 1)
    ('98.00 ± 1.41', '97.0')
    """
    mean = f"{statistics.fmean(values):.{digits}f}"
    return f"{mean} ± {compute_std(values):.{digits}f}" if len(values) > 1 else mean


def compute_std(values: list[float]) -> float:
    """Return the standard deviation over seeds, 0 for a single one."""
    return statistics.stdev(values) if len(values) > 1 else 0.0
