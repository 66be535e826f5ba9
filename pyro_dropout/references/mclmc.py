"""Microcanonical Langevin Monte Carlo: many chains that come close to the posterior for the gradients of an ensemble.

A chain moves at constant speed, and the gradient of the energy U(z) = -log p(y, z) turns its direction u, a unit vector
in d dimensions (Robnik and Seljak, 2024):

    dz = u dt,    du = -(1 - u uᵀ) ∇U(z) / (d - 1) dt + noise that makes it forget its direction within a length L

Without errors of the steps, z would in the long run be distributed as the posterior. No draw is rejected: the step
size keeps the errors of the energy, and with them the bias, small. Chains may start at the members of an ensemble
(Sommer et al., 2025).
"""

import math
import time
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import normalize
from tqdm.auto import tqdm

from pyro_dropout.errors import PyroDropoutError, warn_caller
from pyro_dropout.generative.model_call import ModelCall, call_of
from pyro_dropout.generative.process_state import modules_stay, one_at_a_time, seeded
from pyro_dropout.generative.trial_run import evaluating
from pyro_dropout.mathematics.checks import also, check_count, check_positive, describe
from pyro_dropout.prediction.sampled_posterior import SampledPosterior
from pyro_dropout.prediction.weight_draws import latent_draws
from pyro_dropout.protocols import Posterior, PyroModel
from pyro_dropout.references.nuts.energy import Energy
from pyro_dropout.references.nuts.nuts import checked, disagreement, in_types_of
from pyro_dropout.training.preflight import check_gradients

_FIRST = 0.01  # the first step, in widths of the prior and in units of √d
_MEMORY = 0.98  # how much of what is known of the error a step keeps: about fifty steps count
_TRUST = 9.0  # errors that are off by far more than e to this power are not trusted
_LOST = 1e6  # a step is not taken if the square of its error is larger than it may be by this
_FAR = 0.3  # the error that a step may have at first, beside the change of the energy
_SPREAD, _NATS = 5.0, 5.0  # a chain is astray whose energy is above others' by so many deviations of it, and nats
_AGREE = 1.1  # R-hat of chains that have met; more than NUTS asks of a reference


class _Chains(NamedTuple):
    """Where the chains are: (C, d) or (C, 1)."""

    z: Tensor  # position
    u: Tensor  # direction
    energy: Tensor
    slope: Tensor
    step: Tensor  # its size
    weighted: Tensor  # sum of errors, each divided by its step size to the sixth power
    weight: Tensor  # sum of their weights
    lost: Tensor  # steps that were not taken


