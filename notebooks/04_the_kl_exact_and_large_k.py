# %% [markdown]
# # The KL, exact and for large K
#
# Dropout's q(w) is a mixture of two Gaussians in every row of a weight matrix. The paper says that the KL of a
# mixture against the prior has no closed form, and approximates it for rows with many weights K. This notebook shows
# what the approximation leaves out, that it can be computed after all, and when you may forget about it.

# %%
import math
import os

import matplotlib.pyplot as plt
import torch

import pyro_dropout as pdrop

SHORT = os.environ.get("PYRO_DROPOUT_SHORT") == "1"
BLUE, VERMILION, GREEN = "#0072B2", "#D55E00", "#009E73"
torch.set_default_dtype(torch.float64)
prior = torch.distributions.Normal(0.0, 1.0)

# %% [markdown]
# ## 1. One weight, one row
#
# q = 0.9 N(m, σ²) + 0.1 N(0, σ²). For one weight the KL is an integral over a line, so we can do it by hand on a fine
# grid and share no code with the library.

# %%
keep, sigma = 0.9, 1.0
w = torch.linspace(-14, 18, 40_001)


def by_hand(m: float) -> float:
    kept, dropped = (torch.distributions.Normal(centre, sigma).log_prob(w).exp() for centre in (m, 0.0))
    q = keep * kept + (1 - keep) * dropped
    return float(torch.trapezoid(q * (q.log() - prior.log_prob(w)), w))


def row(m: float, K: int = 1) -> pdrop.paper.BernoulliMixture:
    return pdrop.paper.BernoulliMixture(torch.full((K, 1), m), keep=keep, scale=sigma)


means = torch.linspace(0, 6, 25)
large_k = torch.stack([pdrop.paper.kl(row(float(m)), prior, "large_k") for m in means])
exact = torch.stack([pdrop.paper.kl(row(float(m)), prior, "exact") for m in means])
integral = torch.tensor([by_hand(float(m)) for m in means])
gap = torch.stack([pdrop.paper.kl_gap(row(float(m))) for m in means])

figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.6), layout="constrained")
left.plot(means, exact, color=BLUE, label="exact")
left.plot(means, integral, "o", color="black", ms=3, label="integrated by hand")
left.plot(means, large_k, "--", color=VERMILION, label="large K")
left.axhline(0, color="0.7", lw=0.8)
left.set(xlabel="m / σ", ylabel="KL in nats", xlim=(0, 3), ylim=(-0.5, 4.5), title="One weight")
left.legend(frameon=False)
right.semilogy(means, gap, color=GREEN)
right.set(xlabel="m / σ", ylabel="exact − large K, nats", title="The gap")
plt.show()

assert (exact - integral).abs().max() < 1e-9
assert (large_k + gap - exact).abs().max() < 1e-12

# %% [markdown]
# The approximation lies *below* the KL. At m = 0 the two components coincide, q is the prior, the KL is 0, and the
# large-K form is −0.325: minus the entropy of a coin that shows heads nine times in ten. A negative KL is a sign that
# an ELBO made with it can exceed the evidence.

# %%
coin = -(keep * math.log(keep) + (1 - keep) * math.log(1 - keep))
assert abs(float(large_k[0]) + coin) < 1e-12
assert abs(float(exact[0])) < 1e-12

# %% [markdown]
# ## 2. What the gap is
#
# Let z say whether the row was kept. The gap is E[H(z|w)]: the entropy of the mask that is left when you have seen
# the weights. If the components are far apart, the weights give the mask away and nothing is left. So we can also
# *estimate* the gap: draw weights, ask how sure one can be of z, average.

# %%
draws = 20_000 if SHORT else 200_000
torch.manual_seed(0)
m = 2.0
kept = torch.rand(draws) < keep
weights = torch.where(kept, m, 0.0) + sigma * torch.randn(draws)
log_odds = math.log(keep / (1 - keep)) + (m * weights - 0.5 * m**2) / sigma**2
entropy = torch.distributions.Bernoulli(logits=log_odds).entropy()
estimate, error = float(entropy.mean()), float(entropy.std()) / draws**0.5
print(f"sampled {estimate:.4f} ± {error:.4f}, computed {float(pdrop.paper.kl_gap(row(m))):.4f}")
assert abs(estimate - float(pdrop.paper.kl_gap(row(m)))) < 5 * error

# %% [markdown]
# ## 3. It is not K that matters
#
# A row of K weights enters the gap through one number, the separation d = ‖m‖/σ. With K weights of size 2/√K the
# separation is 2, whatever K is, and so is the gap. A wide row that training has shrunk is no better than a narrow
# one.

# %%
same_d = torch.stack([pdrop.paper.kl_gap(row(2.0 / K**0.5, K)) for K in (1, 10, 100, 1000, 10_000)])
print([f"{float(value):.6f}" for value in same_d])
assert same_d.max() - same_d.min() < 1e-10

# %% [markdown]
# ## 4. When may you use the large-K form?
#
# Left: the gap against d. Right: the gap against K, for rows whose means come from the prior. Under the grey line the
# gap is a ten-thousandth of a nat, and nobody will miss it.

# %%
pdrop.comparison.plot_kl_gap(draws=20 if SHORT else 400)

# %% [markdown]
# The rule: **beyond d = 8 every row may use it**, and the bound 2 log 2 · √(p(1−p)) · exp(−d²/8) says how much is
# lost at most. Below, or if you do not know, ask for `method="exact"`: it costs one quadrature a row.

# %%
for p in (0.5, 0.9, 0.99):
    for d in (2.0, 4.0, 8.0):
        q = pdrop.paper.BernoulliMixture(torch.tensor([[d]]), keep=p, scale=1.0)
        assert pdrop.paper.kl_gap(q) <= 2 * math.log(2) * (p * (1 - p)) ** 0.5 * math.exp(-(d**2) / 8)
    assert pdrop.paper.kl_gap(q) < 1e-4 + 1e-12

# %% [markdown]
# ## 5. Does it change what is learned?
#
# Gradients in the means hardly notice the gap where components are apart. A *comparison* does: between guides,
# between widths, between values of `keep`. Take rows with m = 0 and σ = 1. Whatever `keep` is, q is the prior, and
# its KL is 0. The large-K form sees it otherwise, and would choose `keep` = 0.5, for no reason but its own error.

# %%
keeps = torch.linspace(0.5, 0.99, 50)


def at(keep: torch.Tensor, method: str) -> torch.Tensor:
    return pdrop.paper.kl(pdrop.paper.BernoulliMixture(torch.zeros(5, 1), keep=keep, scale=1.0), prior, method)


said = torch.stack([at(keep, "large_k") for keep in keeps])
true = torch.stack([at(keep, "exact") for keep in keeps])
assert true.abs().max() < 1e-10  # all of these are the prior
assert keeps[said.argmin()] == 0.5  # and the large-K form prefers one of them
print(f"the large-K form claims {float(said.min()):.3f} to {float(said.max()):.3f} for the same distribution")
torch.set_default_dtype(torch.float32)
