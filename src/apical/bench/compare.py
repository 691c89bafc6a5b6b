"""Two comparisons: with the readout control, seed by seed, and with the paper's figure."""

import statistics
from typing import NamedTuple

from apical.bench.paper import Figure


class Difference(NamedTuple):
    """The mean of paired differences and its standard error."""

    mean: float
    error: float

    @property
    def learns(self) -> bool:
        """Better than the control by two standard errors."""
        return self.mean > 2 * self.error

    @property
    def within(self) -> bool:
        """No farther from zero than two standard errors."""
        return abs(self.mean) <= 2 * self.error

    @property
    def mark(self) -> str:
        """What a table says beside a rule that does not."""
        return "" if self.learns else "hidden layers do not help"

    def __str__(self) -> str:
        return self.text(2)

    def text(self, digits: int) -> str:
        return f"{self.mean:+.{digits}f} ± {self.error:.{digits}f}"


def paired(ours: dict[int, float], control: dict[int, float], *, rising: bool = True) -> Difference | None:
    """How much better ours are over the seeds that both have; None for fewer than two. An error is no `rising` measure.

    >>> paired({0: 3.0, 1: 5.0}, {0: 1.0, 1: 1.0})
    Difference(mean=3.0, error=1.0)
    """
    differences = [ours[seed] - control[seed] for seed in sorted(ours.keys() & control.keys())]
    if len(differences) < 2:
        return None
    mean, error = statistics.fmean(differences), statistics.stdev(differences) / len(differences) ** 0.5
    return Difference(mean if rising else -mean, error)


def against(ours: list[float], figure: Figure) -> Difference:
    """How far the mean of our seeds lies from the paper's figure, with the standard error of that difference.

    The paper's ± is taken as a standard deviation over its seeds; where it prints none, the error is ours alone.

    >>> against([97.0, 99.0], Figure(97.0, 2.0, 4))
    Difference(mean=1.0, error=1.4142135623730951)
    """
    squares = spread(ours) ** 2 / len(ours)
    if figure.error is not None:
        squares += figure.error**2 / (figure.seeds or 1)
    return Difference(statistics.fmean(ours) - figure.accuracy, squares**0.5)


def below(ours: list[float], figure: float) -> bool:
    """Whether the mean of our seeds falls short of a figure by more than one standard error of ours.

    >>> below([97.0, 99.0], 99.0), below([97.0, 99.0], 99.1)
    (False, True)
    """
    error: float = spread(ours) / len(ours) ** 0.5
    return statistics.fmean(ours) + error < figure


def over_seeds(values: list[float], digits: int = 2) -> str:
    """The mean and the standard deviation over seeds; a single one has none.

    >>> over_seeds([97.0, 99.0]), over_seeds([97.0], 1)
    ('98.00 ± 1.41', '97.0')
    """
    mean = f"{statistics.fmean(values):.{digits}f}"
    return f"{mean} ± {spread(values):.{digits}f}" if len(values) > 1 else mean


def spread(values: list[float]) -> float:
    """The standard deviation over seeds, 0 for a single one."""
    return statistics.stdev(values) if len(values) > 1 else 0.0
