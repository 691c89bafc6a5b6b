"""Weight transport: rules that cheat are caught in whatever way they do it; rules that do not are not accused.

Every rule here is written as a user would write one; all but the carrying of the error is the same.
"""

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor, nn

import apical
from apical import Learner, Update
from apical.plausibility.judge import STEPS
from apical.plausibility.watching import watch
from apical.rules.hebbian import compute_second_moment
from cases import mostly_slow
from strategies import Case, dense_networks, hidden_networks, share_of_examples

pytestmark = pytest.mark.no_cover  # other tests run these lines, too, and coverage doubles the time


class Descent(Learner):
    """An error goes down from layer to layer; `back` says how."""

    def back(self, i: int, w: Tensor, state: dict[str, Tensor], u: Tensor, delta: Tensor) -> Tensor:
        raise NotImplementedError

    def adjoint(self, i: int, w: Tensor, u: Tensor, delta: Tensor) -> Tensor:
        return self.network.layers[i].synapse.adjoint(w, delta, u.shape)

    def update(self, params: Any, state: Any, x: Tensor, y: Tensor, noise: Any) -> Update:
        trace = self.network.forward(params, x, noise)
        loss, xi = self.loss.start(trace.output, y)
        grads: dict[str, Tensor] = {}
        for i, layer in reversed(list(enumerate(self.network.layers))):
            u, pullback = trace.inputs[i], trace.pullbacks[i]
            delta = pullback(xi)
            grads |= layer.gradients(u, delta, self.trainable)
            if i:
                xi = self.back(i, params[layer.weight], state, u, delta)
        return Update(grads, {}, loss, trace.output)


# Cheats that make a copy of W in some disguise, and use it as bp would.

DISGUISES: dict[str, Callable[[Tensor], Tensor]] = {
    "clone": lambda w: w.clone(),
    "detached data": lambda w: w.data.detach(),
    "reshape": lambda w: w.flatten().contiguous().view(-1, 1).reshape(w.shape),
    "transposed twice": lambda w: w.flatten(1).T.contiguous().T.reshape(w.shape),
    "numpy": lambda w: torch.from_numpy(w.detach().numpy()),
    "numpy copy": lambda w: torch.from_numpy(w.detach().numpy().copy()),
    "list": lambda w: torch.tensor(w.tolist(), dtype=w.dtype),
    "sign": lambda w: w.sign(),
    "sign by comparison": lambda w: torch.where(w > 0, 0.1, -0.1).to(w.dtype),
    "scaled": lambda w: -3 * w,
    "noisy": lambda w: w + 0.1 * torch.randn_like(w),
    "rounded": lambda w: (w * 8).round() / 8,
    "half precision": lambda w: w.to(torch.bfloat16).to(w.dtype),
    "cat and split": lambda w: torch.cat([torch.zeros_like(w), w]).chunk(2)[1],
    "written in place": lambda w: torch.zeros_like(w).copy_(w),
    "index and back": lambda w: w[torch.arange(len(w)).flip(0)].flip(0),
    "product with one": lambda w: (torch.eye(len(w), dtype=w.dtype) @ w.flatten(1)).view(w.shape),
    "vmap": lambda w: torch.vmap(lambda row: 2 * row)(w),
    "sparse mask": lambda w: w * (torch.rand_like(w) > 0.2),
}


def disguised(change: Callable[[Tensor], Tensor]) -> type[Descent]:
    class Disguised(Descent):
        def back(self, i: int, w: Tensor, state: dict[str, Tensor], u: Tensor, delta: Tensor) -> Tensor:
            return self.adjoint(i, change(w), u, delta)

    return Disguised


# Cheats with an operation of their own, for dense layers of two-dimensional input.


