"""Every result that falls short is explained, nothing else is, and what counts as short is counted from the store.

No diagnosis has a result that is typed by hand, and each names an experiment that exists.
"""

import contextlib
import math
import re
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from apical.bench import suites
from apical.bench.cells import Cell, load_cells
from apical.bench.declaration import Request
from apical.bench.defaults import LIKE, find_settings, list_trials
from apical.bench.store import Outcome, Store
from apical.bench.suites import Job, list_jobs
from apical.errors import ApicalError
from apical.report import open_results
from pages import ROOT
from stores import fill, outcome
from tools.pages.blocks import Results, load_results
from tools.pages.experiments import describe_experiment, find_best_trial
from tools.pages.notes import (
    EXPRESSION,
    SETTING,
    Notes,
    find_counterpart,
    find_problems,
    find_shortfalls,
    find_typed_numbers,
    load_notes,
)
from tools.pages.section import PAPER, read_cells
from tools.pages.templates import MACROS, render_diagnoses


def only(suite: str = "table1", **choice: Any) -> list[Job]:
    return list_jobs(suites.load(suite), Request(**choice))


def one(rule: str, model: str = "mlp", data: str = "mnist") -> Job:
    (job,) = only(rules=[rule], models=[model], data=[data])
    return job


def put(store: Store, job: Job, scores: list[float]) -> None:
    assert job.declaration is not None
    fill(store, job.declaration, scores)


def cell(store: Store, job: Job) -> Cell:
    (found,) = load_cells([job], store)
    return found


def found(store: Store, suite: str = "table1") -> dict[str, list[Cell]]:
    return {suite: load_cells(only(suite), store)}


# What falls short.


@pytest.mark.parametrize(("shift", "short"), [(-0.01, True), (0.01, False)])
def test_short_of_the_paper_is_more_than_one_standard_error_of_ours(shift: float, short: bool, store: Store) -> None:
    deviations = [-0.3, -0.1, 0.1, 0.3]
    error = statistics.stdev(deviations) / 4**0.5
    scores = [98.62 - error + shift + deviation for deviation in deviations]  # the paper's 98.62
    put(store, one("bp"), scores)
    said = find_shortfalls(cell(store, one("bp")), None, {})
    assert said == ([f"{98.62 - statistics.fmean(scores):.2f} below the paper's 98.62"] if short else [])


@pytest.mark.parametrize(("gain", "short"), [(0.9, True), (1.1, False)])
def test_short_of_the_control_is_less_than_two_standard_errors_of_the_paired_difference(
    gain: float, short: bool, store: Store
) -> None:
    noise = [-1.0, -0.5, 0.5, 1.0]
    error = statistics.stdev(noise) / 4**0.5
    control = [60.0, 90.0, 70.0, 80.0]  # whose own spread does not matter
    put(store, one("readout"), control)
    put(store, one("dll:released"), [c + 2 * gain * error + n for c, n in zip(control, noise, strict=True)])
    said = find_shortfalls(cell(store, one("dll:released")), cell(store, one("readout")), {})
    assert bool(said) is short
    assert not short or said == [
        f"not better than `readout` by two standard errors ({2 * gain * error:+.2f} ± {error:.2f})"
    ]


def test_short_of_a_goal_of_ours_is_any_mean_below_it(store: Store) -> None:
    put(store, one("ff", "cnn"), [89.0, 90.8, 89.0, 90.8])  # 89.9
    goal = {"ff/cnn/mnist": 90.0}
    assert find_shortfalls(cell(store, one("ff", "cnn")), None, goal) == ["0.10 below our own goal of 90"]
    assert find_shortfalls(cell(store, one("ff", "cnn")), None, {"ff/cnn/mnist": 89.9 - 1e-9}) == []
    assert find_shortfalls(cell(store, one("ff", "cnn")), None, {"ff/mlp/mnist": 99.0}) == []


