"""Replicas that are trained together.

A replica is one learner with its seed. Replicas of the same network and rule can be stacked: each parameter becomes one
tensor with a leading axis over the replicas, the rule runs under `torch.vmap`, and an element-wise optimiser steps all
replicas at once. A stack of one is the learner as it is. Either way, no replica's numbers influence another's.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from apical.core import validation
from apical.core.activation import Noise
from apical.core.learner import Learner
from apical.core.network import Params
from apical.core.phases import Phase, Update, accumulate_gradient, run_phases
from apical.core.streams import SideStreams
from apical.engine.optimizers import IN_PIECES
from apical.engine.settings import OPTIMIZERS, OptimizerFactory, Settings
from apical.errors import ApicalError
from apical.rules.decay import find_decay, set_decay

ParamGroup = dict[str, Any]
NUMBER_SUFFIX = "#"
"""Marks, at the end of its name, a tensor that stores a plain Python number of an optimiser."""
RECOMPILE_LIMITS = {"recompile_limit": 10_000, "accumulated_recompile_limit": 10_000}
"""How often torch may recompile one function. The phases of all rules and runs in a process count as one function, and
torch's own limit is 8."""


class ReplicaStack:
    """One or several replicas, their tensors as the engine steps them, and their optimisers.

    Args:
        learners: the learners of the replicas.
        settings: of each of them. They may differ in lr, optimizer_options and clip.
        stacked: whether their tensors are stacked. If not, there must be one learner.
    """

    def __init__(self, learners: Sequence[Learner], settings: Sequence[Settings], *, stacked: bool) -> None:
        self.learners, self.stacked = list(learners), stacked
        self.has_custom_optimizer = callable(settings[0].optimizer)
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
        self.cycle = [self._stack_phases(template.warmup + k) for k in range(template.period)]
        """The phases of the batches of one period, after the warm-up."""
        self.compiled_cycle: list[list[Phase]] = []
        self.done = 0
        """Steps taken so far."""
        self.before = template.count_batches()
        """Batches that the learners have had before."""
        self.compiled_batch_size = 0
        """A smaller batch at the end of an epoch is not worth a second compilation."""
        self.reasons: list[str] = []
        self._make_optimizers(settings)

    def __len__(self) -> int:
        return len(self.learners)

    def _make_optimizers(self, settings: Sequence[Settings]) -> None:
        """Make the optimisers.

        If all replicas have the same settings, `optimized_params` has one entry: the stacked parameters. Otherwise it has
        one entry per replica, views of the stack, so that each replica has parameter groups of its own.
        """
        by_replica = [_name_groups(learner, own) for learner, own in zip(self.learners, settings, strict=True)]
        if self.stacked and any(groups != by_replica[0] for groups in by_replica):
            self.optimized_params = [
                {name: nn.Parameter(p.detach()[row], p.requires_grad) for name, p in self.params.items()}
                for row in range(len(self))
            ]
        else:
            self.optimized_params = [self.params]
        groups = [
            {**group, "params": [params[name] for name in group["params"]]}
            for params, named_groups in zip(self.optimized_params, by_replica, strict=False)
            for group in named_groups
        ]
        device, optimizer = next(iter(self.params.values())).device, settings[0].optimizer
        if callable(optimizer):
            self.optimizers = [_make_custom_optimizer(optimizer, groups)]
        else:
            # torch's fused kernel uses a part of a GPU, and several at once fill it.
            parts = _split_groups(groups) if device.type == "cuda" else [groups]
            self.optimizers = [_make_fused_optimizer(optimizer, part, device) for part in parts]
        names = {id(p): (row, name) for row, ps in enumerate(self.optimized_params) for name, p in ps.items()}
        self.stepped = [
            [names[id(p)] for group in one.param_groups for p in group["params"] if id(p) in names]
            for one in self.optimizers
        ]
        """Row in `optimized_params` and name of the parameters of each optimiser."""
        self.streams = SideStreams(len(self.optimizers) if len(self.optimizers) > 1 else 0)
        self.state_streams = SideStreams(1)
        clips = [own.clip for own in settings]
        largest = [torch.inf if clip is None else clip for clip in clips]
        self.clip = None if min(largest) == torch.inf else torch.tensor(largest, device=device)

    @property
    def param_groups(self) -> list[ParamGroup]:
        """The parameter groups of all optimisers."""
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    def compile(self, batch_size: int) -> None:
        """Use `torch.compile` for batches of this size."""
        self.compiled_batch_size = batch_size
        self.compiled_cycle = [
            [torch.compile(phase, fullgraph=True, dynamic=False) for phase in phases] for phases in self.cycle
        ]

    def step(
        self,
        x: Tensor,
        y: Tensor,
        generators: list[torch.Generator],
        before_step: Callable[[Update, bool], None] = lambda update, last: None,
        pace: Tensor | None = None,
    ) -> Update:
        """Run all phases of the rule, each followed by an optimiser step, and return the last phase's update.

        Args:
            x, y: the batch; of a stack, one batch per replica.
            generators: one per replica, for its noise.
            before_step: called before each optimiser step with the phase's update and whether it is the last phase.
            pace: the learning-rate schedule's current factor, which also slows the rule's `scheduled_buffers`. Read
                after `before_step`.
        """

        grads: dict[str, Tensor] = {}

        def take_gradients(update: Update, is_last: bool) -> None:
            nonlocal grads
            before_step(update, is_last)
            grads = update.grads
            if self.clip is not None and grads:
                self.template.streams.wait()
                grads = self._clip_gradients(grads, self.clip)

        place = self.place
        if place is None:
            phases = self._stack_phases(self.before + self.done)
        else:
            phases = [partial(self._run_phase, place, k) for k in range(len(self.cycle[place]))]
        self.done += 1
        return run_phases(
            phases,
            self.params,
            self.state,
            (x, y, self._draw_noise(x, generators)),
            take_gradients,
            zero_grad=self._zero_grad,
            step=lambda: self._step_optimizers(grads),
            bounds=self.template.bounds,
            pace=pace,
            scheduled_buffers=self.template.scheduled_buffers,
            streams=self.state_streams,
            pending=self.template.streams,
        )

    def update_decay(self, progress: float) -> bool:
        """Set Kolen-Pollack's decay at this share of the run, if it has a schedule; return whether it changed."""
        return bool(self.decay_schedule) and set_decay(self.param_groups, find_decay(self.decay_schedule, progress))

    @property
    def decay_schedule(self) -> tuple[tuple[float, float], ...]:
        """The schedule of Kolen-Pollack's decay, or nothing."""
        return getattr(self.template, "decay_schedule", ())

    @property
    def place(self) -> int | None:
        """The place of the next step in the period; None while the rule warms up."""
        late = self.before + self.done - self.template.warmup
        return None if late < 0 else late % self.template.period

    def _stack_phases(self, done: int) -> list[Phase]:
        """Return the phases of a batch that comes after so many others, for all replicas at once."""
        phases = self.template.get_checked_phases(done)
        return [torch.vmap(phase) for phase in phases] if self.stacked else phases

    def _zero_grad(self) -> None:
        for parameter in (p for params in self.optimized_params for p in params.values()):
            parameter.grad = None

    def _run_phase(
        self, place: int, k: int, params: Params, state: Params, x: Tensor, y: Tensor, noise: Noise
    ) -> Update:
        """Return the update of phase k, from the compiled phase if there is one for this batch size."""
        if self.compiled_cycle and y.shape[int(self.stacked)] == self.compiled_batch_size:
            try:
                with torch._dynamo.config.patch(RECOMPILE_LIMITS):
                    return self.compiled_cycle[place][k](params, state, x, y, noise)
            except Exception as error:  # the compiler may fail in any way; the rule still runs without it
                self.compiled_cycle = []
                self.reasons.append(f"torch.compile: {(str(error).strip() or repr(error)).splitlines()[0]}")
        return self.cycle[place][k](params, state, x, y, noise)

    def _step_optimizers(self, grads: dict[str, Tensor]) -> None:
        """Step all optimisers, each as soon as the rule has the gradients of its parameters and needs these no more."""
        is_one = len(self.optimized_params) == 1
        for k, (optimizer, stepped) in enumerate(zip(self.optimizers, self.stepped, strict=True)):
            with self.streams(k):
                self.template.streams.wait_for(*(name for _, name in stepped))
                for row, name in stepped:
                    if name in grads:
                        gradient = grads[name] if is_one else grads[name][row]
                        accumulate_gradient(self.optimized_params[row][name], gradient)
                optimizer.step()
        self.streams.join()

    def _draw_noise(self, x: Tensor, generators: list[torch.Generator]) -> dict[str, Tensor]:
        """Draw the noise of one batch, for each replica from its own generator."""
        if not self.stacked:
            return self.template.draw(x, generators[0])
        drawn = [self.template.draw(one, generator) for one, generator in zip(x, generators, strict=True)]
        return {name: torch.stack([d[name] for d in drawn]) for name in drawn[0]}

    def _clip_gradients(self, grads: dict[str, Tensor], clip: Tensor) -> dict[str, Tensor]:
        """Scale gradients down so that each replica's norm over all its parameters is at most its `clip`."""
        squares = [g.reshape(len(self), -1).square().sum(1) for g in grads.values()]
        scale = (clip / (torch.stack(squares).sum(0).sqrt() + 1e-6)).clamp(max=1.0)
        return {name: g * scale.view(-1, *[1] * (g.ndim - 1)).to(g.dtype) for name, g in grads.items()}

    def predict(self, x: Tensor) -> Tensor:
        """Return every replica's outputs (replicas, batch, …) for one batch."""
        if not self.stacked:
            return self.template.predict(self.params, self.state, x).unsqueeze(0)
        scores: Tensor = torch.vmap(self.template.predict, in_dims=(0, 0, None))(self.params, self.state, x)
        return scores

    def named_tensors(self, row: int) -> Iterator[tuple[str, Tensor]]:
        """Yield by name all tensors of one replica that training changes: parameters, buffers, optimiser state."""
        for name, p in self.params.items():
            yield f"param/{name}", self._select_row(p.detach(), row)
        for name, b in self.state.items():
            yield f"buffer/{name}", self._select_row(b, row)
        has_own = len(self.optimized_params) > 1
        for name, p in self.optimized_params[row if has_own else 0].items():
            for key, value in next((o.state[p] for o in self.optimizers if p in o.state), {}).items():
                if isinstance(value, Tensor):
                    # A scalar is the count of steps, which the stack shares.
                    is_whole = has_own or value.ndim == 0
                    yield f"optim/{name}/{key}", value if is_whole else self._select_row(value, row)
                elif isinstance(value, int | float):
                    yield f"optim/{name}/{key}{NUMBER_SUFFIX}", _to_tensor(value)
        for (i, key), value in self._custom_group_numbers().items():
            yield f"optim/{i}/{key}{NUMBER_SUFFIX}", _to_tensor(value)

    def _custom_group_numbers(self) -> dict[tuple[int, str], int | float]:
        """Return the numbers that a user's optimiser may change in its groups, without the rate, which the schedule sets."""
        return {
            (i, key): value
            for i, group in enumerate(self.param_groups if self.has_custom_optimizer else [])
            for key, value in group.items()
            if key != "lr" and isinstance(value, int | float)
        }

    def _select_row(self, value: Tensor, row: int) -> Tensor:
        return value[row] if self.stacked else value

    def are_finite(self) -> list[bool]:
        """Return for each replica whether all its parameters and buffers are finite."""
        values = [*self.params.values(), *self.state.values()]
        rows = torch.stack([v.detach().isfinite().reshape(len(self), -1).all(1) for v in values])
        finite: list[bool] = rows.all(0).tolist()
        return finite

    def restore(self, saved: list[dict[str, Tensor]]) -> None:
        """Load the tensors of each replica, as `named_tensors` returned them.

        A replica that failed has the optimiser state of its last good epoch, or none. In a stack, the shared count of
        steps is the largest one saved, and missing state is zero.
        """
        with torch.no_grad():
            for row, one in enumerate(saved):
                for name, target in self.named_tensors(row):
                    if not name.startswith("optim/"):
                        target.copy_(one[name])
        names = {id(p): name for name, p in self.params.items()}
        for optimizer in self.optimizers:
            for p in (p for group in optimizer.param_groups for p in group["params"]):
                start = f"optim/{names[id(p)]}/"
                for key in {key: None for one in saved for key in one if key.startswith(start)}:
                    value, short = self._join_rows(saved, key), key.removeprefix(start).removesuffix(NUMBER_SUFFIX)
                    if key.endswith(NUMBER_SUFFIX):
                        optimizer.state[p][short] = value.item()
                    else:  # a count of steps keeps its own dtype; only fused optimisers have it on the GPU
                        is_like_p = value.shape == p.shape
                        optimizer.state[p][short] = (
                            torch.empty_like(p).copy_(value) if is_like_p else value.to(p.device)
                        )
        for i, key in self._custom_group_numbers():
            name = f"optim/{i}/{key}{NUMBER_SUFFIX}"
            if name in saved[0]:
                self.param_groups[i][key] = saved[0][name].item()

    def _join_rows(self, saved: list[dict[str, Tensor]], name: str) -> Tensor:
        """Join what the replicas saved under one name into the tensor of the stack."""
        known = [one[name] for one in saved if name in one]
        if not self.stacked:
            return known[0]
        if known[0].ndim == 0:
            return torch.stack(known).amax()
        return torch.stack([one.get(name, torch.zeros_like(known[0])) for one in saved])

    def write_back(self) -> None:
        """Copy each replica's numbers from the stack to its learner."""
        if self.stacked:
            for row, learner in enumerate(self.learners):
                load_tensors(learner, dict(self.named_tensors(row)))


