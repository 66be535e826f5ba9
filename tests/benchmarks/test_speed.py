"""The benchmark itself: it runs with few steps and nothing compiled, and writes what it has measured."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.benchmarks import first_step, fleets, growth, peers, predictions, speed, steps
from tests.benchmarks.ours import GUIDES
from tests.benchmarks.report import Section, Task, read
from tests.benchmarks.sizes import SMALL, Size
from tests.benchmarks.timing import Settings

TINY = Size("4-5-3", (4, 5, 3), 6, classes=True)
SETTINGS = Settings(quick=True, compile=False, rounds=2, turn=0.001, sizes=[TINY])


def test_steps_are_compared_with_the_baseline() -> None:
    section, tasks = steps.section(SETTINGS)
    rows = [row for _, task in tasks for row in task()]
    assert rows[0]["contestant"] == peers.BASELINE
    assert rows[0]["ratio"] == rows[0]["median_ratio"] == 1
    assert all(row["us"] > 0 and row["ratio"] > 0 and row["median_ratio"] > 0 for row in rows)
    assert {f"fit, {name}" for name, *_ in GUIDES} <= {row["contestant"] for row in rows}
    assert set(section.absent.values()) <= {"not installed"}
    names = [each.name for each in steps.lined_up(SMALL, replace(SETTINGS, who="AutoDropout$"), "highest")]
    assert names[0] == peers.BASELINE
    assert len(names) > 1
    assert all(name.endswith("AutoDropout") for name in names[1:])


@pytest.mark.deep
def test_sections_are_written_as_they_come(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleets, "counts", lambda settings: [(1, 2), (2, 2)])
    monkeypatch.setattr(predictions, "WIDE", TINY)
    monkeypatch.setattr(first_step, "CHILD", "print('compiling', 0.25)")
    tiny = ("hidden layers", "tiny", lambda d: Size("tiny", (4, *[5] * d, 1), 6), [1, 2])
    monkeypatch.setattr(growth, "sweeps", lambda settings: [tiny])
    monkeypatch.setattr(growth, "DEEP", Size("tiny", (1, 5, 1), 6))
    monkeypatch.setattr(growth, "LONG", {"cpu": 70})
    names = ["fleet", "predict", "compile", "growth", "long"]
    report = speed.run(SETTINGS, names, tmp_path)
    assert list(report.sections) == names
    assert [section.absent for section in report.sections.values()] == [{}] * 5
    assert [row["nets"] for row in report.sections["fleet"].rows if "x" not in row] == [1, 2]
    assert [row["compiling"] for row in report.sections["compile"].rows] == [0.25, 0.25]
    assert report.sections["long"].rows[0]["steps"] == 7
    assert abs(next(row["slope"] for row in report.curves if "memory" in row["quantity"])) < 0.1
    assert read(tmp_path / "cpu.json") == report
    assert (tmp_path / "cpu_growth.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "cpu.md").read_text("utf-8") == report.markdown()

    def anew(settings: Settings) -> tuple[Section, Iterator[Task]]:
        def broken() -> list[dict[str, object]]:
            raise ValueError("no such thing in /usr/lib/thing.so\nmore")

        return Section("Growth", "anew", {"who": "who"}), iter([("broken", broken), ("a", lambda: [{"who": "a"}])])

    monkeypatch.setitem(speed.SECTIONS, "growth", anew)
    again = speed.run(SETTINGS, ["growth"], tmp_path).sections
    assert again["growth"].absent == {"broken": "failed: ValueError: no such thing in thing.so"}
    assert "| a |" in again["growth"].markdown()
    assert again["fleet"] == report.sections["fleet"]
