"""`apical.audit`: one rule on one network, watched."""

import copy
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from apical.core import registry, validation
from apical.core.learner import Claims, Learner
from apical.errors import ApicalError, UnsupportedError
from apical.plausibility.costs import costs, optimiser
from apical.plausibility.criteria import CRITERIA, Facts
from apical.plausibility.records import BATCH, INPUT, NOISE, Record
from apical.plausibility.tracer import Change, Drive, Tracer, held

EXAMPLES = 8
"""A batch of this size shows all that a larger one would."""
STEPS = 3
"""How many batches are watched: a copy of weights that is used two batches after it was made shows in the third. The
facts are those of the last batch."""


@dataclass(frozen=True)
class Audit:
    """What was measured of a rule, and what follows for the three criteria."""

    rule: str
    c1: bool
    c2: bool
    c3: bool
    paper: Claims | None
    facts: Facts = field(repr=False)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as `apical audit --json` prints them for a rule."""
        paper = None if self.paper is None else self.paper._asdict()
        return {"c1": self.c1, "c2": self.c2, "c3": self.c3, "paper": paper, "facts": copy.deepcopy(self.facts)}


def audit(learner: Learner, x: Tensor, y: Tensor) -> Audit:
    """Watch a rule learn from one batch on its own network, and judge it. The learner itself is left as it is.

    >>> model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))
    >>> x, y = torch.randn(8, 4), torch.randint(0, 2, (8,))
    >>> audit(registry.make("bp", model), x, y).c1, audit(registry.make("dll", model), x, y).c1
    (False, True)
    """
    if not isinstance(learner, Learner):
        raise UnsupportedError(
            f"the audit watches a learner, not a {type(learner).__name__}; apical.make('dll', model) makes one of a model."
        )
    if learner.network.recurrent:
        raise UnsupportedError(
            "the audit follows layers, not moments of time: audit the rule on an nn.Sequential, where it is the same."
        )
    validation.check_batch(learner.network, learner.loss, learner.params(), x, y)
    x, y = (t[:EXAMPLES].detach().cpu().clone() for t in (x, y))
    with torch.random.fork_rng(devices=[]):
        watched = _copied(learner).cpu()
        measured = costs(watched, x, y)
        tracer = _traced(watched, x, y)
    transport = _transport(tracer)
    layers = [_layer(tracer, i, transport) for i in range(len(learner.network))]
    verdicts = {name: judge(layers, transport) for name, judge in CRITERIA.items()}
    facts = {
        "evidence": {name: verdict.evidence for name, verdict in verdicts.items()},
        "layers": layers,
        "transport": transport,
        "passes": max(layer["activity"]["computed"] for layer in layers),
        "optimiser_steps": len(learner.phases),
        "costs": measured,
        "not_followed": tracer.leaks,
    }
    return Audit(learner.name, **{n: v.met for n, v in verdicts.items()}, paper=learner.CLAIMS, facts=facts)


def _copied(learner: Learner) -> Learner:
    """A learner to watch, so that the user's own stays as it is; tensors that share memory share it there, too."""
    try:
        twin = copy.deepcopy(learner)
    except Exception as error:
        raise ApicalError(
            f"the learner cannot be copied for the audit ({error}); keep its tensors as buffers or parameters."
        ) from error
    storages: dict[int, torch.UntypedStorage] = {}
    for (_, own), (_, other) in zip(held(learner), held(twin), strict=True):
        if own.device.type != "meta":
            storage = own.untyped_storage()
            cells = storages.setdefault(storage.data_ptr(), storage.clone())
            other.data = own.detach().new_empty(0).set_(cells, own.storage_offset(), own.shape, own.stride())
    return twin


def _traced(learner: Learner, x: Tensor, y: Tensor) -> Tracer:
    learner.zero_grad()
    tracer, optim = Tracer(learner, x, y), optimiser(learner)
    optim.register_step_post_hook(lambda *_: tracer.stepped())
    for _ in range(STEPS):
        tracer.begin()
        with tracer:
            learner.step(x, y, optim)
        tracer.stepped()
    return tracer


def _transport(tracer: Tracer) -> list[Facts]:
    """What was transported: weights of the model, or others that change, whose outcome changed yet other weights."""
    found = []
    for finding in tracer.findings:
        reached = tracer.reached.get(finding, set()) - {finding.weight}
        if reached and finding.weight in {*tracer.layers, *tracer.changed}:
            found.append({**vars(finding), "reaches": sorted(reached)})
    return found


