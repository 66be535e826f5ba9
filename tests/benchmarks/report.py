"""What the measurements are written into: one Markdown page, one JSON file with the same numbers, and a picture."""

import datetime
import importlib.metadata
import json
import math
import os
import platform
import re
import subprocess
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

Row = dict[str, Any]
Task = tuple[str, Callable[[], list[Row]]]  # a name, and what measures some rows
CURVE_COLUMNS = {"quantity": "measured", "against": "against", "case": "case", "values": "values", "slope": "slope"}
BLUE, VERMILION = "#0072B2", "#D55E00"  # of Okabe and Ito's palette
PACKAGES = {"torch": "torch", "pyro": "pyro-ppl", "jax": "jax", "numpyro": "numpyro"}
PANELS = 4  # in a line of the picture


def curve(against: str, quantity: str, case: str, x: Sequence[float], y: Sequence[float]) -> Row:
    """Return one quantity against another, both positive, as a row: its values, and the power with which it grows.

    The slope is that of log y against log x over the upper half: 1 is linear, 0 is flat.
    """
    upper = slice(-max(2, math.ceil(len(x) / 2)), None)
    slope = float(np.polyfit(np.log(x[upper]), np.log(y[upper]), 1)[0])
    values = ", ".join(f"{cell(a)}: {cell(b)}" for a, b in zip(x, y, strict=True))
    told = {"against": against, "quantity": quantity, "case": case, "values": values, "slope": round(slope, 2)}
    return {**told, "x": list(x), "y": list(y)}


@dataclass
class Section:
    """Measurements of one kind.

    Attributes:
        title: its heading.
        note: what is measured, and how.
        columns: {key of a row: heading of its column}, in order.
        rows: the table, and curves.
        absent: {who is not in the table: why not}.
        taken: when, and how busy the machine was.
    """

    title: str
    note: str
    columns: dict[str, str] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)
    absent: dict[str, str] = field(default_factory=dict)
    taken: str = ""

    def markdown(self) -> str:
        """Return the section as Markdown."""
        parts = [f"### {self.title}", self.note]
        rows, curves = ([row for row in self.rows if ("x" in row) == curved] for curved in (False, True))
        of = [key for key in ("size", "precision") if "size" in self.columns and key in self.columns]
        for group in dict.fromkeys(tuple(row[key] for key in of) for row in rows):  # one table for each network
            own = [row for row in rows if tuple(row[key] for key in of) == group]
            parts += [f"**{', '.join(group)}**"] if group else []
            parts.append(table({key: title for key, title in self.columns.items() if key not in of}, own))
        shown = [[row[key] for row in rows] for key in self.columns]
        parts += [f"{row['quantity']}: slope {cell(row['slope'])}." for row in curves if row["y"] in shown]
        curves = [row for row in curves if row["y"] not in shown]  # the table has the others' values
        parts += [table(CURVE_COLUMNS, curves)] if curves else []
        if self.absent:
            by_reason: dict[str, list[str]] = {}
            for who, why in self.absent.items():
                by_reason.setdefault(why, []).append(who)
            few = {why: "; ".join(names) for why, names in by_reason.items() if len(names) <= 3}
            lines = [
                f"- {why}: {few.get(why, f'{len(names)} rows, by name in the JSON file')}"
                for why, names in by_reason.items()
            ]
            parts.append("\n".join(["Not in the table:", "", *lines]))
        return "\n\n".join([*parts, *([f"Taken {self.taken}."] if self.taken else [])])


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
    def curves(self) -> Iterator[Row]:
        """The curves of all sections."""
        return (row for section in self.sections.values() for row in section.rows if "x" in row)

    def markdown(self) -> str:
        """Return the page; it is included into another one, so it starts with a heading of the second rank."""
        title = self.machine.get("gpu") or self.machine.get("cpu", self.name)
        about = ", ".join(f"{key} {value}" for key, value in self.machine.items() if value != title)
        parts = [f"## {title}", f"{about}."]
        parts += [section.markdown() for section in self.sections.values()]
        if any(self.curves):
            parts.append(f"![Time and memory against size, one panel for each quantity]({self.name}_growth.png)")
        return "\n\n".join(parts) + "\n"

    def write(self, folder: Path) -> None:
        """Write page, numbers and picture."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{self.name}.md").write_text(self.markdown(), "utf-8")
        told = json.dumps(asdict(self), indent=1, ensure_ascii=False)
        (folder / f"{self.name}.json").write_text(told + "\n", "utf-8")
        if any(self.curves):
            draw(list(self.curves), folder / f"{self.name}_growth.png")


def read(path: Path) -> Report:
    """Return a report that was written before."""
    found = json.loads(path.read_text("utf-8"))
    return Report(found["name"], found["machine"], {key: Section(**each) for key, each in found["sections"].items()})


def draw(curves: list[Row], path: Path) -> None:
    """Draw one panel for each curve, with a line of slope 1 through its last point to compare with."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator

    rows, across = -(-len(curves) // PANELS), min(PANELS, len(curves))
    figure = Figure(figsize=(2.9 * across, 2.7 * rows + 0.3), layout="constrained")
    for each, axes in zip(curves, figure.subplots(rows, across, squeeze=False).flat, strict=False):
        x, y = each["x"], each["y"]
        axes.plot(x, [y[-1] * a / x[-1] for a in x], "--", color=VERMILION, lw=1, label="slope 1")
        axes.plot(x, y, "o-", color=BLUE, lw=1.8, ms=4, label="measured")
        axes.set(xscale="log", yscale="log", xlabel=each["against"], ylabel=each["quantity"])
        axes.set_xticks(x, [f"{a:g}" for a in x])
        axes.minorticks_off()
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.set_ylim(min(y) / 2, max(y) * 2)
        axes.set_title(f"{each['case']}\nslope {each['slope']:.2f} at the large end", fontsize=8)
        axes.tick_params(labelsize=8)
        axes.grid(alpha=0.25)
    for axes in list(figure.axes)[len(curves) :]:
        axes.set_axis_off()
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=2, frameon=False)
    figure.savefig(path, dpi=120)


def cpu_model() -> str:
    """Return the processor's name, as far as the system tells."""
    try:
        shown = subprocess.run(["lscpu"], capture_output=True, text=True, env={**os.environ, "LC_ALL": "C"}).stdout
    except OSError:
        shown = ""
    found = re.search(r"^Model name:\s*(\S.*)$", shown, re.MULTILINE)
    return found[1].strip() if found else platform.processor() or platform.machine()


def described(device: str, precisions: list[str]) -> dict[str, str]:
    """Return the head of a report."""
    installed = {each.name: each.version for each in importlib.metadata.distributions()}
    return {
        "cpu": f"{cpu_model()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads used",
        **({"gpu": torch.cuda.get_device_name()} if device == "cuda" else {}),
        "python": platform.python_version(),
        **{name: installed.get(package, "not installed") for name, package in PACKAGES.items()},
        "matrix products": " and ".join({"high": "TF32", "highest": "fp32"}[p] for p in precisions),
    }


def file_name(device: str) -> str:
    """Return a short name for this machine: ``cpu``, or the last word of its GPU's name."""
    if device == "cpu":
        return "cpu"
    words = re.findall(r"[a-z0-9]+", torch.cuda.get_device_name().lower())
    return next((word for word in words if any(letter.isdigit() for letter in word)), "cuda")


def moment() -> str:
    """Return the date and how busy the machine is, to know what to think of a number."""
    now = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")
    load = f", load average {os.getloadavg()[0]:.2f} before it began" if hasattr(os, "getloadavg") else ""
    return f"on {now}{load}"
