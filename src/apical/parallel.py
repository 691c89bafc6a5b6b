"""Branches side by side: `apical.Parallel`, as in the parallel convolutions of TextCNN (Kim 2014)."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from apical.errors import ApicalError, UnsupportedError


class Parallel(nn.ModuleList):
    """Every branch gets the same input; their outputs are concatenated along dimension 1.

    A branch is a Linear, Conv1d or Conv2d, or an `nn.Sequential` that starts with one and goes on with modules
    without parameters (activation, pooling over time, Flatten). A network reads all of it as one layer: an error at
    its input is the sum of what the branches send down.

    >>> branches = [nn.Sequential(nn.Conv1d(5, 4, k), nn.ReLU(), nn.AdaptiveMaxPool1d(1)) for k in (2, 3)]
    >>> model = nn.Sequential(Parallel(*branches), nn.Flatten(), nn.Linear(8, 2))
    >>> model(torch.randn(7, 5, 9)).shape
    torch.Size([7, 2])
    """

    def __init__(self, *branches: nn.Module) -> None:
        if not branches:
            raise ApicalError("a Parallel needs at least one branch, such as nn.Conv1d(100, 100, 3).")
        for branch in branches:
            if not isinstance(branch, nn.Module):
                raise UnsupportedError(
                    f"a branch of a Parallel is a {type(branch).__name__}; modules, given one by one, work."
                )
        super().__init__(branches)

    def forward(self, x: Tensor) -> Tensor:
        return joined([branch(x) for branch in self])


def joined(parts: Sequence[Tensor]) -> Tensor:
    """The branches' outputs as one; those that differ in more than dimension 1 are refused."""
    shapes = [part.shape for part in parts]
    if any(len(s) < 2 or (s[0], s[2:]) != (shapes[0][0], shapes[0][2:]) for s in shapes):
        raise ApicalError(
            f"the branches of a Parallel give {', '.join(str(tuple(s)) for s in shapes)}, which cannot be joined along "
            "dimension 1; let all other sizes agree, as they do after nn.AdaptiveMaxPool1d(1) or nn.Flatten()."
        )
    return torch.cat(list(parts), 1)
