"""`apical.Parallel`, and how an `nn.Sequential` is read as layers of weights: what is accepted and what is refused."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from apical.core.activation import RANDOM
from apical.errors import ApicalError, UnsupportedError


class Parallel(nn.ModuleList):
    """Every branch gets the same input; their outputs are concatenated along dimension 1.

    A branch is a Linear, Conv1d or Conv2d, or an `nn.Sequential` that starts with one and goes on with modules
    without parameters (activation, pooling over time, Flatten). A network reads all of it as one layer: an error at
    its input is the sum of what the branches send down.

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
        return joined([branch(x) for branch in self])


def joined(parts: Sequence[Tensor]) -> Tensor:
    """The branches' outputs as one; those that differ in more than dimension 1 are refused."""
    shapes = [part.shape for part in parts]
    if any(len(s) < 2 or (s[0], s[2:]) != (shapes[0][0], shapes[0][2:]) for s in shapes):
        raise ApicalError(
            f"the branches of a Parallel give {', '.join(str(tuple(s)) for s in shapes)}, which cannot be joined along "
            "dimension 1; let all other sizes agree, as they do after nn.AdaptiveMaxPool1d(1) or nn.Flatten()."
        )
    return torch.cat(list(parts), 1)


Named = tuple[str, nn.Module]


class Branch(NamedTuple):
    """A module with weights and the modules without that follow it, up to the next weights."""

    name: str
    module: nn.Module
    stages: list[Named]


class Group(NamedTuple):
    """The branches that get one input: a single one, or those of a `Parallel` with what follows them all."""

    name: str
    branches: list[Branch]
    after: list[Named]


def read(model: nn.Module) -> tuple[list[Named], list[Group]]:
    """What stands before the first weights, and the groups in their order."""
    if not isinstance(model, nn.Sequential):
        raise UnsupportedError(
            f"the model is a {type(model).__name__}; an nn.Sequential of Linear, Conv1d, Conv2d and modules "
            "without parameters, or an apical.Elman, works."
        )
    refuse_hooks("the model", model)
    stages: list[Named] = []
    prefix, groups = stages, []
    for name, module in _flatten(model, ""):
        if isinstance(module, Parallel):
            groups.append(_fan(name, module))
            # What follows a single branch is simply the rest of its φ.
            single = len(groups[-1].branches) == 1
            stages = groups[-1].branches[0].stages if single else groups[-1].after
        elif _is_synapse(module, name):
            stages = []
            groups.append(Group(name, [Branch(name, module, stages)], []))
        else:
            stages.append((name, module))
    if not groups:
        raise UnsupportedError(
            "the model has no weights to train; it needs at least one Linear, Conv1d or Conv2d."
        )
    _refuse_sharing(groups)
    return prefix, groups


def _fan(name: str, module: Parallel) -> Group:
    """The branches of a Parallel."""
    if type(module).forward is not Parallel.forward:
        raise UnsupportedError(
            f"{name} ({type(module).__name__}) has a forward of its own, which apical would not run; a plain "
            "apical.Parallel works."
        )
    refuse_hooks(name, module)
    return Group(name, [_branch(f"{name}.{i}", branch) for i, branch in enumerate(module)], [])


def _branch(name: str, module: nn.Module) -> Branch:
    """One synapse, first, and its own φ: anything else in a branch is refused by name."""
    leaves = [(name, module)]
    if isinstance(module, nn.Sequential):
        refuse_hooks(name, module)
        leaves = _flatten(module, f"{name}.")
    for place, leaf in leaves:
        if isinstance(leaf, Parallel):
            raise UnsupportedError(
                f"{place} is a Parallel inside a Parallel, which apical does not read; list all branches in one Parallel."
            )
    weighted = [_is_synapse(leaf, place) for place, leaf in leaves]
    if sum(weighted) != 1:
        raise UnsupportedError(
            f"branch {name} of a Parallel has {sum(weighted)} layers of weights; a branch with one Linear, Conv1d or "
            "Conv2d works."
        )
    if not weighted[0]:
        raise UnsupportedError(
            f"branch {name} of a Parallel starts with {brief(leaves[0][1])}; put it before the Parallel, so that the "
            "branch starts with its weights."
        )
    return Branch(leaves[0][0], leaves[0][1], leaves[1:])


def brief(module: nn.Module) -> str:
    """A module on one line: one that holds others by its kind alone."""
    return str(module) if next(module.children(), None) is None else type(module).__name__


def _flatten(model: nn.Sequential, path: str) -> list[tuple[str, nn.Module]]:
    """The leaves of nested Sequentials in the order in which they run, by their dotted names."""
    if type(model).forward is not nn.Sequential.forward:
        raise UnsupportedError(
            f"{type(model).__name__} has a forward of its own, which apical would not run; a plain nn.Sequential works."
        )
    leaves: list[tuple[str, nn.Module]] = []
    for key, module in model._modules.items():  # named_children() would hide a module's second use
        assert module is not None
        name = f"{path}{key}"
        if isinstance(module, nn.Sequential):
            refuse_hooks(name, module)
            leaves += _flatten(module, f"{name}.")
        else:
            leaves.append((name, module))
    return leaves


def _is_synapse(module: nn.Module, name: str) -> bool:
    """Whether a leaf carries weights; refuses what apical cannot train."""
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
    return _refuse_parameters(module, name)


_DRAWS = (nn.modules.dropout._DropoutNd, nn.RReLU, nn.FractionalMaxPool2d, nn.FractionalMaxPool3d)


def _refuse_parameters(module: nn.Module, name: str) -> bool:
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
    elif isinstance(module, _DRAWS) and type(module) not in RANDOM:
        why = "draws random numbers in a way of its own"
    if why is None:
        return False
    raise UnsupportedError(
        f"module {name} ({brief(module)}) {why}, which no rule here can train; Linear, Conv1d, Conv2d and modules without "
        "parameters (activations, pooling, Flatten, Dropout) work."
    )


def refuse_hooks(name: str, module: nn.Module) -> None:
    if module._forward_hooks or module._forward_pre_hooks:
        raise UnsupportedError(
            f"{name} ({type(module).__name__}) has forward hooks, which apical would not run; remove them (weight_norm and "
            "spectral_norm install some)."
        )


def _refuse_sharing(groups: list[Group]) -> None:
    owner: dict[int, str] = {}
    for branch in (branch for group in groups for branch in group.branches):
        for parameter in branch.module.parameters():
            first = owner.setdefault(id(parameter), branch.name)
            if first != branch.name:
                raise UnsupportedError(
                    f"layers {first} and {branch.name} share their weights; give each layer weights of its own."
                )
