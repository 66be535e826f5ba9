"""The prior over a network's weights: which parameters are random, and how wide each is (§3.1)."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import pyro.distributions as dist
import torch
from torch import Tensor, nn

from pyro_dropout.errors import PyroDropoutError, ShapeError
from pyro_dropout.generative.layouts import Site, hidden_by_default, matching, patterns_of, site_of
from pyro_dropout.mathematics.checks import check_choice, check_flag, check_positive
from pyro_dropout.protocols import Distribution

_INPUTS = 8  # up to which the first layer of the default prior is the paper's
_WEIGHTS = 1 / 16  # c in T = min(1, √(cN/P))
_ANCHORED = {1: 1 / 8, 3: 9 / 8}  # c in T = min(1, cN/P) of anchored members, by hidden layers; otherwise 1/2

# A number for all, a dict by site, or a function of the site's name.
BySite = float | Tensor | Mapping[str, float | Tensor] | Callable[[str], float | Tensor | None]


def by_site(name: str, value: "BySite | None", site: str, sites: list[str]) -> float | Tensor | None:
    """Return the value of an option for ``site``, or None; a dict with a key that is no site is refused."""
    if isinstance(value, Mapping):
        unknown = [key for key in value if key not in sites]
        if unknown:
            raise PyroDropoutError(
                f"{name} names {unknown[0]!r}, which is not a site; the sites are {', '.join(sites)}."
            )
        return value.get(site)
    return value(site) if callable(value) and not isinstance(value, Tensor) else value


@dataclass(frozen=True)
class Tempered:
    """How a loss weighs the KL of a site whose prior is tempered; a model says it in the site's ``infer``.

    ``at_point`` is the factor where the guide has a point. Elsewhere it is min(1, weights/P), with ``weights`` None for
    1, as in a linear model or without data; ``anchored`` is the same for the members of an anchored ensemble.
    """

    at_point: float
    weights: float | None
    anchored: float | None = None
    power: float = 1.0

    def of_point(self, times: float) -> float:
        """Return the factor at a point of a guide that asks for ``times`` this penalty; it is at most 1."""
        return min(1.0, times * self.at_point)


class LearnedNormal(dist.Normal):
    """A Gaussian prior whose width a loss learns; it writes it to ``place``, the model's buffer."""

    place: Tensor

    def expand(self, batch_shape: Sequence[int], _instance: Any = None) -> "LearnedNormal":
        """Return the same distribution with a larger batch, and the same place."""
        new: LearnedNormal = super().expand(batch_shape, _instance)  # type: ignore[no-untyped-call]
        new.place = self.place
        return new


