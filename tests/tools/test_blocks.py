"""Tables inside pages: what is between two marks is what the results say, and nothing around them changes."""

import statistics
from pathlib import Path
from typing import Any

import pytest

import apical
from apical.bench import suites
from apical.bench.declaration import Request, build_train_command
from apical.bench.store import Outcome, Store
from apical.bench.suites import Job, list_jobs
from apical.errors import ApicalError
from pages import DOCS, README
from stores import fill
from tools.pages.blocks import BLOCK, fill_pages, find_pages, load_results
from tools.pages.rule_tables import describe_settings
from tools.pages.significance import estimate


def put(store: Store, scores: list[float], suite: str = "table1", **choice: Any) -> Job:
    (job,) = list_jobs(suites.load(suite), Request(**choice))
    assert job.declaration is not None
    fill(store, job.declaration, scores, command=build_train_command(job.declaration.settings(job.seeds)))
    return job


def filled(asked: str, store: Store, folder: Path) -> list[list[str]]:
    """The rows of the tables that a block asks for."""
    page = folder / "page.md"
    page.write_text(f"before\n\n<!-- results: {asked} -->\nold\n<!-- /results -->\n\nafter\n", "utf-8")
    text = fill_pages(load_results(store, folder), [page])[page]
    assert text.startswith(f"before\n\n<!-- results: {asked} -->\n\n")
    assert text.endswith("\n\n<!-- /results -->\n\nafter\n")
    assert "\nold\n" not in text
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_a_block_has_the_part_of_a_suite_that_it_asks_for(store: Store, tmp_path: Path) -> None:
    for depth, score in (("mlp-1024", 70.0), ("mlp", 98.0)):
        put(store, [score - 1, score, score, score + 1], "depth", models=[depth], rules=["dll"])
    found = filled("depth rules=dll,bp models=mlp-1024", store, tmp_path)
    assert [row[0] for row in found] == ["rule", "---", "bp", "dll"]
    assert found[2][2] == "not run yet"
    assert found[3][2:5] == [f"70.00 ± {statistics.stdev([69, 70, 70, 71]):.2f}", "71.15", "-1.15"]


def test_a_block_against_a_rule_has_the_paired_differences(store: Store, tmp_path: Path) -> None:
    ours, theirs = [97.0, 98.5, 98.0, 99.0], [98.0, 98.0, 98.0, 98.4]
    put(store, ours, models=["mlp"], data=["mnist"], rules=["dll:kolen-pollack"])
    put(store, theirs, models=["mlp"], data=["mnist"], rules=["bp"])
    put(store, [1.0] * 4, models=["mlp"], data=["mnist"], rules=["fa"])
    asked = "table1 rules=dll:kolen-pollack models=mlp data=mnist,svhn against=bp"
    head, _, mnist, svhn = filled(asked, store, tmp_path)
    differences = [a - b for a, b in zip(ours, theirs, strict=True)]
    half = 3.182446 * statistics.stdev(differences) / 2  # the quantile of t with three degrees of freedom
    mean = statistics.fmean(differences)
    assert head[-5:] == ["its own", "`bp`", "better by", "p", ""]
    assert mnist == [
        *("`dll:kolen-pollack`", "mlp", "mnist", "accuracy %"),
        f"{statistics.fmean(ours):.2f}",
        f"{statistics.fmean(theirs):.2f}",
        f"{mean:+.2f} [{mean - half:+.2f}, {mean + half:+.2f}]",
        f"{estimate(differences).p:.3f}",
        "not told apart",
    ]
    assert svhn[-5:] == ["not run yet", "not run yet", "–", "–", ""]


def test_a_smaller_error_is_better(store: Store, tmp_path: Path) -> None:
    for rule, error in (("dll", 0.2), ("bp", 0.3)):
        job = list_jobs(suites.load("table2"), Request(rules=[rule], data=["tinyshakespeare"]))[-1]
        assert job.declaration is not None
        rows = [
            {"seed": s, "epoch": 1, "test_loss": 1.0, "test_mse": error + s / 100, "test_mae": error} for s in job.seeds
        ]
        store.claim(job.declaration, job.seeds)
        store.finish(job.declaration, job.seeds, Outcome(rows, {}, {}))
    *_, mse, mae = filled("table2 rules=dll data=tinyshakespeare against=bp", store, tmp_path)
    assert mse[3:] == ["MSE", "0.2100", "0.3100", "+0.1000 [+0.1000, +0.1000]", "below 0.001", "better"]
    assert mae[3:] == ["MAE", "0.2000", "0.3000", "+0.1000 [+0.1000, +0.1000]", "below 0.001", "better"]


