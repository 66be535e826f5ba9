"""Writes the results of the benchmark into its page, and their picture beside it, from folders of results.

pyro-dropout reproduce benchmark_contestants --suite full --out out/contestants
python docs/benchmark_table.py out/contestants/runs
"""

import argparse
from collections import Counter
from pathlib import Path
from statistics import mean, median

import torch
from make_figures import FIGURES, write_into_pages

from pyro_dropout.benchmark.problems import problems
from pyro_dropout.benchmark.result import Results
from pyro_dropout.benchmark.scores import Drawn, Truth, w2

WIDTHS = dict.fromkeys(("gap", "deep-gap", "deep-gp"), ("width", "width_gap"))
FAR = 100  # what is farther has not converged
EXACT = ("line", "last-layer")  # whose posteriors are Gaussian
HEADINGS = {"width": "at the data", "width_gap": "in the gap"}
SHOWN = ("mclmc", "ensemble", "laplace", "full-rank", "low-rank", "mean-field", "concrete", "dropout")  # in the picture


def merged(folders: list[Path]) -> Results:
    """Return the results of folders that were made with the same settings; of equal ones the last folder's count."""
    each = [Results.read(folder) for folder in folders]
    if len({str(found.settings) for found in each}) > 1:
        raise SystemExit(f"the folders have other settings: {[found.settings for found in each]}")
    problems = {name: problem for found in each for name, problem in found.problems.items()}
    records = {(r["entry"], r["problem"], r["seed"]): r for found in each for r in found.records}
    return Results(folders[0], each[0].settings, list(records.values()), problems)


def table_of(results: Results) -> str:
    """Return W₂ on every problem, and the widths on some, of the nearest posterior on networks first."""
    names = list(results.problems)
    tables = {name: results.on(name) for name in names}
    rows = {name: {row.name: row for row in table.rows} for name, table in tables.items()}
    columns = [(name, "w2") for name in names]
    columns += [(name, key) for name, keys in WIDTHS.items() if name in names for key in keys]
    networks = {name for name, problem in results.problems.items() if problem.kind != "parameters"}
    judged, lines = {(name, "w2") for name in networks or names}, {}
    for entry in ("reference", *results.entries):
        cells, far = [], []
        for name, key in columns:
            score = rows[name][entry].scores.get(key) if entry in rows[name] else None
            tried = entry == "reference" or any((r["entry"], r["problem"]) == (entry, name) for r in results.records)
            if score is None:
                cells.append("failed" if tried else "")
                far += [float("inf")] * (tried and (name, key) in judged)
                continue
            error = "" if score.error is None else f" ± {score.error:.3f}"
            cells.append(f"{score.mean:.3f}{error}" if key == "w2" else f"{score.mean:.2f}")
            if score.mean > FAR:
                cells[-1] = f"over {FAR}"
            if (name, key) in judged:
                far.append(score.mean / rows[name]["reference"].scores["w2"].mean)
        lines[entry] = median(far) if far else float("inf"), cells
    heads = [name if key == "w2" else f"{name}, width {HEADINGS[key]}" for name, key in columns]
    ranked = sorted(lines, key=lambda entry: (entry != "reference", lines[entry][0]))
    body = [f"| {entry} | {' | '.join(lines[entry][1])} |" for entry in ranked]
    return "\n".join([f"| | {' | '.join(heads)} |", "|---" * (len(heads) + 1) + "|", *body])


def facts_of(results: Results) -> str:
    """Return how the results were made, in a line."""
    seeds = Counter((record["entry"], record["problem"]) for record in results.records).values()
    counts = f"{min(seeds)} to {max(seeds)} seeds" if min(seeds) < max(seeds) else f"{max(seeds)} seeds"
    said = [f"{len(results.records)} results", counts]
    said += [f"{results.settings['steps']:,} steps", f"{results.settings['samples']:,} draws"]
    said.append("all test points" if results.settings["held_out"] else "no held-out test points")
    told = {", ".join(f"{name} {each}" for name, each in record["versions"].items()) for record in results.records}
    return "; ".join([*said, *sorted(told)])


def of_exact_draws(count: int) -> float:
    """Return W₂ of so many draws of posteriors that are Gaussian, averaged over problems and 20 repetitions."""
    torch.manual_seed(0)
    found = []
    for name in EXACT:
        known = Truth.of(problems("full")[name])
        drawn = [Drawn(known.mean + known.std * torch.randn(count, *known.mean.shape).double(), {}) for _ in range(20)]
        found += [w2(each, known) for each in drawn]
    return mean(found)


def main(argv: list[str] | None = None) -> None:
    """Print the table, and write it and the picture."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folders", nargs="+", type=Path, metavar="FOLDER", help="with benchmark.json")
    results = merged(parser.parse_args(argv).folders)
    exact = ", ".join(f"{of_exact_draws(count):.2f} of {count:,}" for count in (10, 16, 32, 200, 1000))
    measured = f"{table_of(results)}\n\n{facts_of(results)}.\n\nW₂ of exact draws ({' and '.join(EXACT)}): {exact}."
    print(measured)
    write_into_pages("benchmark", measured)
    if "gap" in results.problems:
        figure = results.plot("gap", [name for name in SHOWN if name in results.entries])
        figure.supxlabel("x", fontsize=9)
        figure.supylabel("f: mean and 95 %", fontsize=9)
        figure.savefig(FIGURES / "benchmark.png", dpi=110)


if __name__ == "__main__":
    main()
