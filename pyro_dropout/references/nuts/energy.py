"""The energy U(w) = -log p(y, w) of a model's weights, and its gradient, for several weights at once, in float64.

Networks are evaluated for all weights at once; other Pyro models through their traces. A position z is one vector of
all weights; a constrained site, such as a scale, is transformed to the real line.
"""

import math
from dataclasses import replace

import torch
from pyro import poutine
from pyro.distributions.util import scale_and_mask
from torch import Size, Tensor
from torch.distributions import Normal, biject_to

from pyro_dropout.engines.torch_internals import is_traced
from pyro_dropout.errors import PyroDropoutError
from pyro_dropout.generative.model_call import ModelCall, is_network
from pyro_dropout.generative.networks import BayesianNet
from pyro_dropout.generative.observed_sites import check_evidence, check_supports, check_whole, sample_sites, trace_of
from pyro_dropout.generative.own_noise import check_no_noise
from pyro_dropout.generative.process_state import forked
from pyro_dropout.generative.standardised import Standardised
from pyro_dropout.guides.sites import near_mean
from pyro_dropout.prediction.predict_network import frozen
from pyro_dropout.protocols import Message, Weights
from pyro_dropout.training.compile.functional import unvalidated

F64 = torch.float64
NoDecompositionError: type[RuntimeError] = torch.linalg.LinAlgError  # type: ignore[attr-defined]


