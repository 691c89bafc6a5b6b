"""The main tables: rules × data sets for each network, the paper's marks and figures, the control's verdict, the average."""

import statistics

import pytest

from apical.bench.cells import AVERAGE, find_figure
from apical.bench.declaration import Declaration
from apical.bench.store import Outcome, Store
from apical.core.learner import Claims
from apical.report.groups import collect
from apical.report.overview import TABLE_1, Overview, TableRow, make_entries, make_overviews
from stores import declared, fill


def overview(store: Store) -> Overview:
    (table,) = make_overviews(make_entries(collect(store)))
    return table


def test_the_average_is_over_the_four_data_sets_of_table_1_and_needs_all_of_them(store: Store) -> None:
    scores = dict(zip(TABLE_1, (98.0, 88.0, 60.0, 48.0), strict=True))
    for data, score in scores.items():
        fill(store, declared("dll", "mlp", data), [score - 1, score + 1])
    fill(store, declared("dll", "mlp", "digits"), [10.0, 10.0])  # not of table 1
    fill(store, declared("fa", "mlp", "mnist"), [90.0, 91.0])
    table = overview(store)
    lines = {line.rule: line for line in table.rows}
    assert [column.data for column in table.columns] == ["mnist", "fashion_mnist", "svhn", "cifar10", "digits"]
    assert table.has_average
    assert lines["dll"].average == pytest.approx(statistics.fmean(scores.values()))
    assert lines["dll"].paper_average == AVERAGE["dll", "mlp"] == 71.89
    assert lines["fa"].average is None


def test_without_one_of_the_four_there_is_no_average(store: Store) -> None:
    for data in TABLE_1[:3]:
        fill(store, declared("dll", "mlp", data), [90.0])
    assert not overview(store).has_average


def test_the_papers_average_stands_only_beside_an_average_of_scores_like_the_papers(store: Store) -> None:
    """One of the four is measured on held-out training images, of which the paper says nothing."""
    for data in TABLE_1:
        fill(store, declared("dll", "mlp", data, protocol="validation" if data == "svhn" else "clean"), [90.0])
    (line,) = overview(store).rows
    assert (line.average, line.paper_average) == (90.0, None)


@pytest.mark.parametrize(
    ("rule", "paper", "audit"),
    [
        ("dll", (True, True, True), (True, True, False)),
        ("pc", (False, True, False), (False, True, False)),
        ("dll:released", (True, True, True), (True, True, False)),
        ("readout", None, (True, True, True)),
        ("nobody's", None, None),
    ],
)
def test_the_papers_criteria_and_the_audits_stand_beside_each_rule(
    rule: str, paper: tuple[bool, ...] | None, audit: tuple[bool, ...] | None, store: Store
) -> None:
    fill(store, declared(rule), [90.0])
    assert overview(store).rows[0].verdicts == {"paper": paper, "audit": audit}


def test_a_rule_that_does_not_beat_the_control_is_marked_and_the_control_is_not(store: Store) -> None:
    fill(store, declared("readout"), [80.0, 82.0])
    fill(store, declared("fa"), [80.5, 81.9])
    fill(store, declared("bp"), [90.0, 92.1])
    fill(store, declared("dll"), [10.0])  # one seed: nobody can say
    found = {entry.group.place[0]: entry for entry in make_entries(collect(store))}
    assert {rule: entry.fails for rule, entry in found.items()} == {
        "readout": False,
        "fa": True,
        "bp": False,
        "dll": False,
    }
    assert found["readout"].is_control
    assert not found["bp"].is_control


def test_another_network_has_its_own_control(store: Store) -> None:
    fill(store, declared("readout", "cnn"), [99.0, 99.1])
    fill(store, declared("fa", "mlp"), [80.0, 81.0])
    assert [entry.over_control for entry in make_entries(collect(store)) if entry.group.place[0] == "fa"] == [None]


def test_a_part_of_the_data_is_compared_with_its_like_alone(store: Store) -> None:
    fill(store, declared("readout"), [90.0, 91.0])
    fill(store, declared("fa", protocol="paper"), [80.0, 81.0])
    for rule, scores in {"readout": [10.0, 12.0], "bp": [50.0, 51.0]}.items():
        quick = Declaration.from_dict({**declared(rule).to_dict(), "examples": 128})
        fill(store, quick, scores)
    found = {entry.group.place[0]: entry for entry in make_entries(collect(store))}
    assert found["bp"].over_control is not None
    assert found["bp"].over_control.mean == pytest.approx(39.5)
    assert found["bp"].group.paper_figure is None
    assert found["fa"].over_control is None
    assert found["fa"].group.paper_figure is not None


