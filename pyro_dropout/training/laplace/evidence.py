"""Noise and prior widths without cross-validation: those under which the data are most probable (MacKay 1992).

Rounds alternate: train the point with the present settings, measure the curvature there, and move τ and the width of
each site's prior along the slope of the evidence.

The point moves with the precisions, by dw = Λ⁻¹ (∂²log p(y, w)/∂w∂θ) dθ, with the Gauss-Newton Λ. At a maximum
log p(y, w) does not notice, but the curvature does: it is that of another point. Without this part, which MacKay's
fixed points leave out, one layer's weights grow while another's shrink, and the fit follows the noise.
"""

import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from pyro_dropout.errors import PyroDropoutError, warn_caller
from pyro_dropout.generative.inputs import check_inputs, inputs_of, takes_all
from pyro_dropout.generative.likelihoods import Gaussian
from pyro_dropout.generative.likelihoods.moments import is_one_of
from pyro_dropout.generative.networks import BayesianNet
from pyro_dropout.generative.process_state import one_at_a_time
from pyro_dropout.generative.standardised import Standardised, network_in
from pyro_dropout.generative.trial_run import evaluating
from pyro_dropout.guides.laplace import MOST, AutoLaplace, Structure
from pyro_dropout.mathematics.checks import check_count, check_positive
from pyro_dropout.mathematics.curvature import NOISE, log_evidence, precisions_of
from pyro_dropout.mathematics.curvature_blocks import F64
from pyro_dropout.mathematics.shapes import base_distribution
from pyro_dropout.protocols import Weights
from pyro_dropout.training.laplace.curvature import data_inside
from pyro_dropout.training.laplace.laplace import batches_of, measured, weights_at

Tuned = Literal["tau", "length_scales"]
_PATIENCE = 4  # rounds in succession without a gain
_SHORTEST = 0.5  # part of a step


@dataclass(frozen=True)
class Evidence:
    """What ``maximise_evidence`` found.

    Attributes:
        guide: the Laplace approximation with the best settings.
        log_evidence: its log p(D).
        tau: the precision of the noise, as ``Gaussian`` takes it; None without Gaussian noise.
        length_scales: l of the prior N(0, l⁻²) of each Gaussian site, as ``Prior`` takes it.
        trace: the log evidence of every round.

    Example:
        >>> import torch, pyro_dropout as pdrop
        >>> x = torch.linspace(-1, 1, 20).unsqueeze(-1)
        >>> model = pdrop.BayesianNet(torch.nn.Linear(1, 1), likelihood=pdrop.Gaussian(tau=1.0))
        >>> y = x + 0.1 * torch.sin(40 * x)
        >>> found = pdrop.training.maximise_evidence(model, x, y, tune=["tau"], progress=False)
        >>> sorted(found.length_scales), found.log_evidence == max(found.trace)
        (['bias', 'weight'], True)
    """

    guide: AutoLaplace = field(repr=False)
    log_evidence: float
    tau: float | Tensor | None
    length_scales: dict[str, float | Tensor]
    trace: tuple[float, ...] = field(repr=False)


