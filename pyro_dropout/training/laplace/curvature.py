"""Generalised Gauss-Newton curvature from Jacobians: H = Σ_n J_nᵀ C_n J_n, over batches of data.

J_n is the slope of the outputs at one point in the weights, (D, weights), and C_n how the likelihood bends in these
outputs (``Likelihood.curvature``). With C = R Rᵀ, the rows of Rᵀ J are a root of H, so that H is never negative.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from pyro import poutine
from torch import Tensor

from pyro_dropout.engines.engine import exact_products
from pyro_dropout.errors import PyroDropoutError
from pyro_dropout.generative.inputs import AnyInputs, check_inputs, check_pairs, takes_all
from pyro_dropout.generative.jacobians import Jacobians, last_layer
from pyro_dropout.generative.observed_sites import are_ours, log_density, sample_sites
from pyro_dropout.generative.standardised import Standardised, network_in
from pyro_dropout.generative.trial_run import quietly
from pyro_dropout.mathematics.curvature_blocks import F64, Block, Dense, Diagonal
from pyro_dropout.protocols import Weights

ASKER = "a Laplace approximation"
_NUMBERS = 2**24  # of a Jacobian that is held at once
_POINTS = 256  # the most that run together, so that a large network's activations fit
_OUTPUTS = 4096  # the most outputs at a point: the likelihood's curvature has a row and a column for each


class Sums(ABC):
    """What is added up over the data, in the curvature of some sites of a network in evaluation mode.

    Attributes:
        blocks: the curvature so far.
        outputs: how many the network has at a point.
        count: how many points there have been.
        gradient: of log p(y | w) in the weights of these sites.
    """

    def __init__(self, net: Any, weights: Weights, outputs: int, blocks: Sequence[Block]) -> None:
        self.net, self.outputs, self.blocks = net, outputs, list(blocks)
        self.sites = [name for block in blocks for name in block.shapes]
        self.fixed = {name: value.detach() for name, value in weights.items() if name not in self.sites}
        self.free = {name: weights[name].detach() for name in self.sites}
        self.count = 0
        self.gradient = {name: torch.zeros_like(value, dtype=F64) for name, value in self.free.items()}

    @abstractmethod
    def add(self, x: AnyInputs, y: Tensor) -> Tensor:
        """Add some points, and return the outputs at them, (N, D)."""

    def finished(self, scale: float) -> list[Block]:
        """Return the curvature, times ``scale``."""
        for block in self.blocks:
            block.multiply(scale)
        return self.blocks

    @property
    def together(self) -> int:
        """How many points can be added at once."""
        return min(_POINTS, max(1, _NUMBERS // self.outputs**2))

    def _slope(self, f: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Return ∂ log p(y | f)/∂f, (N, D), and the root of the likelihood's curvature, (N, D, D)."""
        likelihood = self.net.likelihood
        root_of = getattr(likelihood, "curvature_root", None)
        if root_of is None:
            raise PyroDropoutError(
                f"likelihood {type(likelihood).__name__} does not say how its log density bends in the outputs. Derive"
                " it from pyro_dropout.generative.Likelihood, and define curvature_root(self, f, y=None)."
            )
        if f.shape[-1] > _OUTPUTS:
            raise PyroDropoutError(
                f"the network has {f.shape[-1]:,} outputs at a point, and a Laplace approximation holds a matrix with a"
                f" row and a column for each; the most is {_OUTPUTS:,}."
            )
        f = f.detach().requires_grad_()
        target = likelihood.checked(f, y)
        (slope,) = torch.autograd.grad(likelihood.distribution(f).log_prob(target).sum(), f)
        with torch.no_grad():
            return slope, root_of(f.detach(), target)


