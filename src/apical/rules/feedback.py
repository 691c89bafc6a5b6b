"""The backward sweep shared by all feedback rules: carry the error from each layer to the one below.

The target arrives at the output as ξ_L = −∂loss/∂u_L. Then, from the last layer to the first,

    δ_i   = φ′_i(ξ_{i+1})          the error before the activation
    ΔW_i  = outer(u_i, δ_i)        presynaptic activity × postsynaptic error
    ξ_i   = carry(i, δ_i)          the error of the layer below

The rules differ in `carry` only: which weights bring the error down, how they are made and how they change. The
gradients are −Δ. The branches of a `Parallel` form one tier: each branch has its own δ, and the layer below
receives the sum of what they carry.

In a recurrent network the same rules go back through time. Each output has an error ξ^y_t = −∂loss_t/∂o_t. From the
last time step to the first,

    ξ_t = carry(W_y, ξ^y_t) + carry(W_h, δ_{t+1})      the error of the state h_t; no second term at the end
    δ_t = tanh′(ξ_t)                                   the same before tanh

and each layer learns from all time steps in one product:

    ΔW_y = mean ξ^y_t h_tᵀ     ΔW_h = mean δ_t h_{t−1}ᵀ     ΔW_x = mean δ_t x_tᵀ
    Θ_y by ξ^y_t and ξ_t       Θ_h by δ_t and ξ_{t−1}       as the rule's `feedback_gradient` says

The means are over all time steps of the batch. The initial state does not learn: ξ_0 = 0.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from apical.core.activation import Noise
from apical.core.learner import Update
from apical.core.network import Layer, Network, Params, Trace, sum_tensors
from apical.core.recurrent import HIDDEN, INPUT, READOUT, shift_earlier, tanh_derivative
from apical.core.validation import is_number, make_nothing_to_train_error
from apical.errors import ApicalError
from apical.rules.autograd import AutogradRule

Carry = Callable[[int, Tensor, torch.Size], Tensor]
"""(layer, its δ, its input's shape) -> ξ at that layer's input."""


def find_lowest_layer(network: Network, trainable: frozenset[str], feedback: dict[int, str]) -> int:
    """Return the number of the lowest layer at which anything learns: the sweep ends there."""
    for i, layer in enumerate(network.layers):
        if {layer.weight, layer.bias, feedback.get(i)} & trainable:
            return i
    raise make_nothing_to_train_error()


def _go_back_in_time(states: Tensor, arrived: Tensor, carry: Carry, batch: int) -> tuple[list[Tensor], Tensor]:
    """Return ξ_t of each time step and δ_t of all, given the errors that arrived at the states from their outputs."""
    errors: list[Tensor] = []
    deltas: list[Tensor] = []
    for h, own in zip(reversed(states.split(batch)), reversed(arrived.split(batch)), strict=True):
        errors.append(own + carry(HIDDEN, deltas[-1], own.shape) if deltas else own)
        deltas.append(tanh_derivative(h, errors[-1]))
    return errors[::-1], torch.cat(deltas[::-1])


def relax_layers(network: Network, trace: Trace, xi: Tensor, carry: Carry, eta: float, sweeps: int) -> list[Tensor]:
    """Iterate all layers' errors at once, ξ_i ← ξ_i + η(−ξ_i + carry of δ_i), from ξ_i = 0, as in the paper.

    u and φ′ keep their forward values, so the errors settle at those of one sweep down: for any 0 < η < 2 in the
    limit, and exactly after L−1 sweeps at η = 1, one layer per sweep.

    Returns:
        What each layer sends down.
    """
    sent = [torch.zeros_like(u) for u in trace.inputs]
    for _ in range(sweeps):
        settled, above = list(sent), xi
        for tier in reversed(network.tiers[1:]):
            if tier.first not in trace.splits:
                break
            for i, delta in trace.deltas(tier, above).items():
                settled[i] = torch.lerp(sent[i], carry(i, delta, sent[i].shape), eta)
            above = sum_tensors([sent[i] for i in tier.layers])
        sent = settled
    return sent


def relax_time(trace: Trace, xi: Tensor, carry: Carry, eta: float, sweeps: int) -> Tensor:
    """Iterate the errors of all time steps at once, ξ_t ← ξ_t + η(−ξ_t + all that is carried to it), from ξ_t = 0.

    They settle at those of one sweep back in time: for any 0 < η < 2 in the limit, and exactly after as many sweeps
    as there are time steps at η = 1.
    """
    states, batch = trace.inputs[READOUT], len(trace.output)
    own = carry(READOUT, xi, states.shape)
    errors = torch.zeros_like(own)
    for _ in range(sweeps):
        arriving = own + shift_earlier(carry(HIDDEN, tanh_derivative(states, errors), states.shape), batch)
        errors = torch.lerp(errors, arriving, eta)
    return errors


class FeedbackRule(AutogradRule):
    """A rule that carries the output's error down, layer by layer, through `backward_weights(params)`.

    Feedback weights that a rule stores are parameters `feedback.i`, one for each layer but the first (or the first
    tier). Fixed ones have `requires_grad=False`: they are saved and moved with the learner but never trained.
    """

    PARALLEL = True

    def add_feedback_weights(self, draw: Callable[[int, Layer, Tensor], Tensor], learns: bool) -> None:
        """Create the feedback weights. `draw` gets a layer's number, the layer and its W."""
        self.feedback = nn.ParameterDict()
        for i, layer in self.network.upper.items():
            w = self.get_parameter(layer.weight)
            self.feedback[str(i)] = nn.Parameter(draw(i, layer, w), requires_grad=learns)

    @property
    def feedback_names(self) -> dict[int, str]:
        """Names of the stored feedback weights, by layer."""
        return {int(i): f"feedback.{i}" for i in getattr(self, "feedback", {})}

    def backward_weights(self, params: Params) -> dict[int, Tensor]:
        """Return the weights that carry the error to each layer's input, by layer."""
        return {i: params[name] for i, name in self.feedback_names.items()}

    def carry(self, params: Params, trace: Trace, xi: Tensor) -> Carry:
        """Return the function that carries an error down one layer."""
        weights, layers = self.backward_weights(params), self.network.layers
        return lambda i, delta, shape: layers[i].synapse.adjoint(weights[i], delta, shape)

    def feedback_gradient(self, i: int, xi: Tensor, delta: Tensor, grad: Tensor | None) -> Tensor | None:
        """Return the gradient of layer i's feedback weights; None if they do not learn."""
        return None

    @property
    def feedback_weights(self) -> list[Tensor | None]:
        weights = self.backward_weights(self.params())
        found = self.carrier.found if self.transport is not None else {}
        return [
            weights.get(i) if found.get(layer.weight, True) else None for i, layer in enumerate(self.network.layers)
        ]

    def update(self, params: Params, state: Params, x: Tensor, y: Tensor, noise: Noise) -> Update:
        if self.network.is_general:
            return self.update_by_autograd(params, state, x, y, noise)
        network, trainable = self.network, self.trainable
        bottom = find_lowest_layer(network, trainable, self.feedback_names)
        trace = network.forward(params, x, noise, bottom)
        loss, xi = self.loss.start(network.flatten_time(trace.output), network.flatten_time(y))
        sweep = self.sweep_time if network.recurrent else self.sweep_layers
        grads = sweep(trace, xi, self.carry(params, trace, xi), trainable, bottom)
        return Update(grads, {}, loss, trace.output)

    def sweep_layers(
        self, trace: Trace, xi: Tensor, carry: Carry, trainable: frozenset[str], bottom: int
    ) -> dict[str, Tensor]:
        """Carry the output's error ξ down to the layer `bottom` and return all gradients by name."""
        grads: dict[str, Tensor] = {}
        feedback = self.feedback_names
        for tier in reversed(self.network.tiers):
            if tier.last < bottom:
                break
            deltas = trace.deltas(tier, xi)
            grads |= self.network.gradients(trace.inputs, deltas, trainable)
            learning = [i for i in deltas if feedback.get(i) in trainable]
            if bottom < tier.first or learning:
                shape = trace.inputs[tier.first].shape
                xi = sum_tensors([carry(i, delta, shape) for i, delta in deltas.items()])
            self.add_feedback_gradients(grads, dict.fromkeys(learning, xi), deltas)
            trace.drop(tier)
            del deltas  # else they would live through the next φ′, where memory peaks
        return grads

    def sweep_time(
        self, trace: Trace, xi: Tensor, carry: Carry, trainable: frozenset[str], bottom: int
    ) -> dict[str, Tensor]:
        """Carry the outputs' errors ξ back through time and return all gradients by name."""
        after, batch = trace.inputs[READOUT], len(trace.output)
        self.network.layers[READOUT].neuron.note(xi=xi)
        deltas, errors, feedback = {READOUT: xi}, {}, self.feedback_names
        if bottom < READOUT or feedback.get(READOUT) in trainable:
            each, delta = _go_back_in_time(after, carry(READOUT, xi, after.shape), carry, batch)
            deltas |= {INPUT: delta, HIDDEN: delta}
            if self.network.layers[HIDDEN].neuron.record is not None:
                for i in (INPUT, HIDDEN):
                    self.network.layers[i].neuron.note(xi=torch.cat(each))
            learning = [i for i in (HIDDEN, READOUT) if feedback.get(i) in trainable]
            if learning:
                joined = torch.cat([torch.zeros_like(each[0]), *each])
                shifted = {HIDDEN: joined[:-batch], READOUT: joined[batch:]}
                errors = {i: shifted[i] for i in learning}
        grads = self.network.gradients(trace.inputs, deltas, trainable)
        self.add_feedback_gradients(grads, errors, deltas)
        return grads

    def add_feedback_gradients(
        self, grads: dict[str, Tensor], errors: dict[int, Tensor], deltas: dict[int, Tensor]
    ) -> None:
        """Add the gradients of the feedback weights of the layers that have an error ξ at their input."""
        for i, xi in errors.items():
            gradient = self.feedback_gradient(i, xi, deltas[i], grads.get(self.network.layers[i].weight))
            if gradient is not None:
                grads[f"feedback.{i}"] = gradient


def choose_decay(decay: float | None, is_kolen_pollack: bool, option: str) -> float:
    """Return Kolen-Pollack's decay λ, 1e-4 by default; 0 for the other values of this option, which take none."""
    if decay is not None and not (is_kolen_pollack and is_number(decay) and decay >= 0):
        raise ApicalError(f"decay is {decay!r}; it belongs to {option}='kolen-pollack' and must not be negative.")
    return (1e-4 if is_kolen_pollack else 0.0) if decay is None else decay


def draw_normal(shape: tuple[int, ...], std: float, like: Tensor) -> Tensor:
    """Draw N(0, std²) from the CPU's generator, so that a seed means the same on every device and in every precision.

    If the shapes agree, the result also has the memory layout of `like`.
    """
    target = torch.empty_like(like) if tuple(like.shape) == shape else like.new_empty(shape)
    return target.detach().copy_(torch.randn(shape) * std)
