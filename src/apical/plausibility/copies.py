"""Copies of a learner to experiment on, and the audit's own networks for its rule."""

import copy
from collections import deque
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from apical.core.general import GeneralNetwork, find_kind, split_inputs
from apical.core.learner import Learner
from apical.core.network import Network
from apical.core.recurrent import Elman
from apical.errors import ApicalError
from apical.plausibility.products import FACTORS
from apical.plausibility.provenance import list_tensors

WIDTHS = (62, 54, 46, 38)
"""Hidden layers of the audit's own networks: wide, so that few examples leave room, and no two alike."""
INPUTS, CLASSES, EXAMPLES, TIME_STEPS, SIDE = 42, 34, 8, 2, 2
"""Their inputs (channels of images, of so many pixels to a side), classes, and what they are shown."""
CONTAINERS = (Tensor, list, tuple, dict, deque)
"""Types of attributes that tensors are looked for in."""


def list_kept_tensors(learner: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """List every tensor that lives on from batch to batch: also plain attributes, in lists and dictionaries, too."""
    yield from learner.named_parameters()
    yield from learner.named_buffers()
    for path, module in learner.named_modules():
        for key, value in vars(module).items():
            if isinstance(value, CONTAINERS) and not key.startswith("_"):
                for i, tensor in enumerate(list_tensors(value)):
                    yield f"{path}.{key}.{i}".lstrip("."), tensor


def copy_learner(learner: Learner, dtype: torch.dtype | None = None) -> Learner:
    """Copy a learner to the CPU, perhaps as another floating type. Tensors that share memory share it in the copy, too."""
    try:
        twin = copy.deepcopy(learner)
    except Exception as error:
        raise ApicalError(
            f"the learner cannot be copied for the audit ({error}); keep its tensors as buffers or parameters."
        ) from error
    storages: dict[int, Tensor] = {}
    for (_, own), (_, other) in zip(list_kept_tensors(learner), list_kept_tensors(twin), strict=True):
        if own.device.type == "meta" or own.layout != torch.strided:
            continue
        storage = own.untyped_storage()
        if storage.data_ptr() not in storages:
            numbers = own.detach().new_empty(0).set_(storage)  # type: ignore[call-overload]
            kind = dtype if dtype and own.is_floating_point() else own.dtype
            storages[storage.data_ptr()] = numbers.to("cpu", kind, copy=True)
        other.grad = None
        other.data = storages[storage.data_ptr()].as_strided(own.shape, own.stride(), own.storage_offset())
    return twin


def map_examples(function: Any, x: Any, count: int) -> Any:
    """Apply a function to each tensor of an input that has so many examples. Others, such as a mask for all, stay."""
    return tree_map_only(Tensor, lambda t: function(t) if t.ndim and len(t) == count else t, x)


def list_levels(network: Network) -> list[int]:
    """Return how high each layer is. Those of a tier are beside each other; in any other module each has its own level."""
    if isinstance(network, GeneralNetwork):
        return network.levels
    counts = [len(tier.layers) for tier in network.tiers]
    return [level for level, count in enumerate(counts) for _ in range(count)]


class FirstUses(TorchDispatchMode):
    """Notes the order in which weights, given by the address of their memory, first take part in a product."""

    def __init__(self, addresses: dict[int, int]) -> None:
        super().__init__()
        self.addresses, self.order = addresses, dict[int, int]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::").removesuffix("_")
        if name in FACTORS or "rnn" in name:
            for tensor in list_tensors(args):
                i = self.addresses.get(tensor.untyped_storage().data_ptr())
                if i is not None:
                    self.order.setdefault(i, len(self.order))
        return func(*args, **kwargs or {})


def order_layers(learner: Learner, x: Any) -> Learner:
    """Return a copy of a learner of any module, whose layers have the levels in which they act on this input.

    A layer that is not seen to act is just above the one before it in the list.
    """
    twin = copy_learner(learner)
    args, kwargs = split_inputs(x)
    weights = twin.forward_weights
    uses = FirstUses({w.untyped_storage().data_ptr(): i for i, w in enumerate(weights)})
    with torch.enable_grad(), torch.random.fork_rng(devices=[]), uses:
        twin.model(*args, **kwargs)
    twin = copy_learner(learner)  # the first one's buffers may have changed
    keys = [uses.order.get(i, -1) for i in range(len(weights))]
    for i, key in enumerate(keys):
        keys[i] = keys[i - 1] if key < 0 < i else key
    ranks = sorted(range(len(keys)), key=keys.__getitem__)
    twin.network.levels = [ranks.index(i) for i in range(len(keys))]  # type: ignore[attr-defined]
    return twin


def find_drive_shapes(learner: Learner, x: Any, count: int) -> list[torch.Size | None]:
    """Return the shape of each layer's drive for one of `count` examples; None where it is not the output of a module."""
    if learner.network.tiers:
        return list(learner.network.shapes(x.shape[1:]).drives)
    shapes: dict[str, torch.Size] = {}
    twin = copy_learner(learner)
    for layer in twin.network.layers:

        def note(module: nn.Module, inputs: Any, output: Any, weight: str = layer.weight) -> None:
            if isinstance(output, Tensor) and output.ndim and len(output) == count:
                shapes[weight] = output.shape[1:]

        module = twin.model.get_submodule(layer.name)
        if find_kind(module) is not None:  # others multiply their parameters themselves
            module.register_forward_hook(note)
    args, kwargs = split_inputs(x)
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        twin.model(*args, **kwargs)
    return [shapes.get(layer.weight) for layer in learner.network.layers]


def build_own(learner: Learner) -> tuple[Learner, Tensor, Tensor]:
    """Build a learner of the same rule and options on a network of the audit's own, as deep as its own; and a batch."""
    generator = torch.Generator().manual_seed(0)
    common: dict[str, Any] = {"input_shape": (INPUTS, *[SIDE] * _count_dims(learner))} if _count_dims(learner) else {}
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        options = {name: value for name, value in learner.given_options.items() if name != "head"}  # a module's name
        own = type(learner)(_build_model(learner), **common, **options)
    own.loss = learner.loss
    own.train(learner.training)
    own = copy_learner(own, torch.float64)
    sizes = (TIME_STEPS, INPUTS) if learner.network.recurrent else (INPUTS, *[SIDE] * _count_dims(learner))
    x = torch.rand(EXAMPLES, *sizes, generator=generator, dtype=torch.float64)
    own.network.shapes(x.shape[1:])  # copies need not compute them again
    y = torch.arange(EXAMPLES) % 3
    return own, x, y.unsqueeze(1).repeat(1, TIME_STEPS) if learner.network.recurrent else y


def _count_dims(learner: Learner) -> int:
    """Return over how many dimensions the first layer of a learner slides: none if it is dense."""
    return getattr(learner.network.layers[0].synapse, "dims", 0)


def _build_model(learner: Learner) -> nn.Sequential | Elman:
    if learner.network.recurrent:
        return Elman(nn.RNN(INPUTS, WIDTHS[0], batch_first=True), nn.Linear(WIDTHS[0], CLASSES))
    tiers = learner.network.tiers
    kinds = [getattr(tier.layers[tier.first].synapse, "dims", 0) for tier in tiers] or [0] * len(learner.network)
    convolutions = {1: nn.Conv1d, 2: nn.Conv2d}
    dims = kinds[0]
    widths = [INPUTS, *(WIDTHS[i % len(WIDTHS)] - i // len(WIDTHS) for i in range(len(kinds) - 1)), CLASSES]
    modules: list[nn.Module] = []
    for kind, below, above in zip(kinds, widths, widths[1:], strict=False):
        if kind and kind == dims:
            modules += [convolutions[kind](below, above, 3, padding=1), nn.Tanh()]
            continue
        if dims:
            modules.append(nn.Flatten())
        modules += [nn.Linear(below * SIDE**dims, above), nn.Tanh()]
        dims = 0
    return nn.Sequential(*modules[:-1])
