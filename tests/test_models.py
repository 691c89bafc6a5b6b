"""The networks by name: layer by layer those of the paper's appendix D, without biases, at the right spread."""

import pytest
import torch
from torch import nn

import apical
from apical import models
from apical.data import DATASETS, Dataset

SHAPES = {
    "digits": (1, 8, 8),
    "mnist": (1, 28, 28),
    "fashion_mnist": (1, 28, 28),
    "svhn": (3, 32, 32),
    "cifar10": (3, 32, 32),
    "cifar100": (3, 32, 32),
    "tiny_imagenet": (3, 64, 64),
}

# As the appendix writes them, read by hand: "with layer sizes of 784, 1024, 512, 256, and 10 neurons".
WIDTHS = {
    "mnist": [784, 1024, 512, 256, 10],
    "fashion_mnist": [784, 1024, 512, 256, 10],
    "svhn": [3072, 4096, 2048, 1024, 256, 10],
    "cifar10": [3072, 4096, 2048, 1024, 256, 10],
    "digits": [64, 32, 32, 10],
}

# (filters, kernel, padding), the two kinds of pooling, and the sizes of projection and output.
LAYERS: dict[str, list[object]] = {
    "mnist": [(32, 5, 0), "max", (64, 3, 0), "max", (16, 3, 0), 200, 10],
    "fashion_mnist": [(64, 5, 0), "max", (128, 3, 0), "avg", (64, 3, 0), 128, 10],
    "svhn": [(64, 3, 1), "max", (128, 3, 1), "max", (64, 3, 1), 256, 10],
    "cifar10": [(64, 3, 1), "max", (128, 3, 1), "max", (64, 3, 1), "avg", 256, 10],
    # Not in the appendix: the authors' code (reproduction-facts, point 9).
    "cifar100": [(64, 3, 1), (64, 3, 1), "max", (128, 3, 1), "max", (64, 3, 1), "avg", 1024, 100],
    "tiny_imagenet": [
        *[(64, 3, 1), (64, 3, 1), "max", (128, 3, 1), (128, 3, 1), "max", (64, 3, 1), "avg"],
        *[1024, 200],
    ],
}


def described(model: nn.Sequential) -> list[object]:
    """A model in the words of the tables above; activations and flattening left out."""
    words: list[object] = []
    for module in model:
        if isinstance(module, nn.Conv2d):
            assert module.stride == (1, 1)
            assert module.kernel_size[0] == module.kernel_size[1]
            words.append((module.out_channels, module.kernel_size[0], module.padding[0]))
        elif isinstance(module, nn.Linear):
            words.append(module.out_features)
        elif isinstance(module, nn.MaxPool2d | nn.AvgPool2d):
            assert module.kernel_size == 2
            words.append("max" if isinstance(module, nn.MaxPool2d) else "avg")
    return words


@pytest.mark.parametrize("data", WIDTHS)
def test_an_mlp_has_the_layer_sizes_of_the_appendix(data: str) -> None:
    linear = [module for module in models.build("mlp", data) if isinstance(module, nn.Linear)]
    assert [linear[0].in_features, *(module.out_features for module in linear)] == WIDTHS[data]


@pytest.mark.parametrize("data", LAYERS)
def test_a_cnn_has_the_layers_of_the_appendix(data: str) -> None:
    assert described(models.build("cnn", data)) == LAYERS[data]


NAMED = [("mlp", data) for data in WIDTHS] + [("cnn", data) for data in ["digits", *LAYERS]]


@pytest.mark.parametrize(("name", "data"), NAMED)
def test_a_named_network_takes_its_data_has_no_bias_and_tanh_everywhere_but_last(name: str, data: str) -> None:
    model = models.build(name, data)
    classes = DATASETS[data].classes
    with torch.no_grad():
        assert model(torch.randn(2, *SHAPES[data])).shape == (2, classes)
    weighted = [module for module in model if isinstance(module, nn.Linear | nn.Conv2d)]
    assert all(module.bias is None for module in weighted)
    kinds = [type(module) for module in model]
    assert kinds.count(nn.Tanh) == len(weighted) - 1
    for i, kind in enumerate(kinds[:-1]):
        if kind in (nn.Linear, nn.Conv2d):
            assert kinds[i + 1] is nn.Tanh
    assert isinstance(model[-1], nn.Linear)


@pytest.mark.parametrize(("name", "data"), NAMED)
def test_weights_are_normal_with_the_spread_of_the_authors_code(name: str, data: str) -> None:
    torch.manual_seed(0)
    for module in models.build(name, data):
        if isinstance(module, nn.Linear | nn.Conv2d):
            w = module.weight.detach()
            fan_in = w[0].numel()
            spread = fan_in**-0.5 if data == "digits" else 0.05
            error = 5 / (2 * w.numel()) ** 0.5  # five standard errors of a standard deviation
            assert float(w.std()) == pytest.approx(spread, rel=error)
            assert abs(float(w.mean())) < 5 * spread / w.numel() ** 0.5
            assert float(w.abs().max()) > 2 * spread  # a uniform one would end at √3


def test_weights_come_from_the_global_generator() -> None:
    def built() -> list[torch.Tensor]:
        torch.manual_seed(3)
        return list(models.build("cnn", "digits").parameters())

    assert all(torch.equal(p, q) for p, q in zip(built(), built(), strict=True))
    other = models.build("cnn", "digits").parameters()
    assert not any(torch.equal(p, q) for p, q in zip(built(), other, strict=True))


