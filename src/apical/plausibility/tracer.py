"""The tracer watches every operation of an update and keeps the provenance of all numbers up to date."""

import math
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from apical.core.learner import Learner
from apical.plausibility import operations as ops
from apical.plausibility.copies import find_drive_shapes, list_kept_tensors, list_levels
from apical.plausibility.escapes import EscapeWatch, Lines, Loss, unwatched
from apical.plausibility.history import Change, Drive, Finding, History
from apical.plausibility.memory import Memory
from apical.plausibility.provenance import (
    CONSTANT,
    INPUT,
    NOISE,
    Ledger,
    Provenance,
    Record,
    Source,
    list_tensors,
    occupies_memory,
    unite,
)
from apical.plausibility.recognition import index_matrix, is_matrix

COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd
IN_PLACE = ("set", "resize", "resize_as")
"""Operations that give a tensor other memory and leave the numbers there as they are."""


class Tracer(TorchDispatchMode):
    """Keeps the provenance of everything that `learner` computes from `x` and `y` while this mode is on."""

    def __init__(self, learner: Learner, x: Any, y: Tensor) -> None:
        super().__init__()
        self.learner, self.x, self.y, self.count = learner, x, y, len(y)
        self.ledger = Ledger()
        self.memory = Memory(learner, self.ledger, self._report)
        self.provenance = self.memory.provenance
        self.layers = {layer.weight: i for i, layer in enumerate(learner.network.layers)}
        self.drive_shapes = find_drive_shapes(learner, x, len(y))
        self.reached: dict[Finding, set[str]] = {}
        self.changed: set[str] = set()
        self.step = 0
        self.history = History()
        self.drives: list[Drive] = []
        self.lines = Lines(learner)
        self.escapes = EscapeWatch(self.memory.depends, self._report)
        self._losses: dict[tuple[str, str], Loss] = {}

    @property
    def not_followed(self) -> list[Loss]:
        """What was lost sight of; numbers made from weights count if they acted on what changes other weights."""
        trained = {*self.layers, *self.changed}
        derived = [
            Loss(
                found.called or found.line, found.operation, f"numbers made from {found.weight[:-1]} acted on a signal"
            )
            for found, reached in self.reached.items()
            if found.weight[:-1] in trained and reached - {found.weight[:-1]}
        ]
        return [*self._losses.values(), *dict.fromkeys(derived)]

    def _report(self, operation: str, what: str, **details: Any) -> None:
        """Note that something was lost sight of in the line that is running."""
        if not self.lines.is_core():
            inner, line = self.lines.find()
            self.add_loss(Loss(line or inner, operation, what, **details))

    def add_loss(self, loss: Loss) -> None:
        self.memory.is_leaking = True
        self._losses.setdefault((loss.line, loss.operation), loss)

    # One batch: which tensors there are before it, and what changed them.

    def start_batch(self) -> None:
        """Note the examples of a new batch, and the weights as they are, whatever they learnt from before.

        If a rule has several batches on their way at once, its state remains what it came from.
        """
        self.history.start_tick(self.step)
        self.first_step, self.first_drive = self.step, len(self.drives)
        self.changes: dict[str, Change] = {}
        # In a model that is not read as layers, weights may be stored as (inputs, outputs): their first use tells.
        known = () if self.learner.network.is_general else self.layers
        self.directions: dict[str, str] = dict.fromkeys(known, ops.COLUMNS)
        self._marked_addresses = set[int]()
        inputs: list[tuple[Tensor, frozenset[Source], int | None]] = [(self.y, frozenset(), 0)]
        inputs += [(tensor, frozenset({INPUT}), None) for tensor in list_tensors(self.x)]
        for tensor, sources, hops in inputs:
            if not tensor.ndim or len(tensor) != self.count:  # the same for all examples, such as a mask
                self.provenance.write(tensor, Provenance(torch.full(tensor.shape, self.ledger.add(Record(sources)))))
                continue
            ids = torch.tensor([self.ledger.add(Record(sources, frozenset({b}), hops)) for b in range(self.count)])
            self.provenance.write(tensor, Provenance(ops.spread_examples(ids, tensor.shape)))
        for line in self.lines.find_threads():
            self.add_loss(Loss(line, "thread", "another thread runs the rule's code", evades=True))
        parameters = dict(self.learner.named_parameters())
        for name, tensor in list_kept_tensors(self.learner):
            if name not in parameters:
                if self._is_on_its_way(tensor):
                    continue
                if not tensor.is_floating_point() and self.memory.summarise(tensor) == CONSTANT:  # a counter
                    self.provenance.write(tensor, Provenance.of_constants(tensor.shape))
                    continue
                self.history.keep(name, self.step, self.memory.summarise(tensor))
            self._mark_as_weight(name, tensor)

    def finish_step(self) -> None:
        """The optimiser has taken a step: note what each change came from; then weights are weights again."""
        with unwatched():
            for name, tensor in list_kept_tensors(self.learner):
                self._record_change(name, tensor)
            self.step += 1
            self.history.add_step(self.step)
            self._marked_addresses.clear()
            for name, parameter in self.learner.named_parameters():
                self._mark_as_weight(name, parameter)

    def _is_on_its_way(self, tensor: Tensor) -> bool:
        """Return whether a kept tensor has signals of single examples, not what was learnt from all of them."""
        known = [self.ledger.records[i] for i in self.provenance.read(tensor).ids.unique().tolist()]
        is_signal = any(record.is_signal for record in known)
        return any(0 < len(record.examples) < self.count for record in known) or (self.learner.warmup > 0 and is_signal)

    def list_transports(self) -> list[dict[str, Any]]:
        """List weights of the model, or others that change, whose transport changed yet other weights."""
        return [
            {**finding._asdict(), "reaches": sorted(others)}
            for finding, reached in self.reached.items()
            if (others := reached - {finding.weight}) and finding.weight in {*self.layers, *self.changed}
        ]

    def list_waits(self, i: int) -> list[int]:
        """Return the layers above layer i whose weights acted on its update too late for one layer per tick."""
        levels = list_levels(self.learner.network)
        change = self.changes.get(self.learner.network.layers[i].weight, Change())
        ages = self.history.find_ages(change.record)
        return [j for w, j in self.layers.items() if w in ages and ages[w] < levels[j] - levels[i]]

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
        own = {name: index_matrix(tensor)} if is_matrix(tensor) else {}
        self.provenance.write(tensor, Provenance(ids, {**known.weights, **own}))

    def _record_change(self, name: str, tensor: Tensor) -> None:
        record = self.history.extend(self.memory.summarise(tensor))
        if not record.is_signal and all(source[:2] == ("weight", name) for source in record.sources):
            return
        change = self.changes.setdefault(name, Change())
        change.record = unite((change.record, record))
        sources = self.memory.summarise(tensor if tensor.grad is None else tensor.grad).sources
        change.uses_own_weight |= any(source[:2] == ("weight", name) for source in sources)
        change.current_weights |= {source[1] for source in record.sources if source[::2] == ("weight", self.step)}
        self.changed.add(name)
        for finding in (source[1] for source in record.sources if source[0] == "transport"):
            self.reached[finding].add(name)

    # One operation.

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(t.__torch_dispatch__ is not Tensor.__torch_dispatch__ for t in types):
            return NotImplemented  # a shell around other tensors: what it does with them comes here, too
        kwargs = kwargs or {}
        if getattr(func, "namespace", "") == "aten" and func.has_kernel_for_dispatch_key(
            COMPOSITE
        ):  # in inference mode
            with self:
                return func.decompose(*args, **kwargs)
        with unwatched():
            return self._run(func, args, kwargs)

    def _run(self, func: Any, args: Any, kwargs: Any) -> Any:
        self.operation = name = str(func).removeprefix("aten.").partition(".")[0].removesuffix("_")
        inputs = list_tensors((args, kwargs))
        accepts = self.history.tick == 1 or (name == "lift_fresh" and self.escapes.is_reading_python)
        for tensor in inputs:
            self.memory.check(tensor, name, accepts)
        out = func(*args, **kwargs)
        made = list_tensors(out)
        if getattr(func, "namespace", "") != "aten" and (inputs or made):
            self._report(str(func), "an operator that torch does not define ran")
        elif not made:
            is_seen = self.escapes.is_inside_torch
            if name == "_local_scalar_dense" and not is_seen and self.memory.depends(args[0]):
                self._report(name, "numbers became values of Python")
        elif torch.Tag.dynamic_output_shape in func.tags and any(map(self.memory.depends, _list_counted(name, inputs))):
            self._report(name, "the size of a tensor depends on numbers")
        self._note_results(func, args, kwargs, made)
        return out

    def _note_results(self, func: Any, args: Any, kwargs: Any, made: list[Tensor]) -> None:
        """Follow an operation to the tensors that it wrote or made."""
        schema = getattr(func, "_schema", None)
        if schema is None or self.operation in IN_PLACE:
            return
        arguments = dict(zip((a.name for a in schema.arguments), args, strict=False)) | kwargs
        written = [arguments[a.name] for a in schema.arguments if a.is_write and a.name in arguments]
        results = [*list_tensors(written), *(t for t in made if self.provenance.lacks(t))]
        if results:
            self._follow(func, arguments, results)

    def _follow(self, func: Any, arguments: dict[str, Any], results: list[Tensor]) -> None:
        name = self.operation
        if name == "convolution_backward":
            found = self._follow_convolution_backward(arguments)
        else:
            found = [self._find_provenance(func, name, arguments, result.shape) for result in results]
        for result, provenance in zip(results, found, strict=False):
            if torch.Tag.nondeterministic_seeded in func.tags:
                provenance.ids = self.ledger.add_sources(provenance.ids, [NOISE])
            self.provenance.write(result, provenance)

    def _find_provenance(self, func: Any, name: str, arguments: dict[str, Any], shape: torch.Size) -> Provenance:
        inputs = [self.memory.read(t) for t in list_tensors(arguments) if t is not arguments.get("out")]
        if name in ops.FACTORIES or name.startswith("new_") or name == "zero":
            return Provenance.of_constants(shape)
        if name == "copy":
            return ops.follow_pointwise(self.ledger, name, [self.provenance.read(arguments["src"])], shape)
        if name in ops.FACTORS:
            return self._follow_product(name, arguments, shape)
        if name == "convolution":
            return self._follow_convolution(arguments, shape)
        if name in ("sum", "mean"):
            keepdim = bool(arguments.get("keepdim", False))
            return self._apply_weights(*ops.follow_sum(self.ledger, inputs[0], arguments.get("dim") or (), keepdim))
        if name in ops.MOVES and "out" not in arguments and not arguments.get("accumulate"):
            return self._follow_move(func, arguments, shape)
        if torch.Tag.pointwise in func.tags or name in ops.COPIES or name in ops.ALSO_POINTWISE:
            scaled = ops.follow_scaling(self.ledger, name, inputs)
            out = self._apply_weights(*scaled) if scaled else ops.follow_pointwise(self.ledger, name, inputs, shape)
            if any(p.shape != shape for p in inputs) and any(map(self._is_pure_noise, inputs)):
                self._count_states(out.ids)
            return out
        if len(arguments.get("normalized_shape", ())) == len(shape):  # of all examples together
            name = ""
        return self._apply_weights(*ops.follow_other(self.ledger, name, inputs, arguments.get("dim"), shape))

    def _follow_product(self, name: str, arguments: dict[str, Any], shape: torch.Size) -> Provenance:
        """Follow any product as one of matrices, and then what is added to it."""
        factors = [arguments[key] for key in ops.FACTORS[name]]
        out = Provenance.of_constants(shape)
        if not any(map(self._is_zero_constant, factors)):
            a, b = (self.memory.read_factor(factors[k], factors[1 - k]) for k in (0, 1))
            if any(map(self.memory.is_relay, factors, (a, b))):
                self._report(
                    name, "a fixed matrix hands numbers on one by one, which may be no synapses", criteria=("c2",)
                )
            a = a.map(torch.atleast_2d)
            if len(b.shape) == 1:
                b = b.map(lambda t: t.unsqueeze(-1))
            if name == "addbmm":
                a, b = a.map(lambda t: t.transpose(0, 1).flatten(1)), b.map(lambda t: t.flatten(0, 1))
            out = self._apply_weights(*ops.follow_product(self.ledger, a, b)).map(lambda t: t.reshape(shape))
        if "self" not in ops.FACTORS[name] and arguments.get("beta", 1) != 0:
            out = ops.follow_pointwise(self.ledger, "add", [out, self.provenance.read(arguments["self"])], shape)
        return out

    def _is_zero_constant(self, t: Tensor) -> bool:
        """Return whether it is the derivative of a constant: zeros that depend on nothing."""
        return not bool(t.any()) and self.memory.summarise(t) == CONSTANT

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
            return self._apply_weights(*ops.follow_other(self.ledger, "", index, None, shape))

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
        if weight.endswith("~"):
            finding = Finding(weight, self.operation, *self.lines.find())
            self.reached.setdefault(finding, set())
            return [("transport", finding)]
        # A look-up of tied weights says nothing of the direction of their product.
        is_lookup = weight in self.layers and self.operation in ops.MOVES
        up = self.directions.get(weight, side) if is_lookup else self.directions.setdefault(weight, side)
        if side == up and weight in self.layers:
            layer = self.layers[weight]
            shape = self.drive_shapes[layer]
            states = math.ceil(ids.numel() / (self.count * shape.numel())) if shape else 1
            sources.append(("drive", layer, len(self.drives)))
            self.drives.append(Drive(layer, self.step, record, states))
        if side != up and record.hops is not None:
            finding = Finding(weight, self.operation, *self.lines.find())
            self.reached.setdefault(finding, set())
            sources.append(("transport", finding))
        return sources

    def _count_states(self, ids: Tensor) -> None:
        """A layer's drive that was copied, or that several draws of noise were added to, is several states of neurons."""
        found = [source for source in self.ledger.summarise(ids).sources if source[0] == "drive"]
        latest = max(found, default=None)
        shape = self.drive_shapes[latest[1]] if latest else None
        if latest is None or not shape:
            return
        event, known = latest[2], zip(*(t.tolist() for t in ids.unique(return_counts=True)), strict=True)
        own = sum(count for i, count in known if latest in self.ledger.records[i].sources)
        states, left = divmod(own, self.count * shape.numel())
        if not left and ids.shape[-len(shape) :] == shape:
            drive = self.drives[event]
            drive.states = max(drive.states, states)

    def _is_pure_noise(self, provenance: Provenance) -> bool:
        """Return whether it is noise and nothing else, not a signal that noise has acted on."""
        record = self.ledger.summarise(provenance.ids)
        return NOISE in record.sources and not record.examples


def _list_counted(name: str, inputs: list[Tensor]) -> list[Tensor]:
    """Return the inputs whose numbers decide how many the result has: for an index, masks alone."""
    return inputs if name != "index" else [t for t in inputs[1:] if t.dtype in (torch.bool, torch.uint8)]
