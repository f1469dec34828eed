"""The site is built without a warning, and a browser reads it from files alone, wide and narrow, dark and light."""

import importlib.util
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.chromium import Chromium, chromium, find_chromium

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(importlib.util.find_spec("material") is None, reason="pip install 'optkit[docs]'")
browsed = pytest.mark.skipif(find_chromium() is None, reason="no chromium: apt-get install chromium")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the site as `make docs` does: a dead link or anchor, or a page that no menu has, ends it."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chromium]:
    with chromium(tmp_path_factory.mktemp("chromium") / "profile") as found:
        # The site remembers the scheme that was shown last.
        found.call("Page.addScriptToEvaluateOnNewDocument", source="localStorage.clear()")
        yield found


def pages(site: Path) -> list[Path]:
    return sorted(path for path in site.rglob("*.html") if path.name != "404.html")


def test_nothing_comes_from_another_server(site: Path) -> None:
    for page in pages(site):
        text = page.read_text(encoding="utf-8")
        assert re.findall(r"<(?:script|img|iframe|link)\b[^>]*?(?:src|href)=\"?(https?:[^\" >]*)", text) == [], page


def test_words_of_the_glossary_have_tooltips(site: Path) -> None:
    tips = {page: re.findall(r'<abbr title="([^"]+)">', page.read_text(encoding="utf-8")) for page in pages(site)}
    assert tips[site / "glossary.html"] == []
    assert "The unmodified model, measured in the same run as the artifact." in tips[site / "index.html"]
    for page, found in tips.items():
        assert len({*found}) == len(found), page
        assert not any("Pareto front" in tip for tip in found), "front is an everyday word"


@browsed
@pytest.mark.parametrize("every", [10, pytest.param(1, marks=pytest.mark.slow)])
def test_pages_are_drawn_quietly_and_fit_a_phone(site: Path, browser: Chromium, every: int) -> None:
    """All pages take half a minute, so that one of ten stands for the others."""
    for number, page in enumerate(pages(site)[::every]):
        width, scheme = ((360, "light"), (360, "dark"), (1440, "dark"))[number % 3]
        browser.open(page, width, scheme=scheme)
        assert browser.complaints() == [], page
        assert [each for each in browser.requests() if not each.startswith(("file:", "data:", "blob:"))] == [], page
        assert browser.evaluate("document.documentElement.scrollWidth") == width, page
        paper = browser.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (paper == "rgb(255, 255, 255)") == (scheme == "light"), page


@browsed
def test_names_stay_in_view_beside_the_columns_of_the_zoo(site: Path, browser: Chromium) -> None:
    browser.open(site / "understand" / "models.html", 1280)
    browser.evaluate("document.querySelector('.zoo .md-typeset__scrollwrap').scrollLeft = 500")
    left = "document.querySelector('.zoo tbody th').getBoundingClientRect().left"
    assert browser.evaluate(f"{left} >= document.querySelector('.zoo .md-typeset__scrollwrap').offsetLeft")
    assert browser.evaluate("document.querySelector('.zoo table').offsetWidth") < 2600
    field = "document.querySelector('input[placeholder=qwen3]')"
    browser.evaluate(f"{field}.value = 'bloom'; {field}.dispatchEvent(new Event('input'))")
    left = "Array.from(document.querySelectorAll('{}[data-models]')).filter(each => each.offsetHeight).length"
    assert browser.evaluate(left.format("tr")) == 1
    assert 3 < browser.evaluate(left.format("li")) < 30


@browsed
@pytest.mark.parametrize(
    "page",
    [
        "index",
        pytest.param("understand/architecture", marks=pytest.mark.slow),
        pytest.param("understand/algorithms/gptq", marks=pytest.mark.slow),
    ],
)
def test_figures_follow_the_button_and_not_the_system(site: Path, browser: Chromium, page: str) -> None:
    """They are images, whose `prefers-color-scheme` is the color-scheme of the page around them."""

    def picture(system: str, press: bool) -> str:
        browser.open(site / f"{page}.html", scheme=system)
        if press:
            browser.evaluate("document.querySelector('[data-md-component=palette] label:not([hidden])').click()")
        place = browser.evaluate(
            "JSON.parse(JSON.stringify(document.querySelector"
            "('.md-content img[src$=\".svg\"]').getBoundingClientRect()))"
        )
        clip = {**{name: place[name] for name in ("x", "y", "width", "height")}, "scale": 1}
        said = browser.call("Page.captureScreenshot", format="png", captureBeyondViewport=True, clip=clip)
        return str(said["data"])

    light, dark = picture("light", False), picture("dark", False)
    assert light != dark
    assert picture("light", True) == dark
    assert picture("dark", True) == light


@browsed
def test_search_finds_an_error_without_a_server(site: Path, browser: Chromium) -> None:
    browser.open(site / "index.html")
    browser.evaluate(
        "(() => { const field = document.querySelector('.md-search__input'); field.focus();"
        " field.value = 'compiled step cannot check several tokens'; field.dispatchEvent(new Event('keyup')); })()"
    )
    found = "document.querySelector('.md-search-result__link[href*=\"reference/errors.html\"]')"
    wait = f"new Promise((done) => {{ const look = () => {found} ? done(true) : setTimeout(look, 50); look(); }})"
    assert browser.evaluate(wait)
    assert browser.complaints() == []