def test_an_error_above_the_papers_falls_short(store: Store) -> None:
    (job,) = only("images-large", rules=["dll"], data=["tiny_imagenet"])  # the paper: 82.90 % wrong
    put(store, job, [16.0, 16.1, 15.9, 16.0])
    assert find_shortfalls(cell(store, job), None, {}) == ["1.10 above the paper's 82.90"]
    (better,) = only("images-large", rules=["bp"], data=["tiny_imagenet"])  # 78.60 % wrong
    put(store, better, [30.0] * 4)
    assert find_shortfalls(cell(store, better), None, {}) == []


def test_a_cell_is_not_judged_before_every_seed_has_ended(store: Store) -> None:
    job = one("bp")
    assert find_shortfalls(cell(store, job), None, {}) == []
    put(store, job, [50.0, 50.0, 50.0])
    assert find_shortfalls(cell(store, job), None, {}) == []
    assert job.declaration is not None
    store.claim(job.declaration, [3])
    assert find_shortfalls(cell(store, job), None, {}) == []
    store.finish(job.declaration, [3], outcome({3: [50.0]}, {3: "boom"}))
    assert len(find_shortfalls(cell(store, job), None, {})) == 1


def test_a_cell_whose_every_run_failed_falls_short(store: Store) -> None:
    job = one("np")
    assert job.declaration is not None
    store.claim(job.declaration, job.seeds)
    store.finish(job.declaration, job.seeds, Outcome([], dict.fromkeys(job.seeds, "boom"), {}))
    assert find_shortfalls(cell(store, job), None, {}) == ["failed in every run"]


def test_the_counterpart_has_the_same_network_data_and_settings(store: Store) -> None:
    every = load_cells(only("theta"), store)
    printed = next(c for c in every if c.job.rule == "dll" and c.job.varied == {"theta_rate": 0.1, "theta_std": 1.0})
    for rule, varied in (
        ("dll:released", {"theta_rate": 0.1, "theta_std": 1.0}),
        ("dll:frozen", {"theta_std": 1.0}),  # which has no rate
    ):
        other = find_counterpart(printed, every, rule)
        assert other is not None
        assert (other.job.rule, other.job.model, other.job.data) == (rule, "mlp", "mnist")
        assert other.job.varied == varied
    assert find_counterpart(printed, every, "dll") is None  # not its own
    assert find_counterpart(printed, every) is None  # there is no control


# What the file must say.


def test_every_cell_of_table_1_that_falls_short_needs_a_diagnosis_and_no_other_may_have_one(store: Store) -> None:
    put(store, one("bp"), [90.0] * 4)  # 98.62
    put(store, one("fa"), [99.0] * 4)  # 91.87
    short = {"table1/bp/mlp/mnist": "because"}
    assert find_problems(Notes(), found(store)) == [
        "table1/bp/mlp/mnist has no diagnosis: it is 8.62 below the paper's 98.62."
    ]
    assert find_problems(Notes(diagnoses=short), found(store)) == []
    assert find_problems(Notes(diagnoses={**short, "table1/fa/mlp/mnist": "because"}), found(store)) == [
        "table1/fa/mlp/mnist has a diagnosis but falls short of nothing: delete it."
    ]


def test_a_cell_without_runs_needs_no_diagnosis_but_may_have_one(store: Store) -> None:
    assert find_problems(Notes(), found(store)) == []
    assert find_problems(Notes(diagnoses={"table1/bp/mlp/mnist": "because"}), found(store)) == []


def test_cells_of_other_suites_may_have_a_diagnosis_if_they_fall_short(store: Store) -> None:
    wrong, right = (only("depth", models=["mlp-1024"], rules=["dll"]), only("depth", models=["mlp"], rules=["dll"]))
    put(store, wrong[0], [60.0] * 4)  # 71.15
    put(store, right[0], [99.0] * 4)  # 97.57
    every = found(store, "depth")
    assert find_problems(Notes(), every) == []
    assert find_problems(Notes(diagnoses={"depth/dll/mlp-1024/mnist": "because"}), every) == []
    (said,) = find_problems(Notes(diagnoses={"depth/dll/mlp/mnist": "because"}), every)
    assert said.endswith("delete it.")


