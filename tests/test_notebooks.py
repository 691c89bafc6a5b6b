"""The notebooks of the guide: valid, run from top to bottom, and shown with what they printed."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pages import DOCS, ROOT

pytest.importorskip("sklearn")
FOLDER = DOCS / "notebooks"
SMALL = {
    "compare-rules": {"examples": 80, "epochs": 1, "seeds": 2, "rules": ["readout", "dll"], "rates": [0.01]},
    "write-a-rule": {"epochs": 1, "seeds": 2},
    "your-own-network": {"steps": 20},
}
"""Settings with which a notebook takes a second."""


def load(name: str) -> dict[str, Any]:
    return json.loads((FOLDER / f"{name}.ipynb").read_text("utf-8"))  # type: ignore[no-any-return]


def run(names: dict[str, dict[str, Any]], folder: Path) -> dict[str, list[str]]:
    """Run notebooks in a process of their own, since one of them defines a rule; return what each code cell printed."""
    script = (
        f"import sys, json; sys.path[:0] = {[str(ROOT), *filter(None, sys.path)]!r}\n"
        "from tools.notebooks import FOLDER, run_notebook\n"
        "names, target = json.loads(sys.argv[1]), sys.argv[2]\n"
        "load = lambda name: json.loads((FOLDER / f'{name}.ipynb').read_text('utf-8'))\n"
        "json.dump({name: run_notebook(load(name), small) for name, small in names.items()}, open(target, 'w'))\n"
    )
    target = folder / "printed.json"
    command = [sys.executable, "-W", "error::UserWarning", "-c", script, json.dumps(names), str(target)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(target.read_text())  # type: ignore[no-any-return]


def printed_in(notebook: dict[str, Any]) -> list[str]:
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    return ["".join(text for output in cell["outputs"] for text in output["text"]) for cell in cells]


def test_there_are_settings_for_every_notebook() -> None:
    assert {path.stem for path in FOLDER.glob("*.ipynb")} == set(SMALL)


def test_every_notebook_runs_with_small_settings(tmp_path: Path) -> None:
    for name, printed in run(SMALL, tmp_path).items():
        shown = printed_in(load(name))
        assert [bool(text) for text in printed] == [bool(text) for text in shown], name  # the same cells print


@pytest.mark.slow
@pytest.mark.parametrize("name", SMALL)
def test_a_notebook_prints_what_is_stored_in_it(name: str, tmp_path: Path) -> None:
    """Up to the last digits, which depend on the machine: the words are the same, the numbers close."""
    number = re.compile(r"[-+]?\d+(?:\.\d+)?")
    printed, stored = "".join(run({name: {}}, tmp_path)[name]), "".join(printed_in(load(name)))
    if "lr " not in stored:  # which of several equally good rates is chosen depends on the machine
        assert number.sub("", printed).split() == number.sub("", stored).split()
    percents = [[float(n) for n in re.findall(r"(\d+\.\d+) ?%", text)] for text in (printed, stored)]
    assert percents[0] == pytest.approx(percents[1], abs=5)


@pytest.mark.parametrize("name", SMALL)
def test_a_notebook_is_valid_and_was_run_in_order(name: str) -> None:
    notebook = load(name)
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    cells = notebook["cells"]
    assert cells[0]["source"][0].startswith("# ")
    assert len({cell["id"] for cell in cells}) == len(cells)
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in code] == [*range(1, len(code) + 1)]
    assert [cell["metadata"].get("tags") for cell in code].count(["parameters"]) == 1
    assert len((FOLDER / f"{name}.ipynb").read_bytes()) < 20_000
