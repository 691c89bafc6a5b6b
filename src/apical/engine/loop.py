"""The training loop of one run: epochs, measurements, checkpoints, and replicas that fail without stopping the others."""

import math
import time
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from apical.core.learner import Learner
from apical.core.synapse import Dense
from apical.data import Dataset
from apical.engine import checkpoint as checkpoints
from apical.engine.checkpoint import Checkpoint
from apical.engine.cuda_graphs import EpochRunner
from apical.engine.device import synchronize
from apical.engine.metrics import Advance, evaluate, measure_alignment, show_progress, summarize
from apical.engine.replicas import ReplicaStack, load_tensors
from apical.engine.settings import FitArguments, Settings
from apical.errors import DivergenceError

Item = TypeVar("Item")
MIN_STEPS_TO_COMPILE = {"images": 30_000, "other": 500_000}
"""Steps on a GPU from which `torch.compile` saves more time than it takes (docs/engine.md has the measurements)."""
FAST_SAVE_SECONDS = 0.5
"""A checkpoint that takes longer to write is written less often, so that saving takes a tenth of the time."""
ASSUMED_WRITE_SPEED = 2.5e8
"""Bytes per second, to estimate how long the first checkpoint takes from the size of the tensors at the start (when the
optimiser has no state yet)."""
SMALL_NETWORK = 50_000
"""Parameters up to which the replicas of a convolutional network are stacked on the CPU."""
MAX_STACK_SIZE = 16
"""Replicas in one stack. More become several stacks: one computes while another waits for memory."""
SHUFFLING, NOISE = 0, 1
"""What a derived seed is used for."""
MEASUREMENT_OFFSET = (1 << 62) + (1 << 31)
"""Added to a seed for measurements, so that they draw other numbers than training. 1 << 31 is for the CPU's generator, which
uses only the lower 32 bits of a seed."""


@dataclass(eq=False)
class Replica:
    """One learner of a run with its seed and its settings, which differ between the trials of a sweep."""

    learner: Learner
    seed: int
    settings: Settings
    history: list[dict[str, Any]] = field(default_factory=list)
    failure: str = ""
    """Why it was stopped; empty as long as it is not."""
    last_good: dict[str, Tensor] = field(default_factory=dict)
    """Its tensors after the last epoch in which it did not fail."""


