"""The paper's networks by name (its appendix D), one MLP and one CNN for each data set.

As in the authors' code, no layer has a bias and W ~ N(0, 0.05²); tanh stands after every layer but the last.
The narrow networks for `digits`, which are ours, have W ~ N(0, 1/fan-in): at 0.05 their random features would be
too faint for the control that only trains the readout.
Initial weights come from the global CPU generator: seed it to choose them.
"""

import re
from collections.abc import Sequence
from itertools import pairwise

from torch import nn

from apical.errors import ApicalError

SPREAD = 0.05

MLPS: dict[str, tuple[int, ...]] = {
    "digits": (64, 32, 32, 10),
    "mnist": (784, 1024, 512, 256, 10),
    "fashion_mnist": (784, 1024, 512, 256, 10),
    "svhn": (3072, 4096, 2048, 1024, 256, 10),
    "cifar10": (3072, 4096, 2048, 1024, 256, 10),
}

# (input channels, input side, what follows): 'C64k5' is a convolution with 64 filters of 5 × 5 without padding,
# a 'p' pads it to keep the size, M and A are max and average pooling by 2, a number is a dense layer.
CNNS: dict[str, tuple[int, int, str]] = {
    "digits": (1, 8, "C8k3p M C16k3p M 32 10"),
    "mnist": (1, 28, "C32k5 M C64k3 M C16k3 200 10"),
    "fashion_mnist": (1, 28, "C64k5 M C128k3 A C64k3 128 10"),
    "svhn": (3, 32, "C64k3p M C128k3p M C64k3p 256 10"),
    "cifar10": (3, 32, "C64k3p M C128k3p M C64k3p A 256 10"),
    "cifar100": (3, 32, "C64k3p C64k3p M C128k3p M C64k3p A 1024 100"),
    "tiny_imagenet": (3, 64, "C64k3p C64k3p M C128k3p C128k3p M C64k3p A 1024 200"),
}

MODELS = ("mlp", "cnn")
_WIDTHS = re.compile(r"mlp(-[1-9]\d*)+")


def mlp(sizes: Sequence[int]) -> nn.Sequential:
    """Dense layers of these sizes, tanh between them.

    >>> mlp((4, 3, 2))
    Sequential(
      (0): Flatten(start_dim=1, end_dim=-1)
      (1): Linear(in_features=4, out_features=3, bias=False)
      (2): Tanh()
      (3): Linear(in_features=3, out_features=2, bias=False)
    )
    """
    stages: list[nn.Module] = [nn.Flatten()]
    for size_in, size_out in pairwise(sizes):
        stages += [nn.Linear(size_in, size_out, bias=False), nn.Tanh()]
    return nn.Sequential(*stages[:-1])


def cnn(channels: int, side: int, layout: str) -> nn.Sequential:
    """A CNN written as in `CNNS`; sizes of dense layers follow from the input's side."""
    stages: list[nn.Module] = []
    features = 0
    for word in layout.split():
        if word in ("M", "A"):
            stages.append(nn.MaxPool2d(2) if word == "M" else nn.AvgPool2d(2))
            side //= 2
        elif word.startswith("C"):
            filters, _, kernel = word.removeprefix("C").removesuffix("p").partition("k")
            padding = int(kernel) // 2 if word.endswith("p") else 0
            stages += [
                nn.Conv2d(channels, int(filters), int(kernel), padding=padding, bias=False),
                nn.Tanh(),
            ]
            channels, side = int(filters), side + 2 * padding - int(kernel) + 1
        else:
            if not features:
                stages.append(nn.Flatten())
                features = channels * side * side
            stages += [nn.Linear(features, int(word), bias=False), nn.Tanh()]
            features = int(word)
    return nn.Sequential(*stages[:-1])


def is_model(name: str) -> bool:
    """Whether `build` knows the name, for some data set at least."""
    return name in MODELS or _WIDTHS.fullmatch(name) is not None


def _sizes(name: str, data: str) -> tuple[int, ...]:
    hidden = [int(width) for width in name.split("-")[1:]]
    return (MLPS[data][0], *hidden, MLPS[data][-1]) if hidden else MLPS[data]


def build(name: str, data: str) -> nn.Sequential:
    """The paper's network of this name for this data set; `mlp-1024-512` is an MLP with hidden layers of these widths.

    >>> sum(p.numel() for p in build("mlp", "mnist").parameters())
    1460736
    """
    if not is_model(name):
        raise ApicalError(
            f"unknown model {name!r}; mlp, mlp-WIDTH-WIDTH…, cnn or a function that returns an nn.Sequential work."
        )
    known = CNNS if name == "cnn" else MLPS
    if data not in known:
        raise ApicalError(
            f"no {name} is defined for the data {data!r} (only for {', '.join(known)}); pass a function that "
            "returns an nn.Sequential."
        )
    model = cnn(*CNNS[data]) if name == "cnn" else mlp(_sizes(name, data))
    for weight in model.parameters():
        nn.init.normal_(weight, std=weight[0].numel() ** -0.5 if data == "digits" else SPREAD)
    return model
