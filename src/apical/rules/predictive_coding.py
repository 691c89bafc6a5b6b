"""Predictive coding: activities settle in an energy of local prediction errors, and the weights descend it.

Layer i predicts the activity of the next, μ_{i+1} = φ_i(W_i u_i + b_i), and errs by ε_{i+1} = u_{i+1} − μ_{i+1}. The
input u_0 is clamped. The last layer's prediction is the network's output and has the loss as its error term, so
that for one example

    F = Σ_i ½‖ε_i‖² over the hidden activities u_1 … u_{L−1}   +   loss(μ_L, y)

(with ½ squared error this is the textbook's energy with the output clamped to the target). With ε_L = −∂loss/∂μ_L
and δ_i = φ′_i(ε_{i+1}), F falls along

    Δu_i = −∂F/∂u_i = −ε_i + W_iᵀ δ_i        towards the own prediction, and to what the next layer lacks
    ΔW_i = −∂F/∂W_i = mean δ_i u_iᵀ          pre × post, averaged over the batch

Activities start at the forward pass, where every hidden ε is 0, and all move at once: an error reaches one layer
further down with each sweep. What it has not reached is exactly 0 and is not computed.
"""

from functools import partial
from typing import Any, NamedTuple, Self

from torch import Tensor

from apical.core.activation import Noise, Pullback
from apical.core.learner import Claims, Learner, Phase, Update
from apical.core.network import Network, Params, Trace
from apical.core.recurrent import HIDDEN, READOUT, RecurrentNetwork, earlier, later, nothing, pullback_at
from apical.core.validation import require_one_of, require_positive
from apical.errors import ApicalError
from apical.rules.feedback import find_lowest_layer


class Point(NamedTuple):
    """Activities u_0 … u_{L−1}, what is predicted of them and of the output (μ), each layer's φ′, and ε_L."""

    u: list[Tensor]
    mu: list[Tensor]
    pullbacks: list[Pullback | None]
    top: Tensor

    @classmethod
    def begin(cls, network: Network, params: Params, trace: Trace, top: Tensor) -> Self:
        """The forward pass, where every activity is as predicted."""
        return cls(trace.inputs, [*trace.inputs, trace.output], trace.pullbacks, top)

    def error(self, i: int) -> Tensor:
        """What layer i's prediction lacks, after its φ."""
        return self.top if i == len(self.u) - 1 else self.u[i + 1] - self.mu[i + 1]

    def deltas(self, low: int) -> dict[int, Tensor]:
        """δ_i of the layers from `low` up: each one's prediction error, before its φ."""
        pulled = {}
        for i in range(low, len(self.u)):
            pullback = self.pullbacks[i]
            assert pullback is not None
            pulled[i] = pullback(self.error(i))
        return pulled

    def moved(self, network: Network, params: Params, deltas: dict[int, Tensor], rate: float) -> Self:
        """One sweep: u_i + rate · Δu_i wherever there is a δ_i; the input stays."""
        u = list(self.u)
        for i, delta in deltas.items():
            if i > 0:
                layer = network.layers[i]
                down = layer.synapse.adjoint(params[layer.weight], delta, u[i].shape)
                u[i] = u[i].lerp(self.mu[i] + down, rate)
        return self._replace(u=u)

    def predicted(self, network: Network, params: Params, noise: Noise, low: int) -> Self:
        """The same activities, with the predictions of the layers from `low` up made anew."""
        mu, pullbacks = list(self.mu), list(self.pullbacks)
        for i, layer in enumerate(network.layers[low:], start=low):
            mu[i + 1], pullbacks[i] = layer.neuron.vjp(layer.forward(params, self.u[i]), noise)
        return self._replace(mu=mu, pullbacks=pullbacks)


class Course(Point):
    """The same in a recurrent network, where all states h_1 … h_T move at once and each one predicts the next:

        μ_t = tanh(W_x x_t + b_x + W_h h_{t−1} + b_h),   ε_t = h_t − μ_t
        Δh_t = −ε_t + W_yᵀ ε^y_t + W_hᵀ δ_{t+1}

    u are x, the states before the moments and those after them; μ are x, the drive that x gives, the states' μ and
    the output's. No sweep has a loop over time.
    """

    @classmethod
    def begin(cls, network: Network, params: Params, trace: Trace, top: Tensor) -> Self:
        assert isinstance(network, RecurrentNetwork)
        x, _, after = trace.inputs
        return cls(trace.inputs, [x, network.drive(params, x), after, trace.output], trace.pullbacks, top)

    def error(self, i: int) -> Tensor:
        return self.top if i == READOUT else self.u[READOUT] - self.mu[READOUT]

    def moved(self, network: Network, params: Params, deltas: dict[int, Tensor], rate: float) -> Self:
        """One sweep of all states; before the first one, no state errs and so none has anything to tell another."""
        x, _, after = self.u
        batch = len(self.mu[-1])
        towards = self.mu[READOUT]
        for i, delta in deltas.items():
            if i > 0:
                layer = network.layers[i]
                down = layer.synapse.adjoint(params[layer.weight], delta, after.shape)
                towards = towards + (down if i == READOUT else earlier(down, batch))
        after = after.lerp(towards, rate)
        return self._replace(u=[x, later(after, batch), after])

    def predicted(self, network: Network, params: Params, noise: Noise, low: int) -> Self:
        """All predictions made anew but, from `low` = 1 up, the drive that the clamped input gives."""
        assert isinstance(network, RecurrentNetwork)
        x, before, after = self.u
        _, hidden, readout = network.layers
        drive = network.drive(params, x) if low == 0 else self.mu[HIDDEN]
        states = (drive + hidden.synapse.forward(params[hidden.weight], before)).tanh()
        output = network.sequences(readout.forward(params, after), len(self.mu[-1]))
        pullback = pullback_at(states)
        return self._replace(mu=[x, drive, states, output], pullbacks=[pullback, pullback, nothing])


