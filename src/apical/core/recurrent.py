"""Elman networks: the user's own `nn.RNN` and `nn.Linear` as three layers that are applied at every time step.

    h_t = tanh(W_x x_t + b_x + W_h h_{t−1} + b_h),   h_0 = 0          the hidden state
    o_t = W_y h_t + b_y                                               the output

Everything that does not depend on the previous time step is computed for all time steps at once. They are the rows of
one matrix, time first: the first time step of every sequence, then the second of every sequence, and so on. Each row
counts as an example of its own, in the loss and in every `outer`. The rest is a loop over time.
"""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn

from apical.core.activation import DERIVATIVES, Neuron, Noise, Pullback
from apical.core.losses import one_hot
from apical.core.network import Layer, Network, Params, Shapes, Tier, Trace
from apical.core.registry import describe_general_rules
from apical.core.sequential import SequentialNetwork
from apical.core.synapse import Dense
from apical.core.wiring import get_plain_class
from apical.errors import ApicalError, UnsupportedError

INPUT, HIDDEN, READOUT = range(3)
"""The numbers of the layers W_x, W_h and W_y."""
tanh_derivative = DERIVATIVES[nn.Tanh]
"""(state, error at it) -> the error at its drive, before tanh."""


class Elman(nn.Module):
    """A recurrent network with one hidden layer and a linear readout, made of your own modules.

    The modules are trained in place. The input is (batch, time, values), or (batch, time) integers that stand for
    one-hot vectors, such as characters. The output is (batch, time, scores). The hidden state starts at zero.

    >>> elman = Elman(nn.RNN(5, 8, batch_first=True), nn.Linear(8, 3))
    >>> elman(torch.randn(2, 7, 5)).shape, elman(torch.tensor([[0, 4, 2]])).shape
    (torch.Size([2, 7, 3]), torch.Size([1, 3, 3]))
    """

    def __init__(self, rnn: nn.RNN, readout: nn.Linear) -> None:
        super().__init__()
        _check_modules(rnn, readout)
        self.rnn = rnn
        self.readout = readout

    def forward(self, x: Tensor) -> Tensor:
        require_input(x, self.rnn.input_size)
        if not x.is_floating_point():
            x = one_hot(x, self.rnn.input_size, self.readout.weight.dtype)
        output: Tensor = self.readout(self.rnn(x)[0])
        return output


class FlattenTime(Neuron):
    """Prepare the input of a recurrent network: every time step becomes an example, an index its one-hot vector."""

    def __init__(self, model: Elman) -> None:
        super().__init__([])
        # Not the nn.RNN itself: torch.compile cannot trace one.
        self.size, self.readout = model.rnn.input_size, model.readout

    def __call__(self, a: Tensor, noise: Noise) -> Tensor:
        a = flatten_time(a)
        return a if a.is_floating_point() else one_hot(a, self.size, self.readout.weight.dtype)


class RecurrentNetwork(Network):
    """An `Elman` as the layers W_x, W_h and W_y.

    Their inputs are x_t, h_{t−1} and h_t. Their drives are a_t, a_t and o_t, where a_t is the drive of the state h_t.
    """

    CLASSES = 2
    recurrent = True

    def __init__(self, model: Elman, root: str = "model") -> None:
        rnn, readout = model.rnn, model.readout
        _check_modules(rnn, readout)
        _check_plain(model)
        b_x, b_h = (f"{root}.rnn.bias_{kind}_l0" if rnn.bias else None for kind in ("ih", "hh"))
        b_y = None if readout.bias is None else f"{root}.readout.bias"
        w_x, w_h = Dense(rnn.hidden_size, rnn.input_size), Dense(rnn.hidden_size, rnn.hidden_size)
        w_y = Dense(readout.out_features, readout.in_features)
        state = {
            INPUT: Layer("rnn.input", w_x, f"{root}.rnn.weight_ih_l0", b_x, Neuron([])),
            HIDDEN: Layer("rnn.hidden", w_h, f"{root}.rnn.weight_hh_l0", b_h, Neuron([("rnn", nn.Tanh())])),
        }
        output = {READOUT: Layer("readout", w_y, f"{root}.readout.weight", b_y, Neuron([]))}
        tiers = [Tier("rnn", state, Neuron([]), INPUT, HIDDEN), Tier("readout", output, Neuron([]), READOUT, READOUT)]
        super().__init__(FlattenTime(model), tiers, width=1)

    def check_input(self, x: Tensor) -> None:
        require_input(x, self.layers[INPUT].synapse.weight_shape[1])

    def flatten_time(self, values: Tensor) -> Tensor:
        return flatten_time(values)

    def unflatten_time(self, rows: Tensor, batch: int) -> Tensor:
        time_first: Tensor = rows.unflatten(0, (-1, batch))
        return time_first.transpose(0, 1)

    def compute_input_drive(self, params: Params, u: Tensor) -> Tensor:
        """Return W_x x + b_x + b_h for all time steps: the part of the drive that needs no previous state."""
        first, hidden, _ = self.layers
        bias = params[first.bias] + params[hidden.bias] if first.bias and hidden.bias else None
        return first.synapse.forward(params[first.weight], u, bias)

    def compute_states(self, params: Params, drive: Tensor, batch: int) -> tuple[Tensor, Tensor]:
        """Return the states before and after each time step, h_0 … h_{T−1} and h_1 … h_T. They share memory."""
        hidden = self.layers[HIDDEN]
        first, *others = drive.split(batch)
        states = [torch.zeros_like(first), first.tanh()]
        for own in others:
            states.append((own + hidden.synapse.forward(params[hidden.weight], states[-1])).tanh())
        joined = torch.cat(states)
        return joined[:-batch], joined[batch:]

    def forward(self, params: Params, x: Tensor, noise: Noise, bottom: int = 0) -> Trace:
        u = self.prefix(x, noise)
        drive = self.compute_input_drive(params, u)
        before, after = self.compute_states(params, drive, len(x))
        hidden = self.layers[HIDDEN]
        if hidden.neuron.record is not None:
            note_drive(self.layers, u, before, drive + hidden.synapse.forward(params[hidden.weight], before))
        output = self.unflatten_time(self.layers[READOUT].forward(params, after), len(x))
        return Trace([u, before, after], make_pullbacks(self.layers, after), output, {})

    def shapes(self, input_shape: torch.Size | tuple[int, ...] | None = None) -> Shapes:
        """Return the shapes for one sequence of indices (time,) or of values (time, input)."""
        first, hidden, readout = (layer.synapse.weight_shape for layer in self.layers)
        if input_shape is None or len(input_shape) not in (1, 2) or input_shape[1:] not in ((), (first[1],)):
            raise _make_input_error(f"has examples of shape {input_shape and tuple(input_shape)}", first[1])
        inputs, drives = (
            [torch.Size((input_shape[0], width)) for width in widths]
            for widths in ((first[1], hidden[1], readout[1]), (first[0], hidden[0], readout[0]))
        )
        return Shapes(inputs, drives, {}, drives[-1])