class Prior:
    """Independent Gaussians over a network's parameters, with the paper's widths.

    The first weight layer has N(0, l⁻²), biases have N(0, l'⁻²) and later weight layers N(0, 1/fan_in), the paper's
    √(1/K); with ``width_scaled=False`` every weight layer has N(0, l⁻²). A ``BayesianNet`` without a prior has
    ``Prior(width_scaled="all", tempered=True)``, which :doc:`defaults` explains.

    Equation: learned-width.

    Args:
        length_scale: l of the weights; a number, a dict by site, or a function of the site's name. A site that a dict
            or a function names gets N(0, l⁻²) whatever its depth.
        bias_length_scale: l' of the biases, given the same way.
        width_scaled: whether weight layers after the first are N(0, 1/fan_in). "all": with more than eight inputs the
            first one is narrower too, N(0, 8 l⁻²/fan_in), so that functions do not grow with the number of inputs.
        hide: which parameters stay ordinary: a function of (name, module) that replaces ``hidden_by_default``, which
            leaves out normalisation layers, tables of positions and class tokens.
        include_frozen: whether parameters with ``requires_grad=False`` are random too. By default they stay as they
            are: ordinary and not trained, whatever ``hide`` says.
        learn: which sites have a width that is learned: True for all, or one or several patterns of their names, such
            as ``"*.weight"``. Such a site has one width, and ``ELBO`` sets it at every step to the best for the guide,
            σ² = Σ E_q[w²]/n over its n numbers: type-II maximum likelihood, as far as the guide holds the posterior.
            The length-scales are where it starts.
            A length-scale with a shape gives it that many widths: of shape (Q,) for a ``Linear`` of Q inputs, one
            for each input, which is then as relevant as the data say.
            The guide must have a density there: the best prior of a point is a spike. ``model.prior_of`` has the
            width of the last step, and so have Pyro's own losses, NUTS and files.
        tempered: whether ``ELBO`` weighs the KL down so that wide networks learn. A site that is a point (dropout at
            σ = 0, MAP) is penalised as by N(0, l⁻²), without the width of its layer; the KL of all other sites is
            multiplied by min(1, √(N/P)/4), for N data and P weights, but not in a linear model (one weight layer).
            For anchored members the factor is min(1, cN/P); c is 1/2, or 1/8 and 9/8 with one and three hidden layers.
            The prior itself stays: NUTS and conjugate references use it at full weight. By default it is not tempered;
            but a network with ``learn`` needs tempered=False written out, because its widths may shrink to zero.

    Example:
        >>> import torch, pyro_dropout as pdrop
        >>> net = torch.nn.Sequential(torch.nn.Linear(3, 100), torch.nn.ReLU(), torch.nn.Linear(100, 1))
        >>> prior = pdrop.Prior(length_scale=2.0)
        >>> {name: round(scale.item(), 3) for name, scale in prior.scales(net).items()}
        {'0.weight': 0.5, '0.bias': 1.0, '2.weight': 0.1, '2.bias': 1.0}
    """

    def __init__(
        self,
        length_scale: BySite = 1.0,
        bias_length_scale: BySite = 1.0,
        width_scaled: bool | Literal["all"] = True,
        hide: Callable[[str, nn.Module], bool] | None = None,
        *,
        include_frozen: bool = False,
        learn: bool | str | Sequence[str] = False,
        tempered: bool | None = None,
    ) -> None:
        for name, value in (("length_scale", length_scale), ("bias_length_scale", bias_length_scale)):
            given = value if isinstance(value, Mapping) else {"": value}
            for site, each in given.items() if not _is_function(value) else ():
                check_positive(f"{name}[{site!r}]" if site else name, each)
        check_choice("width_scaled", width_scaled, (True, False, "all"))
        check_flag("include_frozen", include_frozen)
        check_choice("tempered", tempered, (None, True, False))
        if hide is not None and not callable(hide):
            raise PyroDropoutError(
                f"hide must be a function of (name, module) that is true for parameters to leave out; got {hide!r}."
            )
        self.length_scale, self.bias_length_scale = length_scale, bias_length_scale
        self.width_scaled, self.include_frozen = width_scaled, include_frozen
        self.hide = hidden_by_default if hide is None else hide
        self.learn = learn if isinstance(learn, bool) else patterns_of("learn", learn)
        self.tempered, self.never_tempered = bool(tempered), tempered is False

    def sites(self, net: nn.Module) -> Iterator[Site]:
        """Yield the random parameters of ``net`` in the order of its ``named_parameters()``."""
        owners: dict[int, list[tuple[str, nn.Module]]] = {}
        for path, module in net.named_modules():
            for own, parameter in module.named_parameters(recurse=False):
                owners.setdefault(id(parameter), []).append((f"{path}.{own}" if path else own, module))
        for name, parameter in net.named_parameters():
            users = owners[id(parameter)]
            frozen = not parameter.requires_grad and not self.include_frozen
            if not frozen and not any(self.hide(known, module) for known, module in users):
                # A tied parameter is read by its first use; a row dropped there is dropped everywhere.
                known, owner = users[0]
                yield site_of(name, owner, known.rpartition(".")[2], parameter, len(users))

    def scales(self, net: nn.Module) -> dict[str, Tensor]:
        """Return the prior's standard deviation of each site of ``net``."""
        sites = list(self.sites(net))
        lengths = self._lengths("length_scale", sites, "weight") | self._lengths("bias_length_scale", sites, "bias")
        return {site.name: _width(site, lengths[site.name], net.get_parameter(site.name)) for site in sites}

    def point_temperatures(self, net: nn.Module) -> dict[str, float]:
        """Return the factor on the KL of each site of ``net`` where it is a point; none if the prior is not tempered.

        It turns the penalty of N(0, 1/fan_in) into that of N(0, l⁻²), but into no larger one.
        """
        if not self.tempered:
            return {}
        sites = list(self.sites(net))
        plain, scaled = (self._lengths("length_scale", sites, "weight", scaled=how) for how in (False, True))
        ratios = {name: torch.as_tensor(plain[name]).double() / torch.as_tensor(scaled[name]) for name in plain}
        factors = {name: min(1.0, float(ratio.square().mean())) for name, ratio in ratios.items()}
        return {site.name: factors.get(site.name, 1.0) for site in sites}

    def learned(self, net: nn.Module) -> list[str]:
        """Return the sites of ``net`` whose width is learned."""
        names = [site.name for site in self.sites(net)]
        if isinstance(self.learn, bool):
            return names if self.learn else []
        return matching("learn", self.learn, names)

    def _lengths(self, label: str, sites: list[Site], kind: str, scaled: bool = True) -> dict[str, float | Tensor]:
        """Return the length-scale of every site of one kind; unless ``scaled``, without the widths of layers."""
        value = getattr(self, label)
        mine = [site for site in sites if site.kind == kind]
        names = [site.name for site in mine]
        by_site(label, value if isinstance(value, Mapping) else None, "", names)  # an unknown name, even without sites
        found: dict[str, float | Tensor] = {}
        for site in mine:
            chosen = by_site(label, value, site.name, names)
            free = chosen is None or not (isinstance(value, Mapping) or _is_function(value))  # not for this site
            if scaled and free and kind == "weight" and not site.lookup:
                if site.name != names[0]:
                    chosen = site.fan_in**0.5 if self.width_scaled else chosen
                elif self.width_scaled == "all":
                    chosen = (1.0 if chosen is None else chosen) * max(1.0, site.fan_in / _INPUTS) ** 0.5
            found[site.name] = 1.0 if chosen is None else chosen
            check_positive(f"{label} of {site.name}", found[site.name])
        return found


