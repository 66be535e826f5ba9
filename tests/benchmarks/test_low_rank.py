"""A step of low rank costs at most three of mean field, as ``pyro-dropout compare`` runs them on a CPU."""

from pathlib import Path

import pytest

from tests.benchmarks.low_rank import AT_MOST, measured, settings, write_table


@pytest.mark.bench
@pytest.mark.parametrize("options", settings(1600), ids=" ".join)
def test_low_rank_costs_three_steps_of_mean_field(options: list[str], tmp_path: Path) -> None:
    file = tmp_path / "table.csv"
    write_table(file, 1600, 13)
    assert measured(file, options, rounds=5, turn=0.5)["ratio"] <= AT_MOST
