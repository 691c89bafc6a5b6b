"""What every rule owes the engine, whatever it computes: a pure function that stacks, compiles and resumes."""

import copy
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import apical
import runs
from apical.core.activation import Noise
from apical.core.learner import Update
from apical.core.network import Params
from apical.engine.replicas import ReplicaStack
from apical.engine.settings import Settings
from apical.errors import ApicalError
from cases import EVERY, RULES, mostly_slow
from reference import assert_all_same, gradients
from runs import RUN, data, interrupt, weights, without_time
from runs import plain_cnn as cnn
from runs import plain_mlp as mlp

pytestmark = pytest.mark.no_cover  # other tests run these lines, too, and coverage doubles the time

Build = Callable[[], nn.Sequential]
every_rule = pytest.mark.parametrize("rule", EVERY)
every_network = pytest.mark.parametrize("build", [mlp, cnn])


def learner_of(rule: str, build: Build, seed: int = 0) -> apical.Learner:
    torch.manual_seed(seed)
    learner = apical.make(rule, build(), input_shape=(1, 4, 4))
    learner.allocate(*batch())
    return learner


def batch(count: int = 8) -> tuple[Tensor, Tensor]:
    x, y, _, _ = data()
    return x[:count].double(), y[:count]


def everything(learner: apical.Learner) -> dict[str, Tensor]:
    return {**weights(learner), **{n: b.clone() for n, b in learner.named_buffers()}}


def updates(learner: apical.Learner, *run: Callable[..., Callable[..., Update]]) -> Iterator[Update]:
    """Each phase's update of one batch, at the learner's own weights."""
    x, y = batch()
    noise = learner.draw(x, torch.Generator().manual_seed(5))
    return runs.updates(learner, learner.params(), x, y, noise, *run)


@every_rule
def test_each_gradient_is_a_tensor_of_its_own(rule: str) -> None:
    """Whoever adds to one of them in place, as gradients are accumulated, must not change another."""
    for update in updates(learner_of(rule, mlp)):
        places = [gradient.untyped_storage().data_ptr() for gradient in update.grads.values()]
        assert len(set(places)) == len(places)


@every_network
@every_rule
def test_stacked_seeds_equal_separate_ones(rule: str, build: Build) -> None:
    x, y, _, _ = data()
    xs, ys = x[:24].double().view(3, 8, 1, 4, 4), y[:24].view(3, 8)
    plan = Settings("rule", "model", "data", lr=0.05)
    stack = ReplicaStack([learner_of(rule, build, s) for s in range(3)], [plan] * 3, stacked=True)
    alone = [ReplicaStack([learner_of(rule, build, s)], [plan], stacked=False) for s in range(3)]
    generators = [[torch.Generator().manual_seed(s) for s in range(3)] for _ in range(2)]
    with torch.no_grad():
        for _ in range(3 + stack.template.warmup):
            together = stack.step(xs, ys, generators[0])
            apart = [single.step(xs[s], ys[s], [generators[1][s]]) for s, single in enumerate(alone)]
        scores = stack.predict(x.double())
    stack.write_back()
    for s, single in enumerate(alone):
        assert_all_same(everything(stack.learners[s]), everything(single.learners[0]))
        assert_all_same({"loss": together.loss[s]}, {"loss": apart[s].loss})
        assert_all_same({"scores": scores[s]}, {"scores": single.learners[0](x.double()).detach()})


@every_network
@every_rule
def test_an_update_is_pure_and_repeats_itself(rule: str, build: Build) -> None:
    learner = learner_of(rule, build)
    before = everything(learner)
    once, twice = list(updates(learner)), list(updates(learner))
    assert_all_same(everything(learner), before, tolerance=0.0)
    for one, two in zip(once, twice, strict=True):
        assert_all_same(one.grads, two.grads, tolerance=0.0)
        assert torch.isfinite(one.loss)
        assert one.loss.ndim == 0
        assert one.output.shape == (8, 3)


