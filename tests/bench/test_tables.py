"""Tables say what the store holds, beside the control and the paper, and mark what deserves it."""

import math
import statistics
from pathlib import Path
from typing import Any

import pytest

from apical.bench import suites
from apical.bench.cells import Difference, Figure, Table, compare_with_figure, load_cells, sum_training_seconds
from apical.bench.declaration import Declaration, Request
from apical.bench.export import format_markdown, format_text
from apical.bench.store import Outcome, Store
from apical.bench.suites import Job, Suite, list_jobs
from apical.bench.tables import build_listing, build_tables
from stores import declared, fill, history, outcome

FOUR = ("mnist", "fashion_mnist", "svhn", "cifar10")


pytestmark = pytest.mark.usefixtures("all_data")


def made(store: Store, suite: Suite, **choice: Any) -> list[Table]:
    return build_tables(suite, load_cells(list_jobs(suite, Request(**choice)), store))


def loaded(folder: Path, text: str) -> Suite:
    """A suite of one's own."""
    (folder / "own.toml").write_text(text)
    return suites.load(str(folder / "own.toml"))


def only(suite: str, **choice: Any) -> list[Job]:
    return list_jobs(suites.load(suite), Request(**choice))


def put(store: Store, job: Job, scores: list[float], **facts: Any) -> None:
    assert job.declaration is not None
    fill(store, job.declaration, scores, **facts)


def put_errors(store: Store, job: Job) -> None:
    """Values were predicted: seed s with a squared error of 0.1 + s."""
    assert job.declaration is not None
    rows = [{"seed": s, "epoch": 1, "test_loss": 3.0, "test_mse": 0.1 + s, "test_mae": 0.2} for s in job.seeds]
    store.claim(job.declaration, job.seeds)
    store.finish(job.declaration, job.seeds, Outcome(rows, {}, {}))


def test_an_error_that_is_no_number_is_left_out(tmp_path: Path) -> None:
    suite = suites.load("table2")
    with Store(tmp_path / "s.sqlite") as store:
        (job,) = [job for job in only("table2", rules=["bp"], data=["etth1"]) if job.rule == "bp"][:1]
        assert job.declaration is not None
        store.claim(job.declaration, job.seeds)
        errors = zip(job.seeds, (0.1, math.nan, 0.3), strict=True)
        rows = [{"seed": s, "epoch": 1, "test_loss": 3.0, "test_mse": mse, "test_mae": 0.2} for s, mse in errors]
        store.finish(job.declaration, job.seeds, Outcome(rows, {}, {}))
        tables = made(store, suite, rules=["bp"], data=["etth1"])
    (table,) = (table for table in tables if "MSE" in table.headings)
    assert "0.2000 ± 0.1414 (2 of 3 seeds)" in [row[table.headings.index("MSE")] for row in table.rows]


def by_rule(table: Table) -> dict[str, dict[str, str]]:
    return {row[0]: dict(zip(table.headings, row, strict=True)) for row in table.rows}


# Times.


def test_the_time_of_a_cell_is_that_of_one_device_and_names_it_beside_another(tmp_path: Path) -> None:
    """Some seeds of bp ran on another machine, and so did all of fa: a mean over machines would be nobody's time."""
    text = 'title = "times"\nseeds = 3\n[[runs]]\nrules = ["bp", "fa", "dll"]\nmodels = ["mlp"]\ndata = ["mnist"]\n'
    suite = loaded(tmp_path, text)
    with Store(tmp_path / "s.sqlite") as store:
        bp, fa, dll = list_jobs(suite, Request())
        for seed, device, seconds in ((0, "abacus", 1.0), (1, "slide rule", 90.0), (2, "abacus", 3.0)):
            assert bp.declaration is not None
            store.claim(bp.declaration, [seed])
            done = outcome({seed: [90.0]}, device=device, seconds_per_epoch=seconds)
            store.finish(bp.declaration, [seed], done)
        put(store, dll, [90.0] * 3, device="abacus", seconds_per_epoch=5.0)
        with_two = ["2.00 (abacus)", "–", "5.00 (abacus)"]
        assert [row[-1] for row in made(store, suite)[0].rows] == with_two
        assert [row[-1] for row in made(store, suite, rules=["dll"])[0].rows] == ["5.00"]
        put(store, fa, [90.0] * 3, device="slide rule", seconds_per_epoch=70.0)
        (table,) = made(store, suite)
    assert [row[-1] for row in table.rows] == ["2.00 (abacus)", "70.00 (slide rule)", "5.00 (abacus)"]


