"""The charts hold what the histories say: means and ranges over seeds, layers and settings."""

import math
from pathlib import Path
from typing import Any

import pytest

from apical.bench.store import Outcome, Store
from apical.report.charts import Chart, Drawing, HeatMap, make_chart_sections, make_file_name
from apical.report.groups import collect
from stores import declared, fill, history


def drawn(store: Store, kind: str) -> list[Any]:
    return [one for section in make_chart_sections(collect(store)) for one in section.drawings if one.kind == kind]


def finish(store: Store, declaration: Any, rows: list[dict[str, Any]]) -> None:
    seeds = sorted({row["seed"] for row in rows})
    assert store.claim(declaration, seeds) == seeds
    store.finish(declaration, seeds, Outcome(rows, {}, {"seconds_per_epoch": 0.25, "device": "abacus"}))


def test_an_empty_store_has_no_charts() -> None:
    assert make_chart_sections([]) == []


def test_a_learning_curve_is_the_mean_and_the_range_of_each_epoch(store: Store) -> None:
    finish(store, declared("bp"), history(0, [50.0, 60.0]) + history(1, [54.0, 70.0, 80.0]))
    (chart,) = drawn(store, "curves")
    (line,) = chart.lines
    assert (chart.title, chart.y, line.name) == ("mnist, mlp", "accuracy %", "bp")
    assert (line.x, line.y) == ([1, 2, 3], pytest.approx([52.0, 65.0, 80.0]))
    assert (line.low, line.high) == (pytest.approx([50.0, 60.0, 80.0]), pytest.approx([54.0, 70.0, 80.0]))


def test_an_error_rate_falls_where_accuracy_rises(store: Store) -> None:
    finish(store, declared("bp", "cnn", "tiny_imagenet"), history(0, [10.0, 30.0]))
    (chart,) = drawn(store, "curves")
    assert (chart.y, chart.lines[0].y) == ("error rate %", pytest.approx([90.0, 70.0]))


def test_a_run_that_goes_on_has_the_curve_so_far(store: Store) -> None:
    declaration = declared("bp")
    store.claim(declaration, [0])
    store.record(declaration, history(0, [40.0, 45.0]))
    (chart,) = drawn(store, "curves")
    assert chart.lines[0].y == pytest.approx([40.0, 45.0])
    assert drawn(store, "time") == []  # it has no score yet


def test_values_that_are_not_numbers_leave_a_gap(store: Store) -> None:
    rows = history(0, [40.0, 45.0, 50.0])
    rows[1]["test_accuracy"] = float("nan")
    finish(store, declared("bp"), rows)
    (chart,) = drawn(store, "curves")
    assert (chart.lines[0].x, chart.lines[0].y) == ([1, 3], pytest.approx([40.0, 50.0]))


def test_measures_that_are_not_finite_leave_a_gap_too(store: Store) -> None:
    alignment = [{"feedback": [None, cosine], "update": []} for cosine in (0.1, math.nan, math.inf, 0.4)]
    rows = [{**row, "alignment": alignment[row["epoch"] - 1]} for row in history(0, [1.0, 2.0, 3.0, 4.0])]
    finish(store, declared("fa", alignment=True), rows)
    (chart,) = drawn(store, "feedback")
    assert (chart.lines[0].x, chart.lines[0].y) == ([1, 4], pytest.approx([0.1, 0.4]))


def test_other_settings_of_a_rule_wait_in_the_legend(store: Store) -> None:
    fill(store, declared("bp", lr=0.1), [90.0, 91.0])
    fill(store, declared("bp", lr=0.2), [95.0])
    (chart,) = drawn(store, "curves")
    assert [(line.name, line.shown) for line in chart.lines] == [("bp", True), ("bp (lr 0.2)", False)]


def test_time_is_on_one_chart_for_each_device(store: Store) -> None:
    fill(store, declared("bp"), [90.0, 92.0], seconds_per_epoch=2.0)
    fill(store, declared("fa"), [80.0], seconds_per_epoch=4.0)
    fill(store, declared("dll"), [85.0], seconds_per_epoch=3.0, device="other")
    one, two = drawn(store, "time")
    assert (one.title, two.title) == ("mnist, mlp, abacus", "mnist, mlp, other")
    assert [(p.name, p.x, p.y, p.low, p.high) for p in one.lines] == [
        ("bp", [2.0], [91.0], [90.0], [92.0]),
        ("fa", [4.0], [80.0], [80.0], [80.0]),
    ]
    assert one.log_x
    assert one.points


def aligned(seed: int, epoch: int) -> dict[str, Any]:
    return {
        "feedback": [None, 0.1 * epoch + seed, 0.3 * epoch + seed],
        "update": [0.2 * epoch, 0.4 * epoch, 99.0],
        "local": [1.0 / epoch, 2.0 + seed, None],
    }


def recorded(store: Store) -> None:
    rows = [{**row, "alignment": aligned(seed, row["epoch"])} for seed in (0, 1) for row in history(seed, [50.0, 60.0])]
    finish(store, declared("dll", alignment=True), rows)


def test_alignment_is_the_mean_over_layers_and_the_range_over_seeds(store: Store) -> None:
    recorded(store)
    (feedback,) = drawn(store, "feedback")
    (line,) = feedback.lines
    assert line.y == pytest.approx([0.7, 0.9])  # (0.2 + 1.2) / 2 and (0.4 + 1.4) / 2
    assert (line.low, line.high) == (pytest.approx([0.2, 0.4]), pytest.approx([1.2, 1.4]))
    (update,) = drawn(store, "update")
    assert update.lines[0].y == pytest.approx([0.3, 0.6])  # hidden layers alone


