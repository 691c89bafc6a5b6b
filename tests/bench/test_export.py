"""What is exported is what the store holds, in every format."""

import csv
import io
import json
import re
import statistics
from pathlib import Path
from typing import Any

import pytest

import apical
from apical.bench.declaration import Declaration, Request
from apical.bench.export import FORMATS, export, write_export
from apical.bench.store import Outcome, Store
from apical.bench.suites import list_jobs, load
from apical.plausibility.criteria import compare_with_paper, read_verdicts
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
    write_export(tmp_path / "s.parquet", content)
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
            assert float(row["score"]) == pytest.approx(SCORES[row["rule"]][kept.seed] / 100)
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
        r"Backpropagation & $\times$ & $\checkmark$ ($\times$) & $\times$ & MLP & \textbf{98.50} "
        rf"{{\scriptsize $\pm$ {spread:.2f}}} \\"
    )
    assert body[2].startswith(r"Dendritic localized learning, kolen-pollack & $\checkmark$ & $\checkmark$ & ")
    assert r"97.25 {\scriptsize" in body[2]
    assert body[3].startswith("Readout (control) & ")
    assert "& MLP & 91.00" in body[3]
    assert body[4].endswith(r"&  &  &  & MLP & -- \\")  # what never ran to its end is not judged
    assert lines[1:3] == [r"% \usepackage{amssymb}", r"% \usepackage{booktabs}"]
    columns = lines[3].removeprefix(r"\begin{tabular}{").removesuffix("}")
    assert columns == "lccclr"
    assert all(line.count("&") == len(columns) - 1 for line in body)
    assert lines[-2].startswith(r"\multicolumn{6}{l}{\footnotesize C1--C3 are measured by")


@pytest.mark.parametrize("rule", ["bp", "fa", "dll", "dll:kolen-pollack", "readout"])
def test_latex_has_the_verdicts_of_the_other_tables(rule: str, tmp_path: Path) -> None:
    made = Store(tmp_path / "s.sqlite")
    fill(made, declared(rule), [90.0])
    cells = str(export(made, "latex")).splitlines()[7].split(" & ")[1:4]
    ours, _, theirs = compare_with_paper(rule, read_verdicts()[rule]).partition(" ≠ ")
    signs = {r"$\times$": "✗", r"$\checkmark$": "✓"}
    assert "".join(signs[cell.split()[0]] for cell in cells) == ours
    assert "".join(signs[cell.split()[-1].strip("()")] for cell in cells) == (theirs or ours)


def test_latex_has_a_block_for_each_network_and_no_spread_of_one_seed(tmp_path: Path) -> None:
    made = Store(tmp_path / "s.sqlite")
    for rule in ("bp", "fa"):
        for model in ("mlp", "cnn"):
            fill(made, declared(rule, model), [90.0])
    body = str(export(made, "latex")).splitlines()[6:-3]
    models = [line if line == r"\midrule" else line.split(" & ")[4] for line in body]
    assert models == [r"\midrule", "MLP", "MLP", r"\midrule", "CNN", "CNN"]
    assert body[1].endswith(r"& \textbf{90.00} \\")


def test_latex_has_a_line_for_each_of_two_blocks_that_differ_in_settings_alone(tmp_path: Path) -> None:
    suite = tmp_path / "two.toml"
    block = '[[runs]]\nrules = ["bp"]\nmodels = ["mlp"]\ndata = ["mnist"]\ntuned = false\nsettings = {{ lr = {} }}\n'
    suite.write_text(block.format(0.1) + block.format(0.2))
    made = Store(tmp_path / "s.sqlite")
    for job, score in zip(list_jobs(load(str(suite))), (90.0, 80.0), strict=True):
        assert job.declaration is not None
        fill(made, job.declaration, [score])
    body = str(export(made, "latex", Request(suite=str(suite)))).splitlines()[7:9]
    assert [(line.partition(" &")[0], line[-9:-3]) for line in body] == [
        ("Backpropagation (lr 0.1)", "90.00}"),
        ("Backpropagation (lr 0.2)", " 80.00"),
    ]


def test_latex_has_the_plain_name_of_a_rule_that_is_not_here(store: Store) -> None:
    fill(store, declared("signed_error:mine"), [50.0, 51.0])
    assert r"signed\_error, mine &  &  &  & MLP & 50.50" in str(export(store, "latex"))


