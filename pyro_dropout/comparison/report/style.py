"""The style sheet and the script of the page, both inlined."""

import base64
import hashlib

from pyro_dropout.comparison.figure import COLOURS, GREY

_SWATCHES = "\n".join(f".c{k} {{ background: {colour}; }}" for k, colour in enumerate(COLOURS))

STYLE = f"""
:root {{
  color-scheme: light dark;
  --page: #fdfdfc; --ink: #1d2125; --soft: #5a636b; --line: #dfe2e4; --panel: #f4f5f4; --card: #ffffff;
  --accent: #00598c; --mark: #e2eff7; --bad: #a3301f;
}}
@media (prefers-color-scheme: dark) {{
  :root {{
    --page: #15181b; --ink: #e3e6e8; --soft: #9ea7ae; --line: #343a40; --panel: #1d2125; --card: #f3f2ee;
    --accent: #7cc4f0; --mark: #17364a; --bad: #f0907f;
  }}
}}
* {{ box-sizing: border-box; }}
html {{ -webkit-text-size-adjust: 100%; }}
body {{
  margin: 0; background: var(--page); color: var(--ink); font: 1rem/1.55 system-ui, -apple-system, "Segoe UI",
  "Noto Sans", sans-serif; overflow-wrap: break-word;
}}
main, header, footer {{ max-width: 64rem; margin: 0 auto; padding: 0 1.25rem; }}
header {{ padding-top: 2.75rem; }}
footer {{ padding-top: 1rem; padding-bottom: 3rem; color: var(--soft); font-size: 0.85rem; }}
h1 {{ font-size: 1.85rem; line-height: 1.2; margin: 0 0 0.5rem; font-weight: 650; letter-spacing: -0.01em; }}
h2 {{
  font-size: 1.25rem; line-height: 1.3; margin: 2.75rem 0 0.75rem; padding-top: 1.1rem; font-weight: 650;
  border-top: 1px solid var(--line);
}}
h3 {{ font-size: 1rem; margin: 1.5rem 0 0.4rem; font-weight: 650; }}
p, ul, dl.meanings {{ max-width: 46rem; }}
p {{ margin: 0.6rem 0; }}
.lead {{ color: var(--soft); margin: 0.2rem 0; }}
ul {{ padding-left: 1.2rem; margin: 0.5rem 0; }}
li {{ margin: 0.3rem 0; }}
li::marker {{ color: var(--soft); }}
.failed {{ color: var(--bad); }}
nav {{ margin-top: 1rem; font-size: 0.9rem; }}
nav a {{ color: var(--accent); margin-right: 1.1rem; text-decoration: none; display: inline-block; }}
nav a:hover, nav a:focus-visible {{ text-decoration: underline; }}
:focus-visible {{ outline: 2px solid var(--accent); outline-offset: 2px; }}
.dot {{ display: inline-block; width: 0.6em; height: 0.6em; border-radius: 50%; margin-right: 0.5em; }}
{_SWATCHES}
.reference {{ background: {GREY}; }}
.scroll {{
  position: relative; overflow-x: auto; border: 1px solid var(--line); border-radius: 6px; margin: 0.75rem 0;
}}
table {{ border-collapse: collapse; font-size: 0.9rem; font-variant-numeric: tabular-nums; line-height: 1.35; }}
.scroll table {{ min-width: 100%; }}
th, td {{ padding: 0.45rem 0.8rem; text-align: right; vertical-align: top; border-bottom: 1px solid var(--line); }}
tbody tr:last-child > * {{ border-bottom: 0; }}
thead th {{ vertical-align: bottom; font-weight: 600; white-space: nowrap; }}
thead .group th {{
  color: var(--soft); font-weight: 500; font-size: 0.8rem; text-align: left; border-bottom: 0; padding-bottom: 0;
}}
thead .group td {{ border-bottom: 0; }}
tbody th {{ text-align: left; font-weight: 600; white-space: nowrap; }}
.first {{ border-left: 1px solid var(--line); }}
.scores tbody th, .scores thead .name {{
  position: sticky; left: 0; background: var(--page); z-index: 1; text-align: left;
}}
.scores td {{ white-space: nowrap; }}
.layers .guide > * {{ background: var(--panel); }}
.layers .layer th {{ font-weight: 400; padding-left: 2rem; }}
.layers .name {{ text-align: left; }}
.error {{ display: block; color: var(--soft); font-size: 0.8em; }}
.best {{ background: var(--mark); font-weight: 700; color: var(--accent); }}
.best .error {{ font-weight: 400; }}
.none {{ color: var(--soft); font-size: 0.85em; }}
td.words, th.words {{ text-align: left; white-space: normal; min-width: 14rem; }}
th button {{
  all: unset; cursor: pointer; font: inherit; color: inherit; display: inline-flex; gap: 0.35em; align-items: baseline;
}}
th button:hover {{ color: var(--accent); }}
th button:focus-visible {{ outline: 2px solid var(--accent); outline-offset: 3px; border-radius: 2px; }}
th button::after {{ content: "↕"; color: var(--soft); opacity: 0.55; font-weight: 400; }}
th[aria-sort="ascending"] button::after {{ content: "↑"; opacity: 1; color: var(--accent); }}
th[aria-sort="descending"] button::after {{ content: "↓"; opacity: 1; color: var(--accent); }}
.hidden {{ position: absolute; width: 1px; height: 1px; overflow: hidden; clip-path: inset(50%); white-space: nowrap; }}
.figures {{ display: grid; gap: 1rem; grid-template-columns: repeat(auto-fit, minmax(min(100%, 26rem), 1fr)); }}
figure {{ margin: 0.75rem 0; min-width: 0; max-width: 46rem; }}
.figures figure {{ margin: 0; }}
figure img {{
  display: block; width: 100%; height: auto; background: var(--card); border: 1px solid var(--line);
  border-radius: 6px; padding: 0.4rem;
}}
figcaption {{ color: var(--soft); font-size: 0.85rem; margin-top: 0.4rem; }}
dl.facts {{ display: grid; grid-template-columns: max-content minmax(0, 1fr); gap: 0.3rem 1.25rem; margin: 0.75rem 0; }}
dl.facts dt {{ color: var(--soft); }}
dl.facts dd {{ margin: 0; }}
dl.meanings dt {{ font-weight: 600; margin-top: 0.6rem; }}
dl.meanings dd {{ margin: 0; color: var(--soft); }}
pre {{
  background: var(--panel); border: 1px solid var(--line); border-radius: 6px; padding: 0.8rem 1rem; overflow-x: auto;
  font: 0.85rem/1.5 ui-monospace, "SF Mono", Menlo, Consolas, monospace; margin: 0.75rem 0;
}}
summary {{ cursor: pointer; color: var(--accent); }}
@media (max-width: 40rem) {{
  header {{ padding-top: 1.5rem; }}
  main, header, footer {{ padding-left: 1rem; padding-right: 1rem; }}
  h1 {{ font-size: 1.45rem; }}
  th, td {{ padding: 0.4rem 0.6rem; }}
  .scores tbody th, .layers tbody th {{ white-space: normal; max-width: 8.5rem; }}
  .layers .layer th {{ padding-left: 1.2rem; }}
  dl.facts {{ grid-template-columns: minmax(0, 1fr); gap: 0; }}
  dl.facts dt {{ margin-top: 0.5rem; }}
}}
@media print {{
  :root {{
    color-scheme: light; --page: #fff; --ink: #000; --soft: #444; --line: #bbb; --panel: #fff; --card: #fff;
    --accent: #000; --mark: #fff; --bad: #000;
  }}
  @page {{ margin: 15mm; }}
  @page wide {{ size: landscape; margin: 15mm; }}
  #scores {{ page: wide; }}
  body {{ font-size: 9.5pt; }}
  main, header, footer {{ max-width: none; padding: 0; }}
  nav, th button::after, .hidden {{ display: none; }}
  h2, h3 {{ break-after: avoid; }}
  figure, tr, li, dl.meanings dd {{ break-inside: avoid; }}
  .figures {{ grid-template-columns: 1fr 1fr; }}
  .scroll {{ overflow: visible; border: 0; }}
  figure img {{ border: 0; padding: 0; }}
  table {{ font-size: 8pt; }}
  .scores {{ font-size: 7.5pt; }}
  .scores th, .scores td {{ padding: 2pt 3pt; }}
  .scores thead th, .scores tbody th {{ white-space: normal; position: static; }}
  .scores thead .group th {{ font-size: 7pt; }}
  .scores td.none {{ white-space: normal; }}
  .best {{ outline: 0.75pt solid #000; outline-offset: -1pt; }}
  dl.meanings {{ columns: 2; max-width: none; }}
  dl.meanings dt {{ break-after: avoid; }}
  details::details-content {{ content-visibility: visible; height: auto; }}
  summary {{ list-style: none; color: inherit; font-weight: 600; }}
  pre {{ white-space: pre-wrap; }}
}}
"""