def test_local_losses_are_a_line_for_each_layer_that_has_them(store: Store) -> None:
    recorded(store)
    (chart,) = drawn(store, "local")
    assert chart.title == "dll: mnist, mlp"
    assert chart.log_y
    assert [(line.name, line.y) for line in chart.lines] == [
        ("layer 1", pytest.approx([1.0, 0.5])),
        ("layer 2", pytest.approx([2.5, 2.5])),
    ]


def test_a_local_loss_of_zero_has_no_place_on_a_logarithmic_axis(store: Store) -> None:
    rows = [{**row, "alignment": {"local": [2.0 - row["epoch"]]}} for row in history(0, [1.0, 2.0])]
    finish(store, declared("dll", alignment=True), rows)
    (chart,) = drawn(store, "local")
    assert (chart.lines[0].x, chart.lines[0].y) == ([1], [1.0])


def test_without_recorded_alignment_there_is_no_such_chart(store: Store) -> None:
    fill(store, declared("dll"), [90.0])
    assert {one.kind for s in make_chart_sections(collect(store)) for one in s.drawings} == {"curves", "time"}


def test_two_settings_that_vary_together_are_a_heat_map_and_no_lines(store: Store) -> None:
    for rate in (0.01, 0.1, 1.0):
        for std in (0.05, 1.0):
            if (rate, std) != (1.0, 1.0):  # not run yet
                options = {"theta_rate": rate, "theta_std": std}
                fill(store, declared("dll", options=options), [100 * rate * std, 100 * rate * std])
    (heat,) = drawn(store, "heat")
    assert isinstance(heat, HeatMap)
    assert (heat.x, heat.columns, heat.y, heat.rows) == ("theta_rate", [0.01, 0.1, 1.0], "theta_std", [0.05, 1.0])
    assert heat.values[0] == pytest.approx([0.05, 0.5, 5.0])
    assert heat.values[1][:2] == pytest.approx([1.0, 10.0])
    assert heat.values[1][2] is None
    assert drawn(store, "sweep") == []
    (curves,) = drawn(store, "curves")
    assert len(curves.lines) == 1  # what a sweep compares is not there again


def test_settings_varied_one_at_a_time_are_lines(store: Store) -> None:
    for lr in (1e-4, 1e-3, 1e-2):
        fill(store, declared("dll", lr=lr), [lr * 1000, lr * 1000 + 2])
    for batch_size in (32, 64):  # with lr 1e-3 and 128 three of them
        fill(store, declared("dll", lr=1e-3, batch_size=batch_size), [50.0])
    by_setting = {chart.x: chart for chart in drawn(store, "sweep")}
    assert set(by_setting) == {"lr", "batch_size"}
    (line,) = by_setting["lr"].lines
    assert (line.x, line.y) == ([1e-4, 1e-3, 1e-2], pytest.approx([1.1, 2.0, 11.0]))
    assert (line.low, line.high) == (pytest.approx([0.1, 1.0, 10.0]), pytest.approx([2.1, 3.0, 12.0]))
    assert by_setting["lr"].log_x
    assert not by_setting["batch_size"].log_x
    assert by_setting["batch_size"].lines[0].x == [32, 64, 128]
    assert drawn(store, "heat") == []


def test_what_was_recorded_does_not_part_a_sweep(store: Store) -> None:
    for lr in (0.1, 0.2, 0.3):
        fill(store, declared("dll", lr=lr, alignment=lr == 0.2), [100 * lr])
    (chart,) = drawn(store, "sweep")
    assert chart.lines[0].y == pytest.approx([10.0, 20.0, 30.0])


def test_two_values_or_two_things_that_differ_are_no_sweep(store: Store) -> None:
    fill(store, declared("dll", lr=0.1), [90.0])
    fill(store, declared("dll", lr=0.2), [90.0])
    fill(store, declared("dll", lr=0.3, epochs=7), [90.0])
    assert drawn(store, "sweep") == drawn(store, "heat") == []


def test_a_rule_has_one_style_in_every_chart(store: Store) -> None:
    for data in ("mnist", "digits"):
        for rule in ("fa", "dll", "mine"):
            fill(store, declared(rule, data=data), [90.0])
    styles: dict[str, set[int]] = {}
    for chart in [*drawn(store, "curves"), *drawn(store, "time")]:
        for line in chart.lines:
            styles.setdefault(line.name, set()).add(line.style)
    assert {name: len(each) for name, each in styles.items()} == {"fa": 1, "dll": 1, "mine": 1}
    assert len({next(iter(each)) for each in styles.values()}) == 3


@pytest.mark.parametrize("name", ["../../etc", "a/b", "a:b c", "<b>"])
def test_a_name_of_a_file_stays_in_its_folder(name: str, store: Store) -> None:
    fill(store, declared(name, name), [90.0])
    drawings: list[Drawing] = drawn(store, "curves") + drawn(store, "time")
    for drawing in drawings:
        assert isinstance(drawing, Chart)
        assert (Path("folder") / make_file_name(drawing)).resolve().parent == Path("folder").resolve()
        assert not set(make_file_name(drawing)) & set('/\\:<>" ')
