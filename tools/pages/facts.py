"""What the results say, for the templates of pages: scores and paired differences with their intervals, and tables."""

import json
import math
import statistics
from collections.abc import Callable, Iterable
from typing import Any

from apical.bench.cells import COST, HIGHER_IS_BETTER, METRICS, TABLE_1, Cell, find_figure, group_by, read_cosines
from apical.bench.defaults import build_settings, find_settings, sort_best_first
from apical.core.registry import rule_names
from apical.errors import ApicalError
from apical.plausibility.criteria import find_claims, format_verdicts, read_verdicts
from tools.pages.experiments import describe_experiment, find_best_trial
from tools.pages.section import PAPER, Cells, count_runs
from tools.pages.significance import Estimate, correct_with_holm, estimate, name_difference, subtract
from tools.pages.trials import Trials, collect_whole_scores, compute_percentage, expect_best, select_whole_trials

Scores = dict[int, float]
Place = tuple[str, str]
"""A network and a data set."""
PLACES: list[Place] = [(model, data) for model in ("mlp", "cnn") for data in TABLE_1]
"""The eight columns of table 1."""
NUMBERS = ("none", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")


class Facts:
    """Functions that a template calls. `contradicted` collects the sentences that the results do not bear out."""

    def __init__(self, cells: Cells, table: Callable[[str], list[str]], trials: Trials) -> None:
        self.cells = cells
        self._table = table
        self._trials = trials
        self.contradicted: list[str] = []

    def table(self, asked: str) -> str:
        """Return the table that a block would ask for."""
        return "\n".join(self._table(asked))

    def find(self, suite: str, rule: str, model: str, data: str, **varied: Any) -> Cell:
        """Find the cell of a suite, by the settings that the suite varies."""
        for cell in self.cells(suite):
            job = cell.job
            if (job.rule, job.model, job.data) == (rule, model, data) and varied.items() <= job.varied.items():
                return cell
        raise ApicalError(f"the suite {suite} has no cell of {rule} on {model} and {data} with {varied}.")

    def scores(self, suite: str, rule: str, model: str, data: str, *, best: bool = False, **varied: Any) -> Scores:
        """Return the score of each seed: of the last epoch, or of the best test epoch."""
        cell = self.find(suite, rule, model, data, **varied)
        if not best:
            return cell.scores(cell.metrics[0])
        read = METRICS[cell.metrics[0]].read
        values = {seed: read(history, "paper") for seed, history in cell.histories.items()}
        return {seed: value for seed, value in values.items() if value is not None}

    def score(self, suite: str, rule: str, model: str, data: str, **options: Any) -> Estimate:
        """Return the mean score of a cell with its interval."""
        metric = self.find(suite, rule, model, data, **_without_best(options)).metrics[0]
        return estimate([*self.scores(suite, rule, model, data, **options).values()], METRICS[metric].digits)

    def gain(self, suite: str, rule: str, other: str, model: str, data: str, **options: Any) -> Estimate:
        """Return how much better a rule is than another, seed by seed. Settings that the other does not vary are ignored."""
        varied = _without_best(options)
        cell = self.find(suite, rule, model, data, **varied)
        known = {name for c in self.cells(suite) if c.job.rule == other for name in c.job.varied}
        theirs = {name: value for name, value in options.items() if name in known or name == "best"}
        difference = subtract(
            self.scores(suite, rule, model, data, **options), self.scores(suite, other, model, data, **theirs)
        )
        sign = 1 if cell.metrics[0] in HIGHER_IS_BETTER else -1
        return estimate([sign * value for value in difference.values()], METRICS[cell.metrics[0]].digits)

    def average(self, suite: str, rule: str, places: Iterable[Place] = PLACES) -> Scores:
        """Return the score of each seed, averaged over networks and data sets; none if a place has no runs."""
        found = [self.scores(suite, rule, *place) for place in places]
        seeds = set.intersection(*(set(scores) for scores in found))
        return {seed: statistics.fmean(scores[seed] for scores in found) for seed in sorted(seeds)}

    def average_score(self, suite: str, rule: str, places: Iterable[Place] = PLACES) -> Estimate:
        """Return the mean score over networks and data sets with its interval over seeds."""
        return estimate([*self.average(suite, rule, places).values()])

    def average_gain(self, suite: str, rule: str, other: str, places: Iterable[Place] = PLACES) -> Estimate:
        """Return how much better a rule is than another on average over networks and data sets, seed by seed."""
        places = list(places)
        return estimate([*subtract(self.average(suite, rule, places), self.average(suite, other, places)).values()])

    def depth_gain(self, rule: str, deep: str, shallow: str) -> Estimate:
        """Return how much better a rule is on one network of the suite `depth` than on another, seed by seed."""
        found = [self.scores("depth", rule, model, "mnist") for model in (deep, shallow)]
        return estimate([*subtract(*found).values()])

    def compare(self, suite: str, rule: str, other: str, places: Iterable[Place] = PLACES) -> dict[Place, int]:
        """Return for each network and data set 1 if a rule is better than another, −1 if it is worse, 0 if neither.

        Paired t tests over seeds at the 5 % level, with Holm's correction for the number of places.
        """
        places = list(places)
        gains = [self.gain(suite, rule, other, *place) for place in places]
        corrected = correct_with_holm([gain.p for gain in gains])
        words = {"better": 1, "worse": -1}
        return {
            place: words.get(name_difference(gain, p), 0)
            for place, gain, p in zip(places, gains, corrected, strict=True)
        }

    def paper(self, rule: str, model: str, data: str, metric: str = "accuracy") -> float:
        """Return the paper's figure."""
        figure = find_figure(rule, model, data, metric)
        if figure is None:
            raise ApicalError(f"the paper has no {metric} of {rule} on {model} and {data}.")
        return figure.accuracy

    def paper_error(self, rule: str, model: str, data: str) -> float | None:
        """Return the paper's ± of an accuracy; None if it has none."""
        figure = find_figure(rule, model, data, "accuracy")
        return None if figure is None else figure.error

    def paper_average(self, rule: str, places: Iterable[Place] = PLACES) -> float:
        """Return the mean of the paper's accuracies over networks and data sets."""
        return statistics.fmean(self.paper(rule, *place) for place in places)

    def seconds(self, suite: str, rule: str, model: str, data: str, **varied: Any) -> float | None:
        """Return the seconds of an epoch; None if they were not measured."""
        return self.find(suite, rule, model, data, **varied).seconds_per_epoch

    def paper_seconds(self, rule: str, model: str) -> float:
        """Return the paper's seconds of an epoch."""
        return COST[rule, model][0]

    def best_rate(self, suite: str, rule: str, model: str, data: str) -> float | None:
        """Return the learning rate with the best mean score among the cells of a suite; None without runs."""
        here = [c for c in self.cells(suite) if (c.job.rule, c.job.model, c.job.data) == (rule, model, data)]
        rated = [c for c in here if "lr" in c.job.varied and c.scores(c.metrics[0])]
        sign = 1 if rated and rated[0].metrics[0] in HIGHER_IS_BETTER else -1
        means = {c.job.varied["lr"]: sign * statistics.fmean(c.scores(c.metrics[0]).values()) for c in rated}
        return max(means, key=lambda rate: means[rate]) if means else None

    def criteria(self, rule: str) -> str:
        """Return the audit's verdicts on a rule as text."""
        return format_verdicts(read_verdicts()[rule])

    def rules_with_all_criteria(self, whose: str) -> list[str]:
        """Return the rules that meet all three criteria according to the "paper" or to the "audit"."""
        found = find_claims if whose == "paper" else read_verdicts().get
        return [rule for rule in rule_names() if (verdict := found(rule)) is not None and all(verdict)]

    def missing_runs(self) -> dict[str, tuple[int, int]]:
        """Return how many runs of a suite are finished and how many there are, for each suite that is not complete."""
        counts = {suite: count_runs(self.cells(suite)) for suite in PAPER}
        return {suite: (done, wanted) for suite, (done, wanted) in counts.items() if done < wanted}

    def rules_with_decay_trials(self, data: str, model: str, rules: Iterable[str]) -> list[str]:
        """Return those rules that had a trial with a weight decay, of the optimiser's or of their own."""
        return [rule for rule in rules if self.count_trials(data, model, rule, "decay")]

    def count_trials(self, data: str, model: str, rule: str, word: str) -> int:
        """Return how many trials of a rule have a word in their settings."""
        rows = [row for rows in self._trials.values() for row in rows]
        return sum(
            (row["data"], row["model"], row["rule"]) == (data, model, rule) and word in json.dumps(row.get("trial", {}))
            for row in rows
        )

    def rules_at_an_end(self, data: str, model: str) -> list[str]:
        """Return the rules whose best trial has the smallest or the largest rate of all their trials."""
        rows = [row for rows in self._trials.values() for row in rows if (row["data"], row["model"]) == (data, model)]
        found = []
        for rule, own in group_by(
            [row for row in rows if "lr" in row.get("trial", {})], lambda row: row["rule"]
        ).items():
            rates = [row["trial"]["lr"] for row in own]
            if sort_best_first(own)[0]["trial"]["lr"] in (min(rates), max(rates)):
                found.append(str(rule))
        return found

    def differences(self) -> list[tuple[str, float]]:
        """Return the data set and our accuracy less the paper's, for each cell of table 1 that the paper has."""
        cells = [cell for cell in self.cells("table1") if cell.find_figure("accuracy") and cell.scores("accuracy")]
        return [(cell.job.data, measure_difference(cell)) for cell in cells]

    def cosine(self, suite: str, rule: str, model: str, data: str) -> float:
        """Return the cosine of Θ with W after the last epoch, the mean over layers and seeds; NaN if it was not measured."""
        ends = [history[-1] for history in self.find(suite, rule, model, data).histories.values()]
        found = [cosine for end in ends for cosine in read_cosines(end, "feedback")]
        return statistics.fmean(found) if found else math.nan

    def training_accuracy(self, suite: str, rule: str, model: str, data: str, epoch: int = -1) -> float:
        """Return the percentage of training images that are right in an epoch, by default the last; NaN without runs."""
        return self._read_epoch(self.find(suite, rule, model, data), "accuracy", epoch)

    def test_accuracy(self, suite: str, rule: str, model: str, data: str, epoch: int, seed: int | None = None) -> float:
        """Return the percentage of test images that are right after an epoch, of one seed or on average."""
        return self._read_epoch(self.find(suite, rule, model, data), "test_accuracy", epoch, seed)

    def _read_epoch(self, cell: Cell, key: str, epoch: int, seed: int | None = None) -> float:
        histories = [history for s, history in cell.histories.items() if seed in (None, s)]
        values = [100 * history[epoch - 1 if epoch > 0 else epoch][key] for history in histories]
        return statistics.fmean(values) if values else math.nan

    def best_epochs(self, suite: str, rule: str, model: str, data: str) -> list[int]:
        """Return the best test epoch of each seed."""
        histories = self.find(suite, rule, model, data).histories.values()
        return [1 + max(range(len(h)), key=lambda k: h[k]["test_accuracy"]) for h in histories]

    def held_out(self, rule: str, model: str, data: str, *, whole: bool = False, **settings: Any) -> float:
        """Return the best accuracy on held-out images of the trials with these settings; NaN if none has been run."""
        return find_best_trial(self._trials, rule, model, data, whole=whole, **settings)

    def expected_best(self, rule: str, model: str, data: str, count: int) -> float:
        """Return the expected best of `count` of the trials of the whole length, drawn at random; NaN if there are fewer."""
        return expect_best(collect_whole_scores(self._trials, data, model).get(rule, []), count)

    def held_out_with_decay(self, rule: str, model: str, data: str, decay: str) -> float:
        """Return the best trial of the whole length without a weight decay ("none"), with "adam"'s or with "adamw"'s."""
        name = "decay" if rule == "dll:kolen-pollack" else "weight_decay"
        chosen: dict[str, Any] = {"optimizer": None, name: None if decay == "none" else 0.001}
        settings = {"optimizer": "adamw"} if decay == "adamw" else chosen
        return self.held_out(rule, model, data, whole=True, **settings)

    def decay_gain(self, rule: str, model: str, data: str, decay: str) -> float:
        """Return by how many points a decay changes the best trial; NaN if one of the two has not been run."""
        with_decay, without = (self.held_out_with_decay(rule, model, data, kind) for kind in (decay, "none"))
        return with_decay - without

    def better_trials(self, data: str, suite: str) -> list[tuple[str, str, float, float]]:
        """Return the rules of a suite whose best trial of the whole length does not have the recorded settings.

        If the recorded settings are in no trial, the test score of the suite's runs stands for them: a rule whose score is
        higher than its best trial is left out.

        Returns:
            For each of them its name, the network, and the percentage of held-out examples that are right with the recorded
            settings (NaN if they are in no trial) and with the best ones.
        """
        found = []
        trials = group_by(select_whole_trials(self._trials, data), lambda row: (row["rule"], row["model"]))
        places = {(cell.job.rule, cell.job.model) for cell in self.cells(suite) if cell.job.data == data}
        for (rule, model), rows in ((place, rows) for place, rows in trials.items() if place in places):
            best = max(compute_percentage(row) for row in rows)
            used = [compute_percentage(row) for row in rows if _has_recorded_settings(row)]
            if best not in used and (used or not self.score(suite, rule, model, data).mean > best):
                found.append((rule, model, max(used, default=math.nan), best))
        return found

    def experiment(self, command: str) -> str:
        """Return the command of an experiment with a link to its results and how much of it has been run."""
        return describe_experiment(command, self.cells, self._trials)

    def divide_settings(self, name: str, place: tuple[str, str, str], other: tuple[str, str, str]) -> float:
        """Return a recorded setting, such as `lr`, of a rule, network and data set divided by that of another place."""
        ours, theirs = ({**(s := find_settings(*p)), **s.get("options", {})}[name] for p in (place, other))
        return float(f"{ours / theirs:.6g}")

    def hold(self, condition: bool, sentence: str) -> None:
        """Note a sentence of the page if the results contradict it."""
        if not condition:
            self.contradicted.append(sentence)

    def number(self, count: int) -> str:
        """Return a small number as a word."""
        return NUMBERS[count] if count < len(NUMBERS) else f"{count}"


def measure_difference(cell: Cell) -> float:
    """Return our mean accuracy less the paper's."""
    theirs = cell.find_figure("accuracy")
    assert theirs is not None
    return statistics.fmean(cell.scores("accuracy").values()) - theirs.accuracy


def _has_recorded_settings(row: dict[str, Any]) -> bool:
    """Return whether a trial has the settings that are recorded for its rule, network and data set."""
    place = row["rule"], row["model"], row["data"]
    usual = {"optimizer": "adam", "optimizer_options": {}, "options": {}}
    tried = {**usual, **build_settings(*place, row["trial"], whole=True)}
    return tried.items() >= {**usual, **find_settings(*place)}.items()


def _without_best(options: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if name != "best"}
