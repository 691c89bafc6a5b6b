"""Time of a training step of one's own module by rules without weight transport, as a ratio to backpropagation's.

    python benchmarks/modules.py [--rounds 20]

A plain loop: bfloat16 autocast, channels-last images, SGD, `loss.backward()`. ResNet-18 has batches of 512 images of
32 × 32; torchvision's ViT-B/16, where torchvision is installed, batches of 64 of 224 × 224. The rules take turns, eagerly
and compiled, so that all meet the same machine.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import apical
from apical.engine.device import describe_device, find_device, synchronize

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
from resnet18_cifar10 import ResNet18  # type: ignore[import-not-found]

RULES = ("bp", "dll:kolen-pollack", "fa", "sign")


def list_models(device: torch.device) -> dict[str, tuple[Callable[[], nn.Module], int, int, int]]:
    """Return how each model is built, the batch, the size of an image and the classes; small ones without a GPU."""
    if device.type != "cuda":
        return {"ResNet-18, 8 channels": (lambda: ResNet18(8), 16, 32, 10)}
    models: dict[str, tuple[Callable[[], nn.Module], int, int, int]] = {"ResNet-18": (ResNet18, 512, 32, 10)}
    try:
        from torchvision.models import vit_b_16  # type: ignore[import-not-found, unused-ignore]
    except ImportError:
        return models
    return models | {"ViT-B/16": (vit_b_16, 64, 224, 1000)}


def make_step(
    rule: str, build: Callable[[], nn.Module], sizes: list[int], device: torch.device, compiled: bool
) -> Callable[[], None]:
    """Return a training step of this rule on made-up images."""
    batch, size, classes = sizes
    torch.manual_seed(0)
    x = torch.randn(batch, 3, size, size, device=device).contiguous(memory_format=torch.channels_last)
    y = torch.randint(0, classes, (batch,), device=device)
    learner = apical.make(rule, build(), example=torch.randn(2, 3, size, size))
    learner = learner.to(device, memory_format=torch.channels_last)  # type: ignore[call-overload]
    optim = torch.optim.SGD(learner.param_groups(0.01), momentum=0.9, fused=device.type == "cuda")
    forward = torch.compile(learner) if compiled else learner

    def step() -> None:
        with torch.autocast(device.type, torch.bfloat16):
            loss = F.cross_entropy(forward(x), y)
        optim.zero_grad()
        loss.backward()
        optim.step()

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--rules", default=",".join(RULES), help="beside bp, to which all times are compared")
    parser.add_argument("--no-compile", action="store_true", help="time eager steps only")
    args = parser.parse_args()
    device = find_device("auto")
    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.benchmark = True
    print(f"{describe_device(device)}, torch {torch.__version__}", flush=True)
    for name, (build, *sizes) in list_models(device).items():
        for compiled in (False,) if args.no_compile else (False, True):
            rules = dict.fromkeys(["bp", *args.rules.split(",")])
            steps = {rule: make_step(rule, build, sizes, device, compiled) for rule in rules}
            times: dict[str, list[float]] = {rule: [] for rule in steps}
            for k in range(args.rounds + 5):
                for rule, step in steps.items():
                    synchronize(device)
                    start = time.perf_counter()
                    step()
                    synchronize(device)
                    if k >= 5:
                        times[rule].append(time.perf_counter() - start)
            reference = statistics.median(times["bp"])
            for rule, taken in times.items():
                median = statistics.median(taken)
                how = "compiled" if compiled else "eager"
                print(
                    f"{name}, {how}, {rule}: {1e3 * median:.2f} ms a step, {median / reference:.3f} of bp's", flush=True
                )


if __name__ == "__main__":
    main()
