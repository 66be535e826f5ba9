"""Masks as bits have the distribution, and where they are looked at the shape, of those that they replace."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pyro_dropout as pd
from pyro_dropout.engines import mask_bits as bits_module
from pyro_dropout.engines import program as program_module
from pyro_dropout.engines.mask_bits import draw_bits, mask_bits
from pyro_dropout.engines.program import Program
from tests.oracles.triton_here import PLACE, needed


@pytest.fixture
def by_the_kernel() -> Callable[[int, Tensor, int], Tensor]:
    """Masks that the kernel draws."""
    needed()

    def drawn(seed: int, keep: Tensor, rows: int) -> Tensor:
        limits_of, draw = bits_module._kernels()
        keep = keep.to(PLACE)
        words = -(-len(keep) // 32)
        limits = torch.empty(33, words, dtype=torch.int32, device=PLACE)
        bits = torch.full((rows, words), -1, dtype=torch.int32, device=PLACE)
        limits_of[(words,)](keep, limits, len(keep), words, keep.stride(0), num_warps=1)
        count = rows * words
        each = bits_module._WORDS if PLACE == "cuda" else 4096  # no word depends on it; the interpreter takes its time
        how = each, bits_module._ROUNDS
        draw[(-(-count // each),)](torch.tensor([seed], device=PLACE), limits, bits, count, words, *how, num_warps=1)
        return _unpacked(bits.cpu(), len(keep))

    return drawn


def _unpacked(bits: Tensor, columns: int) -> Tensor:
    return ((bits.unsqueeze(-1) >> torch.arange(32)) & 1).flatten(1)[:, :columns].bool()


def _by_torch(seed: int, keep: Tensor, rows: int) -> Tensor:
    return _unpacked(mask_bits(torch.tensor([seed]), keep, rows), len(keep))


@pytest.fixture(params=["kernel", "torch"])
def draw(request: pytest.FixtureRequest) -> Any:
    return request.getfixturevalue("by_the_kernel") if request.param == "kernel" else _by_torch


@pytest.mark.parametrize("columns", [32, 45, 3])
def test_each_column_has_its_probability(draw: Any, columns: int) -> None:
    rows, keep = 4096, torch.linspace(0.02, 0.98, columns)
    found = draw(7, keep, rows).double()
    z = (found.mean(0) - keep) / (keep * (1 - keep) / rows).sqrt()
    assert z.abs().max() < 4.5
    assert z.square().mean() < 1 + 5 * (2 / columns) ** 0.5


def test_entries_do_not_depend_on_one_another(draw: Any) -> None:
    found = draw(3, torch.full((64,), 0.3), 2000).double() - 0.3
    neighbours = (found[:, 1:] * found[:, :-1]).mean() / 0.21
    below = (found[1:] * found[:-1]).mean() / 0.21
    assert abs(neighbours) < 4.5 / (2000 * 63) ** 0.5
    assert abs(below) < 4.5 / (1999 * 64) ** 0.5


def test_never_and_always_are_exact(draw: Any) -> None:
    found = draw(1, torch.tensor([0.0, 1.0, 0.5, 1.0, 0.0]), 500)
    assert found[:, [1, 3]].all()
    assert not found[:, [0, 4]].any()


def test_a_seed_gives_the_same_masks_and_another_seed_others(draw: Any) -> None:
    keep = torch.full((40,), 0.5)
    assert draw(5, keep, 50).equal(draw(5, keep, 50))
    assert 0.4 < (draw(5, keep, 50) != draw(2**40 + 5, keep, 50)).double().mean() < 0.6


def test_what_sixteen_bits_cannot_tell_is_decided_by_the_next(by_the_kernel: Any) -> None:
    """With a probability whose sixteen highest bits are zero, no entry is kept until the lower ones are looked at."""
    rows, p = 40_000, 2.0**-17 * 1.5
    found = by_the_kernel(2, torch.full((64,), p), rows).sum()
    expected = rows * 64 * p
    assert abs(found - expected) < 4.5 * expected**0.5
    assert found > 0


def _masked(x: Tensor, keep: Tensor) -> Tensor:
    return x * (torch.rand(x.shape, device=x.device) < keep).to(x)


def _taken_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bits_module, "_AT_LEAST", 1)
    monkeypatch.setattr(bits_module, "_is_on_gpu", lambda values: True)


@pytest.mark.parametrize("keep", [torch.tensor(0.25), torch.full((45,), 0.25)])
def test_a_program_uses_them(monkeypatch: pytest.MonkeyPatch, keep: Tensor) -> None:
    _taken_on_cpu(monkeypatch)
    x = torch.arange(1.0, 800 * 45 + 1).reshape(800, 45)
    codes, compiled = list[str](), program_module._compile

    def noted(graph: Any, given: Any) -> Any:
        codes.append(graph.code)
        return compiled(graph, given)

    monkeypatch.setattr(program_module, "_compile", noted)
    program = Program(_masked, x, keep, bits=True)
    assert "mask_bits" in codes[0]
    found = program(x, keep)
    assert ((found == x) | (found == 0)).all()  # type: ignore[operator]
    kept = (found != 0).double().mean()  # type: ignore[attr-defined]
    assert abs(kept - 0.25) < 4.5 * (0.25 * 0.75 / x.numel()) ** 0.5
    assert not program(x, keep).equal(found)  # type: ignore[attr-defined]
    torch.manual_seed(0)
    first = program(x, keep)
    torch.manual_seed(0)
    assert program(x, keep).equal(first)  # type: ignore[attr-defined]


def test_what_is_no_large_mask_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    x, keep = torch.ones(6, 45), torch.tensor(0.25)
    assert draw_bits(Program(_masked, x, keep, compile=False).graph.graph) == 0  # small, and not on a GPU
    _taken_on_cpu(monkeypatch)

    def twice(x: Tensor, keep: Tensor) -> Tensor:
        drawn = torch.rand(x.shape)
        return (drawn < keep) * drawn

    for function, inputs in ((twice, (x, keep)), (_masked, (x, keep.expand(6, 45).clone()))):
        graph = Program(function, *inputs, compile=False).graph
        assert draw_bits(graph.graph) == 0
    assert draw_bits(Program(_masked, x, keep, compile=False).graph.graph) == 1


@pytest.mark.deep
def test_predictions_have_the_same_moments(monkeypatch: pytest.MonkeyPatch) -> None:
    _taken_on_cpu(monkeypatch)
    model = pd.BayesianNet(nn.Sequential(nn.Linear(3, 40), nn.ReLU(), nn.Linear(40, 1)))
    guide, x = pd.AutoDropout(model, keep=0.8), torch.randn(5, 3)
    ours = pd.predict(model, guide, x, samples=4000, seed=0, compile=True)
    theirs = pd.predict(model, guide, x, samples=4000, seed=0)
    error = (2 * theirs.epistemic / 4000).sqrt()
    assert ((ours.mean - theirs.mean).abs() < 4.5 * error).all()
    torch.testing.assert_close(ours.epistemic, theirs.epistemic, rtol=0.15, atol=0)
    again = pd.predict(model, guide, x, samples=4000, seed=0, compile=True)
    assert again.mean.equal(ours.mean)
