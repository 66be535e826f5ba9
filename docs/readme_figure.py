"""Draws the README's picture and prints its numbers: ``python docs/readme_figure.py``, 2.5 minutes of one core."""

import argparse
from pathlib import Path

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

import pyro_dropout as pdrop

BLUE, VERMILION = "#0072B2", "#D55E00"  # of Okabe and Ito's palette
TAU, GAP = 25.0, (-0.8, 0.4)
PRIOR = {"prior": pdrop.Prior(), "likelihood": pdrop.Gaussian(TAU)}


def data(points: int = 15) -> tuple[Tensor, Tensor]:
    """Two clusters of points on a cosine, after Foong et al. (2019)."""
    generator = torch.Generator().manual_seed(0)
    left, right = torch.rand(2, points, 1, generator=generator)
    x = torch.cat([-2 + 0.6 * left, 1 + right])
    return x, torch.cos(2 * x + 0.8) + TAU**-0.5 * torch.randn(x.shape, generator=generator)


def model() -> pdrop.BayesianNet:
    torch.manual_seed(0)
    return pdrop.BayesianNet(nn.Sequential(nn.Linear(1, 50), nn.Tanh(), nn.Linear(50, 1)), **PRIOR)


def answers(x: Tensor, y: Tensor, grid: Tensor, quick: bool) -> dict[str, pdrop.prediction.Prediction]:
    """What four posteriors of one model say about f; only the way to approximate the posterior differs."""
    how = {
        "lr": 0.02,
        "schedule": pdrop.training.inverse_decay(),
        "seed": 0,
        "progress": False,
        "steps": 20 if quick else 3000,
    }
    ask, found = {"samples": 100 if quick else 2000, "seed": 0, "shared": True}, {}

    net, draws = model(), 20 if quick else 1000
    posterior = pdrop.nuts(net, x, y, samples=draws, warmup=draws, progress=False)
    found["The posterior itself (NUTS)"] = pdrop.predict(net, posterior, grid, **ask)

    net = model()
    ensemble = pdrop.Ensemble(net, members=50, start="anchor")
    pdrop.fit(net, ensemble, x, y, **how)
    found["Anchored ensemble, 50 members"] = pdrop.predict(net, ensemble, grid, **ask)

    net = model()
    laplace = pdrop.guides.AutoLaplace(net, "full")
    pdrop.fit(net, laplace, x, y, **how)
    found["Laplace, linearised"] = pdrop.predict(net, laplace, grid, method="linearised")

    net = model()
    dropout = pdrop.AutoDropout(net, keep={"0.weight": 1.0, "2.weight": 0.9})
    pdrop.fit(net, dropout, x, y, **how)
    found["MC dropout, keep 0.9"] = pdrop.predict(net, dropout, grid, **ask)
    return found


def draw(x: Tensor, y: Tensor, grid: Tensor, found: dict[str, pdrop.prediction.Prediction]) -> Figure:
    """One panel for each posterior: mean and bands of f, with NUTS' band as dashed lines in all of them."""
    figure = Figure(figsize=(12, 3.3), layout="constrained")
    bands = {name: (answer.mean[:, 0], answer.epistemic[:, 0].sqrt()) for name, answer in found.items()}
    (reference, width), t = next(iter(bands.values())), grid[:, 0]
    middle = (t > GAP[0]) & (t < GAP[1])
    for axes, (name, (mean, std)) in zip(figure.subplots(1, 4, sharex=True, sharey=True), bands.items(), strict=True):
        for wide, alpha in ((2, 0.18), (1, 0.3)):
            label = f"±{wide} std of f"
            axes.fill_between(t, mean - wide * std, mean + wide * std, color=BLUE, alpha=alpha, lw=0, label=label)
        axes.plot(t, mean, color=BLUE, lw=1.8, label="mean of f")
        for side in (-2, 2):
            label = "±2 std of NUTS" if side > 0 else None
            axes.plot(t, reference + side * width, "--", color="black", lw=0.9, label=label)
        axes.plot(x, y, "o", color=VERMILION, mec="white", mew=0.5, ms=4.5, label="data")
        share = (std[middle].mean() / width[middle].mean()).item()
        axes.set_title(name, fontsize=11)
        axes.set(xlabel="x", xlim=(-3.5, 3.5), ylim=(-2.5, 1.5))
        axes.text(0, -2.3, f"std in the gap: {share:.2f} × NUTS", ha="center", fontsize=9)
        axes.grid(alpha=0.2)
        print(f"{name}: std of f in the gap {std[middle].mean():.3f}, {share:.2f} of NUTS")
    figure.axes[0].set_ylabel("f(x)")
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=5, frameon=False)
    return figure


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a few steps and draws, to see that it runs")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "figures", metavar="FOLDER")
    args = parser.parse_args(argv)
    (x, y), grid = data(), torch.linspace(-3.5, 3.5, 141).unsqueeze(-1)
    draw(x, y, grid, answers(x, y, grid, args.quick)).savefig(args.out / "readme.png", dpi=130)


if __name__ == "__main__":
    main()
