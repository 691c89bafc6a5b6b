"""Write all generated pages of this repository, or check that they are up to date.

python -m tools.pages            writes docs/results.md, docs/results, docs/figures, the pages of tools/pages/templates,
                                 and the tables in README.md and docs/
python -m tools.pages --check    writes nothing, names the files that differ, and exits with 1 if there are any

Sentences of a template that the results contradict are named as well: rewrite these in the template.
"""

import argparse
import re
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from apical.files import replace_atomically
from apical.plausibility import verdicts
from apical.report import open_results
from tools.pages.blocks import fill_pages, find_pages, load_results
from tools.pages.overview_figures import Draw, make_overview_figures
from tools.pages.registry_tables import replace_audit_tables, replace_rules_table
from tools.pages.results_page import render_results
from tools.pages.templates import render_diagnoses, render_templates
from tools.scaling import Scaling

ROOT = Path(__file__).resolve().parents[2]
MATPLOTLIB = re.compile(r"Matplotlib v[\d.]+")


class Pages(NamedTuple):
    """The text of all generated pages by path, how to draw each figure, and the sentences that the results contradict."""

    texts: dict[Path, str]
    figures: dict[str, Draw]
    contradicted: list[str]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.pages", description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if a file differs")
    check = parser.parse_args().check
    pages = render_pages(ROOT)
    differing = find_differences(ROOT, pages) if check else write_pages(ROOT, pages)
    for path in differing:
        print(f"{path.relative_to(ROOT)} {'differs: run `make pages`' if check else 'is new'}")
    for sentence in pages.contradicted:
        print(f"the results contradict a sentence: {sentence}")
    if not differing:
        print("all generated pages are up to date")
    return 1 if check and (differing or pages.contradicted) else 0


def write_pages(root: Path, pages: Pages) -> list[Path]:
    """Write all generated pages and figures of a repository. Return the pages that changed, with those that are deleted."""
    draw_figures(pages.figures, root / "docs" / "figures")
    changed = _find_changed(root, pages)
    for path in changed:
        if path not in pages.texts:
            path.unlink()
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        with replace_atomically(path) as temporary:
            temporary.write_text(pages.texts[path], "utf-8")
    return changed


def find_differences(root: Path, pages: Pages) -> list[Path]:
    """Return the generated pages and figures of a repository that are not what its results and rules give now.

    Figures that another version of Matplotlib drew, with other paths, are only compared by name.
    """
    differing = _find_changed(root, pages)
    with tempfile.TemporaryDirectory() as temporary:
        draw_figures(pages.figures, Path(temporary))
        folders = Path(temporary), root / "docs" / "figures"
        drawn, kept = ({path.name: path.read_text("utf-8") for path in folder.glob("*.svg")} for folder in folders)
    for name in sorted(set(drawn) | set(kept)):
        new, old = drawn.get(name, ""), kept.get(name, "")
        if not new or not old or (MATPLOTLIB.findall(new) == MATPLOTLIB.findall(old) and new != old):
            differing.append(folders[1] / name)
    return differing


def _find_changed(root: Path, pages: Pages) -> list[Path]:
    """Return the pages whose text changes, and the pages in docs/results that are no longer made."""
    stale = [path for path in sorted((root / "docs" / "results").rglob("*.md")) if path not in pages.texts]
    return [path for path, text in pages.texts.items() if _read_text(path) != text] + stale


def render_pages(root: Path) -> Pages:
    """Render all generated pages of a repository."""
    source, docs = root / "results", root / "docs"
    with open_results(source) as store:
        results = load_results(store, source)
        notes, doubted = render_diagnoses(root, results)
        results = results._replace(notes=notes)
        made = render_results(results, source)
        texts = {docs / name: text for name, text in made.texts.items()}
        from_templates, contradicted = render_templates(root, results)
        others = [page for page in find_pages([root / "README.md", docs]) if page not in texts | from_templates]
        texts |= from_templates | fill_pages(results, others)
        figures = made.figures | make_overview_figures(results.cells) | Scaling(source / "scaling").figures()
    rules, audit = docs / "rules" / "index.md", docs / "audit.md"
    texts[rules] = replace_rules_table(texts.get(rules) or _read_text(rules))
    texts[audit] = replace_audit_tables(texts.get(audit) or _read_text(audit), verdicts())
    return Pages(texts, figures, doubted + contradicted)


def _read_text(path: Path) -> str:
    return path.read_text("utf-8") if path.exists() else ""


def draw_figures(figures: dict[str, Draw], folder: Path) -> None:
    """Draw all figures, and delete those that are no longer made."""
    for name, draw in figures.items():
        draw(folder / name)
    for path in folder.glob("*.svg"):
        if path.name not in figures:
            path.unlink()


if __name__ == "__main__":
    sys.exit(main())
