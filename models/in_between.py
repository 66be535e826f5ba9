"""In between: is a posterior uncertain in the gap between two clusters of data?

    ratio = std of f in the middle of the gap / std of f at the data,    y = cos(2t + 0.8) + noise in two clusters of t

Foong, Li, Hernández-Lobato and Turner (2019) showed that mean field does not notice the gap; Foong, Burt, Li and Turner
(2020) proved bounds for one hidden layer of ReLU: the variance of dropout that keeps its inputs is convex in x, and
mean field's is bounded on some lines. Here every guide is tested with one and two hidden layers, on a line in one and
in five dimensions; NUTS, which draws from the posterior itself, is the reference. A Laplace approximation predicts
linearised. All networks have five inputs; if one is used the others are zero, and affect only concrete dropout's
``keep`` of that layer.

The point of a Laplace approximation is trained until ``pdrop.laplace`` finds it near a maximum, and no further: at the
maximum itself (``--steps 20000``) the doubt in the gap is smaller in three of four problems, so the result depends on
when training stops, and on the learning rate (``--laplace-rate``). The low-rank guide that starts from one is trained
further and predicts with draws, as the other guides do.
"""

import math
import warnings
from itertools import pairwise, product
from types import SimpleNamespace

import torch
from experiments.experiment import Experiment
from experiments.figures import gap_bands, gap_widths
from experiments.nearest_gaussian import nearest_gaussian
from experiments.summaries import standard_error
from experiments.two_clusters import GRID, INPUTS, TAU, gap_ratio, two_clusters
from torch import nn

import pyro_dropout as pdrop

RATE, DROPPED, START = 0.05, 0.1, 0.02  # START: initial value of learned widths, and value of fixed ones
OVERCONFIDENT = 0.5  # uncertainty grows less than half as much as the posterior's; seeds and sampler vary far less
NOTICEABLE = 0.05  # of NUTS' ratio: a smaller improvement would not be visible in a plot
FIXED = {"scale": START, "bias": "gaussian", "init_scale": START}


# --- the model and its guides -----------------------------------------------------------------------------------------
def model(depth, width):
    """Return a ReLU network with weights N(0, 1) in the first layer and N(0, 1/fan-in) after it, and known noise."""
    layers = [part for a, b in pairwise([INPUTS, *[width] * depth]) for part in (nn.Linear(a, b), nn.ReLU())]
    return pdrop.BayesianNet(nn.Sequential(*layers, nn.Linear(width, 1)), pdrop.Prior(), pdrop.Gaussian(TAU))


def keep(site):
    return 1.0 if site.startswith("0.") else 1 - DROPPED  # inputs are kept, as in Foong et al.


GUIDES = {
    "dropout": lambda net: pdrop.AutoDropout(net, keep),
    f"dropout, σ = {START:g}": lambda net: pdrop.AutoDropout(net, keep, **FIXED),
    "concrete dropout": lambda net: pdrop.AutoConcreteDropout(net, lambda site: min(keep(site), 0.999), max_keep=1.0),
    "multiplicative": lambda net: pdrop.AutoMultiplicative(net, lambda site: 1 / keep(site) - 1 + 1e-6, **FIXED),
    "mean field": lambda net: pdrop.AutoMeanField(net, init_scale=START),
    "row mixture": lambda net: pdrop.AutoRowMixture(net, bias="gaussian", init_scale=START),
    "low rank": lambda net: pdrop.AutoLowRank(net, rank=5, init_scale=START),
}
KINDS = ("ensemble", "plain ensemble", "ensemble of dropout")
LAPLACE, LOW_RANK, RANK = "Laplace, linearised", "low rank from Laplace", 60
NAMES = [*GUIDES, *KINDS, LAPLACE, LOW_RANK]
KIN = ("concrete dropout", f"dropout, σ = {START:g}", "multiplicative")


def guide(name, net):
    return GUIDES[name](net)


