"""The inner loop: index, rule, optimiser, on tensors that never leave the device.

Everything that changes from step to step (the number of the step, the shuffled orders, the learning rates, the
sums of loss and hits) is a tensor on the device, so that a step has no argument and no result. That is what lets
a whole step be captured in one CUDA graph and replayed.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from apical.core.learner import Update
from apical.data import Dataset
from apical.engine.replicas import Unit
from apical.engine.streams import SideStreams

WARMUP = 3
"""Steps run eagerly before one is captured: libraries choose their kernels, optimisers make their state."""
TRIES = 2
"""Captures that may break off: a library that sets something up in the first one has it in the second."""


class Totals(NamedTuple):
    """Sums over an epoch, one value per learner. A loss that is not finite leaves its sum not finite."""

    loss: Tensor
    hits: Tensor


class Stepper:
    """Runs epochs of training for a list of units; `reasons` says why a fast path was not taken."""

    def __init__(
        self, units: list[Unit], data: Dataset, batch: int, schedule: Tensor, *, tensor_rates: bool
    ) -> None:
        self.units, self.data = units, data
        device = data.x_train.device
        self.count = len(data.x_train)
        self.batch = min(batch, self.count)
        self.steps = -(-self.count // self.batch)
        # Images in channels-last memory are gathered as such.
        x = data.x_train
        self.nhwc = x.ndim == 4 and not x.is_contiguous()
        self.x, self.y = x.permute(0, 2, 3, 1) if self.nhwc else x, data.y_train
        rows = [(*([len(unit)] if unit.stacked else []), self.batch) for unit in units]
        # Each step gathers the batch of the next one: after the last there is one row more, of anything.
        self.orders = [torch.zeros((self.steps + 1, *row), dtype=torch.long, device=device) for row in rows]
        self.numbers = [torch.zeros(1, dtype=torch.long, device=device) for _ in units]
        self.batches = [
            (self.x.new_empty(*row, *self.x.shape[1:]), self.y.new_empty(*row, *self.y.shape[1:]))
            for row in rows
        ]
        self.generators = [[torch.Generator(device) for _ in unit.learners] for unit in units]
        self.totals = [
            Totals(torch.zeros(len(unit), device=device), torch.zeros(len(unit), device=device))
            for unit in units
        ]
        self._plan_rates(schedule, tensor_rates)
        self.lanes = SideStreams(device, len(units) if len(units) > 1 else 0)
        self.beside = [SideStreams(device, 1) for _ in units]
        self.graphs: dict[int, Graph] = {}
        self.reasons: list[str] = [] if device.type == "cuda" else ["CUDA graphs: the device is not CUDA"]
        if not tensor_rates:
            self.reasons.append("CUDA graphs: the optimiser is not one of apical's")

    def _plan_rates(self, schedule: Tensor, tensor_rates: bool) -> None:
        """Every group's rate at every step, and the schedule itself in the last column; the optimisers' own rates are
        views of the current row."""
        self.schedule, self.tensor_rates = schedule, tensor_rates
        self.bases = [torch.tensor([*(float(g["lr"]) for g in unit.groups), 1.0]) for unit in self.units]
        self.rates = [torch.zeros(self.steps, len(base), device=self.x.device) for base in self.bases]
        self.current = [rates[:1].clone() for rates in self.rates]
        if tensor_rates:
            for unit, current in zip(self.units, self.current, strict=True):
                for group, rate in zip(unit.groups, current[0][:-1], strict=True):
                    group["lr"] = rate

    def table(self, k: int, orders: list[Tensor]) -> Tensor:
        """The shuffled orders of a unit's learners as one row of indices per step, ready for the device."""
        short = self.steps * self.batch - self.count
        table = F.pad(torch.stack(orders), (0, short)).view(-1, self.steps, self.batch)
        rows = (table.transpose(0, 1) if self.units[k].stacked else table[0]).contiguous()
        return rows.pin_memory() if self.x.is_cuda else rows

    def start(self, tables: list[Tensor], seeds: list[list[int]], epoch: int) -> None:
        """Begin an epoch: each unit's table of indices and the seeds of its learners' noise."""
        rates = self.schedule[epoch * self.steps : (epoch + 1) * self.steps].unsqueeze(1)
        for k, table in enumerate(tables):
            self.orders[k][:-1].copy_(table, non_blocking=True)
            self.rates[k].copy_(rates * self.bases[k])
            for generator, seed in zip(self.generators[k], seeds[k], strict=True):
                generator.manual_seed(seed)
            for total in self.totals[k]:
                total.zero_()
            self.numbers[k].zero_()
            self._gather(k)

    def run(self, on_step: Callable[[], None]) -> None:
        """All the steps of one epoch; the last batch may be smaller."""
        for position in range(0, self.count, self.batch):
            size = min(self.batch, self.count - position)
            if self.reasons:
                self._step(size)
            else:
                if size not in self.graphs:
                    self.graphs[size] = Graph(size)
                self.graphs[size](self)
            on_step()

    def _step(self, size: int) -> None:
        for k in range(len(self.units)):
            with self.lanes(k):
                self._step_unit(k, size)
        self.lanes.join()

    def _step_unit(self, k: int, size: int) -> None:
        unit, beside = self.units[k], self.beside[k]
        x, y = (values.narrow(int(unit.stacked), 0, size) for values in self.batches[k])
        with beside(0):
            torch.index_select(self.rates[k], 0, self.numbers[k], out=self.current[k])

        def before_step(update: Update, last: bool) -> None:
            """The optimiser needs its rates; while it steps, count, and fetch the next batch."""
            beside.join()
            if not self.tensor_rates:
                for group, rate in zip(unit.groups, self.current[k][0][:-1].tolist(), strict=True):
                    group["lr"] = rate
            if last:
                with beside(0):
                    self._count(k, update, y)
                    self.numbers[k] += 1
                    self._gather(k)

        images = x.movedim(-1, -3) if self.nhwc else x
        unit.step(images, y, self.generators[k], before_step, self.current[k][0, -1])
        beside.join()

    def _gather(self, k: int) -> None:
        """Put the examples of this unit's next step into its batch."""
        index = self.orders[k].index_select(0, self.numbers[k]).flatten()
        for source, batch in zip((self.x, self.y), self.batches[k], strict=True):
            torch.index_select(source, 0, index, out=batch.view(-1, *source.shape[1:]))

    def _count(self, k: int, update: Update, y: Tensor) -> None:
        """Add a step's losses and hits to the sums of the epoch."""
        unit, totals = self.units[k], self.totals[k]
        axis = int(unit.stacked)
        size = y.shape[axis]
        totals.loss.add_(update.loss.reshape(-1), alpha=size)
        if self.data.classes is not None:
            hits = update.output.argmax(axis + unit.template.network.CLASSES) == y
            totals.hits.add_(hits.reshape(len(unit), -1).float().mean(1), alpha=size)