class JacobianSums(Sums):
    """Curvature from Jacobians, in matrices or their diagonals.

    With ``last``, the sites are those of a last layer f = W φ(x) + b, whose Jacobian is known.
    """

    blocks: list[Dense | Diagonal]  # type: ignore[assignment]

    def __init__(
        self, net: Any, weights: Weights, outputs: int, blocks: Sequence[Dense | Diagonal], x: AnyInputs, last: bool
    ) -> None:
        super().__init__(net, weights, outputs, blocks)
        self._rows = self._of_last_layer if last else Jacobians(net, weights, self.sites, x, ASKER).rows

    @property
    def together(self) -> int:
        """How many points can be added at once."""
        size = sum(block.size() for block in self.blocks)
        return min(super().together, max(1, _NUMBERS // (self.outputs * size)))

    def _of_last_layer(self, x: AnyInputs) -> tuple[Tensor, Weights]:
        """Return f and ∂f_d/∂W = e_d φᵀ, ∂f_d/∂b = e_d."""
        with torch.no_grad():
            found = last_layer(self.net, {**self.fixed, **self.free}, x)
            if found.features is None or set(found.sites) != set(self.free):
                raise PyroDropoutError("the network's last layer is not the same for all data; use another structure.")
            eye = torch.eye(found.outputs.shape[-1]).to(found.outputs)
            phi = found.features.to(eye)
            each = {
                name: eye.expand(len(phi), -1, -1) if value.dim() == 1 else torch.einsum("de,ni->ndei", eye, phi)
                for name, value in self.free.items()
            }
        return found.outputs, each

    @exact_products()
    def add(self, x: AnyInputs, y: Tensor) -> Tensor:
        """Add some points, and return the outputs at them."""
        f, slopes = self._rows(x)
        slope, root = self._slope(f, y)
        for name, value in slopes.items():
            self.gradient[name] += torch.einsum("nd,nd...->...", slope.to(F64), value.to(F64))
        for block in self.blocks:
            rows = torch.cat([slopes[name].flatten(2) for name in block.shapes], -1)
            block.add((root.mT @ rows.to(root)).flatten(0, 1))
        self.count += len(f)
        return f


def data_inside(model: Any, weights: Weights, x: object, y: Tensor) -> tuple[Any, AnyInputs, Tensor]:
    """Return the network, and a batch as it sees it: standardised, beside the weights, and with possible targets."""
    net, place = network_in(model), next(iter(weights.values())).device
    inputs = check_inputs(x, whole=takes_all(model))
    check_pairs("x and y", inputs, y)
    inputs, y = inputs.to(place), y.to(place)
    if isinstance(model, Standardised):
        assert isinstance(inputs, Tensor)
        inputs, y = model.standard_x(inputs), model.standard_y(y)
    with torch.no_grad():
        f = net.evaluate(weights, inputs if takes_all(net) else inputs[:1])[:1]
        net.likelihood.check_values(f, net.likelihood.checked(f.expand(len(y), -1), y))
        if not are_ours(net, "forward", "sample_sites"):
            _check_terms(net, weights, *((inputs, y) if takes_all(net) else (inputs[:1], y[:1])))
    return net, inputs, y


def _check_terms(net: Any, weights: Weights, x: AnyInputs, y: Tensor) -> None:
    """Raise unless log p(y, w) of a network that samples by itself is that of its priors and its likelihood."""
    with quietly(net), poutine.block():
        trace = poutine.trace(poutine.condition(net, data=weights)).get_trace(x, y)
    found = torch.stack([log_density(site) for site in sample_sites(trace).values()]).sum()
    f, likelihood = net.evaluate(weights, x), net.likelihood
    terms = [net.prior_of(name).log_prob(value) for name, value in weights.items()]
    terms.append(likelihood.distribution(f).log_prob(likelihood.checked(f, y)).sum())
    known = torch.stack([term.to(F64) for term in terms]).sum()
    if not torch.isclose(found, known, rtol=1e-4, atol=1e-3):
        raise PyroDropoutError(
            f"log p(y, w) of {type(net).__name__} is {found:.6g} at a data point, and that of its priors and its"
            f" likelihood {known:.6g}: its forward or sample_sites has other terms, such as pyro.factor, whose"
            " curvature is not known."
        )
