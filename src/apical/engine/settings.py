"""What `fit` takes, and the settings of a run: everything that decides its result, checked before anything is built."""

import inspect
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, fields
from functools import wraps
from os import PathLike
from pathlib import Path
from typing import Any, ParamSpec, TextIO, TypeVar

import torch
from torch import Tensor, nn

from apical.core.learner import Learner
from apical.core.losses import LossFunction
from apical.core.recurrent import Elman
from apical.core.validation import is_number
from apical.data import Dataset
from apical.errors import ApicalError, check_whole_number

PlainModel = nn.Sequential | Elman
"""A network that is not wrapped in a learner yet."""
Model = str | Callable[[], PlainModel] | PlainModel | Learner
OptimizerFactory = Callable[[list[dict[str, Any]]], torch.optim.Optimizer]
"""A class or function of the user's that makes a torch optimiser from parameter groups."""
OnEpoch = Callable[[list[dict[str, Any]]], None]

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "sgd": torch.optim.SGD,
}
SCHEDULES = ("constant", "linear", "cosine", "warmup-linear")
WARMUP_SHARE = 1 / 15
"""The part of a run in which the schedule 'warmup-linear' raises the rate: two epochs of thirty."""
PROTOCOLS = ("clean", "paper", "validation")
PRECISIONS = ("tf32", "float32", "bf16")
MAX_SEEDS = 10_000
MAX_STEPS = 10**9
"""Steps of a run: each has a learning rate in memory."""
TRIAL_SETTINGS = ("rule", "lr", "options", "optimizer_options", "clip", "loss", "label_smoothing")
"""Settings that may differ between the trials of a sweep. All others decide which steps they take together."""
_ENGINE_OPTIONS = {"params", "lr", "foreach", "fused", "capturable", "differentiable"}
"""Arguments of torch's optimisers that the engine sets itself."""


@dataclass(frozen=True)
class FitArguments:
    """The arguments of `fit`.

    model: 'mlp', 'cnn' or 'rnn' (the paper's network for that data set), a function that builds an `nn.Sequential` or an
        `apical.Elman`, or, for one seed, such a network or a learner, which is trained in place.
    data: a registered name ('digits', 'mnist', …), text:PATH or series:PATH, with its `data_options` (`{"window": 32}`), or
        your own four tensors x_train, y_train, x_test, y_test. For an Elman, x has the shape (examples, time, values), or
        (examples, time) if it is whole numbers, and y has one label or vector per time step.
    rule: a name in `apical.RULES`, by default 'dll', with its `options` (`{"theta_std": 0.05}`).
    seeds: how many, or a list, below 2**31. They train together, each with its own weights, shuffles and noise.
    optimizer: 'adam', 'adamw', 'sgd' (fused; `optimizer_options` go to its parameter groups), or a function that
        takes the parameter groups and returns a torch optimiser.
    schedule: 'linear' or 'cosine' to zero over the run, 'warmup-linear', which first rises, or 'constant'.
    protocol: 'clean' reports the last epoch on the test set; 'paper' the best test epoch, as the authors' code
        does; 'validation' holds out a tenth of the training data (the last tenth if they are windows of a
        sequence, which may overlap) and never uses the test set.
    checkpoint, resume: a .safetensors file, and whether to continue from it. It is written after every epoch, or less often
        if writing would take more than a tenth of the time, and at the end (unless `save_end` is false).
    loss: by default 'mse' for time series and 'cross_entropy' for all other data.
    clip: the largest gradient norm of a seed.
    alignment: whether to record the alignment of weights and updates with backpropagation's (slower).
    precision: 'tf32' or 'float32' (they differ only on CUDA), or 'bf16': products in bfloat16, weights in float32.
    stack: whether seeds are stacked in one set of tensors; by default if all layers are dense or the network is small.
    compile: whether to use `torch.compile`; by default in runs so long that it saves time.
    progress: whether to show a bar on a terminal, or one line per epoch on stderr elsewhere; a file gets the lines.
    on_epoch: called with the history rows of each epoch, such as `apical.TensorBoardWriter(folder)`. An exception it raises
        ends the run; the checkpoint has that epoch.
    stop_after: stop after this many epochs, without changing the schedule; `resume` continues from there.
    """

    model: Model
    data: str | Dataset | Sequence[Tensor]
    _: KW_ONLY
    rule: str | None = None
    epochs: int = 20
    seeds: int | Sequence[int] = 1
    lr: float = 1e-3
    batch_size: int = 128
    optimizer: str | OptimizerFactory = "adam"
    schedule: str = "linear"
    protocol: str = "clean"
    device: str = "auto"
    checkpoint: str | Path | None = None
    resume: bool = False
    save_end: bool = True
    loss: str | LossFunction | None = None
    label_smoothing: float = 0.0
    options: dict[str, Any] | None = None
    data_options: dict[str, Any] | None = None
    optimizer_options: dict[str, Any] | None = None
    clip: float | None = None
    alignment: bool = False
    precision: str = "tf32"
    stack: bool | None = None
    compile: bool | None = None
    progress: bool | TextIO = True
    on_epoch: OnEpoch | None = None
    stop_after: int | None = None

    @property
    def path(self) -> Path | None:
        """The path of the checkpoint, None without one."""
        if not isinstance(self.checkpoint, str | PathLike | None):
            raise ApicalError(f"checkpoint is {self.checkpoint!r}, but must be the path of a .safetensors file.")
        return None if self.checkpoint is None else Path(self.checkpoint)


