"""`learner.record()`: what each layer did in the last batch."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Self, overload

from torch import Tensor, nn

from apical.core.activation import Neuron
from apical.core.network import Network
from apical.errors import ApicalError


@dataclass
class LayerRecord:
    """What one layer did in a batch. A rule that has no such quantity leaves it None.

    u: its input. drive: W u + b, before the activation. xi: the error ξ after the activation. delta: the error δ before
    it, from which the layer learned: the gradient of W is minus the batch mean of δ uᵀ (in a convolution under `np` with
    decorrelation, times the transpose of its decorrelating matrix). In a model that is not read as layers, a layer is a
    module with weights, its drive is what it returns, and xi is None.
    """

    name: str
    u: Tensor | None = None
    drive: Tensor | None = None
    xi: Tensor | None = None
    delta: Tensor | None = None


class Recording(Sequence[LayerRecord]):
    """The records of all layers, in their order. They are replaced at every batch, until `stop`.

    As a context manager it stops at the end of the block; the last batch can still be read.
    """

    def __init__(self, network: Network, model: nn.Module) -> None:
        self._layers = network.layers
        self._modules = [model.get_submodule(layer.name) for layer in self._layers] if network.is_general else []
        self._records: list[LayerRecord] = []
        self.is_on = True

    def stop(self) -> None:
        """Record no further batch."""
        self.is_on = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    @overload
    def __getitem__(self, i: int) -> LayerRecord: ...
    @overload
    def __getitem__(self, i: slice) -> list[LayerRecord]: ...
    def __getitem__(self, i: Any) -> Any:
        if not self._records:
            raise ApicalError(
                "nothing is recorded yet: call learner.record() first, then learner.step(...) or learner.credit(...)."
            )
        return self._records[i]

    def __len__(self) -> int:
        return len(self._layers)

    @contextmanager
    def capture(self) -> Iterator[None]:
        """Let the layers write to new records while one batch runs."""
        self._records = [LayerRecord(layer.name) for layer in self._layers]
        hooks = [
            module.register_forward_hook(partial(_note_module, layer.neuron))
            for layer, module in zip(self._layers, self._modules, strict=False)
        ]
        try:
            for layer, record in zip(self._layers, self._records, strict=True):
                layer.neuron.record = record
            yield
        finally:
            for layer in self._layers:
                layer.neuron.record = None
            for hook in hooks:
                hook.remove()


def _note_module(neuron: Neuron, module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
    """Write down what a module of a network that is not read as layers does; its δ is −∂Σloss/∂output, from autograd."""
    if inputs and isinstance(inputs[0], Tensor) and isinstance(output, Tensor):
        neuron.note(u=inputs[0].detach(), drive=output.detach())
        if output.requires_grad:
            output.register_hook(lambda gradient: neuron.note(delta=-gradient))
