"""`apical results`: list, show, export and import the runs of a store."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from apical.bench import render, results
from apical.bench.export import export, write_export
from apical.bench.plan import plan
from apical.bench.store import Row, Store
from apical.bench.tables import METRICS, Table, choose_metrics
from apical.cli.root import app, console
from apical.errors import ApicalError

results_app = typer.Typer(no_args_is_help=True, help="Look into a store of results, export it, import files.")
app.add_typer(results_app, name="results")
StoreFile = Annotated[Path, typer.Argument(help="The SQLite file of the results.")]


def print_tables(tables: list[Table]) -> None:
    """Print tables to the terminal."""
    console.print("\n\n".join(render.format_text(table) for table in tables), highlight=False, no_wrap=True, crop=False)


@results_app.command("list")
def list_results(store: StoreFile = Path("results.sqlite")) -> None:
    """One line for each run of a store."""
    with Store(store, write=False) as opened:
        lines = [_format_run(row, opened.history(row)) for row in opened.runs()]
    headings = ["rule", "model", "data", "seed", "status", "epochs", "at the last epoch", "device", "key"]
    print_tables([Table(f"{store}: {len(lines)} runs", headings, lines)])


def _format_run(row: Row, history: list[dict[str, Any]]) -> list[str]:
    """Return the cells of a run in the list of `apical results list`."""
    asked, recorded = row.declaration, len(history)
    measure = METRICS[choose_metrics(history, asked.data)[0]]
    score = measure.read(history, "clean")
    return [
        asked.rule,
        asked.model,
        asked.data,
        f"{row.seed}",
        _describe_status(row),
        f"{asked.epochs}" if recorded == asked.epochs else f"{recorded} of {asked.epochs}",
        "–" if score is None else f"{measure.heading} {score:.{measure.digits}f}",
        row.device or "",
        row.key,
    ]


def _describe_status(row: Row) -> str:
    """Return the status of a run as text."""
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
            raise ApicalError(f"{store} has no run whose key begins with {key!r}; `apical results list` has them.")
        for row in found:
            about = {name: value for name, value in row.__dict__.items() if value is not None and name != "id"}
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
        added = sum(opened.import_result(result) for result in found)
    total = sum(len(result.settings["seeds"]) for result in found)
    console.print(f"{added} of {total} runs are new in {store}.")
