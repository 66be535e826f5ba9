# %% [markdown]
# # Calibration and deferral
#
# Uncertainty is useful if it is right on average (calibration), and if it is large where the answers are wrong
# (deferral). The two are different things, and a model may have one without the other. We look at both, first for
# numbers and then for classes. The networks are plain torch with dropout; the answers are ours.

# %%
import os

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn

import pyro_dropout as pdrop

SHORT = os.environ.get("PYRO_DROPOUT_SHORT") == "1"
BLUE, VERMILION, GREEN = "#0072B2", "#D55E00", "#009E73"
T = 200 if SHORT else 1000
torch.manual_seed(0)

# %% [markdown]
# ## 1. Numbers: do intervals hold what they promise?
#
# A wave with noise of standard deviation 0.2. We claim, wrongly, that the noise is 0.05.

# %%
x = 4 * torch.rand(300, 1) - 2
y = torch.sin(2 * x) + 0.2 * torch.randn_like(x)
(train_x, valid_x, test_x), (train_y, valid_y, test_y) = x.split(100), y.split(100)
net = nn.Sequential(nn.Linear(1, 50), nn.ReLU(), nn.Linear(50, 50), nn.ReLU(), nn.Dropout(0.02), nn.Linear(50, 1))
optimiser = torch.optim.Adam(net.parameters(), lr=0.01)
for _ in range(500 if SHORT else 1500):
    optimiser.zero_grad()
    F.mse_loss(net(train_x), train_y).backward()
    optimiser.step()

model, guide = pdrop.from_dropout(net, tau=0.05**-2)
claimed = pdrop.predict(model, guide, test_x, samples=T, seed=0)
curve = pdrop.judging.coverage_curve(claimed, test_y)
print(f"the 90 % interval holds {pdrop.coverage(claimed, test_y, 0.9):.0%} of the targets")
assert pdrop.coverage(claimed, test_y, 0.9) < 0.8

# %% [markdown]
# `refit_tau` chooses the noise under which held-out targets are most probable. The draws of the function stay as they
# are; only the noise around them changes, and nothing is trained again.

# %%
valid = pdrop.predict(model, guide, valid_x, samples=T, seed=0)
tau = pdrop.judging.refit_tau(valid, valid_y)
mended = pdrop.judging.with_tau(claimed, tau)
better = pdrop.judging.coverage_curve(mended, test_y)
print(f"noise {tau**-0.5:.3f}; the 90 % interval now holds {pdrop.coverage(mended, test_y, 0.9):.0%}")
before, after = (float(each.log_prob(test_y).mean()) for each in (claimed, mended))
print(f"log-likelihood of a test point: {before:.2f} before, {after:.2f} after")
assert better.error < curve.error
assert after > before

figure, axes = plt.subplots(figsize=(4.6, 4.2), layout="constrained")
axes.plot([0, 1], [0, 1], color="0.6", lw=0.8)
axes.plot(curve.levels, curve.coverage, "--", color=VERMILION, label=f"claimed noise, off by {curve.error:.2f}")
axes.plot(better.levels, better.coverage, color=BLUE, label=f"refitted noise, off by {better.error:.2f}")
axes.set(xlabel="level of the interval", ylabel="share of targets inside", title="Coverage")
axes.legend(frameon=False)
plt.show()

# %% [markdown]
# ## 2. Classes: is 80 % sure right in 80 % of cases?
#
# Handwritten digits of scikit-learn, 8 × 8 pixels, with a lot of noise, so that mistakes happen. The network that
# we train here on 400 of them believes too firmly.

