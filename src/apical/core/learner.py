"""`Learner`, the base class of all rules: an `nn.Module` that trains the user's own model in place.

A rule is a pure function of tensors,

    update(params, state, x, y, noise) -> (grads, state, loss, output)

with parameters, buffers, gradients and noise as dictionaries by name. `grads` has the sign of `.grad`: an optimiser
descends it. A rule that takes several optimiser steps per batch has several such functions, its `phases`. Everything
else here (names, checks, optimiser groups, writing `.grad`) is the same for every rule. A subclass that sets `NAME`
is a rule and is added to `RULES`.
"""

import functools
import inspect
import re
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from apical.core import validation
from apical.core.activation import Noise
from apical.core.losses import Loss, LossFunction
from apical.core.network import Network, Params
from apical.core.phases import Phase as Phase
from apical.core.phases import Update as Update
from apical.core.phases import accumulate_gradient, check_phase, run_phases
from apical.core.recurrent import Elman, RecurrentNetwork
from apical.core.registry import RULES, options_of
from apical.core.sequential import SequentialNetwork
from apical.errors import ApicalError, UnsupportedError


class Credit(NamedTuple):
    """The result of `credit` and `step`: the mean loss of the batch, and the network's output."""

    loss: Tensor
    output: Tensor


ParameterSlot = tuple[str, dict[str, nn.Parameter | None], str]
"""A parameter's full name, the `_parameters` dictionary of the module that owns it, and its key there."""


class Claims(NamedTuple):
    """The criteria that the DLL paper says a rule meets: C1 asymmetric weights, C2 local error, C3 no two stages."""

    c1: bool
    c2: bool
    c3: bool


