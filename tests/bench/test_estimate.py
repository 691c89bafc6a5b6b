"""How long something takes is what was measured: of the same kind of run, on the same kind of machine."""

from dataclasses import replace

import pytest
import torch

from apical.bench import estimate, suites
from apical.bench.declaration import Declaration, Request
from apical.bench.estimate import (
    START_SECONDS,
    EpochTime,
    Estimate,
    Estimates,
    format_duration,
    preview,
    select_timing_settings,
)
from apical.bench.store import Outcome, Store
from apical.bench.suites import list_jobs
from apical.bench.tables import make_tables
from apical.data import registry
from stores import declared, fill, outcome

pytestmark = pytest.mark.usefixtures("all_data")


def known(store: Store) -> Estimates:
    return Estimates(store.runs(), shipped=False)


def test_a_run_takes_its_epochs_times_what_was_measured(store: Store) -> None:
    fill(store, declared(epochs=2), [90.0] * 4, seconds_per_epoch=3.0, together=4)
    asked = known(store)
    assert asked.estimate(declared(epochs=10), 4, "abacus") == Estimate(START_SECONDS + 30, "abacus")
    assert asked.estimate(declared(epochs=10), 8, "abacus") == Estimate(START_SECONDS + 60, "abacus")
    assert asked.estimate(declared(epochs=10), 1, "abacus") == Estimate(START_SECONDS + 30, "abacus")
    assert asked.estimate(declared(lr=0.5, alignment=True), 4, "abacus") == Estimate(START_SECONDS + 60, "abacus")


@pytest.mark.parametrize(
    "other",
    [
        {"rule": "fa"},
        {"model": "cnn"},
        {"data": "digits"},
        {"batch_size": 64},
        {"precision": "bf16"},
        {"options": {"a": 1}},
    ],
)
def test_what_takes_another_time_is_not_taken_for_the_same(other: dict, store: Store) -> None:
    fill(store, declared(), [90.0], seconds_per_epoch=3.0)
    assert known(store).estimate(declared(**other), 1, "abacus") is None


def test_another_machine_is_asked_only_where_that_is_wanted(store: Store) -> None:
    fill(store, declared(), [90.0], seconds_per_epoch=3.0, together=1)
    asked = known(store)
    assert asked.estimate(declared(), 1, "a GPU") is None
    assert asked.estimate(declared(), 1, "a GPU", anywhere=True) == Estimate(START_SECONDS + 60, "abacus")
    fill(store, declared(lr=1), [90.0], seconds_per_epoch=1.0, together=1, device="a GPU")
    assert known(store).estimate(declared(), 1, "a GPU", anywhere=True) == Estimate(START_SECONDS + 20, "a GPU")


def test_the_same_network_on_other_images_takes_its_time_by_their_number(store: Store) -> None:
    fill(store, declared("np", "mlp", "cifar10"), [30.0] * 4, seconds_per_epoch=5.0, together=4)
    fill(store, declared("np", "cnn", "cifar10"), [30.0] * 4, seconds_per_epoch=5.0, together=4)
    asked = known(store)
    expected = START_SECONDS + 20 * 5.0 * 73_257 / 50_000
    assert asked.estimate(declared("np", "mlp", "svhn"), 4, "abacus") == Estimate(pytest.approx(expected), "abacus")
    assert asked.estimate(declared("np", "cnn", "svhn"), 4, "abacus") is None, "its CNN is another one"
    assert asked.estimate(declared("np", "mlp", "mnist"), 4, "abacus") is None
    fill(store, declared("np", "mlp", "svhn"), [30.0] * 4, seconds_per_epoch=9.0, together=4)
    own = known(store).estimate(declared("np", "mlp", "svhn"), 4, "abacus")
    assert own == Estimate(START_SECONDS + 20 * 9.0, "abacus"), "its own time is known better"


def test_several_measurements_give_their_median(store: Store) -> None:
    for lr, seconds in ((1, 1.0), (2, 2.0), (3, 9.0)):
        fill(store, declared(lr=lr), [90.0], seconds_per_epoch=seconds, together=1)
    assert known(store).estimate(declared(), 1, "abacus") == Estimate(START_SECONDS + 40, "abacus")


