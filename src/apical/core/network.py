"""The user's `nn.Sequential` as a list of layers: a synapse and the neuron function φ that follows it.

    x ─ prefix ─▶ u₀ ─ W₀ ─▶ φ₀ ─▶ u₁ ─ W₁ ─▶ φ₁ ─▶ … ─▶ output

`u_i` is the input of layer i (the paper's sensory input, in the basal dendrites). `prefix` is all modules before the
first synapse, such as a Flatten. The network holds no weights: every pass takes them as `params`, a dictionary by
parameter name.

Layers that share their input form a tier. A tier has one layer, or the branches of an `apical.Parallel`.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from apical.core import parsing
from apical.core import synapse as synapses
from apical.core.activation import RANDOM, Neuron, Noise, Pullback
from apical.core.parsing import describe_module, join_outputs
from apical.core.synapse import Conv, Dense, Synapse
from apical.errors import ApicalError, UnsupportedError

Params = Mapping[str, Tensor]


class Layer(NamedTuple):
    """A layer: its name in the user's model, its synapse, the names of its parameters, and its φ."""

    name: str
    synapse: Synapse
    weight: str
    bias: str | None
    neuron: Neuron

    def forward(self, params: Params, u: Tensor) -> Tensor:
        """Return the drive W u + b, before φ."""
        return self.synapse.forward(params[self.weight], u, None if self.bias is None else params[self.bias])

    def gradients(self, u: Tensor, e: Tensor, trainable: frozenset[str], scale: float = -1.0) -> dict[str, Tensor]:
        """Return the gradients −pre × post of W and the bias, if they learn.

        u is the layer's input, e the error at its drive.
        """
        grads = {}
        if self.weight in trainable:
            grads[self.weight] = self.synapse.outer(u, e, scale)
        if self.bias is not None and self.bias in trainable:
            grads[self.bias] = self.synapse.total(e, scale)
        return grads


Split = Callable[[Tensor], list[Tensor]]
"""(error after a tier) -> the error after φ of each of its layers."""


class Tier(NamedTuple):
    """Layers that share their input, by number, from `first` to `last`.

    The outputs of several layers are concatenated and then go through `after`.
    """

    name: str
    layers: dict[int, Layer]
    after: Neuron
    first: int
    last: int

    def __call__(self, params: Params, u: Tensor, noise: Noise) -> Tensor:
        outputs = [layer.neuron(layer.forward(params, u), noise) for layer in self.layers.values()]
        return outputs[0] if len(outputs) == 1 else self.after(torch.cat(outputs, 1), noise)

    def vjp(self, params: Params, u: Tensor, noise: Noise) -> tuple[Tensor, list[Pullback], Split]:
        """Return the output, φ′ of each layer, and the function that splits an error after the tier among its layers."""
        outputs, pullbacks = [], []
        for layer in self.layers.values():
            # No variable for the drive: it would keep the tensor alive while φ and the next tier run.
            output, pullback = layer.neuron.vjp(layer.forward(params, u), noise)
            outputs.append(output)
            pullbacks.append(pullback)
        if len(outputs) == 1:
            return output, pullbacks, lambda e: [e]
        widths = [output.shape[1] for output in outputs]
        joint, after = self.after.vjp(torch.cat(outputs, 1), noise)
        return joint, pullbacks, lambda e: list(after(e).split(widths, 1))


def sum_tensors(parts: list[Tensor]) -> Tensor:
    """Return the sum of at least one tensor, without a copy if there is only one."""
    return sum(parts[1:], start=parts[0])


class Trace(NamedTuple):
    """One forward pass: each layer's input u_i and φ′_i, the output, and each tier's split, by its first layer.

    Layers below the lowest one that learns have no φ′ (None). The backward sweep removes the tiers with `drop`, so that
    their memory is freed as soon as they have been used.
    """

    inputs: list[Tensor]
    pullbacks: list[Pullback | None]
    output: Tensor
    splits: dict[int, Split]

    def deltas(self, tier: Tier, xi: Tensor) -> dict[int, Tensor]:
        """Return the error δ at the drive of each layer of a tier, given the error ξ after the tier."""
        deltas = {}
        for i, part in zip(tier.layers, self.splits[tier.first](xi), strict=True):
            pullback = self.pullbacks[i]
            assert pullback is not None
            deltas[i] = pullback(part)
        return deltas

    def drop(self, tier: Tier) -> None:
        """Remove the topmost tier and free its memory."""
        del self.inputs[tier.first :], self.pullbacks[tier.first :], self.splits[tier.first]


