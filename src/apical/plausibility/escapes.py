"""Notice what leaves torch's sight: values that become Python ones, and calls of code that torch knows nothing of."""

import inspect
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType, FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from apical.core.learner import Learner
from apical.plausibility.provenance import list_tensors

TORCH, HERE = str(Path(torch.__file__).parent), str(Path(__file__).parent)
CORE = str(Path(__file__).parents[1] / "core")
KNOWN_MODULES = {
    *("builtins", "torch", "math", "cmath", "operator", "itertools", "functools", "collections", "abc", "weakref"),
    *("warnings", "types", "typing", "re", "sre", "copy", "enum", "contextlib", "string", "dataclasses"),
    "contextvars",
}
"""Modules whose functions in C see nothing but what they are given, and remember nothing but objects of Python."""
KNOWN_FUNCTIONS = {"sys.getrecursionlimit"}
"""Functions of other modules of which the same is true; `inspect.signature` calls this one."""
SEEDED_MODULES = ("numpy", "random")
"""Modules that see no more, but whose random numbers are nobody's noise."""
HARMLESS_FILES = ("<frozen importlib", "warnings.py", "linecache.py", "tokenize.py", "contextlib.py", "functools.py")
SHAPE_FUNCTIONS = {
    *("__get__", "__set__", "__delete__", "__len__", "__hash__", "__class__", "size", "dim", "ndimension", "numel"),
    *("nelement", "stride", "storage_offset", "element_size", "is_floating_point", "is_complex", "is_contiguous"),
    *("is_signed", "is_inference", "is_same_size", "is_neg", "is_conj", "is_shared", "is_coalesced", "sparse_dim"),
    *("dense_dim", "get_device", "type", "result_type", "can_cast", "is_set_to", "is_pinned", "has_names"),
    *("_is_view", "requires_grad_", "broadcast_shapes"),
}
"""Functions of a tensor whose result does not depend on its numbers."""
EXITS = {"numpy", "tolist", "item", "data_ptr", "untyped_storage", "storage", "__array__", "__dlpack__", "apply_"}
MAKERS = {"tensor", "as_tensor", "asarray", "new_tensor", "from_numpy", "frombuffer", "from_dlpack"}
RESULTS = (
    *(Tensor, torch.Size, torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Generator),
    *(RemovableHandle, type(None)),
)
"""What a function may return that tells nothing of numbers, but for tensors, which are followed."""
AUTOGRAD = ("backward", "grad", "_make_grads")


class Loss(NamedTuple):
    """Something was lost sight of: in which line, by which operation, what it was, and the criteria that it leaves open.

    It `evades` if by it a rule could know that it is audited, and behave: then neither method can confirm a criterion.
    """

    line: str
    operation: str
    what: str
    criteria: tuple[str, ...] = ("c1", "c2", "c3")
    evades: bool = False


class Lines:
    """Finds the lines of a rule's code that are running."""

    def __init__(self, learner: Learner) -> None:
        classes = type(learner).__mro__[: type(learner).__mro__.index(Learner)]
        functions = [inspect.unwrap(v) for c in classes for v in vars(c).values() if hasattr(v, "__code__")]
        self.rule_files = {function.__code__.co_filename for function in functions}

    def find(self) -> tuple[str, str]:
        """Return the line that ran the operation, and the nearest one in the rule's own class."""
        inner = ""
        for frame, number in traceback.walk_stack(sys._getframe()):
            file = frame.f_code.co_filename
            if inner and file.startswith(HERE):  # whoever called the audit
                break
            if not file.startswith((TORCH, HERE)):
                line = f"{_shorten_path(file)}:{number} in {frame.f_code.co_name}"
                inner = inner or line
                if file in self.rule_files:
                    return inner, line
        return inner, ""

    def is_core(self) -> bool:
        """Return whether it is the library's own core that runs, as it checks a batch, and not a rule."""
        for frame, _ in traceback.walk_stack(sys._getframe()):
            file = frame.f_code.co_filename
            if not file.startswith((TORCH, HERE)):
                return file.startswith(CORE)
        return False

    def find_threads(self) -> list[str]:
        """Return the lines of the rule's files that other threads are at."""
        frames = [frame for thread, frame in sys._current_frames().items() if frame is not sys._getframe()]
        own = {id(frame) for frame, _ in traceback.walk_stack(sys._getframe())}
        stacks = [list(traceback.walk_stack(frame)) for frame in frames if id(frame) not in own]
        return [
            f"{_shorten_path(frame.f_code.co_filename)}:{number} in {frame.f_code.co_name}"
            for stack in stacks
            for frame, number in stack
            if frame.f_code.co_filename in self.rule_files
        ]