def test_latex_of_a_suite_has_its_columns_and_the_average(store: Store) -> None:
    chosen = Request(suite="table1", models=["mlp"], rules=["bp"])
    for job in list_jobs(load(chosen.suite), chosen):
        fill(store, job.declaration, [60.0, 62.0, 61.0, 61.0])
    text = str(export(store, "latex", chosen))
    assert "& MNIST & FashionMNIST & SVHN & CIFAR-10 & Avg." in text
    assert r"& 61.00 \\" in text


def test_latex_of_folds_is_their_mean(tmp_path: Path) -> None:
    chosen = Request(suite="text", data=["mr"], rules=["bp"])
    with Store(tmp_path / "folds.sqlite") as store:
        for job in list_jobs(load(chosen.suite), chosen):
            fill(store, job.declaration, [70.0 + job.varied["fold"]])
        text = str(export(store, "latex", chosen))
    lines = [line for line in text.splitlines() if line.startswith("Backpropagation")]
    assert len(lines) == 1
    assert "74.50" in lines[0]
    assert "fold" not in text


def test_latex_has_a_column_for_each_measure_and_no_average_of_several(tmp_path: Path) -> None:
    with Store(tmp_path / "measures.sqlite") as store:
        fill(store, declared("bp", "cnn", "cifar100"), [50.0, 52.0])
        fill(store, declared("bp", "cnn", "tiny_imagenet"), [20.0, 22.0])
        text = str(export(store, "latex"))
    assert r"& CIFAR-100 & Tiny-ImageNet, error rate \% \\" in text
    assert r"\textbf{51.00} {\scriptsize $\pm$ 1.41} & \textbf{79.00} {\scriptsize $\pm$ 1.41} \\" in text


def test_latex_says_which_protocol_a_score_has_and_takes_any_name(tmp_path: Path) -> None:
    with Store(tmp_path / "odd.sqlite") as store:
        fill(store, declared("bp", data="text:$x{y}^~\\.txt", protocol="paper"), [50.0, 52.0])
        text = str(export(store, "latex"))
    assert "Backpropagation (best test epoch)" in text
    assert r"text:\$x\{y\}\textasciicircum{}\textasciitilde{}\textbackslash{}.txt" in text


def test_runs_that_differ_in_a_setting_say_in_which(store: Store) -> None:
    fill(store, declared("bp", lr=0.5), [50.0, 51.0])
    text = str(export(store, "latex"))
    assert "Backpropagation (lr 0.5)" in text
    assert "Backpropagation (lr 0.001)" in text
    page = str(export(store, "markdown"))
    assert "| rule | C1-C3 | lr | accuracy % |" in page
    assert "| bp | ✗✓✗ ≠ ✗✗✗ | 0.5 | 50.50 ± 0.71 |" in page


def test_markdown_of_a_suite_is_its_tables(store: Store) -> None:
    chosen = Request(suite="table1", models=["mlp"], rules=["bp"])
    page = str(export(store, "markdown", chosen))
    assert page.startswith("## Table 1: image classification, mlp\n")
    assert "| rule | C1-C3 | mnist | fashion_mnist | svhn | cifar10 | average |" in page


def test_markdown_and_latex_escape_the_names_in_a_store(tmp_path: Path) -> None:
    hostile = "<script>alert(1)</script>\n# x|[a](javascript:b)\x1b[2J"
    with Store(tmp_path / "odd.sqlite") as store:
        fill(store, declared("bp", hostile, hostile, options={hostile: hostile}), [50.0])
        fill(store, declared("bp", hostile, hostile, options={hostile: "b"}), [50.0])
        fill(store, declared(hostile, hostile, hostile), [51.0])
        page, table = str(export(store, "markdown")), str(export(store, "latex"))
    assert page.count("&lt;script>") > 4
    assert "<script" not in page
    assert "](" not in page
    assert page.count("\n#") == 0, "no name begins a line"
    widths = {len(re.findall(r"(?<!\\)\|", line)) for line in page.splitlines() if line.startswith("|")}
    assert len(widths) == 1, "no name is a cell of its own"
    assert "\x1b" not in page + table


def test_an_unknown_format_is_one_sentence(store: Store) -> None:
    with pytest.raises(apical.ApicalError, match="unknown format 'xls'; csv, json, parquet, latex, markdown work"):
        export(store, "xls")
    assert FORMATS == ("csv", "json", "parquet", "latex", "markdown")


