"""Draw weights and data from a model: the first step of simulation-based calibration."""

from dataclasses import dataclass, replace

from pyro import poutine
from pyro.distributions import Unit
from torch import Tensor

from pyro_dropout.engines.torch_internals import tree_map
from pyro_dropout.errors import PyroDropoutError
from pyro_dropout.generative.model_call import ModelCall, name_of
from pyro_dropout.generative.observed_sites import observed_sites, sample_sites, trace_of, value_of
from pyro_dropout.prediction.weight_draws import checked_outputs
from pyro_dropout.protocols import Message, Weights


@dataclass(frozen=True)
class Simulated:
    """One simulated data set."""

    weights: Weights  # the latent sites that generated it, {site: (1, ...)}
    outputs: Tensor | None  # f of a network, (1, N, outputs); None for any other model
    call: ModelCall  # the model with its arguments, including the simulated data, as passed to the fit


def simulate_network(call: ModelCall) -> Simulated:
    """Draw w* from the prior of a network and y from its likelihood, at x."""
    (x,) = call.args
    trace = trace_of(call)
    f = checked_outputs(trace.nodes["_RETURN"]["value"], len(x))
    latent = {name: site["value"].unsqueeze(0) for name, site in trace.iter_stochastic_nodes() if name != "y"}
    # The model's own y may be in internal units; f and the likelihood are in the units of the data.
    y = call.model.likelihood.distribution(f).sample()
    return Simulated(latent, f.unsqueeze(0), replace(call, args=(x, y)))


def simulate_sites(call: ModelCall) -> Simulated:
    """Draw all sites of any Pyro model, and pass the drawn data sites as its data."""
    data = observed_sites(trace_of(call))
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
    return Simulated(latent, None, _replaced(call, drawn, data))


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


def site_values(weights: Weights, outputs: object = None) -> dict[str, Tensor]:
    """Return the first, the middle and the last number of every site, {name: (n,)}."""
    found: dict[str, Tensor] = {}
    for name, value in weights.items():
        flat = value.reshape(len(value), -1)
        size = flat.shape[1]
        for k in sorted({0, size // 2, size - 1}):
            found[name if size == 1 else f"{name}[{k}]"] = flat[:, k]
    return found
