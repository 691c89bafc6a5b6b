"""What an update costs, beside backpropagation on the same network: work, memory, and numbers to keep."""

import copy
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from apical.core.learner import Learner
from apical.plausibility.memory import has_cells
from apical.rules.bp import Backpropagation

LR = 1e-3


class Meter(TorchDispatchMode):
    """Counts the operations and multiply-adds of what runs inside, and the bytes that it holds at most."""

    def __init__(self, held: list[Tensor]) -> None:
        super().__init__()
        self.operations = self.multiply_adds = self.peak = 0
        self._known = {t.untyped_storage().data_ptr() for t in held}
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        made = [t for t in tree_leaves(out) if isinstance(t, Tensor) and has_cells(t)]
        self.operations += bool(made)
        count = flop_registry.get(func.overloadpacket)
        if count is not None and made:
            self.multiply_adds += count(*args, **kwargs, out_val=out) // 2
        for storage in (t.untyped_storage() for t in made):
            if storage.data_ptr() not in self._known:
                self._alive[storage.data_ptr()] = (StorageWeakRef(storage), storage.nbytes())
        self._alive = {at: kept for at, kept in self._alive.items() if not kept[0].expired()}
        self.peak = max(self.peak, sum(size for _, size in self._alive.values()))
        return out


def optimiser(learner: Learner) -> torch.optim.SGD:
    """Plain SGD over everything that the learner gives an optimiser, and over what it forgot to."""
    groups = learner.param_groups(LR)
    given = {id(p) for group in groups for p in group["params"]}
    left = [p for name, p in learner.params().items() if name in learner.trainable and id(p) not in given]
    return torch.optim.SGD([*groups, *([{"params": left, "lr": LR}] if left else [])], lr=LR, foreach=False)


def measured(learner: Learner, x: Tensor, y: Tensor) -> Meter:
    """One batch of a copy of this learner."""
    learner = copy.deepcopy(learner)
    optim = optimiser(learner)
    meter = Meter([*learner.parameters(), *learner.buffers(), x, y])
    with torch.random.fork_rng(devices=[]), meter:
        learner.step(x, y, optim)
    return meter


def costs(learner: Learner, x: Tensor, y: Tensor) -> dict[str, float | int]:
    """Extra numbers to keep, and the work and memory of one batch as multiples of backpropagation's."""
    reference = Backpropagation(copy.deepcopy(learner.model))
    reference.loss = learner.loss
    for once in (learner, reference):
        measured(once, x, y)  # what is made at the first batch and then kept is no cost of a batch
    ours, theirs = measured(learner, x, y), measured(reference, x, y)
    model = sum(p.numel() for p in learner.model.parameters())
    return {
        "extra_parameters": sum(p.numel() for p in learner.parameters()) - model,
        "extra_buffers": sum(b.numel() for b in learner.buffers()),
        "operations": round(ours.operations / theirs.operations, 2),
        "multiply_adds": round(ours.multiply_adds / theirs.multiply_adds, 2),
        "memory": round(ours.peak / theirs.peak, 2),
    }
