"""Wired modules: the user's own modules, whose errors pass through the feedback weights of a learner.

`wire` changes the class of each module that applies weights to a subclass of its own class, as `torch.nn.utils.parametrize`
does: `isinstance`, names, state dictionaries, hooks and `.to()` stay as they are. So the rule runs wherever the module does,
in `learner(x)`, `model(x)`, a checkpointed block or a process of DDP. Without gradients a module runs as its own class says.

The modules reach their feedback weights through `module.link`, which is no part of the state dictionary.
"""

from dataclasses import dataclass, field
from functools import cache, wraps
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from apical.core.transport import ConvolutionProduct, LinearProduct, Mirror
from apical.core.verification import check_reduction, verify
from apical.errors import ApicalError, UnsupportedError

EXACT, FIXED, SIGN, MIRROR, PAPER, RELEASED, HEAD = "exact", "fixed", "sign", "mirror", "paper", "released", "head"
"""How errors pass: through W itself (nothing is wired), fixed weights, c·sign(W), Θ by one of three rules, or not at all."""
QUADRATIC = {PAPER: 1.0, RELEASED: -1.0}
"""Rules of Θ that are quadratic in the error, with the sign of their gradient."""


@dataclass(eq=False)
class Carrier:
    """What all wired modules of one learner share: how errors pass, and the feedback weights.

    `error_scale` multiplies the gradients that are quadratic in the error; by default it is `batch`, the number of examples
    of the last forward pass, which are the rows of its first input and of its output. `uses` collects, in the first forward
    pass, for which weights an error passes.
    """

    mode: str
    feedback: nn.ParameterDict
    error_scale: float | None = None
    batch: int | None = None
    depth: int = 0
    """How many forward passes of the model are running, one inside the other."""
    needs_input_grad: bool = False
    """Whether the user asks for the gradient of the input, to which no error passes."""
    uses: dict[str, bool] | None = None
    found: dict[str, bool] = field(default_factory=dict)
    """`uses`, after the first forward pass."""
    fans: dict[str, float] = field(default_factory=dict)
    """The fan-out of the products that a model's own code makes, as found when it was examined."""
    edges: list[tuple[str, dict[str, nn.Module | None], str, nn.Module | None, str]] = field(default_factory=list)
    """The modules of the model: each one's name, the dictionary that it is in, its key there, itself, its class's name."""
    is_examining: bool = False
    """Whether the model is run to see what it does with its parameters: errors pass through W then."""
    output: Any = None
    """What the model returned for the example."""
    is_verified: bool = False
    heads: tuple[str, ...] = ()
    """The modules that learn in `readout`: all other parameters are frozen."""
    frozen: list[nn.Parameter] = field(default_factory=list)
    has_raw: bool = False
    """Whether code other than torch's own may do anything with parameters."""

    def check_modules(self) -> None:
        """Check that no module was replaced, which would not be wired, since the learner was made."""
        for name, siblings, key, module, kind in self.edges:
            if siblings.get(key) is not module or type(module).__name__ != kind:
                if "FSDP" in type(siblings.get(key)).__name__:
                    raise _make_sharding_error(f"model.{name}")
                raise ApicalError(
                    f"model.{name} changed after the learner was created; create a new learner with apical.make(...)."
                )

    def check_batch(self, output: Any) -> None:
        """Check that the rows of the input are the examples, if the update of Θ depends on their number."""
        needs_batch = self.mode in QUADRATIC and self.error_scale is None and torch.is_grad_enabled()
        if needs_batch and isinstance(output, Tensor) and output.ndim and len(output) != self.batch:
            raise ApicalError(
                f"the input has {self.batch} rows and the output {len(output)}, as with the time axis first, so the number "
                "of examples is not known, which the update of Θ depends on; set learner.error_scale to it."
            )

    def get_scale(self) -> float | None:
        """Return the factor of Θ's gradient; 0 for rules that are linear in the error, None if it is not known."""
        sign = QUADRATIC.get(self.mode, 0.0)
        if not sign:
            return 0.0
        scale = self.error_scale
        if scale is None and (self.depth or is_in_backward()):
            scale = self.batch
        return None if scale is None else sign * scale


