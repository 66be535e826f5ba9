# %% [markdown]
# # From your trained network to ArviZ
#
# You have a network with dropout, and it is trained. This notebook takes two such networks, a small one for numbers
# and a residual one for pictures, both written in plain torch. Nothing is trained again. `from_dropout` reads them as
# models with posteriors, `to_arviz` hands the result to ArviZ, and from there on the tools are ArviZ's.

# %%
import os
import warnings

import arviz as az
import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pyro_dropout as pdrop

SHORT = os.environ.get("PYRO_DROPOUT_SHORT") == "1"
BLUE, VERMILION = "#0072B2", "#D55E00"
torch.manual_seed(0)

# %% [markdown]
# ## 1. A network for numbers, trained elsewhere
#
# Any loop of any library will do. Here it is ten lines of torch.

# %%
x = 2 * torch.rand(150, 2) - 1
y = torch.sin(3 * x[:, :1]) + x[:, 1:].square() + 0.1 * torch.randn(150, 1)
net = nn.Sequential(nn.Linear(2, 40), nn.Tanh(), nn.Dropout(0.05), nn.Linear(40, 1))
optimiser = torch.optim.Adam(net.parameters(), lr=0.02, weight_decay=1e-5)
for _ in range(400 if SHORT else 2000):
    optimiser.zero_grad()
    F.mse_loss(net(x), y).backward()
    optimiser.step()

# %% [markdown]
# ## 2. Read it as a model and a posterior
#
# τ is the precision of the noise. If you do not know it, `refit_tau` finds the one under which held-out targets are
# most probable; here we hold back nothing and know that it is 100.

# %%
model, guide = pdrop.from_dropout(net, tau=100.0, length_scale=0.1)
answer = pdrop.predict(model, guide, x, samples=500 if SHORT else 2000, seed=0)
with torch.no_grad():
    assert torch.allclose(answer.mean, net.eval()(x), atol=0.1)
print(answer)
noise, spread = (float(part.mean()) ** 0.5 for part in (answer.aleatoric, answer.epistemic))
print(f"noise {noise:.3f}, standard deviation of the function {spread:.3f}")

# %% [markdown]
# ## 3. Into ArviZ
#
# Each draw is a whole function: one set of weights for all points. The groups are those that ArviZ knows.

# %%
data = pdrop.to_arviz(model, guide, x, y, samples=200 if SHORT else 1000, seed=0)
groups = ("posterior", "posterior_predictive", "log_likelihood", "observed_data", "sample_stats")
for group in groups:
    print(group, {name: dict(values.sizes) for name, values in data[group].data_vars.items()})
assert all(group in data for group in groups) or set(groups) <= set(data.groups())

# %% [markdown]
# `sample_stats` has log p(y, w) and no log q: at σ = 0 dropout has no density, and the export says so in place of
# making one up.

# %%
print(data["sample_stats"].attrs["log_q"])
assert "log_q" not in data["sample_stats"].data_vars

# %% [markdown]
# A summary of the output layer. A dropped weight is zero, so a weight's spread is that of a coin: √(0.95 · 0.05)
# times its size.

# %%
table = az.summary(data, var_names=["3.weight"], kind="stats", round_to=3)
print(table.head(5))
M = guide.mean()["3.weight"].flatten() / 0.95
coin = (0.95 * 0.05) ** 0.5 * M.abs()
assert (torch.tensor(table["sd"].to_numpy()) - coin).abs().max() < 0.35 * coin.max()

# %% [markdown]
# And plots: what the model would have said, beside what was seen; and the weights that move most.

# %%
predictive = data["posterior_predictive"]["y"].to_numpy()[0]
figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.4), layout="constrained")
for draw in predictive[:40]:
    grid, density = az.kde(draw.ravel())
    left.plot(grid, density, color=BLUE, alpha=0.15, lw=0.8)
grid, density = az.kde(y.numpy().ravel())
left.plot(grid, density, color="black", lw=1.8, label="observed")
left.plot([], [], color=BLUE, label="forty draws of all targets")
left.set(xlabel="y", ylabel="density", title="Posterior predictive check")
left.legend(frameon=False, fontsize="small")
az.plot_forest(data, var_names=["3.weight"], combined=True, ax=right, colors=BLUE, markersize=3, textsize=6)
right.set(title="Output weights", xlabel="weight")
right.set_yticks([])
plt.show()

# %% [markdown]
# ## 4. What not to ask
#
# Leave-one-out cross-validation from these draws takes it for granted that they come from the exact posterior. They
# come from q. Here k̂, which says whether a point's number can be trusted, is above 0.7 at most points, so they cannot
# be trusted in any case, and the library warns. The correction for q needs its density, which does not exist at σ = 0,
# so `pdrop.loo` refuses it. Hold data back instead.

