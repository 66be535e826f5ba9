"""Numbers that may stand for missing values are named, and ordinary columns are not."""

from pathlib import Path

import numpy as np
import pytest

from pyro_dropout import PyroDropoutError
from pyro_dropout.tables.precision import stand_in
from pyro_dropout.tables.reading import read_table

RNG = np.random.default_rng(0)
COLUMNS = {
    "ages": RNG.integers(18, 90, 300).astype(float),
    "heights": RNG.normal(170, 9, 300),
    "incomes": RNG.lognormal(8, 1, 300).round(),
    "scores": RNG.normal(0, 1, 300),
    "fractions": RNG.beta(2, 5, 300),
}


@pytest.mark.parametrize("share", [0.02, 0.25, 0.6])
@pytest.mark.parametrize(("name", "code"), [
    ("ages", -999), ("ages", 9999), ("ages", 999), ("ages", -1), ("heights", 0), ("heights", -999), ("heights", 99999),
    ("incomes", -999), ("incomes", -1), ("scores", -999), ("scores", 9999), ("fractions", -1), ("fractions", 99),
])  # fmt: skip
def test_a_code_is_found(name: str, code: float, share: float) -> None:
    values = COLUMNS[name].copy()
    chosen = RNG.choice(300, int(share * 300), replace=False)
    values[chosen] = code
    assert stand_in(values) == (code, len(chosen))


ORDINARY = {
    **COLUMNS,
    "rain": np.where(RNG.random(300) < 0.4, 0.0, RNG.gamma(1, 5, 300)),
    "counts": RNG.poisson(2, 300).astype(float),
    "ratings": RNG.integers(1, 6, 300).astype(float),
    "zero or one": RNG.integers(0, 2, 300).astype(float),
    "capped": np.minimum(RNG.gamma(2, 10, 300), 40),
    "two groups": np.concatenate([RNG.normal(0, 1, 150), RNG.normal(100, 1, 150)]),
    "degrees": RNG.normal(0, 8, 300).round(),
    "one outlier": np.append(COLUMNS["heights"], 9999.0),
    "years": RNG.integers(1990, 2024, 300).astype(float),
    "nothing": np.empty(0),
}


@pytest.mark.parametrize("name", ORDINARY)
def test_an_ordinary_column_has_none(name: str) -> None:
    assert stand_in(ORDINARY[name]) is None


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("column", ["age", "income"])
def test_it_is_told(tmp_path: Path, column: str, strict: bool) -> None:
    table = {"age": COLUMNS["ages"].copy(), "income": COLUMNS["incomes"].copy()}
    table[column][:75] = -999
    path = tmp_path / "people.csv"
    rows = zip(*(values.tolist() for values in table.values()), strict=True)
    path.write_text("age,income\n" + "\n".join(f"{a},{b}" for a, b in rows))
    note = read_table(path, strict=strict).note
    assert note.count("is far from all other values") == 1
    assert f"-999 is far from all other values (leave such cells empty if it means missing): {column} (75)" in note


@pytest.mark.parametrize("texts", [["1D3", "2D3", "3.5D3"], ["1.0D+03", "2.5d-2", ".5D0"], ["1D3", "2D4", "5D2"]])
def test_exponents_of_fortran_are_no_unit(tmp_path: Path, texts: list[str]) -> None:
    path = tmp_path / "old.csv"
    path.write_text("flow,y\n" + "".join(f"{texts[k % 3]},{k}.5\n" for k in range(30)))
    with pytest.raises(PyroDropoutError, match=r"D.*looks like a number .* not recognised"):
        read_table(path, strict=True)
    with pytest.raises(PyroDropoutError, match=r"'flow' is left out"):
        read_table(path)


def test_squares_and_cubes_are_units(tmp_path: Path) -> None:
    path = tmp_path / "flats.csv"
    path.write_text("size,y\n" + "".join(f"{k + 20} {unit},{k}.5\n" for k, unit in enumerate(["m2"] * 30)))
    assert "read as numbers: size (m2)" in read_table(path).note
    path.write_text("size,y\n" + "".join(f"{k % 7}Q3,{k}.5\n" for k in range(30)))
    assert "one-hot encoded: size (7)" in read_table(path).note
