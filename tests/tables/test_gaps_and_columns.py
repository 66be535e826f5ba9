"""Ordinary tables: gaps, identifiers, dates, free text. The first reading succeeds, and says what it did."""

import datetime
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import pyro_dropout as pd
from pyro_dropout.tables.encoding import Encoding
from pyro_dropout.tables.reading import read_inputs, stand_in
from pyro_dropout.tables.table import Table
from tests.cli.command import FEW, read_table, run, succeeded, table_of, written

ROWS = 40
TOWNS = ("north", "south", "east")
RNG = np.random.default_rng(0)


def columns(count: int = ROWS, **more: Any) -> dict[str, list[Any]]:
    """Area and price, with further columns before them."""
    plain = {"area": [50.5 + 3 * k % 17 for k in range(count)], "price": [100 + 7 * k % 31 for k in range(count)]}
    return {name: [None if each == "" else each for each in cells] for name, cells in (more | plain).items()}


def table(found: dict[str, list[Any]], file: str = "houses.csv") -> Table:
    """Cells as they come from a CSV file: texts, or None."""
    cells = {name: [None if each is None else str(each) for each in cells] for name, cells in found.items()}
    return Table(file, cells, list(range(2, 2 + len(found["price"]))))


def read(more: dict[str, list[Any]], count: int = ROWS, **options: Any) -> Any:
    return read_table(table(columns(count, **more)), target="price", **{"held_back": 0.0} | options)


def encoding_of(more: dict[str, list[Any]], count: int = ROWS, **options: Any) -> Encoding:
    found: Encoding = read(more, count, **options).encoding
    return found


def inputs(encoding: Encoding, found: dict[str, list[Any]]) -> tuple[Table, torch.Tensor]:
    return read_inputs(table(found, "new.csv"), encoding)


# --- gaps -------------------------------------------------------------------------------------------------------------


def test_gaps_of_numbers_are_filled_marked_and_counted() -> None:
    sizes = [None if k % 4 == 0 else float(k) for k in range(ROWS)]
    data = read({"size": sizes, "id": ["-", *(7 * k for k in range(1, ROWS))]}, held_back=0.25, seed=3)
    assert "'-'" not in data.note  # in a column that is left out
    assert data.encoding.features == ["size", "size is missing", "area"]
    assert "missing values filled in, with an indicator: size (10)" in data.note
    x = data.train[0]
    gone = x[:, 1] == 1
    assert torch.allclose(x[gone, 0], x[~gone, 0].mean())  # of the training rows alone
    assert set(x[:, 1].tolist()) == {0.0, 1.0}
    assert int(gone.sum()) + int((data.test[0][:, 1] == 1).sum()) == 10
    new, x = inputs(data.encoding, columns(3, size=["", 7, "-"]))
    assert x[:, 1].tolist() == [1.0, 0.0, 1.0]
    assert x[1, 0] == 7
    assert x[0, 0] == x[2, 0] == pytest.approx(data.encoding.inputs[0].fill[0])
    assert new.notes == ("'-' read as missing: size (1)", "missing values filled in, with an indicator: size (2)")


def test_gaps_only_in_new_tables_are_filled_and_counted() -> None:
    encoding = encoding_of({"town": [TOWNS[k % 2] for k in range(ROWS)]})
    assert encoding.features == ["town=north", "town=south", "area"]
    found = columns(3, town=["", "south", "north"])
    found["area"][1] = None
    new, x = inputs(encoding, found)
    assert x[0, :2].tolist() == [0.5, 0.5]  # as often as in training
    assert x[1, 2] == pytest.approx(sum(columns()["area"]) / ROWS)
    assert new.notes == ("missing values filled in: town (1), area (1)",)


def test_rows_without_a_target_are_left_out_and_counted() -> None:
    found = columns()
    found["price"][3] = found["price"][9] = None
    data = read_table(table(found), target="price", held_back=0.0)
    assert len(data.train[0]) == ROWS - 2
    assert f"{ROWS - 2} training rows (2 without 'price' left out)" in data.note
    with pytest.raises(pd.errors.RangeError, match=r"row 5, column 'price': the value is missing.*--missing drop"):
        read_table(table(found), target="price", missing="refuse")
    found["price"] = ["unknown" if price is None else price for price in found["price"]]
    with pytest.raises(
        pd.errors.RangeError, match=r"row 5, column 'price': 'unknown' is not a number"
    ):  # it may be a class
        read_table(table(found), target="price")


