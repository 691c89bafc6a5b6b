"""Attack apical with random networks, hooks, options, inputs, damaged files and interrupted runs.

    python tests/fuzz.py --seconds 3600          an hour; every case has a number, and findings are printed as they come
    python tests/fuzz.py --only files            cases of one kind: gradients, calls, files, runs
    python tests/fuzz.py --case gradients 1234   one case again

A finding is an exception that is not an `ApicalError`, a gradient of `bp` that differs from autograd's, a damaged file
that gives other numbers than the intact one, or a resumed run that differs from an uninterrupted one. What is found
becomes a test of its own.
"""

import argparse
import contextlib
import copy
import random
import shutil
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import apical
import apical.bench
from apical.bench import suites
from apical.bench.store import Store
from apical.core.registry import options_of, resolve
from apical.data import DATASETS
from apical.data.source import Record, Source, compute_sums
from apical.engine import checkpoint as checkpoints

ACTIVATIONS: list[Callable[[], nn.Module]] = [
    *(nn.Tanh, nn.ReLU, nn.Sigmoid, nn.GELU, nn.SiLU, nn.ELU, nn.Softplus, nn.Identity, nn.Softsign, nn.Hardtanh),
    *(lambda: nn.ReLU(inplace=True), lambda: nn.LeakyReLU(0.2, inplace=True), lambda: nn.Softmax(1)),
]
RUN: dict[str, Any] = {"epochs": 3, "batch_size": 8, "progress": False, "device": "cpu"}


class WrongResultError(Exception):
    """What apical did wrong."""


# Networks and what is hung onto them.


def draw_network(rng: random.Random) -> tuple[nn.Sequential, tuple[int, ...], int]:
    """Draw a network; return it with the shape of one example and its number of classes."""
    classes, modules = rng.randint(2, 4), list[nn.Module]()
    if rng.random() < 0.5:
        shape: tuple[int, ...] = (rng.randint(1, 3), rng.randint(5, 8), rng.randint(5, 8))
        channels = shape[0]
        for _ in range(rng.randint(1, 2)):
            wide = rng.randint(1, 4)
            modules += [nn.Conv2d(channels, wide, rng.choice([1, 3]), padding=1, bias=rng.random() < 0.5)]
            modules += [rng.choice(ACTIVATIONS)(), *([nn.MaxPool2d(2)] if rng.random() < 0.4 else [])]
            channels = wide
        modules.append(nn.Flatten())
    else:
        shape = (rng.randint(1, 5),)
    width = nn.Sequential(*modules)(torch.zeros(2, *shape)).shape[1]
    for _ in range(rng.randint(0, 2)):
        wide = rng.randint(1, 6)
        modules += [nn.Linear(width, wide, bias=rng.random() < 0.7), rng.choice(ACTIVATIONS)()]
        width = wide
    return nn.Sequential(*modules, nn.Linear(width, classes)).double(), shape, classes


def change_module(rng: random.Random, model: nn.Module) -> Callable[[], None]:
    """Change what one module computes, by a hook or a forward of its own; return what undoes a global hook."""
    module = rng.choice([m for m in model.modules() if m is not model])
    kind = rng.choice(["forward hook", "pre-hook", "own forward", "global hook", "backward hook"])
    if kind == "forward hook":
        module.register_forward_hook(lambda m, args, out: 1.5 * out)
    elif kind == "pre-hook":
        module.register_forward_pre_hook(lambda m, args: (args[0] * 0.5,))
    elif kind == "own forward":
        plain = module.forward
        module.forward = lambda a: 2 * plain(a)  # type: ignore[method-assign]
    elif kind == "backward hook":
        module.register_full_backward_hook(lambda m, grads, out: tuple(g and 3 * g for g in grads) or None)
    else:
        kinds = type(module)
        hook = nn.modules.module.register_module_forward_hook(
            lambda m, args, out: 2 * out if type(m) is kinds else None
        )
        return hook.remove
    return lambda: None


def attack_gradients(rng: random.Random) -> None:
    """`bp` equals autograd, whatever hangs on the modules before or after `make`, or is refused."""
    model, shape, classes = draw_network(rng)
    x = torch.randn(rng.randint(1, 5), *shape, dtype=torch.float64)
    y = torch.randint(0, classes, (len(x),))
    undo, when = (lambda: None), rng.choice(["never", "before", "after"])
    try:
        if when == "before":
            undo = change_module(rng, model)
        learner = apical.make("bp", model, input_shape=shape)
        if when == "after":
            learner.credit(x, y)
            learner.zero_grad()
            undo = change_module(rng, model)
        learner.credit(x, y)
        loss = nn.functional.cross_entropy(model(x), y)
        names, params = zip(*model.named_parameters(), strict=True)
        expected = torch.autograd.grad(loss, params, allow_unused=True)
    except apical.ApicalError:
        return
    finally:
        undo()
    for name, parameter, gradient in zip(names, params, expected, strict=True):
        own = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        other = torch.zeros_like(parameter) if gradient is None else gradient
        if not torch.allclose(own, other, rtol=1e-9, atol=1e-11):
            raise WrongResultError(
                f"{name} of {model} differs from autograd by {float((own - other).abs().max()):.1e} ({when})"
            )


