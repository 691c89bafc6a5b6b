"""What the examples share: their common options, and the rows that they print."""

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import apical

START = time.time()


def make_parser(description: str, decays: tuple[float, float, float]) -> argparse.ArgumentParser:
    """Return a parser with the options that all examples have, and these early and late decays and early share."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rule", default="dll:kolen-pollack", help="bp, dll:kolen-pollack, sign, fa or readout")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--early-decay", type=float, default=decays[0], help="Kolen-Pollack's at the start of the run")
    parser.add_argument("--late-decay", type=float, default=decays[1], help="Kolen-Pollack's in the rest of the run")
    parser.add_argument("--early-share", type=float, default=decays[2], help="the share of the run that is its start")
    parser.add_argument("--compile", action="store_true", help="use torch.compile")
    parser.add_argument("--out", type=Path, help="append the printed rows to this file")
    return parser


def describe_run(args: argparse.Namespace) -> dict[str, Any]:
    """Return all settings of a run, the device and the versions."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    return {**vars(args), "device": device, "torch": torch.__version__, "apical": apical.__version__}


def print_row(row: dict[str, Any], out: Path | None) -> None:
    """Print a row as JSON with the seconds since the start, and append it to the file. Paths become names of files."""
    line = json.dumps({**row, "seconds": round(time.time() - START, 1)}, default=lambda path: path.name)
    print(line, flush=True)
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        with out.open("a", encoding="utf-8") as file:
            file.write(line + "\n")


@torch.no_grad()
def measure_alignment(learner: apical.Learner) -> float | None:
    """Return the mean cosine of each W with the weights that carry its error; None if W itself or nothing does."""
    pairs = zip(learner.forward_weights, learner.feedback_weights, strict=True)
    cosines = [F.cosine_similarity(w.flatten(), b.flatten(), 0) for w, b in pairs if b is not None and b is not w]
    return torch.stack(cosines).mean().item() if cosines else None


def compute_gradient_norm(model: nn.Module) -> Tensor:
    """Return the norm of the gradients of a model's parameters together; feedback weights are not among them."""
    return nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
