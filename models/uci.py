"""Nine UCI data sets: test log-likelihood and RMSE of MC dropout and related guides, chosen by cross-validation.

    for every split:   settings, τ  <-  argmax over settings and τ of  Σ_folds log p(y_held | x_held, the other folds)
                       score        <-  (1/N) Σ log p(y_test | x_test, all training data)      once, with T = 10,000

All splits, folds and settings of a set are one fleet. At σ = 0 the objective depends on τ and l only through the weight
decay λ = l²p/(2Nτ) (section 4.2), so the folds choose λ; τ is optimised continuously, and l follows from the two.
"""

import itertools
import json
import math
import statistics
import sys
import time

import torch
from experiments.collection import UCI_NAMES, uci
from experiments.experiment import Experiment
from experiments.paired_gains import mean_and_error, plot_gains, said, wins
from torch import nn

import pyro_dropout as pd
from pyro_dropout.judging.selection import choose

PAPER = {  # 1 layer: log-likelihood, its standard error, RMSE (Gal and Ghahramani 2016, table 1)
    "boston": (-2.46, 0.06, 2.97), "concrete": (-3.04, 0.02, 5.23), "energy": (-1.99, 0.02, 1.66),
    "kin8nm": (0.95, 0.01, 0.10), "naval": (3.80, 0.01, 0.01), "power": (-2.80, 0.01, 4.02),
    "protein": (-2.89, 0.00, 4.36), "wine": (-0.93, 0.01, 0.62), "yacht": (-1.55, 0.03, 1.11),
}  # fmt: skip
DROPS, DECAY = (0.0002, 0.002, 0.005, 0.01, 0.05, 0.1), (1e-6,)
BELIEFS = {"drop": (0.0,), "length": (0.3, 2.0), "lr": (3e-3, 1e-2)}  # for guides whose widths are learned
GRIDS = {  # what the folds choose from, in addition to τ
    "dropout": {"drop": DROPS, "decay": DECAY, "lr": (3e-3, 1e-2, 3e-2)},
    "multiplicative": {"drop": DROPS, "decay": DECAY, "lr": (3e-3, 1e-2)},
    "concrete": BELIEFS | {"drop": (0.05,)},
    "mean-field": BELIEFS,
    "row-mixture": BELIEFS,
    "low-rank": BELIEFS,
    "heteroscedastic": {"drop": DROPS, "length": (0.5,), "lr": (1e-3, 5e-3)},  # dropout, and noise by input
}
DEEPER = {"drop": (0.002, 0.005, 0.02, 0.05)}  # with 2 hidden layers, for guides that drop
ASKED = ("steps", "folds", "splits", "samples", "grid", "seed")  # options that identify a run
BIG = 5000  # number of points from which batches are doubled
LONGER = {"naval": 2, "protein": 3}  # times as many steps: naval for precision, protein for its size


def model(x, y, kind, layers, width, drop, decay=None, length=None):
    """Return a network with ``layers`` hidden layers of ReLU, in the units of the data."""
    outputs = 2 if kind == "heteroscedastic" else 1
    sizes = [x.shape[1], *[width] * layers]
    parts = [part for a, b in itertools.pairwise(sizes) for part in (nn.Linear(a, b), nn.ReLU())]
    net = nn.Sequential(*parts, nn.Linear(width, outputs))
    likelihood = pd.HeteroscedasticGaussian() if outputs == 2 else pd.Gaussian(1.0, learn=decay is None)
    if decay is not None:
        length = pd.implied_length_scale(1 - drop, 1.0, decay, len(x))
    prior = pd.Prior(length_scale=length, bias_length_scale=length, width_scaled=False)
    return pd.Standardised(pd.BayesianNet(net, prior, likelihood), x, y)


