"""The benchmark itself: it runs with few steps and nothing compiled, and writes what it has measured."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from tests.benchmarks import first_step, fleets, growth, long_run, peers, predictions, speed, steps, trees
from tests.benchmarks.ours import GUIDES, contestants
from tests.benchmarks.report import Curve, Report, Section, cell, read, section_text, table
from tests.benchmarks.settings import Settings
from tests.benchmarks.sizes import SMALL, Size
from tests.benchmarks.timing import Absent, Contestant, Deadline, interleave, median_ratio, reason

TINY = Size("4-5-3", (4, 5, 3), 6, classes=True)


def settings(size: Size = SMALL) -> Settings:
    return Settings(quick=True, compile=False, rounds=2, turn=0.001, sizes=[size])


# --- the sections -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [SMALL, TINY], ids=lambda size: size.name)
def test_steps_are_compared_with_the_baseline(size: Size) -> None:
    *_, section = steps.measure(settings(size))
    baseline, *others = section.rows
    assert baseline["contestant"] == peers.BASELINE
    assert baseline["ratio"] == baseline["median_ratio"] == 1
    assert all(row["us"] > 0 and row["ratio"] > 0 and row["median_ratio"] > 0 for row in section.rows)
    taken = {row["contestant"] for row in others}
    assert {f"pd.fit, {name}" for name, *_ in GUIDES} <= taken
    everyone = {each.name for each in steps.lined_up(size, settings(size), "highest")}
    assert taken | set(section.absent) | {peers.BASELINE} == everyone
    assert set(section.absent.values()) <= {"not installed"}


def test_contestants_can_be_chosen_by_name() -> None:
    chosen = replace(settings(SMALL), who="AutoDropout$|NumPyro")
    names = [each.name for each in steps.lined_up(SMALL, chosen, "highest")]
    assert names[0] == peers.BASELINE
    assert "pd.fit, AutoDropout" in names
    assert all(name.endswith("AutoDropout") or "NumPyro" in name for name in names[1:])


@pytest.mark.deep
def test_sections_are_written_as_they_come(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleets, "counts", lambda settings: [(1, 2), (2, 2)])
    monkeypatch.setattr(predictions, "WIDE", TINY)
    monkeypatch.setattr(first_step, "CHILD", "print('compiling', 0.25)")
    few = [growth.Sweep("hidden layers", "tiny", lambda d: Size("tiny", (4, *[5] * d, 1), 6), [1, 2])]
    monkeypatch.setattr(growth, "sweeps", lambda settings: few)
    monkeypatch.setattr(long_run, "DEEP", Size("tiny", (1, 5, 1), 6))
    monkeypatch.setattr(long_run, "STEPS", {"cpu": 70})
    names = ["fleet", "predict", "compile", "growth", "long"]
    report = speed.run(settings(), names, tmp_path)
    assert list(report.sections) == names
    assert [section.absent for section in report.sections.values()] == [{}] * 5
    assert report.sections["long"].rows[0]["steps"] == 7
    assert [row["nets"] for row in report.sections["fleet"].rows] == [1, 2]
    assert report.sections["predict"].rows[0]["ratio"] == 1
    assert [row["compiling"] for row in report.sections["compile"].rows] == [0.25, 0.25]
    memory = next(curve for curve in report.curves if "memory" in curve.quantity)
    assert abs(memory.slope) < 0.1
    assert read(tmp_path / "cpu.json") == report
    assert (tmp_path / "cpu_growth.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "cpu.md").read_text("utf-8") == report.markdown()

    monkeypatch.setitem(speed.SECTIONS, "growth", lambda settings: iter([Section("Growth", "anew")]))
    again = speed.run(settings(), ["growth"], tmp_path)
    assert again.sections["growth"].note == "anew"
    assert again.sections["fleet"] == report.sections["fleet"]


def test_a_failing_contestant_is_alone_in_it() -> None:
    def broken() -> None:
        raise ValueError("no such thing in /usr/lib/thing.so\nmore")

    here, time_is_up = settings(), settings()
    time_is_up.deadline = Deadline(0.0)
    absent: dict[str, str] = {}
    everyone = [Contestant("base", lambda: (lambda n: None, 1), 0), Contestant("broken", broken)]
    steps.made_ready(everyone, here, 1.0, "net", absent)
    assert [each.name for each in everyone] == ["base"]
    assert absent == {"net, broken": "failed: ValueError: no such thing in thing.so"}
    everyone.append(Contestant("late", lambda: (lambda n: None, 1)))
    steps.made_ready(everyone, time_is_up, 1.0, "net", absent)
    assert [each.name for each in everyone] == ["base"]
    assert absent["net, late"].startswith("left out")
    assert reason(Absent("jax")) == "not installed"


def test_everyone_has_a_turn_in_every_round() -> None:
    order: list[str] = []
    pair = [Contestant(name, lambda name=name: (lambda n: order.append(name), 1)) for name in "ab"]
    for each in pair:
        each.prepare("cpu", 0.0)
    order.clear()
    interleave(pair, 3, "cpu")
    assert order == ["a", "b"] * 3
    pair[0].seconds, pair[1].seconds = [2.0, 9.0, 4.0], [1.0, 3.0, 4.0]
    assert median_ratio(*pair) == 2
    assert pair[0].best == 2e6


@pytest.mark.bench
def test_a_compiled_step_is_not_slower_than_plain_dropout() -> None:
    baseline = peers.contestants(SMALL, "cpu")[0]
    own = contestants(SMALL, "cpu")[0]
    for each in (baseline, own):
        each.prepare("cpu", 0.1)
    interleave([baseline, own], 7, "cpu")
    print(f"{own.name}: {own.best:.0f} µs a step, {median_ratio(own, baseline):.2f} of {baseline.name}")
    assert median_ratio(own, baseline) < 1


# --- the report -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "shown"), [(12345.6, "12346"), (12.345, "12.3"), (0.01234, "0.0123"), (7, "7"), (0.0, "0.0"), ("x", "x")]
)
def test_numbers_have_three_digits(value: object, shown: str) -> None:
    assert cell(value) == shown


@pytest.mark.parametrize("power", [0.0, 1.0, 2.0])
def test_the_slope_is_the_power_at_the_large_end(power: float) -> None:
    x = [1.0, 2.0, 4.0, 8.0]
    curve = Curve("x", "y", "case", x, [50.0, *(v**power for v in x[1:])])
    assert math.isclose(curve.slope, power, abs_tol=1e-12)
    assert math.isnan(Curve("x", "y", "case", [1.0], [1.0]).slope)


def test_page_and_numbers_agree(tmp_path: Path) -> None:
    rows = [{"who": "a", "us": 10.0}, {"who": "b", "us": 2.5}]
    section = Section("Steps", "note", {"who": "who", "us": "µs"}, rows, {"c": "not installed"})
    report = Report("cpu", {"cpu": "a processor"}, {"steps": section})
    report.write(tmp_path)
    page = (tmp_path / "cpu.md").read_text("utf-8")
    lines = [line.strip("| ").split(" | ") for line in page.splitlines() if line.startswith("| ")][1:]
    stored = json.loads((tmp_path / "cpu.json").read_text("utf-8"))["sections"]["steps"]["rows"]
    assert [[who, float(us)] for who, us in lines] == [[row["who"], row["us"]] for row in stored]
    assert table(section.columns, rows) in section_text(section) in page
    assert "- not installed: c" in page
    assert read(tmp_path / "cpu.json") == report


# --- arguments --------------------------------------------------------------------------------------------------------


@pytest.mark.bench
def test_a_dict_costs_hardly_more_than_tensors() -> None:
    ratio, *_ = trees.measure(rounds=60, turn=0.1)
    assert ratio <= 1.05
