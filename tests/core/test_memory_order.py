"""Images in channels-last memory, as they are on a GPU: the same numbers, and no array that lies in another order."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import apical
from apical.core.network import Params
from apical.core.views import from_memory_order, is_channels_last, reshape_in_memory_order, to_memory_order
from cases import EVERY
from reference import assert_all_same
from runs import updates

pytestmark = pytest.mark.no_cover  # other tests run these lines, too, and coverage doubles the time

LAST = torch.channels_last
MIXED = {
    "wp": "torch's vmap gives its convolutions an order of its own",
    "dfa": "B brings the error to a map's values in their usual order",
    "drtp": "B brings the target to a map's values in their usual order",
    "local": "a head reads a map's values in their usual order",
}


def network() -> nn.Sequential:
    return nn.Sequential(
        *(nn.Conv2d(3, 16, 3, padding=1), nn.Tanh(), nn.MaxPool2d(2)),
        *(nn.Conv2d(16, 16, 3, padding=1), nn.Tanh(), nn.MaxPool2d(2)),
        *(nn.Conv2d(16, 8, 3, padding=1), nn.Tanh(), nn.AvgPool2d(2)),
        *(nn.Flatten(), nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 10)),
    ).double()


def learner_of(rule: str) -> apical.Learner:
    torch.manual_seed(3)
    return apical.make(rule, network(), input_shape=(3, 12, 12))


def batch() -> tuple[Tensor, Tensor]:
    return torch.rand(5, 3, 12, 12, dtype=torch.double), torch.randint(0, 10, (5,))


def last(tensors: Params) -> Params:
    """Images with their channels last, everything else as it is."""
    return {n: t.detach().contiguous(memory_format=LAST) if t.ndim == 4 else t for n, t in tensors.items()}


@pytest.mark.parametrize("rule", EVERY)
def test_the_order_of_memory_changes_no_number(rule: str) -> None:
    learner, (x, y) = learner_of(rule), batch()
    learner.allocate(x, y)
    noise = learner.draw(x, torch.Generator().manual_seed(5))
    # Noise on images is taken as it lies, so that it must be put in that order to be the same.
    there = {n: e.movedim(1, -1).reshape(e.shape) if e.ndim == 4 else e for n, e in noise.items()}
    given = there if rule in ("np", "tp", "dtp") else noise
    params = learner.params()
    plain = list(updates(learner, params, x, y, noise))
    relaid = list(updates(learner, last(params), last({"x": x})["x"], y, given))
    for one, other in zip(plain, relaid, strict=True):
        assert_all_same(dict(one.grads), dict(other.grads), 1e-10)
        assert_all_same({"output": one.output, **one.state}, {"output": other.output, **other.state}, 1e-10)


class Orders(TorchDispatchMode):
    """Watches for operations, views aside, on maps of 16 channels that are not last; maps that lie down have them last."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        view = any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns)
        images = [t for t in tree_leaves((args, kwargs, out)) if isinstance(t, Tensor) and t.ndim == 4]
        if not view and any(t.shape[1] == 16 and t.shape[2] > 3 and t.is_contiguous() for t in images):
            self.found.append(f"{func} {[(tuple(t.shape), t.stride()) for t in images]}")
        return out


@pytest.mark.parametrize("rule", EVERY)
def test_no_map_of_a_step_lies_in_another_order(rule: str) -> None:
    learner, (x, y) = learner_of(rule), batch()
    params, x, noise = last(learner.params()), last({"x": x})["x"], learner.draw(x)
    learner.allocate(x, y)
    with Orders() as watch:
        list(updates(learner, params, x, y, noise))
    assert bool(watch.found) == (rule.partition(":")[0] in MIXED), watch.found[:3]


def test_nothing_is_copied_to_lie_down_and_stand_up() -> None:
    images = torch.rand(2, 3, 4, 5)
    last = images.contiguous(memory_format=LAST)
    assert (is_channels_last(images), is_channels_last(last)) == (False, True)
    assert to_memory_order(images) is images
    assert to_memory_order(last).shape == (2, 4, 5, 3)
    assert to_memory_order(last).is_contiguous()
    back = from_memory_order(to_memory_order(last), last)
    assert back.data_ptr() == last.data_ptr()
    assert torch.equal(back, images)
    assert not is_channels_last(torch.rand(2, 3))


def test_noise_is_taken_as_it_lies() -> None:
    noise = torch.rand(6, 3, 4, 5)
    last = torch.rand(2, 3, 4, 5).contiguous(memory_format=LAST)
    taken = reshape_in_memory_order(noise, like=last)
    assert taken.shape == noise.shape
    assert is_channels_last(taken)
    assert taken.data_ptr() == noise.data_ptr()
    assert reshape_in_memory_order(noise, like=torch.rand(2, 3, 4, 5)).data_ptr() == noise.data_ptr()
    assert torch.equal(reshape_in_memory_order(noise, like=torch.rand(2, 3, 4, 5)), noise)
