"""Optimisers that use the whole of a GPU, also for a small network."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from apical.core.phases import cut
from apical.core.streams import SideStreams

BLOCKS = 64
"""Into how many pieces the parameters of a group are cut, or a few more."""
LARGEST_LAUNCH = 36
"""How many pieces one launch of the fused kernel takes."""
SMALLEST, LARGEST = 1024, 65536
"""Bounds of the numbers in a piece: fewer are not worth a block of threads, and the kernel itself cuts larger ones."""


class AdamInPieces(torch.optim.Adam):
    """torch's fused Adam, whose kernel gets the parameters in small pieces.

    The kernel gives each 65,536 numbers of a tensor to one block of threads, so that a network of a million parameters
    uses an eighth of a large GPU. Pieces change nothing but the time: every number has an update of its own. In a CUDA
    graph, several launches run side by side.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.streams = SideStreams(2)

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
            launches = -(-len(pieces[0]) // LARGEST_LAUNCH)
            for place in range(launches):
                part = [own[place::launches] for own in pieces]
                with self.streams(place):
                    update(*part, beta1=group["betas"][0], beta2=group["betas"][1], **options)
        self.streams.join()


class AdamWInPieces(AdamInPieces, torch.optim.AdamW):
    """The same with decoupled weight decay."""


IN_PIECES: dict[str, Callable[..., torch.optim.Optimizer]] = {"adam": AdamInPieces, "adamw": AdamWInPieces}
