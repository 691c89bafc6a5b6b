"""The one comparison that says whether a rule trains hidden layers: against the readout control, seed by seed."""

import statistics
from typing import NamedTuple


class Difference(NamedTuple):
    """The mean of paired differences and its standard error."""

    mean: float
    error: float

    @property
    def learns(self) -> bool:
        """Better than the control by two standard errors."""
        return self.mean > 2 * self.error

    @property
    def mark(self) -> str:
        """What a table says beside a rule that does not."""
        return "" if self.learns else "hidden layers do not help"

    def __str__(self) -> str:
        return f"{self.mean:+.2f} ± {self.error:.2f}"


def paired(ours: dict[int, float], control: dict[int, float]) -> Difference | None:
    """Differences over the seeds that both have; None for fewer than two.

    >>> paired({0: 3.0, 1: 5.0}, {0: 1.0, 1: 1.0})
    Difference(mean=3.0, error=1.0)
    """
    differences = [ours[seed] - control[seed] for seed in sorted(ours.keys() & control.keys())]
    if len(differences) < 2:
        return None
    return Difference(statistics.fmean(differences), statistics.stdev(differences) / len(differences) ** 0.5)


def spread(values: list[float]) -> float:
    """The standard deviation over seeds, 0 for a single one."""
    return statistics.stdev(values) if len(values) > 1 else 0.0
