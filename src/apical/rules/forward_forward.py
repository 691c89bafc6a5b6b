"""Forward-forward: two forward passes, one with the true label and one with a wrong label, and no backward pass."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from apical.core.activation import Noise
from apical.core.learner import Claims, Learner, Update
from apical.core.losses import LossFunction, one_hot
from apical.core.network import Layer, Params
from apical.core.validation import require_not_negative, require_one_of, require_positive
from apical.core.views import broadcast_rows, reshape_in_memory_order, to_memory_order
from apical.errors import ApicalError, UnsupportedError
from apical.rules.feedback import draw_normal

ChooseLabel = Callable[[Tensor], Tensor]
"""(label weights V, one row per class) -> what they add to the drive of each example."""


def compute_goodness(a: Tensor) -> Tensor:
    """Return the mean square of each example's activity."""
    return to_memory_order(a).flatten(1).square().mean(1)


def normalize_length(u: Tensor, layer: Layer) -> Tensor:
    """Scale activity to mean square 1 over the units that the layer receives at each position."""
    return u * (u.square().mean(layer.synapse.unit_axis, keepdim=True) + 1e-6).rsqrt()


class ForwardForward(Learner):
    """Each hidden layer learns to be active for an image with its true label, and quiet with a wrong one (Hinton 2022):

        a_i = φ_i(W_i â_{i−1} + V_i[label])      â: a scaled to mean square 1 at each position; â_0 is the image
        g_i = mean of a_i²                       the goodness of layer i
        L_i = mean over the batch of  softplus(κ (g_i⁻ − g_i⁺))                         without a `threshold`,
                                      softplus(κ (θ − g_i⁺)) + softplus(κ (g_i⁻ − θ))   with `threshold` θ

    where ⁺ has the true label and ⁻ a wrong one, and W_i, its bias and V_i descend L_i with â_{i−1} held. V_i are
    the label's own weights, one row per class in the shape of the drive (so every position of a convolution has its
    own), faint at first (std 0.01): what the pixels that show the label are to Hinton's first layer, each layer has
    here for itself. κ is `sharpness`. `peer` λ adds κ λ · mean over units of ½ (m_j − m̄)², m_j unit j's mean over
    the true pairs and m̄ their mean. Wrong labels are drawn uniformly, or (`negatives="hard"`) in proportion to the
    readout's belief.

    The last layer is a readout: it descends the loss itself, on â of the last hidden layer for no label in
    particular (V's mean over the classes). It gives the training scores; `predict="readout"` takes them for
    inference, too, `"goodness"` the sum of κ g_i over the layers, for one label after the other.

    Law: the gradients are autograd's of L_i, layer by layer, and of the loss for the last, with inputs detached.
    """

    NAME = "ff"
    TITLE = "Forward-forward"
    SOURCE = "Hinton 2022, The forward-forward algorithm: some preliminary investigations"
    FEEDBACK = "none: the label comes in with the activity, and each layer judges itself"
    CLAIMS = Claims(c1=True, c2=True, c3=True)
    MODEL_PREDICTS = False

    def __init__(
        self,
        model: nn.Sequential,
        *,
        input_shape: tuple[int, ...] | None = None,
        loss: str | LossFunction = "cross_entropy",
        label_smoothing: float = 0.0,
        predict: str = "goodness",
        threshold: float | None = None,
        sharpness: float = 100.0,
        peer: float = 0.0,
        negatives: str = "uniform",
    ) -> None:
        super().__init__(model, input_shape=input_shape, loss=loss, label_smoothing=label_smoothing)
        self.loss.needs_labels = True
        require_one_of(("goodness", "readout"), predict=predict)
        require_one_of(("uniform", "hard"), negatives=negatives)
        require_positive(threshold=threshold, sharpness=sharpness)
        require_not_negative(peer=peer)
        self.scores, self.negatives = predict, negatives
        self.threshold, self.sharpness, self.peer = threshold, sharpness, peer
        shapes = self.network.shapes(input_shape)
        *self._hidden, self._last = self.network.layers
        if not self._hidden:
            raise UnsupportedError(
                f"layer {self._last.name} is the only one, and ff trains hidden layers: put another before it."
            )
        if len(shapes.output) != 1 or shapes.output[0] < 2:
            raise UnsupportedError(
                f"layer {self._last.name} ends in an output of shape (batch, {', '.join(map(str, shapes.output))}), "
                "but ff tells labels apart: (batch, classes) with at least two classes works."
            )
        self.classes = shapes.output[0]
        self.label = nn.ParameterDict(
            {
                str(i): nn.Parameter(draw_normal((self.classes, *drive), 0.01, like=w))
                for i, (w, drive) in enumerate(zip(self.forward_weights[:-1], shapes.drives[:-1], strict=True))
            }
        )

    def draw(self, x: Tensor, generator: torch.Generator | None = None) -> dict[str, Tensor]:
        shape = (x.shape[0], self.classes)
        uniform = torch.rand(shape, dtype=x.dtype, device=x.device, generator=generator)
        return {**super().draw(x, generator), "negative": uniform}

    def run_hidden_layers(
        self, params: Params, drive: Tensor, noise: Noise, choose: ChooseLabel
    ) -> tuple[Tensor, Tensor]:
        """Run the hidden layers from the first one's drive without a label.

        Returns:
            The last layer's input, and the sum of the goodness of all layers.
        """
        a, total = drive, drive.new_zeros(())
        for i, layer in enumerate(self._hidden):
            drive = drive if i == 0 else layer.forward(params, normalize_length(a, layer))
            label = params[f"label.{i}"]
            if drive.shape[1:] != label.shape[1:]:
                raise ApicalError(
                    f"layer {layer.name} has the drive {tuple(drive.shape[1:])}, but ff was built for "
                    f"{tuple(label.shape[1:])}; pass the input_shape that you train with."
                )
            a = layer.neuron(drive + choose(label), noise)
            total = total + compute_goodness(a)
        return normalize_length(a, self._last), total

    def predict(self, params: Params, state: Params, x: Tensor) -> Tensor:
        drive = self._hidden[0].forward(params, self.network.prefix(x, {}))
        if self.scores == "readout":
            u, _ = self.run_hidden_layers(params, drive, {}, lambda v: v.mean(0))
            return self._last(params, u, {})
        rows: list[ChooseLabel] = [lambda v, c=c: v[c] for c in range(self.classes)]  # type: ignore[misc]
        scores = [self.run_hidden_layers(params, drive, {}, row)[1] for row in rows]
        return self.sharpness * torch.stack(scores, 1)

    def update(self, params: Params, state: Params, x: Tensor, y: Tensor, noise: Noise) -> Update:
        trainable, grads = self.trainable, {}
        if y.is_floating_point():
            raise UnsupportedError(f"the targets are {y.dtype}, but ff tells labels apart: integers work.")

        def learn(layer: Layer, u: Tensor, delta: Tensor) -> None:
            # The mean is over the examples, even if each one is there twice, with two labels.
            grads.update(layer.gradients(u, delta, trainable, scale=-u.shape[0] / x.shape[0]))

        image = self.network.prefix(x, noise)
        drive = self._hidden[0].forward(params, image)
        u, _ = self.run_hidden_layers(params, drive, noise, lambda v: v.mean(0))
        output, pullback = self._last.vjp(params, u, noise)
        loss, xi = self.loss.start(output, y)
        learn(self._last, u, pullback(xi))

        labels = torch.cat([y, self.draw_wrong_labels(y, output, noise["negative"])])
        hot = one_hot(labels, self.classes, x.dtype)
        noise = {name: torch.cat([n, n]) for name, n in noise.items()}
        a, drive = image, torch.cat([drive, drive])
        for i, layer in enumerate(self._hidden):
            if i > 0:
                u = normalize_length(a, layer)
                drive = layer.forward(params, u)
            v = f"label.{i}"
            a, pullback = layer.neuron.vjp(drive + params[v][labels], noise)
            delta = pullback(self.compute_error(a))
            if v in trainable:
                gradient = hot.T @ to_memory_order(delta).flatten(1) * (-1 / x.shape[0])
                grads[v] = reshape_in_memory_order(gradient, like=delta)
            if i == 0:  # both labels had the same image
                u, delta = image, torch.add(*delta.chunk(2))
            learn(layer, u, delta)
        return Update(grads, {}, loss, output)

    def draw_wrong_labels(self, y: Tensor, output: Tensor, uniform: Tensor) -> Tensor:
        """Draw a wrong label for each example."""
        if self.negatives == "hard":  # the largest of log p − log(−log uniform) is a draw from p
            tiny = torch.finfo(uniform.dtype).tiny
            uniform = (output.softmax(1) + 1e-6).log() - (-uniform.clamp_min(tiny).log()).log()
        return uniform.masked_fill(one_hot(y, self.classes), -math.inf).argmax(1)

    def compute_error(self, a: Tensor) -> Tensor:
        """Return −∂L/∂a of each example, for activity with the true labels followed by that with the wrong ones."""
        true, wrong = compute_goodness(a).chunk(2)
        if self.threshold is None:
            raising = lowering = torch.sigmoid(self.sharpness * (wrong - true))
        else:
            raising = torch.sigmoid(self.sharpness * (self.threshold - true))
            lowering = torch.sigmoid(self.sharpness * (wrong - self.threshold))
        rate = self.sharpness / a[0].numel()
        xi = a * broadcast_rows(torch.cat([raising, -lowering]) * (2 * rate), a)
        if not self.peer:
            return xi
        own = a.chunk(2)[0]
        mean = own.mean(0, keepdim=True)
        pull = ((mean.mean() - mean) * (self.peer * rate)).expand_as(own)
        return xi + torch.cat([pull, torch.zeros_like(own)])

    def param_groups(self, lr: float, **options: Any) -> list[dict[str, Any]]:
        """Return the groups `W`, `bias` and `label`."""
        label = self._groups(lr, options, label=[f"label.{i}" for i in self.label])
        return super().param_groups(lr, **options) + label
