"""`apical train`: train one or several rules on one network and data set."""

import hashlib
import sys
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Self

import typer
from typer import Option

import apical
from apical.bench.cells import format_mean_std
from apical.bench.declaration import (
    Declaration,
    explain_new_content,
    make_file_name,
    parse_names,
    parse_options,
    parse_seeds,
)
from apical.bench.defaults import find_settings
from apical.bench.recording import run_and_measure, send_heartbeats
from apical.bench.store import Row, Store
from apical.cli.root import OptionNamingCommand, app, console, find_builder, print_warning
from apical.core.registry import check_options
from apical.data import Dataset
from apical.engine import Fit
from apical.engine import checkpoint as checkpoints
from apical.engine import device as devices
from apical.engine.inputs import load_dataset, make_settings
from apical.engine.settings import OnEpoch, Settings, merge_settings
from apical.errors import ApicalError, DivergenceError, StoreError
from apical.files import check_writable
from apical.printing import print_error


@app.command(cls=OptionNamingCommand)
def train(
    rule: Annotated[list[str], Option(help="A rule, or NAME:VARIANT; several with commas.")] = ["dll"],  # noqa: B006
    model: Annotated[
        str,
        Option(
            help="mlp, cnn, rnn, textcnn or textcnn-mean; mlp-512-256 has hidden layers of these widths, mlp-bias and "
            "cnn-bias have biases; or MODULE:FUNCTION that returns an nn.Sequential or an Elman."
        ),
    ] = "mlp",
    data: Annotated[
        str, Option(help="A data set of `apical data list`, or a file of yours: text:PATH, series:PATH.")
    ] = "digits",
    data_option: Annotated[
        list[str], Option(help="An option of the data, NAME=VALUE (window=32, task=paper); repeat for several.")
    ] = [],  # noqa: B006
    scale: Annotated[
        str | None, Option(help="Of series: train, or all (the paper's way). Short for --data-option scale=…")
    ] = None,
    seeds: Annotated[str, Option(help="How many seeds, or which: 4, or 0,1,2,3.")] = "1",
    epochs: Annotated[int | None, Option(help="Passes over the training data.")] = None,
    lr: Annotated[float | None, Option(help="Learning rate of the forward weights.")] = None,
    batch_size: Annotated[int | None, Option(help="Examples per step.")] = None,
    optimizer: Annotated[str | None, Option(help="adam, adamw or sgd.")] = None,
    optimizer_option: Annotated[
        list[str], Option(help="An option of the optimizer, NAME=VALUE (weight_decay=1e-4); repeat for several.")
    ] = [],  # noqa: B006
    schedule: Annotated[str | None, Option(help="linear or cosine to zero, warmup-linear or constant.")] = None,
    protocol: Annotated[
        str, Option(help="clean: last epoch; paper: best test epoch; validation: a held-out tenth.")
    ] = "clean",
    loss: Annotated[str | None, Option(help="cross_entropy or mse.")] = None,
    label_smoothing: Annotated[float | None, Option(help="Share of the label spread evenly.")] = None,
    clip: Annotated[float | None, Option(help="Largest gradient norm of a seed.")] = None,
    option: Annotated[
        list[str], Option(help="An option of the rule, NAME=VALUE (theta_std=0.05); repeat for several.")
    ] = [],  # noqa: B006
    untuned: Annotated[bool, Option("--untuned", help="Take nothing from the recorded settings.")] = False,
    alignment: Annotated[bool, Option("--alignment", help="Record how feedback and updates align.")] = False,
    device: Annotated[str, Option(help="auto, cpu, cuda, cuda:1, …")] = "auto",
    precision: Annotated[str | None, Option(help="tf32 or float32 (these differ on CUDA alone), or bf16.")] = None,
    compile: Annotated[
        bool | None, Option("--compile/--no-compile", help="Use torch.compile; by default in very long runs.")
    ] = None,
    out: Annotated[Path | None, Option(help="Folder for the results (results.sqlite) and the checkpoints.")] = None,
    checkpoint: Annotated[bool, Option(help="Write a checkpoint after every epoch.")] = True,
    resume: Annotated[bool, Option("--resume", help="Go on from the checkpoint in --out.")] = False,
    stop_after: Annotated[
        int | None, Option(help="End after so many of the epochs, in the middle of the schedule; --resume goes on.")
    ] = None,
    verbose: Annotated[bool, Option("--verbose", help="Say which fast paths were not taken, and why.")] = False,
) -> None:
    """Train one or several rules; settings not given are those recorded for that rule, model and data.

    Example: apical train --rule dll --rule bp --model mlp --data mnist --epochs 20 --seeds 4 --out runs
    """
    asked = dict(locals())
    if resume and out is None:
        raise ApicalError("--resume needs the --out folder of the run to go on with.")
    build = find_builder(model)
    settings = {name: _collect_settings(name, asked) for name in parse_names(rule) or rule}
    runs = {name: FolderRun.of(name, build, asked, own) for name, own in settings.items()} if out is not None else {}
    succeeded = [_train_rule(name, build, asked, own, runs.get(name)) for name, own in settings.items()]
    if not all(succeeded):
        raise typer.Exit(1)


