"""`nn.RNN`, `nn.LSTM`, `nn.GRU` and their cells with wired weights, one time step after the other."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from apical.core.wiring import Weights, Wired, read_weights

State = tuple[Tensor, ...]
"""h; of an LSTM h and c."""
Advance = Callable[[Tensor, Tensor, State], State]
"""(the drive by the input, the drive by the state, the state) -> the next state."""


def _advance_rnn(activation: Callable[[Tensor], Tensor]) -> Advance:
    return lambda by_input, by_state, state: (activation(by_input + by_state),)


def _advance_lstm(by_input: Tensor, by_state: Tensor, state: State) -> State:
    i, f, g, o = (by_input + by_state).chunk(4, -1)
    c = f.sigmoid() * state[1] + i.sigmoid() * g.tanh()
    return o.sigmoid() * c.tanh(), c


def _advance_gru(by_input: Tensor, by_state: Tensor, state: State) -> State:
    (xr, xz, xn), (hr, hz, hn) = by_input.chunk(3, -1), by_state.chunk(3, -1)
    z, n = (xz + hz).sigmoid(), (xn + (xr + hr).sigmoid() * hn).tanh()
    return ((1 - z) * n + z * state[0],)


ADVANCE: dict[str, Advance] = {
    "RNN_TANH": _advance_rnn(torch.tanh),
    "RNN_RELU": _advance_rnn(F.relu),
    "LSTM": _advance_lstm,
    "GRU": _advance_gru,
}


class WiredRecurrent(Wired):
    """`nn.RNN`, `nn.LSTM` and `nn.GRU`, with all their options and packed sequences."""

    def forward(self, input: Any, hx: Any = None) -> Any:
        module: Any = self
        if self.runs_plainly:
            return super().forward(input, hx)  # type: ignore[misc]
        is_packed = isinstance(input, PackedSequence)
        is_batched = is_packed or input.dim() == 3
        if is_packed:
            rows, sizes = input.data, input.batch_sizes.tolist()
        else:
            steps = input.unsqueeze(1) if not is_batched else input.transpose(0, 1) if module.batch_first else input
            rows, sizes = steps.flatten(0, 1), [steps.shape[1]] * len(steps)
        states = _get_states(module, hx, rows, sizes[0], is_batched, input.sorted_indices if is_packed else None)
        last: list[State] = []
        for layer in range(module.num_layers):
            outputs = []
            for suffix in ("", "_reverse")[: 1 + module.bidirectional]:
                output, state = _run_layer(module, f"l{layer}{suffix}", rows, sizes, states[len(last)])
                outputs.append(output)
                last.append(state)
            rows = torch.cat(outputs, -1) if len(outputs) > 1 else outputs[0]
            if module.dropout and self.training and layer + 1 < module.num_layers:
                rows = F.dropout(rows, module.dropout)
        final = tuple(torch.stack(parts) for parts in zip(*last, strict=True))
        if is_packed:
            order = input.unsorted_indices
            final = final if order is None else tuple(t.index_select(1, order) for t in final)
            out: Any = PackedSequence(rows, input.batch_sizes, input.sorted_indices, order)
        else:
            out = rows.unflatten(0, (len(sizes), sizes[0]))
            out = out.squeeze(1) if not is_batched else out.transpose(0, 1) if module.batch_first else out
        final = final if is_batched else tuple(t.squeeze(1) for t in final)
        return out, final if module.mode == "LSTM" else final[0]


def _get_states(
    module: Any, given: Any, rows: Tensor, batch: int, is_batched: bool, order: Tensor | None
) -> list[State]:
    """Return the initial state of each layer and direction, zero if none is given."""
    count = module.num_layers * (1 + module.bidirectional)
    sizes = [module.proj_size or module.hidden_size, module.hidden_size][: 1 + (module.mode == "LSTM")]
    if given is None:
        return [tuple(rows.new_zeros(batch, size) for size in sizes)] * count
    parts = given if module.mode == "LSTM" else (given,)
    parts = parts if is_batched else tuple(t.unsqueeze(1) for t in parts)
    parts = parts if order is None else tuple(t.index_select(1, order) for t in parts)
    for part, size in zip(parts, sizes, strict=True):
        if tuple(part.shape) != (count, batch, size):
            raise RuntimeError(f"Expected hidden size {(count, batch, size)}, got {list(part.shape)}")
    return list(zip(*parts, strict=True))


def _run_layer(module: Any, name: str, rows: Tensor, sizes: Sequence[int], state: State) -> tuple[Tensor, State]:
    """Run one direction of a layer over all time steps, whose rows stand one after the other; later ones may have fewer."""
    bias_x, bias_h = (module._parameters[f"bias_{kind}_{name}"] if module.bias else None for kind in ("ih", "hh"))
    drives = read_weights(module, f"weight_ih_{name}", rows).linear(rows, bias_x).split(list(sizes))
    recurrent = read_weights(module, f"weight_hh_{name}", drives[0])
    projection = read_weights(module, f"weight_hr_{name}", drives[0]) if module.proj_size else None
    order = range(len(sizes)) if not name.endswith("_reverse") else range(len(sizes) - 1, -1, -1)
    outputs: dict[int, Tensor] = {}
    for t in order:
        now = tuple(part[: sizes[t]] for part in state)
        new = _step(module.mode, drives[t], recurrent, bias_h, projection, now)
        outputs[t] = new[0]
        rest = [part[sizes[t] :] for part in state]
        state = tuple(torch.cat([a, b]) if len(b) else a for a, b in zip(new, rest, strict=True))
    return torch.cat([outputs[t] for t in range(len(sizes))]), state


def _step(
    mode: str, drive: Tensor, recurrent: Weights, bias: Tensor | None, projection: Weights | None, state: State
) -> State:
    """Take one time step."""
    new = ADVANCE[mode](drive, recurrent.linear(state[0].to(drive.dtype), bias), state)
    return new if projection is None else (projection.linear(new[0].to(drive.dtype)), *new[1:])


class WiredCell(Wired):
    """`nn.RNNCell`, `nn.LSTMCell` and `nn.GRUCell`."""

    def forward(self, input: Tensor, hx: Any = None) -> Any:
        module: Any = self
        if self.runs_plainly:
            return super().forward(input, hx)  # type: ignore[misc]
        gates = len(module.weight_ih) // module.hidden_size
        mode = {4: "LSTM", 3: "GRU", 1: f"RNN_{getattr(module, 'nonlinearity', '').upper()}"}[gates]
        a = input.unsqueeze(0) if input.dim() == 1 else input
        parts = hx if mode == "LSTM" and hx is not None else (hx,) * (1 + (mode == "LSTM"))
        zeros = a.new_zeros(len(a), module.hidden_size)
        state = tuple(zeros if part is None else part.unsqueeze(0) if part.dim() == 1 else part for part in parts)
        drive = read_weights(module, "weight_ih", a).linear(a, module.bias_ih)
        new = _step(mode, drive, read_weights(module, "weight_hh", drive), module.bias_hh, None, state)
        new = tuple(part.squeeze(0) for part in new) if input.dim() == 1 else new
        return new if mode == "LSTM" else new[0]
