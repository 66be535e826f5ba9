"""Looks at the built pages in Chromium: ``python docs/look.py [FOLDER]``, after ``make docs``.

Every page is opened in frames as wide as a phone and as a desk. It prints what reaches beyond a frame, and which
pictures are missing; with a folder, a picture of each page in each frame is written there, to be looked at.
"""

import html
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

PAGES = Path(__file__).parent / "_build" / "html"
WIDTHS = {"phone": 390, "desk": 1440}
HEIGHT = 1600
FRAME = '<body style="margin:0"><iframe style="border:0; width:{width}px; height:{height}px" src="{page}"></iframe>'
LOOK = """<pre id="found"></pre><script>
const found = [], frame = document.querySelector("iframe");
const scrolls = each => {
  for (let up = each.parentElement; up && up.tagName !== "ARTICLE"; up = up.parentElement)
    if (getComputedStyle(up).overflowX !== "visible") return true;
  return false;
};
function look(name) {
  const page = frame.contentDocument, wide = page.documentElement.clientWidth;
  const each = [...page.querySelectorAll("article *")].find(
    each => each.getBoundingClientRect().right > wide + 1 && !scrolls(each));
  if (each) found.push(`${name}: ${each.tagName} "${each.textContent.trim().slice(0, 50)}" is too wide`);
  for (const each of page.images) if (!each.naturalWidth) found.push(`${name}: ${each.src} is missing`);
}
(async () => {
  for (const name of PAGES) {
    await new Promise(done => { frame.onload = done; frame.src = name; });
    await new Promise(done => setTimeout(done, 1500));
    look(name.split("/html/")[1]);
  }
  document.getElementById("found").textContent = JSON.stringify(found);
})();
</script>"""


def chromium(page: str, width: int, *words: str) -> str:
    """What Chromium prints when it shows a page in a window of its own."""
    with tempfile.TemporaryDirectory() as name:
        (Path(name) / "frame.html").write_text(page, "utf-8")
        command = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--allow-file-access-from-files"]
        command += [f"--user-data-dir={name}/profile", f"--window-size={max(width, 500)},{HEIGHT}", *words]
        command += [f"file://{name}/frame.html"]
        return subprocess.run(command, capture_output=True, text=True, timeout=600, check=True).stdout


def main() -> None:
    """Look at each page in each width."""
    folder = Path(sys.argv[1]).resolve() if len(sys.argv) > 1 else None
    pages = sorted(path.resolve() for path in PAGES.rglob("*.html") if "_static" not in path.parts)
    for kind, width in WIDTHS.items():
        frame = FRAME.format(width=width, height=HEIGHT, page="about:blank")
        script = LOOK.replace("PAGES", json.dumps([page.as_uri() for page in pages]))
        shown = chromium(frame + script, width, "--virtual-time-budget=600000", "--dump-dom")
        (text,) = re.findall('<pre id="found">(.*?)</pre>', shown, re.DOTALL)
        found = json.loads(html.unescape(text))
        print(f"{kind}, {width} pixels, {len(pages)} pages:", *(found or ["everything fits"]), sep="\n  ")
        for page in pages if folder else ():
            name = "-".join(page.relative_to(PAGES.resolve()).with_suffix(".png").parts)
            path = folder / f"{kind}-{name}"
            path.parent.mkdir(parents=True, exist_ok=True)
            frame = FRAME.format(width=width, height=HEIGHT, page=page.as_uri())
            chromium(frame, width, "--virtual-time-budget=5000", f"--screenshot={path}")


if __name__ == "__main__":
    main()
