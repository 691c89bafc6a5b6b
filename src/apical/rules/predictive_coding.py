"""Predictive coding: activities settle to reduce an energy of local prediction errors, and the weights descend it.

Layer i predicts the activity of the next, μ_{i+1} = φ_i(W_i u_i + b_i), and errs by ε_{i+1} = u_{i+1} − μ_{i+1}. The
input u_0 is clamped. The last layer's prediction is the network's output and has the loss as its error term, so
that for one example

    F = Σ_i ½‖ε_i‖² over the hidden activities u_1 … u_{L−1}   +   loss(μ_L, y)

(with half the squared error this is the textbook's energy with the output clamped to the target). With
ε_L = −∂loss/∂μ_L and δ_i = φ′_i(ε_{i+1}), the directions that decrease F are

    Δu_i = −∂F/∂u_i = −ε_i + W_iᵀ δ_i        towards its own prediction, and towards a smaller error above
    ΔW_i = −∂F/∂W_i = mean δ_i u_iᵀ          pre × post, averaged over the batch

Activities start at the forward pass, where every hidden ε is 0, and all change at once: with each sweep the error
reaches one more layer. Below that, all errors are exactly 0 and are not computed.
"""

from functools import partial
from typing import NamedTuple, Self

from torch import Tensor, nn

from apical.core.activation import Noise, Pullback
from apical.core.learner import Claims, Learner, Phase, Update
from apical.core.losses import LossFunction
from apical.core.network import Network, Params, Trace
from apical.core.recurrent import HIDDEN, READOUT, Elman, make_pullbacks, note_drive, shift_earlier, shift_later
from apical.core.validation import require_one_of, require_positive
from apical.errors import ApicalError, check_whole_number
from apical.rules.feedback import find_lowest_layer


class Activities(NamedTuple):
    """Activities u_0 … u_{L−1}, the predictions μ of them and of the output, each layer's φ′, and the output's error ε_L."""

    u: list[Tensor]
    mu: list[Tensor]
    pullbacks: list[Pullback | None]
    output_error: Tensor

    @classmethod
    def from_forward_pass(cls, network: Network, params: Params, trace: Trace, output_error: Tensor) -> Self:
        """Create the activities of a forward pass, where every activity equals its prediction."""
        return cls(trace.inputs, [*trace.inputs, trace.output], trace.pullbacks, output_error)

    def error(self, i: int) -> Tensor:
        """Return the error ε_{i+1} of layer i's prediction, after its φ."""
        return self.output_error if i == len(self.u) - 1 else self.u[i + 1] - self.mu[i + 1]

    def deltas(self, lowest: int) -> dict[int, Tensor]:
        """Return δ_i, the prediction error before φ, of the layers from `lowest` up."""
        pulled = {}
        for i in range(lowest, len(self.u)):
            pullback = self.pullbacks[i]
            assert pullback is not None
            pulled[i] = pullback(self.error(i))
        return pulled

    def relax(self, network: Network, params: Params, deltas: dict[int, Tensor], rate: float) -> Self:
        """Do one sweep: u_i + rate · Δu_i for each layer that has a δ_i. The input does not change."""
        u = list(self.u)
        for i, delta in deltas.items():
            if i > 0:
                layer = network.layers[i]
                feedback = layer.synapse.adjoint(params[layer.weight], delta, u[i].shape)
                u[i] = u[i].lerp(self.mu[i] + feedback, rate)
        return self._replace(u=u)

    def recompute_predictions(self, network: Network, params: Params, noise: Noise, lowest: int) -> Self:
        """Return the same activities with new predictions by the layers from `lowest` up."""
        mu, pullbacks = list(self.mu), list(self.pullbacks)
        for i, layer in enumerate(network.layers[lowest:], start=lowest):
            mu[i + 1], pullbacks[i] = layer.vjp(params, self.u[i], noise)
        return self._replace(mu=mu, pullbacks=pullbacks)


