"""The operation meter, which the audit's costs and the benchmarks share."""

import torch

from apical.plausibility.meter import OperationMeter


def test_a_product_is_counted_with_its_multiply_adds_and_its_bytes() -> None:
    x, w = torch.randn(3, 4), torch.randn(4, 5)
    with OperationMeter() as meter:
        x @ w
    assert (meter.operations, meter.multiply_adds, meter.peak_bytes) == (1, 3 * 4 * 5, 4 * 3 * 5)


def test_bytes_that_were_freed_do_not_count_and_those_held_together_do() -> None:
    x = torch.randn(10)
    with OperationMeter() as one_by_one:
        for _ in range(3):
            x + 1
    with OperationMeter() as together:
        _kept = [x + 1 for _ in range(3)]
    assert (one_by_one.peak_bytes, together.peak_bytes) == (40, 120)
    assert one_by_one.operations == together.operations == 3


def test_inputs_count_if_asked_for_and_ignored_tensors_never() -> None:
    x, w = torch.randn(3, 4), torch.randn(4, 5)
    with OperationMeter(count_inputs=True) as everything:
        x @ w
    with OperationMeter(ignored=[x], count_inputs=True) as without_x:
        x @ w
    assert everything.peak_bytes == x.nbytes + w.nbytes + 60
    assert without_x.peak_bytes == w.nbytes + 60
    with OperationMeter(ignored=[x]) as in_place:
        x.mul_(2)
    assert in_place.peak_bytes == 0
