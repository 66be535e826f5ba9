"""The reference that approximate posteriors are measured against: the posterior itself, by Hamiltonian Monte Carlo."""

import time
import warnings
from collections.abc import Callable
from numbers import Integral
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from pyro_dropout.answers.chains import Chain, Plan, run_chains
from pyro_dropout.answers.energy import Energy
from pyro_dropout.answers.sampled_posterior import SampledPosterior
from pyro_dropout.answers.snapshot import evaluating
from pyro_dropout.answers.weight_draws import WholeFunctions
from pyro_dropout.inference.svi import Compile, check_compile
from pyro_dropout.inference.training import move_to
from pyro_dropout.mathematics.errors import (
    PyroDropoutError,
    RangeError,
    check_count,
    check_finite,
    check_pairs,
    describe,
)

_AGREE = 1.01  # Vehtari et al. (2021): chains with a larger R-hat are not to be used
_MOST_POINTS = 50  # at which R-hat is taken


def nuts(
    model: Any,
    x: Tensor,
    y: Tensor,
    *,
    chains: int = 4,
    samples: int = 500,
    warmup: int = 500,
    seed: int = 0,
    target_accept: float = 0.8,
    max_tree_depth: int = 10,
    points: Tensor | None = None,
    compile: Compile = "auto",
    progress: bool = True,
) -> SampledPosterior:
    """Draw weights from the posterior itself, by the no-U-turn sampler; for small networks and few data.

    All chains run side by side in float64, with one evaluation of the model for each of their steps, and begin at draws
    from the prior. Parameters that are not random (hidden ones, a learned τ) stay as they are. It warns when chains
    disagree about the function's values or trajectories were lost.

    Args:
        model: a Pyro model ``model(x, y)`` whose sites are continuous, such as ``BayesianNet``; it returns its outputs.
        x: N data points, first dimension first.
        y: their targets.
        chains: how many chains; R-hat compares them, so take at least two, better four.
        samples: draws of each chain that are kept.
        warmup: draws before them, in which a chain finds its step length and scales, and which are thrown away.
        seed: the same seed gives the same draws; torch's own random state is neither used nor changed.
        target_accept: the acceptance rate that steps are chosen for; nearer to 1, steps are shorter and fewer are lost.
        max_tree_depth: a trajectory has at most 2 to this power steps.
        points: where R-hat of the function's values is taken; at ``x`` without them.
        compile: "auto", compile the energy when the run is long; True, at once; False, never.
        progress: whether to show a bar.

    Returns:
        The draws, as a posterior that ``predict`` takes.

    Example:
        >>> import torch, pyro_dropout as pd
        >>> x = torch.tensor([[-1.0], [0.0], [1.0], [2.0]])
        >>> model = pd.BayesianNet(torch.nn.Linear(1, 1, bias=False), likelihood=pd.Gaussian(tau=4.0))
        >>> posterior = pd.nuts(model, x, 2 * x, samples=250, warmup=100, seed=1, compile=False, progress=False)
        >>> posterior.num_chains, posterior.num_draws, posterior.divergences
        (4, 250, 0)
        >>> exact = pd.conjugate(model, x, 2 * x).mean()["weight"].item()
        >>> abs(posterior.mean()["weight"].item() - exact) < 0.05
        True
    """
    for name, value in {"chains": chains, "samples": samples, "max_tree_depth": max_tree_depth}.items():
        check_count(name, value)
    _check_zero_or_more("warmup", warmup)
    _check_zero_or_more("seed", seed)
    if not 0 < target_accept < 1:
        raise RangeError(f"target_accept must lie strictly between 0 and 1; got {target_accept!r}.")
    check_compile(compile)
    if not callable(model):
        raise PyroDropoutError(f"model must be a Pyro model, a function or a module; got {describe(model)}.")
    check_pairs("x and y", x, y)
    for label, data in (("x", x), ("y", y)):
        if data.is_floating_point():
            check_finite(label, data)
    began = time.perf_counter()
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(int(seed))
        energy = Energy(model, x, y, compile)
        starts = np.stack([energy.start() for _ in range(chains)])
    plan = Plan(int(samples), int(warmup), float(target_accept), int(max_tree_depth))
    with tqdm(total=chains * (warmup + samples), disable=not progress, unit="draw", desc="nuts") as bar:
        ran = run_chains(energy, starts, plan, int(seed), _ticker(bar, energy))
    z = torch.from_numpy(np.stack([np.stack(chain.draws) for chain in ran]))
    device, dtype = move_to(None, [model]), _type_of(model, x)
    weights = {name: value.to(device, dtype) for name, value in energy.weights(z).items()}
    lost = sum(chain.diverged for chain in ran)
    posterior = SampledPosterior(weights, divergences=lost, seconds=time.perf_counter() - began)
    _warn(model, posterior, x if points is None else points, ran, plan)
    return posterior


def function_rhat(model: Any, posterior: SampledPosterior, points: Tensor) -> Tensor:
    """Return R-hat of the model's outputs at ``points``, (N, D)."""
    with evaluating(model):
        points = points.to(move_to(None, [model]))
        total = posterior.num_chains * posterior.num_draws
        f = WholeFunctions(model, posterior).outputs(posterior.draws_at(torch.arange(total)), points, total)
    return posterior.rhat_of(f.reshape(posterior.num_chains, posterior.num_draws, *f.shape[1:]))


def _warn(model: Any, posterior: SampledPosterior, points: Tensor, ran: list[Chain], plan: Plan) -> None:
    """Say what is wrong with the draws, and what to do about it."""
    if posterior.divergences:
        warnings.warn(
            f"{posterior.divergences} of {posterior.num_chains * plan.samples} trajectories diverged: parts of the"
            f" posterior may be missing. Raise target_accept (it is {plan.target_accept}) towards 1, or narrow the"
            " prior.",
            stacklevel=3,
        )
    if posterior.num_chains == 1:
        warnings.warn("one chain has no other to agree with, so there is no R-hat; take chains=4.", stacklevel=3)
        return
    if posterior.num_draws < 4:  # R-hat halves each chain, and needs two draws in a half
        return
    spread = torch.linspace(0, len(points) - 1, min(len(points), _MOST_POINTS)).round().long()
    worst = float(function_rhat(model, posterior, points[spread.to(points.device)]).max())
    if not worst <= _AGREE:
        deepest = sum(chain.deepest for chain in ran)
        full = f" {deepest} trajectories were as long as max_tree_depth allows: raise it." if deepest else ""
        warnings.warn(
            f"chains disagree about the function: R-hat is {worst:.3f} where it is largest, and should be below"
            f" {_AGREE}. Take more samples (now {plan.samples}) and a longer warmup (now {plan.warmup}).{full}",
            stacklevel=3,
        )


def _ticker(bar: Any, energy: Energy) -> Callable[[], None]:
    def tick() -> None:
        bar.update(1)
        if bar.n % 50 == 0:
            bar.set_postfix(steps=energy.calls, refresh=False)

    return tick


def _type_of(model: Any, x: Tensor) -> torch.dtype:
    """Return the type of the model's own weights."""
    found = next((p.dtype for p in model.parameters()), None) if isinstance(model, nn.Module) else None
    return found or (x.dtype if x.is_floating_point() else torch.get_default_dtype())


def _check_zero_or_more(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, Integral) or not int(value) >= 0:
        raise RangeError(f"{name} must be a whole number, zero or more; got {value!r}.")
