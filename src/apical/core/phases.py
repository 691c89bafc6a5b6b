"""What happens in one batch, in its order: a rule's phases, each followed by an optimiser step.

`Learner.step` runs the phases as they are. The engine runs them under `torch.vmap`, for all replicas of a stack at once.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from apical.core.activation import Noise
from apical.core.network import Params
from apical.core.streams import SideStreams
from apical.core.validation import check_finite
from apical.errors import ApicalError

PIECE = 8192
"""Numbers of a piece of a tensor, for an operation on many pieces that gives each to one block of threads."""


class Update(NamedTuple):
    """The result of a rule's `update`: gradients by parameter name, the new state, the mean loss, the output.

    A value of the state must not share memory with the batch, which may change before it is written. `delayed` is set by
    rules whose output lags behind their input, as that of `streaming` does: it has the targets of the earlier batch, a
    factor for each of its rows (0 for padding; their mean is 1), and the number of rows that are not padding.
    """

    grads: dict[str, Tensor]
    state: dict[str, Tensor]
    loss: Tensor
    output: Tensor
    delayed: tuple[Tensor, ...] = ()


Phase = Callable[[Params, Params, Tensor, Tensor, Noise], Update]


def run_phases(
    phases: Sequence[Phase],
    params: Params,
    buffers: dict[str, Tensor],
    batch: tuple[Tensor, Tensor, Noise],
    write_gradients: Callable[[Update, bool], None],
    *,
    zero_grad: Callable[[], object] = lambda: None,
    step: Callable[[], object] = lambda: None,
    bounds: Mapping[str, tuple[float, float]] | None = None,
    pace: Tensor | None = None,
    scheduled_buffers: frozenset[str] = frozenset(),
    streams: SideStreams | None = None,
    pending: SideStreams | None = None,
) -> Update:
    """Run all phases of one batch and return the last one's update: what a learner and a stack of replicas do alike.

    Args:
        batch: inputs, targets and noise.
        write_gradients: takes each phase's update and whether it is the last one.
        zero_grad, step: clear the gradients before a phase, and step the optimiser after it.
        bounds: of the parameters that are clamped after each step.
        pace: the learning-rate schedule's factor, which slows the change of `scheduled_buffers`. Read after
            `write_gradients`.
        streams: where the state is written while the optimiser steps.
        pending: the rule's own streams, where its work may still run when a phase returns. `step` waits for as much of it as
            it needs.
    """
    state, streams, pending = dict(buffers), streams or SideStreams(0), pending or SideStreams(0)
    has_gradients = False
    for k, phase in enumerate(phases):
        zero_grad()  # first: the new gradients reuse the memory of the old ones
        update = phase(params, state, *batch)
        state |= update.state
        has_gradients |= bool(update.grads)
        is_last = k + 1 == len(phases)
        if is_last and not has_gradients and not update.delayed:  # a stream's first ticks have none
            raise ApicalError(
                "the rule returned no gradients, so that nothing would be learned; an update has those of the parameters "
                "that learn, by their names in learner.params()."
            )
        streams.keep(update)
        write_gradients(update, is_last)
        if is_last:
            with streams(0):
                pending.wait()
                _write_state(buffers, state, scheduled_buffers, pace)
        step()
        pending.join()
        for name, (low, high) in (bounds or {}).items():
            params[name].detach().clamp_(low, high)
    streams.join()
    return update


def _write_state(
    buffers: dict[str, Tensor], state: Params, scheduled_buffers: frozenset[str], pace: Tensor | None
) -> None:
    """Write the state that a rule returned to its buffers."""
    places = {buffer.untyped_storage().data_ptr() for buffer in buffers.values()}
    changed = {name: state[name] for name, buffer in buffers.items() if state[name] is not buffer}
    for name, value in changed.items():
        if value.untyped_storage().data_ptr() in places:  # what another buffer had before, which is replaced, too
            changed[name] = value.clone()
    if pace is not None:
        for name in scheduled_buffers.intersection(changed):
            buffers[name].lerp_(changed.pop(name), pace.to(buffers[name].dtype))
    if any(buffers[name].is_cuda for name in changed):
        _copy_together([buffers[name] for name in changed], list(changed.values()))
        return
    for name, value in changed.items():
        buffers[name].copy_(value)


def _copy_together(targets: list[Tensor], sources: list[Tensor]) -> None:
    """Copy many tensors in one operation for each of their types."""
    by_type: dict[torch.dtype, list[tuple[Tensor, Tensor]]] = {}
    for target, source in zip(targets, sources, strict=True):
        by_type.setdefault(target.dtype, []).extend(zip(*cut([target, source], PIECE), strict=True))
    for pairs in by_type.values():
        torch._foreach_copy_([target for target, _ in pairs], [source for _, source in pairs])


def cut(tensors: list[Tensor], size: int) -> list[list[Tensor]]:
    """Return the pieces of tensors of the same strides, in memory order; whole tensors if that is not one dense piece."""
    first = tensors[0]
    is_dense = first.is_contiguous() or first.is_contiguous(memory_format=torch.channels_last)
    if not is_dense or any(t.stride() != first.stride() for t in tensors):
        return [[t] for t in tensors]
    return [list(t.as_strided((t.numel(),), (1,)).split(size)) for t in tensors]


def check_phase(rule: str, phase: Phase, *, checks_loss: bool = False) -> Phase:
    """Return the phase with a check of its update, and perhaps of its loss if it has one, before anything is written."""

    def run(params: Params, state: Params, x: Tensor, y: Tensor, noise: Noise) -> Update:
        update = check_update(rule, params, phase(params, state, x, y, noise))
        update = _separate_gradients(update, [*params.values(), *state.values()])
        if checks_loss and update.output.shape[0]:
            check_finite(update.loss)
        return update

    return run


def _separate_gradients(update: Update, known: list[Tensor]) -> Update:
    """Copy gradients that are one tensor under two names, or a parameter or buffer: `.grad` is added to in place."""
    ids = {id(gradient) for gradient in update.grads.values()}
    if len(ids) == len(update.grads) and not ids.intersection(map(id, known)):
        return update
    return update._replace(grads={name: gradient.clone() for name, gradient in update.grads.items()})


def check_update(rule: str, params: Params, update: Any) -> Update:
    """Return what a rule's update returned, after a check of its type and of the gradients' names and shapes.

    Without it, a gradient of another shape would be broadcast silently.
    """
    if not isinstance(update, Update):
        raise ApicalError(
            f"the update of rule {rule!r} returned {type(update).__name__}; apical.Update(grads, state, loss, output) works."
        )
    for name, gradient in update.grads.items():
        if name not in params:
            raise ApicalError(
                f"rule {rule!r} has a gradient for {name!r}, which is no parameter; learner.params() has all, such as "
                f"{next(iter(params))!r}."
            )
        shape = gradient.shape if isinstance(gradient, Tensor) else None
        if shape != params[name].shape:
            found = type(gradient).__name__ if shape is None else f"shape {tuple(shape)}"
            raise ApicalError(
                f"rule {rule!r} has a gradient of {found} for {name}, which is of shape {tuple(params[name].shape)}; the "
                "two must be the same."
            )
    return update


def accumulate_gradient(parameter: Tensor, gradient: Tensor) -> None:
    """Add to `.grad`, with the parameter's dtype and strides, which fused optimisers rely on."""
    if parameter.grad is not None:
        parameter.grad += gradient
    elif gradient.dtype == parameter.dtype and gradient.stride() == parameter.stride():
        parameter.grad = gradient
    else:
        parameter.grad = torch.empty_like(parameter).copy_(gradient)
