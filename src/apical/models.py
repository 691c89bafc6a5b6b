"""The paper's networks by name (its appendix D): an MLP and a CNN for images, an RNN for sequences, a TextCNN for sentences.

As in the authors' code, no layer has a bias and W ~ N(0, 0.05²); tanh stands after every layer but the last (ReLU in the
TextCNN, as in its source). Such an MLP is odd, f(−x) = −f(x): `mlp-bias` is the same network with biases, zero at first.
The narrow networks for `digits`, which are ours, have W ~ N(0, 1/fan-in): at 0.05 their random features would be
too faint for the control that only trains the readout.
Initial weights come from the global CPU generator: seed it to choose them.
"""

import re
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import overload

from torch import nn

from apical.core.parsing import Parallel
from apical.core.recurrent import Elman
from apical.data import Dataset
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

# Hidden units of the RNN: the paper's for characters and for its time series, 300 for all others.
CHARACTER_UNITS = 324
SERIES_UNITS = {"electricity": 300, "metr_la": 300, "pems_bay": 384}

IMAGE_MODELS = ("mlp", "cnn")
# How each TextCNN sums up a feature over time, and the sentences that it is for, with the values of a word's vector.
TEXTCNNS: dict[str, Callable[[int], nn.Module]] = {
    "textcnn": nn.AdaptiveMaxPool1d,
    "textcnn-mean": nn.AdaptiveAvgPool1d,
}
SENTENCES = {"mr": 100, "subj": 100}

MODELS = (*IMAGE_MODELS, "rnn", *TEXTCNNS)
_BIAS = "-bias"
NAMES = (*MODELS, "mlp-WIDTH-WIDTH…", *(name + _BIAS for name in IMAGE_MODELS))
"""What an error says that a network may be called."""
_VARIANT = re.compile(rf"(mlp(-[1-9]\d*)*|cnn)({_BIAS})?")


def mlp(sizes: Sequence[int], *, bias: bool = False) -> nn.Sequential:
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
        stages += [nn.Linear(size_in, size_out, bias=bias), nn.Tanh()]
    return nn.Sequential(*stages[:-1])


def cnn(channels: int, side: int, layout: str, *, bias: bool = False) -> nn.Sequential:
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
                nn.Conv2d(channels, int(filters), int(kernel), padding=padding, bias=bias),
                nn.Tanh(),
            ]
            channels, side = int(filters), side + 2 * padding - int(kernel) + 1
        else:
            if not features:
                stages.append(nn.Flatten())
                features = channels * side * side
            stages += [nn.Linear(features, int(word), bias=bias), nn.Tanh()]
            features = int(word)
    return nn.Sequential(*stages[:-1])


def rnn(data: str | Dataset) -> Elman:
    """An Elman network as wide as the data ask for, hidden units as in the paper."""
    if isinstance(data, str):
        raise ApicalError(
            f"an rnn takes its sizes from the data: pass apical.data.load({data!r}), not the name."
        )
    x, y = data.x_train, data.y_train
    indices = not x.is_floating_point()
    if x.ndim != (2 if indices else 3) or y.ndim != (3 if data.classes is None else 2):
        raise ApicalError(
            f"an rnn reads sequences, but {data.name} has examples of shape {tuple(x.shape[1:])} with targets of shape "
            f"{tuple(y.shape[1:])}; characters and time series work."
        )
    outputs = y.shape[2] if data.classes is None else data.classes
    inputs = max(outputs, *(int(part.max()) + 1 for part in (x, data.x_test))) if indices else x.shape[2]
    units = SERIES_UNITS.get(data.name, 300) if data.classes is None else CHARACTER_UNITS
    return Elman(nn.RNN(inputs, units, bias=False, batch_first=True), nn.Linear(units, outputs, bias=False))