@pytest.mark.parametrize("word", ["NA", "unknown"])
def test_noughts_ones_and_a_word_are_numbers_with_gaps(word: str) -> None:
    data = read({"pool": [(0, 1, word)[k % 3] for k in range(ROWS)]})
    assert data.encoding.features == ["pool", "pool is missing", "area"]
    assert data.train[0][:, 0].sort().values[[0, -1]].tolist() == [0, 1]
    assert ("read as missing: pool (13)" in data.note) == (word != "NA")
    _, x = inputs(data.encoding, columns(2, pool=[1, word]))
    assert x[:, 0].tolist() == [1, pytest.approx(0.5, abs=0.02)]
    with pytest.raises(pd.errors.RangeError, match=r"new.csv, row 2, column 'pool': 'maybe' is not a number"):
        inputs(data.encoding, columns(1, pool=["maybe"]))


def test_a_slip_in_a_column_of_numbers_is_still_an_error() -> None:
    sizes: list[Any] = [k + 0.5 for k in range(ROWS)]
    sizes[7] = "12m"
    said = r"houses.csv, row 9, column 'size': '12m' is not a number such as 1234.5, and 39 other"
    with pytest.raises(pd.errors.RangeError, match=said):
        read({"size": sizes})
    tickets = [f"A{k % 4}" if k % 3 else k % 4 for k in range(ROWS)]  # texts, some of which are numbers
    assert len(encoding_of({"ticket": tickets}).inputs[0].categories or ()) == 8


def test_other_columns_tell_thousands_from_decimals() -> None:
    sizes = [f"{k + 1},{200 + k}" for k in range(ROWS)]
    for mark, wanted in ((".", 1200), (",", 1.2)):
        widths = [f"{k}{mark}5" for k in range(ROWS)]
        found = columns(size=sizes, width=widths)
        found["area"] = [k % 7 + 3 for k in range(ROWS)]
        data = read_table(table(found), target="price", held_back=0.0)
        assert data.encoding is not None
        assert inputs(data.encoding, found)[1][0, 0] == pytest.approx(wanted)
        assert "read as numbers: size (" in data.note
    for widths in ([k % 5 for k in range(ROWS)], [f"{k}.5" for k in range(ROWS)]):  # no mark, or both
        found = columns(
            size=sizes, width=widths, depth=[f"{k},5" if widths[0] == "0.5" else k % 3 for k in range(ROWS)]
        )
        found["area"] = [k % 7 + 3 for k in range(ROWS)]
        with pytest.raises(
            pd.errors.RangeError, match=r"column 'size': '1,200' may mean 1200 or 1.2.*--decimal point"
        ) as caught:
            read_table(table(found), target="price")
        assert type(caught.value) is pd.errors.RangeError


CODES = {
    "rooms": RNG.integers(1, 9, 300),
    "ages": RNG.integers(18, 90, 300),
    "heights": RNG.normal(170, 9, 300),
    "incomes": RNG.lognormal(8, 1, 300),
}


@pytest.mark.parametrize("share", [0.02, 0.6])
@pytest.mark.parametrize(
    ("name", "code"), [("rooms", -999), ("rooms", 99), ("ages", -999), ("ages", 9999), ("heights", 0), ("incomes", -1)]
)
def test_a_number_that_may_mean_missing_is_named(name: str, code: float, share: float) -> None:
    values = CODES[name].astype(float)
    values[RNG.choice(300, int(share * 300), replace=False)] = code
    note = read({name: values.tolist()}, 300).note
    assert f"{code} is far from all other values" in note
    assert f"missing): {name} ({int(share * 300)})" in note


