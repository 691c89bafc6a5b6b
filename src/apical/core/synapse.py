"""The three linear operations of a layer of weights: carry activity up, carry an error down, and learn.

Every rule is written with these operations and nothing else that depends on the kind of layer:

    forward(w, u)       activity u through the weights w
    adjoint(w, e, ...)  an error e back to the input's shape, through *any weights that the rule passes*:
                        W is backpropagation, Θ is DLL, a fixed random B is feedback alignment
    outer(u, e)         presynaptic × postsynaptic, the batch mean: the shape of every local update

A synapse holds shapes and strides but no weights, so that it can be used with W, Θ and B alike.

>>> synapse = Dense(out_features=2, in_features=3)
>>> u, w, e = torch.randn(5, 3), torch.randn(2, 3), torch.randn(5, 2)
>>> drive, error = synapse.forward(w, u), synapse.adjoint(w, e, u.shape)
>>> torch.allclose((drive * e).sum(), (u * error).sum(), atol=1e-5)      # the definition of an adjoint
True
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn import grad as conv_grad

from apical.errors import UnsupportedError


@dataclass(frozen=True)
class Dense:
    """Fully connected weights. Dimensions between batch and features are positions that share the weights."""

    out_features: int
    in_features: int
    groups: ClassVar[int] = 1
    unit_axis: ClassVar[int] = -1
    """The axis of the drive that counts units: neurons here, filters in a convolution."""

    def __str__(self) -> str:
        return f"Linear({self.in_features}, {self.out_features})"

    @property
    def weight_shape(self) -> tuple[int, ...]:
        return (self.out_features, self.in_features)

    @property
    def fan_out(self) -> int:
        """The number of errors that one input unit receives through these weights."""
        return self.out_features

    def describe_mismatch(self, shape: Sequence[int]) -> str | None:
        """Return why an input of this shape (batch first) does not fit, or None if it does."""
        if len(shape) < 2 or shape[-1] != self.in_features:
            return f"takes (batch, …, {self.in_features})"
        return None

    def forward(self, w: Tensor, u: Tensor, b: Tensor | None = None) -> Tensor:
        return F.linear(u, w, b)

    def adjoint(self, w: Tensor, e: Tensor, shape: Sequence[int]) -> Tensor:
        return e @ w

    def outer(self, u: Tensor, e: Tensor, scale: float = 1.0) -> Tensor:
        post, pre = e.reshape(-1, self.out_features).T, u.reshape(-1, self.in_features)
        return scaled_product(post, pre, scale / u.shape[0])

    def total(self, e: Tensor, scale: float = 1.0) -> Tensor:
        """Return the update of a bias: `e` summed over positions, averaged over the batch, times `scale`."""
        return e.reshape(-1, self.out_features).sum(0) * (scale / e.shape[0])


def scaled_product(a: Tensor, b: Tensor, scale: float) -> Tensor:
    """Return scale · a b, with the scale as a factor of the matrix product, so that it needs no pass of its own."""
    if torch.compiler.is_compiling():  # the compiler fuses the scaling into the operation before
        return (a * scale) @ b
    if torch._C._functorch.is_batchedtensor(a) or torch._C._functorch.is_batchedtensor(b):
        stacked: Tensor = _Stacked.apply(a, b, scale)
        return stacked
    return torch.addmm(a.new_empty(()), a, b, beta=0, alpha=scale)


class _Stacked(torch.autograd.Function):
    """`scaled_product` under vmap, whose rule for addmm would need a separate pass for the scale."""

    @staticmethod
    def forward(a: Tensor, b: Tensor, scale: float) -> Tensor:
        return scaled_product(a, b, scale)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, float], output: Tensor) -> None:
        pass

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], a: Tensor, b: Tensor, scale: float) -> tuple[Tensor, int]:
        a, b = (
            t.expand(info.batch_size, *t.shape) if d is None else t.movedim(d, 0)
            for t, d in zip((a, b), in_dims, strict=False)
        )
        return torch.baddbmm(a.new_empty(()), a, b, beta=0, alpha=scale), 0


_CONV = {1: F.conv1d, 2: F.conv2d}
_CONV_TRANSPOSE = {1: F.conv_transpose1d, 2: F.conv_transpose2d}
_CONV_WEIGHT = {1: conv_grad.conv1d_weight, 2: conv_grad.conv2d_weight}


@dataclass(frozen=True)
class Conv:
    """Convolution in one or two dimensions, zero padding.

    `trailing` is the extra padding at the far end that `padding="same"` needs for an even kernel: the input is
    then padded before the convolution, and the adjoint cropped after it.
    """

    out_channels: int
    in_channels: int
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    trailing: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int
    unit_axis: ClassVar[int] = 1

    def __str__(self) -> str:
        return f"Conv{self.dims}d({self.in_channels}, {self.out_channels}, kernel_size={self.kernel})"

    @property
    def dims(self) -> int:
        return len(self.kernel)

    @property
    def weight_shape(self) -> tuple[int, ...]:
        return (self.out_channels, self.in_channels // self.groups, *self.kernel)

    @property
    def fan_out(self) -> int:
        return self.out_channels // self.groups * torch.Size(self.kernel).numel()

    def describe_mismatch(self, shape: Sequence[int]) -> str | None:
        if len(shape) != self.dims + 2 or shape[1] != self.in_channels:
            return f"takes (batch, {self.in_channels}, {', '.join(('height', 'width')[-self.dims :])})"
        return None

    def _pad(self, u: Tensor) -> Tensor:
        if not any(self.trailing):
            return u
        return F.pad(u, [side for extra in reversed(self.trailing) for side in (0, extra)])

    def forward(self, w: Tensor, u: Tensor, b: Tensor | None = None) -> Tensor:
        return _CONV[self.dims](self._pad(u), w, b, self.stride, self.padding, self.dilation, self.groups)

    def adjoint(self, w: Tensor, e: Tensor, shape: Sequence[int]) -> Tensor:
        # Rows at the far end that the stride skipped get a zero error; the output must not become smaller. (`trailing`
        # adds no such rows: torch allows padding="same" only with stride 1.)
        unreached = [
            (n + 2 * p - d * (k - 1) - 1) % s
            for n, p, d, k, s in zip(shape[2:], self.padding, self.dilation, self.kernel, self.stride, strict=True)
        ]
        below = _CONV_TRANSPOSE[self.dims](e, w, None, self.stride, self.padding, unreached, self.groups, self.dilation)
        for axis, extra in enumerate(self.trailing, start=2):
            if extra:
                below = below.narrow(axis, 0, shape[axis])
        return below

    def outer(self, u: Tensor, e: Tensor, scale: float = 1.0) -> Tensor:
        dtype = torch.promote_types(u.dtype, e.dtype)  # autocast does not reach this operation
        pre, post = self._pad(u).to(dtype), e.to(dtype)
        grad: Tensor = _CONV_WEIGHT[self.dims](
            pre, self.weight_shape, post, self.stride, self.padding, self.dilation, self.groups
        )
        return grad * (scale / u.shape[0])  # unlike in a dense layer, the weights are smaller than e

    def total(self, e: Tensor, scale: float = 1.0) -> Tensor:
        return e.flatten(2).sum((0, 2)) * (scale / e.shape[0])


Synapse = Dense | Conv


def read_synapse(module: nn.Module, where: str) -> Synapse | None:
    """Return the synapse of a Linear, Conv1d or Conv2d; None for any other module."""
    if isinstance(module, nn.Linear):
        return Dense(module.out_features, module.in_features)
    if not isinstance(module, nn.Conv1d | nn.Conv2d):
        return None
    if module.padding_mode != "zeros":
        raise UnsupportedError(
            f"layer {where} ({module}) pads with '{module.padding_mode}', which has no adjoint here; "
            "padding_mode='zeros' works."
        )
    padding, trailing = _get_padding(module)
    kernel, stride, dilation = (tuple(sizes) for sizes in (module.kernel_size, module.stride, module.dilation))
    return Conv(module.out_channels, module.in_channels, kernel, stride, padding, trailing, dilation, module.groups)


def _get_padding(module: nn.Conv1d | nn.Conv2d) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the padding of both ends, and the extra padding of the far end."""
    none = (0,) * len(module.kernel_size)
    if module.padding == "valid":
        return none, none
    if module.padding == "same":
        reach = [d * (k - 1) for d, k in zip(module.dilation, module.kernel_size, strict=True)]
        return tuple(r // 2 for r in reach), tuple(r % 2 for r in reach)
    assert not isinstance(module.padding, str)
    return tuple(module.padding), none
