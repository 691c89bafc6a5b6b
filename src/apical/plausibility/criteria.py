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
    first, others = transport[0], len({f["weight"] for f in transport}) - 1
    more = f", and {others} more" if others else ""
    place = first["line"].partition(":")[0]
    return Verdict(False, f"{first['weight']}{more} against its direction: {first['operation']} in {place}")


def c2(layers: list[Facts], transport: list[Facts]) -> Verdict:
    skipped = [f for f in layers if f["error"]["from"] == "afar"]
    if skipped:
        hops, layer = skipped[0]["error"]["hops"], skipped[0]
        what = "as a global signal" if hops == 0 else f"over {hops} synapse{'s' * (hops > 1)}"
        return Verdict(False, f"layer {layer['layer']} gets its error from {layer['waits_for'][-1]} {what}")
    if any(f["error"]["from"] == "above" for f in layers):
        most = max(f["error"]["hops"] for f in layers if f["error"]["hops"] is not None)
        return Verdict(True, f"errors come from the layer above, {most} synapse{'s' * (most > 1)} at most from the target")
    return Verdict(True, "every layer has an error of its own, or none")


def c3(layers: list[Facts], transport: list[Facts]) -> Verdict:
    waiting = [f for f in layers if f["waits_for"]]
    most = max(f["activity"]["computed"] for f in layers)
    reasons = []
    if waiting:
        reasons.append(f"layer {waiting[0]['layer']} waits for {', '.join(waiting[0]['waits_for'])}")
    if most > 1:
        reasons.append(f"activity is computed {most} times")
    return Verdict(not reasons, "; ".join(reasons) or "activity is computed once, and no layer waits for another")


CRITERIA = {"c1": c1, "c2": c2, "c3": c3}
