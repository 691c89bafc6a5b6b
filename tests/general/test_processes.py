"""Several processes: DistributedDataParallel around a learner, two gloo processes on the CPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import apical
from own_networks import ResNet

SCRIPT = Path(__file__).parents[1] / "two_processes.py"


def start(*arguments: str) -> list[subprocess.Popen[str]]:
    """Start both processes, which meet in a file."""
    return [
        subprocess.Popen(
            [sys.executable, str(SCRIPT), *arguments],
            env={**os.environ, "RANK": str(rank), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]


def test_two_processes_with_half_a_batch_each_equal_one_with_the_whole_and_fsdp_is_refused(tmp_path: Path) -> None:
    started = start(str(tmp_path / "meeting"))
    outputs = [process.communicate(timeout=240)[0] for process in started]
    assert [process.returncode for process in started] == [0, 0], "\n".join(outputs)
    assert all(output.rstrip().endswith("OK") for output in outputs)


@pytest.mark.slow
def test_if_a_process_dies_the_other_ends_with_an_error_and_what_it_saved_goes_on(tmp_path: Path) -> None:
    started = start(str(tmp_path / "meeting"), "die")
    told, _ = started[0].communicate(timeout=120)
    started[1].communicate(timeout=120)
    assert [process.returncode for process in started] == [1, 7], told
    assert "step 3: RuntimeError" in told
    assert "closed by peer" in told or "reset by peer" in told
    saved, theirs = (torch.load(tmp_path / f"meeting.{rank}.2") for rank in range(2))
    assert not list(tmp_path.glob("meeting.*.3"))
    learned = {name: value for name, value in saved["learner"].items() if "running" not in name}
    assert all(torch.equal(value, theirs["learner"][name]) for name, value in learned.items())  # Θ, too
    assert any(name.startswith("feedback.") for name in learned)
    learner = apical.make("dll:kolen-pollack", ResNet())
    optim = torch.optim.SGD(learner.param_groups(lr=0.1))
    learner.load_state_dict(saved["learner"])
    optim.load_state_dict(saved["optim"])
    F.cross_entropy(learner(torch.randn(4, 1, 6, 6)), torch.tensor([0, 1, 2, 0])).backward()
    optim.step()
