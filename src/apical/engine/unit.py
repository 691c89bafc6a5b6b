"""Seeds that take their steps as one.

A unit is one or several learners of the same shape. Stacked, their parameters are one tensor with a leading
axis over the seeds, the rule runs under `torch.vmap`, and an element-wise optimiser steps all of them at once;
single, a unit is a learner as it is. Either way a seed's numbers never meet another's.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from apical.learner import Learner, Update, accumulate, confine

Optimizers = Callable[[list[dict[str, Any]]], torch.optim.Optimizer]

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "sgd": torch.optim.SGD,
}


class Unit:
    """Learners, their tensors as the engine steps them, and their optimiser."""

    def __init__(
        self,
        learners: list[Learner],
        *,
        stacked: bool,
        lr: float,
        optimizer: str | Optimizers,
        options: dict[str, Any],
        clip: float | None,
    ) -> None:
        self.learners, self.stacked, self.clip = learners, stacked, clip
        self.template = template = learners[0]
        if stacked:
            named = [learner.params() for learner in learners]
            self.params: dict[str, nn.Parameter] = {
                name: nn.Parameter(torch.stack([n[name].detach() for n in named]), p.requires_grad)
                for name, p in named[0].items()
            }
            buffers = [dict(learner.named_buffers()) for learner in learners]
            self.state = {name: torch.stack([b[name] for b in buffers]) for name in buffers[0]}
        else:
            self.params, self.state = template.params(), dict(template.named_buffers())
        names = {id(p): name for name, p in template.params().items()}
        groups = [
            {**group, "params": [self.params[names[id(p)]] for p in group["params"]]}
            for group in template.param_groups(lr, **options)
        ]
        self.optim = _optimizer(optimizer, groups)

    def __len__(self) -> int:
        return len(self.learners)

    def step(self, x: Tensor, y: Tensor, generators: list[torch.Generator]) -> Update:
        """All phases of the rule, each followed by an optimiser step of every seed, clipped on its own."""
        noise, state = self._draw(x, generators), dict(self.state)
        for phase in self.template.phases:
            run = torch.vmap(phase) if self.stacked else phase
            update: Update = run(self.params, state, x, y, noise)
            grads = update.grads if self.clip is None else self._clipped(update.grads, self.clip)
            for parameter in self.params.values():
                parameter.grad = None
            for name, gradient in grads.items():
                accumulate(self.params[name], gradient)
            self.optim.step()
            confine(self.params, self.template.bounds)
            state |= update.state
        for name, value in self.state.items():
            if state[name] is not value:
                value.copy_(state[name])
        return update

    def _draw(self, x: Tensor, generators: list[torch.Generator]) -> dict[str, Tensor]:
        """The noise of one batch of each seed, from that seed's own generator."""
        if not self.stacked:
            return self.template.draw(x, generators[0])
        drawn = [self.template.draw(one, generator) for one, generator in zip(x, generators, strict=True)]
        return {name: torch.stack([d[name] for d in drawn]) for name in drawn[0]}

    def _clipped(self, grads: dict[str, Tensor], clip: float) -> dict[str, Tensor]:
        """Gradients scaled down so that the norm over all of a seed's parameters is at most `clip`."""
        rows = len(self)
        squares = [g.reshape(rows, -1).square().sum(1) for g in grads.values()]
        scale = (clip / (torch.stack(squares).sum(0).sqrt() + 1e-6)).clamp(max=1.0)
        return {name: g * scale.view(-1, *[1] * (g.ndim - 1)) for name, g in grads.items()}

    def predict(self, x: Tensor) -> Tensor:
        """Scores (seeds, batch, …) of one batch that all seeds see."""
        if not self.stacked:
            return self.template.predict(self.params, self.state, x).unsqueeze(0)
        scores: Tensor = torch.vmap(self.template.predict, in_dims=(0, 0, None))(self.params, self.state, x)
        return scores

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """All that training changes, by name: parameters, buffers and the optimiser's memory."""
        yield from ((f"param/{name}", p.detach()) for name, p in self.params.items())
        yield from ((f"buffer/{name}", b) for name, b in self.state.items())
        for name, p in self.params.items():
            for key, value in self.optim.state.get(p, {}).items():
                if isinstance(value, Tensor):
                    yield f"optim/{name}/{key}", value

    def of_seed(self, name: str, value: Tensor, row: int) -> Tensor:
        """One seed's part of a tensor; an optimiser's step count is everybody's."""
        shared = name.startswith("optim/") and value.ndim == 0
        return value[row] if self.stacked and not shared else value

    def finite(self) -> list[bool]:
        """Whether each seed's numbers are all finite."""
        values = [*self.params.values(), *self.state.values()]
        rows = torch.stack([v.detach().isfinite().reshape(len(self), -1).all(1) for v in values])
        finite: list[bool] = rows.all(0).tolist()
        return finite

    def restore(self, saved: list[dict[str, Tensor]]) -> None:
        """Take up the tensors of each seed, as `of_seed` gave them.

        A seed that failed keeps the optimiser's memory of its last good epoch, or none at all: the count of
        steps that all share is the largest, and a missing memory is zero.
        """
        with torch.no_grad():
            for name, target in self.tensors():
                if not name.startswith("optim/"):
                    target.copy_(self._joined(saved, name))
            for name, p in self.params.items():
                keys = {key: None for one in saved for key in one if key.startswith(f"optim/{name}/")}
                self.optim.state[p].update(
                    {key.rsplit("/", 1)[1]: self._placed(self._joined(saved, key), p) for key in keys}
                )

    def _joined(self, saved: list[dict[str, Tensor]], name: str) -> Tensor:
        known = [one[name] for one in saved if name in one]
        if not self.stacked:
            return known[0]
        if name.startswith("optim/") and known[0].ndim == 0:
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


def _optimizer(optimizer: str | Optimizers, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    if callable(optimizer):
        return optimizer(groups)
    kind = OPTIMIZERS[optimizer]
    cuda = groups[0]["params"][0].is_cuda
    extra = {"capturable": True} if cuda and optimizer != "sgd" else {}
    return kind(groups, fused=True, **extra)