def _layer(tracer: Tracer, i: int, transport: list[Facts]) -> Facts:
    """The facts of one layer."""
    network = tracer.learner.network
    layer, names = network.layers[i], [layer.name for layer in network.layers]
    change = tracer.changes.get(layer.weight, Change())
    roots = change.record.roots
    weights = {str(root[1]) for root in roots if root[0] == "weight"}
    drives = {root[1] for root in roots if root[0] == "drive"}
    levels = [level for level, tier in enumerate(network.tiers) for _ in tier.layers]
    above = [j for w, j in tracer.layers.items() if levels[j] > levels[i] and w in weights]
    below = {j for j, level in enumerate(levels) if level == levels[i] - 1}
    return {
        "layer": layer.name,
        "weight": layer.weight,
        "learns": layer.weight in tracer.changes,
        "transport": [found for found in transport if found["weight"] == layer.weight],
        "depends_on": {
            "presynaptic": bool(drives & below) if below else INPUT in roots,
            "postsynaptic": i in drives,
            "own_weight": change.own,
            "target": change.record.hops is not None,
            "noise": NOISE in roots,
            "batch": BATCH in roots,
            "other_weights": sorted(weights - {layer.weight}),
        },
        "error": {"from": _origin(change.record, [levels[j] - levels[i] for j in above]), "hops": change.record.hops},
        "waits_for": [names[j] for j in above],
        "activity": {
            "computed": _computed([d for d in tracer.drives if d.layer == i]),
            "held": _held(tracer, i, roots),
            "locked": any(network.layers[j].weight in change.locked for j in above),
        },
    }


def _origin(record: Record, above: list[int]) -> str:
    """Where a layer's error comes from: nowhere, the layer itself, the layer above it, or afar; `above` says how far
    up the layers are that it passed."""
    if record.hops is None:
        return "nowhere"
    if not above:
        return "itself"
    return "above" if record.hops >= max(above) else "afar"


def _computed(drives: list[Drive]) -> int:
    """How many times a layer's activity was computed, counting what could not have been had at the same moment."""
    if not drives:
        return 0
    first, *later = drives
    return first.times + sum(d.times for d in later if _anew(d, first))


def _anew(drive: Drive, first: Drive) -> bool:
    """Later, or with the target, or with noise where there was none, or the reverse, or after its own activity."""
    roots = drive.before.roots
    noisy = (NOISE in roots) != (NOISE in first.before.roots)
    own = any(root[:2] == ("drive", drive.layer) for root in roots)
    return drive.step > first.step or drive.before.hops is not None or noisy or own


def _held(tracer: Tracer, i: int, roots: frozenset[Any]) -> int:
    """How many states of a neuron an update compares: those that are in it and did not give way to a later one."""
    used = [root for root in roots if root[:2] == ("drive", i)]
    before = [tracer.drives[root[2]].before.roots for root in used]
    return sum(tracer.drives[root[2]].times for root in used if not any(root in b for b in before))


def small() -> nn.Sequential:
    """The network that rules are compared on: three layers, no two widths alike."""
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))


def verdicts(
    names: Iterable[str] | None = None,
    model: Callable[[], nn.Sequential] = small,
    input_shape: tuple[int, ...] | None = None,
) -> dict[str, Audit]:
    """The audit of each of these rules (by default of all) with its default options, on a network of this kind.

    `input_shape` may be left out where the network starts with a Linear.
    """
    return {name: audit_rule(name, model, input_shape) for name in (names or registry.rule_names())}


def audit_rule(
    name: str,
    model: Callable[[], nn.Sequential] = small,
    input_shape: tuple[int, ...] | None = None,
    options: Mapping[str, Any] = MappingProxyType({}),
) -> Audit:
    """Audit one rule with these options, on a new network of this kind and random inputs of its size."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        learner = registry.make(name, model(), input_shape=input_shape, **options)
        shapes = learner.network.shapes(input_shape)
        x = torch.rand(EXAMPLES, *(shapes.inputs[0] if input_shape is None else input_shape))
    classes, *positions = shapes.output
    y = (torch.arange(EXAMPLES) % classes).view(-1, *[1] * len(positions)).expand(-1, *positions)
    return audit(learner, x, y)
