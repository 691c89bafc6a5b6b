"""What the cases share: how a case is listed, and a rule that sends an error down from layer to layer."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

import apical
from apical import Learner, Update

Rule = type[Learner]
Kind = TypeVar("Kind", bound=Rule)


@dataclass(frozen=True)
class Case:
    """A rule, and what the audit owes it.

    Attributes:
        rule: The learner's class; its docstring says in a line what it does.
        breaks: The criterion that a cheat breaks ("c1", "c2" or "c3"); empty for an honest rule.
        keeps: The criteria that an honest rule keeps.
        plain: Whether a cheat is made of plain torch operations, so that ✗ is owed, not just anything but ✓.
    """

    rule: Rule
    breaks: str = ""
    keeps: tuple[str, ...] = ()
    plain: bool = False

    @property
    def name(self) -> str:
        return self.rule.__name__

    @property
    def how(self) -> str:
        """The first line of the rule's docstring."""
        return (self.rule.__doc__ or "").strip().splitlines()[0]


CASES: list[Case] = []


def cheat(breaks: str, *, plain: bool = True) -> Callable[[Kind], Kind]:
    """List a rule that breaks a criterion."""

    def add(rule: Kind) -> Kind:
        CASES.append(Case(rule, breaks=breaks, plain=plain))
        return rule

    return add


def honest(*keeps: str) -> Callable[[Kind], Kind]:
    """List a rule that keeps these criteria."""

    def add(rule: Kind) -> Kind:
        CASES.append(Case(rule, keeps=keeps))
        return rule

    return add


class Descent(Learner):
    """An error goes down from layer to layer, through the weights that `carry` takes: backpropagation if they are W."""

    def carry(self, i: int, w: Tensor, u: Tensor, delta: Tensor, state: Any) -> Tensor:
        """Return the error at layer i's input u, given δ at its drive. `w` is the layer's W, (outputs, inputs)."""
        return delta @ self.disguise(w)

    def disguise(self, w: Tensor) -> Tensor:
        """Return W by a detour."""
        raise NotImplementedError

    def update(self, params: Any, state: Any, x: Tensor, y: Tensor, noise: Any) -> Update:
        trace = self.network.forward(params, x, noise)
        loss, xi = self.loss.start(trace.output, y)
        grads: dict[str, Tensor] = {}
        for i, layer in reversed(list(enumerate(self.network.layers))):
            u, pullback = trace.inputs[i], trace.pullbacks[i]
            assert pullback is not None
            delta = pullback(xi)
            grads |= layer.gradients(u, delta, self.trainable)
            if i:
                xi = self.carry(i, params[layer.weight], u, delta, state)
        return Update(grads, {}, loss, trace.output)


class Feedback(Descent):
    """Feedback alignment: `self.b[i]` are fixed random weights of the shape of layer i's W."""

    def __init__(self, *args: Any, **common: Any) -> None:
        super().__init__(*args, **common)
        generator = torch.Generator().manual_seed(7)
        self.b = [torch.randn(w.shape, generator=generator).to(w) * 0.5 for w in self.forward_weights]

    def carry(self, i: int, w: Tensor, u: Tensor, delta: Tensor, state: Any) -> Tensor:
        return delta @ self.b[i]


class OwnErrors(Learner):
    """Each hidden layer has an error of its own, which `own_error` computes; the last layer has the loss's."""

    def __init__(self, *args: Any, **common: Any) -> None:
        super().__init__(*args, **common)
        generator = torch.Generator().manual_seed(7)
        classes = len(self.forward_weights[-1])
        self.b = [torch.randn(classes, len(w), generator=generator).to(w) for w in self.forward_weights]

    def own_error(self, i: int, a: Tensor, y: Tensor, state: Any) -> Tensor:
        """Return the error at layer i's activity; here a random one for each class, as in DRTP."""
        return self.b[i][y]

    def update(self, params: Any, state: Any, x: Tensor, y: Tensor, noise: Any) -> Update:
        u, grads = self.network.prefix(x, noise), {}
        for i, layer in enumerate(self.network.layers):
            a, pullback = layer.vjp(params, u, noise)
            if i < len(self.network) - 1:
                xi = self.own_error(i, a, y, state)
            else:
                loss, xi = self.loss.start(a, y)
            grads |= layer.gradients(u, pullback(xi), self.trainable)
            u = a
        return Update(grads, {}, loss, u)


def build_case(rule: Rule) -> tuple[Learner, Tensor, Tensor]:
    """Build a learner on a small network of three layers, and a batch of eight examples for it."""
    generator = torch.Generator().manual_seed(3)
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.5)
    return rule(model), torch.rand(8, 6, generator=generator), torch.arange(8) % 3


def audit_case(rule: Rule) -> apical.Audit:
    """Audit a rule on the network of `build_case`."""
    return apical.audit(*build_case(rule))


def format_cases() -> str:
    """Write all cases as the table of docs/audit-cases.md."""
    lines = ["| case | owed | what it does |", "|---|---|---|"]
    for case in CASES:
        keeps = ", ".join(name.upper() for name in case.keeps)
        owed = f"✓ on {keeps}" if keeps else f"{'✗' if case.plain else '✗ or ?'} on {case.breaks.upper()}"
        lines.append(f"| `{case.name}` | {owed} | {case.how} |")
    return "\n".join(lines)
