"""Cheats against C2 and C3 in plain torch operations: errors that skip layers, and layers that wait in hidden ways."""

from typing import Any

import torch
from torch import Tensor

import apical
from apical import Learner, Update
from apical.rules.streaming import Streaming
from audit_cases.base import Feedback, OwnErrors, cheat


class Direct(Learner):
    """The output's error reaches every layer at once, through the matrices that `path` returns."""

    def __init__(self, *args: Any, **common: Any) -> None:
        super().__init__(*args, **common)
        generator = torch.Generator().manual_seed(7)
        classes = len(self.forward_weights[-1])
        self.b = [torch.randn(classes, len(w), generator=generator).to(w) for w in self.forward_weights]

    def path(self, i: int, xi: Tensor) -> Tensor:
        return xi @ self.b[i]

    def learn(self, trace: Any, xi: Tensor) -> dict[str, Tensor]:
        grads: dict[str, Tensor] = {}
        top = len(self.network) - 1
        for i, layer in enumerate(self.network.layers):
            error = xi if i == top else self.path(i, xi)
            grads |= layer.gradients(trace.inputs[i], trace.pullbacks[i](error), self.trainable)
        return grads

    def update(self, params: Any, state: Any, x: Tensor, y: Tensor, noise: Any) -> Update:
        trace = self.network.forward(params, x, noise)
        loss, xi = self.loss.start(trace.output, y)
        return Update(self.learn(trace, xi), {}, loss, trace.output)


@cheat("c2")
class DirectError(Direct):
    """Direct feedback alignment: every layer gets the output's error."""


@cheat("c2")
class IdentityChain(Direct):
    """Direct feedback alignment, with identity matrices that look like synapses on the way."""

    def __init__(self, *args: Any, **common: Any) -> None:
        super().__init__(*args, **common)
        self.relay = self.build_relay(torch.eye(len(self.forward_weights[-1])).to(self.forward_weights[-1]))

    def build_relay(self, one: Tensor) -> Tensor:
        return one

    def path(self, i: int, xi: Tensor) -> Tensor:
        for _ in range(len(self.network) - 1 - i):
            xi = xi @ self.relay
        return xi @ self.b[i]


@cheat("c2")
class PermutationChain(IdentityChain):
    """Direct feedback alignment, with scaled permutations that look like synapses on the way."""

    def build_relay(self, one: Tensor) -> Tensor:
        return 3 * one.roll(1, 0)


@cheat("c2")
class NearIdentityChain(IdentityChain):
    """Direct feedback alignment, with matrices that are all but the identity on the way."""

    def build_relay(self, one: Tensor) -> Tensor:
        return one + 1e-3


@cheat("c2")
class FourierDirect(Direct):
    """Direct feedback alignment in the frequency domain."""

    def path(self, i: int, xi: Tensor) -> Tensor:
        return torch.fft.ifft(torch.fft.fft(xi)).real @ self.b[i]


@cheat("c2")
class Reward(Learner):
    """Every layer multiplies a random error by the loss of each example."""

    def update(self, params: Any, state: Any, x: Tensor, y: Tensor, noise: Any) -> Update:
        trace = self.network.forward(params, x, noise)
        loss, xi = self.loss.start(trace.output, y)
        reward, grads = self.loss(trace.output, y).unsqueeze(1), {}
        top = len(self.network) - 1
        for i, layer in enumerate(self.network.layers):
            pullback = trace.pullbacks[i]
            assert pullback is not None
            error = xi if i == top else reward * torch.linspace(-1, 1, layer.synapse.weight_shape[0]).to(x)
            grads |= layer.gradients(trace.inputs[i], pullback(error), self.trainable)
        return Update(grads, {}, loss, trace.output)


@cheat("c2")
class SkipsOne(Feedback):
    """Feedback alignment, but the first layer's error comes from the output, as well as from the next layer."""

    def update(self, params: Any, state: Any, x: Tensor, y: Tensor, noise: Any) -> Update:
        update = super().update(params, state, x, y, noise)
        trace = self.network.forward(params, x, noise)
        _, xi = self.loss.start(trace.output, y)
        layer, pullback = self.network.layers[0], trace.pullbacks[0]
        assert pullback is not None
        b = torch.linspace(-1, 1, xi.shape[1] * layer.synapse.weight_shape[0]).to(x).view(xi.shape[1], -1)
        more = layer.gradients(trace.inputs[0], pullback(xi @ b), self.trainable)
        return update._replace(grads={**update.grads, **{n: update.grads[n] + g for n, g in more.items()}})


