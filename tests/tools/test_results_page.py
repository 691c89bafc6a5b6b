"""docs/results says what the results are, beside the control and the paper; the pages in the repository are up to date."""

import json
import re
import statistics
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from apical import report
from apical.bench import provenance, suites
from apical.bench.declaration import Declaration, Request
from apical.bench.store import Outcome, Store
from apical.bench.suites import Job, list_jobs
from apical.bench.tables import NOTE
from apical.engine.settings import Settings
from apical.errors import ApicalError
from stores import declared, fill, history, outcome
from tools.pages.__main__ import draw_figures
from tools.pages.blocks import load_results
from tools.pages.results_page import ResultPages, render_results

pytest.importorskip("matplotlib")


class Run(NamedTuple):
    declaration: Declaration
    outcome: Outcome


def result(rule: str, accuracies: list[float], **changes: Any) -> Run:
    """Seeds 0, 1, … of a run that ended with these accuracies."""
    aligned = changes.pop("aligned", None)
    settings = {"model": "mlp", "data": "mnist", "epochs": 2, "lr": 0.001, **changes}
    rows = [
        {**row, **({"alignment": aligned(seed, row["epoch"])} if aligned else {})}
        for seed, accuracy in enumerate(accuracies)
        for row in history(seed, [*[accuracy - 10] * (settings["epochs"] - 1), accuracy])
    ]
    facts = {"together": len(accuracies), "seconds_per_epoch": 0.5, "device": "abacus", "apical": "0", "torch": "1"}
    command = f"apical train --rule {rule}"
    return Run(Declaration.of(Settings(rule, **settings)), Outcome(rows, {}, {**facts, "command": command}))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "results").mkdir()
    return Path("results")


@pytest.fixture
def store(folder: Path) -> Iterator[Store]:
    with Store(folder / "paper.sqlite") as opened:
        yield opened


def pages_of(*runs: Run) -> ResultPages:
    """Return the pages of the store and of these runs, which are in a store of their own, read after the other."""
    if runs:
        with Store(Path("results/runs.sqlite")) as other:
            for declaration, done in runs:
                seeds = list(dict.fromkeys(row["seed"] for row in done.history))
                other.claim(declaration, seeds)
                other.finish(declaration, seeds, done)
    with report.open_results(Path("results")) as opened:
        pages = render_results(load_results(opened, Path("results")), Path("results"))
    draw_figures(pages.figures, Path("docs/figures"))
    return pages


def page_of(*runs: Run) -> str:
    """Return all pages as one text."""
    return "\n".join(pages_of(*runs).texts.values())


def only(suite: str, **choice: Any) -> list[Job]:
    return list_jobs(suites.load(suite), Request(**choice))


def settings(job: Job) -> dict[str, Any]:
    assert job.declaration is not None
    return {name: value for name, value in job.declaration.to_dict().items() if name != "rule"}


def put(store: Store, job: Job, scores: list[float], **facts: Any) -> None:
    assert job.declaration is not None
    fill(store, job.declaration, scores, **facts)


def part(page: str, title: str, level: str = "#") -> str:
    """A section of the page, by how its heading begins."""
    (found,) = [text for text in re.split(rf"^{level} ", page, flags=re.MULTILINE) if text.startswith(title)]
    return found


def table(page: str, section: str, title: str) -> dict[str, list[str]]:
    """Every row of one table of a section, by its first cell."""
    return rows(part(part(page, section), title, "##"))


def rows(text: str) -> dict[str, list[str]]:
    """Every row of the tables by its first cell."""
    found = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    return {cells[0].strip(): [cell.strip() for cell in cells] for cells in found}


# Table 1.


