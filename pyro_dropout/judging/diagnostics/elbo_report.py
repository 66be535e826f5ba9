"""The evidence lower bound as a result, not as a loss: its parts, its error, and whether it exists.

ELBO = E_q[log p(y|w)] - KL(q‖p) bounds log p(y) from below when the KL is exact. The large-K form that training uses
leaves E[H(z|w)] out of the KL, so it gives an objective and not a bound; the gap is reported next to it.
"""

import math
from dataclasses import dataclass

import torch
from pyro import poutine
from torch import Tensor

from pyro_dropout.errors import PyroDropoutError, warn_caller
from pyro_dropout.generative.model_call import ModelCall
from pyro_dropout.generative.process_state import one_at_a_time, seeded
from pyro_dropout.generative.trial_run import evaluating
from pyro_dropout.guides.base import SiteGuide
from pyro_dropout.guides.ensemble import Ensemble
from pyro_dropout.judging.diagnostics.inference_data import asked
from pyro_dropout.mathematics.checks import GONE_IN, also, check_count
from pyro_dropout.mathematics.divergence import Method
from pyro_dropout.prediction.joint_draws import checked_call, joint_draws
from pyro_dropout.protocols import PyroModel
from pyro_dropout.training.fit import place_of
from pyro_dropout.training.loss.elbo import ELBO


@dataclass(frozen=True)
class ElboReport:
    """The evidence lower bound of a guide, in nats over the whole data set; returned by ``elbo_report``.

    Attributes:
        elbo: the bound, with the exact KL; None if it does not exist.
        objective: the training loss with the large-K form, nll + kl_large_k; always exists, up to a constant at σ = 0.
        standard_error: the Monte Carlo error of both.
        nll: E_q[-log p(y|w)].
        kl_large_k: KL(q‖p) by the paper's form; at σ = 0 without its infinite constant.
        kl_exact: KL(q‖p); None if it is infinite.
        kl_gap: kl_exact - kl_large_k = E[H(z|w)]; None if kl_exact is.
        defined: whether the bound exists.
        why: the reason if it does not exist, else empty.

    Example:
        >>> import pyro_dropout as pdrop
        >>> pdrop.judging.ElboReport(-12.0, 12.0, 0.5, 10.0, 2.0, 2.0, 0.0, True, "")
        ElboReport(elbo=-12.00 ± 0.50: nll 10.00, KL 2.00, of which gap 0.00)
    """

    elbo: float | None
    objective: float
    standard_error: float
    nll: float
    kl_large_k: float
    kl_exact: float | None
    kl_gap: float | None
    defined: bool
    why: str

    @property
    def gap(self) -> float | None:
        """The former name of ``kl_gap``."""
        said = f"ElboReport.gap will be removed in version {GONE_IN}; use kl_gap."
        warn_caller(said, DeprecationWarning)
        return self.kl_gap

    def __repr__(self) -> str:
        if self.elbo is None:
            objective = f"{self.objective:.2f} ± {self.standard_error:.2f}"
            return f"ElboReport(undefined: {self.why} Large-K objective {objective})"
        parts = f"nll {self.nll:.2f}, KL {self.kl_exact:.2f}, of which gap {self.kl_gap:.2f}"
        return f"ElboReport(elbo={self.elbo:.2f} ± {self.standard_error:.2f}: {parts})"


