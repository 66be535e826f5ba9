"""Steps that no other benchmark names, beside one eager step in torch: ``python -m tests.benchmarks.general``.

Configurations are drawn with a fixed seed from guides, depths, widths, activations, likelihoods, optimisers, schedules,
clipping, temperatures and batches. The baseline is an eager step of the same network: nn.Dropout before each layer, the
loss, backward and torch.optim.Adam. Both take turns in one process, on one thread, and the best turn of each counts.

With ``--device cuda`` the baseline is the same step by hand in JAX, many in one ``lax.scan``, and guides are those that
``jax_general`` has. There each setting has a process of its own: all compile side by side, and are timed one after
another when nothing else runs.
"""

import argparse
import fcntl
import json
import math
import os
import pickle
import random
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

import pyro_dropout as pd
from pyro_dropout.engines.engine import Loop
from pyro_dropout.engines.in_cuda import InLaunches
from pyro_dropout.generative.random_state import forked
from tests.benchmarks import jax_general

GUIDES: dict[str, Callable[[Any], Any]] = {
    "dropout": pd.AutoDropout,
    "mean field": pd.AutoMeanField,
    "concrete": pd.AutoConcreteDropout,
    "multiplicative": pd.AutoMultiplicative,
    "low rank": pd.AutoLowRank,
    "full rank": pd.AutoFullRank,
    "mixture": pd.AutoRowMixture,
}
ACTIVATIONS = (nn.ReLU, nn.Tanh, nn.GELU, nn.SiLU, nn.ELU, nn.LeakyReLU, nn.Softplus)
LIKELIHOODS: dict[str, tuple[Callable[[], Any], Callable[[], nn.Module], int]] = {
    "Gaussian": (lambda: pd.Gaussian(4.0), nn.MSELoss, 1),
    "learned noise": (lambda: pd.Gaussian(4.0, learn=True), nn.MSELoss, 1),
    "classes": (pd.Categorical, nn.CrossEntropyLoss, 5),
    "counts": (pd.Poisson, nn.PoissonNLLLoss, 1),
    "yes or no": (pd.Bernoulli, nn.BCEWithLogitsLoss, 1),
}
POINTS, INPUTS = 256, 13
FULL_RANK_WIDTH = 20  # a covariance of all weights of a layer: with more units its matrix is what takes the time


@dataclass(frozen=True)
class Setting:
    """One configuration."""

    guide: str = "dropout"
    layers: int = 1
    width: int = 50
    activation: type[nn.Module] = nn.ReLU
    likelihood: str = "Gaussian"
    optim: str = "adam"
    schedule: bool = False
    clip: bool = False
    temperature: float | str | None = None
    batch: int = 128

    def __str__(self) -> str:
        sizes = "-".join(map(str, [INPUTS, *[self.width] * self.layers, LIKELIHOODS[self.likelihood][2]]))
        more = [self.optim, *["schedule"] * self.schedule, *["clipping"] * self.clip]
        more += [] if self.temperature is None else [f"temperature {self.temperature}"]
        return f"{self.guide} {sizes} {self.activation.__name__}, {self.likelihood}, {', '.join(more)}, {self.batch}"

    def network(self, *, dropout: bool) -> nn.Sequential:
        """Return the network; with ``nn.Dropout`` before each layer, for the baseline."""
        outputs, made, size = LIKELIHOODS[self.likelihood][2], [], INPUTS
        for _ in range(self.layers):
            made += [*[nn.Dropout(0.1)] * dropout, nn.Linear(size, self.width), self.activation()]
            size = self.width
        return nn.Sequential(*made, *[nn.Dropout(0.1)] * dropout, nn.Linear(size, outputs))

    def data(self) -> tuple[Tensor, Tensor]:
        """Return made data."""
        with forked():
            torch.manual_seed(0)
            x = torch.randn(POINTS, INPUTS)
        kind = self.likelihood
        if kind == "classes":
            return x, (x[:, 0] * 2).round().long().clamp(-2, 2) + 2
        y = x[:, :1].sin()
        return x, (3 * y.abs()).round() if kind == "counts" else (y > 0).float() if kind == "yes or no" else y


