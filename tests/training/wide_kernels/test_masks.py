"""Masks that the kernel draws: as many are kept as keep says, and each number is drawn once.

The bounds are five standard errors, or as many as five for one of all pairs: correct code fails in about one of a
million runs, and the key is fixed, so that it always fails or never.
"""

import pytest
import torch
from torch import Tensor

from tests.oracles.triton_here import PLACE, needed

triton = needed()
tl = pytest.importorskip("triton.language")
draw = pytest.importorskip("pyro_dropout.training.wide_kernels.layers").draw

POINTS, UNITS, SIZE, NETS, STEPS, LAYERS = 64, 13, 16, 3, 4, 2


@triton.jit
def draw_all(
    out, limits, key, before, POINTS: tl.constexpr, UNITS: tl.constexpr, SIZE: tl.constexpr, LAYERS: tl.constexpr
):  # type: ignore[no-untyped-def]
    """Write the masks of one step of one network and all of its layers."""
    net, step = tl.program_id(0), tl.program_id(1)
    point, unit = tl.arange(0, POINTS), tl.arange(0, SIZE)
    count = tl.load(before) + step
    low = (count & 0xFFFFFFFF).to(tl.uint32)
    high = (count >> 32).to(tl.uint32)
    start = (step * tl.num_programs(0) + net) * LAYERS
    for k in tl.static_range(LAYERS):
        kept = draw(
            limits, 0, limits, tl.load(key), net.to(tl.uint32), low, high, point, point < POINTS,
            0, 0, UNITS, k * (SIZE // 4), LAYERS * (SIZE // 4), UNITS, SIZE, False,
        )  # fmt: skip
        places = ((start + k) * POINTS + point)[:, None] * UNITS + unit[None, :]
        tl.store(out + places, kept, mask=(unit < UNITS)[None, :])


def masks(keep: Tensor, key: int = 7, before: int = 0) -> Tensor:
    """Return masks of some steps, (steps, nets, layers, points, units)."""
    out = torch.full((STEPS, NETS, LAYERS, POINTS, UNITS), torch.nan, device=PLACE)
    limits = ((keep.double() * 2**32).ceil().long() - 1).to(PLACE)
    numbers = [torch.tensor([each], device=PLACE) for each in (key, before)]
    draw_all[(NETS, STEPS)](out, limits, *numbers, POINTS, UNITS, SIZE, LAYERS)
    return out.cpu()


@pytest.mark.parametrize("keep", [0.1, 0.5, 0.9])
def test_as_many_are_kept_as_keep_says(keep: float) -> None:
    found = masks(torch.full((UNITS,), keep))
    assert set(found.unique().tolist()) == {0.0, 1.0}
    error = (keep * (1 - keep) / found.numel()) ** 0.5
    assert abs(found.mean().item() - keep) < 5 * error
    by_unit = found.mean((0, 1, 2, 3))
    assert (by_unit - keep).abs().max().item() < 5 * error * UNITS**0.5


def test_every_row_has_its_own_keep_and_one_keeps_all() -> None:
    keep = torch.linspace(0.1, 1.0, UNITS)
    found = masks(keep).flatten(0, 3).mean(0)
    error = (keep * (1 - keep) / (STEPS * NETS * LAYERS * POINTS)).sqrt()
    assert ((found - keep).abs() <= 5 * error).all()
    assert found[-1] == 1


def test_steps_networks_layers_points_and_units_are_independent() -> None:
    found = masks(torch.full((UNITS,), 0.5)) - 0.5
    for dim in range(found.dim()):
        rows = found.movedim(dim, 0).flatten(1)
        together = rows @ rows.T / (0.25 * rows.shape[1])  # correlations, of standard error 1/√n
        others = together[~torch.eye(len(rows), dtype=torch.bool)]
        assert others.abs().max().item() < 5 / rows.shape[1] ** 0.5
    whole = found.flatten()
    for lag in range(1, 33):
        assert (whole[lag:] * whole[:-lag]).mean().item() / 0.25 == pytest.approx(0, abs=5 / whole.numel() ** 0.5)


@pytest.mark.deep
@pytest.mark.parametrize("before", [0, 2**32 - 2, 2**40])
def test_numbers_belong_to_their_step_however_many_are_taken_at_a_time(before: int) -> None:
    keep = torch.full((UNITS,), 0.5)
    first, later = masks(keep, before=before), masks(keep, before=before + 1)
    assert torch.equal(first[1:], later[:-1])
    assert not torch.equal(first[0], first[1])