# --- posteriors: guides in one fleet, ensembles and Laplace approximations, and NUTS ----------------------------------
def fitted(name, depth, problems, args, device):
    """Train a guide from every seed on every problem as one fleet; return mean and std of f, (problem, seed, point)."""
    if name not in GUIDES:
        return one_by_one(name, depth, problems, args)

    def build(seed):
        torch.manual_seed(seed)
        net = model(depth, args.width)
        return net, guide(name, net)

    # A replica is trained on the first rows of its problem, the data, and predicts at all of them.
    x = torch.cat([problem.asked for problem in problems])
    y = torch.cat([torch.cat([problem.y, torch.zeros(len(GRID), 1)]) for problem in problems])
    rows = torch.arange(len(x)).reshape(len(problems), 1, -1).expand(-1, args.seeds, -1).flatten(0, 1)
    fleet = pdrop.Fleet(build, {"seed": list(range(args.seed, args.seed + args.seeds)) * len(problems)})
    # The large-K form is exact for one Gaussian; for dropout it is off by at most the Bernoulli entropy per row.
    loss = pdrop.ELBO(kl="exact" if name == "row mixture" else "large_k")
    # Such a small network takes longer to compile than to train; many steps are recorded.
    how = {"loss": loss, "compile": "traced" if args.steps > 1000 else False, "seed": args.seed, "device": device}
    how |= {"progress": not args.quiet, **falling(args.steps, RATE)}
    fleet.fit(x, y, indices=rows[:, : -len(GRID)], **how)
    answer = pdrop.prediction.predict_fleet(fleet, x, indices=rows, samples=args.samples, seed=args.seed)
    both = answer.mean[..., 0].cpu(), answer.epistemic[..., 0].sqrt().cpu()
    return [part.unflatten(0, (len(problems), -1)) for part in both]


def falling(steps, rate):
    return {"steps": steps, "lr": rate, "schedule": lambda done: 1.02 - done / steps}


def one_by_one(name, depth, problems, args):
    """Train a posterior that is no single guide, with the same results as ``fitted``."""
    found = []
    for problem, seed in product(problems, range(args.seed, args.seed + args.seeds)):
        torch.manual_seed(seed)
        net = model(depth, args.width)
        how = {"compile": False, "progress": not args.quiet, "seed": seed}
        posterior = (ensembled if name in KINDS else laplaced)(name, net, (problem.x, problem.y), args, how)
        method = "linearised" if name == LAPLACE else "mc"
        answer = pdrop.predict(net, posterior, problem.asked, method=method, samples=args.samples, seed=seed)
        found.append(torch.stack([answer.mean[:, 0], answer.epistemic[:, 0].sqrt()]).cpu())
    return list(torch.stack(found, 1).unflatten(1, (len(problems), -1)))


def ensembled(name, net, data, args, how):
    if name == "ensemble of dropout":
        posterior = pdrop.Ensemble(net, lambda member: pdrop.AutoDropout(member, keep), args.members)
    else:
        anchored = name == "ensemble"
        posterior = pdrop.Ensemble(net, None, args.members, anchored, start="anchor" if anchored else "fresh")
    pdrop.fit(net, posterior, *data, **falling(args.ensemble_steps, args.ensemble_rate), **how)
    return posterior


def laplaced(name, net, data, args, how):
    how = how | falling(args.steps, args.laplace_rate)
    laplace = pdrop.guides.AutoLaplace(net, "full")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore" if args.quick else "default")  # a few steps do not find a maximum
        pdrop.fit(net, laplace, *data, **how | {"compile": "auto"})  # a point draws nothing
    if name == LAPLACE:
        return laplace
    guide = nearest_gaussian(laplace, RANK)
    pdrop.fit(net, guide, *data, **how)
    return guide


