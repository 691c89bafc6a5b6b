"""What a run is: everything that decides its result, checked before anything is built."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from apical.engine.unit import OPTIMIZERS, Optimizers
from apical.errors import ApicalError
from apical.losses import LossFunction

SCHEDULES = ("constant", "linear", "cosine")
PROTOCOLS = ("clean", "paper", "validation")
PRECISIONS = ("tf32", "float32")
VALIDATION_SHARE = 0.1


@dataclass(frozen=True)
class Settings:
    """The settings of a run. `fit` takes these as keywords; checkpoints and results keep them."""

    rule: str
    model: str
    data: str
    epochs: int = 20
    seeds: tuple[int, ...] = (0,)
    lr: float = 1e-3
    batch_size: int = 128
    optimizer: str | Optimizers = "adam"
    schedule: str = "linear"
    protocol: str = "clean"
    loss: str | LossFunction = "cross_entropy"
    label_smoothing: float = 0.0
    clip: float | None = None
    precision: str = "tf32"
    options: dict[str, Any] = field(default_factory=dict)
    optimizer_options: dict[str, Any] = field(default_factory=dict)
    alignment: bool = False

    def __post_init__(self) -> None:
        for name in ("epochs", "batch_size"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ApicalError(f"{name} is {value!r}, but must be a whole number of at least 1.")
        for name in ("lr", "clip"):
            value = getattr(self, name)
            if value is not None and not (isinstance(value, int | float) and 0 < value < math.inf):
                raise ApicalError(f"{name} is {value!r}, but must be a positive number.")
        choices = {"schedule": SCHEDULES, "protocol": PROTOCOLS, "precision": PRECISIONS}
        if not callable(self.optimizer):
            choices["optimizer"] = tuple(OPTIMIZERS)
        for name, known in choices.items():
            if getattr(self, name) not in known:
                raise ApicalError(f"unknown {name} {getattr(self, name)!r}; {', '.join(known)} work.")
        if not self.seeds or len(set(self.seeds)) != len(self.seeds):
            raise ApicalError(
                f"seeds are {list(self.seeds)}, but must be different whole numbers, at least one."
            )

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for a checkpoint or a result; functions by their names."""
        plain = {key: getattr(value, "__name__", value) for key, value in asdict(self).items()}
        return {**plain, "seeds": list(self.seeds)}

    def rates(self, steps: int) -> Tensor:
        """The learning rate at each of `steps` steps, as a share of `lr`."""
        progress = torch.arange(steps, dtype=torch.float64) / steps
        if self.schedule == "linear":
            share = 1 - progress
        elif self.schedule == "cosine":
            share = (1 + torch.cos(math.pi * progress)) / 2
        else:
            share = torch.ones(steps, dtype=torch.float64)
        return share.float()


def seed_list(seeds: int | Sequence[int]) -> tuple[int, ...]:
    """`4` means the seeds 0 to 3; a list means itself."""
    if isinstance(seeds, int) and not isinstance(seeds, bool):
        if seeds < 1:
            raise ApicalError(f"seeds is {seeds}, but must be at least 1, or a list of seeds.")
        return tuple(range(seeds))
    if not isinstance(seeds, Sequence) or not all(isinstance(s, int) and s >= 0 for s in seeds):
        raise ApicalError(
            f"seeds is {seeds!r}; a number of seeds or a list of whole numbers from 0 up works."
        )
    return tuple(seeds)
