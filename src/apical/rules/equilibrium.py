"""Equilibrium propagation: a network with feedback comes to rest, and twice more nudged towards and off the target."""

import copy
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules import pooling

from apical.core.activation import ACTIVATIONS, RANDOM, Neuron, Noise, Stage
from apical.core.learner import Claims, Learner, Update
from apical.core.memory_order import channels_last
from apical.core.network import Layer, Params
from apical.core.validation import require_positive, require_whole
from apical.errors import UnsupportedError
from apical.rules.feedback import find_lowest_layer

RENAMING = (nn.Identity, nn.Flatten, nn.Unflatten)
AVERAGING = (pooling._AvgPoolNd, pooling._AdaptiveAvgPoolNd)
CHOOSING = {nn.MaxPool1d: 1, nn.MaxPool2d: 2, nn.AdaptiveMaxPool1d: 1, nn.AdaptiveMaxPool2d: 2}
"""What P can be made of: the same values in another shape, means, and maxima over so many dimensions."""


class Stretch(NamedTuple):
    """One stage of P, a linear map for the batch that it is connected to: a maximum keeps its winners."""

    module: nn.Module
    shape: tuple[int, ...] = ()
    winners: Tensor | None = None

    def connect(self, a: Tensor) -> tuple["Stretch", Tensor]:
        out = self.module(a)
        out, winners = out if type(self.module) in CHOOSING else (out, None)
        return Stretch(self.module, a.shape[1:], winners), out

    def up(self, a: Tensor) -> Tensor:
        if self.winners is None:
            out: Tensor = self.module(a)
            return out
        last = channels_last(a)
        chosen = self._places(a, last).gather(1 if last else -1, self._places(self.winners, last))
        return _shaped(chosen, self.winners.shape, last)

    def down(self, s: Tensor) -> Tensor:
        """The adjoint of `up`."""
        shape = (s.shape[0], *self.shape)
        if isinstance(self.module, RENAMING):
            return s.reshape(shape)
        last = channels_last(s)
        below = _shaped(s.new_zeros(math.prod(shape)), shape, last)
        if self.winners is None:
            pulled: Tensor = torch.func.vjp(self.module, below)[1](s)[0]  # type: ignore[misc]
            return pulled
        below, winners, s = (self._places(e, last) for e in (below, self.winners, s))
        return _shaped(below.scatter_add(1 if last else -1, winners, s), shape, last)

    def _places(self, e: Tensor, last: bool) -> Tensor:
        """The places that a maximum chooses from on one axis, the last, or the second where channels are last."""
        return e.movedim(1, -1).flatten(1, 2) if last else e.flatten(-CHOOSING[type(self.module)])


def _shaped(e: Tensor, shape: Sequence[int], last: bool) -> Tensor:
    """Values in this shape, which lie with their channels side by side where these are last."""
    batch, channels, *places = shape
    return e.view(batch, *places, channels).movedim(-1, 1) if last else e.view(*shape)


class Relay(NamedTuple):
    """A hidden layer: its synapse, the stages of P, and ρ."""

    layer: Layer
    stretches: tuple[Stretch, ...]
    rho: Neuron

    def connect(self, params: Params, u: Tensor) -> tuple["Relay", Tensor]:
        """The layer for one batch, whose input in the pass up is `u`, and its drive."""
        a, connected = self.layer.forward(params, u), []
        for stretch in self.stretches:
            wired, a = stretch.connect(a)
            connected.append(wired)
        return self._replace(stretches=tuple(connected)), a

    def drive(self, params: Params, u: Tensor) -> Tensor:
        """P(W u + b)."""
        a = self.layer.forward(params, u)
        for stretch in self.stretches:
            a = stretch.up(a)
        return a

    def back(self, s: Tensor) -> Tensor:
        """Pᵀ s."""
        for stretch in reversed(self.stretches):
            s = stretch.down(s)
        return s

    def feedback(self, params: Params, s: Tensor, shape: torch.Size) -> Tensor:
        """Wᵀ Pᵀ s, to the layer below."""
        return self.layer.synapse.adjoint(params[self.layer.weight], self.back(s), shape)

    def twice(self) -> "Relay":
        """The same for a batch that is there twice."""
        stretches = (
            s if s.winners is None else s._replace(winners=_twice(s.winners)) for s in self.stretches
        )
        return self._replace(stretches=tuple(stretches))


class System(NamedTuple):
    """The hidden layers and one batch: the layers connected for it, their drives from below, their states."""

    relays: list[Relay]
    drives: list[Tensor]
    states: list[Tensor]


