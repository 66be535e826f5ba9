"""Whether a posterior has settled, or was held where it is by a learning rate that had decayed.

A loss is flat where its gradient is zero, and also where the rate is. The gradient g with respect to the means of a
Gaussian q whose widths are learned tells the two apart: a Newton step with q's own covariance S would gain ½ gᵀS g
nats, and move n means by √(gᵀS g/n) of their standard deviations, as a root mean square. With two independent
estimates of g, g₁ᵀS g₂ has no bias by noise. What has no learned width, a point or dropout, is not judged.
"""

from collections.abc import Iterator
from contextlib import suppress

import torch
from pyro.distributions import Delta
from pyro.poutine.messenger import Messenger
from torch import Tensor

from pyro_dropout.generative.model_call import ModelCall
from pyro_dropout.generative.trial_run import quietly
from pyro_dropout.mathematics.full_rank_normal import joint_root
from pyro_dropout.mathematics.shapes import base_distribution
from pyro_dropout.protocols import Distribution, Message, PyroModel
from pyro_dropout.training.compile.functional import Loss, unvalidated
from pyro_dropout.training.loss.temperature import at_step
from pyro_dropout.training.optimisers import Schedule

_FEWEST = 200  # steps; fewer are a trial
_DECAYED = 0.1  # of the highest rate; above it the losses show what is left undone, and means are as noisy as ever
_DRAWS = 32  # of the gradient; half of them where they give no reason to doubt
_MOST = 2**20  # means, each of which has a number for every draw
_NATS, _WIDTHS = 2.0, 1.0  # that a site would gain, and by which its means are off: both at least
_SURE = 4.0  # standard errors, where |t| is twice as large; with 31 degrees of freedom by chance in 1 of 1e8 sites


def held_back(
    schedule: Schedule | None, steps: int, model: PyroModel, guide: PyroModel, loss: Loss, call: ModelCall, batch: int
) -> str:
    """Say which means have not arrived, though the learning rate has decayed; "" if all have, or nobody can say.

    Random numbers and buffers stay as they are.
    """
    share, off = _rate_left(schedule, steps), dict[str, float]()
    if share <= _DECAYED and steps >= _FEWEST:
        with suppress(Exception):  # a training that has succeeded must not fail
            off = _widths_off(model, guide, loss, call, batch, steps)
    if not off:
        return ""
    worst = sorted(off.items(), key=lambda each: -each[1])[:5]
    return (
        f"the learning rate had fallen to {share:.2g} of its highest before the posterior had settled. Means are still"
        f" off, in their own standard deviations: {', '.join(f'{name} by about {by:.2g}' for name, by in worst)}."
        " Let the rate fall later (schedule=...), raise lr, or take more steps."
    )