class Linear(torch.autograd.Function):
    """A layer whose derivative is written by hand."""

    @staticmethod
    def forward(ctx: Any, u: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(w)
        return u @ w.T

    @staticmethod
    def backward(ctx: Any, e: Tensor) -> tuple[Tensor, None]:
        (w,) = ctx.saved_tensors
        return e.mm(w), None


def by_function(u: Tensor, w: Tensor, e: Tensor) -> Tensor:
    with torch.enable_grad():
        at = u.detach().requires_grad_()
        return torch.autograd.grad(Linear.apply(at, w.detach()), at, e)[0]


def by_autograd(u: Tensor, w: Tensor, e: Tensor) -> Tensor:
    with torch.enable_grad():
        at = u.detach().requires_grad_()
        return torch.autograd.grad((F.linear(at, w.detach()) * e).sum(), at)[0]


def in_inference(u: Tensor, w: Tensor, e: Tensor) -> Tensor:
    with torch.inference_mode():
        down = F.linear(e, w.t())
    return down.clone()


OPERATIONS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "einsum": lambda u, w, e: torch.einsum("no,oi->ni", e, w),
    "einsum of a transpose": lambda u, w, e: torch.einsum("io,no->ni", w.T.contiguous(), e),
    "linear": lambda u, w, e: F.linear(e, w.t()),
    "multiplied and summed": lambda u, w, e: (e.unsqueeze(2) * w).sum(1),
    "bmm": lambda u, w, e: torch.bmm(e.unsqueeze(1), w.expand(len(e), *w.shape)).squeeze(1),
    "baddbmm": lambda u, w, e: torch.baddbmm(
        u.unsqueeze(1), e.unsqueeze(1), w.expand(len(e), *w.shape), beta=0.0
    ).squeeze(1),
    "transposed result": lambda u, w, e: (w.T @ e.T).T,
    "one example after another": lambda u, w, e: torch.stack([w.T.mv(row) for row in e]),
    "vjp": lambda u, w, e: torch.func.vjp(lambda u: u @ w.T, u)[1](e)[0],
    "autograd": by_autograd,
    "autograd function": by_function,
    "inference mode": in_inference,
    "convolution": lambda u, w, e: F.conv1d(e.unsqueeze(2), w.T.unsqueeze(2)).squeeze(2),
    "tensordot": lambda u, w, e: torch.tensordot(e, w, dims=([1], [0])),
    "row by row": lambda u, w, e: sum((e[:, o : o + 1] * w[o] for o in range(len(w))), start=torch.zeros_like(u)),
}


def operated(operation: Callable[[Tensor, Tensor, Tensor], Tensor]) -> type[Descent]:
    class Operated(Descent):
        def back(self, i: int, w: Tensor, state: dict[str, Tensor], u: Tensor, delta: Tensor) -> Tensor:
            return operation(u, w, delta)

    return Operated


# Cheats that do it behind the scenes.


class WholeAutograd(Learner):
    """Backpropagation as everybody writes it."""

    def update(self, params: Any, state: Any, x: Tensor, y: Tensor, noise: Any) -> Update:
        with torch.enable_grad():
            output = self.network.predict(params, x, noise)
            loss = self.loss(output, y).mean()
            grads = torch.autograd.grad(loss, list(params.values()))
        return Update(dict(zip(params, grads, strict=True)), {}, loss.detach(), output.detach())


class WholeFunc(Learner):
    def update(self, params: Any, state: Any, x: Tensor, y: Tensor, noise: Any) -> Update:
        def loss(params: Any) -> tuple[Tensor, Tensor]:
            output = self.network.predict(params, x, noise)
            return self.loss(output, y).mean(), output

        grads, (value, output) = torch.func.grad_and_value(loss, has_aux=True)(dict(params))
        return Update(grads, {}, value, output)


class Refreshed(Descent):
    """Θ is a buffer that gets W's value at the end of every update."""

    def __init__(self, *args: Any, **common: Any) -> None:
        super().__init__(*args, **common)
        for i, w in enumerate(self.forward_weights):
            self.register_buffer(f"theta{i}", torch.randn_like(w))

    def back(self, i: int, w: Tensor, state: dict[str, Tensor], u: Tensor, delta: Tensor) -> Tensor:
        return self.adjoint(i, state[f"theta{i}"], u, delta)

    def update(self, params: Any, state: Any, x: Tensor, y: Tensor, noise: Any) -> Update:
        update = super().update(params, state, x, y, noise)
        copies = {f"theta{i}": params[layer.weight].clone() for i, layer in enumerate(self.network.layers)}
        return update._replace(state=copies)