# The comparison.


def test_the_difference_to_the_paper_has_the_standard_error_of_two_means() -> None:
    ours = [97.0, 98.0, 99.0]  # mean 98, variance 1
    assert compare_with_figure(ours, Figure(97.5, 0.8, 4)) == Difference(
        pytest.approx(0.5), pytest.approx((1 / 3 + 0.16) ** 0.5)
    )
    assert compare_with_figure(ours, Figure(97.5)) == Difference(pytest.approx(0.5), pytest.approx((1 / 3) ** 0.5))
    assert compare_with_figure([98.0], Figure(97.5, 0.8, 4)) == Difference(pytest.approx(0.5), pytest.approx(0.4))


@pytest.mark.parametrize(("mean", "within"), [(2.0, True), (2.01, False), (-2.0, True), (-2.01, False), (0.0, True)])
def test_within_error_is_within_two_standard_errors_either_way(mean: float, within: bool) -> None:
    assert Difference(mean, 1.0).is_within_error is within


# One line for each run.


def test_a_line_has_ours_the_control_the_paper_and_the_difference(store: Store) -> None:
    suite = suites.load("depth")
    for job in only("depth", models=["mlp"], rules=["dll", "readout"]):
        put(store, job, [97.0, 98.0, 98.1, 97.9] if job.rule == "dll" else [90.0, 90.5, 91.0, 91.5])
    (table,) = made(store, suite, models=["mlp"], rules=["dll", "readout", "bp"])
    assert table.title == "mnist, mlp"
    row = by_rule(table)["dll"]
    ours = [97.0, 98.0, 98.1, 97.9]
    over = [a - b for a, b in zip(ours, [90.0, 90.5, 91.0, 91.5], strict=True)]
    assert row["accuracy %"] == f"97.75 ± {statistics.stdev(ours):.2f}"
    assert row["over readout"] == f"+7.00 ± {statistics.stdev(over) / 2:.2f}"
    assert row["paper"] == "97.57 ± 0.40"
    # 0.18 is below 2 √(s²/4 + 0.4²/4)
    assert row["difference"] == "+0.18 ="
    assert row["s/epoch"] == "0.50"
    assert by_rule(table)["readout"]["over readout"] == "control"
    assert by_rule(table)["bp"]["accuracy %"] == "not run"
    assert by_rule(table)["bp"]["difference"] == "–"


def test_what_somebody_works_on_is_not_called_not_run(store: Store) -> None:
    (job,) = only("depth", models=["mlp"], rules=["bp"])
    assert job.declaration is not None
    store.claim(job.declaration, [0])
    (table,) = made(store, suites.load("depth"), models=["mlp"], rules=["bp"])
    assert by_rule(table)["bp"]["accuracy %"] == "running"


def test_a_run_whose_data_are_missing_says_so(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suites, "explain_missing_data", lambda data: f"{data} is absent")
    (table,) = made(store, suites.load("depth"), models=["mlp"], rules=["bp"])
    assert by_rule(table)["bp"]["accuracy %"] == "no data"


def test_a_difference_beyond_error_is_not_marked_and_a_rule_that_does_not_learn_is(store: Store) -> None:
    for job in only("depth", models=["mlp"], rules=["dll", "readout"]):
        put(store, job, [90.0, 90.1, 89.9, 90.0] if job.rule == "dll" else [90.0, 90.0, 90.1, 90.1])
    (table,) = made(store, suites.load("depth"), models=["mlp"], rules=["dll", "readout"])
    row = by_rule(table)["dll"]
    assert row["difference"] == "-7.57"
    assert row["over readout"].endswith("hidden layers do not help")


