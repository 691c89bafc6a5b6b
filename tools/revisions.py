"""Write what each rule computes, and the revision of its results, to src/apical/bench/revisions.json.

    python tools/revisions.py            raises the revision of every rule that computes something else than recorded
    python tools/revisions.py --check    lists these rules; exits with 1 if there are any

A result in a store has the revision of its rule. It counts as computed by older code when that revision has risen
since: renaming, formatting or speeding up the code does not age a result, a change of what is computed does. Every rule
trains an MLP, a CNN and, if it can, a recurrent network for a few steps; the losses are what is recorded.
"""

import argparse
import json
import math
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

import apical
import apical.bench
from apical.core.registry import resolve
from apical.files import replace_atomically

PATH = Path(apical.bench.__file__).with_name("revisions.json")
TOLERANCE = 1e-4
"""Largest relative difference of losses that count as equal: rounding on another processor stays far below it."""
FIT: dict[str, Any] = {"epochs": 2, "lr": 0.02, "seeds": (0,), "device": "cpu", "progress": False}

Losses = dict[str, list[float]]


def measure_losses(rule: str) -> Losses:
    """Train each kind of network that a rule can train, and return the training and test losses of two epochs."""
    fits = {name: apical.fit(name, "digits", rule=rule, batch_size=256, **FIT) for name in ("mlp", "cnn")}
    if resolve(rule)[0].RECURRENT:
        fits["rnn"] = apical.fit(build_recurrent, make_sequences(), rule=rule, batch_size=16, **FIT)
    return {
        name: [float(f"{row[loss]:.7g}") for row in fit.history for loss in ("loss", "test_loss")]
        for name, fit in fits.items()
    }


def build_recurrent() -> apical.Elman:
    """Build a small recurrent network. `fit` has seeded torch before."""
    return apical.Elman(nn.RNN(4, 8, batch_first=True), nn.Linear(8, 3))


def make_sequences() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Make random sequences with a random label at every time step."""
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(96, 6, 4, generator=generator), torch.randint(0, 3, (96, 6), generator=generator)
    return x[:64], y[:64], x[64:], y[64:]


def is_equal(recorded: Losses, measured: Losses) -> bool:
    """Return whether a rule computes what was recorded."""
    return recorded.keys() == measured.keys() and all(
        math.isclose(one, other, rel_tol=TOLERANCE)
        for name in recorded
        for one, other in zip(recorded[name], measured[name], strict=True)
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing; list the rules that differ")
    only_check = parser.parse_args().check
    known = json.loads(PATH.read_text("utf-8")) if PATH.exists() else {}
    entries, changed = {}, []
    for rule in apical.rule_names():
        losses = measure_losses(rule)
        if rule in known and is_equal(known[rule]["losses"], losses):
            entries[rule] = known[rule]
        else:
            entries[rule] = {"revision": known.get(rule, {"revision": 0})["revision"] + 1, "losses": losses}
            changed.append(rule)
    print(f"{len(changed)} of {len(entries)} rules changed: {', '.join(changed) or 'none'}")
    if only_check:
        sys.exit(bool(changed))
    text = ",\n".join(f' "{rule}": {json.dumps(entry)}' for rule, entry in entries.items())
    with replace_atomically(PATH) as temporary:
        temporary.write_text(f"{{\n{text}\n}}\n", "utf-8")


if __name__ == "__main__":
    main()
