"""The two series that ship with the package."""

from collections.abc import Callable
from importlib import resources

import torch
from torch import Tensor

from pyro_dropout.tables.encoding import Dataset

_GAP = (1968.0, 1971.0)  # held-back years in the middle
_END = 1981.25  # the paper's last month; some years after it are held back too
_AFTER = 1984.0


def co2() -> Dataset:
    """Return the monthly means of CO₂ at Mauna Loa, less their linear trend, as in the paper's first experiment.

    The training data are March 1958 to March 1981 without the years 1968 to 1970. The test data are those years and the
    years after training up to 1984: one part lies between training data and one outside it.

    Example:
        >>> import pyro_dropout as pdrop
        >>> data = pdrop.datasets.co2()
        >>> [tuple(part.shape) for part in (*data.train, *data.test)]
        [(236, 1), (236, 1), (69, 1), (69, 1)]
    """
    year, ppm = _bundled("co2.csv").T
    between = (year > _GAP[0]) & (year < _GAP[1])
    train = (year < _END) & ~between
    test = between | ((year >= _END) & (year < _AFTER))
    design = torch.stack([torch.ones_like(year), year - year.mean()], -1)
    trend = design @ torch.linalg.lstsq(design[train], ppm[train].unsqueeze(-1)).solution
    x, y = year.unsqueeze(-1).float(), (ppm.unsqueeze(-1) - trend).float()
    return Dataset(
        "CO₂ at Mauna Loa",
        (x[train], y[train]),
        (x[test], y[test]),
        "year",
        "CO₂ less its trend (ppm)",
        "Monthly means of Keeling and Whorf (2004), 1958 to 1981, less the linear trend of the training data. Held"
        " back: 1968 to 1970, between training data, and 1981 to 1983, after it.",
    )


def sunspots() -> Dataset:
    """Return the yearly sunspot numbers from 1700 to 2008, with five gaps of 15 years held back."""
    year, spots = _bundled("sunspots.csv").T
    # One gap in each fifth of the series, a quarter into it and a quarter long, as in the paper's second experiment.
    fifth = len(year) // 5
    at = torch.arange(len(year)) % fifth
    gap = (at >= fifth // 4) & (at < 2 * (fifth // 4)) & (torch.arange(len(year)) < 5 * fifth)
    x, y = year.unsqueeze(-1).float(), spots.unsqueeze(-1).float()
    return Dataset(
        "Sunspots",
        (x[~gap], y[~gap]),
        (x[gap], y[gap]),
        "year",
        "sunspot number",
        "Yearly means of the international sunspot number, 1700 to 2008 (NOAA). Held back: five gaps of 15 years.",
    )


def _bundled(name: str) -> Tensor:
    text = resources.files("pyro_dropout.datasets").joinpath("data", name).read_text("utf-8")
    rows = [line.split(",") for line in text.splitlines() if line[:1].isdigit()]
    return torch.tensor([[float(value) for value in row] for row in rows], dtype=torch.float64)


BUNDLED: dict[str, Callable[[], Dataset]] = {"co2": co2, "sunspots": sunspots}
