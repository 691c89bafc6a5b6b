"""``apical data``: list, fetch and verify data sets from the command line."""

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text
from typer import Argument, Option

from apical import data
from apical.cli.root import SafeConsole, app
from apical.errors import ApicalError, DataError

data_app = typer.Typer(
    no_args_is_help=True,
    help="List, fetch and verify data sets, in $APICAL_DATA or, by default, apical in your cache folder.",
)

app.add_typer(data_app, name="data")
STYLES = {"present": "green", "absent": "dim", "damaged": "red"}


@data_app.command("list")
def list_() -> None:
    """Show every data set that apical knows and whether it is here (a quick look; verify reads it all)."""
    table = Table("name", "what", "train + test", "here", "use")
    for column in (table.columns[0], table.columns[3]):
        column.no_wrap = True
    for row in data.listing():
        table.add_row(row.name, row.title, row.size, Text(row.state, STYLES[row.state]), row.note)
    console = SafeConsole(markup=False)
    console.print(table)
    for line in (f"Folder: {data.data_folder()}", "Files of your own: text:PATH for a text, series:PATH for a table."):
        console.print(line, soft_wrap=True, highlight=False)


@data_app.command()
def fetch(
    names: Annotated[list[str], Argument(metavar="NAME...", help="Data sets, as `list` names them.")],
    source: Annotated[
        Path | None, Option("--from", metavar="FOLDER", help="Read the official files from here; download nothing.")
    ] = None,
) -> None:
    """Download the official files, check their md5, write the canonical file. A good one is left alone."""
    for entry in [data.lookup(name) for name in names]:  # report a misspelt name before the first download
        if entry.note:
            typer.echo(f"{entry.name}: {entry.note}.", err=True)
        data.fetch(entry, source=source)


@data_app.command()
def verify(
    names: Annotated[
        list[str] | None, Argument(metavar="[NAME]...", help="Data sets to check; without any, all that are here.")
    ] = None,
) -> None:
    """Read every byte and compare it with the known SHA-256; the exit code is 1 if any data set fails."""
    chosen = names or [row.name for row in data.listing() if row.state != "absent"]
    table = Table("name", "verdict", "why")
    table.columns[0].no_wrap = True
    failed = []
    for name in chosen:
        try:
            table.add_row(name, Text("good", "green"), str(data.verify(name)))
        except ApicalError as error:
            failed.append(name)
            table.add_row(name, Text("bad", "red"), str(error))
    SafeConsole(markup=False).print(table)
    if failed:
        raise DataError(f"{len(failed)} of {len(chosen)} data sets failed the check: {', '.join(failed)}.")
