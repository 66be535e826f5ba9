"""Products in bfloat16: ``python -m tests.benchmarks.precision [--device cuda] [--accuracy [--sets ...]]``.

Steps of AutoDropout as ``pd.fit`` takes them, in TF32 and in bf16, beside the same steps written by hand in JAX, in one
process and in turns; and predictions of 10,000 points with 1,000 draws. With ``--accuracy``, test log-likelihoods of a
network that was trained and read in float32 and in bf16, on MNIST and on three regression sets.
"""

import argparse
import statistics
import warnings

import torch
from torch import nn

import pyro_dropout as pd
from pyro_dropout.generative.precision import products_in
from tests.benchmarks import jax_peers
from tests.benchmarks.ours import dropout, fitting
from tests.benchmarks.predictions import walked
from tests.benchmarks.sizes import DEEP, SMALL, WIDE, Size
from tests.benchmarks.timing import Contestant, Settings, interleave, median_ratio, ready, seconds

STEP_LIMITS = {"1-1024x5-1": 130.0, "784-1024x3-10": 115.0}  # µs
TO_JAX, TO_TF32 = 0.9, 0.6
SETS = ("concrete", "kin8nm", "power")


def steps(size: Size, device: str, rounds: int) -> None:
    """Print the time of a step in both precisions, ours and JAX's."""

    def ours(products: str) -> Contestant:
        def build() -> object:
            return fitting(size, device, dropout, per_example=True, compile=True, products=products)  # type: ignore

        return Contestant(f"pd.fit, {products}", build)  # type: ignore[arg-type]

    def jax(precision: str) -> Contestant:
        return Contestant(f"JAX by hand, {precision}", lambda: jax_peers.dropout(size, device, precision))

    whole, low = ours("float32"), ours("bf16")
    everyone = [whole, low, jax("high"), jax("bf16")]
    here = ready(everyone, device, 0.2, {})
    interleave(here, rounds, device)
    for each in here:
        limit = f" (at most {STEP_LIMITS[size.name]:.0f})" if each is low and size.name in STEP_LIMITS else ""
        print(f"{size.name}, {device}: {each.name}: {each.best:.1f} µs a step{limit}")
    print(f"{size.name}: bf16 takes {median_ratio(low, whole):.2f} of TF32")
    if everyone[-1] in here:
        print(f"{size.name}: {median_ratio(low, everyone[-1]):.2f} of JAX in bf16 (at most {TO_JAX})")


def predictions(size: Size, device: str, points: int, samples: int, rounds: int) -> None:
    """Print the time of predictions in three precisions."""
    taken = {}
    for products in ("float32", "bf16", "fp16"):
        with products_in(products):  # type: ignore[arg-type]
            predict, _ = walked(size, Settings(device), samples, points, compile=device == "cuda")
            taken[products] = seconds(predict, device, rounds)
        ratio = taken[products] / taken["float32"]
        limit = "" if products == "float32" else f", {ratio:.2f} of TF32 (at most {TO_TF32})"
        print(f"{size.name}, {points} x {samples} draws, {products}: {taken[products]:.3f} s{limit}", flush=True)


def accuracy(device: str, sets: list[str], quick: bool) -> None:
    """Print the difference of test log-likelihoods between the two precisions, with its standard error."""
    from models.experiments.collection import mnist, uci

    def compared(name: str, found: list[tuple[float, float]]) -> None:
        gaps = [low - whole for whole, low in found]
        spread = [whole for whole, _ in found]
        error = statistics.stdev(spread) / len(spread) ** 0.5
        middle = statistics.mean(gaps)
        verdict = "holds" if middle >= -error else "does not hold"
        print(
            f"{name}: log-likelihood {statistics.mean(spread):.4f} ± {error:.4f} in float32, bf16 {middle:+.4f}:"
            f" within a standard error {verdict}",
            flush=True,
        )

    def scored(model: object, guide: object, train: tuple, test: tuple, products: str, **how: object) -> float:  # type: ignore
        pd.fit(model, guide, *train, precision=products, progress=False, device=device, **how)  # type: ignore[arg-type]
        answer = pd.predict(model, guide, test[0], samples=200, seed=0, precision=products)  # type: ignore[arg-type]
        return float(answer.log_prob(test[1].to(device)).mean())

    for name in (name for name in sets if name != "mnist"):
        data = uci(name)
        found = []
        for k in range(2 if quick else 5):
            x, y = data.x[data.train_rows[k]], data.y[data.train_rows[k]]
            test = data.x[data.test_rows[k]], data.y[data.test_rows[k]]
            pair = []
            for products in ("float32", "bf16"):
                torch.manual_seed(k)
                net = nn.Sequential(
                    nn.Linear(x.shape[1], 50), nn.ReLU(), nn.Linear(50, 50), nn.ReLU(), nn.Linear(50, 1)
                )
                model = pd.Standardised(pd.BayesianNet(net, likelihood=pd.Gaussian(10.0, learn=True)), x, y)
                guide = pd.AutoDropout(model, keep=0.995)
                how = {"steps": 200 if quick else 4000, "batch_size": 128, "lr": 0.01, "seed": k}
                pair.append(scored(model, guide, (x, y), test, products, **how))
            found.append((pair[0], pair[1]))
        compared(name, found)
    if "mnist" not in sets:
        return
    images = mnist()
    pairs = (images.x, images.y), (images.test_x, images.test_y)
    found = []
    train, test = ((x.flatten(1).to(device), y.to(device)) for x, y in pairs)
    for k in range(2 if quick else 5):
        pair = []
        for products in ("float32", "bf16"):
            torch.manual_seed(k)
            model = WIDE.model(device)
            guide = pd.AutoDropout(model, keep=0.9).to(device)
            how = {"epochs": 1 if quick else 5, "batch_size": 512, "seed": k}
            pair.append(scored(model, guide, train, test, products, **how))
        found.append((pair[0], pair[1]))
    compared("mnist", found)


def main() -> None:
    """Run what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--accuracy", action="store_true", help="compare scores instead of times")
    parser.add_argument("--sets", nargs="+", choices=[*SETS, "mnist"], default=[*SETS, "mnist"], help="to compare on")
    parser.add_argument("--quick", action="store_true", help="few points, to check that it runs")
    args = parser.parse_args()
    torch.set_float32_matmul_precision("high")
    warnings.simplefilter("ignore")
    if args.accuracy:
        accuracy(args.device, args.sets, args.quick)
        return
    for size in (SMALL,) if args.quick else (SMALL, DEEP, WIDE):
        steps(size, args.device, 3 if args.quick else 7)
    predictions(SMALL if args.quick else WIDE, args.device, 100 if args.quick else 10_000, 1000, 3)


if __name__ == "__main__":
    main()
