"""The data of the experiments: the paper's, from a folder, or bundled and synthetic data.

The environment variable ``PYRO_DROPOUT_DATA`` names the folder; ``pyro-dropout datasets --download FOLDER`` fills one.
Without it every loader returns public-domain or synthetic data of the same form, so that each experiment runs anywhere.
"""

import gzip
import os
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from experiments.made_data import made_digits, made_regression
from pyro_dropout.errors import PyroDropoutError

VARIABLE = "PYRO_DROPOUT_DATA"
UCI_NAMES = {
    "boston": "bostonHousing", "concrete": "concrete", "energy": "energy", "kin8nm": "kin8nm",
    "naval": "naval-propulsion-plant", "power": "power-plant", "protein": "protein-tertiary-structure",
    "wine": "wine-quality-red", "yacht": "yacht",
}  # fmt: skip
CO2_END = 3.72  # how far the paper's figure extrapolates, in its own units
PAPER_SERIES = "https://github.com/yaringal/DropoutUncertaintyCaffeModels"
_CO2_MONTHS = 272  # recorded from March 1958 to March 1981: the paper's training set

PAPER, BUNDLED, MADE = "the paper's", "bundled", "made"  # where data come from
Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Held:
    """Training data and held-out data: a series with one input and one output, or images with their classes."""

    name: str
    x: Tensor  # (N, 1), standardised, or images (N, 1, 28, 28) in [0, 1]
    y: Tensor  # (N, 1), standardised, or classes (N,), 0 to 9
    test_x: Tensor  # held out, on the scale of x
    test_y: Tensor
    source: str
    note: str = ""  # where it comes from, for the page
    gaps: tuple[tuple[float, float], ...] = ()  # (first, last) held-out input of every gap in a series
    x_name: str = ""


@dataclass(frozen=True)
class UCI:
    """A regression table, x (N, Q) and y (N, 1) in their own units, with the rows of its splits."""

    name: str
    x: Tensor
    y: Tensor
    train_rows: list[Tensor]
    test_rows: list[Tensor]
    source: str


def co2_paper() -> Held:
    """Return the paper's first series: monthly CO₂ at Mauna Loa, detrended and standardised, and its continuation.

    The input counts recorded months (five are missing before 1965, and the paper skips them). Held out are the 156
    months after March 1981, up to x = 3.72, where the paper extrapolates without known values. They come from the
    bundled series minus the trend of the training months, mapped to the paper's scale by least squares over the 272
    months that both have. The two differ by 0.04 (root mean square) and at most 0.24 in units of ``y``, because one
    averages weekly values and the other is an older monthly record.
    """
    ppm = _bundled("co2.csv")[:, 1]
    month = np.arange(len(ppm), dtype=np.float64)
    known = month < _CO2_MONTHS
    x = _standardised(month, known)
    rest = ppm - _fitted(x, known, ppm[known])
    folder = data_folder()
    if folder is None:
        y = _standardised(rest, known)
        train_x, train_y, source = x[known], y[known], BUNDLED
        note = "Monthly means of Keeling and Whorf (2004), March 1958 to March 1981, less their linear trend."
    else:
        train_x, train_y = _columns(folder / "co2.csv", 2).T
        if len(train_x) != _CO2_MONTHS:
            raise _garbled(folder / "co2.csv", f"{len(train_x)} months where {_CO2_MONTHS} are expected")
        x, y = _fitted(x, known, train_x), _fitted(rest, known, train_y)
        source = PAPER
        note = "The 272 months of Gal and Ghahramani (2015); what follows them is that of Keeling and Whorf (2004)."
    test = ~known & (x <= CO2_END)
    train, later = (_column(train_x), _column(train_y)), (_column(x[test]), _column(y[test]))
    return Held("CO₂ at Mauna Loa", *train, *later, source, note, x_name="recorded months (standardised)")