# %%
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    found = pdrop.loo(model, guide, x, y, samples=200 if SHORT else 1000, approximate=False, seed=0)
print(found)
print(said[0].message)
assert (found.khat > 0.7).float().mean() > 0.5
try:
    pdrop.loo(model, guide, x, y, samples=100, seed=0)
except pdrop.errors.SingularError as refusal:
    print("refused:", str(refusal).split(".")[0])
else:
    raise AssertionError("q has no density at σ = 0")

# %% [markdown]
# ## 5. A residual network for pictures
#
# Convolutions, batch normalisation, skip connections; dropout of whole channels before the second convolution of each
# block, and of units before the last layer. It is plain torch, and knows nothing of this library.


# %%
class Block(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(channels)
        self.drop = nn.Dropout2d(0.1)
        self.second = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.second(self.drop(F.relu(self.norm(self.first(x))))))


class ResNet(nn.Module):
    def __init__(self, channels: int = 8, classes: int = 4) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, channels, 3, stride=2, padding=1)
        self.blocks = nn.Sequential(Block(channels), Block(channels))
        self.drop = nn.Dropout(0.2)
        self.head = nn.Linear(channels, classes)

    def forward(self, x: Tensor) -> Tensor:
        features = self.blocks(F.relu(self.stem(x))).mean((-2, -1))
        return self.head(self.drop(features))


def stripes(n: int) -> tuple[Tensor, Tensor]:
    """Stripes in four directions, with noise; the class is the direction."""
    label = torch.randint(4, (n,))
    angle = (label * torch.pi / 4).view(-1, 1, 1) + 0.1 * torch.randn(n, 1, 1)
    across = torch.arange(12.0)
    wave = across.view(1, 1, -1) * angle.cos() + across.view(1, -1, 1) * angle.sin()
    return (torch.sin(1.6 * wave + 6 * torch.rand(n, 1, 1)) + 1.2 * torch.randn(n, 12, 12)).unsqueeze(1), label


images, labels = stripes(400)
resnet = ResNet().train()
optimiser = torch.optim.Adam(resnet.parameters(), lr=0.01)
for step in range(60 if SHORT else 300):
    batch = torch.arange(64) + 64 * (step % 6)
    optimiser.zero_grad()
    F.cross_entropy(resnet(images[batch]), labels[batch]).backward()
    optimiser.step()

# %%
model, guide = pdrop.from_dropout(resnet.eval(), likelihood=pdrop.Categorical(), length_scale=0.1)
new, truth = stripes(200)
answer = pdrop.predict(model, guide, new, samples=100 if SHORT else 500, seed=0)
accuracy = float((answer.probs.argmax(-1) == truth).float().mean())
print(f"accuracy {accuracy:.2f} with four classes")
assert accuracy > 0.5

# %% [markdown]
# The pair says what stochastic passes of the network itself say: dropout on, batch normalisation frozen.

# %%
for module in resnet.modules():
    if isinstance(module, nn.Dropout | nn.Dropout2d):
        module.train()
T = 100 if SHORT else 500
with torch.no_grad():
    by_hand = torch.stack([resnet(new).softmax(-1) for _ in range(T)])
p = (by_hand.mean(0) + answer.probs) / 2
error = (2 / T * p * (1 - p)).sqrt() + 1e-3  # what lies between 0 and 1 has at most the variance of a coin
assert ((by_hand.mean(0) - answer.probs).abs() < 5 * error).all()

# %%
order = answer.mutual_information.argsort(descending=True)
figure, panels = plt.subplots(1, 8, figsize=(10, 1.9), layout="constrained")
for axes, index in zip(panels, [*order[:4], *order[-4:]], strict=True):
    axes.imshow(new[index, 0].numpy(), cmap="gray")
    axes.set_title(f"{float(answer.mutual_information[index]):.2g} nats", fontsize=9)
    axes.axis("off")
figure.suptitle("What the weights disagree on most (left four) and least (right four)", fontsize=10)
plt.show()

# %% [markdown]
# Dropout that is not on the rows of one weight, as behind the last layer, stays in the model: every pass draws it.
# What `from_dropout` cannot keep as it is, it refuses by name: here, noise that a whole batch shares.

# %%
print(pdrop.from_dropout(nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5)))[0].extra_repr())


class BatchNoise(nn.Module):
    """One number for all data points of a batch."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return x, scaled at random."""
        return x * torch.rand(()) if self.training else x


try:
    pdrop.from_dropout(nn.Sequential(nn.Linear(2, 2), BatchNoise()), example=torch.ones(2, 2))
except pdrop.errors.PyroDropoutError as refusal:
    print(refusal)
else:
    raise AssertionError("draws of one pass would not be independent")
