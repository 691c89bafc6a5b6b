"""Parameters that a model's own code multiplies: `x @ self.w`, `torch.einsum(…, self.w)`, `F.linear(h, self.table.weight)`.

Inside of a forward pass such a parameter is read as a `RawWeight`, a tensor that knows its feedback weights Θ:

    a change of shape, a slice, a cast      acts on W and Θ alike
    a product with an activity              its error comes back through Θ
    a look-up, a sum, a gain, a norm        is exact
    anything else                           is refused by the names of the parameter and of the operation
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.utils._pytree import tree_leaves, tree_map_only

from apical.core.transport import AnyProduct, Multiply
from apical.core.wiring import Weights, is_in_backward, read_weights
from apical.errors import ApicalError

STRUCTURE = {
    *("t", "T", "mT", "H", "adjoint", "transpose", "permute", "swapaxes", "swapdims", "movedim", "view"),
    *("view_as", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze", "expand", "expand_as", "repeat"),
    *("chunk", "split", "tensor_split", "split_with_sizes", "unbind", "select", "narrow", "index_select"),
    *("__getitem__", "contiguous", "clone", "to", "float", "half", "bfloat16", "double", "type_as", "cuda"),
    *("cpu", "detach", "data", "neg", "__neg__"),
}
"""Operations that act on W and Θ alike."""
SCALINGS = ("mul", "__mul__", "__rmul__", "multiply", "div", "__truediv__", "divide", "true_divide")
"""Operations that act on W and Θ alike if the other factor is a number, and are a gain if it is an activity."""
SUMS = ("addmm", "addmv", "baddbmm")
"""Products of matrices that are added to their first argument."""
FACTORS = {
    **dict.fromkeys(("matmul", "__matmul__", "__rmatmul__", "mm", "bmm", "mv", "dot", "inner", "vdot"), (0, 1)),
    **dict.fromkeys(("tensordot", "linear", "conv1d", "conv2d", "conv3d"), (0, 1)),
    **dict.fromkeys(("conv_transpose1d", "conv_transpose2d", "conv_transpose3d"), (0, 1)),
    **dict.fromkeys(SUMS, (1, 2)),
    "einsum": (1, 2),
}
"""Products: the places of their two factors among the arguments."""
LOCAL = {
    *("embedding", "embedding_bag", "add", "__add__", "__radd__", "sub", "__sub__", "__rsub__", "rsub"),
    *("layer_norm", "rms_norm", "group_norm", "batch_norm", "instance_norm", "prelu", "cat", "concat"),
    *("stack", "where", "masked_fill", "dropout"),
}
"""Operations whose gradient is exact: each value of the parameter acts on its own."""
TORCH = str(Path(torch.__file__).parent)
MODULE_ARGUMENTS = ("input", "weight", "bias")


def count_axes(p: Tensor) -> int:
    """Return along how many axes a parameter varies: a gain or a bias varies along one."""
    return sum(size > 1 for size in p.shape)


class RawWeight(Tensor):
    """A parameter, or a part of it, together with its feedback weights."""

    module: Any
    key: str
    plain: Tensor
    pair: Callable[..., Weights]
    """(activities) -> W and Θ with all changes of shape so far."""

    @classmethod
    @_disable_dynamo  # the compiler leaves these operations to Python
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        is_getter = func.__name__ in ("__get__", "__set__")
        name = func.__self__.__name__ if is_getter else func.__name__
        raw = next(t for t in tree_leaves((args, kwargs)) if isinstance(t, RawWeight))
        with torch._C.DisableTorchFunctionSubclass():
            if name in STRUCTURE or (name in SCALINGS and _is_scaled(args, kwargs)):
                return _change_structure(raw, func, args, kwargs)
            if name in FACTORS:
                return _multiply(func, name, list(args), kwargs)
            if is_getter:
                return func(raw.module._parameters[raw.key], *args[1:])
            return _run_exactly(raw, func, name, args, kwargs)


def wrap(module: Any, key: str, plain: Tensor, pair: Callable[..., Weights]) -> RawWeight:
    """Return a RawWeight that looks like this tensor, which is the parameter or a part of it."""
    raw = plain.as_subclass(RawWeight)
    raw.module, raw.key, raw.plain, raw.pair = module, key, plain, pair
    return raw


def read_parameter(module: Any, key: str) -> Tensor | None:
    """Return a parameter: as a RawWeight inside of a forward pass with gradients, else as it is."""
    p: nn.Parameter | None = module._parameters[key]
    is_compiling = torch.compiler.is_compiling()
    if p is None or not torch.is_grad_enabled() or (is_compiling and key not in module.link.keys):
        return p
    if not (is_compiling or module.link.carrier.depth or is_in_backward()):
        caller = _find_caller()
        link = caller.__dict__.get("link") if isinstance(caller, nn.Module) else None
        if link is None or link.carrier is not module.link.carrier:
            return p
    return wrap(module, key, p, lambda *activities: read_weights(module, key, *activities))


def _find_caller() -> Any:
    """Return `self` of the method that reads a parameter; containers of torch, such as a ParameterList, do not count."""
    frame: Any = sys._getframe(3)
    while frame is not None and frame.f_code.co_filename.startswith(TORCH):
        frame = frame.f_back
    return None if frame is None else frame.f_locals.get("self")


def _to_plain(value: Any) -> Any:
    """Replace each RawWeight in a structure by its W."""
    return tree_map_only(RawWeight, lambda raw: raw.pair().get_exact(), value)


def _is_scaled(args: Any, kwargs: Any) -> bool:
    return not kwargs and sum(isinstance(a, Tensor) for a in args) == 1


def _change_structure(raw: RawWeight, func: Any, args: Any, kwargs: Any) -> Any:
    """Apply an operation to W and Θ alike, and return its results as RawWeights."""

    def change(t: Tensor) -> Any:
        return func(*(t if a is raw else _to_plain(a) for a in args), **kwargs)

    def pick(part: Tensor, i: int | None) -> RawWeight:
        def select(t: Tensor) -> Any:
            return change(t) if i is None else change(t)[i]

        return wrap(raw.module, raw.key, part, lambda *activities: raw.pair(*activities).map(select))

    result = change(raw.plain)
    return pick(result, None) if isinstance(result, Tensor) else tuple(pick(t, i) for i, t in enumerate(result))


FACTOR_NAMES = {"matmul": ("input", "other"), "mm": ("input", "mat2"), "bmm": ("input", "mat2"), "mv": ("input", "vec")}
"""What torch calls the factors of products that may be given by name."""


def _multiply(func: Any, name: str, args: list[Any], kwargs: dict[str, Any]) -> Tensor:
    """Run a product; its error comes back through Θ. What is added to the product is exact."""
    args += [kwargs.pop(key) for key in FACTOR_NAMES.get(name, ())[len(args) :] if key in kwargs]
    if name in SUMS:
        added, *args = args
        beta, alpha = kwargs.pop("beta", 1), kwargs.pop("alpha", 1)
        total: Tensor = beta * _to_plain(added) + alpha * _multiply(torch.matmul, "matmul", args, kwargs)
        return total
    bias = None
    if name == "linear" or name.startswith("conv"):
        args += [kwargs.pop(key, None) for key in MODULE_ARGUMENTS[len(args) :]]
        bias, args[2] = _to_plain(args[2]), None
    if name == "einsum" and isinstance(args[1], list | tuple):
        args[1:] = args[1]
    factors = FACTORS[name]
    places = [i for i, value in enumerate(args) if isinstance(value, RawWeight)]
    if len(places) > 1 or (
        places and (len(args) <= max(factors) or places[0] not in factors or len(args) > 3 == max(factors) + 1)
    ):
        raise refuse(args[places[0]], f"{name} of {'two parameters' if len(places) > 1 else 'other arguments'}")

    def multiply(a: Tensor, w: Tensor) -> Tensor:
        own = dict(zip(factors, (a, w) if not places or places[0] == factors[1] else (w, a), strict=True))
        out: Tensor = func(*(own.get(i, value) for i, value in enumerate(args)), **kwargs)
        return out

    if places:
        out = _apply(args[places[0]], args[sum(factors) - places[0]], multiply)
    else:  # only what is added is a parameter
        out = multiply(*(args[i] for i in factors))
    if bias is not None and name != "linear":
        bias = bias.view(-1, *[1] * (out.dim() - 2))
    return out if bias is None else out + bias.to(out.dtype)


def _apply(raw: RawWeight, a: Tensor, multiply: Multiply) -> Tensor:
    """Return the product of an activity with the weights; while a model is examined, note its fan-out, too."""
    weights, carrier = raw.pair(a), raw.module.link.carrier
    if carrier.uses is not None:
        with torch.no_grad():  # of ones, the product counts its own multiplications
            count = float(multiply(torch.ones_like(a), torch.ones_like(weights.w)).sum())
        carrier.fans[raw.module.link.names[raw.key]] = count / a.numel()
    out: Tensor = AnyProduct.apply(a, *weights, multiply)
    return out


def _run_exactly(raw: RawWeight, func: Any, name: str, args: Any, kwargs: Any) -> Any:
    """Run an operation whose gradient is exact, or refuse it."""
    result = func(*_to_plain(args), **_to_plain(kwargs))
    carries = any(isinstance(t, Tensor) and t.requires_grad for t in tree_leaves(result))
    is_exact = name in LOCAL or (name in SCALINGS and _is_gain(args))
    if carries and not is_exact and count_axes(raw.module._parameters[raw.key]) > 1:
        raise refuse(raw, name)
    return result


def _is_gain(args: Any) -> bool:
    """Return whether a parameter is multiplied value by value: the activity is not spread over more values before."""
    a, b = args[:2]
    raw, activity = (a, b) if isinstance(a, RawWeight) else (b, a)
    if not isinstance(activity, Tensor) or torch.broadcast_shapes(raw.shape, activity.shape) != activity.shape:
        return False
    sizes = (1,) * (activity.dim() - raw.dim()) + tuple(raw.shape)
    return all(stride or size == 1 for stride, size in zip(activity.stride(), sizes, strict=True))


def refuse(raw: RawWeight, operation: str) -> ApicalError:
    """Return the error for a parameter that acts in an unknown way. (Of a TypeError, torch would make NotImplemented.)"""
    name = raw.module.link.names[raw.key]
    return ApicalError(
        f"{name} acts by {operation}, for which the library has no feedback weights; products (matmul, einsum, linear), "
        "look-ups, sums and gains work, or rule 'bp'."
    )
