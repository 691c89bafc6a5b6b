"""What a run is: everything that decides its result, checked before anything is built."""

import inspect
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor

from apical.core.losses import LossFunction
from apical.engine.replicas import OPTIMIZERS, Optimizers
from apical.errors import ApicalError

SCHEDULES = ("constant", "linear", "cosine")
PROTOCOLS = ("clean", "paper", "validation")
PRECISIONS = ("tf32", "float32", "bf16")
VALIDATION_SHARE = 0.1
MOST_SEEDS = 10_000
_OURS = {"params", "lr", "foreach", "fused", "capturable", "differentiable"}
"""What a torch optimiser takes and the engine decides."""


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
    data_options: dict[str, Any] = field(default_factory=dict)
    optimizer_options: dict[str, Any] = field(default_factory=dict)
    alignment: bool = False

    def __post_init__(self) -> None:
        for name in ("epochs", "batch_size"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ApicalError(f"{name} is {value!r}, but must be a whole number of at least 1.")
        for name, value in {"lr": self.lr, **({} if self.clip is None else {"clip": self.clip})}.items():
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
                raise ApicalError(f"{name} is {value!r}, but must be a positive number.")
        choices: dict[str, tuple[str, ...]] = {
            "schedule": SCHEDULES,
            "protocol": PROTOCOLS,
            "precision": PRECISIONS,
        }
        if not callable(self.optimizer):
            choices["optimizer"] = tuple(OPTIMIZERS)
        for name, known in choices.items():
            if getattr(self, name) not in known:
                raise ApicalError(f"unknown {name} {getattr(self, name)!r}; {', '.join(known)} work.")
        seed_list(self.seeds)
        for name in ("options", "optimizer_options"):
            require_options(name, getattr(self, name))
        if not callable(self.optimizer) and self.optimizer_options:
            self._check_optimizer_options(self.optimizer)

    def _check_optimizer_options(self, optimizer: str) -> None:
        """torch takes any key in a parameter group and ignores those that it does not know."""
        known = set(inspect.signature(OPTIMIZERS[optimizer]).parameters) - _OURS
        for name in self.optimizer_options:
            if name not in known:
                raise ApicalError(
                    f"the optimizer {optimizer!r} has no option {name!r} here; its options: {', '.join(sorted(known))}."
                )
        try:  # values of a parameter group are not looked at either; those of the constructor are
            OPTIMIZERS[optimizer]([torch.zeros(1, requires_grad=True)], **self.optimizer_options)
        except (ValueError, TypeError) as error:
            raise ApicalError(
                f"the optimizer {optimizer!r} cannot take {self.optimizer_options}: {str(error).rstrip('.')}."
            ) from error

    def to_dict(self) -> dict[str, Any]:
        """Plain values as JSON gives them back, for a checkpoint or a result; functions by their names."""
        values = {entry.name: getattr(self, entry.name) for entry in fields(self)}
        plain: dict[str, Any] = json.loads(json.dumps(values, default=name_of))
        return plain

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


def require_options(name: str, given: object) -> None:
    """Options by their names."""
    if not isinstance(given, Mapping):
        raise ApicalError(f"{name} is {given!r}, but must be a dictionary of names and values.")


def name_of(thing: object) -> str:
    """A function's own name; else, as for a module or a partial, that of its kind."""
    return str(getattr(thing, "__name__", type(thing).__name__))


def seed_list(seeds: int | Sequence[int]) -> tuple[int, ...]:
    """`4` means the seeds 0 to 3; a list means itself."""
    if isinstance(seeds, int) and not isinstance(seeds, bool):
        if not 1 <= seeds <= MOST_SEEDS:
            raise ApicalError(
                f"seeds is {seeds}, but must be a number of seeds from 1 to {MOST_SEEDS:,}, or a list of seeds."
            )
        return tuple(range(seeds))
    if not isinstance(seeds, Sequence) or not all(type(s) is int and 0 <= s < 2**32 for s in seeds):
        raise ApicalError(
            f"seeds is {seeds!r}; a number of seeds or a list of whole numbers from 0 to 2**32 - 1 works."
        )
    if not seeds or len(set(seeds)) != len(seeds):
        raise ApicalError(f"seeds are {list(seeds)}, but must be different whole numbers, at least one.")
    return tuple(seeds)


def over(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """Settings with others on top; tables, such as a rule's options, join name by name.

    >>> over({"lr": 0.1, "options": {"a": 1, "b": 2}}, {"options": {"b": 3}})
    {'lr': 0.1, 'options': {'a': 1, 'b': 3}}
    """
    joined = dict(below)
    for name, value in above.items():
        both = isinstance(value, dict) and isinstance(below.get(name), dict)
        joined[name] = over(below[name], value) if both else value
    return joined