@also(num_samples="samples")
@one_at_a_time
def elbo_report(
    model: PyroModel,
    guide: object,
    *args: object,
    samples: int = 100,
    seed: int | None = None,
    **kwargs: object,
) -> ElboReport:
    """Report the evidence lower bound of a guide with its error, split into fit, KL and gap.

    With scale=0 or a point-mass site (``bias="map"``), KL(q‖p) is infinite and there is no bound to compare guides by:
    ``defined`` is False, ``elbo`` is None, and only the objective is given.

    Args:
        model: a network of this package, or any Pyro model.
        guide: a guide of this package or of Pyro, or an ``Ensemble``: the bound is that of the mixture, with the
            model's own prior; where members have no density, the objective is the mean of their objectives.
        args: the model's own arguments, (x, y) of a network: all data.
        samples: draws of the weights for the expected log-likelihood, and for KL terms without a formula.
        seed: makes the draws reproducible, and leaves torch's random state unchanged.
        kwargs: the model's own keyword arguments.

    Example:
        >>> import torch, pyro_dropout as pdrop
        >>> x = torch.linspace(-1, 1, 20).unsqueeze(-1)
        >>> model = pdrop.BayesianNet(torch.nn.Linear(1, 1))
        >>> report = pdrop.judging.elbo_report(model, pdrop.AutoMeanField(model), x, x, seed=0)
        >>> report.defined, report.kl_gap, abs(report.elbo + report.nll + report.kl_exact) < 1e-6
        (True, 0.0, True)
        >>> report = pdrop.judging.elbo_report(model, pdrop.AutoDropout(model), x, x, seed=0)
        >>> report.elbo, report.why
        (None, "the guide has no density at site 'weight': its standard deviation (scale) is 0, ... volume zero.")
    """
    call, samples = asked(elbo_report, model, guide, args, kwargs, samples)
    if not callable(guide):
        raise PyroDropoutError(f"guide must be a guide, because its KL is needed; {type(guide).__name__} is not one.")
    check_count("samples", samples, least=2)
    draws = joint_draws(call, guide, samples, seed)
    surprises = -draws.log_data.flatten()
    if draws.log_q is not None and not isinstance(guide, SiteGuide):
        # Without a formula the KL is that of the draws of the nll, and the error is that of their sum.
        found = [(draws.log_q - draws.log_prior).flatten()] * 2
        squared_error = _squared_error(surprises + found[0])
    else:
        device = place_of([model, guide], call)
        methods: list[Method] = ["large_k"] if draws.why else ["large_k", "exact"]
        with evaluating(model, guide):
            first = int(torch.randint(2**62, ())) if seed is None else seed + 1  # not the seed of the draws above
            seeds = range(first, first + samples)
            whole_call = checked_call(call).to(device)
            if isinstance(guide, Ensemble):  # without a density: a mean over members
                each = []
                for member in range(guide.members):
                    with guide.as_member(member) as one:
                        each.append(_divergences(whole_call, one, ["large_k"], seeds, device)[0])
                found = [torch.stack(each).mean(0)]
            else:
                found = _divergences(whole_call, guide, methods, seeds, device)
        squared_error = _squared_error(surprises) + _squared_error(found[-1])
    large_k, exact = found[0], found[1] if len(found) > 1 else None
    nll, divergence = float(surprises.mean()), float(large_k.mean())
    whole = None if exact is None else float(exact.mean())
    return ElboReport(
        elbo=None if whole is None else -nll - whole,
        objective=nll + divergence,
        standard_error=math.sqrt(squared_error),
        nll=nll,
        kl_large_k=divergence,
        kl_exact=whole,
        kl_gap=None if whole is None else whole - divergence,
        defined=whole is not None,
        why=draws.why,
    )


def _divergences(
    call: ModelCall, guide: PyroModel, methods: list[Method], seeds: range, device: torch.device
) -> list[Tensor]:
    """Return KL(q‖p) by each method: one number if it has a formula, otherwise one for each seed.

    All methods use the same draws, so common terms cancel in their difference.
    """
    losses = [ELBO(kl=method, per_example=False) for method in methods]
    found: list[list[Tensor]] = [[] for _ in methods]
    for seed in seeds:
        for loss, values in zip(losses, found, strict=True):
            with seeded(seed, device), poutine.block(expose_types=["param"]):
                values.append(loss.parts(call.model, guide, *call.args, **call.kwargs)["kl"].double())
        # In float32, the order of summation matters too; that is not a sampling error.
        if len(found[0]) == 2 and all(torch.allclose(a, b, rtol=1e-6, atol=0) for a, b in found):
            break
    formulas = len(found[0]) == 2 < len(seeds)
    return [torch.stack(values[:1] if formulas else values) for values in found]


def _squared_error(values: Tensor) -> float:
    return float(values.var() / len(values)) if len(values) > 1 else 0.0
