"""The optimisers that cut their parameters in pieces take exactly the steps of torch's own."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from apical.core.phases import cut
from apical.engine.optimizers import IN_PIECES

REFERENCE = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}


def make_parameters() -> list[nn.Parameter]:
    """Return a large matrix, a vector, channels-last kernels, and rows of a matrix, which are not dense."""
    torch.manual_seed(0)
    kernels = torch.randn(8, 16, 5, 5).contiguous(memory_format=torch.channels_last)
    return [nn.Parameter(t) for t in (torch.randn(300, 401), torch.randn(7), kernels, torch.randn(40, 60)[:, ::2])]


def train(optim: torch.optim.Optimizer, params: list[nn.Parameter]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    for step in range(4):
        for k, p in enumerate(params):
            is_left_out = k == 1 and step == 2  # a parameter without a gradient is not stepped
            grad = torch.empty_like(p).copy_(torch.randn(p.shape, generator=generator))
            p.grad = None if is_left_out else grad
        optim.step()
    return [p.detach() for p in params]


@pytest.mark.parametrize("name", IN_PIECES)
@pytest.mark.parametrize("options", [{}, {"weight_decay": 0.1}, {"amsgrad": True}, {"betas": (0.5, 0.9)}])
def test_a_step_in_pieces_is_torchs_step(name: str, options: dict[str, Any]) -> None:
    own, theirs = make_parameters(), make_parameters()
    expected = train(REFERENCE[name](theirs, lr=0.01, fused=True, **options), theirs)
    found = train(IN_PIECES[name](own, lr=0.01, fused=True, **options), own)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


def test_the_state_is_that_of_whole_parameters() -> None:
    own = make_parameters()
    optim = IN_PIECES["adam"](own, lr=0.01, fused=True)
    train(optim, own)
    assert [optim.state[p]["exp_avg"].shape for p in own] == [p.shape for p in own]
    assert [float(optim.state[p]["step"]) for p in own] == [4, 3, 4, 4]


def test_pieces_cover_a_tensor_in_memory_order() -> None:
    kernels = torch.arange(2.0 * 3 * 4 * 4).view(2, 3, 4, 4).contiguous(memory_format=torch.channels_last)
    (pieces,) = cut([kernels], 20)
    assert [len(piece) for piece in pieces] == [20, 20, 20, 20, 16]
    torch.testing.assert_close(torch.cat(pieces), kernels.permute(0, 2, 3, 1).flatten())
