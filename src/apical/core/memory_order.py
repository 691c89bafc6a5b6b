"""Arrays in the order in which they lie in memory.

On a GPU images are in channels-last memory, as cuDNN's kernels want them. An operation whose arrays lie in different
orders reads one of them against its grain, and a `flatten` copies; what is here keeps to the order that is there.
"""

from torch import Tensor


def channels_last(e: Tensor) -> bool:
    """Whether images (batch, channels, height, width) lie with their channels side by side."""
    return e.ndim == 4 and not e.is_contiguous() and e.movedim(1, -1).is_contiguous()


def lying(e: Tensor) -> Tensor:
    """The axes in the order of memory: (batch, height, width, channels) where channels are last."""
    return e.movedim(1, -1) if channels_last(e) else e


def standing(e: Tensor, like: Tensor) -> Tensor:
    """The way back from `lying(like)`: axes in their usual order, memory as it is."""
    return e.movedim(-1, 1) if channels_last(like) else e


def in_order_of(e: Tensor, values: Tensor) -> Tensor:
    """Rows of values in the shape of e's, for which they are taken as they lie: made from `lying(e)`, or noise, which has
    no order of its own."""
    return standing(values.reshape(len(values), *lying(e).shape[1:]), e)
