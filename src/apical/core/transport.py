"""Products of an activity with weights whose error comes back through other weights.

For a drive a·W the error g at the drive comes back as

    error at a      g·Θ                   never g·W
    gradient of W   pre × post, exact     it needs a and g, not W
    gradient of Θ   that of W             Kolen-Pollack's rule
                    ±scale · g × (g·Θ)    DLL's own rules

Under autocast they cast inside, so that each product is one node of the graph; autograd casts the gradients back.
They are `torch.autograd.Function`s, so `backward()`, checkpointing, DDP and `torch.compile` treat them like any operation.
Θ is None where no error passes: then a gets no gradient.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from apical.errors import ApicalError

Gradients = tuple[Tensor | None, ...]
Sizes = tuple[int, ...]
Multiply = Callable[[Tensor, Tensor], Tensor]
"""(activity, weights) -> their product."""


def refuse_double_backward() -> None:
    """Refuse `create_graph=True`: the error's path has no derivative of its own."""
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        raise ApicalError(
            "errors that pass through feedback weights are no gradient of a loss, so they cannot be differentiated again; "
            "leave out create_graph=True, or use rule 'bp'."
        )


def scale_gradient(gradient: Tensor, scale: float | None) -> Tensor:
    """Return the gradient of Θ, which is quadratic in the error, for an average over examples."""
    if scale is None:
        raise ApicalError(
            "a part of the model was called by itself, so the number of examples is not known, which the update of Θ "
            "depends on; set learner.error_scale, or call the whole model."
        )
    return gradient * scale


class LinearProduct(Function):
    """a·Wᵀ + b, as `F.linear`; its error comes back through Θ."""

    @staticmethod
    def forward(
        ctx: Any,
        a: Tensor,
        w: Tensor,
        theta: Tensor | None,
        bias: Tensor | None,
        mirrors: bool,
        scale: float | None,
        dtype: torch.dtype | None,
    ) -> Tensor:
        a, w, bias = _cast(dtype, a, w, bias)
        ctx.save_for_backward(a, theta)
        ctx.mirrors, ctx.scale = mirrors, scale
        if bias is None or a.ndim == 2:
            return F.linear(a, w, bias)
        # F.linear would return a view of the rows here, and nobody may write into a view that a Function has made.
        rows = F.linear(a.reshape(-1, a.shape[-1]), w, bias)
        drive: Tensor = torch.ops.aten._unsafe_view.default(rows, [*a.shape[:-1], len(w)])
        return drive

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Gradients:
        refuse_double_backward()
        a, theta = ctx.saved_tensors
        needs_a, needs_w, needs_theta, needs_b = ctx.needs_input_grad[:4]
        learns = needs_theta and not ctx.mirrors
        error = grad_w = grad_theta = grad_b = None
        rows = g.reshape(-1, g.shape[-1])
        if theta is not None and (needs_a or learns):
            error = (rows @ theta.to(g.dtype)).view(a.shape)
        if needs_w:
            grad_w = rows.t() @ a.reshape(-1, a.shape[-1])
        if error is not None and learns:
            grad_theta = scale_gradient(rows.t() @ error.view(-1, a.shape[-1]), ctx.scale)
        elif needs_theta:
            grad_theta = grad_w
        if needs_b:
            grad_b = rows.sum(0)
        return error, grad_w, grad_theta, grad_b, None, None, None


class ConvolutionProduct(Function):
    """A convolution or transposed convolution; its error comes back through Θ. One kernel gives all gradients.

    `sides` and `mode` say how a was padded before; Θ's gradient takes the error at the input without that padding.
    """

    @staticmethod
    def forward(
        ctx: Any,
        a: Tensor,
        w: Tensor,
        theta: Tensor | None,
        bias: Tensor | None,
        mirrors: bool,
        scale: float | None,
        dtype: torch.dtype | None,
        sides: Sizes,
        mode: str,
        stride: Sizes,
        padding: Sizes,
        dilation: Sizes,
        transposed: bool,
        output_padding: Sizes,
        groups: int,
    ) -> Tensor:
        a, w, bias = _cast(dtype, a, w, bias)
        ctx.mirrors, ctx.scale, ctx.sides, ctx.mode, ctx.has_theta = mirrors, scale, sides, mode, theta is not None
        ctx.geometry = (stride, padding, dilation, transposed, output_padding, groups)
        ctx.bias_sizes = None if bias is None else list(bias.shape)
        # Without Θ, W stands for the sizes only: no error passes.
        ctx.save_for_backward(a, w if theta is None else theta)
        return torch.convolution(a, w, bias, stride, padding, dilation, transposed, output_padding, groups)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Gradients:
        refuse_double_backward()
        a, theta = ctx.saved_tensors
        needs_a, needs_w, needs_theta, needs_b = ctx.needs_input_grad[:4]
        theta, learns = theta.to(g.dtype), needs_theta and not ctx.mirrors
        needs_a = ctx.has_theta and (needs_a or learns)
        derive = torch.ops.aten.convolution_backward.default
        error, grad_w, grad_b = derive(g, a, theta, ctx.bias_sizes, *ctx.geometry, [needs_a, needs_w, needs_b])
        grad_theta = grad_w if needs_theta else None
        if learns:
            at_input = _pad_again(error, ctx.sides, ctx.mode)
            grad_theta = derive(g, at_input, theta, None, *ctx.geometry, [False, True, False])[1]
            grad_theta = scale_gradient(grad_theta, ctx.scale)
        return error, grad_w, grad_theta, grad_b, *[None] * 11


