"""The parts of the engine on their own: stacks of replicas, derived seeds, and the sums over an epoch."""

import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import apical
from apical.core.activation import Noise
from apical.core.learner import Update
from apical.core.network import Params
from apical.data import from_tensors
from apical.engine.cuda_graphs import EpochRunner, GraphKey
from apical.engine.loop import derive_seed, shuffle_indices
from apical.engine.replicas import ReplicaStack
from apical.engine.settings import Settings, expand_seeds
from cases import RULES
from reference import assert_all_same, gradients
from runs import cnn, data, fit, mlp, uncollected, weights


def learners(rule: str, count: int, build: object = mlp) -> list[apical.Learner]:
    made = []
    for seed in range(count):
        torch.manual_seed(seed)
        made.append(apical.make(rule, build(), input_shape=(1, 4, 4)))
    return made


def make_stack(team: list[apical.Learner], *, stacked: bool, clip: float | None = None) -> ReplicaStack:
    settings = Settings("rule", "model", "data", lr=0.5, clip=clip, optimizer="sgd")
    return ReplicaStack(team, [settings] * len(team), stacked=stacked)


@pytest.mark.parametrize("build", [mlp, cnn])
@pytest.mark.parametrize("rule", RULES)
def test_one_step_of_a_stack_is_each_learners_own_step(rule: str, build: object) -> None:
    team, alone = learners(rule, 3, build), learners(rule, 3, build)
    x, y = data()[0].double().view(1, 29, 1, 4, 4)[:, :24].reshape(3, 8, 1, 4, 4), data()[1][:24].view(3, 8)
    stack = make_stack(team, stacked=True)
    with torch.no_grad():
        update = stack.step(x, y, [torch.Generator() for _ in team])
    stack.write_back()
    for k, learner in enumerate(alone):
        credit = learner.step(x[k], y[k], torch.optim.SGD(learner.param_groups(lr=0.5)))
        assert float(update.loss[k]) == pytest.approx(float(credit.loss))
        assert_all_same(weights(team[k]), weights(learner))


class Adding(apical.Backpropagation):
    """Backpropagation that adds up all that it sees, twice: `slowly` at the pace of the schedule."""

    def __init__(self) -> None:
        super().__init__(mlp())
        for name in ("seen", "slowly"):
            self.register_buffer(name, torch.zeros((), dtype=torch.float64))

    @property
    def scheduled_buffers(self) -> frozenset[str]:
        return frozenset({"slowly"})

    def update(self, params: Params, state: Params, x: Tensor, y: Tensor, noise: Noise) -> Update:
        state = {name: state[name] + x.sum() for name in ("seen", "slowly")}
        return super().update(params, state, x, y, noise)._replace(state=state)


@pytest.mark.parametrize("stacked", [True, False])
def test_each_learner_keeps_its_own_state_and_the_schedule_slows_what_is_paced_alone(stacked: bool) -> None:
    team = [Adding() for _ in range(3)]
    x, y = data()[0][:24].double().view(3, 8, 1, 4, 4), data()[1][:24].view(3, 8)
    parts = [(team, x, y)] if stacked else [([one], *own) for one, *own in zip(team, x, y, strict=True)]
    for part, images, labels in parts:
        stepped = make_stack(part, stacked=stacked)
        with torch.no_grad():
            for pace in (1.0, 0.25):
                stepped.step(images, labels, [torch.Generator() for _ in part], pace=torch.tensor(pace))
        stepped.write_back()
    for k, learner in enumerate(team):
        assert float(learner.get_buffer("seen")) == pytest.approx(2 * float(x[k].sum()))
        assert float(learner.get_buffer("slowly")) == pytest.approx(1.25 * float(x[k].sum()))


def test_a_step_forgets_the_gradients_of_the_one_before() -> None:
    (one,), (two,) = learners("bp", 1), learners("bp", 1)
    x, y = data()[0].double(), data()[1]
    optim = torch.optim.SGD(two.param_groups(lr=0.5))
    stepped = make_stack([one], stacked=False)
    for _ in range(3):
        stepped.step(x, y, [torch.Generator()])
        two.step(x, y, optim)
    assert_all_same(weights(one), weights(two))
    assert_all_same(gradients(one), gradients(two))


def test_predictions_of_a_stack_are_each_learners_own() -> None:
    team = learners("bp", 3)
    x = data()[0].double()
    scores = make_stack(team, stacked=True).predict(x)
    for row, learner in zip(scores, team, strict=True):
        assert_all_same({"scores": row}, {"scores": learner(x).detach()})


def test_an_epoch_adds_up_its_own_losses_and_hits_and_no_others() -> None:
    x, y, x_test, y_test = data()
    team = learners("readout", 2)
    for learner in team:
        learner.double()
    stack = make_stack(team, stacked=True)
    schedule = torch.zeros(8)  # a rate of zero: nothing moves, so that every epoch has the same sums
    runner = EpochRunner([stack], from_tensors(x.double(), y, x_test.double(), y_test), 8, schedule)
    for epoch in range(2):
        runner.start([runner.make_index_table(0, [shuffle_indices(29, s, epoch) for s in (0, 1)])], [[0, 1]], epoch)
        with torch.no_grad():
            runner.run(lambda: None)
        (totals,) = runner.totals
        for k, learner in enumerate(team):
            scores = learner(x.double()).detach()
            loss = float(torch.nn.functional.cross_entropy(scores, y, reduction="sum"))
            assert float(totals.loss[k]) == pytest.approx(loss, rel=1e-5)
            assert float(totals.hits[k]) == pytest.approx(float((scores.argmax(1) == y).sum()))


