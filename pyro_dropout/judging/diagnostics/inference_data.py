"""Diagnose a posterior: its draws for ArviZ, and how well q(w) covers p(w | y).

The importance ratios p(y, w)/q(w) of draws from q are all equal if q is the posterior. If they have a long tail,
measured by k̂, the shape of the Pareto distribution fitted to it, q misses some of the posterior's mass (Yao, Vehtari,
Simpson and Gelman 2018).

Leave-one-out uses such ratios too: a draw from q represents one from p(w | y without y_i) with the weight
r_i(w) = p(y, w)/q(w) · 1/p(y_i | w). The first factor corrects from the approximation to the posterior (Magnusson,
Andersen, Jonasson and Vehtari 2019), the second removes the point; both are smoothed together, and k̂ says for each
point whether that worked.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from pyro_dropout.errors import PyroDropoutError, RangeError, SingularError, warn_caller
from pyro_dropout.generative.model_call import ModelCall, call_of, is_network
from pyro_dropout.guides.ensemble import Ensemble
from pyro_dropout.judging.diagnostics.arviz_export import (
    FEWEST,
    Container,
    Variable,
    container,
    efficiency_of,
    loo_results,
    pareto_smooth,
)
from pyro_dropout.mathematics.checks import also, check_count
from pyro_dropout.prediction.joint_draws import SAMPLED, JointDraws, joint_draws
from pyro_dropout.protocols import PyroModel
from pyro_dropout.training.fleet.fleet import Fleet

Args = tuple[object, ...]
Kwargs = dict[str, object]

_DRAWS = ("chain", "draw")


@also(num_samples="samples")
def to_arviz(
    model: PyroModel,
    posterior: object,
    *args: object,
    samples: int = 1000,
    seed: int | None = None,
    **kwargs: object,
) -> Container:
    """Export a posterior to ArviZ: draws of the latent sites and of the data, log-likelihoods, log p and log q.

    Every draw is one function, with the same weights for all points. ``az.loo``, ``az.summary`` and ArviZ's plots work
    on the result; ``loo`` in this package also corrects for draws that come from q and not from the posterior.

    Args:
        model: a network of this package, or any Pyro model, whose observed sites define the likelihood.
        posterior: a guide of this package or of Pyro (one chain); an ``Ensemble`` (a chain for each member, which share
            ``samples`` draws equally, so that R-hat says how far members disagree; a member that is a point has one
            draw, and R-hat is undefined); or a sampled posterior, with ``weights`` of shape (chains, draws, ...), which
            keeps its chains.
        args: the model's own arguments, data included: (x, y) of a network.
        samples: draws per chain; a sampled posterior with more draws is thinned evenly.
        seed: makes the draws reproducible, and leaves torch's random state unchanged.
        kwargs: the model's own keyword arguments.

    Returns:
        ``arviz.InferenceData`` on ArviZ 0.2x, ``xarray.DataTree`` on 1.x, with the groups ``posterior``, one variable
        for each latent site and each ``pyro.deterministic`` site; ``posterior_predictive``, ``observed_data`` and
        ``log_likelihood``, one for each observed site, with the names of its plates as dimensions (of a network "y",
        with point and, for several outputs, output); ``sample_stats``, ``lp`` = log p(y, w) and ``log_q``. A masked
        point has log-likelihood zero; scales affect ``lp`` only. If q has no density, ``log_q`` is omitted and the
        attribute ``log_q`` of ``sample_stats`` says why.

    Example:
        >>> import torch, pyro_dropout as pdrop
        >>> model = pdrop.BayesianNet(torch.nn.Linear(2, 1))
        >>> guide, x, y = pdrop.AutoMeanField(model), torch.ones(5, 2), torch.zeros(5, 1)
        >>> data = pdrop.to_arviz(model, guide, x, y, samples=50, seed=0)
        >>> data["log_likelihood"]["y"].dims, data["posterior"]["weight"].shape
        (('chain', 'draw', 'point'), (1, 50, 1, 2))
        >>> sorted(data["sample_stats"].data_vars)
        ['log_q', 'lp']
    """
    call, samples = asked(to_arviz, model, posterior, args, kwargs, samples)
    draws = joint_draws(call, posterior, samples, seed, replicate=True, by_member=True)
    values = draws.weights | draws.deterministic
    own = {name: [f"{name}_dim_{k}" for k in range(value.dim() - 2)] for name, value in values.items()}
    groups: dict[str, dict[str, Variable]] = {
        "posterior": _variables(values, own),
        "posterior_predictive": _variables(draws.replicated, draws.dims),
        "log_likelihood": _variables(draws.log_likelihood, draws.dims),
        "sample_stats": {"lp": (_DRAWS, draws.log_joint.cpu().numpy())},
        "observed_data": _variables(draws.observed, draws.dims, lead=()),
    }
    notes = {group: {"inference_library": "pyro_dropout"} for group in groups}
    notes["posterior"]["posterior"] = type(posterior).__name__
    if draws.log_q is None:
        notes["sample_stats"]["log_q"] = f"left out: {draws.why}"
    else:
        groups["sample_stats"]["log_q"] = (_DRAWS, draws.log_q.cpu().numpy())
    return container(groups, notes)


def asked(
    door: Callable[..., object], model: Any, posterior: object, args: Args, kwargs: Kwargs, samples: int
) -> tuple[ModelCall, int]:
    """Return the model call of a diagnostic, and the number of draws; after (x, y) of a network it needs no name."""
    if isinstance(posterior, Fleet):
        raise PyroDropoutError("a fleet has one result per replica: pass *fleet[i] as model and posterior.")
    last = args[-1] if len(args) == 3 else None
    if is_network(model) and isinstance(last, int):
        args, samples = args[:-1], last
    return call_of(door, model, args, kwargs), samples


def _variables(
    values: Mapping[str, Tensor], dims: Mapping[str, Sequence[str]], lead: Sequence[str] = _DRAWS
) -> dict[str, Variable]:
    """Return the values of sites with the names of their dimensions; ArviZ would read a slash in a name as a group."""
    found: dict[str, Variable] = {}
    for site, value in values.items():
        names = [name.replace("/", ".") for name in (*lead, *dims[site])]
        found[site.replace("/", ".")] = (names[: value.dim()], value.detach().cpu().numpy())
    return found


@also(num_samples="samples")
def khat(
    model: PyroModel,
    posterior: object,
    *args: object,
    samples: int = 1000,
    seed: int | None = None,
    **kwargs: object,
) -> float:
    """Return the Pareto k̂ of p(y, w)/q(w), which says how well a guide approximates the posterior where it draws.

    Below 0.5 the guide is close there, and below 0.7 importance sampling can correct it; above, it cannot, and the
    guide's predictions should be checked in another way. -inf means that all ratios are equal: q is proportional to the
    posterior at the draws. A mode that q misses does not raise k̂.

    Args:
        model: a network of this package, or any Pyro model.
        posterior: a guide with a density: scale > 0, and no point-mass site.
        args: the model's own arguments, (x, y) of a network: all data that the guide was fitted to.
        samples: draws from the guide, at least 25.
        seed: makes the draws reproducible, and leaves torch's random state unchanged.
        kwargs: the model's own keyword arguments.

    Example:
        >>> import torch, pyro_dropout as pdrop
        >>> model = pdrop.BayesianNet(torch.nn.Linear(1, 1, bias=False), likelihood=pdrop.Gaussian(tau=1.0))
        >>> x = torch.ones(3, 1)  # the posterior of the one weight is N(mean of y · 3/4, 1/4)
        >>> wide = pdrop.AutoMeanField(model, init=lambda name, shape: torch.zeros(shape), init_scale=1.0)
        >>> narrow = pdrop.AutoMeanField(model, init=lambda name, shape: torch.zeros(shape), init_scale=0.1)
        >>> [pdrop.khat(model, guide, x, 0 * x, seed=0) < 0.7 for guide in (wide, narrow)]
        [True, False]
    """
    call, samples = asked(khat, model, posterior, args, kwargs, samples)
    check_count("samples", samples, FEWEST)  # to fit a tail to a fifth of them
    draws, log_q = with_density(call, posterior, samples, seed)
    return float(pareto_smooth((draws.log_joint - log_q)[0].cpu().numpy())[1])


def with_density(call: ModelCall, posterior: object, samples: int, seed: int | None) -> tuple[JointDraws, Tensor]:
    """Return draws of one guide with log q of each; raise if there is none."""
    draws = joint_draws(call, posterior, samples, seed)
    if draws.log_q is not None:
        return draws, draws.log_q
    if draws.why == SAMPLED:
        raise PyroDropoutError(f"posterior must be a guide here: {draws.why} Exact draws need no such check.")
    raise SingularError(
        f"log q(w) and p(y, w)/q(w) do not exist: {draws.why} Use a guide, or members, with a density, such as"
        ' AutoMeanField or AutoDropout(model, scale=0.1, bias="gaussian"), or compare predictive scores.'
    )


class LOOResult(loo_results()):  # type: ignore[misc]
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
        >>> import torch, pyro_dropout as pdrop
        >>> pdrop.judging.LOOResult(-12.0, 1.5, 2.1, torch.full((3,), -4.0), torch.tensor([0.1, 0.9, 0.2]), True)
        LOOResult(elpd=-12.00 ± 1.50, p_loo=2.10, 3 points, 1 with k̂ > 0.7)
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
        return f"LOOResult({found}, {len(self.pointwise)} points, {bad} with k̂ > 0.7)"

    __str__ = __repr__


@also(num_samples="samples")
def loo(
    model: PyroModel,
    posterior: object,
    *args: object,
    samples: int = 1000,
    approximate: bool = True,
    seed: int | None = None,
    site: str | None = None,
    **kwargs: object,
) -> LOOResult:
    """Estimate how well new points would be predicted, from the training points: leave-one-out cross-validation.

    ``az.loo(to_arviz(...))`` treats the draws as exact posterior draws; so does ``approximate=False``, which gives the
    same numbers. The default corrects for the guide's approximation error; k̂ says where the guide is too poor for
    that. ``az.compare`` takes a dict of results. ArviZ's own ``loo_approximate_posterior`` has the same elpd, but a
    p_loo of uncorrected draws.

    A point that ``poutine.scale`` counts c times is left out with all of its weight, p(y_i | w)ᶜ. Masked points are not
    among the terms.

    Args:
        model: a network of this package, or any Pyro model, whose observed site defines the points.
        posterior: a guide with a density, or, without the correction, any posterior that ``to_arviz`` takes. A sampled
            posterior needs no correction and gets none.
        args: the model's own arguments, (x, y) of a network: all data that the guide was fitted to.
        samples: draws per chain, at least 25.
        approximate: whether to correct for draws that come from q.
        seed: makes the draws reproducible, and leaves torch's random state unchanged.
        site: the observed site whose points are left out, if the model has several.
        kwargs: the model's own keyword arguments.

    Example:
        >>> import torch, pyro_dropout as pdrop
        >>> x = torch.linspace(-1, 1, 20).unsqueeze(-1)
        >>> model = pdrop.BayesianNet(torch.nn.Linear(1, 1, bias=False), likelihood=pdrop.Gaussian(tau=1.0))
        >>> guide = pdrop.AutoMeanField(model, init=lambda name, shape: torch.zeros(shape), init_scale=0.4)
        >>> found = pdrop.loo(model, guide, x, 0 * x, seed=0)
        >>> found.khat.shape, bool((found.khat < 0.7).all()), found.elpd < 0
        (torch.Size([20]), True, True)
    """
    call, samples = asked(loo, model, posterior, args, kwargs, samples)
    check_count("samples", samples, FEWEST)
    sampled = isinstance(getattr(posterior, "weights", None), dict)
    corrected = approximate and not sampled
    if corrected:
        draws, log_q = with_density(call, posterior, samples, seed)
        base = (draws.log_joint - log_q).flatten()
    else:
        if isinstance(posterior, Ensemble) and posterior.points and posterior.members < FEWEST:
            raise RangeError(
                f"an ensemble of points must have {FEWEST} members, to fit a tail; got {posterior.members}."
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
        warn_caller(
            f"k̂ is above 0.7 at {bad} of {len(khat)} points, so elpd cannot be trusted: hold data back instead.",
        )
    return LOOResult(
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
    name = next(iter(found)) if site is None and len(found) == 1 else site
    if name is None or name not in found:
        raise PyroDropoutError(f"site must be one that the model observes, {', '.join(found)}; got {site!r}.")
    each = found[name].flatten(0, 1)
    each = each.reshape(len(each), -1).mT
    if name not in draws.counts:
        return each, torch.ones_like(each[:, :1])
    counts = draws.counts[name].reshape(-1, 1)
    shown = counts.flatten() > 0
    if not bool(shown.any()):
        raise PyroDropoutError(f"all points of site {name!r} are masked, so there is none to leave out.")
    return each[shown], counts[shown]