def gradients(
    network: Network, u: list[Tensor], deltas: dict[int, Tensor], trainable: frozenset[str]
) -> dict[str, Tensor]:
    """∂F/∂W_i = −mean δ_i u_iᵀ, and the biases', wherever there is a δ_i."""
    grads: dict[str, Tensor] = {}
    for i, delta in deltas.items():
        grads |= network.layers[i].gradients(u[i], delta, trainable)
    return grads


class Inference(Learner):
    """What the two rules share: their options, and the way from activities to predictions."""

    RECURRENT = True

    def __init__(self, *args: Any, sweeps: int | None, rate: float | None, **common: Any) -> None:
        super().__init__(*args, **common)
        require_positive(rate=rate)
        whole = isinstance(sweeps, int) and not isinstance(sweeps, bool)
        fewest = max(1, self.fewest)
        if sweeps is not None and (not whole or sweeps < fewest):
            raise ApicalError(
                f"sweeps is {sweeps!r}, but must be a whole number of at least {fewest}: an error comes down one layer "
                f"a sweep, and {self.NAME!r} needs that many for it to reach the first of {len(self.network)} layers."
            )
        # With steps of 0.1 recurrent networks learned neither characters nor time series.
        self.rate = (0.01 if self.network.recurrent else 0.1) if rate is None else rate
        self.sweeps = max(8, fewest) if sweeps is None else sweeps

    @property
    def levels(self) -> int:
        """How many layers an error goes through, one a sweep: those of x_t and h_{t−1} stand side by side."""
        return len(self.network) - self.network.recurrent

    @property
    def fewest(self) -> int:
        """How many sweeps bring an error to the first layer."""
        return self.levels - 1

    def low(self, t: int) -> int:
        """The lowest layer that an error has reached after t sweeps."""
        return len(self.network) - 1 - t if t < self.levels - 1 else 0

    @property
    def feedback_weights(self) -> list[Tensor | None]:
        return [None, *self.forward_weights[1:]]

    @property
    def point(self) -> type[Point]:
        return Course if self.network.recurrent else Point

    def start(self, params: Params, x: Tensor, y: Tensor, noise: Noise, low: int = 0) -> tuple[Point, Tensor]:
        """The forward pass as a point, with φ′ for the layers from `low` up, and its mean loss."""
        trace = self.network.forward(params, x, noise, low)
        loss, top = self.loss.start(self.network.moments(trace.output), self.network.moments(y))
        return self.point.begin(self.network, params, trace, top), loss

    def look(self, params: Params, point: Point, y: Tensor, noise: Noise, low: int) -> Point:
        """The same activities, with the predictions of the layers from `low` up, and the output's error, made anew."""
        anew, moments = point.predicted(self.network, params, noise, low), self.network.moments
        return anew._replace(top=self.loss.error(moments(anew.mu[-1]), moments(y))[1])


