"""Tables from files: what is read, how columns become numbers, and what is done about values that are missing."""

import dataclasses
import functools
import json
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import pyro_dropout as pd
from pyro_dropout.tables import reading
from pyro_dropout.tables.cells import as_label, as_number
from pyro_dropout.tables.column import Column
from pyro_dropout.tables.encoding import Encoding
from pyro_dropout.tables.files import read_file
from pyro_dropout.tables.reading import read_input_pieces
from pyro_dropout.tables.table import Table

read_table = functools.partial(reading.read_table, strict=True)
COLOURS = ("red", "blue", "green")


def written(folder: Path, text: str, name: str = "table.csv") -> Path:
    path = folder / name
    path.write_text(text, "utf-8")
    return path


def rows(count: int = 12, gap: str = "") -> str:
    """A table of size, colour and price, in which the fourth row may have a gap in one column."""
    lines = ["size,colour,price"]
    for k in range(count):
        cells = {"size": f"{k}.5", "colour": COLOURS[k % 3], "price": f"{3 * k + k % 3}"}
        if k == 3 and gap:
            cells[gap] = ""
        lines.append(",".join(cells.values()))
    return "\n".join(lines) + "\n"


def read_inputs(path: Path, encoding: Encoding, **options: bool) -> tuple[Table, torch.Tensor]:
    (piece,) = read_input_pieces(path, encoding, None, **options)
    return piece


# --- files ------------------------------------------------------------------------------------------------------------


def test_comments_blank_lines_and_quotes_do_not_shift_rows(tmp_path: Path) -> None:
    text = '\ufeff# a comment\na, b\n\n1,"x, y"\n2,"two\nlines"\n# 3,\n'
    table = read_file(written(tmp_path, text))
    assert table.columns == {"a": ["1", "2", "# 3"], "b": ["x, y", "two\nlines", None]}
    assert table.rows == [4, 6, 7]  # a record over two lines is where it ends
    assert table.where(2, "b") == "table.csv, row 7, column 'b'"


def test_parquet_has_nulls_booleans_and_types_that_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "table.parquet"
    columns = {"a": [1, None, 3], "b": [float("nan"), 2.0, 3.0], "c": [True, None, False], "d": [None, None, None]}
    pyarrow.parquet.write_table(pyarrow.table(columns), path)
    assert read_file(path).columns == {
        "a": [1, None, 3],
        "b": [None, 2.0, 3.0],
        "c": ["true", None, "false"],
        "d": [None, None, None],
    }
    when = pyarrow.array(range(12), pyarrow.time32("s"))
    nest = [{"x": k} for k in range(12)]
    numbers = {"a": range(12), "b": range(1, 13)}
    pyarrow.parquet.write_table(pyarrow.table({**numbers, "when": when, "nest": nest}), path)
    assert list(read_file(path).columns) == ["a", "b"]
    with pytest.raises(pd.RangeError, match=r"column 'when': its type is time32.* leave it out \(--drop\)"):
        read_table(path, target="b")
    with pytest.raises(pd.RangeError, match=r"column 'nest': its type is struct"):
        read_table(path, target="b", drop=("when",))
    with pytest.raises(pd.RangeError, match=r"column 'when': its type is time32"):
        read_table(path, target="when", drop=("nest",))
    encoding = read_table(path, target="b", drop=("when", "nest")).encoding
    assert encoding is not None
    with pytest.raises(pd.PyroDropoutError, match=r"the column 'when' was not in the training data"):
        read_inputs(path, encoding)
    assert read_inputs(path, encoding, ignore_extra=True)[1].shape == (12, 1)
    pyarrow.parquet.write_table(pyarrow.table({"b": numbers["b"], "a": when}), path)
    with pytest.raises(pd.RangeError, match=r"column 'a': its type is time32"):
        read_inputs(path, encoding)


# --- encoding ---------------------------------------------------------------------------------------------------------


