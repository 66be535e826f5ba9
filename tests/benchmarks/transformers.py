"""Transformers: what it costs to make all or a part of one Bayesian, beside plain torch."""

import contextlib
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pyro_dropout as pd
from tests.benchmarks.figures import Asked, Figure, benchmark
from tests.benchmarks.memory import peak_bytes
from tests.benchmarks.timing import Contestant, median_ratio, raced

KEEP = 0.9


@dataclass(frozen=True)
class Shape:
    """How large a transformer and its batch are."""

    words: int
    width: int
    depth: int
    heads: int
    length: int
    batch: int
    classes: int = 0  # of whole texts; without, the outputs are the logits of the next words


TEXTS = Shape(2000, 256, 4, 4, 32, 16, classes=10)
GPT2 = Shape(50257, 768, 12, 12, 256, 8)
TINY = Shape(500, 32, 2, 2, 16, 8)


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
    """Attention and two layers; dropout before each of the four linear layers, or adapters on them."""

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


class Transformer(nn.Module):
    """Words to logits: of the class of the whole text, or of the next words by the first layer, turned."""

    def __init__(self, shape: Shape, drop: float = 0.0, rank: int = 0) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(shape.words, shape.width), nn.Embedding(shape.length, shape.width)
        self.blocks = nn.Sequential(*(Block(shape.width, shape.heads, drop, rank) for _ in range(shape.depth)))
        self.norm = nn.LayerNorm(shape.width)
        self.classifier = nn.Linear(shape.width, shape.classes) if shape.classes else None
        if not shape.classes:
            nn.init.normal_(self.words.weight, std=0.02)
            nn.init.normal_(self.positions.weight, std=0.02)
        if rank:
            for name, parameter in self.named_parameters():
                parameter.requires_grad_(".down." in name or ".up." in name or name.startswith("classifier."))

    def forward(self, ids: Tensor) -> Tensor:
        h = self.norm(self.blocks(self.words(ids) + self.positions.weight[: ids.shape[1]]))
        return F.linear(h, self.words.weight) if self.classifier is None else self.classifier(h.mean(1))


def hidden(name: str, module: nn.Module) -> bool:
    """Hide everything but linear layers."""
    return not isinstance(module, nn.Linear)


def plain(net: nn.Module, x: Tensor, y: Tensor, batch: int, compiled: bool) -> Callable[[int], None]:
    """Return what takes steps of plain torch with Adam."""
    trained = [parameter for parameter in net.parameters() if parameter.requires_grad]
    optimiser = torch.optim.Adam(trained, lr=1e-4, fused=x.is_cuda)

    def loss(x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(net(x).flatten(0, -2).float(), y.flatten())

    program = torch.compile(loss) if compiled else loss

    def advance(steps: int) -> None:
        for _ in range(steps):
            rows = torch.randint(len(x), (batch,), device=x.device)
            optimiser.zero_grad()
            program(x[rows], y[rows]).backward()
            optimiser.step()

    return advance


def fitted(model: Any, guide: Any, x: Tensor, y: Tensor, batch: int, compiled: bool) -> Callable[[int], float]:
    """Return what takes steps of ``fit``, and says how many seconds they took."""
    how: Any = {"batch_size": batch, "lr": 1e-4, "compile": compiled, "progress": False}
    return lambda steps: pd.fit(model, guide, x, y, steps=steps, **how).seconds


GUIDES: dict[str, Callable[[Any], Any]] = {
    "AutoDropout": lambda model: pd.AutoDropout(model, keep=KEEP),
    "AutoMeanField": pd.AutoMeanField,
    "AutoLowRank": lambda model: pd.AutoLowRank(model, rank=2),
    "AutoRowMixture": pd.AutoRowMixture,
}
WAYS: dict[str, Callable[[], pd.BayesianNet]] = {
    "all layers": lambda: pd.BayesianNet(Transformer(TEXTS), pd.Prior(hide=hidden), pd.Categorical()),
    "last layer": lambda: pd.BayesianNet(Transformer(TEXTS), likelihood=pd.Categorical(), only="classifier.*"),
    "LoRA": lambda: pd.BayesianNet(Transformer(TEXTS, rank=8), likelihood=pd.Categorical()),
}


@benchmark("adapters")
def adapters(asked: Asked) -> Iterator[Figure]:
    """Texts to classes, 3.7 million weights, eager: all linear layers random, the last one, and LoRA of rank 8.

    Memory is the most that torch allocates in three steps, beyond the network itself.
    """
    x, y = torch.randint(TEXTS.words, (TEXTS.batch, TEXTS.length)), torch.randint(TEXTS.classes, (TEXTS.batch,))
    net = Transformer(TEXTS, drop=1 - KEEP)
    base = Contestant("plain torch, dropout", lambda: (plain(net, x, y, TEXTS.batch, False), 1))
    counts, everyone = {base: sum(p.numel() for p in net.parameters())}, [base]
    for (way, model_of), (name, guide_of) in itertools.product(WAYS.items(), GUIDES.items()):
        model = model_of()
        guide = guide_of(model)
        run = fitted(model, guide, x, y, TEXTS.batch, False)
        everyone.append(Contestant(f"{way}, {name}", lambda run=run: (run, 1)))  # type: ignore[misc]
        own = [*guide.parameters(), *(p for name, p in model.net.named_parameters() if name not in model.sites)]
        counts[everyone[-1]] = sum(p.numel() for p in own if p.requires_grad)
    for each in raced(everyone, asked):
        yield Figure(f"{each.name}: trained numbers", counts[each])
        peak = peak_bytes(lambda each=each: each.advance(3), "cpu")  # type: ignore[misc]
        yield Figure(f"{each.name}: memory beyond the network", peak / 2**20, "MiB")
        yield Figure(f"{each.name}: step, relative to plain torch", median_ratio(each, base))


@benchmark("language")
def language(asked: Asked) -> Iterator[Figure]:
    """A language model of GPT-2's size, 124 million weights: ``fit`` beside plain ``torch.compile``."""
    shape, device = asked.pick(GPT2, TINY), asked.device
    ids = torch.randint(shape.words, (64, shape.length + 1), device=device)
    x, y = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()

    def ours(net: nn.Module, guide: Callable[[Any], Any]) -> Callable[[int], float]:
        likelihood = pd.Categorical(dims=(shape.length, shape.words))
        model = pd.BayesianNet(net.to(device), pd.Prior(hide=hidden), likelihood)
        return fitted(model, guide(model), x, y, shape.batch, True)

    def pair(label: str, theirs: nn.Module, own: Callable[[int], float]) -> Iterator[Figure]:
        base = Contestant("plain", lambda: (plain(theirs.to(device), x, y, shape.batch, True), asked.pick(100, 2)))
        mine = Contestant("fit", lambda: (own, asked.pick(100, 2)))
        for each in raced([base, mine], asked):
            yield Figure(f"{label}, {each.name}", each.best / 1e3, "ms a step")
        yield Figure(f"{label}, fit over plain torch", median_ratio(mine, base))

    for name in ("TF32", "bf16"):
        with torch.autocast(device, torch.bfloat16) if name == "bf16" else contextlib.nullcontext():
            dropped = ours(Transformer(shape), GUIDES["AutoDropout"])
            yield from pair(f"{name}, dropout", Transformer(shape, drop=1 - KEEP), dropped)
            adapted = ours(Transformer(shape, rank=8), pd.AutoMeanField)
            yield from pair(f"{name}, LoRA of rank 8 and mean field", Transformer(shape, rank=8), adapted)
