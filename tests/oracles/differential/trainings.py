"""Trainings that must end alike: eager and by every engine, saved and loaded, in a fleet.

Each comparison returns how two results differ, "" if they do not. What one way refuses, the other refuses as well.
"""

import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest import mock

import pyro
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.data import DataLoader

import pyro_dropout as pd
from pyro_dropout.training.history import is_divergence
from tests.oracles.differential.drawn import POINTS, Dice, ensemble_of, guide_of, problem, trained, training

ENGINES = {"recorded": 8, "C": 6, "svi": 3}  # and how often each is drawn
COMPILED = {"compiled": 2, "compiled svi": 1}


def state_of(*parts: Any) -> dict[str, Tensor]:
    return {f"{k}.{name}": value for k, part in enumerate(parts) for name, value in part.state_dict().items()}


def apart(one: Any, other: Any) -> float:
    """The largest difference, relative to the largest number."""
    a, b = (torch.as_tensor(each).detach().double() for each in (one, other))
    if a.shape != b.shape or not torch.equal(a.isfinite(), b.isfinite()):
        return float("inf")
    a, b = a[a.isfinite()], b[b.isfinite()]
    return float((a - b).abs().max() / b.abs().max().clamp_min(1e-3)) if len(a) else 0.0


def differing(one: dict[str, Any], other: dict[str, Any], limit: float) -> str:
    """Which of two collections of numbers differ, and by how much."""
    if one.keys() != other.keys():
        return f"{sorted(one.keys() ^ other.keys())} in one of them only"
    far = {name: apart(value, other[name]) for name, value in one.items()}
    return ", ".join(f"{name} by {size:.1e}" for name, size in far.items() if not size <= limit)


def rounding(found: dict[str, Any]) -> float:
    """How far two orders of the same sums may end apart."""
    return 2e-3 if any(value.dtype == torch.float32 for value in found.values()) else 1e-7


def fitted(model: Any, guide: Any, x: Any, y: Tensor, settings: dict[str, Any]) -> pd.training.History:
    if isinstance(settings["optim"], type):
        if isinstance(guide, pd.Ensemble):  # whose members need an update of the package
            return pd.fit(model, guide, x, y, **settings | {"optim": "adam"})
        guide(x, y)
        held = settings["optim"](trained(model, guide), lr=settings["lr"])
        settings = settings | {"optim": held, "lr": 1e-3, "schedule": None, "clip_norm": None}
    return pd.fit(model, guide, x, y, **settings)


def made(dice: Dice, kind: str, number: int, how: str = "") -> tuple[Any, Any, Any, Tensor, dict[str, Any]]:
    """A problem, a guide and settings, the same for the same number; of the kind that an engine takes."""
    again = Dice(kind, number)
    model, x, y = problem(again)
    alone = again.chance(0.85) or "svi" in how
    guide = guide_of(again, model) if alone else ensemble_of(again, model)
    settings = training(again, POINTS)
    if how == "C" and isinstance(settings["optim"], type):  # those of torch run beside a step
        settings |= {"optim": "adam"}
    dice.told[1:] = again.told
    return model, guide, x, y, settings


# --- engines ----------------------------------------------------------------------------------------------------------


def by_fit(made: Any, how: str, told: list[str]) -> dict[str, Any]:
    model, guide, x, y, settings = made
    asked = {"eager": False, "C": "plain", "compiled": True}.get(how, "traced")
    settings["compile"] = asked if isinstance(asked, bool) else "auto"
    with mock.patch("pyro_dropout.training.fit.decided", return_value=asked):
        history = fitted(model, guide, x, y, settings)
    told.append(f"ran {history.engine}")
    return {"losses": history.losses} | state_of(model, guide)


def by_svi(made: Any, how: str, told: list[str]) -> dict[str, Any]:
    """Pyro's own SVI for eager steps; ours for the others."""
    model, guide, x, y, settings = made
    optim = pyro.optim.SGD if settings["optim"] == "sgd" else pyro.optim.Adam
    parts = (model, guide, optim({"lr": settings["lr"]}), settings["loss"])
    told.append(f"by {how}")
    svi = pyro.infer.SVI(*parts) if how == "eager" else pd.SVI(*parts, compile=how == "compiled svi")
    pyro.set_rng_seed(settings["seed"])
    losses = torch.tensor([svi.step(x, y) for _ in range(settings["steps"])], dtype=torch.float64)
    return {"losses": losses} | state_of(model, guide)


