"""The page in a real Chromium: it draws, sorts, filters and copies, and asks the network for nothing."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from apical.bench.store import Outcome, Store
from apical.report import write
from cases import EVERY
from stores import declared, fill, history, outcome

pytest.importorskip("jinja2")
pytest.importorskip("plotly")
playwright = pytest.importorskip("playwright.sync_api", reason="no playwright: pip install 'apical[dev]'")

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = [pytest.mark.slow, pytest.mark.skipif(CHROMIUM is None, reason="no chromium: apt-get install chromium")]

EVIL = "</script><script>window.evil = 1</script><img src=x onerror=window.evil=1><a href='javascript:evil'>"
HEIGHTS = {1280: 800, 390: 844}
"""Of a laptop and of a phone, by their widths."""
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
        context = browser.new_context(viewport={"width": width, "height": HEIGHTS.get(width, 900)}, color_scheme=scheme)
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


def unfold(tab: Any, which: str = "details.section, details.table") -> None:
    tab.locator(which).evaluate_all("all => all.forEach((one) => { one.open = true; })")


def draw_all(tab: Any) -> None:
    """Unfold the sections and scroll past every chart: each is drawn when it comes near."""
    unfold(tab)
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
    shown = "Object.fromEntries(figures[0].data.map((trace) => [trace.name, trace.visible]))"
    assert tab.evaluate(shown) == {"bp": True, "bp (lr 0.2)": False}
    keys = tab.locator("figure").first.locator(".keys")
    keys.get_by_text("1 with other settings").click()
    keys.get_by_role("button", name="bp (lr 0.2)").click()
    keys.get_by_role("button", name="bp", exact=True).press("Enter")  # and by the keyboard
    assert tab.evaluate(shown) == {"bp": False, "bp (lr 0.2)": True}
    pressed = "keys => keys.map((key) => [key.textContent, key.getAttribute('aria-pressed')])"
    assert dict(keys.get_by_role("button").evaluate_all(pressed)) == {"bp": "false", "bp (lr 0.2)": "true"}
    assert tab.locator("figure").first.locator(".scatterlayer .trace").count() == 1


def test_nothing_moves_when_charts_are_drawn(opened: Opened) -> None:
    tab = opened()
    unfold(tab)
    before = tab.evaluate("document.documentElement.scrollHeight")
    draw_all(tab)
    assert tab.evaluate("document.documentElement.scrollHeight") == before


def test_a_click_sorts_another_turns_it_and_what_is_missing_stays_last(opened: Opened) -> None:
    tab = opened()
    unfold(tab)
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
    unfold(tab)
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
    assert heads == ["MNIST", "CIFAR-10"]
    assert tab.locator(".overview").count() == 3  # one for each network
    assert tab.locator(".overview:visible").count() == 1
    tab.get_by_label("Network", exact=True).select_option("")
    tab.get_by_label("Data", exact=True).select_option("digits")
    assert len(column(tab, ".overview", 1)) == 1  # of all rules, bp alone was trained on them
    tab.get_by_label("Data", exact=True).select_option("")
    before = tab.locator("figure:visible").count(), len(column(tab, ".runs", 1))
    tab.get_by_label("Rule", exact=True).select_option("dll")
    assert set(column(tab, ".runs", 1)) == {"dll"}
    assert len(column(tab, ".runs", 1)) == 4
    assert tab.locator("details[data-rule]:visible").count() == 4
    names = tab.locator("figure:visible").first.locator(".keys button:visible")
    assert [name.strip() for name in names.all_text_contents()] == ["dll"]
    assert tab.locator("figure:visible").first.locator(".scatterlayer .trace .point").count() == 2
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
    assert tab.locator("#runs[open]").count() == 1  # the section unfolds with it
    details = tab.locator("details[data-rule][open]")
    assert details.count() == 1
    box = details.bounding_box()
    assert 0 <= box["y"] < 800
    button = details.get_by_role("button")
    button.click()
    playwright.expect(button).not_to_have_text("Copy")
    assert button.inner_text() in ("Copied", "Marked")
    assert tab.evaluate("String(getSelection()) || navigator.clipboard.readText()") == "apical fa"


def test_dark_is_dark_for_the_page_and_its_charts_and_follows_the_system(opened: Opened) -> None:
    tab = opened(scheme="dark")
    unfold(tab)
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


def test_on_a_phone_the_first_score_stands_beside_the_rule_and_its_criteria(opened: Opened) -> None:
    tab = opened(390)
    row = tab.locator(".overview:visible tbody tr", has=tab.locator("code", has_text="dll")).first
    assert row.locator(".marks .below").all_inner_texts() == ["paper ✓✓✓", "audit ✓✓✗"]
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


# The first screen, and what fits where.

OVERLAPS = """
() => { // pairs of texts whose lines of writing share a place on the page, and texts that are cut off
  const found = [], texts = [];
  const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walk.nextNode()) {
    const node = walk.currentNode, owner = node.parentElement;
    if (!node.data.trim() || !owner.checkVisibility({ visibilityProperty: true })) continue;
    if (owner.closest("option, script, noscript, .filters, .chart [class*=hover]")) continue;
    const range = document.createRange();
    range.selectNodeContents(node);
    for (const box of range.getClientRects()) if (box.width > 1) texts.push([node, box]);
    const scroll = owner.closest(".scroll"), frame = owner.closest("svg.main-svg");
    const edge = (frame ?? scroll ?? document.documentElement).getBoundingClientRect();
    const all = range.getBoundingClientRect();
    const cut = all.left < edge.left - 1 || (frame || !scroll) && all.right > edge.right + 1;
    const below = frame && (all.top < edge.top - 1 || all.bottom > edge.bottom + 1);
    if (cut || below) found.push(`cut: ${node.data}`);
    for (let one = owner; one !== document.body && !one.matches("svg *, .scroll, pre"); one = one.parentElement) {
      const hides = getComputedStyle(one).overflowX !== "visible";
      if (hides && one.scrollWidth > one.clientWidth + 1) found.push(`hidden: ${node.data}`);
    }
  }
  texts.sort(([, a], [, b]) => a.top - b.top);
  for (let i = 0; i < texts.length; i++) {
    for (let j = i + 1; j < texts.length && texts[j][1].top < texts[i][1].bottom - 3; j++) {
      const [a, b] = [texts[i][1], texts[j][1]];
      const sticky = [i, j].map((k) => texts[k][0].parentElement.closest("tr > th:first-child"));
      if (sticky[0] !== sticky[1] && sticky.some((cell) => cell && cell.closest(".scroll")?.scrollLeft)) continue;
      const [wide, high] = [Math.min(a.right, b.right) - Math.max(a.left, b.left), a.bottom - b.top];
      if (wide > 2 && Math.min(high, b.height) > 0.3 * Math.min(a.height, b.height)) {
        found.push(`${texts[i][0].data.trim()} | ${texts[j][0].data.trim()}`);
      }
    }
  }
  return found;
}
"""


def many(store: Store) -> None:
    """What `make bench` leaves: every rule, here on one network more than twice as wide as a name should be."""
    for place, rule in enumerate(EVERY):
        for model in ("mlp", "mlp-1024-512-256-256-256-256-256-256"):
            fill(
                store,
                declared(rule, model, "digits"),
                [95.0 - 2 * place, 96.5 - 2 * place],
                seconds_per_epoch=1 + place,
            )
    for lr in (0.1, 0.2):
        fill(store, declared("dll", "mlp", "digits", lr=lr, options={"theta_rate": 0.5}), [90.0, 91.0])


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory, made: Path) -> dict[str, Path]:
    """Pages by name: of the foreign names above, of every rule, and of the paper's results."""
    folder = tmp_path_factory.mktemp("pages")
    with Store(folder / "every.sqlite") as store:
        many(store)
    sources = {"every": folder / "every.sqlite", "paper": Path(__file__).parents[2] / "results" / "paper.sqlite"}
    for name, source in sources.items():
        write(source, folder / f"{name}.html")
    return {"foreign": made} | {name: folder / f"{name}.html" for name in sources}


