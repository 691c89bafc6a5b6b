"""The training loop of one run: epochs, measurements, checkpoints, and replicas that fail without stopping the others."""

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
from apical.engine.cuda_graphs import EpochRunner
from apical.engine.device import synchronize
from apical.engine.metrics import evaluate, make_history_row, measure_alignment
from apical.engine.progress import Advance, show_progress
from apical.engine.replicas import ReplicaStack, StepSettings
from apical.engine.settings import Settings
from apical.errors import CheckpointError, DivergenceError

Item = TypeVar("Item")
OnEpoch = Callable[[list[dict[str, Any]]], None]
"""Called with the history rows of each epoch. An exception it raises ends the run; the checkpoint has that epoch."""


class Replica(NamedTuple):
    """One learner of a run with its seed and its settings, which differ between the trials of a sweep."""

    learner: Learner
    seed: int
    settings: Settings


MIN_STEPS_TO_COMPILE = {"images": 30_000, "other": 500_000}
"""Steps on a GPU from which `torch.compile` saves more time than it takes (docs/engine.md has the measurements)."""


FAST_SAVE_SECONDS = 0.5
"""A checkpoint that takes longer to write is written less often, so that saving takes a tenth of the time."""
ASSUMED_WRITE_SPEED = 2.5e8
"""Bytes per second, to estimate how long the first checkpoint takes from the size of the tensors at the start (when the
optimiser has no state yet)."""


