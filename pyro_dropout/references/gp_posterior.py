"""An exact Gaussian process as a posterior: joint draws of its function, which ``predict`` takes as the outputs."""

import torch
from pyro.contrib.gp.models import GPRegression
from torch import Tensor

from pyro_dropout.generative.exact_gp import GP, _apart
from pyro_dropout.mathematics.checks import check_count
from pyro_dropout.mathematics.errors import PyroDropoutError, SingularError
from pyro_dropout.mathematics.shapes import Float

F64 = torch.float64

_JITTERS = (0.0, 1e-12, 1e-10, 1e-8, 1e-6)  # of the largest variance


class GPPosterior:
    """The posterior of a fitted Gaussian process over f; it has no weights and draws functions directly.

    Args:
        gp: a fitted GP.

    Attributes:
        whole_functions: True, because each draw is one function at all points.
    """

    whole_functions = True

    def __init__(self, gp: GP) -> None:
        if not isinstance(gp, GP):
            raise PyroDropoutError(f"gp must be a pyro_dropout.GP; got {type(gp).__name__}.")
        gp.tau  # noqa: B018 - raises if the GP is not fitted
        self._gp = gp
        self._known: tuple[GPRegression, Tensor, Tensor, Tensor] | None = None  # the last regression, x, mean and root

    def __repr__(self) -> str:
        return f"GPPosterior({type(self._gp.kernel).__name__}, tau {self._gp.tau.item():.4g})"

    def sample_functions(self, x: Float[Tensor, "m q"], n: int) -> Float[Tensor, "n m d"]:
        """Return ``n`` draws of the function at all rows of ``x`` together, (n, M, D), in the type of ``x``."""
        check_count("n", n)
        mean, root = self._joint(x)
        noise = torch.randn(n, *mean.shape, dtype=F64, device=x.device)
        return (mean + root @ noise).to(x)

    def _joint(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the mean (M, D) and a root (M, M) of the covariance, which all outputs share."""
        regression = self._gp._fitted()
        if self._known is not None and self._known[0] is regression and torch.equal(self._known[1], x):
            return self._known[2:]
        self._gp._check_inputs(x, self._gp._columns)
        with _apart(), torch.no_grad():
            mean, covariance = regression(x.to(F64), full_cov=True, noiseless=True)
        if covariance.dim() == 3:
            covariance = covariance[0]
        self._known = (regression, x.detach().clone(), mean.mT, _root(covariance))
        return self._known[2:]


def gp_posterior(gp: GP) -> GPPosterior:
    """Return a fitted Gaussian process as a posterior that ``predict`` takes.

    ``predict`` uses only the likelihood of its model: pass any object with ``likelihood``, here ``Gaussian(gp.tau)``.

    Args:
        gp: a fitted GP.

    Returns:
        An object with ``sample_functions(x, n)``: n joint draws of f at x, (n, M, D).

    Example:
        >>> import torch, pyro_dropout as pd
        >>> from types import SimpleNamespace
        >>> x = torch.linspace(-1, 1, 5).unsqueeze(-1)
        >>> gp = pd.GP("se", tau=100.0).fit(x, x**2, steps=0)
        >>> posterior = pd.gp_posterior(gp)
        >>> posterior.sample_functions(x, 3).shape
        torch.Size([3, 5, 1])
        >>> model = SimpleNamespace(likelihood=pd.Gaussian(gp.tau))
        >>> answer = pd.predict(model, posterior, x, samples=4000, seed=0)
        >>> torch.allclose(answer.mean, gp.predict(x)[0], atol=0.02)
        True
    """
    return GPPosterior(gp)


def _root(covariance: Tensor) -> Tensor:
    """Return a Cholesky factor with the least jitter that works: nearby points make the covariance singular."""
    identity = torch.eye(len(covariance), dtype=F64, device=covariance.device)
    largest = covariance.diagonal().max().clamp_min(torch.finfo(F64).tiny)
    for jitter in _JITTERS:
        root: Tensor
        root, failed = torch.linalg.cholesky_ex(covariance + jitter * largest * identity)
        if not int(failed):
            return root
    raise SingularError(
        "the covariance of f at x is singular in float64, even with 1e-6 of its largest variance added. Use points"
        " farther apart, or a smaller tau."
    )