def guide(model, kind, drop):
    """Return q(w); "heteroscedastic" is dropout too."""
    start = {"init_scale": 0.02}
    if kind == "multiplicative":
        return pd.AutoMultiplicative(model, alpha=drop / (1 - drop))
    if kind == "concrete":
        return pd.AutoConcreteDropout(model, keep=1 - drop)
    if kind == "mean-field":
        return pd.AutoMeanField(model, **start)
    if kind == "row-mixture":
        return pd.AutoRowMixture(model, components=2, bias="gaussian", **start)
    if kind == "low-rank":
        return pd.AutoLowRank(model, rank=2, **start)
    return pd.AutoDropout(model, keep=1 - drop)


def run(name, kind, layers, args, device):
    """Train and score one method on one set; return the record."""
    data, start = uci(name), time.perf_counter()
    splits = min(args.splits, len(data.train_rows))
    size = len(data.train_rows[0])
    steps = args.steps * LONGER.get(name, 1)
    grid = GRIDS[kind] | (DEEPER if layers > 1 and len(GRIDS[kind]["drop"]) > 1 else {})

    def build(x, y, **setting):
        made = model(x, y, kind, layers, 100 if name == "protein" else 50, **setting)
        return made, guide(made, kind, setting["drop"])

    found = choose(
        build,
        {key: values[: args.grid] for key, values in grid.items()},
        *(data.x, data.y, data.train_rows[:splits], data.test_rows[:splits]),
        folds=args.folds,
        samples=args.samples,
        steps=steps,
        batch_size=256 if size > BIG else 128,
        clip_norm=10.0 * size if kind == "heteroscedastic" else None,  # heteroscedastic noise is unstable
        schedule=lambda t: 0.5 * (1 + torch.cos(math.pi * (t / steps).clamp(max=1))),
        device=device,
        compile=not args.quick,
        seed=args.seed,
        progress=not args.quiet,
    )
    record = {"source": data.source, "device": str(device)} | {
        key: value.tolist() if isinstance(value, torch.Tensor) else value for key, value in vars(found).items()
    }
    record["all_seconds"] = time.perf_counter() - start
    log_p, mixture = said(record["log_likelihood"]), said(record["mixture_log_likelihood"])
    print(
        f"{name} {kind} {layers}: log-likelihood {log_p}, mixture {mixture}, rmse {said(record['rmse'])};"
        f" {found.replicas} replicas in {record['all_seconds']:.0f} s, {found.seconds:.0f} of them training and"
        f" {found.compile_seconds:.0f} compiling",
        flush=True,
    )
    return record


