"""How a user's module is called: with its hooks, and with attributes that are changed for one call.

A module between the weights runs as it is, with its hooks. A layer of weights never runs, because a rule uses its weights
alone: hooks on it are refused (`ModelCheck` in `core/validation.py`).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.nn.modules import module as torch_module

FORWARDS = {kind: kind.forward for kind in vars(nn).values() if isinstance(kind, type) and issubclass(kind, nn.Module)}
"""The forward of every class in `torch.nn`."""

ParameterSlot = tuple[str, dict[str, nn.Parameter | None], str]
"""A parameter's full name, the `_parameters` dictionary of the module that owns it, and its key there."""


def has_hooks(module: nn.Module) -> bool:
    """Return whether a module has forward hooks, or a forward that belongs to this instance alone."""
    return bool(module._forward_hooks or module._forward_pre_hooks or "forward" in module.__dict__)


def is_plain(module: nn.Module) -> bool:
    """Return whether a module computes what its class in `torch.nn` computes, and nothing else runs with it."""
    watched = torch_module._global_forward_hooks or torch_module._global_forward_pre_hooks
    return not watched and not has_hooks(module) and type(module).forward is FORWARDS.get(type(module))


@contextmanager
def change_attributes(module: nn.Module, **attributes: Any) -> Iterator[None]:
    """Change attributes of a module for a while.

    The module itself is changed, not a copy, so that later changes by its user still apply and its hooks get the module.
    """
    own = module.__dict__
    before = {name: own[name] for name in attributes if name in own}
    own.update(attributes)
    try:
        yield
    finally:
        for name in attributes:
            del own[name]
        own.update(before)


def call_with(module: nn.Module, a: Tensor, **attributes: Any) -> Any:
    """Call a module with some of its attributes changed for this call only."""
    with change_attributes(module, **attributes):
        return module(a)


def find_slots(module: nn.Module, prefix: str) -> list[ParameterSlot]:
    """Find where each parameter of a module is stored."""
    owners = dict(module.named_modules())
    split = [(name, *name.rpartition(".")[::2]) for name, _ in module.named_parameters()]
    return [(prefix + name, owners[owner]._parameters, key) for name, owner, key in split]


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Put a model in evaluation mode for a while, and every module back in its own mode afterwards."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
