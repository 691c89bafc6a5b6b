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
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from step import autograd_step, measure, rule_step
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

import apical
from apical import models
from apical.engine import device as devices
from apical.engine.device import synchronize, use_precision
from apical.files import replace_atomically

CASES = {"mlp": ("mnist", 128), "cnn": ("cifar10", 64)}
SEEDS = 4


def seconds(run: Callable[[], object], device: torch.device, rounds: int = 5) -> float:
    """The median time of a call, with the device's queue empty before and after."""
    times = []
    for _ in range(rounds + 1):
        synchronize(device)
        began = time.perf_counter()
        run()
        synchronize(device)
        times.append(time.perf_counter() - began)
    return statistics.median(times[1:])


def ceilings(device: torch.device) -> tuple[float, float]:
    """FLOP/s of a large float32 product (TF32 on a GPU, as in `fit`) and bytes/s of a large copy, read plus written."""
    side, length = (8192, 2**28) if device.type == "cuda" else (2048, 2**25)
    a = torch.randn(side, side, device=device)
    x, y = torch.randn(length, device=device), torch.empty(length, device=device)
    with use_precision("tf32", device):
        product = seconds(lambda: a @ a, device)
    return 2 * side**3 / product, 2 * x.nbytes / seconds(lambda: y.copy_(x), device)


class Arithmetic(TorchDispatchMode):
    """Counts FLOP by torch's own formulas; its counter cannot look inside `torch.func.vjp`, a mode can."""

    def __init__(self) -> None:
        super().__init__()
        self.flop = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        formula = flop_registry.get(func._overloadpacket)
        if formula is not None:
            self.flop += formula(*args, **(kwargs or {}), out_val=out)
        return out


def operations(rule: str, model: nn.Sequential, x: torch.Tensor, y: torch.Tensor) -> tuple[float, float]:
    """FLOP of one update, and the fewest bytes that one training step must move."""
    learner = apical.make(rule, model, input_shape=tuple(x.shape[1:]))
    with Arithmetic() as counter:
        learner.step(x, y, torch.optim.SGD(learner.param_groups(lr=1e-4)))
    trained = sum(learner.get_parameter(name).numel() for name in learner.trainable)
    forward = sum(w.numel() for w in learner.forward_weights)
    feedback = sum(b.numel() for b in learner.feedback_weights if b is not None)
    shapes = learner.network.shapes(x.shape[1:])
    activity = len(x) * sum(shape.numel() for shape in (*shapes.inputs, *shapes.drives))
    return counter.flop, 4.0 * (8 * trained + forward + feedback + 4 * activity)


def engine_seconds(
    rule: str, model: str, data: Any, batch: int, seeds: int, device: torch.device, epochs: int = 5
) -> float:
    """Seconds per epoch of `fit`, all seeds together, after the epochs in which it warms up."""
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