def sampled(depth, problem, args):
    """Sample the posterior itself; return mean and std of f over all draws, the std of each chain, and R-hat."""
    net = model(depth, args.width)
    how = {"chains": args.chains, "samples": args.draws, "warmup": args.draws, "max_tree_depth": args.tree_depth}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # R-hat, its subject, is reported under the table
        posterior = pdrop.nuts(net, problem.x, problem.y, seed=args.seed, progress=not args.quiet, **how)
    weights = posterior.draws_at(torch.arange(args.chains * args.draws))
    f = net.evaluate(weights, problem.asked).detach()[..., 0].reshape(args.chains, args.draws, -1)
    moments = {"mean": f.mean((0, 1)), "std": f.flatten(0, 1).std(0), "by_chain": f.std(1)}
    return SimpleNamespace(**moments, rhat=float(posterior.rhat_of(f).max()))


# --- what is found ----------------------------------------------------------------------------------------------------
def row_of(depth, inputs, name, std, each, reference):
    """Return a row of the table: numbers from ``std``, their standard errors from ``each`` seed or chain."""
    found, parts = gap_ratio(std).mean(-1), gap_ratio(each)
    row = {"hidden layers": depth, "inputs": inputs, "guide": name}
    for k, title in enumerate(("at data", "in gap", "ratio")):
        row |= {title: found[k].item(), f"± {title}": standard_error(parts[k]).item()}
    # Divided by the reference's numbers, on which its own do not depend.
    at_data, _, true = gap_ratio(reference.std).tolist()
    own, other = row["± ratio"] / row["ratio"], standard_error(gap_ratio(reference.by_chain)[2]).item() / true
    error = 0.0 if name == "NUTS" else row["ratio"] / true * math.hypot(own, other)
    return row | {"ratio ÷ NUTS": row["ratio"] / true, "± of that": error, "at data ÷ NUTS": row["at data"] / at_data}


def is_overconfident(row):
    return row["ratio ÷ NUTS"] + 2 * row["± of that"] < OVERCONFIDENT


def is_better(row, other):
    """Return whether a guide's ratio is closer to NUTS' than another's, by more than the errors and visibly so."""
    gain = abs(other["ratio ÷ NUTS"] - 1) - abs(row["ratio ÷ NUTS"] - 1)
    return gain > max(NOTICEABLE, 2 * (row["± of that"] ** 2 + other["± of that"] ** 2) ** 0.5)


def judge(experiment, rows):
    """Judge whether each claim holds in all problems (hidden layers × inputs), in some, or in none."""
    by_guide = {name: [row for row in rows if row["guide"] == name] for name in NAMES}

    def claim(text, names, held, of="ratio ÷ NUTS"):
        if held:
            spans = {name: [row[of] for row in by_guide[name]] for name in names if by_guide[name]}
            said = ", ".join(f"{name} {min(values):.2f} to {max(values):.2f}" for name, values in spans.items())
            experiment.claim(text, held, f"{sum(held)} of {len(held)}; {of}: {said}")

    for names, text in ((["dropout"], "dropout is"), (KIN, "dropout's kin is"), (["mean field"], "mean field is")):
        held = [is_overconfident(row) for name in names for row in by_guide[name]]
        claim(f"{text} over-confident in between", names, held)
    held = [abs(row["ratio ÷ NUTS"] - 1) < 0.45 for row in by_guide["ensemble"]]
    claim("an anchored ensemble is within 45 % of the posterior's ratio", ["ensemble"], held)
    for name in ("low rank", "row mixture"):
        held = [is_better(row, other) for row, other in zip(by_guide[name], by_guide["mean field"], strict=False)]
        words = f"{name} is better than mean field in between, by more than 0.05 and two standard errors"
        claim(words, [name, "mean field"], held)
    held = [row["ratio ÷ NUTS"] >= 0.30 for row in by_guide[LAPLACE]]
    claim("linearised Laplace has at least 0.30 of the posterior's ratio", [LAPLACE], held)
    held = [abs(row["at data ÷ NUTS"] - 1) <= 0.15 for row in by_guide[LAPLACE]]
    claim("linearised Laplace is within 15 % of the posterior's width at the data", [LAPLACE], held, "at data ÷ NUTS")
    pairs = zip(by_guide[LOW_RANK], by_guide["mean field"], strict=False)
    held = [row["ratio ÷ NUTS"] >= 1.5 * other["ratio ÷ NUTS"] for row, other in pairs]
    claim("low rank from Laplace has 1.5 times the ratio of mean field", [LOW_RANK, "mean field"], held)