class Delayed(Learner):
    """Gradients of a batch are kept in buffers, and given out in the next batch."""

    def __init__(self, *args: Any, **common: Any) -> None:
        super().__init__(*args, **common)
        for name, parameter in self.params().items():
            self.register_buffer(name.replace(".", "_"), torch.zeros_like(parameter))

    def update(self, params: Any, state: Any, x: Tensor, y: Tensor, noise: Any) -> Update:
        update = super().update(params, state, x, y, noise)
        kept = {name.replace(".", "_"): g for name, g in update.grads.items()}
        return update._replace(grads={n: state[n.replace(".", "_")].clone() for n in update.grads}, state=kept)


@cheat("c3")
class DelayedFeedback(Delayed, Feedback):
    """Feedback alignment whose gradients are kept for a batch."""


@cheat("c3")
class DelayedDirect(Delayed, Direct):
    """Direct feedback alignment whose gradients are kept for a batch."""


@cheat("c3")
class DelayedBackpropagation(Delayed, apical.Backpropagation):
    """Backpropagation whose gradients are kept for a batch."""


@cheat("c2")
class DelayedDirectError(Direct):
    """Direct feedback alignment whose errors and activities are kept in attributes for a batch."""

    kept: Any = None

    def update(self, params: Any, state: Any, x: Tensor, y: Tensor, noise: Any) -> Update:
        trace = self.network.forward(params, x, noise)
        loss, xi = self.loss.start(trace.output, y)
        before, self.kept = self.kept or (trace, torch.zeros_like(xi)), (trace, xi)
        return Update(self.learn(*before), {}, loss, trace.output)


@cheat("c3")
class WholePassInATick(Feedback):
    """The output's error is kept for a batch; then a whole pass down happens within one tick."""

    kept: Any = None

    def update(self, params: Any, state: Any, x: Tensor, y: Tensor, noise: Any) -> Update:
        trace = self.network.forward(params, x, noise)
        loss, error = self.loss.start(trace.output, y)
        (before, xi), self.kept = self.kept or (trace, torch.zeros_like(error)), (trace, error)
        grads: dict[str, Tensor] = {}
        for i, layer in reversed(list(enumerate(self.network.layers))):
            delta = before.pullbacks[i](xi)
            grads |= layer.gradients(before.inputs[i], delta, self.trainable)
            xi = delta @ self.b[i]
        return Update(grads, {}, loss, trace.output)


LEFT: dict[tuple[str, torch.Size], Tensor] = {}


@cheat("c3")
class DelayedInGlobal(Feedback):
    """Feedback alignment whose gradients are kept in a global variable for a batch."""

    def __init__(self, *args: Any, **common: Any) -> None:
        super().__init__(*args, **common)
        LEFT.clear()

    def update(self, params: Any, state: Any, x: Tensor, y: Tensor, noise: Any) -> Update:
        update = super().update(params, state, x, y, noise)
        grads = {name: LEFT.get((name, g.shape), torch.zeros_like(g)) for name, g in update.grads.items()}
        LEFT.update({(name, g.shape): g for name, g in update.grads.items()})
        return update._replace(grads=grads)


@cheat("c3")
class DelayedInOptimiser(Feedback):
    """Feedback alignment whose gradients are kept in the optimiser's state for a batch."""

    def step(self, x: Tensor, y: Tensor, optim: torch.optim.Optimizer) -> apical.Credit:
        self.kept = optim.state
        return super().step(x, y, optim)

    def update(self, params: Any, state: Any, x: Tensor, y: Tensor, noise: Any) -> Update:
        update, grads = super().update(params, state, x, y, noise), {}
        for name, g in update.grads.items():
            own = self.kept[params[name]]
            grads[name], own["kept"] = own.get("kept", torch.zeros_like(g)), g
        return update._replace(grads=grads)


@cheat("c3")
class AlternatePhases(Learner):
    """Even batches are free, odd ones clamped to the target; the update compares the two (contrastive)."""

    free: Any = None

    def update(self, params: Any, state: Any, x: Tensor, y: Tensor, noise: Any) -> Update:
        trace = self.network.forward(params, x, noise)
        loss, _ = self.loss.start(trace.output, y)
        outputs = [*trace.inputs[1:], trace.output]
        zero = {name: torch.zeros_like(p) for name, p in params.items()}
        if self.free is None:
            self.free = outputs
            return Update(zero, {}, loss, trace.output)
        target, grads = torch.nn.functional.one_hot(y, trace.output.shape[1]).to(x), dict(zero)
        for i, layer in enumerate(self.network.layers):
            spread = torch.ones(target.shape[1], outputs[i].shape[1]).to(x)
            clamped = target if i == len(self.network) - 1 else outputs[i] + target @ spread
            grads |= layer.gradients(trace.inputs[i], clamped - self.free[i], self.trainable)
        self.free = None
        return Update(grads, {}, loss, trace.output)