@pytest.mark.parametrize(
    ("notes", "said"),
    [
        (Notes(diagnoses={"table1/bp/mlp/mnits": "x"}), "table1/bp/mlp/mnits is a cell of no suite."),
        (Notes(goals={"fff/cnn/mnist": 90.0}), "the goal fff/cnn/mnist is of no cell."),
        (Notes(absent={"mnist": "gone"}), "mnist is called absent but has results."),
    ],
)
def test_notes_on_unknown_cells_are_reported(notes: Notes, said: str, store: Store) -> None:
    put(store, one("fa"), [99.0] * 4)
    assert find_problems(notes, found(store)) == [said]


# The file.


def test_a_folder_without_the_file_has_no_notes(tmp_path: Path) -> None:
    assert load_notes(tmp_path) == Notes()


@pytest.mark.parametrize(
    "text",
    ["[diagnoses", "[diagnosis]\n", "diagnoses = 3", '[diagnoses]\na = ""', "[absent]\na = 3", '[goals]\na = "x"'],
)
def test_a_damaged_file_is_one_sentence(text: str, tmp_path: Path) -> None:
    (tmp_path / "diagnoses.toml").write_text(text)
    with pytest.raises(ApicalError, match=r"diagnoses\.toml cannot be read .* \[goals\], \[absent\]") as said:
        load_notes(tmp_path)
    assert "\n" not in str(said.value)


# What a diagnosis says.


@pytest.mark.parametrize(
    ("text", "typed"),
    [
        ("It reaches {{ score(*here) }} on CIFAR-10 after five epochs with `lr=0.001` and a tenth of the rate.", []),
        ("{% do hold(score(*here).mean > 90, '') %}{# 12 #}", []),
        ("It reaches {{ odd.test.light }}.", []),
        ("It reaches {{ 98.54 }} or {{ '46 %' }}.", ["98.54", "46"]),
        ("It reaches 98.54.", ["98.54"]),
        ("It reaches `98.54` of 46 %.", ["98.54", "46"]),
        (
            "Sixteen trials gained\ntwo points, a tenth of a point each.",
            ["Sixteen trials", "two points", "tenth of a point"],
        ),
    ],
)
def test_a_number_that_no_expression_fills_in_is_found(text: str, typed: list[str]) -> None:
    assert [" ".join(found.split()) for found in find_typed_numbers(text)] == typed


TRIALS = {
    "svhn-mlp-np": [],
    "whole-svhn-mlp-fa": [
        {"rule": "fa", "model": "mlp", "data": "svhn", "test_accuracy": share, "trial": trial}
        for share, trial in [
            (0.6, {"lr": 0.0003}),
            (0.7, {"lr": 0.0003, "optimizer_options": {"weight_decay": 0.001}}),
            (None, {"lr": 0.00015}),
        ]
    ],
}


def test_an_experiment_is_counted_and_linked(store: Store) -> None:
    def cells(name: str) -> list[Cell]:
        return read_cells(suites.load(name), store, Notes())

    def describe(command: str) -> str:
        return describe_experiment(command, cells, TRIALS)

    tune = "apical tune --rule fa --model mlp --data svhn"
    assert describe(f"{tune} --whole") == f"[`{tune} --whole`](trials/svhn-mlp.md) (3 of 4 trials)"
    bench = "apical bench table1 --rules bp,fa --models mlp --data mnist"
    assert describe(bench) == f"`{bench}` (not run yet)"
    put(store, one("bp"), [90.0] * 4)
    put(store, one("readout"), [80.0] * 4)  # which the command runs as well, and which was not asked for
    assert describe(bench) == f"[`{bench}`](table1.md) (4 of 8 runs)"
    for wrong, said in {
        "apical bench table9": "table9",
        "apical bench table1 --rules fff": "fff",
        "apical bench table1 --seeds 3": "--seeds",
        "apical tune --rule bp --model mlp --data svhn --whole": "no whole trials of bp",
        "apical tune --rule bp": "required",
        "apical train": "neither",
    }.items():
        with pytest.raises(ApicalError, match=said):
            describe(wrong)