def sequences(name: str, inputs: int, outputs: int, labels: bool) -> Dataset:
    x = torch.randint(0, inputs, (9, 4)) if labels else torch.randn(9, 4, inputs)
    y = torch.randint(0, outputs, (9, 4)) if labels else torch.randn(9, 4, outputs)
    return Dataset(x, y, x.clone(), y.clone(), name, outputs if labels else None)


# "for the Harry Potter Series, the hidden layer size was set to 324; for the Electricity and Metr-la dataset, it was
# set to 300; and for the Pems-bay dataset, the hidden layer size was set to 384"
UNITS = {
    "tinyshakespeare": 324,
    "text:harry.txt": 324,
    "electricity": 300,
    "metr_la": 300,
    "pems_bay": 384,
    "etth1": 300,
}


@pytest.mark.parametrize("data", UNITS)
def test_an_rnn_is_as_wide_as_its_data_and_has_the_papers_hidden_units(data: str) -> None:
    labels = UNITS[data] == 324
    given = sequences(data, 5, 5 if labels else 3, labels)
    torch.manual_seed(0)
    model = models.build("rnn", given)
    assert isinstance(model, apical.Elman)
    assert model(given.x_test).shape == (9, 4, 5 if labels else 3)
    assert (model.rnn.input_size, model.rnn.hidden_size) == (5, UNITS[data])
    assert not model.rnn.bias
    assert model.readout.bias is None
    for weight in model.parameters():
        assert float(weight.detach().std()) == pytest.approx(0.05, rel=5 / (2 * weight.numel()) ** 0.5)


def test_an_rnn_takes_every_index_that_its_data_hold() -> None:
    for part in ("x_train", "x_test"):
        given = sequences("custom", 3, 3, labels=True)
        getattr(given, part)[0, 0] = 6  # a symbol that is never a target
        assert models.build("rnn", given).rnn.input_size == 7


def test_an_rnn_needs_the_data_themselves_and_these_must_be_sequences() -> None:
    with pytest.raises(apical.ApicalError, match=r"pass apical.data.load\('tinyshakespeare'\), not the name"):
        models.build("rnn", "tinyshakespeare")
    images = Dataset(*[torch.zeros(3, 1, 8, 8), torch.zeros(3).long()] * 2, "digits", 10)
    with pytest.raises(
        apical.ApicalError, match=r"an rnn reads sequences, but digits has examples of shape \(1, 8, 8\)"
    ):
        models.build("rnn", images)


@pytest.mark.parametrize(
    ("name", "data", "words"),
    [
        ("resnet", "mnist", "unknown model 'resnet'"),
        ("MLP", "mnist", "unknown model 'MLP'"),
        ("mlp", "custom", "no mlp is defined for the data 'custom'"),
        ("mlp", "cifar100", "only for digits, mnist"),
    ],
)
def test_an_unknown_network_is_one_sentence_that_names_what_works(name: str, data: str, words: str) -> None:
    with pytest.raises(apical.ApicalError, match=words) as caught:
        models.build(name, data)
    assert "nn.Sequential" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_mlp_may_be_named_by_the_widths_of_its_hidden_layers() -> None:
    assert described(models.build("mlp-1024-512", "mnist")) == [1024, 512, 10]
    assert described(models.build("mlp-7", "cifar10")) == [7, 10]
    torch.manual_seed(3)
    named = models.build("mlp-1024-512-256", "mnist")
    torch.manual_seed(3)
    for one, other in zip(named.parameters(), models.build("mlp", "mnist").parameters(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(("name", "data"), NAMED)
def test_biases_stand_in_every_layer_and_begin_at_zero(name: str, data: str) -> None:
    biased = models.build(f"{name}-bias", data)
    assert described(biased) == described(models.build(name, data))
    for module in biased:
        if isinstance(module, nn.Linear | nn.Conv2d):
            assert module.bias is not None
            assert not module.bias.any()


def test_widths_and_biases_go_together() -> None:
    model = models.build("mlp-7-5-bias", "mnist")
    assert described(model) == [7, 5, 10]
    assert [module.bias.shape for module in model if isinstance(module, nn.Linear)] == [(7,), (5,), (10,)]


def odd(model: nn.Module, x: torch.Tensor) -> bool:
    with torch.no_grad():
        return torch.allclose(model(-x), -model(x), atol=1e-6)


@pytest.mark.parametrize("data", WIDTHS)
def test_an_mlp_without_biases_is_odd_and_one_with_biases_is_not(data: str) -> None:
    x = torch.randn(2, *SHAPES[data])
    assert odd(models.build("mlp", data), x)
    biased = models.build("mlp-bias", data)
    assert odd(biased, x)
    with torch.no_grad():
        biased[-1].bias.fill_(0.1)
    assert not odd(biased, x)


@pytest.mark.parametrize("data", LAYERS)
def test_max_pooling_keeps_the_cnns_from_being_odd(data: str) -> None:
    assert not odd(models.build("cnn", data), torch.randn(2, *SHAPES[data]))


@pytest.mark.parametrize(
    "name", ["mlp-", "mlp-0", "mlp-10-", "mlp--10", "mlp-a", "cnn-10", "mlp-10.5", "xmlp-10", "mlp-bias-10", "rnn-bias"]
)
def test_what_is_no_list_of_widths_is_refused(name: str) -> None:
    assert not models.is_model(name)
    with pytest.raises(apical.ApicalError, match="unknown model"):
        models.build(name, "mnist")


@pytest.mark.parametrize("name", ["mlp-999999999", "mlp-8-1000000", f"mlp-{'9' * 5000}"])
def test_a_layer_of_a_million_units_is_refused(name: str) -> None:
    with pytest.raises(apical.ApicalError, match="has a layer of a million units or more") as caught:
        models.build(name, "digits")
    assert len(str(caught.value)) < 200
