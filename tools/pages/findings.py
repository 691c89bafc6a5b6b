"""The finding on the site's first page, and the table of `docs/which-rule.md`, both chosen by what the results say."""

import statistics
from collections.abc import Iterable
from typing import NamedTuple

from apical.bench.cells import Cell
from apical.bench.export import TITLES
from apical.core.learner import Claims
from apical.plausibility.criteria import format_verdicts, read_verdicts
from apical.report.groups import CONTROL
from tools.pages.notes import find_counterpart
from tools.pages.rule_tables import SUMMARY_SUITE
from tools.pages.section import Cells

PLACE = (SUMMARY_SUITE, "cnn", "cifar10")
RECURRENT_PLACE = ("table2", "rnn", "tinyshakespeare")
FAITHFUL = "all three"


class Choice(NamedTuple):
    """What somebody needs, and the rules that give it: by name, or all that keep C1 or all three criteria."""

    need: str
    rules: str
    place: tuple[str, str, str] = PLACE


CHOICES = (
    Choice("the accuracy to reach", "bp"),
    Choice("the control to beat: hidden layers stay random", CONTROL),
    Choice("the best accuracy without weight transport", "C1"),
    Choice("the same for a recurrent network", "C1", RECURRENT_PLACE),
    Choice("all three criteria", FAITHFUL),
    Choice("layers that learn on their own, from a classifier each", "local local:kolen-pollack local:random"),
    Choice("two passes up and none down", "ff"),
    Choice("a network that settles, an energy", "pc ipc ep"),
    Choice("targets in place of errors", "tp dtp"),
    Choice("no labels in hidden layers", "hebb softhebb"),
    Choice("nothing but the value of the loss", "wp np"),
    Choice("spikes", "rstdp rstdp:gradient"),
)


def render_finding(cells: Cells) -> list[str]:
    """Render three sentences on what the rules reach on the CIFAR-10 CNN, as a list in Markdown."""
    found = _find_cells(cells, PLACE)
    means = {rule: _compute_mean(cell) for rule, cell in found.items() if cell.histories}
    local, faithful = (find_best(found, kept) for kept in ("C1", FAITHFUL))
    if not {"bp", "fa", "dll", CONTROL} <= means.keys() or local is None or faithful is None:
        return ["The experiments were not run yet."]
    over = found[faithful].compare_with(found[CONTROL])
    missing = sum(rule not in means for rule in select_rules(found, FAITHFUL))
    return [
        f"- **Without weight transport** the best rule, `{local}`, reaches **{means[local]:.2f} %** on the CIFAR-10 CNN; "
        f"backpropagation reaches {means['bp']:.2f} %.",
        f"- **DLL as its paper prints it** reaches {means['dll']:.2f} %, and feedback alignment, whose feedback weights "
        f"never learn, {means['fa']:.2f} %.",
        f"- **Of the rules that keep all three criteria** of plausibility, the best so far, `{faithful}`, reaches "
        f"{means[faithful]:.2f} %, which {'beats' if over is not None and over.learns else 'does not beat'} the "
        f"{means[CONTROL]:.2f} % of hidden layers that stay random."
        + (f" ({missing} more were not run yet.)" if missing else ""),
    ]


def render_choices(cells: Cells) -> list[str]:
    """Render one row for each need, with the rule that reaches the highest accuracy among those that give it."""
    headings = ["you want", "use", "accuracy %", f"over `{CONTROL}`", "time / `bp`", "C1 C2 C3"]
    rows = [headings, ["---"] * len(headings), *(_make_row(choice, cells) for choice in CHOICES)]
    return [f"| {' | '.join(row)} |" for row in rows]


def _make_row(choice: Choice, cells: Cells) -> list[str]:
    found = _find_cells(cells, choice.place)
    rule = find_best(found, choice.rules)
    _, model, data = choice.place
    need = (
        f"{choice.need} ({TITLES.get(data, data)} {TITLES.get(model, model)})" if choice.place != PLACE else choice.need
    )
    if rule is None:
        return [need, "–", "not run yet", "–", "–", "–"]
    cell = found[rule]
    over = cell.compare_with(find_counterpart(cell, found.values()))
    return [
        need,
        f"[`{rule}`](rules/{rule.partition(':')[0]}.md)",
        f"{_compute_mean(cell):.2f}",
        "–" if over is None else over.text() + ("" if over.learns else " *"),
        _compare_times(cell, found.get("bp")),
        format_verdicts(read_verdicts()[rule]),
    ]


def find_best(found: dict[str, Cell], rules: str) -> str | None:
    """Return the rule with the highest mean accuracy among those that are finished; None if none is."""
    finished = [rule for rule in select_rules(found, rules) if found[rule].histories]
    return max(finished, key=lambda rule: _compute_mean(found[rule]), default=None)


def select_rules(found: Iterable[str], rules: str) -> list[str]:
    """Return those rules that are named, or that keep C1 or all three criteria. The control counts if it is named."""
    kept = {rule: claims for rule, claims in read_verdicts().items() if rule != CONTROL}
    chosen = {
        "C1": [rule for rule, claims in kept.items() if claims.c1],
        FAITHFUL: [rule for rule, claims in kept.items() if claims == Claims(True, True, True)],
    }.get(rules, rules.split())
    return [rule for rule in chosen if rule in set(found)]


def _find_cells(cells: Cells, place: tuple[str, str, str]) -> dict[str, Cell]:
    suite, model, data = place
    return {cell.job.rule: cell for cell in cells(suite) if (cell.job.model, cell.job.data) == (model, data)}


def _compute_mean(cell: Cell) -> float:
    return statistics.fmean(cell.scores("accuracy").values())


def _compare_times(cell: Cell, reference: Cell | None) -> str:
    """Return how many times as long an epoch takes as the reference's, as text."""
    if reference is None or cell.device != reference.device or not cell.seconds_per_epoch:
        return "–"
    return f"{cell.seconds_per_epoch / reference.seconds_per_epoch:.1f}" if reference.seconds_per_epoch else "–"
