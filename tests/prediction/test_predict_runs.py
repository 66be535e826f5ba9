"""How ``predict`` runs: seeds, modes, memory and compiled blocks, what it refuses."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pyro_dropout as pd
from pyro_dropout.prediction import weight_draws
from tests.oracles.memory import peak_allocated
from tests.oracles.predictions import close_by_chance, enumerated, problem

# --- how it runs ------------------------------------------------------------------------------------------------------


def test_networks_are_in_evaluation_mode_and_put_back() -> None:
    net = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Dropout(0.9), nn.Linear(3, 1))
    model = pd.BayesianNet(net)
    net[2].eval()
    modes = [module.training for module in model.modules()]
    before = {name: value.clone() for name, value in model.state_dict().items()}
    for shared in (False, True):
        answer = pd.predict(model, pd.AutoDropout(model, keep=1.0), torch.randn(6, 2), samples=3, shared=shared)
        assert answer.epistemic.max() < 1e-10  # nothing is dropped, by the guide or by the layer
        assert not answer.mean.requires_grad
    assert [module.training for module in model.modules()] == modes
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("shared", [False, True])
def test_when_memory_runs_out_the_blocks_are_halved(monkeypatch: pytest.MonkeyPatch, shared: bool) -> None:
    kind = weight_draws.WholeFunctions if shared else weight_draws.PerExample
    enough, run, tried = 13, kind.outputs, []

    def outputs(self: Any, weights: Any, x: Tensor, count: int) -> Tensor:
        tried.append(count * len(x))
        if tried[-1] > enough:
            torch.rand(3)  # random numbers that were used in vain
            raise torch.OutOfMemoryError("no memory")
        return run(self, weights, x, count)

    monkeypatch.setattr(kind, "outputs", outputs)
    model = pd.BayesianNet(nn.Linear(2, 1))
    guide, x = pd.AutoMeanField(model), torch.ones(7, 2)
    options: Any = {"samples": 30, "shared": shared, "seed": 1}
    answer = pd.predict(model, guide, x, chunk=64, **options)
    assert max(tried) > enough
    assert sum(rows for rows in tried if rows > enough) <= 2 * max(tried)  # what is left is not tried at full size
    f = answer.samples
    assert torch.allclose(answer.mean, f.mean(0), atol=1e-5)
    assert torch.allclose(answer.epistemic, f.var(0, correction=0), atol=1e-5)
    if shared:
        assert torch.allclose(f, f[:, :1].expand_as(f), atol=1e-6)
    assert len(f[:, 0].unique()) == 30
    enough = 0
    with pytest.raises(torch.OutOfMemoryError):
        pd.predict(model, guide, x, **options)


@pytest.mark.deep
def test_memory_does_not_grow_with_the_draws() -> None:
    model, guide, _ = problem(pd.Categorical(), out=3)
    x = torch.randn(100, 2)

    def peak(samples: int) -> int:
        options: Any = {"samples": samples, "keep_samples": False, "chunk": 1000}
        return peak_allocated(lambda: pd.predict(model, guide, x, **options).mean)

    peak(10)
    assert peak(400) <= 1.05 * peak(20)


@pytest.mark.deep
def test_compiled_blocks_say_the_same() -> None:
    """Both runs estimate the same mean and variance: their difference is tested at 5.5 standard errors."""
    model, guide, x = problem()
    count = 4_000
    options: Any = {"samples": count, "compile": True, "seed": 2, "chunk": 10_000}
    answer = pd.predict(model, guide, x, keep_samples=False, **options)
    f, probs = enumerated(guide, x, 0.7)
    f = f.squeeze(-1)
    mean = probs @ f
    variance, fourth = probs @ (f - mean) ** 2, probs @ (f - mean) ** 4
    close_by_chance(answer.mean[:, 0], mean, (variance / count).sqrt())
    close_by_chance(answer.epistemic[:, 0], variance, ((fourth - variance**2) / count).sqrt())
    kept = pd.predict(model, guide, x, keep_samples=True, **options)
    assert torch.equal(kept.mean, answer.mean)
    assert len(kept.samples[:, 0].unique()) > 16  # masks are drawn anew by each draw, and by each block
    assert not torch.equal(kept.samples[:2000], kept.samples[2000:])


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shared", [False, True])
def test_a_posterior_of_another_model_is_refused(shared: bool) -> None:
    model = pd.BayesianNet(nn.Linear(2, 1))
    other = pd.AutoMeanField(pd.BayesianNet(nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))))
    sampled = pd.prediction.SampledPosterior({"bias": torch.randn(2, 50, 1)})
    for posterior in (other, sampled):
        with pytest.raises(
            pd.errors.PyroDropoutError, match="the posterior has no site 'weight', which the model samples"
        ):
            pd.predict(model, posterior, torch.randn(4, 2), samples=5, shared=shared)
