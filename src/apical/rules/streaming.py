"""Streaming: dendritic localized learning without phases, in which every layer works on another batch at every tick."""

from collections import deque
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from apical.core.activation import Noise
from apical.core.learner import Credit, Phase, Update
from apical.core.losses import LossFunction
from apical.core.network import Params
from apical.core.phases import Entry
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
    """Return the values with rows of zeros appended, so that there are `count`."""
    missing = count - len(values)
    return F.pad(values, (0, 0) * (values.ndim - 1) + (0, missing)) if missing else values


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
    SOURCE = "apical, after Lv et al. 2025; delayed gradients as in pipelined backpropagation (Pétrowski et al. 1993)"
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
    ) -> None:
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
        self.stream = nn.Module()
        self._sizes: deque[int] | None = None

    # The state: what is on its way.

    def allocate(self, x: Tensor, y: Tensor) -> None:
        """Create the buffers for batches of this size, or check that the batch fits them."""
        if self.stream._buffers:
            self._check_fit(x, y)
            return
        top, params = self.top, self.params()
        new: dict[str, Tensor] = {"tick": torch.zeros((), dtype=torch.long, device=x.device)}
        new["rows"] = torch.full((2 * top + 1,), len(x), device=x.device)
        if top:
            new["targets"] = make_ring(y, top)
        with torch.no_grad():
            u = self.network.prefix(x, {})
            for i, layer in enumerate(self.network.layers[:-1]):
                output, kept, _ = layer.neuron.trace(layer.forward(params, u), {})
                new |= {f"trace_{i}_{k}": make_ring(t, 2 * (top - i)) for k, t in enumerate([u, *kept])}
                new |= {f"up_{i + 1}": torch.zeros_like(output), f"down_{i}": torch.zeros_like(output)}
                u = output
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
        """Take one tick. `done` counts the ticks before it; None means that every layer has an error to learn from."""
        if not state:
            raise ApicalError(
                "the stream has no buffers yet; call learner.allocate(x, y) with a batch of full size before."
            )
        stream = {name.removeprefix("stream."): value for name, value in state.items()}
        top, layers, trainable, weights = self.top, self.network.layers, self.trainable, self.backward_weights(params)
        size, now, device = len(x), stream["tick"], x.device
        batch = stream["targets"].shape[1] if top else size
        x, y = pad_rows(x, batch), pad_rows(y, batch)
        period, ages = 2 * top + 1, torch.arange(2 * top, top - 1, -1, device=device)
        sizes = torch.where(torch.arange(period, device=device) == now % period, size, stream["rows"])
        rows = sizes.index_select(0, (now - ages) % period)  # of the batch that each layer learns from
        scales = batch / rows.to(torch.promote_types(x.dtype, torch.float32))
        slots = now % torch.arange(2 * top, 0, -2, device=device)
        new = {"tick": now + 1, "rows": sizes}
        entries: dict[str, Entry] = {}
        grads: dict[str, Tensor] = {}
        if top:
            slot = (now % top).view(1)
            y, entries["targets"] = read_ring(stream["targets"], slot), Entry(slot, y)
        for i, layer in enumerate(layers):
            u = stream[f"up_{i}"] if i else self.network.prefix(x, noise)
            output, kept, pull_back = layer.neuron.trace(layer.forward(params, u), noise)
            if i == top:
                loss, xi = self._score(output, y, rows[top])
            else:
                slot, own = slots[i : i + 1], [f"trace_{i}_{k}" for k in range(1 + len(kept))]
                entries |= {name: Entry(slot, value) for name, value in zip(own, [u, *kept], strict=True)}
                u, *kept = [read_ring(stream[name], slot) for name in own]
                xi, new[f"up_{i + 1}"] = stream[f"down_{i}"], output
            delta = pull_back(kept, xi)
            if i:
                new[f"down_{i - 1}"] = layer.synapse.adjoint(weights[i], delta, u.shape)
            if done is None or done >= 2 * top - i:
                delta = delta * scales[i].to(delta.dtype)
                grads |= layer.gradients(u, delta, trainable)
                if self.feedback_names.get(i) in trainable:
                    self.add_feedback_gradients(grads, {i: new[f"down_{i - 1}"]}, {i: delta})
        if done is not None and done < top:
            output, loss = output[:0], loss * torch.nan
        return Update(grads, _prefix(new), loss, output, _prefix(entries), (y, rows[top]))

    def _score(self, output: Tensor, y: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return the mean loss of the first so many rows, and ξ, which is zero in the others."""
        losses, xi = self.loss.error(output, y)
        counts = torch.arange(len(output), device=output.device) < rows
        return torch.where(counts, losses, 0.0).sum() / rows, torch.where(broadcast_rows(counts, xi), xi, 0.0)

    # Which tick it is, and the sizes of the batches on their way, are known here without reading them from a GPU.

    def _get_next_phases(self) -> tuple[Phase, ...]:
        return self.phases_after(len(self._get_sizes()))

    def _get_sizes(self) -> deque[int]:
        """Return the sizes of the last batches, at most as many as the warm-up takes; read from the buffers only once."""
        if self._sizes is None:
            tick, rows = int(self.stream.tick), self.stream.rows.tolist()  # type: ignore[operator, arg-type]
            last = range(max(0, tick - self.warmup), tick)
            self._sizes = deque([rows[t % len(rows)] for t in last], maxlen=max(1, self.warmup))
        return self._sizes

    def _report(self, update: Update, x: Tensor) -> Credit:
        """Return the loss and the true rows of the output, of the batch that has just come out."""
        self._get_sizes().append(len(x))
        sizes = [0] * self.top + list(self._get_sizes())
        return Credit(update.loss, update.output[: sizes[-1 - self.top]])


def _prefix(values: dict[str, Any]) -> dict[str, Any]:
    return {f"stream.{name}": value for name, value in values.items()}
