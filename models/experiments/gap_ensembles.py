"""Ensembles on the problems with a gap: anchored points, plain points, and members that are MC dropout."""

from collections.abc import Callable
from types import SimpleNamespace

import torch
from torch import Tensor

import pyro_dropout as pd

KINDS = ("ensemble", "plain ensemble", "ensemble of dropout")


def ensemble(kind: str, net: pd.BayesianNet, keep: Callable[[str], float], members: int) -> pd.Ensemble:
    """Return an untrained ensemble of this kind."""
    if kind == "ensemble of dropout":
        return pd.Ensemble(net, lambda model: pd.AutoDropout(model, keep), members)
    anchored = kind == "ensemble"
    return pd.Ensemble(net, None, members, anchored, start="anchor" if anchored else "fresh")


def ensembled(
    kind: str,
    build: Callable[[], pd.BayesianNet],
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
            pd.fit(net, posterior, problem.x, problem.y, steps=steps, compile=False, progress=not args.quiet, **how)
            answer = pd.predict(net, posterior, problem.asked, samples=args.samples, seed=seed)
            found.append(torch.stack([answer.mean[:, 0], answer.epistemic[:, 0].sqrt()]).cpu())
    return list(torch.stack(found, 1).unflatten(1, (len(problems), -1)))
