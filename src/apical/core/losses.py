"""Loss functions with one value per example, and the error signal at the output that follows from each.

The error signal is per example: `ξ = −∂loss/∂output` of the *unreduced* loss. The batch mean is taken once, by
`Synapse.outer`. With a loss that is already averaged, everything quadratic in the error (DLL's update of Θ) would
shrink with the batch size, so a scalar loss is refused.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from apical.errors import ApicalError, UnsupportedError

LossFunction = Callable[[Tensor, Tensor], Tensor]

NON_LABEL_DTYPES = (torch.bool, torch.uint16, torch.uint32, torch.uint64)
"""Integer types that torch hardly supports; they cannot hold class labels here."""
PROBABILITY_TOLERANCE = 1e-3
"""How far the sum of an example's probabilities may be from 1, unless the type that they are stored in rounds more."""

_CLASSES: dict[tuple[int, torch.device], Tensor] = {}


def list_classes(count: int, device: torch.device) -> Tensor:
    """Return the class indices 0 … count − 1 on a device, from a cache that saves one operation per step."""
    if torch.compiler.is_compiling():
        return torch.arange(count, device=device)
    known = _CLASSES.get((count, device))
    if known is None:
        known = torch.arange(count, device=device)
        # A fake tensor, or memory that belongs to a CUDA graph, must not be kept beyond this call.
        if type(known) is Tensor and not (device.type == "cuda" and torch.cuda.is_current_stream_capturing()):
            _CLASSES[count, device] = known
    return known


def one_hot(labels: Tensor, count: int, dtype: torch.dtype = torch.bool, dim: int = -1) -> Tensor:
    """Return vectors with a one at each label and zeros elsewhere, along a new axis `dim`.

    >>> one_hot(torch.tensor([2, 0]), 3, torch.int64)
    tensor([[0, 0, 1],
            [1, 0, 0]])
    """
    trailing = 0 if dim == -1 else labels.ndim - dim
    indices = list_classes(count, labels.device).view(-1, *[1] * trailing)
    return (labels.unsqueeze(dim) == indices).to(dtype)