def test_columns_become_numbers(tmp_path: Path) -> None:
    path = written(tmp_path, rows(12))
    table, encoding = read_file(path).only(range(4)), read_table(path, target="price").encoding
    assert encoding is not None
    assert encoding.features == ["size", "colour=blue", "colour=green", "colour=red"]
    assert encoding.inputs_of(table).tolist() == [
        [0.5, 0.0, 0.0, 1.0],
        [1.5, 1.0, 0.0, 0.0],
        [2.5, 0.0, 1.0, 0.0],
        [3.5, 0.0, 0.0, 1.0],
    ]
    assert encoding.targets_of(table).tolist() == [[0.0], [4.0], [8.0], [9.0]]
    assert encoding.remarks == ["one-hot encoded: colour (3)", "'price' is read as a number"]


@pytest.mark.parametrize(
    ("values", "task", "classes"),
    [
        (["no", "yes"], "auto", ("no", "yes")),
        (["0", "1"], "auto", ("0", "1")),
        (["0", "1"], "regression", ()),
        (["0.0", "1.0"], "auto", ("0", "1")),
        (["1", "2"], "auto", ()),
        (["10", "9", "2"], "classification", ("2", "9", "10")),  # numbers in their own order
        (["3.5", "4"], "auto", ()),
    ],
)
def test_a_target_is_a_class_or_a_number(values: list[str], task: str, classes: tuple[str, ...]) -> None:
    cells = [values[k % len(values)] for k in range(12)]
    table = Table("t.csv", {"x": ["1"] * 12, "y": list(cells)}, list(range(2, 14)))
    encoding = read_table(table, target="y", task=task, held_back=0.0).encoding  # type: ignore[arg-type]
    assert encoding is not None
    assert encoding.classes == classes
    y = encoding.targets_of(table)
    if classes:
        assert [float(classes[k]) if classes[k].isdigit() else classes[k] for k in y.tolist()] == [
            float(cell) if as_number(cell) is not None else cell for cell in cells
        ]
        assert y.dtype == torch.long
    else:
        assert y.squeeze(-1).tolist() == [float(cell) for cell in cells]


def test_numbers_can_be_categories_and_columns_left_out(tmp_path: Path) -> None:
    path = written(tmp_path, "postcode,name,y\n" + "".join(f"{k % 2}70,n{k},{k}\n" for k in range(60)))
    with pytest.raises(pd.RangeError, match=r"column 'name': 60 different texts are too many .*--drop name"):
        read_table(path)
    data = read_table(path, categorical=["postcode"], drop=["name"])
    assert data.encoding is not None
    assert data.encoding.features == ["postcode=070", "postcode=170"]


@given(
    names=st.lists(st.text(min_size=1, max_size=6).filter("target".__ne__), min_size=1, max_size=4, unique=True),
    labels=st.lists(st.text(min_size=1, max_size=6).map(as_label), min_size=1, max_size=4, unique=True),
    fill=st.floats(allow_nan=False, allow_infinity=False),
)
def test_an_encoding_survives_json(names: list[str], labels: list[str], fill: float) -> None:
    inputs = tuple(Column(name, tuple(labels) if k % 2 else None) for k, name in enumerate(names))
    made = Encoding(inputs, "target", tuple(labels))
    count = len(made.features)
    made = Encoding(inputs, "target", tuple(labels), (fill,) * count, ((fill, fill + 1),) * count)
    assert Encoding.from_json(json.loads(json.dumps(made.as_json()))) == made


def test_what_lies_beyond_the_training_rows_is_named(tmp_path: Path) -> None:
    data = read_table(written(tmp_path, rows()), target="price", held_back=0.25, seed=1)
    assert data.encoding is not None
    x = data.train[0]
    names = data.encoding.features
    assert data.encoding.beyond(x) == [[] for _ in x]
    far = x[:2].clone()
    far[0, names.index("size")] = x[:, names.index("size")].max() + 0.5
    far[1, :] = x.amin(0) - 1
    assert data.encoding.beyond(far) == [["size"], names]
    assert dataclasses.replace(data.encoding, ranges=None).beyond(far) == [[], []]  # a run of long ago


# --- missing values and the split -------------------------------------------------------------------------------------


@pytest.mark.parametrize("gap", ["size", "colour", "price"])
def test_missing_values_are_refused_with_their_place(tmp_path: Path, gap: str) -> None:
    with pytest.raises(pd.RangeError, match=rf"table.csv, row 5, column '{gap}': the value is missing.*--missing drop"):
        read_table(written(tmp_path, rows(gap=gap)))


