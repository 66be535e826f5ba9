"""How near are the posteriors of other libraries and papers? They enter the benchmark beside the guides of this one.

    python models/benchmark_contestants.py --suite full
    pyro-dropout benchmark models/benchmark_contestants.py:sgld models/benchmark_contestants.py:AutoIAFNormal

Pyro's guides are trained as all guides are. SWAG (Maddox et al., 2019) starts at a maximum a posteriori, with that of a
few learning rates that predicts the training data best; a deep ensemble (Lakshminarayanan et al., 2017) has ten members
without anchors; SGLD (Welling and Teh, 2011) has a constant step, the first of 1e-4, 3e-5, ... that does not diverge,
mini-batches, and chains side by side. All three are for networks, and so is laplace-torch (Daxberger et al., 2021),
with a full Hessian, which takes part if it is installed. Guides that keep a matrix of all weights are left out where a
network has more than 1,000.
"""

import contextlib
import copy
from functools import partial
from importlib.util import find_spec

import torch
from experiments.experiment import Experiment
from pyro import poutine
from pyro.infer.autoguide import AutoIAFNormal, AutoLowRankMultivariateNormal, AutoMultivariateNormal, AutoNormal
from torch.utils.data import DataLoader, TensorDataset

import pyro_dropout as pdrop

RATES = (1e-3, 3e-4, 1e-4, 3e-5, 1e-5)  # of SWAG
BATCH = 10
MOST = 1000  # weights of a network for which a matrix of all of them is trained: for 3,301 that takes an hour


def up_to(guide, model):
    sites = model.sites if isinstance(model, pdrop.BayesianNet) else ()
    count = sum(model.prior_of(site).event_shape.numel() for site in sites)
    if count > MOST:
        raise pdrop.errors.PyroDropoutError(f"left out: the network has {count:,} weights, more than {MOST:,}.")
    return guide(model)


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


def networks_only(model):
    if not isinstance(model, pdrop.BayesianNet):
        raise pdrop.errors.PyroDropoutError("left out: it is for networks.")


def laplace_torch(model, data, steps=5000):
    from laplace import Laplace

    networks_only(model)
    point = pdrop.Ensemble(model, members=1, anchored=False)
    pdrop.fit(model, point, *data, steps=steps, lr=0.02, progress=False)
    net = copy.deepcopy(model.net)
    net.load_state_dict(net.state_dict() | point.mean())
    kind = {pdrop.Gaussian: "regression", pdrop.Categorical: "classification"}.get(type(model.likelihood))
    if kind is None:
        raise pdrop.errors.PyroDropoutError(f"left out: laplace-torch has no {type(model.likelihood).__name__}.")
    how = {"prior_precision": torch.cat([model.prior_of(site).variance.flatten() for site in model.sites]) ** -1}
    if kind == "regression":
        how["sigma_noise"] = float(model.likelihood.tau) ** -0.5
    found = Laplace(net, kind, subset_of_weights="all", hessian_structure="full", **how)
    found.fit(DataLoader(TensorDataset(*data), batch_size=len(data[0])))
    found.gradients = steps * len(data[0])
    return found


def sgld(model, data, rate=1e-4, steps=5000, every=50, chains=20):
    networks_only(model)
    x, y = data
    sites = poutine.trace(model).get_trace(x, y).nodes
    priors = {name: sites[name]["fn"] for name in model.sites}
    weights = {name: prior.sample((chains,)) for name, prior in priors.items()}
    kept = []
    for step in range(steps):
        if not all(value.isfinite().all() for value in weights.values()):
            return sgld(model, data, 0.3 * rate, steps, every, chains)
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


def mclmc(model, data):
    chains, warmup, samples, thin = 32, 1500, 100, 25
    how = {"chains": chains, "warmup": warmup, "samples": samples, "thin": thin, "progress": False}
    found = pdrop.mclmc(model, *data, seed=torch.initial_seed() % 2**31, **how)
    found.gradients = chains * (warmup + samples * thin) * len(data[0])
    return found


PYRO = (AutoNormal, AutoLowRankMultivariateNormal)
OTHERS = (swag, deep_ensemble, sgld, mclmc)
LARGE = {"full-rank": pdrop.AutoFullRank}
LARGE |= {guide.__name__: guide for guide in (AutoMultivariateNormal, AutoIAFNormal)}


def main(argv=None):
    experiment = Experiment("benchmark_contestants", __doc__)
    experiment.option("--suite", choices=("small", "full"), default="small", help="which problems (small)")
    experiment.option("--problems", nargs="*", quick=["line"], metavar="NAME", help="some problems instead")
    experiment.option("--seeds", type=int, default=3, quick=1, help="runs of each posterior on each problem (3)")
    experiment.option("--steps", type=int, default=5000, quick=5, help="training steps of a guide (5000)")
    experiment.option("--workers", type=int, default=1, metavar="N", help="processes that share the work (1)")
    args = experiment.start(argv)
    entries = {name: name for name in pdrop.registry.guides()} | {each.__name__: each for each in (*PYRO, *OTHERS)}
    if find_spec("laplace"):
        entries[laplace_torch.__name__] = laplace_torch
    else:
        print("laplace-torch is left out; to have it: pip install laplace-torch")
    entries |= {name: partial(up_to, guide) for name, guide in LARGE.items()}
    if args.quick:
        entries = {name: entries[name] for name in ("mean-field", "deep_ensemble")}
    how = {"problems": args.problems, "seeds": args.seeds, "steps": args.steps, "workers": args.workers}
    found = pdrop.benchmark.benchmark(entries, args.suite, out=args.out / "runs", progress=not args.quiet, **how)
    for name, problem in found.problems.items():
        experiment.table(problem.title, found.on(name).table)
    found.to_html(args.out / "report.html")
    return experiment.finish()


if __name__ == "__main__":
    main()