ORDINARY = {
    **CODES,
    "rain": np.where(RNG.random(300) < 0.4, 0.0, RNG.gamma(1, 5, 300)),
    "counts": RNG.poisson(2, 300).astype(float),
    "capped": np.minimum(RNG.gamma(2, 10, 300), 40),
    "two groups": np.concatenate([RNG.normal(0, 1, 150), RNG.normal(100, 1, 150)]),
    "one outlier": np.append(CODES["heights"], 9999.0),
    "nothing": np.empty(0),
}


@pytest.mark.parametrize(("zeros", "whole", "said"), [(0.5, False, True), (0.0, False, False), (0.5, True, False)])
def test_a_target_that_is_often_zero_and_never_less_is_named(zeros: float, whole: bool, said: bool) -> None:
    sums = RNG.gamma(2, 40, 300)
    sums = np.where(RNG.random(300) < zeros, 0.0, sums.round() if whole else sums)
    data = read_table(table({"area": RNG.normal(size=300).tolist(), "price": sums.tolist()}), target="price")
    assert ("fit apart whether it is 0" in data.note) == said


@pytest.mark.parametrize("name", ORDINARY)
def test_an_ordinary_column_has_no_such_number(name: str) -> None:
    assert stand_in(ORDINARY[name].astype(float)) is None


# --- categories -------------------------------------------------------------------------------------------------------


def test_rare_and_new_categories_become_other() -> None:
    towns = [TOWNS[k % 3] if k >= 12 else f"village {k // 2}" for k in range(2000)]
    data = read({"town": towns}, 2000)
    assert data.encoding.features[:4] == ["town=east", "town=north", "town=south", "town=(other)"]
    assert "rare in training, read as (other): town (12)" in data.note
    assert int(data.train[0][:, 3].sum()) == 12
    new, x = inputs(data.encoding, columns(3, town=["village 1", "Atlantis", "east"]))
    assert x[:, :4].tolist() == [[0, 0, 0, 1], [0, 0, 0, 1], [1, 0, 0, 0]]
    assert "rare in training, read as (other): town (1)" in new.notes
    assert "not seen in training, read as (other): town (1)" in new.notes
    assert data.encoding.beyond(x, new) == [[], ["town"], []]


def test_held_back_rows_do_not_decide_what_is_known() -> None:
    found = columns(town=[TOWNS[k % 2] for k in range(ROWS)])
    split = read_table(table(found), target="price", held_back=0.25, seed=1)
    order = torch.randperm(ROWS, generator=torch.Generator().manual_seed(1)).tolist()
    found["town"][order[0]] = "Atlantis"  # which is held back
    data = read_table(table(found), target="price", held_back=0.25, seed=1)
    assert data.encoding == split.encoding
    assert torch.equal(data.train[0], split.train[0])
    assert data.test[0][0, 0] == pytest.approx(data.encoding.inputs[0].fill[0])


# --- columns that are left out ----------------------------------------------------------------------------------------

LEFT_OUT: dict[str, tuple[str, list[Any], str]] = {
    "an index": ("n", list(range(ROWS)), "counts the rows; --keep n uses it"),
    "an identifier": ("id", [7919 * k % 1009 for k in range(ROWS)], "an identifier; --keep id uses it"),
    "a number of many words": ("orderNumber", [9 * k % 101 for k in range(ROWS)], "an identifier; --keep orderNumber"),
    "an identifier with gaps": ("ID", ["", *(9 * k % 101 for k in range(1, ROWS))], "an identifier; --keep ID uses it"),
    "codes": ("parcel", [f"{7919 * k % 1009:06}" for k in range(ROWS)], "codes with zeros before them, all different"),
    "names": ("owner", [f"owner {k}" for k in range(ROWS)], "text, all different"),
    "remarks": ("remark", [f"sold {k % 25} times" for k in range(ROWS)], "free text, 25 different values"),
    "a constant": ("country", ["FR"] * ROWS, "constant"),
    "nothing": ("left", [""] * ROWS, "no values"),
    "telephones": ("phone", [f"0{k % 7}/55-{k % 9}" for k in range(ROWS)], "'00/55-0' is a number or a date in an"),
    "other dates": ("sold", [f"0{k % 9 + 1}/03/2024" for k in range(ROWS)], "'01/03/2024' is a number or a date in an"),
    "long numbers": ("serial", [2**60 + k % 9 for k in range(ROWS)], f"'{2**60 + 1}' has more digits than a"),
}  # fmt: skip


