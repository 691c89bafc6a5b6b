"""Several processes: DistributedDataParallel around a learner, two gloo processes on the CPU."""

import os
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[1] / "two_processes.py"


def test_two_processes_with_half_a_batch_each_equal_one_with_the_whole_and_fsdp_is_refused(tmp_path: Path) -> None:
    started = [
        subprocess.Popen(
            [sys.executable, str(SCRIPT), str(tmp_path / "meeting")],
            env={**os.environ, "RANK": str(rank), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    outputs = [process.communicate(timeout=240)[0] for process in started]
    assert [process.returncode for process in started] == [0, 0], "\n".join(outputs)
    assert all(output.rstrip().endswith("OK") for output in outputs)
