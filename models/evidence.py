"""Evidence instead of folds: Laplace approximations on nine regression tables, with settings chosen in two ways.

    log p(D | λ) = ½(N log τ + n log 2Nλ - log det(JᵀJ + 2Nλ I)) + constant,     τ = N / (Σ(y - f)² + 2Nλ‖w‖²)

By folds, λ and the learning rate are those with the largest Σ_folds log p(y_held | x_held, the other folds), and τ is
the best of the folds. By evidence, they are those with the largest log p(D | λ) on all training data, and τ is above.
Both choose among the same networks, points with a weight decay λ = l²/(2Nτ), read as linearised Laplace approximations
with a full covariance. The folds train every setting on each fold beside all training data; evidence needs only the
latter. "At dropout's mean" is a third row: the Laplace approximation at the mean of MC dropout, whose λ in Σ the folds
choose beside the dropout probability. The splits, networks and steps are those of `uci`, whose records have the other
guides.
"""

import json
import math
from pathlib import Path

import torch
from experiments.collection import UCI_NAMES, uci
from experiments.experiment import Experiment
from experiments.laplace_splits import choices
from experiments.selection import BIG, LONGER, beliefs, collect
from experiments.summaries import mean_and_error, said
from torch import nn

import pyro_dropout as pdrop

POINTS = {"decay": (1e-6, 1e-5, 1e-4, 1e-3, 3e-3, 1e-2), "drop": (0.0,), "lr": (3e-3, 1e-2)}
MEANS = {"decay": (1e-6,), "drop": (0.0002, 0.002, 0.005, 0.01, 0.05, 0.1), "lr": (1e-2, 3e-2)}  # as in `uci`
MULTIPLES = (0.01, 0.1, 1.0, 10.0, 100.0, 1e3, 1e4)  # of the weight decay, in the covariance at the mean of dropout
CLOSE = 0.05  # nats between the two ways of choosing
ASKED = ("steps", "folds", "splits", "seed")
GAUSSIAN, AT_MEAN = ("mean-field", "low-rank"), "laplace at dropout's mean"
RECORDS = Path(__file__).parents[1] / "docs" / "results" / "uci_records.json"


def model(x, y, width, decay, drop):
    """Return a network with one hidden layer of ReLU and a weight decay, in the units of the data."""
    net = nn.Sequential(nn.Linear(x.shape[1], width), nn.ReLU(), nn.Linear(width, 1))
    prior, noise = beliefs(len(x), drop=drop, decay=decay)
    return pdrop.Standardised(pdrop.BayesianNet(net, prior, noise), x, y)


def guide(model, drop):
    return pdrop.AutoDropout(model, keep=1 - drop)  # a point where nothing is ever dropped


def run(name, args, device):
    """Train and score all ways of choosing on one set; return the record."""
    data = uci(name)
    splits = min(args.splits, len(data.train_rows))
    rows = data.train_rows[:splits], data.test_rows[:splits]
    steps = args.steps * LONGER.get(name, 1)
    how = {
        "steps": steps,
        "batch_size": 256 if min(map(len, rows[0])) > BIG else 128,
        "schedule": lambda t: 0.5 * (1 + torch.cos(math.pi * (t / steps).clamp(max=1))),
        "compile": not args.quick,
        "seed": args.seed,
        "progress": not args.quiet,
    }

    def build(x, y, decay, drop):
        made = model(x, y, 100 if name == "protein" else 50, decay, drop)
        return made, guide(made, drop)

    def chosen(grid, multiples, loss):
        grid = {key: values[: args.grid] for key, values in grid.items()}
        return choices(build, grid, multiples[: args.grid], data, rows, args.folds, device, loss=loss, **how)

    points = chosen(POINTS, (1.0,), pdrop.ELBO(per_example=False))  # every draw of a point is the same
    means = chosen(MEANS, MULTIPLES, pdrop.ELBO())
    record = {"folds_chose": points["folds"], "evidence_chose": points["evidence"], "at_dropout": means["folds"]}
    for way, found in record.items():
        text = f"{name}, {way}: log-likelihood {said(found['log_likelihood'])}, rmse {said(found['rmse'])}"
        print(f"{text}; {found['seconds']:.0f} s", flush=True)
    return record | {"source": data.source}


def report(experiment, records, others):
    """Report both ways of choosing side by side, and Laplace beside the guides of `uci`."""
    rows, close, faster, level, alone = [], [], [], [], []
    for r in records:
        folds, evidence = r["folds_chose"], r["evidence_chose"]
        gap = [a - b for a, b in zip(evidence["log_likelihood"], folds["log_likelihood"], strict=True)]
        middle, spread = mean_and_error(gap)
        row = {"set": r["set"], "by folds": said(folds["log_likelihood"]), "RMSE": said(folds["rmse"])}
        row |= {"by evidence": said(evidence["log_likelihood"]), "its RMSE": said(evidence["rmse"])}
        row |= {"evidence - folds": f"{middle:.3f} ± {spread:.3f}"}
        row |= {"at dropout's mean": said(r["at_dropout"]["log_likelihood"])}
        row |= {"seconds, folds": folds["seconds"], "seconds, evidence": evidence["seconds"]}
        close.append(middle >= -CLOSE)
        faster.append(evidence["seconds"] < folds["seconds"] / 2)
        known = {o["kind"]: o["log_likelihood"] for o in others if o["set"] == r["set"] and o["layers"] == 1}
        if "dropout" in known:
            mine = {kind: known[kind] for kind in GAUSSIAN if kind in known} | {
                "laplace, by folds": folds["log_likelihood"],
                "laplace, by evidence": evidence["log_likelihood"],
                AT_MEAN: r["at_dropout"]["log_likelihood"],
            }
            best, gain, error = _best(mine, known["dropout"])
            row |= {"dropout": said(known["dropout"]), "best Gaussian": best, "its gain": f"{gain:.3f} ± {error:.3f}"}
            level.append(gain >= -error)
            _, gain, error = _best({kind: mine[kind] for kind in mine if kind != AT_MEAN}, known["dropout"])
            alone.append(gain >= -error)
        rows.append(row)
    note = "Mean ± standard error over splits; seconds include compiling, curvature and predictions."
    experiment.table("Laplace approximations, one hidden layer", rows, note)

    def claim(text, held):
        if held:
            experiment.claim(text, held, f"{sum(held)} of {len(held)} sets")

    claim(f"evidence is below folds by no more than {CLOSE} nats", close)
    claim("in less than half the time", faster)
    text = "the best of mean field, low rank and Laplace, by test score, is at most a standard error below MC dropout"
    claim(text, level)
    claim(f"{text}, without the one at dropout's mean", alone)


def _best(scores, dropout):
    """Return the name of the method with the best scores, and its gain over MC dropout with the standard error."""
    best = max(scores, key=lambda kind: mean_and_error(scores[kind])[0])
    gains = [a - b for a, b in zip(scores[best], dropout, strict=False)]
    return best, *mean_and_error(gains)


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
