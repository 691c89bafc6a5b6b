"""What happens between a rule's update and the next batch."""

import pytest
import torch

from apical.core.phases import PIECE, _copy_together, _write_state


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


@pytest.mark.parametrize("order", [("before", "now"), ("now", "before")])
def test_a_buffer_can_get_what_another_one_had_before(order: tuple[str, str]) -> None:
    """Whichever of them is written first, and also as a view."""
    buffers = {name: torch.full((2, 2), 3.0 if name == "now" else 1.0) for name in order}
    _write_state(buffers, {"before": buffers["now"].view(2, 2), "now": torch.full((2, 2), 5.0)}, frozenset(), None)
    assert buffers["before"].unique().tolist() == [3.0]
    assert buffers["now"].unique().tolist() == [5.0]
