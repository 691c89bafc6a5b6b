"""Honest rules: each keeps the criteria that it is listed with, some of them in ways that look like cheating."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import apical
from apical import Learner, Update
from audit_cases.base import Feedback, OwnErrors, honest
from audit_cases.phases import Direct
from audit_cases.transport import Mirror

LOCAL = "c1", "c2", "c3"


@honest("c1", "c2")
class FixedFeedback(Feedback):
    """Feedback alignment, with fixed random weights in a list."""


@honest("c1", "c2")
class SparseFeedback(Feedback):
    """Feedback alignment, with fixed random weights in sparse tensors."""

    def __init__(self, *args: Any, **common: Any) -> None:
        super().__init__(*args, **common)
        self.b = [(b.t() * (b.t() > 0)).to_sparse() for b in self.b]

    def carry(self, i: int, w: Tensor, u: Tensor, delta: Tensor, state: Any) -> Tensor:
        return torch.sparse.mm(self.b[i].to(delta.dtype), delta.t()).t()


@honest("c1", "c2")
class MaskedFeedback(Feedback):
    """Feedback alignment, with four of five fixed random weights set to zero."""

    def __init__(self, *args: Any, **common: Any) -> None:
        super().__init__(*args, **common)
        self.b = [b * (torch.arange(b.numel()).view(b.shape) % 5 == 0) for b in self.b]


@honest("c1", "c2")
class CoarseWeights(Feedback):
    """All weights, forward and feedback, start as 0.1 or −0.1."""

    def __init__(self, *args: Any, **common: Any) -> None:
        super().__init__(*args, **common)
        self.b = [0.1 * b.sign() for b in self.b]
        with torch.no_grad():
            for w in self.forward_weights:
                w.copy_(0.1 * w.sign())


def keep_private(values: list[Tensor]) -> Any:
    return lambda i: values[i]


@honest("c1", "c2")
class StartsEqual(Feedback):
    """The fixed feedback weights are a copy of W as it was at the start, in a closure."""

    def __init__(self, *args: Any, **common: Any) -> None:
        super().__init__(*args, **common)
        self.private = keep_private([w.detach().clone() for w in self.forward_weights])

    def carry(self, i: int, w: Tensor, u: Tensor, delta: Tensor, state: Any) -> Tensor:
        return delta @ self.private(i).to(delta)


@honest("c1", "c2")
class StartsEqualInBuffers(Mirror):
    """The fixed feedback weights are a copy of W as it was at the start, in buffers."""

    def __init__(self, *args: Any, **common: Any) -> None:
        super().__init__(*args, **common)
        for i, w in enumerate(self.forward_weights):
            getattr(self, f"theta{i}").copy_(w.detach())


@honest("c1", "c2")
class NormScaled(Feedback):
    """Feedback alignment, with fixed weights scaled to the length of W: one number for a matrix."""

    def carry(self, i: int, w: Tensor, u: Tensor, delta: Tensor, state: Any) -> Tensor:
        return delta @ (self.b[i] * (w.norm() / self.b[i].norm()))


@honest("c1", "c2")
class WeightMirror(Mirror):
    """Feedback weights learn from noise: what a layer answers to it, times the noise (Akrout et al. 2019)."""

    def draw(self, x: Tensor, generator: torch.Generator | None = None) -> dict[str, Tensor]:
        shapes = self.network.shapes(x.shape[1:]).inputs
        probes = {
            f"probe{i}": torch.randn(len(x), *s, dtype=x.dtype, generator=generator) for i, s in enumerate(shapes)
        }
        return {**super().draw(x, generator), **probes}

    def update(self, params: Any, state: Any, x: Tensor, y: Tensor, noise: Any) -> Update:
        update, new = super().update(params, state, x, y, noise), {}
        for i, layer in enumerate(self.network.layers):
            probe = noise[f"probe{i}"]
            answer = layer.synapse.forward(params[layer.weight], probe)
            new[f"theta{i}"] = 0.9 * state[f"theta{i}"] + 0.1 * layer.synapse.outer(probe, answer)
        return update._replace(state=new)


@honest("c1", "c2")
class Regressed(Mirror):
    """Feedback weights learn to predict a layer's drive from its input: a regression of W from activity."""

    def update(self, params: Any, state: Any, x: Tensor, y: Tensor, noise: Any) -> Update:
        update, u, new = super().update(params, state, x, y, noise), self.network.prefix(x, noise), {}
        for i, layer in enumerate(self.network.layers):
            theta, a = state[f"theta{i}"], layer.synapse.forward(params[layer.weight], u)
            new[f"theta{i}"] = theta + 0.1 * layer.synapse.outer(u, a - u @ theta.t())
            u = layer(params, u, noise)
        return update._replace(state=new)


