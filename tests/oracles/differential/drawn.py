"""What a case of differential testing is made of: networks, data, likelihoods, priors, guides and ways to train."""

import random
from typing import Any, NamedTuple

import pyro
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune

import pyro_dropout as pd
from tests.contracts.guides import GUIDES
from tests.networks.layers import DropPath, GaussianNoise

ACTIVATIONS = (nn.ReLU, nn.Tanh, nn.GELU, nn.SiLU, nn.PReLU, nn.LeakyReLU, nn.Softplus)
BLOCKS = ("chain", "after", "shortcut", "in place", "reused", "functional", "folded", "cat", "twice", "sum", "written",
          "branch", "path", "noise")  # fmt: skip


class Dice(random.Random):
    """Draws the parts of a case; the same number draws the same case."""

    def __init__(self, kind: str, number: int) -> None:
        super().__init__(f"{kind} {number}")
        self.told: list[str] = []
        torch.manual_seed(self.randrange(2**31))
        pyro.clear_param_store()

    def pick(self, options: Any, weights: Any = None) -> Any:
        """One of some options, and note which."""
        found = self.choices(list(options), weights)[0]
        self.told.append(getattr(found, "__name__", str(found)))
        return found

    def chance(self, share: float) -> bool:
        return self.random() < share


class Block(nn.Module):
    """A layer of as many outputs as inputs, with dropout in one of many places."""

    def __init__(self, dice: Dice, width: int, kind: str, p: float) -> None:
        super().__init__()
        self.kind, self.width = kind, width
        self.layer, self.out, self.act = computed(dice, nn.Linear(width, width)), nn.Linear(width, width), nn.Tanh()
        self.drop = nn.Dropout(p, inplace=kind in ("in place", "reused"))
        self.noise = {"path": DropPath(p), "noise": GaussianNoise(p)}.get(kind, nn.Identity())

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "chain":
            return self.act(self.layer(self.drop(x)))
        if self.kind == "shortcut":
            return x + self.act(self.layer(self.drop(x)))
        h = self.act(self.layer(x))
        if self.kind == "after":
            return self.out(self.drop(h))
        if self.kind == "reused":
            return self.out(self.drop(h)) + h
        if self.kind == "written":
            z = self.drop(h)
            h += 1
            return self.out(z) + h
        if self.kind == "functional":
            return self.out(F.dropout(h, self.drop.p, self.training))
        if self.kind == "folded":
            return self.act(self.drop(h.reshape(-1, 1, self.width))).reshape(h.shape) + self.out(h)
        if self.kind == "cat":
            one, other = self.out(self.drop(torch.cat([h, -h]))).chunk(2)
            return one * other
        if self.kind == "twice":
            return self.out(self.drop(self.layer(self.drop(h))))
        if self.kind == "sum":
            return self.drop(h) + self.out(h)
        if self.kind == "branch":
            return self.out(self.drop(h) if self.training else h)
        if self.kind in ("path", "noise"):
            return x + self.noise(h)
        return self.out(self.drop(h))


def computed(dice: Dice, layer: nn.Module) -> nn.Module:
    """A layer, now and then with a weight that is computed at every pass."""
    if not dice.chance(0.15):
        return layer
    kind = dice.pick(("weight norm", "spectral norm", "pruned"))
    if kind == "weight norm":
        return parametrizations.weight_norm(layer)
    if kind == "spectral norm":
        return parametrizations.spectral_norm(layer, n_power_iterations=15).eval()
    return prune.l1_unstructured(layer, "weight", 0.3)


class Net(nn.Module):
    """A front for rows, images or sequences, then blocks on rows."""

    def __init__(self, dice: Dice, shape: tuple[int, ...], outputs: int, dropout: bool) -> None:
        super().__init__()
        width, p = dice.pick((4, 6, 8)), dice.pick((0.1, 0.3, 0.5))
        self.front: nn.Module
        if len(shape) == 3:
            kind = dice.pick((nn.Dropout2d, nn.Dropout)) if dropout else nn.Identity
            maps = [nn.Conv2d(shape[0], 3, 3, padding=1), nn.ReLU(), kind(p), nn.Conv2d(3, width, 3, stride=2)]
            self.front = nn.Sequential(*maps, nn.AdaptiveAvgPool2d(1), nn.Flatten())
        elif len(shape) == 2:
            layers = dice.pick((1, 2))
            recurrent = dice.pick((nn.LSTM, nn.GRU, nn.RNN))
            between = p if dropout and layers > 1 else 0.0
            self.front = recurrent(shape[1], width, layers, batch_first=True, dropout=between)
        else:
            self.front = nn.Linear(shape[0], width)
        parts: list[nn.Module] = []
        for _ in range(dice.pick((1, 2))):
            norm = dice.pick((nn.Identity, nn.LayerNorm, nn.BatchNorm1d), (3, 1, 1))
            parts += [norm(width)] if norm is not nn.Identity else []
            if dropout:
                parts.append(Block(dice, width, dice.pick(BLOCKS), p))
            else:
                parts += [
                    dice.pick(ACTIVATIONS)(),
                    nn.Linear(width, width, bias=dice.chance(0.8)),
                ]
        self.body, self.head = nn.Sequential(*parts, nn.Tanh()), nn.Linear(width, outputs)

    def forward(self, x: Tensor) -> Tensor:
        h = self.front(x)
        return self.head(self.body(h[0][:, -1] if isinstance(h, tuple) else h))


