"""The paper's networks by name (its appendix D): an MLP and a CNN for images, an RNN for sequences, a TextCNN for sentences.

As in the authors' code, no layer has a bias, W ~ N(0, 0.05²), and every layer but the last is followed by tanh (by ReLU
in the TextCNN, as in its source). Such an MLP is an odd function, f(−x) = −f(x); `mlp-bias` is the same network with
biases, initially zero. The small networks for `digits`, which are not in the paper, have W ~ N(0, 1/fan-in): with 0.05
their random features would be too weak for the control that trains only the readout. Initial weights are drawn from
the global CPU generator, so `torch.manual_seed` determines them.
"""

import re
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import overload

from torch import nn

from apical.core.recurrent import Elman
from apical.core.sequential import Parallel
from apical.data import Dataset
from apical.errors import ApicalError

WEIGHT_STD = 0.05
MAX_WIDTH_DIGITS = 6
"""A layer of `mlp-WIDTH` has fewer than a million units."""

MLPS: dict[str, tuple[int, ...]] = {
    "digits": (64, 32, 32, 10),
    "mnist": (784, 1024, 512, 256, 10),
    "fashion_mnist": (784, 1024, 512, 256, 10),
    "svhn": (3072, 4096, 2048, 1024, 256, 10),
    "cifar10": (3072, 4096, 2048, 1024, 256, 10),
}

# (input channels, input height and width, layers). In the text of the layers, 'C64k5' is a convolution with 64 filters of
# 5 × 5 without padding, a 'p' pads it to keep the size, M and A are max and average pooling by 2, a number is a dense layer.
CNNS: dict[str, tuple[int, int, str]] = {
    "digits": (1, 8, "C8k3p M C16k3p M 32 10"),
    "mnist": (1, 28, "C32k5 M C64k3 M C16k3 200 10"),
    "fashion_mnist": (1, 28, "C64k5 M C128k3 A C64k3 128 10"),
    "svhn": (3, 32, "C64k3p M C128k3p M C64k3p 256 10"),
    "cifar10": (3, 32, "C64k3p M C128k3p M C64k3p A 256 10"),
    "cifar100": (3, 32, "C64k3p C64k3p M C128k3p M C64k3p A 1024 100"),
    "tiny_imagenet": (3, 64, "C64k3p C64k3p M C128k3p C128k3p M C64k3p A 1024 200"),
}

# Hidden units of the RNN, from the paper; other time series have 300.
CHARACTER_UNITS = 324
SERIES_UNITS = {"electricity": 300, "metr_la": 300, "pems_bay": 384}

IMAGE_MODELS = ("mlp", "cnn")
# The pooling over time of each TextCNN.
TEXTCNNS: dict[str, Callable[[int], nn.Module]] = {
    "textcnn": nn.AdaptiveMaxPool1d,
    "textcnn-mean": nn.AdaptiveAvgPool1d,
}
# The data sets of sentences, with the length of their word vectors.
SENTENCES = {"mr": 100, "subj": 100}

MODELS = (*IMAGE_MODELS, "rnn", *TEXTCNNS)
_BIAS_SUFFIX = "-bias"
NAMES = (*MODELS, "mlp-WIDTH-WIDTH…", *(name + _BIAS_SUFFIX for name in IMAGE_MODELS))
"""The names of networks, as error messages list them."""
_VALID_NAME = re.compile(rf"(mlp(-[1-9]\d*)*|cnn)({_BIAS_SUFFIX})?")


def mlp(sizes: Sequence[int], *, bias: bool = False) -> nn.Sequential:
    """Build an MLP with dense layers of these sizes and tanh between them.

    >>> mlp((4, 3, 2))
    Sequential(
      (0): Flatten(start_dim=1, end_dim=-1)
      (1): Linear(in_features=4, out_features=3, bias=False)
      (2): Tanh()
      (3): Linear(in_features=3, out_features=2, bias=False)
    )
    """
    modules: list[nn.Module] = [nn.Flatten()]
    for size_in, size_out in pairwise(sizes):
        modules += [nn.Linear(size_in, size_out, bias=bias), nn.Tanh()]
    return nn.Sequential(*modules[:-1])


def cnn(channels: int, side: int, layers: str, *, bias: bool = False) -> nn.Sequential:
    """Build a CNN from a text of layers as in `CNNS`.

    Args:
        channels: channels of the input images.
        side: height and width of the input images.
        layers: the text of the layers, such as "C32k5 M 200 10".
        bias: whether all layers have a bias.
    """
    modules: list[nn.Module] = []
    features = 0
    for word in layers.split():
        if word in ("M", "A"):
            modules.append(nn.MaxPool2d(2) if word == "M" else nn.AvgPool2d(2))
            side //= 2
        elif word.startswith("C"):
            filters, _, kernel = word.removeprefix("C").removesuffix("p").partition("k")
            padding = int(kernel) // 2 if word.endswith("p") else 0
            modules += [nn.Conv2d(channels, int(filters), int(kernel), padding=padding, bias=bias), nn.Tanh()]
            channels, side = int(filters), side + 2 * padding - int(kernel) + 1
        else:
            if not features:
                modules.append(nn.Flatten())
                features = channels * side * side
            modules += [nn.Linear(features, int(word), bias=bias), nn.Tanh()]
            features = int(word)
    return nn.Sequential(*modules[:-1])


