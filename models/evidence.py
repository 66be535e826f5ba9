"""Evidence instead of folds: Laplace approximations on nine regression tables, with settings chosen in two ways.

    log p(D | λ) = ½(N log τ + n log 2Nλ - log det(JᵀJ + 2Nλ I)) + constant,     τ = N / (Σ(y - f)² + 2Nλ‖w‖²)

By folds, λ and the learning rate are those with the largest Σ_folds log p(y_held | x_held, the other folds), and τ is
the best of the folds. By evidence, they are those with the largest log p(D | λ) on all training data, and τ is above.
Both choose among the same networks, points with a weight decay λ = l²/(2Nτ), read as linearised Laplace approximations
with a full covariance. The folds train every setting on each fold beside all training data; evidence needs only the
latter. The splits, networks and steps are those of `uci`, whose records have the other guides.
"""

import itertools
import json
import math
from pathlib import Path

import torch
from experiments.collection import UCI_NAMES, uci
from experiments.experiment import VERDICTS, Experiment
from experiments.laplace_splits import best_tau, laplace_fleet, log_density
from experiments.paired_gains import mean_and_error, said
from experiments.regression_grids import beliefs
from experiments.selected_records import BIG, LONGER, collect
from torch import nn

import pyro_dropout as pd
from pyro_dropout.judging.selection import folds_of, repeated

DECAYS, RATES = (1e-6, 1e-5, 1e-4, 1e-3, 3e-3, 1e-2), (3e-3, 1e-2)
CLOSE = 0.05  # nats between the two ways of choosing
ASKED = ("steps", "folds", "splits", "seed")
GAUSSIAN = ("mean-field", "low-rank")
RECORDS = Path(__file__).parents[1] / "docs" / "results" / "uci_records.json"


def model(x, y, width, decay):
    """Return a network with one hidden layer of ReLU and a weight decay, in the units of the data."""
    net = nn.Sequential(nn.Linear(x.shape[1], width), nn.ReLU(), nn.Linear(width, 1))
    prior, noise = beliefs(len(x), drop=0.0, decay=decay)
    return pd.Standardised(pd.BayesianNet(net, prior, noise), x, y)


def guide(model):
    return pd.AutoDropout(model, keep=1.0)  # never dropped: a point


def run(name, args, device):
    """Train and score both ways of choosing on one set; return the record."""
    data = uci(name)
    splits = min(args.splits, len(data.train_rows))
    train, test = data.train_rows[:splits], data.test_rows[:splits]
    x, y = data.x.to(device), data.y.to(device)
    settings = list(itertools.product(DECAYS[: args.grid], RATES[: args.grid]))
    length = min(map(len, train))
    steps = args.steps * LONGER.get(name, 1)
    how = {
        "steps": steps,
        "batch_size": 256 if length > BIG else 128,
        "schedule": lambda t: 0.5 * (1 + torch.cos(math.pi * (t / steps).clamp(max=1))),
        "compile": not args.quick,
        "seed": args.seed,
        "progress": not args.quiet,
    }

    def build(x, y, decay):
        made = model(x, y, 100 if name == "protein" else 50, decay)
        return made, guide(made)

    def fleet(rows, asked):
        """Train all settings on each of some sets of rows; return answers by these and by setting."""
        each = {"decay": [decay for decay, _ in settings] * len(rows), "lr": [rate for _, rate in settings] * len(rows)}
        repeated = [row for row in rows for _ in settings]
        where = torch.stack([row for row in asked for _ in settings])
        found = laplace_fleet(build, each, x, y, repeated, where, **how)
        parts = (part.unflatten(0, (len(rows), -1)) for part in (found.mean, found.extra, found.tau))
        return *parts, found.log_evidence.unflatten(0, (len(rows), -1)), found.seconds

    def error(mean, rows):
        return data.y[rows, 0].double().unsqueeze(1) - mean

    # All training data: what the evidence chooses from, and what is scored in the end.
    longest = max(map(len, test))
    rows = torch.stack([repeated(row, longest) for row in test])
    real = torch.stack([torch.arange(longest) < len(row) for row in test]).double().unsqueeze(1)
    mean, extra, tau, evidence, whole_seconds = fleet([repeated(row, length) for row in train], rows)
    off = error(mean, rows)

    # The folds: rows are repeated up to the length of the whole set, so that N and the weight decay stay the same.
    parts = [folds_of(row, args.folds, args.seed + s) for s, row in enumerate(train)]
    kept = min(len(held) for part in parts for _, held in part)
    held = torch.stack([held[:kept] for part in parts for _, held in part])
    folded = [repeated(own, length) for part in parts for own, _ in part]
    held_mean, held_extra, _, _, fold_seconds = fleet(folded, held)
    by_split = [
        part.unflatten(0, (splits, args.folds)).transpose(1, 2).flatten(2)
        for part in (error(held_mean, held), held_extra)
    ]
    fold_tau = best_tau(*by_split)
    validation = log_density(*by_split, fold_tau).mean(-1)

    def scores(choice, tau):
        chosen = choice.unsqueeze(1)
        own, wide = (each.take_along_dim(chosen.unsqueeze(-1), 1) for each in (off, extra))
        log_p = log_density(own, wide, tau.gather(1, chosen))
        count = real.sum((1, 2))
        rmse = ((own.square() * real).sum((1, 2)) / count).sqrt()
        return {
            "log_likelihood": ((log_p * real).sum((1, 2)) / count).tolist(),
            "rmse": rmse.tolist(),
            "settings": [settings[k] for k in choice.tolist()],
            "tau": tau.gather(1, chosen).squeeze(1).tolist(),
        }

    record = {
        "folds_chose": scores(validation.argmax(1), fold_tau) | {"seconds": whole_seconds + fold_seconds},
        "evidence_chose": scores(evidence.argmax(1), tau) | {"seconds": whole_seconds},
        "source": data.source,
    }
    for way in ("folds", "evidence"):
        found = record[f"{way}_chose"]
        text = f"{name}, chosen by {way}: log-likelihood {said(found['log_likelihood'])}, rmse {said(found['rmse'])}"
        print(f"{text}; {found['seconds']:.0f} s", flush=True)
    return record


