"""A likelihood as a stranger writes it, in one file: noise with heavy tails."""

import pyro.distributions as dist
import torch
from scipy.special import stdtr
from torch import Tensor

import pyro_dropout as pd
from pyro_dropout.registry import likelihood


class StudentT(dist.StudentT):
    """Pyro's, with the distribution function that it lacks."""

    def cdf(self, value: Tensor) -> Tensor:
        z = (value - self.loc) / self.scale
        return torch.as_tensor(stdtr(self.df.detach().cpu().numpy(), z.detach().cpu().numpy()), device=z.device).to(z)


class HeavyTails(pd.generative.Likelihood):
    """y = f + σ t, with ν degrees of freedom."""

    df: Tensor
    scale: Tensor

    def __init__(self, df: float = 4.0, scale: float = 0.5) -> None:
        super().__init__()
        self.register_buffer("df", torch.tensor(df))
        self.register_buffer("scale", torch.tensor(scale))

    def distribution(self, f: Tensor) -> StudentT:
        return StudentT(self.df.to(f).expand(f.shape), f, self.scale.to(f).expand(f.shape)).to_event(1)

    def curvature_root(self, f: Tensor, y: Tensor | None = None) -> Tensor:
        fisher = (self.df + 1) / (self.df + 3) / self.scale**2
        return torch.diag_embed(fisher.sqrt().to(f).expand(f.shape))

    def standardised_targets(self) -> bool:
        return False


def register() -> None:
    """Put it among the likelihoods, as the decorator of a class does."""
    likelihood("heavy-tails")(HeavyTails)
