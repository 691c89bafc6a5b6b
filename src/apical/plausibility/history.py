"""What happened while a rule was watched: weights that acted, what changed them, and what state was computed from."""

from dataclasses import dataclass, field
from typing import NamedTuple

from apical.plausibility.provenance import CONSTANT, Record, Source, unite


@dataclass
class Drive:
    """Weights of a layer acted on a signal: the layer's activity was computed, so many states of each neuron at once."""

    layer: int
    step: int
    record: Record
    states: int


class Finding(NamedTuple):
    """Weights that were applied against their direction to something that depends on the target."""

    weight: str
    operation: str
    line: str
    called: str


@dataclass
class Change:
    """What the change of one parameter or buffer came from; current weights are as the optimiser's last step left them."""

    record: Record = CONSTANT
    uses_own_weight: bool = False
    current_weights: set[str] = field(default_factory=set)


class History:
    """Keeps the ticks at which weights had which version, and the records of state at the beginning of each tick."""

    def __init__(self) -> None:
        self.tick = 0
        self._ticks: dict[int, int] = {}
        self._states: dict[Source, Record] = {}

    def start_tick(self, step: int) -> None:
        self.tick += 1
        self.add_step(step)

    def add_step(self, step: int) -> None:
        """Note that the weights have a new version, after so many steps of the optimiser."""
        self._ticks[step] = self.tick

    def keep(self, name: str, step: int, record: Record) -> None:
        """Note what a tensor of the rule's state was computed from in earlier batches."""
        self._states["weight", name, step] = self.extend(record)

    def extend(self, record: Record) -> Record:
        """Return a record with the weights, and perhaps the target, that the state it depends on was computed from."""
        earlier = unite(self._states[source] for source in record.sources if source in self._states)
        sources = {source for source in earlier.sources if source[0] in ("weight", "transport")}
        return Record(record.sources | sources, record.examples, earlier.hops if record.hops is None else record.hops)

    def find_ages(self, record: Record) -> dict[str, int]:
        """Return how many ticks ago each of the weights acted that a record depends on, the latest time."""
        ages: dict[str, int] = {}
        for source in record.sources:
            if source[0] == "weight":
                ages[source[1]] = min(ages.get(source[1], self.tick), self.tick - self._ticks[source[2]])
        return ages
