"""Render the trials of `apical tune`: the number of trials of every rule, and a page with all of them for each data set."""

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from apical.bench.cells import Table, group_by
from apical.bench.declaration import make_safe_name
from apical.bench.defaults import WHOLE, format_score, read_trials, sort_best_first
from apical.bench.export import TITLES, format_markdown_rows
from apical.core.registry import rule_names
from apical.errors import ApicalError
from apical.printing import escape_markdown, quote_code

Trials = dict[str, list[dict[str, Any]]]
"""The trials of each file, by its name without suffix."""
Place = tuple[str, str]

EQUAL_COUNT = 3
"""How many trials each rule gets on the page of the trials where their numbers are made equal."""

INTRODUCTION = """# Trials

How settings were chosen: every trial of `apical tune` and of the searches before it, on a held-out tenth of the training
data. The test set was not looked at to choose among trials. But *where* to search was decided with it in two cases: the
trials of the whole length and those of SVHN were mostly listed for cells of table 1 that fell below the paper's figure on
the test set. Such a cell has had more trials than one that did not.

## The number of trials of every rule

{budget}

"a + b": a short trials (five epochs on MNIST and CIFAR-10) and b of the whole length. A rule without trials on a data set
has the settings of another one (FashionMNIST has MNIST's, SVHN has CIFAR-10's, Tiny-ImageNet has CIFAR-100's), or those that
all rules share.

## With the same number of trials

If {count} of the trials of the whole length are drawn at random, the best of them is expected to have this percentage of
held-out images of CIFAR-10 right. Beside it are the best of all and their number. The lists were not drawn at random, so
this shows how much a rule owes to its number of trials, not what other lists would give. Rules with fewer are left out.

{equal}

## All trials

{links}
"""
PAGE = """# Trials: {place}

On a held-out tenth of the training data, best first. ± is over the trial's seeds. [Which rule had how many](../trials.md).
"""


def load_trials(folder: Path) -> Trials:
    """Load all files of trials of a folder. Files of the same name in different folders are read as one.

    The files below `scaling` and `examples` are rows of the examples.
    """
    paths = [p for p in sorted(folder.rglob("*.jsonl")) if not {"scaling", "examples"} & {*p.relative_to(folder).parts}]
    found: Trials = {}
    for path in paths:
        rows = read_trials(path)
        if not rows or not all({"rule", "model", "data", "command"} <= row.keys() for row in rows):
            raise ApicalError(f"{path} is not a file of trials: each line has a rule, a model, its data and a command.")
        found[path.stem] = found.get(path.stem, []) + rows
    return found


def render_trial_pages(trials: Trials) -> dict[str, str]:
    """Render the page of the budget, and a page of trials for each data set and network, by path; none without trials."""
    if not trials:
        return {}
    files = group_by(trials.items(), lambda item: _get_place(item[1]))
    names = {place: make_safe_name(f"{place[0]}-{place[1]}") for place in files}
    links = "\n".join(
        f"- [{escape_markdown(f'{data}, {model}')}](trials/{name}.md)" for (data, model), name in sorted(names.items())
    )
    budget, equal = (
        "\n".join(lines) for lines in (render_budget(trials), render_expected_best(trials, "cifar10", EQUAL_COUNT))
    )
    texts = {"results/trials.md": INTRODUCTION.format(count=EQUAL_COUNT, budget=budget, equal=equal, links=links)}
    for (data, model), here in files.items():
        heading = PAGE.format(place=escape_markdown(f"{data}, {model}"))
        lines = [line for name, rows in here for line in _render_file(name, rows)]
        texts[f"results/trials/{names[data, model]}.md"] = "\n".join([heading, *lines])
    return texts


def _get_place(rows: list[dict[str, Any]]) -> Place:
    return str(rows[0]["data"]), str(rows[0]["model"])


def render_budget(trials: Trials, data: Iterable[str] = ()) -> list[str]:
    """Render the number of trials of each rule on each network and data set, or on these data sets, as lines of Markdown."""
    counts: dict[tuple[str, Place], list[int]] = {}
    for name, rows in trials.items():
        for row in rows:
            count = counts.setdefault((row["rule"], (row["data"], row["model"])), [0, 0])
            count[name.startswith(f"{WHOLE}-")] += 1
    chosen = set(data)
    places = sorted({place for _, place in counts if not chosen or place[0] in chosen})
    known = rule_names()
    rules = sorted({rule for rule, place in counts if place in places}, key=lambda rule: _rank(rule, known))
    lines = [[quote_code(rule), *(_format_count(counts.get((rule, place))) for place in places)] for rule in rules]
    headings = ["rule", *(f"{TITLES.get(d, d)} {TITLES.get(model, model)}" for d, model in places)]
    return format_markdown_rows(Table("", headings, lines))