def report(experiment, records):
    """Report the results: scores next to the paper's, all methods side by side, and which beats which."""
    scores = {
        (r["set"], f"{r['kind']}, {r['layers']}{extra}"): r[f"{key}log_likelihood"]
        for r in records
        for extra, key in (("", ""), (", stacked", "mixture_"))
    }
    names, methods = (list(dict.fromkeys(key[k] for key in scores)) for k in (0, 1))
    plain = [r for r in records if (r["kind"], r["layers"]) == ("dropout", 1)]
    rows = [
        {
            "set": r["set"], "source": r["source"], "log-likelihood": said(r["log_likelihood"]),
            "the paper's": PAPER[r["set"]][0], "RMSE": said(r["rmse"]), "its RMSE": PAPER[r["set"]][2],
            "drop": statistics.median(setting["drop"] for setting in r["settings"]),
            "τ": f"{statistics.median(r['tau']):.3g}", "seconds": round(r["all_seconds"]),
        }
        for r in plain
    ]  # fmt: skip
    note = "Mean ± standard error over splits; drop and τ (in the units of y) are medians of what the folds chose."
    experiment.table("MC dropout, 1 hidden layer", rows, note)
    rows = [{"method": m} | {n: said(scores[n, m]) if (n, m) in scores else "-" for n in names} for m in methods]
    experiment.table("Test log-likelihood of all methods", rows, "Kind and hidden layers; stacked: settings mixed.")
    twins = [
        {"set": r["set"], "method": f"{r['kind']}, {r['layers']}{extra}", "twins": f"{statistics.mean(r['twins']):.1%}"}
        | {"all rows": said(r[f"{key}log_likelihood"]), "without twins": said(r[f"{key}fresh_log_likelihood"])}
        for r in records
        if any(r.get("twins", []))
        for extra, key in (("", ""), (", stacked", "mixture_"))
    ]
    if twins:
        note = "A twin has the inputs of a training row: a network may know its target by heart."
        experiment.table("Test log-likelihood without the rows that have a twin", twins, note)
    if plain:
        above = [r["set"] for r in plain if mean_and_error(r["log_likelihood"])[0] > PAPER[r["set"]][0]]
        verdict = "holds" if len(above) == len(plain) else "holds in part" if above else "does not hold"
        experiment.claim("folds choose better than the paper's grid", verdict, f"on {len(above)} of {len(plain)} sets")
    better = {m: wins(scores, m, "dropout, 1") for m in methods if m != "dropout, 1"}
    if better and plain:
        best = max(better, key=lambda m: len(better[m]))
        count = len(better[best])
        verdict = "holds" if count >= 2 / 3 * len(names) else "holds in part" if count else "does not hold"
        text = "an extension beats MC dropout by more than a standard error on two sets of three"
        experiment.claim(text, verdict, f"{best}: {count} of {len(names)} ({', '.join(better[best]) or 'none'})")
        caption = "Gain over MC dropout with one hidden layer, with its standard error over splits."
        experiment.figure("gains", plot_gains(scores, "dropout, 1", "nats a point more than MC dropout"), caption)


def main(argv=None):
    experiment = Experiment("uci", __doc__)
    sets, kinds = list(UCI_NAMES), list(GRIDS)
    experiment.option("--sets", nargs="+", choices=sets, default=sets, quick=["yacht"], help="some of the nine sets")
    experiment.option("--kinds", nargs="+", choices=kinds, default=kinds, quick=kinds[::6], help="of q and likelihood")
    experiment.option("--layers", nargs="+", type=int, default=[1, 2], quick=[1], help="hidden layers (1 and 2)")
    experiment.option("--steps", type=int, default=30_000, quick=60, help="more on naval and protein")
    experiment.option("--folds", type=int, default=3, quick=2, help="folds inside every split's training data")
    experiment.option("--splits", type=int, default=20, quick=2, help="splits per set; protein has 5")
    experiment.option("--samples", type=int, default=10_000, quick=50, help="draws for the test sets")
    experiment.option("--grid", type=int, default=99, quick=2, help="maximum number of values per setting")
    experiment.option("--jobs", type=int, default=1, help="data sets in parallel, each in its own process")
    args = experiment.start(argv)
    if args.jobs > 1 and len(args.sets) > 1:
        folders = experiment.processes(__file__, "--sets", args.sets, args.jobs)
        files = [folder / "records.json" for folder in folders]
        records = [record for file in files if file.exists() for record in json.loads(file.read_text("utf-8"))]
    else:
        file, asked = args.out / "records.json", {key: getattr(args, key) for key in ASKED}
        before = json.loads(file.read_text("utf-8")) if file.exists() else []
        records = [record for record in before if asked.items() <= record.items()]  # this run continues from them
        for kind, layers, name in itertools.product(args.kinds, args.layers, args.sets):
            told = asked | {"set": name, "kind": kind, "layers": layers}
            if any(told.items() <= record.items() for record in records):
                continue
            try:
                records.append(run(name, kind, layers, args, experiment.device) | told)
            except pd.DivergedError as lost:
                print(f"{name} {kind} {layers}: all replicas diverged: {lost}", file=sys.stderr, flush=True)
            file.write_text(json.dumps(records), "utf-8")
    report(experiment, records)
    experiment.finish()


if __name__ == "__main__":
    main()
