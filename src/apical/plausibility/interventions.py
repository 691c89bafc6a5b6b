"""The audit by interventions: change something, run the rule again with the same noise, and see what else changed.

It reads no code, so no code can mislead it. Everything is compared between runs of copies, in float64, with plain SGD.
"""

from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from apical.core.learner import Learner
from apical.errors import describe_error
from apical.plausibility.copies import build_own, copy_learner, map_examples
from apical.plausibility.error_path import examine_paths
from apical.plausibility.influence import NOT_REPRODUCIBLE, examine_errors, examine_timing
from apical.plausibility.products import IN, Product, ProductRecorder, Use, find_uses, span, turn_rows
from apical.plausibility.replay import (
    Batch,
    Layers,
    Outcome,
    Run,
    Values,
    differs,
    find_changed,
    has_same_results,
    is_same,
    keep_random_states,
    run_ticks,
)

MAX_CHANGE = 0.5
"""Share of a buffer that a tick may replace, if it is to count as weights that learn and not as activity."""
TICKS = 3
"""Ticks that are watched for C1: a copy of weights that is used two ticks later shows in the third."""
MAX_BATCH = 256
SIZES = ((256, 128, 64, 32, 16, 2), (2, 2, 2), (1, 1, 1), (1,))
"""Sizes of the batches of several ticks on the audit's own network, to try in turn: smaller ones leave more directions in
which a matrix can be changed without its own products showing it."""
DISTINCT = 4
"""Different examples in these batches: the fewer, the more room."""
UNTRIED = Outcome(None, "not tried")
Own = tuple[Learner, Tensor, Tensor]
"""A learner on a network of the audit's own, and a batch for it."""


# C1: is a matrix applied against its direction?


