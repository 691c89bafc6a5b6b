"""Shared by all tests: hypothesis' profiles, a fixed seed, and one thread (tiny networks, tests side by side)."""

import math
import os

import pytest
import torch
from hypothesis import HealthCheck, settings

for name, examples in {"quick": 8, "thorough": 100}.items():  # `make test` and `make test-all`
    settings.register_profile(
        name,
        deadline=None,
        max_examples=examples,
        derandomize=bool(os.environ.get("CI")),
        print_blob=True,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )
settings.load_profile("quick")
torch.set_num_threads(1)
os.environ["OMP_NUM_THREADS"] = "1"  # for the processes that tests start


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _every_epoch_is_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    """However slow the disk of a busy machine is; the tests that are about it set it themselves."""
    monkeypatch.setattr("apical.engine.loop.FAST_SAVE_SECONDS", math.inf)
