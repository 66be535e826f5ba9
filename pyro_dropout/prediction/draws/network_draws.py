"""Draws of a network's weights with their log-likelihood: all draws in one forward pass, if the network allows it."""

import torch
from torch import Tensor

from pyro_dropout.generative.inputs import AnyInputs
from pyro_dropout.generative.model_call import ModelCall
from pyro_dropout.generative.observed_sites import sample_sites, trace_at
from pyro_dropout.mathematics.errors import PyroDropoutError
from pyro_dropout.prediction.draws.traced_draws import Weighed
from pyro_dropout.prediction.draws.weight_draws import checked_outputs
from pyro_dropout.protocols import Distribution, Model, Weights

F64 = torch.float64
_BLOCK = 2**22  # outputs of the model that are held in one forward pass


def weigh_network(call: ModelCall, weights: Weights, replicate: bool) -> Weighed:
    """Run a network with (x, y) at S draws of its weights; ``replicate`` asks for targets drawn from each as well."""
    x, y = call.args
    likelihood = call.model.likelihood
    f, log_prior = _weighed(call, weights)
    target = likelihood.checked(f[0], y)
    each = torch.cat([likelihood.distribution(part).log_prob(target).to(F64) for part in f.split(_most(x, f))])
    drawn = {"y": likelihood.distribution(f).sample()} if replicate else {}
    observed = {"y": target}
    if likelihood.distribution(f[0]).event_shape == (1,):  # ArviZ's plots expect no dimension for a single output
        observed, drawn = ({name: value.squeeze(-1) for name, value in part.items()} for part in (observed, drawn))
    names = (
        ("point", "output") if observed["y"].dim() <= 2 else ("point", *(f"y_dim_{k}" for k in range(1, target.dim())))
    )
    dims = {"y": names[: observed["y"].dim()]}
    return Weighed({"y": each}, each.sum(-1), log_prior, observed, dims, drawn, {}, {})


def _most(x: AnyInputs, f: Tensor) -> int:
    return max(1, _BLOCK // max(1, len(x) * f.shape[-1]))


def _weighed(call: ModelCall, weights: Weights) -> tuple[Tensor, Tensor]:
    """Return f, (S, N, outputs), and log p(w), (S,), of all draws."""
    model, x = call.model, call.args[0]
    count = len(next(iter(weights.values())))
    priors, f, first = _visit(call, weights, 0)
    if isinstance(model, Model) and set(weights) == set(model.sites) == set(priors):
        logs = [priors[name].log_prob(weights[name]).to(F64) for name in weights]
        _, _, last = _visit(call, weights, count - 1)
        # A prior that depends on another site would be the first draw's, and so wrong for the last.
        if all(log.shape == (count,) for log in logs) and _same(torch.stack(logs)[:, -1], last):
            size = _most(x, f)
            blocks = range(0, count, size)
            outputs = [model.evaluate({k: w[b : b + size] for k, w in weights.items()}, x) for b in blocks]
            return torch.cat([out.reshape(-1, *f.shape) for out in outputs]), torch.stack(logs).sum(0)
    rest = [_visit(call, weights, t)[1:] for t in range(1, count)]
    return torch.stack([f, *(out for out, _ in rest)]), torch.stack([first, *(log for _, log in rest)])


def _same(parts: Tensor, whole: Tensor) -> bool:
    """Whether numbers sum to another one, up to float32 rounding."""
    return bool((parts.sum() - whole).abs() <= 1e-5 * parts.abs().sum() + 1e-6)


def _visit(call: ModelCall, weights: Weights, t: int) -> tuple[dict[str, Distribution], Tensor, Tensor]:
    """Run the model with one draw; return the priors it gave each site, f, and log p(w)."""
    x, y = call.args
    own = {name: value[t] for name, value in weights.items()}
    trace = trace_at(call, own)
    f = checked_outputs(trace.nodes["_RETURN"]["value"], len(x))
    if t == 0:
        call.model.likelihood.check_values(f, y)
    priors = {name: site["fn"] for name, site in sample_sites(trace).items() if name in own}
    if not priors:
        raise PyroDropoutError(f"the model samples none of the posterior's sites, {', '.join(own)}.")
    logs = [prior.log_prob(own[name]).to(F64).sum() for name, prior in priors.items()]
    return priors, f, torch.stack(logs).sum()
