"""Spiking layers with a latency code, and spike-timing-dependent plasticity that a reward steers."""

from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn

from apical.checks import nothing_to_train
from apical.errors import ApicalError, UnsupportedError
from apical.learner import Claims, Learner, Update
from apical.network import Params
from apical.neuron import Neuron, Noise
from apical.rules.descent import is_number, require_positive
from apical.synapse import Dense, Synapse

CARRIES = (
    *(nn.MaxPool1d, nn.MaxPool2d, nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d),
    *(nn.AvgPool1d, nn.AvgPool2d, nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d),
    *(nn.Flatten, nn.Unflatten, nn.Identity, nn.Dropout, nn.Dropout1d, nn.Dropout2d),
)
"""What spikes pass through as they are. A max over spikes is the earliest one, a mean a graded one."""
MEMORY = 0.01
"""How fast the running share of right decisions follows the batches."""


def latencies(x: Tensor, steps: int) -> Tensor:
    """Who has fired by each step (steps, batch, …): each image's brightest input first, its darkest never."""
    flat = x.flatten(1)
    low, high = flat.amin(1, keepdim=True), flat.amax(1, keepdim=True)
    tiny = torch.finfo(x.dtype).tiny
    value = ((flat - low) / (high - low).clamp_min(tiny)).view_as(x)
    step = torch.arange(1, steps + 1, device=x.device, dtype=x.dtype).view(-1, *[1] * x.ndim)
    return (value * steps > steps - step).to(x.dtype)


def new(fired: Tensor) -> Tensor:
    """The spikes of each step, from who has fired by it."""
    return torch.cat([fired[:1], fired[1:] - fired[:-1]])


def per_unit(values: Tensor, synapse: Synapse) -> Tensor:
    """One value per unit (dense: the last axis) or filter (the first after the batch), ready to broadcast."""
    return values if isinstance(synapse, Dense) else values.view(-1, *[1] * (len(synapse.weight_shape) - 2))


def by_unit(a: Tensor, synapse: Synapse) -> Tensor:
    """(batch, …) as (batch, units, positions)."""
    return a.reshape(len(a), -1, a.shape[-1]).mT if isinstance(synapse, Dense) else a.flatten(2)


def winners(key: Tensor, synapse: Synapse, count: int) -> Tensor:
    """1 for the `count` units of each image with the largest keys, each at its best position alone, else 0."""
    best, place = by_unit(key, synapse).max(2)
    units, positions = best.shape[1], key[0].numel() // best.shape[1]
    first = best.topk(min(count, units), dim=1).indices
    chosen = (first.unsqueeze(2) == torch.arange(units, device=key.device)).any(1)
    there = place.unsqueeze(2) == torch.arange(positions, device=key.device)
    mask = (chosen.unsqueeze(2) & there).to(key.dtype)
    return (mask.mT if isinstance(synapse, Dense) else mask).reshape(key.shape)