def test_seeds_that_failed_or_are_missing_are_told(store: Store) -> None:
    half, broken = only("digits", models=["mlp"], rules=["bp"])
    put(store, half, [90.0, 91.0])
    assert broken.declaration is not None
    store.claim(broken.declaration, [0, 1, 2, 3, 4])
    curves = {seed: [80.0] for seed in (0, 1, 2)}
    store.finish(broken.declaration, range(5), outcome(curves, {3: "no", 4: "no"}))
    (table,) = made(store, suites.load("digits"), models=["mlp"], rules=["bp"])
    assert by_rule(table)["readout"]["accuracy %"] == "90.50 ± 0.71 (2 of 5 seeds)"
    assert by_rule(table)["bp"]["accuracy %"] == "80.00 ± 0.00 (2 failed)"


def test_the_best_test_epoch_stands_beside_the_last(store: Store) -> None:
    (job,) = only("paper-settings", models=["mlp"], data=["mnist"], rules=["dll"])
    assert job.declaration is not None
    store.claim(job.declaration, job.seeds)
    store.finish(job.declaration, job.seeds, outcome({seed: [97.0, 98.5, 98.0] for seed in job.seeds}))
    (table,) = made(store, suites.load("paper-settings"), models=["mlp"], data=["mnist"], rules=["dll"])
    (row,) = by_rule(table).values()
    assert (row["accuracy %"], row["best test epoch"]) == ("98.00 ± 0.00", "98.50 ± 0.00")


def test_alignment_local_losses_and_memory_are_shown_where_they_are_asked_for(store: Store) -> None:
    (job,) = only("convergence", models=["mlp"], data=["mnist"], rules=["dll"])
    assert job.declaration is not None
    rows = [
        {**row, "alignment": {"feedback": [None, 0.2, 0.4], "update": [0.5, 0.7, 1.0], "local": [k, 2.0 * k, 4.0]}}
        for seed in job.seeds
        for k, row in enumerate(history(seed, [50.0, 60.0]), 1)
    ]
    store.claim(job.declaration, job.seeds)
    facts = {"peak_memory": 123_456_789, "memory_kind": "of a test"}
    store.finish(job.declaration, job.seeds, Outcome(rows, {}, facts))
    suite = Suite("x", "x", suites.load("convergence").blocks, 4, columns=("alignment", "local", "memory"))
    (table,) = made(store, suite, models=["mlp"], data=["mnist"], rules=["dll"])
    (row,) = by_rule(table).values()
    assert row["Θ·W / update·bp"] == "0.30 / 0.60"
    assert row["local losses, first → last epoch"] == "1 2 4 → 2 4 4"
    assert row["peak memory"] == "123 MB (of a test)"
    assert table.notes[0].endswith(": `dll` 44.7 s and 1595 MB.")


def test_memory_of_an_unknown_kind_is_a_number_alone(store: Store) -> None:
    (job,) = only("convergence", models=["mlp"], data=["mnist"], rules=["dll"])
    assert job.declaration is not None
    fill(store, job.declaration, [90.0] * len(job.seeds), peak_memory=5_000_000)
    suite = Suite("x", "x", suites.load("convergence").blocks, 4, columns=("memory",))
    (table,) = made(store, suite, models=["mlp"], data=["mnist"], rules=["dll"])
    (row,) = by_rule(table).values()
    assert row["peak memory"] == "5 MB"


def test_what_a_few_epochs_learn_is_not_held_against_the_paper(store: Store) -> None:
    jobs = only("cost", models=["mlp", "mlp-256-256-256"], rules=["dll", "bp"])
    for job in jobs:
        put(store, job, [97.0])
    own, wide = made(store, suites.load("cost"), models=["mlp", "mlp-256-256-256"], rules=["dll", "bp"])
    assert {"accuracy %", "s/epoch", "peak memory"} <= set(own.headings)
    assert not {"paper", "difference"} & set(own.headings)
    assert [note for note in own.notes if "1286" in note and "1595" in note] == own.notes[:1]
    assert not any("1286" in note for note in wide.notes)


