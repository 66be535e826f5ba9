"""Bad input is refused with a typed error of one line, which names the argument and what was given."""

import inspect
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

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
    "PredictiveDistance", "RejectionCurve", "Reliability", "SBCResult", "SitePrediction", "co2",
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


def called(function: Any, met: set[str]) -> set[str]:
    """Return ``met`` with the names that a call uses, those of this folder's functions and of closures included."""
    codes = [function.__code__, *(each for each in function.__code__.co_consts if hasattr(each, "co_names"))]
    for name in {name for code in codes for name in code.co_names} - met:
        met.add(name)
        inner = inspect.unwrap(found) if callable(found := function.__globals__.get(name)) else None
        if isinstance(inner, FunctionType) and inner.__module__.startswith(__package__ or ""):
            called(inner, met)
    return met.union(getattr(cell.cell_contents, "__name__", "") for cell in function.__closure__ or ())


def test_every_public_door_has_a_row() -> None:
    met = set[str]().union(*(called(row.call, set()) for table in TABLES for row in table.ROWS))
    public = {name.split(".")[-1] for name in API}
    errors = {name for name in public if name.endswith(("Error", "Warning"))}
    missing = public - errors - MADE - met
    assert not missing, f"tests/bad_input has no row of bad input to {', '.join(sorted(missing))}"
