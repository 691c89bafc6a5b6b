"""Direct feedback alignment: every layer receives the output's error directly, through random weights."""

import math

import torch
from torch import Tensor, nn

from apical.core.losses import LossFunction
from apical.core.network import Params, Trace
from apical.core.validation import require_positive
from apical.errors import ApicalError
from apical.rules.feedback import Carry, FeedbackRule, draw_normal


class DirectFeedbackAlignment(FeedbackRule):
    """ξ_i = B_iᵀ δ_L with B_i fixed and random, (outputs, values of layer i's input) (Nøkland 2016).

    δ_L is the error before the last φ, ξ_i the error of the values that layer i receives, that is, after the φ
    of the layer below. `std` is B's spread; by default 1/√outputs. A network with convolutions needs
    `input_shape`, since its layers' sizes follow from it. Law: with one hidden layer equals `fa` with the same B.
    """

    NAME = "dfa"
    TITLE = "Direct feedback alignment"
    SOURCE = "Nøkland 2016, Direct feedback alignment provides learning in deep neural networks"
    FEEDBACK = "B, from the output straight to each layer, drawn once, never changed"

    def __init__(
        self,
        model: nn.Sequential,
        *,
        input_shape: tuple[int, ...] | None = None,
        loss: str | LossFunction = "cross_entropy",
        label_smoothing: float = 0.0,
        std: float | None = None,
    ) -> None:
        super().__init__(model, input_shape=input_shape, loss=loss, label_smoothing=label_smoothing)
        require_positive(std=std)
        self.std = std
        shapes = self.network.shapes(input_shape)
        outputs = sum(shapes.drives[i].numel() for i in self.network.tiers[-1].layers)
        self.add_feedback_weights(
            lambda i, layer, w: draw_normal((outputs, shapes.inputs[i].numel()), std or 1 / math.sqrt(outputs), like=w),
            learns=False,
        )

    def carry(self, params: Params, trace: Trace, xi: Tensor) -> Carry:
        weights, last = self.backward_weights(params), self.network.tiers[-1]
        top = torch.cat([delta.flatten(1) for delta in trace.deltas(last, xi).values()], 1)

        def carry(i: int, delta: Tensor, shape: torch.Size) -> Tensor:
            b, values = weights[i], shape[1:].numel()
            if values != b.shape[1] or top.shape[1] != b.shape[0]:
                raise ApicalError(
                    f"layer {self.network.layers[i].name} gets {values} values per example, but dfa was built "
                    f"for {b.shape[1]}; pass the input_shape that you train with."
                )
            return (top @ b).view(shape)

        return carry
