"""What ResNet-18 and a GPT reach by each rule: the tables, sentences and figures of docs/scaling.md, from results/scaling.

    python tools/scaling.py [FOLDER]

prints the tables of a folder of results; `python -m tools.pages` writes the page. A file has the rows that an example
printed: `python examples/resnet18_cifar10.py --rule bp --out results/scaling/resnet18-bp-0.jsonl`. Only runs that reached
their last epoch or step count.
"""

import argparse
import json
import math
import shlex
import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from apical.errors import ApicalError
from apical.extras import import_extra
from apical.files import replace_atomically
from apical.report.figures import MARKERS, METADATA, STYLE
from apical.report.styles import style_rule

ROOT = Path(__file__).resolve().parents[1]
REFERENCE = "bp"
KOLEN_POLLACK = "dll:kolen-pollack"
ORDER = (REFERENCE, KOLEN_POLLACK, "sign", "fa", "readout")
"""The rows of a table; other rules follow by name."""
OWN_SETTINGS = ("early_decay", "late_decay", "early_share")
"""Settings that only Kolen-Pollack's runs use."""
NOT_SETTINGS = ("rule", "seed", "out", "device", "torch", "apical", "seconds")
"""What the first row of a run has besides the settings that all runs of an experiment share."""


class Experiment(NamedTuple):
    """An example: its command, what its rows count and score, how scores are shown, and how near to bp counts as level."""

    title: str
    command: str
    clock: str
    score: str
    heading: str
    digits: int
    is_higher_better: bool
    margin: float


EXPERIMENTS = {
    "resnet18": Experiment(
        "ResNet-18 on CIFAR-10", "examples/resnet18_cifar10.py", "epoch", "accuracy", "test accuracy %", 2, True, 0.3
    ),
    "gpt": Experiment(
        "A GPT on characters", "examples/gpt_characters.py", "step", "validation", "validation loss", 3, False, 0.02
    ),
}
"""The experiments by the first word of their files' names."""


class Run(NamedTuple):
    """The rows of one run: its settings, and one row per evaluation."""

    path: Path
    experiment: str
    settings: dict[str, Any]
    rows: list[dict[str, Any]]

    @property
    def length(self) -> int:
        """The number of epochs or steps that the run was to have."""
        return int(self.settings[f"{EXPERIMENTS[self.experiment].clock}s"])

    @property
    def done(self) -> int:
        """The number of epochs or steps after which it was evaluated last."""
        return int(self.rows[-1][EXPERIMENTS[self.experiment].clock]) if self.rows else 0

    @property
    def is_finished(self) -> bool:
        return self.done == self.length

    def read(self, name: str) -> list[tuple[float, float]]:
        """Return the epoch or step and the value of each evaluation that has a finite value of this name."""
        clock = EXPERIMENTS[self.experiment].clock
        found = [(row[clock], row.get(name)) for row in self.rows]
        return [(float(x), float(y)) for x, y in found if y is not None and math.isfinite(y)]


def read_run(path: Path) -> Run:
    """Read the last run of a file. A last line that was cut off is left out."""
    experiment = path.name.partition("-")[0]
    if experiment not in EXPERIMENTS:
        raise ApicalError(f"{path.name} belongs to no experiment; names begin with {', '.join(EXPERIMENTS)}.")
    lines = path.read_text("utf-8").splitlines(keepends=True)
    try:
        rows = [json.loads(line) for line in lines if line.endswith("\n")]
        starts = [i for i, row in enumerate(rows) if "rule" in row]
        return Run(path, experiment, rows[starts[-1]], rows[starts[-1] + 1 :])
    except (ValueError, TypeError, IndexError) as error:
        raise ApicalError(
            f"{path.name} is no result of an example: a row of settings, then a row per evaluation."
        ) from error


