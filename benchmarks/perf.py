"""Speed and memory of every rule as ratios within one run, and how close each comes to what the machine can do.

    python benchmarks/perf.py [--quick] [--growth FOLDER] [--out FOLDER]

For the MNIST MLP (batch 128) and the CIFAR-10 CNN (batch 64), on made-up data, each rule is compared with autograd
backpropagation of the same network with the same fused Adam, run eagerly:

    eager     `learner.step`, as a user's own loop would call it, interleaved with autograd's
    memory    the most that is alive in such a step
    engine    `apical.fit`, one seed, and per seed with several seeds together
    gain      how many times faster a seed of several is than eager
    GFLOP     arithmetic of one step, counted from the operations that the rule calls
    floor     the longer of arithmetic and bytes over the machine's measured rates; no step can be much faster
    reached   floor over the engine's time

Bytes are the fewest that must move: Adam reads four values and writes three for each trained weight, whose gradient is
written once; forward and feedback weights are read once; activity and errors are written and read once each. The rates
come from a large matrix product and a large copy in the same run. `--growth` draws how time and memory grow with width,
depth, batch and seeds. On a GPU whole epochs of the real sizes follow (60,000 images for the MLP, 50,000 for the CNN)
against an epoch of eager autograd with its data on the device, and everything is written to `perf-<device>.json` in
`--out`.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from step import make_steps, measure_steps
from torch import nn

import apical
from apical import models
from apical.engine import device as devices
from apical.engine.device import synchronize, use_precision
from apical.files import replace_atomically
from apical.plausibility.meter import OperationMeter

CASES = {"mlp": ("mnist", 128), "cnn": ("cifar10", 64)}
SEEDS = 4


def time_call(call: Callable[[], object], device: torch.device, rounds: int = 5) -> float:
    """Return the median seconds of a call, with the device's queue empty before and after."""
    times = []
    for _ in range(rounds + 1):
        synchronize(device)
        start = time.perf_counter()
        call()
        synchronize(device)
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])


def measure_rates(device: torch.device) -> tuple[float, float]:
    """Return FLOP/s of a large float32 product (TF32 on a GPU, as in `fit`) and bytes/s, read plus written, of a copy."""
    side, length = (8192, 2**28) if device.type == "cuda" else (2048, 2**25)
    a = torch.randn(side, side, device=device)
    x, y = torch.randn(length, device=device), torch.empty(length, device=device)
    with use_precision("tf32", device):
        product = time_call(lambda: a @ a, device)
    return 2 * side**3 / product, 2 * x.nbytes / time_call(lambda: y.copy_(x), device)


def count_work(rule: str, model: nn.Sequential, x: torch.Tensor, y: torch.Tensor) -> tuple[float, float]:
    """Return the FLOP of one update, and the fewest bytes that one training step must move."""
    learner = apical.make(rule, model, input_shape=tuple(x.shape[1:]))
    with OperationMeter() as meter:
        learner.step(x, y, torch.optim.SGD(learner.param_groups(lr=1e-4)))
    trained = sum(learner.get_parameter(name).numel() for name in learner.trainable)
    forward = sum(w.numel() for w in learner.forward_weights)
    feedback = sum(b.numel() for b in learner.feedback_weights if b is not None)
    shapes = learner.network.shapes(x.shape[1:])
    activity = len(x) * sum(shape.numel() for shape in (*shapes.inputs, *shapes.drives))
    return 2.0 * meter.multiply_adds, 4.0 * (8 * trained + forward + feedback + 4 * activity)


def measure_engine_epoch(
    rule: str, model: str, data: Any, batch: int, seeds: int, device: torch.device, epochs: int = 5
) -> float:
    """Return seconds per epoch of `fit`, all seeds together, after the epochs in which it warms up."""
    name, _ = CASES[model]
    fit = apical.fit(
        lambda: models.build(model, name),
        data,
        rule=rule,
        seeds=seeds,
        epochs=epochs,
        batch_size=batch,
        label_smoothing=0.1,
        device=str(device),
        progress=False,
    )
    return float(statistics.median(row["seconds"] for row in fit.of_seed(0)[2:]))


