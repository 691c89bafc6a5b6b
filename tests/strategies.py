"""Hypothesis strategies: random synapses, and random networks of every kind that apical reads.

Shapes and modules are drawn, and shrink; weights and inputs come from a drawn seed.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from hypothesis import settings
from hypothesis import strategies as st
from torch import Tensor, nn

ACTIVATIONS: list[Callable[[], nn.Module]] = [
    nn.Tanh,
    nn.ReLU,
    lambda: nn.ReLU(inplace=True),
    nn.Sigmoid,
    nn.GELU,
    lambda: nn.GELU(approximate="tanh"),
    nn.SiLU,
    lambda: nn.SiLU(inplace=True),
    nn.Mish,
    nn.ELU,
    lambda: nn.ELU(inplace=True),
    nn.SELU,
    nn.CELU,
    lambda: nn.LeakyReLU(0.2, inplace=True),
    lambda: nn.Softplus(beta=2.0),
    nn.Softsign,
    nn.LogSigmoid,
    lambda: nn.Hardtanh(-0.5, 0.5),
    nn.Hardswish,
    nn.Hardsigmoid,
    nn.ReLU6,
    nn.Tanhshrink,
    lambda: nn.Softshrink(0.1),
    lambda: nn.Hardshrink(0.1),
    lambda: nn.Threshold(0.1, -0.2),
    lambda: nn.Softmax(dim=1),
    lambda: nn.LogSoftmax(dim=1),
    nn.Identity,
]


def share_of_examples(share: float) -> settings:
    """Hypothesis settings with this share of the profile's examples: less than 1 where an example takes long."""
    return settings(max_examples=max(2, round(share * settings().max_examples)))


@dataclass(frozen=True)
class Case:
    """A network, a batch for it, and labels within its number of classes."""

    model: nn.Sequential
    x: Tensor
    labels: Tensor

    def __repr__(self) -> str:
        return f"Case({self.model}, x: {tuple(self.x.shape)} {self.x.dtype}, labels: {self.labels.tolist()})"

    @property
    def input_shape(self) -> tuple[int, ...]:
        return tuple(self.x.shape[1:])


@dataclass(frozen=True)
class Wire:
    """One layer of weights and the shape of an input for it, batch first."""

    module: nn.Linear | nn.Conv1d | nn.Conv2d
    shape: tuple[int, ...]


seeds = st.integers(0, 2**16)
batches = st.integers(1, 4)


