"""The page as a reader meets it: in a real browser, wide and narrow, light and dark, with and without a script."""

import struct
import zlib
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


def pixels(png: bytes) -> tuple[int, int, list[tuple[int, int, int]]]:
    """Width, height and the colours of the first line of a picture, whose filter must be undone."""
    width, height, depth, kind = struct.unpack(">IIBB", png[16:26])
    assert depth == 8
    data, at = b"", 8
    while at < len(png):
        (length,) = struct.unpack(">I", png[at : at + 4])
        data += png[at + 8 : at + 8 + length] if png[at + 4 : at + 8] == b"IDAT" else b""
        at += length + 12
    step = {2: 3, 6: 4}[kind]
    line = bytearray(zlib.decompress(data)[: width * step + 1])
    sort, line = line[0], line[1:]
    assert sort in (0, 1, 2, 4)  # above the first line all is zero: Up changes nothing, and Paeth is Sub
    if sort in (1, 4):
        for k in range(step, len(line)):
            line[k] = (line[k] + line[k - step]) % 256
    return width, height, [(line[k], line[k + 1], line[k + 2]) for k in range(0, len(line), step)]


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


def test_numbers_are_not_sorted_as_text(browser: Browser, page: Path, tmp_path: Path) -> None:
    text = page.read_text("utf-8")
    column = [part.split('"')[0] for part in text.split('data-value="')[1:]]
    chosen = [value for k, value in enumerate(column) if k % (len(column) // 3) == 0][:3]
    for value, number in zip(chosen, ("9.0", "-10.0", "100.0"), strict=True):
        text = text.replace(f'data-value="{value}"', f'data-value="{number}"', 1)
    other = tmp_path / "other.html"
    other.write_text(text, "utf-8")
    browser.open(other)
    first = browser.ask("document.querySelectorAll('.scores th button')[1].textContent")
    browser.ask(f"{heading(first)}.click()")
    found = [float(value) for value in values(browser, first) if value is not None]
    assert found == sorted(found, reverse=True)


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


def test_dark_is_dark_and_figures_stay_on_light_cards(browser: Browser, page: Path) -> None:
    shown = {}
    for dark in (False, True):
        browser.open(page, dark=dark)
        _, height, line = pixels(browser.screenshot())
        ink = browser.ask("getComputedStyle(document.body).color")
        card = browser.ask("getComputedStyle(document.images[0]).backgroundColor")
        shown[dark] = (line[5], [int(part) for part in ink[4:-1].split(",")], card, height)
    assert min(shown[False][0]) > 240
    assert max(shown[True][0]) < 40
    assert max(shown[False][1]) < 60
    assert min(shown[True][1]) > 200
    assert all(int(part) > 235 for part in shown[True][2][4:-1].split(","))
    assert abs(shown[False][3] - shown[True][3]) <= 2  # colours move nothing


@pytest.mark.parametrize("dark", [False, True])
def test_texts_can_be_read(browser: Browser, page: Path, dark: bool) -> None:
    browser.open(page, dark=dark)
    ratios = browser.ask(
        """(() => {
          const light = (colour) => {
            const [r, g, b] = colour.match(/[\\d.]+/g).slice(0, 3).map(Number).map((v) => v / 255)
              .map((v) => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
            return 0.2126 * r + 0.7152 * g + 0.0722 * b;
          };
          const behind = (each) => {
            for (; each; each = each.parentElement) {
              const colour = getComputedStyle(each).backgroundColor;
              if (!colour.endsWith(", 0)")) return colour;
            }
          };
          return ["p", "li", ".error", ".none", ".best", "figcaption", "summary", "nav a", "pre", "dt", ".failed"]
            .map((name) => [name, document.querySelector(name)]).filter(([, each]) => each).map(([name, each]) => {
              const [a, b] = [light(getComputedStyle(each).color), light(behind(each))].sort((x, y) => y - x);
              return [name, (a + 0.05) / (b + 0.05)];
            });
        })()"""
    )
    assert len(ratios) >= 9
    assert [pair for pair in ratios if pair[1] < 4.5] == []  # the contrast that WCAG asks of small text


def test_printed_it_is_plain_and_whole(browser: Browser, page: Path) -> None:
    browser.open(page, media="print", dark=True, width=1009)  # A4 across, less its margins
    assert browser.ask("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert browser.ask("getComputedStyle(document.querySelector('nav')).display") == "none"
    box = "document.querySelector('.scroll')"
    assert browser.ask(f"getComputedStyle({box}).overflowX") == "visible"
    assert browser.ask(f"{box}.querySelector('table').offsetWidth") <= 1009
    browser.send("Emulation.setEmulatedMedia", media="")
    printed = browser.pdf()
    assert printed.startswith(b"%PDF")
    sizes = [tuple(map(float, box.split())) for box in _boxes(printed)]
    assert any(box[2] > box[3] for box in sizes)  # the table, across
    assert any(box[2] < box[3] for box in sizes)


def _boxes(printed: bytes) -> list[str]:
    return [part.split(b"]")[0].decode() for part in printed.split(b"/MediaBox [")[1:]]
