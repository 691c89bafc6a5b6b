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

import torch
from torch import Tensor, nn

from apical.learner import Learner, Update
from apical.network import Layer, Network, Params, Trace, total
from apical.neuron import Noise
from apical.recurrent import Unrolled
from apical.rules import through_time
from apical.rules.way import Carry, Learn, lowest


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
    for tier in reversed(network.tiers):
        if tier.last < bottom:
            break
        deltas = trace.deltas(tier, xi)
        for i, delta in deltas.items():
            grads |= tier.layers[i].gradients(trace.inputs[i], delta, trainable)
        learned = [i for i in deltas if feedback.get(i) in trainable]
        if bottom < tier.first or learned:
            shape = trace.inputs[tier.first].shape
            xi = total([carry(i, delta, shape) for i, delta in deltas.items()])
        for i in learned:
            gradient = learn(i, xi, deltas[i], grads.get(tier.layers[i].weight))
            if gradient is not None:
                grads[feedback[i]] = gradient
        trace.drop(tier)
        del deltas, delta  # else they would live on through the next φ′, where memory peaks
    return grads


def relax(network: Network, trace: Trace, xi: Tensor, carry: Carry, eta: float, sweeps: int) -> list[Tensor]:
    """The paper's iterated errors: all layers at once, ξ_i ← ξ_i + η(−ξ_i + carry of δ_i), from ξ_i = 0.

    u and φ′ keep their forward values, so the errors settle at those of one pass down: for any 0 < η < 2 in the
    limit, and exactly after L−1 sweeps at η = 1, one layer a sweep. Returned is what each layer sends down.
    """
    sent = [torch.zeros_like(u) for u in trace.inputs]
    for _ in range(sweeps):
        settled, above = list(sent), xi
        for tier in reversed(network.tiers[1:]):
            if tier.first not in trace.splits:
                break
            for i, delta in trace.deltas(tier, above).items():
                settled[i] = torch.lerp(sent[i], carry(i, delta, sent[i].shape), eta)
            above = total([sent[i] for i in tier.layers])
        sent = settled
    return sent


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
        weights, layers = self.downward(params), self.network.layers
        return lambda i, delta, shape: layers[i].synapse.adjoint(weights[i], delta, shape)

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
        moments = self.network.moments
        loss, xi = self.loss.start(moments(trace.output), moments(y))
        carry = self.carry(params, trace, xi)
        down = through_time.descend if isinstance(self.network, Unrolled) else descend
        grads = down(self.network, trace, xi, carry, trainable, self.learn, self.kept)
        return Update(grads, {}, loss, trace.output)


def draw_normal(shape: tuple[int, ...], std: float, like: Tensor) -> Tensor:
    """N(0, std²) from the CPU's generator, so that a seed means the same on every device and in every precision.

    Where the shapes agree the result has the memory layout of `like`, too.
    """
    target = torch.empty_like(like) if tuple(like.shape) == shape else like.new_empty(shape)
    return target.detach().copy_(torch.randn(shape) * std)