Push = Callable[[Tensor], Tensor]


def rise(relays: Sequence[Relay], params: Params, u: Tensor) -> System:
    """The pass up without feedback, s_i = ρ_i(P_i(W_i s_{i−1} + b_i)): settling starts there, and maxima choose."""
    system = System([], [], [])
    for relay in relays:
        connected, drive = relay.connect(params, u)
        u = relay.rho(drive, {})
        system.relays.append(connected)
        system.drives.append(drive)
        system.states.append(u)
    return system


def settle(params: Params, system: System, sweeps: int, gamma: float, push: Push | None = None) -> System:
    """Sweeps of s_i ← ρ_i(drive + γ feedback), layer after layer: upwards, or downwards from a `push` on the top."""
    relays, drives, states = system.relays, list(system.drives), list(system.states)
    top = len(relays) - 1
    for sweep in range(sweeps):
        for i in range(top + 1) if push is None else range(top, -1, -1):
            if i > 0 and (push is None or sweep > 0):  # the state below has changed
                drives[i] = relays[i].drive(params, states[i - 1])
            field = drives[i]
            if i < top:
                down = relays[i + 1].feedback(params, states[i + 1], states[i].shape)
                field = torch.add(field, down, alpha=gamma)
            elif push is not None:
                field = field + push(states[i])
            states[i] = relays[i].rho(field, {})
    return System(relays, drives, states)


