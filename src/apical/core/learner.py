"""The shell around a rule: an `nn.Module` that trains the user's own model in place.

A rule is a pure function of tensors,

    update(params, state, x, y, noise) -> (grads, state, loss, output)

with parameters, buffers, gradients and noise as dictionaries by name; `grads` has what autograd would put into
`.grad`: the direction to descend. A rule that takes several optimiser steps per batch is a tuple of such
functions, its `phases`. Everything else here (names, checks, optimiser groups, writing `.grad`) is the same for
every rule. A subclass that sets `NAME` is a rule, and is listed in `RULES` from then on.
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
    """What `credit` and `step` return: the mean loss of the batch, and the network's output for it."""

    loss: Tensor
    output: Tensor


class Update(NamedTuple):
    """What a rule computes: gradients by parameter name, the new state, the mean loss, the output."""

    grads: dict[str, Tensor]
    state: dict[str, Tensor]
    loss: Tensor
    output: Tensor


Phase = Callable[[Params, Params, Tensor, Tensor, Noise], Update]
Place = tuple[str, dict[str, nn.Parameter | None], str]
"""A parameter's name, and where it is kept: in which module's dictionary, under which key."""


class Claims(NamedTuple):
    """What the paper says of a rule: C1 asymmetric weights, C2 local error, C3 no two stages."""

    c1: bool
    c2: bool
    c3: bool


