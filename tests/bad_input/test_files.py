"""Bad files: saved posteriors, checkpoints and tables; what they would have been loaded into stays as it was."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

import pyro_dropout as pd
from pyro_dropout import errors
from pyro_dropout.tables.reading import read_table
from tests.bad_input.row import OTHER, RANGE, SHAPE, Row, X, dense, fit, names, nothing_lost, pair, refused

DAMAGED, DIFFERENT = errors.DamagedFileError, errors.DifferentModelError
FILE = "posterior.safetensors"


def load(into: tuple[Any, Any], path: Any) -> None:
    with nothing_lost(*into):
        pd.load(path, *into)


def loading(change: Callable[[bytes], bytes] = bytes, into: Callable[[], tuple[Any, Any]] = pair) -> Any:
    """Save a posterior, change its bytes, and load it into another pair."""

    def call(folder: Path) -> None:
        path = folder / FILE
        pd.save(path, *pair())
        path.write_bytes(change(path.read_bytes()))
        load(into(), path)

    return call


def saving(name: str, *given: Any, **more: Any) -> Any:
    """Save under a name in a folder in which nothing may appear."""

    def call(folder: Path) -> None:
        try:
            pd.save(folder / name, *(given or pair()), **more)
        finally:
            assert list(folder.iterdir()) == []

    return call


def training(content: bytes | None, **how: Any) -> Any:
    """Train with checkpoints in a folder that holds, or is, something else."""

    def call(folder: Path) -> None:
        path = folder / "checkpoints"
        if content is None:
            path.write_text("a file")
        else:
            path.mkdir()
            pd.save(path / "step-000000000001.safetensors", *pair())
        fit(checkpoint=pd.training.Checkpoint(path, **how))

    return call


def again(**other: Any) -> Any:
    """Train, and then train otherwise with the same checkpoints."""

    def call(folder: Path) -> None:
        first: Any = {"steps": 2, "seed": 0, "compile": False, "progress": False, "checkpoint": folder}
        pd.fit(*pair(), X, X, **first)
        fit(X, X, **{**first, **other})

    return call


def table(text: str | bytes, name: str = "table.csv", **options: Any) -> Any:
    """Read a CSV file."""

    def call(folder: Path) -> None:
        path = folder / name
        path.write_bytes(text.encode() if isinstance(text, str) else text)
        read_table(path, **options)

    return call


def parquet(columns: Any, **options: Any) -> Any:
    """Read a Parquet file."""

    def call(folder: Path) -> None:
        names = [name for name, _ in columns]
        arrays = [pyarrow.array(values) for _, values in columns]
        pyarrow.parquet.write_table(pyarrow.Table.from_arrays(arrays, names=names), folder / "table.parquet")
        read_table(folder / "table.parquet", **options)

    return call


def flipped(content: bytes) -> bytes:
    return content[:-1] + bytes([content[-1] ^ 1])


GOOD = "a,b\n" + "".join(f"{k},{k * k}\n" for k in range(12))
TWO = [float(k) for k in range(12)]
ROWS = [
    Row("save", lambda folder: pd.save(3, *pair()), OTHER, "path", "got int 3", "as text or a pathlib.Path"),
    Row("save", saving("none/p"), OTHER, "none/p", "No such file or directory", "in a folder that exists"),
    Row("save", saving("."), OTHER, "cannot be written", "Is a directory", "Give a file"),
    Row("save", saving("p", extra={"a": object()}), OTHER, "extra", "type object", "writable as JSON"),
    Row("save", saving("p", extra=[1, 2]), OTHER, "extra", "got list [1, 2]", "be a dict writable as JSON"),
    Row("save", saving("p", None, None), OTHER, "model nor guide", "is a module", "nothing to save"),
    Row("save", saving("p", print, pd.AutoDropout(print)),
        OTHER, "AutoDropout", "has not seen its model", "call it once"),
    Row("load", lambda folder: load(pair(), 3), OTHER, "path", "got int 3", "as text or a pathlib.Path"),
    Row("load", lambda folder: load(pair(), folder / "none"), OTHER, "file", "none'", "there is no file"),
    Row("load", lambda folder: load(pair(), folder), OTHER, "is a folder", "test_bad_file", "give the file that save"),
    Row("load", loading(lambda content: b""), DAMAGED, FILE, "it is cut off", "Take an older checkpoint"),
    Row("load", loading(lambda content: content[:-9]), DAMAGED, FILE, "not fully covered", "or train anew"),
    Row("load", loading(into=dense),
        DIFFERENT, "guide", "AutoDropout in the file, AutoMeanField here", "Build them as"),
    Row("load", loading(into=lambda: tuple(part.double() for part in pair())),
        DIFFERENT, "weight", "torch.float32 in the file, torch.float64 here", "Build them as they were"),
    Row("Checkpoint", lambda folder: pd.training.Checkpoint(folder, every=0),
        RANGE, "every", "got 0", "a whole number of at least 1"),
    Row("Checkpoint", lambda folder: pd.training.Checkpoint(folder, seconds=-1.0),
        RANGE, "seconds", "got -1.0", "be positive"),
    Row("Checkpoint", lambda folder: pd.training.Checkpoint(folder, run=3),
        OTHER, "run", "got 3", "text that identifies"),
    Row("Checkpoint", training(None), OTHER, "checkpoint", "File exists", "must be a folder"),
    Row("Checkpoint", training(b"posterior"),
        OTHER, "step-000000000001", "not a training checkpoint", "give another folder"),
    Row("Checkpoint", again(steps=1), OTHER, "step-000000000002", "is from step 2", "beyond the 1 requested"),
    Row("Checkpoint", again(lr=0.5),
        OTHER, "another training", "these differ: update", "give another folder to start over"),
    Row("Checkpoint", again(seed=7), OTHER, "another training", "these differ: seed", "Call fit with the same data"),
    # tables
    Row("read_table", lambda folder: read_table(folder / "none.csv"), OTHER, "none.csv", "there is no file", "file"),
    Row("read_table", lambda folder: read_table(folder),
        OTHER, "is a folder", "test_bad_file", "give a CSV or Parquet"),
    Row("read_table", table(""), SHAPE, "table.csv", "is empty", "a header and rows are needed"),
    Row("read_table", table("a,b\n"), SHAPE, "table.csv", "no rows", "a header and no rows"),
    Row("read_table", table("a\n1\n"), SHAPE, "at least two columns", "'a'", "separated by commas"),
    Row("read_table", table("a,b,a\n1,2,3\n"), SHAPE, "two columns", "'a'", "names must be unique"),
    Row("read_table", table(GOOD + "1\n"), SHAPE, "table.csv, row 14", "1 values", "for 2 columns"),
    Row("read_table", table(GOOD + "1,x\n"), RANGE, "row 14, column 'b'", "'x'", "is not a number"),
    Row("read_table", table(GOOD + "nan,1\n", missing="refuse"),
        RANGE, "row 14, column 'a'", "missing", "with --missing drop"),
    Row("read_table", table(GOOD + "1e39,1\n"), RANGE, "row 14, column 'a'", "'1e39' is too large", "change the unit"),
    Row("read_table", table("a,b\n" + "1,x\n" * 12), RANGE, "column 'b'", "only one value, 'x'", "nothing to predict"),
    Row("read_table", table(GOOD, target="z"), OTHER, "table.csv", "no column 'z'", "its columns are a, b"),
    Row("read_table", table(GOOD, drop=["b"]), OTHER, "'b'", "left out", "cannot be both"),
    Row("read_table", table(GOOD, drop=["a"]), SHAPE, "table.csv", "'b'", "no column is left to predict"),
    Row("read_table", table(GOOD, task="classification"), RANGE, "column 'b'", "12 different values", "(at most 6)"),
    Row("read_table", table(GOOD, held_back=1.0), RANGE, "held_back", "got 1.0", "lie in [0, 1)"),
    Row("read_table", table(GOOD, held_back=0.99), RANGE, "held_back=0.99", "leaves 0 to train on", "hold back fewer"),
    Row("read_table", table("PAR1 and so on", "t.parquet"), OTHER, "t.parquet", "not a valid Parquet file", "Parquet"),
    Row("read_table", parquet([("a", [*TWO[:-1], 1e300]), ("b", TWO)]),
        RANGE, "row 12, column 'a'", "too large", "unit"),
]  # fmt: skip


@pytest.mark.usefixtures("unchecked_shapes")
@pytest.mark.parametrize("row", ROWS, ids=names(ROWS))
def test_bad_file_is_refused(row: Row, tmp_path: Path) -> None:
    refused(row, tmp_path)
