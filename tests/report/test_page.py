"""The page says what the results are, beside the control and the paper; the one in the repository is up to date."""

import re
import statistics
from pathlib import Path
from typing import Any

import pytest

from apical.bench.results import Result, load_folder
from apical.report.page import write

pytest.importorskip("matplotlib")

ROOT = Path(__file__).parents[2]


def result(rule: str, accuracies: list[float], **changes: Any) -> Result:
    seeds = list(range(len(accuracies)))
    settings = {"rule": rule, "model": "mlp", "data": "mnist", "epochs": 2, "lr": 0.001, "seeds": seeds}
    aligned = changes.pop("aligned", None)
    history = [
        {
            "seed": seed,
            "epoch": epoch,
            "loss": 1.0,
            "test_loss": 1.0,
            "test_accuracy": accuracy / 100 - (2 - epoch) / 10,
            "seconds": 0.5,
            **({"alignment": aligned(seed, epoch)} if aligned else {}),
        }
        for epoch in (1, 2)
        for seed, accuracy in zip(seeds, accuracies, strict=True)
    ]
    return Result(
        settings={**settings, "protocol": "clean", **changes},
        accuracies=accuracies,
        seconds_per_epoch=0.5,
        history=history,
        failed={},
        command=f"apical train --rule {rule}",
        device="abacus",
        versions={"apical": "0", "torch": "1"},
    )


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "results").mkdir()
    return Path("results")


def page_of(found: list[Result], folder: Path) -> str:
    write(found, folder, Path("page.md"))
    return Path("page.md").read_text("utf-8")


def rows(page: str) -> dict[str, list[str]]:
    """Every table row by its first cell."""
    lines = [line for line in page.splitlines() if line.startswith("| `")]
    return {
        cells[0].strip(" `"): [c.strip() for c in cells] for cells in (x.strip("|").split("|") for x in lines)
    }


def test_a_row_has_mean_deviation_paired_difference_and_the_papers_figure(folder: Path) -> None:
    control, ours = [80.0, 82.0, 90.0], [97.0, 98.0, 99.0]
    found = rows(page_of([result("dll", ours), result("readout", control)], folder))
    assert list(found) == ["readout", "dll"]  # in the order of the rules, not of the files
    differences = [a - b for a, b in zip(ours, control, strict=True)]
    error = statistics.stdev(differences) / 3**0.5
    assert found["dll"][1:7] == [
        "2",
        "0.001",
        "98.00 ± 1.00",
        f"+14.00 ± {error:.2f}",
        "97.57 ± 0.40 (+0.43)",  # the paper's 97.57 ± 0.40, and ours less it
        "0.50",
    ]
    assert found["readout"][4] == "control"


def test_a_rule_that_does_not_beat_the_control_is_marked(folder: Path) -> None:
    control = result("readout", [80.0, 82.0])
    found = rows(page_of([control, result("fa", [80.5, 81.9]), result("bp", [90.0, 92.1])], folder))
    assert found["fa"][4].endswith("; hidden layers do not help")
    assert "help" not in found["bp"][4]


def test_without_a_control_there_is_no_difference(folder: Path) -> None:
    assert rows(page_of([result("bp", [90.0, 91.0])], folder))["bp"][4] == "–"


@pytest.mark.parametrize(
    ("protocol", "words"), [("paper", "best test epoch"), ("validation", "held-out"), ("clean", "")]
)
def test_an_accuracy_that_is_not_the_last_epochs_on_the_test_set_says_so(
    protocol: str, words: str, folder: Path
) -> None:
    cell = rows(page_of([result("bp", [90.0, 91.0], protocol=protocol)], folder))["bp"][3]
    assert cell.startswith("90.50 ± 0.71")
    assert words in cell
    assert ("(" in cell) == bool(words)


def test_alignment_is_the_mean_of_the_last_epoch_over_layers_and_seeds(folder: Path) -> None:
    def aligned(seed: int, epoch: int) -> dict[str, list[float | None]]:
        if epoch == 1:  # must not count
            return {"feedback": [None, -1.0, -1.0], "update": [-1.0, -1.0, -1.0]}
        return {"feedback": [None, 0.2 + 0.2 * seed, 0.4], "update": [0.1, 0.3 + 0.2 * seed, 1.0]}

    found = rows(page_of([result("fa", [90.0, 91.0], aligned=aligned)], folder))["fa"]
    assert found[7] == "0.35"  # (0.2 + 0.4 + 0.4 + 0.4) / 4
    assert found[8] == "0.25"  # hidden layers alone: (0.1 + 0.3 + 0.1 + 0.5) / 4
    assert rows(page_of([result("fa", [90.0, 91.0])], folder))["fa"][7:] == ["–", "–"]


def test_each_network_and_data_set_has_a_section_a_figure_and_its_commands(folder: Path) -> None:
    found = [result("bp", [90.0, 91.0]), result("bp", [50.0, 51.0], model="mine:net", data="cifar10")]
    page = page_of(found, folder)
    assert re.findall(r"^## (.*)$", page, re.MULTILINE) == ["cifar10, mine:net", "mnist, mlp"]
    links = re.findall(r"\]\((figures/.*?)\)", page)
    assert len(links) == 2
    assert all(Path(link).is_file() for link in links)
    assert all(re.fullmatch(r"figures/[\w.-]+\.svg", link) for link in links)
    assert page.count("apical train --rule bp") == 2
    assert "Run on abacus; apical 0, torch 1." in page


def test_trials_are_listed_best_first(folder: Path) -> None:
    lines = [
        f'{{"accuracy": {accuracy}, "std": 0.5, "command": "c{accuracy}", "seeds": [0, 1], '
        '"device": "abacus", "torch": "1"}'
        for accuracy in (10, 30, 20)
    ]
    (folder / "t.jsonl").write_text("\n".join(lines))
    page = page_of([result("bp", [90.0, 91.0])], folder)
    assert "3 trials" in page
    assert re.findall(r"\| (\d+)\.00 ± 0\.50 \| `c\1` \|", page) == ["30", "20", "10"]


def test_figures_are_scalable_have_every_rule_and_never_change(folder: Path) -> None:
    found = [result("bp", [90.0, 91.0]), result("fa", [80.0, 81.0])]
    page_of(found, folder)
    first = Path("figures/mnist-mlp.svg").read_bytes()
    page_of(found, folder)
    assert Path("figures/mnist-mlp.svg").read_bytes() == first
    text = first.decode()
    assert "<svg" in text
    assert all(f"{rule}, 2 epochs" in text for rule in ("bp", "fa"))


def test_the_page_in_the_repository_is_what_its_results_give_now(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not (ROOT / "results").is_dir():
        pytest.skip("the results are not here: this is not a checkout")
    monkeypatch.chdir(tmp_path)
    Path("results").symlink_to(ROOT / "results", target_is_directory=True)
    write(load_folder(Path("results")), Path("results"), Path("docs/results.md"))
    made = Path("docs/results.md").read_text("utf-8")
    kept = (ROOT / "docs" / "results.md").read_text("utf-8")
    assert made == kept, "run: apical report results --out docs/results.md"
    figures = {p.name for p in Path("docs/figures").iterdir()}
    assert figures == {p.name for p in (ROOT / "docs" / "figures").iterdir()}
