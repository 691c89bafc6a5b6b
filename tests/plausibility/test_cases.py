"""The audit of rules that cheat and of rules that do not: `audit_cases` says what it owes each of them."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from apical.plausibility.judge import STEPS
from apical.plausibility.watching import watch
from audit_cases import CHEATS, HONEST, Case, audit_case, build_case, format_cases
from audit_cases.base import Feedback
from cases import mostly_slow

pytestmark = [
    pytest.mark.no_cover,  # other tests run these lines, too, and coverage doubles the time
    pytest.mark.filterwarnings("ignore::UserWarning"),  # torch's own, about sparse and quantised tensors
]
QUICK = {
    *("Listed", "CustomOperator", "Thread", "CallerTrigger", "WaitingThread", "Fourier", "FourierProduct", "Sparse"),
    *("CarriedInState", "BatchSize", "Unwatched", "IdentityChain", "DelayedFeedback", "AlternatePhases"),
    *("CountedPhases", "SparseFeedback", "CoarseWeights", "StartsEqual", "NormScaled", "WeightMirror", "Momentum"),
    *("TracesInOneTensor", "HeldBack", "PassForEachLayer", "PeeksAhead", "PeeksBelow", "StreamsThroughOldWeights"),
}
"""Cases whose whole audit every run of the tests repeats; the tracer alone is tried on all."""


def mark(cases: list[Case]) -> list[object]:
    marks = {case.name: () if case.name in QUICK else (pytest.mark.slow,) for case in cases}
    return [pytest.param(case, id=case.name, marks=marks[case.name]) for case in cases]


@pytest.mark.parametrize("case", mark(CHEATS))
def test_no_cheat_passes_and_one_in_plain_torch_operations_is_convicted(case: Case) -> None:
    verdict = getattr(audit_case(case.rule), case.breaks)
    assert verdict is False if case.plain else verdict is not True


@pytest.mark.parametrize("case", mark(HONEST))
def test_an_honest_rule_is_cleared_of_all_that_it_keeps(case: Case) -> None:
    audit = audit_case(case.rule)
    assert {name: getattr(audit, name) for name in case.keeps} == dict.fromkeys(case.keeps, True)


class Interneurons(Feedback):
    """Feedback alignment in which errors pass fixed random interneurons on their way to the layer below."""

    def __init__(self, *args: Any, **common: Any) -> None:
        super().__init__(*args, **common)
        sizes = [(len(w), 7, w.shape[1]) for w in self.forward_weights]
        draws = [(torch.randn(out, k), torch.randn(k, into)) for out, k, into in sizes]
        self.ways = [(p.to(w), q.to(w)) for (p, q), w in zip(draws, self.forward_weights, strict=True)]

    def carry(self, i: int, w: Tensor, u: Tensor, delta: Tensor, state: Any) -> Tensor:
        p, q = self.ways[i]
        return (delta @ p.to(delta)).tanh() @ q.to(delta)


def test_feedback_over_interneurons_is_undecided_on_c2_and_not_convicted() -> None:
    """The interventions cut matrices of W's shape. What comes down over others need not have skipped a layer."""
    audit = audit_case(Interneurons)
    assert (audit.c1, audit.c2, audit.c3) == (True, None, False)
    assert "feedback weights of W's shape would decide" in audit.facts["evidence"]["c2"]


CONVICTED = {
    *("Fourier", "FourierImage", "Complex", "Polar", "Bytes", "Integers", "Sparse", "SparseRows", "SparseParts"),
    *("Quantised", "Sorted", "Added", "Scattered", "Counted", "Distances", "Cumulated", "Folded", "Pooled", "Resized"),
    *("Bagged", "Singular", "BlockInverse", "Exponential", "Kronecker"),
}
"""Ways round through operations that lose rows and columns, after which the numbers are those of W again."""
BEYOND_THE_TRACER = {
    *("AlternatePhases", "CountedPhases", "BatchSize"),
    *("HeldBack", "HeldBackTwice", "LatePass", "PassForEachLayer", "PeeksBelow"),
}
"""What happens in other batches, or for larger ones, or in another tick than that of the update, interventions alone see."""


WITHIN_THE_TRACER = [c for c in CHEATS if c.name not in BEYOND_THE_TRACER | CONVICTED]
QUICK_FOR_THE_TRACER = [
    *WITHIN_THE_TRACER[::3],
    *(c for c in WITHIN_THE_TRACER if c.name in ("DelayedFeedback", "Unwatched")),
]


@pytest.mark.parametrize("case", mostly_slow(WITHIN_THE_TRACER, QUICK_FOR_THE_TRACER), ids=lambda case: case.name)
def test_the_tracer_alone_clears_no_cheat(case: Case) -> None:
    """It has proof, or it says in which line it lost sight of something."""
    learner, x, y = build_case(case.rule)
    tracer = watch(learner, x, y, STEPS)
    lost = [loss for loss in tracer.not_followed if case.breaks in loss.criteria]
    assert all(loss.operation and loss.what for loss in lost)
    assert all(".py:" in loss.line for loss in lost if loss.operation != "step")
    waits = any(tracer.list_waits(i) for i in range(len(learner.network)))
    fired = len(tracer.drives) - tracer.first_drive
    proof = {"c1": bool(tracer.list_transports()), "c2": waits, "c3": waits or fired > len(learner.network)}
    assert lost or proof[case.breaks]


@pytest.mark.parametrize("name", ["IdentityChain", "PermutationChain"])
def test_the_tracer_says_that_a_fixed_matrix_only_hands_numbers_on(name: str) -> None:
    """It counts synapses on the way of an error, and this may be none."""
    (rule,) = (case.rule for case in CHEATS if case.name == name)
    losses = watch(*build_case(rule), STEPS).not_followed
    assert any("hands numbers on" in loss.what and loss.criteria == ("c2",) for loss in losses)


@pytest.mark.parametrize("name", mostly_slow(sorted(CONVICTED), quick=sorted(CONVICTED)[::3]))
def test_the_tracer_knows_weights_again_whatever_operations_they_went_through(name: str) -> None:
    (rule,) = (case.rule for case in CHEATS if case.name == name)
    found = watch(*build_case(rule), STEPS).list_transports()
    assert {finding["weight"] for finding in found} == {"model.2.weight", "model.4.weight"}
    assert all("audit_cases" in finding["called"] for finding in found)


@pytest.mark.parametrize("case", HONEST, ids=lambda case: case.name)
def test_the_tracer_loses_sight_of_nothing_that_an_honest_rule_does(case: Case) -> None:
    tracer = watch(*build_case(case.rule), STEPS)
    assert tracer.not_followed == []
    assert tracer.list_transports() == []


def test_the_page_lists_the_cases() -> None:
    page = (Path(__file__).parents[2] / "docs" / "audit-cases.md").read_text("utf-8")
    assert format_cases() in page, "cd tests && python -m audit_cases says something else by now"
    assert f"{len(CHEATS)} rules that cheat and {len(HONEST)} that do not" in page
    assert all(count == 1 for count in Counter(case.name for case in CHEATS + HONEST).values())
    assert {case.name for case in CHEATS + HONEST} >= QUICK
    assert all(case.how.endswith(".") for case in CHEATS + HONEST)
