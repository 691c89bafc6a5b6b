"""Local losses: every hidden layer has its own classifier, and no error leaves a layer."""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from apical.core.activation import Noise
from apical.core.learner import Claims, Learner, Update
from apical.core.losses import LossFunction, one_hot
from apical.core.network import Layer, Params
from apical.core.synapse import Conv
from apical.core.validation import is_number, require_whole
from apical.errors import ApicalError
from apical.rules.feedback import draw_normal

_POOL: dict[int, Callable[..., Tensor]] = {1: F.adaptive_avg_pool1d, 2: F.adaptive_avg_pool2d}


def center_and_normalize(v: Tensor) -> tuple[Tensor, Tensor]:
    """Subtract from each row its mean and scale it to length 1. Also return the length before, which is never 0."""
    v = v - v.mean(1, keepdim=True)
    length = (v.square().sum(1, keepdim=True) + 1e-8).sqrt()
    return v / length, length


def compute_similarity_error(h: Tensor, target: Tensor) -> Tensor:
    """Return −∂/∂h of the mean over pairs (cos(h_m, h_n) − cos(t_m, t_n))², times the batch size."""
    n, length = center_and_normalize(h)
    t, _ = center_and_normalize(target)
    e = (t @ t.T - n @ n.T) @ n * (4 / h.shape[0])
    return (e - n * (n * e).sum(1, keepdim=True)) / length  # the result is centred, as n is


class LocalLosses(Learner):
    """Each hidden layer i is trained through its own linear classifier, the head H_i (Nøkland & Eidnes 2019):

        h_i = pool(a_i),  a_i = φ_i(W_i a_{i−1})        the input of the head
        L_i = (1 − s) · loss(H_i h_i, y) + s · mean over pairs (cos(h_m, h_n) − cos(y_m, y_n))²

    W_i, its bias and H_i descend L_i with a_{i−1} fixed: the error comes back through H_iᵀ and φ′_i and ends there.
    The last layer descends the loss itself, so that the plain model gives the predictions.

    Convolutional activity is averaged over a grid, the finest one with at most `features` values; flat activity is
    not pooled. `similarity` is s, the weight of the term that makes examples of one class similar and others
    dissimilar (of centred vectors; y one-hot); the source's combined loss has 0.99.

    Law: the gradients are autograd's of L_i, layer by layer, with the layer's input detached.
    """

    NAME = "local"
    TITLE = "Local losses"
    SOURCE = "Nøkland & Eidnes 2019, Training neural networks with local error signals (ICML)"
    FEEDBACK = "each layer's own head H, transposed; nothing between layers"
    CLAIMS = Claims(c1=False, c2=True, c3=False)

    def __init__(
        self,
        model: nn.Sequential,
        *,
        input_shape: tuple[int, ...] | None = None,
        loss: str | LossFunction = "cross_entropy",
        label_smoothing: float = 0.0,
        similarity: float = 0.0,
        features: int = 1024,
    ) -> None:
        super().__init__(model, input_shape=input_shape, loss=loss, label_smoothing=label_smoothing)
        if not (is_number(similarity) and 0 <= similarity < 1):
            raise ApicalError(f"similarity is {similarity!r}, but must lie in [0, 1).")
        require_whole(features=features)
        self.similarity, self.features = similarity, features
        shapes = self.network.shapes(input_shape)
        self._output = shapes.output
        outputs = shapes.output.numel()
        self.heads = nn.ParameterDict()
        for i, (layer, w) in enumerate(zip(self.network.layers[:-1], self.forward_weights, strict=False)):
            count = self.pool(layer, torch.empty(1, *shapes.inputs[i + 1], device="meta")).shape[1]
            self.heads[str(i)] = nn.Parameter(draw_normal((outputs, count), 1 / math.sqrt(count), like=w))

    def pool(self, layer: Layer, a: Tensor) -> Tensor:
        """Return the input of a layer's head, (batch, values)."""
        if isinstance(layer.synapse, Conv) and a.ndim == layer.synapse.dims + 2:
            side = math.floor((self.features / a.shape[1]) ** (1 / layer.synapse.dims) + 1e-9)
            grid = [max(1, min(side, n)) for n in a.shape[2:]]
            a = _POOL[layer.synapse.dims](a, grid)
        return a.flatten(1)

    def update(self, params: Params, state: Params, x: Tensor, y: Tensor, noise: Noise) -> Update:
        trainable = self.trainable
        layers, grads = self.network.layers, {}
        a = self.network.prefix(x, noise)
        for i, layer in enumerate(layers):
            u, head = a, f"heads.{i}"
            a, pullback = layer.neuron.vjp(layer.forward(params, u), noise)
            if i == len(layers) - 1:
                loss, xi = self.loss.start(a, y)
            else:
                xi, gradient = self.compute_local_error(layer, params[head], a, y)
                if head in trainable:
                    grads[head] = gradient
            grads |= layer.gradients(u, pullback(xi), trainable)
        return Update(grads, {}, loss, a)

    def compute_local_error(self, layer: Layer, head: Tensor, a: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Return −∂L_i/∂a_i per example, and ∂L_i/∂H_i."""
        h, spread = torch.func.vjp(lambda a: self.pool(layer, a), a)  # type: ignore[misc]
        if h.shape[1] != head.shape[1]:
            raise ApicalError(
                f"layer {layer.name} gives {h.shape[1]} values per example to its head, but local was built for "
                f"{head.shape[1]}; pass the input_shape that you train with."
            )
        _, xi = self.loss.error((h @ head.T).view(-1, *self._output), y)
        xi = xi.reshape(len(h), -1) * (1 - self.similarity)
        error = xi @ head
        if self.similarity:
            error = error + self.similarity * compute_similarity_error(h, self.encode_targets(y).to(h.dtype))
        return spread(error)[0], xi.T @ h * (-1 / h.shape[0])

    def encode_targets(self, y: Tensor) -> Tensor:
        """Return the targets as one row of values per example, labels as one-hot vectors."""
        if not y.is_floating_point():
            y = one_hot(y, self._output[0])
        return y.reshape(len(y), -1)

    def param_groups(self, lr: float, **options: Any) -> list[dict[str, Any]]:
        """Return the groups `W`, `bias` and `heads`."""
        heads = self._groups(lr, options, heads=[f"heads.{i}" for i in self.heads])
        return super().param_groups(lr, **options) + heads
