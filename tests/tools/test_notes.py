"""Every result that falls short is explained, nothing else is, and what counts as short is counted from the store."""

import statistics
from pathlib import Path
from typing import Any

import pytest

from apical.bench import suites
from apical.bench.cells import Cell, load_cells
from apical.bench.declaration import Request
from apical.bench.store import Outcome, Store
from apical.bench.suites import Job, list_jobs
from apical.errors import ApicalError
from apical.report import open_results
from pages import ROOT
from stores import fill, outcome
from tools.pages.notes import Notes, find_counterpart, find_problems, find_shortfalls, load_notes
from tools.pages.section import PAPER, read_cells


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


def test_the_diagnoses_in_the_repository_are_complete_and_none_is_stale() -> None:
    if not (ROOT / "results").is_dir():
        pytest.skip("the results are not here: this is not a checkout")
    notes = load_notes(ROOT / "results")
    assert {"ff/cnn/mnist", "ep/cnn/cifar10"} <= notes.goals.keys()
    with open_results(ROOT / "results") as results:
        every = {name: read_cells(suites.load(name), results, notes) for name in PAPER}
    said = find_problems(notes, every)
    assert not said, "\n".join(said)
