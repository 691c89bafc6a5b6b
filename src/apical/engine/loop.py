"""One run in progress: epochs, measurements, checkpoints, and seeds that fail without taking others along."""

import math
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from apical.core.learner import Learner
from apical.core.synapse import Dense
from apical.data import Dataset
from apical.engine import checkpoint as checkpoints
from apical.engine.checkpoint import Checkpoint
from apical.engine.cuda_graphs import Stepper
from apical.engine.device import synchronize
from apical.engine.metrics import alignment, evaluate, record
from apical.engine.progress import Advance, bar
from apical.engine.replicas import Plan, Unit
from apical.engine.settings import Settings
from apical.errors import CheckpointError, DivergenceError

Item = TypeVar("Item")
OnEpoch = Callable[[list[dict[str, Any]]], None]
"""Takes the rows of the epoch that has just ended; what it raises ends the run, and the checkpoint has that epoch."""


class Member(NamedTuple):
    """One learner of a run, its seed, and its settings: in a run of one trial everybody has the same."""

    learner: Learner
    seed: int
    settings: Settings


COMPILE_FROM = {"images": 30_000, "other": 500_000}
"""Steps on a GPU from which `torch.compile` earns back its seconds (docs/engine.md has the figures)."""


BRIEF = 0.5
"""Seconds: a checkpoint that takes longer to write is written less often, so that a tenth of the time goes there."""
SPEED = 2.5e8
"""Bytes per second at which a run's first checkpoint is taken to be written: of its tensors at the beginning, when the
optimiser's are not there yet."""