@one_at_a_time
def maximise_evidence(
    model: BayesianNet | Standardised,
    x: object,
    y: Tensor,
    structure: Structure | None = None,
    *,
    tune: Sequence[Tuned] | None = None,
    rounds: int = 30,
    steps: int = 200,
    first_steps: int = 1000,
    tolerance: float = 0.5,
    progress: bool = True,
) -> Evidence:
    """Find the noise precision τ and the width of each site's prior under which the data are most probable.

    No data are held back. Each round trains the point, measures the curvature there, and moves τ and the precisions of
    the priors along the slope of the evidence, each by less than a factor of e. The slope counts that the point and its
    curvature move too. Steps are half as long after a round that does not raise the evidence. The search ends after
    four rounds that together raise it by less than ``tolerance``, and the best round counts.

    The model has the best settings afterwards, so that ``predict(model, result.guide, x)`` needs nothing else. To
    ``load`` a file into a new model, make that with ``Gaussian(result.tau)``.

    Args:
        model: a ``BayesianNet``, or one inside ``Standardised``. Its τ and widths are where the search starts; they are
            set whether or not they were meant to be learned.
        x: the training inputs, (N, ...).
        y: the training targets.
        structure: of the curvature, as in ``AutoLaplace``; by default "full" up to 4,096 weights and "kron" above. The
            structure "last" would have other layers as points, which fit the noise and raise its evidence.
        tune: what to set: "tau", "length_scales", or both, which is the default; models without ``Gaussian`` noise have
            no τ. If it has one number for each output, all change by the same factor.
        rounds: the most rounds.
        steps: the most steps of L-BFGS in a round, each with all data.
        first_steps: the same in the first round.
        tolerance: the least gain of log p(D) in four rounds that counts, in nats.
        progress: whether to show the rounds.

    Returns:
        The guide, the settings, and the evidence of every round.

    Example:
        >>> import torch, pyro_dropout as pdrop
        >>> _ = torch.manual_seed(0)
        >>> x = torch.linspace(-1, 1, 60).unsqueeze(-1)
        >>> y = 2 * x + 0.2 * torch.randn(60, 1)  # noise of precision 25
        >>> model = pdrop.BayesianNet(torch.nn.Linear(1, 1), likelihood=pdrop.Gaussian(tau=1.0))
        >>> found = pdrop.training.maximise_evidence(model, x, y, progress=False)
        >>> bool(15 < found.tau < 40), abs(model.likelihood.tau.item() / found.tau - 1) < 1e-6
        (True, True)
    """
    net = network_in(model)
    if not isinstance(net, BayesianNet):
        raise PyroDropoutError(f"model must be a BayesianNet, or one inside Standardised; got {type(model).__name__}.")
    for name, value in (("rounds", rounds), ("steps", steps), ("first_steps", first_steps)):
        check_count(name, value)
    check_positive("tolerance", tolerance)
    if structure == "last":
        raise PyroDropoutError(
            "structure='last' has points in all layers but one, and points fit the noise: their evidence grows with"
            " tau. Use 'kron', or freeze the other layers with BayesianNet(net, only=...)."
        )
    if structure is None:
        structure = "full" if sum(net.prior_of(name).event_shape.numel() for name in net.sites) <= MOST else "kron"
    known = ("tau", "length_scales") if is_one_of(net.likelihood, Gaussian) else ("length_scales",)
    wanted = set(known) if tune is None else {tune} if isinstance(tune, str) else set(tune)
    if not wanted or not wanted <= set(known):
        raise PyroDropoutError(
            f"tune must hold {' or '.join(map(repr, known))}, for a likelihood of the kind"
            f" {type(net.likelihood).__name__}; got {tune!r}."
        )
    batches_of(model, check_inputs(x, whole=takes_all(model)), y)  # raises unless they are data

    weights = weights_at(model, model)
    tau = _number(net.likelihood.tau.detach()) if is_one_of(net.likelihood, Gaussian) else None
    best: tuple[float, Weights, Any, dict[str, Tensor]] | None = None
    trace, idle, way, anchor = list[float](), 0, 1.0, -math.inf
    with _restored_on_error(net):
        with tqdm(total=rounds, disable=not progress, unit="round") as bar, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of points beside the maximum: the best one is looked at again
            for number in range(rounds):
                weights = most_probable(model, x, y, weights, steps if number else first_steps)
                guide = measured(model, weights, x, y, structure)
                trace.append(guide.log_evidence().item())
                bar.update()
                bar.set_postfix_str(f"log evidence {trace[-1]:.1f}")
                gain = trace[-1] - (-math.inf if best is None else best[0])
                if best is None or gain > 0:
                    best = trace[-1], weights, tau, _copied(net.state_dict())
                way = min(1.0, 2 * way) if gain >= tolerance else way if gain > 0 else max(_SHORTEST, way / 2)
                idle += 1
                if trace[-1] - anchor >= tolerance:  # in one round, or in several that count together
                    idle, anchor = 0, trace[-1]
                if idle == _PATIENCE or number == rounds - 1:
                    break
                names = [NOISE] * ("tau" in wanted) + sites_of(guide) * ("length_scales" in wanted)
                slope = evidence_slope(model, guide, x, y, names)
                tau = _changed(net, tau, {name: way * step for name, step in uphill(guide, slope).items()})
        assert best is not None
        found, weights, tau, state = best
        net.load_state_dict(state)
        guide = measured(model, weights, x, y, structure)
    if idle < _PATIENCE:
        warn_caller(f"log p(D) may rise further: the search ended after {rounds} rounds. Give more.")
    lengths = {name: _number(1 / net.prior_scale(name).to(F64)) for name in sites_of(guide)}
    return Evidence(guide, found, tau, lengths, tuple(trace))


