"""The page on large networks: its tables come from the rows of the examples, and only finished runs count."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import apical
from apical.errors import ApicalError
from pages import ROOT
from tools.scaling import EXPERIMENTS, Scaling, read_run, render_step_times

KP = "dll:kolen-pollack"
SETTINGS: dict[str, Any] = {
    "resnet18": {"compile": True, "epochs": 2, "lr": 0.4, "limit": None},
    "gpt": {"compile": False, "text": "tiny shakespeare.txt", "steps": 20, "lr": 0.001},
}
MACHINE = {"device": "a GPU", "torch": "2.13", "apical": "0.2"}


def write_run(folder: Path, experiment: str, rule: str, seed: int, scores: list[float], **settings: Any) -> Path:
    """Write a run that was evaluated after each half, with these scores."""
    own = EXPERIMENTS[experiment]
    decays = {"early_decay": 0.003, "late_decay": 0.0005, "early_share": 0.2}
    first = {"rule": rule, "seed": seed, "out": "x", **SETTINGS[experiment], **decays, **settings, **MACHINE}
    step = SETTINGS[experiment][f"{own.clock}s"] // 2
    rows = [
        {
            own.clock: step * i,
            own.score: score,
            "alignment": None if rule == "bp" else 0.25 * i,
            "gradient_norm": 10.0 / i,
        }
        for i, score in enumerate(scores, 1)
    ]
    path = folder / f"{experiment}-{rule.replace(':', '-')}-{seed}.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in [first, *rows]), "utf-8")
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two seeds of two rules on ResNet-18, and one that ended early; of the GPT one rule."""
    write_run(tmp_path, "resnet18", "bp", 0, [80.0, 94.0])
    write_run(tmp_path, "resnet18", "bp", 1, [80.0, 95.0])
    write_run(tmp_path, "resnet18", KP, 0, [70.0, 93.5])
    write_run(tmp_path, "resnet18", KP, 1, [70.0, 95.1])
    write_run(tmp_path, "resnet18", KP, 2, [99.0])
    write_run(tmp_path, "gpt", "fa", 0, [1.5, 1.75])
    return tmp_path


def test_the_tables_have_the_last_score_and_the_difference_of_the_same_seeds(folder: Path) -> None:
    scaling = Scaling(folder)
    rows = scaling.table("resnet18").splitlines()[2:]
    assert rows == [
        "| `bp` | 0, 1 | 94.50 ± 0.71 | – | – | 5 |",
        f"| `{KP}` | 0, 1 | 94.30 ± 1.13 | -0.20 ± 0.42 | 0.500 | 5 |",
    ]
    assert scaling.table("gpt").splitlines()[2:] == ["| `fa` | 0 | 1.750 | – | 1.500, 10 | 0.500 | 5 |"]
    assert (scaling.compare("resnet18", KP), scaling.compare("resnet18", "bp")) == ("0.20 below", "level with")
    assert scaling.measure("resnet18", KP, "alignment", 0) == "0.250"
    assert scaling.rise("gpt", "fa") == 0.25


@pytest.mark.parametrize(
    ("experiment", "scores", "level"),
    [
        ("resnet18", (94.0, 93.75), True),
        ("resnet18", (94.0, 93.65), False),
        ("resnet18", (94.0, 96.0), True),
        ("gpt", (1.5, 1.515), True),
        ("gpt", (1.5, 1.525), False),
        ("gpt", (1.5, 1.0), True),
    ],
)
def test_a_rule_is_level_if_it_is_not_worse_by_more_than_the_margin(
    tmp_path: Path, experiment: str, scores: tuple[float, float], level: bool
) -> None:
    """A lower loss is better, a lower accuracy is worse."""
    for rule, score in zip(("bp", KP), scores, strict=True):
        write_run(tmp_path, experiment, rule, 0, [score, score])
    assert Scaling(tmp_path).is_level(experiment, KP) is level


