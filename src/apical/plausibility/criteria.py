"""The three criteria as definitions of what was measured. docs/audit.md argues for them.

C1  No weights are transported: none that carry activity one way are applied the other way, in any form, to
    something that depends on the target, with a result that changes other weights.
C2  No error skips a layer: whatever the target's influence on a layer's update passed above that layer, it came
    down from there over at least one synapse for every layer. What arrives otherwise is a global signal.
C3  No update waits: it needs nothing from the layers above, and each neuron's activity is computed once.
"""

from typing import Any, NamedTuple

Facts = dict[str, Any]


class Verdict(NamedTuple):
    """Whether a criterion is met, and the fact that decides it, in a sentence."""

    met: bool
    evidence: str


def c1(layers: list[Facts], transport: list[Facts]) -> Verdict:
    if not transport:
        return Verdict(True, "no weights are applied in both directions")
    first, *others = dict.fromkeys(found["weight"] for found in transport)
    operation, line = transport[0]["operation"], transport[0]["line"]
    whose = f"{first} and {len(others)} more" if others else first
    return Verdict(False, f"{whose} applied against their direction, by {operation} in {line.partition(':')[0]}")


def c2(layers: list[Facts], transport: list[Facts]) -> Verdict:
    for layer in layers:
        if layer["error"]["from"] == "afar":
            source, hops = layer["waits_for"][-1], layer["error"]["hops"]
            way = f"over {_count(hops, 'synapse')}" if hops else "as one number for all"
            return Verdict(False, f"the error of layer {source} comes to layer {layer['layer']} {way}")
    if all(layer["error"]["from"] != "above" for layer in layers):
        return Verdict(True, "each layer has an error of its own, or none")
    most = max(layer["error"]["hops"] or 0 for layer in layers)
    return Verdict(True, f"errors come from the next layer up, over {_count(most, 'synapse')} at most in all")


def c3(layers: list[Facts], transport: list[Facts]) -> Verdict:
    reasons = [
        f"layer {layer['layer']} waits for {' and '.join(layer['waits_for'])}" for layer in layers if layer["waits_for"]
    ][:1]
    most = max(layer["activity"]["computed"] for layer in layers)
    if most > 1:
        reasons.append(f"activity is computed {most} times")
    return Verdict(not reasons, "; ".join(reasons) or "activity is computed once, and no layer waits for another")


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'s' if number != 1 else ''}"


CRITERIA = {"c1": c1, "c2": c2, "c3": c3}
