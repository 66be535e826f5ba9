"""A Gaussian posterior at a point that is already trained (MacKay 1992; Daxberger et al. 2021)."""

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from pyro_dropout.errors import PyroDropoutError, RangeError, ShapeError, warn_caller
from pyro_dropout.generative.inputs import AnyInputs, takes_all
from pyro_dropout.generative.jacobians import check_single_points, last_layer
from pyro_dropout.generative.likelihoods import Gaussian
from pyro_dropout.generative.likelihoods.moments import is_one_of
from pyro_dropout.generative.model_call import ModelCall, name_of
from pyro_dropout.generative.networks import BayesianNet
from pyro_dropout.generative.own_noise import check_no_noise
from pyro_dropout.generative.process_state import forked, modules_stay, one_at_a_time
from pyro_dropout.generative.standardised import Standardised, network_in
from pyro_dropout.generative.trial_run import evaluating
from pyro_dropout.guides.laplace import AutoLaplace, Structure, groups_of
from pyro_dropout.mathematics.checks import check_count, check_finite, describe
from pyro_dropout.mathematics.curvature import Curvature
from pyro_dropout.mathematics.curvature_blocks import F64, Dense, Kronecker
from pyro_dropout.mathematics.shapes import base_distribution
from pyro_dropout.protocols import HasMean, PyroModel, Weights
from pyro_dropout.training.laplace.curvature import ASKER, JacobianSums, Sums, data_inside
from pyro_dropout.training.laplace.kronecker import KroneckerSums, layers_of
from pyro_dropout.training.laplace.tuned_prior import Pair, judge_on_training_data, tune_prior
from pyro_dropout.training.loader import Target, divided, number_of_data

_JUDGED = 100  # training data whose confidence is looked at
_LARGEST = 16_384  # weights with one matrix: 2 GB in float64


@one_at_a_time
@modules_stay
def laplace(
    model: PyroModel,
    point: object,
    x: object,
    y: Tensor | None = None,
    structure: Structure | None = None,
    *,
    batch_size: int | None = None,
    num_data: int | None = None,
    target: str | int | None = None,
    validation: object = None,
) -> AutoLaplace:
    """Return the Laplace approximation at a point: a Gaussian guide with the curvature of the posterior there.

    The curvature is the generalised Gauss-Newton matrix of the log-likelihood plus the prior's precisions. It is
    that of the network in evaluation mode: normalisation layers use their running statistics, and dropout layers do
    nothing.
    Warns if the point is not near a maximum of the posterior: the Gaussian is then around the wrong place; and if a
    classifier is far less confident than it is right: the Gaussian is then too wide.

    Args:
        model: a ``BayesianNet``, or one inside ``Standardised``.
        point: where: a guide, at the mean of its weights; a dict of weights by site; or the model or its network, at
            the values of its own parameters.
        x: the training inputs, (N, ...); or a ``DataLoader`` of batches (x, y), once through.
        y: the training targets.
        structure: which weights are correlated, as in ``AutoLaplace``.
        batch_size: the most points to compute with at once; by default as many as fit into a few hundred megabytes.
        num_data: the number of data that x and y stand for, to which the curvature is scaled up; by default how many
            there are, or the length of the loader's dataset.
        target: of a ``DataLoader``'s batches, as in ``fit``.
        validation: (x, y) that the point was not trained on, or a ``DataLoader`` of them. The prior's precisions in the
            covariance are then multiplied by the factor under which these data are most probable in linearised
            predictions, whatever the structure; ``guide.prior_factor`` is that factor. Without it the default prior of
            a classifier with hidden layers is narrowed until it takes at most 0.01 of the point's mean confidence on
            training data. One that you or ``from_dropout`` wrote out stays, and may be far too wide for a point that
            was trained elsewhere.

    Returns:
        The guide. ``guide.curvature`` holds the curvature, the log-likelihood at the point and the number of data.

    Example:
        >>> import torch, pyro_dropout as pdrop
        >>> x = torch.linspace(-1, 1, 20).unsqueeze(-1)
        >>> model = pdrop.BayesianNet(torch.nn.Linear(1, 1), likelihood=pdrop.Gaussian(tau=100.0))
        >>> exact = {"weight": torch.tensor([[2.0]]), "bias": torch.tensor([0.0])}
        >>> guide = pdrop.laplace(model, exact, x, 2 * x)
        >>> precision = 1 + 100 * x.square().sum()  # of the prior, and of the data
        >>> bool(torch.isclose(guide.posterior("weight").variance, 1 / precision).item())
        True
    """
    for name, value in (("batch_size", batch_size), ("num_data", num_data)):
        if value is not None:
            check_count(name, value)
    if isinstance(x, DataLoader) and not isinstance(x.dataset, IterableDataset):
        num_data = number_of_data(x, num_data)  # an epoch may leave some out, or hold some twice
    guide = AutoLaplace(model, structure, init=weights_at(model, point))
    batches = batches_of(model, x, y, target)
    finish(guide, model, batches, batch_size=batch_size, num_data=num_data, validation=validation)
    return guide


