"""What apical cannot do is refused with one sentence that names the module or value, and what would work."""

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune

import apical
from cases import CASES, RULES, learner_for
from reference import gradients

Refused = Callable[[], object]


def refusal(attempt: Refused, *words: str) -> apical.ApicalError:
    """The error of an attempt, which must be apical's own: one line, with these words in it."""
    with pytest.raises(apical.ApicalError) as caught:
        attempt()
    said = str(caught.value)
    assert "\n" not in said, said
    assert len(said) < 600, said
    for word in words:
        assert word in said, f"{word!r} is not in: {said}"
    return caught.value


def mlp(*extra: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 3), *extra, nn.Linear(3, 2))


def cnn() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(2, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 4 * 4, 3))


def bp(model: object, **options: object) -> apical.Learner:
    return apical.make("bp", model, **options)


# Modules.


class Branching(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x)


class Scaled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class OwnDropout(nn.Dropout):
    """Could do anything with its randomness."""


class Pair(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, x


def shared_layer() -> nn.Sequential:
    layer = nn.Linear(4, 4)
    return nn.Sequential(layer, nn.Tanh(), layer)


def shared_block() -> nn.Sequential:
    block = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    return nn.Sequential(block, block)


def tied_weights() -> nn.Sequential:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    model[2].weight = model[0].weight
    return model


def tied_biases() -> nn.Sequential:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    model[2].bias = model[0].bias
    return model


def old_weight_norm() -> nn.Sequential:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return nn.Sequential(nn.utils.weight_norm(nn.Linear(4, 3)))


def pruned() -> nn.Sequential:
    return nn.Sequential(prune.random_unstructured(nn.Linear(4, 3), "weight", 0.5))


def hooked() -> nn.Sequential:
    model = nn.Sequential(nn.Sequential(nn.Linear(4, 3)), nn.Tanh())
    model[0].register_forward_hook(lambda _m, _a, out: 2 * out)
    return model


MODULES: dict[str, tuple[Callable[[], object], tuple[str, ...]]] = {
    "not a sequential": (lambda: nn.Linear(4, 3), ("Linear", "nn.Sequential")),
    "a list": (lambda: [nn.Linear(4, 3)], ("list", "nn.Sequential")),
    "nothing": (lambda: None, ("NoneType", "nn.Sequential")),
    "an empty sequential": (lambda: nn.Sequential(), ("no weights", "Linear")),
    "a sequential without weights": (lambda: nn.Sequential(nn.Flatten(), nn.Tanh()), ("no weights", "Linear")),
    "a forward of its own": (lambda: Branching(nn.Linear(4, 4)), ("Branching", "nn.Sequential")),
    "a nested forward of its own": (
        lambda: nn.Sequential(Branching(nn.Linear(4, 4)), nn.Linear(4, 2)),
        ("Branching", "nn.Sequential"),
    ),
    "a linear with a forward of its own": (lambda: nn.Sequential(Scaled(4, 3)), ("0", "Scaled", "nn.Linear")),
    "batch norm": (lambda: mlp(nn.BatchNorm1d(3)), ("1", "BatchNorm1d", "batch", "Linear")),
    "batch norm without parameters": (
        lambda: mlp(nn.BatchNorm1d(3, affine=False, track_running_stats=False)),
        ("BatchNorm1d", "batch"),
    ),
    "layer norm with parameters": (lambda: mlp(nn.LayerNorm(3)), ("1", "LayerNorm", "parameters")),
    "lstm": (lambda: mlp(nn.LSTM(3, 3)), ("1", "LSTM", "recurrent")),
    "gru": (lambda: mlp(nn.GRU(3, 3)), ("1", "GRU", "recurrent")),
    "prelu": (lambda: mlp(nn.PReLU()), ("1", "PReLU", "parameters", "activations")),
    "conv transpose": (lambda: mlp(nn.ConvTranspose1d(3, 3, 1)), ("1", "ConvTranspose1d", "Conv1d")),
    "conv3d": (lambda: nn.Sequential(nn.Conv3d(1, 2, 1)), ("0", "Conv3d", "Conv2d")),
    "embedding": (lambda: nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 2)), ("0", "Embedding")),
    "attention": (lambda: mlp(nn.MultiheadAttention(3, 1)), ("1", "MultiheadAttention", "Linear")),
    "a transformer block": (lambda: mlp(nn.TransformerEncoderLayer(3, 1, 4)), ("1", "TransformerEncoderLayer")),
    "a module list": (lambda: nn.Sequential(nn.ModuleList([nn.Linear(4, 3)])), ("0", "ModuleList")),
    "a layer used twice": (shared_layer, ("0", "2", "share")),
    "a block used twice": (shared_block, ("0.0", "1.0", "share")),
    "tied weights": (tied_weights, ("0", "2", "share")),
    "tied biases": (tied_biases, ("0", "2", "share")),
    "parametrized": (lambda: nn.Sequential(parametrizations.weight_norm(nn.Linear(4, 3))), ("0", "nn.Linear")),
    "orthogonal": (
        lambda: nn.Sequential(nn.Linear(4, 4), parametrizations.orthogonal(nn.Linear(4, 4))),
        ("1", "nn.Linear"),
    ),
    "the older weight_norm": (old_weight_norm, ("0", "hooks")),
    "pruned": (pruned, ("0", "hooks")),
    "a hook on a block": (hooked, ("0", "hooks")),
    "lazy": (lambda: nn.Sequential(nn.LazyLinear(3)), ("0", "LazyLinear", "run the model once")),
    "lazy conv": (lambda: nn.Sequential(nn.LazyConv2d(3, 2)), ("0", "LazyConv2d", "run the model once")),
    "circular padding": (
        lambda: nn.Sequential(nn.Conv2d(1, 2, 3, padding=1, padding_mode="circular")),
        ("0", "circular", "zeros"),
    ),
    "reflecting padding": (
        lambda: nn.Sequential(nn.Conv1d(1, 2, 3, padding=1, padding_mode="reflect")),
        ("0", "reflect", "zeros"),
    ),
    "a dropout of one's own": (lambda: mlp(OwnDropout()), ("1", "OwnDropout", "random", "Dropout")),
    "pooling that draws": (
        lambda: nn.Sequential(nn.Conv2d(1, 2, 3), nn.FractionalMaxPool2d(2, output_size=2)),
        ("1", "FractionalMaxPool2d", "random"),
    ),
    "pooling with indices": (
        lambda: nn.Sequential(nn.Conv2d(1, 2, 3), nn.MaxPool2d(2, return_indices=True)),
        ("1", "MaxPool2d", "indices"),
    ),
}


