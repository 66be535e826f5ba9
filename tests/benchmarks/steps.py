"""Microseconds for one training step, of everyone who takes such steps, in turns and in one process."""

import gc
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pyro
import torch

import pyro_dropout as pd
from tests.benchmarks import in_jax
from tests.benchmarks.contestants import BASELINE, of_svi, ours, plain
from tests.benchmarks.figures import Asked, Figure, benchmark
from tests.benchmarks.settings import DEEP, GUIDES, SMALL, WIDE, Setting, drawn, one_by_one
from tests.benchmarks.timing import Contestant, median_ratio, raced

EPOCH = 8  # batches in the data of the contestant who shuffles
ROWS: dict[str, dict[str, Any]] = {
    "AutoDropout": {},
    "AutoMeanField, one draw a step": {"guide": "mean field", "one_draw": True},
    "AutoMeanField, a draw for each point": {"guide": "mean field"},
    "AutoLowRank rank 10, one draw a step": {"guide": "low rank", "one_draw": True},
    "AutoConcreteDropout": {"guide": "concrete"},
    "AutoMultiplicative": {"guide": "multiplicative"},
    "AutoRowMixture, 2 components": {"guide": "mixture"},
}
IN_FP32 = {BASELINE, "fit, AutoDropout", "fit, AutoMeanField, one draw a step"}


def lined_up(setting: Setting, asked: Asked, precision: str) -> list[Contestant]:
    """Return the baseline and the others; where TF32 was measured, fp32 has the main ones only."""
    rows = ROWS | {"AutoDropout, shuffled mini-batches": {"points": EPOCH * setting.batch}}
    everyone = [
        ours(f"fit, {name}", replace(setting, **more), asked.device, compile=asked.compile)
        for name, more in rows.items()
    ]
    everyone += of_svi(setting, asked.device, compile=asked.compile)
    everyone += [make(setting, asked.device, precision) for make in (in_jax.by_hand, in_jax.numpyro_mean_field)]
    if precision == "highest" and "high" in asked.precisions:
        everyone = [each for each in everyone if each.name in IN_FP32 or each.name.startswith("JAX")]
    return [plain(setting, asked.device), *(each for each in everyone if re.search(asked.who, each.name))]


def measured(setting: Setting, asked: Asked, precision: str) -> Iterator[Figure]:
    """Yield the time of each contestant on one network; on a GPU a small one has a limit beside JAX."""
    torch.set_float32_matmul_precision(precision)
    pyro.set_rng_seed(0)
    everyone = raced(lined_up(setting, asked, precision), asked)
    found = {each.name: each for each in everyone}
    baseline = found[BASELINE]
    case = f"{setting.name}, batch {setting.batch}, {asked.precisions[precision]}"
    for each in everyone:
        what = f"{case}, {each.name}"
        yield Figure(what, each.best, "µs a step")
        yield Figure(f"{what}, over the baseline", each.best / baseline.best)
        yield Figure(f"{what}, over the baseline, the median of the rounds", median_ratio(each, baseline))
    mine, jax = found.get("fit, AutoDropout"), found.get("JAX by hand, lax.scan")
    if mine and jax:
        most = 0.7 if asked.device == "cuda" and setting is SMALL else None
        yield Figure(f"{case}, fit over JAX by hand", median_ratio(mine, jax), most=most)


@benchmark("steps", "cpu", "cuda")
def steps(asked: Asked) -> Iterator[Figure]:
    """One step of Adam on one batch, the same at every step."""
    for precision in asked.precisions:
        for setting in [SMALL] if asked.quick else [SMALL, DEEP, WIDE][: 3 if asked.device == "cuda" else 2]:
            yield from measured(setting, asked, precision)
            gc.collect()  # tensors and programs of no more use


@benchmark("precision", "cuda")
def precision(asked: Asked) -> Iterator[Figure]:
    """Steps with products in bfloat16, beside TF32, and beside the same written by hand in JAX."""
    for setting in asked.pick((SMALL, DEEP, WIDE), (SMALL,)):
        whole = ours("fit, float32", setting, asked.device)
        low = ours("fit, bf16", setting, asked.device, precision="bf16")
        jax = in_jax.by_hand(setting, asked.device, "bf16")
        here = raced([whole, low, in_jax.by_hand(setting, asked.device, "high"), jax], asked)
        for each in here:
            limit = {DEEP: 130.0, WIDE: 115.0}.get(setting) if each is low else None
            yield Figure(f"{setting.name}, {each.name}", each.best, "µs a step", most=limit)
        yield Figure(f"{setting.name}, bf16 over float32", median_ratio(low, whole))
        if jax in here:
            yield Figure(f"{setting.name}, bf16 over JAX in bf16", median_ratio(low, jax), most=0.9)


def beside(settings: Sequence[Setting], asked: Asked) -> Iterator[Figure]:
    """Yield what each setting takes beside an eager step or, on a GPU, beside the same by hand in JAX."""
    on_gpu, ratios = asked.device == "cuda", []
    for setting in settings:
        mine = ours("fit", setting, asked.device)
        base = in_jax.by_hand(setting, asked.device) if on_gpu else plain(setting, asked.device)
        raced([mine, base], asked)
        ratios.append(mine.best / base.best)
        yield Figure(f"{setting}, {mine.note}, {mine.best:.1f} µs, over {base.name}", ratios[-1])
    mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
    yield Figure("on average (geometric)", mean, most=0.65 if on_gpu else None)
    yield Figure("largest", max(ratios), most=1.0 if on_gpu else None)


@benchmark("general", "cuda")
def general(asked: Asked) -> Iterator[Figure]:
    """Settings that are drawn at random, with a fixed seed."""
    guides = in_jax.GUIDES if asked.device == "cuda" else tuple(GUIDES)
    return beside(drawn(asked.pick(24, 2), 2026, guides), asked)


@benchmark("one-by-one", "cpu")
def one_at_a_time(asked: Asked) -> Iterator[Figure]:
    """13-50-1 with dropout, and what differs from it in one thing."""
    return beside([each for each in one_by_one() if re.search(asked.who, str(each))][: asked.pick(None, 2)], asked)


def replica(seed: int) -> tuple[Any, Any]:
    """Return one network of a fleet."""
    torch.manual_seed(seed)
    model = SMALL.model("cpu")
    return model, GUIDES["dropout"](model)


@benchmark("fleets", "cpu", "cuda")
def fleets(asked: Asked) -> Iterator[Figure]:
    """One step of all networks of a ``Fleet`` of 13-50-1, each with mini-batches of its own, beside plain steps."""
    (alone,) = raced([plain(SMALL, asked.device)], asked)
    on_gpu = asked.device == "cuda"
    counts = [(1, 2000), (80, 2000), (1600, 500)] if on_gpu else [(1, 500), (10, 200), (80, 50)]
    limits = {80: 35.0, 1600: 120.0} if on_gpu else {}
    x, y = SMALL.data("cpu", 4 * SMALL.batch)
    how: Any = {"batch_size": SMALL.batch, "device": asked.device, "compile": asked.compile, "progress": False}
    for nets, count in asked.pick(counts, [(1, 5), (8, 5)]):
        fleet = pd.Fleet(replica, {"seed": list(range(nets))})
        us = min(1e6 / fleet.fit(x, y, steps=count, **how).steps_per_second for _ in range(1 + asked.rounds // 2))
        yield Figure(f"{nets} networks", us, "µs a step of all", most=limits.get(nets))
        yield Figure(f"{nets} networks, over as many plain steps", us / (nets * alone.best))
