"""Equilibrium propagation: a network with feedback settles freely, then nudged towards the target and away from it."""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules import pooling

from apical.core.activation import ACTIVATIONS, RANDOM, Neuron, Noise, Stage
from apical.core.learner import Claims, Learner, Update
from apical.core.losses import LossFunction
from apical.core.modules import call_with
from apical.core.network import Layer, Params
from apical.core.validation import require_positive, require_whole
from apical.core.views import is_channels_last
from apical.errors import UnsupportedError
from apical.rules.feedback import find_lowest_layer

RESHAPING = (nn.Identity, nn.Flatten, nn.Unflatten)
AVERAGING = (pooling._AvgPoolNd, pooling._AdaptiveAvgPoolNd)
MAX_POOLING = {nn.MaxPool1d: 1, nn.MaxPool2d: 2, nn.AdaptiveMaxPool1d: 1, nn.AdaptiveMaxPool2d: 2}
"""The modules that P can consist of: reshaping, average-pooling, and max-pooling over so many dimensions."""


class PoolingStage(NamedTuple):
    """One stage of P. Once connected to a batch it is a linear map: max-pooling keeps the winners of that batch."""

    module: nn.Module
    shape: tuple[int, ...] = ()
    winners: Tensor | None = None

    def connect(self, a: Tensor) -> tuple["PoolingStage", Tensor]:
        """Return the stage with the winners of this batch, and its output."""
        chooses = type(self.module) in MAX_POOLING
        out, winners = call_with(self.module, a, return_indices=True) if chooses else (self.module(a), None)
        return PoolingStage(self.module, a.shape[1:], winners), out

    def forward(self, a: Tensor) -> Tensor:
        """Apply the stage, with the winners that it was connected to."""
        if self.winners is None:
            out: Tensor = self.module(a)
            return out
        last = is_channels_last(a)
        chosen = self._flatten_positions(a, last).gather(1 if last else -1, self._flatten_positions(self.winners, last))
        return _reshape(chosen, self.winners.shape, last)

    def adjoint(self, s: Tensor) -> Tensor:
        """Apply the adjoint of `forward`."""
        shape = (s.shape[0], *self.shape)
        if isinstance(self.module, RESHAPING):
            return s.reshape(shape)
        last = is_channels_last(s)
        below = _reshape(s.new_zeros(math.prod(shape)), shape, last)
        if self.winners is None:
            pulled: Tensor = torch.func.vjp(self.module, below)[1](s)[0]  # type: ignore[misc]
            return pulled
        below, winners, s = (self._flatten_positions(e, last) for e in (below, self.winners, s))
        return _reshape(below.scatter_add(1 if last else -1, winners, s), shape, last)

    def _flatten_positions(self, e: Tensor, last: bool) -> Tensor:
        """Flatten the positions that max-pooling chooses from: the last axis, or the second if channels are last."""
        return e.movedim(1, -1).flatten(1, 2) if last else e.flatten(-MAX_POOLING[type(self.module)])


def _reshape(e: Tensor, shape: Sequence[int], last: bool) -> Tensor:
    """View values in this shape, stored channels-last if `last`."""
    batch, channels, *places = shape
    return e.view(batch, *places, channels).movedim(-1, 1) if last else e.view(*shape)


class HiddenLayer(NamedTuple):
    """A hidden layer: its synapse, the stages of its pooling P, and its activation ρ."""

    layer: Layer
    pool_stages: tuple[PoolingStage, ...]
    rho: Neuron

    def connect(self, params: Params, u: Tensor) -> tuple["HiddenLayer", Tensor]:
        """Return the layer connected to one batch, with input `u` in the forward pass, and its drive."""
        a, connected = self.layer.forward(params, u), []
        for stage in self.pool_stages:
            stage, a = stage.connect(a)
            connected.append(stage)
        return self._replace(pool_stages=tuple(connected)), a

    def drive(self, params: Params, u: Tensor) -> Tensor:
        """Return P(W u + b)."""
        a = self.layer.forward(params, u)
        for stage in self.pool_stages:
            a = stage.forward(a)
        return a

    def unpool(self, s: Tensor) -> Tensor:
        """Return Pᵀ s."""
        for stage in reversed(self.pool_stages):
            s = stage.adjoint(s)
        return s

    def feedback(self, params: Params, s: Tensor, shape: torch.Size) -> Tensor:
        """Return Wᵀ Pᵀ s, the feedback to the layer below."""
        return self.layer.synapse.adjoint(params[self.layer.weight], self.unpool(s), shape)

    def repeat_batch(self) -> "HiddenLayer":
        """Return the layer for the batch repeated twice."""
        stages = (s if s.winners is None else s._replace(winners=_repeat_batch(s.winners)) for s in self.pool_stages)
        return self._replace(pool_stages=tuple(stages))


