"""A check of a whole forward pass: that no error passes through a weight in a way that the library does not know.

Wired modules send errors through feedback weights. Whatever else a model does with its parameters shows in the graph that
autograd recorded. `verify` follows it from each parameter upwards. Values that depend on parameters alone may be added,
multiplied value by value and reshaped. They become activity by a product of the library, by a look-up, or when they
meet activity. If they are a factor of any other product, or meet an unknown operation, the model is refused.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils import checkpoint
from torch.utils._pytree import tree_leaves

from apical.errors import UnsupportedError

PRODUCTS = ("LinearProduct", "ConvolutionProduct", "AnyProduct")
LOOKUPS = ("Embedding", "EmbeddingBag", "EmbeddingRenorm")
NORMS = ("LayerNorm", "GroupNorm", "BatchNorm", "RmsNorm", "InstanceNorm", "Prelu")
"""Parts of the names of operations whose later arguments are gains and biases."""
NODE_FACTORS = {"Mm": (0, 1), "Bmm": (0, 1), "Mv": (0, 1), "Dot": (0, 1), "Vdot": (0, 1), "Linear": (0, 1)}
NODE_FACTORS |= {"Addmm": (1, 2), "Addmv": (1, 2), "Baddbmm": (1, 2), "Addbmm": (1, 2), "Addr": (1, 2)}
NODE_FACTORS |= {"Convolution": (0, 1), "ConvolutionOverrideable": (0, 1), "MkldnnConvolution": (0, 1)}
"""Products, and the places of their factors."""
LOCAL_NODES = {
    *("Mirror", "Add", "Sub", "Rsub", "Mul", "Div", "Neg", "Pow", "Exp", "Log", "Log1P", "Sqrt", "Rsqrt"),
    *("Reciprocal", "Abs", "Sigmoid", "Tanh", "Softplus", "Softmax", "LogSoftmax", "Relu", "Gelu", "Silu"),
    *("Clamp", "ClampMin", "ClampMax", "Where", "MaskedFill", "Lerp", "NativeDropout", "FusedDropout", "Sin"),
    *("Cos", "Erf", "Sign", "Maximum", "Minimum", "T", "Transpose", "Permute", "View", "UnsafeView"),
    *("ReshapeAlias", "Alias", "AsStrided", "Slice", "Select", "Split", "SplitWithSizes", "Chunk", "Unbind"),
    *("Index", "IndexSelect", "Gather", "Expand", "Repeat", "Squeeze", "Unsqueeze", "Cat", "Stack", "Clone"),
    *("ToCopy", "Copy", "CopySlices", "Unfold", "Roll", "Flip", "Pad", "ConstantPadNd", "Mean", "Sum"),
    *("Narrow", "Diagonal", "Tril", "Triu", "Identity"),
}
"""Operations that values of parameters alone may go through."""


def verify(model: nn.Module, output: Any) -> None:
    """Check the graph of a forward pass of the model."""
    names = {id(p): name for name, p in model.named_parameters(prefix="model")}
    reached: dict[Any, frozenset[str]] = {}
    """For each node of the graph, the parameters that its values still are; none if they are activity."""
    for root in _list_graphs(output):
        stack = [root]
        while stack:
            node = stack[-1]
            children = [child for child, _ in node.next_functions if child is not None and child not in reached]
            if node in reached or not children:
                stack.pop()
                if node not in reached:
                    reached[node] = _classify(node, reached, names)
            else:
                stack += children


def check_reduction(feedback: nn.ParameterDict) -> None:
    """Refuse DistributedDataParallel around the model alone: each process would have feedback weights of its own."""
    active: Any = DistributedDataParallel._active_ddp_module
    theta = next(iter(feedback.values()), None)
    if active is not None and theta is not None and not any(p is theta for p in active.module.parameters()):
        raise UnsupportedError(
            "DistributedDataParallel has the model without its feedback weights, which would differ from process to "
            "process; DistributedDataParallel(learner) works."
        )


def _list_graphs(output: Any) -> Iterator[Any]:
    """Yield the node of each tensor of a model's output, whatever holds them."""
    values = output if isinstance(output, dict | list | tuple) or not hasattr(output, "__dict__") else vars(output)
    for value in [output] if isinstance(output, Tensor) else tree_leaves(values):
        if isinstance(value, Tensor) and value.grad_fn is not None:
            yield value.grad_fn


def _classify(node: Any, reached: dict[Any, frozenset[str]], names: dict[int, str]) -> frozenset[str]:
    """Return the parameters that the values of a node still are, or refuse what the node does with them."""
    name = node.name().rpartition("Backward")[0] or node.name()
    name = name.rpartition("::")[2].removeprefix("_")
    if hasattr(node, "variable"):
        return frozenset([names[id(node.variable)]] if id(node.variable) in names else [])
    operands = [(place, reached[child]) for place, (child, _) in enumerate(node.next_functions) if child is not None]
    if name in PRODUCTS or name in LOOKUPS:
        return frozenset()
    if any(part in name for part in NORMS):
        return next((found for place, found in operands if place == 0), frozenset())
    factors = NODE_FACTORS.get(name)
    for place, found in operands:
        is_factor = factors is None or place in factors
        if found and is_factor and name not in LOCAL_NODES:
            raise UnsupportedError(
                f"{min(found)} acts by {name}, through which an error would pass by the weight itself; use a module of "
                "torch.nn, pass example= so that the weight is found, or use rule 'bp'."
            )
    is_activity = factors is not None or any(not found for _, found in operands)
    return frozenset() if is_activity else frozenset().union(*(found for _, found in operands))


@contextmanager
def run_checkpoints_plainly() -> Iterator[None]:
    """Run reentrant checkpoints as plain calls for a while, so that the graph shows what is inside."""
    original = checkpoint.CheckpointFunction.apply
    checkpoint.CheckpointFunction.apply = staticmethod(lambda run, preserve, *args: run(*args))  # type: ignore[method-assign]
    try:
        with torch.enable_grad():
            yield
    finally:
        checkpoint.CheckpointFunction.apply = original  # type: ignore[method-assign]
