"""Learners that take their steps as one.

A unit is one or several learners of the same shape and rule. Stacked, their parameters are one tensor with a
leading axis over the learners, the rule runs under `torch.vmap`, and an element-wise optimiser steps all of them
at once; single, a unit is a learner as it is. Either way a learner's numbers never meet another's.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from apical.core import validation
from apical.core.learner import Learner, Phase, Update, accumulate, confine, sound
from apical.engine.streams import SideStreams
from apical.errors import ApicalError

Optimizers = Callable[[list[dict[str, Any]]], torch.optim.Optimizer]
Group = dict[str, Any]

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "sgd": torch.optim.SGD,
}


NUMBER = "#"
"""Ends the name of a tensor that holds a plain number of an optimiser's."""
VERSIONS = 10_000
"""How often torch may compile one function anew: phases of all rules and runs of a process are one to it, not eight."""


class Plan(NamedTuple):
    """How one learner is stepped: its rate, its optimiser's options, and its largest gradient norm."""

    lr: float
    options: dict[str, Any]
    clip: float | None


class Unit:
    """Learners, their tensors as the engine steps them, and their optimisers."""

    def __init__(
        self,
        learners: Sequence[Learner],
        plans: Sequence[Plan],
        *,
        stacked: bool,
        optimizer: str | Optimizers = "adam",
    ) -> None:
        self.learners, self.stacked, self.own = list(learners), stacked, callable(optimizer)
        self.template = template = self.learners[0]
        if stacked:
            named = [learner.params() for learner in learners]
            self.params: dict[str, nn.Parameter] = {
                name: nn.Parameter(torch.stack([n[name].detach() for n in named]), p.requires_grad)
                for name, p in named[0].items()
            }
            buffers = [learner.state_tensors() for learner in learners]
            self.state = {name: torch.stack([b[name] for b in buffers]) for name in buffers[0]}
        else:
            self.params, self.state = template.params(), template.state_tensors()
        phases = [_sound(template.name, phase) for phase in template.phases]
        self.phases: list[Phase] = [torch.vmap(phase) for phase in phases] if stacked else phases
        self.paced = template.paced
        self.compiled: list[Phase] = []
        self.full = 0
        """The batch that `compiled` is for; a smaller one at the end of an epoch is not worth a second compilation."""
        self.reasons: list[str] = []
        self._plan(list(plans), optimizer)

    def __len__(self) -> int:
        return len(self.learners)

    def _plan(self, plans: list[Plan], optimizer: str | Optimizers) -> None:
        """Make the optimisers. Learners whose plans agree are stepped as one tensor, else each by views of its own."""
        by_row = [self._groups(learner, plan) for learner, plan in zip(self.learners, plans, strict=True)]
        alike = [_scalars(groups) == _scalars(by_row[0]) for groups in by_row]
        if self.stacked and not all(alike):
            self.rows = [
                {name: nn.Parameter(p.detach()[row], p.requires_grad) for name, p in self.params.items()}
                for row in range(len(self))
            ]
        else:
            self.rows = [self.params]
        groups = [
            {**group, "params": [own[name] for name in group["params"]]}
            for own, own_groups in zip(self.rows, by_row, strict=False)
            for group in own_groups
        ]
        device = next(iter(self.params.values())).device
        if callable(optimizer):
            self.optims = [_own(optimizer, groups)]
        else:
            # torch's fused kernel leaves a fifth of a GPU idle: several at once fill it, unless other units do.
            shares = _shares(groups) if self.stacked and device.type == "cuda" else [groups]
            self.optims = [_fused(optimizer, share, device) for share in shares]
        self.lanes = SideStreams(device, len(self.optims) if len(self.optims) > 1 else 0)
        clips = [plan.clip for plan in plans]
        self.clip = None
        if any(clip is not None for clip in clips):
            largest = [torch.inf if clip is None else clip for clip in clips]
            self.clip = torch.tensor(largest, device=device)

    def _groups(self, learner: Learner, plan: Plan) -> list[Group]:
        """A learner's parameter groups, with its parameters by name."""
        names = {id(p): name for name, p in learner.params().items()}
        return [
            {**group, "params": [names[id(p)] for p in group["params"]]}
            for group in learner.param_groups(plan.lr, **plan.options)
        ]

    @property
    def groups(self) -> list[Group]:
        """The parameter groups of all optimisers."""
        return [group for optim in self.optims for group in optim.param_groups]

    def compile(self, batch: int) -> None:
        """Use `torch.compile` for batches of this size."""
        self.full = batch
        self.compiled = [torch.compile(phase, fullgraph=True, dynamic=False) for phase in self.phases]

    def step(
        self,
        x: Tensor,
        y: Tensor,
        generators: list[torch.Generator],
        before_step: Callable[[Update, bool], None] = lambda update, last: None,
        pace: Tensor | None = None,
    ) -> Update:
        """All phases of the rule, each followed by an optimiser step of every learner, clipped on its own.

        `before_step` is called with each phase's update, and whether it is the last one. `pace`, read after it, is the share
        that the schedule leaves of all rates.
        """
        noise, state = self._draw(x, generators), dict(self.state)
        for k in range(len(self.phases)):
            for parameter in (p for params in self.rows for p in params.values()):
                parameter.grad = None  # before there are new ones: their memory is what those will have
            update = self._update(k, state, x, y, noise)
            state |= update.state
            before_step(update, k == len(self.phases) - 1)
            self._learn(update.grads)
        for name, value in self.state.items():
            if state[name] is value:
                continue
            if pace is not None and name in self.paced:
                value.lerp_(state[name], pace.to(value.dtype))
            else:
                value.copy_(state[name])
        return update

    def _update(
        self, k: int, state: dict[str, Tensor], x: Tensor, y: Tensor, noise: dict[str, Tensor]
    ) -> Update:
        if self.compiled and y.shape[int(self.stacked)] == self.full:
            try:
                with torch._dynamo.config.patch(
                    recompile_limit=VERSIONS, accumulated_recompile_limit=VERSIONS
                ):
                    return self.compiled[k](self.params, state, x, y, noise)
            except Exception as error:  # whatever the compiler could not do, the rule itself still can
                self.compiled = []
                self.reasons.append(f"torch.compile: {(str(error).strip() or repr(error)).splitlines()[0]}")
        return self.phases[k](self.params, state, x, y, noise)

    def _learn(self, grads: dict[str, Tensor]) -> None:
        if self.clip is not None:
            grads = self._clipped(grads, self.clip)
        for row, params in enumerate(self.rows):
            for name, gradient in grads.items():
                accumulate(params[name], gradient if params is self.params else gradient[row])
        for k, optim in enumerate(self.optims):
            with self.lanes(k):
                optim.step()
        self.lanes.join()
        confine(self.params, self.template.bounds)

    def _draw(self, x: Tensor, generators: list[torch.Generator]) -> dict[str, Tensor]:
        """The noise of one batch of each learner, from that learner's own generator."""
        if not self.stacked:
            return self.template.draw(x, generators[0])
        drawn = [self.template.draw(one, generator) for one, generator in zip(x, generators, strict=True)]
        return {name: torch.stack([d[name] for d in drawn]) for name in drawn[0]}

    def _clipped(self, grads: dict[str, Tensor], clip: Tensor) -> dict[str, Tensor]:
        """Gradients scaled down so that the norm over all of a learner's parameters is at most `clip`."""
        rows = len(self)
        squares = [g.reshape(rows, -1).square().sum(1) for g in grads.values()]
        scale = (clip / (torch.stack(squares).sum(0).sqrt() + 1e-6)).clamp(max=1.0)
        return {name: g * scale.view(-1, *[1] * (g.ndim - 1)).to(g.dtype) for name, g in grads.items()}

    def predict(self, x: Tensor) -> Tensor:
        """Scores (learners, batch, …) of one batch that all see."""
        if not self.stacked:
            return self.template.predict(self.params, self.state, x).unsqueeze(0)
        scores: Tensor = torch.vmap(self.template.predict, in_dims=(0, 0, None))(self.params, self.state, x)
        return scores

    def tensors(self, row: int) -> Iterator[tuple[str, Tensor]]:
        """All that training changes in one learner, by name: parameters, buffers and the optimiser's memory."""
        for name, p in self.params.items():
            yield f"param/{name}", self._row(p.detach(), row)
        for name, b in self.state.items():
            yield f"buffer/{name}", self._row(b, row)
        own = len(self.rows) > 1
        for name, p in self.rows[row if own else 0].items():
            for key, value in self._memory(p).items():
                if isinstance(value, Tensor):
                    # A count of steps is everybody's.
                    yield f"optim/{name}/{key}", value if own or value.ndim == 0 else self._row(value, row)
                elif isinstance(value, int | float):
                    yield f"optim/{name}/{key}{NUMBER}", _tensor(value)
        for (i, key), value in self._counts().items():
            yield f"optim/{i}/{key}{NUMBER}", _tensor(value)

    def _counts(self) -> dict[tuple[int, str], int | float]:
        """What an optimiser of the user's own may count in its groups; the rate is the schedule's."""
        return {
            (i, key): value
            for i, group in enumerate(self.groups if self.own else [])
            for key, value in group.items()
            if key != "lr" and isinstance(value, int | float)
        }

    def _row(self, value: Tensor, row: int) -> Tensor:
        return value[row] if self.stacked else value

    def _memory(self, p: Tensor) -> dict[str, Any]:
        """What the optimiser remembers of a parameter."""
        return next((optim.state[p] for optim in self.optims if p in optim.state), {})

    def finite(self) -> list[bool]:
        """Whether each learner's numbers are all finite."""
        values = [*self.params.values(), *self.state.values()]
        rows = torch.stack([v.detach().isfinite().reshape(len(self), -1).all(1) for v in values])
        finite: list[bool] = rows.all(0).tolist()
        return finite

    def restore(self, saved: list[dict[str, Tensor]]) -> None:
        """Take up the tensors of each learner, as `tensors` gave them.

        A seed that failed keeps the optimiser's memory of its last good epoch, or none at all: the count of
        steps that all share is the largest, and a missing memory is zero.
        """
        with torch.no_grad():
            for row, one in enumerate(saved):
                for name, target in self.tensors(row):
                    if not name.startswith("optim/"):
                        target.copy_(one[name])
        names = {id(p): name for name, p in self.params.items()}
        for optim in self.optims:
            for p in (p for group in optim.param_groups for p in group["params"]):
                start = f"optim/{names[id(p)]}/"
                keys = {key: None for one in saved for key in one if key.startswith(start)}
                for key in keys:
                    value, short = self._joined(saved, key), key.removeprefix(start)
                    number = short.endswith(NUMBER)
                    optim.state[p][short.removesuffix(NUMBER)] = (
                        value.item() if number else self._placed(value, p)
                    )
        for i, key in self._counts():
            name = f"optim/{i}/{key}{NUMBER}"
            if name in saved[0]:
                self.groups[i][key] = saved[0][name].item()

    def _joined(self, saved: list[dict[str, Tensor]], name: str) -> Tensor:
        known = [one[name] for one in saved if name in one]
        if not self.stacked:
            return known[0]
        if known[0].ndim == 0:
            return torch.stack(known).amax()
        return torch.stack([one.get(name, torch.zeros_like(known[0])) for one in saved])

    def _placed(self, value: Tensor, p: Tensor) -> Tensor:
        # A step count must not follow the parameter's dtype, and moves to the GPU with fused optimisers alone.
        return torch.empty_like(p).copy_(value) if value.shape == p.shape else value.to(p.device)

    def write_back(self) -> None:
        """Give each learner its own numbers."""
        if not self.stacked:
            return
        with torch.no_grad():
            for row, learner in enumerate(self.learners):
                for name, p in learner.named_parameters():
                    p.copy_(self.params[name][row])
                for name, b in learner.named_buffers():
                    b.copy_(self.state[name][row])


