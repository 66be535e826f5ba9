"""A Bayesian neural network written out by hand, with dropout as its posterior: ``python models/bnn.py``.

    W1 ~ N(0, l⁻²)    W2, W3 ~ N(0, 1)    b1, b2 ~ N(0, l'⁻²)           the prior
    f(x) = σ(σ(x W1ᵀ + b1) W2ᵀ + b2) W3ᵀ                                the network

The model is plain Pyro and does not mention dropout. Dropout is the guide, one choice of q(W) among others: replace it
with Pyro's ``AutoNormal(model)``, and the rest of the script runs unchanged.
"""

import pyro
import pyro.distributions as dist
import torch
from experiments.curve_and_moons import NOISE, run
from pyro.infer import SVI, TraceMeanField_ELBO
from tqdm import trange

import pyro_dropout as pdrop

K = 50  # hidden units in each layer
LENGTH_SCALE = 0.5  # l and l'; the shorter, the more a function may vary


# --- the model: p(W) and p(y | x, W) ----------------------------------------------------------------------------------
def network(x, outputs):
    """Draw all weights from the prior, and return the network's f(x), (N, outputs)."""
    W1 = pyro.sample("W1", dist.Normal(0.0, 1 / LENGTH_SCALE).expand([K, x.shape[1]]).to_event(2))
    b1 = pyro.sample("b1", dist.Normal(0.0, 1 / LENGTH_SCALE).expand([K]).to_event(1))
    W2 = pyro.sample("W2", dist.Normal(0.0, 1.0).expand([K, K]).to_event(2))
    b2 = pyro.sample("b2", dist.Normal(0.0, 1 / LENGTH_SCALE).expand([K]).to_event(1))
    W3 = pyro.sample("W3", dist.Normal(0.0, 1.0).expand([outputs, K]).to_event(2))
    h1 = torch.relu(x @ W1.T + b1)
    h2 = torch.relu(h1 @ W2.T + b2)
    return h2 @ W3.T


def regression(x, y=None):
    f = pyro.deterministic("f", network(x, 1))
    with pyro.plate("data", len(x)):
        pyro.sample("y", dist.Normal(f, NOISE).to_event(1), obs=y)  # eq. 4: y ~ N(f, τ⁻¹)


def classification(x, y=None):
    f = pyro.deterministic("f", network(x, 2))
    with pyro.plate("data", len(x)):
        pyro.sample("y", dist.Categorical(logits=f), obs=y)  # eq. 5: the softmax of f


# --- the posterior: q(W), and how it is fitted ------------------------------------------------------------------------
def fit(model, x, y, steps):
    """Return a guide q(W) that maximises E_q[log p(y | x, W)] - KL(q ‖ p), eq. 7."""
    # Eqs. 10-12: each row of W is a learned m with probability keep, and zero otherwise. x has too few columns to drop
    # one, so W1 is not dropped: it is a point estimate, like the biases.
    guide = pdrop.AutoDropout(model, keep={"W1": 1.0, "W2": 0.9, "W3": 0.9})
    optimiser = pyro.optim.ClippedAdam({"lr": 0.01, "lrd": 0.03 ** (1 / steps)})  # lr falls to 3 % of its start
    # Dropout's q has no density for Trace_ELBO to evaluate; this loss uses the KL in closed form, which exists.
    svi = SVI(model, guide, optimiser, TraceMeanField_ELBO())
    for _ in trange(steps, desc=model.__name__):
        svi.step(x, y)
    return guide


def main(argv=None):
    look = {"rows": 100, "title": "A ReLU network with dropout as its posterior", "reach": 7}
    run("bnn", __doc__, argv, regression, classification, fit, **look)


if __name__ == "__main__":
    main()