class RecurrentActivities(Activities):
    """Activities of a recurrent network: all states h_1 … h_T change at once, and each one predicts the next:

        μ_t = tanh(W_x x_t + b_x + W_h h_{t−1} + b_h),   ε_t = h_t − μ_t
        Δh_t = −ε_t + W_yᵀ ε^y_t + W_hᵀ δ_{t+1}

    u holds x and the states before and after each time step. μ holds x, the drive from x, the predicted states and the
    output. No sweep has a loop over time.
    """

    @classmethod
    def from_forward_pass(cls, network: Network, params: Params, trace: Trace, output_error: Tensor) -> Self:
        x, _, after = trace.inputs
        mu = [x, network.compute_input_drive(params, x), after, trace.output]
        return cls(trace.inputs, mu, trace.pullbacks, output_error)

    def error(self, i: int) -> Tensor:
        return self.output_error if i == READOUT else self.u[READOUT] - self.mu[READOUT]

    def relax(self, network: Network, params: Params, deltas: dict[int, Tensor], rate: float) -> Self:
        """Do one sweep of all states. In the first one the states have no errors yet, only the outputs have."""
        x, _, after = self.u
        batch, wanted = len(self.mu[-1]), self.mu[READOUT]
        for i, delta in deltas.items():
            if i > 0:
                layer = network.layers[i]
                feedback = layer.synapse.adjoint(params[layer.weight], delta, after.shape)
                wanted = wanted + (feedback if i == READOUT else shift_earlier(feedback, batch))
        after = after.lerp(wanted, rate)
        return self._replace(u=[x, shift_later(after, batch), after])

    def recompute_predictions(self, network: Network, params: Params, noise: Noise, lowest: int) -> Self:
        """Return the same states with new predictions; the drive from the input is new only if `lowest` is 0."""
        x, before, after = self.u
        _, hidden, readout = network.layers
        drive = network.compute_input_drive(params, x) if lowest == 0 else self.mu[HIDDEN]
        total = drive + hidden.synapse.forward(params[hidden.weight], before)
        note_drive(network.layers, x, before, total)
        states = total.tanh()
        output = network.unflatten_time(readout.forward(params, after), len(self.mu[-1]))
        return self._replace(mu=[x, drive, states, output], pullbacks=make_pullbacks(network.layers, states))


class PredictiveCodingRule(Learner):
    """The base of both rules: their options, the forward pass, and the errors of given activities."""

    RECURRENT = True
    FEEDBACK = "the forward weights W themselves, transposed, at every sweep"

    def set_shared_options(self, sweeps: int | None, rate: float | None) -> None:
        """Check and keep the options that both rules have."""
        require_positive(rate=rate)
        min_sweeps = max(1, self.min_sweeps)
        if sweeps is not None:
            why = f"needs that many for it to reach the first of {len(self.network)} layers"
            why = f": an error comes down one layer a sweep, and {self.NAME!r} {why}"
            check_whole_number("sweeps", sweeps, min_sweeps, why=why)
        # With steps of 0.1, recurrent networks learned neither characters nor time series.
        self.rate = (0.01 if self.network.recurrent else 0.1) if rate is None else rate
        self.sweeps = max(8, min_sweeps) if sweeps is None else sweeps
        self.activities_class = RecurrentActivities if self.network.recurrent else Activities

    @property
    def depth(self) -> int:
        """The number of layers that an error passes, one per sweep. W_x and W_h of a recurrent network count as one."""
        return len(self.network) - self.network.recurrent

    @property
    def min_sweeps(self) -> int:
        """The number of sweeps after which the error has reached the first layer."""
        return self.depth - 1

    def find_lowest_reached(self, t: int) -> int:
        """Return the lowest layer that the error has reached after t sweeps."""
        return len(self.network) - 1 - t if t < self.depth - 1 else 0

    @property
    def feedback_weights(self) -> list[Tensor | None]:
        return [None, *self.forward_weights[1:]]

    def run_forward(
        self, params: Params, x: Tensor, y: Tensor, noise: Noise, lowest: int = 0
    ) -> tuple[Activities, Tensor]:
        """Return the activities of the forward pass, with φ′ of the layers from `lowest` up, and the mean loss."""
        trace = self.network.forward(params, x, noise, lowest)
        loss, output_error = self.loss.start(self.network.flatten_time(trace.output), self.network.flatten_time(y))
        return self.activities_class.from_forward_pass(self.network, params, trace, output_error), loss

    def recompute_errors(
        self, params: Params, activities: Activities, y: Tensor, noise: Noise, lowest: int
    ) -> Activities:
        """Return the same activities with new predictions by the layers from `lowest` up, and a new output error."""
        updated = activities.recompute_predictions(self.network, params, noise, lowest)
        output, targets = self.network.flatten_time(updated.mu[-1]), self.network.flatten_time(y)
        return updated._replace(output_error=self.loss.begin(output, targets)[0])