def told_error(error: Exception) -> str:
    """Return the kind and the words of an error."""
    return f"{type(error).__name__}: {error}"


def engines(dice: Dice, drawn: dict[str, int] = ENGINES) -> str:
    """Eager steps, and those of an engine."""
    how = dice.pick(drawn, drawn.values())
    number = dice.randrange(2**31)

    def run(engine: str, moved: float = 1.0) -> tuple[dict[str, Any], str]:
        train = by_svi if "svi" in how else by_fit
        model, guide, x, y, settings = made(dice, "engines", number, how)
        try:
            return train((model, guide, tree_map(lambda part: part * moved, x), y, settings), engine, dice.told), ""
        except pd.errors.PyroDropoutError as error:
            return {}, "diverged" if isinstance(error, pd.errors.DivergedError) and train is by_svi else told_error(
                error
            )
        except ValueError as error:
            if engine != "eager" or train is not by_svi or not is_divergence(error, []):
                raise
            return {}, "diverged"  # as Pyro's own SVI says it

    (eager, why), (other, reason) = run("eager"), run(how)
    if why or reason:
        return "" if why.split(".")[0] == reason.split(".")[0] else f"eager: {why or 'runs'}; {how}: {reason or 'runs'}"
    limit = rounding(eager)
    if not differing(eager, other, limit):
        return ""
    # An optimiser turns gradients that are zero but for rounding into steps: what inputs with other last digits change
    # as much is no mismatch.
    eps = torch.finfo(tree_leaves(made(dice, "engines", number, how)[2])[0].dtype).eps
    again, _ = run("eager", 1 + 2 * eps)
    firm = [name for name in eager if name not in again or apart(again[name], eager[name]) <= limit]
    return differing({name: eager[name] for name in firm}, {name: other[name] for name in firm}, limit)


def compiled(dice: Dice) -> str:
    """Eager steps, and those that torch compiles, which takes a while."""
    return engines(dice, COMPILED)


# --- files and fleets -------------------------------------------------------------------------------------------------


def files(dice: Dice) -> str:
    """A trained pair before it is saved, and after it is loaded into a fresh one; the data at once, and in batches."""
    number, size = dice.randrange(2**31), dice.randint(1, POINTS)
    model, guide, x, y, settings = made(dice, "files", number)
    with suppress(pd.errors.PyroDropoutError):  # what cannot be trained can be saved
        fitted(model, guide, x, y, settings | {"steps": 2, "compile": False})
    asked: Any = {"samples": 6, "seed": 0, "shared": True}
    before = pd.predict(model, guide, x, **asked)
    with tempfile.TemporaryDirectory() as folder:
        pd.save(Path(folder) / "pair", model, guide)
        fresh, other, *_ = made(dice, "files", number)
        pd.load(Path(folder) / "pair", fresh, other)
    after = pd.predict(fresh, other, x, **asked)
    told = differing(state_of(fresh, other), state_of(model, guide), 0.0)
    told = told or differing({"f": after.samples}, {"f": before.samples}, 0.0)
    rows: Any = [tree_map(lambda part, k=k: part[k], x) for k in range(POINTS)]
    rows = [(row,) for row in rows] if isinstance(x, tuple) else rows  # else they could be inputs and targets
    parts = pd.predict(model, guide, DataLoader(rows, batch_size=size), **asked)
    return told or differing({"f": parts.samples}, {"f": before.samples}, 1e-5)


def fleets(dice: Dice) -> str:
    """A replica of a fleet, and the same training alone; nothing is random."""
    number = dice.randrange(2**31)

    def build(keep: float = 1.0) -> tuple[Any, Any]:
        model, *_ = problem(Dice("fleets", number), still=True)
        return model, pd.AutoDropout(model, keep=keep)

    again = Dice("fleets", number)
    _, x, y = problem(again, still=True)
    settings = training(again, POINTS) | {"batch_size": None, "compile": dice.pick((False, "traced"))}
    dice.told += again.told
    if isinstance(settings["optim"], type):
        settings["optim"] = "adam"
    fleet = pd.Fleet(build, {"keep": [1.0, 1.0]})
    losses = fleet.fit(x, y, **settings).losses
    model, guide = build()
    alone = {"losses": fitted(model, guide, x, y, settings | {"compile": False}).losses} | state_of(model, guide)
    return differing({"losses": losses[:, 1]} | state_of(*fleet[1]), alone, rounding(alone))
