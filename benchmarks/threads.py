"""How much longer a step takes with all CPU threads than with one, on a machine that is busy with other work.

    python benchmarks/threads.py --busy 2

starts two busy processes per core and then times the steps of a small network with one thread and with as many as
there are cores, in turns, within one run.
"""

import argparse
import multiprocessing
import os
import statistics
import time

import torch
from torch import nn

import apical


def keep_busy() -> None:
    while True:
        pass


def time_steps(threads: list[int], width: int, steps: int, rounds: int) -> dict[int, float]:
    """Return the median time of a step in milliseconds for each number of threads."""
    model = nn.Sequential(nn.Linear(64, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 10))
    learner = apical.make("dll:kolen-pollack", model)
    optim = torch.optim.Adam(learner.param_groups(lr=1e-3))
    x, y = torch.randn(64, 64), torch.randint(0, 10, (64,))
    times: dict[int, list[float]] = {number: [] for number in threads}
    for _ in range(rounds):
        for number in threads:
            torch.set_num_threads(number)
            start = time.perf_counter()
            for _ in range(steps):
                learner.step(x, y, optim)
            times[number].append((time.perf_counter() - start) / steps)
    return {number: 1000 * statistics.median(found) for number, found in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--busy", type=int, default=2, help="busy processes per core")
    parser.add_argument("--width", type=int, default=64, help="units of a hidden layer")
    parser.add_argument("--steps", type=int, default=50, help="steps of a round")
    parser.add_argument("--rounds", type=int, default=5, help="rounds for each number of threads")
    arguments = parser.parse_args()
    cores = os.cpu_count() or 1
    others = [multiprocessing.Process(target=keep_busy, daemon=True) for _ in range(arguments.busy * cores)]
    for process in others:
        process.start()
    found = time_steps(sorted({1, cores}), arguments.width, arguments.steps, arguments.rounds)
    for process in others:
        process.terminate()
    print(f"load {os.getloadavg()[0]:.1f} on {cores} cores")
    for number, milliseconds in found.items():
        print(f"{number} threads: {milliseconds:.2f} ms a step, {milliseconds / found[1]:.1f} times one thread's")


if __name__ == "__main__":
    main()
