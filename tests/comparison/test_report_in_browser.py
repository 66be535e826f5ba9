"""The page as a reader meets it: in a real browser, wide and narrow, light and dark, with and without a script."""

from collections.abc import Iterator
from pathlib import Path

import pyro
import pytest

from tests.comparison.browser import Browser, chromium
from tests.comparison.sample_comparison import HOSTILE, regression

PROGRAM = chromium()
pytestmark = pytest.mark.skipif(PROGRAM is None, reason="there is no chromium here (Debian: apt install chromium)")

NAMES = "[...document.querySelectorAll('.scores tbody th')].map(cell => cell.textContent.trim())"
SORTED = "[...document.querySelectorAll('[aria-sort]')].map(each => [each.textContent, each.getAttribute('aria-sort')])"
OVERFLOW = "document.documentElement.scrollWidth - document.documentElement.clientWidth"


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pyro.set_rng_seed(0)
    return regression().to_html(tmp_path_factory.mktemp("page") / "page.html")


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    assert PROGRAM is not None
    with Browser(PROGRAM) as found:
        yield found


def heading(name: str) -> str:
    return f"[...document.querySelectorAll('.scores th button')].find(each => each.textContent === '{name}')"


def values(browser: Browser, name: str) -> list[str | None]:
    place = f"{heading(name)}.parentElement.cellIndex"
    found = browser.ask(
        f"[...document.querySelectorAll('.scores tbody tr')].map(row => row.cells[{place}].dataset.value ?? null)"
    )
    assert isinstance(found, list)
    return found


def test_nothing_is_fetched_and_nothing_complains(browser: Browser, page: Path) -> None:
    browser.open(page)
    outside = [url for url in browser.requests if not url.startswith(("data:image/svg+xml", page.resolve().as_uri()))]
    assert outside == []
    assert browser.complaints == []
    assert browser.ask("window.hacked === undefined")
    assert browser.ask("document.querySelectorAll('script').length") == 1
    assert HOSTILE in browser.ask("document.title")


def test_what_the_policy_forbids_is_not_run(browser: Browser, page: Path, tmp_path: Path) -> None:
    # the browser itself is the second lock: had a name got through, it would not run
    broken = tmp_path / "broken.html"
    broken.write_text(page.read_text("utf-8").replace("<main>", "<main><script>window.hacked = 1</script>"), "utf-8")
    browser.open(broken)
    assert browser.ask("window.hacked === undefined")
    assert any("Content Security Policy" in words for words in browser.complaints)


@pytest.mark.parametrize(("width", "dark"), [(1200, False), (1200, True), (360, False)])
def test_every_figure_is_seen(browser: Browser, page: Path, width: int, dark: bool) -> None:
    browser.open(page, width=width, dark=dark)
    found = browser.ask(
        "[...document.images].map(each => ({natural: each.naturalWidth, alt: each.alt.length,"
        " ...each.getBoundingClientRect().toJSON()}))"
    )
    assert len(found) == 6  # three bands, calibration, rejection, the gap
    for image in found:
        assert image["natural"] > 0
        assert image["alt"] > 20
        assert image["width"] > 0.6 * min(width, 500)
        assert image["height"] > 80
        assert image["left"] >= 0
        assert image["right"] <= width


@pytest.mark.parametrize("width", [320, 360, 768, 1280, 1920])
def test_no_page_scrolls_sideways_but_its_table_does(browser: Browser, page: Path, width: int) -> None:
    browser.open(page, width=width)
    assert browser.ask("innerWidth") == width
    assert browser.ask(OVERFLOW) == 0
    if width <= 360:
        assert browser.ask("(box => box.scrollWidth - box.clientWidth)(document.querySelector('.scroll'))") > 100
        size = browser.ask("parseFloat(getComputedStyle(document.body).fontSize)")
        assert size >= 16
    if width >= 1280:  # a laptop's screen shows all scores
        assert browser.ask("(box => box.scrollWidth - box.clientWidth)(document.querySelector('.scroll'))") == 0


def test_a_click_on_a_heading_sorts_by_number(browser: Browser, page: Path) -> None:
    browser.open(page)
    assert browser.ask(SORTED) == []
    before = browser.ask(NAMES)
    assert before == ["dropout", HOSTILE, "mean field", "_broken"]
    browser.ask(f"void {heading('RMSE')}.scrollIntoView({{block: 'center', behavior: 'instant'}})")
    place = browser.ask(f"{heading('RMSE')}.getBoundingClientRect().toJSON()")
    browser.click(place["x"] + place["width"] / 2, place["y"] + place["height"] / 2)
    assert browser.ask(SORTED) == [["RMSE", "ascending"]]
    numbers = [float(value) for value in values(browser, "RMSE") if value is not None]
    assert numbers == sorted(numbers)
    assert len(numbers) == 3
    assert browser.ask(NAMES)[-1] == "_broken"  # what failed has no number, and stays below
    browser.click(place["x"] + place["width"] / 2, place["y"] + place["height"] / 2)
    assert browser.ask(SORTED) == [["RMSE", "descending"]]
    assert [float(value) for value in values(browser, "RMSE")[:3] if value is not None] == numbers[::-1]
    assert values(browser, "RMSE")[-1] is None
    # ELBO: the nearest to the evidence first; as text, -9 would come before -100
    browser.ask(f"{heading('ELBO')}.click()")
    assert browser.ask(SORTED) == [["ELBO", "descending"]]
    bounds = [float(value) for value in values(browser, "ELBO") if value is not None]
    assert bounds == sorted(bounds, reverse=True)
    assert len(bounds) == 2
    assert browser.ask("document.querySelector('[role=status]').textContent") == "Sorted by ELBO, descending."


@pytest.mark.parametrize(("key", "code"), [("Enter", 13), (" ", 32)])
def test_the_keyboard_sorts_too(browser: Browser, page: Path, key: str, code: int) -> None:
    browser.open(page)
    browser.ask(f"{heading('posterior')}.focus()")
    browser.press(key, code)
    assert browser.ask(SORTED) == [["posterior", "ascending"]]
    assert browser.ask(NAMES) == browser.ask(f"{NAMES}.sort((a, b) => a.localeCompare(b))")
    browser.press("Tab", 9)
    assert browser.ask("document.activeElement.textContent") == "test log-lik."
    outline = browser.ask("getComputedStyle(document.activeElement).outlineStyle")
    assert outline != "none"


def test_without_a_script_it_is_a_plain_table(browser: Browser, page: Path) -> None:
    browser.open(page, js=False)
    # the browser's own protocol may look, though the page may run nothing
    root = browser.send("DOM.getDocument")["root"]["nodeId"]
    for selector, count in ((".scores th button", 0), (".scores tbody tr", 4), (".scores thead tr:last-child th", 13)):
        found = browser.send("DOM.querySelectorAll", nodeId=root, selector=selector)["nodeIds"]
        assert len(found) == count, selector
    browser.send("Emulation.setScriptExecutionDisabled", value=False)
