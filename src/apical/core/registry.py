"""The registry of rules: their names, their options, and `make`, which builds a learner by name."""

import difflib
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from torch import nn

from apical.core.losses import LossFunction
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
        near = difflib.get_close_matches(name.lower(), own if rule else [*RULES, *rule_names()], n=1)
        near = near or ([base] if rule else [])
        hint = f"; did you mean {near[0]!r}? " if near else ". "
        raise ApicalError(f"unknown rule {name!r}{hint}The rules are {', '.join(rule_names())}.")
    return rule, {rule.VARIANT: variant} if variant else {}


def describe_general_rules() -> str:
    """Return which rules train any module, for errors that refuse one."""
    names = [name for name, rule in RULES.items() if "TRANSPORT" in vars(rule)]
    return f"{', '.join(names[:-1])} and {names[-1]} take any module"


def options_of(rule: type["Learner"]) -> dict[str, Any]:
    """Return a rule's own options and their defaults, without the options that all rules have."""
    common = {"self", "model", "input_shape", "loss", "label_smoothing", "example", "output"}
    return {
        name: parameter.default
        for name, parameter in inspect.signature(rule).parameters.items()
        if name not in common and parameter.kind in (parameter.KEYWORD_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    }


def record_options(init: Callable[..., None]) -> Callable[..., None]:
    """Wrap a rule's `__init__` so that the learner knows the options that it was created with."""
    signature = inspect.signature(init)

    @functools.wraps(init)
    def init_and_record(self: Any, *args: Any, **keywords: Any) -> None:
        if "given_options" not in self.__dict__:  # the first call is that of the rule's own class
            given, known = signature.bind(self, *args, **keywords).arguments, options_of(type(self))
            self.given_options = {name: value for name, value in given.items() if name in known}
        init(self, *args, **keywords)

    return init_and_record


def make(
    name: str,
    model: nn.Module,
    *,
    input_shape: tuple[int, ...] | None = None,
    loss: str | LossFunction = "cross_entropy",
    label_smoothing: float = 0.0,
    example: Any = None,
    output: str | int | None = None,
    **options: Any,
) -> "Learner":
    """Build a learner by the name of its rule.

    `readout`, `bp`, `fa`, `sign` and `dll` take any module, all other rules an `nn.Sequential` or an `apical.Elman`. For a
    model that multiplies parameters in its own code, `example` is an input on which it is run once, to see what it does
    with them: a tensor, a tuple of arguments or a dictionary of keywords. `output` is the field or the place of the tensor
    that the loss takes, if the model returns more than one, such as "logits".

    >>> make("dll:kolen-pollack", nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))).name
    'dll:kolen-pollack'
    """
    check_options(name, options)
    rule, chosen = resolve(name)
    given = {key: value for key, value in {"example": example, "output": output}.items() if value is not None}
    for key in given:
        if key not in inspect.signature(rule).parameters:
            raise ApicalError(f"rule {name!r} reads its network as layers and takes no {key}; leave it out.")
    common: dict[str, Any] = {"input_shape": input_shape, "loss": loss, "label_smoothing": label_smoothing}
    network: Any = model  # each rule says itself what it takes
    return rule(network, **common, **given, **{**chosen, **options})


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
