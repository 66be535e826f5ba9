"""Why Gaussian guides lose: their prior, their start, the temperature of their KL, and how they are read, one by one.

    loss = E_q[-log p(y|w)] + T KL(q‖p),    f(x, w) ≈ f(x, m) + J(x)(w - m)  if it is read linearised

Mean field and low rank are trained on a regression set and on two clusters of data in every combination: prior widths
fixed or learned; widths that start at 0.1, by the fan-in, at a trained point, at the Gaussian that is nearest to its
Laplace approximation, or (low rank) to a trajectory of SGD; T = 1, T = 0.1, or T warmed up to 1. Each posterior is then
read twice, by draws of the network and by its linearisation. Dropout, the Laplace approximation itself and the nearest
Gaussians without training are rows too. Between the clusters, the ratio is that of the std of f in the gap to that at
the data, as in ``in_between``.
"""

import copy
import warnings
from argparse import Namespace
from itertools import product
from types import SimpleNamespace

import pandas
import torch
from experiments.collection import uci
from experiments.experiment import Experiment
from experiments.nearest_gaussian import nearest_gaussian
from experiments.two_clusters import TAU, gap_ratio, two_clusters
from torch import nn
from tqdm.auto import tqdm

import pyro_dropout as pdrop

NOISE, RATE, DROPPED, RANK = 100.0, 0.01, 0.1, 5  # NOISE: the precision of y in the regression set, standardised
PRIORS, READS = ("fixed", "learned"), ("sampled", "linearised")
TITLES = ("guide", "prior", "start", "T", "read")
STARTS = {"mean field": ("0.1", "fan-in", "MAP", "Laplace"), "low rank": ("0.1", "fan-in", "MAP", "Laplace", "SWAG")}
HEATS = ("1", "0.1", "warm-up")
AFTER = {"fan-in": "0.1", "MAP": "fan-in", "Laplace": "MAP", "SWAG": "MAP"}
CHANGES = [
    ("a learned prior", "prior", "fixed", "learned"),
    *((f"a start from {start}, after {before}", "start", before, start) for start, before in AFTER.items()),
    *((f"T = {heat}", "T", "1", heat) for heat in HEATS[1:]),
    ("linearised reading", "read", "sampled", "linearised"),
]
VISIBLE = 0.02  # nats a point: a smaller gain would be lost in the noise of training


# --- the model and its guides -----------------------------------------------------------------------------------------
def model(net, tau, learn=False):
    """Return a model of a network, with N(0, 1) in its first layer and N(0, 1/fan-in) after it, or learned widths."""
    return pdrop.BayesianNet(net, pdrop.Prior(learn=learn, tempered=False), pdrop.Gaussian(tau))


def guide(name, net, start, known):
    """Return mean field or low rank, started as it is called; ``known`` holds the point and the Gaussians around it."""
    if name == "dropout":
        return pdrop.AutoDropout(net, keep=lambda site: 1.0 if site.startswith("0.") else 1 - DROPPED)
    low = name == "low rank"
    if start in ("Laplace", "SWAG"):
        return nearest_gaussian(known[start], RANK if low else 0, net)
    how = {"init_scale": 0.1 if start == "0.1" else "auto", "init": known["MAP"] if start == "MAP" else "module"}
    return pdrop.AutoLowRank(net, RANK, "net", **how) if low else pdrop.AutoMeanField(net, **how)


# --- the problems -----------------------------------------------------------------------------------------------------
def problems(args):
    """Return the regression set, its first split, and the two clusters, whose test data are drawn anew.

    Data are in standardised units; ``asked`` are the points at which a gap is measured, if there is one.
    """
    table = uci(args.set)
    train, test = (torch.as_tensor(rows[0]) for rows in (table.train_rows, table.test_rows))
    (x, y), data = ((value - value[train].mean(0)) / value[train].std(0) for value in (table.x, table.y)), {}
    data[table.name] = SimpleNamespace(x=x[train], y=y[train], test_x=x[test], test_y=y[test], tau=NOISE, asked=x[:0])
    near, other = two_clusters(1, args.seed), two_clusters(1, args.seed + 1)
    held = {"test_x": other.x, "test_y": other.y, "tau": TAU}
    data["two clusters"] = SimpleNamespace(x=near.x, y=near.y, asked=near.asked, **held)
    return data


