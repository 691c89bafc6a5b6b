"""Spiking layers with a latency code, and spike-timing-dependent plasticity modulated by a reward.

Spikes are one number per neuron: `ahead` = steps − t, how many steps before the end of its cycle it fires. The first
step is `steps`, the last one 1, and 0 is a neuron that stays silent.
"""

import math
from functools import reduce
from statistics import NormalDist
from typing import Any

import torch
from torch import Tensor, nn

from apical.core.activation import Neuron, Noise
from apical.core.learner import Claims, Learner, Update
from apical.core.losses import classes
from apical.core.memory_order import channels_last, in_order_of, lying
from apical.core.network import Params
from apical.core.synapse import Dense, Synapse
from apical.core.units import per_row, per_unit
from apical.core.validation import (
    require_between,
    require_bool,
    require_one_of,
    require_positive,
    require_whole,
)
from apical.errors import ApicalError, UnsupportedError

CARRIES = (
    *(nn.MaxPool1d, nn.MaxPool2d, nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d),
    *(nn.AvgPool1d, nn.AvgPool2d, nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d),
    *(nn.Flatten, nn.Unflatten, nn.Identity, nn.Dropout, nn.Dropout1d, nn.Dropout2d),
)
"""What spikes pass through: the largest of several `ahead` is the earliest spike, their mean one in between."""


def volley(value: Tensor, steps: int) -> Tensor:
    """Latencies of values: 1 and above fire in the first step, small ones late, 0 and below never."""
    return (value * steps).ceil().clamp(0, steps)


def brightness(x: Tensor) -> Tensor:
    """Each image from its darkest value, 0, to its brightest, 1."""
    flat = lying(x).flatten(1)
    low, high = (per_row(end(1), x) for end in (flat.amin, flat.amax))
    return (x - low) / (high - low).clamp_min(torch.finfo(x.dtype).tiny)


def by_unit(a: Tensor, synapse: Synapse) -> Tensor:
    """(batch, …) as (batch, units, positions)."""
    return a.reshape(len(a), -1, a.shape[-1]).mT if isinstance(synapse, Dense) else a.flatten(2)


def winners(key: Tensor, synapse: Synapse, count: int) -> list[Tensor]:
    """The units of each image with the largest keys, best first: 1 at the unit's best position, 0 elsewhere."""
    best, place = by_unit(key, synapse).max(2)
    units, positions = best.shape[1], key[0].numel() // best.shape[1]
    # Masks are made in the order of the keys: (batch, positions, units), or units first.
    axis = 1 if channels_last(key) or isinstance(synapse, Dense) else 2
    unit, position = (torch.arange(n, device=key.device) for n in (units, positions))
    there, unit = place.unsqueeze(axis) == position.unsqueeze(2 - axis), unit.unsqueeze(axis - 1)
    first = best.topk(min(count, units), dim=1).indices.unbind(1)
    return [in_order_of(key, (there & (unit == winner.view(-1, 1, 1))).to(key.dtype)) for winner in first]


def evaluated(neuron: Neuron, a: Tensor) -> Tensor:
    """φ as in evaluation, whatever mode its modules are in."""
    return reduce(lambda a, stage: stage.runs(a), neuron.stages, a)


def carriers(neuron: Neuron) -> list[tuple[str, nn.Module]]:
    """The stages that spikes pass through; activations give way to the threshold, anything else is refused."""
    kept = []
    for stage in neuron.stages:
        if type(stage.module) in CARRIES:
            kept.append((stage.name, stage.module))
        elif type(stage.module).__module__ != nn.Tanh.__module__ or isinstance(stage.module, nn.GLU):
            raise UnsupportedError(
                f"module {stage.name} ({stage.module}) has no meaning for spikes; torch's own activations (not GLU), "
                "pooling, Flatten and Dropout work."
            )
    return kept


RAMP = 3.0
"""How far the threshold falls in one cycle, in spreads of the potential."""
MEMORY = 0.01
"""How fast the running share of right decisions follows the batches."""
Learned = tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]


