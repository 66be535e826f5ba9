"""The references of the benchmark: the posterior of every problem, by long runs of NUTS or exactly.

    python models/benchmark_references.py gap moons --chains 64

It writes a reference, to ``pyro_dropout/benchmark/data``, only if the R-hat of every quantity is at most 1.01, and its
effective sample size at least 4,000.
"""

import time
import warnings
from pathlib import Path

import torch
from experiments.experiment import Experiment
from torch import nn

import pyro_dropout as pdrop

BLOCK = 4_000  # draws whose quantities are computed together


def exact(problem, args):
    """Return the reference of a problem whose posterior is a Gaussian, with draws in two halves."""
    model = problem.make(0)
    posterior = pdrop.references.conjugate(model, *problem.arguments)
    weights = posterior.sample_weights(2 * args.samples)
    values = quantities(problem, model, weights).reshape(2, args.samples, -1)
    flat = torch.cat([part.flatten() for part in posterior.mean().values()])
    origin, at_mean, at_axes = (
        quantities(problem, model, parted(posterior.mean(), each))
        for each in (torch.zeros(1, len(flat)), flat[None], torch.eye(len(flat)))
    )
    linear = (at_axes - origin).double()
    variance = torch.einsum("ik,ij,jk->k", linear, posterior.covariance, linear)
    std = parted(posterior.mean(), posterior.covariance.diagonal().sqrt()[None])
    moments = {name: (value, std[name][0].float()) for name, value in posterior.mean().items()}
    given = {"mean": at_mean[0], "std": variance.sqrt(), "moments": moments}
    return values, "exact", given


def parts_of(count, most):
    """Return numbers of chains that run together, at most ``most`` and ``count`` in all."""
    return [min(most, count - done) for done in range(0, count, most)]


def parted(like, flat):
    """Return rows of all weights, (S, d), as weights by site."""
    sizes = [value.numel() for value in like.values()]
    parts = flat.split(sizes, -1)
    return {name: part.reshape(-1, *value.shape) for part, (name, value) in zip(parts, like.items(), strict=True)}


def sampled(problem, args, device):
    """Return the quantities in every draw of NUTS."""
    model, data = problem.make(0), [part.to(device) for part in problem.arguments]
    if isinstance(model, nn.Module):
        model.to(device)
    how = {"samples": args.samples, "warmup": args.warmup, **problem.nuts}
    runs = []
    for k, chains in enumerate(parts_of(args.chains, args.together or args.chains)):
        how |= {"chains": chains, "seed": args.seed + k}
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            runs.append(pdrop.nuts(model, *data, progress=not args.quiet, **how))
        for warning in told:
            print(f"{problem.name}: {warning.message}", flush=True)
    names = runs[0].weights
    weights = {name: torch.cat([run.weights[name].flatten(0, 1).cpu() for run in runs]) for name in names}
    values = quantities(problem, problem.make(0), weights).unflatten(0, (args.chains, -1))
    moments = {name: (value.mean(0), value.std(0)) for name, value in weights.items() if problem.identified}
    lost = sum(run.divergences for run in runs)
    made = {"divergences": lost, "nuts": how, "runs": len(runs), "device": str(device)}
    return values, f"NUTS, {args.chains} chains of {args.samples:,} draws", {"moments": moments, "made_with": made}


def quantities(problem, model, weights):
    """Return the quantities of a problem for all draws of its weights, block by block."""
    count = len(next(iter(weights.values())))
    blocks = [{name: value[k : k + BLOCK] for name, value in weights.items()} for k in range(0, count, BLOCK)]
    return torch.cat([problem.quantities(model, block) for block in blocks])


def main(argv=None):
    known = pdrop.benchmark.problems("full", unreferenced=True)
    experiment = Experiment("benchmark_references", __doc__)
    experiment.option("names", nargs="*", metavar="NAME", help="the problems; by default those without a reference")
    experiment.option("--chains", type=int, default=64, quick=2, help="chains of NUTS (64)")
    few = "chains that run together, each time with the next seed: few are faster on a CPU (all)"
    experiment.option("--together", type=int, help=few)
    experiment.option("--samples", type=int, default=1000, quick=10, help="draws of each chain (1000)")
    experiment.option("--warmup", type=int, default=1000, quick=10, help="draws of each chain before them (1000)")
    experiment.option("--folder", type=Path, help="where the files are written (the package)")
    args = experiment.start(argv)
    unknown = set(args.names) - set(known)
    if unknown:
        raise SystemExit(f"unknown problem {', '.join(sorted(unknown))}; choose from {', '.join(known)}")
    names = args.names or (["line"] if args.quick else list(pdrop.benchmark.missing_references()))
    rows = []
    for name in names:
        problem, began = known[name], time.perf_counter()
        values, how, given = exact(problem, args) if problem.exact else sampled(problem, args, experiment.device)
        seconds = time.perf_counter() - began
        made = {**given.pop("made_with", {}), "seed": args.seed, "seconds": round(seconds, 1)}
        reference = pdrop.benchmark.Reference.of(values, how, data=problem.data, made_with=made, **given)
        path = (args.folder or problem.path.parent) / problem.path.name
        if not (doubts := reference.doubts()) and not args.quick:
            reference.save(path)
        row = {"problem": name, "how": how, "R-hat": reference.rhat, "ESS": reference.ess, "seconds": seconds}
        rows.append({**row, "refused": " and ".join(doubts)})
        print(rows[-1], flush=True)
    experiment.table("References", rows)
    return experiment.finish()


if __name__ == "__main__":
    main()
