"""Backpropagation, the reference, and the readout, the control that every rule should beat."""

from typing import Any

from torch import Tensor, nn

from apical.core.learner import Claims
from apical.core.losses import LossFunction
from apical.core.network import Params
from apical.core.wiring import EXACT, HEAD
from apical.errors import ApicalError
from apical.rules.feedback import FeedbackRule


class Readout(FeedbackRule):
    """The control: only the last layer learns, by its own error; hidden layers keep their random weights.

    No error leaves the last layer, so a rule whose hidden layers do not help cannot beat it.
    Law: hidden gradients are absent; the last layer's equal `bp`'s.
    """

    NAME = "readout"
    TITLE = "Readout (control)"
    SOURCE = "control: a trained readout on frozen random features"
    FEEDBACK = "none: no error leaves the last layer"
    RECURRENT = True
    TRANSPORT = HEAD

    def __init__(
        self,
        model: nn.Module,
        *,
        input_shape: tuple[int, ...] | None = None,
        loss: str | LossFunction = "cross_entropy",
        label_smoothing: float = 0.0,
        example: Any = None,
        output: str | int | None = None,
        head: str | None = None,
    ) -> None:
        self.head = head
        common: Any = {"input_shape": input_shape, "loss": loss, "label_smoothing": label_smoothing}
        super().__init__(model, **common, example=example, output=output)
        if head is None and self.network.is_general:
            last = self.network.layers[-1].name
            raise ApicalError(f"readout trains one module of such a model; name it, as in head={last!r}.")
        if head is not None and head not in [name for name, _ in model.named_modules()]:
            raise ApicalError(f"the model has no module {head!r}; {self.network.layers[-1].name!r} is its last one.")
        self.connect(heads=(head,) if head is not None else tuple(layer.name for layer in self.network.top))

    def touches(self, name: str) -> bool:
        if self.network.is_general:
            return any(self.get_parameter(name) is p for p in self.model.get_submodule(self.head or "").parameters())
        return any(name in (layer.weight, layer.bias) for layer in self.network.top)


class Backpropagation(FeedbackRule):
    """ξ_i = W_iᵀ δ_i: the error goes down through the transpose of the forward weights.

    In a recurrent network this is backpropagation through time. Law: equals `torch.autograd`.
    """

    NAME = "bp"
    TITLE = "Backpropagation"
    SOURCE = "Rumelhart, Hinton & Williams 1986, Learning representations by back-propagating errors"
    FEEDBACK = "the forward weights W themselves, transposed"
    CLAIMS = Claims(c1=False, c2=False, c3=False)
    RECURRENT = True
    TRANSPORT = EXACT

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
        common: Any = {"input_shape": input_shape, "loss": loss, "label_smoothing": label_smoothing}
        super().__init__(model, **common, example=example, output=output)
        self.connect()

    def backward_weights(self, params: Params) -> dict[int, Tensor]:
        return {i: params[layer.weight] for i, layer in self.network.upper.items()}