@honest("c1", "c2")
class KolenPollack(Mirror):
    """Feedback weights get the same change as W, and both decay (Kolen & Pollack 1994)."""

    def update(self, params: Any, state: Any, x: Tensor, y: Tensor, noise: Any) -> Update:
        update = super().update(params, state, x, y, noise)
        layers = self.network.layers
        new = {f"theta{i}": 0.99 * state[f"theta{i}"] - 0.1 * update.grads[n.weight] for i, n in enumerate(layers)}
        decay = {layer.weight: 0.01 * params[layer.weight] for layer in layers}
        return update._replace(grads={n: g + decay.get(n, 0) for n, g in update.grads.items()}, state=new)


@honest("c1", "c2")
class LearnedInverses(Mirror):
    """Target propagation: targets come down through inverses that learn to give back a layer's input."""

    def update(self, params: Any, state: Any, x: Tensor, y: Tensor, noise: Any) -> Update:
        trace = self.network.forward(params, x, noise)
        loss, xi = self.loss.start(trace.output, y)
        grads, new, target = {}, {}, trace.output + 0.1 * xi
        for i, layer in reversed(list(enumerate(self.network.layers))):
            u, pullback = trace.inputs[i], trace.pullbacks[i]
            a = trace.output if i == len(self.network) - 1 else trace.inputs[i + 1]
            assert pullback is not None
            grads |= layer.gradients(u, pullback(target - a), self.trainable)
            theta = state[f"theta{i}"]
            missed = u - a @ theta
            new[f"theta{i}"] = theta + 0.1 * layer.synapse.outer(missed, a)
            target = u + target @ theta - a @ theta
        return Update(grads, new, loss, trace.output)


@honest("c1")
class DirectFeedback(Direct):
    """Direct feedback alignment keeps C1."""


@honest("c1")
class ForwardGradient(Learner):
    """The loss's slope along a random direction of all weights, by forward-mode derivatives (Baydin et al. 2022)."""

    def draw(self, x: Tensor, generator: torch.Generator | None = None) -> dict[str, Tensor]:
        return {name: torch.randn(p.shape, dtype=x.dtype, generator=generator) for name, p in self.params().items()}

    def update(self, params: Any, state: Any, x: Tensor, y: Tensor, noise: Any) -> Update:
        held = {name: p.detach() for name, p in params.items()}

        def loss(params: Any) -> Tensor:
            return self.loss(self.network.predict(params, x, {}), y).mean()

        value, slope = torch.func.jvp(loss, (held,), ({name: noise[name] for name in held},))
        output = self.network.predict(held, x, {})
        return Update({name: slope * noise[name] for name in held}, {}, value, output)


@honest("c1")
class NodePerturbation(apical.RULES["np"]):  # type: ignore[misc]
    """Node perturbation keeps C1."""


@honest(*LOCAL)
class RandomTargets(OwnErrors):
    """Direct random target projection: each class has a random error for each layer."""


@honest(*LOCAL)
class Momentum(OwnErrors):
    """Random targets, with the gradients' running mean in buffers."""

    def __init__(self, *args: Any, **common: Any) -> None:
        super().__init__(*args, **common)
        for name, parameter in self.params().items():
            self.register_buffer(name.replace(".", "_"), torch.zeros_like(parameter))

    def update(self, params: Any, state: Any, x: Tensor, y: Tensor, noise: Any) -> Update:
        update = super().update(params, state, x, y, noise)
        new = {n.replace(".", "_"): 0.9 * state[n.replace(".", "_")] + 0.1 * g for n, g in update.grads.items()}
        return update._replace(grads={n: new[n.replace(".", "_")].clone() for n in update.grads}, state=new)


@honest(*LOCAL)
class NormalisedTraces(OwnErrors):
    """Random targets, with errors that are divided by their spread over the batch."""

    def own_error(self, i: int, a: Tensor, y: Tensor, state: Any) -> Tensor:
        error = super().own_error(i, a, y, state) - a
        return (error - error.mean(0)) / (error.std(0) + 1e-3)


@honest(*LOCAL)
class FixedHeads(OwnErrors):
    """Each layer has a fixed random classifier, whose error comes back by other fixed random weights."""

    def own_error(self, i: int, a: Tensor, y: Tensor, state: Any) -> Tensor:
        scores = a @ self.b[i].flip(0).t()
        return (F.one_hot(y, scores.shape[1]) - scores.softmax(1)) @ self.b[i]


