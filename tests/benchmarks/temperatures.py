"""How the temperature of the default prior was chosen: mean field at nine temperatures, over the map of defaults.

    python -m tests.benchmarks.temperatures --device cuda    # measure all cells, into docs/results/temperatures.csv
    python -m tests.benchmarks.temperatures --rules          # what rules T = min(1, a(N/P)^b) give, from that file

A cell is a table, a network and a number of steps, as in ``defaults``. Its mean field is written out in torch, for all
temperatures and three seeds at once: T = cN/P for c from 1/32 to 8, and 1 where that is more. A rule is judged at its
own T by the gains over plain torch at the temperatures around it, interpolated in log T. Beyond the last of them the
gain there counts, and the number of such cells is printed.
"""

import argparse
import csv
import itertools
import math
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from tests.benchmarks.defaults_tables import (
    BATCH,
    CHOSEN_ON,
    DEPTHS,
    NEW,
    RATE,
    REPORTED,
    SEEDS,
    WIDTHS,
    PlainTorch,
    Rows,
    rows_of,
)  # fmt: skip

KEPT = Path(__file__).parents[2] / "docs/results/temperatures.csv"
SHARES = [2.0**k for k in range(-5, 4)]  # c
START = {1: 0.1, 2: 0.2, 3: 0.3}  # the widths that mean field starts at, times √fan-in
LATE_WIDTHS = (50, 200)  # networks that take 20,000 steps too
SAMPLES = 100
COLUMNS = ("table", "depth", "width", "steps", "c", "data", "weights", "gain", "error")
GROUPS = {"chosen on": CHOSEN_ON, "other": REPORTED, "seen": NEW}


class MeanField:
    """Networks with Gaussian weights, one for each temperature and seed, trained together."""

    def __init__(self, rows: Rows, depth: int, width: int) -> None:
        self.rows, (x, _) = rows, rows.train
        sizes = list(itertools.pairwise([x.shape[1], *[width] * depth, rows.outputs]))
        self.numbers = sum(a * b + b for a, b in sizes)
        shares = torch.tensor(SHARES, device=x.device).repeat_interleave(len(SEEDS))
        self.heat = (shares * len(x) / self.numbers).clamp(max=1.0)
        self.layers: list[tuple[list[Tensor], float]] = []
        for k, (inputs, outputs) in enumerate(sizes):
            own = []
            for seed in SEEDS:
                torch.manual_seed(100 * seed + k)
                own.append(torch.nn.Linear(inputs, outputs))
            weight, bias = (torch.stack([getattr(each, name).detach() for each in own]) for name in ("weight", "bias"))
            found = []
            for value, log_width in ((weight, math.log(START[depth] / inputs**0.5)), (bias, math.log(START[depth]))):
                loc = value.repeat(len(SHARES), *[1] * (value.dim() - 1)).to(x.device)
                found += [loc.requires_grad_(), torch.full_like(loc, log_width).requires_grad_()]
            self.layers.append((found, min(1.0, 8 / inputs) ** 0.5 if k == 0 else inputs**-0.5))
        values = [value for found, _ in self.layers for value in found]
        self.optimiser = torch.optim.Adam(values, lr=RATE, **({"capturable": True} if x.is_cuda else {}))
        self.graph: torch.cuda.CUDAGraph | None = None

    def outputs(self, x: Tensor) -> Tensor:
        """Return the outputs with a draw for each point: sums of weights are drawn, which is the same."""
        for k, ((weight, log_width, bias, log_bias), _) in enumerate(self.layers):
            mean = torch.baddbmm(bias.unsqueeze(1), x, weight.mT)
            variance = torch.baddbmm((2 * log_bias).exp().unsqueeze(1), x.square(), (2 * log_width).exp().mT)
            x = mean + variance.sqrt() * torch.randn_like(mean)
            x = x.relu() if k < len(self.layers) - 1 else x
        return x

    def _kl(self) -> Tensor:
        total = torch.zeros_like(self.heat)
        for (weight, log_width, bias, log_bias), prior in self.layers:
            for loc, log_scale, width in ((weight, log_width, prior), (bias, log_bias, 1.0)):
                terms = ((2 * log_scale).exp() + loc.square()) / width**2 / 2 - 0.5 - log_scale + math.log(width)
                total = total + terms.flatten(1).sum(1)
        return total

    def _step(self) -> None:
        x, y = self.rows.train
        index = torch.randint(len(x), (len(self.heat), min(BATCH, len(x))), device=x.device)
        loss = (-self.rows.log_prob(self.outputs(x[index]), y[index]).mean(1) + self.heat * self._kl() / len(x)).sum()
        self.optimiser.zero_grad(set_to_none=False)
        loss.backward()
        self.optimiser.step()

    advance = PlainTorch.advance  # many steps; on a GPU as one CUDA graph that is replayed

    @property
    def net(self) -> torch.nn.Module:
        """A module to switch to training mode, which nothing here depends on."""
        return torch.nn.Identity()

    def log_prob(self) -> Tensor:
        """Return log p(y) of each temperature, seed and test row."""
        x, y = self.rows.test
        with torch.no_grad():
            x = x.expand(len(self.heat), *x.shape)
            each = torch.stack([self.rows.log_prob(self.outputs(x), y) for _ in range(SAMPLES)]).double()
        return (each.logsumexp(0) - math.log(SAMPLES)).cpu().view(len(SHARES), len(SEEDS), -1)