def engine_step(rule: str, model: str, data: Any, batch: int, seeds: int, device: torch.device) -> float:
    """Seconds per step and seed of `fit`."""
    return engine_seconds(rule, model, data, batch, seeds, device) / -(-len(data[0]) // batch) / seeds


def made_up(shape: tuple[int, ...], count: int) -> tuple[torch.Tensor, ...]:
    x, y = torch.randn(count, *shape), torch.randint(0, 10, (count,))
    return x, y, x[:100], y[:100]


def autograd_epoch(model: str, data: Any, batch: int, device: torch.device) -> float:
    """Seconds per epoch of eager autograd backpropagation: data on the device, fused Adam, the same rounding."""
    net = models.build(model, CASES[model][0]).to(device)
    optim = torch.optim.Adam(net.parameters(), lr=1e-4, fused=True)
    x, y = data[0].to(device), data[1].to(device)

    def epoch() -> None:
        for index in torch.randperm(len(x), device=device).split(batch):
            optim.zero_grad()
            F.cross_entropy(net(x[index]), y[index], label_smoothing=0.1).backward()
            optim.step()

    with use_precision("tf32", device):
        return seconds(epoch, device, rounds=3)


def epochs(device: torch.device) -> list[dict[str, Any]]:
    """Whole epochs of `dll` at the real sizes, beside eager autograd of the same."""
    rows = []
    for model, count, crowds in (("mlp", 60_000, (1, 4, 32)), ("cnn", 50_000, (4,))):
        name, batch = CASES[model]
        channels, side, _ = models.CNNS[name]
        data = made_up((channels, side, side), count)
        steps = -(-count // batch)
        reference = autograd_epoch(model, data, batch, device)
        print(f"\n{model}, {count} examples, batch {batch}: an epoch of eager autograd takes {reference:.3f} s")
        for seeds in crowds:
            taken = engine_seconds("dll", model, data, batch, seeds, device, epochs=9)
            rows.append(
                {
                    "model": model,
                    "seeds": seeds,
                    "autograd_epoch_s": reference,
                    "epoch_s": taken,
                    "epoch_ms_per_seed": 1e3 * taken / seeds,
                    "step_ms_per_seed": 1e3 * taken / seeds / steps,
                    "gain_per_seed": reference * seeds / taken,
                }
            )
            print(
                f"  dll, {seeds} seeds: {1e3 * taken:.1f} ms per epoch, {1e3 * taken / seeds:.2f} ms per epoch and seed, "
                f"{1e3 * taken / seeds / steps:.4f} ms per step and seed, {reference * seeds / taken:.1f} times autograd"
            )
    return rows


def table(model: str, device: torch.device, rounds: int, rates: tuple[float, float]) -> list[dict[str, Any]]:
    name, batch = CASES[model]
    channels, side, _ = models.CNNS[name]
    data = made_up((channels, side, side), batch * 100)
    x, y = data[0][:batch].clone().to(device), data[1][:batch].clone().to(device)

    def build() -> nn.Sequential:
        return models.build(model, name).to(device)

    steps = {"autograd": autograd_step(build(), x, y)}
    steps |= {rule: rule_step(rule, build(), x, y) for rule in apical.rule_names()}
    with use_precision("tf32", device):
        times, peaks = measure(steps, rounds, lambda: synchronize(device))
    rows = []
    for rule in apical.rule_names():
        flop, moved = operations(rule, build(), x, y)
        # About a second an epoch at the most: some rules take ten times as long as others.
        some = batch * max(2, min(100, int(1 / SEEDS / times[rule])))
        part = (data[0][:some], data[1][:some], *data[2:])
        # On a shared machine the clock drifts from minute to minute: autograd is timed again around each run.
        around = [seconds(steps["autograd"], device)]
        one = engine_step(rule, model, part, batch, 1, device)
        around.append(seconds(steps["autograd"], device))
        several = engine_step(rule, model, part, batch, SEEDS, device)
        around.append(seconds(steps["autograd"], device))
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


def show(rows: list[dict[str, Any]]) -> None:
    name, batch = CASES[rows[0]["model"]]
    print(f"\n{rows[0]['model']} for {name}, batch {batch}; autograd {rows[0]['autograd_ms']:.3f} ms = 1")
    heads = ("eager", "memory", "engine", f"{SEEDS} seeds", "gain", "GFLOP", "MB", "floor ms", "reached")
    print(f"{'rule':20}" + "".join(f"{head:>10}" for head in heads))
    for row in rows:
        numbers = [value for key, value in row.items() if key not in ("model", "rule", "autograd_ms")]
        print(f"{row['rule']:20}" + "".join(f"{number:10.3f}" for number in numbers))


def growth(folder: Path, device: torch.device) -> None:
    """Time and peak memory of `dll` and autograd backpropagation over width, depth, batch and seeds, as one figure."""
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
            steps = {
                "autograd": autograd_step(models.mlp(sizes).to(device), x, y),
                "dll": rule_step("dll", models.mlp(sizes).to(device), x, y),
            }
            times, peaks = measure(steps, 20, lambda: synchronize(device))
            for rule, curve in curves.items():
                curve.append((1e3 * times[rule], peaks[rule] / 1e6))
        for rule, curve in curves.items():
            for row, label in enumerate(("ms per step", "peak MB")):
                axes[row, column].plot([p[0] for p in points], [c[row] for c in curve], "o-", label=rule)
                axes[row, column].set(xlabel=name, ylabel=label)
    data = made_up((1, 28, 28), 1280)
    counts = [1, 2, 4, 8]
    per_seed = [1e3 * engine_step("dll", "mlp", data, 128, n, device) for n in counts]
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
    chosen = parser.parse_args()
    device = devices.find_device("auto")
    place = devices.describe_device(device)
    rates = ceilings(device)
    print(
        f"{place}, torch {torch.__version__}, {torch.get_num_threads()} threads: "
        f"{rates[0] / 1e12:.3f} TFLOP/s in a large product, {rates[1] / 1e9:.1f} GB/s in a large copy"
    )
    rows = []
    for model in CASES:
        found = table(model, device, 5 if chosen.quick else 30, rates)
        show(found)
        rows += found
    if device.type == "cuda":
        whole = epochs(device)
        path = chosen.out / f"perf-{place.replace(' ', '-')}.json"
        about = {"device": place, "torch": torch.__version__, "flop_per_s": rates[0], "bytes_per_s": rates[1]}
        with replace_atomically(path) as temporary:
            body = {**about, "command": " ".join(["python", *sys.argv]), "rows": rows, "epochs": whole}
            temporary.write_text(json.dumps(body, indent=1))
        print(f"\nwrote {path}")
    if chosen.growth:
        growth(chosen.growth, device)


if __name__ == "__main__":
    main()
