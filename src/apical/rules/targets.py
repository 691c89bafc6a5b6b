"""Target propagation: each layer learns towards a target activity, which learned inverses compute from above.

Every layer but the first has an inverse g_i from its output u_{i+1} back to its input u_i,

    g_i(a) = ψ_i(V_iᵀ S_i a + c_i)

with V_i of W_i's shape, used as the layer's adjoint, so that it fits dense and convolutional layers alike. ψ_i is the
activation of the layer below, so that g_i's values lie in the range of u_i. S_i undoes the rearrangement of values by
φ_i, and nothing else: it is the linear pullback of the stages of φ_i that move or join values (pooling, Flatten), at
the current activity. A pooled maximum returns to its position, a mean is divided among its inputs, a flattened map
gets its shape back. Activations, which leave values in place, are left to V_i.
"""

import math
from functools import partial
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from apical.core.activation import ACTIVATIONS, RANDOM, Neuron, Noise, Pullback, apply_in_reverse
from apical.core.learner import Claims, Learner, Phase, Update
from apical.core.losses import LossFunction
from apical.core.network import Layer, Params
from apical.core.synapse import Dense, Synapse
from apical.core.validation import require_not_negative, require_positive, require_whole
from apical.core.views import reshape_in_memory_order
from apical.rules.feedback import draw_normal

ELEMENTWISE = {nn.Identity, *ACTIVATIONS, *RANDOM}
"""Stages of φ that act on each value separately. All others (pooling, Flatten, Softmax, …) belong to S."""


class LayerPass(NamedTuple):
    """The forward pass of one layer: its output, φ′ as a function of an error after φ, and S, its rearranging part."""

    u: Tensor
    derivative: Pullback
    spread: Pullback


class Inverse(NamedTuple):
    """The inverse g_i as a function of S_i a: the layer's synapse, the names of V and c, and ψ."""

    synapse: Synapse
    weight: str
    offset: str
    psi: Neuron

    def drive(self, params: Params, code: Tensor, shape: torch.Size) -> Tensor:
        """Return Vᵀ S a + c. `code` is S a, `shape` the shape of the layer's input."""
        return self.synapse.adjoint(params[self.weight], code, shape) + params[self.offset]

    def __call__(self, params: Params, code: Tensor, shape: torch.Size) -> Tensor:
        return self.psi(self.drive(params, code, shape), {})

    def gradients(self, params: Params, code: Tensor, wanted: Tensor) -> dict[str, Tensor]:
        """Return the gradients of the batch mean of ½‖g(a) − wanted‖² in V and c."""
        got, derivative = self.psi.vjp(self.drive(params, code, wanted.shape), {})
        error = derivative(got - wanted)
        offset = (error.sum(0) / len(error)).sum_to_size(params[self.offset].shape)
        return {self.weight: self.synapse.outer(error, code), self.offset: offset}