def measured(
    model: PyroModel,
    weights: Weights,
    x: object,
    y: Tensor | None,
    structure: Structure | None = None,
    num_data: int | None = None,
) -> AutoLaplace:
    """Return the Laplace approximation at some weights, without a look at its confidence."""
    guide = AutoLaplace(model, structure, init=weights)
    finish(guide, model, batches_of(model, x, y), num_data=num_data, judged=False)
    return guide


def weights_at(model: Any, point: object) -> Weights:
    """Return the weights that a point stands for: the mean of a guide, a dict, or a network's own parameters."""
    net = network_in(model)
    if not isinstance(net, BayesianNet):
        raise PyroDropoutError(
            f"model must be a BayesianNet, or one inside Standardised; got {name_of(model)}. Other Pyro models have"
            " Pyro's AutoLaplaceApproximation and this package's AutoLowRank."
        )
    sites = net.sites
    if isinstance(point, Mapping):
        found = dict(point)
    elif point is model or point is net:
        found = {name: net.net.get_parameter(name) for name in sites}
    elif isinstance(point, HasMean):
        found = point.mean()
    elif isinstance(point, nn.Module) and set(sites) <= {name for name, _ in point.named_parameters()}:
        found = {name: point.get_parameter(name) for name in sites}
    else:
        raise PyroDropoutError(
            "point must be a guide, a dict of weights by site, or the model, for its network as it is; got"
            f" {describe(point)}."
        )
    missing = [name for name in sites if not isinstance(found.get(name), Tensor)]
    if missing:
        raise PyroDropoutError(f"point has no value for {missing[0]!r}; the sites are {', '.join(sites)}.")
    for name in sites:
        shape, own = tuple(found[name].shape), tuple(net.net.get_parameter(name).shape)
        if shape != own:
            raise ShapeError(
                f"point has {name!r} of shape {shape}, and the model of shape {own}: is it for this model?"
            )
        check_finite(f"point[{name!r}]", found[name])
    return {name: found[name].detach() for name in sites}


def batches_of(model: object, x: object, y: Tensor | None, target: str | int | None = None) -> Iterable[Pair]:
    """Return the data in batches: one, or those of a loader."""
    if isinstance(x, DataLoader):
        if y is not None:
            raise PyroDropoutError("a DataLoader takes the place of x and y; leave y out.")
        if takes_all(model):
            raise PyroDropoutError("the network takes all its points at once (whole_batch=True); give x and y.")
        return (divided(batch, target) for batch in x)
    if target is not None:
        raise PyroDropoutError(f"target is for the batches of a DataLoader; got {target!r} with x and y.")
    if not isinstance(y, Tensor):
        raise ShapeError(f"y must be a tensor of targets; got {type(y).__name__}.")
    return [(x, y)]


