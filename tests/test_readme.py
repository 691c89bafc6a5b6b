"""The README keeps its word: its Python runs, in order, as it is, and its commands exist."""

import re
from itertools import pairwise
from pathlib import Path

import pytest

from apical.core.registry import resolve
from apical.data import DATASETS, lookup
from apical.models import MODELS
from pages import DOCS, README, ROOT, accuracies, commands, output_of

pytest.importorskip("sklearn")


def test_every_python_block_runs_as_it_is(tmp_path: Path) -> None:
    reached = accuracies(output_of(README, tmp_path))
    assert reached
    assert min(reached) > 80  # the digits have ten classes


WITH_COMMANDS = [DOCS / f"{name}.md" for name in ("index", "reproducing", "sequences", "your-own-network")]


@pytest.mark.parametrize("page", [README, *WITH_COMMANDS], ids=lambda page: page.name)
def test_every_apical_command_is_one_that_the_command_line_takes(page: Path) -> None:
    typer = pytest.importorskip("typer")
    from apical.cli import load_app

    app = load_app()

    root = typer.main.get_command(app)
    found = commands("apical", page)
    assert found
    for _, *words in found:
        command, path = root, ["apical"]
        with root.make_context("apical", list(words)) as context:
            while hasattr(command, "commands"):
                assert words[0] in command.commands, f"{' '.join(path)} has no command {words[0]}"
                path.append(words[0])
                command, words = command.commands[words[0]], words[1:]
            command.make_context(" ".join(path), list(words), parent=context)  # parses, and runs nothing
        given = dict(pairwise(words))
        for flag, value in pairwise(words):
            if flag == "--rule":
                resolve(value)
        assert given.get("--model", "mlp") in MODELS or ":" in given["--model"]
        lookup(given.get("--data", "digits"))
        if path[1:] == ["data", "fetch"]:
            assert words[0] in DATASETS


def test_every_make_command_is_a_target() -> None:
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^([\w-]+):", makefile, re.MULTILINE))
    found = commands("make")
    assert {"bench", "test"} <= {target for _, *words in found for target in words}
    assert {target for _, *words in found for target in words} <= targets


def test_the_readme_is_short() -> None:
    assert len(README.read_text("utf-8").splitlines()) <= 120


def test_every_file_that_is_linked_exists() -> None:
    links = re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", README.read_text("utf-8"))
    assert [link for link in links if "://" not in link and not (ROOT / link).exists()] == []
