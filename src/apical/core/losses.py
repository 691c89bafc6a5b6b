"""Losses, one value per example, and the error with which each one starts the way down.

An error is per example: `ξ = −∂loss/∂output` of the *unreduced* loss. The batch mean is taken once, by
`Synapse.outer`; a loss that arrived already averaged would shrink everything quadratic in the error (DLL's Θ
update) with the batch, which is why a scalar loss is refused.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from apical.errors import ApicalError, UnsupportedError

LossFunction = Callable[[Tensor, Tensor], Tensor]

NO_LABELS = (torch.bool, torch.uint16, torch.uint32, torch.uint64)
"""Types that count, but with which torch can do next to nothing."""
SLACK = 1e-3
"""How far the probabilities of an example may be from 1 together."""

_CLASSES: dict[tuple[int, torch.device], Tensor] = {}


def classes(count: int, device: torch.device) -> Tensor:
    """The numbers of the classes on a device, made once and kept: one operation less in every step."""
    if torch.compiler.is_compiling():
        return torch.arange(count, device=device)
    known = _CLASSES.get((count, device))
    if known is None:
        known = torch.arange(count, device=device)
        # Only what outlives the moment may be kept: no fake tensor, and no memory that belongs to a graph.
        if type(known) is Tensor and not (device.type == "cuda" and torch.cuda.is_current_stream_capturing()):
            _CLASSES[count, device] = known
    return known


class Loss:
    """`"cross_entropy"`, `"mse"` (½ Σ over outputs) or a callable `(output, y) -> one value per example`.

    Integer labels are one-hot for `"mse"`; `label_smoothing` ε mixes a label with the uniform one for both.
    """

    def __init__(self, kind: str | LossFunction = "cross_entropy", label_smoothing: float = 0.0) -> None:
        if not isinstance(label_smoothing, int | float) or not 0.0 <= label_smoothing < 1.0:
            raise ApicalError(f"label_smoothing is {label_smoothing!r}, but must lie in [0, 1).")
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

    @property
    def own(self) -> bool:
        """Whether it is a function of the user's own."""
        return self._function is not None

    def __call__(self, output: Tensor, y: Tensor) -> Tensor:
        """One value per example."""
        return self.error(output, y)[0]

    def error(self, output: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """The losses, and ξ = −∂loss/∂output of each example."""
        if self._function is None:
            return self._cross_entropy(output, y) if self.name == "cross_entropy" else self._mse(output, y)
        losses, pullback = torch.func.vjp(lambda o: self._own(o, y), output)  # type: ignore[misc]
        (gradient,) = pullback(torch.ones_like(losses))
        return losses, -gradient

    def start(self, output: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """The mean loss of the batch, and ξ of each example, in the fewest operations.

        This stands between the two halves of every step, where a GPU waits for each of them.
        """
        if self.name != "cross_entropy" or self._function is not None or y.is_floating_point():
            losses, xi = self.error(output, y)
            return losses.mean(), xi
        terms, xi = self._terms(output, y)
        count = output.numel() // output.shape[1]
        return terms.sum() * (-1 / count), xi

    def _own(self, output: Tensor, y: Tensor) -> Tensor:
        """The user's loss, which must give one value per example."""
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

    def _is_label(self, output: Tensor, y: Tensor) -> Tensor:
        """Whether each output is that of the true class."""
        return y.unsqueeze(1) == classes(output.shape[1], y.device).view(-1, *[1] * (output.ndim - 2))

    def _target(self, output: Tensor, y: Tensor) -> Tensor:
        """What the output should be: values as they are, a label as the smoothed one-hot of its class."""
        if not y.is_floating_point():
            y = self._is_label(output, y)
        y = y.to(output.dtype)
        if self.label_smoothing:
            y = y * (1 - self.label_smoothing) + self.label_smoothing / output.shape[1]
        return y

    def _cross_entropy(self, output: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """−Σ target · log softmax, averaged over positions where an output has several; ξ = target − softmax."""
        if y.is_floating_point():
            target = self._target(output, y)
            losses = F.cross_entropy(output, target, reduction="none")
            xi = target - output.softmax(1) * target.sum(1, keepdim=True)
            if output.ndim > 2:
                xi = xi / losses[0].numel()
        else:
            terms, xi = self._terms(output, y)
            losses = -terms.sum(1)
        return losses if output.ndim == 2 else losses.flatten(1).mean(1), xi

    def _terms(self, output: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """target · log softmax of every class, and ξ, for class labels."""
        label, log, smoothing = self._is_label(output, y), output.log_softmax(1), self.label_smoothing
        if smoothing:
            softmax = log.exp()
            xi = torch.add(smoothing / output.shape[1] - softmax, label, alpha=1 - smoothing)
            terms = (xi + softmax) * log
        else:
            # The others are left out rather than multiplied by zero: an output of −∞ has a log of −∞.
            terms, xi = torch.where(label, log, 0.0), torch.add(label, log.exp(), alpha=-1)
        return terms, xi if output.ndim == 2 else xi / output[0, 0].numel()

    def _mse(self, output: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """½ Σ (target − output)²; ξ = target − output."""
        xi = self._target(output, y) - output
        return 0.5 * xi.square().reshape(output.shape[0], -1).sum(1), xi

    def check(self, y: Tensor, output_shape: torch.Size, *, values: bool) -> None:
        """Refuse targets that do not fit an output of this shape; `values` looks at the labels themselves."""
        if not isinstance(y, Tensor):
            raise UnsupportedError(f"targets are a {type(y).__name__}; a torch.Tensor works.")
        if y.ndim == 0 or y.shape[0] != output_shape[0]:
            count = "no batch dimension" if y.ndim == 0 else f"{y.shape[0]} examples"
            raise ApicalError(f"targets have {count}, but the input has {output_shape[0]} examples.")
        if self._function is not None:
            return
        if y.is_floating_point():
            self._check_values_of(y, output_shape)
            if values and not bool(y.isfinite().all()):
                raise ApicalError("the targets have NaN or infinite values; remove or replace them.")
            if self.name == "cross_entropy":
                self._check_probabilities(y, values=values)
        elif y.is_complex() or y.dtype in NO_LABELS:
            raise UnsupportedError(
                f"targets are {y.dtype}; class labels of another integer type (y.long()) or floating values work."
            )
        else:
            self._check_labels(y, output_shape, values=values)

    def _check_values_of(self, y: Tensor, output_shape: torch.Size) -> None:
        if y.shape != output_shape:
            meant = "class probabilities" if self.name == "cross_entropy" else "target values"
            raise ApicalError(
                f"floating targets are {meant} and must have the output's shape {tuple(output_shape)}, not "
                f"{tuple(y.shape)}; for class labels use integers (y.long())."
            )
        if self.label_smoothing and self.name == "mse":
            raise ApicalError("label_smoothing needs class labels, and these targets are floating values.")

    def _check_probabilities(self, y: Tensor, *, values: bool) -> None:
        if y.ndim < 2 or y.shape[1] == 1:
            raise ApicalError(
                "cross_entropy tells classes apart, but these are floating targets for a single output; loss='mse' works."
            )
        if values and not bool(
            ((y >= 0).all(1) & ((y.sum(1, dtype=torch.float32) - 1).abs() <= SLACK)).all()
        ):
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