def flatten_time(values: Tensor) -> Tensor:
    """Return (batch, time, …) as one row per time step: the first of every sequence, then the second, and so on."""
    return values.transpose(0, 1).flatten(0, 1)


def shift_earlier(values: Tensor, batch: int) -> Tensor:
    """Move each time step's values to the time step before it. The last one gets zeros."""
    return torch.cat([values[batch:], torch.zeros_like(values[:batch])])


def shift_later(values: Tensor, batch: int) -> Tensor:
    """Move each time step's values to the time step after it. The first one gets zeros."""
    return torch.cat([torch.zeros_like(values[:batch]), values[:-batch]])


def make_pullbacks(layers: Sequence[Layer], states: Tensor) -> list[Pullback | None]:
    """Return φ′ of the three layers: tanh′ at these states, twice, and the identity of the linear output."""
    pullbacks: list[Pullback] = [partial(tanh_derivative, states), partial(tanh_derivative, states), lambda e: e]
    return [layer.neuron.watch(pullback) for layer, pullback in zip(layers, pullbacks, strict=True)]


def note_drive(layers: Sequence[Layer], x: Tensor, before: Tensor, drive: Tensor) -> None:
    """Write the inputs of W_x and W_h and their common drive to the records of a batch, if it is recorded."""
    for layer, u in zip(layers, (x, before), strict=False):
        layer.neuron.note(u=u, drive=drive)


def require_input(x: Tensor, size: int) -> None:
    """Check that x is a batch of sequences of values or of indices.

    The range of the indices is checked only for CPU tensors outside of `torch.compile` and `torch.vmap`.
    """
    fits = x.ndim == 3 and x.shape[2] == size if x.is_floating_point() else x.ndim == 2
    if not fits or x.shape[1] == 0 or x.dtype == torch.bool or x.is_complex():
        raise _make_input_error(f"is {x.dtype} of shape {tuple(x.shape)}", size)
    if x.is_floating_point() or x.device.type != "cpu" or not x.numel():
        return
    if torch.compiler.is_compiling() or torch._C._functorch.is_functorch_wrapped_tensor(x):
        return
    low, high = (int(v) for v in torch.aminmax(x))
    if low < 0 or high >= size:
        raise _make_input_error(f"has indices from {low} to {high}", size)


def _make_input_error(what: str, size: int) -> ApicalError:
    return ApicalError(
        f"the input {what}, but this network takes (batch, time, {size}) floating values, or (batch, time) whole numbers "
        f"in 0 … {size - 1}."
    )


def _check_modules(rnn: nn.RNN, readout: nn.Linear) -> None:
    """Refuse modules that do not compute the equations at the top of this file."""
    if get_plain_class(rnn) is not nn.RNN:
        raise UnsupportedError(
            f"the recurrent module is a {type(rnn).__name__}; a plain nn.RNN(inputs, hidden, batch_first=True) works."
        )
    wanted = {"num_layers": 1, "nonlinearity": "tanh", "bidirectional": False, "batch_first": True, "dropout": 0}
    wanted |= {"mode": "RNN_TANH"}  # what torch computes, whatever nonlinearity says
    for name, value in wanted.items():
        if getattr(rnn, name) != value:
            raise UnsupportedError(
                f"the nn.RNN has {name}={getattr(rnn, name)!r}, which an apical.Elman cannot have; {name}={value!r} works, "
                f"and without apical.Elman {describe_general_rules()}."
            )
    if not isinstance(readout, nn.Linear):
        raise UnsupportedError(f"the readout is a {type(readout).__name__}; an nn.Linear works.")
    SequentialNetwork(nn.Sequential(readout))  # refuses anything but a plain layer
    if readout.in_features != rnn.hidden_size:
        raise UnsupportedError(
            f"the readout takes {readout.in_features} features, but the nn.RNN has {rnn.hidden_size} hidden units: "
            f"nn.Linear({rnn.hidden_size}, {readout.out_features}) works."
        )
    if {id(p) for p in rnn.parameters()} & {id(p) for p in readout.parameters()}:
        raise UnsupportedError("the nn.RNN and the readout share their weights; give each weights of its own.")


def _check_plain(model: Elman) -> None:
    """Refuse a forward() of the user's class, because apical would not run it."""
    if get_plain_class(model).forward is not Elman.forward:
        raise UnsupportedError(
            f"{type(model).__name__} has a forward of its own, which apical would not run; a plain apical.Elman works."
        )
