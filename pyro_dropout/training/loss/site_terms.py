"""The terms of -ELBO, one for each site: -log p if it is observed, KL(q‖p) if it is not.

A divergence is in closed form where there is one and it holds, and otherwise log q - log p of the draw. A closed form
averages over the draws of its own site only: it does not hold if the prior was made from draws that depend on this one.
Terms are scaled and masked, with the batch of their sites, or numbers.
"""

from collections.abc import Iterable, MutableMapping
from contextlib import suppress

import torch
from pyro.distributions import Delta
from pyro.distributions.util import scale_and_mask
from torch import Tensor
from torch.distributions import Normal, kl_divergence
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from pyro_dropout.mathematics.divergence import Method, kl
from pyro_dropout.mathematics.per_data_point import drawn_per_data_point
from pyro_dropout.mathematics.row_mixture_distribution import RowMixture
from pyro_dropout.mathematics.shapes import base_distribution, keeps_density
from pyro_dropout.mathematics.weight_distribution import LOG_2PI
from pyro_dropout.protocols import Distribution, Message
from pyro_dropout.training.loss.row_tracking import Args, Kwargs, Operation, carried, not_followed, tensors


def observed(site: Message) -> Tensor:
    """Return -log p of an observed site."""
    return -_scaled(site["fn"].log_prob(site["value"]), site)


def auxiliary(site: Message) -> Tensor:
    """Return log q of a guide site that represents another: a constrained one, or several at once."""
    q, value = site["fn"], site["value"]
    if getattr(q, "singular", False):
        return torch.zeros_like(value).sum()
    return _scaled(q.log_density if isinstance(q, Delta) else q.log_prob(value), site)


def divergence(
    q_site: Message, p_site: Message, method: Method, num_samples: int, *, apart: bool, learned: bool
) -> Tensor:
    """Return KL(q‖p) of a latent site, or an estimate of it from the draw.

    ``apart`` says that a closed form would not hold, and ``learned`` that the prior is made from draws or parameters.
    """
    q, p, name = q_site["fn"], p_site["fn"], p_site["name"]
    if isinstance(q, Delta):  # which may hold a mapped draw
        return _of_point(q_site, p_site, learned)
    drawn = drawn_per_data_point(q_site["value"]) is not None
    if isinstance(q, RowMixture):
        fits = _is_gaussian(p) and p.batch_shape + p.event_shape == q.batch_shape + q.event_shape
        if drawn and not fits:
            wrong = f"of shape {tuple(p.shape())}, not that of the weights" if _is_gaussian(p) else "not Gaussian"
            raise not_followed(name, f"its prior is {type(p).__name__}, {wrong}, so that its KL needs whole weights")
        if fits and (drawn or not (apart or (method == "monte_carlo" and not q.singular))):
            return _of_mixture(q_site, p_site, method, num_samples, learned)
    elif not apart and q.batch_shape == p.batch_shape and _scaled_alike(q_site, p_site) and _are_known(q, p):
        with suppress(NotImplementedError):
            found = kl_divergence(q, p)
            if found.shape == q.batch_shape:
                return _scaled(found, q_site)
    return of_draw(q_site, p_site)


def _of_mixture(q_site: Message, p_site: Message, method: Method, num_samples: int, learned: bool) -> Tensor:
    q, p = q_site["fn"], p_site["fn"]
    found = kl(q, p, "large_k" if q.components == 1 else method, num_samples=num_samples)
    base = base_distribution(p)
    if learned and not base.scale.requires_grad and q.noiseless:
        # At σ = 0 the normaliser of a fixed prior is left out. Without gradients, this one does not look trained.
        found = found + _over_event(base.scale.log().expand(q.batch_shape + q.event_shape), q)
    if _scaled_alike(q_site, p_site):
        return _scaled(found, q_site)
    # E[log q] has the scale of the guide's site and E[-log p] that of the model's: a·KL + (b - a)·E[-log p].
    square = ((q.mean - base.loc).square() + q.variance) / base.scale.square()
    surprise = 0.5 * (square + LOG_2PI) + base.scale.log()
    own, other = (_scaled(_over_event(surprise, each["fn"]), each).sum() for each in (q_site, p_site))
    return _scaled(found, q_site).sum() + other - own


def of_draw(q_site: Message, p_site: Message) -> Tensor:
    """Return log q - log p of a draw; at σ = 0, where log q is an infinite constant, -log p."""
    q, p, value = q_site["fn"], p_site["fn"], q_site["value"]
    minus_log_p = -_scaled(p.log_prob(value), p_site)
    if getattr(q, "singular", False):
        return minus_log_p
    # A Delta is at its own value; its density there would have to compare the two.
    ours = _scaled(q.log_density if isinstance(q, Delta) else q.log_prob(value), q_site)
    # By elements of the batch where guide and model agree on it: their plates may differ.
    return ours + minus_log_p if ours.shape == minus_log_p.shape else ours.sum() + minus_log_p.sum()


def _of_point(q_site: Message, p_site: Message, learned: bool) -> Tensor:
    """Return -log p at a point; for a Gaussian prior without its normaliser, which is constant unless it is learned.

    ``kl`` does the same for dropout at σ = 0, so a layer that is never dropped is dropout's limit. A mapped draw keeps
    everything, because it represents a density.
    """
    q, p = q_site["fn"], p_site["fn"]
    base = base_distribution(p)
    if type(q) is not Delta or not keeps_density(base, Normal) or learned:
        return of_draw(q_site, p_site)
    return _scaled(0.5 * _over_event(((q.v - base.loc) / base.scale).square(), p), p_site)


def _scaled(value: Tensor, site: Message) -> Tensor:
    """Return a log density or a divergence with the scale and mask of its site."""
    found: Tensor = scale_and_mask(value, site["scale"], site["mask"])
    return found


def _scaled_alike(q_site: Message, p_site: Message) -> bool:
    pairs = ((q_site[key], p_site[key]) for key in ("scale", "mask"))
    return all(a is b or (not isinstance(a, Tensor) and not isinstance(b, Tensor) and a == b) for a, b in pairs)


def _are_known(q: Distribution, p: Distribution) -> bool:
    """Whether torch's closed forms are of these two, and not of classes that they change."""
    return keeps_density(q) and keeps_density(p)


def _is_gaussian(p: Distribution) -> bool:
    return keeps_density(p, Normal)


def _over_event(values: Tensor, fn: Distribution) -> Tensor:
    """Sum over the dimensions of one event of a distribution."""
    return values.sum(list(range(-len(fn.event_shape), 0))) if fn.event_shape else values


class Watch(TorchFunctionMode):
    """Records which tensors are made from draws and from trained parameters, even where gradients are switched off."""

    def __init__(self, draws: Iterable[Tensor]) -> None:
        super().__init__()
        self.on = True  # whether there is anything left to find out; a model's forward pass comes after its priors
        self._made: MutableMapping[Tensor, bool] = WeakIdKeyDictionary(dict.fromkeys(draws, True))

    def __torch_function__(
        self, func: Operation, types: object, args: Args = (), kwargs: Kwargs | None = None
    ) -> object:
        result = func(*args, **(kwargs or {}))
        if self.on and self.moves(carried(func, args, kwargs or {})):
            for value in tensors((result,)):
                self._made[value] = True
        return result

    def moves(self, values: Iterable[Tensor]) -> bool:
        """Whether one of these was made from a draw or a trained parameter."""
        return any(value.requires_grad or self._made.get(value) for value in values)
