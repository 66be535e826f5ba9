"""How near are the posteriors of other libraries and papers? They enter the benchmark beside the guides of this one.

    python models/benchmark_contestants.py --suite full
    pyro-dropout benchmark models/benchmark_contestants.py:sgld models/benchmark_contestants.py:AutoIAFNormal

Pyro's guides are trained as all guides are. SWAG (Maddox et al., 2019) starts at a maximum a posteriori, with that of
a few learning rates that predicts the training data best; a deep ensemble (Lakshminarayanan et al., 2017) has ten
members without anchors; SGLD (Welling and Teh, 2011) has a constant step, mini-batches, and chains side by side. All
three are for networks.
"""

import contextlib

import torch
from experiments.experiment import Experiment
from pyro import poutine
from pyro.infer.autoguide import AutoIAFNormal, AutoLowRankMultivariateNormal, AutoMultivariateNormal, AutoNormal

import pyro_dropout as pdrop

RATES = (1e-3, 3e-4, 1e-4, 3e-5, 1e-5)  # of SWAG
BATCH = 10


def deep_ensemble(model):
    return pdrop.Ensemble(model, members=10, anchored=False)


def swag(model, data, steps=5000):
    point = pdrop.Ensemble(model, members=1, anchored=False)
    pdrop.fit(model, point, *data, steps=steps, lr=0.02, progress=False)
    how = {"rank": 20, "steps": steps, "batch_size": BATCH, "progress": False}
    found = {}
    for rate in RATES:
        with contextlib.suppress(pdrop.errors.DivergedError):
            guide = pdrop.swag(model, point.mean(), *data, lr=rate, **how)
            answer = pdrop.predict(model, guide, data[0], samples=200, shared=True)
            found[float(answer.log_prob(data[1]).mean())] = guide
    best = found[max(found)]
    best.gradients = steps * (len(data[0]) + BATCH * len(RATES))
    return best


def sgld(model, data, rate=1e-4, steps=5000, every=50, chains=20):
    x, y = data
    sites = poutine.trace(model).get_trace(x, y).nodes
    priors = {name: sites[name]["fn"] for name in model.sites}
    weights = {name: prior.sample((chains,)) for name, prior in priors.items()}
    kept = []
    for step in range(steps):
        own = {name: value.detach().requires_grad_() for name, value in weights.items()}
        rows = torch.randperm(len(x))[:BATCH]
        log_p = model.likelihood.distribution(model.evaluate(own, x[rows])).log_prob(y[rows]).sum() * len(x) / BATCH
        log_p = log_p + sum(priors[name].log_prob(value).sum() for name, value in own.items())
        slopes = zip(own.items(), torch.autograd.grad(log_p, list(own.values())), strict=True)
        weights = {k: w.detach() + rate / 2 * slope + rate**0.5 * torch.randn_like(w) for (k, w), slope in slopes}
        if step >= steps // 5 and step % every == 0:
            kept.append(weights)
    draws = [{name: value[c] for name, value in each.items()} for each in kept for c in range(chains)]
    found = pdrop.benchmark.from_state_dicts(draws)
    found.gradients = steps * BATCH * chains
    return found


PYRO = (AutoNormal, AutoMultivariateNormal, AutoLowRankMultivariateNormal, AutoIAFNormal)
OTHERS = (swag, deep_ensemble, sgld)


def main(argv=None):
    experiment = Experiment("benchmark_contestants", __doc__)
    experiment.option("--suite", choices=("small", "full"), default="small", help="which problems (small)")
    experiment.option("--problems", nargs="*", quick=["line"], metavar="NAME", help="some problems instead")
    experiment.option("--seeds", type=int, default=3, quick=1, help="runs of each posterior on each problem (3)")
    experiment.option("--steps", type=int, default=5000, quick=5, help="training steps of a guide (5000)")
    args = experiment.start(argv)
    own = list(pdrop.registry.guides())
    entries = ["mean-field", deep_ensemble] if args.quick else [*own, *PYRO, *OTHERS]
    how = {"problems": args.problems, "seeds": args.seeds, "steps": args.steps, "progress": not args.quiet}
    found = pdrop.benchmark.benchmark(entries, args.suite, out=args.out / "runs", **how)
    for name, problem in found.problems.items():
        experiment.table(problem.title, found.on(name).table)
    found.to_html(args.out / "report.html")
    return experiment.finish()


if __name__ == "__main__":
    main()