def test_without_pyarrow_one_sentence_says_what_to_install(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    with pytest.raises(apical.ApicalError, match=r"pip install 'apical\[parquet\]'"):
        export(store, "parquet")


def test_a_list_says_how_many_epochs_were_recorded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("typer")
    from apical.cli.results import list_results

    made = Store(tmp_path / "s.sqlite")
    fill(made, declared("bp", epochs=2), [90.0])  # which has two
    fill(made, declared("fa", epochs=60), [90.0])
    list_results(made.path)
    lines = [line.split("│") for line in capsys.readouterr().out.splitlines() if "abacus" in line]
    assert [line[6].strip() for line in lines] == ["2", "2 of 60"]


def quick(rule: str) -> Declaration:
    return Declaration.from_dict({**declared(rule).to_dict(), "examples": 128})


def test_a_list_has_the_errors_of_series_and_says_which_runs_are_quick(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("typer")
    from apical.cli.results import list_results

    made = Store(tmp_path / "s.sqlite")
    fill(made, declared("bp"), [90.0])
    fill(made, quick("bp"), [90.0])
    series, epoch = declared("bp", "rnn", "etth1"), {"seed": 0, "epoch": 1, "test_mse": 0.25, "test_mae": 0.5}
    made.claim(series, [0])
    made.finish(series, [0], Outcome([epoch], {}, {"device": "abacus"}))
    list_results(made.path)
    lines = [line.split("│") for line in capsys.readouterr().out.splitlines() if "abacus" in line]
    assert ["quick" in line[5] for line in lines] == [False, True, False]
    assert [line[7].strip() for line in lines] == ["accuracy % 90.00"] * 2 + ["MSE 0.2500"]
    scores = {(row["measure"], row["score"], row["last_test_mae"]) for row in rows_of(made, "json", tmp_path)}
    assert scores == {("accuracy", 0.9, None), ("mse", 0.25, 0.5)}


def test_the_best_error_is_the_smallest(tmp_path: Path) -> None:
    made = Store(tmp_path / "s.sqlite")
    fill(made, declared("bp", "cnn", "tiny_imagenet"), [30.0])
    fill(made, declared("fa", "cnn", "tiny_imagenet"), [20.0])
    text = str(export(made, "latex"))
    assert r"\textbf{70.00}" in text
    assert r"\textbf{80" not in text


def test_a_quick_run_is_never_the_best(tmp_path: Path) -> None:
    made = Store(tmp_path / "s.sqlite")
    fill(made, declared("bp"), [90.0, 91.0])
    fill(made, quick("fa"), [99.0, 99.5])
    text = str(export(made, "latex"))
    assert r"\textbf{90.50}" in text
    assert "(examples 128)" in text
    assert r"\textbf{99" not in text


@pytest.mark.parametrize("format", ["csv", "json", "parquet", "latex"])
def test_a_suite_of_which_the_store_has_nothing_is_one_sentence(format: str, store: Store) -> None:
    with pytest.raises(apical.ApicalError, match=r"s\.sqlite holds no run of the suite 'digits'\.$"):
        export(store, format, Request(suite="digits"))


def test_no_export_overwrites_a_store(store: Store, tmp_path: Path) -> None:
    (tmp_path / "link.csv").symlink_to(store.path)
    (tmp_path / "hard.csv").hardlink_to(store.path)
    Store(tmp_path / "new.sqlite")
    for name in ("s.sqlite", "link.csv", "hard.csv", "new.sqlite"):
        before = (tmp_path / name).read_bytes()
        with pytest.raises(apical.ApicalError, match=rf"{name} is a store of results"):
            write_export(tmp_path / name, "rule\n")
        assert (tmp_path / name).read_bytes() == before
    for content in ("rule\n", "rule\nbp\n"):
        write_export(tmp_path / "s.csv", content)
        assert (tmp_path / "s.csv").read_text() == content


def test_a_store_with_nothing_in_it_can_be_exported(tmp_path: Path) -> None:
    empty = Store(tmp_path / "empty.sqlite")
    assert export(empty, "csv") == "rule\n"
    assert json.loads(export(empty, "json")) == []
    assert r"\begin{tabular}" in str(export(empty, "latex"))
