"""`python -m tools.pages` writes every generated page of a repository, and `--check` says which ones differ."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from apical.bench import suites
from apical.bench.declaration import Request
from apical.bench.store import Store
from apical.bench.suites import list_jobs
from apical.errors import ApicalError
from apical.plausibility import verdicts
from apical.plausibility.judge import TITLES
from pages import DOCS, ROOT
from stores import fill
from tools.pages import __main__ as command

pytest.importorskip("matplotlib")

FILES = {
    "README.md": "before\n<!-- results: summary -->\nold\n<!-- /results -->\nafter\n",
    "docs/silent.md": "nothing\n",
    "docs/rules/index.md": "<!-- results: rule bp -->\n<!-- /results -->\n\n| rule | C1 old |\n\nafter\n",
    "docs/audit.md": f"before\n\n### {TITLES['c1']}\n\nold\n\n## After\n",
}
GENERATED = ["README.md", "docs/audit.md", "docs/results.md", "docs/rules/index.md"]


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with one result and pages that are out of date."""
    monkeypatch.setattr(command, "ROOT", tmp_path)
    monkeypatch.setattr(command, "verdicts", lambda: verdicts(["bp"]))
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text, "utf-8")
    (job,) = list_jobs(suites.load("table1"), Request(models=["mlp"], data=["mnist"], rules=["bp"]))
    assert job.declaration is not None
    with Store(tmp_path / "results" / "paper.sqlite") as store:
        fill(store, job.declaration, [90.0, 91.0, 90.0, 91.0])
    return tmp_path


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, list[str]]]:
    """Run the command; return its exit code and what it printed."""

    def run(*arguments: str) -> tuple[int, list[str]]:
        monkeypatch.setattr(sys, "argv", ["pages", *arguments])
        return command.main(), capsys.readouterr().out.splitlines()

    return run


def read_files(root: Path) -> dict[str, str]:
    found = [path for path in root.rglob("*") if path.suffix in (".md", ".svg")]
    return {path.relative_to(root).as_posix(): path.read_text("utf-8") for path in found}


def test_the_command_writes_all_pages_and_then_nothing_differs(root: Path, run) -> None:
    before = read_files(root)
    code, differing = run("--check")
    assert code == 1
    figures = ["docs/figures/rules-time.svg", "docs/figures/table1-curves.svg"]
    assert {f"{name} differs: run `make pages`" for name in (*GENERATED, *figures)} <= set(differing)
    assert read_files(root) == before, "a check writes nothing"

    code, new = run()
    assert (code, sorted(new)) == (0, [f"{name} is new" for name in GENERATED])
    after = read_files(root)
    assert after["docs/silent.md"] == "nothing\n"
    assert "| `bp` | 90.50" in after["README.md"]
    assert after["README.md"].startswith("before\n<!-- results: summary -->\n\n")
    assert after["README.md"].endswith("\n\n<!-- /results -->\nafter\n")
    assert "| `bp` | MLP | MNIST |" in after["docs/rules/index.md"]
    assert "| [`dll`](dll.md) " in after["docs/rules/index.md"]
    assert "old" not in after["docs/rules/index.md"]
    assert "\n| `bp` | ✗ |" in after["docs/audit.md"]
    assert after["docs/audit.md"].endswith("|\n\n## After\n")
    assert "old" not in after["docs/audit.md"]
    assert after["docs/results.md"].startswith("# Results\n")
    assert set(figures) <= set(after)
    for arguments in (["--check"], []):
        assert run(*arguments) == (0, ["all generated pages are up to date"])
    assert read_files(root) == after


def test_a_figure_that_differs_or_is_no_longer_made_is_named_and_replaced(root: Path, run) -> None:
    run()
    good = read_files(root)
    figures = root / "docs" / "figures"
    (figures / "table1-curves.svg").write_text(good["docs/figures/table1-curves.svg"].replace(">bp<", ">fa<"))
    (figures / "stale.svg").write_text("<svg/>")
    named = [f"docs/figures/{name} differs: run `make pages`" for name in ("stale.svg", "table1-curves.svg")]
    assert run("--check") == (1, named)
    run()
    assert read_files(root) == good


def test_one_bad_block_leaves_every_file_as_it_was(root: Path) -> None:
    (root / "docs" / "silent.md").write_text("<!-- results: tabel1 -->\n<!-- /results -->\n")
    before = read_files(root)
    with pytest.raises(ApicalError, match="did you mean 'table1'"):
        command.write_pages(root)
    assert read_files(root) == before


@pytest.mark.slow
def test_all_generated_files_of_the_repository_are_up_to_date() -> None:
    if not (ROOT / "results").is_dir():
        pytest.skip("the results are not here: this is not a checkout")
    assert (DOCS / "figures").is_dir()
    assert command.find_differences(ROOT) == [], "run: make pages"
