"""What an update costs, beside backpropagation on the same network: work, memory, and numbers to keep."""

import copy
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from apical.core.learner import Learner
from apical.plausibility.provenance import list_tensors, occupies_memory
from apical.rules.bp import Backpropagation


class OperationMeter(TorchDispatchMode):
    """Counts the operations and multiply-adds of what runs inside, and the most bytes that it holds at once.

    Bytes are of tensors that operations make, with `count_inputs` also of those that they read, but not of those `ignored`.
    """

    def __init__(self, ignored: Iterable[Tensor] = (), count_inputs: bool = False) -> None:
        super().__init__()
        self.operations = self.multiply_adds = self.peak_bytes = 0
        self._count_inputs = count_inputs
        self._ignored = {t.untyped_storage().data_ptr() for t in ignored if occupies_memory(t)}
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        made = [t for t in list_tensors(out) if occupies_memory(t)]
        self.operations += bool(made)
        formula = flop_registry.get(func.overloadpacket)
        if formula is not None and made:
            self.multiply_adds += formula(*args, **kwargs, out_val=out) // 2
        inputs = [t for t in list_tensors((args, kwargs)) if occupies_memory(t)] if self._count_inputs else []
        for storage in (t.untyped_storage() for t in [*inputs, *made]):
            if storage.data_ptr() not in self._ignored:
                self._alive[storage.data_ptr()] = (StorageWeakRef(storage), storage.nbytes())
        self._alive = {at: kept for at, kept in self._alive.items() if not kept[0].expired()}
        self.peak_bytes = max(self.peak_bytes, sum(size for _, size in self._alive.values()))
        return out


def make_optimiser(learner: Learner) -> torch.optim.SGD:
    """Make plain SGD over everything that the learner gives an optimiser, and over what it forgot to."""
    lr = 1e-3
    groups = learner.param_groups(lr)
    given = {id(p) for group in groups for p in group["params"]}
    left = [p for name, p in learner.params().items() if name in learner.trainable and id(p) not in given]
    return torch.optim.SGD([*groups, *([{"params": left, "lr": lr}] if left else [])], lr=lr, foreach=False)


def measure_costs(learner: Learner, x: Any, y: Tensor) -> dict[str, float | int]:
    """Count extra numbers to keep, and the work and memory of one batch as multiples of backpropagation's."""
    reference = Backpropagation(copy.deepcopy(learner.model), output=getattr(learner, "output", None))
    reference.loss = learner.loss
    ours, theirs = _measure_batch(learner, x, y), _measure_batch(reference, x, y)
    model = sum(p.numel() for p in learner.model.parameters())
    return {
        "extra_parameters": sum(p.numel() for p in learner.parameters()) - model,
        "extra_buffers": sum(b.numel() for b in learner.buffers()),
        "operations": round(ours.operations / theirs.operations, 2),
        "multiply_adds": round(ours.multiply_adds / theirs.multiply_adds, 2),
        "memory": round(ours.peak_bytes / theirs.peak_bytes, 2),
    }


def _measure_batch(learner: Learner, x: Any, y: Tensor) -> OperationMeter:
    """Measure a batch of a copy of this learner after the first one, which may make what later ones use again."""
    twin = copy.deepcopy(learner)
    optim = make_optimiser(twin)
    with torch.random.fork_rng(devices=[]):
        for _ in range(twin.warmup + 1):
            twin.step(x, y, optim)
        meter = OperationMeter([*twin.parameters(), *twin.buffers(), *list_tensors(x), y])
        with meter:
            twin.step(x, y, optim)
    return meter