def finish(
    guide: AutoLaplace,
    model: Any,
    batches: Iterable[Pair],
    *,
    batch_size: int | None = None,
    num_data: int | None = None,
    validation: object = None,
    judged: bool = True,
) -> None:
    """Add the curvature to a guide whose point is trained, and warn if it is not.

    ``num_data`` is how many data the batches, pairs (x, y), stand for; unless ``judged``, confidence is not looked at.
    """
    guide.set_curvature(None)
    weights, net = guide.point(), network_in(model)
    sums, log_likelihood, seen = _added_up(guide.structure, model, weights, batches, batch_size)
    scale = 1.0 if num_data is None else num_data / sums.count
    priors = {name: base_distribution(model.prior_of(name)) for name in sums.sites}
    gradient, tempered = {}, {name: net.tempered(name) for name in sums.sites}
    for name, slope in sums.gradient.items():
        how = tempered[name]
        heat = 1.0 if how is None else how.of_point(guide.penalty)  # as in the point's loss
        pull = (weights[name] - priors[name].loc).to(F64) / priors[name].scale.to(F64).square()
        gradient[name] = scale * slope - heat * pull
    if not all(bool(torch.isfinite(value).all()) for value in (log_likelihood, *gradient.values())):
        raise RangeError(
            f"log p(y | w) at the point, {log_likelihood.item():.4g}, and its gradient must be finite; are the weights?"
        )
    noise = _noise(model, scale * log_likelihood, scale * sums.count * sums.outputs)
    curvature = Curvature(sums.finished(scale), scale * log_likelihood, num_data or sums.count, noise)
    guide.set_curvature(curvature)
    _warn_unless_trained(guide, gradient)
    guide.prior_factor = 1.0
    if validation is not None:
        guide.prior_factor = tune_prior(guide, model, validation)
    elif judged:
        # The width of a default prior is no claim of the user's; that of a single layer is at full weight.
        by_default = net._hidden > 0 and any(how is not None for how in tempered.values())
        guide.prior_factor = judge_on_training_data(guide, net, seen, narrows=by_default)


def _added_up(
    structure: Structure, model: Any, weights: Weights, batches: Iterable[Pair], batch_size: int | None
) -> tuple[Sums, Tensor, list[Pair]]:
    """Return the sums over all data, log p(y | w), and the first data, as the network sees them."""
    sums: Sums | None = None
    seen: list[Pair] = []
    log_likelihood = torch.zeros((), dtype=F64, device=next(iter(weights.values())).device)
    with forked(), evaluating(model), torch.enable_grad():
        for x, y in batches:
            net, inputs, targets = data_inside(model, weights, x, y)
            whole, start = takes_all(net), 0
            if sums is None:
                sums = _sums(structure, net, weights, inputs)
            if (missing := _JUDGED - sum(len(known) for _, known in seen)) > 0:
                seen.append((inputs, targets) if whole else (inputs[:missing], targets[:missing]))
            while start < len(targets):
                size = len(targets) if whole else min(batch_size or len(targets), sums.together)
                part = slice(start, start + size)
                f = sums.add(inputs if whole else inputs[part], targets[part])
                with torch.no_grad():  # of the targets as they are given
                    raw = model.raw(f) if isinstance(model, Standardised) else f
                    p = model.likelihood.distribution(raw)
                    log_likelihood += p.log_prob(model.likelihood.checked(raw, y[part].to(f.device))).to(F64).sum()
                start += size
    if sums is None:
        raise ShapeError("a Laplace approximation needs at least one data point; the DataLoader gave none.")
    return sums, log_likelihood, seen


def _noise(model: Any, log_likelihood: Tensor, numbers: float) -> dict[str, Tensor]:
    """Return the precision of Gaussian noise, how many numbers the targets have, and Σ τ(y - f)²; {} without it."""
    if not is_one_of(model.likelihood, Gaussian):
        return {}
    # log p(y | f) = ½ Σ (log τ - log 2π - τ(y - f)²), with τ in the units of y
    constant = numbers * (model.likelihood.log_tau.detach().to(log_likelihood).mean() - math.log(2 * math.pi))
    squares = (constant - 2 * log_likelihood).clamp_min(0)
    return {"tau": network_in(model).likelihood.tau, "numbers": torch.tensor(numbers), "squares": squares}


