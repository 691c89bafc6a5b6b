"""The page is whole, says what is there, and runs nothing that a store says."""

import base64
import hashlib
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

import apical.bench
import apical.report
from apical.bench.declaration import Declaration
from apical.bench.store import Outcome, Store
from apical.errors import ApicalError
from apical.report import web, write, write_figures
from apical.report.charts import make_chart_sections
from apical.report.groups import collect
from apical.report.interactive import make_figure
from apical.report.styles import COLOURS
from stores import declared, fill, history, outcome

pytest.importorskip("jinja2")
pytest.importorskip("plotly")

EVIL = "</script><script>evil()</script><img src=x onerror=evil()>\"'{{ 7 * 7 }}%{x}&amp;"


class Outline(HTMLParser):
    """The elements of a page, and the text in each kind of them."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, list[str]] = {}
        self.open = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self.open = tag
        self.texts.setdefault(tag, []).append("")

    def handle_endtag(self, tag: str) -> None:
        self.open = ""

    def handle_data(self, data: str) -> None:
        if self.open:
            self.texts[self.open][-1] += data


def page_of(store: Store) -> str:
    return web.render(collect(store), store.path)


def own(page: str) -> str:
    """The page without Plotly, which is long."""
    return re.sub(r"<script>.*?</script>", "", page, flags=re.DOTALL)


def test_an_empty_store_gives_a_page_that_says_so(store: Store) -> None:
    page = page_of(store)
    assert "This store has no runs yet" in page
    assert "<table" not in page


def test_the_page_asks_for_nothing_and_allows_only_its_own_scripts(store: Store) -> None:
    fill(store, declared("bp"), [90.0])
    outline = Outline(page_of(store))
    for tag, attributes in outline.elements:
        assert "src" not in attributes
        assert attributes.get("href", "#")[0] == "#" or (tag == "link" and attributes["href"] == "data:,")
        assert not [name for name in attributes if name.startswith("on")]
    policy = next(a["content"] for t, a in outline.elements if a.get("http-equiv") == "Content-Security-Policy")
    assert policy is not None
    scripts = [text for text in outline.texts["script"] if not text.startswith("[")]
    hashes = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in scripts]
    assert len(hashes) == 2
    assert re.findall(r"'sha256-(.*?)'", policy) == hashes
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "unsafe" not in policy.replace("style-src 'unsafe-inline'", "")


def test_what_a_store_says_is_text_and_nothing_else(store: Store) -> None:
    declaration = declared(EVIL, EVIL, EVIL, options={EVIL: EVIL})
    store.claim(declaration, [0, 1])
    facts = {"device": EVIL, "command": EVIL, "torch": EVIL, "code": EVIL, "memory_kind": EVIL}
    store.finish(declaration, [0, 1], outcome({0: [50.0], 1: [60.0]}, {1: EVIL}, **facts))
    fill(store, declared(EVIL, EVIL, EVIL), [40.0])
    page = page_of(store)
    plain, evil = own(page), Outline(own(page))
    assert "<script>evil" not in plain
    assert "49" not in evil.texts["code"]
    assert not [tag for tag, _ in evil.elements if tag == "img"]
    assert [a for tag, a in evil.elements if tag == "script"] == [{"type": "application/json", "id": "figures"}]
    assert EVIL in evil.texts["p"]  # the error, in full
    assert any(attributes.get("data-rule") == EVIL for _, attributes in evil.elements)
    assert any(attributes.get("value") == EVIL for tag, attributes in evil.elements if tag == "option")


def test_charts_get_foreign_text_without_markup_or_templates(store: Store) -> None:
    fill(store, declared(EVIL, EVIL, EVIL), [40.0, 41.0])
    for section in make_chart_sections(collect(store)):
        for drawing in section.drawings:
            for trace in (made := make_figure(drawing))["data"]:
                assert not re.search(r"<(?!/?extra>)|%\{", trace["name"])
            assert "<" not in json.dumps(made["layout"])


def test_the_finding_comes_first_and_all_but_one_table_is_folded(store: Store) -> None:
    for model in ("mlp", "cnn"):
        for rule, scores in {"readout": [80.0, 81.0], "bp": [98.0, 98.5], EVIL: [85.0, 85.5]}.items():
            fill(store, declared(rule, model, "digits"), scores)
    page = own(page_of(store))
    outline = Outline(page)
    first, rest = page.split("</header>")
    head = Outline(first)
    assert [tag for tag, a in head.elements if "sentence" in (a.get("class") or "")] == ["p"] * 3
    assert "2 of 2 rules beat the control by more than two standard errors." in head.texts["p"]
    rows = [attributes["class"] for tag, attributes in head.elements if tag == "tr" and "class" in attributes]
    assert rows == ["kept-1", "kept-None"]  # what each rule keeps is its colour
    assert EVIL in head.texts["code"]
    assert "<table" in rest
    folded = [attributes for tag, attributes in outline.elements if tag == "details"]
    assert [a["data-model"] for a in folded if "open" in a] == ["mlp"]
    assert {"table", "section", None} == {attributes.get("class") for attributes in folded}


def test_the_page_of_a_bench_begins_with_its_finding(tmp_path: Path) -> None:
    apical.bench.run("digits", store=tmp_path / "a.sqlite", rules=["readout", "bp"], models=["mlp"], seeds=2, epochs=1)
    apical.report.write(tmp_path / "a.sqlite", tmp_path / "a.html")
    top = (tmp_path / "a.html").read_text("utf-8").partition("</header>")[0]
    sentences = [re.sub("<.*?>", "", text) for text in re.findall('<p class="sentence">(.*?)</p>', top)]
    assert sentences[:2] == [
        "On digits with MLP, no rule is known to keep all three criteria.",
        "There is no other rule than bp.",
    ]
    assert re.fullmatch(
        "[01] of 1 rules beat the control by more than two standard errors(; bp does not)?.", sentences[2]
    )
    assert len(sentences) == 3


def test_json_in_a_page_cannot_end_its_element_and_reads_back() -> None:
    value = {"a": ["</script><!--&", 0.125, None, True, 3], "b": float("inf")}
    text = web.to_json(value)
    assert not set("<>&") & set(text)
    assert json.loads(text) == {**value, "b": None}


def test_numbers_have_the_signs_that_print_uses() -> None:
    assert web._format_fixed(-1.005, 1) == "−1.0"
    assert web._format_fixed(2.0, 2, True) == "+2.00"
    assert web._format_fixed(None) == web._format_fixed(float("nan")) == "–"


def test_every_chart_is_a_figure_that_plotly_takes(store: Store) -> None:
    objects = pytest.importorskip("plotly.graph_objects")
    alignment = {"feedback": [None, 0.5], "update": [0.5, 1.0], "local": [0.1, 0.2]}
    for lr in (0.1, 0.2, 0.3):
        declaration = declared("dll", lr=lr, alignment=True)
        store.claim(declaration, [0, 1])
        rows = [row for seed in (0, 1) for row in history(seed, [50.0, 60.0], alignment=alignment)]
        store.finish(declaration, [0, 1], Outcome(rows, {}, {"seconds_per_epoch": 1.0}))
        for std in (0.5, 1.0):
            fill(store, declared("dll", lr=lr, options={"theta_std": std}), [90.0])
    found = make_chart_sections(collect(store))
    kinds = {drawing.kind for section in found for drawing in section.drawings}
    assert kinds == {"curves", "time", "feedback", "update", "local", "heat", "sweep"}
    for section in found:
        for drawing in section.drawings:
            made = make_figure(drawing)
            objects.Figure(made)  # refuses what it does not know
            assert {trace["meta"]["rule"] for trace in made["data"]} == {"dll"}


def test_a_band_goes_around_the_range_over_seeds(store: Store) -> None:
    declaration = declared("bp")
    store.claim(declaration, [0, 1])
    store.finish(declaration, [0, 1], outcome({0: [50.0, 60.0], 1: [54.0, 70.0]}))
    (section, *_) = make_chart_sections(collect(store))
    band, line = make_figure(section.drawings[0])["data"]
    assert band["x"] == [1, 2, 2, 1]
    assert band["y"] == pytest.approx([54.0, 70.0, 60.0, 50.0])
    assert line["y"] == pytest.approx([52.0, 65.0])


def test_a_point_has_its_range_above_and_below_the_mean(store: Store) -> None:
    fill(store, declared("bp"), [90.0, 91.0, 95.0])
    (point,) = next(
        make_figure(d)["data"] for s in make_chart_sections(collect(store)) for d in s.drawings if d.kind == "time"
    )
    assert point["y"] == pytest.approx([92.0])
    assert point["error_y"]["array"] == pytest.approx([3.0])
    assert point["error_y"]["arrayminus"] == pytest.approx([2.0])


def test_ticks_of_a_logarithmic_axis_are_powers_of_ten_and_few_others(store: Store) -> None:
    for rule, seconds in (("bp", 0.3), ("fa", 4.0)):
        fill(store, declared(rule), [90.0], seconds_per_epoch=seconds)
    axis = next(
        make_figure(d)["layout"]["xaxis"]
        for s in make_chart_sections(collect(store))
        for d in s.drawings
        if d.kind == "time"
    )
    assert axis["type"] == "log"
    assert axis["tickvals"] == pytest.approx([0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50])
    assert axis["ticktext"][:4] == ["0.1", "0.2", "0.5", "1"]


def luminance(colour: str) -> float:
    """Of the WCAG 2."""
    parts = [int(colour[k : k + 2], 16) / 255 for k in (1, 3, 5)]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("ground", re.findall(r"--paper: (#\w{6})", web._read_file("web.css")))
def test_lines_stand_out_from_light_and_from_dark(ground: str) -> None:
    of_criteria = re.findall(r"--kept-\w+: (#\w{6})", web._read_file("web.css"))
    assert len(of_criteria) == len(web.SHADES)
    for colour in (*COLOURS, *of_criteria):
        high, low = sorted((luminance(colour), luminance(ground)), reverse=True)
        assert (high + 0.05) / (low + 0.05) >= 3, colour


def test_details_have_what_repeats_and_explains_a_run(store: Store) -> None:
    declaration = declared("bp", lr=0.125)
    store.claim(declaration, [0, 1, 2])
    facts = {"torch": "9.9", "apical": "8.8", "device": "abacus", "command": "apical train --rule bp --lr 0.125"}
    store.finish(declaration, [0, 1], outcome({0: [90.0], 1: [10.0]}, {1: "it diverged."}, **facts))
    text = re.sub(r"<.*?>", "", own(page_of(store)))
    for words in ("apical train --rule bp --lr 0.125", "it diverged.", "abacus; apical 8.8, torch 9.9"):
        assert words in text
    assert "apical train --rule bp --model mlp --data mnist" in text  # what seed 2 is running
    assert "--seeds 2," in text
    assert "1 done, 1 failed, 1 running" in text


def test_the_same_store_gives_the_same_page(store: Store) -> None:
    fill(store, declared("bp"), [90.0, 91.0])
    fill(store, declared("fa"), [80.0, 81.0])
    assert page_of(store) == page_of(store)


def test_the_stores_of_a_folder_have_one_page_and_its_figures(tmp_path: Path, store: Store) -> None:
    pytest.importorskip("matplotlib")
    fill(store, declared("bp"), [90.0, 91.0])
    with Store(tmp_path / "deep" / "other.sqlite") as other:
        fill(other, declared("bp"), [10.0, 11.0])  # is in the first store already
        fill(other, declared("fa"), [80.0, 81.0])
    write(tmp_path, tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text("utf-8")
    assert "80.50" in page
    assert "10.50" in page
    assert "90.50" not in page  # the stores are read in the order of their paths
    assert "4 done" in page
    drawn = write_figures(tmp_path, tmp_path / "drawn", "svg")
    (curves,) = [path for path in drawn if path.stem == "curves-mnist-mlp"]
    assert all(f">{rule}<" in curves.read_text("utf-8") for rule in ("bp", "fa"))


def test_a_folder_without_stores_is_refused_in_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ApicalError, match=r"there are no stores of results \(\*\.sqlite\) in .*empty; `apical train"):
        write(tmp_path / "empty", tmp_path / "page.html")


@pytest.mark.parametrize("name", ["page.txt", "page.md", "page"])
def test_a_page_that_is_no_html_is_refused(name: str, tmp_path: Path, store: Store) -> None:
    with pytest.raises(ApicalError, match=rf"{name} does not end in \.html, .* name it page\.html\.$"):
        write(store.path, tmp_path / name)
    assert not (tmp_path / name).exists()


def test_another_protocol_and_a_part_of_the_data_stand_beside_the_score(store: Store) -> None:
    asked = declared("bp", protocol="paper").to_dict()
    fill(store, Declaration.from_dict({**asked, "examples": 128}), [50.0])
    outline = Outline(own(page_of(store)))
    assert outline.texts["em"] == ["(best test epoch, 128 examples)"] * 2  # in both tables
    assert "examples" in outline.texts["dt"]
