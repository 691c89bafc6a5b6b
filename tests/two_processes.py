"""One of two processes of a DDP group, which `tests/general/test_processes.py` starts: prints OK, or what differs.

With the argument `die` the second one ends in the middle of a backward pass, and the first one prints what it is told.
"""

import os
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).parent))

import apical
from own_networks import FAMILY, GPT, ResNet, gradients_of
from reference import assert_all_same


def loss_of(call: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(call(x).flatten(0, -2), y.flatten())


def compare(rank: int) -> None:
    """Equal halves of a batch in two processes must give the gradients of the whole batch in one, for two steps."""
    for rule in [*FAMILY, "readout"]:
        torch.manual_seed(0)
        x, y = torch.randint(0, 7, (4, 5)), torch.randint(0, 7, (4, 5))
        learner = apical.make(rule, GPT().double(), example=x, **({"head": "head"} if rule == "readout" else {}))
        learner.eval()  # no dropout
        both = DistributedDataParallel(learner)
        own = x[2 * rank : 2 * rank + 2], y[2 * rank : 2 * rank + 2]
        for _ in range(2):
            found = gradients_of(both, partial(loss_of, both, *own))
            expected = gradients_of(learner, partial(loss_of, learner, x, y))
            assert_all_same({name.removeprefix("module."): g for name, g in found.items()}, expected)


def refuse_sharding() -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

    x = torch.randint(0, 7, (4, 5))

    def shard(wrap: str) -> nn.Module:
        learner = apical.make("dll:kolen-pollack", GPT(), example=x)
        if wrap == "fully_shard":
            return fully_shard(learner)
        if wrap == "of a block":
            fully_shard(learner.model.blocks[0])
            return learner
        device = torch.device("cpu")
        return FullyShardedDataParallel(learner, device_id=device, use_orig_params=wrap == "original")

    for wrap in ("fully_shard", "of a block", "flat", "original"):
        with pytest.raises(apical.ApicalError, match="FSDP"):
            shard(wrap)(x)


def refuse_the_model_alone() -> None:
    x = torch.randint(0, 7, (4, 5))
    for rule in ("fa", "dll:kolen-pollack"):
        learner = apical.make(rule, GPT(), example=x)
        with pytest.raises(apical.ApicalError, match="without its feedback weights"):
            DistributedDataParallel(learner.model)(x)


def lose_the_other(rank: int, path: Path) -> None:
    """Train and save after every step; at the fourth the second process dies while errors come down."""
    torch.manual_seed(rank)
    learner = apical.make("dll:kolen-pollack", ResNet())
    both, optim = DistributedDataParallel(learner), torch.optim.SGD(learner.param_groups(lr=0.1))
    for step in range(6):
        if rank and step == 3:
            learner.model.blocks[0].conv2.weight.register_hook(lambda _: os._exit(7))
        x, y = torch.randn(4, 1, 6, 6), torch.randint(0, 3, (4,))
        optim.zero_grad()
        try:
            F.cross_entropy(both(x), y).backward()
        except RuntimeError as error:
            print(f"step {step}: {type(error).__name__}: {error}")
            sys.exit(1)
        optim.step()
        torch.save(
            {"step": step, "learner": learner.state_dict(), "optim": optim.state_dict()}, f"{path}.{rank}.{step}"
        )


if __name__ == "__main__":
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=rank, world_size=2)
    if sys.argv[2:] == ["die"]:
        lose_the_other(rank, Path(sys.argv[1]))
    compare(rank)
    refuse_sharding()
    refuse_the_model_alone()
    dist.destroy_process_group()
    print("OK")
