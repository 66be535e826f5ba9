# %% [markdown]
# # Many splits as one computation
#
# How much should be dropped, and how large is the noise? The honest way to find out: split the data many times, try
# all settings inside each training part, choose there, and look at the test part once. That is about a hundred
# trainings here, in two computations: each is a `Fleet`.

# %%
import math
import os

import matplotlib.pyplot as plt
import torch
from torch import Tensor, nn

import pyro_dropout as pdrop

SHORT = os.environ.get("PYRO_DROPOUT_SHORT") == "1"
BLUE, VERMILION, GREEN = "#0072B2", "#D55E00", "#009E73"
SPLITS, STEPS = (2, 100) if SHORT else (4, 400)
QUIET = {"compile": False, "progress": False}

# %% [markdown]
# ## 1. The data
#
# 400 rows from a formula with a wave, a product, a square, an input that says nothing, and noise of 0.3 to 0.7; and a
# few random splits into 90 % and 10 %.

# %%
torch.manual_seed(2016)
x = 2 * torch.rand(400, 5) - 1
a, b, c, d, _ = x.unbind(-1)
mean = 10 + 4 * torch.sin(math.pi * a) + 3 * b * c + 2 * d**2
y = (mean + (0.3 + 0.4 * a.abs()) * torch.randn(400)).unsqueeze(-1)
orders = [torch.randperm(400) for _ in range(SPLITS)]
train_rows, test_rows = [order[40:] for order in orders], [order[:40] for order in orders]
print(f"{len(x)} rows, {x.shape[1]} inputs; {SPLITS} splits of {len(train_rows[0])} and {len(test_rows[0])}")

# %% [markdown]
# ## 2. A `Fleet`, by hand
#
# A replica is a model and a guide, made by a function of its settings. Replicas may differ in numbers: in `keep`, τ,
# seeds, and in the rows that they see. They may not differ in structure.


# %%
def build(rows: Tensor, drop: float, tau: float = 10.0) -> tuple[pdrop.Standardised, pdrop.AutoDropout]:
    net = nn.Sequential(nn.Linear(5, 30), nn.ReLU(), nn.Linear(30, 1))
    model = pdrop.Standardised(pdrop.BayesianNet(net, pdrop.Prior(0.3, 0.3), pdrop.Gaussian(tau)), x[rows], y[rows])
    return model, pdrop.AutoDropout(model, keep={"0.weight": 1.0, "2.weight": 1 - drop})


DROPS = [0.005, 0.05, 0.4]
rows = torch.stack([train_rows[s] for s in range(SPLITS) for _ in DROPS])
torch.manual_seed(0)
fleet = pdrop.Fleet(
    lambda split, drop: build(train_rows[split], drop),
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
answer = pdrop.prediction.predict_fleet(fleet, x, y, indices=held, samples=200 if SHORT else 1000, seed=0)
error = (answer.mean - y[held]).square().mean((1, 2)).sqrt().view(SPLITS, len(DROPS))
for drop, column in zip(DROPS, error.T, strict=True):
    print(f"drop {drop:5.3f}: test RMSE {column.mean():.2f} ± {column.std():.2f} over splits")

model, guide = fleet[0]
alone = pdrop.predict(model, guide, x[held[0]], samples=200 if SHORT else 1000, seed=0)
assert (alone.mean - answer.mean[0]).abs().max() < 0.5

# %% [markdown]
# We have now looked at test errors for all settings, and may not choose by them any more. So:
#
# ## 3. Choosing honestly
#
# Every setting is trained on the folds of every training part *and* on the whole of it, all in one fleet. The folds
# choose what is dropped and the precision of the noise. The replica of the whole training part meets the test part,
# once.

# %%
SETTINGS = [(drop, tau) for drop in DROPS for tau in (3.0, 10.0)]
FOLDS = 2 if SHORT else 3
part = [own[: len(own) // FOLDS * FOLDS].view(FOLDS, -1) for own in train_rows]  # rows come in random order
learn = [torch.cat([fold[:k].flatten(), fold[k + 1 :].flatten()]) for fold in part for k in range(FOLDS)]
learn = [own.repeat(FOLDS)[: len(train_rows[0])] for own in learn]  # as many as the whole, so that N is the same
runs = [
    (rows, drop, tau)
    for split in range(SPLITS)
    for drop, tau in SETTINGS
    for rows in [*learn[split * FOLDS : (split + 1) * FOLDS], train_rows[split]]
]
torch.manual_seed(0)
fleet = pdrop.Fleet(build, {name: [run[k] for run in runs] for k, name in enumerate(("rows", "drop", "tau"))})
history = fleet.fit(x, y, indices=torch.stack([run[0] for run in runs]), steps=STEPS, lr=0.03, seed=0, **QUIET)
print(f"{len(fleet)} networks were trained together in {history.seconds:.1f} s")
assert not history.diverged.any()

place = torch.arange(len(fleet)).view(SPLITS, len(SETTINGS), FOLDS + 1)
held = torch.stack(part).unsqueeze(1).expand(-1, len(SETTINGS), -1, -1).flatten(0, 2)
folds = pdrop.prediction.predict_fleet(
    fleet.select(place[..., :-1].flatten().tolist()), x, y, indices=held, samples=300 if SHORT else 2000, seed=0
)
validation = folds.scores()["log_likelihood"].view(SPLITS, len(SETTINGS), FOLDS).mean(-1)
best = validation.argmax(1)
chosen = fleet.select(place[torch.arange(SPLITS), best, -1].tolist())
test = pdrop.prediction.predict_fleet(chosen, x, y, indices=torch.stack(list(test_rows)), samples=2000, seed=0).scores()
for split, choice in enumerate(best.tolist()):
    drop, tau = SETTINGS[choice]
    print(f"split {split}: drop {drop}, τ {tau:g}, test RMSE {test['rmse'][split]:.2f},", end=" ")
    print(f"log-likelihood {test['log_likelihood'][split]:.2f}")

assert 0.4 not in {SETTINGS[choice][0] for choice in best.tolist()}  # four tenths of 30 units is too much

# %%
figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.5), layout="constrained")
for line in validation.view(SPLITS, len(DROPS), -1).amax(-1):
    left.plot(range(len(DROPS)), line.tolist(), "o-", color=BLUE, alpha=0.5, ms=4)
left.set(xlabel="share of units that is dropped", ylabel="log-likelihood in the folds, nats a point")
left.set_title("Each line is a split")
left.set_xticks(range(len(DROPS)), [f"{drop:g}" for drop in DROPS])
right.bar(range(SPLITS), test["rmse"].tolist(), color=GREEN, label="chosen in the folds")
right.axhline(float(y.std()), color=VERMILION, ls="--", label="spread of y")
right.axhline(0.51, color="black", lw=0.8, label="noise of the formula, root mean square")
right.set(xlabel="split", ylabel="test RMSE", title="The chosen networks on their test parts")
right.set_xticks(range(SPLITS))
right.legend(frameon=False, fontsize="small")
plt.show()

# %% [markdown]
# ## 4. What it gained
#
# The choice is better than the spread of y by far. How much time a fleet saves, and on which machine, is in the
# benchmarks.

# %%
assert (test["rmse"] < 0.7 * y.std()).all()
