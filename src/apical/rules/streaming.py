"""Streaming: dendritic localized learning without phases, in which every layer works on another batch at every tick."""

from collections import deque
from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from apical.core.activation import Noise, Pullback
from apical.core.learner import Credit, Phase, Update
from apical.core.losses import LossFunction
from apical.core.network import Params
from apical.core.streams import SideStreams
from apical.core.validation import require_not_negative
from apical.core.views import broadcast_rows
from apical.errors import ApicalError
from apical.rules.dll import DLL


def pad_rows(values: Tensor, count: int) -> Tensor:
    """Return the values with the last row repeated, so that there are `count`."""
    missing = count - len(values)
    return torch.cat([values, values[-1:].expand(missing, *values.shape[1:])]) if missing else values


BOOKKEEPING, LAYERS = range(2)
"""The side streams of a tick in a CUDA graph. From LAYERS on, each hidden layer has one to fire on and one to learn on."""


class Tick(NamedTuple):
    """The data of one tick: its number, the buffers before it, and the buffers and gradients that it writes.

    A value that is needed for several ticks has a buffer for each tick of a period.
    """

    number: int
    period: int
    stream: Params
    trainable: frozenset[str]
    buffers: dict[str, Tensor]
    grads: dict[str, Tensor]

    def recall(self, name: str, ago: int = 0) -> Tensor:
        """Return what was remembered under this name for this tick, or for one some ticks ago."""
        return self.stream[f"{name}_{(self.number - ago) % self.period}"]

    def remember(self, name: str, value: Tensor, ahead: int = 0) -> None:
        """Remember a value of this tick, or one for a tick to come."""
        self.buffers[f"{name}_{(self.number + ahead) % self.period}"] = value


