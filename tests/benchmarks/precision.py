"""Products in bfloat16 beside TF32, and beside the same steps written by hand in JAX."""

from collections.abc import Iterator

from pyro_dropout.generative.precision import products_in
from tests.benchmarks import jax_peers
from tests.benchmarks.figures import Asked, Figure, benchmark
from tests.benchmarks.ours import dropout, fitting
from tests.benchmarks.predictions import walked
from tests.benchmarks.sizes import DEEP, SMALL, WIDE, Size
from tests.benchmarks.timing import Advance, Contestant, interleave, median_ratio, ready, seconds

STEP_LIMITS = {DEEP.name: 130.0, WIDE.name: 115.0}  # µs, of bf16 on an H200


def steps(size: Size, asked: Asked) -> Iterator[Figure]:
    """Yield the time of a step in both precisions, ours and JAX's."""

    def ours(products: str) -> tuple[Advance, int]:
        return fitting(size, asked.device, dropout, per_example=True, compile=True, products=products)  # type: ignore

    def jax(precision: str) -> Contestant:
        return Contestant(f"JAX by hand, {precision}", lambda: jax_peers.dropout(size, asked.device, precision))

    whole, low = (Contestant(f"fit, {name}", lambda name=name: ours(name)) for name in ("float32", "bf16"))  # type: ignore
    by_hand = jax("bf16")
    here = ready([whole, low, jax("high"), by_hand], asked.device, asked.pick(0.2, 0.01))
    interleave(here, asked.rounds, asked.device)
    for each in here:
        limit = STEP_LIMITS.get(size.name) if each is low and asked.device == "cuda" else None
        yield Figure(f"{size.name}, {each.name}", each.best, "µs a step", most=limit)
    yield Figure(f"{size.name}, bf16 over float32", median_ratio(low, whole))
    if by_hand in here:
        yield Figure(f"{size.name}, bf16 over JAX in bf16", median_ratio(low, by_hand), most=0.9)


@benchmark("precision", "cuda")
def precision(asked: Asked) -> Iterator[Figure]:
    """Steps of three networks, and predictions of 10,000 points with 1,000 draws."""
    for size in asked.pick((SMALL, DEEP, WIDE), (SMALL,)):
        yield from steps(size, asked)
    size, points, samples = asked.pick((WIDE, 10_000, 1000), (SMALL, 100, 100))
    base = 0.0
    for products in ("float32", "bf16"):
        with products_in(products):  # type: ignore[arg-type]
            predict, _ = walked(size, asked.device, samples, points, compile=asked.device == "cuda")
            taken = seconds(predict, asked.device, 3)
        base = base or taken
        limit = None if products == "float32" else 0.6
        yield Figure(f"predictions of {size.name}, {products}, {taken:.3f} s, over float32", taken / base, most=limit)
