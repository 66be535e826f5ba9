"""Simulation-based calibration: does inference recover the parameters that generated the data?

Weights w* are drawn from the prior and y from the model; a posterior is fitted to y, and w* is ranked among its draws.
With the exact posterior every rank is equally likely (Talts, Betancourt, Simpson, Vehtari and Gelman 2018). Too many
ranks at the ends mean a posterior that is too narrow, too many in the middle one that is too wide.

The band of the plot is that of Säilynoja, Bürkner and Vehtari (2021). With R ranks among S draws, the number of ranks
below j is binomial at every j. The band takes from each binomial the middle 1 - γ, with γ such that ranks that are
uniform leave the band at some j with the requested probability. Here γ is found by simulating uniform ranks.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from pyro import poutine
from pyro.distributions import Unit
from torch import Tensor
from tqdm.auto import tqdm

from pyro_dropout.engines.torch_internals import tree_map
from pyro_dropout.errors import PyroDropoutError, RangeError, ShapeError
from pyro_dropout.generative.inputs import check_inputs, takes_all
from pyro_dropout.generative.model_call import ModelCall, call_of, is_network, name_of
from pyro_dropout.generative.observed_sites import check_whole, observed_sites, sample_sites, trace_of, value_of
from pyro_dropout.generative.process_state import forked, one_at_a_time, seed_generators
from pyro_dropout.generative.trial_run import evaluating
from pyro_dropout.guides.ensemble import Ensemble
from pyro_dropout.mathematics.checks import also, check_count, check_level, check_seed
from pyro_dropout.prediction.plot_style import PALETTE, axes_or_new, percent
from pyro_dropout.prediction.weight_draws import WholeFunctions, checked_outputs, latent_draws
from pyro_dropout.protocols import Axes, Message, Posterior, PyroModel, Weights
from pyro_dropout.training.fit import place_of

_SIMULATIONS = 20_000
_BLOCK = 2**22  # counts held in memory at once

Counts = NDArray[np.int64]


def cumulative_counts(ranks: Counts, draws: int) -> Counts:
    """Return how many ranks are at most j, for j = 0 ... draws - 1; all of them are at most ``draws``."""
    found: Counts = np.cumsum(np.bincount(ranks, minlength=draws + 1))[:-1]
    return found


@functools.lru_cache(maxsize=8)
def band(replications: int, draws: int, prob: float) -> tuple[Counts, Counts]:
    """Return the smallest and largest cumulative counts, each (draws,), of the band that holds with ``prob``."""
    from scipy.stats import binom

    below = binom(replications, (np.arange(1, draws + 1) / (draws + 1))[:, None])
    count = np.arange(replications + 1)
    levels = 2 * np.minimum(below.cdf(count), below.sf(count - 1))  # two-sided tails, (draws, replications + 1)
    rng, uniform = np.random.default_rng(2021), np.full(draws + 1, 1 / (draws + 1))
    found = []  # the smallest tail over all j of each set of uniform ranks
    most = max(1, _BLOCK // (draws + 1))
    for start in range(0, _SIMULATIONS, most):
        sets = rng.multinomial(replications, uniform, size=min(_SIMULATIONS - start, most))
        found.append(levels[np.arange(draws), np.cumsum(sets, axis=-1)[:, :-1]].min(-1))
    null = np.sort(np.concatenate(found))
    gamma = null[min(int((1 - prob) * (len(null) + 1)), len(null) - 1)]
    inside = levels >= gamma * (1 - 1e-9)
    return inside.argmax(-1), replications - inside[:, ::-1].argmax(-1)


Quantities = Callable[[Weights, Any], dict[str, Tensor]]

_POINTS = 3  # at which function values are ranked by default


@dataclass(frozen=True)
class SBCResult:
    """Ranks of true quantities among posterior draws, over many simulated data sets; returned by ``sbc``.

    Attributes:
        ranks: {quantity: (replications,)}, each from 0 to ``samples``.
        samples: the number of draws that each true value is ranked among.

    Example:
        >>> import torch, pyro_dropout as pdrop
        >>> found = pdrop.judging.SBCResult({"even": torch.arange(100), "low": torch.arange(100) // 2}, samples=99)
        >>> found.inside_band(0.99)
        {'even': True, 'low': False}
    """

    ranks: dict[str, Tensor]
    samples: int

    def __repr__(self) -> str:
        count = len(next(iter(self.ranks.values())))
        quantities = f"{len(self.ranks)} quantities: {', '.join(self.ranks)}"
        return f"SBCResult({count} replications, {self.samples} draws, {quantities})"

    def inside_band(self, prob: float = 0.99) -> dict[str, bool]:
        """Return for each quantity whether its ranks stay inside the band that uniform ranks leave with 1 - ``prob``.

        The band holds for all ranks of one quantity together, not for all quantities together.
        """
        check_level("prob", prob)
        found = {}
        for name, ranks in self.ranks.items():
            low, high = band(len(ranks), self.samples, prob)
            counts = cumulative_counts(ranks.cpu().numpy(), self.samples)
            found[name] = bool(((counts >= low) & (counts <= high)).all())
        return found

    def plot(self, ax: Axes = None, prob: float = 0.99) -> Axes:
        """Plot the ECDF of the ranks minus the uniform one, with the band; return matplotlib's axes."""
        check_level("prob", prob)
        ax = axes_or_new(ax, 6, 3.4)
        count = len(next(iter(self.ranks.values())))
        line = np.arange(1, self.samples + 1) / (self.samples + 1)
        whole = np.concatenate([[0], line, [1]])
        low, high = (np.concatenate([[0], edge / count - line, [0]]) for edge in band(count, self.samples, prob))
        ax.fill_between(
            whole, low, high, step="mid", color="#BBBBBB", alpha=0.5, label=f"{percent(prob)} band", linewidth=0
        )
        for k, (name, ranks) in enumerate(self.ranks.items()):
            counts = cumulative_counts(ranks.cpu().numpy(), self.samples)
            difference = np.concatenate([[0], counts / count - line, [0]])
            style = ("-", "--", ":")[k // len(PALETTE) % 3]
            ax.step(whole, difference, where="mid", color=PALETTE[k % len(PALETTE)], linestyle=style, label=name)
        ax.axhline(0, color="black", linewidth=0.6)
        ax.set(xlabel="rank of the truth, as a fraction of the draws", ylabel="ECDF - uniform", xlim=(0, 1))
        ax.set_title(f"{count} simulated data sets, {self.samples} posterior draws each", fontsize="medium")
        ax.legend(frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
        return ax


@also(num_samples="samples")
@one_at_a_time
def sbc(
    model: PyroModel,
    fit: Callable[..., object],
    *args: object,
    replications: int = 100,
    samples: int = 99,
    quantities: Quantities | None = None,
    seed: int | None = 0,
    progress: bool = True,
    **kwargs: object,
) -> SBCResult:
    """Check an inference by simulation: fit data drawn from the model, and rank the true values among the draws.

    Ties, which dropout produces, are broken at random.

    Args:
        model: a network of this package, or any Pyro model that draws its latent sites from the prior.
        fit: ``fit(model, x, y)`` returns a posterior of the simulated y: a guide, or anything with
            ``sample_weights(n)``. It must start afresh each time. For a model with other arguments it is called with
            those, ``fit(model, *args, **kwargs)``, with the given data replaced by simulated data.
        args: for a network x, the inputs of every simulated data set, (N, ...). For any other Pyro model its own
            arguments, with data of any values, which are replaced by simulated ones.
        replications: number of data sets to simulate.
        samples: posterior draws for each; 99 gives 100 possible ranks.
        quantities: what to rank: a function of the weights of n draws, {site: (n, ...)}, and of their outputs f at x,
            (n, N, outputs), that returns {name: (n,)}; f is None for models that are not networks. By default function
            values at three points of x, and every site that is a single number; without function values, three numbers
            of every site.
        seed: of simulations and draws; each replication has its own, so a fit may seed torch. torch's random state is
            left unchanged. None takes new random numbers every time.
        progress: show a progress bar.
        kwargs: the model's own keyword arguments.

    Example:
        >>> import torch, pyro_dropout as pdrop
        >>> model = pdrop.BayesianNet(torch.nn.Linear(1, 1, bias=False))
        >>> def fit(model, x, y):  # the exact posterior: N(Σxy/(1 + Σx²), 1/(1 + Σx²))
        ...     scale = (1 + (x**2).sum()) ** -0.5
        ...     start = ((x * y).sum() * scale**2).reshape(1, 1)
        ...     return pdrop.AutoMeanField(model, init=lambda name, shape: start, init_scale=scale.item())
        >>> found = pdrop.sbc(model, fit, torch.ones(5, 1), replications=50, progress=False)
        >>> found
        SBCResult(50 replications, 99 draws, 4 quantities: f[0], f[2], f[4], weight)
        >>> found.inside_band()["weight"]
        True
    """
    asked = call_of(sbc, model, args, kwargs)
    check_count("replications", replications)
    check_count("samples", samples)
    check_seed(seed)
    network = is_network(model)
    if network:
        if len(args) + len(kwargs) != 1:
            raise ShapeError(f"a network takes only x here, (N, ...); got {len(args) + len(kwargs)} arguments.")
        call = ModelCall(model, (check_inputs(args[0] if args else kwargs.get("x"), whole=takes_all(model)),))
    else:
        call = asked.with_num_data(only_if_needed=True)
    for name, value in {"fit": fit, "quantities": fit if quantities is None else quantities}.items():
        if not callable(value):
            raise PyroDropoutError(f"{name} must be a function; got {type(value).__name__} {value!r}.")
    device = place_of([model], call)
    call = call.to(device)
    rank: Quantities = quantities if quantities is not None else _function_values if network else _site_values
    seeds = np.random.SeedSequence(seed).generate_state(2 * replications)  # None takes the system's entropy
    found: list[dict[str, Tensor]] = []
    with forked():
        for first, second in tqdm(seeds.reshape(-1, 2).tolist(), disable=not progress, unit="data set"):
            seed_generators(first, device)
            with evaluating(model):
                weights, outputs, whole = (_simulate_network if network else _simulate_sites)(call)
            posterior = fit(whole.model, *whole.args, **whole.kwargs)
            seed_generators(second, device)
            drawn, f = _posterior_draws(whole, posterior, samples, network)
            truth = rank({name: value for name, value in weights.items() if name in drawn}, outputs)
            found.append(_ranks(truth, rank(drawn, f), samples))
    return SBCResult({name: torch.stack([row[name] for row in found]) for name in found[0]}, samples)


def _posterior_draws(call: ModelCall, posterior: object, samples: int, network: bool) -> tuple[Weights, Tensor | None]:
    if not callable(posterior) and not isinstance(posterior, Posterior):
        raise PyroDropoutError(
            f"fit must return a posterior, a guide or something with sample_weights(n); got {type(posterior).__name__}."
        )
    if isinstance(posterior, Ensemble) and posterior.points and posterior.members < samples:
        raise RangeError(
            f"an ensemble of {posterior.members} points has as many different draws; ranks among {samples} could not be"
            f" uniform. Give sbc(..., samples={posterior.members})."
        )
    with evaluating(call.model, posterior):
        if not network:
            return latent_draws(posterior, samples, call), None
        functions, x = WholeFunctions(call.model, posterior), call.args[0]
        weights = functions.draw(samples, call)
        return weights, functions.outputs(weights, x, samples)


# The latent sites that generated the data, {site: (1, ...)}; f of a network, (1, N, outputs); the call with the data.
_Simulated = tuple[Weights, Tensor | None, ModelCall]


def _simulate_network(call: ModelCall) -> _Simulated:
    """Draw w* from the prior of a network and y from its likelihood, at x."""
    (x,) = call.args
    trace = trace_of(call)
    f = checked_outputs(trace.nodes["_RETURN"]["value"], len(x))
    latent = {name: site["value"].unsqueeze(0) for name, site in trace.iter_stochastic_nodes() if name != "y"}
    # The model's own y may be in internal units; f and the likelihood are in the units of the data.
    y = call.model.likelihood.distribution(f).sample()
    return latent, f.unsqueeze(0), replace(call, args=(x, y))


def _simulate_sites(call: ModelCall) -> _Simulated:
    """Draw all sites of any Pyro model, and pass the drawn data sites as its data."""
    given = trace_of(call)
    check_whole(given)
    data = observed_sites(given)
    if not data:
        raise PyroDropoutError(
            f"{name_of(call.model)} observes nothing with these arguments: also pass data of the right shape."
        )
    trace = trace_of(replace(call, model=poutine.uncondition(call.model)))
    sites = sample_sites(trace)
    for name, site in sites.items():
        if isinstance(site["fn"], Unit):
            raise PyroDropoutError(
                f"site {name!r} is a pyro.factor; a model with one cannot be simulated by running it."
            )
    drawn = {name: sites[name]["value"] for name in data}
    latent = {
        name: site["value"].unsqueeze(0)
        for name, site in sites.items()
        if name not in drawn and not site["infer"].get("_deterministic")
    }
    return latent, None, _replaced(call, drawn, data)


def _replaced(call: ModelCall, drawn: Weights, data: dict[str, Message]) -> ModelCall:
    """Return the call with the given data replaced by simulated data.

    Data that the model splits or transforms before observing them are not arguments; a handler conditions on those.
    """
    met: set[str] = set()

    def swapped(leaf: object) -> object:
        for name, site in data.items():
            if leaf is site["value"] and isinstance(leaf, Tensor) and leaf.shape == drawn[name].shape:
                met.add(name)
                return drawn[name].to(leaf.dtype)
        return leaf

    args, kwargs = tree_map(swapped, (call.args, call.kwargs))
    rest = {name: drawn[name].expand(value_of(site).shape) for name, site in data.items() if name not in met}
    model = poutine.condition(call.model, data=rest) if rest else call.model
    return ModelCall(model, args, kwargs)


def _site_values(weights: Weights, outputs: object = None) -> dict[str, Tensor]:
    """Return the first, the middle and the last number of every site, {name: (n,)}."""
    found: dict[str, Tensor] = {}
    for name, value in weights.items():
        flat = value.reshape(len(value), -1)
        size = flat.shape[1]
        for k in sorted({0, size // 2, size - 1}):
            found[name if size == 1 else f"{name}[{k}]"] = flat[:, k]
    return found


def _function_values(weights: Weights, f: Tensor) -> dict[str, Tensor]:
    """Return f at the first, the middle and the last point, and every site that is a single number."""
    points, outputs = f.shape[-2:]
    found: dict[str, Tensor] = {}
    for k in sorted({round(step * (points - 1) / (_POINTS - 1)) for step in range(_POINTS)}):
        for d in range(outputs):
            found[f"f[{k}]" if outputs == 1 else f"f[{k}, {d}]"] = f[:, k, d]
    return found | {name: value.reshape(-1) for name, value in weights.items() if value[0].numel() == 1}


def _ranks(truth: dict[str, Tensor], drawn: dict[str, Tensor], samples: int) -> dict[str, Tensor]:
    """Return the rank of each true value among its draws; ties are broken at random."""
    found = {}
    for name, value in truth.items():
        if name not in drawn or drawn[name].shape != (samples,) or value.shape != (1,):
            got = tuple(drawn[name].shape) if name in drawn else "nothing"
            raise ShapeError(f"quantities must give one number for each of {samples} draws; got {got} for {name!r}.")
        below, equal = (int((drawn[name] < value).sum()), int((drawn[name] == value).sum()))
        found[name] = torch.as_tensor(below + int(torch.randint(equal + 1, ())))
    return found
