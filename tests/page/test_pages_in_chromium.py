"""A browser draws the pages without a complaint and without asking anybody, in both schemes, wide and narrow."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from optkit.comparison import compare_scorecards
from optkit.page import comparison_page, scorecard_page
from tests.support.chromium import Chromium, chromium, find_chromium
from tests.support.full_scorecards import count, full_scorecard, sweep

pytestmark = pytest.mark.skipif(find_chromium() is None, reason="no chromium: apt-get install chromium")
DRAWN = "[...document.querySelectorAll('[data-chart]')].map((each) => each.querySelector('svg').clientWidth)"
FIRST = "[...document.querySelectorAll('#numbers tbody tr:not([hidden]) > :first-child')].map((each) => each.innerText)"


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chromium]:
    with chromium(tmp_path_factory.mktemp("chromium") / "profile") as found:
        yield found


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("pages") / "scorecard.html"
    path.write_text(scorecard_page(full_scorecard()), encoding="utf-8")
    return path


@pytest.fixture(scope="module", params=[12, 40])
def comparison(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("pages") / "report.html"
    path.write_text(comparison_page(compare_scorecards(sweep(request.param))), encoding="utf-8")
    return path


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 1440])
def test_it_is_drawn_quietly(browser: Chromium, page: Path, scheme: str, width: int) -> None:
    browser.open(page, width, scheme=scheme)
    assert browser.complaints() == []
    assert browser.requests() == [page.as_uri()]
    assert browser.evaluate("document.documentElement.scrollWidth") == width  # nothing sticks out
    drawn = browser.evaluate(DRAWN)
    assert len(drawn) == 11
    assert all(0.6 * min(width, 560) < each <= width for each in drawn)
    paper = browser.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (paper == "rgb(255, 255, 255)") == (scheme == "light")


def test_a_comparison_is_drawn_quietly_and_prints_to_two_pages(browser: Chromium, comparison: Path) -> None:
    for scheme, width in (("light", 360), ("dark", 1440)):
        browser.open(comparison, width, scheme=scheme)
        assert browser.complaints() == []
        assert browser.requests() == [comparison.as_uri()]
        assert browser.evaluate("document.documentElement.scrollWidth") == width
        assert len(browser.evaluate(DRAWN)) == 6
    assert browser.printed_pages() == 2


CUT = (
    "(() => { const box = document.querySelector('.scroll.broad'); const hint = document.querySelector('[data-cut]');"
    " return [box.clientWidth, box.scrollWidth - box.clientWidth > 1, !hint.hidden]; })()"
)
BORDERS = (
    "[...document.querySelectorAll('tbody tr:first-child > *')]"
    ".map((each) => getComputedStyle(each).borderBottomWidth + ' ' + getComputedStyle(each).display)"
)


@pytest.mark.parametrize(("width", "cut"), [(390, True), (800, True), (1440, False)])
def test_a_table_takes_the_room_that_there_is_and_says_if_it_is_cut(
    browser: Chromium, comparison: Path, width: int, cut: bool
) -> None:
    browser.open(comparison, width)
    room, sticks_out, said = browser.evaluate(CUT)
    assert (sticks_out, said) == (cut, cut)
    assert room > min(width - 70, 1180)
    assert set(browser.evaluate(BORDERS)) == {"1px table-cell"}, "a line below each cell, and none is hidden"
    browser.evaluate(
        "(() => { const box = document.querySelector('.scroll.broad');"
        " box.scrollLeft = 10000; box.dispatchEvent(new Event('scroll')); })()"
    )
    assert not browser.evaluate(CUT)[2], "its end is shown"


def test_dots_that_cover_each_other_have_their_numbers_above_them(browser: Chromium, tmp_path: Path) -> None:
    cards = sweep()
    again = [
        (Path(f"b/{index}"), card.model_copy(update={"name": f"b-{index}"})) for index, (_, card) in enumerate(cards)
    ]
    path = tmp_path / "report.html"
    path.write_text(comparison_page(compare_scorecards([*cards, *again])), encoding="utf-8")
    browser.open(path)
    assert browser.complaints() == []
    texts = browser.evaluate(
        "[...document.querySelectorAll('[data-chart=against-0-0] g[aria-label=text] text')].map((each) =>"
        " [each.textContent, [...each.querySelectorAll('tspan')].map((line) => line.textContent)])"
    )
    heaps = [lines for _, lines in texts if lines]
    assert all(len(lines) > 1 for lines in heaps)
    numbers = [number for text, lines in texts for number in (lines or [text]) if number.isdigit()]
    assert sorted(map(int, numbers)) == list(range(1, 25)), "each once"
    assert len([number for lines in heaps for number in lines]) == 24, "each lies on its twin"


def test_it_prints_to_two_pages(browser: Chromium, page: Path) -> None:
    browser.open(page, 1440, scheme="dark")
    assert browser.printed_pages() == 2


def test_the_table_is_sorted_and_filtered_by_keyboard(browser: Chromium, page: Path) -> None:
    browser.open(page)
    before = browser.evaluate(FIRST)
    browser.evaluate("document.querySelector('#numbers thead button').focus()")
    browser.press("Tab")
    browser.press("Enter")
    assert browser.evaluate("document.activeElement.closest('th').getAttribute('aria-sort')") == "ascending"
    rising = browser.evaluate(FIRST)
    assert rising[0].startswith("size_bytes")
    assert sorted(rising) == sorted(before)
    browser.press("Enter")
    falling = browser.evaluate(FIRST)
    assert browser.evaluate("document.querySelectorAll('#numbers [aria-sort]').length") == 1
    assert falling[0].startswith("decode_")
    assert "layer_kl_divergence" in falling[-1], "what has no ratio stays last"
    browser.evaluate(
        "(() => { const field = document.querySelector('input'); field.value = 'batch DECODE';"
        " field.dispatchEvent(new Event('input')); })()"
    )
    assert {each.partition("_")[0] for each in browser.evaluate(FIRST)} == {"decode"}
    assert browser.evaluate("document.getElementById('numbers-count').innerText") == "3 of 20 rows"


def test_a_pointer_shows_one_hint_on_the_colour_of_the_page(browser: Chromium, comparison: Path) -> None:
    browser.open(comparison, scheme="dark")
    x, y = browser.evaluate(
        "(() => { const chart = document.querySelector('[data-chart=against-0-0]'); chart.scrollIntoView();"
        " const dot = chart.querySelector('g[aria-label=dot] circle').getBoundingClientRect();"
        " return [dot.x + dot.width / 2, dot.y + dot.height / 2]; })()"
    )
    browser.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
    browser.evaluate("new Promise((done) => setTimeout(done, 100))")
    hints, paper = browser.evaluate(
        "(() => { const all = [...document.querySelectorAll('g[aria-label=tip] > g')];"
        " return [all.map((each) => each.textContent), getComputedStyle(all[0].querySelector('path')).fill]; })()"
    )
    assert len(hints) == 1
    assert "perplexity: " in hints[0]
    assert "group_size " in hints[0]
    assert paper == "rgb(20, 23, 27)"


def test_the_command_is_copied_or_marked(browser: Chromium, page: Path) -> None:
    browser.open(page)
    browser.evaluate("document.querySelector('[data-copies]').click()")
    said = browser.evaluate(
        "new Promise((done) => setTimeout(() => done(document.querySelector('[data-copies]').innerText), 100))"
    )
    assert said in ("Copied", "Marked: copy it")
    assert browser.complaints() == []


def test_markup_in_names_is_not_run(browser: Chromium, tmp_path: Path) -> None:
    evil = "</script><script>document.title = 'run'</script><img src=x onerror=\"document.title = 'run'\">"
    card = full_scorecard(name=evil)
    hostile = count("size_bytes", 3.0).model_copy(update={"labels": {evil: evil}})
    row = card.rows[0].model_copy(update={"metric": hostile, "ratio": 2.0})
    path = tmp_path / "evil.html"
    path.write_text(scorecard_page(card.model_copy(update={"rows": (row,)})), encoding="utf-8")
    browser.open(path)
    assert browser.evaluate("document.title").startswith("</script>")
    assert browser.evaluate("document.images.length") == 0
    assert browser.complaints() == []
    assert browser.requests() == [path.as_uri()]
