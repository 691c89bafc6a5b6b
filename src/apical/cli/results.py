"""`apical results`: list, show, export, import and delete the runs of a store, and repair it."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from apical.bench.cells import METRICS, Table, choose_metrics
from apical.bench.database import list_stores
from apical.bench.declaration import Request
from apical.bench.export import export, format_text, write_export
from apical.bench.repair import SHORTEST_KEY, delete, find_runs, repair
from apical.bench.store import Row, Store
from apical.cli.root import app, console, echo
from apical.errors import ApicalError

results_app = typer.Typer(
    no_args_is_help=True, help="Look into a store of results, export it, import others, repair it."
)
app.add_typer(results_app, name="results")
StoreFile = Annotated[Path, typer.Argument(help="The SQLite file of the results.")]


def print_tables(tables: list[Table]) -> None:
    """Print tables to the terminal."""
    console.print("\n\n".join(format_text(table) for table in tables), highlight=False, no_wrap=True, crop=False)


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
    metric = METRICS[choose_metrics(history, asked.data)[0]]
    score = metric.read(history, "clean")
    state, ended = row.state, row.status != "running"
    state += ", quick" if ended and asked.examples is not None else ""
    state += ", other code" if row.old else ""
    epochs = f"{asked.epochs}" if recorded == asked.epochs else f"{recorded} of {asked.epochs}"
    result = "–" if score is None else f"{metric.heading} {score:.{metric.digits}f}"
    return [asked.rule, asked.model, asked.data, f"{row.seed}", state, epochs, result, row.device or "", row.key]


@results_app.command("show")
def show_result(
    key: Annotated[str, typer.Argument(help="The key of a run, or its beginning, as `list` prints it.")],
    store: Annotated[Path, typer.Option(help="The SQLite file of the results.")] = Path("results.sqlite"),
) -> None:
    """All that is known of the runs with this key: settings, versions, the command to repeat them, every epoch."""
    with Store(store, write=False) as opened:
        for row in find_runs(opened, [key]):
            known = {**row.__dict__, "seconds": row.seconds}
            about = {name: value for name, value in known.items() if value is not None and name not in ("id", "epochs")}
            about["declaration"] = row.declaration.text
            echo("\n".join(f"{name}: {value}" for name, value in about.items()))
            for entry in opened.history(row):
                echo("  " + json.dumps(entry))


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
        content = export(opened, format, None if suite is None else Request(suite=suite))
    if out is None:
        echo(str(content), end="")
    else:
        write_export(out, content)
        console.print(f"wrote {out}")


@results_app.command("import")
def import_results(
    source: Annotated[Path, typer.Argument(metavar="PATH", help="A store, or a folder with stores.")],
    store: Annotated[Path, typer.Option(help="The SQLite file of the results.")] = Path("results.sqlite"),
) -> None:
    """Copy the runs of other stores into a store; runs that are there already are left alone."""
    added = total = 0
    stores = list_stores(source)
    with Store(store) as opened:
        for path in stores:
            if path.resolve() != store.resolve():
                with Store(path, write=False) as other:
                    new, count = opened.copy(other)
                added, total = added + new, total + count
    console.print(f"{added} of {total} runs are new in {store}.")


@results_app.command("repair")
def repair_store(store: StoreFile) -> None:
    """Save the good runs of a damaged store. The damaged file is kept as STORE.damaged.

    Every run has a checksum of its settings and of all its epochs. Runs that are not what was written are left out, and
    the same `apical bench` or `apical train` runs them again.

    Example: apical results repair results.sqlite
    """
    kept, lost, aside = repair(store)
    if aside is None:
        console.print(f"{store} is not damaged; it has {_count(kept)}.")
    else:
        was = "was" if lost == 1 else "were"
        console.print(f"{store} has {_count(kept)}; {_count(lost)} {was} lost. The damaged file is now {aside}.")


@results_app.command("delete")
def delete_results(
    store: StoreFile,
    keys: Annotated[
        list[str], typer.Argument(metavar="KEY...", help="Keys of runs, or their beginnings, as `list` prints them.")
    ],
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
) -> None:
    """Delete all seeds of runs, with their epochs and checkpoints. If a process works on one of them, none is deleted.

    Example: apical results delete results.sqlite 3f2a9c51
    """
    with Store(store) as opened:
        found = find_runs(opened, keys, SHORTEST_KEY)
        if not yes:
            echo("\n".join(f"{row.key} {row.declaration} seed {row.seed}: {row.state}" for row in found))
            typer.confirm(f"Delete {_count(len(found))} from {store}?", abort=True)
        delete(opened, found)
    console.print(f"deleted {_count(len(found))} from {store}.")


def _count(runs: int) -> str:
    return "1 run" if runs == 1 else f"{runs} runs"
