"""Elman networks: what they read, what every rule owes them, and what is refused."""

import copy
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_model, save_model
from torch import Tensor, nn

import apical
import apical.core.recurrent
from apical.core.learner import Update
from apical.engine.replicas import ReplicaStack
from apical.engine.settings import Settings
from apical.errors import ApicalError, UnsupportedError
from cases import EVERY, mostly_slow
from reference import assert_all_same, assert_same, credited, gradients
from runs import weights
from sequences import RECURRENT, plain, sequences

every_rule = pytest.mark.parametrize("rule", RECURRENT)


def updates(
    learner: apical.Learner, x: Tensor, y: Tensor, run: Callable[..., Any] = lambda phase: phase
) -> Iterator[Update]:
    """Each phase's update of one batch, all at the learner's own weights."""
    params, state = learner.params(), {}
    for phase in learner.phases:
        with torch.no_grad():
            update = run(phase)(params, state, x, y, {})
        state |= update.state
        yield update


# What an Elman is.


def test_an_elman_computes_what_its_modules_do_and_its_learner_too() -> None:
    case = sequences()
    assert apical.Elman is apical.core.recurrent.Elman
    assert_same(case.model(case.x), plain(case))
    learner = apical.make("dll", case.model)
    with torch.no_grad():
        assert_same(learner(case.x), plain(case))
        assert_same(learner.predict(learner.params(), {}, case.x), plain(case))
    assert learner.model.rnn is case.model.rnn


def test_indices_are_one_hot_vectors() -> None:
    case = sequences(indices=True)
    for kind in (torch.int64, torch.int32, torch.uint8):
        assert_same(case.model(case.x.to(kind)), plain(case))
    learner = apical.make("dll", case.model)
    assert_all_same(credited(learner, case.x, case.labels), credited(learner, case.hot, case.labels))


def test_the_weights_are_listed_from_input_to_output() -> None:
    case = sequences()
    learner = apical.make("dll", case.model)
    w = learner.forward_weights
    assert [
        a is b
        for a, b in zip(
            w, (case.model.rnn.weight_ih_l0, case.model.rnn.weight_hh_l0, case.model.readout.weight), strict=True
        )
    ] == [True] * 3
    assert learner.feedback_weights[0] is None
    assert [tuple(t.shape) for t in learner.feedback_weights[1:]] == [(6, 6), (4, 6)]


def test_a_class_takes_an_elman_as_make_does() -> None:
    for rule in (apical.DLL, apical.Backpropagation, apical.FeedbackAlignment, apical.PredictiveCoding):
        case = sequences()
        rule(case.model, input_shape=(5, 3)).credit(case.x, case.labels)
        assert set(gradients(case.model)) == {name for name, _ in case.model.named_parameters()}


def test_the_pages_code_runs_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = Path(__file__).parents[2] / "docs" / "recurrent.md"
    if not page.exists():
        pytest.skip("the tests run without the docs")
    monkeypatch.chdir(tmp_path)
    found = re.findall(r"^```python\n(.*?)^```$", page.read_text("utf-8"), re.MULTILINE | re.DOTALL)
    names: dict[str, Any] = {}
    exec("\n".join(found), names)
    assert names["scores"].shape == (64, 32, 65)
    assert names["run"].history[-1]["test_bits"] > 0


# What every rule owes the engine.


