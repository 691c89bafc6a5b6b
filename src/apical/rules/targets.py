"""Target propagation: layers are told which activity to have, and learned inverses work out what that is."""

import math
from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from apical.checks import nothing_to_train
from apical.errors import ApicalError
from apical.learner import Claims, Learner, Phase, Update
from apical.network import Layer, Params
from apical.neuron import RANDOM, Neuron, Noise, Pullback
from apical.rules.descent import draw_normal, is_number, require_positive
from apical.synapse import Dense, Synapse

VALUE_BY_VALUE = frozenset(RANDOM) | {
    *(nn.Identity, nn.Tanh, nn.Sigmoid, nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.SELU, nn.CELU, nn.GELU),
    *(nn.SiLU, nn.Mish, nn.Softplus, nn.Softsign, nn.LogSigmoid, nn.Hardtanh, nn.Hardswish, nn.Hardsigmoid),
    *(nn.Tanhshrink, nn.Softshrink, nn.Hardshrink, nn.Threshold),
}
"""Stages of φ that leave every value in its place. All others (pooling, Flatten, …) rearrange or mix values."""


class Fired(NamedTuple):
    """φ(a); φ′, from an error after φ to the one before it; and S, the pullback of φ's rearranging stages alone."""

    u: Tensor
    derivative: Pullback
    spread: Pullback


class Inverse(NamedTuple):
    """g(a) = ψ(Vᵀ S a + c): from a layer's output back to its input, with V of W's shape."""

    synapse: Synapse
    weight: str
    offset: str
    psi: Neuron

    def drive(self, params: Params, code: Tensor, shape: torch.Size) -> Tensor:
        """What ψ is applied to; `code` is S a."""
        return self.synapse.adjoint(params[self.weight], code, shape) + params[self.offset]

    def __call__(self, params: Params, code: Tensor, shape: torch.Size) -> Tensor:
        return self.psi(self.drive(params, code, shape), {})

    def gradients(self, params: Params, code: Tensor, wanted: Tensor) -> dict[str, Tensor]:
        """Of ½‖g(a) − wanted‖² in V and c, mean over the batch: one layer's own values and nothing else."""
        got, derivative = self.psi.vjp(self.drive(params, code, wanted.shape), {})
        error = derivative(got - wanted)
        offset = (error.sum(0) / len(error)).sum_to_size(params[self.offset].shape)
        return {self.weight: self.synapse.outer(error, code), self.offset: offset}


