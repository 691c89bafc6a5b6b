"""The finding at the top of the page: how every rule compares with the control on one network and data set, in words."""

from dataclasses import dataclass

from apical.bench.cells import METRICS, Difference, find_rule_judgement, group_by
from apical.bench.export import TITLES
from apical.core.learner import Claims
from apical.plausibility.criteria import format_verdicts
from apical.report.groups import Group, choose_headlines, compare_groups
from apical.report.overview import Entry

NARROW = "\N{NARROW NO-BREAK SPACE}"
MAX_NAMES = 7
"""At most so many rules are named in a sentence."""


@dataclass(frozen=True)
class Bar:
    """A rule in the chart: its difference to the control, and its measured criteria."""

    entry: Entry
    over: Difference
    criteria: Claims | None

    @property
    def rule(self) -> str:
        return self.entry.group.place.rule

    @property
    def kept(self) -> int | None:
        """How many criteria it keeps; None if one of them is not known."""
        return None if self.criteria is None or None in self.criteria else sum(map(bool, self.criteria))

    @property
    def marks(self) -> str:
        return format_verdicts(self.criteria)


@dataclass(frozen=True)
class Finding:
    """Rules on one network and data set, evaluated in the same way, from the best to the worst."""

    control: Group
    bars: list[Bar]
    others: int
    """How many other networks, data sets and evaluations could have been chosen."""

    @property
    def title(self) -> str:
        """The data set and network, and what is special about the evaluation."""
        _, model, data = self.control.place
        caveat = f" ({self.control.caveat})" if self.control.caveat else ""
        return f"{TITLES.get(data, data)} with {TITLES.get(model, model)}{caveat}"

    @property
    def heading(self) -> str:
        return METRICS[self.control.metric].heading

    @property
    def seeds(self) -> str:
        """The number of seeds of the rules as text, such as "3 to 5"."""
        counts = sorted({len(bar.entry.group.scores) for bar in self.bars})
        return " to ".join(map(str, dict.fromkeys([counts[0], counts[-1]])))

    @property
    def limits(self) -> tuple[float, float]:
        """The ends of the scale: all differences with two standard errors, and zero."""
        low = min(0.0, *(bar.over.mean - 2 * bar.over.error for bar in self.bars))
        high = max(0.0, *(bar.over.mean + 2 * bar.over.error for bar in self.bars))
        return low, high if low < high else low + 1.0

    def place(self, over: Difference) -> list[float]:
        """Return where a bar is on the scale, in percent: zero, the difference, and two standard errors around it."""
        low, high = self.limits
        ends = (0.0, over.mean, over.mean - 2 * over.error, over.mean + 2 * over.error)
        return [round(100 * (value - low) / (high - low), 2) for value in ends]

    @property
    def sentences(self) -> list[str]:
        """The best rule that keeps all criteria, the best rule beside bp, and which rules do not beat the control."""
        return [self._describe_plausible(), self._describe_best(), self._describe_failures()]

    def _describe_plausible(self) -> str:
        where = f"On {self.title}"
        able = [bar for bar in self.bars if bar.kept == 3]
        if not able:
            unknown = [bar.rule for bar in self.bars if bar.kept is None and False not in (bar.criteria or ())]
            undecided = f"; of {_join(unknown)} it is not known" if unknown else ""
            return f"{where}, no rule is known to keep all three criteria{undecided}."
        best = max(able, key=lambda bar: (bar.over.learns, bar.over.mean))
        if best.over.learns:
            return f"{where}, the best rule that keeps all three criteria is {self._describe(best)}."
        return f"{where}, no rule that keeps all three criteria beats the control; the best is {self._describe(best)}."

    def _describe_best(self) -> str:
        best = next((bar for bar in self.bars if bar.rule != "bp"), None)
        if best is None:
            return "There is no other rule than `bp`."
        criteria = _describe_criteria(best.criteria)
        bp = next((bar.entry.group for bar in self.bars if bar.rule == "bp"), None)
        difference = compare_groups(best.entry.group, bp)
        if difference is None:
            return (
                f"The best rule is {self._describe(best)}; it {criteria}, and there are too few runs of `bp` beside it."
            )
        beside = "equal to it within two standard errors" if difference.is_within_error else self._format(difference)
        score = f"{_quote(best.rule)} ({self._format_score(best.entry.group)})"
        return f"The best rule beside `bp` is {score}, {beside}; it {criteria}."

    def _describe_failures(self) -> str:
        failing = [bar.rule for bar in self.bars if not bar.over.learns]
        beat = f"{len(self.bars) - len(failing)} of {len(self.bars)} rules beat the control by more than two standard errors"
        return f"{beat}; {_join(failing)} {'do' if len(failing) > 1 else 'does'} not." if failing else f"{beat}."

    def _describe(self, bar: Bar) -> str:
        return f"{_quote(bar.rule)} ({self._format_score(bar.entry.group)}), {self._format(bar.over)} than the control"

    def _format_score(self, group: Group) -> str:
        metric = METRICS[group.metric]
        name, percent, _ = metric.heading.partition(" %")
        return f"{name} {group.mean:.{metric.digits}f}{percent.replace(' ', NARROW)}"

    def _format(self, difference: Difference) -> str:
        metric = METRICS[self.control.metric]
        unit = " points" if metric.heading.endswith("%") else ""
        return f"{abs(difference.mean):.{metric.digits}f}{unit} {'better' if difference.mean >= 0 else 'worse'}"