# %%
digits = load_digits()
order = torch.randperm(len(digits.images))[:1000]
images, labels = torch.tensor(digits.images, dtype=torch.float32)[order] / 16, torch.tensor(digits.target)[order]
images = images + 0.3 * torch.randn(images.shape)
parts = [slice(0, 400), slice(400, 700), slice(700, 1000)]
(train_x, valid_x, test_x), (train_y, valid_y, test_y) = ([each[part] for part in parts] for each in (images, labels))
net = nn.Sequential(nn.Flatten(), nn.Linear(64, 100), nn.ReLU(), nn.Dropout(0.1), nn.Linear(100, 10))
optimiser = torch.optim.Adam(net.parameters(), lr=0.003)
for _ in range(200 if SHORT else 500):
    optimiser.zero_grad()
    F.cross_entropy(net(train_x), train_y).backward()
    optimiser.step()

model, guide = pdrop.from_dropout(net, likelihood=pdrop.Categorical())
answer = pdrop.predict(model, guide, test_x, samples=T, seed=0)
right = (answer.probs.argmax(-1) == test_y).float()
table = pdrop.judging.reliability(answer, test_y, bins=10)
print(f"accuracy {right.mean():.2f}, mean confidence {answer.probs.amax(-1).mean():.2f}, ECE {table.ece:.3f}")
assert answer.probs.amax(-1).mean() > right.mean() + 0.05  # overconfident, dropout or not

# %% [markdown]
# One number, a temperature fitted on held-out images, lowers that. It changes no decision between two
# classes of one draw, and it is fitted, so it holds for data like the validation set and promises nothing for others.

# %%
valid = pdrop.predict(model, guide, valid_x, samples=T, seed=0)
temperature = pdrop.judging.refit_temperature(valid, valid_y)
cooler = pdrop.judging.tempered(answer, temperature)
after = pdrop.judging.reliability(cooler, test_y, bins=10)
print(f"temperature {temperature:.2f}, ECE {after.ece:.3f}")
print(f"log-likelihood {answer.log_prob(test_y).mean():.3f} before, {cooler.log_prob(test_y).mean():.3f} after")
assert temperature > 1
assert after.ece < table.ece
assert cooler.log_prob(test_y).mean() > answer.log_prob(test_y).mean()

# %% [markdown]
# ## 3. Deferral: pass the least certain ones to a human
#
# If a person can look at a fifth of the images, which fifth? Those with the largest entropy. The curve shows the
# accuracy on the rest, beside that of an oracle, which knows the mistakes, and of chance.

# %%
curve = pdrop.judging.rejection_curve(answer.entropy, right)
deferred = pdrop.defer(answer.entropy, budget=0.2)
before, kept = float(right.mean()), float(right[~deferred].mean())
caught = float((1 - right[deferred]).sum() / (1 - right).sum())
print(f"accuracy {before:.2f} on all, {kept:.2f} on the four fifths that are kept")
print(f"{caught:.0%} of the mistakes were deferred")
assert int(deferred.sum()) == 60
assert kept > before
assert caught > 0.2  # a fifth, by chance

figure, axes = plt.subplots(figsize=(6, 3.6), layout="constrained")
curve.plot(axes)
plt.show()

# %%
order = answer.entropy.argsort(descending=True)
figure, panels = plt.subplots(2, 8, figsize=(10, 3.2), layout="constrained")
for axes, index in zip(panels.flat, [*order[:8], *order[-8:]], strict=True):
    axes.imshow(test_x[index].numpy(), cmap="gray_r")
    axes.set_title(f"{answer.entropy[index]:.2g} nats", fontsize=9)
    axes.axis("off")
figure.suptitle("The eight that are deferred first, and the eight that are kept longest", fontsize=10)
plt.show()

# %% [markdown]
# Note what deferral did not need: calibration. A temperature changes little here: the decision is the same for more
# than 80 % of the images, where chance gives 68 %. Calibration makes a number mean what it says; deferral needs only
# the order.

# %%
again = pdrop.defer(cooler.entropy, budget=0.2)
agreement = float((again == deferred).float().mean())
print(f"the tempered model defers the same images in {agreement:.0%} of cases")
assert agreement > 0.8  # 0.2² + 0.8² = 0.68, by chance
