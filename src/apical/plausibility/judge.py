"""`apical.audit`: watch one rule learn on one network, and judge the criteria of `criteria.py` by what was measured."""

import copy
import json
import multiprocessing
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from apical.core import registry, validation
from apical.core.learner import Claims, Learner
from apical.errors import UnsupportedError, describe_error
from apical.plausibility.copies import copy_learner, list_levels, map_examples, order_layers
from apical.plausibility.criteria import CRITERIA, Facts, combine, find_claims, format_verdicts, read_verdicts
from apical.plausibility.history import Change, Drive
from apical.plausibility.interventions import examine
from apical.plausibility.meter import measure_costs
from apical.plausibility.provenance import BATCH, INPUT, NOISE
from apical.plausibility.tracer import Tracer
from apical.plausibility.watching import watch

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
    """What was measured of a rule, and what follows for the three criteria: True, False, or None for undecided."""

    rule: str
    c1: bool | None
    c2: bool | None
    c3: bool | None
    paper: Claims | None
    facts: Facts = field(repr=False)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, as `apical audit --json` prints them for a rule."""
        paper = None if self.paper is None else self.paper._asdict()
        return {"c1": self.c1, "c2": self.c2, "c3": self.c3, "paper": paper, "facts": copy.deepcopy(self.facts)}


def audit(learner: Learner, x: Any, y: Tensor) -> Audit:
    """Watch a rule learn from one batch on its own network, and judge it. The learner itself is left as it is.

    x is what the model takes: a tensor, a tuple of arguments or a dictionary of keywords.

    >>> model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))
    >>> x, y = torch.randn(8, 4), torch.randint(0, 2, (8,))
    >>> audit(registry.make("bp", model), x, y).c1, audit(registry.make("dll", model), x, y).c1
    (False, True)
    """
    if not isinstance(learner, Learner):
        raise UnsupportedError(
            f"the audit watches a learner, not a {type(learner).__name__}; apical.make('dll', model) makes one of a model."
        )
    validation.check_batch(learner.network, learner.loss, learner.params(), x, y)
    x = dict(x) if isinstance(x, Mapping) else x
    if learner.network.is_general:
        learner = order_layers(learner, tree_map_only(Tensor, lambda t: t.detach().cpu(), x))
    result = examine(learner, x, y)
    first = map_examples(lambda t: t[:EXAMPLES], (x, y), len(y))
    x, y = tree_map_only(Tensor, lambda t: t.detach().cpu().clone(), first)
    with torch.random.fork_rng(devices=[]):
        watched = copy_learner(learner)
        costs = measure_costs(watched, x, y)
        tracer = watch(watched, x, y, STEPS)
    transport = tracer.list_transports()
    layers = [_describe_layer(tracer, i, transport) for i in range(len(learner.network))]
    traced = {name: judge(layers, transport) for name, judge in CRITERIA.items()}
    lost = tracer.not_followed
    judged = {name: combine(name, verdict, lost, result) for name, verdict in traced.items()}
    facts = {
        "evidence": {name: evidence for name, (_, evidence) in judged.items()},
        "interventions": result.facts,
        "layers": layers,
        "transport": transport,
        "passes": max(layer["activity"]["computed"] for layer in layers),
        "optimiser_steps": len(learner.phases),
        "costs": costs,
        "not_followed": [loss._asdict() for loss in lost],
    }
    paper, verdict = find_claims(learner.name), {name: met for name, (met, _) in judged.items()}
    return Audit(learner.name, **verdict, paper=paper, facts=facts)


def _describe_layer(tracer: Tracer, i: int, transport: list[Facts]) -> Facts:
    network = tracer.learner.network
    layer = network.layers[i]
    change = tracer.changes.get(layer.weight, Change())
    sources, hops = change.record.sources, change.record.hops
    weights = {source[1] for source in sources if source[0] == "weight"}
    drives = {source[1] for source in sources if source[0] == "drive"}
    levels = list_levels(network)
    above = [j for w, j in tracer.layers.items() if levels[j] > levels[i] and w in weights]
    # In a module that is no chain, such as one with residual connections, any two layers may be neighbours.
    distances = [levels[j] - levels[i] if network.tiers else 1 for j in above]
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
        "error": {"from": _locate_error(hops, distances), "hops": hops},
        "waits_for": [network.layers[j].name for j in tracer.list_waits(i)],
        "activity": {
            "computed": _count_computations(
                [d for d in tracer.drives[tracer.first_drive :] if d.layer == i], network.recurrent
            ),
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


def _count_computations(drives: list[Drive], recurrent: bool) -> int:
    """Count how often a layer's activity was computed.

    A later computation counts only if it could differ from the first one: after an optimiser step, with the target, with
    noise where the first had none (or the reverse), or from the layer's own earlier activity (which in a recurrent network
    is that of the time step before).
    """
    count = 0
    for drive in drives:
        first, sources = drives[0], drive.record.sources
        noisy = (NOISE in sources) != (NOISE in first.record.sources)
        own = not recurrent and any(source[:2] == ("drive", drive.layer) for source in sources)
        if drive is first or drive.step > first.step or drive.record.hops is not None or noisy or own:
            count += drive.states
    return count


def _count_held_states(tracer: Tracer, i: int, change: Change) -> int:
    """Count the states of a neuron that an update compares: those that it uses and that no later one was computed from."""
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
    found = {}
    for name, result in audit_rules(list(names or registry.rule_names()), model, input_shape):
        if isinstance(result, UnsupportedError):
            raise result
        found[name] = result
    return found


def audit_rules(
    names: list[str], model: Builder = build_audit_network, input_shape: tuple[int, ...] | None = None
) -> Iterator[tuple[str, Audit | UnsupportedError]]:
    """Audit rules; many of them in one process for each core. A rule that the network does not suit gives its error."""
    audit_one = partial(_audit_or_refuse, model=model, input_shape=input_shape)
    processes = min(os.cpu_count() or 1, len(names) // 4)
    if processes < 2 or "fork" not in multiprocessing.get_all_start_methods():
        yield from zip(names, map(audit_one, names), strict=True)
        return
    # Forked processes know the rules that were defined in this one, and functions that cannot be pickled.
    with multiprocessing.get_context("fork").Pool(processes, _start_worker, (audit_one,)) as pool:
        yield from zip(names, pool.imap(_audit_in_worker, names), strict=True)


_audit_one: Callable[[str], Audit | UnsupportedError]
"""What this worker does with a rule's name."""


def _start_worker(audit_one: Callable[[str], Audit | UnsupportedError]) -> None:
    global _audit_one
    _audit_one = audit_one
    torch.set_num_threads(1)


def _audit_in_worker(name: str) -> Audit | UnsupportedError:
    return _audit_one(name)


def _audit_or_refuse(name: str, model: Builder, input_shape: tuple[int, ...] | None) -> Audit | UnsupportedError:
    try:
        return audit_rule(name, model, input_shape)
    except UnsupportedError as error:
        return error


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
            ours, theirs = format_verdicts([both[0]]), format_verdicts(found.paper and [both[1]])
            lines.append(f"| `{name}` | {ours} | {theirs} | {differs} | {found.facts['evidence'][criterion]} |")
        parts.append("\n".join(lines))
    return "\n\n".join(parts)
