"""The tables of bad input taken together: no public door is left out."""

from tests.bad_input import (
    test_comparisons,
    test_files,
    test_guides,
    test_mathematics,
    test_models,
    test_predictions,
    test_training,
)
from tests.bad_input.row import names
from tests.test_public_names import API

TABLES = (test_mathematics, test_models, test_guides, test_training, test_files, test_predictions, test_comparisons)
# What the package makes and users only read; and functions that take nothing.
MADE = {
    "Cascade", "Comparison", "CoverageCurve", "ElboReport", "Evidence", "FleetPrediction", "GaussianPosterior",
    "History", "LOOResult", "Likelihood", "PredictiveDistance", "RejectionCurve", "Reliability", "SBCResult", "co2",
}  # fmt: skip


def test_each_row_has_a_name_of_its_own() -> None:
    assert all(len(set(names(table.ROWS))) == len(table.ROWS) for table in TABLES)


def test_every_public_door_has_a_row() -> None:
    met = {row.door.split(".")[0] for table in TABLES for row in table.ROWS}
    public = {name.split(".")[-1] for name in API}
    errors = {name for name in public if name.endswith(("Error", "Warning"))}
    missing = public - errors - MADE - met
    assert not missing, f"tests/bad_input has no row of bad input to {', '.join(sorted(missing))}"