# Without JavaScript this is a plain table. With it the headings become buttons that sort the table and work with the
# keyboard.
SCRIPT = """
"use strict";
for (const table of document.querySelectorAll("table.sortable")) {
  const body = table.tBodies[0];
  const status = table.parentElement.parentElement.querySelector("[role=status]");
  const worth = (row, place) => {
    const cell = row.cells[place];
    if (cell.dataset.value === undefined) return place === 0 ? cell.textContent.trim() : null;
    return Number(cell.dataset.value);
  };
  const order = (a, b) => typeof a === "string" ? a.localeCompare(b) : a - b;
  table.querySelectorAll("thead tr:last-child th").forEach((heading, place) => {
    const button = document.createElement("button");
    button.type = "button";
    button.append(...heading.childNodes);
    heading.append(button);
    button.addEventListener("click", () => {
      const before = heading.getAttribute("aria-sort");
      const first = heading.dataset.first || "ascending";
      const other = first === "ascending" ? "descending" : "ascending";
      const now = before === first ? other : first;
      table.querySelectorAll("[aria-sort]").forEach((each) => each.removeAttribute("aria-sort"));
      heading.setAttribute("aria-sort", now);
      const rows = [...body.rows].map((row) => [worth(row, place), row]);
      const known = rows.filter(([value]) => value !== null);
      known.sort(([a], [b]) => now === "ascending" ? order(a, b) : order(b, a));
      body.append(...known.map(([, row]) => row), ...rows.filter(([value]) => value === null).map(([, row]) => row));
      status.textContent = `Sorted by ${button.textContent}, ${now}.`;
    });
  });
}
"""


def policy() -> str:
    """Return the content security policy: embedded images, this style and this script, and nothing else."""
    style, script = (base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in (STYLE, SCRIPT))
    return f"default-src 'none'; img-src data:; style-src 'sha256-{style}'; script-src 'sha256-{script}'"