def drawn(count: int, seed: int, guides: Sequence[str] = tuple(GUIDES)) -> list[Setting]:
    """Return different settings."""
    dice, found = random.Random(seed), list[Setting]()
    while len(found) < count:
        guide = dice.choice(list(guides))
        one = Setting(
            guide,
            dice.choice([1, 1, 2, 3]),
            FULL_RANK_WIDTH if guide == "full rank" else dice.choice([20, 50, 100]),
            dice.choice(ACTIVATIONS),
            dice.choice(list(LIKELIHOODS)),
            dice.choice(["adam", "adam", "adamw", "sgd"]),
            dice.random() < 0.5,
            dice.random() < 0.5,
            dice.choice([None, None, 0.5, "auto"]),
            dice.choice([32, 128, POINTS]),
        )
        found += [] if one in found else [one]
    return found


def one_by_one() -> list[Setting]:
    """Return 13-50-1 with dropout, and every setting that differs from it in one thing."""
    guides = [Setting(guide, width=FULL_RANK_WIDTH if guide == "full rank" else 50) for guide in GUIDES]
    others = [Setting(activation=each) for each in ACTIVATIONS[1:]]
    others += [Setting(likelihood=each) for each in LIKELIHOODS if each != "Gaussian"]
    others += [Setting(optim="adamw"), Setting(optim="sgd"), Setting(schedule=True), Setting(clip=True)]
    return [*guides, *others, Setting(temperature=0.5), Setting(batch=POINTS)]


def ours(setting: Setting, steps: int, device: str = "cpu") -> tuple[float, pd.training.History]:
    """Return the seconds of one step of ``fit``."""
    torch.manual_seed(0)
    x, y = setting.data()
    model = pd.BayesianNet(setting.network(dropout=False), likelihood=LIKELIHOODS[setting.likelihood][0]())
    x, y, model = x.to(device), y.to(device), model.to(device)
    how: dict[str, Any] = {"clip_norm": 1.0} if setting.clip else {}
    how |= {"schedule": lambda t: 0.5 ** (t / 1000)} if setting.schedule else {}
    how |= {"lr": 1e-6} if setting.optim == "sgd" else {}
    how |= {} if setting.temperature is None else {"loss": pd.ELBO(temperature=setting.temperature)}
    size = None if setting.batch == POINTS else setting.batch
    guide = GUIDES[setting.guide](model).to(device)
    history = pd.fit(
        model, guide, x, y, steps=steps, batch_size=size, optim=setting.optim, compile=True, progress=False, **how
    )
    return history.seconds / history.steps, history


def eager(setting: Setting, steps: int) -> float:
    """Return the seconds of one eager step of the same network in torch."""
    x, y = setting.data()
    net, loss = setting.network(dropout=True), LIKELIHOODS[setting.likelihood][1]()
    optim = torch.optim.Adam(net.parameters())
    x, y = x[: setting.batch], y[: setting.batch]
    start = time.perf_counter()
    for _ in range(steps):
        optim.zero_grad()
        loss(net(x), y).backward()
        optim.step()
    return (time.perf_counter() - start) / steps


def alone(settings: Sequence[Setting], steps: int, rounds: int) -> Iterator[tuple[float, float, str, str]]:
    """Yield what each setting takes in this process, beside an eager step."""
    for setting in settings:
        best, base, engine, why = math.inf, math.inf, "", ""
        for _ in range(rounds):
            base = min(base, eager(setting, steps))
            seconds, history = ours(setting, steps)
            best, engine, why = min(best, seconds), history.engine, history.why
        yield best, base, engine, why