class SettlingState(NamedTuple):
    """The hidden layers connected to one batch, their drives from below, and their states."""

    hidden_layers: list[HiddenLayer]
    drives: list[Tensor]
    states: list[Tensor]


def run_forward_pass(hidden_layers: Sequence[HiddenLayer], params: Params, u: Tensor) -> SettlingState:
    """Run the layers without feedback, s_i = ρ_i(P_i(W_i s_{i−1} + b_i)). Settling starts from these states.

    Max-pooling chooses its winners here and keeps them.
    """
    system = SettlingState([], [], [])
    for hidden in hidden_layers:
        connected, drive = hidden.connect(params, u)
        u = hidden.rho(drive, {})
        system.hidden_layers.append(connected)
        system.drives.append(drive)
        system.states.append(u)
    return system


def settle(
    params: Params, system: SettlingState, sweeps: int, gamma: float, nudge: Callable[[Tensor], Tensor] | None = None
) -> SettlingState:
    """Repeat s_i ← ρ_i(drive + γ feedback), layer by layer: upwards, or downwards if the top layer gets a `nudge`."""
    hidden_layers, drives, states = system.hidden_layers, list(system.drives), list(system.states)
    top = len(hidden_layers) - 1
    for sweep in range(sweeps):
        for i in range(top + 1) if nudge is None else range(top, -1, -1):
            if i > 0 and (nudge is None or sweep > 0):  # the state below has changed
                drives[i] = hidden_layers[i].drive(params, states[i - 1])
            field = drives[i]
            if i < top:
                feedback = hidden_layers[i + 1].feedback(params, states[i + 1], states[i].shape)
                field = torch.add(field, feedback, alpha=gamma)
            elif nudge is not None:
                field = field + nudge(states[i])
            states[i] = hidden_layers[i].rho(field, {})
    return SettlingState(hidden_layers, drives, states)


