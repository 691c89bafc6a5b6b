"""`python -m tools.pages` writes every generated page of a repository, and `--check` says which ones differ."""

import re
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest

from apical.bench import suites
from apical.bench.declaration import Request
from apical.bench.store import Store
from apical.bench.suites import list_jobs
from apical.errors import ApicalError
from apical.plausibility import verdicts
from apical.plausibility.judge import TITLES
from pages import DOCS, README, ROOT
from stores import fill
from tools.pages import __main__ as command

pytest.importorskip("matplotlib")

FILES = {
    "README.md": "before\n<!-- results: summary -->\nold\n<!-- /results -->\nafter\n",
    "docs/silent.md": "nothing\n",
    "docs/rules/index.md": "<!-- results: rule bp -->\n<!-- /results -->\n\n| rule | C1 old |\n\nafter\n",
    "docs/audit.md": f"before\n\n### {TITLES['c1']}\n\nold\n\n## After\n",
}
SUITES = ("table1", "ten-seeds", "rules", "streaming", "depth", "convergence")  # of which the one result is a part
GENERATED = [
    *("README.md", "docs/audit.md", "docs/results.md", "docs/rules/index.md"),
    *(f"docs/results/{folder}{suite}.md" for folder in ("", "commands/") for suite in SUITES),
]
LONGEST_PAGE = 1500


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
    figures = ["docs/figures/overview-cells.svg", "docs/figures/rules-time.svg", "docs/figures/table1-curves.svg"]
    assert {f"{name} differs: run `make pages`" for name in (*GENERATED, *figures)} <= set(differing)
    assert read_files(root) == before, "a check writes nothing"

    code, new = run()
    assert (code, sorted(new)) == (0, sorted(f"{name} is new" for name in GENERATED))
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
        command.write_pages(root, command.render_pages(root))
    assert read_files(root) == before


def test_a_page_of_results_that_is_no_longer_made_is_named_and_deleted(root: Path, run) -> None:
    run()
    good = read_files(root)
    (root / "docs" / "results" / "stale.md").write_text("old\n")
    assert run("--check") == (1, ["docs/results/stale.md differs: run `make pages`"])
    assert run() == (0, ["docs/results/stale.md is new"])
    assert read_files(root) == good


TEMPLATE = """Reached {{ score("table1", "bp", "mlp", "mnist") }} %, {{ number(3) }} times.
{% do hold(score("table1", "bp", "mlp", "mnist").mean > 90, "above ninety") %}
{% do hold(score("table1", "bp", "mlp", "mnist").mean > 91, "above ninety-one") %}
After {{ gain("table1", "fa", "bp", "mlp", "mnist").signed }}.
"""


def test_a_template_is_filled_and_a_sentence_that_the_results_contradict_is_named(root: Path, run) -> None:
    folder = root / "tools" / "pages" / "templates"
    folder.mkdir(parents=True)
    (folder / "story.md").write_text(TEMPLATE)
    said = "the results contradict a sentence: docs/story.md says: above ninety-one"
    assert run()[1][-1] == said
    half = 3.182446 * (1 / 3) ** 0.5 / 2  # the quantile of t, the spread of 90, 91, 90 and 91, and four seeds
    filled = f"Reached 90.50 [{90.5 - half:.2f}, {90.5 + half:.2f}] %, three times.\nAfter not run yet.\n"
    assert (root / "docs" / "story.md").read_text() == filled
    assert run("--check") == (1, [said, "all generated pages are up to date"])


@pytest.fixture(scope="module")
def made() -> command.Pages:
    """What the results of the repository give now, but for the audit, which runs for long."""
    if not (ROOT / "results").is_dir():
        pytest.skip("the results are not here: this is not a checkout")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(command, "verdicts", lambda: verdicts(["bp"]))
        return command.render_pages(ROOT)


@pytest.fixture(scope="module")
def published() -> dict[Path, str]:
    """The pages of the repository, which are what its results give."""
    if not DOCS.is_dir():
        pytest.skip("the pages are not here: this is not a checkout")
    return {path: path.read_text("utf-8") for path in [README, *DOCS.rglob("*.md")]}


def test_the_pages_of_the_repository_are_what_its_results_give_now(made: command.Pages) -> None:
    texts = {path: text for path, text in made.texts.items() if path != DOCS / "audit.md"}
    assert {README, DOCS / "reproduction.md", DOCS / "results.md", DOCS / "rules" / "dll.md"} <= set(texts)
    differing = [path.name for path, text in texts.items() if path.read_text("utf-8") != text]
    assert differing == [], "run: make pages"
    assert made.contradicted == []
    assert set(made.figures) == {path.name for path in (DOCS / "figures").iterdir()}, "run: make pages"
    assert [path.name for path in (DOCS / "results").rglob("*.md") if path not in texts] == [], "run: make pages"


def test_no_page_is_long(published: dict[Path, str]) -> None:
    assert {
        path.name: len(text.splitlines()) for path, text in published.items() if text.count("\n") > LONGEST_PAGE
    } == {}


def test_what_was_reproduced_has_no_number_of_ours_in_its_template() -> None:
    """What stands in the template itself are names, settings and levels."""
    template = (ROOT / "tools" / "pages" / "templates" / "reproduction.md").read_text("utf-8")
    prose = re.sub(r"\{[{%].*?[%}]\}", "", template, flags=re.DOTALL)
    levels, source = (
        {"0.05", "95 %"},
        {"97.2", "120,000", "240,000"},
    )  # of tests and intervals; what R-STDP's source says
    assert set(re.findall(r"\d+[.,]\d+|\d+ ?%", prose)) <= levels | source


def test_every_table_stands_apart_from_the_text_before_it(published: dict[Path, str]) -> None:
    """Else it would be read as text."""
    for path, text in published.items():
        lines = text.splitlines()
        glued = [b for a, b in pairwise(lines) if b.startswith("| ") and a.strip() and not a.startswith("|")]
        assert glued == [], path.name


def test_every_question_begins_with_its_answer_and_folds_its_tables(published: dict[Path, str]) -> None:
    text = published[DOCS / "reproduction.md"]
    head, *questions = re.split(r"^## ", text, flags=re.MULTILINE)
    assert all(verdict in head for verdict in ("**reproduced**", "**refuted**", "**not comparable**", "**untested**"))
    assert head.count("\n") < 40, "the claims are one screen"
    asked = [question for question in questions if question.partition("\n")[0].endswith("?")]
    assert len(asked) >= 10
    for question in asked:
        answer = question.split("\n\n")[1]
        assert answer.startswith("**"), question.partition("\n")[0]
        unfolded = re.sub(r"<details>.*?</details>", "", question, flags=re.DOTALL)
        assert not re.search(r"^\| ", unfolded, re.MULTILINE)


@pytest.mark.slow
def test_all_generated_files_of_the_repository_are_up_to_date() -> None:
    if not (ROOT / "results").is_dir():
        pytest.skip("the results are not here: this is not a checkout")
    assert (DOCS / "figures").is_dir()
    assert command.find_differences(ROOT, command.render_pages(ROOT)) == [], "run: make pages"