@also(num_chains="chains", num_samples="samples", warmup_steps="warmup")
@one_at_a_time
@modules_stay
def mclmc(
    model: PyroModel,
    *args: object,
    chains: int = 32,
    samples: int = 100,
    thin: int = 25,
    warmup: int = 1500,
    start: object = None,
    error: float = 5e-4,
    seed: int = 0,
    progress: bool = True,
    **kwargs: object,
) -> SampledPosterior:
    """Draw weights close to the posterior, by chains without rejections that take one gradient a step.

    The defaults cost chains · (warmup + samples · thin) = 128,000 gradients, fewer than the training of an ensemble of
    32 networks for 5,000 steps. All chains run as one batch in float64 on the CPU, and every step uses all data. The
    step size and the widths of the sites are found in the warmup. The bias is small and not zero, and chains can miss
    modes, so use ``nuts`` as a reference. It warns where chains disagree.

    Equation: mclmc.

    Args:
        model: a network of this package, or any Pyro model whose latent sites are continuous.
        args: the model's own arguments, data included: (x, y) for a network.
        chains: number of chains; many short ones find more modes than a few long ones.
        samples: draws kept per chain.
        thin: steps between them.
        warmup: steps before them, which are discarded.
        start: a posterior whose draws chains start at, such as a trained ``Ensemble``; by default the prior or, of a
            wide one of a Pyro program, points near its mean.
        error: the variance of the energy's error in a step, for each dimension: half of it takes steps that are a
            ninth shorter, with less bias.
        seed: the same seed gives the same draws; torch's own random state is neither used nor changed.
        progress: whether to show a progress bar.
        kwargs: the model's own keyword arguments.

    Returns:
        The draws, as a posterior that ``predict`` takes; ``divergences`` counts steps that were not taken.

    Example:
        >>> import torch, pyro_dropout as pdrop
        >>> x = torch.tensor([[-1.0], [0.0], [1.0], [2.0]])
        >>> model = pdrop.BayesianNet(torch.nn.Linear(1, 1), likelihood=pdrop.Gaussian(tau=4.0))
        >>> posterior = pdrop.mclmc(model, x, 2 * x, chains=16, warmup=400, samples=40, thin=10, progress=False)
        >>> posterior.num_chains, posterior.num_draws
        (16, 40)
        >>> exact = pdrop.references.conjugate(model, x, 2 * x).mean()["weight"].item()
        >>> abs(posterior.mean()["weight"].item() - exact) < 0.1
        True
    """
    for name, value in {"chains": chains, "samples": samples, "thin": thin}.items():
        check_count(name, value)
    check_count("warmup", warmup, least=100)
    check_count("seed", seed, least=0)
    check_positive("error", error)
    check_gradients(doing="sampling")
    call = checked(call_of(mclmc, model, args, kwargs))
    began = time.perf_counter()
    bar = tqdm(total=warmup + samples * thin, disable=not progress, unit="step", desc="mclmc")
    with bar, seeded(int(seed), torch.device("cpu")), evaluating(model):
        energy = Energy(call)
        z = _starts(energy, start, call, chains)
        draws, energies, lost = _run(energy, z, (warmup, samples, thin), error, bar)
    if astray := _astray(energies):
        warn_caller(
            f"{astray} of {chains} chains are where the posterior has next to no mass, and their draws count as much as"
            f" any other: give start= a trained guide, or use warmup={2 * warmup}, or nuts."
        )
    posterior = SampledPosterior(in_types_of(call, energy.weights(draws)), lost, time.perf_counter() - began)
    if chains > 1 and samples >= 4:
        worst, what = disagreement(call, posterior, draws, energy)
        if worst > _AGREE:
            warn_caller(
                f"chains disagree about {what}: the largest R-hat is {worst:.2f} and should be below {_AGREE}. Use"
                f" warmup={2 * warmup}, thin={2 * thin}, start= a trained guide, or nuts for a model with few"
                " parameters."
            )
    return posterior


def _starts(energy: Energy, start: object, call: ModelCall, chains: int) -> Tensor:
    """Return positions (chains, d) at draws of a posterior, or of the prior."""
    if start is None:
        return torch.stack([energy.start(central=True) for _ in range(chains)])
    if not isinstance(start, Posterior) and not callable(start):
        raise PyroDropoutError(f"start must be a posterior, such as a trained Ensemble; got {describe(start)}.")
    drawn, sites = latent_draws(start, chains, call), energy.weights(energy.prior_widths())
    for name, value in sites.items():
        if name not in drawn or drawn[name].shape[1:] != value.shape:
            found = tuple(drawn[name].shape[1:]) if name in drawn else "none"
            raise PyroDropoutError(
                f"start must have draws of {name!r}, each of shape {tuple(value.shape)}; it has {found}. Is it for this"
                " model?"
            )
    return torch.stack([energy.position({name: drawn[name][c] for name in sites}) for c in range(chains)])


def _astray(energies: Tensor) -> int:
    """Return how many chains, (chains, draws), have energies far above those of most."""
    if min(energies.shape) < 4:
        return 0  # too few to tell which are most
    means = energies.mean(1)
    return int((means > means.median() + _SPREAD * energies.std(1, correction=0).median() + _NATS).sum())


