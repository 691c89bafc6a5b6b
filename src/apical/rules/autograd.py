"""Rules that autograd can run: their errors pass backwards through the wired modules of any model.

`loss.backward()` on the output of such a learner, or of its model, is the rule. On a model that is not read as layers,
`credit` runs the same backward pass, from the error ξ_b = −∂loss_b/∂output of each example.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.utils.stateless import _reparametrize_module

from apical.core.activation import Noise
from apical.core.general import GeneralNetwork, split_inputs, take_output, wire
from apical.core.learner import Learner, Update
from apical.core.losses import LossFunction
from apical.core.modules import evaluation_mode
from apical.core.network import Network, Params
from apical.core.recurrent import Elman
from apical.core.validation import check_shape, is_number
from apical.core.wiring import EXACT, QUADRATIC, Carrier, unwire
from apical.errors import ApicalError, UnsupportedError


class AutogradRule(Learner):
    """A rule whose errors pass through feedback weights, so that `backward()` is the rule."""

    TRANSPORT: ClassVar[str] = ""
    """How errors pass through wired modules, a mode of `core/wiring.py`. A subclass with another rule must say so itself."""

    carrier: Carrier

    def __init__(
        self,
        model: nn.Module,
        *,
        input_shape: tuple[int, ...] | None = None,
        loss: str | LossFunction = "cross_entropy",
        label_smoothing: float = 0.0,
        example: Any = None,
        output: str | int | None = None,
    ) -> None:
        if output is not None and (not isinstance(output, str | int) or isinstance(output, bool)):
            raise ApicalError(
                f"output is {output!r}, but must be the name or the number of a field of the model's output."
            )
        self.output = output
        self._example = (
            example if input_shape is None or example is not None else self._make_example(model, input_shape)
        )
        super().__init__(model, input_shape=input_shape, loss=loss, label_smoothing=label_smoothing)  # type: ignore[arg-type]
        del self._example

    @staticmethod
    def _make_example(model: nn.Module, input_shape: Any) -> Tensor | None:
        """Return two examples of this shape, for a model that takes floating values."""
        check_shape(input_shape)
        like = next(model.parameters(), None) if isinstance(model, nn.Module) else None
        if like is None or like.is_meta:
            return None
        # A generator of its own: feedback weights are drawn from torch's after this.
        return torch.randn(2, *input_shape, generator=torch.Generator().manual_seed(0)).to(like)

    def _read_network(self, model: Any) -> Network:
        if self.output is None and getattr(self, "head", None) is None:
            try:
                return super()._read_network(model)
            except UnsupportedError:
                if (
                    "TRANSPORT" not in type(self).__dict__
                    or not isinstance(model, nn.Module)
                    or isinstance(model, Elman)
                ):
                    raise
        return GeneralNetwork(model, self._example, self.output, is_exact=self.TRANSPORT == EXACT)

    @property
    def transport(self) -> str | None:
        """How errors pass when autograd runs the rule; None if it cannot."""
        return type(self).__dict__.get("TRANSPORT")

    @property
    def error_scale(self) -> float | None:
        """The number N of loss terms that the loss averages; None means the number of examples of each batch.

        That is the length of the first input. If the output is not as long, set it before the first forward pass.

        `backward()` multiplies those gradients of Θ by it that are quadratic in the error (`dll` and `dll:released`): an
        average over N terms would make them too small. Set it if the loss averages over tokens (N is their number), sums
        (1), is divided for accumulation (N times the number of micro-batches) or is multiplied by a scaler (N divided by
        the scale), before the forward pass. `credit` needs none.
        """
        return self._get_carrier().error_scale

    @error_scale.setter
    def error_scale(self, scale: float | None) -> None:
        if scale is not None and not (is_number(scale) and scale > 0):
            raise ApicalError(f"error_scale is {scale!r}, but must be a positive number or None.")
        self._get_carrier().error_scale = scale

    def _get_carrier(self) -> Carrier:
        if self.transport is None:
            raise ApicalError(
                f"backward() does not run rule {self.name!r} as it is made here, and credit needs no error_scale."
            )
        return self.carrier

    def connect(self, heads: tuple[str, ...] = ()) -> None:
        """Wire the model to this learner: from now on `model(x)` learns by its rule."""
        if self.transport is None:
            return
        if "carrier" not in self.__dict__:
            feedback = getattr(self, "feedback", nn.ParameterDict())
            is_verified = self.network.is_verified or bool(heads)  # all but the head is frozen then
            uses = None if is_verified else dict[str, bool]()
            self.carrier = Carrier(self.transport, feedback, heads=heads, uses=uses, is_verified=is_verified)
        if self.transport == EXACT:
            unwire(self.model)
        else:
            upper = {} if self.carrier.heads else self.network.upper
            wire(self.model, self.carrier, {layer.weight: str(i) for i, layer in upper.items()})

    def reconnect(self) -> None:
        """Wire the model again if another learner was made of it in the meantime."""
        if self.transport is None:
            super().reconnect()
            return
        link = self.model.__dict__.get("link")
        carrier = None if link is None else link.carrier
        if carrier is not (None if self.transport == EXACT else self.carrier):
            self.connect()

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """Run the model. `backward()` on what follows from its output is the rule."""
        if type(self).__name__.startswith("FSDP"):
            raise UnsupportedError("FSDP does not support feedback weights; DistributedDataParallel(learner) works.")
        if self.transport is None:
            return super().forward(*inputs, **named)
        if not torch.compiler.is_compiling():
            self.reconnect()
        return self.model(*inputs, **named)

    # Networks that are not read as layers.

    def state_tensors(self) -> dict[str, Tensor]:
        own = super().state_tensors()
        return {**own, **dict(self.model.named_buffers(prefix="model"))} if self.network.is_general else own

    def draw(self, x: Any, generator: torch.Generator | None = None) -> dict[str, Tensor]:
        if not self.network.is_general:
            return super().draw(x, generator)
        if generator is None:  # the model draws from torch's own generator
            return {}
        return {"seed": torch.randint(2**62, (), generator=generator, device=generator.device)}

    def predict(self, params: Params, state: Params, x: Any) -> Tensor:
        if not self.network.is_general:
            return super().predict(params, state, x)
        buffers = {name: value.clone() for name, value in state.items()}
        with torch.no_grad(), evaluation_mode(self.model), self._use_tensors(params, buffers):
            return self._call(x)

    def _use_tensors(self, params: Params, state: Params) -> Any:
        """Replace parameters and buffers for a while, also in the backward pass, where a checkpoint runs the model again."""
        own = {name: params[name] for name in self.params()}
        return _reparametrize_module(self, {**own, **state}, tie_weights=True)  # type: ignore[arg-type]

    def _call(self, x: Any) -> Tensor:
        """Run the model, and return the field of its output that the loss takes."""
        args, kwargs = split_inputs(x)
        return take_output(self(*args, **kwargs), self.output)

    def update_by_autograd(self, params: Params, state: Params, x: Any, y: Any, noise: Noise) -> Update:
        """Compute one update of any model by a backward pass of autograd."""
        trainable = self.trainable
        leaves = {name: params[name].detach().requires_grad_(name in trainable) for name in self.params()}
        buffers = {name: value.clone() for name, value in state.items()}
        is_quadratic = self.transport in QUADRATIC
        with self._use_tensors(leaves, buffers), self._use_scale(1.0 if is_quadratic else None):
            with torch.enable_grad(), _use_seed(noise):
                output = self._call(x)
            if not output.requires_grad:
                raise ApicalError("no parameter that learns acts on the model's output; unfreeze one that does.")
            losses, xi = self._score(output.detach(), y)
            if not losses.numel():
                raise ApicalError("the batch has no examples; one of at least one works.")
            factor = 1 / losses.numel()
            with torch.autocast(output.device.type, enabled=False):
                output.backward(-xi if is_quadratic else xi * -factor)
        grads = {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}
        if is_quadratic:
            grads = {name: g * factor for name, g in grads.items()}
        for record in (layer.neuron.record for layer in self.network.layers):
            if record is not None and record.delta is not None and not is_quadratic:
                record.delta = record.delta / factor
        return Update(grads, buffers, losses.mean(), output.detach())

    def _score(self, output: Tensor, y: Any) -> tuple[Tensor, Tensor]:
        """Return the losses and ξ of each term: an example, or a position if each has a label and classes are last."""
        if not output.requires_grad and output.dtype in (torch.float16, torch.bfloat16):
            losses, xi = self._score(output.float(), y)
            return losses, xi.to(output.dtype)
        if isinstance(y, Tensor) and y.device != output.device:
            raise ApicalError(
                f"the targets are on {y.device}, but the model's output on {output.device}; y.to(…) works."
            )
        shape = output.shape
        self.network.read_targets(shape, y, self.loss)
        if self.network.CLASSES > 1:
            output, y = self.network.flatten_time(output), self.network.flatten_time(y)
        self.loss.check(y, output.shape, values=output.device.type == "cpu")
        losses, xi = self.loss.error(output, y)
        return losses, xi.reshape(shape)

    @contextmanager
    def _use_scale(self, scale: float | None) -> Iterator[None]:
        """Set `error_scale` for a while."""
        before, self.carrier.error_scale = self.carrier.error_scale, scale
        try:
            yield
        finally:
            self.carrier.error_scale = before


@contextmanager
def _use_seed(noise: Noise) -> Iterator[None]:
    """Let all random numbers follow from the seed that was drawn, if there is one."""
    if "seed" not in noise:
        yield
        return
    with torch.random.fork_rng():
        torch.manual_seed(int(noise["seed"]))
        yield