@pytest.mark.parametrize("case", LEFT_OUT)
def test_columns_that_cannot_be_used_are_left_out_by_name(case: str) -> None:
    name, cells, why = LEFT_OUT[case]
    data = read({name: cells})
    assert data.encoding.features == ["area"]
    assert f"left out: {name} ({why}" in data.note
    assert data.encoding.left_out == (name,)
    for found in (columns(2, **{name: cells[:2]}), columns(2)):  # there or not, without a word
        del found["price"]
        new, x = inputs(data.encoding, found | {"price": [1, 2]})
        assert (x.shape, new.notes) == ((2, 1), ())


def test_columns_that_can_be_used_are() -> None:
    kept = {
        "weight_id": [k + 0.5 for k in range(ROWS)],  # never a column of fractions
        "day": list(range(ROWS)),  # time
        "paid": [7919 * k % 1009 for k in range(ROWS)],
        "id2": [k % 5 for k in range(ROWS)],  # not all different
        "rank": [7 * k % ROWS for k in range(ROWS)],  # not in the order of the file
        "pool": [None if k % 2 else "yes" for k in range(ROWS)],  # one value, and gaps
    }
    assert [column.name for column in encoding_of(kept).inputs] == [*kept, "area"]
    only = read_table(table({"n": list(range(ROWS)), "price": [k % 7 for k in range(ROWS)]}), target="price")
    assert only.encoding is not None
    assert only.encoding.features == ["n"]  # there is nothing else to predict from