def _sound(rule: str, phase: Phase) -> Phase:
    """A phase whose update is looked at inside of `vmap`, where shapes are a learner's own; in a graph it costs nothing."""
    return lambda params, state, x, y, noise: sound(rule, params, phase(params, state, x, y, noise))


def _tensor(number: int | float) -> Tensor:
    """A number as a tensor of its own kind, without loss."""
    return torch.tensor(number, dtype=torch.float64 if isinstance(number, float) else None)


def _scalars(groups: list[Group]) -> list[Group]:
    """Groups without their members' tensors, to compare."""
    return [{key: value for key, value in group.items() if key != "name"} for group in groups]


def _shares(groups: list[Group]) -> list[list[Group]]:
    """One optimiser for each group, and two for one that has more numbers than all others together."""
    sizes = [sum(p.numel() for p in group["params"]) for group in groups]
    shares = []
    for group, size in zip(groups, sizes, strict=True):
        largest, *others = sorted(group["params"], key=lambda p: -p.numel())
        divided = [[largest], others] if others and 2 * size > sum(sizes) else [group["params"]]
        shares += [[{**group, "params": params}] for params in divided]
    return shares


def _own(optimizer: Optimizers, groups: list[Group]) -> torch.optim.Optimizer:
    """What a class or a function of the user's makes of the groups: an optimiser that steps by gradients alone."""
    validation.steps_by_gradients(optimizer)
    made = optimizer(groups)
    if not isinstance(made, torch.optim.Optimizer):
        raise ApicalError(
            f"the optimizer {getattr(optimizer, '__name__', '')} made {made!r} of the parameter groups, but must make a "
            "torch optimiser of them."
        )
    validation.steps_by_gradients(type(made))
    return made


def _fused(optimizer: str, groups: list[Group], device: torch.device) -> torch.optim.Optimizer:
    capturable = {"capturable": True} if device.type == "cuda" and optimizer != "sgd" else {}
    # The kernel wants momentum of all of a group's or of none, and a rule's first phase may leave out some of the group.
    # Nothing is what it begins with, unless it is dampened: then the first step is not like the others.
    fused = not any(group.get("dampening") for group in groups)
    made = OPTIMIZERS[optimizer](groups, fused=fused, **capturable)
    for group in made.param_groups:
        if fused and group.get("momentum"):
            made.state.update({p: {"momentum_buffer": torch.zeros_like(p)} for p in group["params"]})
    return made
