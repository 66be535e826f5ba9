"""Bad files: saved posteriors, checkpoints and tables; what they would have been loaded into stays as it was."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

import pyro_dropout as pd
from pyro_dropout import errors
from tests.bad_input.row import OTHER, RANGE, SHAPE, Row, X, dense, fit, nothing_lost, pair
from tests.cli.command import read_table

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
    Row(OTHER, "none/p", "No such file or directory", saving("none/p")),
    Row(OTHER, "cannot be written", "Is a directory", saving(".")),
    Row(OTHER, "extra", "type object", saving("p", extra={"a": object()})),
    Row(OTHER, "model nor guide", "is a module", saving("p", None, None)),
    Row(OTHER, "file", "none'", lambda folder: load(pair(), folder / "none")),
    Row(DAMAGED, FILE, "it is cut off", loading(lambda content: b"")),
    Row(DAMAGED, FILE, "not fully covered", loading(lambda content: content[:-9])),
    Row(DIFFERENT, "guide", "AutoDropout in the file, AutoMeanField here", loading(into=dense)),
    Row(DIFFERENT, "weight", "torch.float32 in the file, torch.float64 here",
        loading(into=lambda: tuple(part.double() for part in pair()))),
    Row(RANGE, "every", "got 0", lambda folder: pd.training.Checkpoint(folder, every=0)),
    Row(OTHER, "checkpoint", "File exists", training(None)),
    Row(OTHER, "step-000000000001", "not a training checkpoint", training(b"posterior")),
    Row(OTHER, "step-000000000002", "is from step 2", again(steps=1)),
    Row(OTHER, "another training", "these differ: update", again(lr=0.5)),
    # tables
    Row(OTHER, "none.csv", "there is no file", lambda folder: read_table(folder / "none.csv")),
    Row(SHAPE, "table.csv", "is empty", table("")),
    Row(SHAPE, "table.csv", "no rows", table("a,b\n")),
    Row(SHAPE, "at least two columns", "'a'", table("a\n1\n")),
    Row(SHAPE, "two columns", "'a'", table("a,b,a\n1,2,3\n")),
    Row(SHAPE, "table.csv, row 14", "1 values", table(GOOD + "1\n")),
    Row(RANGE, "row 14, column 'b'", "'x'", table(GOOD + "1,x\n")),
    Row(RANGE, "row 14, column 'a'", "missing", table(GOOD + "nan,1\n", missing="refuse")),
    Row(RANGE, "row 14, column 'a'", "'1e39' is too large", table(GOOD + "1e39,1\n")),
    Row(RANGE, "column 'b'", "only one value, 'x'", table("a,b\n" + "1,x\n" * 12)),
    Row(OTHER, "table.csv", "no column 'z'", table(GOOD, target="z")),
    Row(OTHER, "'b'", "left out", table(GOOD, drop=["b"])),
    Row(SHAPE, "table.csv", "'b'", table(GOOD, drop=["a"])),
    Row(RANGE, "column 'b'", "12 different values", table(GOOD, task="classification")),
    Row(RANGE, "held_back", "got 1.0", table(GOOD, held_back=1.0)),
    Row(RANGE, "held_back=0.99", "leaves 0 to train on", table(GOOD, held_back=0.99)),
    Row(OTHER, "t.parquet", "not a valid Parquet file", table("PAR1 and so on", "t.parquet")),
    Row(RANGE, "row 12, column 'a'", "too large", parquet([("a", [*TWO[:-1], 1e300]), ("b", TWO)])),
]  # fmt: skip