class _Targets(Learner):
    """What target propagation and its difference form share; they differ in `correction`."""

    def __init__(
        self,
        *args: Any,
        target_step: float = 0.2,
        inverse_steps: int = 5,
        inverse_rate: float = 1.0,
        sigma: float = 0.1,
        std: float | None = None,
        **common: Any,
    ) -> None:
        super().__init__(*args, **common)
        require_positive(target_step=target_step, inverse_rate=inverse_rate, std=std)
        if not (is_number(sigma) and sigma >= 0):
            raise ApicalError(f"sigma is {sigma!r}, but must not be negative.")
        if not is_number(inverse_steps) or not isinstance(inverse_steps, int) or inverse_steps < 1:
            raise ApicalError(
                f"inverse_steps is {inverse_steps!r}, but must be a whole number of at least 1."
            )
        self.target_step, self.inverse_steps = target_step, inverse_steps
        self.inverse_rate, self.sigma, self.std = inverse_rate, sigma, std
        layers, weights = self.network.layers, self.forward_weights
        self.inverse, self.offset = nn.ParameterDict(), nn.ParameterDict()
        self.inverses: dict[int, Inverse] = {}
        for i, layer in list(enumerate(layers))[1:]:
            synapse, psi = layer.synapse, _value_by_value(layers[i - 1])
            spread = std or 1 / math.sqrt(synapse.fan_out)
            self.inverse[str(i)] = nn.Parameter(draw_normal(synapse.weight_shape, spread, like=weights[i]))
            self.offset[str(i)] = nn.Parameter(weights[i].new_zeros(_offset_shape(synapse)))
            self.inverses[i] = Inverse(synapse, f"inverse.{i}", f"offset.{i}", psi)
        self._stages = [
            [(Neuron([stage[:2]]), type(stage.module) in VALUE_BY_VALUE) for stage in layer.neuron.stages]
            for layer in layers
        ]

    def expected(self, i: int, params: Params, u: Tensor, above: Fired) -> Tensor:
        """What g_i's value for the target above is compared with to give the error at layer i's input u."""
        raise NotImplementedError

    def fire(self, i: int, params: Params, u: Tensor, noise: Noise) -> Fired:
        """Layer i's forward map and what the ways down through it need."""
        a, derivatives, spreads = self.network.layers[i].forward(params, u), [], []
        for stage, in_place in self._stages[i]:
            a, pullback = stage.vjp(a, noise)
            derivatives.append(pullback)
            if not in_place:
                spreads.append(pullback)
        return Fired(a, partial(_down, derivatives), partial(_down, spreads))

    def update(self, params: Params, state: Params, x: Tensor, y: Tensor, noise: Noise) -> Update:
        """The forward weights: targets from the top down, and each layer towards its own."""
        trainable, layers = self.trainable, self.network.layers
        if not trainable:
            raise nothing_to_train()
        learning = [i for i, layer in enumerate(layers) if {layer.weight, layer.bias} & trainable]
        bottom = min(learning, default=len(layers))
        inputs, fired, u = [], [], self.network.prefix(x, noise)
        for i in range(len(layers)):
            inputs.append(u)
            fired.append(self.fire(i, params, u, noise))
            u = fired[-1].u
        losses, error = self.loss.error(u, y)
        target, grads = u + self.target_step * error, {}
        for i in range(len(layers) - 1, bottom - 1, -1):
            layer, u, above = layers[i], inputs[i], fired[i]
            delta = above.derivative(error)
            if layer.weight in trainable:
                grads[layer.weight] = layer.synapse.outer(u, delta, scale=-1.0)
            if layer.bias is not None and layer.bias in trainable:
                grads[layer.bias] = layer.synapse.total(delta, scale=-1.0)
            if i > bottom:
                wanted = self.inverses[i](params, above.spread(target), u.shape)
                error = wanted - self.expected(i, params, u, above)
                target = u + error
        return Update(grads, {}, losses.mean(), fired[-1].u)

    def invert(self, turn: str, params: Params, state: Params, x: Tensor, y: Tensor, noise: Noise) -> Update:
        """The inverses: each one reconstructs its layer's noisy input from that layer's output for it.

        The forward weights stand still meanwhile, so the first turn hands its activities on to the others.
        """
        trainable, handed = self.trainable, {k: v for k, v in state.items() if k.startswith("u/")}
        if not handed:
            u = self.network.prefix(x, noise)
            for i, layer in enumerate(self.network.layers):
                handed[f"u/{i}"] = u
                u = layer.neuron(layer.forward(params, u), noise)
            handed["u/output"] = u
        grads: dict[str, Tensor] = {}
        for i, inverse in self.inverses.items():
            u = handed[f"u/{i}"]
            if self.sigma:
                u = u + self.sigma * noise[f"sigma/{turn}/{i}"]
            fired = self.fire(i, params, u, noise)
            grads |= inverse.gradients(params, fired.spread(fired.u), u)
        output = handed["u/output"]
        grads = {name: gradient for name, gradient in grads.items() if name in trainable}
        return Update(grads, handed, self.loss(output, y).mean(), output)

    @property
    def phases(self) -> tuple[Phase, ...]:
        """`inverse_steps` updates of the inverses, then one of the forward weights."""
        if not self.trainable & {*self._inverse_names}:
            return (self.update,)
        return (*(partial(self.invert, str(turn)) for turn in range(self.inverse_steps)), self.update)

    def draw(self, x: Tensor, generator: torch.Generator | None = None) -> dict[str, Tensor]:
        drawn = super().draw(x, generator)
        if self.sigma and self.inverses:
            shapes = self.network.shapes(x.shape[1:]).inputs
            for turn in range(self.inverse_steps):
                for i in self.inverses:
                    drawn[f"sigma/{turn}/{i}"] = torch.randn(
                        (x.shape[0], *shapes[i]), dtype=x.dtype, device=x.device, generator=generator
                    )
        return drawn

    @property
    def _inverse_names(self) -> list[str]:
        return [name for inverse in self.inverses.values() for name in (inverse.weight, inverse.offset)]

    @property
    def feedback_weights(self) -> list[Tensor | None]:
        """V of each layer: what brings a target to the layer's input."""
        return [self.inverse[str(i)] if i in self.inverses else None for i in range(len(self.network))]

    def param_groups(self, lr: float, **options: Any) -> list[dict[str, Any]]:
        """Groups `W`, `bias`, and `inverse` with its own rate."""
        groups = super().param_groups(lr, **options)
        return groups + self._groups(lr * self.inverse_rate, options, inverse=self._inverse_names)


class TargetPropagation(_Targets):
    """t_i = g_i(t_{i+1})
    """

    NAME = "tp"
    TITLE = "Target propagation"
    SOURCE = "Bengio 2014, How auto-encoders could provide credit assignment in deep networks"
    FEEDBACK = "V, trained to reconstruct a layer's input from its output"

    def expected(self, i: int, params: Params, u: Tensor, above: Fired) -> Tensor:
        return u


class DifferenceTargetPropagation(_Targets):
    """t_i = u_i + g_i(t_{i+1}) - g_i(u_{i+1})
    """

    NAME = "dtp"
    TITLE = "Difference target propagation"
    SOURCE = "Lee et al. 2015, Difference target propagation"
    FEEDBACK = "V, trained to reconstruct a layer's input from its output"
    CLAIMS = Claims(c1=True, c2=True, c3=False)

    def expected(self, i: int, params: Params, u: Tensor, above: Fired) -> Tensor:
        return self.inverses[i](params, above.spread(above.u), u.shape)


def _down(pullbacks: list[Pullback], e: Tensor) -> Tensor:
    for pullback in reversed(pullbacks):
        e = pullback(e)
    return e


def _value_by_value(below: Layer) -> Neuron:
    """ψ: the activations of the layer below, so that g's values lie where that layer's do."""
    stages = [(stage.name, stage.module) for stage in below.neuron.stages]
    return Neuron([s for s in stages if type(s[1]) in VALUE_BY_VALUE and type(s[1]) not in RANDOM])


def _offset_shape(synapse: Synapse) -> tuple[int, ...]:
    """One value for each input unit, or for each channel of a convolution."""
    if isinstance(synapse, Dense):
        return (synapse.in_features,)
    return (synapse.in_channels, *[1] * synapse.dims)  # type: ignore[attr-defined]
