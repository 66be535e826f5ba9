// Without JavaScript this is a plain table. With it the headings become buttons that sort the table and work with the
// keyboard.
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
