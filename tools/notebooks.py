"""Run the notebooks of docs/notebooks, and store what their cells print.

python -m tools.notebooks            runs each notebook from top to bottom and writes its outputs into it
"""

import ast
import contextlib
import io
import json
import multiprocessing
from pathlib import Path
from typing import Any

from apical.files import replace_atomically

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "notebooks"
PARAMETERS = "parameters"
"""The tag of the cell with the settings that a test makes small."""


def main() -> None:
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:  # a notebook may define a rule
        for path in pool.imap(update_notebook, sorted(FOLDER.glob("*.ipynb"))):
            print(f"{path.name} was run")


def update_notebook(path: Path) -> Path:
    """Run a notebook and write what it printed into its file."""
    notebook = json.loads(path.read_text("utf-8"))
    store_outputs(notebook, run_notebook(notebook))
    with replace_atomically(path) as temporary:
        temporary.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", "utf-8")
    return path


def run_notebook(notebook: dict[str, Any], parameters: dict[str, Any] | None = None) -> list[str]:
    """Run the code cells in order and return what each of them printed, with the value of its last expression.

    parameters: values that replace those of the cell with the tag "parameters".

    >>> cell = {"cell_type": "code", "metadata": {"tags": ["parameters"]}, "source": ["n = 1"]}
    >>> run_notebook({"cells": [cell, {"cell_type": "code", "metadata": {}, "source": ["n + 1"]}]}, {"n": 2})
    ['', '3\\n']
    """
    namespace: dict[str, Any] = {"__name__": "__main__"}
    outputs = []
    for cell in get_code_cells(notebook):
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            _run_cell("".join(cell["source"]), namespace)
        if PARAMETERS in cell["metadata"].get("tags", []):
            unknown = set(parameters or {}) - namespace.keys()
            assert not unknown, f"the notebook has no parameter {unknown}"
            namespace |= parameters or {}
        outputs.append(printed.getvalue())
    return outputs


def _run_cell(source: str, namespace: dict[str, Any]) -> None:
    statements = ast.parse(source)
    last = statements.body.pop() if statements.body and isinstance(statements.body[-1], ast.Expr) else None
    exec(compile(statements, "<cell>", "exec"), namespace)
    if isinstance(last, ast.Expr):
        value = eval(compile(ast.Expression(last.value), "<cell>", "eval"), namespace)
        if value is not None:
            print(repr(value))


def get_code_cells(notebook: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the cells of a notebook that are code."""
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def store_outputs(notebook: dict[str, Any], outputs: list[str]) -> None:
    """Write what each code cell printed into the notebook, as Jupyter does for text on stdout."""
    for number, (cell, printed) in enumerate(zip(get_code_cells(notebook), outputs, strict=True), 1):
        stream = {"name": "stdout", "output_type": "stream", "text": printed.splitlines(keepends=True)}
        cell |= {"execution_count": number, "outputs": [stream] if printed else []}


if __name__ == "__main__":
    main()