@pytest.mark.parametrize("what", list(MODULES))
@pytest.mark.parametrize("rule", ["dfa", "pc"])
def test_what_cannot_be_read_as_layers_is_refused_by_name(rule: str, what: str) -> None:
    build, words = MODULES[what]
    model = build()
    error = refusal(lambda: apical.make(rule, model), *words)
    assert isinstance(error, TypeError), "what is wrong is its kind"


@pytest.mark.parametrize(
    "stage", [Pair(), nn.Flatten(0), nn.Unflatten(0, (1, 2))], ids=["a tuple", "flattens the batch", "splits it"]
)
def test_a_module_that_loses_the_batch_is_refused_by_name(stage: nn.Module) -> None:
    model = mlp(stage)
    learner = bp(model)
    refusal(lambda: learner.credit(torch.randn(2, 4), torch.tensor([0, 1])), "1", type(stage).__name__, "batch")


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(
    ("model", "words"),
    [
        (mlp(nn.Tanh()).to("meta"), ("model.0.weight", "meta", "to_empty")),
        (nn.Sequential(nn.Linear(4, 0), nn.Tanh(), nn.Linear(0, 2)), ("model.0.weight", "(0, 4)", "at least one")),
        (mlp(nn.Tanh()).to(torch.complex64), ("model.0.weight", "complex64", "model.float()")),
        (mlp(nn.Tanh()).to(torch.float8_e4m3fn), ("model.0.weight", "float8", "model.float()")),
    ],
    ids=["on no device", "of no size", "complex", "of eight bits"],
)
def test_weights_without_values_to_train_are_refused_when_the_learner_is_made(
    rule: str, model: nn.Sequential, words: tuple[str, ...]
) -> None:
    refusal(lambda: apical.make(rule, model, input_shape=(4,)), *words)


