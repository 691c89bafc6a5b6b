"""What each command does. `cli.main` runs this app and turns apical's errors into one line."""

import importlib
import json
import sys
import traceback
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from torch import nn

import apical
from apical.bench import cli as bench_cli
from apical.bench import results
from apical.bench.compare import over_seeds
from apical.bench.defaults import settings_for
from apical.bench.tune import best_first, judge, told, trials_of, tune
from apical.bench.words import parse_names, parse_options, parse_seeds
from apical.core.registry import check_options, resolve
from apical.data.cli import app as data_app
from apical.engine import Fit
from apical.engine.checkpoint import require_same
from apical.engine.settings import seed_list
from apical.errors import ApicalError, DivergenceError, UnsupportedError
from apical.files import writable
from apical.models import IMAGE_MODELS, NAMES, is_model
from apical.models import build as build_model
from apical.plausibility import Audit, page, verdicts
from apical.plausibility.audit import small
from apical.plausibility.criteria import CRITERIA
from apical.report import cli as report_cli

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Train networks without backpropagation, compare the rules, and reproduce the paper.",
)
app.add_typer(data_app, name="data")
app.add_typer(bench_cli.results_app, name="results")
app.command(cls=bench_cli.RayMayBeAlone)(bench_cli.bench)
app.command()(report_cli.report)
console = Console(soft_wrap=True, markup=False)


def _version(show: bool) -> None:
    if show:
        typer.echo(f"apical {apical.__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
    modules: Annotated[
        list[str],
        typer.Option("--import", help="A module with rules of your own, imported first; repeat for several."),
    ] = [],  # noqa: B006
) -> None:
    warnings.showwarning = lambda message, *_, **__: print(f"apical: {message}", file=sys.stderr)
    for name in modules:
        _imported(name, f"--import {name}")
    bench_cli.modules[:] = modules


def _imported(name: str, why: str) -> ModuleType:
    """A module of the user's own: from where the command is run, or installed."""
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ApicalError(f"cannot import {name!r} for {why}: {error}.") from error
    except Exception as error:  # of the user's own file: no trace through ours is of use
        said = " ".join(str(error.msg if isinstance(error, SyntaxError) else error).split())
        raise ApicalError(
            f"cannot import {name!r} for {why}: {_place(error)}{type(error).__name__}: {said}."
        ) from error


def _place(error: Exception) -> str:
    """Where in a file of the user's an import failed; nothing where it did not come that far."""
    if isinstance(error, SyntaxError):
        return f"{error.filename}, line {error.lineno}: "
    frames = traceback.extract_tb(error.__traceback__)[1:]
    own = [frame for frame in frames if "importlib" not in frame.filename]
    return f"{own[0].filename}, line {own[0].lineno}: " if own else ""