@pytest.mark.no_cover
@pytest.mark.parametrize("build", mostly_slow([mlp, cnn], [mlp]))
@pytest.mark.parametrize("rule", mostly_slow([name for name in EVERY if name not in RULES], ["local", "pc", "ff"]))
def test_every_phase_in_one_compiled_graph_equals_the_eager_one(rule: str, build: Build) -> None:
    """Those that are left out are compiled in test_compile.py, on an MLP and a CNN of theirs."""
    learner = learner_of(rule, build)
    compiled = updates(learner, lambda phase: torch.compile(phase, fullgraph=True, backend="aot_eager"))
    for fast, eager in zip(compiled, updates(learner), strict=True):
        assert_all_same(fast.grads, eager.grads)
        assert_all_same({"loss": fast.loss}, {"loss": eager.loss})
    torch._dynamo.reset()


@every_network
@every_rule
def test_gradients_go_to_trainable_parameters_alone_and_reach_all_of_them(rule: str, build: Build) -> None:
    learner = learner_of(rule, build)
    reached = {name for update in updates(learner) for name in update.grads}
    assert reached == learner.trainable
    frozen = learner.network.layers[0].weight
    learner.get_parameter(frozen).requires_grad_(False)
    reached = {name for update in updates(learner) for name in update.grads}
    assert frozen not in reached
    assert reached <= learner.trainable


@every_rule
def test_a_control_made_of_the_same_model_freezes_nothing_for_another_rule(rule: str) -> None:
    """`readout` freezes the hidden layers while it learns. Rules that are compared with it may share its model."""
    alone, model = learner_of(rule, mlp).trainable, mlp()
    control = apical.make("readout", model)
    learner = apical.make(rule, model, input_shape=(1, 4, 4))
    assert learner.trainable == alone
    control(batch()[0])  # it is the control's turn again, and then ours
    names = {id(p): name for name, p in learner.named_parameters()}
    assert {names[id(p)] for group in learner.param_groups(lr=0.1) for p in group["params"]} == alone
    assert apical.make(rule, copy.deepcopy(control.model), input_shape=(1, 4, 4)).trainable == alone


@every_rule
def test_param_groups_hold_each_trainable_parameter_once(rule: str) -> None:
    learner = learner_of(rule, mlp)
    held = [id(p) for group in learner.param_groups(lr=0.1) for p in group["params"]]
    assert sorted(held) == sorted(id(learner.get_parameter(n)) for n in learner.trainable)


@pytest.mark.parametrize("build", mostly_slow([mlp, cnn], [mlp]))
@every_rule
def test_a_resumed_run_equals_one_that_was_never_interrupted(rule: str, build: Build, tmp_path: Path) -> None:
    whole = apical.fit(build, data(), rule=rule, seeds=2, **RUN)
    path = tmp_path / "run.safetensors"

    interrupt(lambda: apical.fit(build, data(), rule=rule, seeds=2, checkpoint=path, **RUN))
    resumed = apical.fit(build, data(), rule=rule, seeds=2, checkpoint=path, resume=True, **RUN)
    assert without_time(resumed.history) == without_time(whole.history)
    for one, other in zip(resumed.learners, whole.learners, strict=True):
        assert_all_same(everything(one), everything(other), tolerance=0.0)


@every_network
@every_rule
def test_step_trains_and_leaves_bounded_weights_in_their_bounds(rule: str, build: Build) -> None:
    learner = learner_of(rule, build)
    before = everything(learner)
    optim = torch.optim.SGD(learner.param_groups(lr=0.1))
    x, y = batch()
    for _ in range(2 + learner.warmup):
        credit = learner.step(x, y, optim)
    assert torch.isfinite(credit.loss)
    moved = {n for n, p in weights(learner).items() if not torch.equal(p, before[n])}
    assert moved <= learner.trainable
    assert moved
    for name, (low, high) in learner.bounds.items():
        assert low <= float(learner.get_parameter(name).detach().min())
        assert float(learner.get_parameter(name).detach().max()) <= high