def test_weights_of_another_shape_than_their_layers_are_refused() -> None:
    model = mlp()
    model[0].weight = nn.Parameter(torch.randn(3, 5))
    refusal(lambda: bp(model), "model.0.weight", "(3, 5)", "(3, 4)")


def test_weights_that_were_made_in_inference_mode_are_refused() -> None:
    with torch.inference_mode():
        model = mlp()
    refusal(lambda: bp(model), "model.0.weight", "inference_mode")


# Inputs.

X, Y = torch.randn(5, 4), torch.tensor([0, 1, 0, 1, 1])
IMAGES, LABELS = torch.randn(5, 2, 6, 6), torch.tensor([0, 1, 2, 1, 1])


def poisoned(value: float) -> Tensor:
    x = X.clone()
    x[3, 2] = value
    return x


INPUTS: dict[str, tuple[Callable[[], nn.Sequential], object, object, tuple[str, ...]]] = {
    "features": (mlp, torch.randn(5, 6), Y, ("0", "6", "4")),
    "features of a later layer": (
        lambda: nn.Sequential(nn.Conv2d(2, 4, 3), nn.Flatten(), nn.Linear(9, 2)),
        IMAGES,
        LABELS,
        ("2", "64", "9"),
    ),
    "channels": (cnn, torch.randn(5, 3, 6, 6), LABELS, ("0", "3, 6, 6", "2")),
    "an image without its channel": (cnn, torch.randn(5, 6, 6), LABELS, ("0", "(batch, 6, 6)", "2, height, width")),
    "an image too small for its kernel": (cnn, torch.randn(5, 2, 2, 2), LABELS, ("0", "2, 2, 2")),
    "an image too small for its pooling": (
        lambda: nn.Sequential(nn.Conv2d(2, 4, 3), nn.MaxPool2d(3), nn.Flatten(), nn.Linear(4, 2)),
        torch.randn(5, 2, 3, 3),
        Y,
        ("1", "MaxPool2d"),
    ),
    "flat images": (cnn, torch.randn(5, 72), LABELS, ("0", "72")),
    "float64": (mlp, X.double(), Y, ("float64", "float32", "x.to(torch.float32)")),
    "float16": (mlp, X.half(), Y, ("float16", "float32")),
    "integers": (mlp, X.long(), Y, ("int64", "float32")),
    "bytes": (cnn, torch.zeros(5, 2, 6, 6, dtype=torch.uint8), LABELS, ("uint8", "float32")),
    "no batch": (mlp, X[0], Y, ("(4,)", "batch")),
    "no batch, images": (cnn, IMAGES[0], LABELS[:2], ("(batch, 6, 6)", "(batch, 2, height, width)")),
    "a number": (mlp, torch.tensor(1.0), Y, ("()", "batch")),
    "an empty batch": (mlp, X[:0], Y[:0], ("(0, 4)", "at least one")),
    "a numpy array": (mlp, X.numpy(), Y, ("ndarray", "torch.Tensor")),
    "a list": (mlp, X.tolist(), Y, ("list", "torch.Tensor")),
    "nan": (mlp, poisoned(float("nan")), Y, ("NaN", "example 3")),
    "infinity": (mlp, poisoned(float("inf")), Y, ("infinite", "example 3")),
    "both infinities": (
        mlp,
        torch.stack([poisoned(float("inf"))[3], poisoned(float("-inf"))[3]]),
        Y[:2],
        ("infinite", "example 0"),
    ),
    "sparse": (mlp, X.to_sparse(), Y, ("input", "sparse", "to_dense()")),
    "sparse rows": (mlp, X.to_sparse_csr(), Y, ("input", "sparse", "to_dense()")),
    "nested": (mlp, torch.nested.nested_tensor([X[0], X[1]]), Y[:2], ("input", "nested")),
    "quantised": (mlp, torch.quantize_per_tensor(X, 0.1, 0, torch.qint8), Y, ("quantised", "dequantize()")),
    "sparse targets": (mlp, X, torch.eye(2)[Y].to_sparse(), ("targets", "sparse", "to_dense()")),
    "an input elsewhere": (mlp, X.to("meta"), Y, ("meta", "cpu", "learner.to(device)")),
    "targets elsewhere": (mlp, X, Y.to("meta"), ("cpu", "targets on meta", "one device")),
}


