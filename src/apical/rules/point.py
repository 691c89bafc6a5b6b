"""Where the activities of predictive coding stand, what is predicted of them, and how they move: see `pc`."""

from typing import NamedTuple, Self

from torch import Tensor

from apical.network import Network, Params, Trace
from apical.neuron import Noise, Pullback
from apical.recurrent import HIDDEN, READOUT, Unrolled, earlier, later, nothing, pullback_at


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
        assert isinstance(network, Unrolled)
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
        assert isinstance(network, Unrolled)
        x, before, after = self.u
        _, hidden, readout = network.layers
        drive = network.drive(params, x) if low == 0 else self.mu[HIDDEN]
        states = (drive + hidden.synapse.forward(params[hidden.weight], before)).tanh()
        output = network.sequences(readout.forward(params, after), len(self.mu[-1]))
        pullback = pullback_at(states)
        return self._replace(mu=[x, drive, states, output], pullbacks=[pullback, pullback, nothing])