def mark_real_rows(size: int, count: int, device: torch.device) -> Tensor:
    """Return a vector with `count` for each of the `size` rows of a batch, and 0 for each row that pads it."""
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
        last = LAYERS + 2 * self.top  # the last layer has most operations in a row, so they go before others
        self.streams = SideStreams(last + 1, urgent=last)
        self._known: tuple[Tensor, int, int, deque[int]] | None = None
        """The counter of ticks, its version, its value, and the sizes of the last batches, when they were last known."""

    # The state: what is on its way.

    def allocate(self, x: Tensor, y: Tensor) -> None:
        """Create the buffers for batches of this size, or check that the batch fits them."""
        if self.stream._buffers:
            self._check_fit(x, y)
            return
        top, params = self.top, self.params()
        new: dict[str, Tensor] = {"tick": torch.zeros((), dtype=torch.long, device=x.device)}
        new["rows"] = torch.full((2 * top + 1,), len(x), device=x.device)  # of the last batches, the latest first
        kept = {"target": y, "real": mark_real_rows(len(x), len(x), x.device)} if top else {}
        with torch.no_grad():
            u = self.network.prefix(x, {})
            for i, layer in enumerate(self.network.layers[:-1]):
                output, own, _ = layer.neuron.trace(layer.forward(params, u), {})
                kept |= {f"input_{i}": u, f"input_{i + 1}": output, **{f"trace_{i}_{k}": t for k, t in enumerate(own)}}
                new[f"down_{i}"], u = torch.zeros_like(output), output
                if self.lookahead:
                    new[f"before_{i}"] = params[layer.weight].detach().clone()
        for slot in range(self.period):
            new |= {f"{name}_{slot}": torch.zeros_like(value) for name, value in kept.items()}
        for name, tensor in new.items():
            self.stream.register_buffer(name, tensor)

    def _check_fit(self, x: Tensor, y: Tensor) -> None:
        """Check that a batch is no larger than the first one, and its examples of the same shapes."""
        if not self.top:
            return
        targets, inputs = self.stream.get_buffer("target_0"), self.stream.get_buffer("input_0_0")
        most, shapes = len(targets), (inputs.shape[1:], targets.shape[1:])
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
        self.stream = nn.Module()
        for name, value in state_dict.items():
            if name.startswith(start):
                self.stream.register_buffer(name.removeprefix(start), torch.empty_like(value, device=device))
        super()._load_from_state_dict(state_dict, prefix, *rest)  # type: ignore[no-untyped-call]

    def draw(self, x: Tensor, generator: torch.Generator | None = None) -> dict[str, Tensor]:
        """Draw the noise of one tick: as many rows as the largest batch, since layers work on different ones."""
        targets = self.stream._buffers.get("target_0")
        rows = len(x) if targets is None else len(targets)
        return super().draw(x[:1].expand(rows, *x.shape[1:]), generator)

    # One tick.

    @property
    def warmup(self) -> int:
        return 2 * self.top

    @property
    def period(self) -> int:
        return 2 * self.top + 1

    def phases_after(self, done: int) -> tuple[Phase, ...]:
        late = done - self.warmup
        return (partial(self.tick, done=done if late < 0 else self.warmup + late % self.period),)

    @property
    def batch_phases(self) -> tuple[Phase, ...]:
        return (super().update,)

    def update(self, params: Params, state: Params, x: Tensor, y: Tensor, noise: Noise) -> Update:
        return self.tick(params, state, x, y, noise, self.warmup)

    def tick(self, params: Params, state: Params, x: Tensor, y: Tensor, noise: Noise, done: int) -> Update:
        """Run one tick. `done` is the number of earlier ones; after the warm-up only its place in the period matters.

        Layers do not wait for each other, so that in a CUDA graph they run side by side.
        """
        if not state:
            raise ApicalError(
                "the stream has no buffers yet; call learner.allocate(x, y) with a batch of full size before."
            )
        top, streams = self.top, self.streams
        stream = {name.removeprefix("stream."): value for name, value in state.items()}
        now, theta = Tick(done, self.period, stream, self.trainable, {}, {}), self.backward_weights(params)
        batch = len(stream["target_0"]) if top else len(x)
        with streams(BOOKKEEPING):
            targets, shares = self._read_targets(now, y)
            streams.mark("shares")
        with streams(LAYERS + 2 * top):
            u = now.recall(f"input_{top}") if top else self.network.prefix(x, noise)
            output, kept, pull_back = self._fire(now, top, u, params, noise)
            streams.mark("output")
            xi, compute_losses = self.loss.begin(output, targets)
            with streams(BOOKKEEPING):
                loss = (compute_losses() * shares).mean()
                streams.mark("loss")
            streams.keep(compute_losses)
            streams.wait_for("shares")
            xi = xi * broadcast_rows(shares.to(xi.dtype), xi)
            self._learn(now, top, u, xi, partial(pull_back, kept), theta)
            if top == 0:
                streams.mark("batch")
        for i in range(top):
            with streams(LAYERS + i):
                u = now.recall(f"input_{i}") if i else self.network.prefix(pad_rows(x, batch), noise)
                _, kept, pull_back = self._fire(now, i, u, params, noise)
                if i == 0:
                    now.remember("input_0", u.clone())  # the batch itself will have been replaced
                    streams.mark("batch")
            with streams(LAYERS + top + i):
                delay = 2 * (top - i)
                trace = [now.recall(f"trace_{i}_{k}", delay) for k in range(len(kept))]
                u, xi = now.recall(f"input_{i}", delay), stream[f"down_{i}"]
                self._learn(now, i, u, xi, partial(pull_back, trace), theta)
        with streams(BOOKKEEPING):
            self._keep_books(now, y, batch)
            streams.mark("batch", "loss")
        if done < top:
            output, loss = output[:0], loss * torch.nan
        delayed = targets, shares, now.buffers["rows"][top]
        changed = {f"stream.{name}": value for name, value in now.buffers.items()}
        return Update(now.grads, changed, loss, output, delayed)

    def _keep_books(self, now: Tick, y: Tensor, count: int) -> None:
        """Take in the targets of the batch that enters, and its size, and count the tick."""
        now.buffers["tick"] = now.stream["tick"] + 1
        now.buffers["rows"] = F.pad(now.stream["rows"][:-1], (1, 0), value=len(y))
        if self.top:
            now.remember("target", pad_rows(y, count).clone())
            now.remember("real", mark_real_rows(len(y), count, y.device))

    def _read_targets(self, now: Tick, y: Tensor) -> tuple[Tensor, Tensor]:
        """Return the targets of the batch that the last layer sees.

        With them come the factors of that batch's rows, such that a mean over all rows is one over the real ones.
        """
        wide = torch.promote_types(self.forward_weights[0].dtype, torch.float32)
        if not self.top:
            return y, torch.ones(len(y), dtype=wide, device=y.device)
        return now.recall("target", self.top), now.recall("real", self.top).to(wide) / now.stream["rows"][self.top - 1]

    def _fire(self, now: Tick, i: int, u: Tensor, params: Params, noise: Noise) -> tuple[Tensor, list[Tensor], Any]:
        """Let layer i fire: its activity goes up, and its trace is kept. Return what `Neuron.trace` returns."""
        layer, delay = self.network.layers[i], 2 * (self.top - i)
        if self.lookahead and delay:  # where the weights will be when the error arrives
            w, before = params[layer.weight], now.stream[f"before_{i}"]
            now.buffers[f"before_{i}"] = w.clone()
            params = {**params, layer.weight: torch.lerp(before, w, 1.0 + self.lookahead * delay)}
        output, kept, pull_back = layer.neuron.trace(layer.forward(params, u), noise)
        self.streams.mark(*self._name_params(i))
        if delay:
            self._check_trace(now, i, kept)
            now.remember(f"input_{i + 1}", output, ahead=1)
            for k, value in enumerate(kept):
                now.remember(f"trace_{i}_{k}", value)
        return output, kept, pull_back

    def _check_trace(self, now: Tick, i: int, kept: list[Tensor]) -> None:
        """Check that a layer keeps of a batch what it kept of the first one, for which the buffers were made."""
        buffers = [now.stream.get(f"trace_{i}_{k}_0") for k in range(len(kept) + 1)]
        if [(t.shape, t.dtype) for t in kept] != [(t.shape, t.dtype) for t in buffers if t is not None]:
            raise ApicalError(
                f"layer {self.network.layers[i].name} keeps something else of a batch than it kept of the first one, as "
                "when a hook is registered or autocast is switched on or off in between; create a new learner after that."
            )

    def _learn(
        self, now: Tick, i: int, u: Tensor, xi: Tensor, pull_back: Pullback, theta: Mapping[int, Tensor]
    ) -> None:
        """Let layer i learn from the error ξ that has arrived and from its input u then, and send its own error down."""
        layer, trainable, delta = self.network.layers[i], now.trainable, pull_back(xi)
        if i:
            now.buffers[f"down_{i - 1}"] = layer.synapse.adjoint(theta[i], delta, u.shape)
        if now.number < 2 * self.top - i:
            return
        layer.neuron.note(xi=xi)
        now.grads.update(layer.gradients(u, delta, trainable))
        if self.feedback_names.get(i) in trainable:
            self._learn_feedback(now, i, delta)
        self.streams.mark(*self._name_params(i))

    def _learn_feedback(self, now: Tick, i: int, delta: Tensor) -> None:
        """Add the gradient of layer i's feedback weights."""
        sent = now.buffers[f"down_{i - 1}"]
        if self.theta != "kolen-pollack":  # a product of two errors, and both have the factors of the rows
            size = now.stream["rows"][2 * self.top - i - 1]  # rows[k] is that of the batch that entered k + 1 ticks ago
            sent = sent * (size.to(sent.dtype) / len(sent))
        self.add_feedback_gradients(now.grads, {i: sent}, {i: delta})

    def param_groups(self, lr: float, **options: Any) -> list[dict[str, Any]]:
        """Return the groups of `dll`, those of each layer on their own if the rate of a layer depends on its delay."""
        groups = super().param_groups(lr, **options)
        if not self.slowdown:
            return groups
        layers = {id(self.get_parameter(name)): i for i in range(len(self.network)) for name in self._name_params(i)}
        split: list[dict[str, Any]] = []
        for group in groups:
            for p in group["params"]:
                rate = group["lr"] / (1 + self.slowdown * 2 * (self.top - layers[id(p)]))
                split.append({**group, "params": [p], "lr": rate, "name": f"{group.get('name')} {layers[id(p)]}"})
        return split

    def _name_params(self, i: int) -> list[str]:
        """Return the names of the parameters of layer i."""
        layer = self.network.layers[i]
        return [name for name in (layer.weight, layer.bias, self.feedback_names.get(i)) if name is not None]

    # Which tick it is, and the sizes of the batches on their way, are known here without reading them from a GPU.

    def count_batches(self) -> int:
        return self._read_clock()[0] if self.stream._buffers else 0

    def _read_clock(self) -> tuple[int, deque[int]]:
        """Return the ticks so far and the sizes of the last batches; read from the buffers if others have changed them."""
        tick = self.stream.get_buffer("tick")
        if self._known is None or self._known[0] is not tick or self._known[1] != tick._version:
            count, rows = int(tick), self.stream.get_buffer("rows").tolist()
            sizes = deque(reversed(rows[: min(count, self.top)]), maxlen=1 + self.top)
            self._known = tick, tick._version, count, sizes
        return self._known[2:]

    def _report(self, update: Update, x: Tensor) -> Credit:
        """Return the loss and the true rows of the output, of the batch that has just come out."""
        tick = self.stream.get_buffer("tick")
        assert self._known is not None
        _, _, count, sizes = self._known
        sizes.append(len(x))
        self._known = tick, tick._version, count + 1, sizes
        return Credit(update.loss, update.output[: sizes[0] if len(sizes) > self.top else 0])
