"""A language model of GPT-2's size: ``fit`` beside plain torch.compile: ``python -m tests.benchmarks.language``.

124 million weights that start at random, words at random, sequences of 256, 8 in a batch. Dropout is before each of the
four linear layers of a block; adapters (LoRA) are on the same layers. One process; plain torch before and after.
"""

import argparse
import contextlib
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pyro_dropout as pd

KEEP, BATCH = 0.9, 8
Runner = Callable[[int], float]  # takes so many steps, and says how many seconds they took


class Adapter(nn.Module):
    """A frozen linear layer, and a trained product of two thin ones beside it."""

    def __init__(self, fan_in: int, fan_out: int, rank: int) -> None:
        super().__init__()
        self.base = nn.Linear(fan_in, fan_out).requires_grad_(False)
        self.down, self.up = nn.Linear(fan_in, rank, bias=False), nn.Linear(rank, fan_out, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.base(x) + self.up(self.down(x))
        return out


class Block(nn.Module):
    def __init__(self, width: int, heads: int, drop: float, rank: int) -> None:
        super().__init__()
        self.heads = heads
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)

        def layer(a: int, b: int) -> nn.Module:
            linear = Adapter(a, b, rank) if rank else nn.Linear(a, b)
            return nn.Sequential(nn.Dropout(drop), linear) if drop else linear

        self.attend, self.project = layer(width, 3 * width), layer(width, width)
        self.widen, self.narrow = layer(width, 4 * width), layer(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.attend(self.first(x)).chunk(3, -1)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.project(mixed)
        out: Tensor = x + self.narrow(F.gelu(self.widen(self.second(x)), approximate="tanh"))
        return out


class Language(nn.Module):
    """Words to the logits of the next ones; the last layer is the first one, turned."""

    def __init__(self, size: "Size", drop: float = 0.0, rank: int = 0) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(size.words, size.width), nn.Embedding(size.length, size.width)
        self.blocks = nn.Sequential(*(Block(size.width, size.heads, drop, rank) for _ in range(size.depth)))
        self.last = nn.LayerNorm(size.width)
        nn.init.normal_(self.words.weight, std=0.02)
        nn.init.normal_(self.positions.weight, std=0.02)
        if rank:
            for name, parameter in self.named_parameters():
                parameter.requires_grad_(".down." in name or ".up." in name)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids) + self.positions.weight[: ids.shape[1]]
        return F.linear(self.last(self.blocks(x)), self.words.weight)


class Size:
    """How large the network is."""

    def __init__(self, small: bool) -> None:
        self.words, self.width, self.depth, self.heads, self.length = (
            (500, 32, 2, 2, 16) if small else (50257, 768, 12, 12, 256)
        )


def plain(net: nn.Module, ids: Tensor) -> Runner:
    """Return what takes compiled steps of plain torch with Adam, and says how many seconds they took."""
    trained = [parameter for parameter in net.parameters() if parameter.requires_grad]
    optimiser = torch.optim.Adam(trained, lr=1e-4, fused=ids.is_cuda)

    def loss(x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(net(x).flatten(0, 1).float(), y.flatten())

    compiled = torch.compile(loss)

    def advance(steps: int) -> float:
        net.train()
        start = wait(ids)
        for _ in range(steps):
            rows = torch.randint(len(ids), (BATCH,), device=ids.device)
            optimiser.zero_grad()
            compiled(ids[rows, :-1], ids[rows, 1:]).backward()
            optimiser.step()
        return wait(ids) - start

    return advance


def ours(net: Language, ids: Tensor, make: Callable[[Any], Any]) -> Runner:
    """Return what takes compiled steps of ``fit``, and says how many seconds they took."""

    def hidden(name: str, module: nn.Module) -> bool:
        return not isinstance(module, nn.Linear)

    words = net.words.num_embeddings
    model = pd.BayesianNet(net, pd.Prior(hide=hidden), pd.Categorical(dims=(ids.shape[1] - 1, words)))
    guide = make(model)
    x, y = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
    how: Any = {"batch_size": BATCH, "lr": 1e-4, "compile": True, "progress": False}
    return lambda steps: pd.fit(model, guide, x, y, steps=steps, **how).seconds


def wait(ids: Tensor) -> float:
    if ids.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter()


def compare(label: str, base: Runner, other: Runner, steps: int, names: tuple[str, str]) -> None:
    """Print the time of a step of plain torch, before and after that of the other, and of the other."""
    base(steps)  # compiles
    taken = [base(steps), other(steps), base(steps)]
    first, ours, last = (1e3 * each / steps for each in taken)
    print(f"{label:<5} {names[0]:<32} {first:8.2f} and {last:.2f} ms a step", flush=True)
    print(f"{label:<5} {names[1]:<32} {ours:8.2f} ms a step, {2 * ours / (first + last):.2f} of it", flush=True)
    if torch.cuda.is_available():
        print(f"{label:<5} most memory {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB", flush=True)
        torch.cuda.reset_peak_memory_stats()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--small", action="store_true", help="a small network, to try the program")
    parser.add_argument("--kinds", choices=["dropout", "lora"], nargs="+", default=["dropout", "lora"])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--only", choices=["tf32", "bf16"], nargs="+", default=["tf32", "bf16"])
    given = parser.parse_args()
    device, size = "cuda" if torch.cuda.is_available() else "cpu", Size(given.small)
    torch.set_float32_matmul_precision("high")
    torch.manual_seed(0)
    ids = torch.randint(size.words, (64, size.length + 1), device=device)
    print(f"{torch.cuda.get_device_name() if device == 'cuda' else 'CPU'}, torch {torch.__version__}")

    def net(**how: Any) -> Language:
        return Language(size, **how).to(device)

    for label in given.only:
        low = torch.autocast(device, torch.bfloat16) if label == "bf16" else contextlib.nullcontext()
        with low:
            if "dropout" in given.kinds:
                dropout = ours(net(), ids, lambda m: pd.AutoDropout(m, keep=KEEP))
                names = "torch.compile, dropout", "fit, AutoDropout"
                compare(label, plain(net(drop=1 - KEEP), ids), dropout, given.steps, names)
            if "lora" in given.kinds:
                names = "torch.compile, LoRA of rank 8", "fit, LoRA and AutoMeanField"
                adapted = ours(net(rank=8), ids, pd.AutoMeanField)
                compare(label, plain(net(rank=8), ids), adapted, given.steps, names)


if __name__ == "__main__":
    main()