P = ParamSpec("P")
A = TypeVar("A")
R = TypeVar("R")


def takes(arguments: Callable[P, A]) -> Callable[[Callable[[A], R]], Callable[P, R]]:
    """Let a function of a dataclass take the fields of that dataclass as its arguments, for type checkers and `help`."""

    def decorate(function: Callable[[A], R]) -> Callable[P, R]:
        signature = inspect.signature(arguments)

        @wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            try:
                signature.bind(*args, **kwargs)
            except TypeError as error:
                raise TypeError(f"{function.__name__}() {error}") from None
            return function(arguments(*args, **kwargs))

        returns = function.__annotations__["return"]
        call.__signature__ = signature.replace(return_annotation=returns)  # type: ignore[attr-defined]
        call.__annotations__ = {name: p.annotation for name, p in signature.parameters.items()} | {"return": returns}
        call.__doc__ = f"{function.__doc__}{str(arguments.__doc__).partition('.')[2]}"
        return call

    return decorate


@dataclass(frozen=True)
class Settings:
    """The settings of a run: those arguments of `fit` that decide its result. Checkpoints and results keep them."""

    rule: str
    model: str
    data: str
    epochs: int = FitArguments.epochs
    seeds: tuple[int, ...] = (0,)
    lr: float = FitArguments.lr
    batch_size: int = FitArguments.batch_size
    optimizer: str | OptimizerFactory = FitArguments.optimizer
    schedule: str = FitArguments.schedule
    protocol: str = FitArguments.protocol
    loss: str | LossFunction = "cross_entropy"
    label_smoothing: float = FitArguments.label_smoothing
    clip: float | None = FitArguments.clip
    precision: str = FitArguments.precision
    options: dict[str, Any] = field(default_factory=dict)
    data_options: dict[str, Any] = field(default_factory=dict)
    optimizer_options: dict[str, Any] = field(default_factory=dict)
    alignment: bool = FitArguments.alignment

    def __post_init__(self) -> None:
        for name in ("epochs", "batch_size"):
            check_whole_number(name, getattr(self, name))
        for name, value in {"lr": self.lr, **({} if self.clip is None else {"clip": self.clip})}.items():
            if not (is_number(value) and value > 0):
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
        if not callable(self.optimizer):
            # In a parameter group, torch silently ignores unknown names.
            options = set(inspect.signature(OPTIMIZERS[self.optimizer]).parameters) - _ENGINE_OPTIONS
            for name in self.optimizer_options:
                if name not in options:
                    raise ApicalError(
                        f"the optimizer {self.optimizer!r} has no option {name!r} here; its options: "
                        f"{', '.join(sorted(options))}."
                    )

    def check_optimizer_values(self) -> None:
        """Check the values of the optimiser's options, when a run begins: torch's constructor does, a group does not."""
        if callable(self.optimizer) or not self.optimizer_options:
            return
        try:
            OPTIMIZERS[self.optimizer]([torch.zeros(1, requires_grad=True)], **self.optimizer_options)
        except (ValueError, TypeError) as error:
            raise ApicalError(
                f"the optimizer {self.optimizer!r} cannot take {self.optimizer_options}: {str(error).rstrip('.')}."
            ) from error

    def to_dict(self) -> dict[str, Any]:
        """Return the settings as plain JSON values, for checkpoints and results; functions become their names."""
        values = {entry.name: getattr(self, entry.name) for entry in fields(self)}
        plain: dict[str, Any] = json.loads(json.dumps(values, default=get_name))
        return plain

    def compute_rates(self, steps: int) -> Tensor:
        """Return the schedule's factor at each of `steps` steps: the learning rate divided by `lr`."""
        if steps > MAX_STEPS:
            raise ApicalError(
                f"epochs={self.epochs} makes {steps:,} steps, more than the {MAX_STEPS:,} that a run may have."
            )
        progress = torch.arange(steps, dtype=torch.float64) / steps
        cosine = (1 + torch.cos(math.pi * progress)) / 2
        rising = torch.minimum((progress + 1 / steps) / WARMUP_SHARE, (1 - progress) / (1 - WARMUP_SHARE))
        factors = {
            "constant": torch.ones_like(progress),
            "linear": 1 - progress,
            "cosine": cosine,
            "warmup-linear": rising.clamp(max=1.0),
        }
        return factors[self.schedule].float()


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
    # Shuffles are drawn by a CPU generator, for which s and s + 2**31 are the same seed.
    if not isinstance(seeds, Sequence) or not all(type(s) is int and 0 <= s < 2**31 for s in seeds):
        raise ApicalError(
            f"seeds is {seeds!r}; a number of seeds or a list of whole numbers from 0 to 2**31 - 1 works."
        )
    if not seeds or len(set(seeds)) != len(seeds):
        raise ApicalError(f"seeds are {list(seeds)}, but must be different whole numbers, at least one.")
    return tuple(seeds)


