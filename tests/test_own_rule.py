"""The page on writing a rule, run as a reader would: the file, the script, the commands; and the law that it states."""

import re
import runpy
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import apical
from reference import assert_all_same

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
    start += (
        "runpy.run_path('script.py')" if command == ("script",) else "from apical.cli import main; main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", start], cwd=folder, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_rule_is_a_page_and_less() -> None:
    assert len(RULE.splitlines()) < 40


def test_the_script_trains_it(folder: Path) -> None:
    assert float(run(folder, "script").strip().rstrip("%")) > 85


def test_the_commands_take_it(folder: Path) -> None:
    pytest.importorskip("typer")
    train, bench = (shlex.split(line) for line in SHELL.splitlines())
    assert "drtp cnn digits" in run(folder, *train)
    shown = run(folder, *bench, "--seeds", "3", "--epochs", "12")
    assert re.search(r"drtp .*\+\d", shown), shown
    assert "do not" not in next(line for line in shown.splitlines() if "drtp" in line)


def test_a_module_that_is_not_there_is_named(folder: Path) -> None:
    pytest.importorskip("typer")
    with pytest.raises(AssertionError, match="cannot import 'my_ruels' for --import my_ruels"):
        run(folder, "apical", "--import", "my_ruels", "bench")


def mlp() -> nn.Sequential:
    return nn.Sequential(
        nn.Flatten(), nn.Linear(12, 6), nn.Tanh(), nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3)
    )


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
    assert_all_same(
        got, {f"model.{n}": g for (n, _), g in zip(model.named_parameters(), expected, strict=True)}
    )


def _pull(learner: apical.Learner, i: int, u: Tensor, y: Tensor) -> Tensor:
    b: Tensor = getattr(learner, f"b{i}")
    return -(b[y] * u).flatten(1).sum(1).mean()
