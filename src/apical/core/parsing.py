"""`apical.Parallel`, and the parser that splits an `nn.Sequential` into layers of weights or refuses it."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from apical.core.activation import RANDOM
from apical.errors import ApicalError, UnsupportedError


class Parallel(nn.ModuleList):
    """Branches that get the same input; their outputs are concatenated along dimension 1.

    A branch is a Linear, Conv1d or Conv2d, or an `nn.Sequential` that starts with one and goes on with modules
    without parameters (activation, pooling over time, Flatten). The branches act as one layer: the error at their
    input is the sum of the errors that they carry down.

    >>> branches = [nn.Sequential(nn.Conv1d(5, 4, k), nn.ReLU(), nn.AdaptiveMaxPool1d(1)) for k in (2, 3)]
    >>> model = nn.Sequential(Parallel(*branches), nn.Flatten(), nn.Linear(8, 2))
    >>> model(torch.randn(7, 5, 9)).shape
    torch.Size([7, 2])
    """

    def __init__(self, *branches: nn.Module) -> None:
        if not branches:
            raise ApicalError("a Parallel needs at least one branch, such as nn.Conv1d(100, 100, 3).")
        for branch in branches:
            if not isinstance(branch, nn.Module):
                raise UnsupportedError(
                    f"a branch of a Parallel is a {type(branch).__name__}; modules, given one by one, work."
                )
        super().__init__(branches)

    def forward(self, x: Tensor) -> Tensor:
        return join_outputs([branch(x) for branch in self])


def join_outputs(parts: Sequence[Tensor]) -> Tensor:
    """Concatenate the branches' outputs along dimension 1. Raises ApicalError if their other sizes differ."""
    shapes = [part.shape for part in parts]
    if any(len(s) < 2 or (s[0], s[2:]) != (shapes[0][0], shapes[0][2:]) for s in shapes):
        raise ApicalError(
            f"the branches of a Parallel give {', '.join(str(tuple(s)) for s in shapes)}, which cannot be joined along "
            "dimension 1; let all other sizes agree, as they do after nn.AdaptiveMaxPool1d(1) or nn.Flatten()."
        )
    return torch.cat(list(parts), 1)


NamedModule = tuple[str, nn.Module]


class Branch(NamedTuple):
    """A module with weights, and the modules without weights that follow it."""

    name: str
    module: nn.Module
    stages: list[NamedModule]


class ParsedTier(NamedTuple):
    """One layer, or the branches of a `Parallel`, and the modules `after` that act on the branches' joint output."""

    name: str
    branches: list[Branch]
    after: list[NamedModule]


def read_model(model: nn.Module) -> tuple[list[NamedModule], list[ParsedTier]]:
    """Split a model into the modules before its first weights and a list of tiers. Raises UnsupportedError."""
    if not isinstance(model, nn.Sequential):
        raise UnsupportedError(
            f"the model is a {type(model).__name__}; an nn.Sequential of Linear, Conv1d, Conv2d and modules "
            "without parameters, or an apical.Elman, works."
        )
    refuse_hooks("the model", model)
    stages: list[NamedModule] = []
    prefix, tiers = stages, []
    for name, module in _flatten_sequential(model, ""):
        if isinstance(module, Parallel):
            tiers.append(_read_parallel(name, module))
            # Modules after a single branch belong to its φ.
            single = len(tiers[-1].branches) == 1
            stages = tiers[-1].branches[0].stages if single else tiers[-1].after
        elif _has_weights(module, name):
            stages = []
            tiers.append(ParsedTier(name, [Branch(name, module, stages)], []))
        else:
            stages.append((name, module))
    if not tiers:
        raise UnsupportedError("the model has no weights to train; it needs at least one Linear, Conv1d or Conv2d.")
    _refuse_sharing(tiers)
    return prefix, tiers


def _read_parallel(name: str, module: Parallel) -> ParsedTier:
    """Read a Parallel as one tier."""
    if type(module).forward is not Parallel.forward:
        raise UnsupportedError(
            f"{name} ({type(module).__name__}) has a forward of its own, which apical would not run; a plain "
            "apical.Parallel works."
        )
    refuse_hooks(name, module)
    return ParsedTier(name, [_read_branch(f"{name}.{i}", branch) for i, branch in enumerate(module)], [])


