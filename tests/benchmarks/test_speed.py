"""The benchmark of steps: it runs with few steps and nothing compiled."""

from unittest import mock

import pytest

from tests.benchmarks import peers, steps
from tests.benchmarks.figures import Asked
from tests.benchmarks.ours import GUIDES
from tests.benchmarks.sizes import SMALL, Size


def test_steps_are_compared_with_the_baseline(capsys: pytest.CaptureFixture[str]) -> None:
    tiny, asked = Size("4-5-3", (4, 5, 3), 6, classes=True), Asked(quick=True, rounds=2)
    with mock.patch.object(steps, "SMALL", tiny):
        found = {each.what: each.value for each in steps.steps(asked)}
    base = f"4-5-3, batch 6, fp32, {peers.BASELINE}"
    assert found[f"{base}, over the baseline"] == found[f"{base}, over the baseline, the median of the rounds"] == 1
    assert all(value > 0 for value in found.values())
    assert {f"4-5-3, batch 6, fp32, fit, {name}" for name, *_ in GUIDES} <= found.keys()
    assert all("not installed" in line for line in capsys.readouterr().out.splitlines())
    names = [each.name for each in steps.lined_up(SMALL, Asked(quick=True, who="AutoDropout$"), "highest")]
    assert names[0] == peers.BASELINE
    assert len(names) > 1
    assert all(name.endswith("AutoDropout") for name in names[1:])
