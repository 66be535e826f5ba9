"""The posterior predictive p(y | x) ≈ (1/T) Σ_t p(y | f_t), from T draws of the weights with outputs f_t."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.data import DataLoader, RandomSampler, SubsetRandomSampler, WeightedRandomSampler
from torch.utils.data.distributed import DistributedSampler
from tqdm.auto import tqdm

from pyro_dropout.errors import DivergedError, IgnoredInputsWarning, PyroDropoutError, warn_caller
from pyro_dropout.generative.inputs import AnyInputs, check_inputs, takes_all
from pyro_dropout.generative.likelihoods import Gaussian
from pyro_dropout.generative.misfits import warn_of_probabilities
from pyro_dropout.generative.model_call import ModelCall, call_of, check_keywords, check_programs, is_network
from pyro_dropout.generative.networks import BayesianNet
from pyro_dropout.generative.observed_sites import speaks_by_likelihood
from pyro_dropout.generative.own_noise import noise_of
from pyro_dropout.generative.precision import Precision, check_precision, products_in
from pyro_dropout.generative.process_state import modules_stay, one_at_a_time, seeded
from pyro_dropout.generative.standardised import network_in
from pyro_dropout.guides.ensemble import Ensemble
from pyro_dropout.guides.laplace import AutoLaplace
from pyro_dropout.guides.summary import ignored_inputs
from pyro_dropout.mathematics.checks import (
    also,
    check_choice,
    check_count,
    check_finite,
    check_flag,
    check_seed,
    describe,
)
from pyro_dropout.prediction.linearised import joined, predict_linearised
from pyro_dropout.prediction.predict_network import Keep, Request, keeps, predict_network, shares_draws, walk_of
from pyro_dropout.prediction.prediction import Prediction
from pyro_dropout.prediction.site_prediction import predict_sites
from pyro_dropout.protocols import FunctionPosterior, Posterior, Predictor
from pyro_dropout.training.fit import place_of
from pyro_dropout.training.loader import Target, loader_of, without

_SOUND = "Train again with a smaller lr, or load a sound checkpoint."
_SHOWN = 5  # the most points or names in a message


@also(num_samples="samples")
@one_at_a_time
@modules_stay
def predict(
    model: Predictor,
    posterior: object,
    *args: object,
    samples: int = 1000,
    method: Literal["mc", "standard", "linearised"] = "mc",
    shared: bool = False,
    seed: int | None = None,
    keep_samples: Keep = "auto",
    compile: bool = False,
    precision: Precision = "float32",
    chunk: int | None = None,
    together: int | None = None,
    progress: bool = False,
    target: str | int | None = None,
    **kwargs: object,
) -> Any:
    """Predict a model's outputs or sites at new data, averaged over draws of its posterior.

    For a network, the targets at ``x``: draws are summed as they come, so that memory does not grow with their number,
    and the network runs in evaluation mode. For any other Pyro model, all random sites that the posterior does not
    have, observed or not: one run of the model for each draw.

    Args:
        model: a network of this package, ``model(x)``, which returns its outputs f, (N, D); or any Pyro model.
        posterior: a guide of its latent sites; or a reference that gives whole functions, by ``nuts`` (its draws,
            shuffled, each used once before any is repeated), ``conjugate`` or ``gp_posterior`` (which use only the
            likelihood of the model).
        args: the model's own arguments; for a network x, N data points, first dimension first, or a dict or a tuple of
            such tensors; moved to the model's device. Data to be predicted are left out, as in ``model(x,
            y=None)``. Or a torch ``DataLoader`` that does not shuffle: its batches are predicted one after another, and
            the answer is of all their points, in order.
        samples: the number T of draws.
        method: "mc"; "standard", one pass with the mean weights, without epistemic uncertainty; or "linearised", for
            networks and guides: f(x, w) ≈ f(x, E w) + J(x)(w - E w), a Gaussian with the exact mean and variance of
            the right-hand side, without draws. It suits posteriors that are narrow, and Laplace approximations.
        shared: whether all points share each draw, which is then a whole function. Otherwise every point has its own
            weights in every draw: the answer at each point has the same distribution, and the points' errors are
            independent. References, Pyro models other than networks, and guides whose weights cannot be drawn for each
            point (a guide of your own with a distribution other than ``RowMixture``) always share.
        seed: makes the draws reproducible, and leaves torch's random state as it was. On a GPU give ``chunk`` as well:
            it decides in which order random numbers are used, and is measured if not given.
        keep_samples: whether ``samples`` of the outputs are kept, T·N·D numbers, which densities, covariances and
            intervals need; "auto", when they are few (2²⁶).
        compile: whether to compile the forward passes: about ten seconds for each block shape, worth it in long runs.
            This and the next three options are for networks.
        precision: "bf16" for products of a ``BayesianNet`` in half precision, for speed on a GPU; all sums of
            the answer have more.
        chunk: rows, pairs of a draw and a point, in one forward pass; by default what fits into memory. It is halved
            whenever memory runs out.
        together: draws whose weights are made at once, if all points share them; by default what fits. If it is given,
            the draws of a seed are the same whatever the other points are.
        progress: whether to show a bar.
        target: the part of a ``DataLoader``'s batches that is not an input: a key of dicts, or the index in tuples.
        kwargs: the model's own keyword arguments.

    Returns:
        A ``Prediction``; for a Pyro model that is not a network, a ``SitePrediction``, or a dict of them by site if the
        posterior leaves several sites to predict.

    Example:
        >>> import torch, pyro_dropout as pdrop
        >>> model = pdrop.BayesianNet(torch.nn.Linear(3, 1, bias=False), likelihood=pdrop.Gaussian(tau=4.0))
        >>> guide = pdrop.AutoDropout(model, keep=0.5)
        >>> answer = pdrop.predict(model, guide, torch.ones(5, 3), samples=200, seed=0)
        >>> answer.mean.shape, answer.aleatoric[0].item()
        (torch.Size([5, 1]), 0.25)
        >>> bool((answer.epistemic > 0).all()), answer.log_prob(torch.zeros(5, 1)).shape
        (True, torch.Size([5]))
    """
    check_programs(model, posterior, "posterior")
    loader, x = loader_of(args), None
    if loader is None and target is not None:
        raise PyroDropoutError(f"target is for the batches of a DataLoader; got {target!r} with x.")
    network = loader is not None or isinstance(posterior, FunctionPosterior)
    network = network or speaks_by_likelihood(ModelCall(model, args, kwargs))
    if loader is not None:
        check_keywords(predict, model, kwargs)
    elif network:
        x = _points_of(model, posterior, args, kwargs).to(place_of([model, posterior]))
    else:
        call = call_of(predict, model, args, kwargs)
    check_count("samples", samples)
    for name, count in (("chunk", chunk), ("together", together)):
        if count is not None:
            check_count(name, count)
    check_choice("method", method, ("mc", "standard", "linearised"))
    check_choice("keep_samples", keep_samples, ("auto", True, False))
    check_seed(seed)
    check_flag("compile", compile)
    check_precision(precision, model)
    _check_posterior(model, posterior)
    linearised, ensemble = method == "linearised", posterior if isinstance(posterior, Ensemble) else None
    refused = {
        "a DataLoader for a model that is not a network": loader is not None and not is_network(model),
        "compile=True for a model that is not a network": compile and not network,
        "method='linearised' with compile=True": linearised and compile,
        f"method='linearised' with precision={precision!r}": linearised and precision != "float32",
        "method='linearised' for a model that is not a network": linearised and not network,
        "method='linearised' with shared=True and a DataLoader": linearised and shared and loader is not None,
        "method='standard' with an ensemble, as the mean of its members' weights is none of them": (
            method == "standard" and ensemble is not None and ensemble.members > 1
        ),
    }
    for words, given in refused.items():
        if given:
            raise PyroDropoutError(f"predict does not take {words}; leave it out.")
    if isinstance(posterior, AutoLaplace) and method != "standard" and (doubt := _doubt(model, posterior)):
        warn_caller(doubt)
    if ignored := ignored_inputs(posterior):
        warn_caller(ignored, IgnoredInputsWarning)
    if ensemble is not None and ensemble.points and not noise_of(model):
        samples = min(samples, ensemble.members)  # more would repeat functions, some of them oftener than others
    members = None if ensemble is None else min(ensemble.members, samples)
    count = 1 if method == "standard" else samples
    asked = Request(count, method, shared, seed, keep_samples, compile, chunk, progress, together)
    found: Any
    with products_in(precision), _named(model, posterior):
        if loader is not None:
            found = predict_loader(model, posterior, loader, target, asked)
        elif x is not None:
            found = (predict_linearised if linearised else predict_network)(model, posterior, x, asked)
        else:
            found = predict_sites(call, posterior, asked)
    for answer in found.values() if isinstance(found, dict) else [found]:
        answer.members = members
        _check_numbers(answer, model, posterior)
    if network:
        warn_of_probabilities(model, found.like if found._samples is None else found._samples)
    if shared and (noise := noise_of(model)):  # known once it has run
        warn_caller(
            f"the network's own noise ({', '.join(map(repr, noise))}) is drawn for each point although shared=True: no"
            " draw is one function at all points, and a mean over points varies less than that of a function."
        )
    return found


def _points_of(model: Predictor, posterior: object, args: tuple[object, ...], kwargs: dict[str, object]) -> AnyInputs:
    """Return x, the input of a network, given by position or by name; raise if it is not valid."""
    check_keywords(predict, model, kwargs)
    given = [*args, *kwargs.values()]
    if len(given) != 1 or set(kwargs) - {"x"}:
        got = [*(type(arg).__name__ for arg in args), *(f"{name}=..." for name in kwargs)]
        raise PyroDropoutError(f"a network takes only x, as in predict(model, posterior, x); got {got}.")
    if isinstance(posterior, FunctionPosterior):  # a Gaussian process has no network that could take anything else
        check_finite("x", given[0], data=True)
    return check_inputs(given[0], whole=takes_all(model))


def _doubt(model: object, guide: AutoLaplace) -> str:
    """Return what is wrong with predictions of a Laplace approximation that was not finished, or not for these τ."""
    if not guide.finished:
        return (
            "AutoLaplace has no curvature yet, so it is a point, and this prediction has no uncertainty about the"
            " weights: after SVI, or a loop of your own, write laplace(model, guide, x, y)."
        )
    net = network_in(model)
    then, likelihood = guide.curvature.tau, getattr(net, "likelihood", None)
    if then is None or not isinstance(likelihood, Gaussian) or likelihood.tau.shape != then.shape:
        return ""
    if torch.allclose(likelihood.tau.to(then), then, rtol=1e-4):
        return ""
    return (
        f"the model's noise has tau {likelihood.tau.tolist()} now, and the covariance of this AutoLaplace was measured"
        f" with tau {then.tolist()}. Write laplace(model, guide, x, y) again."
    )


def _check_numbers(answer: Prediction, model: object, posterior: object) -> None:
    """Raise if outputs are not numbers: scores of them would be, and good ones."""
    rows = answer.undefined()
    if not bool(rows.any()):
        return
    which = rows.nonzero().flatten().tolist()
    said = f"the prediction is not a number at {len(which)} of {len(rows)} points ({_some(which)})"
    if names := _not_numbers(model, posterior):
        raise DivergedError(f"{said}: NaN is in {names}. {_SOUND}")
    raise DivergedError(
        f"{said}, and no parameter or statistic is NaN: the network overflows there, or computes a logarithm or a root"
        " of a negative number, or 0/0. Run it on these points alone to see where."
    )


@contextmanager
def _named(model: object, posterior: object) -> Iterator[None]:
    """Within this context, name the parameters that are NaN where a distribution refuses its own."""
    try:
        yield
    except PyroDropoutError:
        raise
    except ValueError as cause:
        if names := _not_numbers(model, posterior):
            raise DivergedError(f"the prediction is not a number: NaN is in {names}. {_SOUND}") from cause
        raise


def _not_numbers(model: object, posterior: object) -> str:
    """Return the names of some parameters and statistics that are NaN, for messages; "" if there are none."""
    parts = [part for part in (posterior, model) if isinstance(part, nn.Module)]
    named = dict(pair for part in parts for pair in (*part.named_parameters(), *part.named_buffers()))
    return _some([name for name, value in named.items() if bool(value.isnan().any())])


def _some(found: list[Any]) -> str:
    """Return the first few of them."""
    return ", ".join(map(repr, found[:_SHOWN])) + ", ..." * (len(found) > _SHOWN)


def _check_posterior(model: object, posterior: object) -> None:
    """Raise unless a posterior can be drawn from, and has weights of the network's shapes: others might run too."""
    if not (callable(posterior) or isinstance(posterior, Posterior | FunctionPosterior)):
        raise PyroDropoutError(
            f"posterior must be a guide, or what nuts, conjugate or gp_posterior give; got {describe(posterior)}."
        )
    # A guide cannot read its model here: without ``y`` it would take y for a weight.
    trace = getattr(posterior, "prototype_trace", posterior)
    if trace is None:
        raise PyroDropoutError(
            f"{type(posterior).__name__} has not seen its model yet: first fit it, or call posterior(x, y) once, with"
            " the data."
        )
    net: object = network_in(model)
    known = getattr(trace, "nodes", {})
    if not isinstance(net, BayesianNet):
        return
    for name in net.sites:
        own = tuple(net.net.get_parameter(name).shape)
        given = tuple(known[name]["value"].shape) if name in known else own
        if own != given:
            raise PyroDropoutError(
                f"the posterior has {name!r} of shape {given}, and the model of shape {own}: is it for this model?"
            )


