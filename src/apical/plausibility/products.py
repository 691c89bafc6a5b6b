"""Record the products of a run: which vectors are multiplied with matrices of which shapes."""

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

FACTORS = {
    "mm": (0, 1), "bmm": (0, 1), "mv": (0, 1), "dot": (0, 1), "vdot": (0, 1), "mul": (0, 1), "matmul": (0, 1),
    "addmm": (1, 2), "baddbmm": (1, 2), "addbmm": (1, 2), "addmv": (1, 2), "linear": (0, 1), "convolution": (0, 1),
    "_sparse_mm": (0, 1), "_sparse_addmm": (1, 2), "smm": (0, 1), "sspaddmm": (1, 2),
}  # fmt: skip
"""The operations that multiply, and the positions of their factors."""
IN, OUT = "in", "out"
COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd


class Product(NamedTuple):
    """Two factors that were multiplied, in which phase, by which operation, with the settings of a convolution."""

    phase: int
    operation: str
    one: Tensor
    other: Tensor
    settings: tuple[Any, ...] = ()


class Use(NamedTuple):
    """A matrix of some shape was applied, from which side, to which vectors: they lie along the last axis."""

    phase: int
    side: str
    vectors: Tensor
    matrix: Tensor

    @property
    def rows(self) -> Tensor:
        return self.vectors.reshape(-1, self.vectors.shape[-1])


