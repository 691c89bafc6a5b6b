"""Reports: an HTML page, and figures for papers, from a store or a folder of stores."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from apical.bench.database import list_stores
from apical.bench.store import Store
from apical.errors import ApicalError
from apical.files import refuse_to_overwrite_store


def check_page_name(page: Path) -> None:
    """Refuse the name of a page that does not end in .html, or that would overwrite a store."""
    refuse_to_overwrite_store(page)
    if page.suffix != ".html":
        raise ApicalError(f"{page} does not end in .html, and a report is an HTML page; name it {page.stem}.html.")


def is_page(path: Path) -> bool:
    """Return whether a file is a page written by apical, which a new page may replace."""
    with path.open("rb") as file:
        return b"<title>apical: " in file.read(4096)


def write(source: Path, page: Path) -> None:
    """Write the HTML page of a store, or of all stores of a folder."""
    from apical.report import groups, web

    check_page_name(page)
    with open_results(source) as store:
        web.write(groups.collect(store), source, page)


def write_figures(source: Path, folder: Path, format: str) -> list[Path]:
    """Write every chart of the page into its own file, for a paper."""
    from apical.report import figures, groups

    with open_results(source) as store:
        found = groups.collect(store)
    return figures.write(found, folder, format)


@contextmanager
def open_results(source: Path) -> Iterator[Store]:
    """Open a store, or a temporary store with the content of all stores of a folder."""
    if not source.is_dir():
        with Store(source, write=False) as store:
            yield store
        return
    stores = list_stores(source)
    with tempfile.TemporaryDirectory() as folder, Store(Path(folder) / "results.sqlite") as store:
        for path in stores:
            with Store(path, write=False) as other:
                store.copy(other)
        yield store
