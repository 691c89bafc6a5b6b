"""The inner loop: index, rule, optimiser, on tensors that never leave the device.

Everything that changes from step to step (the position in the shuffled order, the step number, the learning
rates, the sums of loss and hits) is a tensor on the device, so that a step has no argument and no result. That
is what lets a whole step be captured in one CUDA graph and replayed.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor

from apical.data import Dataset
from apical.engine.unit import Unit

WARMUP = 3
"""Steps run eagerly before one is captured: libraries choose their kernels, optimisers make their state."""


class Totals(NamedTuple):
    """Sums over an epoch, one value per seed."""

    loss: Tensor
    hits: Tensor
    broken: Tensor
    """Whether any loss was not finite."""


class Stepper:
    """Runs epochs of training for a list of units; `reasons` says why a fast path was not taken."""

    def __init__(
        self, units: list[Unit], data: Dataset, batch: int, schedule: Tensor, *, tensor_rates: bool
    ) -> None:
        self.units, self.data, self.batch = units, data, batch
        self.x, self.y = data.x_train, data.y_train
        device = self.x.device
        self.count = len(self.x)
        self.span = torch.arange(min(batch, self.count), device=device)
        self.cursor = torch.zeros((), dtype=torch.long, device=device)
        self.number = torch.zeros(1, dtype=torch.long, device=device)
        self.orders = [
            torch.zeros(
                (len(unit), self.count) if unit.stacked else self.count, dtype=torch.long, device=device
            )
            for unit in units
        ]
        self.generators = [[torch.Generator(device) for _ in unit.learners] for unit in units]
        self.totals = [
            Totals(*(torch.zeros(len(unit), dtype=kind, device=device) for kind in _TOTALS)) for unit in units
        ]
        self._plan_rates(schedule, tensor_rates)
        # On CUDA each unit has a stream of its own, so that small kernels of several seeds overlap.
        overlap = device.type == "cuda" and len(units) > 1
        self.streams = [torch.cuda.Stream(device) for _ in units] if overlap else []
        self.graphs: dict[int, Graph] = {}
        self.reasons: list[str] = [] if device.type == "cuda" else ["CUDA graphs: the device is not CUDA"]
        if not tensor_rates:
            self.reasons.append("CUDA graphs: the optimiser is not one of apical's")

    def _plan_rates(self, schedule: Tensor, tensor_rates: bool) -> None:
        """Every group's rate at every step; the optimisers' own rates are views of the current row."""
        base = torch.tensor([float(group["lr"]) for group in self.units[0].optim.param_groups])
        self.rates = (schedule.unsqueeze(1) * base).to(self.x.device)
        self.current = self.rates[:1].clone()
        self.tensor_rates = tensor_rates
        if tensor_rates:
            for unit in self.units:
                for group, rate in zip(unit.optim.param_groups, self.current[0], strict=True):
                    group["lr"] = rate

    def start(self, orders: list[list[Tensor]], seeds: list[list[int]], number: int) -> None:
        """Begin an epoch: each seed's shuffled order, the seed of its noise, and the number of steps so far."""
        for unit, target, order, generators, noise_seeds in zip(
            self.units, self.orders, orders, self.generators, seeds, strict=True
        ):
            target.copy_(torch.stack(order) if unit.stacked else order[0])
            for generator, seed in zip(generators, noise_seeds, strict=True):
                generator.manual_seed(seed)
        for totals in self.totals:
            for total in totals:
                total.zero_()
        self.cursor.zero_()
        self.number.fill_(number)

    def run(self, on_step: Callable[[], None]) -> None:
        """All the steps of one epoch; the last batch may be smaller."""
        for position in range(0, self.count, self.batch):
            size = min(self.batch, self.count - position)
            if self.reasons:
                self._step(size)
            else:
                if size not in self.graphs:
                    self.graphs[size] = Graph(self, size)
                self.graphs[size]()
            on_step()

    def _step(self, size: int) -> None:
        torch.index_select(self.rates, 0, self.number, out=self.current)
        if not self.tensor_rates:
            for unit in self.units:
                for group, rate in zip(unit.optim.param_groups, self.current[0].tolist(), strict=True):
                    group["lr"] = rate
        for k in range(len(self.units)):
            with self._lane(k):
                self._step_unit(k, size)
        for stream in self.streams:
            torch.cuda.current_stream(self.x.device).wait_stream(stream)
        self.cursor += size
        self.number += 1

    def _lane(self, k: int) -> AbstractContextManager[object]:
        if not self.streams:
            return nullcontext()
        self.streams[k].wait_stream(torch.cuda.current_stream(self.x.device))
        return torch.cuda.stream(self.streams[k])

    def _step_unit(self, k: int, size: int) -> None:
        unit, totals = self.units[k], self.totals[k]
        index = self.orders[k].index_select(-1, self.span[:size] + self.cursor)
        x = self.x.index_select(0, index.flatten()).view(*index.shape, *self.x.shape[1:])
        y = self.y.index_select(0, index.flatten()).view(*index.shape, *self.y.shape[1:])
        update = unit.step(x, y, self.generators[k])
        loss = update.loss.reshape(-1)
        totals.loss.add_(loss, alpha=size)
        totals.broken.logical_or_(~loss.isfinite())
        if self.data.classes is not None:
            hits = update.output.argmax(index.ndim) == y
            totals.hits.add_(hits.reshape(len(unit), -1).float().mean(1), alpha=size)


_TOTALS = (torch.float32, torch.float32, torch.bool)


class Graph:
    """One size of batch: eager for the first steps, then captured once and replayed."""

    def __init__(self, stepper: Stepper, size: int) -> None:
        self.stepper, self.size = stepper, size
        self.calls = 0
        self.graph: torch.cuda.CUDAGraph | None = None

    def __call__(self) -> None:
        self.calls += 1
        if self.calls <= WARMUP:
            self.stepper._step(self.size)
            return
        if self.graph is None:
            self.graph = self._capture()
        if self.graph is None:
            self.stepper._step(self.size)
        else:
            self.graph.replay()

    def _capture(self) -> torch.cuda.CUDAGraph | None:
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        for generators in self.stepper.generators:
            for generator in generators:
                graph.register_generator_state(generator)  # type: ignore[no-untyped-call]
        try:
            with torch.cuda.graph(graph):
                self.stepper._step(self.size)
        except RuntimeError as error:
            self.stepper.reasons.append(f"CUDA graphs: {str(error).splitlines()[0]}")
            torch.cuda.synchronize()
            self._free_generators()
            return None
        return graph

    def _free_generators(self) -> None:
        """A capture that broke off leaves its generators, and the device's own, waiting for its end: renew them."""
        default = torch.cuda.default_generators[self.stepper.x.device.index or 0]
        for generator in [default, *(g for each in self.stepper.generators for g in each)]:
            generator.graphsafe_set_state(generator.clone_state())
