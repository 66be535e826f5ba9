# %% [markdown]
# # A fleet over splits
#
# How much should be dropped, and how large is the noise? The honest way to find out: split the data many times, try
# all settings inside each training part, choose there, and look at the test part once. That is hundreds of trainings.
# Here they are one computation.

# %%
import os

import matplotlib.pyplot as plt
import torch
from torch import Tensor, nn

import pyro_dropout as pd
from pyro_dropout.datasets.made_data import made_regression
from pyro_dropout.judging.selection import choose

SHORT = os.environ.get("PYRO_DROPOUT_SHORT") == "1"
BLUE, VERMILION, GREEN = "#0072B2", "#D55E00", "#009E73"
SPLITS, STEPS = (2, 100) if SHORT else (4, 400)
QUIET = {"compile": False, "progress": False}

# %% [markdown]
# ## 1. The data
#
# The set that `experiments.collection.uci` gives where no data folder is named: 400 rows that a formula
# made, with a wave, a product, a square, an input that says nothing, and noise of 0.3 to 0.7. Twenty splits come with
# it; we take a few.

# %%
x, y, train_rows, test_rows = made_regression()
train_rows, test_rows = train_rows[:SPLITS], test_rows[:SPLITS]
print(f"{len(x)} rows, {x.shape[1]} inputs; {SPLITS} splits of {len(train_rows[0])} and {len(test_rows[0])}")

# %% [markdown]
# ## 2. A fleet, by hand
#
# A replica is a model and a guide, made by a function of its settings. Replicas may differ in numbers: in `keep`, τ,
# seeds, and in the rows that they see. They may not differ in structure.


# %%
def build(x: Tensor, y: Tensor, drop: float) -> tuple[pd.Standardised, pd.AutoDropout]:
    net = nn.Sequential(nn.Linear(5, 30), nn.ReLU(), nn.Linear(30, 1))
    model = pd.Standardised(pd.BayesianNet(net, pd.Prior(0.3, 0.3), pd.Gaussian(tau=10.0)), x, y)
    return model, pd.AutoDropout(model, keep={"0.weight": 1.0, "2.weight": 1 - drop})


DROPS = [0.005, 0.05, 0.4]
rows = torch.stack([train_rows[s] for s in range(SPLITS) for _ in DROPS])
torch.manual_seed(0)
fleet = pd.Fleet(
    lambda split, drop: build(x[train_rows[split]], y[train_rows[split]], drop),
    {"split": [s for s in range(SPLITS) for _ in DROPS], "drop": DROPS * SPLITS},
)
history = fleet.fit(x, y, indices=rows, steps=STEPS, lr=0.03, seed=0, **QUIET)
print(f"{len(fleet)} networks, {history.steps} steps each, in {history.seconds:.1f} s")
assert history.losses.shape == (STEPS, len(fleet))
assert (history.losses[-10:].mean(0) < history.losses[:10].mean(0)).all()

# %% [markdown]
# Each replica is an ordinary pair again, `fleet[k]`. `predict_fleet` asks all of them at once, each about its own
# rows.

# %%
held = torch.stack([test_rows[s] for s in range(SPLITS) for _ in DROPS])
answer = pd.predict_fleet(fleet, x, y, indices=held, samples=200 if SHORT else 1000, seed=0)
error = (answer.mean - y[held]).square().mean((1, 2)).sqrt().view(SPLITS, len(DROPS))
for drop, column in zip(DROPS, error.T, strict=True):
    print(f"drop {drop:5.3f}: test RMSE {column.mean():.2f} ± {column.std():.2f} over splits")

model, guide = fleet[0]
alone = pd.predict(model, guide, x[held[0]], samples=200 if SHORT else 1000, seed=0)
assert (alone.mean - answer.mean[0]).abs().max() < 0.5

# %% [markdown]
# We have now looked at test errors for all settings, and may not choose by them any more. So:
#
# ## 3. Choosing honestly
#
# `choose` trains every setting on every fold of every split *and* on the whole training part, all in one fleet. The
# folds choose the setting and the noise. The replica of the whole training part meets the test part, once.

# %%
found = choose(
    build,
    {"drop": DROPS},
    x,
    y,
    train_rows,
    test_rows,
    folds=2 if SHORT else 3,
    samples=300 if SHORT else 2000,
    steps=STEPS,
    lr=0.03,
    seed=0,
    **QUIET,
)
print(f"{found.replicas} networks were trained together in {found.seconds:.1f} s; {found.lost} were lost")
for split, (setting, tau) in enumerate(zip(found.settings, found.tau.tolist(), strict=True)):
    print(f"split {split}: drop {setting['drop']}, noise {tau**-0.5:.2f}, test RMSE {found.rmse[split]:.2f},", end=" ")
    print(f"log-likelihood {found.log_likelihood[split]:.2f}")

assert found.replicas == SPLITS * len(DROPS) * ((2 if SHORT else 3) + 1)
assert found.lost == 0
assert 0.4 not in {setting["drop"] for setting in found.settings}  # four tenths of 30 units is too much

# %%
figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.5), layout="constrained")
for line in found.validation:
    left.plot(range(len(DROPS)), line.tolist(), "o-", color=BLUE, alpha=0.5, ms=4)
left.set(xlabel="share of units that is dropped", ylabel="log-likelihood in the folds, nats a point")
left.set_title("Each line is a split")
left.set_xticks(range(len(DROPS)), [f"{drop:g}" for drop in DROPS])
right.bar(range(SPLITS), found.rmse.tolist(), color=GREEN, label="chosen in the folds")
right.axhline(float(y.std()), color=VERMILION, ls="--", label="spread of y")
right.axhline(0.52, color="black", lw=0.8, label="noise of the formula, on average")
right.set(xlabel="split", ylabel="test RMSE", title="The test parts, seen once")
right.set_xticks(range(SPLITS))
right.legend(frameon=False, fontsize="small")
plt.show()

# %% [markdown]
# ## 4. What it gained
#
# The choice is better than the spread of y by far, and its noise is near that of the formula plus what the network
# could not fit. How much time a fleet saves, and on which machine, is in the benchmarks.

# %%
assert (found.rmse < 0.7 * y.std()).all()
assert ((found.tau**-0.5 > 0.3) & (found.tau**-0.5 < 1.5)).all()
