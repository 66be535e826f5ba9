"""The prior widths of a network: buffers, one for each site, that losses, references and files read in one place."""

from collections.abc import Iterable, Mapping

import pyro.distributions as dist
import torch
from torch import Tensor, nn

from pyro_dropout.generative.priors import LearnedNormal, Prior, Site, Tempered
from pyro_dropout.mathematics.broadcasting import broadcast_shape
from pyro_dropout.mathematics.checks import check_positive
from pyro_dropout.mathematics.errors import PyroDropoutError, ShapeError
from pyro_dropout.protocols import Distribution


class PriorWidths(nn.Module):
    """A module whose random parameters have independent Gaussian priors, with widths in its buffers.

    Attributes:
        net: the network that the parameters are of.
        prior: what the widths were made from.
        sites: the random parameters by name.
        learned: those whose width is learned.
    """

    net: nn.Module
    prior: Prior
    sites: dict[str, Site]
    learned: list[str]

    def register_widths(self, net: nn.Module) -> None:
        """Make the buffers, as the prior says."""
        self.learned = self.prior.learned(net)
        for name, scale in self.prior.scales(net).items():
            self.register_buffer(_buffer(name), scale)
            if name in self.learned:
                self.register_buffer(_buffer(name, "prior_start"), scale.clone(), persistent=False)
        self._found = set(self.learned)
        self._at_point = self.prior.point_temperatures(net)
        weights = [value for name, value in net.named_parameters() if name in self.sites or value.requires_grad]
        self._linear = sum(value.dim() > 1 for value in weights) == 1

    def prior_of(self, name: str) -> Distribution:
        """Return the prior distribution of one site."""
        self._check_sites([name])
        value = self._parameter(name)
        place = getattr(self, _buffer(name))
        zero = torch.zeros((), dtype=value.dtype, device=value.device)
        prior = (LearnedNormal if name in self.learned else dist.Normal)(zero, place.to(value), validate_args=False)
        if isinstance(prior, LearnedNormal):
            prior.place, prior.start = place, self.prior_start(name)
        return prior.expand(value.shape).to_event(value.dim())

    def prior_scale(self, name: str) -> Tensor:
        """Return the prior's standard deviation of one site: a number, or what broadcasts to its shape."""
        self._check_sites([name])
        return self.get_buffer(_buffer(name))

    def prior_start(self, name: str) -> Tensor:
        """Return the width that the ``Prior`` gave to a site whose width is learned."""
        return self.get_buffer(_buffer(name, "prior_start"))

    def set_prior_scales(self, scales: Mapping[str, float | Tensor]) -> None:
        """Set the prior's standard deviation of some sites, by name, to widths that were found from data.

        The buffers behind ``prior_of`` are the one place where widths are: losses, guides, NUTS, Laplace approximations
        and compiled steps read them there, at every run. A width is a positive number, or has the shape that the
        ``Prior`` gave. ``save`` treats widths that were set here as learned: ``load`` brings them into a fresh model.
        """
        self._check_sites(scales)
        for name, value in scales.items():
            check_positive(f"the prior width of {name}", value)
            place = getattr(self, _buffer(name))
            if broadcast_shape(torch.as_tensor(value).shape, place.shape) != place.shape:
                got = tuple(torch.as_tensor(value).shape)
                raise ShapeError(f"the prior width of {name} must be a number or {tuple(place.shape)}; got {got}.")
        with torch.no_grad():
            for name, value in scales.items():
                getattr(self, _buffer(name)).copy_(torch.as_tensor(value))
        self._found |= set(scales)

    def found_widths(self) -> set[str]:
        """Return the names of the buffers that hold widths found from data, not settings."""
        return {_buffer(name) for name in self._found}

    def tempered(self, name: str, num_data: int | None = None) -> Tempered | None:
        """Return how losses weigh the KL of one site; None for at full weight.

        A model with a single weight layer has no layers that shut each other, and its ELBO no optimum where the data
        are ignored against the evidence: the number of its data counts for nothing, and T = 1.
        """
        counted = None if self._linear else num_data
        return Tempered(self._at_point[name], counted) if name in self._at_point else None

    def take_in_full(self, but: Mapping[str, float] | None = None) -> dict[str, float]:
        """Let losses take the prior at full weight from here on, as ``maximise_evidence`` does, or but for some sites.

        Returns:
            The factors of points that it had, by site.
        """
        before, self._at_point = self._at_point, dict(but or {})
        return before

    def _parameter(self, name: str) -> Tensor:
        """Return the network's own value of a random parameter; not by ``detach``, which torch.jit would trace."""
        return self.net.get_parameter(name).data

    def _check_sites(self, names: Iterable[str]) -> None:
        for name in names:
            if name not in self.sites:
                raise PyroDropoutError(f"{name!r} is not a site of this model; the sites are {', '.join(self.sites)}.")


def _buffer(name: str, kind: str = "prior_scale") -> str:
    return f"{kind}/" + name.replace(".", "/")
