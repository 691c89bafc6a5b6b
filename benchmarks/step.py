"""What one training step of each rule costs, as ratios to autograd backpropagation of the same network.

    python benchmarks/step.py [--model mlp] [--data mnist] [--batch 128] [--rounds 100] [--threads 2]

Both sides run eagerly with the same fused Adam. Steps of all rules are interleaved, one of each in every round, so
that a busy machine slows all of them alike; each time is the median over the rounds. Memory is the peak of all
tensors alive at any moment of a step: parameters, gradients, optimiser state, activity and errors.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import apical
from apical import models
from apical.core.network import SequentialNetwork

Step = Callable[[], object]


class Alive(TorchDispatchMode):
    """Follows the storage of every tensor that an operation touches; `peak` is the most alive at once, in bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves((args, kwargs, out)):
            if isinstance(leaf, torch.Tensor):
                storage = leaf.untyped_storage()
                self.seen[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self.seen = {key: entry for key, entry in self.seen.items() if not entry[0].expired()}
        self.peak = max(self.peak, sum(size for _, size in self.seen.values()))
        return out


def autograd_step(model: torch.nn.Sequential, x: torch.Tensor, y: torch.Tensor) -> Step:
    optim = torch.optim.Adam(model.parameters(), lr=1e-4, fused=True)

    def step() -> None:
        optim.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optim.step()

    return step


def rule_step(rule: str, model: torch.nn.Sequential, x: torch.Tensor, y: torch.Tensor) -> Step:
    learner = apical.make(rule, model, input_shape=tuple(x.shape[1:]))
    optim = torch.optim.Adam(learner.param_groups(lr=1e-4), fused=True)
    return lambda: learner.step(x, y, optim)


def multiply_adds(model: torch.nn.Sequential, shape: tuple[int, ...]) -> dict[str, float]:
    """The fewest multiply-adds of `dll`, and of backpropagation, relative to one forward pass's.

    One pass up, one product per layer for W, and for each layer but the first one down; Θ's own update is one more.
    """
    network = SequentialNetwork(model)
    shapes = network.shapes(shape)
    layers = [
        torch.Size(layer.synapse.weight_shape).numel() * drive.numel() // layer.synapse.weight_shape[0]
        for layer, drive in zip(network.layers, shapes.drives, strict=True)
    ]
    up, above = sum(layers), sum(layers[1:])
    return {"bp": (2 * up + above) / up, "dll": (2 * up + 2 * above) / up}


def measure(
    steps: dict[str, Step], rounds: int, synchronize: Callable[[], None] = lambda: None
) -> tuple[dict[str, float], dict[str, int]]:
    """Median seconds and peak bytes of each step; `synchronize` waits for a device to finish."""
    peaks = {}
    for name, step in steps.items():
        for _ in range(3):
            step()
        with Alive() as alive:
            step()
        peaks[name] = alive.peak
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name, step in steps.items():
            synchronize()
            began = time.perf_counter()
            step()
            synchronize()
            times[name].append(time.perf_counter() - began)
    return {name: statistics.median(values) for name, values in times.items()}, peaks


def show(times: dict[str, float], peaks: dict[str, int], fewest: dict[str, float]) -> None:
    """Every step beside autograd's, under the least that `dll` must do."""
    print(f"multiply-adds of dll over backpropagation's: {fewest['dll'] / fewest['bp']:.3f}\n")
    print(f"{'step':20}{'ms':>9}{'ratio':>9}{'peak MB':>10}{'ratio':>9}")
    for name in times:
        ratio, memory = times[name] / times["autograd"], peaks[name] / peaks["autograd"]
        print(f"{name:20}{1e3 * times[name]:9.2f}{ratio:9.3f}{peaks[name] / 1e6:10.1f}{memory:9.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="mlp", choices=models.MODELS)
    parser.add_argument("--data", default="mnist", choices=[*models.MLPS])
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rule", action="append", help="only this rule; repeat for several")
    chosen = parser.parse_args()
    torch.set_num_threads(chosen.threads)
    channels, side, _ = models.CNNS[chosen.data]
    shape = (channels, side, side)
    x, y = torch.randn(chosen.batch, *shape), torch.randint(0, 10, (chosen.batch,))

    def build() -> torch.nn.Sequential:
        return models.build(chosen.model, str(chosen.data))

    steps = {"autograd": autograd_step(build(), x, y)}
    steps |= {rule: rule_step(rule, build(), x, y) for rule in chosen.rule or apical.rule_names()}
    times, peaks = measure(steps, chosen.rounds)
    fewest = multiply_adds(build(), shape)
    print(
        f"{chosen.model} for {chosen.data}, batch {chosen.batch}, fused Adam, torch {torch.__version__}, "
        f"{chosen.threads} threads, median of {chosen.rounds} interleaved rounds"
    )
    show(times, peaks, fewest)


if __name__ == "__main__":
    main()
