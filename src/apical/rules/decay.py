"""A schedule of Kolen-Pollack's decay λ, for `fit` and for one's own loop.

Θ − W shrinks as exp(−Σ ηλ), so a larger λ early in a run buys alignment; later it would cost accuracy.
"""

from collections.abc import Sequence
from typing import Any

import torch

from apical.core.validation import is_number
from apical.errors import ApicalError, check_whole_number

DecaySchedule = tuple[tuple[float, float], ...]
"""Pairs (start, λ): from this share of the run on, the decay is λ."""
DECAYED_GROUPS = ("W mirrored", "theta")
"""The parameter groups to which λ belongs."""


def read_decay(decay: Any) -> DecaySchedule:
    """Check a schedule of λ, such as [(0, 3e-3), (0.4, 5e-4)]."""
    is_list = isinstance(decay, Sequence) and not isinstance(decay, str)
    pairs = [tuple(pair) for pair in decay if isinstance(pair, Sequence) and len(pair) == 2] if is_list else []
    is_valid = all(is_number(start) and is_number(value) and value >= 0 for start, value in pairs)
    starts = [start for start, _ in pairs] if is_valid else []
    if not starts or len(pairs) != len(decay) or starts != sorted(set(starts)) or starts[0] != 0 or starts[-1] >= 1:
        raise ApicalError(
            f"decay is {decay!r}, but must be a number that is not negative, or pairs of a share of the run and the decay "
            "from there on, starting at 0, such as [(0, 3e-3), (0.4, 5e-4)]."
        )
    return tuple((float(start), float(value)) for start, value in pairs)


def find_decay(schedule: DecaySchedule, progress: float) -> float:
    """Return λ at this share of the run.

    >>> find_decay(((0.0, 3e-3), (0.4, 5e-4)), 0.39), find_decay(((0.0, 3e-3), (0.4, 5e-4)), 0.4)
    (0.003, 0.0005)
    """
    return [value for start, value in schedule if progress >= start][-1]


def has_decay(group: dict[str, Any]) -> bool:
    """Return whether λ belongs to a parameter group, which may be that of a single layer, such as "theta 1"."""
    name = str(group.get("name", ""))
    return any(name == decayed or name.startswith(f"{decayed} ") for decayed in DECAYED_GROUPS)


def set_decay(groups: list[dict[str, Any]], value: float) -> bool:
    """Set λ in those parameter groups that it belongs to, and return whether it changed."""
    own = [group for group in groups if has_decay(group) and group["weight_decay"] != value]
    for group in own:
        group["weight_decay"] = value
    return bool(own)


class DecayScheduler:
    """Change Kolen-Pollack's decay λ in the course of your own loop, as torch's schedulers change the learning rate.

    Args:
        optim: an optimiser of `learner.param_groups(lr)`; λ is the `weight_decay` of its groups `W mirrored` and `theta`.
        decay: pairs of a share of the run and the decay from there on, such as [(0, 3e-3), (0.4, 5e-4)].
        steps: how many times `step()` will be called, after each step of the optimiser.

    >>> from apical import make
    >>> learner = make("dll:kolen-pollack", torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 2)))
    >>> optim = torch.optim.SGD(learner.param_groups(lr=0.1))
    >>> scheduler = DecayScheduler(optim, [(0, 3e-3), (0.5, 5e-4)], steps=2)
    >>> optim.step(), scheduler.step()
    (None, None)
    >>> {group["name"]: group["weight_decay"] for group in optim.param_groups}
    {'W': 0.0, 'W mirrored': 0.0005, 'bias': 0.0, 'theta': 0.0005}
    """

    def __init__(self, optim: torch.optim.Optimizer, decay: Sequence[tuple[float, float]], steps: int) -> None:
        check_whole_number("steps", steps)
        self.optim, self.schedule, self.steps, self.done = optim, read_decay(decay), steps, 0
        if not any(map(has_decay, optim.param_groups)):
            raise ApicalError(
                "the optimiser has no group 'theta'; make it from learner.param_groups(lr) of a 'dll:kolen-pollack' learner."
            )
        self._apply()

    def _apply(self) -> None:
        set_decay(self.optim.param_groups, find_decay(self.schedule, self.done / self.steps))

    def step(self) -> None:
        """Count a step, and set the decay of the next one."""
        self.done += 1
        self._apply()

    def state_dict(self) -> dict[str, Any]:
        """Return what `load_state_dict` takes: the number of steps done."""
        return {"done": self.done}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a saved number of steps."""
        self.done = state["done"]
        self._apply()