class Scaling:
    """The runs of a folder. A rule's score is that of its last evaluation; runs that ended early do not count."""

    experiments = EXPERIMENTS

    def __init__(self, folder: Path) -> None:
        found = [read_run(path) for path in sorted(folder.glob("*.jsonl"))]
        self.runs = [run for run in found if run.is_finished]
        self.unfinished = [run for run in found if not run.is_finished]
        self.trials = [read_run(path) for path in sorted(folder.glob("trials/*.jsonl"))]
        """Runs of one seed with other settings, from which those of the others were chosen."""
        self._check_settings()

    def _check_settings(self) -> None:
        """Refuse to average runs whose settings differ, or two runs of one seed."""
        first: dict[tuple[str, ...], Run] = {}
        for run in self.runs:
            rule, seed = run.settings["rule"], run.settings["seed"]
            kept = first.setdefault((run.experiment, rule, seed), run)
            if kept is not run:
                raise ApicalError(f"{kept.path.name} and {run.path.name} are runs of the same rule and seed.")
            others = [first.setdefault((run.experiment,), run), first.setdefault((run.experiment, rule), run)]
            for other, ignored in zip(others, (OWN_SETTINGS, ()), strict=True):
                names = [name for name in run.settings if name not in (*NOT_SETTINGS, *ignored)]
                differing = [name for name in names if run.settings[name] != other.settings.get(name)]
                if differing:
                    raise ApicalError(f"{other.path.name} and {run.path.name} differ in {', '.join(differing)}.")

    # What the runs say.

    def of(self, experiment: str, rule: str | None = None) -> list[Run]:
        """Return the finished runs of an experiment, or of one rule."""
        return [run for run in self.runs if run.experiment == experiment and rule in (None, run.settings["rule"])]

    def rules(self, experiment: str) -> list[str]:
        """Return the rules of the finished runs, in the order of the table."""
        found = {run.settings["rule"] for run in self.of(experiment)}
        return sorted(found, key=[*ORDER, *sorted(found)].index)

    def has(self, experiment: str, *rules: str) -> bool:
        """Return whether all these rules have a finished run."""
        return all(self.of(experiment, rule) for rule in rules)

    def scores(self, experiment: str, rule: str) -> dict[int, float]:
        """Return the score of each seed at the last evaluation."""
        name = EXPERIMENTS[experiment].score
        return {run.settings["seed"]: run.rows[-1][name] for run in self.of(experiment, rule)}

    def differences(self, experiment: str, rule: str, reference: str = REFERENCE) -> list[float]:
        """Return the score less the reference's of each seed that both have."""
        ours, theirs = self.scores(experiment, rule), self.scores(experiment, reference)
        return [ours[seed] - theirs[seed] for seed in sorted(ours.keys() & theirs.keys())]

    def value(self, experiment: str, rule: str, name: str, place: int = -1) -> float | None:
        """Return the mean over seeds of a measure at the last evaluation, or at another one; None if there is none."""
        found = [run.read(name) for run in self.of(experiment, rule)]
        return statistics.fmean(values[place][1] for values in found) if found and all(found) else None

    # Words and tables.

    def measure(self, experiment: str, rule: str, name: str, place: int = -1) -> str:
        """Return the mean over seeds of a measure at the last evaluation, or at another one."""
        value = self.value(experiment, rule, name, place)
        return "–" if value is None else f"{value:.3f}" if name == "alignment" else format_number(value, 2)

    def score(self, experiment: str, rule: str) -> str:
        """Return the mean score with its standard deviation over seeds."""
        return format_mean(list(self.scores(experiment, rule).values()), EXPERIMENTS[experiment].digits)

    def compare(self, experiment: str, rule: str, reference: str = REFERENCE) -> str:
        """Return how far a rule's score is from the reference's, such as "0.12 below"."""
        digits = EXPERIMENTS[experiment].digits
        difference = statistics.fmean(self.differences(experiment, rule, reference))
        shown = f"{abs(difference):.{digits}f}"
        return "level with" if not float(shown) else f"{shown} {'above' if difference > 0 else 'below'}"

    def is_level(self, experiment: str, rule: str) -> bool:
        """Return whether a rule is at most the experiment's margin worse than the reference."""
        own = EXPERIMENTS[experiment]
        gain = statistics.fmean(self.differences(experiment, rule)) * (1 if own.is_higher_better else -1)
        return gain >= -own.margin

    def table(self, experiment: str) -> str:
        """Return the table of an experiment as Markdown."""
        own = EXPERIMENTS[experiment]
        headings = ["rule", "seeds", own.heading, f"− `{REFERENCE}`", "alignment", "gradient norm"]
        if not own.is_higher_better:
            headings.insert(4, f"lowest, at {own.clock}")
        lines = [f"| {' | '.join(headings)} |", f"|{'---|' * len(headings)}"]
        for rule in self.rules(experiment):
            differences = self.differences(experiment, rule) if rule != REFERENCE else []
            cells = [
                f"`{rule}`",
                ", ".join(str(seed) for seed in sorted(self.scores(experiment, rule))),
                self.score(experiment, rule),
                format_mean(differences, own.digits, signed=True),
                self.measure(experiment, rule, "alignment"),
                self.measure(experiment, rule, "gradient_norm"),
            ]
            if not own.is_higher_better:
                cells.insert(4, self.lowest(experiment, rule))
            lines.append(f"| {' | '.join(cells)} |")
        return "\n".join(lines)

    def has_trials(self, experiment: str) -> bool:
        """Return whether other settings were tried."""
        return any(run.experiment == experiment for run in self.trials)

    def list_trials(self, experiment: str) -> str:
        """Return a table of the trials, with the settings in which they differ from the runs of the same rule."""
        own = EXPERIMENTS[experiment]
        lines = [f"| rule | settings | {own.heading} |", "|---|---|---|"]
        for run in (run for run in self.trials if run.experiment == experiment):
            chosen, rule = self.of(experiment, run.settings["rule"])[0].settings, run.settings["rule"]
            names = [name for name in run.settings if name not in NOT_SETTINGS and run.settings[name] != chosen[name]]
            settings = ", ".join(f"{name.replace('_', ' ')} {run.settings[name]:g}" for name in names)
            lines.append(f"| `{rule}` | {settings} | {run.rows[-1][own.score]:.{own.digits}f} |")
        return "\n".join(lines)

    def best_trial(self, experiment: str, rule: str) -> float:
        """Return the best score of a rule among its trials and its run of the same seed."""
        own = EXPERIMENTS[experiment]
        trials = [run for run in self.trials if (run.experiment, run.settings["rule"]) == (experiment, rule)]
        seeds = {run.settings["seed"] for run in trials}
        runs = [*trials, *(run for run in self.of(experiment, rule) if run.settings["seed"] in seeds or not seeds)]
        scores = [float(run.rows[-1][own.score]) for run in runs]
        return max(scores) if own.is_higher_better else min(scores)

    def _find_lowest(self, experiment: str, rule: str) -> list[tuple[float, float]]:
        """Return the lowest score of each seed, with its epoch or step before it."""
        name = EXPERIMENTS[experiment].score
        return [min(run.read(name), key=lambda pair: pair[1]) for run in self.of(experiment, rule)]

    def rise(self, experiment: str, rule: str) -> float:
        """Return by how much the score rises from its lowest value to the end, as a mean over seeds."""
        last = statistics.fmean(self.scores(experiment, rule).values())
        return last - statistics.fmean(score for _, score in self._find_lowest(experiment, rule))

    def lowest(self, experiment: str, rule: str) -> str:
        """Return the mean over seeds of the lowest score, and the epochs or steps at which the seeds had it."""
        own, best = EXPERIMENTS[experiment], self._find_lowest(experiment, rule)
        places = sorted({int(x) for x, _ in best})
        mean = format_mean([score for _, score in best], own.digits)
        return f"{mean}, {' to '.join(f'{place:,}' for place in dict.fromkeys((places[0], places[-1])))}"

    def commands(self, experiment: str) -> str:
        """Return one command for each rule, with all its settings, for all its seeds."""
        lines = []
        for rule in self.rules(experiment):
            runs = self.of(experiment, rule)
            name = f"{experiment}-{rule.replace(':', '-')}-$seed.jsonl"
            parts = [f"python {EXPERIMENTS[experiment].command}", *_list_options(runs[0].settings)]
            seeds = " ".join(str(seed) for seed in sorted(run.settings["seed"] for run in runs))
            command = f"{' '.join(parts)} --seed $seed --out results/scaling/{name}"
            lines.append(f"for seed in {seeds}; do {command}; done")
        return "\n".join(lines)

    def setting(self, experiment: str, name: str, rule: str | None = None) -> Any:
        """Return a setting of the runs of an experiment, or of one rule."""
        return self.of(experiment, rule)[0].settings[name]

    def machines(self, experiment: str) -> str:
        """Return the devices and versions of the runs."""
        found = (run.settings for run in self.of(experiment))
        return "; ".join(dict.fromkeys(f"{s['device']}, torch {s['torch']}, apical {s['apical']}" for s in found))

    def missing(self) -> str:
        """Return the runs that ended early, in words."""
        return ", ".join(
            f"`{run.path.name}` ({EXPERIMENTS[run.experiment].clock} {run.done} of {run.length})"
            for run in self.unfinished
        )

    def figures(self) -> dict[str, Callable[[Path], None]]:
        """Return a function that draws the figure of each experiment with runs, by file name."""
        return {f"scaling-{name}.svg": partial(self.draw, name) for name in EXPERIMENTS if self.of(name)}

    def draw(self, experiment: str, path: Path) -> None:
        """Draw the score, the alignment and the norm of the gradients over time: mean and range over seeds."""
        own = EXPERIMENTS[experiment]
        panels = {
            own.score: own.heading,
            "alignment": "alignment: mean cosine with W",
            "gradient_norm": "gradient norm",
        }
        import_extra("matplotlib", "drawing figures", "plot").use("Agg")
        plt = import_extra("matplotlib.pyplot", "drawing figures", "plot")
        with plt.rc_context(STYLE):
            figure, axes = plt.subplots(1, len(panels), figsize=(10.5, 3.0), layout="constrained")
            for axis, (name, heading) in zip(axes, panels.items(), strict=True):
                axis.set(xlabel=own.clock, ylabel=heading, yscale="log" if name == "gradient_norm" else "linear")
                axis.grid(alpha=0.3)
                for rule in self.rules(experiment):
                    _draw_line(axis, rule, [run.read(name) for run in self.of(experiment, rule)])
            named = dict(zip(*reversed(axes[0].get_legend_handles_labels()), strict=True))
            figure.legend(named.values(), named.keys(), loc="outside right upper", frameon=False, fontsize=7)
            with replace_atomically(path) as temporary:
                figure.savefig(temporary, format="svg", metadata=METADATA["svg"])
            plt.close(figure)


