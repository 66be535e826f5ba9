"""The guide *is* the dropout network: -ELBO/(τN) and plain dropout training in torch have the same gradients.

The paper's layer is σ((x∘z) M), without torch's factor 1/keep, so the plain side is written with bare masks. Its
penalty is left to the optimiser, as in dropout training: ``weight_decay=c`` adds c·w to the gradient.
"""

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pyro_dropout as pd

pytestmark = pytest.mark.usefixtures("in_float64")

N, BATCH, Q, KS, KEEPS = 30, 12, 4, (7, 6), (0.9, 0.6, 0.75)
TAU, LENGTH, BIAS_LENGTH = 3.7, 0.6, 1.9


class Masks:
    """Coin flips written down once: masks for the plain network, and the random numbers that the guide asks for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.waiting: list[Tensor] = []
        monkeypatch.setattr(torch, "rand", self._uniform)

    def _uniform(self, shape: Any, **options: Any) -> Tensor:
        mask = self.waiting.pop(0)
        assert tuple(shape) == mask.shape
        return torch.where(mask > 0, 0.0, 1 - 1e-9)  # a row is kept where u < keep

    def draw(self, rows: int | None) -> list[Tensor]:
        """New masks for all layers, (rows, width), or (width,) for one draw that all points share."""
        assert not self.waiting
        lead = () if rows is None else (rows,)
        masks = [torch.bernoulli(torch.full((*lead, w), p)) for w, p in zip((Q, *KS), KEEPS, strict=True)]
        self.waiting = list(masks)
        return masks


class PlainDropout(nn.Module):
    """A dropout network as anybody would write it, with the masks handed in."""

    def __init__(self, net: nn.Sequential, guide: pd.AutoDropout) -> None:
        super().__init__()
        start = {name: guide.states[name.replace(".", "/")].loc.detach().clone() for name, _ in net.named_parameters()}
        self.weights = nn.ParameterList([v for name, v in start.items() if "weight" in name])
        self.biases = nn.ParameterList([v for name, v in start.items() if "bias" in name])

    def forward(self, x: Tensor, masks: list[Tensor]) -> Tensor:
        for depth, (w, b, z) in enumerate(zip(self.weights, self.biases, masks, strict=True)):
            x = F.linear((x.relu() if depth else x) * z, w, b)
        return x

    def groups(self, loss: Any, tau: float, outputs: int) -> list[dict[str, Any]]:
        """One parameter group a layer, with its own weight decay, and one for the biases, which nothing drops."""

        def decay(keep: float, length: float) -> float:
            return pd.paper.optimizer_weight_decay(keep, tau, N, length, loss=loss, out_features=outputs)

        weights = zip(self.weights, KEEPS, strict=True)
        return [
            *({"params": [w], "weight_decay": decay(keep, LENGTH)} for w, keep in weights),
            {"params": list(self.biases), "weight_decay": decay(1.0, BIAS_LENGTH)},
        ]


class Task:
    """Data, the pair, the plain network, and its loss beside -ELBO times ``factor``."""

    def __init__(self, kind: str) -> None:
        self.classes = kind == "classes"
        outputs = 3 if self.classes else 2
        net = nn.Sequential()
        for a, b in itertools.pairwise((Q, *KS, outputs)):
            net.extend([nn.Linear(a, b), nn.ReLU()])
        net = net[:-1]
        self.x = torch.randn(N, Q)
        self.y = torch.randint(3, (N,)) if self.classes else torch.randn(N, outputs)
        prior = pd.Prior(LENGTH, BIAS_LENGTH, width_scaled=False)
        self.model = pd.BayesianNet(net, prior, pd.Categorical() if self.classes else pd.Gaussian(TAU))
        keep = dict(zip([f"{2 * i}.weight" for i in range(3)], KEEPS, strict=True))
        self.guide = pd.AutoDropout(self.model, keep)
        self.plain = PlainDropout(net, self.guide)
        # torch's losses are means; the half mean square is τN below the log-likelihood, MSELoss another D/2
        tau = 1.0 if self.classes else TAU
        self.factor = 1 / N if self.classes else 2 / (outputs * tau * N)
        self.groups = self.plain.groups("cross_entropy" if self.classes else "mse", tau, outputs)

    def plain_loss(self, masks: list[Tensor], rows: Tensor) -> Tensor:
        f = self.plain(self.x[rows], masks)
        return F.cross_entropy(f, self.y[rows]) if self.classes else F.mse_loss(f, self.y[rows])

    def pairs(self) -> list[tuple[Tensor, Tensor]]:
        """The parameters of both sides, in one order."""
        states = [self.guide.states[f"{2 * i}/{kind}"].loc for kind in ("weight", "bias") for i in range(3)]
        return list(zip(states, [*self.plain.weights, *self.plain.biases], strict=True))


@pytest.mark.parametrize("kl", ["large_k", "exact"])
@pytest.mark.parametrize("per_example", [True, False])
@pytest.mark.parametrize("kind", ["regression", "classes"])
def test_one_gradient(kind: str, per_example: bool, kl: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    task, masks = Task(kind), Masks(monkeypatch)
    rows = torch.randperm(N)[:BATCH]
    drawn = masks.draw(BATCH if per_example else None)
    elbo = pd.ELBO(kl=kl, per_example=per_example)
    loss = elbo.differentiable_loss(task.model, task.guide, task.x[rows], task.y[rows], N) * task.factor
    loss.backward()
    task.plain_loss(drawn, rows).backward()
    decays = {id(p): group["weight_decay"] for group in task.groups for p in group["params"]}
    worst = 0.0
    for ours, theirs in task.pairs():
        assert ours.grad is not None
        assert theirs.grad is not None
        worst = max(worst, float((ours.grad - theirs.grad - decays[id(theirs)] * theirs.detach()).abs().max()))
    print(f"largest difference of gradients: {worst:.1e}")
    assert worst <= 1e-10
