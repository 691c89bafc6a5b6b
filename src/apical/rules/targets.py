"""Target propagation: a layer learns towards an activity that it should have had, found by learned inverses.

Every layer but the first has an inverse g_i from its output u_{i+1} back to its input u_i,

    g_i(a) = ψ_i(V_iᵀ S_i a + c_i)

with V_i of W_i's shape, used as the layer's adjoint, so that it fits dense and convolutional layers alike. ψ_i is the
activation of the layer below, so that g_i's values lie in the range of u_i. S_i undoes what φ_i does to the places
of values, and nothing else: it is the linear pullback of the stages of φ_i that move or join values (pooling,
Flatten), at the activity of the moment. A pooled maximum returns to the place that it came from, a mean is shared
out, a flattened map gets its shape back; activations, which leave values where they are, are left to V_i.
"""

import math
from functools import partial
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from apical.core.activation import ACTIVATIONS, RANDOM, Neuron, Noise, Pullback, backwards
from apical.core.learner import Claims, Learner, Phase, Update
from apical.core.memory_order import in_order_of
from apical.core.network import Layer, Params
from apical.core.synapse import Dense, Synapse
from apical.core.validation import require_not_negative, require_positive, require_whole
from apical.rules.feedback import draw_normal

VALUE_BY_VALUE = {nn.Identity, *ACTIVATIONS, *RANDOM}
"""Stages of φ that leave every value in its place. All others (pooling, Flatten, Softmax, …) are S's."""


class Fired(NamedTuple):
    """A layer's output; φ′, from an error after φ to the one before it; and S, the part of it that moves values."""

    u: Tensor
    derivative: Pullback
    spread: Pullback


class Inverse(NamedTuple):
    """g_i, as a function of S_i a: the names of V and c, and ψ."""

    synapse: Synapse
    weight: str
    offset: str
    psi: Neuron

    def drive(self, params: Params, code: Tensor, shape: torch.Size) -> Tensor:
        """Vᵀ S a + c; `code` is S a, `shape` that of the layer's input."""
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
    """What the two rules share; they differ in `expected` alone."""

    TARGET_STEP: ClassVar[float]

    def __init__(
        self,
        *args: Any,
        target_step: float | None = None,
        inverse_steps: int = 1,
        inverse_rate: float = 1.0,
        sigma: float = 0.1,
        std: float | None = None,
        **common: Any,
    ) -> None:
        super().__init__(*args, **common)
        require_positive(target_step=target_step, inverse_rate=inverse_rate, std=std)
        require_not_negative(sigma=sigma)
        require_whole(inverse_steps=inverse_steps)
        self.target_step = self.TARGET_STEP if target_step is None else target_step
        self.inverse_steps, self.inverse_rate, self.sigma, self.std = inverse_steps, inverse_rate, sigma, std
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
        """What g_i(t_{i+1}) is compared with: their difference is the error t_i − u_i of layer i's input."""
        raise NotImplementedError

    def fire(self, i: int, params: Params, u: Tensor, noise: Noise) -> Fired:
        """Layer i's way up, and the two ways down through its φ."""
        a, derivatives, spreads = self.network.layers[i].forward(params, u), [], []
        for stage, in_place in self._stages[i]:
            a, pullback = stage.vjp(a, noise)
            derivatives.append(pullback)
            if not in_place:
                spreads.append(pullback)
        return Fired(a, partial(backwards, derivatives), partial(backwards, spreads))

    def update(self, params: Params, state: Params, x: Tensor, y: Tensor, noise: Noise) -> Update:
        """The forward weights: targets from the top down, and each layer towards its own (the last by the loss)."""
        trainable, layers = self.trainable, self.network.layers
        learning = [i for i, layer in enumerate(layers) if {layer.weight, layer.bias} & trainable]
        bottom = min(learning, default=len(layers))
        inputs, fired, u = [], [], self.network.prefix(x, noise)
        for i in range(len(layers)):
            inputs.append(u)
            fired.append(self.fire(i, params, u, noise))
            u = fired[-1].u
        loss, error = self.loss.start(u, y)
        target = u + self.target_step * error
        grads: dict[str, Tensor] = {}
        for i in range(len(layers) - 1, bottom - 1, -1):
            layer, u, above = layers[i], inputs[i], fired[i]
            grads |= layer.gradients(u, above.derivative(error), trainable)
            if i > bottom:
                wanted = self.inverses[i](params, above.spread(target), u.shape)
                error = wanted - self.expected(i, params, u, above)
                target = u + error
        return Update(grads, {}, loss, fired[-1].u)

    def invert(self, turn: str, params: Params, state: Params, x: Tensor, y: Tensor, noise: Noise) -> Update:
        """The inverses: each one reconstructs its layer's noisy input from that layer's output for it.

        The forward weights stand still meanwhile, so the first turn hands its activities on to the others.
        """
        trainable, handed = self.trainable, {k: v for k, v in state.items() if k.startswith("u/")}
        if not handed:
            u = self.network.prefix(x, noise)
            for i, layer in enumerate(self.network.layers, start=1):
                u = handed[f"u/{i}"] = layer.neuron(layer.forward(params, u), noise)
        grads: dict[str, Tensor] = {}
        for i, inverse in self.inverses.items():
            u = handed[f"u/{i}"]
            if self.sigma:
                u = u + self.sigma * in_order_of(u, noise[f"sigma/{turn}/{i}"])
            fired = self.fire(i, params, u, noise)
            grads |= inverse.gradients(params, fired.spread(fired.u), u)
        output = handed[f"u/{len(self.network)}"]
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
    """Targets come down through the inverses as they are (LeCun 1986, Bengio 2014):

        t_L = u_L − τ ∂loss/∂u_L,  t_i = g_i(t_{i+1})
        ΔW_i = −∂/∂W_i mean ½‖φ_i(W_i u_i) − t_{i+1}‖²,  the last W by the loss itself
        ΔV_i = −∂/∂V_i mean ½‖g_i(f_i(v)) − v‖²,  v = u_i + σ n,  f_i(v) = φ_i(W_i v)

    A layer is also pulled towards whatever its inverse gets wrong, and with a short step τ this pull wins:
    activity shrinks until all examples look alike. Hence τ, `target_step`, is 5 here.

    `inverse_steps` updates of the inverses, each with new noise n of spread `sigma`, come before every update of W;
    `inverse_rate` is their learning rate as a share of W's. `std` is V's initial spread; by default 1/√fan-out.

    Laws: the inverses' gradient is autograd's of the reconstruction loss; where the inverses are exact, equals `dtp`.
    """

    NAME = "tp"
    TITLE = "Target propagation"
    SOURCE = "Bengio 2014, How auto-encoders could provide credit assignment in deep networks via target propagation"
    FEEDBACK = "inverses V, trained to reconstruct a layer's noisy input from its output"
    TARGET_STEP = 5.0

    def expected(self, i: int, params: Params, u: Tensor, above: Fired) -> Tensor:
        return u