class EscapeWatch(TorchFunctionMode):
    """Watches the calls of Python code while it is on.

    Args:
        depends: Whether a tensor's numbers depend on anything but constants.
        report: Called with an operation and what was lost by it.
    """

    def __init__(self, depends: Callable[[Tensor], bool], report: Callable[..., None]) -> None:
        super().__init__()
        self._depends, self._report = depends, report
        self._calls: list[tuple[str, bool]] = []
        self._trusted: dict[CodeType, bool] = {}

    def __enter__(self) -> "EscapeWatch":
        super().__enter__()
        self._profile_before = sys.getprofile()
        sys.setprofile(self._notice_call)
        return self

    def __exit__(self, *error: Any) -> None:
        sys.setprofile(self._profile_before if callable(self._profile_before) else None)
        super().__exit__(*error)

    @property
    def is_reading_python(self) -> bool:
        """Whether a tensor is being made from numbers that are written in Python."""
        return bool(self._calls) and self._calls[-1][1]

    @property
    def is_inside_torch(self) -> bool:
        """Whether torch's own code runs, for a function whose result will be looked at."""
        return bool(self._calls) and self._calls[-1][0] not in AUTOGRAD

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", str(func))
        if name in SHAPE_FUNCTIONS:
            return func(*args, **kwargs)
        made_of = tree_leaves((args, kwargs)) if name in MAKERS else ()
        known = (int, float, bool, complex, str, torch.dtype, torch.device, type(None), Tensor, torch.nn.Parameter)
        self._calls.append((name, all(type(leaf) in known for leaf in made_of)))
        try:
            out = func(*args, **kwargs)
        finally:
            self._calls.pop()
        if not isinstance(out, Tensor) and not all(isinstance(leaf, RESULTS) for leaf in tree_leaves(out)):
            self._look(name, list_tensors((args, kwargs)))
        return out

    def _look(self, name: str, tensors: list[Tensor]) -> None:
        with unwatched():
            if any(map(self._depends, tensors)):
                self._report(name, "numbers became values of Python")

    def _notice_call(self, frame: FrameType, event: str, arg: Any) -> None:
        """Look at a call of a function that is written in C; `sys.setprofile` announces them."""
        if event != "c_call" or self._is_trusted(frame.f_code):
            return
        owner = arg.__self__
        if isinstance(owner, Tensor):
            if arg.__name__ in EXITS:
                self._look(arg.__name__, [owner])
            return
        module = (arg.__module__ if owner is None or inspect.ismodule(owner) else None) or _find_module(
            owner if isinstance(owner, type) else type(owner), arg.__name__
        )
        root = str(module).lstrip("_").partition(".")[0]
        if root in KNOWN_MODULES or f"{module}.{arg.__name__}" in KNOWN_FUNCTIONS or _is_importing(frame):
            return
        evades = root not in SEEDED_MODULES
        self._report(f"{module}.{arg.__name__}", "code that torch does not see was called", evades=evades)

    def _is_trusted(self, code: CodeType) -> bool:
        if code not in self._trusted:
            file = code.co_filename
            self._trusted[code] = file.startswith((TORCH, HERE, CORE, HARMLESS_FILES[0])) or file.endswith(
                HARMLESS_FILES
            )
        return self._trusted[code]


class unwatched:  # noqa: N801 (a context manager, as torch.no_grad is)
    """Run the audit's own code, which is not to be watched."""

    def __enter__(self) -> None:
        self._profile = sys.getprofile()
        sys.setprofile(None)
        self._guards = torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction()
        for guard in self._guards:
            guard.__enter__()

    def __exit__(self, *error: Any) -> None:
        for guard in reversed(self._guards):
            guard.__exit__(None, None, None)
        sys.setprofile(self._profile)


def _find_module(owner: type, name: str) -> str:
    """Return the module of the class that a method in C comes from: of a subclass of `dict`, `get` is that of `dict`."""
    for base in owner.__mro__:
        if name in vars(base) and not isinstance(vars(base)[name], FunctionType):
            return base.__module__
    return owner.__module__


def _is_importing(frame: FrameType) -> bool:
    """Return whether a module is being imported, which reads files."""
    return any(f.f_code.co_filename.startswith("<frozen importlib") for f, _ in traceback.walk_stack(frame))


def _shorten_path(file: str) -> str:
    """Return a path as one would say it: from the package, or from the current folder."""
    for root in (Path(HERE).parents[1], Path.cwd()):
        if Path(file).is_relative_to(root):
            return str(Path(file).relative_to(root))
    return file
