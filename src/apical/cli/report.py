"""`apical report`: a page, and figures for a paper."""

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from apical import report as reports
from apical.cli.root import app, console


@app.command()
def report(
    source: Annotated[Path, Argument(help="A store, or a folder with stores.")],
    out: Annotated[
        Path | None, Option(help="The HTML page; report.html by default, unless there is --figures.")
    ] = None,
    figures: Annotated[Path | None, Option(help="A folder for every chart as a file of its own.")] = None,
    format: Annotated[str, Option(help="Of the figures: svg, png or pdf.")] = "svg",
) -> None:
    """Make a page from results: tables beside the paper's figures, charts, and how to repeat every run.

    Example: apical report results.sqlite --out report.html --figures figures --format pdf
    """
    page = Path("report.html") if out is None and figures is None else out
    if page is not None:
        reports.check_page_name(page)  # report a wrong name before the work
    drawn = [] if figures is None else reports.write_figures(source, figures, format)
    if page is not None:
        reports.write(source, page)
    wrote = [str(page)] if page is not None else []
    wrote += [f"{len(drawn)} figures in {figures}"] if figures else []
    console.print(f"wrote {' and '.join(wrote)}")
