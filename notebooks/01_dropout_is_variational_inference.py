# %% [markdown]
# # Dropout is variational inference
#
# You train a network with dropout and a little weight decay. Gal and Ghahramani (2015) say that you have been doing
# variational inference all the time. This notebook takes one such network and checks the sentence, number by number.
# No step below is an analogy: each ends in an assertion.

# %%
import os

import matplotlib.pyplot as plt
import torch
from pyro import poutine
from torch import nn

import pyro_dropout as pdrop

SHORT = os.environ.get("PYRO_DROPOUT_SHORT") == "1"
BLUE, VERMILION = "#0072B2", "#D55E00"
torch.manual_seed(0)

# %% [markdown]
# ## 1. A network as everybody writes it
#
# Two stretches of a curve, a network with `nn.Dropout(0.1)` before its last two layers, half the mean squared error,
# and `weight_decay` in the optimiser. Only the value of the weight decay is unusual: it is computed from a prior N(0,
# l⁻²) and a noise precision τ, layer by layer. `torch.optim` adds its number to the gradient, so it is 2λ and not λ.

# %%
DROP, TAU, LENGTH_SCALE = 0.1, 100.0, 0.5
x = torch.cat([torch.linspace(-2, -0.75, 60), torch.linspace(0.75, 2, 60)]).unsqueeze(-1)
y = x + 0.6 * torch.sin(3 * x) + TAU**-0.5 * torch.randn_like(x)

net = nn.Sequential(
    nn.Linear(1, 50), nn.ReLU(), nn.Dropout(DROP), nn.Linear(50, 50), nn.ReLU(), nn.Dropout(DROP), nn.Linear(50, 1)
)
keeps = {"3.weight": 1 - DROP, "6.weight": 1 - DROP}  # everything else is never dropped


def decay(name: str) -> float:
    # torch multiplies what it keeps by 1/keep, so that its weights are keep times the paper's M: ‖M‖² = ‖w‖²/keep².
    return pdrop.paper.optimizer_weight_decay(keeps.get(name, 1.0), TAU, len(x), LENGTH_SCALE, rescaled=True)


groups = [{"params": [parameter], "weight_decay": decay(name)} for name, parameter in net.named_parameters()]
optimiser = torch.optim.Adam(groups, lr=0.01)
for _ in range(800 if SHORT else 3000):
    optimiser.zero_grad()
    (0.5 * (net(x) - y).square().mean()).backward()
    optimiser.step()

# %% [markdown]
# ## 2. The same network as a model and a posterior
#
# `from_dropout` reads the network as the paper does. The *model* is the network without dropout, with a prior on its
# weights and Gaussian noise. The *guide* is q(w): each row of a weight matrix is kept, with probability 0.9, or is
# zero.

# %%
model, guide = pdrop.from_dropout(net, tau=TAU, length_scale=LENGTH_SCALE)
for site in ("3.weight", "6.weight"):
    print(site, guide.posterior(site))

# %% [markdown]
# Stochastic forward passes through your network, and functions drawn from this posterior, are two names for one
# thing. We draw a few thousand of each, and compare their means and spreads at every point of a grid.

# %%
T = 2000 if SHORT else 10_000
grid = torch.linspace(-4, 4, 81).unsqueeze(-1)
net.train()
with torch.no_grad():
    passes = net(grid.repeat(T, 1)).view(T, -1)
answer = pdrop.predict(model, guide, grid, samples=T, seed=0)
mean, std = answer.mean.squeeze(-1), answer.epistemic.sqrt().squeeze(-1)

standard_error = std * (2 / T) ** 0.5
assert ((passes.mean(0) - mean).abs() < 5 * standard_error).all()
assert ((passes.std(0) / std - 1).abs() < 0.2).all()

figure, axes = plt.subplots(figsize=(8, 3.6), layout="constrained")
axes.fill_between(grid[:, 0], mean - 2 * std, mean + 2 * std, color=BLUE, alpha=0.2, lw=0, label="±2 std of f, guide")
axes.plot(grid[:, 0], mean, color=BLUE, label="mean of f, guide")
for side in (-2, 2):
    label = "±2 std, forward passes in torch" if side > 0 else None
    axes.plot(grid[:, 0], passes.mean(0) + side * passes.std(0), ":", color=VERMILION, label=label)
axes.plot(x, y, ".", color="black", ms=3, label="data")
axes.set(xlabel="x", ylabel="y", title="One posterior, drawn in two ways")
axes.legend(frameon=False, fontsize="small", loc="upper left")
plt.show()

# %% [markdown]
# ## 3. The loss is minus the ELBO, up to a constant
#
# The dropout objective (the paper's eq. 3) is ½ of the mean squared error plus Σ λ‖M‖². Minus the ELBO is E[−log
# p(y|w)] + KL(q‖p). The claim: N·τ times the first is the second, up to a number that no weight moves. We move the
# weights to five random places. At each we draw the same masks for both, and subtract.

# %%
elbo = pdrop.ELBO(per_example=False)
names = list(guide.mean())
decays = [pdrop.paper.weight_decay(keeps.get(name, 1.0), TAU, len(x), LENGTH_SCALE) for name in names]


def difference(seed: int) -> tuple[float, float]:
    """Return minus the ELBO under one draw of the masks, and the same less N·τ times the dropout objective."""
    with torch.no_grad():
        torch.manual_seed(seed)
        loss = float(elbo.differentiable_loss(model, guide, x, y))
        torch.manual_seed(seed)
        drawn = poutine.trace(guide).get_trace(x, y)
        weights = {name: drawn.nodes[name]["value"] for name in names}
        M = [guide.mean()[name] / keeps.get(name, 1.0) for name in names]
        objective = pdrop.paper.dropout_objective(y, model.evaluate(weights, x), M, decays)
        return loss, loss - len(x) * TAU * float(objective)


losses, differences = [], []
for seed in range(5):
    with torch.no_grad():
        for parameter in guide.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    loss, rest = difference(seed)
    losses.append(loss)
    differences.append(rest)
    print(f"place {seed}: -ELBO {loss:12.2f}   less N·τ·objective {rest:10.3f}")

spread = max(differences) - min(differences)
assert spread < 1e-4 * (max(losses) - min(losses))

# %% [markdown]
# The left column moves by thousands, the right one stays. So gradients agree, and whoever has minimised the one has
# minimised the other. What the right number is: the normaliser of the noise, and the entropy of the masks. At σ = 0
# the constant has an infinite part as well, which `kl` leaves out: the number is no ELBO, and compares with no other
# guide.

# %%
rows = sum(guide.posterior(name).loc.shape[1] for name in keeps)
mask_entropy = -rows * sum(p * torch.tensor(p).log() for p in (DROP, 1 - DROP))
constant = -0.5 * len(x) * torch.tensor(TAU / (2 * torch.pi)).log() - mask_entropy
print(f"{float(constant):.3f}")
assert abs(float(constant) - differences[0]) < 0.1

# %% [markdown]
# ## What follows, and what does not
#
# The spread of stochastic forward passes is the spread of a posterior approximation: your weight decay fixes l²/τ.
# Once you choose the prior's length-scale l, it gives the noise precision τ. Whether q(w) is a *good* approximation is
# another question. `02_co2_in_one_guide_and_then_more` puts other choices of q(w) beside it, and the page "Gotchas"
# shows what the spread does not do: it need not shrink as data come in.
