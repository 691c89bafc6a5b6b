"""The paper's figures, read a second time from its own source where that lies beside the repository."""

import re
from itertools import pairwise
from pathlib import Path

import pytest

from apical.bench.paper import ACCURACY, Figure

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
        method = next(
            (rule for name, rule in METHODS.items() if re.search(re.escape(f"{{{name}"), one + two)), ""
        )
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