class Graph:
    """One size of batch: eager for the first steps, then captured once and replayed.

    It does not hold the stepper that it belongs to: the two, and the device memory of both, go when the run does, and
    not whenever Python looks for rings of objects, which may be in the middle of the next capture.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.calls = self.tries = 0
        self.graph: torch.cuda.CUDAGraph | None = None

    def __call__(self, stepper: Stepper) -> None:
        self.calls += 1
        if self.calls > WARMUP and self.graph is None:
            self.graph = self._capture(stepper)
        if self.graph is None:
            stepper._step(self.size)
        else:
            self.graph.replay()

    def _capture(self, stepper: Stepper) -> torch.cuda.CUDAGraph | None:
        self.tries += 1
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        for generators in stepper.generators:
            for generator in generators:
                graph.register_generator_state(generator)  # type: ignore[no-untyped-call]
        try:
            with torch.cuda.graph(graph):
                stepper._step(self.size)
        except RuntimeError as error:
            if self.tries == TRIES:
                stepper.reasons.append(f"CUDA graphs: {str(error).splitlines()[0]}")
            torch.cuda.synchronize()
            _free_generators(stepper)
            return None
        return graph


def _free_generators(stepper: Stepper) -> None:
    """A capture that broke off leaves its generators, and the device's own, waiting for its end: renew them."""
    default = torch.cuda.default_generators[stepper.x.device.index or 0]
    for generator in [default, *(g for each in stepper.generators for g in each)]:
        generator.graphsafe_set_state(generator.clone_state())
