"""The times that come with apical are those that the results of this repository have."""

import json
from pathlib import Path

import pytest

from apical.bench.estimate import START_SECONDS, Estimate, Estimates
from apical.bench.store import Store
from pages import ROOT
from stores import declared, fill
from tools.times import FILE, collect_times, compute_medians


def test_the_times_that_come_with_apical_are_what_the_results_say_now() -> None:
    if not (ROOT / "results").is_dir():
        pytest.skip("the results are not here: this is not a checkout")
    kept = json.loads(FILE.read_text("utf-8"))
    assert kept == compute_medians(collect_times(ROOT / "results"), "NVIDIA H200"), "run: python tools/times.py results"


def test_a_perf_table_gives_the_epoch_of_four_seeds() -> None:
    if not (ROOT / "results").is_dir():
        pytest.skip("the results are not here: this is not a checkout")
    perf = json.loads((ROOT / "results" / "perf-NVIDIA-H200.json").read_text())
    (row,) = (row for row in perf["rows"] if (row["model"], row["rule"]) == ("cnn", "ep"))
    # 782 batches of 64 are 50,000 images; four seeds; milliseconds.
    expected = 782 * 4 * row["autograd_ms"] * row["engine_4_seeds"] / 1000
    found = Estimates([]).estimate(declared("ep", "cnn", "cifar10", batch_size=64, epochs=30), 4, "NVIDIA H200")
    assert found == Estimate(pytest.approx(START_SECONDS + 30 * expected, rel=1e-3), "NVIDIA H200")


def test_the_times_of_one_device_are_medians_over_runs_of_the_same_kind(tmp_path: Path) -> None:
    with Store(tmp_path / "deep" / "s.sqlite") as store:
        for lr, seconds in ((1, 1.0), (2, 2.0), (3, 9.0)):
            fill(store, declared(lr=lr), [90.0], seconds_per_epoch=seconds, together=1)
        fill(store, declared(lr=4), [90.0], seconds_per_epoch=7.0, together=1, device="another")
    (found,) = compute_medians(collect_times(tmp_path), "abacus")["epochs"]
    assert (found["device"], found["together"], found["seconds"]) == ("abacus", 1, 2.0)