@pytest.mark.parametrize("what", list(INPUTS))
@pytest.mark.parametrize("rule", ["bp", "dll"])
def test_an_input_that_does_not_fit_is_refused_and_writes_nothing(rule: str, what: str) -> None:
    build, x, y, words = INPUTS[what]
    learner = apical.make(rule, build())
    refusal(lambda: learner.credit(x, y), *words)
    assert gradients(learner) == {}


def test_nothing_can_be_trained_on_the_meta_device() -> None:
    learner = bp(mlp()).to("meta")
    refusal(lambda: learner.credit(X.to("meta"), Y.to("meta")), "meta device", "no values")
    refusal(lambda: apical.fit(learner, (X, Y, X, Y), epochs=1, progress=False), "meta device", "to_empty")


def test_a_learner_on_another_device_is_named() -> None:
    learner = bp(mlp()).to("meta")
    refusal(lambda: learner.credit(X, Y), "cpu", "model.0.weight on meta", "learner.to(device)")


def test_weights_on_two_devices_are_named() -> None:
    learner = bp(mlp())
    learner.model[1].to("meta")
    refusal(lambda: learner.credit(X, Y), "model.1.weight on meta", "cpu")


def test_weights_of_two_types_are_named() -> None:
    model = mlp()
    model[1].double()
    refusal(lambda: bp(model).credit(X, Y), "model.1.weight", "float64", "float32")


def test_finite_values_whose_sum_overflows_are_not_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 2))
    nn.init.zeros_(model[0].weight)
    x = torch.full((5, 4), torch.finfo(torch.float32).max)
    assert bool(bp(model).credit(x, Y).loss.isfinite())


def test_a_wrong_input_shape_is_refused_when_the_learner_is_made() -> None:
    refusal(lambda: bp(cnn(), input_shape=(3, 6, 6)), "0", "3, 6, 6")


@pytest.mark.parametrize("shape", [4, "4", (2.0, 6, 6), (0,)], ids=str)
def test_an_input_shape_that_is_none_is_refused(shape: object) -> None:
    refusal(lambda: bp(mlp(), input_shape=shape), "input_shape", repr(shape))


def test_dfa_asks_for_the_input_shape_of_a_cnn() -> None:
    refusal(lambda: apical.make("dfa", cnn()), "0", "input_shape=(channels, height, width)")


def test_dfa_names_a_conv1ds_own_input_shape() -> None:
    refusal(lambda: apical.make("dfa", nn.Sequential(nn.Conv1d(2, 3, 2))), "0", "input_shape=(channels, width)")


def test_dfa_refuses_another_size_than_it_was_built_for() -> None:
    model = nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 1), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(16, 3)
    )
    learner = apical.make("dfa", model, input_shape=(2, 6, 6))
    learner.credit(IMAGES, LABELS)
    refusal(lambda: learner.credit(torch.randn(5, 2, 7, 7), LABELS), "2", "64", "100", "input_shape")


# Targets.

