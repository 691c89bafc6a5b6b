"""`apical bench`: run a suite and print its tables."""

from inspect import Parameter, Signature
from pathlib import Path
from typing import Annotated, Any

import typer

from apical import report as reports
from apical.bench.declaration import Flag, Request, list_flags
from apical.bench.workers import run_request
from apical.cli.results import print_tables
from apical.cli.root import OptionNamingCommand, app, console, imported_modules
from apical.errors import MissingExtraError


class BenchCommand(OptionNamingCommand):
    """The command `bench`, with an option `--ray` whose value may be left out, which typer does not support."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        for k in [k for k, word in enumerate(args) if word == "--ray"]:
            if k + 1 == len(args) or args[k + 1].startswith("-"):
                args = [*args[: k + 1], "local", *args[k + 1 :]]
        return super().parse_args(ctx, args)


def bench(**given: Any) -> None:
    """Run a suite: what is missing of it in --store, then its tables beside the paper's figures.

    Example: apical bench table1 --data mnist --models mlp --store paper.sqlite
    """
    request = Request.from_command_line(**given, modules=imported_modules)
    tables, failed = run_request(request)
    print_tables(tables)
    if not request.dry_run:
        _write_page(request.store)
    if failed:
        raise typer.Exit(1)


def _make_parameter(flag: Flag) -> Parameter:
    """Return a flag as a parameter that typer understands."""
    kind = flag.kind if flag.default is not None else flag.kind | None
    shown: Any = typer.Option(*flag.options, help=flag.help, metavar="[ADDRESS]" if flag.name == "ray" else None)
    if flag.name == "suite":
        shown = typer.Argument(help=flag.help)
    return Parameter(flag.name, Parameter.KEYWORD_ONLY, default=flag.default, annotation=Annotated[kind, shown])


# typer reads the flags from the signature: it is made from the fields of `Request`.
_parameters = [_make_parameter(flag) for flag in list_flags()]
bench.__signature__ = Signature(_parameters)  # type: ignore[attr-defined]
bench.__annotations__ = {parameter.name: parameter.annotation for parameter in _parameters}
app.command(cls=BenchCommand)(bench)


def _write_page(store: Path) -> None:
    """Write the HTML page of a store and print where it is, or why there is none."""
    page = store.with_suffix(".html")
    said = f", its page {page}."
    if page.exists() and not reports.is_page(page):
        said = (
            f". {page} is no page of apical's and is left as it is: `apical report {store} --out FILE.html` writes one "
        )
        said += "elsewhere."
    else:
        try:
            reports.write(store, page)
        except MissingExtraError as error:
            said = f"; there is no page of it: {error}"
    console.print(f"\nThe store is {store}{said}")