@every_rule
@pytest.mark.parametrize("indices", [False, True])
def test_stacked_seeds_equal_separate_ones(rule: str, indices: bool) -> None:
    drawn = [sequences(indices=indices, seed=s) for s in range(3)]
    xs, ys = torch.stack([c.x for c in drawn]), torch.stack([c.labels for c in drawn])
    plan = Settings("rule", "model", "data", lr=0.05)
    team = [apical.make(rule, c.model) for c in drawn]
    alone = [ReplicaStack([copy.deepcopy(one)], [plan], stacked=False) for one in team]
    stack = ReplicaStack(team, [plan] * 3, stacked=True)
    generators = [torch.Generator() for _ in range(3)]
    with torch.no_grad():
        for _ in range(3):
            together = stack.step(xs, ys, generators)
            apart = [single.step(xs[s], ys[s], generators[:1]) for s, single in enumerate(alone)]
        scores = stack.predict(xs[0])
    stack.write_back()
    for s, unit in enumerate(alone):
        assert_all_same(weights(stack.learners[s]), weights(unit.learners[0]))
        assert_same(together.loss[s], apart[s].loss)
        assert_same(together.output[s], apart[s].output)
        assert_same(scores[s], unit.learners[0](xs[0]).detach())


@every_rule
def test_an_update_is_pure_and_reaches_what_is_trainable(rule: str) -> None:
    case = sequences()
    learner = apical.make(rule, case.model)
    before = weights(learner)
    once, twice = (list(updates(learner, case.x, case.labels)) for _ in range(2))
    assert_all_same(weights(learner), before, tolerance=0.0)
    for one, two in zip(once, twice, strict=True):
        assert_all_same(one.grads, two.grads, tolerance=0.0)
        assert one.output.shape == (4, 5, 4)
    assert {name for update in once for name in update.grads} == learner.trainable


@pytest.mark.no_cover
@pytest.mark.parametrize("rule", mostly_slow(RECURRENT, ["dll", "pc"]))
@pytest.mark.parametrize("indices", mostly_slow([False, True], [True]))
def test_every_phase_in_one_compiled_graph_equals_the_eager_one(rule: str, indices: bool) -> None:
    case = sequences(indices=indices)
    learner = apical.make(rule, case.model, **({"sweeps": 3} if rule == "ipc" else {}))
    torch._dynamo.reset()
    fast = updates(learner, case.x, case.labels, lambda f: torch.compile(f, fullgraph=True, backend="aot_eager"))
    for one, other in zip(fast, updates(learner, case.x, case.labels), strict=True):
        assert_all_same(one.grads, other.grads)
        assert_same(one.loss, other.loss)
        assert_same(one.output, other.output)
    torch._dynamo.reset()


@pytest.mark.no_cover
@pytest.mark.parametrize("rule", mostly_slow(["bp", "dll:kolen-pollack"], ["dll:kolen-pollack"]))
def test_a_compiled_credit_writes_the_same_gradients(rule: str) -> None:
    case = sequences(indices=True)
    learner = apical.make(rule, case.model)
    twin = copy.deepcopy(learner)
    torch._dynamo.reset()
    fast = torch.compile(learner.credit, fullgraph=True, backend="aot_eager")(case.x, case.labels)
    assert_same(fast.loss, twin.credit(case.x, case.labels).loss)
    assert_all_same(gradients(learner), gradients(twin))
    torch._dynamo.reset()


@pytest.mark.no_cover
@pytest.mark.slow
@pytest.mark.parametrize("rule", ["dll", "dll:kolen-pollack", "pc"])
def test_stacked_seeds_compile_into_one_graph(rule: str) -> None:
    case = sequences(indices=True)
    learner = apical.make(rule, case.model)
    stacked = {n: torch.stack([p.detach(), p.detach() + 0.1]) for n, p in learner.named_parameters()}
    together = torch.vmap(learner.update, in_dims=(0, None, None, None, None))
    torch._dynamo.reset()
    with torch.no_grad():
        compiled = torch.compile(together, fullgraph=True, backend="aot_eager")
        fast = compiled(stacked, {}, case.x, case.labels, {})
        for s in range(2):
            alone = learner.update({n: p[s] for n, p in stacked.items()}, {}, case.x, case.labels, {})
            assert_all_same({n: g[s] for n, g in fast.grads.items()}, alone.grads)
    torch._dynamo.reset()


