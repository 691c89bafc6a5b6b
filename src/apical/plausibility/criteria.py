"""The three criteria: their definitions, and verdicts on them as data and as text. docs/audit.md argues for them.

C1  No weights are transported: none that carry activity one way are applied the other way, in any form, to
    something that depends on the target, with a result that changes other weights.
C2  No error skips a layer: whatever the target's influence on a layer's update passed above that layer, it came
    down from there over at least one synapse for every layer. What arrives otherwise is a global signal.
C3  No update waits: what comes down passes one layer per tick, so that no layer pauses until those above are done,
    and each neuron's activity is computed once.

`judge_c1` to `judge_c3` apply these definitions to the facts that the audit measures. Tables show the verdicts that
`python tools/verdicts.py` recorded in `verdicts.json`; a test compares them with the live audit.
"""

import json
from collections.abc import Iterable
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING, Any, NamedTuple

from apical.core.learner import Claims
from apical.core.registry import RULES
from apical.files import parse_json

if TYPE_CHECKING:
    from apical.plausibility.interventions import InterventionResult

Facts = dict[str, Any]
Verdict = tuple[bool | None, str]
"""Whether a criterion is met (None: undecided), and the fact that decides it or would, in a sentence."""


def judge_c1(layers: list[Facts], transport: list[Facts]) -> Verdict:
    if not transport:
        return True, "no weights are applied in both directions"
    first, *others = dict.fromkeys(found["weight"] for found in transport)
    whose = f"{first} and {len(others)} more" if others else first
    operation, file = transport[0]["operation"], transport[0]["line"].partition(":")[0]
    return False, f"{whose} applied against their direction, by {operation} in {file}"


def judge_c2(layers: list[Facts], transport: list[Facts]) -> Verdict:
    for layer in layers:
        if layer["error"]["from"] == "afar":
            source, hops = layer["waits_for"][-1], layer["error"]["hops"]
            way = f"over {hops} synapse{'s' * (hops > 1)}" if hops else "as one number for all"
            return False, f"the error of layer {source} comes to layer {layer['layer']} {way}"
    if all(layer["error"]["from"] != "above" for layer in layers):
        return True, "each layer has an error of its own, or none"
    most = max(layer["error"]["hops"] or 0 for layer in layers)
    return True, f"errors come from the next layer up, over {most} synapse{'s' * (most != 1)} at most in all"


def judge_c3(layers: list[Facts], transport: list[Facts]) -> Verdict:
    waiting = [layer for layer in layers if layer["waits_for"]][:1]
    reasons = [f"layer {layer['layer']} waits for {' and '.join(layer['waits_for'])}" for layer in waiting]
    most = max(layer["activity"]["computed"] for layer in layers)
    if most > 1:
        reasons.append(f"activity is computed {most} times")
    return not reasons, "; ".join(reasons) or "activity is computed once, and no layer waits for another"


CRITERIA = {"c1": judge_c1, "c2": judge_c2, "c3": judge_c3}


def combine(criterion: str, traced: Verdict, lost: list[Any], result: "InterventionResult") -> Verdict:
    """Judge a criterion by both methods: ✗ if one disproves it, ✓ if none does and the interventions confirm it, else ?."""
    met, evidence = traced
    lost = [loss for loss in lost if criterion in loss.criteria]
    outcome = result.outcomes[criterion]
    if met is False or outcome.verdict is False:
        if criterion == "c2" and met and not lost:  # such as feedback through two matrices or through interneurons
            return None, f"{outcome.reason}, but over a synapse for each; feedback weights of W's shape would decide"
        if criterion == "c2" and met and any("c1" in loss.criteria for loss in lost):  # it may join neighbours
            return None, f"{outcome.reason}, as far as it was seen; products in plain torch operations would decide"
        return False, evidence if met is False else outcome.reason
    if outcome.verdict is None:
        return None, outcome.reason
    for loss in (loss for loss in lost if loss.evades):
        return None, f"{loss.what} ({loss.operation}), by which a rule can tell that it is audited"
    if criterion == "c3" and lost and result.facts.get("firings") != 1:
        return None, "activity may be computed more than once; without values that leave torch, the tracer would tell"
    return True, outcome.reason if lost else evidence


@cache
def read_verdicts() -> dict[str, Claims]:
    """Return C1 to C3 of every built-in rule and variant, by name.

    >>> read_verdicts()["bp"]
    Claims(c1=False, c2=True, c3=False)
    """
    text = resources.files("apical.plausibility").joinpath("verdicts.json").read_text("utf-8")
    return {rule: Claims(**verdict) for rule, verdict in json.loads(text).items()}


class Judgement(NamedTuple):
    """What the audit says of a rule: C1 to C3, or why it could not measure them; neither if it never ran."""

    criteria: Claims | None = None
    problem: str = ""


def find_judgement(rule: str, stored: Iterable[str | None]) -> Judgement:
    """Return what is known of a rule: the recorded verdict if it is built in, else the last one stored with its runs.

    >>> find_judgement("bp", [])
    Judgement(criteria=Claims(c1=False, c2=True, c3=False), problem='')
    >>> find_judgement("mine", [None, '{"problem": "ValueError: too small"}'])
    Judgement(criteria=None, problem='ValueError: too small')
    """
    built_in = read_verdicts().get(rule)
    if built_in is not None:
        return Judgement(built_in)
    texts = [text for text in stored if text is not None]
    return parse_judgement(texts[-1]) if texts else Judgement()


def parse_judgement(text: str) -> Judgement:
    """Read a verdict as `judge_own_rule` writes it. Raises ValueError for any other text."""
    verdict = parse_json(text)
    if isinstance(verdict, dict) and verdict.keys() == {"c1", "c2", "c3"}:
        known = (verdict[name] for name in Claims._fields)
        return Judgement(Claims(*(None if met is None else bool(met) for met in known)))
    if isinstance(verdict, dict) and verdict.keys() == {"problem"}:
        return Judgement(problem=str(verdict["problem"]))
    raise ValueError("its verdict was altered")


def find_claims(rule: str) -> Claims | None:
    """Return what the paper says of C1 to C3, of a rule that it judges."""
    name, _, variant = rule.partition(":")
    known = RULES.get(name)
    return None if known is None or variant in known.NEW_VARIANTS else known.CLAIMS


def format_verdicts(verdicts: Iterable[bool | None] | None) -> str:
    """Write ✓, ✗ or ? for each verdict, and nothing where there is none.

    >>> format_verdicts(Claims(True, None, False))
    '✓?✗'
    """
    return "".join({True: "✓", False: "✗", None: "?"}[met] for met in verdicts or ())


def compare_with_paper(rule: str, verdict: Claims | None) -> str:
    """Return the verdict on a rule and, after ≠, what the paper says if that is something else.

    >>> compare_with_paper("dll", Claims(True, True, False)), compare_with_paper("pc", Claims(False, True, False))
    ('✓✓✗ ≠ ✓✓✓', '✗✓✗')
    """
    claims = find_claims(rule)
    pairs = zip(verdict or (), claims or (), strict=False)
    differs = any(ours not in (None, theirs) for ours, theirs in pairs)
    return format_verdicts(verdict) + (f" ≠ {format_verdicts(claims)}" if differs else "")
