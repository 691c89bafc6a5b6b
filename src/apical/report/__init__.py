"""Reports: pages and figures from a store or a folder of results."""

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from apical.bench import results
from apical.bench.store import Store
from apical.errors import ApicalError
from apical.files import refuse_to_overwrite_store

PAGE_SUFFIXES = (".html", ".md")


def check_page_name(page: Path) -> str:
    """Return the suffix of a page, after a check that it is known and that the page would not overwrite a store."""
    refuse_to_overwrite_store(page)
    if page.suffix not in PAGE_SUFFIXES:
        raise ApicalError(f"{page} does not end in {' or '.join(PAGE_SUFFIXES)}, so it is unclear what to write.")
    return page.suffix


def is_page(path: Path) -> bool:
    """Return whether a file is a page written by apical, which a new page may replace."""
    with path.open("rb") as file:
        return b"<title>apical: " in file.read(4096)


def write(source: Path, page: Path) -> None:
    """Write the page of a store or a folder of results, as HTML or Markdown by the suffix of its name."""
    with open_results(source) as store:
        if check_page_name(page) == ".html":
            from apical.report import groups, web

            web.write(groups.collect(store), source, page)
        else:
            from apical.report import page as markdown

            markdown.write(store, source, page)


def fill(source: Path, pages: Sequence[Path]) -> None:
    """Fill in the tables that pages ask for, each between two marks; see `apical.report.blocks`."""
    from apical.report import blocks

    with open_results(source) as store:
        blocks.fill(store, source, pages)


def write_figures(source: Path, folder: Path, format: str) -> list[Path]:
    """Write every chart of the page into its own file, for a paper."""
    from apical.report import figure, groups

    with open_results(source) as store:
        found = groups.collect(store)
    return figure.write(found, folder, format)


@contextmanager
def open_results(source: Path) -> Iterator[Store]:
    """Open a store, or a temporary store with the content of all stores and results of a folder."""
    if not source.is_dir():
        with Store(source, write=False) as store:
            yield store
        return
    stores = sorted(source.rglob("*.sqlite"))
    found = results.load_folder(source) if results.list_paths(source) or not stores else []
    with tempfile.TemporaryDirectory() as folder, Store(Path(folder) / "results.sqlite") as store:
        for path in stores:
            with Store(path, write=False) as other:
                store.copy(other)
        for result in found:
            store.import_result(result)
        yield store
