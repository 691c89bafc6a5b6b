"""What is exported is what the store holds, in every format."""

import csv
import io
import json
import statistics
from pathlib import Path
from typing import Any

import pytest

import apical
from apical.bench.export import FORMATS, export, write
from apical.bench.plan import plan
from apical.bench.store import Store
from apical.bench.suites import Choice
from stores import declared, fill, outcome

SCORES = {"bp": [98.0, 99.0], "dll:kolen-pollack": [97.0, 97.5], "readout": [91.0, 91.0]}


pytestmark = pytest.mark.usefixtures("all_data")


@pytest.fixture
def store(tmp_path: Path) -> Store:
    made = Store(tmp_path / "s.sqlite")
    for rule, scores in SCORES.items():
        fill(made, declared(rule, options={"theta_std": 0.5} if rule.startswith("dll") else {}), scores)
    failed = declared("fa")
    made.claim(failed, [0])
    made.finish(failed, [0], outcome({0: []}, {0: 'it broke, and "how"'}))
    return made


def rows_of(store: Store, format: str, tmp_path: Path) -> list[dict[str, Any]]:
    content = export(store, format)
    if format == "json":
        return json.loads(content)
    if format == "csv":
        return list(csv.DictReader(io.StringIO(str(content))))
    parquet = pytest.importorskip("pyarrow.parquet")
    write(tmp_path / "s.parquet", content)
    return parquet.read_table(tmp_path / "s.parquet").to_pylist()


@pytest.mark.parametrize("format", ["csv", "json", "parquet"])
def test_every_run_is_a_row_with_all_that_is_known(format: str, store: Store, tmp_path: Path) -> None:
    found = rows_of(store, format, tmp_path)
    assert [(row["rule"], int(row["seed"])) for row in found] == [
        *((rule, seed) for rule in SCORES for seed in (0, 1)),
        ("fa", 0),
    ]
    for row, kept in zip(found, store.runs(), strict=True):
        asked = row["declaration"] if format == "json" else json.loads(row["declaration"])
        assert asked == kept.declaration.to_dict()
        assert row["key"] == kept.key
        assert row["status"] == kept.status
        assert (row["error"] or None) == kept.error
        assert row["device"] == "abacus"
        if kept.status == "done":
            assert float(row["score"]) == pytest.approx(SCORES[row["rule"]][kept.seed])
            assert float(row["last_test_accuracy"]) == pytest.approx(SCORES[row["rule"]][kept.seed] / 100)
            assert int(row["last_epoch"]) == 2


def test_json_has_every_epoch(store: Store) -> None:
    for row, kept in zip(json.loads(export(store, "json")), store.runs(), strict=True):
        assert row["epochs"] == store.history(kept)


def test_latex_is_a_table_with_criteria_means_and_the_best_in_bold(store: Store) -> None:
    lines = str(export(store, "latex")).splitlines()
    body = [line for line in lines if line.endswith(r"\\") and "&" in line]
    assert body[0] == r"Method & C1 & C2 & C3 & Model & MNIST \\"
    spread = statistics.stdev(SCORES["bp"])
    assert body[1] == (
        r"Backpropagation & $\times$ & $\times$ & $\times$ & MLP & \textbf{98.50} "
        rf"{{\scriptsize $\pm$ {spread:.2f}}} \\"
    )
    assert body[2].startswith(r"Dendritic localized learning, kolen-pollack & $\checkmark$ & $\checkmark$ & ")
    assert r"97.25 {\scriptsize" in body[2]
    assert body[3].startswith("Readout (control) &  &  &  & MLP & 91.00")
    assert body[4].endswith(r"& -- \\")
    columns = lines[1].removeprefix(r"\begin{tabular}{").removesuffix("}")
    assert all(line.count("&") == len(columns) - 1 for line in body)


def test_latex_of_a_suite_has_its_columns_and_the_average(store: Store) -> None:
    chosen = plan("table1", Choice(models=["mlp"], rules=["bp"]))
    for job in chosen.jobs:
        fill(store, job.declaration, [60.0, 62.0, 61.0, 61.0])
    text = str(export(store, "latex", chosen))
    assert "& MNIST & FashionMNIST & SVHN & CIFAR-10 & Avg." in text
    assert r"& 61.00 \\" in text


def test_runs_that_differ_in_a_setting_say_in_which(store: Store) -> None:
    fill(store, declared("bp", lr=0.5), [50.0, 51.0])
    text = str(export(store, "latex"))
    assert "Backpropagation (lr 0.5)" in text
    assert "Backpropagation (lr 0.001)" in text
    page = str(export(store, "markdown"))
    assert "| rule | C1-C3 | lr | accuracy % |" in page
    assert "| bp | ✗✓✗ ≠ ✗✗✗ | 0.5 | 50.50 ± 0.71 |" in page


def test_markdown_of_a_suite_is_its_tables(store: Store) -> None:
    chosen = plan("table1", Choice(models=["mlp"], rules=["bp"]))
    page = str(export(store, "markdown", chosen))
    assert page.startswith("## Table 1: image classification, mlp\n")
    assert "| rule | C1-C3 | mnist | fashion_mnist | svhn | cifar10 | average |" in page


def test_an_unknown_format_is_one_sentence(store: Store) -> None:
    with pytest.raises(
        apical.ApicalError, match="unknown format 'xls'; csv, json, parquet, latex, markdown work"
    ):
        export(store, "xls")
    assert FORMATS == ("csv", "json", "parquet", "latex", "markdown")


def test_without_pyarrow_one_sentence_says_what_to_install(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    with pytest.raises(apical.ApicalError, match=r"pip install 'apical\[parquet\]'"):
        export(store, "parquet")


def test_a_store_with_nothing_in_it_can_be_exported(tmp_path: Path) -> None:
    empty = Store(tmp_path / "empty.sqlite")
    assert export(empty, "csv") == "rule\n"
    assert json.loads(export(empty, "json")) == []
    assert r"\begin{tabular}" in str(export(empty, "latex"))
