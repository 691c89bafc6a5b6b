"""`Learner`, the base class of all rules: an `nn.Module` that trains the user's own model in place.

A rule is a pure function of tensors,

    update(params, state, x, y, noise) -> (grads, state, loss, output)

with parameters, buffers, gradients and noise as dictionaries by name. `grads` has the sign of `.grad`: an optimiser
descends it. A rule that takes several optimiser steps per batch has several such functions, its `phases`. Everything
else here (names, checks, optimiser groups, writing `.grad`) is the same for every rule. A subclass that sets `NAME`
is a rule and is added to `RULES`.
"""

import re
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from apical.core import validation
from apical.core.activation import Noise
from apical.core.losses import Loss, LossFunction
from apical.core.network import Network, Params, SequentialNetwork
from apical.core.recurrent import Elman, RecurrentNetwork
from apical.core.registry import RULES
from apical.errors import ApicalError, UnsupportedError


class Credit(NamedTuple):
    """The result of `credit` and `step`: the mean loss of the batch, and the network's output."""

    loss: Tensor
    output: Tensor


class Update(NamedTuple):
    """The result of a rule's `update`: gradients by parameter name, the new state, the mean loss, the output."""

    grads: dict[str, Tensor]
    state: dict[str, Tensor]
    loss: Tensor
    output: Tensor


Phase = Callable[[Params, Params, Tensor, Tensor, Noise], Update]
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
    RECURRENT: ClassVar[bool] = False
    """Whether the rule can train an `apical.Elman`."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
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
        self.loss = Loss(loss, label_smoothing)
        self.model = model
        if input_shape is not None:
            validation.check_shape(input_shape)
            self.network.shapes(input_shape)
        # Found here, because torch.compile cannot trace a later walk through an nn.RNN.
        self._model_slots = _find_slots(model, "model.")
        self._own_slots: list[ParameterSlot] | None = None
        self._modules_at_init = [(m._modules, dict(m._modules)) for m in model.modules()]
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
    def bounds(self) -> dict[str, tuple[float, float]]:
        """The lowest and highest allowed value of parameters, by name. They are clamped after every step."""
        return {}

    @property
    def paced(self) -> frozenset[str]:
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
        """Check that no module of the model was added, removed or replaced since the learner was created.

        A new module would not be trained, and a removed one would be trained on.
        """
        if not torch.compiler.is_compiling() and any(now != then for now, then in self._modules_at_init):
            raise ApicalError(
                "the model's modules changed after the learner was created; create a new learner with apical.make(...)."
            )

    def forward(self, x: Tensor) -> Tensor:
        """Return the scores of a batch, for inference."""
        if not self.MODEL_PREDICTS:
            return self.predict(self.params(), self.state_tensors(), x)
        output: Tensor = self.model(x)
        return output

    def credit(self, x: Tensor, y: Tensor) -> Credit:
        """Assign credit for one batch: add to each parameter's `.grad`, as `loss.backward()` would."""
        if len(self.phases) > 1:
            raise ApicalError(
                f"{self.NAME!r} takes several optimiser steps for one batch: call learner.step(x, y, optim)."
            )
        return self._run(x, y, None)

    def step(self, x: Tensor, y: Tensor, optim: torch.optim.Optimizer) -> Credit:
        """Zero the gradients, assign credit, step the optimiser, and clamp the weights that have bounds."""
        if optim is None:
            raise ApicalError("step() needs an optimiser; credit(x, y) writes gradients and takes no step.")
        if not torch.compiler.is_compiling():
            validation.check_optimizer(type(optim))
        return self._run(x, y, optim)

    def _run(self, x: Tensor, y: Tensor, optim: torch.optim.Optimizer | None) -> Credit:
        """Run all phases, each followed by a step if there is an optimiser."""
        self.check_modules_unchanged()
        params, buffers = self.params(), self.state_tensors()
        validation.check_batch(self.network, self.loss, params, x, y)
        trainable = self.trainable
        if not trainable:
            raise validation.make_nothing_to_train_error()
        self._check_feedback_steps(self.name, params, trainable)
        state = dict(buffers)
        with torch.no_grad():
            noise = self.draw(x)
            for phase in self.phases:
                if optim is not None:
                    optim.zero_grad()
                update = check_update(self.name, params, phase(params, state, x, y, noise))
                validation.check_finite(update.loss)
                for name, gradient in update.grads.items():
                    accumulate_gradient(params[name], gradient)
                state |= update.state
                if optim is not None:
                    optim.step()
                    clamp_to_bounds(params, self.bounds)
            for name, buffer in buffers.items():
                if state[name] is not buffer:
                    buffer.copy_(state[name])
        return Credit(update.loss, update.output)

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
        trainable = self.trainable
        groups = []
        for group, names in members.items():
            params = [self.get_parameter(name) for name in names if name in trainable]
            if params:
                groups.append({"name": group, "params": params, "lr": lr, **options})
        return groups


def _find_slots(module: nn.Module, prefix: str) -> list[ParameterSlot]:
    """Find where each parameter of a module is stored."""
    owners = dict(module.named_modules())
    split = [(name, *name.rpartition(".")[::2]) for name, _ in module.named_parameters()]
    return [(prefix + name, owners[owner]._parameters, key) for name, owner, key in split]


def check_update(rule: str, params: Params, update: Any) -> Update:
    """Return what a rule's update returned, after a check of its type and of the gradients' names and shapes.

    Without it, a gradient of another shape would be broadcast silently.
    """
    if not isinstance(update, Update):
        raise ApicalError(
            f"the update of rule {rule!r} returned {type(update).__name__}; apical.Update(grads, state, loss, output) works."
        )
    for name, gradient in update.grads.items():
        if name not in params:
            raise ApicalError(
                f"rule {rule!r} has a gradient for {name!r}, which is no parameter; learner.params() has all, such as "
                f"{next(iter(params))!r}."
            )
        shape = gradient.shape if isinstance(gradient, Tensor) else None
        if shape != params[name].shape:
            found = type(gradient).__name__ if shape is None else f"shape {tuple(shape)}"
            raise ApicalError(
                f"rule {rule!r} has a gradient of {found} for {name}, which is of shape {tuple(params[name].shape)}; the "
                "two must be the same."
            )
    return update


def accumulate_gradient(parameter: Tensor, gradient: Tensor) -> None:
    """Add to `.grad`, with the parameter's dtype and strides, which fused optimisers rely on."""
    if parameter.grad is not None:
        parameter.grad += gradient
    elif gradient.dtype == parameter.dtype and gradient.stride() == parameter.stride():
        parameter.grad = gradient
    else:
        parameter.grad = torch.empty_like(parameter).copy_(gradient)


def clamp_to_bounds(params: Params, bounds: dict[str, tuple[float, float]]) -> None:
    """Clamp the parameters that have bounds, in place."""
    for name, (low, high) in bounds.items():
        params[name].detach().clamp_(low, high)
