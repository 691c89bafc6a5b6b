"""Any `nn.Module` as a network: which of its parameters are weights of a product, and which learn by their exact gradient.

Modules of torch.nn say by their class what they do with their parameters. What a model's own code does with parameters is
seen by running it once on an example. Then all modules are wired (`core/wiring.py`), so that errors pass through feedback
weights.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from apical.core.activation import Neuron
from apical.core.losses import Loss
from apical.core.modules import FORWARDS, evaluation_mode
from apical.core.network import Layer, Network, Shapes
from apical.core.raw_weights import count_axes
from apical.core.verification import run_checkpoints_plainly, verify
from apical.core.wired_attention import WiredAttention
from apical.core.wired_recurrent import WiredCell, WiredRecurrent
from apical.core.wiring import (
    FIXED,
    Carrier,
    Link,
    Wired,
    WiredBilinear,
    WiredConvolution,
    WiredEmbedding,
    WiredLinear,
    WiredRoot,
    WiredTransposedLinear,
    get_plain_class,
    make_class,
    unwire,
)
from apical.errors import ApicalError, UnsupportedError, describe_error

KINDS: dict[type[nn.Module], type[Wired]] = {
    nn.Linear: WiredLinear,
    nn.Bilinear: WiredBilinear,
    nn.MultiheadAttention: WiredAttention,
    **dict.fromkeys((nn.Conv1d, nn.Conv2d, nn.Conv3d), WiredConvolution),
    **dict.fromkeys((nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d), WiredConvolution),
    **dict.fromkeys((nn.RNN, nn.LSTM, nn.GRU), WiredRecurrent),
    **dict.fromkeys((nn.RNNCell, nn.LSTMCell, nn.GRUCell), WiredCell),
}
"""The modules of torch.nn that multiply an activity with weights, and how they run when they are wired."""


def find_kind(module: nn.Module) -> type[Wired] | None:
    """Return how a module runs when it is wired; None if its class is not known, or has a forward of its own."""
    own = get_plain_class(module)
    if own.__name__ == "Conv1D" and own.__module__.startswith("transformers."):
        return WiredTransposedLinear
    return next(
        (kind for known, kind in KINDS.items() if issubclass(own, known) and own.forward is known.forward), None
    )


def is_torch_module(module: nn.Module) -> bool:
    """Return whether a module runs the forward of a class in torch.nn, so that only that class uses its parameters."""
    forward = get_plain_class(module).forward
    return forward is not nn.Module.forward and any(forward is known for known in FORWARDS.values())


def is_weight(module: nn.Module, key: str) -> bool:
    """Return whether a parameter of a module of torch.nn is a factor of its product; the others are biases."""
    return "weight" in key and find_kind(module) is not None


class Use(NamedTuple):
    """A place of a parameter: its name (that of its first place, if it has several), the module, and its key there."""

    name: str
    module: nn.Module
    key: str


def list_uses(model: nn.Module) -> Iterator[Use]:
    """Yield all places of parameters in a model, in the order of the modules."""
    names = {id(p): name for name, p in model.named_parameters(prefix="model")}
    for module in model.modules():
        for key, p in module._parameters.items():
            if p is not None:
                yield Use(names[id(p)], module, key)


def check_modules(model: nn.Module, has_example: bool) -> None:
    """Refuse weights that do not exist yet, are computed from others, or act in a way that only an example can show."""
    for path, module in model.named_modules(prefix="model"):
        multiplies = find_kind(module) is not None and isinstance(getattr(module, "weight", None), Tensor)
        if multiplies and isinstance(module._parameters.get("weight"), UninitializedParameter):
            raise UnsupportedError(f"{path}.weight has no values yet; run the model once on an input before make.")
        if multiplies and "weight" not in module._parameters:
            raise UnsupportedError(
                f"{path}.weight is computed from other parameters (weight_norm, spectral_norm or parametrize), through "
                "which an error would pass by the weights themselves; a plain module works, or rule 'bp'."
            )
        for key, p in module._parameters.items():
            if (
                p is not None
                and not (is_torch_module(module) or find_kind(module) or has_example)
                and count_axes(p) > 1
            ):
                raise UnsupportedError(
                    f"{path}.{key} is a parameter of {get_plain_class(module).__name__} itself, so make must see how it "
                    "acts; pass example=x, an input on which make runs the model once."
                )


class AnySynapse(NamedTuple):
    """Weights that act in some product: their shape, and to how many values of the drive one value of the activity goes."""

    weight_shape: tuple[int, ...]
    fan_out: float


def count_fan_out(module: Any, w: Tensor) -> float:
    """Return to how many values of the drive one value of the activity goes, in a module of torch.nn."""
    if isinstance(module, nn.modules.conv._ConvNd):
        return w.numel() / module.in_channels
    return float(w.shape[1] if find_kind(module) is WiredTransposedLinear else w.shape[0])


class GeneralNetwork(Network):
    """Any `nn.Module`. `layers` lists the weights of its products, in the order of the modules.

    Args:
        model: the user's model.
        example: an input to run the model on, None if there is none.
        output: the field of the model's output that the loss takes, None if it is the output itself.
        is_exact: whether errors may pass through the weights themselves, as in backpropagation.
    """

    is_general = True

    def __init__(self, model: nn.Module, example: Any, output: str | int | None, is_exact: bool) -> None:
        super().__init__(Neuron([]), [], width=0)
        self.model = model
        carrier = Carrier(FIXED, nn.ParameterDict())
        if not is_exact:
            check_modules(model, example is not None)
            if example is not None:
                carrier = examine(model, example)
        elif example is not None:
            try:
                carrier = examine(model, example)
            except ApicalError:  # backpropagation also takes what feedback weights cannot
                carrier.output = run_plainly(model, example)
        self.output_shape: torch.Size | None = None
        self.problem = "the size of the model's output is not known; pass example=x to make."
        """Why the size of the output is not known."""
        if carrier.output is not None:
            try:
                self.output_shape = take_output(carrier.output, output).shape[1:]
            except UnsupportedError as error:  # in a loop of one's own the loss may still take what it needs
                self.problem = str(error)
        self.is_verified = carrier.is_verified
        self.passes = carrier.uses or {}
        """Whether an error passes through each weight that the example used, by name."""
        for name, module, key in list_uses(model):
            is_known = any(layer.weight == name for layer in self.layers)
            if not is_known and (is_weight(module, key) or name in carrier.fans):
                w: Any = module._parameters[key]
                synapse: Any = AnySynapse(tuple(w.shape), carrier.fans.get(name) or count_fan_out(module, w))
                path = name.removeprefix("model.").rpartition(".")[0]
                self.layers.append(Layer(path, synapse, name, None, Neuron([])))
        self.levels = list(range(len(self.layers)))
        """How high each layer is. The audit replaces the order of the modules by that in which they act."""
        if not self.layers:
            raise UnsupportedError("the model has no weights to train: it multiplies no activity with a parameter.")

    @property
    def upper(self) -> dict[int, Layer]:
        return {i: layer for i, layer in enumerate(self.layers) if self.passes.get(layer.weight, True)}

    def list_other_parameters(self) -> list[str]:
        weights = {layer.weight for layer in self.layers}
        return [name for name, _ in self.model.named_parameters(prefix="model") if name not in weights]

    def shapes(self, input_shape: torch.Size | tuple[int, ...] | None = None) -> Shapes:
        if self.output_shape is None:
            raise ApicalError(self.problem)
        return Shapes([], [], {}, self.output_shape)

    def check_input(self, x: Tensor) -> None:
        pass

    def read_targets(self, output: torch.Size, y: Any, loss: Loss) -> None:
        """Classes are the last axis if there is a label for each position; else the second axis, as in torch."""
        self.CLASSES = 1
        if isinstance(y, Tensor) and y.dim() > 1 and not (y.is_floating_point() or loss.is_custom):
            is_last, is_second = y.shape == output[:-1], y.shape == output[:1] + output[2:]
            if is_last and is_second:
                raise ApicalError(
                    f"labels of shape {tuple(y.shape)} fit an output of shape {tuple(output)} with the classes in its "
                    "second or in its last axis; a loss function of your own decides."
                )
            self.CLASSES = len(output) - 1 if is_last else 1

    def flatten_time(self, values: Tensor) -> Tensor:
        return values.flatten(0, self.CLASSES - 1)

    def unflatten_time(self, rows: Tensor, batch: int) -> Tensor:
        return rows


def examine(model: nn.Module, example: Any) -> Carrier:
    """Run a model once to see what it does with its parameters. Buffers and random numbers stay as they were."""
    before = [(module, type(module), module.__dict__.get("link")) for module in model.modules()]
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    carrier = Carrier(FIXED, nn.ParameterDict(), uses={}, is_examining=True, is_verified=True)
    args, kwargs = split_inputs(example)
    try:
        wire(model, carrier, {})
        with torch.random.fork_rng(), run_checkpoints_plainly(), _explain_failure():
            carrier.output = model(*args, **kwargs)
            verify(model, carrier.output)
    finally:
        for module, own, link in before:
            module.__class__ = own
            module.__dict__.pop("link", None)
            if link is not None:
                module.__dict__["link"] = link
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)
    return carrier


def run_plainly(model: nn.Module, example: Any) -> Any:
    """Run a model on an example, in evaluation mode, so that nothing of it changes."""
    args, kwargs = split_inputs(example)
    with torch.no_grad(), evaluation_mode(model), _explain_failure():
        return model(*args, **kwargs)


@contextmanager
def _explain_failure() -> Iterator[None]:
    """Say of whatever a model raises that it was run on the example."""
    try:
        yield
    except ApicalError:
        raise
    except Exception as error:
        raise ApicalError(f"the model cannot be run on the example: {describe_error(error)}") from error


def wire(model: nn.Module, carrier: Carrier, keys: Mapping[str, str]) -> None:
    """Connect all modules of a model to a learner's feedback weights, whose keys are given by the weights' names."""
    unwire(model)
    names = {id(p): name for name, p in model.named_parameters(prefix="model")}
    heads = [model.get_submodule(head) for head in carrier.heads]
    inside = {module for head in heads for module in head.modules()}
    learning = {id(p) for head in heads for p in head.parameters()}
    carrier.frozen = [p for p in model.parameters() if heads and p.requires_grad and id(p) not in learning]
    for p in carrier.frozen:
        p.requires_grad_(False)
    for module in model.modules():
        own = {key: names[id(p)] for key, p in module._parameters.items() if p is not None}
        link = Link(carrier, own, {key: keys[name] for key, name in own.items() if name in keys})
        kind = None if module in inside else find_kind(module)
        kind = WiredEmbedding if get_plain_class(module).forward is nn.Embedding.forward else kind
        is_raw = not is_torch_module(module) and kind is None and module not in inside
        properties = [key for key in own if is_raw or key in link.keys or (kind is not None and "weight" in key)]
        if kind is WiredRecurrent:  # torch keeps lists of these parameters
            properties = []
        carrier.has_raw |= is_raw and bool(own)
        kinds = [each for each in (WiredRoot if module is model else None, kind) if each is not None]
        if kinds or properties:
            own_class: Any = type(module)
            module.__class__ = make_class(tuple(kinds) or (Wired,), own_class, tuple(properties))
        module.__dict__["link"] = link
    carrier.edges = [
        (f"{path}.{key}".lstrip("."), module._modules, key, child, type(child).__name__)
        for path, module in model.named_modules()
        for key, child in module._modules.items()
    ]


def split_inputs(x: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a call of the model: of a tuple its values, of a dictionary its keywords, else x itself."""
    if isinstance(x, Mapping):
        return (), dict(x)
    return (tuple(x), {}) if isinstance(x, tuple | list) else ((x,), {})


def take_output(output: Any, field: str | int | None) -> Tensor:
    """Return the tensor of a model's output that the loss takes: the output itself, or this field of it."""
    value = output
    if field is not None and isinstance(output, Tensor):
        raise ApicalError(f"the model returns a tensor, which has no field {field!r}; leave out output=.")
    if field is not None:
        try:
            value = getattr(output, field) if isinstance(field, str) and hasattr(output, field) else output[field]
        except (KeyError, IndexError, TypeError) as error:
            raise ApicalError(f"the model's output has no field {field!r}; it has {_list_fields(output)}.") from error
    if not isinstance(value, Tensor):
        raise UnsupportedError(
            f"the model returns a {type(output).__name__}, not a tensor; name the field that the loss takes, of "
            f"{_list_fields(output)}: make(…, output=FIELD), or options={{'output': FIELD}} in fit."
        )
    return value


def _list_fields(output: Any) -> str:
    if isinstance(output, Mapping):
        return ", ".join(map(repr, output))
    if isinstance(output, tuple | list):
        return f"0 to {len(output) - 1}"
    return ", ".join(getattr(output, "__dict__", {})) or "none"
