"""Ensembles and Laplace approximations on the problems with a gap.

A Laplace approximation predicts linearised: with draws its test scores are far lower (``why_gaussian``). The low-rank
guide that starts from one is trained further and predicts with draws, as the other guides do. The point is trained
until ``pdrop.laplace`` finds it near a maximum, and no further: at the maximum itself (``--steps 20000``) the doubt in
the gap is far smaller, so the result depends on when training stops, and on the learning rate (``--laplace-rate``).
"""

import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

import pyro_dropout as pdrop

Build = Callable[[], pdrop.BayesianNet]
Keep = Callable[[str], float]
Problems = list[SimpleNamespace]
KINDS = ("ensemble", "plain ensemble", "ensemble of dropout")


def ensembled(kind: str, build: Build, keep: Keep, problems: Problems, args: Any) -> list[Tensor]:
    """Train ensembles from every seed on every problem; return mean and std of f, each (problem, seed, point)."""
    steps, anchored, found = args.ensemble_steps, kind == "ensemble", []
    for problem in problems:
        for seed in range(args.seed, args.seed + args.seeds):
            torch.manual_seed(seed)
            net = build()
            if kind == "ensemble of dropout":
                posterior = pdrop.Ensemble(net, lambda model: pdrop.AutoDropout(model, keep), args.members)
            else:
                start: Any = "anchor" if anchored else "fresh"
                posterior = pdrop.Ensemble(net, None, args.members, anchored, start=start)
            how = {"lr": args.ensemble_rate, "schedule": lambda done: 1.02 - done / steps, "seed": seed}
            pdrop.fit(net, posterior, problem.x, problem.y, steps=steps, compile=False, progress=not args.quiet, **how)
            answer = pdrop.predict(net, posterior, problem.asked, samples=args.samples, seed=seed)
            found.append(torch.stack([answer.mean[:, 0], answer.epistemic[:, 0].sqrt()]).cpu())
    return list(torch.stack(found, 1).unflatten(1, (len(problems), -1)))


LAPLACE, LOW_RANK = "Laplace, linearised", "low rank from Laplace"
RANK = 60


def laplaced(kind: str, build: Build, problems: Problems, args: Any) -> list[Tensor]:
    """Train from every seed on every problem; return mean and std of f, each (problem, seed, point)."""
    found = []
    for problem in problems:
        for seed in range(args.seed, args.seed + args.seeds):
            torch.manual_seed(seed)
            net = build()
            how = {"lr": args.laplace_rate, "schedule": lambda done: 1.02 - done / args.steps, "steps": args.steps}
            how |= {"compile": False, "progress": not args.quiet, "seed": seed}
            laplace = pdrop.guides.AutoLaplace(net, "full")
            with warnings.catch_warnings():
                warnings.simplefilter("ignore" if args.quick else "default")  # a few steps do not find a maximum
                pdrop.fit(net, laplace, problem.x, problem.y, **{**how, "compile": "auto"})  # a point draws nothing
            guide = laplace if kind == LAPLACE else pdrop.AutoLowRank.nearest(laplace, rank=RANK)
            if kind == LOW_RANK:
                pdrop.fit(net, guide, problem.x, problem.y, **how)
            method: Any = "linearised" if kind == LAPLACE else "mc"
            answer = pdrop.predict(net, guide, problem.asked, method=method, samples=args.samples, seed=seed)
            found.append(torch.stack([answer.mean[:, 0], answer.epistemic[:, 0].sqrt()]))
    return list(torch.stack(found, 1).unflatten(1, (len(problems), -1)))