def test_of_tiny_imagenet_the_error_rate_is_compared(store: Store) -> None:
    (job,) = only("images-large", data=["tiny_imagenet"], rules=["dll"])
    put(store, job, [18.0, 18.2, 17.8, 18.0])
    (table,) = made(store, suites.load("images-large"), data=["tiny_imagenet"], rules=["dll"])
    (row,) = by_rule(table).values()
    assert row["error rate %"].startswith("82.00 ± ")
    assert (row["paper"], row["difference"]) == ("82.90", "-0.90")


def test_values_are_shown_as_mse_and_mae(store: Store) -> None:
    (job,) = only("digits", models=["mlp"], rules=["readout"])
    put_errors(store, job)
    (table,) = made(store, suites.load("digits"), models=["mlp"], rules=["readout"])
    (row,) = by_rule(table).values()
    assert row["MSE"] == f"2.1000 ± {statistics.stdev(range(5)):.4f}"
    assert row["MAE"] == "0.2000 ± 0.0000"


@pytest.mark.parametrize(("protocol", "mse", "mae"), [("clean", 0.3, 0.2), ("paper", 0.1, 0.2)])
def test_errors_are_those_of_the_epoch_that_the_protocol_takes(
    store: Store, protocol: str, mse: float, mae: float
) -> None:
    one = declared("bp", "rnn", "etth1", protocol=protocol)
    curve = [(0.5, 0.9), (0.1, 0.4), (0.3, 0.2)]
    rows = [{"seed": 0, "epoch": k, "test_loss": m, "test_mse": m, "test_mae": a} for k, (m, a) in enumerate(curve, 1)]
    store.claim(one, [0])
    store.finish(one, [0], Outcome(rows, {}, {}))
    (cell,) = load_cells([Job("bp", "rnn", "etth1", 3, (0,), {}, one, None)], store)
    assert [cell.scores(metric)[0] for metric in ("mse", "mae")] == [mse, mae]


def listed(store: Store, *declarations: Declaration) -> dict[str, dict[str, str]]:
    asked = [Job(d.rule, d.model, d.data, d.epochs, (0, 1), {}, d, None) for d in declarations]
    return by_rule(build_listing("", load_cells(asked, store), ()))


def test_a_control_of_another_length_is_told_and_one_of_the_same_comes_first(store: Store) -> None:
    short, long, bp = declared("readout", epochs=1), declared("readout", epochs=8), declared("bp", epochs=8)
    for declaration, scores in ((short, [10.0, 11.0]), (long, [50.0, 52.0]), (bp, [60.0, 61.0])):
        fill(store, declaration, scores)
    assert listed(store, bp, short)["bp"]["over readout"].startswith("+50.00")
    assert {row["epochs"] for row in listed(store, bp, short).values()} == {"1", "8"}
    assert "epochs" not in listed(store, bp, long)["bp"]
    both = listed(store, short, long, bp)
    assert both["bp"]["over readout"].startswith("+9.50")


def test_a_control_that_was_judged_otherwise_is_none(store: Store) -> None:
    bp = declared("bp")
    fill(store, bp, [60.0, 61.0])
    for other in (declared("readout", protocol="paper"), declared("readout", data_options={"task": "forecast"})):
        fill(store, other, [10.0, 11.0])
        assert listed(store, bp, other)["bp"]["over readout"] == "–"


def test_folds_are_averaged(store: Store, tmp_path: Path) -> None:
    suite = loaded(
        tmp_path,
        """
        seeds = 2
        folds = "batch_size"
        [[runs]]
        rules = ["bp"]
        models = ["mlp"]
        data = ["digits"]
        vary = { batch_size = [8, 16], lr = [0.1, 0.2] }
        """,
    )
    for k, job in enumerate(list_jobs(suite, Request())):
        put(store, job, [10.0 * k, 10.0 * k + 2])
    (table,) = made(store, suite)
    assert table.headings[:4] == ["rule", "C1-C3", "lr", "accuracy %"]
    # Sizes 8 and 16 at each rate: jobs 0 and 2, 1 and 3.
    for row, values in zip(table.rows, ([0.0, 2.0, 20.0, 22.0], [10.0, 12.0, 30.0, 32.0]), strict=True):
        assert row[3] == f"{statistics.fmean(values):.2f} ± {statistics.stdev(values):.2f}"


