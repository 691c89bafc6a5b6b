"""The paper's figures, read a second time from its own source where that lies beside the repository."""

import re
from itertools import pairwise
from pathlib import Path

import pytest

from apical.bench.cells import AVERAGE, COST, FIGURES, TABLE_1, Figure, find_figure
from apical.core.registry import resolve

PAPER = Path(__file__).parents[3] / "shared" / "paper.tex"
COLUMNS = ("mnist", "fashion_mnist", "svhn", "cifar10")
METHODS = {
    "Backpropagation": "bp",
    "Feedback Alignment": "fa",
    "Local Losses": "local",
    "Predictive Coding": "pc",
    "Perturbation Learning": "wp",
    "Difference Target Propagation": "dtp",
    "Hebbian Learning": "hebb",
    "R-STDP": "rstdp",
    "Forward Forward": "ff",
    "Equilibrium Propagation": "ep",
    "DLL (Ours)": "dll",
}
ACCURACY = {key[:3]: figure for key, figure in FIGURES.items() if key[1] in ("mlp", "cnn") and key[2] in TABLE_1}
"""Table 1, and what table 3 adds to it."""


@pytest.fixture(scope="module")
def tex() -> str:
    if not PAPER.exists():
        pytest.skip(f"the paper's source is not at {PAPER}")
    lines = PAPER.read_text("utf-8").splitlines()
    return "\n".join(line for line in lines if not line.lstrip().startswith("%"))


def table(tex: str, label: str) -> str:
    start = tex.index(f"label{{{label}}}")
    return tex[start : tex.index(r"\end{tabular}", start)]


def test_table_1_is_the_papers(tex: str) -> None:
    found: dict[tuple[str, str, str], Figure] = {}
    cells = re.compile(r"(\d+\.\d+)\\%\$\{\\scriptsize \$\\pm (\d+\.\d+)\\%\$\}")
    rows = table(tex, "tab:main").split(r"\\")
    # Two lines a method, MLPs then CNNs; its name stands in the first of them, or in the second with {-2}.
    for one, two in pairwise(rows):
        if "& MLPs &" not in one:
            continue
        method = next((rule for name, rule in METHODS.items() if re.search(re.escape(f"{{{name}"), one + two)), "")
        for model, row in (("mlp", one), ("cnn", two)):
            for data, (accuracy, error) in zip(COLUMNS, cells.findall(row), strict=True):
                if method:
                    found[method, model, data] = Figure(float(accuracy), float(error), 4)
    assert len(found) == 88
    assert {key: figure for key, figure in ACCURACY.items() if key[0] in METHODS.values()} == found


def test_perturbation_is_one_row_of_the_paper_and_two_rules_here() -> None:
    rows = [{key[1:]: f for key, f in ACCURACY.items() if key[0] == rule} for rule in ("wp", "np")]
    assert rows[0] == rows[1]


def test_table_3s_frozen_theta_is_the_papers(tex: str) -> None:
    ablation = table(tex, "tab:ablation")
    found = {}
    for title, key in (("MLPs on MNIST", ("mlp", "mnist")), ("CNNs on CIFAR-10", ("cnn", "cifar10"))):
        row = next(row for row in ablation.split(r"\\") if title in row)
        dll, frozen = re.findall(r"(\d+\.\d+)\\%", row)
        assert float(dll) == ACCURACY["dll", *key].accuracy
        found["dll:frozen", *key] = Figure(float(frozen))
    assert {key: figure for key, figure in ACCURACY.items() if key[0] == "dll:frozen"} == found


def test_every_figure_is_a_percentage() -> None:
    assert all(0 < figure.accuracy < 100 for figure in ACCURACY.values())


def test_the_averages_are_those_of_the_columns_and_the_papers(tex: str) -> None:
    for (rule, model), average in AVERAGE.items():
        mean = sum(ACCURACY[rule, model, data].accuracy for data in COLUMNS) / 4
        assert average == pytest.approx(mean, abs=0.0101)  # the paper rounds some of them down
    printed = {float(number) for number in re.findall(r"\$(?:\\bf)?(\d+\.\d+)\\%\$ \\\\", table(tex, "tab:main"))}
    assert printed == set(AVERAGE.values())


CRITERIA: dict[str, tuple[bool, bool, bool]] = {
    rule: (marks[0] == "✓", marks[1] == "✓", marks[2] == "✓")
    for rule, marks in {
        "bp": "✗✗✗",
        "fa": "✓✗✗",
        "local": "✗✓✗",
        "pc": "✗✓✗",
        "wp": "✓✓✗",
        "dtp": "✓✓✗",
        "hebb": "✓✓✓",
        "rstdp": "✓✓✓",
        "ff": "✓✓✓",
        "ep": "✓✓✓",
        "dll": "✓✓✓",
    }.items()
}
"""Table 1's columns C1, C2 and C3: asymmetric weights, local error, no two stages."""
CRITERIA |= {"np": CRITERIA["wp"], "softhebb": CRITERIA["hebb"]}


