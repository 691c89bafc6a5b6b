"""The tracer watches every operation of an update and keeps the provenance of all numbers up to date."""

import inspect
import math
import sys
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from apical.core.learner import Learner
from apical.plausibility import operations as ops
from apical.plausibility.provenance import (
    CONSTANT,
    INPUT,
    NOISE,
    Indices,
    Ledger,
    Provenance,
    ProvenanceMap,
    Record,
    Source,
    list_tensors,
    occupies_memory,
    unite,
)

TORCH, HERE = str(Path(torch.__file__).parent), str(Path(__file__).parent)
FACTORS = {
    **dict.fromkeys(("mm", "bmm"), ("self", "mat2")),
    **dict.fromkeys(("baddbmm", "addbmm"), ("batch1", "batch2")),
    **{"addmm": ("mat1", "mat2"), "mv": ("self", "vec"), "addmv": ("mat", "vec")},
    **{"dot": ("self", "tensor"), "vdot": ("self", "other")},
}
"""The products, and what torch calls their two factors."""
COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd
MIN_COPIED_VALUES = 2
"""So many different values, whole numbers aside, that are all found in a weight are no accident."""


@dataclass
class Drive:
    """Weights of a layer acted on a signal: the layer's activity was computed, so many states of each neuron at once."""

    layer: int
    step: int
    record: Record
    states: int


class Finding(NamedTuple):
    """Weights that were applied against their direction to something that depends on the target."""

    weight: str
    operation: str
    line: str
    called: str


@dataclass
class Change:
    """What the change of one parameter or buffer came from; current weights are as the optimiser's last step left them."""

    record: Record = CONSTANT
    uses_own_weight: bool = False
    current_weights: set[str] = field(default_factory=set)