def test_a_preview_lists_every_run_names_the_total_and_what_is_unmeasured(store: Store) -> None:
    table = preview(Request(suite="table1", store=store.path, device="cpu"))
    assert len(table.rows) == 112
    rows = {tuple(row[:3]): row for row in table.rows}
    assert rows["bp", "mlp", "mnist"][3:6] == ["20", "4", "4"]
    assert rows["bp", "mlp", "mnist"][7] == "NVIDIA H200"
    total, without, what = table.notes
    times = Estimates([])
    for job in list_jobs(suites.load("table1")):
        known_time = times.estimate(job.declaration, 4, "NVIDIA H200")
        said = ["unmeasured", ""] if known_time is None else [format_duration(known_time.seconds), known_time.device]
        assert rows[job.rule, job.model, job.data][6:] == said
    jobs = [(job, times.estimate(job.declaration, 4, "NVIDIA H200")) for job in list_jobs(suites.load("table1"))]
    for note, rules in ((total, ()), (without, ("pc", "ep", "dtp"))):
        chosen = [estimate for job, estimate in jobs if job.rule not in rules]
        seconds = sum(estimate.seconds for estimate in chosen if estimate)
        count = sum(estimate is not None for estimate in chosen)
        assert f"{format_duration(seconds)} for {count} of {len(chosen)} runs, measured on NVIDIA H200" in note
        unmeasured = len(chosen) - count
        assert note.endswith(f"; {unmeasured} more unmeasured and not in it." if unmeasured else "200.")
    assert total.startswith("Total: ")
    assert without.startswith("Without pc, ep, dtp: ")
    assert what.startswith("A run is a line of the table")


def test_a_preview_knows_what_is_done(store: Store) -> None:
    chosen = Request(
        suite="table1", store=store.path, device="cpu", rules=["bp"], models=["mlp"], data=["mnist", "cifar10"]
    )
    fill(store, list_jobs(suites.load(chosen.suite), chosen)[0].declaration, [90.0, 91.0, 92.0, 93.0])
    fill(
        store,
        list_jobs(suites.load(chosen.suite), chosen)[1].declaration,
        [50.0, 51.0],
        device="abacus",
        seconds_per_epoch=10.0,
        together=2,
    )
    table = preview(chosen)
    assert table.rows[0][4:7] == ["4", "0", "done"]
    assert table.rows[1][4:7] == ["4", "2", "5 min"]
    assert table.notes[0] == "Total: 5 min for 1 of 1 runs, measured on abacus."
    assert not any(note.startswith("Without") for note in table.notes)  # there is none of these rules


