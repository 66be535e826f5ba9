"""A step of one training that several processes share, beside one process: what ``docs/scaling.md`` says."""

import json
import sys
from collections.abc import Iterator

from tests.benchmarks.figures import Asked, Figure, benchmark
from tests.own_process import python

SIZES = {"13-50-1": ((13, 50, 1), 128), "13-512x2-1": ((13, 512, 512, 1), 1024)}
STEPS = 30
RUN = """
import json, os, sys, torch, warnings, pyro_dropout as pd
from itertools import pairwise
from torch import nn
warnings.simplefilter("ignore")
torch.set_num_threads(1)
sizes, batch, steps = json.loads(sys.argv[1])
torch.manual_seed(0)
parts = [part for a, b in pairwise(sizes) for part in (nn.Linear(a, b), nn.ReLU())][:-1]
model = pd.BayesianNet(nn.Sequential(*parts), likelihood=pd.Gaussian(tau=10.0))
guide = pd.AutoDropout(model)
x, y = torch.randn(4 * batch, sizes[0]), torch.randn(4 * batch, 1)
many = int(os.environ.get("WORLD_SIZE", "1")) > 1
how = dict(batch_size=batch, seed=0, compile=False, progress=False, distributed=many)
pd.fit(model, guide, x, y, steps=5, **how)
history = pd.fit(model, guide, x, y, steps=steps, **how)
if int(os.environ.get("RANK", "0")) == 0:
    print(json.dumps(1e6 * history.seconds / history.steps))
"""


def step(sizes: tuple[int, ...], batch: int, processes: int, steps: int) -> float:
    """The microseconds of a step that so many processes share."""
    asked = json.dumps([sizes, batch, steps])
    torchrun = ["-m", "torch.distributed.run", f"--nproc-per-node={processes}", "--no-python", sys.executable]
    done = python(*(torchrun if processes > 1 else []), "-c", RUN, asked)
    return float(json.loads(done.stdout.splitlines()[-1]))


@benchmark("processes", "cpu")
def measured(asked: Asked) -> Iterator[Figure]:
    """Yield the best of the rounds for one, two and four processes."""
    steps, rounds = asked.pick(STEPS, 2), asked.pick(min(3, asked.rounds), 1)
    for name, (sizes, batch) in list(SIZES.items())[: asked.pick(None, 1)]:
        found: dict[int, list[float]] = {1: [], 2: [], 4: []}
        for _ in range(rounds):
            for processes in found:
                found[processes].append(step(sizes, batch, processes, steps))
        for processes, each in found.items():
            yield Figure(f"{name}, batch {batch}, {processes} processes", min(each), "µs a step")