@pytest.mark.parametrize(("data", "theirs"), [("subj", ("88.50", "84.40")), ("mr", ("74.68", "70.79"))])
def test_the_text_suite_has_the_mean_over_its_ten_folds_beside_the_papers_figure(
    data: str, theirs: tuple[str, str], store: Store
) -> None:
    asked: dict[str, Any] = {"data": [data], "rules": ["bp", "dll"]}
    folds = {"bp": [80.0, 82, 78, 81, 79, 84, 76, 80, 85, 75], "dll": [70.0, 72, 68, 71, 69, 74, 66, 70, 75, 65]}
    for job in only("text", **asked):
        put(store, job, [folds[job.rule][job.varied["fold"]]])
    (table,) = made(store, suites.load("text"), **asked)
    assert table.title == f"{data}, textcnn"
    for (rule, values), figure in zip(folds.items(), theirs, strict=True):
        row, mean = by_rule(table)[rule], statistics.fmean(values)
        assert row["accuracy %"] == f"{mean:.2f} ± {statistics.stdev(values):.2f}"
        assert row["paper"] == figure
        assert row["difference"].split()[0] == f"{mean - float(figure):+.2f}"
    assert any("means over folds" in note for note in table.notes)
    assert not any("folds" in note for note in made(store, suites.load("digits"))[-1].notes)


def test_a_fold_that_failed_or_is_missing_does_not_shift_the_others(store: Store) -> None:
    asked: dict[str, Any] = {"data": ["mr"], "rules": ["readout", "bp"]}
    for job in only("text", **asked):
        fold = job.varied["fold"]
        assert job.declaration is not None
        if (job.rule, fold) == ("bp", 3):
            store.claim(job.declaration, job.seeds)
            store.finish(job.declaration, job.seeds, outcome({}, {0: "no"}))
        elif (job.rule, fold) != ("readout", 6):
            put(store, job, [60.0 + 2 * fold + (5.0 if job.rule == "bp" else 0.0)])
    (table,) = made(store, suites.load("text"), **asked)
    row = by_rule(table)["bp"]
    assert row["over readout"] == "+5.00 ± 0.00"  # fold by fold, whatever else is missing
    assert row["accuracy %"].endswith(" (1 failed)")
    assert by_rule(table)["readout"]["accuracy %"].endswith(" (9 of 10 seeds)")


def test_each_task_has_its_own_control(store: Store, tmp_path: Path) -> None:
    suite = loaded(
        tmp_path,
        """
        seeds = 2
        control = "readout"
        [[runs]]
        rules = ["bp"]
        models = ["mlp"]
        data = ["digits"]
        vary = { batch_size = [8, 16] }
        """,
    )
    scores = {("readout", 8): 10.0, ("readout", 16): 20.0, ("bp", 8): 15.0, ("bp", 16): 27.0}
    for job in list_jobs(suite, Request()):
        value = scores[job.rule, job.varied["batch_size"]]
        put(store, job, [value, value + 1])
    (table,) = made(store, suite)
    over = {(row[0], row[2]): row[table.headings.index("over readout")] for row in table.rows}
    assert over["bp", "8"] == "+5.00 ± 0.00"
    assert over["bp", "16"] == "+7.00 ± 0.00"
    assert over["readout", "8"] == over["readout", "16"] == "control"


# Rules × data sets.


def test_the_matrix_has_a_line_for_each_rule_and_its_average_beside_the_papers(store: Store) -> None:
    scores = {"mnist": 98.0, "fashion_mnist": 88.0, "svhn": 57.0, "cifar10": 46.0}
    for job in only("table1", models=["mlp"], rules=["dll"]):
        put(store, job, [scores[job.data] - 0.1, scores[job.data] + 0.1] * 2)
    put(store, only("table1", models=["mlp"], rules=["bp"], data=["mnist"])[0], [98.0] * 4)
    (table,) = made(store, suites.load("table1"), models=["mlp"], rules=["dll", "bp"])
    assert table.title == "Table 1: image classification, mlp"
    assert table.headings == ["rule", "C1-C3", *FOUR, "average"]
    names = [row[0] for row in table.rows]
    assert names == ["bp", "  paper", "dll", "  paper"]
    dll, paper = table.rows[2:]
    assert dll[1] == "✓✓✗ ≠ ✓✓✓"  # as `apical audit` has it, and the paper
    assert dll[2:] == [*(f"{scores[data]:.2f} ± 0.12" for data in FOUR), "72.25"]
    assert paper[1] == ""
    assert paper[2] == "97.57 ± 0.40 +0.43"  # 2 √(0.1155²/4 + 0.4²/4) = 0.416 < 0.43
    assert paper[3] == "87.50 ± 0.43 +0.50"
    assert paper[6] == "71.89 +0.36"
    assert table.rows[0][3:] == ["not run", "not run", "not run", "–"]
    assert table.rows[1][6] == "74.20"


