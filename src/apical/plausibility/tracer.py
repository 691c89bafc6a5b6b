"""Watches every operation of an update and keeps the second memory (`memory.py`) in step with the real one."""

import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from apical.core.learner import Learner
from apical.plausibility import operations as ops
from apical.plausibility.memory import Memory, Shade, has_cells
from apical.plausibility.operations import COLS
from apical.plausibility.records import BLANK, INPUT, NOISE, Ledger, Record, Root, union

TORCH, HERE = str(Path(torch.__file__).parent), str(Path(__file__).parent)
FACTORS = {
    **dict.fromkeys(("mm", "bmm"), ("self", "mat2")),
    **dict.fromkeys(("baddbmm", "addbmm"), ("batch1", "batch2")),
    **{"addmm": ("mat1", "mat2"), "mv": ("self", "vec"), "addmv": ("mat", "vec")},
    **{"dot": ("self", "tensor"), "vdot": ("self", "other")},
}
"""The products, and what torch calls their two factors."""
COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd
ENOUGH = 2
"""So many different values, whole numbers aside, that are all found in a weight are no accident."""


@dataclass
class Drive:
    """Weights of a layer acted on a signal: the layer's activity was computed."""

    layer: int
    step: int
    before: Record
    times: int
    """How many states of each neuron are computed at once."""


@dataclass(frozen=True)
class Finding:
    """Weights that were applied against their direction to something that depends on the target."""

    weight: str
    operation: str
    line: str
    called: str


@dataclass
class Change:
    """What one parameter's or buffer's change came from."""

    record: Record = field(default_factory=Record)
    own: bool = False
    """Whether the weight's own value counts in it."""
    locked: set[str] = field(default_factory=set)
    """Weights that were read, in this change, since the optimiser's last step."""