def test_the_summary_has_a_line_for_each_rule_that_was_run(store: Store, tmp_path: Path) -> None:
    control, fa, dll = [90.0, 91.0, 92.0, 93.0], [90.1, 90.9, 92.1, 92.9], [97.0, 98.0, 98.0, 99.0]
    for rule, scores in (("readout", control), ("fa", fa), ("dll", dll)):
        job = next(
            j
            for j in list_jobs(suites.load("rules"), Request(models=["mlp"], data=["mnist"], rules=[rule]))
            if j.rule == rule
        )
        assert job.declaration is not None
        fill(store, job.declaration, scores, device="abacus", seconds_per_epoch=0.25)
    head, _, *lines = filled("summary", store, tmp_path)
    assert head == ["rule", "MNIST MLP", "MNIST CNN", "CIFAR-10 MLP", "CIFAR-10 CNN", "s/epoch"]
    assert lines == [
        ["`readout`", "91.50", "–", "–", "–", "0.25 / – / – / –"],
        ["`fa`", "91.50* (91.87)", "–", "–", "–", "0.25 / – / – / –"],
        ["`dll`", "98.00 (97.57)", "–", "–", "–", "0.25 / – / – / –"],
    ]
    page = tmp_path / "page.md"
    text = fill_pages(load_results(store, tmp_path), [page])[page]
    assert "4 seeds" in text
    assert "on abacus" in text


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ("tabel1", "did you mean 'table1'"),
        ("table1 rules=dlll", "dlll"),
        ("table1 rules=wp", "has no rule 'wp'"),
        ("table1 seeds=3", "asks for 'seeds'"),
        ("table1 against=wp", "has no rule 'wp'"),
        ("rule dlll", "the rule 'dlll', which there is not"),
    ],
)
def test_an_unknown_name_in_a_block_is_refused(asked: str, said: str, store: Store, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"<!-- results: {asked} -->\nx\n<!-- /results -->\n")
    with pytest.raises(ApicalError, match=said):
        fill_pages(load_results(store, tmp_path), [page])


@pytest.mark.parametrize("text", ["nothing\n", "<!-- results: summary -->\nno end\n"])
def test_a_page_without_a_block_is_refused_with_a_hint(text: str, store: Store, tmp_path: Path) -> None:
    (tmp_path / "page.md").write_text(text)
    with pytest.raises(ApicalError, match=r"page\.md asks for no results: put <!-- results: SUITE -->"):
        fill_pages(load_results(store, tmp_path), [tmp_path / "page.md"])
    with pytest.raises(ApicalError, match=r"none\.md cannot be read"):
        fill_pages(load_results(store, tmp_path), [tmp_path / "none.md"])


def test_every_rule_has_a_page_with_what_it_reached() -> None:
    for rule in apical.RULES.values():
        if rule.__module__.startswith("apical."):
            text = (DOCS / "rules" / f"{rule.NAME}.md").read_text("utf-8")
            *_, last = (found[1] for found in BLOCK.finditer(text))
            assert last == f"rule {rule.NAME}"


def test_a_rules_block_has_its_variants_with_their_settings(store: Store, tmp_path: Path) -> None:
    control, scores = [35.0, 36.0, 35.5, 36.5], [45.0, 46.0, 45.5, 46.5]
    put(store, control, models=["mlp"], data=["cifar10"], rules=["readout"])
    put(store, control, models=["mlp"], data=["cifar10"], rules=["dll"])
    job = put(store, scores, models=["mlp"], data=["cifar10"], rules=["dll:kolen-pollack"])
    put(store, [80.0] * 4, models=["mlp"], data=["mnist"], rules=["fa"])
    head, _, *rows = filled("rule dll", store, tmp_path)
    assert head == ["rule", "network", "data", "settings", "accuracy %", "over readout", "paper"]
    assert list(dict.fromkeys(row[0].strip("`") for row in rows)) == [
        *("dll", "dll:released", "dll:frozen", "dll:kolen-pollack")
    ]
    assert len({tuple(row[:3]) for row in rows}) == len(rows)
    by_place = {tuple(row[:3]): row[3:] for row in rows}
    assert job.declaration is not None
    settings, reached, over, paper = by_place["`dll:kolen-pollack`", "MLP", "CIFAR-10"]
    assert settings == describe_settings(job.declaration)
    assert "decay 3.0" in settings
    assert (reached, over, paper) == ("45.75 ± 0.65", "+10.00 ± 0.00", "–")
    assert by_place["`dll`", "MLP", "CIFAR-10"][1:] == ["35.75 ± 0.65", "+0.00 ± 0.00 *", "45.87"]
    assert by_place["`dll`", "CNN", "SVHN"][1:] == ["not run yet", "–", "85.81"]
    assert by_place["`dll`", "RNN", "tinyshakespeare"][1:] == ["not run yet", "–", "–"]
    assert not any(row[2].startswith("etth1") for row in rows)


def test_a_folder_stands_for_its_pages_with_blocks(tmp_path: Path) -> None:
    folder = tmp_path / "pages" / "deep"
    folder.mkdir(parents=True)
    (folder / "asks.md").write_text("<!-- results: summary -->\n<!-- /results -->\n")
    (folder / "silent.md").write_text("nothing\n")
    assert find_pages([tmp_path / "pages", README]) == [folder / "asks.md", README]