def test_table_1_has_ours_the_papers_and_the_difference_and_comes_first(store: Store) -> None:
    ours = {"dll": [97.4, 97.5, 97.2, 97.3], "readout": [91.0, 91.5, 91.0, 91.5], "bp": [98.7] * 4}
    put(store, only("depth", models=["mlp-1024"], rules=["bp"])[0], [98.0] * 4)  # recorded before the others
    for job in only("table1", models=["mlp"], data=["mnist"], rules=list(ours)):
        put(store, job, ours[job.rule])
    page = page_of()
    heads = re.findall(r"^# (.*)$", page, re.MULTILINE)
    assert heads[:2] == ["Results", "Table 1: image classification"]
    assert "Scalability: 1, 2, 3, 5 and 8 hidden layers" in heads
    mlp = part(part(page, "Table 1"), "Table 1: image classification, mlp", "##")
    lines = [line.strip("| ").split(" | ") for line in mlp.splitlines() if line.startswith("| ")]
    below = {one[0].strip(): other for one, other in pairwise(lines)}  # its line of the paper
    assert rows(mlp)["dll"][2:4] == [f"97.35 ± {statistics.stdev(ours['dll']):.2f}<sup>1</sup>", "not run yet"]
    assert below["dll"][2] == "97.57 ± 0.40 -0.22 = ↓"  # within the errors of both, beyond that of ours
    assert below["bp"][2] == "98.62 ± 0.17 +0.08 ="
    assert "12 of 448 runs are finished" in page


def test_a_cell_that_falls_short_has_its_diagnosis_below_the_table(store: Store, folder: Path) -> None:
    scores = {"readout": [60.0, 61.0, 60.0, 61.0], "fa": [59.0, 59.2, 59.1, 59.02], "bp": [74.0, 75.0, 74.0, 75.0]}
    for job in only("table1", models=["cnn"], data=["cifar10"], rules=list(scores)):
        put(store, job, scores[job.rule])
    put(store, only("table1", models=["mlp"], data=["svhn"], rules=["fa"])[0], [20.0, 20.0, 20.0, 20.0])
    put(store, only("table1", models=["cnn"], data=["mnist"], rules=["local"])[0], [20.0, 20.0, 20.0, 20.0])
    (folder / "diagnoses.toml").write_text('[diagnoses]\n"table1/fa/cnn/cifar10" = """Many rates\nwere tried."""\n')
    page = part(page_of(), "Table 1")
    over = [a - b for a, b in zip(scores["fa"], scores["readout"], strict=True)]
    error = statistics.stdev(over) / 2
    assert re.findall(r"^(\d)\. (.*)$", page, re.MULTILINE) == [
        ("1", "`fa`, mlp, svhn (34.91 below the paper's 54.91): no diagnosis yet."),
        ("2", "`bp`, cnn, cifar10 (0.60 below the paper's 75.10): no diagnosis yet."),
        (
            "3",
            f"`fa`, cnn, cifar10 (0.52 below the paper's 59.60 and not better than `readout` by two standard errors "
            f"({statistics.fmean(over):+.2f} ± {error:.2f})): Many rates were tried.",
        ),
        ("4", "`local`, cnn, mnist (79.39 below the paper's 99.39): no diagnosis yet."),
    ]  # in the order in which the tables are read
    assert "4 cells have a note" in page
    assert rows(page)["fa"][5] == "59.08 ± 0.09<sup>3</sup> *"
    assert rows(page)["bp"][5].endswith("<sup>2</sup>")


def test_minutes_count_every_seed_once_and_slow_rules_apart(store: Store) -> None:
    for rule, seconds in (("bp", 6.0), ("pc", 60.0)):
        (job,) = only("table1", models=["mlp"], data=["mnist"], rules=[rule])  # 20 epochs
        assert job.declaration is not None
        epochs = [{**e, "seconds": seconds} for seed in job.seeds for e in history(seed, [90.0] * job.epochs)]
        facts = {"together": 4, "seconds_per_epoch": seconds, "device": "abacus"}
        store.claim(job.declaration, job.seeds)
        store.finish(job.declaration, job.seeds, Outcome(epochs, {}, facts))
    text = part(page_of(), "Commands: Table 1")
    assert "Minutes of training on abacus: 22.0, 2.0 without pc, ep, dtp (`bp` 2.0, `pc` 20.0)." in text