def _train_rule(rule: str, build: Any, asked: dict[str, Any], own: dict[str, Any], run: "FolderRun | None") -> bool:
    """Train one rule and print what came out. Return False if a seed failed, also if it did in an earlier run."""
    failures = [] if run is None else run.failures
    for reason in failures:
        print_warning(f"{rule}: failed before: {reason}")
    if run is not None and not run.seeds:
        console.print(f"{rule}: finished before, see {run.store}")
        return not failures
    how: dict[str, Any] = {name: asked[name] for name in ("device", "compile", "stop_after")}
    how |= {"rule": rule, "progress": sys.stdout.isatty() or sys.stdout}
    source = _describe_settings(rule, asked)
    try:
        fit = apical.fit(build, asked["data"], **own, **how) if run is None else run.fit(build, how)
    except DivergenceError as error:
        print_warning(f"{rule}: {error}")
        return False
    checkpoint = None if run is None else run.checkpoint
    title = f"{rule} {asked['model']} {asked['data']}"
    _print_result(fit, title, source, asked["verbose"], can_go_on=checkpoint is not None)
    if callable(build) and asked["lr"] is None:
        console.print(
            f"  {asked['model']} has no recorded settings: lr {fit.settings.lr:g}, {fit.settings.optimizer}, batch size "
            f"{fit.settings.batch_size}, {fit.settings.schedule} schedule; --lr and the other options choose"
        )
    if run is None:
        console.print("  nothing was saved; --out FOLDER keeps the result, and the learners for apical.load")
    elif checkpoint is not None:
        console.print(f"  apical.load({str(checkpoint)!r}) returns the learners")
    return not (failures or fit.failed)


def _collect_settings(rule: str, asked: dict[str, Any]) -> dict[str, Any]:
    """Return the keywords of `fit` for a rule: those asked for, over the recorded ones."""
    names = [each.name for each in fields(Settings) if each.name not in ("rule", "model", "data")]
    given = {name: asked[name] for name in names if asked.get(name) is not None}
    given["seeds"] = parse_seeds(asked["seeds"])
    scale = [] if asked["scale"] is None else [f"scale={asked['scale']}"]
    given["options"] = parse_options(asked["option"])
    given["data_options"] = parse_options([*asked["data_option"], *scale], "--data-option")
    given["optimizer_options"] = parse_options(asked["optimizer_option"], "--optimizer-option")
    apical.data.lookup(asked["data"]).check_options(given["data_options"])
    recorded = {} if asked["untuned"] else find_settings(rule, asked["model"], asked["data"])
    settings = merge_settings(recorded, given)
    check_options(rule, settings["options"])
    return settings


def _describe_settings(rule: str, asked: dict[str, Any]) -> str:
    """Return where the settings of a run come from."""
    recorded = not asked["untuned"] and find_settings(rule, asked["model"], asked["data"])
    names = {
        "epochs": "epochs",
        "lr": "lr",
        "batch_size": "batch size",
        "optimizer": "optimizer",
        "schedule": "schedule",
    }
    names |= {"loss": "loss", "label_smoothing": "label smoothing", "clip": "clip", "precision": "precision"}
    given = [text for name, text in names.items() if asked[name] is not None]
    given += [text for name, text in (("option", "options"), ("optimizer_option", "optimizer options")) if asked[name]]
    return f"{'recorded' if recorded else 'default'} settings{' but for ' * bool(given)}{', '.join(given)}"


