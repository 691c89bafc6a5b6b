"""What a way down is made of, through layers (`descent`) and back in time (`through_time`) alike."""

from collections.abc import Callable

import torch
from torch import Tensor

from apical.checks import nothing_to_train
from apical.network import Network

Carry = Callable[[int, Tensor, torch.Size], Tensor]
"""(layer, its δ, its input's shape) -> ξ at that layer's input."""
Learn = Callable[[int, Tensor, Tensor, Tensor | None], Tensor | None]
"""(layer, ξ at its input, its δ, W's gradient) -> the gradient of the layer's feedback weights."""


def lowest(network: Network, trainable: frozenset[str], feedback: dict[int, str]) -> int:
    """The lowest layer at which anything learns: the way down ends there."""
    for i, layer in enumerate(network.layers):
        if {layer.weight, layer.bias, feedback.get(i)} & trainable:
            return i
    raise nothing_to_train()
