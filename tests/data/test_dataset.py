"""What a user's own tensors must be, and what is said when they are not."""

import numpy as np
import pytest
import torch

from apical.data import from_tensors
from apical.errors import DataError

X, Y = torch.zeros(4, 3), torch.tensor([0, 1, 2, 1])
XT, YT = torch.ones(2, 3), torch.tensor([4, 0])


def test_unpacking_gives_the_four_tensors_in_order() -> None:
    x_train, y_train, x_test, y_test = from_tensors(X, Y, XT, YT)
    for got, given in ((x_train, X), (y_train, Y), (x_test, XT), (y_test, YT)):
        assert torch.equal(got, given)


def test_classes_are_counted_over_both_splits() -> None:
    assert from_tensors(X, Y, XT, YT).classes == 5


def test_a_data_set_passes_its_own_check() -> None:
    made = from_tensors(X, Y, XT, YT, name="mine")
    assert repr(from_tensors(*made, name=made.name)) == repr(made) == "Dataset('mine': 4 + 2 of 3, 5 classes)"


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int16, np.uint16, np.int32, np.uint32, np.int64, ">i4"])
def test_any_integer_labels_become_int64(dtype: str) -> None:
    made = from_tensors(X, np.array([0, 1, 2, 1], dtype), XT, np.array([4, 0], dtype))
    assert made.y_train.dtype == made.y_test.dtype == torch.int64
    assert torch.equal(made.y_train, Y)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_floating_inputs_keep_their_type(dtype: torch.dtype) -> None:
    assert from_tensors(X.to(dtype), Y, XT.to(dtype), YT).x_train.dtype == dtype


def test_floating_targets_are_regression_and_kept() -> None:
    made = from_tensors(X, X[:, :2], XT, XT[:, :2])
    assert made.classes is None
    assert torch.equal(made.y_test, XT[:, :2])


def test_labels_may_have_a_time_axis() -> None:
    made = from_tensors(torch.zeros(2, 5, 3), torch.ones(2, 5).long(), torch.zeros(1, 5, 3), torch.ones(1, 5).long())
    assert made.classes == 2


def test_numpy_views_that_torch_cannot_share_are_copied() -> None:
    frozen = np.zeros((4, 3), np.float32)
    frozen.flags.writeable = False
    made = from_tensors(frozen, Y.numpy()[::-1], XT.numpy().astype(">f4").astype("<f4"), YT.numpy())
    assert made.y_train.tolist() == [1, 2, 1, 0]


def test_inputs_are_detached_from_a_graph() -> None:
    assert not from_tensors(X.clone().requires_grad_(), Y, XT, YT).x_train.requires_grad


def bad_at(index: int, value: float) -> torch.Tensor:
    x = torch.zeros(4, 3)
    x[index, 1] = value
    return x


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ((bad_at(2, float("nan")), Y, XT, YT), r"x_train\[2\] holds nan"),
        ((X, Y, bad_at(1, float("-inf"))[:2], YT), r"x_test\[1\] holds -inf"),
        ((X, bad_at(3, float("inf")), XT, XT), r"y_train\[3\] holds inf"),
        ((X, Y[:3], XT, YT), "x_train has 4 examples but y_train has 3"),
        ((X, Y, XT, Y), "x_test has 2 examples but y_test has 4"),
        ((X, Y, XT[:, :2], YT), r"shape \(3,\) but x_test of \(2,\)"),
        ((X, Y, XT.double(), YT), "x_train is float32 but x_test is float64"),
        ((X, Y, XT, YT.float()), "y_train is int64 but y_test is float32"),
        ((X, Y.double(), XT, YT), "y_train is float64 but y_test is int64"),
        ((X, Y - 1, XT, YT), "y_train holds -1 at position 0, but labels count from 0"),
        ((X.long(), Y, XT, YT), r"x_train is int64.*x_train.float\(\)"),
        ((X, Y > 0, XT, YT), r"y_train is bool.*y_train.long\(\)"),
        ((X[:0], Y[:0], XT, YT), "x_train has shape .* at least one example"),
        ((X, Y, XT, YT[0]), "y_test has shape .* at least one example"),
        ((X[:, 0], Y, XT, YT), "x_train has shape .* examples × values"),
        ((X.tolist(), Y, XT, YT), "x_train is a list: give a torch tensor or a numpy array"),
        ((X, None, XT, YT), "y_train is a NoneType"),
        ((X, np.array(["a", "b", "c", "d"]), XT, YT), "y_train is a numpy array of <U1"),
        ((X.to_sparse(), Y, XT, YT), "x_train is sparse"),
    ],
)
def test_what_cannot_be_trained_on_is_refused_in_one_sentence(arguments: tuple, sentence: str) -> None:
    with pytest.raises(DataError, match=sentence) as caught:
        from_tensors(*arguments)
    assert "\n" not in str(caught.value)