@honest(*LOCAL)
class LearnedHeads(OwnErrors):
    """Each layer has a classifier that learns, whose error comes back by fixed random weights."""

    def __init__(self, *args: Any, **common: Any) -> None:
        super().__init__(*args, **common)
        for i, b in enumerate(self.b):
            self.register_buffer(f"head{i}", b.flip(0).clone())

    def update(self, params: Any, state: Any, x: Tensor, y: Tensor, noise: Any) -> Update:
        self.new: dict[str, Tensor] = {}
        update = super().update(params, state, x, y, noise)
        return update._replace(state=self.new)

    def own_error(self, i: int, a: Tensor, y: Tensor, state: Any) -> Tensor:
        head = state[f"head{i}"]
        scores = a @ head.t()
        error = F.one_hot(y, scores.shape[1]) - scores.softmax(1)
        self.new[f"head{i}"] = head + 0.1 * error.t() @ a / len(a)
        return error @ self.b[i]


class Unsupervised(Learner):
    """Hidden layers learn without the target, by `correlate`; the last layer learns from the loss."""

    def correlate(self, w: Tensor, u: Tensor, a: Tensor) -> Tensor:
        raise NotImplementedError

    def update(self, params: Any, state: Any, x: Tensor, y: Tensor, noise: Any) -> Update:
        u, grads = self.network.prefix(x, noise), {}
        for layer in self.network.layers[:-1]:
            a = layer(params, u, noise)
            grads[layer.weight] = -self.correlate(params[layer.weight], u, a)
            u = a
        top = self.network.layers[-1]
        output = top(params, u, noise)
        loss, xi = self.loss.start(output, y)
        return Update({**grads, **top.gradients(u, xi, self.trainable)}, {}, loss, output)


@honest(*LOCAL)
class Hebbian(Unsupervised):
    """Hebb's rule with decay."""

    def correlate(self, w: Tensor, u: Tensor, a: Tensor) -> Tensor:
        return a.t() @ u / len(u) - w


@honest(*LOCAL)
class Oja(Unsupervised):
    """Oja's subspace rule, in which a layer's activity comes back through its own weights."""

    def correlate(self, w: Tensor, u: Tensor, a: Tensor) -> Tensor:
        return (a.t() @ u - a.t() @ a @ w) / len(u)


@honest("c1", "c2")
class TiedAutoencoder(Unsupervised):
    """Each layer reconstructs its input through its own transposed weights, and learns from what is missing."""

    def correlate(self, w: Tensor, u: Tensor, a: Tensor) -> Tensor:
        missing = u - a @ w
        return (a.t() @ missing + (missing @ w.t() * (1 - a.square())).t() @ u) / len(u)


@honest(*LOCAL)
class Competitive(Unsupervised):
    """The unit that answers most strongly moves towards the input."""

    def correlate(self, w: Tensor, u: Tensor, a: Tensor) -> Tensor:
        wins = F.one_hot(a.argmax(1), a.shape[1]).to(u)
        return wins.t() @ u / len(u) - wins.mean(0).unsqueeze(1) * w


@honest(*LOCAL)
class SoftBounds(OwnErrors):
    """Random targets; each weight's change is scaled by the weight and by the length of its neuron's weights."""

    def update(self, params: Any, state: Any, x: Tensor, y: Tensor, noise: Any) -> Update:
        update = super().update(params, state, x, y, noise)
        grads = dict(update.grads)
        for layer in self.network.layers:
            w = params[layer.weight]
            grads[layer.weight] = grads[layer.weight] * (1 - w.square()) / (1 + w.norm(dim=1, keepdim=True))
        return update._replace(grads=grads)


@honest(*LOCAL)
class NoisyTargets(OwnErrors):
    """Random targets, of which a random half is left out at each batch."""

    def draw(self, x: Tensor, generator: torch.Generator | None = None) -> dict[str, Tensor]:
        widths = [len(w) for w in self.forward_weights]
        return {f"mask{i}": torch.rand(n, generator=generator, dtype=x.dtype) for i, n in enumerate(widths)}

    def update(self, params: Any, state: Any, x: Tensor, y: Tensor, noise: Any) -> Update:
        return super().update(params, noise, x, y, {})

    def own_error(self, i: int, a: Tensor, y: Tensor, state: Any) -> Tensor:
        return super().own_error(i, a, y, state) * (state[f"mask{i}"] > 0.5)
