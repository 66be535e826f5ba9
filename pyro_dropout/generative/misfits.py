"""Data and outputs that do not fit a model: data that are not finite, and probabilities where logits are taken.

A training on data that are not finite diverges at its first step, whatever the learning rate is. But a Pyro model may
hold them and never use them: it masks them, or puts latent values in their places, or has no bound on one side. So it
is refused only if they leave its observed sites without a density.
"""

import math
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pyro
import torch
from pyro import poutine
from torch import Tensor, nn

from pyro_dropout.engines.torch_internals import keystr, tree_flatten_with_path
from pyro_dropout.errors import RangeError, warn_caller
from pyro_dropout.generative.likelihoods import Bernoulli, Categorical
from pyro_dropout.generative.model_call import ModelCall, signature_of
from pyro_dropout.generative.networks import BayesianNet
from pyro_dropout.generative.observed_sites import log_density, observed_sites
from pyro_dropout.generative.standardised import network_in
from pyro_dropout.generative.trial_run import checked_with, quietly
from pyro_dropout.mathematics.checks import check_data_finite, check_held
from pyro_dropout.protocols import Tree

_RUNS = 5  # draws from the prior, one of which has a density if the data can have one
_ROUNDING = 1e-2  # of a sum of probabilities, in half precision too
_FEW = 10  # logits, which may all lie in [0, 1] by chance
_TWICE = "but {} takes logits and makes probabilities of them itself: "


def check_call_finite(call: ModelCall) -> None:
    """Raise if numbers among a model's arguments are not finite, and its data have no density for that reason.

    Random states and parameters are left unchanged. The model is run only if there are such numbers.
    """
    wrong = [(name, leaf) for name, leaf in _named_leaves(call) if not bool(leaf.isfinite().all())]
    if not wrong or any(_has_density(call) for _ in range(_RUNS)):
        return
    for name, leaf in wrong:
        check_data_finite(name, leaf)


def _has_density(call: ModelCall) -> bool:
    """Whether log p(y | w) is finite at a draw of w from the prior."""
    try:
        with torch.no_grad(), quietly(call.model), pyro.get_param_store().scope(), poutine.block():
            sites = observed_sites(call.of(poutine.trace(call.model).get_trace)).values()
            return all(bool(log_density(site).isfinite()) for site in sites)
    except (ValueError, RuntimeError, RangeError):  # distributions reject such parameters and such values
        return False


def _named_leaves(call: ModelCall) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors in the arguments, with the name of the argument that each is in."""
    known = signature_of(call.model)
    given: dict[Any, Tree] = dict(enumerate(call.args)) | call.kwargs
    with suppress(TypeError):  # the arguments do not fit, which the run of the model will say
        given = given if known is None else known.bind(*call.args, **call.kwargs).arguments
    for name, value in given.items():
        for path, leaf in tree_flatten_with_path(value)[0]:
            check_held(f"{name}{keystr(path)}", leaf)
            if isinstance(leaf, Tensor) and leaf.layout is torch.strided:
                yield f"{name}{keystr(path)}", leaf


def warn_of_probabilities(model: object, f: Tensor) -> None:
    """Warn, once for a model, if its outputs f, (..., N, D), are probabilities where its likelihood takes logits."""
    net = network_in(model)
    if not isinstance(net, BayesianNet) or "probabilities" in checked_with(net):
        return
    likelihood = net.likelihood
    if isinstance(likelihood, Categorical) and _sums_to_one(likelihood.logits(f)):
        most = math.e / (math.e + likelihood.logits(f).shape[-1] - 1)
        what = f"the outputs of the network are at least 0 and sum to one, as those of nn.Softmax do, {_TWICE}"
        advice = f"no class is more probable than {most:.2f}. Leave the softmax out, or write nn.LogSoftmax(-1)."
    elif isinstance(likelihood, Bernoulli) and _ends_in_sigmoid(net.net, f):
        what = f"the network ends in nn.Sigmoid, {_TWICE}"
        advice = "every probability is between 0.5 and 0.73. Leave nn.Sigmoid out, or write nn.Identity() in its place."
    else:
        return
    checked_with(net).add("probabilities")
    warn_caller(what.format(type(likelihood).__name__) + advice)


def _sums_to_one(f: Tensor) -> bool:
    """Whether all outputs of several classes, (..., C), are probabilities."""
    return f.shape[-1] > 1 and bool((f >= 0).all()) and bool(((f.sum(-1) - 1).abs() <= _ROUNDING).all())


def _ends_in_sigmoid(net: nn.Module, f: Tensor) -> bool:
    """Whether outputs are those of a sigmoid layer; outside ``nn.Sequential``, the last module may not be the end."""
    last = list(net.modules())[-1]
    if type(last) is not nn.Sigmoid or not bool(((f >= 0) & (f <= 1)).all()):
        return False
    while isinstance(net, nn.Sequential):
        net = net[-1]
    return net is last or f.numel() >= _FEW
