"""Streaming: dendritic localized learning without phases, in which every layer works on another batch at every tick."""

from collections import deque
from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from apical.core.activation import Noise
from apical.core.learner import Credit, Phase, Update
from apical.core.losses import LossFunction
from apical.core.network import Params
from apical.core.phases import Entry
from apical.core.streams import SideStreams
from apical.core.validation import require_not_negative
from apical.core.views import broadcast_rows, is_channels_last, to_memory_order
from apical.errors import ApicalError
from apical.rules.dll import DLL


def make_ring(like: Tensor, depth: int) -> Tensor:
    """Return zeros for so many tensors like this one, in its memory order."""
    rows = to_memory_order(like)
    ring = rows.new_zeros(depth, *rows.shape)
    return ring.movedim(-1, 2) if is_channels_last(like) else ring


def read_ring(ring: Tensor, slot: Tensor) -> Tensor:
    """Return what is kept in one slot, in its memory order, which `index_select` alone would not keep."""
    if is_channels_last(ring[0]):
        return ring.movedim(2, -1).index_select(0, slot)[0].movedim(-1, 1)
    return ring.index_select(0, slot)[0]


def pad_rows(values: Tensor, count: int) -> Tensor:
    """Return the values with the last row repeated, so that there are `count`."""
    missing = count - len(values)
    return torch.cat([values, values[-1:].expand(missing, *values.shape[1:])]) if missing else values


class Tick(NamedTuple):
    """One tick: the stream as it is, and what changes: whole buffers, places in rings, and the gradients."""

    stream: Params
    buffers: dict[str, Tensor]
    entries: dict[str, Entry]
    grads: dict[str, Tensor]


def mark_real_rows(size: int, count: int, device: torch.device) -> Tensor:
    """Return `count` for each of as many rows that is one of the batch, and 0 for a repetition."""
    marks = torch.full((size,), count, device=device)
    return F.pad(marks, (0, count - size)) if size < count else marks


