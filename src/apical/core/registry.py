"""The registry of rules: their names, their options, and `make`, which builds a learner by name."""

import difflib
import inspect
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import nn

from apical.core.losses import LossFunction
from apical.core.recurrent import Elman
from apical.errors import ApicalError, UnsupportedError

if TYPE_CHECKING:
    from apical.core.learner import Learner

RULES: dict[str, type["Learner"]] = {}
"""Every rule's class by its name."""


def rule_names() -> list[str]:
    """Return every name that `make` takes. A default variant has the short name: `dll`, not `dll:paper`."""
    return [
        name if variant == variants[0] else f"{name}:{variant}"
        for name, rule in RULES.items()
        for variants in [rule.VARIANTS or ("",)]
        for variant in variants
    ]


def resolve(name: str) -> tuple[type["Learner"], dict[str, Any]]:
    """Return the class and the options of a rule's name, `NAME` or `NAME:VARIANT`."""
    if not isinstance(name, str):
        raise UnsupportedError(
            f"a rule is given by its name, not by {name!r}; the rules are {', '.join(rule_names())}."
        )
    base, _, variant = name.partition(":")
    rule = RULES.get(base)
    if rule is None or (variant and variant not in rule.VARIANTS) or name.endswith(":"):
        own = [known for known in rule_names() if known.startswith(f"{base}:")]
        near = difflib.get_close_matches(name, own if rule else [*RULES, *rule_names()], n=1)
        near = near or ([base] if rule else [])
        hint = f"; did you mean {near[0]!r}? " if near else ". "
        raise ApicalError(f"unknown rule {name!r}{hint}The rules are {', '.join(rule_names())}.")
    return rule, {rule.VARIANT: variant} if variant else {}


def options_of(rule: type["Learner"]) -> dict[str, Any]:
    """Return a rule's own options and their defaults, without the options that all rules have."""
    common = {"self", "model", "input_shape", "loss", "label_smoothing"}
    return {
        name: parameter.default
        for name, parameter in inspect.signature(rule).parameters.items()
        if name not in common and parameter.kind in (parameter.KEYWORD_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    }


def make(
    name: str,
    model: nn.Sequential | Elman,
    *,
    input_shape: tuple[int, ...] | None = None,
    loss: str | LossFunction = "cross_entropy",
    label_smoothing: float = 0.0,
    **options: Any,
) -> "Learner":
    """Build a learner by the name of its rule.

    >>> make("dll:kolen-pollack", nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))).name
    'dll:kolen-pollack'
    """
    check_options(name, options)
    rule, chosen = resolve(name)
    return rule(model, input_shape=input_shape, loss=loss, label_smoothing=label_smoothing, **{**chosen, **options})


def check_options(name: str, options: Mapping[str, Any]) -> None:
    """Check that the rule of this name has these options."""
    rule, chosen = resolve(name)
    known = options_of(rule)
    for option in options:
        if option not in known:
            works = ", ".join(known) if known else "none"
            raise ApicalError(f"rule {name!r} has no option {option!r}; its options: {works}.")
        if options[option] is None and inspect.signature(rule).parameters[option].annotation in (int, float):
            raise ApicalError(f"{option} is None, but must be a number, such as its default {known[option]!r}.")
        if option in chosen and options[option] != chosen[option]:
            raise ApicalError(f"rule {name!r} already says {option}={chosen[option]!r}; drop one of the two.")
