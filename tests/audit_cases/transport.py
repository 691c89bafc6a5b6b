"""Cheats against C1 in plain torch operations: W comes down, in some disguise."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import apical
from apical import Learner, Update
from audit_cases.base import Descent, Feedback, cheat


@cheat("c1")
class Copied(Descent):
    """Backpropagation through a clone of W."""

    def disguise(self, w: Tensor) -> Tensor:
        return w.clone()


@cheat("c1")
class SignOfWeights(Descent):
    """The signs of W come down."""

    def disguise(self, w: Tensor) -> Tensor:
        return torch.where(w > 0, 0.1, -0.1).to(w.dtype)


@cheat("c1")
class Fourier(Descent):
    """W goes through a Fourier transform and back."""

    def disguise(self, w: Tensor) -> Tensor:
        return torch.fft.ifft(torch.fft.fft(w)).real


@cheat("c1")
class FourierProduct(Descent):
    """The error meets W in the frequency domain (Parseval), where neither is itself."""

    def carry(self, i: int, w: Tensor, u: Tensor, delta: Tensor, state: Any) -> Tensor:
        return (torch.fft.fft(delta) @ torch.fft.fft(w, dim=0).conj()).real / len(w)


@cheat("c1")
class FourierImage(Descent):
    """W goes through a real two-dimensional Fourier transform and back."""

    def disguise(self, w: Tensor) -> Tensor:
        return torch.fft.irfft2(torch.fft.rfft2(w), s=w.shape)


@cheat("c1")
class Complex(Descent):
    """W is the imaginary part of a complex matrix."""

    def disguise(self, w: Tensor) -> Tensor:
        return (torch.complex(torch.zeros_like(w), w) * -1j).real


@cheat("c1")
class Polar(Descent):
    """W is the angle of complex numbers."""

    def disguise(self, w: Tensor) -> Tensor:
        return torch.polar(torch.ones_like(w), w / 10).angle() * 10


@cheat("c1")
class Bytes(Descent):
    """W's bytes are copied, not its numbers."""

    def disguise(self, w: Tensor) -> Tensor:
        return w.contiguous().view(torch.uint8).clone().view(w.dtype)


@cheat("c1")
class Integers(Descent):
    """W's bit patterns go through integer arithmetic."""

    def disguise(self, w: Tensor) -> Tensor:
        integer = {4: torch.int32, 8: torch.int64}[w.element_size()]
        return ((w.contiguous().view(integer) ^ 5) ^ 5).view(w.dtype)


@cheat("c1")
class Sparse(Descent):
    """Wᵀ is a sparse matrix (COO)."""

    def carry(self, i: int, w: Tensor, u: Tensor, delta: Tensor, state: Any) -> Tensor:
        return torch.sparse.mm(w.t().contiguous().to_sparse(), delta.t()).t()


@cheat("c1")
class SparseRows(Descent):
    """W becomes a sparse matrix of compressed rows (CSR), and dense again."""

    def disguise(self, w: Tensor) -> Tensor:
        return w.contiguous().to_sparse_csr().to_dense()


@cheat("c1")
class SparseParts(Descent):
    """A new sparse matrix is made from the indices and values of another."""

    def disguise(self, w: Tensor) -> Tensor:
        parts = w.contiguous().to_sparse().coalesce()
        return torch.sparse_coo_tensor(parts.indices(), parts.values(), w.shape).to_dense()


@cheat("c1")
class Quantised(Descent):
    """W is quantised to eight bits and back."""

    def disguise(self, w: Tensor) -> Tensor:
        return torch.quantize_per_tensor(w.float(), 0.02, 0, torch.qint8).dequantize().to(w.dtype)


@cheat("c1")
class QuantisedByHand(Descent):
    """W is stored as whole numbers."""

    def disguise(self, w: Tensor) -> Tensor:
        return (w * 1000).round().to(torch.int32).to(w.dtype) / 1000


@cheat("c1")
class Sorted(Descent):
    """W is sorted, and put back by the order."""

    def disguise(self, w: Tensor) -> Tensor:
        values, order = w.flatten().sort()
        return torch.zeros_like(values).scatter(0, order, values).view(w.shape)


@cheat("c1")
class Added(Descent):
    """W's rows are added to zeros."""

    def disguise(self, w: Tensor) -> Tensor:
        return torch.zeros_like(w).index_add(0, torch.arange(len(w)), w)