@torch.no_grad()
def load_tensors(learner: Learner, tensors: dict[str, Tensor]) -> None:
    """Copy parameters and buffers, as `ReplicaStack.named_tensors` names them, to a learner."""
    for name, tensor in [*learner.named_parameters(), *learner.named_buffers()]:
        tensor.copy_(tensors[f"{'param' if isinstance(tensor, nn.Parameter) else 'buffer'}/{name}"])


def _to_tensor(number: int | float) -> Tensor:
    """Return a number as a tensor of the same kind, without loss of precision."""
    return torch.tensor(number, dtype=torch.float64 if isinstance(number, float) else None)


def _name_groups(learner: Learner, settings: Settings) -> list[ParamGroup]:
    """Return a learner's parameter groups with the names of its parameters in place of the tensors."""
    names = {id(p): name for name, p in learner.params().items()}
    return [
        {**group, "params": [names[id(p)] for p in group["params"]]}
        for group in learner.param_groups(settings.lr, **settings.optimizer_options)
    ]


def _split_groups(groups: list[ParamGroup]) -> list[list[ParamGroup]]:
    """Return the groups of each optimiser: one per group, or two if it has more numbers than all others together."""
    sizes = [sum(p.numel() for p in group["params"]) for group in groups]
    parts = []
    for group, size in zip(groups, sizes, strict=True):
        largest, *others = sorted(group["params"], key=lambda p: -p.numel())
        divided = [[largest], others] if others and 2 * size > sum(sizes) else [group["params"]]
        parts += [[{**group, "params": params}] for params in divided]
    return parts