def test_the_best_trial_has_the_settings_that_are_asked_for() -> None:
    place = "fa", "mlp", "svhn"
    assert find_best_trial(TRIALS, *place, whole=True) == pytest.approx(70)
    assert find_best_trial(TRIALS, *place, whole=True, lr=0.0003, weight_decay=None) == pytest.approx(60)
    assert find_best_trial(TRIALS, *place, whole=True, weight_decay=0.001) == pytest.approx(70)
    assert math.isnan(find_best_trial(TRIALS, *place, whole=True, lr=0.00015))  # it diverged
    with pytest.raises(ApicalError, match=r"has \{'lr': 7\}"):
        find_best_trial(TRIALS, *place, whole=True, lr=7)


def test_a_diagnosis_is_filled_in_and_a_sentence_that_the_results_contradict_is_named(
    store: Store, tmp_path: Path
) -> None:
    put(store, one("bp"), [90.0, 90.0, 91.0, 91.0])
    key = "table1/bp/mlp/mnist"
    text = """{{ score(*here).mean }}, {{ paper(rule, model, data) }}, {{ score(suite, "fa", model, data).mean }}
    {% do hold(score(*here).mean > 90, "above ninety") %}{% do hold(score(*here).mean > 91, "above ninety-one") %}"""
    results = load_results(store, tmp_path)
    notes, said = render_diagnoses(tmp_path, results._replace(notes=Notes(diagnoses={key: text})))
    assert notes.diagnoses == {key: "90.50, 98.62, not run yet"}
    assert said == [f"the diagnosis {key} says: above ninety-one"]
    for wrong in ("{{ scored(*here) }}", "{{ score(suite, 'fff', model, data) }}", "{{ score( }}"):
        with pytest.raises(ApicalError, match=f"the diagnosis {key} cannot be filled in"):
            render_diagnoses(tmp_path, results._replace(notes=Notes(diagnoses={key: wrong})))


# The diagnoses of the repository.


@pytest.fixture(scope="module")
def results() -> Iterator[Results]:
    if not (ROOT / "results").is_dir():
        pytest.skip("the results are not here: this is not a checkout")
    with open_results(ROOT / "results") as opened:
        yield load_results(opened, ROOT / "results")


def test_the_diagnoses_in_the_repository_are_complete_and_none_is_stale(results: Results) -> None:
    assert {"ff/cnn/mnist", "ep/cnn/cifar10"} <= results.notes.goals.keys()
    said = find_problems(results.notes, {name: results.cells(name) for name in PAPER})
    assert not said, "\n".join(said)


def test_no_diagnosis_has_a_result_that_is_typed(results: Results) -> None:
    texts = {**results.notes.diagnoses, "the macros": MACROS.read_text("utf-8")}
    assert {key: typed for key, text in texts.items() if (typed := find_typed_numbers(text))} == {}


def test_a_setting_that_a_diagnosis_names_is_one_that_was_used_or_listed(results: Results) -> None:
    for key, text in results.notes.diagnoses.items():
        _, rule, model, data = key.split("/")
        for name, value in SETTING.findall(EXPRESSION.sub("", text)):
            assert float(value) in set(list_values(name, rule, model, data)), f"{key}: {name}={value}"


def list_values(name: str, rule: str, model: str, data: str) -> Iterator[Any]:
    """The values of a setting: the recorded one, and those of listed trials."""
    recorded = find_settings(rule, model, data)
    yield from (recorded.get(name), recorded.get("options", {}).get(name))
    for place in (data, LIKE.get(data, data)):
        for whole in (False, True):
            with contextlib.suppress(ApicalError):  # where none are listed
                yield from (trial.get(name) for trial in list_trials(rule, model, place, whole=whole))


def test_every_diagnosis_names_an_experiment_that_exists_and_the_results_bear_it_out(results: Results) -> None:
    for key, text in results.notes.diagnoses.items():  # only `experiment` checks a command
        assert not re.search(r"`apical (bench|tune|train)", EXPRESSION.sub("", text)), key
    notes, contradicted = render_diagnoses(ROOT, results)
    assert contradicted == []
    for key, text in notes.diagnoses.items():
        assert re.search(r"`apical (bench|tune) [^`]*`", text), f"{key} names no experiment"
        assert "nan" not in text.split(), key