# Calls with any option and any input.

VALUES: list[Any] = [
    None,
    True,
    False,
    0,
    1,
    -1,
    2,
    3,
    0.5,
    1e-3,
    1e30,
    float("nan"),
    float("inf"),
    "",
    "paper",
    [1],
    {},
]


def draw_input(rng: random.Random, shape: tuple[int, ...]) -> Tensor:
    """Draw a batch, most often one that fits."""
    x = torch.randn(rng.choice([0, 1, 3, 4]), *shape, dtype=torch.float64)
    changes: list[Callable[[], Tensor]] = [
        *(
            lambda: x.float(),
            lambda: x.bfloat16(),
            lambda: x.long(),
            lambda: x.to(torch.complex64),
            lambda: x.to("meta"),
        ),
        *(
            lambda: x.to_sparse(),
            lambda: x[:, :0],
            lambda: x * float("nan"),
            lambda: x.unsqueeze(0),
            lambda: x.flatten(),
        ),
    ]
    return rng.choice(changes)() if rng.random() < 0.4 else x


def draw_targets(rng: random.Random, count: int, classes: int) -> Tensor:
    """Draw targets, most often labels that fit."""
    y = torch.randint(0, classes, (count,))
    changes: list[Callable[[], Tensor]] = [
        *(lambda: y.float(), lambda: y + classes, lambda: y - 1, lambda: y[:-1], lambda: y.to("meta")),
        *(lambda: nn.functional.one_hot(y, classes).double(), lambda: torch.randn(count, classes, dtype=torch.float64)),
        lambda: nn.functional.one_hot(y, classes).bfloat16(),
    ]
    return rng.choice(changes)() if rng.random() < 0.4 else y


def attack_calls(rng: random.Random) -> None:
    """Whatever options and inputs a rule is given, it works or says in a sentence why not."""
    model, shape, classes = draw_network(rng)
    rule = rng.choice(apical.rule_names())
    options = {name: rng.choice(VALUES) for name in options_of(resolve(rule)[0]) if rng.random() < 0.15}
    if rng.random() < 0.2:
        model = model.to(rng.choice([torch.float32, torch.bfloat16, torch.float16]))
    plain = copy.deepcopy(model)
    try:
        learner = apical.make(rule, model, input_shape=shape, **options)
        optimiser = torch.optim.SGD(learner.param_groups(1e-3))
    except apical.ApicalError:
        return
    for _ in range(2):
        x = draw_input(rng, shape)
        try:
            learner.step(x, draw_targets(rng, len(x), classes), optimiser)
            learner(x)
        except apical.ApicalError:
            return
        except RuntimeError as error:  # a model that is not read as layers checks its input itself
            if learner.network.is_general and raises_alike(plain, x, error):
                return
            raise


def raises_alike(model: nn.Module, x: Tensor, error: Exception) -> bool:
    """Return whether the plain model raises the same error for an input."""
    try:
        model(x)
    except Exception as own:
        return str(own) == str(error)
    return False


# Damaged files.


def damage(rng: random.Random, content: bytes) -> bytes:
    """Flip bits, cut, double, or overwrite a part of some bytes."""
    body = bytearray(content)
    start = rng.randrange(max(1, len(body)))
    length = rng.choice([1, 4, 64, 4096])
    kind = rng.choice(["flip", "flip", "flip", "cut", "zeros", "noise", "twice", "insert"])
    if kind == "flip":
        for _ in range(rng.choice([1, 1, 8])):
            at = rng.randrange(len(body))
            body[at] ^= 1 << rng.randrange(8)
    elif kind == "cut":
        del body[start:]
    elif kind == "zeros":
        body[start : start + length] = bytes(min(length, len(body) - start))
    elif kind == "noise":
        body[start : start + length] = rng.randbytes(min(length, len(body) - start))
    elif kind == "twice":
        body[start:start] = body[start : start + length]
    else:
        body[start:start] = rng.randbytes(length)
    return bytes(body)


def make_network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))


@cache
def make_tensors() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(32, 4, generator=generator), torch.randint(0, 2, (32,), generator=generator)
    return x, y, x, y


@cache
def make_entry() -> tuple[Source, dict[str, np.ndarray]]:
    """Make a small data set in the form of MNIST, with its arrays."""
    rng = np.random.default_rng(0)
    shapes = {"x_train": (8, 28, 28), "y_train": (8,), "x_test": (4, 28, 28), "y_test": (4,)}
    arrays = {name: rng.integers(0, 10, shape, np.uint8) for name, shape in shapes.items()}
    return replace(DATASETS["mnist"], train=8, test=4, sums=compute_sums(arrays)), arrays  # type: ignore[arg-type]