def main(argv=None):
    experiment = Experiment("in_between", __doc__)
    few = ["dropout", "mean field", "ensemble", LAPLACE]
    experiment.option("--guides", nargs="*", choices=NAMES, default=NAMES, quick=few)
    experiment.option("--depths", nargs="+", type=int, default=[1, 2], quick=[1], help="hidden layers (1 2)")
    experiment.option("--inputs", nargs="+", type=int, choices=range(1, INPUTS + 1), default=[1, 5], help="(1 5)")
    experiment.option("--width", type=int, default=20, quick=5, help="hidden units in a layer (20)")
    experiment.option("--seeds", type=int, default=5, quick=2, help="training runs per guide (5)")
    experiment.option("--steps", type=int, default=400, quick=10, help="steps per training run (400)")
    experiment.option("--members", type=int, default=60, quick=3, help="members of an ensemble (60)")
    experiment.option("--ensemble-steps", type=int, default=1500, quick=10, help="steps of an ensemble (1500)")
    experiment.option("--ensemble-rate", type=float, default=0.05, help="learning rate of an ensemble (0.05)")
    experiment.option("--laplace-rate", type=float, default=0.01, help="learning rate of a Laplace point (0.01)")
    experiment.option("--samples", type=int, default=500, quick=20, help="weight draws per prediction (500)")
    experiment.option("--chains", type=int, default=8, quick=2, help="chains of NUTS (8)")
    experiment.option("--draws", type=int, default=300, quick=6, help="draws per chain, and warmup draws (300)")
    experiment.option("--tree-depth", type=int, default=7, quick=3, help="maximum doublings of a NUTS trajectory (7)")
    args = experiment.start(argv)
    problems = [two_clusters(inputs, args.seed) for inputs in args.inputs]
    rows, stds, shown, worst = [], {}, {}, 0.0
    for depth in args.depths:
        references = [sampled(depth, problem, args) for problem in problems]
        worst = max(worst, *(reference.rhat for reference in references))
        answers = {"NUTS": [(reference.mean[None], reference.std[None]) for reference in references]}
        for name in args.guides:
            answers[name] = list(zip(*fitted(name, depth, problems, args, experiment.device), strict=True))
        for k, inputs in enumerate(args.inputs):
            for name, (_, std) in ((name, found[k]) for name, found in answers.items()):
                each = references[k].by_chain if name == "NUTS" else std
                rows.append(row_of(depth, inputs, name, std, each, references[k]))
            stds[depth, inputs] = {name: found[k][1].mean(0) for name, found in answers.items()}
        shown = shown or {name: tuple(part[0] for part in found[0]) for name, found in answers.items()}
    rows.sort(key=lambda row: (row["hidden layers"], row["inputs"], ["NUTS", *NAMES].index(row["guide"])))
    note = f"Means and errors over {args.seeds} seeds, for NUTS over {args.chains} chains; R-hat at most {worst:.3f}."
    experiment.table("Standard deviation of f at the data and in the gap", rows, note)
    judge(experiment, rows)
    text = "Mean and ±1, ±2 std of f, one seed of each; dashed: NUTS"
    experiment.figure("bands", gap_bands(shown, problems[0]), text)
    experiment.figure("widths", gap_widths(stds), "Standard deviation of f along the line, mean over seeds")
    return experiment.finish()


if __name__ == "__main__":
    main()