@every_rule
def test_a_step_learns_and_gradients_have_their_parameters_layout(rule: str) -> None:
    case = sequences()
    learner = apical.make(rule, case.model)
    optim = torch.optim.Adam(learner.param_groups(lr=0.01), fused=True)
    first = learner.step(case.x, case.labels, optim).loss
    for p in learner.parameters():
        assert p.grad is None or (p.grad.stride() == p.stride() and p.grad.dtype == p.dtype)
    for _ in range(100):
        last = learner.step(case.x, case.labels, optim).loss
    assert float(last) < (0.9 if rule == "readout" else 0.8) * float(first)
    held = [id(p) for group in learner.param_groups(lr=0.1) for p in group["params"]]
    assert sorted(held) == sorted(id(learner.get_parameter(n)) for n in learner.trainable)


@every_rule
def test_a_saved_learner_is_the_same_when_it_is_loaded(rule: str, tmp_path: Path) -> None:
    learner, other = (apical.make(rule, sequences(seed=s).model) for s in (0, 1))
    save_model(learner, str(tmp_path / "learner.safetensors"))
    load_model(other, str(tmp_path / "learner.safetensors"))
    assert_all_same(weights(other), weights(learner), tolerance=0.0)
    third = apical.make(rule, sequences(seed=2).model)
    third.load_state_dict(learner.state_dict())
    assert_all_same(weights(third), weights(learner), tolerance=0.0)


def test_gradients_add_up_as_after_backward() -> None:
    case = sequences()
    learner = apical.make("dll", case.model)
    once = credited(learner, case.x, case.labels)
    learner.credit(case.x, case.labels)
    assert_all_same(gradients(learner), {name: 2 * g for name, g in once.items()})


# What is refused.


@pytest.mark.parametrize("rule", [name for name in EVERY if name not in RECURRENT])
def test_other_rules_name_those_that_train_a_recurrent_network(rule: str) -> None:
    sentence = (
        rf"rule '{rule.split(':')[0]}' cannot train a recurrent network; readout, bp, fa, sign, dll, pc, ipc can\."
    )
    with pytest.raises(UnsupportedError, match=sentence):
        apical.make(rule, sequences().model)


def rnn(**options: Any) -> nn.RNN:
    return nn.RNN(3, 6, **{"batch_first": True, **options})