def test_columns_that_are_asked_for_are_kept_or_refused() -> None:
    more = {"id": [k // 2 * 2 + k % 2 for k in range(ROWS)], "owner": [f"owner {k}" for k in range(ROWS)]}
    assert encoding_of(more, keep=["id"]).features == ["id", "area"]
    assert len(encoding_of(more, categorical=["id"]).features) == ROWS + 1
    assert len(encoding_of(more, keep=["owner"]).features) == ROWS + 1
    many = {"owner": [f"owner {k}" for k in range(90)]}
    with pytest.raises(pd.errors.RangeError, match=r"column 'owner': 90 different texts are too many.*--drop owner"):
        read(many, 90, categorical=["owner"])
    with pytest.raises(pd.errors.RangeError, match=r"column 'owner': no category is common enough.*--drop owner"):
        read({"owner": [f"owner {k}" for k in range(500)]}, 500, keep=["owner"])
    with pytest.raises(pd.errors.PyroDropoutError, match=r"the column 'id' cannot be both used and left out"):
        read(more, keep=["id"], drop=["id"])
    with pytest.raises(pd.errors.PyroDropoutError, match=r"houses.csv has no column 'z'"):
        read(more, keep=["z"])
    with pytest.raises(pd.errors.PyroDropoutError, match=r"the column 'price' is the target.*--task classification"):
        read({}, categorical=["price"])


# --- dates ------------------------------------------------------------------------------------------------------------


def days(count: int, step: float) -> list[str]:
    start = datetime.datetime(2020, 1, 1)
    return [f"{start + datetime.timedelta(days=k * step):%Y-%m-%d %H:%M}" for k in range(count)]


@pytest.mark.parametrize(
    ("step", "cycles"),
    [(0.3, ("day",)), (1, ("week",)), (7, ()), (30, ("week", "year")), (36.5, ("day", "week", "year")), (1 / 48, ())],
)
def test_dates_have_the_cycles_that_they_go_through_twice(step: float, cycles: tuple[str, ...]) -> None:
    encoding = encoding_of({"sold": days(ROWS, step)})
    assert encoding.inputs[0].cycles == cycles
    assert len(encoding.features) == 2 + 2 * len(cycles)


@pytest.mark.parametrize("end", ["9999-12-31 23:59:59", "0001-01-01", "1500-06-01"])
def test_dates_of_all_years_are_read_and_those_at_the_end_of_time_named(end: str) -> None:
    found = days(ROWS, 1)
    found[3::9] = [end] * len(found[3::9])
    data = read({"sold": found})
    assert f"{end} is far from all other values (leave such cells empty if it means missing): sold" in data.note
    wanted = (datetime.datetime.fromisoformat(end) - datetime.datetime(1970, 1, 1)) / datetime.timedelta(days=1)
    days_found = data.encoding.inputs[0].numbers(table(columns(4, sold=found[:4])))
    assert days_found.tolist()[3] == pytest.approx(wanted, rel=1e-12)
    assert data.encoding.inputs[0].told(wanted) == end


def test_the_same_day_of_the_week_is_the_same_angle() -> None:
    encoding = encoding_of({"sold": days(ROWS, 1)})
    assert encoding.features[:3] == ["sold", "sold (sine of the week)", "sold (cosine of the week)"]
    _, x = inputs(encoding, columns(9, sold=days(9, 1)))
    assert torch.allclose(x[0, 1:3], x[7, 1:3], atol=1e-5)
    angles = torch.atan2(x[:, 1], x[:, 2])
    assert torch.allclose((angles[1:] - angles[:-1]) % math.tau, torch.tensor(math.tau / 7), atol=1e-4)
    with pytest.raises(
        pd.errors.RangeError, match=r"new.csv, row 2, column 'sold': '31/01/2024' is not a date such as 2024-01"
    ):
        inputs(encoding, columns(1, sold=["31/01/2024"]))


# --- the command line -------------------------------------------------------------------------------------------------


def test_the_first_fit_succeeds_and_predicts_what_it_was_given(tmp_path: Path) -> None:
    lines = [",id,sold,town,size,remark,pool,price"]
    for k in range(60):
        town, size, pool = ("" if k % 9 == 0 else TOWNS[k % 3]), ("-" if k % 7 == 0 else k % 11), k % 2 == 0
        lines.append(f"{k},{900 - 7 * k},2024-01-{k % 28 + 1:02},{town},{size},remark {k},{pool},{100 + k % 13}")
    data = written(tmp_path, "\n".join(lines) + "\n", "houses.csv")
    done = succeeded(
        "fit", data, "--target", "price", "--held-back", 0.2, "--out", tmp_path / "run", "--guide", "dropout", *FEW
    )
    said = " ".join(done.stdout.split())
    assert "left out: unnamed 1 (an identifier; --keep 'unnamed 1' uses it), id (an identifier; --keep id uses" in said
    assert "remark (text, all different)" in said
    assert "'-' read as missing: size (9)" in said
    assert "missing values filled in, with an indicator: town (7), size (9)" in said
    out = tmp_path / "p.csv"
    succeeded("predict", tmp_path / "run", data, "--out", out, "--samples", 5)  # identifiers, remarks and target
    assert len(table_of(out)) == 60
    new = written(tmp_path, "town,size,pool,sold,colour\nAtlantis,,True,2024-01-05,red\n", "new.csv")
    done = succeeded("predict", tmp_path / "run", new, "--out", out, "--samples", 5)
    said = " ".join(done.stdout.split())
    assert "columns that training did not have, ignored: colour" in said
    assert "not seen in training, read as missing: town (1)" in said
    assert table_of(out)[0]["beyond"] == "town"
    assert run("resume", tmp_path / "run", "--quiet").exit_code == 0


def test_rows_with_gaps_are_dropped_or_refused_when_asked() -> None:
    more: dict[str, list[Any]] = {"town": [TOWNS[k % 3] for k in range(ROWS)]}
    more["town"][5] = None
    more["remark"] = [None if k % 2 else f"about {k}" for k in range(ROWS)]  # left out, so that its gaps do not count
    data = read(more, missing="drop")
    assert len(data.train[0]) == ROWS - 1
    assert "(1 with missing values dropped)" in data.note
    with pytest.raises(pd.errors.RangeError, match=r"row 7, column 'town': the value is missing.*--missing drop"):
        read(more, missing="refuse")
