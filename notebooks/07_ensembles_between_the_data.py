# %% [markdown]
# # Ensembles: uncertainty between the data
#
# Data with a hole in the middle. What should a network say in the hole? Many functions fit the data and cross the hole
# in different ways, so it should say "I do not know". In this problem MC dropout and mean field do not,
# and the band of a plain ensemble of 32 members is narrow everywhere. Members that are each tied to their own draw of
# the prior do.

# %%
import os
from collections.abc import Callable
from typing import Any

import arviz as az
import matplotlib.pyplot as plt
import torch
from torch import Tensor, nn

import pyro_dropout as pdrop

SHORT = os.environ.get("PYRO_DROPOUT_SHORT") == "1"
BLUE, VERMILION = "#0072B2", "#D55E00"
WIDTH, STEPS, SAMPLES = (50, 120, 100) if SHORT else (100, 600, 1000)
TAU, LENGTH = 100.0, 0.5  # noise of 0.1; first weights and biases have a standard deviation of 2

torch.manual_seed(0)
x = torch.cat([torch.linspace(-1.5, -0.6, 20), torch.linspace(0.6, 1.5, 20)]).unsqueeze(-1)
y = torch.cos(2.5 * x + 0.8) + TAU**-0.5 * torch.randn_like(x)
grid = torch.linspace(-2, 2, 161).unsqueeze(-1)
hole, data = (grid.abs() < 0.4).flatten(), ((grid.abs() > 0.7) & (grid.abs() < 1.4)).flatten()

# %% [markdown]
# ## 1. The answer of an infinitely wide network
#
# A layer of infinitely many ReLUs is a Gaussian process, whose posterior is known in closed form. Our network has
# only some of these units, and the same prior, and its own posterior was not sampled here. In the hole the GP's is
# several times as wide as on the data.


# %%
def fresh() -> pdrop.BayesianNet:
    """The network and its prior."""
    net = nn.Sequential(nn.Linear(1, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 1, bias=False))
    return pdrop.BayesianNet(net, pdrop.Prior(LENGTH, LENGTH), pdrop.Gaussian(TAU))


kernel = pdrop.paper.ArcCosine(1, length_scale=LENGTH, bias_length_scale=LENGTH)
gp = pdrop.generative.GP(kernel, TAU).fit(x, y, steps=0)
mean, variance = gp.predict(grid, noise=False)
bands: dict[str, tuple[Tensor, Tensor]] = {"exact GP": (mean[:, 0], variance[:, 0].sqrt())}


def ratio(name: str) -> float:
    """How wide f is in the hole, relative to its width on the data."""
    std = bands[name][1]
    return float(std[hole].mean() / std[data].mean())


print(
    f"the exact posterior of the infinitely wide network is {ratio('exact GP'):.1f} times as wide in the hole as on"
    " the data"
)
assert ratio("exact GP") > 3

# %% [markdown]
# ## 2. One guide
#
# MC dropout and mean field, on the same network and prior. Both are *surer* in the hole than on the data.


# %%
def fitted(name: str, make: Callable[[Any], Any], steps: int = STEPS) -> tuple[pdrop.BayesianNet, Any]:
    """Train a posterior of the network and keep its bands."""
    torch.manual_seed(0)
    model = fresh()
    posterior = make(model)
    falling = {"lr": 0.03, "schedule": lambda done: 1.01 - done / steps}
    pdrop.fit(model, posterior, x, y, steps=steps, compile=False, progress=False, seed=0, **falling)
    answer = pdrop.predict(model, posterior, grid, samples=SAMPLES, seed=0)
    bands[name] = answer.mean[:, 0], answer.epistemic[:, 0].sqrt()
    print(f"{name}: {ratio(name):.1f} times as wide in the hole as on the data")
    return model, posterior


def dropout(model: Any) -> pdrop.AutoDropout:
    """MC dropout that keeps the only input."""
    return pdrop.AutoDropout(model, keep=lambda site: 1.0 if site == "0.weight" else 0.9)


fitted("MC dropout", dropout)
fitted("mean field", lambda model: pdrop.AutoMeanField(model, init_scale=0.02))
assert ratio("MC dropout") < 1
assert ratio("mean field") < 1

