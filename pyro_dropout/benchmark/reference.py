"""The reference of a problem: moments and a few draws of its quantities under the posterior itself, in a small file."""

import platform
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from pyro_dropout.errors import PyroDropoutError
from pyro_dropout.protocols import Record
from pyro_dropout.training.checkpoints.tensor_file import read_tensors, write_tensors

MOST_RHAT = 1.01  # Vehtari et al. (2021): do not use chains with a larger R-hat
LEAST_ESS = 4_000
KEPT = 200  # draws of the quantities in a file
_PACKAGES = ("pyro-dropout", "torch", "pyro-ppl", "numpy", "arviz")
Moments = dict[str, tuple[Tensor, Tensor]]


@dataclass(frozen=True, repr=False)
class Reference:
    """What the posterior of a problem says about its K quantities, each of one number or of C (as for C classes).

    The chains come in two halves. ``half_draws`` are of the first half, and ``draws`` of the second, so that one can be
    scored against the other: of as many draws, no posterior can be expected to come nearer.

    Attributes:
        draws: thinned draws of the quantities, (S, K) or (S, K, C).
        mean: of all draws of all chains, (K,) or (K, C).
        std: the same for the standard deviation.
        half_mean: the mean of one half of the chains.
        half_std: their standard deviation.
        half_draws: thinned draws of these chains.
        how: "exact", or the sampler, its chains and draws.
        rhat: the largest R-hat of a quantity, rank-normalised and split.
        ess: the smallest effective sample size of a quantity, in the bulk and in the tails.
        made_with: versions, seeds and seconds.
        moments: {site: (mean, std)} of the weights, where they are identified.
        data: the data that the reference is of, by name.

    Example:
        >>> from pyro_dropout import benchmark
        >>> reference = benchmark.problems()["line"].reference
        >>> reference.rhat <= 1.01, reference.ess >= 4000, reference.doubts()
        (True, True, [])
        >>> {site: tuple(mean.shape) for site, (mean, std) in sorted(reference.moments.items())}
        {'bias': (1,), 'weight': (1, 5)}
    """

    draws: Tensor
    mean: Tensor
    std: Tensor
    half_mean: Tensor
    half_std: Tensor
    half_draws: Tensor
    how: str
    rhat: float
    ess: float
    made_with: Record
    moments: Moments = field(default_factory=dict)
    data: dict[str, Tensor] = field(default_factory=dict)

    def __repr__(self) -> str:
        return f"Reference({self.how}, {len(self.draws)} draws of {tuple(self.mean.shape)}, R-hat {self.rhat:.4f})"

    @classmethod
    def of(
        cls,
        values: Tensor,
        how: str,
        *,
        mean: Tensor | None = None,
        std: Tensor | None = None,
        moments: Moments | None = None,
        data: Mapping[str, Tensor] | None = None,
        made_with: Record | None = None,
    ) -> "Reference":
        """Summarise the quantities in every draw of every chain.

        Args:
            values: the quantities, (chains, draws, K) or (chains, draws, K, C).
            how: the sampler in words.
            mean: the exact mean, where it is known.
            std: the exact standard deviation.
            moments: {site: (mean, std)} of identified weights.
            data: the data that the posterior is of, by name.
            made_with: seeds, seconds and whatever else tells how to repeat it; versions are added.

        Example:
            >>> import torch
            >>> from pyro_dropout.benchmark import Reference
            >>> chains = torch.randn(8, 1000, 3, generator=torch.Generator().manual_seed(0))
            >>> Reference.of(chains, "8 chains")
            Reference(8 chains, 200 draws of (3,), R-hat 1.0006)
        """
        values = values.double()
        half = len(values) // 2
        if half < 1:
            raise PyroDropoutError(f"a reference needs at least two chains; got {len(values)}.")
        rhat, ess = agreement(values)
        everything, first, second = (part.flatten(0, 1) for part in (values, values[:half], values[half:]))
        return cls(
            draws=_thinned(second),
            mean=(everything.mean(0) if mean is None else mean).float(),
            std=(everything.std(0) if std is None else std).float(),
            half_mean=first.mean(0).float(),
            half_std=first.std(0).float(),
            half_draws=_thinned(first),
            how=how,
            rhat=rhat,
            ess=ess,
            made_with={**(made_with or {}), **versions(*_PACKAGES), "made": time.strftime("%Y-%m-%d", time.gmtime())},
            moments=moments or {},
            data=dict(data or {}),
        )

    def doubts(self) -> list[str]:
        """Return what forbids to use this as a reference; empty if nothing does."""
        found = []
        if not self.rhat <= MOST_RHAT:
            found.append(f"its chains disagree: R-hat is {self.rhat:.4f}, above {MOST_RHAT}")
        if not self.ess >= LEAST_ESS:
            found.append(f"its effective sample size is {self.ess:.0f}, below {LEAST_ESS}")
        return found

    def save(self, path: str | Path) -> None:
        """Write a reference that can be trusted; draws are kept as 256 levels between the ends of each quantity."""
        if doubts := self.doubts():
            raise PyroDropoutError(f"{Path(path).name} is not written: {' and '.join(doubts)}. Run longer chains.")
        draws, ends = zip(*(_packed(getattr(self, name)) for name in _DRAWS), strict=True)
        plain = torch.stack([*(getattr(self, name) for name in _SUMMARY), *ends[0], *ends[1]])
        of_sites = {f"{part}/{name}": pair[k] for name, pair in self.moments.items() for k, part in enumerate(_PARTS)}
        data = {f"data/{name}": value for name, value in self.data.items()}
        facts = {name: getattr(self, name) for name in ("how", "rhat", "ess", "made_with")}
        write_tensors(path, {"summary": plain, **dict(zip(_DRAWS, draws, strict=True)), **of_sites, **data}, facts)


