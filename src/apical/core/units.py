"""Helpers to treat dense and convolutional layers alike, unit by unit.

A unit is a neuron of a dense layer or a filter of a convolution. The positions of a filter share its weights, so each
position of each example is one sample of the unit's activity.
"""

from torch import Tensor

from apical.core.synapse import Conv, Dense, Synapse


def count_groups(synapse: Synapse) -> int:
    """Return the number of groups of a grouped convolution; 1 for all other layers."""
    return synapse.groups if isinstance(synapse, Conv) else 1


def get_unit_axis(synapse: Synapse) -> int:
    """Return the axis of a layer's drive that counts units: the last of a dense layer, the second of a convolution."""
    return -1 if isinstance(synapse, Dense) else 1


def broadcast_units(values: Tensor, synapse: Synapse) -> Tensor:
    """View one value per unit so that it broadcasts over the layer's drive."""
    return values if isinstance(synapse, Dense) else values.view(-1, *[1] * (len(synapse.weight_shape) - 2))


def broadcast_rows(values: Tensor, rows: Tensor) -> Tensor:
    """View one value per row so that it broadcasts over `rows`: a unit's weights or an example."""
    return values.view(-1, *[1] * (rows.ndim - 1))


def group_samples(synapse: Synapse, e: Tensor) -> Tensor:
    """Return the values of each group's units as (groups, samples, units)."""
    samples = e.movedim(get_unit_axis(synapse), -1)
    return samples.reshape(samples.shape[:-1].numel(), count_groups(synapse), -1).transpose(0, 1)


def compute_second_moment(synapse: Synapse, e: Tensor) -> Tensor:
    """Return ⟨e eᵀ⟩ over all samples, (groups, units, units): the correlations inside each group."""
    samples = group_samples(synapse, e)
    return samples.mT @ samples / samples.shape[1]


def multiply_inputs(w: Tensor, matrix: Tensor) -> Tensor:
    """Return W · M, with W seen as one row of weights per unit, and M (groups, fan-in, fan-in)."""
    return (w.reshape(matrix.shape[0], -1, matrix.shape[-1]) @ matrix).reshape(w.shape)
