"""`apical tune`: try the listed settings of a rule on held-out training data."""

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from apical.bench.tune import choose_metric, format_score, list_trials, sort_best_first, tune
from apical.bench.words import parse_names, parse_seeds
from apical.cli.root import app, console
from apical.files import check_writable


@app.command("tune")
def tune_(
    rule: Annotated[list[str], typer.Option(help="A rule, or NAME:VARIANT; several with commas.")],
    model: Annotated[str, typer.Option(help="mlp, cnn or rnn.")] = "mlp",
    data: Annotated[str, typer.Option(help="A data set of `apical data list`.")] = "mnist",
    whole: Annotated[bool, typer.Option(help="The trials of the whole length in place of five epochs.")] = False,
    seeds: Annotated[str, typer.Option(help="How many seeds each trial has, or which.")] = "1",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, …")] = "auto",
    out: Annotated[Path, typer.Option(help="Folder for the trials, one JSON line each.")] = Path("results/tuning"),
) -> None:
    """Try the settings that are listed for a rule, on a held-out tenth of the training data; the test set is not used.

    Trials that are in --out already are not run again. Example: apical tune --rule dtp --model cnn --data cifar10
    """
    rules = parse_names(rule) or rule
    for name in rules:
        list_trials(name, model, data, whole=whole)
    check_writable(out)
    for name in rules:
        rows = list(tune(name, model, data, out, whole=whole, seeds=parse_seeds(seeds), device=device))
        table = Table("trial", title=f"{name}, {model}, {data}: on held-out data, best first")
        table.add_column("accuracy %" if choose_metric(data) == "accuracy" else "error", justify="right")
        for row in sort_best_first(rows):
            trial = ", ".join(f"{key} {value}" for key, value in row.get("trial", {}).items())
            table.add_row(trial or row["command"], format_score(row))
        console.print(table)