TARGETS: dict[str, tuple[str, object, tuple[str, ...]]] = {
    "too large": ("cross_entropy", torch.tensor([0, 1, 2, 0, 0]), ("2", "2 outputs", "0 … 1")),
    "negative": ("cross_entropy", torch.tensor([0, 1, -1, 0, 0]), ("-1", "0 … 1")),
    "too large, mse": ("mse", torch.tensor([0, 1, 2, 0, 0]), ("2", "0 … 1")),
    "negative, mse": ("mse", torch.tensor([0, 1, -1, 0, 0]), ("-1", "0 … 1")),
    "float labels": ("cross_entropy", Y.float(), ("(5, 2)", "y.long()")),
    "float labels, mse": ("mse", Y.float(), ("(5, 2)", "y.long()")),
    "bool": ("cross_entropy", Y.bool(), ("bool", "integer")),
    "unsigned": ("cross_entropy", Y.to(torch.uint16), ("uint16", "y.long()")),
    "complex": ("mse", torch.zeros(5, 2, dtype=torch.complex64), ("complex", "integer")),
    "too few": ("cross_entropy", Y[:3], ("3", "5")),
    "too many": ("mse", torch.zeros(7, 2), ("7", "5")),
    "a number": ("cross_entropy", torch.tensor(1), ("5",)),
    "a column": ("cross_entropy", Y[:, None], ("(5, 1)", "(5,)")),
    "one-hot integers": ("cross_entropy", torch.eye(2).long()[Y], ("(5, 2)", "(5,)")),
    "nan": ("mse", torch.full((5, 2), float("nan")), ("targets", "NaN")),
    "infinite probabilities": ("cross_entropy", torch.full((5, 2), float("inf")), ("targets", "infinite")),
    "negative values": ("cross_entropy", torch.tensor([[1.5, -0.5]]).expand(5, 2), ("loss='mse'", "negative")),
    "values": ("cross_entropy", torch.full((5, 2), 0.502), ("loss='mse'", "sum to 1")),
    "a list": ("cross_entropy", Y.tolist(), ("list", "torch.Tensor")),
    "nothing": ("mse", None, ("NoneType", "torch.Tensor")),
}


@pytest.mark.parametrize("what", list(TARGETS))
@pytest.mark.parametrize("rule", ["bp", "dll"])
def test_targets_that_do_not_fit_are_refused_and_write_nothing(rule: str, what: str) -> None:
    loss, y, words = TARGETS[what]
    learner = apical.make(rule, mlp(), loss=loss)
    refusal(lambda: learner.credit(X, y), *words)
    assert gradients(learner) == {}


def test_values_for_one_output_are_refused_by_cross_entropy() -> None:
    learner = bp(nn.Sequential(nn.Linear(4, 1)))
    refusal(lambda: learner.credit(X, torch.ones(5, 1)), "single output", "loss='mse'")


# Losses.


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"loss": "hinge"}, ("hinge", "cross_entropy", "mse", "callable")),
        ({"loss": None}, ("None", "cross_entropy")),
        ({"label_smoothing": 1.0}, ("label_smoothing", "1.0", "[0, 1)")),
        ({"label_smoothing": -0.1}, ("label_smoothing", "-0.1", "[0, 1)")),
        ({"label_smoothing": "much"}, ("label_smoothing", "much", "[0, 1)")),
        ({"label_smoothing": float("nan")}, ("label_smoothing", "nan", "[0, 1)")),
        ({"loss": lambda o, y: o.sum(1), "label_smoothing": 0.1}, ("label_smoothing", "your loss")),
    ],
)
def test_an_unknown_loss_or_smoothing_is_refused(options: dict[str, object], words: tuple[str, ...]) -> None:
    refusal(lambda: bp(mlp(), **options), *words)


def mean_of_all(output: Tensor, y: Tensor) -> Tensor:
    return output.square().mean()


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        (mean_of_all, ("mean_of_all", "()", "(5,)", "one value per example")),
        (nn.CrossEntropyLoss(), ("CrossEntropyLoss", "()", "(5,)", "reduction='none'")),
        (nn.MSELoss(reduction="none"), ("MSELoss", "(5, 2)", "(5,)")),
        (lambda output, y: output.sum(1, keepdim=True), ("(5, 1)", "(5,)")),
        (lambda output, y: 0.5, ("returned 0.5", "(5,)")),
    ],
    ids=["a scalar", "torch's mean", "one value per output", "a column", "a number"],
)
def test_a_loss_without_one_value_per_example_is_refused(
    loss: Callable[[Tensor, Tensor], Tensor], words: tuple[str, ...]
) -> None:
    learner = bp(mlp(), loss=loss)
    y = torch.randn(5, 2) if isinstance(loss, nn.MSELoss) else Y
    refusal(lambda: learner.credit(X, y), *words)
    assert gradients(learner) == {}