def measure_engine_step(rule: str, model: str, data: Any, batch: int, seeds: int, device: torch.device) -> float:
    """Return seconds per step and seed of `fit`."""
    return measure_engine_epoch(rule, model, data, batch, seeds, device) / -(-len(data[0]) // batch) / seeds


def make_data(name: str, count: int) -> tuple[torch.Tensor, ...]:
    """Make up images of a data set's size, and classes for them."""
    channels, side, _ = models.CNNS[name]
    x, y = torch.randn(count, channels, side, side), torch.randint(0, 10, (count,))
    return x, y, x[:100], y[:100]


def measure_autograd_epoch(model: str, data: Any, batch: int, device: torch.device) -> float:
    """Return seconds per epoch of eager autograd backpropagation: data on the device, fused Adam, the same rounding."""
    net = models.build(model, CASES[model][0]).to(device)
    optim = torch.optim.Adam(net.parameters(), lr=1e-4, fused=True)
    x, y = data[0].to(device), data[1].to(device)

    def epoch() -> None:
        for index in torch.randperm(len(x), device=device).split(batch):
            optim.zero_grad()
            F.cross_entropy(net(x[index]), y[index], label_smoothing=0.1).backward()
            optim.step()

    with use_precision("tf32", device):
        return time_call(epoch, device, rounds=3)


def measure_epochs(device: torch.device) -> list[dict[str, Any]]:
    """Measure whole epochs of `dll` at the real sizes, beside eager autograd of the same."""
    rows = []
    for model, count, seed_counts in (("mlp", 60_000, (1, 4, 32)), ("cnn", 50_000, (4,))):
        name, batch = CASES[model]
        data = make_data(name, count)
        steps = -(-count // batch)
        reference = measure_autograd_epoch(model, data, batch, device)
        print(f"\n{model}, {count} examples, batch {batch}: an epoch of eager autograd takes {reference:.3f} s")
        for seeds in seed_counts:
            taken = measure_engine_epoch("dll", model, data, batch, seeds, device, epochs=9)
            row = {
                "model": model,
                "seeds": seeds,
                "autograd_epoch_s": reference,
                "epoch_s": taken,
                "epoch_ms_per_seed": 1e3 * taken / seeds,
                "step_ms_per_seed": 1e3 * taken / seeds / steps,
                "gain_per_seed": reference * seeds / taken,
            }
            rows.append(row)
            print(
                f"  dll, {seeds} seeds: {1e3 * taken:.1f} ms per epoch, {row['epoch_ms_per_seed']:.2f} ms per epoch and "
                f"seed, {row['step_ms_per_seed']:.4f} ms per step and seed, {row['gain_per_seed']:.1f} times autograd"
            )
    return rows


def measure_ticks(device: torch.device) -> list[dict[str, Any]]:
    """Measure a tick of `streaming`, whose layers run side by side, beside a step of `dll:kolen-pollack`; one seed."""
    rows = []
    for model, count in (("mlp", 60_000), ("cnn", 25_600)):
        name, batch = CASES[model]
        data = make_data(name, count)
        tick, step = (
            1e3 * measure_engine_step(rule, model, data, batch, 1, device)
            for rule in ("streaming", "dll:kolen-pollack")
        )
        rows.append({"model": model, "tick_ms": tick, "step_ms": step, "ratio": tick / step})
        print(
            f"{model}, batch {batch}: a tick of streaming takes {tick:.4f} ms, {tick / step:.2f} of dll:kolen-pollack's step"
        )
    return rows


def measure_rules(model: str, device: torch.device, rounds: int, rates: tuple[float, float]) -> list[dict[str, Any]]:
    name, batch = CASES[model]
    data = make_data(name, batch * 100)
    x, y = data[0][:batch].clone().to(device), data[1][:batch].clone().to(device)
    build = partial(models.build, model, name)
    steps = make_steps(apical.rule_names(), build, x, y)
    with use_precision("tf32", device):
        times, peaks = measure_steps(steps, rounds, lambda: synchronize(device))
    rows = []
    for rule in apical.rule_names():
        flop, moved = count_work(rule, build().to(device), x, y)
        # About a second an epoch at the most: some rules take ten times as long as others.
        count = batch * max(2, min(100, int(1 / SEEDS / times[rule])))
        part = (data[0][:count], data[1][:count], *data[2:])
        # On a shared machine the clock drifts from minute to minute: autograd is timed again around each run.
        around = [time_call(steps["autograd"], device)]
        one = measure_engine_step(rule, model, part, batch, 1, device)
        around.append(time_call(steps["autograd"], device))
        several = measure_engine_step(rule, model, part, batch, SEEDS, device)
        around.append(time_call(steps["autograd"], device))
        floor = max(flop / rates[0], moved / rates[1])
        rows.append(
            {
                "model": model,
                "rule": rule,
                "autograd_ms": 1e3 * times["autograd"],
                "eager": times[rule] / times["autograd"],
                "memory": peaks[rule] / peaks["autograd"],
                "engine": one / statistics.fmean(around[:2]),
                f"engine_{SEEDS}_seeds": several / statistics.fmean(around[1:]),
                "gain": times[rule] / times["autograd"] / (several / statistics.fmean(around[1:])),
                "gflop": flop / 1e9,
                "megabytes": moved / 1e6,
                "floor_ms": 1e3 * floor,
                "reached": floor / several,
            }
        )
    return rows


def print_rows(rows: list[dict[str, Any]]) -> None:
    name, batch = CASES[rows[0]["model"]]
    print(f"\n{rows[0]['model']} for {name}, batch {batch}; autograd {rows[0]['autograd_ms']:.3f} ms = 1")
    heads = ("eager", "memory", "engine", f"{SEEDS} seeds", "gain", "GFLOP", "MB", "floor ms", "reached")
    print(f"{'rule':20}" + "".join(f"{head:>10}" for head in heads))
    for row in rows:
        numbers = [value for key, value in row.items() if key not in ("model", "rule", "autograd_ms")]
        print(f"{row['rule']:20}" + "".join(f"{number:10.3f}" for number in numbers))


def draw_growth(folder: Path, device: torch.device) -> None:
    """Draw time and peak memory of `dll` and autograd backpropagation over width, depth, batch and seeds, as one figure."""
    import matplotlib.pyplot as plt

    sweeps: dict[str, list[tuple[int, tuple[int, ...], int]]] = {
        "width": [(w, (784, w, w, 10), 128) for w in (128, 256, 512, 1024)],
        "depth": [(d, (784, *[256] * d, 10), 128) for d in (1, 2, 4, 8)],
        "batch": [(b, (784, 512, 512, 10), b) for b in (16, 64, 256, 1024)],
    }
    figure, axes = plt.subplots(2, 4, figsize=(13, 6), layout="constrained")
    for column, (name, points) in enumerate(sweeps.items()):
        curves: dict[str, list[tuple[float, float]]] = {"autograd": [], "dll": []}
        for _, sizes, batch in points:
            x = torch.randn(batch, 784, device=device)
            y = torch.randint(0, 10, (batch,), device=device)
            steps = make_steps(["dll"], partial(models.mlp, sizes), x, y)
            times, peaks = measure_steps(steps, 20, lambda: synchronize(device))
            for rule, curve in curves.items():
                curve.append((1e3 * times[rule], peaks[rule] / 1e6))
        for rule, curve in curves.items():
            for row, label in enumerate(("ms per step", "peak MB")):
                axes[row, column].plot([p[0] for p in points], [c[row] for c in curve], "o-", label=rule)
                axes[row, column].set(xlabel=name, ylabel=label)
    data = make_data("mnist", 1280)
    counts = [1, 2, 4, 8]
    per_seed = [1e3 * measure_engine_step("dll", "mlp", data, 128, n, device) for n in counts]
    axes[0, 3].plot(counts, per_seed, "o-", label="dll, fit")
    axes[0, 3].set(xlabel="seeds together", ylabel="ms per step and seed")
    axes[1, 3].axis("off")
    axes[0, 0].legend()
    for axis in axes.flat:
        axis.set_xscale("log", base=2)
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
    folder.mkdir(parents=True, exist_ok=True)
    figure.savefig(folder / f"growth-{device.type}.svg", metadata={"Date": None})
    print(f"\nwrote {folder / f'growth-{device.type}.svg'}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    parser.add_argument("--growth", type=Path, metavar="FOLDER", help="draw growth with width, depth, batch, seeds")
    parser.add_argument("--out", type=Path, default=Path("results"), metavar="FOLDER", help="where a GPU's JSON goes")
    arguments = parser.parse_args()
    device = devices.find_device("auto")
    place = devices.describe_device(device)
    rates = measure_rates(device)
    print(
        f"{place}, torch {torch.__version__}, {torch.get_num_threads()} threads: "
        f"{rates[0] / 1e12:.3f} TFLOP/s in a large product, {rates[1] / 1e9:.1f} GB/s in a large copy"
    )
    rows = []
    for model in CASES:
        found = measure_rules(model, device, 5 if arguments.quick else 30, rates)
        print_rows(found)
        rows += found
    if device.type == "cuda":
        epochs, ticks = measure_epochs(device), measure_ticks(device)
        path = arguments.out / f"perf-{place.replace(' ', '-')}.json"
        about = {"device": place, "torch": torch.__version__, "flop_per_s": rates[0], "bytes_per_s": rates[1]}
        with replace_atomically(path) as temporary:
            body = {**about, "command": " ".join(["python", *sys.argv]), "rows": rows, "epochs": epochs, "ticks": ticks}
            temporary.write_text(json.dumps(body, indent=1))
        print(f"\nwrote {path}")
    if arguments.growth:
        draw_growth(arguments.growth, device)


if __name__ == "__main__":
    main()
