"""Hebbian learning: hidden layers learn from activity alone; only the last layer sees the loss."""

from typing import Any

import torch
from torch import Tensor

from apical.checks import nothing_to_train
from apical.errors import ApicalError
from apical.learner import Claims, Learner, Update
from apical.network import Layer, Params
from apical.neuron import Noise
from apical.rules.descent import require_positive
from apical.rules.moments import groups_of, moment, unit_axis
from apical.synapse import Synapse


class HebbianRule(Learner):
    """What both rules share: each hidden layer changes by `local`, the last one by its own gradient.

    In a hidden layer x is its input (in a convolution the patch under the kernel, and every position is a sample),
    u = W x its drive without the bias. `normalize` measures x in units of ρ, its root-mean-square length in the
    batch, so that one rate suits layers of any width. What goes up is the network's own φ of the whole drive; biases
    of hidden layers stay as they are. The updates are meant for plain SGD; `hidden_rate` is the hidden layers'
    learning rate as a share of the last one's.
    """

    FEEDBACK = "none: no error leaves the last layer"

    def __init__(self, *args: Any, hidden_rate: float, normalize: bool, **common: Any) -> None:
        super().__init__(*args, **common)
        require_positive(hidden_rate=hidden_rate)
        require_bool(normalize=normalize)
        self.hidden_rate, self.normalize = hidden_rate, normalize

    def local(self, synapse: Synapse, w: Tensor, x: Tensor, u: Tensor) -> Tensor:
        """ΔW of a hidden layer."""
        raise NotImplementedError(f"{type(self).__name__} has no local().")

    def touches(self, name: str) -> bool:
        return name not in [layer.bias for layer in self.network.layers[:-1]]

    def param_groups(self, lr: float, **options: Any) -> list[dict[str, Any]]:
        """Groups `W` and `bias` of the last layer, and `hidden`, with its rate scaled."""
        *hidden, last = (layer.weight for layer in self.network.layers)
        bias = [name for name in [self.network.layers[-1].bias] if name is not None]
        groups = self._groups(lr, options, W=[last], bias=bias)
        return groups + self._groups(lr * self.hidden_rate, options, hidden=hidden)

    def update(self, params: Params, state: Params, x: Tensor, y: Tensor, noise: Noise) -> Update:
        trainable = self.trainable
        if not trainable:
            raise nothing_to_train()
        *hidden, last = self.network.layers
        u, grads = self.network.prefix(x, noise), {}
        for layer in hidden:
            drive = layer.synapse.forward(params[layer.weight], u)
            if layer.weight in trainable:
                grads[layer.weight] = -self._local(layer, params[layer.weight], u, drive)
            u = layer.neuron(drive if layer.bias is None else layer.forward(params, u), noise)
        output, pullback = last.neuron.vjp(last.forward(params, u), noise)
        losses, xi = self.loss.error(output, y)
        delta = pullback(xi)
        if last.weight in trainable:
            grads[last.weight] = last.synapse.outer(u, delta, scale=-1.0)
        if last.bias is not None and last.bias in trainable:
            grads[last.bias] = last.synapse.total(delta, scale=-1.0)
        return Update(grads, {}, losses.mean(), output)

    def _local(self, layer: Layer, w: Tensor, x: Tensor, u: Tensor) -> Tensor:
        if self.normalize:
            rho = length(layer.synapse, w, x)
            x, u = x / rho, u / rho
        return self.local(layer.synapse, w, x, u)