class DifferenceTargetPropagation(_Targets):
    """As `tp`, but what an inverse gets wrong about the activity itself is taken out (Lee et al. 2015):

        t_i = u_i + g_i(t_{i+1}) − g_i(u_{i+1})

    so that a target equals the activity wherever the target above does. Options are `tp`'s; `target_step` is 0.2.

    Laws: that; and for square orthogonal layers with identity φ and exact inverses, hidden W gradients are `bp`'s
    times `target_step`; the inverses' gradient is autograd's of the reconstruction loss.

    >>> model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    >>> _ = [nn.init.orthogonal_(layer.weight) for layer in model]
    >>> learner = DifferenceTargetPropagation(model, target_step=0.5)
    >>> for w, v in zip(learner.forward_weights[1:], learner.feedback_weights[1:]):
    ...     _ = v.requires_grad_(False).copy_(w.detach())  # an orthogonal matrix is inverted by its transpose
    >>> _ = learner.offset.requires_grad_(False)  # nothing is left to learn for the inverses
    >>> x, y = torch.randn(8, 4), torch.randint(0, 4, (8,))
    >>> _ = learner.credit(x, y)
    >>> (bp,) = torch.autograd.grad(nn.functional.cross_entropy(model(x), y), [model[0].weight])
    >>> torch.allclose(model[0].weight.grad, 0.5 * bp, atol=1e-6)
    True
    """

    NAME = "dtp"
    TITLE = "Difference target propagation"
    SOURCE = "Lee, Zhang, Fischer & Bengio 2015, Difference target propagation"
    FEEDBACK = "inverses V, trained to reconstruct a layer's noisy input from its output"
    CLAIMS = Claims(c1=True, c2=True, c3=False)
    TARGET_STEP = 0.2

    def expected(self, i: int, params: Params, u: Tensor, above: Fired) -> Tensor:
        return self.inverses[i](params, above.spread(above.u), u.shape)


def _value_by_value(below: Layer) -> Neuron:
    """ψ: the activations of the layer below, so that g's values lie where that layer's do."""
    stages = [(stage.name, stage.module) for stage in below.neuron.stages]
    return Neuron([s for s in stages if type(s[1]) in VALUE_BY_VALUE and type(s[1]) not in RANDOM])


def _offset_shape(synapse: Synapse) -> tuple[int, ...]:
    """One value for each input unit, or for each channel of a convolution."""
    if isinstance(synapse, Dense):
        return (synapse.in_features,)
    return (synapse.in_channels, *[1] * synapse.dims)  # type: ignore[attr-defined]
