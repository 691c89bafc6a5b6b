"""Equilibrium propagation: a network with feedback settles twice more, nudged towards and away from the target."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules import pooling

from apical.errors import ApicalError, UnsupportedError
from apical.learner import Claims, Learner, Update
from apical.network import Layer, Params
from apical.neuron import RANDOM, Neuron, Noise, Pullback, Stage
from apical.rules.descent import is_number, lowest, require_positive

ACTIVATIONS = (nn.Tanh, nn.Sigmoid, nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.SELU, nn.CELU, nn.GELU, nn.SiLU)
ACTIVATIONS += (nn.Mish, nn.Softplus, nn.Softsign, nn.LogSigmoid, nn.Hardtanh, nn.Hardswish, nn.Hardsigmoid)
ACTIVATIONS += (nn.Tanhshrink, nn.Softshrink, nn.Hardshrink, nn.Threshold)
"""What can be ρ: one neuron's value from that neuron's field alone."""
RESHAPING = (nn.Identity, nn.Flatten, nn.Unflatten, pooling._MaxPoolNd, pooling._AvgPoolNd)
RESHAPING += (pooling._AdaptiveMaxPoolNd, pooling._AdaptiveAvgPoolNd)
"""What can be P: from the places of the drive to those of the neurons."""

Push = Callable[[Tensor], Tensor]


class Relay(NamedTuple):
    """One layer of the system that settles: its synapse, P and ρ."""

    layer: Layer
    pool: Neuron
    rho: Neuron

    def drive(self, params: Params, u: Tensor) -> tuple[Tensor, Pullback]:
        """P(W u + b), and P′ at that drive."""
        return self.pool.vjp(self.layer.forward(params, u), {})


class System(NamedTuple):
    """The hidden layers at one moment: their states, and the drive and P′ that each gets from below."""

    states: list[Tensor]
    drives: list[tuple[Tensor, Pullback]]


def rise(relays: Sequence[Relay], params: Params, u: Tensor) -> System:
    """The pass up without feedback, s_i = ρ(P(W s_{i−1} + b)): where settling starts."""
    states, drives = [], []
    for relay in relays:
        drives.append(relay.drive(params, u))
        u = relay.rho(drives[-1][0], {})
        states.append(u)
    return System(states, drives)


def settle(
    relays: Sequence[Relay], params: Params, system: System, sweeps: int, push: Push | None = None
) -> System:
    """Sweeps of s_i ← ρ_i(∂Φ/∂s_i), one layer after the other from the top; `push` acts on the top one."""
    states, drives = list(system.states), list(system.drives)
    top = len(relays) - 1
    for _ in range(sweeps):
        for i in range(top, -1, -1):
            field = drives[i][0]
            if i < top:
                synapse, weight = relays[i + 1].layer.synapse, params[relays[i + 1].layer.weight]
                field = field + synapse.adjoint(weight, drives[i + 1][1](states[i + 1]), states[i].shape)
            elif push is not None:
                field = field + push(states[i])
            states[i] = relays[i].rho(field, {})
            if i < top:
                drives[i + 1] = relays[i + 1].drive(params, states[i])
    return System(states, drives)


class EquilibriumPropagation(Learner):
    """Hidden layers are states s_i that the layers below *and above* drive (Scellier & Bengio 2017):

        Φ(s) = Σ_i s_i · P_i(W_i s_{i−1} + b_i),  s_0 = x          pooling and Flatten, P, are inside
        E(s) = Σ_i G_i(s_i) − Φ(s),  G_i′ = ρ_i⁻¹                  the energy; ρ is the layer's activation
        s_i ← ρ_i(∂Φ/∂s_i) = ρ_i(P_i(W_i s_{i−1} + b_i) + W_{i+1}ᵀ P′_{i+1}(s_{i+1}))

    The last layer is a readout outside of that system, ŷ = φ(W s_top + b), for any loss ℓ(ŷ, y) (Laborieux et al.
    2021). A free phase settles at s⁰, the prediction's; from there two nudged ones, of E ± βℓ, settle at s^{±β}:

        Δθ = (∂Φ/∂θ(s^β) − ∂Φ/∂θ(s^{−β})) / 2β                     hidden layers: pre × post, twice
        Δθ = −∂ℓ/∂θ(s⁰)                                            the readout, by its own error

    A sweep updates each layer once, from the top down, with its neighbours' latest values. With W and Θ the same
    weights each update is the minimum of E over that layer's states, so that E never rises (P linear, ρ
    increasing), and the nudge reaches the first layer in one sweep. The free phase starts from the pass up without
    feedback and has `free` sweeps; the nudged ones run side by side as one doubled batch and have `nudged`.

    Law: as β → 0, with enough sweeps, equals autograd of ℓ(s⁰(θ)) through the settling.
    """

    NAME = "ep"
    TITLE = "Equilibrium propagation"
    SOURCE = "Scellier & Bengio 2017, Equilibrium propagation; Laborieux et al. 2021, Scaling equilibrium propagation"
    FEEDBACK = "the forward weights W themselves, transposed, at all times"
    CLAIMS = Claims(c1=True, c2=True, c3=True)
    MODEL_PREDICTS = False

    def __init__(
        self, *args: Any, beta: float = 0.5, free: int = 10, nudged: int = 4, **common: Any
    ) -> None:
        super().__init__(*args, **common)
        require_positive(beta=beta)
        for name, sweeps in (("free", free), ("nudged", nudged)):
            if not (is_number(sweeps) and isinstance(sweeps, int) and sweeps >= 1):
                raise ApicalError(f"{name} is {sweeps!r}, but must be a whole number of at least 1.")
        self.beta, self.free, self.nudged = beta, free, nudged
        for stage in (*self.network.prefix.stages, *self.network.layers[-1].neuron.stages):
            _refuse_random(stage)
        self.relays = [_relay(layer) for layer in self.network.layers[:-1]]

    @property
    def feedback_weights(self) -> list[Tensor | None]:
        return [None, *self.forward_weights[1:]]

    def predict(self, params: Params, state: Params, x: Tensor) -> Tensor:
        last = self.network.layers[-1]
        u, system = self._settle_free(params, x)
        return last.neuron(last.forward(params, [u, *system.states][-1]), {})

    def _settle_free(self, params: Params, x: Tensor) -> tuple[Tensor, System]:
        """The first layer's input, and the hidden layers at rest."""
        u = self.network.prefix(x, {})
        return u, settle(self.relays, params, rise(self.relays, params, u), self.free)

    def _read(self, params: Params, s: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The readout's losses, its output, and its error δ before its φ, per example."""
        last = self.network.layers[-1]
        output, pullback = last.neuron.vjp(last.forward(params, s), {})
        losses, xi = self.loss.error(output, y)
        return losses, output, pullback(xi)

    def update(self, params: Params, state: Params, x: Tensor, y: Tensor, noise: Noise) -> Update:
        bottom, last = lowest(self.network, self.trainable, {}), self.network.layers[-1]
        u, rest = self._settle_free(params, x)
        top = [u, *rest.states][-1]
        losses, output, delta = self._read(params, top, y)
        grads = self._grads(last, top, delta, -1.0)
        if bottom < len(self.relays):
            signs, both = self._settle_nudged(params, rest, y)
            # The first layer's input and drive are those of both phases: its difference is taken beforehand.
            towards, away = both.states[0].chunk(2)
            grads |= self._grads(self.relays[0].layer, u, rest.drives[0][1](towards - away), -0.5 / self.beta)
            for i, relay in enumerate(self.relays[1:], start=1):
                e = both.drives[i][1](both.states[i])
                grads |= self._grads(relay.layer, both.states[i - 1], e * _like(signs, e), -1 / self.beta)
        return Update(grads, {}, losses.mean(), output)

    def _settle_nudged(self, params: Params, rest: System, y: Tensor) -> tuple[Tensor, System]:
        """Both nudged phases as one batch, towards the target first; and which is which, as signs."""
        last, relays = self.network.layers[-1], self.relays
        s, targets = [torch.cat([state, state]) for state in rest.states], torch.cat([y, y])
        one = torch.ones(rest.states[0].shape[0], dtype=s[0].dtype, device=s[0].device)
        signs = torch.cat([one, -one])

        def push(top: Tensor) -> Tensor:
            _, _, delta = self._read(params, top, targets)
            return last.synapse.adjoint(params[last.weight], delta, top.shape) * _like(self.beta * signs, top)

        drive, pullback = rest.drives[0]
        drives = [(torch.cat([drive, drive]), pullback)]
        drives += [relay.drive(params, below) for relay, below in zip(relays[1:], s[:-1], strict=True)]
        return signs, settle(relays, params, System(s, drives), self.nudged, push)

    def _grads(self, layer: Layer, u: Tensor, e: Tensor, scale: float) -> dict[str, Tensor]:
        grads = {}
        if layer.weight in self.trainable:
            grads[layer.weight] = layer.synapse.outer(u, e, scale)
        if layer.bias is not None and layer.bias in self.trainable:
            grads[layer.bias] = layer.synapse.total(e, scale)
        return grads


def _like(per_example: Tensor, s: Tensor) -> Tensor:
    """One value per example, ready to multiply a state."""
    return per_example.view(-1, *[1] * (s.ndim - 1))


def _refuse_random(stage: Stage) -> None:
    if type(stage.module) in RANDOM:
        raise UnsupportedError(
            f"module {stage.name} ({stage.module}) draws random numbers, under which ep's states would not settle; "
            "leave it out, or regularise with weight_decay."
        )


def _relay(layer: Layer) -> Relay:
    """A hidden layer with its φ taken apart: what changes places acts on the drive, the activation on the state."""
    pool, rho = [], []
    for stage in layer.neuron.stages:
        _refuse_random(stage)
        if isinstance(stage.module, ACTIVATIONS):
            rho.append((stage.name, stage.module))
        elif isinstance(stage.module, RESHAPING):
            pool.append((stage.name, stage.module))
        else:
            raise UnsupportedError(
                f"module {stage.name} ({stage.module}) is neither an activation that acts on each neuron alone nor "
                "pooling, which is what ep's hidden states take; nn.Tanh, nn.ReLU, nn.MaxPool2d or nn.Flatten work."
            )
    if len(rho) > 1:
        raise UnsupportedError(
            f"layer {layer.name} has several activations (modules {', '.join(n for n, _ in rho)}), but ep's neurons "
            "have one; leave the others out."
        )
    return Relay(layer, Neuron(pool), Neuron(rho))
