"""Exact posteriors: of a network that is linear in its random weights, f = f₀ + J w, and of a Gaussian process.

With prior N(0, S), noise of precision T and r = y - f₀, the posterior of the weights has precision S⁻¹ + JᵀTJ. All is
computed in float64 with weights in units of their prior, v = S^(-½) w, where the precision I + S^½ Jᵀ T J S^½ = L Lᵀ is
at least one in every direction.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Size, Tensor

from pyro_dropout.errors import PyroDropoutError, ShapeError
from pyro_dropout.generative.exact_gp import GP
from pyro_dropout.generative.inputs import check_inputs
from pyro_dropout.generative.likelihoods import Gaussian
from pyro_dropout.generative.likelihoods.moments import is_one_of
from pyro_dropout.generative.networks import BayesianNet
from pyro_dropout.generative.own_noise import check_no_noise
from pyro_dropout.generative.standardised import Standardised
from pyro_dropout.mathematics.checks import check_count, check_finite
from pyro_dropout.mathematics.shapes import Float
from pyro_dropout.prediction.predict_network import frozen
from pyro_dropout.protocols import Weights
from pyro_dropout.references.nuts.energy import has_gaussian_prior, parted

F64 = torch.float64


@dataclass(repr=False, eq=False)
class GaussianPosterior:
    """A joint Gaussian over all weights of a network, with full covariance; a posterior that ``predict`` takes.

    Args:
        loc: the mean of all weights in one vector, (d,).
        root: R, upper triangular with RᵀR the precision, (d, d).
        shapes: of each site, in the order of ``loc``.
        log_evidence: log p(y) of the data, in nats.
        like: a tensor with the dtype and device of the weights.

    Attributes:
        log_evidence: log p(y) of the training data, in nats: the upper bound of every ELBO.
        whole_functions: True, because each draw is one function at all points.

    Example:
        >>> import torch, pyro_dropout as pdrop
        >>> model = pdrop.BayesianNet(torch.nn.Linear(2, 1), likelihood=pdrop.Gaussian(tau=4.0))
        >>> posterior = pdrop.references.conjugate(model, torch.eye(2), torch.ones(2, 1))
        >>> posterior
        GaussianPosterior(3 weights at 2 sites, log evidence -2.85)
        >>> posterior.sample_weights(5)["weight"].shape, posterior.covariance.shape
        (torch.Size([5, 1, 2]), torch.Size([3, 3]))
        >>> posterior.log_prob(posterior.mean()).item() > posterior.log_prob(posterior.sample_weights(9)).max().item()
        True
    """

    loc: Float[Tensor, "d"]
    root: Float[Tensor, "d d"]
    shapes: dict[str, Size]
    log_evidence: float
    like: Tensor

    whole_functions = True

    def __repr__(self) -> str:
        sites = "1 site" if len(self.shapes) == 1 else f"{len(self.shapes)} sites"
        return f"GaussianPosterior({len(self.loc)} weights at {sites}, log evidence {self.log_evidence:.2f})"

    @property
    def covariance(self) -> Tensor:
        """The covariance of all weights, site after site, each flattened: (d, d), in float64."""
        inverse: Tensor = torch.linalg.solve_triangular(self.root, torch.eye(len(self.loc), dtype=F64), upper=True)
        return inverse @ inverse.mT

    def mean(self) -> Weights:
        """Return the mean of each site."""
        return self._parted(self.loc)

    def sample_weights(self, n: int) -> Weights:
        """Return ``n`` independent draws, {site: (n, *shape)}."""
        check_count("n", n)
        noise = torch.randn(len(self.loc), n, dtype=F64)
        return self._parted(self.loc + torch.linalg.solve_triangular(self.root, noise, upper=True).mT)

    def log_prob(self, weights: Weights) -> Tensor:
        """Return the log density of weights {site: (*batch, *shape)}, (*batch), in float64."""
        if set(self.shapes) != set(weights):
            raise ShapeError(f"weights must name the sites {', '.join(self.shapes)}; got {', '.join(weights)}.")
        flat = [
            weights[name].reshape(*weights[name].shape[: weights[name].dim() - len(shape)], -1)
            for name, shape in self.shapes.items()
        ]
        white = (torch.cat(flat, -1).to("cpu", F64) - self.loc) @ self.root.mT
        log_det: Tensor = self.root.diagonal().log().sum()
        return log_det - 0.5 * white.square().sum(-1) - 0.5 * len(self.loc) * math.log(2 * math.pi)

    def _parted(self, flat: Tensor) -> Weights:
        """Split one or several vectors into sites, in the model's own dtype."""
        return {name: part.to(self.like) for name, part in parted(flat, self.shapes).items()}