class Streaming(DLL):
    """One batch enters at every tick, and no layer waits. At tick t, layer i of L (0 … L−1)

        fires      a_i = φ_i(W_i u_i + b_i)             u_i is what layer i−1 sent at tick t−1: batch t−i
        learns     δ_i = φ′_i(ξ_{i+1}),  ΔW_i = mean δ_i u_iᵀ     ξ_{i+1} is what layer i+1 sent at tick t−1
        sends      a_i up, and ξ_i = Θ_iᵀ δ_i down

    The error that arrives belongs to the batch that the layer saw d_i = 2(L−1−i) ticks ago: an eligibility trace keeps u_i
    and φ′_i of the last d_i ticks. The last layer computes the loss and its own error at once. Θ learns as in `dll`, and
    has the same options.

    `credit` and `step` take one tick: the loss and the output that they return belong to the batch that entered L−1 ticks
    ago (no rows and NaN before), and a layer has no gradient before its first error, at tick 2(L−1) − i. Everything
    on its way is in buffers, made for the first batch's size; smaller batches are padded, and means are over their own rows.

    Laws: with one layer it is `dll`; at rate 0 the gradients, sorted by batch, are those of `dll`.
    """

    NAME = "streaming"
    TITLE = "Streaming dendritic learning"
    SOURCE = "apical, after Lv et al. 2025; delayed gradients as in pipelined backpropagation (Kosson et al. 2021)"
    FEEDBACK = "Θ, drawn once, then changed by `theta`; the error takes one tick for each layer"
    CLAIMS = None  # type: ignore[assignment]
    PARALLEL = False
    RECURRENT = False
    VARIANTS = ("kolen-pollack", "paper", "released", "frozen")

    def __init__(
        self,
        model: nn.Sequential,
        *,
        input_shape: tuple[int, ...] | None = None,
        loss: str | LossFunction = "cross_entropy",
        label_smoothing: float = 0.0,
        theta: str = "kolen-pollack",
        theta_std: float | None = None,
        theta_rate: float | None = None,
        decay: float | None = None,
        slowdown: float = 0.0,
        lookahead: float = 0.0,
    ) -> None:
        require_not_negative(slowdown=slowdown, lookahead=lookahead)
        super().__init__(
            model,
            input_shape=input_shape,
            loss=loss,
            label_smoothing=label_smoothing,
            theta=theta,
            theta_std=theta_std,
            theta_rate=theta_rate,
            decay=decay,
        )
        self.top = len(self.network) - 1
        self.slowdown, self.lookahead = slowdown, lookahead
        self.stream = nn.Module()
        self.streams = SideStreams(2 * len(self.network) + 1, urgent=self.top)  # learning takes longer than firing
        self._sizes: deque[int] | None = None

    # The state: what is on its way.

    def allocate(self, x: Tensor, y: Tensor) -> None:
        """Create the buffers for batches of this size, or check that the batch fits them."""
        if self.stream._buffers:
            self._check_fit(x, y)
            return
        top, params = self.top, self.params()
        new: dict[str, Tensor] = {"tick": torch.zeros((), dtype=torch.long, device=x.device)}
        new["rows"] = torch.full((2 * top + 1,), len(x), device=x.device)  # of the last batches, the latest first
        new["depths"] = torch.tensor([*range(2 * top, 0, -2), max(1, top)], device=x.device)
        new["slots"] = torch.zeros_like(new["depths"])  # the next place in the rings of each layer and of the targets
        if top:
            new |= {"targets": make_ring(y, top), "real": make_ring(mark_real_rows(len(x), len(x), x.device), top)}
        with torch.no_grad():
            u = self.network.prefix(x, {})
            for i, layer in enumerate(self.network.layers[:-1]):
                output, kept, _ = layer.neuron.trace(layer.forward(params, u), {})
                new |= {f"trace_{i}_{k}": make_ring(t, 2 * (top - i)) for k, t in enumerate([u, *kept])}
                new |= {f"up_{i + 1}": torch.zeros_like(output), f"down_{i}": torch.zeros_like(output)}
                u = output
                if self.lookahead:
                    new[f"before_{i}"] = params[layer.weight].detach().clone()
        for name, tensor in new.items():
            self.stream.register_buffer(name, tensor)

    def _check_fit(self, x: Tensor, y: Tensor) -> None:
        """Check that a batch is no larger than the first one, and its examples of the same shapes."""
        if not self.top:
            return
        targets, inputs = self.stream.get_buffer("targets"), self.stream.get_buffer("trace_0_0")
        most, shapes = targets.shape[1], (inputs.shape[2:], targets.shape[2:])
        own = self.network.shapes(x.shape[1:]).inputs[0], y.shape[1:]
        if len(x) > most or own != shapes or y.dtype != targets.dtype:
            raise ApicalError(
                f"the batch has {len(x)} examples, inputs {tuple(own[0])} and {y.dtype} targets {tuple(own[1])}, but the "
                f"batches on their way have up to {most} examples, inputs {tuple(shapes[0])} and {targets.dtype} targets "
                f"{tuple(shapes[1])}; give the first batch its full size, or create a new learner."
            )

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *rest: Any) -> None:
        """Load a stream of any size: its buffers are created anew."""
        start, device = f"{prefix}stream.", self.forward_weights[0].device
        self.stream, self._sizes = nn.Module(), None
        for name, value in state_dict.items():
            if name.startswith(start):
                self.stream.register_buffer(name.removeprefix(start), torch.empty_like(value, device=device))
        super()._load_from_state_dict(state_dict, prefix, *rest)  # type: ignore[no-untyped-call]

    def draw(self, x: Tensor, generator: torch.Generator | None = None) -> dict[str, Tensor]:
        """Draw the noise of one tick: as many rows as the largest batch, since layers work on different ones."""
        targets = self.stream._buffers.get("targets")
        rows = len(x) if targets is None else targets.shape[1]
        return super().draw(x[:1].expand(rows, *x.shape[1:]), generator)

    # One tick.

    @property
    def warmup(self) -> int:
        return 2 * self.top

    def phases_after(self, done: int) -> tuple[Phase, ...]:
        return (partial(self.tick, done=done),) if done < self.warmup else self.phases

    @property
    def batch_phases(self) -> tuple[Phase, ...]:
        return (super().update,)

    def update(self, params: Params, state: Params, x: Tensor, y: Tensor, noise: Noise) -> Update:
        return self.tick(params, state, x, y, noise)

    def tick(
        self, params: Params, state: Params, x: Tensor, y: Tensor, noise: Noise, done: int | None = None
    ) -> Update:
        """Take one tick. `done` counts the ticks before it; None means that every layer has an error to learn from.

        Layers do not wait for each other: in a CUDA graph each fires on one stream and learns on another.
        """
        if not state:
            raise ApicalError(
                "the stream has no buffers yet; call learner.allocate(x, y) with a batch of full size before."
            )
        now = Tick({name.removeprefix("stream."): value for name, value in state.items()}, {}, {}, {})
        top, last, books = self.top, 2 * self.top + 1, 2 * self.top + 2
        trainable, weights = self.trainable, self.backward_weights(params)
        batch = now.stream["targets"].shape[1] if top else len(x)
        rows = now.stream["rows"]  # rows[k] is the size of the batch that entered k + 1 ticks ago
        with self.streams(books):
            self._keep_books(now, y, batch)
        with self.streams(last):
            y, shares = self._read_targets(now, y)
        x = pad_rows(x, batch)
        for i, layer in enumerate(self.network.layers):
            learning, sending = (i, last) if i == top else (top + 1 + i, i)
            with self.streams(i):
                u = now.stream[f"up_{i}"] if i else self.network.prefix(x, noise)
                output, kept, pull_back = self._fire(now, i, u, params, noise)
                if i == top:
                    self.streams.wait(last)
                    losses, xi = self.loss.error(output, y)
                    xi = xi * broadcast_rows(shares.to(xi.dtype), xi)
            with self.streams(learning):
                if i < top:
                    own = [f"trace_{i}_{k}" for k in range(1 + len(kept))]
                    u, *kept = [read_ring(now.stream[name], now.entries[name].place) for name in own]
                    xi = now.stream[f"down_{i}"]
                delta = pull_back(kept, xi)
                self.streams.keep(delta)
                if i:
                    with self.streams(sending):
                        now.buffers[f"down_{i - 1}"] = layer.synapse.adjoint(weights[i], delta, u.shape)
                if done is None or done >= 2 * top - i:
                    layer.neuron.note(xi=xi)
                    now.grads.update(layer.gradients(u, delta, trainable))
                    if self.feedback_names.get(i) in trainable:
                        self._learn_feedback(now, i, delta, rows, sending)
                if i == top:
                    loss = (losses * shares).mean()
        self.streams.join()
        self.streams.keep(shares)
        if done is not None and done < top:
            output, loss = output[:0], loss * torch.nan
        delayed = y, shares, now.buffers["rows"][top]
        return Update(now.grads, _prefix(now.buffers), loss, output, _prefix(now.entries), delayed)

    def _keep_books(self, now: Tick, y: Tensor, count: int) -> None:
        """Take in the targets of the batch that enters, and its size; advance the tick and the places in the rings."""
        stream, size = now.stream, len(y)
        now.buffers["tick"] = stream["tick"] + 1
        now.buffers["slots"] = (stream["slots"] + 1) % stream["depths"]
        now.buffers["rows"] = F.pad(stream["rows"][:-1], (1, 0), value=size)
        if self.top:
            place, real = stream["slots"][self.top :], mark_real_rows(size, count, y.device)
            now.entries.update({"targets": Entry(place, pad_rows(y, count).clone()), "real": Entry(place, real)})

    def _read_targets(self, now: Tick, y: Tensor) -> tuple[Tensor, Tensor]:
        """Return the targets of the batch that the last layer sees.

        With them come the factors of that batch's rows, such that a mean over all rows is one over the real ones.
        """
        wide = torch.promote_types(self.forward_weights[0].dtype, torch.float32)
        if not self.top:
            return y, torch.ones(len(y), dtype=wide, device=y.device)
        place = now.stream["slots"][self.top :]
        real = read_ring(now.stream["real"], place).to(wide)
        return read_ring(now.stream["targets"], place), real / now.stream["rows"][self.top - 1]

    def _fire(self, now: Tick, i: int, u: Tensor, params: Params, noise: Noise) -> tuple[Tensor, list[Tensor], Any]:
        """Let layer i fire: its activity goes up, and its trace is kept. Return what `Neuron.trace` returns."""
        layer, delay = self.network.layers[i], 2 * (self.top - i)
        if self.lookahead and delay:  # where the weights will be when the error arrives
            w, before = params[layer.weight], now.stream[f"before_{i}"]
            now.buffers[f"before_{i}"] = w.clone()
            params = {**params, layer.weight: torch.lerp(before, w, 1.0 + self.lookahead * delay)}
        output, kept, pull_back = layer.neuron.trace(layer.forward(params, u), noise)
        if delay:
            now.buffers[f"up_{i + 1}"] = output
            slot = now.stream["slots"][i : i + 1]
            trace = [u if i else u.clone(), *kept]  # the batch itself will have been replaced
            now.entries.update({f"trace_{i}_{k}": Entry(slot, value) for k, value in enumerate(trace)})
        return output, kept, pull_back

    def _learn_feedback(self, now: Tick, i: int, delta: Tensor, rows: Tensor, sending: int) -> None:
        """Add the gradient of layer i's feedback weights."""
        sent = now.buffers[f"down_{i - 1}"]
        if self.theta != "kolen-pollack":  # a product of two errors, and both have the factors of the rows
            self.streams.wait(sending)
            sent = sent * (rows[2 * self.top - i - 1].to(sent.dtype) / len(sent))
        self.add_feedback_gradients(now.grads, {i: sent}, {i: delta})

    def param_groups(self, lr: float, **options: Any) -> list[dict[str, Any]]:
        """Return the groups of `dll`, those of each layer on their own if the rate of a layer depends on its delay."""
        groups = super().param_groups(lr, **options)
        if not self.slowdown:
            return groups
        layers = {id(p): i for i, layer in enumerate(self.network.layers) for p in self._layer_params(i, layer)}
        split: list[dict[str, Any]] = []
        for group in groups:
            for p in group["params"]:
                rate = group["lr"] / (1 + self.slowdown * 2 * (self.top - layers[id(p)]))
                split.append({**group, "params": [p], "lr": rate, "name": f"{group.get('name')} {layers[id(p)]}"})
        return split

    def _layer_params(self, i: int, layer: Any) -> list[Tensor]:
        names = [layer.weight, layer.bias, self.feedback_names.get(i)]
        return [self.get_parameter(name) for name in names if name is not None]

    # Which tick it is, and the sizes of the batches on their way, are known here without reading them from a GPU.

    def _get_next_phases(self) -> tuple[Phase, ...]:
        return self.phases_after(len(self._get_sizes()))

    def _get_sizes(self) -> deque[int]:
        """Return the sizes of the last batches, at most as many as the warm-up takes; read from the buffers only once."""
        if self._sizes is None:
            tick, rows = int(self.stream.tick), self.stream.rows.tolist()  # type: ignore[operator, arg-type]
            last = min(tick, self.warmup)
            self._sizes = deque(reversed(rows[:last]), maxlen=max(1, self.warmup))
        return self._sizes

    def _report(self, update: Update, x: Tensor) -> Credit:
        """Return the loss and the true rows of the output, of the batch that has just come out."""
        self._get_sizes().append(len(x))
        sizes = [0] * self.top + list(self._get_sizes())
        return Credit(update.loss, update.output[: sizes[-1 - self.top]])


def _prefix(values: dict[str, Any]) -> dict[str, Any]:
    return {f"stream.{name}": value for name, value in values.items()}
