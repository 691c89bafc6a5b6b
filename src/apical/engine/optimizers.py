"""Optimisers that use the whole of a GPU, also for a small network."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

BLOCKS = 32
"""Into how many pieces the parameters of a group are cut. One launch of the fused kernel takes 36."""
SMALLEST, LARGEST = 1024, 65536
"""Bounds of the numbers in a piece: fewer are not worth a block of threads, and the kernel itself cuts larger ones."""


class AdamInPieces(torch.optim.Adam):
    """torch's fused Adam, whose kernel gets the parameters in small pieces.

    The kernel gives each 65,536 numbers of a tensor to one block of threads, so that a network of a million parameters
    uses an eighth of a large GPU. Pieces change nothing but the time: every number has an update of its own.
    """

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            lists: list[list[Tensor]] = [[] for _ in range(6)]
            self._init_group(group, *lists)  # type: ignore[no-untyped-call]
            params, *_, steps = lists
            if not params:
                continue
            torch._foreach_add_(steps, 1)
            share = -(-sum(p.numel() for p in params) // BLOCKS)
            size = min(max(-(-share // 4) * 4, SMALLEST), LARGEST)  # the kernel reads four numbers at a time
            pieces: list[list[Tensor]] = [[] for _ in lists]
            for k, step in enumerate(steps):
                parts = cut([own[k] for own in lists[:-1] if own], size)
                for own, tensors in zip(pieces, parts, strict=False):
                    own += tensors
                pieces[-1] += [step] * len(parts[0])
            update = torch._fused_adamw_ if group["decoupled_weight_decay"] else torch._fused_adam_
            options = {key: group[key] for key in ("lr", "weight_decay", "eps", "amsgrad", "maximize")}
            update(*pieces, beta1=group["betas"][0], beta2=group["betas"][1], **options)


class AdamWInPieces(AdamInPieces, torch.optim.AdamW):
    """The same with decoupled weight decay."""


IN_PIECES: dict[str, Callable[..., torch.optim.Optimizer]] = {"adam": AdamInPieces, "adamw": AdamWInPieces}


def cut(tensors: list[Tensor], size: int) -> list[list[Tensor]]:
    """Return the pieces of tensors of the same strides, in memory order; whole tensors if that is not one dense piece."""
    first = tensors[0]
    is_dense = first.is_contiguous() or first.is_contiguous(memory_format=torch.channels_last)
    if not is_dense or any(t.stride() != first.stride() for t in tensors):
        return [[t] for t in tensors]
    return [list(t.as_strided((t.numel(),), (1,)).split(size)) for t in tensors]