def rnn(data: str | Dataset) -> Elman:
    """Build an Elman network with inputs and outputs that fit the data and the paper's number of hidden units."""
    if isinstance(data, str):
        raise ApicalError(f"an rnn takes its sizes from the data: pass apical.data.load({data!r}), not the name.")
    x, y = data.x_train, data.y_train
    is_indices = not x.is_floating_point()
    if x.ndim != (2 if is_indices else 3) or y.ndim != (3 if data.classes is None else 2):
        raise ApicalError(
            f"an rnn reads sequences, but {data.name} has examples of shape {tuple(x.shape[1:])} with targets of shape "
            f"{tuple(y.shape[1:])}; characters and time series work."
        )
    outputs = y.shape[2] if data.classes is None else data.classes
    inputs = max(outputs, *(int(part.max()) + 1 for part in (x, data.x_test))) if is_indices else x.shape[2]
    units = SERIES_UNITS.get(data.name, 300) if data.classes is None else CHARACTER_UNITS
    return Elman(nn.RNN(inputs, units, bias=False, batch_first=True), nn.Linear(units, outputs, bias=False))


def textcnn(values: int, classes: int, pooling: Callable[[int], nn.Module]) -> nn.Sequential:
    """Build the network of Kim (2014) for sentences of word vectors with this many `values`.

    It has 100 filters over 3, 4 and 5 successive words each, a `pooling` of each filter's outputs over the sentence
    (maximum or mean), dropout of one half, and one dense layer. A filter over n words pads the sentence by n − 1.

    >>> textcnn(100, 2, nn.AdaptiveMaxPool1d)[0][2]
    Sequential(
      (0): Conv1d(100, 100, kernel_size=(5,), stride=(1,), padding=(4,), bias=False)
      (1): ReLU()
      (2): AdaptiveMaxPool1d(output_size=1)
    )
    """
    branches = [
        nn.Sequential(nn.Conv1d(values, 100, n, padding=n - 1, bias=False), nn.ReLU(), pooling(1)) for n in (3, 4, 5)
    ]
    return nn.Sequential(Parallel(*branches), nn.Flatten(), nn.Dropout(0.5), nn.Linear(300, classes, bias=False))


def is_model(name: str) -> bool:
    """Return whether `build` knows this name for at least one data set."""
    return name in MODELS or _VALID_NAME.fullmatch(name) is not None


def _choose_mlp_sizes(name: str, data: str) -> tuple[int, ...]:
    """Return the sizes of all layers, with the hidden widths of the name if it has any."""
    widths = name.split("-")[1:]
    if any(len(width) > MAX_WIDTH_DIGITS for width in widths):
        raise ApicalError(f"{name[:60]} has a layer of a million units or more; fewer work.")
    hidden = [int(width) for width in widths]
    return (MLPS[data][0], *hidden, MLPS[data][-1]) if hidden else MLPS[data]


@overload
def build(name: str, data: str) -> nn.Sequential: ...
@overload
def build(name: str, data: Dataset) -> nn.Sequential | Elman: ...
def build(name: str, data: str | Dataset) -> nn.Sequential | Elman:
    """Build the paper's network of this name for a data set.

    An RNN needs the loaded data, from which it takes its sizes; the others also take the data set's name.
    `mlp-1024-512` is an MLP with hidden layers of these widths. `-bias` at the end of the name gives every layer of an
    MLP or a CNN a bias.

    >>> sum(p.numel() for p in build("mlp", "mnist").parameters())
    1460736
    """
    if not is_model(name):
        raise ApicalError(
            f"unknown model {name!r}; {', '.join(NAMES)} or a function that returns an nn.Sequential work."
        )
    data_name = data if isinstance(data, str) else data.name
    if name in TEXTCNNS:
        model: nn.Sequential | Elman = _build_textcnn(name, data)
    else:
        model = rnn(data) if name == "rnn" else _build_image_model(name, data_name)
    for weight in model.parameters():
        if weight.is_meta:  # it has no values, and drawing them would make torch import its compiler
            continue
        if weight.ndim == 1:
            nn.init.zeros_(weight)
        else:
            nn.init.normal_(weight, std=weight[0].numel() ** -0.5 if data_name == "digits" else WEIGHT_STD)
    return model


def _build_textcnn(name: str, data: str | Dataset) -> nn.Sequential:
    """Build a TextCNN for loaded data, or for the data set of this name and its default word vectors."""
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


def _build_image_model(name: str, data: str) -> nn.Sequential:
    """Build an MLP or a CNN, with biases if the name ends in `-bias`."""
    base = name.removesuffix(_BIAS_SUFFIX)
    known = CNNS if base == "cnn" else MLPS
    if data not in known:
        raise ApicalError(
            f"no {name} is defined for the data {data!r} (only for {', '.join(known)}); pass a function that "
            "returns an nn.Sequential."
        )
    bias = base != name
    return cnn(*CNNS[data], bias=bias) if base == "cnn" else mlp(_choose_mlp_sizes(base, data), bias=bias)
