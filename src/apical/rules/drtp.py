"""Direct random target projection: hidden layers learn from the target alone, through random weights."""

import math

import torch
from torch import Tensor, nn

from apical.core.activation import Noise
from apical.core.learner import Learner, Update
from apical.core.losses import LossFunction
from apical.core.network import Params
from apical.core.validation import require_positive
from apical.errors import ApicalError
from apical.rules.feedback import draw_normal
from apical.rules.local import flatten_targets, learn_locally


class DirectRandomTargetProjection(Learner):
    """Each hidden layer i receives the target through B_i, fixed and random (Frenkel, Lefebvre & Bol 2021):

        ξ_i  = −B_iᵀ y*                       y*: the one-hot label, or floating targets as they are
        ΔW_i = mean φ′_i(ξ_i) u_iᵀ            as soon as the layer has fired; nothing comes from above

    The last layer descends the loss itself. The sign is that of the source's code, where B_iᵀ y* stands in for the gradient
    of the loss; as B is symmetric around zero, the other sign does as well. `std` is B's standard deviation, by default
    √(2/values of the layer). A network with convolutions needs `input_shape`.

    Law: the gradients of hidden layers are autograd's of y* · B_i a_i, averaged over the batch, with u_i detached.
    """

    NAME = "drtp"
    TITLE = "Direct random target projection"
    SOURCE = "Frenkel, Lefebvre & Bol 2021, Learning without feedback (Frontiers in Neuroscience)"
    FEEDBACK = "B, from the target straight to each layer, drawn once, never changed"

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
        self._output, outputs = shapes.output, shapes.output.numel()
        self.projections = nn.ParameterDict()
        for i, (shape, w) in enumerate(zip(shapes.inputs[1:], self.forward_weights, strict=False)):
            values = shape.numel()
            b = draw_normal((outputs, values), std or math.sqrt(2 / values), like=w)
            self.projections[str(i)] = nn.Parameter(b, requires_grad=False)

    @property
    def feedback_weights(self) -> list[Tensor | None]:
        return [None, *self.projections.values()]

    def update(self, params: Params, state: Params, x: Tensor, y: Tensor, noise: Noise) -> Update:
        target = flatten_targets(y, self._output)
        return learn_locally(
            self, params, x, y, noise, lambda i, a: (self.project(params[f"projections.{i}"], target, a), {})
        )

    def project(self, b: Tensor, target: Tensor, a: Tensor) -> Tensor:
        """Return −Bᵀ y* in the shape of a layer's activity."""
        if (target.shape[1], a[0].numel()) != b.shape:
            raise ApicalError(
                f"there are {target.shape[1]} target values for {a[0].numel()} of a layer, but drtp was built for "
                f"{b.shape[0]} and {b.shape[1]}; pass the input_shape that you train with, and one target per output."
            )
        return torch.mm(target.to(b.dtype), -b).view_as(a)
