"""Views of tensors: by row, by unit, and in memory order.

On a GPU images are stored channels-last, which cuDNN's kernels need. An operation on tensors of different memory
orders reads one of them with large strides, and `flatten` copies. The functions on memory order avoid both.
"""

from torch import Tensor

from apical.core.synapse import Synapse


def broadcast_rows(values: Tensor, rows: Tensor) -> Tensor:
    """View one value per row so that it broadcasts over `rows`: a unit's weights or an example."""
    return values.view(-1, *[1] * (rows.ndim - 1))


def group_samples(synapse: Synapse, e: Tensor) -> Tensor:
    """Return the values of each group's units as (groups, samples, units).

    A unit is a neuron of a dense layer or a filter of a convolution, of which each position of an example is a sample.
    """
    samples = e.movedim(synapse.unit_axis, -1)
    return samples.reshape(samples.shape[:-1].numel(), synapse.groups, -1).transpose(0, 1)


def is_channels_last(images: Tensor) -> bool:
    """Return whether images (batch, channels, height, width) are stored with the channels of a pixel side by side."""
    return images.ndim == 4 and not images.is_contiguous() and images.movedim(1, -1).is_contiguous()


def to_memory_order(images: Tensor) -> Tensor:
    """View images with their axes in memory order: (batch, height, width, channels) if they are channels-last."""
    return images.movedim(1, -1) if is_channels_last(images) else images


def from_memory_order(values: Tensor, like: Tensor) -> Tensor:
    """Undo `to_memory_order(like)`: view the values with the axes of `like`."""
    return values.movedim(-1, 1) if is_channels_last(like) else values


def reshape_in_memory_order(values: Tensor, like: Tensor) -> Tensor:
    """Give each row of values the shape of an example of `like`, and the same memory order.

    The values of a row are either already in the memory order of `like`, or noise, for which any order will do.
    """
    return from_memory_order(values.reshape(len(values), *to_memory_order(like).shape[1:]), like)
