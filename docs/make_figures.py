"""Draws the figures of the documentation that are missing; all of them anew: ``python docs/make_figures.py --all``.

What a drawing measures is printed, and written into its page between ``<!-- NAME: begin -->`` and its end.
"""

import argparse
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyro
import torch
from matplotlib.figure import Figure
from torch import Tensor, nn
from tqdm import trange

import pyro_dropout as pdrop

FIGURES = Path(__file__).parent / "figures"
BLUE, VERMILION = "#0072B2", "#D55E00"  # of Okabe and Ito's palette

# --- one model --------------------------------------------------------------------------------------------------------

NOISE, LENGTH_SCALE = 0.1, 0.5
GAP, END = 0.75, 2.0  # data lie where |x| is between the two
GRID = torch.linspace(-4, 4, 161)


def truth(x: Tensor) -> Tensor:
    return x + 0.6 * torch.sin(3 * x)


def toy_data(n: int = 200, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Two stretches of a curve, with nothing between them and nothing beyond."""
    generator = torch.Generator().manual_seed(seed)
    x = GAP + (END - GAP) * torch.rand(n, 1, generator=generator)
    x[::2] *= -1
    return x, truth(x) + NOISE * torch.randn(n, 1, generator=generator)


def toy_model() -> pdrop.BayesianNet:
    net = nn.Sequential(nn.Linear(1, 50), nn.ReLU(), nn.Linear(50, 50), nn.ReLU(), nn.Linear(50, 1, bias=False))
    prior = pdrop.Prior(length_scale=LENGTH_SCALE, bias_length_scale=LENGTH_SCALE)
    return pdrop.BayesianNet(net, prior, pdrop.Gaussian(tau=NOISE**-2))


# --- posteriors of every guide ----------------------------------------------------------------------------------------

# x has one column, and dropping it would drop x: dropout and Gaussian dropout leave the first layer (nearly) alone.
GUIDES: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "AutoDropout": (
        r"$w_r = z_r m_r,\ z_r \sim \mathrm{Bernoulli}(0.9)$",
        lambda model: pdrop.AutoDropout(model, keep={"0.weight": 1.0, "2.weight": 0.9, "4.weight": 0.9}),
    ),
    "AutoMultiplicative": (
        r"$w_r = m_r\,(1 + \sqrt{\alpha}\,\varepsilon_r),\ \alpha = 1/9$",
        lambda model: pdrop.AutoMultiplicative(model, alpha={"0.weight": 1e-4, "2.weight": 1 / 9, "4.weight": 1 / 9}),
    ),
    "AutoMeanField": (
        r"$w \sim \mathcal{N}(m, \mathrm{diag}\,\sigma^2)$",
        lambda model: pdrop.AutoMeanField(model, init_scale=0.05),
    ),
    "AutoRowMixture": (
        r"$w_r \sim \frac{1}{2}\Sigma_l\,\mathcal{N}(m_{rl}, \mathrm{diag}\,\sigma_{rl}^2)$",
        lambda model: pdrop.AutoRowMixture(model, components=2, init_scale=0.05),
    ),
    "AutoLowRank": (
        r"$w \sim \mathcal{N}(m, \mathrm{diag}\,\sigma^2 + VV^\top)$, rank 5",
        lambda model: pdrop.AutoLowRank(model, rank=5, init_scale=0.05),
    ),
    "AutoFullRank": (
        r"$w \sim \mathcal{N}(m, LL^\top)$",
        lambda model: pdrop.AutoFullRank(model, init_scale=0.05),
    ),
    "AutoConcreteDropout": (
        r"$w_r = z_r m_r,\ z_r \sim \mathrm{Bernoulli}(p)$, $p$ learned",
        lambda model: pdrop.AutoConcreteDropout(model, keep=0.9, max_keep=1.0),
    ),
}


def fitted(name: str, model: pdrop.BayesianNet, x: Tensor, y: Tensor, steps: int) -> Any:
    """Fit a guide; the learning rate falls to 3 % of its first value."""
    guide = GUIDES[name][1](model)
    # The draw of a weight adds up as many correlations ("lower") as there are weights, so these move more slowly.
    rate = lambda param: {"lr": 4e-4 if "lower" in param else 0.02, "lrd": 0.03 ** (1 / steps)}  # noqa: E731
    svi = pdrop.SVI(
        model, guide, pyro.optim.ClippedAdam(rate), pdrop.ELBO(kl="exact"), compile="auto" if steps > 100 else False
    )
    for _ in trange(steps, desc=name):
        svi.step(x, y)
    return guide


def asked(name: str, steps: int, samples: int) -> tuple[Tensor, Tensor, str, str]:
    """Fit a guide, and return the mean and std of f on the grid, its line of the table, and a note."""
    x, y = toy_data()
    pyro.clear_param_store()
    pyro.set_rng_seed(0)  # every guide starts from the same network
    model = toy_model()
    guide = fitted(name, model, x, y, steps)
    answer = pdrop.predict(model, guide, GRID.unsqueeze(-1), samples=samples, shared=True, seed=0)
    mean, std = answer.mean.squeeze(-1), answer.epistemic.sqrt().squeeze(-1)
    at_data = pdrop.predict(model, guide, x, samples=samples, shared=True, seed=0).mean.squeeze(-1)
    note = ""
    if isinstance(guide, pdrop.AutoConcreteDropout):  # whose draws are far from normal
        low, high = torch.quantile(answer.samples.squeeze(-1), torch.tensor([0.1587, 0.8413]), dim=0)
        learned = ", ".join(f"{keep:.3f} ({site})" for site, keep in guide.keeps().items())
        middle = f"the middle 68 % of its draws lie within {((high - low) / 2 / std).mean():.2f} std of f"
        note = f"`{name}` has learned to keep {learned}; {middle}."
    return mean, std, row(f"`{name}`", rmse(at_data, y), mean, std), note


def wide_limit(x: Tensor, y: Tensor, at: Tensor) -> tuple[Tensor, Tensor]:
    """Return the exact posterior of f for the same prior and infinitely many hidden units, as a yardstick."""
    first = pdrop.paper.ArcCosine(
        1, length_scale=torch.tensor(LENGTH_SCALE), bias_length_scale=torch.tensor(LENGTH_SCALE)
    )
    second = pdrop.paper.ArcCosine(1, bias_length_scale=torch.tensor(LENGTH_SCALE))
    gp = pdrop.generative.GP(pdrop.paper.Layered(second, first), tau=NOISE**-2).fit(x, y, steps=0)
    mean, variance = gp.predict(at, noise=False)
    return mean.squeeze(-1), variance.clamp_min(0).sqrt().squeeze(-1)


HEAD = """\
| guide | train RMSE | std of f on data | in the gap | at the edges | truth within ±2 std in the gap | at the edges |
|---|---|---|---|---|---|---|"""


def row(name: str, train_rmse: Tensor, mean: Tensor, std: Tensor) -> str:
    """Return a line of the table: how far off on the data, how wide where, and how often that is wide enough."""
    x = GRID
    data, gap, edges = (x.abs() > GAP) & (x.abs() < END), x.abs() < GAP, x.abs() > END
    widths = [f"{std[place].mean():.3f}" for place in (data, gap, edges)]
    within = (truth(x) - mean).abs() < 2 * std
    shares = [f"{100 * within[place].float().mean():.0f} %" for place in (gap, edges)]
    return "| " + " | ".join([name, f"{train_rmse:.3f}", *widths, *shares]) + " |"


def rmse(mean: Tensor, y: Tensor) -> Tensor:
    return (mean - y.squeeze(-1)).square().mean().sqrt()


def draw_posteriors(quick: bool) -> tuple[Figure, str]:
    steps, samples = (20, 20) if quick else (1000, 500)
    x, y = toy_data()
    rows = -(-len(GUIDES) // 4)
    figure = Figure(figsize=(13, 3.1 * rows), layout="constrained")
    panels = figure.subplots(rows, 4, sharex=True, sharey=True)
    exact, exact_std = wide_limit(x, y, GRID.unsqueeze(-1))
    table, notes = [HEAD], []
    for axes in panels.flat[len(GUIDES) :]:
        axes.set_axis_off()
    for axes, (name, (formula, _)) in zip(panels.flat, GUIDES.items(), strict=False):
        mean, std, line, note = asked(name, steps, samples)
        table.append(line)
        notes += [note] * bool(note)
        for wide, alpha in ((2, 0.18), (1, 0.3)):
            axes.fill_between(
                GRID, mean - wide * std, mean + wide * std, color=BLUE, alpha=alpha, lw=0, label=f"±{wide} std of f"
            )
        axes.plot(GRID, mean, color=BLUE, lw=1.8, label="mean of f")
        for side in (-2, 2):
            label = "±2 std, infinitely wide network" if side > 0 else None
            axes.plot(GRID, exact + side * exact_std, "--", color=VERMILION, lw=0.9, label=label)
        axes.plot(GRID, truth(GRID), ":", color="0.3", lw=1, label="truth")
        axes.plot(x, y, ".", color="black", ms=2.5, label="data")
        axes.set_title(f"{name}\n{formula}", fontsize=10)
        axes.tick_params(labelbottom=True)
        axes.grid(alpha=0.2)
    panels[0, 0].set(xlim=(-4, 4), ylim=(-6, 6))
    for axes in panels[:, 0]:
        axes.set_ylabel("y")
    handles, labels = panels[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=6, frameon=False)
    table.append(row("infinitely wide network, exact", rmse(wide_limit(x, y, x)[0], y), exact, exact_std))
    return figure, "\n".join([*table, "", *notes])


# --- simulation-based calibration -------------------------------------------------------------------------------------

SBC_POINTS = torch.linspace(-1.5, 1.5, 20).unsqueeze(-1)


def sbc_fit(make: Callable[[Any], Any], steps: int) -> Callable[[Any, Tensor, Tensor], Any]:
    """Return a function that trains a guide afresh on simulated data."""

    def fit(model: Any, x: Tensor, y: Tensor) -> Any:
        guide = make(model)
        pdrop.fit(model, guide, x, y, steps=steps, lr=0.02, compile=False, progress=False)
        return guide

    return fit


def draw_sbc(quick: bool) -> tuple[Figure, str]:
    """Rank true functions among draws of dropout and of mean field, for data that the model itself has made."""
    guides: dict[str, Callable[[Any], Any]] = {
        "AutoDropout, keep 0.9": lambda model: pdrop.AutoDropout(
            model, keep={"0.weight": 1.0, "2.weight": 0.9}, init="paper"
        ),
        "AutoMeanField": lambda model: pdrop.AutoMeanField(model, init="paper", init_scale=0.05),
    }
    figure = Figure(figsize=(10, 3.6), layout="constrained")
    lines = ["| posterior | place | inside the band | mean distance of a rank from the middle |", "|---|---|---|---|"]
    for ax, (name, make) in zip(figure.subplots(1, 2, sharey=True), guides.items(), strict=True):
        net = nn.Sequential(nn.Linear(1, 10), nn.Tanh(), nn.Linear(10, 1))
        model = pdrop.BayesianNet(net, pdrop.Prior(), pdrop.Gaussian(tau=100.0))
        found = pdrop.sbc(model, sbc_fit(make, 3 if quick else 300), SBC_POINTS, replications=5 if quick else 100)
        found.plot(ax)
        ax.set_title(f"{name}: {len(found.ranks['f[0]'])} simulated data sets", fontsize="medium")
        ax.legend(frameon=False, fontsize="small", loc="lower left")
        for key, inside in found.inside_band().items():
            spread = (found.ranks[key].double() / found.samples - 0.5).abs().mean()
            lines.append(f"| {name} | {key} | {'yes' if inside else 'no'} | {spread:.2f} |")
    return figure, "\n".join(lines)


# --- the package ------------------------------------------------------------------------------------------------------

ROOMS = {  # a row each, from the first that a newcomer reads to where people meet the library
    "tensors in, tensors out": ["mathematics", "engines"],
    "the paper": ["generative", "guides"],
    "trained": ["training"],
    "asked, judged": ["prediction", "judging", "references"],
    "side by side; tables": ["comparison", "benchmark", "tables", "datasets", "tabular"],
    "where people meet it": ["sklearn", "cli"],
}


def draw_layout(quick: bool) -> tuple[Figure, str]:
    """Draw the subpackages, as wide as they have lines of Python, above what they import."""
    del quick  # nothing is measured that takes time
    figure = Figure(figsize=(9, 5.2), layout="constrained")
    ax = figure.subplots()
    sizes = {room: lines_of(room) for row in ROOMS.values() for room in row}
    widest = max(sum(max(sizes[room], 900) + 150 for room in row) for row in ROOMS.values())
    for level, (title, row) in enumerate(ROOMS.items()):
        left = 0
        for room in row:
            width = max(sizes[room], 900)  # room for its name
            ax.barh(level, width, left=left, height=0.72, color=BLUE, alpha=0.25 + 0.1 * level, edgecolor="white")
            ax.text(left + width / 2, level, f"{room}\n{sizes[room]:,}", ha="center", va="center", fontsize=8)
            left += width + 150
        ax.text(-150, level, title, ha="right", va="center", fontsize=8)
    ax.annotate("", (widest * 1.02, -0.4), (widest * 1.02, len(ROOMS) - 0.6), arrowprops={"arrowstyle": "->"})
    ax.text(widest * 1.035, len(ROOMS) / 2 - 0.5, "imports", rotation=90, va="center", fontsize=8)
    ax.set_xlim(-widest * 0.24, widest * 1.08)
    ax.set_axis_off()
    return figure, ""


def lines_of(room: str) -> int:
    """Return how many lines of Python a subpackage has."""
    folder = Path(pdrop.__file__).parent / room
    return sum(len(path.read_text("utf-8").splitlines()) for path in folder.rglob("*.py"))


# --- all figures ------------------------------------------------------------------------------------------------------

DRAWINGS: dict[str, Callable[[bool], tuple[Any, str]]] = {
    "kl_gap": lambda quick: (pdrop.comparison.plot_kl_gap(draws=20 if quick else 400), ""),
    "six_posteriors": draw_posteriors,
    "sbc": draw_sbc,
    "layout": draw_layout,
}


def write_into_pages(name: str, measured: str) -> None:
    """Put what a drawing has measured between its two marks, in the page that has them."""
    for page in sorted(FIGURES.parent.glob("*.md")):
        found = page.read_text("utf-8")
        marks = f"<!-- {name}: begin -->\n", f"\n<!-- {name}: end -->"
        text = re.sub(f"(?<={marks[0]}).*?(?={marks[1]})", lambda _: measured, found, flags=re.DOTALL)
        if text != found:
            page.write_text(text, "utf-8")


def main(argv: list[str] | None = None) -> None:
    """Write the figures beside this file and say where they are."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=DRAWINGS, help="one figure, whether it is there or not")
    parser.add_argument("--all", action="store_true", help="every figure anew; it takes some minutes")
    parser.add_argument("--quick", action="store_true", help="a few steps and draws, to see that it runs")
    parser.add_argument("--out", type=Path, default=FIGURES, metavar="FOLDER", help="where to put the pictures")
    args = parser.parse_args(argv)
    args.out.mkdir(exist_ok=True)
    missing = [name for name in DRAWINGS if args.all or not (args.out / f"{name}.png").exists()]
    for name in [args.only] if args.only else missing:
        with warnings.catch_warnings(action="ignore" if args.quick else "default"):  # a few steps train nothing
            figure, measured = DRAWINGS[name](args.quick)
        figure.savefig(args.out / f"{name}.png", dpi=130)
        print(*filter(None, [measured]), f"wrote {name}.png", sep="\n")
        if args.out == FIGURES and not args.quick:
            write_into_pages(name, measured)


if __name__ == "__main__":
    main()