def test_the_criteria_are_the_papers_and_those_that_the_rules_carry(tex: str) -> None:
    found = {}
    for one, two in pairwise(table(tex, "tab:main").split(r"\\")):
        if "& MLPs &" in one:
            rule = next((r for name, r in METHODS.items() if f"{{{name}" in one + two), "")
            marks = re.findall(r"\\([cx])mark", one + two)
            found[rule] = tuple(mark == "c" for mark in marks[:3])
    assert {rule: CRITERIA[rule] for rule in found} == found
    assert len(found) == 11
    assert CRITERIA["np"] == CRITERIA["wp"]


@pytest.mark.parametrize("rule", CRITERIA)
def test_rules_claim_what_the_paper_says_of_them(rule: str) -> None:
    assert CRITERIA[rule] == resolve(rule)[0].CLAIMS


def test_table_2_is_the_papers(tex: str) -> None:
    lines = table(tex, "tab:RNNs").split(r"\\")
    columns = [("harry_potter", "accuracy")]
    columns += [(data, m) for data in ("electricity", "metr_la", "pems_bay") for m in ("mse", "mae")]
    for title, rule in (("Backpropagation", "bp"), ("Predictive Coding", "pc"), ("DLL (Ours)", "dll")):
        (line,) = (line for line in lines if f"{title} " in line)
        cells = re.findall(r"\$(?:\\bf)?(\d+\.\d+)(?:\\%)?\$\{\\scriptsize \$\\pm (\d+\.\d+)", line)
        assert len(cells) == 7
        for column, (value, error) in zip(columns, cells, strict=True):
            assert FIGURES[rule, "rnn", *column] == Figure(float(value), float(error), 3)
    assert not any(rule == "ipc" for rule, *_ in FIGURES)


def test_the_rest_of_table_3_is_the_papers(tex: str) -> None:
    ablation = table(tex, "tab:ablation").replace(r"\;\,", "")
    assert FIGURES["dll:frozen", "rnn", "harry_potter", "accuracy"] == Figure(0.71)
    assert r"0.71\%^*" in ablation
    for title, data in (("RNNs on Electricity", "electricity"), ("RNNs on Pems-bay", "pems_bay")):
        after = ablation[ablation.index(title) :]
        pairs = re.findall(r"\$\\bf(\d\.\d+)\$ & \$(\d\.\d+)\$", after)[:2]
        for metric, (learns, frozen) in zip(("mse", "mae"), pairs, strict=True):
            assert FIGURES["dll", "rnn", data, metric].accuracy == float(learns)
            assert FIGURES["dll:frozen", "rnn", data, metric] == Figure(float(frozen))


APPENDICES = {
    "tab:tiny-imagenet": ("cnn", (("cifar100", "accuracy"), ("tiny_imagenet", "error"))),
    "table:subj": ("textcnn", (("subj", "accuracy"), ("mr", "accuracy"))),
}


@pytest.mark.parametrize("label", APPENDICES)
def test_the_tables_of_the_appendices_are_the_papers(label: str, tex: str) -> None:
    model, columns = APPENDICES[label]
    body = tex[: tex.index(f"label{{{label}}}")]
    lines = body[body.rindex(r"\begin{tabular}") :] if label != "table:subj" else body[body.rindex(r"\begin{table}") :]
    for name, rule in (("BP", "bp"), ("DLL", "dll")):
        (line,) = (line for line in lines.splitlines() if line.startswith(f"{name}\\_"))
        for column, value in zip(columns, re.findall(r"(\d+\.\d+)\\%", line), strict=True):
            assert FIGURES[rule, model, *column] == Figure(float(value))


def test_cost_and_depth_are_the_papers(tex: str) -> None:
    for (rule, model), (seconds, megabytes) in COST.items():
        assert f"{rule.upper()}\\_{model.upper()} & ${seconds}$ & ${megabytes}$" in tex
    for model, widths in (("mlp-1024", "784-1024-10"), ("mlp-1024-512", "784-1024-512-10")):
        assert rf"{widths} & ${FIGURES['dll', model, 'mnist', 'accuracy'].accuracy}\%$" in tex
    assert r"784-1024-512-256-10 & $97.57\%$" in tex


def test_a_stand_in_is_compared_with_what_it_stands_in_for() -> None:
    assert find_figure("dll", "rnn", "tinyshakespeare", "accuracy") == Figure(33.7, 0.6, 3)
    assert find_figure("dll", "rnn", "exchange_rate", "mse") is None