def expect_best(scores: Iterable[float], count: int) -> float:
    """Return the expected best of `count` scores that are drawn at random, none of them twice.

    With the scores in rising order, s_1 ≤ … ≤ s_k, it is Σ_i C(i − 1, count − 1) / C(k, count) · s_i: the best one of
    a draw is s_i if the others come from the i − 1 below it. NaN if there are fewer scores than that.

    Rules that had different numbers of trials can be compared by it (Dodge et al., 2019, "Show Your Work"; this
    estimator is unbiased: Tang et al., 2020, "Showing Your Work Doesn't Always Work").

    >>> expect_best([3.0, 1.0, 2.0], 2)  # the best of 1 and 2, of 1 and 3, of 2 and 3
    2.6666666666666665
    """
    rising = sorted(scores)
    if len(rising) < count:
        return math.nan
    return sum(math.comb(i, count - 1) * score for i, score in enumerate(rising)) / math.comb(len(rising), count)


def select_whole_trials(trials: Trials, data: str) -> list[dict[str, Any]]:
    """Return the trials of the whole length on a data set that have an accuracy, or would have if they had not diverged."""
    files = [rows for name, rows in trials.items() if name.startswith(f"{WHOLE}-")]
    return [row for rows in files for row in rows if row["data"] == data and "test_accuracy" in row]


def compute_percentage(row: dict[str, Any]) -> float:
    """Return the accuracy of a trial in percent; that of a trial that diverged is 0."""
    return 100 * (row["test_accuracy"] or 0.0)


def collect_whole_scores(trials: Trials, data: str, model: str) -> dict[str, list[float]]:
    """Return the accuracies of each rule's trials of the whole length, in percent."""
    found: dict[str, list[float]] = {}
    for row in select_whole_trials(trials, data):
        if row["model"] == model:
            found.setdefault(row["rule"], []).append(compute_percentage(row))
    return found


def render_expected_best(trials: Trials, data: str, count: int) -> list[str]:
    """Render the expected best of `count` trials of the whole length of each rule, as lines of Markdown.

    Rules with fewer trials than that are left out of a network.
    """
    by_model = {model: collect_whole_scores(trials, data, model) for model in ("mlp", "cnn")}
    known = rule_names()
    rules = sorted(set().union(*by_model.values()), key=lambda rule: _rank(rule, known))
    lines = []
    for rule in rules:
        line = [quote_code(rule)]
        for scores in (by_model[model].get(rule, []) for model in by_model):
            expected = expect_best(scores, count)
            line += ["–"] * 3 if math.isnan(expected) else [f"{expected:.2f}", f"{max(scores):.2f}", f"{len(scores)}"]
        if set(line[1:]) != {"–"}:
            lines.append(line)
    columns = (f"expected best of {count}", "best of all", "trials")
    headings = ["rule", *(f"{TITLES[model]}: {column}" for model in by_model for column in columns)]
    return format_markdown_rows(Table("", headings, lines))


def _rank(rule: str, known: list[str]) -> float:
    return known.index(rule) if rule in known else math.inf


def _format_count(count: list[int] | None) -> str:
    if count is None:
        return "–"
    return f"{count[0]} + {count[1]}" if count[1] else f"{count[0]}"


def _render_file(name: str, rows: list[dict[str, Any]]) -> list[str]:
    """Render the trials of one file, best first."""
    best = sort_best_first(rows)
    machines = sorted({f"{row.get('device')}, torch {row.get('torch')}" for row in rows})
    return [
        f"## {escape_markdown(name)}\n",
        f"The best of {len(rows)} trials: {format_score(best[0])}. On {escape_markdown('; '.join(machines))}.\n",
        "| on the split | command |",
        "|---|---|",
        *(f"| {format_score(row)} | {quote_code(row['command'])} |" for row in best),
        "",
    ]