def textcnn(values: int, classes: int, over_time: Callable[[int], nn.Module]) -> nn.Sequential:
    """Kim's network (2014): 100 features of each 3, 4 and 5 words in a row, the strongest (or the mean) of each feature,
    half of them left out in training, one dense layer. Sentences are padded by a word less than a filter is wide.

    >>> textcnn(100, 2, nn.AdaptiveMaxPool1d)[0][2]
    Sequential(
      (0): Conv1d(100, 100, kernel_size=(5,), stride=(1,), padding=(4,), bias=False)
      (1): ReLU()
      (2): AdaptiveMaxPool1d(output_size=1)
    )
    """
    branches = [
        nn.Sequential(nn.Conv1d(values, 100, n, padding=n - 1, bias=False), nn.ReLU(), over_time(1))
        for n in (3, 4, 5)
    ]
    return nn.Sequential(
        Parallel(*branches), nn.Flatten(), nn.Dropout(0.5), nn.Linear(300, classes, bias=False)
    )


def is_model(name: str) -> bool:
    """Whether `build` knows the name, for some data set at least."""
    return name in MODELS or _VARIANT.fullmatch(name) is not None


def _sizes(name: str, data: str) -> tuple[int, ...]:
    hidden = [int(width) for width in name.split("-")[1:]]
    return (MLPS[data][0], *hidden, MLPS[data][-1]) if hidden else MLPS[data]


@overload
def build(name: str, data: str) -> nn.Sequential: ...
@overload
def build(name: str, data: Dataset) -> nn.Sequential | Elman: ...
def build(name: str, data: str | Dataset) -> nn.Sequential | Elman:
    """The paper's network of this name for this data set; an RNN takes its sizes from the data themselves.

    `mlp-1024-512` is an MLP with hidden layers of these widths; `-bias` after the name gives every layer of an MLP or a CNN
    a bias.

    >>> sum(p.numel() for p in build("mlp", "mnist").parameters())
    1460736
    """
    if not is_model(name):
        raise ApicalError(
            f"unknown model {name!r}; {', '.join(NAMES)} or a function that returns an nn.Sequential work."
        )
    key = data if isinstance(data, str) else data.name
    if name in TEXTCNNS:
        model: nn.Sequential | Elman = _of_sentences(name, data)
    else:
        model = rnn(data) if name == "rnn" else _of_images(name, key)
    for weight in model.parameters():
        if weight.is_meta:  # it has no values; and torch would import its compiler to draw them
            continue
        if weight.ndim == 1:
            nn.init.zeros_(weight)
        else:
            nn.init.normal_(weight, std=weight[0].numel() ** -0.5 if key == "digits" else SPREAD)
    return model


def _of_sentences(name: str, data: str | Dataset) -> nn.Sequential:
    """As wide as the words' vectors, where the data are there, else as the vectors that MR and Subj come with."""
    if isinstance(data, str):
        if data not in SENTENCES:
            raise ApicalError(
                f"no {name} is defined for the data {data!r} (only for {', '.join(SENTENCES)}); pass a function that "
                "returns an nn.Sequential."
            )
        return textcnn(SENTENCES[data], 2, TEXTCNNS[name])
    if data.x_train.ndim != 3 or not data.x_train.is_floating_point() or data.classes is None:
        raise ApicalError(
            f"a {name} reads sentences (vector × words) of known classes, but {data.name} has examples of shape "
            f"{tuple(data.x_train.shape[1:])}; mr and subj work."
        )
    return textcnn(data.x_train.shape[1], data.classes, TEXTCNNS[name])


def _of_images(name: str, data: str) -> nn.Sequential:
    plain = name.removesuffix(_BIAS)
    known = CNNS if plain == "cnn" else MLPS
    if data not in known:
        raise ApicalError(
            f"no {name} is defined for the data {data!r} (only for {', '.join(known)}); pass a function that "
            "returns an nn.Sequential."
        )
    bias = plain != name
    return cnn(*CNNS[data], bias=bias) if plain == "cnn" else mlp(_sizes(plain, data), bias=bias)
