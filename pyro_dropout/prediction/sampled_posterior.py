"""A posterior given by draws: the weights of several Markov chains, and whether the chains agree."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from pyro_dropout.errors import ShapeError
from pyro_dropout.mathematics.checks import check_count


@dataclass(repr=False)
class SampledPosterior:
    """Draws of a network's weights from its posterior, chain by chain; a posterior that ``predict`` takes.

    Weights of a network are not identified: hidden units can be exchanged, and two chains that agree about the function
    may disagree about every weight. Use ``rhat_of`` on outputs, not on weights.

    Attributes:
        weights: {site: (chains, draws, *shape)}.
        divergences: the number of divergent trajectories in all chains; any at all is a reason for doubt.
        seconds: how long sampling took.
        whole_functions: True, because each draw is one function, at all points.

    Example:
        >>> import torch, pyro_dropout as pdrop
        >>> draws = torch.randn(4, 100, 1, 2, generator=torch.Generator().manual_seed(0))
        >>> posterior = pdrop.prediction.SampledPosterior({"weight": draws})
        >>> posterior
        SampledPosterior(4 chains of 100 draws, 0 divergences)
        >>> posterior.sample_weights(10)["weight"].shape, posterior.mean()["weight"].shape
        (torch.Size([10, 1, 2]), torch.Size([1, 2]))
        >>> posterior.rhat_of(draws).shape, bool(posterior.rhat_of(draws).max() < 1.05)
        (torch.Size([1, 2]), True)
    """

    weights: dict[str, Tensor]
    divergences: int = 0
    seconds: float = float("nan")

    whole_functions = True

    def __post_init__(self) -> None:
        if not self.weights:
            raise ShapeError("weights must hold at least one site, {name: (chains, draws, ...)}; it is empty.")
        shapes = {name: tuple(value.shape[:2]) for name, value in self.weights.items()}
        if len(set(shapes.values())) > 1 or any(len(shape) < 2 or 0 in shape for shape in shapes.values()):
            raise ShapeError(f"weights must be (chains, draws, ...), the same two at all sites; got {shapes}.")

    def __repr__(self) -> str:
        lost = "1 divergence" if self.divergences == 1 else f"{self.divergences} divergences"
        time = "" if self.seconds != self.seconds else f", {self.seconds:.1f} s"
        chains = "1 chain" if self.num_chains == 1 else f"{self.num_chains} chains"
        return f"SampledPosterior({chains} of {self.num_draws} draws, {lost}{time})"

    @property
    def num_chains(self) -> int:
        """How many chains there are."""
        return int(next(iter(self.weights.values())).shape[0])

    @property
    def num_draws(self) -> int:
        """How many draws each chain has."""
        return int(next(iter(self.weights.values())).shape[1])

    def mean(self) -> dict[str, Tensor]:
        """Return the mean of each site over all draws; for a network with hidden units it means little."""
        return {name: value.mean((0, 1)) for name, value in self.weights.items()}

    def sample_weights(self, n: int) -> dict[str, Tensor]:
        """Return ``n`` shuffled draws, {site: (n, *shape)}, each used once before any is repeated."""
        return self.draws_at(self.order(n))

    def order(self, n: int) -> Tensor:
        """Return the indices of ``n`` draws, (n,), shuffled: whole rounds of all draws, and part of one."""
        check_count("n", n)
        total = self.num_chains * self.num_draws
        return torch.cat([torch.randperm(total) for _ in range(-(-n // total))])[:n]

    def draws_at(self, numbers: Tensor) -> dict[str, Tensor]:
        """Return the draws with these indices, which run through the first chain, then the second, and so on."""
        return {name: value.flatten(0, 1)[numbers.to(value.device)] for name, value in self.weights.items()}

    def rhat_of(self, values: Tensor) -> Tensor:
        """Return R-hat of values (chains, draws, ...), rank-normalised and split; above 1.01 the chains disagree.

        It is that of Vehtari, Gelman, Simpson, Carpenter and Bürkner (2021), by ArviZ, and 1 for constant values.
        """
        import arviz

        rhat: Callable[..., float] = arviz.rhat
        shape = (self.num_chains, self.num_draws)
        if values.shape[:2] != shape:
            raise ShapeError(f"values must begin with (chains, draws) = {shape}; got shape {tuple(values.shape)}.")
        each = values.detach().to("cpu", torch.float64).reshape(*shape, -1).unbind(-1)
        with np.errstate(divide="ignore", invalid="ignore"):  # for a chain that never moved
            found = [1.0 if bool((v == v[0, 0]).all()) else float(rhat(v.contiguous().numpy())) for v in each]
        return torch.tensor(found, dtype=torch.float64).reshape(values.shape[2:])
