"""What the no-U-turn sampler costs: ``python -m tests.benchmarks.nuts [--draws 500] [--chains 4] [--quick]``.

Leapfrog steps a second and the smallest number of effective samples a second, of the function's values at the data, for
1-10-1 and 1-20-1 tanh networks on 30 points, on one thread. Beside it stands the sampler as it was before: one chain at
a time by recursion, with a compiled energy. Both are warm: compilation is timed by itself. They run in turns in one
process, and seconds are those of the processor, because others may use the machine.

With ``--device cuda`` the same networks run on a GPU, with 2 and with 64 chains, in turns with 2 compiled chains on the
CPU. Seconds are those of a clock, from the same starts to as many draws of each chain.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import pyro_dropout as pd
from pyro_dropout.engines.program import Program
from pyro_dropout.generative.model_call import ModelCall
from pyro_dropout.prediction.sampled_posterior import SampledPosterior
from pyro_dropout.references.nuts.adaptation import Plan
from pyro_dropout.references.nuts.chains import _Run
from pyro_dropout.references.nuts.energy import Energy
from tests.oracles import recursive_nuts

ASKED = 4.0  # times as many effective samples a second
MANY_LIMIT = 1.5  # on a GPU: seconds of 64 chains over those of 2; the slowest of 64 takes more steps than that of 2
FEW_LIMIT = 1.0  # seconds of 2 chains on a GPU over those of 2 compiled ones on a CPU


def problem(width: int) -> tuple[pd.BayesianNet, Tensor, Tensor]:
    """Return a network with one hidden layer, and 30 noisy points of a sine."""
    torch.manual_seed(0)
    x = torch.linspace(-2, 2, 30).unsqueeze(-1)
    y = torch.sin(2 * x) + 0.2 * torch.randn(30, 1)
    net = nn.Sequential(nn.Linear(1, width), nn.Tanh(), nn.Linear(width, 1))
    return pd.BayesianNet(net, likelihood=pd.Gaussian(tau=25.0)), x, y


class Before:
    """The sampler as it was: recursion in numpy, and a compiled energy of all chains."""

    def __init__(self, energy: Energy, starts: Tensor) -> None:
        self._program, self._starts = Program(energy, starts), starts

    def run(self, plan: Plan, seed: int) -> tuple[Any, float, float]:
        """Return draws (chains, draws, d), leapfrog steps in all, and seconds."""

        def energies(z: Any) -> Any:
            return tuple(part.numpy() for part in self._program.flat([torch.from_numpy(z)]))

        start = time.process_time()
        ran = recursive_nuts.run_chains(energies, self._starts.numpy(), plan, seed)
        taken = time.process_time() - start
        return np.stack([np.stack(chain.draws) for chain in ran]), sum(chain.steps for chain in ran), taken


def effective(energy: Energy, model: pd.BayesianNet, x: Tensor, draws: Any) -> float:
    """Return the smallest effective sample size of the function's values."""
    z = torch.from_numpy(draws)
    weights = {name: value.float() for name, value in energy.weights(z).items()}
    posterior = SampledPosterior(weights, divergences=0, seconds=0.0)
    total = draws.shape[0] * draws.shape[1]
    with torch.no_grad():
        f = model.evaluate(posterior.draws_at(torch.arange(total)), x)
    return float(posterior.ess_of(f.reshape(*draws.shape[:2], -1)).min())


class Timed:
    """Some chains on one device, compiled once; each run starts anew."""

    def __init__(self, width: int, chains: int, device: str, clock: Callable[[], float] = time.perf_counter) -> None:
        self.model, self.x, y = problem(width)
        self.energy = Energy(ModelCall(self.model, (self.x, y)))
        self.chains, self.device, self._clock = chains, torch.device(device), clock
        torch.manual_seed(1)
        self.starts = torch.stack([self.energy.start() for _ in range(chains)])
        self.seconds: list[float] = []
        self.compiling, self.steps, self.least = 0.0, 0, 0.0

    def run(self, plan: Plan, seed: int) -> tuple[Any, float, float]:
        """Return draws (chains, draws, d), leapfrog steps in all, and seconds, without those of compilation."""
        began = self._clock()
        run = _Run(self.energy, self.starts, plan, seed, compile=True, device=self.device)
        run.block()
        start, before = self._clock(), run.steps
        self.compiling = max(self.compiling, start - began)
        while run.left:
            run.block()
        if run.not_on_gpu is not None:
            raise run.not_on_gpu
        self.seconds.append((self._clock() - start) * run.steps / (run.steps - before))
        self.steps, ran = run.steps, run.results()
        draws = np.stack([chain.draws for chain in ran])
        self.least = effective(self.energy, self.model, self.x, draws)
        return draws, sum(chain.steps for chain in ran), self.seconds[-1]

    @property
    def middle(self) -> float:
        """The median of the seconds."""
        return statistics.median(self.seconds)

    def __str__(self) -> str:
        step = f"{1e6 * self.middle / self.steps:7.1f} µs a step of all"
        spent = f"{self.middle:7.2f} s{self.steps:8d} steps  {step}{self.least / self.middle:10.1f} ESS/s"
        return f"{self.chains:3d} chains on {self.device.type:5s}{spent}  ({self.compiling:.1f} s to compile)"