def _read_branch(name: str, module: nn.Module) -> Branch:
    """Read one branch of a Parallel: a module with weights first, then its φ. Anything else is refused."""
    leaves = [(name, module)]
    if isinstance(module, nn.Sequential):
        refuse_hooks(name, module)
        leaves = _flatten_sequential(module, f"{name}.")
    for place, leaf in leaves:
        if isinstance(leaf, Parallel):
            raise UnsupportedError(
                f"{place} is a Parallel inside a Parallel, which apical does not read; list all branches in one Parallel."
            )
    weighted = [_has_weights(leaf, place) for place, leaf in leaves]
    if sum(weighted) != 1:
        raise UnsupportedError(
            f"branch {name} of a Parallel has {sum(weighted)} layers of weights; a branch with one Linear, Conv1d or "
            "Conv2d works."
        )
    if not weighted[0]:
        raise UnsupportedError(
            f"branch {name} of a Parallel starts with {describe_module(leaves[0][1])}; put it before the Parallel, so that "
            "the branch starts with its weights."
        )
    return Branch(leaves[0][0], leaves[0][1], leaves[1:])


def describe_module(module: nn.Module) -> str:
    """Return a module as text on one line; a module with children as its class name only."""
    return str(module) if next(module.children(), None) is None else type(module).__name__


def _flatten_sequential(model: nn.Sequential, path: str) -> list[tuple[str, nn.Module]]:
    """Return the modules inside nested Sequentials in the order in which they run, with their dotted names."""
    if type(model).forward is not nn.Sequential.forward:
        raise UnsupportedError(
            f"{type(model).__name__} has a forward of its own, which apical would not run; a plain nn.Sequential works."
        )
    leaves: list[tuple[str, nn.Module]] = []
    for key, module in model._modules.items():  # named_children() skips the second use of a module
        assert module is not None
        name = f"{path}{key}"
        if isinstance(module, nn.Sequential):
            refuse_hooks(name, module)
            leaves += _flatten_sequential(module, f"{name}.")
        else:
            leaves.append((name, module))
    return leaves


def _has_weights(module: nn.Module, name: str) -> bool:
    """Return whether a module is a layer of weights. Raises UnsupportedError if apical cannot train it."""
    for kind in (nn.Linear, nn.Conv1d, nn.Conv2d):
        if isinstance(module, kind):
            if isinstance(module.weight, nn.parameter.UninitializedParameter):
                raise UnsupportedError(
                    f"layer {name} ({module}) has no weights yet; run the model once on an input before apical reads it."
                )
            if parametrize.is_parametrized(module) or type(module).forward is not kind.forward:
                raise UnsupportedError(
                    f"layer {name} ({type(module).__name__}) computes its weights or output in a way of its own; "
                    f"a plain nn.{kind.__name__} works."
                )
            refuse_hooks(name, module)
            return True
    _refuse_unsupported(module, name)
    return False


_RANDOM_MODULES = (nn.modules.dropout._DropoutNd, nn.RReLU, nn.FractionalMaxPool2d, nn.FractionalMaxPool3d)


def _refuse_unsupported(module: nn.Module, name: str) -> None:
    """Refuse a module between weights that has parameters or buffers, or mixes examples."""
    why = None
    if isinstance(module, nn.modules.batchnorm._BatchNorm):
        why = "mixes the examples of a batch"
    elif isinstance(module, nn.RNNBase | nn.RNNCellBase):
        why = "is recurrent (apical.Elman takes an nn.RNN with its readout)"
    elif next(module.parameters(), None) is not None:
        why = "has parameters of its own"
    elif next(module.buffers(), None) is not None:
        why = "has buffers of its own"
    elif getattr(module, "return_indices", False):
        why = "returns indices beside its output"
    elif isinstance(module, _RANDOM_MODULES) and type(module) not in RANDOM:
        why = "draws random numbers in a way of its own"
    if why is None:
        return
    raise UnsupportedError(
        f"module {name} ({describe_module(module)}) {why}, which no rule here can train; Linear, Conv1d, Conv2d and "
        "modules without parameters (activations, pooling, Flatten, Dropout) work."
    )


def refuse_hooks(name: str, module: nn.Module) -> None:
    """Refuse a module with forward hooks, because apical would not run them."""
    if module._forward_hooks or module._forward_pre_hooks:
        raise UnsupportedError(
            f"{name} ({type(module).__name__}) has forward hooks, which apical would not run; remove them (weight_norm and "
            "spectral_norm install some)."
        )


def _refuse_sharing(tiers: list[ParsedTier]) -> None:
    """Refuse layers that share their weights."""
    owner: dict[int, str] = {}
    for branch in (branch for tier in tiers for branch in tier.branches):
        for parameter in branch.module.parameters():
            first = owner.setdefault(id(parameter), branch.name)
            if first != branch.name:
                raise UnsupportedError(
                    f"layers {first} and {branch.name} share their weights; give each layer weights of its own."
                )