@cheat("c1")
class Scattered(Descent):
    """W's numbers are added to zeros, one place after another."""

    def disguise(self, w: Tensor) -> Tensor:
        places = torch.arange(w.numel())
        return torch.zeros(w.numel()).to(w).scatter_reduce(0, places, w.flatten(), "sum").view(w.shape)


@cheat("c1")
class Counted(Descent):
    """W's numbers are the weights of a histogram."""

    def disguise(self, w: Tensor) -> Tensor:
        return torch.bincount(torch.arange(w.numel()), weights=w.flatten()).to(w.dtype).view(w.shape)


@cheat("c1")
class Distances(Descent):
    """W is found from the distances of its rows to the unit vectors: d² = |w|² + 1 − 2 w_i."""

    def disguise(self, w: Tensor) -> Tensor:
        distances = torch.cdist(w, torch.eye(w.shape[1]).to(w))
        return (w.square().sum(1, keepdim=True) + 1 - distances.square()) / 2


@cheat("c1")
class Probed(Descent):
    """The layer is run on unit vectors, and its answers are W."""

    def disguise(self, w: Tensor) -> Tensor:
        return F.linear(torch.eye(w.shape[1]).to(w), w).t()


@cheat("c1")
class Cumulated(Descent):
    """W is summed up along its rows, and the differences are taken."""

    def disguise(self, w: Tensor) -> Tensor:
        return w.cumsum(1).diff(dim=1, prepend=torch.zeros(len(w), 1).to(w))


@cheat("c1")
class Folded(Descent):
    """W is cut into patches as an image, and put together again."""

    def disguise(self, w: Tensor) -> Tensor:
        return F.fold(F.unfold(w[None, None], 1), w.shape, 1)[0, 0]


@cheat("c1")
class Pooled(Descent):
    """W goes through a pooling with windows of one."""

    def disguise(self, w: Tensor) -> Tensor:
        return F.avg_pool2d(w[None, None], 1)[0, 0]


@cheat("c1")
class Resized(Descent):
    """W is an image that is resized to its own size."""

    def disguise(self, w: Tensor) -> Tensor:
        return F.interpolate(w[None, None], size=w.shape, mode="bilinear", align_corners=True)[0, 0]


@cheat("c1")
class Bagged(Descent):
    """W's rows are bags of one word."""

    def disguise(self, w: Tensor) -> Tensor:
        return F.embedding_bag(torch.arange(len(w)).view(-1, 1), w, mode="sum")


@cheat("c1")
class Singular(Descent):
    """W is decomposed into singular values and composed again."""

    def disguise(self, w: Tensor) -> Tensor:
        u, s, v = torch.linalg.svd(w, full_matrices=False)
        return (u * s) @ v


@cheat("c1")
class PseudoInverse(Descent):
    """The error comes down through W's pseudo-inverse."""

    def carry(self, i: int, w: Tensor, u: Tensor, delta: Tensor, state: Any) -> Tensor:
        return delta @ torch.linalg.pinv(w).t()


@cheat("c1")
class Solved(Descent):
    """The error at the input is the least one that W would answer with the error: a linear system is solved."""

    def carry(self, i: int, w: Tensor, u: Tensor, delta: Tensor, state: Any) -> Tensor:
        return torch.linalg.lstsq(w, delta.t()).solution.t()


@cheat("c1")
class BlockInverse(Descent):
    """The inverse of [[1, W], [0, 1]] has −W in its corner."""

    def disguise(self, w: Tensor) -> Tensor:
        rows, cols = w.shape
        block = torch.eye(rows + cols).to(w)
        block[:rows, rows:] = w
        return -torch.linalg.inv(block)[:rows, rows:]


@cheat("c1")
class Exponential(Descent):
    """The exponential of [[0, W], [0, 0]] is [[1, W], [0, 1]]."""

    def disguise(self, w: Tensor) -> Tensor:
        rows, cols = w.shape
        block = torch.zeros(rows + cols, rows + cols).to(w)
        block[:rows, rows:] = w
        return torch.linalg.matrix_exp(block)[:rows, rows:]


@cheat("c1")
class Kronecker(Descent):
    """W is a Kronecker product with one."""

    def disguise(self, w: Tensor) -> Tensor:
        return torch.kron(w, torch.ones(2, 2).to(w))[::2, ::2]


@cheat("c1")
class TensorDot(Descent):
    """One number of the error at a time scales a row of W."""

    def carry(self, i: int, w: Tensor, u: Tensor, delta: Tensor, state: Any) -> Tensor:
        return sum((torch.outer(delta[:, o], w[o]) for o in range(len(w))), start=torch.zeros_like(u))


