"""The inner loop: fetch a batch, run the rule, step the optimiser, on tensors that never leave the device.

Everything that changes from step to step (the number of the step, the shuffled indices, the learning rates, the sums of
losses and hits) is a tensor on the device. So a step has no argument and no result, and a whole step can be captured in
one CUDA graph and replayed.
"""

import math
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from apical.core.learner import Update
from apical.core.streams import SideStreams
from apical.data import Dataset
from apical.engine.replicas import ReplicaStack

EAGER_STEPS = 3
"""Eager steps before one is captured: libraries choose their kernels and optimisers create their state."""
MAX_FAILURES = 2
"""Captures that may fail. The first may because a library initialises something; the second finds it done."""


class GraphKey(NamedTuple):
    """What makes a graph: the batch size, the place of each stack in the period of its rule, and the number of steps."""

    size: int
    places: tuple[int | None, ...]
    steps: int


class Totals(NamedTuple):
    """Sums over an epoch, one value per replica. A loss that is not finite makes its sum not finite.

    `rows` counts the examples of outputs that belong to earlier batches than those which were just given to the rule.
    """

    loss: Tensor
    hits: Tensor
    rows: Tensor


class EpochRunner:
    """Runs epochs of training for a list of stacks.

    Lists such as `batches` and `totals` have one entry per stack; k is the number of a stack.

    Args:
        stacks: the replicas to train.
        data: their data, on the device.
        batch_size: examples per step.
        schedule: the factor of the learning rate at every step of the run.

    Optimisers of apical's take learning rates as tensors, as a captured step needs (`tensor_rates`). With others, steps
    run eagerly.
    `reasons` says why CUDA graphs are not used. If it is empty, they are.
    """

    def __init__(self, stacks: list[ReplicaStack], data: Dataset, batch_size: int, schedule: Tensor) -> None:
        self.stacks, self.data, self.schedule = stacks, data, schedule
        self.tensor_rates = not any(stack.has_custom_optimizer for stack in stacks)
        device = data.x_train.device
        self.count = len(data.x_train)
        self.batch_size = min(batch_size, self.count)
        self.steps = -(-self.count // self.batch_size)
        # Channels-last images are indexed in their memory order, (example, height, width, channel).
        x = data.x_train
        self.is_channels_last = x.ndim == 4 and not x.is_contiguous()
        self.x, self.y = x.permute(0, 2, 3, 1) if self.is_channels_last else x, data.y_train
        shapes = [(*([len(stack)] if stack.stacked else []), self.batch_size) for stack in stacks]
        # Each step fetches the batch of the next one. The last step fetches an extra row, whose content does not matter.
        self.indices = [torch.zeros((self.steps + 1, *shape), dtype=torch.long, device=device) for shape in shapes]
        self.step_numbers = [torch.zeros(1, dtype=torch.long, device=device) for _ in stacks]
        self.batches = [
            (self.x.new_empty(*shape, *self.x.shape[1:]), self.y.new_empty(*shape, *self.y.shape[1:]))
            for shape in shapes
        ]
        self.generators = [[torch.Generator(device) for _ in stack.learners] for stack in stacks]
        self.totals = [Totals(*(torch.zeros(len(stack), device=device) for _ in Totals._fields)) for stack in stacks]
        self._prepare_rates()
        self.stack_streams = SideStreams(len(stacks) if len(stacks) > 1 else 0)
        self.side_streams = [SideStreams(2) for _ in stacks]
        self.graphs: dict[GraphKey, torch.cuda.CUDAGraph] = {}
        """The captured steps. The last batch of an epoch has another size, and steps that differ have a graph each."""
        self.period = math.lcm(*(stack.template.period for stack in stacks))
        """After how many steps they repeat. A graph of so many is replayed sooner than one graph after another."""
        self.eager_steps: Counter[int] = Counter()
        """Steps of each batch size that were taken before it was captured."""
        self.failures = 0
        self.reasons: list[str] = [] if device.type == "cuda" else ["CUDA graphs: the device is not CUDA"]
        if not self.tensor_rates:
            self.reasons.append("CUDA graphs: the optimiser is not one of apical's")
        if any(stack.template.network.is_general for stack in stacks):
            self.reasons.append("CUDA graphs: the model is not read as layers")
        if any(stack.template.network.has_hooks for stack in stacks):
            self.reasons.append("CUDA graphs: a module has hooks, which a replayed graph would not run")

    def _prepare_rates(self) -> None:
        """Allocate the learning rates: per stack, a table of an epoch's steps and the row of the current step.

        There is one column per parameter group; the last column is the schedule's factor itself. Optimisers that take
        tensors get views of the current row as their rates.
        """
        self.base_rates = [
            torch.tensor([*(float(group["lr"]) for group in stack.param_groups), 1.0]) for stack in self.stacks
        ]
        self.rates = [torch.zeros(self.steps, len(base), device=self.x.device) for base in self.base_rates]
        self.current_rates = [rates[:1].clone() for rates in self.rates]
        if self.tensor_rates:
            for stack, current in zip(self.stacks, self.current_rates, strict=True):
                for group, rate in zip(stack.param_groups, current[0][:-1], strict=True):
                    group["lr"] = rate

    def make_index_table(self, k: int, orders: list[Tensor]) -> Tensor:
        """Return the shuffled orders of a stack's replicas as a table with one row of example indices per step."""
        padding = self.steps * self.batch_size - self.count
        table = F.pad(torch.stack(orders), (0, padding)).view(-1, self.steps, self.batch_size)
        rows = (table.transpose(0, 1) if self.stacks[k].stacked else table[0]).contiguous()
        return rows.pin_memory() if self.x.is_cuda else rows

    def start(self, tables: list[Tensor], seeds: list[list[int]], epoch: int) -> None:
        """Prepare an epoch from each stack's index table and the seeds of its replicas' noise."""
        rates = self.schedule[epoch * self.steps : (epoch + 1) * self.steps].unsqueeze(1)
        for k, table in enumerate(tables):
            self.indices[k][:-1].copy_(table, non_blocking=True)
            self.rates[k].copy_(rates * self.base_rates[k])
            for generator, seed in zip(self.generators[k], seeds[k], strict=True):
                generator.manual_seed(seed)
            for total in self.totals[k]:
                total.zero_()
            self.stacks[k].done = epoch * self.steps
            self.step_numbers[k].zero_()
            self._fetch_batch(k)

    def run(self, on_step: Callable[[], None]) -> None:
        """Take all steps of the epoch; the last batch may be smaller."""
        position = 0
        while position < self.count:
            changed = [stack.update_decay(stack.done / len(self.schedule)) for stack in self.stacks]
            if any(changed):
                self.graphs.clear()  # a graph has the decay that it was captured with
                self.eager_steps.clear()
            key = self._choose_graph(position)
            if not self.reasons and None not in key.places and key not in self.graphs:
                self.eager_steps[key.size] += 1
                if self.eager_steps[key.size] > EAGER_STEPS:
                    self._capture(key)
            if not self.reasons and key in self.graphs:
                self.graphs[key].replay()
                for stack in self.stacks:
                    stack.done += key.steps
            else:
                key = key._replace(steps=1)
                self._step(key.size)
            for _ in range(key.steps):
                on_step()
            position += key.steps * self.batch_size

    def _choose_graph(self, position: int) -> GraphKey:
        """Return which graph takes the next step, or the next ones up to a whole period, at this example of the epoch."""
        size, places = min(self.batch_size, self.count - position), tuple(stack.place for stack in self.stacks)
        long = [key for key in self.graphs if key.steps > 1]
        fits = position + self.period * self.batch_size <= self.count
        has_schedule = any(stack.decay_schedule for stack in self.stacks)
        is_long = fits and not has_schedule and (not long or places == long[0].places)
        return GraphKey(size, places, self.period if is_long else 1)

    def _capture(self, key: GraphKey) -> None:
        """Capture a step. If that fails, and this was the last attempt, say why in `reasons`."""
        torch.cuda.synchronize()
        graph, done = torch.cuda.CUDAGraph(), [stack.done for stack in self.stacks]
        generators = [generator for own in self.generators for generator in own]
        for generator in generators:
            graph.register_generator_state(generator)  # type: ignore[no-untyped-call]
        try:
            with torch.cuda.graph(graph):
                for _ in range(key.steps):
                    self._step(key.size)
        except RuntimeError as error:
            self.failures += 1
            if self.failures == MAX_FAILURES:
                self.reasons.append(f"CUDA graphs: {str(error).splitlines()[0]}")
            torch.cuda.synchronize()
            # A failed capture leaves all generators, and the device's own, in capture mode: renew their state.
            for generator in [torch.cuda.default_generators[self.x.device.index or 0], *generators]:
                generator.graphsafe_set_state(generator.clone_state())
        else:
            self.graphs[key] = graph
        for stack, count in zip(self.stacks, done, strict=True):
            stack.done = count  # a captured step is not taken

    def _step(self, size: int) -> None:
        """Take one step of every stack, side by side if this is being captured."""
        for k in range(len(self.stacks)):
            with self.stack_streams(k):
                self._step_stack(k, size)
        self.stack_streams.join()

    def _step_stack(self, k: int, size: int) -> None:
        stack, side_stream = self.stacks[k], self.side_streams[k]
        x, y = (values.narrow(int(stack.stacked), 0, size) for values in self.batches[k])
        with side_stream(0):
            torch.index_select(self.rates[k], 0, self.step_numbers[k], out=self.current_rates[k])

        def before_step(update: Update, last: bool) -> None:
            """Wait for the rates, which the optimiser needs. While it steps, add up scores and fetch the next batch."""
            side_stream.join()
            if not self.tensor_rates:
                for group, rate in zip(stack.param_groups, self.current_rates[k][0][:-1].tolist(), strict=True):
                    group["lr"] = rate
            if last:
                with side_stream(0):
                    self._add_to_totals(k, update, y)
                with side_stream(1):
                    stack.template.streams.wait_for("batch")
                    self.step_numbers[k] += 1
                    self._fetch_batch(k, scored=not update.delayed)

        inputs = x.movedim(-1, -3) if self.is_channels_last else x
        stack.step(inputs, y, self.generators[k], before_step, self.current_rates[k][0, -1])
        side_stream.join()

    def _fetch_batch(self, k: int, scored: bool = False) -> None:
        """Copy the examples of a stack's next step into its batch, whose targets may still be needed for the scores."""
        index = self.indices[k].index_select(0, self.step_numbers[k]).flatten()
        x, y = self.batches[k]
        torch.index_select(self.x, 0, index, out=x.view(-1, *self.x.shape[1:]))
        if scored:
            self.side_streams[k].wait(0)
        torch.index_select(self.y, 0, index, out=y.view(-1, *self.y.shape[1:]))

    def _add_to_totals(self, k: int, update: Update, y: Tensor) -> None:
        """Add a step's losses and hits to the sums of the epoch.

        A delayed output belongs to an earlier batch, of which not all rows may count.
        """
        stack, totals, size = self.stacks[k], self.totals[k], update.output.shape[int(self.stacks[k].stacked)]
        if size == 0:  # no batch has come out yet
            return
        streams, hits = stack.template.streams, None
        if self.data.classes is not None:
            streams.wait_for("output")
            targets = update.delayed[0] if update.delayed else y
            hits = update.output.argmax(int(stack.stacked) + stack.template.network.CLASSES) == targets
        streams.wait_for("loss")
        if update.delayed:
            shares, rows = update.delayed[1], update.delayed[2].reshape(-1)
            totals.loss.addcmul_(update.loss.reshape(-1), rows)
            totals.rows.add_(rows)
            if hits is not None:
                weighted = hits.reshape(len(stack), size, -1) * shares.reshape(-1, size, 1)
                totals.hits.addcmul_(weighted.mean((1, 2)), rows)
        else:
            totals.loss.add_(update.loss.reshape(-1), alpha=size)
            if hits is not None:
                totals.hits.add_(hits.reshape(len(stack), -1).float().mean(1), alpha=size)