def test_a_total_names_every_machine_and_says_when_nothing_is_known_or_left(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = Request(
        suite="table1",
        store=store.path,
        device="cpu",
        rules=["bp", "pc"],
        models=["cnn"],
        data=["mnist", "svhn", "cifar10"],
    )
    by_place = {(job.rule, job.data): job.declaration for job in list_jobs(suites.load(chosen.suite), chosen)}
    shipped = [EpochTime("a GPU", 4, 2.0, 20, select_timing_settings(by_place["bp", "mnist"]))]
    monkeypatch.setattr(estimate, "_load_shipped_times", lambda: shipped)
    table = preview(
        Request(suite="table1", store=store.path, device="cpu", rules=["pc"], models=["cnn"], data=["svhn"])
    )
    assert table.notes[0] == "Total: unknown, for nothing of it was measured."
    fill(store, by_place["bp", "svhn"], [50.0, 51.0], device="abacus", seconds_per_epoch=10.0, together=2)
    fill(store, by_place["pc", "svhn"], [50.0, 51.0], device="abacus", seconds_per_epoch=100.0, together=2)
    table = preview(chosen)
    without = 2 * START_SECONDS + 20 * 2.0 + 30 * 10.0
    total = without + START_SECONDS + 30 * 100.0
    left = "; {} more unmeasured and not in it."
    assert table.notes[:2] == [
        f"Total: {total / 60:.0f} min for 3 of 6 runs, measured on a GPU, abacus" + left.format(3),
        f"Without pc, ep, dtp: {without / 60:.0f} min for 2 of 3 runs, measured on a GPU, abacus" + left.format(1),
    ]
    for one in by_place.values():
        done = {row.seed for row in store.runs([one.key])}
        seeds = [seed for seed in range(4) if seed not in done]
        store.claim(one, seeds)
        store.finish(one, seeds, outcome({seed: [50.0] for seed in seeds}))
    table = preview(chosen)
    assert {row[6] for row in table.rows} == {"done"}
    assert table.notes == ["Nothing is left to do."]


def test_what_failed_is_to_do_only_where_it_is_done_again(store: Store) -> None:
    chosen = Request(suite="table1", store=store.path, device="cpu", rules=["bp"], models=["cnn"], data=["cifar10"])
    (job,) = [job for job in list_jobs(suites.load(chosen.suite), chosen) if job.rule == "bp"]
    assert job.declaration is not None
    store.claim(job.declaration, job.seeds)
    store.finish(job.declaration, job.seeds, Outcome([], dict.fromkeys(job.seeds, "no memory"), {"together": 4}))
    for redo, to_do in ((False, "0"), (True, "4")):
        table = preview(replace(chosen, redo=redo))
        (line,) = [row for row in table.rows if row[0] == "bp"]
        assert (line[5], line[6] == "failed") == (to_do, not redo)
    notes = make_tables(chosen, store)[0][-1].notes
    assert notes[-2:] == ["Failed: bp cnn cifar10: no memory", "--redo runs again what failed."]


def test_what_can_be_had_counts_and_what_this_version_does_not_have_does_not(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(suites, "explain_missing_data", lambda data: "it is not here." if data == "cifar10" else None)
    others = {name: entry for name, entry in registry.DATASETS.items() if name != "mnist"}
    monkeypatch.setattr(registry, "DATASETS", others)
    monkeypatch.setattr(estimate, "_load_shipped_times", list)
    fill(store, declared("bp", "cnn", "cifar10", batch_size=64), [50.0], seconds_per_epoch=0.9, together=4)
    table = preview(Request(suite="table1", store=store.path, device="cpu", rules=["bp"], models=["cnn"]))
    assert {row[2]: row[6] for row in table.rows} == {
        "mnist": "cannot run",
        "fashion_mnist": "unmeasured",
        "svhn": "unmeasured",
        "cifar10": "32 s",
    }
    assert "Not run: it is not here." in table.notes
    assert "for 1 of 3 runs" in table.notes[0]


def test_the_time_of_a_quick_or_failed_run_is_not_that_of_a_whole_one(store: Store) -> None:
    fill(store, Declaration.from_dict({**declared().to_dict(), "examples": 128}), [90.0])
    fill(store, declared("fa"), [80.0])
    store.claim(declared("dll"), [0])
    store.finish(declared("dll"), [0], outcome({0: [10.0]}, {0: "diverged"}))
    quick, whole, failed = map(EpochTime.from_row, store.runs())
    assert quick is failed is None
    assert whole is not None


def test_a_dry_run_times_a_step_of_what_was_measured_nowhere(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = Request(suite="digits", store=store.path, device="cpu", rules=["bp", "fa"], models=["mlp"])
    jobs = [job.declaration for job in list_jobs(suites.load("digits"), chosen)]
    assert [row[6] for row in preview(chosen).rows] == ["unmeasured"] * len(jobs)
    table = preview(chosen, times_steps=True)
    assert all(row[7].endswith(" CPU, one step") for row in table.rows)
    asked: list[tuple[str, int]] = []
    monkeypatch.setattr(estimate, "time_epoch", lambda one, seeds, device: asked.append((one.rule, seeds)) or 2.0)
    table = preview(chosen, times_steps=True)
    assert asked == [("bp", 5), ("fa", 5), ("readout", 5)]  # the control is the last
    expected = [format_duration(START_SECONDS + 2.0 * one.epochs) for one in jobs]
    assert [row[6] for row in table.rows] == expected


def test_one_rule_of_each_network_is_timed_and_scales_the_times_of_another_machine(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = Request(
        suite="table1", store=store.path, device="cpu", rules=["bp", "fa", "pc"], models=["mlp"], data=["mnist"]
    )
    asked: list[str] = []
    monkeypatch.setattr(estimate, "time_epoch", lambda one, *_: asked.append(one.rule) or 100.0)
    monkeypatch.setattr(estimate, "format_duration", lambda seconds: repr(seconds))
    there = {row[0]: float(row[6]) for row in preview(chosen).rows}
    here = {row[0]: float(row[6]) for row in preview(chosen, times_steps=True).rows}
    assert asked == ["bp"]  # the control trains one layer, which says little of the others
    assert here["bp"] == START_SECONDS + 20 * 100.0
    for rule, seconds in there.items():
        slower = (here[rule] - START_SECONDS) / (here["bp"] - START_SECONDS)
        assert slower == pytest.approx((seconds - START_SECONDS) / (there["bp"] - START_SECONDS))
    only = replace(chosen, rules=["readout"])
    assert len(preview(only, times_steps=True).rows) == 1
    assert asked == ["bp", "readout"]  # where there is no other


@pytest.mark.parametrize(
    ("step", "epoch", "calls"),
    [(0.5, 60 * 0.5 * 3, [([0], 1)]), (0.01, 60 * 0.01, [([0], 1), ([0, 1, 2], 4)])],
    ids=["one seed after the other", "together"],
)
def test_an_epoch_is_its_steps_times_what_one_takes(
    step: float, epoch: float, calls: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    timed: list[object] = []
    monkeypatch.setattr(estimate, "_time_steps", lambda one, source, *how: timed.append(how[:2]) or step)
    asked = declared("bp", "mlp", "mnist", batch_size=1000)
    assert estimate.time_epoch(asked, 3, torch.device("cpu")) == pytest.approx(epoch)
    assert timed == calls
    assert estimate.time_epoch(declared("bp", "rnn", "etth1"), 1, torch.device("cpu")) is None