class Tracer(TorchDispatchMode):
    """Provenance of everything that `learner` computes from `x` and `y` while this mode is on."""

    def __init__(self, learner: Learner, x: Tensor, y: Tensor) -> None:
        super().__init__()
        self.learner, self.x, self.y = learner, x, y
        self.ledger, self.memory = Ledger(), Memory()
        layers = learner.network.layers
        self.layers = {layer.weight: i for i, layer in enumerate(layers)}
        self.sizes = learner.network.shapes(x.shape[1:]).drives
        self.findings: list[Finding] = []
        self.reached: dict[Finding, set[str]] = {}
        self.leaks: list[str] = []
        self.changed: set[str] = set()
        self.step = 0
        self._rule = _files(learner)
        self._unnamed = 0

    # One batch: what is held then, and what it came to.

    def begin(self) -> None:
        """A new batch: its examples, and weights as they stand, whatever they learnt from before."""
        self.drives: list[Drive] = []
        self.changes: dict[str, Change] = {}
        self.forward: dict[str, str] = dict.fromkeys(self.layers, COLS)
        self.leaks = []
        self._settled = set[int]()
        for tensor, roots, hops in ((self.x, {INPUT}, None), (self.y, set(), 0)):
            records = [Record(frozenset(roots), frozenset({b}), hops) for b in range(len(tensor))]
            ids = torch.tensor([self.ledger.index(record) for record in records])
            self.memory.write(tensor, Shade(ids.view(-1, *[1] * (tensor.ndim - 1)).expand(tensor.shape)))
        for name, tensor in held(self.learner):
            self._settle(name, tensor)

    def stepped(self) -> None:
        """The optimiser has taken a step: note what each change came from; then weights are weights again."""
        for name, tensor in held(self.learner):
            self._note(name, tensor)
        self.step += 1
        self._settled.clear()
        for name, parameter in self.learner.named_parameters():
            self._settle(name, parameter)

    def _settle(self, name: str, tensor: Tensor) -> None:
        """Numbers of this weight, and of whatever was copied into it."""
        if not has_cells(tensor):
            return
        root: Root = ("weight", name, self.step)
        ids = torch.full(tensor.shape, self.ledger.index(Record(frozenset({root}))))
        shade = self.memory.read(tensor)
        if tensor.data_ptr() in self._settled:  # two names for the same memory
            ids = self.ledger.marked(shade.ids, [root])
        self._settled.add(tensor.data_ptr())
        labels = dict(shade.labels)
        if tensor.ndim >= 2 and tensor.is_floating_point():
            places = torch.arange(tensor.numel()).reshape(tensor.shape)
            columns = tensor[0].numel()
            labels[name] = (places // columns, places % columns)
        self.memory.write(tensor, Shade(ids, labels))

    def _note(self, name: str, tensor: Tensor) -> None:
        record = self.ledger.of(self.memory.read(tensor).ids)
        if not record.of_data and all(root[:2] == ("weight", name) for root in record.roots):
            return
        change = self.changes.setdefault(name, Change())
        change.record = union((change.record, record))
        source = tensor if tensor.grad is None else tensor.grad
        roots = self.ledger.of(self.memory.read(source).ids).roots
        change.own |= any(root[:2] == ("weight", name) for root in roots)
        change.locked |= {str(root[1]) for root in record.roots if root[::2] == ("weight", self.step)}
        self.changed.add(name)
        for root in record.roots:
            if root[0] == "transport":
                self.reached.setdefault(self.findings[int(root[1])], set()).add(name)

    # One operation.

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "aten" and func.has_kernel_for_dispatch_key(COMPOSITE):  # in inference mode
            with self:
                return func.decompose(*args, **kwargs)
        for tensor in _tensors((args, kwargs)):
            self._adopt(tensor)
        out = func(*args, **kwargs)
        if func.namespace != "aten":
            return out
        named = dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | kwargs
        written = [named[a.name] for a in func._schema.arguments if a.is_write and a.name in named]
        fresh = [t for t in _tensors(out) if has_cells(t) and not self.memory.knows(t)]
        targets = [*_tensors(written), *fresh]
        if targets:
            self._follow(func, named, targets)
        elif func._schema.name == "aten::_local_scalar_dense":
            self._leak(args[0])
        return out

    def _follow(self, func: Any, named: dict[str, Any], targets: list[Tensor]) -> None:
        name = func._schema.name.removeprefix("aten::").removesuffix("_")
        self.operation = name
        if name == "convolution_backward":
            shades = self._convolution_backward(named)
            shades = [shade for shade, wanted in zip(shades, named["output_mask"], strict=True) if wanted]
            for target, shade in zip(targets, shades, strict=False):
                self.memory.write(target, shade)
            return
        for target in targets:
            shade = self._shade(func, name, named, target)
            if torch.Tag.nondeterministic_seeded in func.tags:
                shade = Shade(self.ledger.marked(shade.ids, [NOISE]), shade.labels)
            self.memory.write(target, shade)

    def _shade(self, func: Any, name: str, named: dict[str, Any], target: Tensor) -> Shade:
        """What is known of one result."""
        ledger, use, shape = self.ledger, self._use, target.shape
        shades = [self.memory.read(t) for t in _tensors(named) if t is not named.get("out")]
        if name in ops.FACTORIES or name.startswith("new_") or name == "zero":
            return Shade(torch.zeros(shape, dtype=torch.int64))
        if name == "copy":
            return ops.pointwise(ledger, name, [self.memory.read(named["src"])], shape)
        if name in FACTORS:
            return self._product(name, named, shape)
        if name == "convolution":
            return self._convolution(named, shape)
        if name in ("sum", "mean"):
            keep = bool(named.get("keepdim", False))
            return ops.summed(ledger, use, shades[0], named.get("dim") or (), keep)
        if name in ops.MOVES and "out" not in named and not named.get("accumulate"):
            return self._move(func, named, shape)
        if torch.Tag.pointwise in func.tags or name in ops.SAME_PLACE or name == "fill":
            out = ops.scaled(ledger, use, name, shades) or ops.pointwise(ledger, name, shades, shape)
            if any(shade.shape != shape for shade in shades) and any(map(self._noise, shades)):
                self._several(out.ids)
            return out
        return ops.rest(ledger, name, shades, named, shape)

    def _product(self, name: str, named: dict[str, Any], shape: torch.Size) -> Shade:
        """Every product as one of matrices; what is added to it, after it."""
        one, other = FACTORS[name]
        a, b = self.memory.read(named[one]), self.memory.read(named[other])
        if self._nothing(named[one]) or self._nothing(named[other]):
            a, b = a.blank(), b.blank()
        if len(b.shape) == 1:
            b = b.map(lambda t: t.unsqueeze(-1))
        if len(a.shape) == 1:
            a = a.map(lambda t: t.unsqueeze(0))
        if name == "addbmm":
            a, b = a.map(lambda t: t.transpose(0, 1).flatten(1)), b.map(lambda t: t.flatten(0, 1))
        out = ops.product(self.ledger, self._use, a, b).map(lambda t: t.reshape(shape))
        if "self" not in (one, other) and named.get("beta", 1) != 0:
            base = self.memory.read(named["self"])
            out = ops.pointwise(self.ledger, "add", [out, base], shape)
        return out

    def _nothing(self, t: Tensor) -> bool:
        """The derivative of a constant: zeros that depend on nothing, of which nothing comes."""
        return not bool(t.any()) and self.ledger.of(self.memory.read(t).ids) == BLANK

    def _convolution(self, named: dict[str, Any], shape: torch.Size) -> Shade:
        u, w = self.memory.read(named["input"]), self.memory.read(named["weight"])
        if self._nothing(named["input"]):
            u, w = u.blank(), w.blank()
        out = ops.convolution(self.ledger, self._use, u, w, shape, named["transposed"])
        if named.get("bias") is None:
            return out
        bias = self.memory.read(named["bias"])
        bias = bias.map(lambda t: t.view(-1, *[1] * (len(shape) - 2)))
        return ops.pointwise(self.ledger, "add", [out, bias], shape)

    def _convolution_backward(self, named: dict[str, Any]) -> list[Shade]:
        """The input's gradient goes through the weights; the others' are sums over the batch."""
        e, u, w = (self.memory.read(named[key]) for key in ("grad_output", "input", "weight"))
        ledger = self.ledger
        down = Shade(torch.zeros(u.shape, dtype=torch.int64))
        if named["output_mask"][0]:
            down = ops.convolution(ledger, self._use, e, w, u.shape, not named["transposed"])
        error, activity = (ledger.joined(s.ids.unique().tolist()) for s in (e, u))
        pre_post = torch.full(w.shape, ledger.met(error, activity))
        return [down, Shade(pre_post), Shade(torch.full((e.shape[1],), error))]

    def _move(self, func: Any, named: dict[str, Any], shape: torch.Size) -> Shade:
        values = {k: v for k, v in named.items() if k not in ops.INDICES}
        index = [self.memory.read(t) for k, v in named.items() if k not in values for t in _tensors(v)]
        shades = [self.memory.read(t) for t in _tensors(values)]
        if not shades:  # repeat_interleave makes an index of how often
            return ops.rest(self.ledger, "", index, {}, shape)

        def run(places: list[Tensor]) -> Tensor:
            left = iter(places)

            def place(value: Any) -> Any:
                if isinstance(value, list | tuple) and any(isinstance(v, Tensor) for v in value):
                    return [next(left) if isinstance(v, Tensor) else v for v in value]
                return next(left) if isinstance(value, Tensor) else value

            moving = {k: place(v) if k in values else v for k, v in named.items()}
            if isinstance(moving.get("value"), int | float):
                moving["value"] = 0  # what is filled in is a constant
            out: Tensor = func(**moving)
            return out

        out = ops.moved(self.ledger, self._use, run, shades, index)
        self._several(out.ids)
        return out

    # What weights do.

    def _use(self, weight: str, side: str, ids: Tensor) -> list[Root]:
        """Weights are summed over on one side: up, and the layer's activity is computed; down, and it may be transport."""
        whole, roots = self.ledger.of(ids), list[Root]()
        if not whole.of_data:
            return roots
        up = self.forward.setdefault(weight, side)
        if side == COLS and weight in self.layers:
            layer = self.layers[weight]
            each = len(self.x) * self.sizes[layer].numel()
            roots.append(("drive", layer, len(self.drives)))
            self.drives.append(Drive(layer, self.step, whole, math.ceil(ids.numel() / each)))
        if side != up and whole.hops is not None:
            finding = Finding(weight, self.operation, *self._lines())
            if finding not in self.findings:
                self.findings.append(finding)
            roots.append(("transport", self.findings.index(finding)))
        return roots

    def _several(self, ids: Tensor) -> None:
        """A layer's drive that was copied, or that several draws of noise were added to, is several states of neurons."""
        found = [root for root in self.ledger.of(ids).roots if root[0] == "drive"]
        last = max(found, key=lambda root: (root[1], root[2]), default=None)  # type: ignore[misc]
        if last is None:
            return
        size = self.sizes[int(last[1])]
        times, left = divmod(ids.numel(), len(self.x) * size.numel())
        if not left and ids.shape[-len(size) :] == size:
            drive = self.drives[int(last[2])]  # type: ignore[misc]
            drive.times = max(drive.times, times)

    def _noise(self, shade: Shade) -> bool:
        """Whether it is noise and nothing else, not a signal that noise has acted on."""
        record = self.ledger.of(shade.ids)
        return NOISE in record.roots and not record.examples

    def _leak(self, tensor: Tensor) -> None:
        record = self.ledger.of(self.memory.read(tensor).ids)
        if record.of_data and (line := self._lines()[1]) and line not in self.leaks:
            self.leaks.append(line)

    def _adopt(self, t: Tensor) -> None:
        """Memory that no operation made: a constant, weights of the rule's own, or a copy made behind torch's back."""
        if not has_cells(t) or self.memory.knows(t):
            return
        labels = {}
        if t.ndim >= 2 and t.is_floating_point():
            labels = self._copied(t)
            if not labels:
                self._unnamed += 1
                places, columns = torch.arange(t.numel()).reshape(t.shape), t[0].numel()
                labels[f"unnamed {self._unnamed} {tuple(t.shape)}"] = (places // columns, places % columns)
        self.memory.write(t, Shade(torch.zeros(t.shape, dtype=torch.int64), labels))

    def _copied(self, t: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
        """The weights whose values these are, if they are anybody's."""
        values = t.detach().reshape(-1)
        if values[values != values.round()].unique().numel() < ENOUGH:
            return {}
        for name, parameter in self.learner.named_parameters():
            if parameter.ndim < 2:
                continue
            known, order = parameter.detach().reshape(-1).to(values.dtype).sort()
            at = torch.searchsorted(known, values).clamp_max(known.numel() - 1)
            if bool((known[at] == values).all()):
                places, columns = order[at].reshape(t.shape), parameter[0].numel()
                return {name: (places // columns, places % columns)}
        return {}

    def _lines(self) -> tuple[str, str]:
        """The line that ran the operation, and the nearest one in the rule's own class."""
        frame: Any = sys._getframe()
        inner = ""
        while frame is not None:
            file = frame.f_code.co_filename
            if inner and file.startswith(HERE):  # whoever called the audit
                break
            if not file.startswith((TORCH, HERE)):
                line = f"{_short(file)}:{frame.f_lineno} in {frame.f_code.co_name}"
                inner = inner or line
                if file in self._rule:
                    return inner, line
            frame = frame.f_back
        return inner, ""


def held(learner: Learner) -> Iterator[tuple[str, Tensor]]:
    """Every tensor that lives on from batch to batch: also plain attributes, in lists and dictionaries, too."""
    yield from learner.named_parameters()
    yield from learner.named_buffers()
    for path, module in learner.named_modules():
        for key, value in vars(module).items():
            if not key.startswith("_"):
                for i, tensor in enumerate(_tensors(value)):
                    yield f"{path}.{key}.{i}".lstrip("."), tensor


def _files(learner: Learner) -> set[str]:
    """Where the rule is written: the files of its class and of those it is made of, up to Learner."""
    mro = type(learner).__mro__
    functions = [f for c in mro[: mro.index(Learner)] for f in vars(c).values()]
    return {f.__code__.co_filename for f in functions if hasattr(f, "__code__")}


def _short(file: str) -> str:
    """A path as one would say it: from the package, or from here."""
    package = Path(HERE).parent
    for root in (package.parent, Path.cwd()):
        if Path(file).is_relative_to(root):
            return str(Path(file).relative_to(root))
    return file


def _tensors(tree: Any) -> list[Tensor]:
    return [t for t in tree_leaves(tree) if isinstance(t, Tensor)]
