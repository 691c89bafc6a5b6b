"""What happens between a rule's update and the next batch."""

import torch

from apical.core.phases import PIECE, _copy_together


def test_tensors_that_are_copied_together_get_their_values_whatever_their_type_size_and_memory_order() -> None:
    images = torch.randn(2, 3, 40, 40)
    sources = [
        torch.randn(3 * PIECE + 5),
        torch.randn(4, 6).t(),
        torch.tensor(7),
        images.contiguous(memory_format=torch.channels_last),
        images,
        torch.arange(9),
    ]
    targets = [torch.zeros_like(source) for source in sources]
    targets[4] = torch.zeros_like(sources[3])  # another memory order than its source
    _copy_together(targets, sources)
    for target, source in zip(targets, sources, strict=True):
        assert torch.equal(target, source)