class Run:
    """One run in progress. Members are counted in their order; what they share is in the first one's settings."""

    def __init__(
        self,
        members: list[Member],
        data: Dataset,
        device: torch.device,
        *,
        stack: bool | None = None,
        compile: bool | None = None,
        fingerprint: dict[str, str] | None = None,
    ) -> None:
        self.members, self.data, self.device = members, data, device
        self.fingerprint = fingerprint or {}
        self.settings = settings = members[0].settings
        self.team = [member.learner for member in members]
        for one in self.team:
            one.to(device).train()
        self.relaid = self._channels_last() if device.type == "cuda" else []
        if self.relaid:
            data = replace(data, x_train=data.x_train.contiguous(memory_format=torch.channels_last))
        self.steps = -(-len(data.x_train) // settings.batch_size)
        self.compile, self.laid = compile, data
        named = isinstance(settings.optimizer, str)
        self._assemble(named and (_stackable(self.team[0], device) if stack is None else stack))
        if stack and not named:
            self.stepper.reasons.append("stacked seeds: the optimiser is not one of apical's")
        self.history: list[list[dict[str, Any]]] = [[] for _ in members]
        self.failed: dict[int, str] = {}
        self.good: dict[int, dict[str, Tensor]] = {}
        self.next_save = -math.inf

    def _assemble(self, stacked: bool) -> None:
        """Units of the learners as they are now, and what steps them."""
        members, settings, steps = self.members, self.settings, self.settings.epochs * self.steps
        self.crews = crews(members) if stacked else [[i] for i in range(len(members))]
        self.units = [self._unit([members[i] for i in crew]) for crew in self.crews]
        named = isinstance(settings.optimizer, str)
        self.stepper = Stepper(
            self.units, self.laid, settings.batch_size, settings.rates(steps), tensor_rates=named
        )
        against = "" if self.compile else "compile=False"
        if self.compile is None:
            against = self._against_compiling(steps)
        for unit in self.units:
            if against:
                unit.reasons.append(f"torch.compile: {against}")
            else:
                unit.compile(self.stepper.batch)
        self.next_tables: tuple[int, list[Tensor]] | None = None

    def _against_compiling(self, steps: int) -> str:
        """Why a run of so many steps is better not compiled; nothing where it is. The same for every run alike."""
        if self.device.type != "cuda":
            return "compiling for the CPU takes longer than it saves"
        pays = COMPILE_FROM["images" if self.relaid else "other"]
        return f"{steps} steps do not earn back its seconds, {pays} would" if steps < pays else ""

    def _channels_last(self) -> list[nn.Parameter]:
        """Lay out the weights of images as cuDNN's kernels want them; else it converts back and forth in every step."""
        if self.data.x_train.ndim != 4:
            return []
        relaid = [p for one in self.team for p in one.parameters() if p.ndim == 4 and p.is_contiguous()]
        for p in relaid:
            p.data = p.data.contiguous(memory_format=torch.channels_last)
        return relaid

    def _unit(self, crew: list[Member]) -> Unit:
        return Unit(
            [member.learner for member in crew],
            [Plan(m.settings.lr, m.settings.optimizer_options, m.settings.clip) for m in crew],
            stacked=len(crew) > 1,
            optimizer=self.settings.optimizer,
        )

    @property
    def reasons(self) -> list[str]:
        """Why a faster way of running was not used, one line each."""
        each = [*self.stepper.reasons, *(reason for unit in self.units for reason in unit.reasons)]
        return list(dict.fromkeys(each))

    def train(
        self,
        path: Path | None,
        saved: Checkpoint | None,
        progress: bool,
        on_epoch: OnEpoch | None = None,
        until: int | None = None,
        save_end: bool = True,
    ) -> None:
        """All epochs, or those up to `until`, from the beginning or from where `saved` stands.

        `save_end` is whether the last epoch has a checkpoint, too; that everything failed always has.
        """
        try:
            self._train(path, saved, progress, on_epoch, until, save_end)
        except RuntimeError as error:
            first = 0 if saved is None else saved.epoch
            begun = any(row["epoch"] > first for rows in self.history for row in rows)
            full = isinstance(error, torch.OutOfMemoryError)
            if begun or full or len(self.crews) == len(self.team):
                raise
            reason = f"stacked seeds: {str(error).splitlines()[0]}"
        else:
            return
        # A rule that looks at a value, say, cannot be stacked, but still trains: from the beginning, each learner alone.
        # Whatever else was wrong is so there, too.
        for i in range(len(self.team)):
            self._put_back(i)
        self._assemble(stacked=False)
        self.stepper.reasons.append(reason)
        self._train(path, saved, progress, on_epoch, until, save_end)

    def _train(
        self,
        path: Path | None,
        saved: Checkpoint | None,
        progress: bool,
        on_epoch: OnEpoch | None,
        until: int | None,
        save_end: bool,
    ) -> None:
        first = 0 if saved is None else self._take_up(saved)
        end = self.settings.epochs if until is None else min(until, self.settings.epochs)
        self._remember()
        self._wait(sum(t.nbytes for tensors in self.good.values() for t in tensors.values()) / SPEED)
        self._report(set(self.failed))
        title = f"{self.settings.rule} {self.settings.model} {self.settings.data}"
        steps = end * self.steps
        with torch.no_grad(), bar(title, steps, min(first * self.steps, steps), progress) as advance:
            for epoch in range(first, end):
                failed = set(self.failed)
                seconds = self._epoch(epoch, advance)
                advance(0, self._note(epoch, seconds))
                last = epoch + 1 == end
                due = save_end if last else time.monotonic() >= self.next_save
                due = due or len(self.failed) == len(self.team)
                if path is not None and due:
                    self._save(path, epoch + 1)
                try:
                    if on_epoch is not None:
                        on_epoch([row for rows in self.history for row in rows if row["epoch"] == epoch + 1])
                except BaseException:
                    if path is not None and not due:
                        self._save(path, epoch + 1)
                    raise
                self._report(failed)
        self._give_back()

    def _epoch(self, epoch: int, advance: Advance) -> float:
        synchronize(self.device)
        began = time.perf_counter()
        noise = [[stream(self.members[i].seed, epoch, 1) for i in crew] for crew in self.crews]
        self.stepper.start(self._tables(epoch), noise, epoch)
        self.stepper.run(lambda: advance(1, ""))
        if self.device.type == "cuda" and epoch + 1 < self.settings.epochs:
            # The device still works through its queue: time to shuffle for the next epoch.
            self.next_tables = epoch + 1, self._tables(epoch + 1)
        synchronize(self.device)
        return time.perf_counter() - began

    def _tables(self, epoch: int) -> list[Tensor]:
        """Each unit's indices of an epoch, from its learners' own shuffles."""
        if self.next_tables is not None and self.next_tables[0] == epoch:
            return self.next_tables[1]
        count = len(self.data.x_train)
        orders = {seed: shuffled(count, seed, epoch) for seed in {m.seed for m in self.members}}
        return [
            self.stepper.table(k, [orders[self.members[i].seed] for i in crew])
            for k, crew in enumerate(self.crews)
        ]

    def _note(self, epoch: int, seconds: float) -> str:
        """Measure, write the rows of this epoch, and end the members whose loss was not finite."""
        rows = []
        for unit, totals, crew in zip(self.units, self.stepper.totals, self.crews, strict=True):
            finite, count = unit.finite(), len(self.data.x_train)
            losses, hits = (totals.loss / count).tolist(), (totals.hits / count).tolist()
            scores = evaluate(unit, self.data.x_test, self.data.y_test, self.data.classes)
            if self.settings.alignment:
                unit.write_back()
            for row, i in enumerate(crew):
                # Weights may break in the very last step, where no training loss is left to show it; and Θ
                # in a step that no loss shows at all.
                sound = finite[row] and math.isfinite(scores[row]["test_loss"]) and math.isfinite(losses[row])
                if not sound and i not in self.failed:
                    self._end(i, epoch)
                if i in self.failed:
                    continue
                row_of_history = record(
                    seed=self.members[i].seed,
                    epoch=epoch + 1,
                    loss=losses[row],
                    accuracy=None if self.data.classes is None else hits[row],
                    **scores[row],
                    seconds=seconds,
                    alignment=self._aligned(i, epoch),
                )
                self.history[i].append(row_of_history)
                rows.append(row_of_history)
        self._remember()
        return _summary(rows)

    def _end(self, i: int, epoch: int) -> None:
        self.failed[i] = (
            f"the loss of seed {self.members[i].seed} was not finite in epoch {epoch + 1}, and the seed was stopped; "
            f"a smaller learning rate than {self.members[i].settings.lr:g}, clip=1.0 or inputs of about unit size may help."
        )

    def _report(self, known: set[int]) -> None:
        """Say which members failed just now; when none is left, that is the end."""
        if len(self.failed) == len(self.team):
            self._give_back()
            raise DivergenceError(" ".join(dict.fromkeys(self.failed.values())))
        for i in self.failed.keys() - known:
            warnings.warn(self.failed[i], stacklevel=4)

    def _aligned(self, i: int, epoch: int) -> dict[str, list[float | None]] | None:
        if not self.settings.alignment:
            return None
        own = torch.Generator(self.device).manual_seed(ASIDE + stream(self.members[i].seed, epoch, 1))
        return alignment(self.team[i], self.data.x_train, self.data.y_train, own)

    def _remember(self) -> None:
        """Keep the last good tensors of every member that is still sound."""
        for unit, crew in zip(self.units, self.crews, strict=True):
            for row, i in enumerate(crew):
                if i not in self.failed:
                    self.good[i] = {name: value.clone() for name, value in unit.tensors(row)}

    def _save(self, path: Path, epoch: int) -> None:
        seeds, began = self.settings.seeds, time.monotonic()
        done = Checkpoint(
            self.settings.to_dict(),
            epoch,
            self.rows(range(len(self.members))),
            {seeds[i]: why for i, why in self.failed.items()},
            {seeds[i]: tensors for i, tensors in self.good.items()},
            self.data.vocabulary,
            self.fingerprint,
        )
        checkpoints.save(path, done)
        self._wait(time.monotonic() - began)

    def _wait(self, seconds: float) -> None:
        """Let as much time pass before the next checkpoint as makes these seconds a tenth of all, unless they are brief."""
        self.next_save = time.monotonic() + 9 * seconds if seconds > BRIEF else -math.inf

    def rows(self, members: Sequence[int]) -> list[dict[str, Any]]:
        """The history of these members, epoch by epoch."""
        return sorted((row for i in members for row in self.history[i]), key=lambda row: int(row["epoch"]))

    def _take_up(self, saved: Checkpoint) -> int:
        seeds = self.settings.seeds
        self.history = [[row for row in saved.history if row["seed"] == seed] for seed in seeds]
        self.failed = {seeds.index(seed): why for seed, why in saved.failed.items()}
        tensors = [[saved.tensors[seeds[i]] for i in crew] for crew in self.crews]
        for unit, own in zip(self.units, tensors, strict=True):
            _require_shapes(unit, own)
        checkpoints.require_same_origin(saved, self.fingerprint)
        for unit, own in zip(self.units, tensors, strict=True):
            unit.restore(own)
        self.good = {
            i: {n: t.to(self.device) for n, t in saved.tensors[seeds[i]].items()} for i in self.failed
        }
        return saved.epoch

    def _give_back(self) -> None:
        """The learners get their numbers: the final ones, or the last good ones of a member that was ended."""
        for unit in self.units:
            unit.write_back()
        for i, learner in enumerate(self.team):
            if i in self.failed:
                self._put_back(i)
            learner.zero_grad()
            learner.eval()
        for p in self.relaid:
            p.data = p.data.contiguous()

    @torch.no_grad()
    def _put_back(self, i: int) -> None:
        """Give a learner the last good numbers."""
        for name, p in [*self.team[i].named_parameters(), *self.team[i].named_buffers()]:
            p.copy_(self.good[i][f"{'param' if isinstance(p, nn.Parameter) else 'buffer'}/{name}"])


SMALL = 50_000
"""Parameters up to which a convolutional network's seeds are stacked on the CPU."""


def _stackable(learner: Learner, device: torch.device) -> bool:
    """Dense layers stack into batched products at no loss; stacked convolutions become grouped ones, which pay
    only where the calls cost more than the arithmetic."""
    if all(isinstance(layer.synapse, Dense) for layer in learner.network.layers):
        return True
    return device.type == "cpu" and sum(p.numel() for p in learner.parameters()) <= SMALL


STACK = 16
"""Learners of one stack. More are two stacks side by side: one computes while the other waits for memory."""


def crews(members: list[Member]) -> list[list[int]]:
    """Who is stacked with whom: members whose rules are the same function, in stacks of like size."""
    alike: list[list[int]] = []
    for i, member in enumerate(members):
        crew = next((c for c in alike if _same_function(members[c[0]].settings, member.settings)), None)
        if crew is None:
            alike.append([i])
        else:
            crew.append(i)
    return [list(part) for crew in alike for part in even(crew, -(-len(crew) // STACK))]


def _same_function(one: Settings, other: Settings) -> bool:
    """Whether two learners compute the same thing from their weights: optimisers may differ."""
    return all(getattr(one, n) == getattr(other, n) for n in ("rule", "options", "loss", "label_smoothing"))


def even(whole: list[Item], count: int) -> Iterator[list[Item]]:
    """So many parts of like size, in order."""
    for k in range(count):
        yield whole[k * len(whole) // count : (k + 1) * len(whole) // count]


ASIDE = (1 << 62) + (1 << 31)
"""Far from every seed of training: what is drawn to measure is not what was drawn to learn. The lower bit is for the
CPU's generator, which has a seed of 32 bits and drops the rest."""


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
    if "test_mse" in rows[0]:
        text += f"  test mse {statistics.fmean(r['test_mse'] for r in rows):.4f}"
    return text


def _require_shapes(unit: Unit, saved: list[dict[str, Tensor]]) -> None:
    wanted = {name: tuple(value.shape) for name, value in unit.tensors(0) if not name.startswith("optim/")}
    for tensors in saved:
        found = {n: tuple(t.shape) for n, t in tensors.items() if not n.startswith("optim/")}
        for name in [*wanted, *found]:
            if wanted.get(name) != found.get(name):
                raise CheckpointError(
                    f"the checkpoint belongs to another network: {name} has shape {found.get(name)} there and "
                    f"{wanted.get(name)} here."
                )
