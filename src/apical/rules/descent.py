"""The way down that the whole feedback family shares.

The target arrives at the output as ξ_L = −∂loss/∂u_L. Then, from the last layer to the first,

    δ_i   = φ′_i(ξ_{i+1})          the error before the neuron function
    ΔW_i  = outer(u_i, δ_i)        presynaptic activity × postsynaptic error
    ξ_i   = carry(i, δ_i)          the error of the layer below

and the rules differ in `carry` alone: which weights bring the error down, and how those weights come about and
change. The gradients written are −Δ. The branches of a `Parallel` go down together, as one tier: each has a δ of its
own, and the layer below has one ξ, the sum of what they carry.
"""

from collections.abc import Callable
from itertools import compress

import torch
from torch import Tensor, nn

from apical.checks import nothing_to_train
from apical.learner import Learner, Update
from apical.network import Layer, Network, Params, Trace
from apical.neuron import Noise

Carry = Callable[[int, list[Tensor], torch.Size], Tensor]
"""(tier, δ of each of its layers, its input's shape) -> ξ at the tier's input."""
Learn = Callable[[int, Tensor, Tensor, Tensor | None], Tensor | None]
"""(layer, ξ at its input, its δ, W's gradient) -> the gradient of the layer's feedback weights."""


def descend(
    network: Network,
    trace: Trace,
    xi: Tensor,
    carry: Carry,
    trainable: frozenset[str],
    learn: Learn,
    feedback: dict[int, str],
) -> dict[str, Tensor]:
    """All gradients, by name. `feedback` names the feedback weights that `learn` gives a gradient to."""
    grads: dict[str, Tensor] = {}
    bottom = lowest(network, trainable, feedback)
    for t in range(len(network.tiers) - 1, bottom - 1, -1):
        layers = network.tiers[t].layers
        u, pullback = trace.pop()
        deltas = pullback(xi)
        for layer, delta in zip(layers.values(), deltas, strict=True):
            grads |= layer.gradients(u, delta, trainable)
        learns = [feedback.get(i) in trainable for i in layers]
        if t > bottom or any(learns):
            xi = carry(t, deltas, u.shape)
        for i, delta in compress(zip(layers, deltas, strict=True), learns):
            gradient = learn(i, xi, delta, grads.get(layers[i].weight))
            if gradient is not None:
                grads[feedback[i]] = gradient
        del u, pullback, deltas, delta  # else they would live on through the next φ′, where memory peaks
    return grads


def lowest(network: Network, trainable: frozenset[str], feedback: dict[int, str]) -> int:
    """The lowest tier at which anything learns: the way down ends there."""
    for t, tier in enumerate(network.tiers):
        if any({layer.weight, layer.bias, feedback.get(i)} & trainable for i, layer in tier.layers.items()):
            return t
    raise nothing_to_train()


def relax(network: Network, trace: Trace, xi: Tensor, carry: Carry, eta: float, sweeps: int) -> list[Tensor]:
    """The paper's iterated errors: all layers at once, ξ_i ← ξ_i + η(−ξ_i + carry of δ_i), from ξ_i = 0.

    u and φ′ keep their forward values, so the errors settle at those of one pass down: for any 0 < η < 2 in the
    limit, and exactly after L−1 sweeps at η = 1, one layer a sweep.
    """
    errors = [torch.zeros_like(u) for u in trace.inputs] + [xi]
    for _ in range(sweeps):
        settled = list(errors)
        for t in range(1, len(network.tiers)):
            pullback = trace.pullbacks[t]
            if pullback is not None:
                down = carry(t, pullback(errors[t + 1]), errors[t].shape)
                settled[t] = torch.lerp(errors[t], down, eta)
        errors = settled
    return errors


class FeedbackRule(Learner):
    """A rule that sends the output's error down, layer by layer, through `downward(params)`.

    Feedback weights that a rule keeps are parameters `feedback.i`, one for each layer but the first (or those of the
    first tier); fixed ones have `requires_grad=False`: they are saved and moved with the learner but never trained.
    """

    PARALLEL = True

    def keep(self, draw: Callable[[int, Layer, Tensor], Tensor], learns: bool) -> None:
        """Make them: `draw` gets a layer's number, the layer and its W."""
        self.feedback = nn.ParameterDict(
            {
                str(i): nn.Parameter(draw(i, layer, self.get_parameter(layer.weight)), requires_grad=learns)
                for i, layer in self.network.upper.items()
            }
        )

    @property
    def kept(self) -> dict[int, str]:
        """Names of the feedback weights that the learner keeps, by layer."""
        store = getattr(self, "feedback", {})
        return {int(i): f"feedback.{i}" for i in store}

    def downward(self, params: Params) -> dict[int, Tensor]:
        """The weights that bring the error to each layer's input."""
        return {i: params[name] for i, name in self.kept.items()}

    def carry(self, params: Params, trace: Trace, xi: Tensor) -> Carry:
        """How an error goes down one layer."""
        weights, tiers = self.downward(params), self.network.tiers
        return lambda t, deltas, shape: tiers[t].adjoint(weights, deltas, shape)

    def learn(self, i: int, xi: Tensor, delta: Tensor, grad: Tensor | None) -> Tensor | None:
        """The gradient of the feedback weights, for rules whose feedback learns."""
        return None

    @property
    def feedback_weights(self) -> list[Tensor | None]:
        weights = self.downward(self.params())
        return [weights.get(i) for i in range(len(self.network))]

    def update(self, params: Params, state: Params, x: Tensor, y: Tensor, noise: Noise) -> Update:
        trainable = self.trainable
        bottom = lowest(self.network, trainable, self.kept)
        trace = self.network.forward(params, x, noise, bottom)
        loss, xi = self.loss.start(trace.output, y)
        carry = self.carry(params, trace, xi)
        grads = descend(self.network, trace, xi, carry, trainable, self.learn, self.kept)
        return Update(grads, {}, loss, trace.output)


def draw_normal(shape: tuple[int, ...], std: float, like: Tensor) -> Tensor:
    """N(0, std²) from the CPU's generator, so that a seed means the same on every device and in every precision.

    Where the shapes agree the result has the memory layout of `like`, too.
    """
    target = torch.empty_like(like) if tuple(like.shape) == shape else like.new_empty(shape)
    return target.detach().copy_(torch.randn(shape) * std)