class TargetPropagationRule(Learner):
    """The base of both rules, which differ only in `compute_baseline`."""

    TARGET_STEP: ClassVar[float]

    def __init__(
        self,
        model: nn.Sequential,
        *,
        input_shape: tuple[int, ...] | None = None,
        loss: str | LossFunction = "cross_entropy",
        label_smoothing: float = 0.0,
        target_step: float | None = None,
        inverse_steps: int = 1,
        inverse_rate: float = 1.0,
        sigma: float = 0.1,
        std: float | None = None,
    ) -> None:
        super().__init__(model, input_shape=input_shape, loss=loss, label_smoothing=label_smoothing)
        require_positive(target_step=target_step, inverse_rate=inverse_rate, std=std)
        require_not_negative(sigma=sigma)
        require_whole(inverse_steps=inverse_steps)
        self.target_step = self.TARGET_STEP if target_step is None else target_step
        self.inverse_steps, self.inverse_rate, self.sigma, self.std = inverse_steps, inverse_rate, sigma, std
        layers, weights = self.network.layers, self.forward_weights
        self.inverse, self.offset = nn.ParameterDict(), nn.ParameterDict()
        self.inverses: dict[int, Inverse] = {}
        for i, layer in self.network.upper.items():
            synapse, psi = layer.synapse, _select_elementwise(layers[i - 1])
            spread = std or 1 / math.sqrt(synapse.fan_out)
            self.inverse[str(i)] = nn.Parameter(draw_normal(synapse.weight_shape, spread, like=weights[i]))
            # One offset per input unit, or per input channel of a convolution.
            shape = (synapse.in_features,) if isinstance(synapse, Dense) else (synapse.in_channels, *[1] * synapse.dims)
            self.offset[str(i)] = nn.Parameter(weights[i].new_zeros(shape))
            self.inverses[i] = Inverse(synapse, f"inverse.{i}", f"offset.{i}", psi)
        self._stages = [
            [(Neuron([stage[:2]]), type(stage.module) in ELEMENTWISE) for stage in layer.neuron.stages]
            for layer in layers
        ]

    def compute_baseline(self, i: int, params: Params, u: Tensor, above: LayerPass) -> Tensor:
        """Return the value that is subtracted from g_i(t_{i+1}) to give the error t_i − u_i of layer i's input."""
        raise NotImplementedError

    def run_layer(self, i: int, params: Params, u: Tensor, noise: Noise) -> LayerPass:
        """Run layer i and keep its two pullbacks through φ."""
        a, derivatives, spreads = self.network.layers[i].forward(params, u), [], []
        for stage, is_elementwise in self._stages[i]:
            a, pullback = stage.vjp(a, noise)
            derivatives.append(pullback)
            if not is_elementwise:
                spreads.append(pullback)
        return LayerPass(a, partial(apply_in_reverse, derivatives), partial(apply_in_reverse, spreads))

    def update(self, params: Params, state: Params, x: Tensor, y: Tensor, noise: Noise) -> Update:
        """Update the forward weights: compute targets from the top down and move each layer towards its own.

        The last layer descends the loss itself.
        """
        trainable, layers = self.trainable, self.network.layers
        bottom = min(self.network.find_learning_layers(trainable), default=len(layers))
        inputs, passes, u = [], [], self.network.prefix(x, noise)
        for i in range(len(layers)):
            inputs.append(u)
            passes.append(self.run_layer(i, params, u, noise))
            u = passes[-1].u
        loss, error = self.loss.start(u, y)
        target = u + self.target_step * error
        grads: dict[str, Tensor] = {}
        for i in range(len(layers) - 1, bottom - 1, -1):
            u, above = inputs[i], passes[i]
            layers[i].neuron.note(xi=error)
            grads |= layers[i].gradients(u, above.derivative(error), trainable)
            if i > bottom:
                wanted = self.inverses[i](params, above.spread(target), u.shape)
                error = wanted - self.compute_baseline(i, params, u, above)
                target = u + error
        return Update(grads, {}, loss, passes[-1].u)

    def train_inverses(self, turn: str, params: Params, state: Params, x: Tensor, y: Tensor, noise: Noise) -> Update:
        """Update the inverses: each one learns to reconstruct its layer's noisy input from the layer's output.

        The forward weights do not change in the meantime, so the first turn passes its activities on to the others.
        """
        trainable, activities = self.trainable, {k: v for k, v in state.items() if k.startswith("u/")}
        if not activities:
            u = self.network.prefix(x, noise)
            for i, layer in enumerate(self.network.layers, start=1):
                u = activities[f"u/{i}"] = layer(params, u, noise)
        grads: dict[str, Tensor] = {}
        for i, inverse in self.inverses.items():
            u = activities[f"u/{i}"]
            if self.sigma:
                u = u + self.sigma * reshape_in_memory_order(noise[f"sigma/{turn}/{i}"], like=u)
            layer_pass = self.run_layer(i, params, u, noise)
            grads |= inverse.gradients(params, layer_pass.spread(layer_pass.u), u)
        output = activities[f"u/{len(self.network)}"]
        grads = {name: gradient for name, gradient in grads.items() if name in trainable}
        return Update(grads, activities, self.loss(output, y).mean(), output)

    @property
    def phases(self) -> tuple[Phase, ...]:
        """`inverse_steps` updates of the inverses, then one update of the forward weights."""
        if not self.trainable & {*self._inverse_names}:
            return (self.update,)
        return (*(partial(self.train_inverses, str(turn)) for turn in range(self.inverse_steps)), self.update)

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
        """V of each layer, which carries a target to the layer's input."""
        return [self.inverse[str(i)] if i in self.inverses else None for i in range(len(self.network))]

    def param_groups(self, lr: float, **options: Any) -> list[dict[str, Any]]:
        """Return the groups `W`, `bias`, and `inverse` with its own rate."""
        groups = super().param_groups(lr, **options)
        return groups + self._groups(lr * self.inverse_rate, options, inverse=self._inverse_names)


