"""Reports: pages and figures made from a store or a folder of results."""

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from apical.bench import results
from apical.bench.store import Store
from apical.errors import ApicalError
from apical.files import spare_store

PAGES = (".html", ".md")


def kind(page: Path) -> str:
    """What a page is to be, by its name."""
    spare_store(page)
    if page.suffix not in PAGES:
        raise ApicalError(f"{page} does not end in {' or '.join(PAGES)}, so it is unclear what to write.")
    return page.suffix


def is_page(path: Path) -> bool:
    """Whether a file is a page that apical wrote, which the next one may take the place of."""
    with path.open("rb") as file:
        return b"<title>apical: " in file.read(4096)


def write(source: Path, page: Path) -> None:
    """The page of a store, or of a folder of results: HTML or Markdown, as its name ends."""
    with opened(source) as store:
        if kind(page) == ".html":
            from apical.report import groups, web

            web.write(groups.collect(store), source, page)
        else:
            from apical.report import page as markdown

            markdown.write(store, source, page)


def fill(source: Path, pages: Sequence[Path]) -> None:
    """Write the tables that pages ask for, each between its two marks; see `apical.report.blocks`."""
    from apical.report import blocks

    with opened(source) as store:
        blocks.fill(store, source, pages)


def write_figures(source: Path, folder: Path, format: str) -> list[Path]:
    """Every chart of the page as a file of its own, for a paper."""
    from apical.report import figure, groups

    with opened(source) as store:
        found = groups.collect(store)
    return figure.write(found, folder, format)


@contextmanager
def opened(source: Path) -> Iterator[Store]:
    """The store, or one for the moment that holds all stores and results of a folder."""
    if not source.is_dir():
        with Store(source, write=False) as store:
            yield store
        return
    stores = sorted(source.rglob("*.sqlite"))
    found = results.load_folder(source) if results.paths(source) or not stores else []
    with tempfile.TemporaryDirectory() as folder, Store(Path(folder) / "results.sqlite") as store:
        for path in stores:
            with Store(path, write=False) as other:
                store.copy(other)
        for result in found:
            store.take(result)
        yield store