def test_runs_that_shared_their_device_are_counted(store: Store) -> None:
    for rule in ("readout", "bp"):  # one after the other
        put(store, only("table1", models=["mlp"], data=["mnist"], rules=[rule])[0], [90.0] * 4)
    assert "shared the device" not in page_of()
    beside = [
        (job.declaration, job.seeds, device)
        for rule, device in (("fa", "abacus"), ("pc", "abacus"), ("ep", "slide rule"))
        for job in only("table1", models=["mlp"], data=["mnist"], rules=[rule])
        if job.declaration is not None
    ]
    for declaration, seeds, _ in beside:
        store.claim(declaration, seeds)
    for declaration, seeds, device in beside:
        store.finish(declaration, seeds, outcome({seed: [90.0] for seed in seeds}, device=device))
    assert " 8 of the runs shared the device with others: their times are not those of runs alone.\n" in page_of()


def test_a_page_of_its_own_has_the_machines_versions_and_one_command_for_each_cell(store: Store) -> None:
    for rule in ("bp", "fa"):
        (job,) = only("table1", models=["mlp"], data=["mnist"], rules=[rule])
        facts = {"code": "0.1+abc", "torch": "9", "cuda": "13", "command": f"apical train --rule {rule} --lr 1"}
        put(store, job, [90.0] * 4, **facts)
    begun = only("table1", models=["mlp"], data=["mnist"], rules=["dll"])[0]
    assert begun.declaration is not None
    store.claim(begun.declaration, begun.seeds)  # is no result, and nothing of it is told
    page = page_of()
    assert page.count(NOTE) == 1
    assert "(commands/table1.md)" in part(page, "Table 1")
    text = part(page, "Commands: Table 1")
    assert "Run on abacus; apical 0.1+abc, torch 9, cuda 13.\n" in text
    (commands,) = re.findall(r"```\n(.*?)\n```", text, re.DOTALL)
    assert commands.splitlines() == ["apical train --rule bp --lr 1", "apical train --rule fa --lr 1"]


# Other experiments.


def test_every_other_suite_has_its_own_table_and_figure(store: Store) -> None:
    (job,) = only("paper-settings", models=["mlp"], data=["mnist"], rules=["dll"])
    assert job.declaration is not None
    store.claim(job.declaration, job.seeds)
    store.finish(job.declaration, job.seeds, outcome({seed: [97.0, 98.5, 98.0] for seed in job.seeds}))
    page = page_of()
    text, found = part(page, "The paper's own rates"), table(page, "The paper's own rates", "mnist, mlp")
    heads, line = found["rule"], found["dll"]
    assert line[heads.index("accuracy %")] == "98.00 ± 0.00"
    assert line[heads.index("best test epoch")] == "98.50 ± 0.00"
    assert re.findall(r"!\[.*?\]\((.*?)\)", text) == ["../figures/paper-settings-curves.svg"]
    assert Path("docs/figures/paper-settings-curves.svg").is_file()


def test_experiments_that_were_not_run_are_listed_with_the_reason(store: Store, folder: Path) -> None:
    reasons = "\n".join(
        f'{data} = "gone"' for data in ("cifar100", "tiny_imagenet", "electricity", "metr_la", "tinyshakespeare")
    )
    (folder / "diagnoses.toml").write_text(f"[absent]\n{reasons}\n")
    put(store, only("table3", models=["mlp"], rules=["dll"])[0], [98.0] * 4)
    shakespeare = only("table3", models=["rnn"], rules=["dll"], data=["tinyshakespeare"])[0]
    put(store, shakespeare, [40.0] * 3)  # called absent, but there it is
    theta = only("theta")[0].declaration
    assert theta is not None
    store.claim(theta, [0])  # at work, without a result
    page = page_of()
    assert table(page, "Table 3", "tinyshakespeare, rnn")["dll"][2] == "40.00 ± 0.00"
    line = dict(zip(*(table(page, "Table 3", "tinyshakespeare, rnn")[name] for name in ("rule", "dll")), strict=True))
    assert (line["paper"], line["difference"]) == ("33.70 ± 0.60", "–")  # of another text
    missing = part(page, "Results")
    assert (
        "(`apical bench images-large`): not run: the data are not here (cifar100, gone; tiny_imagenet, gone)."
        in missing
    )
    assert "(`apical bench theta`): not run yet." in missing
    assert "(`apical bench sensitivity`): not run yet." in missing  # of which only a part is gone
    table3 = part(page, "Table 3")
    assert re.search(r"Not run: the data are not here: .*electricity \(gone\).*\.\n", table3)
    assert "## electricity" not in table3
    assert table(page, "Table 3", "mnist, mlp")["dll:frozen"][2] == "not run yet"


