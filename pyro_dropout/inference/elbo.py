"""The evidence lower bound with the KL in closed form: expected log-likelihood by sampling, divergence by formula.

-ELBO = E_q[-log p(y|w)] + KL(q(w)‖p(w)). With dropout's guide and the large-K form it is the dropout objective times
τN, up to a constant; with the exact KL it is a lower bound on the evidence.
"""

import functools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pyro.infer
import torch
from pyro import poutine
from pyro.distributions import Delta
from pyro.distributions.util import scale_and_mask
from pyro.poutine.messenger import Messenger
from pyro.poutine.util import site_is_subsample
from pyro.util import warn_if_nan
from torch import Tensor
from torch.distributions import Independent, Normal, kl_divergence
from torch.overrides import _pop_mode_temporarily

from pyro_dropout.inference.per_example import per_example as draw_per_example
from pyro_dropout.mathematics.divergence import Method, kl
from pyro_dropout.mathematics.errors import PyroDropoutError, RangeError, check_count, check_flag
from pyro_dropout.mathematics.per_data_point import drawn_per_data_point
from pyro_dropout.mathematics.row_mixture import RowMixture


class ELBO(pyro.infer.ELBO):
    """Minus the evidence lower bound, for stock ``pyro.infer.SVI`` or for a training loop of your own.

    The KL of the package's guides is computed, not sampled, so only the log-likelihood is noisy; with ``per_example``
    each data point has weights of its own, and that noise averages out over the batch.

    Args:
        kl: "large_k", the paper's form; "exact", which makes the ELBO a true lower bound where no site is a point (not
            with ``bias="map"``); or "monte_carlo".
        per_example: whether every data point gets its own weight draw.
        num_particles: how many draws to average.
        kl_samples: draws for the parts of a KL that have no closed form.

    Example:
        >>> import pyro, torch, pyro_dropout as pd
        >>> _ = torch.manual_seed(0)
        >>> x = torch.linspace(-1, 1, 50).unsqueeze(-1)
        >>> net = torch.nn.Sequential(torch.nn.Linear(1, 20), torch.nn.ReLU(), torch.nn.Linear(20, 1))
        >>> model = pd.BayesianNet(net, likelihood=pd.Gaussian(tau=25.0))
        >>> guide = pd.AutoDropout(model, keep=0.95)
        >>> svi = pyro.infer.SVI(model, guide, pyro.optim.Adam({"lr": 0.01}), pd.ELBO())
        >>> losses = [svi.step(x, x**2) for _ in range(200)]
        >>> losses[-1] < losses[0] / 2
        True
        >>> sorted(pd.ELBO().parts(model, guide, x, x**2))
        ['kl', 'nll']
    """

    def __init__(
        self, kl: Method = "large_k", per_example: bool = True, num_particles: int = 1, *, kl_samples: int = 16
    ) -> None:
        if kl not in ("large_k", "exact", "monte_carlo"):
            raise RangeError(f"kl must be one of large_k, exact, monte_carlo; got {kl!r}.")
        check_flag("per_example", per_example)
        check_count("num_particles", num_particles)
        check_count("kl_samples", kl_samples)
        super().__init__(num_particles=num_particles)  # type: ignore[no-untyped-call]
        self.kl, self.per_example, self.kl_samples = kl, per_example, kl_samples

    # --- one particle -----------------------------------------------------------------------------------------------

    def _get_trace(self, model: Any, guide: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
        with draw_per_example() if self.per_example else nullcontext():
            guide_trace = poutine.trace(guide).get_trace(*args, **kwargs)
            with _AtEachSite(functools.partial(self._note_divergence, guide_trace)):
                model_trace = poutine.trace(poutine.replay(model, trace=guide_trace)).get_trace(*args, **kwargs)
        return model_trace, guide_trace

    def _note_divergence(self, guide_trace: Any, site: Any) -> None:
        """Compute the divergence of a site of the model, and leave it with the guide's site."""
        if site["is_observed"] or site_is_subsample(site):
            return
        other = guide_trace.nodes.get(site["name"])
        if other is None:
            raise PyroDropoutError(f"the guide has no site {site['name']!r}, which the model samples.")
        # No layer is met here, and the handler that looks for layers would look at every operation.
        with _pop_mode_temporarily() if self.per_example else nullcontext():
            other["divergence"] = _scaled(self._divergence(site["name"], other, site), other).sum()

    def _from_draw(self, guide_site: Any, model_site: Any) -> bool:
        """Whether a site's divergence is log q - log p of its draw, so that the labels drawn move it."""
        q, p = guide_site["fn"], model_site["fn"]
        if not isinstance(q, RowMixture):
            return isinstance(q, Delta)  # which may hold a draw of an auxiliary site
        shared = drawn_per_data_point(guide_site["value"]) is None
        return shared and (not _is_gaussian(p) or (self.kl == "monte_carlo" and not q.singular))

    def _divergence(self, name: str, guide_site: Any, model_site: Any) -> Any:
        """Return KL(q‖p) of one site: by formula where there is one, from the draw where there is none."""
        q, p, value = guide_site["fn"], model_site["fn"], guide_site["value"]
        if isinstance(q, Delta):
            return _of_point(q, p)
        if self._from_draw(guide_site, model_site):
            return -p.log_prob(value) if q.singular else q.log_prob(value) - p.log_prob(value)
        if isinstance(q, RowMixture):
            if not _is_gaussian(p):
                raise PyroDropoutError(
                    f"the prior of {name!r} is {type(p).__name__}, not Gaussian, so its KL needs whole weights: use"
                    " ELBO(per_example=False)."
                )
            method: Method = "large_k" if q.components == 1 else self.kl
            return kl(q, p, method, num_samples=self.kl_samples)
        try:
            return kl_divergence(q, p)
        except NotImplementedError:
            return q.log_prob(value) - p.log_prob(value)

    def _particle(self, model: Any, guide: Any, args: Any, kwargs: Any) -> tuple[Tensor, Tensor, float | Tensor]:
        """Return the negative log-likelihood, the KL, and a term of value zero that carries the score of the labels."""
        model_trace, guide_trace = self._get_trace(model, guide, args, kwargs)
        surprises, divergences, sampled = [], [], []
        for name, site in model_trace.nodes.items():
            if site["type"] != "sample" or site_is_subsample(site):
                continue
            if site["is_observed"]:
                surprises.append(-_scaled(site["fn"].log_prob(site["value"]), site))
                continue
            other = guide_trace.nodes[name]
            divergences.append(other["divergence"])
            if self._from_draw(other, site):
                sampled.append(other["divergence"])
        for name, site in guide_trace.nodes.items():
            if site["type"] == "sample" and name not in model_trace.nodes and not site_is_subsample(site):
                divergences.append(_auxiliary(site))
                sampled.append(divergences[-1])
        return _total(surprises), _total(divergences), _score(surprises, sampled, guide_trace)

    # --- the loss, as Pyro and as torch use it ------------------------------------------------------------------------

    def parts(self, model: Any, guide: Any, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """Return the two parts of -ELBO: {"nll": E[-log p(y|w)], "kl": KL(q‖p)}, averaged over particles."""
        drawn = [self._particle(model, guide, args, kwargs)[:2] for _ in range(self.num_particles)]
        nll, divergence = (torch.stack(part).mean() for part in zip(*drawn, strict=True))
        return {"nll": nll, "kl": divergence}

    def by_site(self, model: Any, guide: Any, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """Return the terms of -ELBO of one draw by site: the KL of a latent one, -log p of an observed one."""
        model_trace, guide_trace = self._get_trace(model, guide, args, kwargs)
        found: dict[str, Tensor] = {}
        for name, site in model_trace.nodes.items():
            if site["type"] != "sample" or site_is_subsample(site):
                continue
            if site["is_observed"]:
                found[name] = -_scaled(site["fn"].log_prob(site["value"]), site).sum()
            else:
                found[name] = guide_trace.nodes[name]["divergence"]
        return found

    def differentiable_loss(self, model: Any, guide: Any, *args: Any, **kwargs: Any) -> Tensor:
        """Return -ELBO as a tensor whose gradient is an unbiased estimate of its gradient."""
        drawn = [self._particle(model, guide, args, kwargs) for _ in range(self.num_particles)]
        return torch.stack([nll + divergence + score for nll, divergence, score in drawn]).mean()

    def loss(self, model: Any, guide: Any, *args: Any, **kwargs: Any) -> float:
        """Return an estimate of -ELBO."""
        with torch.no_grad():
            value = float(self.differentiable_loss(model, guide, *args, **kwargs))
        warn_if_nan(value, "loss")  # type: ignore[call-overload]
        return value

    def loss_and_grads(self, model: Any, guide: Any, *args: Any, **kwargs: Any) -> float:
        """Return an estimate of -ELBO, and add its gradient to the parameters'."""
        value = self.differentiable_loss(model, guide, *args, **kwargs)
        if value.requires_grad:
            value.backward(retain_graph=self.retain_graph)
        found = float(value.detach())
        warn_if_nan(found, "loss")  # type: ignore[call-overload]
        return found


class _AtEachSite(Messenger):
    """Calls a function for each site as soon as the model has said it, before the model goes on.

    A divergence computed there comes before the forward pass, and so after it in the backward pass: its gradients are
    made when the tensors of the forward pass are gone, not on top of them.
    """

    def __init__(self, call: Callable[[Any], None]) -> None:
        super().__init__()
        self._call = call

    def _pyro_post_sample(self, msg: Any) -> None:
        self._call(msg)


def _base(p: Any) -> Any:
    while isinstance(p, Independent):
        p = p.base_dist
    return p


def _is_gaussian(p: Any) -> bool:
    return isinstance(_base(p), Normal)


def _of_point(q: Any, p: Any) -> Any:
    """Return -log p at a point; of a Gaussian prior without its normaliser, which nothing moves unless it is learned.

    That is what ``kl`` does for dropout at σ = 0, so a layer that is never dropped is dropout's limit. The image of a
    draw keeps everything: it stands for a density.
    """
    base = _base(p)
    if type(q) is not Delta or not isinstance(base, Normal) or base.scale.requires_grad or base.loc.requires_grad:
        return q.log_density - p.log_prob(q.v)
    squares = ((q.v - base.loc) / base.scale).square()
    return 0.5 * (squares.sum(list(range(-q.event_dim, 0))) if q.event_dim else squares)


def _scaled(value: Tensor, site: Any) -> Tensor:
    scaled: Tensor = scale_and_mask(value, site["scale"], site["mask"])
    return scaled


def _total(terms: list[Tensor]) -> Tensor:
    """Return the sum of all terms, on their device: a zero from elsewhere would be copied there at every step."""
    found: Tensor = functools.reduce(torch.add, [term.sum() for term in terms]) if terms else torch.zeros(())
    return found


def _auxiliary(site: Any) -> Tensor:
    """Return log q of a site that stands for another: a constrained one, or one in a plate."""
    q = site["fn"]
    if isinstance(q, Delta) or (isinstance(q, RowMixture) and q.singular):
        return torch.zeros_like(site["value"]).sum()
    return _scaled(q.log_prob(site["value"]), site).sum()


def _score(surprises: list[Tensor], sampled: list[Tensor], guide_trace: Any) -> float | Tensor:
    """Return a term of value zero whose gradient is the score-function estimate for trained label probabilities.

    A shared draw moves the whole loss, less what is computed by formula. With a draw for each data point, the labels of
    one point touch only its own likelihood, and the other points' average is a baseline that depends on none of them.
    """
    zero: float | Tensor = 0.0
    for site in guide_trace.nodes.values():
        q = site.get("fn")
        if site["type"] != "sample" or not isinstance(q, RowMixture) or not q.learns_probs:
            continue
        recipe = drawn_per_data_point(site["value"])
        if recipe is None:
            cost = _total([*surprises, *sampled]).detach()
            log_label = q.label_log_prob().sum()
        else:
            cost = torch.stack([s.detach() for s in surprises]).sum(0)
            if len(cost) > 1:
                cost = cost - (cost.sum() - cost) / (len(cost) - 1)
            log_label = recipe.label_log_prob()
        zero = zero + (cost * (log_label - log_label.detach())).sum()
    return zero
