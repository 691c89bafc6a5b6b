"""Feedback alignment: errors go down through random weights, or through weights with only the signs of W."""

import math
from typing import Any

from torch import Tensor, nn

from apical.core.learner import Claims
from apical.core.losses import LossFunction
from apical.core.network import Params, Trace
from apical.core.validation import require_positive
from apical.core.wiring import FIXED, SIGN, compute_scaled_signs
from apical.rules.feedback import Carry, FeedbackRule, draw_normal


class FeedbackAlignment(FeedbackRule):
    """ξ_i = B_iᵀ δ_i with B fixed and random, of W's shape (Lillicrap et al. 2016); W comes to align with it.

    `std` is B's standard deviation; the default 1/√fan-out keeps the size of the error from layer to layer.
    Law: with B = W equals `bp`.
    """

    NAME = "fa"
    TITLE = "Feedback alignment"
    SOURCE = "Lillicrap et al. 2016, Random synaptic feedback weights support error backpropagation"
    FEEDBACK = "B, drawn once, never changed"
    CLAIMS = Claims(c1=True, c2=False, c3=False)
    RECURRENT = True
    TRANSPORT = FIXED

    def __init__(
        self,
        model: nn.Module,
        *,
        input_shape: tuple[int, ...] | None = None,
        loss: str | LossFunction = "cross_entropy",
        label_smoothing: float = 0.0,
        example: Any = None,
        output: str | int | None = None,
        std: float | None = None,
    ) -> None:
        common: Any = {"input_shape": input_shape, "loss": loss, "label_smoothing": label_smoothing}
        super().__init__(model, **common, example=example, output=output)
        require_positive(std=std)
        self.std = std
        self.add_feedback_weights(
            lambda i, layer, w: draw_normal(
                layer.synapse.weight_shape, std or 1 / math.sqrt(layer.synapse.fan_out), like=w
            ),
            learns=False,
        )
        self.connect()


class SignSymmetry(FeedbackRule):
    """ξ_i = c·sign(W_i)ᵀ δ_i: feedback has W's signs and, in c the mean of abs W, its scale (Liao et al. 2016).

    The errors of a softmax sum to zero over the classes, so a unit whose signs towards all classes agree gets none. It is
    given an exact zero: a sum would leave rounding noise, which Adam scales up to whole steps.

    Law: equals `fa` with B = c·sign(W) at that step.
    """

    NAME = "sign"
    TITLE = "Sign symmetry"
    SOURCE = "Liao, Leibo & Poggio 2016, How important is weight symmetry in backpropagation?"
    FEEDBACK = "c·sign(W), computed from W at every step"
    RECURRENT = True
    TRANSPORT = SIGN

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
        return {i: compute_scaled_signs(params[layer.weight].detach()) for i, layer in self.network.upper.items()}

    def carry(self, params: Params, trace: Trace, xi: Tensor) -> Carry:
        weights, layers = self.backward_weights(params), self.network.layers
        top = len(layers) - 1
        if top in weights and self._sums_to_zero(xi):
            weights[top] = zero_agreeing_signs(weights[top])
        return lambda i, delta, shape: layers[i].synapse.adjoint(weights[i], delta, shape)

    def _sums_to_zero(self, xi: Tensor) -> bool:
        """Return whether the errors ξ at the drives of the last layer are those of a softmax over its units."""
        last, *others = self.network.top
        is_softmax = self.loss.name == "cross_entropy" and not self.loss.is_custom
        is_over_units = last.synapse.unit_axis % xi.ndim == 1 and last.synapse.groups == 1
        return is_softmax and is_over_units and not others and not last.neuron.stages


def zero_agreeing_signs(b: Tensor) -> Tensor:
    """Return B with zeros for each input whose weights to all units have the same sign."""
    return b.masked_fill(b.sign().sum(0).abs() == len(b), 0.0)
