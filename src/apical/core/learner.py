"""`Learner`, the base class of all rules: an `nn.Module` that trains the user's own model in place.

A rule is a pure function of tensors,

    update(params, state, x, y, noise) -> (grads, state, loss, output)

with parameters, buffers, gradients and noise as dictionaries by name. `grads` has the sign of `.grad`: an optimiser
descends it. A rule that takes several optimiser steps per batch has several such functions, its `phases`. Everything
else here (names, checks, optimiser groups, writing `.grad`) is the same for every rule. A subclass that sets `NAME`
is a rule and is added to `RULES`.
"""

import re
from contextlib import nullcontext
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.amp import GradScaler

from apical.core import advice, validation
from apical.core.activation import Noise
from apical.core.losses import Loss, LossFunction
from apical.core.modules import ParameterSlot, find_slots
from apical.core.network import Network, Params
from apical.core.phases import Phase as Phase
from apical.core.phases import Update as Update
from apical.core.phases import accumulate_gradient, check_phase, run_phases
from apical.core.recording import Recording
from apical.core.recurrent import Elman, RecurrentNetwork
from apical.core.registry import RULES, record_options
from apical.core.sequential import SequentialNetwork
from apical.core.streams import SideStreams
from apical.core.transport import refuse_backward
from apical.core.wiring import unwire
from apical.errors import ApicalError, UnsupportedError


class Credit(NamedTuple):
    """The result of `credit` and `step`: the mean loss of the batch, and the network's output."""

    loss: Tensor
    output: Tensor