def started(problem, args, quiet):
    """Return the network, the point of highest posterior density, and the Gaussians around it, by name."""
    torch.manual_seed(args.seed)
    net = nn.Sequential(nn.Linear(problem.x.shape[1], args.width), nn.ReLU(), nn.Linear(args.width, 1))
    mine, data = model(net, problem.tau), (problem.x, problem.y)
    known = {"MAP": pdrop.AutoDropout(mine, keep=1.0)}
    falling = {"lr": RATE, "schedule": lambda done: 1.02 - done / (2 * args.steps)}
    pdrop.fit(mine, known["MAP"], *data, steps=2 * args.steps, **falling, **quiet)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="the point of this Laplace")  # with few steps it is no maximum yet
        known["Laplace"] = pdrop.laplace(mine, known["MAP"], *data, structure="full")
    batch = max(1, len(problem.x) // 10)
    every = max(1, args.steps // (4 * RANK))
    slow = {"steps": max(args.steps, RANK * every), "every": every, "lr": RATE / (problem.tau * len(problem.x))}
    known["SWAG"] = pdrop.swag(mine, known["MAP"], *data, rank=RANK, batch_size=batch, **slow, **quiet)
    return net, known


# --- training and reading ---------------------------------------------------------------------------------------------
def trained(build, settings, problem, heat, args, quiet):
    """Train replicas, one for each setting, as one fleet at a falling rate; return each, (model, guide)."""
    heats = {"1": 1.0, "0.1": 0.1, "warm-up": pdrop.training.warm_up(max(1, args.steps * 4 // 5), start=0.01)}
    how = {"loss": pdrop.ELBO(temperature=heats[heat]), "lr": RATE, "schedule": lambda done: 1.02 - done / args.steps}
    fleet = pdrop.Fleet(build, {"setting": list(settings)})
    fleet.fit(problem.x, problem.y, steps=args.steps, **how, **quiet)
    return dict(zip(settings, fleet, strict=True))


def read(mine, q, problem, how, args):
    """Return the test log-likelihood and RMSE of a posterior, and its ratio of std in the gap to that at the data."""
    points, count = torch.cat([problem.test_x, problem.asked]), len(problem.test_x)
    ask = {"method": "mc" if how == "sampled" else "linearised", "samples": args.samples, "seed": args.seed}
    answer = pdrop.predict(mine, q, points, **ask)
    log_p = answer.log_prob(torch.cat([problem.test_y, torch.zeros(len(points) - count, 1)]))[:count]
    error = (answer.mean[:count] - problem.test_y).square().mean().sqrt()
    found = {"log p": log_p.mean().item(), "RMSE": error.item()}
    ratio = {"ratio": gap_ratio(answer.epistemic[count:, 0].sqrt())[2].item()} if len(points) > count else {}
    return found | ratio


def rows_of(problem, args, bar):
    """Return {(guide, prior, start, T, read): scores} of one problem."""
    quiet = {"compile": False, "progress": False, "seed": args.seed}
    net, known = started(problem, args, quiet)

    def build(setting):
        name, prior, start, _ = setting
        mine = model(copy.deepcopy(net), problem.tau, learn=prior == "learned")
        return mine, guide(name, mine, start, known)

    whole = known["Laplace"]
    found = {("Laplace", "fixed", "MAP", "1", how): read(whole.model, whole, problem, how, args) for how in READS}
    alone = trained(build, [("dropout", "fixed", "0.1", "1")], problem, "1", args, quiet)
    found |= {(*key, "sampled"): read(*pair, problem, "sampled", args) for key, pair in alone.items()}
    for key in ((name, "fixed", start, "untrained") for name in STARTS for start in STARTS[name][3:]):
        found |= {(*key, how): read(*build(key), problem, how, args) for how in READS}
    for name, prior, heat in product(STARTS, args.priors, args.heats):
        settings = [(name, prior, start, heat) for start in STARTS[name]]
        for key, pair in trained(build, settings, problem, heat, args, quiet).items():
            found |= {(*key, how): read(*pair, problem, how, args) for how in READS}
        bar.update()
    return found


# --- what is found ----------------------------------------------------------------------------------------------------
def compared(found):
    """Return one row for each change and problem, with what it gains for each seed."""
    rows = []
    for (words, changed, before, after), problem in product(CHANGES, found["problem"].unique()):
        here = found[(found["problem"] == problem) & found["guide"].isin(STARTS)]
        same = [name for name in ("seed", *TITLES) if name != changed]
        pairs = here[here[changed] == before].merge(here[here[changed] == after], on=same)
        gains = (pairs["log p_y"] - pairs["log p_x"]).groupby(pairs["seed"])
        if len(pairs):
            parts = {
                f"gain more than {VISIBLE:g}": gains.agg(lambda gain: str((gain > VISIBLE).sum())),
                f"lose more than {VISIBLE:g}": gains.agg(lambda gain: str((gain < -VISIBLE).sum())),
                "median gain": gains.median().map("{:.3g}".format),
            }
            row = {"change": words, "problem": problem, "comparisons": int(gains.size().iloc[0])}
            rows.append(row | {title: ", ".join(each) for title, each in parts.items()})
    return rows


def beside_dropout(found):
    """Return one row for each problem and seed: dropout, the Laplace approximation, and all trained Gaussians."""
    rows = []
    for problem, seed in product(found["problem"].unique(), found["seed"].unique()):
        here = found[(found["problem"] == problem) & (found["seed"] == seed)]
        whole, (dropout, ratio) = (
            here[here["guide"] == "Laplace"],
            here.set_index("guide").loc["dropout", ["log p", "ratio"]],
        )
        others = here[here["guide"].isin(STARTS) & (here["T"] != "untrained")]
        row = {"problem": problem, "seed": int(seed), "log p: dropout": dropout}
        row |= {f"Laplace, {how}": value for how, value in zip(READS, whole["log p"], strict=True)}
        row |= {"trained Gaussians above dropout": f"{(others['log p'] > dropout).sum()} of {len(others)}"}
        gaps = {"ratio: dropout": ratio, "Laplace linearised": whole["ratio"].iloc[1]}
        gaps |= {"largest of trained Gaussians": others["ratio"].max()}
        rows.append(row | {name: "" if pandas.isna(value) else value for name, value in gaps.items()})
    return rows


def main(argv=None):
    experiment = Experiment("why_gaussian", __doc__)
    experiment.option("--set", default="yacht", help="a UCI regression set (yacht)")
    experiment.option("--priors", nargs="+", choices=PRIORS, default=PRIORS, quick=PRIORS[1:], help="(fixed learned)")
    experiment.option("--heats", nargs="+", choices=HEATS, default=HEATS, quick=HEATS[:1], help="T (1 0.1 warm-up)")
    experiment.option("--seeds", type=int, default=3, quick=1, help="seeds, from --seed on (3)")
    experiment.option("--width", type=int, default=20, quick=4, help="hidden units (20)")
    experiment.option("--steps", type=int, default=500, quick=5, help="Adam steps of a guide (500)")
    experiment.option("--samples", type=int, default=500, quick=5, help="draws of a prediction (500)")
    args = experiment.start(argv)
    rows = []
    runs = args.seeds * 2 * len(args.priors) * len(args.heats) * len(STARTS)
    with tqdm(total=runs, disable=args.quiet, unit="fleet") as bar:
        for seed in range(args.seed, args.seed + args.seeds):
            one = Namespace(**vars(args) | {"seed": seed})
            for name, problem in problems(one).items():
                start = {"problem": name, "seed": seed}
                rows += [
                    start | dict(zip(TITLES, key, strict=True)) | score
                    for key, score in rows_of(problem, one, bar).items()
                ]
    found = pandas.DataFrame(rows, columns=["problem", "seed", *TITLES, "log p", "RMSE", "ratio"])
    found.to_csv(args.out / "rows.csv", index=False, float_format="%.5g")
    seeds = ", ".join(map(str, found["seed"].unique()))
    words = f"Test log-likelihood in nats a point, of standardised targets, for seeds {seeds}."
    words += f" {args.set}: one split. `rows.csv` has every posterior."
    experiment.table("What each change gains, all else being equal", compared(found), words)
    experiment.table("Beside dropout", beside_dropout(found), "ratio: the std of f in the gap, divided by that at data")
    return experiment.finish()


if __name__ == "__main__":
    main()
