"""Forward-forward: two passes upwards, one with the true label and one with a wrong one, and no way down."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from apical.errors import ApicalError, UnsupportedError
from apical.learner import Claims, Learner, Update
from apical.network import Layer, Params
from apical.neuron import Noise
from apical.rules.descent import draw_normal, is_number, require_positive
from apical.synapse import Conv


def unit_axis(layer: Layer) -> int:
    return 1 if isinstance(layer.synapse, Conv) else -1


def directed(u: Tensor, layer: Layer) -> Tensor:
    """Activity scaled to mean square 1 over the units that a layer sees at each position."""
    return u * (u.square().mean(unit_axis(layer), keepdim=True) + 1e-6).rsqrt()


def goodness(a: Tensor) -> Tensor:
    return a.flatten(1).square().mean(1)


class ForwardForward(Learner):
    NAME = "ff"
    TITLE = "Forward-forward"
    SOURCE = "Hinton 2022, The forward-forward algorithm: some preliminary investigations"
    FEEDBACK = "none: labels enter with the data, and every layer has its own goodness"
    CLAIMS = Claims(c1=True, c2=True, c3=True)
    MODEL_PREDICTS = False

    def __init__(self, *args: Any, predict: str = "goodness", threshold: float | None = None, sharpness: float = 10.0,
                 peer: float = 0.0, labels: str = "every", label_std: float = 1.0, hard: bool = False, skip: int=0, **common: Any) -> None:
        super().__init__(*args, **common)
        self.how, self.threshold, self.sharpness, self.peer, self.labels, self.hard, self.skip = predict, threshold, sharpness, peer, labels, hard, skip
        shapes = self.network.shapes(common.get("input_shape"))
        self.classes = shapes.output[0]
        hidden = self.network.layers[:-1]
        self.label = nn.ParameterDict()
        for i, (layer, w) in enumerate(zip(hidden, self.forward_weights, strict=False)):
            if i == 0 or labels == "every":
                self.label[str(i)] = nn.Parameter(draw_normal((self.classes, layer.synapse.weight_shape[0]), label_std, like=w))

    def draw(self, x, generator=None):
        noise = super().draw(x, generator)
        noise["negative"] = torch.rand(x.shape[0], self.classes, dtype=x.dtype, device=x.device, generator=generator)
        return noise

    def drive(self, i, params, u, hot):
        layer = self.network.layers[i]
        a = layer.forward(params, u)
        v = params.get(f"label.{i}")
        if v is None:
            return a
        shape = [1] * a.ndim
        shape[0] = -1
        shape[unit_axis(layer)] = v.shape[1]
        return a + (hot @ v).view(shape)

    def enter(self, i, u):
        return directed(u, self.network.layers[i]) if i else u

    def run(self, params, x, hot, noise):
        u = self.network.prefix(x, noise)
        good = 0
        for i, layer in enumerate(self.network.layers[:-1]):
            u = layer.neuron(self.drive(i, params, self.enter(i, u), hot), noise)
            if i >= self.skip:
                good = good + goodness(u)
        return u, good

    def predict(self, params, state, x):
        if self.how == "readout":
            return self.readout(params, x, {})[1]
        scores = []
        for c in range(self.classes):
            hot = torch.zeros(self.classes, dtype=x.dtype, device=x.device)
            hot[c] = 1
            scores.append(self.run(params, x, hot.expand(x.shape[0], -1), {})[1])
        return self.sharpness * torch.stack(scores, 1)

    def readout(self, params, x, noise):
        last = self.network.layers[-1]
        hot = x.new_full((x.shape[0], self.classes), 1 / self.classes)
        u, _ = self.run(params, x, hot, noise)
        u = directed(u, last)
        return u, last.neuron(last.forward(params, u), noise)

    def update(self, params, state, x, y, noise):
        trainable = self.trainable
        grads = {}
        last = self.network.layers[-1]
        u, _ = self.readout(params, x, noise)
        out, pullback = last.neuron.vjp(last.forward(params, u), noise)
        losses, xi = self.loss.error(out, y)
        self.learn(last, u, pullback(xi), trainable, grads)
        true = (y.unsqueeze(1) == torch.arange(self.classes, device=y.device))
        z = -(-noise["negative"].clamp_min(1e-9).log()).log()
        if self.hard:
            z = z + out.log_softmax(1)
        neg = z.masked_fill(true, -math.inf).argmax(1)
        neg = (neg.unsqueeze(1) == torch.arange(self.classes, device=y.device))
        hot = torch.cat([true, neg]).to(x.dtype)
        both = {k: torch.cat([v, v]) for k, v in noise.items()}
        u = self.network.prefix(x, noise)
        u = torch.cat([u, u])
        n = x.shape[0]
        sign = torch.cat([x.new_ones(n), -x.new_ones(n)])
        for i, layer in enumerate(self.network.layers[:-1]):
            u = self.enter(i, u)
            a, pullback = layer.neuron.vjp(self.drive(i, params, u, hot), both)
            g = goodness(a)
            if self.threshold is None:
                d = (g[:n] - g[n:]).repeat(2)
            else:
                d = sign * (g - self.threshold)
            d = sign * torch.sigmoid(-self.sharpness * d) * (2 * self.sharpness / a[0].numel())
            xi = a * d.view(-1, *[1] * (a.ndim - 1))
            if self.peer:
                m = a[:n].mean(0)
                e = (m.mean() - m) * (self.peer * self.sharpness / a[0].numel())
                xi = xi + torch.cat([e.expand_as(a[:n]), torch.zeros_like(a[n:])])
            delta = pullback(xi)
            self.learn(layer, u, delta, trainable, grads)
            name = f"label.{i}"
            if name in trainable:
                s = delta.flatten(2).sum(2) if isinstance(layer.synapse, Conv) else delta.reshape(2 * n, -1, delta.shape[-1]).sum(1)
                grads[name] = hot.T @ s * (-1 / (2 * n))
            u = a
        return Update(grads, {}, losses.mean(), out)

    def learn(self, layer, u, delta, trainable, grads):
        if layer.weight in trainable:
            grads[layer.weight] = layer.synapse.outer(u, delta, scale=-1.0)
        if layer.bias is not None and layer.bias in trainable:
            grads[layer.bias] = layer.synapse.total(delta, scale=-1.0)

    def param_groups(self, lr, **options):
        labels = self._groups(lr, options, label=[f"label.{i}" for i in self.label])
        return super().param_groups(lr, **options) + labels
