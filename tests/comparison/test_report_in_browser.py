"""The page as a reader meets it, in a real browser: what runs, what sorts, and what fits a phone."""

import html
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pyro
import pytest

from pyro_dropout.comparison.report.page import page as report
from tests.comparison.sample_comparison import HOSTILE, regression

PROGRAM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(PROGRAM is None, reason="there is no chromium here (Debian: apt install chromium)")

POLICY = re.compile(r'<meta http-equiv="Content-Security-Policy"[^>]*>')
OUTER = """<iframe id="page" style="border: 0; width: {width}px; height: 900px"></iframe><script>
addEventListener("message", (event) => document.documentElement.dataset.found = event.data);
document.getElementById("page").srcdoc = {page};
</script>"""
NAMES = "[...document.querySelector('.scores').querySelectorAll('tbody th')].map(cell => cell.textContent.trim())"
SORTED = "[...document.querySelectorAll('[aria-sort]')].map(each => [each.textContent, each.getAttribute('aria-sort')])"


@pytest.fixture(scope="module")
def page() -> str:
    pyro.set_rng_seed(0)
    return str(report(regression()))


def asked(page: str, script: str, folder: Path, width: int = 1200) -> Any:
    """Run a script in the page, in a frame of this width, and return what it returns; None if it may not run."""
    told = f"<script>addEventListener('load', () => parent.postMessage(JSON.stringify((() => {{{script}}})()), '*'))"
    inner = page.replace("</body>", f"{told}</script></body>")
    place = folder / "outer.html"
    place.write_text(OUTER.format(width=width, page=json.dumps(inner).replace("</", "<\\/")), "utf-8")
    flags = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--virtual-time-budget=5000")
    command = [str(PROGRAM), *flags, f"--user-data-dir={folder}", "--dump-dom", place.as_uri()]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=120).stdout
    found = re.search(r'data-found="([^"]*)"', shown)
    return json.loads(html.unescape(found[1])) if found else None


def heading(name: str) -> str:
    return f"[...document.querySelectorAll('.scores th button')].find(each => each.textContent === '{name}')"


def test_the_policy_lets_no_other_script_run(page: str, tmp_path: Path) -> None:
    """Had a name got through as a script, the browser would not run it."""
    assert POLICY.search(page)
    assert asked(page, "return 1", tmp_path) is None
    assert asked(POLICY.sub("", page), "return [window.hacked === undefined, document.title]", tmp_path) == [
        True,
        f"Waves {HOSTILE}",
    ]


def test_a_click_on_a_heading_sorts_by_number(page: str, tmp_path: Path) -> None:
    """What failed has no number, and stays below; as text, -9 would come before -100."""
    rows = "[...{0}.closest('table').querySelectorAll('tbody tr')]"
    values = f"{rows}.map(row => row.cells[{{0}}.parentElement.cellIndex].dataset.value ?? null)"
    script = f"const seen = [{NAMES}, {SORTED}];"
    for name in ("RMSE", "RMSE", "ELBO", "posterior"):
        column = values.format(heading(name))
        script += f"{heading(name)}.click(); seen.push({SORTED}, {column}, {NAMES});"
    found = asked(POLICY.sub("", page), script + "return seen", tmp_path)
    assert found[:2] == [["dropout", HOSTILE, "mean field", "_broken"], []]
    up, down, bounds, names = (found[k : k + 3] for k in (2, 5, 8, 11))
    assert (up[0], down[0]) == ([["RMSE", "ascending"]], [["RMSE", "descending"]])
    numbers = [float(value) for value in up[1][:3]]
    assert numbers == sorted(numbers)
    assert [float(value) for value in down[1][:3]] == numbers[::-1]
    assert (up[1][3], down[1][3], up[2][-1]) == (None, None, "_broken")
    known = [float(value) for value in bounds[1] if value is not None]
    assert bounds[0] == [["RMSE", "descending"], ["ELBO", "descending"]]  # of two tables
    assert known == sorted(known, reverse=True)
    assert names[0] == [["posterior", "ascending"], ["ELBO", "descending"]]
    assert names[2] == ["_broken", HOSTILE, "dropout", "mean field"]


@pytest.mark.parametrize("width", [320, 768, 1280])
@pytest.mark.thinned(3)
def test_no_page_scrolls_sideways_and_every_figure_is_seen(page: str, width: int, tmp_path: Path) -> None:
    script = (
        "const box = document.querySelector('.scroll'), root = document.documentElement;"
        "return [root.scrollWidth - root.clientWidth, box.scrollWidth - box.clientWidth, [...document.images].map("
        "each => [each.naturalWidth, each.getBoundingClientRect().left, each.getBoundingClientRect().right])]"
    )
    overflow, of_table, images = asked(POLICY.sub("", page), script, tmp_path, width)
    assert overflow == 0
    assert (of_table > 100) if width == 320 else (of_table == 0 or width < 1280)  # a laptop's screen shows all scores
    assert len(images) == 5  # three bands, calibration, rejection
    assert all(natural > 0 and left >= 0 and right <= width for natural, left, right in images)
