"""`apical bench` and `apical results`: run suites, and look at what their stores hold."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from typer.core import TyperCommand

from apical import report as reports
from apical.bench import render, results, suites
from apical.bench.export import export
from apical.bench.export import write as write_export
from apical.bench.plan import Request, answer, plan
from apical.bench.store import Row, Store
from apical.bench.tables import METRICS, Table, measures
from apical.errors import ApicalError, MissingExtraError

console = Console(soft_wrap=True, markup=False)
modules: list[str] = []
"""What --import named: other processes must import it, too."""
results_app = typer.Typer(no_args_is_help=True, help="Look into a store of results, export it, import files.")
StoreFile = Annotated[Path, typer.Argument(help="The SQLite file of the results.")]


class RayMayBeAlone(TyperCommand):
    """`--ray` with or without an address: an option whose value may be left out, which typer does not have."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        for k in [k for k, word in enumerate(args) if word == "--ray"]:
            if k + 1 == len(args) or args[k + 1].startswith("-"):
                args = [*args[: k + 1], "local", *args[k + 1 :]]
        return super().parse_args(ctx, args)


def bench(
    suite: Annotated[
        str, typer.Argument(help=f"{', '.join(suites.names())}, or a TOML file of your own.")
    ] = "digits",
    store: Annotated[Path, typer.Option(help="The SQLite file of the results.")] = Path("results.sqlite"),
    rules: Annotated[
        list[str], typer.Option("--rules", "--rule", help="Only these rules, separated by commas.")
    ] = [],  # noqa: B006
    models: Annotated[list[str], typer.Option("--models", "--model", help="Only these models.")] = [],  # noqa: B006
    data: Annotated[list[str], typer.Option(help="Only these data sets.")] = [],  # noqa: B006
    seeds: Annotated[str | None, typer.Option(help="How many seeds, or which.")] = None,
    epochs: Annotated[int | None, typer.Option(help="Passes over the training data.")] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="One epoch on a few examples: does everything work?")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="List the runs and how long they take; run nothing.")
    ] = False,
    defaults: Annotated[
        Path | None, typer.Option(help="A file like defaults.toml, over the recorded settings.")
    ] = None,
    redo: Annotated[
        bool, typer.Option("--redo", help="Run again what failed, or what other code computed.")
    ] = False,
    limit: Annotated[float | None, typer.Option(help="Seconds after which no epoch begins.")] = None,
    workers: Annotated[int, typer.Option(help="Processes on this machine.")] = 1,
    together: Annotated[
        int,
        typer.Option(help="Networks that may train as one run where lines differ in rule and rates alone."),
    ] = 1,
    ray: Annotated[
        str | None,
        typer.Option(
            metavar="[ADDRESS]", help="Run on this Ray cluster; without an address, on one of its own."
        ),
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, …")] = "auto",
) -> None:
    """Run a suite: what is missing of it in --store, then its tables beside the paper's figures.

    Example: apical bench table1 --data mnist --models mlp --store paper.sqlite
    """
    made = answer(
        Request.of_words(
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
            modules=modules,
        )
    )
    _show(made.tables)
    if not dry_run:
        _page(store)
    if made.failed:
        raise typer.Exit(1)


def _show(tables: list[Table]) -> None:
    console.print(
        "\n\n".join(render.text(table) for table in tables), highlight=False, no_wrap=True, crop=False
    )


def _page(store: Path) -> None:
    """The page of a store, and where it is; where there can be none, why."""
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


@results_app.command("list")
def list_results(store: StoreFile = Path("results.sqlite")) -> None:
    """One line for each run of a store."""
    with Store(store, write=False) as opened:
        lines = [_listed(row, opened.history(row)) for row in opened.runs()]
    headings = ["rule", "model", "data", "seed", "status", "epochs", "at the last epoch", "device", "key"]
    _show([Table(f"{store}: {len(lines)} runs", headings, lines)])


def _listed(row: Row, history: list[dict[str, Any]]) -> list[str]:
    asked, recorded = row.declaration, len(history)
    measure = METRICS[measures(history, asked.data)[0]]
    score = measure.read(history, "clean")
    return [
        asked.rule,
        asked.model,
        asked.data,
        f"{row.seed}",
        _status(row),
        f"{asked.epochs}" if recorded == asked.epochs else f"{recorded} of {asked.epochs}",
        "–" if score is None else f"{measure.heading} {score:.{measure.digits}f}",
        row.device or "",
        row.key,
    ]


def _status(row: Row) -> str:
    if row.status == "running":
        return "running" if row.active else "unfinished"
    quick = "" if row.declaration.examples is None else ", quick"
    return row.status + quick + (", other code" if row.old else "")


@results_app.command("show")
def show_result(
    key: Annotated[str, typer.Argument(help="The key of a run, or its beginning, as `list` prints it.")],
    store: Annotated[Path, typer.Option(help="The SQLite file of the results.")] = Path("results.sqlite"),
) -> None:
    """All that is known of the runs with this key: settings, versions, the command to repeat them, every epoch."""
    with Store(store, write=False) as opened:
        found = [row for row in opened.runs() if row.key.startswith(key)]
        if not found:
            raise ApicalError(
                f"{store} has no run whose key begins with {key!r}; `apical results list` has them."
            )
        for row in found:
            about = {
                name: value for name, value in row.__dict__.items() if value is not None and name != "id"
            }
            about["declaration"] = row.declaration.text
            typer.echo("\n".join(f"{name}: {value}" for name, value in about.items()))
            for entry in opened.history(row):
                typer.echo("  " + json.dumps(entry))


@results_app.command("export")
def export_results(
    store: StoreFile,
    format: Annotated[str, typer.Option(help="csv, json, parquet, latex or markdown.")] = "csv",
    suite: Annotated[str | None, typer.Option(help="Only the runs of this suite, in its layout.")] = None,
    out: Annotated[Path | None, typer.Option(help="The file to write; without it, the terminal.")] = None,
) -> None:
    """Write a store in another form; parquet needs --out. LaTeX is the table as a paper would print it."""
    if out is None and format == "parquet":
        raise ApicalError("a Parquet file is not text: name the file with --out.")
    with Store(store, write=False) as opened:
        content = export(opened, format, None if suite is None else plan(suite))
    if out is None:
        typer.echo(content, nl=False)
    else:
        write_export(out, content)
        console.print(f"wrote {out}")


@results_app.command("import")
def import_results(
    folder: Annotated[Path, typer.Argument(help="Folder with results (JSON) of `apical train --out`.")],
    store: Annotated[Path, typer.Option(help="The SQLite file of the results.")] = Path("results.sqlite"),
) -> None:
    """Take results that were written as files into a store; runs that are there already are left alone."""
    found = results.load_folder(folder)
    with Store(store) as opened:
        added = sum(opened.take(result) for result in found)
    total = sum(len(result.settings["seeds"]) for result in found)
    console.print(f"{added} of {total} runs are new in {store}.")
