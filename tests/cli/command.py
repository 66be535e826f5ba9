"""The command line in tests: how it is run, the tables that it is given, and what lies in a folder."""

import csv
from pathlib import Path
from typing import Any
from unittest import mock

from typer.testing import CliRunner

from pyro_dropout.cli.main import app
from pyro_dropout.tables.encoding import Dataset
from pyro_dropout.tables.reading import read
from pyro_dropout.tables.settings import settings_of
from pyro_dropout.tables.table import Table

FEW = ["--steps", "3", "--width", "5", "--no-compile", "--quiet"]


def without_fsync() -> Any:
    """Return a context in which files are not forced to the disk: that is slow, and matters after a power cut only."""
    return mock.patch("pyro_dropout.training.checkpoints.safe_files._force")


def run(*arguments: object) -> Any:
    return CliRunner().invoke(app, [str(part) for part in arguments], catch_exceptions=False)


def succeeded(*arguments: object) -> Any:
    """Run a command, and fail with what it says where it fails."""
    done = run(*arguments)
    assert done.exit_code == 0, done.stderr
    return done


def read_table(path: str | Path | Table, **options: Any) -> Dataset:
    """Return a file as data, with options of the command line."""
    return read(path, settings_of(options)[0])


def houses(count: int = 30) -> str:
    lines = [f"{30 + 5 * k},{'ab'[k % 2]},{90 + 11 * k}" for k in range(count)]
    return "\n".join(["area,town,price", *lines]) + "\n"


def trees(count: int = 30) -> str:
    lines = [f"{k % 3 + k / 50},{k // 2},{('oak', 'elm', 'ash')[k % 3]}" for k in range(count)]
    return "\n".join(["width,age,kind", *lines]) + "\n"


def written(folder: Path, text: str | bytes, name: str = "table.csv") -> Path:
    path = folder / name
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def as_csv(folder: Path, columns: dict[str, Any], name: str = "table.csv") -> Path:
    lines = zip(*columns.values(), strict=True)
    rows = [columns.keys(), *([f'"{cell}"' for cell in line] for line in lines)]
    return written(folder, "\n".join(",".join(row) for row in rows), name)


def contents(folder: Path) -> dict[str, bytes | None]:
    return {str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


def table_of(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def cells_in(table: Any) -> dict[str, list[Any]]:
    """Return the cells of a table that was read, None where one is missing."""
    return {name: [None if cell != cell else cell for cell in each.tolist()] for name, each in table.columns.items()}
