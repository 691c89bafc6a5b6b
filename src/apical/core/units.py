"""A layer's values, unit by unit, and their second moments: positions that share weights are samples, as examples are."""

from torch import Tensor

from apical.core.synapse import Conv, Dense, Synapse


def groups_of(synapse: Synapse) -> int:
    """In how many groups the units see inputs of their own; one, but for grouped convolutions."""
    return synapse.groups if isinstance(synapse, Conv) else 1


def unit_axis(synapse: Synapse) -> int:
    """Where the units stand in a layer's drive: last in a dense layer, second in a convolution."""
    return -1 if isinstance(synapse, Dense) else 1


def per_unit(values: Tensor, synapse: Synapse) -> Tensor:
    """One value per unit (the last axis) or filter (the first after the batch), ready to broadcast."""
    return values if isinstance(synapse, Dense) else values.view(-1, *[1] * (len(synapse.weight_shape) - 2))


def per_row(values: Tensor, rows: Tensor) -> Tensor:
    """One value per row, a unit's weights or an example, ready to broadcast over it."""
    return values.view(-1, *[1] * (rows.ndim - 1))


def samples_of(synapse: Synapse, e: Tensor) -> Tensor:
    """The values of each group's units, (groups, samples, n): one sample for each example and position."""
    samples = e.movedim(unit_axis(synapse), -1)
    return samples.reshape(samples.shape[:-1].numel(), groups_of(synapse), -1).transpose(0, 1)


def moment(synapse: Synapse, e: Tensor) -> Tensor:
    """⟨e eᵀ⟩ over examples and positions, (groups, n, n): each group's units among themselves."""
    samples = samples_of(synapse, e)
    return samples.mT @ samples / samples.shape[1]


def mixed(w: Tensor, by: Tensor) -> Tensor:
    """W · M for weights seen as a matrix, a unit's weights in a row, with M (groups, fan-in, fan-in)."""
    return (w.reshape(by.shape[0], -1, by.shape[-1]) @ by).reshape(w.shape)
