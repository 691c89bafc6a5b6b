"""The fixed table of networks that every rule is run on where random ones would be too slow (compile, vmap)."""

from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

import apical
from apical.core.registry import resolve
from apical.rules.feedback import FeedbackRule
from strategies import Case

EVERY: list[str] = apical.rule_names()
"""Every built-in rule and variant, before any test registers one of its own."""
RULES = [n for n in EVERY if issubclass(resolve(n)[0], FeedbackRule) and not n.startswith("streaming")]
"""Those that send the output's error down, exactly and without noise, for the batch that they are given."""
LEARNED = [name for name in RULES if name.startswith("dll") and name != "dll:frozen"]
"""Those whose feedback weights learn."""
KEPT = [name for name in RULES if name.split(":")[0] in ("fa", "dfa", "dll")]
"""Those that keep feedback weights of their own."""


@dataclass(frozen=True)
class Builder:
    model: Callable[[], nn.Sequential]
    input_shape: tuple[int, ...]
    dropout: bool = False

    def case(self, seed: int = 0, dtype: torch.dtype = torch.float64, batch: int = 5) -> Case:
        torch.manual_seed(seed)
        model = self.model().to(dtype)
        x = torch.randn(batch, *self.input_shape, dtype=dtype)
        labels = torch.randint(0, 3, (batch,))
        return Case(model, x, labels)


def _mlp() -> nn.Sequential:
    return nn.Sequential(
        nn.Flatten(), nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4, bias=False), nn.SELU(), nn.Linear(4, 3)
    )


def _deep() -> nn.Sequential:
    widths = (4, 6, 5, 6, 5, 3)
    stages: list[nn.Module] = []
    for i in range(5):
        stages += [nn.Linear(widths[i], widths[i + 1]), nn.GELU()]
    return nn.Sequential(*stages[:-1])


def _cnn() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, stride=2, padding=2, bias=False),
        nn.MaxPool2d(2, 1),
        nn.LeakyReLU(inplace=True),
        nn.Sequential(nn.Conv2d(4, 6, 2, padding="same", groups=2), nn.Tanh(), nn.AvgPool2d(2)),
        nn.Flatten(),
        nn.Linear(12, 3),
    )


def _conv1d_dropout() -> nn.Sequential:
    return nn.Sequential(
        nn.Dropout(0.2),
        nn.Conv1d(2, 4, 3, dilation=2, padding=1),
        nn.RReLU(),
        nn.Dropout1d(0.4),
        nn.Conv1d(4, 3, 2, stride=2),
        nn.SELU(),
        nn.AlphaDropout(0.3),
        nn.AdaptiveAvgPool1d(2),
        nn.Flatten(),
        nn.Linear(6, 4),
        nn.Dropout(0.5, inplace=True),
        nn.Linear(4, 3),
    )


def _positions() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(3, 4), nn.Softplus(), nn.Linear(4, 2), nn.Sigmoid(), nn.Flatten(), nn.Linear(8, 3), nn.Tanh()
    )


def _parallel() -> nn.Sequential:
    """Branches over time as the first layer and dense ones as a later layer, each with a φ of its own and a joint one."""
    over_time = [
        nn.Sequential(nn.Conv1d(2, 3, 2, bias=False), nn.Tanh(), nn.AdaptiveMaxPool1d(1)),
        nn.Sequential(nn.Conv1d(2, 2, 3, padding=1), nn.AdaptiveAvgPool1d(1), nn.SELU()),
    ]
    dense = [nn.Linear(5, 3), nn.Sequential(nn.Linear(5, 2), nn.Sigmoid())]
    return nn.Sequential(
        apical.Parallel(*over_time), nn.Flatten(), apical.Parallel(*dense), nn.Softsign(), nn.Linear(5, 3)
    )


CASES: dict[str, Builder] = {
    "mlp": Builder(_mlp, (2, 3)),
    "deep": Builder(_deep, (4,)),
    "cnn": Builder(_cnn, (2, 7, 6)),
    "conv1d with dropout": Builder(_conv1d_dropout, (2, 9), dropout=True),
    "positions": Builder(_positions, (4, 3)),
    "parallel": Builder(_parallel, (2, 7)),
}


def learner_for(rule: str, case: Case, **options: object) -> apical.Learner:
    return apical.make(rule, case.model, input_shape=case.input_shape, **options)


def mostly_slow(values: Iterable[Any], quick: Container[Any]) -> list[Any]:
    """Values for `pytest.mark.parametrize`: those that are not among the quick ones run in `make test-all` alone."""
    return [
        v if v in quick else pytest.param(*(v if isinstance(v, tuple) else (v,)), marks=pytest.mark.slow)
        for v in values
    ]
