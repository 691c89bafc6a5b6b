"""What a run is made of, by content: hashes of the user's own data, rule and network. Built-in things have none."""

import ast
import hashlib
import inspect
import sys
from collections.abc import Callable, Iterator
from functools import cache
from importlib.util import resolve_name
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from apical import data as datasets
from apical.core.registry import RULES
from apical.data.source import OwnFile

KNOWN = sys.stdlib_module_names | {"apical", "torch"}
"""Modules whose source is not part of a run's identity."""


def hash_contents(rule: str, model: str, data: str) -> dict[str, str]:
    """Return a hash of the user's own file of data, rule and network, each under its name if it is the user's own.

    model: a built-in name, or `MODULE:FUNCTION` of a module that is imported already.

    >>> hash_contents("dll", "mlp", "digits")
    {}
    """
    module, _, function = model.partition(":")
    build = getattr(sys.modules.get(module), function, None) if function else None
    source = datasets.lookup(data) if data.startswith(("text:", "series:")) else None
    learner: Any = RULES.get(rule.partition(":")[0])
    hashes = {
        "rule": hash_code(learner),
        "model": hash_code(build),
        "data": source.hash_contents() if isinstance(source, OwnFile) else None,
    }
    return {name: digest for name, digest in hashes.items() if digest is not None}


@cache
def hash_code(thing: Any) -> str | None:
    """Return a hash of the source of the user's own class or function; None if it belongs to apical or torch.

    It covers the whole module and those beside it that it imports; in a script or a notebook, only the class or function.
    It is kept for as long as the object exists, so it is that of the code that runs, even if the file has changed since.
    """
    owners = thing.__mro__ if isinstance(thing, type) else [thing]
    texts = {text for owner in owners for text in _list_sources(owner)}
    return hashlib.sha256("\0".join(sorted(texts)).encode()).hexdigest()[:16] if texts else None


def _list_sources(thing: Any) -> Iterator[str]:
    name = getattr(thing, "__module__", None) or type(thing).__module__
    if name.partition(".")[0] in KNOWN:
        return
    module = sys.modules.get(name)
    try:
        if name == "__main__" or module is None or not hasattr(module, "__file__"):
            yield inspect.getsource(thing)
        else:
            yield from _read_modules(module, {}).values()
    except (OSError, TypeError, ValueError, SyntaxError):  # there is no source: it was typed into an interpreter
        yield from _list_code(thing)


def _read_modules(module: ModuleType, found: dict[str, str]) -> dict[str, str]:
    """Add the source of a module to `found`, and of those in its folder that it imports, and that they import."""
    path = Path(str(module.__file__))
    found[module.__name__] = path.read_text("utf-8")
    for name in _list_imports(module, found[module.__name__]):
        used = sys.modules.get(name)
        other = Path(getattr(used, "__file__", None) or "/")
        is_beside = other.is_relative_to(path.parent) and "site-packages" not in other.relative_to(path.parent).parts
        if used is not None and name not in found and other.suffix == ".py" and is_beside:
            _read_modules(used, found)
    return found


def _list_imports(module: ModuleType, source: str) -> Iterator[str]:
    """Yield the names of all that a module imports, some of which are not modules but in one."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = "." * node.level + (node.module or "")
            base = resolve_name(base, module.__package__) if node.level else base
            yield from [base, *(f"{base}.{alias.name}" for alias in node.names)]


def _list_code(thing: Any) -> Iterator[str]:
    """Yield the compiled code of a function, or of all functions of a class, without names of files and numbers of lines."""
    functions: list[Callable[..., Any]] = list(vars(thing).values()) if isinstance(thing, type) else [thing]
    codes = [code for function in functions if (code := getattr(function, "__code__", None)) is not None]
    while codes:
        code = codes.pop()
        codes += [value for value in code.co_consts if isinstance(value, CodeType)]
        yield repr(
            (code.co_name, code.co_code, code.co_names, [c for c in code.co_consts if not isinstance(c, CodeType)])
        )
