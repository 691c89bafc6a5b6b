"""`apical report`: a page, and figures for a paper."""

from pathlib import Path
from typing import Annotated

import typer

from apical import report as reports
from apical.cli.root import app, console


@app.command()
def report(
    source: Annotated[
        Path, typer.Argument(help="A store, or a folder with stores and results (JSON) of `apical train --out`.")
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            help="The page: .html, or .md with figures beside it [default, without --fill and --figures: report.html]."
        ),
    ] = None,
    fill: Annotated[
        list[Path] | None,
        typer.Option(
            help="A page of yours, or a folder of pages, in which to write the tables that they ask for; may be repeated."
        ),
    ] = None,
    figures: Annotated[Path | None, typer.Option(help="A folder for every chart as a file of its own.")] = None,
    format: Annotated[str, typer.Option(help="Of the figures: svg, png or pdf.")] = "svg",
) -> None:
    """Make a page from results: tables beside the paper's figures, charts, and how to repeat every run.

    Example: apical report results.sqlite --out report.html --figures figures --format pdf
    """
    page = Path("report.html") if out is None and not fill and figures is None else out
    if page is not None:
        reports.check_page_name(page)  # report a wrong name before the work
    drawn = [] if figures is None else reports.write_figures(source, figures, format)
    if fill:
        reports.fill(source, fill)
    if page is not None:
        reports.write(source, page)
    wrote = [str(page)] if page is not None else []
    wrote += map(str, fill or [])
    wrote += [f"{len(drawn)} figures in {figures}"] if figures else []
    console.print(f"wrote {' and '.join(wrote)}")