@pytest.mark.parametrize("width", HEIGHTS)
@pytest.mark.parametrize("name", ["every", "paper"])
def test_the_finding_and_its_chart_are_on_the_first_screen(
    name: str, width: int, opened: Opened, pages: dict[str, Path]
) -> None:
    tab = opened(width, page=pages[name])
    assert tab.locator(".sentence").count() == 3
    bars = tab.locator(".over tbody tr")
    assert bars.count() >= 22
    for part in [*tab.locator(".sentence").all(), tab.locator(".over")]:
        box = part.bounding_box()
        assert box["y"] >= 0
        assert box["y"] + box["height"] <= HEIGHTS[width]
        assert box["x"] + box["width"] <= width


@pytest.mark.parametrize("width", HEIGHTS)
@pytest.mark.parametrize("name", ["every", "paper", "foreign"])
def test_no_text_is_cut_or_overlaps_another(name: str, width: int, opened: Opened, pages: dict[str, Path]) -> None:
    tab = opened(width, page=pages[name])
    assert tab.evaluate(OVERLAPS) == []
    if name == "paper":  # it has 181 charts and 536 runs: some of each
        tab.locator("#section-1 figure:nth-of-type(n + 5), #runs details:nth-of-type(n + 5)").evaluate_all(
            "all => all.forEach((one) => one.remove())"
        )
        tab.locator("details.section:not(#section-1, #runs)").evaluate_all("all => all.forEach((one) => one.remove())")
    draw_all(tab)
    unfold(tab, "details")
    assert tab.evaluate(OVERLAPS) == []
    assert tab.evaluate("document.documentElement.scrollWidth") <= width


