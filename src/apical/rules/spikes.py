"""Volleys of spikes: one number per neuron, how many steps before its cycle's end it fires, `ahead` = steps − t.

The first step is `steps`, the last one 1, and 0 is a neuron that stays silent.
"""

from functools import reduce

import torch
from torch import Tensor, nn

from apical.errors import UnsupportedError
from apical.neuron import Neuron
from apical.rules.layout import channels_last, in_order_of, lying
from apical.rules.moments import per_row
from apical.synapse import Dense, Synapse

CARRIES = (
    *(nn.MaxPool1d, nn.MaxPool2d, nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d),
    *(nn.AvgPool1d, nn.AvgPool2d, nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d),
    *(nn.Flatten, nn.Unflatten, nn.Identity, nn.Dropout, nn.Dropout1d, nn.Dropout2d),
)
"""What spikes pass through: the largest of several `ahead` is the earliest spike, their mean one in between."""


def volley(value: Tensor, steps: int) -> Tensor:
    """Latencies of values: 1 and above fire in the first step, small ones late, 0 and below never."""
    return (value * steps).ceil().clamp(0, steps)


def brightness(x: Tensor) -> Tensor:
    """Each image from its darkest value, 0, to its brightest, 1."""
    flat = lying(x).flatten(1)
    low, high = (per_row(end(1), x) for end in (flat.amin, flat.amax))
    return (x - low) / (high - low).clamp_min(torch.finfo(x.dtype).tiny)


def by_unit(a: Tensor, synapse: Synapse) -> Tensor:
    """(batch, …) as (batch, units, positions)."""
    return a.reshape(len(a), -1, a.shape[-1]).mT if isinstance(synapse, Dense) else a.flatten(2)


def winners(key: Tensor, synapse: Synapse, count: int) -> list[Tensor]:
    """The units of each image with the largest keys, best first: 1 at the unit's best position, 0 elsewhere."""
    best, place = by_unit(key, synapse).max(2)
    units, positions = best.shape[1], key[0].numel() // best.shape[1]
    # Masks are made in the order of the keys: (batch, positions, units), or units first.
    axis = 1 if channels_last(key) or isinstance(synapse, Dense) else 2
    unit, position = (torch.arange(n, device=key.device) for n in (units, positions))
    there, unit = place.unsqueeze(axis) == position.unsqueeze(2 - axis), unit.unsqueeze(axis - 1)
    first = best.topk(min(count, units), dim=1).indices.unbind(1)
    return [in_order_of(key, (there & (unit == winner.view(-1, 1, 1))).to(key.dtype)) for winner in first]


def evaluated(neuron: Neuron, a: Tensor) -> Tensor:
    """φ as in evaluation, whatever mode its modules are in."""
    return reduce(lambda a, stage: stage.runs(a), neuron.stages, a)


def carriers(neuron: Neuron) -> list[tuple[str, nn.Module]]:
    """The stages that spikes pass through; activations give way to the threshold, anything else is refused."""
    kept = []
    for stage in neuron.stages:
        if type(stage.module) in CARRIES:
            kept.append((stage.name, stage.module))
        elif type(stage.module).__module__ != nn.Tanh.__module__ or isinstance(stage.module, nn.GLU):
            raise UnsupportedError(
                f"module {stage.name} ({stage.module}) has no meaning for spikes; torch's own activations (not GLU), "
                "pooling, Flatten and Dropout work."
            )
    return kept
