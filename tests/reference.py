"""What the laws say, computed a second time by autograd alone; nothing here uses apical's own arithmetic."""

import copy
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from apical.core.wiring import unwire

PerExample = Callable[[Tensor, Tensor], Tensor]
TOLERANCE = {torch.float64: 1e-10, torch.float32: 2e-4}


def cross_entropy(smoothing: float = 0.0) -> PerExample:
    return lambda output, y: F.cross_entropy(output, y, reduction="none", label_smoothing=smoothing)


def assert_same(actual: Tensor, expected: Tensor, tolerance: float | None = None, what: str = "") -> None:
    """Equal up to a relative error of the whole tensor, in its own type."""
    assert actual.shape == expected.shape, f"{what}: {tuple(actual.shape)} for {tuple(expected.shape)}"
    tolerance = TOLERANCE.get(expected.dtype, 0.0) if tolerance is None else tolerance
    difference = float((actual.to(expected.dtype) - expected).detach().double().norm())
    scale = float(expected.detach().double().norm())
    assert difference <= tolerance * scale + tolerance * 1e-3, f"{what}: off by {difference} of {scale}"


def assert_all_same(actual: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float | None = None) -> None:
    """The same names, and the same value under each."""
    assert set(actual) == set(expected)
    for name, value in expected.items():
        assert_same(actual[name], value, tolerance, name)


def gradients(module: nn.Module) -> dict[str, Tensor]:
    """Every `.grad` there is, by parameter name."""
    return {name: p.grad for name, p in module.named_parameters() if p.grad is not None}


def credited(learner: nn.Module, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    """The gradients of one batch and nothing else."""
    learner.zero_grad()
    learner.credit(x, y)
    return {name: gradient.clone() for name, gradient in gradients(learner).items()}


def of_model(grads: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: g for name, g in grads.items() if name.startswith("model.")}


def autograd(model: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    """The gradient of a scalar in the model's parameters, by the names that they have in a learner."""
    names, params = zip(*model.named_parameters(), strict=True)
    return {f"model.{n}": g for n, g in zip(names, torch.autograd.grad(loss, params), strict=True)}


def plain(model: nn.Module) -> nn.Module:
    """A copy of the model whose modules are torch's own again: a learner changes what backward() does."""
    twin = copy.deepcopy(model)
    unwire(twin)
    return twin


def set_feedback(learner: nn.Module, weights: list[Tensor]) -> None:
    """Replace the feedback weights of every layer but the first."""
    with torch.no_grad():
        for live, weight in zip(learner.feedback_weights[1:], weights, strict=True):
            live.copy_(weight)


def leaves(model: nn.Sequential) -> Iterator[nn.Module]:
    for module in model:
        yield from leaves(module) if isinstance(module, nn.Sequential) else [module]


def stages_of(model: nn.Sequential) -> list[tuple[nn.Module | None, list[nn.Module]]]:
    """Each layer of weights with the modules up to the next one; first, with none, those before all weights."""
    groups: list[tuple[nn.Module | None, list[nn.Module]]] = [(None, [])]
    for module in leaves(model):
        if isinstance(module, nn.Linear | nn.Conv1d | nn.Conv2d):
            groups.append((module, []))
        else:
            groups[-1][1].append(module)
    return groups


class Pass(NamedTuple):
    """What a feedback rule computes: gradients of the forward parameters; each layer's input u, the error δ before
    its φ and the error ξ at its input (ξ as a descent direction, so that it has the gradient's sign reversed)."""

    grads: dict[str, Tensor]
    u: list[Tensor]
    delta: list[Tensor]
    xi: list[Tensor]


def feedback_pass(
    model: nn.Sequential, x: Tensor, y: Tensor, loss: PerExample, feedback: list[Tensor], direct: bool = False
) -> Pass:
    """A way down through given weights: `feedback[i]` serves layer i (entry 0 is not used).

    Each step is autograd of one layer alone: φ for δ, the layer for its own gradient, and the same layer with
    the feedback weight in the weight's place for ξ. `direct`: ξ_i = δ_Lᵀ B_i by hand.
    """
    model = plain(model)
    groups = stages_of(model)

    def run(stages: list[nn.Module], a: Tensor) -> Tensor:
        a = a.clone()  # in-place activations must not touch what was given
        for stage in stages:
            a = stage(a)
        return a

    u, drives = [run(groups[0][1], x).detach()], []
    for layer, phi in groups[1:]:
        drives.append(layer(u[-1]).detach().requires_grad_())
        u.append(run(phi, drives[-1]).detach())
    output = u.pop().requires_grad_()
    (gradient,) = torch.autograd.grad(loss(output, y).sum(), output)
    error = -gradient

    names = {id(p): f"model.{name}" for name, p in model.named_parameters()}
    grads: dict[str, Tensor] = {}
    deltas: list[Tensor] = [torch.empty(0)] * len(u)
    errors: list[Tensor] = [torch.empty(0)] * len(u)
    for i in reversed(range(len(u))):
        layer, phi = groups[i + 1]
        (deltas[i],) = torch.autograd.grad(run(phi, drives[i]), drives[i], error)
        for p in layer.parameters():
            (whole,) = torch.autograd.grad(layer(u[i]), p, deltas[i])
            grads[names[id(p)]] = -whole / len(x)
        if i > 0 and direct:
            flat = torch.einsum("no,ov->nv", deltas[-1].flatten(1), feedback[i])
            error = errors[i] = flat.reshape(u[i].shape)
        elif i > 0:
            error = errors[i] = downward(layer, feedback[i], u[i], deltas[i]).detach()
    return Pass(grads, u, deltas, errors)


def downward(layer: nn.Module, weight: Tensor, u: Tensor, delta: Tensor) -> Tensor:
    """What δ becomes at the layer's input when `weight` stands for the layer's own; differentiable in it."""
    at = u.detach().requires_grad_()
    layer = plain(layer)
    up = functional_call(layer, {"weight": weight}, (at,))
    (xi,) = torch.autograd.grad(up, at, delta, create_graph=True)
    return xi


def layers_of(model: nn.Sequential) -> list[nn.Module]:
    return [m for m in leaves(model) if isinstance(m, nn.Linear | nn.Conv1d | nn.Conv2d)]


def random_like(weights: list[Tensor]) -> list[Tensor]:
    """One random weight for each layer; entry 0 is there only to keep the count."""
    return [torch.randn_like(w) for w in weights]