def test_a_scalar_loss_is_refused_for_a_batch_of_one_too() -> None:
    refusal(lambda: bp(mlp(), loss=mean_of_all).credit(X[:1], Y[:1]), "mean_of_all", "()", "(1,)")


def test_smoothing_of_values_is_refused() -> None:
    learner = bp(mlp(), loss="mse", label_smoothing=0.1)
    refusal(lambda: learner.credit(X, torch.randn(5, 2)), "label_smoothing", "floating values")


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_loss_that_is_not_finite_writes_no_gradient(rule: str, value: float) -> None:
    case = CASES["mlp"].case()
    learner = learner_for(rule, case, loss=lambda output, y: output.sum(1) * 0 + value)
    with pytest.raises(ArithmeticError):
        learner.credit(case.x, case.labels)
    refusal(lambda: learner.credit(case.x, case.labels), str(value), "no gradient was written", "learning rate")
    assert gradients(learner) == {}


# Rules and their options.


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("dlll", ("dlll", "did you mean 'dll'", "readout", "bp", "fa", "dfa", "sign")),
        ("DLL", ("DLL", "dll:kolen-pollack")),
        ("dll:kolen-polack", ("dll:kolen-polack", "did you mean 'dll:kolen-pollack'")),
        ("kolen-pollack", ("kolen-pollack", "dll:kolen-pollack")),
        ("fa:paper", ("fa:paper", "did you mean 'fa'")),
        ("dll:", ("'dll:'", "did you mean 'dll'")),
        (":paper", (":paper", "The rules are")),
        ("", ("''", "The rules are")),
        ("backprop", ("backprop", "bp")),
    ],
)
def test_an_unknown_rule_is_named_with_the_nearest_and_all_known_ones(name: str, words: tuple[str, ...]) -> None:
    refusal(lambda: apical.make(name, mlp()), "unknown rule", *words)


@pytest.mark.parametrize("name", [None, 3, apical.DLL])
def test_a_rule_that_is_not_a_name_is_refused(name: object) -> None:
    refusal(lambda: apical.make(name, mlp()), "rule", "dll")


