"""Warns of networks that give probabilities to a likelihood that takes logits, and so makes probabilities of them."""

import math

from torch import Tensor, nn

from pyro_dropout.errors import warn_caller
from pyro_dropout.generative.likelihoods import Bernoulli, Categorical
from pyro_dropout.generative.networks import BayesianNet
from pyro_dropout.generative.standardised import network_in
from pyro_dropout.generative.trial_run import checked_with

_ROUNDING = 1e-2  # of a sum of probabilities, in half precision too
_FEW = 10  # logits, which may all lie in [0, 1] by chance


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


_TWICE = "but {} takes logits and makes probabilities of them itself: "


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