class Hebbian(HebbianRule):
    """Oja's subspace rule: Hebb's product of the two activities, less what the layer's units already explain,

        ΔW = ⟨u xᵀ − u uᵀ W⟩,   u = W x

    over examples and positions (of x/ρ and u/ρ with `normalize`, which divides ΔW by ρ²). Unit by unit (Oja 1982)
    every unit would become the same one; together they span the principal subspace. The decay needs the other
    units' weights, so it is local to the layer, not to the synapse.

    Law: k units on centred data converge to an orthonormal basis of the first k principal components.
    """

    NAME = "hebb"
    TITLE = "Hebbian learning (Oja's subspace rule)"
    SOURCE = "Oja 1989, Neural networks, principal components, and subspaces"
    CLAIMS = Claims(c1=True, c2=True, c3=True)

    def __init__(self, *args: Any, hidden_rate: float = 1.0, normalize: bool = True, **common: Any) -> None:
        super().__init__(*args, hidden_rate=hidden_rate, normalize=normalize, **common)

    def local(self, synapse: Synapse, w: Tensor, x: Tensor, u: Tensor) -> Tensor:
        uu = moment(synapse, u)  # (groups, k, k)
        return product(synapse, x, u) - (uu @ w.reshape(*uu.shape[:2], -1)).reshape(w.shape)


class SoftHebb(HebbianRule):
    """Soft winner-take-all: units compete for each input, and the winner moves towards it (Journé et al. 2023):

        y = softmax(β u) over the layer's units, at every position
        Δw_k = ⟨s_k y_k (x − u_k w_k)⟩,   s_k = +1 for the winner, −1 for the others

    over examples and positions (of x/ρ and u/ρ with `normalize`). `anti_hebbian=False` sets every s_k to +1
    (Moraitis et al. 2022); `adaptive_rate` multiplies Δw_k by √|‖w_k‖ − 1|, so that a unit that has found its place
    stops. `beta` is the inverse temperature β.

    Law: Δw_k = 0 in the direction of w_k only where ‖w_k‖ = 1, and weights converge to that length.
    """

    NAME = "softhebb"
    TITLE = "SoftHebb"
    SOURCE = (
        "Journé et al. 2023, Hebbian deep learning without feedback (ICLR); Moraitis et al. 2022, SoftHebb"
    )

    def __init__(
        self,
        *args: Any,
        beta: float = 10.0,
        anti_hebbian: bool = True,
        adaptive_rate: bool = True,
        hidden_rate: float = 1.0,
        normalize: bool = True,
        **common: Any,
    ) -> None:
        super().__init__(*args, hidden_rate=hidden_rate, normalize=normalize, **common)
        require_positive(beta=beta)
        require_bool(anti_hebbian=anti_hebbian, adaptive_rate=adaptive_rate)
        self.beta, self.anti_hebbian, self.adaptive_rate = beta, anti_hebbian, adaptive_rate

    def local(self, synapse: Synapse, w: Tensor, x: Tensor, u: Tensor) -> Tensor:
        axis = unit_axis(synapse)
        y = (self.beta * u).softmax(axis)
        if self.anti_hebbian:
            y = torch.where(u == u.amax(axis, keepdim=True), y, -y)
        decay = (y * u).movedim(axis, 0).flatten(1).mean(1)
        column = [-1] + [1] * (w.ndim - 1)
        change = product(synapse, x, y) - decay.view(column) * w
        if self.adaptive_rate:
            change = change * (w.flatten(1).norm(dim=1) - 1).abs().sqrt().view(column)
        return change


def product(synapse: Synapse, x: Tensor, y: Tensor) -> Tensor:
    """⟨y xᵀ⟩ over examples and positions (`outer` sums over positions)."""
    positions = y.shape[1:].numel() // y.shape[unit_axis(synapse)]
    return synapse.outer(x, y, scale=1 / positions)


def length(synapse: Synapse, w: Tensor, x: Tensor) -> Tensor:
    """ρ: the root-mean-square length of the input of a unit, over examples, positions and groups."""
    squares = synapse.forward(w.new_ones(groups_of(synapse), *w.shape[1:]), x.square())
    return squares.mean().sqrt().clamp_min(torch.finfo(x.dtype).tiny)


def require_bool(**values: Any) -> None:
    """Refuse a switch that is neither on nor off."""
    for name, value in values.items():
        if not isinstance(value, bool):
            raise ApicalError(f"{name} is {value!r}, but must be True or False.")