class RewardSTDP(Learner):
    """Neurons that fire at most once, learning from who fired before whom (Mozafari et al. 2018).

    An image becomes a volley of spikes within `steps` steps, its brightest input first. A neuron weighs them by
    w − w̄ (each spike also inhibits it by its own mean weight) and fires once its potential reaches a threshold:

        ramp         each layer has its cycle of `steps` steps after the one below: a spike switches on a current
                     until the cycle's end, and in the next cycle the threshold falls past what has been gathered
        threshold    all layers share one cycle: potentials jump by the weights of the inputs that have fired, and
                     a neuron fires as soon as it is above its threshold (the source's neurons)

    Activations give way to this (after the last layer, too, but for the readout by gradient); pooling, Flatten and
    Dropout act on the spikes. Potentials are measured from
    each neuron's running mean, in running spreads (rate `homeostasis`); of normal ones a `share` fires. With
    Δt = t_post − t_pre, t_pre and t_post counted in the cycle of each, and a step for the neuron to answer, the first
    `winners` of an image (in the same step the higher potential; a filter counts once) change by

        step           Δw = a₊ w(1−w) for Δt > 0,  a₋ w(1−w) for Δt ≤ 0 or an input that stays silent
        exponential    Δw = a₊ e^(−Δt/τ₊) for Δt > 0,  a₋ e^(Δt/τ₋) for Δt ≤ 0     (the paper's equation)

    (`soft`: whether w(1−w) is a factor). The last layer's units are the classes: the scores are their mean
    potentials, and the largest decides and counts as firing in every step (Δw is the mean). Its Δw, and that of the
    `rewarded` last layers, is multiplied by the reward: 1 − H if right, −H if wrong, H the running share of right
    decisions. readout="gradient" is no R-STDP there: the last layer, its weights of either sign, descends its own
    loss on the mean spikes, and the layers below learn without reward.

    W lives in [0, 1]; a layer that does not is mapped there when the learner is built, its smallest weight to 0 and
    its largest to 1. Plain SGD is meant: it adds lr · Δw (in the last layer lr · `readout_rate` · Δw). Biases stay.
    Laws: a pair's Δw against Δt is the equation; punishment is minus reward; W stays in [0, 1].
    """

    NAME = "rstdp"
    TITLE = "Reward-modulated STDP"
    SOURCE = "Mozafari et al. 2018, First-spike-based visual categorization using reward-modulated STDP"
    FEEDBACK = "none: one reward for all synapses"
    CLAIMS = Claims(c1=True, c2=True, c3=True)
    MODEL_PREDICTS = False
    VARIANT = "readout"
    VARIANTS = ("reward", "gradient")

    def __init__(
        self,
        *args: Any,
        readout: str = "reward",
        neuron: str = "ramp",
        window: str = "step",
        steps: int = 10,
        a_plus: float = 1.0,
        a_minus: float = -0.75,
        tau_plus: float = 3.0,
        tau_minus: float = 3.0,
        soft: bool | None = None,
        winners: int = 1,
        share: float = 0.8,
        homeostasis: float = 0.05,
        rewarded: int = 1,
        readout_rate: float = 1.0,
        **common: Any,
    ) -> None:
        super().__init__(*args, **common)
        require_one_of(self.VARIANTS, readout=readout)
        require_one_of(("ramp", "threshold"), neuron=neuron)
        require_one_of(("step", "exponential"), window=window)
        if soft is not None:
            require_bool(soft=soft)
        require_positive(tau_plus=tau_plus, tau_minus=tau_minus, readout_rate=readout_rate)
        require_between(-math.inf, math.inf, a_plus=a_plus, a_minus=a_minus)
        require_between(0, 1, share=share, homeostasis=homeostasis)
        require_whole(steps=steps, winners=winners, rewarded=rewarded)
        most = len(self.network) if readout == "reward" else 1
        if rewarded > most:
            raise ApicalError(
                f"rewarded is {rewarded}, but with readout={readout!r} it is {most} at most here."
            )
        self.readout, self.neuron, self.window, self.steps = readout, neuron, window, steps
        self.a_plus, self.a_minus, self.tau_plus, self.tau_minus = a_plus, a_minus, tau_plus, tau_minus
        self.soft = window == "step" if soft is None else soft
        self.winners, self.share, self.homeostasis = winners, share, homeostasis
        self.rewarded, self.readout_rate = rewarded, readout_rate
        self._low = NormalDist().inv_cdf(1 - share)
        self._carriers = [Neuron(carriers(layer.neuron)) for layer in self.network.layers]
        self._prepare()

    def _prepare(self) -> None:
        """Weights into their bounds, and where the running values start."""
        last = self.network.layers[-1]
        if not isinstance(last.synapse, Dense):
            raise UnsupportedError(
                f"layer {last.name} ({last.synapse}) is the last one, but rstdp's classes are the units of a Linear: "
                "end the model with Flatten and a Linear."
            )
        if self.readout == "reward":
            for stage in self._carriers[-1].stages:
                if not isinstance(stage.module, nn.Identity | nn.Flatten | nn.Dropout):
                    raise UnsupportedError(
                        f"module {stage.name} ({stage.module}) follows layer {last.name}, but rstdp decides by that layer's "
                        "own potentials: end the model with the Linear."
                    )
            if last.synapse.out_features < 2:
                raise UnsupportedError(
                    f"layer {last.name} has one unit, but rstdp decides between classes: give it one unit for each."
                )
        for i, layer in enumerate(self.network.layers[: self._spiking]):
            w = self.get_parameter(layer.weight).detach()
            low, high = w.min(), w.max()
            if layer.weight in self.bounds and (low < 0 or high > 1):
                w.sub_(low).div_((high - low).clamp_min(torch.finfo(w.dtype).tiny))
            self.register_buffer(f"mean{i}", w.new_zeros(len(w)))
            self.register_buffer(f"spread{i}", 0.5 * _centred(w).flatten(1).norm(dim=1))
        if self.readout == "reward":
            self.register_buffer("hits", w.new_full((), 1 / last.synapse.out_features))

    @property
    def _spiking(self) -> int:
        """How many layers learn by STDP."""
        return len(self.network) - (self.readout == "gradient")

    @property
    def bounds(self) -> dict[str, tuple[float, float]]:
        names = {layer.weight for layer in self.network.layers[: self._spiking]}
        return dict.fromkeys(sorted(names & self.trainable), (0.0, 1.0))

    def touches(self, name: str) -> bool:
        return name not in {layer.bias for layer in self.network.layers[: self._spiking]}

    def param_groups(self, lr: float, **options: Any) -> list[dict[str, Any]]:
        """Groups `W`, and `readout` for the last layer, whose rate is lr · readout_rate."""
        *below, last = self.network.layers
        top = [name for name in (last.weight, last.bias) if name is not None]
        groups = self._groups(lr, options, W=[layer.weight for layer in below], readout=top)
        return [{**g, "lr": lr * self.readout_rate} if g["name"] == "readout" else g for g in groups]

    # How spikes come about.

    def _potential(self, i: int, params: Params, state: Params, spikes: Tensor) -> Tensor:
        """Layer i's potentials for spikes (batch, …), from their running mean and in running spreads."""
        layer = self.network.layers[i]
        drive = layer.forward({**params, layer.weight: _centred(params[layer.weight])}, spikes)
        mean, spread = (per_unit(state[f"{name}{i}"], layer.synapse) for name in ("mean", "spread"))
        return (drive - mean) / spread.clamp_min(torch.finfo(drive.dtype).eps)

    def _fire(self, i: int, params: Params, state: Params, ahead: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Layer i, given its inputs' volley: its highest potentials, its own volley, and the order of the winners."""
        if self.neuron == "ramp":
            peak = self._potential(i, params, state, ahead / self.steps)
            return peak, volley((peak - self._low) / RAMP, self.steps), peak
        left = torch.arange(self.steps - 1, -1, -1, device=ahead.device).view(-1, *[1] * ahead.ndim)
        spikes = (ahead > left).to(ahead.dtype)  # who has fired by each step
        above = (
            self._potential(i, params, state, spikes.flatten(0, 1)).unflatten(0, spikes.shape[:2]) - self._low
        )
        fired = (above >= 0).to(above.dtype).cumsum(0).clamp_max(1.0)
        out = fired.sum(0)
        excess = torch.where(fired.cumsum(0) == 1, above, 0.0).sum(0)  # in the step in which it fires
        return above.amax(0) + self._low, out, out + excess / (1 + excess)

    def _drive(self, params: Params, state: Params, ahead: Tensor) -> Tensor:
        """The classes' potentials, averaged over the steps: an input counts for as long as it has fired."""
        layer, mean = self.network.layers[-1], ahead / self.steps
        if mean.ndim != 2:
            raise UnsupportedError(
                f"layer {layer.name} gets an input of shape {tuple(mean.shape)}, but rstdp decides once per example: "
                "put a Flatten before the last Linear."
            )
        if self.readout == "reward":
            return self._potential(len(self.network) - 1, params, state, mean)
        return layer.forward(params, mean)

    def predict(self, params: Params, state: Params, x: Tensor) -> Tensor:
        """The scores of the spiking network; the largest is the decision. Dropout is off."""
        ahead = volley(brightness(evaluated(self.network.prefix, x)), self.steps)
        for i, carrier in enumerate(self._carriers[:-1]):
            ahead = evaluated(carrier, self._fire(i, params, state, ahead)[1])
        drive = self._drive(params, state, ahead)
        return drive if self.readout == "reward" else evaluated(self.network.layers[-1].neuron, drive)

    # How they change the weights.

    def timing(self, dt: Tensor) -> Tensor:
        """What a pair of spikes does, by Δt = t_post − t_pre."""
        if self.window == "step":
            return torch.where(dt > 0, torch.full_like(dt, self.a_plus), self.a_minus)
        before = self.a_plus * torch.exp(-dt / self.tau_plus)
        return torch.where(dt > 0, before, self.a_minus * torch.exp(dt / self.tau_minus))

    def _stdp(self, i: int, params: Params, ahead: Tensor, times: Tensor, post: Tensor) -> Tensor:
        """−Δw for neurons `post` that fire at `times`, (batch, k): the mean over the k times and the batch."""
        layer, flat = self.network.layers[i], lying(ahead).flatten(1)
        effect = self.timing(times.unsqueeze(2) - (self.steps - flat.unsqueeze(1))).mean(1)
        silent = self.a_minus if self.window == "step" else 0.0
        effect = in_order_of(ahead, torch.where(flat > 0, effect, silent))
        grad, w = layer.synapse.outer(effect, post, scale=-1.0), params[layer.weight]
        return grad * (w * (1 - w)) if self.soft else grad

    def _running(self, i: int, state: Params, peak: Tensor) -> dict[str, Tensor]:
        """The mean and the spread of layer i's potentials, a little further towards this batch's."""
        mean, spread, rate = state[f"mean{i}"], state[f"spread{i}"], self.homeostasis
        z = by_unit(peak, self.network.layers[i].synapse)
        widened = 1 + rate * (z.square().mean((0, 2)) - 1)
        return {f"mean{i}": mean + rate * spread * z.mean((0, 2)), f"spread{i}": spread * widened.sqrt()}

    def _top(self, params: Params, state: Params, ahead: Tensor, scores: Tensor, y: Tensor) -> Learned:
        """By reward: each image's reward, the last layer's gradient, and its running values."""
        i, layer = len(self.network) - 1, self.network.layers[-1]
        (decision,) = winners(scores, layer.synapse, 1)
        right = (decision * _one_hot(y, scores)).sum(1)
        reward = right - state["hits"]
        always = torch.arange(1, self.steps + 1, device=ahead.device, dtype=ahead.dtype)
        grad = self._stdp(i, params, ahead, always.expand(len(right), -1), decision * reward.unsqueeze(1))
        hits = state["hits"] + MEMORY * (right.mean() - state["hits"])
        return reward, {layer.weight: grad}, {**self._running(i, state, scores), "hits": hits}

    def update(self, params: Params, state: Params, x: Tensor, y: Tensor, noise: Noise) -> Update:
        trainable, layers = self.trainable, self.network.layers
        ahead = volley(brightness(self.network.prefix(x, noise)), self.steps)
        moved: dict[str, Tensor] = {}
        below = []
        for i, layer in enumerate(layers[:-1]):
            peak, out, key = self._fire(i, params, state, ahead)
            below.append((ahead, out, winners(key, layer.synapse, self.winners)))
            moved |= self._running(i, state, peak)
            ahead = self._carriers[i](out, noise)
        scores = self._drive(params, state, ahead)
        if self.readout == "reward":
            losses = self.loss(scores, y)
            reward, grads, running = self._top(params, state, ahead, scores, y)
            moved |= running
        else:
            scores, pullback = layers[-1].neuron.vjp(scores, noise)
            losses, xi = self.loss.error(scores, y)
            reward = torch.ones_like(losses)
            grads = layers[-1].gradients(ahead / self.steps, pullback(xi), trainable)
        for i, (ahead, out, firsts) in enumerate(below):
            if layers[i].weight not in trainable:
                continue
            factor = reward if i >= len(layers) - self.rewarded else torch.ones_like(reward)
            steered = (out > 0) * per_row(factor, out)
            each = []
            for first in firsts:  # a neuron takes a step to answer
                time = self.steps + 1 - lying(first * out).flatten(1).sum(1, keepdim=True)
                each.append(self._stdp(i, params, ahead, time, first * steered))
            grads[layers[i].weight] = reduce(torch.add, each)
        return Update({n: g for n, g in grads.items() if n in trainable}, moved, losses.mean(), scores)


def _centred(w: Tensor) -> Tensor:
    """Each neuron's weights less their mean."""
    return w - per_row(w.flatten(1).mean(1), w)


def _one_hot(y: Tensor, scores: Tensor) -> Tensor:
    """The right class, from labels or from one value per class."""
    if y.is_floating_point():
        if y.shape != scores.shape:
            raise ApicalError("rstdp rewards a decision, so its targets must be class labels.")
        y = y.argmax(1)
    return (y.unsqueeze(1) == classes(scores.shape[1], y.device)).to(scores.dtype)