def conjugate(model: BayesianNet | Standardised, x: Tensor, y: Tensor) -> GaussianPosterior:
    """Return the exact posterior of a network that is linear in its random weights, with Gaussian noise.

    Examples are ``nn.Linear``, and any network whose other layers are all hidden from the prior. The time grows with
    the cube of the number d of weights, and with N·D·d².

    Args:
        model: a ``BayesianNet``, or a ``Standardised`` one; its likelihood must be ``Gaussian``.
        x: N data points, (N, ...).
        y: their targets, (N, D).

    Returns:
        The posterior, with its covariance and the evidence.

    Example:
        >>> import torch, pyro_dropout as pdrop
        >>> model = pdrop.BayesianNet(torch.nn.Linear(1, 1, bias=False), likelihood=pdrop.Gaussian(tau=3.0))
        >>> posterior = pdrop.references.conjugate(model, torch.ones(5, 1), torch.full((5, 1), 2.0))
        >>> round(posterior.mean()["weight"].item(), 4), round(posterior.covariance.item(), 4)  # 15·2/16, 1/16
        (1.875, 0.0625)
        >>> pdrop.predict(model, posterior, torch.ones(2, 1), samples=100, seed=0).mean.shape
        torch.Size([2, 1])
    """
    _check(model, x, y)
    net = frozen(model).to("cpu", F64).eval()
    x64, y64 = x.detach().to("cpu", F64), y.detach().to("cpu", F64)
    shapes = {name: net.prior_of(name).event_shape for name in net.sites}
    widths = torch.cat([net.prior_of(name).stddev.reshape(-1) for name in net.sites])

    def outputs(v: Tensor) -> Tensor:  # v: all weights, in units of their prior
        f: Tensor = net.evaluate(parted(widths * v, shapes), x64)
        return f

    zero = torch.zeros_like(widths)
    f0 = outputs(zero).detach()
    check_no_noise(net, "an exact posterior")
    net.likelihood.checked(f0, y64)
    jacobian = torch.func.jacrev(outputs)(zero).detach().flatten(0, 1)
    _check_linear(outputs, f0, jacobian)
    tau = net.likelihood.distribution(f0).variance.reciprocal().reshape(-1)
    residual = (y64 - f0).reshape(-1)
    pull = jacobian.mT @ (tau * residual)
    precision = torch.eye(len(widths), dtype=F64) + jacobian.mT @ (tau.unsqueeze(-1) * jacobian)
    cholesky = torch.linalg.cholesky(precision)
    loc = torch.cholesky_solve(pull.unsqueeze(-1), cholesky).squeeze(-1)
    # log p(y) = log p(y | v) + log p(v) - log p(v | y), the same at every v; here at v = 0.
    at_zero = 0.5 * (tau.log().sum() - len(tau) * math.log(2 * math.pi) - (tau * residual.square()).sum())
    evidence = at_zero + 0.5 * pull @ loc - cholesky.diagonal().log().sum()
    like = next(model.parameters()).detach()
    return GaussianPosterior(widths * loc, cholesky.mT / widths, shapes, float(evidence), like.new_empty(0))


def _check(model: BayesianNet | Standardised, x: Tensor, y: Tensor) -> None:
    if not has_gaussian_prior(model):
        raise PyroDropoutError(f"model must be a BayesianNet; got {type(model).__name__}. For other models use nuts().")
    if not is_one_of(model.likelihood, Gaussian):
        kind = type(model.likelihood).__name__
        raise PyroDropoutError(f"model.likelihood must be Gaussian(tau); got {kind}. For other noise use nuts().")
    check_inputs(x)
    check_finite("y", y, data=True)


def _check_linear(outputs: Callable[[Tensor], Tensor], f0: Tensor, jacobian: Tensor) -> None:
    """Raise unless outputs are linear in the weights, tested at a near and a far point in an arbitrary direction."""
    count = jacobian.shape[1]
    probe = torch.cos(1.0 + torch.arange(count, dtype=F64) * 2.3)  # like a random draw, but without a generator
    for far in (1.0, -30.0):
        straight = f0.reshape(-1) + jacobian @ (far * probe)
        gap = (outputs(far * probe).detach().reshape(-1) - straight).abs().max()
        if not gap <= 1e-9 * torch.maximum(straight.abs().max(), f0.abs().max()):  # relative: y may be in any unit
            raise PyroDropoutError(
                "net is not linear in its random weights, as nn.Linear is, or what Prior(hide=...) leaves random of a"
                " network; otherwise use nuts()."
            )


def gp_posterior(gp: GP) -> GP:
    """Return a Gaussian process if it is fitted, and so a posterior over f that ``predict`` takes.

    It has no weights and draws functions directly. ``predict`` uses only the likelihood of its model: pass any object
    with ``likelihood``, here ``Gaussian(gp.tau)``.

    Example:
        >>> import torch, pyro_dropout as pdrop
        >>> from types import SimpleNamespace
        >>> x = torch.linspace(-1, 1, 5).unsqueeze(-1)
        >>> gp = pdrop.generative.GP(tau=100.0).fit(x, x**2, steps=0)
        >>> posterior, model = pdrop.references.gp_posterior(gp), SimpleNamespace(likelihood=pdrop.Gaussian(gp.tau))
        >>> posterior.sample_functions(x, 3).shape
        torch.Size([3, 5, 1])
        >>> torch.allclose(pdrop.predict(model, posterior, x, samples=4000, seed=0).mean, gp.predict(x)[0], atol=0.02)
        True
    """
    if not isinstance(gp, GP):
        raise PyroDropoutError(f"gp must be a pyro_dropout.generative.GP; got {type(gp).__name__}.")
    gp.tau  # noqa: B018 - raises if the GP is not fitted
    return gp