class Shapes(NamedTuple):
    """Shapes without the batch: each layer's input and drive, each random stage's noise, and the output."""

    inputs: list[torch.Size]
    drives: list[torch.Size]
    noise: dict[str, torch.Size]
    output: torch.Size


class Network:
    """A model as layers of synapses and activations, the interface that every rule is written against.

    `layers` lists the layers in order. `tiers` groups those that share their input (see the top of this file). `width`
    is the number of layers that receive the network's own input; no error is carried to their inputs. Each subclass
    reads one kind of model: `SequentialNetwork` an `nn.Sequential`, `RecurrentNetwork` an `apical.Elman`.
    """

    CLASSES: ClassVar[int] = 1
    """The axis of the output that counts classes."""
    recurrent: ClassVar[bool] = False
    """Whether the layers are applied at every time step of a sequence."""

    def __init__(self, prefix: Neuron, tiers: list[Tier], width: int) -> None:
        self.prefix, self.tiers, self.width = prefix, tiers, width
        self.layers = [layer for tier in tiers for layer in tier.layers.values()]
        self._random = [stage for neuron in self._neurons() for stage in neuron.stages if type(stage.module) in RANDOM]

    def _neurons(self) -> Iterator[Neuron]:
        """Iterate over all functions between the weights."""
        yield self.prefix
        for tier in self.tiers:
            yield from (layer.neuron for layer in tier.layers.values())
            yield tier.after

    def __len__(self) -> int:
        return len(self.layers)

    @property
    def top(self) -> list[Layer]:
        """The layers of the last tier: one, or the branches of a `Parallel`."""
        return list(self.tiers[-1].layers.values())

    @property
    def upper(self) -> dict[int, Layer]:
        """The layers to whose input an error is carried, by number: all but those that receive the network's input."""
        return {i: layer for i, layer in enumerate(self.layers) if i >= self.width}

    def flatten_time(self, values: Tensor) -> Tensor:
        """Return outputs or targets as the loss takes them: of a recurrent network, one row per time step."""
        return values

    def forward(self, params: Params, x: Tensor, noise: Noise, bottom: int = 0) -> Trace:
        """Run the network and keep what a backward sweep needs, for the layers from `bottom` up."""
        raise NotImplementedError

    def predict(self, params: Params, x: Tensor, noise: Noise) -> Tensor:
        """Return the output alone."""
        return self.forward(params, x, noise).output

    def shapes(self, input_shape: torch.Size | tuple[int, ...] | None = None) -> Shapes:
        """Return the shapes inside the network for an input of this shape (without the batch)."""
        raise NotImplementedError

    def check_input(self, x: Tensor) -> None:
        """Check that the input is of a kind that this network takes."""
        raise NotImplementedError

    def draw(self, x: Tensor, generator: torch.Generator | None = None) -> dict[str, Tensor]:
        """Draw uniform noise for each random stage in training mode. Most networks have none."""
        active = [stage.name for stage in self._random if stage.module.training]
        if not active:
            return {}
        shapes = self.shapes(x.shape[1:]).noise
        return {
            name: torch.rand((x.shape[0], *shapes[name]), dtype=x.dtype, device=x.device, generator=generator)
            for name in active
        }


