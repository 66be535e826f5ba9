"""Settings chosen by cross-validation on the nine regression tables: what the folds choose from, and their records."""

import json
import math
import sys
import time
from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

import pyro_dropout as pdrop
from experiments.collection import UCI
from experiments.cross_validation import choose
from experiments.experiment import Experiment
from experiments.summaries import said
from pyro_dropout import ELBO
from pyro_dropout.errors import DivergedError

DROPS, DECAY = (0.0002, 0.002, 0.005, 0.01, 0.05, 0.1), (1e-6,)
BELIEFS: dict[str, tuple[float, ...]] = {"drop": (0.0,), "length": (0.3, 2.0), "lr": (3e-3, 1e-2)}  # widths are learned
GRIDS: dict[str, dict[str, tuple[float, ...]]] = {  # in addition to τ
    "dropout": {"drop": DROPS, "decay": DECAY, "lr": (3e-3, 1e-2, 3e-2)},
    "multiplicative": {"drop": DROPS, "decay": DECAY, "lr": (3e-3, 1e-2)},
    "concrete": BELIEFS | {"drop": (0.05,)},
    "mean-field": BELIEFS,
    "row-mixture": BELIEFS,
    "low-rank": BELIEFS,
    "heteroscedastic": {"drop": DROPS, "length": (0.5,), "lr": (1e-3, 5e-3)},  # dropout, and noise by input
    "ensemble": {"drop": (0.0,), "tau": (3.0, 30.0, 300.0, 3000.0, 3e4), "length": (1.0,), "lr": (1e-2,)},
    "ensemble of dropout": {"drop": (0.0002, 0.005, 0.05), "decay": DECAY, "lr": (1e-2, 3e-2)},
    "ensemble of mean-field": BELIEFS,
}
ANCHORED = "ensemble"  # its members are points, each with its own anchor
ENSEMBLES = (ANCHORED, "ensemble of dropout", "ensemble of mean-field")
SEVEN = 7 / 9  # share of the sets on which an ensemble should be better
DEEPER = {"drop": (0.002, 0.005, 0.02, 0.05)}  # with 2 hidden layers, for guides that drop


def beliefs(
    points: int, drop: float, decay: float | None = None, length: float = 1.0, tau: float | None = None
) -> tuple[pdrop.Prior, pdrop.Gaussian]:
    """Return prior and noise on standardised data, from a weight decay, a length-scale, or a length-scale and τ.

    Without a weight decay and without τ, τ is learned. With τ given, as for anchored points, the functions of the prior
    have about the size of the data: later layers are N(0, 1/fan_in).
    """
    if decay is not None:
        length = pdrop.paper.implied_length_scale(1 - drop, 1.0, decay, points)
    prior = pdrop.Prior(length_scale=length, bias_length_scale=length, width_scaled=tau is not None)
    return prior, pdrop.Gaussian(tau or 1.0, learn=decay is None and tau is None)


class Anchored(nn.Linear):
    """A linear layer with weights that are counted from a draw of their prior: N(0, s²) is then a prior around it."""

    def __init__(self, inputs: int, outputs: int, scale: float) -> None:
        super().__init__(inputs, outputs)
        self.register_buffer("weight_anchor", scale * torch.randn_like(self.weight))
        self.register_buffer("bias_anchor", torch.randn_like(self.bias))
        with torch.no_grad():  # training starts where it would without an anchor
            self.weight.sub_(self.get_buffer("weight_anchor"))
            self.bias.sub_(self.get_buffer("bias_anchor"))

    def forward(self, x: Tensor) -> Tensor:
        """Return the outputs of the layer with its anchors added."""
        weight, bias = self.weight + self.get_buffer("weight_anchor"), self.bias + self.get_buffer("bias_anchor")
        return nn.functional.linear(x, weight, bias)


def model(x: Tensor, y: Tensor, kind: str, layers: int, width: int, **setting: Any) -> pdrop.Standardised:
    """Return a network with ``layers`` hidden layers of ReLU, in the units of the data."""
    sizes = [x.shape[1], *[width] * layers, 2 if kind == "heteroscedastic" else 1]
    parts: list[nn.Module] = []
    for k, (a, b) in enumerate(pairwise(sizes)):
        parts += [Anchored(a, b, a**-0.5 if k else 1.0) if kind == ANCHORED else nn.Linear(a, b), nn.ReLU()]
    prior, noise = beliefs(len(x), **setting)
    likelihood = pdrop.HeteroscedasticGaussian() if kind == "heteroscedastic" else noise
    return pdrop.Standardised(pdrop.BayesianNet(nn.Sequential(*parts[:-1]), prior, likelihood), x, y)


