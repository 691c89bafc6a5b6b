"""`apical train`: train one or several rules on one network and data set."""

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

import apical
from apical.bench import results
from apical.bench.compare import format_mean_std
from apical.bench.defaults import find_settings
from apical.bench.words import parse_names, parse_options, parse_seeds
from apical.cli.root import app, console, find_builder
from apical.core.registry import check_options
from apical.engine import Fit
from apical.engine.checkpoint import require_same
from apical.engine.settings import expand_seeds
from apical.errors import ApicalError, DivergenceError
from apical.files import check_writable


@app.command()
def train(
    rule: Annotated[list[str], typer.Option(help="A rule, or NAME:VARIANT; several with commas.")] = ["dll"],  # noqa: B006
    model: Annotated[
        str,
        typer.Option(
            help="mlp, cnn or rnn; mlp-512-256 has hidden layers of these widths, mlp-bias and cnn-bias have biases; or "
            "MODULE:FUNCTION that returns an nn.Sequential or an Elman."
        ),
    ] = "mlp",
    data: Annotated[
        str, typer.Option(help="A data set of `apical data list`, or a file of yours: text:PATH, series:PATH.")
    ] = "digits",
    data_option: Annotated[
        list[str], typer.Option(help="An option of the data, NAME=VALUE (window=32, task=paper); repeat for several.")
    ] = [],  # noqa: B006
    scale: Annotated[
        str | None, typer.Option(help="Of series: train, or all (the paper's way). Short for --data-option scale=…")
    ] = None,
    seeds: Annotated[str, typer.Option(help="How many seeds, or which: 4, or 0,1,2,3.")] = "1",
    epochs: Annotated[int | None, typer.Option(help="Passes over the training data.")] = None,
    lr: Annotated[float | None, typer.Option(help="Learning rate of the forward weights.")] = None,
    batch_size: Annotated[int | None, typer.Option(help="Examples per step.")] = None,
    optimizer: Annotated[str | None, typer.Option(help="adam, adamw or sgd.")] = None,
    optimizer_option: Annotated[
        list[str], typer.Option(help="An option of the optimizer, NAME=VALUE (weight_decay=1e-4); repeat for several.")
    ] = [],  # noqa: B006
    schedule: Annotated[str | None, typer.Option(help="linear or cosine to zero, or constant.")] = None,
    protocol: Annotated[
        str, typer.Option(help="clean: last epoch; paper: best test epoch; validation: a held-out tenth.")
    ] = "clean",
    loss: Annotated[str | None, typer.Option(help="cross_entropy or mse.")] = None,
    label_smoothing: Annotated[float | None, typer.Option(help="Share of the label spread evenly.")] = None,
    clip: Annotated[float | None, typer.Option(help="Largest gradient norm of a seed.")] = None,
    option: Annotated[
        list[str], typer.Option(help="An option of the rule, NAME=VALUE (theta_std=0.05); repeat for several.")
    ] = [],  # noqa: B006
    untuned: Annotated[bool, typer.Option("--untuned", help="Take nothing from the recorded settings.")] = False,
    alignment: Annotated[bool, typer.Option("--alignment", help="Record how feedback and updates align.")] = False,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, …")] = "auto",
    precision: Annotated[
        str | None, typer.Option(help="tf32 or float32 (these differ on CUDA alone), or bf16.")
    ] = None,
    compile: Annotated[
        bool | None, typer.Option("--compile/--no-compile", help="Use torch.compile; by default in very long runs.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for the result (JSON) and the checkpoint.")] = None,
    checkpoint: Annotated[bool, typer.Option(help="Write a checkpoint after every epoch.")] = True,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the checkpoint in --out.")] = False,
    stop_after: Annotated[
        int | None,
        typer.Option(help="End after so many of the epochs, in the middle of the schedule; --resume goes on."),
    ] = None,
    verbose: Annotated[bool, typer.Option("--verbose", help="Say which fast paths were not taken, and why.")] = False,
) -> None:
    """Train one or several rules; settings not given are those recorded for that rule, model and data.

    Example: apical train --rule dll --rule bp --model mlp --data mnist --epochs 20 --seeds 4 --out runs
    """
    given = {
        "epochs": epochs,
        "lr": lr,
        "batch_size": batch_size,
        "optimizer": optimizer,
        "schedule": schedule,
        "loss": loss,
        "label_smoothing": label_smoothing,
        "clip": clip,
        "precision": precision,
    }
    given = {name: value for name, value in given.items() if value is not None}
    scaled = [] if scale is None else [f"scale={scale}"]
    options = {
        "options": parse_options(option),
        "data_options": parse_options([*data_option, *scaled], "--data-option"),
        "optimizer_options": parse_options(optimizer_option, "--optimizer-option"),
    }
    apical.data.lookup(data).check_options(options["data_options"])
    common: dict[str, Any] = {
        "seeds": parse_seeds(seeds),
        "protocol": protocol,
        "alignment": alignment,
        "device": device,
        "compile": compile,
        "stop_after": stop_after,
    }
    build, rules, failed = find_builder(model), parse_names(rule) or rule, False
    plans: dict[str, dict[str, Any]] = {}
    for name in rules:
        plans[name] = settings = {**({} if untuned else find_settings(name, model, data)), **given}
        settings |= {kind: {**settings.get(kind, {}), **own} for kind, own in options.items()}
        check_options(name, settings["options"])
    for name, target in _choose_targets(rules, model, data, out, resume).items():
        settings = plans[name]
        if target is not None and target.exists():
            before = results.load(target)
            _require_same(target, before.settings, {**common, **settings})
            if before.is_finished:
                console.print(f"{name}: finished before, see {target}")
                continue
        path = target.with_suffix(".safetensors") if target is not None and checkpoint else None
        settings |= {"checkpoint": path, "resume": resume and path is not None}
        try:
            fit = apical.fit(build, data, rule=name, **common, **settings)
        except DivergenceError as error:
            print(f"apical: {name}: {error}", file=sys.stderr)
            failed = True
            continue
        if target is not None:
            results.save(target, results.make_result(fit))
        _print_result(fit, name, model, data, verbose)
        failed |= bool(fit.failed)
    if failed:
        raise typer.Exit(1)


