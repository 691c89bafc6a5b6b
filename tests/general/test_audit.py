"""The audit of learners whose model is any module: feedback weights keep C1, and a planted transport does not."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import apical
from own_networks import prepare

SLOW = [
    ("encoder", "dll"),
    ("gpt", "fa"),
    ("gpt", "dll:kolen-pollack"),
    ("lstm", "fa"),
    ("resnet", "fa"),
    ("resnet", "dll"),
    ("cells", "dll"),
]


@pytest.mark.parametrize(
    ("name", "rule"), [("rnn", "dll"), *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)]
)
def test_feedback_weights_meet_c1_and_backpropagation_does_not(name: str, rule: str) -> None:
    own, model, _, x = prepare(name)
    y = x if name == "gpt" else torch.randint(0, 3, x.shape[:1])
    assert apical.audit(own.make(rule, model, x), x, y).c1 is True
    assert apical.audit(own.make("bp", model, x), x, y).c1 is False


def test_a_planted_transport_does_not_meet_c1() -> None:
    class Planted(nn.Module):
        """The output is that of two wired layers, but an error also passes through a copy of the second one's weights."""

        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(6, 5), nn.Linear(5, 4)

        def forward(self, x: Tensor) -> Tensor:
            h = torch.tanh(self.first(x))
            with torch.no_grad():
                copied = self.second.weight.clone()
            through = F.linear(h, copied)
            return self.second(h.detach()) + through - through.detach()

    x, y = torch.randn(8, 6), torch.randint(0, 4, (8,))
    learner = apical.make("fa", Planted(), example=x)
    assert apical.audit(learner, x, y).c1 is not True