@contextmanager
def _restored_on_error(net: BayesianNet) -> Iterator[None]:
    """Take priors at full weight, as the evidence is that of the model itself; an error leaves the model as it was."""
    start, tempered = _copied(net.state_dict()), net.take_in_full()
    try:
        yield
    except BaseException:
        net.load_state_dict(start)
        net.take_in_full(tempered)
        raise


def _changed(net: BayesianNet, tau: Any, logs: dict[str, float]) -> Any:
    """Change the log precisions of the noise and of priors by this much, and return the new τ."""
    with torch.no_grad():
        if is_one_of(net.likelihood, Gaussian) and NOISE in logs:
            tau = tau * math.exp(logs[NOISE])
            net.likelihood.log_tau.copy_(Gaussian(tau).log_tau)  # as it is in a model that is made with this τ
        scales = {name: net.prior_scale(name) * math.exp(-0.5 * log) for name, log in logs.items() if name != NOISE}
        net.set_prior_scales(scales)
    return tau


def sites_of(guide: AutoLaplace) -> list[str]:
    """Return the sites that have a Gaussian."""
    return [name for block in guide.curvature for name in block.shapes]


def _copied(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in state.items()}


def _number(value: Any) -> Any:
    """Return a float for a tensor of one number; anything else as it is."""
    return value.item() if isinstance(value, Tensor) and value.numel() == 1 else value


# --- the slope --------------------------------------------------------------------------------------------------------

_NEAR = 0.2  # the change of a log precision over which the curvature is compared: many kinks of ReLU, if there are any
_POINTS = 1000  # data for that comparison
_FLOOR = 1.0  # nats: slopes below it are uncertain


def evidence_slope(model: Any, guide: AutoLaplace, x: object, y: Tensor, names: list[str]) -> dict[str, float]:
    """Return the slope of log p(D) in log precisions, of a point that is trained again wherever they change.

    The guide is at a maximum of the posterior; the names are those of sites, and "tau" for the noise.
    """
    curvature, weights = guide.curvature, guide.mean()
    zeros = torch.zeros(len(names), dtype=F64, requires_grad=True)
    with torch.enable_grad():
        value = log_evidence(curvature, weights, dict(zip(names, zeros.unbind(), strict=True)))
        (slope,) = torch.autograd.grad(value, zeros)
    pulls = {name: weights[name].to(F64) * precision for name, precision in precisions_of(curvature).items()}
    x, y, num_data = _some(model, x, y)

    def log_det(moved: Weights) -> float:
        there = measured(model, {**weights, **moved}, x, y, guide.structure, num_data)
        return there.curvature.log_det().item()

    through = {}  # the slope of -½ log det through the point
    for name in pulls:
        # A precision pulls by v = -Pw, and Λ⁻¹ v is the slope of ½ vᵀ Λ⁻¹ v.
        leaves = {n: (-pull * (n == name)).requires_grad_() for n, pull in pulls.items()}
        with torch.enable_grad():
            moves = torch.autograd.grad(0.5 * curvature.squared_length(leaves), list(leaves.values()))
        move = dict(zip(leaves, moves, strict=True))
        high, low = (
            log_det({n: (weights[n] + sign * _NEAR * d).to(weights[n]) for n, d in move.items()}) for sign in (1, -1)
        )
        through[name] = -0.25 * (high - low) / _NEAR
    through[NOISE] = -sum(through.values())  # at a maximum the log-likelihood pulls by Pw, in proportion to τ
    return {name: explicit + through[name] for name, explicit in zip(names, slope.tolist(), strict=True)}