def merge_settings(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Return settings with some of them changed; nested dictionaries, such as a rule's options, are merged, too.

    Options of an optimizer are not those of another one.

    >>> merge_settings({"lr": 0.1, "options": {"a": 1, "b": 2}}, {"options": {"b": 3}})
    {'lr': 0.1, 'options': {'a': 1, 'b': 3}}
    >>> merge_settings({"optimizer": "adamw", "optimizer_options": {"weight_decay": 3.0}}, {"optimizer": "sgd"})
    {'optimizer': 'sgd'}
    """
    before = base.get("optimizer", FitArguments.optimizer)
    if changes.get("optimizer", before) != before:
        base = {name: value for name, value in base.items() if name != "optimizer_options"}
    merged = dict(base)
    for name, value in changes.items():
        are_nested = isinstance(value, dict) and isinstance(base.get(name), dict)
        merged[name] = merge_settings(base[name], value) if are_nested else value
    return merged


def split_for_sweep(settings: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split keywords of `fit` for `sweep`: those that all trials share, and those of one trial.

    >>> split_for_sweep({"epochs": 5, "lr": 0.1})
    ({'epochs': 5}, {'lr': 0.1})
    """
    shared = {name: value for name, value in settings.items() if name not in TRIAL_SETTINGS}
    return shared, {name: value for name, value in settings.items() if name in TRIAL_SETTINGS}