OPTIONS: dict[str, tuple[str, dict[str, object], tuple[str, ...]]] = {
    "unknown": ("dll", {"thetas": "paper"}, ("dll", "'thetas'", "theta_std", "sweeps")),
    "of another rule": ("fa", {"theta": "paper"}, ("fa", "'theta'", "std")),
    "of none": ("bp", {"std": 1.0}, ("bp", "'std'", "none")),
    "said twice": ("dll:frozen", {"theta": "paper"}, ("dll:frozen", "theta", "frozen", "drop one")),
    "theta": ("dll", {"theta": "papre"}, ("theta", "papre", "paper", "released", "frozen", "kolen-pollack")),
    "theta_std zero": ("dll", {"theta_std": 0.0}, ("theta_std", "0.0", "positive")),
    "theta_std negative": ("dll", {"theta_std": -1}, ("theta_std", "-1", "positive")),
    "theta_std nan": ("dll", {"theta_std": float("nan")}, ("theta_std", "nan", "positive")),
    "theta_std infinite": ("dll", {"theta_std": float("inf")}, ("theta_std", "inf", "positive")),
    "theta_std a word": ("dll", {"theta_std": "wide"}, ("theta_std", "wide", "positive")),
    "theta_std true": ("dll", {"theta_std": True}, ("theta_std", "True", "positive")),
    "theta_rate negative": ("dll", {"theta_rate": -0.1}, ("theta_rate", "-0.1", "negative")),
    "theta_rate nan": ("dll", {"theta_rate": float("nan")}, ("theta_rate", "nan")),
    "theta_rate infinite": ("dll", {"theta_rate": float("inf")}, ("theta_rate", "inf")),
    "theta_rate a word": ("dll", {"theta_rate": "slow"}, ("theta_rate", "slow")),
    "decay elsewhere": ("dll", {"decay": 0.1}, ("decay", "0.1", "kolen-pollack")),
    "decay negative": ("dll:kolen-pollack", {"decay": -0.1}, ("decay", "-0.1", "negative")),
    "decay nan": ("dll:kolen-pollack", {"decay": float("nan")}, ("decay", "nan")),
    "decay a word": ("dll:kolen-pollack", {"decay": "much"}, ("decay", "much")),
    "eta_x zero": ("dll", {"eta_x": 0.0, "sweeps": 2}, ("eta_x", "0.0", "0 < eta_x < 2")),
    "eta_x two": ("dll", {"eta_x": 2.0, "sweeps": 2}, ("eta_x", "2.0", "0 < eta_x < 2")),
    "eta_x negative": ("dll", {"eta_x": -0.5, "sweeps": 2}, ("eta_x", "-0.5", "0 < eta_x < 2")),
    "eta_x nan": ("dll", {"eta_x": float("nan"), "sweeps": 2}, ("eta_x", "nan", "0 < eta_x < 2")),
    "eta_x a word": ("dll", {"eta_x": "fast", "sweeps": 2}, ("eta_x", "fast", "0 < eta_x < 2")),
    "sweeps zero": ("dll", {"sweeps": 0}, ("sweeps", "0", "at least 1")),
    "sweeps negative": ("dll", {"sweeps": -3}, ("sweeps", "-3", "at least 1")),
    "sweeps a fraction": ("dll", {"sweeps": 2.5}, ("sweeps", "2.5", "whole number")),
    "sweeps true": ("dll", {"sweeps": True}, ("sweeps", "True", "whole number")),
    "fa's std zero": ("fa", {"std": 0.0}, ("std", "0.0", "positive")),
    "fa's std negative": ("fa", {"std": -1.0}, ("std", "-1.0", "positive")),
    "dfa's std zero": ("dfa", {"std": 0.0}, ("std", "0.0", "positive")),
    "dfa's std a word": ("dfa", {"std": "wide"}, ("std", "wide", "positive")),
}


@pytest.mark.parametrize("what", list(OPTIONS))
def test_a_bad_option_is_refused_with_its_name_its_value_and_what_works(what: str) -> None:
    rule, options, words = OPTIONS[what]
    refusal(lambda: apical.make(rule, mlp(nn.Tanh()), **options), *words)


def test_every_kind_of_error_is_apicals_own() -> None:
    from apical import errors

    kinds = [v for v in vars(errors).values() if isinstance(v, type) and issubclass(v, Exception)]
    assert len(kinds) >= 4
    assert all(issubclass(kind, apical.ApicalError) for kind in kinds)
    assert issubclass(apical.ApicalError, ValueError)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        *((name, "a rule cannot be called") for name in ("", "a:b", "a,b", "a b")),
        ("bp", "apical has a rule called 'bp'"),
    ],
)
def test_a_rule_needs_a_name_that_can_be_given_on_a_command_line(name: str, words: str) -> None:
    before = dict(apical.RULES)
    with pytest.raises(apical.ApicalError, match=words):
        type("Own", (apical.Learner,), {"NAME": name})
    assert before == apical.RULES


def test_a_step_without_an_optimiser_is_refused() -> None:
    learner = bp(mlp())
    refusal(lambda: learner.step(X, Y, None), "step()", "credit(x, y)")
    assert gradients(learner) == {}


def test_an_optimiser_that_asks_for_the_loss_is_refused() -> None:
    model = mlp(nn.Tanh())
    learner, optim = bp(model), torch.optim.LBFGS(model.parameters())
    refusal(lambda: learner.step(torch.zeros(5, 4), torch.zeros(5).long(), optim), "LBFGS", "closure")