def test_rows_with_gaps_are_left_out(tmp_path: Path) -> None:
    data = read_table(written(tmp_path, rows(gap="price")), missing="drop", held_back=0.0)
    assert len(data.train[0]) == 11
    assert 3.5 not in data.train[0][:, 0]
    assert "(1 with missing values dropped)" in data.note
    only = read_table(written(tmp_path, rows(gap="size")), missing="refuse", drop=["size"], held_back=0.0)
    assert len(only.train[0]) == 12  # a gap in a column that is not used is no gap


def test_gaps_are_filled_with_means_of_the_training_rows(tmp_path: Path) -> None:
    whole = read_table(written(tmp_path, rows(40)), seed=1)
    for gap, columns in (("size", [0]), ("colour", [1, 2, 3])):
        data = read_table(written(tmp_path, rows(40, gap=gap)), missing="mean", seed=1)
        x = torch.cat([data.train[0], data.test[0]])
        before = torch.cat([whole.train[0], whole.test[0]])
        (row,) = (x != before).any(1).nonzero().flatten().tolist()
        known = [k for k in range(len(data.train[0])) if k != row]
        assert torch.allclose(x[row, columns], whole.train[0][known][:, columns].mean(0))
        assert "(1 missing values filled in)" in data.note
    with pytest.raises(pd.RangeError, match=r"row 5, column 'price'.*A target is not filled in"):
        read_table(written(tmp_path, rows(gap="price")), missing="mean")


def test_the_split_is_the_same_every_time(tmp_path: Path) -> None:
    path = written(tmp_path, rows(20))
    one, two = (read_table(path) for _ in range(2))
    assert torch.equal(one.test[0], two.test[0])
    assert not torch.equal(one.test[0], read_table(path, seed=1).test[0])
    together = torch.cat([one.train[1], one.test[1]]).flatten().sort().values
    assert together.tolist() == sorted(float(3 * k + k % 3) for k in range(20))
    for held_back in (-0.1, 1.0):
        with pytest.raises(pd.RangeError, match="held_back"):
            read_table(path, held_back=held_back)


# --- new data ---------------------------------------------------------------------------------------------------------


def test_new_data_mean_what_the_old_ones_meant(tmp_path: Path) -> None:
    encoding = read_table(written(tmp_path, rows())).encoding
    assert encoding is not None
    new = written(
        tmp_path, "price,colour,size\n,green,7\n,red,8\n", "new.csv"
    )  # reordered; the target is not looked at
    table, x = read_inputs(new, encoding)
    assert x.tolist() == [[7.0, 0.0, 1.0, 0.0], [8.0, 0.0, 0.0, 1.0]]
    assert table.rows == [2, 3]
    extra = written(tmp_path, "colour,size,id\nred,1,a\n", "extra.csv")
    with pytest.raises(
        pd.PyroDropoutError, match=r"extra.csv: the column 'id' was not in the training data.* --ignore-extra"
    ):
        read_inputs(extra, encoding)
    assert read_inputs(extra, encoding, ignore_extra=True)[1].tolist() == [[1.0, 0.0, 0.0, 1.0]]


def test_new_gaps_are_filled_only_if_old_ones_were(tmp_path: Path) -> None:
    new = written(tmp_path, "size,colour\n1,red\n,blue\n", "new.csv")
    strict = read_table(written(tmp_path, rows()), held_back=0.0).encoding
    lenient = read_table(written(tmp_path, rows()), held_back=0.0, missing="mean").encoding
    assert strict is not None
    assert lenient is not None
    with pytest.raises(pd.RangeError, match=r"new.csv, row 3, column 'size': the value is missing"):
        read_inputs(new, strict)
    assert read_inputs(new, lenient)[1][1].tolist() == [6.0, 1.0, 0.0, 0.0]  # the mean of 0.5, 1.5, ..., 11.5


def test_what_no_table_can_hold_is_named() -> None:
    table = Table("t", {"x": range(12), "list": [[1]] * 12, "y": range(12)}, list(range(12)))
    with pytest.raises(pd.RangeError, match=r"t, column 'list': its type is list; numbers, text"):
        read_table(table)