def test_a_run_that_ended_early_is_named_and_does_not_count(folder: Path) -> None:
    scaling = Scaling(folder)
    assert sorted(scaling.scores("resnet18", KP)) == [0, 1]
    assert scaling.missing() == "`resnet18-dll-kolen-pollack-2.jsonl` (epoch 1 of 2)"
    path = folder / "resnet18-bp-1.jsonl"
    path.write_text(path.read_text("utf-8")[:-5], "utf-8")  # killed while it wrote its last row
    cut = Scaling(folder)
    assert sorted(cut.scores("resnet18", "bp")) == [0]
    assert len(cut.differences("resnet18", KP)) == 1
    write_run(folder, "gpt", "fa", 0, [])
    assert Scaling(folder).of("gpt") == []


def test_the_last_run_of_a_file_counts(folder: Path) -> None:
    path = folder / "gpt-fa-0.jsonl"
    before = path.read_text("utf-8")
    write_run(folder, "gpt", "fa", 0, [1.25])
    path.write_text(before + path.read_text("utf-8"), "utf-8")
    assert not read_run(path).is_finished
    path.write_text(path.read_text("utf-8") + before, "utf-8")
    assert read_run(path).rows == read_run(path).rows[-2:]
    assert Scaling(folder).scores("gpt", "fa") == {0: 1.75}


def test_the_commands_have_all_settings_and_seeds(folder: Path) -> None:
    decays = "--early-decay 0.003 --late-decay 0.0005 --early-share 0.2 "
    start, end = "do python examples/resnet18_cifar10.py --rule", "--seed $seed --out results/scaling/resnet18"
    assert Scaling(folder).commands("resnet18").splitlines() == [
        f"for seed in 0 1; {start} bp --compile --epochs 2 --lr 0.4 {end}-bp-$seed.jsonl; done",
        f"for seed in 0 1; {start} {KP} --compile --epochs 2 --lr 0.4 {decays}{end}-dll-kolen-pollack-$seed.jsonl; done",
    ]
    assert "gpt_characters.py 'tiny shakespeare.txt' --rule fa --steps 20 " in Scaling(folder).commands("gpt")
    assert Scaling(folder).machines("gpt") == "a GPU, torch 2.13, apical 0.2"


def test_runs_that_cannot_be_averaged_are_refused(folder: Path) -> None:
    other = write_run(folder, "resnet18", "sign", 0, [1.0, 2.0], lr=0.1)
    with pytest.raises(ApicalError, match=r"resnet18-bp-0.jsonl and resnet18-sign-0.jsonl differ in lr\."):
        Scaling(folder)
    other.unlink()
    other = write_run(folder, "resnet18", KP, 3, [1.0, 2.0], early_decay=0.1)
    with pytest.raises(ApicalError, match="differ in early_decay"):
        Scaling(folder)
    other.unlink()
    other = write_run(folder, "resnet18", "sign", 0, [1.0, 2.0], early_decay=0.1)  # which it does not use
    assert Scaling(folder).rules("resnet18") == ["bp", KP, "sign"]
    other.rename(folder / "resnet18-again.jsonl")
    write_run(folder, "resnet18", "sign", 0, [1.0, 2.0], early_decay=0.1)
    with pytest.raises(ApicalError, match="of the same rule and seed"):
        Scaling(folder)


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("vit-bp-0.jsonl", "", "belongs to no experiment; names begin with resnet18, gpt"),
        ("gpt-bp-0.jsonl", "", "no result of an example"),
        ("gpt-bp-0.jsonl", "{}\n", "no result of an example"),
        ("gpt-bp-0.jsonl", "3\n", "no result of an example"),
        ("gpt-bp-0.jsonl", '{"rule"\n{}\n', "no result of an example"),
    ],
)
def test_a_file_that_is_no_result_is_named(tmp_path: Path, name: str, text: str, said: str) -> None:
    (tmp_path / name).write_text(text, "utf-8")
    with pytest.raises(ApicalError, match=rf"{name}.*{said}"):
        Scaling(tmp_path)


def test_figures_are_drawn_for_what_was_run_and_are_the_same_each_time(folder: Path) -> None:
    pytest.importorskip("matplotlib")
    assert Scaling(folder / "nothing").figures() == {}
    figures = Scaling(folder).figures()
    assert sorted(figures) == ["scaling-gpt.svg", "scaling-resnet18.svg"]
    drawn = []
    for name in ("first.svg", "second.svg"):
        figures["scaling-resnet18.svg"](folder / name)
        drawn.append((folder / name).read_text("utf-8"))
    assert drawn[0] == drawn[1]
    for words in (f">{KP}<", ">test accuracy %<", ">alignment: mean cosine with W<", ">gradient norm<", ">epoch<"):
        assert words in drawn[0], words


