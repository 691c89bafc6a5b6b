"""Spiking layers with a latency code, trained by reward-modulated spike-timing-dependent plasticity (STDP).

Each neuron fires at most once in a cycle, so its spike is one number, `ahead` = steps − t: how many steps before the
end of the cycle it fires. A spike in the first step is `steps`, one in the last step is 1, and 0 means no spike.
"""

import math
from functools import reduce
from statistics import NormalDist
from typing import Any

import torch
from torch import Tensor, nn

from apical.core.activation import Neuron, Noise
from apical.core.learner import Claims, Learner, Update
from apical.core.losses import LossFunction, one_hot
from apical.core.network import Params
from apical.core.synapse import Dense, Synapse
from apical.core.validation import require_between, require_bool, require_one_of, require_positive, require_whole
from apical.core.views import broadcast_rows, is_channels_last, reshape_in_memory_order, to_memory_order
from apical.errors import ApicalError, UnsupportedError

SPIKE_STAGES = (
    *(nn.MaxPool1d, nn.MaxPool2d, nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d),
    *(nn.AvgPool1d, nn.AvgPool2d, nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d),
    *(nn.Flatten, nn.Unflatten, nn.Identity, nn.Dropout, nn.Dropout1d, nn.Dropout2d),
)
"""Modules that act on spikes: max-pooling of `ahead` keeps the earliest spike, average-pooling takes a time in between."""


def encode_latency(value: Tensor, steps: int) -> Tensor:
    """Encode values as spikes: 1 and above fire in the first step, smaller values later, 0 and below never."""
    return (value * steps).ceil().clamp(0, steps)


def normalize_brightness(x: Tensor) -> Tensor:
    """Scale each image to the range from 0, its darkest value, to 1, its brightest."""
    flat = to_memory_order(x).flatten(1)
    low, high = (broadcast_rows(end(1), x) for end in (flat.amin, flat.amax))
    return (x - low) / (high - low).clamp_min(torch.finfo(x.dtype).tiny)


def group_by_unit(a: Tensor, synapse: Synapse) -> Tensor:
    """Return (batch, …) as (batch, units, positions)."""
    return a.reshape(len(a), -1, a.shape[-1]).mT if isinstance(synapse, Dense) else a.flatten(2)


def find_winners(key: Tensor, synapse: Synapse, count: int) -> list[Tensor]:
    """Return a mask for each of the `count` units with the largest keys in an image, best first.

    A mask is 1 at the unit's best position and 0 elsewhere.
    """
    best, place = group_by_unit(key, synapse).max(2)
    units, positions = best.shape[1], key[0].numel() // best.shape[1]
    # Masks have the memory order of the keys: (batch, positions, units), or units first.
    axis = 1 if is_channels_last(key) or isinstance(synapse, Dense) else 2
    unit, position = (torch.arange(n, device=key.device) for n in (units, positions))
    there, unit = place.unsqueeze(axis) == position.unsqueeze(2 - axis), unit.unsqueeze(axis - 1)
    winners = best.topk(min(count, units), dim=1).indices.unbind(1)
    masks = [(there & (unit == winner.view(-1, 1, 1))).to(key.dtype) for winner in winners]
    return [reshape_in_memory_order(mask, like=key) for mask in masks]


def select_spike_stages(neuron: Neuron) -> list[tuple[str, nn.Module]]:
    """Return the stages that act on spikes. Activations are left out: the threshold replaces them. Others are refused."""
    kept = []
    for stage in neuron.stages:
        if type(stage.module) in SPIKE_STAGES:
            kept.append((stage.name, stage.module))
        elif type(stage.module).__module__ != nn.Tanh.__module__ or isinstance(stage.module, nn.GLU):
            raise UnsupportedError(
                f"module {stage.name} ({stage.module}) has no meaning for spikes; torch's own activations (not GLU), "
                "pooling, Flatten and Dropout work."
            )
    return kept


RAMP_HEIGHT = 3.0
"""How far the threshold falls in one cycle, in standard deviations of the potential."""
ACCURACY_RATE = 0.01
"""The rate of the running mean of the accuracy."""


