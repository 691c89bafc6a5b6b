"""Write all generated pages of this repository, or check that they are up to date.

python -m tools.pages            writes docs/results.md with its figures, and the tables in README.md and docs/
python -m tools.pages --check    writes nothing, names the files that differ, and exits with 1 if there are any
"""

import argparse
import re
import sys
import tempfile
from pathlib import Path

from apical.files import replace_atomically
from apical.plausibility import verdicts
from apical.report import open_results
from apical.report.figures import draw_panels
from tools.pages.blocks import fill_pages, find_pages
from tools.pages.registry_tables import replace_audit_tables, replace_rules_table
from tools.pages.results_page import render_page
from tools.pages.section import Section

ROOT = Path(__file__).resolve().parents[2]
MATPLOTLIB = re.compile(r"Matplotlib v[\d.]+")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.pages", description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if a file differs")
    check = parser.parse_args().check
    differing = find_differences(ROOT) if check else write_pages(ROOT)
    for path in differing:
        print(f"{path.relative_to(ROOT)} {'differs: run `make pages`' if check else 'is new'}")
    if not differing:
        print("all generated pages are up to date")
    return 1 if check and differing else 0


def write_pages(root: Path) -> list[Path]:
    """Write all generated pages and figures of a repository, or none if one fails. Return the pages that changed."""
    page, texts = render_pages(root)
    draw_figures(page, root / "docs" / "figures")
    changed = [path for path, text in texts.items() if _read_text(path) != text]
    for path in changed:
        with replace_atomically(path) as temporary:
            temporary.write_text(texts[path], "utf-8")
    return changed


def find_differences(root: Path) -> list[Path]:
    """Return the generated pages and figures of a repository that are not what its results and rules give now.

    Figures that another version of Matplotlib drew, with other paths, are only compared by name.
    """
    page, texts = render_pages(root)
    differing = [path for path, text in texts.items() if _read_text(path) != text]
    with tempfile.TemporaryDirectory() as temporary:
        draw_figures(page, Path(temporary))
        folders = Path(temporary), root / "docs" / "figures"
        drawn, kept = ({path.name: path.read_text("utf-8") for path in folder.glob("*.svg")} for folder in folders)
    for name in sorted(set(drawn) | set(kept)):
        new, old = drawn.get(name, ""), kept.get(name, "")
        if not new or not old or (MATPLOTLIB.findall(new) == MATPLOTLIB.findall(old) and new != old):
            differing.append(folders[1] / name)
    return differing


def render_pages(root: Path) -> tuple[Section, dict[Path, str]]:
    """Return the results page with its figures, and the new text of all generated pages by path."""
    results, docs = root / "results", root / "docs"
    with open_results(results) as store:
        page = render_page(store, results)
        texts = fill_pages(store, results, find_pages([root / "README.md", docs]))
    texts[docs / "results.md"] = page.text
    rules, audit = docs / "rules" / "index.md", docs / "audit.md"
    texts[rules] = replace_rules_table(texts.get(rules) or _read_text(rules))
    texts[audit] = replace_audit_tables(texts.get(audit) or _read_text(audit), verdicts())
    return page, texts


def _read_text(path: Path) -> str:
    return path.read_text("utf-8") if path.exists() else ""


def draw_figures(page: Section, folder: Path) -> None:
    """Draw all figures of the results page, and delete those that it no longer has."""
    for name, drawings in page.figures.items():
        draw_panels(drawings, folder / name)
    for path in folder.glob("*.svg"):
        if path.name not in page.figures:
            path.unlink()


if __name__ == "__main__":
    sys.exit(main())
