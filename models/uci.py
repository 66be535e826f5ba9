"""Nine UCI data sets: test log-likelihood and RMSE of MC dropout and related guides, chosen by cross-validation.

    for every split:   settings, τ  <-  argmax over settings and τ of  Σ_folds log p(y_held | x_held, the other folds)
                       score        <-  (1/N) Σ log p(y_test | x_test, all training data)      once, with T = 10,000

All splits, folds and settings of a set are one fleet. At σ = 0 the objective depends on τ and l only through the weight
decay λ = l²p/(2Nτ) (§4.2), so the folds choose λ; τ is optimised continuously, and l follows from the two.
"""

import itertools
import json
import statistics
from pathlib import Path

from experiments.collection import UCI_NAMES, uci
from experiments.experiment import VERDICTS, Experiment
from experiments.selection import ENSEMBLES, GRIDS, SEVEN, add_options, collect, select
from experiments.summaries import gain, mean_and_error, plot_gains, said, wins

PAPER = {  # 1 layer: log-likelihood, its standard error, RMSE (Gal and Ghahramani 2016, table 1)
    "boston": (-2.46, 0.06, 2.97), "concrete": (-3.04, 0.02, 5.23), "energy": (-1.99, 0.02, 1.66),
    "kin8nm": (0.95, 0.01, 0.10), "naval": (3.80, 0.01, 0.01), "power": (-2.80, 0.01, 4.02),
    "protein": (-2.89, 0.00, 4.36), "wine": (-0.93, 0.01, 0.62), "yacht": (-1.55, 0.03, 1.11),
}  # fmt: skip
ASKED = ("steps", "folds", "splits", "samples", "grid", "seed")  # options that identify a run


def run(name, kind, layers, args, device):
    """Train and score one method on one set; return the record."""
    data = uci(name)
    splits = min(args.splits, len(data.train_rows))
    return select(name, kind, layers, data, (data.train_rows[:splits], data.test_rows[:splits]), args, device)


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
    note += " A drop of 0.0002 is nearly a deterministic network with a fitted τ."
    experiment.table("MC dropout, 1 hidden layer", rows, note)
    rows = [{"method": m} | {n: said(scores[n, m]) if (n, m) in scores else "-" for n in names} for m in methods]
    experiment.table("Test log-likelihood of all methods", rows, "Kind and hidden layers; stacked: settings mixed.")
    tables_of_pairs(experiment, records, scores, names)
    twins = [
        {"set": r["set"], "method": f"{r['kind']}, {r['layers']}", "twins": f"{statistics.mean(r['twins']):.1%}"}
        | {"all rows": said(r["log_likelihood"]), "without twins": said(r["fresh_log_likelihood"])}
        for r in records
        if any(r.get("twins", []))
    ]
    if twins:
        note = "A twin has the inputs of a training row: a network may know its target by heart."
        experiment.table("Test log-likelihood without the rows that have a twin", twins, note)
    if plain:
        above = [r["set"] for r in plain if mean_and_error(r["log_likelihood"])[0] > PAPER[r["set"]][0]]
        number = f"its mean is above on {len(above)} of {len(plain)} sets; no ablation was run, so why is not known"
        experiment.claim(
            "MC dropout as trained here scores above the paper's figures", [r["set"] in above for r in plain], number
        )
    better = {m: wins(scores, m, "dropout, 1") for m in methods if m != "dropout, 1"}
    if better and plain:
        best = max(better, key=lambda m: len(better[m]))
        count = len(better[best])
        verdict = "holds" if count >= 2 / 3 * len(names) else "holds in part" if count else "does not hold"
        text = "an extension beats MC dropout by more than a standard error on two sets of three"
        mixed = len(wins(scores, best, "dropout, 1, stacked"))
        number = f"{best}, picked by these test scores: {count} of {len(names)} beside dropout unstacked,"
        number += f" {mixed} of {len(names)} beside dropout stacked"
        experiment.claim(text, verdict, number)
        for kind in (kind for kind in ENSEMBLES if f"{kind}, 1" in better):
            won, lost = better[f"{kind}, 1"], wins(scores, "dropout, 1", f"{kind}, 1")
            held = len(won) >= SEVEN * len(names) and not lost
            text = f"{kind}: above MC dropout by more than a standard error on seven sets of nine,"
            text += " and nowhere below by more than one"
            number = f"above on {len(won)} of {len(names)}; below: {', '.join(lost) or 'none'}"
            experiment.claim(text, VERDICTS[0 if held else 1 if won else 2], number)
        caption = "Gain over MC dropout with one hidden layer, with its standard error over splits."
        experiment.figure("gains", plot_gains(scores, "dropout, 1", "nats a point more than MC dropout"), caption)


def tables_of_pairs(experiment, records, scores, names):
    """Report gains over MC dropout, paired by split, and the RMSE of noise by input beside that of constant noise."""
    found = {(r["set"], f"{r['kind']}, {r['layers']}"): r for r in records}
    methods = list(dict.fromkeys(method for _, method in found))
    rows = []
    for method in (method for method in methods if method != "dropout, 1"):
        both = [name for name in names if {(name, method), (name, "dropout, 1")} <= scores.keys()]
        gains = {name: gain(scores, name, method, "dropout, 1") for name in both}
        row = {name: "{:.3f} ± {:.3f}".format(*gains[name]) if name in gains else "-" for name in names}
        steps = {found[name, method].get("steps") for name in both}
        rows.append({"method": method} | row | {"steps": ", ".join(map(str, sorted(steps, key=str)))})
    if rows:
        note = "Nats a point; differences are paired by split, with their standard error over splits."
        experiment.table("Gain over MC dropout with 1 hidden layer", rows, note)
    pairs = [m for m in methods if m.startswith(("dropout", "heteroscedastic"))]
    if any(method.startswith("heteroscedastic") for method in pairs):
        rows = [
            {"method": m} | {n: said(found[n, m]["rmse"]) if (n, m) in found else "-" for n in names} for m in pairs
        ]
        experiment.table("RMSE with constant noise and with noise by input", rows, "In the units of the target.")


def main(argv=None):
    experiment = Experiment("uci", __doc__)
    sets, kinds, few = list(UCI_NAMES), list(GRIDS), ["dropout", "heteroscedastic", "ensemble"]
    experiment.option("--sets", nargs="+", choices=sets, default=sets, quick=["yacht"], help="some of the nine sets")
    experiment.option("--kinds", nargs="+", choices=kinds, default=kinds, quick=few, help="of q and likelihood")
    experiment.option("--layers", nargs="+", type=int, default=[1, 2], quick=[1], help="hidden layers (1 and 2)")
    experiment.option("--splits", type=int, default=20, quick=2, help="splits per set; protein has 5")
    experiment.option("--samples", type=int, default=10_000, quick=50, help="draws for the test sets")
    experiment.option("--records", type=Path, help="report these records of earlier runs, and train nothing")
    add_options(experiment, steps=30_000)
    args = experiment.start(argv)
    tasks = [
        {"set": name, "kind": kind, "layers": layers}
        for kind, layers, name in itertools.product(args.kinds, args.layers, args.sets)
    ]

    def made(task):
        return run(task["set"], task["kind"], task["layers"], args, experiment.device)

    told = json.loads(args.records.read_text("utf-8")) if args.records else None
    report(experiment, told or collect(experiment, made, tasks, ASKED))
    experiment.finish()


if __name__ == "__main__":
    main()