_SHUFFLED = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)


def predict_loader(
    model: Predictor, posterior: object, loader: DataLoader[Any], target: Target, asked: Request
) -> Prediction:
    """Return the prediction of all points of a loader, in its order; ``target`` is the part of a batch to leave out."""
    _check(model, posterior, loader)
    device, linearised = place_of([model, posterior]), asked.method == "linearised"
    # Points of all batches lie on the same functions if every batch draws the same weights in the same portions.
    shared = shares_draws(posterior, asked) and not linearised
    seed = int(torch.randint(2**62, ())) if shared and asked.seed is None else asked.seed
    rest = replace(asked, seed=seed if shared else None, progress=False)
    found: list[Any] = []
    kept = 0
    with seeded(None if shared else seed, device):
        for batch in tqdm(loader, disable=not asked.progress, unit="batch", desc="predict"):
            if target is None and isinstance(batch, tuple | list) and len(batch) > 1:
                raise PyroDropoutError(
                    f"a batch of the DataLoader has {len(batch)} parts: if one of them is the target, name it, as in"
                    " predict(model, posterior, loader, target=1); if all are inputs, give them as one: ((a, b),)."
                )
            x = check_inputs(without(batch, target), "x of a batch").to(device)
            if shared and rest.together is None:
                rest = replace(rest, together=walk_of(model, posterior, x, rest).together)
            answer = (predict_linearised if linearised else predict_network)(model, posterior, x, rest)
            found.append(answer)
            kept += 0 if answer._samples is None else answer._samples.numel()
            if not keeps(asked.keep_samples, kept):  # all or none
                rest = replace(rest, keep_samples=False)
                for part in found:
                    part._samples = None
    if not found:
        raise PyroDropoutError("the DataLoader gave no batch.")
    if linearised:
        return joined(found, asked)
    first, samples = found[0], None
    if all(part._samples is not None for part in found):
        samples = torch.cat([part.samples for part in found], 1)
    sums = {name: torch.cat([part._sums[name] for part in found]) for name in first._sums}
    return Prediction(first.likelihood, sums, asked.samples, first.like, samples)


def _check(model: Predictor, posterior: object, loader: DataLoader[Any]) -> None:
    """Raise unless a loader gives all its points once and in order, and they can come in batches."""
    wanted = "the DataLoader must give all its data in order, as DataLoader(dataset, shuffle=False) does;"
    # With batch_sampler=..., the sampler of the loader is not the one that is used.
    for sampler in (loader.sampler, getattr(loader.batch_sampler, "sampler", None)):
        shared = isinstance(sampler, DistributedSampler) and (sampler.shuffle or sampler.num_replicas > 1)
        if isinstance(sampler, _SHUFFLED) or shared:
            raise PyroDropoutError(f"{wanted} its sampler is {type(sampler).__name__}.")
    if loader.drop_last or getattr(loader.batch_sampler, "drop_last", False):
        raise PyroDropoutError(f"{wanted} with drop_last=True, some points would have no prediction.")
    if takes_all(model) or isinstance(posterior, FunctionPosterior):
        raise PyroDropoutError("all points are needed at once here, so they cannot come in batches; give predict x.")