class Tracer(TorchDispatchMode):
    """Keeps the provenance of everything that `learner` computes from `x` and `y` while this mode is on."""

    def __init__(self, learner: Learner, x: Tensor, y: Tensor) -> None:
        super().__init__()
        self.learner, self.x, self.y = learner, x, y
        self.ledger, self.provenance = Ledger(), ProvenanceMap()
        self.layers = {layer.weight: i for i, layer in enumerate(learner.network.layers)}
        self.drive_shapes = learner.network.shapes(x.shape[1:]).drives
        self.reached: dict[Finding, set[str]] = {}
        self.changed: set[str] = set()
        self.step = 0
        self.drives: list[Drive] = []
        classes = type(learner).__mro__[: type(learner).__mro__.index(Learner)]
        functions = [inspect.unwrap(v) for c in classes for v in vars(c).values() if hasattr(v, "__code__")]
        self._rule_files = {function.__code__.co_filename for function in functions}
        self._unnamed_count = 0

    # One batch: which tensors there are before it, and what changed them.

    def start_batch(self) -> None:
        """Note the examples of a new batch, and the weights as they are, whatever they learnt from before.

        If a rule has several batches on their way at once, its state remains what it came from.
        """
        self.first_step, self.first_drive = self.step, len(self.drives)
        self.changes: dict[str, Change] = {}
        self.directions: dict[str, str] = dict.fromkeys(self.layers, ops.COLUMNS)
        self.leaks: list[str] = []
        self._marked_addresses = set[int]()
        for tensor, sources, hops in ((self.x, frozenset({INPUT}), None), (self.y, frozenset(), 0)):
            ids = torch.tensor([self.ledger.add(Record(sources, frozenset({b}), hops)) for b in range(len(tensor))])
            self.provenance.write(tensor, Provenance(ops.spread_examples(ids, tensor.shape)))
        for name, tensor in list_kept_tensors(self.learner):
            if not (self.learner.warmup and self._summarise(tensor).is_signal):
                self._mark_as_weight(name, tensor)

    def finish_step(self) -> None:
        """The optimiser has taken a step: note what each change came from; then weights are weights again."""
        for name, tensor in list_kept_tensors(self.learner):
            self._record_change(name, tensor)
        self.step += 1
        self._marked_addresses.clear()
        for name, parameter in self.learner.named_parameters():
            self._mark_as_weight(name, parameter)

    def _mark_as_weight(self, name: str, tensor: Tensor) -> None:
        """Note that these numbers are this weight, and still whatever was copied into it."""
        if not occupies_memory(tensor):
            return
        source: Source = ("weight", name, self.step)
        known = self.provenance.read(tensor)
        ids = torch.full(tensor.shape, self.ledger.add(Record(frozenset({source}))))
        if tensor.data_ptr() in self._marked_addresses:  # two names for the same memory
            ids = self.ledger.add_sources(known.ids, [source])
        self._marked_addresses.add(tensor.data_ptr())
        own = {name: _index_matrix(tensor)} if _is_matrix(tensor) else {}
        self.provenance.write(tensor, Provenance(ids, {**known.weights, **own}))

    def _record_change(self, name: str, tensor: Tensor) -> None:
        record = self._summarise(tensor)
        if not record.is_signal and all(source[:2] == ("weight", name) for source in record.sources):
            return
        change = self.changes.setdefault(name, Change())
        change.record = unite((change.record, record))
        sources = self._summarise(tensor if tensor.grad is None else tensor.grad).sources
        change.uses_own_weight |= any(source[:2] == ("weight", name) for source in sources)
        change.current_weights |= {source[1] for source in record.sources if source[::2] == ("weight", self.step)}
        self.changed.add(name)
        for finding in (source[1] for source in record.sources if source[0] == "transport"):
            self.reached[finding].add(name)

    def _summarise(self, tensor: Tensor) -> Record:
        return self.ledger.summarise(self.provenance.read(tensor).ids)

    # One operation.

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "aten" and func.has_kernel_for_dispatch_key(COMPOSITE):  # in inference mode
            with self:
                return func.decompose(*args, **kwargs)
        for tensor in list_tensors((args, kwargs)):
            if self.provenance.lacks(tensor):
                self._add_unknown(tensor)
        out = func(*args, **kwargs)
        if func.namespace != "aten":
            return out
        arguments = dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | kwargs
        written = [arguments[a.name] for a in func._schema.arguments if a.is_write and a.name in arguments]
        new = [t for t in list_tensors(out) if self.provenance.lacks(t)]
        results = [*list_tensors(written), *new]
        if results:
            self._follow(func, arguments, results)
        elif func._schema.name == "aten::_local_scalar_dense":
            line = self._find_lines()[1]
            if self._summarise(args[0]).is_signal and line and line not in self.leaks:
                self.leaks.append(line)
        return out

    def _follow(self, func: Any, arguments: dict[str, Any], results: list[Tensor]) -> None:
        self.operation = name = func._schema.name.removeprefix("aten::").removesuffix("_")
        if name == "convolution_backward":
            found = self._follow_convolution_backward(arguments)
        else:
            found = [self._find_provenance(func, name, arguments, result.shape) for result in results]
        for result, provenance in zip(results, found, strict=False):
            if torch.Tag.nondeterministic_seeded in func.tags:
                provenance.ids = self.ledger.add_sources(provenance.ids, [NOISE])
            self.provenance.write(result, provenance)

    def _find_provenance(self, func: Any, name: str, arguments: dict[str, Any], shape: torch.Size) -> Provenance:
        inputs = [self.provenance.read(t) for t in list_tensors(arguments) if t is not arguments.get("out")]
        if name in ops.FACTORIES or name.startswith("new_") or name == "zero":
            return Provenance.of_constants(shape)
        if name == "copy":
            return ops.follow_pointwise(self.ledger, name, [self.provenance.read(arguments["src"])], shape)
        if name in FACTORS:
            return self._follow_product(name, arguments, shape)
        if name == "convolution":
            return self._follow_convolution(arguments, shape)
        if name in ("sum", "mean"):
            keepdim = bool(arguments.get("keepdim", False))
            return self._apply_weights(*ops.follow_sum(self.ledger, inputs[0], arguments.get("dim") or (), keepdim))
        if name in ops.MOVES and "out" not in arguments and not arguments.get("accumulate"):
            return self._follow_move(func, arguments, shape)
        if torch.Tag.pointwise in func.tags or name in ops.COPIES or name == "fill":
            scaled = ops.follow_scaling(self.ledger, name, inputs)
            out = self._apply_weights(*scaled) if scaled else ops.follow_pointwise(self.ledger, name, inputs, shape)
            if any(p.shape != shape for p in inputs) and any(map(self._is_pure_noise, inputs)):
                self._count_states(out.ids)
            return out
        return ops.follow_other(self.ledger, name, inputs, arguments.get("dim"), shape)

    def _follow_product(self, name: str, arguments: dict[str, Any], shape: torch.Size) -> Provenance:
        """Follow any product as one of matrices, and then what is added to it."""
        factors = [arguments[key] for key in FACTORS[name]]
        out = Provenance.of_constants(shape)
        if not any(map(self._is_zero_constant, factors)):
            a, b = self.provenance.read(factors[0]).map(torch.atleast_2d), self.provenance.read(factors[1])
            if len(b.shape) == 1:
                b = b.map(lambda t: t.unsqueeze(-1))
            if name == "addbmm":
                a, b = a.map(lambda t: t.transpose(0, 1).flatten(1)), b.map(lambda t: t.flatten(0, 1))
            out = self._apply_weights(*ops.follow_product(self.ledger, a, b)).map(lambda t: t.reshape(shape))
        if "self" not in FACTORS[name] and arguments.get("beta", 1) != 0:
            out = ops.follow_pointwise(self.ledger, "add", [out, self.provenance.read(arguments["self"])], shape)
        return out

    def _is_zero_constant(self, t: Tensor) -> bool:
        """Return whether it is the derivative of a constant: zeros that depend on nothing."""
        return not bool(t.any()) and self._summarise(t) == CONSTANT

    def _follow_convolution(self, arguments: dict[str, Any], shape: torch.Size) -> Provenance:
        out = Provenance.of_constants(shape)
        if not self._is_zero_constant(arguments["input"]):
            u, w = self.provenance.read(arguments["input"]), self.provenance.read(arguments["weight"])
            out = self._apply_weights(*ops.follow_convolution(self.ledger, u, w, shape, arguments["transposed"]))
        if arguments.get("bias") is None:
            return out
        bias = self.provenance.read(arguments["bias"]).map(lambda t: t.view(-1, *[1] * (len(shape) - 2)))
        return ops.follow_pointwise(self.ledger, "add", [out, bias], shape)

    def _follow_convolution_backward(self, arguments: dict[str, Any]) -> list[Provenance]:
        """The input's gradient goes through the weights; the others' are sums over the batch."""
        e, u, w = (self.provenance.read(arguments[key]) for key in ("grad_output", "input", "weight"))
        down = Provenance.of_constants(u.shape)
        if arguments["output_mask"][0]:
            transposed = not arguments["transposed"]
            down = self._apply_weights(*ops.follow_convolution(self.ledger, e, w, u.shape, transposed))
        error, activity = self.ledger.reduce_all(e.ids), self.ledger.reduce_all(u.ids)
        pre_post = torch.full(w.shape, self.ledger.combine_pair(error, activity))
        found = down, Provenance(pre_post), Provenance(torch.full((e.shape[1],), error))
        return [provenance for provenance, wanted in zip(found, arguments["output_mask"], strict=True) if wanted]

    def _follow_move(self, func: Any, arguments: dict[str, Any], shape: torch.Size) -> Provenance:
        moving = {k: v for k, v in arguments.items() if k not in ops.INDEX_ARGUMENTS}
        index = [self.provenance.read(t) for k, v in arguments.items() if k not in moving for t in list_tensors(v)]
        inputs = [self.provenance.read(t) for t in list_tensors(moving)]
        if not inputs:  # repeat_interleave makes an index of how often
            return ops.follow_other(self.ledger, "", index, None, shape)

        def move(addresses: list[Tensor]) -> Any:
            remaining = iter(addresses)
            replaced = {**arguments, **tree_map_only(Tensor, lambda _: next(remaining), moving)}
            if isinstance(replaced.get("value"), int | float):
                replaced["value"] = 0  # what is filled in is a constant
            return func(**replaced)

        out = self._apply_weights(*ops.follow_move(self.ledger, move, inputs, index))
        self._count_states(out.ids)
        return out

    # What weights do.

    def _apply_weights(self, result: Provenance, sides: dict[str, str]) -> Provenance:
        """Weights were summed over on these sides: the result is one synapse further."""
        sources = [source for weight, side in sides.items() for source in self._record_use(weight, side, result.ids)]
        return Provenance(self.ledger.add_sources(result.ids, sources, hop=bool(sides)), result.weights)

    def _record_use(self, weight: str, side: str, ids: Tensor) -> list[Source]:
        """Weights are summed over on one side: up, and the layer's activity is computed; down, and it may be transport."""
        record, sources = self.ledger.summarise(ids), list[Source]()
        if not record.is_signal:
            return sources
        up = self.directions.setdefault(weight, side)
        if side == ops.COLUMNS and weight in self.layers:
            layer = self.layers[weight]
            size = len(self.x) * self.drive_shapes[layer].numel()
            sources.append(("drive", layer, len(self.drives)))
            self.drives.append(Drive(layer, self.step, record, math.ceil(ids.numel() / size)))
        if side != up and record.hops is not None:
            finding = Finding(weight, self.operation, *self._find_lines())
            self.reached.setdefault(finding, set())
            sources.append(("transport", finding))
        return sources

    def _count_states(self, ids: Tensor) -> None:
        """A layer's drive that was copied, or that several draws of noise were added to, is several states of neurons."""
        found = [source for source in self.ledger.summarise(ids).sources if source[0] == "drive"]
        if not found:
            return
        latest = max(found)
        _, layer, event = latest
        shape, known = self.drive_shapes[layer], zip(*(t.tolist() for t in ids.unique(return_counts=True)), strict=True)
        own = sum(count for i, count in known if latest in self.ledger.records[i].sources)
        states, left = divmod(own, len(self.x) * shape.numel())
        if not left and ids.shape[-len(shape) :] == shape:
            drive = self.drives[event]
            drive.states = max(drive.states, states)

    def _is_pure_noise(self, provenance: Provenance) -> bool:
        """Return whether it is noise and nothing else, not a signal that noise has acted on."""
        record = self.ledger.summarise(provenance.ids)
        return NOISE in record.sources and not record.examples

    def _add_unknown(self, t: Tensor) -> None:
        """Note numbers that no operation made: a constant, weights of the rule's own, or a copy made outside torch."""
        weights = self._find_copied_weight(t) if _is_matrix(t) else {}
        if _is_matrix(t) and not weights:
            self._unnamed_count += 1
            weights = {f"unnamed {self._unnamed_count} {tuple(t.shape)}": _index_matrix(t)}
        self.provenance.write(t, Provenance(torch.zeros(t.shape, dtype=torch.int64), weights))

    def _find_copied_weight(self, t: Tensor) -> dict[str, Indices]:
        """Return the weight whose values these are, if there is one, and where in it they are."""
        values = t.detach().reshape(-1)
        if values[values != values.round()].unique().numel() < MIN_COPIED_VALUES:
            return {}
        for name, parameter in ((name, p) for name, p in self.learner.named_parameters() if p.ndim >= 2):
            known, order = parameter.detach().reshape(-1).to(values.dtype).sort()
            at = torch.searchsorted(known, values).clamp_max(known.numel() - 1)
            if bool((known[at] == values).all()):
                return {name: _index_matrix(parameter, order[at].reshape(t.shape))}
        return {}

    def _find_lines(self) -> tuple[str, str]:
        """Return the line that ran the operation, and the nearest one in the rule's own class."""
        inner = ""
        for frame, number in traceback.walk_stack(sys._getframe()):
            file = frame.f_code.co_filename
            if inner and file.startswith(HERE):  # whoever called the audit
                break
            if not file.startswith((TORCH, HERE)):
                line = f"{_shorten_path(file)}:{number} in {frame.f_code.co_name}"
                inner = inner or line
                if file in self._rule_files:
                    return inner, line
        return inner, ""


def list_kept_tensors(learner: Learner) -> Iterator[tuple[str, Tensor]]:
    """List every tensor that lives on from batch to batch: also plain attributes, in lists and dictionaries, too."""
    yield from learner.named_parameters()
    yield from learner.named_buffers()
    for path, module in learner.named_modules():
        for key, value in vars(module).items():
            if not key.startswith("_"):
                for i, tensor in enumerate(list_tensors(value)):
                    yield f"{path}.{key}.{i}".lstrip("."), tensor


def _shorten_path(file: str) -> str:
    """Return a path as one would say it: from the package, or from the current folder."""
    for root in (Path(HERE).parents[1], Path.cwd()):
        if Path(file).is_relative_to(root):
            return str(Path(file).relative_to(root))
    return file


def _is_matrix(t: Tensor) -> bool:
    return t.ndim >= 2 and t.is_floating_point()


def _index_matrix(t: Tensor, places: Tensor | None = None) -> Indices:
    """Return the rows and columns of these places of a matrix, by default of all; columns are all axes after the first."""
    places = torch.arange(t.numel()).reshape(t.shape) if places is None else places
    return places // t[0].numel(), places % t[0].numel()