def test_each_task_is_compared_with_the_control_of_its_own(store: Store) -> None:
    for task, scores in (("paper", [10.0, 12.0]), ("forecast", [50.0, 51.0])):
        fill(store, declared("readout", data_options={"task": task}), scores)
        fill(store, declared("bp", data_options={"task": task}), [score + 1 for score in scores])
    found = [entry.over_control for entry in make_entries(collect(store)) if entry.group.place[0] == "bp"]
    assert [over.mean for over in found if over is not None] == [pytest.approx(1.0)] * 2


def test_one_line_for_each_rule_and_network_and_one_entry_for_each_data_set(store: Store) -> None:
    fill(store, declared("bp", lr=0.1), [90.0, 91.0])
    fill(store, declared("bp", lr=0.2), [99.0])
    fill(store, declared("bp", "cnn"), [97.0])
    tables = make_overviews(make_entries(collect(store)))
    assert [(table.model, [line.rule for line in table.rows]) for table in tables] == [("mlp", ["bp"]), ("cnn", ["bp"])]
    assert tables[0].rows[0].entries["mnist"].group.settings["lr"] == 0.1


def test_bars_of_accuracies_and_error_rates_all_go_from_0_to_100(store: Store) -> None:
    fill(store, declared("bp"), [98.5])
    fill(store, declared("bp", "cnn", "tiny_imagenet"), [30.0])
    columns = [column for table in make_overviews(make_entries(collect(store))) for column in table.columns]
    assert [(column.title, column.heading, column.higher_is_better, column.high) for column in columns] == [
        ("MNIST", "accuracy %", True, 100),
        ("Tiny-ImageNet", "error rate %", False, 100),
    ]
    assert columns[0].percent(85.0) == 85.0
    assert (columns[0].percent(-1.0), columns[0].percent(200.0)) == (0.0, 100.0)


def test_bars_of_another_measure_have_one_scale_in_all_tables_the_papers_figures_included(store: Store) -> None:
    for model, data, mse in [("rnn", "electricity", 0.2), ("rnn", "mine", 0.25), ("own", "mine", 0.125)]:
        rows = [{"seed": 0, "epoch": 1, "loss": 1.0, "test_loss": 1.0, "test_mse": mse, "test_mae": 9.0, "seconds": 1}]
        store.claim(declared("bp", model, data), [0])
        store.finish(declared("bp", model, data), [0], Outcome(rows, {}, {}))
    figure = find_figure("bp", "rnn", "electricity", "mse")
    assert figure is not None
    columns = [column for table in make_overviews(make_entries(collect(store))) for column in table.columns]
    assert [column.high for column in columns] == [max(0.25, figure.accuracy)] * 3
    assert columns[0].percent(columns[0].high / 4) == 25.0


def test_each_network_has_a_table_with_its_own_rules_and_data(store: Store) -> None:
    places = [("rnn", "text:a"), ("mlp", "digits"), ("own", "mnist"), ("cnn", "mnist"), ("mlp", "mnist")]
    for model, data in places:
        fill(store, declared("bp", model, data), [90.0])
    fill(store, declared("fa", "cnn", "svhn"), [90.0])
    tables = make_overviews(make_entries(collect(store)))
    assert [(t.model, {c.data for c in t.columns}, [r.rule for r in t.rows]) for t in tables] == [
        ("mlp", {"mnist", "digits"}, ["bp"]),
        ("cnn", {"mnist", "svhn"}, ["bp", "fa"]),
        ("rnn", {"text:a"}, ["bp"]),
        ("own", {"mnist"}, ["bp"]),
    ]


def test_a_criterion_that_is_not_decided_is_a_question_mark() -> None:
    row = TableRow("mine", {"paper": None, "audit": Claims(True, None, False)}, "", {}, [], None, None)
    assert (row.marks("paper"), row.marks("audit")) == ("", "✓?✗")


def test_a_judges_marks_in_a_word(store: Store) -> None:
    fill(store, declared("dll"), [90.0])
    fill(store, declared("readout"), [90.0])
    lines = {line.rule: line for line in overview(store).rows}
    assert [lines["dll"].marks(judge) for judge in ("paper", "audit")] == ["✓✓✓", "✓✓✗"]
    assert [lines["readout"].marks(judge) for judge in ("paper", "audit")] == ["", "✓✓✓"]
