"""What an ensemble costs beside one network."""

from collections.abc import Callable, Iterator
from typing import Any

import pyro_dropout as pd
from tests.benchmarks.figures import Asked, Figure, benchmark
from tests.benchmarks.sizes import DEEP, SMALL
from tests.benchmarks.timing import Contestant, interleave, median_ratio


@benchmark("ensembles")
def ensembles(asked: Asked) -> Iterator[Figure]:
    """Compiled steps of ``fit``, in trainings that take turns, on batches of 128 points."""
    for size, members in ((SMALL, 32), (DEEP, 8))[: asked.pick(2, 1)]:
        x, y = size.data("cpu", 20 * 128)

        def training(make: Callable[[Any], Any], size: Size = size, x: Any = x, y: Any = y) -> Any:
            model = pd.BayesianNet(size.net("cpu"), pd.Prior(), pd.Gaussian(10.0))
            posterior = make(model)
            how: Any = {"batch_size": 128, "device": asked.device, "compile": True, "progress": False}
            return lambda steps: pd.fit(model, posterior, x, y, steps=steps, **how).seconds, 20

        kinds: dict[str, Callable[[Any], Any]] = {
            "one point network": lambda model: pd.Ensemble(model, members=1, anchored=False),
            "one MC dropout network": pd.AutoDropout,
            f"{members} anchored members": lambda model, members=members: pd.Ensemble(model, members=members),
            f"{members} plain members": lambda model, members=members: pd.Ensemble(model, None, members, False),
        }
        everyone = [Contestant(kind, lambda make=make: training(make)) for kind, make in kinds.items()]  # type: ignore[misc]
        for each in everyone:
            each.prepare(asked.device, asked.pick(1.0, 0.1))
        interleave(everyone, asked.rounds, asked.device)
        for each in everyone:
            ratio = median_ratio(each, everyone[0])
            yield Figure(f"{size.name}, {each.name}, {each.best:.1f} µs a step, over one network", ratio)
