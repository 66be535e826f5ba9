"""A deep Gaussian process written out by hand, with dropout as its posterior: ``python models/deep_gp.py``.

A Gaussian process with a covariance estimated from K draws is a layer of K hidden units (§3.1), and a process of a
process is two (§4.5). In weight space, where F = ΦWᵀ with W ~ N(0, I) stands for F ~ N(0, ΦΦᵀ):

    Φ1 = √(1/K1) σ(x W1ᵀ + b1)    F1 = Φ1 W2ᵀ        the first process, with K2 outputs
    Φ2 = √(1/K2) σ(F1 + b2)       F2 = Φ2 W3ᵀ        the second, observed through y
"""

import argparse
import math

import pyro
import pyro.distributions as dist
import torch
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from pyro.infer import SVI, Predictive, TraceMeanField_ELBO
from tqdm import trange

import pyro_dropout as pd

K1, K2 = 60, 40  # Monte Carlo terms of the two covariances: hidden units
LENGTH_SCALE = 0.3  # l and l'; the shorter, the more a function may vary
NOISE = 0.1  # standard deviation of y around f: the precision is τ = 1/NOISE²
BLUE, ORANGE = "#0072B2", "#E69F00"  # Okabe and Ito's colour-blind-safe palette


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


# --- the posterior: q(W), how it is fitted, and what it predicts ------------------------------------------------------
def fit(model, x, y, steps):
    """Return a guide q(W) that maximises E_q[log p(y | x, W)] - KL(q ‖ p), eq. 7."""
    # Eqs. 10-12: each row of W is a learned m with probability keep, and zero otherwise. W1, b1 and b2 are points.
    guide = pd.AutoDropout(model, keep={"W1": 1.0, "W2": 0.9, "W3": 0.9})
    optimiser = pyro.optim.ClippedAdam({"lr": 0.03, "lrd": 0.03 ** (1 / steps)})  # lr falls to 3 % of its start
    # Dropout's q has no density for Trace_ELBO to evaluate; this loss uses the KL in closed form, which exists.
    svi = SVI(model, guide, optimiser, TraceMeanField_ELBO())
    for _ in trange(steps, desc=model.__name__):
        svi.step(x, y)
    return guide


def functions(model, guide, x, samples):
    """Draw functions from the posterior and return their values at x, (samples, N, outputs)."""
    drawn = Predictive(model, guide=guide, num_samples=samples, return_sites=["f"])(x)["f"]
    return drawn.detach().reshape(samples, len(x), -1)


# --- two problems: a curve, and two moons -----------------------------------------------------------------------------
def curve(n):
    x = 3 * torch.rand(n, 1) - 1.5
    return x, x * torch.cos(2 * x) + NOISE * torch.randn(n, 1)


def moons(n):
    y = torch.arange(n) % 2
    angle = math.pi * (torch.rand(n) + y)  # the upper half of one circle, the lower half of the other
    centres = torch.tensor([[-0.5, -0.25], [0.5, 0.25]])
    return centres[y] + torch.stack([angle.cos(), angle.sin()], -1) + 0.15 * torch.randn(n, 2), y


def report_regression(guide, train, test, samples, path):
    log_p = dist.Normal(functions(regression, guide, test[0], samples), NOISE).log_prob(test[1])
    log_p = log_p.logsumexp(0) - math.log(samples)  # eq. 6: p(y | x) is the average over q(W)
    x = torch.linspace(-4, 4, 321)
    f = functions(regression, guide, x[:, None], samples)[..., 0]
    mean, std = f.mean(0), (f.var(0) + NOISE**2).sqrt()  # Prop. 4: the variance over draws, plus τ⁻¹
    print(f"test log-likelihood {log_p.mean():.3f} nats per point")
    print(f"mean predictive std {std[x.abs() < 1.5].mean():.3f} on data, {std[x.abs() > 1.5].mean():.3f} away from it")
    axes = Figure(figsize=(8, 4.5), layout="constrained").subplots()
    for wide, alpha in ((2, 0.15), (1, 0.25)):
        axes.fill_between(x, mean - wide * std, mean + wide * std, color=BLUE, alpha=alpha, lw=0, label=f"±{wide} std")
    axes.plot(x, f[:5].mT, color=BLUE, lw=0.6, alpha=0.8, label=["five draws of f", *[None] * 4])
    axes.plot(x, mean, color=BLUE, lw=2, label="predictive mean")
    axes.plot(*train, ".", color="black", ms=4, label="data")
    axes.set(xlabel="x", ylabel="y", xlim=(-4, 4), ylim=(-4, 4), title="A deep GP (tanh) with dropout as its posterior")
    axes.legend(frameon=False)
    axes.figure.savefig(path, dpi=120)


def report_classification(guide, train, test, samples, path):
    log_p = functions(classification, guide, test[0], samples).log_softmax(-1).logsumexp(0) - math.log(samples)
    score, right = log_p.gather(1, test[1][:, None]).mean(), (log_p.argmax(1) == test[1]).float().mean()
    grid = torch.cartesian_prod(torch.linspace(-3, 3, 81), torch.linspace(-3, 3, 81))
    p = functions(classification, guide, grid, samples).softmax(-1)[..., 1]
    mean, std, distance = p.mean(0), p.std(0), torch.cdist(grid, train[0]).amin(1)
    print(f"test accuracy {right:.3f}, log-likelihood {score:.3f} nats per point")
    print(f"mean std of p {std[distance < 0.2].mean():.3f} on data, {std[distance > 1].mean():.3f} away from it")
    mean, std = (values.reshape(81, 81).mT.numpy() for values in (mean, std))
    figure = Figure(figsize=(10, 4.4), layout="constrained")
    between = LinearSegmentedColormap.from_list("classes", ["#6CB0DC", "white", "#F3C766"])  # tints of the points
    maps = (("mean of p(class 1 | x)", mean, between, 1.0), ("std of p(class 1 | x)", std, "Greys", 0.5))
    for axes, (title, values, cmap, top) in zip(figure.subplots(1, 2), maps, strict=True):
        where = {"extent": (-3, 3, -3, 3), "origin": "lower"}
        image = axes.imshow(values, cmap=cmap, vmin=0, vmax=top, interpolation="bilinear", **where)
        axes.contour(mean, [0.5], colors="black", **where)
        for label, colour in enumerate((BLUE, ORANGE)):
            axes.plot(*train[0][train[1] == label].T, "o", color=colour, mec="white", ms=4, mew=0.4, label=label)
        axes.set(xlabel="x₁", ylabel="x₂", title=title)
        axes.legend(title="class", loc="lower right")
        figure.colorbar(image, ax=axes)
    figure.savefig(path, dpi=120)


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--task", choices=("regression", "classification"), default="regression")
    parser.add_argument("--steps", type=int, default=1200, help="optimiser steps")
    parser.add_argument("--quick", action="store_true", help="use few steps and draws, to check that it runs")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", default="deep_gp.png", metavar="FILE.png", help="where to save the plot")
    args = parser.parse_args(argv)
    pyro.set_rng_seed(args.seed)
    pyro.clear_param_store()
    model, data, report = regression, curve, report_regression
    if args.task == "classification":
        model, data, report = classification, moons, report_classification
    train, test = data(500), data(500)
    guide = fit(model, *train, steps=30 if args.quick else args.steps)
    report(guide, train, test, 10 if args.quick else 300, args.out)


if __name__ == "__main__":
    main()
