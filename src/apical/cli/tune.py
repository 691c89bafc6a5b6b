"""`apical tune`: try the listed settings of a rule on held-out training data."""

from pathlib import Path
from typing import Annotated, Any

from rich.table import Table
from typer import Option

from apical.bench.declaration import parse_names, parse_seeds
from apical.bench.defaults import (
    choose_metric,
    format_score,
    get_trials_path,
    list_trials,
    read_own_trials,
    sort_best_first,
    tune,
)
from apical.cli.root import OptionNamingCommand, app, console
from apical.files import check_writable


@app.command("tune", cls=OptionNamingCommand)
def tune_(
    rule: Annotated[list[str], Option(help="A rule, or NAME:VARIANT; several with commas.")],
    model: Annotated[str, Option(help="mlp, cnn, rnn, textcnn or textcnn-mean.")] = "mlp",
    data: Annotated[str, Option(help="A data set of `apical data list`.")] = "mnist",
    whole: Annotated[bool, Option(help="The trials of the whole length in place of five epochs.")] = False,
    seeds: Annotated[str, Option(help="How many seeds each trial has, or which.")] = "1",
    device: Annotated[str, Option(help="auto, cpu, cuda, …")] = "auto",
    trials: Annotated[
        Path | None, Option(help='A file of trials of your own, one JSON object in each line: {"lr": 0.01}.')
    ] = None,
    out: Annotated[Path, Option(help="Folder for the trials, one JSON line each.")] = Path("results/tuning"),
) -> None:
    """Try the settings that are listed for a rule, on a held-out tenth of the training data; the test set is not used.

    Trials that are in --out already are not run again. Example: apical tune --rule dtp --model cnn --data cifar10
    """
    rules = parse_names(rule) or rule
    asked = {
        name: list_trials(name, model, data, whole=whole) if trials is None else read_own_trials(trials, name, data)
        for name in rules
    }
    for name in rules:
        check_writable(get_trials_path(out, name, model, data, whole=whole))
    for name in rules:
        how: dict[str, Any] = {"trials": asked[name], "whole": whole, "seeds": parse_seeds(seeds), "device": device}
        rows = list(tune(name, model, data, out, **how))
        table = Table("trial", title=f"{name}, {model}, {data}: on held-out data, best first")
        table.add_column("accuracy %" if choose_metric(data) == "accuracy" else "error", justify="right")
        for row in sort_best_first(rows):
            trial = ", ".join(f"{key} {value}" for key, value in row.get("trial", {}).items())
            table.add_row(trial or row.get("command", "{}"), format_score(row))
        console.print(table)
