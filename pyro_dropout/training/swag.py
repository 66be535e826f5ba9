"""SWAG: a low-rank Gaussian from the trajectory of SGD (Maddox et al. 2019).

Mini-batches keep SGD at a constant rate moving around an optimum. The mean of the weights at the ends of its epochs is
the mean of q; half of the covariance is their variances, and half the last R deviations D from that mean:
Σ = ½ diag Var[w] + D Dᵀ / (2(R - 1)).
"""

from collections import deque
from typing import Any

import pyro
import torch
from torch import Tensor

from pyro_dropout.engines.choose import Compile
from pyro_dropout.errors import PyroDropoutError, RangeError
from pyro_dropout.generative.model_call import call_of, name_of
from pyro_dropout.generative.networks import BayesianNet
from pyro_dropout.generative.process_state import generators_stay, one_at_a_time
from pyro_dropout.generative.standardised import network_in
from pyro_dropout.guides.low_rank import AutoLowRank
from pyro_dropout.guides.points import Points
from pyro_dropout.mathematics.checks import check_count, check_positive, check_seed
from pyro_dropout.protocols import PyroModel
from pyro_dropout.training.fit import place_of
from pyro_dropout.training.laplace.laplace import weights_at
from pyro_dropout.training.loop import loop, progress_bar
from pyro_dropout.training.loss.elbo import ELBO
from pyro_dropout.training.loss.temperature import at_step
from pyro_dropout.training.optimisers import named
from pyro_dropout.training.preflight import LARGEST_SEED, check_data, check_how
from pyro_dropout.training.svi import check_compile
from pyro_dropout.training.training_run import TrainingTask

_NARROWEST = 1e-6  # a variance, beside the largest of its site: SGD does not move every weight


@one_at_a_time
@generators_stay
def swag(
    model: PyroModel,
    point: Any,
    x: object,
    y: Tensor,
    *,
    rank: int = 20,
    steps: int,
    lr: float,
    batch_size: int,
    every: int | None = None,
    compile: Compile = "auto",
    progress: bool = True,
    seed: int | None = None,
) -> AutoLowRank:
    """Return the Gaussian that SGD draws around a trained point: its mean, its variances and R of its deviations.

    The loss is that of ``fit`` for points, -log p(y, w), a sum over all data, so ``lr`` is far smaller than for a mean.
    The larger it is, the wider the posterior: choose the largest at which the loss does not rise. Ordinary parameters
    of the model, such as normalisation layers, end at their mean too.

    Equation: swag.

    Args:
        model: a network.
        point: where to start: a fitted guide (at its mean), a dict of weights, or the model or a network, as it is.
        x: inputs, as in ``fit``.
        y: targets.
        rank: R, the number of deviations.
        steps: how many steps of SGD (momentum 0.9) to take.
        lr: their constant rate.
        batch_size: points in a mini-batch, fewer than there are: the noise of the batches makes the posterior.
        every: steps between the weights that count; by default an epoch.
        compile: as in ``fit``.
        progress: show a progress bar.
        seed: for mini-batches.

    Returns:
        A guide to use as it is, or to train further.

    Example:
        >>> import torch, pyro_dropout as pdrop
        >>> x = torch.linspace(-1, 1, 40).unsqueeze(-1)
        >>> model = pdrop.BayesianNet(torch.nn.Linear(1, 1), likelihood=pdrop.Gaussian(tau=4.0))
        >>> weights = {"weight": torch.tensor([[2.0]]), "bias": torch.tensor([0.0])}
        >>> y = 2 * x + 0.5 * torch.randn(40, 1, generator=torch.Generator().manual_seed(0))
        >>> how = {"steps": 800, "lr": 5e-4, "batch_size": 10, "compile": False, "progress": False, "seed": 0}
        >>> guide = pdrop.swag(model, weights, x, y, rank=5, **how)
        >>> bool((guide.mean()["weight"] - 2).abs() < 0.3), bool(guide.posterior("weight").stddev > 0.01)
        (True, True)
    """
    check_count("rank", rank, least=2)
    check_count("steps", steps)
    check_compile(compile)
    check_positive("lr", lr)
    check_seed(seed, 0, LARGEST_SEED)
    check_how(None, None, lr=lr)
    net: Any = model
    inner = network_in(model)
    if not isinstance(inner, BayesianNet):
        raise PyroDropoutError(f"swag is for a BayesianNet, or one inside Standardised; got {name_of(model)}.")
    statistics = [path for path in inner._moving() if inner.net.get_submodule(path).training]
    if statistics:  # the mean weights need statistics of their own
        raise PyroDropoutError(
            f"the running statistics of {statistics[0]!r} move with the weights, and those of the mean weights are"
            " others. Call model.eval() first, or freeze them with BayesianNet(frozen_statistics='all')."
        )
    call = check_data(call_of(swag, model, (x, y), {}), batch_size)
    count = call.count or 1
    if batch_size >= count:
        raise RangeError(
            f"batch_size must be less than the {count} points: with all of them at every step SGD has no noise; got"
            f" {batch_size}."
        )
    every = max(1, count // batch_size) if every is None else every
    check_count("every", every)
    if steps // every < rank:
        raise RangeError(
            f"steps must be at least {rank * every}: {rank} deviations need as many weights, one every {every} steps;"
            f" got {steps}."
        )
    if seed is not None:
        pyro.set_rng_seed(seed)
    guide = Points(model, init=weights_at(model, point))
    task = TrainingTask(guide, ELBO(per_example=False), call.trainable().to(place_of([model, guide], call)))
    own = {name: guide._state(site).loc for name, site in guide._sites.items()}
    others = {f"model {name}": value for name, value in net.named_parameters() if value.requires_grad}
    moving, seen = own | others, steps // every
    mean = {name: torch.zeros_like(value, dtype=torch.float64) for name, value in moving.items()}
    squares = {name: torch.zeros_like(value) for name, value in mean.items()}  # Σ (w - mean)²
    last: deque[dict[str, Tensor]] = deque(maxlen=rank)
    with at_step(torch.ones(())), progress_bar(steps, progress) as bar:
        run = task.start(named("sgd", lr), batch_size, compile)
        for count in range(1, seen + 1):
            loop(run, every, False, blame=task.blame)
            now = {name: value.detach().double().clone() for name, value in moving.items()}
            for name, value in now.items():  # Welford's sums, which do not cancel
                apart = value - mean[name]
                mean[name] += apart / count
                squares[name] += apart * (value - mean[name])
            last.append(now)
            bar.update(every)
    with torch.no_grad():
        for name, value in others.items():
            value.copy_(mean[name])
    made = AutoLowRank(model, rank, "net", init={name: mean[name] for name in own})
    for name, site in made._sites.items():
        variance = squares[name] / max(1, seen - 1)
        if not bool(variance.max() > 0):
            raise PyroDropoutError(f"SGD has not moved {name!r}, so its variance is not known: give a larger lr.")
        width = (0.5 * variance.clamp_min(_NARROWEST * float(variance.max()))).sqrt()
        apart = torch.stack([each[name] - mean[name] for each in last], -1).flatten(0, -2)
        with torch.no_grad():
            made._state(site).log_scale.copy_(width.log())
            made._state(site).factor.copy_(apart / (2 * (rank - 1)) ** 0.5 / width.reshape(-1, 1))
    return made
