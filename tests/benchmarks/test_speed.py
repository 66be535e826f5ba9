"""The benchmark itself: it runs with few steps and nothing compiled, and writes what it has measured."""

from dataclasses import replace

from tests.benchmarks import peers, steps
from tests.benchmarks.ours import GUIDES
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
