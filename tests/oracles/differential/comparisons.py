"""Two ways to the same answer, compared on a random case: each function returns how the answers differ, "" if not.

A refusal by name is an answer; one way may not refuse what another computes. What is random is compared in standard
errors: a difference beyond ``FAR`` of them is looked at again, with fresh and more numbers. On correct code a case has
at most 64 differences, so that it is looked at again with probability 4e-5, and reported with probability 1e-9.
"""

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pyro
import pyro.distributions as dist
import torch
from pyro.infer import SVI, Trace_ELBO
from pyro.infer.autoguide import AutoNormal
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

import pyro_dropout as pd
from tests.networks.agreement import largest_z, predicted, stochastic_passes
from tests.oracles.differential.drawn import Dice, Net, inputs
from tests.oracles.differential.trainings import apart, compiled, differing, engines, files, fleets, idioms

FAR = 5.0


# --- dropout ----------------------------------------------------------------------------------------------------------


def dropout(dice: Dice) -> str:
    """``from_dropout``, and stochastic passes through the network in training mode."""
    x = inputs(dice, 2, torch.float64)
    net = Net(dice, tuple(x.shape[1:]), 2, dropout=True).double()
    with torch.no_grad():
        for _ in range(3):
            net(torch.randn(16, *x.shape[1:], dtype=torch.float64))  # running statistics
    net.train(dice.chance(0.5))
    example, shared = dice.chance(0.7), dice.chance(0.3)
    dice.told += ["example" * example, "shared" * shared]
    try:
        model, guide = pd.from_dropout(net, example=x if example else None)
        found = predicted(model, guide, x, 300 if shared else 2000, shared)
    except pd.errors.PyroDropoutError as error:
        dice.told.append(f"refused: {error}"[:90])
        told = "example=x" in str(error) or "draws random numbers" in str(error)
        return "" if told else f"refused: {error}"
    if largest_z(stochastic_passes(net, x, 4000), found) < FAR:
        return ""
    samples = pd.predict(model, guide, x, samples=1500 if shared else 12000, shared=shared, keep_samples=True, seed=2)
    z = largest_z(stochastic_passes(net, x, 24000), samples.samples)
    return "" if z < FAR else f"means or variances differ by {z:.1f} standard errors"


# --- Pyro -------------------------------------------------------------------------------------------------------------


def script(dice: Dice) -> tuple[Callable[..., None], Tensor, Tensor, str]:
    """A model as a plain function, its data, and its kind."""
    size, points = dice.pick((1, 2, 3)), dice.pick((5, 20))
    kind = dice.pick(("line", "logistic", "positive"))
    x = torch.randn(points, size, dtype=torch.float64)
    y = x @ torch.randn(size, dtype=torch.float64) + 0.5 * torch.randn(points, dtype=torch.float64)

    def model(x: Tensor, y: Tensor) -> None:
        w = pyro.sample("w", dist.Normal(torch.zeros(size).double(), 1.0).to_event(1))
        width = pyro.sample("width", dist.Gamma(torch.tensor(3.0).double(), 4.0)) if kind == "positive" else 0.5
        f = (x * w).sum(-1)
        with pyro.plate("data", points):
            pyro.sample("y", dist.Bernoulli(logits=f) if kind == "logistic" else dist.Normal(f, width), obs=y)

    return model, x, (y > 0).double() if kind == "logistic" else y, kind


