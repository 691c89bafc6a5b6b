"""Copies of a learner to experiment on, and the audit's own networks for its rule."""

import copy
from collections import deque
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from apical.core.learner import Learner
from apical.core.network import Network
from apical.core.recurrent import Elman
from apical.errors import ApicalError
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


def list_levels(network: Network) -> list[int]:
    """Return how high each layer is. Those of a tier are beside each other; of any other module, each is above the last."""
    counts = [len(tier.layers) for tier in network.tiers] or [1] * len(network)
    return [level for level, count in enumerate(counts) for _ in range(count)]


def find_drive_shapes(learner: Learner, x: Tensor) -> list[torch.Size | None]:
    """Return the shape of each layer's drive for one example; None where it is not the output of a module."""
    if learner.network.tiers:
        return list(learner.network.shapes(x.shape[1:]).drives)
    shapes: dict[str, torch.Size] = {}
    twin = copy_learner(learner)
    for layer in twin.network.layers:

        def note(module: nn.Module, inputs: Any, output: Any, weight: str = layer.weight) -> None:
            if isinstance(output, Tensor) and len(output) == len(x):
                shapes[weight] = output.shape[1:]

        twin.model.get_submodule(layer.name).register_forward_hook(note)
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        twin.model(x)
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