class TwoBatchesLate(Refreshed):
    """Θ gets the copy of W that was made a batch before."""

    def __init__(self, *args: Any, **common: Any) -> None:
        super().__init__(*args, **common)
        for i, w in enumerate(self.forward_weights):
            self.register_buffer(f"waiting{i}", torch.randn_like(w))

    def update(self, params: Any, state: Any, x: Tensor, y: Tensor, noise: Any) -> Update:
        update = super().update(params, state, x, y, noise)
        late = {f"theta{i}": state[f"waiting{i}"].clone() for i in range(len(self.network))}
        waiting = {f"waiting{i}": update.state[f"theta{i}"] for i in range(len(self.network))}
        return update._replace(state={**late, **waiting})


class CopiedAfterTheStep(Refreshed):
    def update(self, params: Any, state: Any, x: Tensor, y: Tensor, noise: Any) -> Update:
        return Descent.update(self, params, state, x, y, noise)

    def step(self, x: Tensor, y: Tensor, optim: torch.optim.Optimizer) -> apical.Credit:
        credit = super().step(x, y, optim)
        with torch.no_grad():
            for i, w in enumerate(self.forward_weights):
                getattr(self, f"theta{i}").copy_(w)
        return credit


class Attribute(Descent):
    """A copy that is neither a buffer nor a parameter."""

    def back(self, i: int, w: Tensor, state: dict[str, Tensor], u: Tensor, delta: Tensor) -> Tensor:
        kept = getattr(self, "kept", {})
        self.kept = {**kept, i: w.clone()}
        return self.adjoint(i, kept.get(i, torch.randn_like(w)), u, delta)


class PulledTowardsW(Refreshed):
    """Θ is a parameter whose gradient is Θ − W."""

    def __init__(self, *args: Any, **common: Any) -> None:
        Descent.__init__(self, *args, **common)
        self.theta = nn.ParameterList([nn.Parameter(torch.randn_like(w)) for w in self.forward_weights])

    def back(self, i: int, w: Tensor, state: dict[str, Tensor], u: Tensor, delta: Tensor) -> Tensor:
        return self.adjoint(i, self.theta[i].detach(), u, delta)

    def update(self, params: Any, state: Any, x: Tensor, y: Tensor, noise: Any) -> Update:
        update = Descent.update(self, params, state, x, y, noise)
        pull = {
            f"theta.{i}": params[f"theta.{i}"] - params[layer.weight] for i, layer in enumerate(self.network.layers)
        }
        return update._replace(grads={**update.grads, **pull})

    def param_groups(self, lr: float, **options: Any) -> list[dict[str, Any]]:
        groups = super().param_groups(lr, **options)
        return [*groups, *self._groups(lr, options, theta=[f"theta.{i}" for i in range(len(self.network))])]


class SharedMemory(Descent):
    """Θ is another parameter on W's own memory."""

    def __init__(self, *args: Any, **common: Any) -> None:
        super().__init__(*args, **common)
        self.theta = nn.ParameterList([nn.Parameter(w.data, requires_grad=False) for w in self.forward_weights])

    def back(self, i: int, w: Tensor, state: dict[str, Tensor], u: Tensor, delta: Tensor) -> Tensor:
        return self.adjoint(i, self.theta[i], u, delta)


class JumpThroughAll(Learner):
    """The output's error through the product of all weights above, for dense layers."""

    def update(self, params: Any, state: Any, x: Tensor, y: Tensor, noise: Any) -> Update:
        trace = self.network.forward(params, x, noise)
        loss, xi = self.loss.start(trace.output, y)
        grads, path = {}, None
        for i, layer in reversed(list(enumerate(self.network.layers))):
            u, pullback = trace.inputs[i], trace.pullbacks[i]
            delta = pullback(xi if path is None else xi @ path)
            grads |= layer.gradients(u, delta, self.trainable)
            w = params[layer.weight]
            path = w if path is None else path @ w
        return Update(grads, {}, loss, trace.output)


