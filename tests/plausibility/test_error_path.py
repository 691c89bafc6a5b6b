"""Cutting the way down at single ticks shows when an error crossed it, whenever the layers learn from it."""

from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn

import apical
from apical.plausibility.error_path import CutDown, ErrorPath, examine_error_path, examine_reach
from apical.plausibility.influence import examine_timing
from apical.plausibility.replay import Outcome
from audit_cases import pipelines

pytestmark = pytest.mark.no_cover  # the audit runs these lines, too


def build(rule: type[apical.Learner], *widths: int) -> tuple[apical.Learner, tuple[Tensor, Tensor]]:
    """Build a learner on a tanh network of these widths, and a batch for it."""
    torch.manual_seed(0)
    modules = [m for i, o in pairwise(widths or (6, 5, 4, 3)) for m in (nn.Linear(i, o), nn.Tanh())]
    learner = rule(nn.Sequential(*modules[:-1]).double())
    return learner, (torch.rand(8, 6).double(), torch.arange(8) % 3)


def test_only_what_goes_down_is_cut_and_only_in_its_phases() -> None:
    w, u, e = torch.randn(5, 7), torch.randn(3, 7), torch.randn(3, 5)
    with CutDown({w.shape}, {1}) as cut:
        for phase in range(3):
            cut.phase = phase
            assert torch.equal(u @ w.T, u.matmul(w.T))
            assert bool((e @ w).any()) == (phase != 1)


def test_an_error_arrives_at_the_tick_that_the_delays_say_and_later_if_its_way_is_cut_as_it_crosses() -> None:
    """The error of the highest of four layers crosses to the next at tick 0, then one a tick; each learns a tick later."""
    path = ErrorPath(*build(apical.RULES["streaming"], 6, 5, 4, 5, 3))
    free = path.arrive()
    assert free == {3: 0, 2: 1, 1: 2, 0: 3}
    for level, crossing in ((2, 0), (1, 1), (0, 2)):
        for tick in range(4):
            found = path.arrive(level, [tick])
            assert {low: found[low] - free[low] for low in free} == {
                low: int(tick == crossing and low <= level) for low in free
            }


@pytest.mark.parametrize(
    ("rule", "widths"),
    [
        (pipelines.OneLayerATick, (6, 5, 4, 5, 3)),
        (pipelines.TwoTicksALayer, (6, 5, 4, 3)),
        (apical.RULES["streaming"], (6, 4, 3)),
        (apical.RULES["readout"], (6, 5, 4, 3)),  # nothing comes down
        (apical.RULES["streaming"], (6, 5, 5, 5, 3)),  # one shape for two ways: cutting the one cuts the other
    ],
)
def test_an_error_that_crosses_one_layer_a_tick_is_cleared(rule: type[apical.Learner], widths: tuple[int, ...]) -> None:
    assert examine_error_path(*build(rule, *widths)).verdict is True


@pytest.mark.parametrize(
    "rule", [pipelines.HeldBack, pipelines.HeldBackTwice, pipelines.LatePass, pipelines.PassForEachLayer]
)
def test_an_error_that_crosses_several_layers_in_a_tick_is_seen(rule: type[apical.Learner]) -> None:
    found = examine_error_path(*build(rule))
    assert found.verdict is False
    assert found.reason == "an error comes down to layer 2 and on to layer 0 in one tick"


def test_a_pass_that_takes_a_tick_for_one_way_and_none_for_the_next_is_seen() -> None:
    """From the highest of four layers to the third it takes a tick, from there to the lowest none."""

    class HalfPass(pipelines.HeldBack):
        def learn(self) -> dict[str, Tensor]:
            top, held = self.traces[-1], dict[str, Tensor]()
            grads, xi = self.correct(3, 0, top[1])
            if self.sent[-1]:
                own, xi2 = self.correct(2, 1, self.sent[-1][2])
                grads |= own
                own, xi1 = self.correct(1, 1, xi2)
                held, _ = self.correct(0, 1, xi1)
                self.found.append([held, own])
            for k in (0, 1):
                if len(self.found) > 2 - k:
                    grads |= self.found[k - 3][k]
            self.sent.append({2: xi})
            return grads

    found = examine_error_path(*build(HalfPass, 6, 5, 4, 5, 3))
    assert found.reason == "an error comes down to layer 2 and on to layer 0 in one tick"


def test_a_way_down_that_is_not_seen_is_undecided() -> None:
    class InNumpy(pipelines.OneLayerATick):
        def correct(self, i: int, ago: int, xi: Tensor) -> tuple[dict[str, Tensor], Tensor]:
            trace, _ = self.traces[-1 - ago]
            delta = trace.pullbacks[i](xi)
            grads = self.network.layers[i].gradients(trace.inputs[i], delta, self.trainable)
            return grads, torch.from_numpy(delta.numpy() @ self.b[i].double().numpy())

    found = examine_error_path(*build(InNumpy))
    assert found.verdict is None
    assert "the way of its error down to layer 2 was not found" in found.reason


@pytest.mark.parametrize("rule", ["streaming", "local:random", "drtp", "hebb", "readout"])
def test_layers_that_learn_from_what_they_fire_for_are_cleared(rule: str) -> None:
    learner, batch = build(lambda model: apical.make(rule, model, input_shape=(6,)))  # type: ignore[arg-type]
    assert examine_reach(learner, batch).verdict is True


def test_a_layer_that_learns_from_what_it_receives_at_the_next_tick_is_seen() -> None:
    found = examine_reach(*build(pipelines.PeeksBelow))
    assert found.verdict is False
    assert found.reason == "layer 2 learns from activity that has not reached it yet"


def test_a_layer_that_fires_for_two_batches_in_a_tick_is_seen() -> None:
    found, _ = examine_timing(*build(pipelines.PeeksAhead))
    assert found == Outcome(False, "activity is computed for more than one batch in a tick")
    assert examine_timing(*build(apical.RULES["streaming"]))[0].verdict is True
