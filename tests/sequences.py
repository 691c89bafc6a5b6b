"""Random recurrent networks with sequences for them, and what a plain nn.RNN and autograd say of these."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor, nn

import apical
from reference import PerExample, autograd, cross_entropy

RECURRENT = [
    *["readout", "bp", "fa", "sign", "dll", "dll:released", "dll:frozen", "dll:kolen-pollack"],
    *["pc", "pc:fixed", "ipc"],
]
"""The rules that train a recurrent network."""
DLL = [rule for rule in RECURRENT if rule.startswith("dll")]


@dataclass(frozen=True)
class Sequences:
    """A network, sequences for it, a label and a vector of values for each of their time steps."""

    model: apical.Elman
    x: Tensor
    labels: Tensor
    values: Tensor

    @property
    def count(self) -> int:
        """n = batch × time."""
        return self.labels.numel()

    @property
    def hot(self) -> Tensor:
        """The input as values, indices written out."""
        size = self.model.rnn.input_size
        return self.x if self.x.is_floating_point() else torch.eye(size, dtype=torch.float64)[self.x]


def sequences(
    batch: int = 4,
    time: int = 5,
    sizes: tuple[int, int, int] = (3, 6, 4),
    *,
    bias: tuple[bool, bool] = (True, True),
    indices: bool = False,
    seed: int = 0,
) -> Sequences:
    torch.manual_seed(seed)
    inputs, hidden, outputs = sizes
    model = apical.Elman(
        nn.RNN(inputs, hidden, batch_first=True, bias=bias[0]), nn.Linear(hidden, outputs, bias=bias[1])
    ).double()
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1.5)
    drawn = torch.randint(0, inputs, (batch, time)), torch.randn(batch, time, inputs, dtype=torch.float64)
    labels = torch.randint(0, outputs, (batch, time))
    return Sequences(model, drawn[not indices], labels, torch.randn(batch, time, outputs, dtype=torch.float64))


@st.composite
def any_sequences(draw: st.DrawFn, min_time: int = 1) -> Sequences:
    return sequences(
        draw(st.integers(1, 4)),
        draw(st.integers(min_time, 6)),
        (draw(st.integers(1, 4)), draw(st.integers(1, 5)), draw(st.integers(2, 4))),
        bias=(draw(st.booleans()), draw(st.booleans())),
        indices=draw(st.booleans()),
        seed=draw(st.integers(0, 2**16)),
    )


def half_squared(output: Tensor, y: Tensor) -> Tensor:
    """½ Σ (output − target)²; a label is one-hot."""
    target = y if y.is_floating_point() else F.one_hot(y, output.shape[1])
    return (output - target).square().sum(1) / 2


def wavy(output: Tensor, y: Tensor) -> Tensor:
    return (output + torch.arange(output.shape[1])).sin().mean(1) * (1 + y)


LOSSES: list[tuple[dict[str, object], PerExample, bool]] = [
    ({}, cross_entropy(), True),
    ({"label_smoothing": 0.2}, cross_entropy(0.2), True),
    ({"loss": "mse"}, half_squared, True),
    ({"loss": "mse"}, half_squared, False),
    ({"loss": wavy}, wavy, True),
]
"""What `make` takes, the same written plainly, and whether it is for labels."""


def plain(case: Sequences) -> Tensor:
    """Batch × time × outputs, by torch's own modules."""
    return case.model.readout(case.model.rnn(case.hot)[0])


def mean_loss(case: Sequences, loss: PerExample = cross_entropy(), labels: bool = True) -> Tensor:  # noqa: B008
    """The mean over batch and time."""
    y = case.labels if labels else case.values
    return loss(plain(case).flatten(0, 1), y.flatten(0, 1)).mean()


def bptt(case: Sequences, loss: PerExample = cross_entropy(), labels: bool = True) -> dict[str, Tensor]:  # noqa: B008
    return autograd(case.model, mean_loss(case, loss, labels))
