"""The tables and networks of the map of defaults, and plain torch beside them.

The default was chosen on ``CHOSEN_ON``. Some cells of the other tables were seen before the last change of the rules:
docs/results/defaults.md says which.
"""

import itertools
import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

CHOSEN_ON = ("made-200", "made-5000", "digits")
REPORTED = ("breast-cancer", "wine", "diabetes")
NEW = ("iris", "yacht", "energy", "concrete", "boston")  # the rules were not chosen on them, or changed after them
DEPTHS, WIDTHS, SEEDS = (1, 2, 3), (50, 200, 512, 1024), (0, 1, 2)
DROP, DECAY, RATE, BATCH = 0.1, 1e-4, 1e-3, 100


@dataclass(frozen=True)
class Rows:
    """Standardised inputs, and standardised targets or classes: 70 % to train on, the rest to test."""

    name: str
    train: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]
    classes: int

    @property
    def outputs(self) -> int:
        return self.classes or 1

    def to(self, device: str) -> "Rows":
        moved = [tuple(each.to(device) for each in pair) for pair in (self.train, self.test)]
        return Rows(self.name, moved[0], moved[1], self.classes)

    def log_prob(self, f: Tensor, y: Tensor) -> Tensor:
        """Return log p(y | f) of each row, (..., N): classes, or a Gaussian with the default tau of 1."""
        if self.classes:
            return f.log_softmax(-1).gather(-1, y.expand(f.shape[:-1]).unsqueeze(-1)).squeeze(-1)
        return -0.5 * (f - y).square().sum(-1) - 0.5 * math.log(2 * math.pi)

    def constant(self) -> float:
        """Return the mean log-likelihood of the test rows under the best constant of the training rows."""
        (_, seen), (_, y) = self.train, self.test
        best = torch.bincount(seen, minlength=self.classes).float().log() if self.classes else seen.mean(0)
        return float(self.log_prob(best.expand(len(y), -1), y).mean())


def _made_200() -> tuple[np.ndarray, np.ndarray, int, int]:
    """Ten inputs of which five matter, and noise of half of the spread."""
    rng = np.random.default_rng(0)
    x = rng.uniform(size=(1200, 10))
    y = 10 * np.sin(np.pi * x[:, 0] * x[:, 1]) + 20 * (x[:, 2] - 0.5) ** 2 + 10 * x[:, 3] + 5 * x[:, 4]
    return x, y + 4 * rng.normal(size=len(x)), 0, 200


def _made_5000() -> tuple[np.ndarray, np.ndarray, int, int]:
    """Five classes, drawn from the outputs of a random network."""
    rng = np.random.default_rng(1)
    x = rng.normal(size=(7000, 20))
    logits = np.maximum(x @ (rng.normal(size=(20, 30)) / 20**0.5), 0) @ rng.normal(size=(30, 5))
    return x, (logits + 0.5 * rng.gumbel(size=logits.shape)).argmax(1), 5, 5000


def _raw(name: str) -> tuple[np.ndarray, np.ndarray, int, int]:
    """Return inputs, targets, the number of classes, and how many rows to train on; the order is shuffled."""
    if name in ("made-200", "made-5000"):
        return _made_200() if name == "made-200" else _made_5000()
    if name in NEW and name != "iris":
        from experiments.collection import data_folder, uci

        if data_folder() is None:
            raise ValueError(f"{name} is a UCI table: PYRO_DROPOUT_DATA must name the folder that has it.")
        table = uci(name)
        order = np.random.default_rng(0).permutation(len(table.y))
        return table.x.numpy()[order], table.y.numpy()[order, 0], 0, int(0.7 * len(order))
    from sklearn import datasets

    data = getattr(datasets, f"load_{name.replace('-', '_')}")()
    order = np.random.default_rng(0).permutation(len(data.target))
    classes = 0 if name == "diabetes" else int(data.target.max()) + 1
    return data.data[order], data.target[order], classes, int(0.7 * len(order))


def rows_of(name: str) -> Rows:
    """Return a table by name."""
    x, y, classes, count = _raw(name)
    spread = x[:count].std(0)
    x = (x - x[:count].mean(0)) / np.where(spread > 1e-8, spread, 1.0)
    inputs = torch.as_tensor(x, dtype=torch.float32)
    if classes:
        targets = torch.as_tensor(y, dtype=torch.int64)
    else:
        targets = torch.as_tensor((y - y[:count].mean()) / y[:count].std(), dtype=torch.float32).unsqueeze(-1)
    return Rows(name, (inputs[:count], targets[:count]), (inputs[count:], targets[count:]), classes)


def network(inputs: int, depth: int, width: int, outputs: int, drop: float | None = None) -> nn.Sequential:
    """Return a ReLU network; with ``drop``, nn.Dropout stands before every weight layer, as the paper has it."""
    sizes, layers = [inputs, *[width] * depth, outputs], []
    for before, after in itertools.pairwise(sizes):
        layers += ([nn.Dropout(drop)] if drop else []) + [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


class PlainTorch:
    """The same networks in plain torch: nn.Dropout and AdamW, three seeds at once, evaluated without dropout."""

    def __init__(self, rows: Rows, depth: int, width: int) -> None:
        self.rows = rows
        x = rows.train[0]
        nets = []
        for seed in SEEDS:
            torch.manual_seed(seed)
            nets.append(network(x.shape[1], depth, width, rows.outputs, DROP).to(x.device))
        self.net = nets[0]
        stacked, _ = torch.func.stack_module_state(nets)
        self.values = {name: value.detach().requires_grad_() for name, value in stacked.items()}
        fused = {"capturable": True} if x.is_cuda else {}
        self.optimiser = torch.optim.AdamW(self.values.values(), lr=RATE, weight_decay=DECAY, **fused)
        self.graph: torch.cuda.CUDAGraph | None = None

    def _outputs(self, values: dict[str, Tensor], x: Tensor) -> Tensor:
        def call(own: dict[str, Tensor], x: Tensor) -> Tensor:
            return torch.func.functional_call(self.net, own, (x,))

        return torch.func.vmap(call, in_dims=(0, 0), randomness="different")(values, x)

    def _step(self) -> None:
        x, y = self.rows.train
        index = torch.randint(len(x), (len(SEEDS), min(BATCH, len(x))), device=x.device)
        loss = -self.rows.log_prob(self._outputs(self.values, x[index]), y[index]).mean(1).sum()
        self.optimiser.zero_grad(set_to_none=False)
        loss.backward()
        self.optimiser.step()

    def advance(self, steps: int) -> None:
        """Take some steps; on a GPU as one CUDA graph that is replayed."""
        self.net.train()
        if not self.rows.train[0].is_cuda:
            for _ in range(steps):
                self._step()
            return
        if self.graph is None:
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in range(3):
                    self._step()
            torch.cuda.current_stream().wait_stream(side)
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self._step()
            steps -= 3
        for _ in range(steps):
            self.graph.replay()

    def log_prob(self, noise: bool = False) -> Tensor:
        """Return log p(y) of each seed and test row, (seeds, N); with ``noise``, that of the training residuals."""
        self.net.eval()

        def outputs(x: Tensor) -> Tensor:
            return self._outputs(self.values, x.expand(len(SEEDS), *x.shape))

        (seen, known), (x, y) = self.rows.train, self.rows.test
        with torch.no_grad():
            f = outputs(x)
            if not noise or self.rows.classes:
                return self.rows.log_prob(f, y).double().cpu()
            std = (outputs(seen) - known).square().mean((1, 2), keepdim=True).sqrt()
            return torch.distributions.Normal(f, std).log_prob(y).sum(-1).double().cpu()
