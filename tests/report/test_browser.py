"""The page in a real Chromium: it draws, sorts, filters and copies, and asks the network for nothing."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from apical.bench.store import Outcome, Store
from apical.report import write
from stores import declared, fill, history, outcome

pytest.importorskip("jinja2")
pytest.importorskip("plotly")
playwright = pytest.importorskip("playwright.sync_api", reason="no playwright: pip install 'apical[dev]'")

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = [pytest.mark.slow, pytest.mark.skipif(CHROMIUM is None, reason="no chromium: apt-get install chromium")]

EVIL = "</script><script>window.evil = 1</script><img src=x onerror=window.evil=1><a href='javascript:evil'>"
Opened = Callable[..., Any]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as started:
        opened = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])  # CI may be root
        yield opened
        opened.close()


def results(store: Store) -> None:
    """Two networks and data sets, a sweep, alignment, a run that failed, one that goes on, one of foreign names."""
    alignment = {"feedback": [None, 0.5, 0.4], "update": [0.5, 0.3, 1.0], "local": [0.1, 0.2, 0.3]}
    for rule, scores in {"readout": [80.0, 81.0], "bp": [98.0, 98.5], "dll": [9.0, 9.5], "fa": [79.0, 82.0]}.items():
        for model in ("mlp", "cnn"):
            for data in ("mnist", "cifar10"):
                declaration = declared(rule, model, data, alignment=True)
                store.claim(declaration, [0, 1])
                rows = [r for k in (0, 1) for r in history(k, [5.0, scores[k]], alignment=alignment)]
                facts = {"seconds_per_epoch": scores[0], "device": "abacus", "command": f"apical {rule}"}
                store.finish(declaration, [0, 1], Outcome(rows, {}, facts))
    for lr in (0.1, 0.2, 0.4):
        fill(store, declared("bp", "mlp", "digits", lr=lr), [50 + 100 * lr])
    store.claim(declared("ep"), [0, 1])
    store.finish(declared("ep"), [0], outcome({}, {0: "the loss is not finite."}))
    fill(store, declared(EVIL, EVIL, EVIL, options={EVIL: EVIL}), [50.0, 60.0], command=EVIL, device=EVIL)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("page")
    with Store(folder / "results.sqlite") as store:
        results(store)
    write(folder / "results.sqlite", folder / "report.html")
    return folder / "report.html"


@pytest.fixture
def opened(browser: Any, made: Path) -> Iterator[Opened]:
    """The page; afterwards it must have said nothing on the console, and asked for nothing but itself."""
    contexts, complaints, requests = [], [], []

    def visit(width: int = 1280, scheme: str = "light", page: Path = made) -> Any:
        context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
        contexts.append(context)
        tab = context.new_page()
        tab.on("console", lambda message: complaints.append(message.text))
        tab.on("pageerror", lambda error: complaints.append(str(error)))
        tab.on("request", lambda request: requests.append(request.url))
        tab.goto(page.as_uri())
        return tab

    yield visit
    for context in contexts:
        context.close()
    assert complaints == []
    assert [url for url in requests if not url.startswith(("file:", "data:"))] == []


def draw_all(tab: Any) -> None:
    """Scroll past every chart: each is drawn when it comes near."""
    for panel in tab.locator("figure:visible").all():
        panel.scroll_into_view_if_needed()
        panel.locator(".main-svg").first.wait_for()


def column(tab: Any, table: str, number: int) -> list[str]:
    cells = tab.locator(f"{table} tbody tr:visible > :nth-child({number})")
    return [text.strip() for text in cells.all_inner_texts()]


def test_every_chart_is_drawn_and_nothing_foreign_runs(opened: Opened) -> None:
    tab = opened()
    draw_all(tab)
    assert tab.locator("figure").count() == tab.locator("figure:has(.main-svg)").count() > 10
    assert tab.evaluate("window.evil") is None
    assert tab.locator("img, .chart a").count() == 0
    assert EVIL in tab.locator("summary").all_inner_texts()[-1]


def test_other_settings_of_a_rule_wait_in_the_legend(opened: Opened, tmp_path: Path) -> None:
    with Store(tmp_path / "two.sqlite") as store:
        fill(store, declared("bp", lr=0.1), [90.0, 91.0])
        fill(store, declared("bp", lr=0.2), [95.0])
    write(tmp_path / "two.sqlite", tmp_path / "two.html")
    tab = opened(page=tmp_path / "two.html")
    draw_all(tab)
    traces = tab.evaluate("figures[0].data.map((trace) => [trace.name, trace.visible])")
    assert dict(traces) == {"bp": True, "bp (lr 0.2)": "legendonly"}


def test_nothing_moves_when_charts_are_drawn(opened: Opened) -> None:
    tab = opened()
    before = tab.evaluate("document.documentElement.scrollHeight")
    draw_all(tab)
    assert tab.evaluate("document.documentElement.scrollHeight") == before


def test_a_click_sorts_another_turns_it_and_what_is_missing_stays_last(opened: Opened) -> None:
    tab = opened()
    head = tab.locator(".runs thead th", has_text="Over readout")
    place = head.evaluate("th => th.cellIndex") + 1

    def values() -> list[float | None]:
        cells = tab.locator(f".runs tbody tr > :nth-child({place})")
        texts = cells.evaluate_all("cells => cells.map((cell) => cell.dataset.sort)")
        return [float(text) if text else None for text in texts]

    head.get_by_role("button").click()
    assert head.get_attribute("aria-sort") == "ascending"
    known = [value for value in values() if value is not None]
    assert known == sorted(known)
    assert len(set(known)) > 2
    assert values()[: len(known)] == known
    head.get_by_role("button").press("Enter")  # and by the keyboard
    assert head.get_attribute("aria-sort") == "descending"
    assert values()[: len(known)] == sorted(known, reverse=True)
    assert tab.locator(".runs [aria-sort=ascending], .runs [aria-sort=descending]").count() == 1


def test_numbers_are_sorted_by_value_and_words_by_letter(opened: Opened) -> None:
    tab = opened()
    tab.locator(".runs thead th", has_text="s / epoch").get_by_role("button").click()
    times = [float(text) for text in column(tab, ".runs", 10) if text != "–"]
    assert times == sorted(times)
    assert {9.0, 79.0} <= set(times)  # which, as words, stand the other way round
    tab.locator(".runs thead th", has_text="Data").get_by_role("button").click()
    words = [word for word in column(tab, ".runs", 3) if word != EVIL]
    assert words == sorted(words)
    sorted_by = tab.locator(".runs th:not([aria-sort=none])[aria-sort]").all_inner_texts()
    assert sorted_by == ["Data"]  # and no longer by time


def test_filters_act_on_tables_charts_and_details_and_can_be_undone(opened: Opened) -> None:
    tab = opened()
    draw_all(tab)
    tab.get_by_label("Network", exact=True).select_option("cnn")
    heads = tab.locator(".overview thead th[data-data]:visible button").all_inner_texts()
    assert heads == ["MNIST", "CIFAR-10"]  # not the data on which no CNN was trained
    assert tab.locator(".overview").count() == 2  # foreign names share no data with the others
    assert tab.locator(".overview:visible").count() == 1
    tab.get_by_label("Network", exact=True).select_option("")
    tab.get_by_label("Data", exact=True).select_option("digits")
    assert len(column(tab, ".overview", 1)) == 1  # of all rules, bp alone was trained on them
    tab.get_by_label("Data", exact=True).select_option("")
    before = tab.locator("figure:visible").count(), len(column(tab, ".runs", 1))
    tab.get_by_label("Rule", exact=True).select_option("dll")
    assert set(column(tab, ".runs", 1)) == {"dll"}
    assert len(column(tab, ".runs", 1)) == 4
    assert tab.locator("details:visible").count() == 4
    names = tab.locator("figure:visible").first.locator(".legendtext")
    assert names.all_text_contents() == ["dll"]
    tab.get_by_label("Data", exact=True).select_option("mnist")
    tab.get_by_label("Network", exact=True).select_option("cnn")
    assert len(column(tab, ".runs", 1)) == len(column(tab, ".overview", 1)) == 1
    assert tab.locator(".overview thead th[data-data]:visible").count() == 1
    assert tab.locator("output").inner_text() == "1 of 21 shown"
    assert all("mnist, cnn" in text for text in tab.locator("figcaption:visible").all_inner_texts())
    tab.get_by_label("Network", exact=True).select_option(EVIL)
    assert tab.locator("output").inner_text() == "Nothing matches: choose fewer."
    tab.get_by_role("button", name="Show all").click()
    playwright.expect(tab.locator("output")).to_have_text("21 of 21 shown")
    assert (tab.locator("figure:visible").count(), len(column(tab, ".runs", 1))) == before


def test_a_score_leads_to_its_details_whose_command_can_be_copied(opened: Opened) -> None:
    tab = opened()
    tab.context.grant_permissions(["clipboard-read", "clipboard-write"])
    row = tab.locator(".overview tbody tr", has=tab.locator("th code", has_text="fa")).first
    row.locator("a").first.click()
    details = tab.locator("details[open]")
    assert details.count() == 1
    button = details.get_by_role("button")
    button.click()
    playwright.expect(button).not_to_have_text("Copy")
    assert button.inner_text() in ("Copied", "Marked")
    assert tab.evaluate("String(getSelection()) || navigator.clipboard.readText()") == "apical fa"


def test_dark_is_dark_for_the_page_and_its_charts_and_follows_the_system(opened: Opened) -> None:
    tab = opened(scheme="dark")
    tab.locator("figure").first.scroll_into_view_if_needed()
    tab.locator("figure .main-svg").first.wait_for()

    def colours() -> list[list[int]]:
        script = """() => [getComputedStyle(document.body).backgroundColor,
            getComputedStyle(document.querySelector("figure .xtick text")).fill]
            .map((colour) => colour.match(/\\d+/g).slice(0, 3).map(Number))"""
        found: list[list[int]] = tab.evaluate(script)
        return found

    ground, ink = colours()
    assert max(ground) < 60 < 120 < min(ink)
    tick = tab.locator("figure .xtick text").first
    before = tick.evaluate("text => getComputedStyle(text).fill")
    tab.emulate_media(color_scheme="light")
    playwright.expect(tick).not_to_have_css("fill", before)
    ground, ink = colours()
    assert min(ground) > 200 > 140 > max(ink)


def test_on_a_phone_the_criteria_stand_below_the_rule_and_its_scores_beside_it(opened: Opened) -> None:
    wide, narrow = opened(1280), opened(390)
    assert wide.locator(".overview td.mark:visible").count() > 0
    assert wide.locator(".overview .narrow:visible").count() == 0
    assert narrow.locator(".overview .mark:visible").count() == 0
    row = narrow.locator(".overview tbody tr", has=narrow.locator("code", has_text="dll")).first
    assert row.locator(".narrow:visible").all_inner_texts() == ["paper ✓✓✓", "audit ✓✓✗"]
    first = row.locator("td.score").first.bounding_box()
    assert first["x"] + 60 < 390  # a score is seen without scrolling


@pytest.mark.parametrize("width", [320, 390, 768, 1280])
def test_the_page_never_scrolls_sideways(width: int, opened: Opened) -> None:
    tab = opened(width)
    draw_all(tab)
    for details in tab.locator("details").all():
        details.evaluate("one => { one.open = true }")
    assert tab.evaluate("document.documentElement.scrollWidth") <= width


def test_tables_have_headings_for_rows_and_columns_and_charts_have_names(opened: Opened) -> None:
    tab = opened()
    assert tab.locator("thead th:not([scope=col])").count() == 0
    assert tab.locator("tbody tr:not(:has(th[scope=row]))").count() == 0
    assert tab.locator(".sortable thead th:not(:has(button))").count() == 0
    assert tab.locator(".chart:not([role=img][aria-label])").count() == 0
    assert tab.locator("html").get_attribute("lang") == "en"


def test_printing_draws_what_was_not_seen_yet_and_leaves_the_controls_out(opened: Opened) -> None:
    tab = opened()
    tab.emulate_media(media="print")
    tab.evaluate("dispatchEvent(new Event('beforeprint'))")
    playwright.expect(tab.locator("figure:not(:has(.main-svg))")).to_have_count(0)
    assert tab.locator(".filters:visible").count() == 0


def test_an_empty_store_and_one_that_only_failed_are_pages_too(opened: Opened, tmp_path: Path) -> None:
    for name, failed in (("empty", False), ("failed", True)):
        with Store(tmp_path / f"{name}.sqlite") as store:
            if failed:
                store.claim(declared("ep"), [0])
                store.finish(declared("ep"), [0], outcome({}, {0: "the loss is not finite."}))
        write(tmp_path / f"{name}.sqlite", tmp_path / f"{name}.html")
        text = opened(page=tmp_path / f"{name}.html").locator("main").inner_text()
        assert ("1 failed" if failed else "no runs yet") in text
