"""Rules that have several batches on their way at once: honest ones, and cheats that only look like them."""

from collections import deque
from typing import Any

import torch
from torch import Tensor

import apical
from apical import Update
from apical.rules.streaming import Streaming
from audit_cases.base import Feedback, cheat, honest


class Pipeline(Feedback):
    """Keeps what the last batches left in each layer, and what each layer sent down in the last ticks."""

    def __init__(self, *args: Any, **common: Any) -> None:
        super().__init__(*args, **common)
        self.traces: deque[Any] = deque(maxlen=16)
        self.sent: deque[dict[int, Tensor]] = deque([{}] * 16, maxlen=16)

    def update(self, params: Any, state: Any, x: Tensor, y: Tensor, noise: Any) -> Update:
        trace = self.network.forward(params, x, noise)
        loss, xi = self.loss.start(trace.output, y)
        self.traces.append((trace, xi))
        nothing = {name: torch.zeros_like(p) for name, p in params.items()}
        return Update(nothing | self.learn(), {}, loss, trace.output)

    def learn(self) -> dict[str, Tensor]:
        """Return the gradients of this tick."""
        raise NotImplementedError

    def correct(self, i: int, ago: int, xi: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        """Return layer i's gradients for the batch of some ticks ago, given its error, and the error of the layer below."""
        delta = self.traces[-1 - ago][0].pullbacks[i](xi)
        return self.network.layers[i].gradients(self.recall(i, ago), delta, self.trainable), delta @ self.b[i]

    def recall(self, i: int, ago: int) -> Tensor:
        """Return the input that layer i had some ticks ago."""
        u: Tensor = self.traces[-1 - ago][0].inputs[i]
        return u

    def descend(self, ago: int) -> list[dict[str, Tensor]]:
        """Return the gradients of all layers for the batch of some ticks ago, from a whole pass down in this tick."""
        xi, found = self.traces[-1 - ago][1], []
        for i in reversed(range(len(self.network))):
            own, xi = self.correct(i, ago, xi)
            found.insert(0, own)
        return found


class Crossing(Pipeline):
    """A layer's error comes down some ticks after that of the layer above."""

    ticks = 1

    def learn(self) -> dict[str, Tensor]:
        top, grads, now = len(self.network) - 1, dict[str, Tensor](), dict[int, Tensor]()
        for i in range(top + 1):
            xi = self.traces[-1][1] if i == top else self.sent[-self.ticks].get(i)
            if xi is not None:
                own, now[i - 1] = self.correct(i, self.ticks * (top - i), xi)
                grads |= own
        self.sent.append(now)
        return grads


@honest("c1", "c2", "c3")
class OneLayerATick(Crossing):
    """A batch goes up at once; its error comes down one layer a tick, and meets what each layer kept of the batch."""


@honest("c1", "c2", "c3")
class TwoTicksALayer(Crossing):
    """As OneLayerATick, but an error takes two ticks for each layer."""

    ticks = 2


@honest("c1", "c2", "c3")
class TracesInOneTensor(OneLayerATick):
    """As OneLayerATick, but all that a layer keeps of the last batches is in one tensor."""

    def __init__(self, *args: Any, **common: Any) -> None:
        super().__init__(*args, **common)
        self.kept: dict[int, Tensor] = {}

    def learn(self) -> dict[str, Tensor]:
        for i, u in enumerate(self.traces[-1][0].inputs):
            self.kept[i] = torch.cat([self.kept[i], u])[-sum(self.count_rows()) :] if i in self.kept else u
        return super().learn()

    def count_rows(self) -> list[int]:
        """Return the sizes of the last batches."""
        return [len(xi) for _, xi in self.traces][-len(self.network) :]

    def recall(self, i: int, ago: int) -> Tensor:
        return self.kept[i].split(self.count_rows())[-1 - ago]


@cheat("c3")
class HeldBack(Pipeline):
    """A whole pass down within one tick, whose gradients are handed out as if it had taken a tick for each layer."""

    hold = 1

    def __init__(self, *args: Any, **common: Any) -> None:
        super().__init__(*args, **common)
        self.found: deque[list[dict[str, Tensor]]] = deque(maxlen=16)

    def learn(self) -> dict[str, Tensor]:
        self.found.append(self.descend(0))
        top, grads = len(self.network) - 1, dict[str, Tensor]()
        for i in range(top + 1):
            if len(self.found) > self.hold * (top - i):
                grads |= self.found[-1 - self.hold * (top - i)][i]
        return grads


@cheat("c3")
class HeldBackTwice(HeldBack):
    """A whole pass down within one tick, whose gradients are handed out two ticks later for each layer."""

    hold = 2


@cheat("c3")
class LatePass(HeldBack):
    """The error is kept for a tick; then the whole pass down, of which the first layer hears one tick later still."""

    def learn(self) -> dict[str, Tensor]:
        top = len(self.network) - 1
        grads, _ = self.correct(top, 0, self.traces[-1][1])
        if len(self.traces) > 1:
            self.found.append(self.descend(1))
            for i in range(top):
                if len(self.found) >= top - i:
                    grads |= self.found[i - top][i]
        return grads


@cheat("c3")
class PassForEachLayer(Pipeline):
    """Each layer learns when an error would get there, but the error comes down from the output within that tick."""

    def learn(self) -> dict[str, Tensor]:
        top, grads = len(self.network) - 1, dict[str, Tensor]()
        for i in range(top + 1):
            if len(self.traces) > top - i:
                grads |= self.descend(top - i)[i]
        return grads


@cheat("c3")
class PeeksAhead(Streaming):
    """A streaming rule whose traces have the batch that enters, which the network is run on beside the others."""

    def tick(self, params: Any, state: Any, x: Tensor, y: Tensor, noise: Any, done: int) -> Update:
        update = super().tick(params, state, x, y, noise, done)
        trace, grads = self.network.forward(params, x, noise), dict(update.grads)
        for i, layer in enumerate(self.network.layers[:-1]):
            pullback = trace.pullbacks[i]
            assert pullback is not None
            if layer.weight in grads:
                delta = pullback(state[f"stream.down_{i}"][: len(x)])
                grads |= layer.gradients(trace.inputs[i], delta, self.trainable)
        return update._replace(grads=grads)


@cheat("c3")
class PeeksBelow(Streaming):
    """A streaming rule whose traces have the activity that the layer below computes now and sends for the next tick."""

    def tick(self, params: Any, state: Any, x: Tensor, y: Tensor, noise: Any, done: int) -> Update:
        update = super().tick(params, state, x, y, noise, done)
        grads = dict(update.grads)
        for i, layer in enumerate(self.network.layers[:-1]):
            if i and layer.weight in grads:
                u = update.state[f"stream.input_{i}_{(done + 1) % self.period}"]
                grads |= layer.gradients(u, state[f"stream.down_{i}"], self.trainable)
        return update._replace(grads=grads)


@cheat("c1")
class StreamsThroughOldWeights(apical.RULES["streaming"]):  # type: ignore[misc]
    """A streaming rule whose errors come down through copies of W that its state has carried for a tick."""

    def allocate(self, x: Tensor, y: Tensor) -> None:
        if not self.stream._buffers:
            super().allocate(x, y)
            for i, w in enumerate(self.forward_weights):
                self.stream.register_buffer(f"copy_{i}", w.detach().clone())

    def tick(self, params: Any, state: Any, x: Tensor, y: Tensor, noise: Any, done: int) -> Update:
        copies = {f"feedback.{i}": state[f"stream.copy_{i}"] for i in range(1, len(self.network))}
        update = super().tick({**params, **copies}, state, x, y, noise, done)
        new = {f"stream.copy_{i}": params[layer.weight].clone() for i, layer in enumerate(self.network.layers)}
        return update._replace(state={**update.state, **new})