def _is_function(value: BySite) -> bool:
    return callable(value) and not isinstance(value, Tensor)


def _width(site: Site, length_scale: float | Tensor, parameter: Tensor) -> Tensor:
    """Return the standard deviation 1/l of a site, in its parameter's type."""
    length, shape = torch.as_tensor(length_scale, dtype=torch.float64), parameter.shape  # so that 1/l is rounded once
    _check_fits(f"the length-scale of {site.name}", length, shape)
    after = len(shape) - 1 - site.row_dim
    if length.dim() == 1 and after and len(length) == shape[site.row_dim] > 1:  # as many columns as rows
        raise ShapeError(
            f"the length-scale of {site.name}, shape {tuple(shape)}, must say which dimension it is for; got"
            f" {tuple(length.shape)}. Write {(len(length), *[1] * after)} for one for each row (input unit or channel)."
        )
    return (1 / length).to(parameter)


def _check_fits(what: str, value: float | Tensor, shape: torch.Size) -> None:
    try:
        torch.as_tensor(value).expand(shape)
    except RuntimeError:
        got = tuple(torch.as_tensor(value).shape)
        raise ShapeError(f"{what} must be a number, or broadcast to {tuple(shape)}; got {got}.") from None


class PriorWidths(nn.Module):
    """A module whose random parameters, ``sites``, have independent Gaussian priors, with widths in its buffers."""

    net: nn.Module
    prior: Prior
    sites: dict[str, Site]
    learned: list[str]

    def register_widths(self, net: nn.Module) -> None:
        """Make the buffers, as the prior says."""
        self.learned = self.prior.learned(net)
        for name, scale in self.prior.scales(net).items():
            self.register_buffer(_buffer(name), scale)
        self._found = set(self.learned)
        self._at_point = self.prior.point_temperatures(net)
        weights = [value for name, value in net.named_parameters() if name in self.sites or value.requires_grad]
        self._hidden = sum(value.dim() > 1 for value in weights) - 1
        if self.learned and self._hidden > 0 and not self.prior.never_tempered:
            raise PyroDropoutError(
                "Prior(learn=...) is for linear models: in a network, widths that fit the weights best say little about"
                " which widths predict well, and may shrink to zero. Give fixed ones: maximise_evidence finds them by a"
                " Laplace approximation. To learn them all the same, at T = 1, write Prior(learn=..., tempered=False)."
            )

    def prior_of(self, name: str) -> Distribution:
        """Return the prior distribution of one site."""
        self._check_sites([name])
        value = self._parameter(name)
        place = self.get_buffer(_buffer(name))
        zero = torch.zeros((), dtype=value.dtype, device=value.device)
        prior = (LearnedNormal if name in self.learned else dist.Normal)(zero, place.to(value), validate_args=False)
        if isinstance(prior, LearnedNormal):
            prior.place = place
        return prior.expand(value.shape).to_event(value.dim())

    def prior_scale(self, name: str) -> Tensor:
        """Return the prior's standard deviation of one site: a number, or what broadcasts to its shape."""
        self._check_sites([name])
        return self.get_buffer(_buffer(name))

    def set_prior_scales(self, scales: Mapping[str, float | Tensor]) -> None:
        """Set the prior's standard deviation of some sites, by name, to widths that were found from data.

        The buffers behind ``prior_of`` are the one place where widths are: losses, guides, NUTS, Laplace approximations
        and compiled steps read them there, at every run. A width is a positive number, or has the shape that the
        ``Prior`` gave. ``save`` treats widths that were set here as learned: ``load`` brings them into a fresh model.
        """
        self._check_sites(scales)
        for name, value in scales.items():
            check_positive(f"the prior width of {name}", value)
            _check_fits(f"the prior width of {name}", value, self.get_buffer(_buffer(name)).shape)
        with torch.no_grad():
            for name, value in scales.items():
                self.get_buffer(_buffer(name)).copy_(torch.as_tensor(value))
        self._found |= set(scales)

    def found_widths(self) -> set[str]:
        """Return the names of the buffers that hold widths found from data, not settings."""
        return {_buffer(name) for name in self._found}

    def tempered(self, name: str, num_data: int | None = None) -> Tempered | None:
        """Return how losses weigh the KL of one site; None for at full weight.

        A model with a single weight layer has no layers that shut each other, and its ELBO no optimum where the data
        are ignored against the evidence: the number of its data counts for nothing, and T = 1.
        """
        if name not in self._at_point:
            return None
        if self._hidden < 1 or num_data is None:
            return Tempered(self._at_point[name], None)
        anchored = _ANCHORED.get(self._hidden, 1 / 2) * num_data
        return Tempered(self._at_point[name], _WEIGHTS * num_data, anchored, power=0.5)

    def take_in_full(self, but: Mapping[str, float] | None = None) -> dict[str, float]:
        """Let losses take the prior at full weight from here on, but for some sites; return the factors it had."""
        before, self._at_point = self._at_point, dict(but or {})
        return before

    def _parameter(self, name: str) -> Tensor:
        """Return the network's own value of a random parameter."""
        return self.net.get_parameter(name).data

    def _check_sites(self, names: Iterable[str]) -> None:
        for name in names:
            if name not in self.sites:
                raise PyroDropoutError(f"{name!r} is not a site of this model; the sites are {', '.join(self.sites)}.")


def _buffer(name: str) -> str:
    return "prior_scale/" + name.replace(".", "/")