class EquilibriumPropagation(Learner):
    """Hidden layers are states s_i, driven by the layers below and above (Scellier & Bengio 2017):

        E(s) = Σ_{i=1}^{H} γ^{i−H} (G_i(s_i) − Φ_i),   G_i′ = ρ_i⁻¹,   ρ_i the layer's activation
        Φ_i  = s_i · P_i(W_i s_{i−1} + b_i),           s_0 = x,        P_i its pooling and Flatten
        s_i  ← ρ_i(P_i(W_i s_{i−1} + b_i) + γ W_{i+1}ᵀ P_{i+1}ᵀ s_{i+1})        where ∂E/∂s_i = 0

    The last layer is a readout outside of that system, ŷ = φ(W s_H + b), for any loss ℓ(ŷ, y) (Laborieux et al.
    2021). A free phase comes to rest at s⁰, from which ŷ is read; two nudged ones, of E ± βℓ, start there:

        Δθ_i = γ^{i−H} (∂Φ_i/∂θ_i(s^β) − ∂Φ_i/∂θ_i(s^−β)) / 2β        hidden layers: pre × post, in both phases
        Δθ   = −∂ℓ/∂θ(s⁰)                                             the readout, by its own error

    γ is the strength of feedback (Xie & Seung 2003): 1 is the original rule, and towards 0 states and updates
    become backpropagation's. P acts before ρ in whatever order the modules stand, and a maximum keeps the winners
    of the pass up: chosen anew in every sweep they keep a network with negative states from coming to rest.

    A sweep updates the layers one after the other with their neighbours' latest values: upwards in the free phase,
    downwards in the nudged ones, so that a nudge is at the first layer after one sweep. Each update is the minimum of
    E over that layer's states (ρ increasing): E never rises. `free` sweeps start from the pass up without feedback,
    `nudged` ones where those ended, both signs side by side in one batch.

    Law: as β → 0, settled, equals autograd of ℓ(s⁰(θ)) through the settling.
    """

    NAME = "ep"
    TITLE = "Equilibrium propagation"
    SOURCE = "Scellier & Bengio 2017, Equilibrium propagation; Laborieux et al. 2021, Scaling equilibrium propagation"
    FEEDBACK = "the forward weights W themselves, transposed, in every phase"
    CLAIMS = Claims(c1=True, c2=True, c3=True)
    MODEL_PREDICTS = False

    def __init__(
        self,
        *args: Any,
        beta: float = 0.5,
        gamma: float = 0.3,
        free: int = 4,
        nudged: int = 2,
        **common: Any,
    ) -> None:
        super().__init__(*args, **common)
        require_positive(beta=beta, gamma=gamma)
        require_whole(free=free, nudged=nudged)
        self.beta, self.gamma, self.free, self.nudged = beta, gamma, free, nudged
        for stage in (*self.network.prefix.stages, *self.network.layers[-1].neuron.stages):
            _refuse_random(stage)
        self.relays = [_relay(layer) for layer in self.network.layers[:-1]]

    @property
    def feedback_weights(self) -> list[Tensor | None]:
        return [None, *self.forward_weights[1:]]

    def predict(self, params: Params, state: Params, x: Tensor) -> Tensor:
        last = self.network.layers[-1]
        u, rest = self._rest(params, x)
        return last.neuron(last.forward(params, [u, *rest.states][-1]), {})

    def update(self, params: Params, state: Params, x: Tensor, y: Tensor, noise: Noise) -> Update:
        trainable = self.trainable
        bottom = find_lowest_layer(self.network, trainable, {})
        u, rest = self._rest(params, x)
        top = [u, *rest.states][-1]
        losses, output, delta = self._read(params, top, y)
        grads = self.network.layers[-1].gradients(top, delta, trainable)
        if bottom < len(rest.relays):
            relays, _, states = self._nudge(params, rest, y)
            scale = -0.5 / self.beta * self.gamma ** (1 - len(relays))
            # The first layer's input is the same in both phases, so that the difference can be taken first.
            difference = rest.relays[0].back(torch.sub(*states[0].chunk(2)))
            grads |= relays[0].layer.gradients(u, difference, trainable, scale)
            for relay, below, s in zip(relays[1:], states[:-1], states[1:], strict=True):
                scale *= self.gamma
                # Twice, since the mean is over both phases.
                grads |= relay.layer.gradients(below, _signed(relay.back(s)), trainable, 2 * scale)
        return Update(grads, {}, losses.mean(), output)

    def _rest(self, params: Params, x: Tensor) -> tuple[Tensor, System]:
        """The free phase: the first layer's input, and the hidden layers at rest."""
        u = self.network.prefix(x, {})
        return u, settle(params, rise(self.relays, params, u), self.free, self.gamma)

    def _read(self, params: Params, s: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The readout's losses, its output, and its error δ before φ, per example."""
        last = self.network.layers[-1]
        output, pullback = last.neuron.vjp(last.forward(params, s), {})
        losses, xi = self.loss.error(output, y)
        return losses, output, pullback(xi)

    def _nudge(self, params: Params, rest: System, y: Tensor) -> System:
        """Both nudged phases as one batch, towards the target first."""
        last, targets = self.network.layers[-1], _twice(y)

        def push(top: Tensor) -> Tensor:
            delta = self._read(params, top, targets)[2]
            return _signed(last.synapse.adjoint(params[last.weight], delta, top.shape) * self.beta)

        both = System(
            [relay.twice() for relay in rest.relays],
            [_twice(drive) for drive in rest.drives],
            [_twice(s) for s in rest.states],
        )
        return settle(params, both, self.nudged, self.gamma, push)


def _twice(t: Tensor) -> Tensor:
    return torch.cat([t, t])


def _signed(both: Tensor) -> Tensor:
    """The half that is nudged towards the target as it is, the other half with the opposite sign."""
    towards, away = both.chunk(2)
    return torch.cat([towards, -away])


def _refuse_random(stage: Stage) -> None:
    if type(stage.module) in RANDOM:
        raise UnsupportedError(
            f"module {stage.name} ({stage.module}) draws random numbers, with which ep's states do not come to rest; "
            "leave it out, or regularise by the optimiser's weight_decay."
        )


def _relay(layer: Layer) -> Relay:
    """A hidden layer with its φ taken apart: pooling and Flatten act on the drive, the activation on the state."""
    stretches, rho = [], []
    for stage in layer.neuron.stages:
        _refuse_random(stage)
        if isinstance(stage.module, ACTIVATIONS):
            rho.append((stage.name, stage.module))
        elif type(stage.module) in CHOOSING:
            chooses = copy.copy(stage.module)
            chooses.return_indices = True  # type: ignore[assignment]
            stretches.append(Stretch(chooses))
        elif isinstance(stage.module, RENAMING + AVERAGING):
            stretches.append(Stretch(stage.module))
        else:
            raise UnsupportedError(
                f"module {stage.name} ({stage.module}) is neither pooling nor an activation of each neuron alone, "
                "which is what ep's hidden layers take; nn.Tanh, nn.ReLU, nn.MaxPool2d, nn.AvgPool2d and nn.Flatten work."
            )
    if len(rho) > 1:
        raise UnsupportedError(
            f"layer {layer.name} has several activations (modules {', '.join(name for name, _ in rho)}), but a neuron "
            "of ep has one; leave the others out."
        )
    return Relay(layer, tuple(stretches), Neuron(rho))
