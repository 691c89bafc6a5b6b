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
from apical.core.validation import is_number, require_one_of, require_whole
from apical.errors import ApicalError
from apical.rules.feedback import choose_decay, draw_normal

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


LocalError = Callable[[int, Tensor], tuple[Tensor, dict[str, Tensor]]]
"""(layer, its activity) -> the error ξ after its φ, and gradients of the rule's own parameters."""


def learn_locally(
    learner: Learner, params: Params, x: Tensor, y: Tensor, noise: Noise, compute_error: LocalError
) -> Update:
    """Run the layers in order. Each hidden layer learns at once from an error of its own, the last one from the loss."""
    trainable, layers = learner.trainable, learner.network.layers
    grads: dict[str, Tensor] = {}
    a = learner.network.prefix(x, noise)
    for i, layer in enumerate(layers):
        u = a
        a, pullback = layer.vjp(params, u, noise)
        if i == len(layers) - 1:
            loss, xi = learner.loss.start(a, y)
        else:
            xi, own = compute_error(i, a)
            grads |= {name: gradient for name, gradient in own.items() if name in trainable}
        grads |= layer.gradients(u, pullback(xi), trainable)
    return Update(grads, {}, loss, a)


def flatten_targets(y: Tensor, output: torch.Size) -> Tensor:
    """Return targets for outputs of this shape as rows of values: labels as one-hot vectors, others as they are."""
    return (y if y.is_floating_point() else one_hot(y, output[0], dim=1)).reshape(len(y), -1)


class LocalLosses(Learner):
    """Each hidden layer i is trained through its own linear classifier, the head H_i (Nøkland & Eidnes 2019):

        h_i = pool(a_i),  a_i = φ_i(W_i a_{i−1})        the input of the head
        L_i = (1 − s) · loss(H_i h_i, y) + s · mean over pairs (cos(h_m, h_n) − cos(y_m, y_n))²

    W_i, its bias and H_i descend L_i with a_{i−1} fixed: the error comes back through H_iᵀ and φ′_i and ends there.
    The last layer descends the loss itself, so that the plain model gives the predictions.

    Convolutional activity is averaged over a grid, the finest one with at most `features` values; flat activity is
    not pooled. `similarity` is s, the weight of the term that makes examples of one class similar and others
    dissimilar (of centred vectors; y one-hot); the source's combined loss has 0.99.

    `feedback` says what brings a head's error back: H_iᵀ itself (transpose), or weights of its own, drawn like H_i, which
    stay as they are (random) or learn with H_i's gradient while both decay by λ, `decay` (kolen-pollack, 1e-4).

    Law: the gradients are autograd's of L_i, layer by layer, with the layer's input detached. With own weights equal to
    H_i nothing changes; under plain SGD kolen-pollack's difference from H_i shrinks by exactly 1 − ηλ a step.
    """

    NAME = "local"
    TITLE = "Local losses"
    SOURCE = "Nøkland & Eidnes 2019, Training neural networks with local error signals (ICML)"
    FEEDBACK = "each layer's own head H, transposed, or weights beside it; nothing between layers"
    CLAIMS = Claims(c1=False, c2=True, c3=False)
    VARIANT = "feedback"
    VARIANTS = ("transpose", "kolen-pollack", "random")
    NEW_VARIANTS = ("kolen-pollack", "random")

    def __init__(
        self,
        model: nn.Sequential,
        *,
        input_shape: tuple[int, ...] | None = None,
        loss: str | LossFunction = "cross_entropy",
        label_smoothing: float = 0.0,
        similarity: float = 0.0,
        features: int = 1024,
        feedback: str = "transpose",
        decay: float | None = None,
    ) -> None:
        super().__init__(model, input_shape=input_shape, loss=loss, label_smoothing=label_smoothing)
        if not (is_number(similarity) and 0 <= similarity < 1):
            raise ApicalError(f"similarity is {similarity!r}, but must lie in [0, 1).")
        require_whole(features=features)
        require_one_of(self.VARIANTS, feedback=feedback)
        is_kolen_pollack = feedback == "kolen-pollack"
        self.similarity, self.features, self.feedback = similarity, features, feedback
        self.decay = choose_decay(decay, is_kolen_pollack, "feedback")
        shapes = self.network.shapes(input_shape)
        self._output, outputs = shapes.output, shapes.output.numel()
        self.heads, self.returns = nn.ParameterDict(), nn.ParameterDict()
        for i, (layer, w) in enumerate(zip(self.network.layers[:-1], self.forward_weights, strict=False)):
            count = self.pool(layer, torch.empty(1, *shapes.inputs[i + 1], device="meta")).shape[1]
            self.heads[str(i)] = nn.Parameter(draw_normal((outputs, count), 1 / math.sqrt(count), like=w))
            if feedback != "transpose":
                own = draw_normal((outputs, count), 1 / math.sqrt(count), like=w)
                self.returns[str(i)] = nn.Parameter(own, requires_grad=is_kolen_pollack)

    def touches(self, name: str) -> bool:
        """Return whether the rule updates this parameter. The weights beside a frozen head do not learn."""
        return not name.startswith("returns.") or self.heads[name.removeprefix("returns.")].requires_grad

    def pool(self, layer: Layer, a: Tensor) -> Tensor:
        """Return the input of a layer's head, (batch, values)."""
        if isinstance(layer.synapse, Conv) and a.ndim == layer.synapse.dims + 2:
            side = math.floor((self.features / a.shape[1]) ** (1 / layer.synapse.dims) + 1e-9)
            grid = [max(1, min(side, n)) for n in a.shape[2:]]
            a = _POOL[layer.synapse.dims](a, grid)
        return a.flatten(1)

    def update(self, params: Params, state: Params, x: Tensor, y: Tensor, noise: Noise) -> Update:
        def compute_error(i: int, a: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
            head, own = f"heads.{i}", f"returns.{i}"
            xi, gradient = self.compute_local_error(self.network.layers[i], params[head], params.get(own), a, y)
            grads = {head: gradient}
            if self.feedback == "kolen-pollack":
                grads[own] = gradient.clone()
            return xi, grads

        return learn_locally(self, params, x, y, noise, compute_error)

    def compute_local_error(
        self, layer: Layer, head: Tensor, own: Tensor | None, a: Tensor, y: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return −∂L_i/∂a_i per example, through the head or through weights of its own, and ∂L_i/∂H_i."""
        h, spread = torch.func.vjp(lambda a: self.pool(layer, a), a)  # type: ignore[misc]
        if h.shape[1] != head.shape[1]:
            raise ApicalError(
                f"layer {layer.name} gives {h.shape[1]} values per example to its head, but local was built for "
                f"{head.shape[1]}; pass the input_shape that you train with."
            )
        xi, _ = self.loss.begin((h @ head.T).view(-1, *self._output), y)
        xi = xi.reshape(len(h), -1) * (1 - self.similarity)
        error = xi @ (head if own is None else own)
        if self.similarity:
            target = flatten_targets(y, self._output).to(h.dtype)
            error = error + self.similarity * compute_similarity_error(h, target)
        return spread(error)[0], xi.T @ h * (-1 / h.shape[0])

    def param_groups(self, lr: float, **options: Any) -> list[dict[str, Any]]:
        """Return the groups `W`, `bias`, `heads` and, for kolen-pollack, `returns`; the last two decay."""
        own = {**options, "weight_decay": self.decay} if self.feedback == "kolen-pollack" else options
        names = {group: [f"{group}.{i}" for i in self.heads] for group in ("heads", "returns") if getattr(self, group)}
        return super().param_groups(lr, **options) + self._groups(lr, own, **names)
