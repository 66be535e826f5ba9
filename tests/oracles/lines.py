"""Linear regression, where everything is known: posterior, evidence and leave-one-out densities, by numpy and scipy."""

from typing import Any

import numpy as np
import torch
from scipy import stats
from torch import Tensor, nn

import pyro_dropout as pd

TAU = 4.0


class Line:
    """y = Xw + noise of precision 4 with w ~ N(0, I): N = 12 points, Q = 3 inputs, no bias."""

    def __init__(self, dtype: torch.dtype = torch.float64, orthogonal: bool = False) -> None:
        rng = np.random.default_rng(7)
        x = rng.normal(size=(12, 3))
        x = 2 * np.linalg.qr(x)[0] if orthogonal else x
        self.x64 = x
        self.y64 = x @ [1.0, -0.5, 0.3] + TAU**-0.5 * rng.normal(size=12)
        self.x, self.y = torch.tensor(x, dtype=dtype), torch.tensor(self.y64, dtype=dtype).unsqueeze(-1)
        self.covariance = np.linalg.inv(np.eye(3) + TAU * x.T @ x)
        self.mean = self.covariance @ (TAU * x.T @ self.y64)
        net = nn.Linear(3, 1, bias=False).to(dtype)
        self.model = pd.BayesianNet(net, likelihood=pd.Gaussian(tau=TAU))

    def evidence(self) -> float:
        return float(stats.multivariate_normal(np.zeros(12), self.x64 @ self.x64.T + np.eye(12) / TAU).logpdf(self.y64))

    def leave_one_out(self) -> Any:
        """log p(y_i | all others), (12,)."""
        found = []
        for i in range(12):
            x, y = np.delete(self.x64, i, 0), np.delete(self.y64, i)
            covariance = np.linalg.inv(np.eye(3) + TAU * x.T @ x)
            mean = covariance @ (TAU * x.T @ y)
            variance = self.x64[i] @ covariance @ self.x64[i] + 1 / TAU
            found.append(stats.norm.logpdf(self.y64[i], self.x64[i] @ mean, variance**0.5))
        return np.array(found)

    def mean_field(self, widen: float = 1.0) -> Any:
        """The posterior's means and its own widths, times ``widen``; the posterior itself where X is orthogonal."""
        guide = pd.AutoMeanField(self.model)
        self._set(guide, np.log(widen * np.diag(self.covariance) ** 0.5))
        return guide

    def low_rank(self) -> Any:
        """The posterior itself, in the family σ(I + AAᵀ)σ with three directions for the whole net."""
        guide = pd.AutoLowRank(self.model, rank=3, per="net")
        values, vectors = np.linalg.eigh(self.covariance)
        width = 0.5 * values.min()
        self._set(guide, np.full(3, 0.5 * np.log(width)))
        state: Any = guide.states["weight"]
        state.factor.data = torch.tensor(vectors * np.sqrt(values / width - 1)).to(self.x)
        return guide

    def _set(self, guide: Any, log_scale: Any) -> None:
        state = guide.states["weight"]
        state.loc.data = torch.tensor(self.mean).to(self.x).reshape(1, 3)
        state.log_scale.data = torch.tensor(log_scale).to(self.x).reshape(1, 3)

    def exact(self, shrink: float = 1.0) -> "ExactLine":
        return ExactLine(self.mean, self.covariance * shrink**2, self.x)


class ExactLine:
    """A posterior that is known by ``sample_weights`` alone."""

    def __init__(self, mean: Any, covariance: Any, like: Tensor) -> None:
        self.mean64 = torch.tensor(mean)
        self.root, self.like = torch.linalg.cholesky(torch.tensor(covariance)), like

    def sample_weights(self, n: int) -> dict[str, Tensor]:
        drawn = self.mean64 + torch.randn(n, 3, dtype=torch.float64) @ self.root.mT
        return {"weight": drawn.to(self.like).unsqueeze(1)}