@dataclass(frozen=True)
class FolderRun:
    """A run whose result goes to the folder of --out: the rows of a store, and a checkpoint."""

    declaration: Declaration
    dataset: Dataset
    keywords: dict[str, Any]
    """The settings, as keywords of `fit`."""
    store: Path
    checkpoint: Path | None
    resume: bool
    seeds: list[int]
    """The seeds that the store has no result of."""
    failures: list[str]
    """Why seeds failed that the store has the result of."""

    @classmethod
    def of(cls, rule: str, build: Any, asked: dict[str, Any], given: dict[str, Any]) -> Self:
        """Check, before anything is trained, that nothing is overwritten."""
        out, resume = asked["out"], asked["resume"]
        checkpoint = out / f"{make_file_name(rule, asked['model'], asked['data'])}.safetensors"
        check_writable(checkpoint if asked["checkpoint"] else out / "results.sqlite")
        own = {name: value for name, value in given.items() if name != "data_options"}
        dataset = load_dataset(asked["data"], given["data_options"])
        settings = make_settings(build, dataset, rule=rule, **own)
        declaration, store = Declaration.of(settings), out / "results.sqlite"
        finished: dict[int, Row] = {}
        why = ""
        if store.exists():
            with Store(store, write=False) as opened:
                rows = opened.runs()
            finished = {row.seed: row for row in rows if row.key == declaration.key and row.status != "running"}
            why = explain_new_content(declaration, [row.declaration for row in rows])
        missing = [seed for seed in settings.seeds if seed not in finished]
        exists = checkpoint if asked["checkpoint"] and checkpoint.exists() else None
        if len(missing) < len(settings.seeds):
            exists = f"the result of {rule} in {store}"
        if why and not exists:
            print_error(why)
        if exists and not resume:
            raise ApicalError(f"{exists} exists already; --resume skips what is finished, another --out starts anew.")
        kept = _choose_checkpoint(checkpoint, missing, finished) if asked["checkpoint"] else None
        errors = [row.error for seed, row in finished.items() if seed in settings.seeds and row.error]
        return cls(declaration, dataset, own, store, kept, resume, missing, list(dict.fromkeys(errors)))

    def fit(self, build: Any, how: dict[str, Any]) -> Fit:
        """Train, and record every epoch. The store is made after the first one: a run that cannot begin leaves none."""
        declaration, seeds = self.declaration, self.seeds
        with ExitStack() as stack:

            @cache
            def claim() -> Store:
                store = stack.enter_context(Store(self.store))
                stack.enter_context(send_heartbeats(store))
                if store.claim(declaration, seeds) != seeds:
                    raise StoreError(f"another process trains {declaration} with these settings for {self.store} now.")
                stack.callback(store.release, declaration, seeds)
                return store

            def record(rows: list[dict[str, Any]]) -> None:
                if rows:  # there are none if every seed diverged
                    claim().record(declaration, rows)

            def run(on_epoch: OnEpoch) -> Fit:
                return apical.fit(
                    build,
                    self.dataset,
                    **{**self.keywords, **how, "seeds": seeds},
                    checkpoint=self.checkpoint,
                    resume=self.resume and self.checkpoint is not None,
                    on_epoch=on_epoch,
                )

            device = devices.find_device(how["device"])
            outcome, fit = run_and_measure(run, declaration, seeds, device, self.checkpoint, record)
            if fit is None:
                claim().finish(declaration, seeds, outcome)
                raise DivergenceError(" ".join(dict.fromkeys(outcome.failed.values())))
            if max(row["epoch"] for row in fit.history) == declaration.epochs:
                claim().finish(declaration, seeds, outcome)
        return fit


def _choose_checkpoint(checkpoint: Path, missing: list[int], finished: Iterable[int]) -> Path:
    """Return the checkpoint of the missing seeds: one of their own if the usual one is of seeds that are finished."""
    known = checkpoints.read_seeds(checkpoint) if missing else []
    if not known or not set(known) <= set(finished):
        return checkpoint
    text = "-".join(map(str, missing))
    if len(text) > 40:
        text = hashlib.sha256(text.encode()).hexdigest()[:8]
    own = checkpoint.with_name(f"{checkpoint.stem}-seeds-{text}.safetensors")
    check_writable(own)
    return own


SCORES = {
    "test_accuracy": (100, 2, "{} %"),
    "test_bits": (1, 3, "{} bits per character"),
    "test_mse": (1, 4, "MSE {}"),
    "test_mae": (1, 4, "MAE {}"),
}
"""How each score of the history is told: its factor, its digits and its words."""


def _print_result(fit: Fit, title: str, source: str, verbose: bool, *, can_go_on: bool) -> None:
    """Print the result in one line, whether a run that was stopped can go on, and the fast paths that were not taken."""
    where = {"clean": "test, last epoch", "paper": "test, best epoch", "validation": "held-out, last epoch"}
    scores = [
        words.format(format_mean_std(values, digits))
        for name, (factor, digits, words) in SCORES.items()
        if name in fit.history[0]
        for values in [[factor * value for value in fit.scores(name).values()]]
    ]
    done, planned = max(row["epoch"] for row in fit.history), fit.settings.epochs
    count = len(fit.settings.seeds) - len(fit.failed)
    seeds, epochs = (f"{n} {word}{'s' * (n != 1)}" for n, word in ((count, "seed"), (done, "epoch")))
    console.print(
        f"{title}: {', '.join(scores)} ({where[fit.settings.protocol]}; {seeds}), {epochs}, lr {fit.settings.lr:g}, "
        f"{source}, {fit.seconds_per_epoch:.2f} s per epoch"
    )
    if done < planned:
        then = "--resume with the same --out goes on" if can_go_on else "there is no checkpoint to go on from"
        console.print(f"  stopped after {done} of {planned} epochs; {then}")
    for reason in fit.reasons if verbose else ():
        console.print(f"  not used: {reason}")