class Jacobians(Learner):
    """Each example's Jacobian is made on the way up; the error meets the product at the end. For tanh MLPs."""

    def update(self, params: Any, state: Any, x: Tensor, y: Tensor, noise: Any) -> Update:
        trace = self.network.forward(params, x, noise)
        loss, xi = self.loss.start(trace.output, y)
        top = self.network.layers[-1]
        grads, path = (
            dict(top.gradients(trace.inputs[-1], xi, self.trainable)),
            params[top.weight].expand(len(x), -1, -1),
        )
        for i in reversed(range(len(self.network) - 1)):
            slope = 1 - trace.inputs[i + 1].square()
            path = path * slope.unsqueeze(1)
            delta = torch.bmm(xi.unsqueeze(1), path).squeeze(1)
            layer = self.network.layers[i]
            grads |= layer.gradients(trace.inputs[i], delta, self.trainable)
            path = path @ params[layer.weight]
        return Update(grads, {}, loss, trace.output)


HIDDEN = [
    *(WholeAutograd, WholeFunc, Refreshed, TwoBatchesLate, CopiedAfterTheStep, Attribute),
    *(PulledTowardsW, SharedMemory),
]


# Honest rules.


class FixedFeedback(Descent):
    """Feedback alignment; B lies in a plain list."""

    def __init__(self, *args: Any, **common: Any) -> None:
        super().__init__(*args, **common)
        self.b = [torch.randn_like(w) for w in self.forward_weights]

    def back(self, i: int, w: Tensor, state: dict[str, Tensor], u: Tensor, delta: Tensor) -> Tensor:
        return self.adjoint(i, self.b[i], u, delta)


class StartsEqual(FixedFeedback):
    """B equals W when the learner is built, and never again."""

    def __init__(self, *args: Any, **common: Any) -> None:
        super().__init__(*args, **common)
        self.b = [w.detach().clone() for w in self.forward_weights]


class Mirrored(Refreshed):
    """Kolen and Pollack's rule by hand: Θ gets W's own change and both decay; Θ never reads W."""

    def update(self, params: Any, state: Any, x: Tensor, y: Tensor, noise: Any) -> Update:
        update = Descent.update(self, params, state, x, y, noise)
        new = {
            f"theta{i}": 0.99 * state[f"theta{i}"] - 0.1 * update.grads[layer.weight]
            for i, layer in enumerate(self.network.layers)
        }
        decay = {layer.weight: params[layer.weight] * 0.01 for layer in self.network.layers}
        grads = {name: g + decay.get(name, 0) for name, g in update.grads.items()}
        return update._replace(grads=grads, state=new)


class WeightMirror(Refreshed):
    """Θ learns from noise: what a layer answers to it, times the noise (Akrout et al. 2019)."""

    def draw(self, x: Tensor, generator: torch.Generator | None = None) -> dict[str, Tensor]:
        shapes = self.network.shapes(x.shape[1:]).inputs
        probes = {f"probe{i}": torch.randn(len(x), *s, dtype=x.dtype) for i, s in enumerate(shapes)}
        return {**super().draw(x, generator), **probes}

    def update(self, params: Any, state: Any, x: Tensor, y: Tensor, noise: Any) -> Update:
        update, new = Descent.update(self, params, state, x, y, noise), {}
        for i, layer in enumerate(self.network.layers):
            probe, w = noise[f"probe{i}"], params[layer.weight]
            answer = layer.synapse.forward(w, probe)
            new[f"theta{i}"] = 0.9 * state[f"theta{i}"] + 0.1 * layer.synapse.outer(probe, answer)
        return update._replace(state=new)


class SameLength(FixedFeedback):
    """B is scaled to W's length, one number for each layer; gradients are clipped to one length for all."""

    def back(self, i: int, w: Tensor, state: dict[str, Tensor], u: Tensor, delta: Tensor) -> Tensor:
        return self.adjoint(i, self.b[i] * (w.norm() / self.b[i].norm()), u, delta)

    def update(self, params: Any, state: Any, x: Tensor, y: Tensor, noise: Any) -> Update:
        update = super().update(params, state, x, y, noise)
        total = torch.stack([g.norm() for g in update.grads.values()]).norm()
        return update._replace(grads={n: g / (1 + total) for n, g in update.grads.items()})