@cache
def make_files() -> dict[str, bytes]:
    """Make one intact file of each kind that can be damaged."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        apical.fit(make_network, make_tensors(), rule="dll", checkpoint=folder / "run.safetensors", **RUN)
        apical.bench.run(
            "digits",
            rules=["bp", "fa"],
            models=["mlp"],
            epochs=1,
            seeds=2,
            progress=False,
            store=folder / "results.sqlite",
        )
        entry, arrays = make_entry()
        entry.write(folder / "mnist.npz", arrays, Record({}, {}))
        shutil.copy(Path(suites.__file__).with_name("suites") / "digits.toml", folder / "suite.toml")
        return {kind: (folder / kind).read_bytes() for kind in READERS}


def read_checkpoint(path: Path) -> Any:
    saved = checkpoints.load(path)
    tensors = {seed: {name: t.tolist() for name, t in own.items()} for seed, own in saved.tensors.items()}
    return saved.settings, saved.epoch, saved.history, saved.failed, tensors


def read_store(path: Path) -> Any:
    """Return the epochs of every run that can be read."""
    with Store(path, write=False) as store:
        return {(row.key, row.seed, row.status): store.history(row) for row in store.runs()}


def read_data(path: Path) -> Any:
    return {name: array.tolist() for name, array in make_entry()[0].read(path.parent)[0].items()}


def read_suite(path: Path) -> Any:
    """Read a suite and list its jobs. A changed letter may give another suite, so only errors count."""
    suites.list_jobs(suites.load(str(path)))
    return {}


READERS = {
    "run.safetensors": read_checkpoint,
    "results.sqlite": read_store,
    "mnist.npz": read_data,
    "suite.toml": read_suite,
}


def attack_files(rng: random.Random) -> None:
    """A damaged file gives the numbers of the intact one, some of its runs, or a sentence."""
    kind = rng.choice(list(READERS))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / kind
        path.write_bytes(make_files()[kind])
        intact = READERS[kind](path)
        path.write_bytes(damage(rng, make_files()[kind]))
        try:
            found = READERS[kind](path)
        except apical.ApicalError:
            return
        same = found.items() <= intact.items() if kind == "results.sqlite" else found == intact
        if not same:
            raise WrongResultError(f"a damaged {kind} gives other numbers")


# Interrupted runs.


class RunStoppedError(Exception):
    """What ends a run in the middle."""


def attack_runs(rng: random.Random) -> None:
    """A run that is interrupted after any epoch and resumed equals one that was not."""
    rule, at = rng.choice(apical.rule_names()), rng.randint(1, 2)
    options = {
        **RUN,
        "rule": rule,
        "seeds": rng.randint(1, 2),
        "lr": rng.choice([1e-3, 0.1]),
        "stack": rng.choice([True, None]),
    }

    def interrupt(rows: list[dict[str, Any]]) -> None:
        if rows[0]["epoch"] == at:
            raise RunStoppedError

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.safetensors"
        try:
            whole = apical.fit(make_network, make_tensors(), **options)
            with contextlib.suppress(RunStoppedError):
                apical.fit(make_network, make_tensors(), checkpoint=path, on_epoch=interrupt, **options)
            resumed = apical.fit(make_network, make_tensors(), checkpoint=path, resume=path.exists(), **options)
        except apical.ApicalError:
            return
    for one, other in zip(whole.learners, resumed.learners, strict=True):
        for name, tensor in one.state_dict().items():
            if not torch.equal(tensor, other.state_dict()[name]):
                raise WrongResultError(f"{name} of {rule} differs after a resume at epoch {at}")


ATTACKS = {"gradients": attack_gradients, "calls": attack_calls, "files": attack_files, "runs": attack_runs}


def run_case(kind: str, number: int) -> str | None:
    """Run one case and return what was found, None if nothing was."""
    torch.manual_seed(number)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ATTACKS[kind](random.Random(f"{kind} {number}"))
    except WrongResultError as finding:
        return str(finding)
    except Exception:
        return traceback.format_exc()
    return None


def attack(seconds: float, first: int = 0, kinds: Sequence[str] = tuple(ATTACKS)) -> Iterator[str]:
    """Run cases of these kinds in turn until the time is up, and yield what is found."""
    end, number = time.monotonic() + seconds, first
    while time.monotonic() < end:
        for kind in kinds:
            found = run_case(kind, number)
            if found is not None:
                yield f"{kind} {number}: {found}"
        number += 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--first", type=int, default=0, help="the number of the first case")
    parser.add_argument("--only", choices=list(ATTACKS), action="append", help="cases of this kind alone")
    parser.add_argument("--case", nargs=2, metavar=("KIND", "NUMBER"), help="one case again")
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.case:
        kind, number = given.case
        sys.exit(run_case(kind, int(number)))
    count = 0
    for found in attack(given.seconds, given.first, given.only or tuple(ATTACKS)):
        count += 1
        print(found, flush=True)
    print(f"{count} findings in {given.seconds:g} s")
    sys.exit(bool(count))


if __name__ == "__main__":
    main()
