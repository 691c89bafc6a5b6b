"""The settings of a run: everything that decides its result, checked before anything is built."""

import inspect
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor

from apical.core.losses import LossFunction
from apical.engine.replicas import OPTIMIZERS, OptimizerFactory
from apical.errors import ApicalError

SCHEDULES = ("constant", "linear", "cosine")
PROTOCOLS = ("clean", "paper", "validation")
PRECISIONS = ("tf32", "float32", "bf16")
VALIDATION_SHARE = 0.1
MAX_SEEDS = 10_000
_ENGINE_OPTIONS = {"params", "lr", "foreach", "fused", "capturable", "differentiable"}
"""Arguments of torch's optimisers that the engine sets itself."""


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
    optimizer: str | OptimizerFactory = "adam"
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
        choices: dict[str, tuple[str, ...]] = {"schedule": SCHEDULES, "protocol": PROTOCOLS, "precision": PRECISIONS}
        if not callable(self.optimizer):
            choices["optimizer"] = tuple(OPTIMIZERS)
        for name, known in choices.items():
            if getattr(self, name) not in known:
                raise ApicalError(f"unknown {name} {getattr(self, name)!r}; {', '.join(known)} work.")
        expand_seeds(self.seeds)
        for name in ("options", "optimizer_options"):
            require_options(name, getattr(self, name))
        if not callable(self.optimizer) and self.optimizer_options:
            self._check_optimizer_options(self.optimizer)

    def _check_optimizer_options(self, optimizer: str) -> None:
        """Check names and values of the optimiser's options: in a parameter group, torch silently ignores unknown names."""
        known = set(inspect.signature(OPTIMIZERS[optimizer]).parameters) - _ENGINE_OPTIONS
        for name in self.optimizer_options:
            if name not in known:
                raise ApicalError(
                    f"the optimizer {optimizer!r} has no option {name!r} here; its options: {', '.join(sorted(known))}."
                )
        decay = self.optimizer_options.get("weight_decay")
        if len(self.optimizer_options) == 1 and isinstance(decay, float) and 0 <= decay < math.inf:
            return  # the usual case: the constructor below imports torch's compiler, which takes a second
        try:  # torch checks values given to the constructor, but not those in a parameter group
            OPTIMIZERS[optimizer]([torch.zeros(1, requires_grad=True)], **self.optimizer_options)
        except (ValueError, TypeError) as error:
            raise ApicalError(
                f"the optimizer {optimizer!r} cannot take {self.optimizer_options}: {str(error).rstrip('.')}."
            ) from error

    def to_dict(self) -> dict[str, Any]:
        """Return the settings as plain JSON values, for checkpoints and results; functions become their names."""
        values = {entry.name: getattr(self, entry.name) for entry in fields(self)}
        plain: dict[str, Any] = json.loads(json.dumps(values, default=get_name))
        return plain

    def compute_rates(self, steps: int) -> Tensor:
        """Return the schedule's factor at each of `steps` steps: the learning rate divided by `lr`."""
        progress = torch.arange(steps, dtype=torch.float64) / steps
        if self.schedule == "linear":
            factor = 1 - progress
        elif self.schedule == "cosine":
            factor = (1 + torch.cos(math.pi * progress)) / 2
        else:
            factor = torch.ones(steps, dtype=torch.float64)
        return factor.float()


def require_options(name: str, given: object) -> None:
    """Check that options are a dictionary."""
    if not isinstance(given, Mapping):
        raise ApicalError(f"{name} is {given!r}, but must be a dictionary of names and values.")


def get_name(thing: object) -> str:
    """Return the name of a function or class; of any other object, such as a module, the name of its class."""
    return str(getattr(thing, "__name__", type(thing).__name__))


def expand_seeds(seeds: int | Sequence[int]) -> tuple[int, ...]:
    """Return the seeds that a user asks for: `4` means 0 to 3, a list means its elements."""
    if isinstance(seeds, int) and not isinstance(seeds, bool):
        if not 1 <= seeds <= MAX_SEEDS:
            raise ApicalError(
                f"seeds is {seeds}, but must be a number of seeds from 1 to {MAX_SEEDS:,}, or a list of seeds."
            )
        return tuple(range(seeds))
    if not isinstance(seeds, Sequence) or not all(type(s) is int and 0 <= s < 2**32 for s in seeds):
        raise ApicalError(
            f"seeds is {seeds!r}; a number of seeds or a list of whole numbers from 0 to 2**32 - 1 works."
        )
    if not seeds or len(set(seeds)) != len(seeds):
        raise ApicalError(f"seeds are {list(seeds)}, but must be different whole numbers, at least one.")
    return tuple(seeds)


def merge_settings(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Return settings with some of them changed; nested dictionaries, such as a rule's options, are merged, too.

    >>> merge_settings({"lr": 0.1, "options": {"a": 1, "b": 2}}, {"options": {"b": 3}})
    {'lr': 0.1, 'options': {'a': 1, 'b': 3}}
    """
    merged = dict(base)
    for name, value in changes.items():
        are_nested = isinstance(value, dict) and isinstance(base.get(name), dict)
        merged[name] = merge_settings(base[name], value) if are_nested else value
    return merged