def speeds(width: int, chains: int, draws: int, rounds: int) -> None:
    """Print both samplers' speeds on a network of this width."""
    after = Timed(width, chains, "cpu", time.process_time)
    before = Before(after.energy, after.starts)
    found: dict[str, list[tuple[float, float, float]]] = {"before": [], "after": []}
    for seed in range(rounds):
        for name, sampler in (("before", before), ("after", after)):
            sampled, steps, taken = sampler.run(Plan(draws, draws, 0.8, 10), seed)
            least = effective(after.energy, after.model, after.x, sampled)
            found[name].append((steps / taken, least / taken, least / steps))
    middle = {name: [statistics.median(column) for column in zip(*rows, strict=True)] for name, rows in found.items()}
    # Both are the same sampler up to rounding, so ESS/step differs by chance alone: the factor of steps is less noisy.
    for name, (steps, least, each) in middle.items():
        ratios = f"  {least / middle['before'][1]:5.1f} times ESS/s, {steps / middle['before'][0]:5.1f} times steps/s"
        told = "" if name == "before" else f"{ratios} (asked: {ASKED:.0f})"
        speed = f"{steps:10.0f} steps/s{least:9.1f} ESS/s{each:9.4f} ESS/step"
        print(f"1-{width}-1  {chains} chains  {name:7s}{speed}{told}", flush=True)


def batches(width: int, few: int, many: int, steps: int) -> None:
    """Print what a step of few and of many chains takes, compiled, in turns."""
    model, x, y = problem(width)
    energy = Energy(ModelCall(model, (x, y)))
    runs = {}
    for chains in (few, many):
        starts = torch.stack([energy.start() for _ in range(chains)])
        runs[chains] = _Run(energy, starts, Plan(10_000, 200, 0.8, 10), 0, compile=True)
        began = time.perf_counter()
        runs[chains].block()
        print(f"1-{width}-1  {chains} chains: compiled in {time.perf_counter() - began:.1f} s")
    spent: dict[int, list[float]] = {few: [], many: []}
    for _ in range(max(1, steps // 640)):
        for chains, run in runs.items():
            start, before = time.process_time(), run.steps
            for _ in range(10):
                run.block()
            spent[chains].append((time.process_time() - start) / (run.steps - before))
    for chains, each in spent.items():
        step = statistics.median(each)
        ratio = step / statistics.median(spent[few])
        print(
            f"1-{width}-1  {chains:3d} chains: {1e6 * step:7.1f} µs a step of all, {ratio:5.1f} times that of {few};"
            f" {1e6 * step / chains:6.2f} µs a leapfrog step, {chains / step:9.0f} steps/s"
        )


def on_gpu(width: int, draws: int, rounds: int) -> bool:
    """Print the speeds on a GPU, and return whether they are within their limits."""
    runs = [Timed(width, 2, "cuda"), Timed(width, 64, "cuda"), Timed(width, 2, "cpu")]
    for seed in range(rounds):
        for each in runs:
            each.run(Plan(draws, draws, 0.8, 10), seed)
            print(f"1-{width}-1  {each}", flush=True)
    few, many, cpu = runs
    found = ((many, few, MANY_LIMIT), (few, cpu, FEW_LIMIT))
    for one, other, limit in found:
        label = f"{one.chains} chains on {one.device.type} over {other.chains} on {other.device.type}"
        print(f"1-{width}-1  {label}: {one.middle / other.middle:.2f} times the seconds (limit {limit})", flush=True)
    return all(one.middle <= limit * other.middle for one, other, limit in found)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--draws", type=int, default=500)
    parser.add_argument("--chains", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="100 draws, one round")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    given = parser.parse_args()
    if given.quick:
        given.draws, given.rounds = 100, 1
    torch.set_num_threads(1)
    if given.device == "cuda":
        within = [on_gpu(units, given.draws, given.rounds) for units in (10, 20)]
        sys.exit(not all(within))
    for units in (10, 20):
        speeds(units, given.chains, given.draws, given.rounds)
        batches(units, 2, 64, 1280 if given.quick else 12800)