class Run:
    """A run in progress. Settings that all replicas share are read from the first one.

    `stacks` are the replicas' tensors, and `groups` has the replicas of each stack, in its order.
    """

    def __init__(
        self,
        replicas: list[Replica],
        data: Dataset,
        device: torch.device,
        arguments: FitArguments,
        saved: Checkpoint | None,
        fingerprint: dict[str, str],
    ) -> None:
        self.replicas, self.data, self.device = replicas, data, device
        self.arguments, self.saved, self.fingerprint = arguments, saved, fingerprint
        self.settings = settings = replicas[0].settings
        for replica in replicas:
            replica.learner.to(device).train()
        self.channels_last_weights = self._use_channels_last() if device.type == "cuda" else []
        if self.channels_last_weights:
            data = replace(data, x_train=data.x_train.contiguous(memory_format=torch.channels_last))
        self.training_data = data
        self.steps_per_epoch = -(-len(data.x_train) // settings.batch_size)
        for replica in replicas:
            replica.learner.allocate(data.x_train[: settings.batch_size], data.y_train[: settings.batch_size])
        is_ours, stack = isinstance(settings.optimizer, str), arguments.stack
        self._build_stacks(is_ours and (_should_stack(replicas[0].learner, device) if stack is None else stack))
        if stack and not is_ours:
            self.epoch_runner.reasons.append("stacked seeds: the optimiser is not one of apical's")
        self.next_save_time = -math.inf

    def _build_stacks(self, stacked: bool) -> None:
        """Build the stacks from the learners' current weights, and the object that runs their epochs."""
        settings, steps = self.settings, self.settings.epochs * self.steps_per_epoch
        self.groups = group_replicas(self.replicas) if stacked else [[replica] for replica in self.replicas]
        self.stacks = [
            ReplicaStack([r.learner for r in group], [r.settings for r in group], stacked=len(group) > 1)
            for group in self.groups
        ]
        rates = settings.compute_rates(steps)
        self.epoch_runner = EpochRunner(self.stacks, self.training_data, settings.batch_size, rates)
        reason = self._reason_not_to_compile(steps)
        for stack in self.stacks:
            if reason:
                stack.reasons.append(f"torch.compile: {reason}")
            else:
                stack.compile(self.epoch_runner.batch_size)
        self.next_tables: tuple[int, list[Tensor]] | None = None

    def _reason_not_to_compile(self, steps: int) -> str:
        """Return why a run of so many steps is not compiled, or an empty string. It does not depend on measured times."""
        if self.arguments.compile is not None:
            return "" if self.arguments.compile else "compile=False"
        if self.device.type != "cuda":
            return "compiling for the CPU takes longer than it saves"
        if any(replica.learner.network.is_general for replica in self.replicas):
            return "the model is not read as layers"
        if any(replica.learner.network.has_hooks for replica in self.replicas):
            return "a module has hooks"
        if any(replica.learner.period > 1 for replica in self.replicas):
            return "the rule's steps differ from each other, and each would be compiled"
        enough = MIN_STEPS_TO_COMPILE["images" if self.channels_last_weights else "other"]
        return f"{steps} steps do not earn back its seconds, {enough} would" if steps < enough else ""

    def _use_channels_last(self) -> list[nn.Parameter]:
        """Store convolution weights channels-last and return them; otherwise cuDNN converts them in every step."""
        if self.data.x_train.ndim != 4:
            return []
        weights = [p for r in self.replicas for p in r.learner.parameters() if p.ndim == 4 and p.is_contiguous()]
        for p in weights:
            p.data = p.data.contiguous(memory_format=torch.channels_last)
        return weights

    @property
    def reasons(self) -> list[str]:
        """Why a faster way of running was not used, one line each."""
        lines = [*self.epoch_runner.reasons, *(reason for stack in self.stacks for reason in stack.reasons)]
        return list(dict.fromkeys(lines))

    def train(self) -> None:
        """Train all epochs, or those up to `stop_after`, from the beginning or from the checkpoint `saved`."""
        try:
            self._train_epochs()
        except RuntimeError as error:
            first = 0 if self.saved is None else self.saved.epoch
            has_begun = any(row["epoch"] > first for replica in self.replicas for row in replica.history)
            is_full = isinstance(error, torch.OutOfMemoryError)
            if has_begun or is_full or len(self.groups) == len(self.replicas):
                raise
            reason = f"stacked seeds: {str(error).splitlines()[0]}"
        else:
            return
        # Some rules cannot run under vmap, for example because they read a tensor's value. Train each learner alone, from
        # the beginning. An error of another kind is raised again there.
        for replica in self.replicas:
            load_tensors(replica.learner, replica.last_good)
        self._build_stacks(stacked=False)
        self.epoch_runner.reasons.append(reason)
        self._train_epochs()

    def _train_epochs(self) -> None:
        arguments, path = self.arguments, self.arguments.path
        first = 0 if self.saved is None else self._resume_from(self.saved)
        end = min(arguments.stop_after or self.settings.epochs, self.settings.epochs)
        self._keep_good_tensors()
        size = sum(t.nbytes for replica in self.replicas for t in replica.last_good.values())
        self._schedule_next_save(size / ASSUMED_WRITE_SPEED)
        self._warn_of_failures([])
        title = f"{self.settings.rule} {self.settings.model} {self.settings.data}"
        total, done = end * self.steps_per_epoch, min(first, end) * self.steps_per_epoch
        with torch.no_grad(), show_progress(title, total, done, arguments.progress) as advance:
            for epoch in range(first, end):
                running = [replica for replica in self.replicas if not replica.failure]
                seconds = self._run_epoch(epoch, advance)
                advance(0, self._record_epoch(epoch, seconds))
                is_due = arguments.save_end if epoch + 1 == end else time.monotonic() >= self.next_save_time
                is_due = is_due or all(replica.failure for replica in self.replicas)
                if path is not None and is_due:
                    self._save(path, epoch + 1)
                try:
                    if arguments.on_epoch is not None:
                        arguments.on_epoch([r for one in self.replicas for r in one.history if r["epoch"] == epoch + 1])
                except BaseException:
                    if path is not None and not is_due:
                        self._save(path, epoch + 1)
                    raise
                self._warn_of_failures(running)
        self._return_weights()

    def _run_epoch(self, epoch: int, advance: Advance) -> float:
        """Take all steps of one epoch and return the seconds that they took."""
        synchronize(self.device)
        start = time.perf_counter()
        noise_seeds = [[derive_seed(replica.seed, epoch, NOISE) for replica in group] for group in self.groups]
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
        make_table = self.epoch_runner.make_index_table
        return [make_table(k, [orders[replica.seed] for replica in group]) for k, group in enumerate(self.groups)]

    def _record_epoch(self, epoch: int, seconds: float) -> str:
        """Evaluate, add this epoch's rows to the history, mark diverged replicas as failed; return a summary."""
        rows = []
        for stack, totals, group in zip(self.stacks, self.epoch_runner.totals, self.groups, strict=True):
            finite, is_delayed = stack.are_finite(), stack.template.warmup > 0
            count = totals.rows if is_delayed else len(self.data.x_train)
            losses, hits = (totals.loss / count).tolist(), (totals.hits / count).tolist()
            has_loss = not is_delayed or bool(totals.rows.all())
            scores = evaluate(stack, self.data.x_test, self.data.y_test, self.data.classes)
            if self.settings.alignment:
                stack.write_back()
            for row, replica in enumerate(group):
                # Check the weights, too: they may overflow in the last step, after the last training loss, and Θ
                # may overflow without any effect on a loss.
                sound = finite[row] and math.isfinite(scores[row]["test_loss"])
                sound = sound and (math.isfinite(losses[row]) or not has_loss)
                if not sound and not replica.failure:
                    replica.failure = _describe_failure(replica, epoch + 1)
                if replica.failure:
                    continue
                result: dict[str, Any] = {"seed": replica.seed, "epoch": epoch + 1, "loss": losses[row]}
                if self.data.classes is not None:
                    result["accuracy"] = hits[row]
                result |= {**scores[row], "seconds": seconds}
                if self.settings.alignment:
                    seed = MEASUREMENT_OFFSET + derive_seed(replica.seed, epoch, NOISE)
                    generator = torch.Generator(self.device).manual_seed(seed)
                    x, y = self.data.x_train, self.data.y_train
                    result["alignment"] = measure_alignment(replica.learner, x, y, generator)
                replica.history.append(result)
                rows.append(result)
        self._keep_good_tensors()
        return summarize(rows, self.settings)

    def _warn_of_failures(self, running: list[Replica]) -> None:
        """Warn of each replica that has failed since it was running. If all have failed, raise DivergenceError."""
        if all(replica.failure for replica in self.replicas):
            self._return_weights()
            raise DivergenceError(" ".join(dict.fromkeys(replica.failure for replica in self.replicas)))
        for replica in running:
            if replica.failure:
                warnings.warn(replica.failure, stacklevel=4)

    def _keep_good_tensors(self) -> None:
        """Keep a copy of the current tensors of every replica that has not failed."""
        for stack, group in zip(self.stacks, self.groups, strict=True):
            for row, replica in enumerate(group):
                if not replica.failure:
                    replica.last_good = {name: value.clone() for name, value in stack.named_tensors(row)}

    def _save(self, path: Path, epoch: int) -> None:
        """Write a checkpoint of this epoch."""
        start = time.monotonic()
        checkpoint = Checkpoint(
            self.settings.to_dict(),
            epoch,
            collect_history(self.replicas),
            {replica.seed: replica.failure for replica in self.replicas if replica.failure},
            {replica.seed: replica.last_good for replica in self.replicas},
            self.data.vocabulary,
            self.fingerprint,
        )
        checkpoints.save(path, checkpoint)
        self._schedule_next_save(time.monotonic() - start)

    def _schedule_next_save(self, seconds: float) -> None:
        """Delay the next checkpoint so that saving, which took `seconds`, takes a tenth of the time, unless it is fast."""
        self.next_save_time = time.monotonic() + 9 * seconds if seconds > FAST_SAVE_SECONDS else -math.inf

    def _resume_from(self, saved: Checkpoint) -> int:
        """Load a checkpoint and return the number of epochs that it has done."""
        tensors = [[saved.tensors[replica.seed] for replica in group] for group in self.groups]
        for stack, own in zip(self.stacks, tensors, strict=True):
            checkpoints.require_same_shapes(dict(stack.named_tensors(0)), own)
        checkpoints.require_same_origin(saved, self.fingerprint)
        for stack, own in zip(self.stacks, tensors, strict=True):
            stack.restore(own)
        for replica in self.replicas:
            replica.history = [row for row in saved.history if row["seed"] == replica.seed]
            replica.failure = saved.failed.get(replica.seed, "")
            if replica.failure:
                replica.last_good = {name: t.to(self.device) for name, t in saved.tensors[replica.seed].items()}
        return saved.epoch

    def _return_weights(self) -> None:
        """Give the learners their final weights, or the last good ones of a replica that failed."""
        for stack in self.stacks:
            stack.write_back()
        for replica in self.replicas:
            if replica.failure:
                load_tensors(replica.learner, replica.last_good)
            replica.learner.zero_grad()
            replica.learner.eval()
        for p in self.channels_last_weights:
            p.data = p.data.contiguous()


def _describe_failure(replica: Replica, epoch: int) -> str:
    return (
        f"the loss of seed {replica.seed} was not finite in epoch {epoch}, and the seed was stopped; a smaller learning "
        f"rate than {replica.settings.lr:g}, clip=1.0 or inputs of about unit size may help."
    )


def collect_history(replicas: Iterable[Replica]) -> list[dict[str, Any]]:
    """Return the history rows of replicas, epoch by epoch."""
    return sorted((row for replica in replicas for row in replica.history), key=lambda row: int(row["epoch"]))


def _should_stack(learner: Learner, device: torch.device) -> bool:
    """Return whether stacking such replicas is faster.

    Stacked dense layers become batched matrix products, which lose nothing. Stacked convolutions become grouped ones, which
    are faster only where the calls cost more than the arithmetic.
    """
    if learner.network.is_general:
        return False
    if all(isinstance(layer.synapse, Dense) for layer in learner.network.layers):
        return True
    return device.type == "cpu" and sum(p.numel() for p in learner.parameters()) <= SMALL_NETWORK


def group_replicas(replicas: list[Replica]) -> list[list[Replica]]:
    """Return the replicas of each stack: those whose rule is the same function, in parts of similar size."""
    groups: list[list[Replica]] = []
    for replica in replicas:
        group = next((g for g in groups if _is_same_function(g[0], replica)), None)
        if group is None:
            groups.append([replica])
        else:
            group.append(replica)
    return [part for group in groups for part in split_evenly(group, -(-len(group) // MAX_STACK_SIZE))]


def _is_same_function(one: Replica, other: Replica) -> bool:
    """Return whether two learners compute the same from the same weights; their optimisers may differ."""
    names = ("rule", "options", "loss", "label_smoothing")
    if one.learner.network.is_general:
        return False
    is_same = all(getattr(one.settings, name) == getattr(other.settings, name) for name in names)
    return is_same and one.learner.network.describe_stages() == other.learner.network.describe_stages()


def split_evenly(items: list[Item], parts: int) -> Iterator[list[Item]]:
    """Yield the items in so many consecutive parts of similar size.

    >>> list(split_evenly([1, 2, 3, 4, 5], 2))
    [[1, 2], [3, 4, 5]]
    """
    for k in range(parts):
        yield items[k * len(items) // parts : (k + 1) * len(items) // parts]


def derive_seed(seed: int, epoch: int, purpose: int) -> int:
    """Return the seed of a generator for one replica's seed, epoch and purpose.

    It does not depend on earlier epochs, so a resumed run draws the same numbers as an uninterrupted one.
    """
    return (seed * 1_000_003 + epoch) * 2 + purpose


def shuffle_indices(count: int, seed: int, epoch: int) -> Tensor:
    """Return the order of the training examples, from a CPU generator: the same on every device."""
    return torch.randperm(count, generator=torch.Generator().manual_seed(derive_seed(seed, epoch, SHUFFLING)))