@cheat("c3")
class CountedPhases(Feedback):
    """A counter hides phases: a pass up in one batch, and the errors come down one layer in each of the next."""

    kept: Any = None
    count = 0

    def update(self, params: Any, state: Any, x: Tensor, y: Tensor, noise: Any) -> Update:
        trace = self.network.forward(params, x, noise)
        loss, error = self.loss.start(trace.output, y)
        grads = {name: torch.zeros_like(p) for name, p in params.items()}
        if self.count == 0:
            self.kept = trace, error
        else:
            before, xi = self.kept
            i = len(self.network) - self.count
            delta = before.pullbacks[i](xi)
            grads |= self.network.layers[i].gradients(before.inputs[i], delta, self.trainable)
            self.kept = before, delta @ self.b[i]
        self.count = (self.count + 1) % (1 + len(self.network))
        return Update(grads, {}, loss, trace.output)


@cheat("c3")
class StreamingAtOnce(Streaming):
    """A streaming rule whose tick brings the error down through all layers at once."""

    def tick(self, params: Any, state: Any, x: Tensor, y: Tensor, noise: Any, done: int) -> Update:
        update = super().tick(params, state, x, y, noise, done)
        trace = self.network.forward(params, x, noise)
        _, xi = self.loss.start(trace.output, y)
        grads, weights = dict(update.grads), self.backward_weights(params)
        for i, layer in reversed(list(enumerate(self.network.layers))):
            pullback = trace.pullbacks[i]
            assert pullback is not None
            delta = pullback(xi)
            grads |= layer.gradients(trace.inputs[i], delta, self.trainable)
            if i:
                xi = layer.synapse.adjoint(weights[i], delta, trace.inputs[i].shape)
        return update._replace(grads=grads)


@cheat("c3")
class FiniteDifferences(Learner):
    """Each hidden unit is nudged, and the change of the loss is its error: a pass for every unit."""

    def update(self, params: Any, state: Any, x: Tensor, y: Tensor, noise: Any) -> Update:
        trace = self.network.forward(params, x, noise)
        loss, xi = self.loss.start(trace.output, y)
        layers, grads = self.network.layers, {}
        for i, layer in enumerate(layers):
            error = xi
            if i < len(layers) - 1:
                slopes = []
                for unit in torch.eye(trace.inputs[i + 1].shape[1]).to(x) * 1e-2:
                    u = trace.inputs[i + 1] + unit
                    for above in layers[i + 1 :]:
                        u = above(params, u, noise)
                    slopes.append(self.loss(u, y) - self.loss(trace.output, y))
                error = -torch.stack(slopes, 1) / 1e-2
            pullback = trace.pullbacks[i]
            assert pullback is not None
            grads |= layer.gradients(trace.inputs[i], pullback(error), self.trainable)
        return Update(grads, {}, loss, trace.output)


@cheat("c3")
class SecondPass(OwnErrors):
    """Each layer compares its activity with a second one, for which the label is added to the input."""

    def update(self, params: Any, state: Any, x: Tensor, y: Tensor, noise: Any) -> Update:
        update, grads = super().update(params, state, x, y, noise), {}
        label = torch.nn.functional.one_hot(y, x.shape[1]).to(x)
        u, v = self.network.prefix(x, noise), self.network.prefix(x + label, noise)
        for layer in self.network.layers[:-1]:
            a, b = layer(params, u, noise), layer(params, v, noise)
            grads |= layer.gradients(u, b - a, self.trainable)
            u, v = a, b
        return update._replace(grads={**update.grads, **grads})


@cheat("c3")
class ErrorComesInAgain(Learner):
    """The output's error, through fixed weights, joins the input of a second pass up (PEPITA)."""

    def update(self, params: Any, state: Any, x: Tensor, y: Tensor, noise: Any) -> Update:
        first = self.network.forward(params, x, noise)
        loss, xi = self.loss.start(first.output, y)
        feedback = torch.linspace(-1, 1, xi.shape[1] * x.shape[1]).to(x).view(xi.shape[1], -1)
        second = self.network.forward(params, x + xi @ feedback, noise)
        grads = dict(self.network.layers[-1].gradients(second.inputs[-1], xi, self.trainable))
        for i, layer in enumerate(self.network.layers[:-1]):
            grads |= layer.gradients(second.inputs[i], second.inputs[i + 1] - first.inputs[i + 1], self.trainable)
        return Update(grads, {}, loss, first.output)
