"""Ensembles and Laplace approximations on the problems with a gap.

A Laplace approximation predicts linearised: with draws its test scores are far lower (``why_gaussian``). The low-rank
guide that starts from one is trained further and predicts with draws, as the other guides do. The point is trained
until ``pdrop.laplace`` finds it near a maximum, and no further: at the maximum itself (``--steps 20000``) the doubt in
the gap is far smaller, so the result depends on when training stops, and on the learning rate (``--laplace-rate``).
"""

import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Literal

import torch
from torch import Tensor

import pyro_dropout as pdrop

KINDS = ("ensemble", "plain ensemble", "ensemble of dropout")


def ensemble(kind: str, net: pdrop.BayesianNet, keep: Callable[[str], float], members: int) -> pdrop.Ensemble:
    """Return an untrained ensemble of this kind."""
    if kind == "ensemble of dropout":
        return pdrop.Ensemble(net, lambda model: pdrop.AutoDropout(model, keep), members)
    anchored = kind == "ensemble"
    return pdrop.Ensemble(net, None, members, anchored, start="anchor" if anchored else "fresh")


def ensembled(
    kind: str,
    build: Callable[[], pdrop.BayesianNet],
    keep: Callable[[str], float],
    problems: list[SimpleNamespace],
    args: SimpleNamespace,
) -> list[Tensor]:
    """Train ensembles from every seed on every problem; return mean and std of f, each (problem, seed, point)."""
    steps, found = args.ensemble_steps, []
    for problem in problems:
        for seed in range(args.seed, args.seed + args.seeds):
            torch.manual_seed(seed)
            net = build()
            posterior = ensemble(kind, net, keep, args.members)
            how = {"lr": args.ensemble_rate, "schedule": lambda done: 1.02 - done / steps, "seed": seed}
            pdrop.fit(net, posterior, problem.x, problem.y, steps=steps, compile=False, progress=not args.quiet, **how)
            answer = pdrop.predict(net, posterior, problem.asked, samples=args.samples, seed=seed)
            found.append(torch.stack([answer.mean[:, 0], answer.epistemic[:, 0].sqrt()]).cpu())
    return list(torch.stack(found, 1).unflatten(1, (len(problems), -1)))


LAPLACE, LOW_RANK = "Laplace, linearised", "low rank from Laplace"
RANK = 60


def laplaced(
    kind: str, build: Callable[[], pdrop.BayesianNet], problems: list[SimpleNamespace], args: SimpleNamespace
) -> list[Tensor]:
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
            method: Literal["mc", "linearised"] = "linearised" if kind == LAPLACE else "mc"
            answer = pdrop.predict(net, guide, problem.asked, method=method, samples=args.samples, seed=seed)
            found.append(torch.stack([answer.mean[:, 0], answer.epistemic[:, 0].sqrt()]))
    return list(torch.stack(found, 1).unflatten(1, (len(problems), -1)))
