"""Steps of small networks that one kernel takes: their parameters and moments laid out for it, and its launches."""

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from pyro_dropout.training.one_kernel.small_network import SmallNetwork, padded, products

_UNROLLED = 2**17  # products of a layer in full float32 that are written out, one after another, in a program
_TILE = 2**13  # numbers of a layer at some points that the threads of a program hold at once
_WARPS = 4


def together(widths: Sequence[int], batch: int, precision: str) -> int:
    """Return how many points a program looks at together.

    Args:
        widths: units of each layer.
        batch: points of a step.
        precision: of products: "ieee" or "tf32".

    Example:
        >>> [together(widths, 128, "ieee") for widths in ((13, 50, 1), (32, 64, 1))]
        [128, 64]
    """
    most = _TILE // max(map(padded, widths))
    if precision == "ieee":
        most = min([most, *(_UNROLLED // (padded(a) * padded(b)) for a, b in pairwise(widths) if b > 1)])
    return max(16, min(most, padded(batch)))


class FusedSteps:
    """Parameters, moments and random numbers of one or several small networks, and the kernel that moves them.

    Args:
        network: what the kernel has to know.
        values: the parameters; with the networks in front where there are several, as in all that follows.
        state: the two moments of each of them.
        t: the number of the next step, from 1.
        lr: the learning rate, or one for each network.
        data: returns all inputs and all targets, as they are now.
        buffers: settings of model and guide.
        batch: points of a step.
        num_data: points in all.
        rows: the rows that each network sees at every step, (networks, batch); None if all of them, or a batch.
        ordered: whether every step has a batch of its own.

    Attributes:
        values: the parameters, which the kernel changes.
        state: their moments.
        t: the number of the next step.
        stream: the key of the random numbers, and how many steps have drawn some.
    """

    def __init__(
        self,
        network: SmallNetwork,
        values: list[Tensor],
        state: list[list[Tensor]],
        t: Tensor,
        lr: Tensor,
        data: Callable[[], tuple[Tensor, Tensor]],
        buffers: list[Tensor],
        batch: int,
        num_data: int,
        rows: Tensor | None = None,
        ordered: bool = False,
    ) -> None:
        from pyro_dropout.training.one_kernel.kernel import advance  # needs Triton

        self._kernel: Any = advance
        self._network, self._data, self._buffers, self._rows = network, data, buffers, rows
        self._batch, self._scale = batch, num_data / batch
        self._several = lr.dim() > 0
        self._count = len(lr) if self._several else 1
        self.t, self._lr = t.clone(), lr
        moments = [[slots[k] for slots in state] for k in range(2)]
        self._whole = [self._laid_out(each) for each in (values, *moments)]
        self.values, *own = [self._views(whole, values) for whole in self._whole]
        self.state = [list(pair) for pair in zip(*own, strict=True)]
        self.stream = torch.stack([torch.randint(2**62, ()), torch.zeros((), dtype=torch.long)]).to(t.device)
        precision = products()
        points = together(network.widths, batch, precision)
        self._numbers = _numbers(network, self._whole[0].shape[1], points, precision)
        self._seen: list[int] = []
        self._settings: tuple[Tensor, ...] = ()
        self.advance(0, self.stream if ordered else None)  # compiles the kernel

    def _laid_out(self, values: list[Tensor]) -> Tensor:
        """Return tensors of all networks as one, (networks, numbers), in the order of the layers."""
        ordered = (values[k].detach().reshape(self._count, -1) for k in self._network.places)
        return torch.cat(list(ordered), 1)

    def _views(self, whole: Tensor, like: list[Tensor]) -> list[Tensor]:
        """Return the parts of such a tensor, in the order and the shapes of the parameters."""
        sizes = [like[k].numel() // self._count for k in self._network.places]
        parts = dict(zip(self._network.places, whole.split(sizes, 1), strict=True))
        return [parts[k].view(value.shape) for k, value in enumerate(like)]

    @property
    def everything(self) -> list[Tensor]:
        """All tensors that a step changes but the random numbers: parameters, moments, and the number of the step."""
        return [*self.values, *(slot for slots in self.state for slot in slots), self.t]

    def _current_settings(self) -> tuple[Tensor, ...]:
        """Return decays, limits of the masks, log precisions and constants; anew if a setting has changed."""
        seen = [buffer._version for buffer in self._buffers]
        if seen != self._seen:
            settings = [each if self._several else each.unsqueeze(0) for each in self._buffers]
            self._settings, self._seen = _settings(self._network, settings), seen
        return self._settings

    def advance(self, steps: int, order: Tensor | None = None, masks: Tensor | None = None) -> Tensor:
        """Take some steps, and return the losses before each, (steps,) or (steps, networks).

        Args:
            steps: how many.
            order: the rows of each step's batch, (steps, batch) or (steps, networks, batch); None if they stay.
            masks: zeros and ones in place of drawn ones, (steps, networks, batch, units), for tests.
        """
        x, y = self._data()
        losses = x.new_empty((steps, self._count))
        rows = self._rows if order is None else order
        strides = (0, self._batch) if order is None else (self._count * self._batch, self._batch)
        pointers = (x, y, self.stream if rows is None else rows.contiguous(), *self._whole, *self._current_settings())
        changing = (self._lr, self.t, self.stream, losses, losses if masks is None else masks.contiguous())
        sizes = (steps, self._batch, self._scale, *strides, int(self._several))
        with torch.cuda.device(x.device) if x.is_cuda else nullcontext():
            self._kernel[(self._count,)](
                *pointers,
                *changing,
                *sizes,
                **self._numbers,
                INDEXED=rows is not None,
                GIVEN=masks is not None,
                num_warps=_WARPS,
                num_stages=1,
            )
        self.t.add_(steps)
        self.stream[1:].add_(steps)
        return losses if self._several else losses[:, 0]


def _numbers(network: SmallNetwork, total: int, points: int, precision: str) -> dict[str, Any]:
    """Return what the kernel is compiled for."""
    widths = network.widths
    sizes = tuple(padded(width) for width in widths)
    beta1, beta2, eps = network.adam
    starts = tuple(accumulate((b * (a + 1) for a, b in pairwise(widths)), initial=0))
    *firsts, units = accumulate(widths[:-1], initial=0)
    *quads, last = accumulate((size // 4 for size in sizes[:-1]), initial=0)
    return {
        "LAYERS": len(widths) - 1,
        "WIDTHS": widths,
        "SIZES": sizes,
        "STARTS": starts,
        "FIRSTS": (*firsts, *quads),
        "KINDS": network.kinds,
        "TOTAL": total,
        "UNITS": units,
        "QUADS": last,
        "POINTS": points,
        "LEARNED": network.learned,
        "PRECISION": precision,
        "BETA1": beta1,
        "BETA2": beta2,
        "LOG1": math.log(beta1),
        "LOG2": math.log(beta2),
        "EPS": eps,
    }


def _settings(network: SmallNetwork, buffers: list[Tensor]) -> tuple[Tensor, ...]:
    """Return the decay of each parameter, the limits of the masks, log precisions and the constant part of the KL.

    KL(q‖p) = Σ_rows [p Σ m²/(2s²) + p log p + (1 - p) log(1 - p)] for a weight, and Σ b²/(2s²) for a bias at a point:
    the paper's form at σ = 0.
    """
    widths, count = network.widths, len(buffers[0])
    decays, limits = [], []
    constant = torch.zeros(count, dtype=torch.float64, device=buffers[0].device)
    for k, (inputs, outputs) in enumerate(pairwise(widths)):
        keep = buffers[network.keeps[k]].double().reshape(count, -1).expand(count, inputs)
        wide, narrow = (buffers[network.priors[2 * k + j]].double() for j in range(2))
        weight = keep.unsqueeze(1) / _to(wide, count, (outputs, inputs)).square()
        decays += [weight.flatten(1), _to(narrow, count, (outputs,)).square().reciprocal()]
        limits.append((keep * 2**32).ceil().long() - 1)  # of 32 bits, as many numbers are below as keep says
        constant += (torch.xlogy(keep, keep) + torch.xlogy(1 - keep, 1 - keep)).sum(1)
    log_tau = constant
    if network.log_tau is not None:
        log_tau = buffers[network.log_tau].reshape(count, -1).expand(count, widths[-1])
    else:
        decays.append(constant.new_zeros(count, widths[-1]))  # a learned precision has no prior
    found = (torch.cat(decays, 1).float(), torch.cat(limits, 1), log_tau.float(), constant.float())
    return tuple(each.contiguous() for each in found)


def _to(widths: Tensor, count: int, shape: tuple[int, ...]) -> Tensor:
    """Return prior widths of each network, which may be one number for all weights, in the shape of a site."""
    own = widths.shape[1:]
    return widths.reshape(count, *(1,) * (len(shape) - len(own)), *own).expand(count, *shape)
