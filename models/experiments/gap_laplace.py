"""Laplace approximations on the problems with a gap: of the whole network, and a low-rank guide that starts from one.

The first predicts linearised: with draws it is too wide everywhere. The second is trained further and predicts with
draws, as the other guides do: read linearised, mean field has a ratio of 0.9 to 1.0 as well, and the two would not be
compared by their fit. The point is trained until ``pd.laplace`` finds it near a maximum, and no further: at the exact
maximum of the posterior the prior has switched units off, and with them goes the doubt in the gap. So the result
depends on the learning rate (``--laplace-rate``).
"""

import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Literal

import torch
from torch import Tensor

import pyro_dropout as pd

LAPLACE, LOW_RANK = "Laplace, linearised", "low rank from Laplace"
RANK = 60


def laplaced(
    kind: str, build: Callable[[], pd.BayesianNet], problems: list[SimpleNamespace], args: SimpleNamespace
) -> list[Tensor]:
    """Train from every seed on every problem; return mean and std of f, each (problem, seed, point)."""
    found = []
    for problem in problems:
        for seed in range(args.seed, args.seed + args.seeds):
            torch.manual_seed(seed)
            net = build()
            how = {"lr": args.laplace_rate, "schedule": lambda done: 1.02 - done / args.steps, "steps": args.steps}
            how |= {"compile": False, "progress": not args.quiet, "seed": seed}
            laplace = pd.AutoLaplace(net, "full")
            with warnings.catch_warnings():
                warnings.simplefilter("ignore" if args.quick else "default")  # a few steps do not find a maximum
                pd.fit(net, laplace, problem.x, problem.y, **how)
            guide = laplace if kind == LAPLACE else pd.AutoLowRank.nearest(laplace, rank=RANK)
            if kind == LOW_RANK:
                pd.fit(net, guide, problem.x, problem.y, **how)
            method: Literal["mc", "linearised"] = "linearised" if kind == LAPLACE else "mc"
            answer = pd.predict(net, guide, problem.asked, method=method, samples=args.samples, seed=seed)
            found.append(torch.stack([answer.mean[:, 0], answer.epistemic[:, 0].sqrt()]))
    return list(torch.stack(found, 1).unflatten(1, (len(problems), -1)))
