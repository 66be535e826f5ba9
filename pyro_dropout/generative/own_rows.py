"""Whether each data point depends on its own draw alone: seen in what a model does, whatever operations it is made of.

The model is run with known weights in place of draws, and again with other weights for some data points. What belongs
to the others must stay as it is, and so must its gradient.
"""

import contextlib
import functools
import inspect
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from pyro_dropout.engines.torch_internals import without_torch_function
from pyro_dropout.errors import NotFollowedError
from pyro_dropout.generative.trial_run import aside
from pyro_dropout.mathematics.per_data_point import POINTS_FIRST, MisplacedPointsError, Probe

Run = Callable[[], Mapping[str, Tensor]]  # what a model computes, by name
# Each kind of points moves in two of four runs; of two kinds, each stays in a run in which the other moves.
_KINDS = torch.tensor([[k in pair for k in range(4)] for pair in itertools.combinations(range(4), 2)])
_WHOLE = len(_KINDS)  # with so many data points, each is of a kind of its own


def trial_counts(count: int) -> list[int]:
    """Return the numbers of data points to run a model with: another one, and this one if it is small."""
    other = next((each for each in (5, 3, 2) if each < count), count + 1)  # smaller: a model may look up what it has
    return [other, *([count] if count <= _WHOLE else [])]


def check_own_rows(run: Run, probes: Sequence[Probe], *roots: object, closer: Run | None = None) -> None:
    """Raise unless all that ``run`` returns has rows that each depend on the draws of one data point.

    ``roots`` are the programs that it runs; ``closer`` returns more values, in the order in which they are computed.
    """
    for count in {probe.count or 1 for probe in probes} - {1}:
        own = [probe for probe in probes if probe.count == count]
        with aside(*roots):
            found = _mixed(run, own, count, roots)
            if found is not None:
                site = next((each.site for each in own if _mixed(run, [each], count, roots)), own[0].site)
                found = (closer and _mixed(closer, own, count, roots)) or found
                raise _refusal(site, f"data points, each of which has its own draw, are mixed or moved in {found}")
            cut = _without_gradient(run, own, count, roots)
            if cut is not None:
                raise _refusal(cut.site, "an operation, such as an autograd function of your own, cuts its gradient")


def _refusal(site: str, reason: str) -> NotFollowedError:
    text = f"site {site!r} cannot be drawn for each data point: {reason}. Use shared draws (per_example=False)."
    return NotFollowedError(text, site, reason)


def _mixed(run: Run, probes: Sequence[Probe], count: int, roots: Sequence[object]) -> str | None:
    """Return the name of the first value in which draws reach other data points than their own; None if none does."""
    order = torch.randperm(count, generator=torch.Generator().manual_seed(0), device="cpu")
    kinds = _KINDS[order % len(_KINDS)]
    start = torch.zeros(count, requires_grad=True)
    before = _at(run, dict.fromkeys(probes, start), roots)
    places = {name: _places(value, count) for name, value in before.items()}
    reached = dict.fromkeys(before, False)
    for moves in kinds.unbind(1):
        after = _at(run, dict.fromkeys(probes, moves.float()), roots)
        with without_torch_function():  # an effect handler would watch the comparison
            for name, value in before.items():
                moved = ~_close(value.detach(), after[name])
                reached[name] |= bool(moved.any())
                places[name] = [place for place in places[name] if not place(moved)[~moves].any()]
                if reached[name] and not places[name]:
                    return name
    with without_torch_function(), torch.enable_grad():
        for name, value in before.items():
            if reached[name] and value.requires_grad and _leaks(places[name][0](value), start, kinds):
                return f"the gradient of {name}"
    return None


def _without_gradient(run: Run, probes: Sequence[Probe], count: int, roots: Sequence[object]) -> Probe | None:
    """Return a probe that values depend on, and their gradient does not; None if there is none."""
    if torch.is_inference_mode_enabled():
        return None
    with contextlib.suppress(RuntimeError):  # that the backward pass fails is seen in training
        ends = [_followed(run, probes, torch.full((count,), place), roots) for place in (0.0, 1.0)]
        unseen = [probe for k, probe in enumerate(probes) if not (ends[0][k] or ends[1][k])]
        if not unseen:
            return None
        before = _at(run, {probe: torch.zeros(count) for probe in probes}, roots)
        for probe in unseen:
            after = _at(run, {each: torch.full((count,), float(each is probe)) for each in probes}, roots)
            with without_torch_function():
                if not all(bool(_close(value, after[name]).all()) for name, value in before.items()):
                    return probe
    return None