def report(experiment, records, others):
    """Report both ways of choosing side by side, and Laplace beside the guides of `uci`."""
    rows, close, faster, level = [], [], [], []
    for r in records:
        folds, evidence = r["folds_chose"], r["evidence_chose"]
        gap = [a - b for a, b in zip(evidence["log_likelihood"], folds["log_likelihood"], strict=True)]
        middle, spread = mean_and_error(gap)
        row = {"set": r["set"], "by folds": said(folds["log_likelihood"]), "RMSE": said(folds["rmse"])}
        row |= {"by evidence": said(evidence["log_likelihood"]), "its RMSE": said(evidence["rmse"])}
        row |= {"evidence - folds": f"{middle:.3f} ± {spread:.3f}"}
        row |= {"seconds, folds": folds["seconds"], "seconds, evidence": evidence["seconds"]}
        close.append(middle >= -CLOSE)
        faster.append(evidence["seconds"] < folds["seconds"] / 2)
        known = {o["kind"]: o["log_likelihood"] for o in others if o["set"] == r["set"] and o["layers"] == 1}
        if "dropout" in known:
            mine = {kind: known[kind] for kind in GAUSSIAN if kind in known} | {"laplace": folds["log_likelihood"]}
            best = max(mine, key=lambda kind: mean_and_error(mine[kind])[0])
            pairs = zip(mine[best], known["dropout"], strict=False)
            gain, error = mean_and_error([a - b for a, b in pairs])
            row |= {"dropout": said(known["dropout"]), "best Gaussian": best, "its gain": f"{gain:.3f} ± {error:.3f}"}
            level.append(gain >= -error)
        rows.append(row)
    note = "Mean ± standard error over splits; seconds include compiling, curvature and predictions."
    experiment.table("Laplace approximations, one hidden layer", rows, note)

    def claim(text, held):
        if held:
            experiment.claim(text, VERDICTS[(not all(held)) + (not any(held))], f"{sum(held)} of {len(held)} sets")

    claim(f"evidence chooses as well as folds, within {CLOSE} nats", close)
    claim("in less than half the time", faster)
    claim("the best of mean field, low rank and Laplace is level with MC dropout, within a standard error", level)


def main(argv=None):
    experiment = Experiment("evidence", __doc__)
    sets = list(UCI_NAMES)
    experiment.option("--sets", nargs="+", choices=sets, default=sets, quick=["yacht"], help="some of the nine sets")
    experiment.option("--splits", type=int, default=20, quick=2, help="splits per set; protein has 5")
    experiment.option("--steps", type=int, default=30_000, quick=60, help="more on naval and protein (30000)")
    experiment.option("--folds", type=int, default=3, quick=2, help="folds inside every split's training data (3)")
    experiment.option("--grid", type=int, default=99, quick=1, help="maximum number of values per setting")
    experiment.option("--jobs", type=int, default=1, help="data sets in parallel, each in its own process")
    experiment.option("--records", type=Path, default=RECORDS, help="those of `uci`, for the other guides")
    args = experiment.start(argv)
    tasks = [{"set": name, "kind": "laplace", "layers": 1} for name in args.sets]
    found = collect(experiment, __file__, lambda task: run(task["set"], args, experiment.device), tasks, ASKED)
    others = json.loads(args.records.read_text("utf-8")) if args.records.exists() and not args.quick else []
    report(experiment, found, others)
    experiment.finish()


if __name__ == "__main__":
    main()