def test_a_rule_that_does_not_learn_is_starred_in_the_matrix(store: Store) -> None:
    for job in only("table1", models=["mlp"], rules=["dll", "readout"], data=["mnist"]):
        put(store, job, [90.0, 90.1, 89.9, 90.0])
    (table,) = made(store, suites.load("table1"), models=["mlp"], rules=["dll", "readout"], data=["mnist"])
    ours = {row[0]: row[2] for row in table.rows}
    assert ours["dll"].endswith(" *")
    assert not ours["readout"].endswith("*")


def test_a_matrix_has_each_data_sets_own_measure_and_no_average_of_several(store: Store, tmp_path: Path) -> None:
    suite = loaded(
        tmp_path,
        """
        seeds = 2
        layout = "matrix"
        [[runs]]
        rules = ["bp"]
        models = ["rnn"]
        data = ["etth1", "tinyshakespeare"]
        [[runs]]
        rules = ["bp"]
        models = ["cnn"]
        data = ["tiny_imagenet"]
        """,
    )
    series, text, images = list_jobs(suite, Request())
    put_errors(store, series)
    put(store, text, [40.0, 42.0])
    put(store, images, [18.0, 20.0])
    rnn, cnn = made(store, suite)
    assert rnn.headings == ["rule", "C1-C3", "etth1, MSE", "tinyshakespeare", "average"]
    assert rnn.rows[0][2:] == ["0.6000 ± 0.7071", "41.00 ± 1.41", "–"]
    assert cnn.headings[2] == "tiny_imagenet, error rate %"
    assert cnn.rows[0][2].startswith("81.00")
    assert cnn.rows[1][0] == "  paper"


@pytest.mark.parametrize(
    ("protocol", "words", "compared"),
    [("paper", "best test epoch", True), ("validation", "held-out training data", False)],
)
@pytest.mark.parametrize("layout", ["list", "matrix"])
def test_what_is_no_last_epochs_score_says_so(
    layout: str, protocol: str, words: str, compared: bool, store: Store, tmp_path: Path
) -> None:
    head = f'seeds = 2\nlayout = "{layout}"\n'
    run = f'[[runs]]\nrules = ["bp"]\nmodels = ["mlp"]\ndata = ["mnist"]\nsettings = {{ protocol = "{protocol}" }}\n'
    suite = loaded(tmp_path, head + run)
    (job,) = list_jobs(suite, Request())
    put(store, job, [98.0, 98.4])
    (table,) = made(store, suite)
    told = dict(zip(table.headings, table.rows[0], strict=True))
    if layout == "list":
        assert told["protocol"] == words
        assert ("paper" in told) == compared
    else:
        assert f"Scores: {words}." in table.notes
        assert (len(table.rows) == 2) == compared


# The time that runs took.


def test_the_time_of_seeds_that_trained_together_counts_once(store: Store) -> None:
    fill(store, declared("bp"), [90.0, 91.0, 92.0, 93.0])  # two epochs of half a second
    assert sum_training_seconds(store.runs()) == pytest.approx(1.0)
    fill(store, declared("dll"), [90.0], command="another")
    assert sum_training_seconds(store.runs()) == pytest.approx(2.0)