def _make_custom_optimizer(factory: OptimizerFactory, groups: list[ParamGroup]) -> torch.optim.Optimizer:
    """Make an optimiser with the user's class or function, and check that it steps by gradients alone."""
    validation.check_optimizer(factory)
    made = factory(groups)
    if not isinstance(made, torch.optim.Optimizer):
        raise ApicalError(
            f"the optimizer {getattr(factory, '__name__', '')} made {made!r} of the parameter groups, but must make a "
            "torch optimiser of them."
        )
    validation.check_optimizer(type(made))
    return made


def _make_fused_optimizer(optimizer: str, groups: list[ParamGroup], device: torch.device) -> torch.optim.Optimizer:
    """Make one of apical's optimisers, fused, and capturable in a CUDA graph."""
    capturable = {"capturable": True} if device.type == "cuda" and optimizer != "sgd" else {}
    # The fused kernel needs momentum buffers for all parameters of a group or for none, but a rule's first phase may
    # leave some parameters out. So create them all, as zeros. With dampening that would change the first step.
    fused = not any(group.get("dampening") for group in groups)
    classes = {**OPTIMIZERS, **IN_PIECES} if device.type == "cuda" else OPTIMIZERS
    made = classes[optimizer](groups, fused=fused, **capturable)
    for group in made.param_groups:
        if fused and group.get("momentum"):
            made.state.update({p: {"momentum_buffer": torch.zeros_like(p)} for p in group["params"]})
    return made