class Energy:
    """-log p(y, w) of a model at its data; a copy in float64 on the CPU is used, if it runs."""

    def __init__(self, call: ModelCall) -> None:
        self._mapped = True
        exact = call.mapped(lambda part: part.to("cpu", F64 if part.is_floating_point() else part.dtype))
        if is_network(call.model):
            exact = replace(exact, model=frozen(call.model).to("cpu", F64).eval())
        self._given = self._call = exact if has_gaussian_prior(call.model) else call
        self.model = self._call.model
        sites = self._sites()
        check_supports(self._given, sites, trained=False)
        check_no_noise(self.model, "this sampler")
        self._types = dict.fromkeys(sites, F64)
        self._transforms = {name: biject_to(site["fn"].support) for name, site in sites.items()}
        self._shapes = {n: self._transforms[n].inv(site["value"]).shape for n, site in sites.items()}
        self._prior: Normal | None = None
        if has_gaussian_prior(self.model) and set(sites) == set(self.model.sites):
            widths = [self.model.prior_of(name).stddev.reshape(-1) for name in sites]
            self._prior = Normal(0.0, torch.cat(widths), validate_args=False)
        if self._call is not exact:  # its constants may require the original dtypes
            self._call = exact
            try:
                self._of_each(self.position(_values(sites)))
                self.model = exact.model
            except (RuntimeError, PyroDropoutError):
                self._call = self._given
                self._types = {name: site["value"].dtype for name, site in sites.items()}
        if self._prior is None:
            self._check_fixed(self.position(_values(sites)))

    def _check_fixed(self, z: Tensor) -> None:
        """Raise an error if the energy at a position changes from call to call."""
        with forked(), unvalidated(), torch.no_grad():
            first, again = (float(self._of_each(z)) for _ in range(2))
        if not math.isclose(first, again, rel_tol=1e-4, abs_tol=1e-4) and math.isfinite(first - again):
            raise PyroDropoutError(
                f"the energy at the same weights changes from call to call ({first:.6g}, {again:.6g}): the model draws"
                " random numbers that this sampler does not see, as of a latent site that poutine.block hides."
            )

    # --- weights and positions ----------------------------------------------------------------------------------------

    def start(self, central: bool = False) -> Tensor:
        """Return a position (d,) drawn from the prior; if ``central``, near the mean of a wide one of a program."""
        sites = self._sites()
        if not central or self._prior is not None:
            return self.position(_values(sites))
        return self.position({name: near_mean(site["fn"], site["value"]) for name, site in sites.items()})

    def prior_widths(self) -> Tensor:
        """Return the standard deviations (d,) of a network's weights under their prior; 1 for any other model."""
        if self._prior is None:
            return torch.ones(sum(shape.numel() for shape in self._shapes.values()), dtype=F64)
        return self._prior.stddev.to(F64)

    def position(self, weights: Weights) -> Tensor:
        """Return the position (d,) of one value of all weights."""
        parts = [transform.inv(weights[name]).reshape(-1) for name, transform in self._transforms.items()]
        flat = torch.cat([part.detach().to("cpu", F64) for part in parts])
        return flat.clamp(-1e3, 1e3)  # a scale drawn from its prior may be zero

    def parts(self, z: Tensor) -> Weights:
        """Return each site's part {site: (*batch, *shape)} of positions (*batch, d), unconstrained."""
        return parted(z, self._shapes)

    def weights(self, z: Tensor) -> Weights:
        """Return the weights {site: (*batch, *shape)} at positions (*batch, d)."""
        return {name: self._transforms[name](part.to(self._types[name])) for name, part in self.parts(z).items()}

    def _sites(self) -> dict[str, Message]:
        """Return the latent sites of a trace."""
        with torch.no_grad(), poutine.block():
            trace = trace_of(self._given)
            check_evidence(self._given, trace, "nuts(model, x, y)")
        check_whole(trace)
        sites = {}
        for name, site in sample_sites(trace).items():
            if site["is_observed"]:
                continue
            if site["fn"].support.is_discrete:
                raise PyroDropoutError(
                    f"site {name!r} ({type(site['fn']).__name__}) is discrete, and this sampler needs gradients."
                    " Marginalise it in the model."
                )
            sites[name] = site
        if not sites:
            raise PyroDropoutError("the model has no random weights, so its posterior has nothing to sample.")
        return sites

    # --- the energy ---------------------------------------------------------------------------------------------------

    def __call__(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """Return the energies (chains,) and their gradients (chains, d) at positions (chains, d)."""
        z = z.detach().requires_grad_()
        with unvalidated(), torch.enable_grad():
            energies = self._of_model(z) if self._prior is None else self._of_net(z, self._prior)
            # Chains are independent, so the gradient of the sum contains that of each.
            (slopes,) = torch.autograd.grad(energies.sum(), z)
        return energies.detach().to(F64), slopes

    def _of_net(self, z: Tensor, prior: Normal) -> Tensor:
        """Return the energies of a network's weights."""
        f = self.model.evaluate(self.weights(z), self._call.args[0])
        f = f.reshape(len(z), *f.shape[-2:])
        y = self.model.likelihood.checked(f, self._call.args[1])
        fits: Tensor = self.model.likelihood.distribution(f).log_prob(y)
        plausible: Tensor = prior.log_prob(z)
        return -fits.sum(-1) - plausible.sum(-1)

    def _of_model(self, z: Tensor) -> Tensor:
        """Return the energies of any model's weights: all at once, or one by one if vmap fails."""
        if self._mapped:
            try:
                found: Tensor = torch.func.vmap(self._of_one)(z)
                return found
            except NoDecompositionError:  # at some of the positions; the next ones may be mapped again
                pass
            except Exception:
                self._mapped = False
        return torch.stack([self._of_each(each) for each in z])

    def _of_each(self, z: Tensor) -> Tensor:
        """Return the energy at one position (d,), infinite where a matrix has no decomposition, as Pyro's NUTS does.

        A trajectory that comes there is divergent. While operations are recorded the error is raised: the record would
        be that of an infinite energy everywhere.
        """
        try:
            return self._of_one(z)
        except NoDecompositionError:
            if is_traced():
                raise
            return z.sum() * 0.0 + math.inf  # with a gradient, which is zero

    def _of_one(self, z: Tensor) -> Tensor:
        weights = self.weights(z)
        with poutine.block(), poutine.trace() as capture, poutine.condition(data=weights):
            self._call()
        total = z.new_zeros(())
        for site in sample_sites(capture.trace).values():
            total = total - scale_and_mask(site["fn"].log_prob(site["value"]), site["scale"], site["mask"]).sum()
        for name, part in self.parts(z).items():
            change = self._transforms[name].log_abs_det_jacobian(part, weights[name])
            total = total - change.reshape(-1).sum(-1)
        return total


def _values(sites: dict[str, Message]) -> Weights:
    return {name: site["value"] for name, site in sites.items()}


def parted(flat: Tensor, shapes: dict[str, Size]) -> Weights:
    """Split one or several vectors (*batch, d) into sites, {name: (*batch, *shape)}."""
    parts = flat.split([shape.numel() for shape in shapes.values()], -1)
    pairs = zip(shapes.items(), parts, strict=True)
    return {name: part.reshape(flat.shape[:-1] + shape) for (name, shape), part in pairs}


def has_gaussian_prior(model: object) -> bool:
    """Return whether a model is a network with Gaussian priors, possibly inside ``Standardised``."""
    return type(model) is BayesianNet or (isinstance(model, Standardised) and has_gaussian_prior(model.model))