class RewardSTDP(Learner):
    """Neurons that fire at most once learn from the order of their spikes and a reward (Mozafari et al. 2018).

    An image is encoded as spikes within `steps` steps, its brightest input first. A neuron weighs them by
    w − w̄ (each spike also inhibits it by its own mean weight) and fires once its potential reaches a threshold:

        ramp         each layer has its cycle of `steps` steps after the one below: a spike switches on a current
                     until the cycle's end, and in the next cycle the threshold falls past what has been gathered
        threshold    all layers share one cycle: potentials jump by the weights of the inputs that have fired, and
                     a neuron fires as soon as it is above its threshold (the source's neurons)

    The threshold replaces the activations (also after the last layer, unless readout="gradient"); pooling, Flatten and
    Dropout act on the spikes. Potentials are standardised by each neuron's running mean and standard deviation (rate
    `homeostasis`); of normally distributed ones a `share` fires. Let Δt = t_post − t_pre, each counted in its own
    cycle, plus one step for the neuron to answer. The first `winners` units of an image (in the same step those with
    the higher potential; a filter counts once) change by

        step           Δw = a₊ w(1−w) for Δt > 0,  a₋ w(1−w) for Δt ≤ 0 or an input that stays silent
        exponential    Δw = a₊ e^(−Δt/τ₊) for Δt > 0,  a₋ e^(Δt/τ₋) for Δt ≤ 0     (the paper's equation)

    (`soft`: whether w(1−w) is a factor). The last layer's units are the classes: the scores are their mean
    potentials, and the largest decides and counts as firing in every step (Δw is the mean). Its Δw, and that of the
    `rewarded` last layers, is multiplied by the reward: 1 − H if right, −H if wrong, where H is the running accuracy.
    With readout="gradient" the last layer is not trained by R-STDP: its weights may have either sign, and it descends
    its own loss on the mean spikes. The layers below then learn without reward.

    W stays in [0, 1]. Weights outside are mapped there when the learner is built, a layer's smallest weight to 0 and its
    largest to 1. The rule is meant for plain SGD, which adds lr · Δw (in the last layer lr · `readout_rate` · Δw).
    Biases do not learn. Laws: a pair's Δw against Δt is the equation; punishment is minus reward; W stays in [0, 1].
    """

    NAME = "rstdp"
    TITLE = "Reward-modulated STDP"
    SOURCE = "Mozafari et al. 2018, First-spike-based visual categorization using reward-modulated STDP"
    FEEDBACK = "none: one reward for all synapses"
    CLAIMS = Claims(c1=True, c2=True, c3=True)
    MODEL_PREDICTS = False
    HOOKS = False
    VARIANT = "readout"
    VARIANTS = ("reward", "gradient")

    def __init__(
        self,
        model: nn.Sequential,
        *,
        input_shape: tuple[int, ...] | None = None,
        loss: str | LossFunction = "cross_entropy",
        label_smoothing: float = 0.0,
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
    ) -> None:
        super().__init__(model, input_shape=input_shape, loss=loss, label_smoothing=label_smoothing)
        self.loss.needs_labels = True
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
            raise ApicalError(f"rewarded is {rewarded}, but with readout={readout!r} it is {most} at most here.")
        self.readout, self.neuron, self.window, self.steps = readout, neuron, window, steps
        self.a_plus, self.a_minus, self.tau_plus, self.tau_minus = a_plus, a_minus, tau_plus, tau_minus
        self.soft = window == "step" if soft is None else soft
        self.winners, self.share, self.homeostasis = winners, share, homeostasis
        self.rewarded, self.readout_rate = rewarded, readout_rate
        self._spiking_layers = self.network.layers[: len(self.network) - (readout == "gradient")]
        self._lowest_threshold = NormalDist().inv_cdf(1 - share)
        self._spike_stages = [Neuron(select_spike_stages(layer.neuron)) for layer in self.network.layers]
        self._prepare_weights()

    def _prepare_weights(self) -> None:
        """Check the last layer, map the weights into their bounds, and create the buffers of running values."""
        last = self.network.layers[-1]
        if not isinstance(last.synapse, Dense):
            raise UnsupportedError(
                f"layer {last.name} ({last.synapse}) is the last one, but rstdp's classes are the units of a Linear: "
                "end the model with Flatten and a Linear."
            )
        if self.readout == "reward":
            for stage in self._spike_stages[-1].stages:
                if not isinstance(stage.module, nn.Identity | nn.Flatten | nn.Dropout):
                    raise UnsupportedError(
                        f"module {stage.name} ({stage.module}) follows layer {last.name}, but rstdp decides by that layer's "
                        "own potentials: end the model with the Linear."
                    )
            if last.synapse.out_features < 2:
                raise UnsupportedError(
                    f"layer {last.name} has one unit, but rstdp decides between classes: give it one unit for each."
                )
        for i, layer in enumerate(self._spiking_layers):
            w = self.get_parameter(layer.weight).detach()
            low, high = w.min(), w.max()
            if layer.weight in self.bounds and (low < 0 or high > 1):
                w.sub_(low).div_((high - low).clamp_min(torch.finfo(w.dtype).tiny))
            self.register_buffer(f"mean{i}", w.new_zeros(len(w)))
            self.register_buffer(f"spread{i}", 0.5 * _subtract_mean(w).flatten(1).norm(dim=1))
        if self.readout == "reward":
            self.register_buffer("hits", w.new_full((), 1 / last.synapse.out_features))

    @property
    def bounds(self) -> dict[str, tuple[float, float]]:
        names = {layer.weight for layer in self._spiking_layers}
        return dict.fromkeys(sorted(names & self.trainable), (0.0, 1.0))

    def touches(self, name: str) -> bool:
        return name not in {layer.bias for layer in self._spiking_layers}

    def param_groups(self, lr: float, **options: Any) -> list[dict[str, Any]]:
        """Return the groups `W`, and `readout` for the last layer with the rate lr · readout_rate."""
        *below, last = self.network.layers
        top = [name for name in (last.weight, last.bias) if name is not None]
        groups = self._groups(lr, options, W=[layer.weight for layer in below])
        return groups + self._groups(lr * self.readout_rate, options, readout=top)

    # Forward: how spikes arise.

    def _compute_potential(self, i: int, params: Params, state: Params, spikes: Tensor) -> Tensor:
        """Return layer i's potentials for spikes (batch, …), standardised by the running mean and spread."""
        layer = self.network.layers[i]
        drive = layer.forward({**params, layer.weight: _subtract_mean(params[layer.weight])}, spikes)
        mean, spread = state[f"mean{i}"], state[f"spread{i}"]
        if not isinstance(layer.synapse, Dense):
            mean, spread = (values.view(-1, *[1] * layer.synapse.dims) for values in (mean, spread))
        return (drive - mean) / spread.clamp_min(torch.finfo(drive.dtype).eps)

    def _fire(self, i: int, params: Params, state: Params, ahead: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Run layer i on input spikes and return its highest potentials, its own spikes, and the keys that rank winners."""
        if self.neuron == "ramp":
            peak = self._compute_potential(i, params, state, ahead / self.steps)
            return peak, encode_latency((peak - self._lowest_threshold) / RAMP_HEIGHT, self.steps), peak
        left = torch.arange(self.steps - 1, -1, -1, device=ahead.device).view(-1, *[1] * ahead.ndim)
        spikes = (ahead > left).to(ahead.dtype)  # which inputs have fired by each step
        potential = self._compute_potential(i, params, state, spikes.flatten(0, 1)).unflatten(0, spikes.shape[:2])
        above = potential - self._lowest_threshold
        fired = (above >= 0).to(above.dtype).cumsum(0).clamp_max(1.0)
        out = fired.sum(0)
        excess = torch.where(fired.cumsum(0) == 1, above, 0.0).sum(0)  # in the step in which the neuron fires
        return above.amax(0) + self._lowest_threshold, out, out + excess / (1 + excess)

    def _compute_scores(self, params: Params, state: Params, ahead: Tensor) -> Tensor:
        """Return the mean potentials of the classes over the steps: an input counts from its spike to the end."""
        layer, mean = self.network.layers[-1], ahead / self.steps
        if mean.ndim != 2:
            raise UnsupportedError(
                f"layer {layer.name} gets an input of shape {tuple(mean.shape)}, but rstdp decides once per example: "
                "put a Flatten before the last Linear."
            )
        if self.readout == "reward":
            return self._compute_potential(len(self.network) - 1, params, state, mean)
        return layer.forward(params, mean)

    def predict(self, params: Params, state: Params, x: Tensor) -> Tensor:
        """Return the scores of the spiking network. The largest is the decision. Dropout is off."""
        ahead = encode_latency(normalize_brightness(self.network.prefix(x, {})), self.steps)
        for i, carrier in enumerate(self._spike_stages[:-1]):
            ahead = carrier(self._fire(i, params, state, ahead)[1], {})
        drive = self._compute_scores(params, state, ahead)
        return drive if self.readout == "reward" else self.network.layers[-1].neuron(drive, {})

    # Learning: how spikes change the weights.

    def apply_window(self, dt: Tensor) -> Tensor:
        """Return the weight change that a pair of spikes causes, by Δt = t_post − t_pre."""
        if self.window == "step":
            return torch.where(dt > 0, torch.full_like(dt, self.a_plus), self.a_minus)
        before = self.a_plus * torch.exp(-dt / self.tau_plus)
        return torch.where(dt > 0, before, self.a_minus * torch.exp(dt / self.tau_minus))

    def _compute_stdp(self, i: int, params: Params, ahead: Tensor, times: Tensor, post: Tensor) -> Tensor:
        """Return −Δw for neurons `post` that fire at `times`, (batch, k): the mean over the k times and the batch."""
        layer, flat = self.network.layers[i], to_memory_order(ahead).flatten(1)
        effect = self.apply_window(times.unsqueeze(2) - (self.steps - flat.unsqueeze(1))).mean(1)
        silent = self.a_minus if self.window == "step" else 0.0
        effect = reshape_in_memory_order(torch.where(flat > 0, effect, silent), like=ahead)
        grad, w = layer.synapse.outer(effect, post, scale=-1.0), params[layer.weight]
        return grad * (w * (1 - w)) if self.soft else grad

    def _update_running_stats(self, i: int, state: Params, peak: Tensor) -> dict[str, Tensor]:
        """Return the running mean and spread of layer i's potentials after this batch."""
        mean, spread, rate = state[f"mean{i}"], state[f"spread{i}"], self.homeostasis
        z = group_by_unit(peak, self.network.layers[i].synapse)
        widened = 1 + rate * (z.square().mean((0, 2)) - 1)
        return {f"mean{i}": mean + rate * spread * z.mean((0, 2)), f"spread{i}": spread * widened.sqrt()}

    def _reward_readout(
        self, params: Params, state: Params, ahead: Tensor, scores: Tensor, y: Tensor
    ) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
        """Return each image's reward, and the gradients and new running values of the last layer by name."""
        i, layer = len(self.network) - 1, self.network.layers[-1]
        if y.is_floating_point():
            if y.shape != scores.shape:
                raise ApicalError("rstdp rewards a decision, so its targets must be class labels.")
            y = y.argmax(1)
        (decision,) = find_winners(scores, layer.synapse, 1)
        right = (decision * one_hot(y, scores.shape[1], scores.dtype)).sum(1)
        reward = right - state["hits"]
        always = torch.arange(1, self.steps + 1, device=ahead.device, dtype=ahead.dtype)
        grad = self._compute_stdp(i, params, ahead, always.expand(len(right), -1), decision * reward.unsqueeze(1))
        hits = state["hits"] + ACCURACY_RATE * (right.mean() - state["hits"])
        return reward, {layer.weight: grad}, {**self._update_running_stats(i, state, scores), "hits": hits}

    def update(self, params: Params, state: Params, x: Tensor, y: Tensor, noise: Noise) -> Update:
        trainable, layers = self.trainable, self.network.layers
        ahead = encode_latency(normalize_brightness(self.network.prefix(x, noise)), self.steps)
        new_state: dict[str, Tensor] = {}
        hidden = []
        for i, layer in enumerate(layers[:-1]):
            peak, out, key = self._fire(i, params, state, ahead)
            hidden.append((ahead, out, find_winners(key, layer.synapse, self.winners)))
            new_state |= self._update_running_stats(i, state, peak)
            ahead = self._spike_stages[i](out, noise)
        scores = self._compute_scores(params, state, ahead)
        if self.readout == "reward":
            losses = self.loss(scores, y)
            reward, grads, running = self._reward_readout(params, state, ahead, scores, y)
            new_state |= running
        else:
            scores, pullback = layers[-1].neuron.vjp(scores, noise)
            losses, xi = self.loss.error(scores, y)
            reward = torch.ones_like(losses)
            grads = layers[-1].gradients(ahead / self.steps, pullback(xi), trainable)
        for i, (ahead, out, masks) in enumerate(hidden):
            if layers[i].weight not in trainable:
                continue
            factor = reward if i >= len(layers) - self.rewarded else torch.ones_like(reward)
            rewarded_spikes = (out > 0) * broadcast_rows(factor, out)
            updates = []
            for mask in masks:  # + 1: a neuron takes a step to answer
                time = self.steps + 1 - to_memory_order(mask * out).flatten(1).sum(1, keepdim=True)
                updates.append(self._compute_stdp(i, params, ahead, time, mask * rewarded_spikes))
            grads[layers[i].weight] = reduce(torch.add, updates)
        return Update({n: g for n, g in grads.items() if n in trainable}, new_state, losses.mean(), scores)


def _subtract_mean(w: Tensor) -> Tensor:
    """Subtract from each neuron's weights their mean."""
    return w - broadcast_rows(w.flatten(1).mean(1), w)