def _sums(structure: Structure, net: Any, weights: Weights, x: AnyInputs) -> Sums:
    """Return what adds up the curvature of a structure; ``x`` are some data."""
    net.look_at(x)
    check_no_noise(net, ASKER)
    trial = x if takes_all(net) else x[:32]
    with torch.no_grad():
        f, again = (net.evaluate(weights, trial) for _ in range(2))
    if not torch.equal(f, again):
        raise PyroDropoutError(
            f"{ASKER} needs a network that gives the same output for the same weights, but two runs of this one differ:"
            " it draws random numbers, in evaluation mode too. Use a network without them."
        )
    check_single_points(net, x)
    sites, linear = list(weights), False
    if structure == "last":
        with torch.no_grad():
            found = last_layer(net, weights, x if takes_all(net) else x[:2])
        sites, linear = list(found.sites), found.linear
    kind, groups = groups_of(structure, {name: weights[name].shape for name in sites})
    for group in groups if kind is Dense else ():
        size = sum(shape.numel() for shape in group.values())
        if size > _LARGEST:
            raise PyroDropoutError(
                f"structure={structure!r} needs a matrix over {size:,} weights ({', '.join(list(group)[:3])}, ...), of"
                f" {8 * size**2 / 1e9:,.0f} GB; the most is {_LARGEST:,}. Use structure='kron' or 'last'."
            )
    # Sites that stay points may be most of a large network; nothing is made of their priors.
    precisions = {name: base_distribution(net.prior_of(name)).scale.detach().to(F64).pow(-2) for name in sites}
    if kind is Kronecker:
        return KroneckerSums(net, weights, f.shape[-1], groups, precisions)
    return JacobianSums(net, weights, f.shape[-1], [kind(group, precisions) for group in groups], x, linear)


def _warn_unless_trained(guide: AutoLaplace, gradient: Mapping[str, Tensor]) -> None:
    """Warn if a Newton step would take the point far, in posterior standard deviations."""
    squared = guide.curvature.squared_length(gradient).item()
    size = sum(block.size() for block in guide.curvature)
    if squared > max(4.0, 0.1 * size):  # two nats, and a third of a standard deviation each
        warn_caller(
            "the point of this Laplace approximation is not a maximum of the posterior: a Newton step from it would"
            f" move the weights by {(squared / size) ** 0.5:.2g} posterior standard deviations (root mean square) and"
            f" raise log p(y, w) by about {squared / 2:.3g}. Train it for longer, with a smaller learning rate at the"
            " end.",
        )


# --- at the end of a training -----------------------------------------------------------------------------------------


@contextmanager
def as_points(model: PyroModel, guide: object, loss: object) -> Iterator[None]:
    """Within this context an ``AutoLaplace`` is points; raise if its structure does not describe the model.

    If the context ends with an error and the points are where they were, their curvature is that of before.
    """
    if not isinstance(guide, AutoLaplace):
        yield
        return
    temperature = getattr(loss, "temperature", 1.0)
    if not callable(temperature) and temperature != 1.0:
        raise PyroDropoutError(
            f"AutoLaplace is a Gaussian at the maximum of the posterior, and with ELBO(temperature={temperature:g}) the"
            " maximum is elsewhere. Leave temperature out, or give a schedule that ends at 1, such as warm_up(1000)."
        )
    if not all(hasattr(model, name) for name in ("evaluate", "prior_of", "likelihood")):
        raise PyroDropoutError(
            f"AutoLaplace needs the BayesianNet that it was made with; got {type(model).__name__}, whose curvature is"
            " not known."
        )
    if guide.structure == "kron":
        net = network_in(model)
        layers_of(net, list(net.sites))
    before = guide.curvature if guide.finished else None
    points = {name: value.clone() for name, value in guide.point().items()}
    guide.set_curvature(None)
    try:
        yield
    except BaseException:
        if not guide.finished and all(torch.equal(value, points[name]) for name, value in guide.point().items()):
            guide.set_curvature(before)
        raise


def finish_on(
    guide: object,
    call: ModelCall,
    loader: DataLoader[Any] | None = None,
    target: Target = None,
    batch_size: int | None = None,
    held_out: ModelCall | None = None,
) -> None:
    """Add the curvature of a call's data, or of a loader's, to an ``AutoLaplace``; held-out data tune its width."""
    if isinstance(guide, AutoLaplace):
        x, y, *number = call.args
        batches = batches_of(call.model, x, y) if loader is None else batches_of(call.model, loader, None, target)
        num_data = number[0] if number else call.kwargs.get("num_data")
        validation = None if held_out is None else held_out.args
        finish(guide, call.model, batches, batch_size=batch_size, num_data=num_data, validation=validation)