class Loss:
    """A loss: `"cross_entropy"`, `"mse"` (½ Σ over outputs) or a callable `(output, y) -> one value per example`.

    `"mse"` takes integer labels as one-hot vectors. `label_smoothing` ε gives the true class 1 − ε, and shares ε among
    all classes.
    """

    def __init__(self, kind: str | LossFunction = "cross_entropy", label_smoothing: float = 0.0) -> None:
        if not isinstance(label_smoothing, int | float) or not 0.0 <= label_smoothing < 1.0:
            raise ApicalError(f"label_smoothing is {label_smoothing!r}, but must lie in [0, 1).")
        if isinstance(kind, type):
            raise ApicalError(
                f"the loss is the class {kind.__name__}; {kind.__name__}(reduction='none') makes one of it."
            )
        if callable(kind):
            if label_smoothing:
                raise ApicalError(
                    "label_smoothing works with 'cross_entropy' and 'mse' alone; build it into your loss instead."
                )
            self.name = getattr(kind, "__name__", type(kind).__name__)
        elif kind in ("cross_entropy", "mse"):
            self.name = kind
        else:
            raise ApicalError(
                f"unknown loss {kind!r}; 'cross_entropy', 'mse' or a callable that returns one value per example work."
            )
        self._function = kind if callable(kind) else None
        self.label_smoothing = label_smoothing
        self.needs_labels = False
        """Whether the rule itself reads labels as numbers of classes, so that they are checked for a custom loss, too."""

    @property
    def is_custom(self) -> bool:
        """Whether the loss is a function that the user passed."""
        return self._function is not None

    def __call__(self, output: Tensor, y: Tensor) -> Tensor:
        """Return one value per example."""
        return self.error(output, y)[0]

    def error(self, output: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Return the losses, and ξ = −∂loss/∂output, of each example."""
        xi, compute_losses = self.begin(output, y)
        return compute_losses(), xi

    def begin(self, output: Tensor, y: Tensor) -> tuple[Tensor, Callable[[], Tensor]]:
        """Return ξ of each example, and a function that computes the losses, which nothing but a report waits for."""
        if self._function is None:
            return self._cross_entropy(output, y) if self.name == "cross_entropy" else self._mse(output, y)
        losses, pullback = torch.func.vjp(lambda o: self._call_custom(o, y), output)  # type: ignore[misc]
        (gradient,) = pullback(torch.ones_like(losses))
        return -gradient, lambda: losses

    def start(self, output: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Return the mean loss of the batch, and ξ of each example, in as few operations as possible.

        This runs between the forward and the backward half of every step, where a GPU waits for each operation.
        """
        if self.name != "cross_entropy" or self._function is not None or y.is_floating_point():
            losses, xi = self.error(output, y)
            return losses.mean(), xi
        xi, compute_terms = self._cross_entropy_of_labels(output, y)
        count = output.numel() // output.shape[1]
        return compute_terms().sum() * (-1 / count), xi

    def _call_custom(self, output: Tensor, y: Tensor) -> Tensor:
        """Call the user's loss and check that it returns one value per example."""
        assert self._function is not None
        losses = self._function(output, y)
        if not isinstance(losses, Tensor) or losses.shape != output.shape[:1]:
            got = f"shape {tuple(losses.shape)}" if isinstance(losses, Tensor) else repr(losses)
            raise ApicalError(
                f"the loss {self.name} returned {got} for a batch of {output.shape[0]}; it must "
                f"return one value per example, shape ({output.shape[0]},): use reduction='none' and sum or "
                "average over everything but the batch."
            )
        return losses

    def _make_target(self, output: Tensor, y: Tensor) -> Tensor:
        """Return the target values of the output: floating targets unchanged, labels as smoothed one-hot vectors."""
        if not y.is_floating_point():
            y = one_hot(y, output.shape[1], dim=1)
        y = y.to(output.dtype)
        if self.label_smoothing:
            y = y * (1 - self.label_smoothing) + self.label_smoothing / output.shape[1]
        return y

    def _cross_entropy(self, output: Tensor, y: Tensor) -> tuple[Tensor, Callable[[], Tensor]]:
        """Return ξ = target − softmax, and −Σ target · log softmax, averaged over the positions of an output."""

        def average(losses: Tensor) -> Tensor:
            return losses if output.ndim == 2 else losses.flatten(1).mean(1)

        if not y.is_floating_point():
            xi, compute_terms = self._cross_entropy_of_labels(output, y)
            return xi, lambda: average(-compute_terms().sum(1))
        target = self._make_target(output, y)
        xi = target - output.softmax(1) * target.sum(1, keepdim=True)
        losses = F.cross_entropy(output, target, reduction="none")
        return xi if output.ndim == 2 else xi / losses[0].numel(), lambda: average(losses)

    def _cross_entropy_of_labels(self, output: Tensor, y: Tensor) -> tuple[Tensor, Callable[[], Tensor]]:
        """Return ξ, and a function that computes target · log softmax of every class."""
        label, softmax, smoothing = one_hot(y, output.shape[1], dim=1), output.softmax(1), self.label_smoothing
        if smoothing:
            xi = torch.add(smoothing / output.shape[1] - softmax, label, alpha=1 - smoothing)
        else:
            xi = torch.add(label, softmax, alpha=-1)

        def compute_terms() -> Tensor:
            log = output.log_softmax(1)
            # `where`, not a product: an output of −∞ has a log of −∞, and 0 · −∞ is NaN.
            return (xi + softmax) * log if smoothing else torch.where(label, log, 0.0)

        return xi if output.ndim == 2 else xi / output[0, 0].numel(), compute_terms

    def _mse(self, output: Tensor, y: Tensor) -> tuple[Tensor, Callable[[], Tensor]]:
        """Return ξ = target − output, and ½ Σ (target − output)²."""
        xi = self._make_target(output, y) - output
        return xi, lambda: 0.5 * xi.square().reshape(output.shape[0], -1).sum(1)

    def check(self, y: Tensor, output_shape: torch.Size, *, values: bool) -> None:
        """Check that the targets fit an output of this shape; with `values`, also check the values themselves."""
        if not isinstance(y, Tensor):
            raise UnsupportedError(f"targets are a {type(y).__name__}; a torch.Tensor works.")
        check_dense("the tensor of targets", y)
        if y.ndim == 0 or y.shape[0] != output_shape[0]:
            count = "no batch dimension" if y.ndim == 0 else f"{y.shape[0]} examples"
            raise ApicalError(f"targets have {count}, but the input has {output_shape[0]} examples.")
        if self._function is not None and (y.is_floating_point() or not self.needs_labels):
            return
        if y.is_floating_point():
            self._check_floating_targets(y, output_shape, values=values)
        elif y.is_complex() or y.dtype in NON_LABEL_DTYPES:
            raise UnsupportedError(
                f"targets are {y.dtype}; class labels of another integer type (y.long()) or floating values work."
            )
        else:
            self._check_labels(y, output_shape, values=values)

    def _check_floating_targets(self, y: Tensor, output_shape: torch.Size, *, values: bool) -> None:
        is_probability = self.name == "cross_entropy"
        if y.shape != output_shape:
            meant = "class probabilities" if is_probability else "target values"
            raise ApicalError(
                f"floating targets are {meant} and must have the output's shape {tuple(output_shape)}, not "
                f"{tuple(y.shape)}; for class labels use integers (y.long())."
            )
        if self.label_smoothing and not is_probability:
            raise ApicalError("label_smoothing needs class labels, and these targets are floating values.")
        if values and not bool(y.isfinite().all()):
            raise ApicalError("the targets have NaN or infinite values; remove or replace them.")
        if is_probability and (y.ndim < 2 or y.shape[1] == 1):
            raise ApicalError(
                "cross_entropy tells classes apart, but these are floating targets for a single output; loss='mse' works."
            )
        if is_probability and values and not _are_probabilities(y):
            raise ApicalError(
                "floating targets are class probabilities for cross_entropy, but some of these are negative or do not "
                "sum to 1 for an example; for values of any other kind loss='mse' works."
            )

    def _check_labels(self, y: Tensor, output_shape: torch.Size, *, values: bool) -> None:
        expected = (output_shape[0], *output_shape[2:])
        if len(output_shape) < 2 or tuple(y.shape) != expected:
            raise ApicalError(
                f"class labels have shape {tuple(y.shape)}, but an output of shape {tuple(output_shape)} "
                f"(batch, classes, …) takes {expected}."
            )
        if values and y.numel():
            low, high = (int(v) for v in torch.aminmax(y))
            if low < 0 or high >= output_shape[1]:
                raise ApicalError(
                    f"labels range from {low} to {high}, but the network has {output_shape[1]} outputs: labels "
                    f"must lie in 0 … {output_shape[1] - 1}."
                )


def check_dense(what: str, values: Tensor) -> None:
    """Check that a tensor is neither sparse nor quantised nor a list of tensors of different sizes."""
    if values.is_nested or values.layout is not torch.strided:
        raise UnsupportedError(f"{what} is sparse or nested; a dense tensor (tensor.to_dense()) works.")
    if values.is_quantized:
        raise UnsupportedError(f"{what} is quantised; tensor.dequantize() works.")


def _are_probabilities(y: Tensor) -> bool:
    """Return whether the values of each example are probabilities of classes, along dimension 1."""
    off = (y.sum(1, dtype=torch.float32) - 1).abs()
    tolerance = max(PROBABILITY_TOLERANCE, 2 * torch.finfo(y.dtype).eps)
    return bool(((y >= 0).all(1) & (off <= tolerance)).all())