class ErrorComesInAgain(Learner):
    """The output's error, through fixed weights, joins the input of a second pass up (Dellaferrera & Kreiman 2022)."""

    def update(self, params: Any, state: Any, x: Tensor, y: Tensor, noise: Any) -> Update:
        first = self.network.forward(params, x, noise)
        loss, xi = self.loss.start(first.output, y)
        feedback = torch.linspace(-1, 1, xi[0].numel() * x[0].numel(), dtype=x.dtype)
        pushed = x + (xi.flatten(1) @ feedback.view(xi[0].numel(), -1)).view(x.shape)
        second = self.network.forward(params, pushed, noise)
        grads = dict(self.network.layers[-1].gradients(second.inputs[-1], first.pullbacks[-1](xi), self.trainable))
        for i, layer in enumerate(self.network.layers[:-1]):
            changed = first.pullbacks[i](second.inputs[i + 1] - first.inputs[i + 1])
            grads |= layer.gradients(second.inputs[i], changed, self.trainable)
        return Update(grads, {}, loss, first.output)


class ForwardGradient(Learner):
    """The loss's slope along a random direction of all weights, by forward-mode derivatives (Baydin et al. 2022)."""

    def draw(self, x: Tensor, generator: torch.Generator | None = None) -> dict[str, Tensor]:
        return {name: torch.randn(p.shape, dtype=x.dtype) for name, p in self.params().items()}

    def update(self, params: Any, state: Any, x: Tensor, y: Tensor, noise: Any) -> Update:
        held = {name: p.detach() for name, p in params.items()}
        along = {name: noise[name] for name in held}

        def loss(params: Any) -> Tensor:
            return self.loss(self.network.predict(params, x, {}), y).mean()

        value, slope = torch.func.jvp(loss, (held,), (along,))
        output = self.network.predict(held, x, {})
        return Update({name: slope * e for name, e in along.items()}, {}, value, output)


class LabelRows(Learner):
    """Each class has a random pattern for each layer, which is picked by the label."""

    def __init__(self, *args: Any, **common: Any) -> None:
        super().__init__(*args, **common)
        shapes = self.network.shapes(common.get("input_shape"))
        self.rows = [torch.randn(8, *s).to(self.forward_weights[0]) for s in shapes.inputs[1:]]

    def update(self, params: Any, state: Any, x: Tensor, y: Tensor, noise: Any) -> Update:
        trace = self.network.forward(params, x, noise)
        loss, xi = self.loss.start(trace.output, y)
        errors = [*(rows[y] for rows in self.rows), xi]
        grads: dict[str, Tensor] = {}
        for i, layer in enumerate(self.network.layers):
            grads |= layer.gradients(trace.inputs[i], trace.pullbacks[i](errors[i]), self.trainable)
        return Update(grads, {}, loss, trace.output)


class ActiveWithoutTarget(LabelRows):
    """Wᵀ brings a layer's activity, which knows no target, to the layer below, and changes its weights."""

    def update(self, params: Any, state: Any, x: Tensor, y: Tensor, noise: Any) -> Update:
        update = super().update(params, state, x, y, noise)
        trace, grads = self.network.forward(params, x, noise), dict(update.grads)
        for i, layer in list(enumerate(self.network.layers))[1:]:
            u, below = trace.inputs[i], self.network.layers[i - 1]
            seen = layer.synapse.adjoint(params[layer.weight], layer.forward(params, u), u.shape)
            hint = below.synapse.outer(trace.inputs[i - 1], trace.pullbacks[i - 1](seen))
            grads[below.weight] = grads[below.weight] + hint
        return update._replace(grads=grads)


class OwnWeightsOnly(LabelRows):
    """Each layer's error, through its own weights and back, changes those weights and no others, as in Oja's rule."""

    def update(self, params: Any, state: Any, x: Tensor, y: Tensor, noise: Any) -> Update:
        update = super().update(params, state, x, y, noise)
        trace, grads = self.network.forward(params, x, noise), dict(update.grads)
        for i, layer in list(enumerate(self.network.layers))[:-1]:
            w, delta = params[layer.weight], trace.pullbacks[i](self.rows[i][y])
            m = compute_second_moment(layer.synapse, delta)
            grads[layer.weight] = grads[layer.weight] + (m @ w.reshape(*m.shape[:2], -1)).reshape(w.shape)
        return update._replace(grads=grads)