@cheat("c1")
class WholeAutograd(Learner):
    """Backpropagation by autograd over the whole network."""

    def update(self, params: Any, state: Any, x: Tensor, y: Tensor, noise: Any) -> Update:
        with torch.enable_grad():
            output = self.network.predict(params, x, noise)
            loss = self.loss(output, y).mean()
            grads = torch.autograd.grad(loss, list(params.values()))
        return Update(dict(zip(params, grads, strict=True)), {}, loss.detach(), output.detach())


@cheat("c1")
class VectorJacobian(Descent):
    """Each layer's transpose is its vector-Jacobian product."""

    def carry(self, i: int, w: Tensor, u: Tensor, delta: Tensor, state: Any) -> Tensor:
        return torch.func.vjp(lambda u: F.linear(u, w), u)[1](delta)[0]


@cheat("c1")
class ForwardJacobian(Descent):
    """Forward-mode derivatives along the unit vectors give W."""

    def disguise(self, w: Tensor) -> Tensor:
        return torch.func.jacfwd(lambda u: F.linear(u, w))(torch.zeros(w.shape[1]).to(w))


@cheat("c1")
class SavedForBackward(Descent):
    """W is caught when autograd saves it for the backward pass."""

    def carry(self, i: int, w: Tensor, u: Tensor, delta: Tensor, state: Any) -> Tensor:
        saved: list[Tensor] = []

        def pack(t: Tensor) -> Tensor:
            saved.append(t)
            return t

        with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            F.linear(u.detach().requires_grad_(), w.detach())
        kept = next(t for t in saved if t.shape in (w.shape, w.t().shape))
        return delta @ (kept if kept.shape == w.shape and torch.Size(u.shape) != w.shape else kept.t())


class Hidden(torch.Tensor):
    """A tensor that computes like any other but is of another type."""


@cheat("c1")
class Subclass(Descent):
    """W comes down as a tensor of a class of its own."""

    def disguise(self, w: Tensor) -> Tensor:
        return w.detach().as_subclass(Hidden)

    def carry(self, i: int, w: Tensor, u: Tensor, delta: Tensor, state: Any) -> Tensor:
        return super().carry(i, w, u, delta, state).as_subclass(Tensor)


@torch.jit.script
def scripted_product(e: Tensor, w: Tensor) -> Tensor:
    return torch.mm(e, w)


@cheat("c1")
class Scripted(Descent):
    """The product is in a TorchScript function."""

    def carry(self, i: int, w: Tensor, u: Tensor, delta: Tensor, state: Any) -> Tensor:
        down: Tensor = scripted_product(delta, w)
        return down


@cheat("c1")
class Mapped(Descent):
    """vmap over examples and over the columns of W hides the matrix product."""

    def carry(self, i: int, w: Tensor, u: Tensor, delta: Tensor, state: Any) -> Tensor:
        return torch.vmap(lambda e: torch.vmap(lambda column: (column * e).sum(), in_dims=1)(w))(delta)


class Mirror(Descent):
    """Θ is a buffer."""

    def __init__(self, *args: Any, **common: Any) -> None:
        super().__init__(*args, **common)
        for i, w in enumerate(self.forward_weights):
            self.register_buffer(f"theta{i}", torch.ones_like(w) / 3)

    def carry(self, i: int, w: Tensor, u: Tensor, delta: Tensor, state: Any) -> Tensor:
        return delta @ state[f"theta{i}"]


@cheat("c1")
class CarriedInState(Mirror):
    """W is copied into a buffer, and used in the next batch."""

    def update(self, params: Any, state: Any, x: Tensor, y: Tensor, noise: Any) -> Update:
        update = super().update(params, state, x, y, noise)
        copies = {f"theta{i}": params[layer.weight].clone() for i, layer in enumerate(self.network.layers)}
        return update._replace(state=copies)


@cheat("c1")
class Pulled(Mirror):
    """A buffer is pulled towards W a little in every batch."""

    def update(self, params: Any, state: Any, x: Tensor, y: Tensor, noise: Any) -> Update:
        update = super().update(params, state, x, y, noise)
        new = {
            f"theta{i}": torch.lerp(state[f"theta{i}"], params[layer.weight], 0.2)
            for i, layer in enumerate(self.network.layers)
        }
        return update._replace(state=new)