def _draw_line(axis: Any, rule: str, curves: list[list[tuple[float, float]]]) -> None:
    """Draw the mean of some seeds' curves, and their range as a shade."""
    values: dict[float, list[float]] = {}
    for x, y in (point for curve in curves for point in curve):
        values.setdefault(x, []).append(y)
    if not values:
        return
    xs, look = sorted(values), style_rule(rule)
    marks = {"marker": MARKERS[look.symbol], "ms": 3, "markevery": max(1, len(xs) // 8)}
    axis.plot(
        xs, [statistics.fmean(values[x]) for x in xs], label=rule, color=look.colour, ls=look.dash, lw=1.2, **marks
    )
    low, high = ([end(values[x]) for x in xs] for end in (min, max))
    axis.fill_between(xs, low, high, color=look.colour, alpha=0.15, lw=0)


def format_mean(values: list[float], digits: int, signed: bool = False) -> str:
    """Return the mean of a value per seed, with its standard deviation if there are several.

    >>> format_mean([94.0, 94.5], 2), format_mean([0.25], 2, signed=True), format_mean([], 2)
    ('94.25 ± 0.35', '+0.25', '–')
    """
    if not values:
        return "–"
    mean = f"{statistics.fmean(values):{'+' if signed else ''}.{digits}f}"
    return f"{mean} ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else mean


def format_number(value: float, digits: int) -> str:
    """Return a number with so many significant digits.

    >>> format_number(12345.0, 2), format_number(0.98765, 3)
    ('12,000', '0.988')
    """
    return f"{float(f'{value:.{digits}g}'):,g}"


def _list_options(settings: dict[str, Any]) -> list[str]:
    """Return the options of a command with these settings; Kolen-Pollack's own only for it."""
    own = () if settings["rule"] == KOLEN_POLLACK else OWN_SETTINGS
    shown = {name: value for name, value in settings.items() if name not in (*NOT_SETTINGS[1:], "text", *own)}
    words = [shlex.quote(settings["text"])] if "text" in settings else []
    for name, value in shown.items():
        if value is not None and value is not False:
            words += [f"--{name.replace('_', '-')}", *([] if value is True else [shlex.quote(f"{value}")])]
    return words


def render_step_times(steps: dict[str, Any]) -> str:
    """Return the table of measured steps as Markdown: a row for each model and way of running, a column for each rule."""
    rows = steps["modules"]["rows"]
    rules = [rule for rule in dict.fromkeys(row["rule"] for row in rows) if rule != REFERENCE]
    times = {(row["model"], row["how"], row["rule"]): row for row in rows}
    lines = [
        f"| network | | `{REFERENCE}` | {' | '.join(f'`{rule}`' for rule in rules)} |",
        f"|---|---|---|{'---|' * len(rules)}",
    ]
    for model, how in dict.fromkeys((row["model"], row["how"]) for row in rows):
        found = [times.get((model, how, rule)) for rule in rules]
        others = ["–" if row is None else f"{row['step_ms']:.1f} ms, {row['of_bp']:.2f} ×" for row in found]
        lines.append(f"| {model} | {how} | {times[model, how, REFERENCE]['step_ms']:.1f} ms | {' | '.join(others)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python tools/scaling.py", description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, nargs="?", default=ROOT / "results" / "scaling")
    scaling = Scaling(parser.parse_args().folder)
    for name, experiment in EXPERIMENTS.items():
        print(f"{experiment.title}\n\n{scaling.table(name)}\n")
    if scaling.unfinished:
        print(f"Ended early: {scaling.missing()}")


if __name__ == "__main__":
    main()
