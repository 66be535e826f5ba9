"""Diagnose a posterior: its draws for ArviZ, and how well q(w) covers p(w | y).

The importance ratios p(y, w)/q(w) of draws from q are all equal if q is the posterior. If they have a long tail,
measured by k̂, the shape of the Pareto distribution fitted to it, q misses some of the posterior's mass (Yao, Vehtari,
Simpson and Gelman 2018).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from torch import Tensor

from pyro_dropout.generative.model_call import ModelCall, call_of, is_network
from pyro_dropout.guides.ensemble import Ensemble
from pyro_dropout.judging.diagnostics.arviz_export import FEWEST, Container, Variable, container, pareto_smooth
from pyro_dropout.mathematics.errors import PyroDropoutError, RangeError, SingularError
from pyro_dropout.prediction.joint_draws import SAMPLED, JointDraws, joint_draws
from pyro_dropout.protocols import PyroModel
from pyro_dropout.training.fleet.fleet import Fleet

_DRAWS = ("chain", "draw")


def to_arviz(
    model: PyroModel | None,
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
        model: a network of this package, or any Pyro model, whose observed sites define the likelihood; may be None for
            a fleet.
        posterior: a guide of this package or of Pyro (one chain); a ``Fleet`` (a chain for each replica); an
            ``Ensemble`` (a chain for each member, which share ``samples`` draws equally, so that R-hat says how far
            members disagree; a member that is a point has one draw, and R-hat is undefined); or a sampled
            posterior, with ``weights`` of shape (chains, draws, ...), which keeps its chains.
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
        >>> import torch, pyro_dropout as pd
        >>> model = pd.BayesianNet(torch.nn.Linear(2, 1))
        >>> data = pd.to_arviz(model, pd.AutoMeanField(model), torch.ones(5, 2), torch.zeros(5, 1), samples=50, seed=0)
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
    door: Callable[..., object],
    model: PyroModel | None,
    posterior: object,
    args: tuple[object, ...],
    kwargs: dict[str, object],
    samples: int,
) -> tuple[ModelCall, int]:
    """Return the model call of a diagnostic, and the number of draws.

    For a network, which takes (x, y), an integer third argument is the number of draws.
    """
    first = posterior[0][0] if isinstance(posterior, Fleet) else model
    last = args[-1] if len(args) == 3 else None
    if is_network(first) and isinstance(last, int):
        args, samples = args[:-1], last
    return replace(call_of(door, first, args, kwargs), model=model), samples


def _variables(
    values: Mapping[str, Tensor], dims: Mapping[str, Sequence[str]], lead: Sequence[str] = _DRAWS
) -> dict[str, Variable]:
    """Return the values of sites with the names of their dimensions; ArviZ would read a slash in a name as a group."""
    found: dict[str, Variable] = {}
    for site, value in values.items():
        names = [name.replace("/", ".") for name in (*lead, *dims[site])]
        found[site.replace("/", ".")] = (names[: value.dim()], value.detach().cpu().numpy())
    return found


def khat(
    model: PyroModel | None,
    posterior: object,
    *args: object,
    samples: int = 1000,
    seed: int | None = None,
    **kwargs: object,
) -> float:
    """Return the Pareto k̂ of p(y, w)/q(w), which says how well a guide approximates the posterior.

    Below 0.5 the guide is close, and below 0.7 importance sampling can correct it; above, it cannot, and the guide's
    predictions should be checked in another way. -inf means that all ratios are equal: q is the posterior.

    Args:
        model: a network of this package, or any Pyro model.
        posterior: a guide with a density: scale > 0, and no point-mass site.
        args: the model's own arguments, (x, y) of a network: all data that the guide was fitted to.
        samples: draws from the guide, at least 25.
        seed: makes the draws reproducible, and leaves torch's random state unchanged.
        kwargs: the model's own keyword arguments.

    Example:
        >>> import torch, pyro_dropout as pd
        >>> model = pd.BayesianNet(torch.nn.Linear(1, 1, bias=False), likelihood=pd.Gaussian(tau=1.0))
        >>> x = torch.ones(3, 1)  # the posterior of the one weight is N(mean of y · 3/4, 1/4)
        >>> wide = pd.AutoMeanField(model, init=lambda name, shape: torch.zeros(shape), init_scale=1.0)
        >>> narrow = pd.AutoMeanField(model, init=lambda name, shape: torch.zeros(shape), init_scale=0.1)
        >>> [pd.khat(model, guide, x, 0 * x, seed=0) < 0.7 for guide in (wide, narrow)]
        [True, False]
    """
    call, samples = asked(khat, model, posterior, args, kwargs, samples)
    check_one(posterior, samples)
    draws, log_q = with_density(call, posterior, samples, seed)
    return float(pareto_smooth((draws.log_joint - log_q)[0].cpu().numpy())[1])


def with_density(call: ModelCall, posterior: object, samples: int, seed: int | None) -> tuple[JointDraws, Tensor]:
    """Return draws of one guide with log q of each; raise if log q does not exist."""
    draws = joint_draws(call, posterior, samples, seed)
    if draws.log_q is not None:
        return draws, draws.log_q
    if draws.why == SAMPLED:
        raise PyroDropoutError(
            f"posterior must be a guide here: {draws.why} Importance ratios p(y, w)/q(w) need"
            " that density; exact draws need no such check."
        )
    if isinstance(posterior, Ensemble):
        raise SingularError(
            f"log q(w) and p(y, w)/q(w) do not exist: {draws.why} Give it members with a density, such as"
            " Ensemble(model, AutoMeanField), or compare predictive scores, which need no density."
        )
    raise SingularError(
        f"log q(w) and p(y, w)/q(w) do not exist: {draws.why} Use a guide with scale > 0 and"
        ' bias="gaussian", such as AutoDropout(model, keep=..., scale=0.1, bias="gaussian"), or compare predictive'
        " scores, which need no density."
    )


def check_one(posterior: object, samples: int) -> None:
    """Raise unless there is one posterior, and enough draws to fit a tail."""
    if isinstance(posterior, Fleet):
        raise PyroDropoutError("a fleet has one result per replica: pass *fleet[i] as model and posterior.")
    if isinstance(samples, int) and samples < FEWEST:
        raise RangeError(f"samples must be at least {FEWEST}, to fit a tail to a fifth of them; got {samples!r}.")
