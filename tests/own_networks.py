"""Networks of the kinds that people write, for the tests of models that are not read as layers. All in float64, tiny."""

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import apical
from apical.core.general import split_inputs

FAMILY = ["bp", "fa", "sign", "dll", "dll:released", "dll:frozen", "dll:kolen-pollack"]
"""Every rule that takes any module and trains all of it; `readout` also takes a `head`."""
STORED = [rule for rule in FAMILY if rule not in ("bp", "sign")]
"""Those that have feedback weights of their own."""
LINEAR = [rule for rule in FAMILY if rule not in ("dll", "dll:released")]
"""Those whose gradients are linear in the error."""


class Residual(nn.Module):
    """A block of a ResNet."""

    def __init__(self, channels: int, out: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, out, 3, stride, padding=1, bias=False)
        self.bn1, self.bn2 = nn.BatchNorm2d(out), nn.BatchNorm2d(out)
        self.conv2 = nn.Conv2d(out, out, 3, padding=1, bias=False)
        self.skip = nn.Sequential(nn.Conv2d(channels, out, 1, stride, bias=False), nn.BatchNorm2d(out))

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(out)) + self.skip(x))


class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.bn = nn.Conv2d(1, 3, 3, padding=1, bias=False), nn.BatchNorm2d(3)
        self.blocks = nn.Sequential(Residual(3, 4, 1), Residual(4, 5, 2))
        self.fc = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        out = self.blocks(F.relu(self.bn(self.stem(x))))
        return self.fc(out.mean((2, 3)))


class Attention(nn.Module):
    """Causal attention with `F.scaled_dot_product_attention`, as people write it."""

    def __init__(self, size: int, heads: int) -> None:
        super().__init__()
        self.heads, self.qkv, self.out = heads, nn.Linear(size, 3 * size), nn.Linear(size, size)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class GPT(nn.Module):
    """Tied embeddings, positions, pre-norm blocks, a raw matrix; `reentrant` says how blocks are checkpointed, if at all."""

    def __init__(self, tied: bool = True) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(7, 6), nn.Parameter(torch.randn(1, 5, 6))
        self.blocks = nn.ModuleList([Block(6), Block(6)])
        self.norm, self.mix = nn.LayerNorm(6), nn.Parameter(torch.randn(6, 6) / 3)
        self.head = nn.Linear(6, 7, bias=False)
        if tied:
            self.head.weight = self.tokens.weight
        self.reentrant: bool | None = None

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.tokens(tokens) + self.positions[:, : tokens.shape[1]]
        for stage in (*self.blocks, partial(mix, self)):
            h = stage(h) if self.reentrant is None else checkpointed(stage, h, self.reentrant)
        return self.head(self.norm(h))


def mix(model: GPT, h: Tensor) -> Tensor:
    return h @ model.mix


def checkpointed(stage: Callable[[Tensor], Tensor], h: Tensor, reentrant: bool) -> Tensor:
    return torch.utils.checkpoint.checkpoint(stage, h, use_reentrant=reentrant)