class ProductRecorder(TorchDispatchMode):
    """Keeps the factors of every product that runs inside."""

    def __init__(self) -> None:
        super().__init__()
        self.phase = 0
        self.products: list[Product] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "aten" and func.has_kernel_for_dispatch_key(COMPOSITE):  # in inference mode
            with self:
                return func.decompose(*args, **kwargs)
        return self.run(func, func._schema.name.removeprefix("aten::").removesuffix("_"), args, kwargs)

    def run(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        """Run an operation, and keep the factors of a product."""
        if name in FACTORS:
            one, other = (args[i] for i in FACTORS[name])
            if all(isinstance(t, Tensor) and is_plain(t) for t in (one, other)):
                settings = tuple(args[3:9]) if name == "convolution" else ()
                self.products.append(Product(self.phase, name, one.detach().clone(), other.detach().clone(), settings))
        return func(*args, **kwargs)


def is_plain(t: Tensor) -> bool:
    """Return whether a tensor has real numbers in memory, along some axes."""
    return t.is_floating_point() and t.ndim > 0 and not t.is_meta and t.layout == torch.strided


class Cut(ProductRecorder):
    """Sets to zero what matrices of some shapes give, whatever they are kept in."""

    def __init__(self, shapes: set[torch.Size]) -> None:
        super().__init__()
        self.shapes = shapes

    def is_cut(self, use: Use) -> bool:
        """Return whether a matrix that is used so gives zero; here each does."""
        return True

    def run(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        out = func(*args, **kwargs)
        if name not in FACTORS or not isinstance(out, Tensor):
            return out
        one, other = (args[i] for i in FACTORS[name])
        if not all(isinstance(t, Tensor) for t in (one, other)):
            return out
        product = Product(0, name, one, other, tuple(args[3:9]))
        if not any(self.is_cut(use) for shape in self.shapes for use in find_uses(product, shape)):
            return out
        nothing = torch.zeros(out.shape, dtype=out.dtype)
        if name == "convolution" and args[2] is not None:
            return nothing + args[2].view(-1, *[1] * (out.ndim - 2))
        return nothing + args[0] if FACTORS[name][0] else nothing


def find_uses(product: Product, shape: torch.Size) -> list[Use]:
    """List how a matrix of this shape may have been applied in a product: all that its shape allows.

    More than really was does no harm: fewer changes of the matrix are tried.
    """
    out, into = shape[0], shape[1:].numel()
    one, other = product.one, product.other
    if product.operation == "convolution":
        return _find_convolved(product, shape)
    if product.operation == "mul":
        return [use for a, b in ((one, other), (other, one)) for use in _find_scaled(product.phase, a, b, out, into)]
    one, other = (one.unsqueeze(0) if one.ndim < 2 else one), (other.unsqueeze(-1) if other.ndim < 2 else other)
    uses = []
    for vectors, matrix in ((one, other.mT), (other.mT, one)):  # both have the summed axis last
        if matrix.shape[-2:] == (out, into):
            uses.append(Use(product.phase, IN, vectors, matrix))
        if matrix.shape[-2:] == (into, out):
            uses.append(Use(product.phase, OUT, vectors, matrix.mT))
    return uses


def _find_scaled(phase: int, vectors: Tensor, matrix: Tensor, out: int, into: int) -> list[Use]:
    """Rows or columns of a matrix that are multiplied by the numbers of a vector, perhaps to be summed."""
    uses, across = [], vectors.unsqueeze(0) if vectors.ndim < 2 else vectors
    if matrix.ndim < 2 or not vectors.ndim:
        return []
    for axis, other in ((-1, -2), (-2, -1)):
        if across.shape[other] != 1 or matrix.shape[-2:] not in ((out, into), (into, out)):
            continue
        size = across.shape[axis]
        turned = matrix.mT if matrix.shape[-2:] == (into, out) else matrix
        if size == matrix.shape[axis]:
            side = IN if (axis == -1) == (matrix.shape[-2:] == (out, into)) else OUT
            uses.append(Use(phase, side, across.movedim(axis, -1), turned))
    return uses


def _find_convolved(product: Product, shape: torch.Size) -> list[Use]:
    u, w = product.one, product.other
    stride, padding, dilation, transposed, _, groups = product.settings
    out, into = shape[0], shape[1:].numel()
    if (len(w), w[0].numel()) != (out, into):
        return []
    if transposed:
        return [Use(product.phase, OUT, u.movedim(1, -1), w)] if groups == 1 else []
    patches = cut_patches(u, w.shape[2:], stride, padding, dilation)
    return [Use(product.phase, IN, patches.unflatten(-1, (-1, into)), w)]


def cut_patches(u: Tensor, kernel: Any, stride: Any, padding: Any, dilation: Any) -> Tensor:
    """Return what the kernel of a convolution sees at each position, (batch, positions, channels × kernel)."""
    if len(kernel) == 1:
        u, kernel, stride = u.unsqueeze(-1), (*kernel, 1), (*stride, 1)
        padding, dilation = (*padding, 0), (*dilation, 1)
    return F.unfold(u, tuple(kernel), tuple(dilation), tuple(padding), tuple(stride)).mT


def span(vectors: list[Tensor], tolerance: float) -> Tensor:
    """Return an orthonormal basis (as rows) of what these vectors span, and one of ones: sums stay as they are, too."""
    rows = torch.cat([*vectors, torch.ones_like(vectors[0][:1])])
    lengths = rows.norm(dim=1, keepdim=True)
    rows = (rows / lengths)[lengths[:, 0] > 0].unique(dim=0)
    _, sizes, directions = torch.linalg.svd(rows, full_matrices=False)
    basis: Tensor = directions[sizes > tolerance * math.sqrt(len(rows))]
    return basis


def turn_rows(matrix: Tensor, basis: Tensor, side: str) -> Tensor:
    """Return M − 2DMP, where P projects onto what is orthogonal to the basis and D picks every other row.

    M acts on the basis as before, and its rows are as long as before. For side OUT, it is M − 2PMD with columns. Only every
    other row is changed: changing all of them would leave Mᵀe unchanged whenever it lies in the basis, such as when it is
    added to M's own input. Where MP is zero, as in a matrix of zeros, it is M + DRP with a random R.
    """
    flat = matrix.flatten(1) if side == IN else matrix.flatten(1).T
    change = -2 * _project(flat, basis)
    if change.norm() <= 1e-3 * flat.norm():
        noise = torch.randn(flat.shape, dtype=flat.dtype, generator=torch.Generator().manual_seed(2))
        change = _project(noise, basis) * (flat.std() if flat.any() else 1.0)
    change[1::2] = 0
    turned = flat + change
    return (turned if side == IN else turned.T).reshape(matrix.shape)


def _project(rows: Tensor, basis: Tensor) -> Tensor:
    """Return the part of each row that is orthogonal to the basis."""
    return rows - (rows @ basis.T) @ basis
