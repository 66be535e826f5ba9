"""Trainings that must end alike: eager and by every engine, in one process and two, saved and loaded, in a fleet.

Each comparison returns how two results differ, "" if they do not. What one way refuses, the other refuses as well.
"""

import multiprocessing
import os
import tempfile
import warnings
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any
from unittest import mock

import pyro
import torch
import torch.distributed
from torch import Tensor
from torch.utils._pytree import tree_map
from torch.utils.data import DataLoader

import pyro_dropout as pd
from tests.oracles.differential.drawn import POINTS, Dice, ensemble_of, guide_of, problem, trained, training

ENGINES = {"tape": 5, "recorded": 3, "plain C": 4, "svi": 3}  # and how often each is drawn
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


def fitted(model: Any, guide: Any, x: Any, y: Tensor, settings: dict[str, Any]) -> pd.History:
    if isinstance(settings["optim"], type):
        if isinstance(guide, pd.Ensemble):  # whose members need an update of the package
            return pd.fit(model, guide, x, y, **settings | {"optim": "adam"})
        guide(x, y)
        held = settings["optim"](trained(model, guide), lr=settings["lr"])
        settings = settings | {"optim": held, "lr": 1e-3, "schedule": None, "clip_norm": None}
    return pd.fit(model, guide, x, y, **settings)


def made(dice: Dice, kind: str, number: int, ensembles: float = 0.15) -> tuple[Any, Any, Any, Tensor, dict[str, Any]]:
    """A problem, a guide and settings, the same for the same number."""
    again = Dice(kind, number)
    model, x, y = problem(again)
    guide = ensemble_of(again, model) if again.chance(ensembles) else guide_of(again, model)
    settings = training(again, POINTS)
    dice.told[1:] = again.told
    return model, guide, x, y, settings


# --- engines ----------------------------------------------------------------------------------------------------------


def by_fit(made: Any, how: str) -> dict[str, Any]:
    model, guide, x, y, settings = made
    asked = {"eager": False, "plain C": "plain", "compiled": True}.get(how, "traced")
    settings["compile"] = asked if isinstance(asked, bool) else "auto"

    def decided(*_: Any, plain: bool = False) -> Any:
        return "traced" if asked == "plain" and not plain else asked

    with ExitStack() as stack:
        stack.enter_context(mock.patch("pyro_dropout.training.fit.decided", decided))
        if how == "recorded":
            stack.enter_context(mock.patch("pyro_dropout.training.runner.taped", return_value=None))
        losses = fitted(model, guide, x, y, settings).losses
    return {"losses": losses} | state_of(model, guide)


def by_svi(made: Any, how: str) -> dict[str, Any]:
    """Pyro's own SVI for eager steps; ours for the others."""
    model, guide, x, y, settings = made
    optim = pyro.optim.SGD if settings["optim"] == "sgd" else pyro.optim.Adam
    parts = (model, guide, optim({"lr": settings["lr"]}), settings["loss"])
    svi = pyro.infer.SVI(*parts) if how == "eager" else pd.SVI(*parts, compile=how == "compiled svi")
    pyro.set_rng_seed(settings["seed"])
    losses = torch.tensor([svi.step(x, y) for _ in range(settings["steps"])], dtype=torch.float64)
    return {"losses": losses} | state_of(model, guide)


def engines(dice: Dice, drawn: dict[str, int] = ENGINES) -> str:
    """Eager steps, and those of an engine."""
    how = dice.pick(drawn, drawn.values())
    number = dice.randrange(2**31)

    def run(how: str, train: Callable[[Any, str], dict[str, Any]]) -> tuple[dict[str, Any], str]:
        parts = made(dice, "engines", number, 0.0 if train is by_svi else 0.15)
        try:
            return train(parts, how), ""
        except pd.PyroDropoutError as error:
            return {}, f"{type(error).__name__}: {error}"

    train = by_svi if "svi" in how else by_fit
    (eager, why), (other, reason) = run("eager", train), run(how, train)
    if why or reason:
        return "" if why.split(".")[0] == reason.split(".")[0] else f"eager: {why or 'runs'}; {how}: {reason or 'runs'}"
    return differing(eager, other, rounding(eager))


def compiled(dice: Dice) -> str:
    """Eager steps, and those that torch compiles, which takes a while."""
    return engines(dice, COMPILED)


# --- files, ranks, fleets ---------------------------------------------------------------------------------------------


def files(dice: Dice) -> str:
    """A trained pair before it is saved, and after it is loaded into a fresh one; the data at once, and in batches."""
    number, size = dice.randrange(2**31), dice.randint(1, POINTS)
    model, guide, x, y, settings = made(dice, "files", number)
    with suppress(pd.PyroDropoutError):  # what cannot be trained can be saved
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


def ranks(dice: Dice) -> str:
    """One process, and two that share the data; nothing is random but the order of the data."""
    number = dice.randrange(2**31)

    def run(rank: int | None, folder: str) -> dict[str, Any]:
        again = Dice("ranks", number)
        model, x, y = problem(again, still=True)  # each rank normalises by its own share
        settings = training(again, POINTS)
        dice.told[:] = again.told
        if rank is not None:
            where = {"rank": rank, "world_size": 2, "init_method": f"file://{folder}/store"}
            torch.distributed.init_process_group("gloo", **where)
        ensemble = again.chance(0.2)
        guide = pd.Ensemble(model, members=3, seed=1) if ensemble else pd.AutoDropout(model, keep=1.0)
        settings |= {"batch_size": settings["batch_size"] and 6, "compile": False, "distributed": rank is not None}
        losses = fitted(model, guide, x, y, settings).losses
        return {"losses": losses} | state_of(model, guide)

    def child(rank: int, folder: str) -> None:
        try:
            torch.save(run(rank, folder), f"{folder}/{rank}.pt")
            torch.distributed.destroy_process_group()
        except Exception as error:
            Path(folder, f"{rank}.txt").write_text(f"{type(error).__name__}: {error}", "utf-8")
        finally:
            os._exit(0)  # what the parent has open is its own

    with tempfile.TemporaryDirectory() as folder:
        context = multiprocessing.get_context("fork")  # imports take longer than the case
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            started = [context.Process(target=child, args=(rank, folder)) for rank in (0, 1)]
            for process in started:
                process.start()
        for process in started:
            process.join(120)
            process.terminate()
        paths = [Path(folder) / f"{rank}.pt" for rank in (0, 1)]
        if not all(path.exists() for path in paths):
            said = [path.read_text("utf-8") for path in Path(folder).glob("*.txt")]
            return f"a rank did not come back: {said}"
        found = [torch.load(path, weights_only=True) for path in paths]
        alone = run(None, folder)
    return differing(found[0], alone, rounding(alone)) or differing(found[1], found[0], 0.0)


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