class Claims(NamedTuple):
    """The criteria that a rule meets, as the DLL paper says or as the audit measured (None: undecided):
    C1 asymmetric weights, C2 local error, C3 no two stages."""

    c1: bool | None
    c2: bool | None
    c3: bool | None


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

    streams: SideStreams = SideStreams(0)
    """CUDA streams on which the work of `update` may still run when it returns, while it is captured in a graph.

    Events are recorded under names: that of a parameter after its last use, "batch" after the batch was read, "output" and
    "loss" after they were computed. Wait for the event before you overwrite or read the tensor."""
    given_options: dict[str, Any] = {}  # noqa: RUF012 (replaced, never written to)
    """The rule's own options that the learner was created with."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "__init__" in cls.__dict__:
            cls.__init__ = record_options(cls.__init__)  # type: ignore[method-assign]
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
        if torch.is_inference_mode_enabled():
            raise ApicalError("a learner that is made in torch.inference_mode() cannot learn; make it outside of it.")
        if isinstance(model, nn.Module):
            unwire(model)
        self.network = self._read_network(model)
        validation.check_weights(self.network, model)
        self.loss = Loss(loss, label_smoothing)
        self.model = model
        if input_shape is not None:
            validation.check_shape(input_shape)
            self.network.shapes(input_shape)
        # Found here, because torch.compile cannot trace a later walk through an nn.RNN.
        self._model_slots = find_slots(model, "model.")
        self._own_slots: list[ParameterSlot] | None = None
        self._check_model = validation.ModelCheck(model, self.network, self.HOOKS)
        self._check_feedback_steps = advice.FeedbackStepCheck()
        self._check_own_rates = advice.OwnRateCheck()
        self._recording: Recording | None = None
        advice.warn_of_softmax(model, self.loss)

    def _read_network(self, model: nn.Sequential | Elman) -> Network:
        """Read the model as layers, and refuse a kind of model that the rule cannot train."""
        cls = type(self)
        if isinstance(model, Elman):
            if not cls.RECURRENT:
                works = ", ".join(name for name, rule in RULES.items() if rule.RECURRENT)
                raise UnsupportedError(f"rule {cls.NAME!r} cannot train a recurrent network; {works} can.")
            return RecurrentNetwork(model)
        network = SequentialNetwork(model)
        parallel = next((tier for tier in network.tiers if len(tier.layers) > 1), None)
        if parallel is not None and not cls.PARALLEL:
            works = ", ".join(name for name, rule in RULES.items() if rule.PARALLEL)
            raise UnsupportedError(
                f"layer {parallel.name} is a Parallel of {len(parallel.layers)} branches, which {cls.NAME!r} cannot train; "
                f"{works} can."
            )
        return network

    # What a rule defines or overrides.

    def update(self, params: Params, state: Params, x: Tensor, y: Tensor, noise: Noise) -> Update:
        """Compute one update from a batch, as a pure function.

        It is called under `torch.no_grad`, and must work under `torch.vmap` and `torch.compile`.
        """
        raise UnsupportedError(
            f"rule {self.NAME or type(self).__name__!r} has no update(); define update(self, params, state, x, y, noise) "
            "that returns apical.Update(grads, state, loss, output)."
        )

    @property
    def phases(self) -> tuple[Phase, ...]:
        """The updates of one batch, each followed by an optimiser step. Most rules have one.

        Each phase sees the weights after the previous phase's step. State that is not a buffer is passed to the next
        phase and dropped after the last one. The last phase's loss and output are reported.
        """
        return (self.update,)

    @property
    def warmup(self) -> int:
        """The number of batches at the beginning that have phases of their own."""
        return 0

    @property
    def period(self) -> int:
        """After how many batches the phases repeat, once the rule has warmed up."""
        return 1

    def phases_after(self, done: int) -> tuple[Phase, ...]:
        """Return the phases of a batch that comes after so many others."""
        return self.phases

    def count_batches(self) -> int:
        """Return how many batches the state comes from, if the phases depend on that; otherwise 0."""
        return 0

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
            self._own_slots += [slot for name, child in self._own_children() for slot in find_slots(child, f"{name}.")]
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
        self.reconnect()

    def reconnect(self) -> None:
        """Take the model back from another learner that was made of it in the meantime, with what that one froze."""
        if "link" in self.model.__dict__:
            unwire(self.model)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        """Save the state as torch does, and the rule's name in its metadata."""
        super()._save_to_state_dict(destination, prefix, keep_vars)
        metadata = getattr(destination, "_metadata", {})
        metadata.setdefault(prefix[:-1], {})["rule"] = self.NAME

    def _load_from_state_dict(self, state_dict: Any, prefix: str, local_metadata: Any, *rest: Any) -> None:
        """Load the state as torch does, unless it is that of another rule."""
        rule = local_metadata.get("rule", self.NAME)
        if rule != self.NAME:
            raise ApicalError(
                f"the state is that of a {rule!r} learner, and this one is {self.NAME!r}; "
                "learner.model.load_state_dict(...) loads the weights of the network alone."
            )
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *rest)

    def forward(self, x: Tensor) -> Tensor:
        """Return the scores of a batch, for inference: this rule is not run by `backward()`."""
        if self.MODEL_PREDICTS:
            output: Tensor = self.model(x)
        else:
            self.check_modules_unchanged()
            output = self.predict(self.params(), self.state_tensors(), x)
        return refuse_backward(output, self.name) if output.requires_grad else output

    def credit(self, x: Tensor, y: Tensor, *, scaler: GradScaler | None = None) -> Credit:
        """Assign credit for one batch: add to each parameter's `.grad`, as `loss.backward()` would.

        With a GradScaler the gradients are multiplied by its scale, as after `scaler.scale(loss).backward()`.
        """
        self.check_modules_unchanged()
        if len(self.phases) > 1:
            raise ApicalError(
                f"{self.NAME!r} takes several optimiser steps for one batch: call learner.step(x, y, optim)."
            )
        validation.check_scaler(scaler)
        return self._run(x, y, None, scaler)

    def step(self, x: Tensor, y: Tensor, optim: torch.optim.Optimizer, *, scaler: GradScaler | None = None) -> Credit:
        """Zero the gradients, assign credit, step the optimiser, and clamp the weights that have bounds.

        With a GradScaler the step is `scaler.step(optim)` and `scaler.update()`: it is left out if a gradient overflows.
        """
        self.check_modules_unchanged()
        if not torch.compiler.is_compiling():
            validation.check_step(optim, scaler, self.params(), self.trainable)
            self._check_own_rates(self, optim)
        return self._run(x, y, optim, scaler)

    def record(self) -> Recording:
        """Record the input u, the drive, and the errors ξ and δ of each layer, in every batch from now on.

        The recording always has the last batch that `credit` or `step` ran, and is the same object until it is stopped.

        >>> from apical import make
        >>> learner = make("bp", nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)))
        >>> with learner.record() as layers:
        ...     _ = learner.credit(torch.randn(8, 4), torch.randint(0, 2, (8,)))
        >>> [(layer.name, tuple(layer.u.shape), tuple(layer.delta.shape)) for layer in layers]
        [('0', (8, 4), (8, 3)), ('2', (8, 3), (8, 2))]
        """
        if self._recording is None or not self._recording.is_on:
            self._recording = Recording(self.network, self.model)
        return self._recording

    def _run(
        self, x: Tensor, y: Tensor, optim: torch.optim.Optimizer | None, scaler: GradScaler | None = None
    ) -> Credit:
        """Check the batch and run the phases, each followed by a step if there is an optimiser."""
        if not torch.compiler.is_compiling() and torch.is_inference_mode_enabled():
            raise ApicalError("nothing can learn in torch.inference_mode(); call credit and step outside of it.")
        params = self.params()
        validation.check_batch(self.network, self.loss, params, x, y)
        trainable = self.trainable
        if not trainable:
            raise validation.make_nothing_to_train_error()
        self._check_feedback_steps(self.name, params, trainable)

        def write_gradients(update: Update, is_last: bool) -> None:
            gradients: Any = list(update.grads.values())
            for name, gradient in zip(update.grads, scaler.scale(gradients) if scaler else gradients, strict=True):
                accumulate_gradient(params[name], gradient)

        def step_scaled() -> None:
            if any(p.grad is not None for p in params.values()):  # a stream's first ticks write none
                scaler.step(optim)  # type: ignore[union-attr, arg-type]
                scaler.update()  # type: ignore[union-attr]

        stepping: dict[str, Any] = {}
        if optim is not None:
            step = optim.step if scaler is None else step_scaled
            stepping = {"zero_grad": optim.zero_grad, "step": step, "bounds": self.bounds}
        self.allocate(x, y)
        phases = self.phases_after(self.count_batches())
        phases = tuple(check_phase(self.name, phase, checks_loss=True) for phase in phases)
        recording = self._recording
        with torch.no_grad(), recording.capture() if recording and recording.is_on else nullcontext():
            batch, state = (x, y, self.draw(x)), self.state_tensors()
            update = run_phases(phases, params, state, batch, write_gradients, **stepping)
        return self._report(update, x)

    def _report(self, update: Update, x: Tensor) -> Credit:
        """Return what a call of `credit` or `step` tells of an update."""
        return Credit(update.loss, update.output)

    def get_checked_phases(self, done: int) -> list[Phase]:
        """Return `phases_after(done)`, each with a check of its update. Under `vmap`, it sees the shapes of one learner."""
        return [check_phase(self.name, phase) for phase in self.phases_after(done)]

    def param_groups(self, lr: float, **options: Any) -> list[dict[str, Any]]:
        """Return the parameter groups `W` and `bias` (and those of the rule) for any torch optimiser.

        In a model that is not read as layers, `bias` has all other parameters, too: gains, embeddings, positions.

        `options` are added to every group. A scheduler with one rate per group (`OneCycleLR`'s `max_lr`) takes
        `[group["lr"] for group in optim.param_groups]`.
        """
        layers = self.network.layers
        return self._groups(
            lr, options, W=[layer.weight for layer in layers], bias=self.network.list_other_parameters()
        )

    def _groups(self, lr: float, options: dict[str, Any], **members: list[str]) -> list[dict[str, Any]]:
        """Return one parameter group per list of names, without parameters that do not learn and without empty groups."""
        if not isinstance(lr, Tensor) and not (validation.is_number(lr) and lr >= 0):
            raise ApicalError(f"lr is {lr!r}, but must be a number of at least 0.")
        self.check_modules_unchanged()
        trainable = self.trainable
        if not trainable:
            raise validation.make_nothing_to_train_error()
        groups = []
        for group, names in members.items():
            params = [self.get_parameter(name) for name in names if name in trainable]
            if params:
                groups.append({"name": group, "params": params, "lr": lr, **options})
        return groups