class SequentialNetwork(Network):
    """An `nn.Sequential` as a list of layers; `root` is the model's name inside the learner.

    >>> network = SequentialNetwork(nn.Sequential(nn.Flatten(), nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)))
    >>> [layer.weight for layer in network.layers]
    ['model.1.weight', 'model.3.weight']
    """

    def __init__(self, model: nn.Sequential, root: str = "model") -> None:
        prefix, parsed_tiers = parsing.read_model(model)
        tiers: list[Tier] = []
        first = 0
        for parsed in parsed_tiers:
            layers = dict(enumerate((_make_layer(root, branch) for branch in parsed.branches), start=first))
            last = first + len(layers) - 1
            tiers.append(Tier(parsed.name, layers, Neuron(parsed.after), first, last))
            first = last + 1
        super().__init__(Neuron(prefix), tiers, width=len(tiers[0].layers))
        self._shapes: dict[torch.Size, Shapes] = {}

    def check_input(self, x: Tensor) -> None:
        if not x.is_floating_point():
            raise UnsupportedError(
                f"the input is {x.dtype}, which an apical.Elman alone takes; an nn.Sequential takes x.float()."
            )

    def forward(self, params: Params, x: Tensor, noise: Noise, bottom: int = 0) -> Trace:
        u, splits = self.prefix(x, noise), {}
        inputs: list[Tensor] = []
        pullbacks: list[Pullback | None] = []
        for tier in self.tiers:
            inputs += [u] * len(tier.layers)
            if tier.last < bottom:
                u = tier(params, u, noise)
                pullbacks += [None] * len(tier.layers)
            else:
                u, own, splits[tier.first] = tier.vjp(params, u, noise)
                pullbacks += own
        return Trace(inputs, pullbacks, u, splits)

    def predict(self, params: Params, x: Tensor, noise: Noise) -> Tensor:
        """Return the output alone."""
        u = self.prefix(x, noise)
        for tier in self.tiers:
            u = tier(params, u, noise)
        return u

    def shapes(self, input_shape: torch.Size | tuple[int, ...] | None = None) -> Shapes:
        """Return the shapes inside the network for an input of this shape (without the batch).

        Without a shape, the input of a network that starts with a Linear is that layer's number of features.
        """
        if input_shape is None:
            first = self.layers[0].synapse
            if not isinstance(first, Dense):
                sides = ("height", "width")[-first.dims :] if isinstance(first, Conv) else ()
                raise ApicalError(
                    f"layer {self.layers[0].name} is a convolution, so sizes follow from the input: "
                    f"pass input_shape=({', '.join(('channels', *sides))})."
                )
            return self._compute_shapes(torch.Size([first.in_features]), after_prefix=True)
        key = torch.Size(input_shape)
        if key not in self._shapes:
            self._shapes[key] = self._compute_shapes(key)
        return self._shapes[key]

    def _compute_shapes(self, shape: torch.Size, after_prefix: bool = False) -> Shapes:
        """Run the network on a meta tensor and record the shapes. Raises ApicalError for an input that does not fit."""
        batch = 2
        noise: dict[str, torch.Size] = {}
        inputs: list[torch.Size] = []
        drives: list[torch.Size] = []

        def run(neuron: Neuron, a: Tensor) -> Tensor:
            for stage in neuron.stages:
                if type(stage.module) in RANDOM:
                    noise[stage.name] = torch.Size(RANDOM[type(stage.module)].noise_shape(a.shape)[1:])
                    continue
                got = tuple(a.shape[1:])
                try:
                    a = stage.runnable(a)
                except (RuntimeError, ValueError, IndexError, TypeError) as error:
                    raise ApicalError(_describe_misfit(stage.name, stage.module, got, str(error))) from error
                if not isinstance(a, Tensor) or a.ndim == 0 or a.shape[0] != batch:
                    raise UnsupportedError(
                        f"module {stage.name} ({describe_module(stage.module)}) does not return one tensor with the batch "
                        "first; only modules that keep the batch dimension can stand between weights."
                    )
            return a

        u = torch.empty((batch, *shape), device="meta")
        if not after_prefix:
            u = run(self.prefix, u)
        for tier in self.tiers:
            outputs = []
            for layer in tier.layers.values():
                inputs.append(u.shape[1:])
                a = _compute_drive_shape(layer, u)
                drives.append(a.shape[1:])
                outputs.append(run(layer.neuron, a))
            u = outputs[0] if len(outputs) == 1 else run(tier.after, join_outputs(outputs))
        return Shapes(inputs, drives, noise, u.shape[1:])


def _compute_drive_shape(layer: Layer, u: Tensor) -> Tensor:
    """Return the layer's drive as a meta tensor. Raises ApicalError if the input does not fit."""
    got, wrong = tuple(u.shape[1:]), layer.synapse.mismatch(u.shape)
    if wrong is not None:
        raise ApicalError(_describe_misfit(layer.name, layer.synapse, got, wrong))
    try:
        return layer.synapse.forward(torch.empty(layer.synapse.weight_shape, device="meta"), u)
    except RuntimeError as error:
        raise ApicalError(_describe_misfit(layer.name, layer.synapse, got, str(error))) from error


def _describe_misfit(name: str, what: object, got: tuple[int, ...], why: str) -> str:
    """Return the error message for an input that a module cannot take."""
    what = describe_module(what) if isinstance(what, nn.Module) else what
    why = " ".join(why.split())
    return f"layer {name} ({what}) cannot take an input of shape (batch, {', '.join(map(str, got))}): {why}"


def _make_layer(root: str, branch: parsing.Branch) -> Layer:
    """Build the layer of one branch."""
    synapse = synapses.read_synapse(branch.module, branch.name)
    assert synapse is not None
    bias = None if branch.module.bias is None else f"{root}.{branch.name}.bias"
    return Layer(branch.name, synapse, f"{root}.{branch.name}.weight", bias, Neuron(branch.stages))
