"""The page on writing a rule, run as a reader would: the file, the script, the commands; and the law that it states."""

import re
import runpy
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import apical
from apical.bench.store import Store
from reference import assert_all_same
from runs import without_time

PAGE = (Path(__file__).parents[1] / "docs" / "your-own-rule.md").read_text("utf-8")
RULE, SCRIPT = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
(SHELL,) = re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "my_rules.py").write_text(RULE, "utf-8")
    (tmp_path / "script.py").write_text(SCRIPT, "utf-8")
    return tmp_path


@pytest.fixture
def rule(folder: Path) -> Iterator[type[apical.Learner]]:
    known = dict(apical.RULES)
    yield runpy.run_path(str(folder / "my_rules.py"))["DirectRandomTargets"]
    apical.RULES.clear()
    apical.RULES.update(known)


def run(folder: Path, *command: str) -> str:
    paths = [entry for entry in sys.path if entry]
    start = f"import sys, runpy; sys.path[:0] = {[str(folder), *paths]!r}; sys.argv = {list(command)!r}; "
    start += "runpy.run_path('script.py')" if command == ("script",) else "from apical.cli import main; main()"
    done = subprocess.run([sys.executable, "-c", start], cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_rule_is_a_page_and_less() -> None:
    assert len(RULE.splitlines()) < 40


def test_the_script_trains_it(folder: Path) -> None:
    assert float(run(folder, "script").strip().rstrip("%")) > 85


@pytest.mark.slow
def test_the_commands_take_it(folder: Path) -> None:
    pytest.importorskip("typer")
    train, bench = (shlex.split(line) for line in SHELL.splitlines())
    assert "drtp cnn digits" in run(folder, *train)
    shown = run(folder, *bench, "--seeds", "3", "--epochs", "12")
    assert re.search(r"drtp .*\+\d", shown), shown
    assert "do not" not in next(line for line in shown.splitlines() if "drtp" in line)
    with Store(folder / "results.sqlite", write=False) as store:
        commands = {row.declaration.rule: row.command for row in store.runs()}
    assert str(commands["my-drtp"]).startswith("apical --import my_rules train --rule my-drtp ")
    assert str(commands["bp"]).startswith("apical train --rule bp ")


@pytest.mark.slow
def test_a_module_that_is_not_there_is_named(folder: Path) -> None:
    pytest.importorskip("typer")
    with pytest.raises(AssertionError, match="cannot import 'my_ruels' for --import my_ruels"):
        run(folder, "apical", "--import", "my_ruels", "bench")


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Flatten(), nn.Linear(12, 6), nn.Tanh(), nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))


def cnn() -> nn.Sequential:
    first = nn.Conv2d(1, 4, 2), nn.Tanh(), nn.AvgPool2d((2, 1)), nn.Conv2d(4, 3, (1, 2)), nn.Tanh()
    return nn.Sequential(*first, nn.Flatten(), nn.Linear(6, 3))


@pytest.mark.parametrize("build", [mlp, cnn])
def test_it_obeys_the_law_that_the_page_states(rule: type[apical.Learner], build: type) -> None:
    torch.manual_seed(0)
    x, y = torch.randn(8, 1, 3, 4, dtype=torch.float64), torch.randint(0, 3, (8,))
    model = build().double()
    learner = rule(model, input_shape=(1, 3, 4))
    learner.credit(x, y)
    got = {name: p.grad for name, p in learner.named_parameters()}

    ends = [k for k, module in enumerate(model) if isinstance(module, nn.Linear | nn.Conv2d)]
    u, total = x, torch.zeros((), dtype=torch.float64)
    for i, (start, stop) in enumerate(zip([0, *ends[1:]], [*ends[1:], len(model)], strict=True)):
        u = model[start:stop](u.detach())
        total = total + (nn.functional.cross_entropy(u, y) if stop == len(model) else _pull(learner, i, u, y))
    expected = torch.autograd.grad(total, list(model.parameters()))
    assert_all_same(got, {f"model.{n}": g for (n, _), g in zip(model.named_parameters(), expected, strict=True)})


def _pull(learner: apical.Learner, i: int, u: Tensor, y: Tensor) -> Tensor:
    b: Tensor = getattr(learner, f"b{i}")
    return -(b[y] * u).flatten(1).sum(1).mean()


# Rules that are not quite right.


class Spoiled(apical.Backpropagation):
    """Backpropagation whose updates `spoil` changes."""

    spoil: Callable[[apical.Update], object]

    def update(self, *inputs: Any) -> apical.Update:
        return type(self).spoil(super().update(*inputs))


