"""Bad input is refused with a typed error of one line, which names the argument and what was given."""

import re
from pathlib import Path
from types import ModuleType

import pytest

from pyro_dropout.errors import PyroDropoutError
from tests.bad_input import comparisons, files, guides, mathematics, models, predictions, training
from tests.bad_input.row import Row
from tests.test_public_names import API

TABLES: tuple[ModuleType, ...] = (mathematics, models, guides, training, files, predictions, comparisons)
ROWS = [
    pytest.param(row, id=f"{table.__name__.split('.')[-1]} {k}: {row.argument}")
    for table in TABLES
    for k, row in enumerate(table.ROWS)
]
# What the package makes and users only read; and functions that take nothing.
MADE = {
    "Cascade", "Comparison", "Conformal", "CoverageCurve", "ElboReport", "Evidence", "FleetPrediction",
    "GaussianPosterior", "History", "LOOResult", "Likelihood", "LinearisedPrediction", "Prediction",
    "PredictiveDistance", "Problem", "Reference", "RejectionCurve", "Results", "Reliability", "SBCResult",
    "SitePrediction", "Table", "co2", "missing_references",
}  # fmt: skip


@pytest.mark.usefixtures("unchecked_shapes")
@pytest.mark.parametrize("row", ROWS)
def test_bad_input_is_refused(row: Row, tmp_path: Path) -> None:
    with pytest.raises(PyroDropoutError) as caught:
        row.call(*[tmp_path][: row.call.__code__.co_argcount])
    assert type(caught.value) is row.error
    said, *traced = str(caught.value).splitlines()
    assert not traced or traced[0].startswith("Trace Shapes")  # Pyro may add the shapes of a trace
    assert row.argument in said
    assert row.given in said


def test_every_public_door_is_in_a_table() -> None:
    folder = Path(__file__).parent
    words = {word for path in folder.glob("*.py") for word in re.findall(r"\w+", path.read_text("utf-8"))}
    public = {name.split(".")[-1] for name in API}
    missing = {name for name in public - MADE - words if not name.endswith(("Error", "Warning"))}
    assert not missing, f"tests/bad_input has no row of bad input to {', '.join(sorted(missing))}"