class SoftBounds(LabelRows):
    """Each weight's change is scaled by the weight itself, and by the length of its neuron's weights."""

    def update(self, params: Any, state: Any, x: Tensor, y: Tensor, noise: Any) -> Update:
        update = super().update(params, state, x, y, noise)
        grads = dict(update.grads)
        for layer in self.network.layers:
            w = params[layer.weight]
            length = w.flatten(1).norm(dim=1).view(-1, *[1] * (w.ndim - 1))
            grads[layer.weight] = grads[layer.weight] * w * (1 - w) / (1 + length)
        return update._replace(grads=grads)


class LearnsInTurns(Learner):
    """One layer a batch, chosen by the rule's own count, from a target for it that never passed any weights."""

    def update(self, params: Any, state: Any, x: Tensor, y: Tensor, noise: Any) -> Update:
        trace = self.network.forward(params, x, noise)
        loss, xi = self.loss.start(trace.output, y)
        grads = dict(self.network.layers[-1].gradients(trace.inputs[-1], trace.pullbacks[-1](xi), self.trainable))
        turn = getattr(self, "turn", 0) % max(1, len(self.network) - 1)
        self.turn = turn + 1
        a = trace.inputs[turn + 1]
        wanted = torch.cos(y.to(a.dtype)).view(-1, *[1] * (a.ndim - 1)) - a
        layer = self.network.layers[turn]
        return Update(
            {**layer.gradients(trace.inputs[turn], trace.pullbacks[turn](wanted), self.trainable), **grads},
            {},
            loss,
            trace.output,
        )


class Inverses(Refreshed):
    """Θ learns to give back a layer's input from its activity, by its own local error, and brings the error down."""

    def update(self, params: Any, state: Any, x: Tensor, y: Tensor, noise: Any) -> Update:
        update = Descent.update(self, params, state, x, y, noise)
        u, new = self.network.prefix(x, noise), {}
        for i, layer in enumerate(self.network.layers):
            a, theta = layer.forward(params, u), state[f"theta{i}"]
            missed = u - layer.synapse.adjoint(theta, a, u.shape)
            new[f"theta{i}"] = theta + 0.1 * layer.synapse.outer(missed, a)
            u = layer.neuron(a, noise)
        return update._replace(state=new)


HONEST = [
    *(FixedFeedback, StartsEqual, Mirrored, WeightMirror, SameLength, ErrorComesInAgain, ForwardGradient),
    *(LabelRows, ActiveWithoutTarget, OwnWeightsOnly, SoftBounds, LearnsInTurns, Inverses),
]


CHEATS: dict[str, type[Learner]] = {
    **{name: disguised(change) for name, change in DISGUISES.items()},
    **{rule.__name__: rule for rule in HIDDEN},
}
DENSE_CHEATS = {name: operated(operation) for name, operation in OPERATIONS.items()}


class Traced(NamedTuple):
    """What the tracer alone says of C1."""

    c1: bool | None
    transport: list[dict[str, Any]]


def audited(rule: type[Learner], case: Case) -> Traced:
    tracer = watch(rule(case.model, input_shape=case.input_shape), case.x[:8], case.labels[:8], STEPS)
    transport = tracer.list_transports()
    return Traced(not transport and (None if tracer.not_followed else True), transport)


def assert_caught(rule: type[Learner], case: Case) -> None:
    """Every layer's weights but the first's are transported, and the first's are not; the line is in this file.

    A single row or column of weights may look the same from both sides, so those, and what is beyond them, are left open.
    """
    audit = audited(rule, case)
    named = {finding["weight"]: finding for finding in audit.transport}
    first, *others = [f"model.{name}" for name, p in case.model.named_parameters() if p.ndim > 1]
    sided = {w for w in others if min((p := case.model.get_parameter(w[6:])).shape[0], p[0].numel()) > 1}
    assert sided <= set(named)
    assert first not in named
    assert not (sided and audit.c1)
    for weight in sided:
        assert "test_transport.py:" in named[weight]["called"]
        if sided == set(others):
            assert set(named[weight]["reaches"]) & {first, f"{first[:-6]}bias"}


def square() -> Case:
    """All layers alike, so that no shape gives a direction away."""
    modules = [module for _ in range(3) for module in (nn.Linear(4, 4), nn.Tanh())]
    return Case(nn.Sequential(*modules, nn.Linear(4, 4)), torch.randn(3, 4), torch.tensor([0, 1, 3]))