def _followed(run: Run, probes: Sequence[Probe], at: Tensor, roots: Sequence[object]) -> list[bool]:
    """Return by probe whether a gradient reaches it with the weights at one place; a dead unit passes none."""
    starts = [at.clone().requires_grad_() for _ in probes]
    found = _at(run, dict(zip(probes, starts, strict=True)), roots)
    with without_torch_function(), torch.enable_grad():
        terms = [(value * torch.rand_like(value)).nansum() for value in found.values() if value.requires_grad]
        slopes = torch.autograd.grad(terms, starts, allow_unused=True) if terms else [None] * len(probes)
    return [slope is not None and bool(slope.any()) for slope in slopes]


def _at(run: Run, moved: Mapping[Probe, Tensor], roots: Sequence[object]) -> Mapping[str, Tensor]:
    """Run with other weights of each probe where ``moved`` is 1, with the same random numbers every time."""
    for probe, where in moved.items():
        probe.moved = where
    try:
        with aside(*roots), torch.set_grad_enabled(any(each.requires_grad for each in moved.values())), _Unnormalised():
            return run()
    finally:
        for probe, where in moved.items():
            probe.moved = torch.zeros(len(where))


def _places(value: Tensor, count: int) -> list[Callable[[Tensor], Tensor]]:
    """Return the ways to see a value with data points first: dimensions of their number, or parts in their order."""
    dims = [dim for dim, size in enumerate(value.shape) if size == count]
    found: list[Callable[[Tensor], Tensor]] = [functools.partial(torch.movedim, source=d, destination=0) for d in dims]
    return found + [lambda each: each.reshape(count, -1)] * (value.numel() % count == 0)


def _close(a: Tensor, b: Tensor) -> Tensor:
    """Return where two values are equal up to rounding."""
    if a.shape != b.shape:
        return torch.zeros(a.shape, dtype=torch.bool, device=a.device)  # all of it moves with the draws
    if not a.is_floating_point():
        return a == b
    size = a.detach().abs().nan_to_num(posinf=0.0).amax() if a.numel() else 0.0
    return torch.isclose(a, b, rtol=0.0, atol=float(100 * torch.finfo(a.dtype).eps * size), equal_nan=True)


def _leaks(rows: Tensor, start: Tensor, kinds: Tensor) -> bool:
    """Whether the gradient of some rows reaches the draws of others."""
    weighted = rows * torch.rand_like(rows)
    for moves in kinds.unbind(1):
        with contextlib.suppress(RuntimeError):  # that the backward pass fails is seen in training
            (slope,) = torch.autograd.grad(weighted[~moves].sum(), start, retain_graph=True, allow_unused=True)
            bound = 0.0 if slope is None else 100 * torch.finfo(rows.dtype).eps * float(slope.abs().max())
            if slope is not None and (slope[moves].abs() > bound).any():
                return True
    return False


class _Unnormalised(TorchFunctionMode):
    """Lets BatchNorm, which mixes data points by intention, scale and shift with fixed statistics."""

    def __torch_function__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> object:
        kwargs = kwargs or {}
        if func is torch.batch_norm:
            input, weight, bias, mean, var, _, momentum, eps, _ = args
            args, kwargs = (input, mean, var), {"weight": weight, "bias": bias, "momentum": momentum, "eps": eps}
        elif func is F.batch_norm:
            given = inspect.signature(F.batch_norm).bind(*args, **kwargs).arguments
            args, kwargs = (given.pop("input"), given.pop("running_mean"), given.pop("running_var")), given
        else:
            return func(*args, **kwargs)
        input, mean, var = args
        units = input.shape[1]
        mean = input.new_zeros(units) if mean is None else mean
        var = input.new_ones(units) if var is None else var
        return F.batch_norm(input, mean, var, **{**kwargs, "training": False})


@contextlib.contextmanager
def placed() -> Iterator[None]:
    """Raise the error of a site that met an input whose first dimension did not change with the number of points."""
    try:
        yield
    except MisplacedPointsError as cause:
        reason = "is used on an input whose first dimension is not that of the data points: it does not change with"
        reason += " their number"
        text = f"site {cause.site!r} {reason}. {POINTS_FIRST}"
        raise MisplacedPointsError(text, cause.site, f"it {reason}") from None