def test_seeds_that_trained_at_another_time_took_their_own(store: Store) -> None:
    one = declared("bp")
    fill(store, one, [90.0, 91.0], command="apical train --seeds 0,1")
    store.claim(one, [2, 3, 4])
    curves = {seed: [80.0, 81.0, 82.0] for seed in (2, 3, 4)}
    store.finish(one, [2, 3, 4], outcome(curves, command="apical train --seeds 2,3,4"))
    assert sum_training_seconds(store.runs()) == pytest.approx(1.0 + 1.5)
    assert sum_training_seconds(row for row in store.runs() if row.seed < 3) == pytest.approx(1.0 + 1.5 / 3)


def test_a_team_took_as_long_as_the_seed_that_went_on_longest(store: Store) -> None:
    one = declared("bp")
    store.claim(one, [0, 1])
    store.finish(one, [0, 1], outcome({0: [80.0], 1: [80.0, 81.0, 82.0]}, {0: "its loss was not finite"}))
    assert sum_training_seconds(store.runs()) == pytest.approx(1.5)


def test_what_is_not_finished_or_left_no_epochs_took_no_time_that_is_known(store: Store) -> None:
    running, broken = declared("bp"), declared("fa")
    store.claim(running, [0, 1])
    store.record(running, [row for seed in (0, 1) for row in history(seed, [50.0])])
    store.claim(broken, [0])
    store.finish(broken, [0], Outcome([], {0: "no memory"}, {"together": 1}))
    assert sum_training_seconds(store.runs()) == 0.0


# In print.


def test_text_is_aligned_and_markdown_is_markdown() -> None:
    table = Table("A title", ["rule", "Θ·W"], [["bp", "1.00"], ["dll:released", "a|b"]], ["A note."])
    lines = format_text(table).splitlines()
    assert lines[0] == "A title"
    assert lines[-1] == "A note."
    assert len({len(line) for line in lines[1:-1]}) == 1
    assert "│ dll:released │  a|b │" in lines
    assert format_markdown(table).splitlines() == [
        "## A title",
        "",
        "| rule | Θ·W |",
        "| --- | --- |",
        "| bp | 1.00 |",
        "| dll:released | a\\|b |",
        "",
        "A note.",
    ]


def test_seeds_that_trained_together_share_their_time(store: Store) -> None:
    four, one = only("table1", models=["mlp"], data=["mnist"], rules=["bp", "fa"])  # 20 epochs each
    for job, seeds, seconds in ((four, range(4), 2.0), (one, range(1), 3.0)):
        assert job.declaration is not None
        rows = [{**row, "seconds": seconds} for seed in seeds for row in history(seed, [90.0] * 20)]
        store.claim(job.declaration, seeds)
        facts = {"together": len(seeds), "seconds_per_epoch": seconds}
        store.finish(job.declaration, seeds, Outcome(rows, {}, facts))
    assert sum_training_seconds(store.runs()) == pytest.approx(20 * 2.0 + 20 * 3.0)
    assert sum_training_seconds([]) == 0


def test_a_mean_below_the_papers_by_more_than_our_error_has_an_arrow_in_the_matrix(store: Store) -> None:
    for job in only("table1", models=["mlp"], data=["mnist"], rules=["dll", "bp"]):
        put(store, job, [97.4, 97.5, 97.2, 97.3] if job.rule == "dll" else [98.4, 98.7, 98.5, 98.8])
    (table,) = made(store, suites.load("table1"), models=["mlp"], data=["mnist"], rules=["dll", "bp"])
    papers = [row[2] for row in table.rows if row[0] == "  paper"]
    assert papers == ["98.62 ± 0.17 -0.02 =", "97.57 ± 0.40 -0.22 = ↓"]
    assert any(note.startswith("↓") for note in table.notes)


def test_a_seed_that_failed_has_no_score_and_does_not_shift_the_others(store: Store) -> None:
    job = list_jobs(suites.load("table1"), Request(models=["mlp"], data=["mnist"], rules=["bp"]))[0]
    assert job.declaration is not None
    store.claim(job.declaration, job.seeds)
    curves = {0: [50.0], 1: [60.0], 2: [70.0], 3: [80.0]}
    store.finish(job.declaration, job.seeds, outcome(curves, {1: "diverged"}))
    (cell,) = load_cells([job], store)
    assert cell.scores("accuracy") == pytest.approx({0: 50, 2: 70, 3: 80})
