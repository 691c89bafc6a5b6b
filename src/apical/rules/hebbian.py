"""Hebbian learning: hidden layers learn from activity alone; only the last layer learns from the loss."""

import math
from typing import Any

import torch
from torch import Tensor, nn

from apical.core.activation import Noise
from apical.core.learner import Claims, Learner, Update
from apical.core.losses import LossFunction
from apical.core.network import Params
from apical.core.synapse import Dense, Synapse
from apical.core.validation import require_bool, require_positive
from apical.core.views import broadcast_rows, group_samples


class HebbianRule(Learner):
    """The base of both rules: hidden layers follow `compute_hidden_gradient`, the last layer descends the loss.

    x is the layer's input (in a convolution the patch under the kernel; every position is a sample). `center` subtracts
    the mean over the batch from each channel. `normalize` divides by ρ, the root-mean-square length of x, so that one
    learning rate suits layers of any width. u = W x is the drive for this x. The next layer receives φ of the network's
    own drive, with the input unchanged. Biases of hidden layers do not learn. The updates are meant for plain SGD;
    `hidden_rate` is the hidden layers' learning rate as a share of the last layer's.
    """

    FEEDBACK = "none: no error leaves the last layer"

    def set_shared_options(self, hidden_rate: float, center: bool, normalize: bool) -> None:
        """Check and keep the options that both rules have."""
        require_positive(hidden_rate=hidden_rate)
        require_bool(center=center, normalize=normalize)
        self.hidden_rate, self.center, self.normalize = hidden_rate, center, normalize

    def compute_hidden_gradient(self, synapse: Synapse, w: Tensor, x: Tensor, u: Tensor) -> Tensor:
        """Return −ΔW of a hidden layer."""
        raise NotImplementedError(f"{type(self).__name__} has no compute_hidden_gradient().")

    def touches(self, name: str) -> bool:
        return name not in [layer.bias for layer in self.network.layers[:-1]]

    def param_groups(self, lr: float, **options: Any) -> list[dict[str, Any]]:
        """Return the groups `W` and `bias` of the last layer, and `hidden` with its scaled rate."""
        *hidden, last = self.network.layers
        bias = [] if last.bias is None else [last.bias]
        return [
            *self._groups(lr, options, W=[last.weight], bias=bias),
            *self._groups(lr * self.hidden_rate, options, hidden=[layer.weight for layer in hidden]),
        ]

    def update(self, params: Params, state: Params, x: Tensor, y: Tensor, noise: Noise) -> Update:
        trainable = self.trainable
        *hidden, last = self.network.layers
        u, grads = self.network.prefix(x, noise), {}
        for layer in hidden:
            if layer.weight in trainable:
                synapse, w, normalized = layer.synapse, params[layer.weight], self.normalize_input(layer.synapse, u)
                grads[layer.weight] = self.compute_hidden_gradient(
                    synapse, w, normalized, synapse.forward(w, normalized)
                )
            u = layer(params, u, noise)
        output, pullback = last.vjp(params, u, noise)
        loss, xi = self.loss.start(output, y)
        return Update({**grads, **last.gradients(u, pullback(xi), trainable)}, {}, loss, output)

    def normalize_input(self, synapse: Synapse, x: Tensor) -> Tensor:
        """Return the input that a hidden layer learns from: centred and scaled, as the options say."""
        if self.center:
            units = synapse.unit_axis % x.ndim
            x = x - x.mean([axis for axis in range(x.ndim) if axis != units], keepdim=True)
        if self.normalize:
            ones = x.new_ones(synapse.groups, *synapse.weight_shape[1:])
            square = synapse.forward(ones, x.square()).mean()  # over examples, positions and groups
            x = x / square.sqrt().clamp_min(torch.finfo(x.dtype).tiny)
        return x


class Hebbian(HebbianRule):
    """Oja's subspace rule: Hebb's product of the two activities, minus the part that the units already explain,

        ΔW = ⟨u xᵀ − u uᵀ W⟩,   u = W x       over examples and positions

    Trained separately (Oja 1982), all units would become the same; together they span the principal subspace. The
    second term needs the other units' weights, so it is local to the layer, not to the synapse. x is as in
    `HebbianRule`; with `center=False, normalize=False` it is the layer's input unchanged.

    Law: k units converge to an orthonormal basis of the first k principal components.
    """

    NAME = "hebb"
    TITLE = "Hebbian learning (Oja's subspace rule)"
    SOURCE = "Oja 1989, Neural networks, principal components, and subspaces"
    CLAIMS = Claims(c1=True, c2=True, c3=True)

    def __init__(
        self,
        model: nn.Sequential,
        *,
        input_shape: tuple[int, ...] | None = None,
        loss: str | LossFunction = "cross_entropy",
        label_smoothing: float = 0.0,
        hidden_rate: float = 0.1,
        center: bool = True,
        normalize: bool = True,
    ) -> None:
        super().__init__(model, input_shape=input_shape, loss=loss, label_smoothing=label_smoothing)
        self.set_shared_options(hidden_rate, center, normalize)

    def compute_hidden_gradient(self, synapse: Synapse, w: Tensor, x: Tensor, u: Tensor) -> Tensor:
        if isinstance(synapse, Dense):  # u (x − Wᵀu)ᵀ: a batch has fewer examples than a wide layer has units
            return average_product(synapse, x - synapse.adjoint(w, u, x.shape), u, -1.0)
        uu = compute_second_moment(synapse, u)  # (groups, k, k)
        return (uu @ w.reshape(*uu.shape[:2], -1)).reshape(w.shape) - average_product(synapse, x, u)