_PARTS = ("mean of", "std of")
_SUMMARY, _DRAWS = ("mean", "std", "half_mean", "half_std"), ("draws", "half_draws")


def load_reference(path: str | Path, data: Mapping[str, Tensor] | None = None) -> Reference:
    """Read a reference, and refuse one that is not good enough, or is of other data than those given."""
    tensors, facts = read_tensors(path)
    if not {"summary", *_DRAWS} <= tensors.keys():
        raise PyroDropoutError(f"{Path(path).name} is no reference that this version reads. Make it again.")
    summary = tensors["summary"].unbind()
    taken = dict(zip(_SUMMARY, summary, strict=False))
    draws = {name: _unpacked(tensors[name], *summary[k : k + 2]) for name, k in zip(_DRAWS, (4, 6), strict=True)}
    sites = [name.removeprefix(f"{_PARTS[0]}/") for name in tensors if name.startswith(f"{_PARTS[0]}/")]
    moments = {site: (tensors[f"{_PARTS[0]}/{site}"], tensors[f"{_PARTS[1]}/{site}"]) for site in sites}
    written = {name.removeprefix("data/"): value for name, value in tensors.items() if name.startswith("data/")}
    parts: Record = {**taken, **draws, **facts}
    found = Reference(**parts, moments=moments, data=written)
    doubts = found.doubts()
    for name, value in (data or {}).items():
        if name not in written or written[name].shape != value.shape or not torch.allclose(written[name], value):
            doubts.append(f"it is of other data: {name} differs")
    if doubts:
        raise PyroDropoutError(f"{Path(path).name} cannot be used: {' and '.join(doubts)}. Make it again.")
    return found


def agreement(values: Tensor) -> tuple[float, float]:
    """Return the largest R-hat and the smallest effective sample size of values (chains, draws, ...)."""
    import arviz

    rhat_of: Callable[..., float] = arviz.rhat
    ess_of: Callable[..., float] = arviz.ess
    each = values.detach().to("cpu", torch.float64).flatten(2).unbind(-1) if values.dim() > 2 else [values]
    columns = [column.contiguous().numpy() for column in each if bool((column != column[0, 0]).any())]
    rhat = max((float(rhat_of(column)) for column in columns), default=1.0)
    sizes = [float(ess_of(column, method=method)) for column in columns for method in ("bulk", "tail")]
    return rhat, min(sizes, default=float(np.prod(values.shape[:2])))


def _thinned(draws: Tensor) -> Tensor:
    """Return some of the draws, evenly spaced."""
    return draws[torch.linspace(0, len(draws) - 1, min(KEPT, len(draws))).round().long()].float()


def _packed(draws: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Return draws as 256 levels between the ends of each quantity, about a hundredth of its standard deviation.

    The levels are kept as differences from the quantity before, which compress better where functions are smooth; the
    last class, which is one minus the others, is not kept.
    """
    low, high = draws.amin(0), draws.amax(0)
    step = ((high - low) / 255).where(high > low, torch.ones_like(low))
    levels = ((draws - low) / step).round().to(torch.uint8)
    if draws.dim() > 2 and torch.allclose(draws.sum(-1), torch.ones(()), atol=1e-2):
        levels = levels[..., :-1]
    return levels.diff(dim=1, prepend=torch.zeros_like(levels[:, :1])), (low, step)


def _unpacked(differences: Tensor, low: Tensor, step: Tensor) -> Tensor:
    levels = differences.cumsum(1, dtype=torch.uint8)
    count = levels.shape[-1]
    draws = levels * step[..., :count] + low[..., :count]
    return draws if draws.shape[1:] == low.shape else torch.cat([draws, 1 - draws.sum(-1, keepdim=True)], -1)


def versions(*packages: str) -> Record:
    """Return the versions of packages by name, and that of Python."""
    return {name: version(name) for name in packages} | {"python": platform.python_version()}
