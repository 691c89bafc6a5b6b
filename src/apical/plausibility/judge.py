"""`apical.audit`: watch one rule learn on one network, and judge the criteria of `criteria.py` by what was measured."""

import copy
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from apical.core import registry, validation
from apical.core.learner import Claims, Learner
from apical.errors import ApicalError, UnsupportedError, describe_error
from apical.plausibility.criteria import CRITERIA, Facts, find_claims, format_verdicts, read_verdicts
from apical.plausibility.meter import make_optimiser, measure_costs
from apical.plausibility.provenance import BATCH, INPUT, NOISE
from apical.plausibility.tracer import Change, Drive, Tracer, list_kept_tensors

Builder = Callable[[], nn.Sequential]
EXAMPLES = 8  # a batch of this size shows all that a larger one would
STEPS = 3
"""Batches that are watched: a copy of weights that is used two batches later shows in the third, which has the facts."""
TITLES = {
    "c1": "C1: asymmetry of forward and backward weights",
    "c2": "C2: local error representation",
    "c3": "C3: non-two-stage training",
}


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
        """Return plain values, as `apical audit --json` prints them for a rule."""
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
            "the audit follows layers, not time steps: audit the rule on an nn.Sequential, where it is the same."
        )
    validation.check_batch(learner.network, learner.loss, learner.params(), x, y)
    x, y = (t[:EXAMPLES].detach().cpu().clone() for t in (x, y))
    with torch.random.fork_rng(devices=[]):
        watched = _copy_learner(learner).cpu()
        costs = measure_costs(watched, x, y)
        tracer = _trace(watched, x, y)
    transport = _list_transports(tracer)
    layers = [_describe_layer(tracer, i, transport) for i in range(len(learner.network))]
    judged = {name: judge(layers, transport) for name, judge in CRITERIA.items()}
    facts = {
        "evidence": {name: evidence for name, (_, evidence) in judged.items()},
        "layers": layers,
        "transport": transport,
        "passes": max(layer["activity"]["computed"] for layer in layers),
        "optimiser_steps": len(learner.phases),
        "costs": costs,
        "not_followed": tracer.leaks,
    }
    paper, verdict = find_claims(learner.name), {name: met for name, (met, _) in judged.items()}
    return Audit(learner.name, **verdict, paper=paper, facts=facts)


def _copy_learner(learner: Learner) -> Learner:
    """Copy a learner, so that the user's own stays as it is; tensors that share memory share it in the copy, too."""
    try:
        twin = copy.deepcopy(learner)
    except Exception as error:
        raise ApicalError(
            f"the learner cannot be copied for the audit ({error}); keep its tensors as buffers or parameters."
        ) from error
    storages: dict[int, torch.UntypedStorage] = {}
    for (_, own), (_, other) in zip(list_kept_tensors(learner), list_kept_tensors(twin), strict=True):
        if own.device.type != "meta":
            storage = own.untyped_storage()
            shared = storages.setdefault(storage.data_ptr(), storage.clone())
            other.data = own.detach().new_empty(0).set_(shared, own.storage_offset(), own.shape, own.stride())
    return twin


def _trace(learner: Learner, x: Tensor, y: Tensor) -> Tracer:
    learner.zero_grad()
    learner.allocate(x, y)
    tracer, optim = Tracer(learner, x, y), make_optimiser(learner)
    optim.register_step_post_hook(lambda *_: tracer.finish_step())
    for _ in range(STEPS + learner.warmup):
        tracer.start_batch()
        with tracer:
            learner.step(x, y, optim)
        tracer.finish_step()
    return tracer


def _list_transports(tracer: Tracer) -> list[Facts]:
    """List what was transported: weights of the model, or others that change, whose outcome changed yet other weights."""
    return [
        {**finding._asdict(), "reaches": sorted(others)}
        for finding, reached in tracer.reached.items()
        if (others := reached - {finding.weight}) and finding.weight in {*tracer.layers, *tracer.changed}
    ]


