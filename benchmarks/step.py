"""What one training step of each rule costs, as ratios to autograd backpropagation of the same network.

    python benchmarks/step.py [--model mlp] [--data mnist] [--batch 128] [--rounds 100] [--threads 2]

Both sides run eagerly with the same fused Adam. Steps of all rules are interleaved, one of each in every round, so
that a busy machine slows all of them alike; each time is the median over the rounds. Memory is the peak of all
tensors alive at any moment of a step: parameters, gradients, optimiser state, activity and errors.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Iterable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import apical
from apical import models
from apical.core.sequential import SequentialNetwork
from apical.plausibility.meter import OperationMeter

Step = Callable[[], object]


def make_autograd_step(model: nn.Module, x: Tensor, y: Tensor) -> Step:
    """Return a training step of autograd backpropagation; the classes are on the last axis of the model's output."""
    optim = torch.optim.Adam(model.parameters(), lr=1e-4, fused=True)

    def step() -> None:
        optim.zero_grad()
        F.cross_entropy(model(x).flatten(0, -2), y.flatten()).backward()
        optim.step()

    return step


def make_rule_step(rule: str, model: nn.Sequential | apical.Elman, x: Tensor, y: Tensor) -> Step:
    learner = apical.make(rule, model, input_shape=tuple(x.shape[1:]))
    optim = torch.optim.Adam(learner.param_groups(lr=1e-4), fused=True)
    return lambda: learner.step(x, y, optim)


def make_steps(
    rules: Iterable[str], build: Callable[[], nn.Sequential | apical.Elman], x: Tensor, y: Tensor
) -> dict[str, Step]:
    """Return a step of autograd and one of each rule, by name, each on a network of its own on the device of `x`."""
    steps = {"autograd": make_autograd_step(build().to(x.device), x, y)}
    return steps | {rule: make_rule_step(rule, build().to(x.device), x, y) for rule in rules}


def measure_steps(
    steps: dict[str, Step], rounds: int, synchronize: Callable[[], None] = lambda: None
) -> tuple[dict[str, float], dict[str, int]]:
    """Return median seconds and peak bytes of each step; `synchronize` waits for a device to finish."""
    peaks = {}
    for name, step in steps.items():
        for _ in range(3):
            step()
        with OperationMeter(count_inputs=True) as meter:
            step()
        peaks[name] = meter.peak_bytes
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name, step in steps.items():
            synchronize()
            start = time.perf_counter()
            step()
            synchronize()
            times[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in times.items()}, peaks


def print_table(times: dict[str, float], peaks: dict[str, int], up: int, above: int) -> None:
    """Print every step beside autograd's, under the least that `dll` must do.

    Of one example, `up` are the multiply-adds of all layers and `above` of all but the first. Backpropagation needs one
    pass up, one product per layer for W, and one down for each layer but the first; Θ's own update is one more.
    """
    print(f"multiply-adds of dll over backpropagation's: {(2 * up + 2 * above) / (2 * up + above):.3f}\n")
    print(f"{'step':20}{'ms':>9}{'ratio':>9}{'peak MB':>10}{'ratio':>9}")
    for name in times:
        ratio, memory = times[name] / times["autograd"], peaks[name] / peaks["autograd"]
        print(f"{name:20}{1e3 * times[name]:9.2f}{ratio:9.3f}{peaks[name] / 1e6:10.1f}{memory:9.3f}")


def make_parser(description: str | None, batch: int, rounds: int) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=batch)
    parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rule", action="append", help="only this rule; repeat for several")
    return parser


def describe_run(arguments: argparse.Namespace) -> str:
    return (
        f"batch {arguments.batch}, fused Adam, torch {torch.__version__}, {arguments.threads} threads, "
        f"median of {arguments.rounds} interleaved rounds"
    )


def main() -> None:
    parser = make_parser(__doc__, batch=128, rounds=100)
    parser.add_argument("--model", default="mlp", help="mlp, cnn, or hidden layers of your own, such as mlp-32-16")
    parser.add_argument("--data", default="mnist", choices=[*models.MLPS])
    arguments = parser.parse_args()
    if not models.is_model(arguments.model) or arguments.model in ("rnn", "textcnn"):
        parser.error(f"--model {arguments.model} is not mlp, cnn or such as mlp-32-16.")
    torch.set_num_threads(arguments.threads)
    channels, side, _ = models.CNNS[arguments.data]
    x, y = torch.randn(arguments.batch, channels, side, side), torch.randint(0, 10, (arguments.batch,))
    build = partial(models.build, arguments.model, arguments.data)
    times, peaks = measure_steps(make_steps(arguments.rule or apical.rule_names(), build, x, y), arguments.rounds)
    network = SequentialNetwork(build())
    work = [
        torch.Size(layer.synapse.weight_shape).numel() * drive.numel() // layer.synapse.weight_shape[0]
        for layer, drive in zip(network.layers, network.shapes(x.shape[1:]).drives, strict=True)
    ]
    print(f"{arguments.model} for {arguments.data}, {describe_run(arguments)}")
    print_table(times, peaks, sum(work), sum(work[1:]))


if __name__ == "__main__":
    main()
