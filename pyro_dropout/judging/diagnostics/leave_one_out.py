"""How well each point is predicted from all others, without refitting: leave-one-out by importance sampling.

A draw from q represents one from p(w | y without y_i) with weight r_i(w) = p(y, w)/q(w) · 1/p(y_i | w). The first
factor corrects from the approximation to the posterior (Magnusson, Andersen, Jonasson and Vehtari 2019), the second
removes the point; both are smoothed together, and k̂ says for each point whether that worked.
"""

import math
import warnings

import torch
from torch import Tensor

from pyro_dropout.guides.ensemble import Ensemble
from pyro_dropout.judging.diagnostics.arviz_export import FEWEST, efficiency_of, loo_results, pareto_smooth
from pyro_dropout.judging.diagnostics.inference_data import asked, check_one, with_density
from pyro_dropout.mathematics.errors import PyroDropoutError, RangeError
from pyro_dropout.prediction.joint_draws import JointDraws, joint_draws
from pyro_dropout.protocols import PyroModel


class LOO(loo_results()):  # type: ignore[misc]
    """The leave-one-out estimate of the expected log predictive density; returned by ``loo``.

    It is also an ArviZ result: ``az.compare({"a": loo(...), "b": loo(...)})`` accepts it.

    Args:
        elpd: Σ_i log p(y_i | y without y_i), in nats.
        se: its standard error over points.
        p_loo: the effective number of parameters, Σ_i log p(y_i | y) - elpd.
        pointwise: the terms of elpd, (N,), in float64.
        khat: the Pareto k̂ of each point's ratios, (N,); above 0.7 its term cannot be trusted.
        corrected: whether the ratios include p(y, w)/q(w), for draws from an approximation.
        samples: number of draws, all chains together; 0 if unknown.

    Attributes:
        elpd: as above, and so are se, p_loo, pointwise, khat and corrected.

    Example:
        >>> import torch, pyro_dropout as pd
        >>> pd.LOO(-12.0, 1.5, 2.1, torch.full((3,), -4.0), torch.tensor([0.1, 0.9, 0.2]), True)
        LOO(elpd=-12.00 ± 1.50, p_loo=2.10, 3 points, 1 with k̂ > 0.7)
    """

    def __init__(
        self, elpd: float, se: float, p_loo: float, pointwise: Tensor, khat: Tensor, corrected: bool, samples: int = 0
    ) -> None:
        arrays = (part.detach().cpu().numpy() for part in (pointwise, khat))
        super().__init__(elpd, se, p_loo, *arrays, samples, corrected)
        own = {"elpd": elpd, "se": se, "p_loo": p_loo, "pointwise": pointwise, "khat": khat, "corrected": corrected}
        for name, value in own.items():  # bypasses pandas, which would treat a new attribute as a new entry
            object.__setattr__(self, name, value)

    def __repr__(self) -> str:
        bad = int((self.khat > 0.7).sum())
        found = f"elpd={self.elpd:.2f} ± {self.se:.2f}, p_loo={self.p_loo:.2f}"
        return f"LOO({found}, {len(self.pointwise)} points, {bad} with k̂ > 0.7)"

    __str__ = __repr__