def _rate_left(schedule: Schedule | None, steps: int) -> float:
    """Return the rate of the last step, as a share of the highest."""
    if schedule is None:
        return 1.0
    rates = [abs(float(schedule(torch.tensor(float((steps - 1) * k // 16))))) for k in range(17)]
    return rates[-1] / max(*rates, 1e-300)


def _widths_off(
    model: PyroModel, guide: PyroModel, loss: Loss, call: ModelCall, batch: int, steps: int
) -> dict[str, float]:
    """Return by how many of their own widths the means of sites are off, where that is more than little or noise."""
    count, found, sizes = call.count or 1, dict[str, list[Tensor]](), dict[str, int]()
    with quietly(model, guide), unvalidated(), at_step(torch.tensor(float(steps))), torch.enable_grad():
        for k in range(_DRAWS):
            if 2 * k == _DRAWS and not _doubts(found, sizes, _SURE / 2):
                return {}
            now = call if batch >= count else call.at(torch.randperm(count, device="cpu")[:batch])
            with _Drawn() as drawn:
                value = loss.differentiable_loss(model, guide, *now.args, **now.kwargs)
            means = {name: mean for name, q in drawn.of.items() if (mean := _own_mean(q)) is not None}
            if not means or sum(mean.numel() for mean in means.values()) > _MOST:
                return {}
            slopes = torch.autograd.grad(value, [*means.values()], allow_unused=True)
            rows = {name: slope for name, slope in zip(means, slopes, strict=True) if slope is not None}
            for name, root, size in _newton_steps({each: (drawn.of[each], row) for each, row in rows.items()}):
                found.setdefault(name, []).append(root)
                sizes[name] = size
    return _doubts(found, sizes, _SURE)


def _doubts(found: dict[str, list[Tensor]], sizes: dict[str, int], sure: float) -> dict[str, float]:
    """Return by how many widths the means of sites are off, where that is more than little or noise."""
    squares = {name: _square(torch.stack(roots).double()) for name, roots in found.items()}
    return {
        name: (square / sizes[name]) ** 0.5
        for name, (square, error, noise) in squares.items()
        if square > max(sure * error, noise, 2 * _NATS, _WIDTHS**2 * sizes[name])
    }


class _Drawn(Messenger):
    """Collects the distributions that a guide draws its sites from; a model that replays them comes later."""

    def __init__(self) -> None:
        super().__init__()
        self.of: dict[str, Distribution] = {}

    def _pyro_post_sample(self, msg: Message) -> None:
        if msg["type"] == "sample" and not msg["is_observed"]:
            self.of.setdefault(msg["name"], msg["fn"])


def _own_mean(q: Distribution) -> Tensor | None:
    """Return the trained tensor that is the mean of q, if q is one Gaussian and its width is learned apart from it."""
    base = base_distribution(q)
    if isinstance(q, Delta) or getattr(base, "components", 1) > 1:
        return None
    try:
        mean, root = q.mean, _root(q, torch.ones_like(q.mean))
    except (AttributeError, NotImplementedError):  # another kind of distribution, such as that of a plate
        return None
    trained, widths = list(_trained(mean)), [id(each) for each in _trained(root)]
    if len(trained) != 1 or not widths or id(trained[0]) in widths or trained[0].numel() != mean.numel():
        return None
    slope = torch.autograd.grad(mean.sum(), trained[0], retain_graph=True)[0]
    return trained[0] if bool((slope == 1).all()) else None


def _root(q: Distribution, row: Tensor) -> Tensor:
    """Return r with r rᵀ = row Cov[w] rowᵀ, (1, columns)."""
    base = base_distribution(q)
    if hasattr(base, "covariance_root"):
        found: Tensor = base.covariance_root(row.reshape(1, *base.event_shape))
    elif hasattr(base, "scale_tril"):
        found = row.reshape(1, -1) @ base.scale_tril
    elif base.event_shape:
        raise NotImplementedError
    else:
        found = (row * q.stddev).reshape(1, -1)
    return found


def _trained(value: Tensor) -> Iterator[Tensor]:
    """Yield the leaves that a tensor was computed from."""
    if value.grad_fn is None:
        yield from [value] if value.requires_grad else []
        return
    left, seen = [value.grad_fn], set[object]()
    while left:
        node = left.pop()
        if node not in seen:
            seen.add(node)
            yield from [node.variable] if hasattr(node, "variable") else []
            left += [each for each, _ in node.next_functions if each is not None]


def _newton_steps(rows: dict[str, tuple[Distribution, Tensor]]) -> Iterator[tuple[str, Tensor, int]]:
    """Yield the names, r with r rᵀ = gᵀS g, and the number of means: of each site, or of those drawn together."""
    together: dict[int, list[str]] = {}
    for name, (q, _) in rows.items():
        noise = getattr(base_distribution(q), "shared", None)
        together.setdefault(id(name) if noise is None else id(noise), []).append(name)
    for names in together.values():
        roots = [
            (_root(rows[name][0], rows[name][1]), getattr(base_distribution(rows[name][0]), "shared", None))
            for name in names
        ]
        size = sum(rows[name][1].numel() for name in names)
        yield ", ".join(name.removesuffix("_unconstrained") for name in names), joint_root(roots)[0].detach(), size


def _square(roots: Tensor) -> tuple[float, float, float]:
    """Return the mean of r_jᵀ r_k over j ≠ k, which is that of gᵀS g without bias, its standard error, and its noise.

    The noise is what that of one gradient adds to gᵀS g. Means that are off by less than it are where noisy steps leave
    them, and no rate has held them back.
    """
    count, products = len(roots), roots @ roots.mT
    total, own = products.sum(), products.diagonal()
    without = (total - 2 * products.sum(1) + own) - (own.sum() - own)  # one draw left out, for the jackknife
    each = without / ((count - 1) * (count - 2))
    error = ((count - 1) / count * (each - each.mean()).square().sum()).sqrt()
    square = (total - own.sum()) / (count * (count - 1))
    return float(square), float(error), float(own.mean() - square)
