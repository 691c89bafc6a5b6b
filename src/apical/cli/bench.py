"""`apical bench`: run a suite and print its tables."""

from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from apical import report as reports
from apical.bench import suites
from apical.bench.plan import Request, run_request
from apical.cli.results import print_tables
from apical.cli.root import app, console, imported_modules
from apical.errors import MissingExtraError


class BenchCommand(TyperCommand):
    """The command `bench`, with an option `--ray` whose value may be left out, which typer does not support."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        for k in [k for k, word in enumerate(args) if word == "--ray"]:
            if k + 1 == len(args) or args[k + 1].startswith("-"):
                args = [*args[: k + 1], "local", *args[k + 1 :]]
        return super().parse_args(ctx, args)


@app.command(cls=BenchCommand)
def bench(
    suite: Annotated[
        str, typer.Argument(help=f"{', '.join(suites.list_names())}, or a TOML file of your own.")
    ] = "digits",
    store: Annotated[Path, typer.Option(help="The SQLite file of the results.")] = Path("results.sqlite"),
    rules: Annotated[list[str], typer.Option("--rules", "--rule", help="Only these rules, separated by commas.")] = [],  # noqa: B006
    models: Annotated[list[str], typer.Option("--models", "--model", help="Only these models.")] = [],  # noqa: B006
    data: Annotated[list[str], typer.Option(help="Only these data sets.")] = [],  # noqa: B006
    seeds: Annotated[str | None, typer.Option(help="How many seeds, or which.")] = None,
    epochs: Annotated[int | None, typer.Option(help="Passes over the training data.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="One epoch on a few examples: does everything work?")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="List the runs and how long they take; run nothing.")
    ] = False,
    defaults: Annotated[
        Path | None, typer.Option(help="A file like defaults.toml, over the recorded settings.")
    ] = None,
    redo: Annotated[bool, typer.Option("--redo", help="Run again what failed, or what other code computed.")] = False,
    limit: Annotated[float | None, typer.Option(help="Seconds after which no epoch begins.")] = None,
    workers: Annotated[int, typer.Option(help="Processes on this machine.")] = 1,
    together: Annotated[
        int, typer.Option(help="Networks that may train as one run where lines differ in rule and rates alone.")
    ] = 1,
    ray: Annotated[
        str | None,
        typer.Option(metavar="[ADDRESS]", help="Run on this Ray cluster; without an address, on one of its own."),
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, …")] = "auto",
) -> None:
    """Run a suite: what is missing of it in --store, then its tables beside the paper's figures.

    Example: apical bench table1 --data mnist --models mlp --store paper.sqlite
    """
    output = run_request(
        Request.from_command_line(
            suite=suite,
            store=store,
            rules=rules,
            models=models,
            data=data,
            seeds=seeds,
            epochs=epochs,
            quick=quick,
            dry_run=dry_run,
            defaults=defaults,
            redo=redo,
            limit=limit,
            workers=workers,
            together=together,
            ray=ray == "local" or ray or False,
            device=device,
            modules=imported_modules,
        )
    )
    print_tables(output.tables)
    if not dry_run:
        _write_page(store)
    if output.failed:
        raise typer.Exit(1)


def _write_page(store: Path) -> None:
    """Write the HTML page of a store and print where it is, or why there is none."""
    page = store.with_suffix(".html")
    if page.exists() and not reports.is_page(page):
        console.print(
            f"\nThe store is {store}. {page} is no page of apical's and is left as it is: "
            f"`apical report {store} --out FILE.html` writes one elsewhere."
        )
        return
    try:
        reports.write(store, page)
    except MissingExtraError as error:
        console.print(f"\nThe store is {store}; there is no page of it: {error}")
    else:
        console.print(f"\nThe store is {store}, its page {page}.")
