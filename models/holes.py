"""Holes in tables: trained without the middle third of one input, what does a posterior say inside the hole?

    for every input q of a set:   hole = the rows whose rank in x_q lies in the middle third;   rest = all others
                                  settings, τ  <-  argmax Σ_folds log p(y_held | x_held, the other folds of the rest)
                                  score        =   (1/n) Σ_hole log p(y | x, rest),   once

These are the splits of Foong, Li, Hernández-Lobato and Turner (2019). A hole is unlike what the folds hold back, so a
posterior that is right at the data may be too sure of itself there. Inputs and targets are standardised by the rest
only. Rows with equal values of the input are ranked in random order, so a value may lie on both sides of an edge; a
table says how many rows of the holes have a value that also occurs in the rest. An input with fewer than three values
has no middle: it is left out, by name.
"""

import itertools
import statistics

import torch
from experiments.collection import UCI_NAMES, uci
from experiments.experiment import VERDICTS, Experiment
from experiments.selection import ENSEMBLES, SEVEN, add_options, collect, select
from experiments.summaries import gain, mean_and_error, plot_gains, said

KINDS = ("dropout", "mean-field", *ENSEMBLES)
ASKED = ("steps", "folds", "samples", "grid", "seed", "inputs")  # options that identify a run
LEAST = 3  # different values of an input that has a middle


# --- holes ------------------------------------------------------------------------------------------------------------
def hole(values, seed):
    """Return the rows beside the hole in an input and those inside it; rows of equal value in random order."""
    order = torch.randperm(len(values), generator=torch.Generator().manual_seed(seed), device="cpu")
    order = order[values[order].argsort(stable=True)]
    third = len(values) // 3
    return torch.cat([order[:third], order[-third:]]), order[third:-third]


def holes(x, seed, most):
    """Return the rows of every hole, the names of the inputs that have one and of those that have not, and ties.

    Ties are the share of the rows in each hole whose value of the input also occurs beside the hole.
    """
    columns = dict(enumerate(x.T, 1))
    left_out = [k for k, values in columns.items() if len(values.unique()) < LEAST]
    kept = [k for k in columns if k not in left_out][:most]
    rows = [hole(columns[k], seed + k) for k in kept]
    values = [(columns[k][inside], columns[k][rest]) for k, (rest, inside) in zip(kept, rows, strict=True)]
    ties = [torch.isin(inside, rest).double().mean().item() for inside, rest in values]
    names = {key: [f"input {k}" for k in which] for key, which in (("inputs_used", kept), ("left_out", left_out))}
    return tuple(map(list, zip(*rows, strict=True))), names | {"ties": ties}


def run(name, kind, args, device):
    """Train and score one method in all holes of one set; return the record."""
    data = uci(name)
    rows, told = holes(data.x, args.seed, args.inputs)
    return select(name, kind, 1, data, rows, args, device) | told


# --- what is found ----------------------------------------------------------------------------------------------------
def report(experiment, records):
    """Report the scores of all methods in the holes of each set, and whether ensembles are better than MC dropout."""
    by = {(r["set"], r["kind"]): r for r in records}
    names, kinds = (list(dict.fromkeys(key[k] for key in by)) for k in (0, 1))
    first = [next(by[name, kind] for kind in kinds if (name, kind) in by) for name in names]
    rows = [
        {"set": r["set"], "source": r["source"], "holes": len(r["inputs_used"]),
         "left out": ", ".join(r["left_out"]) or "none", "ties": f"{statistics.mean(r['ties']):.0%}"}
        for r in first
    ]  # fmt: skip
    note = "Left out: inputs with fewer than three values. Ties: rows in a hole whose value also occurs beside it."
    experiment.table("Holes", rows, note)
    scores = {key: r["log_likelihood"] for key, r in by.items()}
    coverage = {key: f"{mean_and_error(r['coverage'])[0]:.1%}" for key, r in by.items()}
    for title, shown, note in (
        ("Log-likelihood in the holes", {key: said(value) for key, value in scores.items()}, "Nats per point"),
        ("Coverage of the 95 % interval in the holes", coverage, "Share of the targets inside the interval"),
        ("RMSE in the holes", {key: said(r["rmse"]) for key, r in by.items()}, "In the units of the target"),
    ):
        rows = [{"set": name} | {kind: shown.get((name, kind), "-") for kind in kinds} for name in names]
        experiment.table(title, rows, f"{note}; mean over holes{'' if shown is coverage else ' ± standard error'}.")
    judged = [kind for kind in ENSEMBLES if kind in kinds and "dropout" in kinds]
    for kind in judged:
        both = [name for name in names if {(name, kind), (name, "dropout")} <= set(by)]
        above = [name for name in both if gain(scores, name, kind, "dropout")[0] > 0]
        text = f"{kind}: mean log-likelihood in the holes above MC dropout's on seven sets of nine"
        verdict = VERDICTS[0 if both and len(above) >= SEVEN * len(both) else 1 if above else 2]
        experiment.claim(text, verdict, f"on {len(above)} of {len(both)} ({', '.join(above) or 'none'})")
    if "dropout" in kinds and len(kinds) > 1:
        caption = "Gain in log-likelihood over MC dropout in the holes, with its standard error over holes."
        experiment.figure("gains", plot_gains(scores, "dropout", "nats a point more than MC dropout"), caption)


def main(argv=None):
    experiment = Experiment("holes", __doc__)
    sets = list(UCI_NAMES)
    experiment.option("--sets", nargs="+", choices=sets, default=sets, quick=["yacht"], help="some of the nine sets")
    experiment.option("--kinds", nargs="+", choices=KINDS, default=list(KINDS), help="of posterior")
    experiment.option("--inputs", type=int, default=99, quick=2, help="maximum number of holes per set")
    experiment.option("--samples", type=int, default=1000, quick=50, help="draws in the holes (1000)")
    add_options(experiment, steps=15_000)
    args = experiment.start(argv)
    tasks = [{"set": name, "kind": kind} for kind, name in itertools.product(args.kinds, args.sets)]
    ran = lambda task: run(task["set"], task["kind"], args, experiment.device)  # noqa: E731
    report(experiment, collect(experiment, ran, tasks, ASKED))
    experiment.finish()


if __name__ == "__main__":
    main()