class Learner(nn.Module):
    """Base class of every rule. `model` is trained in place and stays an ordinary module of yours."""

    NAME: ClassVar[str] = ""
    """The rule's name in `RULES`, on the command line and in tables."""
    TITLE: ClassVar[str] = ""
    SOURCE: ClassVar[str] = ""
    """Authors, year and title of the work that the rule comes from."""
    FEEDBACK: ClassVar[str] = ""
    """One line: how the feedback weights come about and change."""
    CLAIMS: ClassVar[Claims | None] = None
    MODEL_PREDICTS: ClassVar[bool] = True
    """Whether the plain model gives the predictions, so that it runs on without apical."""
    PARALLEL: ClassVar[bool] = False
    """Whether the rule can train an `apical.Parallel` of several branches."""
    VARIANTS: ClassVar[tuple[str, ...]] = ()
    """The values of the option `VARIANT`; the first is the default."""
    VARIANT: ClassVar[str] = ""
    RECURRENT: ClassVar[bool] = False
    """Whether the rule trains an `apical.Elman`, too."""

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
            cls.CLAIMS = None  # what the paper says of a rule is not said of those that are made from it
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
        self.network = self._network(model)
        self.loss = Loss(loss, label_smoothing)
        self.model = model
        if input_shape is not None:
            validation.shape(input_shape)
            self.network.shapes(input_shape)
        # Now, since a compiler that comes upon an nn.RNN later gives up.
        self._places = _places(model, "model.")
        self._own_places: list[Place] | None = None
        self._modules_then = [(m._modules, dict(m._modules)) for m in model.modules()]
        self._watch = validation.LeftOut()

    @classmethod
    def _network(cls, model: nn.Sequential | Elman) -> Network:
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

    # What a rule defines.

    def update(self, params: Params, state: Params, x: Tensor, y: Tensor, noise: Noise) -> Update:
        """The rule: pure in its arguments. Runs under `torch.no_grad`, `torch.vmap` and `torch.compile`."""
        raise NotImplementedError(f"{type(self).__name__} has no update().")

    @property
    def phases(self) -> tuple[Phase, ...]:
        """What is done for one batch: updates, each followed by a step of the optimiser. Most rules have one.

        Each phase sees the weights that the one before it left. State that is not a buffer is handed on to the
        next phase and forgotten after the last, whose loss and output are the ones reported.
        """
        return (self.update,)

    @property
    def bounds(self) -> dict[str, tuple[float, float]]:
        """Parameters that must stay between two values, by name; kept there after every step."""
        return {}

    @property
    def paced(self) -> frozenset[str]:
        """Buffers that learn at a rate of the rule's own: in `fit` their steps shrink as the optimiser's rates do."""
        return frozenset()

    def predict(self, params: Params, state: Params, x: Tensor) -> Tensor:
        """The scores of a batch, as a pure function; rules whose model does not predict override it."""
        return self.network.predict(params, x, {})

    def draw(self, x: Tensor, generator: torch.Generator | None = None) -> dict[str, Tensor]:
        """All the randomness of one update, drawn outside of it."""
        return self.network.draw(x, generator)

    def touches(self, name: str) -> bool:
        """Whether the rule updates the parameter of this name at all."""
        return True

    @property
    def feedback_weights(self) -> list[Tensor | None]:
        """For each layer, the live weights that bring the error to its input; None where there are none."""
        return [None] * len(self.network)

    # What users call.

    @property
    def name(self) -> str:
        """The name that `make` takes: `NAME`, or `NAME:VARIANT` where the variant is not the default."""
        variant = getattr(self, self.VARIANT) if self.VARIANTS else None
        return self.NAME if not self.VARIANTS or variant == self.VARIANTS[0] else f"{self.NAME}:{variant}"

    @property
    def forward_weights(self) -> list[Tensor]:
        """Each layer's W, in order, live."""
        return [self.get_parameter(layer.weight) for layer in self.network.layers]

    @property
    def trainable(self) -> frozenset[str]:
        """Names of the parameters that learn: those with `requires_grad` that the rule touches."""
        return frozenset(n for n, p in self.params().items() if p.requires_grad and self.touches(n))

    def params(self) -> dict[str, nn.Parameter]:
        """The parameters by name, as `update` takes them: `named_parameters()` without its walk over all modules."""
        if self._own_places is None:
            self._own_places = [(name, self._parameters, name) for name in self._parameters]
            self._own_places += [place for name, child in self._own() for place in _places(child, f"{name}.")]
        return {name: owner[key] for name, owner, key in self._places + self._own_places}  # type: ignore[misc]

    def state_tensors(self) -> dict[str, Tensor]:
        """The buffers by name, as `update` takes them; a model that apical reads has none."""
        own = [(f"{name}.{key}", b) for name, child in self._own() for key, b in child.named_buffers()]
        return dict([*((name, b) for name, b in self._buffers.items() if b is not None), *own])

    def _own(self) -> list[tuple[str, nn.Module]]:
        """What the learner holds beside the model."""
        return [(name, child) for name, child in self.named_children() if name != "model"]

    def require_unchanged(self) -> None:
        """A model that has the modules it had: those that were put in later would not learn, those taken out would."""
        if not torch.compiler.is_compiling() and any(now != then for now, then in self._modules_then):
            raise ApicalError(
                "the model's modules are not those that the learner was made for; make it anew."
            )

    def forward(self, x: Tensor) -> Tensor:
        """Scores of a batch, for inference."""
        if not self.MODEL_PREDICTS:
            return self.predict(self.params(), self.state_tensors(), x)
        output: Tensor = self.model(x)
        return output

    def credit(self, x: Tensor, y: Tensor) -> Credit:
        """Assign credit for one batch: adds to each parameter's `.grad`, as `loss.backward()` would."""
        if len(self.phases) > 1:
            raise ApicalError(
                f"{self.NAME!r} takes several optimiser steps for one batch: call learner.step(x, y, optim)."
            )
        return self._run(x, y, None)

    def step(self, x: Tensor, y: Tensor, optim: torch.optim.Optimizer) -> Credit:
        """Zero the gradients, assign credit, let the optimiser step, and keep bounded weights in their bounds."""
        if optim is None:
            raise ApicalError("step() needs an optimiser; credit(x, y) writes gradients and takes no step.")
        if not torch.compiler.is_compiling():
            validation.steps_by_gradients(type(optim))
        return self._run(x, y, optim)

    def _run(self, x: Tensor, y: Tensor, optim: torch.optim.Optimizer | None) -> Credit:
        """All phases, each followed by a step where there is an optimiser."""
        self.require_unchanged()
        params, buffers = self.params(), self.state_tensors()
        validation.batch(self.network, self.loss, params, x, y)
        trainable = self.trainable
        if not trainable:
            raise validation.nothing_to_train()
        self._watch(self.name, params, trainable)
        state = dict(buffers)
        with torch.no_grad():
            noise = self.draw(x)
            for phase in self.phases:
                if optim is not None:
                    optim.zero_grad()
                update = sound(self.name, params, phase(params, state, x, y, noise))
                validation.finite(update.loss)
                for name, gradient in update.grads.items():
                    accumulate(params[name], gradient)
                state |= update.state
                if optim is not None:
                    optim.step()
                    confine(params, self.bounds)
            for name, buffer in buffers.items():
                if state[name] is not buffer:
                    buffer.copy_(state[name])
        return Credit(update.loss, update.output)

    def param_groups(self, lr: float, **options: Any) -> list[dict[str, Any]]:
        """Optimiser groups `W` and `bias` (and `theta`, where a rule has one), for any torch optimiser.

        `options` go to every group. Schedulers that take one rate per group (`OneCycleLR`'s `max_lr`) want a
        list of as many values as there are groups: `[group["lr"] for group in optim.param_groups]`.
        """
        layers = self.network.layers
        return self._groups(
            lr,
            options,
            W=[layer.weight for layer in layers],
            bias=[layer.bias for layer in layers if layer.bias is not None],
        )

    def _groups(self, lr: float, options: dict[str, Any], **members: list[str]) -> list[dict[str, Any]]:
        """One group per non-empty list of trainable parameters."""
        trainable = self.trainable
        groups = []
        for group, names in members.items():
            params = [self.get_parameter(name) for name in names if name in trainable]
            if params:
                groups.append({"name": group, "params": params, "lr": lr, **options})
        return groups


def _places(module: nn.Module, prefix: str) -> list[Place]:
    owners = dict(module.named_modules())
    split = [(name, *name.rpartition(".")[::2]) for name, _ in module.named_parameters()]
    return [(prefix + name, owners[owner]._parameters, key) for name, owner, key in split]


def sound(rule: str, params: Params, update: Any) -> Update:
    """What a rule returned, refused where it is no update; a gradient of another shape would be broadcast in silence."""
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


def accumulate(parameter: Tensor, gradient: Tensor) -> None:
    """Add to `.grad`, in the parameter's own type and memory layout (fused optimisers rely on the latter)."""
    if parameter.grad is not None:
        parameter.grad += gradient
    elif gradient.dtype == parameter.dtype and gradient.stride() == parameter.stride():
        parameter.grad = gradient
    else:
        parameter.grad = torch.empty_like(parameter).copy_(gradient)


def confine(params: Params, bounds: dict[str, tuple[float, float]]) -> None:
    """Put the parameters that left their bounds back on them."""
    for name, (low, high) in bounds.items():
        params[name].detach().clamp_(low, high)
