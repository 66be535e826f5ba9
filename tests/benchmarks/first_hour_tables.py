"""Ten tables as a person would bring them: numbers, categories, gaps; prices, counts, classes. No network is needed."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pandas as pd
from sklearn import datasets

TARGET = "target"


@dataclass(frozen=True)
class Raw:
    """A table and what is known of its target: "plain", "skewed" (positive), "count" or "classes"."""

    name: str
    frame: pd.DataFrame
    kind: str

    def split(self, repeat: int) -> tuple[pd.DataFrame, pd.DataFrame]:
        """Return three quarters of the rows to fit, and the others to predict."""
        order = np.random.default_rng(1000 + repeat).permutation(len(self.frame))
        cut = 3 * len(order) // 4
        return self.frame.iloc[order[:cut]], self.frame.iloc[order[cut:]]


def _frame(x: np.ndarray, y: np.ndarray) -> pd.DataFrame:
    frame = pd.DataFrame(x, columns=[f"x{k}" for k in range(x.shape[1])])
    return frame.assign(**{TARGET: y})


def _shipped(load: Callable[..., object], kind: str) -> Raw:
    data = load()
    y = np.array([f"class {k}" for k in data.target]) if kind == "classes" else data.target
    return Raw(load.__name__.removeprefix("load_"), _frame(data.data, y), kind)


def _gaps(frame: pd.DataFrame, columns: list[str], share: float, rng: np.random.Generator) -> pd.DataFrame:
    """Return the frame with empty cells in some columns."""
    return frame.assign(**{name: frame[name].mask(rng.random(len(frame)) < share) for name in columns})


def houses() -> Raw:
    """2,000 houses: categories, gaps, and a skewed price whose noise is a percentage."""
    rng = np.random.default_rng(0)
    n = 2000
    area, rooms = rng.lognormal(4.6, 0.35, n), rng.integers(1, 8, n)
    year, distance = rng.integers(1900, 2024, n), rng.gamma(2.0, 4.0, n)
    town = rng.choice(["north", "south", "east", "west", "old town"], n, p=[0.3, 0.25, 0.2, 0.15, 0.1])
    state = rng.choice(["poor", "fair", "good", "new"], n, p=[0.1, 0.4, 0.4, 0.1])
    garden = rng.random(n) < 0.4
    worth = {"north": 0.1, "south": -0.1, "east": -0.25, "west": 0.0, "old town": 0.45}
    built = {"poor": -0.3, "fair": 0.0, "good": 0.12, "new": 0.3}
    log_price = (
        12.3
        + 0.8 * (np.log(area) - 4.6)
        + 0.04 * rooms
        + np.array([worth[each] for each in town])
        + np.array([built[each] for each in state])
        - 0.03 * distance
        + 0.0015 * np.abs(year - 1960)
        + 0.08 * garden * (distance > 8)
        + rng.normal(0, 0.18, n)
    )
    frame = pd.DataFrame(
        {"area": area.round(1), "rooms": rooms, "year": year, "distance": distance.round(2), "town": town}
        | {"state": state, "garden": np.where(garden, "yes", "no"), TARGET: np.exp(log_price).round(-2)}
    )
    return Raw("houses", _gaps(frame, ["year", "state", "distance"], 0.08, rng), "skewed")


def machines() -> Raw:
    """1,500 machines whose noise grows with their load."""
    rng = np.random.default_rng(1)
    n = 1500
    load, speed, age = rng.uniform(0, 1, n), rng.normal(0, 1, n), rng.exponential(3, n)
    kind = rng.choice(["A", "B", "C"], n)
    y = 20 * load + 3 * np.sin(2 * speed) + 2 * (kind == "B") - 0.4 * age + rng.normal(0, 1, n) * (0.4 + 4 * load**2)
    frame = pd.DataFrame({"load": load, "speed": speed, "age": age, "kind": kind, TARGET: y})
    return Raw("machines", _gaps(frame, ["age"], 0.1, rng), "plain")


def visits() -> Raw:
    """1,500 counts of visits, which spread more than Poisson's."""
    rng = np.random.default_rng(2)
    n = 1500
    hour, warm, week = rng.integers(0, 24, n), rng.normal(15, 8, n), rng.integers(0, 7, n)
    rate = np.exp(1.2 + 1.1 * np.sin((hour - 6) / 24 * 2 * np.pi) + 0.04 * warm - 0.4 * (week >= 5))
    y = rng.poisson(rate * rng.gamma(6.0, 1 / 6.0, n))
    frame = pd.DataFrame({"hour": hour, "temperature": warm.round(1), "weekday": week, TARGET: y})
    return Raw("visits", _gaps(frame, ["temperature"], 0.05, rng), "count")


def churn() -> Raw:
    """1,600 customers who stay, leave or upgrade; nobody could know for sure which."""
    rng = np.random.default_rng(3)
    n = 1600
    months, calls, paid = rng.exponential(20, n), rng.poisson(1.5, n), rng.lognormal(3.3, 0.4, n)
    plan = rng.choice(["basic", "plus", "pro"], n, p=[0.5, 0.3, 0.2])
    leave = 0.6 * calls - 0.05 * months + 0.5 * (plan == "basic") - 0.6
    more = 0.03 * paid * (plan != "pro") - 0.8 - 0.3 * calls
    odds = np.exp(np.stack([np.zeros(n), leave, more], 1))
    drawn = (odds / odds.sum(1, keepdims=True)).cumsum(1) < rng.random((n, 1))
    y = np.array(["stays", "leaves", "upgrades"])[drawn.sum(1)]
    frame = pd.DataFrame({"months": months.round(1), "calls": calls, "paid": paid.round(2), "plan": plan, TARGET: y})
    return Raw("churn", _gaps(frame, ["paid", "plan"], 0.07, rng), "classes")


def tables() -> list[Raw]:
    """Return the ten tables."""
    return [
        _shipped(datasets.load_diabetes, "plain"),
        Raw("friedman1", _frame(*datasets.make_friedman1(1000, noise=1.0, random_state=0)), "plain"),
        Raw("friedman2", _frame(*datasets.make_friedman2(1000, noise=125.0, random_state=0)), "plain"),
        Raw("friedman3", _frame(*datasets.make_friedman3(1000, noise=0.1, random_state=0)), "plain"),
        houses(),
        machines(),
        visits(),
        churn(),
        _shipped(datasets.load_breast_cancer, "classes"),
        _shipped(datasets.load_wine, "classes"),
    ]