class TransportTest:
    """Turns matrices round where nothing that they act on can tell, and looks for layers that can."""

    def __init__(self, learner: Learner, batches: list[Batch]) -> None:
        self.learner, self.batches, self.layers = learner, batches, Layers(learner)
        self.recorder = ProductRecorder()
        self.base = run_ticks(learner, batches, recorder=self.recorder)

    def run(self) -> dict[str, Outcome]:
        """Return the outcome for every matrix that learns."""
        outcomes, bases = {}, {}
        matrices = self.list_matrices()
        for name, side, _ in matrices:
            basis = self.find_basis(name, side)
            if isinstance(basis, Outcome):
                outcomes[name] = basis
            else:
                bases[name] = basis
        if bases and not is_same(self.layers, self.base, run_ticks(self.learner, self.batches)):
            return self.try_unwatched(matrices, bases)
        for name, side, guarded in matrices:
            if name in bases:
                outcomes[name] = self.try_matrix(name, side, bases[name], guarded)
                if outcomes[name].verdict is False:
                    break
        return outcomes

    def try_unwatched(self, matrices: list[tuple[str, str, list[int]]], bases: dict[str, Tensor]) -> dict[str, Outcome]:
        """Try a rule that comes out differently when it is not watched: its first tick may still be proof against it."""
        self.batches = self.batches[:1]
        self.base = run_ticks(self.learner, self.batches)
        outcomes = {"": Outcome(None, NOT_REPRODUCIBLE)}
        if is_same(self.layers, self.base, run_ticks(self.learner, self.batches)):
            found = {n: self.try_matrix(n, side, bases[n], guarded) for n, side, guarded in matrices if n in bases}
            outcomes |= {name: outcome for name, outcome in found.items() if outcome.verdict is False}
        return outcomes

    def list_matrices(self) -> list[tuple[str, str, list[int]]]:
        """List the matrices that learn, the side from which they first act, and the layers that must not see them turned."""
        learning = {
            i for i, names in enumerate(self.layers.params) for u in self.base.updates for n in names if u[n].any()
        }
        found: list[tuple[str, str, list[int]]] = []
        for i, name in enumerate(self.layers.weights):
            guarded = sorted(learning & {*self.layers.upstream(i)})
            if guarded:
                found.append((name, self.find_direction(name), guarded))
        for name, tensor in self.base.before[0].items():
            if tensor.ndim >= 2 and name not in self.layers.weights and self.learns(name):
                side = self.find_first_side(name)
                if side:
                    found.append((name, side, sorted(learning)))
        return found

    def learns(self, name: str) -> bool:
        """Return whether a tensor changes little by little. What a tick replaces is activity."""
        values = [before[name] for before in self.base.before]
        shares = [float((b - a).norm() / (a.norm() + b.norm() + 1e-300)) for a, b in pairwise(values)]
        return name in self.learner.trainable or (any(shares) and sorted(shares)[len(shares) // 2] < MAX_CHANGE)

    def find_uses(self, name: str) -> list[Use]:
        shape = self.base.before[0][name].shape
        return [use for product in self.recorder.products for use in find_uses(product, shape)]

    def find_direction(self, name: str) -> str:
        """Return the side from which a layer's weights act: the code of a model that is not read as layers decides."""
        return (self.find_first_side(name) if self.learner.network.is_general else None) or IN

    def find_first_side(self, name: str) -> str | None:
        for use in self.find_uses(name):
            if not use.vectors.any():  # a matrix that acts on zeros does nothing
                continue
            known = self.base.before[use.phase][name].flatten(1)
            if use.matrix.numel() == known.numel() and torch.equal(use.matrix.reshape(known.shape), known):
                return use.side
        return None

    def find_basis(self, name: str, side: str) -> Tensor | Outcome:
        """Return a basis of all that a matrix acted on, or why it leaves no room to change the matrix."""
        vectors = [use.rows for use in self.find_uses(name) if use.side == side]
        if not vectors:
            return Outcome(None, f"{name} was not seen at work; products in plain torch operations would decide")
        basis = span(vectors, 1e-12 if vectors[0].dtype == torch.float64 else 1e-5)
        if len(basis) == basis.shape[1]:
            return Outcome(None, f"{name} acted on too many different vectors; a wider network would decide")
        return basis

    def try_matrix(self, name: str, side: str, basis: Tensor, guarded: list[int]) -> Outcome:
        """Turn the rows of a matrix where nothing that it acts on can tell."""

        def turn(values: Values, tick: int, phase: int) -> None:
            self.restore(values, phase)
            values[name].copy_(turn_rows(self.base.before[phase][name], basis, side))

        turned = run_ticks(self.learner, self.batches, turn)
        changed = {
            m: c
            for m in range(len(self.base.updates))
            if (c := [i for i in find_changed(self.layers, self.base, turned, m) if i in guarded])
        }
        unseen = Outcome(
            None, f"{name} acts in a way that was not seen; products in plain torch operations would decide"
        )
        if not changed:
            if not has_same_results(self.base, turned):
                return unseen
            return Outcome(True, f"{name} can be turned round, and no layer before it learns anything else")
        if self.learner.network.is_general and not has_same_results(self.base, turned, [0]):
            return unseen  # such as a look-up of tied weights
        phase = min(changed)
        if not self.is_still(name, phase, turned, turn):
            return unseen
        if not self.depends_on_target(name, guarded, turned, turn):
            return Outcome(True, f"{name} is applied against its direction, but to nothing that depends on the target")
        first, *others = (self.layers.names[i] for i in changed[phase])
        reached = f"layers {' and '.join([first, *others])} learn" if others else f"layer {first} learns"
        return Outcome(False, f"{reached} from {name} against its direction")

    def restore(self, values: Values, phase: int) -> None:
        """Set the layers' parameters as they were in the first run, so that each phase starts alike."""
        for names in self.layers.params:
            for name in names:
                values[name].copy_(self.base.before[phase][name])

    def is_still(self, name: str, phase: int, turned: Run, turn: Callable[[Values, int, int], None]) -> bool:
        """Return whether nothing above the matrix changed before a layer below it did, so that its action was seen whole."""
        recorder, tick = ProductRecorder(), self.base.ticks[phase]
        run_ticks(self.learner, self.batches[: tick + 1], turn, recorder)
        first = self.find_first_difference(recorder.products, phase)
        if first is None:
            return has_same_results(self.base, turned, range(tick + 1))
        return name in self.layers.weights and first <= self.layers.levels[self.layers.weights.index(name)]

    def find_first_difference(self, products: list[Product], phase: int) -> int | None:
        """Return the level of the first layer whose input differs from the first run's, up to a phase; None for none."""
        for one, other in zip(self.recorder.products, products, strict=False):
            if one.phase > phase:
                break
            for i, weight in enumerate(self.layers.weights):
                shape = self.base.before[0][weight].shape
                for ours, theirs in zip(find_uses(one, shape), find_uses(other, shape), strict=False):
                    if ours.side == IN and differs(ours.vectors, theirs.vectors):
                        return self.layers.levels[i]
        return None

    def depends_on_target(
        self, name: str, guarded: list[int], turned: Run, turn: Callable[[Values, int, int], None]
    ) -> bool:
        """Return whether what came down through the matrix depends on the target."""
        classes = self.base.results[-1][1].shape[self.learner.network.CLASSES]
        batches = [(x, change_targets(y, classes)) for x, y in self.batches]
        plain = run_ticks(self.learner, batches, lambda values, tick, phase: self.restore(values, phase))
        other = run_ticks(self.learner, batches, turn)
        names = [n for i in guarded for n in self.layers.params[i]]
        return any(
            differs(
                turned.updates[m][n] - self.base.updates[m][n],
                other.updates[m][n] - plain.updates[m][n],
                self.base.before[m][n],
            )
            for m in range(len(self.base.updates))
            for n in names
        )


def change_targets(y: Tensor, classes: int) -> Tensor:
    """Return other targets for the same examples: for each class the next one that there is."""
    if y.is_floating_point():
        return 1 - y
    known, places = y.unique(return_inverse=True)
    return known[(places + 1) % len(known)] if len(known) > 1 else (y + 1) % classes


# All criteria.


class InterventionResult(NamedTuple):
    """The outcome for each criterion, and what was measured."""

    outcomes: dict[str, Outcome]
    facts: dict[str, Any]


def examine(learner: Learner, x: Any, y: Tensor) -> InterventionResult:
    """Judge a learner by interventions alone. It is copied, and all random number generators are left as they were."""
    with keep_random_states():
        given, (x, y) = _prepare(learner, x, y)
        own = _try(lambda: build_own(learner))
        matrices = examine_transport(given, (x, y), None if isinstance(own, Outcome) else own)
        timing = _try(lambda: examine_timing(given, (x, y)))
        c3, facts = (timing, {}) if isinstance(timing, Outcome) else timing
        if c3.verdict and not given.network.recurrent:
            network = (given, (x, y)) if isinstance(own, Outcome) else (own[0], own[1:])
            c3 = _try(lambda: examine_paths(*network, is_told=bool(facts["heard"])))
        if max(Layers(given).levels) < 2:
            c2 = Outcome(True, "there is no layer to skip")
        elif isinstance(own, Outcome):
            c2 = own
        else:
            c2 = _try(lambda: examine_errors(own[0], own[1:]))
    outcomes = {"c1": summarise(matrices), "c2": c2, "c3": c3}
    told = {name: outcome._asdict() for name, outcome in outcomes.items()}
    return InterventionResult(
        outcomes, {**told, "matrices": {name: o.verdict for name, o in matrices.items()}, **facts}
    )


def _try(experiment: Callable[[], Any]) -> Any:
    """Return the result of an experiment, or the outcome that it failed: whatever a rule raises leaves it undecided."""
    try:
        return experiment()
    except Exception as error:
        return Outcome(None, f"the experiment failed ({describe_error(error)})")


def _prepare(learner: Learner, x: Any, y: Tensor) -> tuple[Learner, Batch]:
    """Return a copy in double precision, if the rule runs in it, and the batch for it."""

    def convert(dtype: torch.dtype | None) -> tuple[Learner, Batch]:
        first = map_examples(lambda t: t[:MAX_BATCH], (x, y), len(y))
        batch = tree_map_only(
            Tensor, lambda t: t.detach().to("cpu", dtype if dtype and t.is_floating_point() else t.dtype), first
        )
        return copy_learner(learner, dtype), batch

    double = convert(torch.float64)
    tried = _try(lambda: run_ticks(double[0], [double[1]]))
    return convert(None) if isinstance(tried, Outcome) else double


def examine_transport(given: Learner, batch: Batch, own: Own | None) -> dict[str, Outcome]:
    """Return the outcome for every matrix: on the learner's own network, and where that leaves no room, on the audit's.

    Fewer examples and ticks leave more room. One tick alone proves something against a rule, but nothing for it.
    """
    outcomes = _try_matrices(given, [batch] * (TICKS + given.warmup))
    if is_undecided(outcomes):
        alone = _try_matrices(given, [map_examples(lambda t: t[:1], batch, len(batch[1]))] * (1 + given.warmup))
        outcomes = {name: alone[name] if is_broken(alone, name) else outcome for name, outcome in outcomes.items()}
    if not is_undecided(outcomes) or own is None or "" in outcomes:
        return outcomes
    learner, x, y = own[0], *(t[:DISTINCT] for t in own[1:])
    outcomes = {}
    for sizes in SIZES:
        batches = [repeat_examples(x, y, n) for n in [*sizes[:1] * learner.warmup, *sizes]]
        for name, outcome in _try_matrices(learner, batches).items():
            if outcomes.get(name, UNTRIED).verdict is None and (len(sizes) > 1 or outcome.verdict is False):
                outcomes[name] = outcome
        if not is_undecided(outcomes):
            break
    return outcomes or {"": Outcome(None, "it does not learn on a network of the audit's own")}


def _try_matrices(learner: Learner, batches: list[Batch]) -> dict[str, Outcome]:
    found = _try(lambda: TransportTest(learner, batches).run())
    return {"": found} if isinstance(found, Outcome) else found


def is_broken(outcomes: dict[str, Outcome], name: str) -> bool:
    return name in outcomes and outcomes[name].verdict is False


def is_undecided(outcomes: dict[str, Outcome]) -> bool:
    """Return whether nothing is proved against any matrix, and at least one was not decided."""
    verdicts = [outcome.verdict for outcome in outcomes.values()]
    return None in verdicts and False not in verdicts


def repeat_examples(x: Tensor, y: Tensor, count: int) -> Batch:
    """Return a batch of so many examples, made of the first few."""
    places = torch.arange(count) % len(x)
    return x[places], y[places]


def summarise(outcomes: dict[str, Outcome]) -> Outcome:
    """Return the outcome for all matrices: False if it is for one, else None if it is for one."""
    for verdict in (False, None):
        for outcome in outcomes.values():
            if outcome.verdict is verdict:
                return outcome
    return Outcome(True, "no layer learns from weights against their direction")