class Learner(nn.Module):
    """Base class of every rule. It trains `model` in place; the model remains an ordinary `nn.Module`."""

    NAME: ClassVar[str] = ""
    """The rule's name in `RULES`, on the command line and in tables."""
    TITLE: ClassVar[str] = ""
    SOURCE: ClassVar[str] = ""
    """Authors, year and title of the work that the rule comes from."""
    FEEDBACK: ClassVar[str] = ""
    """One line: where the feedback weights come from and how they change."""
    CLAIMS: ClassVar[Claims | None] = None
    MODEL_PREDICTS: ClassVar[bool] = True
    """Whether `model(x)` gives the predictions, so that a trained model can be used without apical."""
    PARALLEL: ClassVar[bool] = False
    """Whether the rule can train an `apical.Parallel` of several branches."""
    VARIANTS: ClassVar[tuple[str, ...]] = ()
    """The values of the option `VARIANT`; the first is the default."""
    VARIANT: ClassVar[str] = ""
    NEW_VARIANTS: ClassVar[tuple[str, ...]] = ()
    """Variants to which `CLAIMS` does not apply."""
    RECURRENT: ClassVar[bool] = False
    """Whether the rule can train an `apical.Elman`."""
    HOOKS: ClassVar[bool] = True
    """Whether the modules between the weights may have forward hooks: the rule runs them as they are."""

    given_options: dict[str, Any] = {}  # noqa: RUF012 (replaced, never written to)
    """The rule's own options that the learner was created with."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "__init__" in cls.__dict__:
            cls.__init__ = _record_options(cls.__init__)  # type: ignore[method-assign]
        name = cls.__dict__.get("NAME")
        if name is None:
            return
        if not re.fullmatch(r"[\w-]+", name):
            raise ApicalError(
                f"a rule cannot be called {name!r}: letters, digits, - and _ work; the colon separates a name from its "
                "variant, commas separate rules."
            )
        known = RULES.get(name)
        if known is not None and known.__module__.split(".")[0] == "apical" != cls.__module__.split(".")[0]:
            raise ApicalError(f"apical has a rule called {name!r} already; give yours another NAME.")
        if cls.__module__.split(".")[0] != "apical" and "CLAIMS" not in cls.__dict__:
            cls.CLAIMS = None  # the paper says nothing about rules that users derive from ours
        RULES[name] = cls

    def __init__(
        self,
        model: nn.Sequential | Elman,
        *,
        input_shape: tuple[int, ...] | None = None,
        loss: str | LossFunction = "cross_entropy",
        label_smoothing: float = 0.0,
    ) -> None:
        super().__init__()
        self.network = self._read_network(model)
        validation.check_weights(self.network, model)
        self.loss = Loss(loss, label_smoothing)
        self.model = model
        if input_shape is not None:
            validation.check_shape(input_shape)
            self.network.shapes(input_shape)
        # Found here, because torch.compile cannot trace a later walk through an nn.RNN.
        self._model_slots = _find_slots(model, "model.")
        self._own_slots: list[ParameterSlot] | None = None
        self._check_model = validation.ModelCheck(model, self.network, self.HOOKS)
        self._check_feedback_steps = validation.FeedbackStepCheck()

    @classmethod
    def _read_network(cls, model: nn.Sequential | Elman) -> Network:
        """Read the model as layers, and refuse a kind of model that the rule cannot train."""
        if isinstance(model, Elman):
            if not cls.RECURRENT:
                works = ", ".join(name for name, rule in RULES.items() if rule.RECURRENT)
                raise UnsupportedError(f"rule {cls.NAME!r} cannot train a recurrent network; {works} can.")
            return RecurrentNetwork(model)
        network = SequentialNetwork(model)
        fan = next((tier for tier in network.tiers if len(tier.layers) > 1), None)
        if fan is not None and not cls.PARALLEL:
            works = ", ".join(name for name, rule in RULES.items() if rule.PARALLEL)
            raise UnsupportedError(
                f"layer {fan.name} is a Parallel of {len(fan.layers)} branches, which {cls.NAME!r} cannot train; "
                f"{works} can."
            )
        return network

    # What a rule defines or overrides.

    def update(self, params: Params, state: Params, x: Tensor, y: Tensor, noise: Noise) -> Update:
        """Compute one update from a batch, as a pure function.

        It is called under `torch.no_grad`, and must work under `torch.vmap` and `torch.compile`.
        """
        raise NotImplementedError(f"{type(self).__name__} has no update().")

    @property
    def phases(self) -> tuple[Phase, ...]:
        """The updates of one batch, each followed by an optimiser step. Most rules have one.

        Each phase sees the weights after the previous phase's step. State that is not a buffer is passed to the next
        phase and dropped after the last one. The last phase's loss and output are reported.
        """
        return (self.update,)

    @property
    def warmup(self) -> int:
        """The number of batches at the beginning for which `phases_after` differs from `phases`."""
        return 0

    def phases_after(self, done: int) -> tuple[Phase, ...]:
        """Return the phases of a batch that comes after so many others."""
        return self.phases

    @property
    def batch_phases(self) -> tuple[Phase, ...]:
        """Phases whose gradients belong to the batch that they are given, for measurements."""
        return self.phases

    def allocate(self, x: Tensor, y: Tensor) -> None:
        """Create the state for batches of this size. Most rules have none that depends on it."""

    @property
    def bounds(self) -> dict[str, tuple[float, float]]:
        """The lowest and highest allowed value of parameters, by name. They are clamped after every step."""
        return {}

    @property
    def scheduled_buffers(self) -> frozenset[str]:
        """Names of the buffers that the rule itself trains: `fit` applies the learning-rate schedule to them, too."""
        return frozenset()

    def predict(self, params: Params, state: Params, x: Tensor) -> Tensor:
        """Return the scores of a batch, as a pure function. Rules with `MODEL_PREDICTS = False` override it."""
        return self.network.predict(params, x, {})

    def draw(self, x: Tensor, generator: torch.Generator | None = None) -> dict[str, Tensor]:
        """Draw all random numbers that one update needs."""
        return self.network.draw(x, generator)

    def touches(self, name: str) -> bool:
        """Return whether the rule ever updates the parameter of this name."""
        return True

    @property
    def feedback_weights(self) -> list[Tensor | None]:
        """For each layer, the weights that carry the error to its input (not copies); None if it has none."""
        return [None] * len(self.network)

    # What users call.

    @property
    def name(self) -> str:
        """The name that `make` takes: `NAME`, or `NAME:VARIANT` if the variant is not the default."""
        variant = getattr(self, self.VARIANT) if self.VARIANTS else None
        return self.NAME if not self.VARIANTS or variant == self.VARIANTS[0] else f"{self.NAME}:{variant}"

    @property
    def forward_weights(self) -> list[Tensor]:
        """Each layer's weights W, in order (not copies)."""
        return [self.get_parameter(layer.weight) for layer in self.network.layers]

    @property
    def trainable(self) -> frozenset[str]:
        """Names of the parameters that learn: they have `requires_grad`, and the rule updates them."""
        return frozenset(n for n, p in self.params().items() if p.requires_grad and self.touches(n))

    def params(self) -> dict[str, nn.Parameter]:
        """Return the parameters by name, as `update` takes them; faster than `named_parameters()`."""
        if self._own_slots is None:
            self._own_slots = [(name, self._parameters, name) for name in self._parameters]
            self._own_slots += [slot for name, child in self._own_children() for slot in _find_slots(child, f"{name}.")]
        return {name: owner[key] for name, owner, key in self._model_slots + self._own_slots}  # type: ignore[misc]

    def state_tensors(self) -> dict[str, Tensor]:
        """Return the rule's buffers by name, as `update` takes them. The model has none, or it would be refused."""
        own = [(f"{name}.{key}", b) for name, child in self._own_children() for key, b in child.named_buffers()]
        return dict([*((name, b) for name, b in self._buffers.items() if b is not None), *own])

    def _own_children(self) -> list[tuple[str, nn.Module]]:
        """Return the learner's child modules other than the model."""
        return [(name, child) for name, child in self.named_children() if name != "model"]

    def check_modules_unchanged(self) -> None:
        """Check that the model is the one that the learner was created for, and has no hooks that would not run."""
        self._check_model()

    def forward(self, x: Tensor) -> Tensor:
        """Return the scores of a batch, for inference."""
        if not self.MODEL_PREDICTS:
            self.check_modules_unchanged()
            return self.predict(self.params(), self.state_tensors(), x)
        output: Tensor = self.model(x)
        return output

    def credit(self, x: Tensor, y: Tensor) -> Credit:
        """Assign credit for one batch: add to each parameter's `.grad`, as `loss.backward()` would."""
        self.check_modules_unchanged()
        if len(self.phases) > 1:
            raise ApicalError(
                f"{self.NAME!r} takes several optimiser steps for one batch: call learner.step(x, y, optim)."
            )
        return self._run(x, y, None)

    def step(self, x: Tensor, y: Tensor, optim: torch.optim.Optimizer) -> Credit:
        """Zero the gradients, assign credit, step the optimiser, and clamp the weights that have bounds."""
        if optim is None:
            raise ApicalError("step() needs an optimiser; credit(x, y) writes gradients and takes no step.")
        self.check_modules_unchanged()
        if not torch.compiler.is_compiling():
            validation.check_optimizer(type(optim))
        return self._run(x, y, optim)

    def _run(self, x: Tensor, y: Tensor, optim: torch.optim.Optimizer | None) -> Credit:
        """Check the batch and run the phases, each followed by a step if there is an optimiser."""
        params = self.params()
        validation.check_batch(self.network, self.loss, params, x, y)
        trainable = self.trainable
        if not trainable:
            raise validation.make_nothing_to_train_error()
        self._check_feedback_steps(self.name, params, trainable)

        def write_gradients(update: Update, is_last: bool) -> None:
            for name, gradient in update.grads.items():
                accumulate_gradient(params[name], gradient)

        stepping: dict[str, Any] = {}
        if optim is not None:
            stepping = {"zero_grad": optim.zero_grad, "step": optim.step, "bounds": self.bounds}
        self.allocate(x, y)
        phases = [check_phase(self.name, phase, checks_loss=True) for phase in self._get_next_phases()]
        with torch.no_grad():
            batch, state = (x, y, self.draw(x)), self.state_tensors()
            update = run_phases(phases, params, state, batch, write_gradients, **stepping)
        return self._report(update, x)

    def _report(self, update: Update, x: Tensor) -> Credit:
        """Return what a call of `credit` or `step` tells of an update."""
        return Credit(update.loss, update.output)

    def _get_next_phases(self) -> tuple[Phase, ...]:
        """Return the phases of the next batch."""
        return self.phases

    def get_checked_phases(self, done: int) -> list[Phase]:
        """Return `phases_after(done)`, each with a check of its update. Under `vmap`, it sees the shapes of one learner."""
        return [check_phase(self.name, phase) for phase in self.phases_after(done)]

    def param_groups(self, lr: float, **options: Any) -> list[dict[str, Any]]:
        """Return the parameter groups `W` and `bias` (and those of the rule) for any torch optimiser.

        `options` are added to every group. A scheduler with one rate per group (`OneCycleLR`'s `max_lr`) takes
        `[group["lr"] for group in optim.param_groups]`.
        """
        layers = self.network.layers
        return self._groups(
            lr,
            options,
            W=[layer.weight for layer in layers],
            bias=[layer.bias for layer in layers if layer.bias is not None],
        )

    def _groups(self, lr: float, options: dict[str, Any], **members: list[str]) -> list[dict[str, Any]]:
        """Return one parameter group per list of names, without parameters that do not learn and without empty groups."""
        self.check_modules_unchanged()
        trainable = self.trainable
        groups = []
        for group, names in members.items():
            params = [self.get_parameter(name) for name in names if name in trainable]
            if params:
                groups.append({"name": group, "params": params, "lr": lr, **options})
        return groups


def _record_options(init: Callable[..., None]) -> Callable[..., None]:
    """Wrap a rule's `__init__` so that the learner knows the options that it was created with."""
    signature = inspect.signature(init)

    @functools.wraps(init)
    def init_and_record(self: Learner, *args: Any, **keywords: Any) -> None:
        if "given_options" not in self.__dict__:  # the first call is that of the rule's own class
            given, known = signature.bind(self, *args, **keywords).arguments, options_of(type(self))
            self.given_options = {name: value for name, value in given.items() if name in known}
        init(self, *args, **keywords)

    return init_and_record


def _find_slots(module: nn.Module, prefix: str) -> list[ParameterSlot]:
    """Find where each parameter of a module is stored."""
    owners = dict(module.named_modules())
    split = [(name, *name.rpartition(".")[::2]) for name, _ in module.named_parameters()]
    return [(prefix + name, owners[owner]._parameters, key) for name, owner, key in split]