def guide(net: Any, kind: str, drop: float) -> Any:
    """Return q(w), for an ensemble that of a member; "heteroscedastic" is dropout too, and without drop a point."""
    start: Any = {"init_scale": 0.02}
    if kind == "multiplicative":
        return pdrop.AutoMultiplicative(net, alpha=drop / (1 - drop))
    if kind == "concrete":
        return pdrop.AutoConcreteDropout(net, keep=1 - drop, max_keep=1.0)
    if kind.endswith("mean-field"):
        return pdrop.AutoMeanField(net, **start)
    if kind == "row-mixture":
        return pdrop.AutoRowMixture(net, components=2, bias="gaussian", **start)
    if kind == "low-rank":
        return pdrop.AutoLowRank(net, rank=2, **start)
    return pdrop.AutoDropout(net, keep=1 - drop)


def grid_of(kind: str, layers: int, most: int) -> dict[str, tuple[float, ...]]:
    """Return at most ``most`` values of each setting."""
    own = GRIDS[kind]
    grid = own | (DEEPER if layers > 1 and len(own["drop"]) > 1 else {})
    return {name: values[:most] for name, values in grid.items()}


def members_of(kind: str, args: Any) -> dict[str, Any]:
    """Return how many members an ensemble has, in the end and in the folds; nothing for a single network."""
    return {"members": args.members, "fold_members": args.fold_members} if kind in ENSEMBLES else {}


Record = dict[str, Any]
BIG = 5000  # number of points from which batches are doubled
LONGER = {"naval": 2, "protein": 3}  # times as many steps: naval for precision, protein for its size


def add_options(experiment: Experiment, steps: int) -> None:
    """Add the options of a choice by cross-validation, and of its ensembles."""
    experiment.option("--steps", type=int, default=steps, quick=60, help=f"more on naval and protein ({steps})")
    experiment.option("--folds", type=int, default=3, quick=2, help="folds inside every split's training data (3)")
    experiment.option("--grid", type=int, default=99, quick=2, help="maximum number of values per setting")
    experiment.option("--members", type=int, default=16, quick=3, help="members of an ensemble (16)")
    experiment.option("--fold-members", type=int, default=4, quick=2, help="members of an ensemble in a fold (4)")


def select(
    name: str, kind: str, layers: int, data: UCI, rows: tuple[list[Tensor], list[Tensor]], args: Any, device: Any
) -> Record:
    """Choose the settings of one method on one set, score it on the test rows, print the scores and return them."""
    start, size = time.perf_counter(), min(map(len, rows[0]))
    steps = args.steps * LONGER.get(name, 1)
    points = kind == ANCHORED  # every draw of a point is the same

    def build(x: Tensor, y: Tensor, **setting: Any) -> tuple[Any, Any]:
        made = model(x, y, kind, layers, 100 if name == "protein" else 50, **setting)
        return made, guide(made, kind, setting["drop"])

    found = choose(
        build,
        grid_of(kind, layers, args.grid),
        *(data.x, data.y, *rows),
        folds=args.folds,
        **members_of(kind, args),
        anchored=points,
        loss=ELBO(per_example=False) if points else None,
        samples=1 if points else args.samples,
        validation_samples=1 if points else 100,
        steps=steps,
        batch_size=256 if size > BIG else 128,
        clip_norm=10.0 * size if kind == "heteroscedastic" else None,  # heteroscedastic noise is unstable
        schedule=lambda t: 0.5 * (1 + torch.cos(math.pi * (t / steps).clamp(max=1))),
        device=device,
        compile=not args.quick,
        seed=args.seed,
        progress=not args.quiet,
    )
    record: Record = {"source": data.source, "device": str(device)} | {
        key: value.tolist() if isinstance(value, Tensor) else value for key, value in vars(found).items()
    }
    record["all_seconds"] = time.perf_counter() - start
    log_p, mixture = said(record["log_likelihood"]), said(record["mixture_log_likelihood"])
    print(
        f"{name} {kind} {layers}: log-likelihood {log_p}, mixture {mixture}, rmse {said(record['rmse'])};"
        f" {found.replicas} replicas in {record['all_seconds']:.0f} s, {found.seconds:.0f} of them training and"
        f" {found.compile_seconds:.0f} compiling",
        flush=True,
    )
    return record


def collect(
    experiment: Experiment, run: Callable[[Record], Record], tasks: Iterable[Record], asked: Iterable[str]
) -> list[Record]:
    """Return a record for each task; ``records.json`` in the results folder has those that are made already."""
    args = experiment.args
    file = args.out / "records.json"
    told = {key: getattr(args, key) for key in asked}
    known: list[Record] = json.loads(file.read_text("utf-8")) if file.exists() else []  # this run continues from them
    records = [record for record in known if (told | members_of(record["kind"], args)).items() <= record.items()]
    for task in tasks:
        whole = told | task | members_of(task["kind"], args)
        if any(whole.items() <= record.items() for record in records):
            continue
        try:
            records.append(run(task) | whole)
        except DivergedError as lost:
            print(f"{', '.join(map(str, task.values()))}: all replicas diverged: {lost}", file=sys.stderr, flush=True)
        file.write_text(json.dumps(records), "utf-8")
    return records
