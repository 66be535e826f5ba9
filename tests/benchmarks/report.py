"""What the measurements are written into: one Markdown page and one JSON file with the same numbers."""

import json
import math
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

Row = dict[str, Any]


@dataclass
class Curve:
    """A quantity against another, both positive.

    Attributes:
        against: what grows, with its unit, for the axis.
        quantity: what is measured, with its unit.
        case: what was held fixed.
        x: the values of the one.
        y: the values of the other.
    """

    against: str
    quantity: str
    case: str
    x: list[float] = field(default_factory=list)
    y: list[float] = field(default_factory=list)

    @property
    def slope(self) -> float:
        """The power with which y grows at the large end: 1 is linear, 0 is flat."""
        points = max(2, math.ceil(len(self.x) / 2))
        if len(self.x) < 2:
            return math.nan
        xs, ys = ([math.log(v) for v in values[-points:]] for values in (self.x, self.y))
        x_mean, y_mean = sum(xs) / points, sum(ys) / points
        spread = sum((x - x_mean) ** 2 for x in xs)
        return sum((x - x_mean) * (y - y_mean) for x, y in zip(xs, ys, strict=True)) / spread


@dataclass
class Section:
    """Measurements of one kind.

    Attributes:
        title: its heading.
        note: what is measured, and how.
        columns: {key of a row: heading of its column}, in order.
        rows: the table.
        absent: {who is not in the table: why not}.
        curves: what grows with what.
        taken: when, and how busy the machine was.
    """

    title: str
    note: str
    columns: dict[str, str] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)
    absent: dict[str, str] = field(default_factory=dict)
    curves: list[Curve] = field(default_factory=list)
    taken: str = ""


def cell(value: Any) -> str:
    """Return a number with three digits, and at least all of those before the point; anything else as it is."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    if isinstance(value, int) or not math.isfinite(value) or value == 0:
        return f"{value}"
    return f"{value:.{max(0, 2 - math.floor(math.log10(abs(value))))}f}"


def table(columns: dict[str, str], rows: list[Row]) -> str:
    """Return rows as a Markdown table, numbers to the right."""
    numeric = {key: bool(rows) and all(isinstance(row[key], int | float) for row in rows) for key in columns}
    lines = [
        "| " + " | ".join(columns.values()) + " |",
        "|" + "|".join("---:" if numeric[key] else "---" for key in columns) + "|",
    ]
    lines += ["| " + " | ".join(cell(row[key]) for key in columns) + " |" for row in rows]
    return "\n".join(lines)


CURVE_COLUMNS = {"quantity": "measured", "against": "against", "case": "case", "values": "values", "slope": "slope"}


def curve_row(curve: Curve) -> Row:
    """Return a curve as a row: its values, and its slope at the large end."""
    values = ", ".join(f"{cell(x)}: {cell(y)}" for x, y in zip(curve.x, curve.y, strict=True))
    return {**asdict(curve), "values": values, "slope": "" if math.isnan(curve.slope) else round(curve.slope, 2)}


def section_text(section: Section) -> str:
    """Return a section as Markdown."""
    parts = [f"### {section.title}", section.note]
    if section.rows:
        parts.append(table(section.columns, section.rows))
    if section.curves:
        parts.append(table(CURVE_COLUMNS, [curve_row(curve) for curve in section.curves]))
    if section.absent:
        left: dict[str, dict[str, list[str]]] = {}  # reason -> contestant -> networks
        for name, why in section.absent.items():
            network, _, who = name.partition(", ") if name[0].isdigit() else ("", "", name)
            left.setdefault(why, {}).setdefault(who, []).append(network)
        lines = [
            f"- {why}: " + "; ".join(who + (f" ({', '.join(on)})" if on[0] else "") for who, on in names.items())
            for why, names in left.items()
        ]
        parts.append("\n".join(["Not in the table:", "", *lines]))
    if section.taken:
        parts.append(f"Taken {section.taken}.")
    return "\n\n".join(parts)


@dataclass
class Report:
    """All measurements of one machine.

    Attributes:
        name: of its files.
        machine: what is known of the machine and its software.
        sections: by name, in the order of the page.
    """

    name: str
    machine: dict[str, str]
    sections: dict[str, Section] = field(default_factory=dict)

    @property
    def curves(self) -> list[Curve]:
        """The curves of all sections."""
        return [curve for section in self.sections.values() for curve in section.curves]

    def markdown(self) -> str:
        """Return the page; it is included into another one, so it starts with a heading of the second rank."""
        parts = [f"## {self.machine.get('gpu') or self.machine.get('cpu', self.name)}"]
        parts.append("\n".join(f"- {key}: {value}" for key, value in self.machine.items()))
        parts += [section_text(section) for section in self.sections.values()]
        if self.curves:
            parts.append(f"![Time and memory against size, one panel for each quantity]({self.name}_growth.png)")
        return "\n\n".join(parts) + "\n"

    def write(self, folder: Path) -> None:
        """Write the page and the numbers; the figure is drawn by who has matplotlib."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{self.name}.md").write_text(self.markdown(), "utf-8")
        (folder / f"{self.name}.json").write_text(
            json.dumps(asdict(self), indent=1, ensure_ascii=False) + "\n", "utf-8"
        )


def read(path: Path) -> Report:
    """Return a report that was written before."""
    found = json.loads(path.read_text("utf-8"))
    sections = {
        key: Section(**{**each, "curves": [Curve(**curve) for curve in each["curves"]]})
        for key, each in found["sections"].items()
    }
    return Report(found["name"], found["machine"], sections)