class TargetPropagation(TargetPropagationRule):
    """Each target is the inverse of the target above (LeCun 1986, Bengio 2014):

        t_L = u_L − τ ∂loss/∂u_L,  t_i = g_i(t_{i+1})
        ΔW_i = −∂/∂W_i mean ½‖φ_i(W_i u_i) − t_{i+1}‖²,  the last W by the loss itself
        ΔV_i = −∂/∂V_i mean ½‖g_i(f_i(v)) − v‖²,  v = u_i + σ n,  f_i(v) = φ_i(W_i v)

    The errors of the inverses also enter the targets. With a small step τ they dominate, and activity shrinks until all
    examples look alike. Hence τ, `target_step`, is 5 here.

    `inverse_steps` updates of the inverses, each with new noise n of spread `sigma`, come before every update of W;
    `inverse_rate` is their learning rate as a share of W's. `std` is V's initial spread; by default 1/√fan-out.

    Laws: the inverses' gradient is autograd's of the reconstruction loss; where the inverses are exact, equals `dtp`.
    """

    NAME = "tp"
    TITLE = "Target propagation"
    SOURCE = "Bengio 2014, How auto-encoders could provide credit assignment in deep networks via target propagation"
    FEEDBACK = "inverses V, trained to reconstruct a layer's noisy input from its output"
    TARGET_STEP = 5.0

    def compute_baseline(self, i: int, params: Params, u: Tensor, above: LayerPass) -> Tensor:
        return u


class DifferenceTargetPropagation(TargetPropagationRule):
    """Target propagation corrected for the reconstruction errors of the inverses (Lee et al. 2015):

        t_i = u_i + g_i(t_{i+1}) − g_i(u_{i+1})

    so that a target equals the activity if the target above does. Options are those of `tp`; `target_step` is 0.2.

    Laws: that; and for square orthogonal layers with identity φ and exact inverses, hidden W gradients are `bp`'s
    times `target_step`; the inverses' gradient is autograd's of the reconstruction loss.

    >>> model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    >>> _ = [nn.init.orthogonal_(layer.weight) for layer in model]
    >>> learner = DifferenceTargetPropagation(model, target_step=0.5)
    >>> for w, v in zip(learner.forward_weights[1:], learner.feedback_weights[1:]):
    ...     _ = v.requires_grad_(False).copy_(w.detach())  # the inverse of an orthogonal matrix is its transpose
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

    def compute_baseline(self, i: int, params: Params, u: Tensor, above: LayerPass) -> Tensor:
        return self.inverses[i](params, above.spread(above.u), u.shape)


def _select_elementwise(below: Layer) -> Neuron:
    """Return ψ: the activations of the layer below, so that g has values in the same range."""
    stages = [(stage.name, stage.module) for stage in below.neuron.stages]
    return Neuron([s for s in stages if type(s[1]) in ELEMENTWISE and type(s[1]) not in RANDOM])
