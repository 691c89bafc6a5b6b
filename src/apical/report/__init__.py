"""Reports: a page and figures made from a store or a folder of results."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from apical.bench import results
from apical.bench.store import Store
from apical.errors import ApicalError

PAGES = (".html", ".md")


def kind(page: Path) -> str:
    """What a page is to be, by its name."""
    if page.suffix not in PAGES:
        raise ApicalError(f"{page} does not end in {' or '.join(PAGES)}, so it is unclear what to write.")
    return page.suffix


def write(source: Path, page: Path) -> None:
    """The page of a store, or of a folder of results: HTML or Markdown, as its name ends."""
    if kind(page) == ".html":
        from apical.report import groups, web

        with _store(source) as store:
            found = groups.collect(store)
        web.write(found, source, page)
        return
    from apical.report import page as markdown

    markdown.write(_results(source), source, page)


def write_figures(source: Path, folder: Path, format: str) -> list[Path]:
    """Every chart of the page as a file of its own, for a paper."""
    from apical.report import figure, groups

    with _store(source) as store:
        found = groups.collect(store)
    return figure.write(found, folder, format)


def _results(source: Path) -> list[results.Result]:
    if not source.is_file():
        return results.load_folder(source)
    with Store(source, write=False) as store:
        found = store.results()
    if not found:
        raise ApicalError(f"{source} has no finished run with an accuracy yet (quick runs are none).")
    return found


@contextmanager
def _store(source: Path) -> Iterator[Store]:
    """The store, or one for the moment that holds a folder's results."""
    if not source.is_dir():
        with Store(source, write=False) as store:
            yield store
        return
    found = results.load_folder(source)
    with tempfile.TemporaryDirectory() as folder, Store(Path(folder) / "results.sqlite") as store:
        for result in found:
            store.take(result)
        yield store
