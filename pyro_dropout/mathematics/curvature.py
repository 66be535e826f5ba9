"""What a Laplace approximation knows of its point: how the log-likelihood bends there, in blocks, and its evidence."""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from pyro_dropout.mathematics.curvature_blocks import F64, Block

OF_NOISE = ("tau", "numbers", "squares")  # what is known of Gaussian noise
NOISE = "tau"  # the name of the noise among what is found, beside the sites


class Curvature(nn.Module):
    """The curvature of a log-likelihood at a point, in blocks of sites that are correlated with each other.

    Args:
        blocks: the blocks.
        log_likelihood: log p(y | w) at the point, of all data.
        num_data: how many data these are.
        noise: of Gaussian noise, its precision ``tau``, how many ``numbers`` the targets have, and Σ τ(y - f)², their
            ``squares``.
    """

    log_likelihood: Tensor
    num_data: Tensor
    tau: Tensor | None
    numbers: Tensor | None
    squares: Tensor | None

    def __init__(
        self, blocks: list[Block], log_likelihood: Tensor, num_data: int, noise: Mapping[str, Tensor] | None = None
    ) -> None:
        super().__init__()
        # torch allows no dot in the name of a submodule
        self.blocks = nn.ModuleDict({",".join(block.shapes).replace(".", "/"): block for block in blocks})
        self.register_buffer("log_likelihood", log_likelihood.detach().to(F64))
        self.register_buffer("num_data", torch.tensor(num_data, device=log_likelihood.device))
        for name in OF_NOISE:
            value = (noise or {}).get(name)
            self.register_buffer(name, None if value is None else value.detach().to(log_likelihood.device, F64))

    def __iter__(self) -> Iterator[Block]:
        return iter(self.blocks.values())  # type: ignore[arg-type]

    def log_det(self, precisions: Mapping[str, Tensor] | None = None) -> Tensor:
        """Return log det(H + P) of all blocks, with gradients in the prior's precisions, given by site."""
        each = [block.log_det(None if precisions is None else block.gathered(precisions)) for block in self]
        return torch.stack(each).sum()

    def squared_length(self, by_site: Mapping[str, Tensor]) -> Tensor:
        """Return gᵀ Λ⁻¹ g of a vector g, given by site, with gradients in g."""
        own = ({name: by_site[name] for name in block.shapes if name in by_site} for block in self)
        return torch.stack([block.squared_length(each) for block, each in zip(self, own, strict=True) if each]).sum()


def log_evidence(curvature: Curvature, point: Mapping[str, Tensor], logs: Mapping[str, Tensor] | None = None) -> Tensor:
    """Return log p(D) ≈ log p(y | w) + log p(w) + n/2 log 2π - ½ log det(H + P), in float64.

    Equation: laplace-evidence.

    Args:
        curvature: at the point.
        point: w by site.
        logs: by how much to change the log precisions: of the noise ("tau") and of the prior of some sites; with
            gradients.

    Example:
        >>> import torch
        >>> from pyro_dropout.mathematics.curvature import Curvature, log_evidence
        >>> from pyro_dropout.mathematics.curvature_blocks import Dense
        >>> block = Dense({"w": torch.Size([1])}, {"w": torch.ones(1)})
        >>> block.add(torch.ones(3, 1))
        >>> log_evidence(Curvature([block], torch.tensor(-7.0), 10), {"w": torch.zeros(1)}).item() # -7 - ½ log 4
        -7.693147180559945
    """
    logs = logs or {}
    likelihood, log_ratio = curvature.log_likelihood, logs.get(NOISE)
    precisions = precisions_of(curvature, logs)
    prior = [0.5 * (p.log() - p * point[name].to(F64).square()).sum() for name, p in precisions.items()]
    if log_ratio is None:
        log_det = curvature.log_det(precisions)
    else:  # log det(rH + P) = n log r + log det(H + P/r)
        assert curvature.numbers is not None, "without Gaussian noise"
        assert curvature.squares is not None
        likelihood = likelihood + 0.5 * (curvature.numbers * log_ratio - torch.expm1(log_ratio) * curvature.squares)
        size = sum(block.size() for block in curvature)
        log_det = size * log_ratio + curvature.log_det({n: p * torch.exp(-log_ratio) for n, p in precisions.items()})
    return likelihood + torch.stack(prior).sum() - 0.5 * log_det


def precisions_of(curvature: Curvature, logs: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
    """Return the prior's precisions by site, each of the site's shape, with their logs changed by ``logs``."""
    logs = logs or {}
    found = {name: value for block in curvature for name, value in block.by_site().items()}
    return {name: value * logs[name].exp() if name in logs else value for name, value in found.items()}
