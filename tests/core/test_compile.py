"""Compiled equals eager, in one graph, for every rule."""

import copy
import shutil
from collections.abc import Iterator

import pytest
import torch
from _pytest.mark.structures import ParameterSet

from cases import CASES, RULES, learner_for, mostly_slow
from reference import assert_all_same, assert_same, gradients

# The lines are those that run eagerly elsewhere, and watching the compiler is slow.
pytestmark = pytest.mark.no_cover


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    """Each case is a new graph; without this they would count towards one limit of recompilations."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def assert_compiled_equals_eager(rule: str, name: str, backend: str, **options: object) -> None:
    case = CASES[name].case()
    learner = learner_for(rule, case, **options)
    params = {n: p.detach() for n, p in learner.named_parameters()}
    noise = learner.draw(case.x)
    compiled = torch.compile(learner.update, fullgraph=True, backend=backend)
    with torch.no_grad():
        eager = learner.update(params, {}, case.x, case.labels, noise)
        fast = compiled(params, {}, case.x, case.labels, noise)
        assert_all_same(fast.grads, eager.grads)
        assert_same(fast.loss, eager.loss)
        assert_same(fast.output, eager.output)
        # New values in the same graph: nothing of the first call may have been baked in.
        moved = {n: p + 0.1 * torch.randn_like(p) for n, p in params.items()}
        noise = learner.draw(case.x)
        y = case.labels.flip(0)
        again = compiled(moved, {}, case.x.neg(), y, noise)
        assert_all_same(again.grads, learner.update(moved, {}, case.x.neg(), y, noise).grads)


def every_rule_on_every_network() -> list[ParameterSet]:
    """Every rule on one network, such that every network has its turn; the other pairs are slow."""
    names = [name for name in CASES if name != "deep"]  # which is the mlp, longer
    return [
        pytest.param(rule, name, marks=[] if k % len(names) == i % len(names) else pytest.mark.slow)
        for i, rule in enumerate(RULES)
        for k, name in enumerate(names)
    ]


@pytest.mark.parametrize(("rule", "name"), every_rule_on_every_network())
def test_a_compiled_update_equals_the_eager_one_in_one_graph(rule: str, name: str) -> None:
    assert_compiled_equals_eager(rule, name, "aot_eager")


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"sweeps": 3, "eta_x": 0.7}, {"loss": "mse", "label_smoothing": 0.1}], ids=str)
def test_options_compile_too(options: dict[str, object]) -> None:
    assert_compiled_equals_eager("dll", "cnn", "aot_eager", **options)


@pytest.mark.parametrize(
    ("rule", "name"), mostly_slow([("dll", "mlp"), ("dll:kolen-pollack", "cnn")], [("dll:kolen-pollack", "cnn")])
)
def test_a_compiled_credit_writes_and_adds_the_same_gradients(rule: str, name: str) -> None:
    case = CASES[name].case()
    learner = learner_for(rule, case)
    twin = copy.deepcopy(learner)
    credit = torch.compile(learner.credit, fullgraph=True, backend="aot_eager")
    for _ in range(2):  # the first one writes .grad, the second one adds to it
        fast, eager = credit(case.x, case.labels), twin.credit(case.x, case.labels)
        assert_same(fast.loss, eager.loss)
        assert_same(fast.output, eager.output)
        assert_all_same(gradients(learner), gradients(twin))
        for p in learner.parameters():
            assert p.grad is None or p.grad.stride() == p.stride()


@pytest.mark.slow
def test_a_compiled_credit_draws_noise_as_the_eager_one_does() -> None:
    case = CASES["conv1d with dropout"].case()
    learner = learner_for("dll", case)
    twin = copy.deepcopy(learner)
    credit = torch.compile(learner.credit, fullgraph=True, backend="aot_eager")
    for seed in (1, 2):
        torch.manual_seed(seed)
        fast = credit(case.x, case.labels)
        torch.manual_seed(seed)
        assert_same(fast.output, twin.credit(case.x, case.labels).output)
    assert_all_same(gradients(learner), gradients(twin))


@pytest.mark.parametrize("rule", mostly_slow(["bp", "dfa", "dll"], ["dll"]))
def test_stacked_seeds_compile_into_one_graph(rule: str) -> None:
    case = CASES["cnn"].case()
    learner = learner_for(rule, case)
    stacked = {n: torch.stack([p.detach(), p.detach() + 0.1]) for n, p in learner.named_parameters()}
    together = torch.vmap(learner.update, in_dims=(0, None, None, None, None))
    with torch.no_grad():
        fast = torch.compile(together, fullgraph=True, backend="aot_eager")(stacked, {}, case.x, case.labels, {})
        for s in range(2):
            alone = learner.update({n: p[s] for n, p in stacked.items()}, {}, case.x, case.labels, {})
            assert_all_same({n: g[s] for n, g in fast.grads.items()}, alone.grads)


@pytest.mark.slow
@pytest.mark.skipif(
    not any(map(shutil.which, ("g++", "c++", "clang++"))), reason="inductor needs a C++ compiler; none was found"
)
@pytest.mark.parametrize(
    ("rule", "name"), [("dll", "conv1d with dropout"), ("dll:kolen-pollack", "cnn"), ("dfa", "mlp")]
)
def test_inductor_agrees(rule: str, name: str) -> None:
    assert_compiled_equals_eager(rule, name, "inductor")
