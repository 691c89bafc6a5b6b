"""Imports between packages point downwards only, as docs/architecture.md draws them."""

import ast
import importlib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

import apical

PACKAGE = Path(apical.__file__).parent
LAYERS = [
    {"errors", "printing", "version"},
    {"extras", "files", "commands"},
    {"core"},
    {"rules", "data"},
    {"models"},
    {"engine", "plausibility"},
    {"sampling", "bench"},
    {"report"},
    {"cli"},
]
"""From the lowest to the highest. A package may import from lower layers, not from its own or higher ones."""
HEIGHT = {name: height for height, names in enumerate(LAYERS) for name in names}
FREE = {"__init__", "__main__"}
"""The flat public API, and the entry point."""


def imported_modules(path: Path) -> Iterator[str]:
    """Yield the modules of apical that a file imports, wherever in it."""
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "apical":
            folder = PACKAGE.joinpath(*node.module.split(".")[1:])
            yield from (f"{node.module}.{n.name}" for n in node.names) if folder.is_dir() else (node.module,)
        elif isinstance(node, ast.Import):
            yield from (name.name for name in node.names if name.name.startswith("apical."))


def package_of(module: str) -> str:
    return module.split(".")[1]


def test_every_package_has_its_layer() -> None:
    found = {p.stem for p in PACKAGE.iterdir() if p.suffix == ".py" or (p / "__init__.py").exists()}
    assert found - FREE == set(HEIGHT)


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_a_module_imports_from_lower_layers_only(path: Path) -> None:
    own = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    if own in FREE:
        return
    higher = [
        module
        for module in imported_modules(path)
        if package_of(module) != own and HEIGHT.get(package_of(module), 99) >= HEIGHT[own]
    ]
    assert higher == []


@pytest.mark.parametrize(
    "folder", sorted(p.parent for p in PACKAGE.rglob("__init__.py")), ids=lambda p: str(p.relative_to(PACKAGE.parent))
)
def test_no_package_hides_a_module_behind_a_function_of_its_name(folder: Path) -> None:
    package = importlib.import_module(".".join(folder.relative_to(PACKAGE.parent).parts))
    modules = [p.stem for p in folder.iterdir() if p.suffix == ".py" or (p / "__init__.py").exists()]
    hidden = [name for name in modules if not isinstance(vars(package).get(name, package), ModuleType)]
    assert hidden == []
