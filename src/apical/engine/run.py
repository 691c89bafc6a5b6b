"""One run in progress: epochs, measurements, checkpoints, and seeds that fail without taking others along."""

import math
import statistics
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from apical.data import Dataset
from apical.engine import checkpoint as checkpoints
from apical.engine.checkpoint import Checkpoint
from apical.engine.machine import synchronize
from apical.engine.metrics import alignment, evaluate, record
from apical.engine.progress import Advance, bar
from apical.engine.settings import Settings
from apical.engine.stepper import Stepper
from apical.engine.unit import Unit
from apical.errors import CheckpointError, DivergenceError
from apical.learner import Learner
from apical.synapse import Dense


class Run:
    """One run in progress."""

    def __init__(
        self, settings: Settings, team: list[Learner], data: Dataset, device: torch.device, stack: bool | None
    ) -> None:
        self.settings, self.team, self.data, self.device = settings, team, data, device
        named = isinstance(settings.optimizer, str)
        stacked = len(team) > 1 and named and (_stackable(team[0], device) if stack is None else stack)
        for one in team:
            one.to(device).train()
        crews = [team] if stacked else [[one] for one in team]
        self.units = [
            Unit(
                crew,
                stacked=stacked,
                lr=settings.lr,
                optimizer=settings.optimizer,
                options=settings.optimizer_options,
                clip=settings.clip,
            )
            for crew in crews
        ]
        self.steps = -(-len(data.x_train) // settings.batch_size)
        self.stepper = Stepper(
            self.units,
            data,
            settings.batch_size,
            settings.rates(settings.epochs * self.steps),
            tensor_rates=named,
        )
        self.history: list[dict[str, Any]] = []
        self.failed: dict[int, str] = {}
        self.good: dict[int, dict[str, Tensor]] = {}

    @property
    def seeds_by_unit(self) -> list[list[int]]:
        remaining = iter(self.settings.seeds)
        return [[next(remaining) for _ in unit.learners] for unit in self.units]

    def train(self, path: Path | None, saved: Checkpoint | None, progress: bool) -> None:
        """All epochs, from the beginning or from where `saved` stands."""
        first = 0 if saved is None else self._take_up(saved)
        self._remember()
        self._report(set(self.failed))
        title = f"{self.settings.rule} {self.settings.model} {self.settings.data}"
        steps = self.settings.epochs * self.steps
        with torch.no_grad(), bar(title, steps, first * self.steps, progress) as advance:
            for epoch in range(first, self.settings.epochs):
                failed = set(self.failed)
                seconds = self._epoch(epoch, advance)
                advance(0, self._note(epoch, seconds))
                if path is not None:
                    self._save(path, epoch + 1)
                self._report(failed)
        self._give_back()

    def _epoch(self, epoch: int, advance: Advance) -> float:
        orders = [[shuffled(len(self.data.x_train), s, epoch) for s in seeds] for seeds in self.seeds_by_unit]
        noise = [[stream(s, epoch, 1) for s in seeds] for seeds in self.seeds_by_unit]
        synchronize(self.device)
        began = time.perf_counter()
        self.stepper.start(orders, noise, epoch * self.steps)
        self.stepper.run(lambda: advance(1, ""))
        synchronize(self.device)
        return time.perf_counter() - began

    def _note(self, epoch: int, seconds: float) -> str:
        """Measure, write the rows of this epoch, and end the seeds whose loss was not finite."""
        rows = []
        for unit, totals, seeds in zip(self.units, self.stepper.totals, self.seeds_by_unit, strict=True):
            broken, finite, count = totals.broken.tolist(), unit.finite(), len(self.data.x_train)
            losses, hits = (totals.loss / count).tolist(), (totals.hits / count).tolist()
            test_loss, test_accuracy = evaluate(unit, self.data.x_test, self.data.y_test, self.data.classes)
            if self.settings.alignment:
                unit.write_back()
            for row, (seed, learner) in enumerate(zip(seeds, unit.learners, strict=True)):
                # Weights may break in the very last step, where no training loss is left to show it; and Θ
                # in a step that no loss shows at all.
                sound = finite[row] and math.isfinite(test_loss[row]) and not broken[row]
                if not sound and seed not in self.failed:
                    self._end(seed, epoch)
                if seed in self.failed:
                    continue
                rows.append(
                    record(
                        seed=seed,
                        epoch=epoch + 1,
                        loss=losses[row],
                        accuracy=None if self.data.classes is None else hits[row],
                        test_loss=test_loss[row],
                        test_accuracy=None if test_accuracy is None else test_accuracy[row],
                        seconds=seconds,
                        alignment=self._aligned(learner),
                    )
                )
        self.history += rows
        self._remember()
        return _summary(rows)

    def _end(self, seed: int, epoch: int) -> None:
        self.failed[seed] = (
            f"the loss of seed {seed} was not finite in epoch {epoch + 1}, and the seed was stopped; a smaller "
            "learning rate or clip=1.0 may help."
        )

    def _report(self, known: set[int]) -> None:
        """Say which seeds failed just now; when none is left, that is the end."""
        if len(self.failed) == len(self.team):
            self._give_back()
            raise DivergenceError(" ".join(self.failed.values()))
        for seed in self.failed.keys() - known:
            warnings.warn(self.failed[seed], stacklevel=4)

    def _aligned(self, learner: Learner) -> dict[str, list[float | None]] | None:
        wanted = self.settings.alignment
        return alignment(learner, self.data.x_train, self.data.y_train) if wanted else None

    def _each(self) -> Iterator[tuple[int, Unit, int]]:
        for unit, seeds in zip(self.units, self.seeds_by_unit, strict=True):
            yield from ((seed, unit, row) for row, seed in enumerate(seeds))

    def _remember(self) -> None:
        """Keep the last good tensors of every seed that is still sound."""
        for seed, unit, row in self._each():
            if seed not in self.failed:
                self.good[seed] = {
                    name: unit.of_seed(name, value, row).clone() for name, value in unit.tensors()
                }

    def _save(self, path: Path, epoch: int) -> None:
        done = Checkpoint(self.settings.to_dict(), epoch, self.history, self.failed, self.good)
        checkpoints.save(path, done)

    def _take_up(self, saved: Checkpoint) -> int:
        self.history, self.failed = list(saved.history), dict(saved.failed)
        for unit, seeds in zip(self.units, self.seeds_by_unit, strict=True):
            _require_shapes(unit, [saved.tensors[seed] for seed in seeds])
            unit.restore([saved.tensors[seed] for seed in seeds])
        self.good = {
            seed: {n: t.to(self.device) for n, t in saved.tensors[seed].items()} for seed in self.failed
        }
        return saved.epoch

    def _give_back(self) -> None:
        """The learners get their numbers: the final ones, or the last good ones of a seed that was ended."""
        for unit in self.units:
            unit.write_back()
        with torch.no_grad():
            for learner, seed in zip(self.team, self.settings.seeds, strict=True):
                for name, p in [*learner.named_parameters(), *learner.named_buffers()]:
                    kind = "param" if isinstance(p, nn.Parameter) else "buffer"
                    if seed in self.failed:
                        p.copy_(self.good[seed][f"{kind}/{name}"])
                    p.grad = None
                learner.eval()


SMALL = 50_000
"""Parameters up to which a convolutional network's seeds are stacked on the CPU."""


def _stackable(learner: Learner, device: torch.device) -> bool:
    """Dense layers stack into batched products at no loss; stacked convolutions become grouped ones, which pay
    only where the calls cost more than the arithmetic."""
    if all(isinstance(layer.synapse, Dense) for layer in learner.network.layers):
        return True
    return device.type == "cpu" and sum(p.numel() for p in learner.parameters()) <= SMALL


def stream(seed: int, epoch: int, purpose: int) -> int:
    """A generator's seed for one seed, epoch and purpose, so that a resumed run draws what it would have drawn."""
    return (seed * 1_000_003 + epoch) * 2 + purpose


def shuffled(count: int, seed: int, epoch: int) -> Tensor:
    """The order of the training examples, from a CPU generator: the same on every device."""
    return torch.randperm(count, generator=torch.Generator().manual_seed(stream(seed, epoch, 0)))


def _summary(rows: list[dict[str, Any]]) -> str:
    if not rows:
        return "no seed left"
    text = f"epoch {rows[0]['epoch']}  loss {statistics.fmean(r['loss'] for r in rows):.4f}"
    if "test_accuracy" in rows[0]:
        text += f"  test {100 * statistics.fmean(r['test_accuracy'] for r in rows):.2f}%"
    return text


def _require_shapes(unit: Unit, saved: list[dict[str, Tensor]]) -> None:
    wanted = {
        name: tuple(unit.of_seed(name, value, 0).shape)
        for name, value in unit.tensors()
        if not name.startswith("optim/")
    }
    for tensors in saved:
        found = {n: tuple(t.shape) for n, t in tensors.items() if not n.startswith("optim/")}
        for name in [*wanted, *found]:
            if wanted.get(name) != found.get(name):
                raise CheckpointError(
                    f"the checkpoint belongs to another network: {name} has shape {found.get(name)} there and "
                    f"{wanted.get(name)} here."
                )