class RewardSTDP(Learner):
    """Threshold neurons that fire at most once, learning from who fired before whom (Mozafari et al. 2018).

    An image becomes spikes, its brightest input first (`steps` steps, per image from its darkest to its
    brightest value). A neuron adds up the weights of the inputs that have fired, less its own mean weight for
    each (`inhibition`: feed-forward inhibition, 0 for none), and fires in the step after the potential reaches
    its threshold. Activations are replaced by that threshold; pooling, Flatten and Dropout act on the spikes.
    With Δt = t_post − t_pre, each winner of an image changes its weights by

        step           Δw = a₊ w(1−w) for Δt > 0,  a₋ w(1−w) for Δt ≤ 0 or an input that stayed silent
        exponential    Δw = a₊ e^(−Δt/τ₊) for Δt > 0,  a₋ e^(Δt/τ₋) for Δt ≤ 0     (the paper's equation)

    (`soft`: whether w(1−w) is a factor). The winners are the first `winners` neurons to fire, the higher
    potential first in the same step; in a convolution a filter counts once. A neuron's threshold follows how
    often it fires: θ ← θ + h‖w − w̄‖(share − target), h = `homeostasis`, target = `share`.

    The last layer's units are the classes. They do not stop the clock: the score is the potential, averaged over the
    steps, less the threshold (target 1/classes), and the winning unit is taken to fire at every step. Its Δw, and
    that of the last `rewarded` layers, is multiplied by the reward: 1 − H for a right decision and −H for a wrong
    one, H the running share of right ones. `readout="gradient"` is no R-STDP there: the last layer descends its own
    loss on the mean spikes (with weights of either sign), and every layer below learns without reward.

    W is kept in [0, 1]: a layer that is not gets mapped there when the learner is built, its smallest weight to 0
    and its largest to 1. Plain SGD is meant (Δw is added, times lr); the last layer's rate is lr · `readout_rate`.
    Biases stay as they are, but for the gradient's last one.
    Laws: one pair's Δw against Δt is the equation above; punishment is reward's negative; W stays in [0, 1].
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
        window: str = "step",
        steps: int = 10,
        a_plus: float = 1.0,
        a_minus: float = -0.75,
        tau_plus: float = 3.0,
        tau_minus: float = 3.0,
        soft: bool | None = None,
        winners: int = 1,
        share: float = 0.5,
        homeostasis: float = 0.1,
        inhibition: float = 1.0,
        rewarded: int = 1,
        readout_rate: float = 1.0,
        **common: Any,
    ) -> None:
        super().__init__(*args, **common)
        one_of(readout, self.VARIANTS, "readout")
        one_of(window, ("step", "exponential"), "window")
        require_positive(tau_plus=tau_plus, tau_minus=tau_minus, readout_rate=readout_rate)
        for name, value in (("a_plus", a_plus), ("a_minus", a_minus)):
            if not is_number(value):
                raise ApicalError(f"{name} is {value!r}, but must be a number.")
        for name, value in (("homeostasis", homeostasis), ("inhibition", inhibition)):
            if not (is_number(value) and value >= 0):
                raise ApicalError(f"{name} is {value!r}, but must not be negative.")
        for name, count, least in (("steps", steps, 2), ("winners", winners, 1), ("rewarded", rewarded, 1)):
            if not isinstance(count, int) or isinstance(count, bool) or count < least:
                raise ApicalError(f"{name} is {count!r}, but must be a whole number of at least {least}.")
        if not (is_number(share) and 0 < share < 1):
            raise ApicalError(f"share is {share!r}, but must lie between 0 and 1.")
        if soft is not None and not isinstance(soft, bool):
            raise ApicalError(f"soft is {soft!r}, but must be True, False or None.")
        if rewarded > (1 if readout == "gradient" else len(self.network)):
            raise ApicalError(
                f"rewarded is {rewarded}, but readout={readout!r} rewards at most "
                f"{1 if readout == 'gradient' else len(self.network)} layers here."
            )
        self.readout, self.window, self.steps, self.winners = readout, window, steps, winners
        self.a_plus, self.a_minus, self.tau_plus, self.tau_minus = a_plus, a_minus, tau_plus, tau_minus
        self.soft = window == "step" if soft is None else soft
        self.share, self.homeostasis, self.inhibition = share, homeostasis, inhibition
        self.rewarded, self.readout_rate = rewarded, readout_rate
        self._carriers = [Neuron(_carriers(layer.neuron)) for layer in self.network.layers]
        self._prepare()

    def _prepare(self) -> None:
        """Weights into their bounds, and the thresholds at which the layers start."""
        last = self.network.layers[-1]
        if not isinstance(last.synapse, Dense):
            raise UnsupportedError(
                f"layer {last.name} ({last.synapse}) is the last one, but rstdp's classes are the units of a Linear: "
                "end the model with Flatten and a Linear."
            )
        for i, layer in enumerate(self.network.layers[: self._spiking]):
            w = self.get_parameter(layer.weight).detach()
            low, high = w.min(), w.max()
            if layer.weight in self.bounds and (low < 0 or high > 1):
                w.sub_(low).div_((high - low).clamp_min(torch.finfo(w.dtype).tiny))
            size = self._centred(w).flatten(1).norm(dim=1)
            self.register_buffer(f"threshold{i}", 0.5 * size if i < len(self.network) - 1 else 0.0 * size)
        if self.readout == "reward":
            self.register_buffer("hits", w.new_full((), 1 / last.synapse.out_features))

    @property
    def _spiking(self) -> int:
        """How many layers learn by STDP."""
        return len(self.network) - (self.readout == "gradient")

    @property
    def bounds(self) -> dict[str, tuple[float, float]]:
        trainable = self.trainable
        names = [layer.weight for layer in self.network.layers[: self._spiking]]
        return {name: (0.0, 1.0) for name in names if name in trainable}

    def touches(self, name: str) -> bool:
        biases = {layer.bias for layer in self.network.layers[: self._spiking]}
        return name not in biases

    def param_groups(self, lr: float, **options: Any) -> list[dict[str, Any]]:
        """Groups `W`, and `readout` for the last layer, whose rate is lr · readout_rate."""
        *below, last = self.network.layers
        top = [last.weight] if last.bias is None else [last.weight, last.bias]
        groups = self._groups(lr, options, W=[layer.weight for layer in below], readout=top)
        return [{**g, "lr": lr * self.readout_rate} if g["name"] == "readout" else g for g in groups]

    # How spikes come about.

    def _centred(self, w: Tensor) -> Tensor:
        mean = w.flatten(1).mean(1).view(-1, *[1] * (w.ndim - 1))
        return w - self.inhibition * mean

    def _fire(self, i: int, params: Params, state: Params, spikes: Tensor) -> tuple[Tensor, Tensor]:
        """Layer i's potentials above threshold, and who has fired by each step; both (steps, batch, …)."""
        layer = self.network.layers[i]
        bias = None if layer.bias is None else params[layer.bias]
        drive = layer.synapse.forward(self._centred(params[layer.weight]), spikes.flatten(0, 1), bias)
        above = drive - per_unit(state[f"threshold{i}"], layer.synapse)
        above = above.unflatten(0, spikes.shape[:2])
        return above, (above >= 0).to(above.dtype).cumsum(0).clamp_max(1.0)

    def _carry(self, i: int, fired: Tensor, noise: Noise | None) -> Tensor:
        """Spikes through the pooling and the like that follows layer i; without noise, as in evaluation."""
        flat, neuron = fired.flatten(0, 1), self._carriers[i]
        if noise is None:
            out = reduce(lambda a, stage: stage.runs(a), neuron.stages, flat)
        else:
            names = [stage.name for stage in neuron.stages if stage.name in noise]
            steps = len(fired)
            out = neuron(flat, {n: noise[n].expand(steps, *noise[n].shape).flatten(0, 1) for n in names})
        carried: Tensor = out.unflatten(0, fired.shape[:2])
        return carried

    def _scores(self, params: Params, state: Params, spikes: Tensor) -> Tensor:
        """The last layer's potentials, averaged over the steps (weights act linearly: the mean spikes' drive)."""
        layer, mean = self.network.layers[-1], spikes.mean(0)
        bias = None if layer.bias is None else params[layer.bias]
        w, spiking = params[layer.weight], self.readout == "reward"
        scores = layer.synapse.forward(self._centred(w) if spiking else w, mean, bias)
        if scores.ndim != 2:
            raise UnsupportedError(
                f"layer {layer.name} gives scores of shape {tuple(scores.shape)}, but rstdp decides once per example: "
                "put a Flatten before the last Linear."
            )
        return scores - state[f"threshold{len(self.network) - 1}"] if spiking else scores

    def predict(self, params: Params, state: Params, x: Tensor) -> Tensor:
        """The scores of the spiking network; the largest is the decision."""
        spikes = latencies(self.network.prefix(x, {}), self.steps)
        for i in range(len(self.network) - 1):
            spikes = self._carry(i, self._fire(i, params, state, spikes)[1], None)
        return self._scores(params, state, spikes)

    # How they change the weights.

    def timing(self, dt: Tensor) -> Tensor:
        """What one pair of spikes does, by Δt = t_post − t_pre."""
        if self.window == "step":
            return torch.where(dt > 0, self.a_plus, self.a_minus).to(dt.dtype)
        before = self.a_plus * torch.exp(-dt / self.tau_plus)
        return torch.where(dt > 0, before, self.a_minus * torch.exp(dt / self.tau_minus))

    def _pairs(self, spikes: Tensor) -> Tensor:
        """For a neuron that reaches its threshold at each step, and so fires in the next: what its inputs did to it."""
        steps = torch.arange(self.steps, device=spikes.device, dtype=spikes.dtype)
        table = self.timing(steps.unsqueeze(1) + 1 - steps)
        pairs = (table @ new(spikes).flatten(1)).view_as(spikes)
        return pairs + self.a_minus * (1 - spikes[-1]).clamp_min(0) if self.window == "step" else pairs

    def _gradient(self, i: int, params: Params, pre: Tensor, post: Tensor) -> Tensor:
        """−Δw: the mean over the batch of pre × post, both (…, batch, …) with any steps in front."""
        layer, times = self.network.layers[i], len(pre)
        grad = layer.synapse.outer(pre.flatten(0, 1), post.flatten(0, 1), scale=-float(times))
        w = params[layer.weight]
        return grad * (w * (1 - w)) if self.soft else grad

    def _adapt(self, i: int, params: Params, state: Params, share: Tensor, target: float) -> Tensor:
        """A threshold follows how often its neuron fires."""
        size = self._centred(params[self.network.layers[i].weight]).flatten(1).norm(dim=1)
        threshold: Tensor = state[f"threshold{i}"] + self.homeostasis * size * (share - target)
        return threshold

    def update(self, params: Params, state: Params, x: Tensor, y: Tensor, noise: Noise) -> Update:
        trainable, layers = self.trainable, self.network.layers
        if not trainable:
            raise nothing_to_train()
        spikes = latencies(self.network.prefix(x, noise), self.steps)
        moved: dict[str, Tensor] = {}
        seen, posts = [], []
        for i, layer in enumerate(layers[:-1]):
            above, fired = self._fire(i, params, state, spikes)
            fresh = new(fired)
            excess = (fresh * above).sum(0)
            first = winners(fired.sum(0) + excess / (1 + excess), layer.synapse, self.winners)
            seen.append(spikes)
            posts.append(fresh * first)
            often = by_unit(fired[-1], layer.synapse).mean((0, 2))
            moved[f"threshold{i}"] = self._adapt(i, params, state, often, self.share)
            spikes = self._carry(i, fired, noise)
        scores = self._scores(params, state, spikes)
        losses, xi = self.loss.error(scores, y)
        grads, reward = {}, torch.ones_like(losses)
        if self.readout == "gradient":
            last, mean = layers[-1], spikes.mean(0)
            grads[last.weight] = last.synapse.outer(mean, xi, scale=-1.0)
            if last.bias is not None:
                grads[last.bias] = last.synapse.total(xi, scale=-1.0)
        else:
            winner = winners(scores, layers[-1].synapse, 1)
            hit = (winner * _labels(scores, y)).sum(1)
            reward = hit - state["hits"]
            moved["hits"] = state["hits"] + MEMORY * (hit.mean() - state["hits"])
            moved[f"threshold{len(posts)}"] = self._adapt(
                len(posts), params, state, winner.mean(0), 1 / scores.shape[1]
            )
            pre = self._pairs(spikes).mean(0, keepdim=True)
            post = (winner * reward.unsqueeze(1)).unsqueeze(0)
            grads[layers[-1].weight] = self._gradient(len(posts), params, pre, post)
        for i, (pre, post) in enumerate(zip(seen, posts, strict=True)):
            if layers[i].weight in trainable:
                if i >= len(layers) - self.rewarded:
                    post = post * reward.view(-1, *[1] * (post.ndim - 2))
                grads[layers[i].weight] = self._gradient(i, params, self._pairs(pre), post)
        grads = {name: gradient for name, gradient in grads.items() if name in trainable}
        return Update(grads, moved, losses.mean(), scores)


def one_of(value: object, known: tuple[str, ...], name: str) -> None:
    """Refuse a setting that is none of the known words."""
    if value not in known:
        raise ApicalError(f"{name} is {value!r}, but must be one of {', '.join(known)}.")


def _labels(scores: Tensor, y: Tensor) -> Tensor:
    """One-hot, from labels or (the largest) from class probabilities or values."""
    if y.is_floating_point():
        if y.shape != scores.shape:
            raise ApicalError("rstdp rewards a decision, so its targets must be class labels.")
        y = y.argmax(1)
    return (y.unsqueeze(1) == torch.arange(scores.shape[1], device=y.device)).to(scores.dtype)


def _carriers(neuron: Neuron) -> list[tuple[str, nn.Module]]:
    """The stages that spikes pass through; activations give way to the threshold, anything else is refused."""
    kept = []
    for stage in neuron.stages:
        if type(stage.module) in CARRIES:
            kept.append((stage.name, stage.module))
        elif type(stage.module).__module__ != nn.Tanh.__module__ or type(stage.module) is nn.GLU:
            raise UnsupportedError(
                f"module {stage.name} ({stage.module}) has no meaning for spikes; torch's own activations but GLU, "
                "pooling, Flatten and Dropout work."
            )
    return kept