@every_rule
def test_credit_writes_gradients_or_names_step(rule: str) -> None:
    learner = learner_of(rule, mlp)
    if len(learner.phases) > 1:
        with pytest.raises(ApicalError, match=r"learner\.step"):
            learner.credit(*batch())
        return
    for _ in range(1 + learner.warmup):
        learner.credit(*batch())
    assert set(gradients(learner)) == learner.trainable
    for p in learner.parameters():
        assert p.grad is None or (p.grad.dtype == p.dtype and p.grad.stride() == p.stride())


# Several phases, and bounds, on a rule small enough to work out by hand.


@pytest.fixture
def two_phases() -> Iterator[type[apical.Learner]]:
    known = dict(apical.RULES)

    class Twice(apical.RULES["bp"]):  # type: ignore[misc]
        """The gradient of the first phase, doubled by a value that the first hands to the second."""

        NAME = "twice"

        def __init__(self, *args: object, **common: object) -> None:
            super().__init__(*args, **common)
            self.register_buffer("seen", torch.zeros((), dtype=torch.float64))

        @property
        def phases(self) -> tuple[Callable[..., Update], ...]:
            return (self.first, self.second)

        @property
        def bounds(self) -> dict[str, tuple[float, float]]:
            return {"model.1.weight": (-0.1, 0.1)}

        def first(self, params: Params, state: Params, x: Tensor, y: Tensor, noise: Noise) -> Update:
            update = self.update(params, state, x, y, noise)
            return update._replace(state={"seen": state["seen"] + 1, "handed": torch.full_like(update.loss, 2.0)})

        def second(self, params: Params, state: Params, x: Tensor, y: Tensor, noise: Noise) -> Update:
            update = self.update(params, state, x, y, noise)
            grads = {n: g * state["handed"] for n, g in update.grads.items()}
            return update._replace(grads=grads, state={"seen": state["seen"] + 1})

    yield Twice
    apical.RULES.clear()
    apical.RULES.update(known)


@pytest.mark.parametrize("engine", [False, True])
def test_each_phase_steps_from_where_the_last_one_stopped(two_phases: type[apical.Learner], engine: bool) -> None:
    x, y = batch()
    model = mlp()
    reference = apical.make("bp", copy.deepcopy(model))
    learner = two_phases(model)
    with torch.no_grad():
        for layer in (model[1], reference.model[1]):
            layer.weight.clamp_(-0.1, 0.1)
    for factor in (1.0, 2.0):
        optim = torch.optim.SGD(reference.param_groups(lr=0.05 * factor))
        reference.step(x, y, optim)
        with torch.no_grad():
            reference.model[1].weight.clamp_(-0.1, 0.1)
    if engine:
        single = ReplicaStack([learner], [Settings("rule", "model", "data", lr=0.05, optimizer="sgd")], stacked=False)
        with torch.no_grad():
            single.step(x, y, [torch.Generator()])
    else:
        learner.step(x, y, torch.optim.SGD(learner.param_groups(lr=0.05)))
    assert_all_same(weights(learner), weights(reference))
    assert float(learner.seen) == 2.0
    assert float(model[1].weight.detach().abs().max()) == pytest.approx(0.1)


@pytest.mark.parametrize(
    "rule", [name for name in EVERY if not apical.RULES[name.split(":")[0]].MODEL_PREDICTS] + ["np"]
)
def test_a_learner_that_is_asked_while_in_training_mode_drops_nothing_out(rule: str) -> None:
    """`learner(x)` is inference; where the plain model predicts, torch's own dropout decides."""
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Dropout(0.5), nn.Linear(6, 3))
    options = {"decorrelate": True} if rule == "np" else {}
    if rule == "ep":
        with pytest.raises(ApicalError, match="Dropout"):
            apical.make(rule, model, input_shape=(4,), **options)
        return
    learner = apical.make(rule, model, input_shape=(4,), **options)
    x = torch.randn(5, 4)
    assert torch.equal(learner.train()(x), learner.eval()(x))