def test_the_table_of_steps_has_a_row_for_each_network_and_way_of_running() -> None:
    rows = [
        {"model": "a", "how": "eager", "rule": "bp", "step_ms": 10.0, "of_bp": 1.0},
        {"model": "a", "how": "eager", "rule": "fa", "step_ms": 11.24, "of_bp": 1.124},
        {"model": "a", "how": "compiled", "rule": "bp", "step_ms": 5.0, "of_bp": 1.0},
    ]
    assert render_step_times({"modules": {"rows": rows}}).splitlines() == [
        "| network | | `bp` | `fa` |",
        "|---|---|---|---|",
        "| a | eager | 10.0 ms | 11.2 ms, 1.12 × |",
        "| a | compiled | 5.0 ms | – |",
    ]


def test_the_template_has_no_number_of_ours() -> None:
    """What stands in the template itself are settings of the examples and of `benchmarks/modules.py`."""
    template = (ROOT / "tools" / "pages" / "templates" / "scaling.md").read_text("utf-8")
    prose = re.sub(r"\{[{%].*?[%}]\}|```.*?```", "", template, flags=re.DOTALL)
    assert set(re.findall(r"\d+[.,]\d+|\d+ ?%", prose)) <= {"40 %"}


# The examples themselves.

TEXT = "To be, or not to be, that is the question. " * 40
SMALL = ["--steps", "2", "--batch", "4", "--context", "16", "--width", "16", "--depth", "1"]


def run_gpt(folder: Path, rule: str, *options: str) -> list[dict[str, Any]]:
    """Run the example on a short text and return the rows of its file, which are those that it printed."""
    (folder / "text.txt").write_text(TEXT, "utf-8")
    out = folder / "made" / f"gpt-{rule.replace(':', '-')}-0.jsonl"
    arguments = ["text.txt", "--rule", rule, "--out", str(out), *SMALL, *options]
    script = ROOT / "examples" / "gpt_characters.py"
    done = subprocess.run(
        [sys.executable, str(script), *arguments], cwd=folder, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert out.read_text("utf-8") == done.stdout
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.skipif(not (ROOT / "examples").is_dir(), reason="the examples are not here: this is not a checkout")
def test_the_page_reads_what_an_example_writes(tmp_path: Path) -> None:
    settings, *rows = run_gpt(tmp_path, KP)
    assert (
        settings.items()
        >= {"rule": KP, "seed": 0, "steps": 2, "text": "text.txt", "out": "gpt-dll-kolen-pollack-0.jsonl"}.items()
    )
    assert (settings["apical"], settings["torch"]) == (apical.__version__, torch.__version__)
    assert [row["step"] for row in rows] == [1, 2]
    assert all(-1 <= row["alignment"] <= 1 and row["gradient_norm"] > 0 for row in rows)
    reference = run_gpt(tmp_path, "bp")
    assert [row["alignment"] for row in reference[1:]] == [None, None]
    assert reference[1]["loss"] == rows[0]["loss"], "both start from the same W, and see the same batch"
    scaling = Scaling(tmp_path / "made")
    assert scaling.scores("gpt", KP) == {0: rows[-1]["validation"]}
    assert len(scaling.differences("gpt", KP)) == 1


def test_trials_are_listed_with_what_differs_and_count_only_for_the_best(folder: Path) -> None:
    (folder / "trials").mkdir()
    write_run(folder, "gpt", KP, 0, [1.7, 1.6])
    write_run(folder / "trials", "gpt", KP, 0, [1.6, 1.5], early_decay=3.0)
    write_run(folder / "trials", "gpt", "fa", 0, [1.6, 1.9], lr=0.01)
    scaling = Scaling(folder)
    assert scaling.score("gpt", KP) == "1.600"
    assert (scaling.best_trial("gpt", KP), scaling.best_trial("gpt", "fa")) == (1.5, 1.75)
    assert scaling.list_trials("gpt").splitlines()[2:] == [
        f"| `{KP}` | early decay 3 | 1.500 |",
        "| `fa` | lr 0.01 | 1.900 |",
    ]
