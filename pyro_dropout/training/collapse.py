"""Whether a trained posterior ignores its inputs: the check that ends every training of a network.

Where the KL outweighs the likelihood, q falls back on the prior, and every prediction is a constant. Three things then
hold together. On the training data the posterior is no better than the best constant prediction. A layer passes nothing
on: its gain, how much of an input of size one arrives at its output beside the noise of its weights,
√(Σ E[w]²/K) / √(1 + Σ Var[w]/K) for K outputs, is near zero; a network that has just been initialised has about 0.6.
And the prior asks for more than the data can pay: in layers with a gain of 1/2 it costs Σ T K/(8σ²) nats, at a
temperature T, while a data point is worth about one.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from pyro import poutine
from torch import Tensor

from pyro_dropout.errors import IgnoredInputsWarning, warn_caller
from pyro_dropout.generative.gaussian_processes import DeepGP
from pyro_dropout.generative.inputs import inputs_of
from pyro_dropout.generative.model_call import ModelCall
from pyro_dropout.generative.networks import BayesianNet
from pyro_dropout.generative.process_state import forked
from pyro_dropout.generative.standardised import Standardised, network_in
from pyro_dropout.generative.trial_run import evaluating, quietly
from pyro_dropout.guides.base import SiteGuide
from pyro_dropout.guides.ensemble import Ensemble
from pyro_dropout.guides.summary import note_of, note_training
from pyro_dropout.protocols import Weights
from pyro_dropout.training.loss.temperature import is_point, share_of_data

Asked = BayesianNet | DeepGP
_POINTS, _DRAWS, _MEMBERS = 512, 16, 4  # the most that are looked at
_GAIN, _NO_GAIN = 0.05, 0.02  # a layer passes nothing on; nor does it by chance
_BETTER, _BY_CHANCE = 0.02, 0.1  # nats per point over a constant: for having learned, or for 16 lucky draws


@dataclass(frozen=True)
class Learned:
    """What a posterior has learned from its training data.

    Attributes:
        gains: how much each weight layer passes on; a layer of mere noise or zeros has 0.
        price: the nats that the prior asks for layers that pass half of their inputs on.
        num_data: N.
        log_likelihood: mean log predictive density of the targets, of up to 512 training points; None where the gains
            say enough.
        constant: that of the best constant prediction.
    """

    gains: dict[str, float]
    price: float
    num_data: int
    log_likelihood: float | None = None
    constant: float | None = None

    @property
    def shut(self) -> list[str]:
        """The layers that pass nothing on, where the prior may be the reason."""
        return [name for name, gain in self.gains.items() if gain < _GAIN and self.price > self.num_data]

    @property
    def ignores_inputs(self) -> bool:
        """Whether it predicts a constant, because the prior keeps a layer from passing anything on."""
        if self.log_likelihood is None or self.constant is None:
            return False
        better = _BY_CHANCE if min(self.gains.values(), default=1.0) < _NO_GAIN else _BETTER
        return bool(self.shut) and self.log_likelihood < self.constant + better

    def sentence(self, net: Asked) -> str:
        """Say that the posterior ignores its inputs: which layers of the network, why, and what to type instead."""
        numbers = sum(_numbers_of(net).values())
        advice = "Leave the prior out, as in BayesianNet(net, likelihood=...), or write Prior(..., tempered=True)."
        if isinstance(net, DeepGP):
            advice = "Try a guide whose weights have widths, such as AutoMeanField, or a BayesianNet of these layers."
        elif net.prior.tempered:
            advice = "Train longer, or start over with a smaller learning rate."
        return (
            f"the posterior ignores its inputs: on the training data its log-likelihood is {self.log_likelihood:.3f}"
            f" per point, and that of the best constant is {self.constant:.3f}. Nothing passes {', '.join(self.shut)},"
            f" because the prior of {numbers:,} weights outweighs {self.num_data:,} data. {advice}"
        )


def learned_from(model: object, posterior: object, x: Any, y: Tensor, num_data: int | None = None) -> Learned | None:
    """Return what a posterior has learned from (x, y), of N data; None for those that cannot be asked.

    Random numbers, running statistics and the mode of the network stay as they are. It is run only where a layer is
    shut.
    """
    net = _asked(model)
    if net is None or not isinstance(posterior, SiteGuide | Ensemble):
        return None
    x, count = inputs_of(x), len(y) if num_data is None else int(num_data)
    with torch.no_grad(), forked():
        found = Learned(*_gains(net, posterior, count), count)
    if not found.shut:
        return found
    if isinstance(model, Standardised):
        x, y = model.standard_x(x), model.standard_y(y)
    rows = torch.linspace(0, len(y) - 1, min(len(y), _POINTS), device=y.device).long()
    x, y = x[rows], y[rows]
    with torch.no_grad(), forked(), quietly(net), evaluating(net):
        draws = ({name: value[0] for name, value in posterior.sample_weights(1).items()} for _ in range(_DRAWS))
        outputs = [_outputs(net, weights, x) for weights in draws]
        each = [_log_prob(net, f, y) for f in outputs]
    log_likelihood = torch.stack(each).logsumexp(0) - math.log(_DRAWS)
    with forked():
        constant = _best_constant(net, outputs[0], y)
    return replace(found, log_likelihood=float(log_likelihood.mean()), constant=constant)


def _asked(model: object) -> Asked | None:
    """Return the network of a model that can be asked: its arguments are x, y and N."""
    net = network_in(model)
    if isinstance(net, DeepGP):
        return net if net.space == "weight" else None
    return net if isinstance(net, BayesianNet) and not net.whole_batch else None


def _numbers_of(net: Asked) -> dict[str, int]:
    """Return how many numbers each site has."""
    if isinstance(net, DeepGP):
        return {name: math.prod(shape) for name, shape in net.sites.items()}
    return {name: net._parameter(name).numel() for name in net.sites}


def _outputs(net: Asked, weights: Weights, x: Any) -> Tensor:
    """Return f at x."""
    if isinstance(net, BayesianNet):
        return net.evaluate(weights, x)
    found: Tensor = poutine.condition(net, data=weights)(x)
    return found


def note_learned(model: object, guide: object, call: ModelCall) -> tuple[Learned | None, str]:
    """Return what a guide that has just been trained has learned, and a sentence if it ignores its inputs.

    The guide remembers the sentence, and ``predict`` repeats it. If the check cannot be made, the sentence says so, and
    the guide does not remember it.
    """
    net = _asked(model)
    if net is None or len(call.args) < 2 or not isinstance(call.args[1], Tensor):
        return None, ""
    try:
        found = learned_from(model, guide, *call.args[:3])
    except Exception as cause:  # a training that has succeeded must not fail, whatever a likelihood or a layer raises
        return None, (
            f"whether the posterior ignores its inputs could not be checked ({type(cause).__name__}: {cause}). The"
            " training itself is done. Look at the predictions at two different inputs: they should differ."
        )
    if found is None or not found.ignores_inputs:
        return found, ""
    told = found.sentence(net)
    note_training(guide, note_of(guide), ignores=told)
    return found, told


def warn_of_replicas(
    replicas: Sequence[tuple[Any, Any]], trained: Iterable[int], data: Callable[[int], tuple[Any, Tensor]]
) -> None:
    """Let those replicas of a fleet that ignore their inputs remember it, and warn of the first, and of a failed check.

    ``trained`` are the numbers of those that have not diverged, and ``data`` returns what a replica was trained on.
    """
    told: dict[type[Warning], list[str]] = {IgnoredInputsWarning: [], UserWarning: []}
    for k in trained:
        model, guide = replicas[k]
        place = next(guide.parameters()).device
        learned, said = note_learned(model, guide, ModelCall(model, data(k)).trainable().to(place))
        if said:
            told[UserWarning if learned is None else IgnoredInputsWarning].append(f"number {k}: {said}")
    for kind, found in told.items():
        if found:
            warn_caller(f"{len(found)} of {len(replicas)} replicas, {found[0]}", kind)


def _log_prob(net: Asked, f: Tensor, y: Tensor) -> Tensor:
    """Return log p(y | f) of each point."""
    found: Tensor = net.likelihood.distribution(f).log_prob(net.likelihood.checked(f, y))
    return found


def _best_constant(net: Asked, f: Tensor, y: Tensor) -> float:
    """Return the largest mean log-likelihood that outputs without inputs reach, by L-BFGS from the mean of some."""
    constant = f.mean(0, keepdim=True).double().nan_to_num().requires_grad_()
    search = torch.optim.LBFGS([constant], max_iter=100, line_search_fn="strong_wolfe")

    def surprise() -> Tensor:
        search.zero_grad()
        value = -_log_prob(net, constant.expand(f.shape).to(f.dtype), y).mean()
        value.backward()
        return value.detach()

    with torch.enable_grad():
        search.step(surprise)
        return -float(surprise())


def _gains(net: Asked, posterior: SiteGuide | Ensemble, count: int) -> tuple[dict[str, float], float]:
    """Return how much each weight layer passes on, in the member that passes most, and the price of half of it.

    One site is looked at after another: of a large network there is no room for all.
    """
    sizes, inputs = _numbers_of(net), _inputs_of(net)
    # The layers of a deep Gaussian process have weights of one width, and divide what they pass on.
    shrunk = {name: 1 / inputs[name] if isinstance(net, DeepGP) and name != "W1" else 1.0 for name in inputs}
    gains, points = dict.fromkeys(inputs, 0.0), set[str]()
    members, times = min(posterior.members, _MEMBERS) if isinstance(posterior, Ensemble) else 1, 1.0
    for member in range(members):
        with posterior.as_member(member) if isinstance(posterior, Ensemble) else nullcontext(posterior) as guide:
            times = guide.penalty
            for name in net.sites:
                q = guide.posterior(name)
                points |= {name} if is_point(q) else set()
                if name in inputs:
                    per_output = shrunk[name] * inputs[name] / sizes[name]
                    signal, noise = torch.linalg.vector_norm(q.mean) ** 2 * per_output, q.variance.sum() * per_output
                    gains[name] = max(gains[name], float((signal / (1 + noise)).sqrt()))
                del q
    numbers, price = sum(size for name, size in sizes.items() if name not in points), 0.0
    for name, fan_in in inputs.items():
        how = net.tempered(name, count) if isinstance(net, BayesianNet) else None
        heat = 1.0 if how is None else how.of_point(times) if name in points else share_of_data(how, numbers)
        std = net.prior_scale(name) if isinstance(net, BayesianNet) else net.get_buffer(f"{name}_std")
        price += heat * sizes[name] / fan_in / 8 / float(std.double().square().mean()) / shrunk[name]
    return gains, price


def _inputs_of(net: Asked) -> dict[str, int]:
    """Return how many products are summed into one output, of each layer of weights."""
    if isinstance(net, DeepGP):
        return {name: shape[1] for name, shape in net.sites.items() if len(shape) == 2}
    return {name: site.fan_in for name, site in net.sites.items() if site.kind == "weight" and not site.lookup}