class Turns:
    """Processes that prepare themselves side by side, and are timed one after another.

    Args:
        folder: where they meet.
        count: how many there are.
    """

    def __init__(self, folder: Path, count: int) -> None:
        self._folder, self._count = folder, count
        self._lock = (folder / "lock").open("w")

    def begin(self, what: str, patience: float = 120.0) -> None:
        """Wait for the others, then for one's turn."""
        (self._folder / f"{what}.{os.getpid()}").touch()
        end = time.monotonic() + patience
        while len(list(self._folder.glob(f"{what}.*"))) < self._count and time.monotonic() < end:
            time.sleep(0.05)
        fcntl.flock(self._lock, fcntl.LOCK_EX)

    def end(self) -> None:
        """Let the next one go on."""
        fcntl.flock(self._lock, fcntl.LOCK_UN)


def in_turn(setting: Setting, steps: int, rounds: int, turns: Turns) -> tuple[float, float, str, str]:
    """Return the seconds of a step of ``fit`` and of JAX on a GPU, the engine, and why it is no faster one."""
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    base = jax_general.seconds(setting, "cuda", rounds, compiled=lambda: turns.begin("jax"))
    turns.end()
    begun: list[bool] = []

    def waiting(ready: Callable[[Any], None]) -> Callable[[Any], None]:
        def wait(loop: Any) -> None:
            if not begun:
                turns.begin("ours")
                begun.append(True)
            ready(loop)

        return wait

    with (
        mock.patch.object(Loop, "ready", waiting(Loop.ready)),
        mock.patch.object(InLaunches, "ready", waiting(InLaunches.ready)),
    ):
        seconds, history = ours(setting, steps, "cuda")
    turns.end()
    return seconds, base, history.engine, history.why


def all_in_turn(settings: Sequence[Setting], steps: int, rounds: int) -> Iterator[tuple[float, float, str, str]]:
    """Yield what each setting takes."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "tests.benchmarks.general", "--in-turn", folder, str(len(settings))]
        processes = [
            subprocess.Popen(
                [*command, "--steps", str(steps), "--rounds", str(rounds)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
            for _ in settings
        ]
        for setting, process in zip(settings, processes, strict=True):
            assert process.stdin is not None
            process.stdin.write(pickle.dumps(setting))
            process.stdin.close()
        for process in processes:
            assert process.stdout is not None
            yield tuple(json.loads(process.stdout.read().splitlines()[-1]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=24)
    parser.add_argument("--seed", type=int, default=2026)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, help="of a turn; 400, and 4,000 on a GPU")
    parser.add_argument("--one-by-one", action="store_true", help="13-50-1, and what differs from it in one thing")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--in-turn", nargs=2, help=argparse.SUPPRESS)  # one of the processes on a GPU
    given = parser.parse_args()
    if given.in_turn is not None:
        turns = Turns(Path(given.in_turn[0]), int(given.in_turn[1]))
        print(json.dumps(in_turn(pickle.load(sys.stdin.buffer), given.steps, given.rounds, turns)))
        return
    on_gpu = given.device == "cuda"
    given.steps = given.steps or (4000 if on_gpu else 400)
    guides = [name for name in GUIDES if not on_gpu or name in jax_general.GUIDES]
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    ratios = []
    settings = one_by_one() if given.one_by_one else drawn(given.count, given.seed, guides)
    name = "JAX" if on_gpu else "torch"
    settings = [each for each in settings if each.guide in guides]
    taken = all_in_turn(settings, given.steps, given.rounds) if on_gpu else alone(settings, given.steps, given.rounds)
    for setting, (best, base, engine, why) in zip(settings, taken, strict=True):
        ratios.append(best / base)
        print(
            f"{best / base:6.3f}  {1e6 * best:7.1f} µs, {name} {1e6 * base:6.1f}  {engine:9} {setting} {why}",
            flush=True,
        )
    mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
    print(f"geometric mean {mean:.3f}, largest {max(ratios):.3f}, of {len(ratios)}")


if __name__ == "__main__":
    main()