class PredictiveCoding(PredictiveCodingRule):
    """Activities settle for `sweeps` steps of size `rate` with fixed weights, then W descends F once:

        u_i ← u_i + rate · (W_iᵀ δ_i − ε_i)      `sweeps` times, all layers at once
        ΔW_i = mean δ_i u_iᵀ                     at the settled activities

    `inference="full"` recomputes all predictions at every sweep. `"fixed"` (the fixed prediction assumption) keeps
    predictions, φ′ and presynaptic activities of the forward pass, so that only the errors relax. By default full takes
    8 sweeps (more if there are more layers) of rate 0.1, in recurrent networks of 0.01; fixed takes L−1 of rate 1.
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
    CLAIMS = Claims(c1=False, c2=True, c3=False)
    VARIANT = "inference"
    VARIANTS = ("full", "fixed")

    def __init__(
        self,
        model: nn.Sequential | Elman,
        *,
        input_shape: tuple[int, ...] | None = None,
        loss: str | LossFunction = "cross_entropy",
        label_smoothing: float = 0.0,
        inference: str = "full",
        sweeps: int | None = None,
        rate: float | None = None,
    ) -> None:
        super().__init__(model, input_shape=input_shape, loss=loss, label_smoothing=label_smoothing)
        require_one_of(self.VARIANTS, inference=inference)
        is_fixed = inference == "fixed"
        self.set_shared_options(sweeps, 1.0 if rate is None and is_fixed else rate)
        if is_fixed and self.rate >= 2:
            raise ApicalError(f"rate is {rate!r}, but with inference='fixed' errors settle below 2 alone.")
        self.inference = inference
        if sweeps is None and is_fixed:
            self.sweeps = self.min_sweeps
        self.sweeps_through_time = sweeps is None and is_fixed and self.network.recurrent
        """Whether there are as many sweeps as time steps, so that errors reach the first one."""

    def settle(self, params: Params, start: Activities, y: Tensor, noise: Noise, sweeps: int) -> Activities:
        """Return the activities after this many sweeps with fixed weights. μ_1, predicted by the input, does not change."""
        activities = start
        for t in range(sweeps):
            lowest = max(1, self.find_lowest_reached(t))
            activities = activities.relax(self.network, params, activities.deltas(lowest), self.rate)
            if self.inference == "full":
                activities = self.recompute_errors(params, activities, y, noise, lowest)
        return activities

    def update(self, params: Params, state: Params, x: Tensor, y: Tensor, noise: Noise) -> Update:
        bottom = find_lowest_layer(self.network, self.trainable, {})
        start, loss = self.run_forward(params, x, y, noise)
        activities = self.settle(params, start, y, noise, x.shape[1] if self.sweeps_through_time else self.sweeps)
        before = activities.u if self.inference == "full" else start.u
        grads = self.network.gradients(before, activities.deltas(bottom), self.trainable)
        return Update(grads, {}, loss, start.mu[-1])


class IncrementalPredictiveCoding(PredictiveCodingRule):
    """Activities and weights change together, `sweeps` times per batch, starting from the forward pass:

        u_i ← u_i + rate · (W_iᵀ δ_i − ε_i)      and in the same sweep the optimiser steps by
        ΔW_i = mean δ_i u_iᵀ                     both with the ε and δ of the current u and W

    so that neither waits for the other. A layer that no error has reached yet keeps its weights: its parameters have no
    gradient in that sweep (with a gradient of zero, Adam's momentum would still move them). The reported loss and
    output are those of the forward pass. By default `rate` is 0.1, in recurrent networks 0.01, and `sweeps` is 8
    (more if there are more layers).

    Laws: on a two-layer network two sweeps equal the ones worked out by hand; with a weight step of zero every
    sweep's gradient equals that of `pc` after as many sweeps as went before it.
    """

    NAME = "ipc"
    TITLE = "Incremental predictive coding"
    SOURCE = (
        "Salvatori et al. 2024, A stable, fast, and fully automatic learning algorithm for predictive coding networks"
    )

    def __init__(
        self,
        model: nn.Sequential | Elman,
        *,
        input_shape: tuple[int, ...] | None = None,
        loss: str | LossFunction = "cross_entropy",
        label_smoothing: float = 0.0,
        sweeps: int | None = None,
        rate: float | None = None,
    ) -> None:
        super().__init__(model, input_shape=input_shape, loss=loss, label_smoothing=label_smoothing)
        self.set_shared_options(sweeps, rate)

    @property
    def min_sweeps(self) -> int:
        return self.depth

    @property
    def phases(self) -> tuple[Phase, ...]:
        return tuple(partial(self.sweep, t) for t in range(self.sweeps))

    def sweep(self, t: int, params: Params, state: Params, x: Tensor, y: Tensor, noise: Noise) -> Update:
        """Do sweep t. The state holds the activities as `u.i`, and the loss and output of the forward pass."""
        network, last = self.network, len(self.network) - 1
        find_lowest_layer(network, self.trainable, {})  # raises an error if nothing learns
        lowest = self.find_lowest_reached(t)
        if t == 0:
            activities, loss = self.run_forward(params, x, y, noise, lowest)
            output = activities.mu[-1]
        else:
            loss, output = state["loss"], state["output"]
            u = [network.prefix(x, noise), *(state[f"u.{i}"] for i in range(1, last + 1))]
            # Below `lowest` each u equals its prediction.
            held = self.activities_class(u, [*u, output], [None] * len(u), output)
            activities = self.recompute_errors(params, held, y, noise, lowest)
        deltas = activities.deltas(lowest)
        grads = network.gradients(activities.u, deltas, self.trainable)
        u = activities.relax(network, params, deltas, self.rate).u if t + 1 < self.sweeps else activities.u
        next_state = {f"u.{i}": u[i] for i in range(1, last + 1)}
        return Update(grads, {**next_state, "loss": loss, "output": output}, loss, output)
