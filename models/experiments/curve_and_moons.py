"""The two problems of the models that are written by hand, a curve and two moons: their data, numbers and pictures."""

import argparse
import math
from collections.abc import Callable, Sequence
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from pyro.infer import Predictive
from torch import Tensor

NOISE = 0.1  # standard deviation of y around f: the precision is τ = 1/NOISE²
BLUE, ORANGE = "#0072B2", "#E69F00"  # Okabe and Ito's colour-blind-safe palette

Data = tuple[Tensor, Tensor]
Functions = Callable[[Tensor], Tensor]  # values of draws of f at inputs, (samples, N, outputs)


def curve(n: int) -> Data:
    """Return n points of a curve, (n, 1) each."""
    x = 3 * torch.rand(n, 1) - 1.5
    return x, x * torch.cos(2 * x) + NOISE * torch.randn(n, 1)


def moons(n: int) -> Data:
    """Return n points of two classes, (n, 2) and (n,): the upper half of one circle, the lower half of another."""
    y = torch.arange(n) % 2
    angle = math.pi * (torch.rand(n) + y)
    centres = torch.tensor([[-0.5, -0.25], [0.5, 0.25]])
    return centres[y] + torch.stack([angle.cos(), angle.sin()], -1) + 0.15 * torch.randn(n, 2), y


def report_regression(functions: Functions, train: Data, test: Data, path: str, title: str, reach: float) -> None:
    """Print the score of a posterior on the curve and its spread, and draw its mean, bands and five functions."""
    drawn = functions(test[0])
    log_p = dist.Normal(drawn, NOISE).log_prob(test[1])
    log_p = log_p.logsumexp(0) - math.log(len(drawn))  # eq. 6: p(y | x) is the average over q(W)
    x = torch.linspace(-4, 4, 321)
    f = functions(x[:, None])[..., 0]
    mean, std = f.mean(0), (f.var(0) + NOISE**2).sqrt()  # Prop. 4: the variance over draws, plus τ⁻¹
    print(f"test log-likelihood {log_p.mean():.3f} nats per point")
    print(f"mean predictive std {std[x.abs() < 1.5].mean():.3f} on data, {std[x.abs() > 1.5].mean():.3f} away from it")
    axes: Any = Figure(figsize=(8, 4.5), layout="constrained").subplots()
    for wide, alpha in ((2, 0.15), (1, 0.25)):
        axes.fill_between(x, mean - wide * std, mean + wide * std, color=BLUE, alpha=alpha, lw=0, label=f"±{wide} std")
    axes.plot(x, f[:5].mT, color=BLUE, lw=0.6, alpha=0.8, label=["five draws of f", *[None] * 4])
    axes.plot(x, mean, color=BLUE, lw=2, label="predictive mean")
    axes.plot(*train, ".", color="black", ms=4, label="data")
    axes.set(xlabel="x", ylabel="y", xlim=(-4, 4), ylim=(-reach, reach), title=title)
    axes.legend(frameon=False)
    axes.figure.savefig(path, dpi=120)


def report_classification(functions: Functions, train: Data, test: Data, path: str) -> None:
    """Print the score of a posterior on the moons and its spread, and draw the mean and spread of its probability."""
    drawn = functions(test[0])
    log_p = drawn.log_softmax(-1).logsumexp(0) - math.log(len(drawn))
    score, right = log_p.gather(1, test[1][:, None]).mean(), (log_p.argmax(1) == test[1]).float().mean()
    grid = torch.cartesian_prod(torch.linspace(-3, 3, 81), torch.linspace(-3, 3, 81))
    p = functions(grid).softmax(-1)[..., 1]
    mean, std, distance = p.mean(0), p.std(0), torch.cdist(grid, train[0]).amin(1)
    print(f"test accuracy {right:.3f}, log-likelihood {score:.3f} nats per point")
    print(f"mean std of p {std[distance < 0.2].mean():.3f} on data, {std[distance > 1].mean():.3f} away from it")
    means, stds = (values.reshape(81, 81).mT.numpy() for values in (mean, std))
    figure = Figure(figsize=(10, 4.4), layout="constrained")
    between = LinearSegmentedColormap.from_list("classes", ["#6CB0DC", "white", "#F3C766"])  # tints of the points
    maps: Any = (("mean of p(class 1 | x)", means, between, 1.0), ("std of p(class 1 | x)", stds, "Greys", 0.5))
    for axes, (what, values, cmap, top) in zip(figure.subplots(1, 2), maps, strict=True):
        where: Any = {"extent": (-3, 3, -3, 3), "origin": "lower"}
        image = axes.imshow(values, cmap=cmap, vmin=0, vmax=top, interpolation="bilinear", **where)
        axes.contour(means, [0.5], colors="black", **where)
        for label, colour in enumerate((BLUE, ORANGE)):
            axes.plot(*train[0][train[1] == label].T, "o", color=colour, mec="white", ms=4, mew=0.5, label=label)
        axes.set(xlabel="x₁", ylabel="x₂", title=what)
        axes.legend(title="class", loc="lower right")
        figure.colorbar(image, ax=axes)
    figure.savefig(path, dpi=120)


def run(
    name: str,
    about: str,
    argv: Sequence[str] | None,
    regression: Any,
    classification: Any,
    fit: Callable[..., Any],
    *,
    rows: int,
    title: str,
    reach: float,
) -> None:
    """Fit and report one of the two models of a script, of the curve and of the moons, as its options say."""
    parser = argparse.ArgumentParser(description=about.split("\n")[0])
    parser.add_argument("--task", choices=("regression", "classification"), default="regression")
    parser.add_argument("--steps", type=int, default=1200, help="optimiser steps")
    parser.add_argument("--quick", action="store_true", help="use few steps and draws, to check that it runs")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", default=f"{name}.png", metavar="FILE.png", help="where to save the plot")
    args = parser.parse_args(argv)
    pyro.set_rng_seed(args.seed)
    pyro.clear_param_store()
    is_curve, samples = args.task == "regression", 10 if args.quick else 300
    model, data = (regression, curve) if is_curve else (classification, moons)
    train, test = data(rows), data(500)
    guide = fit(model, *train, steps=30 if args.quick else args.steps)

    def functions(x: Tensor) -> Tensor:
        """Draw functions from the posterior, and return their values at x, (samples, N, outputs)."""
        drawn: Tensor = Predictive(model, guide=guide, num_samples=samples, return_sites=["f"])(x)["f"]
        return drawn.detach().reshape(samples, len(x), -1)

    if is_curve:
        report_regression(functions, train, test, args.out, title, reach)
    else:
        report_classification(functions, train, test, args.out)