def test_a_run_and_its_graphs_are_gone_without_the_garbage_collector(monkeypatch: pytest.MonkeyPatch) -> None:
    """A ring of them would keep a run's device memory, and be taken apart in the middle of another one's capture."""
    made: list[weakref.ref[EpochRunner]] = []
    plain = EpochRunner.run

    def as_on_a_gpu(self: EpochRunner, on_step: Callable[[], None]) -> None:
        self.reasons.clear()
        made.append(weakref.ref(self))
        plain(self, on_step)
        assert self.eager_steps

    monkeypatch.setattr(EpochRunner, "run", as_on_a_gpu)
    monkeypatch.setattr("apical.engine.cuda_graphs.EAGER_STEPS", 10**9)  # never captured: there is no GPU
    fit()  # torch keeps what the first run of a process makes it set up
    with uncollected():
        fit()
        assert made[-1]() is None


class PretendedGraph:
    """A graph that replays the steps that it was captured with, whatever the number of the step is by now."""

    def __init__(self, runner: EpochRunner, key: GraphKey) -> None:
        self.runner, self.key, self.done, self.replays = runner, key, [s.done for s in runner.stacks], 0

    def replay(self) -> None:
        stacks = self.runner.stacks
        now = [stack.done for stack in stacks]
        for stack, done in zip(stacks, self.done, strict=True):
            stack.done = done
        for _ in range(self.key.steps):
            self.runner._step(self.key.size)
        for stack, done in zip(stacks, now, strict=True):
            stack.done = done
        self.replays += 1


@pytest.mark.parametrize("rule", ["bp", "streaming"])
@pytest.mark.parametrize("seeds", [1, 2])
def test_replayed_steps_are_the_steps_of_their_place_in_the_period(
    rule: str, seeds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ticks of three layers repeat after five: one graph has all five, others the steps that are left in an epoch."""
    plain = fit(rule=rule, seeds=seeds, epochs=4, batch_size=2)
    run, runners = EpochRunner.run, []

    def run_as_on_a_gpu(self: EpochRunner, on_step: Callable[[], None]) -> None:
        self.reasons.clear()
        runners.append(self)
        run(self, on_step)

    monkeypatch.setattr(EpochRunner, "run", run_as_on_a_gpu)
    monkeypatch.setattr(
        EpochRunner, "_capture", lambda self, key: self.graphs.__setitem__(key, PretendedGraph(self, key))
    )
    replayed = fit(rule=rule, seeds=seeds, epochs=4, batch_size=2)
    for one, other in zip(replayed.learners, plain.learners, strict=True):
        assert_all_same(one.state_dict(), other.state_dict(), tolerance=0.0)
    assert [row["loss"] for row in replayed.history] == [row["loss"] for row in plain.history]
    graphs = runners[-1].graphs.values()
    taken = sum(graph.replays * graph.key.steps for graph in graphs)
    assert taken == 4 * 15 - 2 * 3 - (4 if rule == "streaming" else 0)  # eager: three of each size, and the warm-up
    long = [graph for graph in graphs if graph.key.steps > 1]
    assert [graph.key.steps for graph in long] == ([5] if rule == "streaming" else [])


def test_streams_of_seeds_epochs_and_purposes_never_meet() -> None:
    streams = [derive_seed(seed, epoch, purpose) for seed in range(9) for epoch in range(9) for purpose in (0, 1)]
    assert len(set(streams)) == len(streams)


def test_a_shuffle_is_a_permutation_that_depends_on_seed_and_epoch() -> None:
    orders = [tuple(shuffle_indices(50, seed, epoch).tolist()) for seed in range(3) for epoch in range(3)]
    assert all(sorted(order) == list(range(50)) for order in orders)
    assert len(set(orders)) == 9
    assert tuple(shuffle_indices(50, 1, 2).tolist()) in orders


def test_a_number_of_seeds_counts_from_zero_and_a_list_is_itself() -> None:
    assert expand_seeds(3) == (0, 1, 2)
    assert expand_seeds([5, 1]) == (5, 1)
    assert expand_seeds(range(2, 4)) == (2, 3)


def test_seeds_that_would_draw_the_same_shuffles_are_refused() -> None:
    assert torch.equal(shuffle_indices(50, 3, 1), shuffle_indices(50, 3 + 2**31, 1))
    with pytest.raises(apical.ApicalError, match=r"whole numbers from 0 to 2\*\*31 - 1"):
        expand_seeds([3, 3 + 2**31])


def test_a_run_of_more_steps_than_fit_into_memory_is_refused() -> None:
    with pytest.raises(apical.ApicalError, match=r"epochs=1000000000000 makes 4,000,000,000,000 steps, more than"):
        fit(epochs=10**12, stop_after=1)


def test_rates_are_exact_where_float32_is() -> None:
    assert Settings("bp", "m", "d").compute_rates(4).tolist() == [1.0, 0.75, 0.5, 0.25]
    assert Settings("bp", "m", "d", schedule="constant").compute_rates(3).tolist() == [1.0, 1.0, 1.0]
    assert Settings("bp", "m", "d", schedule="cosine").compute_rates(2).tolist() == [1.0, 0.5]
