"""A prediction of a linearised network: at each point its outputs are Gaussian, and nothing about them is sampled."""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from pyro_dropout.errors import NotAvailableError, PyroDropoutError
from pyro_dropout.generative.likelihoods.moments import F64, Nodes, Points, Sums, outputs_of
from pyro_dropout.generative.process_state import seeded
from pyro_dropout.mathematics.gaussian_rows import semidefinite_root
from pyro_dropout.mathematics.mixtures import balanced
from pyro_dropout.mathematics.normal import Normal
from pyro_dropout.prediction.prediction import Prediction
from pyro_dropout.protocols import Distribution, Likelihood

_PIECE = 2**22


class LinearisedPrediction(Prediction):
    """The prediction of a network that is linear in its weights; made by ``predict(..., method="linearised")``.

    At each point the outputs f are Gaussian if the guide is; of other guides they have the exact mean and variance, and
    are treated as Gaussian. For a Gaussian guide all that follows is exact with Gaussian noise; so are the moments of
    counts, of yes and no and of a learned noise, and ``log_prob`` of one target, by quadrature. Probabilities of more
    classes, and densities of several targets that are not Gaussian, are means over quasi-random points. ``samples`` are
    drawn when asked for.

    Equation: linearised-output.

    Args:
        likelihood: p(y | f).
        mean: E[f] of each member, (M, N, outputs); M is 1 but for an ensemble.
        covariance: Cov[f] of the outputs of a point, (M, N, outputs, outputs), in float64.
        joint: Cov[f] of all points, (M, N·outputs, N·outputs), or None.
        samples: how many draws ``samples`` has; there are half as many quasi-random points, or up to as many.
        seed: of both.
        keeps: whether ``samples`` may be asked for.

    Example:
        >>> import torch, pyro_dropout as pdrop
        >>> model = pdrop.BayesianNet(torch.nn.Linear(3, 1, bias=False), likelihood=pdrop.Gaussian(tau=4.0))
        >>> guide = pdrop.AutoMeanField(model, init_scale=0.5)
        >>> answer = pdrop.predict(model, guide, torch.ones(2, 3), method="linearised", shared=True)
        >>> answer
        LinearisedPrediction(2 points, Gaussian)
        >>> answer.epistemic.flatten().allclose(torch.tensor(3 * 0.5**2)), answer.joint_covariance.shape
        (True, torch.Size([2, 1, 2, 1]))
    """

    def __init__(
        self,
        likelihood: Likelihood,
        mean: Tensor,
        covariance: Tensor,
        joint: Tensor | None,
        *,
        samples: int,
        seed: int,
        keeps: bool,
    ) -> None:
        self._f, self._spread, self._joint = mean, covariance, joint
        self._draws, self._seed, self._keeps = samples, seed, keeps
        self._outputs = outputs_of(likelihood, Nodes(samples // 2, seed))
        self._members = list(zip(mean, covariance, strict=True))
        sums = _mixed([self._outputs.moments(*each) for each in self._members])
        super().__init__(likelihood, sums, 1, mean[:, :1], None)

    def __repr__(self) -> str:
        members = "" if len(self._f) == 1 else f", {len(self._f)} members"
        return f"LinearisedPrediction({self._f.shape[1]} points{members}, {self.family})"

    @property
    def outputs(self) -> tuple[Tensor, Tensor]:
        """E[f], (M, N, outputs), and Cov[f] of each point, (M, N, outputs, outputs); M is 1 but for an ensemble."""
        return self._f, self._spread

    @property
    def samples(self) -> Tensor:
        """Draws of the outputs from their Gaussian, (T, N, outputs); with ``shared=True`` of all points together."""
        if self._samples is None and self._keeps:
            self._samples = self._drawn()
        return super().samples

    def _drawn(self) -> Tensor:
        members, points, width = self._f.shape
        with seeded(self._seed, self._f.device):
            counts = balanced(members, self._draws).bincount(minlength=members).tolist()
            drawn = []
            for m, count in enumerate(counts):
                z = torch.randn(count, points * width, dtype=F64, device=self._f.device)
                if self._joint is not None:
                    apart = z @ semidefinite_root(self._joint[m]).mT
                else:
                    root = semidefinite_root(self._spread[m])
                    apart = torch.einsum("ndk,tnk->tnd", root, z.reshape(count, points, width))
                drawn.append(self._f[m] + apart.reshape(count, points, width).to(self._f))
            order = torch.randperm(self._draws) if members > 1 else slice(None)
        return torch.cat(drawn)[order]

    @property
    def joint_covariance(self) -> Tensor:
        """Cov[y] between the targets of all points, (N, D, N, D), noise included; with Gaussian noise, shared draws."""
        if self._joint is None:
            raise NotAvailableError("covariances between points are for predict(..., shared=True).")
        if not self._outputs.jointly_normal:
            raise PyroDropoutError(f"joint_covariance is for Gaussian noise; this prediction is of {self.family}.")
        flat = self._f.to(F64).flatten(1)
        apart = flat - flat.mean(0)
        noise = torch.diag(self._sums["noise"].flatten())
        found = self._joint.mean(0) + apart.mT @ apart / len(flat) + noise
        shape = self._f.shape[1:]
        return found.reshape(*shape, *shape).to(self._squares)

    def _covariance(self) -> Tensor:
        if self.one_of_several or self._target_dims > 1:
            return super()._covariance()  # of indicators; or it says that there is none
        within = torch.stack([self._outputs.products(*each) for each in self._members]).mean(0)
        means = torch.stack([self._outputs.moments(*each)["mean"] for each in self._members])
        apart = means - means.mean(0)
        found = within + torch.einsum("mni,mnj->nij", apart, apart) / len(means)
        # The variances are known exactly where covariances come from quasi-random points.
        return torch.diagonal_scatter(found, self._variance, dim1=-2, dim2=-1)

    def log_prob(self, y: Tensor) -> Tensor:
        """Return log p(y | x) of each point, all its targets together, (N,)."""
        y = self.checked_targets(y)
        each = [self._outputs.log_prob(*member, y) for member in self._members]
        return (torch.logsumexp(torch.stack(each), 0) - math.log(len(each))).to(self.like)

    # --- the draws, a piece at a time ---------------------------------------------------------------------------------

    def distribution_at(self, points: Points) -> Distribution:
        """Return equally probable distributions whose mixture y has at some points, (S, points, D).

        With Gaussian noise it is one normal, and with a learned noise a few hundred; otherwise one for each sample.
        """
        if not self._outputs.normal:
            return super().distribution_at(points)
        strata = [self._outputs.strata(m[points], c[points]) for m, c in self._members]
        loc, scale = (torch.cat(parts) for parts in zip(*strata, strict=True))
        return Normal(loc, scale).to_event(self._target_dims)  # type: ignore[no-untyped-call]

    def draw_targets(self, points: Points) -> Tensor:
        """Return a y drawn with each of ``samples`` at some points, (T, points, D)."""
        drawn: Tensor = super().distribution_at(points).sample()
        return drawn

    def pieces(self) -> Iterator[Points]:
        """Yield the points in pieces that can be processed at once."""
        members, points, width = self._f.shape
        count = 256 * members if self._outputs.normal else self._draws
        size = max(1, _PIECE // (max(count, self._draws) * width))
        return (slice(start, start + size) for start in range(0, points, size))


def _mixed(members: list[Sums]) -> Sums:
    """Return the sums of an equal mixture: the spread of a mixture has the means' own spread as well."""
    stacked = {name: torch.stack([each[name] for each in members]) for name in members[0]}
    found = {name: value.mean(0, dtype=F64) for name, value in stacked.items()}
    return found | {"spread": found["spread"] + stacked["mean"].var(0, correction=0)}