def test_the_check_for_overlaps_sees_them(opened: Opened) -> None:
    """The tests above would pass if it saw nothing."""
    tab = opened()
    tab.locator(".sentence").first.evaluate("one => { one.style.marginBottom = '-3rem'; }")
    assert any("no rule" in pair or "criteria" in pair for pair in tab.evaluate(OVERLAPS))
    tab.reload()
    tab.locator("h1").evaluate("one => { one.style.cssText = 'width: 9rem; overflow: hidden; white-space: nowrap'; }")
    assert "hidden: Learning without backpropagation" in tab.evaluate(OVERLAPS)
    tab.reload()
    tab.locator(".over").evaluate("one => { one.style.width = '200%'; }")
    assert any(text.startswith("cut: +") for text in tab.evaluate(OVERLAPS))


def test_the_papers_results_take_at_most_15_screens(opened: Opened, pages: dict[str, Path]) -> None:
    tab = opened(1280, page=pages["paper"])
    assert tab.evaluate("document.documentElement.scrollHeight") <= 15 * 800
    assert tab.locator("details.section[open]").count() == 0
    assert tab.locator("details.table[open]").count() == 1


@pytest.mark.parametrize("width", HEIGHTS)
def test_a_table_that_goes_on_to_the_right_says_so_and_keeps_its_first_column(
    width: int, opened: Opened, pages: dict[str, Path]
) -> None:
    tab = opened(width, page=pages["paper"])
    box = tab.locator(".scroll:visible").first
    hint = tab.locator(".hint:has(+ .scroll)").locator("visible=true")
    assert hint.count() == (0 if width == 1280 else 1)  # the main table fits a laptop
    if width == 1280:
        return
    before = box.locator("tbody th").first.bounding_box()["x"]
    box.evaluate("one => one.scrollTo(200, 0)")
    assert box.locator("tbody th").first.bounding_box()["x"] == before
    box.evaluate("one => one.scrollTo(9999, 0)")
    playwright.expect(hint).to_have_count(0)


def test_bars_of_the_first_chart_are_as_long_as_their_differences(opened: Opened, pages: dict[str, Path]) -> None:
    """In units of pixels: from the line of the control, one scale for all, better to the right."""
    tab = opened(page=pages["paper"])
    script = """rows => rows.map((row) => {
      const [bar, , zero] = row.querySelector(".track").children;
      const [box, at] = [bar.getBoundingClientRect(), zero.getBoundingClientRect().left];
      const value = Number(row.cells[3].textContent.replace("−", "-"));
      return [value, Math.abs(box.left - at) < 1.5 ? box.width : -box.width];
    })"""
    found = tab.locator(".over tbody tr").evaluate_all(script)
    assert found == sorted(found, reverse=True)
    scale = found[0][1] / found[0][0]
    assert all(abs(wide - scale * value) < 1.5 for value, wide in found)
    assert min(found)[0] < 0 < max(found)[0]


def test_charts_have_the_pages_font_no_toolbar_and_an_axis_that_begins_with_the_curves(opened: Opened) -> None:
    tab = opened()
    draw_all(tab)
    assert tab.locator(".modebar").count() == 0
    families = tab.locator(".chart text").evaluate_all("all => all.map((one) => getComputedStyle(one).fontFamily)")
    assert set(families) == {tab.evaluate("getComputedStyle(document.body).fontFamily")}
    assert "sans-serif" in families[0]
    ranges = """[...document.querySelectorAll("figure .chart")].map((chart) =>
      [chart._fullData.filter((one) => one.visible && one.mode?.startsWith("lines")).flatMap((one) => [...one.x]),
       chart._fullLayout.xaxis.range, chart._fullLayout.xaxis.type])"""
    lines = [(min(x), max(x), axis, kind) for x, axis, kind in tab.evaluate(ranges) if x and min(x) < max(x)]
    assert len(lines) > 5
    for low, high, axis, kind in lines:
        ends = [10**end for end in axis] if kind == "log" else axis
        assert ends == pytest.approx([low, high])


def test_the_first_screen_of_a_store_without_a_control_says_so(opened: Opened, tmp_path: Path) -> None:
    with Store(tmp_path / "one.sqlite") as store:
        fill(store, declared("bp"), [90.0, 91.0])
    write(tmp_path / "one.sqlite", tmp_path / "one.html")
    tab = opened(page=tmp_path / "one.html")
    assert "There is no finding yet" in tab.locator(".sentence").inner_text()
    assert tab.locator(".over").count() == 0
    assert tab.locator(".overview:visible").count() == 1