def find_finding(entries: list[Entry]) -> Finding | None:
    """Choose the network, data set and evaluation on which most rules can be compared with the control.

    If several have as many rules, take the one where bp is furthest above the control: there it matters most how hidden
    layers learn. None if no rule can be compared.
    """
    found = []
    for here in group_by(entries, lambda entry: (entry.group.place[1:], entry.group.evaluation_key)).values():
        chosen = {group.key for group in choose_headlines([entry.group for entry in here]).values()}
        headlines = [entry for entry in here if entry.group.key in chosen]
        bars = [
            _make_bar(entry, entry.over_control) for entry in headlines if not entry.is_control and entry.over_control
        ]
        if bars:
            control = next(entry.group for entry in headlines if entry.is_control)
            found.append((control, sorted(bars, key=lambda bar: -bar.over.mean)))
    if not found:
        return None
    control, bars = max(found, key=lambda one: (len(one[1]), *(bar.over.mean for bar in one[1] if bar.rule == "bp")))
    return Finding(control, bars, len(found) - 1)


def _make_bar(entry: Entry, over: Difference) -> Bar:
    return Bar(entry, over, find_rule_judgement(entry.group.place.rule, [entry.group.cell]).criteria)


def _describe_criteria(criteria: Claims | None) -> str:
    """Return what is known of a rule's criteria, as a phrase.

    >>> _describe_criteria(Claims(False, True, False)), _describe_criteria(Claims(True, True, True))
    ('breaks C1 and C3', 'keeps all three criteria')
    """
    marks = {f"C{number}": kept for number, kept in enumerate(criteria or (None,) * 3, 1)}
    broken = [name for name, kept in marks.items() if kept is False]
    unknown = [name for name, kept in marks.items() if kept is None]
    if not broken and not unknown:
        return "keeps all three criteria"
    parts = [f"breaks {' and '.join(broken)}"] if broken else []
    if unknown:
        parts.append(f"is not judged on {' and '.join(unknown)}")
    return " and ".join(parts)


def _quote(rule: str) -> str:
    """Mark a name as code, for the page."""
    return f"`{rule.replace('`', chr(39))}`"


def _join(rules: list[str]) -> str:
    """Name the rules; of many, name some and count the others."""
    few = rules if len(rules) <= MAX_NAMES else rules[: MAX_NAMES - 1]
    *first, last = [*map(_quote, few), *([f"{len(rules) - len(few)} more"] if len(few) < len(rules) else [])]
    return f"{', '.join(first)} and {last}" if first else last