def builder(name: str) -> str | Callable[[], nn.Sequential]:
    """A model by its name, or the function that MODULE:FUNCTION names."""
    module, colon, function = name.partition(":")
    if not colon:
        if not is_model(name):
            raise ApicalError(f"unknown model {name!r}; {', '.join(NAMES)} or MODULE:FUNCTION work.")
        return name
    if not all(part.isidentifier() for part in (*module.split("."), function)):
        raise ApicalError(f"--model {name} is not MODULE:FUNCTION, such as mynetworks:small.")
    found = getattr(_imported(module, f"--model {name}"), function, None)
    if isinstance(found, nn.Module):
        raise ApicalError(
            f"{function!r} in {module!r} is a {type(found).__name__}, not a function; --model {name} takes a function that "
            "returns a new one each time."
        )
    if not callable(found):
        raise ApicalError(f"{module!r} has no function {function!r} for --model {name}.")

    def made() -> nn.Sequential:
        try:
            network: nn.Sequential = found()
        except Exception as error:  # of the user's own function: no trace through ours is of use
            raise ApicalError(f"--model {name} failed ({type(error).__name__}: {error}).") from error
        return network

    made.__name__ = name  # so that results, checkpoints and commands name it as --model does
    return made


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
        str,
        typer.Option(help="A data set of `apical data list`, or a file of yours: text:PATH, series:PATH."),
    ] = "digits",
    data_option: Annotated[
        list[str],
        typer.Option(help="An option of the data, NAME=VALUE (window=32, task=paper); repeat for several."),
    ] = [],  # noqa: B006
    scale: Annotated[
        str | None,
        typer.Option(help="Of series: train, or all (the paper's way). Short for --data-option scale=…"),
    ] = None,
    seeds: Annotated[str, typer.Option(help="How many seeds, or which: 4, or 0,1,2,3.")] = "1",
    epochs: Annotated[int | None, typer.Option(help="Passes over the training data.")] = None,
    lr: Annotated[float | None, typer.Option(help="Learning rate of the forward weights.")] = None,
    batch_size: Annotated[int | None, typer.Option(help="Examples per step.")] = None,
    optimizer: Annotated[str | None, typer.Option(help="adam, adamw or sgd.")] = None,
    optimizer_option: Annotated[
        list[str],
        typer.Option(help="An option of the optimizer, NAME=VALUE (weight_decay=1e-4); repeat for several."),
    ] = [],  # noqa: B006
    schedule: Annotated[str | None, typer.Option(help="linear or cosine to zero, or constant.")] = None,
    protocol: Annotated[
        str, typer.Option(help="clean: last epoch; paper: best test epoch; validation: a held-out tenth.")
    ] = "clean",
    loss: Annotated[str | None, typer.Option(help="cross_entropy or mse.")] = None,
    label_smoothing: Annotated[float | None, typer.Option(help="Share of the label spread evenly.")] = None,
    clip: Annotated[float | None, typer.Option(help="Largest gradient norm of a seed.")] = None,
    option: Annotated[
        list[str],
        typer.Option(help="An option of the rule, NAME=VALUE (theta_std=0.05); repeat for several."),
    ] = [],  # noqa: B006
    untuned: Annotated[
        bool, typer.Option("--untuned", help="Take nothing from the recorded settings.")
    ] = False,
    alignment: Annotated[
        bool, typer.Option("--alignment", help="Record how feedback and updates align.")
    ] = False,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, …")] = "auto",
    precision: Annotated[
        str | None, typer.Option(help="tf32 or float32 (these differ on CUDA alone), or bf16.")
    ] = None,
    compile: Annotated[
        bool | None,
        typer.Option("--compile/--no-compile", help="Use torch.compile; by default in very long runs."),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for the result (JSON) and the checkpoint.")] = None,
    checkpoint: Annotated[bool, typer.Option(help="Write a checkpoint after every epoch.")] = True,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the checkpoint in --out.")] = False,
    stop_after: Annotated[
        int | None,
        typer.Option(
            help="End after so many of the epochs, in the middle of the schedule; --resume goes on."
        ),
    ] = None,
    verbose: Annotated[
        bool, typer.Option("--verbose", help="Say which fast paths were not taken, and why.")
    ] = False,
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
    build, rules, failed = builder(model), parse_names(rule) or rule, False
    plans: dict[str, dict[str, Any]] = {}
    for name in rules:
        plans[name] = settings = {**({} if untuned else settings_for(name, model, data)), **given}
        settings |= {kind: {**settings.get(kind, {}), **own} for kind, own in options.items()}
        check_options(name, settings["options"])
    for name, target in _targets(rules, model, data, out, resume).items():
        settings = plans[name]
        if target is not None and target.exists():
            before = results.load(target)
            _require_same(target, before.settings, {**common, **settings})
            if before.finished:
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
            results.save(target, results.of_fit(fit))
        _tell(fit, name, model, data, verbose)
        failed |= bool(fit.failed)
    if failed:
        raise typer.Exit(1)


def _targets(
    rules: list[str], model: str, data: str, out: Path | None, resume: bool
) -> dict[str, Path | None]:
    """Where each rule's result goes; what exists already is a reason to stop before anything runs."""
    if out is None:
        if resume:
            raise ApicalError("--resume needs the --out folder of the run to go on with.")
        return dict.fromkeys(rules)
    writable(out)
    targets: dict[str, Path | None] = {}
    for rule in rules:
        targets[rule] = target = out / results.file_name(rule, model, data)
        if target.exists() and not resume:
            raise ApicalError(
                f"{target} exists already; --resume skips what is finished, another --out starts anew."
            )
    return targets


def _require_same(target: Path, before: dict[str, Any], wanted: dict[str, Any]) -> None:
    """A result of other settings than those asked for is no reason to skip the run, nor one to go on from."""
    # An option of the data that is not given has the value that it had.
    of_data = {**before.get("data_options", {}), **wanted["data_options"]}
    wanted = {**wanted, "seeds": seed_list(wanted["seeds"]), "data_options": of_data}
    wanted = json.loads(json.dumps({name: value for name, value in wanted.items() if name in before}))
    require_same(target, {name: before[name] for name in wanted}, wanted)


SCORES = {
    "test_accuracy": (100, 2, "{} %"),
    "test_bits": (1, 3, "{} bits per character"),
    "test_mse": (1, 4, "MSE {}"),
    "test_mae": (1, 4, "MAE {}"),
}
"""How each score of the history is told: its factor, its digits and its words."""


def _tell(fit: Fit, rule: str, model: str, data: str, verbose: bool) -> None:
    """What came out, in a line, and what was not used, in some."""
    where = {"clean": "test, last epoch", "paper": "test, best epoch", "validation": "held-out, last epoch"}
    scores = [
        words.format(over_seeds(values, digits))
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


@app.command("tune")
def tune_(
    rule: Annotated[list[str], typer.Option(help="A rule, or NAME:VARIANT; several with commas.")],
    model: Annotated[str, typer.Option(help="mlp, cnn or rnn.")] = "mlp",
    data: Annotated[str, typer.Option(help="A data set of `apical data list`.")] = "mnist",
    whole: Annotated[
        bool, typer.Option(help="The trials of the whole length in place of five epochs.")
    ] = False,
    seeds: Annotated[str, typer.Option(help="How many seeds each trial has, or which.")] = "1",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, …")] = "auto",
    out: Annotated[Path, typer.Option(help="Folder for the trials, one JSON line each.")] = Path(
        "results/tuning"
    ),
) -> None:
    """Try the settings that are listed for a rule, on a held-out tenth of the training data; the test set is not used.

    Trials that are in --out already are not run again. Example: apical tune --rule dtp --model cnn --data cifar10
    """
    rules = parse_names(rule) or rule
    for name in rules:
        trials_of(name, model, data, whole=whole)
    writable(out)
    for name in rules:
        rows = list(tune(name, model, data, out, whole=whole, seeds=parse_seeds(seeds), device=device))
        table = Table("trial", title=f"{name}, {model}, {data}: on held-out data, best first")
        table.add_column("accuracy %" if judge(data) == "accuracy" else "error", justify="right")
        for row in best_first(rows):
            trial = ", ".join(f"{key} {value}" for key, value in row.get("trial", {}).items())
            table.add_row(trial or row["command"], told(row))
        console.print(table)


@app.command()
def sample(
    checkpoint: Annotated[Path, typer.Argument(help="Checkpoint (.safetensors) of a run on characters.")],
    prompt: Annotated[str, typer.Option(help="How the text begins.")] = "",
    length: Annotated[int, typer.Option(help="Characters to write after the prompt.")] = 500,
    temperature: Annotated[
        float, typer.Option(help="Below 1: likely characters more often; 0: always the likeliest.")
    ] = 1.0,
    seed: Annotated[int, typer.Option(help="Of the draws: the same seed writes the same text.")] = 0,
) -> None:
    """Write text with a network that was trained on characters.

    Example: apical sample runs/tinyshakespeare-rnn-dll.safetensors --prompt "KING:" --length 300 --temperature 0.7
    """
    typer.echo(apical.sample(checkpoint, prompt, length=length, temperature=temperature, seed=seed))


@app.command("audit")
def audit_(
    rules: Annotated[list[str] | None, typer.Argument(help="Rules, or NAME:VARIANT; all by default.")] = None,
    model: Annotated[
        str | None,
        typer.Option(help="mlp or cnn for the digits, or MODULE:FUNCTION; by default three small layers."),
    ] = None,
    shape: Annotated[
        str | None,
        typer.Option(help="Sizes of one example, 3,32,32, for a MODULE:FUNCTION with convolutions."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Everything that was measured, as JSON.")] = False,
    as_markdown: Annotated[
        bool, typer.Option("--markdown", help="The verdicts with their evidence, as in docs/audit.md.")
    ] = False,
) -> None:
    """Watch rules learn, and judge their biological plausibility: C1, C2 and C3, beside the paper's verdicts.

    Example: apical audit bp fa dll --model cnn
    """
    for name in rules or ():
        resolve(name)
    build, sizes = _audited(model, shape)
    audits: dict[str, Audit] = {}
    for name in rules or apical.rule_names():
        try:
            audits |= verdicts([name], build, sizes)
        except UnsupportedError as error:
            if rules:
                raise
            print(f"apical: {name} is left out: {error}", file=sys.stderr)
    if as_json:
        typer.echo(json.dumps({"rules": {name: audit.to_dict() for name, audit in audits.items()}}, indent=1))
    elif as_markdown:
        typer.echo(page.markdown(audits))
    else:
        console.print(_verdicts(audits))


def _audited(
    model: str | None, shape: str | None
) -> tuple[Callable[[], nn.Sequential], tuple[int, ...] | None]:
    """The network to audit on, and the sizes of one example."""
    build = small if model is None else builder(model)
    if isinstance(build, str):
        if not build.startswith(IMAGE_MODELS):
            raise ApicalError(f"the audit has no {model}; mlp, cnn or MODULE:FUNCTION works for --model.")
        return partial(build_model, build, "digits"), (1, 8, 8)
    try:
        return build, tuple(int(n) for n in shape.split(",")) if shape is not None else None
    except ValueError:
        raise ApicalError(f"--shape {shape!r} is not a list of sizes such as 3,32,32.") from None


def _verdicts(audits: dict[str, Audit]) -> Table:
    table = Table(
        "rule", caption="paper: what it says of C1, C2 and C3. The evidence is for what is not met."
    )
    for heading in ("C1", "C2", "C3", "paper", "evidence"):
        table.add_column(heading)
    for name, audit in audits.items():
        marks = [page.mark(getattr(audit, criterion)) for criterion in CRITERIA]
        paper = " ".join(page.mark(page.says(audit, criterion)) for criterion in CRITERIA)
        why = [audit.facts["evidence"][c] for c in CRITERIA if not getattr(audit, c)]
        table.add_row(name, *marks, paper, "\n".join(why))
    return table