def _run(energy: Energy, z: Tensor, plan: tuple[int, int, int], error: float, bar: Any) -> tuple[Tensor, Tensor, int]:
    """Return draws (chains, draws, d) from positions (chains, d), their energies, and the steps lost after warmup."""
    warmup, samples, thin = plan
    d = z.shape[1]
    if d < 2:
        raise PyroDropoutError("the model has one latent number, and a direction needs two; use nuts.")
    scale = energy.prior_widths()
    one = z.new_ones(len(z), 1)
    at, slope = energy(z)
    direction = normalize(torch.randn_like(z), dim=-1)
    chains = _Chains(z, direction, at[:, None], slope, one * _FIRST * math.sqrt(d), 0 * one, 0 * one, 0 * one)
    for quarter in range(4):
        seen = []
        for _ in range(-(-warmup // 4)):
            chains = _moved(energy, chains, scale, error, adapts=True, far=quarter == 0)
            seen.append(chains.z)
            bar.update()
        if quarter in (1, 2):  # steps are measured in the widths that chains have found
            found = torch.stack(seen).var(0).median(0).values.sqrt().clamp_min(1e-10)
            by = (found / scale).log().mean().exp()
            chains = chains._replace(step=chains.step / by, weighted=0 * one, weight=0 * one)
            scale = found
    chains = chains._replace(lost=0 * one)
    draws, energies = [], []
    for _ in range(samples):
        for _ in range(thin):
            chains = _moved(energy, chains, scale, error)
            bar.update()
        draws.append(chains.z)
        energies.append(chains.energy)
    return torch.stack(draws, 1), torch.cat(energies, 1), int(chains.lost.sum())


def _moved(
    energy: Energy, chains: _Chains, scale: Tensor, error: float, adapts: bool = False, far: bool = False
) -> _Chains:
    """Return chains after one step, which ``adapts`` its size; those ``far`` from the posterior may be less exact."""
    d, step = chains.z.shape[1], chains.step
    u, first = _turned(chains.u, chains.slope * scale, step / 2)
    z = chains.z + step * u * scale
    at, slope = energy(z)
    u, second = _turned(u, slope * scale, step / 2)
    change = at[:, None] - chains.energy
    allowed = d * error + (_FAR * change).square() if far else torch.full_like(change, d * error)
    ratio = (change + first + second).square() / allowed
    taken = (ratio < _LOST) & slope.isfinite().all(-1, keepdim=True)  # false of NaN as well
    if adapts:
        # The error grows as ε³: each step tells the ε⁶ at which its square would be as large as it may be.
        ratio = torch.where(taken, ratio + 1e-8, 1.0)
        trust = torch.exp(-0.5 * (ratio.log() / _TRUST).square())
        weighted, weight = _MEMORY * chains.weighted + trust * ratio / step**6, _MEMORY * chains.weight + trust
        step = torch.where(taken, (weight / weighted) ** (1 / 6), 0.8 * step)
        chains = chains._replace(step=step, weighted=weighted, weight=weight)
    # It forgets its direction within L = √d, in widths of the posterior; where no step was taken, at once.
    noise = torch.where(taken, torch.sqrt(torch.expm1(2 * chains.step / math.sqrt(d)) / d), 1.0)
    u = normalize(torch.where(taken, u, 0.0) + noise * torch.randn_like(u), dim=-1)
    pairs = ((z, chains.z), (at[:, None], chains.energy), (slope, chains.slope))
    z, at, slope = (torch.where(taken, new, old) for new, old in pairs)
    return chains._replace(z=z, u=u, energy=at, slope=slope, lost=chains.lost + ~taken)


def _turned(u: Tensor, slope: Tensor, step: Tensor) -> tuple[Tensor, Tensor]:
    """Return directions after a time in a constant gradient, and the change of the kinetic energy."""
    d, size = u.shape[1], slope.norm(dim=-1, keepdim=True).clamp_min(1e-300)
    down = -slope / size
    angle = step * size / (d - 1)
    along, decay = (u * down).sum(-1, keepdim=True), torch.exp(-angle)  # e^-δ, so that nothing overflows
    turned = down * (1 - decay) * (1 + decay + along * (1 - decay)) + 2 * decay * u
    change = (d - 1) * (angle - math.log(2.0) + torch.log(1 + along + (1 - along) * decay.square()))
    return normalize(turned, dim=-1), change
