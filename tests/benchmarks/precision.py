"""Products in bfloat16: ``python -m tests.benchmarks.precision [--device cuda] [--accuracy [--sets ...]]``.

Steps of AutoDropout as ``fit`` takes them, in TF32 and in bf16, beside the same steps written by hand in JAX, in one
process and in turns; and predictions of 10,000 points with 1,000 draws. With ``--accuracy``, test log-likelihoods of a
network that was trained and read in float32 and in bf16, on MNIST and on three regression sets.
"""

import argparse
import statistics
import warnings
from typing import Any

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

        return Contestant(f"fit, {products}", build)  # type: ignore[arg-type]

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
    for name in sets:
        found = [
            [scored(name, k, products, device, quick) for products in ("float32", "bf16")]
            for k in range(2 if quick else 5)
        ]
        whole = [each for each, _ in found]
        error = statistics.stdev(whole) / len(whole) ** 0.5
        gap = statistics.mean(low - each for each, low in found)
        verdict = "holds" if gap >= -error else "does not hold"
        told = f"log-likelihood {statistics.mean(whole):.4f} ± {error:.4f} in float32, bf16 {gap:+.4f}"
        print(f"{name}: {told}: within a standard error {verdict}", flush=True)


def scored(name: str, k: int, products: str, device: str, quick: bool) -> float:
    """Return the mean test log-likelihood of a network that was trained and read with these products."""
    from models.experiments.collection import mnist, uci

    torch.manual_seed(k)
    if name == "mnist":
        images = mnist()
        train, test = (
            (x.flatten(1).to(device), y.to(device)) for x, y in ((images.x, images.y), (images.test_x, images.test_y))
        )
        model: Any = WIDE.model(device)
        guide = pd.AutoDropout(model, keep=0.9).to(device)
        how: Any = {"epochs": 1 if quick else 5, "batch_size": 512}
    else:
        data = uci(name)
        train, test = ((data.x[rows[k]], data.y[rows[k]]) for rows in (data.train_rows, data.test_rows))
        net = nn.Sequential(nn.Linear(data.x.shape[1], 50), nn.ReLU(), nn.Linear(50, 50), nn.ReLU(), nn.Linear(50, 1))
        model = pd.Standardised(pd.BayesianNet(net, likelihood=pd.Gaussian(10.0, learn=True)), *train)
        guide = pd.AutoDropout(model, keep=0.995)
        how = {"steps": 200 if quick else 4000, "batch_size": 128, "lr": 0.01}
    how |= {"precision": products, "device": device}
    pd.fit(model, guide, *train, seed=k, progress=False, **how)
    answer = pd.predict(model, guide, test[0], samples=200, seed=0, precision=products)  # type: ignore[arg-type]
    return float(answer.log_prob(test[1].to(device)).mean())


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