def solar() -> Held:
    """Return the paper's second series: solar irradiance with five gaps; sunspot numbers without a data folder."""
    folder = data_folder()
    if folder is not None:
        x, y = _columns(folder / "solar_train.csv", 2).T
        test_x, test_y = _columns(folder / "solar_gaps.csv", 2).T
        name, source = "solar irradiance", PAPER
        note = "The 275 points of Gal and Ghahramani (2015), after Lean (2004), and the 5 gaps of 20 points."
    else:
        year, spots = _bundled("sunspots.csv").T
        x, y = (_standardised(part, np.isfinite(part)) for part in (year, spots))
        # The paper's pattern at this length: one gap in each fifth, a quarter into it and a quarter long.
        fifth = len(x) // 5
        at = np.arange(len(x)) % fifth
        gap = (at >= fifth // 4) & (at < fifth // 4 + fifth // 4) & (np.arange(len(x)) < 5 * fifth)
        x, y, test_x, test_y = x[~gap], y[~gap], x[gap], y[gap]
        name, source = "sunspots", BUNDLED
        note = "Yearly sunspot numbers, 1700 to 2008 (NOAA), with 5 gaps of 15 years."
    starts = [0, *(np.flatnonzero(np.diff(test_x) > 2 * np.diff(test_x).min()) + 1).tolist()]
    stops = [*(start - 1 for start in starts[1:]), len(test_x) - 1]
    gaps = tuple((float(test_x[a]), float(test_x[b])) for a, b in zip(starts, stops, strict=True))
    train, test = (_column(x), _column(y)), (_column(test_x), _column(test_y))
    return Held(name, *train, *test, source, note, gaps, "year (standardised)")


def uci(name: str) -> UCI:
    """Return one of the nine UCI regression sets; without a data folder, one that is made by a formula.

    The splits are those of Hernández-Lobato and Adams (2015), as Gal and Ghahramani (2016) use them.
    """
    if name not in UCI_NAMES:
        raise PyroDropoutError(f"unknown UCI set {name!r}; choose from {', '.join(UCI_NAMES)}.")
    folder = data_folder()
    if folder is None:
        return UCI(f"made (for {name})", *made_regression(), MADE)
    folder = folder / "uci" / UCI_NAMES[name]
    table = _numbers(folder / "data.txt")
    columns = table.shape[1]
    features = _rows(folder / "index_features.txt", columns)
    target = _rows(folder / "index_target.txt", columns)
    splits = len(list(folder.glob("index_train_*.txt")))
    if not splits:
        raise _missing(folder / "index_train_0.txt")
    parts = [[_rows(folder / f"index_{part}_{k}.txt", len(table)) for k in range(splits)] for part in ("train", "test")]
    for k, (rows, others) in enumerate(zip(*parts, strict=True)):
        if np.intersect1d(rows, others).size:
            raise _garbled(folder / f"index_test_{k}.txt", f"it shares rows with index_train_{k}.txt")
    train, test = ([torch.from_numpy(rows) for rows in each] for each in parts)
    x, y = (torch.from_numpy(table[:, own]).float() for own in (features, target[:1]))
    return UCI(name, x, y, train, test, PAPER)


def mnist() -> Held:
    """Return MNIST, 60,000 + 10,000 handwritten digits; 2,000 + 500 synthetic ones without a data folder."""
    folder = data_folder()
    if folder is None:
        return Held("drawn digits", *made_digits(2000, seed=1), *made_digits(500, seed=2), MADE)
    train, test = (_labelled(folder / "mnist", part) for part in ("train", "t10k"))
    return Held("MNIST", *train, *test, PAPER)


def described(name: str) -> tuple[str, str, str]:
    """Return a data set's name, size and source; if it cannot be read, the reason."""
    try:
        if name in UCI_NAMES:
            table = uci(name)
            size = f"{len(table.x)} rows, {table.x.shape[1]} inputs, {len(table.train_rows)} splits"
            return name, size, table.source
        held = {"mnist": mnist, "co2": co2_paper, "solar": solar}[name]()
        unit = "images" if name == "mnist" else "points"
        return name, f"{len(held.x)} + {len(held.test_x)} {unit}", held.source
    except PyroDropoutError as mistake:
        return name, "", f"not readable: {mistake}"


def data_folder() -> Path | None:
    """Return the folder in ``PYRO_DROPOUT_DATA``, or None if it is not set; raise if the folder does not exist."""
    named = os.environ.get(VARIABLE, "")
    if not named:
        return None
    if not Path(named).is_dir():
        raise PyroDropoutError(f"{VARIABLE} is {named!r}, which is not a folder. {_remedy()}")
    return Path(named)


# --- reading ----------------------------------------------------------------------------------------------------------


def _remedy(path: Path | None = None) -> str:
    fetch = "`pyro-dropout datasets --download FOLDER` downloads the data"
    if path is not None and path.suffix == ".csv":  # published only in another format, so it cannot be downloaded
        fetch = f"Write it from the HDF5 files of {PAPER_SERIES} as two columns with the header x,y"
    return f"{fetch}; without {VARIABLE}, bundled and synthetic data are used."


def _missing(path: Path) -> PyroDropoutError:
    return PyroDropoutError(f"there is no file {str(path)!r}. {_remedy(path)}")


def _garbled(path: Path, why: str) -> PyroDropoutError:
    return PyroDropoutError(f"{str(path)!r} is garbled: {why}. {_remedy(path)}")


def _numbers(path: Path, **how: Any) -> Array:
    """Return a file of numbers, one row per line, as a two-dimensional array."""
    if not path.is_file():
        raise _missing(path)
    if not path.stat().st_size:
        raise _garbled(path, "it is empty")
    try:
        table: Array = np.loadtxt(path, ndmin=2, **how)
    except (ValueError, UnicodeDecodeError) as cause:
        raise _garbled(path, str(cause).split(";")[0].rstrip(".")) from None
    if not table.size or not np.isfinite(table).all():
        raise _garbled(path, "a value is missing or infinite")
    return table


def _columns(path: Path, columns: int) -> Array:
    table = _numbers(path, delimiter=",", skiprows=1)
    if table.shape[1] != columns:
        raise _garbled(path, f"{table.shape[1]} columns where {columns} are expected")
    return table


def _rows(path: Path, below: int) -> npt.NDArray[np.int64]:
    """Return a file of distinct row numbers, all less than ``below``."""
    values = _numbers(path).ravel()
    rows = values.astype(np.int64)
    if (rows != values).any() or rows.min() < 0 or rows.max() >= below or len(np.unique(rows)) != len(rows):
        raise _garbled(path, f"it must hold different whole numbers from 0 to {below - 1}")
    return rows


def _labelled(folder: Path, part: str) -> tuple[Tensor, Tensor]:
    path = folder / f"{part}-images-idx3-ubyte.gz"
    images, labels = _idx(path, 3), _idx(folder / f"{part}-labels-idx1-ubyte.gz", 1)
    if images.shape != (len(labels), 28, 28):
        raise _garbled(path, f"it holds {images.shape} for {len(labels)} labels")
    return torch.from_numpy(images).unsqueeze(1).float().div_(255), torch.from_numpy(labels).long()


def _idx(path: Path, dimensions: int) -> npt.NDArray[np.uint8]:
    """Return an array of bytes in MNIST's format: two zeros, 8 for bytes, the dimensions, their sizes, the bytes."""
    if not path.is_file():
        raise _missing(path)
    try:
        raw = gzip.decompress(path.read_bytes())
        shape = np.frombuffer(raw[4 : 4 + 4 * dimensions], ">i4")
        return np.frombuffer(raw, np.uint8, offset=4 + 4 * dimensions).reshape(shape.tolist()).copy()
    except (OSError, EOFError, ValueError) as cause:
        raise _garbled(path, f"it is no packed idx file in {dimensions} dimensions ({cause})") from None


def _bundled(name: str) -> Array:
    lines = resources.files("pyro_dropout.datasets").joinpath("data", name).read_text("utf-8").splitlines()
    return np.array([[float(value) for value in line.split(",")] for line in lines if line[:1].isdigit()])


def _standardised(values: Array, known: npt.NDArray[np.bool_]) -> Array:
    result: Array = (values - values[known].mean()) / values[known].std()
    return result


def _fitted(values: Array, known: npt.NDArray[np.bool_], target: Array) -> Array:
    """Return a + b·values, with the least-squares a and b for ``target`` where it is known."""
    slope, start = np.polyfit(values[known], target, 1)
    result: Array = start + slope * values
    return result


def _column(values: Array) -> Tensor:
    return torch.tensor(values, dtype=torch.float32).unsqueeze(-1)