def _describe_layer(tracer: Tracer, i: int, transport: list[Facts]) -> Facts:
    network = tracer.learner.network
    layer = network.layers[i]
    change = tracer.changes.get(layer.weight, Change())
    sources, hops = change.record.sources, change.record.hops
    weights = {source[1] for source in sources if source[0] == "weight"}
    drives = {source[1] for source in sources if source[0] == "drive"}
    levels = [level for level, tier in enumerate(network.tiers) for _ in tier.layers]
    above = [j for w, j in tracer.layers.items() if levels[j] > levels[i] and w in weights]
    now = {source[1] for source in sources if source[0] == "weight" and source[2] >= tracer.first_step}
    below = {j for j, level in enumerate(levels) if level == levels[i] - 1}
    return {
        "layer": layer.name,
        "weight": layer.weight,
        "learns": layer.weight in tracer.changes,
        "transport": [found for found in transport if found["weight"] == layer.weight],
        "depends_on": {
            "presynaptic": bool(drives & below) if below else INPUT in sources,
            "postsynaptic": i in drives,
            "own_weight": change.uses_own_weight,
            "target": hops is not None,
            "noise": NOISE in sources,
            "batch": BATCH in sources,
            "other_weights": sorted(weights - {layer.weight}),
        },
        "error": {"from": _locate_error(hops, [levels[j] - levels[i] for j in above]), "hops": hops},
        "waits_for": [network.layers[j].name for j in above if network.layers[j].weight in now],
        "activity": {
            "computed": _count_computations([d for d in tracer.drives[tracer.first_drive :] if d.layer == i]),
            "held": _count_held_states(tracer, i, change),
            "locked": any(network.layers[j].weight in change.current_weights for j in above),
        },
    }


def _locate_error(hops: int | None, above: list[int]) -> str:
    """Return where a layer's error comes from, given how far up the layers are that it passed."""
    if hops is None:
        return "nowhere"
    if not above:
        return "itself"
    return "above" if hops >= max(above) else "afar"


def _count_computations(drives: list[Drive]) -> int:
    """Count how many times a layer's activity was computed, where it could not have been had at the same moment:
    later than at first, or with the target, or with noise if there was none (or without), or after its own activity."""
    count = 0
    for drive in drives:
        first, sources = drives[0], drive.record.sources
        noisy = (NOISE in sources) != (NOISE in first.record.sources)
        own = any(source[:2] == ("drive", drive.layer) for source in sources)
        if drive is first or drive.step > first.step or drive.record.hops is not None or noisy or own:
            count += drive.states
    return count


def _count_held_states(tracer: Tracer, i: int, change: Change) -> int:
    """Count the states of a neuron that an update compares: those that are in it and did not give way to a later one."""
    used = {source: tracer.drives[source[2]] for source in change.record.sources if source[:2] == ("drive", i)}
    earlier = frozenset().union(*(drive.record.sources for drive in used.values()))
    return sum(drive.states for source, drive in used.items() if source not in earlier)


def build_audit_network() -> nn.Sequential:
    """Build the network that rules are compared on: three layers, no two widths alike."""
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))


def verdicts(
    names: Iterable[str] | None = None, model: Builder = build_audit_network, input_shape: tuple[int, ...] | None = None
) -> dict[str, Audit]:
    """Audit each of these rules (by default all) with its default options, on a network of this kind.

    `input_shape` may be left out where the network starts with a Linear.
    """
    return {name: audit_rule(name, model, input_shape) for name in (names or registry.rule_names())}


def audit_rule(
    name: str, /, model: Builder = build_audit_network, input_shape: tuple[int, ...] | None = None, **options: Any
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


_JUDGED: dict[tuple[type, str, str], str] = {}
"""Verdicts of this process. The class is part of the key: a rule that is defined again is audited again."""


def judge_own_rule(rule: str, options: dict[str, Any]) -> str | None:
    """Audit a rule that is not built in, with the options of a run, and return the verdict as a store keeps it.

    Returns:
        JSON with c1, c2 and c3, or with `problem`, the reason why the audit failed; None for a built-in rule.
    """
    if rule in read_verdicts():
        return None
    key = registry.resolve(rule)[0], rule, json.dumps(options, sort_keys=True)
    if key not in _JUDGED:
        try:
            found = audit_rule(rule, **options)
            verdict: dict[str, Any] = {name: getattr(found, name) for name in CRITERIA}
        except Exception as error:  # whatever a user's rule raises is kept and shown beside its results
            verdict = {"problem": describe_error(error)}
        _JUDGED[key] = json.dumps(verdict)
    return _JUDGED[key]


def format_markdown(audits: Mapping[str, Audit]) -> str:
    """Write one table for each criterion: the verdict, the paper's, and the evidence. ≠ marks where the two differ."""
    parts = []
    for criterion, title in TITLES.items():
        lines = [f"### {title}", "", "| rule | audit | paper | | evidence |", "|---|---|---|---|---|"]
        for name, found in audits.items():
            both = getattr(found, criterion), getattr(found.paper, criterion, None)
            differs = "≠" if None not in both and both[0] != both[1] else ""
            ours, theirs = (format_verdicts([verdict]) for verdict in both)
            lines.append(f"| `{name}` | {ours} | {theirs} | {differs} | {found.facts['evidence'][criterion]} |")
        parts.append("\n".join(lines))
    return "\n\n".join(parts)