class Fields(nn.Module):
    """A network whose inputs are in parts: the fields of a dict, or a tuple."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        return self.net(left - right)  # type: ignore[no-any-return]


POINTS = 23
SHAPES = ((3,), (1,), (5,), (2, 6, 6), (4, 3))


class Problem(NamedTuple):
    """A model with data for it."""

    model: Any
    x: Any
    y: Tensor


def inputs(dice: Dice, points: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(points, *dice.pick(SHAPES, (4, 1, 2, 1, 1)), dtype=dtype)


def problem(dice: Dice, points: int = POINTS, still: bool = False) -> Problem:
    """A random network with a random prior and likelihood, and data.

    Args:
        dice: draws it.
        points: how many data.
        still: whether its statistics do not move.
    """
    dtype = dice.pick((torch.float64, torch.float32), (3, 1))
    x = inputs(dice, points, dtype)
    likelihood, outputs, y = observed(dice, points, dtype)
    prior = dice.pick((None, "paper", "narrow", "plain"))
    made = {"paper": pd.Prior(), "narrow": pd.Prior(length_scale=3.0), "plain": pd.Prior(width_scaled=False)}
    net: nn.Module = Net(dice, tuple(x.shape[1:]), outputs, dropout=False).to(dtype)
    given: Any = x
    if (form := dice.pick(("tensor", "dict", "tuple"), (6, 1, 1))) != "tensor":
        parts = {"left": x, "right": torch.randn_like(x)}
        net, given = Fields(net), parts if form == "dict" else tuple(parts.values())
    statistics = "all" if still else True
    model: Any = pd.BayesianNet(net, made.get(prior), likelihood, frozen_statistics=statistics).to(dtype)
    if isinstance(likelihood, pd.Gaussian) and form == "tensor" and x.dim() == 2 and dice.pick((False, True), (5, 1)):
        model = pd.Standardised(model, x, y)
    return Problem(model, given, y)


def observed(dice: Dice, points: int, dtype: torch.dtype) -> tuple[Any, int, Tensor]:
    """A likelihood, how many outputs it needs, and targets."""
    kind = dice.pick(("gaussian", "learned", "heteroscedastic", "classes", "truth", "counts"), (3, 2, 1, 2, 1, 1))
    if kind == "gaussian":
        return pd.Gaussian(tau=dice.pick((1.0, 10.0))), 2, torch.randn(points, 2, dtype=dtype)
    if kind == "learned":
        return pd.Gaussian(5.0, learn=True), 1, torch.randn(points, 1, dtype=dtype)
    if kind == "heteroscedastic":
        return pd.HeteroscedasticGaussian(), 2, torch.randn(points, 1, dtype=dtype)
    if kind == "classes":
        return pd.Categorical(), 3, torch.randint(3, (points,))
    if kind == "truth":
        return pd.Bernoulli(), 1, torch.randint(2, (points, 1)).to(dtype)
    return pd.Poisson(), 1, torch.randint(4, (points, 1)).to(dtype)


def trained(model: Any, guide: Any) -> list[Tensor]:
    """All parameters of a pair that training changes, for an optimiser of torch's."""
    net = model.model if isinstance(model, pd.Standardised) else model
    return [*guide.parameters(), *net.hidden_parameters().values(), *net.likelihood.parameters()]


def guide_of(dice: Dice, model: Any) -> Any:
    return GUIDES[dice.pick(sorted(GUIDES))](model)


def ensemble_of(dice: Dice, model: Any) -> pd.Ensemble:
    member = dice.pick((None, pd.AutoDropout, pd.AutoMeanField))
    return pd.Ensemble(model, member, members=3, start=dice.pick(("fresh", "module")), seed=1)


def training(dice: Dice, points: int) -> dict[str, Any]:
    """Settings of ``fit``."""
    loss = pd.ELBO(kl=dice.pick(("large_k", "exact"), (3, 1)), per_example="auto" if dice.chance(0.7) else False,
                   num_particles=dice.pick((1, 3)))  # fmt: skip
    return {
        "steps": dice.randint(4, 12),
        "batch_size": dice.pick((None, 5, points // 2)),
        "lr": dice.pick((1e-3, 1e-2)),
        "optim": dice.pick(("adam", "sgd", "adamw", torch.optim.RMSprop, torch.optim.NAdam), (3, 2, 2, 1, 1)),
        "clip_norm": dice.pick((None, 1.0), (3, 1)),
        "schedule": dice.pick((None, pd.training.inverse_decay(0.1)), (3, 1)),
        "loss": loss,
        "seed": dice.randrange(1000),
        "progress": False,
    }
