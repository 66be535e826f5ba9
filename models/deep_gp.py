"""A deep Gaussian process written out by hand, with dropout as its posterior: ``python models/deep_gp.py``.

A Gaussian process with a covariance estimated from K draws is a layer of K hidden units (§3.1), and a process of a
process is two (§4.5). In weight space, where F = ΦWᵀ with W ~ N(0, I) stands for F ~ N(0, ΦΦᵀ):

    Φ1 = √(1/K1) σ(x W1ᵀ + b1)    F1 = Φ1 W2ᵀ        the first process, with K2 outputs
    Φ2 = √(1/K2) σ(F1 + b2)       F2 = Φ2 W3ᵀ        the second, observed through y
"""

import pyro
import pyro.distributions as dist
import torch
from experiments.curve_and_moons import NOISE, run
from pyro.infer import SVI, TraceMeanField_ELBO
from tqdm import trange

import pyro_dropout as pdrop

K1, K2 = 60, 40  # Monte Carlo terms of the two covariances: hidden units
LENGTH_SCALE = 0.3  # l and l'; the shorter, the more a function may vary


# --- the model: p(W) and p(y | x, W) ----------------------------------------------------------------------------------
def deep_gp(x, outputs):
    """Draw the deep Gaussian process at x from the prior: F2, (N, outputs)."""
    W1 = pyro.sample("W1", dist.Normal(0.0, 1 / LENGTH_SCALE).expand([K1, x.shape[1]]).to_event(2))
    b1 = pyro.sample("b1", dist.Normal(0.0, 1 / LENGTH_SCALE).expand([K1]).to_event(1))
    W2 = pyro.sample("W2", dist.Normal(0.0, 1.0).expand([K2, K1]).to_event(2))
    b2 = pyro.sample("b2", dist.Normal(0.0, 1 / LENGTH_SCALE).expand([K2]).to_event(1))
    W3 = pyro.sample("W3", dist.Normal(0.0, 1.0).expand([outputs, K2]).to_event(2))
    Phi1 = K1**-0.5 * torch.tanh(x @ W1.T + b1)  # §3.1: Φ1Φ1ᵀ estimates the first covariance
    F1 = Phi1 @ W2.T
    Phi2 = K2**-0.5 * torch.tanh(F1 + b2)  # §4.5: the second covariance takes F1 directly, so it has no weights
    return Phi2 @ W3.T


def regression(x, y=None):
    f = pyro.deterministic("f", deep_gp(x, 1))
    with pyro.plate("data", len(x)):
        pyro.sample("y", dist.Normal(f, NOISE).to_event(1), obs=y)  # eq. 4: y ~ N(f, τ⁻¹)


def classification(x, y=None):
    f = pyro.deterministic("f", deep_gp(x, 2))
    with pyro.plate("data", len(x)):
        pyro.sample("y", dist.Categorical(logits=f), obs=y)  # eq. 5: the softmax of f


# --- the posterior: q(W), and how it is fitted ------------------------------------------------------------------------
def fit(model, x, y, steps):
    """Return a guide q(W) that maximises E_q[log p(y | x, W)] - KL(q ‖ p), eq. 7."""
    # Eqs. 10-12: each row of W is a learned m with probability keep, and zero otherwise. W1, b1 and b2 are points.
    guide = pdrop.AutoDropout(model, keep={"W1": 1.0, "W2": 0.9, "W3": 0.9})
    optimiser = pyro.optim.ClippedAdam({"lr": 0.03, "lrd": 0.03 ** (1 / steps)})  # lr falls to 3 % of its start
    # Dropout's q has no density for Trace_ELBO to evaluate; this loss uses the KL in closed form, which exists.
    svi = SVI(model, guide, optimiser, TraceMeanField_ELBO())
    for _ in trange(steps, desc=model.__name__):
        svi.step(x, y)
    return guide


def main(argv=None):
    look = {"rows": 500, "title": "A deep GP (tanh) with dropout as its posterior", "reach": 4}
    run("deep_gp", __doc__, argv, regression, classification, fit, **look)


if __name__ == "__main__":
    main()