class Block(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.norm1, self.attention, self.norm2 = nn.LayerNorm(size), Attention(size, 2), nn.LayerNorm(size)
        self.up, self.down, self.drop = nn.Linear(size, 8), nn.Linear(8, size), nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.drop(self.down(F.gelu(self.up(self.norm2(x)))))


class Encoder(nn.Module):
    """torch's own Transformer layers, one pre-norm and one post-norm, with their attention."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Linear(4, 6)
        self.pre = nn.TransformerEncoderLayer(6, 2, 8, 0.1, batch_first=True, norm_first=True)
        self.post = nn.TransformerEncoderLayer(6, 3, 8, 0.1, "gelu", batch_first=True)
        self.fc = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.post(self.pre(self.embedding(x))).mean(1))


class Recurrent(nn.Module):
    """A recurrent module, read at its last step."""

    def __init__(self, kind: type[nn.RNNBase], **options: Any) -> None:
        super().__init__()
        self.rnn = kind(4, 5, batch_first=True, **options)
        self.fc = nn.Linear(self.rnn(torch.zeros(1, 2, 4))[0].shape[-1], 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.rnn(x)[0][:, -1])


class Cells(nn.Module):
    """All three cells, one time step after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.gru, self.lstm = nn.RNNCell(4, 5), nn.GRUCell(5, 5), nn.LSTMCell(5, 5)
        self.fc = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        h, g, (s, c) = None, None, (None, None)
        for step in x.unbind(1):
            h = self.rnn(step, h)
            g = self.gru(h, g)
            s, c = self.lstm(g, None if s is None else (s, c))
        return self.fc(s)


class UNet(nn.Module):
    """Grouped, dilated and transposed convolutions, padding modes, a group norm, and a Bilinear."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Conv2d(2, 4, 3, 2, padding=1, groups=2, padding_mode="circular")
        self.norm, self.up = nn.GroupNorm(2, 4), nn.ConvTranspose2d(4, 4, 3, 2, 1, output_padding=1, groups=2)
        self.same = nn.Conv2d(4, 4, 2, padding="same", dilation=2)
        self.line, self.volume = nn.Conv1d(4, 2, 3), nn.Conv3d(1, 2, 2)
        self.pair = nn.Bilinear(4, 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = F.silu(self.up(self.norm(self.down(x))))
        h = h + self.same(h)
        line, volume = self.line(h.flatten(2)), self.volume(h.unsqueeze(1))
        ends = torch.cat([line.mean(2), volume.mean((2, 3, 4))], 1)
        return self.pair(h.mean((2, 3)), ends.tanh())


class InPlace(nn.Module):
    """Activations and sums that write into what a product gave: of a Linear on sequences, of attention, of an einsum."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.w, self.act, self.fc = nn.Parameter(torch.randn(5, 4)), nn.ELU(inplace=True), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.act(self.first(x))
        h = self.second(h)
        h += x
        h = self.attention(h, h, h)[0]
        h += x
        return self.fc(torch.einsum("bti,oi->bto", h, self.w).sigmoid_().mean(1))


class Raw(nn.Module):
    """One layer of weights that the code itself multiplies, `act(self, h)` of its input h."""

    def __init__(self, act: Callable[["Raw", Tensor], Tensor]) -> None:
        super().__init__()
        self.act, self.fc = act, nn.Linear(4, 5)
        self.w, self.b, self.g = (nn.Parameter(torch.randn(s)) for s in ((5, 3), (3,), (5,)))
        self.parts = nn.ParameterList([torch.randn(5, 5) for _ in range(2)])
        self.position, self.table = nn.Parameter(torch.randn(1, 6, 5)), nn.Embedding(7, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self, torch.tanh(self.fc(x)))


@dataclass
class Own:
    """A network with an input for it; `example` says whether `make` must see it run."""

    build: Callable[[], nn.Module]
    x: Callable[[], Any]
    example: bool = False
    options: dict[str, Any] = field(default_factory=dict)

    def make(self, rule: str, model: nn.Module, x: Any, **options: Any) -> Any:
        example = {"example": x} if self.example else {}
        return apical.make(rule, model, **example, **self.options, **options)


def images() -> Tensor:
    return torch.randn(4, 1, 6, 6)


def sequences() -> Tensor:
    return torch.randn(4, 3, 4)


NETWORKS: dict[str, Own] = {
    "resnet": Own(ResNet, images),
    "encoder": Own(Encoder, sequences),
    "gpt": Own(GPT, lambda: torch.randint(0, 7, (4, 5)), example=True),
    "rnn": Own(lambda: Recurrent(nn.RNN, nonlinearity="relu", bias=False), sequences),
    "lstm": Own(lambda: Recurrent(nn.LSTM, num_layers=2, bidirectional=True, dropout=0.3), sequences),
    "projected lstm": Own(lambda: Recurrent(nn.LSTM, num_layers=2, proj_size=3), sequences),
    "gru": Own(lambda: Recurrent(nn.GRU, bidirectional=True), sequences),
    "cells": Own(Cells, sequences),
    "in place": Own(InPlace, sequences, example=True),
    "unet": Own(UNet, lambda: torch.randn(3, 2, 6, 6)),
}


def prepare(name: str, seed: int = 0) -> tuple[Own, nn.Module, nn.Module, Any]:
    """A network of this name, its model, a copy that no learner knows, and an input."""
    torch.manual_seed(seed)
    own = NETWORKS[name]
    model = own.build().double()
    x = own.x()
    return own, model, copy.deepcopy(model), x.double() if x.is_floating_point() else x


def run(model: nn.Module, x: Any, seed: int = 1) -> Tensor:
    """One value of the model's output that all of it counts in, with these random numbers."""
    torch.manual_seed(seed)
    args, kwargs = split_inputs(x)
    return model(*args, **kwargs).tanh().square().mean()


def gradients_of(learner: nn.Module, loss: Callable[[], Tensor]) -> dict[str, Tensor]:
    """The gradients of the learner's parameters after one backward pass."""
    learner.zero_grad()
    loss().backward()
    return {name: p.grad.clone() for name, p in learner.named_parameters() if p.grad is not None}


def tie_feedback_to_weights(learner: Any) -> None:
    with torch.no_grad():
        for w, theta in zip(learner.forward_weights, learner.feedback_weights, strict=True):
            if theta is not None:
                theta.copy_(w)