# %% [markdown]
# ## 3. Two ensembles
#
# A plain ensemble trains the same network from many starts. Here all of them end at nearly the same function, that of a
# mode of the weights: its band is narrow everywhere. An anchored ensemble gives each member its own problem. It is
# pulled towards its own draw of the prior instead of towards zero, and its targets have noise added. On the data all
# members must agree; in the hole each follows its own draw.

# %%
fitted("plain ensemble", lambda model: pdrop.Ensemble(model, members=32, anchored=False, seed=0))
assert (bands["plain ensemble"][1] < bands["exact GP"][1]).all()
model, ensemble = fitted("anchored ensemble", lambda model: pdrop.Ensemble(model, members=32, start="anchor", seed=0))

# %% [markdown]
# How far the mean would still move with other members is `error_over_members`, which falls with the root of their
# number: here with the first eight, and with all.

# %%
f = model.evaluate(ensemble.draws_at(torch.arange(8)), grid)
few = (f.var(0, correction=0) / 8).sqrt()[hole].mean()
many = pdrop.predict(model, ensemble, grid).error_over_members[hole].mean()
print(f"{ensemble}: the mean in the hole is known to {many:.3f}, and with eight members to {few:.3f}")
print(f"it is {ratio('anchored ensemble'):.1f} times as wide in the hole as on the data")
assert many < few
assert ratio("anchored ensemble") > 3

figure, panels = plt.subplots(1, 5, figsize=(13, 3), sharex=True, sharey=True, layout="constrained")
exact, wide = bands["exact GP"]
for axes, (name, (mean, std)) in zip(panels, bands.items(), strict=True):
    axes.axvspan(-0.6, 0.6, color="0.93", lw=0)
    axes.fill_between(grid[:, 0], mean - 2 * std, mean + 2 * std, color=BLUE, alpha=0.3, lw=0, label="±2 std of f")
    axes.plot(grid[:, 0], mean, color=BLUE, lw=1.2, label="mean")
    for edge in (exact - 2 * wide, exact + 2 * wide):
        axes.plot(grid[:, 0], edge, "--", color="black", lw=0.8, label="exact" if edge[0] < exact[0] else None)
    axes.plot(x, y, ".", color=VERMILION, ms=3, label="data")
    axes.set(title=name, xlabel="x (grey: the hole)", ylim=(-2.7, 1.9))
panels[0].set_ylabel("f")
panels[0].legend(frameon=False, fontsize=7, loc="lower right")
plt.show()

# %% [markdown]
# ## 4. Do members agree? Ask R-hat
#
# In ArviZ each member is a chain, and R-hat compares the spread between members with that inside them. That needs
# members with a spread of their own, so here each one is an MC dropout network. Their weights have little in common:
# hidden units can be swapped, and they start apart. Their predictions of the data (noise of 0.1 included, which hides
# smaller differences) agree far better. A large R-hat of weights is no alarm for an ensemble; one of predictions at
# the data would be.

# %%
model, mixture = fitted("ensemble of MC dropout", lambda model: pdrop.Ensemble(model, dropout, members=4, seed=0))
draws = pdrop.to_arviz(model, mixture, x, y, samples=4 * SAMPLES, seed=0)
asked = {"weights": draws["posterior"]["2.weight"], "predictions": draws["posterior_predictive"]["y"]}
rhat = {name: az.rhat(values.to_dataset())[values.name] for name, values in asked.items()}
for name, values in rhat.items():
    print(f"R-hat of the {name}: median {float(values.median()):.2f}, largest {float(values.max()):.2f}")
assert float(rhat["weights"].median()) > 1.1 > float(rhat["predictions"].median())

# %% [markdown]
# What to take home: the uncertainty between the data comes from the prior, and here neither MC dropout nor mean field
# carries it there. This is one problem and one run; in the four problems of the page "Between the
# data" a linearised Laplace approximation, which is around one solution too, carries part of it, and in three of them
# less when its point is trained for longer. The page on ensembles says what anchored members are and when they fail.