class SoftHebb(HebbianRule):
    """Soft winner-take-all: units compete for each input, and the winner moves towards it (Journé et al. 2023):

        y = softmax(β u) over the layer's units, at every position;   u = v·x,  v = w/c
        Δv_k = ⟨s_k y_k (x − u_k v_k)⟩,   s_k = +1 for the winner, −1 for the others

    over examples and positions; x is as in `HebbianRule`. `beta` is the inverse temperature β for inputs of unit variance,
    the published normalisation: with `normalize`, β is multiplied by √n, n being a unit's number of inputs.
    `anti_hebbian=False` sets every s_k to +1 (Moraitis et al. 2022); `adaptive_rate` multiplies Δv_k by √|‖v_k‖ − 1|, so
    that a unit stops learning once it has converged. Weights w converge to the length c: 1 as published with
    `gain=None`, otherwise gain·n^(−1/4). This lies between 1, at which tanh would saturate for the inputs that a unit has
    learnt, and n^(−1/2), at which it would hardly respond to any others. Weights must start longer than c: a winner then
    shrinks and others win in turn; otherwise a few units would always win. So **building this learner scales each hidden
    unit's weights to the length `radius` · c**; `radius=None` leaves them as they are.

    Law: each input pulls its winner's ‖v_k‖² by 2 y_k u_k (1 − ‖v_k‖²): weights of units that win come to length c.
    """

    NAME = "softhebb"
    TITLE = "SoftHebb"
    SOURCE = "Journé et al. 2023, Hebbian deep learning without feedback (ICLR); Moraitis et al. 2022, SoftHebb"
    CLAIMS = Claims(c1=True, c2=True, c3=True)

    def __init__(
        self,
        model: nn.Sequential,
        *,
        input_shape: tuple[int, ...] | None = None,
        loss: str | LossFunction = "cross_entropy",
        label_smoothing: float = 0.0,
        beta: float = 1.0,
        gain: float | None = 1.0,
        radius: float | None = 2.0,
        anti_hebbian: bool = True,
        adaptive_rate: bool = True,
        hidden_rate: float = 1.0,
        center: bool = True,
        normalize: bool = True,
    ) -> None:
        super().__init__(model, input_shape=input_shape, loss=loss, label_smoothing=label_smoothing)
        self.set_shared_options(hidden_rate, center, normalize)
        require_positive(beta=beta, gain=gain, radius=radius)
        require_bool(anti_hebbian=anti_hebbian, adaptive_rate=adaptive_rate)
        self.beta, self.gain, self.radius = beta, gain, radius
        self.anti_hebbian, self.adaptive_rate = anti_hebbian, adaptive_rate
        for layer in self.network.layers[:-1]:
            if radius is not None and layer.weight in self.trainable:
                w = self.get_parameter(layer.weight).detach()
                w.mul_(broadcast_rows(radius * self.get_target_length(w) / compute_norms(w), w))

    def get_target_length(self, w: Tensor) -> float:
        """Return c, the length to which these weights converge."""
        return 1.0 if self.gain is None else self.gain * w.shape[1:].numel() ** -0.25

    def compute_hidden_gradient(self, synapse: Synapse, w: Tensor, x: Tensor, u: Tensor) -> Tensor:
        axis, c = synapse.unit_axis, self.get_target_length(w)
        beta = self.beta * math.sqrt(w.shape[1:].numel()) if self.normalize else self.beta
        behind = (u - u.amax(axis, keepdim=True)) * (beta / c)  # 0 for the winner, negative for the others
        y = behind.movedim(axis, -1).softmax(-1).movedim(-1, axis)
        if self.anti_hebbian:
            y = y.copysign(behind)
        decay = (y * u).movedim(axis, 0).flatten(1).mean(1)
        change = torch.addcmul(average_product(synapse, x, y, -c), w, broadcast_rows(decay, w), value=1 / c)
        if self.adaptive_rate:
            change = change * broadcast_rows((compute_norms(w) / c - 1).abs().sqrt(), w)
        return change


def compute_second_moment(synapse: Synapse, e: Tensor) -> Tensor:
    """Return ⟨e eᵀ⟩ over all samples, (groups, units, units): the correlations inside each group."""
    samples = group_samples(synapse, e)
    return samples.mT @ samples / samples.shape[1]


def average_product(synapse: Synapse, x: Tensor, y: Tensor, scale: float = 1.0) -> Tensor:
    """Return scale · ⟨y xᵀ⟩, the mean over examples and positions (`outer` sums over positions)."""
    positions = y.shape[1:].numel() // y.shape[synapse.unit_axis]
    return synapse.outer(x, y, scale=scale / positions)


def compute_norms(w: Tensor) -> Tensor:
    """Return ‖w_k‖ of each unit, at least the smallest positive number."""
    norm: Tensor = w.flatten(1).norm(dim=1).clamp_min(torch.finfo(w.dtype).tiny)
    return norm
