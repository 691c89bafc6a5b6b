"""The way down of the feedback family in a recurrent network: the same rules, unrolled in time.

The target arrives at every output as ξ^y_t = −∂loss_t/∂o_t. A state hears from its own output and, through the
recurrent weights, from the next state; from the last moment to the first,

    ξ_t = carry(W_y, ξ^y_t) + carry(W_h, δ_{t+1})      the error of the state h_t, with no second term at the end
    δ_t = tanh′(ξ_t)                                   the same before tanh, at the sensory state

and each layer learns from its own two ends, all moments in one product:

    ΔW_y = mean ξ^y_t h_tᵀ     ΔW_h = mean δ_t h_{t−1}ᵀ     ΔW_x = mean δ_t x_tᵀ
    Θ_y by ξ^y_t and ξ_t       Θ_h by δ_t and ξ_{t−1}       as the rule's `learn` says

The means are over all moments of the batch. No error reaches the initial state, which nobody learns: ξ_0 = 0.
"""

import torch
from torch import Tensor

from apical.network import Network, Trace
from apical.recurrent import HIDDEN, INPUT, READOUT, derivative, earlier
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
    """All gradients, by name: `descent.descend` for an Elman network."""
    after, batch = trace.inputs[READOUT], len(trace.output)
    deltas, errors = {READOUT: xi}, {}
    learned = [i for i in (HIDDEN, READOUT) if feedback.get(i) in trainable]
    if learned or lowest(network, trainable, feedback) < READOUT:
        each, delta = _back_in_time(after, carry(READOUT, xi, after.shape), carry, batch)
        deltas |= {INPUT: delta, HIDDEN: delta}
        if learned:
            joined = torch.cat([torch.zeros_like(each[0]), *each])
            errors = {HIDDEN: joined[:-batch], READOUT: joined[batch:]}
    grads: dict[str, Tensor] = {}
    for i, delta in deltas.items():
        grads |= network.layers[i].gradients(trace.inputs[i], delta, trainable)
    for i in learned:
        gradient = learn(i, errors[i], deltas[i], grads.get(network.layers[i].weight))
        if gradient is not None:
            grads[feedback[i]] = gradient
    return grads


def _back_in_time(states: Tensor, arrived: Tensor, carry: Carry, batch: int) -> tuple[list[Tensor], Tensor]:
    """Each moment's ξ_t, and δ_t of all moments, from what arrived at the states from their own outputs."""
    errors: list[Tensor] = []
    deltas: list[Tensor] = []
    for h, own in zip(reversed(states.split(batch)), reversed(arrived.split(batch)), strict=True):
        errors.append(own + carry(HIDDEN, deltas[-1], own.shape) if deltas else own)
        deltas.append(derivative(h, errors[-1]))
    return errors[::-1], torch.cat(deltas[::-1])


def relax(network: Network, trace: Trace, xi: Tensor, carry: Carry, eta: float, sweeps: int) -> Tensor:
    """The paper's iterated errors: all moments at once, ξ_t ← ξ_t + η(−ξ_t + all that is carried to it), from 0.

    They settle at those of one pass back in time: for any 0 < η < 2 in the limit, and exactly after as many sweeps
    as there are moments at η = 1.
    """
    states, batch = trace.inputs[READOUT], len(trace.output)
    own = carry(READOUT, xi, states.shape)
    errors = torch.zeros_like(own)
    for _ in range(sweeps):
        down = own + earlier(carry(HIDDEN, derivative(states, errors), states.shape), batch)
        errors = torch.lerp(errors, down, eta)
    return errors