def loo(
    model: PyroModel | None,
    posterior: object,
    *args: object,
    samples: int = 1000,
    approximate: bool = True,
    seed: int | None = None,
    site: str | None = None,
    **kwargs: object,
) -> LOO:
    """Estimate how well new points would be predicted, from the training points: leave-one-out cross-validation.

    ``az.loo(to_arviz(...))`` treats the draws as exact posterior draws; so does ``approximate=False``, which gives the
    same numbers. The default corrects for the guide's approximation error; k̂ says where the guide is too poor for
    that. ``az.compare`` takes a dict of results. ArviZ's own ``loo_approximate_posterior`` has the same elpd, but its
    p_loo scores the data by uncorrected draws from q, and so is wrong unless q is the posterior.

    A point that ``poutine.scale`` counts c times is left out with all of its weight, p(y_i | w)ᶜ. Masked points are not
    among the terms.

    Args:
        model: a network of this package, or any Pyro model, whose observed site defines the points.
        posterior: a guide with a density, or, without the correction, any posterior that ``to_arviz`` takes except a
            fleet. A sampled posterior needs no correction and gets none.
        args: the model's own arguments, (x, y) of a network: all data that the guide was fitted to.
        samples: draws per chain, at least 25.
        approximate: whether to correct for draws that come from q.
        seed: makes the draws reproducible, and leaves torch's random state unchanged.
        site: the observed site whose points are left out, if the model has several.
        kwargs: the model's own keyword arguments.

    Example:
        >>> import torch, pyro_dropout as pd
        >>> x = torch.linspace(-1, 1, 20).unsqueeze(-1)
        >>> model = pd.BayesianNet(torch.nn.Linear(1, 1, bias=False), likelihood=pd.Gaussian(tau=1.0))
        >>> guide = pd.AutoMeanField(model, init=lambda name, shape: torch.zeros(shape), init_scale=0.4)
        >>> found = pd.loo(model, guide, x, 0 * x, seed=0)
        >>> found.khat.shape, bool((found.khat < 0.7).all()), found.elpd < 0
        (torch.Size([20]), True, True)
    """
    call, samples = asked(loo, model, posterior, args, kwargs, samples)
    check_one(posterior, samples)
    sampled = isinstance(getattr(posterior, "weights", None), dict)
    corrected = approximate and not sampled
    if corrected:
        draws, log_q = with_density(call, posterior, samples, seed)
        base = (draws.log_joint - log_q).flatten()
    else:
        if isinstance(posterior, Ensemble) and posterior.points and posterior.members < FEWEST:
            raise RangeError(
                f"an ensemble of {posterior.members} points has as many different draws, and a tail needs {FEWEST}; add"
                " members, or score data that were held back."
            )
        draws = joint_draws(call, posterior, samples, seed)
        base = torch.zeros_like(draws.log_joint).flatten()
    each, counts = _points(draws, site)
    # With several chains ArviZ makes the tail longer, by the relative efficiency of their draws.
    worth = efficiency_of({name: value.detach().cpu().numpy() for name, value in draws.weights.items()})
    weights, khat = (torch.from_numpy(part) for part in pareto_smooth((base - counts * each).cpu().numpy(), worth))
    each, counts = each.cpu(), counts.cpu()
    pointwise = torch.logsumexp(weights + each, -1)
    # With ℓ = p(y_i | w), which counts c times: p(y_i | y) = E[ℓ¹⁺ᶜ]/E[ℓᶜ], under the same smoothed weights of
    # p(w | all others) that give p(y_i | all others) = E[ℓ], so that no term of p_loo is negative. Without the
    # correction, the mean, as in ArviZ.
    if corrected:
        fitted = torch.logsumexp(weights + (1 + counts) * each, -1) - torch.logsumexp(weights + counts * each, -1)
    else:
        fitted = torch.logsumexp(each, -1) - math.log(each.shape[-1])
    bad = int((khat > 0.7).sum())
    if bad:
        warnings.warn(
            f"k̂ is above 0.7 at {bad} of {len(khat)} points: their terms, and so elpd, cannot be trusted. The"
            " posterior is too far from the true one, or a point is too influential; hold data back instead.",
            stacklevel=2,
        )
    return LOO(
        elpd=float(pointwise.sum()),
        se=float((len(pointwise) * pointwise.var(correction=0)).sqrt()),
        p_loo=float((fitted - pointwise).sum()),
        pointwise=pointwise,
        khat=khat,
        corrected=corrected,
        samples=each.shape[-1],
    )


def _points(draws: JointDraws, site: str | None) -> tuple[Tensor, Tensor]:
    """Return the log-likelihoods of one site's points, (N, S), and how often each counts, (N, 1); none is masked."""
    found = draws.log_likelihood
    if site is None and len(found) > 1:
        raise PyroDropoutError(
            f"the model observes several sites, {', '.join(found)}: write loo(..., site={next(iter(found))!r}) to say"
            " which one's points are left out."
        )
    if site is not None and site not in found:
        raise PyroDropoutError(f"site must be one that the model observes, {', '.join(found)}; got {site!r}.")
    name = next(iter(found)) if site is None else site
    each = found[name].flatten(0, 1)
    each = each.reshape(len(each), -1).mT
    if name not in draws.counts:
        return each, torch.ones_like(each[:, :1])
    counts = draws.counts[name].reshape(-1, 1)
    shown = counts.flatten() > 0
    if not bool(shown.any()):
        raise PyroDropoutError(f"all points of site {name!r} are masked, so there is none to leave out.")
    return each[shown], counts[shown]