CHANGES: dict[str, Callable[[nn.Sequential], object]] = {
    "another layer": lambda model: model.__setitem__(0, nn.Linear(4, 3)),
    "another φ": lambda model: model.__setitem__(1, nn.ReLU()),
    "a layer more": lambda model: model.append(nn.ReLU()),
    "a layer less": lambda model: model.pop(1),
    "another weight norm": lambda model: parametrizations.weight_norm(model[0]),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_model_whose_modules_were_changed_is_not_trained_half(change: str) -> None:
    model = mlp(nn.Tanh())
    learner, x, y = bp(model), torch.zeros(5, 4), torch.zeros(5).long()
    learner.credit(x, y)
    CHANGES[change](model)
    refusal(lambda: learner.credit(x, y), "changed after the learner was created")
    refusal(lambda: apical.fit(learner, (x, y, x, y), epochs=1, progress=False), "create a new learner")


# Labels, losses, and what would be learned.


def count_mistakes(output: Tensor, y: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output, y.reshape(len(y), -1)[:, 0] % 2, reduction="none")


@pytest.mark.parametrize("rule", ["ff", "rstdp"])
def test_labels_that_a_rule_reads_itself_are_checked_for_a_loss_of_ones_own_too(rule: str) -> None:
    learner, x = apical.make(rule, mlp(nn.Tanh()), input_shape=(4,), loss=count_mistakes), torch.rand(5, 4)
    refusal(lambda: learner.credit(x, torch.zeros(5, 1, dtype=torch.long)), "labels", "(5, 1)")
    refusal(lambda: learner.credit(x, torch.full((5,), -100)), "labels", "-100")
    learner.step(x, torch.tensor([0, 1, 0, 1, 0]), torch.optim.SGD(learner.param_groups(0.1)))


def test_a_class_in_place_of_a_loss_is_refused() -> None:
    refusal(lambda: bp(mlp(), loss=nn.CrossEntropyLoss), "CrossEntropyLoss", "reduction='none'")


def test_groups_of_a_model_with_nothing_to_train_are_refused() -> None:
    refusal(lambda: bp(mlp().requires_grad_(False)).param_groups(0.1), "nothing is left to train")


def test_an_object_without_parameter_groups_is_no_optimiser() -> None:
    class Steps:
        def step(self) -> None: ...
        def zero_grad(self) -> None: ...

    refusal(lambda: bp(mlp()).step(torch.rand(5, 4), torch.zeros(5, dtype=torch.long), Steps()), "optimiser")


def test_nothing_learns_in_inference_mode() -> None:
    learner = bp(mlp())
    with torch.inference_mode():
        refusal(lambda: learner.credit(torch.rand(5, 4), torch.zeros(5, dtype=torch.long)), "inference_mode")


@pytest.mark.parametrize(("rule", "options"), [("dfa", {}), ("dll", {"sweeps": 3})])
def test_a_rule_that_backward_does_not_run_has_no_error_scale(rule: str, options: dict[str, int]) -> None:
    learner = apical.make(rule, mlp(), **options)
    refusal(lambda: learner.error_scale, rule, "backward()")
    refusal(lambda: setattr(learner, "error_scale", 2), rule, "backward()")


class Centred(nn.Module):
    """Computes with a tensor that is no buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = torch.zeros(4)

    def forward(self, x: Tensor) -> Tensor:
        return x - self.mean


def test_a_tensor_that_is_no_buffer_is_named_as_the_reason() -> None:
    learner = apical.make("pc", nn.Sequential(Centred(), *mlp()))
    refusal(lambda: learner.credit(torch.rand(5, 4), torch.zeros(5, dtype=torch.long)), "module 0", "Centred", "buffer")


@pytest.mark.parametrize("rule", ["pc", "dfa"])
def test_a_refused_module_names_the_rules_that_take_it(rule: str) -> None:
    model = mlp(nn.BatchNorm1d(3))
    refusal(lambda: apical.make(rule, model), "BatchNorm1d", "bp, fa, sign and dll take any module")
    assert bp(model).network.is_general