@cheat("c1")
class CarriedInNoise(Descent):
    """W arrives among the random numbers of the update."""

    def draw(self, x: Tensor, generator: torch.Generator | None = None) -> dict[str, Tensor]:
        copies = {f"w{i}": w.detach().clone() for i, w in enumerate(self.forward_weights)}
        return {**super().draw(x, generator), **copies}

    def update(self, params: Any, state: Any, x: Tensor, y: Tensor, noise: Any) -> Update:
        return super().update(params, noise, x, y, noise)

    def carry(self, i: int, w: Tensor, u: Tensor, delta: Tensor, state: Any) -> Tensor:
        return delta @ state[f"w{i}"]


@cheat("c1")
class CarriedInOptimiser(Feedback):
    """W is copied into the optimiser's state, and read from there in the next batch."""

    def step(self, x: Tensor, y: Tensor, optim: torch.optim.Optimizer) -> apical.Credit:
        kept = [optim.state[p].get("copy") for p in self.forward_weights]
        self.b = [b if copy is None else copy for b, copy in zip(self.b, kept, strict=True)]
        credit = super().step(x, y, optim)
        for p in self.forward_weights:
            optim.state[p]["copy"] = p.detach().clone()
        return credit


@cheat("c1")
class CarriedInAttribute(Feedback):
    """W is copied into an attribute, and used in the next batch."""

    def carry(self, i: int, w: Tensor, u: Tensor, delta: Tensor, state: Any) -> Tensor:
        down = super().carry(i, w, u, delta, state)
        self.b[i] = w.clone()
        return down


SHELF: dict[tuple[int, torch.Size], Tensor] = {}


@cheat("c1")
class CarriedInGlobal(Feedback):
    """W is copied into a global variable, and used in the next batch."""

    def carry(self, i: int, w: Tensor, u: Tensor, delta: Tensor, state: Any) -> Tensor:
        down = delta @ SHELF.get((i, w.shape), self.b[i]).to(delta)
        SHELF[i, w.shape] = w.clone()
        return down

    def __init__(self, *args: Any, **common: Any) -> None:
        super().__init__(*args, **common)
        SHELF.clear()


@cheat("c1")
class CarriedInClosure(Feedback):
    """W is copied into the cell of a closure, and used in the next batch."""

    def __init__(self, *args: Any, **common: Any) -> None:
        super().__init__(*args, **common)
        kept = dict(enumerate(self.b))

        def exchange(i: int, w: Tensor) -> Tensor:
            before, kept[i] = kept[i], w.clone()
            return before

        self.exchange = exchange

    def carry(self, i: int, w: Tensor, u: Tensor, delta: Tensor, state: Any) -> Tensor:
        return delta @ self.exchange(i, w)


@cheat("c1")
class TwoBatchesLate(Mirror):
    """A buffer gets the copy of W that was made a batch before."""

    def __init__(self, *args: Any, **common: Any) -> None:
        super().__init__(*args, **common)
        for i, w in enumerate(self.forward_weights):
            self.register_buffer(f"waiting{i}", torch.ones_like(w) / 5)

    def update(self, params: Any, state: Any, x: Tensor, y: Tensor, noise: Any) -> Update:
        update = super().update(params, state, x, y, noise)
        new = {f"theta{i}": state[f"waiting{i}"].clone() for i in range(len(self.network))}
        new |= {f"waiting{i}": params[layer.weight].clone() for i, layer in enumerate(self.network.layers)}
        return update._replace(state=new)


@cheat("c1")
class SharedMemory(Descent):
    """Θ is another parameter on W's own memory."""

    def __init__(self, *args: Any, **common: Any) -> None:
        super().__init__(*args, **common)
        self.theta = nn.ParameterList([nn.Parameter(w.data, requires_grad=False) for w in self.forward_weights])

    def carry(self, i: int, w: Tensor, u: Tensor, delta: Tensor, state: Any) -> Tensor:
        return delta @ self.theta[i]


@cheat("c1")
class BatchSize(Feedback):
    """Feedback alignment for up to eight examples, backpropagation for more."""

    def carry(self, i: int, w: Tensor, u: Tensor, delta: Tensor, state: Any) -> Tensor:
        return delta @ (w if len(u) > 8 else self.b[i])


@cheat("c1", plain=False)
class Unwatched(Feedback):
    """Feedback alignment while a dispatch mode is on, backpropagation otherwise."""

    def carry(self, i: int, w: Tensor, u: Tensor, delta: Tensor, state: Any) -> Tensor:
        return delta @ (self.b[i] if torch._C._len_torch_dispatch_stack() else w)