def summed(update: apical.Update) -> apical.Update:
    return update._replace(grads={name: g.sum() for name, g in update.grads.items()})


def emptied(update: apical.Update) -> apical.Update:
    return update._replace(grads=dict.fromkeys(update.grads))


def renamed(update: apical.Update) -> apical.Update:
    return update._replace(grads={f"{name}s": g for name, g in update.grads.items()})


SPOILED: dict[str, tuple[Callable[[apical.Update], object], str]] = {
    "a sum": (summed, r"'spoiled' has a gradient of shape \(\) for model.5.weight, which is of shape \(3, 5\)"),
    "none of one": (emptied, r"'spoiled' has a gradient of NoneType for model.5.weight, which is of shape \(3, 5\)"),
    "another name": (renamed, "'spoiled' has a gradient for 'model.5.weights'.* such as 'model.1.weight'"),
    "nothing": (lambda update: None, r"'spoiled' returned NoneType; apical.Update\(grads"),
    "a plain tuple": (tuple, r"'spoiled' returned tuple; apical.Update\(grads"),
}


@pytest.fixture
def spoiled() -> Iterator[type[Spoiled]]:
    known = dict(apical.RULES)
    yield type("OfATest", (Spoiled,), {"NAME": "spoiled"})
    apical.RULES.clear()
    apical.RULES.update(known)


@pytest.mark.parametrize("what", SPOILED)
def test_an_update_that_is_none_is_refused_before_anything_changes(what: str, spoiled: type[Spoiled]) -> None:
    spoil, words = SPOILED[what]
    spoiled.spoil = staticmethod(spoil)
    learner = apical.make("spoiled", mlp())
    with pytest.raises(apical.ApicalError, match=words) as caught:
        learner.credit(torch.randn(5, 12), torch.tensor([0, 1, 2, 0, 1]))
    assert "\n" not in str(caught.value)
    assert all(p.grad is None for p in learner.parameters())


@pytest.mark.parametrize("what", SPOILED)
@pytest.mark.parametrize("seeds", [1, 2])
def test_fit_refuses_it_for_one_seed_and_for_a_stack_of_them(what: str, seeds: int, spoiled: type[Spoiled]) -> None:
    spoil, words = SPOILED[what]
    spoiled.spoil = staticmethod(spoil)
    x, y = torch.randn(20, 12), torch.arange(20) % 3
    with pytest.raises(apical.ApicalError, match=words):
        apical.fit(mlp, (x, y, x, y), rule="spoiled", seeds=seeds, epochs=1, progress=False)


def looking(update: apical.Update) -> apical.Update:
    assert update.loss.item() > 0
    return update


def drawing(update: apical.Update) -> apical.Update:
    torch.randn(3)
    return update


@pytest.mark.parametrize(("spoil", "why"), [(looking, "item"), (drawing, "random")])
@pytest.mark.parametrize("resumed", [False, True])
def test_a_rule_that_cannot_be_stacked_trains_each_seed_alone_and_says_so(
    spoil: Callable[[apical.Update], object], why: str, resumed: bool, spoiled: type[Spoiled], tmp_path: Path
) -> None:
    spoiled.spoil = staticmethod(spoil)
    x, y = torch.randn(20, 12), torch.arange(20) % 3
    run: dict[str, Any] = {"seeds": 2, "epochs": 2, "batch_size": 8, "progress": False}
    kept = {"checkpoint": tmp_path / "run.safetensors"}
    if resumed:
        apical.fit(mlp, (x, y, x, y), rule="spoiled", **run, **kept, stop_after=1)
    with torch.random.fork_rng():
        done = apical.fit(mlp, (x, y, x, y), rule="spoiled", **run, **kept, resume=resumed)
    plain = apical.fit(mlp, (x, y, x, y), rule="bp", **run, stack=False)
    assert without_time(done.history) == without_time(plain.history)
    assert any(reason.startswith("stacked seeds: vmap: ") and why in reason for reason in done.reasons)


def test_learners_that_run_beside_such_a_stack_begin_anew_too(spoiled: type[Spoiled]) -> None:
    spoiled.spoil = staticmethod(looking)
    x, y = torch.randn(20, 12), torch.arange(20) % 3
    trials = [{"label_smoothing": 0.1}, {"lr": 0.1}, {"lr": 0.2}]
    run: dict[str, Any] = {"epochs": 2, "batch_size": 8, "progress": False}
    done = apical.sweep(mlp, (x, y, x, y), trials, rule="spoiled", **run)
    plain = apical.sweep(mlp, (x, y, x, y), trials, rule="bp", **run, stack=False)
    assert [without_time(fit.history) for fit in done] == [without_time(fit.history) for fit in plain]