def uphill(guide: AutoLaplace, slope: Mapping[str, float]) -> dict[str, float]:
    """Return a step of the log precisions along a slope g of the evidence, of less than 1 each.

    With c = P‖w‖² of a site or τ‖y - f‖² of the noise, the evidence bends by c/2 in a log precision at MacKay's fixed
    points, so the step is g/(c/2) where that is small.
    """
    curvature, weights = guide.curvature, guide.mean()
    sizes = {name: (p * weights[name].to(F64).square()).sum() for name, p in precisions_of(curvature).items()}
    if curvature.squares is not None:
        sizes[NOISE] = curvature.squares
    return {name: rise / (abs(rise) + 0.5 * sizes[name].item() + _FLOOR) for name, rise in slope.items()}


def _some(model: Any, x: object, y: Tensor) -> tuple[object, Tensor, int | None]:
    """Return some of the data, at equal distances, and how many they stand for."""
    if takes_all(model) or len(y) <= _POINTS:
        return x, y, None
    rows = torch.linspace(0, len(y) - 1, _POINTS).long()
    return inputs_of(x)[rows], y[rows.to(y.device)], len(y)


# --- the point --------------------------------------------------------------------------------------------------------

_FLAT = 0.01  # a slope, in units of the prior, where it ends
_CHANGE = 1e-7  # of the weights or of log p(y, w) in a step, where it cannot go on
_PAIRS = 30  # of steps and slopes that are remembered
_LR = 0.01  # of Adam, in units of the prior
_KINK = 0.1  # a slope where it has ended, but not at a maximum
_TOGETHER = 4096  # data that run together


def most_probable(model: Any, x: object, y: Tensor, weights: Weights, steps: int) -> Weights:
    """Return weights where log p(y, w) of all data has a maximum, uphill from given ones, in so many steps at most.

    L-BFGS on all data takes far fewer steps than Adam. Weights are in units of their prior, in which the prior bends
    equally in all directions. Networks with ReLU have kinks, where no direction has a slope that holds for long and
    L-BFGS stops; Adam goes on along them.

    The model is a ``BayesianNet``, or one inside ``Standardised``. Its ordinary parameters, and those of its likelihood
    other than τ, are trained where they are.
    """
    with evaluating(model):
        net, inputs, targets = data_inside(model, weights, x, y)
    scales = {name: base_distribution(net.prior_of(name)).scale for name in weights}
    beside = dict(net.likelihood.named_parameters()) if isinstance(net.likelihood, nn.Module) else {}
    beside.pop("log_tau", None)
    ordinary = [*net.hidden_parameters().values(), *beside.values()]
    # In float32 the search for a step length ends in rounding; a network without other tensors runs in any type.
    if isinstance(inputs, Tensor) and inputs.is_floating_point() and not [*ordinary, *net.net.buffers()]:
        inputs, scales = inputs.to(F64), {name: scale.to(F64) for name, scale in scales.items()}
    units = {name: (value.detach().to(scales[name]) / scales[name]).requires_grad_() for name, value in weights.items()}
    values = [*units.values(), *(value for value in ordinary if value.requires_grad)]
    climber = torch.optim.LBFGS(
        values, max_iter=steps, history_size=_PAIRS, line_search_fn="strong_wolfe", tolerance_grad=_FLAT,
        tolerance_change=_CHANGE,
    )  # fmt: skip
    together = len(targets) if takes_all(net) else _TOGETHER

    def surprise() -> Tensor:
        climber.zero_grad()
        found = 0.5 * torch.stack([value.square().sum() for value in units.values()]).sum()
        found.backward()
        for start in range(0, len(targets), together):
            part = slice(start, start + together)
            own = inputs if together >= len(targets) else inputs[part]
            f = net.evaluate({name: value * scales[name] for name, value in units.items()}, own)
            missed: Tensor = -net.likelihood.distribution(f).log_prob(net.likelihood.checked(f, targets[part])).sum()
            missed.backward()
            found = found + missed
        return found.detach()

    with evaluating(model), torch.enable_grad():
        climber.step(surprise)
        stopped = climber.state[values[0]]["n_iter"] < steps
        surprise()
        if stopped and max(float(value.grad.abs().max()) for value in values if value.grad is not None) > _KINK:
            walker = torch.optim.Adam(values, lr=_LR)
            falling = torch.optim.lr_scheduler.CosineAnnealingLR(walker, steps)
            for _ in range(steps):
                surprise()
                walker.step()
                falling.step()
        climber.zero_grad()
    return {name: (value.detach() * scales[name]).to(weights[name]) for name, value in units.items()}