class Run:
    """A run in progress.

    Replicas are known by their position in `replicas`. Settings that all share are read from the first one.
    `stacks` are the replicas' tensors, and `stack_indices` says which replicas each stack has, in its order.
    """

    def __init__(
        self,
        replicas: list[Replica],
        data: Dataset,
        device: torch.device,
        *,
        stack: bool | None = None,
        compile: bool | None = None,
        fingerprint: dict[str, str] | None = None,
    ) -> None:
        self.replicas, self.data, self.device = replicas, data, device
        self.fingerprint = fingerprint or {}
        self.settings = settings = replicas[0].settings
        self.learners = [replica.learner for replica in replicas]
        for learner in self.learners:
            learner.to(device).train()
        self.channels_last_weights = self._use_channels_last() if device.type == "cuda" else []
        if self.channels_last_weights:
            data = replace(data, x_train=data.x_train.contiguous(memory_format=torch.channels_last))
        self.steps_per_epoch = -(-len(data.x_train) // settings.batch_size)
        self.compile, self.training_data = compile, data
        is_ours = isinstance(settings.optimizer, str)
        self._build_stacks(is_ours and (_should_stack(self.learners[0], device) if stack is None else stack))
        if stack and not is_ours:
            self.epoch_runner.reasons.append("stacked seeds: the optimiser is not one of apical's")
        self.history: list[list[dict[str, Any]]] = [[] for _ in replicas]
        self.failed: dict[int, str] = {}
        self.last_good: dict[int, dict[str, Tensor]] = {}
        self.next_save_time = -math.inf

    def _build_stacks(self, stacked: bool) -> None:
        """Build the stacks from the learners' current weights, and the object that runs their epochs."""
        replicas, settings = self.replicas, self.settings
        steps = settings.epochs * self.steps_per_epoch
        self.stack_indices = group_replicas(replicas) if stacked else [[i] for i in range(len(replicas))]
        self.stacks = [self._build_stack([replicas[i] for i in indices]) for indices in self.stack_indices]
        self.epoch_runner = EpochRunner(
            self.stacks,
            self.training_data,
            settings.batch_size,
            settings.compute_rates(steps),
            tensor_rates=isinstance(settings.optimizer, str),
        )
        reason = "" if self.compile else "compile=False"
        if self.compile is None:
            reason = self._reason_not_to_compile(steps)
        for stack in self.stacks:
            if reason:
                stack.reasons.append(f"torch.compile: {reason}")
            else:
                stack.compile(self.epoch_runner.batch_size)
        self.next_tables: tuple[int, list[Tensor]] | None = None

    def _reason_not_to_compile(self, steps: int) -> str:
        """Return why a run of so many steps should not be compiled, or an empty string.

        The answer depends on the settings alone, so that a run repeated on the same device makes the same choice.
        """
        if self.device.type != "cuda":
            return "compiling for the CPU takes longer than it saves"
        enough = MIN_STEPS_TO_COMPILE["images" if self.channels_last_weights else "other"]
        return f"{steps} steps do not earn back its seconds, {enough} would" if steps < enough else ""

    def _use_channels_last(self) -> list[nn.Parameter]:
        """Store convolution weights channels-last and return them; otherwise cuDNN converts them in every step."""
        if self.data.x_train.ndim != 4:
            return []
        weights = [p for learner in self.learners for p in learner.parameters() if p.ndim == 4 and p.is_contiguous()]
        for p in weights:
            p.data = p.data.contiguous(memory_format=torch.channels_last)
        return weights

    def _build_stack(self, replicas: list[Replica]) -> ReplicaStack:
        return ReplicaStack(
            [replica.learner for replica in replicas],
            [StepSettings(r.settings.lr, r.settings.optimizer_options, r.settings.clip) for r in replicas],
            stacked=len(replicas) > 1,
            optimizer=self.settings.optimizer,
        )

    @property
    def reasons(self) -> list[str]:
        """Why a faster way of running was not used, one line each."""
        lines = [*self.epoch_runner.reasons, *(reason for stack in self.stacks for reason in stack.reasons)]
        return list(dict.fromkeys(lines))

    def train(
        self,
        path: Path | None,
        saved: Checkpoint | None,
        progress: bool,
        on_epoch: OnEpoch | None = None,
        until: int | None = None,
        save_end: bool = True,
    ) -> None:
        """Train all epochs, or those up to `until`, from the beginning or from the checkpoint `saved`.

        `save_end` is whether to write a checkpoint after the last epoch. One is always written when all replicas failed.
        """
        try:
            self._train_epochs(path, saved, progress, on_epoch, until, save_end)
        except RuntimeError as error:
            first = 0 if saved is None else saved.epoch
            has_begun = any(row["epoch"] > first for rows in self.history for row in rows)
            is_full = isinstance(error, torch.OutOfMemoryError)
            if has_begun or is_full or len(self.stack_indices) == len(self.learners):
                raise
            reason = f"stacked seeds: {str(error).splitlines()[0]}"
        else:
            return
        # Some rules cannot run under vmap, for example because they read a tensor's value. Train each learner alone, from
        # the beginning. An error of another kind is raised again there.
        for i in range(len(self.learners)):
            self._restore_weights(i)
        self._build_stacks(stacked=False)
        self.epoch_runner.reasons.append(reason)
        self._train_epochs(path, saved, progress, on_epoch, until, save_end)

    def _train_epochs(
        self,
        path: Path | None,
        saved: Checkpoint | None,
        progress: bool,
        on_epoch: OnEpoch | None,
        until: int | None,
        save_end: bool,
    ) -> None:
        first = 0 if saved is None else self._resume_from(saved)
        end = self.settings.epochs if until is None else min(until, self.settings.epochs)
        self._keep_good_tensors()
        size = sum(t.nbytes for tensors in self.last_good.values() for t in tensors.values())
        self._schedule_next_save(size / ASSUMED_WRITE_SPEED)
        self._warn_of_failures(set(self.failed))
        title = f"{self.settings.rule} {self.settings.model} {self.settings.data}"
        steps = end * self.steps_per_epoch
        done = min(first * self.steps_per_epoch, steps)
        with torch.no_grad(), show_progress(title, steps, done, progress) as advance:
            for epoch in range(first, end):
                failed_before = set(self.failed)
                seconds = self._run_epoch(epoch, advance)
                advance(0, self._record_epoch(epoch, seconds))
                is_last = epoch + 1 == end
                is_due = save_end if is_last else time.monotonic() >= self.next_save_time
                is_due = is_due or len(self.failed) == len(self.learners)
                if path is not None and is_due:
                    self._save(path, epoch + 1)
                try:
                    if on_epoch is not None:
                        on_epoch([row for rows in self.history for row in rows if row["epoch"] == epoch + 1])
                except BaseException:
                    if path is not None and not is_due:
                        self._save(path, epoch + 1)
                    raise
                self._warn_of_failures(failed_before)
        self._return_weights()

    def _run_epoch(self, epoch: int, advance: Advance) -> float:
        """Take all steps of one epoch and return the seconds that they took."""
        synchronize(self.device)
        start = time.perf_counter()
        noise_seeds = [
            [derive_seed(self.replicas[i].seed, epoch, NOISE) for i in indices] for indices in self.stack_indices
        ]
        self.epoch_runner.start(self._make_index_tables(epoch), noise_seeds, epoch)
        self.epoch_runner.run(lambda: advance(1, ""))
        if self.device.type == "cuda" and epoch + 1 < self.settings.epochs:
            # The GPU is still working through its queue: shuffle for the next epoch meanwhile.
            self.next_tables = epoch + 1, self._make_index_tables(epoch + 1)
        synchronize(self.device)
        return time.perf_counter() - start

    def _make_index_tables(self, epoch: int) -> list[Tensor]:
        """Return each stack's table of shuffled example indices for one epoch."""
        if self.next_tables is not None and self.next_tables[0] == epoch:
            return self.next_tables[1]
        count = len(self.data.x_train)
        orders = {seed: shuffle_indices(count, seed, epoch) for seed in {r.seed for r in self.replicas}}
        return [
            self.epoch_runner.make_index_table(k, [orders[self.replicas[i].seed] for i in indices])
            for k, indices in enumerate(self.stack_indices)
        ]

    def _record_epoch(self, epoch: int, seconds: float) -> str:
        """Evaluate, add this epoch's rows to the history, mark diverged replicas as failed; return a summary."""
        rows = []
        for stack, totals, indices in zip(self.stacks, self.epoch_runner.totals, self.stack_indices, strict=True):
            finite, count = stack.are_finite(), len(self.data.x_train)
            losses, hits = (totals.loss / count).tolist(), (totals.hits / count).tolist()
            scores = evaluate(stack, self.data.x_test, self.data.y_test, self.data.classes)
            if self.settings.alignment:
                stack.write_back()
            for row, i in enumerate(indices):
                # Check the weights, too: they may overflow in the last step, after the last training loss, and Θ
                # may overflow without any effect on a loss.
                sound = finite[row] and math.isfinite(scores[row]["test_loss"]) and math.isfinite(losses[row])
                if not sound and i not in self.failed:
                    self._mark_failed(i, epoch)
                if i in self.failed:
                    continue
                history_row = make_history_row(
                    seed=self.replicas[i].seed,
                    epoch=epoch + 1,
                    loss=losses[row],
                    accuracy=None if self.data.classes is None else hits[row],
                    **scores[row],
                    seconds=seconds,
                    alignment=self._measure_alignment(i, epoch),
                )
                self.history[i].append(history_row)
                rows.append(history_row)
        self._keep_good_tensors()
        return _summarize(rows)

    def _mark_failed(self, i: int, epoch: int) -> None:
        self.failed[i] = (
            f"the loss of seed {self.replicas[i].seed} was not finite in epoch {epoch + 1}, and the seed was stopped; "
            f"a smaller learning rate than {self.replicas[i].settings.lr:g}, clip=1.0 or inputs of about unit size may help."
        )

    def _warn_of_failures(self, known: set[int]) -> None:
        """Warn of each replica that failed and is not in `known`. If all have failed, raise DivergenceError."""
        if len(self.failed) == len(self.learners):
            self._return_weights()
            raise DivergenceError(" ".join(dict.fromkeys(self.failed.values())))
        for i in self.failed.keys() - known:
            warnings.warn(self.failed[i], stacklevel=4)

    def _measure_alignment(self, i: int, epoch: int) -> dict[str, list[float | None]] | None:
        """Return the alignment of replica i if the settings ask for it, measured with noise of its own."""
        if not self.settings.alignment:
            return None
        seed = MEASUREMENT_OFFSET + derive_seed(self.replicas[i].seed, epoch, NOISE)
        generator = torch.Generator(self.device).manual_seed(seed)
        return measure_alignment(self.learners[i], self.data.x_train, self.data.y_train, generator)

    def _keep_good_tensors(self) -> None:
        """Keep a copy of the current tensors of every replica that has not failed."""
        for stack, indices in zip(self.stacks, self.stack_indices, strict=True):
            for row, i in enumerate(indices):
                if i not in self.failed:
                    self.last_good[i] = {name: value.clone() for name, value in stack.named_tensors(row)}

    def _save(self, path: Path, epoch: int) -> None:
        """Write a checkpoint of this epoch."""
        seeds, start = self.settings.seeds, time.monotonic()
        checkpoint = Checkpoint(
            self.settings.to_dict(),
            epoch,
            self.collect_history(range(len(self.replicas))),
            {seeds[i]: why for i, why in self.failed.items()},
            {seeds[i]: tensors for i, tensors in self.last_good.items()},
            self.data.vocabulary,
            self.fingerprint,
        )
        checkpoints.save(path, checkpoint)
        self._schedule_next_save(time.monotonic() - start)

    def _schedule_next_save(self, seconds: float) -> None:
        """Delay the next checkpoint so that saving, which took `seconds`, takes a tenth of the time, unless it is fast."""
        self.next_save_time = time.monotonic() + 9 * seconds if seconds > FAST_SAVE_SECONDS else -math.inf

    def collect_history(self, indices: Sequence[int]) -> list[dict[str, Any]]:
        """Return the history rows of these replicas, epoch by epoch."""
        return sorted((row for i in indices for row in self.history[i]), key=lambda row: int(row["epoch"]))

    def _resume_from(self, saved: Checkpoint) -> int:
        """Load a checkpoint and return the number of epochs that it has done."""
        seeds = self.settings.seeds
        self.history = [[row for row in saved.history if row["seed"] == seed] for seed in seeds]
        self.failed = {seeds.index(seed): why for seed, why in saved.failed.items()}
        tensors = [[saved.tensors[seeds[i]] for i in indices] for indices in self.stack_indices]
        for stack, own in zip(self.stacks, tensors, strict=True):
            _require_same_shapes(stack, own)
        checkpoints.require_same_origin(saved, self.fingerprint)
        for stack, own in zip(self.stacks, tensors, strict=True):
            stack.restore(own)
        self.last_good = {i: {n: t.to(self.device) for n, t in saved.tensors[seeds[i]].items()} for i in self.failed}
        return saved.epoch

    def _return_weights(self) -> None:
        """Give the learners their final weights, or the last good ones of a replica that failed."""
        for stack in self.stacks:
            stack.write_back()
        for i, learner in enumerate(self.learners):
            if i in self.failed:
                self._restore_weights(i)
            learner.zero_grad()
            learner.eval()
        for p in self.channels_last_weights:
            p.data = p.data.contiguous()

    @torch.no_grad()
    def _restore_weights(self, i: int) -> None:
        """Give learner i its last good weights and buffers."""
        learner = self.learners[i]
        for name, p in [*learner.named_parameters(), *learner.named_buffers()]:
            p.copy_(self.last_good[i][f"{'param' if isinstance(p, nn.Parameter) else 'buffer'}/{name}"])


SMALL_NETWORK = 50_000
"""Parameters up to which the replicas of a convolutional network are stacked on the CPU."""


def _should_stack(learner: Learner, device: torch.device) -> bool:
    """Return whether stacking such replicas is faster.

    Stacked dense layers become batched matrix products, which lose nothing. Stacked convolutions become grouped ones, which
    are faster only where the calls cost more than the arithmetic.
    """
    if all(isinstance(layer.synapse, Dense) for layer in learner.network.layers):
        return True
    return device.type == "cpu" and sum(p.numel() for p in learner.parameters()) <= SMALL_NETWORK


MAX_STACK_SIZE = 16
"""Replicas in one stack. More become several stacks: one computes while another waits for memory."""


def group_replicas(replicas: list[Replica]) -> list[list[int]]:
    """Return the indices of the replicas in each stack: those whose rule is the same function, in parts of similar size."""
    groups: list[list[int]] = []
    for i, replica in enumerate(replicas):
        group = next((g for g in groups if _is_same_function(replicas[g[0]].settings, replica.settings)), None)
        if group is None:
            groups.append([i])
        else:
            group.append(i)
    return [part for group in groups for part in split_evenly(group, -(-len(group) // MAX_STACK_SIZE))]


def _is_same_function(one: Settings, other: Settings) -> bool:
    """Return whether two learners compute the same from the same weights; their optimisers may differ."""
    return all(getattr(one, n) == getattr(other, n) for n in ("rule", "options", "loss", "label_smoothing"))


def split_evenly(items: list[Item], parts: int) -> Iterator[list[Item]]:
    """Yield the items in so many consecutive parts of similar size.

    >>> list(split_evenly([1, 2, 3, 4, 5], 2))
    [[1, 2], [3, 4, 5]]
    """
    for k in range(parts):
        yield items[k * len(items) // parts : (k + 1) * len(items) // parts]


SHUFFLING, NOISE = 0, 1
"""What a derived seed is used for."""
MEASUREMENT_OFFSET = (1 << 62) + (1 << 31)
"""Added to a seed for measurements, so that they draw other numbers than training. 1 << 31 is for the CPU's generator, which
uses only the lower 32 bits of a seed."""


def derive_seed(seed: int, epoch: int, purpose: int) -> int:
    """Return the seed of a generator for one replica's seed, epoch and purpose.

    It does not depend on earlier epochs, so a resumed run draws the same numbers as an uninterrupted one.
    """
    return (seed * 1_000_003 + epoch) * 2 + purpose


def shuffle_indices(count: int, seed: int, epoch: int) -> Tensor:
    """Return the order of the training examples, from a CPU generator: the same on every device."""
    return torch.randperm(count, generator=torch.Generator().manual_seed(derive_seed(seed, epoch, SHUFFLING)))


def _summarize(rows: list[dict[str, Any]]) -> str:
    """Return the text beside the progress bar: means over the replicas."""
    if not rows:
        return "no seed left"
    text = f"epoch {rows[0]['epoch']}  loss {statistics.fmean(r['loss'] for r in rows):.4f}"
    if "test_accuracy" in rows[0]:
        text += f"  test {100 * statistics.fmean(r['test_accuracy'] for r in rows):.2f}%"
    if "test_mse" in rows[0]:
        text += f"  test mse {statistics.fmean(r['test_mse'] for r in rows):.4f}"
    return text


def _require_same_shapes(stack: ReplicaStack, saved: list[dict[str, Tensor]]) -> None:
    """Check that the checkpoint's tensors have the names and shapes of the network's."""
    wanted = {name: tuple(value.shape) for name, value in stack.named_tensors(0) if not name.startswith("optim/")}
    for tensors in saved:
        found = {n: tuple(t.shape) for n, t in tensors.items() if not n.startswith("optim/")}
        for name in [*wanted, *found]:
            if wanted.get(name) != found.get(name):
                raise CheckpointError(
                    f"the checkpoint belongs to another network: {name} has shape {found.get(name)} there and "
                    f"{wanted.get(name)} here."
                )