def by_svi(make: Any, model: Any, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    """Draws of a guide that Pyro's SVI has trained, without their transforms."""
    pyro.clear_param_store()
    torch.manual_seed(0)
    guide = make(model)
    # Not TraceMeanField_ELBO: it leaves out the Jacobian of AutoNormal's constrained sites.
    loss = Trace_ELBO(num_particles=16, vectorize_particles=True, max_plate_nesting=1)
    svi = SVI(model, guide, pyro.optim.ClippedAdam({"lr": 0.1, "lrd": 0.01 ** (1 / 900)}), loss)
    for _ in range(900):
        svi.step(x, y)
    with torch.no_grad(), pyro.plate("draws", 4000, dim=-2):
        return {name: value.double().reshape(4000, -1) for name, value in guide(x, y).items() if name in ("w", "width")}


def off(ours: dict[str, Tensor], theirs: dict[str, Tensor], limit: float) -> str:
    """How far means and widths of draws are apart, in standard deviations."""
    for name, other in theirs.items():
        shift = ((ours[name].mean(0) - other.mean(0)) / other.std(0)).abs().max()
        wide = (ours[name].std(0) / other.std(0)).log().abs().max()
        if not max(shift, wide) < limit:
            return f"{name} is off by {shift:.2f} standard deviations, its width by {wide:.2f}"
    return ""


def scripts(dice: Dice) -> str:
    """A guide of ours and Pyro's AutoNormal in Pyro's SVI, and the exact mean where there is one."""
    model, x, y, kind = script(dice)
    ours = by_svi(pd.AutoMeanField, model, x, y)
    # 4,000 draws, and the end of a noisy optimisation: a quarter of a standard deviation is far beyond both.
    told = off(ours, by_svi(AutoNormal, model, x, y), 0.25)
    if kind != "line" or told:
        return told
    precision = torch.eye(x.shape[1]).double() + 4.0 * x.mT @ x
    exact = torch.linalg.solve(precision, 4.0 * x.mT @ y)
    shift = float(((ours["w"].mean(0) - exact) * precision.diagonal().sqrt()).abs().max())
    return "" if shift < 0.3 else f"w is off by {shift:.2f} standard deviations from the exact posterior"


def chains(dice: Dice) -> str:
    """A full-rank guide of ours in Pyro's SVI, and NUTS: at least 200 draws are independent, four standard errors."""
    model, x, y, kind = script(dice)
    drawn = pd.nuts(model, x, y, samples=400, warmup=200, chains=1, seed=0, progress=False).sample_weights(400)
    theirs = {name: value.double().reshape(len(value), -1) for name, value in drawn.items()}
    # What is not normal is not in the family: its widths may differ.
    return off(by_svi(pd.AutoFullRank, model, x, y), theirs, 0.3 if kind == "line" else 0.6)


# --- tables and loaders -----------------------------------------------------------------------------------------------


def tables(dice: Dice) -> str:
    """Predictions of a frame, of its CSV file, and of a loader of its rows."""
    rng = np.random.default_rng(dice.randrange(2**31))
    columns: dict[str, Any] = {
        "size": rng.normal(size=50).round(dice.pick((1, 3, 15))), "count": rng.integers(0, 30, 50),
        "town": rng.choice(["Rom", "Ulm, Donau", 'a "b"'], 50), "day": pandas.date_range("2024-01-01", periods=50),
        "open": rng.random(50) < 0.5,
    }  # fmt: skip
    used = dice.sample(sorted(columns), dice.randint(2, 5))
    frame = pandas.DataFrame({name: columns[name] for name in used})
    if dice.chance(0.5) and "size" in frame:
        frame.loc[rng.random(50) < 0.2, "size"] = np.nan
    kind = dice.pick(("number", "class"))
    frame["y"] = rng.normal(size=50) if kind == "number" else rng.choice(["yes", "no"], 50)
    dice.told += used
    guide = dice.pick(("dropout", "mean-field", "low-rank"))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "table.csv"
        frame.to_csv(path, index=False)
        fitted = [pd.fit_table(data, "y", guide=guide, steps=15, progress=False, seed=1) for data in (frame, path)]
        answers = [f.predict(data) for f in fitted for data in (frame, path, str(path))]
        numbers = [each.select_dtypes("number").to_numpy() for each in answers]
        far = max(apart(each, numbers[0]) for each in numbers)
        _, x = fitted[0]._read(frame)
    if not far < 1e-5:
        return f"answers of a frame and of its file differ by {far:.1e}"
    one, size = fitted[0], dice.randint(1, 50)
    asked: Any = {"samples": 20, "seed": 0, "shared": True}
    whole = pd.predict(one.model, one.guide, x, **asked)
    parts = pd.predict(one.model, one.guide, DataLoader(TensorDataset(x), batch_size=size), **asked)
    return differing({"mean": parts.mean}, {"mean": whole.mean}, 1e-5)


COMPARISONS: dict[str, Callable[[Dice], str]] = {
    each.__name__: each for each in (engines, compiled, dropout, scripts, chains, tables, files, fleets, idioms)
}