class PredictiveCoding(Inference):
    """Activities settle for `sweeps` steps of size `rate` with the weights held, then W descends F once:

        u_i ← u_i + rate · (W_iᵀ δ_i − ε_i)      `sweeps` times, all layers at once
        ΔW_i = mean δ_i u_iᵀ                     where the activities stand then

    `inference="full"` makes all predictions anew at every sweep. `"fixed"` (the fixed prediction assumption) keeps
    predictions, φ′ and presynaptic activities at the forward pass, so that the errors alone relax. By default
    full takes 8 sweeps (more where there are more layers) of 0.1, in recurrent networks of 0.01; fixed L−1 of 1.
    Steps below 2/λ, λ the largest curvature of F in the activities, cannot raise F; with identity φ, λ is at most
    (1 + ‖W‖)².

    Laws: fixed with rate 1 and at least L−1 sweeps equals `bp`; full, with identity φ and rate < 2/λ, settles at
    the solution of the linear system ∂F/∂u = 0, F never rising; W's gradient is autograd's of F, averaged over
    the batch, at the settled activities.

    >>> import torch
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Tanh(), torch.nn.Linear(3, 2))
    >>> x, y = torch.randn(8, 4), torch.randint(0, 2, (8,))
    >>> _ = PredictiveCoding(model, inference="fixed").credit(x, y)
    >>> (expected,) = torch.autograd.grad(torch.nn.functional.cross_entropy(model(x), y), [model[0].weight])
    >>> torch.allclose(model[0].weight.grad, expected, atol=1e-6)
    True
    """

    NAME = "pc"
    TITLE = "Predictive coding"
    SOURCE = (
        "Whittington & Bogacz 2017, An approximation of the error backpropagation algorithm in a predictive coding "
        "network with local Hebbian synaptic plasticity; fixed: Millidge, Tschantz & Buckley 2022, Predictive coding "
        "approximates backprop along arbitrary computation graphs"
    )
    FEEDBACK = "the forward weights W themselves, transposed, at every sweep"
    CLAIMS = Claims(c1=False, c2=True, c3=False)
    VARIANT = "inference"
    VARIANTS = ("full", "fixed")

    def __init__(
        self,
        *args: Any,
        inference: str = "full",
        sweeps: int | None = None,
        rate: float | None = None,
        **common: Any,
    ) -> None:
        require_one_of(self.VARIANTS, inference=inference)
        full = inference == "full"
        super().__init__(*args, sweeps=sweeps, rate=1.0 if rate is None and not full else rate, **common)
        if not full and self.rate >= 2:
            raise ApicalError(f"rate is {rate!r}, but with inference='fixed' errors settle below 2 alone.")
        self.inference = inference
        if sweeps is None and not full:
            self.sweeps = self.fewest
        self.through = sweeps is None and not full and self.network.recurrent
        """Whether errors go back through all moments of a sequence, one a sweep, however long it is."""

    def settle(self, params: Params, start: Point, y: Tensor, noise: Noise, sweeps: int) -> Point:
        """The point after this many sweeps, the weights held: μ_1, which the clamped input predicts, stays."""
        point = start
        for t in range(sweeps):
            low = max(1, self.low(t))
            point = point.moved(self.network, params, point.deltas(low), self.rate)
            if self.inference == "full":
                point = self.look(params, point, y, noise, low)
        return point

    def update(self, params: Params, state: Params, x: Tensor, y: Tensor, noise: Noise) -> Update:
        bottom = find_lowest_layer(self.network, self.trainable, {})
        start, loss = self.start(params, x, y, noise)
        point = self.settle(params, start, y, noise, x.shape[1] if self.through else self.sweeps)
        before = point.u if self.inference == "full" else start.u
        grads = gradients(self.network, before, point.deltas(bottom), self.trainable)
        return Update(grads, {}, loss, start.mu[-1])


class IncrementalPredictiveCoding(Inference):
    """Activities and weights move together: `sweeps` times per batch, from the forward pass on,

        u_i ← u_i + rate · (W_iᵀ δ_i − ε_i)      and, in the same moment, the optimiser steps by
        ΔW_i = mean δ_i u_iᵀ                     both with the ε and δ of the present u and W

    so there is no phase in which one waits for the other. A layer that no error has reached yet keeps its weights:
    its parameters have no gradient in that sweep (not a zero one, which Adam's momentum would step on). The loss
    and the output reported are those of the forward pass. `rate` is 0.1, in recurrent networks 0.01,
    and `sweeps` 8 (more where there are more layers) unless given.

    Laws: on a two-layer network two sweeps equal the ones worked out by hand; with a weight step of zero every
    sweep's gradient equals that of `pc` after as many sweeps as went before it.
    """

    NAME = "ipc"
    TITLE = "Incremental predictive coding"
    SOURCE = "Salvatori et al. 2024, A stable, fast, and fully automatic learning algorithm for predictive coding networks"
    FEEDBACK = "the forward weights W themselves, transposed, at every sweep"

    def __init__(
        self, *args: Any, sweeps: int | None = None, rate: float | None = None, **common: Any
    ) -> None:
        super().__init__(*args, sweeps=sweeps, rate=rate, **common)

    @property
    def fewest(self) -> int:
        return self.levels

    @property
    def phases(self) -> tuple[Phase, ...]:
        return tuple(partial(self.sweep, t) for t in range(self.sweeps))

    def sweep(self, t: int, params: Params, state: Params, x: Tensor, y: Tensor, noise: Noise) -> Update:
        """Sweep t: activities come in the state as `u.i`, with the forward pass's loss and output."""
        network, last = self.network, len(self.network) - 1
        find_lowest_layer(network, self.trainable, {})  # refuses where there is none
        low = self.low(t)
        if t == 0:
            point, loss = self.start(params, x, y, noise, low)
            output = point.mu[-1]
        else:
            loss, output = state["loss"], state["output"]
            u = [network.prefix(x, noise), *(state[f"u.{i}"] for i in range(1, last + 1))]
            held = self.point(u, [*u, output], [None] * len(u), output)  # below `low` u is what is predicted
            point = self.look(params, held, y, noise, low)
        deltas = point.deltas(low)
        grads = gradients(network, point.u, deltas, self.trainable)
        u = point.moved(network, params, deltas, self.rate).u if t + 1 < self.sweeps else point.u
        handed = {f"u.{i}": u[i] for i in range(1, last + 1)}
        return Update(grads, {**handed, "loss": loss, "output": output}, loss, output)
