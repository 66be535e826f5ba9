"""How well each point is predicted from all others, without fitting again: leave-one-out by importance sampling.

A draw from q stands for one from p(w | y without y_i) with weight r_i(w) = p(y, w)/q(w) · 1/p(y_i | w). The first
factor turns draws of an approximation into draws of the posterior (Magnusson, Andersen, Jonasson and Vehtari 2019), the
second takes the point out; both are smoothed together, and k̂ says for each point whether that worked.
"""

import warnings
from typing import Any

import torch
from torch import Tensor

from pyro_dropout.judging.diagnostics.arviz_export import efficiency_of, loo_results, pareto_smooth
from pyro_dropout.judging.diagnostics.inference_data import asked, check_one, with_density
from pyro_dropout.mathematics.errors import PyroDropoutError
from pyro_dropout.prediction.draws.joint_draws import JointDraws, joint_draws


class LOO(loo_results()):  # type: ignore[misc]
    """The expected log predictive density of a new point, by leaving out each of the points at hand; made by ``loo``.

    It is a result of ArviZ as well: ``az.compare({"a": loo(...), "b": loo(...)})`` takes it as it is.

    Args:
        elpd: Σ_i log p(y_i | y without y_i), in nats.
        se: its standard error over points.
        p_loo: the effective number of parameters, Σ_i log p(y_i | y) - elpd.
        pointwise: the terms of elpd, (N,), in float64.
        khat: the Pareto k̂ of each point's ratios, (N,); above 0.7 its term cannot be trusted.
        corrected: whether the ratios hold p(y, w)/q(w), for draws that come from an approximation.
        samples: how many draws it was made from, all chains together; 0 where that is not known.

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
        for name, value in own.items():  # past pandas, which would take a new attribute for a new entry
            object.__setattr__(self, name, value)

    def __repr__(self) -> str:
        bad = int((self.khat > 0.7).sum())
        found = f"elpd={self.elpd:.2f} ± {self.se:.2f}, p_loo={self.p_loo:.2f}"
        return f"LOO({found}, {len(self.pointwise)} points, {bad} with k̂ > 0.7)"

    __str__ = __repr__


def loo(
    model: Any,
    posterior: Any,
    *args: Any,
    samples: int = 1000,
    approximate: bool = True,
    seed: int | None = None,
    site: str | None = None,
    **kwargs: Any,
) -> LOO:
    """Estimate how well new points would be predicted, from the training points: leave-one-out cross-validation.

    ``az.loo(to_arviz(...))`` takes the draws for those of the posterior itself; so does ``approximate=False``, which
    gives the same numbers. The default corrects for the guide's being an approximation, and says by k̂ where it is too
    poor for that. ``az.compare`` takes a dict of results.

    Args:
        model: a network of this package, or any Pyro model, whose observed site says what a point is.
        posterior: a guide with a density, or, without the correction, any posterior that ``to_arviz`` takes but a
            fleet. A sampled posterior needs no correction and gets none.
        args: the model's own arguments, (x, y) of a network: all data that the guide was fitted to.
        samples: draws of each chain, at least 25.
        approximate: whether to correct for draws that come from q.
        seed: makes the draws repeat, and leaves torch's random state as it was.
        site: which observed site's points are left out, where the model has several.
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
        draws = joint_draws(call, posterior, samples, seed)
        base = torch.zeros_like(draws.log_joint).flatten()
    each = _points(draws, site)
    # Of several chains ArviZ makes the tail longer, by how little their draws are worth.
    worth = efficiency_of({name: value.detach().cpu().numpy() for name, value in draws.weights.items()})
    weights, khat = (torch.from_numpy(part) for part in pareto_smooth((base - each).cpu().numpy(), worth))
    whole = torch.from_numpy(pareto_smooth(base.cpu().numpy(), worth)[0])
    each = each.cpu()
    pointwise = torch.logsumexp(weights + each, -1)
    fitted = torch.logsumexp(whole + each, -1)
    bad = int((khat > 0.7).sum())
    if bad:
        warnings.warn(
            f"k̂ is above 0.7 at {bad} of {len(khat)} points: their terms, and so elpd, cannot be trusted. The"
            " posterior is too far from the true one, or a point weighs too much; hold data back instead.",
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


def _points(draws: JointDraws, site: str | None) -> Tensor:
    """Return the log-likelihoods of one site's points, (N, S)."""
    found = draws.log_likelihood
    if site is None and len(found) > 1:
        raise PyroDropoutError(
            f"the model observes several sites, {', '.join(found)}: write loo(..., site={next(iter(found))!r}) to say"
            " which one's points are left out."
        )
    if site is not None and site not in found:
        raise PyroDropoutError(f"site must be one that the model observes, {', '.join(found)}; got {site!r}.")
    each = found[next(iter(found)) if site is None else site]
    return each.flatten(0, 1).reshape(each.shape[0] * each.shape[1], -1).mT
