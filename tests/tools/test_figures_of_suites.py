"""Each suite has the figures that its question needs, with the values of the store at their places."""

from typing import Any

import pytest

from apical.bench import suites
from apical.bench.cells import load_cells
from apical.bench.declaration import Request
from apical.bench.store import Outcome, Store
from apical.bench.suites import Job, list_jobs
from apical.report.charts import Chart, Drawing, HeatMap
from stores import fill, history
from tools.pages.figures import KINDS, TITLES, make_figures
from tools.pages.notes import Notes
from tools.pages.section import PAPER, read_cells


def put(store: Store, suite: str, scores: dict[str, float], **choice: Any) -> list[Job]:
    """As many seeds as the suite has, that end at these scores and above; a control ends at 50."""
    found = list_jobs(suites.load(suite), Request(rules=list(scores), **choice))
    for number, job in enumerate(found):
        assert job.declaration is not None
        values = [scores.get(job.rule, 50.0) + seed for seed in range(len(job.seeds))]
        fill(store, job.declaration, values, seconds_per_epoch=number + 1.0, peak_memory=(number + 1) * 10_000_000)
    return found


def drawn(store: Store, suite: str) -> dict[str, list[Drawing]]:
    return make_figures(suite, load_cells(list_jobs(suites.load(suite), Request()), store))


def test_a_kind_without_data_is_left_out_and_every_kind_has_a_title(store: Store) -> None:
    assert drawn(store, "table1") == {}
    put(store, "rules", {"bp": 90.0}, models=["mlp"], data=["mnist"])  # without alignments
    assert set(drawn(store, "rules")) == {"time"}
    assert {kind for kinds in KINDS.values() for kind in kinds} == set(TITLES)
    assert set(KINDS) <= set(PAPER)


def test_learning_curves_have_a_panel_for_each_network_and_data_set(store: Store) -> None:
    put(store, "table1", {"bp": 90.0, "fa": 80.0}, data=["mnist"])
    panels = drawn(store, "table1")["curves"]
    assert [panel.title for panel in panels] == ["mnist, mlp", "mnist, cnn"]
    for panel in panels:
        assert isinstance(panel, Chart)
        assert [line.name for line in panel.lines] == ["bp", "fa"]
        assert panel.lines[0].y == [pytest.approx(90.5), pytest.approx(91.5)]  # seeds end at 90, 91, 92 and 93
        assert panel.lines[0].low[-1] == pytest.approx(90.0)
        assert panel.lines[0].high[-1] == pytest.approx(93.0)


def test_depth_counts_hidden_layers(store: Store) -> None:
    put(store, "depth", {"dll": 70.0}, models=["mlp-1024"])
    put(store, "depth", {"dll": 80.0}, models=["mlp"])
    put(store, "depth", {"dll": 60.0}, models=["mlp-1024-512-256-256-256-256-256-256"])
    (panel,) = drawn(store, "depth")["depth"]
    assert isinstance(panel, Chart)
    (line,) = panel.lines
    assert line.x == [1.0, 3.0, 8.0]
    assert line.y == [pytest.approx(71.5), pytest.approx(81.5), pytest.approx(61.5)]
    assert (line.low[0], line.high[0]) == (pytest.approx(70.0), pytest.approx(73.0))


def test_theta_has_heat_maps_and_a_line_of_alignment_for_each_setting(store: Store) -> None:
    chosen = list_jobs(suites.load("theta"), Request(models=["mlp"], rules=["dll", "dll:frozen"]))
    for job in chosen:
        assert job.declaration is not None
        std, rate = job.varied["theta_std"], job.varied.get("theta_rate", 0.0)
        cosines = {"feedback": [None, std, rate], "update": [rate, std, 1.0]}
        store.claim(job.declaration, job.seeds)
        rows = [row for seed in job.seeds for row in history(seed, [50.0 + std, 60.0 + std], alignment=cosines)]
        store.finish(job.declaration, job.seeds, Outcome(rows, {}, {}))
    found = drawn(store, "theta")
    (heat,) = found["heat"]
    assert isinstance(heat, HeatMap)
    assert (heat.columns, heat.rows) == ([0.01, 0.1, 1.0], [0.05, 1.0])
    assert heat.values == [[pytest.approx(60.05)] * 3, [pytest.approx(61.0)] * 3]
    for kind in ("feedback", "update"):
        printed, frozen = found[kind]
        assert isinstance(printed, Chart)
        assert isinstance(frozen, Chart)
        assert [panel.title for panel in (printed, frozen)] == ["dll: mnist, mlp", "dll:frozen: mnist, mlp"]
        ends = {line.name: line.y[-1] for line in printed.lines}
        assert len(ends) == 6
        assert ends["theta_rate 0.1, theta_std 1"] == pytest.approx(
            0.55
        )  # the mean of both layers; of update's, hidden ones
        styles = {line.style for line in (*printed.lines, *frozen.lines)}
        assert len(styles) == 8  # a setting looks the same in every panel, and like no other


def test_growth_has_seconds_and_megabytes_over_batch_and_width(store: Store) -> None:
    batch = put(store, "cost", {"bp": 90.0}, models=["mlp"])  # 1, 2, 3 and 4 seconds, and ten times as many megabytes
    wide = put(store, "cost", {"dll": 90.0}, models=["mlp-256-256-256", "mlp-1024-1024-1024"])
    assert [job.varied["batch_size"] for job in batch] == [32, 128, 512, 2048]
    assert len(wide) == 2
    time, memory, *over_width = drawn(store, "cost")["growth"]
    for panel, unit, size in ((time, "seconds per epoch", 1), (memory, "peak memory, MB", 10)):
        assert isinstance(panel, Chart)
        assert (panel.x, panel.y, panel.title) == ("batch size", unit, "mnist, mlp")
        assert (panel.lines[0].x, panel.lines[0].y) == ([32, 128, 512, 2048], [size * k for k in (1, 2, 3, 4)])
    for panel, size in zip(over_width, (1, 10), strict=True):
        assert isinstance(panel, Chart)
        assert panel.x == "width"
        assert (panel.lines[0].x, panel.lines[0].y) == ([256, 1024], [size, 2 * size])


def test_sentences_are_drawn_with_their_folds_as_one(store: Store) -> None:
    for job in list_jobs(suites.load("text"), Request(rules=["bp"], data=["mr"])):
        assert job.declaration is not None
        fill(store, job.declaration, [80.0 + job.varied["fold"]])
    (panel,) = make_figures("text", read_cells(suites.load("text"), store, Notes()))["curves"]
    assert isinstance(panel, Chart)
    (line,) = panel.lines
    assert line.y[-1] == pytest.approx(84.5)  # the mean of 80 to 89
    assert (line.low[-1], line.high[-1]) == (pytest.approx(80.0), pytest.approx(89.0))