def _cast(dtype: torch.dtype | None, *tensors: Tensor | None) -> Any:
    """Return the tensors in the type that autocast gives them, if there is one."""
    return tensors if dtype is None else [t if t is None else t.to(dtype) for t in tensors]


def _pad_again(error: Tensor, sides: Sizes, mode: str) -> Tensor:
    """Return the error at a padded input as that at the input itself, padded as the input was."""
    if not any(sides):
        return error
    at_input = F.pad(error, [-side for side in sides])
    if mode != "constant":
        at_input = _pull_back(lambda u: F.pad(u, sides, mode), at_input, error)
    return F.pad(at_input, sides, mode)


class AnyProduct(Function):
    """Any function that is linear in the activity and in the weights, such as an einsum; slower than the two above."""

    @staticmethod
    def forward(
        ctx: Any,
        a: Tensor,
        w: Tensor,
        theta: Tensor | None,
        mirrors: bool,
        scale: float | None,
        dtype: torch.dtype | None,
        multiply: Multiply,
    ) -> Tensor:
        a, w = _cast(dtype, a, w)
        ctx.save_for_backward(a, w, theta)
        ctx.mirrors, ctx.scale, ctx.dtype, ctx.multiply = mirrors, scale, dtype, multiply
        out = multiply(a, w)
        is_view = not torch.compiler.is_compiling() and out._is_view()
        return out.clone() if is_view else out  # nobody may write into a view that a Function has made

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Gradients:
        refuse_double_backward()
        a, w, theta = ctx.saved_tensors
        needs_a, needs_w, needs_theta = ctx.needs_input_grad[:3]
        (theta,) = _cast(ctx.dtype, theta)
        error = grad_w = grad_theta = None
        if theta is not None and (needs_a or (needs_theta and not ctx.mirrors)):
            error = _pull_back(lambda u: ctx.multiply(u, theta), a, g)
        if needs_w:
            grad_w = _pull_back(lambda v: ctx.multiply(a, v), w, g)
        if needs_theta and ctx.mirrors:
            grad_theta = grad_w
        elif needs_theta:
            grad_theta = scale_gradient(_pull_back(lambda v: ctx.multiply(error, v), theta, g), ctx.scale)
        return error, grad_w, grad_theta, None, None, None, None


def _pull_back(function: Callable[[Tensor], Tensor], at: Tensor, g: Tensor) -> Tensor:
    """Return the adjoint of a linear function, applied to g. It is the same at zero as at every other point."""
    with torch.enable_grad():
        at = torch.zeros_like(at).requires_grad_()
        return torch.autograd.grad(function(at), at, g)[0]


class Mirror(Function):
    """W itself. Whatever gradient W gets by this use, Θ gets, too: Kolen-Pollack's rule."""

    @staticmethod
    def forward(ctx: Any, w: Tensor, theta: Tensor) -> Tensor:
        return w.view_as(w)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Gradients:
        return g, g


class RefuseBackward(Function):
    """The identity, whose `backward()` raises an error: for the output of a rule that is not run by autograd."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, sentence: str) -> Tensor:
        ctx.sentence = sentence
        return output.clone()  # not a view, so that users may write into it

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Gradients:
        raise ApicalError(ctx.sentence)


def refuse_backward(output: Tensor, rule: str) -> Tensor:
    """Return the output such that `backward()` on what follows from it raises an error."""
    sentence = (
        f"backward() on the output of a {rule!r} learner would be backpropagation, not its rule; learner.credit(x, y) "
        "writes the rule's gradients, learner.step(x, y, optim) also steps."
    )
    out: Tensor = RefuseBackward.apply(output, sentence)
    return out
