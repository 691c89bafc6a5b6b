"""The docs site: it builds without a warning and without a network, and needs none to be read and searched."""

import importlib
import re
import runpy
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import apical
from pages import DOCS, ROOT

pytestmark = pytest.mark.skipif(
    not (ROOT / "mkdocs.yml").exists(), reason="the tests run without the docs' configuration"
)

BUILD = """
import socket, sys

def refuse(*_):
    raise OSError("the build reached for the network")

socket.socket.connect = socket.getaddrinfo = refuse
from mkdocs.__main__ import cli
cli(["build", "--strict", "--site-dir", sys.argv[1], "--config-file", sys.argv[2]])
"""


def build(folder: Path, config: Path = ROOT / "mkdocs.yml") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-B", "-c", BUILD, str(folder), str(config)],
        cwd=config.parent,
        env={"NO_MKDOCS_2_WARNING": "1", "PATH": ""},
        capture_output=True,
        text=True,
        check=False,
    )


def status() -> str:
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        return "not a checkout"
    done = subprocess.run(["git", "status", "--porcelain"], cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    for package in ("mkdocs", "material", "mkdocstrings", "griffe", "math_core"):
        pytest.importorskip(package, reason=f"the docs need {package}: pip install 'apical[docs]'")
    folder, before = tmp_path_factory.mktemp("site"), status()
    done = build(folder)
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr
    assert status() == before, "the build changed the checkout"
    return folder


def test_the_navigation_names_every_page_of_the_docs() -> None:
    """Otherwise `make docs` ends with a warning. Pages below two folders of the results are reached from others."""
    config = (ROOT / "mkdocs.yml").read_text("utf-8")
    sources = [*DOCS.rglob("*.md"), *DOCS.rglob("*.ipynb")]
    pages = {page.relative_to(DOCS).with_suffix(".md").as_posix() for page in sources}
    elsewhere = tuple(re.findall(r"^  /(\S+/)$", config, re.MULTILINE))
    assert set(re.findall(r"(\S+\.md)$", config, re.MULTILINE)) == {
        page for page in pages if not page.startswith(elsewhere)
    }


@pytest.mark.slow
def test_every_page_of_the_docs_is_a_page_of_the_site(site: Path) -> None:
    """And so is every notebook, which can be downloaded, too."""
    sources = [*DOCS.rglob("*.md"), *DOCS.rglob("*.ipynb")]
    pages = {page.relative_to(DOCS).with_suffix("") for page in sources}
    made = {page.relative_to(site).with_suffix("") for page in site.rglob("*.html")}
    assert made - {Path("404")} == pages
    assert not list(site.rglob("*.py*"))
    assert {file.name for file in site.rglob("*.ipynb")} == {file.name for file in DOCS.rglob("*.ipynb")}


@pytest.mark.slow
def test_no_page_shows_raw_markdown(site: Path) -> None:
    """Lines of tables and fences that were not understood would stand there as they were written."""
    for page in site.rglob("*.html"):
        text = re.sub(r"<(pre|script)\b.*?</\1>", "", page.read_text("utf-8"), flags=re.DOTALL)
        assert re.findall(r"^(?:<\w+>)*(?:\||```|#+ |\*\*|- ).*", text, re.MULTILINE) == [], page


@pytest.mark.slow
def test_the_pages_load_nothing_from_elsewhere(site: Path) -> None:
    loads = re.compile(r"<(?!a )\w+[^>]*?\b(?:src|href)=[\"']?(?:https?:)?//[^\s>]*")
    assert {hit for page in site.rglob("*.html") for hit in loads.findall(page.read_text("utf-8"))} == set()
    styles = "".join(style.read_text("utf-8") for style in site.rglob("*.css"))
    assert re.findall(r"(?:@import|url\()\s*[\"']?(?:https?:)?//[^\s)]*", styles) == []


@pytest.mark.slow
def test_a_link_that_leads_nowhere_ends_the_build(site: Path, tmp_path: Path) -> None:
    """And so does a page that the navigation does not name; seen on a copy of the docs."""
    shutil.copytree(DOCS, tmp_path / "docs", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "mkdocs.yml", tmp_path)
    for name in ("src", "tools", "examples"):
        (tmp_path / name).symlink_to(ROOT / name)
    with (tmp_path / "docs" / "index.md").open("a", encoding="utf-8") as page:
        page.write("\n[no page](nowhere.md) [no file](../src/nowhere.py)\n")
    (tmp_path / "docs" / "forgotten.md").write_text("# Forgotten\n", "utf-8")
    done = build(tmp_path / "site", tmp_path / "mkdocs.yml")
    assert done.returncode != 0
    for target in ("nowhere.md", "../src/nowhere.py"):
        assert f"'index.md' contains a link '{target}'" in done.stderr
    assert re.search(r'not included in the "nav" configuration:\s+- forgotten.md', done.stderr)
    assert done.stderr.count("WARNING") == 3


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api", reason="there is no Playwright")
    browser = shutil.which("chromium") or shutil.which("chromium-browser")
    if browser is None:
        pytest.skip("there is no Chromium")
    with playwright.sync_playwright() as p:
        chromium = p.chromium.launch(executable_path=browser, args=["--no-sandbox"])
        yield chromium
        chromium.close()


@pytest.mark.slow
@pytest.mark.parametrize("opened_from", ["a server", "a file"])
def test_the_search_finds_a_rule_without_a_network(site: Path, opened_from: str, chromium: Any) -> None:
    page, problems, asked = chromium.new_page(), [], []
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("console", lambda said: problems.append(said.text) if said.type == "error" else None)
    page.on("request", lambda request: asked.append(request.url))
    start = site.as_uri()
    if opened_from == "a server":
        start = "http://apical.test"
        page.route(f"{start}/**", lambda route: route.fulfill(path=site / route.request.url[len(start) + 1 :]))
    page.goto(f"{start}/rules/index.html")
    page.locator("[data-md-component=search-query]").first.press_sequentially("goodness")
    hits = page.locator("a.md-search-result__link")
    hits.first.wait_for(timeout=20_000)
    found = [hits.nth(i).get_attribute("href") or "" for i in range(hits.count())]
    assert any("rules/ff.html" in link for link in found), found
    assert [url for url in asked if not url.startswith(start)] == []
    assert problems == []


SCREENS = pytest.mark.parametrize("size", [(1280, 800), (390, 844)], ids=["desktop", "phone"])
CUT = """() => [...document.querySelectorAll("article *")].filter((e) => {
  const style = getComputedStyle(e);
  return style.overflowX !== "visible" && style.display !== "none" && e.scrollWidth > e.clientWidth + 1
    && (e.matches("pre, pre *") || style.overflowX === "hidden" || style.overflowX === "clip")
    && !e.matches(".headerlink, .md-clipboard, label, nav, nav *, svg, svg *");
}).map((e) => `${e.tagName}.${e.className}: ${e.textContent.slice(0, 60)}`)"""
WIDER = "() => document.documentElement.scrollWidth - document.documentElement.clientWidth"


@pytest.mark.slow
@SCREENS
def test_the_first_page_shows_the_finding_without_scrolling(site: Path, size: tuple[int, int], chromium: Any) -> None:
    page = chromium.new_page(viewport={"width": size[0], "height": size[1]})
    page.goto(f"{site.as_uri()}/index.html")
    found = page.locator("article ul").first
    assert "Without weight transport" in found.inner_text()
    box = found.bounding_box()
    assert 0 < box["y"] < box["y"] + box["height"] < size[1]
    if size[0] > 1000:
        assert page.locator("article img").first.bounding_box()["y"] < size[1]
    page.close()


@pytest.mark.slow
@SCREENS
def test_no_code_or_text_is_cut(site: Path, size: tuple[int, int], chromium: Any) -> None:
    """Tables and equations may scroll within their own box; code goes on in the next line; nothing widens the page."""
    page = chromium.new_page(viewport={"width": size[0], "height": size[1]})
    cut = {}
    for file in sorted(site.rglob("*.html")):
        page.goto(file.as_uri())
        if found := [*page.evaluate(CUT), *(["wider than the screen"] if page.evaluate(WIDER) > 0 else [])]:
            cut[file.relative_to(site).as_posix()] = found
    page.close()
    assert cut == {}


@pytest.mark.slow
def test_equations_are_set_and_no_source_of_one_is_left(site: Path) -> None:
    for source in DOCS.rglob("*.md"):
        text = re.sub(r"^```.*?^```", "", source.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)
        page = (site / source.relative_to(DOCS)).with_suffix(".html").read_text("utf-8")
        assert page.count('<math display="block"') == text.count("$$") // 2, source
        shown = re.sub(r"<(pre|code|script)\b.*?</\1>", "", page, flags=re.DOTALL)
        assert "$$" not in shown
        assert r"\operatorname" not in shown
    assert "<math" in (site / "rules" / "dll.html").read_text("utf-8")


def documented() -> list[Any]:
    """What the directives of the API page stand for."""
    targets = re.findall(r"^::: ([\w.]+)\.(\w+)$", (DOCS / "api.md").read_text("utf-8"), re.MULTILINE)
    return [getattr(importlib.import_module(module), name) for module, name in targets]


def test_every_public_name_is_in_the_api_page_once() -> None:
    shown = documented()
    public = [getattr(apical, name) for name in apical.__all__ if name != "data"]
    public += [getattr(apical.data, name) for name in apical.data.__all__]
    assert [thing for thing in public if not any(thing is other for other in shown)] == []
    assert len(shown) == len(public) + 1  # and the class of fit's arguments


@pytest.mark.slow
def test_the_api_page_shows_what_the_docstrings_say(site: Path) -> None:
    page = (site / "api.html").read_text("utf-8")
    text = re.sub(r"\s+", " ", re.sub(r"<[^>]*>", "", page))
    assert "Train model on data with rule and return the learners and their history." in text
    assert "<strong>schedule</strong>: 'linear'" in page
    assert "theta_std: float | None = None" in text  # a rule's options
    assert "&gt;&gt;&gt;" in page
    assert "<blockquote>" not in page  # which is what Markdown makes of a doctest


HOOKS = DOCS / "hooks.py"


def hooks() -> dict[str, Any]:
    for package in ("griffe", "math_core", "mkdocs"):
        pytest.importorskip(package, reason=f"the docs need {package}: pip install 'apical[docs]'")
    return runpy.run_path(str(HOOKS))


@pytest.mark.parametrize(
    ("docstring", "markdown"),
    [
        ("One line.", "One line."),
        ("Adds.\n\n>>> add(1, 2)\n3\n\nMore.", "Adds.\n\n```pycon\n>>> add(1, 2)\n3\n```\n\nMore."),
        (">>> a\n>>> show()\nlr: 3", "```pycon\n>>> a\n>>> show()\nlr: 3\n```"),
        ("lr: the rate,\n    or none.", "- **lr**: the rate,\n    or none."),
        ("lr, x: both.", "- **lr, x**: both."),
        ("lr, y: one is none of its.", "lr, y: one is none of its."),
        ("Law: it holds.", "Law: it holds."),
        ("See :meth:`Source.state`.", "See `Source.state`."),
    ],
)
def test_docstrings_become_markdown(docstring: str, markdown: str) -> None:
    assert hooks()["as_markdown"](docstring, {"lr", "x"}) == markdown


@pytest.mark.parametrize(
    ("page", "link", "becomes"),
    [
        ("engine.md", "[synapse.py](../src/apical/core/synapse.py)", "`src/apical/core/synapse.py`"),
        (
            "rules/ep.md",
            "[`rules/equilibrium.py`](../../src/apical/rules/equilibrium.py#L3)",
            "`src/apical/rules/equilibrium.py`",
        ),
        ("engine.md", "[the licence](../LICENSE)", "the licence (`LICENSE`)"),
        ("rules/ep.md", "[results](../results.md#trials)", "[results](../results.md#trials)"),
        ("engine.md", "[here](results.md) [there](https://a.b/../c)", "[here](results.md) [there](https://a.b/../c)"),
        ("index.md", "[try](notebooks/write-a-rule.ipynb)", "[try](notebooks/write-a-rule.md)"),
        ("notebooks/write-a-rule.md", "[download](write-a-rule.ipynb)", "[download](write-a-rule.ipynb)"),
    ],
)
def test_links_out_of_the_docs_become_file_names(page: str, link: str, becomes: str) -> None:
    turned: Callable[..., str] = hooks()["on_page_markdown"]
    assert turned(f"See {link}.", page=SimpleNamespace(file=SimpleNamespace(src_uri=page))) == f"See {becomes}."


def test_equations_become_mathml_and_indices_subscripts() -> None:
    turned: Callable[..., str] = hooks()["on_page_content"]
    assert turned('<div class="arithmatex">\\[\na &lt; b\n\\]</div>') == (
        '<div class="equation"><math display="block"><mi>a</mi><mo>&lt;</mo><mi>b</mi></math></div>'
    )
    assert turned('<p>so <span class="arithmatex">\\(x\\)</span></p>').startswith('<p>so <span class="equation"><math>')
    assert turned("<p>ξ_i = Θ_iᵀ δ_{i+1}, ΔW_i</p>") == (
        "<p>ξ<sub>i</sub> = Θ<sub>i</sub>ᵀ δ<sub>i+1</sub>, ΔW<sub>i</sub></p>"
    )
    for same in ("<code>W_i</code>", '<a href="x_i">x</a>', "<p>theta_std, x_train, metr_la</p>", "<pre>u_i</pre>"):
        assert turned(same) == same


def test_an_equation_with_an_unknown_command_ends_the_build() -> None:
    with pytest.raises(Exception, match="Unknown command"):
        hooks()["on_page_content"]('<span class="arithmatex">\\(\\nonsense x\\)</span>')


def test_a_notebook_becomes_a_page_with_its_code_and_what_it_printed() -> None:
    output = {"output_type": "stream", "name": "stdout", "text": ["1\n", "2\n"]}
    cells = [
        {"cell_type": "markdown", "source": ["# Title\n", "Text"]},
        {"cell_type": "code", "source": ["print(1)\n", "print(2)"], "outputs": [output]},
        {
            "cell_type": "code",
            "source": ["3"],
            "outputs": [{"output_type": "execute_result", "data": {"text/plain": ["3"]}}],
        },
    ]
    page = hooks()["notebook_to_markdown"]({"cells": cells}, "a.ipynb")
    code, printed = "```python\nprint(1)\nprint(2)\n```", "```text\n1\n2\n```"
    assert page.startswith("# Title\nText\n\n[Download this notebook](a.ipynb)")
    assert f"{code}\n\n{printed}\n\n```python\n3\n```\n\n```text\n3\n```\n" in page