def _choose_targets(rules: list[str], model: str, data: str, out: Path | None, resume: bool) -> dict[str, Path | None]:
    """Return the file of each rule's result. Raises if one exists already, before anything runs."""
    if out is None:
        if resume:
            raise ApicalError("--resume needs the --out folder of the run to go on with.")
        return dict.fromkeys(rules)
    check_writable(out)
    targets: dict[str, Path | None] = {}
    for rule in rules:
        targets[rule] = target = out / results.make_file_name(rule, model, data)
        if target.exists() and not resume:
            raise ApicalError(f"{target} exists already; --resume skips what is finished, another --out starts anew.")
    return targets


def _require_same(target: Path, before: dict[str, Any], wanted: dict[str, Any]) -> None:
    """A result of other settings than those asked for is no reason to skip the run, nor one to go on from."""
    # An option of the data that is not given has the value that it had.
    of_data = {**before.get("data_options", {}), **wanted["data_options"]}
    wanted = {**wanted, "seeds": expand_seeds(wanted["seeds"]), "data_options": of_data}
    wanted = json.loads(json.dumps({name: value for name, value in wanted.items() if name in before}))
    require_same(target, {name: before[name] for name in wanted}, wanted)


SCORES = {
    "test_accuracy": (100, 2, "{} %"),
    "test_bits": (1, 3, "{} bits per character"),
    "test_mse": (1, 4, "MSE {}"),
    "test_mae": (1, 4, "MAE {}"),
}
"""How each score of the history is told: its factor, its digits and its words."""


def _print_result(fit: Fit, rule: str, model: str, data: str, verbose: bool) -> None:
    """Print the result in one line and, if asked to, the fast paths that were not taken."""
    where = {"clean": "test, last epoch", "paper": "test, best epoch", "validation": "held-out, last epoch"}
    scores = [
        words.format(format_mean_std(values, digits))
        for name, (factor, digits, words) in SCORES.items()
        if name in fit.history[0]
        for values in [[factor * value for value in fit.scores(name).values()]]
    ]
    count = len(fit.settings.seeds) - len(fit.failed)
    seeds = "1 seed" if count == 1 else f"{count} seeds"
    console.print(
        f"{rule} {model} {data}: {', '.join(scores)} ({where[fit.settings.protocol]}; {seeds}), "
        f"{fit.seconds_per_epoch:.2f} s per epoch"
    )
    done, planned = max(row["epoch"] for row in fit.history), fit.settings.epochs
    if done < planned:
        console.print(f"  stopped after {done} of {planned} epochs; --resume with the same --out goes on")
    for reason in fit.reasons if verbose else ():
        console.print(f"  not used: {reason}")