@st.composite
def convolutions(draw: st.DrawFn, channels: int, size: tuple[int, ...]) -> nn.Conv1d | nn.Conv2d:
    """A convolution that fits an input: any stride, padding, dilation, groups; even kernels, too."""
    dims = len(size)
    groups = draw(st.sampled_from([g for g in range(1, channels + 1) if channels % g == 0]))
    words = draw(st.sampled_from(["numbers", "numbers", "same", "valid"]))
    kernel, stride, padding, dilation = [], [], [], []
    for n in size:
        pad = draw(st.integers(0, 2)) if words == "numbers" else 0
        room = n + 2 * pad if words != "same" else n
        k = draw(st.integers(1, min(4, room)))
        d = 1 if k == 1 else draw(st.integers(1, min(3, (room - 1) // (k - 1))))
        kernel.append(k)
        padding.append(pad)
        dilation.append(d)
        stride.append(1 if words == "same" else draw(st.integers(1, 3)))
    conv = nn.Conv1d if dims == 1 else nn.Conv2d
    return conv(
        channels,
        groups * draw(st.integers(1, 2)),
        tuple(kernel),
        tuple(stride),
        tuple(padding) if words == "numbers" else words,
        tuple(dilation),
        groups,
        draw(st.booleans()),
    )


@st.composite
def wires(draw: st.DrawFn, kinds: tuple[str, ...] = ("dense", "conv1d", "conv2d")) -> Wire:
    """Any layer of weights on its own, in float64."""
    torch.manual_seed(draw(seeds))
    kind, batch = draw(st.sampled_from(kinds)), draw(batches)
    if kind == "dense":
        positions = draw(st.lists(st.integers(1, 3), max_size=2))
        layer = nn.Linear(draw(st.integers(1, 5)), draw(st.integers(1, 5)), bias=draw(st.booleans()))
        return Wire(layer.double(), (batch, *positions, layer.in_features))
    channels = draw(st.integers(1, 4))
    size = tuple(draw(st.integers(1, 9)) for _ in range(1 if kind == "conv1d" else 2))
    return Wire(draw(convolutions(channels, size)).double(), (batch, channels, *size))


@st.composite
def poolings(draw: st.DrawFn, size: tuple[int, ...]) -> nn.Module:
    dims = len(size)
    kind = draw(st.sampled_from(["Max", "Avg", "AdaptiveAvg", "AdaptiveMax"]))
    pool = getattr(nn, f"{kind}Pool{dims}d")
    if kind.startswith("Adaptive"):
        out = tuple(draw(st.integers(1, n)) for n in size)
        return pool(out if dims > 1 else out[0])
    k = draw(st.integers(1, min(3, *size)))
    return pool(k, draw(st.integers(1, 3)), draw(st.integers(0, k // 2)), ceil_mode=draw(st.booleans()))


def activations() -> st.SearchStrategy[nn.Module]:
    return st.sampled_from(ACTIVATIONS).map(lambda build: build())


@st.composite
def nested(draw: st.DrawFn, modules: list[nn.Module]) -> nn.Sequential:
    """The same modules in the same order, some of them inside Sequentials of their own."""
    model: list[nn.Module] = []
    while modules:
        cut = draw(st.integers(1, len(modules)))
        head, modules = modules[:cut], modules[cut:]
        if draw(st.booleans()):
            deeper = draw(st.booleans())
            model.append(nn.Sequential(nn.Sequential(*head)) if deeper else nn.Sequential(*head))
        else:
            model += head
    return nn.Sequential(*model)


def _finish(draw: st.DrawFn, modules: list[nn.Module], shape: tuple[int, ...], dtype: torch.dtype) -> Case:
    model = draw(nested(modules)).to(dtype)
    x = torch.randn(draw(batches), *shape, dtype=dtype)
    with torch.no_grad():
        classes = model(x).shape[1]
    return Case(model, x, torch.randint(0, classes, x.shape[:1]))


@st.composite
def dense_networks(
    draw: st.DrawFn, dtype: torch.dtype = torch.float64, min_layers: int = 1, max_layers: int = 5
) -> Case:
    torch.manual_seed(draw(seeds))
    shape = tuple(draw(st.lists(st.integers(1, 3), min_size=1, max_size=2)))
    modules: list[nn.Module] = [nn.Flatten()] if len(shape) > 1 or draw(st.booleans()) else []
    width = torch.Size(shape).numel()
    layers = draw(st.integers(min_layers, max_layers))
    bias = draw(st.booleans())
    for i in range(layers):
        out = draw(st.integers(2 if i == layers - 1 else 1, 6))
        modules.append(nn.Linear(width, out, bias=bias))
        if i < layers - 1 or draw(st.booleans()):
            modules.append(draw(activations()))
        width = out
    return _finish(draw, modules, shape, dtype)


@st.composite
def conv_networks(draw: st.DrawFn, dtype: torch.dtype = torch.float64, min_convs: int = 1, max_convs: int = 3) -> Case:
    """Convolutions, each with an activation and perhaps a pooling, before, after or without it; a dense end."""
    torch.manual_seed(draw(seeds))
    dims = draw(st.integers(1, 2))
    channels, size = draw(st.integers(1, 3)), tuple(draw(st.integers(4, 8)) for _ in range(dims))
    shape = (channels, *size)
    probe = torch.zeros(2, *shape)
    modules: list[nn.Module] = []
    for _ in range(draw(st.integers(min_convs, max_convs))):
        block: list[nn.Module] = [draw(convolutions(probe.shape[1], tuple(probe.shape[2:])))]
        probe = block[0](probe).detach()
        activation = draw(activations())
        pool = draw(st.sampled_from(["none", "before", "after"]))
        if pool != "none":
            pooling = draw(poolings(tuple(probe.shape[2:])))
            try:
                probe = pooling(probe)
            except RuntimeError:  # nothing would be left
                pooling = nn.Identity()
            block += [pooling, activation] if pool == "before" else [activation, pooling]
        else:
            block.append(activation)
        modules += block
    modules.append(nn.Flatten())
    width = probe.flatten(1).shape[1]
    if draw(st.booleans()):
        hidden = draw(st.integers(1, 6))
        modules += [nn.Linear(width, hidden), draw(activations())]
        width = hidden
    modules.append(nn.Linear(width, draw(st.integers(2, 4)), bias=draw(st.booleans())))
    return _finish(draw, modules, shape, dtype)


def networks(dtype: torch.dtype = torch.float64) -> st.SearchStrategy[Case]:
    return dense_networks(dtype) | conv_networks(dtype)


def hidden_networks(dtype: torch.dtype = torch.float64) -> st.SearchStrategy[Case]:
    """Networks with at least one hidden layer."""
    return dense_networks(dtype, min_layers=2) | conv_networks(dtype)
