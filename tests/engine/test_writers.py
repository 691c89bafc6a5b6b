"""The writers of `fit(on_epoch=…)`: what TensorBoard reads and Weights & Biases gets is the history."""

import sys
from pathlib import Path
from typing import Any

import pytest

import apical
from apical.errors import MissingExtraError
from runs import fit


def list_expected(run: apical.Fit) -> dict[str, list[tuple[int, float]]]:
    """The curves of a run, by tag: epoch and value."""
    curves: dict[str, list[tuple[int, float]]] = {}
    for row in run.history:
        for name in ("loss", "accuracy", "test_loss", "test_accuracy", "seconds"):
            curves.setdefault(f"{name}/seed{row['seed']}", []).append((row["epoch"], row[name]))
        for kind, cosines in row.get("alignment", {}).items():
            for i, cosine in enumerate(cosines):
                if cosine is not None:
                    curves.setdefault(f"alignment/{kind}/layer{i}/seed{row['seed']}", []).append((row["epoch"], cosine))
    return curves


def test_tensorboard_reads_every_number_of_the_history(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    written: list[int] = []

    def read() -> dict[str, list[tuple[int, float]]]:
        reader = EventAccumulator(str(tmp_path))
        reader.Reload()
        return {tag: [(e.step, e.value) for e in reader.Scalars(tag)] for tag in reader.Tags()["scalars"]}

    writer = apical.TensorBoardWriter(tmp_path)

    def on_epoch(rows: list[dict[str, Any]]) -> None:
        writer(rows)
        written.append(len(read()["loss/seed0"]))  # there when the epoch ends, not when the run does

    run = fit(rule="dll", seeds=2, epochs=3, alignment=True, on_epoch=on_epoch, progress=False)
    assert written == [1, 2, 3]
    expected, found = list_expected(run), read()
    assert found.keys() == expected.keys()
    for tag, curve in expected.items():
        assert [step for step, _ in found[tag]] == [1, 2, 3]
        assert [value for _, value in found[tag]] == pytest.approx([value for _, value in curve], rel=1e-6)


class FakeRun:
    def __init__(self) -> None:
        self.logged: list[tuple[int, dict[str, float]]] = []

    def log(self, values: dict[str, float], step: int, commit: bool) -> None:
        assert commit  # else the last epoch would wait for the end of the run
        self.logged.append((step, values))


def test_weights_and_biases_gets_one_entry_per_epoch() -> None:
    logged = FakeRun()
    run = fit(rule="dll", seeds=2, epochs=2, on_epoch=apical.WandbWriter(logged), progress=False)
    assert [step for step, _ in logged.logged] == [1, 2]
    for tag, curve in list_expected(run).items():
        assert [(step, values[tag]) for step, values in logged.logged] == curve
    apical.WandbWriter(logged)([])
    assert len(logged.logged) == 2


@pytest.mark.slow
def test_weights_and_biases_itself_takes_the_run_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_SILENT", "true")
    writer = apical.WandbWriter(project="apical", mode="offline", dir=str(tmp_path))
    run = fit(rule="bp", seeds=1, epochs=2, on_epoch=writer, progress=False)
    assert writer.run.summary["loss/seed0"] == run.history[-1]["loss"]
    writer.run.finish()
    assert any(path.name.startswith("offline-run") for path in (tmp_path / "wandb").iterdir())


@pytest.mark.parametrize(("writer", "extra"), [("TensorBoardWriter", "tensorboard"), ("WandbWriter", "wandb")])
def test_a_missing_package_is_named_with_its_extra(writer: str, extra: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, extra, None)
    arguments = ["runs"] if extra == "tensorboard" else []
    with pytest.raises(MissingExtraError, match=rf"needs {extra}.*pip install 'apical\[{extra}\]'"):
        getattr(apical, writer)(*arguments)
