"""Whether to believe a posterior: its draws for ArviZ, and how well q(w) covers p(w | y).

The importance ratios p(y, w)/q(w) of draws from q are all the same where q is the posterior. A long tail in them, read
off by k̂, the shape of the Pareto distribution that fits it, says that q misses some of the posterior's mass (Yao,
Vehtari, Simpson and Gelman 2018).
"""

from typing import Any

from torch import Tensor

from pyro_dropout.answers.arviz_export import FEWEST, Variable, container, pareto_smooth
from pyro_dropout.answers.joint_draws import SAMPLED, JointDraws, joint_draws
from pyro_dropout.inference.fleet import Fleet
from pyro_dropout.mathematics.errors import PyroDropoutError, RangeError, SingularError

_DRAWS = ("chain", "draw")


def to_arviz(model: Any, posterior: Any, x: Tensor, y: Tensor, samples: int = 1000, *, seed: int | None = None) -> Any:
    """Hand a posterior to ArviZ: draws of the weights and of y, log-likelihoods, log p and log q.

    Every draw is a whole function, with one set of weights for all points. ``az.loo``, ``az.summary`` and ArviZ's plots
    work on the result, and ``loo`` here adds the correction for draws that come from q and not from the posterior.

    Args:
        model: ``model(x, y)`` with a ``likelihood``; may be None for a fleet.
        posterior: a guide of this package or of Pyro (one chain); a ``Fleet`` (a chain for each replica); or a sampled
            posterior, with ``weights`` of shape (chains, draws, ...), which keeps its chains.
        x: inputs, (N, ...).
        y: targets, (N, D) or class indices (N,).
        samples: draws of each chain; a sampler that has more of them is thinned evenly.
        seed: makes the draws repeat, and leaves torch's random state as it was.

    Returns:
        ``arviz.InferenceData`` on ArviZ 0.2x, ``xarray.DataTree`` on 1.x, with the groups ``posterior``, one variable
        for each site; ``posterior_predictive`` and ``observed_data``, "y" with dimensions point and, for several
        outputs, output; ``log_likelihood``, "y" for each point; ``sample_stats``, ``lp`` = log p(y, w) and ``log_q``.
        Where q has no density, ``log_q`` is left out and the attribute ``log_q`` of ``sample_stats`` says why.

    Example:
        >>> import torch, pyro_dropout as pd
        >>> model = pd.BayesianNet(torch.nn.Linear(2, 1))
        >>> data = pd.to_arviz(model, pd.AutoMeanField(model), torch.ones(5, 2), torch.zeros(5, 1), samples=50, seed=0)
        >>> data["log_likelihood"]["y"].dims, data["posterior"]["weight"].shape
        (('chain', 'draw', 'point'), (1, 50, 1, 2))
        >>> sorted(data["sample_stats"].data_vars)
        ['log_q', 'lp']
    """
    draws = joint_draws(model, posterior, x, y, samples, seed)
    groups: dict[str, dict[str, Variable]] = {
        "posterior": _sites(draws),
        "posterior_predictive": {"y": _targets(draws.predictive(seed), _DRAWS)},
        "log_likelihood": {"y": ((*_DRAWS, "point"), draws.log_likelihood.cpu().numpy())},
        "sample_stats": {"lp": (_DRAWS, draws.log_joint.cpu().numpy())},
        "observed_data": {"y": _targets(draws.y, ())},
    }
    notes = {group: {"inference_library": "pyro_dropout"} for group in groups}
    notes["posterior"]["posterior"] = type(posterior).__name__
    if draws.log_q is None:
        notes["sample_stats"]["log_q"] = f"left out: {draws.why}"
    else:
        groups["sample_stats"]["log_q"] = (_DRAWS, draws.log_q.cpu().numpy())
    return container(groups, notes)


def _sites(draws: JointDraws) -> dict[str, Variable]:
    """Return the weights as ArviZ names things; a slash would mean a group to it."""
    found: dict[str, Variable] = {}
    for site, value in draws.weights.items():
        name = site.replace("/", ".")
        own = [f"{name}_dim_{k}" for k in range(value.dim() - 2)]
        found[name] = ((*_DRAWS, *own), value.detach().cpu().numpy())
    return found


def _targets(y: Tensor, lead: tuple[str, ...]) -> Variable:
    """Return targets with a dimension for outputs only where there are several, as ArviZ's plots want them."""
    y = y.detach().cpu()
    if y.dim() == len(lead) + 2 and y.shape[-1] == 1:
        y = y.squeeze(-1)
    return ((*lead, "point", "output")[: y.dim()], y.numpy())


def khat(model: Any, posterior: Any, x: Tensor, y: Tensor, samples: int = 1000, *, seed: int | None = None) -> float:
    """Say how far a guide can be trusted as an approximation of the posterior: the Pareto k̂ of p(y, w)/q(w).

    Below 0.5 the guide is close, and below 0.7 importance sampling can mend what it misses; above, it cannot, and the
    guide's answers should be checked in another way. -inf means that all ratios are equal: q is the posterior.

    Args:
        model: ``model(x, y)`` with a ``likelihood``.
        posterior: a guide that has a density: scale > 0, and no site a point.
        x: inputs, (N, ...): all data that the guide was fitted to.
        y: targets.
        samples: draws from the guide, at least 25.
        seed: makes the draws repeat, and leaves torch's random state as it was.

    Example:
        >>> import torch, pyro_dropout as pd
        >>> model = pd.BayesianNet(torch.nn.Linear(1, 1, bias=False), likelihood=pd.Gaussian(tau=1.0))
        >>> x = torch.ones(3, 1)  # the posterior of the one weight is N(mean of y · 3/4, 1/4)
        >>> wide = pd.AutoMeanField(model, init=lambda name, shape: torch.zeros(shape), init_scale=1.0)
        >>> narrow = pd.AutoMeanField(model, init=lambda name, shape: torch.zeros(shape), init_scale=0.1)
        >>> [pd.khat(model, guide, x, 0 * x, seed=0) < 0.7 for guide in (wide, narrow)]
        [True, False]
    """
    draws, log_q = with_density(model, posterior, x, y, samples, seed)
    return float(pareto_smooth((draws.log_joint - log_q)[0].cpu().numpy())[1])


def with_density(
    model: Any, posterior: Any, x: Tensor, y: Tensor, samples: int, seed: int | None
) -> tuple[JointDraws, Tensor]:
    """Return draws of one guide with log q of each, or say why there can be none."""
    check_one(posterior, samples)
    draws = joint_draws(model, posterior, x, y, samples, seed)
    if draws.log_q is not None:
        return draws, draws.log_q
    if draws.why == SAMPLED:
        raise PyroDropoutError(
            f"posterior must be a guide here: {draws.why} Importance ratios p(y, w)/q(w) need one, and these draws need"
            " none."
        )
    raise SingularError(
        f"log q(w) does not exist, and so neither does p(y, w)/q(w): {draws.why} Use a guide with scale > 0 and"
        ' bias="gaussian", such as AutoDropout(model, keep=..., scale=0.1, bias="gaussian"), or compare predictive'
        " scores, which need no density."
    )


def check_one(posterior: Any, samples: int) -> None:
    """Raise unless there is one posterior, and draws enough to fit a tail."""
    if isinstance(posterior, Fleet):
        raise PyroDropoutError(
            "a fleet has one answer for each replica: call this with *fleet[i] in the places of model and posterior."
        )
    if isinstance(samples, int) and samples < FEWEST:
        raise RangeError(f"samples must be at least {FEWEST}, to fit a tail to a fifth of them; got {samples!r}.")
