"""A model as layers: a synapse and the neuron function φ that follows it. Every rule is written against this interface.

    x ─ prefix ─▶ u₀ ─ W₀ ─▶ φ₀ ─▶ u₁ ─ W₁ ─▶ φ₁ ─▶ … ─▶ output

`u_i` is the input of layer i (the paper's sensory input, in the basal dendrites). `prefix` is all modules before the
first synapse, such as a Flatten. The network holds no weights: every pass takes them as `params`, a dictionary by
parameter name.

Layers that share their input form a tier. A tier has one layer, or the branches of an `apical.Parallel`.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from apical.core.activation import RANDOM, Neuron, Noise, Pullback
from apical.core.losses import Loss
from apical.core.modules import has_hooks
from apical.core.synapse import Synapse

Params = Mapping[str, Tensor]
SIMPLE = (int, float, str, tuple, type(None))
"""Types of attributes of a module that are settings, such as a slope."""


class Layer(NamedTuple):
    """A layer: its name in the user's model, its synapse, the names of its parameters, and its φ."""

    name: str
    synapse: Synapse
    weight: str
    bias: str | None
    neuron: Neuron

    def forward(self, params: Params, u: Tensor) -> Tensor:
        """Return the drive W u + b, before φ."""
        drive = self.synapse.forward(params[self.weight], u, None if self.bias is None else params[self.bias])
        if self.neuron.record is not None:
            self.neuron.note(u=u, drive=drive)
        return drive

    def __call__(self, params: Params, u: Tensor, noise: Noise) -> Tensor:
        """Return the output φ(W u + b)."""
        return self.neuron(self.forward(params, u), noise)

    def vjp(self, params: Params, u: Tensor, noise: Noise) -> tuple[Tensor, Pullback]:
        """Return the output, and φ′. No variable holds the drive: it would keep the tensor alive while φ runs."""
        return self.neuron.vjp(self.forward(params, u), noise)

    def gradients(self, u: Tensor, e: Tensor, trainable: frozenset[str], scale: float = -1.0) -> dict[str, Tensor]:
        """Return the gradients −pre × post of W and the bias, if they learn.

        u is the layer's input, e the error at its drive.
        """
        if self.neuron.record is not None:
            self.neuron.note(u=u, delta=e if scale == -1 else e * -scale)
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
        outputs = [layer(params, u, noise) for layer in self.layers.values()]
        return outputs[0] if len(outputs) == 1 else self.after(torch.cat(outputs, 1), noise)

    def vjp(self, params: Params, u: Tensor, noise: Noise) -> tuple[Tensor, list[Pullback], Split]:
        """Return the output, φ′ of each layer, and the function that splits an error after the tier among its layers."""
        passes = [layer.vjp(params, u, noise) for layer in self.layers.values()]
        outputs, pullbacks = [output for output, _ in passes], [pullback for _, pullback in passes]
        if len(outputs) == 1:
            return outputs[0], pullbacks, lambda e: [e]
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

    CLASSES: int = 1
    """The axis of the output that counts classes."""
    recurrent: ClassVar[bool] = False
    """Whether the layers are applied at every time step of a sequence."""
    is_general: ClassVar[bool] = False
    """Whether the model is any module, which is not read as layers."""
    is_verified: bool = True
    """Whether it is known that the model does nothing with its weights that a rule does not know."""

    def __init__(self, prefix: Neuron, tiers: list[Tier], width: int) -> None:
        self.prefix, self.tiers, self.width = prefix, tiers, width
        self.layers = [layer for tier in tiers for layer in tier.layers.values()]
        self.stages = [stage for neuron in self._neurons() for stage in neuron.stages]
        self._random = [stage for stage in self.stages if type(stage.module) in RANDOM]

    def _neurons(self) -> Iterator[Neuron]:
        """Iterate over all functions between the weights."""
        yield self.prefix
        for tier in self.tiers:
            yield from (layer.neuron for layer in tier.layers.values())
            yield tier.after

    def __len__(self) -> int:
        return len(self.layers)

    @property
    def has_hooks(self) -> bool:
        """Whether a module between the weights has forward hooks or a forward of its own."""
        return any(has_hooks(inner) for stage in self.stages for inner in stage.module.modules())

    def describe_stages(self) -> list[Any]:
        """Return what decides what the modules between the weights compute. One with hooks is described by itself alone."""
        modules = [inner for stage in self.stages for inner in stage.module.modules()]
        return [
            m if has_hooks(m) else (type(m), {k: v for k, v in vars(m).items() if isinstance(v, SIMPLE)})
            for m in modules
        ]

    @property
    def top(self) -> list[Layer]:
        """The layers of the last tier: one, or the branches of a `Parallel`."""
        return list(self.tiers[-1].layers.values())

    @property
    def upper(self) -> dict[int, Layer]:
        """The layers to whose input an error is carried, by number: all but those that receive the network's input."""
        return {i: layer for i, layer in enumerate(self.layers) if i >= self.width}

    def list_other_parameters(self) -> list[str]:
        """Return the names of all parameters of the model that are not weights of a layer."""
        return [layer.bias for layer in self.layers if layer.bias is not None]

    def find_learning_layers(self, trainable: frozenset[str]) -> list[int]:
        """Return the numbers of the layers that have a trainable parameter."""
        return [i for i, layer in enumerate(self.layers) if {layer.weight, layer.bias} & trainable]

    def read_targets(self, output: torch.Size, y: Any, loss: Loss) -> None:
        """Find out which axis of the output counts classes, where a network allows several."""

    def flatten_time(self, values: Tensor) -> Tensor:
        """Return outputs or targets as the loss takes them: of a recurrent network, one row per time step."""
        return values

    def unflatten_time(self, rows: Tensor, batch: int) -> Tensor:
        """Undo `flatten_time`."""
        return rows

    def compute_input_drive(self, params: Params, u: Tensor) -> Tensor:
        """Return the first layer's drive. In a recurrent network it has the biases of both layers that drive the state."""
        return self.layers[0].forward(params, u)

    def gradients(
        self, inputs: list[Tensor], deltas: Mapping[int, Tensor], trainable: frozenset[str]
    ) -> dict[str, Tensor]:
        """Return the gradients −pre × post of every layer that has an error δ, if its parameters learn."""
        grads: dict[str, Tensor] = {}
        for i, delta in deltas.items():
            grads |= self.layers[i].gradients(inputs[i], delta, trainable)
        return grads

    def forward(self, params: Params, x: Tensor, noise: Noise, bottom: int = 0) -> Trace:
        """Run the network and keep what a backward sweep needs, for the layers from `bottom` up."""
        raise NotImplementedError

    def predict(self, params: Params, x: Tensor, noise: Noise) -> Tensor:
        """Return the output alone."""
        return self.forward(params, x, noise).output

    def shapes(self, input_shape: torch.Size | tuple[int, ...] | None = None) -> Shapes:
        """Return the shapes inside the network for an input of this shape (without the batch)."""
        raise NotImplementedError

    def forget_shapes(self) -> None:
        """Forget computed shapes, because an attribute of a module changed."""

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