def mixed() -> Case:
    first = nn.Conv2d(1, 3, 3, padding=1), nn.Tanh(), nn.MaxPool2d(2), nn.Conv2d(3, 3, 2, groups=3), nn.Tanh()
    model = nn.Sequential(*first, nn.Conv2d(3, 2, 1), nn.Tanh(), nn.Flatten(), nn.Linear(2, 3))
    return Case(model, torch.randn(4, 1, 4, 4), torch.tensor([0, 1, 2, 1]))


def random_networks(test: Callable[..., None]) -> Callable[..., None]:
    """Fewer than elsewhere, and without watching which lines run: an audit is long, and every cheat is also tried above."""
    return pytest.mark.no_cover(share_of_examples(0.5)(test))


QUICK = [*[*CHEATS, *DENSE_CHEATS][::3], "TwoBatchesLate", "row by row", "numpy copy", "SharedMemory"]


@pytest.mark.parametrize("cheat", mostly_slow([*CHEATS, *DENSE_CHEATS], QUICK))
def test_every_cheat_is_caught_where_all_layers_are_square(cheat: str) -> None:
    assert_caught({**CHEATS, **DENSE_CHEATS}[cheat], square())


@pytest.mark.parametrize("cheat", mostly_slow(CHEATS, ["clone", "data"]))
def test_every_cheat_is_caught_in_a_convolutional_network(cheat: str) -> None:
    assert_caught(CHEATS[cheat], mixed())


@random_networks
@given(cheat=st.sampled_from(list(CHEATS)), case=hidden_networks())
def test_a_cheat_is_caught_on_any_network(cheat: str, case: Case) -> None:
    assert_caught(CHEATS[cheat], case)


@random_networks
@given(cheat=st.sampled_from(list(DENSE_CHEATS)), case=dense_networks(min_layers=2))
def test_a_cheating_operation_is_caught_on_any_dense_network(cheat: str, case: Case) -> None:
    assert_caught(DENSE_CHEATS[cheat], case)


@pytest.mark.parametrize("cheat", ["clone", "sign", "einsum", "multiplied and summed", "row by row", "autograd"])
def test_a_single_row_of_weights_has_a_direction_too(cheat: str) -> None:
    """In the middle of the network a layer has one output, and where its weights lie beside each other that shows."""
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1), nn.Tanh(), nn.Linear(1, 3))
    case = Case(model, torch.randn(5, 4), torch.tensor([0, 1, 2, 0, 1]))
    found = audited({**CHEATS, **DENSE_CHEATS}[cheat], case).transport
    assert "model.2.weight" in {finding["weight"] for finding in found}
    honest = audited(FixedFeedback, case)
    assert honest.c1


@pytest.mark.parametrize("rule", [JumpThroughAll, Jacobians])
def test_a_product_of_weights_is_weights(rule: type[Learner]) -> None:
    assert_caught(rule, square())


@pytest.mark.parametrize("rule", HONEST)
@pytest.mark.parametrize("network", [square, mixed])
def test_an_honest_rule_is_not_accused(rule: type[Learner], network: Callable[[], Case]) -> None:
    audit = audited(rule, network())
    assert (audit.c1, audit.transport) == (True, [])


def test_a_module_that_is_imported_in_the_first_update_is_no_call_of_the_rule(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch imports some of its modules where they are first needed, and what runs then is none of the rule's work."""
    (tmp_path / "imported_late.py").write_text("import sys\n\nLINE = sys._getframe().f_lineno\n", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)

    class ImportsLate(FixedFeedback):
        def back(self, *args: Any) -> Tensor:
            importlib.import_module("imported_late")
            return super().back(*args)

    audit = audited(ImportsLate, square())
    assert (audit.c1, audit.transport) == (True, [])


@random_networks
@given(rule=st.sampled_from(HONEST), case=hidden_networks())
def test_an_honest_rule_is_not_accused_on_any_network(rule: type[Learner], case: Case) -> None:
    assume(all(w.numel() > 1 for w in case.model.parameters()))  # the length of a single weight is that weight
    audit = audited(rule, case)
    assert (audit.c1, audit.transport) == (True, [])