class EquilibriumPropagation(Learner):
    """Hidden layers are states s_i, driven by the layers below and above (Scellier & Bengio 2017):

        E(s) = Σ_{i=1}^{H} γ^{i−H} (G_i(s_i) − Φ_i),   G_i′ = ρ_i⁻¹,   ρ_i the layer's activation
        Φ_i  = s_i · P_i(W_i s_{i−1} + b_i),           s_0 = x,        P_i its pooling and Flatten
        s_i  ← ρ_i(P_i(W_i s_{i−1} + b_i) + γ W_{i+1}ᵀ P_{i+1}ᵀ s_{i+1})        where ∂E/∂s_i = 0

    The last layer is a readout outside of that system, ŷ = φ(W s_H + b), for any loss ℓ(ŷ, y) (Laborieux et al.
    2021). A free phase settles at s⁰, which gives ŷ. Two nudged phases, with E ± βℓ, start there:

        Δθ_i = γ^{i−H} (∂Φ_i/∂θ_i(s^β) − ∂Φ_i/∂θ_i(s^−β)) / 2β        hidden layers: pre × post, in both phases
        Δθ   = −∂ℓ/∂θ(s⁰)                                             the readout, by its own error

    γ is the strength of feedback (Xie & Seung 2003): 1 is the original rule, and as γ → 0 states and updates become
    backpropagation's. P acts before ρ, whatever the order of the modules. Max-pooling keeps the winners of the forward
    pass: with new winners in every sweep, a network with negative states does not settle.

    A sweep updates the layers one after the other with their neighbours' latest values: upwards in the free phase,
    downwards in the nudged ones, so that a nudge reaches the first layer in one sweep. Each update minimises E over
    that layer's states (if ρ is increasing), so E never rises. The `free` sweeps start from the forward pass without
    feedback, the `nudged` sweeps from their result, with both signs in one batch.

    Law: as β → 0, settled, equals autograd of ℓ(s⁰(θ)) through the settling.
    """

    NAME = "ep"
    TITLE = "Equilibrium propagation"
    SOURCE = "Scellier & Bengio 2017, Equilibrium propagation; Laborieux et al. 2021, Scaling equilibrium propagation"
    FEEDBACK = "the forward weights W themselves, transposed, in every phase"
    CLAIMS = Claims(c1=True, c2=True, c3=True)
    MODEL_PREDICTS = False
    HOOKS = False

    def __init__(
        self,
        model: nn.Sequential,
        *,
        input_shape: tuple[int, ...] | None = None,
        loss: str | LossFunction = "cross_entropy",
        label_smoothing: float = 0.0,
        beta: float = 0.5,
        gamma: float = 0.3,
        free: int = 4,
        nudged: int = 2,
    ) -> None:
        super().__init__(model, input_shape=input_shape, loss=loss, label_smoothing=label_smoothing)
        require_positive(beta=beta, gamma=gamma)
        require_whole(free=free, nudged=nudged)
        self.beta, self.gamma, self.free, self.nudged = beta, gamma, free, nudged
        for stage in (*self.network.prefix.stages, *self.network.layers[-1].neuron.stages):
            _refuse_random(stage)
        self.hidden_layers = [_make_hidden_layer(layer) for layer in self.network.layers[:-1]]

    @property
    def feedback_weights(self) -> list[Tensor | None]:
        return [None, *self.forward_weights[1:]]

    def predict(self, params: Params, state: Params, x: Tensor) -> Tensor:
        u, free = self._run_free_phase(params, x)
        return self.network.layers[-1](params, [u, *free.states][-1], {})

    def update(self, params: Params, state: Params, x: Tensor, y: Tensor, noise: Noise) -> Update:
        trainable = self.trainable
        bottom = find_lowest_layer(self.network, trainable, {})
        u, free = self._run_free_phase(params, x)
        top = [u, *free.states][-1]
        grads: dict[str, Tensor] = {}
        if bottom < len(free.hidden_layers):
            hidden_layers, _, states = self._run_nudged_phases(params, free, y)
            scale = -0.5 / self.beta * self.gamma ** (1 - len(hidden_layers))
            # The first layer's input is the same in both phases, so the difference can be taken first.
            difference = free.hidden_layers[0].unpool(torch.sub(*states[0].chunk(2)))
            grads |= hidden_layers[0].layer.gradients(u, difference, trainable, scale)
            for hidden, below, s in zip(hidden_layers[1:], states[:-1], states[1:], strict=True):
                scale *= self.gamma
                delta = _negate_second_half(hidden.unpool(s))
                # 2 ·, because `gradients` takes the mean over both phases.
                grads |= hidden.layer.gradients(below, delta, trainable, 2 * scale)
        losses, output, delta = self._run_readout(params, top, y)
        grads |= self.network.layers[-1].gradients(top, delta, trainable)
        return Update(grads, {}, losses.mean(), output)

    def _run_free_phase(self, params: Params, x: Tensor) -> tuple[Tensor, SettlingState]:
        """Run the free phase and return the first layer's input and the settled hidden layers."""
        u = self.network.prefix(x, {})
        return u, settle(params, run_forward_pass(self.hidden_layers, params, u), self.free, self.gamma)

    def _run_readout(self, params: Params, s: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the readout's losses, its output, and its error δ before φ, per example."""
        output, pullback = self.network.layers[-1].vjp(params, s, {})
        losses, xi = self.loss.error(output, y)
        return losses, output, pullback(xi)

    def _run_nudged_phases(self, params: Params, free: SettlingState, y: Tensor) -> SettlingState:
        """Run both nudged phases as one batch: the first half towards the target, the second half away from it."""
        last, targets = self.network.layers[-1], _repeat_batch(y)

        def nudge(top: Tensor) -> Tensor:
            delta = self._run_readout(params, top, targets)[2]
            return _negate_second_half(last.synapse.adjoint(params[last.weight], delta, top.shape) * self.beta)

        both = SettlingState(
            [hidden.repeat_batch() for hidden in free.hidden_layers],
            [_repeat_batch(drive) for drive in free.drives],
            [_repeat_batch(s) for s in free.states],
        )
        return settle(params, both, self.nudged, self.gamma, nudge)


def _repeat_batch(t: Tensor) -> Tensor:
    """Return the batch followed by a copy of itself."""
    return torch.cat([t, t])


def _negate_second_half(both: Tensor) -> Tensor:
    """Change the sign of the second half of the batch, which is nudged away from the target."""
    towards, away = both.chunk(2)
    return torch.cat([towards, -away])


def _refuse_random(stage: Stage) -> None:
    """Refuse a module that draws random numbers."""
    if type(stage.module) in RANDOM:
        raise UnsupportedError(
            f"module {stage.name} ({stage.module}) draws random numbers, with which ep's states do not come to rest; "
            "leave it out, or regularise by the optimiser's weight_decay."
        )


def _make_hidden_layer(layer: Layer) -> HiddenLayer:
    """Build a hidden layer, with φ split into pooling P, which acts on the drive, and the activation ρ."""
    pool_stages, rho = [], []
    for stage in layer.neuron.stages:
        _refuse_random(stage)
        if isinstance(stage.module, ACTIVATIONS):
            rho.append((stage.name, stage.module))
        elif type(stage.module) in MAX_POOLING or isinstance(stage.module, RESHAPING + AVERAGING):
            pool_stages.append(PoolingStage(stage.module))
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
    return HiddenLayer(layer, tuple(pool_stages), Neuron(rho))