def test_failed_runs_are_counted_and_noted(store: Store) -> None:
    (job,) = only("table1", models=["mlp"], data=["mnist"], rules=["np"])
    assert job.declaration is not None
    store.claim(job.declaration, job.seeds)
    store.finish(job.declaration, job.seeds, Outcome([], dict.fromkeys(job.seeds, "boom"), {"device": "abacus"}))
    put(store, only("table1", models=["mlp"], data=["mnist"], rules=["bp"])[0], [99.0] * 4)
    page = page_of()
    text = part(page, "Table 1")
    assert "4 of 448 runs are finished, 4 failed." in text
    assert table(page, "Table 1", "Table 1: image classification, mlp")["np"][2] == "failed<sup>1</sup>"
    assert "1. `np`, mlp, mnist (failed in every run): no diagnosis yet." in text


# What the page is made from.


def test_the_page_depends_on_the_results_alone(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the data that are here nor a later version of the code change it."""
    put(store, only("table1", models=["mlp"], data=["mnist"], rules=["bp"])[0], [98.0] * 4)
    pages = [page_of()]
    monkeypatch.setattr(suites, "explain_missing_data", lambda data: f"{data} is absent")
    monkeypatch.setattr(provenance, "hash_source", lambda: "another")
    pages.append(page_of())
    assert pages[0] == pages[1]
    assert "†" not in pages[0]


def test_stores_of_a_folder_are_one(store: Store, folder: Path) -> None:
    bp, fa = only("table1", models=["mlp"], data=["mnist"], rules=["bp", "fa"])
    put(store, bp, [98.0] * 4)
    assert fa.declaration is not None
    store.claim(fa.declaration, fa.seeds)  # begun here, done in the other store
    with Store(folder / "then" / "other.sqlite") as other:
        put(other, bp, [10.0] * 4)  # the first one stands
        put(other, fa, [97.0] * 4)
    again = result("bp", [11.0] * 4, **settings(bp))
    page = page_of(again)
    found = table(page, "Table 1", "Table 1: image classification, mlp")
    assert found["bp"][2].startswith("98.00 ± 0.00")
    assert found["fa"][2] == "97.00 ± 0.00"
    assert "# Other results" not in page


def test_a_result_that_an_experiment_asks_for_fills_its_cell(folder: Path) -> None:
    (job,) = only("table1", models=["mlp"], data=["mnist"], rules=["dll"])
    page = page_of(result("dll", [98.0] * 4, **settings(job)))
    assert table(page, "Table 1", "Table 1: image classification, mlp")["dll"][2].startswith("98.00")


def test_a_store_without_a_finished_run_gives_no_page(store: Store) -> None:
    with pytest.raises(ApicalError, match="no finished run"):
        page_of()
    assert not Path("docs").exists()


def test_quick_runs_are_no_results(store: Store) -> None:
    fill(store, Declaration.of(Settings("bp", "mlp", "digits"), examples=128), [55.0, 55.0])
    with pytest.raises(ApicalError, match="quick runs are none"):
        page_of()
    fill(store, declared("fa", data="digits"), [90.0, 90.0])
    assert "55.00" not in page_of()


# Other results.


def test_what_no_experiment_asks_for_stands_below_beside_its_control(folder: Path) -> None:
    control, ours = [80.0, 82.0, 90.0], [97.0, 98.0, 99.0]
    page = page_of(result("dll", ours), result("readout", control))
    heads = re.findall(r"^# (.*)$", page, re.MULTILINE)
    assert heads == ["Results", "Other results", "Commands: Other results"]  # of the paper, nothing was begun
    text = part(page, "Other results")
    found = rows(text)
    heads = found["rule"]
    error = statistics.stdev(a - b for a, b in zip(ours, control, strict=True)) / 3**0.5
    line = dict(zip(heads, found["dll"], strict=True))
    assert line["accuracy %"] == "98.00 ± 1.00"
    assert line["over readout"] == f"+14.00 ± {error:.2f}"
    assert (line["paper"], line["difference"]) == ("97.57 ± 0.40", "+0.43 =")
    assert found["readout"][heads.index("over readout")] == "control"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"protocol": "paper"}, " (best test epoch)"),
        ({"protocol": "validation"}, " (held-out training data)"),
        ({"precision": "bf16"}, " (bf16)"),
        ({}, ""),
    ],
)
def test_a_score_that_is_not_the_last_epochs_on_the_test_set_says_so(
    change: dict[str, str], words: str, folder: Path
) -> None:
    found = rows(part(page_of(result("bp", [90.0, 91.0], **change)), "Other results"))
    assert found["bp"][found["rule"].index("accuracy %")] == f"90.50 ± 0.71{words}"


def test_a_control_with_another_protocol_is_not_compared(folder: Path) -> None:
    text = page_of(result("bp", [90.0, 91.0], protocol="paper"), result("readout", [80.0, 81.0]))
    assert "over readout" in text  # of the control's own table
    assert text.count("| bp ") == text.count("| readout ") == 1
    assert "+10.00" not in text


def test_alignment_is_the_mean_of_the_last_epoch_over_layers_and_seeds(folder: Path) -> None:
    def aligned(seed: int, epoch: int) -> dict[str, list[float | None]]:
        if epoch == 1:  # must not count
            return {"feedback": [None, -1.0, -1.0], "update": [-1.0, -1.0, -1.0]}
        return {"feedback": [None, 0.2 + 0.2 * seed, 0.4], "update": [0.1, 0.3 + 0.2 * seed, 1.0]}

    found = rows(page_of(result("fa", [90.0, 91.0], aligned=aligned)))["fa"]
    assert found[-1] == "0.35 / 0.25"  # (0.2 + 0.4 + 0.4 + 0.4) / 4; hidden layers alone: (0.1 + 0.3 + 0.1 + 0.5) / 4


def test_each_network_and_data_set_has_a_table_a_figure_and_its_commands(folder: Path) -> None:
    found = [result("bp", [90.0, 91.0]), result("bp", [50.0, 51.0], model="mine:net", data="cifar10")]
    page = page_of(*found)
    assert re.findall(r"^## (.*)$", part(page, "Other"), re.MULTILINE) == ["cifar10, mine:net", "mnist, mlp"]
    links = re.findall(r"\]\(\.\./(figures/.*?)\)", page)
    assert links == ["figures/cifar10-mine_net.svg", "figures/mnist-mlp.svg"]
    assert all((Path("docs") / link).is_file() for link in links)
    assert page.count("apical train --rule bp") == 1  # both have the same
    assert "Run on abacus; apical 0, torch 1." in page


def make_trial(rule: str, **changes: Any) -> str:
    facts = {"rule": rule, "model": "mlp", "data": "mnist", "std": 0.5, "device": "abacus", "torch": "1", "trial": {}}
    return json.dumps({**facts, "seeds": [0, 1], **changes})


def test_trials_are_listed_best_first(folder: Path) -> None:
    trials = [make_trial("bp", accuracy=accuracy, command=f"c{accuracy}") for accuracy in (10.0, 30.0, None, 20.0)]
    (folder / "mnist-mlp-bp.jsonl").write_text("\n".join(trials))
    page = pages_of(result("bp", [90.0, 91.0])).texts["results/trials/mnist-mlp.md"]
    assert "The best of 4 trials: 30.00 ± 0.50." in page
    assert re.findall(r"\| (\d+)\.00 ± 0\.50 \| `c\1.0` \|", page) == ["30", "20", "10"]
    assert page.index("| diverged | `cNone` |") > page.index("`c10.0`")


def test_the_budget_counts_short_and_whole_trials_of_every_rule(folder: Path) -> None:
    counts = {("mnist-mlp-bp", "bp"): 3, ("whole-mnist-mlp-bp", "bp"): 2, ("mnist-mlp-dll", "dll"): 1}
    for (name, rule), count in counts.items():
        lines = [make_trial(rule, accuracy=50.0, command="c")] * count
        (folder / f"{name}.jsonl").write_text("\n".join(lines))
    page = pages_of(result("bp", [90.0, 91.0])).texts["results/trials.md"]
    found = rows(page)
    assert (found["`bp`"][1], found["`dll`"][1]) == ("3 + 2", "1")
    assert "(trials/mnist-mlp.md)" in page


# The files.


def test_the_same_results_give_the_same_page_and_figures(store: Store) -> None:
    for job in only("table1", models=["mlp"], data=["mnist"], rules=["bp", "fa"]):
        put(store, job, [90.0, 91.0, 92.0, 93.0])
    fill(store, declared("bp", data="digits", epochs=2), [90.0, 91.0])
    written = []
    for _ in range(2):
        page = page_of()
        written.append((page, {path.name: path.read_bytes() for path in Path("docs/figures").iterdir()}))
    assert written[0] == written[1]
    figures = written[0][1]
    assert {"table1-curves.svg", "digits-mlp.svg"} <= set(figures)
    drawing = figures["table1-curves.svg"].decode()
    assert ">bp<" in drawing
    assert ">fa<" in drawing


def test_trials_that_cannot_be_read_are_named(folder: Path) -> None:
    page_of(result("bp", [90.0, 91.0]))
    for text in ('{"accuracy": 1', "", '{"accuracy": 1}'):
        (folder / "t.jsonl").write_text(text)
        with pytest.raises(ApicalError, match=r"t\.jsonl is not a (file|list) of trials"):
            page_of()


def test_an_error_says_its_task(folder: Path) -> None:
    run = result("bp", [0.0, 0.0], model="rnn", data="etth1", data_options={"task": "forecast"})
    errors = [{"seed": s, "epoch": 2, "test_loss": 1.0, "test_mse": 0.5 + s, "test_mae": 0.25} for s in (0, 1)]
    page = page_of(run._replace(outcome=Outcome(errors, {}, run.outcome.facts)))
    assert "1.0000 ± 0.7071 (task forecast)" in page
    assert "0.2500 ± 0.0000 (task forecast)" in page


HOSTILE = "<script>alert(1)</script><img src=x onerror=alert(2)>`<b>`\n```\n<i>|[x](javascript:alert(3))"


def test_names_in_a_store_cannot_write_html_into_the_page(store: Store, folder: Path) -> None:
    for rule, data in ((HOSTILE, "mnist"), ("bp", HOSTILE)):
        facts = dict.fromkeys(("device", "torch", "command", "apical"), HOSTILE)
        fill(store, declared(rule, HOSTILE, data, options={HOSTILE: HOSTILE}), [90.0], **facts)
    hostile = dict.fromkeys(("command", "device", "torch", "model", "data"), HOSTILE)
    (folder / "trials.jsonl").write_text(make_trial(HOSTILE, accuracy=90.0, **hostile) + "\n")
    pages = pages_of()
    assert all(re.fullmatch(r"[\w./-]+", path) for path in pages.texts)
    page = "\n".join(pages.texts.values())
    assert page.count("&lt;script>") > 10
    assert re.findall("<[^>]*>", page) == []
    assert page.count("](javascript") == 1  # in the list of commands, which is no Markdown
