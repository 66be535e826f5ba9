"""Queries of a trained guide: the distribution of one site, means, draws, medians and quantiles.

Any Pyro distribution works: quantiles come from its ``icdf`` where it has one, and from draws otherwise.
"""

import copy
from collections.abc import Iterator, Sequence
from typing import Any

import pyro.distributions as dist
import torch
from pyro.infer.autoguide import AutoGuide
from torch import Tensor
from torch.distributions import Independent, TransformedDistribution

from pyro_dropout.generative.random_state import forked
from pyro_dropout.guides.sites import GuideSite
from pyro_dropout.mathematics.checks import check_count
from pyro_dropout.mathematics.errors import PyroDropoutError, RangeError
from pyro_dropout.mathematics.quantiles import marginal_quantile
from pyro_dropout.mathematics.row_mixture import RowMixture
from pyro_dropout.mathematics.stacked import Stacked

_DRAWS = 10_000  # for quantiles of a distribution that has no ``icdf``


class Marginals(AutoGuide):
    """A guide that describes the posterior of each site; ``SiteGuide`` provides the sites."""

    _sites: dict[str, GuideSite]
    prototype_trace: Any

    def _distribution(self, site: GuideSite, state: Any) -> Any:
        raise NotImplementedError

    def _tell(self) -> Any:
        raise NotImplementedError

    def _before_sampling(self) -> None:
        raise NotImplementedError

    def _marginal(self, site: GuideSite, state: Any) -> Any:
        """Return q of one site by itself."""
        return self._distribution(site, state)

    def _known(self) -> Iterator[GuideSite]:
        if self.prototype_trace is None:
            raise PyroDropoutError(
                f"{type(self).__name__} has not seen its model's sites yet: call it once with the model's arguments, or"
                " fit it, first."
            )
        return iter(self._sites.values())

    def _marginals(self) -> Iterator[tuple[GuideSite, Any]]:
        """Yield every site with its distribution in unconstrained space."""
        sites, states = list(self._known()), self._tell()
        for site in sites:
            yield site, self._marginal(site, states[site.name.replace(".", "/")])

    def posterior(self, name: str) -> Any:
        """Return the posterior distribution of one site."""
        sites = {site.name: site for site in self._known()}
        if name not in sites:
            raise PyroDropoutError(f"{name!r} is not a site of this guide; the sites are {', '.join(sites)}.")
        fn = self._marginal(sites[name], self._tell()[name.replace(".", "/")])
        transform = sites[name].transform
        if transform is None:
            return fn
        if isinstance(fn, dist.Delta):
            return dist.Delta(transform(fn.v), event_dim=sites[name].event_dim)
        return TransformedDistribution(fn, [transform])

    def mean(self) -> dict[str, Tensor]:
        """Return E[w] of every site; of a constrained site, the image of the mean in unconstrained space."""
        with torch.no_grad():
            return {site.name: _image(site, fn.mean) for site, fn in self._marginals()}

    def sample_weights(self, n: int) -> dict[str, Tensor]:
        """Draw ``n`` times from the posterior: {name: (n, ...)}."""
        check_count("n", n)
        with torch.no_grad():
            states = self._tell() if self.prototype_trace is not None else {}
            self._before_sampling()
            return {
                site.name: _image(site, self._distribution(site, states[site.name.replace(".", "/")]).sample((n,)))
                for site in self._known()
            }

    def median(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """Return the posterior median of every element of every site."""
        return {name: values[0] for name, values in self.quantiles([0.5], *args, **kwargs).items()}

    def quantiles(self, quantiles: Sequence[float] | Tensor, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """Return quantiles of every element of every site: {name: (len(quantiles), ...)}."""
        levels = [float(level) for level in quantiles]
        for level in levels:
            if not 0 < level < 1:
                raise RangeError(f"quantiles must lie strictly between 0 and 1; got {level!r}.")
        if self.prototype_trace is None and (args or kwargs):
            self._setup_prototype(*args, **kwargs)  # type: ignore[no-untyped-call]
        with torch.no_grad():
            return {
                site.name: torch.stack([_image(site, value) for value in _quantiles(fn, levels)])
                for site, fn in self._marginals()
            }

    # --- copies -------------------------------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        # Pyro's own method takes the model away from the guide that is being pickled. A model is often a function that
        # cannot be pickled; the copy has none, but knows its sites.
        state = self.__dict__.copy()
        state["_model"], state["master"] = (None,), None
        for parameter in self.parameters():
            parameter.__dict__.pop("unconstrained", None)  # a weak reference that Pyro leaves
        return state

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        made = type(self).__new__(type(self))
        memo[id(self)] = made
        state = {name: copy.deepcopy(value, memo) for name, value in self.__getstate__().items()}
        made.__setstate__(state)  # type: ignore[no-untyped-call]
        made._model = (memo.get(id(self.model), self.model),)
        return made


def _image(site: GuideSite, value: Tensor) -> Tensor:
    """Map values from unconstrained space to the support of a site."""
    found: Tensor = value.clone() if site.transform is None else site.transform(value)
    return found


def _quantiles(fn: Any, levels: list[float]) -> list[Tensor]:
    """Return quantiles of every element of a distribution."""
    if isinstance(fn, dist.Delta):
        return [fn.v for _ in levels]
    if isinstance(fn, Stacked):
        parts = [_quantiles(part, levels) for part in fn.parts]
        return [torch.stack(each).reshape(fn.batch_shape + fn.event_shape) for each in zip(*parts, strict=True)]
    if isinstance(fn, RowMixture):
        return [marginal_quantile(fn, level) for level in levels]
    base = fn
    while isinstance(base, Independent):
        base = base.base_dist
    like: Tensor = base.sample()
    try:
        return [base.icdf(like.new_full((), level)).expand(like.shape) for level in levels]
    except NotImplementedError:
        with forked():
            draws = fn.sample((_DRAWS,))
        return list(torch.quantile(draws.double(), draws.new_tensor(levels).double(), dim=0).to(draws))