def is_in_backward() -> bool:
    """Return whether autograd runs a backward pass now, in which a checkpoint may run the model again."""
    return torch._C._current_graph_task_id() != -1


@dataclass(eq=False)
class Link:
    """A module's connection to a learner: by local name, each weight's full name and the key of its feedback weights."""

    carrier: Carrier
    names: dict[str, str] = field(default_factory=dict)
    keys: dict[str, str] = field(default_factory=dict)


class Weights(NamedTuple):
    """Weights as a product takes them: W, Θ (None where no error passes), and how Θ learns.

    `mirrors` says that Θ gets W's gradient; else `scale` is the factor of its own. `dtype` is autocast's type, if it is on.
    """

    w: Tensor
    theta: Tensor | None
    mirrors: bool = False
    scale: float | None = 0.0
    dtype: torch.dtype | None = None

    def linear(self, a: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return a·Wᵀ + b."""
        out: Tensor = LinearProduct.apply(a, self.w, self.theta, bias, *self[2:])
        return out

    def get_exact(self) -> Tensor:
        """Return W for a use with an exact gradient, such as a look-up; Θ mirrors that gradient, too."""
        if not self.mirrors:
            return self.w
        w: Tensor = Mirror.apply(self.w, self.theta)
        return w

    def map(self, function: Any) -> "Weights":
        """Return the weights with a function applied to W and Θ alike, such as a transpose or a slice."""
        return Weights(function(self.w), None if self.theta is None else function(self.theta), *self[2:])


def compute_scaled_signs(w: Tensor) -> Tensor:
    """Return c · sign(W), where c is the mean of |W|."""
    return w.sign() * w.abs().mean()


def read_weights(module: Any, key: str, *activities: Tensor) -> Weights:
    """Return a module's weights with their feedback weights, for products with these activities."""
    link, carrier = module.link, module.link.carrier
    w, dtype = module._parameters.get(key), get_autocast_dtype(activities[0]) if activities else None
    if type(w) not in (nn.Parameter, Tensor):
        raise _make_sharding_error(link.names[key])
    passes = any(a.requires_grad for a in activities)
    if carrier.uses is not None:
        if activities:
            carrier.uses[link.names[key]] = passes or carrier.uses.get(link.names[key], False)
        if carrier.is_examining:
            return Weights(w, w.detach(), dtype=dtype)
    feedback_key = link.keys.get(key)
    if feedback_key is None:
        if passes and carrier.heads:
            raise UnsupportedError(
                f"{link.names[key]} acts after the head {carrier.heads[0]!r}, so that an error would pass through it; "
                "choose a head that is the last part of the model."
            )
        if passes and not carrier.needs_input_grad:
            raise ApicalError(
                f"an error passes through {link.names[key]}, which has no feedback weights because none did when the "
                "learner was made; make it anew, with an example= of this kind."
            )
        return Weights(w.detach() if carrier.heads else w, None, dtype=dtype)
    if carrier.mode == SIGN:
        return Weights(w, compute_scaled_signs(w.detach()), dtype=dtype)
    theta = carrier.feedback._parameters[feedback_key]
    assert theta is not None
    if theta.device != w.device:
        raise ApicalError(
            f"{link.names[key]} is on {w.device}, but its feedback weights on {theta.device}; move the learner, not only "
            "the model: learner.to(device)."
        )
    mirrors = carrier.mode == MIRROR and w.requires_grad and theta.requires_grad
    learns = mirrors or carrier.mode in QUADRATIC
    return Weights(w, theta if learns else theta.detach(), mirrors, carrier.get_scale(), dtype)


def get_autocast_dtype(a: Tensor) -> torch.dtype | None:
    """Return the type that autocast gives products of this activity; None if it is off or leaves them as they are."""
    kind = a.device.type
    if a.is_meta or not torch.is_autocast_enabled(kind) or a.dtype == torch.float64:
        return None
    return torch.get_autocast_dtype(kind)


class Wired(nn.Module):
    """Base class of all wired modules."""

    link: Link

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle the module by its own class, because the subclass has no name to be found by."""
        reduced: Any = super().__reduce_ex__(protocol)
        wired: Any = type(self)
        return (_rebuild, (wired.kinds, wired.base, wired.properties, *reduced[1][1:]), *reduced[2:])

    @property
    def runs_plainly(self) -> bool:
        """Whether the module may run as its own class says. Dropout must draw alike in both passes of a checkpoint."""
        return not (torch.is_grad_enabled() or self.training)


def _rebuild(kinds: tuple[type, ...], base: type, properties: tuple[str, ...], *rest: Any) -> nn.Module:
    wired = make_class(kinds, base, properties)
    return wired.__new__(wired, *rest)  # type: ignore[no-any-return]


class WiredLinear(Wired):
    """`nn.Linear`."""

    def forward(self, input: Tensor) -> Tensor:
        if self.runs_plainly:
            return super().forward(input)  # type: ignore[no-any-return, misc]
        return read_weights(self, "weight", input).linear(input, self._parameters["bias"])


class WiredTransposedLinear(Wired):
    """transformers' `Conv1D`: a linear layer whose weights are stored as (inputs, outputs)."""

    def forward(self, x: Tensor) -> Tensor:
        if self.runs_plainly:
            return super().forward(x)  # type: ignore[no-any-return, misc]
        return read_weights(self, "weight", x).map(Tensor.t).linear(x, self._parameters["bias"])


class WiredConvolution(Wired):
    """`nn.Conv1d`, `nn.Conv2d`, `nn.Conv3d` and their transposes, with any padding."""

    def forward(self, input: Tensor, output_size: list[int] | None = None) -> Tensor:
        if self.runs_plainly:
            return super().forward(input, *([] if output_size is None else [output_size]))  # type: ignore[no-any-return, misc]
        module: Any = self
        dims = len(module.kernel_size)
        is_batched = input.dim() == dims + 2
        images = input if is_batched else input.unsqueeze(0)
        sides, mode, padding = _read_padding(module)
        images = F.pad(images, sides, mode) if any(sides) else images
        output_padding = (0,) * dims
        if module.transposed:
            sizes = module.stride, module.padding, module.kernel_size, dims, module.dilation
            output_padding = tuple(module._output_padding(images, output_size, *sizes))
        w, theta, *how = read_weights(self, "weight", images)
        geometry = module.stride, padding, module.dilation, module.transposed, output_padding, module.groups
        out: Tensor = ConvolutionProduct.apply(images, w, theta, self._parameters["bias"], *how, sides, mode, *geometry)
        return out if is_batched else out.squeeze(0)


def _read_padding(module: Any) -> tuple[tuple[int, ...], str, tuple[int, ...]]:
    """Return how to pad the images where the convolution itself cannot, and the padding that is left for it."""
    none = (0,) * len(module.kernel_size)
    sides = tuple(getattr(module, "_reversed_padding_repeated_twice", ()))
    if module.padding_mode != "zeros":
        return sides, module.padding_mode, none
    if module.padding == "valid":
        return none, "constant", none
    if module.padding != "same":
        return none, "constant", tuple(module.padding)
    if sides[::2] == sides[1::2]:
        return none, "constant", sides[::-2]
    return sides, "constant", none


class WiredEmbedding(Wired):
    """`nn.Embedding` whose weights are also those of a product: a look-up is exact, and mirrored by Kolen-Pollack's Θ."""

    def forward(self, input: Tensor) -> Tensor:
        if self.runs_plainly:
            return super().forward(input)  # type: ignore[no-any-return, misc]
        module: Any = self
        w = read_weights(module, "weight").get_exact()
        options = module.padding_idx, module.max_norm, module.norm_type, module.scale_grad_by_freq, module.sparse
        return F.embedding(input, w, *options)


class WiredBilinear(Wired):
    """`nn.Bilinear`: the weights act on the outer product of the two activities."""

    def forward(self, input1: Tensor, input2: Tensor) -> Tensor:
        if self.runs_plainly:
            return super().forward(input1, input2)  # type: ignore[no-any-return, misc]
        outer = (input1.unsqueeze(-1) * input2.unsqueeze(-2)).flatten(-2)
        weights = read_weights(self, "weight", outer).map(lambda w: w.flatten(1))
        return weights.linear(outer, self._parameters["bias"])


class WiredRoot(Wired):
    """The whole model. Its forward pass counts the examples, and is checked once: see `core/verification.py`."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        carrier = self.link.carrier
        if not torch.compiler.is_compiling():
            carrier.check_modules()
            check_reduction(carrier.feedback)
        tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        carrier.batch = next((len(t) for t in tensors if t.ndim), None)
        carrier.needs_input_grad = any(t.requires_grad for t in tensors)
        carrier.depth += 1
        try:
            output = super().forward(*args, **kwargs)
        finally:
            carrier.depth -= 1
        carrier.check_batch(output)
        if torch.is_grad_enabled() and not (carrier.is_verified or carrier.depth):
            self._verify(output)
        return output

    def _verify(self, output: Any) -> None:
        """Check what the model does with its parameters, once."""
        carrier = self.link.carrier
        if not torch.compiler.is_compiling():
            verify(self, output)
            carrier.is_verified = True
            carrier.found, carrier.uses = carrier.uses or {}, None
        elif carrier.has_raw:
            raise UnsupportedError(
                f"{type(self).__name__} has parameters that its own code uses, which must be checked before it is compiled; "
                "pass example= to make, or run the learner once before torch.compile."
            )


@cache
def make_class(kinds: tuple[type, ...], base: Any, properties: tuple[str, ...] = ()) -> type:
    """Return the subclass of a module's class that has these ways to run, and reads these parameters as raw weights."""
    names: dict[str, Any] = {"base": base, "kinds": kinds, "properties": properties}
    names |= {"__module__": base.__module__, "__qualname__": base.__qualname__, "__doc__": base.__doc__}
    if kinds[0] is WiredRoot:
        names["forward"] = _make_forward(base)
    return type(base.__name__, (*kinds, base), names | {key: _make_property(key) for key in properties})


def _make_forward(base: Any) -> Any:
    """Return the whole model's forward with the signature of its own class, which libraries look at."""

    @wraps(base.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return WiredRoot.forward(self, *args, **kwargs)

    return forward


def _make_property(key: str) -> property:
    """Return the property by which a parameter is read, as a raw weight inside of a forward pass."""
    from apical.core.raw_weights import read_parameter

    def refuse(module: Any, value: Any) -> None:
        raise _make_sharding_error(module.link.names[key])

    return property(lambda module: read_parameter(module, key), refuse)


def _make_sharding_error(name: str) -> UnsupportedError:
    return UnsupportedError(
        f"{name} is no plain parameter of its module any more, as under FSDP or torch.export, which feedback weights do "
        "not support; DistributedDataParallel(learner) works, and export under torch.no_grad()."
    )


def get_plain_class(module: nn.Module) -> type[nn.Module]:
    """Return the class that a module had before it was wired."""
    return getattr(type(module), "base", type(module)) if isinstance(module, Wired) else type(module)


def unwire(model: nn.Module) -> None:
    """Give all modules of a model their own classes back, and unfreeze what was frozen for a readout."""
    link = model.__dict__.get("link")
    for p in () if link is None else link.carrier.frozen:
        p.requires_grad_(True)
    for module in model.modules():
        if isinstance(module, Wired):
            module.__class__ = get_plain_class(module)  # type: ignore[assignment]
        module.__dict__.pop("link", None)