class Own(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


@pytest.mark.filterwarnings("ignore:dropout option")
@pytest.mark.parametrize(
    ("modules", "sentence"),
    [
        ((nn.LSTM(3, 6, batch_first=True), nn.Linear(6, 4)), r"is a LSTM; a plain nn\.RNN"),
        ((nn.RNNCell(3, 6), nn.Linear(6, 4)), "is a RNNCell"),
        ((rnn(num_layers=2), nn.Linear(6, 4)), "num_layers=2.*num_layers=1 works"),
        ((rnn(nonlinearity="relu"), nn.Linear(6, 4)), "nonlinearity='relu'.*'tanh' works"),
        ((rnn(bidirectional=True), nn.Linear(12, 4)), "bidirectional=True.*bidirectional=False works"),
        ((nn.RNN(3, 6), nn.Linear(6, 4)), "batch_first=False.*batch_first=True works"),
        ((rnn(dropout=0.5), nn.Linear(6, 4)), "dropout=0.5.*dropout=0 works"),
        ((rnn(), nn.Linear(5, 4)), r"takes 5 features.*6 hidden units: nn\.Linear\(6, 4\) works"),
        ((rnn(), nn.Conv1d(6, 4, 1)), r"the readout is a Conv1d; an nn\.Linear works"),
        ((rnn(), Own(6, 4)), r"in a way of its own; a plain nn\.Linear works"),
        ((rnn(), nn.LazyLinear(4)), "has no weights yet"),
    ],
    ids=str,
)
def test_modules_with_other_equations_are_refused(modules: Any, sentence: str) -> None:
    with pytest.raises(UnsupportedError, match=sentence):
        apical.Elman(*modules)


def test_what_apical_would_not_run_is_refused() -> None:
    hooked = sequences().model
    hooked.rnn.register_forward_hook(lambda *_: None)
    with pytest.raises(UnsupportedError, match=r"rnn \(RNN\) has forward hooks"):
        apical.make("bp", hooked)
    hooked = sequences().model
    hooked.readout.register_forward_hook(lambda *_: None)
    with pytest.raises(UnsupportedError, match="forward hooks"):
        apical.make("bp", hooked)
    hooked = sequences().model
    hooked.register_forward_hook(lambda *_: None)
    with pytest.raises(UnsupportedError, match=r"the model \(Elman\) has forward hooks"):
        apical.make("bp", hooked)
    normed = sequences().model
    nn.utils.parametrizations.weight_norm(normed.rnn, "weight_hh_l0")
    with pytest.raises(UnsupportedError, match="is a ParametrizedRNN"):
        apical.make("bp", normed)

    class Louder(apical.Elman):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * super().forward(x)

    with pytest.raises(UnsupportedError, match="Louder has a forward of its own"):
        apical.make("bp", Louder(rnn(), nn.Linear(6, 4)))
    tied = apical.Elman(rnn(), nn.Linear(6, 6))
    tied.readout.weight = tied.rnn.weight_hh_l0
    with pytest.raises(UnsupportedError, match="share their weights"):
        apical.make("bp", tied)


X, Y = torch.randn(2, 5, 3), torch.zeros(2, 5, dtype=torch.long)


@pytest.mark.parametrize(
    ("x", "y", "sentence"),
    [
        (torch.randn(2, 5, 4), Y, r"takes \(batch, time, 3\) floating values, or \(batch, time\) whole numbers"),
        (torch.randn(2, 5), Y, r"float32 of shape \(2, 5\), but this network takes"),
        (torch.randn(2, 5, 3, 1), Y, "but this network takes"),
        (torch.zeros(2, 5, 3, dtype=torch.long), Y, "int64 of shape"),
        (torch.zeros(2, 5, dtype=torch.bool), Y, "bool of shape"),
        (torch.zeros(2, 0, 3), Y, r"float32 of shape \(2, 0, 3\)"),
        (torch.full((2, 5), 3), Y, r"indices from 3 to 3, but.*in 0 … 2"),
        (torch.full((2, 5), -1), Y, "indices from -1 to -1"),
        (X.double(), Y, "float64 and the weights are torch.float32"),
        (X * torch.nan, Y, "NaN"),
        (X, Y[:, :4], r"int64 of shape \(2, 4\), but an output of shape \(2, 5, 4\).*takes \(2, 5\) whole"),
        (X, Y[:, 0], r"of shape \(2,\)"),
        (X, Y[..., None], r"of shape \(2, 5, 1\)"),
        (X, Y + 4, r"labels range from 4 to 4.*0 … 3"),
        (X, torch.zeros(2, 5, 3), r"float32 of shape \(2, 5, 3\).*\(2, 5, 4\) floating values"),
        (X, torch.zeros(2, 5), r"float32 of shape \(2, 5\)"),
        (X, [0, 1], "targets are a list"),
    ],
    ids=lambda value: f"{value.dtype} {tuple(value.shape)}" if isinstance(value, Tensor) else "",
)
def test_sequences_that_do_not_fit_are_refused(x: Tensor, y: Tensor, sentence: str) -> None:
    learner = apical.make("bp", apical.Elman(rnn(), nn.Linear(6, 4)))
    with pytest.raises(ApicalError, match=sentence):
        learner.credit(x, y)


def test_shapes_and_indices_are_checked_before_anything_runs() -> None:
    case = sequences(indices=True)
    with pytest.raises(ApicalError, match=r"examples of shape \(5, 4\)"):
        apical.make("bp", case.model, input_shape=(5, 4))
    with pytest.raises(ApicalError, match="indices from"):
        case.model(torch.full((1, 2), 3))