def measured(name: str, depth: int, width: int, device: str) -> list[tuple[object, ...]]:
    """Return the rows of a table and a network."""
    rows = rows_of(name).to(device)
    ours, plain, found, done = MeanField(rows, depth, width), PlainTorch(rows, depth, width), [], 0
    for steps in (2_000, 20_000) if width in LATE_WIDTHS else (2_000,):
        for each in (ours, plain):
            each.advance(steps - done)
        done, beside = steps, plain.log_prob()
        for c, each in zip(SHARES, ours.log_prob(), strict=True):
            apart = each.mean(0) - beside.mean(0)
            between = (each.mean(1).var() + beside.mean(1).var()) / len(SEEDS)
            error = math.sqrt(float(apart.var() / len(apart) + between))
            sizes = (len(rows.train[0]), ours.numbers, round(float(apart.mean()), 4), round(error, 4))
            found.append((name, depth, width, steps, c, *sizes))
    return found


def level(rows: list[dict[str, str]], rule: Callable[[float], float]) -> str:
    """Say where a rule, T of N/P, is level with plain torch, its mean gain, and how many cells are beyond."""
    cells = defaultdict(dict)
    for row in rows:
        ratio = float(row["data"]) / float(row["weights"])
        key = (row["table"], row["depth"], row["width"], row["steps"], ratio)
        cells[key][min(1.0, float(row["c"]) * ratio)] = (float(row["gain"]), float(row["error"]))
    told, beyond = [], 0
    for steps in ("2000", "20000"):
        for tables in GROUPS.values():
            mine = {key: cell for key, cell in cells.items() if key[0] in tables and key[3] == steps}
            found = [_between(cell, rule(key[4])) for key, cell in mine.items()]
            beyond += sum(not min(cell) <= rule(key[4]) <= max(cell) for key, cell in mine.items())
            count, mean = sum(gain >= -error for gain, error in found), sum(gain for gain, _ in found) / len(found)
            told.append(f"{count} of {len(found)} ({mean:+.3f})")
    return " | ".join([*told, str(beyond)])


def _between(cell: dict[float, tuple[float, float]], heat: float) -> tuple[float, float]:
    known = sorted(cell)
    heat = min(max(heat, known[0]), known[-1])
    low = max(each for each in known if each <= heat)
    high = min(each for each in known if each >= heat)
    share = 0.0 if low == high else math.log(heat / low) / math.log(high / low)
    gain, error = ((1 - share) * a + share * b for a, b in zip(cell[low], cell[high], strict=True))
    return gain, error


def main() -> None:
    """Measure, or print what rules give."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--tables", nargs="*", default=[*CHOSEN_ON, *REPORTED], help="and new ones, by name")
    parser.add_argument("--rules", action="store_true")
    given = parser.parse_args()
    if not given.rules:
        nets = [(name, d, w) for name in given.tables for d in DEPTHS for w in WIDTHS if name not in NEW or d * w < 512]
        with KEPT.open("w", encoding="utf-8", newline="") as file:
            csv.writer(file).writerows([COLUMNS, *(row for net in nets for row in measured(*net, given.device))])
    with KEPT.open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    heads = [f"{group}, {steps}" for steps in ("2,000", "20,000") for group in GROUPS]
    heads.append("cells beyond")
    print(f"| T | {' | '.join(heads)} |\n|---|{'---|' * len(heads)}")
    for a, b in itertools.product((1 / 8, 1 / 5, 1 / 4, 1 / 3, 1 / 2), (0.4, 0.5, 0.6, 0.75, 1.0)):
        print(f"| {a:.3g} (N/P)^{b:g} | {level(rows, lambda ratio, a=a, b=b: min(1.0, a * ratio**b))} |")


if __name__ == "__main__":
    main()
